// From a tensor to a rung: checks, allocation, dispatch. The only place of this stage where torch and kernels meet.
#include "fused_host.h"

#include <kf/autocast.h>

#include <cmath>

#include "fused_cpu.h"

namespace kf::simt {
std::uint64_t launch_count();  // of common/simt/include/kf_simt.h, whose folder only emulated sources see
}

namespace kf::step3 {
namespace {

// What `auto` takes on CUDA tensors was read off results/h200.json.

// A block a row pays where a row keeps a block busy, and in half types of GPT-2's widths up to 1024; in between a warp
// a row is as fast or faster.
const char* layer_norm_rung(const kf::layer_norm::Args& args) {
  const bool half = args.dtype == DType::kFloat16 || args.dtype == DType::kBFloat16;
  return args.width > 2048 || (half && args.width <= 1024) ? "v2_block" : "v1_naive";
}

Op<kf::layer_norm::Args> layer_norm_op() {
  namespace op = gpu::layer_norm;
  return {"layer_norm", cpu::layer_norm, emulated::layer_norm::rungs(), op::rungs(), layer_norm_rung};
}

Op<kf::residual_layer_norm::Args> residual_layer_norm_op() {
  namespace op = gpu::residual_layer_norm;
  return {"residual_layer_norm", cpu::residual_layer_norm, emulated::residual_layer_norm::rungs(), op::rungs(),
          [](const auto&) { return "v2_fused"; }};
}

Op<kf::attention_residual_layer_norm::Args> attention_residual_layer_norm_op() {
  namespace op = gpu::attention_residual_layer_norm;
  return {"attention_residual_layer_norm", cpu::attention_residual_layer_norm,
          emulated::attention_residual_layer_norm::rungs(), op::rungs(), [](const auto&) { return "v1_separate"; }};
}

Op<kf::attention_block::Args> attention_block_op() {
  namespace op = gpu::attention_block;
  return {"attention_block", cpu::attention_block, emulated::attention_block::rungs(), op::rungs(),
          [](const auto&) { return "v1_separate"; }};
}

// ---- checks ----

void check_eps(const char* op, double eps) {
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps), op, ": `eps` must be a finite number ≥ 0, got ", eps);
}

// q [B, H, Sq, D], k and v [B, H, Sk, D], residual [B, Sq, H·D].
void check_attention(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                     std::optional<double> scale, double eps) {
  check_floating(op, "q", q);
  check_dim(op, "q", q, 4);
  TORCH_CHECK_VALUE(q.size(1) > 0 && q.size(3) > 0, op, ": heads and head_dim of `q` must not be 0, got shape ",
                    shape_text(q));
  check_like(op, "k", k, "q", q);
  check_dim(op, "k", k, 4);
  check_shape(op, "k", k, {q.size(0), q.size(1), k.size(2), q.size(3)});
  check_like(op, "v", v, "q", q, k.sizes());
  check_like(op, "residual", residual, "q", q, {q.size(0), q.size(2), q.size(1) * q.size(3)});
  TORCH_CHECK_VALUE(!scale || std::isfinite(*scale), op, ": `scale` must be finite or None, got ", scale.value_or(0));
  check_eps(op, eps);
}

Heads heads_of(const Tensor& t) { return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }

Attention attention_of(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, std::optional<double> scale) {
  return {heads_of(q), heads_of(k), heads_of(v),
          q.size(0),   q.size(1),   q.size(2),
          k.size(2),   q.size(3),   scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))),
          causal};
}

}  // namespace

// ---- layer_norm ----

