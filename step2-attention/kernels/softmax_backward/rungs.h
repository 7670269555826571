// softmax_backward: grad_x[r, c] = scale·y[r, c]·(grad[r, c] − Σ_j y[r, j]·grad[r, j]), all of shape [rows, width],
// contiguous; y is what softmax returned.
//
// Under the causal mask they are a batch of squares, `q_length` rows each: row i of a square sees the columns
// j ≤ i + width − q_length. The others are 0, and what grad and y hold there is not used.
#pragma once

#include <kf/rung.h>

namespace kf::softmax_backward {

struct Args {
  const void* grad;
  const void* y;
  void* grad_x;
  int64_t rows;
  int64_t width;
  int64_t q_length;  // rows of a square of scores; asked under `causal` only
  double scale;
  bool causal;
  DType dtype;
};

// How many rows a square has that the causal mask is laid over; 0 where there is none.
inline int64_t mask_of(const Args& a) { return a.causal ? a.q_length : 0; }

}  // namespace kf::softmax_backward

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::softmax_backward {
using kf::softmax_backward::Args;
void v1_naive(const Args& args, void* stream);
void v2_block(const Args& args, void* stream);
void v3_registers(const Args& args, void* stream);
void v4_cluster(const Args& args, void* stream);

std::string v3_registers_can_implement(const Args& args);
std::string v4_cluster_can_implement(const Args& args);
}  // namespace kf::KF_BACKEND::softmax_backward
#endif

namespace kf::emulated::softmax_backward {
Rungs<kf::softmax_backward::Args> rungs();
}
namespace kf::gpu::softmax_backward {
#ifdef KF_WITH_CUDA
Rungs<kf::softmax_backward::Args> rungs();
#else
inline Rungs<kf::softmax_backward::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::softmax_backward
