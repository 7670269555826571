// What the files of the ladder share: the problem, its check, and on a GPU its time. Each defines one function, and
// gives it to `climb` (attention) or `check_tile` (one tile of scores).
#pragma once
#include <cuda_fp16.h>
#include <kf/exercise.h>

#include <algorithm>
#include <cstdint>

namespace kf::KF_BACKEND {}  // namespace kf::KF_BACKEND
using namespace kf::KF_BACKEND;

constexpr int kDim = 64;                // head_dim
constexpr float kScale = 0.125f;        // 1 / √head_dim
constexpr unsigned kAll = 0xffffffffu;  // lanes of a warp

// q and out are [heads, queries, 64], k and v [heads, keys, 64].
struct Problem {
  const __half *q, *k, *v;
  __half* out;
  int heads, queries, keys;
  bool causal;  // query i then sees the keys j <= i + keys - queries, which may be none: its output is 0

  __host__ __device__ int seen(int query) const {
    const int all = causal ? query + keys - queries + 1 : keys;
    return all < 0 ? 0 : all < keys ? all : keys;
  }
};

// What exercise 3 keeps of a row of scores, and how. After raise(greatest of some) add up the weight of each.
struct Softmax {
  float greatest = -INFINITY, sum = 0;

  // Returns the factor for all that was added up before; `sum` has it already.
  __device__ float raise(float score) {
    const float before = greatest;
    greatest = fmaxf(greatest, score);
    const float factor = before == greatest ? 1 : __expf(before - greatest);  // 1 where both are -INFINITY
    sum *= factor;
    return factor;
  }
  __device__ float weight(float score) const { return score == -INFINITY ? 0 : __expf(score - greatest); }
};

// A tile in shared memory of which ldmatrix reads eight rows at once: 16 bytes longer, they lie in different banks.
constexpr int kPitch = kDim + 8;

// 64 rows of 64, by all of a block's threads, 16 bytes at once. Rows from `count` on become 0.
__device__ inline void load_tile(__half (*tile)[kPitch], const __half* rows, int count) {
  for (int i = threadIdx.x; i < 64 * 8; i += blockDim.x) {
    const uint4 chunk = i / 8 < count ? reinterpret_cast<const uint4*>(rows)[i] : uint4{};
    *reinterpret_cast<uint4*>(&tile[i / 8][i % 8 * 8]) = chunk;
  }
}

// Operand a of mma_m16n8k16 as ladder_4 finds it, of 16 rows of 64: a[c] has columns 16c to 16c + 15. Rows from `count`
// on are 0.
__device__ inline void load_a(uint32_t (&a)[4][4], const __half* rows, int count) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 16; ++i) {
    const int row = lane / 4 + i % 2 * 8;
    a[i / 4][i % 4] = row < count ? reinterpret_cast<const uint32_t*>(rows + row * kDim)[i / 2 * 4 + lane % 4] : 0;
  }
}

// Over the four lanes that have a row of d.
__device__ inline float quad_max(float x) {
  for (int away = 1; away < 4; away *= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, away));
  return x;
}
__device__ inline float quad_sum(float x) {
  for (int away = 1; away < 4; away *= 2) x += __shfl_xor_sync(kAll, x, away);
  return x;
}

// Stores a warp's 16 rows of 64 as eight products left them in `mean`, each divided by the sum of its four lanes; 0
// where that is 0. There are only `count` rows.
__device__ inline void store_means(__half* rows, int count, const float (&mean)[8][4], const Softmax (&softmax)[2]) {
  const int lane = threadIdx.x % 32;
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    const float sum = quad_sum(softmax[r].sum), inverse = sum == 0 ? 0 : 1 / sum;
    for (int n = 0; row < count && n < 8; ++n) {
      reinterpret_cast<__half2*>(rows + row * kDim)[4 * n + lane % 4] =
          __floats2half2_rn(mean[n][2 * r] * inverse, mean[n][2 * r + 1] * inverse);
    }
  }
}

// out = q · kᵀ: [rows, columns] of [rows, depth] and [columns, depth], all row after row.
struct Tile {
  const __half *q, *k;
  float* out;
  int rows, columns, depth;
};

// A copy on the GPU between two margins of NaN, freed at the end of its scope. Whoever reads too far reads NaN.
template <class T>
struct Guarded {
  static constexpr size_t kMargin = 4096;
  std::vector<T> host;
  T* data;

