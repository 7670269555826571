// Exercise 9: check a gradient without deriving it, by moving each input a little.
//
//   kernel-fusion learn check 9_moved_a_little
//   kernel-fusion simt exercises/solutions/9_moved_a_little.cu
//   nvcc -O3 -I ../common/include exercises/solutions/9_moved_a_little.cu && ./a.out        with a GPU
#include <kf/exercise.h>

// The loss: each output of softmax over x times a number. x[moved] counts as `by` more than it is.
__device__ double loss(const double* x, int width, int moved, double by) {
  double sum = 0, weighted = 0;
  for (int c = 0; c < width; ++c) {
    const double e = exp(x[c] + (c == moved ? by : 0));
    sum += e;
    weighted += e * (c % 5 - 1.5);
  }
  return weighted / sum;
}

// A thread an element of x: how the loss changes with it.
__global__ void slopes(const double* x, double* slope, int width) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= width) return;
  // SOLUTION: the slope at x[c], with an error of less than 1e-9; choose how far to move
  // | slope[c] = (loss(x, width, c, 0.01) - loss(x, width, c, 0)) / 0.01;
  const double by = 1e-5;
  slope[c] = (loss(x, width, c, by) - loss(x, width, c, -by)) / (2 * by);
  // END
}

bool right(int width) {
  std::vector<double> x(width), slope(width, NAN);
  double sum = 0, weighted = 0;
  for (int c = 0; c < width; ++c) {
    x[c] = 0.1 * (c * 7919 % 31) - 1;
    sum += std::exp(x[c]);
    weighted += std::exp(x[c]) * (c % 5 - 1.5);
  }
  {
    const OnGpu gpu_x(x), gpu_slope(slope);
    slopes<<<(width + 31) / 32, 32>>>(gpu_x.data, gpu_slope.data, width);
    CHECK(cudaGetLastError());
    gpu_slope.read(slope);
  }
  for (int c = 0; c < width; ++c) {
    const double expected = std::exp(x[c]) / sum * (c % 5 - 1.5 - weighted / sum);  // the formula of exercise 6
    if (std::fabs(slope[c] - expected) <= 1e-9) continue;
    std::printf("WRONG: width %d: slope[%d] is %.12f, must be %.12f\n", width, c, slope[c], expected);
    return false;
  }
  return true;
}

int main() {
  for (const int width : {2, 7, 40}) {
    if (!right(width)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
