#include "rungs.h"

namespace kf::KF_BACKEND::linear {
namespace {

// For grids with the columns' tiles along x and the rows' along y.
template <int kRows, int kColumns>
std::string can_implement_grid(const Args& a) {
  constexpr int64_t kMostRows = int64_t{kRows} * 65535, kMostColumns = int64_t{kColumns} * INT32_MAX;
  if (a.rows > kMostRows) return "takes rows ≤ " + std::to_string(kMostRows) + ", got " + std::to_string(a.rows);
  if (a.width <= kMostColumns) return "";
  return "takes width ≤ " + std::to_string(kMostColumns) + ", got " + std::to_string(a.width);
}

constexpr Rung<Args> kRungs[] = {
    {"v1_naive", v1_naive, can_implement_grid<8, 32>},
    {"v2_tiled", v2_tiled, can_implement_grid<32, 32>},
    {"v3_registers", v3_registers, can_implement_grid<128, 128>},
    {"v4_vector", v4_vector, v4_vector_can_implement},
    {"v5_mma", v5_mma, v5_mma_can_implement},
    {"v6_wgmma", v6_wgmma, v6_wgmma_can_implement},
    {"v7_persistent", v7_persistent, v7_persistent_can_implement},
    {"v8_cluster", v8_cluster, v8_cluster_can_implement},
    {"v9_split", v9_split, v9_split_can_implement},
    {"v10_rows", v10_rows, v10_rows_can_implement},
    {"v11_gemv", v11_gemv, v11_gemv_can_implement},
    {"v12_cublaslt", v12_cublaslt, v12_cublaslt_can_implement, v12_cublaslt_scratch_bytes,
     "sums of parts, at some sizes"},
};

}  // namespace

std::string v4_vector_can_implement(const Args& a) { return can_implement_grid<128, 128>(a); }

Rungs<Args> rungs() { return kRungs; }

}  // namespace kf::KF_BACKEND::linear
