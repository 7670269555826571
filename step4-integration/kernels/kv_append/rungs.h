// kv_append: k_cache[b, h, position + s, d] = k[b, h, s, d], and the same for v.
#pragma once

#include <kf/rung.h>

namespace kf::kv_append {

// Distances in elements between neighbours of a [batch, head, token, head_dim] tensor; along head_dim it is 1.
struct Strides {
  int64_t batch;
  int64_t head;
  int64_t seq;
};

struct Args {
  const void* k;  // [batch, heads, length, head_dim], usually a view into GPT-2's packed q, k, v
  const void* v;
  void* k_cache;  // [batch, heads, more than length, head_dim]
  void* v_cache;
  Strides k_strides;
  Strides v_strides;
  Strides k_cache_strides;
  Strides v_cache_strides;
  int64_t batch;
  int64_t heads;
  int64_t length;
  int64_t head_dim;
  int64_t position;  // the first token to write
  DType dtype;
};

}  // namespace kf::kv_append

// The build compiles kernels and table twice, with KF_BACKEND as gpu and as emulated. Host files see only the tables.
#ifdef KF_BACKEND
namespace kf::KF_BACKEND::kv_append {
using kf::kv_append::Args;
using kf::kv_append::Strides;
void v1_naive(const Args& args, void* stream);
void v2_vector(const Args& args, void* stream);
}  // namespace kf::KF_BACKEND::kv_append
#endif

namespace kf::emulated::kv_append {
Rungs<kf::kv_append::Args> rungs();
}
namespace kf::gpu::kv_append {
#ifdef KF_WITH_CUDA
Rungs<kf::kv_append::Args> rungs();
#else
inline Rungs<kf::kv_append::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::kv_append
