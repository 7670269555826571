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

// Slots for tiles of a packed row, where each document has tiles of its own: its first one has slot
// start / kQueries + its number. So there are enough up to the next document's, and one too many at the most; and whose
// a slot is a search among the starts tells, without adding up lengths.
template <int kQueries>
__host__ __device__ int64_t slots_of(const Args& a) {
  return a.q_length / kQueries + a.documents;
}

// The queries at `slot`; none (0 or less) if it is one too many.
template <int kQueries>
__device__ BlockOfQueries queries_at(const Args& a, int head, int slot) {
  const Documents documents(a);
  const auto first_slot = [&](int document) { return documents.queries_in(document).begin / kQueries + document; };
  const int document = documents.last([&](int of) { return first_slot(of) <= slot; });
  const Seen queries = documents.queries_in(document), keys = documents.keys_in(document);
  const int length = queries.end - queries.begin, tile = slot - first_slot(document);
  const bool exists = tile >= 0 && tile <= length / kQueries;
  const int before = exists ? tile * kQueries : 0;  // of the document's queries
  BlockOfQueries block;
  block.head = head;
  block.first = queries.begin + before;
  block.first_key = keys.begin;
  block.queries = exists ? min(kQueries, length - before) : 0;
  block.keys = max(keys.end - keys.begin, 0);
  block.diagonal = a.causal ? max(before + block.keys - length + 1, -kQueries) : block.keys;
  return block;
}

// The tiles of a packed row, those that read most keys first: how many these are the lengths of documents decide, which
// only the GPU knows. All heads have the same, so a block sorts those of one, each thread a tile: it counts the heavier
// ones. A row that is so long that there is no room for it has many rounds of tiles, and takes the last one first.
template <bool kPacked>
struct SortedTiles {
  static constexpr int kMost = 1024;
  int weight[kMost];  // the keys that a tile reads, and its number, so that no two are the same
  uint16_t tile[kMost];

  // By all threads of a block, which wait at a barrier before they ask. kApart: documents have tiles of their own.
  template <int kQueries, bool kApart>
  __device__ void sort(const Args& a) {
    const auto tiles = static_cast<int>(kApart ? slots_of<kQueries>(a) : ceil_div(a.q_length, kQueries));
    if (tiles > kMost) return;
    const Documents documents(a);
    for (int i = threadIdx.x; i < tiles; i += blockDim.x) {
      if constexpr (kApart) {
        const BlockOfQueries block = queries_at<kQueries>(a, 0, i);
        weight[i] = weight_of(block.queries > 0 ? max(block.seen_by(kQueries - 1), 0) + 1 : 0, i);  // none: the last
      } else {
        const auto last = static_cast<int>(min(int64_t{i + 1} * kQueries, a.q_length)) - 1;
        weight[i] = weight_of(documents.keys_of(last).end - documents.keys_of(i * kQueries).begin, i);
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tiles; i += blockDim.x) {
      int heavier = 0;
#pragma unroll 8
      for (int other = 0; other < tiles; ++other) heavier += weight[other] > weight[i] ? 1 : 0;
      tile[heavier] = static_cast<uint16_t>(i);
    }
  }

  __device__ unsigned at(unsigned rank, unsigned tiles) const { return tiles > kMost ? tiles - 1 - rank : tile[rank]; }

 private:
  __device__ static int weight_of(int keys, int tile) { return min(keys, INT32_MAX / kMost - 1) * kMost + tile; }
};
template <>
struct SortedTiles<false> {
  template <int kQueries, bool kApart>
  __device__ void sort(const Args&) {}
};

// Measured on an H200: with two tiles a head, or where pairs leave more than a tenth of all rounds' slots empty, the
// heaviest ones first are better, by up to 17 %; elsewhere pairs, by up to 9 % at D 128.
inline Order order_of(const Args& a, int64_t tiles, int64_t blocks) {
  if (a.cu_seqlens != nullptr) return Order::kHeaviestFirst;
  if (!a.causal) return Order::kHeads;
  const int64_t pairs = a.batch * a.heads * ceil_div(tiles, 2), rounds = ceil_div(pairs, blocks);
  return tiles > 2 && 10 * pairs >= 9 * rounds * blocks ? Order::kPairs : Order::kHeaviestFirst;
}

// The tiles of queries that a block works on, one after the other: in round r its number blockIdx.x of gridDim.x tiles,
// with the heaviest first counted from the other end in every second round; or of gridDim.x pairs in two rounds.
template <int kQueries, bool kApart>  // of a tile; SortedTiles'
struct Work {
  const unsigned tiles, heads;  // tiles of a head, heads of all batches
  const Order order;
  unsigned round = 0;

  __device__ Work(const Args& a, Order order)
      : tiles(static_cast<unsigned>(kApart ? slots_of<kQueries>(a) : ceil_div(a.q_length, kQueries))),
        heads(static_cast<unsigned>(a.batch * a.heads)),
        order(order) {}

  __device__ void next() { ++round; }

  // This round's tile, or the next one's where this one has none; of a packed row, whose tiles are `sorted`, only where
  // it lies, if tiles straddle documents. False after the last one.
  template <class Block>
  __device__ bool find(const Args& a, Block& block, const SortedTiles<Block::kPacked || kApart>& sorted) {
    while (find_place(a, block, sorted)) {
      if (!kApart || block.queries > 0) return true;
      next();
    }
    return false;
  }

 private:
  template <class Block>
  __device__ bool find_place(const Args& a, Block& block, const SortedTiles<Block::kPacked || kApart>& sorted) {
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
    if constexpr (kApart) {
      const auto slot = static_cast<int>(sorted.at(tiles - 1 - tile, tiles));
      block = queries_at<kQueries>(a, static_cast<int>(head), slot);
    } else if constexpr (Block::kPacked) {
      block.head = static_cast<int>(head);
      block.first = static_cast<int>(sorted.at(tiles - 1 - tile, tiles)) * kQueries;
    } else {
      block = BlockOfQueries(a, head, int64_t{tile} * kQueries, kQueries);
    }
    return true;
  }
};

}  // namespace kf::KF_BACKEND::attention
