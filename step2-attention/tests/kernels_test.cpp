// Every rung of this step in float32, or in bfloat16 where it takes half types only, against a plain loop in double;
// without torch, so that a sanitizer or a debugger sees nothing but the kernels. Presets in the root's CMakeLists.txt:
// simt, simt-asan, simt-tsan, cuda.
#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/attention/rungs.h"
#include "kernels/attention_backward/rungs.h"
#include "kernels/attention_decode/rungs.h"
#include "kernels/softmax/rungs.h"
#include "kernels/softmax_backward/rungs.h"
#include "layer_test.h"

namespace kf::KF_BACKEND {
namespace {

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

// Of row i of a and row j of b.
template <class T>
double dot(const std::vector<T>& a, int64_t i, const std::vector<T>& b, int64_t j, int64_t dim) {
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += as_float(a[i * dim + d]) * as_float(b[j * dim + d]);
  return sum;
}

// Where the keys end that a query sees.
int64_t seen_by(int64_t query, int64_t q_length, int64_t k_length, int64_t begin, int64_t end, bool causal) {
  return causal ? std::clamp<int64_t>(query + k_length - q_length + 1, begin, std::max(begin, end)) : end;
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
        const DeviceVector device_x(x), y(x.size());
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
        const DeviceVector device_grad(grad), device_y(y), grad_x(y.size());
        rung.launch(
            {device_grad.data(), device_y.data(), grad_x.data(), kRows, width, kSquare, -0.7, causal, DType::kFloat32},
            nullptr);
        expect_near(grad_x.values(), expected, 1e-5,
                    rung.name + (" width=" + std::to_string(width)) + (causal ? " causal" : ""));
      }
    }
  }
}

template <class T>
void point(attention::Args& args, const DeviceArray<T>& q, const DeviceArray<T>& k, const DeviceArray<T>& v,
           const DeviceArray<T>& out, const DeviceVector& lse) {
  args.q = q.data(), args.k = k.data(), args.v = v.data(), args.out = out.data(), args.lse = lse.data();
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
    for (int64_t key = 0; key < k_length; ++key) weights[key] = scale * dot(q, row, k, key, dim);
    const int64_t seen = seen_by(query, q_length, k_length, begin, end, causal);
    expected_lse[head * q_length + query] = softmax_of(weights.data(), begin, seen, k_length);
    for (int64_t key = 0; key < k_length; ++key) {
      for (int64_t d = 0; d < dim; ++d) expected[row * dim + d] += weights[key] * as_float(v[key * dim + d]);
    }
  }

  const DeviceArray<T> device_q(q), device_k(k), device_v(v), out(q.size());
  const DeviceVector lse(kHeads * q_length);
  const std::vector<int32_t> begins = {static_cast<int32_t>(begin)}, ends = {static_cast<int32_t>(end)};
  const DeviceArray<int32_t> key_begin(begins), key_end(ends);
  auto args = sizes<attention::Args>(kHeads, q_length, k_length, dim, scale, causal, kHalf);
  point(args, device_q, device_k, device_v, out, lse);
  args.key_begin = padding ? key_begin.elements() : nullptr;
  args.key_end = padding ? key_end.elements() : nullptr;
  args.q_stride = args.out_stride = {q_length * kHeads * dim, dim, kHeads * dim};
  args.k_stride = args.v_stride = {k_length * dim, dim, dim};
  ASSERT_NO_FATAL_FAILURE(launch(rung, args));
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

using Starts = std::vector<int32_t>;
const std::vector<Starts> kWrongStarts = {
    {0, 90, 20, 150}, {-9, 2147483647, 7, -2147483647 - 1, 99, 151}, {2147483647, -1}, {200, 300, 400}, {-3, -2, -1}};

