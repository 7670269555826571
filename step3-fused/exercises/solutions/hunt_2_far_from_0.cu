// Bug hunt 2: LayerNorm, a warp a row. It is right for most rows. Which are wrong, and why?
//
//   kernel-fusion learn check hunt_2_far_from_0
//   kernel-fusion simt exercises/solutions/hunt_2_far_from_0.cu
//   nvcc -O3 -I ../common/include exercises/solutions/hunt_2_far_from_0.cu && ./a.out        with a GPU
#include <kf/exercise.h>

// The sum of what the lanes have, in all lanes.
__device__ float warp_sum(float x) {
  for (int away = 16; away > 0; away /= 2) x += __shfl_xor_sync(0xffffffffu, x, away);
  return x;
}

__global__ void layer_norm(const float* x, float* y, int width) {
  const float* row = x + blockIdx.x * width;
  float sum = 0, squares = 0;
  // SOLUTION
  // | for (int c = threadIdx.x; c < width; c += 32) sum += row[c], squares += row[c] * row[c];
  for (int c = threadIdx.x; c < width; c += 32) sum += row[c];
  // END
  const float mean = warp_sum(sum) / width;
  // SOLUTION
  // | const float variance = warp_sum(squares) / width - mean * mean;
  for (int c = threadIdx.x; c < width; c += 32) squares += (row[c] - mean) * (row[c] - mean);
  const float variance = warp_sum(squares) / width;
  // END
  const float rstd = 1 / sqrtf(variance + 1e-5f);
  for (int c = threadIdx.x; c < width; c += 32) y[blockIdx.x * width + c] = (row[c] - mean) * rstd;
}

bool right(int width, float around) {
  const int rows = 4;
  std::vector<float> x(rows * width), y(rows * width, NAN);
  for (int i = 0; i < rows * width; ++i) x[i] = around + 0.25f * (i * 7919 % 13 - 6);
  {
    const OnGpu gpu_x(x), gpu_y(y);
    layer_norm<<<rows, 32>>>(gpu_x.data, gpu_y.data, width);
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  for (int row = 0; row < rows; ++row) {
    double mean = 0, variance = 0;
    for (int c = 0; c < width; ++c) mean += double(x[row * width + c]) / width;
    for (int c = 0; c < width; ++c) variance += std::pow(x[row * width + c] - mean, 2) / width;
    for (int c = 0; c < width; ++c) {
      const double expected = (x[row * width + c] - mean) / std::sqrt(variance + 1e-5);
      if (std::fabs(y[row * width + c] - expected) <= 1e-3) continue;
      std::printf("numbers around %g: WRONG: y[%d][%d] is %g, must be %g\n", around, row, c, y[row * width + c],
                  expected);
      return false;
    }
  }
  std::printf("numbers around %g: right\n", around);
  return true;
}

int main() {
  bool all = true;
  for (const float around : {0.0f, 10.0f, -30.0f, 1000.0f, -4000.0f}) all = right(100, around) && all;
  if (!all) {
    std::printf("Hint: the spread is the same everywhere. How many digits has a float, and where do they go?\n");
    return 1;
  }
  std::printf("all right\n");
  return 0;
}
