// Copies by a whole group. A copy has finished when its threads come back, but only `wait` lets a thread see what the
// others have copied.
#pragma once

#include "../cooperative_groups.h"

namespace kf::simt {

namespace cooperative_groups {

// `bytes` bytes.
template <class Group>
void memcpy_async(const Group& group, void* to, const void* from, std::size_t bytes) {
  const auto step = static_cast<std::size_t>(group.num_threads()) * 16;
  for (auto at = static_cast<std::size_t>(group.thread_rank()) * 16; at < bytes; at += step) {
    std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, bytes - at < 16 ? bytes - at : 16);
  }
}
// As many elements as both have.
template <class Group, class T>
void memcpy_async(const Group& group, T* to, std::size_t to_count, const T* from, std::size_t from_count) {
  memcpy_async(group, static_cast<void*>(to), static_cast<const void*>(from),
               (to_count < from_count ? to_count : from_count) * sizeof(T));
}

template <class Group>
void wait(const Group& group, CallSite site = CallSite::here()) {
  group.sync(site);
}
// All copies but the last `Stages` have arrived; here, all.
template <unsigned Stages, class Group>
void wait_prior(const Group& group, CallSite site = CallSite::here()) {
  group.sync(site);
}

}  // namespace cooperative_groups
}  // namespace kf::simt
