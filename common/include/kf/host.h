// Where torch and kernels meet: checks of arguments, and the way from an op to a rung.
//
// Only host files (.cpp) include this; a .cu never sees torch.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
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
#include <map>
#include <sstream>
#include <string>
#include <utility>
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
  const char* (*automatic)(const Args&);  // the rung `auto` takes on CUDA tensors
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

inline std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "'" : ", '") + word + "'";
  return text;
}

// The rung called `name` that can do `args`. Otherwise an error that says why not, and which rung can.
template <class Args>
const Rung<Args>& find_rung(const Op<Args>& op, const Rungs<Args>& table, const std::string& name, const Args& args) {
  for (const Rung<Args>& rung : table) {
    if (name != rung.name) continue;
    const std::string why_not = rung.supports(args);
    if (why_not.empty()) return rung;
    std::vector<std::string> able;
    for (const Rung<Args>& other : table) {
      if (other.supports(args).empty()) able.push_back(other.name);
    }
    TORCH_CHECK_VALUE(false, op.name, ": rung '", name, "' ", why_not, "; ",
                      able.empty() ? "no rung can do this" : "these can: " + joined(able));
  }
  TORCH_CHECK_VALUE(false, op.name, ": `rung` must be 'auto' or one of ",
                    joined(rung_names(op, table.first == op.gpu.first)), ", got '", name, "'");
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
void run(const Op<Args>& op, const std::string& rung_name, const at::Tensor& on, Args args) {
  const bool on_gpu = on.is_cuda();
  if (!on_gpu && (rung_name == "auto" || rung_name == "cpu")) {
    launches()[kCpu]++;
    return op.cpu(args);
  }
  const Rungs<Args>& table = on_gpu ? op.gpu : op.emulated;
  TORCH_CHECK_NOT_IMPLEMENTED(
      table.count > 0, op.name,
      ": this build has no CUDA kernels; build the stage again with KF_CUDA=1, or use CPU tensors");
  void* stream = nullptr;
#ifdef KF_WITH_CUDA
  // First of all: what a rung can do may depend on the device, and rungs ask about the current one.
  c10::OptionalDeviceGuard guard;
  if (on_gpu) {
    guard.reset_device(on.device());
    stream = c10::cuda::getCurrentCUDAStream(on.device().index()).stream();
  }
#endif
  const std::string name = rung_name == "auto" ? op.automatic(args) : rung_name;
  const Rung<Args>& rung = find_rung(op, table, name, args);
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
inline std::string dtype_text(const at::Tensor& t) { return std::string(c10::getDtypeNames(t.scalar_type()).first); }

inline DType dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: return DType::kFloat32;
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kDouble: return DType::kFloat64;
    default: TORCH_CHECK_TYPE(false, "no kernel type for ", dtype_text(t));
  }
}

inline void check_floating(const char* op, const char* name, const at::Tensor& t) {
  const auto type = t.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16 || type == at::kDouble, op, ": `",
                   name, "` must be float32, float16, bfloat16 or float64, got ", dtype_text(t));
}

// Same dtype and device as the op's first argument.
inline void check_like(const char* op, const char* name, const at::Tensor& t, const char* first_name,
                       const at::Tensor& first) {
  TORCH_CHECK_TYPE(t.scalar_type() == first.scalar_type(), op, ": `", name, "` must have the dtype of `", first_name,
                   "` (", dtype_text(first), "), got ", dtype_text(t));
  TORCH_CHECK_VALUE(t.device() == first.device(), op, ": `", name, "` must be on the device of `", first_name, "` (",
                    first.device(), "), got ", t.device());
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

// An `out` tensor is written in place as it lies: right shape, dtype and device, contiguous.
inline void check_out(const char* op, const char* name, const at::Tensor& out, at::IntArrayRef shape,
                      const char* first_name, const at::Tensor& first) {
  check_like(op, name, out, first_name, first);
  check_shape(op, name, out, shape);
  TORCH_CHECK_VALUE(out.is_contiguous(), op, ": `", name, "` must be contiguous");
}

// A kernel that reads where another thread writes gives whatever it finds. A non-contiguous input is copied first.
inline void check_no_overlap(const char* op, const char* name, const at::Tensor& out, const char* input_name,
                             const at::Tensor& input) {
  const at::MemOverlapStatus status = at::get_overlap_status(out, input);
  TORCH_CHECK_VALUE(status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial, op, ": `", name,
                    "` must not share memory with `", input_name, "`");
}

}  // namespace kf
