// The bounds of the keys that exist, as ops with attention take them: the check before a launch.
#pragma once

#include <kf/host.h>

#include <optional>
#include <utility>

namespace kf {

// Of batch b the keys key_begin[b] ≤ j < key_end[b] exist: each an int32 tensor [B] beside `q`, or none.
inline void check_key_bounds(const char* op, const at::Tensor& q, const std::optional<at::Tensor>& key_begin,
                             const std::optional<at::Tensor>& key_end) {
  for (const auto& [name, bound] : {std::pair{"key_begin", &key_begin}, std::pair{"key_end", &key_end}}) {
    if (!*bound) continue;
    check_type(op, name, **bound, at::kInt);
    check_device(op, name, **bound, "q", q);
    check_shape(op, name, **bound, {q.size(0)});
  }
}

}  // namespace kf
