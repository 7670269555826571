// linear v7_persistent: a producer, consumers, and persistent blocks
//
// Idea      In v6 the tensor cores rest while threads wait, issue loads, and write outputs. So the work is divided.
//           One thread, the producer, does nothing but fill stages. Two warpgroups, the consumers, multiply 64 rows
//           each, and release a stage as soon as they have read it. Each multiprocessor has one block, which stays
//           and takes tile after tile: the producer is then already at the next one, and a tile's outputs leave under
//           its products.
// Since v6  The kernel is step2/hopper_product.h, since the ops with fused epilogues use it as well. Each stage
// has
//           two barriers: full, its bytes have arrived; empty, both consumers have released it. A product is waited for
//           only when the next one has been issued. Tiles are up to 256 columns wide; setmaxnreg gives consumers 232
//           registers, for 128 sums and the rounded outputs of the tile before, 64 words, which leave by stmatrix and
//           TMA, some columns after each step. Another warp beside the producer brings the bias. Neighbours in time
//           share rows of x or columns of the weight.
// Launch    grid min(⌈rows/128⌉·⌈width/w⌉, multiprocessors), block 384. w is 256, 192, 128 or 64: with which the
//           busiest block has the fewest columns to do. 4, 4, 6 or 8 stages; 209 to 226 KB of shared memory, nearly all
//           that a block may have
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs.
//           From the L2 cache (1/128 + 1/w)·rows·depth·width·sizeof(T) bytes: with w = 256 85 FLOP a byte, 77 with 192,
//           64 with 128, 43 with 64. From shared memory a consumer reads 64 + w lines for 64·w outputs: 51, 48, 43 or
//           32 FLOP a byte
// Limits    for x and weight as v6_wgmma. Where width is no multiple of 8, or y begins at none of 16 bytes, outputs
//           leave element by element. With few tiles most multiprocessors have nothing to do
#include <step2/hopper_product.h>

#include "majors.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear {

std::string v7_persistent_can_implement(const Args& a) {
  return can_implement_majors(hopper::can_implement_product, a);
}

void v7_persistent(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_majors(a, [&](auto x, auto weight) {
      const auto launch = [&](auto columns) {
        using Tile = hopper::Tile<decltype(columns)::value, x.value, weight.value, 1>;
        hopper::launch_product<Tile, T>(product_of(a), Store<T>{{a.y, a.rows, a.width}}, stream);
      };
      hopper::with_tile_width<1>(product_of(a), launch);
    });
  });
}

}  // namespace kf::KF_BACKEND::linear
