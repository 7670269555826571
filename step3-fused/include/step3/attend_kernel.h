// Attention as a launch of its own, the first of v1's launches: a block computes a tile of rows of one head and writes
// it to its columns of [batch, q_length, heads·head_dim].
#pragma once

#include <step3/attend.h>

#include <string>

namespace kf::KF_BACKEND {

constexpr int kAttendRows = 16;

template <class T, class C = compute_t<T>>
__global__ void __launch_bounds__(kAttendThreads, 3) attend_kernel(Attention a, T* __restrict__ out, int64_t tiles) {
  extern __shared__ __align__(16) unsigned char bytes[];
  C* memory = reinterpret_cast<C*>(bytes);
  C* tile = memory + attend_values(kAttendRows, a.head_dim);
  const int64_t first_row = (tiles - 1 - blockIdx.x % tiles) * kAttendRows;  // under causality the last see most: first
  const int64_t head = blockIdx.x / tiles % a.heads;
  const int64_t batch = blockIdx.x / tiles / a.heads;

  attend_tile<kAttendRows, T>(a, batch, head, first_row, memory, tile, a.head_dim);
  __syncthreads();

  const int64_t rows = min(int64_t{kAttendRows}, a.q_length - first_row);
  out += ((batch * a.q_length + first_row) * a.heads + head) * a.head_dim;
  for (int64_t r = threadIdx.x / kWarpSize; r < rows; r += kAttendWarps) {
    for (int64_t d = threadIdx.x % kWarpSize; d < a.head_dim; d += kWarpSize) {
      out[r * a.heads * a.head_dim + d] = from_compute<T>(tile[r * a.head_dim + d]);
    }
  }
}

inline int64_t attend_kernel_bytes(const Attention& a, DType dtype) {
  const int64_t size = dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return (attend_values(kAttendRows, a.head_dim) + kAttendRows * a.head_dim) * size;
}

inline std::string can_implement_attend_kernel(const Attention& a, DType dtype) {
  const int64_t blocks = a.batch * a.heads * ceil_div(a.q_length, kAttendRows);
  if (blocks > INT32_MAX) {
    return "takes at most " + std::to_string(INT32_MAX) + " blocks of 16 queries, got " + std::to_string(blocks);
  }
  return too_much_shared_memory(attend_kernel_bytes(a, dtype),
                                "tiles of head_dim " + std::to_string(a.head_dim) + " columns");
}

// Tensors as large as attention's output: one, and another for it where nobody else wants it.
inline int64_t one_or_two_outputs(const Attention& a, const void* attended, DType dtype) {
  return (attended == nullptr ? 2 : 1) * a.batch * a.q_length * a.heads * a.head_dim * size_of(dtype);
}

template <class T>
void launch_attend(const Attention& a, DType dtype, T* out, void* stream) {
  const int64_t bytes = attend_kernel_bytes(a, dtype);
  const int64_t tiles = ceil_div(a.q_length, kAttendRows);
  allow_shared(attend_kernel<T>, bytes);
  attend_kernel<T><<<static_cast<unsigned>(a.batch * a.heads * tiles), kAttendThreads, static_cast<size_t>(bytes),
                     as_stream(stream)>>>(a, out, tiles);
  check_launch();
}

}  // namespace kf::KF_BACKEND
