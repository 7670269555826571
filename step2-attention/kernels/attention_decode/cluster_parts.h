// Parts in the shared memory of a cluster's blocks: the end of v5_cluster and v6_paged.
#pragma once

#include <step2/attention_decode/ring.h>
#include <step2/cluster.h>

namespace kf::KF_BACKEND::attention_decode {

constexpr int kMostBlocks = 8;  // of a cluster, on every GPU that has them

__device__ inline Group group_of_cluster(const Args& a, const Sharing& sharing) {
  const auto blocks = static_cast<int>(cluster_blocks());
  const int tile = static_cast<int>(blockIdx.x) >> (__ffs(blocks) - 1);  // the quotient: `blocks` is a power of 2
  return Group(a, sharing, tile, static_cast<int>(cluster_rank_of_block()), blocks);
}

// A block's shared memory.
template <int kColumns>
struct ClusterMemory {
  WarpMemory<kColumns> of_warp[kWarps];
  RowPart<kColumns> of_block[kRows];  // those of the cluster's blocks, of the rows that this block owns

  // After each warp has left its part: puts those of the warps together, sends that to the block that has the row, and
  // there puts those of all blocks together and writes the output. All threads of the cluster call it, and have arrived
  // at the cluster's barrier when they began.
  template <class T>
  __device__ __forceinline__ void write(const Args& a, const Group& group) {
    const int blocks = static_cast<int>(cluster_blocks()), rank = static_cast<int>(cluster_rank_of_block());
    constexpr int kRowsAtOnce = kWarps * kWarpSize / kColumns;
    const int row_of_thread = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
    const int rows = column < a.head_dim ? group.rows : 0;
    __syncthreads();
    cluster_barrier_wait();                    // each block has begun, so its memory may be written into
    const int log_blocks = __ffs(blocks) - 1;  // a power of 2, so there is a shift for each division
#pragma unroll 1
    for (int row = row_of_thread; row < rows; row += kRowsAtOnce) {
      const auto of = [&](int w) { return of_warp[w].part[row].at(column); };
      const Part<float> all = put_together<Of2, float>(kWarps, of);
      if (blocks == 1) {
        write_out<Of2, T>(a, group.query_row(a, row), column, all);
        continue;
      }
      RowPart<kColumns>& to = of_block[rank * (kRows >> log_blocks) + (row >> log_blocks)];
      const uint32_t owner = row & (blocks - 1);
      store_remote(remote_address(&to.out[column], owner), all.out);
      if (column != 0) continue;
      store_remote(remote_address(&to.max, owner), all.max);
      store_remote(remote_address(&to.sum, owner), all.sum);
    }
    if (blocks == 1) return;
    cluster_sync();
#pragma unroll 1
    for (int row = rank + row_of_thread * blocks; row < rows; row += blocks * kRowsAtOnce) {
      const auto of = [&](int r) { return of_block[r * (kRows >> log_blocks) + (row >> log_blocks)].at(column); };
      write_out<Of2, T>(a, group.query_row(a, row), column, put_together<Of2, float>(blocks, of));
    }
  }
};

// Blocks of a cluster for each tile of rows: a power of two, as long as each block has a multiprocessor of its own.
// More clusters than these cost more time to start than they save.
inline unsigned cluster_for(const Args& a) {
  const int64_t tiles = a.batch * a.kv_heads * Sharing(a).tiles;
  unsigned blocks = 1;
  while (blocks < kMostBlocks && 2 * blocks * tiles <= multiprocessors() && int64_t{blocks} * 128 < a.k_length) {
    blocks *= 2;
  }
  return blocks;
}

template <int kColumns>
void launch_clusters(void (*kernel)(Args, Sharing), const Args& a, void* stream) {
  const auto cluster = static_cast<int>(cluster_for(a));
  launch_in_clusters(kernel, cluster, grid_for(a, cluster), kWarps * kWarpSize, sizeof(ClusterMemory<kColumns>), stream,
                     a, Sharing(a));
}

// Why v5 and v6 cannot do this; "" if they can.
inline std::string in_clusters(const Args& a) {
  const std::string why_not = in_fragments(a);
  if (!why_not.empty()) return why_not;
  if (compute_capability() < 90) return "needs a GPU of compute capability 9.0 or newer";
  return fits_shared(a.head_dim <= 64 ? sizeof(ClusterMemory<64>) : sizeof(ClusterMemory<128>));
}

}  // namespace kf::KF_BACKEND::attention_decode
