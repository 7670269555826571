// Attention in its plainest form: a token looks at those before it and takes a weighted mean of what they hold.
//
//   out[i] = sum over keys j <= i of weight[i][j] * v[j],   weight[i] = softmax over j of (q[i] . k[j]) / sqrt(D)
//
//   nvcc -O3 attention_kernel.cu && ./a.out       with a GPU
//   kernel-fusion simt attention_kernel.cu        without one: the same kernel, its threads run by the CPU
#include <cuda_runtime.h>

#include <cmath>
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

constexpr int kHeads = 12;    // GPT-2 has 12 heads of 64 columns, each with its own q, k and v
constexpr int kLength = 128;  // tokens
constexpr int kDim = 64;
constexpr int kElements = kHeads * kLength * kDim;  // of q, k, v and out: [head][token][column]

// A block a query of a head.
__global__ void attention(const float* q, const float* k, const float* v, float* out) {
  __shared__ float score[kLength];  // one array for the whole block
  const int query = blockIdx.x;
  const int head_start = blockIdx.y * kLength * kDim;
  const int seen = query + 1;  // a token sees itself and those before it: causal

  // 1. A thread a key: how well does it fit the query?
  for (int key = threadIdx.x; key < seen; key += blockDim.x) {
    float dot = 0;
    for (int d = 0; d < kDim; ++d) dot += q[head_start + query * kDim + d] * k[head_start + key * kDim + d];
    score[key] = dot / sqrtf(kDim);
  }
  __syncthreads();  // wait until all threads have written their scores; from here on each reads all of them

  // 2. Softmax: weights that add up to 1. Without "- max", exp would overflow for scores above 88.
  float max = score[0];
  for (int key = 1; key < seen; ++key) max = fmaxf(max, score[key]);
  float sum = 0;  // all threads repeat the same sum; kernels/softmax/ shares the work
  for (int key = 0; key < seen; ++key) sum += expf(score[key] - max);

  // 3. A thread a column of the output: the mean of v, weighted.
  for (int d = threadIdx.x; d < kDim; d += blockDim.x) {
    float mean = 0;
    for (int key = 0; key < seen; ++key) mean += expf(score[key] - max) / sum * v[head_start + key * kDim + d];
    out[head_start + query * kDim + d] = mean;
  }
}

// The same on the CPU, in double, one query after another.
void attention_on_cpu(const float* q, const float* k, const float* v, double* out) {
  for (int row = 0; row < kHeads * kLength; ++row) {
    const int head_start = row / kLength * kLength * kDim;
    const int seen = row % kLength + 1;
    std::vector<double> weight(seen);
    double max = -INFINITY, sum = 0;
    for (int key = 0; key < seen; ++key) {
      for (int d = 0; d < kDim; ++d) weight[key] += double{q[row * kDim + d]} * k[head_start + key * kDim + d];
      weight[key] /= std::sqrt(double{kDim});
      max = std::fmax(max, weight[key]);
    }
    for (double& w : weight) sum += w = std::exp(w - max);
    for (int d = 0; d < kDim; ++d) {
      out[row * kDim + d] = 0;
      for (int key = 0; key < seen; ++key) out[row * kDim + d] += weight[key] / sum * v[head_start + key * kDim + d];
    }
  }
}

int main() {
  std::vector<float> input[3], out(kElements);  // q, k, v
  for (auto& values : input) {
    for (int i = 0; i < kElements; ++i) values.push_back(0.001f * (std::rand() % 4001 - 2000));
  }
  std::vector<double> expected(kElements);
  attention_on_cpu(input[0].data(), input[1].data(), input[2].data(), expected.data());

  const size_t bytes = kElements * sizeof(float);
  float *gpu[3], *gpu_out;
  for (int t = 0; t < 3; ++t) {
    CHECK(cudaMalloc(&gpu[t], bytes));
    CHECK(cudaMemcpy(gpu[t], input[t].data(), bytes, cudaMemcpyHostToDevice));
  }
  CHECK(cudaMalloc(&gpu_out, bytes));
  CHECK(cudaMemset(gpu_out, 0xff, bytes));  // NaN everywhere: an element that nobody writes will show

  cudaEvent_t start, stop;
  CHECK(cudaEventCreate(&start));
  CHECK(cudaEventCreate(&stop));
  float ms;
  for (int run = 0; run < 2; ++run) {  // the first launch also pays for loading the code
    CHECK(cudaEventRecord(start));
    attention<<<dim3(kLength, kHeads), 64>>>(gpu[0], gpu[1], gpu[2], gpu_out);
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(stop));
    CHECK(cudaEventSynchronize(stop));
    CHECK(cudaEventElapsedTime(&ms, start, stop));
  }
  CHECK(cudaMemcpy(out.data(), gpu_out, bytes, cudaMemcpyDeviceToHost));

  double worst = 0;
  int wrong = 0;
  for (int i = 0; i < kElements; ++i) {
    const double error = std::fabs(out[i] - expected[i]);
    if (error > worst || error != error) worst = error;  // a NaN enters, and stays; fmax would drop it
    wrong += !(error < 1e-5);                            // not `error >= 1e-5`: NaN must count as wrong
  }
  std::printf("attention: %d heads, %d tokens, %d columns: %.0f microseconds\n", kHeads, kLength, kDim, 1e3 * ms);
  std::printf("greatest error against the CPU in double: %.1e\n", worst);
  for (float* memory : {gpu[0], gpu[1], gpu[2], gpu_out}) CHECK(cudaFree(memory));
  std::printf(wrong == 0 ? "all right\n" : "%d of %d elements WRONG\n", wrong, kElements);
  return wrong == 0 ? 0 : 1;
}
