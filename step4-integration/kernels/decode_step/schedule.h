// The schedule of v3_persistent: which rows of which product a block has, in which order its weights come, and where
// messages lie.
//
// A token is, for each layer, q k v, attention, projection, fc and second product, and in the end the logits. Each
// block has rows of every product (columns of the weights), and some have a head's attention over a part of the keys.
// What a block reads lies in one stream, tile after tile in the order of use. The kernel, the packing of the weights
// and the check of the schedule (schedule_check.h) all read it here. Plain C++.
#pragma once

#include <cstddef>
#include <cstdint>

// Forced inline: a function that the linker sees would be one for both backends.
#ifdef __CUDACC__
#define KF_BOTH __host__ __device__ __forceinline__
#else
#define KF_BOTH inline
#endif

namespace kf::decode_step {

constexpr int kOfMessage = 3;     // rows whose values are sent together, in float32
constexpr int kOfHidden = 6;      // of the hidden layer, in half precision
constexpr int kOfAttended = 4;    // columns of a split of a head
constexpr int kConsumers = 8;     // warps that multiply
constexpr int kUnit = 96;         // of x's depth, to a warp
constexpr int kHiddenUnit = 384;  // of the hidden layer's
constexpr int kChunk = 32;        // of depth: one vector of 16 bytes of each of four lanes
constexpr int kSecondRows = 8;    // of a tile of the second product
constexpr int kRestRows = 8;      // of half an operand a
constexpr int kHead = 64;         // columns of a head
constexpr int kSplitKeys = 64;    // keys of a head's part, if there are not too many
constexpr int kTileKeys = 128;    // of a part, at most
constexpr int kLogitRows = 16;    // of a tile
constexpr int kSlots = 16;        // tiles on their way

KF_BOTH constexpr int up(int a, int b) { return (a + b - 1) / b; }

// What there are registers and shared memory for.
constexpr int kOutputs = 24;                       // rows of a block's product
constexpr int kTiles = up(kOutputs, kSecondRows);  // of a product: the second has the most
constexpr int kSplits = 11;                        // of a head
constexpr int kLogits = 400;                       // of a block
constexpr int kRingBytes = 184 * 1024;

enum class Kind { kQkv, kProjection, kFc, kSecond };  // products of a layer
constexpr int kKinds = 4;

KF_BOTH int64_t to_128(int64_t bytes) { return (bytes + 127) / 128 * 128; }
KF_BOTH int to_16(int bytes) { return up(bytes, 16) * 16; }
KF_BOTH int least(int a, int b) { return a < b ? a : b; }

struct Range {
  int first, last;
  KF_BOTH constexpr int count() const { return last - first; }
};
// The part of `total` that each block has. They differ by one at most.
KF_BOTH Range share(int total, int blocks, int block) {
  return {static_cast<int>(static_cast<int64_t>(total) * block / blocks),
          static_cast<int>(static_cast<int64_t>(total) * (block + 1) / blocks)};
}

// A tile's weights: some of a product's rows. They are operand a of mma, in the order in which lanes load it:
//   of 16 rows   for each chunk of the depth two halves of 512 bytes, 16 for each lane
//   of the rest  for each chunk 64 bytes a row: 16 for each of four lanes. The tensor core's 16 rows are then 8, each
//                twice, with the two halves of the chunk. Up to 15 rows, in two halves
// The second product's 16 rows are 8, each twice, with two neighbouring chunks.
struct Body {
  int row, rows;  // of the block's
  int depth;      // padded
  bool second;

  KF_BOTH int of_16() const { return second ? 0 : rows / 16; }  // 0 or 1
  KF_BOTH int rest() const { return rows - of_16() * 16; }
  KF_BOTH int rest_at() const { return of_16() * depth * 32; }
  KF_BOTH int bytes() const { return rest_at() + rest() * depth * 2; }
};

// A product's rows in a block, in one tile, but those of the second product eight at a time. In front of the first
// one's weights lie LayerNorm's gain and two numbers a row or, without a LayerNorm, one: the bias.
struct Product {
  int first, rows;  // of the weights' columns
  int depth;
  bool normed, second;