#ifndef KF_SIMT_TSAN  // documents that overlap are written twice, by blocks that race
// Nobody can check them on a GPU without waiting for it: the output may be anything, but nothing else is read or
// written.
TEST(Attention, WrongStartsOfDocumentsStayWithinTheRow) {
  constexpr int64_t kLength = 150, kDim = 64;
  for (const auto& rung : attention::rungs()) {
    for (const bool half : {false, true}) {
      auto args = sizes<attention::Args>(1, kLength, kLength, kDim, 0.05, true, half);
      const size_t n = kLength * kDim * (half ? 1 : 2);  // of float32 as many bytes
      const DeviceArray<__nv_bfloat16> row(numbers<__nv_bfloat16>(n, 7919)), out(n);
      const DeviceVector lse(kLength);
      for (const Starts& starts : kWrongStarts) {
        const DeviceArray<int32_t> cu_seqlens(starts);
        args.q = args.k = args.v = row.data(), args.out = out.data(), args.lse = lse.data();
        args.q_stride = args.k_stride = args.v_stride = args.out_stride = {kLength * kDim, kLength * kDim, kDim};
        args.cu_seqlens = args.cu_seqlens_k = cu_seqlens.elements();
        args.documents = static_cast<int64_t>(starts.size()) - 1;
        if (rung.can_implement(args).empty()) {
          ASSERT_NO_FATAL_FAILURE(launch(rung, args));
        }
      }
    }
  }
}
#endif

