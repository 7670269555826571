// cross_entropy v3_shared: a row is read once and stays in shared memory
//
// Idea      50257 bfloat16 are 100 KB. No block has registers for them beside what it computes with, but a Hopper's
//           multiprocessor has shared memory for two such rows. So what is loaded is kept there, and the gradient is
//           made of that: one read, one write. A thread reads again only what it wrote itself, so there is no barrier
//           but the reductions'.
// Since v2  The second read comes from shared memory, not from L2. Each thread has four loads in flight: two blocks of
//           512 threads are 64 KB a multiprocessor, more than twice what Little's law asks. The maximum is raised once
//           for the values of four vectors.
// Launch    grid rows, block min(512, width/N rounded up to 32), width·sizeof(T) bytes of shared memory; N =
//           16/sizeof(T)
// Moves     2·rows·width·sizeof(T) bytes (without the gradient half of it); about 8·rows·width FLOPs and 2·rows·width
//           exponentials
// Limits    rows ≤ 2³¹−1; a row must fit into a block's shared memory: 227 KB on Hopper, 116224 logits of a half type
#include <kf/launch.h>

#include <algorithm>

#include "row.h"

namespace kf::KF_BACKEND::cross_entropy {
namespace {

constexpr int64_t kThreads = 512;
constexpr int kBatch = 4;  // vectors that a thread loads before it looks at the first

template <class T>
__global__ void __launch_bounds__(kThreads, 2) v3_shared_kernel(Rows<T> a, bool alike) {
  using C = compute_t<T>;
  constexpr int N = Cut<T>::N;
  extern __shared__ __align__(16) unsigned char memory[];
  const Row<T> row(a, blockIdx.x);
  if (row.skip()) return;
  const int width = static_cast<int>(row.width), threads = blockDim.x, thread = threadIdx.x;
  const Cut<T> cut(row.logits, width);
  const int vectors = (cut.end - cut.begin) / N, single = cut.single(thread);
  const T* const from = row.logits + cut.begin;
  T* const kept = reinterpret_cast<T*>(memory);

  const C alone = single < width ? to_compute(row.logits[single]) : C(-INFINITY);
  C max = alone, sum = weight_of(alone, finite(alone));  // of this thread's columns
  for (int first = thread; first < vectors; first += kBatch * threads) {
    const int count = min((vectors - first + threads - 1) / threads, kBatch);
    Vector<T, N> batch[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (b < count) batch[b] = load_vector<N>(from + (first + b * threads) * N);
    }
    C greatest = max;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (b >= count) break;
      store_vector(kept + (first + b * threads) * N, batch[b]);
      C value[N];
      widen(batch[b], value);
#pragma unroll
      for (int j = 0; j < N; ++j) greatest = greater_of(greatest, value[j]);
    }
    sum *= weight_of(max, finite(greatest));
    max = greatest;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (b >= count) break;
      C value[N];
      widen(batch[b], value);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += weight_of(value[j], finite(max));
    }
  }
  finish_kept_row(row, cut, kept, alone, max, sum, alike);
}

}  // namespace

std::string v3_shared_can_implement(const Args& a) { return can_implement_a_kept_row(a); }

void v3_shared(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto threads = std::min(kThreads, kWarpSize * ceil_div(ceil_div(a.width, Cut<T>::N), kWarpSize));
    const auto kernel = v3_shared_kernel<T>;
    allow_shared(kernel, kept_bytes(a));
    kernel<<<static_cast<unsigned>(a.rows), static_cast<unsigned>(threads), kept_bytes(a), as_stream(stream)>>>(
        Rows<T>(a), alike(a));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::cross_entropy
