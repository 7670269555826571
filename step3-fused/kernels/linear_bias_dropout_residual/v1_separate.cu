// linear_bias_dropout_residual v1_separate: two launches
//
// Idea      The product as well as it can be done alone; then dropout and residual in one kernel, as step 1 has it. The
//           baseline.
// Launch    that of linear's `auto`; then grid ⌈rows·⌈width/8⌉/256⌉, block 256
// Moves     (rows·depth + depth·width + 4·rows·width + width)·sizeof(T) bytes; 2·rows·depth·width FLOPs
// Limits    as linear's; it rounds the product
#include <linear/best.h>
#include "product.h"

namespace kf::KF_BACKEND::linear_bias_dropout_residual {
namespace {

// The product lies in front of what its rung needs.
int64_t product_bytes(const Args& a) { return padded_bytes(a.rows * a.width * size_of(a.dtype)); }

}  // namespace

std::string v1_separate_can_implement(const Args& a) { return linear::can_implement(linear::args_of(a, a.x, a.y)); }

int64_t v1_separate_scratch_bytes(const Args& a) {
  return product_bytes(a) + linear::best_scratch_bytes(linear::args_of(a, a.x, a.y));
}

void v1_separate(const Args& a, void* stream) {
  linear::launch_best(linear::args_of(a, a.x, a.scratch), static_cast<unsigned char*>(a.scratch) + product_bytes(a),
                      stream);
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    launch_epilogue(Rows<T>(a.scratch, a.rows, a.width), epilogue_of<T>(a), stream);
  });
}

}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual
