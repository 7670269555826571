// Bug hunt 1: softmax, a warp a row. It is right for most rows. Which are wrong, and why?
//
//   kernel-fusion learn check hunt_1_cold_rows
//   kernel-fusion simt exercises/solutions/hunt_1_cold_rows.cu
//   nvcc -O3 -I ../common/include exercises/solutions/hunt_1_cold_rows.cu && ./a.out        with a GPU
#include <kf/exercise.h>

__global__ void softmax(const float* x, float* y, int width) {
  const float* row = x + blockIdx.x * width;
  // SOLUTION
  // | float greatest = 0;
  float greatest = -INFINITY;
  // END
  for (int c = threadIdx.x; c < width; c += 32) greatest = fmaxf(greatest, row[c]);
  for (int away = 16; away > 0; away /= 2) greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, away));
  float sum = 0;
  for (int c = threadIdx.x; c < width; c += 32) sum += expf(row[c] - greatest);
  for (int away = 16; away > 0; away /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
  for (int c = threadIdx.x; c < width; c += 32) y[blockIdx.x * width + c] = expf(row[c] - greatest) / sum;
}

bool right(int width, float shift) {
  const int rows = 4;
  std::vector<float> x(rows * width), y(rows * width, NAN);
  for (int i = 0; i < rows * width; ++i) x[i] = shift + 0.25f * (i * 7919 % 13);
  {
    const OnGpu gpu_x(x), gpu_y(y);
    softmax<<<rows, 32>>>(gpu_x.data, gpu_y.data, width);
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  for (int row = 0; row < rows; ++row) {
    double sum = 0;
    for (int c = 0; c < width; ++c) sum += std::exp(double(x[row * width + c]) - shift);
    for (int c = 0; c < width; ++c) {
      const double expected = std::exp(double(x[row * width + c]) - shift) / sum;
      if (std::fabs(y[row * width + c] - expected) <= 1e-5 * expected) continue;
      std::printf("numbers from %g on: WRONG: y[%d][%d] is %g, must be %g\n", shift, row, c, y[row * width + c],
                  expected);
      return false;
    }
  }
  std::printf("numbers from %g on: right\n", shift);
  return true;
}

int main() {
  bool all = true;
  for (const float shift : {0.0f, 300.0f, -1.0f, -300.0f}) all = right(100, shift) && all;
  if (!all) {
    std::printf(
        "Hint: softmax does not change when a number is added to the whole row. What does the kernel subtract?\n");
    return 1;
  }
  std::printf("all right\n");
  return 0;
}
