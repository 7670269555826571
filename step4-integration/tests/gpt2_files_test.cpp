// What the program gpt2 reads: config.json, safetensors, tokenizers; whole ones and broken ones.
#include <gtest/gtest.h>
#include <kf/half.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "files.h"
#include "tokenizer.h"

namespace gpt2 {
namespace {

// A folder that is gone after the test.
class Folder {
 public:
  const fs::path path = fs::path(testing::TempDir()) /
                        ("gpt2-" + std::string(testing::UnitTest::GetInstance()->current_test_info()->name()));
  Folder() { fs::create_directories(path); }
  ~Folder() { fs::remove_all(path); }
  Folder(const Folder&) = delete;
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path / name, std::ios::binary) << text;
  }
};

const Json kConfig{{"model_type", "gpt2"}, {"vocab_size", 5}, {"n_positions", 4}, {"n_embd", 6},
                   {"n_layer", 1},         {"n_head", 2},     {"n_inner", 7}};

struct Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};
using Tensors = std::map<std::string, Tensor>;

Tensor counting(const std::vector<int64_t>& shape, float first) {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(first + static_cast<float>(i));
  return {"F32", shape, std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float))};
}

// The tensors of a model of that config; each counts up from its place among them, times 1000.
Tensors all_tensors(const Config& config) {
  Tensors tensors;
  for (const auto& [name, shape] : shapes(config)) {
    tensors["transformer." + name] = counting(shape, 1000 * static_cast<float>(tensors.size()));
  }
  return tensors;
}

// `padding` spaces behind the header move the numbers.
std::string safetensors(const Tensors& tensors) {
  Json header{{"__metadata__", {{"format", "pt"}}}};
  std::string numbers;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"data_offsets", {numbers.size(), numbers.size() + tensor.bytes.size()}}};
    numbers += tensor.bytes;
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + text + numbers;
}

// What is said of a folder's model, or "".
std::string complaint(const Folder& folder) {
  try {
    const Weights weights(folder.path, read_config(folder.path));
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
}

void expect_complaint(const Folder& folder, const std::string& file, const std::string& what) {
  const std::string said = complaint(folder);
  EXPECT_NE(said.find((folder.path / file).string()), std::string::npos) << said;
  EXPECT_NE(said.find(what), std::string::npos) << said;
}

Config write_model(const Folder& folder, const Json& changes = Json::object()) {
  Json entries = kConfig;
  entries.update(changes);
  folder.write("config.json", entries.dump());
  return read_config(folder.path);
}

float number_of(const Weights& weights, const std::string& name, int64_t i) {
  return static_cast<const float*>(weights.at(name))[i];
}

TEST(Weights, LieWhereTheirNamesSay) {
  const Folder folder;
  const Config config = write_model(folder);
  const Tensors tensors = all_tensors(config);
  folder.write("model.safetensors", safetensors(tensors));
  const Weights weights(folder.path, config);
  EXPECT_EQ(weights.dtype, kf::DType::kFloat32);
  float place = 0;
  for (const auto& [name, shape] : shapes(config)) {
    EXPECT_EQ(number_of(weights, name, 0), 1000 * place) << name;
    EXPECT_EQ(number_of(weights, name, 5), 1000 * place + 5) << name;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(weights.at(name)) % 16, 0u) << name;
    ++place;
  }
}

TEST(Weights, MayLieInSeveralFiles) {
  const Folder folder;
  const Config config = write_model(folder);
  Tensors first = all_tensors(config), second;
  second.insert(first.extract("transformer.wte.weight"));
  folder.write("a.safetensors", safetensors(first));
  folder.write("b.safetensors", safetensors(second));
  Json map;
  for (const auto& one : first) map[one.first] = "a.safetensors";
  map["transformer.wte.weight"] = "b.safetensors";
  folder.write("model.safetensors.index.json", Json{{"weight_map", map}}.dump());
  EXPECT_EQ(complaint(folder), "");
  fs::remove(folder.path / "b.safetensors");
  expect_complaint(folder, "b.safetensors", "is missing");
}

