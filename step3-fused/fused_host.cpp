// From a tensor to a rung: checks, allocation, dispatch. The only place of this stage where torch and kernels meet.
#include "fused_host.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <kf/host.h>

#include <cmath>
#include <initializer_list>

#include "fused_cpu.h"

namespace kf::simt {
std::uint64_t launch_count();  // of common/simt/include/kf_simt.h, whose folder only emulated sources see
}

namespace kf::step3 {
namespace {

// `auto` on CUDA tensors: `best` where it can do it, else the last rung of the lesson that can. Which is best was read
// off results/h200.json.
template <class Args>
const char* prefer(const char* best, const Rungs<Args>& table, const Args& args) {
  const char* name = table.first->name;
  for (const Rung<Args>& rung : table) {
    if (!rung.supports(args).empty()) continue;
    name = rung.name;
    if (name == std::string_view(best)) break;
  }
  return name;
}

// A block a row pays where a row keeps a block busy, and in half types of GPT-2's widths up to 1024; in between a warp
// a row is as fast or faster.
const char* layer_norm_rung(const kf::layer_norm::Args& args) {
  const bool half = args.dtype == DType::kFloat16 || args.dtype == DType::kBFloat16;
  const bool block = args.width > 2048 || (half && args.width <= 1024);
  return prefer(block ? "v2_block" : "v1_naive", gpu::layer_norm::rungs(), args);
}

Op<kf::layer_norm::Args> layer_norm_op() {
  namespace op = gpu::layer_norm;
  return {"layer_norm", cpu::layer_norm, emulated::layer_norm::rungs(), op::rungs(), layer_norm_rung};
}

Op<kf::residual_layer_norm::Args> residual_layer_norm_op() {
  namespace op = gpu::residual_layer_norm;
  return {"residual_layer_norm", cpu::residual_layer_norm, emulated::residual_layer_norm::rungs(), op::rungs(),
          [](const auto& args) { return prefer("v2_fused", op::rungs(), args); }};
}

Op<kf::attention_residual_layer_norm::Args> attention_residual_layer_norm_op() {
  namespace op = gpu::attention_residual_layer_norm;
  return {"attention_residual_layer_norm", cpu::attention_residual_layer_norm,
          emulated::attention_residual_layer_norm::rungs(), op::rungs(),
          [](const auto& args) { return prefer("v1_separate", op::rungs(), args); }};
}

Op<kf::attention_block::Args> attention_block_op() {
  namespace op = gpu::attention_block;
  return {"attention_block", cpu::attention_block, emulated::attention_block::rungs(), op::rungs(),
          [](const auto& args) { return prefer("v1_separate", op::rungs(), args); }};
}

// ---- checks ----

// A row has at least one element: there is no mean of nothing.
int64_t check_rows(const char* op, const char* name, const Tensor& x) {
  check_floating(op, name, x);
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": `", name, "` must have at least 1 dimension, got 0 (shape ())");
  TORCH_CHECK_VALUE(x.size(-1) > 0, op, ": the last dimension of `", name, "` must not be 0, got shape ",
                    shape_text(x));
  return x.size(-1);
}

void check_eps(const char* op, double eps) {
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps), op, ": `eps` must be a finite number ≥ 0, got ", eps);
}

void check_parameter(const char* op, const char* name, const Tensor& t, at::IntArrayRef shape, const char* first_name,
                     const Tensor& first) {
  check_like(op, name, t, first_name, first);
  check_shape(op, name, t, shape);
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
  check_like(op, "v", v, "q", q);
  check_shape(op, "v", v, k.sizes());
  check_parameter(op, "residual", residual, {q.size(0), q.size(2), q.size(1) * q.size(3)}, "q", q);
  TORCH_CHECK_VALUE(!scale || std::isfinite(*scale), op, ": `scale` must be finite or None, got ", scale.value_or(0));
  check_eps(op, eps);
}

// Rungs take any strides, as long as the elements of a head's row are neighbours.
Tensor neighbours(const Tensor& t) { return t.size(3) == 1 || t.stride(3) == 1 ? t : t.contiguous(); }

Heads heads_of(const Tensor& t) { return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }

Attention attention_of(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, std::optional<double> scale) {
  return {heads_of(q), heads_of(k), heads_of(v),
          q.size(0),   q.size(1),   q.size(2),
          k.size(2),   q.size(3),   scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))),
          causal};
}

// Outputs are written while inputs are read, and two outputs are both written.
struct Named {
  const char* name;
  const Tensor& tensor;
};
void check_apart(const char* op, std::initializer_list<Named> outs, std::initializer_list<Named> inputs) {
  for (auto out = outs.begin(); out != outs.end(); ++out) {
    for (const Named& in : inputs) check_no_overlap(op, out->name, out->tensor, in.name, in.tensor);
    for (auto other = outs.begin(); other != out; ++other) {
      check_no_overlap(op, out->name, out->tensor, other->name, other->tensor);
    }
  }
}

