// attention_block v5_cluster: the heads of a few rows in one cluster, for problems that are small
//
// Idea      With few rows the launches and the waits between them cost more than the work. So one launch again, as v2:
//           who has all heads of a row can project and normalise it. But the heads are divided among the blocks of a
//           cluster. Each attends for its heads, sends every block a copy of its part of the rows, projects its part of
//           the columns, and sends what it knows of the rows' mean and variance.
//
//             block 0   heads 0, 1    ─┐ rows   columns 0 … 127     ─┐ mean,   normalise
//             block 1   heads 2, 3    ─┼─────►  columns 128 … 255   ─┼──────►  normalise
//             block 2   heads 4, 5    ─┘        columns 256 … 383   ─┘ spread  normalise
//
// Since v2  Tensor cores by mma, for all GPUs since compute capability 8.0: before 9.0 a cluster is a single block. The
//           rows are of half types. The weight is read once a cluster, not once for each 16 rows of a block
// Launch    grid batch·⌈q_length/R⌉ clusters of up to 16 blocks of 256 threads (128 where shared memory is small); R =
//           32 or 16. Shared memory: rows R·(width + 8)·2 bytes; for each warp two places of 32 keys and values, 8 to
//           8.5 KB, and in the same place, later, the sums, R·(columns + 4)·4 bytes for each part of the depth
// Moves     4·batch·q_length·width·sizeof(T) bytes once, width = heads·head_dim: q, residual, sum and y. And, mostly
//           from L2, for each R rows all keys and values that one of them sees, and the width² weights. FLOPs as v1
// Limits    float16 and bfloat16; head_dim a multiple of 8 up to 64; a scale above 0; rows at multiples of 16 bytes; 16
//           rows must fit into shared memory. For each 32 rows keys, values and weights come from L2 again: with many
//           rows v3 is faster. It rounds attention's weights and its output
#include <kf/best.h>
#include <kf/launch.h>
#include <step3/step2_attention.h>

