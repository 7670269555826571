// How the elements of a matrix are shared among blocks that sum its columns.
#pragma once

#include <kf/rung.h>

#include <algorithm>
#include <cstdint>

namespace kf::KF_BACKEND {

constexpr int kTileLanes = 32;  // threads along the columns: a warp
constexpr int kTileRows = 8;    // threads along the rows

struct ColumnGrid {
  int64_t tiles;  // blocks along the columns
  int64_t parts;  // blocks along the rows
  int64_t rows_per_part;
};

// For blocks that are `columns` wide: enough of them for eight on each of an H200's 132 multiprocessors, and up to
// `waves` times as many while each has 64 rows. With one wave the blocks begin and end together, if a multiprocessor
// holds eight of them, or four; otherwise, or where blocks take unequal time, several waves leave less of the GPU empty
// at the end. Constants, and no question to the device: the order of a sum, and so its last bit, must not depend on the
// GPU. Parts begin at multiples of 8.
inline ColumnGrid column_grid(int64_t rows, int64_t width, int64_t columns, int64_t waves) {
  constexpr int64_t kBlocks = 1056;
  const int64_t tiles = (width + columns - 1) / columns;
  const int64_t needed = std::min(rows / kTileRows, kBlocks / tiles);
  const int64_t smoother = waves > 1 ? std::min(rows / 64, waves * kBlocks / tiles) : 0;
  const int64_t parts = std::max({needed, smoother, int64_t{1}});
  const int64_t rows_per_part = (rows + parts * kTileRows - 1) / (parts * kTileRows) * kTileRows;
  return {tiles, (rows + rows_per_part - 1) / rows_per_part, rows_per_part};
}

inline ColumnGrid column_grid_by_one(int64_t rows, int64_t width) { return column_grid(rows, width, kTileLanes, 4); }

// A block of threads with eight columns each covers 256 columns; where rows do not start at multiples of 8 elements, up
// to 7 of them lie before its first column: sum_columns_by_eight in column_sum.h. Blocks at the ends of rows are slower
// then, so there are four waves.
constexpr int kEightTile = 8 * kTileLanes;
constexpr int kEightEntries = kEightTile + 8;

inline ColumnGrid column_grid_by_eight(int64_t rows, int64_t width, int64_t waves) {
  return width % 8 == 0 ? column_grid(rows, width, kEightTile, waves) : column_grid(rows, width + 7, kEightTile, 4);
}

// Room for the partial sums of either kind and any number of waves, in float32 (float64 for float64).
inline int64_t partial_sum_bytes(int64_t rows, int64_t width, DType dtype) {
  const ColumnGrid one = column_grid_by_one(rows, width), eight = column_grid_by_eight(rows, width, 4);
  return std::max(one.parts * width, eight.parts * eight.tiles * kEightEntries) * (dtype == DType::kFloat64 ? 8 : 4);
}

}  // namespace kf::KF_BACKEND
