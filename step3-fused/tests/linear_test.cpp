// Every rung of the ops around matrix products, in float and in bfloat16, against a plain loop in double.
#include <array>
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "kernels/gelu_linear/rungs.h"
#include "kernels/layer_norm_linear/rungs.h"
#include "kernels/linear/rungs.h"
#include "kernels/linear_bias_dropout_residual/rungs.h"
#include "kernels/linear_gelu/rungs.h"
#include "kernels/mlp/rungs.h"
#include "kernels_test.h"

namespace kf::KF_BACKEND {
namespace {

struct Layer {
  int64_t rows, depth, width;
  bool x_transposed, weight_transposed;
  std::vector<float> x, weight, bias;

  Layer(int64_t rows, int64_t depth, int64_t width, bool x_transposed, bool weight_transposed)
      : rows(rows),
        depth(depth),
        width(width),
        x_transposed(x_transposed),
        weight_transposed(weight_transposed),
        x(eighths(rows * depth, 7919)),
        weight(eighths(depth * width, 6101)),
        bias(eighths(width, 5)) {}

  // change(x) · weight + bias
  std::vector<double> product(const std::function<double(int64_t row, int64_t k, double x)>& change) const {
    std::vector<double> y(rows * width);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < depth; ++k) {
        const double value = change(r, k, x[x_transposed ? k * rows + r : r * depth + k]);
        for (int64_t c = 0; c < width; ++c)
          y[r * width + c] += value * weight[weight_transposed ? c * depth + k : k * width + c];
      }
    }
    for (int64_t i = 0; i < rows * width; ++i) y[i] += bias[i % width];
    return y;
  }
  std::vector<double> product() const {
    return product([](int64_t, int64_t, double value) { return value; });
  }

  std::string text() const {
    return " rows=" + std::to_string(rows) + " depth=" + std::to_string(depth) + " width=" + std::to_string(width) +
           (x_transposed ? " x transposed" : "") + (weight_transposed ? " weight transposed" : "");
  }

  // The sizes of a rung's arguments.
  template <class Args>
  Args args(DType dtype) const {
    Args a{};
    a.rows = rows;
    a.depth = depth;
    a.width = width;
    a.weight_transposed = weight_transposed;
    a.dtype = dtype;
    return a;
  }
};

double gelu(double x) { return x / 2 * (1 + std::erf(x / std::sqrt(2.0))); }

constexpr double kExact = 2e-5, kRounded = 0.04;  // the latter of sums of 320 products, some of rounded factors

double tolerance_of(DType dtype) { return dtype == DType::kFloat32 ? kExact : kRounded; }

// Runs a rung of linear on the layer and compares; false if it cannot do this.
bool multiplies(const Rung<linear::Args>& rung, const Layer& layer, DType dtype, const std::vector<double>& expected) {
  const Matrix x(layer.x, dtype), weight(layer.weight, dtype), bias(layer.bias, dtype);
  const Matrix y(layer.rows * layer.width, dtype);
  auto args = layer.args<linear::Args>(dtype);
  args.x = x.data();
  args.weight = weight.data();
  args.bias = bias.data();
  args.y = y.data();
  args.x_transposed = layer.x_transposed;
  if (!rung.can_implement(args).empty()) return false;
  launch(rung, args);
  expect_close(y, expected, tolerance_of(dtype), rung.name + layer.text());
  return true;
}

TEST(Linear, EveryRungMultipliesMatricesHoweverTheyLie) {
  std::set<std::string> ran;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int way : {0, 1, 2, 3}) {
      for (const auto& [rows, depth, width] : {std::array<int64_t, 3>{2, 24, 40}, {136, 320, 72}}) {
        const Layer layer(rows, depth, width, way % 2 == 1, way / 2 == 1);
        const std::vector<double> expected = layer.product();
        for (const auto& rung : linear::rungs()) {
          if (multiplies(rung, layer, dtype, expected)) ran.insert(rung.name);
        }
      }
    }
  }
  for (const auto& rung : linear::rungs()) {
    const bool library = rung.name == std::string("v12_cublaslt");  // which needs a GPU
    if (compute_capability() == 90 && !library) {
      EXPECT_EQ(ran.count(rung.name), 1) << rung.name;
    }
  }
}

// Tiles of 64, 128, 192 and 256 columns, where there are 16 multiprocessors. No place is used twice, so the race
// detector sees who overwrites one that the other warpgroup may still read.
TEST(Linear, TilesWhoseDepthTwoWarpgroupsShareAtEachWidth) {
  for (const auto& rung : linear::rungs()) {
    if (rung.name != std::string("v9_split")) continue;
    for (const int way : {0, 1, 2}) {
      for (const auto& [rows, depth, width] :
           {std::array<int64_t, 3>{72, 328, 200}, {56, 328, 1096}, {72, 264, 1096}, {72, 200, 1576}}) {
        const Layer layer(rows, depth, width, way == 1, way == 2);
        EXPECT_EQ(multiplies(rung, layer, DType::kBFloat16, layer.product()), compute_capability() == 90);
      }
    }
  }
}

