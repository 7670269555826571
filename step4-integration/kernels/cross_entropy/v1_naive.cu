// cross_entropy v1_naive: a block a row, three passes
//
// Idea      Separately, log_softmax writes a matrix as large as the logits, the loss takes one number a row from it,
//           and the gradient is a third matrix. Here a block finds its row's maximum, then its sum, and has the loss;
//           the third pass writes the gradient, over the logits themselves where these are no longer needed.
// Launch    grid rows, block 256, 32 values of shared memory
// Moves     4·rows·width·sizeof(T) bytes where no cache helps: three reads, one write (without the gradient two
//           reads); about 6·rows·width FLOPs and 2·rows·width exponentials
// Limits    rows ≤ 2³¹−1
#include <kf/launch.h>
#include <step2/reduce.h>

#include "row.h"

namespace kf::KF_BACKEND::cross_entropy {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void v1_naive_kernel(Rows<T> a) {
  using C = compute_t<T>;
  __shared__ C shared[kWarpSize];
  const Row<T> row(a, blockIdx.x);
  if (row.skip()) return;

  C max = -INFINITY;
  for (int64_t c = threadIdx.x; c < row.width; c += kThreads) max = greater_of(max, to_compute(row.logits[c]));
  max = finite(block_max(max, shared));

  C sum = 0;
  for (int64_t c = threadIdx.x; c < row.width; c += kThreads) sum += exponential(to_compute(row.logits[c]) - max);
  sum = block_sum(sum, shared);  // its barriers also see to it that all have read the target's logit

  row.write_loss(max, sum);
  if (row.grad == nullptr) return;
  const C factor = row.weight / sum;
  for (int64_t c = threadIdx.x; c < row.width; c += kThreads) {
    const C p = exponential(to_compute(row.logits[c]) - max) * factor;
    row.grad[c] = from_compute<T>(c == row.target ? p - row.weight : p);
  }
}

}  // namespace

std::string v1_naive_can_implement(const Args& a) { return can_implement_a_block_a_row(a); }

void v1_naive(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    v1_naive_kernel<<<static_cast<unsigned>(a.rows), kThreads, 0, as_stream(stream)>>>(Rows<T>(a));
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::cross_entropy
