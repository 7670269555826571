// gelu_linear v1_separate: two launches
//
// Idea      GELU over all of x, then the product. The baseline.
// Launch    grid ⌈rows·⌈depth/8⌉/256⌉, block 256; then that of linear's `auto`
// Moves     (3·rows·depth + depth·width + rows·width + width)·sizeof(T) bytes; 2·rows·depth·width FLOPs and rows·depth
//           GELUs
// Limits    as linear's; it rounds gelu(x)
#include <step3/epilogues.h>

#include <linear/best.h>
#include "rungs.h"

namespace kf::KF_BACKEND::gelu_linear {
namespace {

// gelu(x) lies in front of what the product's rung needs.
int64_t activation_bytes(const Args& a) { return padded_bytes(a.rows * a.depth * size_of(a.dtype)); }

}  // namespace

std::string v1_separate_can_implement(const Args& a) { return linear::can_implement(linear::args_of(a, nullptr, a.y)); }

int64_t v1_separate_scratch_bytes(const Args& a) {
  return activation_bytes(a) + linear::best_scratch_bytes(linear::args_of(a, nullptr, a.y));
}

void v1_separate(const Args& a, void* stream) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const Rows<T> x(a.x, a.rows, a.depth), activation(a.scratch, a.rows, a.depth);
    a.tanh ? launch_epilogue(x, GeluEpilogue<T, true, false, false>(activation, {}), stream)
           : launch_epilogue(x, GeluEpilogue<T, false, false, false>(activation, {}), stream);
  });
  linear::launch_best(linear::args_of(a, a.scratch, a.y), static_cast<unsigned char*>(a.scratch) + activation_bytes(a),
                      stream);
}

}  // namespace kf::KF_BACKEND::gelu_linear
