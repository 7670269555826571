// sample in plain C++: sorts where the kernels search. It takes the same token to the last bit, since weights are made
// by the same roundings, and are then integers.
#include "cpu/sample_cpu.h"

#include <kf/cpu.h>
#include <step1/philox_cpu.h>
#include <step1/rows_cpu.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

namespace kf::cpu {
namespace {

using kf::sample::Args;
using kf::sample::kWeightBits;

// Taylor's polynomial of e^r, from r^k/k! on, divided by r^k.
template <int k>
constexpr double kInverseFactorial = kInverseFactorial<k - 1> / k;
template <>
constexpr double kInverseFactorial<0> = 1;
template <int k, int kLast, class C>
KF_CPU_INLINE C taylor(C r) {
  if constexpr (k == kLast) {
    return C(kInverseFactorial<k>);
  } else {
    return std::fma(taylor<k + 1, kLast>(r), r, C(kInverseFactorial<k>));
  }
}

// e^difference of a difference up to 0, times 2³⁵, rounded: weight_of of kernels/sample/row.h, operation by operation.
template <class C>
KF_CPU_INLINE uint64_t weight_of(C difference) {
  using Bits = std::conditional_t<std::is_same_v<C, double>, int64_t, int32_t>;
  constexpr bool kDouble = std::is_same_v<C, double>;
  const C bounded = difference >= C(-26) ? difference : C(-26);
  const C n = std::rint(bounded * C(1.4426950408889634));
  C r = std::fma(-n, kDouble ? C(6.93147180369123816490e-01) : C(0.693359375), bounded);
  r = std::fma(-n, kDouble ? C(1.90821492927058770002e-10) : C(-2.12194440e-4), r);
  const Bits bits = (static_cast<Bits>(n) + kWeightBits + (kDouble ? 1023 : 127)) << (kDouble ? 52 : 23);
  C scale;
  std::memcpy(&scale, &bits, sizeof scale);
  const auto weight = static_cast<uint64_t>(static_cast<int64_t>(taylor<0, kDouble ? 13 : 7>(r) * scale + C(0.5)));
  return difference >= C(-26) ? weight : 0;
}

template <class C>
KF_CPU_CLONES static void weights_of(const C* scores, C max, C temperature, uint64_t* weights, int64_t width) {
  for (int64_t c = 0; c < width; ++c) weights[c] = weight_of((scores[c] - max) / temperature);
}

// Leaves weights of 0 of what top_k, top_p and min_p leave out. Of equals, all stay or none.
template <class C>
void leave_out(const Args& a, const std::vector<C>& scores, std::vector<uint64_t>& weights) {
  const auto cut_below = [&](C least) {
    for (int64_t c = 0; c < a.width; ++c) weights[c] = scores[c] < least ? 0 : weights[c];
  };
  if (a.top_k > 0 && a.top_k < a.width) {
    std::vector<C> sorted = scores;
    std::nth_element(sorted.begin(), sorted.begin() + (a.top_k - 1), sorted.end(), std::greater<C>());
    cut_below(sorted[a.top_k - 1]);
  }
  if (a.top_p < 1) {
    std::vector<int64_t> order;
    for (int64_t c = 0; c < a.width; ++c) {
      if (weights[c] > 0) order.push_back(c);
    }
    std::sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return scores[i] > scores[j]; });
    const auto total = static_cast<double>(std::accumulate(weights.begin(), weights.end(), uint64_t{0}));
    const auto target = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(total * a.top_p)));
    uint64_t reached = 0;
    auto last = order.begin();
    while ((reached += weights[*last]) < target) ++last;
    cut_below(scores[*last]);
  }
  const auto least = static_cast<uint64_t>(std::ceil(std::ldexp(a.min_p, kWeightBits)));
  for (uint64_t& weight : weights) weight = weight < least ? 0 : weight;
}

// A number from 0 to total − 1, and the next one at the next call.
uint64_t draw(int64_t* rng_state, uint64_t total) {
  uint16_t numbers[8 * kPhiloxLanes];
  // philox() of step 1 counts offsets as PyTorch does, four a call; here a draw is one call.
  philox(static_cast<uint64_t>(rng_state[0]), static_cast<uint64_t>(rng_state[1]) * 4, 0, 1, numbers);
  uint64_t random = 0;
  for (int j = 3; j >= 0; --j) random = random << 16 | numbers[j];
  return static_cast<uint64_t>(static_cast<unsigned __int128>(random) * total >> 64);
}

template <class T>
void sample_row(const Args& a, int64_t row) {
  using C = compute_t<T>;
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
  uint8_t* seen = a.seen == nullptr ? nullptr : a.seen + row * a.seen_stride;
  const C penalty = static_cast<C>(a.repetition_penalty), temperature = static_cast<C>(a.temperature);

  std::vector<C> raw(static_cast<size_t>(a.width)), scores;
  for (int64_t c = 0; c < a.width; ++c) raw[c] = static_cast<C>(logits[c]);
  scores = raw;
  if (seen != nullptr) {
    for (int64_t c = 0; c < a.width; ++c) {
      if (seen[c]) scores[c] = raw[c] < 0 ? raw[c] * penalty : raw[c] / penalty;
    }
  }
  // max_element leaves a NaN that comes first, and passes over others.
  const bool has_nan = std::any_of(raw.begin(), raw.end(), [](C x) { return std::isnan(x); });
  const int64_t likeliest = std::max_element(scores.begin(), scores.end()) - scores.begin();
  int64_t* rng_state = a.rng_state == nullptr || temperature == 0 ? nullptr : a.rng_state + 2 * row;
  int64_t token = likeliest;
  std::vector<uint64_t> weights(raw.size());
  if (has_nan || std::isinf(scores[likeliest])) {
    token = -1;
  } else if (rng_state != nullptr) {
    weights_of(scores.data(), scores[likeliest], temperature, weights.data(), a.width);
    leave_out(a, scores, weights);
    uint64_t rest = draw(rng_state, std::accumulate(weights.begin(), weights.end(), uint64_t{0}));
    for (token = 0; rest >= weights[token]; ++token) rest -= weights[token];
  }
  if (rng_state != nullptr) rng_state[1] = static_cast<int64_t>(static_cast<uint64_t>(rng_state[1]) + 1);
  a.token[row] = token;
  a.log_prob[row] = std::numeric_limits<float>::quiet_NaN();
  if (token < 0) return;
  if (seen != nullptr) seen[token] = 1;
  const C max = *std::max_element(raw.begin(), raw.end());
  weights_of(raw.data(), max, C(1), weights.data(), a.width);
  const uint64_t sum = std::accumulate(weights.begin(), weights.end(), uint64_t{0});
  const double difference = static_cast<double>(raw[token]) - static_cast<double>(max);
  a.log_prob[row] = static_cast<float>(difference - std::log(std::ldexp(static_cast<double>(sum), -kWeightBits)));
}

}  // namespace

void sample(const Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    for_rows(a.batch, a.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) sample_row<T>(a, row);
    });
  });
}

}  // namespace kf::cpu
