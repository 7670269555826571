// Exercise 12: two blocks of a cluster share a row, and each tells the other what it has found.
//
//   kernel-fusion learn check 12_across_blocks
//   kernel-fusion simt -I ../step2-attention/include exercises/solutions/12_across_blocks.cu
//   nvcc -O3 -arch=sm_90 -I ../step2-attention/include -I ../common/include exercises/solutions/12_across_blocks.cu &&
//   ./a.out
//
// Counted: global load requests, barriers
#include <kf/exercise.h>
#include <step2/cluster.h>
#include <step2/mbarrier.h>

using namespace kf::KF_BACKEND;

// Two blocks of one warp for each row, half of it each. Lane 0 of both writes the mean and the variance of the whole
// row. remote_address(p, rank) is where p lies in the other block; store_remote_async(address, Pair<float>{a, b},
// barrier) stores two floats there, and its barrier, given by its remote address, counts their 8 bytes.
__global__ void __cluster_dims__(2) statistics(const float* x, float* out, int width) {
  __shared__ alignas(
      8) float theirs[2];  // the sum and the sum of squares around its mean that the other block has found
  __shared__ uint64_t barrier;
  const int lane = threadIdx.x, rank = static_cast<int>(cluster_rank_of_block()), half = width / 2;
  const float* const mine = x + blockIdx.x / 2 * width + rank * half;
  if (lane == 0) {
    mbarrier_init(&barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&barrier, 2 * sizeof(float));
  }
  cluster_sync();  // nobody stores into a block that is not ready
  float sum = 0, squares = 0;
  for (int c = lane; c < half; c += 32) sum += mine[c];
  for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
  for (int c = lane; c < half; c += 32) squares += (mine[c] - sum / half) * (mine[c] - sum / half);
  for (int away = 16; away > 0; away /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, away);
  float mean = NAN, variance = NAN;
  // SOLUTION: send sum and squares to the other block, wait for what it sends, and merge the two halves
  // | (void)theirs, (void)out;
  if (lane == 0) {
    store_remote_async(remote_address(theirs, 1 - rank), Pair<float>{sum, squares}, remote_address(&barrier, 1 - rank));
  }
  mbarrier_wait_cluster(&barrier, 0);
  const float apart = (theirs[0] - sum) / half;  // of the means
  mean = (sum + theirs[0]) / width;
  variance = (squares + theirs[1] + apart * apart * half / 2) / width;
  // END
  if (lane == 0) out[2 * blockIdx.x] = mean, out[2 * blockIdx.x + 1] = variance;
  cluster_sync();  // nobody ends while the other one may still store here
}

int main() {
  for (const int width : {2, 64, 1000}) {
    const int rows = 3;
    std::vector<float> x(rows * width), out(rows * 4, NAN);
    for (int i = 0; i < rows * width; ++i)
      x[i] = 100.0f * (i / width) + (i % width < width / 2 ? 5.0f : 0.1f * (i % 31));
    const OnGpu<float> gpu_x(x), gpu_out(out);
    statistics<<<2 * rows, 32>>>(gpu_x.data, gpu_out.data, width);
    CHECK(cudaGetLastError());
    gpu_out.read(out);
    for (int i = 0; i < 2 * rows; ++i) {
      double mean = 0, variance = 0;
      for (int c = 0; c < width; ++c) mean += double(x[i / 2 * width + c]) / width;
      for (int c = 0; c < width; ++c) variance += std::pow(x[i / 2 * width + c] - mean, 2) / width;
      const bool equal = out[2 * i] == out[2 * (i ^ 1)] && out[2 * i + 1] == out[2 * (i ^ 1) + 1];
      if (equal && std::fabs(out[2 * i] - mean) <= 1e-4 &&
          std::fabs(out[2 * i + 1] - variance) <= 1e-4 * (1 + variance))
        continue;
      std::printf("WRONG: width %d, row %d: block %d has mean %g and variance %g, must be %g and %g, in both blocks\n",
                  width, i / 2, i % 2, out[2 * i], out[2 * i + 1], mean, variance);
      return 1;
    }
  }
  std::printf("all right\n");
  return 0;
}
