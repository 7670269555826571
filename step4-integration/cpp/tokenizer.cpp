#include "tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <functional>
#include <queue>
#include <sstream>
#include <tuple>

#include "files.h"

namespace gpt2 {
namespace {

// Words as GPT-2 cuts them. White space is written out, as Unicode has it: \s is that of ASCII, or has U+180E too.
constexpr const char* kWords = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\t-\r\x{85}\p{Z}\p{L}\p{N}]+)"
                               R"(|[\t-\r\x{85}\p{Z}]+(?![^\t-\r\x{85}\p{Z}])|[\t-\r\x{85}\p{Z}]+)";

void append_utf8(uint32_t point, std::string& to) {  // below U+0800
  if (point < 0x80) {
    to += static_cast<char>(point);
  } else {
    to += static_cast<char>(0xc0 | point >> 6);
    to += static_cast<char>(0x80 | (point & 0x3f));
  }
}

// In files a byte is a character that can be seen: itself, or one from U+0100 on. GPT-2's encoder.py, bytes_to_unicode.
std::unordered_map<std::string, char> byte_of_character() {
  std::unordered_map<std::string, char> bytes;
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool seen = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    std::string character;
    append_utf8(seen ? byte : next++, character);
    bytes[character] = static_cast<char>(byte);
  }
  return bytes;
}

// The bytes that a token stands for, as it is written in a file.
std::string bytes_of(const std::string& written, const fs::path& path) {
  static const auto kBytes = byte_of_character();
  std::string bytes;
  for (size_t i = 0; i < written.size();) {
    const size_t length = static_cast<unsigned char>(written[i]) < 0x80 ? 1 : 2;
    const auto found = kBytes.find(written.substr(i, length));
    if (found == kBytes.end()) {
      throw Error(path.string() + ": a token must be of GPT-2's 256 characters, got " +
                  Json(written).dump(-1, ' ', true, Json::error_handler_t::replace));
    }
    bytes += found->second;
    i += length;
  }
  return bytes;
}

uint64_t pair_of(int64_t left, int64_t right) {
  return static_cast<uint64_t>(left) << 32 | static_cast<uint64_t>(right);
}

// What the files hold, whichever they are.
struct Read {
  fs::path path;
  std::map<std::string, int32_t> vocab;  // as written
  std::vector<std::pair<std::string, std::string>> merges;
  std::map<std::string, int32_t> added;
};

void read_vocab(const Json& vocab, const fs::path& path, std::map<std::string, int32_t>& to) {
  if (!vocab.is_object()) throw Error(path.string() + ": the vocabulary must give each token a number");
  for (const auto& [token, id] : vocab.items()) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= 1u << 31) {
      throw Error(path.string() + ": a token's number must be from 0 to 2^31 - 1, got " + id.dump());
    }
    to[token] = id.get<int32_t>();
  }
}

void read_merge(const std::string& line, const fs::path& path, Read& to) {
  const size_t space = line.find(' ');
  if (space == std::string::npos || line.find(' ', space + 1) != std::string::npos) {
    throw Error(path.string() + ": a merge must be two tokens with a space between, got " +
                Json(line).dump(-1, ' ', true, Json::error_handler_t::replace));
  }
  to.merges.emplace_back(line.substr(0, space), line.substr(space + 1));
}

// `parts` must have this value at `key`, or, where that may be, nothing.
void require(const Json& parts, const std::string& key, const Json& value, bool may_lack, const fs::path& path,
             const std::string& where) {
  const Json got = parts.is_object() ? parts.value(key, Json()) : Json();
  if (got == value || (may_lack && (got.is_null() || got == ""))) return;
  throw Error(path.string() + ": `" + where + key + "` must be " + value.dump() + ", got " + got.dump().substr(0, 40));
}

