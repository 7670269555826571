// The schedule of v3_persistent: which block does what, in which order, and what waits for what.
//
// A token is a sequence of steps, the same in all blocks: for each layer q k v, attention, projection, fc, second
// product, and in the end logits. Where a step is more than a block may do at once it comes several times. A block's
// part of a step is a Job. Results go to all blocks as messages in global memory; a message's tag is its layer + 1, and
// a buffer is written anew in each layer. The kernel and the check of the schedule (host/schedule_check.h) both read it
// here. Plain C++.
#pragma once

#ifdef __CUDACC__
#define KF_BOTH __host__ __device__ __forceinline__
#else
#define KF_BOTH inline
#endif

namespace kf::decode_step {

constexpr int kGranule = 8;       // columns that lie in 16 bytes
constexpr int kMostGranules = 3;  // of a block at once, of q k v and of fc
constexpr int kTileGranules = 2;  // of projection and second product: 32 bytes, a sector
constexpr int kMostParts = 2;     // of those two's depth
constexpr int kMostSplits = 8;    // of a head's keys
constexpr int kOfMessage = 4;     // values in a message
constexpr int kRounds = 4;        // of keys that are asked for ahead
constexpr int kLogitRows = 4;     // of a warp at once
constexpr int kMostJobs = 32;     // of a block in a layer
constexpr int kMostAhead = 8;     // steps

enum class Kind { kQkv, kAttention, kProjection, kFc, kSecond, kLogits };
constexpr int kKinds = 5;  // of a layer

struct Range {
  int first, last;
  KF_BOTH int count() const { return last - first; }
};

KF_BOTH int up(int a, int b) { return (a + b - 1) / b; }

// The part of `total` that each block has. They differ by one at most.
KF_BOTH Range share(int total, int blocks, int block) {
  return {static_cast<int>(static_cast<long long>(total) * block / blocks),
          static_cast<int>(static_cast<long long>(total) * (block + 1) / blocks)};
}

// `count` things from `first` on: granules of columns, or with kAttention a head (first) and one of its splits (count).
// Of the depth, or of the keys' splits, `depth` from `depth_first` on.
struct Job {
  Kind kind;
  int first, count, depth_first, depth;
};

struct Schedule {
  int width, inner, heads, head_dim, vocab, layers;
  int blocks, threads;
  int parts;              // of the depth of projection and second product
  int splits;             // of a head's keys, at most
  int begin[kKinds + 1];  // the first step of each kind in a layer, and their number
  int logit_steps;
  int vectors[kKinds + 1];  // of 16 bytes, of a thread, in a step of each kind
  int ahead = 0;            // steps that weights are asked for ahead
  int ring;                 // vectors of a thread

  Schedule() = default;
  Schedule(int width, int inner, int heads, int head_dim, int vocab, int layers, int processors, int shared_bytes)
      : width(width), inner(inner), heads(heads), head_dim(head_dim), vocab(vocab), layers(layers) {
    const int of_qkv = 3 * width / kGranule, of_fc = inner / kGranule, tiles = width / (kTileGranules * kGranule);
    const auto least = [](int a, int b) { return a < b ? a : b; };
    const auto within = [](int x, int low, int high) { return x < low ? low : (x > high ? high : x); };
    // A block without columns of q k v, or of fc, would not be waited for, and could be overtaken.
    blocks = within(processors, 1, least(of_qkv, of_fc));
    threads = 32 * up(width, 32 * kOfMessage);
    parts = within(blocks / tiles, 1, kMostParts);
    splits = within(blocks / heads, 1, kMostSplits);
    const int steps[kKinds] = {up(up(of_qkv, blocks), kMostGranules), up(heads * splits, blocks),
                               up(tiles * parts, blocks), up(up(of_fc, blocks), kMostGranules),
                               up(tiles * parts, blocks)};
    begin[0] = 0;
    for (int k = 0; k < kKinds; ++k) begin[k + 1] = begin[k] + steps[k];
    logit_steps = up(up(vocab, blocks), kLogitRows * threads / 32);
    const auto product = [&](int depth, int granules) {
      return kOfMessage * granules * up(depth, kOfMessage * threads);
    };
    const int wide = least(kMostGranules, up(of_qkv, blocks)), wide_fc = least(kMostGranules, up(of_fc, blocks));
    vectors[0] = product(width, wide);
    vectors[1] = 2 * kRounds;
    vectors[2] = product(width / parts, kTileGranules);
    vectors[3] = product(width, wide_fc);
    vectors[4] = product(inner / parts, kTileGranules);
    vectors[5] = kLogitRows * up(width, 32 * kGranule);
    if (steps_of_layer() > kMostJobs) return;  // the table of jobs has no place for them
    ring = (shared_bytes - fixed_bytes()) / (16 * threads);
    // As many steps as fit into the ring wherever one begins.
    for (bool fits = true; fits && ahead <= kMostAhead;) {
      for (int first = 0; first < steps_of_layer(); ++first) {
        int sum = 0;
        for (int i = 0; i <= ahead; ++i) sum += vectors_of((first + i) % steps_of_layer());
        fits = fits && sum <= ring;
      }
      fits = fits && (ahead + 1) * vectors[5] <= ring && ahead < kMostAhead && most_of_both(ahead + 1) <= ring;
      if (fits) ++ahead;
    }
  }

