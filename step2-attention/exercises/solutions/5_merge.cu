// Exercise 5: keys shared out among four threads, whose results become one: how a decode step uses many blocks.
//
//   kernel-fusion learn check 5_merge
//   kernel-fusion simt exercises/solutions/5_merge.cu
//   nvcc -O3 -I ../common/include exercises/solutions/5_merge.cu && ./a.out        with a GPU
#include <kf/exercise.h>

constexpr int kParts = 4;

// What a part of the keys comes to: the greatest score, the sum of the weights relative to it, and of weight times
// value.
struct Part {
  float greatest = -INFINITY, sum = 0, mean = 0;
};

__device__ Part merged(const Part& a, const Part& b) {
  // SOLUTION: both relative to the greater of the two; a part that saw no key changes nothing
  // | return {a.greatest, a.sum + b.sum, a.mean + b.mean};
  const float greatest = fmaxf(a.greatest, b.greatest);
  if (greatest == -INFINITY) return a;
  const float of_a = expf(a.greatest - greatest), of_b = expf(b.greatest - greatest);
  return {greatest, a.sum * of_a + b.sum * of_b, a.mean * of_a + b.mean * of_b};
  // END
}

// One query, scores and values of its keys, of which those before `begin` are padding. Thread p does keys p * per_part
// and on, so the first parts and the last ones may be without a key.
__global__ void attention(const float* score, const float* value, float* out, int begin, int keys, int per_part) {
  __shared__ Part parts[kParts];
  Part mine;
  const int part = threadIdx.x;
  for (int j = max(begin, part * per_part); j < min(keys, (part + 1) * per_part); ++j) {
    const float greatest = fmaxf(mine.greatest, score[j]);
    const float factor = expf(mine.greatest - greatest), weight = expf(score[j] - greatest);
    mine = {greatest, mine.sum * factor + weight, mine.mean * factor + weight * value[j]};
  }
  parts[threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Part all;
  for (const Part& part : parts) all = merged(all, part);  // in a fixed order: the same bits in each run
  out[0] = all.mean / all.sum;
}

bool right(int begin, int keys, int per_part, float slope) {
  std::vector<float> score(keys), value(keys), out(1, NAN);
  for (int j = 0; j < keys; ++j) score[j] = slope * j - 300, value[j] = static_cast<float>(j % 9) - 3;
  {
    const OnGpu gpu_score(score), gpu_value(value), gpu_out(out);
    attention<<<1, kParts>>>(gpu_score.data, gpu_value.data, gpu_out.data, begin, keys, per_part);
    CHECK(cudaGetLastError());
    gpu_out.read(out);
  }
  double greatest = -INFINITY, sum = 0, mean = 0;
  for (int j = begin; j < keys; ++j) greatest = std::fmax(greatest, score[j]);
  for (int j = begin; j < keys; ++j) {
    sum += std::exp(score[j] - greatest);
    mean += std::exp(score[j] - greatest) * value[j];
  }
  if (std::fabs(out[0] - mean / sum) <= 1e-5) return true;
  std::printf("WRONG: keys %d to %d, %d a part, slope %g: %g, must be %g\n", begin, keys, per_part, slope, out[0],
              mean / sum);
  return false;
}

int main() {
  for (const float slope : {0.0f, 0.1f, -0.1f, 2.0f, -2.0f}) {
    if (!right(0, 40, 10, slope) || !right(3, 37, 10, slope) || !right(0, 5, 10, slope)) return 1;
    if (!right(11, 40, 10, slope) || !right(25, 29, 10, slope)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
