// decode_step on torch tensors; pybind.cpp registers it.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <optional>
#include <string>
#include <string_view>

namespace kf::step4 {

at::Tensor decode_step(const at::Tensor& ids, at::Tensor& end, const at::Tensor& begin, const at::Tensor& token_weight,
                       const at::Tensor& position_weight, at::TensorList weights, at::Tensor& k_cache,
                       at::Tensor& v_cache, const std::optional<at::Tensor>& packed,
                       const std::optional<at::Tensor>& buffer, at::IntArrayRef peers, int64_t rank,
                       at::IntArrayRef words, std::optional<double> scale, bool scale_by_layer, double eps,
                       std::string_view approximate, double patience, std::string_view rung);
at::Tensor& decode_step_out(const at::Tensor& ids, at::Tensor& end, const at::Tensor& begin,
                            const at::Tensor& token_weight, const at::Tensor& position_weight, at::TensorList weights,
                            at::Tensor& k_cache, at::Tensor& v_cache, const std::optional<at::Tensor>& packed,
                            const std::optional<at::Tensor>& buffer, at::IntArrayRef peers, int64_t rank,
                            at::IntArrayRef words, std::optional<double> scale, bool scale_by_layer, double eps,
                            std::string_view approximate, double patience, std::string_view rung, at::Tensor& logits);

// Of a worker that shares a model with others: how large its buffer is, and how much of it begins as zeros.
int64_t decode_step_bytes(int64_t width, int64_t workers);
int64_t decode_step_header();

at::Tensor decode_pack(const at::Tensor& token_weight, at::TensorList weights, std::string_view rung);
at::Tensor& decode_pack_out(const at::Tensor& token_weight, at::TensorList weights, std::string_view rung,
                            at::Tensor& packed);
std::string decode_pack_refusal(const at::Tensor& token_weight, at::TensorList weights, std::string_view rung,
                                int64_t rows);
void decode_check(at::Tensor& packed);

OpInfo decode_step_info();

}  // namespace kf::step4
