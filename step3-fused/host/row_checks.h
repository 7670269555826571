// What the host files of this step share: checks of rows and their statistics, of dropout, of memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <kf/define_op.h>
#include <kf/dropout.h>
#include <kf/host.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

namespace kf::step3 {

inline void check_eps(const char* op, double eps) {
  TORCH_CHECK_VALUE(eps >= 0 && std::isfinite(eps), op, ": `eps` must be a finite number ≥ 0, got ", eps);
}

// mean and rstd: a number for each row of x, float32, or float64 for float64; unless `keep` none.
inline at::ScalarType statistics_dtype(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The leading dimensions of t; a shape of nothing unless `keep`.
inline std::vector<int64_t> kept_shape(const at::Tensor& t, int64_t dims, bool keep) {
  return keep ? t.sizes().slice(0, dims).vec() : std::vector<int64_t>{0};
}

// x_name: what the op calls x.
inline void check_statistic(const char* op, const char* name, const at::Tensor& t, at::IntArrayRef shape,
                            const char* x_name, const at::Tensor& x) {
  check_type(op, name, t, statistics_dtype(x));
  check_shape(op, name, t, shape);
  check_device(op, name, t, x_name, x);
}

inline void make_or_check_statistic(const char* op, const char* name, at::Tensor& out, at::IntArrayRef shape,
                                    const char* x_name, const at::Tensor& x) {
  if (!out.defined()) out = at::empty(shape, x.options().dtype(statistics_dtype(x)));
  check_statistic(op, name, out, shape, x_name, x);
  TORCH_CHECK_VALUE(out.is_contiguous(), op, ": `", name, "` must be contiguous");
}

inline void make_or_check_statistics(const char* op, at::Tensor& mean, at::Tensor& rstd, const char* x_name,
                                     const at::Tensor& x, bool keep = true) {
  const std::vector<int64_t> shape = kept_shape(x, x.dim() - 1, keep);
  make_or_check_statistic(op, "mean", mean, shape, x_name, x);
  make_or_check_statistic(op, "rstd", rstd, shape, x_name, x);
}

inline void* data_if(bool wanted, const at::Tensor& t) { return wanted ? t.data_ptr() : nullptr; }

// `check_apart` from inputs that may be none.
inline void check_apart_if_given(
    const char* op, std::initializer_list<Named> outs,
    std::initializer_list<std::pair<const char*, const std::optional<at::Tensor>&>> inputs) {
  for (const auto& [name, input] : inputs) {
    if (input) check_apart(op, outs, {{name, *input}});
  }
}

}  // namespace kf::step3
