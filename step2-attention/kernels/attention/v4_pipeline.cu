// attention v4_pipeline: the next tile is in flight while this one is computed
//
// Idea      cp.async copies from global to shared memory by itself: a thread starts the copy and goes on. So there are
//           two stages for a tile of K and V; while the warps compute on one, the other is being filled.
// Since v3  The copies through registers and the two barriers a tile have become: wait for this tile's copies; one
//           barrier, which also says that nobody reads the tile before any more; start the copies of the next tile
//           into its stage; compute.
//
//               copies    tile 0 │ tile 1 │ tile 2 │ tile 3 │
//               warps            │ tile 0 │ tile 1 │ tile 2 │ tile 3
//
// Launch    grid B·H·⌈Sq/64⌉, block 128, each of its 4 warps 16 queries; keys 64 at a time. Columns are padded with
//           zeros to P = 32, 64, 96 or 128. Shared memory 2·(5·64·(P + 8) + 64·72) bytes: 54 KB at D 64, 94 at D 128
// Moves     B·H·((2·Sq + 2·Sk·⌈Sq/64⌉)·D·2 + 4·Sq) bytes, most of K and V from the L2 cache;
//           4·B·H·Sq·Sk·P FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    as v3_mma. A fragment of K or V, once loaded, serves a warp's 16 queries and no others. Like v3 it rounds
//           the weights
#include <step1/vector.h>
#include <step2/attention/tensor_cores.h>
#include <step2/cp_async.h>
#include <step2/mma.h>
#include <step2/reduce.h>

#include "rungs.h"

namespace kf::KF_BACKEND::attention {
namespace {

constexpr int kThreads = 128;
constexpr int kQueries = 64;  // of a block
constexpr int kKeys = 64;     // of a tile
constexpr int kPad = 8;       // elements, 16 bytes
constexpr int kVector = 8;    // elements of 16 bytes

template <int kDim, class T>
struct Shared {
  T q[kQueries][kDim + kPad];
  T k[2][kKeys][kDim + kPad];
  T v[2][kKeys][kDim + kPad];
  T weight[kQueries][kKeys + kPad];
};

// Starts the copies of 64 rows. Where there is no row or no column nothing is read, and zeros arrive.
template <int kDim, class T>
__device__ void issue_tile_load(T (*tile)[kDim + kPad], const T* first, int64_t stride, int rows, int64_t columns) {
  for (int i = threadIdx.x; i < 64 * kDim / kVector; i += kThreads) {
    const int row = i / (kDim / kVector), column = i % (kDim / kVector) * kVector;
    const bool there = row < rows && column < columns;
    cp_async_16(&tile[row][column], there ? first + row * stride + column : first, there ? 16 : 0);
  }
}

template <int kDim, bool kDropout, class T>
__global__ void __launch_bounds__(kThreads) v4_pipeline_kernel(Args a) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kDim, T>*>(memory);
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = threadIdx.x / kWarpSize * 16;   // its first query in the block
  const int matrix = lane / 8, matrix_row = lane % 8;  // whose row this lane shows to ldmatrix

  const int64_t tiles = ceil_div(a.q_length, kQueries);
  const BlockOfQueries block(a, blockIdx.x / tiles, blockIdx.x % tiles * kQueries, kQueries);
  const int end = block.seen_by(kQueries - 1);
  const T* q_rows = row_of(static_cast<const T*>(a.q), a.q_stride, block.head, a.heads, block.first);
  const T* k_rows =
      row_of(static_cast<const T*>(a.k), a.k_stride, kv_head_of(a, block.head), a.kv_heads, block.first_key);
  const T* v_rows =
      row_of(static_cast<const T*>(a.v), a.v_stride, kv_head_of(a, block.head), a.kv_heads, block.first_key);

  // This lane's two queries, and what it holds of them: of each 8 columns two.
  const int query[2] = {warp_row + lane / 4, warp_row + lane / 4 + 8};
  const int seen[2] = {block.seen_by(query[0]), block.seen_by(query[1])};
  AttentionDropout dropout(a);
  OnlineSoftmax<float> softmax[2];  // its sum: of this lane's columns, until the end
  float out[kDim / 8][4] = {};      // [0], [1]: of the first query; [2], [3]: of the second
  const auto issue_key_loads = [&](int first_key, int stage) {
    const int rows = block.keys - first_key;
    if (first_key < end) {
      issue_tile_load<kDim>(shared.k[stage], k_rows + first_key * a.k_stride.seq, a.k_stride.seq, rows, a.head_dim);
      issue_tile_load<kDim>(shared.v[stage], v_rows + first_key * a.v_stride.seq, a.v_stride.seq, rows, a.head_dim);
    }
    cp_async_commit();
  };

