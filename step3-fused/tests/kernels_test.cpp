// Every rung of this step, those for half types in bfloat16, against a plain loop in double; without torch, so that a
// sanitizer or a debugger sees nothing but the kernels. Presets in the root's CMakeLists.txt: simt, simt-asan, cuda.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/attention_block/rungs.h"
#include "kernels/attention_residual_layer_norm/rungs.h"
#include "kernels/layer_norm/rungs.h"
#include "kernels/layer_norm_backward/rungs.h"
#include "kernels/residual_layer_norm/rungs.h"
#include "kernels_test.h"

namespace kf::KF_BACKEND {
namespace {

std::vector<float> numbers(size_t n, int step, float scale = 1) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = scale * (0.09f * static_cast<float>(i * step % 23) - 1.0f);
  return values;
}

// The rungs that take half types only.
bool on_tensor_cores(const std::string& rung) {
  return rung == "v4_dataflow" || rung == "v5_cluster" || rung == "v4_heads";
}

template <class Memory>
void expect_near(const Memory& got, const std::vector<double>& expected, const std::string& what) {
  const std::vector<float> values = got.values();
  for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], 2e-5) << what << ", element " << i;
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

TEST(LayerNorm, EveryRungAddsABiasAndDropsTheSameHalf) {
  constexpr int64_t kRows = 5;
  for (const int64_t width : {31, 64, 760, 1600}) {
    const int64_t n = kRows * width;
    std::vector<float> x = numbers(n, 7919);
    for (float& value : x) value += 3;  // so that what is kept is never near 0
    const std::vector<float> residual = numbers(n, 6101), x_bias = numbers(width, 11);
    const std::vector<float> weight = numbers(width, 5), bias = numbers(width, 3);
    const DeviceVector dx(x), dr(residual), dxb(x_bias), dw(weight), db(bias);
    std::vector<float> first;  // rung's sum
    for (const auto& rung : residual_layer_norm::rungs()) {
      const std::string what = rung.name + (" width=" + std::to_string(width));
      const DeviceVector y(n), total(n);
      residual_layer_norm::Args args{dx.data(),    dr.data(), dw.data(), db.data(), y.data(),
                                     total.data(), kRows,     width,     kEps,      DType::kFloat32};
      args.x_bias = dxb.data();
      args.threshold = 1 << 15;
      args.seed = 1234;
      rung.launch(args, nullptr);
      if (first.empty()) first = total.values();
      int64_t kept = 0;
      std::vector<double> sum(residual.begin(), residual.end());
      for (int64_t i = 0; i < n; ++i) {
        if (first[i] - residual[i] < 0.5f) continue;
        sum[i] += 2 * (double{x[i]} + x_bias[i % width]);
        ++kept;
      }
      EXPECT_NEAR(static_cast<double>(kept) / n, 0.5, 0.15) << what;
      expect_near(total, sum, what);
      expect_near(y, layer_norm_of(sum, weight, bias), what);
    }
  }
}

// Of each row.
struct MeanAndRstd {
  std::vector<double> mean, rstd;
};
MeanAndRstd statistics_of(const std::vector<double>& x, size_t width) {
  MeanAndRstd of;
  for (size_t row = 0; row < x.size(); row += width) {
    double mean = 0, variance = 0;
    for (size_t c = 0; c < width; ++c) mean += x[row + c] / static_cast<double>(width);
    for (size_t c = 0; c < width; ++c) {
      variance += (x[row + c] - mean) * (x[row + c] - mean) / static_cast<double>(width);
    }
    of.mean.push_back(mean);
    of.rstd.push_back(1 / std::sqrt(variance + kEps));
  }
  return of;
}

// Integers in the GPU's memory.
DeviceVector integers(const std::vector<int32_t>& values) {
  std::vector<float> words(values.size());
  std::memcpy(words.data(), values.data(), values.size() * sizeof(int32_t));
  return DeviceVector(words);
}

