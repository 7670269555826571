// Step 2's attention, for rungs of this step that begin with it: the rung that its `auto` would take.
#pragma once

#include <attention/rungs.h>
#include <kf/best.h>
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step3/attention.h>

namespace kf::KF_BACKEND {

// This step's attention in step 2's words. out: [batch, q_length, heads·head_dim], contiguous.
inline attention::Args attention_args(const Attention& a, DType dtype, void* out, void* lse) {
  const auto strides = [](const TensorRef& t) {
    return kf::attention::Strides{t.batch_stride, t.head_stride, t.seq_stride};
  };
  const int64_t width = a.heads * a.head_dim;
  attention::Args args{};
  args.q = a.q.data, args.k = a.k.data, args.v = a.v.data, args.out = out, args.lse = lse;
  args.q_stride = strides(a.q), args.k_stride = strides(a.k), args.v_stride = strides(a.v);
  args.out_stride = {a.q_length * width, a.head_dim, width};
  args.batch = a.batch, args.heads = a.heads, args.kv_heads = a.heads;
  args.q_length = a.q_length, args.k_length = a.k_length, args.head_dim = a.head_dim;
  args.scale = a.scale, args.causal = a.causal, args.dtype = dtype;
  args.key_begin = a.key_begin, args.key_end = a.key_end;
  args.cu_seqlens = args.cu_seqlens_k = a.cu_seqlens, args.documents = a.documents;
  args.threshold = a.threshold, args.rng_state = a.rng_state, args.seed = a.seed, args.offset = a.offset;
  return args;
}

// Scratch memory for attention's output, padded so that other things may follow.
inline int64_t attended_bytes(const Attention& a, DType dtype) {
  return padded_bytes(a.batch * a.q_length * a.heads * a.head_dim * size_of(dtype));
}

inline const Rung<attention::Args>& best_attention(const attention::Args& args) {
  return best_rung(attention::rungs(), kf::attention::automatic(args), args);
}

inline std::string can_implement_attention(const Attention& a, DType dtype) {
  return can_implement_any(attention::rungs(), attention_args(a, dtype, nullptr, nullptr));
}

// What launch_attention needs besides its output: the log-sum-exp, where nobody else wants it, and the rung's own.
inline int64_t lse_bytes(const Attention& a, DType dtype) {
  return a.lse == nullptr ? padded_bytes(a.batch * a.heads * a.q_length * (dtype == DType::kFloat64 ? 8 : 4)) : 0;
}
inline int64_t attention_scratch_bytes(const Attention& a, DType dtype) {
  const attention::Args args = attention_args(a, dtype, nullptr, nullptr);
  return lse_bytes(a, dtype) + scratch_bytes_of(best_attention(args), args);
}

// Attention over no key.
template <class T>
__global__ void see_nothing(T* out, int64_t n, compute_t<T>* lse, int64_t queries) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) out[i] = from_compute<T>(0);
  if (lse != nullptr && i < queries) lse[i] = -INFINITY;
}

// Attention into `out`. scratch: attention_scratch_bytes bytes.
inline void launch_attention(const Attention& a, DType dtype, void* out, void* scratch, void* stream) {
  if (a.k_length == 0) {  // which no rung of step 2 is asked for
    with_type(dtype, [&](auto type) {
      using T = typename decltype(type)::element;
      const int64_t queries = a.batch * a.heads * a.q_length, n = queries * a.head_dim;
      see_nothing<<<static_cast<unsigned>(ceil_div(n, 256)), 256, 0, as_stream(stream)>>>(
          static_cast<T*>(out), n, static_cast<compute_t<T>*>(a.lse), queries);
    });
    return check_launch();
  }
  attention::Args args = attention_args(a, dtype, out, a.lse == nullptr ? scratch : a.lse);
  args.scratch = static_cast<unsigned char*>(scratch) + lse_bytes(a, dtype);
  best_attention(args).launch(args, stream);
}

}  // namespace kf::KF_BACKEND
