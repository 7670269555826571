// attention v9_split: where tiles are few, a block's warpgroups split the keys
//
// Idea      A single text of GPT-2 has 12 heads of 1024 queries: 48 tiles for v8, 72 for v7, and 132 multiprocessors.
//           The tile that sees most keys decides how long all take. So a tile is of 64 queries here, and the warpgroups
//           of its block divide the keys: each has a softmax of its own, over every fourth tile of keys (P = 128: every
//           third). In the end they are put together, as decoding puts the parts of several blocks together.
// Since v8  No producer: each warpgroup asks for its own tiles, and waits for another one only for the queries and at
//           the end. Blocks do not stay; the heaviest tiles of all heads come first.
//
//           warpgroup 0   K9 V9   K5 V5   K1 V1 ┐
//           warpgroup 1   K8 V8   K4 V4   K0 V0 ┤ parts through shared memory: warpgroup 0 adds them up,
//           warpgroup 2   K7 V7   K3 V3         ┤ always in the same order, and stores
//           warpgroup 3   K6 V6   K2 V2         ┘
//
// Launch    grid B·H·⌈Sq/64⌉; keys 64 at a time. P = 64 columns (D ≤ 64): block 512, 4 warpgroups with 3 stages each
//           for K and for V, 200 KB of shared memory; P = 128: block 384, 3 warpgroups with 2 stages each, 208 KB.
//           Dependent (step2/dependent_launch.h)
// Roles     all warpgroups are alike: the leader loads its own warpgroup's tiles; that of warpgroup 0 loads the
//           queries, too
// Barriers  q_full, and k_full and v_full of each warpgroup: 1 arrival, its leader's, and the bytes. None says that a
//           stage is empty: who waits for the product fills it. Named, of each warpgroup, 128: a tile with padding is
//           cleared; its products are over; warpgroup 0's: the output is written
// A stage   load issued ─ full ─ product ─ wgmma_wait ─ the leader issues the load of the tile 12 on (P = 128: 6)
// Moves     B·H·((2·Sq + 2·Sk·⌈Sq/64⌉)·D·2 + 4·Sq) bytes, most of K and V from the L2 cache;
//           4·B·H·Sq·Sk·P FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    as v6_wgmma. Four times v8's bytes from the L2 cache (P = 128: twice), and a wait at each block's beginning
//           and end: with enough tiles for all multiprocessors v8 is faster. Like v3 it rounds the weights
#include <step2/attention/hopper.h>
#include <step2/dependent_launch.h>

#include "rungs.h"

namespace kf::KF_BACKEND::attention {
namespace {

constexpr int kQueries = 64, kKeys = 64;  // of a tile

template <int kColumns>
struct Shape {
  static constexpr int kWarpgroups = kColumns == 64 ? 4 : 3;
  static constexpr int kStages = kColumns == 64 ? 3 : 2;  // of each warpgroup, for tiles of K, and as many for V
  static constexpr int kThreads = kWarpgroups * kWarpgroupSize;
  static_assert(kWarpgroups > 1,
                "a mask lies in two tiles of keys, and only a warpgroup's first one is compared with it");
};

// A warpgroup's own tiles, and in their place, once they are done with, what it has found: of each thread, four floats
// side by side.
template <int kColumns, class T>
union Own {
  struct {
    T k[Shape<kColumns>::kStages][kColumns / kSlice][kKeys * kSlice];
    T v[Shape<kColumns>::kStages][kColumns / kSlice][kKeys * kSlice];
  } tile;
  Vector<float, 4> part[1 + kColumns / 8][kWarpgroupSize];
};

template <int kColumns, class T>
struct Shared {
  using S = Shape<kColumns>;
  T q[kColumns / kSlice][kQueries * kSlice];
  Own<kColumns, T> own[S::kWarpgroups];
  uint64_t q_full, k_full[S::kWarpgroups][S::kStages], v_full[S::kWarpgroups][S::kStages];
};

// The softmax and the output of a warpgroup's keys, as its lanes hold them: rows and columns lie alike in all
// warpgroups, so a thread leaves its own and takes in those of its twins.
template <int kColumns>
struct Found {
  RowsSoftmax softmax;
  float out[kColumns / 2] = {};

  template <int N>
  __device__ __forceinline__ void leave(Vector<float, 4> (&part)[N][kWarpgroupSize]) const {
    const int thread = threadIdx.x % kWarpgroupSize;
    store_vector(&part[0][thread].element[0],
                 Vector<float, 4>{{softmax.max[0], softmax.max[1], softmax.sum[0], softmax.sum[1]}});
#pragma unroll
    for (int i = 1; i < N; ++i) {
      const float* const four = &out[4 * i - 4];
      store_vector(&part[i][thread].element[0], Vector<float, 4>{{four[0], four[1], four[2], four[3]}});
    }
  }

