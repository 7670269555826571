// decode_step v4_clusters: a cluster has a head and a part of the MLP; of a layer's seven hops five stay in it
//
// Idea      A hop over all blocks of a GPU goes through its L2 cache, there and back. Blocks of a cluster reach into
//           each other's shared memory, which is nearer. So the model is shared out as several GPUs would share it: a
//           cluster has a head's q k v, its attention and its rows of the projection, some columns of fc and their rows
//           of the second product. What it has in the end is a part of all columns of x. The L2 cache adds these parts
//           up as whole numbers, whose sum is the same in any order: twice a layer a warp waits for its few columns,
//           and reads each once, not once for each cluster
// Since v3  Clusters of eight blocks. A warp has rows of each product, over all the depth that its cluster has: no sums
//           are put together over warps. x lies in each block's shared memory, sent there by st.async as operand b of
//           mma. Each warp has a ring of weights of its own, filled across all hops. Any width of GPT-2, several rows
// Launch    cooperative, as many clusters of eight blocks as run at once, at most 16; a block a multiprocessor, 384
//           threads, all shared memory that a block may have
// Roles     eight warps compute, 232 registers; of four with 40 one finds LayerNorms' mean and factor while the eight
//           multiply, and one or two fill the rings, a lane for each
// A layer   q k v → cluster → attention, 8 keys a warp of 512 → cluster → projection → sums → a warp's columns →
//           cluster → fc, GELU → cluster → second product → sums → a warp's columns → cluster
// Barriers  full and empty for each piece in a ring; in each block one for each kind of exchange, a phase a layer,
//           whose bytes the block's first warp announces, of moments the warp that finds LayerNorms' numbers. Up to
//           1024 columns it tells these by a named barrier, of wider models by an mbarrier. Nothing else says that a
//           place may be written over: schedule_check.h finds that it always may
// Rows      of a batch four beside each other, while a tile's weights lie in registers: each row to the last bit what
//           it is alone. All wait together
// Moves     weights, keys and values once, weights so that they leave the L2 cache first; of each row 8 bytes for a
//           column to and from each cluster, twice a layer
// Limits    compute capability 9.0; 8 rows, of more than 768 columns or two heads to a cluster 4; float16, whose x·gain
//           must not exceed 65504, and bfloat16; packed weights; head_dim 64; width up to 1600, two heads to a cluster;
//           inner up to 320 for each cluster, of more than 768 columns 512; 2^22 tokens; 1024 keys before the new one;
//           slots of a head's cache are neighbours. In float16 hidden values, too, must not exceed 65504. A part of x
//           beyond 2^28 of its standard deviations makes NaN
#include <kf/launch.h>
#include <step2/online_softmax.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

#include "cluster_warp.h"
#include "packed.h"
#include "rungs.h"

