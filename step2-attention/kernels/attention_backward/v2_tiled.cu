// attention_backward v2_tiled: one kernel twice, its roles exchanged, and no score leaves the registers
//
// Idea      dq is a sum over keys; dk and dv are sums over queries. So one launch owns queries and walks over keys, as
//           attention's v2_tiled does, and another owns keys and walks over queries. Both compute every score: seven
//           products instead of five. In return nobody adds to what another block adds to: no atomics, and the same
//           bits each time. To the kernel both are one thing (roles.h): with the rows a and b that it owns and the rows
//           x and y that it walks over, weight = exp(scale·a·x − lse), it keeps the sums of weight·(b·y − Δ)·x and, if
//           it owns keys, of weight·y.
// Since v1  No scratch but Δ. x and y are read once a block, through shared memory.
// Threads   As attention's v2_tiled, with 16 columns of each of four rows a lane: G = 1, 2, 4, 8 or 16 share a row
// Launch    Δ: grid (⌈Sq/128⌉, B·H), block 8×32. Then grid B·H·⌈Sq/(128/G)⌉ and grid B·Hkv·⌈Sk/(128/G)⌉, block 128;
//           D ≤ 16·G; shared memory 2·32·16·G·4 bytes, 16 KB at D 64, and 256; at G 16 half as many rows
// Moves     B·H·(5·Sq + 2·Sk·⌈Sq/(128/G)⌉ + 2·Sq·⌈Sk/(128/G)⌉)·D·sizeof(T) + 4·B·Hkv·Sk·D·sizeof(T) bytes, most of
//           what is walked over from the L2 cache; 14·B·H·Sq·Sk·D FLOPs (causal: half), 2·B·H·Sq·Sk exponentials
// Limits    float32, float16, bfloat16; D ≤ 256; ≤ 2³¹−1 blocks. CUDA cores; a shared load feeds at best eight FMAs.
//           With dropout a call of Philox for each weight, by each of the G lanes
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step2/attention/dropout.h>

#include "../attention/float_tile.h"
#include "delta.h"
#include "roles.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_backward {
namespace {

constexpr int kThreads = 128;
constexpr int kColumns = 16;  // of each row, a thread
constexpr int kTogether = 2;  // rows walked over whose scores a thread computes side by side

template <bool kOwnsKeys, int kGroup, bool kDropout, bool kPacked, class T>
__global__ void __launch_bounds__(kThreads, 2) v2_tiled_kernel(Args a, const float* __restrict__ delta) {
  using attention::Four;
  constexpr int kWalked = kGroup < 16 ? 32 : 16;  // rows of a tile
  constexpr int kOwned = kThreads / kGroup;
  using Tile = attention::FloatTile<kWalked, kGroup, kColumns, kThreads>;
  __shared__ Tile x_tile, y_tile;
  __shared__ float lse_tile[kWalked], delta_tile[kWalked];  // of queries walked over

  const std::conditional_t<kPacked, PackedRole<kOwnsKeys, T>, Role<kOwnsKeys, T>> role(a, blockIdx.x, kOwned);
  const int64_t own = role.first + threadIdx.x / kGroup;
  const int part = threadIdx.x % kGroup;
  const auto column = [&](int c) { return Tile::column(part, c); };
  const bool exists = role.exists(own);
  const Range partners = role.partners_of(own);
  const float* const lse = static_cast<const float*>(a.lse);
  const auto scale = static_cast<float>(a.scale);
  float own_a[kColumns], own_b[kColumns], da[kColumns] = {}, db[kColumns] = {};
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const bool there = exists && column(c) < a.head_dim;  // a key that does not exist may be NaN
    own_a[c] = there ? to_compute(role.a().at(own)[column(c)]) : 0.0f;
    own_b[c] = there ? to_compute(role.b().at(own)[column(c)]) : 0.0f;
  }
  const int64_t own_query = role.head * a.q_length + own;  // of all queries
  const float own_lse = !kOwnsKeys && exists ? subtracted(lse[own_query]) : 0.0f;
  const float own_delta = !kOwnsKeys && exists ? delta[own_query] : 0.0f;
  const attention::AttentionDropout dropout(a);
  for (int64_t head = role.first_head(); head < role.end_head(); ++head) {
    const Rows<const T> x = role.x(head), y = role.y(head);
    for (int64_t first = role.walked.begin; first < role.walked.end; first += kWalked) {
      __syncthreads();  // nobody reads the tile before any more
      x_tile.load(x, first, role.walked.end, a.head_dim);
      y_tile.load(y, first, role.walked.end, a.head_dim);
      if (kOwnsKeys && threadIdx.x < kWalked && first + threadIdx.x < role.walked.end) {
        lse_tile[threadIdx.x] = subtracted(lse[head * a.q_length + first + threadIdx.x]);
        delta_tile[threadIdx.x] = delta[head * a.q_length + first + threadIdx.x];
      }
      __syncthreads();  // the tile is complete
#pragma unroll 1        // else the compiler holds more rows at once than it has registers for
      for (int row = 0; row < kWalked; row += kTogether) {
        float weight[kTogether] = {}, grad_score[kTogether] = {};  // at first a·x and b·y
        [[maybe_unused]] bool sees[kTogether] = {};
#pragma unroll
        for (int f = 0; f < Tile::kFours; ++f) {
          for (int j = 0; j < kTogether; ++j) {
            const Four xs = x_tile.at(row + j, part, f), ys = y_tile.at(row + j, part, f);
            for (int e = 0; e < 4; ++e) weight[j] += own_a[f * 4 + e] * xs.element[e];
            for (int e = 0; e < 4; ++e) grad_score[j] += own_b[f * 4 + e] * ys.element[e];
          }
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          for (int away = 1; away < kGroup; away *= 2) {
            weight[j] += __shfl_xor_sync(kFullWarp, weight[j], away);
            grad_score[j] += __shfl_xor_sync(kFullWarp, grad_score[j], away);
          }
          const int64_t other = first + row + j;
          const bool paired = other >= partners.begin && other < partners.end;
          if constexpr (kPacked) sees[j] = paired;
          const float its_lse = kOwnsKeys ? lse_tile[row + j] : own_lse;
          const float its_delta = kOwnsKeys ? delta_tile[row + j] : own_delta;
          weight[j] = paired ? exponential(weight[j] * scale - its_lse) : 0.0f;
          const int64_t query = kOwnsKeys ? other : own, key = kOwnsKeys ? own : other;
          const float factor = kDropout ? dropout.factor<float>(head, query, key) : 1.0f;
          grad_score[j] = paired ? weight[j] * (factor * grad_score[j] - its_delta) : 0.0f;
          weight[j] *= factor;  // as v met it
        }
#pragma unroll
        for (int f = 0; f < Tile::kFours; ++f) {
          for (int j = 0; j < kTogether; ++j) {
            const Four xs = x_tile.at(row + j, part, f), ys = y_tile.at(row + j, part, f);
            if (kPacked && !sees[j]) continue;  // another document's, where 0 times NaN would be NaN
            for (int e = 0; e < 4; ++e) da[f * 4 + e] += grad_score[j] * xs.element[e];
            for (int e = 0; e < 4; ++e) db[f * 4 + e] += weight[j] * ys.element[e];  // unused if it owns queries
          }
        }
      }
    }
  }
  if (own >= role.length(a)) return;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (column(c) >= a.head_dim) continue;
    role.da().at(own)[column(c)] = from_compute<T>(da[c] * scale);
    if constexpr (kOwnsKeys) role.db().at(own)[column(c)] = from_compute<T>(db[c]);
  }
}

