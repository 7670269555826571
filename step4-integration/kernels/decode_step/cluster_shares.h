// How v4_clusters shares a model out: which cluster, block and warp has which rows of which product, in which order its
// weights come, and where the sums over clusters lie. The kernel, the packing of the weights and the check of the
// schedule read it here. Plain C++.
//
// A cluster has a head, or two, or none, and some units of the hidden layer. A warp of it has columns of x, the same
// ones in every cluster, and of its cluster's rows of q k v and of fc some tiles of four. Its weights lie in one
// stream, in the order of use.
#pragma once

#include "schedule.h"

namespace kf::decode_step {

constexpr int kClusterBlocks = 8, kClusterWarps = 8, kOfCluster = kClusterBlocks * kClusterWarps;
constexpr int kMostClusters = 16;
constexpr int kStepDepth = 64;  // of a product's depth, at once
constexpr int kGranule = 4;     // columns of x, or of the hidden layer, that are sent together; rows of a tile
constexpr int kUnitOfHidden = 64;
constexpr int kWarpKeys = 16;
constexpr int kStepBytes = kGranule * kStepDepth * 2;
constexpr int kMostTiles = 2;  // of q k v and of fc, to a warp
constexpr int kMostVocab = 1 << 22;

// A model's width in steps: the kernel is made for some, and narrower models are padded with zeros.
constexpr int kMostSteps = 25;
KF_BOTH constexpr int steps_for(int needed) {
  return needed <= 12 ? 12 : (needed <= 16 ? 16 : (needed <= 20 ? 20 : (needed <= kMostSteps ? kMostSteps : 0)));
}
// Steps of a piece: a tile's weights come in several, all others that belong together in one.
KF_BOTH constexpr int piece_of(int steps) { return steps <= 8 ? steps : (steps == 12 ? 6 : (steps == 16 ? 8 : 5)); }
KF_BOTH constexpr int most_heads(int steps) { return steps == 12 ? 1 : 2; }  // of a cluster
KF_BOTH constexpr int most_units(int steps) { return steps == 12 ? 5 : 8; }  // of a cluster's hidden layer
KF_BOTH constexpr int most_granules(int steps) { return up(16 * steps, kOfCluster); }
KF_BOTH constexpr int most_batch(int steps) { return steps == 12 ? 8 : 4; }  // rows at once

// Who a warp is: `index` counts those of its cluster. In `order` they are given tiles of q k v, some to each block, and
// from the last one on tiles of fc, so that who has one more of the one has one less of the other.
struct WarpPlace {
  int cluster, block, warp;
  KF_BOTH int index() const { return block * kClusterWarps + warp; }
  KF_BOTH int order(Kind kind) const {
    const int order = warp * kClusterBlocks + block;
    return kind == Kind::kFc ? kOfCluster - 1 - order : order;
  }
};

// A step of mma is four rows of the weights by 64 of the depth: operand a has the rows for each of four chunks of 16,
// and operand b each chunk of x, its upper and lower parts. Of the 16 × 8 sums one of four is wanted, where a row's
// chunk is the column's. A lane's vector is its operand: where element `i` of a step comes from.
struct StepSpot {
  int row, depth;
};
KF_BOTH StepSpot spot_in_step(int i) {
  const int word = i / 2 % 4, t = i / 8 % 4, chunk = i / 128 % 2 + word % 2 * 2;
  return {i / 32 % kGranule, (chunk * 4 + t) * kGranule + word / 2 * 2 + i % 2};
}

// A warp's columns of x, in two orders: as products give them, `row` of a group of four, a lane for each row, and as
// they are sent, four to a granule. What a lane has of four groups is a granule. Of groups that are left over granules
// are put together by few exchanges (send_x).
KF_BOTH constexpr int column_in_warp(int granules, int group, int row) {
  const int left = granules % 4, base = granules - left, k = group - base;
  if (group < base) return (group / 4 * 4 + row) * kGranule + group % 4;
  if (left == 1) return base * kGranule + row;
  if (left == 2) return (base + row % 2) * kGranule + row / 2 * 2 + k;
  return row < 3 ? (base + row) * kGranule + k : (base + k) * kGranule + 3;
}

// A warp's granules of x, counted over its cluster, and the column of one that it has; −1: there is none.
KF_BOTH constexpr Range granules_of(int steps, int index) {
  return {16 * steps * index / kOfCluster, 16 * steps * (index + 1) / kOfCluster};
}
KF_BOTH constexpr int column_of_x(const Range& own, int width, int group, int row) {
  const int column = own.first * kGranule + column_in_warp(own.count(), group, row);
  return group < own.count() && column < width ? column : -1;
}

struct Shares {
  int width, inner, vocab, layers, clusters;
  int heads, steps;        // steps 0: too wide
  int with_heads;          // clusters
  int all_units, of_warp;  // units of the hidden layer; a warp's sums of a row
  int heads_before[kMostClusters + 1], units_before[kMostClusters + 1];
  int label_at;                                       // counted in 16 bytes; before it lies the state
  int64_t constants_at, rows_at, streams_at, stride;  // bytes

