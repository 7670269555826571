// Bug hunt 2: attention by tiles of 16 keys. It is right for many lengths.
//
//   kernel-fusion learn check hunt_2_last_tile
//   kernel-fusion simt exercises/solutions/hunt_2_last_tile.cu
//   nvcc -O3 -I ../common/include exercises/solutions/hunt_2_last_tile.cu && ./a.out        with a GPU
#include <kf/exercise.h>

constexpr int kTile = 16;

// One query: scores of the keys and their values are given, since this is about the tiles. A thread a key of a tile.
__global__ void attention(const float* score, const float* value, float* out, int keys) {
  __shared__ float s[kTile], v[kTile];
  float greatest = -INFINITY, sum = 0, mean = 0;
  for (int first = 0; first < keys; first += kTile) {
    const int j = first + threadIdx.x;
    // SOLUTION
    // | s[threadIdx.x] = j < keys ? score[j] : 0;
    s[threadIdx.x] = j < keys ? score[j] : -INFINITY;
    // END
    v[threadIdx.x] = j < keys ? value[j] : 0;
    __syncthreads();
    float raised = greatest;
    for (int t = 0; t < kTile; ++t) raised = fmaxf(raised, s[t]);
    const float factor = expf(greatest - raised);
    greatest = raised, sum *= factor, mean *= factor;
    for (int t = 0; t < kTile; ++t) {
      const float weight = expf(s[t] - greatest);
      sum += weight, mean += weight * v[t];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) out[0] = mean / sum;
}

bool right(int keys) {
  std::vector<float> score(keys), value(keys), out(1, NAN);
  for (int j = 0; j < keys; ++j) score[j] = 0.5f * (j * 7 % 5) - 2, value[j] = static_cast<float>(j % 4) + 1;
  {
    const OnGpu gpu_score(score), gpu_value(value), gpu_out(out);
    attention<<<1, kTile>>>(gpu_score.data, gpu_value.data, gpu_out.data, keys);
    CHECK(cudaGetLastError());
    gpu_out.read(out);
  }
  double sum = 0, mean = 0;
  for (int j = 0; j < keys; ++j) sum += std::exp(score[j]), mean += std::exp(score[j]) * value[j];
  const bool same = std::fabs(out[0] - mean / sum) <= 1e-5;
  if (same) std::printf("%d keys: right\n", keys);
  if (!same) std::printf("%d keys: WRONG: %g, must be %g\n", keys, out[0], mean / sum);
  return same;
}

int main() {
  bool all = true;
  for (const int keys : {16, 64, 160, 17, 31, 1}) all = right(keys) && all;
  if (!all) {
    std::printf("Hint: a weight is exp(score - greatest). What does a key weigh that does not exist?\n");
    return 1;
  }
  std::printf("all right\n");
  return 0;
}
