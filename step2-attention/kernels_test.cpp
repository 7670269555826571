// Every rung of this stage in float32, against a plain loop in double; without torch, so that a sanitizer or a debugger
// sees nothing but the kernels. Presets in the root's CMakeLists.txt: simt, simt-asan, cuda.
#include <gtest/gtest.h>
#include <kf/launch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention/rungs.h"
#include "kernels/softmax/rungs.h"

namespace kf::KF_BACKEND {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// `values` in the GPU's memory, with not a byte more, so that a sanitizer finds what lies one past the end.
class DeviceVector {
 public:
  explicit DeviceVector(const std::vector<float>& values) : size_(values.size()) {
    check(cudaMalloc(&data_, size_ * sizeof(float)), "cudaMalloc");
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  DeviceVector(const DeviceVector&) = delete;
  ~DeviceVector() { cudaFree(data_); }
  void* data() const { return data_; }
  std::vector<float> values() const {
    std::vector<float> copy(size_);
    check(cudaMemcpy(copy.data(), data_, size_ * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return copy;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};

std::vector<float> numbers(size_t n, int step) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = 0.37f * static_cast<float>(i * step % 23) - 4.0f;
  return values;
}

void expect_near(const std::vector<float>& got, const std::vector<double>& expected, const std::string& what) {
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-5) << what << ", element " << i;
}

// In place, over the first `seen` of `row`; what comes after becomes 0.
void softmax_of(double* row, int64_t seen, int64_t width) {
  const double max = seen > 0 ? *std::max_element(row, row + seen) : 0;
  double sum = 0;
  for (int64_t c = 0; c < width; ++c) sum += row[c] = c < seen ? std::exp(row[c] - max) : 0;
  for (int64_t c = 0; c < seen; ++c) row[c] /= sum;
}

TEST(Softmax, EveryRungMakesRowsThatAddUpToOne) {
  constexpr int64_t kRows = 3;
  for (const auto& rung : softmax::rungs()) {
    for (const int64_t width : {1, 2, 31, 64, 127, 760, 1023, 1600}) {
      const std::vector<float> x = numbers(kRows * width, 7919);
      std::vector<double> expected(x.begin(), x.end());
      for (int64_t row = 0; row < kRows; ++row) softmax_of(&expected[row * width], width, width);
      const DeviceVector device_x(x), y(std::vector<float>(x.size(), kNaN));
      rung.launch({device_x.data(), y.data(), kRows, width, DType::kFloat32}, nullptr);
      expect_near(y.values(), expected, rung.name + (" width=" + std::to_string(width)));
    }
  }
}

// q, k, v and out lie as GPT-2's do: [position, head, column], so neighbouring rows of a head are H·D apart.
void check_attention(const Rung<attention::Args>& rung, int64_t q_length, int64_t k_length, int64_t dim, bool causal) {
  constexpr int64_t kHeads = 2;
  const std::vector<float> q = numbers(q_length * kHeads * dim, 7919);
  const std::vector<float> k = numbers(k_length * kHeads * dim, 6101);
  const std::vector<float> v = numbers(k_length * kHeads * dim, 5101);
  std::vector<double> expected(q.size());
  const double scale = 0.05;
  for (int64_t row = 0; row < q_length * kHeads; ++row) {
    const int64_t head = row % kHeads;
    std::vector<double> weights(k_length);
    for (int64_t key = 0; key < k_length; ++key) {
      for (int64_t d = 0; d < dim; ++d) {
        weights[key] += scale * q[row * dim + d] * k[(key * kHeads + head) * dim + d];
      }
    }
    const int64_t last = row / kHeads + k_length - q_length;
    softmax_of(weights.data(), causal ? std::max<int64_t>(0, last + 1) : k_length, k_length);
    for (int64_t key = 0; key < k_length; ++key) {
      for (int64_t d = 0; d < dim; ++d) expected[row * dim + d] += weights[key] * v[(key * kHeads + head) * dim + d];
    }
  }

  const DeviceVector device_q(q), device_k(k), device_v(v), out(std::vector<float>(q.size(), kNaN));
  const attention::Strides q_stride{q_length * kHeads * dim, dim, kHeads * dim};
  const attention::Strides k_stride{k_length * kHeads * dim, dim, kHeads * dim};
  attention::Args args{
      device_q.data(), device_k.data(), device_v.data(), out.data(), q_stride, k_stride, k_stride,       q_stride, 1,
      kHeads,          q_length,        k_length,        dim,        scale,    causal,   DType::kFloat32};
  const int64_t scratch_bytes = rung.scratch_bytes ? rung.scratch_bytes(args) : 4;
  const DeviceVector scratch(std::vector<float>(scratch_bytes / sizeof(float), kNaN));
  args.scratch = scratch.data();
  rung.launch(args, nullptr);
  expect_near(out.values(), expected,
              rung.name + (" Sq=" + std::to_string(q_length)) + " Sk=" + std::to_string(k_length) +
                  " D=" + std::to_string(dim) + (causal ? " causal" : ""));
}

TEST(Attention, EveryRungIsTheWeightedMean) {
  for (const auto& rung : attention::rungs()) {
    for (const bool causal : {false, true}) {
      check_attention(rung, 1, 1, 1, causal);
      check_attention(rung, 33, 31, 40, causal);  // more queries than keys: two of them see nothing, if causal
      check_attention(rung, 1, 129, 64, causal);  // a decode step
      check_attention(rung, 67, 67, 64, causal);
      check_attention(rung, 5, 37, 111, causal);
      check_attention(rung, 18, 33, 256, causal);
    }
  }
}

}  // namespace
}  // namespace kf::KF_BACKEND