  Shares() = default;
  // least_steps: the kernel is to be made for so many, or more.
  KF_BOTH Shares(int64_t of_width, int64_t of_inner, int64_t of_vocab, int64_t of_layers, int64_t at_once,
                 int least_steps)
      : width(static_cast<int>(of_width)),
        inner(static_cast<int>(of_inner)),
        vocab(static_cast<int>(of_vocab)),
        layers(static_cast<int>(of_layers)),
        heads(width / kHead),
        steps(steps_of(width, least_steps)),
        all_units(up(inner, kUnitOfHidden)),
        label_at(1) {
    clusters = least(least(static_cast<int>(at_once), kMostClusters), all_units);
    if (clusters < 1) return;  // does not fit
    if (heads > clusters * most_heads(steps)) steps = steps_of(width, 16);
    of_warp = kGranule * most_granules(steps);
    // Who has more heads has fewer units, if all have some then, and none too many. A head's weights are as many as two
    // units'; but while a warp has one tile at most, four units take no longer than three.
    for (int of_head = steps == 12 ? 1 : 2; of_head >= 0; --of_head) {
      for (int c = 0; c <= clusters; ++c) {
        heads_before[c] = heads * c / clusters;
        units_before[c] = (of_head * heads + all_units) * c / clusters - of_head * heads_before[c];
      }
      if (has_units()) break;
    }
    with_heads = least(heads, clusters);
    constants_at = sums_at(2, 0, 0, 0);
    rows_at = constants_at + static_cast<int64_t>(clusters) * kOfCluster * (layers + 1) * kConstantBytes;
    streams_at = to_128(rows_at + static_cast<int64_t>(clusters) * kOfCluster * most_logit_tiles() * kTileRowsBytes);
    stride = 0;
    for (int w = 0; steps > 0 && w < clusters * kOfCluster; ++w) {
      const int64_t bytes = kStepBytes * (static_cast<int64_t>(layers) * layer_steps(place(w)) +
                                          static_cast<int64_t>(logit_tiles(place(w)).count()) * steps);
      stride = stride < bytes ? bytes : stride;
    }
  }
  KF_BOTH static int steps_of(int width, int least_steps) {
    const int needed = up(width, kStepDepth);
    return steps_for(needed < least_steps ? least_steps : needed);
  }
  KF_BOTH static WarpPlace place(int number) {
    const int index = number % kOfCluster;
    return {number / kOfCluster, index / kClusterWarps, index % kClusterWarps};
  }
  KF_BOTH static int number(const WarpPlace& p) { return p.cluster * kOfCluster + p.index(); }

  KF_BOTH bool fits() const {
    return clusters > 0 && steps > 0 && heads > 0 && up(heads, clusters) <= most_heads(steps) && has_units() &&
           vocab <= kMostVocab;
  }
  KF_BOTH bool has_units() const {
    for (int c = 0; c < clusters; ++c) {
      if (units_of(c).count() < 1 || units_of(c).count() > most_units(steps)) return false;
    }
    return true;
  }
  KF_BOTH int64_t bytes() const { return streams_at + static_cast<int64_t>(clusters) * kOfCluster * stride; }

  // ---- what a cluster and a warp have ----

