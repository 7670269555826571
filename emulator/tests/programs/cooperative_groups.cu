// Cooperative groups: threads that meet by accident, tiles, partitions by label, scans, and a grid that synchronises.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace cg = cooperative_groups;

#define CHECK(call)                                                                              \
  do {                                                                                           \
    const cudaError_t status = (call);                                                           \
    if (status != cudaSuccess) {                                                                 \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
      exit(1);                                                                                   \
    }                                                                                            \
  } while (0)

// One atomic for all threads that are here together.
__device__ int atomicAggInc(int* counter) {
  cg::coalesced_group active = cg::coalesced_threads();
  int first = 0;
  if (active.thread_rank() == 0) first = atomicAdd(counter, static_cast<int>(active.size()));
  return active.shfl(first, 0) + active.thread_rank();
}

__global__ void filter(int* kept, int* count, const int* in, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    if (in[i] % 3 == 0) kept[atomicAggInc(count)] = in[i];
  }
}

// The whole group adds up, whatever kind of group it is.
__device__ int sum_of(cg::thread_group group, int* scratch, int value) {
  const int lane = static_cast<int>(group.thread_rank());
  for (int i = static_cast<int>(group.size()) / 2; i > 0; i /= 2) {
    scratch[lane] = value;
    group.sync();
    if (lane < i) value += scratch[lane + i];
    group.sync();
  }
  return value;
}

__global__ void parts(const int* in, int* out) {
  __shared__ int copy[128], scratch[128];
  cg::thread_block block = cg::this_thread_block();
  cg::memcpy_async(block, copy, in, sizeof(int) * block.size());
  cg::wait(block);
  const int mine = copy[block.thread_rank()];

  auto warp = cg::tiled_partition<32>(block);
  auto quad = cg::tiled_partition<4>(warp);
  cg::thread_group sixteen = cg::tiled_partition(block, 16);
  auto alike = cg::labeled_partition(warp, mine % 3);
  int* row = out + 10 * block.thread_rank();
  row[0] = cg::reduce(warp, mine, cg::plus<int>());
  row[1] = cg::reduce(quad, mine, cg::greater<int>());
  row[2] = sum_of(sixteen, scratch + block.thread_rank() / 16 * 16, mine);
  row[3] = cg::inclusive_scan(warp, mine);
  row[4] = cg::exclusive_scan(quad, mine, cg::plus<int>());
  row[5] = cg::reduce(alike, mine, cg::less<int>());
  row[6] = static_cast<int>(alike.num_threads()) * 100 + static_cast<int>(alike.thread_rank());
  row[7] = quad.shfl_xor(mine, 1) + quad.shfl_down(mine, 2) + (quad.any(mine == 5) ? 1000 : 0);
  row[8] = static_cast<int>(quad.ballot(mine % 2)) + 100 * static_cast<int>(quad.meta_group_rank());
  row[9] = static_cast<int>(cg::binary_partition(warp, mine % 2 == 0).size());
}

// One launch instead of one a step: each step reads what all blocks wrote in the step before.
__global__ void relax(int* a, int* b, int n, int steps) {
  cg::grid_group grid = cg::this_grid();
  for (int s = 0; s < steps; ++s) {
    for (unsigned long long i = grid.thread_rank(); i < n; i += grid.size()) {
      b[i] = a[(i + n - 1) % n] + 2 * a[i] - a[(i + 1) % n];
    }
    grid.sync();
    int* const t = a;
    a = b;
    b = t;
  }
}

int main() {
  const int n = 1000, steps = 6;
  int cooperative = 0, *a, *b, *count;
  CHECK(cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, 0));
  if (!cooperative) return puts("no cooperative launch here"), 1;
  CHECK(cudaMallocManaged(&a, n * sizeof(int)));
  CHECK(cudaMallocManaged(&b, 10 * n * sizeof(int)));
  CHECK(cudaMallocManaged(&count, sizeof(int)));
  std::vector<int> start(n);
  for (int i = 0; i < n; ++i) start[i] = a[i] = i * 37 % 101;

  *count = 0;
  filter<<<4, 96>>>(b, count, a, n);
  CHECK(cudaDeviceSynchronize());
  int expected = 0, sum = 0, expected_sum = 0;
  for (int i = 0; i < n; ++i) expected += a[i] % 3 == 0, expected_sum += a[i] % 3 == 0 ? a[i] : 0;
  for (int i = 0; i < *count; ++i) sum += b[i];
  printf("kept %d of %d, sum %d\n", *count, n, sum);
  bool ok = *count == expected && sum == expected_sum;

  parts<<<1, 128>>>(a, b);
  CHECK(cudaDeviceSynchronize());
  for (const int i : {0, 5, 31, 64, 127}) {
    for (int k = 0; k < 10; ++k) printf("%6d", b[10 * i + k]);
    printf("\n");
    int in_warp = 0, in_sixteen = 0;
    for (int j = i / 32 * 32; j < i / 32 * 32 + 32; ++j) in_warp += a[j];
    for (int j = i / 16 * 16; j < i / 16 * 16 + 16; ++j) in_sixteen += a[j];
    ok = ok && b[10 * i] == in_warp && (i % 16 != 0 || b[10 * i + 2] == in_sixteen);
  }

  int per_sm = 0, steps_argument = steps, n_argument = n;
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, relax, 128, 0));
  if (per_sm * properties.multiProcessorCount < 5) return puts("too few blocks fit"), 1;
  void* arguments[] = {&a, &b, &n_argument, &steps_argument};
  CHECK(cudaLaunchCooperativeKernel((void*)relax, dim3(5), dim3(128), arguments, 0, 0));
  CHECK(cudaDeviceSynchronize());
  for (int s = 0; s < steps; ++s) {
    std::vector<int> next(n);
    for (int i = 0; i < n; ++i) next[i] = start[(i + n - 1) % n] + 2 * start[i] - start[(i + 1) % n];
    start = next;
  }
  int wrong = 0;
  for (int i = 0; i < n; ++i) wrong += a[i] != start[i];
  printf("after %d steps: %d %d %d, %d wrong\n", steps, a[0], a[499], a[999], wrong);
  CHECK(cudaFree(a));
  CHECK(cudaFree(b));
  CHECK(cudaFree(count));
  return ok && wrong == 0 ? 0 : 1;
}