Read read_tokenizer_json(const fs::path& path) {
  const Json entries = read_json(path);
  Read read{path, {}, {}, {}};
  const Json model = entries.value("model", Json()), words = entries.value("pre_tokenizer", Json());
  require(model, "type", "BPE", false, path, "model.");
  for (const char* key : {"byte_fallback", "ignore_merges", "fuse_unk"})
    require(model, key, false, true, path, "model.");
  for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    require(model, key, nullptr, true, path, "model.");
  }
  require(entries, "normalizer", nullptr, true, path, "");
  require(words, "type", "ByteLevel", false, path, "pre_tokenizer.");
  require(words, "add_prefix_space", false, false, path, "pre_tokenizer.");
  require(words, "use_regex", true, true, path, "pre_tokenizer.");
  if (const Json after = entries.value("post_processor", Json()); !after.is_null()) {
    require(after, "type", "ByteLevel", false, path, "post_processor.");
  }
  read_vocab(model.value("vocab", Json()), path, read.vocab);
  for (const Json& merge : model.value("merges", Json::array())) {
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      read.merges.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
    } else {
      read_merge(merge.is_string() ? merge.get<std::string>() : merge.dump(), path, read);
    }
  }
  for (const Json& token : entries.value("added_tokens", Json::array())) {
    if (!token.is_object() || !token.contains("content") || !token["content"].is_string()) {
      throw Error(path.string() + ": `added_tokens` must have `content` and `id`");
    }
    for (const char* key : {"single_word", "lstrip", "rstrip"}) require(token, key, false, true, path, "added_tokens.");
    read_vocab(Json{{token["content"].get<std::string>(), token.value("id", Json())}}, path, read.added);
  }
  return read;
}

Read read_vocab_and_merges(const fs::path& folder) {
  Read read{folder / "vocab.json", {}, {}, {}};
  read_vocab(read_json(read.path), read.path, read.vocab);
  const fs::path merges = folder / "merges.txt";
  std::istringstream lines(read_text(merges));
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty() || line.rfind("#version", 0) == 0) continue;
    read_merge(line, merges, read);
  }
  const auto end = read.vocab.find("<|endoftext|>");  // these files do not say which tokens are no text
  if (end != read.vocab.end()) read.added.insert(*end);
  return read;
}

}  // namespace

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const size_t more = first < 0x80 ? 0 : first >= 0xc2 && first < 0xe0 ? 1 : first >= 0xe0 && first < 0xf0 ? 2 : 3;
    if ((first >= 0x80 && first < 0xc2) || first > 0xf4 || i + more >= text.size()) return false;
    uint32_t point = more == 0 ? first : first & (0x3fu >> more);
    for (size_t j = 1; j <= more; ++j) {
      const auto next = static_cast<unsigned char>(text[i + j]);
      if ((next & 0xc0) != 0x80) return false;
      point = point << 6 | (next & 0x3f);
    }
    // Written too long, half of a pair of UTF-16, or past the last character.
    if ((more == 2 && point < 0x800) || (point >= 0xd800 && point < 0xe000) || (more == 3 && point < 0x10000) ||
        point > 0x10ffff) {
      return false;
    }
    i += more + 1;
  }
  return true;
}

std::vector<int64_t> ByteTokenizer::encode(const std::string& text) const {
  std::vector<int64_t> ids;
  for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
  return ids;
}

struct BpeTokenizer::Expression {
  pcre2_code* code;
  pcre2_match_data* match;

  Expression() {
    int error;
    size_t offset;
    code =
        pcre2_compile(reinterpret_cast<PCRE2_SPTR>(kWords), PCRE2_ZERO_TERMINATED, PCRE2_UTF, &error, &offset, nullptr);
    if (code == nullptr) throw Error("PCRE2 refuses the expression of words; was it built without Unicode?");
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where it cannot, PCRE2 interprets
    match = pcre2_match_data_create_from_pattern(code, nullptr);
  }
  ~Expression() {
    pcre2_match_data_free(match);
    pcre2_code_free(code);
  }
  Expression(const Expression&) = delete;
  Expression& operator=(const Expression&) = delete;
};

