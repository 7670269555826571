// Parts of blocks in global memory, which the block that comes last puts together: the end of v3_mma and v4_pipeline.
#pragma once

#include <step2/attention_decode/fragments.h>

#include "rungs.h"

namespace kf::KF_BACKEND::attention_decode {

// Blocks that share a tile of rows are a group.
inline int64_t groups_of(const Args& a) { return a.batch * a.kv_heads * Sharing(a).tiles; }
inline int splits_of(const Args& a, int64_t blocks) { return splits_for(a, groups_of(a), blocks, 128); }

// After each warp has left its part, part_of(warp, row): puts those of the warps together, then those of the group's
// blocks, and writes the output. All threads of all blocks call it.
template <int kColumns, class T, class PartOf>
__device__ __forceinline__ void write_by_memory(const Args& a, const Sharing& sharing, const Group& group, int tile,
                                                int split, int splits, PartOf part_of) {
  __syncthreads();
  const Parts parts(a, sharing.tiles * gridDim.y * gridDim.z);
  constexpr int kRowsAtOnce = kWarps * kWarpSize / kColumns;
  const int row_of_thread = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  const int rows = column < a.head_dim ? group.rows : 0;
#pragma unroll 1
  for (int row = row_of_thread; row < rows; row += kRowsAtOnce) {
    const Part<float> all = put_together<Of2, float>(kWarps, [&](int w) { return part_of(w, row).at(column); });
    const QueryRow query_row = group.query_row(a, row);
    if (splits == 1) {
      write_out<Of2, T>(a, query_row, column, all);
    } else {
      parts.store(split, query_row.row(a), column, all);
    }
  }
  const unsigned number = (blockIdx.z * gridDim.y + blockIdx.y) * sharing.tiles + tile;
  if (splits == 1 || !is_last_block(static_cast<unsigned*>(a.scratch) + number, splits)) return;
#pragma unroll 1
  for (int row = row_of_thread; row < rows; row += kRowsAtOnce) {
    const QueryRow query_row = group.query_row(a, row);
    const auto of_split = [&](int s) { return parts.load(s, query_row.row(a), column); };
    write_out<Of2, T>(a, query_row, column, put_together<Of2, float>(splits, of_split));
  }
}

// A kernel whose blocks do so: `blocks` of them for each multiprocessor.
inline void launch_by_memory(void (*kernel)(Args, Sharing, int), int64_t shared, int64_t blocks, const Args& a,
                             void* stream) {
  if (shared > 48 * 1024) allow_shared(kernel, shared);
  const int splits = splits_of(a, blocks);
  clear_counters(a, groups_of(a), splits, stream);
  kernel<<<grid_for(a, splits), kWarps * kWarpSize, shared, as_stream(stream)>>>(a, Sharing(a), splits);
  check_launch();
}

}  // namespace kf::KF_BACKEND::attention_decode
