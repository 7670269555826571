// scale v2_naive: a thread an element
//
// Idea      Thread i of the whole grid reads x[i], multiplies, writes y[i]. Neighbouring threads touch neighbouring
//           addresses, so a warp's 32 reads become a few full 32-byte sectors: coalesced.
// Since v1  The loop is gone: the grid has 32 times the threads, and a thread's next element is its neighbour's.
// Launch    grid ⌈n/256⌉, block 256, no shared memory
// Moves     2·n·sizeof(T) bytes, n FLOPs
// Limits    n ≤ 256·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>

#include "rungs.h"

namespace kf::KF_BACKEND::scale {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void v2_naive_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n, compute_t<T> factor) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = from_compute<T>(factor * to_compute(x[i]));  // the last block has more threads than elements
}

}  // namespace

void v2_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto blocks = static_cast<unsigned>(ceil_div(a.n, kThreads));
    v2_naive_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<T*>(a.y), a.n,
                                                                static_cast<compute_t<T>>(a.factor));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::scale
