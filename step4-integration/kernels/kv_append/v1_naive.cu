// kv_append v1_naive: a thread an element of k, and the same element of v
//
// Idea      q, k and v leave GPT-2's c_attn side by side in one row: k[b, h, s, :] lies 3·H·D elements before
//           k[b, h, s+1, :]. The kernel reads them there, by strides, and writes each where the cache wants it, so no
//           copy is made first; both tensors in one launch.
// Launch    grid ⌈batch·heads·length·head_dim/256⌉, block 256, no shared memory
// Moves     4·batch·heads·length·head_dim·sizeof(T) bytes, no FLOPs
// Limits    batch·heads·length·head_dim ≤ 256·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>

#include "rungs.h"

namespace kf::KF_BACKEND::kv_append {
namespace {

using kf::kv_append::Strides;

constexpr int kThreads = 256;

__device__ __forceinline__ int64_t offset(const Strides& strides, int64_t batch, int64_t head, int64_t token) {
  return batch * strides.batch + head * strides.head + token * strides.seq;
}

template <class T>
__global__ void v1_naive_kernel(const Args a, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const int64_t d = i % a.head_dim;
  const int64_t token = i / a.head_dim % a.length;
  const int64_t head = i / a.head_dim / a.length % a.heads;
  const int64_t batch = i / a.head_dim / a.length / a.heads;
  const int64_t place = a.position + token + (a.positions == nullptr ? 0 : a.positions[batch]);
  if (place < 0 || place >= a.capacity) return;
  static_cast<T*>(a.k_cache)[offset(a.k_cache_strides, batch, head, place) + d] =
      static_cast<const T*>(a.k)[offset(a.k_strides, batch, head, token) + d];
  static_cast<T*>(a.v_cache)[offset(a.v_cache_strides, batch, head, place) + d] =
      static_cast<const T*>(a.v)[offset(a.v_strides, batch, head, token) + d];
}

}  // namespace

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const int64_t n = a.batch * a.heads * a.length * a.head_dim;
    const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
    v1_naive_kernel<T><<<blocks, kThreads, 0, as_stream(stream)>>>(a, n);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::kv_append
