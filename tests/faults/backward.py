"""Step 2's attention_backward: its kernels under emulation, and what is around them."""

from faults import Fault

KERNELS = "step2-attention/kernels/attention_backward"
HOST = "step2-attention/attention_host.cpp"
PLAIN = "step2-attention/attention_backward_cpu.cpp"
PYTHON = "step2-attention/step2_attention/__init__.py"
TEST = "step2-attention/test_attention_backward.py"
ANY = f"{TEST}::test_gradients_of_any_length"
FORWARD = "step2-attention/test_attention.py"
PADDED = f"{FORWARD}::test_gradient_of_attention_with_padding_and_shared_keys_and_of_its_log_sum_exp"

FAULTS = [
    Fault(
        "delta-lost",
        "the gradient of the scores lacks softmax's second term",
        f"{KERNELS}/v1_naive.cu",
        "weight * (factor * grad_weight - delta[row])",
        "weight * (factor * grad_weight)",
        f"{ANY}[31-full-torch.float32-cpu-v1_naive]",
    ),
    Fault(
        "delta-without-the-log-sum-exp",
        "from v2 on the gradient of the log-sum-exp is lost",
        f"{KERNELS}/delta.h",
        "sum -= static_cast<const float*>(a.grad_lse)[place];",
        "sum -= 0;",
        f"{ANY}[31-full-torch.float32-cpu-v2_tiled]",
    ),
    Fault(
        "first-query-too-early",
        "a key's first query is found as if q and k were equally long",
        f"{KERNELS}/pairs.h",
        "key - (a.k_length - a.q_length)) : 0;",
        "key) : 0;",
        f"{TEST}::test_gradients_between_different_lengths[64-65-causal-cpu-v1_naive]",
    ),
    Fault(
        "block-of-padding-and-keys-left-out",
        "a block whose first key is padding is taken for one of padding alone",
        f"{KERNELS}/roles.h",
        "walked = partners_of(exist.begin);",
        "walked = partners_of(first);",
        f"{TEST}::test_only_keys_that_exist_take_part[left-full-cpu-v3_mma]",
    ),
    Fault(
        "minus-infinity-subtracted",
        "scores of minus infinity meet a log-sum-exp of minus infinity",
        f"{KERNELS}/pairs.h",
        "return lse == C(-INFINITY) ? C(INFINITY) : lse;",
        "return lse;",
        f"{TEST}::test_a_query_whose_scores_are_minus_infinity_has_no_gradient[cpu-v2_tiled]",
    ),
    Fault(
        "keys-of-one-head-only",
        "keys get the gradient of the first head that reads them",
        f"{KERNELS}/roles.h",
        "return kOwnsKeys ? (head + 1) * group : head + 1;",
        "return first_head() + 1;",
        f"{TEST}::test_heads_that_share_their_keys_add_to_one_gradient[4-2-full-cpu-v2_tiled]",
    ),
    Fault(
        "tile-overwritten-too-early-2",
        "a tile is overwritten while others still read it",
        f"{KERNELS}/v2_tiled.cu",
        "      __syncthreads();  // nobody reads the tile before any more\n",
        "",
        f"{TEST}::test_emulated_threads_may_run_in_any_order[random:1]",
    ),
    Fault(
        "log-sum-exp-of-the-neighbour",
        "two columns get the log-sum-exp of the first of them",
        f"{KERNELS}/v3_mma.cu",
        "kOwnsKeys ? shared.lse[column] : own_lse[r];",
        "kOwnsKeys ? shared.lse[column - e] : own_lse[r];",
        f"{ANY}[33-full-torch.bfloat16-cpu-v3_mma]",
    ),
    Fault(
        "mask-on-the-weights-only",
        "the gradients of scores are left as they are where nothing is seen",
        f"{KERNELS}/v3_mma.cu",
        "g[e] = paired ? w[e]",
        "g[e] = true ? w[e]",
        f"{TEST}::test_only_keys_that_exist_take_part[both-full-cpu-v3_mma]",
    ),
    Fault(
        "weights-for-their-gradients",
        "dk is the sum of the weights, not of the scores' gradients",
        f"{KERNELS}/v3_mma.cu",
        "mma_m16n8k16<T>(da[n], grad_score[row / 16], {other[0], other[1]});",
        "mma_m16n8k16<T>(da[n], weight[row / 16], {other[0], other[1]});",
        f"{ANY}[33-causal-torch.float16-cpu-v3_mma]",
    ),
    Fault(
        "padding-of-keys-not-cleared",
        "what lies behind the last key is multiplied by 0",
        f"{KERNELS}/hopper.h",
        "clear(shared.x[place], end, S::kTile);",
        "clear(shared.x[place], S::kTile, S::kTile);",
        f"{TEST}::test_only_keys_that_exist_take_part[both-full-cpu-v4_warpgroups]",
    ),
    Fault(
        "queries-beyond-the-last",
        "queries that do not exist get a log-sum-exp that is no number",
        f"{KERNELS}/delta.h",
        "static_cast<float>(kLog2e) : INFINITY;",
        "static_cast<float>(kLog2e) : NAN;",
        f"{ANY}[33-full-torch.bfloat16-cpu-v4_warpgroups]",
    ),
    Fault(
        "tile-with-a-mask-taken-for-whole",
        "a tile of which a row is paired with a part is not compared with the mask",
        f"{KERNELS}/hopper.h",
        "const int first = kOwnsKeys ? (at + kTile - 1) / kTile : count - at / kTile;",
        "const int first = kOwnsKeys ? at / kTile : count - at / kTile;",
        f"{ANY}[129-causal-torch.bfloat16-cpu-v4_warpgroups]",
    ),
    Fault(
        "padding-of-queries-not-cleared",
        "queries before the first, which its lse is copied with, are multiplied by 0",
        f"{KERNELS}/hopper.h",
        "clear(shared.x[place], 0, first);",
        "clear(shared.x[place], 0, 0);",
        f"{TEST}::test_padding_on_the_left_may_be_nan_in_q_as_well[3-cpu-v4_warpgroups]",
    ),
    Fault(
        "rest-of-a-warp-of-delta",
        "lanes of a query add up over half of them",
        f"{KERNELS}/delta.h",
        "for (int away = kDeltaLanes / 2; away > 0;",
        "for (int away = kDeltaLanes / 4; away > 0;",
        f"{ANY}[33-full-torch.bfloat16-cpu-v3_mma]",
    ),
    Fault(
        "queue-begins-at-the-second-tile",
        "the counters of tiles begin at 1",
        f"{KERNELS}/delta.h",
        "threadIdx.y == 0) counters[threadIdx.x] = 0;",
        "threadIdx.y == 0) counters[threadIdx.x] = 1;",
        f"{ANY}[33-full-torch.bfloat16-cpu-v5_persistent]",
    ),
    Fault(
        "last-group-taken-for-a-whole-one",
        "a queue of fewer heads than a group has counts as if there were all",
        f"{KERNELS}/v5_persistent.cu",
        "min(unsigned{kHeadsTogether}, heads - group * kHeadsTogether);",
        "unsigned{kHeadsTogether};",
        f"{TEST}::test_more_tiles_than_multiprocessors[full-16-cpu-v5_persistent]",
    ),
    Fault(
        "own-rows-overwritten-while-worked-on",
        "the producer does not wait until the rows before the last are done",
        f"{KERNELS}/v5_persistent.cu",
        "      mbarrier_wait(&shared.own_empty[buffers.place], buffers.phase ^ 1);\n",
        "",
        f"{TEST}::test_more_tiles_than_multiprocessors[causal-104-cpu-v5_persistent]",
    ),
    Fault(
        "second-half-of-the-rows-twice",
        "operand a in registers has its upper rows where the lower ones belong",
        f"{KERNELS}/hopper.h",
        "(row + i % 2 * 8) * 128 + k * 32",
        "row * 128 + k * 32",
        f"{ANY}[33-full-torch.bfloat16-cpu-v5_persistent]",
    ),
    Fault(
        "stored-under-the-next-tile-and-never-freed",
        "the buffer of the sums is free before they are stored",
        f"{KERNELS}/v5_persistent.cu",
        "      tma_store_wait_read<0>();\n      mbarrier_arrive(&shared.own_empty[stored]);\n",
        "      mbarrier_arrive(&shared.own_empty[stored]);\n",
        f"{TEST}::test_more_tiles_than_multiprocessors[causal-16-cpu-v5_persistent]",
    ),
]

