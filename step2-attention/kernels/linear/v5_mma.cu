// linear v5_mma: tensor cores, and copies that no register holds
//
// Idea      One instruction of a warp multiplies 16 × 16 by 16 × 8: mma.sync. Its operands lie spread over the lanes;
//           ldmatrix brings them so from shared memory, transposed where the tile lies the other way round. cp.async
//           carries tiles from global to shared memory without registers between: three are in flight at any time.
// Since v4  Tensor cores: on an H200 their mma.sync does ten times what its CUDA cores do in float32. Elements stay in
//           their type, half the bytes in shared memory. Chunks of 16 bytes are exchanged instead of padded. The
//           outputs leave as vectors, by way of shared memory.
// Launch    grid (⌈width/128⌉, ⌈rows/128⌉), block 128, 64 KB shared memory: see step2/mma_product.h
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs.
//           From the L2 cache 2·rows·depth·width·sizeof(T)/128 bytes: 64 FLOP a byte in half types. From shared memory
//           1 byte for 16 multiply-adds: 32 FLOP a byte
// Limits    compute capability 8.0 or newer; float16 and bfloat16, and float32 where it may be rounded to TF32. Rows in
//           memory of a multiple of 16 bytes: depth for x, width for weight; transposed, rows for x, depth for weight,
//           not both. x and weight at multiples of 16 bytes; rows ≤ 128·65535, depth < 2³⁰
#include <step2/mma_product.h>

#include "majors.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear {
namespace {

template <Major kA, Major kB>
void launch(const Args& a, void* stream) {
  const auto of_type = [&](auto type) {
    using T = typename decltype(type)::element;
    mma::launch_product<kA, kB, T>(product_of(a), Store<T>{{a.y, a.rows, a.width}}, stream);
  };
  a.dtype == DType::kFloat32 ? of_type(Type<float>{}) : with_half_type(a.dtype, of_type);
}

}  // namespace

std::string v5_mma_can_implement(const Args& a) {
  if (a.dtype == DType::kFloat64) return "takes no float64";
  if (a.dtype == DType::kFloat32 && !a.tf32) {
    return "takes float32 only where it may be rounded to TF32 (torch.backends.cuda.matmul.allow_tf32)";
  }
  return can_implement_majors(mma::can_implement_product, a);
}

void v5_mma(const Args& a, void* stream) {
  with_majors(a, [&](auto x, auto weight) { launch<x.value, weight.value>(a, stream); });
}

}  // namespace kf::KF_BACKEND::linear
