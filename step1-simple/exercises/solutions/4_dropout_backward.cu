// Exercise 4: the backward of dropout, which computes the mask again instead of reading a stored one.
//
//   kernel-fusion learn check 4_dropout_backward
//   kernel-fusion simt exercises/solutions/4_dropout_backward.cu
//   nvcc -O3 exercises/solutions/4_dropout_backward.cu && ./a.out        with a GPU
//
// Counted: global load sectors, global store sectors
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                       \
  do {                                                                                    \
    const cudaError_t error = (call);                                                     \
    if (error != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

struct Random {
  uint32_t word[4];
};

// Philox4x32-10: four random words for each pair of a seed and a counter. No state: anybody may ask for any of them.
__host__ __device__ Random philox(uint64_t seed, uint64_t counter) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  Random r = {{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0}};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * r.word[0], b = uint64_t{0xCD9E8D57} * r.word[2];
    r = {{static_cast<uint32_t>(b >> 32) ^ r.word[1] ^ key0, static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ r.word[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return r;
}

// y[i] = x[i] / (1 - p), or 0 with probability p. A thread does eight neighbours: one call of philox gives it eight
// 16-bit numbers, and it drops those below p * 65536.
__global__ void forward(const float* x, float* y, int n, float p, uint64_t seed) {
  const int first = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
  const Random random = philox(seed, first / 8);
  for (int j = 0; j < 8 && first + j < n; ++j) {
    const uint32_t number = (random.word[j / 2] >> (16 * (j % 2))) & 0xffff;
    y[first + j] = number >= p * 65536 ? x[first + j] / (1 - p) : 0.f;
  }
}

// dx[i] = dy[i] / (1 - p), or 0 where the forward dropped element i. A thread does one element.
__global__ void backward(const float* dy, float* dx, int n, float p, uint64_t seed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  // SOLUTION: find the 16-bit number that the forward used for element i, and decide by it as the forward did
  // | if (i < n) dx[i] = dy[i];
  if (i >= n) return;
  const Random random = philox(seed, i / 8);
  const uint32_t number = (random.word[i % 8 / 2] >> (16 * (i % 2))) & 0xffff;
  dx[i] = number >= p * 65536 ? dy[i] / (1 - p) : 0.f;
  // END
}

bool right(int n, float p, uint64_t seed) {
  const std::vector<float> ones(n, 1.f);
  std::vector<float> y(n), dx(n);
  const size_t bytes = n * sizeof(float);
  float *gpu_ones, *gpu_y, *gpu_dx;
  CHECK(cudaMalloc(&gpu_ones, bytes));
  CHECK(cudaMalloc(&gpu_y, bytes));
  CHECK(cudaMalloc(&gpu_dx, bytes));
  CHECK(cudaMemcpy(gpu_ones, ones.data(), bytes, cudaMemcpyHostToDevice));
  CHECK(cudaMemset(gpu_y, 0xff, bytes));  // NaN: an element that nobody writes will show
  forward<<<(n + 8 * 128 - 1) / (8 * 128), 128>>>(gpu_ones, gpu_y, n, p, seed);
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpy(y.data(), gpu_y, bytes, cudaMemcpyDeviceToHost));

  int dropped = 0;
  for (int i = 0; i < n; ++i) dropped += y[i] == 0.f;
  if (!(std::fabs(dropped - n * p) <= 5 * std::sqrt(n * p * (1 - p)))) {  // five standard deviations
    std::printf("WRONG: n = %d: the forward dropped %d elements, about %g were expected\n", n, dropped, n * p);
    return false;
  }
  for (const int threads : {32, 96, 256}) {  // the mask must not depend on the launch
    CHECK(cudaMemset(gpu_dx, 0xff, bytes));
    backward<<<(n + threads - 1) / threads, threads>>>(gpu_ones, gpu_dx, n, p, seed);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(dx.data(), gpu_dx, bytes, cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; ++i) {
      if (!(dx[i] == y[i])) {  // both got ones, so both must give 0 or 1 / (1 - p)
        std::printf("WRONG: n = %d, p = %g, blocks of %d: dx[%d] is %g, must be %g: the forward %s this element\n", n,
                    p, threads, i, dx[i], y[i], y[i] == 0.f ? "dropped" : "kept");
        return false;
      }
    }
  }
  for (float* memory : {gpu_ones, gpu_y, gpu_dx}) CHECK(cudaFree(memory));
  return true;
}

int main() {
  for (const int n : {1, 7, 33, 1000, 50003}) {
    for (const float p : {0.f, 0.1f, 0.5f}) {
      if (!right(n, p, 1) || !right(n, p, 0x123456789abcdefULL)) return 1;
    }
  }
  std::printf("all right\n");
  return 0;
}
