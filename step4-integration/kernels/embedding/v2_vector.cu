// embedding v2_vector: 16 bytes a thread
//
// Idea      128-bit loads of both rows and a 128-bit store, as in step1's v2. A thread reads its id, and divides by the
//           width, once for N elements instead of once for each.
// Since v1  A thread owns N neighbours of one row. Where N does not divide the width, or a pointer does not start at a
//           multiple of 16 bytes, N is 1 and this is v1 again.
// Bad ids   As in v1: a row of NaN.
// Launch    grid ⌈batch·length·width/N/256⌉, block 256, no shared memory; N = 16/sizeof(T)
// Moves     (2·batch + 1)·length·width·sizeof(T) + batch·length·sizeof(id) bytes (the positions' rows come from cache
//           after the first sequence); batch·length·width FLOPs
// Limits    batch·length·width ≤ 256·N·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>

#include "place.h"
#include "rungs.h"

namespace kf::KF_BACKEND::embedding {
namespace {

constexpr int kThreads = 256;

template <int N, class T, class Id>
__global__ void v2_vector_kernel(const Args a, const Id* __restrict__ ids, const T* __restrict__ token,
                                 const T* __restrict__ position_weight, T* __restrict__ y, int64_t n) {
  const int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  if (i >= n) return;
  const int64_t row = i / a.width;
  const int64_t column = i % a.width;
  const int64_t id = ids[row];
  const int64_t place = place_of(a, row / a.length, row % a.length);
  const bool valid = id >= 0 && id < a.vocab && place < a.position_rows;
  Vector<T, N> p{};
  if (place < a.position_rows) p = load_vector<N>(position_weight + place * a.width + column);  // without the id
  Vector<T, N> v = p;
  if (valid) v = load_vector<N>(token + id * a.width + column);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const auto sum = to_compute(v.element[j]) + to_compute(p.element[j]);
    v.element[j] = from_compute<T>(valid ? sum : compute_t<T>(NAN));
  }
  store_vector<N>(y + i, v);
}

template <int N, class T, class Id>
void launch(const Args& a, void* stream) {
  const int64_t n = a.batch * a.length * a.width;
  const auto blocks = static_cast<unsigned>(ceil_div(n / N, kThreads));
  v2_vector_kernel<N>
      <<<blocks, kThreads, 0, as_stream(stream)>>>(a, static_cast<const Id*>(a.ids), static_cast<const T*>(a.token),
                                                   static_cast<const T*>(a.position_weight), static_cast<T*>(a.y), n);
}

template <class Id>
void launch_for(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    constexpr int kVector = 16 / sizeof(T);
    a.width % kVector == 0 && aligned_16(a.token, a.position_weight, a.y) ? launch<kVector, T, Id>(a, stream)
                                                                          : launch<1, T, Id>(a, stream);
  });
}

}  // namespace

void v2_vector(const Args& a, void* stream) {
  a.ids_64 ? launch_for<int64_t>(a, stream) : launch_for<int32_t>(a, stream);
  check_launch();
}

}  // namespace kf::KF_BACKEND::embedding
