// This stage's ops on torch tensors; pybind.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <vector>

namespace kf::step4 {

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& token_weight, const at::Tensor& position_weight,
                     int64_t position, std::string_view rung);
at::Tensor& embedding_out(const at::Tensor& ids, const at::Tensor& token_weight, const at::Tensor& position_weight,
                          int64_t position, std::string_view rung, at::Tensor& out);

void kv_append(at::Tensor& k_cache, at::Tensor& v_cache, const at::Tensor& k, const at::Tensor& v, int64_t position,
               std::string_view rung);

// The names an op accepts as `rung`, in the order of the lesson.
std::vector<std::string> rungs(const std::string& op, bool on_gpu);

}  // namespace kf::step4
