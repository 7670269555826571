// Ladder 3: four lanes share a query.
//
//   kernel-fusion learn check ladder_3_lanes
//   kernel-fusion simt exercises/solutions/ladder_3_lanes.cu
//   nvcc -O3 -arch=native -I ../common/include exercises/solutions/ladder_3_lanes.cu && ./a.out        with a GPU
//
// In ladder_2 a thread keeps 64 numbers of q and 64 of the mean, and few threads fit on a multiprocessor. Give a lane
// 16 of them: the pairs 4c + t for lane t of four, c from 0 to 7, each a __half2. Two shuffles add up a score, and
// every lane must take part in them.
//
// Counted: global load sectors, shared load wavefronts, shuffles
#include "../ladder.h"

// SOLUTION: a kernel, and `attention`, which launches it
// | void attention(const Problem& p) { (void)p; }
constexpr int kThreads = 256, kQueries = kThreads / 4, kKeys = 32, kPairs = kDim / 2;

__global__ void lanes(Problem p) {
  __shared__ __half2 k[kKeys][kPairs], v[kKeys][kPairs];
  const int first_query = blockIdx.x * kQueries, query = first_query + threadIdx.x / 4, t = threadIdx.x % 4;
  const bool exists = query < p.queries;
  const int seen = exists ? p.seen(query) : 0, seen_by_block = p.seen(min(first_query + kQueries, p.queries) - 1);
  const size_t row = (size_t(blockIdx.y) * p.queries + query) * kPairs, first_key = size_t(blockIdx.y) * p.keys;
  float2 q[8], mean[8] = {};
  Softmax softmax;
  for (int c = 0; c < 8; ++c) q[c] = exists ? __half22float2(((const __half2*)p.q)[row + 4 * c + t]) : float2{};

  for (int first = 0; first < seen_by_block; first += kKeys) {
    __syncthreads();
    for (int i = threadIdx.x; i < min(kKeys, p.keys - first) * kPairs; i += kThreads) {
      k[i / kPairs][i % kPairs] = ((const __half2*)p.k)[(first_key + first) * kPairs + i];
      v[i / kPairs][i % kPairs] = ((const __half2*)p.v)[(first_key + first) * kPairs + i];
    }
    __syncthreads();
    for (int j = 0; j < min(kKeys, seen_by_block - first); ++j) {
      float score = 0;
      for (int c = 0; c < 8; ++c) {
        const float2 pair = __half22float2(k[j][4 * c + t]);
        score += q[c].x * pair.x + q[c].y * pair.y;
      }
      for (int away = 1; away < 4; away *= 2) score += __shfl_xor_sync(kAll, score, away);
      if (first + j >= seen) continue;
      const float factor = softmax.raise(kScale * score), weight = softmax.weight(kScale * score);
      softmax.sum += weight;
      for (int c = 0; c < 8; ++c) {
        const float2 pair = __half22float2(v[j][4 * c + t]);
        mean[c] = {mean[c].x * factor + weight * pair.x, mean[c].y * factor + weight * pair.y};
      }
    }
  }
  const float inverse = seen == 0 ? 0 : 1 / softmax.sum;
  for (int c = 0; exists && c < 8; ++c) {
    ((__half2*)p.out)[row + 4 * c + t] = __floats2half2_rn(mean[c].x * inverse, mean[c].y * inverse);
  }
}

void attention(const Problem& p) { lanes<<<dim3((p.queries + kQueries - 1) / kQueries, p.heads), kThreads>>>(p); }
// END

int main() { return climb(attention, true); }
