// attention_decode v3_mma: all queries that share keys in one product
//
// Idea      Several queries (a text's last ones, or those of heads that share their keys) read the same cache. As the
//           rows of one product they read it once, and 16 rows cost the tensor cores what one does. Each warp loads
//           keys and values straight into the registers of its products (fragments.h) and keeps 16 online softmaxes.
// Since v2  The products; a block has all rows of a kv head, up to 16 of them, and not one row.
// Launch    grid (⌈R/16⌉·splits, Hkv, B) with R = H/Hkv·Sq rows, block 256; splits: as many as give 2 blocks a
//           multiprocessor, with room for 128 keys each, up to 64. Shared memory 8·16·(P + 4)·4 bytes, P = 64 or 128
//           columns: 34 or 66 KB. Before it, a memset for the counters
// Moves     (2·B·Hkv·Sk·⌈R/16⌉ + 2·B·H·Sq)·D·2 + 4·B·H·Sq bytes and parts as v2; 64·B·Hkv·⌈R/16⌉·Sk·P FLOPs, however
//           few rows there are; exponentials as v1
// Limits    float16, bfloat16; D a multiple of 8 up to 128; rows that begin at multiples of 16 bytes; no block_table;
//           Sk ≤ 2³⁰; B, H ≤ 65535; compute capability 8.0. While a warp computes, it has asked memory for nothing. A
//           value that is not finite reaches the queries before its own, as 0 times it. For the second product it
//           rounds the weights
#include "memory_parts.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_decode {
namespace {

constexpr int64_t kBlocks = 2;  // for each multiprocessor
template <int kColumns>
constexpr int kShared = kWarps * kRows * sizeof(RowPart<kColumns>);

template <int kColumns, class T>
__global__ void __launch_bounds__(kWarps* kWarpSize) v3_mma_kernel(Args a, Sharing sharing, int splits) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* part = reinterpret_cast<RowPart<kColumns>*>(memory);
  const int tile = static_cast<int>(blockIdx.x) / splits, split = static_cast<int>(blockIdx.x) % splits;
  const Group group(a, sharing, tile, split, splits);
  const Lane<T> lane(a, group.batch, group.kv_head);
  const float scale_log2 = static_cast<float>(a.scale * kLog2e);
  const int warp = threadIdx.x / kWarpSize;

  Attending<kColumns, T> own(a, group);
  for (int first = group.first + warp * kKeys; first < group.last; first += kWarps * kKeys) {
    Tile<kColumns> tile;
    const auto load = [&](int index, const uint32_t* from, bool wanted) {
      tile.vector[index] = {};
      if (wanted) tile.vector[index] = load_vector<4>(from);
    };
    lane.template each<kColumns>(a, first, group.begin - first, group.last - first, load);
    own.take(tile, scale_log2, first, group.begin);
  }
  own.leave(part + warp * kRows);
  write_by_memory<kColumns, T>(a, sharing, group, tile, split, splits,
                               [&](int w, int row) -> RowPart<kColumns>& { return part[w * kRows + row]; });
}

}  // namespace

std::string v3_mma_can_implement(const Args& a) {
  if (a.block_table != nullptr) return "takes no `block_table`";
  const std::string why_not = in_fragments(a);
  return why_not.empty() ? fits_shared(a.head_dim <= 64 ? kShared<64> : kShared<128>) : why_not;
}

int64_t v3_mma_scratch_bytes(const Args& a) { return parts_bytes(a, groups_of(a), splits_of(a, kBlocks)); }

void v3_mma(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    a.head_dim <= 64 ? launch_by_memory(v3_mma_kernel<64, T>, kShared<64>, kBlocks, a, stream)
                     : launch_by_memory(v3_mma_kernel<128, T>, kShared<128>, kBlocks, a, stream);
  });
}

}  // namespace kf::KF_BACKEND::attention_decode
