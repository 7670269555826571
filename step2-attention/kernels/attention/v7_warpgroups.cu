// attention v7_warpgroups: one warpgroup loads, the others overlap products and softmax
//
// Idea      The tensor cores must never wait for a softmax. So a consumer issues the scores of the next tile together
//           with this tile's product, and takes the softmax while both run. And consumers take turns at the tensor
//           cores: while one has its products done, the others exponentiate. A producer keeps the tiles coming; it
//           needs few registers, and setmaxnreg hands its own to the consumers.
// Since v6  A ring of tiles with two barriers for each, full and empty, in place of two stages and a barrier of the
//           block. Keys go from the last to the first, so that the tiles with a mask come first; a warpgroup leaves out
//           tiles that its queries do not see, and still takes its turn.
//
//           producer      K9 V9 K8 V8 K7 …     as soon as all consumers have released a stage
//           consumer 0    S9 ─ softmax ─┬ S8, O += P9·V9 ┬ ─ softmax ─ ┬ S7, O += P8·V8 ┬ ─ softmax ─
//           consumer 1                  └ ─ softmax ─ ─ ─┼ S8, O += …  ┴ ─ softmax ─ ─ ─┼ S7, O += …
//           tensor cores  S9  S9        │ consumer 0     │ consumer 1  │ consumer 0     │ consumer 1
//
// Launch    grid B·H·⌈Sq/Q⌉. P = 64 columns (D ≤ 64): block 512, 3 consumers, Q = 192, 4 stages, 152 KB of shared
//           memory; P = 128: block 384, 2 consumers, Q = 128, 2 stages, 160 KB. Keys 128 at a time
// Roles     the last warpgroup: one warp is the producer, of 32 registers (P = 128: 24). The others, 160 (240):
//           consumers of 64 queries each
// Barriers  q_full, k_pipe.full, v_pipe.full: 1 arrival and the bytes; k_pipe.empty, v_pipe.empty: 3 (2), the
//           consumers' leaders'. v_raw: 1 and the bytes of a tile with padding, which the producer then clears;
//           v_pipe.full gets 1 and no bytes. Named, of each consumer: its turn, 256, its own threads and who passes it
//           on; its output is written, 128
// A stage   of K: empty ─ producer_acquire ─ TMA ─ full ─ consumer_wait ─ scores ─ consumer_release by all ─ empty. Of
//           V: as long again, until its product, issued with the next scores, is over
// Moves     B·H·((2·Sq + 2·Sk·⌈Sq/Q⌉)·D·2 + 4·Sq) bytes, most of K and V from the L2 cache;
//           4·B·H·Sq·Sk·P FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    as v6_wgmma. A block begins with a wait for its first tiles and ends with its output, and only one fits
//           into a multiprocessor, so its tensor cores wait then. ptxas (CUDA 13.0) moves the wait for the output in
//           front of the exponentials, so that of a warpgroup's own softmax only the maxima overlap its products; the
//           rest overlaps those of the others. Like v3 it rounds the weights
#include <step2/attention/hopper.h>

#include "rungs.h"