  KF_BOTH Range heads_of(int cluster) const { return {heads_before[cluster], heads_before[cluster + 1]}; }
  KF_BOTH Range units_of(int cluster) const { return {units_before[cluster], units_before[cluster + 1]}; }
  KF_BOTH Range granules_of(int index) const { return kf::decode_step::granules_of(steps, index); }
  // Of q k v, or fc.
  KF_BOTH int tiles(const WarpPlace& p, Kind kind) const {
    const int all = kind == Kind::kQkv ? heads_of(p.cluster).count() * 3 * kHead / kGranule
                                       : units_of(p.cluster).count() * kUnitOfHidden / kGranule;
    return up(all - p.order(kind), kOfCluster);
  }
  KF_BOTH static int tile(const WarpPlace& p, Kind kind, int k) { return k * kOfCluster + p.order(kind); }
  KF_BOTH Range logit_tiles(const WarpPlace& p) const {
    const int all = up(vocab, kGranule), warps = clusters * kOfCluster;
    return {all * number(p) / warps, all * (number(p) + 1) / warps};
  }
  KF_BOTH int most_logit_tiles() const { return up(up(vocab, kGranule), clusters * kOfCluster); }
  // Keys of a head that a warp attends to.
  KF_BOTH static Range keys(int count, int index) {
    return {count * index / kOfCluster, count * (index + 1) / kOfCluster};
  }

  // ---- a warp's stream: steps of each layer's products, then of the logits' tiles ----

  //   q k v, fc   tile after tile
  //   projection  of each head each group of the warp's columns
  //   second      of each group each unit
  KF_BOTH int product_steps(const WarpPlace& p, Kind kind) const {
    const int granules = granules_of(p.index()).count();
    switch (kind) {
      case Kind::kQkv: return tiles(p, kind) * steps;
      case Kind::kProjection: return heads_of(p.cluster).count() * granules;
      case Kind::kFc: return tiles(p, kind) * steps;
      default: return granules * units_of(p.cluster).count();
    }
  }
  KF_BOTH int layer_steps(const WarpPlace& p) const {
    int sum = 0;
    for (int k = 0; k < kKinds; ++k) sum += product_steps(p, static_cast<Kind>(k));
    return sum;
  }
  KF_BOTH int64_t stream_at(const WarpPlace& p) const { return streams_at + number(p) * stride; }

  // ---- constants ----

  // Of a warp and layer: LayerNorm's two numbers of each row of its tiles of q k v, then of fc, in float32; of its
  // columns of x what is added after attention, the gain of the next LayerNorm, and both after the MLP. In front of the
  // first layer's stands the first gain.
  enum OfX { kBias, kGain, kSecondBias, kNextGain };
  static constexpr int kTileRowsBytes = kGranule * 8, kRowBytes = 2 * kMostTiles * kTileRowsBytes, kOfColumns = 28;
  static constexpr int kConstantBytes = 384;
  static_assert(kRowBytes + 4 * kOfColumns * 2 <= kConstantBytes);
  KF_BOTH int64_t constants_of(const WarpPlace& p, int layer) const {
    return constants_at + (static_cast<int64_t>(number(p)) * (layers + 1) + layer + 1) * kConstantBytes;
  }
  KF_BOTH int64_t rows_of(const WarpPlace& p, int tile) const {  // of the logits' rows
    return rows_at + (static_cast<int64_t>(number(p)) * most_logit_tiles() + tile) * kTileRowsBytes;
  }

  // ---- which column of the model's weights, and which place of its depth; −1: none, a zero ----

  KF_BOTH int column_of_x(const WarpPlace& p, int group, int row) const {
    return kf::decode_step::column_of_x(granules_of(p.index()), width, group, row);
  }
  struct Spot {
    int column, place;
  };
  // Of row `row` and place `depth` of a product's step.
  KF_BOTH Spot spot(const WarpPlace& p, Kind kind, int step, int row, int depth) const {
    const Range own_heads = heads_of(p.cluster), units = units_of(p.cluster);
    const int granules = granules_of(p.index()).count();
    if (kind == Kind::kProjection) {
      return {column_of_x(p, step % granules, row), (own_heads.first + step / granules) * kHead + depth};
    }
    if (kind == Kind::kSecond) {
      const int place = (units.first + step % units.count()) * kUnitOfHidden + depth;
      return {column_of_x(p, step / units.count(), row), place < inner ? place : -1};
    }
    const int place = step % steps * kStepDepth + depth, tile_row = tile(p, kind, step / steps) * kGranule + row;
    return {kind == Kind::kQkv ? column_of_qkv_row(p, tile_row) : column_of_hidden_row(p, tile_row),
            place < width ? place : -1};
  }
  // The rows of q k v stand by head: its q, its k, its v.
  KF_BOTH int column_of_qkv_row(const WarpPlace& p, int row) const {
    return column_of_qkv(heads_of(p.cluster).first * 3 * kHead + row, width);
  }
  KF_BOTH int column_of_hidden_row(const WarpPlace& p, int row) const {
    const int column = units_of(p.cluster).first * kUnitOfHidden + row;
    return column < inner ? column : -1;
  }

