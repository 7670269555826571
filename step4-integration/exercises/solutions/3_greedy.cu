// Exercise 3: the greedy token: where the largest logit of a row stands.
//
//   kernel-fusion learn check 3_greedy
//   kernel-fusion simt exercises/solutions/3_greedy.cu
//   nvcc -O3 -I ../common/include exercises/solutions/3_greedy.cu && ./a.out        with a GPU
//
// Counted: global load requests, global load sectors, shared load requests, barriers
#include <kf/exercise.h>

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Best {
  float logit;
  int index;
};

// The better of two: the larger logit; of equal ones the smaller index.
__device__ Best better(Best a, Best b) {
  // SOLUTION: which one?
  // | return a.logit >= b.logit ? a : b;
  return a.logit > b.logit || (a.logit == b.logit && a.index < b.index) ? a : b;
  // END
}

// One logit of a row. A row with a NaN anywhere has no token: its index is to be -1, since whoever takes a token from
// it would never learn that the model is broken.
__device__ Best one(float logit, int index) {
  // SOLUTION: what beats everything else, if it is NaN?
  // | return {logit, index};
  return isnan(logit) ? Best{INFINITY, -1} : Best{logit, index};
  // END
}

// The best of what the lanes have; in lane 0 at least.
__device__ Best best_of_warp(Best mine) {
  // SOLUTION: five steps of __shfl_down_sync, of both
  for (int away = 16; away > 0; away /= 2) {
    mine = better(mine,
                  {__shfl_down_sync(0xffffffffu, mine.logit, away), __shfl_down_sync(0xffffffffu, mine.index, away)});
  }
  // END
  return mine;
}

// A block for each row of logits [rows, vocab].
__global__ void greedy(const float* logits, int* tokens, int vocab) {
  const Best none = {-INFINITY, vocab};  // worse than any logit, also than -infinity
  const float* row = logits + blockIdx.x * vocab;
  Best mine = none;
  for (int i = threadIdx.x; i < vocab; i += kThreads) mine = better(one(row[i], i), mine);
  // SOLUTION: the best of the warp; then one barrier, and the first warp finds the best of all warps
  __shared__ float logit_of[kWarps];
  __shared__ int index_of[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  mine = best_of_warp(mine);
  if (lane == 0) logit_of[warp] = mine.logit, index_of[warp] = mine.index;
  __syncthreads();
  if (warp == 0) mine = best_of_warp(lane < kWarps ? Best{logit_of[lane], index_of[lane]} : none);
  // END
  if (threadIdx.x == 0) tokens[blockIdx.x] = mine.index;
}

bool right(int vocab) {
  // A row: what it is filled with, and where what else stands.
  struct Row {
    float filled;
    int at;
    float logit;
    int again;  // the same logit once more
    int expected;
  };
  const int last = vocab - 1, middle = vocab / 2;
  const std::vector<Row> rows = {
      {-1, last, 2, last, last},          {-1, 0, 2, 0, 0},
      {-5, middle, -3, last, middle},  // a tie
      {-INFINITY, last, -INFINITY, 0, 0}, {1, middle, INFINITY, last, middle},
      {1, middle, NAN, middle, -1},       {INFINITY, last, NAN, last, -1},
  };
  std::vector<float> logits(rows.size() * vocab);
  std::vector<int> tokens(rows.size(), -2);
  for (size_t r = 0; r < rows.size(); ++r) {
    float* const row = logits.data() + r * vocab;
    for (int i = 0; i < vocab; ++i) row[i] = rows[r].filled;
    row[rows[r].at] = row[rows[r].again] = rows[r].logit;
  }
  {
    const OnGpu<float> gpu_logits(logits);
    const OnGpu<int> gpu_tokens(tokens);
    greedy<<<static_cast<unsigned>(rows.size()), kThreads>>>(gpu_logits.data, gpu_tokens.data, vocab);
    CHECK(cudaGetLastError());
    gpu_tokens.read(tokens);
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    if (tokens[r] == rows[r].expected) continue;
    std::printf("WRONG: %d logits, all %g but %g at %d and %d: token %d, must be %d\n", vocab, rows[r].filled,
                rows[r].logit, rows[r].at, rows[r].again, tokens[r], rows[r].expected);
    return false;
  }
  return true;
}

int main() {
  for (const int vocab : {1, 31, 33, 257, 1000, 10007}) {
    if (!right(vocab)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
