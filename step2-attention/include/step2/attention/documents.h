// Packed rows: documents one behind the other in one row, and which keys a query sees there (pages/packed.md).
//
// A tile that straddles two reads the keys from its first query's `begin` to its last one's `end`: no more than the two
// tiles that it stands for. Each row hides the others' keys. Neither number falls from a query to the next, nor do
// those of a key's queries: a tile's first and last row say which tiles it meets, and which of these need a mask.
#pragma once

#include <step2/attention/rows.h>

namespace kf::KF_BACKEND::attention {

// begin ≤ i < end: the keys that a query sees, or the queries that see a key; begin ≤ end.
struct Seen {
  int begin, end;
  __device__ operator KeyRange() const { return {begin, end}; }
};

// Slots for tiles of `rows` rows: a document's first one has slot start / rows + its number. So there are enough up to
// the next document's, and one too many at the most; and whose a slot is a search tells, without adding up lengths.
__host__ __device__ inline int64_t slots_of(const Args& a, int64_t length, int rows) {
  return length / rows + a.documents;
}

// Starts that the host could not check are cut at the row's ends, so that nothing is read beyond them.
struct Documents {
  const Args& a;

  __device__ explicit Documents(const Args& args) : a(args) {}

  // Keys that `query` sees; without a mask all of its document. The last query of one sees all, each before it one
  // less.
  __device__ Seen keys_of(int query) const { return keys_of(query, a.causal); }
  __device__ Seen keys_of(int query, bool causal) const {
    const int document = find(a.cu_seqlens, query), begin = key_start(document);
    int end = key_start(document + 1);
    if (causal) end -= max(start(document + 1) - 1 - query, 0);
    return {begin, max(begin, end)};
  }

  // All of a document's. Where starts fall it may end before it begins.
  __device__ Seen queries_in(int document) const { return {start(document), start(document + 1)}; }
  __device__ Seen keys_in(int document) const { return {key_start(document), key_start(document + 1)}; }

  // Queries that see `key`.
  __device__ Seen queries_of(int key) const {
    const int document = find(a.cu_seqlens_k, key), end = start(document + 1);
    int begin = start(document);
    if (a.causal) begin = max(begin, end - max(key_start(document + 1) - key, 0));
    return {min(begin, end), end};
  }

  // Whose slot this is.
  __device__ int of_query_slot(int slot, int rows) const {
    return last([&](int document) { return start(document) / rows + document <= slot; });
  }
  __device__ int of_key_slot(int slot, int rows) const {
    return last([&](int document) { return key_start(document) / rows + document <= slot; });
  }

 private:
  // The last document for which `begun(document)` is true, as it is for those before it; or the first one.
  template <class Begun>
  __device__ int last(const Begun& begun) const {
    int low = 0;
    for (int high = static_cast<int>(a.documents); high - low > 1;) {
      const int middle = (low + high) / 2;
      (begun(middle) ? low : high) = middle;
    }
    return low;
  }

  __device__ static int cut(int start, int64_t length) { return min(max(start, 0), static_cast<int>(length)); }
  __device__ int start(int document) const { return cut(a.cu_seqlens[document], a.q_length); }
  __device__ int key_start(int document) const { return cut(a.cu_seqlens_k[document], a.k_length); }

  // The last document that begins at `position` or before it: those before it that do, too, end there or are empty.
  __device__ int find(const int32_t* first, int position) const {
    return last([&](int document) { return first[document] <= position; });
  }
};

}  // namespace kf::KF_BACKEND::attention
