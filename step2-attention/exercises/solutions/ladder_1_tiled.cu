// Ladder 1: attention in one launch; keys and values come through shared memory, a tile at a time. Lengths here are
// multiples of 64, and there is no mask.
//
//   kernel-fusion learn check ladder_1_tiled
//   kernel-fusion simt exercises/solutions/ladder_1_tiled.cu
//   nvcc -O3 -arch=native -I ../common/include exercises/solutions/ladder_1_tiled.cu && ./a.out        with a GPU
//
// A thread has a query, its softmax and its mean (exercise 3). A block's 64 threads read each tile of 32 keys together.
//
// Counted: launches, global load sectors, barriers
#include "../ladder.h"

// SOLUTION: a kernel, and `attention`, which launches it
// | void attention(const Problem& p) { (void)p; }
constexpr int kQueries = 64, kKeys = 32;

__global__ void tiled(Problem p) {
  __shared__ __half k[kKeys][kDim], v[kKeys][kDim];
  const size_t row = size_t(blockIdx.y) * p.queries + blockIdx.x * kQueries + threadIdx.x;
  const size_t first_key = size_t(blockIdx.y) * p.keys;
  float q[kDim], mean[kDim] = {};
  Softmax softmax;
  for (int d = 0; d < kDim; ++d) q[d] = kScale * __half2float(p.q[row * kDim + d]);

  for (int first = 0; first < p.keys; first += kKeys) {
    __syncthreads();  // nobody reads the tile before any more
    for (int i = threadIdx.x; i < kKeys * kDim; i += kQueries) {
      k[i / kDim][i % kDim] = p.k[(first_key + first) * kDim + i];
      v[i / kDim][i % kDim] = p.v[(first_key + first) * kDim + i];
    }
    __syncthreads();  // the tile is complete
    for (int j = 0; j < kKeys; ++j) {
      float score = 0;
      for (int d = 0; d < kDim; ++d) score += q[d] * __half2float(k[j][d]);
      const float factor = softmax.raise(score), weight = softmax.weight(score);
      softmax.sum += weight;
      for (int d = 0; d < kDim; ++d) mean[d] = mean[d] * factor + weight * __half2float(v[j][d]);
    }
  }
  for (int d = 0; d < kDim; ++d) p.out[row * kDim + d] = __float2half(mean[d] / softmax.sum);
}

void attention(const Problem& p) { tiled<<<dim3(p.queries / kQueries, p.heads), kQueries>>>(p); }
// END

int main() { return climb(attention, false); }
