// Every atomic function of the CUDA programming guide, on global and on shared memory.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CHECK(call)                                                                       \
  do {                                                                                    \
    const cudaError_t error = (call);                                                     \
    if (error != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)); \
      std::exit(1);                                                                       \
    }                                                                                     \
  } while (0)

struct Results {
  int add, sub, exch_seen, min, max, and_, or_, xor_, cas;
  unsigned uadd, usub, umin, umax, inc, dec, uand, uor, uxor, ucas, block, system;
  unsigned long long lladd, llmin, llmax, lland, llor, llxor, llcas;
  long long smin, smax;
  float fadd, fexch, by_cas;
  double dadd;
  float2 f2;
  float4 f4;
  unsigned short short_cas;
  __half half_add;
  __half2 half2_add;
  __nv_bfloat16 bf16_add;
  __nv_bfloat162 bf162_add;
  int lock, guarded, shared_sum;
  unsigned shared_max;
};

// What has no atomic of its own is made of compare-and-swap.
__device__ float atomicMulByCas(float* address, float value) {
  int *as_int = (int*)address, old = *as_int, assumed;
  do {
    assumed = old;
    old = atomicCAS(as_int, assumed, __float_as_int(value * __int_as_float(assumed)));
  } while (assumed != old);
  return __int_as_float(old);
}

__global__ void everything(Results* r) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;  // 0 to 255
  atomicAdd(&r->add, i - 100);
  atomicSub(&r->sub, i);
  atomicMin(&r->min, 100 - i);
  atomicMax(&r->max, i);
  atomicAnd(&r->and_, ~(1 << i % 31));
  atomicOr(&r->or_, 1 << i % 31);
  atomicXor(&r->xor_, i);
  atomicCAS(&r->cas, i, i + 1);
  if (atomicExch(&r->exch_seen, 7) == 0) atomicAdd(&r->block, 1000u);  // one thread saw the 0
  atomicAdd(&r->uadd, 3u);
  atomicSub(&r->usub, 2u);
  atomicMin(&r->umin, 1000u - i);
  atomicMax(&r->umax, 5u * i);
  atomicInc(&r->inc, 99u);
  atomicDec(&r->dec, 99u);
  atomicAnd(&r->uand, ~(1u << i % 32));
  atomicOr(&r->uor, 1u << i % 16);
  atomicXor(&r->uxor, 0x10001u * i);
  atomicCAS(&r->ucas, 5u, 6u);
  atomicAdd_block(&r->block, 0u);
  atomicAdd_system(&r->system, 1u);
  atomicAdd(&r->lladd, 1ULL << 33);
  atomicMin(&r->llmin, (1ULL << 40) - i);
  atomicMax(&r->llmax, (1ULL << 40) + i);
  atomicAnd(&r->lland, ~(1ULL << i % 64));
  atomicOr(&r->llor, 1ULL << i % 48);
  atomicXor(&r->llxor, 0x100000001ULL * i);
  atomicCAS(&r->llcas, 1ULL << 50, 2ULL << 50);
  atomicExch(&r->fexch, 2.5f);
  atomicMin(&r->smin, -(1LL << 40) - i);
  atomicMax(&r->smax, (1LL << 40) + i);
  atomicAdd(&r->fadd, 0.25f);
  atomicAdd(&r->dadd, 0.125);
  if (i < 10) atomicMulByCas(&r->by_cas, 2.0f);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  atomicAdd(&r->f2, make_float2(1.0f, 0.5f));
  atomicAdd(&r->f4, make_float4(1.0f, 2.0f, 3.0f, 0.25f));
#endif
  atomicCAS(&r->short_cas, (unsigned short)3, (unsigned short)40000);
  atomicAdd(&r->half_add, __float2half(0.5f));
  atomicAdd(&r->half2_add, __floats2half2_rn(1.0f, 0.25f));
  if (i < 100) atomicAdd(&r->bf16_add, __float2bfloat16(1.0f));
  if (i < 100) atomicAdd(&r->bf162_add, __floats2bfloat162_rn(1.0f, 2.0f));
}

// A lock that one thread of a block takes, and atomics on shared memory.
__global__ void locked(Results* r) {
  __shared__ int sum;
  __shared__ unsigned max;
  if (threadIdx.x == 0) {
    sum = 0;
    max = 0;
  }
  __syncthreads();
  atomicAdd(&sum, (int)threadIdx.x);
  atomicMax(&max, threadIdx.x * 3u);
  __syncthreads();
  if (threadIdx.x == 0) {
    while (atomicCAS(&r->lock, 0, 1) != 0) {
    }
    __threadfence();
    r->guarded += 1;
    r->shared_sum += sum;
    if (max > r->shared_max) r->shared_max = max;
    __threadfence();
    atomicExch(&r->lock, 0);
  }
}

