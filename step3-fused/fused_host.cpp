// From a tensor to a rung for LayerNorm and attention: checks, allocation, dispatch. host/linear_host.cpp has the
// products'.
#include "host/fused_host.h"

#include <kf/autocast.h>
#include <kf/dropout.h>
#include <kf/key_bounds.h>

#include <cmath>

#include "cpu/fused_cpu.h"
#include "host/linear_host.h"
#include "host/row_checks.h"

namespace kf::simt {
std::uint64_t launch_count();  // of emulator/include/kf_simt.h, whose folder only emulated sources see
}

namespace kf::step3 {
namespace {

Op<kf::layer_norm::Args> layer_norm_op() {
  namespace op = gpu::layer_norm;
  return {"layer_norm", cpu::layer_norm, emulated::layer_norm::rungs(), op::rungs(), kf::layer_norm::automatic};
}

Op<kf::layer_norm_backward::Args> layer_norm_backward_op() {
  namespace op = gpu::layer_norm_backward;
  return {"layer_norm_backward", cpu::layer_norm_backward, emulated::layer_norm_backward::rungs(), op::rungs(),
          kf::layer_norm_backward::automatic};
}

Op<kf::residual_layer_norm::Args> residual_layer_norm_op() {
  namespace op = gpu::residual_layer_norm;
  return {"residual_layer_norm", cpu::residual_layer_norm, emulated::residual_layer_norm::rungs(), op::rungs(),
          kf::residual_layer_norm::automatic};
}

// Whether the GPU has clusters. Where there is none the question is what one like those of results/ would take.
bool has_clusters() {
#ifdef KF_WITH_CUDA
  return !at::hasCUDA() || gpu::attention_block::has_clusters();
#else
  return true;
#endif
}

Op<kf::attention_residual_layer_norm::Args> attention_residual_layer_norm_op() {
  namespace op = gpu::attention_residual_layer_norm;
  return {"attention_residual_layer_norm", cpu::attention_residual_layer_norm,
          emulated::attention_residual_layer_norm::rungs(), op::rungs(),
          [](const auto& args) { return kf::attention_residual_layer_norm::automatic(args, has_clusters()); }};
}

Op<kf::attention_block::Args> attention_block_op() {
  namespace op = gpu::attention_block;
  return {"attention_block", cpu::attention_block, emulated::attention_block::rungs(), op::rungs(),
          [](const auto& args) { return kf::attention_block::automatic(args, has_clusters()); }};
}

// ---- checks ----

// q [B, H, Sq, D], k and v [B, H, Sk, D], residual [B, Sq, H·D].
void check_attention(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                     const std::optional<Tensor>& key_begin, const std::optional<Tensor>& key_end,
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
  check_key_bounds(op, q, key_begin, key_end);
  TORCH_CHECK_VALUE(!scale || std::isfinite(*scale), op, ": `scale` must be finite or None, got ", scale.value_or(0));
  check_eps(op, eps);
}

// Dropout's arguments, checked, and the memory of their state. dropout_p_name, rng_state_name: what the op calls them.
struct DropoutArgs {
  uint32_t threshold;
  PhiloxArgs philox_args;

  DropoutArgs(const char* op, const char* dropout_p_name, double dropout_p, const char* rng_state_name,
              const std::optional<Tensor>& rng_state, const Tensor& first)
      : threshold(threshold_of(op, dropout_p_name, dropout_p)) {
    TORCH_CHECK_VALUE(threshold == 0 || rng_state, op, ": `", rng_state_name, "` must be given where `", dropout_p_name,
                      "` is not 0");
    if (rng_state) philox_args = philox_args_of(op, *rng_state, first, rng_state_name);
  }
};

// What the way back wants of attention, none of it unless `keep`: its output, as the residual, and each query's
// log-sum-exp.
std::vector<int64_t> attended_shape(const Tensor& residual, bool keep) {
  return keep ? residual.sizes().vec() : std::vector<int64_t>{0};
}
std::vector<int64_t> lse_shape(const Tensor& q, bool keep) {
  return keep ? q.sizes().slice(0, 3).vec() : std::vector<int64_t>{0};
}

void check_kept(const char* op, const Tensor& attended, const Tensor& lse, const Tensor& mean, const Tensor& rstd,
                const Tensor& q, const Tensor& residual, bool keep) {
  check_out(op, "attended", attended, attended_shape(residual, keep), "q", q);
  check_type(op, "lse", lse, statistics_dtype(q));
  check_shape(op, "lse", lse, lse_shape(q, keep));
  check_device(op, "lse", lse, "q", q);
  TORCH_CHECK_VALUE(lse.is_contiguous(), op, ": `lse` must be contiguous");
  check_statistics(op, mean, rstd, "q", residual, true, keep);
}

// No output shares memory with an input, if that is given, or with another output.
void check_apart_from(const char* op, std::initializer_list<Named> outs,
                      std::initializer_list<std::pair<const char*, std::optional<Tensor>>> inputs) {
  check_apart(op, outs, {});
  for (const auto& [name, input] : inputs) {
    if (input) check_apart(op, outs, {{name, *input}});
  }
}

// Attention's arguments, by tensors that outlive the launch.
struct AttentionTensors {
  Tensor q, k, v, begin, end;
  Attention args;

