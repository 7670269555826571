// Where multiplication may stand for division by the width: for `can_implement`. Plain C++, since the tables include
// it.
#pragma once

#include <cstdint>
#include <string>

namespace kf {

// FastDivide is exact for all elements i < rows·width of a matrix where i·width stays below 2⁶³. Why not, or "".
inline std::string too_large_for_fast_divide(int64_t rows, int64_t width) {
  return rows * width <= INT64_MAX / width ? "" : "takes rows·width² < 2⁶³";
}

}  // namespace kf