namespace kf::KF_BACKEND::decode_step {
namespace {

template <class T, int kSteps, int kBatch, bool kTrace>
__device__ __forceinline__ void add_token(ClusterWarp<T, kSteps, kBatch, kTrace>& warp, int64_t id) {
  using Warp = ClusterWarp<T, kSteps, kBatch, kTrace>;
  const bool has_heads = warp.heads.count() > 0;
  // What comes to registers long before it is needed, where there is room: keys before the product in front of them,
  // the second product's weights before x. These stand in the stream behind another tile of fc, if there is one.
  constexpr bool kEarly = Warp::kNarrow && kBatch < 4;
  const bool second_early = kSteps == 12 && kBatch == 1 && warp.fc_tiles <= 1;
  typename Warp::Weights of_qkv, of_fc;  // of the first tile; they come while x is on its way
  warp.send_first_x(id);
  warp.take(warp.qkv_tiles > 0, of_qkv);
#pragma unroll 1
  for (int layer = 0; layer < warp.s.layers; ++layer) {
    warp.take_constants(layer);
    typename Warp::OfKeys cached;
    typename Warp::OfHeads of_projection;
    if (kEarly) warp.load_first(cached);
    warp.template rows<kAttention>(of_qkv);
    warp.record(Step::kQkvSent);
    if (has_heads) {
      if (!kEarly) warp.load_first(cached);
      if (Warp::kNarrow) warp.take_of_heads(of_projection);
      warp.attend(cached);
      warp.record(Step::kAttendedSent);
      if (!Warp::kNarrow) warp.take_of_heads(of_projection);
      warp.project(of_projection);
      warp.record(Step::kPartSent);
    }
    warp.prefetch_keys(layer + 1);
    warp.clear_sums();
    if (Warp::kNarrow) warp.take(warp.fc_tiles > 0, of_fc);
    warp.template add_parts<kAttention>();
    typename Warp::OfSecond of_second;
    if (second_early) warp.take_of_second(of_second);
    if (!Warp::kNarrow) warp.take(warp.fc_tiles > 0, of_fc);
    warp.record(Step::kSent);
    warp.template rows<kMlp>(of_fc);
    warp.record(Step::kHiddenSent);
    if (!second_early) warp.take_of_second(of_second);
    warp.second(of_second);
    warp.record(Step::kSecondSent);
    const bool next = layer + 1 < warp.s.layers && warp.qkv_tiles > 0;
    if (Warp::kNarrow) warp.take(next, of_qkv);
    warp.template add_parts<kMlp>();
    if (!Warp::kNarrow) warp.take(next, of_qkv);
    warp.record(Step::kEnd);
  }
  warp.logits();
}

template <class T, int kSteps, int kBatch, bool kTrace>
__global__ void __launch_bounds__(kClusterThreads, 1) clusters_kernel(const __grid_constant__ ClusterToken token) {
  extern __shared__ __align__(128) unsigned char memory[];
  using Shared = ClusterShared<kSteps, kBatch>;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int block = static_cast<int>(blockIdx.x);
  const WarpPlace at{block / kClusterBlocks, block % kClusterBlocks, warp_uniform(thread / kWarpSize)};
  // By one lane of a warp: of many, with addresses of their own, the compiler makes a loop, a turn for each.
  if (thread % kWarpSize == 0 && at.warp < kClusterWarps) {
#pragma unroll
    for (unsigned i = 0; i < kMostPieces; ++i) {
      mbarrier_init(&shared.full[at.warp][i], 1);
      mbarrier_init(&shared.empty[at.warp][i], 1);
    }
    mbarrier_init(&shared.constants_full[at.warp], 1);
  }
  if (thread == kNormWarp * kWarpSize) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mbarrier_init(&shared.x_full[half], 1);
      mbarrier_init(&shared.moments_full[half], 1);
      mbarrier_init(&shared.norm_full[half], 1);
    }
    mbarrier_init(&shared.qkv_full, 1);
    mbarrier_init(&shared.attended_full, 1);
    mbarrier_init(&shared.hidden_full, 1);
  }
  const Place place(token.a, 0);
  if (kBatch > 1 && thread < token.a.batch) shared.places[thread] = Place(token.a, thread);
  const int64_t id = token.a.ids[0];
  const uint32_t epoch = reinterpret_cast<const volatile State*>(token.packed)->epoch;
  const uint4 own = label<T>(token.s), got = __ldcg(reinterpret_cast<const uint4*>(token.packed) + token.s.label_at);
  mbarrier_init_fence();
  if (own.x != got.x || own.y != got.y || own.z != got.z || own.w != got.w) return refuse<T>(token.a, token.packed);
  __syncthreads();
  cluster_barrier_arrive_relaxed();
  if (at.warp >= kClusterWarps) {
    if constexpr (kHas90a) warpgroup_reg_dealloc<kHelpingRegisters>();
    if (at.warp == kNormWarp) {
      find_norms<kSteps, kBatch>(token, shared);
    } else if (at.warp <= kNormWarp + bringing_warps(kSteps)) {
      bring_weights<kSteps, kBatch>(token, shared, at,
                                    thread % kWarpSize * bringing_warps(kSteps) + at.warp - kNormWarp - 1);
    }
    __syncwarp();
    return cluster_barrier_wait();
  }
  if constexpr (kHas90a) warpgroup_reg_alloc<kComputingRegisters>();
  ClusterWarp<T, kSteps, kBatch, kTrace> warp(token, shared, place, epoch, at);
  warp.record_both_clocks(0);
  warp.begin();
  add_token(warp, id);
  warp.record_both_clocks(2);
  cluster_barrier_arrive_relaxed();  // nobody may end while others still send to it
  cluster_barrier_wait();
}

// Calls f with the first of the numbers that is not below n, or the last.
template <int kFirst, int... kMore, class F>
auto with_at_least(int64_t n, F&& f) {
  if constexpr (sizeof...(kMore) > 0) {
    if (n > kFirst) return with_at_least<kMore...>(n, f);
  }
  return f(std::integral_constant<int, kFirst>());
}

// Calls f(kernel, bytes of shared memory).
template <bool kTrace, class F>
auto with_kernel(DType dtype, int steps, int64_t batch, F&& f) {
  return with_half_type(dtype, [&](auto type) {
    return with_at_least<12, 16, 20, kMostSteps>(steps, [&](auto of_steps) {
      constexpr int kSteps = decltype(of_steps)::value;
      return with_at_least<1, 2, 4, most_batch(kSteps)>(batch, [&](auto most) {
        constexpr int kBatch = kTrace ? 1 : decltype(most)::value;
        return f(clusters_kernel<typename decltype(type)::element, kSteps, kBatch, kTrace>,
                 static_cast<int64_t>(sizeof(ClusterShared<kSteps, kBatch>)));
      });
    });
  });
}

