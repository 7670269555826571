// attention_residual_layer_norm v4_heads: few rows, their heads divided among the blocks of a cluster
//
// Idea      Where rows are few, two launches and the wait between them cost more than the work. Who normalises a row
//           must know all of it, but of other heads no more than their mean and spread: 16 bytes. So the heads of 16
//           rows are divided among the blocks of a cluster. Each attends for its heads, adds the residual, tells all
//           others what it knows of the rows' mean and variance, and normalises its own columns
// Since v2  Tensor cores by mma, from compute capability 8.0 on: before 9.0 a cluster is a single block. The attention
//           is that of attention_block's v5, which has a projection to do besides: ../attention_block/cluster_attend.h
// Launch    grid (blocks of a cluster: 1 to 16, ⌈q_length/16⌉, batch), block 256; 128 where shared memory is small.
//           Shared memory: 16 rows of the block's columns, 8 KB a warp for its ring of keys and values, and 4 KB for
//           what blocks tell each other. Dependent (step2/dependent_launch.h)
// Moves     3·batch·q_length·width·sizeof(T) bytes once, width = heads·head_dim: q, residual and y. And, mostly from
//           L2, for each 16 rows the keys and values that one of them sees. FLOPs as v1
// Limits    float16 and bfloat16; head_dim a multiple of 8 up to 64; a scale above 0; no dropout of attention's
//           weights; batch up to 65535, q_length up to 1048560; q, k and v as step 2's rungs on tensor cores take them,
//           all others at multiples of 16 bytes; 16 rows of a block's heads must fit into shared memory. It rounds
//           attention's weights and the sum
#include <step1/vector.h>

#include <stdexcept>

#include "split.h"

