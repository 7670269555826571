// A token of GPT-2 124M in one launch, recorded: when each block was how far in one layer.
//
//   nvcc -I . -I ../common/include -I ../step1-simple/include -I ../step2-attention/include -DKF_BACKEND=gpu \
//     -std=c++17 -O3 -arch=sm_90a -o ../build/token_trace pages/token_trace.cu && ../build/token_trace
//
// In step4-integration. Prints JSON: of each block and product the moments of token_block.h, in nanoseconds; 0 where it
// has none. With `clusters` it is v4_clusters, and of each block the steps of cluster_warp.h. `small` is a model that
// the emulation can take.
#include "kernels/decode_step/v3_persistent.cu"
#include "kernels/decode_step/v4_clusters.cu"

#include <cstdio>
#include <cstring>
#include <vector>

namespace {

using namespace kf::decode_step;
using kf::KF_BACKEND::check;
namespace backend = kf::KF_BACKEND::decode_step;

template <class T>
T* device_copy(const std::vector<T>& values) {
  void* to = nullptr;
  check(cudaMalloc(&to, values.size() * sizeof(T)), "cudaMalloc");
  check(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return static_cast<T*>(to);
}

// Numbers in bfloat16 whose sums stay small; which ones they are does not change the time.
const void* weights(int64_t count) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  uint32_t draw = 1;
  for (uint16_t& value : values) {
    draw = draw * 1664525 + 1013904223;
    value = static_cast<uint16_t>(0x3c00 | (draw >> 31) << 15 | (draw >> 20 & 0x7f));  // ± 0.008 to 0.016
  }
  return device_copy(values);
}

struct Recorded {
  int64_t width, heads, layers, vocab, keys;
  int launches;  // each adds a token, and the last one finds so many keys
};

// A model whose layers are one, over a cache with so many keys.
Args arguments(const Recorded& of, std::vector<Layer>& layers) {
  const int64_t w = of.width, inner = 4 * w, capacity = of.keys + 64;
  layers.assign(static_cast<size_t>(of.layers),
                {weights(w), weights(w), weights(w * 3 * w), weights(3 * w), weights(w * w), weights(w), weights(w),
                 weights(w), weights(w * inner), weights(inner), weights(inner * w), weights(w)});
  Args a{};
  a.ids = device_copy(std::vector<int64_t>{1});
  a.end = device_copy(std::vector<int32_t>{static_cast<int32_t>(of.keys + 1 - of.launches)});
  a.begin = device_copy(std::vector<int32_t>{0});
  a.token_weight = weights(of.vocab * w);
  a.position_weight = weights(capacity * w);
  a.weights = layers.data();
  a.ln_weight = layers[0].ln_1_weight;
  a.ln_bias = layers[0].ln_1_bias;
  a.k_cache = const_cast<void*>(weights(of.layers * w * capacity));
  a.v_cache = const_cast<void*>(weights(of.layers * w * capacity));
  a.k_stride = a.v_stride = {w * capacity, w * capacity, capacity * kHead, kHead};
  a.logits = const_cast<void*>(weights(of.vocab));
  a.layers = of.layers;
  a.batch = 1;
  a.heads = of.heads;
  a.head_dim = kHead;
  a.capacity = a.positions = capacity;
  a.width = w;
  a.inner = inner;
  a.vocab = of.vocab;
  a.scale = 0.125;
  a.eps = 1e-5;
  a.tanh = true;
  a.dtype = kf::DType::kBFloat16;
  return a;
}

// Moments of one layer in the middle, `kinds` groups of `moments` for each block, from the moment on that the first
// block recorded as number `zero_at`.
void print_layer(const std::vector<long long>& trace, const Recorded& of, int64_t blocks, int kinds, int moments,
                 int zero_at) {
  const int layer = static_cast<int>(of.layers / 2);
  const size_t each = trace.size() / static_cast<size_t>(blocks);
  double zero = 0;
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  std::printf("{\"gpu\": \"%s\", \"keys\": %d, \"layer\": %d, \"blocks\": [", device.name, static_cast<int>(of.keys),
              layer);
  for (size_t block = 0; block < static_cast<size_t>(blocks); ++block) {
    const long long* const own = &trace[block * each];
    const double rate = static_cast<double>(own[2] - own[0]) / static_cast<double>(own[3] - own[1]);
    const auto nanoseconds = [&](long long clock) {  // since the first block began
      return static_cast<double>(own[0] - trace[0]) + static_cast<double>(clock - own[1]) * rate;
    };
    const long long* const of_layer = own + 4 + layer * kinds * moments;
    if (block == 0) zero = nanoseconds(of_layer[zero_at]);
    std::printf(block == 0 ? "\n[" : ",\n[");
    for (int i = 0; i < kinds * moments; ++i) {
      const char* const before = i % moments > 0 ? ", " : (i > 0 ? "], [" : "[");
      std::printf("%s%.0f", before, of_layer[i] == 0 ? 0 : nanoseconds(of_layer[i]) - zero);
    }
    std::printf("]]");
  }
  std::printf("]}\n");
}

// launch(trace) adds a token.
template <class Launch>
std::vector<long long> recorded(const Recorded& of, int64_t numbers, Launch launch) {
  std::vector<long long> trace(static_cast<size_t>(numbers), 0);
  long long* const on_device = device_copy(trace);
  for (int i = 0; i < of.launches; ++i) launch(on_device);
  check(cudaMemcpy(trace.data(), on_device, trace.size() * sizeof trace[0], cudaMemcpyDeviceToHost), "cudaMemcpy");
  return trace;
}

}  // namespace

