// Bug hunt 5: the gradients of keys and values, with a causal mask. One of the two is right.
//
//   kernel-fusion learn check hunt_5_half_a_mask
//   kernel-fusion simt exercises/solutions/hunt_5_half_a_mask.cu
//   nvcc -O3 -I ../common/include exercises/solutions/hunt_5_half_a_mask.cu && ./a.out        with a GPU
#include <kf/exercise.h>

constexpr int kDim = 4;

// A thread a key, over all queries; query i sees keys j <= i. lse[i] is the log of the sum of exp(score) over these.
__global__ void gradients(const float* q, const float* k, const float* v, const float* grad, const float* lse,
                          const float* delta, float* dk, float* dv, int length) {
  const int j = blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= length) return;
  float sum_k[kDim] = {}, sum_v[kDim] = {};
  for (int i = 0; i < length; ++i) {
    float score = 0, grad_weight = 0;
    for (int d = 0; d < kDim; ++d) score += q[i * kDim + d] * k[j * kDim + d];
    for (int d = 0; d < kDim; ++d) grad_weight += grad[i * kDim + d] * v[j * kDim + d];
    // SOLUTION
    // | const float weight = expf(score - lse[i]);
    const float weight = j <= i ? expf(score - lse[i]) : 0;
    // END
    const float grad_score = weight * (grad_weight - delta[i]);
    for (int d = 0; d < kDim; ++d) sum_k[d] += grad_score * q[i * kDim + d];
    for (int d = 0; d < kDim; ++d) sum_v[d] += (j <= i ? weight : 0) * grad[i * kDim + d];
  }
  for (int d = 0; d < kDim; ++d) dk[j * kDim + d] = sum_k[d], dv[j * kDim + d] = sum_v[d];
}

bool close(const char* name, int length, const std::vector<float>& got, const std::vector<double>& expected) {
  for (int e = 0; e < length * kDim; ++e) {
    if (std::fabs(got[e] - expected[e]) <= 1e-4) continue;
    std::printf("length %d, %s: WRONG: %s[%d][%d] is %g, must be %g\n", length, name, name, e / kDim, e % kDim, got[e],
                expected[e]);
    return false;
  }
  std::printf("length %d, %s: right\n", length, name);
  return true;
}

bool right(int length) {
  const int size = length * kDim;
  std::vector<float> q(size), k(size), v(size), grad(size), lse(length), delta(length), dk(size, NAN), dv(size, NAN);
  for (int e = 0; e < size; ++e) {
    q[e] = 0.2f * (e * 7919 % 13) - 1, k[e] = 0.1f * (e * 104729 % 17) - 1;
    v[e] = 0.25f * (e * 31 % 11) - 1, grad[e] = 0.2f * (e * 13 % 11) - 1;
  }
  std::vector<double> exact_dk(size), exact_dv(size), weight(length), grad_weight(length);
  for (int i = 0; i < length; ++i) {  // query by query, only over the keys that it sees
    double sum = 0, mean = 0;
    for (int j = 0; j <= i; ++j) {
      double score = 0;
      grad_weight[j] = 0;
      for (int d = 0; d < kDim; ++d) score += double(q[i * kDim + d]) * k[j * kDim + d];
      for (int d = 0; d < kDim; ++d) grad_weight[j] += double(grad[i * kDim + d]) * v[j * kDim + d];
      sum += weight[j] = std::exp(score);
      mean += weight[j] * grad_weight[j];
    }
    lse[i] = static_cast<float>(std::log(sum)), delta[i] = static_cast<float>(mean / sum);
    for (int e = 0; e < (i + 1) * kDim; ++e) {
      const int j = e / kDim, d = e % kDim;
      exact_dk[e] += weight[j] / sum * (grad_weight[j] - mean / sum) * q[i * kDim + d];
      exact_dv[e] += weight[j] / sum * grad[i * kDim + d];
    }
  }
  {
    const OnGpu gpu_q(q), gpu_k(k), gpu_v(v), gpu_grad(grad), gpu_lse(lse), gpu_delta(delta), gpu_dk(dk), gpu_dv(dv);
    gradients<<<(length + 31) / 32, 32>>>(gpu_q.data, gpu_k.data, gpu_v.data, gpu_grad.data, gpu_lse.data,
                                          gpu_delta.data, gpu_dk.data, gpu_dv.data, length);
    CHECK(cudaGetLastError());
    gpu_dk.read(dk);
    gpu_dv.read(dv);
  }
  return close("dv", length, dv, exact_dv) && close("dk", length, dk, exact_dk);
}

int main() {
  const bool all = right(1) && right(2) && right(50);
  std::printf("%s\n", all ? "all right" : "Hint: which pairs add to dk and which to dv?");
  return all ? 0 : 1;
}