Tensor& layer_norm_out(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, std::string_view rung,
                       Tensor& out) {
  const char* op = "layer_norm";
  const int64_t width = check_rows(op, "x", x);
  check_like(op, "weight", weight, "x", x, {width});
  check_like(op, "bias", bias, "x", x, {width});
  check_eps(op, eps);
  check_out(op, "out", out, x.sizes(), "x", x);
  check_apart(op, {{"out", out}}, {{"x", x}, {"weight", weight}, {"bias", bias}});
  check_rung(layer_norm_op(), rung, x);
  if (x.numel() == 0) return out;
  const Tensor in = x.contiguous(), w = weight.contiguous(), b = bias.contiguous();
  run(layer_norm_op(), rung, x,
      {in.data_ptr(), w.data_ptr(), b.data_ptr(), out.data_ptr(), x.numel() / width, width, eps, dtype_of(x)});
  return out;
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, std::string_view rung) {
  Tensor out = contiguous_like(x);
  return layer_norm_out(x, weight, bias, eps, rung, out);
}

// ---- residual_layer_norm ----

std::tuple<Tensor&, Tensor&> residual_layer_norm_out(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                     const Tensor& bias, double eps, std::string_view rung, Tensor& y,
                                                     Tensor& sum) {
  const char* op = "residual_layer_norm";
  const int64_t width = check_rows(op, "x", x);
  check_like(op, "residual", residual, "x", x, x.sizes());
  check_like(op, "weight", weight, "x", x, {width});
  check_like(op, "bias", bias, "x", x, {width});
  check_eps(op, eps);
  check_out(op, "y", y, x.sizes(), "x", x);
  check_out(op, "sum", sum, x.sizes(), "x", x);
  check_apart(op, {{"y", y}, {"sum", sum}}, {{"x", x}, {"residual", residual}, {"weight", weight}, {"bias", bias}});
  check_rung(residual_layer_norm_op(), rung, x);
  if (x.numel() == 0) return {y, sum};
  const Tensor in = x.contiguous(), r = residual.contiguous(), w = weight.contiguous(), b = bias.contiguous();
  run(residual_layer_norm_op(), rung, x,
      {in.data_ptr(), r.data_ptr(), w.data_ptr(), b.data_ptr(), y.data_ptr(), sum.data_ptr(), x.numel() / width, width,
       eps, dtype_of(x)});
  return {y, sum};
}

std::tuple<Tensor, Tensor> residual_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                               const Tensor& bias, double eps, std::string_view rung) {
  Tensor y = contiguous_like(x), sum = contiguous_like(x);
  residual_layer_norm_out(x, residual, weight, bias, eps, rung, y, sum);
  return {y, sum};
}

// ---- attention_residual_layer_norm ----

Tensor& attention_residual_layer_norm_out(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                          const Tensor& weight, const Tensor& bias, bool causal,
                                          std::optional<double> scale, double eps, std::string_view rung, Tensor& out) {
  const char* op = "attention_residual_layer_norm";
  check_attention(op, q, k, v, residual, scale, eps);
  const int64_t width = residual.size(2);
  check_like(op, "weight", weight, "q", q, {width});
  check_like(op, "bias", bias, "q", q, {width});
  check_out(op, "out", out, residual.sizes(), "q", q);
  check_apart(op, {{"out", out}},
              {{"q", q}, {"k", k}, {"v", v}, {"residual", residual}, {"weight", weight}, {"bias", bias}});
  check_rung(attention_residual_layer_norm_op(), rung, q);
  if (out.numel() == 0) return out;
  const Tensor qn = with_whole_rows(q), kn = with_whole_rows(k), vn = with_whole_rows(v);
  const Tensor r = residual.contiguous(), w = weight.contiguous(), b = bias.contiguous();
  run(attention_residual_layer_norm_op(), rung, q,
      {attention_of(qn, kn, vn, causal, scale), r.data_ptr(), w.data_ptr(), b.data_ptr(), out.data_ptr(), eps, nullptr,
       dtype_of(q)});
  return out;
}

Tensor attention_residual_layer_norm(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                     const Tensor& weight, const Tensor& bias, bool causal, std::optional<double> scale,
                                     double eps, std::string_view rung) {
  Tensor out = contiguous_like(residual);
  return attention_residual_layer_norm_out(q, k, v, residual, weight, bias, causal, scale, eps, rung, out);
}

// ---- attention_block ----

