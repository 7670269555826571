// From a tensor to a rung for LayerNorm and attention: checks, allocation, dispatch. host/linear_host.cpp has the
// products'.
#include "host/fused_host.h"

#include <kf/documents.h>
#include <kf/key_bounds.h>

#include <cmath>

#include "cpu/fused_cpu.h"
#include "host/row_checks.h"

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
                     const MaybeTensor& key_begin, const MaybeTensor& key_end, std::optional<double> scale,
                     double eps) {
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

// What the way back wants of attention, none of it unless `keep`: its output, as the residual, each query's
// log-sum-exp, and the rows' statistics.
void make_or_check_kept(const char* op, Tensor& attended, Tensor& lse, Tensor& mean, Tensor& rstd, const Tensor& q,
                        const Tensor& residual, bool keep) {
  make_or_check_out(op, "attended", attended, kept_shape(residual, 3, keep), "q", q);
  make_or_check_statistic(op, "lse", lse, kept_shape(q, 3, keep), "q", q);
  make_or_check_statistics(op, mean, rstd, "q", residual, keep);
}

// Attention's arguments, by tensors that outlive the launch.
struct AttentionTensors {
  Tensor q, k, v, begin, end;
  Attention args;

  AttentionTensors(const Tensor& q_given, const Tensor& k_given, const Tensor& v_given, const MaybeTensor& key_begin,
                   const MaybeTensor& key_end, const DropoutArgs& dropout, bool causal, std::optional<double> scale,
                   void* lse)
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
    dropout.set(args);
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

void layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, bool keep, std::string_view rung,
                Tensor& y, Tensor& mean, Tensor& rstd) {
  const char* op = "layer_norm";
  const int64_t width = check_rows(op, "x", x);
  check_like(op, "weight", weight, "x", x, {width});
  check_like(op, "bias", bias, "x", x, {width});
  check_eps(op, eps);
  make_or_check_out(op, "y", y, x.sizes(), "x", x);
  make_or_check_statistics(op, mean, rstd, "x", x, keep);
  check_apart(op, {{"y", y}, {"mean", mean}, {"rstd", rstd}}, {{"x", x}, {"weight", weight}, {"bias", bias}});
  check_rung(layer_norm_op(), rung, x);
  if (x.numel() == 0) return;
  const Tensor in = x.contiguous(), w = weight.contiguous(), b = bias.contiguous();
  run(layer_norm_op(), rung, x,
      {in.data_ptr(), w.data_ptr(), b.data_ptr(), y.data_ptr(), x.numel() / width, width, eps, dtype_of(x),
       data_if(keep, mean), data_if(keep, rstd)});
}

// ---- layer_norm_backward ----

void layer_norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& mean,
                         const Tensor& rstd, const MaybeTensor& grad_sum, std::string_view rung, Tensor& grad_x,
                         Tensor& grad_weight, Tensor& grad_bias) {
  const char* op = "layer_norm_backward";
  const int64_t width = check_rows(op, "grad", grad);
  check_like(op, "x", x, "grad", grad, grad.sizes());
  check_like(op, "weight", weight, "grad", grad, {width});
  check_statistic(op, "mean", mean, grad.sizes().slice(0, grad.dim() - 1), "grad", grad);
  check_statistic(op, "rstd", rstd, grad.sizes().slice(0, grad.dim() - 1), "grad", grad);
  if (grad_sum) check_like(op, "grad_sum", *grad_sum, "grad", grad, grad.sizes());
  make_or_check_out(op, "grad_x", grad_x, grad.sizes(), "grad", grad);
  make_or_check_out(op, "grad_weight", grad_weight, {width}, "grad", grad);
  make_or_check_out(op, "grad_bias", grad_bias, {width}, "grad", grad);
  const std::initializer_list<Named> outs = {
      {"grad_x", grad_x}, {"grad_weight", grad_weight}, {"grad_bias", grad_bias}};
  check_apart(op, outs, {{"grad", grad}, {"x", x}, {"weight", weight}, {"mean", mean}, {"rstd", rstd}});
  check_apart_if_given(op, outs, {{"grad_sum", grad_sum}});
  check_rung(layer_norm_backward_op(), rung, grad);
  if (grad.numel() == 0) {  // sums over no rows
    grad_weight.zero_();
    grad_bias.zero_();
    return;
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
}

// ---- residual_layer_norm ----

void residual_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                         const MaybeTensor& x_bias, double dropout_p, const MaybeTensor& rng_state, double eps,
                         bool keep, std::string_view rung, Tensor& y, Tensor& sum, Tensor& mean, Tensor& rstd) {
  const char* op = "residual_layer_norm";
  const int64_t width = check_rows(op, "x", x);
  check_like(op, "residual", residual, "x", x, x.sizes());
  check_like(op, "weight", weight, "x", x, {width});
  check_like(op, "bias", bias, "x", x, {width});
  if (x_bias) check_like(op, "x_bias", *x_bias, "x", x, {width});
  const DropoutArgs dropout(op, "dropout_p", dropout_p, "rng_state", rng_state, x);
  check_eps(op, eps);
  make_or_check_out(op, "y", y, x.sizes(), "x", x);
  make_or_check_out(op, "sum", sum, x.sizes(), "x", x);
  make_or_check_statistics(op, mean, rstd, "x", x, keep);
  const std::initializer_list<Named> outs = {{"y", y}, {"sum", sum}, {"mean", mean}, {"rstd", rstd}};
  check_apart(op, outs, {{"x", x}, {"residual", residual}, {"weight", weight}, {"bias", bias}});
  check_apart_if_given(op, outs, {{"x_bias", x_bias}, {"rng_state", rng_state}});
  check_rung(residual_layer_norm_op(), rung, x);
  if (x.numel() == 0) return;
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
  args.mean = data_if(keep, mean);
  args.rstd = data_if(keep, rstd);
  args.x_bias = x_bias ? xb.data_ptr() : nullptr;
  dropout.set(args);
  run(residual_layer_norm_op(), rung, x, args);
}

