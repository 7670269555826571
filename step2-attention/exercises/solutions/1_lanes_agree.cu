// Exercise 1: a warp finds the greatest number of a row, and all 32 lanes know it.
//
//   kernel-fusion learn check 1_lanes_agree
//   kernel-fusion simt exercises/solutions/1_lanes_agree.cu
//   nvcc -O3 -I ../common/include exercises/solutions/1_lanes_agree.cu && ./a.out        with a GPU
//
// Counted: global load requests, shared load requests, shuffles
#include <kf/exercise.h>

// A block of one warp for each row; seen[row * 32 + lane] is what that lane takes for the maximum.
__global__ void row_maximum(const float* x, float* seen, int width) {
  const int lane = threadIdx.x;
  const float* row = x + blockIdx.x * width;
  // SOLUTION: the maximum of this lane's own numbers, then of all lanes, in five steps and without shared memory
  // | const float greatest = lane < width ? row[lane] : 0;
  float greatest = -INFINITY;
  for (int c = lane; c < width; c += 32) greatest = fmaxf(greatest, row[c]);
  for (int away = 16; away > 0; away /= 2) greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, away));
  // END
  seen[blockIdx.x * 32 + lane] = greatest;
}

bool right(int rows, int width) {
  std::vector<float> x(rows * width), seen(rows * 32, NAN);
  for (int i = 0; i < rows * width; ++i) x[i] = static_cast<float>(i * 7919 % 1009) - 2000;  // all below 0
  {
    const OnGpu gpu_x(x), gpu_seen(seen);
    row_maximum<<<rows, 32>>>(gpu_x.data, gpu_seen.data, width);
    CHECK(cudaGetLastError());
    gpu_seen.read(seen);
  }
  for (int row = 0; row < rows; ++row) {
    float expected = -INFINITY;
    for (int c = 0; c < width; ++c) expected = std::fmax(expected, x[row * width + c]);
    for (int lane = 0; lane < 32; ++lane) {
      if (seen[row * 32 + lane] == expected) continue;
      std::printf("WRONG: width %d: lane %d of row %d has %g, the greatest is %g\n", width, lane, row,
                  seen[row * 32 + lane], expected);
      return false;
    }
  }
  return true;
}

int main() {
  for (const int width : {32, 1, 31, 33, 1000}) {
    if (!right(5, width)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