TEST(Weights, TakeTheDtypeOfTheTokenTable) {
  const Folder folder;
  const Config config = write_model(folder);
  Tensors tensors = all_tensors(config);
  // The first of the file, so that it lies where a kernel could read it: 1, −2, the least and the greatest, a zero,
  // infinity, and zeros.
  Tensor& bias = tensors["transformer.h.0.attn.c_attn.bias"];
  const uint16_t bits[18] = {0x3c00, 0xc000, 0x0001, 0x7bff, 0x8000, 0x7c00};
  bias = {"F16", bias.shape, std::string(reinterpret_cast<const char*>(bits), sizeof bits)};
  folder.write("model.safetensors", safetensors(tensors));
  const Weights weights(folder.path, config);
  const float wanted[] = {1, -2, 0x1p-24f, 65504, 0, INFINITY, 0};
  for (int64_t i = 0; i < 7; ++i) EXPECT_EQ(number_of(weights, "h.0.attn.c_attn.bias", i), wanted[i]);
}

TEST(Weights, ThatAreNotWholeAreNamed) {
  const Folder folder;
  const std::string whole = safetensors(all_tensors(write_model(folder)));
  expect_complaint(folder, "model.safetensors", "is missing");
  for (const size_t size : {size_t{0}, size_t{7}, size_t{20}, whole.size() / 2, whole.size() - 1}) {
    folder.write("model.safetensors", whole.substr(0, size));
    expect_complaint(folder, "model.safetensors", "no whole safetensors file");
  }
  std::string huge = whole;
  std::memset(huge.data(), 0xff, 8);
  folder.write("model.safetensors", huge);
  expect_complaint(folder, "model.safetensors", "no whole safetensors file");
}

TEST(Weights, ThatDoNotFitAreNamed) {
  const Folder folder;
  const Config config = write_model(folder);
  const auto with = [&](const std::function<void(Tensors&)>& change) {
    Tensors tensors = all_tensors(config);
    change(tensors);
    folder.write("model.safetensors", safetensors(tensors));
  };
  with([](Tensors& t) { t["transformer.wpe.weight"] = counting({4, 5}, 0); });
  expect_complaint(folder, "model.safetensors", "`wpe.weight` must have shape [4,6], got [4,5]");
  with([](Tensors& t) { t.erase("transformer.h.0.ln_2.bias"); });
  EXPECT_NE(complaint(folder).find("the tensor `h.0.ln_2.bias` is missing"), std::string::npos);
  with([](Tensors& t) { t["h.1.ln_1.bias"] = counting({6}, 0); });
  expect_complaint(folder, "model.safetensors", "has no place for the tensor `h.1.ln_1.bias`");
  with([](Tensors& t) { t["ln_f.bias"] = t["transformer.ln_f.bias"]; });
  expect_complaint(folder, "model.safetensors", "`ln_f.bias` is there twice");
  with([](Tensors& t) { t["transformer.ln_f.bias"].dtype = "I32"; });
  expect_complaint(folder, "model.safetensors", "`transformer.ln_f.bias` must be of a floating type, got \"I32\"");
  with([](Tensors& t) { t["transformer.ln_f.bias"].shape = {int64_t{1} << 62, int64_t{1} << 62}; });
  expect_complaint(folder, "model.safetensors", "no whole safetensors file");
  with([](Tensors& t) { t["lm_head.weight"] = counting({5, 6}, 1); });
  expect_complaint(folder, "model.safetensors", "the head is tied to it");
  with([](Tensors& t) {
    t["lm_head.weight"] = t["transformer.wte.weight"];
    t["transformer.h.0.attn.bias"] = {"U8", {1}, "x"};  // the causal mask of old files
  });
  EXPECT_EQ(complaint(folder), "");
}

