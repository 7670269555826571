// decode_step in plain C++: the layers one after the other. The residual stream is kept in float32; what products read
// is rounded to the tensors' dtype.
#include "cpu/decode_step_cpu.h"

#include <step1/rows_cpu.h>
#include <step2/product_cpu.h>

#include <cmath>
#include <vector>

namespace kf::cpu {
namespace {

using kf::decode_step::Args;
using kf::decode_step::CacheStrides;
using kf::decode_step::Layer;

template <class T>
KF_CPU_CLONES void normalise(const compute_t<T>* x, const T* weight, const T* bias, double eps, T* y, int64_t width) {
  using C = compute_t<T>;
  double sum = 0, squares = 0;
  for (int64_t c = 0; c < width; ++c) sum += static_cast<double>(x[c]);
  const double mean = sum / static_cast<double>(width);
  for (int64_t c = 0; c < width; ++c)
    squares += (static_cast<double>(x[c]) - mean) * (static_cast<double>(x[c]) - mean);
  const auto factor = static_cast<C>(1 / std::sqrt(squares / static_cast<double>(width) + eps));
  for (int64_t c = 0; c < width; ++c) {
    y[c] = static_cast<T>((x[c] - static_cast<C>(mean)) * factor * static_cast<C>(weight[c]) + static_cast<C>(bias[c]));
  }
}

// One query of one head: y = softmax(q · keys) · values. `scores` has room for all keys.
template <class T>
KF_CPU_CLONES void attend(const T* query, const T* k, int64_t k_slot, const T* v, int64_t v_slot, int64_t keys,
                          int64_t head_dim, compute_t<T> scale, compute_t<T>* scores, compute_t<T>* room, T* y) {
  using C = compute_t<T>;
  C *q = room, *row = room + head_dim, *out = room + 2 * head_dim;
  for (int64_t c = 0; c < head_dim; ++c) q[c] = static_cast<C>(query[c]) * scale;
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t c = 0; c < head_dim; ++c) row[c] = static_cast<C>(k[j * k_slot + c]);
    scores[j] = dot(q, row, head_dim);
  }
  const C sum = exp_and_sum(scores, scores, keys, max_of(scores, keys));
  for (int64_t c = 0; c < head_dim; ++c) out[c] = 0;
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t c = 0; c < head_dim; ++c) out[c] += scores[j] * static_cast<C>(v[j * v_slot + c]);
  }
  for (int64_t c = 0; c < head_dim; ++c) y[c] = static_cast<T>(out[c] / sum);
}

// The state of a step. What products read and write is of T, [batch, …].
template <class T>
struct Step {
  using C = compute_t<T>;
  const Args& a;
  std::vector<C> x;                          // the residual stream
  std::vector<T> y, packed, update, hidden;  // normalised, or attended; q, k and v; a product's; the MLP's

  explicit Step(const Args& args)
      : a(args),
        x(size(a.width)),
        y(size(a.width)),
        packed(size(3 * a.width)),
        update(size(a.width)),
        hidden(size(a.inner)) {}

  size_t size(int64_t width) const { return static_cast<size_t>(a.batch * width); }
  static const T* of(const void* tensor) { return static_cast<const T*>(tensor); }

  void embed() {
    for (int64_t b = 0; b < a.batch; ++b) {
      const T* token = of(a.token_weight) + a.ids[b] * a.width;
      const T* position = of(a.position_weight) + (int64_t{a.end[b]} - a.begin[b]) * a.width;
      for (int64_t c = 0; c < a.width; ++c) {
        x[static_cast<size_t>(b * a.width + c)] = static_cast<C>(token[c]) + static_cast<C>(position[c]);
      }
    }
  }

  void normalise_all(const void* weight, const void* bias) {
    for (int64_t b = 0; b < a.batch; ++b) {
      normalise<T>(x.data() + b * a.width, of(weight), of(bias), a.eps, y.data() + b * a.width, a.width);
    }
  }

  template <class Epilogue = AsItIs>
  void multiply(const std::vector<T>& from, const void* weight, const void* bias, T* to, int64_t depth, int64_t width,
                bool transposed = false, const Epilogue& epilogue = {}) {
    product<T>(Product<T>{from.data(), of(weight), of(bias), to, a.batch, depth, width, false, transposed}, AsItIs{},
               epilogue);
  }

  void add_update() {
    for (size_t i = 0; i < x.size(); ++i) x[i] += static_cast<C>(update[i]);
  }

  // Writes the new token's keys and values, then attends.
  void attend_all(int64_t layer) {
    const auto scale = static_cast<C>(scale_of(a, layer));
    parallel_for(0, a.batch * a.heads, 1, [&](int64_t first, int64_t last) {
      std::vector<C> scores(static_cast<size_t>(a.capacity)), room(static_cast<size_t>(3 * a.head_dim));
      for (int64_t i = first; i < last; ++i) {
        const int64_t b = i / a.heads, head = i % a.heads, begin = a.begin[b], end = a.end[b];
        const T* q = packed.data() + b * 3 * a.width + head * a.head_dim;
        const auto of_head = [&](void* cache, const CacheStrides& s) {
          return static_cast<T*>(cache) + layer * s.layer + b * s.batch + head * s.head;
        };
        T *k = of_head(a.k_cache, a.k_stride), *v = of_head(a.v_cache, a.v_stride);
        std::copy_n(q + a.width, a.head_dim, k + end * a.k_stride.slot);
        std::copy_n(q + 2 * a.width, a.head_dim, v + end * a.v_stride.slot);
        attend<T>(q, k + begin * a.k_stride.slot, a.k_stride.slot, v + begin * a.v_stride.slot, a.v_stride.slot,
                  end + 1 - begin, a.head_dim, scale, scores.data(), room.data(),
                  y.data() + b * a.width + head * a.head_dim);
      }
    });
  }

  void run() {
    embed();
    for (int64_t layer = 0; layer < a.layers; ++layer) {
      const Layer& w = a.weights[layer];
      normalise_all(w.ln_1_weight, w.ln_1_bias);
      multiply(y, w.attention_weight, w.attention_bias, packed.data(), a.width, 3 * a.width);
      attend_all(layer);
      multiply(y, w.projection_weight, w.projection_bias, update.data(), a.width, a.width);
      add_update();
      normalise_all(w.ln_2_weight, w.ln_2_bias);
      if (a.tanh) {
        multiply(y, w.fc_weight, w.fc_bias, hidden.data(), a.width, a.inner, false, Gelu<true>{});
      } else {
        multiply(y, w.fc_weight, w.fc_bias, hidden.data(), a.width, a.inner, false, Gelu<false>{});
      }
      multiply(hidden, w.second_weight, w.second_bias, update.data(), a.inner, a.width);
      add_update();
    }
    normalise_all(a.ln_weight, a.ln_bias);
    multiply(y, a.token_weight, nullptr, static_cast<T*>(a.logits), a.width, a.vocab, true);
    for (int64_t b = 0; b < a.batch; ++b) a.end[b] += 1;
  }
};

}  // namespace

void decode_step(const Args& a) {
  with_type(a.dtype, [&](auto type) { Step<typename decltype(type)::element>(a).run(); });
}

}  // namespace kf::cpu
