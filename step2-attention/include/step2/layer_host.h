// What host files of the ops around a matrix product share: checks of a layer's tensors, and a rung's arguments made of
// them.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <optional>
#include <tuple>
#include <vector>

namespace kf {

// Whether PyTorch's own products of float32 may round to TF32.
inline bool tf32_allowed() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
         at::Float32Precision::TF32;
}

// A weight with `depth` rows, [depth, width], or, transposed, [width, depth]. Returns its width, above 0.
inline int64_t check_weight(const char* op, const char* name, const at::Tensor& weight, bool transposed, int64_t depth,
                            const char* first_name, const at::Tensor& first) {
  check_like(op, name, weight, first_name, first);
  check_dim(op, name, weight, 2);
  const int64_t width = weight.size(transposed ? 0 : 1);
  check_shape(op, name, weight, transposed ? at::IntArrayRef{width, depth} : at::IntArrayRef{depth, width});
  TORCH_CHECK_VALUE(width > 0, op, ": `", name, "` must not be empty, got shape ", shape_text(weight));
  return width;
}

// x [..., depth], its weight and its bias [width]. Returns the width.
inline int64_t check_layer(const char* op, const at::Tensor& x, const at::Tensor& weight,
                           const std::optional<at::Tensor>& bias, bool transposed) {
  const int64_t depth = check_rows(op, "x", x);
  const int64_t width = check_weight(op, "weight", weight, transposed, depth, "x", x);
  if (bias) check_like(op, "bias", *bias, "x", x, {width});
  return width;
}

// The shape of x with another last dimension.
inline std::vector<int64_t> with_width(const at::Tensor& x, int64_t width) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = width;
  return shape;
}

inline at::Tensor empty_rows(const at::Tensor& x, int64_t width) {
  return at::empty(with_width(x, width), x.options());
}

// grad [..., width], x [..., depth] and the weight between them, for a backward pass.
inline void check_backward(const char* op, const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                           bool transposed) {
  const int64_t width = check_rows(op, "grad", grad);
  check_like(op, "x", x, "grad", grad);
  TORCH_CHECK_VALUE(x.dim() == grad.dim() && x.sizes().slice(0, x.dim() - 1) == grad.sizes().slice(0, grad.dim() - 1),
                    op, ": `x` must have the shape of `grad` but for the last dimension, got ", shape_text(x), " and ",
                    shape_text(grad));
  TORCH_CHECK_VALUE(x.size(-1) > 0, op, ": the last dimension of `x` must not be 0, got shape ", shape_text(x));
  check_like(op, "weight", weight, "grad", grad,
             transposed ? at::IntArrayRef{width, x.size(-1)} : at::IntArrayRef{x.size(-1), width});
}

inline void check_gradients(const char* op, const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& grad_x, const at::Tensor& grad_weight, const at::Tensor& grad_bias,
                            std::initializer_list<Named> more_inputs = {}) {
  check_out(op, "grad_x", grad_x, x.sizes(), "grad", grad);
  check_out(op, "grad_weight", grad_weight, weight.sizes(), "grad", grad);
  check_out(op, "grad_bias", grad_bias, {grad.size(-1)}, "grad", grad);
  const std::initializer_list<Named> outs = {
      {"grad_x", grad_x}, {"grad_weight", grad_weight}, {"grad_bias", grad_bias}};
  check_apart(op, outs, {{"grad", grad}, {"x", x}, {"weight", weight}});
  check_apart(op, outs, more_inputs);
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> empty_gradients(const at::Tensor& grad, const at::Tensor& x,
                                                                      const at::Tensor& weight) {
  return {contiguous_like(x), contiguous_like(weight), at::empty({grad.size(-1)}, grad.options())};
}

// ---- tensors as rungs want them ----

inline void* data_or_null(const at::Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; }

// A layer's inputs in one piece, and where its sizes go in a rung's arguments.
struct Layer {
  at::Tensor x, weight, bias;
  int64_t depth, width;
  bool transposed;

  Layer(const at::Tensor& x_, const at::Tensor& weight_, const std::optional<at::Tensor>& bias_, bool transposed_)
      : x(in_one_piece(x_)),
        weight(in_one_piece(weight_)),
        bias(bias_ ? in_one_piece(*bias_) : at::Tensor()),
        depth(x_.size(-1)),
        width(weight_.size(transposed_ ? 0 : 1)),
        transposed(transposed_) {}

  template <class Args>
  Args args() const {
    Args a{};
    a.x = x.data_ptr();
    a.weight = weight.data_ptr();
    if constexpr (requires { a.bias; }) a.bias = data_or_null(bias);
    a.rows = x.numel() / depth;
    a.depth = depth;
    a.width = width;
    a.weight_transposed = transposed;
    a.tf32 = tf32_allowed();
    a.dtype = dtype_of(x);
    return a;
  }
};

// A backward pass: grad in one piece besides, and where the gradients go.
struct Backward : Layer {
  at::Tensor grad;

  Backward(const at::Tensor& grad_, const at::Tensor& x, const at::Tensor& weight, bool transposed)
      : Layer(x, weight, std::nullopt, transposed), grad(in_one_piece(grad_)) {}

  template <class Args>
  Args args(const at::Tensor& grad_x, const at::Tensor& grad_weight, const at::Tensor& grad_bias) const {
    Args a = Layer::args<Args>();
    a.grad = grad.data_ptr();
    a.grad_x = grad_x.data_ptr();
    a.grad_weight = grad_weight.data_ptr();
    a.grad_bias = grad_bias.data_ptr();
    return a;
  }
};

// Sums over no rows. Returns whether there are none.
inline bool no_rows(const at::Tensor& grad, at::Tensor& grad_weight, at::Tensor& grad_bias) {
  if (grad.numel() != 0) return false;
  grad_weight.zero_();
  grad_bias.zero_();
  return true;
}

}  // namespace kf
