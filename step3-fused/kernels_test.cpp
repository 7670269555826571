// Every rung of this stage in float32, against a plain loop in double; without torch, so that a sanitizer or a debugger
// sees nothing but the kernels. Presets in the root's CMakeLists.txt: simt, simt-asan, cuda.
#include <gtest/gtest.h>
#include <kf/launch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention_block/rungs.h"
#include "kernels/attention_residual_layer_norm/rungs.h"
#include "kernels/layer_norm/rungs.h"
#include "kernels/residual_layer_norm/rungs.h"

namespace kf::KF_BACKEND {
namespace {

constexpr double kEps = 1e-5;

// `values` in the GPU's memory, with not a byte more, so that a sanitizer finds what lies one past the end.
class DeviceVector {
 public:
  explicit DeviceVector(const std::vector<float>& values) : size_(values.size()) {
    check(cudaMalloc(&data_, size_ * sizeof(float)), "cudaMalloc");
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  // Room for n values, NaN until somebody writes them.
  explicit DeviceVector(int64_t n) : DeviceVector(std::vector<float>(n, std::numeric_limits<float>::quiet_NaN())) {}
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

std::vector<float> numbers(size_t n, int step, float scale = 1) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = scale * (0.09f * static_cast<float>(i * step % 23) - 1.0f);
  return values;
}

void expect_near(const DeviceVector& got, const std::vector<double>& expected, const std::string& what) {
  const std::vector<float> values = got.values();
  for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], 2e-5) << what << ", element " << i;
}

std::vector<double> layer_norm_of(std::vector<double> x, const std::vector<float>& weight,
                                  const std::vector<float>& bias) {
  const size_t width = weight.size();
  for (size_t row = 0; row < x.size(); row += width) {
    double mean = 0, variance = 0;
    for (size_t c = 0; c < width; ++c) mean += x[row + c] / width;
    for (size_t c = 0; c < width; ++c) variance += (x[row + c] - mean) * (x[row + c] - mean) / width;
    for (size_t c = 0; c < width; ++c)
      x[row + c] = (x[row + c] - mean) / std::sqrt(variance + kEps) * weight[c] + bias[c];
  }
  return x;
}

TEST(LayerNorm, EveryRungNormalisesRows) {
  constexpr int64_t kRows = 3;
  for (const int64_t width : {1, 2, 31, 64, 127, 760, 1023, 1600, 2049}) {
    const std::vector<float> x = numbers(kRows * width, 7919), residual = numbers(kRows * width, 6101);
    const std::vector<float> weight = numbers(width, 5), bias = numbers(width, 3);
    const DeviceVector dx(x), dr(residual), dw(weight), db(bias);
    std::vector<double> sum(x.begin(), x.end());
    for (const auto& rung : layer_norm::rungs()) {
      const DeviceVector y(kRows * width);
      rung.launch({dx.data(), dw.data(), db.data(), y.data(), kRows, width, kEps, DType::kFloat32}, nullptr);
      expect_near(y, layer_norm_of(sum, weight, bias), rung.name + (" width=" + std::to_string(width)));
    }
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += residual[i];
    for (const auto& rung : residual_layer_norm::rungs()) {
      const DeviceVector y(kRows * width), total(kRows * width);
      rung.launch(
          {dx.data(), dr.data(), dw.data(), db.data(), y.data(), total.data(), kRows, width, kEps, DType::kFloat32},
          nullptr);
      expect_near(total, sum, rung.name + (" sum, width=" + std::to_string(width)));
      expect_near(y, layer_norm_of(sum, weight, bias), rung.name + (" width=" + std::to_string(width)));
    }
  }
}

// q, k and v lie as GPT-2's do: [batch, position, head, column], so neighbouring rows of a head are H·D apart.
std::vector<double> attention_of(const Attention& a) {
  const int64_t width = a.heads * a.head_dim;
  const auto at = [&](const Heads& x, int64_t b, int64_t h, int64_t s) {
    return static_cast<const float*>(x.data) + b * x.batch_stride + h * x.head_stride + s * x.row_stride;
  };
  std::vector<double> out(a.batch * a.q_length * width);
  for (int64_t i = 0; i < a.batch * a.q_length * a.heads; ++i) {
    const int64_t b = i / a.heads / a.q_length, row = i / a.heads % a.q_length, h = i % a.heads;
    const int64_t seen = a.causal ? std::clamp<int64_t>(row + 1 + a.k_length - a.q_length, 0, a.k_length) : a.k_length;
    std::vector<double> weight(seen);
    double sum = 0;
    for (int64_t j = 0; j < seen; ++j) {
      for (int64_t d = 0; d < a.head_dim; ++d) weight[j] += a.scale * at(a.q, b, h, row)[d] * at(a.k, b, h, j)[d];
      sum += weight[j] = std::exp(weight[j]);
    }
    for (int64_t j = 0; j < seen; ++j) {
      for (int64_t d = 0; d < a.head_dim; ++d) out[i * a.head_dim + d] += weight[j] / sum * at(a.v, b, h, j)[d];
    }
  }
  return out;
}

template <class Args>
void launch(const Rung<Args>& rung, Args args) {
  ASSERT_EQ(rung.supports(args), "");
  const DeviceVector scratch(rung.scratch_bytes ? rung.scratch_bytes(args) / sizeof(float) : 1);
  args.scratch = rung.scratch_bytes ? scratch.data() : nullptr;
  rung.launch(args, nullptr);
}

void check_fused(int64_t batch, int64_t heads, int64_t q_length, int64_t k_length, int64_t dim, bool causal) {
  const int64_t width = heads * dim, n = batch * q_length * width;
  const std::vector<float> q = numbers(n, 7919), k = numbers(batch * k_length * width, 6101);
  const std::vector<float> v = numbers(batch * k_length * width, 5101), residual = numbers(n, 4099);
  const std::vector<float> proj_weight = numbers(width * width, 7, 1.0f / width), proj_bias = numbers(width, 5);
  const std::vector<float> weight = numbers(width, 5), bias = numbers(width, 3);
  const Heads hq{q.data(), q_length * width, dim, width}, hk{k.data(), k_length * width, dim, width};
  const Heads hv{v.data(), k_length * width, dim, width};
  Attention a{hq, hk, hv, batch, heads, q_length, k_length, dim, 0.3, causal};

  const std::vector<double> attended = attention_of(a);
  std::vector<double> plain(attended), projected(n);
  for (int64_t i = 0; i < n; ++i) {
    plain[i] += residual[i];
    projected[i] = double{residual[i]} + proj_bias[i % width];
    for (int64_t c = 0; c < width; ++c)
      projected[i] += attended[i - i % width + c] * proj_weight[c * width + i % width];
  }

  const DeviceVector dq(q), dk(k), dv(v), dr(residual), dpw(proj_weight), dpb(proj_bias), dw(weight), db(bias);
  a.q.data = dq.data();
  a.k.data = dk.data();
  a.v.data = dv.data();
  const std::string what = " B=" + std::to_string(batch) + " H=" + std::to_string(heads) +
                           " Sq=" + std::to_string(q_length) + " Sk=" + std::to_string(k_length) +
                           " D=" + std::to_string(dim) + (causal ? " causal" : "");
  for (const auto& rung : attention_residual_layer_norm::rungs()) {
    const DeviceVector y(n);
    launch(rung, {a, dr.data(), dw.data(), db.data(), y.data(), kEps, nullptr, DType::kFloat32});
    expect_near(y, layer_norm_of(plain, weight, bias), "attention_residual_layer_norm " + (rung.name + what));
  }
  for (const auto& rung : attention_block::rungs()) {
    const DeviceVector y(n), sum(n);
    launch(rung, {a, dr.data(), dpw.data(), dpb.data(), dw.data(), db.data(), y.data(), sum.data(), kEps, nullptr,
                  DType::kFloat32});
    expect_near(sum, projected, "attention_block sum " + (rung.name + what));
    expect_near(y, layer_norm_of(projected, weight, bias), "attention_block " + (rung.name + what));
  }
}

TEST(Fused, EveryRungIsAttentionProjectionResidualAndLayerNorm) {
  for (const bool causal : {false, true}) {
    check_fused(1, 1, 1, 1, 1, causal);
    check_fused(2, 3, 5, 7, 5, causal);
    check_fused(1, 2, 33, 31, 40, causal);  // more queries than keys: two of them see nothing, if causal
    check_fused(3, 2, 1, 70, 64, causal);   // a decode step
    check_fused(8, 1, 33, 33, 64, causal);  // tiles of 16 rows
    check_fused(8, 2, 16, 20, 9, causal);   // of 8
    check_fused(1, 1, 6, 37, 111, causal);
  }
}

}  // namespace
}  // namespace kf::KF_BACKEND
