// LayerNorm, as in a training loop in C: a warp a row, mean and reciprocal deviation kept for the backward pass,
// checked against plain loops.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda_runtime.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

namespace cg = cooperative_groups;

template <class T>
__host__ __device__ T ceil_div(T dividend, T divisor) {
  return (dividend + divisor - 1) / divisor;
}

void cuda_check(cudaError_t error, const char* file, int line) {
  if (error != cudaSuccess) {
    printf("[CUDA ERROR] at file %s:%d:\n%s\n", file, line, cudaGetErrorString(error));
    exit(EXIT_FAILURE);
  }
}
#define cudaCheck(err) (cuda_check(err, __FILE__, __LINE__))

void layernorm_forward_cpu(float* out, float* mean, float* rstd, const float* inp, const float* weight,
                           const float* bias, int N, int C) {
  for (int i = 0; i < N; i++) {
    const float* x = inp + i * C;
    double m = 0.0, v = 0.0;
    for (int c = 0; c < C; c++) m += x[c];
    m /= C;
    for (int c = 0; c < C; c++) v += (x[c] - m) * (x[c] - m);
    double s = 1.0 / sqrt(v / C + 1e-5);
    for (int c = 0; c < C; c++) out[i * C + c] = (float)(s * (x[c] - m) * weight[c] + bias[c]);
    mean[i] = (float)m;
    rstd[i] = (float)s;
  }
}

__global__ void layernorm_forward_kernel(float* __restrict__ out, float* __restrict__ mean, float* __restrict__ rstd,
                                         const float* __restrict__ inp, const float* __restrict__ weight,
                                         const float* __restrict__ bias, int N, int C) {
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
  int idx = blockIdx.x * warp.meta_group_size() + warp.meta_group_rank();
  if (idx >= N) return;

  const float* x = inp + idx * C;
  float sum = 0.0f;
  for (int i = warp.thread_rank(); i < C; i += warp.size()) sum += x[i];
  sum = cg::reduce(warp, sum, cg::plus<float>{});
  float m = sum / C;
  if (warp.thread_rank() == 0 && mean != nullptr) __stcs(mean + idx, m);

  sum = 0.0f;
  for (int i = warp.thread_rank(); i < C; i += warp.size()) {
    float diff = x[i] - m;
    sum += diff * diff;
  }
  sum = cg::reduce(warp, sum, cg::plus<float>{});
  float s = rsqrtf(sum / C + 1e-5f);
  if (warp.thread_rank() == 0 && rstd != nullptr) __stcs(rstd + idx, s);

  float* o = out + idx * C;
  for (int c = warp.thread_rank(); c < C; c += warp.size()) {
    float n = s * (__ldcs(x + c) - m);
    __stcs(o + c, n * weight[c] + bias[c]);
  }
}

int main() {
  int N = 37, C = 200, block_size = 128;
  float *inp, *weight, *bias, *out, *mean, *rstd;
  cudaCheck(cudaMallocManaged(&inp, N * C * sizeof(float)));
  cudaCheck(cudaMallocManaged(&weight, C * sizeof(float)));
  cudaCheck(cudaMallocManaged(&bias, C * sizeof(float)));
  cudaCheck(cudaMallocManaged(&out, N * C * sizeof(float)));
  cudaCheck(cudaMallocManaged(&mean, N * sizeof(float)));
  cudaCheck(cudaMallocManaged(&rstd, N * sizeof(float)));
  for (int i = 0; i < N * C; i++) inp[i] = (float)((i * 193 + 71) % 401) / 50.0f - 4.0f;
  for (int c = 0; c < C; c++) {
    weight[c] = 1.0f + (float)(c % 7) / 16.0f;
    bias[c] = (float)(c % 11) / 8.0f - 0.5f;
  }
  float* expected = (float*)malloc(N * C * sizeof(float));
  float *cpu_mean = (float*)malloc(N * sizeof(float)), *cpu_rstd = (float*)malloc(N * sizeof(float));
  layernorm_forward_cpu(expected, cpu_mean, cpu_rstd, inp, weight, bias, N, C);

  layernorm_forward_kernel<<<ceil_div(N * 32, block_size), block_size>>>(out, mean, rstd, inp, weight, bias, N, C);
  cudaCheck(cudaGetLastError());
  cudaCheck(cudaDeviceSynchronize());

  int wrong = 0;
  for (int i = 0; i < N * C; i++) wrong += !(fabsf(out[i] - expected[i]) <= 1e-4f);
  for (int i = 0; i < N; i++)
    wrong += !(fabsf(mean[i] - cpu_mean[i]) <= 1e-4f && fabsf(rstd[i] - cpu_rstd[i]) <= 1e-4f);
  for (int i = 0; i < N; i += 6) {
    printf("row %2d: mean %7.3f, rstd %6.3f, out %7.3f %7.3f %7.3f\n", i, mean[i], rstd[i], out[i * C], out[i * C + 99],
           out[i * C + C - 1]);
  }
  printf("%s\n", wrong == 0 ? "OK" : "MISMATCH");
  cudaCheck(cudaFree(inp));
  cudaCheck(cudaFree(weight));
  cudaCheck(cudaFree(bias));
  cudaCheck(cudaFree(out));
  cudaCheck(cudaFree(mean));
  cudaCheck(cudaFree(rstd));
  free(expected);
  free(cpu_mean);
  free(cpu_rstd);
  return wrong == 0 ? 0 : 1;
}
