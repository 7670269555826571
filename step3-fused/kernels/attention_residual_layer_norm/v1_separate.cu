// attention_residual_layer_norm v1_separate: three launches
//
// Idea      Attention, addition, LayerNorm, one after the other, each with the whole GPU for itself: attention has a
//           block for each head and 16 rows, LayerNorm a block for each row. Between the launches the data has to go
//           through global memory, and in half precision is rounded on the way.
// Launch    attention: grid batch·heads·⌈q_length/16⌉, block 256, shared memory as in step3/attend_kernel.h (27 KB at
//           head_dim 64); then as residual_layer_norm's v1: addition, LayerNorm
// Moves     7·batch·q_length·width·sizeof(T) bytes, width = heads·head_dim: 2 for attention (q and its output),
//           3 for the addition, 2 for LayerNorm. And, mostly from L2, ⌈q_length/16⌉ times keys and values,
//           2·batch·k_length·width elements. 4·batch·q_length·k_length·width FLOPs, half of it if causal, and
//           11·batch·q_length·width. What the way back wants besides attention's output is 4·(heads + 2) bytes more
//           for each of batch·q_length rows; dropout moves nothing
// Limits    head_dim as far as shared memory goes: 128 takes 51 KB, 256 takes 99; in float64 twice as much;
//           batch·heads·⌈q_length/16⌉ ≤ 2³¹−1; rounds attention's output and the sum
#include <step3/attend_kernel.h>

#include "../residual_layer_norm/rungs.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_residual_layer_norm {

std::string v1_separate_can_implement(const Args& a) { return can_implement_attend_kernel(a.attention, a.dtype); }

int64_t v1_separate_scratch_bytes(const Args& a) { return one_or_two_outputs(a.attention, a.attended, a.dtype); }

void v1_separate(const Args& a, void* stream) {
  const int64_t rows = a.attention.batch * a.attention.q_length;
  const int64_t width = a.attention.heads * a.attention.head_dim;
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    T* sum = static_cast<T*>(a.scratch);
    T* attended = a.attended == nullptr ? sum + rows * width : static_cast<T*>(a.attended);
    launch_attend(a.attention, a.dtype, attended, stream);
    residual_layer_norm::v1_separate(normalisation(a, attended, sum), stream);
  });
}

}  // namespace kf::KF_BACKEND::attention_residual_layer_norm
