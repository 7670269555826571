// embedding v1_naive: two table look-ups and their sum, a thread an element
//
// Idea      Separately, each look-up writes its rows and the addition reads both back. Here the two rows meet in a
//           register. Thread i owns element i of y; i / width is its token, i mod width its column. Neighbouring
//           threads read neighbouring columns of one row, so a gather by rows is coalesced.
// Bad ids   An id outside the vocabulary must not be read: its row becomes NaN, and so where the position table ends.
//           The host checks ids on the CPU; on the GPU a check there would wait for the stream, and NaN reaches the
//           loss by itself.
// Launch    grid ⌈batch·length·width/256⌉, block 256, no shared memory
// Moves     (2·batch + 1)·length·width·sizeof(T) + batch·length·sizeof(id) bytes (the positions' rows come from cache
//           after the first sequence); batch·length·width FLOPs
// Limits    batch·length·width ≤ 256·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>

#include "place.h"
#include "rungs.h"

namespace kf::KF_BACKEND::embedding {
namespace {

constexpr int kThreads = 256;

template <class T, class Id>
__global__ void v1_naive_kernel(const Args a, const Id* __restrict__ ids, const T* __restrict__ token,
                                const T* __restrict__ position_weight, T* __restrict__ y, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const int64_t row = i / a.width;
  const int64_t column = i % a.width;
  const int64_t id = ids[row];
  const int64_t place = place_of(a, row / a.length, row % a.length);
  auto sum = compute_t<T>(NAN);
  if (id >= 0 && id < a.vocab && place < a.position_rows) {
    sum = to_compute(token[id * a.width + column]) + to_compute(position_weight[place * a.width + column]);
  }
  y[i] = from_compute<T>(sum);
}

template <class Id>
void launch(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const int64_t n = a.batch * a.length * a.width;
    const auto blocks = static_cast<unsigned>(ceil_div(n, kThreads));
    v1_naive_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(
        a, static_cast<const Id*>(a.ids), static_cast<const T*>(a.token), static_cast<const T*>(a.position_weight),
        static_cast<T*>(a.y), n);
  });
}

}  // namespace

void v1_naive(const Args& a, void* stream) {
  a.ids_64 ? launch<int64_t>(a, stream) : launch<int32_t>(a, stream);
  check_launch();
}

}  // namespace kf::KF_BACKEND::embedding
