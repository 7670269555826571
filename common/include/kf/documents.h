// The documents of a packed row, as ops with attention take them: the checks before a launch.
#pragma once

#include <kf/host.h>

#include <optional>

namespace kf {

// Document d has the queries cu_seqlens[d] ≤ i < cu_seqlens[d + 1] of q, and of k the keys that cu_seqlens_k says; none
// given: the same ones. q and k have one batch.
inline void check_documents(const char* op, const at::Tensor& q, const at::Tensor& k,
                            const std::optional<at::Tensor>& key_begin, const std::optional<at::Tensor>& key_end,
                            const std::optional<at::Tensor>& cu_seqlens,
                            const std::optional<at::Tensor>& cu_seqlens_k) {
  TORCH_CHECK_VALUE(cu_seqlens || !cu_seqlens_k, op, ": `cu_seqlens_k` needs `cu_seqlens`");
  if (!cu_seqlens) return;
  TORCH_CHECK_VALUE(!key_begin && !key_end, op, ": `", key_begin ? "key_begin" : "key_end",
                    "` must be None where `cu_seqlens` is given: a packed row has no padding");
  TORCH_CHECK_VALUE(q.size(0) == 1, op, ": `q` must have batch 1 where `cu_seqlens` is given, got ", q.size(0));
  check_type(op, "cu_seqlens", *cu_seqlens, at::kInt);
  check_device(op, "cu_seqlens", *cu_seqlens, "q", q);
  check_dim(op, "cu_seqlens", *cu_seqlens, 1);
  TORCH_CHECK_VALUE(cu_seqlens->size(0) >= 2, op, ": `cu_seqlens` must have at least 2 numbers, got ",
                    cu_seqlens->size(0));
  if (cu_seqlens_k) {
    check_type(op, "cu_seqlens_k", *cu_seqlens_k, at::kInt);
    check_device(op, "cu_seqlens_k", *cu_seqlens_k, "q", q);
    check_shape(op, "cu_seqlens_k", *cu_seqlens_k, cu_seqlens->sizes());
  } else {
    TORCH_CHECK_VALUE(k.size(2) == q.size(2), op, ": `k` must be as long as `q` where `cu_seqlens_k` is None, got ",
                      k.size(2), " and ", q.size(2));
  }
}

// The numbers themselves, of CPU tensors. On a GPU that would wait for it: there kernels cut them at the row's ends.
inline void check_starts(const char* op, const char* name, const at::Tensor& starts, int64_t length) {
  if (!starts.is_cpu()) return;
  const int64_t last = starts.size(0) - 1, stride = starts.stride(0);
  const int32_t* const start = starts.const_data_ptr<int32_t>();
  TORCH_CHECK_VALUE(start[0] == 0, op, ": `", name, "` must begin with 0, got ", start[0]);
  for (int64_t d = 0; d < last; ++d) {
    TORCH_CHECK_VALUE(start[(d + 1) * stride] >= start[d * stride], op, ": `", name, "` must not fall, got ",
                      start[d * stride], " before ", start[(d + 1) * stride]);
  }
  TORCH_CHECK_VALUE(start[last * stride] == length, op, ": `", name, "` must end with ", length, ", got ",
                    start[last * stride]);
}

}  // namespace kf
