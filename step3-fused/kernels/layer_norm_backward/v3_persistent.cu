// layer_norm_backward v3_persistent: both directions in one pass
//
// Idea      Who holds a row of x and grad in registers has all that its columns' sums need, too. So let a warp take row
//           after row, and keep for its columns what it has summed of grad·x̂ and of grad, in registers as well: each
//           element is read once. Only when a block has no more rows does it leave its sums, one for each column.
// Since v2  One kernel for both directions, a block for each multiprocessor of an H200, which stays until all rows are
//           done. While a row is computed the next one is in flight. The second stage is v2's, with few parts.
// Launch    A row has V = width·sizeof(T)/16 vectors, a thread up to four of them, so that their columns' sums, a row
//           and the next fit into its registers: up to V = 128 a warp a row, wider rows a group of 2, 4, 8 or 16 warps.
//           A block has as many groups as registers allow, 12 or 16 warps in all (8 if a group has 8 in half types);
//           grid up to 132. Shared memory: up to 128 KB for the sums of all groups, and 6 values for each warp. Then
//           grid ⌈2·width/32⌉, block 32×32, 4 KB
// Moves     (3·rows·width + 3·width)·sizeof(T) bytes (grad_sum: one more rows·width), and 4·blocks·width·4 of partial
//           sums; about 15·rows·width FLOPs
// Limits    width ≤ 8192 (float64: 4096), rows ≤ 2³¹−1
#include "columns.h"
#include "group.h"
#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm_backward {
namespace {

constexpr int64_t kStaticBytes = 1024;  // of shared memory, besides the groups' sums

template <class Row, class T, class C = compute_t<T>>
__global__ void __launch_bounds__(Row::kThreads* kGroups<Row>, 1)
    v3_persistent_kernel(const T* __restrict__ grad, const T* __restrict__ x, const T* __restrict__ weight,
                         const C* __restrict__ mean, const C* __restrict__ rstd, const T* __restrict__ grad_sum,
                         T* __restrict__ grad_x, C* __restrict__ partial, int64_t rows, int width) {
  constexpr int N = Row::N, kWarps = Row::kThreads / kWarpSize;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ C shared[kGroups<Row>][2][3 * kWarps];  // for two rows in turn: no barrier before the next
  const int group = threadIdx.y;
  C of_weight[Row::kItems][N] = {}, of_bias[Row::kItems][N] = {};
  struct Held {
    Vector<T, N> x[Row::kItems], grad[Row::kItems];
    C mean, rstd;
  };
  const auto load = [&](int64_t row, Held& to) {
    if (row >= rows) return;
    to.mean = mean[row];
    to.rstd = rstd[row];
    Row::for_each_piece(width, [&](int i, int column) {
      to.x[i] = load_vector<N>(x + row * width + column);
      to.grad[i] = load_vector<N>(grad + row * width + column);
    });
  };

  const int64_t step = int64_t{gridDim.x} * kGroups<Row>;
  int64_t row = int64_t{blockIdx.x} * kGroups<Row> + group;
  Held held, next;
  load(row, held);
  for (int turn = 0; row < rows; row += step, turn ^= 1) {  // all threads of a group have the same row
    load(row + step, next);
    RowSums<C> sums;
    Row::for_each_piece(width, [&](int i, int column) {
      C value[N], g[N], w[N];
      widen_anew(held.x[i], value);
      widen_anew(held.grad[i], g);
      widen_anew(load_vector<N>(weight + column), w);
#pragma unroll
      for (int j = 0; j < N; ++j) sums.add(product(g[j], w[j]), value[j] - held.mean);
    });
    row_sums<Row::kThreads>(sums.value, shared[group][turn], [&] { meet<Row>(group); });
    const RowGradient<C> gradient(sums, held.mean, held.rstd, width);
    Row::for_each_piece(width, [&](int i, int column) {
      C value[N], g[N], w[N];
      widen_anew(held.x[i], value);
      widen_anew(held.grad[i], g);
      widen_anew(load_vector<N>(weight + column), w);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const C x_hat = gradient.normalized(value[j]);
        of_weight[i][j] += g[j] * x_hat;
        of_bias[i][j] += g[j];
        value[j] = gradient.of_x(product(g[j], w[j]), x_hat);
      }
      if (grad_sum != nullptr) {
        widen_anew(load_vector<N>(grad_sum + row * width + column), w);
#pragma unroll
        for (int j = 0; j < N; ++j) value[j] += w[j];
      }
      store_vector<N>(grad_x + row * width + column, narrow<T>(value));
    });
    held = next;
  }

  leave_sums<Row>(of_weight, of_bias, reinterpret_cast<C*>(memory), 2 * width, group, kGroups<Row>, width, partial);
}

template <class Row, class C>
constexpr int64_t kColumnBytes = kGroups<Row> * 2 * static_cast<int64_t>(sizeof(C));  // of the groups' sums

}  // namespace

std::string v3_persistent_can_implement(const Args& a) {
  const int64_t widest = a.dtype == DType::kFloat64 ? 4096 : 8192;
  if (a.width > widest) return "takes width ≤ " + std::to_string(widest) + ", got " + std::to_string(a.width);
  if (a.rows > INT32_MAX) return "takes rows ≤ " + std::to_string(INT32_MAX) + ", got " + std::to_string(a.rows);
  int64_t bytes = 0;
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_shape<T>(a.width, all_aligned(a),
                  [&](auto shape) { bytes = a.width * kColumnBytes<decltype(shape), compute_t<T>>; });
  });
  return too_much_shared_memory(bytes + kStaticBytes, "the sums of its rows");
}

int64_t v3_persistent_scratch_bytes(const Args& a) {
  const int64_t parts = a.rows < kMostBlocks ? a.rows : kMostBlocks;
  return parts * 2 * a.width * (a.dtype == DType::kFloat64 ? 8 : 4);
}

void v3_persistent(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    using C = compute_t<T>;
    with_shape<T>(a.width, all_aligned(a), [&](auto shape) {
      using Row = decltype(shape);
      const int64_t needed = ceil_div(a.rows, kGroups<Row>), blocks = needed < kMostBlocks ? needed : kMostBlocks;
      const auto kernel = v3_persistent_kernel<Row, T>;
      const int64_t bytes = a.width * kColumnBytes<Row, C>;
      allow_shared(kernel, bytes);
      kernel<<<static_cast<unsigned>(blocks), dim3(Row::kThreads, kGroups<Row>), bytes, as_stream(stream)>>>(
          static_cast<const T*>(a.grad), static_cast<const T*>(a.x), static_cast<const T*>(a.weight),
          static_cast<const C*>(a.mean), static_cast<const C*>(a.rstd), static_cast<const T*>(a.grad_sum),
          static_cast<T*>(a.grad_x), static_cast<C*>(a.scratch), a.rows, static_cast<int>(a.width));
      check_launch();
      finish<T>(a.scratch, a.grad_weight, a.grad_bias, blocks, a.width, stream);
    });
  });
}

}  // namespace kf::KF_BACKEND::layer_norm_backward
