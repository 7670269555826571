// Exercise 2: the softmax of a row, and each number of it is read twice: once for maximum and sum, once for the
// weights.
//
//   kernel-fusion learn check 2_one_pass
//   kernel-fusion simt exercises/solutions/2_one_pass.cu
//   nvcc -O3 -I ../common/include exercises/solutions/2_one_pass.cu && ./a.out        with a GPU
//
// Counted: global load requests
#include <kf/exercise.h>

__device__ int reads;

// All reads go through here, and are counted.
__device__ float load(const float* x, int i) {
  atomicAdd(&reads, 1);
  return x[i];
}

// A thread a row.
__global__ void softmax(const float* x, float* y, int rows, int width) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float greatest = -INFINITY, sum = 0;
  // SOLUTION: one pass; when a greater number comes, what was added up before is too large by a factor
  // | for (int c = 0; c < width; ++c) greatest = fmaxf(greatest, load(x, row * width + c));
  // | for (int c = 0; c < width; ++c) sum += expf(load(x, row * width + c) - greatest);
  for (int c = 0; c < width; ++c) {
    const float value = load(x, row * width + c);
    const float before = greatest;
    greatest = fmaxf(greatest, value);
    sum = sum * expf(before - greatest) + expf(value - greatest);
  }
  // END
  for (int c = 0; c < width; ++c) y[row * width + c] = expf(load(x, row * width + c) - greatest) / sum;
}

bool right(int rows, int width, float slope) {
  std::vector<float> x(rows * width), y(rows * width, NAN);
  for (int i = 0; i < rows * width; ++i) x[i] = slope * (i % width) + 0.25f * (i * 7919 % 13) - 500;
  const int none = 0;
  int count;
  CHECK(cudaMemcpyToSymbol(reads, &none, sizeof none));
  {
    const OnGpu gpu_x(x), gpu_y(y);
    softmax<<<(rows + 31) / 32, 32>>>(gpu_x.data, gpu_y.data, rows, width);
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  CHECK(cudaMemcpyFromSymbol(&count, reads, sizeof count));
  for (int row = 0; row < rows; ++row) {
    double greatest = -INFINITY, sum = 0;
    for (int c = 0; c < width; ++c) greatest = std::fmax(greatest, x[row * width + c]);
    for (int c = 0; c < width; ++c) sum += std::exp(x[row * width + c] - greatest);
    for (int c = 0; c < width; ++c) {
      const double expected = std::exp(x[row * width + c] - greatest) / sum;
      if (std::fabs(y[row * width + c] - expected) <= 1e-5 * expected + 1e-30) continue;
      std::printf("WRONG: width %d, slope %g: y[%d][%d] is %g, must be %g\n", width, slope, row, c, y[row * width + c],
                  expected);
      return false;
    }
  }
  if (count == 2 * rows * width) return true;
  std::printf("WRONG: right, but each number was read %g times; two are enough\n", 1.0 * count / (rows * width));
  return false;
}

int main() {
  for (const int width : {5, 1, 77}) {
    for (const float slope : {0.5f, -0.5f, 3.0f}) {
      if (!right(40, width, slope)) return 1;
    }
  }
  std::printf("all right\n");
  return 0;
}
