// Puzzle 12, one-pass softmax: y = exp(x - largest) / sum of these, in each row; largest and sum are found in one pass.
//
//   kernel-fusion learn check puzzle_12_softmax
//   kernel-fusion simt docs/puzzles/solutions/puzzle_12_softmax.cu
//   nvcc -std=c++17 -I common/include docs/puzzles/solutions/puzzle_12_softmax.cu && ./a.out        with a GPU
//
// Counted: global load requests, global load sectors
// Scored: shuffles, barriers
#include "../puzzle.h"

// What is known of a part of a row: its largest number, and the sum of all exp(x - largest).
struct Part {
  float largest, sum;
};

__device__ Part joined(Part a, Part b) {
  // SOLUTION: what is known of both together; a sum that was made with a smaller largest must shrink
  // | return a;
  const float largest = fmaxf(a.largest, b.largest);
  return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
  // END
}

// A block of one warp for each row. No number is as small as -FLT_MAX.
__global__ void softmax(const float* x, float* y, int width) {
  const float* row = x + blockIdx.x * width;
  Part part = {-FLT_MAX, 0};  // of nothing
  // SOLUTION: join this lane's numbers, each {x, 1}; then the parts of all lanes; last, y[blockIdx.x * width + col]
  for (int col = threadIdx.x; col < width; col += kWarp) part = joined(part, {row[col], 1});
  for (int far = 16; far > 0; far /= 2) {
    const float largest = __shfl_xor_sync(0xffffffffu, part.largest, far);
    part = joined(part, {largest, __shfl_xor_sync(0xffffffffu, part.sum, far)});
  }
  for (int col = threadIdx.x; col < width; col += kWarp) {
    y[blockIdx.x * width + col] = expf(row[col] - part.largest) / part.sum;
  }
  // END
}

int main() { return puzzle::softmax(softmax); }
