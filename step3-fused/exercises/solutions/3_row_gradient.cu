// Exercise 3: LayerNorm's gradient of a row, from two averages; a warp a row.
//
//   kernel-fusion learn check 3_row_gradient
//   kernel-fusion simt exercises/solutions/3_row_gradient.cu
//   nvcc -O3 -I ../common/include exercises/solutions/3_row_gradient.cu && ./a.out        with a GPU
//
// Counted: global load requests, shuffles
#include <kf/exercise.h>

constexpr int kWarps = 4;
constexpr double kEps = 1e-5;

// The sum of what the lanes have, in all lanes.
__device__ float warp_sum(float x) {
  for (int away = 16; away > 0; away /= 2) x += __shfl_xor_sync(0xffffffffu, x, away);
  return x;
}

// y = (x - mean) * rstd * weight, and grad is the loss's gradient with respect to y. dx is that with respect to x.
// Forward has kept mean and rstd = 1 / sqrt(variance + eps) of each row.
__global__ void row_gradient(const float* x, const float* weight, const float* grad, const float* means,
                             const float* rstds, float* dx, int rows, int width) {
  const int row = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const float mean = means[row], rstd = rstds[row];
  x += row * width, grad += row * width, dx += row * width;
  // SOLUTION: dx; each number of x went into all outputs of its row, through mean and rstd
  // | for (int c = lane; c < width; c += 32) dx[c] = rstd * grad[c] * weight[c];
  float g_sum = 0, gx_sum = 0;
  for (int c = lane; c < width; c += 32) {
    g_sum += grad[c] * weight[c];
    gx_sum += grad[c] * weight[c] * (x[c] - mean) * rstd;
  }
  const float g_average = warp_sum(g_sum) / width, gx_average = warp_sum(gx_sum) / width;
  for (int c = lane; c < width; c += 32) {
    dx[c] = rstd * (grad[c] * weight[c] - g_average - (x[c] - mean) * rstd * gx_average);
  }
  // END
}

// What the loss becomes when x[moved] is moved: the sum of grad * y of a row. Also its mean and rstd.
double loss(const float* x, const float* weight, const float* grad, int width, int moved, double by, double& mean,
            double& rstd) {
  double variance = 0, sum = 0;
  mean = by / width;
  for (int c = 0; c < width; ++c) mean += double(x[c]) / width;
  for (int c = 0; c < width; ++c) variance += std::pow(x[c] + (c == moved ? by : 0) - mean, 2) / width;
  rstd = 1 / std::sqrt(variance + kEps);
  for (int c = 0; c < width; ++c) sum += grad[c] * weight[c] * (x[c] + (c == moved ? by : 0) - mean) * rstd;
  return sum;
}

bool right(int rows, int width) {
  std::vector<float> x(rows * width), weight(width), grad(rows * width), dx(rows * width, NAN), means(rows),
      rstds(rows);
  for (int i = 0; i < rows * width; ++i) x[i] = 3 + 0.5f * (i * 7919 % 17), grad[i] = 0.5f * (i * 104729 % 13) - 2;
  for (int c = 0; c < width; ++c) weight[c] = 0.75f + 0.25f * (c % 5);
  double mean, rstd;
  for (int row = 0; row < rows; ++row) {
    loss(&x[row * width], weight.data(), &grad[row * width], width, 0, 0, mean, rstd);
    means[row] = static_cast<float>(mean), rstds[row] = static_cast<float>(rstd);
  }
  {
    const OnGpu gpu_x(x), gpu_weight(weight), gpu_grad(grad), gpu_means(means), gpu_rstds(rstds), gpu_dx(dx);
    row_gradient<<<(rows + kWarps - 1) / kWarps, 32 * kWarps>>>(
        gpu_x.data, gpu_weight.data, gpu_grad.data, gpu_means.data, gpu_rstds.data, gpu_dx.data, rows, width);
    CHECK(cudaGetLastError());
    gpu_dx.read(dx);
  }
  for (int i = 0; i < rows * width; ++i) {
    const float *of_x = &x[i - i % width], *of_grad = &grad[i - i % width];
    const double by = 1e-5, up = loss(of_x, weight.data(), of_grad, width, i % width, by, mean, rstd);
    const double expected = (up - loss(of_x, weight.data(), of_grad, width, i % width, -by, mean, rstd)) / (2 * by);
    if (std::fabs(dx[i] - expected) <= 1e-4) continue;
    std::printf("WRONG: width %d: dx[%d][%d] is %g, must be %g\n", width, i / width, i % width, dx[i], expected);
    return false;
  }
  return true;
}

int main() {
  for (const int width : {3, 32, 33, 100, 1}) {
    if (!right(6, width)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
