// A warp's 16 queries against 16 keys at a time, from global memory straight into the registers that mma reads.
//
// A product adds over its inner index, and in which order that index is numbered does not matter, if both factors
// agree. mma wants lane (g, t) = (lane / 4, lane % 4) to hold inner elements 2t, 2t + 1, 2t + 8, 2t + 9 of 16. So
// number the columns anew: a lane loads eight neighbours of its key, 16 bytes, and these are its four elements of two
// products.
//
//   scores   lane (g, t) loads of key g and key g + 8 the columns 8t to 8t + 7 of each 32: four lanes, 64 bytes
//   values   the inner index are the keys; lane (g, t) loads of keys 2t, 2t + 1, 2t + 8, 2t + 9 the columns 8g to
//            8g + 7 of each 64, and pairs two keys' values of a column: eight lanes, 128 bytes
//
// So no shared memory is needed, no ldmatrix and no barrier, and what one lane loads it also uses. The weights come out
// of the first product just where the second wants them.
#pragma once

#include <step1/vector.h>
#include <step2/attention_decode/parts.h>
#include <step2/mma.h>
#include <step2/online_softmax.h>
#include <step2/reduce.h>

namespace kf::KF_BACKEND::attention_decode {

constexpr int kRows = 16;  // of a product: queries of the heads that share their keys
constexpr int kKeys = 16;  // that a warp takes at once
constexpr int kWarps = 8;  // of a block

// ---- who has which rows and keys ----

// How heads share keys. The kernels get it from the host: a division takes a GPU longer than a step of 16 keys.
struct Sharing {
  int heads;  // of q that share a kv head
  int rows;   // queries of all of them
  int tiles;  // of 16 rows

  explicit Sharing(const Args& a)
      : heads(static_cast<int>(a.heads / a.kv_heads)),
        rows(static_cast<int>(heads * a.q_length)),
        tiles(static_cast<int>(ceil_div(rows, kRows))) {}
};

// As many blocks for each tile of rows as share its keys; neighbours in x.
inline dim3 grid_for(const Args& a, int splits) {
  return dim3(Sharing(a).tiles * splits, static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(a.batch));
}

// Up to 16 rows of a kv head, and one of `splits` shares of its keys, which begins at a multiple of 16.
struct Group {
  unsigned batch;
  unsigned kv_head;
  unsigned first_head;  // of the heads of q
  int first_row;        // of those that share the keys
  int rows;
  int begin, end;   // the keys that exist
  int first, last;  // this share: from key `first` to before key `last`

  __device__ Group(const Args& a, const Sharing& sharing, int tile, int split, int splits)
      : batch(blockIdx.z), kv_head(blockIdx.y), first_head(kv_head * sharing.heads), first_row(tile * kRows) {
    rows = min(kRows, sharing.rows - first_row);
    const int most = static_cast<int>(a.k_length);
    begin = a.key_begin == nullptr ? 0 : min(max(a.key_begin[batch], 0), most);
    end = max(a.key_end == nullptr ? most : min(a.key_end[batch], most), begin);
    const int steps = (end + kKeys - 1) / kKeys - begin / kKeys;
    const int share = (steps + splits - 1) / splits;
    first = (begin / kKeys + split * share) * kKeys;
    last = min(first + share * kKeys, end);
  }

  // Row `row` of these: its head and query. One query a head, the usual case, needs no division.
  __device__ __forceinline__ QueryRow query_row(const Args& a, int row) const {
    const unsigned queries = static_cast<unsigned>(a.q_length), of_keys = first_row + row;
    const unsigned head = queries == 1 ? of_keys : of_keys / queries;
    return {batch, first_head + head, of_keys - head * queries};
  }
};

// What a lane holds of the keys and values of one step. kColumns is 64 or 128; what lies beyond head_dim is 0.
template <int kColumns>
struct Tile {
  static constexpr int kChunks = kColumns / 32, kPieces = kColumns / 64;
  static constexpr int kVectors = 2 * kChunks + 4 * kPieces;

  Vector<uint32_t, 4> vector[kVectors];

