// Exercise 2: one query a row, over a cache in which each row begins and ends elsewhere.
//
//   kernel-fusion learn check 2_left_padding
//   kernel-fusion simt exercises/solutions/2_left_padding.cu
//   nvcc -O3 -I ../common/include exercises/solutions/2_left_padding.cu && ./a.out        with a GPU
//
// Counted: global load requests, global load sectors
#include <kf/exercise.h>

constexpr int kDim = 32;  // of a head, and lanes of a warp

// The sum of what the lanes have, in all lanes.
__device__ float warp_sum(float x) {
  for (int away = 16; away > 0; away /= 2) x += __shfl_xor_sync(0xffffffffu, x, away);
  return x;
}

// Prompts of unequal length, flush right: of row b the keys begin[b] <= j < end[b] exist, and in the rest of the caches
// lies anything. A block of one warp for each row; each lane has one number of the query, and of the output. q and out
// are [batch, kDim], k and v [batch, capacity, kDim]. lse is the logarithm of what softmax divides by, [batch]. Where
// no key weighs anything, out is 0 and lse is -infinity.
__global__ void attend(const float* q, const float* k, const float* v, const int* begin, const int* end, float* out,
                       float* lse, int capacity) {
  const int row = blockIdx.x, lane = threadIdx.x;
  const float query = q[row * kDim + lane] / sqrtf(kDim);
  const float *keys = k + row * capacity * kDim + lane, *values = v + row * capacity * kDim + lane;
  float maximum = -INFINITY, sum = 0, weighted = 0;  // of the keys so far
  // SOLUTION: the keys that exist, one after the other, each read once; then what no key at all comes to
  // | for (int j = 0; j < capacity; ++j) {
  // |   const float score = warp_sum(query * keys[j * kDim]);
  // |   sum += expf(score);
  // |   weighted += expf(score) * values[j * kDim];
  // | }
  // | maximum = 0;
  // | (void)begin, (void)end;
  for (int j = begin[row]; j < end[row]; ++j) {
    const float score = warp_sum(query * keys[j * kDim]);
    if (score == -INFINITY) continue;  // weighs nothing, and -inf - -inf is NaN
    const float grown = fmaxf(maximum, score), keep = expf(maximum - grown), weight = expf(score - grown);
    sum = keep * sum + weight;
    weighted = keep * weighted + weight * values[j * kDim];
    maximum = grown;
  }
  if (sum == 0) sum = 1;  // 0 / 1, and -inf + log(1)
  // END
  out[row * kDim + lane] = weighted / sum;
  if (lane == 0) lse[row] = maximum + logf(sum);
}

bool right(const std::vector<int>& begin, const std::vector<int>& end, int capacity, float size) {
  const int batch = static_cast<int>(begin.size()), n = batch * kDim;
  std::vector<float> q(n), k(n * capacity, NAN), v(n * capacity, NAN), out(n, NAN), lse(batch, NAN);
  for (int i = 0; i < n; ++i) q[i] = size * (1 + i % 7);
  for (int row = 0; row < batch; ++row) {
    for (int i = begin[row] * kDim; i < end[row] * kDim; ++i) {
      k[row * capacity * kDim + i] = i / kDim % 5 == 2 ? -INFINITY : 0.125f * (i * 7919 % 17 - 8);
      v[row * capacity * kDim + i] = static_cast<float>(i * 104729 % 31);
    }
  }
  {
    const OnGpu<float> gpu_q(q), gpu_k(k), gpu_v(v), gpu_out(out), gpu_lse(lse);
    const OnGpu<int> gpu_begin(begin), gpu_end(end);
    attend<<<batch, kDim>>>(gpu_q.data, gpu_k.data, gpu_v.data, gpu_begin.data, gpu_end.data, gpu_out.data,
                            gpu_lse.data, capacity);
    CHECK(cudaGetLastError());
    gpu_out.read(out), gpu_lse.read(lse);
  }
  for (int i = 0; i < n; ++i) {
    const int row = i / kDim, first = row * capacity;
    std::vector<double> scores(capacity, -INFINITY);
    double maximum = -INFINITY, sum = 0, weighted = 0;
    for (int j = begin[row]; j < end[row]; ++j) {
      scores[j] = 0;
      for (int d = 0; d < kDim; ++d) scores[j] += q[row * kDim + d] * k[(first + j) * kDim + d] / std::sqrt(kDim);
      maximum = std::fmax(maximum, scores[j]);
    }
    for (int j = begin[row]; j < end[row] && maximum > -INFINITY; ++j) {
      sum += std::exp(scores[j] - maximum);
      weighted += std::exp(scores[j] - maximum) * v[(first + j) * kDim + i % kDim];
    }
    const double expected = sum > 0 ? weighted / sum : 0, log_sum = sum > 0 ? maximum + std::log(sum) : -INFINITY;
    const bool same = lse[row] == log_sum || std::fabs(lse[row] - log_sum) <= 1e-4 * (1 + std::fabs(log_sum));
    if (same && std::fabs(out[i] - expected) <= 1e-3) continue;
    std::printf("WRONG: keys %d to %d of %d: out[%d][%d] is %g, must be %g; lse is %g, must be %g\n", begin[row],
                end[row], capacity, row, i % kDim, out[i], expected, lse[row], log_sum);
    return false;
  }
  return true;
}

int main() {
  for (const float size : {0.1f, 10.0f}) {
    if (!right({0}, {1}, 1, size) || !right({0, 3, 5, 2}, {7, 7, 6, 7}, 7, size)) return 1;
    if (!right({4, 0, 2, 40}, {4, 0, 3, 64}, 64, size)) return 1;  // none, none, one that is -infinity, many
  }
  std::printf("all right\n");
  return 0;
}