TEST(Linear, EveryRungOfWhatIsFusedToItsEpilogue) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool transposed : {false, true}) {
      const Layer layer(136, 72, 200, false, transposed);
      const int64_t rows = layer.rows, depth = layer.depth, width = layer.width;
      const std::vector<float> more = eighths(rows * width, 4099), ones(depth, 1.0f), zeros(depth, 0.0f);
      const Matrix x(layer.x, dtype), weight(layer.weight, dtype), bias(layer.bias, dtype), residual(more, dtype);
      const Matrix norm_weight(ones, dtype), norm_bias(zeros, dtype);
      const std::vector<double> product = layer.product();
      const double tolerance = tolerance_of(dtype);
      const auto give = [&](auto& args, const Matrix& y) {
        args.x = x.data();
        args.weight = weight.data();
        args.bias = bias.data();
        args.y = y.data();
      };

      std::vector<double> expected(product);
      for (double& value : expected) value = gelu(value);
      for (const auto& rung : linear_gelu::rungs()) {
        const Matrix y(rows * width, dtype), kept(rows * width, dtype);
        auto args = layer.args<linear_gelu::Args>(dtype);
        give(args, y);
        args.preactivation = kept.data();
        if (!rung.can_implement(args).empty()) continue;
        launch(rung, args);
        expect_close(y, expected, tolerance, "linear_gelu " + (rung.name + layer.text()));
        expect_close(kept, product, tolerance, "what linear_gelu keeps, " + (rung.name + layer.text()));
      }

      for (size_t i = 0; i < expected.size(); ++i) expected[i] = product[i] + more[i];
      for (const auto& rung : linear_bias_dropout_residual::rungs()) {
        const Matrix y(rows * width, dtype);
        auto args = layer.args<linear_bias_dropout_residual::Args>(dtype);
        give(args, y);
        args.residual = residual.data();  // the threshold is 0: nothing is dropped
        if (!rung.can_implement(args).empty()) continue;
        launch(rung, args);
        expect_close(y, expected, tolerance, "linear_bias_dropout_residual " + (rung.name + layer.text()));
      }

      expected = layer.product([](int64_t, int64_t, double value) { return gelu(value); });
      for (const auto& rung : gelu_linear::rungs()) {
        const Matrix y(rows * width, dtype);
        auto args = layer.args<gelu_linear::Args>(dtype);
        give(args, y);
        if (!rung.can_implement(args).empty()) continue;
        launch(rung, args);
        expect_close(y, expected, tolerance, "gelu_linear " + (rung.name + layer.text()));
      }

      const std::vector<double> normalised =
          layer_norm_of(std::vector<double>(layer.x.begin(), layer.x.end()), ones, zeros);
      expected = layer.product([&](int64_t row, int64_t k, double) { return normalised[row * depth + k]; });
      for (const auto& rung : layer_norm_linear::rungs()) {
        const Matrix y(rows * width, dtype);
        const DeviceVector mean(rows), rstd(rows);
        auto args = layer.args<layer_norm_linear::Args>(dtype);
        give(args, y);
        args.norm_weight = norm_weight.data();
        args.norm_bias = norm_bias.data();
        args.mean = mean.data();
        args.rstd = rstd.data();
        args.eps = kEps;
        if (!rung.can_implement(args).empty()) continue;
        launch(rung, args);
        expect_close(y, expected, tolerance, "layer_norm_linear " + (rung.name + layer.text()));
      }
    }
  }
}

TEST(Linear, EveryRungOfBothLayersOfAnMlp) {
  std::set<std::string> ran;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t rows : {10, 300}) {  // three tiles of 128 rows
      Layer first(rows, 72, 264, false, false), second(rows, 264, 72, false, false);
      for (float& weight : first.weight) weight /= 8;
      for (float& weight : second.weight) weight /= 8;
      const std::vector<float> more = eighths(rows * 72, 4099);
      const Matrix x(first.x, dtype), weight_1(first.weight, dtype), bias_1(first.bias, dtype);
      const Matrix weight_2(second.weight, dtype), bias_2(second.bias, dtype), residual(more, dtype);
      const std::vector<double> product = first.product();
      std::vector<double> expected =
          second.product([&](int64_t row, int64_t k, double) { return gelu(product[row * second.depth + k]); });
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += more[i];
      for (const auto& rung : mlp::rungs()) {
        const Matrix y(rows * 72, dtype), kept(rows * 264, dtype);
        mlp::Args args{};
        args.x = x.data();
        args.weight_1 = weight_1.data();
        args.bias_1 = bias_1.data();
        args.weight_2 = weight_2.data();
        args.bias_2 = bias_2.data();
        args.residual = residual.data();
        args.y = y.data();
        args.preactivation = kept.data();
        args.rows = rows;
        args.width = 72;
        args.inner = 264;
        args.dtype = dtype;
        if (!rung.can_implement(args).empty()) continue;
        launch(rung, args);
        expect_close(y, expected, tolerance_of(dtype), "mlp " + (rung.name + first.text()));
        expect_close(kept, product, tolerance_of(dtype), "what mlp keeps, " + (rung.name + first.text()));
        ran.insert(rung.name);
        if (dtype == DType::kFloat32 || rung.name == std::string("v1_separate") ||
            rung.name == std::string("v4_best")) {
          continue;  // these take any address
        }
        args.weight_2 = static_cast<char*>(weight_2.data()) + 2;
        EXPECT_NE(rung.can_implement(args), "") << rung.name;
      }
    }
  }
  if (compute_capability() == 90) {
    EXPECT_EQ(static_cast<int>(ran.size()), mlp::rungs().count);
  }
}

}  // namespace
}  // namespace kf::KF_BACKEND
