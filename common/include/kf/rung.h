// A rung: one implementation of an op, and the table that lists an op's rungs.
//
// Plain C++, no CUDA and no torch: the kernels, the tables and the host code all include it.
#pragma once

#include <cstdint>
#include <string>

namespace kf {

enum class DType : int { kFloat32, kFloat16, kBFloat16, kFloat64 };

// Bytes of an element.
constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// A row in the table. `can_implement` answers why not, in words that follow "rung 'v2_vector' "; an empty answer is a
// yes. `scratch_bytes` is set by rungs that need global memory between launches: Args then has a member `scratch`.
// `rounds` names what a rung rounds to the tensors' dtype on the way, where others round once, at the end; its header's
// Limits say so too. The contract in kernel_fusion/testing.py finds a rung that rounds and does not say so.
// `varies`: blocks add to the same numbers in any order, so two runs may differ in their last bits. Such a rung
// refuses, or warns, where torch.use_deterministic_algorithms is set, as torch's own operations do.
template <class Args>
struct Rung {
  const char* name;
  void (*launch)(const Args& args, void* stream);
  std::string (*can_implement)(const Args& args);
  int64_t (*scratch_bytes)(const Args& args) = nullptr;
  const char* rounds = nullptr;
  bool varies = false;
};

// The rungs of one op on one backend, in the order of the lesson: an array of rows, which must outlive this. An empty
// table: this build lacks the backend.
template <class Args>
struct Rungs {
  const Rung<Args>* first = nullptr;
  int count = 0;

  Rungs() = default;
  template <int kCount>
  Rungs(const Rung<Args> (&rows)[kCount]) : first(rows), count(kCount) {}  // not explicit: `return kRungs;`

  const Rung<Args>* begin() const { return first; }
  const Rung<Args>* end() const { return first + count; }
};

}  // namespace kf
