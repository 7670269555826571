// Exercise 11: a product of floats on tensor cores, right to seven digits.
//
//   kernel-fusion learn check 11_three_products
//   kernel-fusion simt -I include exercises/solutions/11_three_products.cu
//   nvcc -O3 -arch=native -I include -I ../common/include exercises/solutions/11_three_products.cu && ./a.out    from
//   an A100 on
//
// Counted: global load requests, shared load requests
#include <kf/exercise.h>
#include <step2/mma.h>

using namespace kf::KF_BACKEND;

constexpr int kDepth = 64;

// What to_tf32 keeps of x, 11 bits of its 24, and what is left of x then.
__device__ void split(float x, uint32_t& big, uint32_t& small) {
  // SOLUTION: both as TF32; the rest is a float, too
  // | big = to_tf32(x), small = 0;
  big = to_tf32(x);
  small = to_tf32(x - __uint_as_float(big));
  // END
}

// y = a · b: [16, kDepth] by [kDepth, 8], all row after row, by one warp. mma_m16n8k8_tf32: with g = lane / 4, t = lane
// % 4
//   a[0]: row g, column t    a[1]: row g + 8    a[2]: row g, column t + 4    a[3]: both
//   b[0]: row t, column g    b[1]: row t + 4    d[0], d[1]: row g, columns 2t, 2t + 1    d[2], d[3]: row g + 8
__global__ void product(const float* a, const float* b, float* y) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  float d[4] = {};
  for (int k = 0; k < kDepth; k += 8) {
    uint32_t big_a[4], small_a[4], big_b[2], small_b[2];
    for (int i = 0; i < 4; ++i) split(a[(g + i % 2 * 8) * kDepth + k + t + i / 2 * 4], big_a[i], small_a[i]);
    for (int i = 0; i < 2; ++i) split(b[(k + t + i * 4) * 8 + g], big_b[i], small_b[i]);
    // SOLUTION: (big + small) times (big + small), but for what is too small to matter; the small products first
    // | mma_m16n8k8_tf32(d, big_a, big_b);
    mma_m16n8k8_tf32(d, small_a, big_b);
    mma_m16n8k8_tf32(d, big_a, small_b);
    mma_m16n8k8_tf32(d, big_a, big_b);
    // END
  }
  for (int i = 0; i < 4; ++i) y[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

int main() {
  std::vector<float> a(16 * kDepth), b(kDepth * 8), y(16 * 8, NAN);
  for (int i = 0; i < 16 * kDepth; ++i) a[i] = std::sin(0.37f * i);  // all bits of the fraction in use
  for (int i = 0; i < kDepth * 8; ++i) b[i] = std::cos(0.53f * i);
  const OnGpu<float> gpu_a(a), gpu_b(b), gpu_y(y);
  product<<<1, 32>>>(gpu_a.data, gpu_b.data, gpu_y.data);
  CHECK(cudaGetLastError());
  gpu_y.read(y);
  double most = 0;
  for (int i = 0; i < 16 * 8; ++i) {
    double expected = 0, size = 0;
    for (int k = 0; k < kDepth; ++k) {
      const double term = double(a[i / 8 * kDepth + k]) * b[k * 8 + i % 8];
      expected += term, size += std::fabs(term);
    }
    const double error = std::fabs(y[i] - expected) / size;
    most = error > most || std::isnan(error) ? error : most;
    if (std::isnan(error)) break;
  }
  if (!(most <= 5e-7)) return std::printf("WRONG: the largest relative error is %.1e, must be 5e-7 at most\n", most), 1;
  std::printf("all right\n");
  return 0;
}
