// Weights on their way: each warp has a ring of stages in shared memory, and tensor cores read a piece from it.
//
// With one row or a few a product is nothing but its weights: each is used once for each row. So they are operand a of
// mma, 16 columns of the product, and the rows of x are operand b, of which there may be eight. A lane asks for its
// vectors of 16 bytes by cp.async, and reads back only what it loaded itself: no barrier, and no other lane is waited
// for. Of several rows, pieces beyond the ring are asked for, too, but only as far as the L2 cache.
//
// A product adds over its depth, and how the depth is numbered does not matter if both factors agree: of 32 of it lane
// (g, t) = (lane / 4, lane % 4) takes 8t to 8t + 7, where mma's text has 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, twice. So
// x is read by vectors of 16 bytes as well. Columns may be numbered anew, too: those of the result are then where the
// weights were.
#pragma once

#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/cp_async.h>
#include <step2/dependent_launch.h>
#include <step2/mma.h>
#include <step2/reduce.h>

#include <cstdint>

namespace kf::KF_BACKEND::decode_step {

constexpr int kThreads = 256;  // of the products' blocks
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kVectors = 8;       // of a lane in a piece
constexpr int kDepth = 32;        // of a chunk of x: a vector of each t
constexpr int kTileColumns = 64;  // of a piece that lies in columns
constexpr int kRowColumns = 16;   // of one that lies in rows
constexpr int kRowDepth = 128;

// Blocks that are to fit on a multiprocessor beside each other, of this kernel and the next: registers for as many.
template <int kRows>
constexpr int kBeside = kRows <= 8 ? 2 : 1;

using Vector16 = Vector<uint32_t, 4>;

// Eight of the depth for each eight rows of x: operand b of two mma.
template <int kRows>
struct XFragment {
  static constexpr int kTiles = (kRows + 7) / 8;
  Vector16 of[kTiles];

  // x: [batch, stride] in shared memory, from this chunk of the depth on. Rows that are not there count as 0.
  template <class T>
  __device__ __forceinline__ XFragment(const T* x, int stride, int batch) {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = n * 8 + g;
      of[n] = Vector16{};
      if (row < batch) of[n] = load_vector<4>(reinterpret_cast<const uint32_t*>(x + row * stride + 8 * t));
    }
  }
};

// ---- weights [depth, width]: a piece is 32 of the depth by 64 columns. Lane (g, t) has rows 8t to 8t + 7 of columns
// 8g to 8g + 7; eight lanes load 128 bytes in a row ----

template <class T>
struct InColumns {
  const T* weight;
  int64_t width;
  int depth, column;       // of the tile
  int chunk, step, count;  // a warp's pieces: chunks `chunk`, chunk + step, …

  __device__ __forceinline__ void each(int piece, Vector16 (&stage)[kVectors][kWarpSize]) const {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    const int k = (chunk + piece * step) * kDepth + 8 * t, first = column + 8 * g;
    const bool wanted = k < depth && first < width;  // both bounds are multiples of 8
    const T* from = weight + (wanted ? k * width + first : 0);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) cp_async_16(&stage[v][slot()], from + (wanted ? v * width : 0), wanted ? 16 : 0);
  }
  // A line of 128 bytes a lane.
  __device__ __forceinline__ void prefetch(int piece) const {
    const int k = (chunk + piece * step) * kDepth + static_cast<int>(threadIdx.x % kWarpSize);
    if (k < depth) prefetch_to_l2(weight + k * width + column);
  }
  // The lanes of one t are neighbours, as in memory: a copy writes their 128 bytes at once. The xor keeps lanes 0 to 7,
  // which read at the same time, in different banks.
  __device__ __forceinline__ static int slot() {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    return t * 8 + (g ^ 2 * t);
  }
};

// Of 64 columns by up to 8·kTiles rows: [n][j][e] is column 8g + 2j + e / 2, row 8n + 2t + e % 2.
template <int kRows>
struct ColumnSums {
  static constexpr int kTiles = XFragment<kRows>::kTiles;
  float of[kTiles][4][4] = {};

  template <class T>
  __device__ __forceinline__ void add(const Vector16 (&w)[kVectors], const XFragment<kRows>& x) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {  // which half of the lane's eight of the depth
      const Vector16 *low = w + 4 * s, *high = low + 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Two rows' values of a column side by side: the lower halves of two registers, or the upper ones.
        const uint32_t a[4] = {__byte_perm(low[0].element[j], low[1].element[j], 0x5410),
                               __byte_perm(low[0].element[j], low[1].element[j], 0x7632),
                               __byte_perm(high[0].element[j], high[1].element[j], 0x5410),
                               __byte_perm(high[0].element[j], high[1].element[j], 0x7632)};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          mma_m16n8k16<T>(of[n][j], a, {x.of[n].element[2 * s], x.of[n].element[2 * s + 1]});
        }
      }
    }
  }

  // To [batch, kTileColumns].
  __device__ __forceinline__ void store(float* to, int batch) const {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 8 * n + 2 * t + half;
        if (row >= batch) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          store_vector(to + row * kTileColumns + 8 * g + 2 * j, Vector<float, 2>{{of[n][j][half], of[n][j][2 + half]}});
        }
      }
    }
  }
};

