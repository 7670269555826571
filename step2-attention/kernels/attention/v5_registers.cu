// attention v5_registers: weights stay in registers, and a fragment of K or V serves 32 queries
//
// Idea      mma leaves two neighbouring columns of a row in a lane, and wants two neighbouring columns of a row in a
//           lane as operand a: so the scores of 16 keys, rounded in pairs, are the operand of the second product as
//           they are, without a store, a barrier and a load. And a warp owns two times 16 queries: a fragment of K or
//           V, once loaded, takes part in two products.
// Since v4  The weights' tile is gone; q's fragments are loaded once, up to D 64. Rows are no longer padded: their
//           16-byte chunks are exchanged instead (below). exp is one instruction in base 2, its argument one FMA with
//           scale·log₂e in it. The output is multiplied only when a maximum, in powers of 2, has grown by more than
//           8. Scores are compared with the mask in the last tiles only; a warp leaves out tiles that none of its
//           queries sees; blocks with many keys begin first. A thread starts a known number of copies, at known
//           distances. The output goes through shared memory and leaves in rows, 16 bytes a lane.
//
//           Where chunk c of row r lies, D 64:   r 0   0 1 2 3 4 5 6 7      ldmatrix reads one chunk of eight rows:
//                                                r 1   1 0 3 2 5 4 7 6      each lies in other banks, at c ^ r
//                                                r 2   2 3 0 1 6 7 4 5
//
// Launch    grid B·H·⌈Sq/128⌉, block 128, each of its 4 warps 32 queries; keys 64 at a time. Columns are padded with
//           zeros to P = 32, 64, 96 or 128. Shared memory 2·(128 + 4·64)·P bytes: 48 KB at D 64, 96 KB at D 128
// Moves     B·H·((2·Sq + 2·Sk·⌈Sq/128⌉)·D·2 + 4·Sq) bytes, most of K and V from the L2 cache;
//           4·B·H·Sq·Sk·P FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    as v3_mma, and a scale above 0. A warp's softmax and its products take turns: only another warp can keep
//           the tensor cores busy meanwhile. Beyond D 64 registers are spilled: up to 160 bytes a thread. Scores
//           beyond 2²⁷ may overflow float16's weights, and beyond 2³¹ bfloat16's: scale is applied within an FMA, the
//           maximum's rounded by itself. Packed rows: P = 64 or 128. Like v3 it rounds the weights
#include <step1/vector.h>
#include <step2/attention/packed_queries.h>
#include <step2/cp_async.h>
#include <step2/mma.h>
#include <step2/reduce.h>

#include "rungs.h"

