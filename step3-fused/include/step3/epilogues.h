// What may follow a product in the same kernel: see Store in step2/product.h.
#pragma once

#include <step1/gelu.h>
#include <step2/product.h>
#include <step3/dropout.h>

namespace kf::KF_BACKEND {

// (1 + tanh(u)) / 2 of GPT-2's GELU in the fewest instructions: one special function, right to 1/4096 for any x. In a
// product's epilogue each instruction costs time that the tensor cores do not work: see step 3's fused_epilogues.md.
__device__ __forceinline__ float gelu_tanh_gate_coarse(float x) {
  const float u = x * (0.79788456f + 0.035677408f * x * x);
#ifdef __CUDA_ARCH__
  float t;
  asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(u));
#else
  const float t = tanhf(u);
#endif
  return 0.5f + 0.5f * t;
}

// gelu(x) for x of T. kCoarse: by the above, for half types and GPT-2's GELU.
template <class T, bool kTanh, bool kCoarse>
__device__ __forceinline__ compute_t<T> gelu_in_epilogue(compute_t<T> x) {
  if constexpr (kCoarse && kTanh && sizeof(T) == 2) {
    return x * gelu_tanh_gate_coarse(x);
  } else {
    return fast_gelu<T, kTanh>(x);
  }
}

// y = gelu(product). kKeep: the product itself goes to `written`, for the backward pass.
template <class T, bool kTanh, bool kCoarse, bool kKeep>
struct GeluEpilogue : Epilogue<T, false, kKeep> {
  GeluEpilogue(const Rows<T>& y, const Rows<T>& preactivation) : Epilogue<T, false, kKeep>{y, {}, preactivation} {}

  __device__ __forceinline__ void operator()(int64_t, int64_t, Packed<T>& value, Packed<T>& product) const {
    product = value;
    compute_t<T> x[8];
    widen(value, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = gelu_in_epilogue<T, kTanh, kCoarse>(x[j]);
    value = packed<T>(x);
  }
};

// grad = product · gelu'(x): the way back through GELU. gelu(x) is written besides, for the gradient of the weight that
// it was multiplied by.
template <class T, bool kTanh>
struct GeluSlopeEpilogue : Epilogue<T, true, true> {
  GeluSlopeEpilogue(const Rows<T>& grad, const Rows<T>& x, const Rows<T>& activation)
      : Epilogue<T, true, true>{grad, x, activation} {}

  __device__ __forceinline__ void operator()(int64_t, int64_t, Packed<T>& value, Packed<T>& other) const {
    compute_t<T> grad[8], x[8];
    widen(value, grad);
    widen(other, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      grad[j] *= fast_gelu_slope<T, kTanh>(x[j]);
      x[j] = fast_gelu<T, kTanh>(x[j]);
    }
    value = packed<T>(grad);
    other = packed<T>(x);
  }
};

// y = residual + dropout(product)
template <class T>
struct DropoutResidualEpilogue : Epilogue<T, true, false> {
  using C = compute_t<T>;
  ElementwiseDropout<C> dropout;

  DropoutResidualEpilogue(const Rows<T>& y, const Rows<T>& residual, const ElementwiseDropout<C>& dropout)
      : Epilogue<T, true, false>{y, residual, {}}, dropout(dropout) {}

  __device__ __forceinline__ void operator()(int64_t row, int64_t column, Packed<T>& value, Packed<T>& residual) const {
    if (dropout.threshold == 0) {
      value = sum_of(value, residual);
      return;
    }
    C x[8], more[8];
    widen(value, x);
    widen(residual, more);
    dropout.apply(row * this->out.width + column, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] += more[j];
    value = packed<T>(x);
  }
};

// An epilogue as a kernel of its own, after a product that lies in memory: a thread for eight neighbours.
constexpr int kEpilogueThreads = 256;

template <class T, class Epilogue>
__global__ void epilogue_kernel(const Rows<T> product, const Epilogue epilogue) {
  const int64_t across = (product.width + 7) / 8;
  const int64_t i = int64_t{blockIdx.x} * kEpilogueThreads + threadIdx.x, row = i / across, column = i % across * 8;
  if (!product.has(row, column)) return;
  const Packed<T> ahead = read_ahead(epilogue, row, column);
  apply_epilogue(epilogue, row, column, product.load(row, column), ahead);
}

template <class T, class Epilogue>
void launch_epilogue(const Rows<T>& product, const Epilogue& epilogue, void* stream) {
  const int64_t threads = product.rows * ceil_div(product.width, 8);
  epilogue_kernel<<<static_cast<unsigned>(ceil_div(threads, kEpilogueThreads)), kEpilogueThreads, 0,
                    as_stream(stream)>>>(product, epilogue);
  check_launch();
}

}  // namespace kf::KF_BACKEND
