// linear v12_cublaslt: the library
//
// Idea      NVIDIA's cuBLASLt, which torch calls too: it has many kernels, and chooses one for each size. It stands
//           here as a rung so that `auto` can take it where it is ahead, and so that nobody need believe us.
// Since v11 None of our code multiplies. The algorithm is asked for once for each size and then kept.
// Launch    the library's
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs
// Limits    GPUs only: the emulation has no such library; it rounds sums of parts, at some sizes
#include <step2/cublaslt.h>

#include "majors.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear {

std::string v12_cublaslt_can_implement(const Args& a) {
  return cublaslt::can_implement(product_of(a), major_of_x(a), major_of_weight(a), a.dtype, a.tf32,
                                 cublaslt::Epilogue::kNone, nullptr, a.y);
}

int64_t v12_cublaslt_scratch_bytes(const Args&) { return cublaslt::kWorkspaceBytes; }

void v12_cublaslt(const Args& a, void* stream) {
  cublaslt::product(product_of(a), major_of_x(a), major_of_weight(a), a.dtype, a.tf32, cublaslt::Epilogue::kNone,
                    nullptr, nullptr, a.y, a.scratch, stream);
}

}  // namespace kf::KF_BACKEND::linear
