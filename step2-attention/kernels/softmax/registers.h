// How many threads share a row that stays in their registers.
#pragma once

#include "row.h"

namespace kf::KF_BACKEND::softmax {

template <int kThreadsOfRow, int kVectorsOfThread>
struct RowShape {
  static constexpr int kThreads = kThreadsOfRow, kVectors = kVectorsOfThread;
  static constexpr int kRows = kThreads > kWarpSize ? 1 : kVectors > 2 ? 2 : 4;  // of a block
};

// Why rows do not fit into registers: 8 vectors of each of 512 threads; "" if they do.
template <class Args>
std::string can_implement_in_registers(const Args& a) {
  if (a.rows > INT32_MAX || vectors_of(a) <= 4096) return can_implement_a_block_a_row(a.rows);
  return "takes rows of at most 4096 vectors of 16 bytes, got width " + std::to_string(a.width);
}

// Calls f with the shape for rows of so many vectors.
template <class F>
void with_shape(int64_t vectors, F&& f) {
  if (vectors <= 32) return f(RowShape<32, 1>{});
  if (vectors <= 64) return f(RowShape<32, 2>{});
  if (vectors <= 96) return f(RowShape<32, 3>{});
  if (vectors <= 128) return f(RowShape<32, 4>{});
  if (vectors <= 160) return f(RowShape<32, 5>{});
  if (vectors <= 192) return f(RowShape<32, 6>{});
  if (vectors <= 224) return f(RowShape<32, 7>{});
  if (vectors <= 256) return f(RowShape<32, 8>{});
  if (vectors <= 512) return f(RowShape<128, 4>{});
  if (vectors <= 1024) return f(RowShape<128, 8>{});
  if (vectors <= 2048) return f(RowShape<256, 8>{});
  f(RowShape<512, 8>{});
}

}  // namespace kf::KF_BACKEND::softmax