  KF_BOTH int gain_bytes() const { return normed ? depth * 2 : 0; }
  KF_BOTH int constants_at() const { return gain_bytes(); }
  KF_BOTH int body_at() const { return gain_bytes() + to_16(rows * (normed ? 8 : 4)); }
  KF_BOTH int at_once() const { return second ? kSecondRows : rows; }
  KF_BOTH int tiles() const { return up(rows, at_once()); }
  KF_BOTH Body body(int tile) const {
    const int row = tile * at_once();
    return {row, least(at_once(), rows - row), depth, second};
  }
  KF_BOTH int tile_bytes(int tile) const { return (tile == 0 ? body_at() : 0) + body(tile).bytes(); }
  KF_BOTH int bytes() const {
    int bytes = 0;
    for (int tile = 0; tile < tiles(); ++tile) bytes += tile_bytes(tile);
    return bytes;
  }
};

// Of the keys of a head, what a block attends to; head −1: none.
struct Part {
  int head, split, first, count;
};

struct Schedule {
  int width, inner, vocab, layers, blocks;
  int heads, splits;        // parts of a head's keys, at most
  int units, hidden_units;  // of the depth, each to a warp
  int depth, hidden_depth;  // padded to whole units
  int granules;             // messages that x takes
  int hidden_granules;      // that the hidden layer takes
  // Where messages begin, counted in 16 bytes. Before them lies the state.
  int label_at, x_at, x_middle_at, qkv_at, attended_at, hidden_at, messages;
  int64_t gains_at, streams_at, stride;  // bytes

  Schedule() = default;
  KF_BOTH Schedule(int64_t of_width, int64_t of_inner, int64_t of_vocab, int64_t of_layers, int64_t processors)
      : width(static_cast<int>(of_width)),
        inner(static_cast<int>(of_inner)),
        vocab(static_cast<int>(of_vocab)),
        layers(static_cast<int>(of_layers)),
        heads(width / kHead),
        units(up(width, kUnit)),
        hidden_units(up(inner, kHiddenUnit)),
        granules(up(width, kOfMessage)),
        hidden_granules(up(inner, kOfHidden)) {
    // A block without rows of a product would not be waited for, and could be overtaken.
    blocks = least(least(static_cast<int>(processors), vocab), least(granules, hidden_granules));
    depth = units * kUnit;
    hidden_depth = hidden_units * kHiddenUnit;
    splits = heads > 0 ? least(kSplits, blocks / heads) : 0;
    label_at = 1;
    x_at = label_at + 1;
    x_middle_at = x_at + granules;
    qkv_at = x_middle_at + granules;
    attended_at = qkv_at + width;
    hidden_at = attended_at + splits * (width / kOfAttended);
    messages = hidden_at + hidden_granules;
    gains_at = to_128(messages * 16);
    streams_at = gains_at + to_128((2 * layers + 1) * depth * 2);
    stride = 0;
    for (int b = 0; b < blocks; ++b) stride = stride < stream_bytes(b) ? stream_bytes(b) : stride;
    stride = to_128(stride);
  }

  // Whether registers and shared memory suffice.
  KF_BOTH bool fits() const {
    return splits > 0 && units <= kConsumers && hidden_units <= kConsumers &&
           kOfMessage * up(width, blocks) <= kOutputs && kOfHidden * up(hidden_granules, blocks) <= kOutputs &&
           up(vocab, blocks) <= kLogits;
  }
  KF_BOTH int most_keys() const { return splits * kTileKeys; }
  KF_BOTH int64_t bytes() const { return streams_at + blocks * stride; }

  KF_BOTH Product product(int block, Kind kind) const {
    const bool fc = kind == Kind::kFc, second = kind == Kind::kSecond, qkv = kind == Kind::kQkv;
    const int of_granule = fc ? kOfHidden : kOfMessage;
    // Those that have one more of x, whose rows are the same in both products that add to it, shall not have one more
    // of the others, too.
    const int turned = qkv || fc ? (block + 1) % blocks : block;
    const Range own = share(fc ? hidden_granules : (qkv ? width : granules), blocks, turned);
    return {own.first * of_granule, own.count() * of_granule, second ? hidden_depth : depth, qkv || fc, second};
  }

