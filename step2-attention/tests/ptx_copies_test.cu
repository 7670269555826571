// Asynchronous copies and what waits for them: cp.async, mbarriers, bulk copies, TMA.
#include <step2/cp_async.h>
#include <step2/mbarrier.h>
#include <step2/tensor_map.h>
#include <step2/tma.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "ptx_test.h"

namespace kf::KF_BACKEND {
namespace {

// ---- cp.async ----

__global__ void cp_async_kernel(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t tile[32 * 4 * 4];
  const int i = threadIdx.x;
  cp_async_16(tile + 4 * i, in + 4 * i);
  cp_async_commit();
  cp_async_16(tile + 128 + 4 * i, in + 128 + 4 * i, i % 17);  // 0 to 16 bytes
  cp_async_commit();
  cp_async_small<4>(tile + 256 + i, in + 256 + i);
  cp_async_small<8>(tile + 320 + 2 * i, in + 320 + 2 * i);
  cp_async_commit();
  cp_async_wait<2>();
  __syncthreads();
  for (int j = 0; j < 4; ++j) out[32 * j + i] = tile[32 * j + i];
  cp_async_wait<0>();
  __syncthreads();
  for (int j = 4; j < 16; ++j) out[32 * j + i] = j == 9 ? 0 : tile[32 * j + i];  // 288 to 319: nobody's
}

TEST(CpAsync, CopiesAllOrSomeOfSixteenBytes) {
  const Memory<uint32_t> in(512), out(512);
  for (int i = 0; i < 512; ++i) in[i] = 0x01010101u * static_cast<uint32_t>(i % 255 + 1);
  // The last two pieces lie at 384 and after; they are not copied.
  cp_async_kernel<<<1, 32>>>(in.get(), out.get());
  finish();
  for (int i = 0; i < 384; ++i) {
    uint32_t expected = in[i];
    if (i >= 128 && i < 256) {
      const int bytes = (i - 128) / 4 % 17 - 4 * (i % 4);  // of this word
      if (bytes <= 0) expected = 0;
      if (bytes > 0 && bytes < 4) expected &= (1u << 8 * bytes) - 1;
    }
    if (i >= 288 && i < 320) expected = 0;
    ASSERT_EQ(out[i], expected) << "word " << i;
  }
}

// ---- mbarrier ----

using Mbarrier = On<900>;

// Thread 0 hands numbers to the others through one word, 20 times: a barrier says that it is full, one that it is
// empty.
__global__ void phases_kernel(uint32_t* out) {
  __shared__ uint64_t full, empty;
  __shared__ uint32_t word;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&empty, blockDim.x - 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  for (uint32_t i = 0; i < 20; ++i) {
    if (threadIdx.x == 0) {
      mbarrier_wait(&empty, (i & 1) ^ 1);
      word = 100 + i;
      mbarrier_arrive(&full);
    } else {
      mbarrier_wait(&full, i & 1);
      out[i * (blockDim.x - 1) + threadIdx.x - 1] = word;
      mbarrier_arrive(&empty);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) mbarrier_invalidate(&full);
}

TEST_F(Mbarrier, GoesThroughPhases) {
  const Memory<uint32_t> out(20 * 63);
  phases_kernel<<<1, 64>>>(out.get());
  finish();
  for (int i = 0; i < 20 * 63; ++i) ASSERT_EQ(out[i], 100u + i / 63) << "phase " << i / 63 << ", thread " << i % 63 + 1;
}

// Every thread copies 16 bytes; the barrier knows when all have come.
__global__ void copies_kernel(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t tile[64 * 4];
  __shared__ uint64_t ready;
  const int i = threadIdx.x;
  if (i == 0) {
    mbarrier_init(&ready, blockDim.x);
    mbarrier_init_fence();
  }
  __syncthreads();
  cp_async_16(tile + 4 * i, in + 4 * i);
  mbarrier_arrive_after_copies(&ready);
  mbarrier_wait(&ready, 0);
  for (int j = 0; j < 4; ++j) out[64 * j + i] = tile[64 * j + i];
}

TEST_F(Mbarrier, WaitsForCopies) {
  const Memory<uint32_t> in(256), out(256);
  for (int i = 0; i < 256; ++i) in[i] = 7u * i + 3;
  copies_kernel<<<1, 64>>>(in.get(), out.get());
  finish();
  for (int i = 0; i < 256; ++i) ASSERT_EQ(out[i], in[i]) << "word " << i;
}

// ---- bulk copies ----

using Bulk = On<900>;

__global__ void bulk_kernel(const uint32_t* in, uint32_t* out, uint32_t words) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto* const tile = reinterpret_cast<uint32_t*>(shared);
  __shared__ uint64_t ready;
  if (threadIdx.x == 0) {
    mbarrier_init(&ready, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&ready, words * 4);
    bulk_load(tile, in, words * 2, &ready);
    bulk_load(tile + words / 2, in + words / 2, words * 2, &ready);
  }
  mbarrier_wait(&ready, 0);
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) tile[i] += i;
  tma_store_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_store(out, tile, words * 4);
    tma_store_commit();
    tma_store_wait<0>();
  }
}

