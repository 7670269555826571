// embedding: y[b, s, c] = token[ids[b, s], c] + position_weight[position + s, c], everything contiguous.
#pragma once

#include <kf/rung.h>

namespace kf::embedding {

struct Args {
  const void* ids;  // [batch, length], int64 or int32
  const void* token;
  const void* position_weight;
  void* y;
  int64_t batch;
  int64_t length;
  int64_t width;
  int64_t vocab;
  int64_t position;  // of the first id: how many tokens came before it
  bool ids_64;
  DType dtype;
};

}  // namespace kf::embedding

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::embedding {
using kf::embedding::Args;
void v1_naive(const Args& args, void* stream);
void v2_vector(const Args& args, void* stream);
}  // namespace kf::KF_BACKEND::embedding
#endif

namespace kf::emulated::embedding {
Rungs<kf::embedding::Args> rungs();
}
namespace kf::gpu::embedding {
#ifdef KF_WITH_CUDA
Rungs<kf::embedding::Args> rungs();
#else
inline Rungs<kf::embedding::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::embedding
