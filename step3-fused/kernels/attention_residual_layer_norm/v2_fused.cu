// attention_residual_layer_norm v2_fused: one launch
//
// Idea      LayerNorm needs whole rows, and a row has the output of all heads. So a block owns R query rows and goes
//           through all heads; their outputs stay side by side in shared memory, where the residual is added and the
//           row is normalised over the whole width. Scores, attention's output and the sum never reach global memory.
//             phase 1  for each head: queries in; for each 32 keys: keys and values in, scores, softmax so far, output
//             phase 2  residual read and added
//             phase 3  mean and variance in two passes over the row in shared memory; normalise, write y
// Since v1  One launch instead of three, no scratch. But one block does all heads of its rows, where v1 had a block
//           for each: at batch 1 and 128 rows these are 32 blocks with 4 rows each, and most of a large GPU stands
//           idle. On an H200 v1 is faster at every shape measured, six times at that one and 1.1 times at batch 32
//           and 1024 rows: the bytes saved are few beside the arithmetic.
// Launch    grid batch·⌈q_length/R⌉, block 256; R = 16, or 8, 4, 1 where rows are too wide or blocks too few
// Shared    floats, stride = head_dim rounded up to a multiple of 64, plus 4:
//             tile     R × width       attention's output of all heads; then the sum. 48 KB for R = 16, width 768
//             queries  R × stride      of this head, times scale
//             keys     32 × stride     of this head; 8.5 KB at head_dim 64
//             values   32 × stride
//             weights  R × 32          exp(score − maximum so far), each warp's rows its own
//           Scores live in registers, a lane a key. So do the maximum and the sum of each row's softmax (each lane
//           with its share of the sum) and mean and variance of its LayerNorm. For R = 16: 71 KB at width 768,
//           123 KB at 1600.
// Moves     3·batch·q_length·width·sizeof(T) bytes, width = heads·head_dim: q, residual and y once. And, mostly from
//           L2, ⌈q_length/R⌉ times keys and values, 2·batch·k_length·width elements. FLOPs as v1. What the way back
//           wants is (width·sizeof(T) + 4·(heads + 2)) bytes more for each of batch·q_length rows
// Limits    float32, float16, bfloat16; one row and its tiles must fit into shared memory: width ≤ 11900 with 64 KB;
//           batch·q_length ≤ 2³¹−1
#include <step3/tile.h>

#include "rungs.h"

namespace kf::KF_BACKEND::attention_residual_layer_norm {
namespace {

template <int kRows, class T, class C = compute_t<T>>
__global__ void __launch_bounds__(kAttendThreads, 3)
    v2_fused_kernel(Attention a, const T* __restrict__ residual, const T* __restrict__ weight,
                    const T* __restrict__ bias, T* __restrict__ y, T* __restrict__ attended, Kept<C> kept,
                    int64_t tiles, C eps) {
  extern __shared__ __align__(16) unsigned char bytes[];
  const int64_t width = a.heads * a.head_dim;
  C* tile = reinterpret_cast<C*>(bytes);
  C* memory = tile + kRows * row_stride<C>(width);
  const int64_t first_row = (tiles - 1 - blockIdx.x % tiles) * kRows;  // under causality the last see most: first
  const int64_t batch = blockIdx.x / tiles;

  for (int64_t head = 0; head < a.heads; ++head) {
    attend_tile<kRows, T>(a, batch, head, first_row, memory, tile + head * a.head_dim, row_stride<C>(width));
  }
  __syncthreads();

  const int64_t first = batch * a.q_length + first_row, rows = min(int64_t{kRows}, a.q_length - first_row);
  if (attended != nullptr) store_tile(tile, first, rows, width, attended);
  T* no_sum = nullptr;
  add_and_normalize_tile(tile, first, rows, width, NoFront{}, residual, weight, bias, no_sum, y, kept, eps);
}

int64_t shared_bytes(const Attention& a, int rows) {
  return (rows * row_stride<float>(a.heads * a.head_dim) + attend_values(rows, a.head_dim)) * int64_t{sizeof(float)};
}

template <class T>
void launch(const Args& a, void* stream) {
  const int rows = choose_tile_rows(a.attention, [&](int r) { return shared_bytes(a.attention, r); });
  const int64_t tiles = ceil_div(a.attention.q_length, rows);
  const int64_t bytes = shared_bytes(a.attention, rows);
  with_tile_rows(rows, [&](auto constant) {
    constexpr int kRows = decltype(constant)::value;
    allow_shared(v2_fused_kernel<kRows, T>, bytes);
    v2_fused_kernel<kRows, T><<<static_cast<unsigned>(a.attention.batch * tiles), kAttendThreads,
                                static_cast<size_t>(bytes), as_stream(stream)>>>(
        a.attention, static_cast<const T*>(a.residual), static_cast<const T*>(a.weight), static_cast<const T*>(a.bias),
        static_cast<T*>(a.y), static_cast<T*>(a.attended), kept_of<T>(a), tiles, static_cast<float>(a.eps));
  });
}

}  // namespace

std::string v2_fused_can_implement(const Args& a) {
  if (a.dtype == DType::kFloat64) return "takes float32, float16 and bfloat16, got float64";
  const int64_t rows = a.attention.batch * a.attention.q_length;  // a block each, at the least
  if (rows > INT32_MAX) return "takes batch·q_length ≤ 2³¹−1, got " + std::to_string(rows);
  return too_much_shared_memory(
      shared_bytes(a.attention, 1),
      "rows of heads·head_dim = " + std::to_string(a.attention.heads * a.attention.head_dim) + " numbers");
}

void v2_fused(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    if constexpr (!std::is_same_v<T, double>) launch<T>(a, stream);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::attention_residual_layer_norm
