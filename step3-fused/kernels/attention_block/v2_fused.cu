// attention_block v2_fused: one launch, the projection inside
//
// Idea      As attention_residual_layer_norm's v2: a block owns R query rows with all their heads. Each output of the
//           projection needs every head of its row, and the block has them: they lie side by side in shared memory.
//             phase 1  for each head: queries in; for each 32 keys: keys and values in, scores, softmax so far, output
//             phase 2  projection: a thread computes two columns for all R rows, in registers. It reads its weights
//                      from global memory, neighbours for the lanes of a warp, and the rows from shared memory, one
//                      address for all lanes. The results need a second tile: the first is read until the end.
//             phase 3  bias and residual added, the sum written; mean and variance in two passes; normalise, write y
// Since v1  One launch instead of four, no scratch. But every block reads all of the projection's weights, 1.2 MB in
//           half precision at width 768 and 5.1 MB at 1600, from L2, for only R rows. A matrix product of its own
//           shares them between 128 rows and more, and can use tensor cores. And a block goes through the heads one
//           after the other. On an H200 this rung is as slow as v1 or slower, but for 32 sequences of 128 or 512
//           tokens: what it saves, launches and trips through memory, is not what costs.
// Launch    grid batch·⌈q_length/R⌉, block 256; R = 16, or 8, 4, 1 where rows are too wide or blocks too few
// Shared    floats, stride = head_dim rounded up to a multiple of 64, plus 4:
//             tile     R × width       attention's output of all heads
//           and beside it, in the same place one after the other,
//             queries  R × stride      of this head, times scale          phase 1
//             keys     32 × stride     of this head                       phase 1
//             values   32 × stride                                        phase 1
//             weights  R × 32          exp(score − maximum so far)        phase 1
//             sums     R × width       projection, then the sum           phases 2 and 3
//           Scores, maximum and sum of the softmax, mean and variance live in registers. For R = 16: 96 KB at width
//           768, 200 KB at 1600.
// Moves     4·batch·q_length·width·sizeof(T) bytes, width = heads·head_dim: q, residual, sum and y once. And, mostly
//           from L2, ⌈q_length/R⌉ times keys and values, 2·batch·k_length·width elements; batch·⌈q_length/R⌉ times
//           the width² weights. FLOPs as v1. What the way back wants is (width·sizeof(T) + 4·(heads + 2)) bytes more
//           for each of batch·q_length rows
// Limits    float32, float16, bfloat16; two rows must fit into shared memory: width ≤ 8192 with 64 KB;
//           batch·q_length ≤ 2³¹−1
#include <step3/tile.h>

#include <algorithm>

