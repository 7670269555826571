"""Step 2's attention_decode: its kernels under emulation, and what is around them."""

from kernel_fusion.checks.faults import Fault

KERNELS = "step2-attention/kernels/attention_decode"
TEST = "step2-attention/tests/test_decode.py"
ANY = f"{TEST}::test_one_query_over_any_number_of_keys"

FAULTS = [
    Fault(
        "parts-not-weighed",
        "parts are added as if they had the same maximum",
        f"{KERNELS}/parts.h",
        "const C weight = Base::power(part.max - base);",
        "const C weight = part.max == C(-INFINITY) ? C(0) : C(1);",
        f"{TEST}::test_each_step_may_bring_a_new_maximum[7-cpu-v1_head]",
    ),
    Fault(
        "split-beyond-the-end",
        "a block's share goes beyond the keys that exist",
        f"{KERNELS}/v2_split.cu",
        "end = min(begin + share, seen.end);",
        "end = begin + share;",
        f"{TEST}::test_each_batch_has_its_own_length[right-1-cpu-v2_split]",
    ),
    Fault(
        "first-block-finishes",
        "the block that comes first puts the parts together",
        f"{KERNELS}/parts.h",
        "last = atomicAdd(counter, 1u) == blocks - 1;",
        "last = atomicAdd(counter, 1u) == 0;",
        f"{ANY}[1023-torch.float32-cpu-v2_split]",
    ),
    Fault(
        "counters-not-cleared",
        "counters begin with what lay there",
        f"{KERNELS}/parts.h",
        "if (splits == 1) return;",
        "if (splits != 0) return;",
        f"{ANY}[1023-torch.float16-cpu-v3_mma]",
    ),
    Fault(
        "all-queries-see-all",
        "a query sees the keys of those after it",
        f"{KERNELS}/fragments.h",
        "end[r] = group.end - (static_cast<int>(a.q_length) - 1 - static_cast<int>(query_row.query));",
        "end[r] = group.end;",
        f"{TEST}::test_a_query_sees_one_key_less_than_the_next[cpu-v3_mma]",
    ),
    Fault(
        "heads-of-the-wrong-keys",
        "heads that share keys read those of another",
        f"{KERNELS}/fragments.h",
        "first_head(kv_head * sharing.heads)",
        "first_head(kv_head)",
        f"{TEST}::test_several_heads_may_share_their_keys[4-2-1-cpu-v4_pipeline]",
    ),
    Fault(
        "values-exchanged",
        "the values of two keys are paired the wrong way round",
        f"{KERNELS}/fragments.h",
        "e % 2 == 0 ? 0x5410 : 0x7632",
        "e % 2 == 0 ? 0x1054 : 0x7632",
        f"{ANY}[17-torch.float16-cpu-v3_mma]",
    ),
    Fault(
        "ring-read-too-early",
        "a step is read before its copies have come",
        f"{KERNELS}/ring.h",
        "cp_async_wait<kStages - 1>();",
        "cp_async_wait<kStages>();",
        f"{ANY}[600-torch.float16-cpu-v4_pipeline]",
    ),
    Fault(
        "part-of-the-wrong-row",
        "a block of the cluster sends its part to a place that is not the row's",
        f"{KERNELS}/cluster_parts.h",
        "RowPart<kColumns>& to = of_block[rank * (kRows >> log_blocks) + (row >> log_blocks)];",
        "RowPart<kColumns>& to = of_block[rank * (kRows >> log_blocks)];",
        f"{TEST}::test_several_queries[300-16-cpu-v5_cluster]",
    ),
    Fault(
        "page-by-page-zero",
        "each page's keys are taken from the first page of the table",
        f"{KERNELS}/v6_paged.cu",
        "return {page_of(a, group.batch, logical_page),",
        "return {page_of(a, group.batch, 0),",
        f"{TEST}::test_pages[5-16-torch.float16-cpu-v6_paged]",
    ),
]

PLAIN_FAULTS = [
    Fault(
        "begin-of-the-page",
        "plain C++ reads each page from its first key, whatever key_begin says",
        "step2-attention/cpu/attention_cpu.cpp",
        "a.table_stride + logical_page],\n              key % a.block_size, key,",
        "a.table_stride + logical_page],\n              key % 1, key,",
        f"{TEST}::test_pages[3-48-torch.float32-cpu-cpu]",
    ),
]

HOST_FAULTS = [
    Fault(
        "one-page-too-many",
        "the page after the last is taken for one of the cache",
        "step2-attention/attention_host.cpp",
        "TORCH_CHECK_VALUE(page >= 0 && page < a.blocks,",
        "TORCH_CHECK_VALUE(page >= 0 && page <= a.blocks,",
        f"{TEST}::test_a_page_that_does_not_exist[cpu-cpu]",
    ),
    Fault(
        "pages-from-the-first-key",
        "pages are looked up a page's length apart, from a first key within one: the last is not checked",
        "step2-attention/attention_host.cpp",
        "key = (key / a.block_size + 1) * a.block_size)",
        "key += a.block_size)",
        f"{TEST}::test_a_page_that_does_not_exist[cpu-cpu]",
    ),
    Fault(
        "autocast-forgets-decodes-scale",
        "under autocast `attention_decode` has its default scale",
        "step2-attention/attention_host.cpp",
        "key_end, block_table, scale, rung);\n}\n\nstd::vector<OpInfo> ops()",
        "key_end, block_table, std::nullopt, rung);\n}\n\nstd::vector<OpInfo> ops()",
        f"{TEST}::test_under_autocast_it_has_autocasts_dtype[torch.bfloat16-cpu]",
    ),
]
