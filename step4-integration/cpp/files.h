// A model's files as Hugging Face stores them: config.json and safetensors. What is wrong with one is an Error that
// names it, as in model/weights.py.
#pragma once

#include <kf/rung.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpt2 {

namespace fs = std::filesystem;
using Json = nlohmann::json;

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a file holds, as bytes and as JSON.
std::string read_text(const fs::path& path);
Json read_json(const fs::path& path);

struct Config {
  int64_t vocab_size = 50257, n_positions = 1024, n_embd = 768, n_layer = 12, n_head = 12, n_inner = 0;
  double layer_norm_epsilon = 1e-5;
  bool tanh = true;  // of GELU
  bool scale_attn_weights = true, scale_attn_by_inverse_layer_idx = false;
  bool bytes = false;  // the tokenizer: a token is a byte
};

Config read_config(const fs::path& folder);

// Memory at a multiple of 64 bytes, in large pages where the system has some: a token reads all weights once, and
// with pages of 4 KB the CPU would look up one for each thousand numbers.
class Memory {
  struct Free {
    void operator()(void* p) const;
  };
  std::unique_ptr<std::byte, Free> bytes_;

 public:
  explicit Memory(size_t size);
  std::byte* data() const { return bytes_.get(); }
};

// All weights of a model, by the names that GPT-2 gives them, in the dtype of the token table.
class Weights {
  std::vector<Memory> memory_;
  std::map<std::string, const void*> tensors_;

 public:
  kf::DType dtype{};

  Weights(const fs::path& folder, const Config& config);
  const void* at(const std::string& name) const { return tensors_.at(name); }
  // Each tensor and its size in bytes, for who copies them to a GPU.
  std::map<std::string, size_t> sizes;
};

// The name and the shape of each tensor of a model.
std::map<std::string, std::vector<int64_t>> shapes(const Config& config);

}  // namespace gpt2
