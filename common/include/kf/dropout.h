// Dropout's arguments on torch tensors, for the steps' host files.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <kf/host.h>

#ifdef KF_WITH_CUDA
#include <ATen/Context.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/from_blob.h>
#endif

#include <cmath>
#include <cstdint>
#include <mutex>
#include <optional>

namespace kf {

// An element is kept where its 16-bit random number is at least this. `name`: what the op calls the part that is
// dropped.
inline uint32_t threshold_of(const char* op, const char* name, double dropout_p) {
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, op, ": `", name, "` must be from 0 to 1, got ", dropout_p);
  return static_cast<uint32_t>(std::lround(dropout_p * 65536));
}

// Where the random numbers start, as a launch takes it.
struct PhiloxArgs {
  at::Tensor contiguous;               // keeps the memory
  const int64_t* in_memory = nullptr;  // {seed, offset} in the GPU's memory, or null: as follows
  uint64_t seed = 0;
  uint64_t offset = 0;
};

// `rng_state`: int64 [2], seed and offset, on the CPU or on the device of the op's first tensor. `name`: what the op
// calls it.
inline PhiloxArgs philox_args_of(const char* op, const at::Tensor& rng_state, const at::Tensor& first,
                                 const char* name = "rng_state") {
  check_type(op, name, rng_state, at::kLong);
  check_shape(op, name, rng_state, {2});
  TORCH_CHECK_VALUE(rng_state.is_cpu() || rng_state.device() == first.device(), op, ": `", name,
                    "` must be on the CPU or on the tensors' device (", first.device(), "), got ", rng_state.device());
  const at::Tensor contiguous = rng_state.contiguous();
  const int64_t* numbers = contiguous.const_data_ptr<int64_t>();
  if (!rng_state.is_cpu()) return {contiguous, numbers};
  return {contiguous, nullptr, static_cast<uint64_t>(numbers[0]), static_cast<uint64_t>(numbers[1])};
}

// Dropout's arguments, checked, and the memory of their state. dropout_p_name, rng_state_name: what the op calls them.
struct DropoutArgs {
  uint32_t threshold;
  PhiloxArgs philox_args;

  DropoutArgs(const char* op, const char* dropout_p_name, double dropout_p, const char* rng_state_name,
              const std::optional<at::Tensor>& rng_state, const at::Tensor& first)
      : threshold(threshold_of(op, dropout_p_name, dropout_p)) {
    TORCH_CHECK_VALUE(threshold == 0 || rng_state, op, ": `", rng_state_name, "` must be given where `", dropout_p_name,
                      "` is not 0");
    if (rng_state) philox_args = philox_args_of(op, *rng_state, first, rng_state_name);
  }

  template <class Args>
  void set(Args& args) const {
    args.threshold = threshold;
    args.rng_state = philox_args.in_memory;
    args.seed = philox_args.seed;
    args.offset = philox_args.offset;
  }
};

// {seed, offset} for one dropout, drawn from PyTorch's generator for the device of x, which moves on. On the CPU, where
// the launch can read it without waiting; on_device: where x lies, as a CUDA graph needs it.
inline at::Tensor draw_rng_state(const at::Tensor& x, bool on_device) {
  at::Tensor rng_state = at::empty({2}, at::TensorOptions().dtype(at::kLong));
  int64_t* numbers = rng_state.data_ptr<int64_t>();
  if (x.is_cpu()) {
    auto* generator = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    numbers[0] = static_cast<int64_t>(generator->random64());
    numbers[1] = 0;
    return rng_state;
  }
#ifdef KF_WITH_CUDA
  const c10::OptionalDeviceGuard guard(x.device());
  const at::Generator& of_device = at::globalContext().defaultGenerator(x.device());
  auto* generator = at::check_generator<at::CUDAGeneratorImpl>(of_device);
  at::PhiloxCudaState philox;
  {
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    philox = generator->philox_cuda_state(4);  // one call, four 32-bit numbers, in each subsequence
  }
  if (!philox.captured_) {
    numbers[0] = static_cast<int64_t>(philox.seed_.val);
    numbers[1] = static_cast<int64_t>(philox.offset_.val);
    return on_device ? rng_state.to(x.device()) : rng_state;
  }
  TORCH_CHECK_VALUE(on_device, "draw_rng_state: `on_device` must be True while a CUDA graph is captured");
  // The graph's replays find their seed and offset at these addresses; what has been drawn in this graph is added.
  const auto options = x.options().dtype(at::kLong);
  at::Tensor on_gpu = at::empty({2}, options);
  on_gpu.narrow(0, 0, 1).copy_(at::from_blob(philox.seed_.ptr, {1}, options));
  on_gpu.narrow(0, 1, 1).copy_(at::from_blob(philox.offset_.ptr, {1}, options));
  on_gpu.narrow(0, 1, 1).add_(static_cast<int64_t>(philox.offset_intragraph_));
  return on_gpu;
#else
  TORCH_CHECK_NOT_IMPLEMENTED(false, "draw_rng_state: this build has no CUDA kernels (asked for ", x.device(),
                              on_device ? ", on the device" : "", ")");
#endif
}

}  // namespace kf
