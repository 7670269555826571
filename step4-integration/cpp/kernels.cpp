// The backend of the kernels: the .cu files that this program is linked with, emulated or compiled by nvcc.
#include <kf/best.h>
#include <kf/launch.h>

#include "kernels/decode_step/packed.h"
#include "model.h"

namespace kf::KF_BACKEND {
namespace {

class Kernels : public gpt2::Backend {
  std::vector<void*> memory_;
  const Rung<decode_step::Args>* step_ = nullptr;
  const Rung<sample::Args>* sample_ = nullptr;
  void* scratch_ = nullptr;
  void* packed_ = nullptr;
  int64_t packed_bytes_ = 0;

 public:
  ~Kernels() override {
    for (void* one : memory_) cudaFree(one);
  }

  void* allocate(size_t bytes) override {
    check(cudaMalloc(&memory_.emplace_back(nullptr), bytes), "cudaMalloc");
    return memory_.back();
  }
  void copy_in(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void copy_out(void* to, const void* from, size_t bytes) override {
    check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
  const void* weights(const void* from, size_t bytes) override {
    void* to = allocate(bytes);
    copy_in(to, from, bytes);
    return to;
  }

  // A rung is chosen once: no argument that it depends on changes.
  void sample(const kf::sample::Args& args) override {
    if (sample_ == nullptr) sample_ = &best_rung(sample::rungs(), kf::sample::automatic(args), args);
    sample_->launch(args, nullptr);
  }
  void step(kf::decode_step::Args args) override {
    if (step_ == nullptr) {
      pack(args);
      step_ = &best_rung(decode_step::rungs(), kf::decode_step::automatic(args), args);
      scratch_ = allocate(static_cast<size_t>(scratch_bytes_of(*step_, args)));
    }
    args.scratch = scratch_;
    args.packed = packed_;
    args.packed_bytes = packed_bytes_;
    step_->launch(args, nullptr);
  }
  std::string failure() override {
    if (packed_ == nullptr) return "";
    kf::decode_step::State state;
    copy_out(&state, packed_, sizeof state);
    return kf::decode_step::failure(state);
  }

 private:
  static constexpr const char* kPackedFor = "v4_clusters";
  // For that rung, where it takes these weights: a prompt is read by the same launches, so it soon pays.
  void pack(kf::decode_step::Args& args) {
    std::string why_not;
    packed_bytes_ = decode_step::packed_bytes(kPackedFor, args, why_not);
    if (!why_not.empty()) return;
    args.packed = packed_ = allocate(static_cast<size_t>(packed_bytes_));
    args.packed_bytes = packed_bytes_;
    decode_step::pack_weights(kPackedFor, args, nullptr);
  }
};

}  // namespace
}  // namespace kf::KF_BACKEND

namespace gpt2 {

#ifdef KF_WITH_CUDA
const char* const kKernels = "gpu";
#else
const char* const kKernels = "emulated";
#endif

std::unique_ptr<Backend> kernels() { return std::make_unique<kf::KF_BACKEND::Kernels>(); }

}  // namespace gpt2
