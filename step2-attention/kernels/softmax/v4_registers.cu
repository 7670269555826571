// softmax v4_registers: a row is read once and stays in registers
//
// Idea      A row of GPT-2 is small: 1024 bfloat16 are 2 KB, 16 registers for each lane of a warp. So load it once, all
//           loads under way together, and find maximum, sum and quotients in registers.
// Since v3  One read instead of two; no running maximum, since all values are there before the first is needed. Up to
//           4 KB a warp takes a row, four rows a block: no shared memory and no barrier; wider rows take a block. Rows
//           that begin anywhere are loaded in vectors, too: counted from the multiple of 16 bytes before the row. Only
//           its first and its last vector are read value by value.
// Launch    A row is V vectors of N = 16 / sizeof(T) values: width/N, or ⌈(width + N − 1)/N⌉ where rows may begin
//           between multiples of 16 bytes. V ≤ 256: grid ⌈rows/4⌉, block 32×4. Else grid rows, block 128, 256, 512 or
//           1024, the first with V ≤ 8·block, 32 values of shared memory. A thread holds up to 8 vectors
// Moves     2·rows·width·sizeof(T) bytes; about 5·rows·width FLOPs and 2·rows·width exponentials
// Limits    V ≤ 8192: a row of 128 KB; rows ≤ 2³¹−1. From V = 4097 on a thread has 64 registers, and some spill
#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

#include "rungs.h"

namespace kf::KF_BACKEND::softmax {
namespace {

constexpr int64_t kMostVectors = 8192;  // of a row: 8 of each of 1024 threads

template <int kThreads>  // of a row
constexpr int kRowsOfBlock = kThreads == kWarpSize ? 4 : 1;

// One multiplication and one instruction for exp: x − max is exact enough, and at most 0.
__device__ float weight_of(float x, float max) { return exp2_approx((x - max) * static_cast<float>(kLog2e)); }
__device__ double weight_of(double x, double max) { return exponential(x - max); }

// kWhole: every row begins and ends at a multiple of 16 bytes. Otherwise y's rows may still begin as far from one as
// x's do, `alike`: then vectors can be stored, too.
template <int kThreads, int kVectors, bool kWhole, class T>
__global__ void __launch_bounds__(kThreads* kRowsOfBlock<kThreads>)
    v4_registers_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int width, bool alike) {
  constexpr int N = 16 / sizeof(T);
  using C = compute_t<T>;
  constexpr bool kWarpARow = kThreads == kWarpSize;
  __shared__ C shared[kWarpARow ? 1 : kWarpSize];
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock<kThreads> + threadIdx.y;
  if (row >= rows) return;  // a whole warp; a block that takes a row has one
  x += row * width;
  y += row * width;
  const int before = kWhole ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(x) / sizeof(T) % N);
  const auto first_of = [&](int i) { return (i * kThreads + static_cast<int>(threadIdx.x)) * N - before; };
  const auto inside = [&](int first) { return kWhole ? first < width : first >= 0 && first + N <= width; };

  Vector<T, N> value[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int first = first_of(i);
    if (inside(first)) {
      value[i] = load_vector<N>(x + first);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const bool there = !kWhole && first + j >= 0 && first + j < width;
        value[i].element[j] = there ? x[first + j] : from_compute<T>(-INFINITY);
      }
    }
  }

  C max = -INFINITY;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) max = greater_of(max, to_compute(value[i].element[j]));
  }
  max = kWarpARow ? warp_max(max) : block_max(max, shared);

  C sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) sum += weight_of(to_compute(value[i].element[j]), max);  // 0 beyond the row
  }
  sum = kWarpARow ? warp_sum(sum) : block_sum(sum, shared);

  const C inverse = 1 / sum;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int first = first_of(i);
    C weight[N];
#pragma unroll
    for (int j = 0; j < N; ++j) weight[j] = weight_of(to_compute(value[i].element[j]), max) * inverse;
    if (inside(first) && (kWhole || alike)) {
      store_vector(y + first, narrow<T>(weight));
    } else if (!kWhole) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (first + j >= 0 && first + j < width) y[first + j] = from_compute<T>(weight[j]);
      }
    }
  }
}

bool rows_are_whole(const Args& a) { return a.width * size_of(a.dtype) % 16 == 0 && aligned_16(a.x, a.y); }

int64_t vectors_of(const Args& a) {
  const int64_t lanes = 16 / size_of(a.dtype);
  return rows_are_whole(a) ? a.width / lanes : ceil_div(a.width + lanes - 1, lanes);
}

template <int kThreads, int kVectors, bool kWhole, class T>
void launch(const Args& a, void* stream) {
  constexpr int kRows = kRowsOfBlock<kThreads>;
  const bool alike = (reinterpret_cast<uintptr_t>(a.x) - reinterpret_cast<uintptr_t>(a.y)) % 16 == 0;
  v4_registers_kernel<kThreads, kVectors, kWhole>
      <<<static_cast<unsigned>(ceil_div(a.rows, kRows)), dim3(kThreads, kRows), 0, as_stream(stream)>>>(
          static_cast<const T*>(a.x), static_cast<T*>(a.y), a.rows, static_cast<int>(a.width), alike);
}

template <bool kWhole, class T>
void launch(const Args& a, void* stream) {
  const int64_t vectors = vectors_of(a);
  const auto launch_shape = vectors <= 32     ? launch<32, 1, kWhole, T>
                            : vectors <= 64   ? launch<32, 2, kWhole, T>
                            : vectors <= 128  ? launch<32, 4, kWhole, T>
                            : vectors <= 256  ? launch<32, 8, kWhole, T>
                            : vectors <= 512  ? launch<128, 4, kWhole, T>
                            : vectors <= 1024 ? launch<128, 8, kWhole, T>
                            : vectors <= 2048 ? launch<256, 8, kWhole, T>
                            : vectors <= 4096 ? launch<512, 8, kWhole, T>
                                              : launch<1024, 8, kWhole, T>;
  launch_shape(a, stream);
}

}  // namespace

std::string v4_registers_supports(const Args& a) {
  if (a.rows > INT32_MAX) return "takes at most 2147483647 rows, got " + std::to_string(a.rows);
  if (vectors_of(a) > kMostVectors) {
    return "takes rows of at most 8192 vectors of 16 bytes, got width " + std::to_string(a.width);
  }
  return "";
}

void v4_registers(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    if (rows_are_whole(a)) {
      launch<true, T>(a, stream);
    } else {
      launch<false, T>(a, stream);
    }
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::softmax
