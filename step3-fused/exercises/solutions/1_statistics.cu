// Exercise 1: mean and variance of a row, in one warp: what LayerNorm needs.
//
//   kernel-fusion learn check 1_statistics
//   kernel-fusion simt exercises/solutions/1_statistics.cu
//   nvcc -O3 -I ../common/include exercises/solutions/1_statistics.cu && ./a.out        with a GPU
//
// Counted: global load requests, shared load requests, shuffles
#include <kf/exercise.h>

// The sum of what the lanes have, in all lanes.
__device__ float warp_sum(float x) {
  // SOLUTION: five steps of __shfl_xor_sync
  // | return x;
  for (int away = 16; away > 0; away /= 2) x += __shfl_xor_sync(0xffffffffu, x, away);
  return x;
  // END
}

// A block of one warp for each row; element row * 32 + lane is what that lane takes for the mean, for the variance.
__global__ void statistics(const float* x, float* means, float* variances, int width) {
  const int lane = threadIdx.x;
  const float* row = x + blockIdx.x * width;
  // SOLUTION: the mean; then the variance, in a second pass over the row
  // | const float mean = row[0], variance = 0;
  float sum = 0, squares = 0;
  for (int c = lane; c < width; c += 32) sum += row[c];
  const float mean = warp_sum(sum) / width;
  for (int c = lane; c < width; c += 32) squares += (row[c] - mean) * (row[c] - mean);
  const float variance = warp_sum(squares) / width;
  // END
  means[blockIdx.x * 32 + lane] = mean;
  variances[blockIdx.x * 32 + lane] = variance;
}

bool right(int width, float around) {
  const int rows = 5;
  std::vector<float> x(rows * width), means(rows * 32, NAN), variances(rows * 32, NAN);
  for (int i = 0; i < rows * width; ++i) x[i] = around + 0.25f * (i * 7919 % 13);
  {
    const OnGpu gpu_x(x), gpu_means(means), gpu_variances(variances);
    statistics<<<rows, 32>>>(gpu_x.data, gpu_means.data, gpu_variances.data, width);
    CHECK(cudaGetLastError());
    gpu_means.read(means);
    gpu_variances.read(variances);
  }
  for (int i = 0; i < rows * 32; ++i) {
    const int row = i / 32;
    double mean = 0, variance = 0;
    for (int c = 0; c < width; ++c) mean += x[row * width + c] / width;
    for (int c = 0; c < width; ++c) variance += std::pow(x[row * width + c] - mean, 2) / width;
    if (std::fabs(means[i] - mean) <= 1e-3 && std::fabs(variances[i] - variance) <= 1e-3) continue;
    std::printf(
        "WRONG: width %d, numbers from %g on: lane %d of row %d has mean %g and variance %g, must be %g and %g\n",
        width, around, i % 32, row, means[i], variances[i], mean, variance);
    return false;
  }
  return true;
}

int main() {
  for (const float around : {0.0f, 1000.0f}) {
    for (const int width : {32, 1, 31, 33, 768}) {
      if (!right(width, around)) return 1;
    }
  }
  std::printf("all right\n");
  return 0;
}