// How the current device shares out a model. Its clusters are counted, and shares worked out, when another model comes.
Shares shares_of(const Args& a, const ClusterForm& form) {
  struct Known {
    std::array<int64_t, 8> of;
    Shares shares;
  };
  thread_local Known known{};
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const std::array<int64_t, 8> of{a.width, a.inner,          a.vocab,           a.layers, static_cast<int64_t>(a.dtype),
                                  device,  form.least_steps, form.most_clusters};
  if (known.of == of) return known.shares;
  int64_t at_once = 0;
  with_kernel<false>(a.dtype, Shares::steps_of(static_cast<int>(a.width), form.least_steps), 1,
                     [&](auto* kernel, int64_t shared) {
                       at_once = clusters_at_once(kernel, kClusterBlocks, kClusterThreads, shared);
                     });
  at_once = std::min<int64_t>(at_once, form.most_clusters);
  known = {of, Shares(a.width, a.inner, a.vocab, a.layers, at_once, form.least_steps)};
  return known.shares;
}

// Whether weights of these shapes can be packed.
std::string cannot_share(const Args& a, const ClusterForm& form) {
  constexpr int kMostWidth = kMostSteps * kStepDepth;
  if (a.dtype == DType::kFloat32) return "takes float16 or bfloat16, got float32";
  if (a.dtype == DType::kFloat64) return "takes float16 or bfloat16, got float64";
  if (a.width % kHead != 0) return "takes a width that is a multiple of 64" + got(a.width);
  if (a.width > kMostWidth) return "takes a width up to " + std::to_string(kMostWidth) + got(a.width);
  if (a.vocab > kMostVocab) return "takes at most " + std::to_string(kMostVocab) + " tokens" + got(a.vocab);
  if (compute_capability() < 90) return "needs a GPU of compute capability 9.0 or newer";
  if (const std::string why = too_much_shared_memory(kMostShared, "weights on their way"); !why.empty()) {
    return why;
  }
  const Shares s = shares_of(a, form);
  if (const int needed = up(s.heads, most_heads(s.steps)); needed > s.clusters) {
    return "needs room for " + std::to_string(needed) + " clusters of eight blocks at once, two heads each" +
           got(s.clusters);
  }
  if (!s.fits()) {
    return "takes an inner width up to " + std::to_string(s.clusters * most_units(s.steps) * kUnitOfHidden) +
           got(a.inner);
  }
  const int most = most_batch(s.steps);
  if (a.batch > most) return "takes at most " + std::to_string(most) + " rows of this width" + got(a.batch);
  return "";
}

// trace: null, or [blocks, trace_of_block].
template <bool kTrace>
void launch_clusters(const Args& a, const ClusterForm& form, void* stream, long long* trace) {
  const ClusterToken token{a,
                           shares_of(a, form),
                           static_cast<unsigned char*>(a.packed),
                           static_cast<float>(a.scale * kLog2e),
                           static_cast<float>(a.eps),
                           trace};
  const int most = kTrace ? 1 : most_batch(token.s.steps);
  if (a.batch > most) throw std::invalid_argument("v4_clusters: `batch` must be at most " + std::to_string(most));
  with_kernel<kTrace>(a.dtype, token.s.steps, a.batch, [&](auto* kernel, int64_t shared) {
    const dim3 grid(static_cast<unsigned>(token.s.clusters * kClusterBlocks));
    with_clusters(kernel, kClusterBlocks, grid, kClusterThreads, shared, [&](cudaLaunchConfig_t& config) {
      cudaLaunchAttribute attributes[2] = {config.attrs[0], {}};
      attributes[1].id = cudaLaunchAttributeCooperative;
      attributes[1].val.cooperative = 1;
      config.attrs = attributes;
      config.numAttrs = 2;
      config.stream = as_stream(stream);
      check(cudaLaunchKernelEx(&config, kernel, token), "cudaLaunchKernelEx");
    });
  });
}

}  // namespace

int64_t v4_clusters_bytes(const Args& a, std::string& why_not, const ClusterForm& form) {
  why_not = cannot_share(a, form);
  return why_not.empty() ? shares_of(a, form).bytes() : 0;
}

void v4_clusters_pack(const Args& a, void* stream, const ClusterForm& form) {
  with_half_type(a.dtype,
                 [&](auto type) { pack_shares<typename decltype(type)::element>(a, shares_of(a, form), stream); });
}

std::string v4_clusters_can_implement(const Args& a) {
  if (const std::string why_not = cannot_take(a, most_batch(12)); !why_not.empty()) return why_not;
  if (const std::string why_not = cannot_share(a, {}); !why_not.empty()) return why_not;
  if (const std::string why_not = too_many_keys(a, kOfCluster * kWarpKeys); !why_not.empty()) return why_not;
  return cannot_read(a, shares_of(a, {}).bytes());
}

void v4_clusters_of(const Args& a, const ClusterForm& form, void* stream) {
  launch_clusters<false>(a, form, stream, nullptr);
}

void v4_clusters(const Args& a, void* stream) { v4_clusters_of(a, {}, stream); }

}  // namespace kf::KF_BACKEND::decode_step
