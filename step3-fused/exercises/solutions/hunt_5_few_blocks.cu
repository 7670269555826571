// Bug hunt 5: persistent blocks draw heads of attention and tiles of the projection from one queue. Four blocks are
// right.
//
//   kernel-fusion learn check hunt_5_few_blocks
//   kernel-fusion simt exercises/solutions/hunt_5_few_blocks.cu
//   nvcc -O3 -I ../common/include exercises/solutions/hunt_5_few_blocks.cu && timeout 10 ./a.out        with a GPU
#include <kf/exercise.h>

constexpr int kHeads = 4, kDim = 8, kWidth = kHeads * kDim, kBands = 6;  // a band: one row, for short
constexpr int kParts = 3, kColumns = 8, kOut = kParts * kColumns;        // of the projection
constexpr int kGroup = kParts + kHeads;                                  // tiles of a band

// SOLUTION
// | constexpr int kLag = 0;  // bands from attention to the projection
constexpr int kLag = 1;  // bands from attention to the projection
// END

__device__ int next, attended[kBands];  // tiles drawn; of each band, heads that are there; 0 before

// Column `c` of a band's attention; for short all scores are equal: the mean of the values so far.
__device__ void attend(const float* v, float* attention, int band, int c) {
  float sum = 0;
  for (int row = 0; row <= band; ++row) sum += v[row * kWidth + c];
  attention[band * kWidth + c] = sum / (band + 1);
}

// Column `c` of a band's projection, which needs all heads of attention.
__device__ void project(const float* attention, const float* w, float* y, int band, int c) {
  float sum = 0;
  for (int k = 0; k < kWidth; ++k) sum += attention[band * kWidth + k] * w[k * kOut + c];
  y[band * kOut + c] = sum;
}

// Blocks of 32 threads. In the queue, group after group: kParts tiles of a band's projection, then kHeads heads of the
// attention of the band that is kLag further. The first groups have no projection, the last ones no attention.
__global__ void dataflow(const float* v, const float* w, float* attention, float* y) {
  const int t = threadIdx.x;
  for (;;) {
    int index = t == 0 ? atomicAdd(&next, 1) : 0;
    index = __shfl_sync(0xffffffffu, index, 0);
    if (index >= (kBands + kLag) * kGroup) return;
    const int group = index / kGroup, part = index % kGroup, head = part - kParts, band = group - kLag;
    if (head >= 0 && group < kBands) {
      if (t < kDim) attend(v, attention, group, head * kDim + t);
      __syncthreads();
      __threadfence();
      if (t == 0) atomicAdd(&attended[group], 1);
    } else if (head < 0 && band >= 0) {
      while (t == 0 && atomicAdd(&attended[band], 0) < kHeads) continue;
      __threadfence();
      __syncthreads();
      if (t < kColumns) project(attention, w, y, band, part * kColumns + t);
    }
  }
}

bool right(int blocks) {
  std::vector<float> v(kBands * kWidth), w(kWidth * kOut), y(kBands * kOut, NAN), sum(kWidth);
  for (int i = 0; i < kBands * kWidth; ++i) v[i] = std::sin(0.7f * i);
  for (int i = 0; i < kWidth * kOut; ++i) w[i] = std::cos(1.3f * i);
  const int none[kBands] = {};
  CHECK(cudaMemcpyToSymbol(attended, none, sizeof none));
  CHECK(cudaMemcpyToSymbol(next, none, sizeof next));
  {
    const OnGpu gpu_v(v), gpu_w(w), gpu_attention(v), gpu_y(y);
    dataflow<<<blocks, 32>>>(gpu_v.data, gpu_w.data, gpu_attention.data, gpu_y.data);
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  for (int band = 0; band < kBands; ++band) {
    for (int k = 0; k < kWidth; ++k) sum[k] += v[band * kWidth + k];
    for (int c = 0; c < kOut; ++c) {
      double expected = 0;
      for (int k = 0; k < kWidth; ++k) expected += double(sum[k]) / (band + 1) * w[k * kOut + c];
      if (std::fabs(y[band * kOut + c] - expected) <= 1e-4) continue;
      std::printf("%d blocks: WRONG: y[%d][%d] is %g, must be %g\n", blocks, band, c, y[band * kOut + c], expected);
      return false;
    }
  }
  std::printf("%d blocks: right\n", blocks);
  return true;
}

int main() {
  for (const int blocks : {8, 4, 3, 1}) {
    if (!right(blocks)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
