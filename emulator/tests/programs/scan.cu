// Exclusive prefix sums of any length: the work-efficient scan of a block (up-sweep and down-sweep over a tree), a scan
// of the blocks' sums, and a pass that adds them.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#define BLOCK 128
#define NUM_BANKS 32
#define LOG_NUM_BANKS 5
#define CONFLICT_FREE_OFFSET(n) ((n) >> LOG_NUM_BANKS)

static void HandleError(cudaError_t err, const char* file, int line) {
  if (err != cudaSuccess) {
    printf("%s in %s at line %d\n", cudaGetErrorString(err), file, line);
    exit(EXIT_FAILURE);
  }
}
#define HANDLE_ERROR(err) (HandleError(err, __FILE__, __LINE__))

__global__ void scan_block(int* data, int* sums, int n) {
  __shared__ int temp[2 * BLOCK + 2 * BLOCK / NUM_BANKS];
  const int thid = threadIdx.x, first = blockIdx.x * 2 * BLOCK;
  int ai = thid, bi = thid + BLOCK;
  const int a_place = ai + CONFLICT_FREE_OFFSET(ai), b_place = bi + CONFLICT_FREE_OFFSET(bi);
  temp[a_place] = first + ai < n ? data[first + ai] : 0;
  temp[b_place] = first + bi < n ? data[first + bi] : 0;

  int offset = 1;
  for (int d = BLOCK; d > 0; d >>= 1) {
    __syncthreads();
    if (thid < d) {
      ai = offset * (2 * thid + 1) - 1;
      bi = offset * (2 * thid + 2) - 1;
      temp[bi + CONFLICT_FREE_OFFSET(bi)] += temp[ai + CONFLICT_FREE_OFFSET(ai)];
    }
    offset *= 2;
  }
  if (thid == 0) {
    const int last = 2 * BLOCK - 1 + CONFLICT_FREE_OFFSET(2 * BLOCK - 1);
    if (sums) sums[blockIdx.x] = temp[last];
    temp[last] = 0;
  }
  for (int d = 1; d <= BLOCK; d *= 2) {
    offset >>= 1;
    __syncthreads();
    if (thid < d) {
      ai = offset * (2 * thid + 1) - 1 + CONFLICT_FREE_OFFSET(offset * (2 * thid + 1) - 1);
      bi = offset * (2 * thid + 2) - 1 + CONFLICT_FREE_OFFSET(offset * (2 * thid + 2) - 1);
      const int t = temp[ai];
      temp[ai] = temp[bi];
      temp[bi] += t;
    }
  }
  __syncthreads();
  if (first + thid < n) data[first + thid] = temp[a_place];
  if (first + thid + BLOCK < n) data[first + thid + BLOCK] = temp[b_place];
}

__global__ void add_sums(int* data, const int* sums, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) data[i] += sums[i / (2 * BLOCK)];
}

void scan(int* d_data, int n) {
  const int blocks = (n + 2 * BLOCK - 1) / (2 * BLOCK);
  if (blocks == 1) {
    scan_block<<<1, BLOCK>>>(d_data, NULL, n);
    HANDLE_ERROR(cudaGetLastError());
    return;
  }
  int* d_sums;
  HANDLE_ERROR(cudaMalloc((void**)&d_sums, blocks * sizeof(int)));
  scan_block<<<blocks, BLOCK>>>(d_data, d_sums, n);
  HANDLE_ERROR(cudaGetLastError());
  scan(d_sums, blocks);
  add_sums<<<(n + 255) / 256, 256>>>(d_data, d_sums, n);
  HANDLE_ERROR(cudaGetLastError());
  HANDLE_ERROR(cudaFree(d_sums));
}

int main() {
  for (const int n : {1, 255, 256, 257, 70001}) {
    std::vector<int> x(n), y(n);
    for (int i = 0; i < n; ++i) x[i] = (i * 31 + 7) % 100;
    int* d;
    HANDLE_ERROR(cudaMalloc((void**)&d, n * sizeof(int)));
    HANDLE_ERROR(cudaMemcpy(d, x.data(), n * sizeof(int), cudaMemcpyHostToDevice));
    scan(d, n);
    HANDLE_ERROR(cudaMemcpy(y.data(), d, n * sizeof(int), cudaMemcpyDeviceToHost));
    HANDLE_ERROR(cudaFree(d));
    int running = 0, wrong = 0;
    for (int i = 0; i < n; ++i) {
      wrong += y[i] != running;
      running += x[i];
    }
    printf("n %6d: middle %d, last %d, %d wrong\n", n, y[n / 2], y[n - 1], wrong);
    if (wrong) return 1;
  }
  return 0;
}