  __device__ static constexpr int k_at(int n, int c) { return n * kChunks + c; }
  __device__ static constexpr int v_at(int i, int p) { return 2 * kChunks + i * kPieces + p; }
  __device__ const Vector<uint32_t, 4>& k(int n, int c) const { return vector[k_at(n, c)]; }
  __device__ const Vector<uint32_t, 4>& v(int i, int p) const { return vector[v_at(i, p)]; }
};

// Where lane (g, t) finds its columns: of key g for the scores, of key 2t for the values.
template <class T>
struct Lane {
  const T* k;
  const T* v;

  __device__ Lane(const Args& a, int64_t page, unsigned kv_head) {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    k = static_cast<const T*>(a.k) + page * a.k_stride.batch + kv_head * a.k_stride.head + g * a.k_stride.seq + t * 8;
    v = static_cast<const T*>(a.v) + page * a.v_stride.batch + kv_head * a.v_stride.head + 2 * t * a.v_stride.seq +
        g * 8;
  }

  // Calls f(index in a Tile, where it is, whether it is wanted) for each 16 bytes that this lane needs of the 16 keys
  // from row `row` on, of which those from `begin` to before `end` are wanted, counted from the first. The others must
  // be 0: a weight of 0 would not make 0 of what may lie there.
  template <int kColumns, class F>
  __device__ __forceinline__ void each(const Args& a, int64_t row, int begin, int end, F f) const {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    const auto one = [&](int index, const T* from, int key, int column) {
      f(index, reinterpret_cast<const uint32_t*>(from), key >= begin && key < end && column < a.head_dim);
    };
    const T* k_row = k + row * a.k_stride.seq;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      for (int c = 0; c < kColumns / 32; ++c)
        one(Tile<kColumns>::k_at(n, c), k_row + n * 8 * a.k_stride.seq + c * 32, n * 8 + g, c * 32 + t * 8);
    }
    const T* v_row = v + row * a.v_stride.seq;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = i / 2 * 8 + i % 2;  // after the lane's first
      for (int p = 0; p < kColumns / 64; ++p)
        one(Tile<kColumns>::v_at(i, p), v_row + key * a.v_stride.seq + p * 64, key + 2 * t, p * 64 + g * 8);
    }
  }
};

// ---- a warp's work ----

// A row's part in shared memory. Four more floats than columns: rows begin in different banks, and at 16 bytes.
template <int kColumns>
struct alignas(16) RowPart {
  float out[kColumns];
  float max, sum, unused[2];

  __device__ Part<float> at(int column) const { return {max, sum, out[column]}; }
};

// 16 rows of a warp: queries, online softmax, output. Lane (g, t) holds of rows g and g + 8 what mma gave it.
template <int kColumns, class T>
struct Attending {
  Vector<uint32_t, 4> q[2][kColumns / 32] = {};
  int end[2];  // keys before this one are seen
  // Scores are powers of 2 here, times log₂e. The sum is of this lane's columns.
  float max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  float out[kColumns / 64][8][4] = {};  // [e][j]: row g + 8·(j / 2), column 8·(2t + j % 2) + e of each 64

