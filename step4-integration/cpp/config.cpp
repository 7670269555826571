// config.json: the sizes of a model, and what it asks for that ours cannot do.
#include <fstream>
#include <iterator>

#include "files.h"

namespace gpt2 {
namespace {

constexpr int64_t kMostOfASize = int64_t{1} << 24;

// What a file is that is not what its name says, where its first bytes tell.
std::string hint(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) return "; it is empty";
  const std::string pointer = "version https://git-lfs";
  if (text.compare(first, pointer.size(), pointer) == 0) {
    return "; it is a pointer of Git LFS: `git lfs pull` fetches the file itself";
  }
  return text[first] == '<' ? "; it looks like a web page" : "";
}

struct Reader {
  const fs::path& path;
  const Json& entries;

  [[noreturn]] void fail(const std::string& key, const std::string& must) const {
    throw Error(path.string() + ": `" + key + "` must be " + must + ", got " + entries.at(key).dump());
  }

  // An entry must have this value where it is there.
  void require(const char* key, const Json& value) const {
    if (entries.contains(key) && entries[key] != value) fail(key, value.dump());
  }

  void read(const char* key, const char* alias, int64_t& to) const {
    for (const char* name : {key, alias}) {
      if (name == nullptr || !entries.contains(name)) continue;
      const Json& value = entries[name];
      if (!value.is_number_integer()) fail(name, "an integer");
      // Large ones would wrap around: nlohmann reads them as unsigned.
      const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() < kMostOfASize : false;
      if (!fits || value.get<int64_t>() < 1) fail(name, "from 1 to 2^24 - 1");
      if (name == alias && entries.contains(key) && entries[key] != value) {
        fail(alias, std::string("`") + key + "`, of which it is another name");
      }
      to = value.get<int64_t>();
    }
  }

  void read(const char* key, bool& to) const {
    if (!entries.contains(key)) return;
    if (!entries[key].is_boolean()) fail(key, "true or false");
    to = entries[key].get<bool>();
  }
};

}  // namespace

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || fs::is_directory(path)) {
    throw Error(path.string() + (fs::exists(path) ? " cannot be read" : " is missing"));
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

Json read_json(const fs::path& path) {
  const std::string text = read_text(path);
  Json entries = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (entries.is_discarded()) throw Error(path.string() + ": no JSON" + hint(text));
  if (!entries.is_object()) throw Error(path.string() + ": must hold an object, got " + entries.dump().substr(0, 40));
  return entries;
}

Config read_config(const fs::path& folder) {
  const fs::path path = folder / "config.json";
  const Json entries = read_json(path);
  const Reader reader{path, entries};
  reader.require("model_type", "gpt2");
  reader.require("add_cross_attention", false);
  reader.require("tie_word_embeddings", true);
  reader.require("is_causal", true);
  reader.require("sliding_window", nullptr);
  reader.require("attention_chunk_size", nullptr);

  Config config;
  reader.read("vocab_size", nullptr, config.vocab_size);
  reader.read("n_positions", "max_position_embeddings", config.n_positions);
  reader.read("n_embd", "hidden_size", config.n_embd);
  reader.read("n_layer", "num_hidden_layers", config.n_layer);
  reader.read("n_head", "num_attention_heads", config.n_head);
  config.n_inner = 4 * config.n_embd;
  if (entries.contains("n_inner") && !entries["n_inner"].is_null()) reader.read("n_inner", nullptr, config.n_inner);
  if (config.n_embd % config.n_head != 0) {
    throw Error(path.string() + ": `n_embd` must be a multiple of `n_head`, got " + std::to_string(config.n_embd) +
                " and " + std::to_string(config.n_head));
  }
  if (entries.contains("layer_norm_epsilon")) {
    const Json& epsilon = entries["layer_norm_epsilon"];
    if (!epsilon.is_number() || epsilon.get<double>() < 0) reader.fail("layer_norm_epsilon", "a number from 0 up");
    config.layer_norm_epsilon = epsilon.get<double>();
  }
  if (entries.contains("activation_function")) {
    const Json& name = entries["activation_function"];
    config.tanh = name == "gelu_new" || name == "gelu_pytorch_tanh";
    if (!config.tanh && name != "gelu") {
      reader.fail("activation_function", "one of gelu_new, gelu_pytorch_tanh, gelu");
    }
  }
  reader.read("scale_attn_weights", config.scale_attn_weights);
  reader.read("scale_attn_by_inverse_layer_idx", config.scale_attn_by_inverse_layer_idx);
  if (entries.contains("tokenizer")) {
    config.bytes = entries["tokenizer"] == "bytes";
    if (!config.bytes) reader.fail("tokenizer", "\"bytes\", or not be there");
    if (config.vocab_size > 256) reader.fail("vocab_size", "at most 256 where `tokenizer` is \"bytes\"");
  }
  return config;
}

}  // namespace gpt2
