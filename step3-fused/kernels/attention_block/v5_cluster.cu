// attention_block v5_cluster: the heads of a few rows in one cluster, for problems that are small
//
// Idea      With few rows the launches and the waits between them cost more than the work. So one launch again, as v2:
//           who has all heads of a row can project and normalise it. But the heads are divided among the blocks of a
//           cluster. Each attends for its heads, sends every block a copy of its part of the rows, projects its part of
//           the columns, and sends what it knows of the rows' mean and variance.
//
//             block 0   heads 0, 1    ─┐ rows   columns 0 … 127     ─┐ mean,   normalise
//             block 1   heads 2, 3    ─┼─────►  columns 128 … 255   ─┼──────►  normalise
//             block 2   heads 4, 5    ─┘        columns 256 … 383   ─┘ spread  normalise
//
// Since v2  Tensor cores by mma, for all GPUs since compute capability 8.0: before 9.0 a cluster is a single block. The
//           rows are of half types. The weight is read once a cluster, not once for each 16 rows of a block
// Launch    grid batch·⌈q_length/R⌉ clusters of up to 16 blocks of 256 threads (128 where shared memory is small); R =
//           32 or 16. Shared memory: rows R·(width + 8)·2 bytes; for each warp two places of 32 keys and values, 8 to
//           8.5 KB, and in the same place, later, the sums, R·(columns + 4)·4 bytes for each part of the depth
// Moves     4·batch·q_length·width·sizeof(T) bytes once, width = heads·head_dim: q, residual, sum and y. And, mostly
//           from L2, for each R rows all keys and values that one of them sees, and the width² weights. FLOPs as v1
// Limits    float16 and bfloat16; head_dim a multiple of 16 up to 64; a scale above 0; rows at multiples of 16 bytes; 16
//           rows must fit into shared memory. For each 32 rows keys, values and weights come from L2 again: with many
//           rows v3 is faster. It rounds attention's weights and its output
#include <kf/best.h>
#include <kf/launch.h>
#include <step3/step2_attention.h>

#include "cluster_shares.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {
namespace {

template <class T>
__global__ void __launch_bounds__(256, 2)
    v5_cluster_kernel(const attention_decode::Args a, const Rest<T> rest, const Shares shares) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int width = rest.width, head_dim = static_cast<int>(a.head_dim);
  auto& header = *reinterpret_cast<Header*>(memory);
  T* const rows = reinterpret_cast<T*>(memory + sizeof header);  // attention's output: [heads][kRows][kRowStride]
  unsigned char* const after_rows = memory + sizeof header + rows_bytes(a.heads);
  auto* const of_warps = reinterpret_cast<WarpMemory*>(after_rows + fetched_bytes(shares));
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
      mbarrier_arrive_expect(&header.rows_arrived, block.queries * columns * static_cast<int>(sizeof(T)));
      mbarrier_arrive_expect(&header.shares_arrived, block.queries * blocks * static_cast<int>(sizeof(RowShare)));
    }
    cluster_barrier_arrive_relaxed();
  }
  const int own_first = rank * shares.groups * kGroup, own_end = min(own_first + shares.groups * kGroup, width);
  const Fetched<T> fetched{shares.rounds == 1 ? reinterpret_cast<T*>(after_rows) : nullptr, max(own_end - own_first, 0)};
  const auto before_first = [&] {
    if (fetched.first != nullptr) fetched.ask(rest, first_of_batch, block.queries, own_first);
    if (blocks > 1) cluster_barrier_wait();  // the others have begun: they may be written to
  };
  const BlockAttention<T> attending{a, of_warps, batch, first_head, heads, block};
  attending.run(before_first, [&](int head, int row, int column, const float(&out)[8], float lse) {
    const Vector<T, 8> eight = narrow<T>(out);  // zeros beyond head_dim
    T* const place = rows + (head * kRows + row) * kRowStride + column;
    if (blocks == 1) {
      store_vector(place, eight);
    } else {
      uint32_t words[4];
      memcpy(words, &eight, sizeof words);
#pragma unroll 2
      for (int b = 0; b < blocks; ++b) {
        store_remote_async(remote_address(place, b), words, remote_address(&header.rows_arrived, b));
      }
    }
    if (rest.attended != nullptr && column < head_dim) {
      store_vector(rest.attended + (first_of_batch + row) * width + head * head_dim + column, eight);
    }
    if (a.lse != nullptr && column == 0) {
      static_cast<float*>(a.lse)[(batch * a.heads + head) * a.q_length + first_row + row] = lse;
    }
  });
  const auto rows_are_there = [&] {
    if (blocks > 1) mbarrier_wait_cluster(&header.rows_arrived, 0);
  };

  // This block's columns of the projection. A round's sums take the place of what the warps have read.
  const int parts = shares.parts(), steps = width / 16;
  const int warp = threadIdx.x / kWarpSize, warps = shares.warps;
  const int group = warp >> shares.log_parts, part = warp & (parts - 1), first_step = part * shares.steps_of_part;
  const int first_head_of_part = first_step * 16 / head_dim, in_head = first_step * 16 - first_head_of_part * head_dim;
  const int first_of_lanes = threadIdx.x / kRowLanes, rows_at_once = blockDim.x / kRowLanes;
  RowColumns<T> of_round{rest, sums, shares.sum_stride(), parts, 0, 0, fetched};
