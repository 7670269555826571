// The matrix product of the plain C++ versions: out = f(x · weight + bias), where x may be changed before and the sums
// after, while they are in cache.
//
// Blocked as Goto and van de Geijn do, Anatomy of High-Performance Matrix Multiplication, 2008,
// https://doi.org/10.1145/1356052.1356053. Each level of memory gets what is used again from it:
//
//   registers   6 rows × 4 registers of sums, for as long as a block of the depth lasts
//   L1          6 rows of x, as long as that block, which meet one panel of the weight after the other
//   L2          a block of the weight, 256 × 256, copied into panels as wide as the registers: read from end to end
//   L3          up to 1024 rows of x: copied, widened to C, and changed by the prologue, if there is any of this to do;
//               else where they lie
//
// Each thread has rows and columns of out to itself and waits for nobody. It takes a block of columns and walks down
// the depth; the sums stay in C from the first block of the depth to the last. There, six rows at a time, they are
// finished: bias, epilogue, and the one rounding.
//
// The order in which a sum is added up depends on the shape alone: within a block of the depth k by k, then block by
// block. The number of threads changes no bit.
//
// Few rows make no use of a copy: there the weight is read once, where it lies, and all rows meet it as it passes.
#pragma once

#include <kf/cpu.h>
#include <step2/product_loops_cpu.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace kf::cpu {
namespace product_detail {

// ---- who does which part ----

// How many rows of x a block of the weight meets.
template <class C>
int64_t rows_at_a_time(int64_t depth) {
  const int64_t bytes = DepthBlocks(depth).count * kDepthStride * sizeof(C);
  return std::clamp<int64_t>(kMostBytes / bytes, kMostRows / 4, kMostRows);
}

// One thread's part of out.
struct Part {
  int64_t first_row, last_row, first_column, last_column;
};

// out in parts, one for each thread.
struct Grid {
  int64_t rows, columns;  // parts in a column of the grid, and in a row
  int64_t all_rows, all_units, width, unit;

  Part part(int64_t i) const {
    const int64_t row = i / columns, column = i % columns;
    return {row * all_rows / rows, (row + 1) * all_rows / rows, column * all_units / columns * unit,
            std::min(width, (column + 1) * all_units / columns * unit)};
  }
};

// The grid in which the largest part costs least. A part copies its rows of x and its columns of the weight, and to
// copy an element takes as long as to multiply it by kCopy others.
template <class C>
Grid grid_of(int64_t rows, int64_t depth, int64_t width) {
  constexpr int64_t kCopy = 8;
  const int64_t units = ceil_div(width, kUnit<C>);
  const int64_t threads = std::min<int64_t>(num_threads(), ceil_div(rows * depth * width, kWork));
  Grid best{1, 1, rows, units, width, kUnit<C>};
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t down = 1; down <= std::min(threads, rows); ++down) {
    const int64_t across = std::min(threads / down, units);
    const int64_t r = ceil_div(rows, down), c = ceil_div(units, across) * kUnit<C>;
    const int64_t cost = r * c + kCopy * (r + c * ceil_div(r, rows_at_a_time<C>(depth)));
    if (cost < least) {
      least = cost;
      best.rows = down;
      best.columns = across;
    }
  }
  return best;
}

// Rows of x to `to`, widened and changed; those of one block of the depth lie together.
template <class T, class Prologue, class C>
void pack_rows(const Product<T>& p, const Prologue& prologue, int64_t first, int64_t rows, C* to) {
  const DepthBlocks blocks(p.depth);
  for (int64_t block = 0; block < blocks.count; ++block, to += rows * kDepthStride) {
    const int64_t k = blocks.first(block), length = blocks.length(block);
    if (p.x_transposed) {
      with_registers(Transpose<T>{p.x + k * p.rows + first, p.rows, length, rows, to, kDepthStride});
    } else {
      with_registers(CopyRows<T>{p.x + first * p.depth + k, p.depth, rows, length, to, kDepthStride});
    }
    with_registers(Begin<C, Prologue>{prologue, first, rows, k, length, to, kDepthStride});
  }
}

// Whether rows of x may stay where they lie: they are of C, and nothing is done to them. A copy would read and
// write them once more.
template <class T, class Prologue>
constexpr bool kMayStay = std::is_same_v<T, compute_t<T>> && std::is_same_v<Prologue, AsItIs>;

