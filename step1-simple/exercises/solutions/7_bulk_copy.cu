// Exercise 7: one thread copies a row, and a barrier in shared memory tells all that it is there.
//
//   kernel-fusion learn check 7_bulk_copy
//   kernel-fusion simt exercises/solutions/7_bulk_copy.cu
//   nvcc -O3 -arch=sm_90 -I ../common/include exercises/solutions/7_bulk_copy.cu && ./a.out        with an H100
//
// Counted: global load sectors, barriers
#include <kf/exercise.h>

#include <cstdint>

constexpr int kWidth = 256;  // of a row, and a thread an element

__device__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
// A barrier of which a phase ends when `arrivals` have come and all bytes announced are copied. The next one begins
// then.
__device__ void init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // copies see it
}
__device__ void arrive_and_announce(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Starts a copy of so many bytes, a multiple of 16, which the barrier counts.
__device__ void copy_bulk(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// Waits for the end of a phase: parity 0 for the first, 1 for the second, 0 for the third.
__device__ void wait(uint64_t* barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  }
}

// Turns each row round: y[row][c] = x[row][kWidth - 1 - c]. A block takes row after row.
__global__ void turned(const float* x, float* y, int rows) {
  __shared__ alignas(16) float row[kWidth];
  __shared__ uint64_t barrier;
  // SOLUTION: thread 0 makes the barrier ready; for each row it announces the bytes and starts the copy; all wait
  // | (void)row, (void)barrier, (void)x, (void)y, (void)rows;
  if (threadIdx.x == 0) init(&barrier, 1);
  __syncthreads();  // nobody waits for what is not ready
  for (int r = blockIdx.x, phase = 0; r < rows; r += gridDim.x, phase ^= 1) {
    if (threadIdx.x == 0) {
      arrive_and_announce(&barrier, sizeof row);
      copy_bulk(row, x + r * kWidth, sizeof row, &barrier);
    }
    wait(&barrier, phase);
    y[r * kWidth + threadIdx.x] = row[kWidth - 1 - threadIdx.x];
    __syncthreads();  // all have read, before the next row comes
  }
  // END
}

bool right(int rows, int blocks) {
  std::vector<float> x(rows * kWidth), y(rows * kWidth, NAN);
  for (int i = 0; i < rows * kWidth; ++i) x[i] = static_cast<float>(i);
  const OnGpu<float> gpu_x(x), gpu_y(y);
  turned<<<blocks, kWidth>>>(gpu_x.data, gpu_y.data, rows);
  CHECK(cudaGetLastError());
  gpu_y.read(y);
  for (int i = 0; i < rows * kWidth; ++i) {
    const float expected = x[i / kWidth * kWidth + kWidth - 1 - i % kWidth];
    if (y[i] == expected) continue;
    std::printf("WRONG: %d rows, %d blocks: y[%d][%d] is %g, must be %g\n", rows, blocks, i / kWidth, i % kWidth, y[i],
                expected);
    return false;
  }
  return true;
}

int main() {
  if (!right(1, 1) || !right(7, 1) || !right(20, 3)) return 1;
  std::printf("all right\n");
  return 0;
}
