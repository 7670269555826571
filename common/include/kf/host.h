// Where torch and kernels meet: the way from an op to a rung.
//
// Only host files (.cpp) include this; a .cu never sees torch.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <kf/argument_checks.h>
#include <kf/parallel.h>
#include <kf/rung.h>

#ifdef KF_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace kf {

// ---- launches, counted by backend, so that a test can prove which one ran ----

enum Backend { kCpu, kEmulated, kGpu };
constexpr const char* kBackendNames[] = {"cpu", "emulated", "gpu"};

inline std::array<std::atomic<int64_t>, 3>& launches() {
  static std::array<std::atomic<int64_t>, 3> counts{};
  return counts;
}

// {"cpu": n, "emulated": n, "gpu": n}: how often each backend ran an op of this extension.
inline std::map<std::string, int64_t> launch_counts() {
  std::map<std::string, int64_t> counts;
  for (int b = 0; b < 3; ++b) counts[kBackendNames[b]] = launches()[b].load();
  return counts;
}

// ---- an op: its plain C++ version and its tables of rungs ----

template <class Args>
struct Op {
  const char* name;
  void (*cpu)(const Args&);               // plain C++: rung "cpu", and `auto` on CPU tensors
  Rungs<Args> emulated;                   // the .cu files on CPU tensors
  Rungs<Args> gpu;                        // the .cu files on CUDA tensors; empty in a build without CUDA
  const char* (*automatic)(const Args&);  // what `auto` takes on CUDA tensors; where that cannot, the last that can
  const char* cpu_rounds = nullptr;       // as Rung's `rounds`, of plain C++
};

template <class Args>
std::vector<std::string> rung_names(const Rungs<Args>& table) {
  std::vector<std::string> names;
  for (const Rung<Args>& rung : table) names.push_back(rung.name);
  return names;
}

// What a caller may pass as `rung`, "auto" aside, for tensors on that kind of device.
template <class Args>
std::vector<std::string> rung_names(const Op<Args>& op, bool on_gpu) {
  if (on_gpu) return rung_names(op.gpu);
  std::vector<std::string> names = rung_names(op.emulated);
  names.insert(names.begin(), "cpu");
  return names;
}

// "'a', 'b', 'c'", or with another word before the last: "'a', 'b' or 'c'".
inline std::string joined(const std::vector<std::string>& words, const char* before_last = ", ") {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    text += (i == 0 ? "'" : i + 1 == words.size() ? std::string(before_last) + "'" : ", '") + words[i] + "'";
  }
  return text;
}

template <class Args>
const Rung<Args>* find_rung(const Rungs<Args>& table, std::string_view name) {
  for (const Rung<Args>& rung : table) {
    if (name == rung.name) return &rung;
  }
  return nullptr;
}

// `rung` is a name for tensors on the device of `on`. run() asks this too; an op asks it before it returns early: a
// wrong name is wrong for an empty tensor as well.
template <class Args>
void check_rung(const Op<Args>& op, std::string_view rung, const at::Tensor& on) {
  TORCH_CHECK_VALUE(on.is_cpu() || on.is_cuda(), op.name, ": the tensors must be on the CPU or on a CUDA device, got ",
                    on.device());
  const Rungs<Args>& table = on.is_cuda() ? op.gpu : op.emulated;
  TORCH_CHECK_NOT_IMPLEMENTED(
      table.begin() != table.end(), op.name,
      ": this build has no CUDA kernels; build the step again with KF_CUDA=1, or use CPU tensors");
  if (rung == "auto" || (on.is_cpu() && rung == "cpu") || find_rung(table, rung) != nullptr) return;
  TORCH_CHECK_VALUE(false, op.name, ": `rung` must be 'auto' or one of ", joined(rung_names(op, on.is_cuda())),
                    ", got '", rung, "'");
}

// The rung of `table` called `name`; for "auto", the op's choice. Where that cannot do `args`, "auto" takes the last of
// the table that can and does not vary; for a name there is an error that says why not, and which rungs can.
template <class Args>
const Rung<Args>& choose_rung(const Op<Args>& op, const Rungs<Args>& table, std::string_view name, const Args& args) {
  const std::string_view wanted = name == "auto" ? op.automatic(args) : name;
  const Rung<Args>* rung = find_rung(table, wanted);
  TORCH_INTERNAL_ASSERT(rung != nullptr, op.name, " has no rung '", wanted, "'");
  const std::string why_not = rung->can_implement(args);
  if (why_not.empty()) return *rung;
  std::vector<std::string> able;
  for (const Rung<Args>& other : table) {
    if (other.can_implement(args).empty() && !(name == "auto" && other.varies)) able.push_back(other.name);
  }
  if (name == "auto" && !able.empty()) return *find_rung(table, able.back());
  TORCH_CHECK_VALUE(false, op.name, ": rung '", wanted, "' ", why_not, "; ",
                    able.empty() ? "no rung can do this" : "these can: " + joined(able));
}

namespace detail {
template <class Args>
auto set_scratch(Args& args, void* scratch) -> decltype(args.scratch = scratch, void()) {
  args.scratch = scratch;
}
inline void set_scratch(...) {}
}  // namespace detail

