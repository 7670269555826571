// Ladder 6: while a tile is multiplied, the next one is on its way.
//
//   kernel-fusion learn check ladder_6_two_stages
//   kernel-fusion simt -I include exercises/solutions/ladder_6_two_stages.cu
//   nvcc -O3 -arch=native -I include -I ../common/include exercises/solutions/ladder_6_two_stages.cu && ./a.out
//
// Begin with your ladder_5. cp_async_16(to, from, bytes) starts a copy of 16 bytes (0 bytes: zeros), cp_async_commit()
// closes a group, cp_async_wait<0>() waits for those of this thread; a barrier waits for the others'. Tiles take turns
// in two stages, and one barrier a tile is enough. Where?
//
// Counted: global load sectors, shared load requests, barriers
#include <step2/cp_async.h>
#include <step2/mma.h>

#include "../ladder.h"

// SOLUTION: a kernel, and `attention`, which launches it
// | void attention(const Problem& p) { (void)p; }
__global__ void two_stages(Problem p) {
  __shared__ __align__(16) __half k[2][64][kPitch], v[2][64][kPitch];
  const int lane = threadIdx.x % 32, warp_query = blockIdx.x * 64 + threadIdx.x / 32 * 16;
  const size_t first_row = size_t(blockIdx.y) * p.queries + warp_query, first_key = size_t(blockIdx.y) * p.keys;
  const int query[2] = {warp_query + lane / 4, warp_query + lane / 4 + 8};
  uint32_t q[4][4];
  float mean[8][4] = {};  // of 8 columns each; [0] and [1] of the first query, [2] and [3] of the second
  Softmax softmax[2];     // whose sums are of this lane's keys
  load_a(q, p.q + first_row * kDim, p.queries - warp_query);
  const auto issue_loads = [&](int first, int stage) {
    for (int i = threadIdx.x; i < 64 * 8; i += 128) {
      const int bytes = first + i / 8 < p.keys ? 16 : 0;
      const size_t from = bytes == 0 ? 0 : (first_key + first) * kDim + i * 8;
      cp_async_16(&k[stage][i / 8][i % 8 * 8], p.k + from, bytes);
      cp_async_16(&v[stage][i / 8][i % 8 * 8], p.v + from, bytes);
    }
    cp_async_commit();
  };
  const int end = p.seen(min(int(blockIdx.x) * 64 + 64, p.queries) - 1);
  issue_loads(0, 0);
  for (int first = 0, stage = 0; first < end; first += 64, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this tile is there, and nobody reads the one before any more
    if (first + 64 < end) issue_loads(first + 64, stage ^ 1);
    for (int j = 0; j < 64; j += 16) {
      float score[2][4] = {}, most[2] = {-INFINITY, -INFINITY};
      uint32_t b[4], weight[4];
      for (int c = 0; c < 4; ++c) {
        ldmatrix<4>(b, &k[stage][j + lane / 16 * 8 + lane % 8][16 * c + lane / 8 % 2 * 8]);
        for (int n = 0; n < 2; ++n) mma_m16n8k16<__half>(score[n], q[c], {b[2 * n], b[2 * n + 1]});
      }
      for (int i = 0; i < 8; ++i) {
        float& s = score[i / 4][i % 4];
        s = first + j + i / 4 * 8 + lane % 4 * 2 + i % 2 < p.seen(query[i / 2 % 2]) ? kScale * s : -INFINITY;
        most[i / 2 % 2] = fmaxf(most[i / 2 % 2], s);
      }
      for (int r = 0; r < 2; ++r) {
        const float factor = softmax[r].raise(quad_max(most[r]));
        for (int n = 0; n < 8; ++n) mean[n][2 * r] *= factor, mean[n][2 * r + 1] *= factor;
        for (int n = 0; n < 2; ++n) {
          const float low = softmax[r].weight(score[n][2 * r]), high = softmax[r].weight(score[n][2 * r + 1]);
          softmax[r].sum += low + high;
          weight[2 * n + r] = pack<__half>(low, high);
        }
      }
      for (int n = 0; n < 8; ++n) {
        if (n % 2 == 0) ldmatrix_transposed<4>(b, &v[stage][j + lane % 16][8 * n + lane / 16 * 8]);
        mma_m16n8k16<__half>(mean[n], weight, {b[n % 2 * 2], b[n % 2 * 2 + 1]});
      }
    }
  }
  cp_async_wait<0>();  // where there was no tile, the first one's copies
  store_means(p.out + first_row * kDim, p.queries - warp_query, mean, softmax);
}

void attention(const Problem& p) { two_stages<<<dim3((p.queries + 63) / 64, p.heads), 128>>>(p); }
// END

int main() { return climb(attention, true); }
