// attention_block v5_cluster: few rows, their heads divided among the blocks of a cluster
//
// Idea      Where rows are few, launches and the waits between them cost more than the work. So one launch again, as
//           v2: who has all heads of a row can project and normalise it. But the heads are divided among the blocks of
//           a cluster. Each attends for its heads, sends its part of the rows to every block, projects its part of the
//           columns, and sends what it knows of the rows' mean and variance.
//
//             block 0   heads 0, 1   ─┐       columns   0 … 127   ─┐ mean,      normalise
//             block 1   heads 2, 3   ─┼ rows  columns 128 … 255   ─┼ spread of  normalise
//             block 2   heads 4, 5   ─┘       columns 256 … 383   ─┘ each row   normalise
//
// Since v2  Tensor cores by mma, from compute capability 8.0 on: before 9.0 a cluster is a single block. Warps share
//           heads and keys, then columns and depth. Keys, values and weights go through each lane's own ring, in the
//           order in which mma wants them; warps wait for each other only at the end of a phase
// Launch    grid (blocks of a cluster: 1 to 16, ⌈q_length/16⌉, batch), block 256; 128 where shared memory is small.
//           Shared memory: 16·heads·144 bytes for attention's rows; 19·columns·2 for what their ends add; 8 KB a warp
//           for its ring, and in that place, later, sums; 4 for what blocks tell each other. 98 to 105 KB at width 768.
//           Dependent (step2/dependent_launch.h): it asks for the projection's weight before the one in front has ended
// Roles     all warps are alike: each loads what it multiplies, by cp.async, into a ring of its own
// Barriers  rows_arrived and shares_arrived: 1 arrival and the bytes that the cluster's blocks send here. The
//           cluster's, once: all blocks' barriers are there. With one block neither
// A stage   of a warp's ring: cp.async ─ its own group is waited for ─ mma.sync ─ the next cp.async
// Moves     4·batch·q_length·width·sizeof(T) bytes once, width = heads·head_dim: q, residual, sum and y. And, mostly
//           from L2, for each 16 rows the keys and values that one of them sees, and the width² weights. FLOPs as v1
// Limits    float16 and bfloat16; head_dim a multiple of 8 up to 64; a scale above 0; no dropout of attention's
//           weights; heads·head_dim up to 4096; q, k and v as step 2's rungs on tensor cores take them, all others
//           at multiples of 16 bytes; 16 rows must fit into shared memory. Keys, values and weights come from L2 again
//           for each 16 rows: with many rows pieces are faster. It rounds attention's weights, its output and, where
//           a block projects in rounds, the sum
#include "cluster_shares.h"

