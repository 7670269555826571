// Exercise 2: mean and variance of two groups, merged into those of both: a row is read once, and by parts.
//
//   kernel-fusion learn check 2_two_groups
//   kernel-fusion simt exercises/solutions/2_two_groups.cu
//   nvcc -O3 -I ../common/include exercises/solutions/2_two_groups.cu && ./a.out        with a GPU
#include <kf/exercise.h>

constexpr int kParts = 4;

// What some numbers come to: how many they are, their mean, and the sum of the squares of x - mean.
struct Group {
  int count = 0;
  float mean = 0, squares = 0;
};

__device__ Group merged(const Group& a, const Group& b) {
  // SOLUTION: the group of the numbers of both; each may be empty
  // | return {a.count + b.count, (a.mean + b.mean) / 2, a.squares + b.squares};
  const int count = a.count + b.count;
  if (count == 0) return a;
  const float apart = b.mean - a.mean, share = static_cast<float>(b.count) / count;
  return {count, a.mean + apart * share, a.squares + b.squares + apart * apart * a.count * share};
  // END
}

// A row whose columns before `begin` are padding. Thread p does columns p * per_part and on, so that the first parts
// and the last ones may be empty.
__global__ void statistics(const float* row, float* out, int begin, int width, int per_part) {
  __shared__ Group parts[kParts];
  const int part = threadIdx.x;
  Group mine;
  for (int c = max(begin, part * per_part); c < min(width, (part + 1) * per_part); ++c) {
    mine = merged(mine, {1, row[c], 0});  // a number is a group of one
  }
  parts[part] = mine;
  __syncthreads();
  if (part != 0) return;
  Group all;
  for (const Group& group : parts) all = merged(all, group);  // in a fixed order: the same bits in each run
  out[0] = all.mean;
  out[1] = all.squares / all.count;
}

bool right(int begin, int width, int per_part, float around) {
  std::vector<float> row(width, NAN), out(2, NAN);
  for (int c = begin; c < width; ++c) row[c] = around + 0.25f * (c * 7 % 13) + 0.5f * (c / per_part);
  {
    const OnGpu gpu_row(row), gpu_out(out);
    statistics<<<1, kParts>>>(gpu_row.data, gpu_out.data, begin, width, per_part);
    CHECK(cudaGetLastError());
    gpu_out.read(out);
  }
  const int count = width - begin;
  double mean = 0, variance = 0;
  for (int c = begin; c < width; ++c) mean += row[c] / count;
  for (int c = begin; c < width; ++c) variance += std::pow(row[c] - mean, 2) / count;
  if (std::fabs(out[0] - mean) <= 1e-3 && std::fabs(out[1] - variance) <= 2e-3) return true;
  std::printf("WRONG: columns %d to %d, %d a part, numbers from %g on: mean %g and variance %g, must be %g and %g\n",
              begin, width, per_part, around, out[0], out[1], mean, variance);
  return false;
}

int main() {
  for (const float around : {0.0f, -10.0f, 1000.0f}) {
    if (!right(0, 40, 10, around) || !right(3, 37, 10, around) || !right(0, 5, 10, around)) return 1;
    if (!right(11, 40, 10, around) || !right(25, 29, 10, around)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
