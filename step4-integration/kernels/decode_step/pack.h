// GPT-2's weights once more, as v3_persistent reads them: for each block a stream of tiles in the order of use.
//
// The copy is written in order, 16 bytes a thread. What a warp's lanes read for it are eight neighbouring columns of
// four rows: half sectors, which the L1 cache gives to the next lanes. A row's two numbers for LayerNorm are sums along
// the depth, a warp each.
#pragma once

#include <kf/launch.h>
#include <kf/numeric.h>
#include <step1/vector.h>
#include <step2/reduce.h>

#include <string>
#include <type_traits>

#include "rungs.h"
#include "schedule.h"

namespace kf::decode_step {

struct Spot {
  int row, depth;
};

// Of a tile's element `i`: its row in the block, and its place along the depth. A lane t of four has eight neighbours
// of a chunk of 32; word w of its 16 bytes is element 2w and 2w + 1 here.
KF_BOTH Spot spot_of(const Body& b, int i) {
  const int of_16 = b.of_16() * 16 * b.depth, e = i % 2, word = i / 2 % 4;
  if (i < of_16) {  // words: rows g, g + 8, twice
    const int lane = i / 8 % 32, chunk_half = i / 256;
    return {b.row + lane / 4 + word % 2 * 8,
            chunk_half / 2 * 32 + lane % 4 * 8 + chunk_half % 2 * 4 + word / 2 * 2 + e};
  }
  i -= of_16;
  const int t = i / 8 % 4, rows = b.rest(), row = b.row + b.of_16() * 16 + i / 32 % rows, chunk = i / (32 * rows);
  if (!b.second) {  // words: both halves of the chunk, twice
    return {row, chunk * 32 + t * 8 + word % 2 * 4 + word / 2 * 2 + e};
  }
  return {row,  // words: two chunks, twice
          (chunk / 2 * 2 + word % 2) * 32 + t * 8 + chunk % 2 * 4 + word / 2 * 2 + e};
}

// A product as it is packed: where column `row` of the weights lies for the depth's place `s`, or −1: a zero.
struct Source {
  Kind kind;
  int depth, columns;  // of the weights [depth, columns]; of the last product's [vocab, depth] the other way round
  bool logits;

  KF_BOTH int column_of(int row) const {
    if (logits) return row;
    return kind == Kind::kQkv ? column_of_qkv(row, depth) : row;
  }
  KF_BOTH int64_t at(int row, int s) const {
    const int k = kind == Kind::kProjection ? s : (kind == Kind::kSecond ? column_of_hidden(s) : column_of_x(s));
    if (k >= depth || row >= columns) return -1;
    return logits ? static_cast<int64_t>(row) * depth + k : static_cast<int64_t>(k) * columns + column_of(row);
  }
  // The same weight by its own column of x.
  KF_BOTH int64_t of(int row, int k) const {
    return logits ? static_cast<int64_t>(row) * depth + k : static_cast<int64_t>(k) * columns + column_of(row);
  }
};

// Of a product's weights in the model, [depth, columns].
KF_BOTH int depth_of(Kind kind, int width, int inner) { return kind == Kind::kSecond ? inner : width; }
KF_BOTH int columns_of(Kind kind, int width, int inner) {
  return kind == Kind::kQkv ? 3 * width : (kind == Kind::kFc ? inner : width);
}

}  // namespace kf::decode_step

