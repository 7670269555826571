// cuBLASLt, NVIDIA's library of matrix products, as far as this step compares itself with it.
//
// The library is opened when it is first asked for, as torch's CUDA builds bring it: so nothing here needs its header
// or its name at link time. What is declared here is its C interface:
// https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
#pragma once

#include <kf/launch.h>
#include <kf/rung.h>
#include <step2/product.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#ifdef __CUDACC__
#include <dlfcn.h>
#endif

namespace kf::KF_BACKEND::cublaslt {

constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;  // what NVIDIA recommends for Hopper

// What follows the product in the same kernel. kGeluAux: GELU (tanh), and what went into it is kept in `aux`.
enum class Epilogue { kNone = 0, kGelu = 32, kGeluAux = 32 | 128 };

#ifdef __CUDACC__

// The library's functions; each returns 0, or the number of an error.
struct Library {
  int (*create)(void** handle);
  int (*layout_create)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t leading);
  int (*matmul_create)(void** matmul, int compute, int scale);
  int (*matmul_set)(void* matmul, int attribute, const void* value, size_t bytes);
  int (*preference_create)(void** preference);
  int (*layout_destroy)(void* layout);
  int (*matmul_destroy)(void* matmul);
  int (*preference_destroy)(void* preference);
  int (*preference_set)(void* preference, int attribute, const void* value, size_t bytes);
  int (*heuristic)(void* handle, void* matmul, void* a, void* b, void* c, void* d, void* preference, int count,
                   void* results, int* found);
  int (*matmul)(void* handle, void* matmul, const void* alpha, const void* a, void* layout_a, const void* b,
                void* layout_b, const void* beta, const void* c, void* layout_c, void* d, void* layout_d,
                const void* algorithm, void* workspace, size_t bytes, cudaStream_t stream);
};

// Null where the library is not to be found.
inline const Library* library() {
  static const Library* const found = []() -> const Library* {
    const std::string name = "libcublasLt.so." + std::to_string(CUDART_VERSION / 1000);
    void* const file = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (file == nullptr) return nullptr;
    static Library functions;
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(file, symbol));
      return function != nullptr;
    };
    const bool all =
        find(functions.create, "cublasLtCreate") && find(functions.layout_create, "cublasLtMatrixLayoutCreate") &&
        find(functions.matmul_create, "cublasLtMatmulDescCreate") &&
        find(functions.matmul_set, "cublasLtMatmulDescSetAttribute") &&
        find(functions.preference_create, "cublasLtMatmulPreferenceCreate") &&
        find(functions.layout_destroy, "cublasLtMatrixLayoutDestroy") &&
        find(functions.matmul_destroy, "cublasLtMatmulDescDestroy") &&
        find(functions.preference_destroy, "cublasLtMatmulPreferenceDestroy") &&
        find(functions.preference_set, "cublasLtMatmulPreferenceSetAttribute") &&
        find(functions.heuristic, "cublasLtMatmulAlgoGetHeuristic") && find(functions.matmul, "cublasLtMatmul");
    return all ? &functions : nullptr;
  }();
  return found;
}

inline void check_status(int status, const char* what) {
  if (status != 0) throw std::runtime_error(std::string("cuBLASLt: ") + what + ": error " + std::to_string(status));
}

using Owned = std::unique_ptr<void, int (*)(void*)>;

