// Exercise 4: where the chunks of a tile lie, so that eight rows of one chunk, and eight chunks of a row, are in other
// banks.
//
//   kernel-fusion learn check 4_swizzle
//   kernel-fusion simt exercises/solutions/4_swizzle.cu
//   nvcc -O3 -I ../common/include exercises/solutions/4_swizzle.cu && ./a.out        with a GPU
//
// Counted: shared load wavefronts, shared store wavefronts
#include <kf/exercise.h>

#include <set>

constexpr int kRows = 64, kChunks = 8;  // of 16 bytes, four banks; a row is 128 bytes, all 32 banks

// The place of a chunk in the tile: place p begins in bank 4 * (p % 8).
__host__ __device__ int place_of(int row, int chunk) {
  // SOLUTION: exchange the chunks of a row, in another order for each of eight rows
  // | return row * kChunks + chunk;
  return row * kChunks + (chunk ^ row % 8);
  // END
}

// Writes a tile by rows and reads it by columns: y[chunk][row] = x[row][chunk].
__global__ void turned(const float4* x, float4* y) {
  __shared__ float4 tile[kRows * kChunks];
  for (int i = threadIdx.x; i < kRows * kChunks; i += blockDim.x) tile[place_of(i / kChunks, i % kChunks)] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kChunks; i += blockDim.x) y[i] = tile[place_of(i % kRows, i / kRows)];
}

// The hardware moves 128 bytes at a time, eight chunks. How many different groups of banks are those at these places?
int groups(const std::vector<int>& places) {
  std::set<int> found;
  for (const int place : places) found.insert(place % 8);
  return static_cast<int>(found.size());
}

int main() {
  std::set<int> all;
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int place = place_of(row, chunk);
      if (place < 0 || place >= kRows * kChunks || !all.insert(place).second) {
        std::printf("WRONG: chunk %d of row %d lies at %d: outside, or on another one\n", chunk, row, place);
        return 1;
      }
    }
  }
  std::vector<float> x(kRows * kChunks * 4), y(kRows * kChunks * 4, NAN);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  {
    const OnGpu gpu_x(x), gpu_y(y);
    turned<<<1, 128>>>(reinterpret_cast<const float4*>(gpu_x.data), reinterpret_cast<float4*>(gpu_y.data));
    CHECK(cudaGetLastError());
    gpu_y.read(y);
  }
  for (int i = 0; i < kRows * kChunks * 4; ++i) {
    const int row = i / 4 % kRows, chunk = i / 4 / kRows;
    if (y[i] == x[(row * kChunks + chunk) * 4 + i % 4]) continue;
    std::printf("WRONG: chunk %d of row %d is %g, must be %g\n", chunk, row, y[i],
                x[(row * kChunks + chunk) * 4 + i % 4]);
    return 1;
  }
  for (int first = 0; first < kRows; first += 8) {
    for (int i = 0; i < 8; ++i) {
      std::vector<int> column, row;
      for (int j = 0; j < 8; ++j) column.push_back(place_of(first + j, i)), row.push_back(place_of(first + i, j));
      if (groups(row) == 8 && groups(column) == 8) continue;
      const bool by_rows = groups(row) != 8;
      std::printf("WRONG: eight chunks of %s %d lie in %d groups of banks, not in 8\n", by_rows ? "row" : "column",
                  by_rows ? first + i : i, by_rows ? groups(row) : groups(column));
      return 1;
    }
  }
  std::printf("all right\n");
  return 0;
}