#pragma unroll 1
  for (int round = 0; round < shares.rounds; ++round) {
    const int first = own_first + round * warps * kGroup;
    of_round.first = first, of_round.columns = max(min(own_end - first, warps * kGroup), 0);
    const bool works = group * kGroup < of_round.columns;
    WarpProjection<T> own(of_warps[warp], rest.proj_weight, width, first + group * kGroup, first_step * 16,
                          works ? min(shares.steps_of_part, steps - first_step) : 0);
    own.run(rows, first_head_of_part, in_head, head_dim, rows_are_there);
    cp_async_wait<0>();  // what was fetched for the rows' ends, too
    __syncthreads();
    if (works) own.leave(sums + part * kRows * of_round.stride + group * kGroup, of_round.stride);
    __syncthreads();
#pragma unroll 1
    for (int row = first_of_lanes; row < kRows; row += rows_at_once) {  // all, since lanes of two rows share a shuffle
      const bool there = row < block.queries;
      const RowShare known = of_round.add(row, first_of_batch + row, there);
      RowShare& place = header.share[rank + round][row];
      if (blocks == 1) {
        if (of_round.lane == 0) place = known;
      } else if (there && of_round.lane < blocks) {
        const uint32_t barrier = remote_address(&header.shares_arrived, of_round.lane);
        store_remote_async(remote_address(&place.mean_and_rest, of_round.lane), known.mean_and_rest, barrier);
        store_remote_async(remote_address(&place.squares_and_count, of_round.lane), known.squares_and_count, barrier);
      }
    }
    __syncwarp();
    if (round + 1 < shares.rounds) __syncthreads();
  }
  rows_are_there();  // also where there was no work: others write here
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
      const RowColumns<T> all{rest, sums, of_round.stride, parts, 0, width, fetched};
      all.normalize(global, of_row, rest.sum + global * width);
    }
  }
}

attention_decode::Args attention_of(const Args& a) {
  attention_decode::Args args{};
  static_cast<kf::attention::Args&>(args) = attention_args(a.attention, a.dtype, nullptr, a.attention.lse);
  return args;
}

template <class T>
void launch(const Args& a, const Shares& shares, void* stream) {
  const Attention& t = a.attention;
  const int64_t bytes = shared_bytes(shares, t.heads);
  const Rest<T> rest{static_cast<const T*>(a.residual),
                     static_cast<const T*>(a.proj_weight),
                     static_cast<const T*>(a.proj_bias),
                     static_cast<const T*>(a.weight),
                     static_cast<const T*>(a.bias),
                     static_cast<T*>(a.y),
                     static_cast<T*>(a.sum),
                     static_cast<T*>(a.attended),
                     kept_of<T>(a),
                     {{a.state, a.seed, a.offset}, a.threshold, keep_scale<float>(a.threshold)},
                     static_cast<int>(t.heads * t.head_dim),
                     static_cast<float>(a.eps)};
  const dim3 grid(shares.blocks, static_cast<unsigned>(ceil_div(t.q_length, kRows)), static_cast<unsigned>(t.batch));
  const int threads = shares.warps * kWarpSize;
  if (shares.blocks > 1) {
    launch_in_clusters(v5_cluster_kernel<T>, shares.blocks, grid, threads, bytes, stream, attention_of(a), rest,
                       shares);
  } else {
    allow_shared(v5_cluster_kernel<T>, bytes);
    v5_cluster_kernel<T>
        <<<grid, threads, static_cast<size_t>(bytes), as_stream(stream)>>>(attention_of(a), rest, shares);
  }
  check_launch();
}

}  // namespace

std::string v5_cluster_supports(const Args& a) {
  const Attention& t = a.attention;
  const std::string refused = attention::on_tensor_cores(attention_of(a), kRows);
  if (!refused.empty()) return refused;
  if (t.head_dim % 16 != 0 || t.head_dim > kHeadColumns) {
    return "takes head_dim that is a multiple of 16 up to 64, got " + std::to_string(t.head_dim);
  }
  if (t.batch > 65535) return "takes at most 65535 batches, got " + std::to_string(t.batch);
  if (t.q_length > 65535 * kRows) return "takes at most 1048560 queries, got " + std::to_string(t.q_length);
  if (!attention::is_above_0(t.scale)) return "takes a scale above 0, got " + std::to_string(t.scale);
  if (t.threshold != 0) return "takes no dropout of attention's weights";
  if (!aligned_16(a.residual, a.proj_weight, a.proj_bias, a.weight, a.bias, a.sum, a.y)) {
    return "takes residual, parameters, sum and y that begin at multiples of 16 bytes";
  }
  if (shares_of(a).blocks == 0) {
    return too_much_shared_memory(shared_bytes(shares_with(t, 4, ceil_div(t.heads, most_blocks())), t.heads),
                                  "16 rows of heads·head_dim = " + std::to_string(t.heads * t.head_dim) + " numbers");
  }
  return "";
}

void v5_cluster(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) { launch<typename decltype(type)::element>(a, shares_of(a), stream); });
}

}  // namespace kf::KF_BACKEND::attention_block
