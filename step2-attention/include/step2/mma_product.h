// A product of matrices on the tensor cores of any GPU since compute capability 8.0: out = a · b by mma.sync.
//
// A block of four warps computes 128 × 128 outputs, each warp 64 × 64 in registers. Tiles of a and b come by cp.async
// into a ring of four stages, three of them in flight while one is multiplied. What follows the product, the epilogue,
// gets the sums eight neighbours at a time, by way of the shared memory that the ring no longer needs.
//
// T is float16 or bfloat16; or float, of which the tensor cores take the first 19 bits, TF32.
#pragma once

#include <kf/launch.h>
#include <step1/vector.h>
#include <step2/cp_async.h>
#include <step2/mma.h>
#include <step2/product.h>
#include <step2/reduce.h>

#include <string>

namespace kf::KF_BACKEND::mma {

constexpr int kTile = 128, kWarpTile = 64, kStages = 4;
constexpr int kThreads = 4 * kWarpSize;
template <class T>
constexpr int kVector = 16 / sizeof(T);
template <class T>
constexpr int kDepth = 64 / sizeof(T);  // of a stage: 32 halves, or 16 floats

// A tile of 128 × kDepth elements as it lies in shared memory. K-major: a line for each of the 128, of 64 bytes.
// MN-major: a line for each of the depth, of 128 elements. The 16-byte chunks of a line are exchanged, so that what a
// warp reads at a time lies in all banks.
template <class T, Major kMajor>
struct SharedTile {
  static constexpr bool kAlong = kMajor == Major::kK;  // lines go along the depth
  static constexpr int kLine = kAlong ? kDepth<T> : kTile;

  // Where element (i, k) lies, i of the 128.
  static __device__ __forceinline__ int at(int i, int k) {
    const int line = kAlong ? i : k, element = kAlong ? k : i;
    const int turn = kAlong ? line / 2 % 4 : sizeof(T) == 4 ? line % 4 * 2 : line % 8;
    return line * kLine + (element / kVector<T> ^ turn) * kVector<T> + element % kVector<T>;
  }
};

// A thread's share of loading an operand: four chunks of 16 bytes of each tile, always at the same offsets, some lines
// apart. So nothing but a pointer changes from tile to tile.
template <class T, Major kMajor>
struct Loader {
  using Tile = SharedTile<T, kMajor>;
  static constexpr int kChunks = Tile::kLine / kVector<T>;  // of a line
  static constexpr int kApart = kThreads / kChunks;         // lines, from one of the four to the next
  static constexpr int kEach = kTile * kDepth<T> / kVector<T> / kThreads;

  const T* from;
  int64_t line_stride;  // elements from a line to the next, in global memory
  int to;               // in the tile
  int i, k;             // of the first chunk
  int size, depth;      // what is left of the matrix from there on

  // Of the tiles from row (or column) `first` on.
  __device__ Loader(const T* data, int64_t first, int64_t size_, int64_t depth_) {
    const int line = threadIdx.x / kChunks, element = threadIdx.x % kChunks * kVector<T>;
    i = Tile::kAlong ? line : element;
    k = Tile::kAlong ? element : line;
    line_stride = Tile::kAlong ? depth_ : size_;
    from = data + (Tile::kAlong ? (first + line) * depth_ + element : line * size_ + first + element);
    to = Tile::at(i, k);
    size = static_cast<int>(min(size_ - first, int64_t{kTile})) - i;
    depth = static_cast<int>(depth_) - k;
  }

  // Starts the copies of the next tile: zeros beyond the matrix. No chunk crosses an edge, since lines are a multiple
  // of 16 bytes.
  __device__ __forceinline__ void issue_loads(T* tile) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const bool inside = Tile::kAlong ? j * kApart < size && depth > 0 : size > 0 && j * kApart < depth;
      cp_async_16(tile + to + j * kApart * Tile::kLine, inside ? from + j * kApart * line_stride : from,
                  inside ? 16 : 0);
    }
    from += Tile::kAlong ? kDepth<T> : kDepth<T> * line_stride;
    depth -= kDepth<T>;
  }
};