  explicit Guarded(const std::vector<T>& from) : host(kMargin, T(NAN)) {
    host.insert(host.end(), from.begin(), from.end());
    host.resize(from.size() + 2 * kMargin, T(NAN));
    CHECK(cudaMalloc(&data, host.size() * sizeof(T)));
    CHECK(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Guarded() { CHECK(cudaFree(data)); }
  T* begin() const { return data + kMargin; }
  // What the kernel left there. Ends the program where it wrote into a margin.
  std::vector<T> read() {
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(host.data(), data, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < kMargin; ++i) {
      if (float(host[i]) == float(host[i]) || float(host[host.size() - 1 - i]) == float(host[host.size() - 1 - i])) {
        std::printf("WRONG: something was written outside of the output\n");
        std::exit(1);
      }
    }
    return {host.begin() + kMargin, host.end() - kMargin};
  }
};

inline std::vector<__half> numbers(size_t count, int seed, float most) {
  std::vector<__half> found(count);
  unsigned state = 2654435761u * seed;
  for (auto& x : found) {
    state = state * 1664525u + 1013904223u;
    x = __float2half(most * (static_cast<int>(state >> 16 & 1023) - 512) / 512.0f);
  }
  return found;
}

using Attention = void (*)(const Problem&);

// Whether `attention` is right for this case. steep: how large the queries are; with large ones a few keys have all the
// weight.
inline bool right(Attention attention, int heads, int queries, int keys, bool causal, float steep) {
  const auto q = numbers(size_t(heads) * queries * kDim, 1, steep), k = numbers(size_t(heads) * keys * kDim, 2, 1),
             v = numbers(size_t(heads) * keys * kDim, 3, 1);
  const Guarded<__half> gpu_q(q), gpu_k(k), gpu_v(v);
  Guarded<__half> gpu_out(std::vector<__half>(q.size(), __half(NAN)));
  const Problem p{gpu_q.begin(), gpu_k.begin(), gpu_v.begin(), gpu_out.begin(), heads, queries, keys, causal};
  attention(p);
  const auto out = gpu_out.read();
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < queries; ++i) {
      const int seen = p.seen(i);
      std::vector<double> score(seen);
      double greatest = -INFINITY, sum = 0, mean[kDim] = {};
      for (int j = 0; j < seen; ++j) {
        for (int d = 0; d < kDim; ++d) {
          score[j] += kScale * double(__half2float(q[(size_t(h) * queries + i) * kDim + d])) *
                      __half2float(k[(size_t(h) * keys + j) * kDim + d]);
        }
        greatest = std::fmax(greatest, score[j]);
      }
      for (int j = 0; j < seen; ++j) {
        const double weight = std::exp(score[j] - greatest);
        sum += weight;
        for (int d = 0; d < kDim; ++d) mean[d] += weight * __half2float(v[(size_t(h) * keys + j) * kDim + d]);
      }
      for (int d = 0; d < kDim; ++d) {
        const double expected = seen == 0 ? 0 : mean[d] / sum;
        const float got = __half2float(out[(size_t(h) * queries + i) * kDim + d]);
        if (std::fabs(got - expected) <= 3e-3) continue;  // NaN, which nobody wrote, is not
        std::printf("WRONG: %d heads, %d queries, %d keys%s: out[%d][%d][%d] is %g, must be %g%s\n", heads, queries,
                    keys, causal ? ", causal" : "", h, i, d, got, expected, got == got ? "" : "; nobody wrote it");
        return false;
      }
    }
  }
  return true;
}

// The check, and on a GPU the time. any_length: of lengths that are no multiples of 64, with and without a mask.
inline int climb(Attention attention, bool any_length) {
  for (const float steep : {1.0f, 30.0f}) {
    if (!right(attention, 2, 64, 128, false, steep)) return 1;
    if (!any_length) continue;
    if (!right(attention, 1, 1, 1, true, steep) || !right(attention, 2, 33, 97, true, steep) ||
        !right(attention, 1, 70, 5, true, steep) || !right(attention, 1, 129, 130, false, steep) ||
        !right(attention, 1, 256, 256, true, steep)) {
      return 1;
    }
  }
#ifndef KF_SIMT_PROGRAM
  const int heads = 96, length = 1024;
  const auto data = numbers(size_t(heads) * length * kDim, 1, 1);
  const Guarded<__half> q(data), k(data), v(data), out(data);
  const Problem p{q.begin(), k.begin(), v.begin(), out.begin(), heads, length, length, any_length};
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  float best = INFINITY;
  for (int round = 0; round < 20; ++round) {
    float ms = 0;
    CHECK(cudaEventRecord(begin));
    attention(p);
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    best = std::min(best, ms);
  }
  const double flops = 4.0 * heads * length * length * kDim * (any_length ? 0.5 : 1);
  std::printf("%d heads of 1024%s: %.3f ms, %.1f TFLOP/s\n", heads, any_length ? ", causal" : "", best,
              flops / best * 1e-9);
#endif
  std::printf("all right\n");
  return 0;
}

// One tile of scores: exact but for the order of the sums.
inline int check_tile(void (*scores)(const Tile&), int rows, int columns, int depth) {
  const auto q = numbers(rows * depth, 1, 1), k = numbers(columns * depth, 2, 1);
  const Guarded<__half> gpu_q(q), gpu_k(k);
  Guarded<float> gpu_out(std::vector<float>(rows * columns, NAN));
  scores({gpu_q.begin(), gpu_k.begin(), gpu_out.begin(), rows, columns, depth});
  const auto out = gpu_out.read();
  for (int i = 0; i < rows * columns; ++i) {
    double expected = 0;
    for (int d = 0; d < depth; ++d) {
      expected += double(__half2float(q[i / columns * depth + d])) * __half2float(k[i % columns * depth + d]);
    }
    if (std::fabs(out[i] - expected) <= 1e-4) continue;
    std::printf("WRONG: out[%d][%d] is %g, must be %g%s\n", i / columns, i % columns, out[i], expected,
                out[i] == out[i] ? "" : "; nobody wrote it");
    return 1;
  }
  std::printf("all right\n");
  return 0;
}
