// cross_entropy v4_async: a whole row is in flight before its first logit is looked at
//
// Idea      v3 loads four vectors a thread, and while it computes with them nothing comes, unless another warp has
//           loads in flight. A cp.async needs no register: so a thread issues five groups of four at once, all of
//           a row of GPT-2's in a half type, and waits for the first. Of longer rows it issues a group more each turn.
// Since v3  cp.async in place of a load and a store to shared memory. A thread still reads only what it copied itself:
//           it waits for its own copies, and for nobody else.
// Launch    grid rows, block min(512, width/N rounded up to 32), width·sizeof(T) bytes of shared memory; N =
//           16/sizeof(T)
// Moves     2·rows·width·sizeof(T) bytes (without the gradient half of it); about 8·rows·width FLOPs and 2·rows·width
//           exponentials
// Limits    compute capability 8.0; v3's
#include <kf/launch.h>
#include <step2/cp_async.h>

#include <algorithm>

#include "row.h"

namespace kf::KF_BACKEND::cross_entropy {
namespace {

constexpr int64_t kThreads = 512;
constexpr int kBatch = 4;   // vectors of a thread's group of copies
constexpr int kGroups = 4;  // in flight, beside the one that is computed with

template <class T>
__global__ void __launch_bounds__(kThreads, 2) v4_async_kernel(Rows<T> a, bool alike) {
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
  const auto issue = [&](int first) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * threads;
      if (i < vectors) cp_async_16(kept + i * N, from + i * N);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int group = 0; group < kGroups; ++group) issue(thread + group * kBatch * threads);
  for (int first = thread; first < vectors; first += kBatch * threads) {
    issue(first + kGroups * kBatch * threads);
    cp_async_wait<kGroups>();
    const int count = min((vectors - first + threads - 1) / threads, kBatch);
    Vector<T, N> batch[kBatch];
    C greatest = max;
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (b >= count) break;
      batch[b] = load_vector<N>(kept + (first + b * threads) * N);
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

std::string v4_async_can_implement(const Args& a) {
  if (compute_capability() < 80) return "needs a GPU of compute capability 8.0 or newer";
  return can_implement_a_kept_row(a);
}

void v4_async(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto threads = std::min(kThreads, kWarpSize * ceil_div(ceil_div(a.width, Cut<T>::N), kWarpSize));
    const auto kernel = v4_async_kernel<T>;
    allow_shared(kernel, kept_bytes(a));
    kernel<<<static_cast<unsigned>(a.rows), static_cast<unsigned>(threads), kept_bytes(a), as_stream(stream)>>>(
        Rows<T>(a), alike(a));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::cross_entropy
