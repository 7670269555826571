// Exercise 9: the order of a queue of which no tile waits for a later one, and hardly any waits at all.
//
//   kernel-fusion learn check 9_queue
//   kernel-fusion simt exercises/solutions/9_queue.cu
//   nvcc -O3 -I ../common/include exercises/solutions/9_queue.cu && ./a.out        with a GPU
#include <kf/exercise.h>

constexpr int kHeads = 4, kDim = 8, kWidth = kHeads * kDim, kRows = 32 / kDim, kMaxBands = 16;
constexpr int kGroup = kHeads + 1;  // tiles of a band

struct Tile {
  int band, head;  // head kHeads: the rows of the band, which wait for all of its heads
};

// Tile `index` of the queue, which has bands * kGroup.
__host__ __device__ Tile tile_at(int index, int bands) {
  // SOLUTION: now all rows come last. Let those of a band come as soon as the heads of the next band have been drawn
  // | if (index < bands * kHeads) return {index / kHeads, index % kHeads};
  // | return {index - bands * kHeads, kHeads};
  if (index < kHeads) return {0, index};
  const int band = (index - kHeads) / kGroup, i = (index - kHeads) % kGroup;
  return band + 1 < bands && i < kHeads ? Tile{band + 1, i} : Tile{band, kHeads};
  // END
}

__device__ int next, attended[kMaxBands];  // tiles drawn; of each band, heads that are there; 0 before

// Blocks of 32 threads, as many as you like: they stay, and draw tiles. A head's tile squares, for short; a band's rows
// are added up when all of their heads are there. All arrays are [row][column].
__global__ void dataflow(const float* v, float* squared, float* y, int bands) {
  const int t = threadIdx.x;
  for (;;) {
    int index = t == 0 ? atomicAdd(&next, 1) : 0;
    index = __shfl_sync(0xffffffffu, index, 0);
    if (index >= bands * kGroup) break;
    const Tile tile = tile_at(index, bands);
    const int first = tile.band * kRows * kWidth;
    if (tile.head < kHeads) {
      const int i = first + t / kDim * kWidth + tile.head * kDim + t % kDim;
      squared[i] = v[i] * v[i];
      __syncthreads();
      __threadfence();
      if (t == 0) atomicAdd(&attended[tile.band], 1);
    } else {
      while (t == 0 && atomicAdd(&attended[tile.band], 0) < kHeads) continue;
      __threadfence();
      __syncthreads();
      float sum = 0;
      for (int c = 0; t < kRows && c < kWidth; ++c) sum += squared[first + t * kWidth + c];
      if (t < kRows) y[tile.band * kRows + t] = sum;
    }
  }
}

bool order_is_right(int bands) {
  std::vector<int> place(bands * kGroup, -1);  // of each tile in the queue
  for (int index = 0; index < bands * kGroup; ++index) {
    const Tile t = tile_at(index, bands);
    const int at = t.band * kGroup + t.head;
    if (t.band < 0 || t.band >= bands || t.head < 0 || t.head > kHeads || place[at] >= 0) {
      std::printf("WRONG: %d bands: tile %d, head %d of band %d: none, or twice\n", bands, index, t.head, t.band);
      return false;
    }
    place[at] = index;
  }
  for (int i = 0; i < bands * bands * kHeads; ++i) {
    const int band = i / kHeads / bands, other = i / kHeads % bands, head = i % kHeads;
    const bool after = place[band * kGroup + kHeads] > place[other * kGroup + head];
    if (after == (other <= band + 1)) continue;
    std::printf("WRONG: %d bands: the rows of band %d come %s head %d of band %d\n", bands, band,
                after ? "after" : "before", head, other);
    return false;
  }
  return true;
}

bool right(int bands, int blocks) {
  const int none[kMaxBands] = {};
  std::vector<float> v(bands * kRows * kWidth), squared(v.size(), NAN), y(bands * kRows, NAN);
  for (size_t i = 0; i < v.size(); ++i) v[i] = std::sin(0.7f * i);
  CHECK(cudaMemcpyToSymbol(attended, none, sizeof none));
  CHECK(cudaMemcpyToSymbol(next, none, sizeof next));
  {
    const OnGpu gpu_v(v), gpu_squared(squared), gpu_y(y);
    dataflow<<<blocks, 32>>>(gpu_v.data, gpu_squared.data, gpu_y.data, bands);
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  for (int row = 0; row < bands * kRows; ++row) {
    double expected = 0;
    for (int c = 0; c < kWidth; ++c) expected += double(v[row * kWidth + c]) * v[row * kWidth + c];
    if (std::fabs(y[row] - expected) <= 1e-4) continue;
    std::printf("WRONG: %d bands, %d blocks: y[%d] is %g, must be %g\n", bands, blocks, row, y[row], expected);
    return false;
  }
  return true;
}

int main() {
  for (const int bands : {3, kMaxBands, 1}) {
    if (!order_is_right(bands) || !right(bands, 1) || !right(bands, 2) || !right(bands, 7)) return 1;
  }
  std::printf("all right\n");
  return 0;
}
