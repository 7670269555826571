// The indices under the names that kernels and debuggers know. The scheduler writes them under other names of its own; it
// must not see these definitions, or the compiler could take them for constants.
#include "kf_simt/device.h"

namespace kf::simt {

__thread const uint3 threadIdx{};
__thread const uint3 blockIdx{};
__thread const dim3 blockDim{};
__thread const dim3 gridDim{};

}  // namespace kf::simt
