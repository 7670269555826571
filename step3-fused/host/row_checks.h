// Checks that the host files of this step share.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/host.h>

#include <cmath>
#include <utility>
#include <vector>

namespace kf::step3 {

inline void check_eps(const char* op, double eps) {
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps), op, ": `eps` must be a finite number ≥ 0, got ", eps);
}

// mean and rstd: a number for each row of x, float32, or float64 for float64.
inline at::ScalarType statistics_dtype(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Their shape; that of nothing unless `keep`.
inline std::vector<int64_t> statistics_shape(const at::Tensor& x, bool keep) {
  return keep ? x.sizes().slice(0, x.dim() - 1).vec() : std::vector<int64_t>{0};
}

inline at::Tensor empty_statistic(const at::Tensor& x, bool keep = true) {
  return at::empty(statistics_shape(x, keep), x.options().dtype(statistics_dtype(x)));
}

// x_name: what the op calls x.
inline void check_statistics(const char* op, const at::Tensor& mean, const at::Tensor& rstd, const char* x_name,
                             const at::Tensor& x, bool outputs, bool keep = true) {
  for (const auto& [name, t] : {std::pair<const char*, const at::Tensor&>{"mean", mean}, {"rstd", rstd}}) {
    check_type(op, name, t, statistics_dtype(x));
    check_shape(op, name, t, statistics_shape(x, keep));
    check_device(op, name, t, x_name, x);
    TORCH_CHECK_VALUE(!outputs || t.is_contiguous(), op, ": `", name, "` must be contiguous");
  }
}

}  // namespace kf::step3
