// Exercise 4: cross-entropy of a row, over chunks of the vocabulary; the gradient takes the place of the logits.
//
//   kernel-fusion learn check 4_chunked_loss
//   kernel-fusion simt exercises/solutions/4_chunked_loss.cu
//   nvcc -O3 -I ../common/include exercises/solutions/4_chunked_loss.cu && ./a.out        with a GPU
//
// Counted: global load requests, global load sectors, global store requests, global store sectors
#include <kf/exercise.h>

#include <cfloat>

constexpr int kChunk = 32;  // columns, one a lane

// What some logits come to: their maximum, and the sum of exp(logit - maximum). Of none: the lowest number, and 0.
struct Sum {
  float maximum, sum;
};

// What two groups come to together.
__device__ Sum merged(Sum a, Sum b) {
  // SOLUTION: bring both sums to the larger maximum
  // | return {a.maximum, a.sum + b.sum};
  const float maximum = fmaxf(a.maximum, b.maximum);
  return {maximum, a.sum * expf(a.maximum - maximum) + b.sum * expf(b.maximum - maximum)};
  // END
}

// A block of one warp for each row of logits [rows, vocab]. loss[row] is log(sum of exp(logit)) - logit[target]; a
// logit's gradient is its share of that sum, less 1 at the target, and is written where the logit stood. A target below
// 0 leaves its row out: loss 0, gradient 0.
__global__ void cross_entropy(float* logits, const int* targets, float* losses, int vocab) {
  const int lane = threadIdx.x, target = targets[blockIdx.x];
  float* const row = logits + blockIdx.x * vocab;
  float loss = 0;
  // SOLUTION: each logit is read twice and written once: a running maximum and sum of a lane's logits; merge the lanes;
  // | // then the loss, and the gradients
  // | (void)row, (void)lane, (void)target, (void)merged;
  Sum all = {-FLT_MAX, 0};  // not -infinity: -inf - -inf is NaN
  for (int i = lane; i < vocab && target >= 0; i += kChunk) all = merged(all, {row[i], 1});
  for (int away = 16; away > 0; away /= 2) {
    all = merged(all, {__shfl_xor_sync(0xffffffffu, all.maximum, away), __shfl_xor_sync(0xffffffffu, all.sum, away)});
  }
  if (target >= 0) loss = all.maximum + logf(all.sum) - row[target];
  __syncwarp();  // nobody writes before the logit of the target is read
  for (int i = lane; i < vocab; i += kChunk) {
    row[i] = target < 0 ? 0 : expf(row[i] - all.maximum) / all.sum - (i == target ? 1.f : 0.f);
  }
  // END
  if (lane == 0) losses[blockIdx.x] = loss;
}

bool right(int vocab, float around, float apart) {
  const std::vector<int> targets = {0, vocab - 1, -100, vocab / 2, vocab / 3};
  const int rows = static_cast<int>(targets.size());
  std::vector<float> logits(rows * vocab), losses(rows, NAN);
  for (int i = 0; i < rows * vocab; ++i) logits[i] = around + apart * (i * 7919 % 101);
  if (vocab > 40) logits[3 * vocab] = logits[4 * vocab + 32] = -INFINITY;  // tokens that are ruled out
  std::vector<float> gradients = logits;
  {
    const OnGpu<float> gpu_logits(logits), gpu_losses(losses);
    const OnGpu<int> gpu_targets(targets);
    cross_entropy<<<rows, kChunk>>>(gpu_logits.data, gpu_targets.data, gpu_losses.data, vocab);
    CHECK(cudaGetLastError());
    gpu_logits.read(gradients), gpu_losses.read(losses);
  }
  for (int r = 0; r < rows; ++r) {
    const float* const row = logits.data() + r * vocab;
    double maximum = -INFINITY, sum = 0;
    for (int i = 0; i < vocab; ++i) maximum = std::fmax(maximum, row[i]);
    for (int i = 0; i < vocab; ++i) sum += std::exp(row[i] - maximum);
    const double loss = targets[r] < 0 ? 0 : maximum + std::log(sum) - row[targets[r]];
    if (!(std::fabs(losses[r] - loss) <= 1e-5 * (1 + std::fabs(maximum)))) {
      std::printf("WRONG: %d logits from %g on: the loss of row %d, target %d, is %g, must be %g\n", vocab, around, r,
                  targets[r], losses[r], loss);
      return false;
    }
    for (int i = 0; i < vocab; ++i) {
      const double expected = targets[r] < 0 ? 0 : std::exp(row[i] - maximum) / sum - (i == targets[r]);
      if (std::fabs(gradients[r * vocab + i] - expected) <= 1e-5) continue;
      std::printf("WRONG: %d logits from %g on: the gradient of logit %d of row %d, target %d, is %g, must be %g\n",
                  vocab, around, i, r, targets[r], gradients[r * vocab + i], expected);
      return false;
    }
  }
  return true;
}

int main() {
  for (const float around : {-5.0f, 1000.0f, -1000.0f}) {
    for (const int vocab : {1, 5, 31, 33, 1000}) {
      if (!right(vocab, around, 0.125f) || !right(vocab, around, 2)) return 1;
    }
  }
  std::printf("all right\n");
  return 0;
}
