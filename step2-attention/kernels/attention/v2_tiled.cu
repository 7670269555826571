// attention v2_tiled: one launch, and the scores never leave the registers
//
// Idea      A block owns a few queries and walks along the keys, a tile of K and V at a time in shared memory, where
//           all its queries read them. A query keeps the greatest score so far, the sum of the weights against it, and
//           the mean of the values so weighted; a greater score scales both down (step2/online_softmax.h). So nobody
//           needs a row of scores: memory holds q, k, v and the output, and nothing that grows with Sq·Sk.
// Since v1  One launch instead of three, no scratch. K and V are read once a block instead of once a query. Keys that
//           no query of the block may see are never loaded.
// Threads   G = 1, 2, 4 or 8 neighbouring lanes share a query. Each keeps 32 columns of q and of the mean in its
//           registers (which: float_tile.h); their parts of a dot product meet by shuffles. 8 keys at a time: one
//           maximum and one rescaling for 8 scores.
// Besides   Where a head's rows lie, and which keys a query sees: step2/attention/rows.h. Which weights are dropped:
//           step2/attention/dropout.h
// Launch    grid B·H·⌈Sq/(128/G)⌉, block 128; D ≤ 32·G; shared memory 2·32·32·G·4 bytes (8 KB at D 32, 16 KB at D 64,
//           32 KB at D 128), at D 256 half as many keys, 32 KB
// Moves     B·H·((2·Sq + 2·Sk·⌈Sq/(128/G)⌉)·D·sizeof(T) + 4·Sq) bytes, most of K and V from the L2 cache;
//           4·B·H·Sq·Sk·D FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    float32, float16, bfloat16; D ≤ 256; B·H·⌈Sq/(128/G)⌉ ≤ 2³¹−1. Each shared-memory load feeds only four
//           FMAs, which binds it; one query (decode) leaves all but G threads of a block idle. With dropout a call of
//           Philox for each weight, by each of the G lanes. Packed rows in float32 only
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step2/attention/documents.h>
#include <step2/attention/dropout.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include "float_tile.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocks = 3;  // at once on a multiprocessor: leaves a thread 168 registers; for 4 blocks they would spill
constexpr int kColumns = 32;  // of q and of the mean, a thread
constexpr int kTogether = 8;  // keys whose scores a thread computes side by side

