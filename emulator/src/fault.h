// What the processor says about a fault, and what can be done about it.
#pragma once

#include <signal.h>

#include <cstdint>
#include <string>

namespace kf::simt {

struct Fault {
  enum Kind { kAccess, kNoAddress, kAlignment, kStack, kDivision, kInstruction };

  Fault() = default;
  Fault(int signal, const siginfo_t* info, const void* context);

  bool is_access() const { return kind <= kStack; }
  int cuda_error() const;          // what CUDA would call it
  const char* short_text() const;  // without an address

  Kind kind = kAccess;
  const void* address = nullptr;  // unless kNoAddress
  bool write = false;
  std::uintptr_t at = 0;     // the instruction
  std::uintptr_t stack = 0;  // the stack pointer
  std::uintptr_t link = 0;   // where the function returns to, if a register holds it
};

// Carries out the integer division that the processor refused, as a GPU would: n / 0 is -1, or 2³²-1 for 64-bit numbers
// whose first halves are 0, and n % 0 is n; the smallest number over -1 is itself. kNone where that cannot be done.
enum class Division { kNone, kByZero, kByMinusOne };
Division divide_as_a_gpu(void* context);

// The source line of an instruction of this program or library, as "file:line"; empty without debug information.
std::string line_of(std::uintptr_t instruction);

// The executable segment that holds the kernels, which is this code's own.
extern std::uintptr_t code_begin, code_end;
void find_own_code();

}  // namespace kf::simt
