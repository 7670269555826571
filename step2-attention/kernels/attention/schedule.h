// Which tiles of queries a block of a persistent grid works on, and in which order.
#pragma once

#include <step2/attention/packed_queries.h>

namespace kf::KF_BACKEND::attention {

// In which order the tiles of queries are done. Under a causal mask the last ones of a head see most keys.
enum class Order {
  kHeads,          // head by head: all cost the same
  kPairs,          // head by head, the last tile with the first one, the last but one with the second …: all pairs cost
                   // the same, and K and V stay in the L2 cache
  kHeaviestFirst,  // the last tiles of all heads, then those before them …: what is left at the end is small
};

// The tiles of a packed row, those that read most keys first: how many these are the lengths of documents decide, which
// only the GPU knows. All heads have the same, so a block sorts those of one, each thread a tile: it counts the heavier
// ones. A row that is so long that there is no room for it has many rounds of tiles, and takes the last one first.
template <bool kPacked>
struct SortedTiles {
  static constexpr int kMost = 1024;
  int keys[kMost];
  uint16_t tile[kMost];

  // By all threads of a block, which wait at a barrier before they ask.
  template <int kQueries>
  __device__ void sort(const Args& a) {
    const int tiles = static_cast<int>(ceil_div(a.q_length, kQueries));
    if (tiles > kMost) return;
    const Documents documents(a);
    for (int i = threadIdx.x; i < tiles; i += blockDim.x) {
      const auto last = static_cast<int>(min(int64_t{i + 1} * kQueries, a.q_length)) - 1;
      keys[i] = documents.keys_of(last).end - documents.keys_of(i * kQueries).begin;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tiles; i += blockDim.x) {
      int heavier = 0;
      for (int other = 0; other < tiles; ++other) {
        heavier += keys[other] > keys[i] || (keys[other] == keys[i] && other > i) ? 1 : 0;
      }
      tile[heavier] = static_cast<uint16_t>(i);
    }
  }

  __device__ unsigned at(unsigned rank, unsigned tiles) const { return tiles > kMost ? tiles - 1 - rank : tile[rank]; }
};
template <>
struct SortedTiles<false> {
  template <int kQueries>
  __device__ void sort(const Args&) {}
};

// Measured on an H200: with two tiles a head, or where pairs leave more than a tenth of all rounds' places empty, the
// heaviest ones first are better, by up to 17 %; elsewhere pairs, by up to 9 % at D 128.
inline Order order_of(const Args& a, int64_t tiles, int64_t blocks) {
  if (a.cu_seqlens != nullptr) return Order::kHeaviestFirst;
  if (!a.causal) return Order::kHeads;
  const int64_t pairs = a.batch * a.heads * ceil_div(tiles, 2), rounds = ceil_div(pairs, blocks);
  return tiles > 2 && 10 * pairs >= 9 * rounds * blocks ? Order::kPairs : Order::kHeaviestFirst;
}

// The tiles of queries that a block works on, one after the other: in round r its number blockIdx.x of gridDim.x tiles,
// with the heaviest first counted from the other end in every second round; or of gridDim.x pairs in two rounds.
template <int kQueries>  // of a tile
struct Work {
  const unsigned tiles, heads;  // tiles of a head, heads of all batches
  const Order order;
  unsigned round = 0;

  __device__ Work(const Args& a, Order order)
      : tiles(static_cast<unsigned>(ceil_div(a.q_length, kQueries))),
        heads(static_cast<unsigned>(a.batch * a.heads)),
        order(order) {}

  __device__ void next() { ++round; }

  // This round's tile, or the next one's where this one has none; of a packed row, whose tiles are `sorted`, only where
  // it lies. False after the last one.
  template <class Block>
  __device__ bool find(const Args& a, Block& block, const SortedTiles<Block::kPacked>& sorted) {
    unsigned head, tile;
    if (order == Order::kPairs) {
      const unsigned pairs = (tiles + 1) / 2;
      unsigned pair = round / 2 * gridDim.x + blockIdx.x;
      if (round % 2 == 1 && pair % pairs == tiles - 1 - pair % pairs) {  // the middle one of an odd number is alone
        ++round;
        pair += gridDim.x;
      }
      head = pair / pairs;
      tile = round % 2 == 0 ? tiles - 1 - pair % pairs : pair % pairs;
    } else {
      // Back and forth, so that who had the heaviest of one round has the lightest of the next.
      const bool back = order == Order::kHeaviestFirst && round % 2 == 1;
      const unsigned number = round * gridDim.x + (back ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
      head = order == Order::kHeaviestFirst ? number % heads : number / tiles;
      tile = order == Order::kHeaviestFirst ? tiles - 1 - number / heads : number % tiles;
    }
    if (head >= heads || tile >= tiles) return false;
    if constexpr (Block::kPacked) {
      block.head = static_cast<int>(head);
      block.first = static_cast<int>(sorted.at(tiles - 1 - tile, tiles)) * kQueries;
    } else {
      block = BlockOfQueries(a, head, int64_t{tile} * kQueries, kQueries);
    }
    return true;
  }
};

}  // namespace kf::KF_BACKEND::attention
