// attention v6_wgmma: whole tiles come by TMA, and a product reads them where they lie
//
// Idea      Hopper's tensor cores are faster than mma.sync can feed them. wgmma is one instruction of four warps, a
//           warpgroup: 64 rows times 128 columns, and it reads its operands from shared memory by itself; the weights,
//           operand a of the second product, may stay in registers. TMA copies a whole box of a tensor: one thread asks
//           for it, and an mbarrier counts the bytes that have arrived. TMA writes the swizzle that wgmma reads, and
//           zeros where the tensor ends.
// Since v5  No ldmatrix, no addresses, no copies by threads: they keep the softmax (hopper.h). A warpgroup owns 64
//           queries, a block has two.
//
//           thread 0     issue the loads of tile j + 1, into the stage that tile j − 1 has released
//           all          wait for K(j) · S = Q·Kᵀ · softmax · wait for V(j) · O += P·V · barrier
//
// Launch    grid B·H·⌈Sq/128⌉, block 256; keys 128 at a time. Columns are padded with zeros to P = 64 or 128. Shared
//           memory 2·(128 + 4·128)·P bytes and 5 barriers: 80 KB at D 64, 160 KB at D 128
// Moves     B·H·((2·Sq + 2·Sk·⌈Sq/128⌉)·D·2 + 4·Sq) bytes, most of K and V from the L2 cache;
//           4·B·H·Sq·Sk·P FLOPs (causal: half at Sq = Sk), B·H·Sq·Sk exponentials
// Limits    as v5_registers, and compute capability 9.0 only. During the softmax the tensor cores wait, and during the
//           products everyone else does. Like v3 it rounds the weights
#include <step2/attention/hopper.h>

#include "rungs.h"

namespace kf::KF_BACKEND::attention {
namespace {

constexpr int kWarpgroups = 2;
constexpr int kThreads = kWarpgroups * kWarpgroupSize;
constexpr int kQueries = kWarpgroups * 64;  // of a block
constexpr int kKeys = 128;                  // of a tile

template <int kColumns, class T>
struct Shared {
  T q[kWarpgroups][kColumns / kSlice][64 * kSlice];
  T k[2][kColumns / kSlice][kKeys * kSlice];
  T v[2][kColumns / kSlice][kKeys * kSlice];
  uint64_t q_full, k_full[2], v_full[2];
};

template <bool kPacked, int kColumns, bool kDropout, class T>
__global__ void __launch_bounds__(kThreads) v6_wgmma_kernel(Args a, const __grid_constant__ Maps maps) {
  constexpr int kSlices = kColumns / kSlice;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<WithSeen<kPacked, Shared<kColumns, T>, kQueries>*>(memory);
  const int warpgroup = warpgroup_of_block();
  const int64_t tiles = ceil_div(a.q_length, kQueries);
  const int64_t tile_of_queries = tiles - 1 - blockIdx.x % tiles;  // the last ones, which see most, first
  const auto block = queries_of_block<kPacked, kDropout>(a, blockIdx.x / tiles, tile_of_queries * kQueries, shared);
  const int end = block.seen_by(kQueries - 1);
  const float scale = static_cast<float>(a.scale * kLog2e);

  if (threadIdx.x == 0) {
    mbarrier_init(&shared.q_full, 1);
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(&shared.k_full[stage], 1);
      mbarrier_init(&shared.v_full[stage], 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  const Head head(a, block.head);
  const auto issue_key_loads = [&](int first_key, int stage) {
    const int key = block.first_key + first_key;
    mbarrier_arrive_expect_tx(&shared.k_full[stage], sizeof shared.k[stage]);
    load_slices<kSlices, kKeys>(shared.k[stage], &maps.k, &shared.k_full[stage], key, head.kv_head, head.batch);
    mbarrier_arrive_expect_tx(&shared.v_full[stage], sizeof shared.v[stage]);
    load_slices<kSlices, kKeys>(shared.v[stage], &maps.v, &shared.v_full[stage], key, head.kv_head, head.batch);
  };
  if (threadIdx.x == 0 && end > 0) {
    mbarrier_arrive_expect_tx(&shared.q_full, sizeof shared.q);
    for (int w = 0; w < kWarpgroups; ++w) {
      load_slices<kSlices, 64>(shared.q[w], &maps.q, &shared.q_full, block.first + w * 64, head.head, head.batch);
    }
    issue_key_loads(0, 0);
  }

  RowsSoftmax softmax;
  AttentionDropout dropout(a);
  float out[kColumns / 2] = {};
  if (end > 0) mbarrier_wait(&shared.q_full, 0);
  for (int first_key = 0, j = 0; first_key < end; first_key += kKeys, ++j) {
    const int stage = j % 2, parity = j / 2 % 2;
    if (threadIdx.x == 0 && first_key + kKeys < end) issue_key_loads(first_key + kKeys, stage ^ 1);

    float score[kKeys / 2];
    mbarrier_wait(&shared.k_full[stage], parity);
    wgmma_fence();
    issue_scores<kColumns, kKeys>(score, shared.q[warpgroup], shared.k[stage]);
    wgmma_wait<0>();

    bool masked = first_key + kKeys > block.seen_by(warpgroup * 64);  // its first query sees the least
    if constexpr (kPacked) masked |= first_key < block.seen_from(warpgroup * 64 + 63);
    if (masked) {
      mask_scores(score, block, warpgroup * 64, first_key);
    }
    float factor[2];
    if (softmax.weigh(score, scale, factor)) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) out[i] *= factor[i / 2 % 2];
    }
    if constexpr (kDropout) drop_weights(dropout, score, block, warpgroup * 64, first_key);
    uint32_t weight[kKeys / 16][4];
    pack_weights<T>(score, weight);

    mbarrier_wait(&shared.v_full[stage], parity);
    if (block.keys - first_key < kKeys) {
      clear_rows<kSlices, kKeys>(shared.v[stage], block.keys - first_key, threadIdx.x, kThreads);
      tma_store_fence();
      __syncthreads();
    }
    wgmma_fence();
    issue_output<kColumns, kKeys>(out, weight, shared.v[stage]);
    wgmma_wait<0>();
    __syncthreads();  // both warpgroups have released this stage
  }

  // The output in q's place: a warpgroup's rows are its own.
  const bool leader = leads_warpgroup(warpgroup);
  store_rows<kDropout>(a, block, warpgroup * 64, softmax, out, shared.q[warpgroup], &maps.out, head.head, head.batch,
                       1 + warpgroup, leader, kDropout ? dropout.scale() : 1.0f);
  if (leader) tma_store_wait_read<0>();
}

}  // namespace

std::string v6_wgmma_can_implement(const Args& a) { return on_hopper(a, kQueries); }

void v6_wgmma(const Args& a, void* stream) {
  with_slices_and_documents(a, [&](auto type, auto columns, auto drops, auto packed) {
    using T = typename decltype(type)::element;
    constexpr int kBytes = sizeof(WithSeen<packed.value, Shared<columns.value, T>, kQueries>);
    const auto kernel = v6_wgmma_kernel<packed.value, columns.value, drops.value, T>;
    allow_shared(kernel, kBytes);
    const auto blocks = static_cast<unsigned>(a.batch * a.heads * ceil_div(a.q_length, kQueries));
    kernel<<<blocks, kThreads, kBytes, as_stream(stream)>>>(a, maps_of<T>(a, kKeys));
    check_launch();
  });
}

}  // namespace kf::KF_BACKEND::attention