namespace kf::KF_BACKEND::attention {
namespace {

constexpr int kKeys = 128;  // of a tile

template <int kColumns>
struct Shape {
  static constexpr int kConsumers = kColumns == 64 ? 3 : 2;      // warpgroups
  static constexpr int kQueries = kConsumers * 64;               // of a block
  static constexpr int kStages = kColumns == 64 ? 4 : 2;         // for tiles of K, and as many for V
  static constexpr int kRegisters = kColumns == 64 ? 160 : 240;  // of a consumer
  static constexpr int kProducerRegisters = kColumns == 64 ? 32 : 24;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
};

template <int kColumns, class T>
struct Shared {
  T q[Shape<kColumns>::kConsumers][kColumns / kSlice][64 * kSlice];
  T k[Shape<kColumns>::kStages][kColumns / kSlice][kKeys * kSlice];
  T v[Shape<kColumns>::kStages][kColumns / kSlice][kKeys * kSlice];
  uint64_t q_full;
  Pipeline<Shape<kColumns>::kStages> k_pipe, v_pipe;
  uint64_t v_raw;
};

// One warp of the producer.
template <int kColumns, class Block, class T>
__device__ void produce(const Args& a, const Block& block, int tiles_of_keys, Shared<kColumns, T>& shared,
                        const Maps& maps) {
  constexpr int kSlices = kColumns / kSlice;
  const bool leader = threadIdx.x % kWarpSize == 0;
  const Head head(a, block.head);
  if (leader) {
    mbarrier_arrive_expect_tx(&shared.q_full, sizeof shared.q);
    for (int w = 0; w < Shape<kColumns>::kConsumers; ++w) {
      load_slices<kSlices, 64>(shared.q[w], &maps.q, &shared.q_full, block.first + w * 64, head.head, head.batch);
    }
  }
  PipelineState<Shape<kColumns>::kStages> ring;
  for (int j = tiles_of_keys - 1; j >= 0; --j, ring.advance()) {
    const int stage = ring.index;
    const int key = block.first_key + j * kKeys;
    const int keys = block.keys - j * kKeys;  // in the tile, or more
    if (leader) {
      shared.k_pipe.producer_acquire(ring, sizeof shared.k[stage]);
      load_slices<kSlices, kKeys>(shared.k[stage], &maps.k, &shared.k_pipe.full[stage], key, head.kv_head, head.batch);
      shared.v_pipe.producer_acquire(ring);
      uint64_t* const full = keys < kKeys ? &shared.v_raw : &shared.v_pipe.full[stage];
      mbarrier_arrive_expect_tx(full, sizeof shared.v[stage]);
      load_slices<kSlices, kKeys>(shared.v[stage], &maps.v, full, key, head.kv_head, head.batch);
    }
    if (keys < kKeys) {  // the first tile only: what lies beyond the keys must become 0 before anyone reads it
      mbarrier_wait(&shared.v_raw, 0);
      clear_rows<kSlices, kKeys>(shared.v[stage], keys, threadIdx.x % kWarpSize, kWarpSize);
      tma_store_fence();
      __syncwarp();
      if (leader) shared.v_pipe.producer_commit(ring);
    }
  }
}

template <int kColumns, bool kDropout, class Block, class T>
__device__ void consume(const Args& a, const Block& block, int tiles_of_keys, Shared<kColumns, T>& shared,
                        const Maps& maps) {
  constexpr int kConsumers = Shape<kColumns>::kConsumers;
  const int warpgroup = warpgroup_of_block();
  const bool leader = leads_warpgroup(warpgroup);
  const int first_row = warpgroup * 64;
  const float scale = static_cast<float>(a.scale * kLog2e);
  // A barrier for each warpgroup: this one waits at its own, and opens the next one's when its products are issued.
  const auto pingpong_wait = [&] { named_barrier_sync(1 + warpgroup, 2 * kWarpgroupSize); };
  const auto pingpong_arrive = [&] { named_barrier_arrive(1 + (warpgroup + 1) % kConsumers, 2 * kWarpgroupSize); };
  if (warpgroup == 0) named_barrier_arrive(1, 2 * kWarpgroupSize);  // the first turn

  RowsSoftmax softmax;
  AttentionDropout dropout(a);
  float out[kColumns / 2] = {};
  float factor[2];
  uint32_t weight[kKeys / 16][4];

  PipelineState<Shape<kColumns>::kStages> ring;
  int j = tiles_of_keys - 1;
  const auto skip = [&] {
    pingpong_wait();
    pingpong_arrive();
    skip_tile(shared, ring, leader);
  };
  const int lowest = lowest_tile<kKeys>(block, first_row);
  const int seen = first_row < block.queries ? block.seen_by(first_row + 63) : 0;
  for (; j >= lowest && j * kKeys >= seen; --j, ring.advance())
    skip();  // its queries see none of these, or there are none
  if (tiles_of_keys > 0) mbarrier_wait(&shared.q_full, 0);
  if (j >= lowest) {
    {
      float score[kKeys / 2];
      shared.k_pipe.consumer_wait(ring);
      pingpong_wait();
      wgmma_fence();
      issue_scores<kColumns, kKeys>(score, shared.q[warpgroup], shared.k[ring.index]);
      pingpong_arrive();
      wgmma_wait<0>();
      if (leader) shared.k_pipe.consumer_release(ring.index);
      mask_scores(score, block, first_row, j * kKeys);
      softmax.weigh(score, scale, factor);  // the factor meets an output of zeros
      if constexpr (kDropout) drop_weights(dropout, score, block, first_row, j * kKeys);
      pack_weights<T>(score, weight);
    }
    // Both products at once, and the softmax while they run.
    const auto step = [&](auto masked) {
      const PipelineState<Shape<kColumns>::kStages> before = ring;
      ring.advance();
      float score[kKeys / 2];
      // Both tiles first: a wait between the products would make the compiler put them one after the other.
      shared.v_pipe.consumer_wait(before);
      shared.k_pipe.consumer_wait(ring);
      pingpong_wait();
      wgmma_fence();
      issue_scores<kColumns, kKeys>(score, shared.q[warpgroup], shared.k[ring.index]);
      issue_output<kColumns, kKeys>(out, weight, shared.v[before.index]);
      pingpong_arrive();
      wgmma_wait<1>();  // the scores
      if (leader) shared.k_pipe.consumer_release(ring.index);
      if constexpr (decltype(masked)::value) mask_scores(score, block, first_row, j * kKeys);
      const bool raised = softmax.weigh(score, scale, factor);
      wgmma_wait<0>();  // the output: the weights' registers are free, and the factor may be applied
      if (leader) shared.v_pipe.consumer_release(before.index);
      if (raised) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) out[i] *= factor[i / 2 % 2];
      }
      if constexpr (kDropout) drop_weights(dropout, score, block, first_row, j * kKeys);
      pack_weights<T>(score, weight);
    };
    // Only the first tiles meet the mask; without it the loop is one piece, in which the compiler may move things.
    const int all_see = block.seen_by(first_row);  // its first query sees the least
    for (--j; j >= lowest && (j + 1) * kKeys > all_see; --j) step(std::true_type{});
    for (const int to = lowest_tile_for_all<kKeys>(block, first_row); j >= to; --j) step(std::false_type{});
    for (; Block::kPacked && j >= lowest; --j) step(std::true_type{});
    shared.v_pipe.consumer_wait(ring);
    wgmma_fence();
    issue_output<kColumns, kKeys>(out, weight, shared.v[ring.index]);
    wgmma_wait<0>();
    if constexpr (Block::kPacked) {
      if (leader) shared.v_pipe.consumer_release(ring.index);
      ring.advance();
    }
  }
  for (; Block::kPacked && j >= 0; --j, ring.advance()) skip();  // of documents before its own
  if (warpgroup == 0) pingpong_wait();  // which the last one has passed on; barriers end as they began

