// gpt2: continues a text, without Python or torch. See pages/cpp.md.
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <random>

#include "model.h"
#include "tokenizer.h"

namespace gpt2 {
namespace {

constexpr int64_t kTokens = 100;  // that it adds where it is not told how many

struct Options {
  std::string model, backend = "cpu";
  std::optional<std::string> prompt;
  std::optional<int64_t> tokens, seed;
  Rule rule;
};

std::string help() {
  return std::string("usage: gpt2 --model FOLDER --prompt TEXT [options]\n") +
         "Continues a text with GPT-2. The text comes on standard output, times on standard error.\n\n"
         "  --model FOLDER           config.json, safetensors files, tokenizer.json or vocab.json and merges.txt\n"
         "  --prompt TEXT            the text to continue\n"
         "  --tokens N               how many to add (default: 100, or what the model has room for)\n"
         "  --temperature X          0, the default, takes the likeliest token\n"
         "  --top-k N                draw among the k likeliest\n"
         "  --top-p X                draw among the likeliest that reach it together\n"
         "  --min-p X                draw among those of this part of the likeliest's\n"
         "  --repetition-penalty X   above 1: tokens seen are less likely\n"
         "  --seed N                 of the draws\n"
         "  --backend NAME           cpu, the default: plain C++; " +
         kKernels +
         ": the kernels\n"
         "OMP_NUM_THREADS says how many cores `cpu` takes.\n";
}

// The whole of `text` as a number.
template <class T>
T number(const std::string& option, const std::string& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Error(option + " must be " + (std::is_integral_v<T> ? "an integer" : "a number") + ", got '" + text + "'");
  }
  return value;
}

// As a generator of PyTorch takes it: from −2⁶³ to 2⁶⁴ − 1.
int64_t seed_of(const std::string& text) {
  return !text.empty() && text[0] == '-' ? number<int64_t>("--seed", text)
                                         : static_cast<int64_t>(number<uint64_t>("--seed", text));
}

Options parse(const std::vector<std::string>& words) {
  Options options;
  Rule& rule = options.rule;
  for (size_t i = 0; i < words.size(); i += 2) {
    const std::string& name = words[i];
    if (name == "--help" || name == "-h") {
      std::cout << help();
      std::exit(0);
    }
    if (i + 1 == words.size()) throw Error(name + ": no such option, or its value is missing; see --help");
    const std::string& value = words[i + 1];
    const auto real = [&](double& to, bool (*fits)(double), const char* must) {
      to = number<double>(name, value);
      if (!std::isfinite(to) || !fits(to)) throw Error(name + " must be " + must + ", got " + value);
    };
    const auto count = [&] {
      const auto n = number<int64_t>(name, value);
      if (n < 0) throw Error(name + " must not be negative, got " + value);
      return n;
    };
    const auto part = [](double x) { return x >= 0 && x <= 1; };
    if (name == "--model")
      options.model = value;
    else if (name == "--prompt")
      options.prompt = value;
    else if (name == "--backend")
      options.backend = value;
    else if (name == "--tokens")
      options.tokens = count();
    else if (name == "--top-k")
      rule.top_k = count();
    else if (name == "--seed")
      options.seed = seed_of(value);
    else if (name == "--temperature")
      real(rule.temperature, [](double x) { return x >= 0; }, "from 0 up");
    else if (name == "--top-p")
      real(rule.top_p, part, "from 0 to 1");
    else if (name == "--min-p")
      real(rule.min_p, part, "from 0 to 1");
    else if (name == "--repetition-penalty")
      real(rule.repetition_penalty, [](double x) { return x > 0; }, "above 0");
    else
      throw Error(name + ": no such option; see --help");
  }
  if (options.model.empty() || !options.prompt) throw Error("--model and --prompt must be given; see --help");
  if (options.backend != "cpu" && options.backend != kKernels) {
    throw Error("--backend must be cpu or " + std::string(kKernels) + ", got " + options.backend);
  }
  if (options.seed) {
    rule.seed = *options.seed;
  } else {
    std::random_device random;
    rule.seed = static_cast<int64_t>(uint64_t{random()} << 32 | random());
  }
  return options;
}

std::vector<int64_t> encode(const Tokenizer& tokenizer, const std::string& prompt, int64_t vocab_size) {
  if (!is_utf8(prompt)) throw Error("--prompt must be text in UTF-8");
  std::vector<int64_t> ids = tokenizer.encode(prompt);
  if (ids.empty()) throw Error("--prompt must hold at least one token, got '" + prompt + "'");
  const int64_t most = *std::max_element(ids.begin(), ids.end());
  if (most >= vocab_size) {
    throw Error("--prompt must be of tokens from 0 to " + std::to_string(vocab_size - 1) +
                ", the model's; its tokenizer made " + std::to_string(most));
  }
  return ids;
}

// How many tokens to add: the last one is not read, so there may be one more than the model has positions.
int64_t tokens_to_add(const Options& options, const Config& config, int64_t length) {
  const int64_t room = config.n_positions + 1 - length;
  const int64_t wanted = options.tokens.value_or(std::min(kTokens, room));
  if (length > config.n_positions || wanted > room) {
    throw Error("--tokens must be at most " + std::to_string(std::max<int64_t>(0, room)) + " after a prompt of " +
                std::to_string(length) + " tokens, since the model has " + std::to_string(config.n_positions) +
                " positions; got " + std::to_string(wanted));
  }
  return wanted;
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void run(const Options& options) {
  const fs::path folder = options.model;
  const Config config = read_config(folder);
  std::unique_ptr<Tokenizer> tokenizer;
  if (config.bytes) {
    tokenizer = std::make_unique<ByteTokenizer>();
  } else {
    tokenizer = std::make_unique<BpeTokenizer>(folder);
  }
  const std::vector<int64_t> prompt = encode(*tokenizer, *options.prompt, config.vocab_size);
  const auto length = static_cast<int64_t>(prompt.size());
  const int64_t wanted = tokens_to_add(options, config, length);
  const Weights weights(folder, config);
  const std::unique_ptr<Backend> backend = options.backend == "cpu" ? plain_cpp() : kernels();
  Text text(*backend, config, weights, options.rule, length + std::max<int64_t>(0, wanted - 1));

  std::cout << *options.prompt << std::flush;
  const double begin = seconds();
  double first = begin;  // when the first token was there
  if (wanted > 0) text.read(prompt);
  for (int64_t i = 0; i < wanted; ++i) {
    if (i > 0) text.step();
    std::cout << tokenizer->decode(text.choose()) << std::flush;
    if (i == 0) first = seconds();
  }
  std::cout << std::endl;
  if (!std::cout) throw Error("standard output cannot be written to");
  std::fprintf(stderr, "%lld tokens read, and the first one chosen, in %.3f s", static_cast<long long>(length),
               first - begin);
  if (wanted > 1) {
    const double rest = static_cast<double>(wanted - 1);
    std::fprintf(stderr, "; %lld more at %.1f tokens/s", static_cast<long long>(wanted - 1),
                 rest / (seconds() - first));
  }
  std::fprintf(stderr, "\n");
}

// A thread that waits for the others' parts of a loop shall soon sleep: it may keep a core from them. libgomp asks for
// this when it is loaded, so the program begins once more; where it cannot, threads wait longer.
void wait_shortly(char** words) {
  if (std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  setenv("GOMP_SPINCOUNT", "1000", 1);
  execv("/proc/self/exe", words);
}

}  // namespace
}  // namespace gpt2

int main(int count, char** words) {
  gpt2::wait_shortly(words);
  try {
    gpt2::run(gpt2::parse(std::vector<std::string>(words + 1, words + count)));
  } catch (const std::bad_alloc&) {
    std::cerr << "gpt2: out of memory\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "gpt2: " << error.what() << "\n";
    return 1;
  }
}
