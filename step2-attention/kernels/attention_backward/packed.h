// Packed rows, for the rungs that take them: which queries see a key (step2/attention/documents.h), and, in v7 and v8,
// the tiles that each document has of its own, as in attention's v8 (../attention/schedule.h).
#pragma once

#include <step2/attention/documents.h>

#include "pairs.h"

namespace kf::KF_BACKEND::attention_backward {

using attention::Documents;
using attention::Seen;
using attention::slots_of;

// For rungs that ask of a packed row what others ask of any.
inline Args without_documents(Args a) {
  a.cu_seqlens = nullptr;
  return a;
}

// A head's rows of a packed row. Its batch is 1: a division by the number of heads would be a call.
template <class T>
__device__ Rows<T> rows_of_packed(void* tensor, const Strides& stride, int head) {
  return {static_cast<T*>(tensor) + head * stride.head, stride.seq};
}

// A document's queries in tiles of 64, and its keys in tiles of 128.
struct DocumentTiles {
  static constexpr int kQueries = 64, kKeys = 128;
  Seen queries, keys;          // that exist
  int first_query, first_key;  // where its first tiles begin
  int query_slot, key_slot;    // of its first tiles
  int query_tiles, key_tiles;
  bool causal;

  __device__ DocumentTiles(const Args& a, int document)
      : queries(Documents(a).queries_in(document)), keys(Documents(a).keys_in(document)), causal(a.causal) {
    // Dropout draws numbers for 16 rows at a time, counted from the row's beginning.
    const int aligned = a.threshold == 0 ? 1 : 16;
    first_query = queries.begin / aligned * aligned;
    first_key = keys.begin / aligned * aligned;
    query_slot = first_query / kQueries + document;
    key_slot = first_key / kKeys + document;
    query_tiles = queries.begin < queries.end ? (queries.end - first_query + kQueries - 1) / kQueries : 0;
    key_tiles = keys.begin < keys.end ? (keys.end - first_key + kKeys - 1) / kKeys : 0;
  }

  __device__ static DocumentTiles of_query_slot(const Args& a, int slot) {
    return {a, Documents(a).of_query_slot(slot, kQueries)};
  }

  // How many of its tiles of queries see a key of tile `number`: the last ones, and no more than see the tile before.
  __device__ int seeing(int number) const {
    const int key = max(first_key + number * kKeys, keys.begin);
    const int query = causal ? max(queries.begin, key - keys.end + queries.end) : queries.begin;
    return max(query_tiles - (query - first_query) / kQueries, 0);
  }

  // About the work that its tiles of keys from `number` on are: what begins later has less left. By this order equal
  // documents take turns, and of two tiles of one the later waits less for the earlier than by their own work.
  __device__ int64_t left(int number) const { return int64_t{key_tiles - number} * seeing(number); }

  // How many of its tiles of keys have at least so much left.
  __device__ int with_left(int64_t work) const {
    int low = 0;
    for (int high = key_tiles; low < high;) {
      const int middle = (low + high) / 2;
      const bool more = left(middle) >= work;
      (more ? low : high) = more ? middle + 1 : middle;
    }
    return low;
  }
};

// Calls f(std::true_type{}) if the row is packed, f(std::false_type{}) otherwise: kernels are compiled for each.
template <class F>
void with_packing(const Args& a, F&& f) {
  if (a.cu_seqlens != nullptr) return f(std::true_type{});
  f(std::false_type{});
}

}  // namespace kf::KF_BACKEND::attention_backward
