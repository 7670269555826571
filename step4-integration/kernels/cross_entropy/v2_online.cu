// cross_entropy v2_online: maximum and sum in one pass, 16 bytes a load
//
// Idea      As in softmax's v3, a thread keeps the greatest logit so far and the sum weighted against it. A row of
//           GPT-2's 50257 logits is no multiple of a vector, so that most rows begin between two of them: the loads
//           are vectors from the first multiple of 16 bytes on, and what is left on either side is a value for each of
//           the first threads (row.h).
// Since v1  The first two passes have become one. A block has 1024 threads, so that no more than two rows are in work
//           on a multiprocessor: 264 rows of 100 KB are 26 MB, and the second read finds them in an H200's L2 cache of
//           50. With v1's 256 threads they would be 106.
// Launch    grid rows, block min(1024, width/N rounded up to 32), 32 values of shared memory; N = 16/sizeof(T)
// Moves     2·rows·width·sizeof(T) bytes as long as rows stay in L2 (without the gradient half of it);
//           about 8·rows·width FLOPs and 2·rows·width exponentials
// Limits    rows ≤ 2³¹−1, width < 2³⁰
#include <kf/launch.h>
#include <step2/reduce.h>

#include <algorithm>

#include "row.h"

namespace kf::KF_BACKEND::cross_entropy {
namespace {

constexpr int64_t kThreads = 1024;

template <class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : 2) v2_online_kernel(Rows<T> a, bool alike) {
  using C = compute_t<T>;
  constexpr int N = Cut<T>::N;
  __shared__ C shared[kWarpSize];
  const Row<T> row(a, blockIdx.x);
  if (row.skip()) return;
  const int width = static_cast<int>(row.width);
  const Cut<T> cut(row.logits, width);
  const int single = cut.single(threadIdx.x), first = cut.begin + static_cast<int>(threadIdx.x) * N;
  const int step = static_cast<int>(blockDim.x) * N;

  OnlineSoftmax<C> own;  // of this thread's columns
  if (single < width) own.push(to_compute(row.logits[single]));
  for (int c = first; c < cut.end; c += step) {
    C logit[N];
    widen(load_vector<N>(row.logits + c), logit);
    C max = logit[0];
#pragma unroll
    for (int j = 1; j < N; ++j) max = greater_of(max, logit[j]);
    own.raise(max);  // once for N values
#pragma unroll
    for (int j = 0; j < N; ++j) own.sum += own.weight(logit[j]);
  }
  const C max = finite(block_max(own.max, shared));
  const C sum = block_sum(own.sum * weight_of(own.max, max), shared);

  row.write_loss(max, sum);
  if (row.grad == nullptr) return;
  const C factor = row.weight / sum;
  for (int c = first; c < cut.end; c += step) {
    C value[N];
    widen(load_vector<N>(row.logits + c), value);
#pragma unroll
    for (int j = 0; j < N; ++j) value[j] = weight_of(value[j], max);
    alike ? write_gradient<true>(row, value, c, factor) : write_gradient<false>(row, value, c, factor);
  }
  if (single < width) {
    C value[1] = {weight_of(to_compute(row.logits[single]), max)};
    write_gradient<false>(row, value, single, factor);
  }
}

}  // namespace

std::string v2_online_can_implement(const Args& a) { return can_implement_a_block_a_row(a); }

void v2_online(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto threads = std::min(kThreads, kWarpSize * ceil_div(ceil_div(a.width, Cut<T>::N), kWarpSize));
    v2_online_kernel<<<static_cast<unsigned>(a.rows), static_cast<unsigned>(threads), 0, as_stream(stream)>>>(
        Rows<T>(a), alike(a));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::cross_entropy
