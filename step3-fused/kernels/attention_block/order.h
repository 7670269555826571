// The dataflow of attention_block's v4: which tile comes when, and the counters by which blocks tell each other what
// is there.
//
// Rows are taken 64 at a time, a group. Three kinds of tiles depend on each other through groups:
//   attention      a band of up to three groups, one head       counts in attended[group], up to the number of heads
//   projection     a group, 128 columns                         waits for it; counts in projected[group]
//   normalisation  a few rows of a group, whole                 waits for that
//
// Why nothing waits for ever, with however many blocks at once: tiles of each kind are drawn, one after the other, by
// blocks that run. Attention waits for nobody, so each tile that was drawn is done, and in the end all are. A
// projection waits for attention only, so these are done too. Rows are normalised by warps that have nothing else to
// do, and nobody waits for them.
#pragma once

#include <kf/launch.h>
#include <step2/acquire.h>

#include <cstdint>

namespace kf::KF_BACKEND::attention_block {

constexpr int kGroupRows = 64;  // what one warpgroup's products have
constexpr int kBandGroups = 3;  // an attention tile's, one for each warpgroup that attends
constexpr int kWidth = 128;     // columns of a projection's tile

struct Band {
  int batch, first_group, groups;
};

struct Group {
  int batch, group;
};

struct Order {
  // So many batches go through their bands together, the last rows first: under a causal mask those cost most, and what
  // is left at the end is small. More batches at once would ask for more of the L2 cache.
  static constexpr int kTogether = 4;
  int batches, heads, groups;  // groups of a batch
  int columns;                 // projection tiles of a group

  Order(int64_t batches, int64_t heads, int64_t rows, int64_t width)
      : batches(static_cast<int>(batches)),
        heads(static_cast<int>(heads)),
        groups(static_cast<int>(ceil_div(rows, kGroupRows))),
        columns(static_cast<int>(ceil_div(width, kWidth))) {}

  __host__ __device__ int all_groups() const { return batches * groups; }
  __host__ __device__ int bands() const { return (groups + kBandGroups - 1) / kBandGroups; }  // of a batch
  __host__ __device__ int64_t attention_tiles() const { return int64_t{batches} * bands() * heads; }

  // Band `number`. Bands are counted from the last rows: the first rows' may have fewer groups than three.
  __device__ Band band(int number) const {
    const int chunk = number / (bands() * kTogether), within = number % (bands() * kTogether);
    const int here = min(kTogether, batches - chunk * kTogether);
    const int end = groups - within / here * kBandGroups, first = max(end - kBandGroups, 0);
    return {chunk * kTogether + within % here, first, end - first};
  }

  // Group `number` in the order in which bands are done.
  __device__ Group group(int number) const {
    const int chunk = number / (groups * kTogether), within = number % (groups * kTogether);
    const int here = min(kTogether, batches - chunk * kTogether);
    const int band_number = within / (here * kBandGroups), in_band = within % (here * kBandGroups);
    const int end = groups - band_number * kBandGroups, size = min(end, kBandGroups);
    return {chunk * kTogether + in_band / size, end - 1 - in_band % size};
  }

  __device__ int number_of(const Group& g) const { return g.batch * groups + g.group; }  // in the counters
};

// In scratch memory, 0 when the kernel begins.
struct Counters {
  static constexpr int64_t kApart = 32;  // the drawn numbers: a line of 128 bytes for each
  unsigned *drawn_attention, *drawn_projection, *drawn_rows;
  unsigned *attended, *projected;  // of each group: heads, and tiles of the projection

  Counters(void* memory, const Order& order)
      : drawn_attention(static_cast<unsigned*>(memory)),
        drawn_projection(drawn_attention + kApart),
        drawn_rows(drawn_projection + kApart),
        attended(drawn_rows + kApart),
        projected(attended + order.all_groups()) {}
  static int64_t bytes(const Order& order) {
    return (3 * kApart + 2 * int64_t{order.all_groups()}) * int64_t{sizeof(unsigned)};
  }
};

}  // namespace kf::KF_BACKEND::attention_block
