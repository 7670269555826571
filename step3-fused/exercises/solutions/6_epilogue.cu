// Exercise 6: bias and GELU at the end of a product, while its sums are still in registers.
//
//   kernel-fusion learn check 6_epilogue
//   kernel-fusion simt exercises/solutions/6_epilogue.cu
//   nvcc -O3 -I ../common/include exercises/solutions/6_epilogue.cu && ./a.out        with a GPU
//
// Counted: launches, global load sectors, global store sectors
#include <kf/exercise.h>

__device__ int moved;

// All reads and writes of h and y go through these, and are counted.
__device__ float load(const float* from, int i) {
  atomicAdd(&moved, 1);
  return from[i];
}
__device__ void store(float* to, int i, float value) {
  atomicAdd(&moved, 1);
  to[i] = value;
}

__host__ __device__ float gelu(float x) { return x / (1 + expf(-1.5957691f * (x + 0.044715f * x * x * x))); }

// h = x w + bias, which the backward pass needs, and y = gelu(h). A thread an output.
__global__ void product(const float* x, const float* w, const float* bias, float* h, float* y, int rows, int depth,
                        int width) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows * width) return;
  float sum = 0;
  for (int k = 0; k < depth; ++k) sum += x[i / width * depth + k] * w[k * width + i % width];
  // SOLUTION: bias and GELU here, and write h and y once each
  // | store(h, i, sum);
  const float value = sum + bias[i % width];
  store(h, i, value);
  store(y, i, gelu(value));
  // END
}

// SOLUTION: this kernel and its launch below are not needed then
// | __global__ void bias_gelu(const float* bias, float* h, float* y, int rows, int width) {
// |   const int i = blockIdx.x * blockDim.x + threadIdx.x;
// |   if (i >= rows * width) return;
// |   const float value = load(h, i) + bias[i % width];
// |   store(h, i, value);
// |   store(y, i, gelu(value));
// | }
// |
// END
bool right(int rows, int depth, int width) {
  std::vector<float> x(rows * depth), w(depth * width), bias(width), h(rows * width, NAN), y(rows * width, NAN);
  for (int i = 0; i < rows * depth; ++i) x[i] = 0.25f * (i * 7919 % 17) - 2;
  for (int i = 0; i < depth * width; ++i) w[i] = 0.125f * (i * 31 % 13) - 0.75f;
  for (int c = 0; c < width; ++c) bias[c] = 0.5f * (c % 7) - 1;
  const int none = 0, blocks = (rows * width + 63) / 64;
  int count;
  CHECK(cudaMemcpyToSymbol(moved, &none, sizeof none));
  {
    const OnGpu gpu_x(x), gpu_w(w), gpu_bias(bias), gpu_h(h), gpu_y(y);
    product<<<blocks, 64>>>(gpu_x.data, gpu_w.data, gpu_bias.data, gpu_h.data, gpu_y.data, rows, depth, width);
    CHECK(cudaGetLastError());
    // SOLUTION
    // | bias_gelu<<<blocks, 64>>>(gpu_bias.data, gpu_h.data, gpu_y.data, rows, width);
    // | CHECK(cudaGetLastError());
    // END
    gpu_h.read(h);
    gpu_y.read(y);
  }
  CHECK(cudaMemcpyFromSymbol(&count, moved, sizeof count));
  for (int i = 0; i < rows * width; ++i) {
    double sum = bias[i % width];
    for (int k = 0; k < depth; ++k) sum += double(x[i / width * depth + k]) * w[k * width + i % width];
    const double expected = gelu(static_cast<float>(sum));
    if (std::fabs(h[i] - sum) <= 1e-4 && std::fabs(y[i] - expected) <= 1e-4) continue;
    std::printf("WRONG: %d x %d x %d: h[%d][%d] is %g and y %g, must be %g and %g\n", rows, depth, width, i / width,
                i % width, h[i], y[i], sum, expected);
    return false;
  }
  if (count == 2 * rows * width) return true;
  std::printf("WRONG: right, but h and y were read or written %g times for each output; two are enough\n",
              1.0 * count / (rows * width));
  return false;
}

int main() {
  if (!right(20, 16, 30) || !right(1, 1, 1) || !right(33, 40, 65)) return 1;
  std::printf("all right\n");
  return 0;
}
