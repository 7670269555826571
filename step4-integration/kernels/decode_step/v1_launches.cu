// decode_step v1_launches: five launches a layer
//
// Idea      One token of one row is a chain: each product needs all that the one before it made. On a GPU all blocks
//           wait for each other only where a kernel ends, so the chain is cut there, and everything that needs no such
//           wait is folded in. LayerNorm goes into the product behind it: each block computes the row's mean and
//           variance anew. Bias, GELU and residual go into the product before them. k and v are written straight into
//           the cache. Lengths are read on the device. The residual stream is not rounded.
// A layer   LayerNorm, q k v · attention · projection, residual · LayerNorm, fc, GELU · product, residual
// Launch    embed: grid batch. Products: grid (⌈width/32⌉, batch), block 256: 32 columns by 8 parts of the depth.
//           Attention: grid (heads, batch), block 256, a warp a key. Logits: grid (⌈vocab/8⌉, batch), a warp a column
// Moves     all weights once for each row, of which a cache serves all but the first; keys and values once
// Limits    heads ≤ 2³¹−1; a row of the output for each of 8 warps in shared memory
#include <kf/launch.h>
#include <step2/online_softmax.h>

#include "plain_product.h"
#include "rungs.h"

namespace kf::KF_BACKEND::decode_step {
namespace {

// Between the launches, each [batch, …].
template <class C>
struct Scratch {
  C *x, *q, *attended, *hidden;

  explicit Scratch(const Args& a)
      : x(static_cast<C*>(a.scratch)),
        q(x + a.batch * a.width),
        attended(q + a.batch * a.width),
        hidden(attended + a.batch * a.width) {}
};

template <class T>
__global__ void embed_kernel(Args a, compute_t<T>* x) {
  const int row = blockIdx.x;
  const Tokens<T> tokens(a, row);
  for (int64_t c = threadIdx.x; c < a.width; c += kThreads) x[row * a.width + c] = tokens.at(c);
}

// One query of one head. A warp takes a key at a time, its lanes the columns; in the end the warps are put together.
template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(Args a, const compute_t<T>* q, compute_t<T>* attended, int layer, compute_t<T> scale) {
  using C = compute_t<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  C* out = reinterpret_cast<C*>(memory);  // [kWarps, head_dim]
  __shared__ OnlineSoftmax<C> softmaxes[kWarps];
  const int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const Place place(a, row);
  const C* query = q + row * a.width + head * a.head_dim;
  C* of_warp = out + warp * a.head_dim;
  for (int64_t c = lane; c < a.head_dim; c += kWarpSize) of_warp[c] = 0;
  OnlineSoftmax<C> softmax;
  for (int slot = place.begin + warp; slot <= place.slot; slot += kWarps) {
    const T* k = in_cache<const T>(a.k_cache, a.k_stride, layer, row, head, slot);
    const T* v = in_cache<const T>(a.v_cache, a.v_stride, layer, row, head, slot);
    C score = 0;
    for (int64_t c = lane; c < a.head_dim; c += kWarpSize) score += query[c] * scale * to_compute(k[c]);
    score = warp_sum(score);
    const C factor = softmax.push(score), weight = softmax.weight(score);
    for (int64_t c = lane; c < a.head_dim; c += kWarpSize) of_warp[c] = of_warp[c] * factor + weight * to_compute(v[c]);
  }
  if (lane == 0) softmaxes[warp] = softmax;
  __syncthreads();
  OnlineSoftmax<C> all;
  for (int w = 0; w < kWarps; ++w) all.merge(softmaxes[w]);
  for (int64_t c = threadIdx.x; c < a.head_dim; c += kThreads) {
    C sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += out[w * a.head_dim + c] * all.weight(softmaxes[w].max);
    attended[row * a.width + head * a.head_dim + c] = sum / all.sum;
  }
}

// The last product. The embedding's table has a column of it in each row: lanes along the depth.
template <class T>
__global__ void __launch_bounds__(kThreads) logits_kernel(Args a, NormalisedRows<T> source) {
  using C = compute_t<T>;
  const int row = blockIdx.y, lane = threadIdx.x % kWarpSize;
  const int64_t column = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  if (blockIdx.x == 0 && threadIdx.x == 0 && Place(a, row).slot >= 0) a.end[row] += 1;
  const auto x = source.row(row, a.width);
  if (column >= a.vocab) return;
  const T* weight = static_cast<const T*>(a.token_weight) + column * a.width;
  C sum = 0;
  for (int64_t k = lane; k < a.width; k += kWarpSize) sum += x.at(k) * to_compute(weight[k]);
  sum = warp_sum(sum);
  if (lane == 0) static_cast<T*>(a.logits)[row * a.vocab + column] = from_compute<T>(sum);
}

template <class T, class Source, class Epilogue>
void multiply(const Args& a, const Source& source, const void* weight, const void* bias, int64_t depth, int64_t width,
              const Epilogue& epilogue, void* stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(width, kWarpSize)), static_cast<unsigned>(a.batch));
  product_kernel<T><<<grid, kThreads, 0, as_stream(stream)>>>(source, static_cast<const T*>(weight),
                                                              static_cast<const T*>(bias), depth, width, epilogue);
  check_launch();
}

