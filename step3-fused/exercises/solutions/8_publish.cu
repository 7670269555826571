// Exercise 8: a tile that another block reads in the same launch: published by a counter, and waited for.
//
//   kernel-fusion learn check 8_publish
//   kernel-fusion simt exercises/solutions/8_publish.cu
//   kernel-fusion simt --race exercises/solutions/8_publish.cu
//   nvcc -O3 -I ../common/include exercises/solutions/8_publish.cu && ./a.out        with a GPU
//
// Counted: barriers
#include <kf/exercise.h>

constexpr int kHeads = 4, kDim = 16, kWidth = kHeads * kDim;  // a thread a column
constexpr int kRows = 4, kMaxBands = 16;                      // rows of a band

__device__ int attended[kMaxBands];  // of each band, how many heads are there; 0 before

// By all threads of a block, each of which has stored some of a tile: says in *counter that it is there.
__device__ void publish(int* counter) {
  // SOLUTION: count the tile, when all that the block has stored is in memory
  // | (void)counter;
  __syncthreads();  // all threads have stored
  if (threadIdx.x != 0) return;
  __threadfence();  // whoever sees that the counter grew sees what they stored
  atomicAdd(counter, 1);
  // END
}

// By all threads of a block: until so many tiles are published. They may read them then.
__device__ void wait_for(int* counter, int tiles) {
  // SOLUTION: look at the counter until it says so; one thread is enough to look
  // | (void)counter, (void)tiles;
  if (threadIdx.x == 0) {
    while (atomicAdd(counter, 0) < tiles) continue;
    __threadfence();  // what had been stored before the counter grew is read after it
  }
  __syncthreads();  // nobody reads before
  // END
}

// A block for each band of rows, and one for each of its heads. There are few, so all run at once: the bands' come
// first here, and wait for blocks that come later.
__global__ void attend_and_normalize(const float* v, float* attention, float* y, int bands) {
  if (blockIdx.x >= bands) {
    const int band = (blockIdx.x - bands) / kHeads, head = (blockIdx.x - bands) % kHeads;
    const int column = head * kDim + threadIdx.x % kDim, row = band * kRows + threadIdx.x / kDim;
    float sum = 0;  // for short all scores are equal: attention is the mean of the values so far
    for (int key = 0; key <= row; ++key) sum += v[key * kWidth + column];
    attention[row * kWidth + column] = sum / (row + 1);
    publish(&attended[band]);
  } else {
    const int band = blockIdx.x;
    wait_for(&attended[band], kHeads);
    for (int row = band * kRows; row < (band + 1) * kRows; ++row) {
      float mean = 0, variance = 0;
      for (int c = 0; c < kWidth; ++c) mean += attention[row * kWidth + c] / kWidth;
      for (int c = 0; c < kWidth; ++c) {
        variance += (attention[row * kWidth + c] - mean) * (attention[row * kWidth + c] - mean) / kWidth;
      }
      const int i = row * kWidth + threadIdx.x;
      y[i] = (attention[i] - mean) / sqrtf(variance + 1e-5f);
    }
  }
}

bool right(int bands) {
  const int rows = bands * kRows, none[kMaxBands] = {};
  std::vector<float> v(rows * kWidth), y(rows * kWidth, NAN);
  std::vector<double> sum(kWidth);
  for (int i = 0; i < rows * kWidth; ++i) v[i] = std::sin(0.7f * i) + 0.3f * (i % 5);
  CHECK(cudaMemcpyToSymbol(attended, none, sizeof none));
  {
    const OnGpu gpu_v(v), gpu_attention(y), gpu_y(y);
    attend_and_normalize<<<bands * (1 + kHeads), kWidth>>>(gpu_v.data, gpu_attention.data, gpu_y.data, bands);
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  for (int row = 0; row < rows; ++row) {
    double mean = 0, variance = 0;
    for (int c = 0; c < kWidth; ++c) mean += (sum[c] += v[row * kWidth + c]) / (row + 1) / kWidth;
    for (int c = 0; c < kWidth; ++c) variance += std::pow(sum[c] / (row + 1) - mean, 2) / kWidth;
    for (int c = 0; c < kWidth; ++c) {
      const double expected = (sum[c] / (row + 1) - mean) / std::sqrt(variance + 1e-5);
      if (std::fabs(y[row * kWidth + c] - expected) <= 1e-4) continue;
      std::printf("WRONG: %d bands: y[%d][%d] is %g, must be %g\n", bands, row, c, y[row * kWidth + c], expected);
      return false;
    }
  }
  return true;
}

int main() {
  for (const int bands : {kMaxBands, 5, 1}) {
    if (!right(bands)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