template <class T, class Prologue, class Epilogue>
void multiply_part(const Product<T>& p, const Prologue& prologue, const Epilogue& epilogue, const Part& part) {
  using C = compute_t<T>;
  const DepthBlocks blocks(p.depth);
  const int64_t part_rows = part.last_row - part.first_row;
  const int64_t most_rows = ceil_div(part_rows, ceil_div(part_rows, rows_at_a_time<C>(p.depth)));
  const bool packs = !kMayStay<T, Prologue> || p.x_transposed;
  Scratch<C> packed(packs ? blocks.count * most_rows * kDepthStride : 0);
  Scratch<C> panels(kDepthBlock * kColumnBlock<C>);
  Scratch<C> sums(most_rows * kColumnBlock<C>);
  for (int64_t first_row = part.first_row; first_row < part.last_row; first_row += most_rows) {
    const int64_t rows = std::min(most_rows, part.last_row - first_row);
    // As equal as can be: six rows or five, not six and one, which would take as long as four.
    const int64_t groups = ceil_div(rows, kRegisterRows);
    if (packs) pack_rows(p, prologue, first_row, rows, packed.data());
    for (int64_t first = part.first_column; first < part.last_column; first += kColumnBlock<C>) {
      const int64_t columns = std::min(kColumnBlock<C>, part.last_column - first);
      for (int64_t block = 0; block < blocks.count; ++block) {
        const int64_t k = blocks.first(block), length = blocks.length(block);
        const T* weight = p.weight + (p.weight_transposed ? first * p.depth + k : k * p.width + first);
        with_registers(PackPanels<T>{weight, p.weight_transposed ? p.depth : p.width, p.weight_transposed, length,
                                     columns, panels.data()});
        for (int64_t group = 0; group < groups; ++group) {
          const int64_t row = group * rows / groups, n = (group + 1) * rows / groups - row;
          const C* x = packed.data() + (block * rows + row) * kDepthStride;
          int64_t x_stride = kDepthStride;
          if constexpr (kMayStay<T, Prologue>) {
            if (!packs) x = p.x + (first_row + row) * p.depth + k, x_stride = p.depth;
          }
          C* to = sums.data() + row * kColumnBlock<C>;
          with_registers(MultiplyRows<C>{x, x_stride, panels.data(), to, n, columns, length, block > 0});
          if (block + 1 < blocks.count) continue;
          with_registers(Finish<T, Epilogue>{p, epilogue, first_row + row, n, first, columns, to, kColumnBlock<C>});
        }
      }
    }
  }
}

// At most kFewRows rows by the columns from `begin` to `end`: the weight is read once, where it lies.
template <class T, class Prologue, class Epilogue>
void multiply_few(const Product<T>& p, const Prologue& prologue, const Epilogue& epilogue, int64_t begin, int64_t end) {
  using C = compute_t<T>;
  constexpr bool kSame = std::is_same_v<T, C>;
  const int64_t x_stride = padded<C>(p.depth);
  Scratch<C> x(kFewRows * x_stride), sums(kFewRows * kColumnBlock<C>);
  std::fill_n(x.data(), kFewRows * x_stride, C(0));
  if (p.x_transposed) {
    with_registers(Transpose<T>{p.x, p.rows, p.depth, p.rows, x.data(), x_stride});
  } else {
    with_registers(CopyRows<T>{p.x, p.depth, p.rows, p.depth, x.data(), x_stride});
  }
  with_registers(Begin<C, Prologue>{prologue, 0, p.rows, 0, p.depth, x.data(), x_stride});

  // A few rows of the weight, or columns where it is transposed, as C: where they lie, if T is C; else copied.
  const int64_t in_memory = p.weight_transposed ? p.depth : p.width;
  const int64_t copy_stride = p.weight_transposed ? p.depth : kColumnBlock<C>;
  Scratch<C> copy(kSame ? 0 : kSteps * copy_stride);
  const auto rows_of_weight = [&](int64_t row, int64_t rows, int64_t column, int64_t columns) -> const C* {
    const T* from = p.weight + row * in_memory + column;
    if constexpr (kSame) {
      return from;
    } else {
      with_registers(CopyRows<T>{from, in_memory, rows, columns, copy.data(), copy_stride});
      return copy.data();
    }
  };
  const int64_t stride = kSame ? in_memory : copy_stride;

  for (int64_t first = begin; first < end; first += kColumnBlock<C>) {
    const int64_t columns = std::min(kColumnBlock<C>, end - first);
    if (p.weight_transposed) {
      const int64_t most = kSame ? columns : kSteps;
      for (int64_t c = 0; c < columns; c += most) {
        const int64_t n = std::min(most, columns - c);
        with_registers(DotColumns<C>{x.data(), x_stride, p.rows, rows_of_weight(first + c, n, 0, p.depth), stride,
                                     p.depth, n, sums.data() + c});
      }
    } else {
      std::fill_n(sums.data(), kFewRows * kColumnBlock<C>, C(0));
      const int64_t most = kSame ? p.depth : kSteps;
      for (int64_t k = 0; k < p.depth; k += most) {
        const int64_t n = std::min(most, p.depth - k);
        with_registers(AddSteps<C>{x.data() + k, x_stride, p.rows, rows_of_weight(k, n, first, columns), stride, n,
                                   columns, sums.data()});
      }
    }
    with_registers(Finish<T, Epilogue>{p, epilogue, 0, p.rows, first, columns, sums.data(), kColumnBlock<C>});
  }
}

}  // namespace product_detail

// out = epilogue(prologue(x) · weight + bias)
template <class T, class Prologue = AsItIs, class Epilogue = AsItIs>
void product(const Product<T>& p, const Prologue& prologue = {}, const Epilogue& epilogue = {}) {
  using namespace product_detail;
  using C = compute_t<T>;
  if (p.rows <= kFewRows) {
    const int64_t work = p.rows * p.depth * kUnit<C>;
    parallel_for(0, ceil_div(p.width, kUnit<C>), ceil_div(kWork, work), [&](int64_t begin, int64_t end) {
      multiply_few(p, prologue, epilogue, begin * kUnit<C>, std::min(p.width, end * kUnit<C>));
    });
    return;
  }
  const Grid grid = grid_of<C>(p.rows, p.depth, p.width);
  parallel_for(0, grid.rows * grid.columns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) multiply_part(p, prologue, epilogue, grid.part(i));
  });
}

}  // namespace kf::cpu
