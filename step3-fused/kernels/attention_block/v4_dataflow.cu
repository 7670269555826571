// attention_block v4_dataflow: one launch, whose parts run side by side
//
// Idea      Attention alone leaves the tensor cores idle most of the time: it waits for exponentials. A projection has
//           use for them, and all that it needs is rows of which every head is done. So blocks stay, one for each
//           multiprocessor, and their warpgroups have different work: three attend, one projects. Counters in memory,
//           one for 64 rows, say what is there (order.h).
// Since     pieces: one launch. Each part goes through all of the problem in one order, and follows the part before:
//
//             warpgroups 0 to 2  attend: 192 rows of a head at a time    │ normalise what is left,
//             warpgroup 3              project: 64 rows × 128 columns    │ a few rows a warp
//             warpgroup 4        loads for the one, loads for the other, stores sums: a warp and two threads
//
//           Where the projection waits for rows, its weights are loaded meanwhile. The residual comes to the stage in
//           which the sum is put together. Sums are stored by another thread: who multiplies waits for stages only
// Launch    a memset of the counters; grid multiprocessors, block 640: 112 registers for who attends or projects, 32
//           for the others; 217 KB of shared memory: queries 24, keys and values 3 · 16, the projection 6 · 24
// Barriers  attention: q_full of each warpgroup, k_pipe.full, v_pipe.full: 1 arrival and the bytes; q_empty: 1, its
//           leader's; k_pipe.empty, v_pipe.empty: 3, the leaders'; v_raw: 1 and the bytes of a tile with padding.
//           Projection: pipe.full: 1 and the bytes; pipe.empty: 1, the leader's, or, of a stage with a sum, the storing
//           thread's. summed: 4, a lane's of each warp; stored: 1
// A stage   of the projection's: empty ─ producer_acquire ─ weights, then rows ─ full ─ product ─ empty. The one behind
//           a tile's: … residual and bias ─ full ─ the sum is put together in it ─ summed ─ TMA stores it ─ empty, and
//           stored
// Moves     6·batch·q_length·width·sizeof(T) bytes at the least, width = heads·head_dim: q, k, v, residual, sum and y;
//           what lies between stays in the L2 cache if it can. From there (1/64 + 1/128)·rows·width² elements for the
//           projection: 0.9 GB at 32 · 1024 rows of 768, twice what linear's tiles of 128 × 256 read. FLOPs as v1.
//           What the way back wants besides attention's output is 4·(heads + 2)·batch·q_length bytes more
// Limits    compute capability 9.0; float16 and bfloat16; head_dim a multiple of 8 up to 64, width up to 2048; one key
//           at the least; a scale above 0; none of attention's weights dropped, whose numbers would have no registers;
//           q, k and v as step 2's rungs on tensor cores take them, all others at multiples of 16 bytes. Side by side
//           both take longer, attention half as long again, and rows wait for the end: pieces are as fast or faster.
//           It rounds attention's weights, its output and the sum
#include <kf/best.h>
#include <kf/launch.h>
#include <step3/step2_attention.h>

