// What the rungs share: where a row's new token stands, and where its keys lie.
#pragma once

#include <cuda_runtime.h>
#include <kf/numeric.h>

#include <cstdint>

#include "rungs.h"

namespace kf::KF_BACKEND::decode_step {

using kf::decode_step::CacheStrides;
using kf::decode_step::kMostRows;
using kf::decode_step::Layer;

// Of q, k, v and attention's output; `width`, if the model is whole.
__host__ __device__ inline int64_t own_width(const Args& a) { return a.heads * a.head_dim; }

// Of a row's new token: its slot, or −1 where there is none, or no position for it.
struct Place {
  int begin, slot;

  // `end` is read as volatile: in one launch another block may have raised it for the next token.
  __device__ Place(const Args& a, int row)
      : begin(a.begin[row]), slot(*static_cast<const volatile int32_t*>(a.end + row)) {
    const bool exists = begin >= 0 && begin <= slot && slot < a.capacity && slot - begin < a.positions;
    if (exists) return;
    begin = 0;
    slot = -1;
  }
  // How many tokens came before.
  __device__ int before() const { return slot < 0 ? 0 : slot - begin; }
};

// Of a row and a head: slot `slot`.
template <class T>
__device__ __forceinline__ T* in_cache(void* cache, const CacheStrides& stride, int layer, int row, int head,
                                       int slot) {
  return static_cast<T*>(cache) + layer * stride.layer + row * stride.batch + head * stride.head + slot * stride.slot;
}

// The embedding's look-up: where rows of the two tables begin, or nowhere.
template <class T>
struct Tokens {
  const T *token = nullptr, *position = nullptr;

  __device__ Tokens(const Args& a, int row) : Tokens(a, Place(a, row), a.ids[row]) {}
  __device__ Tokens(const Args& a, const Place& place, int64_t id) {
    if (place.slot < 0 || id < 0 || id >= a.vocab) return;
    token = static_cast<const T*>(a.token_weight) + id * a.width;
    position = static_cast<const T*>(a.position_weight) + place.before() * a.width;
  }
  __device__ bool exists() const { return token != nullptr; }
  // What is added up, of one that exists.
  struct Parts {
    T of_token, of_position;
    __device__ compute_t<T> sum() const { return to_compute(of_token) + to_compute(of_position); }
  };
  __device__ Parts parts(int64_t column) const { return {token[column], position[column]}; }
  __device__ compute_t<T> at(int64_t column) const { return exists() ? parts(column).sum() : compute_t<T>(NAN); }
};

}  // namespace kf::KF_BACKEND::decode_step
