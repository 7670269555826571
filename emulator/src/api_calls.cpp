// Calls of the runtime API, and the errors that they give.
#include "api.h"

namespace kf::simt {

namespace {

thread_local cudaError_t last_error = cudaSuccess;

__thread int runtime_calls = 0;

struct ErrorText {
  cudaError_t error;
  const char *name, *text;
};
constexpr ErrorText kErrors[] = {
#define KF_SIMT_ERROR(name, value, text) {name, #name, text},
#include "kf_simt/errors.h"
};

const char* find_text(cudaError_t error, const char* ErrorText::* member) {
  for (const ErrorText& known : kErrors) {
    if (known.error == error) return known.*member;
  }
  return "unrecognized error code";
}

}  // namespace

std::atomic<int> device_fault{0};
Program* program = nullptr;
bool in_runtime_call() { return runtime_calls != 0; }

void set_last_error(int cuda_error) { last_error = static_cast<cudaError_t>(cuda_error); }

cudaError_t report(cudaError_t error) {
  if (device_fault != 0) error = static_cast<cudaError_t>(device_fault.load());
  if (error != cudaSuccess) last_error = error;
  return error;
}

RuntimeCall::RuntimeCall(bool synchronises) : synchronises_(synchronises) { ++runtime_calls; }

RuntimeCall::~RuntimeCall() {
  if (--runtime_calls == 0 && program != nullptr) program->close(synchronises_);
}

void RuntimeCall::open(const void* memory, std::size_t bytes) {
  if (program != nullptr) program->open(memory, bytes);
}

const char* cudaGetErrorName(cudaError_t error) { return find_text(error, &ErrorText::name); }
const char* cudaGetErrorString(cudaError_t error) { return find_text(error, &ErrorText::text); }

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() { return last_error; }

}  // namespace kf::simt
