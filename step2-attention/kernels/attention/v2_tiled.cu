// attention v2_tiled: one launch, and the scores never leave the registers
//
// Idea      A block owns a few queries and walks along the keys, a tile of K and V at a time in shared memory, where
//           all its queries read them. A query keeps the maximum and the sum of the scores seen so far, and its output
//           weighted against that maximum; a greater score scales both down (step2/online_softmax.h). So nobody
//           needs a row of scores: memory holds q, k, v and the output, and nothing that grows with Sq·Sk.
// Since v1  One launch instead of three, no scratch. K and V are read once a block instead of once a query. Keys that
//           no query of the block may see are never loaded.
// Threads   G = 1, 2, 4 or 8 neighbouring lanes share a query. Each keeps 32 columns of q and of the output in its
//           registers; their partial dot products meet by shuffles. 8 keys at a time: one maximum and one rescaling
//           for 8 scores. Columns go round the lanes in fours: G lanes read 16·G bytes in a row, no bank conflicts.
// Launch    grid B·H·⌈Sq/(128/G)⌉, block 128; D ≤ 32·G; shared memory 2·32·32·G·4 bytes (8 KB at D 32, 16 KB at D 64,
//           32 KB at D 128), at D 256 half as many keys, 32 KB
// Moves     B·H·((2·Sq + 2·Sk·⌈Sq/(128/G)⌉)·D·sizeof(T) + 4·Sq) bytes, most of K and V from the L2 cache;
//           4·B·H·Sq·Sk·D FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    float32, float16, bfloat16; D ≤ 256; B·H·⌈Sq/(128/G)⌉ ≤ 2³¹−1. Each shared-memory load feeds only four
//           FMAs, which binds it; one query (decode) leaves all but G threads of a block idle. With dropout a call of
//           Philox for each weight, by each of the G lanes
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include "dropout.h"
#include "float_tile.h"
#include "rows.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocks = 3;  // at once on a multiprocessor: leaves a thread 168 registers; for 4 blocks they would spill
constexpr int kColumns = 32;  // of q and of the output, a thread
constexpr int kTogether = 8;  // keys whose scores a thread computes side by side

template <int kGroup, bool kDropout, class T>
__global__ void __launch_bounds__(kThreads, kBlocks) v2_tiled_kernel(Args a) {
  constexpr int kDim = kColumns * kGroup;
  constexpr int kKeys = kGroup < 8 ? 32 : 16;
  constexpr int kQueries = kThreads / kGroup;
  constexpr int kFours = kColumns / 4;
  __shared__ Four k_tile[kKeys * kDim / 4];
  __shared__ Four v_tile[kKeys * kDim / 4];

  const int64_t tiles = ceil_div(a.q_length, kQueries);
  const int64_t head = blockIdx.x / tiles;  // of all batches
  const int64_t first_query = blockIdx.x % tiles * kQueries;
  const int64_t query = first_query + threadIdx.x / kGroup;
  const int part = threadIdx.x % kGroup;
  const KeyRange keys = keys_of(a, head);
  const auto column = [&](int c) { return (c / 4 * kGroup + part) * 4 + c % 4; };  // of this lane's c-th value
  const bool in_range = query < a.q_length;

  const KeyRange seen = keys_seen(a, keys, query);
  const KeyRange seen_by_block = keys_seen(a, keys, min(first_query + kQueries, a.q_length) - 1);  // by its last query

  const T* q_row = row_of(static_cast<const T*>(a.q), a.q_stride, head, a.heads, query);
  const T* k_head = row_of(static_cast<const T*>(a.k), a.k_stride, kv_head_of(a, head), a.kv_heads, 0);
  const T* v_head = row_of(static_cast<const T*>(a.v), a.v_stride, kv_head_of(a, head), a.kv_heads, 0);

  float q[kColumns];
  float out[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    q[c] = in_range && column(c) < a.head_dim ? to_compute(q_row[column(c)]) * static_cast<float>(a.scale) : 0.0f;
    out[c] = 0.0f;
  }
  OnlineSoftmax<float> softmax;
  const AttentionDropout dropout(a);

  for (int64_t first_key = seen_by_block.begin; first_key < seen_by_block.end; first_key += kKeys) {
    __syncthreads();  // nobody reads the tile before any more
    load_tile<kKeys, kDim, kThreads>(k_tile, k_head, a.k_stride.seq, first_key, keys.end, a.head_dim);
    load_tile<kKeys, kDim, kThreads>(v_tile, v_head, a.v_stride.seq, first_key, keys.end, a.head_dim);
    __syncthreads();  // the tile is complete

    for (int key = 0; key < kKeys; key += kTogether) {
      const Four* k = k_tile + key * kDim / 4 + part;
      const Four* v = v_tile + key * kDim / 4 + part;

      float score[kTogether] = {};
#pragma unroll
      for (int f = 0; f < kFours; ++f) {
        for (int j = 0; j < kTogether; ++j) {
          const Four columns = k[j * kDim / 4 + f * kGroup];
          for (int e = 0; e < 4; ++e) score[j] += q[f * 4 + e] * columns.element[e];
        }
      }

      float highest = -INFINITY;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        for (int away = 1; away < kGroup; away *= 2) score[j] += __shfl_xor_sync(kFullWarp, score[j], away);
        if (first_key + key + j >= seen.end) score[j] = -INFINITY;
        highest = greater_of(highest, score[j]);
      }

      const float factor = softmax.raise(highest);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        score[j] = softmax.weight(score[j]);
        softmax.sum += score[j];  // of all weights, dropped ones too
        if constexpr (kDropout) score[j] *= dropout.factor<float>(head, query, first_key + key + j);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) out[c] *= factor;
#pragma unroll
      for (int f = 0; f < kFours; ++f) {
        for (int j = 0; j < kTogether; ++j) {
          const Four columns = v[j * kDim / 4 + f * kGroup];
          for (int e = 0; e < 4; ++e) out[f * 4 + e] += score[j] * columns.element[e];
        }
      }
    }
  }

  if (!in_range) return;
  T* out_row = row_of(static_cast<T*>(a.out), a.out_stride, head, a.heads, query);
  const float inverse = softmax.sum == 0.0f ? 0.0f : 1.0f / softmax.sum;  // 0: a query that sees no key
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (column(c) < a.head_dim) out_row[column(c)] = from_compute<T>(out[c] * inverse);
  }
  if (part == 0) static_cast<float*>(a.lse)[head * a.q_length + query] = softmax.log_sum_exp();
}

template <int kGroup, class T>
void launch(const Args& a, void* stream) {
  const auto kernel = a.threshold == 0 ? v2_tiled_kernel<kGroup, false, T> : v2_tiled_kernel<kGroup, true, T>;
  const auto blocks = static_cast<unsigned>(a.batch * a.heads * ceil_div(a.q_length, kThreads / kGroup));
  kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(a);
}

}  // namespace

std::string v2_tiled_can_implement(const Args& a) {
  const int64_t blocks = a.batch * a.heads * ceil_div(a.q_length, 16);  // at its smallest, a block owns 16 queries
  if (blocks > INT32_MAX) return "takes at most 2147483647 blocks of 16 queries, got " + std::to_string(blocks);
  return can_implement_float_tile(a);
}

void v2_tiled(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    if constexpr (!std::is_same_v<T, double>) {
      const auto launch_group = a.head_dim <= 32    ? launch<1, T>
                                : a.head_dim <= 64  ? launch<2, T>
                                : a.head_dim <= 128 ? launch<4, T>
                                                    : launch<8, T>;
      launch_group(a, stream);
    }
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::attention
