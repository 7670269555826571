// What the products on tensor cores have in common: what goes in, and how rows come out.
#pragma once

#include <kf/launch.h>
#include <step1/vector.h>
#include <step2/wgmma.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace kf::KF_BACKEND {

// out[rows, width] = a · b + bias. a and b are contiguous, a is [rows, depth] or, Major::kMN, [depth, rows], b is
// [width, depth] or, Major::kMN, [depth, width]; bias is [width], or null.
struct Product {
  const void *a, *b, *bias;
  int64_t rows, depth, width;
};

// x · weight + bias of the arguments of an op around a layer, and how its weight lies.
template <class Args>
Product product_of(const Args& a) {
  return {a.x, a.weight, a.bias, a.rows, a.depth, a.width};
}
template <class Args>
Major major_of_weight(const Args& a) {
  return a.weight_transposed ? Major::kK : Major::kMN;
}

// Why a and b cannot be loaded in pieces of 16 bytes, or "".
inline std::string can_implement_operands(const Product& p, Major a, Major b, DType dtype) {
  const int64_t multiple = 16 / size_of(dtype);
  const auto not_a_multiple = [&](const std::string& what, int64_t size) {
    return "takes " + what + " that is a multiple of " + std::to_string(multiple) + ", got " + std::to_string(size);
  };
  const int64_t of_a = a == Major::kK ? p.depth : p.rows, of_b = b == Major::kK ? p.depth : p.width;
  if (of_a % multiple != 0) return not_a_multiple(a == Major::kK ? "a depth" : "a number of rows", of_a);
  if (of_b % multiple != 0) return not_a_multiple(b == Major::kK ? "a depth" : "a width", of_b);
  if (!aligned_16(p.a, p.b)) return "takes x and weight that begin at multiples of 16 bytes";
  return "";
}

// Calls f with the Major of a weight, as a constant: it lies [depth, width], or, transposed, [width, depth].
template <class F>
void with_major_of_weight(bool transposed, F&& f) {
  if (transposed) return f(std::integral_constant<Major, Major::kK>{});
  f(std::integral_constant<Major, Major::kMN>{});
}

// A store of 16 bytes that stays one. Where elements are stored one by one in another branch, nvcc takes the two
// together, and then none is of 16 bytes. PTX: st.global.v4
template <class V>
__device__ __forceinline__ void store_16_bytes(void* to, const V& vector) {
  static_assert(sizeof(V) == 16, "16 bytes");
  const auto& bits = reinterpret_cast<const int4&>(vector);
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
}

// Eight neighbours as they lie in memory, in words. As elements nvcc would take them apart where they are loaded, and
// so have the program wait for them there.
template <class T>
struct alignas(Vector<T, 8>) Packed {
  static constexpr int kWords = 8 * sizeof(T) / sizeof(uint32_t);
  uint32_t word[kWords] = {};

  __device__ __forceinline__ void set(int j, T element) {
    if constexpr (sizeof(T) == 2) {
      word[j / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(element)) << (j % 2 * 16);
    } else {
      constexpr int kEach = sizeof(T) / sizeof(uint32_t);
#pragma unroll
      for (int i = 0; i < kEach; ++i) word[j * kEach + i] = reinterpret_cast<const uint32_t*>(&element)[i];
    }
  }
};

template <class T>
__device__ __forceinline__ Packed<T> load_packed(const T* from) {
  Packed<T> eight;
#pragma unroll
  for (int i = 0; i < Packed<T>::kWords; i += 4) {
    const auto four = load_vector<4>(reinterpret_cast<const uint32_t*>(from) + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) eight.word[i + j] = four.element[j];
  }
  return eight;
}

template <class T>
__device__ __forceinline__ void widen(const Packed<T>& eight, compute_t<T> (&value)[8]) {
  widen(reinterpret_cast<const Vector<T, 8>&>(eight), value);
}

template <class T>
__device__ __forceinline__ Packed<T> packed(const compute_t<T> (&value)[8]) {
  Packed<T> eight;
  reinterpret_cast<Vector<T, 8>&>(eight) = narrow<T>(value);
  return eight;
}

