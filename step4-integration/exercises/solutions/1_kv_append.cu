// Exercise 1: keys and values of the new tokens go into the cache, each row of the batch at a position of its own.
//
//   kernel-fusion learn check 1_kv_append
//   kernel-fusion simt exercises/solutions/1_kv_append.cu
//   nvcc -O3 -I ../common/include exercises/solutions/1_kv_append.cu && ./a.out        with a GPU
//
// Counted: global load requests, global load sectors, global store requests, global store sectors
#include <kf/exercise.h>

constexpr int kThreads = 128;

// A token of each row of the batch: k and v [batch, heads, dim], n numbers each. The caches are [batch, heads,
// capacity, dim]. position[b] is how many tokens row b has had; it lies on the GPU, since the host does not wait to
// know it. A row whose position is outside its cache has ended, and nothing is written for it.
__global__ void kv_append(const float* k, const float* v, const int* position, float* k_cache, float* v_cache,
                          int heads, int capacity, int dim, int n) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= n) return;
  // SOLUTION: number i of k and of v to where they belong
  // | (void)k, (void)v, (void)position, (void)k_cache, (void)v_cache, (void)heads, (void)capacity, (void)dim;
  const int head = i / dim, at = position[head / heads];  // head counts through the whole batch
  if (at < 0 || at >= capacity) return;
  const int to = (head * capacity + at) * dim + i % dim;
  k_cache[to] = k[i];
  v_cache[to] = v[i];
  // END
}

bool right(const std::vector<int>& position, int heads, int capacity, int dim) {
  const int batch = static_cast<int>(position.size()), n = batch * heads * dim;
  std::vector<float> k(n), v(n), caches[2];
  for (int i = 0; i < n; ++i) k[i] = static_cast<float>(i), v[i] = static_cast<float>(-i);
  for (auto& cache : caches) cache.assign(n * capacity, 0.5f);  // what was there before
  {
    const OnGpu<float> gpu_k(k), gpu_v(v), k_cache(caches[0]), v_cache(caches[1]);
    const OnGpu<int> gpu_position(position);
    kv_append<<<(n + kThreads - 1) / kThreads, kThreads>>>(gpu_k.data, gpu_v.data, gpu_position.data, k_cache.data,
                                                           v_cache.data, heads, capacity, dim, n);
    CHECK(cudaGetLastError());
    k_cache.read(caches[0]), v_cache.read(caches[1]);
  }
  for (int i = 0; i < 2 * n * capacity; ++i) {
    const int which = i / (n * capacity), j = i % (n * capacity);
    const int d = j % dim, t = j / dim % capacity, head = j / dim / capacity;  // of the whole batch
    const bool is_new = t == position[head / heads];
    const float expected = !is_new ? 0.5f : which == 0 ? k[head * dim + d] : v[head * dim + d];
    if (caches[which][j] == expected) continue;
    std::printf("WRONG: row %d is at %d of %d: %c_cache[%d][%d][%d][%d] is %g, must be %g%s\n", head / heads,
                position[head / heads], capacity, "kv"[which], head / heads, head % heads, t, d, caches[which][j],
                expected, is_new ? "" : ", as it was");
    return false;
  }
  return true;
}

int main() {
  if (!right({0}, 1, 1, 1)) return 1;
  if (!right({3, 0, 6}, 2, 7, 5)) return 1;
  if (!right({2, -1, 1, 4, 3}, 3, 4, 33)) return 1;  // the second and the fourth row have ended
  if (!right({8, 20, 7, 31}, 12, 32, 64)) return 1;
  std::printf("all right\n");
  return 0;
}
