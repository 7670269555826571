// linear_gelu v4_cublaslt: the library, which has this fusion too
//
// Idea      cuBLASLt's epilogue GELU, or GELU_AUX where the preactivation is kept.
// Since v3  None of our code multiplies.
// Launch    the library's
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least, and rows·width·sizeof(T) more
//           if the preactivation is kept; 2·rows·depth·width FLOPs
// Limits    GPUs only; GELU as GPT-2 approximates it; float16 and bfloat16, since it is off by 1e-4 of the result; a
//           width that is a multiple of 8, outputs at multiples of 16 bytes; it rounds sums of parts, at some sizes
#include <step2/cublaslt.h>

#include "product.h"

namespace kf::KF_BACKEND::linear_gelu {

namespace {

cublaslt::Epilogue epilogue_of(const Args& a) {
  return a.preactivation == nullptr ? cublaslt::Epilogue::kGelu : cublaslt::Epilogue::kGeluAux;
}

}  // namespace

std::string v4_cublaslt_can_implement(const Args& a) {
  if (a.dtype != DType::kFloat16 && a.dtype != DType::kBFloat16) return "takes float16 or bfloat16";
  if (!a.tanh) return "takes approximate='tanh' only";
  if (a.width % 8 != 0) return "takes a width that is a multiple of 8, got " + std::to_string(a.width);
  if (!aligned_16(a.y, a.preactivation)) return "takes outputs that begin at multiples of 16 bytes";
  return cublaslt::can_implement(product_of(a), Major::kK, major_of_weight(a), a.dtype, a.tf32, epilogue_of(a), nullptr,
                                 a.y);
}

int64_t v4_cublaslt_scratch_bytes(const Args&) { return cublaslt::kWorkspaceBytes; }

void v4_cublaslt(const Args& a, void* stream) {
  cublaslt::product(product_of(a), Major::kK, major_of_weight(a), a.dtype, a.tf32, epilogue_of(a), a.preactivation,
                    nullptr, a.y, a.scratch, stream);
}

}  // namespace kf::KF_BACKEND::linear_gelu
