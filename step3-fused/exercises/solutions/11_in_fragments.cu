// Exercise 11: an epilogue where mma left the sums: bias, residual, and two numbers a store.
//
//   kernel-fusion learn check 11_in_fragments
//   kernel-fusion simt -I ../step2-attention/include exercises/solutions/11_in_fragments.cu
//   nvcc -O3 -arch=native -I ../step2-attention/include -I ../common/include exercises/solutions/11_in_fragments.cu &&
//   ./a.out
//
// Counted: global load requests, global store requests, shared load requests
#include <kf/exercise.h>
#include <step2/mma.h>

using namespace kf::KF_BACKEND;

constexpr int kDepth = 32, kRows = 16, kWidth = 16;  // two products of 8 columns

__device__ uint32_t pair(const float* p) { return pack<__half>(p[0], p[1]); }

// y = residual + x · w + bias, by one warp: x [kRows, kDepth]; w [kWidth, kDepth], so that a column's numbers are
// neighbours; bias [kWidth]; residual and y [kRows, kWidth]. With g = lane / 4 and t = lane % 4, d[n] of a lane is
//   d[n][0], d[n][1]: row g, columns 8n + 2t and 8n + 2t + 1        d[n][2], d[n][3]: row g + 8, the same columns
__global__ void product(const float* x, const float* w, const float* bias, const float* residual, float* y) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  float d[kWidth / 8][4] = {};
  for (int k = 0; k < kDepth; k += 16) {
    const float *upper = x + g * kDepth + k + 2 * t, *lower = upper + 8 * kDepth;
    const uint32_t a[4] = {pair(upper), pair(lower), pair(upper + 8), pair(lower + 8)};
    for (int n = 0; n < kWidth / 8; ++n) {
      const float* column = w + (8 * n + g) * kDepth + k + 2 * t;
      mma_m16n8k16<__half>(d[n], a, {pair(column), pair(column + 8)});
    }
  }
  // SOLUTION: y from the registers; load and store two neighbours at once, as float2
  // | (void)bias, (void)residual, (void)y;
  for (int n = 0; n < kWidth / 8; ++n) {
    const float2 b = reinterpret_cast<const float2*>(bias)[4 * n + t];
    for (int r = 0; r < 2; ++r) {
      const int i = (g + 8 * r) * kWidth / 2 + 4 * n + t;  // of a pair
      const float2 before = reinterpret_cast<const float2*>(residual)[i];
      reinterpret_cast<float2*>(y)[i] = {before.x + d[n][2 * r] + b.x, before.y + d[n][2 * r + 1] + b.y};
    }
  }
  // END
}

int main() {
  std::vector<float> x(kRows * kDepth), w(kWidth * kDepth), bias(kWidth), residual(kRows * kWidth),
      y(kRows * kWidth, NAN);
  for (int i = 0; i < kRows * kDepth; ++i) x[i] = 0.25f * (i * 7919 % 17 - 8);
  for (int i = 0; i < kWidth * kDepth; ++i) w[i] = 0.5f * (i * 104729 % 13 - 6);
  for (int i = 0; i < kWidth; ++i) bias[i] = static_cast<float>(i);
  for (int i = 0; i < kRows * kWidth; ++i) residual[i] = 100.0f * (i % 9);
  {
    const OnGpu<float> gpu_x(x), gpu_w(w), gpu_bias(bias), gpu_residual(residual), gpu_y(y);
    product<<<1, 32>>>(gpu_x.data, gpu_w.data, gpu_bias.data, gpu_residual.data, gpu_y.data);
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  for (int i = 0; i < kRows * kWidth; ++i) {
    float expected = residual[i] + bias[i % kWidth];
    for (int k = 0; k < kDepth; ++k) expected += x[i / kWidth * kDepth + k] * w[i % kWidth * kDepth + k];
    if (y[i] == expected) continue;  // small multiples of 1/8: exact
    std::printf("WRONG: y[%d][%d] is %g, must be %g\n", i / kWidth, i % kWidth, y[i], expected);
    return 1;
  }
  std::printf("all right\n");
  return 0;
}
