// softmax v1_naive: a thread a row
//
// Idea      The formula as a loop: find the maximum, add up the exponentials, write the quotients. No thread needs
//           another. But neighbouring threads read addresses a whole row apart, so each of a warp's 32 reads touches a
//           sector of 32 bytes of its own, and few rows keep few threads busy.
// Launch    grid ⌈rows/128⌉, block 128, no shared memory
// Moves     4·rows·width·sizeof(T) bytes where no cache helps: three reads, one write;
//           about 5·rows·width FLOPs and 2·rows·width exponentials
// Limits    rows ≤ 128·(2³¹−1)
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::softmax {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void v1_naive_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int64_t width,
                                int64_t q_length, compute_t<T> scale) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  x += row * width;
  y += row * width;

  const int64_t seen = columns_seen(row, width, q_length);  // all of them, where there is no mask

  compute_t<T> max = -INFINITY;
  for (int64_t c = 0; c < seen; ++c) max = greater_of(max, score_of(to_compute(x[c]), scale));

  compute_t<T> sum = 0;
  for (int64_t c = 0; c < seen; ++c) sum += exponential(score_of(to_compute(x[c]), scale) - max);

  for (int64_t c = 0; c < seen; ++c) y[c] = from_compute<T>(exponential(score_of(to_compute(x[c]), scale) - max) / sum);
  for (int64_t c = seen; c < width; ++c) y[c] = from_compute<T>(0);
}

}  // namespace

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto blocks = static_cast<unsigned>(ceil_div(a.rows, kThreads));
    v1_naive_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(static_cast<const T*>(a.x), static_cast<T*>(a.y),
                                                                a.rows, a.width, mask_of(a),
                                                                static_cast<compute_t<T>>(a.scale));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::softmax