std::tuple<Tensor&, Tensor&> attention_block_out(const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const Tensor& residual, const Tensor& proj_weight,
                                                 const Tensor& proj_bias, const Tensor& weight, const Tensor& bias,
                                                 bool causal, std::optional<double> scale, double eps,
                                                 std::string_view rung, Tensor& y, Tensor& sum) {
  const char* op = "attention_block";
  check_attention(op, q, k, v, residual, scale, eps);
  const int64_t width = residual.size(2);
  check_like(op, "proj_weight", proj_weight, "q", q, {width, width});
  check_like(op, "proj_bias", proj_bias, "q", q, {width});
  check_like(op, "weight", weight, "q", q, {width});
  check_like(op, "bias", bias, "q", q, {width});
  check_out(op, "y", y, residual.sizes(), "q", q);
  check_out(op, "sum", sum, residual.sizes(), "q", q);
  check_apart(op, {{"y", y}, {"sum", sum}},
              {{"q", q},
               {"k", k},
               {"v", v},
               {"residual", residual},
               {"proj_weight", proj_weight},
               {"proj_bias", proj_bias},
               {"weight", weight},
               {"bias", bias}});
  check_rung(attention_block_op(), rung, q);
  if (y.numel() == 0) return {y, sum};
  const Tensor qn = with_whole_rows(q), kn = with_whole_rows(k), vn = with_whole_rows(v);
  const Tensor r = residual.contiguous(), pw = proj_weight.contiguous(), pb = proj_bias.contiguous();
  const Tensor w = weight.contiguous(), b = bias.contiguous();
  run(attention_block_op(), rung, q,
      {attention_of(qn, kn, vn, causal, scale), r.data_ptr(), pw.data_ptr(), pb.data_ptr(), w.data_ptr(), b.data_ptr(),
       y.data_ptr(), sum.data_ptr(), eps, nullptr, dtype_of(q)});
  return {y, sum};
}

std::tuple<Tensor, Tensor> attention_block(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                           const Tensor& proj_weight, const Tensor& proj_bias, const Tensor& weight,
                                           const Tensor& bias, bool causal, std::optional<double> scale, double eps,
                                           std::string_view rung) {
  Tensor y = contiguous_like(residual), sum = contiguous_like(residual);
  attention_block_out(q, k, v, residual, proj_weight, proj_bias, weight, bias, causal, scale, eps, rung, y, sum);
  return {y, sum};
}

// ---- autocast ----

Tensor layer_norm_autocast(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                           std::string_view rung) {
  return call_in<layer_norm>(at::kFloat, "step3_fused::layer_norm", x, weight, bias, eps, rung);
}

std::tuple<Tensor, Tensor> residual_layer_norm_autocast(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                        const Tensor& bias, double eps, std::string_view rung) {
  return call_in<residual_layer_norm>(at::kFloat, "step3_fused::residual_layer_norm", x, residual, weight, bias, eps,
                                      rung);
}

Tensor attention_residual_layer_norm_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                              const Tensor& weight, const Tensor& bias, bool causal,
                                              std::optional<double> scale, double eps, std::string_view rung) {
  return call_in<attention_residual_layer_norm>(std::nullopt, "step3_fused::attention_residual_layer_norm", q, k, v,
                                                residual, weight, bias, causal, scale, eps, rung);
}

std::tuple<Tensor, Tensor> attention_block_autocast(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& residual, const Tensor& proj_weight,
                                                    const Tensor& proj_bias, const Tensor& weight, const Tensor& bias,
                                                    bool causal, std::optional<double> scale, double eps,
                                                    std::string_view rung) {
  return call_in<attention_block>(std::nullopt, "step3_fused::attention_block", q, k, v, residual, proj_weight,
                                  proj_bias, weight, bias, causal, scale, eps, rung);
}

// ---- what there is ----

std::vector<OpInfo> ops() {
  return {describe(layer_norm_op()), describe(residual_layer_norm_op()), describe(attention_residual_layer_norm_op()),
          describe(attention_block_op())};
}

int64_t emulated_kernels() { return static_cast<int64_t>(simt::launch_count()); }

}  // namespace kf::step3