// q, k and v lie as GPT-2's do: [batch, position, head, column], so neighbouring rows of a head are H·D apart. The
// bounds of the keys that exist lie beside them: those of `a` are in the GPU's memory. lse: [batch, head, position].
std::vector<double> attention_of(const Attention& a, const std::vector<int32_t>& begin, const std::vector<int32_t>& end,
                                 std::vector<double>& lse) {
  const int64_t width = a.heads * a.head_dim;
  const auto at = [&](const TensorRef& x, int64_t b, int64_t h, int64_t s) {
    return static_cast<const float*>(x.data) + b * x.batch_stride + h * x.head_stride + s * x.seq_stride;
  };
  std::vector<double> out(a.batch * a.q_length * width);
  lse.assign(a.batch * a.heads * a.q_length, -std::numeric_limits<double>::infinity());
  for (int64_t i = 0; i < a.batch * a.q_length * a.heads; ++i) {
    const int64_t b = i / a.heads / a.q_length, row = i / a.heads % a.q_length, h = i % a.heads;
    const int64_t seen = a.causal ? std::min<int64_t>(row + 1 + a.k_length - a.q_length, end[b]) : end[b];
    if (seen <= begin[b]) continue;
    std::vector<double> weight(seen);
    double sum = 0;
    for (int64_t j = begin[b]; j < seen; ++j) {
      for (int64_t d = 0; d < a.head_dim; ++d) weight[j] += a.scale * at(a.q, b, h, row)[d] * at(a.k, b, h, j)[d];
      sum += weight[j] = std::exp(weight[j]);
    }
    lse[(b * a.heads + h) * a.q_length + row] = std::log(sum);
    for (int64_t j = begin[b]; j < seen; ++j) {
      for (int64_t d = 0; d < a.head_dim; ++d) out[i * a.head_dim + d] += weight[j] / sum * at(a.v, b, h, j)[d];
    }
  }
  return out;
}

// What the way back wants of an op with attention.
struct Wanted {
  Matrix attended;
  DeviceVector lse, mean, rstd;

  Wanted(const Attention& a, DType dtype)
      : attended(a.batch * a.q_length * a.heads * a.head_dim, dtype),
        lse(a.batch * a.heads * a.q_length),
        mean(a.batch * a.q_length),
        rstd(a.batch * a.q_length) {}

  template <class Args>
  void ask(Args& args) const {
    args.attention.lse = lse.data();
    args.attended = attended.data();
    args.mean = mean.data();
    args.rstd = rstd.data();
  }
};

void expect_statistics(const DeviceVector& got, const std::vector<double>& expected, double tolerance,
                       const std::string& what) {
  const std::vector<float> values = got.values();
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isinf(expected[i])) {
      ASSERT_EQ(values[i], expected[i]) << what << ", element " << i;
    } else {
      ASSERT_NEAR(values[i], expected[i], tolerance * (1 + std::abs(expected[i]))) << what << ", element " << i;
    }
  }
}

