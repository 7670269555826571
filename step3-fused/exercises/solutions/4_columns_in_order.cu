// Exercise 4: the gradient of LayerNorm's weight, by blocks, and the same bits in whatever order they come.
//
//   kernel-fusion learn check 4_columns_in_order
//   kernel-fusion simt exercises/solutions/4_columns_in_order.cu
//   nvcc -O3 -I ../common/include exercises/solutions/4_columns_in_order.cu && ./a.out        with a GPU
//
// Counted: global load sectors, global atomic requests
#include <kf/exercise.h>

constexpr int kBlocks = 7, kThreads = 32;

// Stage 1. dweight[c] is the sum of grad * x_hat over all rows, where x_hat is the normalised x. Of a column a block
// has a part: each kBlocks-th row. A thread holds its column's sum until there are no more rows. dweight is 0 before.
// `order` stands for a GPU, on which blocks come in any order: it says which part a block takes, and the check shuffles
// it.
__global__ void sum_rows(const float* grad, const float* x_hat, float* partial, float* dweight, const float* order,
                         int rows, int width) {
  const int part = static_cast<int>(order[blockIdx.y]), column = blockIdx.x * kThreads + threadIdx.x;
  if (column >= width) return;
  float sum = 0;
  for (int row = part; row < rows; row += kBlocks) sum += grad[row * width + column] * x_hat[row * width + column];
  // SOLUTION: leave the sum in partial[kBlocks][width], for stage 2
  // | atomicAdd(&dweight[column], sum);
  partial[part * width + column] = sum;
  // END
}

// Stage 2, a thread a column.
__global__ void add_parts(const float* partial, float* dweight, int width) {
  const int column = blockIdx.x * kThreads + threadIdx.x;
  // SOLUTION: add the parts of the column, always in the same order
  if (column >= width) return;
  float sum = 0;
  for (int part = 0; part < kBlocks; ++part) sum += partial[part * width + column];
  dweight[column] = sum;
  // END
}

bool right(int rows, int width) {
  std::vector<float> grad(rows * width), x_hat(rows * width), order(kBlocks), first;
  for (int i = 0; i < rows * width; ++i) {
    grad[i] = 0.1f + 1.0f / (1 + i * 7919 % 29), x_hat[i] = std::sin(0.37f * (i % 1009 + 1));
  }
  for (const int step : {1, 2, 3}) {
    std::vector<float> partial(kBlocks * width, NAN), dweight(width);
    for (int b = 0; b < kBlocks; ++b) order[b] = static_cast<float>(b * step % kBlocks);
    {
      const OnGpu gpu_grad(grad), gpu_x_hat(x_hat), gpu_order(order), gpu_partial(partial), gpu_dweight(dweight);
      const int blocks = (width + kThreads - 1) / kThreads;
      sum_rows<<<dim3(blocks, kBlocks), kThreads>>>(gpu_grad.data, gpu_x_hat.data, gpu_partial.data, gpu_dweight.data,
                                                    gpu_order.data, rows, width);
      CHECK(cudaGetLastError());
      add_parts<<<blocks, kThreads>>>(gpu_partial.data, gpu_dweight.data, width);
      CHECK(cudaGetLastError());
      gpu_dweight.read(dweight);
    }
    if (first.empty()) first = dweight;
    for (int c = 0; c < width; ++c) {
      double expected = 0;
      for (int row = 0; row < rows; ++row) expected += double(grad[row * width + c]) * x_hat[row * width + c];
      if (!(std::fabs(dweight[c] - expected) <= 1e-4)) {  // not `>`: NaN must count as wrong
        std::printf("WRONG: %d rows of %d: dweight[%d] is %g, must be %g\n", rows, width, c, dweight[c], expected);
        return false;
      }
      if (dweight[c] == first[c]) continue;
      std::printf("WRONG: %d rows of %d: dweight[%d] is %.9g in one order of the blocks and %.9g in another\n", rows,
                  width, c, first[c], dweight[c]);
      return false;
    }
  }
  return true;
}

int main() {
  if (!right(200, 100) || !right(1, 1) || !right(3, 33) || !right(64, 32)) return 1;
  std::printf("all right\n");
  return 0;
}
