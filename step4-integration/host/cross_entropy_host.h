// Cross-entropy, alone and behind the product that makes its logits. Outputs come last; an undefined one is made.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <optional>
#include <string_view>

namespace kf::step4 {

// keep: the gradient is wanted; else it is empty.
void cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t ignore_index, bool keep,
                   std::string_view rung, at::Tensor& loss, at::Tensor& lse, at::Tensor& grad);

// Returns the loss; the logits become its gradient.
at::Tensor cross_entropy_backward_(at::Tensor& logits, const at::Tensor& targets, int64_t ignore_index,
                                   std::string_view rung);

// scale is 1 / (the targets that count), and the gradients are those of the losses' sum; empty where not wanted.
void linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                          int64_t ignore_index, std::optional<int64_t> chunk, bool keep_hidden, bool keep_weight,
                          std::string_view rung, at::Tensor& loss, at::Tensor& scale, at::Tensor& grad_hidden,
                          at::Tensor& grad_weight);

OpInfo describe_cross_entropy();  // its rungs are those of all three

}  // namespace kf::step4
