// linear v13_dependent: few rows, and weights are on their way before the launch in front has ended
//
// Idea      A product of 128 rows takes a microsecond of tensor cores' time, and five in all: it is launched, fetches
//           descriptors, waits for operands, and its blocks tell each other their sums. With programmatic dependent
//           launch it is on its multiprocessors before the kernel in front has ended; until then it makes its barriers,
//           meets its cluster, and asks for its weight to come to the L2 cache. That is no read: should the kernel in
//           front still write the weight, what counts is what is there later.
// Since v10 Tiles of 128 rows, too, which two warpgroups multiply; all stages are loaded at once. A block adds up some
//           of the rows, not of the columns, and gets its sums four at a time. It asks for bias, and for what an
//           epilogue reads, before the product.
// Launch    grid (⌈width/64⌉·p, ⌈rows/r⌉) in clusters of p ≤ 16 blocks, which share a tile's depth; r is 64 where all
//           blocks fit at once so, else 128. Block 2·r; 170 or 218 KB of shared memory
// Roles     all warpgroups multiply, 64 rows each; thread 0 issues the loads
// Barriers  full: 1 arrival and 16 or 24 KB. arrived: 1 and the bytes of all other parts' sums. The cluster's, once
// A stage   load issued ─ full ─ product; none is used again
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs. x
//           comes from the L2 cache ⌈width/64⌉ times, the weight once for each r rows
// Limits    compute capability 9.0; float16 and bfloat16. x not transposed; depth (and width, if the weight is not
//           transposed) a multiple of 8, x and weight at multiples of 16 bytes; depth ≤ 6144, rows ≤ 128·65535
#include <step2/few_rows.h>

#include "majors.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear {

std::string v13_dependent_can_implement(const Args& a) {
  if (a.x_transposed) return "takes x that is not transposed";
  return few_rows::can_implement(product_of(a), major_of_weight(a), a.dtype);
}

void v13_dependent(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_major_of_weight(a.weight_transposed, [&](auto weight) {
      few_rows::launch<weight.value, T>(product_of(a), Store<T>{{a.y, a.rows, a.width}}, stream);
    });
  });
}

}  // namespace kf::KF_BACKEND::linear