template <int kGroup, class T>
void launch(const Args& a, const float* delta, void* stream) {
  const auto launch_role = [&](auto kernel, int64_t blocks) {
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, as_stream(stream)>>>(a, delta);
    check_launch();
  };
  const int64_t queries = blocks_of<false>(a, kThreads / kGroup), keys = blocks_of<true>(a, kThreads / kGroup);
  if (a.cu_seqlens == nullptr) {
    const bool drops = a.threshold != 0;
    launch_role(
        drops ? v2_tiled_kernel<false, kGroup, true, false, T> : v2_tiled_kernel<false, kGroup, false, false, T>,
        queries);
    launch_role(drops ? v2_tiled_kernel<true, kGroup, true, false, T> : v2_tiled_kernel<true, kGroup, false, false, T>,
                keys);
  } else if constexpr (kGroup >= 4 && std::is_same_v<T, float>) {  // compiled once, with dropout and for D up to 64
    launch_role(v2_tiled_kernel<false, kGroup, true, true, T>, queries);
    launch_role(v2_tiled_kernel<true, kGroup, true, true, T>, keys);
  }
}

}  // namespace

std::string v2_tiled_can_implement(const Args& a) {
  const std::string why_not = attention::can_implement_float_tile(a);
  if (a.cu_seqlens != nullptr && a.dtype != DType::kFloat32) return "takes packed rows (`cu_seqlens`) in float32 only";
  return why_not.empty() ? at_most_blocks(a, 8) : why_not;  // at its smallest, a block owns 8 rows
}
int64_t v2_tiled_scratch_bytes(const Args& a) { return delta_bytes(a); }

void v2_tiled(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    if constexpr (!std::is_same_v<T, double>) {
      const bool packed = a.cu_seqlens != nullptr;
      const auto launch_group = a.head_dim <= 16 && !packed   ? launch<1, T>
                                : a.head_dim <= 32 && !packed ? launch<2, T>
                                : a.head_dim <= 64            ? launch<4, T>
                                : a.head_dim <= 128           ? launch<8, T>
                                                              : launch<16, T>;
      launch_group(a, launch_delta<1, T>(a, stream), stream);
    }
  });
}

}  // namespace kf::KF_BACKEND::attention_backward
