// scale v1_chunk: a thread a chunk of neighbours
//
// Idea      What a CPU programmer writes first: cut the array into equal chunks, one a thread. It is the wrong cut for
//           a GPU. At each step of the loop the 32 lanes of a warp are 32 elements apart, so one load of the warp
//           touches 32 sectors of memory where 4 would do: not coalesced. The caches must keep all 32 sectors until the
//           lanes have walked through them.
// Launch    grid ⌈⌈n/32⌉/256⌉, block 256, no shared memory
// Moves     2·n·sizeof(T) bytes at best, n FLOPs; more where a sector is evicted before its last element is used
// Limits    n ≤ 32·256·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>

#include "rungs.h"

namespace kf::KF_BACKEND::scale {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 32;

template <class T>
__global__ void v1_chunk_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t n, compute_t<T> factor) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int j = 0; j < kChunk; ++j) {
    const int64_t i = thread * kChunk + j;
    if (i < n) y[i] = from_compute<T>(factor * to_compute(x[i]));
  }
}

}  // namespace

void v1_chunk(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto blocks = static_cast<unsigned>(ceil_div(ceil_div(a.n, kChunk), kThreads));
    v1_chunk_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<T*>(a.y), a.n,
                                                                static_cast<compute_t<T>>(a.factor));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::scale