int main(int argc, char** argv) {
  bool small = false, clusters = false;
  for (int i = 1; i < argc; ++i) {
    small = small || std::strcmp(argv[i], "small") == 0;  // for the emulation
    clusters = clusters || std::strcmp(argv[i], "clusters") == 0;
  }
  const char* const rung = clusters ? "v4_clusters" : "v3_persistent";
  const Recorded of = small ? Recorded{64, 1, 3, 67, 5, 1} : Recorded{768, 12, 12, 50257, 512, 20};
  std::vector<Layer> layers;
  Args a = arguments(of, layers);
  std::string why_not;
  a.packed_bytes = backend::packed_bytes(rung, a, why_not);
  if (!why_not.empty()) return std::fprintf(stderr, "token_trace: %s %s\n", rung, why_not.c_str()), 1;
  check(cudaMalloc(&a.packed, static_cast<size_t>(a.packed_bytes)), "cudaMalloc");
  backend::pack_weights(rung, a, nullptr);
  std::vector<long long> trace;
  const auto print = [&](int64_t blocks, int kinds, int moments, int zero_at) {
    State state;
    check(cudaMemcpy(&state, a.packed, sizeof state, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (const std::string said = failure(state); !said.empty()) {
      return std::fprintf(stderr, "token_trace: %s\n", said.c_str()), 1;
    }
    print_layer(trace, of, blocks, kinds, moments, zero_at);
    return 0;
  };
  if (clusters) {
    const Shares s = backend::shares_of(a, {});
    const int64_t blocks = s.clusters * kClusterBlocks;
    trace = recorded(of, blocks * backend::trace_of_block(s),
                     [&](long long* to) { backend::launch_clusters<true>(a, {}, nullptr, to); });
    return print(blocks, 1, backend::kStepKinds, static_cast<int>(backend::Step::kEnd));
  }
  const Schedule s(of.width, a.inner, of.vocab, of.layers, kf::KF_BACKEND::multiprocessors());
  trace = recorded(of, s.blocks * backend::trace_of_block(s),
                   [&](long long* to) { backend::launch_token<true>(a, nullptr, to); });
  return print(s.blocks, kKinds, backend::kMomentKinds, static_cast<int>(backend::Moment::kWeights));
}
