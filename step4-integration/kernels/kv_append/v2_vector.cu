// kv_append v2_vector: 16 bytes a thread
//
// Idea      A head's row of 64 halves is eight 128-bit words: eight threads copy it instead of 64, and the three
//           divisions that find head and token are paid once for N elements.
// Since v1  A thread owns N neighbours along head_dim. Where N does not divide head_dim or a stride, or a pointer does
//           not start at a multiple of 16 bytes, N is 1 and this is v1 again.
// Launch    grid ⌈batch·heads·length·head_dim/N/256⌉, block 256, no shared memory; N = 16/sizeof(T)
// Moves     4·batch·heads·length·head_dim·sizeof(T) bytes, no FLOPs
// Limits    batch·heads·length·head_dim ≤ 256·N·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>

#include "rungs.h"

namespace kf::KF_BACKEND::kv_append {
namespace {

using kf::kv_append::Strides;

constexpr int kThreads = 256;

__device__ __forceinline__ int64_t offset(const Strides& strides, int64_t batch, int64_t head, int64_t token) {
  return batch * strides.batch + head * strides.head + token * strides.seq;
}

template <int N, class T>
__global__ void v2_vector_kernel(const Args a, int64_t n) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  if (i >= n) return;
  const int64_t d = i % a.head_dim;
  const int64_t token = i / a.head_dim % a.length;
  const int64_t head = i / a.head_dim / a.length % a.heads;
  const int64_t batch = i / a.head_dim / a.length / a.heads;
  const int64_t place = a.position + token + (a.positions == nullptr ? 0 : a.positions[batch]);
  if (place < 0 || place >= a.capacity) return;
  const Vector<T, N> k = load_vector<N>(static_cast<const T*>(a.k) + offset(a.k_strides, batch, head, token) + d);
  const Vector<T, N> v = load_vector<N>(static_cast<const T*>(a.v) + offset(a.v_strides, batch, head, token) + d);
  store_vector<N>(static_cast<T*>(a.k_cache) + offset(a.k_cache_strides, batch, head, place) + d, k);
  store_vector<N>(static_cast<T*>(a.v_cache) + offset(a.v_cache_strides, batch, head, place) + d, v);
}

bool divides(int64_t n, const Strides& strides) {
  return strides.batch % n == 0 && strides.head % n == 0 && strides.seq % n == 0;
}

template <int N, class T>
void launch(const Args& a, void* stream) {
  const int64_t n = a.batch * a.heads * a.length * a.head_dim;
  const auto blocks = static_cast<unsigned>(ceil_div(n / N, kThreads));
  v2_vector_kernel<N, T><<<blocks, kThreads, 0, as_stream(stream)>>>(a, n);
}

}  // namespace

void v2_vector(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr int kVector = 16 / sizeof(T);
    const bool wide = a.head_dim % kVector == 0 && divides(kVector, a.k_strides) && divides(kVector, a.v_strides) &&
                      divides(kVector, a.k_cache_strides) && divides(kVector, a.v_cache_strides) &&
                      aligned_16(a.k, a.v, a.k_cache, a.v_cache);
    wide ? launch<kVector, T>(a, stream) : launch<1, T>(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::kv_append
