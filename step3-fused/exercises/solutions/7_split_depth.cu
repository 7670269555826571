// Exercise 7: a product of few outputs and a great depth, which blocks share; the last one adds up, in order.
//
//   kernel-fusion learn check 7_split_depth
//   kernel-fusion simt exercises/solutions/7_split_depth.cu
//   kernel-fusion simt --race exercises/solutions/7_split_depth.cu
//   nvcc -O3 -I ../common/include exercises/solutions/7_split_depth.cu && ./a.out        with a GPU
//
// Counted: global load sectors, global atomic requests
#include <kf/exercise.h>

constexpr int kParts = 5, kThreads = 32, kMaxTiles = 64;

__device__ int arrived[kMaxTiles];  // of each tile, how many of its blocks are done; 0 before

// A tile is 32 outputs, a thread each; its kParts blocks have a part of the depth each. `sums` has room for a number of
// each part and output, in the order [part][output]. y is 0 before. `order` stands for a GPU, on which blocks come in
// any order: it says which part a block takes, and the check shuffles it.
__global__ void product(const float* x, const float* w, float* sums, float* y, const float* order, int rows, int depth,
                        int width) {
  const int tile = blockIdx.x, i = tile * kThreads + threadIdx.x, outputs = rows * width;
  const int part = static_cast<int>(order[blockIdx.y]), steps = (depth + kParts - 1) / kParts;
  float sum = 0;
  if (i < outputs) {
    for (int k = part * steps; k < min(depth, (part + 1) * steps); ++k) {
      sum += x[i / width * depth + k] * w[k * width + i % width];
    }
  }
  // SOLUTION: write the sum to `sums` and count in `arrived`; the block that comes last adds up, in the order of parts
  // | if (i < outputs) atomicAdd(&y[i], sum);
  if (i < outputs) sums[part * outputs + i] = sum;
  __threadfence();  // whoever sees that this block has arrived sees its sums
  __syncthreads();  // all threads of the block have written
  __shared__ bool last;
  if (threadIdx.x == 0) last = atomicAdd(&arrived[tile], 1) == kParts - 1;
  __syncthreads();
  if (!last || i >= outputs) return;
  __threadfence();  // what the others had written before they arrived is read after it
  float total = 0;
  for (int p = 0; p < kParts; ++p) total += sums[p * outputs + i];
  y[i] = total;
  // END
}

bool right(int rows, int depth, int width) {
  std::vector<float> x(rows * depth), w(depth * width), order(kParts), first;
  for (int i = 0; i < rows * depth; ++i) x[i] = std::sin(0.37f * (i % 1009 + 1));
  for (int i = 0; i < depth * width; ++i) w[i] = 0.1f + 1.0f / (1 + i * 7919 % 29);
  const int outputs = rows * width, tiles = (outputs + kThreads - 1) / kThreads;
  for (const int step : {1, 2, 3, 4}) {
    std::vector<float> sums(kParts * outputs, NAN), y(outputs);
    for (int b = 0; b < kParts; ++b) order[b] = static_cast<float>(b * step % kParts);
    const int none[kMaxTiles] = {};
    CHECK(cudaMemcpyToSymbol(arrived, none, sizeof none));
    {
      const OnGpu gpu_x(x), gpu_w(w), gpu_order(order), gpu_sums(sums), gpu_y(y);
      product<<<dim3(tiles, kParts), kThreads>>>(gpu_x.data, gpu_w.data, gpu_sums.data, gpu_y.data, gpu_order.data,
                                                 rows, depth, width);
      CHECK(cudaGetLastError());
      gpu_y.read(y);
    }
    if (first.empty()) first = y;
    for (int i = 0; i < outputs; ++i) {
      double expected = 0;
      for (int k = 0; k < depth; ++k) expected += double(x[i / width * depth + k]) * w[k * width + i % width];
      if (!(std::fabs(y[i] - expected) <= 1e-4)) {  // not `>`: NaN must count as wrong
        std::printf("WRONG: %d x %d x %d: y[%d] is %g, must be %g\n", rows, depth, width, i, y[i], expected);
        return false;
      }
      if (y[i] == first[i]) continue;
      std::printf("WRONG: %d x %d x %d: y[%d] is %.9g in one order of the blocks and %.9g in another\n", rows, depth,
                  width, i, first[i], y[i]);
      return false;
    }
  }
  return true;
}

int main() {
  if (!right(8, 500, 12) || !right(1, 3, 1) || !right(3, 64, 33)) return 1;
  std::printf("all right\n");
  return 0;
}