namespace kf::KF_BACKEND::attention {
namespace {

constexpr int kThreads = 128;
constexpr int kQueries = 128;  // of a block
constexpr int kRowTiles = 2;   // of 16 queries, of a warp
constexpr int kKeys = 64;      // of a tile
constexpr int kVector = 8;     // elements of 16 bytes

template <int kDim, class T>
struct Shared {
  T q[kQueries * kDim];
  T k[2][kKeys * kDim];
  T v[2][kKeys * kDim];
};

// Where an element lies in a tile. Rows of 128 bytes begin in the same bank, those of 64 or 192 every second one.
template <int kDim>
__device__ int offset_of(int row, int column) {
  const int turn = kDim % 64 == 0 ? row % 8 : row / 2 % 4;
  return row * kDim + (column / kVector ^ turn) * kVector + column % kVector;
}

// Starts the copies of kRows rows. Where there is no row or no column nothing is read, and zeros arrive. A thread
// copies one chunk of every 32nd, 16th or 8th row: a number known to the compiler, and so are all distances in shared
// memory.
template <int kDim, int kRows, class T>
__device__ __forceinline__ void issue_tile_load(T* tile, const T* first, int64_t stride, int rows, int columns) {
  constexpr int kChunks = kDim == 32 ? 4 : kDim == 64 ? 8 : 16;  // of a row; at 96 the last four threads have none
  constexpr int kRowsAtOnce = kThreads / kChunks;
  const int first_row = threadIdx.x / kChunks, column = threadIdx.x % kChunks * kVector;
  if (column >= kDim) return;
  const T* const from = first + first_row * stride + column;
  T* const to = tile + offset_of<kDim>(first_row, column);
  if (rows >= kRows && columns == kDim) {  // nearly always: no conditions, no zeros
#pragma unroll
    for (int row = 0; row < kRows; row += kRowsAtOnce) cp_async_16(to + row * kDim, from + row * stride);
    return;
  }
#pragma unroll
  for (int row = 0; row < kRows; row += kRowsAtOnce) {
    const bool there = first_row + row < rows && column < columns;
    cp_async_16(to + row * kDim, there ? from + row * stride : first, there ? 16 : 0);
  }
}

template <bool kPacked, int kDim, bool kDropout, class T>
__global__ void __launch_bounds__(kThreads) v5_registers_kernel(Args a) {
  constexpr bool kKeepQ = kDim <= 64;  // beyond, there are no registers left
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<WithSeen<kPacked, Shared<kDim, T>, kQueries>*>(memory);
  const int lane = threadIdx.x % kWarpSize;
  const int warp_row = threadIdx.x / kWarpSize * 16 * kRowTiles;  // its first query in the block
  const int matrix = lane / 8, matrix_row = lane % 8;             // whose row this lane shows to ldmatrix

  const int64_t tiles = ceil_div(a.q_length, kQueries);
  const int64_t tile_of_queries = tiles - 1 - blockIdx.x % tiles;  // the last ones, which see most, first
  const auto block = queries_of_block<kPacked, kDropout>(a, blockIdx.x / tiles, tile_of_queries * kQueries, shared);
  const int end = block.seen_by(kQueries - 1);
  const T* q_rows = row_of(static_cast<const T*>(a.q), a.q_stride, block.head, a.heads, block.first);
  const T* k_rows =
      row_of(static_cast<const T*>(a.k), a.k_stride, kv_head_of(a, block.head), a.kv_heads, block.first_key);
  const T* v_rows =
      row_of(static_cast<const T*>(a.v), a.v_stride, kv_head_of(a, block.head), a.kv_heads, block.first_key);
  const int columns = static_cast<int>(a.head_dim);
  const float scale = static_cast<float>(a.scale * kLog2e);
  AttentionDropout dropout(a);

  // This lane's rows, two a tile, and what it holds of them: of each 8 columns two. max: the greatest score so far, or
  // not far below it; unscaled. sum: of its own columns.
  float max[kRowTiles][2], sum[kRowTiles][2] = {};
  float out[kRowTiles][kDim / 8][4] = {};  // [0], [1]: of the first row; [2], [3]: of the second
  for (auto& pair : max) pair[0] = pair[1] = -INFINITY;

  const auto issue_key_loads = [&](int first_key, int stage) {
    const int rows = block.keys - first_key;
    if (first_key < end) {
      issue_tile_load<kDim, kKeys>(shared.k[stage], k_rows + first_key * a.k_stride.seq, a.k_stride.seq, rows, columns);
      issue_tile_load<kDim, kKeys>(shared.v[stage], v_rows + first_key * a.v_stride.seq, a.v_stride.seq, rows, columns);
    }
    cp_async_commit();
  };
  const auto load_q = [&](int tile, int d, uint32_t (&q)[4]) {
    ldmatrix<4>(q, shared.q + offset_of<kDim>(warp_row + tile * 16 + matrix % 2 * 8 + matrix_row, d + matrix / 2 * 8));
  };

  issue_tile_load<kDim, kQueries>(shared.q, q_rows, a.q_stride.seq, block.queries, columns);
  issue_key_loads(0, 0);
  uint32_t kept_q[kRowTiles][kKeepQ ? kDim / 16 : 1][4];
  int stage = 0;
  for (int first_key = 0; first_key < end; first_key += kKeys, stage ^= 1) {
    cp_async_wait<0>();  // what this thread started is there
    __syncthreads();     // and what the others did; and nobody reads the tile before any more
    issue_key_loads(first_key + kKeys, stage ^ 1);
    bool unseen = first_key >= block.seen_by(warp_row + 16 * kRowTiles - 1);  // by any of the warp's queries
    if constexpr (kPacked) unseen |= first_key + kKeys <= block.seen_from(warp_row);
    if (!kPacked && unseen) continue;
    if constexpr (kKeepQ) {
      if (first_key == 0) {
#pragma unroll
        for (int i = 0; i < kRowTiles * kDim / 16; ++i)
          load_q(i % kRowTiles, i / kRowTiles * 16, kept_q[i % kRowTiles][i / kRowTiles]);
      }
    }
    if (kPacked && unseen) continue;  // no sooner: the first tile may be for other warps
    // Scores: 32 queries × 64 keys. K's rows are b's columns.
    float score[kRowTiles][kKeys / 8][4] = {};
#pragma unroll
    for (int d = 0; d < kDim; d += 16) {
      uint32_t q[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        if constexpr (!kKeepQ) load_q(tile, d, q[tile]);
        if constexpr (kKeepQ) {
          for (int i = 0; i < 4; ++i) q[tile][i] = kept_q[tile][d / 16][i];
        }
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        uint32_t k[4];  // two operands: keys 8n to 8n + 7, and the next 8
        ldmatrix<4>(k, shared.k[stage] + offset_of<kDim>(n * 8 + matrix / 2 * 8 + matrix_row, d + matrix % 2 * 8));
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          mma_m16n8k16<T>(score[tile][n], q[tile], {k[0], k[1]});
          mma_m16n8k16<T>(score[tile][n + 1], q[tile], {k[2], k[3]});
        }
      }
    }
    bool masked = first_key + kKeys > block.seen_by(warp_row);  // the first query sees the least
    if constexpr (kPacked) masked |= first_key < block.seen_from(warp_row + 16 * kRowTiles - 1);
    if (masked) {
#pragma unroll
      for (int i = 0; i < kRowTiles * kKeys / 8 * 4; ++i) {
        const int tile = i / (kKeys / 2), n = i / 4 % (kKeys / 8), e = i % 4;
        const int row = warp_row + tile * 16 + lane / 4 + e / 2 * 8, key = first_key + n * 8 + lane % 4 * 2 + e % 2;
        if (key >= block.seen_by(row) || block.begins_behind(row, key)) score[tile][n][e] = -INFINITY;
      }
    }

    // Weights, as operand a: score n and n + 1 are columns 0 to 7 and 8 to 15 of 16 keys.
    uint32_t weight[kRowTiles][kKeys / 16][4];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      float subtracted[2], factor[2] = {1.0f, 1.0f};
      bool raised = false;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float highest = max[tile][r];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          highest = greater_of(highest, greater_of(score[tile][n][2 * r], score[tile][n][2 * r + 1]));
        }
        highest = quad_max(highest);
        if ((highest - max[tile][r]) * scale > kMaxLag) {  // not if nothing was seen yet and nothing is now: NaN
          factor[r] = exp2_approx((max[tile][r] - highest) * scale);
          max[tile][r] = highest;
          sum[tile][r] *= factor[r];
          raised = true;
        }
        subtracted[r] = max[tile][r] == -INFINITY ? 0.0f : max[tile][r] * scale;  // −inf − (−inf) would be NaN
      }
      uint64_t kept = 0;
      if constexpr (kDropout) {
        kept = dropout.kept<false, kKeys / 2>(block.head, block.first + warp_row + tile * 16 + lane / 4,
                                              block.first_key + first_key + lane % 4 * 2);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float low = exp2_approx(score[tile][n][2 * r] * scale - subtracted[r]);
          float high = exp2_approx(score[tile][n][2 * r + 1] * scale - subtracted[r]);
          sum[tile][r] += low + high;
          if constexpr (kDropout) {  // after the sum: it has all weights
            if ((kept >> (4 * n + 2 * r) & 1) == 0) low = 0.0f;
            if ((kept >> (4 * n + 2 * r + 1) & 1) == 0) high = 0.0f;
          }
          weight[tile][n / 2][n % 2 * 2 + r] = pack<T>(low, high);
        }
      }
      if (__any_sync(kFullWarp, raised)) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          for (int e = 0; e < 4; ++e) out[tile][n][e] *= factor[e / 2];
        }
      }
    }

    // Their sum over the tile's values. V's rows are b's rows, so ldmatrix turns them.
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 2) {
        uint32_t v[4];
        ldmatrix_transposed<4>(
            v, shared.v[stage] + offset_of<kDim>(key + matrix % 2 * 8 + matrix_row, n * 8 + matrix / 2 * 8));
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          mma_m16n8k16<T>(out[tile][n], weight[tile][key / 16], {v[0], v[1]});
          mma_m16n8k16<T>(out[tile][n + 1], weight[tile][key / 16], {v[2], v[3]});
        }
      }
    }
  }
  cp_async_wait<0>();  // where there is no key, q's copies are still in flight
  __syncthreads();

  // The output, in q's place: a warp's rows are its own.
  float met[2 * kRowTiles] = {}, lses[2 * kRowTiles];  // for packed rows
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + tile * 16 + r * 8 + lane / 4;
      const float whole = quad_sum(sum[tile][r]);
      float inverse = whole == 0.0f ? 0.0f : 1.0f / whole;  // 0: a query that sees no key
      if constexpr (kDropout) inverse *= dropout.scale();
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const Vector<T, 2> pair = narrow<T>({out[tile][n][2 * r] * inverse, out[tile][n][2 * r + 1] * inverse});
        store_vector(shared.q + offset_of<kDim>(row, n * 8 + lane % 4 * 2), pair);
      }
      if constexpr (kPacked) {
        lses[2 * tile + r] = max[tile][r] * static_cast<float>(a.scale) + logf(whole);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) met[2 * tile + r] += out[tile][n][2 * r] + out[tile][n][2 * r + 1];
      }
      if (lane % 4 == 0 && row < block.queries) {
        const float lse = max[tile][r] * static_cast<float>(a.scale) + logf(whole);
        static_cast<float*>(a.lse)[int64_t{block.head} * a.q_length + block.first + row] = lse;
      }
    }
  }
  if constexpr (kPacked) {
    repair_rows<kDropout, T>(a, block, warp_row, met, lses, [&](int row, int column, T number) {
      shared.q[offset_of<kDim>(warp_row + row, column)] = number;
    });
  }
  __syncwarp();
  for (int i = lane; i < 16 * kRowTiles * kDim / kVector; i += kWarpSize) {
    const int row = warp_row + i / (kDim / kVector), column = i % (kDim / kVector) * kVector;
    if (row >= block.queries || column >= columns) continue;
    T* to = row_of(static_cast<T*>(a.out), a.out_stride, block.head, a.heads, block.first + row) + column;
    store_vector(to, load_vector<kVector>(shared.q + offset_of<kDim>(row, column)));
  }
}

}  // namespace

std::string v5_registers_can_implement(const Args& a) {
  if (!is_above_0(a.scale)) return "takes a scale above 0, got " + std::to_string(a.scale);
  return on_tensor_cores(a, kQueries);
}

void v5_registers(const Args& a, void* stream) {
  with_columns_and_documents(a, [&](auto type, auto columns, auto drops, auto packed) {
    using T = typename decltype(type)::element;
    constexpr int kBytes = sizeof(WithSeen<packed.value, Shared<columns.value, T>, kQueries>);
    const auto kernel = v5_registers_kernel<packed.value, columns.value, drops.value, T>;
    if constexpr (kBytes > 48 * 1024) allow_shared(kernel, kBytes);
    const auto blocks = static_cast<unsigned>(a.batch * a.heads * ceil_div(a.q_length, kQueries));
    kernel<<<blocks, kThreads, kBytes, as_stream(stream)>>>(a);
    check_launch();
  });
}

}  // namespace kf::KF_BACKEND::attention