Tensor empty_contiguous(const Tensor& like) { return at::empty_like(like, at::MemoryFormat::Contiguous); }

}  // namespace

// ---- layer_norm ----

Tensor& layer_norm_out(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, std::string_view rung,
                       Tensor& out) {
  const char* op = "layer_norm";
  const int64_t width = check_rows(op, "x", x);
  check_parameter(op, "weight", weight, {width}, "x", x);
  check_parameter(op, "bias", bias, {width}, "x", x);
  check_eps(op, eps);
  check_out(op, "out", out, x.sizes(), "x", x);
  check_apart(op, {{"out", out}}, {{"x", x}, {"weight", weight}, {"bias", bias}});
  if (x.numel() == 0) return out;
  const Tensor in = x.contiguous(), w = weight.contiguous(), b = bias.contiguous();
  run(layer_norm_op(), std::string(rung), x,
      {in.data_ptr(), w.data_ptr(), b.data_ptr(), out.data_ptr(), x.numel() / width, width, eps, dtype_of(x)});
  return out;
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, std::string_view rung) {
  Tensor out = empty_contiguous(x);
  return layer_norm_out(x, weight, bias, eps, rung, out);
}

// ---- residual_layer_norm ----

std::tuple<Tensor&, Tensor&> residual_layer_norm_out(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                     const Tensor& bias, double eps, std::string_view rung, Tensor& y,
                                                     Tensor& sum) {
  const char* op = "residual_layer_norm";
  const int64_t width = check_rows(op, "x", x);
  check_parameter(op, "residual", residual, x.sizes(), "x", x);
  check_parameter(op, "weight", weight, {width}, "x", x);
  check_parameter(op, "bias", bias, {width}, "x", x);
  check_eps(op, eps);
  check_out(op, "y", y, x.sizes(), "x", x);
  check_out(op, "sum", sum, x.sizes(), "x", x);
  check_apart(op, {{"y", y}, {"sum", sum}}, {{"x", x}, {"residual", residual}, {"weight", weight}, {"bias", bias}});
  if (x.numel() == 0) return {y, sum};
  const Tensor in = x.contiguous(), r = residual.contiguous(), w = weight.contiguous(), b = bias.contiguous();
  run(residual_layer_norm_op(), std::string(rung), x,
      {in.data_ptr(), r.data_ptr(), w.data_ptr(), b.data_ptr(), y.data_ptr(), sum.data_ptr(), x.numel() / width, width,
       eps, dtype_of(x)});
  return {y, sum};
}

std::tuple<Tensor, Tensor> residual_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                               const Tensor& bias, double eps, std::string_view rung) {
  Tensor y = empty_contiguous(x), sum = empty_contiguous(x);
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
  check_parameter(op, "weight", weight, {width}, "q", q);
  check_parameter(op, "bias", bias, {width}, "q", q);
  check_out(op, "out", out, residual.sizes(), "q", q);
  check_apart(op, {{"out", out}},
              {{"q", q}, {"k", k}, {"v", v}, {"residual", residual}, {"weight", weight}, {"bias", bias}});
  if (out.numel() == 0) return out;
  const Tensor qn = neighbours(q), kn = neighbours(k), vn = neighbours(v);
  const Tensor r = residual.contiguous(), w = weight.contiguous(), b = bias.contiguous();
  run(attention_residual_layer_norm_op(), std::string(rung), q,
      {attention_of(qn, kn, vn, causal, scale), r.data_ptr(), w.data_ptr(), b.data_ptr(), out.data_ptr(), eps, nullptr,
       dtype_of(q)});
  return out;
}

Tensor attention_residual_layer_norm(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                     const Tensor& weight, const Tensor& bias, bool causal, std::optional<double> scale,
                                     double eps, std::string_view rung) {
  Tensor out = empty_contiguous(residual);
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
  check_parameter(op, "proj_weight", proj_weight, {width, width}, "q", q);
  check_parameter(op, "proj_bias", proj_bias, {width}, "q", q);
  check_parameter(op, "weight", weight, {width}, "q", q);
  check_parameter(op, "bias", bias, {width}, "q", q);
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
  if (y.numel() == 0) return {y, sum};
  const Tensor qn = neighbours(q), kn = neighbours(k), vn = neighbours(v);
  const Tensor r = residual.contiguous(), pw = proj_weight.contiguous(), pb = proj_bias.contiguous();
  const Tensor w = weight.contiguous(), b = bias.contiguous();
  run(attention_block_op(), std::string(rung), q,
      {attention_of(qn, kn, vn, causal, scale), r.data_ptr(), pw.data_ptr(), pb.data_ptr(), w.data_ptr(), b.data_ptr(),
       y.data_ptr(), sum.data_ptr(), eps, nullptr, dtype_of(q)});
  return {y, sum};
}

