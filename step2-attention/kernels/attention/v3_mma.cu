// attention v3_mma: both products on tensor cores
//
// Idea      mma.sync multiplies 16 × 16 by 16 × 8 elements of a half type and adds to float32: 4096 FLOPs, one
//           instruction of a warp. A warp owns 16 queries; ldmatrix loads its operands from shared memory. A score
//           comes out where mma put it: lane l holds rows l/4 and l/4 + 8, columns 2·(l%4) and the next, of each 8.
//           So the four lanes of a row find its maximum by two shuffles.
// Since v2  The dot products and the weighted sums have become mma. The second product wants the weights as operand a,
//           so they go through shared memory, rounded to the tensors' type. Rows of shared memory are 16 bytes longer
//           than they need to be: ldmatrix reads eight rows at once, which then lie in different banks.
// Launch    grid B·H·⌈Sq/64⌉, block 128, each of its 4 warps 16 queries; keys 64 at a time. Columns are padded with
//           zeros to P = 32, 64, 96 or 128. Shared memory 2·(3·64·(P + 8) + 64·72) bytes: 36 KB at D 64, 60 at D 128
// Moves     B·H·((2·Sq + 2·Sk·⌈Sq/64⌉)·D·2 + 4·Sq) bytes, most of K and V from the L2 cache;
//           4·B·H·Sq·Sk·P FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    float16, bfloat16; D a multiple of 8 up to 128; rows that begin at multiples of 16 bytes; Sk ≤ 2³⁰;
//           B·H·⌈Sq/64⌉ ≤ 2³¹−1; compute capability 8.0; no packed rows. While a tile is in flight,
//           nobody computes. For the second product it rounds the weights
#include <step1/vector.h>
#include <step2/attention/tensor_cores.h>
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
  T k[kKeys][kDim + kPad];
  T v[kKeys][kDim + kPad];
  T weight[kQueries][kKeys + kPad];
};

// 64 rows; zero where there is no row or no column.
template <int kDim, class T>
__device__ void load_tile(T (*tile)[kDim + kPad], const T* first, int64_t stride, int rows, int64_t columns) {
  for (int i = threadIdx.x; i < 64 * kDim / kVector; i += kThreads) {
    const int row = i / (kDim / kVector), column = i % (kDim / kVector) * kVector;
    Vector<T, kVector> vector{};
    if (row < rows && column < columns) vector = load_vector<kVector>(first + row * stride + column);
    store_vector(&tile[row][column], vector);
  }
}

template <int kDim, bool kDropout, class T>
__global__ void __launch_bounds__(kThreads) v3_mma_kernel(Args a) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kDim, T>*>(memory);
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = threadIdx.x / kWarpSize * 16;   // its first query in the block
  const int matrix = lane / 8, matrix_row = lane % 8;  // whose row this lane shows to ldmatrix

  const int64_t tiles = ceil_div(a.q_length, kQueries);
  const BlockOfQueries block(a, blockIdx.x / tiles, blockIdx.x % tiles * kQueries, kQueries);
  const int end = block.seen_by(kQueries - 1);
  const HeadRows<T> head(a, block.head);
  const T* q_rows = head.q().at(block.first);
  const T* k_rows = head.k().at(block.first_key);
  const T* v_rows = head.v().at(block.first_key);

  // This lane's two queries, and what it holds of them: of each 8 columns two.
  const int query[2] = {warp_row + lane / 4, warp_row + lane / 4 + 8};
  const int seen[2] = {block.seen_by(query[0]), block.seen_by(query[1])};
  AttentionDropout dropout(a);
  OnlineSoftmax<float> softmax[2];  // its sum: of this lane's columns, until the end
  float out[kDim / 8][4] = {};      // [0], [1]: of the first query; [2], [3]: of the second
  load_tile<kDim>(shared.q, q_rows, a.q_stride.seq, block.queries, a.head_dim);

  for (int first_key = 0; first_key < end; first_key += kKeys) {
    __syncthreads();  // nobody reads the tile before any more
    load_tile<kDim>(shared.k, k_rows + first_key * a.k_stride.seq, a.k_stride.seq, block.keys - first_key, a.head_dim);
    load_tile<kDim>(shared.v, v_rows + first_key * a.v_stride.seq, a.v_stride.seq, block.keys - first_key, a.head_dim);
    __syncthreads();  // the tile is complete

    // Scores: 16 queries × 64 keys. K's rows are b's columns.
    float score[kKeys / 8][4] = {};
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      uint32_t q[4];
      ldmatrix<4>(q, &shared.q[warp_row + matrix % 2 * 8 + matrix_row][d + matrix / 2 * 8]);
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        uint32_t k[4];  // two operands: keys 8n to 8n + 7, and the next 8
        ldmatrix<4>(k, &shared.k[n * 8 + matrix / 2 * 8 + matrix_row][d + matrix % 2 * 8]);
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
        ldmatrix_transposed<4>(v, &shared.v[key + matrix % 2 * 8 + matrix_row][n * 8 + matrix / 2 * 8]);
        mma_m16n8k16<T>(out[n], weight, {v[0], v[1]});
        mma_m16n8k16<T>(out[n + 1], weight, {v[2], v[3]});
      }
    }
  }

  for (int r = 0; r < 2; ++r) {
    softmax[r].sum = quad_sum(softmax[r].sum);
    if (query[r] >= block.queries) continue;
    const int position = block.first + query[r];
    T* row = head.out().at(position);
    float inverse = softmax[r].sum == 0.0f ? 0.0f : 1.0f / softmax[r].sum;  // 0: a query that sees no key
    if constexpr (kDropout) inverse *= dropout.scale();
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (n * 8 >= a.head_dim) continue;
      store_vector(row + n * 8 + lane % 4 * 2, narrow<T>({out[n][2 * r] * inverse, out[n][2 * r + 1] * inverse}));
    }
    if (lane % 4 == 0) head.lse()[position] = softmax[r].log_sum_exp();
  }
}

}  // namespace

std::string v3_mma_can_implement(const Args& a) {
  const std::string why_not = takes_no_documents(a);
  return why_not.empty() ? on_tensor_cores(a, kQueries) : why_not;
}

void v3_mma(const Args& a, void* stream) {
  with_columns(a, [&](auto type, auto columns, auto drops) {
    using T = typename decltype(type)::element;
    constexpr int kBytes = sizeof(Shared<columns.value, T>);
    const auto kernel = v3_mma_kernel<columns.value, drops.value, T>;
    if constexpr (kBytes > 48 * 1024) allow_shared(kernel, kBytes);
    const auto blocks = static_cast<unsigned>(a.batch * a.heads * ceil_div(a.q_length, kQueries));
    kernel<<<blocks, kThreads, kBytes, as_stream(stream)>>>(a);
    check_launch();
  });
}

}  // namespace kf::KF_BACKEND::attention
