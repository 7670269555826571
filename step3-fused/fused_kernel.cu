// Attention, residual and LayerNorm in one launch, in the plainest form.
//
//   x = attention(q, k, v) + residual,    y = (x - mean(x)) / sqrt(variance(x) + eps)    for each token
//
//   nvcc -O3 fused_kernel.cu && ./a.out       with a GPU
//   kernel-fusion simt fused_kernel.cu        without one: the same kernel, its threads run by the CPU
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

void check(cudaError_t error, int line) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s:%d: %s\n", __FILE__, line, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, __LINE__)

constexpr int kHeads = 12, kDim = 64;  // GPT-2 has 12 heads of 64 columns
constexpr int kWidth = kHeads * kDim;  // side by side they make its width
constexpr int kLength = 64;            // tokens
constexpr float kEps = 1e-5f;

// A block a token, 256 threads. All arrays are [token][column]; head h owns the columns from h * kDim on.
__global__ void fused(const float* q, const float* k, const float* v, const float* residual, float* y) {
  __shared__ float score[kLength];  // of one head
  __shared__ float row[kWidth];     // the token's output of all heads: what a second kernel would have to read back
  const int token = blockIdx.x, seen = token + 1;  // a token sees itself and those before it: causal

  // Phase 1: attention, head after head, as in step 2.
  for (int first = 0; first < kWidth; first += kDim) {  // the head's first column
    for (int key = threadIdx.x; key < seen; key += blockDim.x) {
      float dot = 0;
      for (int c = first; c < first + kDim; ++c) dot += q[token * kWidth + c] * k[key * kWidth + c];
      score[key] = dot / sqrtf(kDim);
    }
    __syncthreads();  // all scores are there
    float max = score[0];
    for (int key = 1; key < seen; ++key) max = fmaxf(max, score[key]);
    float sum = 0;  // all threads repeat the same sum; kernels/ shares the work
    for (int key = 0; key < seen; ++key) sum += expf(score[key] - max);
    for (int c = first + threadIdx.x; c < first + kDim; c += blockDim.x) {
      row[c] = 0;
      for (int key = 0; key < seen; ++key) row[c] += expf(score[key] - max) / sum * v[key * kWidth + c];
    }
    __syncthreads();  // all have read the scores; the next head may overwrite them
  }
  // Phase 2: the residual. Each thread adds to its own columns.
  for (int c = threadIdx.x; c < kWidth; c += blockDim.x) row[c] += residual[token * kWidth + c];
  __syncthreads();  // the row is whole: LayerNorm needs all of its columns, from all heads
  // Phase 3: LayerNorm. The variance is computed from x - mean, in a second pass, so that a large mean does no harm.
  float mean = 0, variance = 0;
  for (int c = 0; c < kWidth; ++c) mean += row[c] / kWidth;
  for (int c = 0; c < kWidth; ++c) variance += (row[c] - mean) * (row[c] - mean) / kWidth;
  const float rstd = 1 / sqrtf(variance + kEps);
  for (int c = threadIdx.x; c < kWidth; c += blockDim.x) y[token * kWidth + c] = (row[c] - mean) * rstd;
}

// The same on the CPU, in double, one token after another.
void fused_on_cpu(const float* q, const float* k, const float* v, const float* residual, double* y) {
  for (int token = 0; token < kLength; ++token) {
    double* row = y + token * kWidth;
    for (int c = 0; c < kWidth; ++c) row[c] = residual[token * kWidth + c];
    for (int first = 0; first < kWidth; first += kDim) {  // a head
      double weight[kLength] = {}, sum = 0;
      for (int key = 0; key <= token; ++key) {
        for (int c = first; c < first + kDim; ++c) weight[key] += double{q[token * kWidth + c]} * k[key * kWidth + c];
        sum += weight[key] = std::exp(weight[key] / std::sqrt(double{kDim}));  // these scores are small: no overflow
      }
      for (int key = 0; key <= token; ++key) {
        for (int c = first; c < first + kDim; ++c) row[c] += weight[key] / sum * v[key * kWidth + c];
      }
    }
    double mean = 0, variance = 0;
    for (int c = 0; c < kWidth; ++c) mean += row[c] / kWidth;
    for (int c = 0; c < kWidth; ++c) variance += (row[c] - mean) * (row[c] - mean) / kWidth;
    for (int c = 0; c < kWidth; ++c) row[c] = (row[c] - mean) / std::sqrt(variance + kEps);
  }
}

int main() {
  constexpr size_t kBytes = kLength * kWidth * sizeof(float);
  std::vector<float> input[4], y(kLength * kWidth);  // q, k, v, residual
  float *gpu[4], *gpu_y;
  for (int t = 0; t < 4; ++t) {
    for (size_t i = 0; i < y.size(); ++i) input[t].push_back(0.001f * (std::rand() % 4001 - 2000));
    CHECK(cudaMalloc(&gpu[t], kBytes));
    CHECK(cudaMemcpy(gpu[t], input[t].data(), kBytes, cudaMemcpyHostToDevice));
  }
  CHECK(cudaMalloc(&gpu_y, kBytes));
  CHECK(cudaMemset(gpu_y, 0xff, kBytes));  // NaN everywhere: an element that nobody writes will show
  std::vector<double> expected(y.size());
  fused_on_cpu(input[0].data(), input[1].data(), input[2].data(), input[3].data(), expected.data());

  cudaEvent_t start, stop;
  float ms;
  for (cudaEvent_t* event : {&start, &stop}) CHECK(cudaEventCreate(event));
  for (int run = 0; run < 2; ++run) {  // the first launch also pays for loading the code
    CHECK(cudaEventRecord(start));
    fused<<<kLength, 256>>>(gpu[0], gpu[1], gpu[2], gpu[3], gpu_y);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(stop));
  }
  CHECK(cudaEventSynchronize(stop));
  CHECK(cudaEventElapsedTime(&ms, start, stop));
  CHECK(cudaMemcpy(y.data(), gpu_y, kBytes, cudaMemcpyDeviceToHost));

  double worst = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    const double error = std::fabs(y[i] - expected[i]);
    if (error > worst || error != error) worst = error;  // a NaN enters, and stays
  }
  const bool right = worst < 1e-5;
  std::printf("attention + residual + LayerNorm, %d tokens, one launch: %.0f microseconds\n", kLength, 1e3 * ms);
  std::printf("greatest error against the CPU in double: %.1e\n%s\n", worst, right ? "all right" : "WRONG");
  for (float* memory : {gpu[0], gpu[1], gpu[2], gpu[3], gpu_y}) CHECK(cudaFree(memory));
  return right ? 0 : 1;
}
