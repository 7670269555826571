// Managed memory, streams, events, host callbacks, symbols, pitched copies and the questions programs ask a device.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define CHECK(call)                                                                                           \
  do {                                                                                                        \
    cudaError_t err_ = (call);                                                                                \
    if (err_ != cudaSuccess) {                                                                                \
      fprintf(stderr, "CUDA error %d \"%s\" at %s:%d\n", err_, cudaGetErrorString(err_), __FILE__, __LINE__); \
      exit(err_);                                                                                             \
    }                                                                                                         \
  } while (0)

__managed__ int total;
__device__ int table[8] = {1, 2, 4, 8, 16, 32, 64, 128};
__constant__ int offset = 5;

struct Node {
  int value;
  Node* next;
};

template <typename F>
__global__ void for_each(int n, F f) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) f(i);
}

__global__ void add_list(const Node* head) {
  int sum = 0;
  for (const Node* node = head; node != nullptr; node = node->next) sum += node->value;
  total = sum;
}

__global__ void scale(int* x, int n, int factor) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = factor * x[i] + offset + table[i % 8];
}

__device__ int twice(int x) { return 2 * x; }
__device__ int square(int x) { return x * x; }
typedef int (*Function)(int);
__device__ Function functions[] = {twice, square};

__global__ void apply(int* x, int which) { x[threadIdx.x] = functions[which](threadIdx.x); }

void CUDART_CB count_call(void* data) { ++*static_cast<int*>(data); }

int main() {
  bool ok = true;
  cudaDeviceProp prop;
  int devices = 0, threads = 0;
  CHECK(cudaGetDeviceCount(&devices));
  CHECK(cudaSetDevice(0));
  CHECK(cudaGetDeviceProperties(&prop, 0));
  CHECK(cudaDeviceGetAttribute(&threads, cudaDevAttrMaxThreadsPerBlock, 0));
  printf("warp %d, %d threads a block, grid %d x %d x %d, managed %d\n", prop.warpSize, threads, prop.maxGridSize[0],
         prop.maxGridSize[1], prop.maxGridSize[2], prop.managedMemory);
  ok = ok && devices >= 1 && prop.major >= 1 && prop.totalGlobalMem > 0 && prop.multiProcessorCount > 0;

  // A list that host and device walk by the same pointers.
  Node* nodes;
  CHECK(cudaMallocManaged(&nodes, 10 * sizeof(Node)));
  for (int i = 0; i < 10; ++i) nodes[i] = {i * i, i < 9 ? nodes + i + 1 : nullptr};
  add_list<<<1, 1>>>(nodes);
  CHECK(cudaDeviceSynchronize());
  printf("list %d\n", total);
  ok = ok && total == 285;

  // Two streams, each with a half; the second waits for the first's event.
  const int n = 1 << 12, half = n / 2;
  int *host, *device, calls = 0;
  CHECK(cudaMallocHost(&host, n * sizeof(int)));
  CHECK(cudaMalloc(&device, n * sizeof(int)));
  for (int i = 0; i < n; ++i) host[i] = i;
  cudaStream_t streams[2];
  cudaEvent_t start, done;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreateWithFlags(&done, cudaEventDefault));
  CHECK(cudaStreamCreate(&streams[0]));
  CHECK(cudaStreamCreateWithFlags(&streams[1], cudaStreamNonBlocking));
  CHECK(cudaEventRecord(start, streams[0]));
  for (int s = 0; s < 2; ++s) {
    int* part = device + s * half;
    CHECK(cudaMemcpyAsync(part, host + s * half, half * sizeof(int), cudaMemcpyHostToDevice, streams[s]));
    scale<<<(half + 255) / 256, 256, 0, streams[s]>>>(part, half, s + 2);
    CHECK(cudaMemcpyAsync(host + s * half, part, half * sizeof(int), cudaMemcpyDeviceToHost, streams[s]));
    if (s == 0) CHECK(cudaEventRecord(done, streams[0]));
    if (s == 0) CHECK(cudaStreamWaitEvent(streams[1], done, 0));
  }
  CHECK(cudaLaunchHostFunc(streams[1], count_call, &calls));
  CHECK(cudaStreamSynchronize(streams[1]));
  CHECK(cudaEventSynchronize(done));
  float ms = -1;
  CHECK(cudaEventElapsedTime(&ms, start, done));
  int wrong = 0;
  for (int i = 0; i < n; ++i) wrong += host[i] != (i < half ? 2 : 3) * i + 5 + (1 << i % 8);
  printf("streams: %d wrong, %d call, first %d, last %d\n", wrong, calls, host[0], host[n - 1]);
  ok = ok && wrong == 0 && calls == 1 && ms >= 0 && cudaStreamQuery(streams[0]) == cudaSuccess;

  // Rows with a pitch, and symbols read and written by name and by address.
  const int rows = 5, cols = 7;
  char *pitched, square_text[rows][cols], back[rows][cols];
  size_t pitch;
  for (int i = 0; i < rows * cols; ++i) square_text[i / cols][i % cols] = static_cast<char>('a' + i % 26);
  CHECK(cudaMallocPitch(&pitched, &pitch, cols, rows));
  CHECK(cudaMemset2D(pitched, pitch, 0, cols, rows));
  CHECK(cudaMemcpy2D(pitched, pitch, square_text, cols, cols, rows, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy2D(back, cols, pitched, pitch, cols, rows, cudaMemcpyDeviceToHost));
  int entries[8], *address;
  const int seven = 7;
  CHECK(cudaMemcpyToSymbol(table, &seven, sizeof(int), 3 * sizeof(int)));
  CHECK(cudaMemcpyFromSymbol(entries, table, sizeof(entries)));
  CHECK(cudaGetSymbolAddress((void**)&address, table));
  CHECK(cudaMemset(address, 0, sizeof(int)));
  CHECK(cudaMemcpy(&entries[0], address, sizeof(int), cudaMemcpyDeviceToHost));
  printf("pitch holds: %d, table %d %d %d\n", std::memcmp(back, square_text, sizeof(back)), entries[0], entries[3],
         entries[7]);
  ok = ok && pitch >= cols && std::memcmp(back, square_text, sizeof(back)) == 0 && entries[0] == 0 && entries[3] == 7;

  apply<<<1, 8>>>(device, 1);
  CHECK(cudaMemcpy(entries, device, sizeof(entries), cudaMemcpyDeviceToHost));
  printf("squares %d %d %d\n", entries[2], entries[5], entries[7]);

  // An error is reported once, and the program goes on.
  scale<<<1, 4096>>>(device, n, 1);
  const cudaError_t refused = cudaGetLastError();
  printf("%s: %s; then %s\n", cudaGetErrorName(refused), cudaGetErrorString(refused),
         cudaGetErrorName(cudaGetLastError()));
  ok = ok && (refused == cudaErrorInvalidValue || refused == cudaErrorInvalidConfiguration);  // before CUDA 13

  CHECK(cudaStreamDestroy(streams[0]));
  CHECK(cudaStreamDestroy(streams[1]));
  CHECK(cudaEventDestroy(start));
  CHECK(cudaEventDestroy(done));
  CHECK(cudaFree(nodes));
  CHECK(cudaFree(pitched));
  CHECK(cudaFree(device));
  CHECK(cudaFreeHost(host));
  CHECK(cudaDeviceReset());
  puts(ok ? "all right" : "WRONG");
  return ok ? 0 : 1;
}
