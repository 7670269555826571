// decode_step v3_persistent: one launch, whose blocks send each other messages
//
// Idea      Between two launches, dependent ones too, lie two microseconds. Here a block a multiprocessor stays from
//           the embedding to the logits. A result goes to all blocks as messages (messages.h): who has polled one knows
//           that it is there and has it, so a hop costs a store and a load. Weights do not wait for x: each warp asks
//           for its own six or so steps ahead, across all hops, into a ring in shared memory.
// Since v2  One launch. A block has columns of its own: q k v and fc whole, projection and second product a half of
//           the depth. Every thread keeps four columns of x, and adds what comes. LayerNorm is applied to the sums:
//           Σ (x − mean)/σ·g·w = (Σ x·g·w − mean·Σ g·w)/σ, and Σ g·w is made before x is there. x is centred once, so
//           that its mean is small. Float32 products without tensor cores: a step's weights are in registers when x
//           comes, and what counts is not their number but how long the chain is behind it
// Launch    cooperative, a block a multiprocessor, ⌈width/128⌉ warps, all of shared memory
// A layer   schedule.h: LayerNorm, q k v · attention · projection · LayerNorm, fc, GELU · second product; five hops
// Moves     weights, keys and values once; 16 bytes for four values of each result to each block
// Limits    compute capability 9.0; one row; float16 and bfloat16; width a multiple of 16 up to 1664, inner of 8;
//           head_dim a multiple of 8 up to 64; 64 layers; all tensors and rows at multiples of 16 bytes. It rounds
//           what attention sends
#include <kf/launch.h>

#include <string>

#include "rungs.h"
#include "token_block.h"

namespace kf::KF_BACKEND::decode_step {
namespace {

template <class T, int kWidth>
__global__ void __launch_bounds__(Block<T, kWidth>::kMostWarps* kWarpSize, 1)
    token_kernel(const __grid_constant__ Token token) {
  extern __shared__ __align__(128) unsigned char memory[];
  Block<T, kWidth> block(token, memory);
  block.begin_token();
  block.run_layers();
  block.logits();
  cp_async_wait<0>();
}

Schedule schedule_of(const Args& a) {
  return Schedule(static_cast<int>(a.width), static_cast<int>(a.inner), static_cast<int>(a.heads),
                  static_cast<int>(a.head_dim), static_cast<int>(a.vocab), static_cast<int>(a.layers),
                  static_cast<int>(multiprocessors()), static_cast<int>(shared_memory_limit()));
}

template <class T, int kWidth>
void launch_token(const Token& token, void* stream) {
  const int shared = token.s.shared_bytes();
  allow_shared(token_kernel<T, kWidth>, shared);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(token.s.blocks);
  config.blockDim = dim3(token.s.threads);
  config.dynamicSmemBytes = shared;
  config.stream = as_stream(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, token_kernel<T, kWidth>, token), "cudaLaunchKernelEx");
}

}  // namespace

std::string v3_persistent_can_implement(const Args& a) {
  const auto got = [](int64_t value) { return ", got " + std::to_string(value); };
  if (a.dtype == DType::kFloat32) return "takes float16 or bfloat16, got float32";
  if (a.dtype == DType::kFloat64) return "takes float16 or bfloat16, got float64";
  if (a.batch != 1) return "takes one row" + got(a.batch);
  if (a.head_dim % 8 != 0 || a.head_dim > 64)
    return "takes head_dim that is a multiple of 8 up to 64" + got(a.head_dim);
  if (a.width % 16 != 0 || a.width > kMostWidthHere) {
    return "takes a width that is a multiple of 16 up to " + std::to_string(kMostWidthHere) + got(a.width);
  }
  if (a.inner % 8 != 0 || a.inner > 16 * a.width) {
    return "takes an inner width that is a multiple of 8 up to 16 widths" + got(a.inner);
  }
  if (a.layers > kMostLayers) return "takes at most " + std::to_string(kMostLayers) + " layers" + got(a.layers);
  if (!all_aligned(a)) return "takes weights, and rows of the caches, that begin at multiples of 16 bytes";
  if (compute_capability() < 90) return "needs a GPU of compute capability 9.0 or newer";
  const Schedule s = schedule_of(a);
  if (s.steps_of_layer() > kMostJobs || s.ahead == 0) {
    return "needs more multiprocessors, or shared memory, for these widths than the " +
           std::to_string(multiprocessors()) + " here";
  }
  return "";
}

int64_t v3_persistent_scratch_bytes(const Args& a) { return int64_t{schedule_of(a).messages()} * sizeof(Message); }

void v3_persistent(const Args& a, void* stream) {
  Token token{a, schedule_of(a), {}, {}};
  for (int64_t layer = 0; layer < a.layers; ++layer) {
    token.layer[layer] = a.weights[layer];
    token.scale[layer] = static_cast<float>(scale_of(a, layer) * kLog2e);
  }
  check(cudaMemsetAsync(a.scratch, 0, v3_persistent_scratch_bytes(a), as_stream(stream)), "cudaMemsetAsync");
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    if (a.width == 768 && a.inner == 4 * 768 && a.head_dim == 64) {
      launch_token<T, 768>(token, stream);
    } else {
      launch_token<T, 0>(token, stream);
    }
  });
}

}  // namespace kf::KF_BACKEND::decode_step