namespace kf::KF_BACKEND::attention_block {
namespace {

// The projection's weight is on its way to the L2 cache before the launch in front has ended.
template <class T>
__device__ __forceinline__ void ask_for_weight(const Rest<T>& rest) {
  constexpr int kLine = 128 / sizeof(T);
  const int64_t block = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t size = int64_t{rest.width} * rest.width, blocks = int64_t{gridDim.x} * gridDim.y * gridDim.z;
  for (int64_t i = (block * blockDim.x + threadIdx.x) * kLine; i < size; i += blocks * blockDim.x * kLine) {
    prefetch_to_l2(rest.proj_weight + i);
  }
}

template <class T>
__global__ void __launch_bounds__(256, 2)
    v5_cluster_kernel(const attention_decode::Args a, const Rest<T> rest, const Shares shares) {
  launch_dependent_grids();
  ask_for_weight(rest);
  wait_on_dependent_grids();  // q, k and v are there
  extern __shared__ __align__(128) unsigned char memory[];
  const int width = rest.width, head_dim = static_cast<int>(a.head_dim);
  auto& header = *reinterpret_cast<Header*>(memory);
  T* const rows = reinterpret_cast<T*>(memory + sizeof header);  // attention's output: [heads][kRows][kRowStride]
  unsigned char* const after_rows = memory + sizeof header + rows_bytes(a.heads);
  auto* const of_warps = reinterpret_cast<WarpMemory*>(after_rows + preloaded_bytes(shares));
  float* const sums = reinterpret_cast<float*>(of_warps);

  const int blocks = shares.blocks, rank = static_cast<int>(blockIdx.x), batch = static_cast<int>(blockIdx.z);
  const int first_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kRows;  // the last rows may see most: first
  const int first_head = rank * shares.heads, heads = min(shares.heads, static_cast<int>(a.heads) - first_head);
  const attention::BlockOfQueries block(a, batch * a.heads + first_head, first_row, kRows);
  const int64_t first_of_batch = batch * a.q_length + first_row;  // this block's first row among all

  if (blocks > 1) {
    if (threadIdx.x == 0) {
      mbarrier_init(&header.rows_arrived, 1);
      mbarrier_init(&header.shares_arrived, 1);
      mbarrier_init_fence();
      const int columns = static_cast<int>(a.heads) * kHeadColumns;
      mbarrier_arrive_expect_tx(&header.rows_arrived, block.queries * columns * static_cast<int>(sizeof(T)));
      mbarrier_arrive_expect_tx(&header.shares_arrived, block.queries * blocks * static_cast<int>(sizeof(RowShare)));
    }
    __syncwarp();
    cluster_barrier_arrive_relaxed();
  }
  const int own_first = rank * shares.groups * kGroup, own_end = min(own_first + shares.groups * kGroup, width);
  const Preloaded<T> preloaded{shares.rounds == 1 ? reinterpret_cast<T*>(after_rows) : nullptr,
                               max(own_end - own_first, 0)};
  const auto before_first = [&] {
    if (preloaded.first != nullptr) preloaded.issue_load(rest, first_of_batch, block.queries, own_first);
    __syncwarp();
    if (blocks > 1) cluster_barrier_wait();  // the others have begun: they may be written to
  };
  const auto rows_are_there = [&] {
    if (blocks > 1) mbarrier_wait_cluster(&header.rows_arrived, 0);
  };
  const BlockAttention<T> attending{a, of_warps, batch, first_head, heads, block};
  attending.run(before_first, [&](int head, int row, int column, const float (&out)[8], float lse) {
    const Vector<T, 8> eight = narrow<T>(out);  // zeros beyond head_dim
    T* const to = rows + (head * kRows + row) * kRowStride + column;
    send(eight, to, &header.rows_arrived, blocks);
    if (rest.attended != nullptr && column < head_dim) {
      store_vector(rest.attended + (first_of_batch + row) * width + head * head_dim + column, eight);
    }
    if (a.lse != nullptr && column == 0) {
      static_cast<float*>(a.lse)[(batch * a.heads + head) * a.q_length + first_row + row] = lse;
    }
  });
  // This block's columns of the projection. A round's sums take the place of what the warps have read.
  const int parts = shares.parts(), warp = threadIdx.x / kWarpSize, warps = shares.warps;
  const int group = warp >> shares.log_parts, part = warp & (parts - 1), first_k_tile = part * shares.k_tiles_of_part;
  const int k_tiles_of_head = (head_dim + 15) / 16, k_tiles = static_cast<int>(a.heads) * k_tiles_of_head;
  const int head_of_part = first_k_tile / k_tiles_of_head,
            column = (first_k_tile - head_of_part * k_tiles_of_head) * 16;
  const int first_of_lanes = threadIdx.x / kRowLanes, rows_at_once = blockDim.x / kRowLanes;
  RowColumns<T> of_round{rest, sums, shares.sum_stride(), parts, 0, 0, preloaded};
#pragma unroll 1
  for (int round = 0; round < shares.rounds; ++round) {
    const int first = own_first + round * warps * kGroup;
    of_round.first = first, of_round.columns = max(min(own_end - first, warps * kGroup), 0);
    const bool works = group * kGroup < of_round.columns;
    WarpProjection<T> own(of_warps[warp], rest.proj_weight, head_dim, width, head_of_part, column,
                          works ? min(shares.k_tiles_of_part, k_tiles - first_k_tile) : 0, first + group * kGroup);
    own.run(rows, rows_are_there);
    cp_async_wait<0>();  // what was loaded for the rows' ends, too
    __syncthreads();
    if (works) own.leave(sums + part * kRows * of_round.stride + group * kGroup, of_round.stride);
    __syncthreads();
#pragma unroll 1
    for (int row = first_of_lanes; row < kRows; row += rows_at_once) {  // all, since lanes of two rows share a shuffle
      const bool there = row < block.queries;
      const RowShare known = of_round.add(row, first_of_batch + row, there);
      tell(of_round.lane, known, &header.share[rank + round][row], &header.shares_arrived, there ? blocks : 0);
    }
    __syncwarp();
    if (round + 1 < shares.rounds) __syncthreads();
  }
  rows_are_there();                                                  // also where there was no work: others write here
  if (blocks > 1) mbarrier_wait_cluster(&header.shares_arrived, 0);  // then nobody reaches into this block: it may end

#pragma unroll 1
  for (int row = first_of_lanes; row < kRows; row += rows_at_once) {
    const int64_t global = first_of_batch + row;
    const auto of_row = statistics_of(&header.share[0][row], blocks * shares.rounds, width, rest.eps);
    if (row >= block.queries) continue;
    if (rank == 0 && of_round.lane == 0) rest.kept.keep(global, of_row);
    if (shares.rounds == 1) {
      of_round.normalize(global, of_row, sums + row * of_round.stride);
    } else {  // the sums of earlier rounds are gone: they are read as they were written
      const RowColumns<T> all{rest, sums, of_round.stride, parts, 0, width, preloaded};
      all.normalize(global, of_row, rest.sum + global * width);
    }
  }
}

}  // namespace

bool has_clusters() { return most_blocks() > 1; }  // for `auto`
std::string v5_cluster_can_implement(const Args& a) { return can_implement_shares(a); }

void v5_cluster(const Args& a, void* stream) {
  const Attention& t = a.attention;
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto kernel = v5_cluster_kernel<T>;
    const Shares shares = way_with_room(kernel, t, [&](int64_t most) { return shares_of(a, most); });
    launch_way(kernel, t, shares, stream, attention_of(t, a.dtype), rest_of<T>(a));
  });
}

}  // namespace kf::KF_BACKEND::attention_block