// Runs `args` on the device of `on`. CPU tensors: plain C++ for "auto" and "cpu", the emulation for a named rung.
// CUDA tensors: the named rung, or the one `auto` chooses, on that device's current stream.
template <class Args>
void run(const Op<Args>& op, std::string_view rung_name, const at::Tensor& on, Args args) {
  check_rung(op, rung_name, on);
  const bool on_gpu = on.is_cuda();
  if (!on_gpu && (rung_name == "auto" || rung_name == "cpu")) {
    launches()[kCpu]++;
    const cpu::Threads as_torch(at::in_parallel_region() ? 1 : at::get_num_threads());
    return op.cpu(args);
  }
  void* stream = nullptr;
#ifdef KF_WITH_CUDA
  // First of all: what a rung can do may depend on the device, and rungs ask about the current one.
  c10::OptionalDeviceGuard guard;
  if (on_gpu) {
    guard.reset_device(on.device());
    stream = c10::cuda::getCurrentCUDAStream(on.device().index()).stream();
  }
#endif
  const Rung<Args>& rung = choose_rung(op, on_gpu ? op.gpu : op.emulated, rung_name, args);
  if (rung.varies) at::globalContext().alertNotDeterministic(std::string(op.name) + " by rung '" + rung.name + "'");
  at::Tensor scratch;  // freed by torch's allocator in stream order, so it may go out of scope before the kernel ends
  if (rung.scratch_bytes != nullptr) {
    scratch = at::empty({rung.scratch_bytes(args)}, on.options().dtype(at::kByte));
    detail::set_scratch(args, scratch.data_ptr());
  }
  launches()[on_gpu ? kGpu : kEmulated]++;
  rung.launch(args, stream);
}

// ---- what Python asks about an op, whatever its Args ----

using Sizes = std::map<std::string, int64_t>;

struct RungInfo {
  std::string name;
  std::string rounds;  // as Rung's; "" for nothing
  bool needs_scratch;
  bool varies;  // as Rung's
};

struct OpInfo {
  std::string name;
  std::vector<std::string> cpu_names, gpu_names;  // for `rung`, "auto" aside
  std::string cpu_rounds;                         // as Op's; "" for nothing
  std::vector<RungInfo> rungs;
  std::function<std::string(const std::string& rung, const Sizes& sizes, DType dtype)> choose;
  std::function<std::string(const Sizes& sizes, DType dtype)> prefer;  // `auto`'s rung, wherever it can run
};

namespace detail {
// Gives each size that Args has its number of `left`, and takes it out; 1 where it is not named, but 0 for documents,
// dropout's threshold and what is true or false: causal, transposed, and keep, whether the preactivation is wanted.
template <class Args>
void take_sizes(Args& args, Sizes& left) {
#define KF_TAKE(member) \
  if constexpr (requires { args.member; }) args.member = left.count(#member) ? left.extract(#member).mapped() : 1;
  KF_TAKE(n)
  KF_TAKE(rows)
  KF_TAKE(width)
  KF_TAKE(batch)
  KF_TAKE(heads)
  KF_TAKE(kv_heads)
  KF_TAKE(length)
  KF_TAKE(q_length)
  KF_TAKE(k_length)
  KF_TAKE(head_dim)
  KF_TAKE(depth)
  KF_TAKE(inner)
#undef KF_TAKE
  if constexpr (requires { args.threshold; })
    args.threshold = left.count("threshold") ? left.extract("threshold").mapped() : 0;
  if constexpr (requires { args.documents; })
    args.documents = left.count("documents") ? left.extract("documents").mapped() : 0;
  const auto flag = [&](const char* name) { return left.count(name) && left.extract(name).mapped() != 0; };
  if constexpr (requires { args.causal; }) args.causal = flag("causal");
  if constexpr (requires { args.weight_transposed; }) args.weight_transposed = flag("transposed");
  if constexpr (requires { args.preactivation; }) args.preactivation = flag("keep") ? &args : nullptr;
  if constexpr (requires { args.attention; }) take_sizes(args.attention, left);
}
}  // namespace detail

template <class Args>
OpInfo describe(const Op<Args>& op) {
  const char* cpu_rounds = op.cpu_rounds == nullptr ? "" : op.cpu_rounds;
  OpInfo info{op.name, rung_names(op, false), rung_names(op, true), cpu_rounds, {}, {}, {}};
  for (const Rung<Args>& rung : op.emulated) {
    info.rungs.push_back(
        {rung.name, rung.rounds == nullptr ? "" : rung.rounds, rung.scratch_bytes != nullptr, rung.varies});
  }
  const auto args_of = [op](Sizes sizes, DType dtype) {
    Args args{};
    args.dtype = dtype;
    detail::take_sizes(args, sizes);
    TORCH_CHECK_VALUE(sizes.empty(), op.name, " has no size '", sizes.begin()->first, "'");
    return args;
  };
  info.choose = [op, args_of](const std::string& rung, const Sizes& sizes, DType dtype) {
    return std::string(choose_rung(op, op.emulated, rung, args_of(sizes, dtype)).name);
  };
  info.prefer = [op, args_of](const Sizes& sizes, DType dtype) { return op.automatic(args_of(sizes, dtype)); };
  return info;
}

}  // namespace kf
