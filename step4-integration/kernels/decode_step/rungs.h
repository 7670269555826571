// decode_step: one token of GPT-2 for each row of a batch, from ids to logits, over caches of keys and values.
//
// Row b's cache holds the slots begin[b] ≤ j < end[b]. Its new token stands at position end[b] − begin[b], is written
// to slot end[b], and attends to begin[b] ≤ j ≤ end[b]. Lengths are read on the device, and `end` is raised by one
// there, so a CUDA graph replays at any length. A row for which there is no slot, or no position, gets logits of NaN;
// nothing of it is written, and its `end` stays. An id that is no token makes NaN, too, of which the cache keeps k and
// v.
#pragma once

#include <kf/rung.h>

namespace kf::decode_step {

// Weights of a layer, in the order in which they are passed. Matrices are [in, out].
struct Layer {
  const void* ln_1_weight;  // [width], as all vectors that are not said to be longer
  const void* ln_1_bias;
  const void* attention_weight;  // [width, 3·width]: q, k and v
  const void* attention_bias;    // [3·width]
  const void* projection_weight;
  const void* projection_bias;
  const void* ln_2_weight;
  const void* ln_2_bias;
  const void* fc_weight;      // [width, inner]
  const void* fc_bias;        // [inner]
  const void* second_weight;  // [inner, width]
  const void* second_bias;
};
constexpr int64_t kOfLayer = sizeof(Layer) / sizeof(void*);

// Of a cache [layers, batch, heads, capacity, head_dim]; heads' columns are neighbours.
struct CacheStrides {
  int64_t layer, batch, head, slot;
};

// Several workers that share a model, and who this one is. Each has some heads, columns of the MLP and tokens: `heads`,
// `inner` and `vocab` are its own, and all of them together give what a whole model gives; workers.h.
constexpr int kMostWorkers = 8;
struct Workers {
  void* peers[kMostWorkers];  // each worker's buffer
  int count = 0;              // 0: the model is whole
  int rank = 0;
  int64_t first_token = 0;  // this worker's, of all `tokens`
  int64_t tokens = 0;
  int64_t patience_ns = 0;  // who waits longer for another worker ends the kernel with an error
};

struct Args {
  const int64_t* ids;  // [batch]
  int32_t* end;        // [batch]
  const int32_t* begin;
  const void* token_weight;     // [vocab, width]: the embedding, and the last product's weight
  const void* position_weight;  // [positions, width]
  const Layer* weights;         // [layers], in the host's memory
  const void* ln_weight;        // of the LayerNorm before the last product
  const void* ln_bias;
  void* k_cache;
  void* v_cache;
  CacheStrides k_stride;
  CacheStrides v_stride;
  void* logits;  // [batch, vocab]
  int64_t layers;
  int64_t batch;  // 1 to kMostRows
  int64_t heads;
  int64_t head_dim;  // width / heads, if the model is whole
  int64_t capacity;
  int64_t width;
  int64_t inner;
  int64_t vocab;
  int64_t positions;
  double scale;
  bool scale_by_layer;  // the scale of layer l is divided by l + 1
  double eps;
  bool tanh;
  DType dtype;
  void* packed = nullptr;  // what decode_pack made of the weights, or null
  int64_t packed_bytes = 0;
  void* scratch = nullptr;
  Workers workers{};
};

constexpr int64_t kMostRows = 32;
constexpr const char* kWhole = "takes a whole model; `peers` are of workers that share one";

inline double scale_of(const Args& a, int64_t layer) {
  return a.scale_by_layer ? a.scale / static_cast<double>(layer + 1) : a.scale;
}

// What `auto` takes on a GPU, read off results/h200.json. Who packs the weights is to have them read so.
inline const char* automatic(const Args& a) { return a.packed != nullptr ? "v4_clusters" : "v2_dependent"; }

}  // namespace kf::decode_step

#define KF_OP decode_step
#define KF_RUNGS(RUNG)                                                                      \
  RUNG(v1_launches, can_implement, scratch_bytes)                                           \
  RUNG(v2_dependent, can_implement, scratch_bytes, "what lies between products")            \
  RUNG(v3_persistent, can_implement, no_scratch, "hidden values, and what attention sends") \
  RUNG(v4_clusters, can_implement, no_scratch)
#include <kf/rung_list.h>