  AttentionTensors(const Tensor& q_given, const Tensor& k_given, const Tensor& v_given,
                   const std::optional<Tensor>& key_begin, const std::optional<Tensor>& key_end,
                   const DropoutArgs& dropout, bool causal, std::optional<double> scale, void* lse)
      : q(with_aligned_rows(q_given)),
        k(with_aligned_rows(k_given)),
        v(with_aligned_rows(v_given)),
        begin(key_begin ? key_begin->contiguous() : Tensor()),
        end(key_end ? key_end->contiguous() : Tensor()) {
    const auto heads_of = [](const Tensor& t) {
      return TensorRef{t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
    };
    args.q = heads_of(q);
    args.k = heads_of(k);
    args.v = heads_of(v);
    args.batch = q.size(0);
    args.heads = q.size(1);
    args.q_length = q.size(2);
    args.k_length = k.size(2);
    args.head_dim = q.size(3);
    args.scale = scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
    args.causal = causal;
    args.key_begin = begin.defined() ? begin.const_data_ptr<int32_t>() : nullptr;
    args.key_end = end.defined() ? end.const_data_ptr<int32_t>() : nullptr;
    args.lse = lse;
    args.threshold = dropout.threshold;
    args.rng_state = dropout.philox_args.in_memory;
    args.seed = dropout.philox_args.seed;
    args.offset = dropout.philox_args.offset;
  }
};

// An output that begins at a multiple of 16 bytes, as vectors and TMA want it: itself, or another that is copied.
struct AlignedOut {
  const Tensor& given;
  const Tensor out;

