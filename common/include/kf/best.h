// For `pieces`, which are other ops one after the other, and rungs that begin with another op: the rung that such an
// op's `auto` would take.
#pragma once

#include <kf/rung.h>

#include <stdexcept>
#include <string>
#include <string_view>

namespace kf::KF_BACKEND {

// The rung of `table` called `wanted` if it can do this on the current device, else the last that can and does not
// vary.
template <class Args>
const Rung<Args>& best_rung(const Rungs<Args>& table, std::string_view wanted, const Args& args) {
  for (const Rung<Args>& rung : table) {
    if (wanted == rung.name && rung.can_implement(args).empty()) return rung;
  }
  const Rung<Args>* last = nullptr;
  for (const Rung<Args>& rung : table) {
    if (!rung.varies && rung.can_implement(args).empty()) last = &rung;
  }
  if (last == nullptr) throw std::runtime_error("no rung can do this: " + table.begin()->can_implement(args));
  return *last;
}

// Sizes in scratch memory, where several things lie one behind the other.
constexpr int64_t padded_bytes(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// What such a rung needs of it.
template <class Args>
int64_t scratch_bytes_of(const Rung<Args>& rung, const Args& args) {
  return rung.scratch_bytes == nullptr ? 0 : padded_bytes(rung.scratch_bytes(args));
}

// Why no rung can do this, or "".
template <class Args>
std::string can_implement_any(const Rungs<Args>& table, const Args& args) {
  for (const Rung<Args>& rung : table) {
    if (rung.can_implement(args).empty()) return "";
  }
  return table.begin()->can_implement(args);
}

}  // namespace kf::KF_BACKEND
