// What programs of other people call: rounding in a direction, rarer intrinsics, memory with a pitch, attributes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <cfenv>
#include <climits>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

// The processor's own rounding. The operands are volatile, so that the operation happens at run time.
template <class T, class Operation>
T with_mode(int mode, T x, T y, Operation operation) {
  volatile T a = x, b = y;
  std::fesetround(mode);
  volatile T result = operation(a, b);
  std::fesetround(FE_TONEAREST);
  return result;
}

constexpr float kFloats[] = {1.0f, 1.1f, -0.3f, 3.0f, 1e-10f, -7e20f, 16777217.0f, 1.17549435e-38f, 3.4e38f};

#define CHECK_MODE(r, mode)                                                                                          \
  for (const float x : kFloats) {                                                                                    \
    for (const float y : kFloats) {                                                                                  \
      const double p = x, q = 1.0 / double{y};                                                                       \
      if (x != -y) {                                                                                                 \
        EXPECT_EQ(__fadd_##r(x, y), with_mode(mode, x, y, [](float a, float b) { return a + b; }));                  \
      }                                                                                                              \
      if (x != y) {                                                                                                  \
        EXPECT_EQ(__fsub_##r(x, y), with_mode(mode, x, y, [](float a, float b) { return a - b; }));                  \
      }                                                                                                              \
      EXPECT_EQ(__fmul_##r(x, y), with_mode(mode, x, y, [](float a, float b) { return a * b; })) << x << " " << y;   \
      EXPECT_EQ(__fdiv_##r(x, y), with_mode(mode, x, y, [](float a, float b) { return a / b; })) << x << " " << y;   \
      EXPECT_EQ(__dmul_##r(p, q), with_mode(mode, p, q, [](double a, double b) { return a * b; })) << p << " " << q; \
      EXPECT_EQ(__ddiv_##r(p, q), with_mode(mode, p, q, [](double a, double b) { return a / b; })) << p << " " << q; \
      EXPECT_EQ(__dadd_##r(p, q), with_mode(mode, p, q, [](double a, double b) { return a + b; })) << p << " " << q; \
    }                                                                                                                \
    const float positive = std::fabs(x);                                                                             \
    EXPECT_EQ(__fsqrt_##r(positive), with_mode(mode, positive, 0.0f, [](float a, float) { return std::sqrt(a); }));  \
    const double wide = 1.0 / double{x};                                                                             \
    volatile double source = wide;                                                                                   \
    std::fesetround(mode);                                                                                           \
    volatile float narrowed = static_cast<float>(source);                                                            \
    std::fesetround(FE_TONEAREST);                                                                                   \
    EXPECT_EQ(__double2float_##r(wide), narrowed);                                                                   \
  }

TEST(Rounded, AsTheProcessorDoes){CHECK_MODE(rz, FE_TOWARDZERO) CHECK_MODE(ru, FE_UPWARD) CHECK_MODE(rd, FE_DOWNWARD)}

TEST(Rounded, FusedAndIntegers) {
  EXPECT_EQ(__fmaf_rd(1.0f, 1.0f, 1e-20f), 1.0f);
  EXPECT_EQ(__fmaf_ru(1.0f, 1.0f, 1e-20f), std::nextafter(1.0f, 2.0f));
  EXPECT_EQ(__fmaf_rz(-1.0f, 1.0f, -1e-20f), -1.0f);
  EXPECT_EQ(__int2float_rd(16777217), 16777216.0f);
  EXPECT_EQ(__int2float_ru(16777217), 16777218.0f);
  EXPECT_EQ(__int2float_rz(-16777217), -16777216.0f);
  EXPECT_EQ(__uint2float_rd(UINT_MAX), 4294967040.0f);
  EXPECT_EQ(__ll2double_ru((1LL << 53) + 1), 9007199254740994.0);
  EXPECT_EQ(__ull2double_rz(ULLONG_MAX), 18446744073709549568.0);
}

TEST(Rounded, HalvesLieOnBothSides) {
  for (std::uint32_t i = 0; i < 4000; ++i) {
    const float x = std::ldexp(static_cast<float>(i * 2654435761u % 100003) - 50000.0f, static_cast<int>(i % 30) - 28);
    const float down = __half2float(__float2half_rd(x)), up = __half2float(__float2half_ru(x));
    EXPECT_LE(down, x);
    EXPECT_GE(up, x);
    const float near = __half2float(__float2half(x));
    EXPECT_TRUE(near == down || near == up) << x;
    EXPECT_EQ(__half2float(__float2half_rz(x)), x < 0 ? up : down);
    if (down != up && std::isfinite(up) && std::isfinite(down)) {
      EXPECT_EQ(__half2float(__float2half_ru(std::nextafter(down, INFINITY))), up) << x;  // nothing lies between them
    }
    const float b_down = __bfloat162float(__float2bfloat16_rd(x)), b_up = __bfloat162float(__float2bfloat16_ru(x));
    EXPECT_LE(b_down, x);
    EXPECT_GE(b_up, x);
    EXPECT_EQ(__bfloat162float(__float2bfloat16_rz(x)), x < 0 ? b_up : b_down);
  }
  EXPECT_EQ(__half2float(__float2half_rz(1e6f)), 65504.0f);
  EXPECT_EQ(__half2float(__float2half_rd(-1e6f)), -INFINITY);
  EXPECT_TRUE(std::isnan(__half2float(__float2half_ru(NAN))));
  EXPECT_EQ(__half_as_ushort(__float2half_ru(1e-20f)), 1);
  EXPECT_EQ(__half_as_ushort(__float2half_rd(-1e-20f)), 0x8001);
}

TEST(Functions, InversesAndNorms) {
  for (const double y : {1e-300, 1e-20, 0.001, 0.3, 0.999, 1.0, 1.2, 1.9, 1.99999}) {
    EXPECT_NEAR(std::erfc(erfcinv(y)) / y, 1, 1e-11) << y;
  }
  EXPECT_EQ(erfcinv(0.0), INFINITY);
  EXPECT_EQ(erfcinv(2.0), -INFINITY);
  EXPECT_TRUE(std::isnan(erfcinv(-1.0)));
  EXPECT_NEAR(erfinv(0.5), 0.4769362762044699, 1e-14);
  EXPECT_NEAR(erfinv(-1e-12), -8.862269254527580e-13, 1e-24);
  EXPECT_NEAR(normcdfinv(0.975), 1.959963984540054, 1e-13);
  EXPECT_FLOAT_EQ(normcdfinvf(0.5f), 0.0f);
  const double three[] = {2, 3, 6};
  EXPECT_EQ(norm(3, three), 7);
  EXPECT_EQ(norm3d(2, 3, 6), 7);
  EXPECT_EQ(norm4d(1, 1, 1, 1), 2);
  EXPECT_FLOAT_EQ(rnorm3df(2, 3, 6), 1.0f / 7);
  double sine, cosine;
  sincospi(0.5, &sine, &cosine);
  EXPECT_NEAR(sine, 1, 1e-15);
  EXPECT_NEAR(cosine, 0, 1e-15);
}

TEST(Integers, RarerIntrinsics) {
  EXPECT_EQ(__fns(0xf0u, 0, 2), 5u);
  EXPECT_EQ(__fns(0xf0u, 5, 0), 5u);
  EXPECT_EQ(__fns(0xf0u, 3, 0), ~0u);
  EXPECT_EQ(__fns(0xf0u, 31, -1), 7u);
  EXPECT_EQ(__fns(0xf0u, 0, 5), ~0u);
  EXPECT_EQ(__dp2a_lo(0x00020003, 0x0a0b0504, 1), 1 + 3 * 4 + 2 * 5);
  EXPECT_EQ(__dp2a_hi(0x00020003, 0x0a0b0504, 1), 1 + 3 * 11 + 2 * 10);
  EXPECT_EQ(__dp2a_lo(static_cast<int>(0xffff0001u), 0x0000ff02, 0), 2 + 1);
  EXPECT_EQ(__dp2a_lo(0xffff0001u, 0x0000ff02u, 0u), 2 + 65535u * 255u);
  EXPECT_EQ(__funnelshift_lc(0x80000000u, 1u, 1u), 3u);
  EXPECT_EQ(__funnelshift_lc(7u, 1u, 40u), 7u);
  EXPECT_EQ(__funnelshift_rc(7u, 1u, 40u), 1u);
  EXPECT_EQ(__rhadd(INT_MAX, INT_MAX), INT_MAX);
  EXPECT_EQ(__rhadd(-3, 2), 0);
  EXPECT_EQ(__uhadd(UINT_MAX, UINT_MAX - 1), UINT_MAX - 1);
  EXPECT_EQ(__urhadd(UINT_MAX, 0), 0x80000000u);
}

TEST(Memory, WithAPitch) {
  char* memory = nullptr;
  std::size_t pitch = 0;
  ASSERT_EQ(cudaMallocPitch(&memory, &pitch, 100, 4), cudaSuccess);
  EXPECT_EQ(pitch, 512u);
  EXPECT_EQ(cudaMemset2D(memory, pitch, 7, 100, 4), cudaSuccess);
  EXPECT_EQ(memory[3 * pitch + 99], 7);
  EXPECT_EQ(memory[3 * pitch + 100], char(0xff));
  EXPECT_EQ(cudaMemset2D(memory, 50, 7, 100, 4), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset2D(memory, pitch, 7, 600, 4), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);

  cudaPitchedPtr box;
  const cudaExtent extent = make_cudaExtent(6, 5, 4);
  ASSERT_EQ(cudaMalloc3D(&box, extent), cudaSuccess);
  EXPECT_EQ(cudaMemset3D(box, 1, extent), cudaSuccess);
  std::vector<char> host(6 * 5 * 4);
  for (std::size_t i = 0; i < host.size(); ++i) host[i] = static_cast<char>(i);
  cudaMemcpy3DParms copy = {};
  copy.srcPtr = make_cudaPitchedPtr(host.data(), 6, 6, 5);
  copy.dstPtr = box;
  copy.srcPos = make_cudaPos(1, 2, 3);
  copy.dstPos = make_cudaPos(3, 0, 1);
  copy.extent = make_cudaExtent(2, 3, 1);
  copy.kind = cudaMemcpyHostToDevice;
  ASSERT_EQ(cudaMemcpy3D(&copy), cudaSuccess);
  const char* const bytes = static_cast<const char*>(box.ptr);
  EXPECT_EQ(bytes[(1 * 5 + 2) * box.pitch + 4], char((3 * 5 + 4) * 6 + 2));
  EXPECT_EQ(bytes[(1 * 5 + 3) * box.pitch + 4], 1);
  EXPECT_EQ(bytes[(1 * 5 + 2) * box.pitch + 5], 1);
  EXPECT_EQ(cudaFree(box.ptr), cudaSuccess);
}

TEST(Memory, KnowsWhereAPointerPoints) {
  int *device, *managed, *host, local[4];
  ASSERT_EQ(cudaMalloc(&device, 64), cudaSuccess);
  ASSERT_EQ(cudaMallocManaged(&managed, 64), cudaSuccess);
  ASSERT_EQ(cudaHostAlloc(&host, 64, cudaHostAllocMapped), cudaSuccess);
  const auto type = [](const void* memory) {
    cudaPointerAttributes attributes;
    EXPECT_EQ(cudaPointerGetAttributes(&attributes, memory), cudaSuccess);
    return attributes.type;
  };
  EXPECT_EQ(type(device + 15), cudaMemoryTypeDevice);
  EXPECT_EQ(type(device + 16), cudaMemoryTypeUnregistered);
  EXPECT_EQ(type(managed), cudaMemoryTypeManaged);
  EXPECT_EQ(type(host), cudaMemoryTypeHost);
  EXPECT_EQ(type(local), cudaMemoryTypeUnregistered);
  EXPECT_EQ(cudaHostRegister(local, sizeof(local), cudaHostRegisterDefault), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(local, sizeof(local), cudaHostRegisterDefault), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(type(local + 3), cudaMemoryTypeHost);
  int* seen = nullptr;
  EXPECT_EQ(cudaHostGetDevicePointer(&seen, local, 0), cudaSuccess);
  EXPECT_EQ(seen, local);
  EXPECT_EQ(cudaHostGetDevicePointer(&seen, device, 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaHostUnregister(local), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(local), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaFree(host), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(device), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(device), cudaSuccess);
  EXPECT_EQ(cudaFree(managed), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

__device__ int counted[4];
__device__ __managed__ int shared_with_host[4];

TEST(Memory, KnowsVariables) {
  int* address = nullptr;
  ASSERT_EQ(cudaGetSymbolAddress(&address, counted), cudaSuccess);
  cudaPointerAttributes attributes;
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, address + 3), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, shared_with_host), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeManaged);
  EXPECT_EQ(cudaFree(address), cudaErrorInvalidValue);
  cudaGetLastError();
  int pageable = 1;
  ASSERT_EQ(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, 0), cudaSuccess);
  EXPECT_EQ(pageable, 0);
}

TEST(Handle, IsDestroyedOnce) {
  cudaStream_t stream;
  cudaEvent_t event;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(event), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamDestroy(nullptr), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamDestroy(cudaStreamPerThread), cudaErrorInvalidResourceHandle);
  cudaGetLastError();
}

TEST(Memory, AdviceInBothVersionsOfCuda) {
  int* x;
  ASSERT_EQ(cudaMallocManaged(&x, 64), cudaSuccess);
  const cudaMemLocation location{cudaMemLocationTypeDevice, 0};
  EXPECT_EQ(cudaMemAdvise(x, 64, cudaMemAdviseSetReadMostly, 0), cudaSuccess);
  EXPECT_EQ(cudaMemAdvise(x, 64, cudaMemAdviseSetPreferredLocation, location), cudaSuccess);
  EXPECT_EQ(cudaMemPrefetchAsync(x, 64, 0), cudaSuccess);
  EXPECT_EQ(cudaMemPrefetchAsync(x, 64, cudaCpuDeviceId, nullptr), cudaSuccess);
  EXPECT_EQ(cudaMemPrefetchAsync(x, 64, location, 0, nullptr), cudaSuccess);
  EXPECT_EQ(cudaFree(x), cudaSuccess);
}

TEST(Streams, FlagsCallbacksAndNamedOnes) {
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  unsigned flags = 9;
  EXPECT_EQ(cudaStreamGetFlags(stream, &flags), cudaSuccess);
  EXPECT_EQ(flags, cudaStreamNonBlocking);
  EXPECT_EQ(cudaStreamGetFlags(cudaStreamPerThread, &flags), cudaSuccess);
  EXPECT_EQ(flags, cudaStreamDefault);
  int calls = 0;
  EXPECT_EQ(cudaLaunchHostFunc(stream, [](void* data) { ++*static_cast<int*>(data); }, &calls), cudaSuccess);
  EXPECT_EQ(cudaStreamAddCallback(
                stream, [](cudaStream_t, cudaError_t error, void* data) { *static_cast<int*>(data) += 10 + error; },
                &calls, 0),
            cudaSuccess);
  EXPECT_EQ(calls, 11);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(cudaStreamLegacy), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
}

TEST(Device, LimitsAndPeers) {
  std::size_t limit = 0;
  EXPECT_EQ(cudaDeviceSetLimit(cudaLimitPrintfFifoSize, 4 << 20), cudaSuccess);
  EXPECT_EQ(cudaDeviceGetLimit(&limit, cudaLimitPrintfFifoSize), cudaSuccess);
  EXPECT_EQ(limit, 4u << 20);
  EXPECT_EQ(cudaDeviceGetLimit(&limit, static_cast<cudaLimit>(77)), cudaErrorUnsupportedLimit);
  int can = 1;
  EXPECT_EQ(cudaDeviceCanAccessPeer(&can, 0, 0), cudaSuccess);
  EXPECT_EQ(can, 0);
  EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaErrorInvalidDevice);
  char bus[16];
  EXPECT_EQ(cudaDeviceGetPCIBusId(bus, sizeof(bus), 0), cudaSuccess);
  EXPECT_STREQ(bus, "0000:00:00.0");
  EXPECT_EQ(cudaDeviceGetPCIBusId(bus, 4, 0), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

__global__ void __launch_bounds__(256) bounded(int* x) { x[0] = 1; }

TEST(Occupancy, WhereSharedMemoryGrowsWithTheBlock) {
  int grid = 0, block = 0;
  EXPECT_EQ(cudaOccupancyMaxPotentialBlockSizeVariableSMem(&grid, &block, bounded, [](int) { return 0; }), cudaSuccess);
  EXPECT_EQ(block, 256);
  EXPECT_EQ(grid, 16 * 8);
  // 1 KB a thread: 48 KB, the most without an opt-in, at 48 threads; a block of 32 fits seven times, one of 64 never.
  EXPECT_EQ(cudaOccupancyMaxPotentialBlockSizeVariableSMem(&grid, &block, bounded, [](int n) { return n << 10; }),
            cudaSuccess);
  EXPECT_EQ(block, 32);
  int blocks = 0;
  EXPECT_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&blocks, bounded, 128, 0, cudaOccupancyDefault),
            cudaSuccess);
  EXPECT_EQ(blocks, 16);
}

}  // namespace