#include "attend.h"
#include "normalize.h"
#include "project.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {
namespace {

constexpr int kMostVectors = 8;  // of a row, that a lane normalises
constexpr int kThreads = (kAttenders + 2) * kWarpgroupSize;
// 640 threads begin with 96 registers each; together no more than that.
constexpr int kAttendRegisters = 112, kProjectRegisters = 112, kOtherRegisters = 32;
static_assert(kAttenders * kAttendRegisters + kProjectRegisters + kOtherRegisters <= (kAttenders + 2) * 96);

template <class T>
struct Shared {
  AttendShared<T> attend;
  alignas(1024) ProjectShared<T> project;
};

struct Maps {
  attention::Maps attend;
  ProjectMaps project;
};

template <int kVectors, bool kDrops, class T>
__global__ void __launch_bounds__(kThreads, 1)
    v4_dataflow_kernel(const attention::Args a, const __grid_constant__ Maps maps, const Order order,
                       const Counters counters, const T* proj_bias, const ElementwiseDropout<float> dropout,
                       const Norm<T> norm) {
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(memory);
  if (threadIdx.x == 0) {
    shared.attend.init();
    shared.project.init();
    mbarrier_init_fence();
  }
  __syncthreads();

  const int warpgroup = warpgroup_of_block();
  if (warpgroup < kAttenders) {
    warpgroup_reg_alloc<kAttendRegisters>();
    attend(shared.attend, a, order, counters);
    Normalize<kVectors, T>{norm}.run(order, counters);
  } else if (warpgroup == kAttenders) {
    warpgroup_reg_alloc<kProjectRegisters>();
    Project<kDrops, T>(shared.project, norm.rows, norm.width, dropout, kAttenders).run();
    Normalize<kVectors, T>{norm}.run(order, counters);
  } else {
    warpgroup_reg_dealloc<kOtherRegisters>();
    const int thread = threadIdx.x % kWarpgroupSize;
    if (thread < kWarpSize) produce_attention(shared.attend, a, order, counters, maps.attend);
    if (thread == kWarpSize) {
      ProjectProducer<T>{shared.project, maps.project, order, counters, proj_bias, norm.width, {}}.run();
    }
    if (thread == 2 * kWarpSize) store_sums(shared.project, maps.project, order, counters);
  }
}

Order order_of(const Args& a) {
  const Attention& t = a.attention;
  return {t.batch, t.heads, t.q_length, t.heads * t.head_dim};
}

// Of scratch memory, before the counters: attention's output, where nobody else wants it.
int64_t bytes_before_counters(const Args& a) {
  return a.attended == nullptr ? attended_bytes(a.attention, a.dtype) : 0;
}

template <int kVectors, bool kDrops, class T>
void launch(const Args& a, void* stream) {
  const Attention& t = a.attention;
  const Order order = order_of(a);
  const Counters counters(static_cast<unsigned char*>(a.scratch) + bytes_before_counters(a), order);
  check(cudaMemsetAsync(counters.drawn_attention, 0, static_cast<size_t>(Counters::bytes(order)), as_stream(stream)),
        "cudaMemsetAsync");
  void* const attended = a.attended == nullptr ? a.scratch : a.attended;
  const attention::Args attention = attention_args(t, a.dtype, attended, t.lse);
  const Maps maps{attention::maps_of<T>(attention, kKeys), project_maps<T>(a, attended)};
  const ElementwiseDropout<float> dropout{{a.rng_state, a.seed, a.offset}, a.threshold, keep_scale<float>(a.threshold)};
  const Norm<T> norm{static_cast<const T*>(a.weight),
                     static_cast<const T*>(a.bias),
                     static_cast<const T*>(a.sum),
                     static_cast<T*>(a.y),
                     static_cast<float*>(a.mean),
                     static_cast<float*>(a.rstd),
                     static_cast<int>(t.heads * t.head_dim),
                     static_cast<int>(t.q_length),
                     static_cast<float>(a.eps)};
  const auto kernel = v4_dataflow_kernel<kVectors, kDrops, T>;
  allow_shared(kernel, sizeof(Shared<T>));
  kernel<<<static_cast<unsigned>(multiprocessors()), kThreads, sizeof(Shared<T>), as_stream(stream)>>>(
      attention, maps, order, counters, static_cast<const T*>(a.proj_bias), dropout, norm);
  check_launch();
}

}  // namespace

std::string v4_dataflow_can_implement(const Args& a) {
  const Attention& t = a.attention;
  if (t.cu_seqlens != nullptr) return kf::attention_block::kNoPackedRows;
  const int64_t width = t.heads * t.head_dim;
  const std::string why_not = attention::on_hopper(attention_args(t, a.dtype, nullptr, nullptr), kGroupRows);
  if (!why_not.empty()) return why_not;
  if (t.k_length == 0) return "takes one key at the least";
  if (t.head_dim > kHeadColumns) return "takes head_dim ≤ 64, got " + std::to_string(t.head_dim);
  if (width > kMostVectors * kWarpSize * 8) return "takes heads·head_dim ≤ 2048, got " + std::to_string(width);
  if (t.threshold != 0) return "drops none of attention's weights: it takes an `attention_dropout_p` of 0";
  if (!aligned_16(a.residual, a.proj_weight, a.proj_bias, a.weight, a.bias, a.sum, a.y, a.attended)) {
    return "takes residual, parameters and outputs that begin at multiples of 16 bytes";
  }
  return "";
}

int64_t v4_dataflow_scratch_bytes(const Args& a) { return bytes_before_counters(a) + Counters::bytes(order_of(a)); }

void v4_dataflow(const Args& a, void* stream) {
  const int64_t vectors = ceil_div(a.attention.heads * a.attention.head_dim, kWarpSize * 8);
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    const auto launch_rows = [&](auto drops) {
      constexpr bool kDrops = decltype(drops)::value;
      if (vectors <= 3) return launch<3, kDrops, T>(a, stream);
      if (vectors <= 4) return launch<4, kDrops, T>(a, stream);
      launch<kMostVectors, kDrops, T>(a, stream);
    };
    a.threshold == 0 ? launch_rows(std::false_type{}) : launch_rows(std::true_type{});
  });
}

}  // namespace kf::KF_BACKEND::attention_block
