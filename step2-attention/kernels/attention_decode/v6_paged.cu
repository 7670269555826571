// attention_decode v6_paged: the cache is a heap of pages
//
// Idea      Texts of unknown length, one piece of memory each, waste most of it. So the cache is cut into pages of
//           some keys each, and a table says which pages are a text's, as an operating system does it
//           (PagedAttention, Kwon et al., https://arxiv.org/abs/2309.06180). 16 keys of a warp's step lie in one
//           page; where that is must be known before they can be asked for. So the table is read one step before the
//           keys.
// Since v5  The pages. Without a table the whole cache of a batch is one page.
// Launch    as v5_cluster
// Roles     as v5
// Barriers  as v5
// A stage   its page is looked up ─ a step later issue_loads, 16 keys, or NaN where there is no page ─ on as v4's
// Moves     (2·B·Hkv·Sk·⌈R/16⌉ + 2·B·H·Sq)·D·2 + 4·B·H·Sq bytes, and 4 of the table for each 16 keys; FLOPs and
//           exponentials as v5
// Limits    as v5_cluster, but with a block_table, if block_size is a multiple of 16. Like v3 it rounds the weights
#include "cluster_parts.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_decode {
namespace {

// A page, and how far into it a step begins.
struct Spot {
  int64_t page;  // negative: does not exist
  int row;
};

// Where the 16 keys from `key` on lie; anywhere, if they are none of this block's.
__device__ Spot find(const Args& a, const Group& group, int key) {
  if (key >= group.last) return {0, 0};
  const auto size = static_cast<unsigned>(a.block_size);
  const unsigned logical_page = a.block_table == nullptr ? 0 : key / size;
  return {page_of(a, group.batch, logical_page), key - static_cast<int>(logical_page * size)};
}

template <int kColumns, class T>
__global__ void __launch_bounds__(kWarps* kWarpSize) v6_paged_kernel(Args a, Sharing sharing) {
  extern __shared__ __align__(128) unsigned char memory[];
  cluster_barrier_arrive_relaxed();
  auto& shared = *reinterpret_cast<ClusterMemory<kColumns>*>(memory);
  auto& own_memory = shared.of_warp[threadIdx.x / kWarpSize];
  const Group group = group_of_cluster(a, sharing);
  Attending<kColumns, T> own(a, group);
  Spot spot = find(a, group, group.first + static_cast<int>(threadIdx.x / kWarpSize) * kKeys);
  walk(own_memory, own, a, group, [&](int stage, int first) {
    if (spot.page < 0) {
      own_memory.ring.no_keys(stage);
    } else {
      const Lane<T> lane(a, spot.page, group.kv_head);
      own_memory.ring.issue_loads(stage, a, lane, spot.row, group.begin - first, group.last - first);
    }
    spot = find(a, group, first + kWarps * kKeys);
  });
  shared.template write<T>(a, group);
}

}  // namespace

std::string v6_paged_can_implement(const Args& a) {
  if (a.block_table != nullptr && a.block_size % kKeys != 0) {
    return "takes a block_size that is a multiple of 16, got " + std::to_string(a.block_size);
  }
  return in_clusters(a);
}

void v6_paged(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    a.head_dim <= 64 ? launch_clusters<64>(v6_paged_kernel<64, T>, a, stream)
                     : launch_clusters<128>(v6_paged_kernel<128, T>, a, stream);
  });
}

}  // namespace kf::KF_BACKEND::attention_decode