  KF_BOTH int warps() const { return threads / 32; }
  KF_BOTH int steps_of_layer() const { return begin[kKinds]; }
  KF_BOTH int steps() const { return layers * steps_of_layer() + logit_steps; }
  KF_BOTH Kind kind_of(int step) const {
    int kind = 0;
    while (step >= begin[kind + 1]) ++kind;
    return static_cast<Kind>(kind);
  }
  int vectors_of(int step) const { return vectors[static_cast<int>(kind_of(step))]; }

  // Beside the ring: rows of x for tensor cores; sums of warps, twice; the last hidden state; parts of attention.
  KF_BOTH int sums_floats() const { return 3 * warps() * kMostGranules * kGranule + 2 * warps(); }
  KF_BOTH int fixed_bytes() const {
    const int floats = 128 * warps() + 2 * sums_floats() + width + warps() * (head_dim + 2);
    const int bytes = 4 * floats + kMostJobs * static_cast<int>(sizeof(Job));
    return (bytes + 15) / 16 * 16;
  }
  int shared_bytes() const { return fixed_bytes() + 16 * threads * ring; }

  // Of the layer's step `step`.
  KF_BOTH Job job(int block, int step) const {
    const Kind kind = kind_of(step);
    const int turn = step - begin[static_cast<int>(kind)];
    Job job{kind, 0, 0, 0, width};
    if (kind == Kind::kQkv || kind == Kind::kFc) {
      const int all = (kind == Kind::kQkv ? 3 * width : inner) / kGranule;
      const Range own = share(all, blocks, block);
      job.first = own.first + turn * kMostGranules;
      const int left = own.last - job.first;
      job.count = left < 0 ? 0 : (left > kMostGranules ? kMostGranules : left);
    } else if (kind == Kind::kAttention) {
      const Range own = share(heads * splits, blocks, block);
      const int item = own.first + turn;
      job.first = item / splits;
      job.depth_first = item % splits;
      job.count = item < own.last ? 1 : 0;
    } else {
      const int depth = (kind == Kind::kProjection ? width : inner) / parts;
      const Range own = share(width / (kTileGranules * kGranule) * parts, blocks, block);
      const int unit = own.first + turn;
      job.first = unit / parts * kTileGranules;
      job.depth_first = unit % parts * depth;
      job.depth = depth;
      job.count = unit < own.last ? kTileGranules : 0;
    }
    return job;
  }
  // Columns of the logits.
  KF_BOTH Range logits_of(int block) const { return share(vocab, blocks, block); }

  // Where messages lie, in messages of 16 bytes. What projection and second product add to x has a buffer each, as many
  // times as the depth has parts.
  KF_BOTH int qkv_at() const { return 4; }  // before it: what went wrong
  KF_BOTH int attended_at() const { return qkv_at() + 3 * width / kOfMessage; }
  KF_BOTH int projected_at() const { return attended_at() + splits * width / kOfMessage; }
  KF_BOTH int hidden_at() const { return projected_at() + parts * width / kOfMessage; }
  KF_BOTH int second_at() const { return hidden_at() + inner / kOfMessage; }
  KF_BOTH int messages() const { return second_at() + parts * width / kOfMessage; }

 private:
  // The last steps of the layers and the first of the logits.
  int most_of_both(int count) const {
    int most = 0;
    for (int logits = 0; logits <= count; ++logits) {
      int sum = logits * vectors[5];
      for (int i = 0; i < count - logits; ++i) {
        sum += vectors_of((steps_of_layer() * kMostAhead - 1 - i) % steps_of_layer());
      }
      most = sum > most ? sum : most;
    }
    return most;
  }
};

}  // namespace kf::decode_step
