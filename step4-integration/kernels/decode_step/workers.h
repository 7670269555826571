// Several workers that share a model, each on a GPU of its own: as many heads, columns of the MLP and tokens as it has.
//
// The products that end a half block give a part of the sum that goes to the residual stream. Each worker writes its
// part straight into the buffers of all, its own too, and the next product's kernels, which read the stream anyway, add
// up what has come: there is no launch for the all-reduce. Words say themselves that they are there, in three slots
// that take turns, as in all_reduce's v4_push: a turn's kernel clears the slot of the turn before, into which nobody
// writes until this worker has sent its next part. A token has 2·layers + 1 turns; the first is the embedding's, whose
// rows lie with the worker that has the token.
#pragma once

#include "../all_reduce/words.h"
#include "rows.h"
#include "shared_buffer.h"

#include <cstring>

namespace kf::KF_BACKEND::decode_step {

using all_reduce::kNothing, all_reduce::kSlots, kf::decode_step::Mail;

// A worker's buffer, as a kernel has it.
struct Box {
  Mail* mail;
  int workers, width;

  __host__ __device__ Box(const Args& a, int worker)
      : mail(static_cast<Mail*>(a.workers.peers[worker])), workers(a.workers.count), width(static_cast<int>(a.width)) {}

  // What `from` sends in that turn: [batch, width].
  __device__ float* part(int from, uint32_t turn) const {
    const uint32_t number = turn % kSlots * static_cast<uint32_t>(workers) + static_cast<uint32_t>(from);
    return reinterpret_cast<float*>(mail + 1) + int64_t{number} * kMostRows * width;
  }

  // The slot of the token's first turn: of this token once the kernel in front has ended, before perhaps of the last.
  __device__ uint32_t first_turn() const {
    uint32_t word[1];
    all_reduce::load_words(&mail->first, word);
    return word[0];
  }

  // By all threads of a block: nothing stands any more in that turn's slot.
  __device__ void clear(uint32_t turn, int rows) const {
    const uint32_t nothing[4] = {kNothing, kNothing, kNothing, kNothing};
    for (int from = 0; from < workers; ++from) {
      auto* const words = reinterpret_cast<uint32_t*>(part(from, turn));
      for (int i = 4 * static_cast<int>(threadIdx.x); i < rows * width; i += 4 * kThreads) {
        all_reduce::store_words(words + i, nothing);
      }
    }
  }
};

// ---- a product's sums, sent; the bias is added where they arrive ----

struct Send {
  using Element = float;
  static constexpr bool kAdds = false, kSends = true;
  Args a;
  int turn;  // of the token's

  __device__ Box own() const { return {a, a.workers.rank}; }
  __device__ float* address(int row, int column) const {
    return own().part(a.workers.rank, 0) + row * a.width + column;
  }
  // `first`: the slot of the token's first turn, which is known when the kernel in front has ended.
  __device__ uint32_t begin() const { return own().first_turn(); }
  __device__ void send(const float* address, float sum, uint32_t first) const {
    const int64_t at = address - own().part(a.workers.rank, 0);
    uint32_t word[1] = {__float_as_uint(sum)};
    if (word[0] == kNothing) word[0] = 0x7fffffffu;
    for (int away = 1; away <= a.workers.count; ++away) {  // its own at last
      const Box to(a, (a.workers.rank + away) % a.workers.count);
      all_reduce::store_words(reinterpret_cast<uint32_t*>(to.part(a.workers.rank, first + turn) + at), word);
    }
  }
};

// ---- the residual stream, when a turn's parts have come ----

template <class T>
struct Arrived {
  static constexpr int kTogether = 4;  // workers that are asked at once: one after the other each takes its time
  using Words = uint32_t[kTogether][4];

  Norm<T> norm;
  const float* x;  // before; [batch, width]
  float* next;     // and after: one block keeps it
  const T* bias;   // of the product that was sent, or null
  Box box;
  int rank, turn;
  int64_t patience_ns;
  Vector<T, 4> of_bias[kOfThread] = {};
  uint32_t likely_first = 0;

  __device__ void prepare() {
    norm.prepare();
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (bias != nullptr && norm.column(i) < norm.width) of_bias[i] = load_vector<4>(bias + norm.column(i));
    }
    likely_first = box.first_turn();
  }

