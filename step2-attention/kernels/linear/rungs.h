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

// Whether v13_dependent, and what step 3 makes of it, is for these: 65 to 128 rows, and all blocks, one for each 64
// columns and 384 of the depth, resident at once on 128 multiprocessors.
inline bool few_rows_fit(const Args& a) {
  const int64_t blocks = (a.width + 63) / 64 * ((a.depth + 383) / 384);
  return a.rows > 64 && a.rows <= 128 && size_of(a.dtype) == 2 && blocks <= 128;
}

// What `auto` takes, read off results as far as their cases go: h200.json's, and for few rows h100-80gb-hbm3.json's. Of
// few outputs the library can share the depth out; but with a vocabulary's weight, [width, depth], it is slow where the
// width is no multiple of 8. Of a prompt's products v9 and v7 are level with it, and let the dependent launches behind
// them begin: the graph of 1024 tokens of GPT-2 124M took 674 µs with them, 695 with the library, on one H200.
inline const char* automatic(const Args& a) {
  if (a.dtype == DType::kFloat64) return "v12_cublaslt";
  if (a.rows <= 4 && a.weight_transposed) return "v11_gemv";
  if (a.dtype == DType::kFloat32 || a.x_transposed) return "v12_cublaslt";
  if (a.rows <= 64 && a.depth >= 2 * a.width && a.width <= 960) return "v10_rows";  // 15 tiles, clusters of up to 8
  if (a.rows <= 64 && a.width >= 2 * a.depth && a.width <= 8192) return "v9_split";
  if (a.width <= 1024 && few_rows_fit(a)) return "v13_dependent";
  const bool of_a_prompt = a.rows >= 512 && a.rows < 2048 && a.depth <= 1024 && !a.weight_transposed;
  if (of_a_prompt && a.width >= 512 && a.width <= 2560) return a.width <= 1024 ? "v9_split" : "v7_persistent";
  if (a.rows <= 64 || a.rows * a.width < 3 << 21) {
    return a.weight_transposed && a.width % 8 != 0 ? "v7_persistent" : "v12_cublaslt";
  }
  return a.rows >= 4096 && a.width >= 2048 ? "v8_cluster" : "v7_persistent";
}

}  // namespace kf::linear

#define KF_OP linear
#define KF_RUNGS(RUNG)                                                             \
  RUNG(v1_naive, can_implement, no_scratch)                                        \
  RUNG(v2_tiled, can_implement, no_scratch)                                        \
  RUNG(v3_registers, can_implement, no_scratch)                                    \
  RUNG(v4_vector, can_implement, no_scratch)                                       \
  RUNG(v5_mma, can_implement, no_scratch)                                          \
  RUNG(v6_wgmma, can_implement, no_scratch)                                        \
  RUNG(v7_persistent, can_implement, no_scratch)                                   \
  RUNG(v8_cluster, can_implement, no_scratch)                                      \
  RUNG(v9_split, can_implement, no_scratch)                                        \
  RUNG(v10_rows, can_implement, no_scratch)                                        \
  RUNG(v11_gemv, can_implement, no_scratch)                                        \
  RUNG(v12_cublaslt, can_implement, scratch_bytes, "sums of parts, at some sizes") \
  RUNG(v13_dependent, can_implement, no_scratch)
#include <kf/rung_list.h>
