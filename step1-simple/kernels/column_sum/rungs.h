// column_sum: sum[c] = x[0, c] + x[1, c] + …, x of shape [rows, width], contiguous: the gradient of a bias.
#pragma once

#include <kf/rung.h>

namespace kf::column_sum {

struct Args {
  const void* x;
  void* sum;
  int64_t rows;
  int64_t width;
  DType dtype;
  void* scratch = nullptr;  // partial sums of blocks of rows
};

}  // namespace kf::column_sum

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::column_sum {
using kf::column_sum::Args;
void v1_serial(const Args& args, void* stream);
void v2_two_stage(const Args& args, void* stream);
void v3_vector(const Args& args, void* stream);
}  // namespace kf::KF_BACKEND::column_sum
#endif

namespace kf::emulated::column_sum {
Rungs<kf::column_sum::Args> rungs();
}
namespace kf::gpu::column_sum {
#ifdef KF_WITH_CUDA
Rungs<kf::column_sum::Args> rungs();
#else
inline Rungs<kf::column_sum::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::column_sum
