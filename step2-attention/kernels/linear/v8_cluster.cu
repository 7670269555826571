// linear v8_cluster: two blocks share the weight's tiles
//
// Idea      Blocks that compute tiles one above the other need the same columns of the weight. As a cluster they are on
//           neighbouring multiprocessors, and TMA can write one copy into the shared memory of both: multicast. Each
//           loads half of the columns, for both.
// Since v7  Clusters of two. A stage counts as empty when the consumers of both blocks have released it: they arrive at
//           each other's barriers.
// Launch    grid 2·min(⌈rows/256⌉·⌈width/w⌉, multiprocessors/2), block 384, clusters of 2; w is 256, 192 or 128, with
//           as many stages and as much shared memory as v7
// Roles     in each block those of v7; the first block of a cluster has the upper 128 rows
// Barriers  as v7, but pipe.empty: 4, the leaders' of the consumers of both blocks, each of which arrives in both
// A stage   of both blocks: empty ─ producer_acquire ─ the own 128 × 64 of x, and half of w × 64 of the weight into
//           both blocks ─ full, when the other block's half is there as well ─ products as v7 ─ released in both blocks
//           ─ empty
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs.
//           From the L2 cache (1/256 + 1/w)·rows·depth·width·sizeof(T) bytes: with w = 256 128 FLOP a byte, a third
//           fewer bytes than v7; 110 with 192, 85 with 128
// Limits    as v7_persistent. A cluster's work is 256 rows: where these are few, more of it is empty
#include <step2/hopper_product.h>

#include "majors.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear {

std::string v8_cluster_can_implement(const Args& a) { return can_implement_majors(hopper::can_implement_product, a); }

void v8_cluster(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_majors(a, [&](auto x, auto weight) {
      const auto launch = [&](auto columns) {
        using Tile = hopper::Tile<decltype(columns)::value, x.value, weight.value, 2>;
        hopper::launch_product<Tile, T>(product_of(a), Store<T>{{a.y, a.rows, a.width}}, stream);
      };
      hopper::with_tile_width<2>(product_of(a), launch);
    });
  });
}

}  // namespace kf::KF_BACKEND::linear
