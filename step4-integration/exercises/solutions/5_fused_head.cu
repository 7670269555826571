// Exercise 5: the loss behind the LM head with the gradients of hidden and weight; logits of 16 rows exist at a time.
//
//   kernel-fusion learn check 5_fused_head
//   kernel-fusion simt exercises/solutions/5_fused_head.cu
//   nvcc -O3 -I ../common/include exercises/solutions/5_fused_head.cu && ./a.out        with a GPU
//
// Counted: launches, global load requests, global store requests
#include <kf/exercise.h>

#include <algorithm>

constexpr int kChunk = 16, kThreads = 128;  // rows of logits that may exist

// Memory for `count` floats on the GPU, which is freed where it goes out of scope. Knows how many there were at most.
struct Scratch : OnGpu<float> {
  static inline int alive = 0, most = 0;
  explicit Scratch(int n) : OnGpu(std::vector<float>(n, NAN)) { most = std::max(most, alive += n); }
  ~Scratch() { alive -= static_cast<int>(bytes / sizeof(float)); }
};

// A matrix by where its elements lie: that of row i and column j at data[i * row + j * column].
struct Matrix {
  const float* data;
  int row, column;
};

// c [rows, columns] = a [rows, depth] · b [depth, columns]; or, with kAdd, that is added to what stands in c.
template <bool kAdd>
__global__ void product(Matrix a, Matrix b, float* c, int rows, int columns, int depth) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x, i = at / columns, j = at % columns;
  if (i >= rows) return;
  float sum = kAdd ? c[at] : 0;
  for (int k = 0; k < depth; ++k) sum += a.data[i * a.row + k * a.column] * b.data[k * b.row + j * b.column];
  c[at] = sum;
}

// Exercise 4, a thread a row: the gradient takes the place of the logits.
__global__ void cross_entropy(float* logits, const int* targets, float* losses, int rows, int vocab) {
  const int r = blockIdx.x * blockDim.x + threadIdx.x;
  if (r >= rows) return;
  float* const row = logits + r * vocab;
  float maximum = row[0], sum = 0;
  for (int i = 1; i < vocab; ++i) maximum = fmaxf(maximum, row[i]);
  for (int i = 0; i < vocab; ++i) sum += expf(row[i] - maximum);
  losses[r] = maximum + logf(sum) - row[targets[r]];
  for (int i = 0; i < vocab; ++i) row[i] = expf(row[i] - maximum) / sum - (i == targets[r] ? 1.f : 0.f);
}

int blocks(int n) { return (n + kThreads - 1) / kThreads; }

// All pointers are the GPU's. losses [rows], and the gradients of their sum; grad_weight is 0 before.
void fused_head(const float* hidden, const float* weight, const int* targets, float* losses, float* grad_hidden,
                float* grad_weight, int rows, int vocab, int depth) {
  const Matrix w{weight, depth, 1}, w_turned{weight, 1, depth};
  // SOLUTION: logits of kChunk rows at a time, each made once; the last chunk may be shorter
  // | const Scratch logits(rows * vocab);
  // | float* const at = logits.data;
  // | const Matrix x{hidden, depth, 1}, grad{at, vocab, 1}, grad_turned{at, 1, vocab};
  // | product<false><<<blocks(rows * vocab), kThreads>>>(x, w_turned, at, rows, vocab, depth);
  // | cross_entropy<<<blocks(rows), kThreads>>>(at, targets, losses, rows, vocab);
  // | product<false><<<blocks(rows * depth), kThreads>>>(grad, w, grad_hidden, rows, depth, vocab);
  // | product<false><<<blocks(vocab * depth), kThreads>>>(grad_turned, x, grad_weight, vocab, depth, rows);
  const Scratch logits(std::min(kChunk, rows) * vocab);
  float* const at = logits.data;
  const Matrix grad{at, vocab, 1}, grad_turned{at, 1, vocab};
  for (int first = 0; first < rows; first += kChunk) {
    const int n = std::min(kChunk, rows - first);
    const Matrix x{hidden + first * depth, depth, 1};
    product<false><<<blocks(n * vocab), kThreads>>>(x, w_turned, at, n, vocab, depth);
    cross_entropy<<<blocks(n), kThreads>>>(at, targets + first, losses + first, n, vocab);
    product<false><<<blocks(n * depth), kThreads>>>(grad, w, grad_hidden + first * depth, n, depth, vocab);
    product<true><<<blocks(vocab * depth), kThreads>>>(grad_turned, x, grad_weight, vocab, depth, n);
  }
  // END
  CHECK(cudaGetLastError());
}

bool near(const char* name, const std::vector<float>& found, const std::vector<double>& expected, int rows) {
  for (size_t i = 0; i < found.size(); ++i) {
    if (std::fabs(found[i] - expected[i]) <= 1e-4) continue;
    std::printf("WRONG: %d rows: %s[%d] is %g, must be %g\n", rows, name, static_cast<int>(i), found[i], expected[i]);
    return false;
  }
  return true;
}

bool right(int rows, int vocab, int depth) {
  std::vector<float> hidden(rows * depth), weight(vocab * depth), losses(rows, NAN);
  std::vector<float> grad_hidden(rows * depth, NAN), grad_weight(vocab * depth, 0);
  std::vector<int> targets(rows);
  for (int i = 0; i < rows * depth; ++i) hidden[i] = i * 7919 % 101 / 50.f - 1;
  for (int i = 0; i < vocab * depth; ++i) weight[i] = i * 6151 % 97 / 48.f - 1;
  for (int r = 0; r < rows; ++r) targets[r] = r * 31 % vocab;
  Scratch::most = 0;
  {
    const OnGpu<float> h(hidden), w(weight), l(losses), gh(grad_hidden), gw(grad_weight);
    const OnGpu<int> t(targets);
    fused_head(h.data, w.data, t.data, l.data, gh.data, gw.data, rows, vocab, depth);
    l.read(losses), gh.read(grad_hidden), gw.read(grad_weight);
  }
  std::vector<double> loss(rows), to_h(rows * depth), to_w(vocab * depth);
  for (int r = 0; r < rows; ++r) {
    std::vector<double> grad(vocab);
    double sum = 0;
    for (int v = 0; v < vocab; ++v) {
      for (int d = 0; d < depth; ++d) grad[v] += double{hidden[r * depth + d]} * weight[v * depth + d];
      sum += std::exp(grad[v]);
    }
    loss[r] = std::log(sum) - grad[targets[r]];
    for (int v = 0; v < vocab; ++v) {
      const double g = std::exp(grad[v]) / sum - (v == targets[r]);
      for (int d = 0; d < depth; ++d) to_h[r * depth + d] += g * weight[v * depth + d];
      for (int d = 0; d < depth; ++d) to_w[v * depth + d] += g * hidden[r * depth + d];
    }
  }
  const bool same = near("loss", losses, loss, rows) && near("grad_hidden", grad_hidden, to_h, rows);
  if (!(same && near("grad_weight", grad_weight, to_w, rows))) return false;
  if (Scratch::most <= kChunk * vocab) return true;
  std::printf("WRONG: %d rows: %d floats of scratch at once, must be at most %d, logits of %d rows\n", rows,
              Scratch::most, kChunk * vocab, kChunk);
  return false;
}

int main() {
  for (const int rows : {1, 16, 17, 40}) {
    if (!right(rows, 50, 8)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
