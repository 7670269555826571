// Half and bfloat16: arithmetic rounded once, vectors, comparisons, conversions in all directions, and functions.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                        \
  if (cudaError_t e = (call)) {                                            \
    std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e)); \
    return 1;                                                              \
  }

// y = a x + y by pairs.
__global__ void haxpy(int n, half a, const half* x, half* y) {
  const int start = threadIdx.x + blockDim.x * blockIdx.x;
  const int stride = blockDim.x * gridDim.x;
  const half2* x2 = reinterpret_cast<const half2*>(x);
  half2* y2 = reinterpret_cast<half2*>(y);
  const half2 a2 = __half2half2(a);
  for (int i = start; i < n / 2; i += stride) y2[i] = __hfma2(a2, x2[i], y2[i]);
  if (start == 0 && n % 2) y[n - 1] = __hfma(a, x[n - 1], y[n - 1]);
}

template <typename T>
__global__ void accumulate(const T* x, T* sums, int n) {
  T sum = T(0.0f);
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffff, sum, offset);
  if (threadIdx.x == 0) sums[0] = sum * T(0.5f) - T(1.0f);
}

__global__ void pieces(float* out, unsigned* bits) {
  const __half h = __float2half(0.1f), three = __int2half_rn(3);
  const __nv_bfloat16 b = __float2bfloat16(0.1f), five = __float2bfloat16(5.0f);
  bits[0] = __half_as_ushort(h);
  bits[1] = __bfloat16_as_ushort(b);
  bits[2] = __half_as_ushort(__float2half_rz(0.1f));
  bits[3] = __half_as_ushort(__float2half_ru(0.1f));
  bits[4] = __half_as_ushort(h + three);
  bits[5] = __half_as_ushort(h / three);
  bits[6] = __bfloat16_as_ushort(b * five);
  bits[7] = __bfloat16_as_ushort(__hfma(b, five, b));
  bits[8] = __half_as_ushort(__float2half(70000.0f));
  bits[9] = __half_as_ushort(__float2half(6e-8f));
  bits[10] = __half_as_ushort(__hadd_sat(three, h)) + 65536u * __half_as_ushort(hsqrt(__float2half(16.0f)));
  const half2 v = __floats2half2_rn(1.5f, -2.5f), w = make_half2(__float2half(1.5f), __float2half(4.0f));
  bits[11] =
      __hbeq2(v, w) + 2 * __hbgt2(w, v) + 4 * (__low2half(v) == __low2half(w)) + 8 * __hisnan(hsqrt(__high2half(v)));
  const float2 f = __half22float2(__hmul2(v, w));
  const float2 g = __bfloat1622float2(__hadd2(__floats2bfloat162_rn(1.0f, 256.0f), __float2bfloat162_rn(1.0f)));
  out[0] = f.x;
  out[1] = f.y;
  out[2] = g.x;
  out[3] = g.y;
  out[4] = __half2float(hexp(__float2half(0.0f))) + __half2float(h2log2(__float2half2_rn(8.0f)).x);
  out[5] = static_cast<float>(__half2int_rn(__float2half(2.5f))) + 10.0f * __half2int_rd(__float2half(-2.5f));
  out[6] = __half2float(__hmax(h, three)) + __half2float(__habs(__hneg(three)));
  out[7] = __bfloat162float(hrsqrt(__float2bfloat16(0.25f))) + __low2float(__lowhigh2highlow(v));
}

int main() {
  const int n = 1001;
  std::vector<half> x(n), y(n), result(n);
  std::vector<__nv_bfloat16> bx(n);
  for (int i = 0; i < n; ++i) {
    x[i] = __float2half(static_cast<float>(i % 97) / 16.0f);
    y[i] = __float2half(static_cast<float>(i % 89) - 44.0f);
    bx[i] = __float2bfloat16(static_cast<float>(i % 3));
  }
  half *dx, *dy, *sum;
  __nv_bfloat16 *db, *bsum;
  float *out, floats[8];
  unsigned *bits, words[12];
  CHECK(cudaMalloc(&dx, n * sizeof(half)));
  CHECK(cudaMalloc(&dy, n * sizeof(half)));
  CHECK(cudaMalloc(&db, n * sizeof(__nv_bfloat16)));
  CHECK(cudaMallocManaged(&sum, sizeof(half)));
  CHECK(cudaMallocManaged(&bsum, sizeof(__nv_bfloat16)));
  CHECK(cudaMalloc(&out, sizeof(floats)));
  CHECK(cudaMalloc(&bits, sizeof(words)));
  CHECK(cudaMemcpy(dx, x.data(), n * sizeof(half), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(dy, y.data(), n * sizeof(half), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(db, bx.data(), n * sizeof(__nv_bfloat16), cudaMemcpyHostToDevice));
  haxpy<<<4, 64>>>(n, __float2half(1.5f), dx, dy);
  accumulate<<<1, 32>>>(dx, sum, 500);
  accumulate<<<1, 32>>>(db, bsum, 200);
  pieces<<<1, 1>>>(out, bits);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(result.data(), dy, n * sizeof(half), cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(floats, out, sizeof(floats), cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(words, bits, sizeof(words), cudaMemcpyDeviceToHost));

  int wrong = 0;
  for (int i = 0; i < n; ++i) {
    const float exact = 1.5f * __half2float(x[i]) + __half2float(y[i]);  // exact in float, so rounded once
    wrong += !(__half2float(result[i]) == __half2float(__float2half(exact)));
  }
  std::printf("haxpy: %d wrong, %.4f %.4f %.4f\n", wrong, __half2float(result[1]), __half2float(result[500]),
              __half2float(result[n - 1]));
  std::printf("sums: %.3f %.3f\n", __half2float(*sum), __bfloat162float(*bsum));
  for (const unsigned word : words) std::printf("%x ", word);
  std::printf("\n");
  for (const float value : floats) std::printf("%g ", value);
  std::printf("\n");
  const bool ok = wrong == 0 && words[0] == 0x2e66 && words[1] == 0x3dcd && words[3] == words[2] + 1 &&
                  words[8] == 0x7c00 && words[9] == 1 && floats[4] == 4 && floats[5] == -28 && floats[7] == -0.5f;
  std::puts(ok ? "all right" : "WRONG");
  return ok ? 0 : 1;
}