TEST(Config, ThatAsksForSomethingElseIsNamed) {
  const Folder folder;
  const std::vector<std::pair<Json, std::string>> wrong = {
      {{{"model_type", "llama"}}, "`model_type` must be \"gpt2\", got \"llama\""},
      {{{"tie_word_embeddings", false}}, "`tie_word_embeddings` must be true, got false"},
      {{{"activation_function", "relu"}}, "`activation_function` must be one of gelu_new"},
      {{{"n_embd", 7}}, "`n_embd` must be a multiple of `n_head`, got 7 and 2"},
      {{{"n_layer", 0}}, "`n_layer` must be from 1 to 2^24 - 1, got 0"},
      {{{"n_layer", -1}}, "`n_layer` must be from 1"},
      {{{"n_layer", uint64_t{1} << 63}}, "`n_layer` must be from 1"},
      {{{"n_layer", "1"}}, "`n_layer` must be an integer, got \"1\""},
      {{{"hidden_size", 8}}, "`hidden_size` must be `n_embd`, of which it is another name"},
      {{{"layer_norm_epsilon", -1}}, "`layer_norm_epsilon` must be a number from 0 up, got -1"},
      {{{"scale_attn_weights", 1}}, "`scale_attn_weights` must be true or false, got 1"},
      {{{"tokenizer", "words"}}, "`tokenizer` must be \"bytes\", or not be there, got \"words\""},
      {{{"tokenizer", "bytes"}, {"vocab_size", 257}}, "`vocab_size` must be at most 256"},
  };
  for (const auto& [changes, said] : wrong) {
    Json entries = kConfig;
    entries.update(changes);
    folder.write("config.json", entries.dump());
    expect_complaint(folder, "config.json", said);
  }
  folder.write("config.json", "{\"n_embd\": ");
  expect_complaint(folder, "config.json", "no JSON");
  folder.write("config.json", "version https://git-lfs.github.com/spec/v1\n");
  expect_complaint(folder, "config.json", "a pointer of Git LFS");
  folder.write("config.json", "[1]");
  expect_complaint(folder, "config.json", "must hold an object");
  fs::remove(folder.path / "config.json");
  expect_complaint(folder, "config.json", "is missing");
}

// "ab" first, then "abab" of two of them, "ba" last: a merge that comes first wins wherever it is.
const Json kVocab{{"a", 0},      {"b", 1},      {"ab", 2},      {"abab", 3},
                  {"ba", 4},     {"\u0120", 5}, {"\u0120a", 6}, {"<|endoftext|>", 7},
                  {"\u00c3", 8}, {"\u00a9", 9}, {"\u00e1", 10}, {"\u0142", 11},
                  {"\u0130", 12}};
const char* const kMerges = "#version: 0.2\na b\nab ab\n\u0120 a\nb a\n";

TEST(Bpe, MergesInTheOrderOfItsList) {
  const Folder folder;
  folder.write("vocab.json", kVocab.dump());
  folder.write("merges.txt", kMerges);
  const BpeTokenizer tokenizer(folder.path);
  using Ids = std::vector<int64_t>;
  EXPECT_EQ(tokenizer.encode("abab"), Ids({3}));
  EXPECT_EQ(tokenizer.encode("ababab"), Ids({3, 2}));
  EXPECT_EQ(tokenizer.encode("bab"), Ids({1, 2}));
  EXPECT_EQ(tokenizer.encode("bbaa"), Ids({1, 4, 0}));
  EXPECT_EQ(tokenizer.encode("ab aab"), Ids({2, 6, 2}));
  EXPECT_EQ(tokenizer.encode("ab   a"), Ids({2, 5, 5, 6}));  // the last space belongs to the word
  EXPECT_EQ(tokenizer.encode("ab<|endoftext|>ab"), Ids({2, 7, 2}));
  EXPECT_EQ(tokenizer.encode("\u00e9"), Ids({8, 9}));
  EXPECT_EQ(tokenizer.encode(""), Ids());
  EXPECT_EQ(tokenizer.decode(6) + tokenizer.decode(8) + tokenizer.decode(9) + tokenizer.decode(7),
            " a\u00e9<|endoftext|>");
  EXPECT_EQ(tokenizer.decode(99), "");
}