  explicit AlignedOut(const Tensor& given)
      : given(given), out(begins_at_16_bytes(given) ? given : contiguous_like(given)) {}
  void* data() const { return out.data_ptr(); }
  void done() const {
    if (!out.is_same(given)) given.copy_(out);
  }
};

}  // namespace

// ---- layer_norm ----

std::tuple<Tensor&, Tensor&, Tensor&> layer_norm_out(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                     double eps, bool keep, std::string_view rung, Tensor& y,
                                                     Tensor& mean, Tensor& rstd) {
  const char* op = "layer_norm";
  const int64_t width = check_rows(op, "x", x);
  check_like(op, "weight", weight, "x", x, {width});
  check_like(op, "bias", bias, "x", x, {width});
  check_eps(op, eps);
  check_out(op, "y", y, x.sizes(), "x", x);
  check_statistics(op, mean, rstd, "x", x, true, keep);
  check_apart(op, {{"y", y}, {"mean", mean}, {"rstd", rstd}}, {{"x", x}, {"weight", weight}, {"bias", bias}});
  check_rung(layer_norm_op(), rung, x);
  if (x.numel() == 0) return {y, mean, rstd};
  const Tensor in = x.contiguous(), w = weight.contiguous(), b = bias.contiguous();
  run(layer_norm_op(), rung, x,
      {in.data_ptr(), w.data_ptr(), b.data_ptr(), y.data_ptr(), x.numel() / width, width, eps, dtype_of(x),
       keep ? mean.data_ptr() : nullptr, keep ? rstd.data_ptr() : nullptr});
  return {y, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                                              bool keep, std::string_view rung) {
  check_rows("layer_norm", "x", x);
  Tensor y = contiguous_like(x), mean = empty_statistic(x, keep), rstd = empty_statistic(x, keep);
  layer_norm_out(x, weight, bias, eps, keep, rung, y, mean, rstd);
  return {y, mean, rstd};
}

// ---- layer_norm_backward ----

std::tuple<Tensor&, Tensor&, Tensor&> layer_norm_backward_out(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                              const Tensor& mean, const Tensor& rstd,
                                                              const std::optional<Tensor>& grad_sum,
                                                              std::string_view rung, Tensor& grad_x,
                                                              Tensor& grad_weight, Tensor& grad_bias) {
  const char* op = "layer_norm_backward";
  const int64_t width = check_rows(op, "grad", grad);
  check_like(op, "x", x, "grad", grad, grad.sizes());
  check_like(op, "weight", weight, "grad", grad, {width});
  check_statistics(op, mean, rstd, "grad", grad, false);
  if (grad_sum) check_like(op, "grad_sum", *grad_sum, "grad", grad, grad.sizes());
  check_out(op, "grad_x", grad_x, grad.sizes(), "grad", grad);
  check_out(op, "grad_weight", grad_weight, {width}, "grad", grad);
  check_out(op, "grad_bias", grad_bias, {width}, "grad", grad);
  const std::initializer_list<Named> outs = {
      {"grad_x", grad_x}, {"grad_weight", grad_weight}, {"grad_bias", grad_bias}};
  check_apart(op, outs, {{"grad", grad}, {"x", x}, {"weight", weight}, {"mean", mean}, {"rstd", rstd}});
  if (grad_sum) check_apart(op, outs, {{"grad_sum", *grad_sum}});
  check_rung(layer_norm_backward_op(), rung, grad);
  if (grad.numel() == 0) {  // sums over no rows
    grad_weight.zero_();
    grad_bias.zero_();
    return {grad_x, grad_weight, grad_bias};
  }
  const Tensor g = grad.contiguous(), in = x.contiguous(), w = weight.contiguous();
  const Tensor m = mean.contiguous(), r = rstd.contiguous();
  const Tensor more = grad_sum ? grad_sum->contiguous() : Tensor();
  kf::layer_norm_backward::Args args{};
  args.grad = g.data_ptr();
  args.x = in.data_ptr();
  args.weight = w.data_ptr();
  args.mean = m.data_ptr();
  args.rstd = r.data_ptr();
  args.grad_sum = grad_sum ? more.data_ptr() : nullptr;
  args.grad_x = grad_x.data_ptr();
  args.grad_weight = grad_weight.data_ptr();
  args.grad_bias = grad_bias.data_ptr();
  args.rows = grad.numel() / width;
  args.width = width;
  args.dtype = dtype_of(grad);
  run(layer_norm_backward_op(), rung, grad, args);
  return {grad_x, grad_weight, grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                       const Tensor& mean, const Tensor& rstd,
                                                       const std::optional<Tensor>& grad_sum, std::string_view rung) {
  Tensor grad_x = contiguous_like(grad), grad_weight = contiguous_like(weight), grad_bias = contiguous_like(weight);
  layer_norm_backward_out(grad, x, weight, mean, rstd, grad_sum, rung, grad_x, grad_weight, grad_bias);
  return {grad_x, grad_weight, grad_bias};
}

// ---- residual_layer_norm ----

std::tuple<Tensor&, Tensor&, Tensor&, Tensor&> residual_layer_norm_out(
    const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
    const std::optional<Tensor>& x_bias, double dropout_p, const std::optional<Tensor>& rng_state, double eps,
    bool keep, std::string_view rung, Tensor& y, Tensor& sum, Tensor& mean, Tensor& rstd) {
  const char* op = "residual_layer_norm";
  const int64_t width = check_rows(op, "x", x);
  check_like(op, "residual", residual, "x", x, x.sizes());
  check_like(op, "weight", weight, "x", x, {width});
  check_like(op, "bias", bias, "x", x, {width});
  if (x_bias) check_like(op, "x_bias", *x_bias, "x", x, {width});
  const DropoutArgs dropout(op, "dropout_p", dropout_p, "rng_state", rng_state, x);
  check_eps(op, eps);
  check_out(op, "y", y, x.sizes(), "x", x);
  check_out(op, "sum", sum, x.sizes(), "x", x);
  check_statistics(op, mean, rstd, "x", x, true, keep);
  const std::initializer_list<Named> outs = {{"y", y}, {"sum", sum}, {"mean", mean}, {"rstd", rstd}};
  check_apart(op, outs, {{"x", x}, {"residual", residual}, {"weight", weight}, {"bias", bias}});
  if (x_bias) check_apart(op, outs, {{"x_bias", *x_bias}});
  if (rng_state) check_apart(op, outs, {{"rng_state", *rng_state}});
  check_rung(residual_layer_norm_op(), rung, x);
  if (x.numel() == 0) return {y, sum, mean, rstd};
  const Tensor in = x.contiguous(), r = residual.contiguous(), w = weight.contiguous(), b = bias.contiguous();
  const Tensor xb = x_bias ? x_bias->contiguous() : Tensor();
  kf::residual_layer_norm::Args args{};
  args.x = in.data_ptr();
  args.residual = r.data_ptr();
  args.weight = w.data_ptr();
  args.bias = b.data_ptr();
  args.y = y.data_ptr();
  args.sum = sum.data_ptr();
  args.rows = x.numel() / width;
  args.width = width;
  args.eps = eps;
  args.dtype = dtype_of(x);
  args.mean = keep ? mean.data_ptr() : nullptr;
  args.rstd = keep ? rstd.data_ptr() : nullptr;
  args.x_bias = x_bias ? xb.data_ptr() : nullptr;
  args.threshold = dropout.threshold;
  args.rng_state = dropout.philox_args.in_memory;
  args.seed = dropout.philox_args.seed;
  args.offset = dropout.philox_args.offset;
  run(residual_layer_norm_op(), rung, x, args);
  return {y, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> residual_layer_norm(const Tensor& x, const Tensor& residual,
                                                               const Tensor& weight, const Tensor& bias,
                                                               const std::optional<Tensor>& x_bias, double dropout_p,
                                                               const std::optional<Tensor>& rng_state, double eps,
                                                               bool keep, std::string_view rung) {
  check_rows("residual_layer_norm", "x", x);
  Tensor y = contiguous_like(x), sum = contiguous_like(x), mean = empty_statistic(x, keep),
         rstd = empty_statistic(x, keep);
  residual_layer_norm_out(x, residual, weight, bias, x_bias, dropout_p, rng_state, eps, keep, rung, y, sum, mean, rstd);
  return {y, sum, mean, rstd};
}

// ---- attention_residual_layer_norm ----

std::tuple<Tensor&, Tensor&, Tensor&, Tensor&, Tensor&> attention_residual_layer_norm_out(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual, const Tensor& weight, const Tensor& bias,
    const std::optional<Tensor>& key_begin, const std::optional<Tensor>& key_end,
    const std::optional<Tensor>& attention_rng_state, bool causal, std::optional<double> scale, double eps,
    double attention_dropout_p, bool keep, std::string_view rung, Tensor& out, Tensor& attended, Tensor& lse,
    Tensor& mean, Tensor& rstd) {
  const char* op = "attention_residual_layer_norm";
  check_attention(op, q, k, v, residual, key_begin, key_end, scale, eps);
  const int64_t width = residual.size(2);
  check_like(op, "weight", weight, "q", q, {width});
  check_like(op, "bias", bias, "q", q, {width});
  const DropoutArgs dropout(op, "attention_dropout_p", attention_dropout_p, "attention_rng_state", attention_rng_state,
                            q);
  check_out(op, "out", out, residual.sizes(), "q", q);
  check_kept(op, attended, lse, mean, rstd, q, residual, keep);
  check_apart_from(op, {{"out", out}, {"attended", attended}, {"lse", lse}, {"mean", mean}, {"rstd", rstd}},
                   {{"q", q},
                    {"k", k},
                    {"v", v},
                    {"residual", residual},
                    {"weight", weight},
                    {"bias", bias},
                    {"key_begin", key_begin},
                    {"key_end", key_end},
                    {"attention_rng_state", attention_rng_state}});
  check_rung(attention_residual_layer_norm_op(), rung, q);
  if (out.numel() == 0) return {out, attended, lse, mean, rstd};
  const AttentionTensors attention(q, k, v, key_begin, key_end, dropout, causal, scale,
                                   keep ? lse.data_ptr() : nullptr);
  const Tensor r = in_one_piece(residual), w = in_one_piece(weight), b = in_one_piece(bias);
  const AlignedOut to_out(out), to_attended(attended);
  kf::attention_residual_layer_norm::Args args{};
  args.attention = attention.args;
  args.residual = r.data_ptr();
  args.weight = w.data_ptr();
  args.bias = b.data_ptr();
  args.y = to_out.data();
  args.eps = eps;
  args.dtype = dtype_of(q);
  args.attended = keep ? to_attended.data() : nullptr;
  args.mean = keep ? mean.data_ptr() : nullptr;
  args.rstd = keep ? rstd.data_ptr() : nullptr;
  run(attention_residual_layer_norm_op(), rung, q, args);
  to_out.done(), to_attended.done();
  return {out, attended, lse, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_residual_layer_norm(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual, const Tensor& weight, const Tensor& bias,
    const std::optional<Tensor>& key_begin, const std::optional<Tensor>& key_end,
    const std::optional<Tensor>& attention_rng_state, bool causal, std::optional<double> scale, double eps,
    double attention_dropout_p, bool keep, std::string_view rung) {
  check_attention("attention_residual_layer_norm", q, k, v, residual, key_begin, key_end, scale, eps);
  Tensor out = contiguous_like(residual), attended = at::empty(attended_shape(residual, keep), residual.options()),
         lse = at::empty(lse_shape(q, keep), q.options().dtype(statistics_dtype(q))),
         mean = empty_statistic(residual, keep), rstd = empty_statistic(residual, keep);
  attention_residual_layer_norm_out(q, k, v, residual, weight, bias, key_begin, key_end, attention_rng_state, causal,
                                    scale, eps, attention_dropout_p, keep, rung, out, attended, lse, mean, rstd);
  return {out, attended, lse, mean, rstd};
}

// ---- attention_block ----

std::tuple<Tensor&, Tensor&, Tensor&, Tensor&, Tensor&, Tensor&> attention_block_out(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual, const Tensor& proj_weight,
    const Tensor& proj_bias, const Tensor& weight, const Tensor& bias, const std::optional<Tensor>& key_begin,
    const std::optional<Tensor>& key_end, const std::optional<Tensor>& rng_state,
    const std::optional<Tensor>& attention_rng_state, bool causal, std::optional<double> scale, double eps,
    double dropout_p, double attention_dropout_p, bool keep, std::string_view rung, Tensor& y, Tensor& sum,
    Tensor& attended, Tensor& lse, Tensor& mean, Tensor& rstd) {
  const char* op = "attention_block";
  check_attention(op, q, k, v, residual, key_begin, key_end, scale, eps);
  const int64_t width = residual.size(2);
  check_like(op, "proj_weight", proj_weight, "q", q, {width, width});
  check_like(op, "proj_bias", proj_bias, "q", q, {width});
  check_like(op, "weight", weight, "q", q, {width});
  check_like(op, "bias", bias, "q", q, {width});
  const DropoutArgs dropout(op, "dropout_p", dropout_p, "rng_state", rng_state, q);
  const DropoutArgs of_weights(op, "attention_dropout_p", attention_dropout_p, "attention_rng_state",
                               attention_rng_state, q);
  check_out(op, "y", y, residual.sizes(), "q", q);
  check_out(op, "sum", sum, residual.sizes(), "q", q);
  check_kept(op, attended, lse, mean, rstd, q, residual, keep);
  check_apart_from(op, {{"y", y}, {"sum", sum}, {"attended", attended}, {"lse", lse}, {"mean", mean}, {"rstd", rstd}},
                   {{"q", q},
                    {"k", k},
                    {"v", v},
                    {"residual", residual},
                    {"proj_weight", proj_weight},
                    {"proj_bias", proj_bias},
                    {"weight", weight},
                    {"bias", bias},
                    {"key_begin", key_begin},
                    {"key_end", key_end},
                    {"rng_state", rng_state},
                    {"attention_rng_state", attention_rng_state}});
  check_rung(attention_block_op(), rung, q);
  if (y.numel() == 0) return {y, sum, attended, lse, mean, rstd};
  const AttentionTensors attention(q, k, v, key_begin, key_end, of_weights, causal, scale,
                                   keep ? lse.data_ptr() : nullptr);
  const Tensor r = in_one_piece(residual), pw = in_one_piece(proj_weight), pb = in_one_piece(proj_bias);
  const Tensor w = in_one_piece(weight), b = in_one_piece(bias);
  const AlignedOut to_y(y), to_sum(sum), to_attended(attended);
  kf::attention_block::Args args{};
  args.attention = attention.args;
  args.residual = r.data_ptr();
  args.proj_weight = pw.data_ptr();
  args.proj_bias = pb.data_ptr();
  args.weight = w.data_ptr();
  args.bias = b.data_ptr();
  args.y = to_y.data();
  args.sum = to_sum.data();
  args.eps = eps;
  args.dtype = dtype_of(q);
  args.attended = keep ? to_attended.data() : nullptr;
  args.mean = keep ? mean.data_ptr() : nullptr;
  args.rstd = keep ? rstd.data_ptr() : nullptr;
  args.threshold = dropout.threshold;
  args.rng_state = dropout.philox_args.in_memory;
  args.seed = dropout.philox_args.seed;
  args.offset = dropout.philox_args.offset;
  run(attention_block_op(), rung, q, args);
  for (const AlignedOut* out : {&to_y, &to_sum, &to_attended}) out->done();
  return {y, sum, attended, lse, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_block(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual, const Tensor& proj_weight,
    const Tensor& proj_bias, const Tensor& weight, const Tensor& bias, const std::optional<Tensor>& key_begin,
    const std::optional<Tensor>& key_end, const std::optional<Tensor>& rng_state,
    const std::optional<Tensor>& attention_rng_state, bool causal, std::optional<double> scale, double eps,
    double dropout_p, double attention_dropout_p, bool keep, std::string_view rung) {
  check_attention("attention_block", q, k, v, residual, key_begin, key_end, scale, eps);
  Tensor y = contiguous_like(residual), sum = contiguous_like(residual),
         attended = at::empty(attended_shape(residual, keep), residual.options()),
         lse = at::empty(lse_shape(q, keep), q.options().dtype(statistics_dtype(q))),
         mean = empty_statistic(residual, keep), rstd = empty_statistic(residual, keep);
  attention_block_out(q, k, v, residual, proj_weight, proj_bias, weight, bias, key_begin, key_end, rng_state,
                      attention_rng_state, causal, scale, eps, dropout_p, attention_dropout_p, keep, rung, y, sum,
                      attended, lse, mean, rstd);
  return {y, sum, attended, lse, mean, rstd};
}

// ---- autocast ----

std::tuple<Tensor, Tensor, Tensor> layer_norm_autocast(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                       double eps, bool keep, std::string_view rung) {
  return call_in<layer_norm>(at::kFloat, "step3_fused::layer_norm", x, weight, bias, eps, keep, rung);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> residual_layer_norm_autocast(const Tensor& x, const Tensor& residual,
                                                                        const Tensor& weight, const Tensor& bias,
                                                                        const std::optional<Tensor>& x_bias,
                                                                        double dropout_p,
                                                                        const std::optional<Tensor>& rng_state,
                                                                        double eps, bool keep, std::string_view rung) {
  return call_in<residual_layer_norm>(at::kFloat, "step3_fused::residual_layer_norm", x, residual, weight, bias, x_bias,
                                      dropout_p, rng_state, eps, keep, rung);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_residual_layer_norm_autocast(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual, const Tensor& weight, const Tensor& bias,
    const std::optional<Tensor>& key_begin, const std::optional<Tensor>& key_end,
    const std::optional<Tensor>& attention_rng_state, bool causal, std::optional<double> scale, double eps,
    double attention_dropout_p, bool keep, std::string_view rung) {
  return call_in<attention_residual_layer_norm>(std::nullopt, "step3_fused::attention_residual_layer_norm", q, k, v,
                                                residual, weight, bias, key_begin, key_end, attention_rng_state, causal,
                                                scale, eps, attention_dropout_p, keep, rung);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_block_autocast(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual, const Tensor& proj_weight,
    const Tensor& proj_bias, const Tensor& weight, const Tensor& bias, const std::optional<Tensor>& key_begin,
    const std::optional<Tensor>& key_end, const std::optional<Tensor>& rng_state,
    const std::optional<Tensor>& attention_rng_state, bool causal, std::optional<double> scale, double eps,
    double dropout_p, double attention_dropout_p, bool keep, std::string_view rung) {
  return call_in<attention_block>(std::nullopt, "step3_fused::attention_block", q, k, v, residual, proj_weight,
                                  proj_bias, weight, bias, key_begin, key_end, rng_state, attention_rng_state, causal,
                                  scale, eps, dropout_p, attention_dropout_p, keep, rung);
}

// ---- what there is ----

std::vector<OpInfo> ops() {
  std::vector<OpInfo> all{describe(layer_norm_op()), describe(layer_norm_backward_op()),
                          describe(residual_layer_norm_op()), describe(attention_residual_layer_norm_op()),
                          describe(attention_block_op())};
  for (OpInfo& op : linear_ops()) all.push_back(std::move(op));
  return all;
}

int64_t emulated_kernels() { return static_cast<int64_t>(simt::launch_count()); }

}  // namespace kf::step3
