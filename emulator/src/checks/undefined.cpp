// What the compiler's checks call (-fsanitize=shift-exponent,integer-divide-by-zero,float-cast-overflow): operations
// that C++ leaves undefined and a GPU does not. In a kernel they end the launch with an Error, or
// KF_SIMT_UNDEFINED=warn names each place once. The host's own operations are left alone.
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "../runtime.h"
#include "kf_simt/math.h"

namespace kf::simt {
namespace {

// The records that g++ and clang hand over.
struct Place {
  const char* file;
  std::uint32_t line, column;
};
struct Type {
  std::uint16_t kind;  // 0: an integer; 1: a floating-point number
  std::uint16_t info;  // 2·log2(bits) + (1 if signed), or bits
  char name[1];        // in quotes

  unsigned bits() const { return kind == 0 ? 1u << (info >> 1) : info; }
  bool is_signed() const { return info & 1; }
  std::string text() const {
    const std::string quoted = name;
    return quoted.size() > 2 ? quoted.substr(1, quoted.size() - 2) : quoted;
  }
};
struct Data {
  Place place;
  const Type *first,
      *second;  // of a shift's operands, of what is converted and the result; a division has the first alone
};
using Value = std::uintptr_t;  // the bits, or where they are if there are more

std::int64_t as_signed(const Type& type, Value value) {
  if (type.bits() > 64) std::memcpy(&value, reinterpret_cast<const void*>(value), sizeof(value));
  if (type.bits() >= 64) return static_cast<std::int64_t>(value);
  const unsigned unused = 64 - type.bits();
  return type.is_signed() ? static_cast<std::int64_t>(value << unused) >> unused
                          : static_cast<std::int64_t>(value << unused >> unused);
}

std::string number(const Type& type, Value value) {
  const std::int64_t number = as_signed(type, value);
  return type.is_signed() ? std::to_string(number) : std::to_string(static_cast<std::uint64_t>(number));
}

}  // namespace

// `outcome` gives what a warning says about the result. Both texts are made where they are needed: of a launch that
// ends, nothing on this stack is destroyed.
template <class Text, class Outcome>
void Worker::undefined(void* record, Text text, Outcome outcome) {
  auto* const data = static_cast<Data*>(record);
  constexpr std::uint32_t kTold = ~0u;
  const bool error = launch_->settings.undefined_is_error;
  // Noted where the sanitizers' own runtime notes it too. The column itself is that of the rewritten line.
  if (!error && __atomic_exchange_n(&data->place.column, kTold, __ATOMIC_RELAXED) == kTold) return;
  const auto whole = [&] { return text() + " at " + data->place.file + ":" + std::to_string(data->place.line); };
  if (error) fail(whole);
  undisturbed([&] {
    const race::Quiet quiet;
    std::fprintf(stderr, "warning: %s: %s. %s\n", describe(current_).c_str(), whole().c_str(), outcome().c_str());
  });
}

void Worker::undefined_shift(void* record, std::uintptr_t left, std::uintptr_t right) {
  auto* const data = static_cast<Data*>(record);
  undefined(
      record,
      [&] {
        return "shifts " + number(*data->first, left) + ", an `" + data->first->text() + "` of " +
               std::to_string(data->first->bits()) + " bits, by " + number(*data->second, right);
      },
      [] { return std::string("A GPU shifts all bits out; this processor does not."); });
}

void Worker::undefined_division(void* record, std::uintptr_t left, std::uintptr_t right) {
  auto* const data = static_cast<Data*>(record);
  // The processor stops at it now.
  division_named_ = as_signed(*data->first, right) == 0 ? Division::kByZero : Division::kByMinusOne;
  undefined(
      record, [&] { return "divides " + number(*data->first, left) + " by " + number(*data->first, right); },
#if defined(__x86_64__)
      [] { return std::string("The result is that of an H200."); }
#else
      [] { return std::string("A GPU's result may be another."); }
#endif
  );
}

void Worker::undefined_cast(void* record, std::uintptr_t value) {
  auto* const data = static_cast<Data*>(record);
  const bool is_double = data->first->bits() == 64;
  if (!is_double && data->first->bits() != 32) return;
  double x;
  if (is_double) {
    std::memcpy(&x, &value, sizeof(x));
  } else {
    x = double{bit_cast_to<float>(static_cast<unsigned>(value))};
  }
  const Type& to = *data->second;
  // Both processors make 32 bits of it and take the low ones.
  if (to.bits() < 32 && x > (to.is_signed() ? -2147483649.0 : -1.0) && x < 2147483648.0) return;
  undefined(
      record,
      [&] {
        char text[64];
        std::snprintf(text, sizeof(text), "%.9g", x);
        return "converts " + std::string(text) + " to `" + to.text() + "`, where it has no place,";
      },
      [&] {
        const std::string there =
            to.bits() >= 64  ? (to.is_signed() ? std::to_string(saturating_cast<std::int64_t>(x, is_double))
                                               : std::to_string(saturating_cast<std::uint64_t>(x, is_double)))
            : to.is_signed() ? std::to_string(as_signed(to, static_cast<unsigned>(saturating_cast<int>(x, is_double))))
                             : std::to_string(as_signed(to, saturating_cast<unsigned>(x, is_double)));
        return "A GPU makes " + there + " of it; here only a conversion that is written as a cast does.";
      });
}

}  // namespace kf::simt

// Those that go on afterwards, as g++ declares them: values are passed in pointers.
extern "C" {

using kf::simt::Worker;
using Value = std::uintptr_t;

void __ubsan_handle_shift_out_of_bounds(void* data, void* left, void* right) {
  if (Worker* const worker = Worker::in_kernel()) {
    worker->undefined_shift(data, reinterpret_cast<Value>(left), reinterpret_cast<Value>(right));
  }
}
void __ubsan_handle_divrem_overflow(void* data, void* left, void* right) {
  if (Worker* const worker = Worker::in_kernel()) {
    worker->undefined_division(data, reinterpret_cast<Value>(left), reinterpret_cast<Value>(right));
  }
}
void __ubsan_handle_float_cast_overflow(void* data, void* value) {
  if (Worker* const worker = Worker::in_kernel()) worker->undefined_cast(data, reinterpret_cast<Value>(value));
}

}  // extern "C"
