// Where torch and kernels meet: checks of arguments, and the way from an op to a rung.
//
// Only host files (.cpp) include this; a .cu never sees torch.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
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
#include <sstream>
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

// ---- checks: each error names the op, the argument, what it is and what it must be ----

inline std::string shape_text(const at::Tensor& t) {
  std::ostringstream text;
  text << "(";
  for (int64_t i = 0; i < t.dim(); ++i) text << (i ? ", " : "") << t.size(i);
  text << (t.dim() == 1 ? ",)" : ")");
  return text.str();
}

// "float32", as Python writes it.
inline std::string dtype_text(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }
inline std::string dtype_text(const at::Tensor& t) { return dtype_text(t.scalar_type()); }

inline DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::kFloat32;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kDouble: return DType::kFloat64;
    default: TORCH_CHECK_TYPE(false, "no kernel type for ", dtype_text(type));
  }
}
inline DType dtype_of(const at::Tensor& t) { return dtype_of(t.scalar_type()); }

inline void check_floating(const char* op, const char* name, const at::Tensor& t) {
  const auto type = t.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble, op, ": `",
                   name, "` must be float32, float16, bfloat16 or float64, got ", dtype_text(t));
}

inline void check_type(const char* op, const char* name, const at::Tensor& t, at::ScalarType type) {
  TORCH_CHECK_TYPE(t.scalar_type() == type, op, ": `", name, "` must be ", dtype_text(type), ", got ", dtype_text(t));
}

// On the device of the op's first argument.
inline void check_device(const char* op, const char* name, const at::Tensor& t, const char* first_name,
                         const at::Tensor& first) {
  TORCH_CHECK_VALUE(t.device() == first.device(), op, ": `", name, "` must be on the device of `", first_name, "` (",
                    first.device(), "), got ", t.device());
}

// Same dtype and device as the op's first argument.
inline void check_like(const char* op, const char* name, const at::Tensor& t, const char* first_name,
                       const at::Tensor& first) {
  TORCH_CHECK_TYPE(t.scalar_type() == first.scalar_type(), op, ": `", name, "` must have the dtype of `", first_name,
                   "` (", dtype_text(first), "), got ", dtype_text(t));
  check_device(op, name, t, first_name, first);
}

inline void check_dim(const char* op, const char* name, const at::Tensor& t, int64_t dim) {
  TORCH_CHECK_VALUE(t.dim() == dim, op, ": `", name, "` must have ", dim, dim == 1 ? " dimension" : " dimensions",
                    ", got ", t.dim(), " (shape ", shape_text(t), ")");
}

inline void check_shape(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef shape) {
  if (t.sizes() == shape) return;
  std::ostringstream text;
  for (size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "") << shape[i];
  TORCH_CHECK_VALUE(false, op, ": `", name, "` must have shape (", text.str(), shape.size() == 1 ? ",)" : ")", ", got ",
                    shape_text(t));
}

inline void check_like(const char* op, const char* name, const at::Tensor& t, const char* first_name,
                       const at::Tensor& first, at::IntArrayRef shape) {
  check_like(op, name, t, first_name, first);
  check_shape(op, name, t, shape);
}

// Rows that are not empty: [..., width]. Returns the width.
inline int64_t check_rows(const char* op, const char* name, const at::Tensor& t) {
  check_floating(op, name, t);
  TORCH_CHECK_VALUE(t.dim() >= 1, op, ": `", name, "` must have at least 1 dimension, got 0 (shape ())");
  TORCH_CHECK_VALUE(t.size(-1) > 0, op, ": the last dimension of `", name, "` must not be 0, got shape ",
                    shape_text(t));
  return t.size(-1);
}

// An `out` tensor is written in place as it lies: right shape, dtype and device, contiguous.
inline void check_out(const char* op, const char* name, const at::Tensor& out, at::IntArrayRef shape,
                      const char* first_name, const at::Tensor& first) {
  check_like(op, name, out, first_name, first, shape);
  TORCH_CHECK_VALUE(out.is_contiguous(), op, ": `", name, "` must be contiguous");
}

// A tensor, and what its op calls it.
struct Named {
  const char* name;
  const at::Tensor& tensor;
};

// No output shares memory with an input or another output: a kernel that reads where another thread writes gives
// whatever it finds. (What lies in pieces is copied before it is read, or is not looked into, as in PyTorch.)
inline void check_apart(const char* op, std::initializer_list<Named> outs, std::initializer_list<Named> inputs) {
  const auto check = [&](const Named& out, const Named& other) {
    const at::MemOverlapStatus status = at::get_overlap_status(out.tensor, other.tensor);
    TORCH_CHECK_VALUE(status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial, op, ": `",
                      out.name, "` must not share memory with `", other.name, "`");
  };
  for (auto out = outs.begin(); out != outs.end(); ++out) {
    for (const Named& input : inputs) check(*out, input);
    for (auto before = outs.begin(); before != out; ++before) check(*out, *before);
  }
}

// ---- tensors as kernels want them ----

inline at::Tensor contiguous_like(const at::Tensor& t) { return at::empty_like(t, at::MemoryFormat::Contiguous); }

// For kernels that take rows at any distance, but each row in one piece.
inline at::Tensor with_whole_rows(const at::Tensor& t) {
  return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous();
}

inline bool begins_at_16_bytes(const at::Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0; }

// In one piece that begins at a multiple of 16 bytes, as vectors and TMA want it.
inline at::Tensor in_one_piece(const at::Tensor& t) {
  const at::Tensor whole = t.contiguous();
  return begins_at_16_bytes(whole) ? whole : whole.clone();
}

// For tensor cores and TMA, of q, k and v: half types in rows that begin at multiples of 16 bytes, each in a place of
// its own. Others are copied; those that could not be so, whose head_dim is no multiple of 8, stay as they are. So do
// wider types. `for_decode`: where no rung uses TMA, rows may share a place, and some load vectors of float32, too.
inline bool has_aligned_rows(const at::Tensor& t, bool for_decode = false) {
  const int64_t vector = 16 / t.element_size();
  if ((t.element_size() != 2 && !for_decode) || t.size(3) % vector != 0) return true;
  bool aligned = begins_at_16_bytes(t);
  for (int64_t dim = 0; dim < 3; ++dim) {
    aligned = aligned && (t.size(dim) <= 1 || (t.stride(dim) % vector == 0 && (t.stride(dim) > 0 || for_decode)));
  }
  return aligned;
}

inline at::Tensor with_aligned_rows(const at::Tensor& t, bool for_decode = false) {
  const at::Tensor whole = with_whole_rows(t);
  return has_aligned_rows(whole, for_decode) ? whole : whole.clone(at::MemoryFormat::Contiguous);
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
// Gives each size that Args has its number of `left`, and takes it out; 1 where it is not named, but 0 for dropout's
// threshold and for what is true or false: causal, transposed, and keep, whether the preactivation is wanted.
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
