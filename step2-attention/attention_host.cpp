// From a tensor to a rung for softmax and attention: checks, allocation, dispatch. host/linear_host.cpp has the
// product's.
#include <ATen/MemoryOverlap.h>
#include <kf/autocast.h>
#include <kf/documents.h>
#include <kf/dropout.h>
#include <kf/key_bounds.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "cpu/attention_cpu.h"
#include "host/registrations.h"

namespace kf::step2 {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

Op<kf::softmax::Args> softmax_op() {
  return {"softmax", cpu::softmax, emulated::softmax::rungs(), gpu::softmax::rungs(), kf::softmax::automatic};
}

Op<kf::softmax_backward::Args> softmax_backward_op() {
  return {"softmax_backward", cpu::softmax_backward, emulated::softmax_backward::rungs(),
          gpu::softmax_backward::rungs(), kf::softmax_backward::automatic};
}

Op<kf::attention::Args> attention_op() {
  return {"attention", cpu::attention, emulated::attention::rungs(), gpu::attention::rungs(), kf::attention::automatic};
}

Op<kf::attention_backward::Args> backward_op() {
  return {"attention_backward", cpu::attention_backward, emulated::attention_backward::rungs(),
          gpu::attention_backward::rungs(), kf::attention_backward::automatic};
}

Op<kf::attention_decode::Args> decode_op() {
  return {"attention_decode", cpu::attention_decode, emulated::attention_decode::rungs(),
          gpu::attention_decode::rungs(), kf::attention_decode::automatic};
}

kf::attention::Strides strides_of(const Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

// The causal mask needs rows and columns.
void check_squares(const char* op, const char* name, const Tensor& t, bool causal) {
  TORCH_CHECK_VALUE(!causal || t.dim() >= 2, op, ": `", name,
                    "` must have at least 2 dimensions where `causal` is set, got ", t.dim(), " (shape ", shape_text(t),
                    ")");
}

// Queries, and heads that share those of the keys.
void check_heads(const char* op, const Tensor& q, const char* k_name, const Tensor& k) {
  TORCH_CHECK_VALUE(k.size(1) == q.size(1) || (k.size(1) > 0 && q.size(1) % k.size(1) == 0), op,
                    ": the heads of `q` must be a multiple of those of `", k_name, "`, got ", q.size(1), " and ",
                    k.size(1));
}

void check_q(const char* op, const Tensor& q) {
  check_floating(op, "q", q);
  check_dim(op, "q", q, 4);
  TORCH_CHECK_VALUE(q.size(3) > 0, op, ": the last dimension of `q` (head_dim) must not be 0, got shape ",
                    shape_text(q));
}

void check_attention(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Optional& key_begin,
                     const Optional& key_end, const Optional& cu_seqlens = {}, const Optional& cu_seqlens_k = {}) {
  check_q(op, q);
  check_like(op, "k", k, "q", q);
  check_dim(op, "k", k, 4);
  check_shape(op, "k", k, {q.size(0), k.size(1), k.size(2), q.size(3)});
  check_heads(op, q, "k", k);
  check_like(op, "v", v, "q", q);
  check_dim(op, "v", v, 4);
  check_shape(op, "v", v, k.sizes());
  check_key_bounds(op, q, key_begin, key_end);
  check_documents(op, q, k, key_begin, key_end, cu_seqlens, cu_seqlens_k);
}

at::ScalarType lse_dtype(const Tensor& q) { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// One number for each query, of lse's dtype.
void check_of_each_query(const char* op, const char* name, const Tensor& t, const Tensor& q) {
  check_type(op, name, t, lse_dtype(q));
  check_device(op, name, t, "q", q);
  check_shape(op, name, t, q.sizes().slice(0, 3));
}

// An output whose rows may lie anywhere.
void check_rows_of(const char* op, const char* name, const Tensor& out, const Tensor& q, at::IntArrayRef shape) {
  check_like(op, name, out, "q", q, shape);
  TORCH_CHECK_VALUE(out.stride(3) == 1 || out.size(3) == 1, op, ": the last dimension of `", name,
                    "` must be contiguous, got stride ", out.stride(3));
  TORCH_CHECK_VALUE(at::has_internal_overlap(out) != at::MemOverlap::Yes, op, ": `", name,
                    "` must not be expanded: several of its elements share memory");
}

// The outputs of attention and of decode, which must share no memory with `inputs`.
void check_outs(const char* op, const Tensor& out, const Tensor& lse, const Tensor& q,
                const std::vector<std::pair<const char*, Optional>>& inputs) {
  check_rows_of(op, "out", out, q, q.sizes());
  check_of_each_query(op, "lse", lse, q);
  TORCH_CHECK_VALUE(lse.is_contiguous(), op, ": `lse` must be contiguous");
  check_apart(op, {{"out", out}, {"lse", lse}}, {{"q", q}});
  for (const auto& [name, input] : inputs) {
    if (input) check_apart(op, {{"out", out}, {"lse", lse}}, {{name, *input}});
  }
}

// What attention and decode have in common of their arguments, by tensors that outlive the launch.
struct Rows {
  Tensor q, k, v, out, begin, end;

  Rows(const Tensor& q_given, const Tensor& k_given, const Tensor& v_given, const Tensor& out_given,
       const Optional& key_begin, const Optional& key_end, bool for_decode)
      : q(with_aligned_rows(q_given, for_decode)),
        k(with_aligned_rows(k_given, for_decode)),
        v(with_aligned_rows(v_given, for_decode)),
        out(has_aligned_rows(out_given) ? out_given : contiguous_like(out_given)),
        begin(key_begin ? key_begin->contiguous() : Tensor()),
        end(key_end ? key_end->contiguous() : Tensor()) {}

  void fill(kf::attention::Args& args, const Tensor& lse, std::optional<double> scale) const {
    args.q = q.data_ptr();
    args.k = k.data_ptr();
    args.v = v.data_ptr();
    args.out = out.data_ptr();
    args.lse = lse.data_ptr();
    args.key_begin = begin.defined() ? begin.const_data_ptr<int32_t>() : nullptr;
    args.key_end = end.defined() ? end.const_data_ptr<int32_t>() : nullptr;
    args.q_stride = strides_of(q);
    args.k_stride = strides_of(k);
    args.v_stride = strides_of(v);
    args.out_stride = strides_of(out);
    args.batch = q.size(0);
    args.heads = q.size(1);
    args.kv_heads = k.size(1);
    args.q_length = q.size(2);
    args.k_length = k.size(2);
    args.head_dim = q.size(3);
    args.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
    args.dtype = dtype_of(q);
  }
};

// Where the documents of a packed row begin, by tensors that outlive the launch.
struct DocumentStarts {
  Tensor of_queries, of_keys;

  DocumentStarts(const char* op, const Optional& cu_seqlens, const Optional& cu_seqlens_k, const Tensor& q,
                 const Tensor& k) {
    if (!cu_seqlens) return;
    of_queries = cu_seqlens->contiguous();
    of_keys = cu_seqlens_k ? cu_seqlens_k->contiguous() : of_queries;
    check_starts(op, "cu_seqlens", of_queries, q.size(2));
    if (cu_seqlens_k) check_starts(op, "cu_seqlens_k", of_keys, k.size(2));
  }

  void fill(kf::attention::Args& args) const {
    if (!of_queries.defined()) return;
    args.cu_seqlens = of_queries.const_data_ptr<int32_t>();
    args.cu_seqlens_k = of_keys.const_data_ptr<int32_t>();
    args.documents = of_queries.size(0) - 1;
  }
};

void sees_nothing(Tensor& out, Tensor& lse) {
  out.zero_();
  lse.fill_(-std::numeric_limits<double>::infinity());
}

// ---- decode ----

void check_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Optional& key_begin,
                  const Optional& key_end, const Optional& block_table) {
  const char* op = "attention_decode";
  check_q(op, q);
  TORCH_CHECK_VALUE(q.size(2) <= kf::attention_decode::kMostQueries, op, ": `q` must have at most ",
                    kf::attention_decode::kMostQueries, " queries, got ", q.size(2), "; `attention` takes more");
  check_like(op, "k_cache", k_cache, "q", q);
  check_dim(op, "k_cache", k_cache, 4);
  const int64_t pages = block_table ? k_cache.size(0) : q.size(0);
  check_shape(op, "k_cache", k_cache, {pages, k_cache.size(1), k_cache.size(2), q.size(3)});
  check_heads(op, q, "k_cache", k_cache);
  check_like(op, "v_cache", v_cache, "q", q);
  check_dim(op, "v_cache", v_cache, 4);
  check_shape(op, "v_cache", v_cache, k_cache.sizes());
  check_key_bounds(op, q, key_begin, key_end);
  if (!block_table) return;
  check_type(op, "block_table", *block_table, at::kInt);
  check_device(op, "block_table", *block_table, "q", q);
  check_dim(op, "block_table", *block_table, 2);
  check_shape(op, "block_table", *block_table, {q.size(0), block_table->size(1)});
}

// Each page that holds a key which exists must be one of the cache. On a GPU that cannot be known without waiting for
// it: there such a page is NaN.
void check_pages(const kf::attention_decode::Args& a) {
  for (int64_t batch = 0; batch < a.batch; ++batch) {
    const auto [begin, end] = cpu::keys_of(a, batch);
    for (int64_t key = begin; key < end; key = (key / a.block_size + 1) * a.block_size) {
      const int64_t page = a.block_table[batch * a.table_stride + key / a.block_size];
      TORCH_CHECK_VALUE(page >= 0 && page < a.blocks, "attention_decode: `block_table`[", batch, ", ",
                        key / a.block_size, "] must be from 0 to ", a.blocks - 1, ", got ", page);
    }
  }
}

// ---- the ops ----

// What is the same in softmax's arguments and in its gradient's.
template <class Args>
Args rows_of(const Tensor& x, std::optional<double> scale, bool causal) {
  Args args{};
  args.width = x.size(-1);
  args.rows = x.numel() / args.width;
  args.q_length = x.dim() >= 2 ? x.size(-2) : 1;
  args.scale = scale.value_or(1.0);
  args.causal = causal;
  args.dtype = dtype_of(x);
  return args;
}

Tensor& softmax_out(const Tensor& x, std::optional<double> scale, bool causal, std::string_view rung, Tensor& out) {
  check_rows("softmax", "x", x);
  check_squares("softmax", "x", x, causal);
  check_out("softmax", "out", out, x.sizes(), "x", x);
  check_apart("softmax", {{"out", out}}, {{"x", x}});
  check_rung(softmax_op(), rung, x);
  if (x.numel() == 0) return out;
  const Tensor contiguous = x.contiguous();
  auto args = rows_of<kf::softmax::Args>(x, scale, causal);
  args.x = contiguous.data_ptr();
  args.y = out.data_ptr();
  run(softmax_op(), rung, x, args);
  return out;
}

Tensor softmax(const Tensor& x, std::optional<double> scale, bool causal, std::string_view rung) {
  Tensor out = contiguous_like(x);
  return softmax_out(x, scale, causal, rung, out);
}

// As PyTorch treats its own softmax on a GPU: in float32, whatever comes in.
Tensor softmax_autocast(const Tensor& x, std::optional<double> scale, bool causal, std::string_view rung) {
  return call_in<softmax>(at::kFloat, "step2_attention::softmax", x, scale, causal, rung);
}

Tensor& softmax_backward_out(const Tensor& grad, const Tensor& y, std::optional<double> scale, bool causal,
                             std::string_view rung, Tensor& out) {
  constexpr const char* op = "softmax_backward";
  check_rows(op, "grad", grad);
  check_squares(op, "grad", grad, causal);
  check_like(op, "y", y, "grad", grad, grad.sizes());
  check_out(op, "out", out, grad.sizes(), "grad", grad);
  check_apart(op, {{"out", out}}, {{"grad", grad}, {"y", y}});
  check_rung(softmax_backward_op(), rung, grad);
  if (grad.numel() == 0) return out;
  const Tensor contiguous_grad = grad.contiguous(), contiguous_y = y.contiguous();
  auto args = rows_of<kf::softmax_backward::Args>(grad, scale, causal);
  args.grad = contiguous_grad.data_ptr();
  args.y = contiguous_y.data_ptr();
  args.grad_x = out.data_ptr();
  run(softmax_backward_op(), rung, grad, args);
  return out;
}

Tensor softmax_backward(const Tensor& grad, const Tensor& y, std::optional<double> scale, bool causal,
                        std::string_view rung) {
  Tensor out = contiguous_like(grad);
  return softmax_backward_out(grad, y, scale, causal, rung, out);
}

std::tuple<Tensor&, Tensor&> attention_out(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& key_begin,
                                           const Optional& key_end, const Optional& rng_state,
                                           const Optional& cu_seqlens, const Optional& cu_seqlens_k, bool causal,
                                           std::optional<double> scale, double dropout_p, std::string_view rung,
                                           Tensor& out, Tensor& lse) {
  check_attention("attention", q, k, v, key_begin, key_end, cu_seqlens, cu_seqlens_k);
  const DropoutArgs dropout("attention", "dropout_p", dropout_p, "rng_state", rng_state, q);
  check_outs("attention", out, lse, q,
             {{"k", k},
              {"v", v},
              {"key_begin", key_begin},
              {"key_end", key_end},
              {"rng_state", rng_state},
              {"cu_seqlens", cu_seqlens},
              {"cu_seqlens_k", cu_seqlens_k}});
  check_rung(attention_op(), rung, q);
  const DocumentStarts starts("attention", cu_seqlens, cu_seqlens_k, q, k);
  if (out.numel() == 0) return {out, lse};
  if (k.size(2) == 0) {
    sees_nothing(out, lse);
    return {out, lse};
  }
  const Rows rows(q, k, v, out, key_begin, key_end, false);
  kf::attention::Args args{};
  rows.fill(args, lse, scale);
  dropout.set(args);
  starts.fill(args);
  args.causal = causal;
  run(attention_op(), rung, q, args);
  if (!rows.out.is_same(out)) out.copy_(rows.out);
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& key_begin,
                                     const Optional& key_end, const Optional& rng_state, const Optional& cu_seqlens,
                                     const Optional& cu_seqlens_k, bool causal, std::optional<double> scale,
                                     double dropout_p, std::string_view rung) {
  check_floating("attention", "q", q);
  check_dim("attention", "q", q, 4);
  Tensor out = contiguous_like(q);
  Tensor lse = at::empty(q.sizes().slice(0, 3), q.options().dtype(lse_dtype(q)));
  attention_out(q, k, v, key_begin, key_end, rng_state, cu_seqlens, cu_seqlens_k, causal, scale, dropout_p, rung, out,
                lse);
  return {out, lse};
}

// As PyTorch treats its own attention: in autocast's dtype.
std::tuple<Tensor, Tensor> attention_autocast(const Tensor& q, const Tensor& k, const Tensor& v,
                                              const Optional& key_begin, const Optional& key_end,
                                              const Optional& rng_state, const Optional& cu_seqlens,
                                              const Optional& cu_seqlens_k, bool causal, std::optional<double> scale,
                                              double dropout_p, std::string_view rung) {
  return call_in<attention>(std::nullopt, "step2_attention::attention", q, k, v, key_begin, key_end, rng_state,
                            cu_seqlens, cu_seqlens_k, causal, scale, dropout_p, rung);
}

std::tuple<Tensor&, Tensor&, Tensor&> attention_backward_out(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const Optional& key_begin, const Optional& key_end, const Optional& grad_lse, const Optional& rng_state,
    const Optional& cu_seqlens, const Optional& cu_seqlens_k, bool causal, std::optional<double> scale,
    double dropout_p, std::string_view rung, Tensor& dq, Tensor& dk, Tensor& dv) {
  const char* op = "attention_backward";
  check_attention(op, q, k, v, key_begin, key_end, cu_seqlens, cu_seqlens_k);
  check_like(op, "grad", grad, "q", q, q.sizes());
  check_like(op, "out", out, "q", q, q.sizes());
  check_of_each_query(op, "lse", lse, q);
  if (grad_lse) check_of_each_query(op, "grad_lse", *grad_lse, q);
  const DropoutArgs dropout(op, "dropout_p", dropout_p, "rng_state", rng_state, q);
  check_rows_of(op, "dq", dq, q, q.sizes());
  check_rows_of(op, "dk", dk, q, k.sizes());
  check_rows_of(op, "dv", dv, q, k.sizes());
  const std::initializer_list<Named> outs = {{"dq", dq}, {"dk", dk}, {"dv", dv}};
  check_apart(op, outs, {{"grad", grad}, {"q", q}, {"k", k}, {"v", v}, {"out", out}, {"lse", lse}});
  const std::pair<const char*, Optional> others[] = {{"key_begin", key_begin},   {"key_end", key_end},
                                                     {"grad_lse", grad_lse},     {"rng_state", rng_state},
                                                     {"cu_seqlens", cu_seqlens}, {"cu_seqlens_k", cu_seqlens_k}};
  for (const auto& [name, input] : others) {
    if (input) check_apart(op, outs, {{name, *input}});
  }
  check_rung(backward_op(), rung, q);
  const DocumentStarts starts(op, cu_seqlens, cu_seqlens_k, q, k);
  if (q.numel() == 0 || k.size(2) == 0) {  // no output, or one that is 0 whatever comes in
    dq.zero_(), dk.zero_(), dv.zero_();
    return {dq, dk, dv};
  }
  const Rows rows(q, k, v, dq, key_begin, key_end, false);
  const Tensor out_rows = with_aligned_rows(out), grad_rows = with_aligned_rows(grad);
  const Tensor dk_rows = has_aligned_rows(dk) ? dk : contiguous_like(dk);
  const Tensor dv_rows = has_aligned_rows(dv) ? dv : contiguous_like(dv);
  const Tensor lse_rows = lse.contiguous(), grad_lse_rows = grad_lse ? grad_lse->contiguous() : Tensor();
  kf::attention_backward::Args args{};
  rows.fill(args, lse_rows, scale);
  dropout.set(args);
  starts.fill(args);
  args.dq = args.out;
  args.dq_stride = args.out_stride;
  args.out = out_rows.data_ptr();
  args.out_stride = strides_of(out_rows);
  args.grad = grad_rows.data_ptr();
  args.grad_stride = strides_of(grad_rows);
  args.grad_lse = grad_lse_rows.defined() ? grad_lse_rows.data_ptr() : nullptr;
  args.dk = dk_rows.data_ptr();
  args.dk_stride = strides_of(dk_rows);
  args.dv = dv_rows.data_ptr();
  args.dv_stride = strides_of(dv_rows);
  args.causal = causal;
  run(backward_op(), rung, q, args);
  if (!rows.out.is_same(dq)) dq.copy_(rows.out);
  if (!dk_rows.is_same(dk)) dk.copy_(dk_rows);
  if (!dv_rows.is_same(dv)) dv.copy_(dv_rows);
  return {dq, dk, dv};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                      const Tensor& v, const Tensor& out, const Tensor& lse,
                                                      const Optional& key_begin, const Optional& key_end,
                                                      const Optional& grad_lse, const Optional& rng_state,
                                                      const Optional& cu_seqlens, const Optional& cu_seqlens_k,
                                                      bool causal, std::optional<double> scale, double dropout_p,
                                                      std::string_view rung) {
  Tensor dq = contiguous_like(q), dk = contiguous_like(k), dv = contiguous_like(v);
  attention_backward_out(grad, q, k, v, out, lse, key_begin, key_end, grad_lse, rng_state, cu_seqlens, cu_seqlens_k,
                         causal, scale, dropout_p, rung, dq, dk, dv);
  return {dq, dk, dv};
}

std::tuple<Tensor&, Tensor&> attention_decode_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                                  const Optional& key_begin, const Optional& key_end,
                                                  const Optional& block_table, std::optional<double> scale,
                                                  std::string_view rung, Tensor& out, Tensor& lse) {
  const char* op = "attention_decode";
  check_decode(q, k_cache, v_cache, key_begin, key_end, block_table);
  check_outs(op, out, lse, q,
             {{"k_cache", k_cache},
              {"v_cache", v_cache},
              {"key_begin", key_begin},
              {"key_end", key_end},
              {"block_table", block_table}});
  check_rung(decode_op(), rung, q);
  if (out.numel() == 0) return {out, lse};
  const int64_t capacity = k_cache.size(2) * (block_table ? block_table->size(1) : 1);
  if (capacity == 0) {
    sees_nothing(out, lse);
    return {out, lse};
  }
  const Rows rows(q, k_cache, v_cache, out, key_begin, key_end, true);
  const Tensor table = block_table ? block_table->contiguous() : Tensor();
  kf::attention_decode::Args args{};
  rows.fill(args, lse, scale);
  args.k_length = capacity;
  args.blocks = k_cache.size(0);
  args.block_size = k_cache.size(2);
  if (table.defined()) {
    args.block_table = table.const_data_ptr<int32_t>();
    args.table_stride = table.size(1);
    if (q.is_cpu()) check_pages(args);
  }
  run(decode_op(), rung, q, args);
  if (!rows.out.is_same(out)) out.copy_(rows.out);
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                            const Optional& key_begin, const Optional& key_end,
                                            const Optional& block_table, std::optional<double> scale,
                                            std::string_view rung) {
  check_q("attention_decode", q);
  Tensor out = contiguous_like(q);
  Tensor lse = at::empty(q.sizes().slice(0, 3), q.options().dtype(lse_dtype(q)));
  attention_decode_out(q, k_cache, v_cache, key_begin, key_end, block_table, scale, rung, out, lse);
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention_decode_autocast(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                                     const Optional& key_begin, const Optional& key_end,
                                                     const Optional& block_table, std::optional<double> scale,
                                                     std::string_view rung) {
  return call_in<attention_decode>(std::nullopt, "step2_attention::attention_decode", q, k_cache, v_cache, key_begin,
                                   key_end, block_table, scale, rung);
}

}  // namespace

void register_attention(torch::Library& m) {
  m.impl("softmax", softmax);
  m.impl("softmax.out", softmax_out);
  m.impl("softmax_backward", softmax_backward);
  m.impl("softmax_backward.out", softmax_backward_out);
  m.impl("draw_rng_state", draw_rng_state);
  m.impl("attention", attention);
  m.impl("attention.out", attention_out);
  m.impl("attention_backward", attention_backward);
  m.impl("attention_backward.out", attention_backward_out);
  m.impl("attention_decode", attention_decode);
  m.impl("attention_decode.out", attention_decode_out);
}

// softmax_backward needs none: it keeps the dtype that it gets, and gets what softmax had.
void register_attention_autocast(torch::Library& m) {
  m.impl("softmax", softmax_autocast);
  m.impl("attention", attention_autocast);
  m.impl("attention_decode", attention_decode_autocast);
}

std::vector<OpInfo> ops() {
  std::vector<OpInfo> all = linear_ops();
  all.insert(all.end(), {describe(softmax_op()), describe(softmax_backward_op()), describe(attention_op()),
                         describe(backward_op()), describe(decode_op())});
  return all;
}

}  // namespace kf::step2