PLAIN_FAULTS = [
    Fault(
        "dq-of-the-queries-before",
        "a block of queries adds to the dq of the one before",
        PLAIN,
        "    std::fill(h.dq.begin(), h.dq.end(), C(0));\n",
        "",
        f"{ANY}[129-full-torch.float32-cpu-cpu]",
    ),
    Fault(
        "dk-of-the-head-before",
        "a head of k adds to the dk of the one before",
        PLAIN,
        "  std::fill(h.dk.begin(), h.dk.end(), C(0));\n",
        "",
        f"{TEST}::test_auto_does_gpt2_sized_layers[full-torch.float32-cpu]",
    ),
    Fault(
        "infinity-of-the-head-before",
        "padding weighs 0, times what another head left",
        PLAIN,
        "h.k.begin() + keys.begin * h.stride, C(0));",
        "h.k.begin() + keys.begin / kKeyBlock * kKeyBlock * h.stride, C(0));",
        f"{TEST}::test_what_another_head_left_is_not_read[torch.float32-cpu]",
    ),
    Fault(
        "infinity-of-the-head-before-forward",
        "the same in the forward pass",
        "step2-attention/attention_cpu.cpp",
        "          if (key_begin < key_end) std::fill(before,",
        "          if (key_begin > key_end) std::fill(before,",
        f"{TEST}::test_what_another_head_left_is_not_read[torch.float32-cpu]",
    ),
]

