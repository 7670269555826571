// layer_norm_backward v4_bulk: rows come through shared memory, by themselves
//
// Idea      In v3 the row and the next one wait in registers, which so have no room for the sums of more columns.
//           Shared memory has room for both rows. One lane starts a bulk copy of a whole row of x and of grad and goes
//           on; the copy's bytes arrive at an mbarrier. Each row's group of threads has a ring of two or three stages
//           of its own, for the row that it computes and the next ones: no barrier of the block, no other group to wait
//           for.
// Since v3  Rows lie in shared memory, grad_sum's too, each from a multiple of 128 bytes on. The registers are free for
//           sums: up to 8 vectors of 16 bytes a lane, so that rows up to 4 KB are a warp's. At its end a group leaves
//           its sums in its ring. The second stage is launched while the first runs (programmatic dependent launch).
// Launch    A row has V = width·sizeof(T)/16 vectors. V ≤ 256: a warp a row, ⌈V/32⌉ of them a lane (room for 7 where it
//           has 6). Wider: a group of 4, 8 or 16 warps, the first with V ≤ 128·warps, 4 vectors a thread. Grid up to
//           132; a block has groups of 16 warps in all, of 8 where a lane keeps more than 32 columns or 7 vectors,
//           fewer where their rings would need more than 224 KB of shared memory. Three stages in a ring if 16 warps
//           have room for them, else two. Then grid ⌈2·width/32⌉, block 32×32, 4 KB. Tensors that do not begin
//           at multiples of 16 bytes are v3's
// Roles     a group of threads a row; its first one issues the copies
// Barriers  arrived, of each group and stage: 1 arrival and the bytes of 2 rows, or 3 with grad_sum. Empty needs none:
//           the group meets, by __syncwarp or a named barrier of its threads
// A stage   bulk copies issued ─ arrived ─ the row is read twice ─ the group meets ─ the next row's copies
// Moves     (3·rows·width + 3·width)·sizeof(T) bytes (grad_sum: one more rows·width), and 4·blocks·width·4 of partial
//           sums; about 15·rows·width FLOPs
// Limits    compute capability 9.0; half types and float32; width·sizeof(T) ≤ 32768 and a multiple of 16; rows
//           ≤ 2³¹−1; v3's width for what is v3's
#include <step2/mbarrier.h>
#include <step2/tma.h>

#include <algorithm>
#include <type_traits>

#include "columns.h"
#include "group.h"
#include "row.h"
#include "rungs.h"

namespace kf::KF_BACKEND::layer_norm_backward {
namespace {

template <class Row, class T, int kStages>
__global__ void __launch_bounds__(Row::kThreads* kMostGroups<Row>, 1)
    v4_bulk_kernel(const T* __restrict__ grad, const T* __restrict__ x, const T* __restrict__ weight,
                   const float* __restrict__ mean, const float* __restrict__ rstd, const T* __restrict__ grad_sum,
                   T* __restrict__ grad_x, float* __restrict__ partial, int64_t rows, int width) {
  constexpr int N = Row::N;
  launch_dependent_grids();  // its blocks come where this one's have left, and wait for the last
  extern __shared__ __align__(kBulkAlignment) unsigned char memory[];
  __shared__ uint64_t arrived[kMostGroups<Row>][kStages];
  __shared__ float shared[kMostGroups<Row>][3 * Row::kThreads / kWarpSize];
  const int group = threadIdx.y, groups = blockDim.y;
  const int matrices = grad_sum == nullptr ? 2 : 3;
  const int pitch = bulk_pitch(width, sizeof(T));
  const int of_ring = kStages * matrices * pitch;  // elements
  T* ring = reinterpret_cast<T*>(memory) + group * of_ring;
  const auto stage_of = [&](int stage) { return ring + stage * matrices * pitch; };
  const auto issue_load = [&](int stage, int64_t row) {  // by one lane
    if (row >= rows) return;
    const uint32_t bytes = width * static_cast<uint32_t>(sizeof(T));
    uint64_t* barrier = &arrived[group][stage];
    mbarrier_arrive_expect_tx(barrier, matrices * bytes);
    bulk_load(stage_of(stage), x + row * width, bytes, barrier);
    bulk_load(stage_of(stage) + pitch, grad + row * width, bytes, barrier);
    if (grad_sum != nullptr) bulk_load(stage_of(stage) + 2 * pitch, grad_sum + row * width, bytes, barrier);
  };

  // Neighbouring rows go to different blocks, which so get as many of the last ones as they can.
  const int64_t step = int64_t{gridDim.x} * groups, first = int64_t{group} * gridDim.x + blockIdx.x;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) mbarrier_init(&arrived[group][stage], 1);
    mbarrier_init_fence();
    for (int stage = 0; stage < kStages; ++stage) issue_load(stage, first + stage * step);
  }
  meet<Row>(group);                  // the barriers are there; no other group uses these
  Vector<T, N> of_row[Row::kItems];  // the weight
  Row::for_each_piece(width, [&](int i, int column) { of_row[i] = load_vector<N>(weight + column); });
  float of_weight[Row::kItems][N] = {}, of_bias[Row::kItems][N] = {};
  float row_mean = 0, row_rstd = 0;
  if (first < rows) row_mean = mean[first], row_rstd = rstd[first];
  int stage = 0, phase = 0;
  for (int64_t row = first; row < rows; row += step) {
    float next_mean = 0, next_rstd = 0;
    if (row + step < rows) next_mean = mean[row + step], next_rstd = rstd[row + step];
    mbarrier_wait(&arrived[group][stage], phase);
    const T* x_row = stage_of(stage);
    RowSums<float> sums;
    Row::for_each_piece(width, [&](int i, int column) {
      float value[N], g[N], w[N];
      widen_anew(load_vector<N>(x_row + column), value);
      widen_anew(load_vector<N>(x_row + pitch + column), g);
      widen_anew(of_row[i], w);
#pragma unroll
      for (int j = 0; j < N; ++j) sums.add(product(g[j], w[j]), value[j] - row_mean);
    });
    row_sums<Row::kThreads>(sums.value, shared[group], [&] { meet<Row>(group); });
    const RowGradient<float> gradient(sums, row_mean, row_rstd, width);
    Row::for_each_piece(width, [&](int i, int column) {
      float value[N], g[N], w[N];
      widen_anew(load_vector<N>(x_row + column), value);
      widen_anew(load_vector<N>(x_row + pitch + column), g);
      widen_anew(of_row[i], w);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float x_hat = gradient.normalized(value[j]);
        of_weight[i][j] += g[j] * x_hat;
        of_bias[i][j] += g[j];
        value[j] = gradient.of_x(product(g[j], w[j]), x_hat);
      }
      if (grad_sum != nullptr) {
        widen_anew(load_vector<N>(x_row + 2 * pitch + column), w);
#pragma unroll
        for (int j = 0; j < N; ++j) value[j] += w[j];
      }
      store_vector<N>(grad_x + row * width + column, narrow<T>(value));
    });
    meet<Row>(group);  // all threads have read the stage, and the group's sums
    if (threadIdx.x == 0) issue_load(stage, row + kStages * step);
    if (++stage == kStages) stage = 0, phase ^= 1;
    row_mean = next_mean, row_rstd = next_rstd;
  }

  float* const sums = reinterpret_cast<float*>(memory);  // a group's lie where its ring was, with which it is done
  leave_sums<Row>(of_weight, of_bias, sums, of_ring * sizeof(T) / sizeof(float), group, groups, width, partial);
}

}  // namespace