  template <int N>
  __device__ __forceinline__ void take_in(const Vector<float, 4> (&part)[N][kWarpgroupSize], float scale) {
    const int thread = threadIdx.x % kWarpgroupSize;
    const auto theirs = load_vector<4>(&part[0][thread].element[0]);
    float own_factor[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float max = greater_of(softmax.max[r], theirs.element[r]);
      const float base = max == -INFINITY ? 0.0f : max;  // no keys at all: −inf − (−inf) would be NaN
      own_factor[r] = exp2_approx((softmax.max[r] - base) * scale);
      factor[r] = exp2_approx((theirs.element[r] - base) * scale);
      softmax.max[r] = max;
      softmax.sum[r] = softmax.sum[r] * own_factor[r] + theirs.element[2 + r] * factor[r];
    }
#pragma unroll
    for (int i = 1; i < N; ++i) {
      const auto four = load_vector<4>(&part[i][thread].element[0]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = out[4 * i - 4 + e];
        sum = sum * own_factor[e / 2] + four.element[e] * factor[e / 2];
      }
    }
  }
};

// One warpgroup's share of the keys.
template <int kColumns, bool kDropout, class Block, class T>
__device__ __forceinline__ void attend(const Block& block, const Head& head, int tiles_of_keys, float scale,
                                       AttentionDropout& dropout, Shared<kColumns, T>& shared, const Maps& maps,
                                       Found<kColumns>& found) {
  using S = Shape<kColumns>;
  constexpr int kSlices = kColumns / kSlice, kAround = S::kStages * S::kWarpgroups;  // tiles until a stage's next one
  const int warpgroup = warpgroup_of_block();
  const bool leader = leads_warpgroup(warpgroup);
  auto& tile = shared.own[warpgroup].tile;
  uint64_t* const k_full = shared.k_full[warpgroup];
  uint64_t* const v_full = shared.v_full[warpgroup];
  const auto issue_load = [&](T(*to)[kKeys* kSlice], const CUtensorMap* map, uint64_t* full, int j) {
    if (!leader || j < 0) return;
    mbarrier_arrive_expect_tx(full, sizeof tile.k[0]);
    load_slices<kSlices, kKeys>(to, map, full, block.first_key + j * kKeys, head.kv_head, head.batch);
  };

  int j = tiles_of_keys - 1 - warpgroup;
  if (leader) {  // each asks at once for what its own warpgroup needs
    if (warpgroup == 0) mbarrier_init(&shared.q_full, 1);
    for (int stage = 0; stage < S::kStages; ++stage) {
      mbarrier_init(&k_full[stage], 1);
      mbarrier_init(&v_full[stage], 1);
    }
    mbarrier_init_fence();
    if (warpgroup == 0 && j >= 0) {
      mbarrier_arrive_expect_tx(&shared.q_full, sizeof shared.q);
      load_slices<kSlices, kQueries>(shared.q, &maps.q, &shared.q_full, block.first, head.head, head.batch);
    }
  }
  for (int stage = 0; stage < S::kStages; ++stage) {
    issue_load(tile.k[stage], &maps.k, &k_full[stage], j - stage * S::kWarpgroups);
    issue_load(tile.v[stage], &maps.v, &v_full[stage], j - stage * S::kWarpgroups);
  }
  __syncthreads();
  if (j < 0) return;

  PipelineState<S::kStages> ring;
  float factor[2];
  uint32_t weight[kKeys / 16][4];
  mbarrier_wait(&shared.q_full, 0);
  {
    float score[kKeys / 2];
    mbarrier_wait(&k_full[0], 0);
    wgmma_fence();
    issue_scores<kColumns, kKeys>(score, shared.q, tile.k[0]);
    wgmma_wait<0>();
    issue_load(tile.k[0], &maps.k, &k_full[0], j - kAround);
    // 64 neighbouring queries end within two tiles of keys, so only first tiles of warpgroups meet the mask.
    mask_scores(score, block, 0, j * kKeys);
    found.softmax.weigh(score, scale, factor);  // the factor meets an output of zeros
    if constexpr (kDropout) drop_weights(dropout, score, block, 0, j * kKeys);
    pack_weights<T>(score, weight);
  }
  const int keys = block.keys - j * kKeys;  // in the tile, or more
  if (keys < kKeys) {                       // what lies beyond the keys must become 0
    mbarrier_wait(&v_full[0], 0);
    clear_rows<kSlices, kKeys>(tile.v[0], keys, threadIdx.x % kWarpgroupSize, kWarpgroupSize);
    tma_store_fence();
    named_barrier_sync(1 + warpgroup, kWarpgroupSize);
  }
  for (j -= S::kWarpgroups; j >= 0; j -= S::kWarpgroups) {  // both products at once, and the softmax while they run
    const int before = ring.index;
    mbarrier_wait(&v_full[before], ring.phase);
    ring.advance();
    float score[kKeys / 2];
    mbarrier_wait(&k_full[ring.index], ring.phase);
    wgmma_fence();
    issue_scores<kColumns, kKeys>(score, shared.q, tile.k[ring.index]);
    issue_output<kColumns, kKeys>(found.out, weight, tile.v[before]);
    wgmma_wait<1>();  // the scores
    issue_load(tile.k[ring.index], &maps.k, &k_full[ring.index], j - kAround);
    if constexpr (Block::kPacked) {  // a document may begin or end in any tile
      if (j * kKeys < block.seen_from(kQueries - 1) || (j + 1) * kKeys > block.seen_by(0)) {
        mask_scores(score, block, 0, j * kKeys);
      }
    }
    const bool raised = found.softmax.weigh(score, scale, factor);
    wgmma_wait<0>();  // the output: the weights' registers are free, and the factor may be applied
    issue_load(tile.v[before], &maps.v, &v_full[before], j + S::kWarpgroups - kAround);
    if (raised) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) found.out[i] *= factor[i / 2 % 2];
    }
    if constexpr (kDropout) drop_weights(dropout, score, block, 0, j * kKeys);
    pack_weights<T>(score, weight);
  }
  mbarrier_wait(&v_full[ring.index], ring.phase);
  wgmma_fence();
  issue_output<kColumns, kKeys>(found.out, weight, tile.v[ring.index]);
  wgmma_wait<0>();
}

