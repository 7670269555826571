// attention_decode v5_cluster: one launch, and the parts never leave the chip
//
// Idea      The blocks that share a kv head's keys form a cluster. They run at the same time and can write into each
//           other's shared memory, so the parts need neither global memory nor counters: each block sends its part of
//           a row to the block that owns the row, and after a barrier of the cluster that puts them together, in the
//           order of their ranks.
// Since v4  No memset before the launch, no scratch, no atomics; who comes last does not matter. At most 8 splits.
// Launch    grid (⌈R/16⌉·splits, Hkv, B) with R = H/Hkv·Sq rows, block 256, clusters of `splits`: 1, 2, 4 or 8, as
//           many as leave each block a multiprocessor of its own, with room for 128 keys each. Shared memory as v4
//           and 16·(P + 4)·4 bytes more
// Roles     as v4; and each block puts together the rows r with r mod splits = its rank
// Barriers  for the ring none, as v4. Of the cluster two: arrived at when a block begins, and waited for before it
//           sends, so that all blocks are there; then when all have sent
// A stage   as v4's
// Moves     (2·B·Hkv·Sk·⌈R/16⌉ + 2·B·H·Sq)·D·2 + 4·B·H·Sq bytes; 64·B·Hkv·⌈R/16⌉·Sk·P FLOPs; exponentials as v1
// Limits    as v3_mma, but compute capability 9.0. A single text of a single kv head keeps 8 multiprocessors busy.
//           Like v3 it rounds the weights
#include "cluster_parts.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_decode {
namespace {

template <int kColumns, class T>
__global__ void __launch_bounds__(kWarps* kWarpSize) v5_cluster_kernel(Args a, Sharing sharing) {
  extern __shared__ __align__(128) unsigned char memory[];
  cluster_barrier_arrive_relaxed();  // waited for before a block writes into another's memory
  auto& shared = *reinterpret_cast<ClusterMemory<kColumns>*>(memory);
  auto& own_memory = shared.of_warp[threadIdx.x / kWarpSize];
  const Group group = group_of_cluster(a, sharing);
  const Lane<T> lane(a, group.batch, group.kv_head);
  Attending<kColumns, T> own(a, group);
  walk(own_memory, own, a, group, [&](int stage, int first) {
    own_memory.ring.issue_loads(stage, a, lane, first, group.begin - first, group.last - first);
  });
  shared.template write<T>(a, group);
}

}  // namespace

std::string v5_cluster_can_implement(const Args& a) {
  if (a.block_table != nullptr) return "takes no `block_table`";
  return in_clusters(a);
}

void v5_cluster(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    a.head_dim <= 64 ? launch_clusters<64>(v5_cluster_kernel<64, T>, a, stream)
                     : launch_clusters<128>(v5_cluster_kernel<128, T>, a, stream);
  });
}

}  // namespace kf::KF_BACKEND::attention_decode
