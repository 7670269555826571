// Bug hunt 1: what follows attention: the residual, then LayerNorm. With one head it is right.
//
//   kernel-fusion learn check hunt_1_one_head
//   kernel-fusion simt exercises/solutions/hunt_1_one_head.cu
//   nvcc -O3 -I ../common/include exercises/solutions/hunt_1_one_head.cu && ./a.out        with a GPU
#include <kf/exercise.h>

constexpr int kMostHeads = 4, kMostDim = 64;

struct Statistics {
  float mean, rstd;
};

// The sum of what the lanes have, in all lanes.
__device__ float warp_sum(float x) {
  for (int away = 16; away > 0; away /= 2) x += __shfl_xor_sync(0xffffffffu, x, away);
  return x;
}

// By a warp, of `count` numbers.
__device__ Statistics statistics(const float* x, int count) {
  float sum = 0, squares = 0;
  for (int c = threadIdx.x % 32; c < count; c += 32) sum += x[c];
  const float mean = warp_sum(sum) / count;
  for (int c = threadIdx.x % 32; c < count; c += 32) squares += (x[c] - mean) * (x[c] - mean);
  return {mean, 1 / sqrtf(warp_sum(squares) / count + 1e-5f)};
}

// A block a token, a warp a head. Attention has left attended[head][token][d]; a row of y has all heads side by side.
__global__ void add_and_normalize(const float* attended, const float* residual, float* y, int tokens, int dim) {
  __shared__ float row[kMostHeads * kMostDim];
  const int heads = blockDim.x / 32, head = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = blockIdx.x, width = heads * dim;
  for (int d = lane; d < dim; d += 32) {
    const int column = head * dim + d;
    row[column] = attended[(head * tokens + token) * dim + d] + residual[token * width + column];
  }
  __syncthreads();  // the row is whole
  // SOLUTION
  // | const Statistics s = statistics(row + head * dim, dim);
  const Statistics s = statistics(row, width);
  // END
  for (int c = head * dim + lane; c < (head + 1) * dim; c += 32) {
    y[token * width + c] = (row[c] - s.mean) * s.rstd;
  }
}

bool right(const char* what, int heads, float from_head_to_head) {
  const int tokens = 3, dim = 40, width = heads * dim;
  std::vector<float> attended(tokens * width), residual(tokens * width), y(tokens * width, NAN);
  for (int i = 0; i < tokens * width; ++i) {
    const int token = i / width, head = i % width / dim, d = i % dim;
    attended[(head * tokens + token) * dim + d] = 0.25f * (d * 7 % 13) + from_head_to_head * head;
    residual[i] = 0.5f * ((d + token) % 5);
  }
  {
    const OnGpu gpu_attended(attended), gpu_residual(residual), gpu_y(y);
    add_and_normalize<<<tokens, 32 * heads>>>(gpu_attended.data, gpu_residual.data, gpu_y.data, tokens, dim);
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  for (int token = 0; token < tokens; ++token) {
    std::vector<double> row(width);
    double mean = 0, variance = 0;
    for (int c = 0; c < width; ++c) {
      row[c] = double(attended[(c / dim * tokens + token) * dim + c % dim]) + residual[token * width + c];
      mean += row[c] / width;
    }
    for (int c = 0; c < width; ++c) variance += std::pow(row[c] - mean, 2) / width;
    for (int c = 0; c < width; ++c) {
      const double expected = (row[c] - mean) / std::sqrt(variance + 1e-5);
      if (std::fabs(y[token * width + c] - expected) <= 1e-4) continue;
      std::printf("%s: WRONG: y[%d][%d] is %g, must be %g\n", what, token, c, y[token * width + c], expected);
      return false;
    }
  }
  std::printf("%s: right\n", what);
  return true;
}

int main() {
  bool all = right("one head", 1, 0);
  all = right("four heads, all with the same numbers", 4, 0) && all;
  all = right("four heads, each with numbers of its own", 4, 0.5f) && all;
  std::printf("%s\n", all ? "all right" : "Hint: which numbers have the mean 0, one head's or a row's?");
  return all ? 0 : 1;
}