TEST_F(Bulk, CopiesThereAndBack) {
  const Memory<uint32_t> in(1024), out(1024);
  for (int i = 0; i < 1024; ++i) in[i] = 2654435761u * i;
  bulk_kernel<<<1, 64, 4096>>>(in.get(), out.get(), 1024);
  finish();
  for (uint32_t i = 0; i < 1024; ++i) ASSERT_EQ(out[i], in[i] + i) << "word " << i;
  print_checksum(out);
}

// All blocks add `in` to what `out` holds; a block's number comes on top. The last one knows of the others by `count`.
__global__ void bulk_add_kernel(const float* in, float* out, float* seen, unsigned* count) {
  __shared__ __align__(16) float tile[256];
  for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) tile[i] = in[i] + static_cast<float>(blockIdx.x);
  tma_store_fence();
  __syncthreads();
  if (threadIdx.x != 0) return;
  bulk_add(out, tile, sizeof tile);
  tma_store_commit();
  tma_store_wait<0>();
  __threadfence();
  if (atomicAdd(count, 1u) != gridDim.x - 1) return;
  __threadfence();
  tma_global_fence();
  bulk_add(seen, tile, sizeof tile);
  for (int i = 0; i < 256; ++i) seen[256 + i] = __ldcg(out + i);
  tma_store_commit();
  tma_store_wait<0>();
}

TEST_F(Bulk, AddsToWhatIsThere) {
  constexpr int kBlocks = 5;
  const Memory<float> in(256), out(256), seen(512);
  const Memory<unsigned> count(1);
  count[0] = 0;
  for (int i = 0; i < 256; ++i) in[i] = static_cast<float>(i), out[i] = 1000.0f, seen[i] = 0;
  bulk_add_kernel<<<kBlocks, 64>>>(in.get(), out.get(), seen.get(), count.get());
  finish();
  for (int i = 0; i < 256; ++i) {
    const float sum = 1000.0f + kBlocks * static_cast<float>(i) + 10;  // 0 + 1 + 2 + 3 + 4
    ASSERT_EQ(out[i], sum) << "float " << i;
    ASSERT_EQ(seen[256 + i], sum) << "float " << i << ", read by the last block";
  }
  print_checksum(out);
}

// ---- TMA ----

using Tma = On<900>;

struct At {
  int32_t c[5];
};

// Loads a box as it lies in shared memory, with its swizzle, into `out`.
template <int kRank>
__global__ void load_kernel(const __grid_constant__ CUtensorMap map, At at, uint32_t* out, uint32_t bytes) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const box = aligned_shared(shared);
  __shared__ uint64_t ready;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&map);
    mbarrier_init(&ready, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&ready, bytes);
    const int32_t* const c = at.c;
    if constexpr (kRank == 1) tma_load(box, &map, &ready, c[0]);
    if constexpr (kRank == 2) tma_load(box, &map, &ready, c[0], c[1]);
    if constexpr (kRank == 3) tma_load(box, &map, &ready, c[0], c[1], c[2]);
    if constexpr (kRank == 4) tma_load(box, &map, &ready, c[0], c[1], c[2], c[3]);
    if constexpr (kRank == 5) tma_load(box, &map, &ready, c[0], c[1], c[2], c[3], c[4]);
  }
  mbarrier_wait(&ready, 0);
  for (uint32_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) out[i] = reinterpret_cast<const uint32_t*>(box)[i];
}

