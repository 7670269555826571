// What the rewriter's output calls: launches, the entry of a kernel, shared memory.
#pragma once

#include <atomic>
#include <type_traits>

#include "kf_simt/types.h"

#ifndef __clang__  // g++ notes how it once passed what is aligned to 64 bytes, such as a tensor map, by value
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace kf::simt {

typedef struct CUstream_st* cudaStream_t;

// One for each kernel (and each instantiation of a kernel template), made by a line that the rewriter puts at the
// beginning of its body.
struct KernelInfo {
  constexpr KernelInfo(const char* signature_, unsigned max_threads_ = 1024, dim3 cluster_ = {0, 0, 0})
      : signature(signature_), max_threads(max_threads_), cluster(cluster_) {}
  const char* signature;                   // __PRETTY_FUNCTION__
  unsigned max_threads;                    // from __launch_bounds__
  dim3 cluster;                            // from __cluster_dims__; zeros without
  std::atomic<int> max_dynamic{49152};     // cudaFuncAttributeMaxDynamicSharedMemorySize
  std::atomic<int> static_bytes{0};        // known once a block has run
  std::atomic<bool> large_cluster{false};  // cudaFuncAttributeNonPortableClusterSizeAllowed
};

extern __thread const KernelInfo* entered_kernel;
void enter_kernel_first(KernelInfo& info);

KF_SIMT_UNINSTRUMENTED inline void enter_kernel(KernelInfo& info) {
  if (__builtin_expect(entered_kernel != &info, 0)) enter_kernel_first(info);
}

struct LaunchConfig {
  const char* name;
  const char* file;
  int line;
  dim3 grid;
  dim3 block;
  std::size_t shared;
  bool cooperative;
  dim3 cluster{0, 0, 0};  // in blocks; zeros leave it to the kernel's __cluster_dims__
};

// Runs invoke(context) once for each thread of the grid, and returns when all have finished.
void run(const LaunchConfig& config, void (*invoke)(void*), void* context);

// For recorded runs (../trace): what the next launch's arguments, a kernel's shared variables and a shuffled value are.
#ifdef KF_SIMT_TRACE
template <class T>
KF_SIMT_UNINSTRUMENTED const char* kf_type() {
  return __PRETTY_FUNCTION__;
}
void kf_trace_arguments(std::size_t count, const void* const* pointers, const char* const* types);
void kf_trace_shared(const char* name, const void* address, std::size_t bytes, const char* type);
template <class T>
KF_SIMT_UNINSTRUMENTED const void* kf_pointer([[maybe_unused]] const T& argument) {
  if constexpr (std::is_pointer_v<T> && !std::is_function_v<std::remove_pointer_t<T>>) {
    return const_cast<const void*>(static_cast<const volatile void*>(argument));
  }
  return nullptr;
}
#endif

// In a stand-alone program, a pointer to the host's memory that a kernel gets as an argument, or within one, points
// nowhere: see src/program/spaces.cpp.
#ifdef KF_SIMT_PROGRAM
const void* kf_seen_by_device(const void* pointer);
void kf_words_seen_by_device(void* object, std::size_t bytes);
template <class T>
void kf_pass_to_device([[maybe_unused]] T& argument) {
  if constexpr (std::is_pointer_v<T>) {
    if constexpr (!std::is_function_v<std::remove_pointer_t<T>>) {
      argument = static_cast<T>(
          const_cast<void*>(kf_seen_by_device(const_cast<const void*>(static_cast<const volatile void*>(argument)))));
    }
  } else if constexpr (std::is_class_v<T> && std::is_trivially_copyable_v<T> && sizeof(T) >= sizeof(void*)) {
    kf_words_seen_by_device(const_cast<void*>(static_cast<const volatile void*>(&argument)), sizeof(T));
  }
}
#endif

// A literal 0 among the arguments of a launch: a number, if the kernel takes numbers; else what its parameter is.
template <class Number>
struct LiteralZero {
  template <class T>
  operator T*() const {
    return nullptr;
  }
  template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
  operator T() const {
    return 0;
  }
};
template <class T>
T without_literal(T argument) {
  return argument;
}
template <class Number>
Number without_literal(LiteralZero<Number>) {
  return 0;
}
// k<<<grid, block, shared, stream>>>(args) is rewritten as
// kernel_call([&](auto&... a) { k(a...); }, "k")(grid, block, shared, stream)(args): the arguments are evaluated once,
// and overloads, deduced templates and default arguments work as in any call.
template <class Kernel>
class KernelCall {
 public:
  KernelCall(Kernel kernel, LaunchConfig config) : kernel_(kernel), config_(config) {}

  KernelCall& operator()(dim3 grid, dim3 block, std::size_t shared = 0, cudaStream_t = nullptr) {
    config_.grid = grid;
    config_.block = block;
    config_.shared = shared;
    return *this;
  }

  // By value, as CUDA copies arguments: an array decays, a static constant needs no definition.
  template <class... Args>
  void launch(Args... args) {
#ifdef KF_SIMT_PROGRAM
    (kf_pass_to_device(args), ...);
#endif
#ifdef KF_SIMT_TRACE
    const void* const pointers[] = {kf_pointer(args)..., nullptr};
    const char* const types[] = {kf_type<std::remove_cv_t<std::remove_pointer_t<Args>>>()..., nullptr};
    kf_trace_arguments(sizeof...(Args), pointers, types);
#endif
    auto bound = [&]() KF_SIMT_UNINSTRUMENTED { kernel_(args...); };
    run(config_, invoke<decltype(bound)>, &bound);
  }

  // With literal zeros among the arguments.
  template <class... Args>
  void launch_with_zeros(Args... args) {
    if constexpr (std::is_invocable_v<Kernel&, decltype(without_literal(args))&...>) {
      launch(without_literal(args)...);
    } else {
      launch(args...);
    }
  }

 private:
  template <class Bound>
  KF_SIMT_UNINSTRUMENTED static void invoke(void* bound) {
    (*static_cast<Bound*>(bound))();
  }

  Kernel kernel_;
  LaunchConfig config_;
};

template <class Kernel>
KernelCall<Kernel> kernel_call(Kernel kernel, const char* name, const char* file = __builtin_FILE(),
                               int line = __builtin_LINE()) {
  return {kernel, {name, file, line, {}, {}, 0, false}};
}

// The identity of one __shared__ declaration.
struct SharedSlot {
  constexpr SharedSlot(const char* name_, std::size_t size_, std::size_t align_, const char* file_, int line_)
      : name(name_), size(size_), align(align_), file(file_), line(line_) {}
  const char* name;
  std::size_t size, align;
  const char* file;
  int line;
  std::atomic<int> id{-1};
};

void* static_shared_address(SharedSlot& slot);
void* dynamic_shared_address();

template <class T>
T& static_shared(SharedSlot& slot) {
  T& variable = *reinterpret_cast<T*>(static_shared_address(slot));
#ifdef KF_SIMT_TRACE
  kf_trace_shared(slot.name, &variable, sizeof(T), kf_type<T>());
#endif
  return variable;
}

template <class Array>
Array& dynamic_shared() {
#ifdef KF_SIMT_TRACE
  kf_trace_shared(nullptr, dynamic_shared_address(), 0, kf_type<Array>());
#endif
  return *reinterpret_cast<Array*>(dynamic_shared_address());
}

constexpr std::size_t max_align(std::size_t a, std::size_t b = 1) { return a > b ? a : b; }

}  // namespace kf::simt
