// linear_bias_dropout_residual v5_in_place: the residual comes to where the sums will be
//
// Idea      With 64 × 192 outputs a consumer, shared memory is busy for longer than the tensor cores: tiles go into it,
//           wgmma reads them, and then an epilogue like v3's goes through it six times: sums in, residual in, both
//           out, the result in and out again. Where nothing is dropped an epilogue needs no eight neighbours in one
//           lane. So a lane reads of the residual just what it has sums of, adds, and puts the result where the
//           residual was: four times.
// Since v3  Two stages a warp instead of three, each of 16 rows and 64 columns. What that leaves is a ring for tiles of
//           256 columns, which read less for each output. The next tile's first two rounds of the residual are issued
//           under its product
// Launch    grid min(tiles, multiprocessors), block 384, up to 226 KB of shared memory. Tiles are 256, 192, 128 or 64
//           columns wide, whichever leaves the fewest multiprocessors idle
// Roles     those of linear's v7; a consumer's warps have the epilogue, too
// Barriers  those of linear's v7; and arrived, two of each consumer warp: 1 arrival, a lane's, and the 2 KB of a round
// A stage   of a warp's two: its last store has been read ─ the residual's load is issued ─ arrived ─ ldmatrix, sum,
//           stmatrix ─ TMA stores it
// Moves     (rows·depth + depth·width + 2·rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs
// Limits    as linear's v7_persistent; p = 0; a width that is a multiple of 8, the residual and y at multiples of 16
//           bytes. It rounds the product
#include "in_place.h"
#include "product.h"

namespace kf::KF_BACKEND::linear_bias_dropout_residual {

std::string v5_in_place_can_implement(const Args& a) {
  if (a.threshold != 0) return "takes dropout_p = 0 only";
  const std::string why_not = v3_hopper_can_implement(a);
  if (!why_not.empty()) return why_not;
  return aligned_16(a.y) ? "" : "takes a y that begins at a multiple of 16 bytes";
}

void v5_in_place(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    EpilogueMaps maps{};
    maps.read = hopper::map_of_rows(Rows<T>(a.residual, a.rows, a.width));
    maps.out = hopper::map_of_rows(Rows<T>(a.y, a.rows, a.width));
    const AddInPlace<T> finish{static_cast<const T*>(a.bias), static_cast<int>(a.width)};
    with_major_of_weight(a.weight_transposed, [&](auto weight) {
      hopper::with_tile_width<1>(product_of(a), [&](auto width) {
        hopper::launch_with_epilogue<hopper::Tile<width.value, Major::kK, weight.value, 1>, T>(product_of(a), maps,
                                                                                               finish, stream);
      });
    });
  });
}

}  // namespace kf::KF_BACKEND::linear_bias_dropout_residual