template <int kRank>
__global__ void store_kernel(const __grid_constant__ CUtensorMap map, At at, const uint32_t* in, uint32_t bytes,
                             bool add) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const box = aligned_shared(shared);
  for (uint32_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) reinterpret_cast<uint32_t*>(box)[i] = in[i];
  tma_store_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int32_t* const c = at.c;
    if constexpr (kRank == 1) tma_store(&map, box, c[0]);
    if constexpr (kRank == 2) {
      if (add) {
        tma_add(&map, box, c[0], c[1]);
      } else {
        tma_store(&map, box, c[0], c[1]);
      }
    }
    if constexpr (kRank == 3) tma_store(&map, box, c[0], c[1], c[2]);
    if constexpr (kRank == 4) tma_store(&map, box, c[0], c[1], c[2], c[3]);
    if constexpr (kRank == 5) tma_store(&map, box, c[0], c[1], c[2], c[3], c[4]);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
}

// Element (x, y, …) of the tensor that lies at `at` within the box, or -1 outside of the tensor.
template <size_t kRank>
int64_t element_of(const std::array<uint64_t, kRank>& size, const std::array<uint32_t, kRank>& box, const At& at,
                   int64_t index) {
  int64_t element = 0, step = 1;
  for (size_t d = 0; d < kRank; ++d) {
    const int64_t place = at.c[d] + index % box[d];
    index /= box[d];
    if (place < 0 || place >= static_cast<int64_t>(size[d])) return -1;
    element += place * step;
    step *= static_cast<int64_t>(size[d]);
  }
  return element;
}

// Boxes within a dense tensor of 16-bit elements and over each of its edges: loaded, and stored back elsewhere.
template <size_t kRank>
void test_boxes(const std::array<uint64_t, kRank>& size, const std::array<uint32_t, kRank>& box, Swizzle swizzle,
                const std::vector<At>& places) {
  uint64_t elements = 1;
  uint32_t in_box = 1;
  std::array<uint64_t, kRank - 1> stride{};
  for (size_t d = 0; d < kRank; ++d) {
    elements *= size[d];
    in_box *= box[d];
    if (d + 1 < kRank) stride[d] = elements * 2;
  }
  const Memory<uint16_t> tensor(elements);
  fill_bits(tensor);
  const CUtensorMap map = make_tensor_map(tensor.get(), size, stride, box, swizzle);
  const Memory<uint32_t> got((in_box * 2 + 3) / 4);
  const auto* const bits = reinterpret_cast<const uint16_t*>(got.get());
  constexpr int kR = static_cast<int>(kRank);
  const uint32_t shared = in_box * 2 + 1024;
  for (const At& at : places) {
    const std::string where = "box at " + std::to_string(at.c[0]) + ", " + std::to_string(at.c[1]) + ", " +
                              std::to_string(at.c[2]) + " with swizzle " + std::to_string(static_cast<int>(swizzle));
    load_kernel<kR><<<1, 64, shared>>>(map, at, got.get(), in_box * 2);
    finish();
    for (uint32_t i = 0; i < in_box; ++i) {
      const int64_t from = element_of(size, box, at, i);
      ASSERT_EQ(bits[swizzled_offset(2 * i, swizzle) / 2], from < 0 ? 0 : tensor[from]) << where << ", element " << i;
    }
    print_checksum(got);

    if (*std::min_element(at.c, at.c + kRank) < 0) continue;  // only a load may begin before the tensor
    const Memory<uint16_t> copy(elements);
    for (uint64_t i = 0; i < elements; ++i) copy[i] = 0xabcd;
    const CUtensorMap copy_map = make_tensor_map(copy.get(), size, stride, box, swizzle);
    store_kernel<kR><<<1, 64, shared>>>(copy_map, at, got.get(), in_box * 2, false);
    finish();
    std::vector<uint16_t> expected(elements, 0xabcd);
    for (uint32_t i = 0; i < in_box; ++i) {
      const int64_t to = element_of(size, box, at, i);
      if (to >= 0) expected[to] = tensor[to];
    }
    for (uint64_t i = 0; i < elements; ++i) ASSERT_EQ(copy[i], expected[i]) << "stored " << where << ", element " << i;
  }
}