  __device__ Attending(const Args& a, const Group& group) {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      end[r] = 0;
      if (g + 8 * r >= group.rows) continue;
      const QueryRow query_row = group.query_row(a, g + 8 * r);
      end[r] = group.end - (static_cast<int>(a.q_length) - 1 - static_cast<int>(query_row.query));
      const T* from = static_cast<const T*>(a.q) + query_row.offset(a.q_stride) + t * 8;
      for (int c = 0; c < kColumns / 32; ++c) {
        if (c * 32 + t * 8 < a.head_dim) q[r][c] = load_vector<4>(reinterpret_cast<const uint32_t*>(from + c * 32));
      }
    }
  }

  // Takes in the keys `first` to `first` + 15; those before `begin` do not exist.
  __device__ __forceinline__ void take(const Tile<kColumns>& tile, float scale_log2, int first, int begin) {
    const int t = threadIdx.x % 4;
    float score[2][4] = {};
#pragma unroll
    for (int c = 0; c < kColumns / 32; ++c) {
      for (int h = 0; h < 4; h += 2) {  // two products of 16 columns each
        const uint32_t rows[4] = {q[0][c].element[h], q[1][c].element[h], q[0][c].element[h + 1],
                                  q[1][c].element[h + 1]};
        for (int n = 0; n < 2; ++n) {
          mma_m16n8k16<T>(score[n], rows, {tile.k(n, c).element[h], tile.k(n, c).element[h + 1]});
        }
      }
    }

    float highest[2] = {max[0], max[1]};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      for (int e = 0; e < 4; ++e) {
        const int key = first + n * 8 + t * 2 + e % 2;
        score[n][e] = key >= begin && key < end[e / 2] ? score[n][e] * scale_log2 : -INFINITY;
        highest[e / 2] = greater_of(highest[e / 2], score[n][e]);
      }
    }
    float factor[2];
    uint32_t weights[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float now = quad_max(highest[r]);
      const float base = now == -INFINITY ? 0.0f : now;  // nothing seen yet: −inf − (−inf) would be NaN
      factor[r] = exp2_approx(max[r] - base);
      max[r] = now;
      sum[r] *= factor[r];
      for (int n = 0; n < 2; ++n) {
        const float low = exp2_approx(score[n][2 * r] - base), high = exp2_approx(score[n][2 * r + 1] - base);
        sum[r] += low + high;
        weights[n * 2 + r] = pack<T>(low, high);
      }
    }

#pragma unroll
    for (int p = 0; p < kColumns / 64; ++p) {
      for (int e = 0; e < 8; ++e) {
        for (int j = 0; j < 4; ++j) out[p][e][j] *= factor[j / 2];
        // The e-th column of two keys side by side: the lower halves of two registers, or the upper ones.
        const unsigned halves = e % 2 == 0 ? 0x5410 : 0x7632;
        const auto pair = [&](int i) {
          return __byte_perm(tile.v(i, p).element[e / 2], tile.v(i + 1, p).element[e / 2], halves);
        };
        mma_m16n8k16<T>(out[p][e], weights, {pair(0), pair(2)});
      }
    }
  }

  // Leaves the rows' parts for the block's other threads.
  __device__ __forceinline__ void leave(RowPart<kColumns>* part) const {
    const int g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      RowPart<kColumns>& row = part[g + 8 * r];
      const float whole = quad_sum(sum[r]);
      if (t == 0) {
        row.max = max[r];
        row.sum = whole;
      }
#pragma unroll
      for (int p = 0; p < kColumns / 64; ++p) {
        for (int j = 0; j < 2; ++j) {
          for (int e = 0; e < 8; e += 4) {
            store_vector(&row.out[p * 64 + (2 * t + j) * 8 + e],
                         Vector<float, 4>{{out[p][e][2 * r + j], out[p][e + 1][2 * r + j], out[p][e + 2][2 * r + j],
                                           out[p][e + 3][2 * r + j]}});
          }
        }
      }
    }
  }
};

// Why a rung with these fragments cannot do this; "" if it can.
inline std::string in_fragments(const Args& a) {
  if (a.dtype == DType::kFloat32) return "takes float16 or bfloat16, got float32";
  if (a.dtype == DType::kFloat64) return "takes float16 or bfloat16, got float64";
  if (a.head_dim % 8 != 0 || a.head_dim > 128) {
    return "takes head_dim that is a multiple of 8 up to 128, got " + std::to_string(a.head_dim);
  }
  if (!rows_are_aligned(a)) return "takes rows that begin at multiples of 16 bytes";
  if (a.k_length > 1 << 30) return "takes at most 1073741824 keys, got " + std::to_string(a.k_length);
  if (a.batch > 65535) return "takes at most 65535 batches, got " + std::to_string(a.batch);
  if (a.heads > 65535) return "takes at most 65535 heads, got " + std::to_string(a.heads);
  if (compute_capability() < 80) return "needs a GPU of compute capability 8.0 or newer";
  return "";
}

}  // namespace kf::KF_BACKEND::attention_decode
