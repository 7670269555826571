// A histogram of letters: privatised in shared memory, with a grid-stride loop and atomics on both levels.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>
#include <string>

constexpr int kBins = 26;
constexpr int kBlock = 256;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

__global__ void histogram_global(const char* text, unsigned int length, unsigned int* bins) {
  const unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < length) {
    const int letter = text[i] - 'a';
    if (letter >= 0 && letter < kBins) atomicAdd(&bins[letter], 1);
  }
}

__global__ void histogram_privatized(const char* text, unsigned int length, unsigned int* bins) {
  __shared__ unsigned int private_bins[kBins];
  for (unsigned int bin = threadIdx.x; bin < kBins; bin += blockDim.x) private_bins[bin] = 0u;
  __syncthreads();

  unsigned int accumulator = 0;  // equal letters in a row need one atomic
  int previous = -1;
  const unsigned int stride = blockDim.x * gridDim.x;
  for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < length; i += stride) {
    const int letter = text[i] - 'a';
    if (letter < 0 || letter >= kBins) continue;
    if (letter == previous) {
      ++accumulator;
    } else {
      if (accumulator > 0) atomicAdd(&private_bins[previous], accumulator);
      accumulator = 1;
      previous = letter;
    }
  }
  if (accumulator > 0) atomicAdd(&private_bins[previous], accumulator);
  __syncthreads();
  for (unsigned int bin = threadIdx.x; bin < kBins; bin += blockDim.x) {
    const unsigned int count = private_bins[bin];
    if (count > 0) atomicAdd(&bins[bin], count);
  }
}

int main() {
  const char* sentence = "programming massively parallel processors, one thread at a time; ";
  std::string text;
  while (text.size() < 30000) text += sentence;
  const auto length = static_cast<unsigned int>(text.size());

  char* d_text;
  unsigned int *d_bins, bins[2][kBins], expected[kBins] = {};
  for (const char c : text) {
    if (c >= 'a' && c <= 'z') ++expected[c - 'a'];
  }
  check(cudaMalloc(&d_text, length), "cudaMalloc");
  check(cudaMalloc(&d_bins, sizeof(bins)), "cudaMalloc");
  check(cudaMemset(d_bins, 0, sizeof(bins)), "cudaMemset");
  check(cudaMemcpy(d_text, text.data(), length, cudaMemcpyHostToDevice), "cudaMemcpy");
  histogram_global<<<(length + kBlock - 1) / kBlock, kBlock>>>(d_text, length, d_bins);
  histogram_privatized<<<8, kBlock>>>(d_text, length, d_bins + kBins);
  check(cudaDeviceSynchronize(), "the kernels");
  check(cudaMemcpy(bins, d_bins, sizeof(bins), cudaMemcpyDeviceToHost), "cudaMemcpy");

  for (int bin = 0; bin < kBins; ++bin) std::printf("%c %u\n", 'a' + bin, bins[1][bin]);
  const bool same = std::memcmp(bins[0], expected, sizeof(expected)) == 0;
  const bool private_same = std::memcmp(bins[1], expected, sizeof(expected)) == 0;
  std::printf("global %s, privatised %s\n", same ? "right" : "WRONG", private_same ? "right" : "WRONG");
  cudaFree(d_text);
  cudaFree(d_bins);
  return same && private_same ? 0 : 1;
}
