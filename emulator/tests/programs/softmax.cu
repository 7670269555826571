// Softmax over rows in one pass: every thread keeps a running maximum and a sum scaled to it, warps and then the block
// join them. Rows of different lengths, one of them with an infinity.
#include <cuda_runtime.h>

#include <cfloat>
#include <cmath>
#include <cstdio>
#include <vector>

#define CHECK_CUDA(call)                                                                         \
  {                                                                                              \
    const cudaError_t error = call;                                                              \
    if (error != cudaSuccess) {                                                                  \
      std::printf("Error: %s:%d, ", __FILE__, __LINE__);                                         \
      std::printf("code: %d, reason: %s\n", static_cast<int>(error), cudaGetErrorString(error)); \
      return 1;                                                                                  \
    }                                                                                            \
  }

struct __align__(8) MD {
  float m;  // maximum
  float d;  // sum of exp(x - m)
};

__device__ __forceinline__ MD combine(MD a, MD b) {
  const bool a_bigger = a.m > b.m;
  const MD bigger = a_bigger ? a : b, smaller = a_bigger ? b : a;
  if (smaller.d == 0.0f) return bigger;
  return {bigger.m, bigger.d + smaller.d * __expf(smaller.m - bigger.m)};
}

template <int THREADBLOCK_SIZE>
__launch_bounds__(THREADBLOCK_SIZE) __global__
    void online_softmax(const float* __restrict x, float* __restrict y, int V) {
  x += static_cast<size_t>(blockIdx.x) * V;
  y += static_cast<size_t>(blockIdx.x) * V;
  MD md{-FLT_MAX, 0.0f};
  for (int i = threadIdx.x; i < V; i += THREADBLOCK_SIZE) md = combine(md, MD{x[i], 1.0f});

  auto join = [](MD mine, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) {
      const MD other{__shfl_xor_sync(~0u, mine.m, step), __shfl_xor_sync(~0u, mine.d, step)};
      mine = combine(mine, other);
    }
    return mine;
  };
  constexpr int kWarps = THREADBLOCK_SIZE / 32;
  __shared__ MD per_warp[kWarps];
  md = join(md, 32);
  if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = md;
  __syncthreads();
  md = threadIdx.x % 32 < kWarps ? per_warp[threadIdx.x % 32] : MD{-FLT_MAX, 0.0f};
  md = join(md, 32);

  const float inverse = __fdividef(1.0f, md.d);
  for (int i = threadIdx.x; i < V; i += THREADBLOCK_SIZE) y[i] = __expf(x[i] - md.m) * inverse;
}

int main() {
  int failed = 0;
  for (const int V : {1, 31, 100, 1000}) {
    const int batch = 6;
    std::vector<float> x(batch * V), y(batch * V);
    for (int i = 0; i < batch * V; ++i) x[i] = static_cast<float>((i * 97 + 13) % 113) / 8.0f - 7.0f;
    if (V > 1) x[V / 2] = -INFINITY;
    float *d_x, *d_y;
    CHECK_CUDA(cudaMalloc(&d_x, x.size() * sizeof(float)));
    CHECK_CUDA(cudaMalloc(&d_y, y.size() * sizeof(float)));
    CHECK_CUDA(cudaMemcpy(d_x, x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice));
    online_softmax<128><<<batch, 128>>>(d_x, d_y, V);
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaMemcpy(y.data(), d_y, y.size() * sizeof(float), cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaFree(d_x));
    CHECK_CUDA(cudaFree(d_y));

    double worst = 0, total = 0;
    for (int row = 0; row < batch; ++row) {
      const float* in = x.data() + row * V;
      double max = -INFINITY, sum = 0;
      for (int i = 0; i < V; ++i) max = std::fmax(max, in[i]);
      for (int i = 0; i < V; ++i) sum += std::exp(in[i] - max);
      for (int i = 0; i < V; ++i) {
        const double error = std::fabs(y[row * V + i] - std::exp(in[i] - max) / sum);
        if (error > worst || error != error) worst = error;  // a NaN enters, and stays
        total += y[row * V + i];
      }
    }
    const bool ok = worst < 1e-5;
    std::printf("%4d wide, in thousandths: %.3f %.3f %.3f; sum of all rows %.3f, %s\n", V, 1000 * y[V / 5],
                1000 * y[V / 3], 1000 * y[4 * V / 5], total, ok ? "right" : "WRONG");
    failed += !ok;
  }
  return failed;
}
