// For stand-alone programs only: an Error of the emulation that nobody catches ends the program with its text and exit
// code 1, after what the program has printed. The standard handler would lose output that waits in a buffer.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "kf_simt.h"

namespace {

std::terminate_handler standard = nullptr;

[[noreturn]] void end_with_text() {
  std::fflush(nullptr);
  if (const std::exception_ptr exception = std::current_exception()) {
    try {
      std::rethrow_exception(exception);
    } catch (const kf::simt::Error& error) {
      std::fprintf(stderr, "%s\n", error.what());
      std::_Exit(1);
    } catch (...) {  // the program's own: below
    }
  }
  standard();
  std::abort();
}

[[maybe_unused]] const bool installed = (standard = std::set_terminate(end_with_text), true);

}  // namespace
