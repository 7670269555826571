// Exercise 5: the sum of each column, in two stages without atomics, so that every run gives the same bits.
//
//   kernel-fusion learn check 5_column_sum
//   kernel-fusion simt exercises/solutions/5_column_sum.cu        also with KF_SIMT_SCHEDULE=reverse before it
//   nvcc -O3 exercises/solutions/5_column_sum.cu && ./a.out        with a GPU
//
// Counted: global load requests, barriers
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CHECK(call)                                                                       \
  do {                                                                                    \
    const cudaError_t error = (call);                                                     \
    if (error != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

constexpr int kChunk = 64;  // rows of a block in stage 1
constexpr int kAtOnce = 8;  // of these, so many at once: blockDim.y

__device__ unsigned long long came;  // counted for the check

// Each thread waits here for all others of its block. Use it instead of __syncthreads(): it counts who comes.
__device__ void wait_for_all() {
  atomicAdd(&came, 1ull);
  __syncthreads();
}

// Stage 1: partial[b, c] = the sum of column c over the rows b * 64 to b * 64 + 63.
// Block (32, 8): threadIdx.x is the column, so that a warp reads 32 neighbours. blockIdx.y is b.
__global__ void sum_chunks(const float* x, float* partial, int rows, int columns) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  // SOLUTION: each thread adds up every eighth row of its chunk; then one thread of a column adds the eight sums
  // | const int row = blockIdx.y * kChunk;
  // | if (threadIdx.y == 0 && column < columns) partial[blockIdx.y * columns + column] = x[row * columns + column];
  __shared__ float sums[kAtOnce][32];
  const int end = min(rows, (static_cast<int>(blockIdx.y) + 1) * kChunk);
  float sum = 0;
  if (column < columns) {
    for (int row = blockIdx.y * kChunk + threadIdx.y; row < end; row += kAtOnce) sum += x[row * columns + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  wait_for_all();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int k = 1; k < kAtOnce; ++k) sum += sums[k][threadIdx.x];
  partial[blockIdx.y * columns + column] = sum;
  // END
}

// Stage 2: out[c] = the sum of partial[b, c] over all b. One thread a column.
__global__ void sum_partials(const float* partial, float* out, int chunks, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  // SOLUTION: add the chunks of this thread's column, always in the same order
  // | if (column < columns) out[column] = partial[column];
  if (column >= columns) return;
  float sum = 0;
  for (int b = 0; b < chunks; ++b) sum += partial[b * columns + column];
  out[column] = sum;
  // END
}

uint32_t all_bits = 2166136261u;  // a number that changes when any bit of any result does

bool right(int rows, int columns) {
  const int chunks = (rows + kChunk - 1) / kChunk;
  const dim3 grid((columns + 31) / 32, chunks), block(32, kAtOnce);
  std::vector<float> x(rows * columns), first(columns), second(columns);
  std::vector<double> expected(columns), size(columns);
  for (int i = 0; i < rows * columns; ++i) {
    x[i] = std::sin(0.37f * (i % 10007 + 1));  // all bits of the fraction in use: another order gives other sums
    expected[i % columns] += x[i], size[i % columns] += std::fabs(x[i]);
  }
  float *gpu_x, *partial, *out;
  CHECK(cudaMalloc(&gpu_x, x.size() * sizeof(float)));
  CHECK(cudaMalloc(&partial, chunks * columns * sizeof(float)));
  CHECK(cudaMalloc(&out, columns * sizeof(float)));
  CHECK(cudaMemcpy(gpu_x, x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice));
  for (std::vector<float>* result : {&first, &second}) {
    CHECK(cudaMemset(partial, 0xff, chunks * columns * sizeof(float)));  // NaN: what nobody writes will show
    CHECK(cudaMemset(out, 0xff, columns * sizeof(float)));
    sum_chunks<<<grid, block>>>(gpu_x, partial, rows, columns);
    CHECK(cudaGetLastError());
    sum_partials<<<(columns + 127) / 128, 128>>>(partial, out, chunks, columns);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(result->data(), out, columns * sizeof(float), cudaMemcpyDeviceToHost));
  }
  unsigned long long waited;
  const unsigned long long zero = 0, threads = 2ull * grid.x * grid.y * block.x * block.y;  // of both runs
  CHECK(cudaMemcpyFromSymbol(&waited, came, sizeof(waited)));
  CHECK(cudaMemcpyToSymbol(came, &zero, sizeof(zero)));
  for (float* memory : {gpu_x, partial, out}) CHECK(cudaFree(memory));

  for (int c = 0; c < columns; ++c) {
    if (!(std::fabs(first[c] - expected[c]) <= 1e-6 * size[c])) {  // not `>`: NaN must count as wrong
      std::printf("WRONG: %d rows of %d: the sum of column %d is %g, must be %g\n", rows, columns, c, first[c],
                  expected[c]);
      return false;
    }
    uint32_t bits, again;
    std::memcpy(&bits, &first[c], sizeof(bits));
    std::memcpy(&again, &second[c], sizeof(again));
    if (bits != again) {
      std::printf("WRONG: %d rows of %d: two runs gave %.9g and %.9g for column %d\n", rows, columns, first[c],
                  second[c], c);
      return false;
    }
    all_bits = (all_bits ^ bits) * 16777619u;
  }
  if (waited == 0 || waited % threads != 0) {
    std::printf("WRONG: %d rows of %d: the sums are right, but of %llu threads %llu came to wait_for_all\n", rows,
                columns, threads, waited);
    return false;
  }
  return true;
}

int main() {
  if (!right(63, 33) || !right(1, 1) || !right(64, 32) || !right(1001, 100) || !right(2050, 7)) return 1;
  std::printf("the bits of all sums: %08x; they must not depend on the order of the threads\nall right\n", all_bits);
  return 0;
}
