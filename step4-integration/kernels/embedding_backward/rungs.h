// embedding_backward: y[v, c] = the sum of grad[t, c] over all tokens t whose id is v; 0 where there is none.
//
// The host sorts the ids. Then a row's tokens stand side by side, in their own order, and whoever adds them one after
// the other gives the same bits in every run. With atomics the order would be another each time.
#pragma once

#include <kf/rung.h>

namespace kf::embedding_backward {

struct Args {
  const void* grad;       // [n, width], contiguous
  const int32_t* sorted;  // [n], the ids in ascending order, also those outside the vocabulary
  const int64_t* order;   // [n], which token has that id; of equal ids the earlier token first
  const int64_t* first;   // [vocab + 1], where in these an id's tokens begin, and so where those of the id before end
  void* y;                // [vocab, width]
  void* scratch;
  int64_t n;  // tokens
  int64_t width;
  int64_t vocab;
  DType dtype;
};

// What `auto` takes on a GPU. By results/h200.json v1 takes 0.5 to 0.9 of v2's time where tokens differ, and 9 times
// as long where all are the same, as in a batch of padding: the rung whose time does not depend on the text.
inline const char* automatic(const Args&) { return "v2_windows"; }

}  // namespace kf::embedding_backward

#define KF_OP embedding_backward
#define KF_RUNGS(RUNG)                  \
  RUNG(v1_segments, always, no_scratch) \
  RUNG(v2_windows, always, scratch_bytes)
#include <kf/rung_list.h>
