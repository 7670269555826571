// What ops say of their arguments: checks, each with an error that names the op, the argument, what it is and what it
// must be; and tensors as kernels want them. The same checks of shapes and dtypes without data are
// kernel_fusion/ops.py's.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <kf/rung.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

namespace kf {

// ---- checks ----

inline std::string shape_text(const at::Tensor& t) {
  std::ostringstream text;
  text << "(";
  for (int64_t i = 0; i < t.dim(); ++i) text << (i ? ", " : "") << t.size(i);
  text << (t.dim() == 1 ? ",)" : ")");
  return text.str();
}

// "float32", as Python writes it.
inline std::string dtype_text(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }
inline std::string dtype_text(const at::Tensor& t) { return dtype_text(t.scalar_type()); }

inline DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::kFloat32;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kDouble: return DType::kFloat64;
    default: TORCH_CHECK_TYPE(false, "no kernel type for ", dtype_text(type));
  }
}
inline DType dtype_of(const at::Tensor& t) { return dtype_of(t.scalar_type()); }

inline void check_floating(const char* op, const char* name, const at::Tensor& t) {
  const auto type = t.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble, op, ": `",
                   name, "` must be float32, float16, bfloat16 or float64, got ", dtype_text(t));
}

inline void check_type(const char* op, const char* name, const at::Tensor& t, at::ScalarType type) {
  TORCH_CHECK_TYPE(t.scalar_type() == type, op, ": `", name, "` must be ", dtype_text(type), ", got ", dtype_text(t));
}

// On the device of the op's first argument.
inline void check_device(const char* op, const char* name, const at::Tensor& t, const char* first_name,
                         const at::Tensor& first) {
  TORCH_CHECK_VALUE(t.device() == first.device(), op, ": `", name, "` must be on the device of `", first_name, "` (",
                    first.device(), "), got ", t.device());
}

// Same dtype and device as the op's first argument.
inline void check_like(const char* op, const char* name, const at::Tensor& t, const char* first_name,
                       const at::Tensor& first) {
  TORCH_CHECK_TYPE(t.scalar_type() == first.scalar_type(), op, ": `", name, "` must have the dtype of `", first_name,
                   "` (", dtype_text(first), "), got ", dtype_text(t));
  check_device(op, name, t, first_name, first);
}

inline void check_dim(const char* op, const char* name, const at::Tensor& t, int64_t dim) {
  TORCH_CHECK_VALUE(t.dim() == dim, op, ": `", name, "` must have ", dim, dim == 1 ? " dimension" : " dimensions",
                    ", got ", t.dim(), " (shape ", shape_text(t), ")");
}

inline void check_shape(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef shape) {
  if (t.sizes() == shape) return;
  std::ostringstream text;
  for (size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "") << shape[i];
  TORCH_CHECK_VALUE(false, op, ": `", name, "` must have shape (", text.str(), shape.size() == 1 ? ",)" : ")", ", got ",
                    shape_text(t));
}

inline void check_like(const char* op, const char* name, const at::Tensor& t, const char* first_name,
                       const at::Tensor& first, at::IntArrayRef shape) {
  check_like(op, name, t, first_name, first);
  check_shape(op, name, t, shape);
}

// Rows that are not empty: [..., width]. Returns the width.
inline int64_t check_rows(const char* op, const char* name, const at::Tensor& t) {
  check_floating(op, name, t);
  TORCH_CHECK_VALUE(t.dim() >= 1, op, ": `", name, "` must have at least 1 dimension, got 0 (shape ())");
  TORCH_CHECK_VALUE(t.size(-1) > 0, op, ": the last dimension of `", name, "` must not be 0, got shape ",
                    shape_text(t));
  return t.size(-1);
}

// An `out` tensor is written in place as it lies: right shape, dtype and device, contiguous.
inline void check_out(const char* op, const char* name, const at::Tensor& out, at::IntArrayRef shape,
                      const char* first_name, const at::Tensor& first) {
  check_like(op, name, out, first_name, first, shape);
  TORCH_CHECK_VALUE(out.is_contiguous(), op, ": `", name, "` must be contiguous");
}

// A tensor, and what its op calls it.
struct Named {
  const char* name;
  const at::Tensor& tensor;
};

// No output shares memory with an input or another output: a kernel that reads where another thread writes gives
// whatever it finds. (What lies in pieces is copied before it is read, or is not looked into, as in PyTorch.)
inline void check_apart(const char* op, std::initializer_list<Named> outs, std::initializer_list<Named> inputs) {
  const auto check = [&](const Named& out, const Named& other) {
    const at::MemOverlapStatus status = at::get_overlap_status(out.tensor, other.tensor);
    TORCH_CHECK_VALUE(status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial, op, ": `",
                      out.name, "` must not share memory with `", other.name, "`");
  };
  for (auto out = outs.begin(); out != outs.end(); ++out) {
    for (const Named& input : inputs) check(*out, input);
    for (auto before = outs.begin(); before != out; ++before) check(*out, *before);
  }
}

// ---- tensors as kernels want them ----

inline at::Tensor contiguous_like(const at::Tensor& t) { return at::empty_like(t, at::MemoryFormat::Contiguous); }

// For kernels that take rows at any distance, but each row in one piece.
inline at::Tensor with_whole_rows(const at::Tensor& t) {
  return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous();
}

inline bool begins_at_16_bytes(const at::Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0; }

// In one piece that begins at a multiple of 16 bytes, as vectors and TMA want it.
inline at::Tensor in_one_piece(const at::Tensor& t) {
  const at::Tensor whole = t.contiguous();
  return begins_at_16_bytes(whole) ? whole : whole.clone();
}

// For tensor cores and TMA, of q, k and v: half types in rows that begin at multiples of 16 bytes, each in a place of
// its own. Others are copied; those that could not be so, whose head_dim is no multiple of 8, stay as they are. So do
// wider types. `for_decode`: where no rung uses TMA, rows may share a place, and some load vectors of float32, too.
inline bool has_aligned_rows(const at::Tensor& t, bool for_decode = false) {
  const int64_t vector = 16 / t.element_size();
  if ((t.element_size() != 2 && !for_decode) || t.size(3) % vector != 0) return true;
  bool aligned = begins_at_16_bytes(t);
  for (int64_t dim = 0; dim < 3; ++dim) {
    aligned = aligned && (t.size(dim) <= 1 || (t.stride(dim) % vector == 0 && (t.stride(dim) > 0 || for_decode)));
  }
  return aligned;
}

inline at::Tensor with_aligned_rows(const at::Tensor& t, bool for_decode = false) {
  const at::Tensor whole = with_whole_rows(t);
  return has_aligned_rows(whole, for_decode) ? whole : whole.clone(at::MemoryFormat::Contiguous);
}

}  // namespace kf
