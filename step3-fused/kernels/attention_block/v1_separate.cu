// attention_block v1_separate: four launches
//
// Idea      Attention, projection, addition, LayerNorm, each a launch with the whole GPU for itself. The projection is
//           a matrix product in its simplest decent form: a thread computes one column for 8 rows, so that each weight
//           is loaded once for 8 products; a warp's weights are neighbours in memory, and its 8 inputs are the same
//           address for all lanes.
// Launch    attention: grid batch·heads·⌈q_length/16⌉, block 256; projection: grid ⌈rows/8⌉·⌈width/256⌉, block 256,
//           no shared memory, rows = batch·q_length; then as residual_layer_norm's v1: addition, LayerNorm
// Moves     9·batch·q_length·width·sizeof(T) bytes, width = heads·head_dim: 2 for attention (q and its output),
//           2 for the projection, 3 for the addition, 2 for LayerNorm. And, mostly from L2, ⌈q_length/16⌉ times keys
//           and values, 2·batch·k_length·width elements; ⌈rows/8⌉ times the width² weights; ⌈width/256⌉ times the
//           projection's input. 4·batch·q_length·k_length·width FLOPs, half of it if causal, and 2·rows·width². What
//           the way back wants besides attention's output is 4·(heads + 2)·rows bytes more; dropout moves nothing
// Limits    head_dim as far as shared memory goes: 128 takes 51 KB, 256 takes 99; in float64 twice as much;
//           batch·heads·⌈q_length/16⌉ ≤ 2³¹−1; rounds attention's output, its projection and the sum
#include <step3/attend_kernel.h>

#include "../residual_layer_norm/rungs.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 8;

template <class T, class C = compute_t<T>>
__global__ void project_kernel(const T* __restrict__ in, const T* __restrict__ proj_weight,
                               const T* __restrict__ proj_bias, T* __restrict__ out, int64_t rows, int64_t width) {
  const int64_t column_blocks = ceil_div(width, kThreads);
  const int64_t column = blockIdx.x % column_blocks * kThreads + threadIdx.x;
  const int64_t first_row = blockIdx.x / column_blocks * kRows;
  if (column >= width) return;

  const T* row[kRows];  // past the last row: the last row again, which is not written
  for (int r = 0; r < kRows; ++r) row[r] = in + min(first_row + r, rows - 1) * width;
  C sum[kRows] = {};
#pragma unroll 4
  for (int64_t k = 0; k < width; ++k) {
    const C w = to_compute(proj_weight[k * width + column]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] += to_compute(row[r][k]) * w;
  }
  for (int r = 0; r < kRows && first_row + r < rows; ++r) {
    out[(first_row + r) * width + column] = from_compute<T>(sum[r] + to_compute(proj_bias[column]));
  }
}

}  // namespace

std::string v1_separate_can_implement(const Args& a) {
  if (a.attention.cu_seqlens != nullptr) return kf::attention_block::kNoPackedRows;
  return can_implement_attend_kernel(a.attention, a.dtype);
}

int64_t v1_separate_scratch_bytes(const Args& a) { return one_or_two_outputs(a.attention, a.attended, a.dtype); }

void v1_separate(const Args& a, void* stream) {
  const int64_t rows = a.attention.batch * a.attention.q_length;
  const int64_t width = a.attention.heads * a.attention.head_dim;
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    T* projected = static_cast<T*>(a.scratch);
    T* attended = a.attended == nullptr ? projected + rows * width : static_cast<T*>(a.attended);
    launch_attend(a.attention, a.dtype, attended, stream);
    const auto blocks = static_cast<unsigned>(ceil_div(rows, kRows) * ceil_div(width, kThreads));
    project_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(
        attended, static_cast<const T*>(a.proj_weight), static_cast<const T*>(a.proj_bias), projected, rows, width);
    check_launch();
    residual_layer_norm::v1_separate(normalisation(a, projected), stream);
  });
}

}  // namespace kf::KF_BACKEND::attention_block
