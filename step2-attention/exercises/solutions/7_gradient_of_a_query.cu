// Exercise 7: the gradient of attention's queries, with weights that nobody has kept.
//
//   kernel-fusion learn check 7_gradient_of_a_query
//   kernel-fusion simt exercises/solutions/7_gradient_of_a_query.cu
//   nvcc -O3 -I ../common/include exercises/solutions/7_gradient_of_a_query.cu && ./a.out        with a GPU
//
// Counted: global load requests, global store requests
#include <kf/exercise.h>

#include <algorithm>

constexpr int kDim = 8;
constexpr float kScale = 0.35f;

// A thread a query, which sees keys j <= i + keys - queries. lse[i] is the log of the sum of exp(score) over these;
// delta[i] is the dot product of query i's output and of its gradient `grad`, which is the sum of weight * grad_weight.
__global__ void gradient_of_queries(const float* q, const float* k, const float* v, const float* grad, const float* lse,
                                    const float* delta, float* dq, int queries, int keys) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= queries) return;
  float sum[kDim] = {};
  for (int j = 0; j <= i + keys - queries; ++j) {
    float score = 0, grad_weight = 0;  // grad_weight: how the loss changes with this key's weight
    for (int d = 0; d < kDim; ++d) score += kScale * q[i * kDim + d] * k[j * kDim + d];
    for (int d = 0; d < kDim; ++d) grad_weight += grad[i * kDim + d] * v[j * kDim + d];
    // SOLUTION: the weight again, how the loss changes with the score, and by that what this key adds to dq
    const float weight = expf(score - lse[i]);
    const float grad_score = weight * (grad_weight - delta[i]);
    for (int d = 0; d < kDim; ++d) sum[d] += kScale * grad_score * k[j * kDim + d];
    // END
  }
  for (int d = 0; d < kDim; ++d) dq[i * kDim + d] = sum[d];
}

// Query i's row of the loss, the sum of grad * out, where q[i][d] is moved by `by`; lse and delta on the way.
double loss(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
            const std::vector<float>& grad, int i, int seen, int moved, double by, double* lse = nullptr) {
  double sum = 0, result = 0;
  for (int j = 0; j < seen; ++j) {
    double score = 0, value = 0;
    for (int d = 0; d < kDim; ++d)
      score += double(kScale) * (q[i * kDim + d] + (d == moved ? by : 0)) * k[j * kDim + d];
    for (int d = 0; d < kDim; ++d) value += double(grad[i * kDim + d]) * v[j * kDim + d];
    sum += std::exp(score);
    result += std::exp(score) * value;
  }
  if (lse != nullptr) *lse = std::log(sum);
  return seen == 0 ? 0 : result / sum;
}

bool right(int queries, int keys) {
  std::vector<float> q(queries * kDim), grad(queries * kDim), dq(queries * kDim, NAN), k(keys * kDim), v(keys * kDim);
  std::vector<float> lse(queries), delta(queries);
  for (int i = 0; i < queries * kDim; ++i) q[i] = 0.1f * (i * 7919 % 21) - 1, grad[i] = 0.2f * (i * 31 % 11) - 1;
  for (int i = 0; i < keys * kDim; ++i) k[i] = 0.1f * (i * 104729 % 23) - 1, v[i] = 0.25f * (i * 13 % 11) - 1;
  for (int i = 0; i < queries; ++i) {
    double exact;
    delta[i] = static_cast<float>(loss(q, k, v, grad, i, std::max(i + keys - queries + 1, 0), 0, 0, &exact));
    lse[i] = static_cast<float>(exact);
  }
  {
    const OnGpu gpu_q(q), gpu_k(k), gpu_v(v), gpu_grad(grad), gpu_lse(lse), gpu_delta(delta), gpu_dq(dq);
    gradient_of_queries<<<(queries + 31) / 32, 32>>>(gpu_q.data, gpu_k.data, gpu_v.data, gpu_grad.data, gpu_lse.data,
                                                     gpu_delta.data, gpu_dq.data, queries, keys);
    CHECK(cudaGetLastError());
    gpu_dq.read(dq);
  }
  for (int e = 0; e < queries * kDim; ++e) {  // q moved a little, up and down
    const int i = e / kDim, d = e % kDim, seen = std::max(i + keys - queries + 1, 0);
    const double expected = (loss(q, k, v, grad, i, seen, d, 1e-5) - loss(q, k, v, grad, i, seen, d, -1e-5)) / 2e-5;
    if (std::fabs(dq[e] - expected) <= 1e-5) continue;
    std::printf("WRONG: %d queries, %d keys: dq[%d][%d] is %g, must be %g\n", queries, keys, i, d, dq[e], expected);
    return false;
  }
  return true;
}

int main() {
  if (!right(20, 20) || !right(3, 50) || !right(50, 3) || !right(1, 1)) return 1;
  std::printf("all right\n");
  return 0;
}
