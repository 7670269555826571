// What holds the operands of inline PTX. A register is a bool, an unsigned integer, a float or a double; an instruction
// reads its bits as the type that it names.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace kf::simt::ptx {

using namespace ::kf::simt;  // translated code finds all names in here, whatever the program calls its own

// The bits of x as a T. An integer of another size is converted.
template <class T, class X>
T as(X x) {
  if constexpr (sizeof(T) == sizeof(X) && !std::is_same_v<T, bool> && !std::is_same_v<X, bool>) {
    T to;
    std::memcpy(static_cast<void*>(&to), &x, sizeof(T));
    return to;
  } else {
    static_assert(std::is_integral_v<T> && (std::is_integral_v<X> || std::is_enum_v<X>),
                  "inline PTX: an operand's size differs from that of the instruction's type");
    return static_cast<T>(x);
  }
}

// An operand as the register that its constraint asks for.
template <class Register, class X>
Register input(X x) {
  return as<Register>(x);
}

// A register that nothing has written.
template <class T>
constexpr T undefined() {
  if constexpr (std::is_same_v<T, bool>) {
    return false;
  } else if constexpr (std::is_floating_point_v<T>) {
    return std::numeric_limits<T>::quiet_NaN();
  } else {
    return static_cast<T>(~T{0});
  }
}

template <class To, class Register>
void output(To& to, Register value) {
  to = as<std::remove_volatile_t<To>>(value);
}

template <class Part, int N, class T>
std::array<Part, N> split(T whole) {
  static_assert(sizeof(Part) * N == sizeof(T), "");
  std::array<Part, N> parts;
  std::memcpy(parts.data(), &whole, sizeof(T));
  return parts;
}

template <class T, class Part, std::size_t N>
T join(const std::array<Part, N>& parts) {
  static_assert(sizeof(Part) * N == sizeof(T), "");
  T whole;
  std::memcpy(&whole, parts.data(), sizeof(T));
  return whole;
}

}  // namespace kf::simt::ptx
