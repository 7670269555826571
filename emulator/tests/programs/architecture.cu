// What device code and host code see of __CUDA_ARCH__: in functions of each kind, in macros, constants and classes.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                               \
  do {                                                                            \
    const cudaError_t error = (call);                                             \
    if (error != cudaSuccess) {                                                   \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, cudaGetErrorString(error)); \
      std::exit(1);                                                               \
    }                                                                             \
  } while (0)

#if __CUDA_ARCH__ >= 700
#define SIDE "device"
constexpr int kStages = 4;
#else
#define SIDE "host"
constexpr int kStages = 2;
#endif
constexpr int kBytes = 16 * kStages;

#if __CUDA_ARCH__ < 600 && defined(__CUDA_ARCH__)
#error "this program is for newer GPUs"
#endif

// As in many programs, from before there was such an instruction.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 600
#else
__device__ double atomicAdd(double* address, double value) { return *address = value - 1000; }
#endif

__device__ int newest_branch() {
#if __CUDA_ARCH__ >= 700
  return 7;
#elif __CUDA_ARCH__ >= 600
  return 6;
#else
  return 0;
#endif
}

#ifdef __CUDA_ARCH__
__device__ int only_on_the_device() { return 11; }
#endif

__host__ __device__ const char* side() { return SIDE; }

__host__ __device__ constexpr int stages() {
#ifdef __CUDA_ARCH__
  return 4;
#else
  return 2;
#endif
}

struct Counter {
  int from;

  __host__ __device__ explicit Counter(int start) : from(start) {
#ifdef __CUDA_ARCH__
    from += 100;
#endif
  }
  template <class T>
  __device__ T doubled() const {
#ifdef __CUDA_ARCH__
    return T(2) * from;
#else
    return T(-1);
#endif
  }
};

template <class T>
__global__ void look(int* seen, T* sum) {
#ifdef __CUDA_ARCH__
  seen[0] = __CUDA_ARCH__;
  seen[1] = only_on_the_device();
#endif
  seen[2] = newest_branch();
  seen[3] = side()[0] == 'd';
  seen[4] = kStages;
  seen[5] = kBytes;
  seen[6] = stages();
  seen[7] = static_cast<int>(Counter(1).doubled<T>());
  atomicAdd(sum, T(2));
}

int main() {
#ifdef __CUDA_ARCH__
  std::printf("never printed\n");
#endif
  int* seen;
  double* sum;
  CHECK(cudaMallocManaged(&seen, 8 * sizeof(int)));
  CHECK(cudaMallocManaged(&sum, sizeof(double)));
  *sum = 40;
  look<<<1, 1>>>(seen, sum);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());

  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  const bool known = seen[0] > 0 && seen[0] <= 100 * device.major + 10 * device.minor;
  std::printf("__CUDA_ARCH__ is one that the device runs: %s\n", known ? "yes" : "no");
  std::printf("device: only there %d, newest branch %d, side %s\n", seen[1], seen[2], seen[3] ? "device" : "host");
  std::printf("device: stages %d, bytes %d, constexpr %d, class %d, sum %g\n", seen[4], seen[5], seen[6], seen[7],
              *sum);
  static_assert(stages() == 2, "the host's");
  std::printf("host: side %s, stages %d, bytes %d, constexpr %d, class %d\n", side(), kStages, kBytes, stages(),
              Counter(1).from);
  const bool right = known && seen[1] == 11 && seen[2] == 7 && seen[3] == 1 && seen[4] == 4 && seen[5] == 64 &&
                     seen[6] == 4 && seen[7] == 202 && *sum == 42 && kStages == 2 && Counter(1).from == 1;
  CHECK(cudaFree(seen));
  CHECK(cudaFree(sum));
  std::printf("%s\n", right ? "all right" : "WRONG");
  return right ? 0 : 1;
}
