// For the plain C++ versions: element types and a parallel loop. No torch, so that any program can link them.
#pragma once

#include <kf/half.h>
#include <kf/parallel.h>
#include <kf/rung.h>

#include <stdexcept>
#include <type_traits>

namespace kf::cpu {

template <class T>
struct Type {
  using element = T;
};

// The type that sums and functions of T are computed in.
template <class T>
using compute_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls f(Type<T>{}) with the C++ type that `dtype` names.
template <class F>
void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32: return f(Type<float>{});
    case DType::kFloat16: return f(Type<Half>{});
    case DType::kBFloat16: return f(Type<BFloat16>{});
    case DType::kFloat64: return f(Type<double>{});
  }
  throw std::invalid_argument("with_type: unknown dtype");
}

}  // namespace kf::cpu