// By all rungs that take the dtype. padding: each batch lacks some of the first keys and some of the last, the second
// all of them.
void check_fused(int64_t batch, int64_t heads, int64_t q_length, int64_t k_length, int64_t dim, bool causal,
                 DType dtype = DType::kFloat32, bool padding = false) {
  const int64_t width = heads * dim, n = batch * q_length * width;
  const bool half = dtype == DType::kBFloat16;
  const auto some = [&](int64_t count, int step) { return half ? eighths(count, step) : numbers(count, step); };
  const std::vector<float> q = some(n, 7919), k = some(batch * k_length * width, 6101);
  const std::vector<float> v = some(batch * k_length * width, 5101), residual = some(n, 4099);
  std::vector<float> proj_weight = some(width * width, 7);
  for (float& number : proj_weight) number *= half ? 0.0625f : 1.0f / static_cast<float>(width);
  const std::vector<float> proj_bias = some(width, 5), weight = some(width, 5), bias = some(width, 3);
  const TensorRef hq{q.data(), q_length * width, dim, width}, hk{k.data(), k_length * width, dim, width};
  const TensorRef hv{v.data(), k_length * width, dim, width};
  Attention a{hq, hk, hv, batch, heads, q_length, k_length, dim, 0.3, causal};

  std::vector<int32_t> begin(batch, 0), end(batch, static_cast<int32_t>(k_length));
  for (int32_t b = 0; padding && b < batch; ++b) begin[b] = 3 * b + 1, end[b] -= b == 1 ? end[b] : 2 * b;
  std::vector<double> lse;
  const std::vector<double> attended = attention_of(a, begin, end, lse);
  std::vector<double> plain(attended), projected(n);
  for (int64_t i = 0; i < n; ++i) {
    plain[i] += residual[i];
    projected[i] = double{residual[i]} + proj_bias[i % width];
    for (int64_t c = 0; c < width; ++c)
      projected[i] += attended[i - i % width + c] * proj_weight[c * width + i % width];
  }

  const Matrix dq(q, dtype), dk(k, dtype), dv(v, dtype), dr(residual, dtype), dpw(proj_weight, dtype);
  const Matrix dpb(proj_bias, dtype), dw(weight, dtype), db(bias, dtype);
  a.q.data = dq.data();
  a.k.data = dk.data();
  a.v.data = dv.data();
  const DeviceVector from = integers(begin), to = integers(end);
  if (padding)
    a.key_begin = static_cast<const int32_t*>(from.data()), a.key_end = static_cast<const int32_t*>(to.data());
  const std::string what = " B=" + std::to_string(batch) + " H=" + std::to_string(heads) +
                           " Sq=" + std::to_string(q_length) + " Sk=" + std::to_string(k_length) +
                           " D=" + std::to_string(dim) + (causal ? " causal" : "") + (padding ? " padding" : "") +
                           (half ? " bfloat16" : "");
  const auto expect = [&](const Matrix& got, const std::vector<double>& expected, const std::string& of) {
    half ? expect_close(got, expected, 3e-2, of + what) : expect_near(got, expected, of + what);
  };
  const auto expect_wanted = [&](const Wanted& got, const std::vector<double>& sum, const std::string& of) {
    const MeanAndRstd statistics = statistics_of(sum, static_cast<size_t>(width));
    expect(got.attended, attended, of + " attended");
    expect_statistics(got.lse, lse, half ? 1e-4 : 2e-5, of + " lse" + what);
    expect_statistics(got.mean, statistics.mean, half ? 1e-2 : 2e-5, of + " mean" + what);
    expect_statistics(got.rstd, statistics.rstd, half ? 1e-2 : 2e-5, of + " rstd" + what);
  };
  for (const bool wanted : {false, true}) {
    for (const auto& rung : attention_residual_layer_norm::rungs()) {
      if (!half && on_tensor_cores(rung.name)) continue;
      const std::string name = std::string("attention_residual_layer_norm ") + rung.name;
      const Matrix y(n, dtype);
      const Wanted more(a, dtype);
      attention_residual_layer_norm::Args args{a, dr.data(), dw.data(), db.data(), y.data(), kEps, nullptr, dtype};
      if (wanted) more.ask(args);
      launch(rung, args);
      expect(y, layer_norm_of(plain, weight, bias), name);
      if (wanted) expect_wanted(more, plain, name);
    }
  }
  for (const auto& rung : attention_block::rungs()) {
    if (!half && on_tensor_cores(rung.name)) continue;
    for (const bool wanted : {false, true}) {
      if (half && wanted != causal) continue;  // under a race detector each launch takes seconds
      const std::string name = std::string("attention_block ") + rung.name;
      const Matrix y(n, dtype), sum(n, dtype);
      const Wanted more(a, dtype);
      attention_block::Args args{a,        dr.data(),  dpw.data(), dpb.data(), dw.data(), db.data(),
                                 y.data(), sum.data(), kEps,       nullptr,    dtype};
      if (wanted) more.ask(args);
      launch(rung, args);
      expect(sum, projected, name + " sum");
      expect(y, layer_norm_of(projected, weight, bias), name);
      if (wanted) expect_wanted(more, projected, name);
    }
  }
}