#include "cluster_shares.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_block {
namespace {

template <int kTiles, bool kDropout, class T>
__global__ void __launch_bounds__(256, 1)
    v5_cluster_kernel(const attention_decode::Args a, const Rest<T> rest, const Shares shares) {
  constexpr int kRows = 16 * kTiles;
  extern __shared__ __align__(128) unsigned char memory[];
  const int width = rest.width, stride = row_stride_of(width), head_dim = static_cast<int>(a.head_dim);
  auto& header = *reinterpret_cast<Header<kRows>*>(memory);
  T* const rows = reinterpret_cast<T*>(memory + sizeof header);
  auto* const ring = reinterpret_cast<KeyPlace<kRows>*>(memory + sizeof header + rows_bytes(kRows, width));
  float* const sums = reinterpret_cast<float*>(ring);

  const int blocks = shares.blocks, rank = static_cast<int>(blockIdx.x % blocks);
  const int cluster = static_cast<int>(blockIdx.x / blocks), batch = cluster / shares.clusters_a_batch;
  // Under causality the last rows see most: first.
  const int first_row = (shares.clusters_a_batch - 1 - cluster % shares.clusters_a_batch) * kRows;
  const int first_head = rank * shares.heads, heads = min(shares.heads, static_cast<int>(a.heads) - first_head);
  const attention::BlockOfQueries block(a, batch * a.heads + first_head, first_row, kRows);
  const int64_t first_of_batch = batch * a.q_length + first_row;  // this block's first row among all

  if (blocks > 1) {
    if (threadIdx.x == 0) {
      mbarrier_init(&header.rows_arrived, 1);
      mbarrier_init(&header.shares_arrived, 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect(&header.rows_arrived, kRows * width * static_cast<int>(sizeof(T)));
      mbarrier_arrive_expect(&header.shares_arrived, blocks * kRows * static_cast<int>(sizeof(RowShare)));
    }
    __syncthreads();
    cluster_barrier_arrive_relaxed();
  }

  // The queries lie where their outputs will.
  const int chunks = head_dim / 8;
  for (int i = threadIdx.x; i < kRows * heads * chunks; i += blockDim.x) {
    const int row = i / (heads * chunks), head = first_head + i / chunks % heads, column = i % chunks * 8;
    const T* const from = static_cast<const T*>(a.q) + batch * a.q_stride.batch + head * a.q_stride.head +
                          min(first_row + row, static_cast<int>(a.q_length) - 1) * a.q_stride.seq + column;
    cp_async_16(rows + row * stride + head * head_dim + column, from, row < block.queries ? 16 : 0);
  }
  cp_async_commit();
  if (width % 16 != 0 && threadIdx.x < kRows) {  // a product's last step reads 16 columns
    store_vector(rows + threadIdx.x * stride + width, Vector<T, 8>{});
  }

  BlockAttention<kTiles, kDropout, T> attending{a, ring, rows, stride, first_head, heads, batch, block};
  attending.begin();
  if (blocks > 1) cluster_barrier_wait();  // the others have begun: they may be written to
  attending.run([&](int head, int row, int column, const float(&out)[8], float lse) {
    if (column >= head_dim) return;
    const Vector<T, 8> eight = narrow<T>(out);
    T* const place = rows + row * stride + head * head_dim + column;
    if (blocks == 1) {
      store_vector(place, eight);
    } else {
      uint32_t words[4];
      memcpy(words, &eight, sizeof words);
      for (int b = 0; b < blocks; ++b) {
        store_remote_async(remote_address(place, b), words, remote_address(&header.rows_arrived, b));
      }
    }
    if (row >= block.queries) return;
    if (rest.attended != nullptr) {
      store_vector(rest.attended + (first_of_batch + row) * width + head * head_dim + column, eight);
    }
    if (a.lse != nullptr && column == 0) {
      static_cast<float*>(a.lse)[(batch * a.heads + head) * a.q_length + first_row + row] = lse;
    }
  });

  // This block's columns of the projection.
  const int first_column = rank * shares.groups * kGroup;
  const int columns = max(0, min(width - first_column, shares.groups * kGroup));
  const int groups = (columns + kGroup - 1) / kGroup, parts = shares.depth_parts(), sum_stride = shares.sum_stride();
  const int steps = (width + 15) / 16, steps_of_part = (steps + parts - 1) / parts, warps = blockDim.x / kWarpSize;
  for (int unit = threadIdx.x / kWarpSize; unit < groups * parts; unit += warps) {
    const int group = unit / parts, part = unit % parts;
    WarpProjection<kTiles, T> own(rest.proj_weight, width, first_column + group * kGroup, part * steps_of_part,
                                  min((part + 1) * steps_of_part, steps));
    if (blocks > 1) mbarrier_wait_cluster(&header.rows_arrived, 0);
    own.run(rows, stride);
    own.leave(sums + part * kRows * sum_stride + group * kGroup, sum_stride);
  }
  if (blocks > 1) mbarrier_wait_cluster(&header.rows_arrived, 0);  // also where there was no work: others write here
  __syncthreads();

  RowEnd<kTiles, T>{rest, header.share, sums, sum_stride, parts, blocks, rank, first_column, columns}.run(
      first_of_batch, block.queries, &header.shares_arrived);
}

attention_decode::Args attention_of(const Args& a) {
  attention_decode::Args args{};
  static_cast<kf::attention::Args&>(args) = attention_args(a.attention, a.dtype, nullptr, a.attention.lse);
  return args;
}

template <int kTiles, bool kDropout, class T>
void launch(const Args& a, const Shares& shares, void* stream) {
  const Attention& t = a.attention;
  const int64_t width = t.heads * t.head_dim, bytes = shared_bytes(shares, width);
  const Rest<T> rest{static_cast<const T*>(a.residual),
                     static_cast<const T*>(a.proj_weight),
                     static_cast<const T*>(a.proj_bias),
                     static_cast<const T*>(a.weight),
                     static_cast<const T*>(a.bias),
                     static_cast<T*>(a.y),
                     static_cast<T*>(a.sum),
                     static_cast<T*>(a.attended),
                     kept_of<T>(a),
                     {{a.state, a.seed, a.offset}, a.threshold, keep_scale<float>(a.threshold)},
                     static_cast<int>(width),
                     static_cast<float>(a.eps)};
  const auto kernel = v5_cluster_kernel<kTiles, kDropout, T>;
  const dim3 grid(static_cast<unsigned>(t.batch * shares.clusters_a_batch * shares.blocks));
  const int threads = shares.warps * kWarpSize;
  if (shares.blocks > 1) {
    launch_in_clusters(kernel, shares.blocks, grid, threads, bytes, stream, attention_of(a), rest, shares);
  } else {
    allow_shared(kernel, bytes);
    kernel<<<grid, threads, static_cast<size_t>(bytes), as_stream(stream)>>>(attention_of(a), rest, shares);
  }
  check_launch();
}

}  // namespace

std::string v5_cluster_supports(const Args& a) {
  const Attention& t = a.attention;
  const int64_t width = t.heads * t.head_dim;
  const std::string refused = attention::on_tensor_cores(attention_of(a), 16);
  if (!refused.empty()) return refused;
  if (t.head_dim > kHeadColumns) return "takes head_dim ≤ 64, got " + std::to_string(t.head_dim);
  if (!attention::is_above_0(t.scale)) return "takes a scale above 0, got " + std::to_string(t.scale);
  if (!aligned_16(a.residual, a.proj_weight, a.proj_bias, a.weight, a.bias, a.sum, a.y)) {
    return "takes residual, parameters, sum and y that begin at multiples of 16 bytes";
  }
  if (shares_of(a).blocks == 0) {
    return too_much_shared_memory(shared_bytes(shares_with(t, 1, 4, ceil_div(t.heads, most_blocks())), width),
                                  "16 rows of heads·head_dim = " + std::to_string(width) + " numbers");
  }
  return "";
}

void v5_cluster(const Args& a, void* stream) {
  const Shares shares = shares_of(a);
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    attention::with_dropout(attention_of(a), [&](auto drops) {
      constexpr bool kDropout = decltype(drops)::value;
      shares.row_tiles == 2 ? launch<2, kDropout, T>(a, shares, stream) : launch<1, kDropout, T>(a, shares, stream);
    });
  });
}

}  // namespace kf::KF_BACKEND::attention_block