namespace kf::KF_BACKEND::attention_residual_layer_norm {
namespace {

template <class T>
struct Rest {
  const T *residual, *weight, *bias;
  T *y, *attended;
  Kept<float> kept;
  int width;
  float eps;
};

template <class T>
__global__ void __launch_bounds__(256, 2)
    v4_heads_kernel(const attention_decode::Args a, const Rest<T> rest, const Split split) {
  launch_dependent_grids();
  wait_on_dependent_grids();  // q, k and v are there
  constexpr int N = 8;
  extern __shared__ __align__(128) unsigned char memory[];
  const int width = rest.width, head_dim = static_cast<int>(a.head_dim), stride = split.heads * head_dim;
  auto& header = *reinterpret_cast<Header*>(memory);
  T* const sums = reinterpret_cast<T*>(memory + sizeof header);  // [kRows][stride]
  auto* const of_warps = reinterpret_cast<WarpMemory*>(memory + sizeof header + (kRows * stride * 2 + 127) / 128 * 128);

  const int blocks = split.blocks, rank = static_cast<int>(blockIdx.x), batch = static_cast<int>(blockIdx.z);
  const int first_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * kRows;  // the last rows may see most: first
  const int first_head = rank * split.heads, heads = min(split.heads, static_cast<int>(a.heads) - first_head);
  const int columns = heads * head_dim, first_column = first_head * head_dim;
  const attention::BlockOfQueries block(a, batch * a.heads + first_head, first_row, kRows);
  const int64_t first_of_batch = batch * a.q_length + first_row;  // this block's first row among all

  if (blocks > 1) {
    if (threadIdx.x == 0) {
      mbarrier_init(&header.shares_arrived, 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect_tx(&header.shares_arrived, block.queries * blocks * static_cast<int>(sizeof(RowShare)));
    }
    __syncwarp();
    cluster_barrier_arrive_relaxed();
  }
  const BlockAttention<T> attending{a, of_warps, batch, first_head, heads, block};
  attending.run(
      [&] {
        __syncwarp();
        if (blocks > 1) cluster_barrier_wait();  // the others have begun: they may be written to
      },
      [&](int head, int row, int column, const float (&out)[N], float lse) {
        if (a.lse != nullptr && column == 0) {
          static_cast<float*>(a.lse)[(batch * a.heads + head) * a.q_length + first_row + row] = lse;
        }
        if (column >= head_dim) return;
        const int64_t at = (first_of_batch + row) * width + head * head_dim + column;
        if (rest.attended != nullptr) store_vector(rest.attended + at, narrow<T>(out));
        float sum[N];
        widen(load_vector<N>(rest.residual + at), sum);
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += out[j];
        store_vector(sums + row * stride + (head - first_head) * head_dim + column, narrow<T>(sum));
      });

  // 16 lanes a row, eight columns a lane at a time.
  const int lane = threadIdx.x % kRowLanes, first_of_lanes = threadIdx.x / kRowLanes;
  const int rows_at_once = blockDim.x / kRowLanes;
#pragma unroll 1
  for (int row = first_of_lanes; row < kRows; row += rows_at_once) {  // all, since lanes of two rows share a shuffle
    const bool there = row < block.queries;
    const auto each = [&](auto f) {
      for (int c = lane * N; there && c < columns; c += kRowLanes * N) {
        float x[N];
        widen(load_vector<N>(sums + row * stride + c), x);
#pragma unroll
        for (int j = 0; j < N; ++j) f(x[j]);
      }
    };
    float total = 0, left = 0, squares = 0;
    each([&](float x) { total += x; });
    const float mean = row_sum(total) / static_cast<float>(columns);
    each([&](float x) { left += x - mean, squares += (x - mean) * (x - mean); });
    const RowShare known{{mean, row_sum(left)}, {row_sum(squares), static_cast<float>(columns)}};
    tell(lane, known, &header.share[rank][row], &header.shares_arrived, there ? blocks : 0);
  }
  __syncwarp();
  if (blocks > 1) mbarrier_wait_cluster(&header.shares_arrived, 0);  // then nobody reaches into this block: it may end

#pragma unroll 1
  for (int row = first_of_lanes; row < kRows; row += rows_at_once) {
    const int64_t global = first_of_batch + row;
    const Statistics<float> of_row = statistics_of(&header.share[0][row], blocks, width, rest.eps);
    if (row >= block.queries) continue;
    if (rank == 0 && lane == 0) rest.kept.keep(global, of_row);
    for (int c = lane * N; c < columns; c += kRowLanes * N) {
      float weight[N], bias[N], sum[N];
      widen(load_vector<N>(rest.weight + first_column + c), weight);
      widen(load_vector<N>(rest.bias + first_column + c), bias);
      widen(load_vector<N>(sums + row * stride + c), sum);
#pragma unroll
      for (int j = 0; j < N; ++j) bias[j] += of_row.normalize(sum[j]) * weight[j];
      store_vector(rest.y + global * width + first_column + c, narrow<T>(bias));
    }
  }
}

template <class T>
Rest<T> rest_of(const Args& a) {
  Rest<T> rest{};
  rest.residual = static_cast<const T*>(a.residual);
  rest.weight = static_cast<const T*>(a.weight);
  rest.bias = static_cast<const T*>(a.bias);
  rest.y = static_cast<T*>(a.y);
  rest.attended = static_cast<T*>(a.attended);
  rest.kept = kept_of<T>(a);
  rest.width = static_cast<int>(a.attention.heads * a.attention.head_dim);
  rest.eps = static_cast<float>(a.eps);
  return rest;
}

}  // namespace

std::string v4_heads_can_implement(const Args& a) { return can_implement_split(a); }

void v4_heads(const Args& a, void* stream) {
  const Attention& t = a.attention;
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto kernel = v4_heads_kernel<T>;
    const Split split = way_with_room(kernel, t, [&](int64_t most) { return split_of(a, most); });
    if (split.blocks == 0) {  // fewer blocks have more heads each
      throw std::runtime_error("v4_heads: this part of a GPU has no room for a cluster that keeps 16 rows of " +
                               std::to_string(t.heads) + " heads");
    }
    launch_way(kernel, t, split, stream, attention_of(t, a.dtype), rest_of<T>(a));
  });
}

}  // namespace kf::KF_BACKEND::attention_residual_layer_norm