// Where the lanes of a warp find their operands: ldmatrix wants an address of each lane. Of operand a, 16 rows and 16
// of the depth for an instruction; of b 16 columns, two instructions' worth.
template <class T, Major kMajor, bool kIsA>
struct Lanes {
  using Tile = SharedTile<T, kMajor>;
  int base[Tile::kAlong ? kDepth<T> / 16 : kWarpTile / 16];

  // `first`: where in the tile the warp's 64 begin.
  __device__ explicit Lanes(int first) {
    const int matrix = threadIdx.x % kWarpSize / 8, row = threadIdx.x % 8;
    // a's matrices: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15. b's the other way round.
    const int i = (kIsA ? matrix % 2 : matrix / 2) * 8, k = (kIsA ? matrix / 2 : matrix % 2) * 8;
#pragma unroll
    for (int n = 0; n < static_cast<int>(sizeof base / sizeof base[0]); ++n) {
      base[n] = Tile::kAlong ? Tile::at(first + i + row, 16 * n + k) : Tile::at(first + 16 * n + i, k + row);
    }
  }

  // Operand number `n` of the warp's 64, of step `step` of the depth.
  __device__ __forceinline__ void load(uint32_t (&r)[4], T* tile, int n, int step) const {
    if constexpr (Tile::kAlong) {
      ldmatrix(r, tile + base[step] + n * 16 * Tile::kLine);
    } else {
      ldmatrix_transposed(r, tile + base[n] + step * 16 * Tile::kLine);
    }
  }
};

// A warp's sums: 64 × 64 as four by eight of mma's 16 × 8.
struct Sums {
  float tile[4][8][4] = {};
};

// Adds the products of one stage to a warp's sums.
template <Major kA, Major kB, class T>
struct Multiplier {
  Lanes<T, kA, true> a;
  Lanes<T, kB, false> b;

  __device__ Multiplier(int row, int column) : a(row), b(column) {}

  __device__ __forceinline__ void add(Sums& sums, T* tile_a, T* tile_b) const {
#pragma unroll
    for (int step = 0; step < kDepth<T> / 16; ++step) {
      uint32_t of_a[4][4], of_b[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a.load(of_a[i], tile_a, i, step);
#pragma unroll
      for (int j = 0; j < 4; ++j) b.load(of_b[j], tile_b, j, step);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          mma_m16n8k16<T>(sums.tile[i][j], of_a[i], {of_b[j / 2][j % 2 * 2], of_b[j / 2][j % 2 * 2 + 1]});
        }
      }
    }
  }
};

// TF32: elements of 32 bits, which ldmatrix could not transpose. Each lane loads its own.
template <Major kA, Major kB>
struct Multiplier<kA, kB, float> {
  int row, column;  // where the warp's part of the tiles begins, and the lane's first element

  __device__ Multiplier(int row, int column)
      : row(row + threadIdx.x % kWarpSize / 4), column(column + threadIdx.x % kWarpSize / 4) {}

  __device__ __forceinline__ void add(Sums& sums, const float* a, const float* b) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int k = 0; k < kDepth<float>; k += 8) {
      uint32_t of_a[4][4], of_b[8][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          of_a[i][r] = to_tf32(a[SharedTile<float, kA>::at(row + 16 * i + r % 2 * 8, k + t + r / 2 * 4)]);
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int r = 0; r < 2; ++r) of_b[j][r] = to_tf32(b[SharedTile<float, kB>::at(column + 8 * j, k + t + r * 4)]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) mma_m16n8k8_tf32(sums.tile[i][j], of_a[i], of_b[j]);
      }
    }
  }
};

// Adds the bias and calls epilogue(row, column, value of eight neighbours) for the warp's 64 × 64 sums; for what lies
// beyond the last row or column as well. `piece`: 64 × 64 floats of shared memory.
template <class T, class Epilogue>
__device__ __forceinline__ void finish(const Sums& sums, float* piece, int64_t row, int64_t column, const T* bias,
                                       int64_t width, const Epilogue& epilogue) {
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const auto at = [&](int r, int c) { return piece + r * kWarpTile + (c / 8 ^ r % 8) * 8 + c % 8; };
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int64_t c = column + 8 * j + 2 * t;
    const float b[2] = {bias != nullptr && c < width ? to_compute(bias[c]) : 0.0f,
                        bias != nullptr && c + 1 < width ? to_compute(bias[c + 1]) : 0.0f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const two = sums.tile[i][j] + 2 * half;
        store_vector<2>(at(16 * i + 8 * half + g, 8 * j + 2 * t), Vector<float, 2>{{two[0] + b[0], two[1] + b[1]}});
      }
    }
  }
  __syncwarp();  // a warp reads only what it wrote itself
