// linear: y = x · weight + bias. y is [rows, width], the sum goes over `depth`. All are contiguous; x is [rows, depth]
// or, transposed, [depth, rows]; weight is [depth, width], as GPT-2 stores it, or, transposed, [width, depth].
// The backward pass needs each of the three layouts: grad · weightᵀ, xᵀ · grad.
#pragma once

#include <kf/rung.h>

namespace kf::linear {

struct Args {
  const void* x;
  const void* weight;
  const void* bias;  // [width], or null
  void* y;
  int64_t rows;
  int64_t depth;
  int64_t width;
  bool x_transposed;
  bool weight_transposed;
  bool tf32;  // float32 may be rounded to TF32 before it is multiplied
  DType dtype;
  void* scratch = nullptr;
};

// What `auto` takes, read off results as far as their cases go: h200.json's, and for few rows h100-80gb-hbm3.json's. Of
// few outputs the library can share the depth out; but with a vocabulary's weight, [width, depth], it is slow where the
// width is no multiple of 8.
inline const char* automatic(const Args& a) {
  if (a.dtype == DType::kFloat64) return "v12_cublaslt";
  if (a.rows <= 4 && a.weight_transposed) return "v11_gemv";
  if (a.dtype == DType::kFloat32 || a.x_transposed) return "v12_cublaslt";
  if (a.rows <= 64 && a.depth >= 2 * a.width && a.width <= 960) return "v10_rows";  // 15 tiles, clusters of up to 8
  if (a.rows <= 64 && a.width >= 2 * a.depth && a.width <= 8192) return "v9_split";
  if (a.rows <= 64 || a.rows * a.width < 3 << 21) {
    return a.weight_transposed && a.width % 8 != 0 ? "v7_persistent" : "v12_cublaslt";
  }
  return a.rows >= 4096 && a.width >= 2048 ? "v8_cluster" : "v7_persistent";
}

}  // namespace kf::linear

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::linear {
using kf::linear::Args;
void v1_naive(const Args& args, void* stream);
void v2_tiled(const Args& args, void* stream);
void v3_registers(const Args& args, void* stream);
void v4_vector(const Args& args, void* stream);
std::string v4_vector_can_implement(const Args& args);
void v5_mma(const Args& args, void* stream);
std::string v5_mma_can_implement(const Args& args);
void v6_wgmma(const Args& args, void* stream);
std::string v6_wgmma_can_implement(const Args& args);
void v7_persistent(const Args& args, void* stream);
std::string v7_persistent_can_implement(const Args& args);
void v8_cluster(const Args& args, void* stream);
std::string v8_cluster_can_implement(const Args& args);
void v9_split(const Args& args, void* stream);
std::string v9_split_can_implement(const Args& args);
void v10_rows(const Args& args, void* stream);
std::string v10_rows_can_implement(const Args& args);
void v11_gemv(const Args& args, void* stream);
std::string v11_gemv_can_implement(const Args& args);
void v12_cublaslt(const Args& args, void* stream);
std::string v12_cublaslt_can_implement(const Args& args);
int64_t v12_cublaslt_scratch_bytes(const Args& args);
}  // namespace kf::KF_BACKEND::linear
#endif

namespace kf::emulated::linear {
Rungs<kf::linear::Args> rungs();
}
namespace kf::gpu::linear {
#ifdef KF_WITH_CUDA
Rungs<kf::linear::Args> rungs();
#else
inline Rungs<kf::linear::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::linear
