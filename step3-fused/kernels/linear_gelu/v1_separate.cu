// linear_gelu v1_separate: two launches
//
// Idea      The product as well as it can be done alone, then GELU over all of it: what PyTorch does. The baseline.
// Launch    that of linear's `auto`; then grid ⌈rows·⌈width/8⌉/256⌉, block 256
// Moves     (rows·depth + depth·width + 3·rows·width + width)·sizeof(T) bytes; 2·rows·depth·width FLOPs
// Limits    as linear's; it rounds the product
#include <linear/best.h>
#include "product.h"

namespace kf::KF_BACKEND::linear_gelu {
namespace {

// The product lies in front of what its rung needs, unless it is wanted for the backward pass anyway.
int64_t product_bytes(const Args& a) {
  return a.preactivation == nullptr ? padded_bytes(a.rows * a.width * size_of(a.dtype)) : 0;
}

}  // namespace

std::string v1_separate_can_implement(const Args& a) { return linear::can_implement(linear::args_of(a, a.x, a.y)); }

int64_t v1_separate_scratch_bytes(const Args& a) {
  return product_bytes(a) + linear::best_scratch_bytes(linear::args_of(a, a.x, a.y));
}

void v1_separate(const Args& a, void* stream) {
  void* const product = a.preactivation == nullptr ? a.scratch : a.preactivation;
  linear::launch_best(linear::args_of(a, a.x, product), static_cast<unsigned char*>(a.scratch) + product_bytes(a),
                      stream);
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const Rows<T> rows(product, a.rows, a.width), y(a.y, a.rows, a.width);
    a.tanh ? launch_epilogue(rows, GeluEpilogue<T, true, false, false>(y, {}), stream)
           : launch_epilogue(rows, GeluEpilogue<T, false, false, false>(y, {}), stream);
  });
}

}  // namespace kf::KF_BACKEND::linear_gelu