// All that a product of certain sizes needs, made once: asking the library for an algorithm takes longer than many
// products.
struct Plan {
  struct Algorithm {  // cublasLtMatmulHeuristicResult_t
    uint64_t data[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
  };
  Owned matmul, a, b, out;
  Algorithm algorithm;
  bool found;  // whether the library has one
  int scale;
};

// rows, depth, width, x's and the weight's Major, dtype, TF32, epilogue, whether there is a bias, whether all is
// aligned
using Key = std::tuple<int64_t, int64_t, int64_t, int, int, int, bool, int, bool, bool>;

// What is kept for a device. Its handle is made once: that allocates memory, which may not happen while a CUDA graph is
// captured.
struct Device {
  std::mutex one_at_a_time;
  void* handle = nullptr;
  std::map<Key, Plan> plans;
};

constexpr size_t kMostPlans = 512;  // sizes that change with each call must not fill the memory

inline Device& current_device() {
  static std::mutex one_at_a_time;
  static std::map<int, Device> devices;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  return devices[device];
}

inline Plan make_plan(const Library& lt, void* handle, const Product& p, Major x, Major weight, DType dtype, bool tf32,
                      Epilogue epilogue, bool aligned) {
  constexpr int kTypes[] = {0, 2, 14, 1};                      // CUDA_R_32F, 16F, 16BF, 64F in the order of DType
  constexpr int kCompute32 = 68, kTf32 = 77, kCompute64 = 70;  // CUBLAS_COMPUTE_…
  constexpr int kTransA = 3, kTransB = 4, kEpilogue = 7, kAuxLeading = 12, kWorkspace = 1;
  const int type = kTypes[static_cast<int>(dtype)], scale = dtype == DType::kFloat64 ? 1 : 0;
  const int compute = dtype == DType::kFloat64 ? kCompute64 : dtype == DType::kFloat32 && tf32 ? kTf32 : kCompute32;
  void* made = nullptr;
  check_status(lt.matmul_create(&made, compute, scale), "cublasLtMatmulDescCreate");
  Owned matmul(made, lt.matmul_destroy);
  const auto set = [&](int attribute, auto value) {
    check_status(lt.matmul_set(matmul.get(), attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  };
  const auto layout = [&](int64_t rows, int64_t columns) {
    check_status(lt.layout_create(&made, type, rows, columns, rows), "cublasLtMatrixLayoutCreate");
    return Owned(made, lt.layout_destroy);
  };
  // Its matrices lie column after column, so ours are transposed there: yᵀ = weightᵀ · xᵀ.
  set(kTransA, static_cast<int>(weight == Major::kK));
  set(kTransB, static_cast<int>(x == Major::kMN));
  const int with_bias = static_cast<int>(epilogue) | (p.bias == nullptr ? 0 : 4);
  set(kEpilogue, with_bias == 0 ? 1 : with_bias);  // 1: nothing follows
  if (epilogue == Epilogue::kGeluAux) set(kAuxLeading, p.width);
  Owned a = weight == Major::kK ? layout(p.depth, p.width) : layout(p.width, p.depth);
  Owned b = x == Major::kMN ? layout(p.rows, p.depth) : layout(p.depth, p.rows);
  Owned out = layout(p.width, p.rows);

  check_status(lt.preference_create(&made), "cublasLtMatmulPreferenceCreate");
  const Owned preference(made, lt.preference_destroy);
  const size_t bytes = kWorkspaceBytes;
  check_status(lt.preference_set(made, kWorkspace, &bytes, sizeof bytes), "cublasLtMatmulPreferenceSetAttribute");
  // Attributes 5 to 8: how the four matrices are aligned. Those of torch are at 512 bytes, but for parts of tensors.
  const uint32_t alignment = aligned ? 16 : static_cast<uint32_t>(size_of(dtype));
  for (int attribute = 5; attribute <= 8; ++attribute) {
    check_status(lt.preference_set(made, attribute, &alignment, sizeof alignment), "alignment");
  }
  constexpr int kNotSupported = 15;  // CUBLAS_STATUS_NOT_SUPPORTED: no algorithm can do this
  Plan::Algorithm algorithm{};
  int found = 0;
  const int status =
      lt.heuristic(handle, matmul.get(), a.get(), b.get(), out.get(), out.get(), made, 1, &algorithm, &found);
  if (status != kNotSupported) check_status(status, "cublasLtMatmulAlgoGetHeuristic");
  return {std::move(matmul), std::move(a), std::move(b), std::move(out), algorithm, status == 0 && found > 0, scale};
}

// The plan of a product into `out`, whose device is locked.
inline const Plan& plan_of(Device& device, const Product& p, Major x, Major weight, DType dtype, bool tf32,
                           Epilogue epilogue, const void* added, const void* out) {
  const Library& lt = *library();
  const bool aligned = aligned_16(p.a, p.b, added, out);
  const Key key{p.rows,
                p.depth,
                p.width,
                static_cast<int>(x),
                static_cast<int>(weight),
                static_cast<int>(dtype),
                tf32,
                static_cast<int>(epilogue),
                p.bias != nullptr,
                aligned};
  const auto known = device.plans.find(key);
  if (known != device.plans.end()) return known->second;
  if (device.handle == nullptr) check_status(lt.create(&device.handle), "cublasLtCreate");
  if (device.plans.size() >= kMostPlans) device.plans.clear();
  Plan plan = make_plan(lt, device.handle, p, x, weight, dtype, tf32, epilogue, aligned);
  return device.plans.emplace(key, std::move(plan)).first->second;
}

// Why the library cannot do this, or "".
inline std::string can_implement(const Product& p, Major x, Major weight, DType dtype, bool tf32, Epilogue epilogue,
                                 const void* added, const void* out) {
  if (library() == nullptr) return "needs cuBLASLt, which is not to be found here";
  Device& device = current_device();
  const std::lock_guard<std::mutex> lock(device.one_at_a_time);
  return plan_of(device, p, x, weight, dtype, tf32, epilogue, added, out).found ? "" : "has no algorithm for this";
}

// out = x · weight + bias + added, and the epilogue, where `can_implement` says nothing. `aux` and `added`: of out's
// shape, or null. scratch: kWorkspaceBytes.
inline void product(const Product& p, Major x, Major weight, DType dtype, bool tf32, Epilogue epilogue, void* aux,
                    const void* added, void* out, void* scratch, void* stream) {
  constexpr int kBias = 8, kAux = 11;
  const Library& lt = *library();
  Device& device = current_device();
  const std::lock_guard<std::mutex> lock(device.one_at_a_time);  // bias and aux are set in what all threads share
  const Plan& of = plan_of(device, p, x, weight, dtype, tf32, epilogue, added, out);
  void* const matmul = of.matmul.get();
  if (p.bias != nullptr) check_status(lt.matmul_set(matmul, kBias, &p.bias, sizeof p.bias), "bias");
  if (epilogue == Epilogue::kGeluAux) check_status(lt.matmul_set(matmul, kAux, &aux, sizeof aux), "aux");
  const float factors[] = {0, 1};
  const double factors64[] = {0, 1};
  const auto factor = [&](bool one) {
    return of.scale == 1 ? static_cast<const void*>(factors64 + one) : factors + one;
  };
  check_status(lt.matmul(device.handle, matmul, factor(true), p.b, of.a.get(), p.a, of.b.get(),
                         factor(added != nullptr), added == nullptr ? out : added, of.out.get(), out, of.out.get(),
                         &of.algorithm, scratch, kWorkspaceBytes, as_stream(stream)),
               "cublasLtMatmul");
}

#else  // the emulation has no such library

inline void product(const Product&, Major, Major, DType, bool, Epilogue, void*, const void*, void*, void*, void*) {
  throw std::runtime_error("cuBLASLt: it runs on GPUs only");
}

inline std::string can_implement(const Product&, Major, Major, DType, bool, Epilogue, const void*, const void*) {
  return "is NVIDIA's library and runs on GPUs only";
}

#endif

}  // namespace kf::KF_BACKEND::cublaslt