  const Head head(a, block.head);
  store_rows<kDropout>(a, block, first_row, softmax, out, shared.q[warpgroup], &maps.out, head.head, head.batch,
                       1 + kConsumers + warpgroup, leader, kDropout ? dropout.scale() : 1.0f);
  if (leader) tma_store_wait_read<0>();
}

template <bool kPacked, int kColumns, bool kDropout, class T>
__global__ void __launch_bounds__(Shape<kColumns>::kThreads, 1)
    v7_warpgroups_kernel(Args a, const __grid_constant__ Maps maps) {
  using S = Shape<kColumns>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<WithSeen<kPacked, Shared<kColumns, T>, S::kQueries>*>(memory);
  const int64_t tiles = ceil_div(a.q_length, S::kQueries);
  const int64_t tile_of_queries = tiles - 1 - blockIdx.x % tiles;  // the last ones, which see most, first
  const auto block = queries_of_block<kPacked, kDropout>(a, blockIdx.x / tiles, tile_of_queries * S::kQueries, shared);
  const int tiles_of_keys = max(block.seen_by(S::kQueries - 1) + kKeys - 1, 0) / kKeys;

  if (threadIdx.x == 0) {
    mbarrier_init(&shared.q_full, 1);
    mbarrier_init(&shared.v_raw, 1);
    shared.k_pipe.init(S::kConsumers);
    shared.v_pipe.init(S::kConsumers);
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warpgroup_of_block() == S::kConsumers) {
    warpgroup_reg_dealloc<S::kProducerRegisters>();
    const bool first_warp = threadIdx.x / kWarpSize == S::kConsumers * 4;
    if (first_warp && tiles_of_keys > 0) produce<kColumns>(a, block, tiles_of_keys, shared, maps);
  } else {
    warpgroup_reg_alloc<S::kRegisters>();
    consume<kColumns, kDropout>(a, block, tiles_of_keys, shared, maps);
  }
}

}  // namespace

std::string v7_warpgroups_can_implement(const Args& a) {
  return on_hopper(a, a.head_dim <= 64 ? Shape<64>::kQueries : Shape<128>::kQueries);
}

void v7_warpgroups(const Args& a, void* stream) {
  with_slices_and_documents(a, [&](auto type, auto columns, auto drops, auto packed) {
    using T = typename decltype(type)::element;
    using S = Shape<columns.value>;
    constexpr int kBytes = sizeof(WithSeen<packed.value, Shared<columns.value, T>, S::kQueries>);
    const auto kernel = v7_warpgroups_kernel<packed.value, columns.value, drops.value, T>;
    allow_shared(kernel, kBytes);
    const auto blocks = static_cast<unsigned>(a.batch * a.heads * ceil_div(a.q_length, S::kQueries));
    kernel<<<blocks, S::kThreads, kBytes, as_stream(stream)>>>(a, maps_of<T>(a, kKeys));
    check_launch();
  });
}

}  // namespace kf::KF_BACKEND::attention
