// softmax: y[r, c] = exp(scale·x[r, c]) / Σ_j exp(scale·x[r, j]), x of shape [rows, width], contiguous.
//
// Under the causal mask x is a batch of squares of scores, `q_length` rows each: row i of a square sees the columns
// j ≤ i + width − q_length. The others are 0, and what they hold is not used. A row that sees nothing is 0.
//
// Every rung subtracts the row's maximum first: exp(100) is already too much for float32, and the quotient is the same.
// As in PyTorch, a row that sees nothing but −inf gives NaN: it has no maximum that could be subtracted.
#pragma once

#include <kf/rung.h>

namespace kf::softmax {

struct Args {
  const void* x;
  void* y;
  int64_t rows;
  int64_t width;
  int64_t q_length;  // rows of a square of scores; asked under `causal` only
  double scale;
  bool causal;
  DType dtype;
};

// How many rows a square has that the causal mask is laid over; 0 where there is none.
inline int64_t mask_of(const Args& a) { return a.causal ? a.q_length : 0; }

}  // namespace kf::softmax

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::softmax {
using kf::softmax::Args;
void v1_naive(const Args& args, void* stream);
void v2_block(const Args& args, void* stream);
void v3_online(const Args& args, void* stream);
void v4_registers(const Args& args, void* stream);
void v5_cluster(const Args& args, void* stream);
void v6_cluster_registers(const Args& args, void* stream);

std::string v4_registers_can_implement(const Args& args);
std::string v5_cluster_can_implement(const Args& args);
std::string v6_cluster_registers_can_implement(const Args& args);
}  // namespace kf::KF_BACKEND::softmax
#endif

namespace kf::emulated::softmax {
Rungs<kf::softmax::Args> rungs();
}
namespace kf::gpu::softmax {
#ifdef KF_WITH_CUDA
Rungs<kf::softmax::Args> rungs();
#else
inline Rungs<kf::softmax::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::softmax
