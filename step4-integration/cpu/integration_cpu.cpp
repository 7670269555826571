// The same ops in plain C++: what each kernel must compute, written as the loop it replaces.
#include "cpu/integration_cpu.h"

#include <kf/cpu.h>
#include <step1/rows_cpu.h>

#include <algorithm>

namespace kf::cpu {
namespace {

// Rows in functions of their own: their pointers cannot overlap, nor point to `width`, and so the loops are vectorised.

template <class T>
void add_row(const T* __restrict__ t, const T* __restrict__ p, T* __restrict__ y, int64_t width) {
  using C = compute_t<T>;
  for (int64_t c = 0; c < width; ++c) y[c] = static_cast<T>(static_cast<C>(t[c]) + static_cast<C>(p[c]));
}

template <class T>
void copy_row(const T* __restrict__ from, T* __restrict__ to, int64_t width) {
  for (int64_t c = 0; c < width; ++c) to[c] = from[c];
}

template <class T, class Id>
void embed(const kf::embedding::Args& a) {
  const Id* ids = static_cast<const Id*>(a.ids);
  const T* token = static_cast<const T*>(a.token);
  const T* position = static_cast<const T*>(a.position_weight);
  for_rows(a.batch * a.length, a.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {  // the host has checked that each id, and each position, has its row
      const int64_t first = a.position + (a.positions == nullptr ? 0 : a.positions[row / a.length]);
      add_row(token + static_cast<int64_t>(ids[row]) * a.width,
              position + std::max(int64_t{0}, first + row % a.length) * a.width, static_cast<T*>(a.y) + row * a.width,
              a.width);
    }
  });
}

template <class T>
void append(const kf::kv_append::Args& a, const void* from, const kf::kv_append::Strides& from_strides, void* to,
            const kf::kv_append::Strides& to_strides) {
  for_rows(a.batch * a.heads, a.length * a.head_dim, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i % a.heads;
      const int64_t batch = i / a.heads;
      const T* source = static_cast<const T*>(from) + batch * from_strides.batch + head * from_strides.head;
      T* target = static_cast<T*>(to) + batch * to_strides.batch + head * to_strides.head;
      const int64_t first = a.position + (a.positions == nullptr ? 0 : a.positions[batch]);
      for (int64_t token = 0; token < a.length; ++token) {
        copy_row(source + token * from_strides.seq, target + (first + token) * to_strides.seq, a.head_dim);
      }
    }
  });
}

}  // namespace

void embedding(const kf::embedding::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    a.ids_64 ? embed<T, int64_t>(a) : embed<T, int32_t>(a);
  });
}

void kv_append(const kf::kv_append::Args& a) {
  with_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    append<T>(a, a.k, a.k_strides, a.k_cache, a.k_cache_strides);
    append<T>(a, a.v, a.v_strides, a.v_cache, a.v_cache_strides);
  });
}

}  // namespace kf::cpu
