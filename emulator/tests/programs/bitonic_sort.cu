// Bitonic sort of a power of two of unsigned numbers: large steps in global memory, the small ones of a block together
// in shared memory.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define SHARED_SIZE 512u

#define gpuErrchk(ans) gpuAssert((ans), __FILE__, __LINE__)
static inline void gpuAssert(cudaError_t code, const char* file, int line) {
  if (code != cudaSuccess) {
    std::fprintf(stderr, "%s:%d: %s\n", file, line, cudaGetErrorString(code));
    std::exit(code);
  }
}

typedef unsigned int uint;

__device__ inline void Comparator(uint& a, uint& b, bool ascending) {
  if ((a > b) == ascending) {
    uint t = a;
    a = b;
    b = t;
  }
}

// Sorts each SHARED_SIZE numbers, upwards and downwards in turn.
__global__ void bitonicSortShared(uint* data) {
  __shared__ uint s_key[SHARED_SIZE];
  uint* mine = data + blockIdx.x * SHARED_SIZE + threadIdx.x;
  s_key[threadIdx.x] = mine[0];
  s_key[threadIdx.x + SHARED_SIZE / 2] = mine[SHARED_SIZE / 2];
  for (uint size = 2; size <= SHARED_SIZE; size <<= 1) {
    const bool up = size == SHARED_SIZE ? blockIdx.x % 2 == 0 : (threadIdx.x & (size / 2)) == 0;
    for (uint stride = size / 2; stride > 0; stride >>= 1) {
      __syncthreads();
      uint pos = 2 * threadIdx.x - (threadIdx.x & (stride - 1));
      Comparator(s_key[pos], s_key[pos + stride], up);
    }
  }
  __syncthreads();
  mine[0] = s_key[threadIdx.x];
  mine[SHARED_SIZE / 2] = s_key[threadIdx.x + SHARED_SIZE / 2];
}

__global__ void bitonicMergeGlobal(uint* data, uint size, uint stride) {
  uint index = blockIdx.x * blockDim.x + threadIdx.x;
  uint pos = 2 * index - (index & (stride - 1));
  uint a = data[pos], b = data[pos + stride];
  Comparator(a, b, (pos & size) == 0);
  data[pos] = a;
  data[pos + stride] = b;
}

__global__ void bitonicMergeShared(uint* data, uint size) {
  extern __shared__ uint keys[];
  uint* mine = data + blockIdx.x * SHARED_SIZE + threadIdx.x;
  keys[threadIdx.x] = mine[0];
  keys[threadIdx.x + SHARED_SIZE / 2] = mine[SHARED_SIZE / 2];
  const bool up = (blockIdx.x * SHARED_SIZE & size) == 0;
  for (uint stride = SHARED_SIZE / 2; stride > 0; stride >>= 1) {
    __syncthreads();
    uint pos = 2 * threadIdx.x - (threadIdx.x & (stride - 1));
    Comparator(keys[pos], keys[pos + stride], up);
  }
  __syncthreads();
  mine[0] = keys[threadIdx.x];
  mine[SHARED_SIZE / 2] = keys[threadIdx.x + SHARED_SIZE / 2];
}

int main() {
  const uint n = 1u << 13;
  std::vector<uint> x(n), expected;
  uint state = 2024;
  for (uint& value : x) value = (state = state * 1103515245u + 12345u) >> 4;
  expected = x;
  std::sort(expected.begin(), expected.end());

  uint* data;
  gpuErrchk(cudaMalloc(&data, n * sizeof(uint)));
  gpuErrchk(cudaMemcpy(data, x.data(), n * sizeof(uint), cudaMemcpyHostToDevice));
  const uint blocks = n / SHARED_SIZE;
  bitonicSortShared<<<blocks, SHARED_SIZE / 2>>>(data);
  for (uint size = 2 * SHARED_SIZE; size <= n; size <<= 1) {
    for (uint stride = size / 2; stride >= SHARED_SIZE; stride >>= 1) {
      bitonicMergeGlobal<<<n / 2 / 256, 256>>>(data, size, stride);
    }
    bitonicMergeShared<<<blocks, SHARED_SIZE / 2, SHARED_SIZE * sizeof(uint)>>>(data, size);
  }
  gpuErrchk(cudaGetLastError());
  gpuErrchk(cudaMemcpy(x.data(), data, n * sizeof(uint), cudaMemcpyDeviceToHost));
  gpuErrchk(cudaFree(data));
  for (uint i = 0; i < n; i += n / 8) std::printf("%u\n", x[i]);
  std::printf("%u\n%s\n", x[n - 1], x == expected ? "sorted" : "NOT SORTED");
  return x == expected ? 0 : 1;
}