int main() {
  Results* r;
  CHECK(cudaMallocManaged(&r, sizeof(Results)));
  std::memset((void*)r, 0, sizeof(Results));
  r->and_ = r->lland = r->uand = ~0u;
  r->lland = ~0ULL;
  r->min = INT_MAX, r->max = INT_MIN, r->umin = UINT_MAX, r->llmin = ULLONG_MAX;
  r->smin = LLONG_MAX, r->smax = LLONG_MIN, r->ucas = 5, r->llcas = 1ULL << 50, r->short_cas = 3, r->by_cas = 1.5f;
  everything<<<2, 128>>>(r);
  locked<<<12, 64>>>(r);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());

  printf("int %d %d %d %d %d %d %d %d\n", r->add, r->sub, r->exch_seen, r->min, r->max, r->and_, r->or_, r->xor_);
  printf("unsigned %u %u %u %u %u %u %u %u %u %u %u %u\n", r->uadd, r->usub, r->umin, r->umax, r->inc, r->dec, r->uand,
         r->uor, r->uxor, r->ucas, r->block, r->system);
  printf("64 bits %llu %llu %llu %llu %llu %llu %llu %lld %lld\n", r->lladd, r->llmin, r->llmax, r->lland, r->llor,
         r->llxor, r->llcas, r->smin, r->smax);
  printf("floats %.2f %.2f %.2f %.3f %.1f %.1f %.1f %.1f %.1f %.1f\n", r->fadd, r->fexch, r->by_cas, r->dadd, r->f2.x,
         r->f2.y, r->f4.x, r->f4.y, r->f4.z, r->f4.w);
  printf("16 bits %u %.2f %.2f %.2f %.2f %.2f %.2f\n", r->short_cas, __half2float(r->half_add),
         __low2float(r->half2_add), __high2float(r->half2_add), __bfloat162float(r->bf16_add),
         __low2float(r->bf162_add), __high2float(r->bf162_add));
  printf("lock %d: %d blocks, %d, %u\n", r->lock, r->guarded, r->shared_sum, r->shared_max);

  int sum = 0, exclusive = 0;
  unsigned uexclusive = 0;
  for (int i = 0; i < 256; ++i) sum += i, exclusive ^= i, uexclusive ^= 0x10001u * i;
  bool ok = r->add == sum - 25600 && r->sub == -sum && r->min == -155 && r->max == 255 && r->xor_ == exclusive;
  ok = ok && r->inc == 256 % 100 && r->dec == 44 && r->uxor == uexclusive && r->block == 1000 && r->system == 256;
  ok = ok && r->lladd == 256ULL << 33 && r->llcas == 2ULL << 50 && r->fadd == 64 && r->dadd == 32 && r->by_cas == 1536;
  ok = ok && r->f4.z == 768 && r->short_cas == 40000 && __half2float(r->half_add) == 128;
  ok = ok && r->and_ == INT_MIN && r->or_ == INT_MAX && r->exch_seen == 7 && r->uadd == 768 && r->usub == -512u;
  ok = ok && r->umin == 745 && r->umax == 1275 && r->uand == 0 && r->uor == 0xffff && r->ucas == 6;
  ok = ok && r->llmin == (1ULL << 40) - 255 && r->llmax == (1ULL << 40) + 255 && r->smin == -(1LL << 40) - 255;
  ok = ok && r->smax == (1LL << 40) + 255 && r->lland == 0 && r->llor == (1ULL << 48) - 1 && r->llxor == 0;
  ok = ok && r->fexch == 2.5f && r->f2.x == 256 && r->f2.y == 128 && r->f4.w == 64 && r->shared_max == 189;
  ok = ok && __low2float(r->half2_add) == 256 && __high2float(r->half2_add) == 64 && __high2float(r->bf162_add) == 200;
  ok = ok && __bfloat162float(r->bf16_add) == 100 && r->guarded == 12 && r->shared_sum == 12 * 2016 && r->lock == 0;
  printf("%s\n", ok ? "all right" : "WRONG");
  CHECK(cudaFree(r));
  return ok ? 0 : 1;
}
