// Bug hunt 1: tokens are right when each kernel is launched anew, and wrong when the same launches are replayed.
//
//   kernel-fusion learn check hunt_1_stale_graph
//   kernel-fusion simt exercises/solutions/hunt_1_stale_graph.cu
//   nvcc -O3 -I ../common/include exercises/solutions/hunt_1_stale_graph.cu && ./a.out        with a GPU
#include <kf/exercise.h>

#include <functional>

constexpr int kWidth = 32, kCapacity = 16;

// Launches kernels; or, while it records, only notes them, as a CUDA graph does: of each the kernel, how many blocks
// and threads, and the values of its arguments. replay() launches what it has noted.
struct Stream {
  bool records = false;
  std::vector<std::function<void()>> graph;

  template <class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), int blocks, int threads, Arguments... arguments) {
    const auto node = [=] {
      kernel<<<blocks, threads>>>(arguments...);
      CHECK(cudaGetLastError());
    };
    if (records) {
      graph.push_back(node);
    } else {
      node();
    }
  }
  void replay() const {
    for (const auto& node : graph) node();
  }
};

// SOLUTION
// | // The new token's row goes into the cache, behind the `length` rows of those before it.
// | __global__ void append(const float* token, float* cache, int length) {
// |   cache[length * kWidth + threadIdx.x] = token[threadIdx.x];
// | }
// |
// | // The next token: for short, one that follows from the mean of all rows in the cache.
// | __global__ void attend(const float* cache, float* token, int length) {
// |   float sum = 0;
// |   for (int j = 0; j <= length; ++j) sum += cache[j * kWidth + threadIdx.x];
// |   token[threadIdx.x] = 1 + 0.75f * sum / (length + 1);
// | }
// The new token's row goes into the cache, behind the `length` rows of those before it.
__global__ void append(const float* token, float* cache, const int* length) {
  cache[*length * kWidth + threadIdx.x] = token[threadIdx.x];
}

// The next token: for short, one that follows from the mean of all rows in the cache.
__global__ void attend(const float* cache, float* token, const int* length) {
  float sum = 0;
  for (int j = 0; j <= *length; ++j) sum += cache[j * kWidth + threadIdx.x];
  token[threadIdx.x] = 1 + 0.75f * sum / (*length + 1);
}

__global__ void grow(int* length) { ++*length; }
// END

// A text: its newest token, and the rows of those before.
struct Text {
  OnGpu<float> token{std::vector<float>(kWidth, 1.f)}, cache{std::vector<float>(kCapacity * kWidth, NAN)};
  // SOLUTION
  // | int length = 0;
  OnGpu<int> length{std::vector<int>(1, 0)};
  // END

  // All that one token takes.
  void step(Stream& stream) {
    // SOLUTION
    // | stream.launch(append, 1, kWidth, token.data, cache.data, length);
    // | stream.launch(attend, 1, kWidth, cache.data, token.data, length);
    // | if (!stream.records) ++length;
    stream.launch(append, 1, kWidth, token.data, cache.data, length.data);
    stream.launch(attend, 1, kWidth, cache.data, token.data, length.data);
    stream.launch(grow, 1, 1, length.data);
    // END
  }
  void replay(const Stream& stream) {
    stream.replay();
    // SOLUTION
    // | ++length;
    // END
  }
};

bool right(bool replayed) {
  std::printf("%s: ", replayed ? "a graph, replayed" : "launched anew");
  Text text;
  Stream stream;
  std::vector<float> token(kWidth);
  double expected = 1, sum = 0;
  stream.records = replayed;
  if (replayed) text.step(stream);
  for (int t = 0; t < kCapacity; ++t) {
    if (replayed) {
      text.replay(stream);
    } else {
      text.step(stream);
    }
    text.token.read(token);
    sum += expected;
    expected = 1 + 0.75 * sum / (t + 1);
    for (int i = 0; i < kWidth; ++i) {
      if (std::fabs(token[i] - expected) <= 1e-5) continue;
      std::printf("WRONG: token %d is %g, must be %g\n", t, token[i], expected);
      return false;
    }
  }
  std::printf("right\n");
  return true;
}

int main() {
  const bool both = right(false) & right(true);
  std::printf(both ? "all right\n" : "Hint: what does a graph know of a number that the host counts up?\n");
  return both ? 0 : 1;
}