// Half of attention's weights and half of the projection: all rungs the same, with numbers from the launch or from
// memory.
void check_fused_dropout(DType dtype) {
  constexpr int64_t kBatch = 2, kHeads = 3, kRows = 37, kKeys = 70, kDim = 8, kWide = kHeads * kDim;
  constexpr int64_t kElements = kBatch * kRows * kWide;
  const bool half = dtype == DType::kBFloat16;
  const Matrix q(eighths(kElements, 7919), dtype), k(eighths(kBatch * kKeys * kWide, 6101), dtype);
  const Matrix v(eighths(kBatch * kKeys * kWide, 5101), dtype), residual(eighths(kElements, 4099), dtype);
  std::vector<float> rows = eighths(kWide * kWide, 7), bias = eighths(kWide, 5);
  for (float& number : rows) number *= 0.0625f;
  for (float& number : bias) number += 4;  // so that what is kept is never near 0
  const Matrix proj_weight(rows, dtype), proj_bias(bias, dtype), weight(eighths(kWide, 5), dtype);
  const std::array<int64_t, 2> numbers{1234, 8};
  std::vector<float> words(4);
  std::memcpy(words.data(), numbers.data(), sizeof numbers);
  const DeviceVector rng_state(words);
  Attention a{{q.data(), kRows * kWide, kDim, kWide},
              {k.data(), kKeys * kWide, kDim, kWide},
              {v.data(), kKeys * kWide, kDim, kWide},
              kBatch,
              kHeads,
              kRows,
              kKeys,
              kDim,
              0.3,
              true};
  std::vector<float> first_attended, first_sum;
  for (const bool in_memory : {false, true}) {
    for (const auto& rung : attention_block::rungs()) {
      const bool drops_no_weights = on_tensor_cores(rung.name);
      if (drops_no_weights && !half) continue;
      const std::string what =
          rung.name + std::string(in_memory ? ", state in memory" : "") + (half ? " bfloat16" : "");
      const Matrix y(kElements, dtype), sum(kElements, dtype);
      const Wanted more(a, dtype);
      attention_block::Args args{a,
                                 residual.data(),
                                 proj_weight.data(),
                                 proj_bias.data(),
                                 weight.data(),
                                 weight.data(),
                                 y.data(),
                                 sum.data(),
                                 kEps,
                                 nullptr,
                                 dtype};
      more.ask(args);
      args.threshold = args.attention.threshold = 1 << 15;
      if (in_memory) {
        args.rng_state = args.attention.rng_state = static_cast<const int64_t*>(rng_state.data());
      } else {
        args.seed = args.attention.seed = static_cast<uint64_t>(numbers[0]);
        args.offset = args.attention.offset = static_cast<uint64_t>(numbers[1]);
      }
      if (drops_no_weights) {
        EXPECT_NE(rung.can_implement(args), "");
        args.attention.threshold = 0;
      }
      launch(rung, args);
      const std::vector<float> kept = sum.values(), stays = residual.values();
      if (first_sum.empty()) first_sum = kept, first_attended = more.attended.values();
      int64_t dropped = 0;
      for (int64_t i = 0; i < kElements; ++i) {
        ASSERT_EQ(kept[i] == stays[i], first_sum[i] == stays[i]) << what << ", element " << i;
        dropped += kept[i] == stays[i];
      }
      EXPECT_NEAR(static_cast<double>(dropped) / kElements, 0.5, 0.1) << what;
      if (drops_no_weights) continue;
      expect_close(more.attended, {first_attended.begin(), first_attended.end()}, half ? 3e-2 : 2e-5, what);
      expect_close(sum, {first_sum.begin(), first_sum.end()}, half ? 5e-2 : 2e-5, what);
    }
  }
}