HOST_FAULTS = [
    Fault(
        "dk-not-copied-back",
        "what was computed beside `dk` is not copied into it",
        HOST,
        "  if (!dk_rows.is_same(dk)) dk.copy_(dk_rows);\n",
        "",
        f"{TEST}::test_gradients_are_written_where_they_lie[35-cpu-v3_mma]",
    ),
    Fault(
        "no-keys-no-care",
        "kernels are launched where there is no key",
        HOST,
        "if (q.numel() == 0 || k.size(2) == 0) {  // no output",
        "if (q.numel() == 0) {  // no output",
        f"{TEST}::test_empty_tensors[(2, 2, 3, 8)-(2, 2, 0, 8)-cpu-v2_tiled]",
    ),
    Fault(
        "strided-log-sum-exp",
        "`lse` is read as if it were contiguous",
        HOST,
        "lse_rows = lse.contiguous(),",
        "lse_rows = lse,",
        f"{TEST}::test_each_tensor_is_found_wherever_it_lies[torch.float32-cpu-v1_naive]",
    ),
]

PYTHON_FAULTS = [
    Fault(
        "nothing-where-q-is-frozen-2",
        "where q needs no gradient, k and v get none either",
        PYTHON,
        "    if grad is None:\n        grad = torch.zeros_like(q)\n",
        "    if not ctx.needs_input_grad[0]:\n"
        "        return None, torch.zeros_like(k), torch.zeros_like(v), None, None\n"
        "    if grad is None:\n        grad = torch.zeros_like(q)\n",
        f"{FORWARD}::test_each_input_alone_gets_the_gradient_that_it_gets_beside_the_others[full-cpu]",
    ),
    Fault(
        "upper-left-mask",
        "second gradients see the mask of PyTorch's is_causal",
        PYTHON,
        ".unsqueeze(-1) + k.size(2) - q.size(2)",
        ".unsqueeze(-1)",
        f"{FORWARD}::test_gradient_of_attention[2-5-causal-cpu-cpu]",
    ),
    Fault(
        "backward-without-scale",
        "the gradient is that of the default scale",
        PYTHON,
        'for name in ("causal", "scale", "dropout_p")}',
        'for name in ("causal", "dropout_p")}',
        f"{FORWARD}::test_gradient_of_attention[4-4-full-cpu-cpu]",
    ),
    Fault(
        "second-gradient-cut-2",
        "the backward of `attention` cannot itself be differentiated",
        PYTHON,
        "given = (grad, q,",
        "given = (grad.detach(), q,",
        f"{FORWARD}::test_second_gradients_are_as_exact_as_the_dtype_allows[5-5-torch.float32-cpu]",
    ),
    Fault(
        "second-gradient-through-lse-lost",
        "what reaches the log-sum-exp is lost",
        PYTHON,
        "        by_lse = -by_score.sum(-1)\n",
        "        by_lse = torch.zeros_like(lse)\n",
        f"{TEST}::test_its_own_gradients[full-cpu]",
    ),
    Fault(
        "padding-in-the-gradient",
        "weights of padding reach second gradients",
        PYTHON,
        "hidden = hidden | (key < key_begin[:, None, None, None])",
        "hidden = hidden | (key < 0)",
        f"{PADDED}[full-cpu]",
    ),
    Fault(
        "nan-of-padding-in-the-gradient",
        "what lies in padding is multiplied by 0",
        PYTHON,
        "t.masked_fill(padding, 0).repeat_interleave",
        "t.repeat_interleave",
        f"{FORWARD}::test_padding_of_nan_reaches_no_gradient[cpu]",
    ),
    Fault(
        "gradient-of-one-head-of-the-group",
        "shared keys get the second gradient of one head",
        PYTHON,
        "t.unflatten(1, (kv_heads, group)).sum(2)",
        "t.unflatten(1, (kv_heads, group)).select(2, 0)",
        f"{PADDED}[causal-cpu]",
    ),
    Fault(
        "no-gradient-of-the-log-sum-exp",
        "a gradient that comes by the log-sum-exp is lost",
        PYTHON,
        "key_begin, key_end, grad_lse, rng_state)\n    return",
        "key_begin, key_end, None, rng_state)\n    return",
        f"{PADDED}[full-cpu]",
    ),
]