TEST(Bpe, ThatNobodyKnowsIsNamed) {
  const Folder folder;
  const Json known{{"model", {{"type", "BPE"}, {"vocab", kVocab}, {"merges", {"a b", {"ab", "ab"}}}}},
                   {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
                   {"added_tokens", {{{"id", 7}, {"content", "<|endoftext|>"}}}}};
  const auto said = [&](const std::string& pointer, const Json& value) -> std::string {
    Json entries = known;
    entries[Json::json_pointer(pointer)] = value;
    folder.write("tokenizer.json", entries.dump());
    try {
      const BpeTokenizer tokenizer(folder.path);
      return "";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find((folder.path / "tokenizer.json").string()), std::string::npos);
      return error.what();
    }
  };
  EXPECT_EQ(said("/model/type", "BPE"), "");
  EXPECT_NE(said("/model/type", "Unigram").find("`model.type` must be \"BPE\", got \"Unigram\""), std::string::npos);
  EXPECT_NE(said("/normalizer", {{"type", "NFC"}}).find("`normalizer` must be null"), std::string::npos);
  EXPECT_NE(said("/pre_tokenizer/type", "Whitespace").find("`pre_tokenizer.type` must be"), std::string::npos);
  EXPECT_NE(said("/pre_tokenizer/add_prefix_space", true).find("must be false, got true"), std::string::npos);
  EXPECT_NE(said("/model/merges", {"a z"}).find("the merges' token \"z\" is not in the vocabulary"), std::string::npos);
  EXPECT_NE(said("/model/merges", {"a b c"}).find("a merge must be two tokens"), std::string::npos);
  EXPECT_NE(said("/model/vocab/a", -1).find("a token's number must be from 0"), std::string::npos);
  EXPECT_NE(said("/model/vocab/\u4e00", 3).find("must be of GPT-2's 256 characters"), std::string::npos);
  EXPECT_NE(said("/model", 3).find("`model.type` must be \"BPE\", got null"), std::string::npos);
}

TEST(Utf8, IsTold) {
  for (const char* text : {"", "a", "\u00e9\u20ac\U0001f600", "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf"})
    EXPECT_TRUE(is_utf8(text));
  for (const char* text :
       {"\x80", "\xc3", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xff", "\xe2\x82"}) {
    EXPECT_FALSE(is_utf8(text)) << testing::PrintToString(text);
  }
}

// Texts and their tokens by Hugging Face's tokenizers, in a folder that tests/test_gpt2_program.py writes.
TEST(Bpe, GivesTheTokensOfHuggingFace) {
  const char* folder = std::getenv("GPT2_TOKENIZED");
  if (folder == nullptr) GTEST_SKIP() << "GPT2_TOKENIZED names no folder";
  const BpeTokenizer tokenizer(folder);
  const Json cases = read_json(fs::path(folder) / "tokenized.json");
  EXPECT_GT(cases["texts"].size(), 1000u);
  for (size_t i = 0; i < cases["texts"].size(); ++i) {
    const auto text = cases["texts"][i].get<std::string>();
    const auto wanted = cases["ids"][i].get<std::vector<int64_t>>();
    ASSERT_TRUE(is_utf8(text));
    ASSERT_EQ(tokenizer.encode(text), wanted) << Json(text).dump(-1, ' ', true);
    std::string back;
    for (const int64_t id : wanted) back += tokenizer.decode(id);
    ASSERT_EQ(back, text);
  }
}

}  // namespace
}  // namespace gpt2
