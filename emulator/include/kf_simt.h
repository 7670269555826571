// kf::simt: what a host program may ask of the emulation. No CUDA name is declared here.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace kf::simt {

// A fault of a kernel that the emulation found. Its text names the kernel, the block and the thread.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Kernels launched by this library so far. A launch refused with an error code does not count.
std::uint64_t launch_count();

// The order of a block's threads between barriers: "forward", "reverse" or "random:SEED".
// An empty string leaves the choice to KF_SIMT_SCHEDULE again. Throws std::invalid_argument on anything else.
void set_schedule(const std::string& schedule);

// How many OS threads a launch may use, unless its blocks wait for each other. 0 leaves it to KF_SIMT_THREADS, or else
// to the number of cores.
void set_threads(int threads);

// What happens when threads of a block have exited before the others reach a barrier: an error, or a warning after
// which the barrier counts the remaining threads, as CUDA does. kDefault leaves it to KF_SIMT_EXITED=error|warn.
enum class Exited { kDefault, kError, kWarn };
void set_exited_at_barrier(Exited mode);

// Limits after which a kernel that makes no progress becomes an Error; 0 switches a limit off, a negative value
// restores the default. spin_seconds: every running thread polls memory that no longer changes. Default 0.5, or
// KF_SIMT_SPIN_SECONDS. busy_seconds, of CPU time: one thread computes without meeting a barrier, a warp operation or
// an atomic, or for ten times as long no block ends. Default 60, or KF_SIMT_BUSY_SECONDS.
void set_watchdog(double spin_seconds, double busy_seconds);

}  // namespace kf::simt
