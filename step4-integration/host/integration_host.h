// This step's ops on torch tensors; pybind.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <optional>
#include <string_view>
#include <vector>

namespace kf::step4 {

at::Tensor embedding(const at::Tensor& ids, const at::Tensor& token_weight, const at::Tensor& position_weight,
                     const std::optional<at::Tensor>& positions, int64_t position, std::string_view rung);
at::Tensor& embedding_out(const at::Tensor& ids, const at::Tensor& token_weight, const at::Tensor& position_weight,
                          const std::optional<at::Tensor>& positions, int64_t position, std::string_view rung,
                          at::Tensor& out);

void kv_append(at::Tensor& k_cache, at::Tensor& v_cache, const at::Tensor& k, const at::Tensor& v, int64_t position,
               const std::optional<at::Tensor>& positions, std::string_view rung);

// What `ids` may be; and, of contiguous ones on the CPU, that each has its row. On a GPU the host would have to wait
// for them: there the kernels look.
void check_id_type(const char* op, const at::Tensor& ids);
void check_ids(const char* op, const at::Tensor& ids, int64_t vocab);

// All of them, for Python's questions about their rungs.
std::vector<OpInfo> ops();

}  // namespace kf::step4
