// C = A B by tiles in shared memory, for sizes that the tile does not divide. The numbers are small integers, so that
// no order of the sums changes the result.
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define TILE_WIDTH 16

#define cudaCheck(ans)                    \
  {                                       \
    gpuAssert((ans), __FILE__, __LINE__); \
  }
inline void gpuAssert(cudaError_t code, const char* file, int line, bool abort = true) {
  if (code != cudaSuccess) {
    fprintf(stderr, "GPUassert: %s %s %d\n", cudaGetErrorString(code), file, line);
    if (abort) exit(code);
  }
}

__global__ void MatrixMulKernel(const float* __restrict__ A, const float* __restrict__ B, float* __restrict__ C, int M,
                                int N, int K) {
  __shared__ float As[TILE_WIDTH][TILE_WIDTH];
  __shared__ float Bs[TILE_WIDTH][TILE_WIDTH];
  assert(blockDim.x == TILE_WIDTH && blockDim.y == TILE_WIDTH);

  int tx = threadIdx.x, ty = threadIdx.y;
  int row = blockIdx.y * TILE_WIDTH + ty;
  int col = blockIdx.x * TILE_WIDTH + tx;
  float value = 0;
  for (int ph = 0; ph < (K + TILE_WIDTH - 1) / TILE_WIDTH; ++ph) {
    int a_col = ph * TILE_WIDTH + tx, b_row = ph * TILE_WIDTH + ty;
    As[ty][tx] = row < M && a_col < K ? A[row * K + a_col] : 0.0f;
    Bs[ty][tx] = b_row < K && col < N ? B[b_row * N + col] : 0.0f;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TILE_WIDTH; ++k) value += As[ty][k] * Bs[k][tx];
    __syncthreads();
  }
  if (row < M && col < N) C[row * N + col] = value;
}

int main() {
  const int M = 70, N = 53, K = 101;
  std::vector<float> A(M * K), B(K * N), C(M * N);
  for (int i = 0; i < M * K; ++i) A[i] = float(i * 13 % 17 - 8);
  for (int i = 0; i < K * N; ++i) B[i] = float(i * 11 % 19 - 9);

  float *dA, *dB, *dC;
  cudaCheck(cudaMalloc(&dA, A.size() * sizeof(float)));
  cudaCheck(cudaMalloc(&dB, B.size() * sizeof(float)));
  cudaCheck(cudaMalloc(&dC, C.size() * sizeof(float)));
  cudaCheck(cudaMemcpy(dA, A.data(), A.size() * sizeof(float), cudaMemcpyHostToDevice));
  cudaCheck(cudaMemcpy(dB, B.data(), B.size() * sizeof(float), cudaMemcpyHostToDevice));
  dim3 dimGrid((N + TILE_WIDTH - 1) / TILE_WIDTH, (M + TILE_WIDTH - 1) / TILE_WIDTH, 1);
  dim3 dimBlock(TILE_WIDTH, TILE_WIDTH, 1);
  MatrixMulKernel<<<dimGrid, dimBlock>>>(dA, dB, dC, M, N, K);
  cudaCheck(cudaPeekAtLastError());
  cudaCheck(cudaMemcpy(C.data(), dC, C.size() * sizeof(float), cudaMemcpyDeviceToHost));

  int errors = 0;
  long long checksum = 0;
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < N; ++j) {
      float expected = 0;
      for (int k = 0; k < K; ++k) expected += A[i * K + k] * B[k * N + j];
      if (!(C[i * N + j] == expected)) errors++;
      checksum = checksum * 31 % 1000003 + (long long)C[i * N + j] + 100000;
    }
  }
  for (int i = 0; i < 4; ++i)
    printf("%6.0f %6.0f %6.0f %6.0f\n", C[i * N], C[i * N + 1], C[i * N + 2], C[i * N + N - 1]);
  printf("checksum %lld, %d errors\n", checksum, errors);
  cudaFree(dA);
  cudaFree(dB);
  cudaFree(dC);
  return errors ? 1 : 0;
}
