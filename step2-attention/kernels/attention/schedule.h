// Which tiles of queries a block of a persistent grid works on, and in which order.
#pragma once

#include <step2/attention/packed_queries.h>

#include <algorithm>

namespace kf::KF_BACKEND::attention {

// In which order the tiles of queries are done. Under a causal mask the last ones of a head see most keys.
enum class Order {
  kHeads,          // head by head: all cost the same
  kPairs,          // head by head, the last tile with the first one, the last but one with the second …: all pairs cost
                   // the same, and K and V stay in the L2 cache
  kHeaviestFirst,  // the last tiles of all heads, then those before them …: what is left at the end is small
};

// The queries of a packed row at `slot`, where each document has tiles of its own; none (0 or less) if it is one too
// many.
template <int kQueries>
__device__ BlockOfQueries queries_at(const Args& a, int head, int slot) {
  const Documents documents(a);
  const int document = documents.of_query_slot(slot, kQueries);
  const Seen queries = documents.queries_in(document), keys = documents.keys_in(document);
  const int length = queries.end - queries.begin, tile = slot - (queries.begin / kQueries + document);
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

// What a launch does of a packed row: of each head some tiles, or slots. Heads go in groups.
struct PackedPart {
  int first = 0, count = 0;
  unsigned together = 1;  // heads of a group
};

// Groups of heads whose keys and values stay in the L2 cache: on an H200 16384 tokens of 12 heads with 128 columns take
// 11 % less time in three than in one. Every second group begins with its lightest tiles, so that a block has the same
// work in all, and the last one must end with them.
inline unsigned heads_together(const Args& a) {
  const int64_t groups = ceil_div(a.kv_heads * a.k_length * a.head_dim * 4, int64_t{64} << 20);
  return static_cast<unsigned>(ceil_div(a.heads, groups + (groups % 2 == 0 ? 1 : 0)));
}

// The tiles of a part, those that read most keys first: how many these are the lengths of documents decide, which only
// the GPU knows. All heads have the same, so a block sorts those of one, each thread a tile: it counts the heavier
// ones.
template <bool kPacked>
struct SortedTiles {
  static constexpr int kMost = 3 * kWarpgroupSize;  // no block has fewer threads
  alignas(16) int weight[kMost];  // the keys that a tile reads, and its number, so that no two are the same
  BlockOfQueries tile[kMost];     // of no head yet; if tiles straddle documents only where it begins
  unsigned count;                 // of those that exist
  int32_t starts[2][kMost + 1];   // of documents, where they are searched

  // By all threads of a block, which wait at a barrier before they ask. kApart: documents have tiles of their own.
  template <int kQueries, bool kApart>
  __device__ void sort(Args a, const PackedPart& part) {
    const int own = static_cast<int>(threadIdx.x);
    if (a.documents <= kMost) {
      for (int i = own; i <= a.documents; i += static_cast<int>(blockDim.x)) {
        starts[0][i] = a.cu_seqlens[i];
        starts[1][i] = a.cu_seqlens_k[i];
      }
      __syncthreads();
      a.cu_seqlens = starts[0];
      a.cu_seqlens_k = starts[1];
    }
    BlockOfQueries block;
    int keys = 0;  // that its tile reads, and 1
    if (own < part.count) {
      if constexpr (kApart) {
        block = queries_at<kQueries>(a, 0, part.first + own);
        if (block.queries > 0) keys = max(block.seen_by(kQueries - 1), 0) + 1;
      } else {
        const Documents documents(a);
        block.first = (part.first + own) * kQueries;
        const int last = min(block.first + kQueries, static_cast<int>(a.q_length)) - 1;
        keys = documents.keys_of(last).end - documents.keys_of(block.first).begin + 1;
      }
    }
    const int mine = min(keys, INT32_MAX / kMost - 1) * kMost + own;
    if (own < kMost) weight[own] = mine;
    const int exist = __syncthreads_count(keys > 0 ? 1 : 0);
    if (own == 0) count = static_cast<unsigned>(exist);
    if (keys == 0) return;
    int heavier = 0;
#pragma unroll 4
    for (int other = 0; other < part.count; other += 4) {  // those behind the last are lighter than any that exists
      for (const int its : load_vector<4>(weight + other).element) heavier += its > mine ? 1 : 0;
    }
    tile[heavier] = block;
  }
};
template <>
struct SortedTiles<false> {
  template <int kQueries, bool kApart>
  __device__ void sort(const Args&, const PackedPart&) {}
};

// Measured on an H200: with two tiles a head, or where pairs leave more than a tenth of all rounds' slots empty, the
// heaviest ones first are better, by up to 17 %; elsewhere pairs, by up to 9 % at D 128.
inline Order order_of(const Args& a, int64_t tiles, int64_t blocks) {
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

  // This round's tile. False after the last one.
  __device__ bool find(const Args& a, BlockOfQueries& block) {
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
    block = BlockOfQueries(a, head, int64_t{tile} * kQueries, kQueries);
    return true;
  }
};

// The same of a packed row: `sorted` tiles, of each group of heads.
template <class Sorted>
struct PackedWork {
  const Sorted& sorted;
  const unsigned heads, together;
  unsigned round = 0;

  __device__ PackedWork(const Args& a, const Sorted& sorted, const PackedPart& part)
      : sorted(sorted), heads(static_cast<unsigned>(a.heads)), together(part.together) {}

  __device__ void next() { ++round; }

  template <class Block>  // if tiles straddle documents it gets only its place
  __device__ bool find(const Args&, Block& block) const {
    const unsigned of_group = max(sorted.count * together, 1u);
    const unsigned number = round * gridDim.x + (round % 2 == 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    const unsigned first_head = number / of_group * together;
    if (first_head >= heads) return false;
    const unsigned in_group = number % of_group, size = min(together, heads - first_head), rank = in_group / size;
    if (rank >= sorted.count) return false;
    const BlockOfQueries& tile = sorted.tile[first_head / together % 2 == 0 ? rank : sorted.count - 1 - rank];
    static_cast<BlockOfQueries&>(block) = tile;
    block.head = static_cast<int>(first_head + in_group % size);
    return true;
  }
};

// What the producer says of the queries that it has loaded. A stage is written again after all consumers have released
// it, in the end one thread for its warpgroup; racecheck (CUDA 13.0), which does not follow that order, reports a race.
template <class Block>
struct Announced {
  Block block;      // its head is −1: there are no more
  int head, batch;  // for TMA
};

// Launches all tiles: those of a packed row in parts, of as many as can be sorted.
template <bool kPacked, class Launch>
void in_parts(const Args& a, int64_t tiles, Launch launch) {
  if (!kPacked) return launch(tiles, PackedPart{});
  constexpr int kMost = SortedTiles<true>::kMost;
  for (int64_t first = 0; first < tiles; first += kMost) {
    const int64_t count = std::min<int64_t>(tiles - first, kMost);
    launch(count, PackedPart{static_cast<int>(first), static_cast<int>(count), heads_together(a)});
  }
}

}  // namespace kf::KF_BACKEND::attention
