// A ring of stages in shared memory between producers and consumers: what PipelineAsync is in CUTLASS.
//
// Each stage has two mbarriers. Full: its bytes have come. Empty: all consumers have released it. The life of a stage:
//
//   producer   acquire ─ issue loads ┐                      acquire …
//   TMA                              └ bytes ─ full         │
//   consumer                           wait ┴─ read ─ release ┴─ empty
//
// Producers and consumers each go round the ring with a state of their own. A barrier's phases alternate: a consumer
// waits for the phase that it is in, a producer for the one before, which of a fresh barrier counts as over: so the
// first round finds all stages empty.
#pragma once

#include <step2/mbarrier.h>

namespace kf::KF_BACKEND {

// Where in a ring a thread is: at which stage, and in which phase of its barriers.
template <int kStages>
struct PipelineState {
  int index = 0;
  int phase = 0;
  __device__ void advance() {
    if (++index == kStages) index = 0, phase ^= 1;
  }
};

template <int kCount>
struct Pipeline {
  static constexpr int kStages = kCount;
  using State = PipelineState<kStages>;
  uint64_t full[kStages], empty[kStages];

  // By one thread. How many arrivals make a stage empty, and how many, beside the bytes that they announce, full.
  __device__ __forceinline__ void init(uint32_t consumers, uint32_t producers = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(&full[stage], producers);
      mbarrier_init(&empty[stage], consumers);
    }
  }

  __device__ __forceinline__ void producer_acquire(const State& state) {
    mbarrier_wait(&empty[state.index], state.phase ^ 1);
  }
  // And announces the bytes that TMA brings, by which the stage becomes full.
  __device__ __forceinline__ void producer_acquire(const State& state, uint32_t bytes) {
    producer_acquire(state);
    mbarrier_arrive_expect_tx(&full[state.index], bytes);
  }
  // Where no bytes were announced: threads have written the stage.
  __device__ __forceinline__ void producer_commit(const State& state) { mbarrier_arrive(&full[state.index]); }

  __device__ __forceinline__ void consumer_wait(const State& state) { mbarrier_wait(&full[state.index], state.phase); }
  __device__ __forceinline__ void consumer_release(int stage) { mbarrier_arrive(&empty[stage]); }
};

}  // namespace kf::KF_BACKEND
