// The backend of plain C++. A prompt is read at once: its products have many rows, and read each weight once.
#include <kf/rung.h>

#include <cstring>

#include "cpu/decode_step_cpu.h"
#include "cpu/integration_cpu.h"
#include "cpu/sample_cpu.h"
#include "model.h"
#include "step2-attention/cpu/linear_cpu.h"
#include "step3-fused/cpu/fused_cpu.h"
#include "step3-fused/cpu/linear_cpu.h"

namespace gpt2 {
namespace {

namespace cpu = kf::cpu;

class Plain : public Backend {
  std::vector<Memory> memory_;

 public:
  void* allocate(size_t bytes) override { return memory_.emplace_back(bytes).data(); }
  void copy_in(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  void copy_out(void* to, const void* from, size_t bytes) override { std::memcpy(to, from, bytes); }
  const void* weights(const void* from, size_t) override { return from; }
  void sample(const kf::sample::Args& args) override { cpu::sample(args); }
  void step(kf::decode_step::Args args) override { cpu::decode_step(args); }

  // As model/blocks/v4_products.py does it.
  void read(const kf::decode_step::Args& a, const std::vector<int64_t>& prompt) override {
    const auto rows = static_cast<int64_t>(prompt.size()), width = a.width, element = kf::size_of(a.dtype);
    const auto room = [&](int64_t columns) { return Memory(static_cast<size_t>(rows * columns * element)); };
    const Memory x = room(width), sum = room(width), y = room(width), packed = room(3 * width);

    cpu::embedding({prompt.data(), a.token_weight, a.position_weight, x.data(), 1, rows, width, a.vocab, a.positions, 0,
                    nullptr, true, a.dtype});
    const auto normalise = [&](const void* weight, const void* bias) {
      cpu::layer_norm({x.data(), weight, bias, y.data(), rows, width, a.eps, a.dtype});
    };
    normalise(a.weights[0].ln_1_weight, a.weights[0].ln_1_bias);
    for (int64_t layer = 0; layer < a.layers; ++layer) {
      const kf::decode_step::Layer& w = a.weights[layer];
      cpu::linear({y.data(), w.attention_weight, w.attention_bias, packed.data(), rows, width, 3 * width, false, false,
                   false, a.dtype});
      const auto part = [&](int64_t i) {  // q, k and v lie side by side, and in each the heads
        return kf::TensorRef{packed.data() + i * width * element, rows * 3 * width, a.head_dim, 3 * width};
      };
      append(a, layer, part(1), part(2), rows);
      kf::attention_block::Args block{};
      block.attention = {part(0), part(1), part(2), 1, a.heads, rows, rows, a.head_dim, scale_of(a, layer), true};
      block.residual = x.data();
      block.proj_weight = w.projection_weight;
      block.proj_bias = w.projection_bias;
      block.weight = w.ln_2_weight;
      block.bias = w.ln_2_bias;
      block.y = y.data();
      block.sum = sum.data();
      block.eps = a.eps;
      block.dtype = a.dtype;
      cpu::attention_block(block);
      cpu::mlp({y.data(), w.fc_weight, w.fc_bias, w.second_weight, w.second_bias, sum.data(), x.data(), nullptr, rows,
                width, a.inner, false, a.tanh, false, a.dtype});
      const bool last = layer + 1 == a.layers;
      normalise(last ? a.ln_weight : a.weights[layer + 1].ln_1_weight,
                last ? a.ln_bias : a.weights[layer + 1].ln_1_bias);
    }
    cpu::linear({y.data() + (rows - 1) * width * element, a.token_weight, nullptr, a.logits, 1, width, a.vocab, false,
                 true, false, a.dtype});
    *a.end = static_cast<int32_t>(rows);
  }

 private:
  // The prompt's keys and values into a layer's cache.
  static void append(const kf::decode_step::Args& a, int64_t layer, const kf::TensorRef& k, const kf::TensorRef& v,
                     int64_t rows) {
    const auto in = [](const kf::TensorRef& t) {
      return kf::kv_append::Strides{t.batch_stride, t.head_stride, t.seq_stride};
    };
    const auto of_layer = [&](void* cache, const kf::decode_step::CacheStrides& s) {
      return static_cast<std::byte*>(cache) + layer * s.layer * kf::size_of(a.dtype);
    };
    const auto strides = [](const kf::decode_step::CacheStrides& s) {
      return kf::kv_append::Strides{s.batch, s.head, s.slot};
    };
    kf::kv_append::Args args{};
    args.k = k.data;
    args.v = v.data;
    args.k_cache = of_layer(a.k_cache, a.k_stride);
    args.v_cache = of_layer(a.v_cache, a.v_stride);
    args.k_strides = in(k);
    args.v_strides = in(v);
    args.k_cache_strides = strides(a.k_stride);
    args.v_cache_strides = strides(a.v_stride);
    args.batch = 1;
    args.heads = a.heads;
    args.length = rows;
    args.head_dim = a.head_dim;
    args.dtype = a.dtype;
    cpu::kv_append(args);
  }
};

}  // namespace

std::unique_ptr<Backend> plain_cpp() { return std::make_unique<Plain>(); }

}  // namespace gpt2