template <bool kPacked, int kGroup, bool kDropout, class T>
__global__ void __launch_bounds__(kThreads, kBlocks) v2_tiled_kernel(Args a) {
  constexpr int kQueries = kThreads / kGroup;
  constexpr int kKeys = kGroup < 8 ? 32 : 16;
  using Tile = FloatTile<kKeys, kGroup, kColumns, kThreads>;
  __shared__ Tile k, v;

  const int64_t tiles = ceil_div(a.q_length, kQueries);
  const HeadRows<T> head(a, blockIdx.x / tiles);
  const int64_t first_query = blockIdx.x % tiles * kQueries;
  const int64_t query = first_query + threadIdx.x / kGroup;
  const int part = threadIdx.x % kGroup;  // of the query's columns
  const bool exists = query < a.q_length;
  KeyRange keys = head.keys();
  KeyRange seen = keys_seen(a, keys, query);
  KeyRange seen_by_block = keys_seen(a, keys, min(first_query + kQueries, a.q_length) - 1);  // by its last query
  if constexpr (kPacked) {  // from what its first one sees on; all that lies beyond belongs to others
    const Documents documents(a);
    seen = documents.keys_of(static_cast<int>(query));
    seen_by_block.begin = documents.keys_of(static_cast<int>(first_query)).begin;
    seen_by_block.end = documents.keys_of(static_cast<int>(min(first_query + kQueries, a.q_length)) - 1).end;
    keys.end = seen_by_block.end;
  }

  // What a query keeps.
  OnlineSoftmax<float> softmax;
  float q[kColumns], mean[kColumns] = {};  // the mean is divided by softmax.sum at the end
  const T* q_row = head.q().at(query);
  const Rows<const T> k_rows = head.k(), v_rows = head.v();
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const bool there = exists && Tile::column(part, c) < a.head_dim;
    q[c] = there ? to_compute(q_row[Tile::column(part, c)]) * static_cast<float>(a.scale) : 0.0f;
  }
  const AttentionDropout dropout(a);

  for (int64_t first = seen_by_block.begin; first < seen_by_block.end; first += kKeys) {
    __syncthreads();  // nobody reads the tile before any more
    k.load(k_rows, first, keys.end, a.head_dim);
    v.load(v_rows, first, keys.end, a.head_dim);
    __syncthreads();  // the tile is complete

    for (int key = 0; key < kKeys; key += kTogether) {
      // Scores: dot products of q with the keys.
      float score[kTogether] = {};
#pragma unroll
      for (int f = 0; f < Tile::kFours; ++f) {
        for (int j = 0; j < kTogether; ++j) {
          const Four columns = k.at(key + j, part, f);
          for (int e = 0; e < 4; ++e) score[j] += q[f * 4 + e] * columns.element[e];
        }
      }
      float greatest = -INFINITY;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        for (int away = 1; away < kGroup; away *= 2) score[j] += __shfl_xor_sync(kFullWarp, score[j], away);
        if (first + key + j >= seen.end) score[j] = -INFINITY;
        if (kPacked && first + key + j < seen.begin) score[j] = -INFINITY;
        greatest = greater_of(greatest, score[j]);
      }

      // Weights, against the greatest score so far. What was added up against a smaller one is scaled down.
      const float factor = softmax.raise(greatest);
      float weight[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        weight[j] = softmax.weight(score[j]);
        softmax.sum += weight[j];  // of all weights, dropped ones too
        if constexpr (kDropout) weight[j] *= dropout.factor<float>(head.number, query, first + key + j);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) mean[c] *= factor;

      // The values, by their weights.
#pragma unroll
      for (int f = 0; f < Tile::kFours; ++f) {
        for (int j = 0; j < kTogether; ++j) {
          Four columns = v.at(key + j, part, f);
          if (kPacked && (first + key + j < seen.begin || first + key + j >= seen.end)) columns = {};  // may be NaN
          for (int e = 0; e < 4; ++e) mean[f * 4 + e] += weight[j] * columns.element[e];
        }
      }
    }
  }

  if (!exists) return;  // no sooner: the barriers wait for all threads
  T* out_row = head.out().at(query);
  const float inverse = softmax.sum == 0.0f ? 0.0f : 1.0f / softmax.sum;  // 0: a query that sees no key
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (Tile::column(part, c) < a.head_dim) out_row[Tile::column(part, c)] = from_compute<T>(mean[c] * inverse);
  }
  if (part == 0) head.lse()[query] = softmax.log_sum_exp();
}

template <int kGroup, class T>
void launch(const Args& a, void* stream) {
  auto kernel = a.threshold == 0 ? v2_tiled_kernel<false, kGroup, false, T> : v2_tiled_kernel<false, kGroup, true, T>;
  if constexpr (std::is_same_v<T, float>) {
    if (a.cu_seqlens != nullptr) {
      kernel = a.threshold == 0 ? v2_tiled_kernel<true, kGroup, false, T> : v2_tiled_kernel<true, kGroup, true, T>;
    }
  }
  const auto blocks = static_cast<unsigned>(a.batch * a.heads * ceil_div(a.q_length, kThreads / kGroup));
  kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(a);
}

}  // namespace

std::string v2_tiled_can_implement(const Args& a) {
  const int64_t blocks = a.batch * a.heads * ceil_div(a.q_length, 16);  // at its smallest, a block owns 16 queries
  if (blocks > INT32_MAX) return "takes at most 2147483647 blocks of 16 queries, got " + std::to_string(blocks);
  if (a.cu_seqlens != nullptr && a.dtype != DType::kFloat32) return "takes packed rows (`cu_seqlens`) in float32 only";
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
