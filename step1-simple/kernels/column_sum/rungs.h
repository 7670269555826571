// column_sum: sum[c] = x[0, c] + x[1, c] + …, x of shape [rows, width], contiguous: the gradient of a bias.
#pragma once

#include <kf/rung.h>

namespace kf::column_sum {

struct Args {
  const void* x;
  void* sum;
  int64_t rows;
  int64_t width;
  DType dtype;
  void* scratch = nullptr;  // partial sums of blocks of rows
};

// What `auto` takes on a GPU, read off results/h200.json. For a few thousand rows, starting v3's larger blocks takes
// longer than its vectors save.
inline const char* automatic(const Args& a) {
  return a.rows < (int64_t{1} << 23) / a.width ? "v2_two_stage" : "v3_vector";
}

}  // namespace kf::column_sum

#define KF_OP column_sum
#define KF_RUNGS(RUNG)                      \
  RUNG(v1_serial, always, no_scratch)       \
  RUNG(v2_two_stage, always, scratch_bytes) \
  RUNG(v3_vector, always, scratch_bytes)
#include <kf/rung_list.h>
