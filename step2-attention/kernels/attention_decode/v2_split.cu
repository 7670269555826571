// attention_decode v2_split: the keys are split over blocks
//
// Idea      What one block does for all keys of a head, many blocks do for some of them each, so that all
//           multiprocessors ask memory at once (Flash-Decoding, https://pytorch.org/blog/flash-decoding). Each leaves
//           its part in global memory and counts itself; the block that comes last puts the parts together, in the
//           order of the splits and not of their coming.
// Since v1  The splits. A lane loads 16 bytes, so a few lanes share a key and a warp takes several at once (four of D
//           64 in half types); and it loads four such sets, K and V, before it computes with the first.
// Launch    grid B·H·Sq·splits, block 128; splits: as many as give 4 blocks a multiprocessor, with room for 64 keys
//           each, up to 64. Before it, a memset for the counters
// Moves     (2·B·Hkv·Sk + 2·B·H·Sq)·D·sizeof(T) + 4·B·H·Sq bytes, K and V again for each further query and head that
//           share them, mostly from a cache; parts: 2·splits·B·H·Sq·(D + 2)·4; FLOPs and exponentials as v1
// Limits    float32, float16, bfloat16; rows of whole vectors of 16 bytes, at most 32 of them; no block_table;
//           B·H·Sq·64 ≤ 2³¹−1. Queries and heads that share keys read them anew
#include <step1/vector.h>
#include <step2/attention_decode/parts.h>

#include "rungs.h"

namespace kf::KF_BACKEND::attention_decode {
namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 4;  // keys that a lane has asked for before it computes
constexpr int64_t kLeast = 64;

__host__ __device__ int64_t rows_of(const Args& a) { return a.batch * a.heads * a.q_length; }
int splits_of(const Args& a) { return splits_for(a, rows_of(a), 4, kLeast); }

// kLanes neighbouring lanes share a key, each with N of its columns.
template <int kLanes, class T>
__global__ void __launch_bounds__(kThreads) v2_split_kernel(Args a, int splits) {
  constexpr int N = 16 / sizeof(T);
  constexpr int kGroups = kThreads / kLanes;
  __shared__ float max[kGroups], sum[kGroups], outs[kGroups][kLanes * N];
  const unsigned row = blockIdx.x / splits;
  const int split = static_cast<int>(blockIdx.x % splits);
  const auto queries = static_cast<unsigned>(a.q_length), heads = static_cast<unsigned>(a.heads);
  const unsigned head = row / queries;  // of all batches
  const QueryRow query_row = {head / heads, head % heads, row % queries};
  const int group = threadIdx.x / kLanes, column = threadIdx.x % kLanes * N;
  const bool has_columns = column < a.head_dim;

  const KeyRange seen = keys_seen(a, keys_of(a, head), query_row.query);
  const int64_t share = ceil_div(seen.end > seen.begin ? seen.end - seen.begin : 0, splits);
  const int64_t begin = seen.begin + split * share, end = min(begin + share, seen.end);

  const T* q_row = static_cast<const T*>(a.q) + query_row.offset(a.q_stride) + column;
  const T* k_rows = row_of(static_cast<const T*>(a.k), a.k_stride, kv_head_of(a, head), a.kv_heads, 0) + column;
  const T* v_rows = row_of(static_cast<const T*>(a.v), a.v_stride, kv_head_of(a, head), a.kv_heads, 0) + column;

  float q[N] = {}, out[N] = {};
  if (has_columns) widen(load_vector<N>(q_row), q);
  for (int j = 0; j < N; ++j) q[j] *= static_cast<float>(a.scale);
  OnlineSoftmax<float> softmax;

  for (int64_t first = begin; first < end; first += kGroups * kAhead) {
    Vector<T, N> k[kAhead] = {}, v[kAhead] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t key = first + i * kGroups + group;
      if (key >= end || !has_columns) continue;
      k[i] = load_vector<N>(k_rows + key * a.k_stride.seq);
      v[i] = load_vector<N>(v_rows + key * a.v_stride.seq);
    }
    float score[kAhead] = {}, highest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      float value[N];
      widen(k[i], value);
      for (int j = 0; j < N; ++j) score[i] += q[j] * value[j];
      for (int away = 1; away < kLanes; away *= 2) score[i] += __shfl_xor_sync(kFullWarp, score[i], away);
      if (first + i * kGroups + group >= end) score[i] = -INFINITY;
      highest = greater_of(highest, score[i]);
    }
    const float factor = softmax.raise(highest);
    for (int j = 0; j < N; ++j) out[j] *= factor;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float weight = softmax.weight(score[i]);
      softmax.sum += weight;
      float value[N];
      widen(v[i], value);
      for (int j = 0; j < N; ++j) out[j] += weight * value[j];
    }
  }

  // The block's part: those of its groups of lanes.
  if (column == 0) {
    max[group] = softmax.max;
    sum[group] = softmax.sum;
  }
  for (int j = 0; j < N; ++j) outs[group][column + j] = out[j];
  __syncthreads();
  const Parts parts(a, rows_of(a));
  for (int c = threadIdx.x; c < a.head_dim; c += kThreads) {
    const auto of_group = [&](int g) { return Part<float>{max[g], sum[g], outs[g][c]}; };
    const Part<float> own = put_together<OfE, float>(kGroups, of_group);
    if (splits == 1) {
      write_out<OfE, T>(a, query_row, c, own);
    } else {
      parts.store(split, row, c, own);
    }
  }
  if (splits == 1 || !is_last_block(static_cast<unsigned*>(a.scratch) + row, splits)) return;
  for (int c = threadIdx.x; c < a.head_dim; c += kThreads) {
    write_out<OfE, T>(a, query_row, c, put_together<OfE, float>(splits, [&](int s) { return parts.load(s, row, c); }));
  }
}

template <int kLanes, class T>
void launch(const Args& a, void* stream) {
  const int splits = splits_of(a);
  clear_counters(a, rows_of(a), splits, stream);
  const auto blocks = static_cast<unsigned>(rows_of(a) * splits);
  v2_split_kernel<kLanes, T><<<blocks, kThreads, 0, as_stream(stream)>>>(a, splits);
}

}  // namespace

std::string v2_split_can_implement(const Args& a) {
  if (a.dtype == DType::kFloat64) return "takes float32, float16 or bfloat16, got float64";
  if (a.block_table != nullptr) return "takes no `block_table`";
  const int64_t lanes = 16 / size_of(a.dtype);
  if (a.head_dim % lanes != 0 || a.head_dim > 32 * lanes) {
    return "takes head_dim that is a multiple of " + std::to_string(lanes) + " up to " + std::to_string(32 * lanes) +
           ", got " + std::to_string(a.head_dim);
  }
  if (!rows_are_aligned(a)) return "takes rows that begin at multiples of 16 bytes";
  if (rows_of(a) > INT32_MAX / 64) {
    return "takes at most 33554431 queries in all heads and batches, got " + std::to_string(rows_of(a));
  }
  return "";
}

int64_t v2_split_scratch_bytes(const Args& a) { return parts_bytes(a, rows_of(a), splits_of(a)); }

void v2_split(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    if constexpr (!std::is_same_v<T, double>) {
      const int64_t lanes = a.head_dim * int64_t{sizeof(T)} / 16;
      const auto launch_lanes = lanes <= 4    ? launch<4, T>
                                : lanes <= 8  ? launch<8, T>
                                : lanes <= 16 ? launch<16, T>
                                              : launch<32, T>;
      launch_lanes(a, stream);
    }
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::attention_decode
