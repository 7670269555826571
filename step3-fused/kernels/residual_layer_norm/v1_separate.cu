// residual_layer_norm v1_separate: two launches
//
// Idea      An addition, a thread an element; then LayerNorm, this step's v2_block where it can, else v1_naive. The
//           sum goes out to memory and comes back: between launches there is no other place for it. In half precision
//           it is also rounded on the way. x_bias and dropout, where there are any, are the addition's, each element
//           with a call of Philox to itself.
// Launch    twice: grid ⌈rows·width/256⌉, block 256; then as layer_norm's rung
// Moves     5·rows·width·sizeof(T) bytes: 3 for the addition, 2 for LayerNorm; about 11·rows·width FLOPs. With x_bias
//           width·sizeof(T) more; dropout moves nothing
// Limits    rows·width ≤ 256·(2³¹−1), rows ≤ 8·(2³¹−1); rounds the sum
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step3/front.h>

#include "../layer_norm/rungs.h"
#include "rungs.h"

namespace kf::KF_BACKEND::residual_layer_norm {
namespace {

constexpr int kThreads = 256;

template <class T, class Front>
__global__ void add_kernel(const T* __restrict__ x, const T* __restrict__ residual, T* __restrict__ sum, int64_t n,
                           int64_t width, Front front) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  front.read();
  compute_t<T> value[1] = {to_compute(x[i])};
  front.apply(i, i % width, value);
  sum[i] = from_compute<T>(value[0] + to_compute(residual[i]));
}

}  // namespace

std::string v1_separate_can_implement(const Args& a) {
  layer_norm::Args second{};
  second.rows = a.rows;
  return layer_norm::v1_naive_can_implement(second);
}

void v1_separate(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const int64_t n = a.rows * a.width;
    with_front<T>(a, [&](auto front) {
      add_kernel<<<static_cast<unsigned>(ceil_div(n, kThreads)), kThreads, 0, as_stream(stream)>>>(
          static_cast<const T*>(a.x), static_cast<const T*>(a.residual), static_cast<T*>(a.sum), n, a.width, front);
    });
  });
  check_launch();
  const layer_norm::Args rest{a.sum, a.weight, a.bias, a.y, a.rows, a.width, a.eps, a.dtype, a.mean, a.rstd};
  layer_norm::v2_block_can_implement(rest).empty() ? layer_norm::v2_block(rest, stream)
                                                   : layer_norm::v1_naive(rest, stream);
}

}  // namespace kf::KF_BACKEND::residual_layer_norm
