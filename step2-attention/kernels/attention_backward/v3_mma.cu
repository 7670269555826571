// attention_backward v3_mma: all products on tensor cores
//
// Idea      The same exchange of roles on mma.sync. A warp owns 16 rows; their scores against the rows walked over come
//           out of the first product in the lanes' registers, and weights and gradients, rounded in pairs, are operand
//           a of the second products as they lie, as in attention's v5_registers. Where the block owns keys, scores
//           come out as keys × queries, so lse and Δ belong to columns, and it reads them from shared memory.
// Since v2  mma instead of FMAs; exp is one instruction, in base 2; positions in 32 bits.
// Launch    Δ as v2. Then grid B·H·⌈Sq/64⌉ and grid B·Hkv·⌈Sk/64⌉, block 128, each of its 4 warps 16 rows. W = 64 rows
//           at a time are walked over; beyond D 64, W = 32. Columns are padded with zeros to P = 32, 64, 96 or 128.
//           Shared memory 2·(128 + 2·W)·(P + 8) + 8·W bytes: 37 KB at D 64, 52 KB at D 128
// Moves     B·H·((5·Sq + 2·Sk·⌈Sq/64⌉ + 2·Sq·⌈Sk/64⌉)·D·2) + 8·B·Hkv·Sk·D bytes, most of what is walked over from the
//           L2 cache; 14·B·H·Sq·Sk·P FLOPs (causal: half at Sq = Sk), 2·B·H·Sq·Sk exponentials
// Limits    float16, bfloat16; D a multiple of 8 up to 128; rows that begin at multiples of 16 bytes; Sq, Sk ≤ 2³⁰; at
//           most 2³¹−1 blocks; compute capability 8.0. While a tile is in flight, nobody computes. In float16 gradients
//           of scores beyond 65504 overflow. For the second products it rounds the weights and their gradients
#include <step2/attention/tensor_cores.h>
#include <step2/mma.h>