  // ---- the stream ----

  // Of LayerNorm 2·layer, 2·layer + 1, or the last one, 2·layers: where its gain lies behind gains_at.
  KF_BOTH int gains_of(int norm) const { return norm * depth * 2; }

  KF_BOTH Range logits(int block) const { return share(vocab, blocks, block); }
  // Of 16 rows each; a block's last one may have fewer.
  KF_BOTH int logit_groups(int block) const { return up(logits(block).count(), kLogitRows); }
  // Its gain does not lie in front: there is one for all groups.
  KF_BOTH Product logit_group(int block, int group) const {
    return {logits(block).first + group * kLogitRows, kLogitRows, depth, true, false};
  }
  KF_BOTH int logit_group_bytes() const { return kLogitRows * 8 + depth * 32; }
  // Of a layer: what lies in the block's stream. Gains lie elsewhere, for all blocks.
  KF_BOTH int in_stream(int block, Kind kind) const {
    const Product p = product(block, kind);
    return p.bytes() - p.gain_bytes();
  }
  KF_BOTH int layer_bytes(int block) const {
    int bytes = 0;
    for (int k = 0; k < kKinds; ++k) bytes += in_stream(block, static_cast<Kind>(k));
    return bytes;
  }
  KF_BOTH int64_t stream_bytes(int block) const {
    return static_cast<int64_t>(layers) * layer_bytes(block) +
           static_cast<int64_t>(logit_groups(block)) * logit_group_bytes();
  }

  // ---- attention ----

  // How many parts a head's keys come in, with `keys` before this token's own.
  KF_BOTH int splits_of(int keys) const {
    const int wanted = up(keys, kSplitKeys);
    return wanted < 1 ? 1 : least(wanted, splits);
  }
  KF_BOTH Part part(int block, int keys) const {
    const int in_use = splits_of(keys), parts = heads * in_use, item = up(block * parts, blocks);
    if (item >= parts || item * blocks / parts != block) return {-1, 0, 0, 0};
    const int of_part = up(keys, in_use), split = item % in_use, first = split * of_part;
    const int count = least(keys, first + of_part) - first;
    return {item / in_use, split, first, count < 0 ? 0 : count};
  }
};

// ---- the ring ----

// Where tile after tile lies in a ring of so many bytes: none goes round its end.
struct Walk {
  int at = 0, rounds = 0;
  unsigned index = 0;
  KF_BOTH int next(int bytes, int ring) {
    const bool goes_round = at + bytes > ring;
    const int first = goes_round ? 0 : at;
    rounds += goes_round;
    at = first + bytes;
    ++index;
    return first;
  }
  KF_BOTH int bytes(int ring) const { return rounds * ring + at; }  // so far
};

struct Tile {
  int index, first, last;
};
// Whether `older` must be free before `tile` may be brought; `end` is where the tile in front of that ends.
KF_BOTH bool in_the_way(const Tile& older, const Tile& tile, int end) {
  const bool wraps = tile.first != end;
  return tile.index - older.index >= kSlots || (wraps && older.first >= end) ||
         (older.first < tile.last && older.last > tile.first);
}

// Which column of x stands at place `s` of the depth: a lane's three values lie in three chunks.
KF_BOTH int column_of_x(int s) { return s / kUnit * kUnit + kOfMessage * (s % kChunk) + s % kUnit / kChunk; }
// Of the hidden layer: a lane has two messages of six, and stores eight values and four.
KF_BOTH int column_of_hidden(int s) {
  const int in_unit = s % kHiddenUnit, vector = in_unit / 8, e = in_unit % 8;
  const int lane = vector < 32 ? vector : 2 * (vector - 32) + e / 4, value = vector < 32 ? e : 8 + e % 4;
  return s / kHiddenUnit * kHiddenUnit + value / kOfHidden * (32 * kOfHidden) + kOfHidden * lane + value % kOfHidden;
}
// Rows of q k v stand by head: its q, its k, its v.
KF_BOTH int column_of_qkv(int row, int width) {
  const int head = row / (3 * kHead), in_head = row % (3 * kHead);
  return in_head / kHead * width + head * kHead + in_head % kHead;
}

}  // namespace kf::decode_step
