// Puzzle 1, map: y[i] = x[i] + 10, by as many threads as there are numbers, all in one block.
//
//   kernel-fusion learn check puzzle_01_map
//   kernel-fusion simt docs/puzzles/solutions/puzzle_01_map.cu
//   nvcc -std=c++17 -I common/include docs/puzzles/solutions/puzzle_01_map.cu && ./a.out        with a GPU
//
// Counted: global load requests, global load sectors, global store requests
#include "../puzzle.h"

__global__ void map(const float* x, float* y) {
  // SOLUTION: one number of y; this thread's number is threadIdx.x
  const int i = threadIdx.x;
  y[i] = x[i] + 10;
  // END
}

int main() { return puzzle::map(map); }