namespace kf::KF_BACKEND::decode_step {

using namespace kf::decode_step;  // NOLINT: the schedule's names

// Why a rung that reads packed weights does not take a call, whatever they are.
inline std::string got(int64_t value) { return ", got " + std::to_string(value); }
inline std::string cannot_take(const Args& a, int most_rows) {
  if (a.workers.count > 0) return kf::decode_step::kWhole;
  if (a.batch > most_rows) {
    return "takes " + (most_rows == 1 ? "one row" : "at most " + std::to_string(most_rows) + " rows") + got(a.batch);
  }
  if (a.head_dim != kHead) return "takes a head_dim of 64" + got(a.head_dim);
  return "";
}
inline std::string too_many_keys(const Args& a, int64_t most) {
  const int64_t keys = a.capacity < a.positions ? a.capacity : a.positions;
  if (keys - 1 <= most) return "";
  return "takes at most " + std::to_string(most) + " keys before the new one" + got(keys - 1);
}
inline std::string cannot_read(const Args& a, int64_t bytes) {
  const auto aligned = [&](const void* pointer, const CacheStrides& s) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && s.layer % 8 == 0 && (a.batch == 1 || s.batch % 8 == 0) &&
           s.head % 8 == 0 && s.slot == kHead;
  };
  if (!aligned(a.k_cache, a.k_stride) || !aligned(a.v_cache, a.v_stride)) {
    return "takes caches whose slots are neighbours, and whose rows begin at multiples of 16 bytes";
  }
  if (a.packed == nullptr) return "takes weights packed by decode_pack; `packed` is None";
  if (a.packed_bytes == bytes) return "";
  return "takes weights packed by decode_pack for this rung, this device and these shapes, " + std::to_string(bytes) +
         " bytes" + got(a.packed_bytes);
}

constexpr int kPackThreads = 256, kPackWarps = kPackThreads / kWarpSize;

// What tells one shape's packed weights from another's of as many bytes. It stands behind the state.
template <class T>
__device__ __forceinline__ uint4 label(const Schedule& s) {
  const uint32_t blocks_and_type = static_cast<uint32_t>(s.blocks) << 1 | std::is_same_v<T, __half>;
  return {static_cast<uint32_t>(s.width), static_cast<uint32_t>(s.inner), static_cast<uint32_t>(s.vocab),
          static_cast<uint32_t>(s.layers) << 16 | blocks_and_type};
}
__device__ __forceinline__ uint4* label_of(const Schedule& s, unsigned char* packed) {
  return reinterpret_cast<uint4*>(packed) + s.label_at;
}

// A product's weights and bias, and gain and shift of the LayerNorm before it, or null.
template <class T>
struct Parameters {
  const T *weight, *bias, *gain, *shift;
};
// Of a layer's product. An array of all four, of which a thread takes one, would lie in memory, once for each thread.
template <class T>
__device__ __forceinline__ Parameters<T> parameters_of(Kind kind, const Layer& w) {
  const auto of = [](const void* weight, const void* bias, const void* gain, const void* shift) {
    return Parameters<T>{static_cast<const T*>(weight), static_cast<const T*>(bias), static_cast<const T*>(gain),
                         static_cast<const T*>(shift)};
  };
  switch (kind) {
    case Kind::kQkv: return of(w.attention_weight, w.attention_bias, w.ln_1_weight, w.ln_1_bias);
    case Kind::kProjection: return of(w.projection_weight, w.projection_bias, nullptr, nullptr);
    case Kind::kFc: return of(w.fc_weight, w.fc_bias, w.ln_2_weight, w.ln_2_bias);
    default: return of(w.second_weight, w.second_bias, nullptr, nullptr);
  }
}

template <class T>
struct Matrix : Parameters<T> {
  Source source;
};

// A product's rows in a block, from their constants on.
template <class T>
__device__ __forceinline__ void pack_product(const Product& p, const Matrix<T>& m, unsigned char* to) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpSize;
  for (int row = thread / kWarpSize; row < p.rows; row += kPackWarps) {
    const bool exists = p.first + row < m.source.columns;
    float2 sums = {0, 0};
    if (p.normed && exists) {
      for (int k = lane; k < m.source.depth; k += kWarpSize) {
        const float weight = to_compute(m.weight[m.source.of(p.first + row, k)]);
        sums = {sums.x + weight * to_compute(m.gain[k]), sums.y + weight * to_compute(m.shift[k])};
      }
      sums = {warp_sum(sums.x), warp_sum(sums.y)};
    }
    if (m.bias != nullptr && exists) sums.y += to_compute(m.bias[m.source.column_of(p.first + row)]);
    if (lane != 0) continue;
    float* const constants = reinterpret_cast<float*>(to) + (p.normed ? 2 * row : row);
    if (p.normed) constants[0] = sums.x;
    constants[p.normed ? 1 : 0] = sums.y;
  }
  to += p.body_at() - p.gain_bytes();
  for (int tile = 0; tile < p.tiles(); ++tile) {
    const Body body = p.body(tile);
    for (int v = thread; v < body.bytes() / 16; v += kPackThreads) {
      Vector<T, 8> out;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const Spot spot = spot_of(body, v * 8 + e);
        const int64_t at = spot.row < p.rows ? m.source.at(p.first + spot.row, spot.depth) : -1;
        out.element[e] = at < 0 ? from_compute<T>(0) : m.weight[at];
      }
      store_vector(reinterpret_cast<T*>(to) + v * 8, out);
    }
    to += body.bytes();
  }
}

