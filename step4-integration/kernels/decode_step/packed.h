// The second copy of the weights that v3_persistent reads, of each backend; the host keeps its memory (Args::packed).
#pragma once

#include <cstdint>
#include <string>

#include "rungs.h"

namespace kf::decode_step {

enum class Wanted : uint32_t { kNothing, kX, kQkv, kAttended, kHidden, kWeights, kRoom, kLabel };

// Their first 16 bytes, where a message would be: how many launches there were, and what the first thread that gave up
// had waited for, in which layer (or for which tile), in which block.
struct State {
  uint32_t epoch, wanted, where, block;
};

}  // namespace kf::decode_step

#define KF_PACKED(backend)                                      \
  namespace kf::backend::decode_step {                          \
  /* Its size; 0, and why not, where it cannot be made. */      \
  int64_t packed_bytes(const Args& args, std::string& why_not); \
  void pack_weights(const Args& args, void* stream);            \
  /* What a launch says that gave up, or "". */                 \
  std::string failure(const kf::decode_step::State& state);     \
  }
#ifdef KF_BACKEND
KF_PACKED(KF_BACKEND)
#else
KF_PACKED(emulated)
#ifdef KF_WITH_CUDA
KF_PACKED(gpu)
#endif
#endif
#undef KF_PACKED
