// all_reduce on torch tensors; pybind.cpp registers it.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <string_view>
#include <tuple>

namespace kf::step4 {

std::tuple<at::Tensor, at::Tensor> all_reduce(const at::Tensor& x, const at::Tensor& x_bias, const at::Tensor& residual,
                                              const at::Tensor& weight, const at::Tensor& bias, at::Tensor& buffer,
                                              at::IntArrayRef peers, int64_t rank, double eps, double patience,
                                              std::string_view rung);

// How large a buffer must be, and how much of its beginning must be zeros.
int64_t all_reduce_bytes(int64_t width, int64_t workers);
int64_t all_reduce_header();

// How many workers it takes, and how long a row may be.
std::tuple<int64_t, int64_t> all_reduce_most();

OpInfo all_reduce_info();

}  // namespace kf::step4