template <class T>
void step(const Args& a, void* stream) {
  using C = compute_t<T>;
  const Scratch<C> s(a);
  const auto batch = static_cast<unsigned>(a.batch);
  const auto normalised = [&](const void* weight, const void* bias) {
    return NormalisedRows<T>{s.x, static_cast<const T*>(weight), static_cast<const T*>(bias), static_cast<C>(a.eps)};
  };
  embed_kernel<T><<<batch, kThreads, 0, as_stream(stream)>>>(a, s.x);
  check_launch();
  const int64_t shared = kWarps * a.head_dim * static_cast<int64_t>(sizeof(C));
  if (shared > 48 * 1024) allow_shared(attention_kernel<T>, shared);
  for (int layer = 0; layer < a.layers; ++layer) {
    const Layer& w = a.weights[layer];
    multiply<T>(a, normalised(w.ln_1_weight, w.ln_1_bias), w.attention_weight, w.attention_bias, a.width, 3 * a.width,
                QkvToCache<T>{a, s.q, layer}, stream);
    attention_kernel<T><<<dim3(static_cast<unsigned>(a.heads), batch), kThreads, shared, as_stream(stream)>>>(
        a, s.q, s.attended, layer, static_cast<C>(scale_of(a, layer)));
    check_launch();
    multiply<T>(a, PlainRows<C>{s.attended}, w.projection_weight, w.projection_bias, a.width, a.width,
                AddToX<C>{s.x, a.width}, stream);
    multiply<T>(a, normalised(w.ln_2_weight, w.ln_2_bias), w.fc_weight, w.fc_bias, a.width, a.inner,
                GeluOf<C>{s.hidden, a.inner, a.tanh}, stream);
    multiply<T>(a, PlainRows<C>{s.hidden}, w.second_weight, w.second_bias, a.inner, a.width, AddToX<C>{s.x, a.width},
                stream);
  }
  const dim3 grid(static_cast<unsigned>(ceil_div(a.vocab, kWarps)), batch);
  logits_kernel<T><<<grid, kThreads, 0, as_stream(stream)>>>(a, normalised(a.ln_weight, a.ln_bias));
  check_launch();
}

}  // namespace

std::string v1_launches_can_implement(const Args& a) {
  if (a.workers.count > 0) return kf::decode_step::kWhole;
  const int64_t size = a.dtype == DType::kFloat64 ? 8 : 4;
  return too_much_shared_memory(kWarps * a.head_dim * size, "a row of the output for each warp");
}

int64_t v1_launches_scratch_bytes(const Args& a) {
  return a.batch * (3 * a.width + a.inner) * (a.dtype == DType::kFloat64 ? 8 : 4);
}

void v1_launches(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) { step<typename decltype(type)::element>(a, stream); });
}

}  // namespace kf::KF_BACKEND::decode_step
