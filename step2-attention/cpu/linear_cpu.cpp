// The matrix product of a layer and its gradients in plain C++: what each kernel must compute.
#include "cpu/linear_cpu.h"

#include <step2/layer_cpu.h>

namespace kf::cpu {

void linear(const kf::linear::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    Product<T> p = product_of<T>(a);
    p.x_transposed = a.x_transposed;
    product<T>(p);
  });
}

void linear_backward(const kf::linear_backward::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto grad = static_cast<const T*>(a.grad);
    multiply_back<T>(a, grad);
    sum_bias<T>(a, grad);
  });
}

}  // namespace kf::cpu
