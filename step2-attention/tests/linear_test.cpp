// Every rung of linear, in float and in bfloat16, against a plain loop in double; without torch, as kernels_test.cpp.
#include <array>
#include <set>
#include <string>
#include <vector>

#include "kernels/linear/rungs.h"
#include "layer_test.h"

namespace kf::KF_BACKEND {
namespace {

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

}  // namespace
}  // namespace kf::KF_BACKEND