// Two heads of q share one of k and v; the first key and the last two are padding where there is `padding`. Everything
// lies as [position, head, column]. `starts` and `key_starts`, where there are any: of documents of a packed row.
template <class T>
void check_backward(const Rung<attention_backward::Args>& rung, int64_t q_length, int64_t k_length, int64_t dim,
                    bool causal, bool padding, const Starts& starts = {}, const Starts& key_starts = {}) {
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
    std::vector<double> weights(k_length);
    for (int64_t key = 0; key < k_length; ++key) weights[key] = scale * dot(q, row, k, key, dim);
    int64_t first = begin, seen = seen_by(query, q_length, k_length, begin, end, causal);
    if (!starts.empty()) {
      const int64_t next = std::upper_bound(starts.begin(), starts.end(), query) - starts.begin();
      first = key_starts[next - 1], seen = key_starts[next];
      if (causal) seen = std::max(first, seen - (starts[next] - 1 - query));
    }
    lse[head * q_length + query] = static_cast<float>(softmax_of(weights.data(), first, seen, k_length));
    for (int64_t d = 0; d < dim; ++d) {
      double sum = 0;
      for (int64_t key = 0; key < k_length; ++key) sum += weights[key] * as_float(v[key * dim + d]);
      out[row * dim + d] = from_float<T>(static_cast<float>(sum));
    }
    const double delta = dot(grad, row, out, row, dim) - grad_lse[head * q_length + query];
    for (int64_t key = 0; key < k_length; ++key) {
      const double grad_score = weights[key] * (dot(grad, row, v, key, dim) - delta);
      for (int64_t d = 0; d < dim; ++d) {
        dq[row * dim + d] += scale * grad_score * as_float(k[key * dim + d]);
        dk[key * dim + d] += scale * grad_score * as_float(q[row * dim + d]);
        dv[key * dim + d] += weights[key] * as_float(grad[row * dim + d]);
      }
    }
  }

  const DeviceArray<T> device_q(q), device_k(k), device_v(v), device_out(out), device_grad(grad);
  const DeviceArray<T> device_dq(q.size());
  const DeviceArray<T> device_dk(k.size());
  const DeviceArray<T> device_dv(k.size());
  const DeviceVector device_lse(lse), device_grad_lse(grad_lse);
  const std::vector<int32_t> begins = {static_cast<int32_t>(begin)}, ends = {static_cast<int32_t>(end)};
  const DeviceArray<int32_t> key_begin(begins), key_end(ends);
  auto args = sizes<attention_backward::Args>(kHeads, q_length, k_length, dim, scale, causal, kHalf);
  point(args, device_q, device_k, device_v, device_out, device_lse);
  args.grad = device_grad.data();
  args.grad_lse = device_grad_lse.data();
  args.dq = device_dq.data();
  args.dk = device_dk.data();
  args.dv = device_dv.data();
  args.key_begin = padding ? key_begin.elements() : nullptr;
  args.key_end = padding ? key_end.elements() : nullptr;
  const DeviceArray<int32_t> cu_seqlens(starts), cu_seqlens_k(key_starts);
  if (!starts.empty()) {
    args.cu_seqlens = cu_seqlens.elements();
    args.cu_seqlens_k = cu_seqlens_k.elements();
    args.documents = static_cast<int64_t>(starts.size()) - 1;
    if (!rung.can_implement(args).empty()) return;
  }
  args.q_stride = args.out_stride = args.grad_stride = args.dq_stride = {q_length * kHeads * dim, dim, kHeads * dim};
  args.k_stride = args.v_stride = args.dk_stride = args.dv_stride = {k_length * dim, dim, dim};
  ASSERT_NO_FATAL_FAILURE(launch(rung, args));
  const std::string what = rung.name + described(args) + (padding ? " padding" : "");
  const auto compare = [&](const DeviceArray<T>& got, const std::vector<double>& expected, const char* name) {
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

TEST(AttentionBackward, RungsForPackedRowsAreTheFormulaOnEachDocument) {
  const Starts starts = {0, 20, 20, 110, 140}, key_starts = {0, 30, 70, 170, 170};
  for (const auto& rung : attention_backward::rungs()) {
    for (const bool causal : {false, true}) {
      for (const int64_t dim : {24, 72}) {
        auto half = sizes<attention_backward::Args>(2, 140, 170, dim, 1, causal, true);
        if (!rung.can_implement(half).empty()) continue;
        check_backward<__nv_bfloat16>(rung, 140, 170, dim, causal, false, starts, key_starts);
      }
    }
  }
}

TEST(AttentionBackward, WrongStartsOfDocumentsEndAndStayWithinTheRow) {
  constexpr int64_t kLength = 150, kDim = 64;
  for (const auto& rung : attention_backward::rungs()) {
    auto args = sizes<attention_backward::Args>(1, kLength, kLength, kDim, 0.05, true, rung.name[1] > '2');
    const size_t n = kLength * kDim * 2;  // as many bytes as float32 has
    const DeviceArray<__nv_bfloat16> row(numbers<__nv_bfloat16>(n, 7919)), dq(n), dk(n), dv(n);
    const DeviceVector lse(numbers(kLength, 4241));
    for (const Starts& starts : kWrongStarts) {
      const DeviceArray<int32_t> cu_seqlens(starts);
      args.q = args.k = args.v = args.grad = row.data(), args.out = row.data(), args.lse = lse.data();
      args.dq = dq.data(), args.dk = dk.data(), args.dv = dv.data();
      args.q_stride = args.k_stride = args.v_stride = args.out_stride = {kLength * kDim, kLength * kDim, kDim};
      args.grad_stride = args.dq_stride = args.dk_stride = args.dv_stride = args.q_stride;
      args.cu_seqlens = args.cu_seqlens_k = cu_seqlens.elements();
      args.documents = static_cast<int64_t>(starts.size()) - 1;
      if (rung.can_implement(args).empty()) {
        ASSERT_NO_FATAL_FAILURE(launch(rung, args));
      }
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
    const auto row_of = [&](int64_t key) {
      return (page == 0 ? batch : table[batch * pages + key / size]) * size + key % size;
    };
    std::vector<double> weights(k_length);
    for (int64_t key = 0; key < k_length; ++key) weights[key] = scale * dot(q, row, k, row_of(key), dim);
    softmax_of(weights.data(), begins[batch], std::max<int64_t>(begins[batch], ends[batch] - (q_length - 1 - query)),
               k_length);
    for (int64_t key = 0; key < k_length; ++key) {
      for (int64_t d = 0; d < dim; ++d) expected[row * dim + d] += weights[key] * as_float(v[row_of(key) * dim + d]);
    }
  }

  if (missing) table.back() = static_cast<int32_t>(kBatch * pages);
  const DeviceArray<T> device_q(q), device_k(k), device_v(v), out(q.size());
  const DeviceVector lse(kBatch * kHeads * q_length);
  const DeviceArray<int32_t> device_table(table), key_begin(begins), key_end(ends);
  auto args = sizes<attention_decode::Args>(kHeads, q_length, k_length, dim, scale, false, kHalf);
  args.batch = kBatch;
  point(args, device_q, device_k, device_v, out, lse);
  args.key_begin = key_begin.elements();
  args.key_end = key_end.elements();
  args.q_stride = args.out_stride = {kHeads * q_length * dim, q_length * dim, dim};
  args.k_stride = args.v_stride = {size * dim, size * dim, dim};
  args.block_table = page == 0 ? nullptr : device_table.elements();
  args.table_stride = pages;
  args.blocks = kBatch * pages;
  args.block_size = size;
  const std::string what = rung.name + (" Sq=" + std::to_string(q_length)) + " Sk=" + std::to_string(k_length) +
                           " D=" + std::to_string(dim) + " page=" + std::to_string(page);
  ASSERT_NO_FATAL_FAILURE(launch(rung, args)) << what;
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