  // ---- what clusters add to x: 64-bit sums, of each row those of a warp's columns, group after group ----

  // Bytes; of one of two sets, taken in turn by launches: one is added to while the other is set to zero.
  KF_BOTH int64_t sums_at(int set, int layer, int half, int index) const {
    const int64_t before = (static_cast<int64_t>(set * layers + layer) * 2 + half) * kOfCluster + index;
    return 128 + before * most_batch(steps) * of_warp * 8;
  }
  KF_BOTH int senders(int half) const { return half == 0 ? with_heads : clusters; }  // who has something to add
};

// A warp's stream comes in pieces, through a ring: each tile in some, a head's groups in one, a group's units in one.
// Of 768 columns there is room for a layer of one row, and a piece has as much as the largest of its product, which is
// known when compiled; of wider models it has its own. Each row of a batch more takes some quarters of a step from each
// warp's ring.
KF_BOTH constexpr int ring_bytes(int steps, int batch) {
  const int of_one = steps == 12 ? 51 : (steps == 25 ? 48 : 49), quarters = steps / 2 + (steps == 12 ? 7 : 13);
  return (of_one - up((batch - 1) * quarters, 4)) * kStepBytes;
}
KF_BOTH constexpr bool exact_room(int steps) { return steps > 12; }
constexpr unsigned kMostPieces = 16;  // in a ring

// Which piece is next, and where in the ring it comes.
template <int kSteps, int kBatch>
struct NextPiece {
  static constexpr int kPiece = piece_of(kSteps), kRing = ring_bytes(kSteps, kBatch);
  struct Steps {
    int of_piece, room;
  };
  int granules, units;
  int of_qkv, of_projection, of_fc, of_layer;  // pieces up to the end of each product
  unsigned of_layers, of_logits;

  unsigned index = 0;
  Steps steps;
  int first;  // byte of the ring
  Walk used;  // up to the last piece whose room it needs

  KF_BOTH NextPiece(const Shares& s, const WarpPlace& p)
      : granules(s.granules_of(p.index()).count()),
        units(s.units_of(p.cluster).count()),
        of_qkv(s.tiles(p, Kind::kQkv) * (kSteps / kPiece)),
        of_projection(of_qkv + s.heads_of(p.cluster).count()),
        of_fc(of_projection + s.tiles(p, Kind::kFc) * (kSteps / kPiece)),
        of_layer(of_fc + granules),
        of_layers(static_cast<unsigned>(s.layers * of_layer)),
        of_logits(static_cast<unsigned>(s.logit_tiles(p).count() * (kSteps / kPiece))) {
    find();
  }
  KF_BOTH unsigned all() const { return of_layers + of_logits; }
  KF_BOTH void go_on() {
    ++index;
    if (++in_layer == of_layer) in_layer = 0;
    find();
  }

 private:
  Walk ahead;
  int in_layer = 0, used_in_layer = 0;

  KF_BOTH Steps steps_of(unsigned piece, int of) const {
    const bool projection = of < of_projection;
    if (piece >= of_layers || of < of_qkv || (!projection && of < of_fc)) return {kPiece, kPiece};
    const int own = projection ? granules : units;
    return {own, exact_room(kSteps) ? own : (projection ? most_granules(kSteps) : most_units(kSteps))};
  }
  KF_BOTH void find() {
    steps = steps_of(index, in_layer);
    first = ahead.next(steps.room * kStepBytes, kRing);
    while (ahead.bytes(kRing) - used.bytes(kRing) > kRing || ahead.index - used.index > kMostPieces) {
      used.next(steps_of(used.index, used_in_layer).room * kStepBytes, kRing);
      if (++used_in_layer == of_layer) used_in_layer = 0;
    }
  }
};

}  // namespace kf::decode_step
