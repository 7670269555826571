// attention_decode v4_pipeline: several steps of keys in flight
//
// Idea      A warp of v3 asks for 16 keys, waits, computes, and asks for the next: while it computes, memory has
//           nothing to do for it. Here it has asked for the next two steps before it looks at one. They wait in
//           shared memory, which cp.async fills without a register (ring.h).
// Since v3  The ring. The products' operands come from shared memory, each lane's from where it put them.
// Launch    as v3_mma, but splits: as many as leave each block a multiprocessor of its own, and room for 128 keys for
//           each, up to 64. Shared memory 8·3·16·P·4 bytes: for P = 64 columns 96 KB, two blocks a multiprocessor;
//           for P = 128 192 KB, one
// Roles     8 warps, all alike: each loads its own keys and multiplies them
// Barriers  none for the ring: a lane waits for its own groups of cp.async, and reads only what it loaded
// A stage   issue_loads, 16 keys ─ cp_async_commit ─ two steps later cp_async_wait<2> ─ read ─ the next issue_loads
// Moves     (2·B·Hkv·Sk·⌈R/16⌉ + 2·B·H·Sq)·D·2 + 4·B·H·Sq bytes and parts as v2; each byte of K and V once more into
//           shared memory and out of it; FLOPs and exponentials as v3
// Limits    as v3_mma. The memset, the parts in global memory and the last block's reading them are a fixed cost,
//           which at a thousand keys is much of the whole. Like v3 it rounds the weights
#include <step2/attention_decode/ring.h>

#include "memory_parts.h"
#include "rungs.h"

namespace kf::KF_BACKEND::attention_decode {
namespace {

constexpr int64_t kBlocks = 1;  // for each multiprocessor: one has enough in flight
template <int kColumns>
constexpr int kShared = kWarps * sizeof(WarpMemory<kColumns>);

template <int kColumns, class T>
__global__ void __launch_bounds__(kWarps* kWarpSize) v4_pipeline_kernel(Args a, Sharing sharing, int splits) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto* warps = reinterpret_cast<WarpMemory<kColumns>*>(memory);
  auto& own_memory = warps[threadIdx.x / kWarpSize];
  const int tile = static_cast<int>(blockIdx.x) / splits, split = static_cast<int>(blockIdx.x) % splits;
  const Group group(a, sharing, tile, split, splits);
  const Lane<T> lane(a, group.batch, group.kv_head);
  Attending<kColumns, T> own(a, group);
  walk(own_memory, own, a, group, [&](int stage, int first) {
    own_memory.ring.issue_loads(stage, a, lane, first, group.begin - first, group.last - first);
  });
  write_by_memory<kColumns, T>(a, sharing, group, tile, split, splits,
                               [&](int w, int row) -> RowPart<kColumns>& { return warps[w].part[row]; });
}

}  // namespace

std::string v4_pipeline_can_implement(const Args& a) {
  const std::string why_not = v3_mma_can_implement(a);
  return why_not.empty() ? fits_shared(a.head_dim <= 64 ? kShared<64> : kShared<128>) : why_not;
}

int64_t v4_pipeline_scratch_bytes(const Args& a) { return parts_bytes(a, groups_of(a), splits_of(a, kBlocks)); }

void v4_pipeline(const Args& a, void* stream) {
  with_half_type(a.dtype, [&](auto type) {
    using T = typename decltype(type)::element;
    a.head_dim <= 64 ? launch_by_memory(v4_pipeline_kernel<64, T>, kShared<64>, kBlocks, a, stream)
                     : launch_by_memory(v4_pipeline_kernel<128, T>, kShared<128>, kBlocks, a, stream);
  });
}

}  // namespace kf::KF_BACKEND::attention_decode