std::string v4_bulk_can_implement(const Args& a) {
  if (a.dtype == DType::kFloat64) return "takes float32, float16 or bfloat16";
  if (compute_capability() != 90) return "needs a GPU of compute capability 9.0";
  const int64_t bytes = a.width * size_of(a.dtype);
  if (bytes > 32768) return "takes rows up to 32768 bytes, got " + std::to_string(bytes);
  if (bytes % 16 != 0) return "takes rows of a multiple of 16 bytes, got " + std::to_string(bytes);
  if (a.rows > INT32_MAX) return "takes rows ≤ " + std::to_string(INT32_MAX) + ", got " + std::to_string(a.rows);
  return all_aligned(a) ? "" : v3_persistent_can_implement(a);
}

int64_t v4_bulk_scratch_bytes(const Args& a) { return v3_persistent_scratch_bytes(a); }

void v4_bulk(const Args& a, void* stream) {
  if (!all_aligned(a)) return v3_persistent(a, stream);
  with_bulk_row(a.dtype, a.width, [&](auto type, auto shape) {
    using T = typename decltype(type)::element;
    using Row = decltype(shape);
    const auto launch = [&](auto stages) {
      const int64_t bytes = bytes_a_group(a, stages), groups = std::min<int64_t>(kMostGroups<Row>, kRingBytes / bytes);
      const int64_t blocks = std::min(a.rows, kMostBlocks);  // rows go round the blocks, then round the groups
      const auto kernel = v4_bulk_kernel<Row, T, stages.value>;
      allow_shared(kernel, groups * bytes);
      kernel<<<static_cast<unsigned>(blocks), dim3(Row::kThreads, static_cast<unsigned>(groups)), groups * bytes,
               as_stream(stream)>>>(
          static_cast<const T*>(a.grad), static_cast<const T*>(a.x), static_cast<const T*>(a.weight),
          static_cast<const float*>(a.mean), static_cast<const float*>(a.rstd), static_cast<const T*>(a.grad_sum),
          static_cast<T*>(a.grad_x), static_cast<float*>(a.scratch), a.rows, static_cast<int>(a.width));
      check_launch();
      finish<T>(a.scratch, a.grad_weight, a.grad_bias, blocks, a.width, stream, true);
    };
    // With 8 warps more stages gained nothing on an H200: these compute longer than a row takes to come.
    if constexpr (kMostGroups<Row> * Row::kThreads == 16 * kWarpSize) {
      if (kMostGroups<Row> * bytes_a_group(a, 3) <= kRingBytes) return launch(std::integral_constant<int, 3>{});
    }
    launch(std::integral_constant<int, 2>{});
  });
}

}  // namespace kf::KF_BACKEND::layer_norm_backward
