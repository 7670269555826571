// Text to tokens and back: GPT-2's byte-level BPE, or a token for each byte.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace gpt2 {

bool is_utf8(std::string_view text);  // what BPE takes

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::vector<int64_t> encode(const std::string& text) const = 0;
  virtual std::string decode(int64_t token) const = 0;  // its bytes; a character may need those of several tokens
};

// A token is a byte of UTF-8: what train.py's model reads and writes.
class ByteTokenizer : public Tokenizer {
 public:
  std::vector<int64_t> encode(const std::string& text) const override;
  std::string decode(int64_t token) const override { return std::string(1, static_cast<char>(token)); }
};

// Byte pair encoding. A text is cut into words by an expression; a word's bytes are tokens, and of neighbours those are
// merged first that the list of merges has first.
class BpeTokenizer : public Tokenizer {
  struct Merge {
    int32_t rank, token;
  };
  struct Expression;  // PCRE2's

  std::unordered_map<std::string, int32_t> ids_;  // by bytes, not by the characters that stand for them in files
  std::unordered_map<int32_t, std::string> bytes_;
  std::unordered_map<uint64_t, Merge> merges_;            // by the pair: two tokens of 32 bits
  std::map<std::string, int32_t, std::greater<>> added_;  // found in a text before anything else, the longest first
  std::unique_ptr<Expression> words_;

  void merge(std::string_view word, std::vector<int64_t>& ids) const;
  void encode_part(std::string_view part, std::vector<int64_t>& ids) const;

 public:
  // Of a folder: tokenizer.json, or vocab.json and merges.txt.
  explicit BpeTokenizer(const std::filesystem::path& folder);
  ~BpeTokenizer() override;
  std::vector<int64_t> encode(const std::string& text) const override;
  std::string decode(int64_t token) const override;
};

}  // namespace gpt2
