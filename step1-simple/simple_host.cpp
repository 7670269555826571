// From a tensor to a rung: checks, allocation, dispatch. The only place of this stage where torch and kernels meet.
#include "simple_host.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <kf/host.h>

#include "simple_cpu.h"

namespace kf::step1 {
namespace {

Op<kf::scale::Args> scale_op() {
  return {"scale", cpu::scale, emulated::scale::rungs(), gpu::scale::rungs(),
          [](const kf::scale::Args&) { return "v2_vector"; }};
}

Op<kf::bias_gelu::Args> bias_gelu_op() {
  return {"bias_gelu", cpu::bias_gelu, emulated::bias_gelu::rungs(), gpu::bias_gelu::rungs(),
          [](const kf::bias_gelu::Args&) { return "v2_vector"; }};
}

}  // namespace

at::Tensor& scale_out(const at::Tensor& x, double factor, std::string_view rung, at::Tensor& out) {
  check_floating("scale", "x", x);
  check_out("scale", "out", out, x.sizes(), "x", x);
  check_no_overlap("scale", "out", out, "x", x);
  if (x.numel() == 0) return out;
  const at::Tensor contiguous = x.contiguous();
  run(scale_op(), std::string(rung), x, {contiguous.data_ptr(), out.data_ptr(), x.numel(), factor, dtype_of(x)});
  return out;
}

at::Tensor scale(const at::Tensor& x, double factor, std::string_view rung) {
  at::Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  return scale_out(x, factor, rung, out);
}

at::Tensor& bias_gelu_out(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate,
                          std::string_view rung, at::Tensor& out) {
  check_floating("bias_gelu", "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1, "bias_gelu: `x` must have at least 1 dimension, got 0 (shape ())");
  TORCH_CHECK_VALUE(x.size(-1) > 0, "bias_gelu: the last dimension of `x` must not be 0, got shape ", shape_text(x));
  check_like("bias_gelu", "bias", bias, "x", x);
  check_shape("bias_gelu", "bias", bias, {x.size(-1)});
  TORCH_CHECK_VALUE(approximate == "tanh" || approximate == "none",
                    "bias_gelu: `approximate` must be 'tanh' or 'none', got '", approximate, "'");
  check_out("bias_gelu", "out", out, x.sizes(), "x", x);
  check_no_overlap("bias_gelu", "out", out, "x", x);
  check_no_overlap("bias_gelu", "out", out, "bias", bias);
  if (x.numel() == 0) return out;
  const at::Tensor contiguous = x.contiguous();
  const at::Tensor contiguous_bias = bias.contiguous();
  run(bias_gelu_op(), std::string(rung), x,
      {contiguous.data_ptr(), contiguous_bias.data_ptr(), out.data_ptr(), x.numel() / x.size(-1), x.size(-1),
       approximate == "tanh", dtype_of(x)});
  return out;
}

at::Tensor bias_gelu(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate, std::string_view rung) {
  at::Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  return bias_gelu_out(x, bias, approximate, rung, out);
}

at::Tensor bias_gelu_autocast(const at::Tensor& x, const at::Tensor& bias, std::string_view approximate,
                              std::string_view rung) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("step1_simple::bias_gelu", "").typed<decltype(bias_gelu)>();
  const c10::DeviceType device = x.device().type();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  return op.call(at::autocast::cached_cast(dtype, x, device), at::autocast::cached_cast(dtype, bias, device),
                 approximate, rung);
}

std::vector<std::string> rungs(const std::string& op, bool on_gpu) {
  if (op == "scale") return rung_names(scale_op(), on_gpu);
  if (op == "bias_gelu") return rung_names(bias_gelu_op(), on_gpu);
  TORCH_CHECK_VALUE(false, "rungs: `op` must be 'scale' or 'bias_gelu', got '", op, "'");
}

}  // namespace kf::step1