#include "delta.h"
#include "packed.h"
#include "roles.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_backward {
namespace {

constexpr int kThreads = 128;
constexpr int kOwned = 64;  // rows of a block
constexpr int kPad = 8;     // elements, 16 bytes: eight rows lie in different banks
constexpr int kVector = 8;  // elements of 16 bytes

template <int kDim>
constexpr int kWalked = kDim <= 64 ? 64 : 32;  // rows of a tile

template <int kDim, class T>
struct Shared {
  T a[kOwned][kDim + kPad];
  T b[kOwned][kDim + kPad];
  T x[kWalked<kDim>][kDim + kPad];
  T y[kWalked<kDim>][kDim + kPad];
  float lse[kWalked<kDim>];  // of queries walked over, times log₂e
  float delta[kWalked<kDim>];
};

// kRows rows from `begin` on; zero where there is none before `end`, and beyond the last column.
template <int kRows, int kDim, class T>
__device__ void load_tile(T (*tile)[kDim + kPad], const Rows<const T>& rows, int64_t begin, int64_t end,
                          int64_t columns) {
  for (int i = threadIdx.x; i < kRows * kDim / kVector; i += kThreads) {
    const int row = i / (kDim / kVector), column = i % (kDim / kVector) * kVector;
    Vector<T, kVector> vector{};
    if (begin + row < end && column < columns) vector = load_vector<kVector>(rows.at(begin + row) + column);
    store_vector(&tile[row][column], vector);
  }
}

template <bool kOwnsKeys, int kDim, bool kDropout, class T>
__global__ void __launch_bounds__(kThreads) v3_mma_kernel(Args a, const float* __restrict__ delta) {
  constexpr int kRows = kWalked<kDim>;
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<kDim, T>*>(memory);
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = threadIdx.x / kWarpSize * 16;   // its first row in the block
  const int matrix = lane / 8, matrix_row = lane % 8;  // whose row this lane shows to ldmatrix

  const Role<kOwnsKeys, T> role(a, blockIdx.x, kOwned);
  const float* const lse = static_cast<const float*>(a.lse);
  const auto scale = static_cast<float>(a.scale * kLog2e), log2e = static_cast<float>(kLog2e);
  // Keys before the first that exists are read, too, and may be NaN: a row of a product knows only its own row of a.
  load_tile<kOwned, kDim>(shared.a, role.a(), role.first, role.exist.end, a.head_dim);
  load_tile<kOwned, kDim>(shared.b, role.b(), role.first, role.exist.end, a.head_dim);

  // This lane's two rows, what they are paired with, and what it holds of their gradients: of each 8 columns two.
  const int64_t own[2] = {role.first + warp_row + lane / 4, role.first + warp_row + lane / 4 + 8};
  int begin[2], end[2];
  float own_lse[2] = {}, own_delta[2] = {};
  for (int r = 0; r < 2; ++r) {
    const Range partners = role.partners_of(own[r]);
    begin[r] = static_cast<int>(partners.begin), end[r] = static_cast<int>(partners.end);
    if (kOwnsKeys || !role.exists(own[r])) continue;
    own_lse[r] = subtracted(lse[role.head * a.q_length + own[r]]) * log2e;
    own_delta[r] = delta[role.head * a.q_length + own[r]];
  }
  attention::AttentionDropout dropout(a);
  float da[kDim / 8][4] = {};  // [0], [1]: of the first row; [2], [3]: of the second
  float db[kOwnsKeys ? kDim / 8 : 1][4] = {};

  for (int64_t head = role.first_head(); head < role.end_head(); ++head) {
    for (int first = static_cast<int>(role.walked.begin); first < role.walked.end; first += kRows) {
      __syncthreads();  // nobody reads the tile before any more
      load_tile<kRows, kDim>(shared.x, role.x(head), first, role.walked.end, a.head_dim);
      load_tile<kRows, kDim>(shared.y, role.y(head), first, role.walked.end, a.head_dim);
      if (kOwnsKeys && threadIdx.x < kRows && first + threadIdx.x < role.walked.end) {
        shared.lse[threadIdx.x] = subtracted(lse[head * a.q_length + first + threadIdx.x]) * log2e;
        shared.delta[threadIdx.x] = delta[head * a.q_length + first + threadIdx.x];
      }
      __syncthreads();  // the tile is complete

      // a·x and b·y: 16 rows × kRows. x's and y's rows are the operand's columns.
      float score[kRows / 8][4] = {}, grad_weight[kRows / 8][4] = {};
#pragma unroll
      for (int d = 0; d < kDim; d += 16) {
        uint32_t own_a[4], own_b[4];
        ldmatrix<4>(own_a, &shared.a[warp_row + matrix % 2 * 8 + matrix_row][d + matrix / 2 * 8]);
        ldmatrix<4>(own_b, &shared.b[warp_row + matrix % 2 * 8 + matrix_row][d + matrix / 2 * 8]);
#pragma unroll
        for (int n = 0; n < kRows / 8; n += 2) {
          uint32_t other[4];  // two operands: rows 8n to 8n + 7, and the next 8
          ldmatrix<4>(other, &shared.x[n * 8 + matrix / 2 * 8 + matrix_row][d + matrix % 2 * 8]);
          mma_m16n8k16<T>(score[n], own_a, {other[0], other[1]});
          mma_m16n8k16<T>(score[n + 1], own_a, {other[2], other[3]});
          ldmatrix<4>(other, &shared.y[n * 8 + matrix / 2 * 8 + matrix_row][d + matrix % 2 * 8]);
          mma_m16n8k16<T>(grad_weight[n], own_b, {other[0], other[1]});
          mma_m16n8k16<T>(grad_weight[n + 1], own_b, {other[2], other[3]});
        }
      }

      // Weights and gradients of scores, as operand a: n and n + 1 are columns 0 to 7 and 8 to 15 of 16 rows.
      uint32_t weight[kRows / 16][4], grad_score[kRows / 16][4];
      uint64_t kept = 0;
      if constexpr (kDropout) kept = dropout.kept<kOwnsKeys, kRows / 2>(head, own[0], first + lane % 4 * 2);
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float w[2], g[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = n * 8 + lane % 4 * 2 + e;
            const bool paired = first + column >= begin[r] && first + column < end[r];
            const float its_lse = kOwnsKeys ? shared.lse[column] : own_lse[r];
            const float its_delta = kOwnsKeys ? shared.delta[column] : own_delta[r];
            const float z = kDropout ? (kept >> (4 * n + 2 * r + e) & 1 ? dropout.scale() : 0.0f) : 1.0f;
            w[e] = paired ? exp2_approx(score[n][2 * r + e] * scale - its_lse) : 0.0f;
            g[e] = paired ? w[e] * (z * grad_weight[n][2 * r + e] - its_delta) : 0.0f;
            w[e] *= z;  // as v met it
          }
          weight[n / 2][n % 2 * 2 + r] = pack<T>(w[0], w[1]);
          grad_score[n / 2][n % 2 * 2 + r] = pack<T>(g[0], g[1]);
        }
      }

      // Their sums over the tile's rows. x's and y's rows are the operand's rows, so ldmatrix turns them.
#pragma unroll
      for (int row = 0; row < kRows; row += 16) {
#pragma unroll
        for (int n = 0; n < kDim / 8; n += 2) {
          uint32_t other[4];
          ldmatrix_transposed<4>(other, &shared.x[row + matrix % 2 * 8 + matrix_row][n * 8 + matrix / 2 * 8]);
          mma_m16n8k16<T>(da[n], grad_score[row / 16], {other[0], other[1]});
          mma_m16n8k16<T>(da[n + 1], grad_score[row / 16], {other[2], other[3]});
          if constexpr (kOwnsKeys) {
            ldmatrix_transposed<4>(other, &shared.y[row + matrix % 2 * 8 + matrix_row][n * 8 + matrix / 2 * 8]);
            mma_m16n8k16<T>(db[n], weight[row / 16], {other[0], other[1]});
            mma_m16n8k16<T>(db[n + 1], weight[row / 16], {other[2], other[3]});
          }
        }
      }
    }
  }

  const auto factor = static_cast<float>(a.scale);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (own[r] >= role.length(a)) continue;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (n * 8 >= a.head_dim) continue;
      const int column = n * 8 + lane % 4 * 2;
      const auto da_pair = narrow<T>({da[n][2 * r] * factor, da[n][2 * r + 1] * factor});
      store_vector(role.da().at(own[r]) + column, da_pair);
      if constexpr (kOwnsKeys) {
        store_vector(role.db().at(own[r]) + column, narrow<T>({db[n][2 * r], db[n][2 * r + 1]}));
      }
    }
  }
}

