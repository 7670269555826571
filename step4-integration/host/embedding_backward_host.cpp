// From a gradient and ids to a rung: checks, and the sort. torch's sort and search do what a library does best.
#include "host/embedding_backward_host.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sort.h>
#include <kf/define_op.h>

#include <limits>

#include "cpu/embedding_backward_cpu.h"
#include "host/integration_host.h"

namespace kf::step4 {
namespace {

constexpr const char* kOp = "embedding_backward";

Op<kf::embedding_backward::Args> embedding_backward_op() {
  return {kOp, cpu::embedding_backward, emulated::embedding_backward::rungs(), gpu::embedding_backward::rungs(),
          kf::embedding_backward::automatic};
}

}  // namespace

void embedding_backward(const at::Tensor& grad, const at::Tensor& ids, int64_t vocab, std::string_view rung,
                        at::Tensor& out) {
  check_floating(kOp, "grad", grad);
  check_dim(kOp, "grad", grad, 3);
  check_id_type(kOp, ids);
  check_device(kOp, "ids", ids, "grad", grad);
  check_shape(kOp, "ids", ids, {grad.size(0), grad.size(1)});
  // Ids are sorted as 32 bits, in half the time; `vocab` itself stands for those past the table.
  TORCH_CHECK_VALUE(vocab >= 0 && vocab < std::numeric_limits<int32_t>::max(), kOp, ": `vocab` must be from 0 to ",
                    std::numeric_limits<int32_t>::max() - 1, ", got ", vocab);
  const int64_t width = grad.size(2);
  make_or_check_out(kOp, "out", out, {vocab, width}, "grad", grad);
  check_apart(kOp, {{"out", out}}, {{"grad", grad}, {"ids", ids}});
  check_rung(embedding_backward_op(), rung, grad);
  if (ids.is_cpu()) check_ids(kOp, ids.contiguous(), vocab);
  if (out.numel() == 0) return;
  if (ids.numel() == 0) {
    out.zero_();
    return;
  }
  const at::Tensor rows = grad.contiguous(), flat = ids.reshape({-1});
  const at::Tensor narrow = flat.scalar_type() == at::kInt ? flat : at::clamp(flat, -1, vocab).to(at::kInt);
  const auto [sorted, order] = at::sort(narrow, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor first = at::searchsorted(sorted, at::arange(vocab + 1, sorted.options()));
  run(embedding_backward_op(), rung, grad,
      {rows.data_ptr(), sorted.const_data_ptr<int32_t>(), order.const_data_ptr<int64_t>(),
       first.const_data_ptr<int64_t>(), out.data_ptr(), nullptr, ids.numel(), width, vocab, dtype_of(grad)});
}

OpInfo describe_embedding_backward() { return describe(embedding_backward_op()); }

}  // namespace kf::step4
