// all_reduce: checks, allocation, dispatch.
#include "host/all_reduce_host.h"

#include "host/integration_host.h"
#include "kernels/all_reduce/rungs.h"

namespace kf::step4 {
namespace {

// What is plain on a CPU is torch.distributed.
void named_only(const kf::all_reduce::Args&) {
  TORCH_CHECK_VALUE(false,
                    "all_reduce: `rung` must be the name of one for tensors on the CPU; without emulation, "
                    "torch.distributed.all_reduce sums there");
}

Op<kf::all_reduce::Args> all_reduce_op() {
  return {"all_reduce", named_only, emulated::all_reduce::rungs(), gpu::all_reduce::rungs(), kf::all_reduce::automatic};
}

}  // namespace

int64_t all_reduce_bytes(int64_t width, int64_t workers) { return kf::all_reduce::buffer_bytes(width, workers); }
int64_t all_reduce_header() { return sizeof(kf::all_reduce::Header); }
std::tuple<int64_t, int64_t> all_reduce_most() { return {kf::all_reduce::kMostWorkers, kf::all_reduce::kMostWidth}; }

std::tuple<at::Tensor, at::Tensor> all_reduce(const at::Tensor& x, const at::Tensor& x_bias, const at::Tensor& residual,
                                              const at::Tensor& weight, const at::Tensor& bias, at::Tensor& buffer,
                                              at::IntArrayRef peers, int64_t rank, double eps, double patience,
                                              std::string_view rung) {
  const int64_t width = check_rows("all_reduce", "x", x);
  TORCH_CHECK_TYPE(x.scalar_type() != at::kDouble, "all_reduce: `x` must be float32, float16 or bfloat16, got float64");
  TORCH_CHECK_VALUE(width <= kf::all_reduce::kMostWidth, "all_reduce: rows of `x` must be of ",
                    kf::all_reduce::kMostWidth, " at most, got ", width);
  check_like("all_reduce", "x_bias", x_bias, "x", x, {width});
  check_like("all_reduce", "residual", residual, "x", x, x.sizes());
  check_like("all_reduce", "weight", weight, "x", x, {width});
  check_like("all_reduce", "bias", bias, "x", x, {width});
  const auto workers = static_cast<int64_t>(peers.size());
  TORCH_CHECK_VALUE(workers >= 1 && workers <= kf::all_reduce::kMostWorkers, "all_reduce: `peers` must be from 1 to ",
                    kf::all_reduce::kMostWorkers, " addresses, got ", workers);
  check_peers("all_reduce", buffer, peers, rank, "x", x, width, all_reduce_bytes(width, workers), patience);
  check_rung(all_reduce_op(), rung, x);
  at::Tensor y = contiguous_like(x), sum = contiguous_like(x);
  if (x.numel() == 0) return {y, sum};
  // Whether rows are read as vectors decides how they are sent, so it must not depend on where a worker's lie.
  const at::Tensor rows = in_one_piece(x), x_bias_ = in_one_piece(x_bias), residual_ = in_one_piece(residual),
                   weight_ = in_one_piece(weight), bias_ = in_one_piece(bias);
  kf::all_reduce::Args args{rows.data_ptr(),
                            x_bias_.data_ptr(),
                            residual_.data_ptr(),
                            weight_.data_ptr(),
                            bias_.data_ptr(),
                            y.data_ptr(),
                            sum.data_ptr(),
                            x.numel() / width,
                            width,
                            eps,
                            dtype_of(x),
                            {},
                            static_cast<int>(rank),
                            static_cast<int>(workers),
                            kf::all_reduce::slot_bytes(buffer.numel(), workers),
                            static_cast<int64_t>(patience * 1e9)};
  addresses_of(peers, args.peers);
  run(all_reduce_op(), rung, x, args);
  return {y, sum};
}

OpInfo all_reduce_info() {
  OpInfo info = describe(all_reduce_op());
  info.cpu_names.erase(info.cpu_names.begin());  // "cpu"
  return info;
}

}  // namespace kf::step4
