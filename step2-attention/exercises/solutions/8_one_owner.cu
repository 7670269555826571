// Exercise 8: gradients of values, the same to the last bit in whatever order blocks come.
//
//   kernel-fusion learn check 8_one_owner
//   kernel-fusion simt exercises/solutions/8_one_owner.cu
//   nvcc -O3 -I ../common/include exercises/solutions/8_one_owner.cu && ./a.out        with a GPU
//
// Counted: global load requests, global atomic requests
#include <kf/exercise.h>

constexpr int kDim = 4;

// dv[j] is the sum of weight[i][j] * grad[i] over the queries i that see key j: those with i >= j. dv is 0 before.
// `order` stands for a GPU, on which blocks come in any order: it says which query, or which key, a thread takes, and
// the check shuffles it.
__global__ void gradient_of_values(const float* weight, const float* grad, float* dv, const float* order, int length) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  if (thread >= length) return;
  const int mine = static_cast<int>(order[thread]);
  // SOLUTION: give each sum an owner; keep `mine`, and add without atomics
  // | for (int j = 0; j <= mine; ++j) {  // a thread a query, which adds to all keys that it sees
  // |   for (int d = 0; d < kDim; ++d) atomicAdd(&dv[j * kDim + d], weight[mine * length + j] * grad[mine * kDim + d]);
  // | }
  float sum[kDim] = {};  // a thread a key
  for (int i = mine; i < length; ++i) {
    for (int d = 0; d < kDim; ++d) sum[d] += weight[i * length + mine] * grad[i * kDim + d];
  }
  for (int d = 0; d < kDim; ++d) dv[mine * kDim + d] = sum[d];
  // END
}

bool right(int length) {
  std::vector<float> weight(length * length, NAN), grad(length * kDim), order(length), first;  // NaN: not to be read
  for (int i = 0; i < length; ++i) {
    for (int j = 0; j <= i; ++j) weight[i * length + j] = 0.1f + 1.0f / (1 + (i * 7919 + j * 31) % 29);
  }
  for (int i = 0; i < length * kDim; ++i) grad[i] = 0.3f * (i * 104729 % 23) - 3;
  for (const int step : {1, 37, length - 1}) {  // coprime to the lengths below, or 0 at length 1
    std::vector<float> dv(length * kDim);
    for (int i = 0; i < length; ++i) order[i] = static_cast<float>(i * step % length);
    {
      const OnGpu gpu_weight(weight), gpu_grad(grad), gpu_dv(dv), gpu_order(order);
      gradient_of_values<<<(length + 31) / 32, 32>>>(gpu_weight.data, gpu_grad.data, gpu_dv.data, gpu_order.data,
                                                     length);
      CHECK(cudaGetLastError());
      gpu_dv.read(dv);
    }
    for (int e = 0; e < length * kDim; ++e) {
      double expected = 0;
      for (int i = e / kDim; i < length; ++i)
        expected += double(weight[i * length + e / kDim]) * grad[i * kDim + e % kDim];
      if (std::fabs(dv[e] - expected) <= 1e-4) continue;
      std::printf("WRONG: length %d: dv[%d][%d] is %g, must be %g\n", length, e / kDim, e % kDim, dv[e], expected);
      return false;
    }
    if (first.empty()) first = dv;
    for (int e = 0; e < length * kDim; ++e) {
      if (dv[e] == first[e]) continue;
      std::printf("WRONG: length %d: dv[%d][%d] is %.9g in one order and %.9g in another\n", length, e / kDim, e % kDim,
                  first[e], dv[e]);
      return false;
    }
  }
  return true;
}

int main() {
  for (const int length : {1, 2, 33, 100}) {
    if (!right(length)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