template <bool kOwnsKeys, int kDim, bool kDropout, class T>
void launch(const Args& a, const float* delta, void* stream) {
  constexpr int kBytes = sizeof(Shared<kDim, T>);
  const auto kernel = v3_mma_kernel<kOwnsKeys, kDim, kDropout, T>;
  if constexpr (kBytes > 48 * 1024) allow_shared(kernel, kBytes);
  const auto blocks = static_cast<unsigned>(blocks_of<kOwnsKeys>(a, kOwned));
  kernel<<<blocks, kThreads, kBytes, as_stream(stream)>>>(a, delta);
  check_launch();
}

}  // namespace

std::string v3_mma_can_implement(const Args& a) {
  using attention::has_aligned_rows;
  std::string why_not = attention::takes_no_documents(a);
  if (why_not.empty()) why_not = attention::on_tensor_cores(a, kOwned);
  if (!why_not.empty()) return why_not;
  if (!has_aligned_rows(a, a.grad, a.grad_stride, a.heads, a.q_length) ||
      !has_aligned_rows(a, a.dq, a.dq_stride, a.heads, a.q_length) ||
      !has_aligned_rows(a, a.dk, a.dk_stride, a.kv_heads, a.k_length) ||
      !has_aligned_rows(a, a.dv, a.dv_stride, a.kv_heads, a.k_length)) {
    return "takes rows that begin at multiples of 16 bytes";
  }
  return at_most_blocks(a, kOwned);
}

int64_t v3_mma_scratch_bytes(const Args& a) { return delta_bytes(a); }

void v3_mma(const Args& a, void* stream) {
  attention::with_columns(a, [&](auto type, auto columns, auto drops) {
    using T = typename decltype(type)::element;
    const float* delta = launch_delta<8, T>(a, stream);
    launch<false, columns.value, drops.value, T>(a, delta, stream);
    launch<true, columns.value, drops.value, T>(a, delta, stream);
  });
}

}  // namespace kf::KF_BACKEND::attention_backward
