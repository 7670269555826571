// mlp v6_one_launch: many rows, both layers in one launch
//
// Idea      Between two launches every multiprocessor runs empty and fills again, and the second reads from memory what
//           the first has written, more than the L2 cache holds. Here persistent blocks draw tiles of both layers from
//           one queue, a counter in memory: the second layer of a band of rows comes soon after the first of it. A tile
//           of the second layer is begun when all of its rows' activation is there, which counters say, one for 128
//           rows. GELU of the last tiles of the first layer runs under the first products of the second.
// Since     pieces: one launch. A block draws its next tile when it issues the loads of the last stage of the one
//           before: those of the second layer take longer, and so the blocks come out even. A band has as many rows as
//           give each multiprocessor one tile of the second layer, and that layer is one band behind: with smaller
//           bands blocks would wait for each other, and end further apart. The residual comes to the place where
//           stmatrix puts the sums it is added to, so that both layers have tiles of 256 columns
// Launch    a memset of the counters; grid min(tiles of both layers, multiprocessors), block 384, 225 or 226 KB shared
//           memory. Tiles are 256 or 128 columns wide: with which the busiest block would have less to do, were the
//           layers two launches; 4 or 6 stages. However few blocks run at once, it ends: many_rows.h says why
// Roles     those of linear's v7; the producer also draws tiles, and waits for the first layer's rows
// Barriers  pipe as in linear's v7. Of the tile under way and the next one, announced: 1, the producer's; bias_full:
//           32, a warp's; done: 256, all threads' of the consumers. arrived, two of each consumer warp: 1 arrival and
//           the 2 KB of the residual. In memory a counter for each 128 rows: 8 for each tile of the first layer
// A stage   of the ring as in linear's v7; of a warp's two as in linear_bias_dropout_residual's v5, or, of the first
//           layer: its last store has been read ─ stmatrix ─ GELU in place ─ TMA stores it ─ at the end of the tile the
//           counter
// Moves     as pieces at the most; of the activation, what the L2 cache still holds is not read from memory
// Limits    compute capability 9.0; float16 and bfloat16; width and inner multiples of 8; all matrices at multiples of
//           16 bytes, y and preactivation too. Both products and the activation: it rounds what lies between
#include <kf/best.h>

#include "layers.h"
#include "many_rows.h"

namespace kf::KF_BACKEND::mlp {
namespace {

template <class Tile, class T, class Gelu>
__device__ __forceinline__ void consume(BothShared<Tile, T>& shared, const BothMaps& maps, const Layers<T>& layers,
                                        const Gelu& gelu) {
  hopper::Consumer<Tile, BothShared<Tile, T>> consumer(shared);
  LayerEpilogues<Tile, T, Gelu> epilogues(shared, maps, gelu, layers);
  for (;;) {
    const int stage = epilogues.tile % 2, phase = epilogues.tile / 2 % 2;
    mbarrier_wait_warp(&shared.announced[stage], phase);
    const int layer = shared.work[epilogues.tile % 4].layer;
    // Before this warp waits for others, it finishes what others may wait for.
    const auto& ring = consumer.ring;
    const auto is_there = [&] {
      return __all_sync(kFullWarp, mbarrier_try_wait(&shared.pipe.full[ring.index], ring.phase));
    };
    if (layer == Work::kNone || (layer == 1 && !is_there())) epilogues.finish();
    if (layer == Work::kNone) break;
    consumer.step(false);
    // Under a product a part of what waits; and where there are more parts than steps, the others.
    for (int left = layers.order.k_tiles[layer] - 1; left > 0 || epilogues.busy(); --left) {
      if (left > 0) consumer.step(true);
      epilogues.advance();
    }
    epilogues.begin();
    consumer.wait();
    mbarrier_wait_warp(&shared.bias_full[stage], phase);
    epilogues.rounded.take(consumer.sum, shared.bias[stage]);
    mbarrier_arrive(&shared.done[stage]);
  }
  if (epilogues.leader()) tma_store_wait_read<0>();  // shared memory must last so long
}

template <class Tile, class T, class Gelu>
__global__ void __launch_bounds__(hopper::kThreads, 1)
    v6_one_launch_kernel(const __grid_constant__ BothMaps maps, const __grid_constant__ Layers<T> layers,
                         const __grid_constant__ Gelu gelu) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<BothShared<Tile, T>*>(memory);
  if (threadIdx.x == 0) {
    for (int layer = 0; layer < 2; ++layer) tma_prefetch_map(&maps.a[layer]), tma_prefetch_map(&maps.b[layer]);
    shared.init();
    mbarrier_init_fence();
  }
  __syncthreads();  // the barriers are there