std::tuple<Tensor, Tensor> attention_block(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                           const Tensor& proj_weight, const Tensor& proj_bias, const Tensor& weight,
                                           const Tensor& bias, bool causal, std::optional<double> scale, double eps,
                                           std::string_view rung) {
  Tensor y = empty_contiguous(residual), sum = empty_contiguous(residual);
  attention_block_out(q, k, v, residual, proj_weight, proj_bias, weight, bias, causal, scale, eps, rung, y, sum);
  return {y, sum};
}

// ---- autocast ----

namespace {

// Calls the op `name` again on tensors of another dtype: call(op, cast), with autocast off.
template <class Function, class F>
auto cast_and_call(const char* name, std::optional<at::ScalarType> dtype, const Tensor& first, F&& call) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
  const c10::DeviceType device = first.device().type();
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType to = dtype.value_or(at::autocast::get_autocast_dtype(device));
  return call(op, [&](const Tensor& t) { return at::autocast::cached_cast(to, t, device); });
}

}  // namespace

Tensor layer_norm_autocast(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                           std::string_view rung) {
  return cast_and_call<decltype(layer_norm)>("step3_fused::layer_norm", at::kFloat, x, [&](const auto& op, auto cast) {
    return op.call(cast(x), cast(weight), cast(bias), eps, rung);
  });
}

std::tuple<Tensor, Tensor> residual_layer_norm_autocast(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                                        const Tensor& bias, double eps, std::string_view rung) {
  return cast_and_call<decltype(residual_layer_norm)>(
      "step3_fused::residual_layer_norm", at::kFloat, x,
      [&](const auto& op, auto cast) { return op.call(cast(x), cast(residual), cast(weight), cast(bias), eps, rung); });
}

Tensor attention_residual_layer_norm_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                              const Tensor& weight, const Tensor& bias, bool causal,
                                              std::optional<double> scale, double eps, std::string_view rung) {
  return cast_and_call<decltype(attention_residual_layer_norm)>(
      "step3_fused::attention_residual_layer_norm", std::nullopt, q, [&](const auto& op, auto cast) {
        return op.call(cast(q), cast(k), cast(v), cast(residual), cast(weight), cast(bias), causal, scale, eps, rung);
      });
}

std::tuple<Tensor, Tensor> attention_block_autocast(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& residual, const Tensor& proj_weight,
                                                    const Tensor& proj_bias, const Tensor& weight, const Tensor& bias,
                                                    bool causal, std::optional<double> scale, double eps,
                                                    std::string_view rung) {
  return cast_and_call<decltype(attention_block)>(
      "step3_fused::attention_block", std::nullopt, q, [&](const auto& op, auto cast) {
        return op.call(cast(q), cast(k), cast(v), cast(residual), cast(proj_weight), cast(proj_bias), cast(weight),
                       cast(bias), causal, scale, eps, rung);
      });
}

// ---- what there is ----

namespace {

// Calls f with the op called `name`.
template <class F>
auto with_op(const char* caller, const std::string& name, F&& f) {
  if (name == "layer_norm") return f(layer_norm_op());
  if (name == "residual_layer_norm") return f(residual_layer_norm_op());
  if (name == "attention_residual_layer_norm") return f(attention_residual_layer_norm_op());
  if (name == "attention_block") return f(attention_block_op());
  TORCH_CHECK_VALUE(false, caller,
                    ": `op` must be 'layer_norm', 'residual_layer_norm', 'attention_residual_layer_norm' or "
                    "'attention_block', got '",
                    name, "'");
}

}  // namespace

std::vector<std::string> rungs(const std::string& op, bool on_gpu) {
  return with_op("rungs", op, [&](const auto& found) { return rung_names(found, on_gpu); });
}

bool asks_scratch(const std::string& op, const std::string& name) {
  return with_op("asks_scratch", op, [&](const auto& found) {
    for (const auto& rung : found.emulated) {
      if (name == rung.name) return rung.scratch_bytes != nullptr;
    }
    TORCH_CHECK_VALUE(false, "asks_scratch: `rung` must be one of ", joined(rung_names(found.emulated)), ", got '",
                      name, "'");
  });
}

int64_t emulated_kernels() { return static_cast<int64_t>(simt::launch_count()); }

}  // namespace kf::step3
