// Bug hunt 4: the gradient of attention's scores. It is right where there are at least as many keys as queries.
//
//   kernel-fusion learn check hunt_4_lost_delta
//   kernel-fusion simt exercises/solutions/hunt_4_lost_delta.cu
//   nvcc -O3 -I ../common/include exercises/solutions/hunt_4_lost_delta.cu && ./a.out        with a GPU
#include <kf/exercise.h>

constexpr int kDim = 8, kThreads = 32;

// delta[i] = out[i] . grad[i], a thread a query.
__global__ void deltas(const float* out, const float* grad, float* delta, int queries) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= queries) return;
  float sum = 0;
  for (int d = 0; d < kDim; ++d) sum += out[i * kDim + d] * grad[i * kDim + d];
  delta[i] = sum;
}

// grad_score[i][j] = weight[i][j] * (grad[i] . v[j] - delta[i]), a thread a key, a block's y a query.
__global__ void gradients(const float* weight, const float* grad, const float* v, const float* delta, float* grad_score,
                          int keys) {
  const int i = blockIdx.y, j = blockIdx.x * kThreads + threadIdx.x;
  if (j >= keys) return;
  float grad_weight = 0;
  for (int d = 0; d < kDim; ++d) grad_weight += grad[i * kDim + d] * v[j * kDim + d];
  grad_score[i * keys + j] = weight[i * keys + j] * (grad_weight - delta[i]);
}

int blocks(int threads) { return (threads + kThreads - 1) / kThreads; }

bool right(int queries, int keys) {
  std::vector<float> weight(queries * keys), grad(queries * kDim), v(keys * kDim), out(queries * kDim);
  std::vector<float> delta(queries), grad_score(queries * keys, NAN);
  for (int i = 0; i < queries * keys; ++i) weight[i] = 1.0f / keys;
  for (int i = 0; i < queries * kDim; ++i) grad[i] = 0.25f * (i * 7919 % 9);
  for (int i = 0; i < keys * kDim; ++i) v[i] = 0.5f * (i * 104729 % 7), out[i % kDim] += v[i] / keys;
  for (int i = kDim; i < queries * kDim; ++i) out[i] = out[i % kDim];  // all weights are equal
  {
    const OnGpu gpu_weight(weight), gpu_grad(grad), gpu_v(v), gpu_out(out), gpu_delta(delta), gpu_result(grad_score);
    // SOLUTION
    // | deltas<<<blocks(keys), kThreads>>>(gpu_out.data, gpu_grad.data, gpu_delta.data, queries);
    deltas<<<blocks(queries), kThreads>>>(gpu_out.data, gpu_grad.data, gpu_delta.data, queries);
    // END
    CHECK(cudaGetLastError());
    gradients<<<dim3(blocks(keys), queries), kThreads>>>(gpu_weight.data, gpu_grad.data, gpu_v.data, gpu_delta.data,
                                                         gpu_result.data, keys);
    CHECK(cudaGetLastError());
    gpu_result.read(grad_score);
  }
  for (int i = 0; i < queries; ++i) {
    double sum = 0;  // adding a number to all scores of a row changes no weight: so these gradients add up to 0
    for (int j = 0; j < keys; ++j) sum += grad_score[i * keys + j];
    if (std::fabs(sum) <= 1e-4) continue;
    std::printf("%d queries, %d keys: WRONG: the gradients of query %d's scores add up to %g, must be 0\n", queries,
                keys, i, sum);
    return false;
  }
  std::printf("%d queries, %d keys: right\n", queries, keys);
  return true;
}

int main() {
  const bool all = right(20, 20) && right(40, 100) && right(33, 20) && right(100, 40);
  std::printf("%s\n", all ? "all right" : "Hint: which block writes the delta of the query that is named?");
  return all ? 0 : 1;
}
