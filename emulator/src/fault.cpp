#include "fault.h"

#include <dlfcn.h>
#include <link.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace kf::simt {

std::uintptr_t code_begin = 0, code_end = 0;

#if defined(__linux__) && defined(__x86_64__)
namespace {

constexpr int kRegisters[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

// The instruction at which the processor stopped, as far as its operand in memory and divisions go.
struct Instruction {
  bool known = false;
  unsigned length = 0;
  unsigned opcode = 0;                // the last byte of it; 0x100 and more where it has several
  unsigned extension = 0;             // /0 to /7
  bool wide = false, narrow = false;  // 64 and 16 bits
  int number = 0;                     // of the register that is the operand, if it is not in memory
  bool in_memory = false;
  std::uintptr_t address = 0;

  explicit Instruction(const greg_t* registers) {
    const auto* const begin = reinterpret_cast<const std::uint8_t*>(registers[REG_RIP]);
    const std::uint8_t* at = begin;
    for (; *at == 0x66 || *at == 0xf2 || *at == 0xf3; ++at) narrow = narrow || *at == 0x66;
    unsigned rex = 0;
    if ((*at & 0xf0) == 0x40) rex = *at++;
    if (*at == 0xc5) {  // VEX in two bytes
      rex = (~at[1] >> 5 & 4);
      at += 2;
      opcode = 0x100;
    } else if (*at == 0xc4) {  // and in three
      rex = ~at[1] >> 5 & 7;
      at += 3;
      opcode = 0x100;
    } else if (*at == 0x0f) {
      ++at;
      opcode = 0x100;
      if (*at == 0x38 || *at == 0x3a) ++at;
    }
    opcode |= *at++;
    wide = rex & 8;
    const std::uint8_t modrm = *at++;
    extension = modrm >> 3 & 7;
    number = static_cast<int>((modrm & 7) | (rex & 1) << 3);
    const unsigned mode = modrm >> 6;
    in_memory = mode != 3;
    if (in_memory) {
      const auto value = [&](unsigned index) { return static_cast<std::uintptr_t>(registers[kRegisters[index]]); };
      bool relative = false;
      if ((modrm & 7) == 4) {
        const std::uint8_t sib = *at++;
        const unsigned index = (sib >> 3 & 7) | (rex & 2) << 2, base = (sib & 7) | (rex & 1) << 3;
        if (index != 4) address += value(index) << (sib >> 6);
        if ((sib & 7) == 5 && mode == 0) {
          address += displacement(&at, 4);
        } else {
          address += value(base);
        }
      } else if ((modrm & 7) == 5 && mode == 0) {
        relative = true;
        address += displacement(&at, 4);
      } else {
        address += value(static_cast<unsigned>(number));
      }
      if (mode == 1) address += displacement(&at, 1);
      if (mode == 2) address += displacement(&at, 4);
      if (relative) address += reinterpret_cast<std::uintptr_t>(at);  // if nothing follows
    }
    length = static_cast<unsigned>(at - begin);
    known = *begin != 0x62 && *begin != 0x64 && *begin != 0x65;  // AVX-512, and segments
  }

  static std::uintptr_t displacement(const std::uint8_t** at, unsigned bytes) {
    std::int32_t value = static_cast<std::int8_t>(**at);
    if (bytes == 4) std::memcpy(&value, *at, sizeof(value));
    *at += bytes;
    return static_cast<std::uintptr_t>(static_cast<std::intptr_t>(value));
  }
};

}  // namespace

Fault::Fault(int signal, const siginfo_t* info, const void* context) {
  const greg_t* const registers = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs;
  at = static_cast<std::uintptr_t>(registers[REG_RIP]);
  stack = static_cast<std::uintptr_t>(registers[REG_RSP]);
  kind = signal == SIGFPE ? kDivision : signal == SIGILL ? kInstruction : kAccess;
  if (!is_access()) return;
  address = info->si_addr;
  write = registers[REG_ERR] & 2;
  if (signal == SIGSEGV && info->si_code == SI_KERNEL) {  // the processor does not say which address it was
    const Instruction instruction(registers);
    const std::uintptr_t high = instruction.address >> 47;
    kind = instruction.known && instruction.in_memory && high == 0 ? kAlignment : kNoAddress;
    address = reinterpret_cast<const void*>(instruction.address);
    write = (instruction.opcode & 0xff) == 0x29 || (instruction.opcode & 0xff) == 0x7f;  // movaps, movdqa to memory
  }
}

Division divide_as_a_gpu(void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const Instruction instruction(registers);
  const bool division = (instruction.opcode & ~1u) == 0xf6 && instruction.extension >= 6;
  if (!instruction.known || !division) return Division::kNone;
  const unsigned bytes = instruction.opcode == 0xf6 ? 1 : instruction.wide ? 8 : instruction.narrow ? 2 : 4;
  const std::uint64_t mask = ~std::uint64_t{0} >> (64 - 8 * bytes);
  std::uint64_t divisor = 0;
  if (instruction.in_memory) {
    std::memcpy(&divisor, reinterpret_cast<const void*>(instruction.address), bytes);
  } else {
    divisor = static_cast<std::uint64_t>(registers[kRegisters[instruction.number]]) & mask;
    if (bytes == 1 && instruction.length == 2 && instruction.number >= 4) {  // ah, ch, dh, bh
      divisor = static_cast<std::uint64_t>(registers[kRegisters[instruction.number - 4]]) >> 8 & mask;
    }
  }
  const std::uint64_t dividend = static_cast<std::uint64_t>(registers[REG_RAX]) & mask;
  const bool halves = bytes == 8 && (dividend | divisor) >> 32 == 0;
  const std::uint64_t quotient = divisor != 0 ? dividend : halves ? 0xffffffffu : mask;
  const std::uint64_t rest = divisor != 0 ? 0 : dividend;
  const auto put = [&](int which, std::uint64_t value, std::uint64_t kept) {
    registers[which] = static_cast<greg_t>((static_cast<std::uint64_t>(registers[which]) & kept) | value);
  };
  if (bytes == 1) {
    put(REG_RAX, quotient | rest << 8, ~std::uint64_t{0xffff});
  } else {
    put(REG_RAX, quotient, bytes == 2 ? ~mask : 0);
    put(REG_RDX, rest, bytes == 2 ? ~mask : 0);
  }
  registers[REG_RIP] += instruction.length;
  return divisor == 0 ? Division::kByZero : Division::kByMinusOne;
}

#elif defined(__linux__) && defined(__aarch64__)

Fault::Fault(int signal, const siginfo_t* info, const void* context) {
  const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
  at = static_cast<std::uintptr_t>(machine.pc);
  stack = static_cast<std::uintptr_t>(machine.sp);
  link = static_cast<std::uintptr_t>(machine.regs[30]);
  kind = signal == SIGFPE ? kDivision : signal == SIGILL || signal == SIGTRAP ? kInstruction : kAccess;
  if (!is_access()) return;
  address = info->si_addr;
  if (signal == SIGBUS && info->si_code == BUS_ADRALN) kind = kAlignment;
  // The syndrome stands in one of the records behind the registers: a magic number and the size begin each.
  const auto* record = reinterpret_cast<const unsigned char*>(machine.__reserved);
  for (std::size_t left = sizeof(machine.__reserved); left >= 16;) {
    std::uint32_t magic, size;
    std::memcpy(&magic, record, sizeof(magic));
    std::memcpy(&size, record + 4, sizeof(size));
    if (magic == 0x45535201) {
      std::uint64_t syndrome;
      std::memcpy(&syndrome, record + 8, sizeof(syndrome));
      write = syndrome >> 6 & 1;
      return;
    }
    if (size == 0 || size > left) return;
    record += size;
    left -= size;
  }
}

Division divide_as_a_gpu(void*) { return Division::kNone; }  // this processor refuses none

#else

Fault::Fault(int signal, const siginfo_t* info, const void*)
    : kind(signal == SIGFPE   ? kDivision
           : signal == SIGILL ? kInstruction
                              : kAccess),
      address(info->si_addr) {}

Division divide_as_a_gpu(void*) { return Division::kNone; }

#endif

int Fault::cuda_error() const {
  constexpr int kIllegalAddress = 700, kIllegalInstruction = 715, kMisalignedAddress = 716, kLaunchFailure = 719;
  if (kind == kAlignment) return kMisalignedAddress;
  if (kind == kInstruction) return kIllegalInstruction;
  return kind == kDivision ? kLaunchFailure : kIllegalAddress;
}

const char* Fault::short_text() const {
  if (kind == kDivision) return "divides an integer by zero";
  if (kind == kInstruction) return "comes to a trap of the compiler's";
  if (kind == kStack) return "has used up its stack (KF_SIMT_STACK_KB gives more)";
  if (kind == kAlignment) return "uses an address that is not aligned as its vector must be";
  if (kind == kAccess && address < reinterpret_cast<const void*>(0x10000)) return "accesses memory through null";
  return write ? "writes to an address where it may not" : "reads an address where no memory is";
}

std::string line_of(std::uintptr_t instruction) {
  Dl_info info;
  void* map = nullptr;
  const bool found = dladdr1(reinterpret_cast<const void*>(instruction), &info, &map, RTLD_DL_LINKMAP) != 0;
  if (!found || info.dli_fname == nullptr || std::strchr(info.dli_fname, '\'') != nullptr) return "";
  const auto* const module = static_cast<const link_map*>(map);
  const bool program = module->l_name == nullptr || *module->l_name == '\0';  // whose name is what it was called by
  char file[4096], offset[32];
  const ssize_t length = program ? readlink("/proc/self/exe", file, sizeof(file) - 1) : -1;
  file[length < 0 ? 0 : length] = '\0';
  std::snprintf(offset, sizeof(offset), "0x%zx", static_cast<std::size_t>(instruction - module->l_addr));
  const std::string path = length > 0 ? file : info.dli_fname;
  // -i: where functions are inlined, a line for each, the innermost first.
  const std::string command = "exec addr2line -i -e '" + path + "' " + offset + " 2>/dev/null";
  std::FILE* const answer = popen(command.c_str(), "r");
  if (answer == nullptr) return "";
  char line[4096] = "";
  std::string text;
  while (std::fgets(line, sizeof(line), answer) != nullptr && line[0] != '?') {
    const bool ours = std::strstr(line, "/kf_simt/") != nullptr;  // a CUDA function that the kernel calls
    if (text.empty() || !ours) text = line;
    if (!ours) break;
  }
  while (std::fgets(line, sizeof(line), answer) != nullptr) {  // or its end would be a broken pipe
  }
  pclose(answer);
  if (text.empty()) return "";
  text.erase(std::min(text.find_first_of(" \n"), text.size()));
  // Of code that the compiler put apart, addr2line may know the compiled file instead of the source.
  return text.find(".cpp:") != std::string::npos || text.back() == '?' ? "" : text;
}

void find_own_code() {
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void*) {
        const auto target = reinterpret_cast<std::uintptr_t>(&find_own_code);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& segment = info->dlpi_phdr[i];
          const std::uintptr_t begin = info->dlpi_addr + segment.p_vaddr;
          if (segment.p_type != PT_LOAD || target < begin || target >= begin + segment.p_memsz) continue;
          code_begin = begin;
          code_end = begin + segment.p_memsz;
          return 1;
        }
        return 0;
      },
      nullptr);
}

}  // namespace kf::simt
