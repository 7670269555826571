// Bug hunt 4: two warps of a block attend, one normalises what they announce. It is right in some orders of the warps.
//
//   kernel-fusion learn check hunt_4_early_counter
//   kernel-fusion simt exercises/solutions/hunt_4_early_counter.cu
//   KF_SIMT_SCHEDULE=reverse kernel-fusion simt exercises/solutions/hunt_4_early_counter.cu
//   nvcc -O3 -I ../common/include exercises/solutions/hunt_4_early_counter.cu && ./a.out        with a GPU
#include <kf/exercise.h>

constexpr int kWidth = 64, kRows = 4, kTiles = 8, kBlocks = 3;  // a block has kTiles tiles of kRows rows

__device__ int stored[kBlocks];  // how many tiles of a block are there; 0 before

// The two warps that attend wait here for each other; the one that normalises goes its own way.
__device__ void attending_warps_meet() { asm volatile("bar.sync 1, 64;" ::: "memory"); }

// The sum of what the lanes have, in all lanes.
__device__ float warp_sum(float x) {
  for (int away = 16; away > 0; away /= 2) x += __shfl_xor_sync(0xffffffffu, x, away);
  return x;
}

// By 64 threads, a column each; for short all scores are equal: attention is the mean of the values so far.
__device__ void attend(const float* v, float* attention, int* counter, int c) {
  float sum = 0;
  for (int tile = 0, row = 0; tile < kTiles; ++tile) {
    for (const int end = row + kRows; row < end; ++row) {
      sum += v[row * kWidth + c];
      attention[row * kWidth + c] = sum / (row + 1);
    }
    // SOLUTION
    // | if (c == kWidth - 1) {
    // |   __threadfence();
    // |   atomicAdd(counter, 1);
    // | }
    // | attending_warps_meet();
    attending_warps_meet();
    if (c == kWidth - 1) {
      __threadfence();
      atomicAdd(counter, 1);
    }
    // END
  }
}

// By a warp: tile after tile, as soon as it is there.
__device__ void normalize(const float* attention, float* y, int* counter) {
  const int lane = threadIdx.x % 32;
  for (int tile = 0; tile < kTiles; ++tile) {
    if (lane == 0) {
      while (atomicAdd(counter, 0) <= tile) continue;
      __threadfence();
    }
    __syncwarp();
    for (int row = tile * kRows; row < (tile + 1) * kRows; ++row) {
      float x[2] = {attention[row * kWidth + lane], attention[row * kWidth + 32 + lane]};
      const float mean = warp_sum(x[0] + x[1]) / kWidth;
      for (float& number : x) number -= mean;
      const float rstd = 1 / sqrtf(warp_sum(x[0] * x[0] + x[1] * x[1]) / kWidth + 1e-5f);
      for (int i = 0; i < 2; ++i) y[row * kWidth + 32 * i + lane] = x[i] * rstd;
    }
  }
}

__global__ void attend_and_normalize(const float* v, float* attention, float* y) {
  const int first = blockIdx.x * kTiles * kRows * kWidth, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 1) {
    normalize(attention + first, y + first, &stored[blockIdx.x]);
  } else {
    attend(v + first, attention + first, &stored[blockIdx.x], warp / 2 * 32 + lane);
  }
}

bool right() {
  constexpr int kLength = kTiles * kRows, kCount = kBlocks * kLength * kWidth;
  std::vector<float> v(kCount), y(kCount, NAN);
  for (int i = 0; i < kCount; ++i) v[i] = std::sin(0.7f * i) + 0.3f * (i % 5);
  {
    const OnGpu gpu_v(v), gpu_attention(y), gpu_y(y);
    attend_and_normalize<<<kBlocks, kWidth + 32>>>(gpu_v.data, gpu_attention.data, gpu_y.data);
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  std::vector<double> sum(kWidth);
  for (int i = 0; i < kBlocks * kLength; ++i) {
    const int row = i % kLength;
    double mean = 0, variance = 0;
    if (row == 0) sum.assign(kWidth, 0);
    for (int c = 0; c < kWidth; ++c) mean += (sum[c] += v[i * kWidth + c]) / (row + 1) / kWidth;
    for (int c = 0; c < kWidth; ++c) variance += std::pow(sum[c] / (row + 1) - mean, 2) / kWidth;
    for (int c = 0; c < kWidth; ++c) {
      const double expected = (sum[c] / (row + 1) - mean) / std::sqrt(variance + 1e-5);
      if (std::fabs(y[i * kWidth + c] - expected) <= 1e-4) continue;
      std::printf("WRONG: block %d: y[%d][%d] is %g, must be %g\n", i / kLength, row, c, y[i * kWidth + c], expected);
      return false;
    }
  }
  return true;
}

int main() {
  const bool passed = right();
  std::printf(passed ? "all right\n" : "Hint: whose numbers are there when the counter grows? Ask --race.\n");
  return passed ? 0 : 1;
}
