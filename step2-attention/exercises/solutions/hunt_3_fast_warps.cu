// Bug hunt 3: a matrix times a vector, by tiles in shared memory. It is right for short vectors.
//
//   kernel-fusion learn check hunt_3_fast_warps
//   kernel-fusion simt exercises/solutions/hunt_3_fast_warps.cu
//   kernel-fusion simt --race exercises/solutions/hunt_3_fast_warps.cu
//   nvcc -lineinfo -I ../common/include exercises/solutions/hunt_3_fast_warps.cu
//   compute-sanitizer --tool racecheck ./a.out        with a GPU
#include <kf/exercise.h>

constexpr int kThreads = 64;

// y = a x, a row a thread; x comes by tiles, which all threads of the block read.
__global__ void product(const float* a, const float* x, float* y, int rows, int columns) {
  __shared__ float tile[kThreads];
  const int row = blockIdx.x * kThreads + threadIdx.x;
  float sum = 0;
  for (int first = 0; first < columns; first += kThreads) {
    const int column = first + threadIdx.x;
    tile[threadIdx.x] = column < columns ? x[column] : 0;
    __syncthreads();
    for (int c = 0; c < min(kThreads, columns - first); ++c) {
      if (row < rows) sum += a[row * columns + first + c] * tile[c];
    }
    // SOLUTION
    __syncthreads();
    // END
  }
  if (row < rows) y[row] = sum;
}

bool right(int rows, int columns) {
  std::vector<float> a(rows * columns), x(columns), y(rows, NAN);
  for (int i = 0; i < rows * columns; ++i) a[i] = static_cast<float>(i * 7919 % 17 - 8);
  for (int c = 0; c < columns; ++c) x[c] = static_cast<float>(c % 13 - 6);
  {
    const OnGpu gpu_a(a), gpu_x(x), gpu_y(y);
    product<<<(rows + kThreads - 1) / kThreads, kThreads>>>(gpu_a.data, gpu_x.data, gpu_y.data, rows, columns);
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  for (int row = 0; row < rows; ++row) {
    float expected = 0;  // small whole numbers: exact in any order
    for (int c = 0; c < columns; ++c) expected += a[row * columns + c] * x[c];
    if (y[row] == expected) continue;
    std::printf("WRONG: %d rows of %d: y[%d] is %g, must be %g\n", rows, columns, row, y[row], expected);
    return false;
  }
  return true;
}

int main() {
  for (const int columns : {1, 64, 100, 200}) {
    if (right(70, columns)) continue;
    std::printf("Hint: when may a thread that has finished a tile write the next one?\n");
    return 1;
  }
  std::printf("all right\n");
  return 0;
}
