// Bug hunt 3: the backward of dropout gets another mask than its forward, but only where it is launched otherwise.
//
//   kernel-fusion learn check hunt_3_other_launch
//   kernel-fusion simt exercises/solutions/hunt_3_other_launch.cu
//   nvcc -O3 exercises/solutions/hunt_3_other_launch.cu && ./a.out        with a GPU
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

// out[i] = in[i] / (1 - p), or 0 with probability p: dropout's forward, and with the same seed its backward too.
__global__ void dropout(const float* in, float* out, int n, float p, uint64_t seed) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int threads = gridDim.x * blockDim.x;
  // SOLUTION
  // | uint64_t counter = uint64_t{static_cast<unsigned>(thread)} << 32;  // room for 2^32 numbers of this thread
  // | for (int i = thread; i < n; i += threads, ++counter) {
  // |   const uint32_t number = philox(seed, counter).word[0] >> 16;
  for (int i = thread; i < n; i += threads) {
    const uint32_t number = philox(seed, i).word[0] >> 16;
    // END
    out[i] = number >= p * 65536 ? in[i] / (1 - p) : 0.f;
  }
}

struct Shape {
  int blocks, threads;
};

bool right(int n, Shape forward, Shape backward) {
  const float p = 0.25f;
  const uint64_t seed = 42;
  const std::vector<float> ones(n, 1.f);
  std::vector<float> y(n), dx(n);
  const size_t bytes = n * sizeof(float);
  float *gpu_ones, *gpu_out;
  CHECK(cudaMalloc(&gpu_ones, bytes));
  CHECK(cudaMalloc(&gpu_out, bytes));
  CHECK(cudaMemcpy(gpu_ones, ones.data(), bytes, cudaMemcpyHostToDevice));
  CHECK(cudaMemset(gpu_out, 0xff, bytes));  // NaN: an element that nobody writes will show
  dropout<<<forward.blocks, forward.threads>>>(gpu_ones, gpu_out, n, p, seed);
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpy(y.data(), gpu_out, bytes, cudaMemcpyDeviceToHost));
  CHECK(cudaMemset(gpu_out, 0xff, bytes));
  dropout<<<backward.blocks, backward.threads>>>(gpu_ones, gpu_out, n, p, seed);
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpy(dx.data(), gpu_out, bytes, cudaMemcpyDeviceToHost));
  CHECK(cudaFree(gpu_ones));
  CHECK(cudaFree(gpu_out));

  std::printf("n = %5d, forward %2d blocks of %3d, backward %2d of %3d: ", n, forward.blocks, forward.threads,
              backward.blocks, backward.threads);
  int dropped = 0;
  for (int i = 0; i < n; ++i) {
    dropped += y[i] == 0.f;
    if (!(dx[i] == y[i])) {  // both got ones, so both must give 0 or 1 / (1 - p)
      std::printf("WRONG: element %d gave %g, then %g\n", i, y[i], dx[i]);
      return false;
    }
  }
  if (!(std::fabs(dropped - n * p) <= 5 * std::sqrt(n * p * (1 - p)))) {  // five standard deviations
    std::printf("WRONG: %d were dropped, about %g were expected\n", dropped, n * p);
    return false;
  }
  std::printf("right\n");
  return true;
}

int main() {
  bool all = true;
  for (const int n : {1000, 20001}) {
    for (const Shape backward : {Shape{8, 256}, Shape{16, 128}, Shape{4, 256}, Shape{1, 96}}) {
      all &= right(n, {8, 256}, backward);
    }
  }
  std::printf(all ? "all right\n"
                  : "Hint: what does the random number of element i depend on, besides the seed and i?\n");
  return all ? 0 : 1;
}
