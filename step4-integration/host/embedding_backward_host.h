// embedding_backward on torch tensors; pybind.cpp registers it.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <string_view>

namespace kf::step4 {

// What it writes to is made where it is not defined.
void embedding_backward(const at::Tensor& grad, const at::Tensor& ids, int64_t vocab, std::string_view rung,
                        at::Tensor& out);

OpInfo describe_embedding_backward();

}  // namespace kf::step4