  if (warpgroup_of_block() == 0) {
    warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) produce<Tile>(shared, maps, layers);
    if (threadIdx.x / kWarpSize == 1) load_biases<Tile>(shared, layers);
    __syncwarp();
  } else {
    warpgroup_reg_alloc<232>();
    consume<Tile>(shared, maps, layers, gelu);
  }
}

template <class Tile, class T, class Gelu>
void launch(const Args& a, const Gelu& gelu, void* stream) {
  BothMaps maps{};
  for (int layer = 0; layer < 2; ++layer) {
    const hopper::Maps of_layer = hopper::maps_of<Tile, T>(product_of_layer(a, layer));
    maps.a[layer] = of_layer.a, maps.b[layer] = of_layer.b;
  }
  maps.out[0] = hopper::map_of_rows(gelu.out);
  maps.out[1] = hopper::map_of_rows(Rows<T>(a.y, a.rows, a.width));
  if (Gelu::kWrites) maps.preactivation = hopper::map_of_rows(gelu.written);
  if (a.residual != nullptr) maps.residual = hopper::map_of_rows(Rows<T>(a.residual, a.rows, a.width));

  const Order order = order_of<Tile, T>(a);
  const Counters counters(static_cast<unsigned char*>(a.scratch) + activation_bytes(a));
  check(cudaMemsetAsync(counters.drawn, 0, Counters::bytes(order.down), as_stream(stream)), "cudaMemsetAsync");
  const Layers<T> layers{{static_cast<const T*>(a.bias_1), static_cast<const T*>(a.bias_2)},
                         {static_cast<int>(a.inner), static_cast<int>(a.width)},
                         a.residual != nullptr,
                         order,
                         counters};
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(order.count(), multiprocessors()));
  const auto kernel = v6_one_launch_kernel<Tile, T, Gelu>;
  allow_shared(kernel, sizeof(BothShared<Tile, T>));
  kernel<<<blocks, hopper::kThreads, sizeof(BothShared<Tile, T>), as_stream(stream)>>>(maps, layers, gelu);
  check_launch();
}

}  // namespace

std::string v6_one_launch_can_implement(const Args& a) {
  if (a.inner % 8 != 0) return "takes an inner width that is a multiple of 8, got " + std::to_string(a.inner);
  if (a.width % 8 != 0) return "takes a width that is a multiple of 8, got " + std::to_string(a.width);
  const std::string why_not = hopper::can_implement_product(product_of_layer(a, 0), Major::kK, major_of(a), a.dtype);
  if (!why_not.empty()) return why_not;
  const bool aligned = aligned_16(a.weight_2, a.residual, a.y, a.preactivation);
  return aligned ? "" : "takes weights, residual, y and preactivation that begin at multiples of 16 bytes";
}

int64_t v6_one_launch_scratch_bytes(const Args& a) {
  return activation_bytes(a) + padded_bytes(Counters::bytes(ceil_div(a.rows, hopper::kRows)));
}

void v6_one_launch(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const Rows<T> activation(a.scratch, a.rows, a.inner), kept(a.preactivation, a.rows, a.inner);
    with_major_of_weight(a.weight_transposed, [&](auto weight) {
      const auto with_gelu = [&](const auto& gelu) {
        busiest(a, 256) <= busiest(a, 128) ? launch<hopper::Tile<256, Major::kK, weight.value, 1>, T>(a, gelu, stream)
                                           : launch<hopper::Tile<128, Major::kK, weight.value, 1>, T>(a, gelu, stream);
      };
      const auto with_tanh = [&](auto tanh) {
        a.preactivation == nullptr ? with_gelu(GeluEpilogue<T, tanh.value, true, false>(activation, kept))
                                   : with_gelu(GeluEpilogue<T, tanh.value, true, true>(activation, kept));
      };
      a.tanh ? with_tanh(std::true_type{}) : with_tanh(std::false_type{});
    });
  });
}

}  // namespace kf::KF_BACKEND::mlp
