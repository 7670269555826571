// decode_step v3_persistent: one launch, whose blocks send each other messages
//
// Idea      Between two launches, dependent ones too, lie two microseconds. Here a block a multiprocessor stays from
//           the embedding to the logits. A result goes to all blocks as messages (messages.h): who has polled one knows
//           that it is there and has it, so a hop costs a store and a load. Weights do not wait for x: all that a block
//           reads lies in one stream (decode_pack), and one thread has it copied into a ring in shared memory, 64 KB
//           and more ahead, across all hops.
// Since v2  One launch; weights in a second copy, in the order in which tensor cores take them. A block has rows of its
//           own of each product, at full depth: its eight warps share that, and one adds up and sends. LayerNorm is
//           applied to the sums: Σ (x − mean)/σ·g·w = (Σ x·g·w − mean·Σ g·w)/σ, and Σ g·w is packed with the weights.
//           x is two numbers of half precision, both columns of operand b, so that products are nearly of float32
// Launch    cooperative, a block a multiprocessor, 320 threads: eight warps, a producer and a helper; 217 KB
// A layer   schedule.h: LayerNorm, q k v · attention · projection · LayerNorm, fc, GELU · second product; five hops
// Moves     weights, keys and values once; 16 bytes for three values of each result to each block
// Limits    compute capability 9.0; one row; float16, whose x·gain must not exceed 65504, and bfloat16; packed weights;
//           head_dim 64; width up to 768, inner up to 3072, and at most 24 rows of a product to a block (124M: on 128
//           multiprocessors or more), 400 of the logits; as many parts of a head as the blocks allow, up to eleven of
//           128 keys; slots of a head's cache are neighbours. It rounds hidden values, and what attention sends
#include <kf/launch.h>
#include <step2/online_softmax.h>

#include <string>

#include "pack.h"
#include "packed.h"
#include "rungs.h"
#include "token_consumer.h"

namespace kf::KF_BACKEND::decode_step {
namespace {

template <class T, bool kTrace>
__global__ void __launch_bounds__(kTokenThreads, 1) token_kernel(const __grid_constant__ Token token) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = static_cast<int>(threadIdx.x), warp = warp_uniform(thread / kWarpSize);
  const Place place(token.a, 0);
  const uint32_t epoch = reinterpret_cast<const volatile State*>(token.packed)->epoch;
  const uint4 own = label<T>(token.s), got = __ldcg(label_of(token.s, token.packed));
  if (thread == 0) {
    for (int i = 0; i < kSlots; ++i) {
      mbarrier_init(&shared.full[i], 1);
      mbarrier_init(&shared.empty[i], kConsumers);
    }
    mbarrier_init_fence();
    tma_store_fence();
  }
  if (thread <= kConsumers) shared.peaks[thread] = {-INFINITY, 0};
  if (thread < kHead) shared.newest[thread] = 0;
  if (thread < kKinds * kTiles) {
    const int kind = thread / kTiles, tile = thread % kTiles;
    const Product p = token.s.product(blockIdx.x, static_cast<Kind>(kind));
    const Body body = p.body(min(tile, p.tiles() - 1));
    shared.tiles[kind][tile] = {{body.of_16(), body.rest()}, body.bytes()};
    if (tile == 0) shared.lines[kind] = {p.first, p.rows, p.tiles(), p.constants_at(), p.body_at(), p.tile_bytes(0)};
  }
  __syncthreads();
  if (own.x != got.x || own.y != got.y || own.z != got.z || own.w != got.w) return refuse<T>(token.a, token.packed);
  if (warp == kProducerWarp) {
    if (thread % kWarpSize == 0) Producer<T>(token, shared, place, epoch).run();
  } else if (warp == kHelperWarp) {
    Helper<T>(token, shared, place, epoch).run();
  } else {
    Consumer<T, kTrace>(token, shared, place, epoch, warp).run();
  }
}

constexpr int kMostWidth = kConsumers * kUnit, kMostInner = kConsumers * kHiddenUnit;

Schedule schedule_of(const Args& a) { return Schedule(a.width, a.inner, a.vocab, a.layers, multiprocessors()); }

// Whether weights of these shapes can be packed.
std::string cannot_pack(const Args& a) {
  if (a.dtype == DType::kFloat32) return "takes float16 or bfloat16, got float32";
  if (a.dtype == DType::kFloat64) return "takes float16 or bfloat16, got float64";
  if (a.width % kHead != 0) return "takes a width that is a multiple of 64" + got(a.width);
  if (a.width > kMostWidth) return "takes a width up to " + std::to_string(kMostWidth) + got(a.width);
  if (a.inner > kMostInner) return "takes an inner width up to " + std::to_string(kMostInner) + got(a.inner);
  if (compute_capability() < 90) return "needs a GPU of compute capability 9.0 or newer";
  if (!schedule_of(a).fits()) {
    return "needs more multiprocessors for these widths than the " + std::to_string(multiprocessors()) + " here";
  }
  if (a.batch > 1) return "takes one row" + got(a.batch);
  return too_much_shared_memory(sizeof(Shared), "weights on their way");
}

// trace: null, or [blocks, trace_of_block].
template <bool kTrace>
void launch_token(const Args& a, void* stream, long long* trace) {
  const Token token{a,
                    schedule_of(a),
                    static_cast<unsigned char*>(a.packed),
                    static_cast<float>(a.scale * kLog2e),
                    static_cast<float>(a.eps),
                    trace};
  with_half_type(a.dtype, [&](auto type) {
    auto* const kernel = token_kernel<typename decltype(type)::element, kTrace>;
    allow_shared(kernel, sizeof(Shared));
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(token.s.blocks));
    config.blockDim = dim3(kTokenThreads);
    config.dynamicSmemBytes = sizeof(Shared);
    config.stream = as_stream(stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, kernel, token), "cudaLaunchKernelEx");
  });
}

}  // namespace

int64_t v3_persistent_bytes(const Args& a, std::string& why_not) {
  why_not = cannot_pack(a);
  return why_not.empty() ? schedule_of(a).bytes() : 0;
}

void v3_persistent_pack(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) { pack_all<typename decltype(type)::element>(a, schedule_of(a), stream); });
}

std::string v3_persistent_can_implement(const Args& a) {
  if (const std::string why_not = cannot_take(a, 1); !why_not.empty()) return why_not;
  if (const std::string why_not = cannot_pack(a); !why_not.empty()) return why_not;
  const Schedule s = schedule_of(a);
  if (const std::string why_not = too_many_keys(a, s.most_keys()); !why_not.empty()) return why_not;
  return cannot_read(a, s.bytes());
}

void v3_persistent(const Args& a, void* stream) { launch_token<false>(a, stream, nullptr); }

}  // namespace kf::KF_BACKEND::decode_step
