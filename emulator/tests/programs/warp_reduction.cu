// Row sums, maxima and counts by warps: shuffles, votes, a match, and a block's warps joined through shared memory.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define FULL_MASK 0xffffffff
#define checkCuda(x)                                                   \
  do {                                                                 \
    cudaError_t e = (x);                                               \
    if (e != cudaSuccess) {                                            \
      printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e)); \
      return 1;                                                        \
    }                                                                  \
  } while (0)

template <typename T>
__inline__ __device__ T warpReduceSum(T val) {
  for (int offset = warpSize / 2; offset > 0; offset /= 2) val += __shfl_down_sync(FULL_MASK, val, offset);
  return val;
}

__inline__ __device__ float warpReduceMax(float val) {
  for (int mask = 16; mask > 0; mask >>= 1) val = fmaxf(val, __shfl_xor_sync(FULL_MASK, val, mask));
  return val;
}

__inline__ __device__ int blockReduceSum(int val) {
  static __shared__ int shared[32];  // a sum a warp
  int lane = threadIdx.x % warpSize;
  int wid = threadIdx.x / warpSize;
  val = warpReduceSum(val);
  if (lane == 0) shared[wid] = val;
  __syncthreads();
  val = (threadIdx.x < blockDim.x / warpSize) ? shared[lane] : 0;
  if (wid == 0) val = warpReduceSum(val);
  return val;
}

// A warp a row.
__global__ void rows(const float* x, int width, float* sum, float* max, unsigned* positive) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x & 31;
  float s = 0, m = -INFINITY;
  unsigned count = 0;
  for (int first = 0; first < width; first += 32) {  // the same trips for all lanes: each takes part in each vote
    const int c = first + lane;
    const float value = c < width ? x[row * width + c] : -INFINITY;
    if (c < width) s += value;
    m = fmaxf(m, value);
    count += __popc(__ballot_sync(FULL_MASK, value > 0));
  }
  s = warpReduceSum(s);
  m = warpReduceMax(m);
  if (lane == 0) {
    sum[row] = s;
    max[row] = m;
    positive[row] = count;
  }
}

__global__ void total(const float* x, int n, int* result, unsigned* same) {
  int sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) sum += (int)x[i];
  sum = blockReduceSum(sum);
  if (threadIdx.x == 0) atomicAdd(result, sum);
  const unsigned peers = __match_any_sync(FULL_MASK, threadIdx.x % 5);
  if (blockIdx.x == 0 && threadIdx.x < 32) same[threadIdx.x] = peers;
}

int main() {
  const int height = 24, width = 100, n = height * width;
  std::vector<float> x(n), sum(height), max(height);
  std::vector<unsigned> positive(height), same(32);
  for (int i = 0; i < n; ++i) x[i] = (float)(i * 37 % 201 - 100);
  float *d_x, *d_sum, *d_max;
  unsigned *d_positive, *d_same;
  int *d_total, all = 0;
  checkCuda(cudaMalloc(&d_x, n * sizeof(float)));
  checkCuda(cudaMalloc(&d_sum, height * sizeof(float)));
  checkCuda(cudaMalloc(&d_max, height * sizeof(float)));
  checkCuda(cudaMalloc(&d_positive, height * sizeof(unsigned)));
  checkCuda(cudaMalloc(&d_same, 32 * sizeof(unsigned)));
  checkCuda(cudaMalloc(&d_total, sizeof(int)));
  checkCuda(cudaMemcpy(d_x, x.data(), n * sizeof(float), cudaMemcpyHostToDevice));
  checkCuda(cudaMemset(d_total, 0, sizeof(int)));
  rows<<<height / 4, 128>>>(d_x, width, d_sum, d_max, d_positive);
  total<<<5, 96>>>(d_x, n, d_total, d_same);
  checkCuda(cudaDeviceSynchronize());
  checkCuda(cudaMemcpy(sum.data(), d_sum, height * sizeof(float), cudaMemcpyDeviceToHost));
  checkCuda(cudaMemcpy(max.data(), d_max, height * sizeof(float), cudaMemcpyDeviceToHost));
  checkCuda(cudaMemcpy(positive.data(), d_positive, height * sizeof(unsigned), cudaMemcpyDeviceToHost));
  checkCuda(cudaMemcpy(same.data(), d_same, 32 * sizeof(unsigned), cudaMemcpyDeviceToHost));
  checkCuda(cudaMemcpy(&all, d_total, sizeof(int), cudaMemcpyDeviceToHost));

  int wrong = 0, expected_all = 0;
  for (int row = 0; row < height; ++row) {
    float s = 0, m = -INFINITY;
    unsigned count = 0;
    for (int c = 0; c < width; ++c) {
      s += x[row * width + c];
      m = fmaxf(m, x[row * width + c]);
      count += x[row * width + c] > 0;
    }
    expected_all += (int)s;
    wrong += !(sum[row] == s && max[row] == m && positive[row] == count);
    if (row % 6 == 0) printf("row %2d: sum %.0f, max %.0f, %u positive\n", row, sum[row], max[row], positive[row]);
  }
  printf("total %d, lanes like lane 3: %08x\n", all, same[3]);
  printf("%d rows wrong\n", wrong);
  return wrong == 0 && all == expected_all && same[3] == 0x10842108u ? 0 : 1;
}