  // What stands there of workers `from` on.
  __device__ __forceinline__ void ask(Words& got, int from, uint32_t of_turn, int64_t at) const {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const auto* const words = reinterpret_cast<const uint32_t*>(box.part(from + k, of_turn) + at);
      if (from + k < box.workers) all_reduce::load_words(words, got[k]);
    }
  }
  // The last worker of whom something is missing, or −1.
  __device__ __forceinline__ int missing_of(const Words& got, int from) const {
    int missing = -1;
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (from + k < box.workers && !all_reduce::none_is_nothing(got[k])) missing = from + k;
    }
    return missing;
  }

  template <int kRows>
  __device__ __forceinline__ void fill(const Part<T>& part) const {
    const uint32_t now = box.first_turn() + turn;
    // One row's words are asked for while that is on its way.
    Words early[kOfThread] = {};
    const auto ask_early = [&](uint32_t of_turn) {
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
        if (norm.column(i) < norm.width) ask(early[i], 0, of_turn, norm.column(i));
      }
    };
    if constexpr (kRows == 1) {
      ask_early(likely_first + turn);
      if (now != likely_first + turn) ask_early(now);
    }
    const bool keeps = blockIdx.x == 0 && blockIdx.y == 0;
    if (keeps) box.clear(now + kSlots - 1, part.batch);
    const all_reduce::Waiting who{"decode_step", rank, patience_ns, &box.mail->told};
    norm.template fill<kRows>(part, [&](int row, int i, int column) {
      const int64_t at = row * norm.width + column;
      const float4 before = __ldcg(reinterpret_cast<const float4*>(x + at));
      float more[4];
      widen(of_bias[i], more);
      float4 sum = {before.x + more[0], before.y + more[1], before.z + more[2], before.w + more[3]};
#pragma unroll 1
      for (int from = 0; from < box.workers; from += kTogether) {  // in their order: all get the same bits
        Words got;
        bool asked = kRows == 1 && from == 0;
        if (asked) memcpy(got, early[i], sizeof got);
        int missing = -1;
        const auto here = [&] {
          if (!asked) ask(got, from, now, at);
          asked = false;
          missing = missing_of(got, from);
          return missing < 0;
        };
        all_reduce::wait_for(who, here, [&] { return missing; });
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          if (from + k >= box.workers) break;
          sum = {sum.x + __uint_as_float(got[k][0]), sum.y + __uint_as_float(got[k][1]),
                 sum.z + __uint_as_float(got[k][2]), sum.w + __uint_as_float(got[k][3])};
        }
      }
      if (keeps) *reinterpret_cast<float4*>(next + at) = sum;
      return sum;
    });
  }
};

// ---- the first turn, by one block: x begins as the position's row, and who has the token sends its row ----

template <class T>
__global__ void __launch_bounds__(kThreads) embedding_kernel(const Args a, float* x) {
  const Send out{a, 0};
  Mail& mail = *out.own().mail;
  const uint32_t first = mail.next;
  const int rows_before = static_cast<int>(mail.rows);
  __syncthreads();
  launch_dependent_grids();
  out.own().clear(first + kSlots - 1, rows_before);  // of the token before, which may have had more rows
  if (threadIdx.x == 0) {
    const uint32_t word[1] = {first};  // who begins before this kernel has ended may read it
    all_reduce::store_words(&mail.first, word);
    mail.next = (first + static_cast<uint32_t>(2 * a.layers + 1)) % kSlots;
    mail.rows = static_cast<uint32_t>(a.batch);
  }
  for (int row = 0; row < a.batch; ++row) {
    const Place place(a, row);
    const int64_t id = a.ids[row], own = id - a.workers.first_token;
    const bool exists = place.slot >= 0 && id >= 0 && id < a.workers.tokens;
    const T* const token = own >= 0 && own < a.vocab ? static_cast<const T*>(a.token_weight) + own * a.width : nullptr;
    const T* const position = static_cast<const T*>(a.position_weight) + (exists ? place.before() * a.width : 0);
    for (int column = static_cast<int>(threadIdx.x); column < a.width; column += kThreads) {
      x[row * a.width + column] = exists ? to_compute(position[column]) : NAN;
      out.send(out.address(row, column), exists && token != nullptr ? to_compute(token[column]) : 0.0f, first);
    }
  }
}

}  // namespace kf::KF_BACKEND::decode_step
