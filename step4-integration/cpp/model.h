// GPT-2 on this project's ops: the same calls whatever runs them. What a backend is, and the two that there are.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "files.h"
#include "kernels/decode_step/rungs.h"
#include "kernels/sample/rungs.h"

namespace gpt2 {

// Who runs an op, and where its tensors lie.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual void* allocate(size_t bytes) = 0;  // until the backend ends
  virtual void copy_in(void* to, const void* from, size_t bytes) = 0;
  virtual void copy_out(void* to, const void* from, size_t bytes) = 0;
  virtual const void* weights(const void* from, size_t bytes) = 0;  // where they lie, or a copy
  virtual void sample(const kf::sample::Args& args) = 0;
  virtual void step(kf::decode_step::Args args) = 0;
  virtual std::string failure() { return ""; }  // what went wrong in a step, if its logits are NaN for that
  // Reads a prompt, an id at `args.ids` after the other, into an empty cache. Leaves the logits after the last.
  virtual void read(const kf::decode_step::Args& args, const std::vector<int64_t>& prompt);
};

std::unique_ptr<Backend> plain_cpp();  // cpu/*.cpp of the steps
std::unique_ptr<Backend> kernels();    // the .cu files: emulated, or on a GPU
extern const char* const kKernels;     // what `--backend` calls them

// How the next token is chosen; see kernels/sample/rungs.h.
struct Rule {
  double temperature = 0, top_p = 1, min_p = 0, repetition_penalty = 1;
  int64_t top_k = 0;
  int64_t seed = 0;
};

// A model and one text that it continues.
class Text {
  Backend& backend_;
  kf::decode_step::Args step_{};
  kf::sample::Args sample_{};
  std::vector<kf::decode_step::Layer> layers_;
  int64_t* token_;

 public:
  // `capacity`: how many tokens it will read at most.
  Text(Backend& backend, const Config& config, const Weights& weights, const Rule& rule, int64_t capacity);
  void read(const std::vector<int64_t>& prompt);
  int64_t choose();                      // the next token
  void step() { backend_.step(step_); }  // reads the token that was chosen
};

}  // namespace gpt2