// ---- attention_residual_layer_norm ----

void attention_residual_layer_norm(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                                   const Tensor& weight, const Tensor& bias, const MaybeTensor& key_begin,
                                   const MaybeTensor& key_end, const MaybeTensor& attention_rng_state, bool causal,
                                   std::optional<double> scale, double eps, double attention_dropout_p, bool keep,
                                   std::string_view rung, Tensor& out, Tensor& attended, Tensor& lse, Tensor& mean,
                                   Tensor& rstd) {
  const char* op = "attention_residual_layer_norm";
  check_attention(op, q, k, v, residual, key_begin, key_end, scale, eps);
  const int64_t width = residual.size(2);
  check_like(op, "weight", weight, "q", q, {width});
  check_like(op, "bias", bias, "q", q, {width});
  const DropoutArgs dropout(op, "attention_dropout_p", attention_dropout_p, "attention_rng_state", attention_rng_state,
                            q);
  make_or_check_out(op, "out", out, residual.sizes(), "q", q);
  make_or_check_kept(op, attended, lse, mean, rstd, q, residual, keep);
  const std::initializer_list<Named> outs = {
      {"out", out}, {"attended", attended}, {"lse", lse}, {"mean", mean}, {"rstd", rstd}};
  check_apart(op, outs, {{"q", q}, {"k", k}, {"v", v}, {"residual", residual}, {"weight", weight}, {"bias", bias}});
  check_apart_if_given(op, outs,
                       {{"key_begin", key_begin}, {"key_end", key_end}, {"attention_rng_state", attention_rng_state}});
  check_rung(attention_residual_layer_norm_op(), rung, q);
  if (out.numel() == 0) return;
  const AttentionTensors attention(q, k, v, key_begin, key_end, dropout, causal, scale, data_if(keep, lse));
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
  args.mean = data_if(keep, mean);
  args.rstd = data_if(keep, rstd);
  run(attention_residual_layer_norm_op(), rung, q, args);
  to_out.done(), to_attended.done();
}

