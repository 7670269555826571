// attention_decode's arguments; what they mean: kernels/attention_decode/rungs.h.
#pragma once

#include <step2/attention/args.h>

namespace kf::attention_decode {

// Paged: k_stride.batch and v_stride.batch lead from page to page, and k_length is what a row of the table can hold.
struct Args : kf::attention::Args {
  const int32_t* block_table;  // or null
  int64_t table_stride;        // from a batch's row of the table to the next, in elements
  int64_t blocks;              // pages of the cache
  int64_t block_size;          // keys of a page; k_length without a table
};

}  // namespace kf::attention_decode
