// decode_step v2_dependent: weights are asked for before the kernel in front has ended
//
// Idea      A token reads each weight once, and between two kernels nothing is read: one drains, the next one starts,
//           asks for its first weight, and waits for memory's answer. But weights do not depend on the kernel in front;
//           only x does. With programmatic dependent launch a kernel begins while the one in front runs. It asks for as
//           many weights as its shared memory holds, and of several rows for some more to come to the L2 cache; then it
//           waits for the end of the one in front, reads x, and multiplies what has come meanwhile. Attention does so
//           with keys and values. Of up to eight rows blocks of two kernels fit beside each other: one multiplies, one
//           loads
// Since v1  Programmatic dependent launch. Tensor cores, the weights being operand a and all rows operand b
//           (weight_ring.h): the weights are read once for up to 32 rows. A product's depth is shared out over a
//           cluster, so that all multiprocessors ask for a part of it (column_product.h); so are a head's keys
//           (one_query.h). The embedding is in the first kernel. The residual stream still is float32
// Launch    5 · layers + 1. Products: clusters of 1 to 8 blocks of 256 threads for each 64 columns, as many as the
//           multiprocessors are. Attention: clusters of 1 to 8 blocks of 128 threads for each head and row. Logits: a
//           block a multiprocessor. Shared memory of a product: rings of 96 KB, of several rows 64, and x
// Workers   Several that share a model launch the same, each of its own columns, and one kernel more. Products that end
//           a half block send their sums to all, 4·batch·width bytes to each, and the next one adds up what has come
//           (workers.h)
// A layer   LayerNorm, q k v · attention · projection, residual · LayerNorm, fc, GELU · product, residual
// Moves     weights, keys and values once; 4·(blocks)·batch·width bytes from the L2 cache for each LayerNorm
// Limits    compute capability 9.0; float16 and bfloat16; width and inner multiples of 8, width ≤ 2048; head_dim a
//           multiple of 8 up to 128; all tensors and rows at multiples of 16 bytes; heads ≤ 65535. It rounds what lies
//           between products
#include <kf/launch.h>

#include <algorithm>
#include <string>
#include <type_traits>

#include "column_product.h"
#include "one_query.h"
#include "rungs.h"
#include "workers.h"

namespace kf::KF_BACKEND::decode_step {
namespace {

// The last product: the embedding's table has its columns in rows. Each warp takes 16 columns at a time, at full depth.
template <class T, int kRows, class Source>
__global__ void __launch_bounds__(kThreads, kBeside<kRows>) logits_kernel(const Args a, Source source) {
  extern __shared__ __align__(128) unsigned char memory[];
  const Memory<kRows> shared{memory};
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const int depth = static_cast<int>(a.width), batch = static_cast<int>(a.batch);
  const int tiles = static_cast<int>((a.vocab + kRowColumns - 1) / kRowColumns), warps = gridDim.y * kWarps;
  const int first = static_cast<int>(blockIdx.y) * kWarps + warp, of_tile = (depth + kRowDepth - 1) / kRowDepth;
  const InRows<T> pieces{static_cast<const T*>(a.token_weight),        a.vocab, depth, first, warps, of_tile,
                         (tiles - first + warps - 1) / warps * of_tile};
  Ring<kRows>& ring = shared.ring(warp);
  ring.begin(pieces);
  source.prepare();

  wait_on_dependent_grids();
  if (blockIdx.y == 0 && static_cast<int>(threadIdx.x) < batch && Place(a, threadIdx.x).slot >= 0) {
    a.end[threadIdx.x] += 1;
  }
  const Part<T> part{shared.template x<T>(1), distance_of_rows(of_tile * kRowDepth), 0, of_tile * kRowDepth, batch};
  source.template fill<kRows>(part);
  __syncthreads();

  T* logits = static_cast<T*>(a.logits);
  RowSums<kRows> sums;
  ring.walk(pieces, [&](int piece, const Vector16(&w)[kVectors]) {
    const int k = pieces.depth_of(piece);
#pragma unroll
    for (int c = 0; c < kRowDepth / kDepth; ++c) {
      sums.template add<T>(w, c, XFragment<kRows>(part.x + k + c * kDepth, part.stride, batch));
    }
    if (k + kRowDepth < depth) return;
#pragma unroll
    for (int n = 0; n < sums.kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t column = pieces.column_of(piece) + g + e / 2 * 8;
        const int row = 8 * n + 2 * t + e % 2;
        if (row < batch && column < a.vocab) logits[row * a.vocab + column] = from_compute<T>(sums.of[n][e]);
        sums.of[n][e] = 0;
      }
    }
  });
}

// ---- launches ----

// `dependent`: the kernel may begin before the one in front has ended. The grid's blocks in x are a cluster.
template <class... Params, class... Arguments>
void launch(void (*kernel)(Params...), dim3 grid, int block, int64_t shared, bool dependent, void* stream,
            Arguments... arguments) {
  allow_shared(kernel, shared);
  // A multiprocessor's memory is split in L1 cache and shared memory one way at a time. Kernels that are to run beside
  // each other must want the same split.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute");
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = grid.x;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared;
  config.stream = as_stream(stream);
  config.attrs = attributes;
  config.numAttrs = dependent ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), "cudaLaunchKernelEx");
}

