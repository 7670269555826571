// The transpose of a matrix: straight, through a tile, and through a padded tile, timed by events.
#include <assert.h>
#include <stdio.h>

// Convenience function for checking CUDA runtime API results; can be wrapped around any runtime API call.
inline cudaError_t checkCuda(cudaError_t result) {
  if (result != cudaSuccess) {
    fprintf(stderr, "CUDA Runtime Error: %s\n", cudaGetErrorString(result));
    assert(result == cudaSuccess);
  }
  return result;
}

const int TILE_DIM = 32;
const int BLOCK_ROWS = 8;
const int NUM_REPS = 3;

__global__ void transposeNaive(float* odata, const float* idata) {
  int x = blockIdx.x * TILE_DIM + threadIdx.x;
  int y = blockIdx.y * TILE_DIM + threadIdx.y;
  int width = gridDim.x * TILE_DIM, height = gridDim.y * TILE_DIM;
  for (int j = 0; j < TILE_DIM; j += BLOCK_ROWS) odata[x * height + (y + j)] = idata[(y + j) * width + x];
}

template <int PADDING>
__global__ void transposeTile(float* odata, const float* idata) {
  __shared__ float tile[TILE_DIM][TILE_DIM + PADDING];
  int x = blockIdx.x * TILE_DIM + threadIdx.x;
  int y = blockIdx.y * TILE_DIM + threadIdx.y;
  int width = gridDim.x * TILE_DIM, height = gridDim.y * TILE_DIM;
  for (int j = 0; j < TILE_DIM; j += BLOCK_ROWS) tile[threadIdx.y + j][threadIdx.x] = idata[(y + j) * width + x];
  __syncthreads();
  x = blockIdx.y * TILE_DIM + threadIdx.x;
  y = blockIdx.x * TILE_DIM + threadIdx.y;
  for (int j = 0; j < TILE_DIM; j += BLOCK_ROWS) odata[(y + j) * height + x] = tile[threadIdx.x][threadIdx.y + j];
}

typedef void (*Kernel)(float*, const float*);

int main() {
  const int nx = 160, ny = 96;
  const int mem_size = nx * ny * sizeof(float);
  dim3 dimGrid(nx / TILE_DIM, ny / TILE_DIM, 1);
  dim3 dimBlock(TILE_DIM, BLOCK_ROWS, 1);

  float *h_idata, *h_tdata, *d_idata, *d_tdata;
  checkCuda(cudaMallocHost(&h_idata, mem_size));
  checkCuda(cudaMallocHost(&h_tdata, mem_size));
  checkCuda(cudaMalloc(&d_idata, mem_size));
  checkCuda(cudaMalloc(&d_tdata, mem_size));
  for (int j = 0; j < ny; j++)
    for (int i = 0; i < nx; i++) h_idata[j * nx + i] = (float)(j * nx + i);
  checkCuda(cudaMemcpy(d_idata, h_idata, mem_size, cudaMemcpyHostToDevice));

  cudaEvent_t startEvent, stopEvent;
  checkCuda(cudaEventCreate(&startEvent));
  checkCuda(cudaEventCreate(&stopEvent));
  const Kernel kernels[] = {transposeNaive, transposeTile<0>, transposeTile<1>};
  const char* names[] = {"naive", "coalesced", "conflict-free"};
  int failures = 0;
  for (int k = 0; k < 3; k++) {
    checkCuda(cudaMemset(d_tdata, 0, mem_size));
    checkCuda(cudaEventRecord(startEvent, 0));
    for (int i = 0; i < NUM_REPS; i++) kernels[k]<<<dimGrid, dimBlock>>>(d_tdata, d_idata);
    checkCuda(cudaEventRecord(stopEvent, 0));
    checkCuda(cudaEventSynchronize(stopEvent));
    float ms = -1;
    checkCuda(cudaEventElapsedTime(&ms, startEvent, stopEvent));
    checkCuda(cudaMemcpy(h_tdata, d_tdata, mem_size, cudaMemcpyDeviceToHost));
    int wrong = 0;
    for (int j = 0; j < ny; j++)
      for (int i = 0; i < nx; i++) wrong += h_tdata[i * ny + j] != h_idata[j * nx + i];
    printf("%-14s %s, out[1][0..3] = %.0f %.0f %.0f %.0f\n", names[k], wrong ? "FAILED" : "passed", h_tdata[ny],
           h_tdata[ny + 1], h_tdata[ny + 2], h_tdata[ny + 3]);
    failures += wrong != 0 || ms < 0;
  }
  checkCuda(cudaEventDestroy(startEvent));
  checkCuda(cudaEventDestroy(stopEvent));
  checkCuda(cudaFree(d_tdata));
  checkCuda(cudaFree(d_idata));
  checkCuda(cudaFreeHost(h_idata));
  checkCuda(cudaFreeHost(h_tdata));
  return failures;
}
