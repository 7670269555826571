// gelu_linear v3_hopper: GELU in one warpgroup while the other multiplies
//
// Idea      x's elements could be changed on their way into the product, so that gelu(x) never exists in memory: wgmma
//           takes its first factor from registers, too. A consumer brings 64 × 64 of x there, computes GELU, and issues
//           the product; meanwhile the tensor cores work for the other consumer. The catch: each tile needs all of its
//           rows of x, so with 256 columns a tile GELU is computed width/256 times.
// Since v1  linear's v7 and v8 with the consumer below.
// Launch    as linear's v8_cluster with tiles of 256 columns, or v7_persistent with tiles of 128 or 64 and a ring of 5
//           or 7 stages, whichever leaves the fewest multiprocessors idle
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least; 2·rows·depth·width FLOPs and
//           rows·depth·width/256 GELUs, the narrower the tiles the more
// Limits    as linear's v8_cluster; it rounds gelu(x)
#include <step1/gelu.h>
#include <step2/hopper_product.h>

#include "rungs.h"

namespace kf::KF_BACKEND::gelu_linear {
namespace {

using hopper::kDepth;

// While one consumer prepares its operand the other one multiplies, so there is no need for two sets of registers.
template <bool kTanh>
struct WithGelu {
  template <class Tile, class Shared>
  struct Consumer : hopper::Consumer<Tile, Shared> {
    static_assert(Tile::kA == Major::kK, "wgmma takes a from registers only so");
    using hopper::Consumer<Tile, Shared>::Consumer;
    using T = typename Shared::Element;

    __device__ __forceinline__ void step(bool accumulate) {
      this->shared.pipe.consumer_wait(this->ring);
      const T* const a = this->shared.a[this->ring.index] + this->number * 64 * kDepth;
      const T* const b = this->shared.b[this->ring.index];
      const int matrix = threadIdx.x % kWarpSize / 8;
      const int row = static_cast<int>(threadIdx.x / kWarpSize % 4) * 16 + matrix % 2 * 8 + threadIdx.x % 8;
      uint32_t of_a[kDepth / 16][4];
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i) {
        ldmatrix(of_a[i],
                 a + row * kDepth + ((2 * i + matrix / 2) ^ row % 8) * 8);  // as TMA swizzles rows of 128 bytes
#pragma unroll
        for (uint32_t& pair : of_a[i]) {
          float value[2];
          widen(reinterpret_cast<const Vector<T, 2>&>(pair), value);
          pair = pack<T>(fast_gelu<T, kTanh>(value[0]), fast_gelu<T, kTanh>(value[1]));
        }
      }
      constexpr int kNextB = Tile::kB == Major::kK ? 32 >> 4 : 2048 >> 4;
      const uint64_t of_b = matrix_descriptor(b, Tile::kB == Major::kK ? 0 : 64 * kDepth * 2, 1024, Swizzle::k128);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i) {
        wgmma<Tile::kWidth, T, Tile::kB>(this->sum, of_a[i], of_b + i * kNextB, accumulate || i > 0);
      }
      wgmma_commit();
      this->in_use = this->ring.index;
      this->wait();
      this->ring.advance();
    }
  };
};

}  // namespace

std::string v3_hopper_can_implement(const Args& a) {
  return hopper::can_implement_product(product_of(a), Major::kK, major_of_weight(a), a.dtype);
}

void v3_hopper(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    with_major_of_weight(a.weight_transposed, [&](auto weight) {
      hopper::with_tile<hopper::EpilogueCost::kLight, Major::kK, weight.value>(product_of(a), [&](auto tile) {
        const Store<T> store{{a.y, a.rows, a.width}};
        const auto launch = [&](auto tanh) {
          hopper::launch_product<decltype(tile), T, WithGelu<tanh.value>::template Consumer>(product_of(a), store,
                                                                                             stream);
        };
        a.tanh ? launch(std::true_type{}) : launch(std::false_type{});
      });
    });
  });
}

}  // namespace kf::KF_BACKEND::gelu_linear
