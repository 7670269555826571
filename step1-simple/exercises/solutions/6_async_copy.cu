// Exercise 6: the next elements are on their way while these are computed.
//
//   kernel-fusion learn check 6_async_copy
//   kernel-fusion simt exercises/solutions/6_async_copy.cu
//   nvcc -O3 -arch=native -I ../common/include exercises/solutions/6_async_copy.cu && ./a.out        from an A100 on
//
// Counted: global load sectors, shared load requests, barriers
#include <kf/exercise.h>

#include <cstdint>

constexpr int kThreads = 64;
__device__ int idle;  // waits that left nothing on its way; counted for the check

// Starts a copy of 16 bytes to shared memory, which needs no register and no waiting.
__device__ void copy_async(float4* to, const float4* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
// Closes a group: all copies that this thread has started since the last one, perhaps none.
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kLeft of this thread's groups, the newest, are still on their way.
template <int kLeft>
__device__ void wait_until_left() {
  if (kLeft == 0) atomicAdd(&idle, 1);
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// y = factor * x. A thread reads from shared memory only what it has copied itself, so no barrier is needed.
__global__ void scale(const float4* x, float4* y, int n, float factor) {
  __shared__ float4 stage[2][kThreads];
  const int first = blockIdx.x * kThreads + threadIdx.x, apart = gridDim.x * kThreads;
  const auto store = [&](int i, float4 v) { y[i] = {factor * v.x, factor * v.y, factor * v.z, factor * v.w}; };
  // SOLUTION: start the copy of the next element, to the other stage, before you wait for this one
  // | for (int i = first; i < n; i += apart) {
  // |   copy_async(&stage[0][threadIdx.x], x + i);
  // |   commit();
  // |   wait_until_left<0>();
  // |   store(i, stage[0][threadIdx.x]);
  // | }
  if (first < n) copy_async(&stage[0][threadIdx.x], x + first);
  commit();
  for (int i = first, s = 0; i < n; i += apart, s ^= 1) {
    if (i + apart < n) copy_async(&stage[s ^ 1][threadIdx.x], x + i + apart);
    commit();  // also where there is no next one: then the group is empty
    wait_until_left<1>();
    store(i, stage[s][threadIdx.x]);
  }
  // END
}

bool right(int n) {
  std::vector<float> x(4 * n), y(4 * n, NAN);
  for (int i = 0; i < 4 * n; ++i) x[i] = static_cast<float>(i % 1000 - 500);
  const OnGpu<float> gpu_x(x), gpu_y(y);
  scale<<<3, kThreads>>>(reinterpret_cast<float4*>(gpu_x.data), reinterpret_cast<float4*>(gpu_y.data), n, 2.5f);
  CHECK(cudaGetLastError());
  gpu_y.read(y);
  for (int i = 0; i < 4 * n; ++i) {
    if (y[i] == 2.5f * x[i]) continue;  // NaN, which nobody wrote, is not
    std::printf("WRONG: of %d numbers y[%d] is %g, must be %g\n", 4 * n, i, y[i], 2.5f * x[i]);
    return false;
  }
  return true;
}

int main() {
  for (const int n : {1, 64, 192, 193, 1000}) {
    if (!right(n)) return 1;
  }
  int waits;
  CHECK(cudaMemcpyFromSymbol(&waits, idle, sizeof waits));
  if (waits > 5 * 3 * kThreads)
    return std::printf("WRONG: the results are right, but %d waits left nothing on its way\n", waits), 1;
  std::printf("all right\n");
  return 0;
}
