// linear_bias_dropout_residual v4_cublaslt: the library adds the residual, where nothing is dropped
//
// Idea      A product of the library's is alpha·a·b + beta·c, with one as beta and the residual as c.
// Since v3  None of our code multiplies.
// Launch    the library's
// Moves     (rows·depth + depth·width + 2·rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs
// Limits    GPUs only; p = 0, since the library has no dropout; it rounds sums of parts, at some sizes
#include <step2/cublaslt.h>

#include "product.h"

namespace kf::KF_BACKEND::linear_bias_dropout_residual {

std::string v4_cublaslt_can_implement(const Args& a) {
  if (a.threshold != 0) return "takes dropout_p = 0 only";
  return cublaslt::can_implement(product_of(a), Major::kK, major_of_weight(a), a.dtype, a.tf32,
                                 cublaslt::Epilogue::kNone, a.residual, a.y);
}

int64_t v4_cublaslt_scratch_bytes(const Args&) { return cublaslt::kWorkspaceBytes; }

void v4_cublaslt(const Args& a, void* stream) {
  cublaslt::product(product_of(a), Major::kK, major_of_weight(a), a.dtype, a.tf32, cublaslt::Epilogue::kNone, nullptr,
                    a.residual, a.y, a.scratch, stream);
}

}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual
