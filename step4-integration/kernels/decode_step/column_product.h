// x · weight [depth, width] + bias and what follows, of few rows: 64 columns to a cluster of blocks, which share the
// depth, and each block's warps share its part of it.
#pragma once

#include <step1/gelu.h>
#include <step2/cluster.h>
#include <step2/dependent_launch.h>

#include "rows.h"

namespace kf::KF_BACKEND::decode_step {

// ---- what becomes of the sums: where one of them goes, and as what ----

// q to scratch, k and v to their slot of the cache; nowhere where there is none.
template <class T>
struct ToCache {
  using Element = T;
  static constexpr bool kAdds = false, kSends = false;
  Args a;
  T* q;
  int layer;

  __device__ T* address(int row, int column) const {
    const int width = static_cast<int>(own_width(a)), head_dim = static_cast<int>(a.head_dim);
    const int part = column / width, within = column - part * width;
    if (part == 0) return q + row * width + within;
    const int slot = Place(a, row).slot, head = within / head_dim;
    if (slot < 0) return nullptr;
    return (part == 1 ? in_cache<T>(a.k_cache, a.k_stride, layer, row, head, slot)
                      : in_cache<T>(a.v_cache, a.v_stride, layer, row, head, slot)) +
           (within - head * head_dim);
  }
  __device__ T finish(float sum) const { return from_compute<T>(sum); }
};

struct AddTo {
  using Element = float;
  static constexpr bool kAdds = true, kSends = false;
  float* x;
  int width;

  __device__ float* address(int row, int column) const { return x + row * width + column; }
  __device__ float finish(float sum) const { return sum; }
};

template <class T>
struct Gelu {
  using Element = T;
  static constexpr bool kAdds = false, kSends = false;
  T* hidden;
  int width;
  bool tanh;

  __device__ T* address(int row, int column) const { return hidden + row * width + column; }
  __device__ T finish(float sum) const {
    return from_compute<T>(tanh ? fast_gelu<T, true>(sum) : fast_gelu<T, false>(sum));
  }
};

// ---- the kernel ----

template <class T>
struct Product {
  const T *weight, *bias;
  int depth, width, batch;
  int chunks;  // of the depth, to a block
};

// A block's dynamic shared memory: a ring for each warp; sums that other blocks of the cluster send, where there are
// any; rows of x.
template <int kRows>
struct Memory {
  static constexpr int kSums = kRows * kTileColumns;
  static constexpr int64_t kRings = kWarps * int64_t{sizeof(Ring<kRows>)};

  static int64_t bytes(int cluster, int chunks, int batch) {
    return kRings + (cluster > 1 ? cluster * kSums * int64_t{sizeof(float)} : 0) +
           int64_t{batch} * distance_of_rows(chunks * kDepth) * 2;
  }
  unsigned char* first;
  __device__ Ring<kRows>& ring(int warp) const { return reinterpret_cast<Ring<kRows>*>(first)[warp]; }
  // A warp's own sums, where its ring was.
  __device__ float* sums(int warp) const { return reinterpret_cast<float*>(&ring(warp)); }
  __device__ float* received(int rank) const { return reinterpret_cast<float*>(first + kRings) + rank * kSums; }
  template <class T>
  __device__ T* x(int cluster) const {
    return reinterpret_cast<T*>(received(cluster > 1 ? cluster : 0));
  }
};

template <class T, int kRows, class Source, class Epilogue>
__global__ void __launch_bounds__(kThreads, kBeside<kRows>)
    column_product_kernel(const Product<T> p, Source source, const Epilogue epilogue) {
  static_assert(sizeof(Ring<kRows>) >= kRows * kTileColumns * sizeof(float));
  using Element = typename Epilogue::Element;
  constexpr int kOut = kRows * kTileColumns <= kThreads ? 1 : kRows * kTileColumns / kThreads;  // sums of a thread
  constexpr int kRowsAtOnce = kThreads / kTileColumns;
  extern __shared__ __align__(128) unsigned char memory[];
  const Memory<kRows> shared{memory};
  const int warp = threadIdx.x / kWarpSize, blocks = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);
  const int first_column = static_cast<int>(blockIdx.y) * kTileColumns;
  const int first_chunk = rank * p.chunks;
  const int chunks = max(0, min(p.chunks, (p.depth + kDepth - 1) / kDepth - first_chunk));

  // What the kernels in front have no part in: weights, bias, addresses.
  const InColumns<T> pieces{
      p.weight, p.width, p.depth, first_column, first_chunk + warp, kWarps, (chunks - warp + kWarps - 1) / kWarps};
  shared.ring(warp).begin(pieces);
  launch_dependent_grids();
  __syncwarp();
  if (blocks > 1) cluster_barrier_arrive_relaxed();
  source.prepare();
  const int of_tile = threadIdx.x % kTileColumns, column = first_column + of_tile;
  const int first_row = threadIdx.x / kTileColumns;
  const int owner = of_tile * blocks / kTileColumns;  // each block ends its part of the columns
  Element* to[kOut];
  float before[kOut] = {};
#pragma unroll
  for (int i = 0; i < kOut; ++i) {
    const int row = first_row + i * kRowsAtOnce;
    to[i] = owner == rank && row < p.batch && column < p.width ? epilogue.address(row, column) : nullptr;
  }
  const float bias = column < p.width ? to_compute(p.bias[column]) : 0.0f;

  wait_on_dependent_grids();
  [[maybe_unused]] uint32_t first_turn = 0;
  if constexpr (Epilogue::kSends) first_turn = epilogue.begin();
  if constexpr (Epilogue::kAdds) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
      if (to[i] != nullptr) before[i] = __ldcg(to[i]);
    }
  }
  const Part<T> part{shared.template x<T>(blocks), distance_of_rows(p.chunks * kDepth), first_chunk * kDepth,
                     (first_chunk + chunks) * kDepth, p.batch};
  source.template fill<kRows>(part);
  __syncthreads();

  ColumnSums<kRows> sums;
  shared.ring(warp).walk(pieces, [&](int piece, const Vector16(&w)[kVectors]) {
    const int chunk = warp + piece * kWarps;
    sums.template add<T>(w, XFragment<kRows>(part.x + chunk * kDepth, part.stride, p.batch));
  });
  __syncwarp();  // the other lanes' vectors lie where this lane's sums go
  sums.store(shared.sums(warp), p.batch);
  __syncthreads();

  float sum[kOut] = {};
#pragma unroll
  for (int i = 0; i < kOut; ++i) {
    const int row = first_row + i * kRowsAtOnce;
    if (row >= p.batch) continue;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum[i] += shared.sums(w)[row * kTileColumns + of_tile];
  }
  if (blocks > 1) {
    cluster_barrier_wait();  // each block has begun, so its memory may be written into
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
      const int row = first_row + i * kRowsAtOnce;
      if (row >= p.batch) continue;
      store_remote(remote_address(shared.received(rank) + row * kTileColumns + of_tile, owner), sum[i]);
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
      if (to[i] == nullptr) continue;
      sum[i] = 0;
      for (int r = 0; r < blocks; ++r) {
        sum[i] += shared.received(r)[(first_row + i * kRowsAtOnce) * kTileColumns + of_tile];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOut; ++i) {
    if (to[i] == nullptr) continue;
    if constexpr (Epilogue::kSends) {
      epilogue.send(to[i], sum[i], first_turn);
    } else {
      *to[i] = epilogue.finish(sum[i] + bias + before[i]);
    }
  }
}

}  // namespace kf::KF_BACKEND::decode_step