// a + b, rounded once. Half types two at a time, as they are: a quarter of the instructions.
template <class T>
__device__ __forceinline__ Packed<T> sum_of(const Packed<T>& a, const Packed<T>& b) {
  Packed<T> sum;
  const auto add = [&](auto pair) {
    using Pair = decltype(pair);
#pragma unroll
    for (int i = 0; i < Packed<T>::kWords; ++i) {
      pair = __hadd2(reinterpret_cast<const Pair&>(a.word[i]), reinterpret_cast<const Pair&>(b.word[i]));
      sum.word[i] = reinterpret_cast<const uint32_t&>(pair);
    }
  };
  if constexpr (std::is_same_v<T, __half>) {
    add(__half2{});
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    add(__nv_bfloat162{});
  } else {
    compute_t<T> x[8], y[8];
    widen(a, x);
    widen(b, y);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] += y[j];
    sum = packed<T>(x);
  }
  return sum;
}

template <class T>
__device__ __forceinline__ void store_packed(T* to, const Packed<T>& eight) {
#pragma unroll
  for (int i = 0; i < Packed<T>::kWords; i += 4) {
    const uint32_t (&w)[Packed<T>::kWords] = eight.word;
    store_vector<4>(reinterpret_cast<uint32_t*>(to) + i, Vector<uint32_t, 4>{{w[i], w[i + 1], w[i + 2], w[i + 3]}});
  }
}

// A matrix that is written, or read, eight neighbours at a time, or one by one where vectors must not be: a width that
// is no multiple of 8, or an address that is none of 16 bytes.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t rows = 0, width = 0;
  bool vectors = false;

  Rows() = default;
  Rows(const void* matrix, int64_t rows, int64_t width)  // read, or written by whoever may
      : data(static_cast<T*>(const_cast<void*>(matrix))),
        rows(rows),
        width(width),
        vectors(width % 8 == 0 && aligned_16(matrix)) {}

  __device__ __forceinline__ bool has(int64_t row, int64_t column) const { return row < rows && column < width; }
  // What lies beyond the width is 0.
  __device__ __forceinline__ Packed<T> load(int64_t row, int64_t column) const {
    const T* const from = data + row * width + column;
    Packed<T> eight;
    if (vectors) {
      eight = load_packed(from);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (column + j < width) eight.set(j, from[j]);
      }
    }
    return eight;
  }
  __device__ __forceinline__ void store(int64_t row, int64_t column, const Packed<T>& eight) const {
    T* const to = data + row * width + column;
    if (vectors) {
#pragma unroll
      for (int i = 0; i < Packed<T>::kWords; i += 4) {
        const uint32_t (&w)[Packed<T>::kWords] = eight.word;
        store_16_bytes(reinterpret_cast<uint32_t*>(to) + i, Vector<uint32_t, 4>{{w[i], w[i + 1], w[i + 2], w[i + 3]}});
      }
    } else {
      const auto& element = reinterpret_cast<const Vector<T, 8>&>(eight).element;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (column + j < width) to[j] = element[j];
      }
    }
  }
};

// What an epilogue has to do with memory. It is called as epilogue(row, column, value, other) for eight neighbours of a
// row, which are packed. `value`: the product's sums with the bias; what it leaves there goes to `out`. `other`: what
// stands in `read`, if it reads; what it leaves there goes to `written`, if it writes.
template <class T, bool kReadsOther, bool kWritesOther>
struct Epilogue {
  static constexpr bool kReads = kReadsOther, kWrites = kWritesOther;
  Rows<T> out, read, written;
};

// This one: the product as it is.
template <class T>
struct Store : Epilogue<T, false, false> {
  explicit Store(const Rows<T>& out) : Epilogue<T, false, false>{out, {}, {}} {}
  __device__ __forceinline__ void operator()(int64_t, int64_t, Packed<T>&, Packed<T>&) const {}
};

// What it reads: to be asked for before the product is ready. Nothing beyond the last row or column.
template <class T, bool kReads, bool kWrites>
__device__ __forceinline__ Packed<T> read_ahead(const Epilogue<T, kReads, kWrites>& e, int64_t row, int64_t column) {
  return kReads && e.out.has(row, column) ? e.read.load(row, column) : Packed<T>{};
}

// The epilogue of eight neighbours, and to memory with them. Nothing happens beyond the last row or column.
template <class T, class E>
__device__ __forceinline__ void apply_epilogue(const E& epilogue, int64_t row, int64_t column, Packed<T> value,
                                               Packed<T> ahead) {
  if (!epilogue.out.has(row, column)) return;
  epilogue(row, column, value, ahead);
  epilogue.out.store(row, column, value);
  if constexpr (E::kWrites) epilogue.written.store(row, column, ahead);
}

}  // namespace kf::KF_BACKEND
