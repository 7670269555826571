// linear v9_split: where tiles are few, several blocks share the depth of each
//
// Idea      The gradient of GPT-2's weights has 768 × 768 outputs and a depth of 16,384: 18 tiles for 132
//           multiprocessors. So the depth is cut in parts, each part of a tile is a block's work, and its sums, not
//           rounded, go to memory. A second kernel adds up the parts in their order: two runs agree to the last bit,
//           which atomic additions would not give.
// Since v7  The schedule has parts of the depth, and sums leave as floats, straight from the registers: a row's quad of
//           lanes writes 32 bytes.
// Launch    grid min(tiles·parts, multiprocessors), block 384, as v7; then grid ⌈rows·width/1024⌉ (/256 where vectors
//           cannot be used), block 256. parts: as many as fit beside each other, at most ⌈steps of 64 / 8⌉
// Moves     (rows·depth + depth·width + rows·width + width)·sizeof(T) bytes at the least, and 2·parts·rows·width·4 of
//           sums, from the L2 cache if they fit; 2·rows·depth·width FLOPs
// Limits    as v7_persistent
#include <step3/hopper_product.h>

#include "majors.h"
#include "operands.h"
#include "rungs.h"

namespace kf::KF_BACKEND::linear {
namespace {

constexpr int kWidth = 256, kFewestSteps = 8;
constexpr int kSumThreads = 256, kSumEach = 4;
using KTile = hopper::Tile<kWidth, Major::kK, Major::kK, 1>;  // any Major: for sizes

// Sums as they are, into sums[part][rows][width].
template <class T>
struct KeepSums {
  template <class Tile>
  using Shared = hopper::Shared<Tile, T>;

  float* sums;
  int rows, width;

  template <class Tile>
  __device__ void init(Shared<Tile>&) const {}  // it has no barriers of its own
  template <class Tile>
  __device__ void prepare(Shared<Tile>&, const hopper::Schedule&) const {}  // and needs nothing else

  template <class Tile>
  __device__ void run(Shared<Tile>& shared, const hopper::Schedule& schedule, const hopper::EndMaps&, int) const {
    hopper::Consumer<Tile, Shared<Tile>> consumer(shared);
    hopper::for_each_work<Tile>(schedule, [&](const hopper::Schedule::Work& work) {
      for (int k = 0; k < work.steps; ++k) consumer.step(k > 0);
      consumer.wait();
      const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
      const int row = work.row * hopper::kRows + consumer.number * 64 + warp * 16 + lane / 4;
      const int column = work.column * kWidth + lane % 4 * 2;
      float* const to = sums + int64_t{work.part} * rows * width;
#pragma unroll
      for (int i = 0; i < kWidth / 2; i += 2) {
        const int r = row + i / 2 % 2 * 8, c = column + i / 4 * 8;
        if (r >= rows || c >= width) continue;
        float* const at = to + int64_t{r} * width + c;
        if (width % 2 == 0) {
          store_vector<2>(at, Vector<float, 2>{{consumer.sum[i], consumer.sum[i + 1]}});
        } else {
          at[0] = consumer.sum[i];
          if (c + 1 < width) at[1] = consumer.sum[i + 1];
        }
      }
    });
  }
};

// Adds up the parts of kSumEach neighbours, and the bias.
template <int kEach, class T>
__global__ void v9_sum_kernel(const float* __restrict__ sums, const T* __restrict__ bias, T* __restrict__ y,
                              int64_t outputs, int64_t width, int parts) {
  const int64_t first = (int64_t{blockIdx.x} * kSumThreads + threadIdx.x) * kEach;
  if (first >= outputs) return;
  float sum[kEach] = {};
  for (int part = 0; part < parts; ++part) {
    const auto v = load_vector<kEach>(sums + part * outputs + first);
#pragma unroll
    for (int j = 0; j < kEach; ++j) sum[j] += v.element[j];
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) sum[j] += bias_at(bias, first % width + j);  // a vector lies within a row
  store_vector<kEach>(y + first, narrow<T>(sum));
}

hopper::Schedule schedule_of(const Args& a) {
  hopper::Schedule schedule = hopper::schedule_of<KTile>(product_of(a));
  const int64_t fit = multiprocessors() / schedule.count(), most = ceil_div(schedule.steps, kFewestSteps);
  const int64_t parts = std::max<int64_t>(std::min(fit, most), 1);
  schedule.steps_a_part = static_cast<int>(ceil_div(schedule.steps, parts));
  schedule.parts = static_cast<int>(ceil_div(schedule.steps, schedule.steps_a_part));
  return schedule;
}

}  // namespace

std::string v9_split_supports(const Args& a) { return refused_by(hopper::refused_product, a); }

int64_t v9_split_scratch_bytes(const Args& a) { return schedule_of(a).parts * a.rows * a.width * 4; }

void v9_split(const Args& a, void* stream) {
  const hopper::Schedule schedule = schedule_of(a);
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto sums = static_cast<float*>(a.scratch);
    with_majors(a, [&](auto x, auto weight) {
      using Tile = hopper::Tile<kWidth, x.value, weight.value, 1, 4>;
      const KeepSums<T> keep{sums, static_cast<int>(a.rows), static_cast<int>(a.width)};
      hopper::launch_schedule<Tile, T>(product_of(a), schedule, {}, keep, stream);
    });
    const bool vectors = a.width % kSumEach == 0 && reinterpret_cast<uintptr_t>(a.y) % (kSumEach * sizeof(T)) == 0;
    const int64_t outputs = a.rows * a.width, blocks = ceil_div(outputs, kSumThreads * (vectors ? kSumEach : 1));
    const auto kernel = vectors ? v9_sum_kernel<kSumEach, T> : v9_sum_kernel<1, T>;
    kernel<<<static_cast<unsigned>(blocks), kSumThreads, 0, as_stream(stream)>>>(
        sums, static_cast<const T*>(a.bias), static_cast<T*>(a.y), outputs, a.width, schedule.parts);
  });
  check_launch();
}

}  // namespace kf::KF_BACKEND::linear