// How a product is shared out: as many blocks as come nearest to one for each multiprocessor. Of the batch nothing
// depends on it, so that a row's sums are the same in any.
struct Sharing {
  int tiles, cluster, chunks;

  Sharing(int64_t depth, int64_t width, int64_t multiprocessors) {
    const int64_t all = ceil_div(depth, kDepth);
    tiles = static_cast<int>(ceil_div(width, kTileColumns));
    const int64_t wanted = (multiprocessors + tiles / 2) / tiles;
    cluster = static_cast<int>(std::clamp<int64_t>(wanted, 1, std::min<int64_t>(kMostBlocks, all)));
    chunks = static_cast<int>(ceil_div(all, cluster));
  }
};

// What lies between the kernels, each [batch, …]. Of several workers' stream there is the one before, too.
template <class T>
struct Scratch {
  float *x, *other;
  T *q, *attended, *hidden;

  explicit Scratch(const Args& a)
      : x(static_cast<float*>(a.scratch)),
        other(x + (a.workers.count > 0 ? a.batch * a.width : 0)),
        q(reinterpret_cast<T*>(other + a.batch * a.width)),
        attended(q + a.batch * own_width(a)),
        hidden(attended + a.batch * own_width(a)) {}
};

template <class T, int kRows>
struct Step {
  const Args& a;
  void* stream;
  Scratch<T> between = Scratch<T>(a);
  int64_t processors = multiprocessors();

  Norm<T> norm(const void* weight, const void* bias) const {
    return {static_cast<const T*>(weight), static_cast<const T*>(bias), static_cast<float>(a.eps),
            static_cast<int>(a.width)};
  }
  Normalised<T> normalised(const void* weight, const void* bias) const { return {between.x, norm(weight, bias)}; }

  template <class Source, class Epilogue>
  void multiply(const Source& source, const void* weight, const void* bias, int64_t depth, int64_t width,
                const Epilogue& epilogue, bool dependent = true) const {
    const Sharing s(depth, width, processors);
    const int batch = static_cast<int>(a.batch);
    const Product<T> product{static_cast<const T*>(weight),
                             static_cast<const T*>(bias),
                             static_cast<int>(depth),
                             static_cast<int>(width),
                             batch,
                             s.chunks};
    launch(column_product_kernel<T, kRows, Source, Epilogue>,
           dim3(static_cast<unsigned>(s.cluster), static_cast<unsigned>(s.tiles)), kThreads,
           Memory<kRows>::bytes(s.cluster, s.chunks, batch), dependent, stream, product, source, epilogue);
  }

  void attend(int layer) const {
    const int64_t wanted = (processors + a.heads / 2) / a.heads;
    const dim3 grid(static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, kMostBlocks)), static_cast<unsigned>(a.heads),
                    static_cast<unsigned>(a.batch));
    launch(a.head_dim <= 64 ? one_query_kernel<T, 8, kRows> : one_query_kernel<T, 16, kRows>, grid, kQueryThreads,
           kQueryWarps * sizeof(Ring<kRows>), true, stream, a, layer, static_cast<float>(scale_of(a, layer) * kLog2e),
           static_cast<const T*>(between.q), between.attended);
  }

  // f(what the LayerNorm of the stream gives): of several workers' when `bias` and that turn's parts are added to it.
  template <class F>
  void with_stream(const void* weight, const void* norm_bias, const void* bias, int turn, F&& f) const {
    if (a.workers.count == 0) return f(normalised(weight, norm_bias));
    float* const streams[2] = {between.x, between.other};
    f(Arrived<T>{norm(weight, norm_bias), streams[turn % 2], streams[(turn + 1) % 2], static_cast<const T*>(bias),
                 Box(a, a.workers.rank), a.workers.rank, turn, a.workers.patience_ns});
  }

  // What ends a half block: to the stream, or to all workers.
  void add(const T* rows, const void* weight, const void* bias, int64_t depth, int turn) const {
    const Matrix<T> source{rows, static_cast<int>(depth)};
    if (a.workers.count == 0) {
      multiply(source, weight, bias, depth, a.width, AddTo{between.x, static_cast<int>(a.width)});
    } else {
      multiply(source, weight, bias, depth, a.width, Send{a, turn});
    }
  }

  void run() const {
    const int64_t width = a.width, own = own_width(a);
    const bool whole = a.workers.count == 0;
    const void* bias = nullptr;  // of the product in front
    if (!whole) launch(embedding_kernel<T>, dim3(1), kThreads, 0, false, stream, a, between.x);
    for (int layer = 0; layer < a.layers; ++layer) {
      const Layer& w = a.weights[layer];
      const auto qkv = [&](const auto& source, bool dependent = true) {
        multiply(source, w.attention_weight, w.attention_bias, width, 3 * own, ToCache<T>{a, between.q, layer},
                 dependent);
      };
      if (layer == 0 && whole) {  // what came before may have written the weights: this one begins when that has ended
        qkv(Embedded<T>{a, between.x, norm(w.ln_1_weight, w.ln_1_bias)}, false);
      } else {
        with_stream(w.ln_1_weight, w.ln_1_bias, bias, 2 * layer, qkv);
      }
      attend(layer);
      add(between.attended, w.projection_weight, w.projection_bias, own, 2 * layer + 1);
      with_stream(w.ln_2_weight, w.ln_2_bias, w.projection_bias, 2 * layer + 1, [&](const auto& source) {
        multiply(source, w.fc_weight, w.fc_bias, width, a.inner,
                 Gelu<T>{between.hidden, static_cast<int>(a.inner), a.tanh});
      });
      add(between.hidden, w.second_weight, w.second_bias, a.inner, 2 * layer + 2);
      bias = w.second_bias;
    }
    const int64_t blocks = std::min(processors, ceil_div(a.vocab, kRowColumns * kWarps));
    const int64_t chunks = ceil_div(width, kRowDepth) * (kRowDepth / kDepth);
    with_stream(a.ln_weight, a.ln_bias, bias, static_cast<int>(2 * a.layers), [&](const auto& source) {
      launch(logits_kernel<T, kRows, std::decay_t<decltype(source)>>, dim3(1, static_cast<unsigned>(blocks)), kThreads,
             Memory<kRows>::bytes(1, static_cast<int>(chunks), static_cast<int>(a.batch)), true, stream, a, source);
    });
  }
};

