// Exercise 3: attention of one query, key after key; no score is stored, and the output is right after each key.
//
//   kernel-fusion learn check 3_attention_in_one_pass
//   kernel-fusion simt exercises/solutions/3_attention_in_one_pass.cu
//   nvcc -O3 -I ../common/include exercises/solutions/3_attention_in_one_pass.cu && ./a.out        with a GPU
//
// Counted: global load requests
#include <kf/exercise.h>

#include <algorithm>

constexpr int kDim = 8;

// A thread a query. Query i sees keys j <= i + keys - queries, which may be none: then its output is 0.
__global__ void attention(const float* q, const float* k, const float* v, float* out, int queries, int keys) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= queries) return;
  const int seen = i + keys - queries + 1;
  float greatest = -INFINITY, sum = 0, mean[kDim] = {};  // mean: the values' weighted sum, until it is divided by sum
  for (int j = 0; j < seen; ++j) {
    float score = 0;
    for (int d = 0; d < kDim; ++d) score += q[i * kDim + d] * k[j * kDim + d];
    // SOLUTION: take this key in: greatest, sum, and mean
    // | sum += 1;  // a placeholder: it goes
    const float raised = fmaxf(greatest, score);
    const float factor = expf(greatest - raised), weight = expf(score - raised);
    greatest = raised;
    sum = sum * factor + weight;
    for (int d = 0; d < kDim; ++d) mean[d] = mean[d] * factor + weight * v[j * kDim + d];
    // END
  }
  for (int d = 0; d < kDim; ++d) out[i * kDim + d] = sum == 0 ? 0 : mean[d] / sum;
}

bool right(int queries, int keys, float steep) {
  std::vector<float> q(queries * kDim), k(keys * kDim), v(keys * kDim), out(queries * kDim, NAN);
  for (int i = 0; i < queries * kDim; ++i) q[i] = 0.1f * (i * 7919 % 21) - 1;
  for (int i = 0; i < keys * kDim; ++i) k[i] = steep * (0.1f * (i * 104729 % 23) - 1), v[i] = 0.5f * (i % 11);
  {
    const OnGpu gpu_q(q), gpu_k(k), gpu_v(v), gpu_out(out);
    attention<<<(queries + 31) / 32, 32>>>(gpu_q.data, gpu_k.data, gpu_v.data, gpu_out.data, queries, keys);
    CHECK(cudaGetLastError());
    gpu_out.read(out);
  }
  for (int i = 0; i < queries; ++i) {
    const int seen = std::max(i + keys - queries + 1, 0);
    std::vector<double> score(seen);
    double greatest = -INFINITY, sum = 0, mean[kDim] = {};
    for (int j = 0; j < seen; ++j) {
      for (int d = 0; d < kDim; ++d) score[j] += double(q[i * kDim + d]) * k[j * kDim + d];
      greatest = std::fmax(greatest, score[j]);
    }
    for (int j = 0; j < seen; ++j) {
      sum += std::exp(score[j] - greatest);
      for (int d = 0; d < kDim; ++d) mean[d] += std::exp(score[j] - greatest) * v[j * kDim + d];
    }
    for (int d = 0; d < kDim; ++d) {
      const double expected = seen == 0 ? 0 : mean[d] / sum;
      if (std::fabs(out[i * kDim + d] - expected) <= 1e-4) continue;
      std::printf("WRONG: %d queries, %d keys, times %g: out[%d][%d] is %g, must be %g\n", queries, keys, steep, i, d,
                  out[i * kDim + d], expected);
      return false;
    }
  }
  return true;
}

int main() {
  for (const float steep : {1.0f, 100.0f}) {
    if (!right(33, 33, steep) || !right(3, 50, steep) || !right(50, 3, steep) || !right(1, 1, steep)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
