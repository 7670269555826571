#include "rungs.h"

namespace kf::KF_BACKEND::linear {
namespace {

// For grids with the columns' tiles along x and the rows' along y.
template <int kRows, int kColumns>
std::string grid_supports(const Args& a) {
  constexpr int64_t kMostRows = int64_t{kRows} * 65535, kMostColumns = int64_t{kColumns} * INT32_MAX;
  if (a.rows > kMostRows) return "takes rows ≤ " + std::to_string(kMostRows) + ", got " + std::to_string(a.rows);
  if (a.width <= kMostColumns) return "";
  return "takes width ≤ " + std::to_string(kMostColumns) + ", got " + std::to_string(a.width);
}

constexpr Rung<Args> kRungs[] = {
    {"v1_naive", v1_naive, grid_supports<8, 32>},
    {"v2_tiled", v2_tiled, grid_supports<32, 32>},
    {"v3_registers", v3_registers, grid_supports<128, 128>},
    {"v4_vector", v4_vector, v4_vector_supports},
    {"v5_mma", v5_mma, v5_mma_supports},
    {"v6_wgmma", v6_wgmma, v6_wgmma_supports},
    {"v7_persistent", v7_persistent, v7_persistent_supports},
    {"v8_cluster", v8_cluster, v8_cluster_supports},
    {"v9_split", v9_split, v9_split_supports},
    {"v10_rows", v10_rows, v10_rows_supports},
    {"v11_gemv", v11_gemv, v11_gemv_supports},
    {"v12_cublaslt", v12_cublaslt, v12_cublaslt_supports, v12_cublaslt_scratch_bytes, "sums of parts, at some sizes"},
};

}  // namespace

std::string v4_vector_supports(const Args& a) { return grid_supports<128, 128>(a); }

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::linear