BpeTokenizer::BpeTokenizer(const fs::path& folder) : words_(std::make_unique<Expression>()) {
  const fs::path whole = folder / "tokenizer.json";
  const bool in_two = !fs::exists(whole) && fs::exists(folder / "vocab.json");
  const Read read = in_two ? read_vocab_and_merges(folder) : read_tokenizer_json(whole);
  for (const auto& [content, id] : read.added) {
    if (content.empty()) throw Error(read.path.string() + ": an added token must not be empty");
    added_[content] = id;
    bytes_[id] = content;
  }
  for (const auto& [written, id] : read.vocab) {
    if (read.added.count(written) != 0) continue;
    const std::string bytes = bytes_of(written, read.path);
    ids_[bytes] = id;
    bytes_[id] = bytes;
  }
  const auto id_of = [&](const std::string& written) {
    const auto found = ids_.find(bytes_of(written, read.path));
    if (found == ids_.end()) {
      throw Error(read.path.string() + ": the merges' token " +
                  Json(written).dump(-1, ' ', true, Json::error_handler_t::replace) + " is not in the vocabulary");
    }
    return found->second;
  };
  int32_t rank = 0;
  for (const auto& [left, right] : read.merges) {
    const int32_t first = id_of(left), second = id_of(right);
    merges_.insert_or_assign(pair_of(first, second), Merge{rank++, id_of(left + right)});
  }
}

BpeTokenizer::~BpeTokenizer() = default;

// Adds a word's tokens. What may be merged waits in a queue, by its rank and then from left to right; a merge joins a
// token with its neighbour, and brings two new pairs.
void BpeTokenizer::merge(std::string_view word, std::vector<int64_t>& ids) const {
  struct Token {
    int64_t id;
    int before, after;  // places, or -1
  };
  using Pair = std::tuple<int32_t, int, int64_t, int64_t>;  // rank, place, what stood there when it was queued
  std::vector<Token> tokens;
  for (const char byte : word) {
    const auto found = ids_.find(std::string(1, byte));
    if (found == ids_.end()) continue;  // as `tokenizers` does, where there is no token for what is unknown
    const int place = static_cast<int>(tokens.size());
    tokens.push_back({found->second, place - 1, place + 1});
  }
  if (tokens.empty()) return;
  tokens.back().after = -1;
  std::priority_queue<Pair, std::vector<Pair>, std::greater<>> queue;
  const auto add = [&](int place) {
    if (place < 0 || tokens[place].after < 0) return;
    const int64_t left = tokens[place].id, right = tokens[tokens[place].after].id;
    const auto found = merges_.find(pair_of(left, right));
    if (found != merges_.end()) queue.emplace(found->second.rank, place, left, right);
  };
  for (int place = 0; place < static_cast<int>(tokens.size()); ++place) add(place);
  while (!queue.empty()) {
    const auto [rank, place, left, right] = queue.top();
    queue.pop();
    Token& token = tokens[place];
    if (token.id != left || token.after < 0 || tokens[token.after].id != right) continue;  // merged meanwhile
    Token& gone = tokens[token.after];
    token.id = merges_.at(pair_of(left, right)).token;
    token.after = gone.after;
    gone.id = -1;
    if (token.after >= 0) tokens[token.after].before = place;
    add(token.before);
    add(place);
  }
  for (int place = 0; place >= 0; place = tokens[place].after) ids.push_back(tokens[place].id);
}

// Text without added tokens: word by word.
void BpeTokenizer::encode_part(std::string_view part, std::vector<int64_t>& ids) const {
  const auto* text = reinterpret_cast<PCRE2_SPTR>(part.data());
  for (size_t at = 0; at < part.size();) {
    // Checked once for the whole text, in encode().
    if (pcre2_match(words_->code, text, part.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_ANCHORED, words_->match, nullptr) <
        1) {
      throw Error("PCRE2 finds no word at byte " + std::to_string(at) + " of the text");
    }
    const size_t end = pcre2_get_ovector_pointer(words_->match)[1];
    merge(part.substr(at, end - at), ids);
    at = end;
  }
}

std::vector<int64_t> BpeTokenizer::encode(const std::string& text) const {
  std::vector<int64_t> ids;
  size_t begin = 0;  // of the text not yet encoded
  for (size_t at = 0; at < text.size();) {
    const auto found = std::find_if(added_.begin(), added_.end(), [&](const auto& one) {
      return text.compare(at, one.first.size(), one.first) == 0;
    });
    if (found == added_.end()) {
      ++at;
      continue;
    }
    encode_part(std::string_view(text).substr(begin, at - begin), ids);
    ids.push_back(found->second);
    begin = at += found->first.size();
  }
  encode_part(std::string_view(text).substr(begin), ids);
  return ids;
}

std::string BpeTokenizer::decode(int64_t token) const {
  const auto found = bytes_.find(static_cast<int32_t>(token));
  return found == bytes_.end() ? "" : found->second;
}

}  // namespace gpt2