// ---- weights [width, depth]: a piece is 16 columns of the product, each a row here, by 128 of the depth. Lane (g, t)
// has of columns g and g + 8 the depths 8t to 8t + 7 of each 32 ----

template <class T>
struct InRows {
  const T* weight;
  int64_t width;
  int depth;
  int tile, step, pieces,
      count;  // a warp's tiles: `tile`, tile + step, …, each of so many pieces; of all pieces `count`

  __device__ __forceinline__ int column_of(int piece) const { return (tile + piece / pieces * step) * kRowColumns; }
  __device__ __forceinline__ int depth_of(int piece) const { return piece % pieces * kRowDepth; }

  __device__ __forceinline__ void each(int piece, Vector16 (&stage)[kVectors][kWarpSize]) const {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    const int column = column_of(piece) + g, k = depth_of(piece) + 8 * t;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t of_column = column + v % 2 * 8;
      const int at = k + v / 2 * kDepth;
      const bool wanted = of_column < width && at < depth;
      cp_async_16(&stage[v][slot()], weight + (wanted ? of_column * depth + at : 0), wanted ? 16 : 0);
    }
  }
  __device__ __forceinline__ void prefetch(int piece) const {
    const int64_t column = column_of(piece) + static_cast<int>(threadIdx.x % kWarpSize / 2);
    const int k = depth_of(piece) + static_cast<int>(threadIdx.x % 2) * (kRowDepth / 2);
    if (column < width && k < depth) prefetch_to_l2(weight + column * depth + k);
  }
  __device__ __forceinline__ static int slot() { return static_cast<int>(threadIdx.x % kWarpSize); }
};

// Of 16 columns by up to 8·kTiles rows: [n][e] is column g + 8·(e / 2), row 8n + 2t + e % 2.
template <int kRows>
struct RowSums {
  static constexpr int kTiles = XFragment<kRows>::kTiles;
  float of[kTiles][4] = {};

  // Chunk `c` of the piece's four.
  template <class T>
  __device__ __forceinline__ void add(const Vector16 (&w)[kVectors], int c, const XFragment<kRows>& x) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const Vector16 &low = w[2 * c], &high = w[2 * c + 1];
      const uint32_t a[4] = {low.element[2 * s], high.element[2 * s], low.element[2 * s + 1], high.element[2 * s + 1]};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        mma_m16n8k16<T>(of[n], a, {x.of[n].element[2 * s], x.of[n].element[2 * s + 1]});
      }
    }
  }
};

// ---- a warp's ring ----

// One row leaves room for rings that hold half or all of what a block has of a product. Of several rows, pieces after
// the ring's are brought to the L2 cache; that and a smaller ring make one row slower.
template <int kRows>
struct Ring {
  static constexpr int kStages = kRows == 1 ? 3 : 2, kAhead = kRows == 1 ? 0 : 6;
  Vector16 stage[kStages][kVectors][kWarpSize];

  // Asks for the first pieces. Nothing of this waits.
  template <class Pieces>
  __device__ __forceinline__ void begin(const Pieces& pieces) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      if (s < pieces.count) pieces.each(s, stage[s]);
      cp_async_commit();  // an empty group counts, too
    }
    for (int ahead = kStages; ahead < min(kStages + kAhead, pieces.count); ++ahead) pieces.prefetch(ahead);
  }

  // Calls take(piece, vectors) for each piece, and asks for the one that comes into its place.
  template <class Pieces, class Take>
  __device__ __forceinline__ void walk(const Pieces& pieces, Take take) {
    int from = 0;
#pragma unroll 1
    for (int piece = 0; piece < pieces.count; ++piece) {
      cp_async_wait<kStages - 1>();
      Vector16 w[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) w[v] = stage[from][v][Pieces::slot()];
      take(piece, w);
      if (piece + kStages < pieces.count) pieces.each(piece + kStages, stage[from]);
      cp_async_commit();
      if (kAhead > 0 && piece + kStages + kAhead < pieces.count) pieces.prefetch(piece + kStages + kAhead);
      from = from + 1 == kStages ? 0 : from + 1;
    }
  }
};

}  // namespace kf::KF_BACKEND::decode_step