bool all_aligned(const Args& a) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  bool all = aligned(a.token_weight) && aligned(a.position_weight) && aligned(a.ln_weight) && aligned(a.ln_bias) &&
             aligned(a.k_cache) && aligned(a.v_cache);
  for (const CacheStrides& s : {a.k_stride, a.v_stride}) {
    all = all && s.layer % 8 == 0 && s.batch % 8 == 0 && s.head % 8 == 0 && s.slot % 8 == 0;
  }
  for (int64_t layer = 0; layer < a.layers; ++layer) {
    const Layer& w = a.weights[layer];
    for (const void* weight : {w.ln_1_weight, w.ln_1_bias, w.attention_weight, w.projection_weight, w.ln_2_weight,
                               w.ln_2_bias, w.fc_weight, w.second_weight}) {
      all = all && aligned(weight);
    }
  }
  return all;
}

}  // namespace

std::string v2_dependent_can_implement(const Args& a) {
  if (a.dtype == DType::kFloat32) return "takes float16 or bfloat16, got float32";
  if (a.dtype == DType::kFloat64) return "takes float16 or bfloat16, got float64";
  if (a.head_dim % 8 != 0 || a.head_dim > 128) {
    return "takes head_dim that is a multiple of 8 up to 128, got " + std::to_string(a.head_dim);
  }
  if (a.width % 8 != 0 || a.width > kMostWidth) {
    return "takes a width that is a multiple of 8 up to " + std::to_string(kMostWidth) + ", got " +
           std::to_string(a.width);
  }
  if (a.inner % 8 != 0) return "takes an inner width that is a multiple of 8, got " + std::to_string(a.inner);
  if (a.heads > 65535) return "takes at most 65535 heads, got " + std::to_string(a.heads);
  if (!all_aligned(a)) return "takes weights, and rows of the caches, that begin at multiples of 16 bytes";
  if (compute_capability() < 90) return "needs a GPU of compute capability 9.0 or newer";
  const Sharing second(a.inner, a.width, multiprocessors());
  const int batch = static_cast<int>(a.batch), chunks = static_cast<int>(ceil_div(a.width, kRowDepth)) * 4;
  const auto bytes = batch == 1 ? Memory<1>::bytes : Memory<kMostRows>::bytes;
  return too_much_shared_memory(std::max(bytes(second.cluster, second.chunks, batch), bytes(1, chunks, batch)),
                                "rows of x and rings of weights");
}

int64_t v2_dependent_scratch_bytes(const Args& a) {
  const int64_t streams = a.workers.count > 0 ? 2 : 1;
  return a.batch * (streams * a.width * int64_t{sizeof(float)} + (2 * own_width(a) + a.inner) * size_of(a.dtype));
}

void v2_dependent(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    if (a.batch == 1) {
      Step<T, 1>{a, stream}.run();
    } else if (a.batch <= 8) {
      Step<T, 8>{a, stream}.run();
    } else {
      Step<T, kMostRows>{a, stream}.run();
    }
  });
}

}  // namespace kf::KF_BACKEND::decode_step
