// Every rung of the ops that fuse something to a matrix product, in float and in bfloat16, against a plain loop in
// double.
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "kernels/gelu_linear/rungs.h"
#include "kernels/layer_norm_linear/rungs.h"
#include "kernels/linear_bias_dropout_residual/rungs.h"
#include "kernels/linear_gelu/rungs.h"
#include "kernels/mlp/rungs.h"
#include "kernels_test.h"

namespace kf::KF_BACKEND {
namespace {

double gelu(double x) { return x / 2 * (1 + std::erf(x / std::sqrt(2.0))); }

TEST(Epilogues, EveryRung) {
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

TEST(Epilogues, EveryRungOfBothLayersOfAnMlp) {
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
        if (dtype == DType::kFloat32 || rung.name == std::string("pieces")) continue;  // these take any address
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
