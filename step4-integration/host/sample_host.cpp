// sample: checks, allocation, dispatch.
#include "host/sample_host.h"

#include <cmath>

#include "cpu/sample_cpu.h"

namespace kf::step4 {
namespace {

Op<kf::sample::Args> sample_op() {
  return {"sample", cpu::sample, emulated::sample::rungs(), gpu::sample::rungs(), kf::sample::automatic};
}

void check_numbers(double temperature, int64_t top_k, double top_p, double min_p, double repetition_penalty) {
  TORCH_CHECK_VALUE(temperature >= 0 && std::isfinite(temperature),
                    "sample: `temperature` must be finite and not negative, got ", temperature);
  TORCH_CHECK_VALUE(top_k >= 0, "sample: `top_k` must not be negative, got ", top_k);
  TORCH_CHECK_VALUE(top_p >= 0 && top_p <= 1, "sample: `top_p` must be from 0 to 1, got ", top_p);
  TORCH_CHECK_VALUE(min_p >= 0 && min_p <= 1, "sample: `min_p` must be from 0 to 1, got ", min_p);
  TORCH_CHECK_VALUE(repetition_penalty > 0 && std::isfinite(repetition_penalty),
                    "sample: `repetition_penalty` must be finite and greater than 0, got ", repetition_penalty);
}

// Both are written where they lie.
void check_written(const at::Tensor& logits, const std::optional<at::Tensor>& rng_state,
                   const std::optional<at::Tensor>& seen, double temperature, double repetition_penalty) {
  TORCH_CHECK_VALUE(rng_state || temperature == 0, "sample: `rng_state` must be given where `temperature` is not 0");
  TORCH_CHECK_VALUE(seen || repetition_penalty == 1,
                    "sample: `seen` must be given where `repetition_penalty` is not 1");
  if (rng_state) {
    check_type("sample", "rng_state", *rng_state, at::kLong);
    check_device("sample", "rng_state", *rng_state, "logits", logits);
    check_shape("sample", "rng_state", *rng_state, {logits.size(0), 2});
    TORCH_CHECK_VALUE(rng_state->is_contiguous(), "sample: `rng_state` must be contiguous");
  }
  if (seen) {
    TORCH_CHECK_TYPE(seen->scalar_type() == at::kBool || seen->scalar_type() == at::kByte,
                     "sample: `seen` must be bool or uint8, got ", dtype_text(*seen));
    check_device("sample", "seen", *seen, "logits", logits);
    check_shape("sample", "seen", *seen, logits.sizes());
    TORCH_CHECK_VALUE(
        (seen->stride(1) == 1 || seen->size(1) == 1) && (seen->size(0) <= 1 || seen->stride(0) >= seen->size(1)),
        "sample: `seen` must have stride 1 along its last dimension, and rows apart from each other");
  }
}

void check_result(const char* name, const at::Tensor& out, at::ScalarType type, const at::Tensor& logits) {
  check_type("sample", name, out, type);
  check_device("sample", name, out, "logits", logits);
  check_shape("sample", name, out, {logits.size(0)});
  TORCH_CHECK_VALUE(out.is_contiguous(), "sample: `", name, "` must be contiguous");
}

}  // namespace

std::tuple<at::Tensor&, at::Tensor&> sample_out(const at::Tensor& logits, const std::optional<at::Tensor>& rng_state,
                                                const std::optional<at::Tensor>& seen, double temperature,
                                                int64_t top_k, double top_p, double min_p, double repetition_penalty,
                                                std::string_view rung, at::Tensor& token, at::Tensor& log_prob) {
  check_floating("sample", "logits", logits);
  check_dim("sample", "logits", logits, 2);
  TORCH_CHECK_VALUE(logits.size(1) > 0 && logits.size(1) <= kf::sample::kMostWidth,
                    "sample: `logits` must have from 1 to ", kf::sample::kMostWidth, " columns, got ", logits.size(1));
  check_numbers(temperature, top_k, top_p, min_p, repetition_penalty);
  check_written(logits, rng_state, seen, temperature, repetition_penalty);
  check_result("token", token, at::kLong, logits);
  check_result("log_prob", log_prob, at::kFloat, logits);
  const at::Tensor& state = rng_state ? *rng_state : token;
  const at::Tensor& marks = seen ? *seen : token;
  check_apart("sample", {{"token", token}, {"log_prob", log_prob}}, {{"logits", logits}});
  if (rng_state) {
    check_apart("sample", {{"rng_state", state}}, {{"logits", logits}, {"token", token}, {"log_prob", log_prob}});
  }
  if (seen) check_apart("sample", {{"seen", marks}}, {{"logits", logits}, {"token", token}, {"log_prob", log_prob}});
  if (seen && rng_state) check_apart("sample", {{"seen", marks}}, {{"rng_state", state}});
  check_rung(sample_op(), rung, logits);
  if (logits.size(0) == 0) return {token, log_prob};
  const at::Tensor rows = with_whole_rows(logits);
  run(sample_op(), rung, logits,
      {rows.data_ptr(), rng_state ? state.data_ptr<int64_t>() : nullptr,
       seen ? static_cast<uint8_t*>(marks.data_ptr()) : nullptr, token.data_ptr<int64_t>(), log_prob.data_ptr<float>(),
       logits.size(0), logits.size(1), rows.stride(0), seen ? marks.stride(0) : 0, temperature, top_k, top_p, min_p,
       repetition_penalty, dtype_of(logits)});
  return {token, log_prob};
}

std::tuple<at::Tensor, at::Tensor> sample(const at::Tensor& logits, const std::optional<at::Tensor>& rng_state,
                                          const std::optional<at::Tensor>& seen, double temperature, int64_t top_k,
                                          double top_p, double min_p, double repetition_penalty,
                                          std::string_view rung) {
  check_dim("sample", "logits", logits, 2);
  at::Tensor token = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  at::Tensor log_prob = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat));
  sample_out(logits, rng_state, seen, temperature, top_k, top_p, min_p, repetition_penalty, rung, token, log_prob);
  return {token, log_prob};
}

OpInfo sample_info() { return describe(sample_op()); }

}  // namespace kf::step4