TEST(LayerNormBackward, EveryRungGivesAllThreeGradients) {
  constexpr int64_t kRows = 40;  // several for each group of v3
  for (const int64_t width : {1, 31, 64, 760, 1032}) {
    const std::vector<float> x = numbers(kRows * width, 7919), grad = numbers(kRows * width, 6101);
    const std::vector<float> more = numbers(kRows * width, 4099), weight = numbers(width, 5);
    std::vector<float> mean(kRows), rstd(kRows);
    std::vector<double> grad_x(kRows * width), grad_weight(width), grad_bias(width);
    for (int64_t r = 0; r < kRows; ++r) {
      const float *row = x.data() + r * width, *g = grad.data() + r * width;
      double average = 0, variance = 0, sum = 0, along = 0;
      for (int64_t c = 0; c < width; ++c) average += row[c] / double(width);
      for (int64_t c = 0; c < width; ++c) variance += (row[c] - average) * (row[c] - average) / double(width);
      const double scale = 1 / std::sqrt(variance + kEps);
      mean[r] = static_cast<float>(average);
      rstd[r] = static_cast<float>(scale);
      for (int64_t c = 0; c < width; ++c) {
        const double x_hat = (row[c] - average) * scale;
        sum += double{g[c]} * weight[c] / double(width);
        along += double{g[c]} * weight[c] * x_hat / double(width);
        grad_weight[c] += g[c] * x_hat;
        grad_bias[c] += g[c];
      }
      for (int64_t c = 0; c < width; ++c) {
        const double x_hat = (row[c] - average) * scale;
        grad_x[r * width + c] = scale * (double{g[c]} * weight[c] - sum - x_hat * along) + more[r * width + c];
      }
    }
    const DeviceVector dx(x), dg(grad), dm(more), dw(weight), dmean(mean), drstd(rstd);
    for (const auto& rung : layer_norm_backward::rungs()) {
      const DeviceVector to_x(kRows * width), to_weight(width), to_bias(width);
      layer_norm_backward::Args args{dg.data(),      dx.data(), dw.data(),   dmean.data(),
                                     drstd.data(),   dm.data(), to_x.data(), to_weight.data(),
                                     to_bias.data(), kRows,     width,       DType::kFloat32};
      if (rung.name == std::string("v4_bulk") && width % 4 != 0) {  // 1032 is a group's
        EXPECT_NE(rung.can_implement(args), "");
        continue;
      }
      launch(rung, args);
      const std::string what = rung.name + (" width=" + std::to_string(width));
      expect_near(to_x, grad_x, "grad_x " + what);
      expect_near(to_weight, grad_weight, "grad_weight " + what);
      expect_near(to_bias, grad_bias, "grad_bias " + what);
    }
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
    check_fused(3, 2, 33, 40, 24, causal, DType::kFloat32, true);
  }
}

TEST(Fused, EveryRungIsThatInBFloat16) {
  for (const bool causal : {false, true}) {
    check_fused(1, 2, 33, 31, 40, causal, DType::kBFloat16);
    check_fused(1, 17, 66, 70, 8, causal, DType::kBFloat16);  // two tiles of columns
    check_fused(3, 2, 70, 140, 16, causal, DType::kBFloat16, true);
  }
  check_fused(13, 9, 1, 3, 64, true, DType::kBFloat16);  // many rows: v5's blocks project in rounds
}

// Bands of three groups of rows, and one of them alone. They take longest, so they are two tests, for two processes.
TEST(Fused, BandsOfRows) { check_fused(5, 2, 130, 130, 64, false, DType::kBFloat16); }
TEST(Fused, BandsOfRowsCausal) { check_fused(5, 2, 130, 130, 64, true, DType::kBFloat16); }

TEST(Fused, EveryRungDropsTheSame) {
  check_fused_dropout(DType::kFloat32);
  check_fused_dropout(DType::kBFloat16);
}

}  // namespace
}  // namespace kf::KF_BACKEND
