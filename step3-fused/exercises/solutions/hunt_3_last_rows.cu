// Bug hunt 3: the sums of the columns of normalised rows. It is right for some numbers of rows.
//
//   kernel-fusion learn check hunt_3_last_rows
//   kernel-fusion simt exercises/solutions/hunt_3_last_rows.cu
//   nvcc -O3 -I ../common/include exercises/solutions/hunt_3_last_rows.cu && ./a.out        with a GPU
#include <kf/exercise.h>

constexpr int kWarps = 4, kWidth = 32 * kWarps;  // a thread a column

// The sum of what the lanes have, in all lanes.
__device__ float warp_sum(float x) {
  for (int away = 16; away > 0; away /= 2) x += __shfl_xor_sync(0xffffffffu, x, away);
  return x;
}

// By a warp, a row of kWidth.
__device__ void normalize(const float* row, float* out) {
  const int lane = threadIdx.x % 32;
  float sum = 0, squares = 0;
  for (int c = lane; c < kWidth; c += 32) sum += row[c];
  const float mean = warp_sum(sum) / kWidth;
  for (int c = lane; c < kWidth; c += 32) squares += (row[c] - mean) * (row[c] - mean);
  const float rstd = 1 / sqrtf(warp_sum(squares) / kWidth + 1e-5f);
  for (int c = lane; c < kWidth; c += 32) out[c] = (row[c] - mean) * rstd;
}

// One block. Round by round its warps normalise a row each; then each thread adds up its column of these rows.
__global__ void column_sums(const float* x, float* sums, int rows) {
  __shared__ float normalized[kWarps][kWidth];
  const int warp = threadIdx.x / 32;
  float sum = 0;
  for (int first = 0; first < rows; first += kWarps) {
    const int row = first + warp;
    // SOLUTION
    // | if (row < rows) {
    // |   normalize(x + row * kWidth, normalized[warp]);
    // |   __syncthreads();
    // | }
    if (row < rows) normalize(x + row * kWidth, normalized[warp]);
    __syncthreads();
    // END
    for (int r = 0; r < min(kWarps, rows - first); ++r) sum += normalized[r][threadIdx.x];
    __syncthreads();
  }
  sums[threadIdx.x] = sum;
}

bool right(int rows) {
  std::vector<float> x(rows * kWidth), sums(kWidth, NAN);
  std::vector<double> expected(kWidth);
  for (int i = 0; i < rows * kWidth; ++i) x[i] = 0.25f * (i * 7919 % 13) + 0.5f * (i % 7);
  for (int row = 0; row < rows; ++row) {
    double mean = 0, variance = 0;
    for (int c = 0; c < kWidth; ++c) mean += double(x[row * kWidth + c]) / kWidth;
    for (int c = 0; c < kWidth; ++c) variance += std::pow(x[row * kWidth + c] - mean, 2) / kWidth;
    for (int c = 0; c < kWidth; ++c) expected[c] += (x[row * kWidth + c] - mean) / std::sqrt(variance + 1e-5);
  }
  {
    const OnGpu gpu_x(x), gpu_sums(sums);
    column_sums<<<1, kWidth>>>(gpu_x.data, gpu_sums.data, rows);
    CHECK(cudaGetLastError());
    gpu_sums.read(sums);
  }
  for (int c = 0; c < kWidth; ++c) {
    if (std::fabs(sums[c] - expected[c]) <= 1e-4) continue;
    std::printf("%d rows: WRONG: the sum of column %d is %g, must be %g\n", rows, c, sums[c], expected[c]);
    return false;
  }
  std::printf("%d rows: right\n", rows);
  return true;
}

int main() {
  for (const int rows : {4, 8, 6, 9}) {
    if (right(rows)) continue;
    std::printf("Hint: which warps come to which barrier in the last round?\n");
    return 1;
  }
  std::printf("all right\n");
  return 0;
}
