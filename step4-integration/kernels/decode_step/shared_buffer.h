// The buffer of a worker that shares a model with others (workers.h), which all of them write into.
#pragma once

#include <cstdint>

#include "rungs.h"

namespace kf::decode_step {

// Begins as zeros. What is behind it, as ones in all bits: three slots of a part [kMostRows, width] from each worker.
struct Mail {
  uint32_t first;  // the slot of this token's first turn
  uint32_t next;   // and of the next token's
  uint32_t rows;   // of the last token
  uint32_t told;   // whether somebody has told that they have waited too long
};

constexpr int64_t buffer_bytes(int64_t width, int64_t workers) {
  return int64_t{sizeof(Mail)} + 3 * workers * kMostRows * width * int64_t{sizeof(float)};
}

}  // namespace kf::decode_step