#pragma unroll 1
  for (int first = lane; first < kWarpTile * kWarpTile / 8; first += 4 * kWarpSize) {
    Packed<T> ahead[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int v = first + i * kWarpSize;
      ahead[i] = read_ahead(epilogue, row + v / 8, column + v % 8 * 8);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int v = first + i * kWarpSize;
      float value[8];
      load_values<true>(at(v / 8, v % 8 * 8), value);
      apply_epilogue(epilogue, row + v / 8, column + v % 8 * 8, packed<T>(value), ahead[i]);
    }
  }
}

template <Major kA, Major kB, class T, class Epilogue>
__global__ void __launch_bounds__(kThreads, 2)
    product_kernel(const T* __restrict__ a, const T* __restrict__ b, const T* __restrict__ bias, int64_t rows,
                   int64_t depth, int64_t width, const Epilogue epilogue) {
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int kElements = kTile * kDepth<T>;
  T* const tiles = reinterpret_cast<T*>(memory);  // [kStages][2][kElements]
  const int64_t row = int64_t{blockIdx.y} * kTile, column = int64_t{blockIdx.x} * kTile;
  const int steps = static_cast<int>(ceil_div(depth, kDepth<T>));
  Loader<T, kA> load_a(a, row, rows, depth);
  Loader<T, kB> load_b(b, column, width, depth);
  const auto issue_loads = [&](int stage) {  // beyond the last step zeros come, and nobody reads them
    load_a.issue_loads(tiles + stage * 2 * kElements);
    load_b.issue_loads(tiles + (stage * 2 + 1) * kElements);
    cp_async_commit();
  };
  for (int step = 0; step < kStages - 1; ++step) issue_loads(step);

  const int warp = threadIdx.x / kWarpSize, warp_row = warp / 2 * kWarpTile, warp_column = warp % 2 * kWarpTile;
  const Multiplier<kA, kB, T> multiplier(warp_row, warp_column);
  Sums sums;
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // this stage is there for all; and the one before it has been read by all
    issue_loads((step + kStages - 1) % kStages);
    T* const stage = tiles + step % kStages * 2 * kElements;
    multiplier.add(sums, stage, stage + kElements);
  }
  cp_async_wait<0>();
  __syncthreads();  // nobody reads or fills the ring any more
  finish(sums, reinterpret_cast<float*>(memory) + warp * kWarpTile * kWarpTile, row + warp_row, column + warp_column,
         bias, width, epilogue);
}

// ---- on the host ----

// Why this cannot be done, or "".
inline std::string can_implement_product(const Product& p, Major a, Major b, DType dtype) {
  if (compute_capability() < 80) return "needs a GPU of compute capability 8.0 or newer";
  constexpr int64_t kMost = int64_t{kTile} * 65535;
  if (p.rows > kMost) return "takes rows ≤ " + std::to_string(kMost) + ", got " + std::to_string(p.rows);
  if (p.depth > INT32_MAX / 2)
    return "takes depth ≤ " + std::to_string(INT32_MAX / 2) + ", got " + std::to_string(p.depth);
  return can_implement_operands(p, a, b, dtype);
}

template <Major kA, Major kB, class T, class Epilogue>
void launch_product(const Product& p, const Epilogue& epilogue, void* stream) {
  constexpr int kBytes = kStages * 2 * kTile * kDepth<T> * static_cast<int>(sizeof(T));
  const auto kernel = product_kernel<kA, kB, T, Epilogue>;
  allow_shared(kernel, kBytes);
  const dim3 grid(static_cast<unsigned>(ceil_div(p.width, kTile)), static_cast<unsigned>(ceil_div(p.rows, kTile)));
  kernel<<<grid, kThreads, kBytes, as_stream(stream)>>>(static_cast<const T*>(p.a), static_cast<const T*>(p.b),
                                                        static_cast<const T*>(p.bias), p.rows, p.depth, p.width,
                                                        epilogue);
  check_launch();
}

}  // namespace kf::KF_BACKEND::mma
