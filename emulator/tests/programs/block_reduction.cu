// The sum and the maximum of many numbers by blocks: sequential addressing in dynamic shared memory, then a second
// launch over the blocks' results.
#include <algorithm>
#include <climits>
#include <cstdio>
#include <numeric>
#include <vector>

#define CUDA_CHECK(expr)                                                                                       \
  if (cudaError_t status = (expr); status != cudaSuccess) {                                                    \
    std::fprintf(stderr, "%s failed: %s (%s)\n", #expr, cudaGetErrorName(status), cudaGetErrorString(status)); \
    std::exit(1);                                                                                              \
  }

template <typename T>
struct Sum {
  static __host__ __device__ T identity() { return 0; }
  __host__ __device__ T operator()(T a, T b) const { return a + b; }
};
struct Max {
  static __host__ __device__ int identity() { return INT_MIN; }
  __host__ __device__ int operator()(int a, int b) const { return a > b ? a : b; }
};

template <class Op, typename T>
__global__ void reduce(const T* in, T* out, int n) {
  extern __shared__ unsigned char memory[];
  T* sdata = reinterpret_cast<T*>(memory);
  const Op op;
  unsigned tid = threadIdx.x;

  T mine = Op::identity();
  for (int i = blockIdx.x * blockDim.x + tid; i < n; i += blockDim.x * gridDim.x) mine = op(mine, in[i]);
  sdata[tid] = mine;
  __syncthreads();
  for (unsigned s = blockDim.x / 2; s > 0; s >>= 1) {
    if (tid < s) sdata[tid] = op(sdata[tid], sdata[tid + s]);
    __syncthreads();
  }
  if (tid == 0) out[blockIdx.x] = sdata[0];
}

template <class Op, typename T>
T reduce_on_gpu(const std::vector<T>& host) {
  const int threads = 128, blocks = 24, n = static_cast<int>(host.size());
  T *in, *partial, result;
  CUDA_CHECK(cudaMalloc(&in, n * sizeof(T)));
  CUDA_CHECK(cudaMalloc(&partial, blocks * sizeof(T)));
  CUDA_CHECK(cudaMemcpy(in, host.data(), n * sizeof(T), cudaMemcpyHostToDevice));
  reduce<Op><<<blocks, threads, threads * sizeof(T)>>>(in, partial, n);
  CUDA_CHECK(cudaGetLastError());
  reduce<Op, T><<<1, 32, 32 * sizeof(T)>>>(partial, partial, blocks);
  CUDA_CHECK(cudaGetLastError());
  CUDA_CHECK(cudaMemcpy(&result, partial, sizeof(T), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaFree(in));
  CUDA_CHECK(cudaFree(partial));
  return result;
}

int main() {
  std::vector<int> x(100'003);
  unsigned state = 12345;
  for (int& value : x) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<int>(state >> 19) - 4000;
  }
  std::vector<double> y(x.begin(), x.end());

  const int sum = reduce_on_gpu<Sum<int>>(x);
  const int max = reduce_on_gpu<Max>(x);
  const double real_sum = reduce_on_gpu<Sum<double>>(y);
  const int expected = std::accumulate(x.begin(), x.end(), 0);
  const double expected_real = std::accumulate(y.begin(), y.end(), 0.0);
  std::printf("sum %d (expected %d)\nmax %d\nsum in double %.0f\n", sum, expected, max, real_sum);
  const bool ok = sum == expected && max == *std::max_element(x.begin(), x.end()) && real_sum == expected_real;
  std::puts(ok ? "PASS" : "FAIL");
  return ok ? 0 : 1;
}