TEST_F(Tma, CopiesRows) { test_boxes<1>({1000}, {128}, Swizzle::kNone, {{{0}}, {{256}}, {{-24}}, {{936}}}); }
TEST_F(Tma, CopiesTilesWithoutASwizzle) {
  test_boxes<2>({72, 40}, {24, 16}, Swizzle::kNone, {{{0, 0}}, {{8, 5}}, {{-8, -3}}, {{56, 33}}, {{80, 0}}});
}
TEST_F(Tma, CopiesTilesWithEachSwizzle) {
  test_boxes<2>({72, 40}, {16, 24}, Swizzle::k32, {{{0, 0}}, {{8, 5}}, {{-8, -3}}, {{64, 33}}});
  test_boxes<2>({72, 40}, {32, 24}, Swizzle::k64, {{{0, 0}}, {{8, 5}}, {{-16, -3}}, {{64, 33}}});
  test_boxes<2>({72, 40}, {64, 24}, Swizzle::k128, {{{0, 0}}, {{8, 5}}, {{-8, -3}}, {{48, 33}}});
}
TEST_F(Tma, CopiesBoxesOfThreeToFiveDimensions) {
  test_boxes<3>({24, 10, 6}, {16, 4, 3}, Swizzle::k32, {{{0, 0, 0}}, {{16, 7, 4}}, {{-8, -1, -1}}});
  test_boxes<4>({24, 6, 5, 4}, {8, 2, 3, 2}, Swizzle::kNone, {{{0, 0, 0, 0}}, {{16, 5, 3, 3}}, {{-8, -1, -1, -1}}});
  test_boxes<5>({16, 4, 3, 4, 3}, {8, 2, 2, 3, 2}, Swizzle::kNone,
                {{{0, 0, 0, 0, 0}}, {{8, 3, 2, 2, 2}}, {{-8, -1, -1, -1, -1}}});
}

TEST_F(Tma, FillsWithNanWhereAsked) {
  const Memory<float> tensor(32 * 8);
  fill_whole(tensor, 5);
  const CUtensorMap map = make_tensor_map<float, 2>(tensor.get(), {32, 8}, {128}, {16, 8}, Swizzle::kNone, true);
  const Memory<uint32_t> got(16 * 8);
  load_kernel<2><<<1, 32, 2048>>>(map, At{{24, 4}}, got.get(), 512);
  finish();
  for (int i = 0; i < 128; ++i) {
    float value;
    std::memcpy(&value, &got[i], 4);
    const int x = 24 + i % 16, y = 4 + i / 16;
    if (x < 32 && y < 8) {
      ASSERT_EQ(value, tensor[y * 32 + x]) << "element " << i;
    } else {
      ASSERT_TRUE(std::isnan(value)) << "element " << i << " is " << value;
    }
  }
}

TEST_F(Tma, AddsToATensor) {
  const Memory<float> tensor(32 * 8), box(16 * 8), before(32 * 8);
  fill_whole(tensor, 6), fill_whole(box, 7), fill_whole(before, 6);
  const CUtensorMap map = make_tensor_map<float, 2>(tensor.get(), {32, 8}, {128}, {16, 8}, Swizzle::kNone);
  for (int round = 0; round < 2; ++round) {
    store_kernel<2><<<1, 32, 2048>>>(map, At{{20, 3}}, reinterpret_cast<uint32_t*>(box.get()), 512, true);
    finish();
  }
  for (int i = 0; i < 256; ++i) {
    const int x = i % 32 - 20, y = i / 32 - 3;
    const float added = x >= 0 && x < 16 && y >= 0 ? 2 * box[y * 16 + x] : 0;
    ASSERT_EQ(tensor[i], before[i] + added) << "element " << i;
  }
  print_checksum(tensor);
}

TEST_F(Tma, RefusesMapsThatTheHardwareCannotHave) {
  const Memory<float> tensor(1024);
  const float* const t = tensor.get();
  EXPECT_NO_THROW((make_tensor_map<float, 2>(t, {32, 32}, {128}, {32, 8}, Swizzle::k128)));
  EXPECT_THROW((make_tensor_map<float, 2>(t + 1, {28, 32}, {128}, {4, 8}, Swizzle::kNone)), std::runtime_error);
  EXPECT_THROW((make_tensor_map<float, 2>(t, {32, 32}, {132}, {4, 8}, Swizzle::kNone)), std::runtime_error);
  EXPECT_THROW((make_tensor_map<float, 2>(t, {32, 32}, {128}, {3, 8}, Swizzle::kNone)), std::runtime_error);
  EXPECT_THROW((make_tensor_map<float, 2>(t, {32, 32}, {128}, {4, 257}, Swizzle::kNone)), std::runtime_error);
  EXPECT_THROW((make_tensor_map<float, 2>(t, {32, 32}, {128}, {16, 8}, Swizzle::k32)), std::runtime_error);
  EXPECT_THROW((make_tensor_map<float, 2>(t, {0, 32}, {128}, {4, 8}, Swizzle::kNone)), std::runtime_error);
}

}  // namespace
}  // namespace kf::KF_BACKEND
