// From a tensor to a rung: checks, allocation, dispatch. The only place of this stage where torch and kernels meet.
#include "attention_host.h"

#include <ATen/MemoryOverlap.h>
#include <kf/autocast.h>

#include <cmath>
#include <limits>

#include "attention_cpu.h"

namespace kf::step2 {
namespace {

// `auto` on CUDA tensors takes the best rung of those that have been measured (results/); where that cannot do it, the
// last that can.

Op<kf::softmax::Args> softmax_op() {
  return {"softmax", cpu::softmax, emulated::softmax::rungs(), gpu::softmax::rungs(),
          // Beyond 16384 columns, v4 pays for rows that begin anywhere.
          [](const kf::softmax::Args& a) {
            return a.width <= 16384 || a.width * size_of(a.dtype) % 16 == 0 ? "v4_registers" : "v3_online";
          }};
}

Op<kf::attention::Args> attention_op() {
  return {"attention", cpu::attention, emulated::attention::rungs(), gpu::attention::rungs(),
          [](const kf::attention::Args& a) {
            // Blocks that stay pay where each of an H200's 132 multiprocessors gets a tile of queries.
            const int64_t queries = a.head_dim <= 64 ? 256 : 128;
            const int64_t tiles = a.batch * a.heads * ((a.q_length + queries - 1) / queries);
            return tiles < 132 ? "v7_warpgroups" : "v8_persistent";
          }};
}

// For tensor cores and TMA: half types in rows that begin at multiples of 16 bytes, each in a place of its own. Others
// are copied; those that could not be so, whose head_dim is no multiple of 8, stay as they are.
bool has_aligned_rows(const at::Tensor& t) {
  if (t.element_size() != 2 || t.size(3) % 8 != 0) return true;
  bool aligned = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  for (int64_t dim = 0; dim < 3; ++dim) {
    aligned = aligned && (t.size(dim) <= 1 || (t.stride(dim) % 8 == 0 && t.stride(dim) > 0));
  }
  return aligned;
}

at::Tensor with_aligned_rows(const at::Tensor& t) {
  const at::Tensor whole = with_whole_rows(t);
  return has_aligned_rows(whole) ? whole : whole.clone(at::MemoryFormat::Contiguous);
}

kf::attention::Strides strides_of(const at::Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

// One of the bounds of the keys that exist.
void check_bound(const char* name, const std::optional<at::Tensor>& bound, const at::Tensor& q) {
  if (!bound) return;
  check_type("attention", name, *bound, at::kInt);
  check_device("attention", name, *bound, "q", q);
  check_shape("attention", name, *bound, {q.size(0)});
}

void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& key_begin, const std::optional<at::Tensor>& key_end) {
  check_floating("attention", "q", q);
  check_dim("attention", "q", q, 4);
  TORCH_CHECK_VALUE(q.size(3) > 0, "attention: the last dimension of `q` (head_dim) must not be 0, got shape ",
                    shape_text(q));
  check_like("attention", "k", k, "q", q);
  check_dim("attention", "k", k, 4);
  check_shape("attention", "k", k, {q.size(0), k.size(1), k.size(2), q.size(3)});
  TORCH_CHECK_VALUE(k.size(1) == q.size(1) || (k.size(1) > 0 && q.size(1) % k.size(1) == 0),
                    "attention: the heads of `q` must be a multiple of those of `k`, got ", q.size(1), " and ",
                    k.size(1));
  check_like("attention", "v", v, "q", q);
  check_dim("attention", "v", v, 4);
  check_shape("attention", "v", v, k.sizes());
  check_bound("key_begin", key_begin, q);
  check_bound("key_end", key_end, q);
}

at::ScalarType lse_dtype(const at::Tensor& q) { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace

at::Tensor& softmax_out(const at::Tensor& x, std::string_view rung, at::Tensor& out) {
  const int64_t width = check_rows("softmax", "x", x);
  check_out("softmax", "out", out, x.sizes(), "x", x);
  check_apart("softmax", {{"out", out}}, {{"x", x}});
  check_rung(softmax_op(), rung, x);
  if (x.numel() == 0) return out;
  const at::Tensor contiguous = x.contiguous();
  run(softmax_op(), rung, x, {contiguous.data_ptr(), out.data_ptr(), x.numel() / width, width, dtype_of(x)});
  return out;
}

at::Tensor softmax(const at::Tensor& x, std::string_view rung) {
  at::Tensor out = contiguous_like(x);
  return softmax_out(x, rung, out);
}

// As PyTorch treats its own softmax on a GPU: in float32, whatever comes in.
at::Tensor softmax_autocast(const at::Tensor& x, std::string_view rung) {
  return call_in<softmax>(at::kFloat, "step2_attention::softmax", x, rung);
}

std::tuple<at::Tensor&, at::Tensor&> attention_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                   const std::optional<at::Tensor>& key_begin,
                                                   const std::optional<at::Tensor>& key_end, bool causal,
                                                   std::optional<double> scale, std::string_view rung, at::Tensor& out,
                                                   at::Tensor& lse) {
  check_attention(q, k, v, key_begin, key_end);
  check_like("attention", "out", out, "q", q, q.sizes());
  TORCH_CHECK_VALUE(out.stride(3) == 1 || out.size(3) == 1,
                    "attention: the last dimension of `out` must be contiguous, got stride ", out.stride(3));
  TORCH_CHECK_VALUE(at::has_internal_overlap(out) != at::MemOverlap::Yes,
                    "attention: `out` must not be expanded: several of its elements share memory");
  check_type("attention", "lse", lse, lse_dtype(q));
  check_device("attention", "lse", lse, "q", q);
  check_shape("attention", "lse", lse, q.sizes().slice(0, 3));
  TORCH_CHECK_VALUE(lse.is_contiguous(), "attention: `lse` must be contiguous");
  check_apart("attention", {{"out", out}, {"lse", lse}}, {{"q", q}, {"k", k}, {"v", v}});
  if (key_begin) check_apart("attention", {{"out", out}, {"lse", lse}}, {{"key_begin", *key_begin}});
  if (key_end) check_apart("attention", {{"out", out}, {"lse", lse}}, {{"key_end", *key_end}});
  check_rung(attention_op(), rung, q);
  if (out.numel() == 0) return {out, lse};
  if (k.size(2) == 0) {  // nothing to see
    out.zero_();
    lse.fill_(-std::numeric_limits<double>::infinity());
    return {out, lse};
  }
  const at::Tensor q_rows = with_aligned_rows(q);
  const at::Tensor k_rows = with_aligned_rows(k);
  const at::Tensor v_rows = with_aligned_rows(v);
  const at::Tensor out_rows = has_aligned_rows(out) ? out : contiguous_like(out);
  const at::Tensor begin = key_begin ? key_begin->contiguous() : at::Tensor();
  const at::Tensor end = key_end ? key_end->contiguous() : at::Tensor();
  kf::attention::Args args{};
  args.q = q_rows.data_ptr();
  args.k = k_rows.data_ptr();
  args.v = v_rows.data_ptr();
  args.out = out_rows.data_ptr();
  args.lse = lse.data_ptr();
  args.key_begin = key_begin ? begin.const_data_ptr<int32_t>() : nullptr;
  args.key_end = key_end ? end.const_data_ptr<int32_t>() : nullptr;
  args.q_stride = strides_of(q_rows);
  args.k_stride = strides_of(k_rows);
  args.v_stride = strides_of(v_rows);
  args.out_stride = strides_of(out_rows);
  args.batch = q.size(0);
  args.heads = q.size(1);
  args.kv_heads = k.size(1);
  args.q_length = q.size(2);
  args.k_length = k.size(2);
  args.head_dim = q.size(3);
  args.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  args.causal = causal;
  args.dtype = dtype_of(q);
  run(attention_op(), rung, q, args);
  if (!out_rows.is_same(out)) out.copy_(out_rows);
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             const std::optional<at::Tensor>& key_begin,
                                             const std::optional<at::Tensor>& key_end, bool causal,
                                             std::optional<double> scale, std::string_view rung) {
  check_floating("attention", "q", q);
  check_dim("attention", "q", q, 4);
  at::Tensor out = contiguous_like(q);
  at::Tensor lse = at::empty(q.sizes().slice(0, 3), q.options().dtype(lse_dtype(q)));
  attention_out(q, k, v, key_begin, key_end, causal, scale, rung, out, lse);
  return {out, lse};
}

// As PyTorch treats its own attention: in autocast's dtype.
std::tuple<at::Tensor, at::Tensor> attention_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                      const std::optional<at::Tensor>& key_begin,
                                                      const std::optional<at::Tensor>& key_end, bool causal,
                                                      std::optional<double> scale, std::string_view rung) {
  return call_in<attention>(std::nullopt, "step2_attention::attention", q, k, v, key_begin, key_end, causal, scale,
                            rung);
}

std::vector<OpInfo> ops() { return {describe(softmax_op()), describe(attention_op())}; }

}  // namespace kf::step2
