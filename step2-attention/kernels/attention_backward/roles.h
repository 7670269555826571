// From v2 on a block owns rows of queries and walks over keys, or owns rows of keys and walks over queries.
#pragma once

#include <kf/launch.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "packed.h"
#include "pairs.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_backward {

// Neighbouring rows, begin ≤ i < end.
using Range = KeyRange;

// A block owns rows a and b, walks over rows x and y, and writes rows da and, if it owns keys, db:
//
//                  a      b      x      y      da     db
//    owns queries  q      grad   k      v      dq
//    owns keys     k      v      q      grad   dk     dv
template <bool kOwnsKeys, class T>
struct Role {
  const Args& args;
  int64_t head;   // whose rows the block owns: of q or of k and v, of all batches
  int64_t first;  // row that it owns
  int64_t group;  // heads of q that share keys
  KeyRange keys;  // that exist in its batch
  Range exist;    // of the rows that it owns
  Range walked;   // the rows that any of them is paired with

  // Block `block` of those that own `count` rows each.
  __device__ Role(const Args& a, int64_t block, int64_t count) : args(a), group(a.heads / a.kv_heads) {
    const int64_t tiles = ceil_div(length(a), count);
    head = block / tiles, first = block % tiles * count;
    keys = keys_of(a, kOwnsKeys ? head * group : head);
    exist = {first, min(first + count, length(a))};
    if constexpr (kOwnsKeys) exist = {max(first, keys.begin), min(exist.end, keys.end)};
    walked = {0, 0};
    if (exist.begin >= exist.end) return;
    // Of the first key, or of the last query: these see the most.
    if constexpr (kOwnsKeys) walked = partners_of(exist.begin);
    if constexpr (!kOwnsKeys) walked = partners_of(exist.end - 1);
  }

  // How many rows of the kind that it owns a head has, and how many heads there are.
  static __host__ __device__ int64_t length(const Args& a) { return kOwnsKeys ? a.k_length : a.q_length; }
  static int64_t heads(const Args& a) { return a.batch * (kOwnsKeys ? a.kv_heads : a.heads); }

  __device__ bool exists(int64_t row) const { return row >= exist.begin && row < exist.end; }

  // The rows that a row of its own is paired with: a query with the keys that it sees, a key with the queries that see
  // it.
  __device__ Range partners_of(int64_t row) const {
    if (!exists(row)) return {0, 0};
    return kOwnsKeys ? Range{first_to_see(args, row), args.q_length} : keys_seen(args, keys, row);
  }

  // Its head as TMA names it.
  __device__ int batch() const { return static_cast<int>(head / (kOwnsKeys ? args.kv_heads : args.heads)); }
  __device__ int head_of_batch() const { return static_cast<int>(head % (kOwnsKeys ? args.kv_heads : args.heads)); }

  // Heads of q: the one that it owns, or all that read its keys, to be walked over in this order.
  __device__ int64_t first_head() const { return kOwnsKeys ? head * group : head; }
  __device__ int64_t end_head() const { return kOwnsKeys ? (head + 1) * group : head + 1; }

  __device__ Rows<const T> a() const { return kOwnsKeys ? k() : q(head); }
  __device__ Rows<const T> b() const { return kOwnsKeys ? v() : grad(head); }
  __device__ Rows<const T> x(int64_t q_head) const { return kOwnsKeys ? q(q_head) : k(); }
  __device__ Rows<const T> y(int64_t q_head) const { return kOwnsKeys ? grad(q_head) : v(); }
  __device__ Rows<T> da() const {
    return kOwnsKeys ? rows_of<T>(args.dk, args.dk_stride, head, args.kv_heads)
                     : rows_of<T>(args.dq, args.dq_stride, head, args.heads);
  }
  __device__ Rows<T> db() const { return rows_of<T>(args.dv, args.dv_stride, head, args.kv_heads); }

 private:
  __device__ int64_t kv_head() const { return kOwnsKeys ? head : head / group; }
  __device__ Rows<const T> q(int64_t of) const { return rows_of<const T>(args.q, args.q_stride, of, args.heads); }
  __device__ Rows<const T> grad(int64_t of) const {
    return rows_of<const T>(args.grad, args.grad_stride, of, args.heads);
  }
  __device__ Rows<const T> k() const { return rows_of<const T>(args.k, args.k_stride, kv_head(), args.kv_heads); }
  __device__ Rows<const T> v() const { return rows_of<const T>(args.v, args.v_stride, kv_head(), args.kv_heads); }
};

// Role of a packed row: it walks from the partners of its first row to those of its last.
template <bool kOwnsKeys, class T>
struct PackedRole : Role<kOwnsKeys, T> {
  __device__ PackedRole(const Args& a, int64_t block, int64_t count) : Role<kOwnsKeys, T>(a, block, count) {
    const Range& exist = this->exist;
    this->walked = {partners_of(exist.begin).begin, partners_of(exist.end - 1).end};
  }

  __device__ Range partners_of(int64_t row) const {
    if (!this->exists(row)) return {0, 0};
    const Documents documents(this->args);
    const int own = static_cast<int>(row);
    const Seen partners = kOwnsKeys ? documents.queries_of(own) : documents.keys_of(own);
    return {partners.begin, partners.end};
  }
};

// How many blocks there are that own `rows` rows each.
template <bool kOwnsKeys>
int64_t blocks_of(const Args& a, int64_t rows) {
  return Role<kOwnsKeys, float>::heads(a) * ceil_div(Role<kOwnsKeys, float>::length(a), rows);
}

// Why a rung of which a block owns `rows` rows cannot do this; "" if it can.
inline std::string at_most_blocks(const Args& a, int64_t rows) {
  const int64_t blocks = std::max(blocks_of<false>(a, rows), blocks_of<true>(a, rows));
  if (blocks <= INT32_MAX) return "";
  return "takes at most 2147483647 blocks of " + std::to_string(rows) + " rows, got " + std::to_string(blocks);
}

}  // namespace kf::KF_BACKEND::attention_backward
