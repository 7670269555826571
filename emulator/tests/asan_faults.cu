// Kernels that read or write where they must not. check_asan_faults.py runs each and looks for the marked line.
#include <cstdio>
#include <cstring>
#include <string>

__global__ void past_global(const float* in, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) out[0] += in[i];  // fault: global
}

__global__ void before_global(float* data) {
  data[static_cast<int>(threadIdx.x) - 1] = 1.0f;  // fault: before
}

__global__ void past_static(float* out) {
  __shared__ float tile[10];
  __shared__ float other[10];
  tile[threadIdx.x % 10] = other[threadIdx.x % 10] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x + 1];  // fault: static
}

__global__ void past_dynamic(float* out) {
  extern __shared__ float buffer[];
  buffer[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = buffer[threadIdx.x + 1];  // fault: dynamic
}

__global__ void past_local(float* out) {
  float values[4] = {1, 2, 3, 4};
  __syncthreads();
  volatile int at = threadIdx.x;
  out[threadIdx.x] = values[at];  // fault: local
}

__global__ void after_free(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x];  // fault: freed
}

__global__ void misaligned_vector(const float* in, float* out) {
  const float4 four = *reinterpret_cast<const float4*>(in + threadIdx.x);  // fault: misaligned
  out[threadIdx.x] = four.x + four.w;
}

int main(int argc, char** argv) {
  const std::string fault = argc > 1 ? argv[1] : "";
  float *in = nullptr, *out = nullptr;
  cudaMalloc(&in, 100 * sizeof(float));
  cudaMalloc(&out, 128 * sizeof(float));
  cudaMemset(in, 0, 100 * sizeof(float));
  cudaMemset(out, 0, 128 * sizeof(float));
  // Faultless neighbours run before, so that stacks and shared memory have been used.
  past_static<<<4, 9>>>(out);
  past_dynamic<<<4, 63, 256>>>(out);
  past_local<<<2, 4>>>(out);
  past_global<<<1, 100>>>(in, out, 100);
  if (fault == "global") past_global<<<1, 128>>>(in, out, 100);
  if (fault == "before") before_global<<<1, 32>>>(out);
  if (fault == "static") past_static<<<1, 10>>>(out);
  if (fault == "dynamic") past_dynamic<<<1, 64, 256>>>(out);
  if (fault == "odd") past_dynamic<<<1, 63, 252>>>(out);  // the same line; the size is no multiple of 8
  if (fault == "local") past_local<<<1, 5>>>(out);
  misaligned_vector<<<1, 1>>>(in, out);
  if (fault == "misaligned") misaligned_vector<<<1, 2>>>(in, out);
  cudaFree(in);
  if (fault == "freed") after_free<<<1, 1>>>(in, out);
  cudaFree(out);
  std::puts("finished");
}