  issue_tile_load<kDim>(shared.q, q_rows, a.q_stride.seq, block.queries, a.head_dim);
  issue_key_loads(0, 0);
  int stage = 0;
  for (int first_key = 0; first_key < end; first_key += kKeys, stage ^= 1) {
    cp_async_wait<0>();  // what this thread started is there
    __syncthreads();     // and what the others did; and nobody reads the tile before any more
    issue_key_loads(first_key + kKeys, stage ^ 1);

    // Scores: 16 queries × 64 keys. K's rows are b's columns.
    float score[kKeys / 8][4] = {};
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      uint32_t q[4];
      ldmatrix<4>(q, &shared.q[warp_row + matrix % 2 * 8 + matrix_row][d + matrix / 2 * 8]);
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        uint32_t k[4];  // two operands: keys 8n to 8n + 7, and the next 8
        ldmatrix<4>(k, &shared.k[stage][n * 8 + matrix / 2 * 8 + matrix_row][d + matrix % 2 * 8]);
        mma_m16n8k16<T>(score[n], q, {k[0], k[1]});
        mma_m16n8k16<T>(score[n + 1], q, {k[2], k[3]});
      }
    }

    // Weights.
    float highest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      for (int e = 0; e < 4; ++e) {
        const int key = first_key + n * 8 + lane % 4 * 2 + e % 2;
        score[n][e] = key < seen[e / 2] ? score[n][e] * static_cast<float>(a.scale) : -INFINITY;
        highest[e / 2] = greater_of(highest[e / 2], score[n][e]);
      }
    }
    float factor[2];
    for (int r = 0; r < 2; ++r) {
      factor[r] = softmax[r].raise(quad_max(highest[r]));
    }
    uint64_t kept = 0;
    if constexpr (kDropout) {
      kept = dropout.kept<false, kKeys / 2>(block.head, block.first + query[0],
                                            block.first_key + first_key + lane % 4 * 2);
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      for (int r = 0; r < 2; ++r) {
        float low = softmax[r].weight(score[n][2 * r]), high = softmax[r].weight(score[n][2 * r + 1]);
        softmax[r].sum += low + high;
        if constexpr (kDropout) {  // after the sum: it has all weights
          if ((kept >> (4 * n + 2 * r) & 1) == 0) low = 0.0f;
          if ((kept >> (4 * n + 2 * r + 1) & 1) == 0) high = 0.0f;
        }
        store_vector(&shared.weight[warp_row + lane / 4 + 8 * r][n * 8 + lane % 4 * 2], narrow<T>({low, high}));
      }
    }
    __syncwarp();  // the warp's rows of weights are complete; no other warp reads them

    // Their sum over the tile's values. V's rows are b's rows, so ldmatrix turns them.
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      for (int e = 0; e < 4; ++e) out[n][e] *= factor[e / 2];
    }
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
      uint32_t weight[4];
      ldmatrix<4>(weight, &shared.weight[warp_row + matrix % 2 * 8 + matrix_row][key + matrix / 2 * 8]);
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 2) {
        uint32_t v[4];
        ldmatrix_transposed<4>(v, &shared.v[stage][key + matrix % 2 * 8 + matrix_row][n * 8 + matrix / 2 * 8]);
        mma_m16n8k16<T>(out[n], weight, {v[0], v[1]});
        mma_m16n8k16<T>(out[n + 1], weight, {v[2], v[3]});
      }
    }
  }

  cp_async_wait<0>();  // where there is no key, q's copies are still in flight

  for (int r = 0; r < 2; ++r) {
    softmax[r].sum = quad_sum(softmax[r].sum);
    if (query[r] >= block.queries) continue;
    const int position = block.first + query[r];
    T* row = row_of(static_cast<T*>(a.out), a.out_stride, block.head, a.heads, position);
    float inverse = softmax[r].sum == 0.0f ? 0.0f : 1.0f / softmax[r].sum;  // 0: a query that sees no key
    if constexpr (kDropout) inverse *= dropout.scale();
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (n * 8 >= a.head_dim) continue;
      store_vector(row + n * 8 + lane % 4 * 2, narrow<T>({out[n][2 * r] * inverse, out[n][2 * r + 1] * inverse}));
    }
    if (lane % 4 == 0)
      static_cast<float*>(a.lse)[int64_t{block.head} * a.q_length + position] = softmax[r].log_sum_exp();
  }
}

}  // namespace

std::string v4_pipeline_can_implement(const Args& a) {
  const std::string why_not = takes_no_documents(a);
  return why_not.empty() ? on_tensor_cores(a, kQueries) : why_not;
}

void v4_pipeline(const Args& a, void* stream) {
  with_columns(a, [&](auto type, auto columns, auto drops) {
    using T = typename decltype(type)::element;
    constexpr int kBytes = sizeof(Shared<columns.value, T>);
    const auto kernel = v4_pipeline_kernel<columns.value, drops.value, T>;
    if constexpr (kBytes > 48 * 1024) allow_shared(kernel, kBytes);
    const auto blocks = static_cast<unsigned>(a.batch * a.heads * ceil_div(a.q_length, kQueries));
    kernel<<<blocks, kThreads, kBytes, as_stream(stream)>>>(a);
    check_launch();
  });
}

}  // namespace kf::KF_BACKEND::attention
