// Exercise 6: the gradient of softmax, from its output; a warp a row.
//
//   kernel-fusion learn check 6_softmax_gradient
//   kernel-fusion simt exercises/solutions/6_softmax_gradient.cu
//   nvcc -O3 -I ../common/include exercises/solutions/6_softmax_gradient.cu && ./a.out        with a GPU
//
// Counted: global load requests, shuffles
#include <kf/exercise.h>

constexpr int kWarps = 4;

// The sum of what the lanes have, in all lanes.
__device__ float warp_sum(float x) {
  for (int away = 16; away > 0; away /= 2) x += __shfl_xor_sync(0xffffffffu, x, away);
  return x;
}

// y is softmax's output, grad the loss's gradient with respect to y. dx is that with respect to softmax's input.
__global__ void softmax_gradient(const float* y, const float* grad, float* dx, int rows, int width) {
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  y += row * width, grad += row * width, dx += row * width;
  // SOLUTION: dx; each number of x went into all outputs of its row, through the sum that they are divided by
  // | for (int c = lane; c < width; c += 32) dx[c] = y[c] * grad[c];
  float delta = 0;
  for (int c = lane; c < width; c += 32) delta += y[c] * grad[c];
  delta = warp_sum(delta);
  for (int c = lane; c < width; c += 32) dx[c] = y[c] * (grad[c] - delta);
  // END
}

bool right(int rows, int width) {
  std::vector<float> y(rows * width), grad(rows * width), dx(rows * width, NAN);
  std::vector<double> sum(rows);
  for (int i = 0; i < rows * width; ++i) {
    y[i] = expf(0.25f * (i * 7919 % 17)), grad[i] = 0.5f * (i * 104729 % 13) - 2;
    sum[i / width] += y[i];
  }
  for (int i = 0; i < rows * width; ++i) y[i] = static_cast<float>(y[i] / sum[i / width]);
  {
    const OnGpu gpu_y(y), gpu_grad(grad), gpu_dx(dx);
    softmax_gradient<<<(rows + kWarps - 1) / kWarps, 32 * kWarps>>>(gpu_y.data, gpu_grad.data, gpu_dx.data, rows,
                                                                    width);
    CHECK(cudaGetLastError());
    gpu_dx.read(dx);
  }
  for (int row = 0; row < rows; ++row) {
    double delta = 0;
    for (int c = 0; c < width; ++c) delta += double(y[row * width + c]) * grad[row * width + c];
    for (int c = 0; c < width; ++c) {
      const int i = row * width + c;
      const double expected = y[i] * (grad[i] - delta);
      if (std::fabs(dx[i] - expected) <= 1e-5) continue;
      std::printf("WRONG: width %d: dx[%d][%d] is %g, must be %g\n", width, row, c, dx[i], expected);
      return false;
    }
  }
  return true;
}

int main() {
  for (const int width : {2, 32, 33, 100, 1}) {
    if (!right(6, width)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
