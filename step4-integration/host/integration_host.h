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

// Of ops whose workers write into each other's memory: `rank` is one of the `peers`, `buffer` is its own, of `needed`
// bytes for rows of `width`, and `patience` is a time. `like`, `name`: what decides on the device, and its name.
void check_peers(const char* op, const at::Tensor& buffer, at::IntArrayRef peers, int64_t rank, const char* name,
                 const at::Tensor& like, int64_t width, int64_t needed, double patience);
void addresses_of(at::IntArrayRef peers, void** to);

// All of them, for Python's questions about their rungs.
std::vector<OpInfo> ops();

}  // namespace kf::step4
