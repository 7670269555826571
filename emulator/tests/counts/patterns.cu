// Access patterns whose cost can be told by hand: each kernel once, on a megabyte or more.
//
// counts/compare_with_ncu.py compares what the emulation counts here with what an H200 counts. The numbers that each
// kernel must give stand in emulator/tests/test_counts.py.
#include <cuda_runtime.h>

#include <cstdio>
#include <vector>

constexpr int kCount = 1 << 18;  // floats: 1 MB
constexpr int kThreads = 256;
constexpr int kSide = 512;  // of a square matrix of kCount floats
constexpr int kTile = 32;

// A warp's load takes 4 sectors, each whole.
__global__ void copy_float(const float* in, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[i];
}

// 16 bytes a lane: 16 sectors a request, and a quarter of the requests.
__global__ void copy_float4(const float4* in, float4* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float4 v = in[i];
  v.x += 1;
  out[i] = v;
}

// Every other float: all sectors of twice the length.
__global__ void read_stride_2(const float* in, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[2 * i];
}

// A sector for each lane.
__global__ void read_stride_32(const float* in, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[32 * i];
}

// 128 bytes that begin 4 bytes into a sector: 5 sectors.
__global__ void read_misaligned(const float* in, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[i + 1];
}

__global__ void gather(const int* index, const float* in, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[index[i]];
}

// All lanes read the same float: one sector.
__global__ void broadcast(const float* in, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[blockIdx.x];
}

// Reads rows, writes columns: each lane of a store has a sector of its own.
__global__ void transpose_naive(const float* in, float* out) {
  const int col = blockIdx.x * kTile + threadIdx.x;
  for (int y = threadIdx.y; y < kTile; y += blockDim.y) {
    const int row = blockIdx.y * kTile + y;
    out[col * kSide + row] = in[row * kSide + col];
  }
}

// Through shared memory, whose columns lie in one bank each, or with kPad = 1 in all.
template <int kPad>
__device__ void transpose_by_tile(const float* in, float* out) {
  __shared__ float tile[kTile][kTile + kPad];
  for (int y = threadIdx.y; y < kTile; y += blockDim.y) {
    tile[y][threadIdx.x] = in[(blockIdx.y * kTile + y) * kSide + blockIdx.x * kTile + threadIdx.x];
  }
  __syncthreads();
  for (int y = threadIdx.y; y < kTile; y += blockDim.y) {
    out[(blockIdx.x * kTile + y) * kSide + blockIdx.y * kTile + threadIdx.x] = tile[threadIdx.x][y];
  }
}

__global__ void transpose_tile(const float* in, float* out) { transpose_by_tile<0>(in, out); }

__global__ void transpose_padded(const float* in, float* out) { transpose_by_tile<1>(in, out); }

// A structure of three floats: each member is read with a stride of 12 bytes.
struct Point {
  float x, y, z;
};

__global__ void array_of_structures(const Point* in, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[i].x * in[i].x + in[i].y * in[i].y + in[i].z * in[i].z;
}

__global__ void structure_of_arrays(const float* x, const float* y, const float* z, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = x[i] * x[i] + y[i] * y[i] + z[i] * z[i];
}

// The stride doubles: neighbours in a warp are 2, 4, 8… floats apart, in the same bank sooner or later.
__global__ void reduce_strided(const float* in, float* out) {
  __shared__ volatile float sum[kThreads];  // or nvcc makes one load of two neighbours in the first round
  sum[threadIdx.x] = in[blockIdx.x * kThreads + threadIdx.x];
  __syncthreads();
  for (int stride = 1; stride < kThreads; stride *= 2) {
    const int at = 2 * stride * threadIdx.x;
    if (at < kThreads) sum[at] = sum[at] + sum[at + stride];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = sum[0];
}

// Two bytes a lane: 2 sectors a request.
__global__ void copy_short(const unsigned short* in, unsigned short* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[i] + 1;
}

// 32 counters a block, then one atomic each in global memory.
__global__ void histogram(const int* in, unsigned* bins) {
  __shared__ unsigned own[32];
  if (threadIdx.x < 32) own[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&own[in[blockIdx.x * kThreads + threadIdx.x] % 32], 1u);
  __syncthreads();
  if (threadIdx.x < 32) atomicAdd(&bins[threadIdx.x], own[threadIdx.x]);
}

// Half of the lanes of each warp take the branch.
__global__ void odd_lanes(const float* in, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (threadIdx.x % 2 == 1) {
    out[i] = in[i];
  }
}

#define CHECK(call)                                                              \
  do {                                                                           \
    const cudaError_t error = (call);                                            \
    if (error != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
      return 1;                                                                  \
    }                                                                            \
  } while (0)

int main() {
  float *in, *out;
  int* index;
  unsigned* bins;
  CHECK(cudaMalloc(&in, 32 * kCount * sizeof(float)));
  CHECK(cudaMalloc(&out, kCount * sizeof(float)));
  CHECK(cudaMalloc(&index, kCount * sizeof(int)));
  CHECK(cudaMalloc(&bins, 32 * sizeof(unsigned)));
  CHECK(cudaMemset(in, 0, 32 * kCount * sizeof(float)));
  CHECK(cudaMemset(bins, 0, 32 * sizeof(unsigned)));
  std::vector<int> random(kCount);
  unsigned state = 1;
  for (int& at : random) {
    state = state * 1664525u + 1013904223u;
    at = static_cast<int>(state >> 14);  // 18 bits
  }
  CHECK(cudaMemcpy(index, random.data(), kCount * sizeof(int), cudaMemcpyHostToDevice));

  const int blocks = kCount / kThreads;
  const dim3 tiles(kSide / kTile, kSide / kTile), tile(kTile, 8);
  copy_float<<<blocks, kThreads>>>(in, out);
  copy_float4<<<blocks / 4, kThreads>>>(reinterpret_cast<const float4*>(in), reinterpret_cast<float4*>(out));
  read_stride_2<<<blocks, kThreads>>>(in, out);
  read_stride_32<<<blocks, kThreads>>>(in, out);
  read_misaligned<<<blocks, kThreads>>>(in, out);
  gather<<<blocks, kThreads>>>(index, in, out);
  broadcast<<<blocks, kThreads>>>(in, out);
  transpose_naive<<<tiles, tile>>>(in, out);
  transpose_tile<<<tiles, tile>>>(in, out);
  transpose_padded<<<tiles, tile>>>(in, out);
  array_of_structures<<<blocks, kThreads>>>(reinterpret_cast<const Point*>(in), out);
  structure_of_arrays<<<blocks, kThreads>>>(in, in + kCount, in + 2 * kCount, out);
  reduce_strided<<<blocks, kThreads>>>(in, out);
  copy_short<<<2 * blocks, kThreads>>>(reinterpret_cast<const unsigned short*>(in),
                                       reinterpret_cast<unsigned short*>(out));
  histogram<<<blocks, kThreads>>>(index, bins);
  odd_lanes<<<blocks, kThreads>>>(in, out);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  std::printf("ok\n");
  return 0;
}
