// all_reduce: sum = residual + x_bias + the sum of all workers' x; y = layer_norm(sum). All of shape [rows, width],
// contiguous. A half block of tensor parallelism ends so. x differs from worker to worker, the rest is the same.
//
// The workers' x are added in the order of the workers, so all of them get the same bits. Each worker is a device of
// its own; under emulation a thread of the host, whose device memory all others see, as GPUs see each other's by
// NVLink.
#pragma once

#include <kf/rung.h>

namespace kf::all_reduce {

constexpr int kMostWorkers = 8, kMostBlocks = 512;
constexpr int64_t kMostWidth = 4096;
constexpr int kMostThreads = 512;  // of a block that has a row of that width

// A worker's buffer: this, then for each block two pieces that others read, then three rows from each worker, that
// these write. Each block has a part of its own and counts its own turns, so a launch may have as many blocks as it
// likes, if all workers' have as many. Begins as zeros; what is behind it, as ones in all bits.
struct Header {
  uint32_t arrived[kMostBlocks][kMostWorkers];  // the turn for which a worker's piece is there
  uint32_t pulled[kMostBlocks];                 // turns so far, by pieces that are read
  uint32_t pushed[kMostBlocks];                 // the slot of the last row that was written
  uint32_t words[kMostBlocks];                  // of the last row that was written
  uint32_t told;                                // whether somebody has told that they have waited too long
  uint32_t unused[3];
};
constexpr int64_t kPieceBytes = 16384;

struct Args {
  const void* x;       // all at multiples of 16 bytes
  const void* x_bias;  // [width], as weight and bias
  const void* residual;
  const void* weight;
  const void* bias;
  void* y;
  void* sum;
  int64_t rows;
  int64_t width;  // up to kMostWidth
  double eps;
  DType dtype;

  void* peers[kMostWorkers];  // each worker's buffer, at a multiple of 16 bytes
  int rank;                   // this worker's number
  int workers;
  int64_t slot_bytes;   // of a row that a worker writes to another one's buffer: 4·width at least, a multiple of 16
  int64_t patience_ns;  // who waits longer for another worker ends the kernel with an error
};

// How large a buffer is; and, the other way, the slots of one that is so large.
constexpr int64_t buffer_bytes(int64_t width, int64_t workers) {
  return int64_t{sizeof(Header)} + kMostBlocks * (2 * kPieceBytes + 3 * workers * ((width + 3) / 4 * 16));
}
constexpr int64_t slot_bytes(int64_t buffer, int64_t workers) {
  return ((buffer - int64_t{sizeof(Header)}) / kMostBlocks - 2 * kPieceBytes) / (3 * workers) / 16 * 16;
}

// What `auto` takes on a GPU: see pages/parallel.md.
inline const char* automatic(const Args&) { return "v4_push"; }

}  // namespace kf::all_reduce

// v1_nccl: torch.distributed's all_reduce, then step 3's residual_layer_norm; model/all_reduce.py
#define KF_OP all_reduce
#define KF_RUNGS(RUNG)                              \
  RUNG(v2_peer, always, no_scratch, "the sum of x") \
  RUNG(v3_fused, always, no_scratch)                \
  RUNG(v4_push, always, no_scratch)
#include <kf/rung_list.h>