template <class T>
__global__ void __launch_bounds__(kPackThreads)
    pack_layer_kernel(const Schedule s, const Layer w, int layer, unsigned char* packed) {
  const int block = blockIdx.x;
  const Kind kind = static_cast<Kind>(blockIdx.y);
  const auto element = [](const void* pointer) { return static_cast<const T*>(pointer); };
  unsigned char* to = packed + s.streams_at + block * s.stride + static_cast<int64_t>(layer) * s.layer_bytes(block);
  for (int k = 0; k < static_cast<int>(kind); ++k) to += s.in_stream(block, static_cast<Kind>(k));
  const Source source{kind, depth_of(kind, s.width, s.inner), columns_of(kind, s.width, s.inner), false};
  pack_product(s.product(block, kind), Matrix<T>{parameters_of<T>(kind, w), source}, to);
  if (block > 0 || (kind != Kind::kQkv && kind != Kind::kFc)) return;
  const int norm = 2 * layer + (kind == Kind::kFc ? 1 : 0);
  T* const gains = reinterpret_cast<T*>(packed + s.gains_at + s.gains_of(norm));
  const T* const from = element(kind == Kind::kFc ? w.ln_2_weight : w.ln_1_weight);
  for (int k = threadIdx.x; k < s.depth; k += kPackThreads) gains[k] = k < s.width ? from[k] : from_compute<T>(0);
}

template <class T>
__global__ void __launch_bounds__(kPackThreads)
    pack_logits_kernel(const Schedule s, const T* weight, const T* gain, const T* shift, unsigned char* packed) {
  const int block = blockIdx.x, group = static_cast<int>(blockIdx.y);
  if (group < s.logit_groups(block)) {
    const Matrix<T> matrix{{weight, nullptr, gain, shift}, {Kind::kQkv, s.width, s.vocab, true}};
    pack_product(s.logit_group(block, group), matrix,
                 packed + s.streams_at + block * s.stride + static_cast<int64_t>(s.layers) * s.layer_bytes(block) +
                     static_cast<int64_t>(group) * s.logit_group_bytes());
  }
  if (block > 0 || group > 0) return;
  if (threadIdx.x == 0) *label_of(s, packed) = label<T>(s);
  T* const gains = reinterpret_cast<T*>(packed + s.gains_at + s.gains_of(2 * s.layers));
  for (int k = threadIdx.x; k < s.depth; k += kPackThreads) gains[k] = k < s.width ? gain[k] : from_compute<T>(0);
}

template <class T>
void pack_all(const Args& a, const Schedule& s, void* stream) {
  unsigned char* const packed = static_cast<unsigned char*>(a.packed);
  const auto element = [](const void* pointer) { return static_cast<const T*>(pointer); };
  check(cudaMemsetAsync(packed, 0, s.gains_at, as_stream(stream)), "cudaMemsetAsync");  // state and messages
  for (int layer = 0; layer < s.layers; ++layer) {
    pack_layer_kernel<T>
        <<<dim3(s.blocks, kKinds), kPackThreads, 0, as_stream(stream)>>>(s, a.weights[layer], layer, packed);
    check_launch();
  }
  pack_logits_kernel<T><<<dim3(s.blocks, up(up(s.vocab, s.blocks), kLogitRows)), kPackThreads, 0, as_stream(stream)>>>(
      s, element(a.token_weight), element(a.ln_weight), element(a.ln_bias), packed);
  check_launch();
}

}  // namespace kf::KF_BACKEND::decode_step
