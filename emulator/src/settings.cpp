// How launches run, from the environment and from what the program says.
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "runtime.h"

namespace kf::simt {

namespace {

struct Overrides {
  std::mutex mutex;
  std::string schedule;
  int threads = 0;
  Exited exited = Exited::kDefault;
  double spin_seconds = -1, busy_seconds = -1;
};

[[noreturn]] void refuse(const char* name, const std::string& text, const std::string& what) {
  throw std::invalid_argument(std::string(name) + ": `" + text + "` is " + what);
}

Schedule parse_schedule(const std::string& text) {
  if (text == "forward") return {Schedule::kForward, 0};
  if (text == "reverse") return {Schedule::kReverse, 0};
  const std::string prefix = "random:";
  if (text.compare(0, prefix.size(), prefix) == 0) {
    const std::string seed = text.substr(prefix.size());
    if (!seed.empty() && seed.size() <= 18 && seed.find_first_not_of("0123456789") == std::string::npos) {
      return {Schedule::kRandom, std::stoull(seed)};
    }
  }
  refuse("KF_SIMT_SCHEDULE", text, "none of forward, reverse, random:SEED");
}

unsigned number_from_environment(const char* name, unsigned most, unsigned fallback) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return fallback;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || value < 1 || value > static_cast<long>(most)) {
    refuse(name, text, "not a number from 1 to " + std::to_string(most));
  }
  return static_cast<unsigned>(value);
}

double seconds_from_environment(const char* name, double fallback) {
  const char* const text = std::getenv(name);
  if (text == nullptr) return fallback;
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  if (end == text || *end != '\0' || !(value >= 0)) refuse(name, text, "not a number of seconds");
  return value;
}

// True for error, which is what a variable means that is not set.
bool error_or_warning(const char* name) {
  const char* const text = std::getenv(name);
  const std::string mode = text == nullptr ? "error" : text;
  if (mode != "error" && mode != "warn") refuse(name, mode, "none of error, warn");
  return mode == "error";
}

}  // namespace

unsigned cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return static_cast<unsigned>(std::max(1, CPU_COUNT(&set)));
  return std::max(1u, std::thread::hardware_concurrency());
}

void set_schedule(const std::string& schedule) {
  if (!schedule.empty()) parse_schedule(schedule);
  const std::lock_guard<std::mutex> lock(lasting<Overrides>().mutex);
  lasting<Overrides>().schedule = schedule;
}

void set_threads(int threads) {
  const std::lock_guard<std::mutex> lock(lasting<Overrides>().mutex);
  lasting<Overrides>().threads = threads;
}

void set_exited_at_barrier(Exited mode) {
  const std::lock_guard<std::mutex> lock(lasting<Overrides>().mutex);
  lasting<Overrides>().exited = mode;
}

void set_watchdog(double spin_seconds, double busy_seconds) {
  const std::lock_guard<std::mutex> lock(lasting<Overrides>().mutex);
  lasting<Overrides>().spin_seconds = spin_seconds;
  lasting<Overrides>().busy_seconds = busy_seconds;
}

Settings current_settings() {
  Overrides& o = lasting<Overrides>();
  const std::lock_guard<std::mutex> lock(o.mutex);
  Settings settings;
  const char* const schedule = std::getenv("KF_SIMT_SCHEDULE");
  if (!o.schedule.empty()) {
    settings.schedule = parse_schedule(o.schedule);
  } else if (schedule != nullptr && *schedule != '\0') {
    settings.schedule = parse_schedule(schedule);
  }
  settings.threads =
      o.threads > 0 ? static_cast<unsigned>(o.threads) : number_from_environment("KF_SIMT_THREADS", 4096, cores());
  settings.last_blocks = number_from_environment("KF_SIMT_LAST_BLOCKS", 1u << 30, 0);
  settings.exited_is_error =
      o.exited != Exited::kDefault ? o.exited == Exited::kError : error_or_warning("KF_SIMT_EXITED");
  settings.undefined_is_error = error_or_warning("KF_SIMT_UNDEFINED");
  settings.branches_are_error = error_or_warning("KF_SIMT_BRANCHES");
  settings.spin_seconds = o.spin_seconds >= 0 ? o.spin_seconds : seconds_from_environment("KF_SIMT_SPIN_SECONDS", 0.5);
  settings.busy_seconds = o.busy_seconds >= 0 ? o.busy_seconds : seconds_from_environment("KF_SIMT_BUSY_SECONDS", 60);
  return settings;
}

}  // namespace kf::simt
