// Softmax and attention on torch tensors; pybind.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace kf::step2 {

at::Tensor softmax(const at::Tensor& x, std::optional<double> scale, bool causal, std::string_view rung);
at::Tensor& softmax_out(const at::Tensor& x, std::optional<double> scale, bool causal, std::string_view rung,
                        at::Tensor& out);
at::Tensor softmax_autocast(const at::Tensor& x, std::optional<double> scale, bool causal, std::string_view rung);

at::Tensor softmax_backward(const at::Tensor& grad, const at::Tensor& y, std::optional<double> scale, bool causal,
                            std::string_view rung);
at::Tensor& softmax_backward_out(const at::Tensor& grad, const at::Tensor& y, std::optional<double> scale, bool causal,
                                 std::string_view rung, at::Tensor& out);

// The output, and the log-sum-exp of each query. `rng_state` may be none where `dropout_p` is 0.
std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             const std::optional<at::Tensor>& key_begin,
                                             const std::optional<at::Tensor>& key_end,
                                             const std::optional<at::Tensor>& rng_state, bool causal,
                                             std::optional<double> scale, double dropout_p, std::string_view rung);
std::tuple<at::Tensor&, at::Tensor&> attention_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                   const std::optional<at::Tensor>& key_begin,
                                                   const std::optional<at::Tensor>& key_end,
                                                   const std::optional<at::Tensor>& rng_state, bool causal,
                                                   std::optional<double> scale, double dropout_p, std::string_view rung,
                                                   at::Tensor& out, at::Tensor& lse);
std::tuple<at::Tensor, at::Tensor> attention_autocast(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                      const std::optional<at::Tensor>& key_begin,
                                                      const std::optional<at::Tensor>& key_end,
                                                      const std::optional<at::Tensor>& rng_state, bool causal,
                                                      std::optional<double> scale, double dropout_p,
                                                      std::string_view rung);

// The gradients of q, k and v.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
    const at::Tensor& lse, const std::optional<at::Tensor>& key_begin, const std::optional<at::Tensor>& key_end,
    const std::optional<at::Tensor>& grad_lse, const std::optional<at::Tensor>& rng_state, bool causal,
    std::optional<double> scale, double dropout_p, std::string_view rung);
std::tuple<at::Tensor&, at::Tensor&, at::Tensor&> attention_backward_out(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
    const at::Tensor& lse, const std::optional<at::Tensor>& key_begin, const std::optional<at::Tensor>& key_end,
    const std::optional<at::Tensor>& grad_lse, const std::optional<at::Tensor>& rng_state, bool causal,
    std::optional<double> scale, double dropout_p, std::string_view rung, at::Tensor& dq, at::Tensor& dk,
    at::Tensor& dv);

// The output, and the log-sum-exp of each query.
std::tuple<at::Tensor, at::Tensor> attention_decode(const at::Tensor& q, const at::Tensor& k_cache,
                                                    const at::Tensor& v_cache,
                                                    const std::optional<at::Tensor>& key_begin,
                                                    const std::optional<at::Tensor>& key_end,
                                                    const std::optional<at::Tensor>& block_table,
                                                    std::optional<double> scale, std::string_view rung);
std::tuple<at::Tensor&, at::Tensor&> attention_decode_out(const at::Tensor& q, const at::Tensor& k_cache,
                                                          const at::Tensor& v_cache,
                                                          const std::optional<at::Tensor>& key_begin,
                                                          const std::optional<at::Tensor>& key_end,
                                                          const std::optional<at::Tensor>& block_table,
                                                          std::optional<double> scale, std::string_view rung,
                                                          at::Tensor& out, at::Tensor& lse);
std::tuple<at::Tensor, at::Tensor> attention_decode_autocast(const at::Tensor& q, const at::Tensor& k_cache,
                                                             const at::Tensor& v_cache,
                                                             const std::optional<at::Tensor>& key_begin,
                                                             const std::optional<at::Tensor>& key_end,
                                                             const std::optional<at::Tensor>& block_table,
                                                             std::optional<double> scale, std::string_view rung);

// All of them, for Python's questions about their rungs.
std::vector<OpInfo> ops();

}  // namespace kf::step2