// ---- attention_block ----

void attention_block(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& residual,
                     const Tensor& proj_weight, const Tensor& proj_bias, const Tensor& weight, const Tensor& bias,
                     const MaybeTensor& key_begin, const MaybeTensor& key_end, const MaybeTensor& rng_state,
                     const MaybeTensor& attention_rng_state, const MaybeTensor& cu_seqlens, bool causal,
                     std::optional<double> scale, double eps, double dropout_p, double attention_dropout_p, bool keep,
                     std::string_view rung, Tensor& y, Tensor& sum, Tensor& attended, Tensor& lse, Tensor& mean,
                     Tensor& rstd) {
  const char* op = "attention_block";
  check_attention(op, q, k, v, residual, key_begin, key_end, scale, eps);
  check_documents(op, q, k, key_begin, key_end, cu_seqlens, {});
  const int64_t width = residual.size(2);
  check_like(op, "proj_weight", proj_weight, "q", q, {width, width});
  check_like(op, "proj_bias", proj_bias, "q", q, {width});
  check_like(op, "weight", weight, "q", q, {width});
  check_like(op, "bias", bias, "q", q, {width});
  const DropoutArgs dropout(op, "dropout_p", dropout_p, "rng_state", rng_state, q);
  const DropoutArgs of_weights(op, "attention_dropout_p", attention_dropout_p, "attention_rng_state",
                               attention_rng_state, q);
  make_or_check_out(op, "y", y, residual.sizes(), "q", q);
  make_or_check_out(op, "sum", sum, residual.sizes(), "q", q);
  make_or_check_kept(op, attended, lse, mean, rstd, q, residual, keep);
  const std::initializer_list<Named> outs = {{"y", y},     {"sum", sum},   {"attended", attended},
                                             {"lse", lse}, {"mean", mean}, {"rstd", rstd}};
  check_apart(op, outs, {{"q", q}, {"k", k}, {"v", v}, {"residual", residual}, {"weight", weight}, {"bias", bias}});
  check_apart(op, outs, {{"proj_weight", proj_weight}, {"proj_bias", proj_bias}});
  check_apart_if_given(op, outs, {{"key_begin", key_begin}, {"key_end", key_end}, {"rng_state", rng_state}});
  check_apart_if_given(op, outs, {{"attention_rng_state", attention_rng_state}, {"cu_seqlens", cu_seqlens}});
  check_rung(attention_block_op(), rung, q);
  const Tensor starts = cu_seqlens ? cu_seqlens->contiguous() : Tensor();
  if (cu_seqlens) check_starts(op, "cu_seqlens", starts, q.size(2));
  if (y.numel() == 0) return;
  const AttentionTensors attention(q, k, v, key_begin, key_end, of_weights, causal, scale, data_if(keep, lse));
  const Tensor r = in_one_piece(residual), pw = in_one_piece(proj_weight), pb = in_one_piece(proj_bias);
  const Tensor w = in_one_piece(weight), b = in_one_piece(bias);
  const AlignedOut to_y(y), to_sum(sum), to_attended(attended);
  kf::attention_block::Args args{};
  args.attention = attention.args;
  if (cu_seqlens) {
    args.attention.cu_seqlens = starts.const_data_ptr<int32_t>();
    args.attention.documents = starts.size(0) - 1;
  }
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
  args.mean = data_if(keep, mean);
  args.rstd = data_if(keep, rstd);
  dropout.set(args);
  run(attention_block_op(), rung, q, args);
  for (const AlignedOut* out : {&to_y, &to_sum, &to_attended}) out->done();
}

// ---- what there is ----

std::vector<OpInfo> ops() {
  std::vector<OpInfo> all{describe(layer_norm_op()), describe(layer_norm_backward_op()),
                          describe(residual_layer_norm_op()), describe(attention_residual_layer_norm_op()),
                          describe(attention_block_op())};
  for (OpInfo& op : linear_ops()) all.push_back(std::move(op));
  return all;
}

}  // namespace kf::step3
