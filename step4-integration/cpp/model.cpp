#include "model.h"

#include <cmath>

namespace gpt2 {

void Backend::read(const kf::decode_step::Args& args, const std::vector<int64_t>& prompt) {
  for (const int64_t& id : prompt) {
    copy_in(const_cast<int64_t*>(args.ids), &id, sizeof id);
    step(args);
  }
}

Text::Text(Backend& backend, const Config& config, const Weights& weights, const Rule& rule, int64_t capacity)
    : backend_(backend) {
  const auto room = [&](int64_t count, int64_t bytes) { return backend.allocate(static_cast<size_t>(count * bytes)); };
  const auto copy = [&](const auto& values) {  // a vector
    const size_t bytes = values.size() * sizeof values[0];
    void* to = backend.allocate(bytes);
    backend.copy_in(to, values.data(), bytes);
    return to;
  };
  const auto weight = [&](const std::string& name) {
    return backend.weights(weights.at(name), weights.sizes.at(name));
  };
  for (int64_t layer = 0; layer < config.n_layer; ++layer) {
    const std::string of = "h." + std::to_string(layer) + ".";
    layers_.push_back({weight(of + "ln_1.weight"), weight(of + "ln_1.bias"), weight(of + "attn.c_attn.weight"),
                       weight(of + "attn.c_attn.bias"), weight(of + "attn.c_proj.weight"),
                       weight(of + "attn.c_proj.bias"), weight(of + "ln_2.weight"), weight(of + "ln_2.bias"),
                       weight(of + "mlp.c_fc.weight"), weight(of + "mlp.c_fc.bias"), weight(of + "mlp.c_proj.weight"),
                       weight(of + "mlp.c_proj.bias")});
  }
  const int64_t element = kf::size_of(weights.dtype), head_dim = config.n_embd / config.n_head;
  const int64_t of_layer = capacity * config.n_embd;
  token_ = static_cast<int64_t*>(room(1, sizeof(int64_t)));

  step_.ids = token_;
  step_.end = static_cast<int32_t*>(copy(std::vector<int32_t>{0}));
  step_.begin = static_cast<int32_t*>(copy(std::vector<int32_t>{0}));
  step_.token_weight = weight("wte.weight");
  step_.position_weight = weight("wpe.weight");
  step_.weights = layers_.data();
  step_.ln_weight = weight("ln_f.weight");
  step_.ln_bias = weight("ln_f.bias");
  step_.k_cache = room(config.n_layer * of_layer, element);
  step_.v_cache = room(config.n_layer * of_layer, element);
  step_.k_stride = step_.v_stride = {of_layer, of_layer, capacity * head_dim, head_dim};
  step_.logits = room(config.vocab_size, element);
  step_.layers = config.n_layer;
  step_.batch = 1;
  step_.heads = config.n_head;
  step_.head_dim = head_dim;
  step_.capacity = capacity;
  step_.width = config.n_embd;
  step_.inner = config.n_inner;
  step_.vocab = config.vocab_size;
  step_.positions = config.n_positions;
  step_.scale = config.scale_attn_weights ? 1 / std::sqrt(static_cast<double>(head_dim)) : 1;
  step_.scale_by_layer = config.scale_attn_by_inverse_layer_idx;
  step_.eps = config.layer_norm_epsilon;
  step_.tanh = config.tanh;
  step_.dtype = weights.dtype;

  sample_.logits = step_.logits;
  if (rule.temperature > 0) sample_.rng_state = static_cast<int64_t*>(copy(std::vector<int64_t>{rule.seed, 0}));
  if (rule.repetition_penalty != 1) {
    sample_.seen = static_cast<uint8_t*>(copy(std::vector<uint8_t>(static_cast<size_t>(config.vocab_size), 0)));
  }
  sample_.token = token_;
  sample_.log_prob = static_cast<float*>(room(1, sizeof(float)));
  sample_.batch = 1;
  sample_.width = sample_.stride = sample_.seen_stride = config.vocab_size;
  sample_.temperature = rule.temperature;
  sample_.top_k = rule.top_k;
  sample_.top_p = rule.top_p;
  sample_.min_p = rule.min_p;
  sample_.repetition_penalty = rule.repetition_penalty;
  sample_.dtype = weights.dtype;
}

void Text::read(const std::vector<int64_t>& prompt) {
  if (sample_.seen != nullptr) {
    constexpr uint8_t kSeen = 1;
    for (const int64_t id : prompt) backend_.copy_in(sample_.seen + id, &kSeen, 1);
  }
  backend_.read(step_, prompt);
}

int64_t Text::choose() {
  backend_.sample(sample_);
  int64_t token;
  backend_.copy_out(&token, token_, sizeof token);
  if (token >= 0) return token;
  const std::string said = backend_.failure();
  throw Error(!said.empty() ? said : "the model's logits are no numbers: are these its weights?");
}

}  // namespace gpt2