#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {
namespace {

// out[r, c] = Σ_k in[r, k] · weight[k, c], r < kRows, for the columns first, first + 256, … that belong to this thread.
template <int kRows, int kColumns, class T, class C>
__device__ void project_columns(const C* in, const T* __restrict__ weight, int width, int first, C* out) {
  const int stride = static_cast<int>(row_stride<C>(width));
  C sum[kRows][kColumns] = {};
  for (int k = 0; k < width; k += kPack<C>) {
    C w[kPack<C>][kColumns];
#pragma unroll
    for (int i = 0; i < kPack<C>; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int column = first + j * kAttendThreads;
        const bool inside = k + i < width && column < width;
        w[i][j] = inside ? to_compute(weight[int64_t{k + i} * width + column]) : C(0);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto x = load_vector<kPack<C>>(in + r * stride + k);
#pragma unroll
      for (int i = 0; i < kPack<C>; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sum[r][j] += x.element[i] * w[i][j];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = first + j * kAttendThreads;
      if (column < width) out[r * stride + column] = sum[r][j];
    }
  }
}

template <int kRows, class T, class C = compute_t<T>>
__global__ void __launch_bounds__(kAttendThreads, 2)
    v2_fused_kernel(Attention a, Front<T> front, const T* __restrict__ residual, const T* __restrict__ proj_weight,
                    const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y, T* __restrict__ sum,
                    T* __restrict__ attended, Kept<C> kept, int64_t tiles, C eps) {
  extern __shared__ __align__(16) unsigned char bytes[];
  const int width = static_cast<int>(a.heads * a.head_dim);
  const int stride = static_cast<int>(row_stride<C>(width));
  C* tile = reinterpret_cast<C*>(bytes);
  C* memory = tile + kRows * stride;
  C* sums = memory;
  const int64_t first_row = (tiles - 1 - blockIdx.x % tiles) * kRows;  // under causality the last see most: first
  const int64_t batch = blockIdx.x / tiles;
  const int64_t first_of_all = batch * a.q_length + first_row, rows = min(int64_t{kRows}, a.q_length - first_row);

  for (int64_t head = 0; head < a.heads; ++head) {
    attend_tile<kRows, T>(a, batch, head, first_row, memory, tile + head * a.head_dim, stride);
  }
  if (width % kPack<C> != 0 && threadIdx.x < kRows) {  // project_columns reads whole vectors, past a row's end too
    for (int c = width; c < stride; ++c) tile[threadIdx.x * stride + c] = 0;
  }
  __syncthreads();
  if (attended != nullptr) store_tile(tile, first_of_all, rows, width, attended);

  int first = 0;
  for (; first + kAttendThreads < width; first += 2 * kAttendThreads) {
    project_columns<kRows, 2>(tile, proj_weight, width, first + static_cast<int>(threadIdx.x), sums);
  }
  if (first < width) project_columns<kRows, 1>(tile, proj_weight, width, first + static_cast<int>(threadIdx.x), sums);
  __syncthreads();

  add_and_normalize_tile(sums, first_of_all, rows, width, front, residual, weight, bias, sum, y, kept, eps);
}

int64_t shared_bytes(const Attention& a, int rows) {
  const int64_t row_values = rows * row_stride<float>(a.heads * a.head_dim);
  return (row_values + std::max(row_values, attend_values(rows, a.head_dim))) * int64_t{sizeof(float)};
}

template <class T>
void launch(const Args& a, void* stream) {
  const Front<T> front{static_cast<const T*>(a.proj_bias),
                       {{a.rng_state, a.seed, a.offset}, a.threshold, keep_scale<float>(a.threshold)}};
  const int rows = choose_tile_rows(a.attention, [&](int r) { return shared_bytes(a.attention, r); });
  const int64_t tiles = ceil_div(a.attention.q_length, rows);
  const int64_t bytes = shared_bytes(a.attention, rows);
  with_tile_rows(rows, [&](auto constant) {
    constexpr int kRows = decltype(constant)::value;
    allow_shared(v2_fused_kernel<kRows, T>, bytes);
    v2_fused_kernel<kRows, T><<<static_cast<unsigned>(a.attention.batch * tiles), kAttendThreads,
                                static_cast<size_t>(bytes), as_stream(stream)>>>(
        a.attention, front, static_cast<const T*>(a.residual), static_cast<const T*>(a.proj_weight),
        static_cast<const T*>(a.weight), static_cast<const T*>(a.bias), static_cast<T*>(a.y), static_cast<T*>(a.sum),
        static_cast<T*>(a.attended), kept_of<T>(a), tiles, static_cast<float>(a.eps));
  });
}

}  // namespace

std::string v2_fused_can_implement(const Args& a) {
  if (a.attention.cu_seqlens != nullptr) return kf::attention_block::kNoPackedRows;
  if (a.dtype == DType::kFloat64) return "takes float32, float16 and bfloat16, got float64";
  const int64_t rows = a.attention.batch * a.attention.q_length;  // a block each, at the least
  if (rows > INT32_MAX) return "takes batch·q_length ≤ 2³¹−1, got " + std::to_string(rows);
  return too_much_shared_memory(
      shared_bytes(a.attention, 1),
      "rows of heads·head_dim = " + std::to_string(a.attention.heads * a.attention.head_dim) + " numbers");
}

void v2_fused(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    if constexpr (!std::is_same_v<T, double>) launch<T>(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::attention_block
