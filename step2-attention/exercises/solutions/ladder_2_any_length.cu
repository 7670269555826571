// Ladder 2: any length, and a causal mask.
//
//   kernel-fusion learn check ladder_2_any_length
//   kernel-fusion simt exercises/solutions/ladder_2_any_length.cu
//   nvcc -O3 -arch=native -I ../common/include exercises/solutions/ladder_2_any_length.cu && ./a.out        with a GPU
//
// Begin with your ladder_1. p.seen(query) says how many keys a query sees. No thread may leave before the last barrier;
// no tile is loaded that no query of the block sees; a query that sees nothing gets 0.
//
// Counted: global load sectors, barriers
#include "../ladder.h"

// SOLUTION: a kernel, and `attention`, which launches it
// | void attention(const Problem& p) { (void)p; }
constexpr int kQueries = 64, kKeys = 32;

__global__ void any_length(Problem p) {
  __shared__ __half k[kKeys][kDim], v[kKeys][kDim];
  const int first_query = blockIdx.x * kQueries, query = first_query + threadIdx.x;
  const bool exists = query < p.queries;
  const int seen = exists ? p.seen(query) : 0, seen_by_block = p.seen(min(first_query + kQueries, p.queries) - 1);
  const size_t row = size_t(blockIdx.y) * p.queries + query, first_key = size_t(blockIdx.y) * p.keys;
  float q[kDim], mean[kDim] = {};
  Softmax softmax;
  for (int d = 0; d < kDim; ++d) q[d] = exists ? kScale * __half2float(p.q[row * kDim + d]) : 0;

  for (int first = 0; first < seen_by_block; first += kKeys) {
    __syncthreads();
    for (int i = threadIdx.x; i < min(kKeys, p.keys - first) * kDim; i += kQueries) {
      k[i / kDim][i % kDim] = p.k[(first_key + first) * kDim + i];
      v[i / kDim][i % kDim] = p.v[(first_key + first) * kDim + i];
    }
    __syncthreads();
    for (int j = 0; j < min(kKeys, seen - first); ++j) {
      float score = 0;
      for (int d = 0; d < kDim; ++d) score += q[d] * __half2float(k[j][d]);
      const float factor = softmax.raise(score), weight = softmax.weight(score);
      softmax.sum += weight;
      for (int d = 0; d < kDim; ++d) mean[d] = mean[d] * factor + weight * __half2float(v[j][d]);
    }
  }
  if (!exists) return;
  for (int d = 0; d < kDim; ++d) p.out[row * kDim + d] = __float2half(seen == 0 ? 0 : mean[d] / softmax.sum);
}

void attention(const Problem& p) { any_length<<<dim3((p.queries + kQueries - 1) / kQueries, p.heads), kQueries>>>(p); }
// END

int main() { return climb(attention, true); }
