// The second copies of the weights that v3_persistent and v4_clusters read, of each backend; the host keeps their
// memory (Args::packed).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "rungs.h"

namespace kf::decode_step {

enum class Wanted : uint32_t { kNothing, kX, kQkv, kAttended, kHidden, kOfLayer, kWeights, kRoom, kLabel };

// Their first 16 bytes, where a message would be: how many launches there were, and what the first thread that gave up
// had waited for, in which layer (or for which tile), in which block.
struct State {
  uint32_t epoch, wanted, where, block;
};

// What v4_clusters takes for a wider model, and on fewer multiprocessors: of how many steps of 64 its kernel is made at
// least, and how many clusters there are at most.
struct ClusterForm {
  int least_steps = 0, most_clusters = 16;
};

// What a launch says that gave up, or "".
inline std::string failure(const State& state) {
  static constexpr const char* kWanted[] = {"x",       "q, k and v", "attention's output", "hidden values",
                                            "weights", "weights",    "room for weights"};
  const Wanted wanted{state.wanted};
  if (wanted == Wanted::kNothing) return "";
  if (wanted >= Wanted::kLabel) {
    return "`packed` must be what `decode_pack` made of weights of this dtype and these shapes; the logits are NaN";
  }
  return "the launch gave up: block " + std::to_string(state.block) + " waited in vain for " +
         kWanted[state.wanted - 1] + (wanted < Wanted::kWeights ? " of layer " : " of tile ") +
         std::to_string(state.where) + "; its logits are NaN. The next token may be tried";
}

}  // namespace kf::decode_step

#define KF_PACKED(backend)                                                                                          \
  namespace kf::backend::decode_step {                                                                              \
  /* Their size; 0, and why not, where they cannot be made. */                                                      \
  int64_t v3_persistent_bytes(const Args& args, std::string& why_not);                                              \
  int64_t v4_clusters_bytes(const Args& args, std::string& why_not, const kf::decode_step::ClusterForm& form = {}); \
  void v3_persistent_pack(const Args& args, void* stream);                                                          \
  void v4_clusters_pack(const Args& args, void* stream, const kf::decode_step::ClusterForm& form = {});             \
  /* In another form, for tests; weights are packed for the same one. */                                            \
  void v4_clusters_of(const Args& args, const kf::decode_step::ClusterForm& form, void* stream);                    \
  inline int64_t packed_bytes(std::string_view rung, const Args& args, std::string& why_not) {                      \
    return rung == "v4_clusters" ? v4_clusters_bytes(args, why_not) : v3_persistent_bytes(args, why_not);           \
  }                                                                                                                 \
  inline void pack_weights(std::string_view rung, const Args& args, void* stream) {                                 \
    rung == "v4_clusters" ? v4_clusters_pack(args, stream) : v3_persistent_pack(args, stream);                      \
  }                                                                                                                 \
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
