// From a tensor to a rung for cross-entropy. Behind the LM head the products are torch's: they are no lesson of this
// op.
#include "host/cross_entropy_host.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <kf/define_op.h>

#include <algorithm>

#include "cpu/cross_entropy_cpu.h"

namespace kf::step4 {
namespace {

using at::Tensor;

// The most bytes of logits at once, where the caller leaves that open: GPT-2's 16·1024 rows in a half type are less.
constexpr int64_t kLogitBytes = int64_t{2} << 30;
constexpr int64_t kNone[] = {0};  // the shape of a gradient that is not wanted

Op<kf::cross_entropy::Args> op_called(const char* name) {
  return {name, cpu::cross_entropy, emulated::cross_entropy::rungs(), gpu::cross_entropy::rungs(),
          kf::cross_entropy::automatic};
}

at::ScalarType loss_type(const Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_targets(const char* op, const Tensor& targets, int64_t rows, const char* first_name, const Tensor& first) {
  check_type(op, "targets", targets, at::kLong);
  check_device(op, "targets", targets, first_name, first);
  check_dim(op, "targets", targets, 1);
  check_shape(op, "targets", targets, {rows});
}

// CPU tensors only: on a GPU the host would have to wait for the targets, so there the kernel writes NaN instead.
void check_values(const char* op, const Tensor& targets, int64_t width, int64_t ignore_index) {
  if (!targets.is_cpu()) return;
  const int64_t* first = targets.const_data_ptr<int64_t>();
  const int64_t* last = first + targets.numel();
  const int64_t* bad = std::find_if(
      first, last, [&](int64_t target) { return target != ignore_index && (target < 0 || target >= width); });
  TORCH_CHECK_VALUE(bad == last, op, ": `targets` must be from 0 to ", width - 1, ", the columns of the logits, or ",
                    ignore_index, ", got ", *bad, " at ", bad - first);
}

void check_logits(const char* op, const Tensor& logits, const Tensor& targets) {
  check_floating(op, "logits", logits);
  check_dim(op, "logits", logits, 2);
  check_rows(op, "logits", logits);
  check_targets(op, targets, logits.size(0), "logits", logits);
}

void make_or_check_loss(const char* op, const char* name, Tensor& out, at::IntArrayRef shape, const Tensor& logits) {
  if (!out.defined()) out = at::empty(shape, logits.options().dtype(loss_type(logits)));
  check_type(op, name, out, loss_type(logits));
  check_device(op, name, out, "logits", logits);
  check_shape(op, name, out, shape);
  TORCH_CHECK_VALUE(out.is_contiguous(), op, ": `", name, "` must be contiguous");
}

// Of rows in one piece each. `lse` and `grad` may be undefined: not wanted.
void run_rows(const Op<kf::cross_entropy::Args>& op, std::string_view rung, const Tensor& logits, const Tensor& targets,
              int64_t ignore_index, const Tensor& loss, const Tensor& lse, const Tensor& grad) {
  const auto pointer = [](const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; };
  run(op, rung, logits,
      {logits.data_ptr(), targets.const_data_ptr<int64_t>(), loss.data_ptr(), pointer(lse), pointer(grad),
       logits.size(0), logits.size(1), logits.stride(0), grad.defined() ? grad.stride(0) : 0, ignore_index,
       dtype_of(logits)});
}

// ---- behind a product ----

// So many columns of logits have rows of whole 128 bytes: GPT-2's 50257 get 47 more in half types. It is not enough
// that rows begin there: for a product of which a size is odd cuBLAS takes an older kernel, on an H200 1.6 to 6 times
// as slow.
int64_t padded(int64_t vocab, const Tensor& like) {
  const int64_t line = 128 / like.element_size();
  return (vocab + line - 1) / line * line;
}

// With rows of 0 below, for those columns.
Tensor with_more_rows(const Tensor& weight, int64_t rows) {
  if (rows == weight.size(0)) return weight;
  const Tensor taller = at::empty({rows, weight.size(1)}, weight.options());
  taller.narrow(0, 0, weight.size(0)).copy_(weight);
  taller.narrow(0, weight.size(0), rows - weight.size(0)).zero_();
  return taller;
}

// total += dlogitsᵀ·hidden, total in float32 where these are of a half type. On a GPU the product comes in float32 from
// the accumulators; on a CPU there is no such product, and each chunk's is rounded.
void add_product(Tensor& total, const Tensor& dlogits, const Tensor& hidden, bool first) {
  if (total.scalar_type() == hidden.scalar_type()) {
    first ? at::mm_out(total, dlogits.t(), hidden) : total.addmm_(dlogits.t(), hidden);
  } else if (hidden.is_cuda()) {
    if (first) {
      at::mm_out(total, dlogits.t(), hidden, at::kFloat);
    } else {
      total.add_(at::mm(dlogits.t(), hidden, at::kFloat));
    }
  } else {
    const Tensor product = at::mm(dlogits.t(), hidden);
    first ? total.copy_(product) : total.add_(product);
  }
}

int64_t default_chunk(int64_t rows, int64_t vocab, int64_t element) {
  const int64_t most = std::max<int64_t>(1, kLogitBytes / (vocab * element));
  const int64_t chunks = std::max<int64_t>(1, (rows + most - 1) / most);
  return (rows + chunks - 1) / chunks;  // all of about one size
}

}  // namespace

void cross_entropy(const Tensor& logits, const Tensor& targets, int64_t ignore_index, bool keep, std::string_view rung,
                   Tensor& loss, Tensor& lse, Tensor& grad) {
  const char* const op = "cross_entropy";
  check_logits(op, logits, targets);
  make_or_check_loss(op, "loss", loss, {logits.size(0)}, logits);
  make_or_check_loss(op, "lse", lse, {logits.size(0)}, logits);
  make_or_check_out(op, "grad", grad, keep ? logits.sizes() : kNone, "logits", logits);
  check_apart(op, {{"loss", loss}, {"lse", lse}, {"grad", grad}}, {{"logits", logits}, {"targets", targets}});
  check_rung(op_called(op), rung, logits);
  if (logits.numel() == 0) return;
  const Tensor whole_targets = targets.contiguous();
  check_values(op, whole_targets, logits.size(1), ignore_index);
  run_rows(op_called(op), rung, with_whole_rows(logits), whole_targets, ignore_index, loss, lse,
           keep ? grad : Tensor());
}

Tensor cross_entropy_backward_(Tensor& logits, const Tensor& targets, int64_t ignore_index, std::string_view rung) {
  const char* const op = "cross_entropy_backward_";
  check_logits(op, logits, targets);
  const int64_t rows = logits.size(0), width = logits.size(1);
  TORCH_CHECK_VALUE((logits.stride(1) == 1 || width == 1) && (logits.stride(0) >= width || rows <= 1), op,
                    ": `logits` must have rows in one piece that do not overlap, got strides (", logits.stride(0), ", ",
                    logits.stride(1), ")");
  check_apart(op, {{"logits", logits}}, {{"targets", targets}});
  check_rung(op_called(op), rung, logits);
  Tensor loss = at::empty({rows}, logits.options().dtype(loss_type(logits)));
  if (rows == 0) return loss;
  const Tensor whole_targets = targets.contiguous();
  check_values(op, whole_targets, width, ignore_index);
  run_rows(op_called(op), rung, logits, whole_targets, ignore_index, loss, {}, logits);
  return loss;
}

void linear_cross_entropy(const Tensor& hidden, const Tensor& weight, const Tensor& targets, int64_t ignore_index,
                          std::optional<int64_t> chunk, bool keep_hidden, bool keep_weight, std::string_view rung,
                          Tensor& loss, Tensor& scale, Tensor& grad_hidden, Tensor& grad_weight) {
  const char* const name = "linear_cross_entropy";
  const auto op = op_called(name);
  check_dim(name, "hidden", hidden, 2);
  check_rows(name, "hidden", hidden);
  check_like(name, "weight", weight, "hidden", hidden);
  check_dim(name, "weight", weight, 2);
  const int64_t rows = hidden.size(0), width = hidden.size(1), vocab = weight.size(0);
  check_shape(name, "weight", weight, {vocab, width});
  TORCH_CHECK_VALUE(vocab > 0, name, ": `weight` must not be empty, got shape ", shape_text(weight));
  check_targets(name, targets, rows, "hidden", hidden);
  TORCH_CHECK_VALUE(!chunk || *chunk > 0, name, ": `chunk` must be at least 1, got ", chunk.value_or(0));
  make_or_check_loss(name, "loss", loss, {}, hidden);
  make_or_check_loss(name, "scale", scale, {}, hidden);
  make_or_check_out(name, "grad_hidden", grad_hidden, keep_hidden ? hidden.sizes() : kNone, "hidden", hidden);
  // In the losses' type: the sum over all rows is rounded once, when it has been scaled. One that is made here has at
  // first a row for each column of logits.
  const int64_t columns = padded(vocab, hidden);
  const bool given = grad_weight.defined();
  if (!given && keep_weight) {
    grad_weight = at::empty({columns, width}, loss.options());
  } else {
    make_or_check_loss(name, "grad_weight", grad_weight, keep_weight ? weight.sizes() : kNone, hidden);
  }
  check_apart(name, {{"loss", loss}, {"scale", scale}, {"grad_hidden", grad_hidden}, {"grad_weight", grad_weight}},
              {{"hidden", hidden}, {"weight", weight}, {"targets", targets}});
  check_rung(op, rung, hidden);
  const Tensor whole_targets = targets.contiguous();
  check_values(name, whole_targets, vocab, ignore_index);

  const int64_t step =
      std::max<int64_t>(1, std::min(chunk.value_or(default_chunk(rows, vocab, hidden.element_size())), rows));
  const Tensor losses = at::empty({rows}, loss.options());
  const Tensor head = with_more_rows(weight, columns);
  const Tensor logits = at::empty({std::min(step, rows), columns}, hidden.options());
  Tensor total = given && keep_weight && columns != vocab ? at::empty({columns, width}, loss.options()) : grad_weight;
  if (rows == 0) total.zero_();
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t count = std::min(step, rows - begin);
    const Tensor inputs = hidden.narrow(0, begin, count);
    Tensor whole = logits.narrow(0, 0, count);
    at::mm_out(whole, inputs, head.t());
    whole.narrow(1, vocab, columns - vocab).zero_();  // and not NaN, where a row of hidden is
    const Tensor of_chunk = whole.narrow(1, 0, vocab);
    run_rows(op, rung, of_chunk, whole_targets.narrow(0, begin, count), ignore_index, losses.narrow(0, begin, count),
             {}, keep_hidden || keep_weight ? of_chunk : Tensor());
    if (keep_hidden) {
      Tensor of_inputs = grad_hidden.narrow(0, begin, count);
      at::mm_out(of_inputs, whole, head);
    }
    if (keep_weight) add_product(total, whole, inputs, begin == 0);
  }
  if (!total.is_same(grad_weight)) {
    grad_weight.copy_(total.narrow(0, 0, vocab));
  } else if (keep_weight) {
    grad_weight.resize_({vocab, width});  // smaller: it stays where it is
  }
  const Tensor count = whole_targets.ne(ignore_index).sum().to(loss.scalar_type());
  loss.copy_(losses.sum().div(count));           // of none: NaN, as in PyTorch
  scale.copy_(count.clamp_min(1).reciprocal());  // and there the gradients are 0
}

OpInfo describe_cross_entropy() { return describe(op_called("cross_entropy")); }

}  // namespace kf::step4
