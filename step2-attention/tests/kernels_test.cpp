// Every rung of this step in float32, or in bfloat16 where it takes half types only, against a plain loop in double;
// without torch, so that a sanitizer or a debugger sees nothing but the kernels. Presets in the root's CMakeLists.txt:
// simt, simt-asan, simt-tsan, cuda.
#include <cuda_bf16.h>
#include <gtest/gtest.h>
#include <kf/launch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/rungs.h"
#include "kernels/attention_backward/rungs.h"
#include "kernels/attention_decode/rungs.h"
#include "kernels/softmax/rungs.h"
#include "kernels/softmax_backward/rungs.h"

namespace kf::KF_BACKEND {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// `values` in the GPU's memory, with not a byte more, so that a sanitizer finds what lies one past the end.
template <class T>
class DeviceVector {
 public:
  explicit DeviceVector(const std::vector<T>& values) : size_(values.size()) {
    check(cudaMalloc(&data_, size_ * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  DeviceVector(const DeviceVector&) = delete;
  ~DeviceVector() { cudaFree(data_); }
  T* data() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> copy(size_);
    check(cudaMemcpy(copy.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return copy;
  }

 private:
  size_t size_;
  T* data_ = nullptr;
};

float as_float(float x) { return x; }
float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return __float2bfloat16_rn(x);
  }
}

template <class T = float>
std::vector<T> numbers(size_t n, int step) {
  std::vector<T> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = from_float<T>(0.37f * static_cast<float>(i * step % 23) - 4.0f);
  return values;
}

template <class T>
void expect_near(const std::vector<T>& got, const std::vector<double>& expected, double tolerance,
                 const std::string& what) {
  for (size_t i = 0; i < got.size(); ++i) {
    if (as_float(got[i]) == expected[i]) continue;  // −inf, for instance
    ASSERT_NEAR(as_float(got[i]), expected[i], tolerance) << what << ", element " << i;
  }
}

// In place, over begin ≤ c < end of `row`; the others become 0. Returns the log-sum-exp.
double softmax_of(double* row, int64_t begin, int64_t end, int64_t width) {
  const double max = begin < end ? *std::max_element(row + begin, row + end) : 0;
  double sum = 0;
  for (int64_t c = 0; c < width; ++c) sum += row[c] = begin <= c && c < end ? std::exp(row[c] - max) : 0;
  for (int64_t c = begin; c < end; ++c) row[c] /= sum;
  return max + std::log(sum);
}

TEST(Softmax, EveryRungMakesRowsThatAddUpToOne) {
  constexpr int64_t kRows = 6, kSquare = 3;
  for (const auto& rung : softmax::rungs()) {
    for (const int64_t width : {1, 2, 31, 64, 127, 760, 1023, 1600, 9001}) {
      for (const bool causal : {false, true}) {
        const std::vector<float> x = numbers(kRows * width, 7919);
        std::vector<double> expected(x.begin(), x.end());
        for (double& score : expected) score *= -0.7;
        for (int64_t row = 0; row < kRows; ++row) {
          const int64_t seen = causal ? std::max<int64_t>(0, row % kSquare + 1 + width - kSquare) : width;
          softmax_of(&expected[row * width], 0, seen, width);
        }
        const DeviceVector<float> device_x(x), y(std::vector<float>(x.size(), kNaN));
        rung.launch({device_x.data(), y.data(), kRows, width, kSquare, -0.7, causal, DType::kFloat32}, nullptr);
        expect_near(y.values(), expected, 1e-5,
                    rung.name + (" width=" + std::to_string(width)) + (causal ? " causal" : ""));
      }
    }
  }
}

TEST(SoftmaxBackward, EveryRungMovesWeightsByWhatTheyDifferFromTheMean) {
  constexpr int64_t kRows = 6, kSquare = 3;
  for (const auto& rung : softmax_backward::rungs()) {
    for (const int64_t width : {1, 2, 31, 64, 127, 760, 1023, 1600, 9001}) {
      for (const bool causal : {false, true}) {
        const std::vector<float> grad = numbers(kRows * width, 7919);
        std::vector<float> y = numbers(kRows * width, 104729);
        for (float& weight : y) weight /= static_cast<float>(width);
        std::vector<double> expected(y.size(), 0);
        for (int64_t row = 0; row < kRows; ++row) {
          const int64_t seen = causal ? std::max<int64_t>(0, row % kSquare + 1 + width - kSquare) : width;
          double sum = 0;
          for (int64_t i = row * width; i < row * width + seen; ++i) sum += double{y[i]} * grad[i];
          for (int64_t i = row * width; i < row * width + seen; ++i) expected[i] = -0.7 * y[i] * (grad[i] - sum);
        }
        const DeviceVector<float> device_grad(grad), device_y(y), grad_x(std::vector<float>(y.size(), kNaN));
        rung.launch(
            {device_grad.data(), device_y.data(), grad_x.data(), kRows, width, kSquare, -0.7, causal, DType::kFloat32},
            nullptr);
        expect_near(grad_x.values(), expected, 1e-5,
                    rung.name + (" width=" + std::to_string(width)) + (causal ? " causal" : ""));
      }
    }
  }
}

// An attention of one batch, whose heads share one of k and v; where its tensors lie is left to the caller.
template <class Args>
Args sizes(int64_t heads, int64_t q_length, int64_t k_length, int64_t dim, double scale, bool causal, bool half) {
  Args args{};
  args.batch = args.kv_heads = 1;
  args.heads = heads;
  args.q_length = q_length;
  args.k_length = k_length;
  args.head_dim = dim;
  args.scale = scale;
  args.causal = causal;
  args.dtype = half ? DType::kBFloat16 : DType::kFloat32;
  return args;
}

template <class Args>
std::string described(const Args& args) {
  return " Sq=" + std::to_string(args.q_length) + " Sk=" + std::to_string(args.k_length) +
         " D=" + std::to_string(args.head_dim) + (args.causal ? " causal" : "");
}

// q, k, v and out lie as GPT-2's do: [position, head, column], so neighbouring rows of a head are H·D apart. Two heads
// of q share one of k and v. The first key and the last two are padding where there is `padding`.
template <class T>
void check_attention(const Rung<attention::Args>& rung, int64_t q_length, int64_t k_length, int64_t dim, bool causal,
                     bool padding) {
  constexpr bool kHalf = !std::is_same_v<T, float>;
  constexpr int64_t kHeads = 2;
  const double scale = 0.05;
  const int64_t begin = padding ? 1 : 0, end = padding ? k_length - 2 : k_length;
  const std::vector<T> q = numbers<T>(q_length * kHeads * dim, 7919);
  const std::vector<T> k = numbers<T>(k_length * dim, 6101);
  const std::vector<T> v = numbers<T>(k_length * dim, 5101);
  std::vector<double> expected(q.size()), expected_lse(kHeads * q_length);
  for (int64_t row = 0; row < q_length * kHeads; ++row) {
    const int64_t query = row / kHeads, head = row % kHeads;
    std::vector<double> weights(k_length);
    for (int64_t key = 0; key < k_length; ++key) {
      for (int64_t d = 0; d < dim; ++d) weights[key] += scale * as_float(q[row * dim + d]) * as_float(k[key * dim + d]);
    }
    const int64_t seen =
        causal ? std::clamp<int64_t>(query + k_length - q_length + 1, begin, std::max(begin, end)) : end;
    expected_lse[head * q_length + query] = softmax_of(weights.data(), begin, seen, k_length);
    for (int64_t key = 0; key < k_length; ++key) {
      for (int64_t d = 0; d < dim; ++d) expected[row * dim + d] += weights[key] * as_float(v[key * dim + d]);
    }
  }

  const DeviceVector<T> device_q(q), device_k(k), device_v(v), out(std::vector<T>(q.size(), from_float<T>(kNaN)));
  const DeviceVector<float> lse(std::vector<float>(kHeads * q_length, kNaN));
  const DeviceVector<int32_t> key_begin({static_cast<int32_t>(begin)}), key_end({static_cast<int32_t>(end)});
  auto args = sizes<attention::Args>(kHeads, q_length, k_length, dim, scale, causal, kHalf);
  args.q = device_q.data();
  args.k = device_k.data();
  args.v = device_v.data();
  args.out = out.data();
  args.lse = lse.data();
  args.key_begin = padding ? key_begin.data() : nullptr;
  args.key_end = padding ? key_end.data() : nullptr;
  args.q_stride = args.out_stride = {q_length * kHeads * dim, dim, kHeads * dim};
  args.k_stride = args.v_stride = {k_length * dim, dim, dim};
  ASSERT_EQ(rung.can_implement(args), "") << rung.name;
  const int64_t scratch_bytes = rung.scratch_bytes ? rung.scratch_bytes(args) : 4;
  const DeviceVector<float> scratch(std::vector<float>(scratch_bytes / sizeof(float), kNaN));
  args.scratch = scratch.data();
  rung.launch(args, nullptr);
  const std::string what = rung.name + described(args) + (padding ? " padding" : "");
  expect_near(out.values(), expected, kHalf ? 3e-2 : 1e-5, what);  // up to 4, so half a bfloat16 is 0.008
  expect_near(lse.values(), expected_lse, 1e-4, what + ", lse");
}

TEST(Attention, EveryRungIsTheWeightedMean) {
  for (const auto& rung : attention::rungs()) {
    attention::Args float32{};
    float32.dtype = DType::kFloat32;
    const bool half = !rung.can_implement(float32).empty();
    for (const bool causal : {false, true}) {
      const auto check = [&](int64_t q_length, int64_t k_length, int64_t dim, bool padding) {
        if (half) {
          check_attention<__nv_bfloat16>(rung, q_length, k_length, std::min<int64_t>((dim + 7) / 8 * 8, 128), causal,
                                         padding);
        } else {
          check_attention<float>(rung, q_length, k_length, dim, causal, padding);
        }
      };
      check(1, 1, 1, false);
      check(33, 31, 40, false);  // more queries than keys: two of them see nothing, if causal
      check(1, 129, 64, false);  // a decode step
      check(67, 67, 64, true);
      check(5, 37, 111, true);
      check(2, 3, 8, true);  // padding and nothing else
      check(18, 33, 256, false);
      check(300, 200, 16, true);  // several tiles, of queries and of keys
    }
  }
}

// Two heads of q share one of k and v; the first key and the last two are padding where there is `padding`. Everything
// lies as [position, head, column].
template <class T>
void check_backward(const Rung<attention_backward::Args>& rung, int64_t q_length, int64_t k_length, int64_t dim,
                    bool causal, bool padding) {
  constexpr bool kHalf = !std::is_same_v<T, float>;
  constexpr int64_t kHeads = 2;
  const double scale = 0.05;
  const int64_t begin = padding ? 1 : 0, end = padding ? k_length - 2 : k_length;
  const std::vector<T> q = numbers<T>(q_length * kHeads * dim, 7919), grad = numbers<T>(q.size(), 3571);
  const std::vector<T> k = numbers<T>(k_length * dim, 6101), v = numbers<T>(k_length * dim, 5101);
  std::vector<T> out(q.size());
  std::vector<float> lse(kHeads * q_length), grad_lse = numbers(lse.size(), 4241);
  std::vector<double> dq(q.size()), dk(k.size()), dv(k.size());
  for (int64_t row = 0; row < q_length * kHeads; ++row) {
    const int64_t query = row / kHeads, head = row % kHeads;
    const auto dot = [&](const std::vector<T>& a, int64_t i, const std::vector<T>& b, int64_t j) {
      double sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += as_float(a[i * dim + d]) * as_float(b[j * dim + d]);
      return sum;
    };
    std::vector<double> weights(k_length);
    for (int64_t key = 0; key < k_length; ++key) weights[key] = scale * dot(q, row, k, key);
    const int64_t seen =
        causal ? std::clamp<int64_t>(query + k_length - q_length + 1, begin, std::max(begin, end)) : end;
    lse[head * q_length + query] = static_cast<float>(softmax_of(weights.data(), begin, seen, k_length));
    for (int64_t d = 0; d < dim; ++d) {
      double sum = 0;
      for (int64_t key = 0; key < k_length; ++key) sum += weights[key] * as_float(v[key * dim + d]);
      out[row * dim + d] = from_float<T>(static_cast<float>(sum));
    }
    const double delta = dot(grad, row, out, row) - grad_lse[head * q_length + query];
    for (int64_t key = 0; key < k_length; ++key) {
      const double grad_score = weights[key] * (dot(grad, row, v, key) - delta);
      for (int64_t d = 0; d < dim; ++d) {
        dq[row * dim + d] += scale * grad_score * as_float(k[key * dim + d]);
        dk[key * dim + d] += scale * grad_score * as_float(q[row * dim + d]);
        dv[key * dim + d] += weights[key] * as_float(grad[row * dim + d]);
      }
    }
  }

  const DeviceVector<T> device_q(q), device_k(k), device_v(v), device_out(out), device_grad(grad);
  const DeviceVector<T> device_dq(std::vector<T>(q.size(), from_float<T>(kNaN)));
  const DeviceVector<T> device_dk(std::vector<T>(k.size(), from_float<T>(kNaN)));
  const DeviceVector<T> device_dv(std::vector<T>(k.size(), from_float<T>(kNaN)));
  const DeviceVector<float> device_lse(lse), device_grad_lse(grad_lse);
  const DeviceVector<int32_t> key_begin({static_cast<int32_t>(begin)}), key_end({static_cast<int32_t>(end)});
  auto args = sizes<attention_backward::Args>(kHeads, q_length, k_length, dim, scale, causal, kHalf);
  args.q = device_q.data();
  args.k = device_k.data();
  args.v = device_v.data();
  args.out = device_out.data();
  args.lse = device_lse.data();
  args.grad = device_grad.data();
  args.grad_lse = device_grad_lse.data();
  args.dq = device_dq.data();
  args.dk = device_dk.data();
  args.dv = device_dv.data();
  args.key_begin = padding ? key_begin.data() : nullptr;
  args.key_end = padding ? key_end.data() : nullptr;
  args.q_stride = args.out_stride = args.grad_stride = args.dq_stride = {q_length * kHeads * dim, dim, kHeads * dim};
  args.k_stride = args.v_stride = args.dk_stride = args.dv_stride = {k_length * dim, dim, dim};
  ASSERT_EQ(rung.can_implement(args), "") << rung.name;
  const DeviceVector<float> scratch(std::vector<float>(rung.scratch_bytes(args) / sizeof(float), kNaN));
  args.scratch = scratch.data();
  rung.launch(args, nullptr);
  const std::string what = rung.name + described(args) + (padding ? " padding" : "");
  const auto compare = [&](const DeviceVector<T>& got, const std::vector<double>& expected, const char* name) {
    double greatest = 1;
    for (const double x : expected) greatest = std::max(greatest, std::abs(x));
    expect_near(got.values(), expected, (kHalf ? 1e-2 : 1e-5) * greatest, what + ", " + name);
  };
  compare(device_dq, dq, "dq");
  compare(device_dk, dk, "dk");
  compare(device_dv, dv, "dv");
}

TEST(AttentionBackward, EveryRungIsTheFormula) {
  for (const auto& rung : attention_backward::rungs()) {
    attention_backward::Args float32{};
    float32.dtype = DType::kFloat32;
    const bool half = !rung.can_implement(float32).empty();
    for (const bool causal : {false, true}) {
      const auto check = [&](int64_t q_length, int64_t k_length, int64_t dim, bool padding) {
        if (half) {
          auto wide = sizes<attention_backward::Args>(2, q_length, k_length, 128, 1, causal, true);
          const int64_t most = rung.can_implement(wide).empty() ? 128 : 64;
          check_backward<__nv_bfloat16>(rung, q_length, k_length, std::min((dim + 7) / 8 * 8, most), causal, padding);
        } else {
          check_backward<float>(rung, q_length, k_length, dim, causal, padding);
        }
      };
      check(1, 1, 1, false);
      check(33, 31, 40, false);  // more queries than keys: two of them see nothing, if causal
      check(67, 67, 64, true);
      check(5, 37, 111, true);
      check(2, 3, 8, true);  // padding and nothing else
      check(18, 33, 256, false);
      check(200, 150, 16, true);  // several tiles, of queries and of keys
    }
  }
}

// Two batches of different lengths, two heads of q for each of k and v. `page` keys in a page, the last page of a batch
// first in memory; 0: no pages. `missing`: the table's last entry names a page that is not there.
template <class T>
void check_decode(const Rung<attention_decode::Args>& rung, int64_t q_length, int64_t k_length, int64_t dim,
                  int64_t page, bool missing) {
  constexpr bool kHalf = !std::is_same_v<T, float>;
  constexpr int64_t kBatch = 2, kHeads = 2;
  const double scale = 0.05;
  const int64_t pages = page == 0 ? 1 : k_length / page, size = page == 0 ? k_length : page;
  const std::vector<T> q = numbers<T>(kBatch * kHeads * q_length * dim, 7919);
  const std::vector<T> k = numbers<T>(kBatch * k_length * dim, 6101), v = numbers<T>(kBatch * k_length * dim, 5101);
  std::vector<int32_t> table;
  for (int64_t i = 0; i < kBatch * pages; ++i) {
    table.push_back(static_cast<int32_t>(i / pages * pages + pages - 1 - i % pages));
  }
  const std::vector<int32_t> begins = {1, 0}, ends = {static_cast<int32_t>(k_length), static_cast<int32_t>(k_length)};
  std::vector<double> expected(q.size());
  for (int64_t row = 0; row < kBatch * kHeads * q_length; ++row) {
    const int64_t batch = row / (kHeads * q_length), query = row % q_length;
    const auto first_of = [&](int64_t key) {
      return ((page == 0 ? batch : table[batch * pages + key / size]) * size + key % size) * dim;
    };
    std::vector<double> weights(k_length);
    for (int64_t key = 0; key < k_length; ++key) {
      for (int64_t d = 0; d < dim; ++d)
        weights[key] += scale * as_float(q[row * dim + d]) * as_float(k[first_of(key) + d]);
    }
    softmax_of(weights.data(), begins[batch], std::max<int64_t>(begins[batch], ends[batch] - (q_length - 1 - query)),
               k_length);
    for (int64_t key = 0; key < k_length; ++key) {
      for (int64_t d = 0; d < dim; ++d) expected[row * dim + d] += weights[key] * as_float(v[first_of(key) + d]);
    }
  }

  if (missing) table.back() = static_cast<int32_t>(kBatch * pages);
  const DeviceVector<T> device_q(q), device_k(k), device_v(v), out(std::vector<T>(q.size(), from_float<T>(kNaN)));
  const DeviceVector<float> lse(std::vector<float>(kBatch * kHeads * q_length, kNaN));
  const DeviceVector<int32_t> device_table(table), key_begin(begins), key_end(ends);
  attention_decode::Args args{};
  args.q = device_q.data();
  args.k = device_k.data();
  args.v = device_v.data();
  args.out = out.data();
  args.lse = lse.data();
  args.key_begin = key_begin.data();
  args.key_end = key_end.data();
  args.q_stride = args.out_stride = {kHeads * q_length * dim, q_length * dim, dim};
  args.k_stride = args.v_stride = {size * dim, size * dim, dim};
  args.batch = kBatch;
  args.kv_heads = 1;
  args.heads = kHeads;
  args.q_length = q_length;
  args.k_length = k_length;
  args.head_dim = dim;
  args.scale = scale;
  args.dtype = kHalf ? DType::kBFloat16 : DType::kFloat32;
  args.block_table = page == 0 ? nullptr : device_table.data();
  args.table_stride = pages;
  args.blocks = kBatch * pages;
  args.block_size = size;
  const std::string what = rung.name + (" Sq=" + std::to_string(q_length)) + " Sk=" + std::to_string(k_length) +
                           " D=" + std::to_string(dim) + " page=" + std::to_string(page);
  ASSERT_EQ(rung.can_implement(args), "") << what;
  const int64_t scratch_bytes = rung.scratch_bytes ? rung.scratch_bytes(args) : 4;
  const DeviceVector<float> scratch(std::vector<float>(scratch_bytes / sizeof(float) + 1, kNaN));
  args.scratch = scratch.data();
  rung.launch(args, nullptr);
  std::vector<T> got = out.values();
  if (missing) {  // the last text's queries that see a key of that page: all of them
    for (size_t i = q.size() / kBatch; i < q.size(); ++i) {
      ASSERT_TRUE(std::isnan(as_float(got[i]))) << what << ", element " << i;
    }
    got.resize(q.size() / kBatch);
  }
  expect_near(got, expected, kHalf ? 3e-2 : 1e-5, what);
}

TEST(AttentionDecode, EveryRungIsTheWeightedMean) {
  for (const auto& rung : attention_decode::rungs()) {
    attention_decode::Args args{};
    args.dtype = DType::kFloat32;
    args.kv_heads = args.heads = args.batch = 1;
    const bool half = !rung.can_implement(args).empty();
    const int32_t table = 0;
    args.dtype = half ? DType::kBFloat16 : DType::kFloat32;
    args.block_table = &table;
    args.block_size = 16;
    const bool paged = rung.can_implement(args).empty();
    const auto check = [&](int64_t q_length, int64_t k_length, int64_t dim, int64_t page, bool missing = false) {
      if (page != 0 && !paged) return;
      if (half) {
        check_decode<__nv_bfloat16>(rung, q_length, k_length, dim, page, missing);
      } else {
        check_decode<float>(rung, q_length, k_length, dim, page, missing);
      }
    };
    check(1, 1, 8, 0);
    check(1, 600, 64, 0);
    check(3, 37, 104, 0);
    check(16, 300, 64, 0);
    check(2, 96, 64, 16);
    check(1, 96, 128, 48);
    check(2, 96, 64, 16, true);
  }
}

}  // namespace
}  // namespace kf::KF_BACKEND
