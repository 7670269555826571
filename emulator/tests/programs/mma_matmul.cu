// C = A B for halves by the tensor cores' own instructions: cp.async brings tiles to shared memory, ldmatrix loads
// fragments, mma.sync multiplies. A warp makes a 16 x 16 tile of C. Small integers, so every sum is exact.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(status)                                                                       \
  {                                                                                         \
    cudaError_t error = status;                                                             \
    if (error != cudaSuccess) {                                                             \
      printf("Got bad cuda status: %s at line: %d\n", cudaGetErrorString(error), __LINE__); \
      exit(EXIT_FAILURE);                                                                   \
    }                                                                                       \
  }

constexpr int kTileK = 16, kWarps = 4;

__device__ __forceinline__ uint32_t smem_u32(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void copy_16_bytes(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(smem_u32(to)), "l"(from));
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_u32(p)));
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(smem_u32(p)));
}

__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A block makes 16 rows and 16 columns for each of its warps. M, N and K are multiples of the tiles.
__global__ void matmul(const half* A, const half* B, float* C, int N, int K) {
  __shared__ __align__(16) half a_tile[16][kTileK];
  __shared__ __align__(16) half b_tile[kWarps][kTileK][16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.y * 16, col = (blockIdx.x * kWarps + warp) * 16;
  float c[2][4] = {};
  for (int k = 0; k < K; k += kTileK) {
    const int r = lane / 2, eight = lane % 2 * 8;  // a lane copies eight halves
    if (warp == 0) copy_16_bytes(&a_tile[r][eight], A + (row + r) * K + k + eight);
    copy_16_bytes(&b_tile[warp][r][eight], B + (k + r) * N + col + eight);
    asm volatile("cp.async.commit_group;\n" ::);
    asm volatile("cp.async.wait_group 0;\n" ::);
    __syncthreads();

    uint32_t a[4], b[2];
    ldmatrix_x4(a, &a_tile[lane % 16][lane / 16 * 8]);
    for (int half_tile = 0; half_tile < 2; ++half_tile) {
      ldmatrix_x2_trans(b, &b_tile[warp][lane % 16][half_tile * 8]);
      mma_m16n8k16(c[half_tile], a, b);
    }
    __syncthreads();
  }
  for (int half_tile = 0; half_tile < 2; ++half_tile) {
    for (int i = 0; i < 4; ++i) {
      C[(row + lane / 4 + i / 2 * 8) * N + col + half_tile * 8 + lane % 4 * 2 + i % 2] = c[half_tile][i];
    }
  }
}

int main() {
  const int M = 48, N = 128, K = 64;
  std::vector<half> A(M * K), B(K * N);
  std::vector<float> C(M * N);
  for (int i = 0; i < M * K; ++i) A[i] = __float2half(static_cast<float>(i * 7 % 13 - 6));
  for (int i = 0; i < K * N; ++i) B[i] = __float2half(static_cast<float>(i * 5 % 11 - 5));
  half *d_a, *d_b;
  float* d_c;
  CHECK(cudaMalloc(&d_a, A.size() * sizeof(half)));
  CHECK(cudaMalloc(&d_b, B.size() * sizeof(half)));
  CHECK(cudaMalloc(&d_c, C.size() * sizeof(float)));
  CHECK(cudaMemcpy(d_a, A.data(), A.size() * sizeof(half), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(d_b, B.data(), B.size() * sizeof(half), cudaMemcpyHostToDevice));
  matmul<<<dim3(N / (16 * kWarps), M / 16), 32 * kWarps>>>(d_a, d_b, d_c, N, K);
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpy(C.data(), d_c, C.size() * sizeof(float), cudaMemcpyDeviceToHost));

  int wrong = 0;
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < N; ++j) {
      float expected = 0;
      for (int k = 0; k < K; ++k) expected += __half2float(A[i * K + k]) * __half2float(B[k * N + j]);
      wrong += !(C[i * N + j] == expected);
    }
  }
  for (int i = 0; i < M; i += 9)
    printf("%5.0f %5.0f %5.0f %5.0f\n", C[i * N], C[i * N + 1], C[i * N + 77], C[i * N + N - 1]);
  printf("%d of %d wrong\n", wrong, M * N);
  CHECK(cudaFree(d_a));
  CHECK(cudaFree(d_b));
  CHECK(cudaFree(d_c));
  return wrong == 0 ? 0 : 1;
}