template <bool kPacked, int kColumns, bool kDropout, class T>
__global__ void __launch_bounds__(Shape<kColumns>::kThreads, 1)
    v9_split_kernel(Args a, const __grid_constant__ Maps maps) {
  using S = Shape<kColumns>;
  launch_dependent_grids();
  wait_on_dependent_grids();  // q, k and v are there
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<WithSeen<kPacked, Shared<kColumns, T>, kQueries>*>(memory);
  const auto heads = static_cast<unsigned>(a.batch * a.heads);
  const int64_t tile_of_queries = (gridDim.x - 1 - blockIdx.x) / heads;  // the last ones, which see most, first
  const auto block = queries_of_block<kPacked, kDropout>(a, blockIdx.x % heads, tile_of_queries * kQueries, shared);
  const int tiles_of_keys = max(block.seen_by(kQueries - 1) + kKeys - 1, 0) / kKeys;
  const Head head(a, block.head);
  const float scale = static_cast<float>(a.scale * kLog2e);
  AttentionDropout dropout(a);
  Found<kColumns> found;
  attend<kColumns, kDropout>(block, head, tiles_of_keys, scale, dropout, shared, maps, found);

  const int warpgroup = warpgroup_of_block();
  named_barrier_sync(1 + warpgroup, kWarpgroupSize);  // its products have read the tiles
  if (warpgroup > 0) found.leave(shared.own[warpgroup].part);
  __syncthreads();
  if (warpgroup > 0) return;
#pragma unroll 1
  for (int w = 1; w < S::kWarpgroups; ++w) found.take_in(shared.own[w].part, scale);
  const bool leader = leads_warpgroup(warpgroup);
  store_rows<kDropout>(a, block, 0, found.softmax, found.out, shared.q, &maps.out, head.head, head.batch, 1, leader,
                       kDropout ? dropout.scale() : 1.0f);
  if (leader) tma_store_wait_read<0>();
}

}  // namespace

std::string v9_split_can_implement(const Args& a) { return on_hopper(a, kQueries); }

void v9_split(const Args& a, void* stream) {
  with_slices_and_documents(a, [&](auto type, auto columns, auto drops, auto packed) {
    using T = typename decltype(type)::element;
    constexpr int kBytes = sizeof(WithSeen<packed.value, Shared<columns.value, T>, kQueries>);
    const auto kernel = v9_split_kernel<packed.value, columns.value, drops.value, T>;
    allow_shared(kernel, kBytes);
    const auto blocks = static_cast<unsigned>(a.batch * a.heads * ceil_div(a.q_length, kQueries));
    launch_dependent(kernel, blocks, Shape<columns.value>::kThreads, kBytes, stream, a, maps_of<T>(a, kKeys));
  });
}

}  // namespace kf::KF_BACKEND::attention
