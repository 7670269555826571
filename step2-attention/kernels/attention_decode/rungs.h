// attention_decode: attention of a text's last queries over a cache of keys; q [B, H, Sq, D], 1 to 16 queries, the
// cache [B, Hkv, Sk, D].
//
// In batch b the keys key_begin[b] ≤ j < key_end[b] exist, and the last query is that of the last key: query i sees
// keys j < key_end[b] − (Sq − 1 − i). Lengths are read on the device, so that a CUDA graph can be replayed with others.
// Paged: with block_table [B, pages] the cache is a heap of pages, [blocks, Hkv, block_size, D], and key j of batch b
// is key j % block_size of page block_table[b][j / block_size]. A page that does not exist gives NaN. Output,
// log-sum-exp, scale and shared heads are attention's, see ../attention/rungs.h.
#pragma once

#include "../attention/rungs.h"

namespace kf::attention_decode {

constexpr int kMostQueries = 16;

// Paged: k_stride.batch and v_stride.batch lead from page to page, and k_length is what a row of the table can hold.
struct Args : kf::attention::Args {
  const int32_t* block_table;  // or null
  int64_t table_stride;        // from a batch's row of the table to the next, in elements
  int64_t blocks;              // pages of the cache
  int64_t block_size;          // keys of a page; k_length without a table
};

}  // namespace kf::attention_decode

#ifdef KF_BACKEND
namespace kf::KF_BACKEND::attention_decode {
using kf::attention_decode::Args;
void v1_head(const Args& args, void* stream);
void v2_split(const Args& args, void* stream);
void v3_mma(const Args& args, void* stream);
void v4_pipeline(const Args& args, void* stream);
void v5_cluster(const Args& args, void* stream);
void v6_paged(const Args& args, void* stream);

std::string v1_head_can_implement(const Args& args);
std::string v2_split_can_implement(const Args& args);
std::string v3_mma_can_implement(const Args& args);
std::string v4_pipeline_can_implement(const Args& args);
std::string v5_cluster_can_implement(const Args& args);
std::string v6_paged_can_implement(const Args& args);

int64_t v2_split_scratch(const Args& args);
int64_t v3_mma_scratch(const Args& args);
int64_t v4_pipeline_scratch(const Args& args);
}  // namespace kf::KF_BACKEND::attention_decode
#endif

namespace kf::emulated::attention_decode {
Rungs<kf::attention_decode::Args> rungs();
}
namespace kf::gpu::attention_decode {
#ifdef KF_WITH_CUDA
Rungs<kf::attention_decode::Args> rungs();
#else
inline Rungs<kf::attention_decode::Args> rungs() { return {}; }
#endif
}  // namespace kf::gpu::attention_decode
