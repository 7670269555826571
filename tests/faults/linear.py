"""Linear layers and what is fused to their ends, in step 3; and LayerNorm's rows by bulk copies."""

from kernel_fusion.checks.faults import Fault

OPS3 = "step3-fused/step3_fused/linear_ops.py"
HOST3 = "step3-fused/host/linear_host.cpp"
CPU3 = "step3-fused/cpu/linear_cpu.cpp"
PRODUCT2 = "step2-attention/include/step2/product_cpu.h"
LOOPS2 = "step2-attention/include/step2/product_loops_cpu.h"
KERNELS2 = "step2-attention/kernels"
KERNELS3 = "step3-fused/kernels"
HEADERS3 = "step3-fused/include/step3"
HEADERS2 = "step2-attention/include/step2"
LINEAR2 = "step2-attention/tests/test_linear.py"
EPILOGUES3 = "step3-fused/tests/test_epilogues.py"
ROWS3 = "step3-fused/tests/test_layer_norm_backward.py"
BLOCK3 = "step3-fused/tests/test_block.py"
EPILOGUES_AUTOGRAD3 = "step3-fused/tests/test_epilogues_autograd.py"
EPILOGUES_REFUSALS3 = "step3-fused/tests/test_epilogues_refusals.py"
AUTOCAST = f"{EPILOGUES_AUTOGRAD3}::test_autocast_passes_each_option_on"
GRADIENTS = f"{EPILOGUES_AUTOGRAD3}::test_gradients_are_those_of_finite_differences[depth-width-cpu"


def end(shape: str, dtype: str, op: str, rung: str, way: str = "depth-width") -> str:
    return f"{EPILOGUES3}::test_any_shape[{shape}-{way}-torch.{dtype}-{op}-cpu-{rung}]"


def linear(shape: str, dtype: str, rung: str, way: str = "depth-width") -> str:
    return f"{LINEAR2}::test_any_shape[{shape}-{way}-torch.{dtype}-cpu-{rung}]"


PYTHON_FAULTS = [
    Fault(
        "mlp-forgets-the-residual",
        "the residual of `mlp` has no gradient",
        OPS3,
        "grad_residual = grad if ctx.has_residual else None",
        "grad_residual = None",
        f"{GRADIENTS}-mlp]",
    ),
    Fault(
        "keep-always",
        "`keep=False` keeps all the same",
        OPS3,
        "keep = return_preactivation or (keep and needs_gradients(x, weight, bias))",
        "keep = return_preactivation or needs_gradients(x, weight, bias)",
        f"{EPILOGUES3}::test_keep_is_the_memory_of_one_activation[linear_gelu]",
    ),
    Fault(
        "eps-of-the-backward",
        "the backward of `layer_norm_linear` forgets `eps`",
        OPS3,
        "_ops.layer_norm(x, norm_weight, norm_bias, eps=ctx.eps)",
        "_ops.layer_norm(x, norm_weight, norm_bias)",
        f"{GRADIENTS}-layer_norm_linear]",
    ),
    Fault(
        "preactivation-without-a-gradient",
        "what `linear_gelu` returns besides has no gradient",
        OPS3,
        "if grad_preactivation is not None and ctx.keep:",
        "if grad_preactivation is not None and not ctx.keep:",
        f"{EPILOGUES_AUTOGRAD3}::test_the_preactivation_has_a_gradient_of_its_own[cpu]",
    ),
    Fault(
        "a-block-without-a-mask",
        "the block's attention sees what comes later",
        OPS3,
        "attended = attend(q, k, v, is_causal=causal)",
        "attended = attend(q, k, v, is_causal=False)",
        f"{BLOCK3}::test_a_block_is_that_of_gpt2[torch.float32-cpu]",
    ),
    Fault(
        "transposed-backward",
        "the backward of `linear` forgets that the weight is transposed",
        "step2-attention/step2_attention/linear_ops.py",
        "_ops.linear_backward(grad, *ctx.saved_tensors, transposed=ctx.transposed)",
        "_ops.linear_backward(grad, *ctx.saved_tensors)",
        f"{LINEAR2}::test_gradients_are_those_of_finite_differences[width-depth-cpu]",
    ),
    Fault(
        "step-2-missed-in-the-backward",
        "where step 2 is not built `layer_norm_linear` says so after the forward pass",
        OPS3,
        "    ctx.mark_non_differentiable(*output[1:])\n    shared.step_2()",
        "    ctx.mark_non_differentiable(*output[1:])",
        f"{EPILOGUES_AUTOGRAD3}::test_where_step_2_is_not_built_the_forward_says_so[layer_norm_linear]",
    ),
    Fault(
        "computed-again-the-wrong-way-round",
        "the backward of `mlp` forgets that the weight is transposed where it computes its product again",
        OPS3,
        "linear(x, weight_1, saved, transposed=transposed)",
        "linear(x, weight_1, saved)",
        f"{EPILOGUES_AUTOGRAD3}::test_gradients_without_what_is_kept[width-depth-cpu-mlp]",
    ),
    Fault(
        "mlp-never-drops",
        "the block drops nothing behind its second layer",
        OPS3,
        "return linear_bias_dropout_residual(inner, *mlp_2, x, dropout_p)",
        "return linear_bias_dropout_residual(inner, *mlp_2, x, 0.0)",
        f"{BLOCK3}::test_a_block_drops_only_while_it_trains[cpu]",
    ),
    Fault(
        "block-of-no-heads",
        "a block of no heads fails by a division by 0",
        OPS3,
        "x.dim() != 3 or heads < 1 or",
        "x.dim() != 3 or heads < 0 or",
        f"{BLOCK3}::test_a_block_refuses_what_is_no_block[cpu]",
    ),
    Fault(
        "block-of-any-dimensions",
        "a block of two or four dimensions fails within",
        OPS3,
        "x.dim() != 3 or heads < 1 or",
        "heads < 1 or",
        f"{BLOCK3}::test_a_block_refuses_what_is_no_block[cpu]",
    ),
]

HOST_FAULTS = [
    Fault(
        "unaligned-as-it-is",
        "tensors that do not begin at 16 bytes reach rungs that want it",
        "common/include/kf/argument_checks.h",
        "return begins_at_16_bytes(whole) ? whole : whole.clone();",
        "return whole;",
        linear("(64, 200, 136)", "bfloat16", "v7_persistent"),
    ),
    Fault(
        "kept-where-it-may-lie",
        "a preactivation that shares memory with the weight is taken",
        HOST3,
        'const std::initializer_list<Named> outs = {{"y", y}, {"preactivation", preactivation}};\n'
        '  check_apart(op, outs, {{"x", x}, {"weight", weight}});',
        'const std::initializer_list<Named> outs = {{"y", y}, {"preactivation", preactivation}};\n'
        '  check_apart(op, outs, {{"x", x}});',
        f"{EPILOGUES_REFUSALS3}::test_outputs_that_share_memory_with_anything_are_refused[linear_gelu-cpu]",
    ),
    Fault(
        "autocast-forgets-transposed",
        "under autocast the weight of `linear_gelu` is never transposed",
        HOST3,
        '"step3_fused::linear_gelu", x, weight, bias, transposed, approximate,',
        '"step3_fused::linear_gelu", x, weight, bias, false, approximate,',
        f"{AUTOCAST}[width-depth-cpu-linear_gelu]",
    ),
    Fault(
        "autocast-drops-nothing",
        "under autocast `linear_bias_dropout_residual` drops nothing",
        HOST3,
        "bias, residual, dropout_p, rng_state, transposed, rung);\n}\n\nTwoTensors mlp_autocast",
        "bias, residual, 0.0, rng_state, transposed, rung);\n}\n\nTwoTensors mlp_autocast",
        f"{AUTOCAST}[depth-width-cpu-linear_bias_dropout_residual]",
    ),
    Fault(
        "autocast-forgets-norms-eps",
        "under autocast `layer_norm_linear` has its default eps",
        HOST3,
        "bias, transposed, eps, rung);\n}\n\nTensor linear_bias_dropout_residual_autocast",
        "bias, transposed, 1e-5, rung);\n}\n\nTensor linear_bias_dropout_residual_autocast",
        f"{AUTOCAST}[depth-width-cpu-layer_norm_linear]",
    ),
]

PLAIN_FAULTS = [
    Fault(
        "rows-of-the-first-block",
        "plain C++ reads rows where they lie, but each block of the depth those of the first",
        PRODUCT2,
        "x = p.x + (first_row + row) * p.depth + k, x_stride = p.depth;",
        "x = p.x + (first_row + row) * p.depth, x_stride = p.depth;",
        linear("(40, 1104, 72)", "float32", "cpu"),
    ),
    Fault(
        "last-block-of-the-depth-alone",
        "plain C++ forgets what a product's earlier blocks of the depth gave",
        PRODUCT2,
        "to, n, columns, length, block > 0});",
        "to, n, columns, length, false});",
        linear("(40, 1104, 72)", "float32", "cpu"),
    ),
    Fault(
        "gelu-is-kept",
        "plain C++ keeps gelu(x), not x",
        CPU3,
        "    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(values[i]);\n"
        "    Gelu<kTanh>{}(row, first, count, values);",
        "    Gelu<kTanh>{}(row, first, count, values);\n"
        "    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(values[i]);",
        end("(6, 3, 7)", "float32", "linear_gelu", "cpu"),
    ),
    Fault(
        "numbers-from-the-first-of-eight",
        "plain C++ gives a row that begins within eight random numbers those of the first",
        LOOPS2,
        "const uint16_t* numbers = memory + index % 8;",
        "const uint16_t* numbers = memory;",
        end("(6, 3, 7)", "float32", "linear_bias_dropout_residual", "cpu"),
    ),
    Fault(
        "rounded-by-threads",
        "what is rounded together depends on how threads share out the columns",
        LOOPS2,
        "        values[begin + i] = numbers[i] >= least ? value : C(0);\n      }\n"
        "      for (int64_t i = 0; i < n; ++i) values[begin + i] += static_cast<C>(from[begin + i]);",
        "        values[begin + i] = (numbers[i] >= least ? value : C(0)) + static_cast<C>(from[begin + i]);\n      }",
        end("(24, 66, 130)", "float64", "linear_bias_dropout_residual", "cpu"),
    ),
]

FAULTS = [
    Fault(
        "lanes-of-one-column",
        "v11_gemv leaves half of its sums where they are",
        f"{KERNELS2}/linear/v11_gemv.cu",
        "apart >= kLanes; apart /= 2",
        "apart > kLanes; apart /= 2",
        linear("(4, 64, 256)", "float32", "v11_gemv"),
    ),
    Fault(
        "half-of-the-depth",
        "v9_split leaves out what the other warpgroup has summed",
        f"{KERNELS2}/linear/half_depth.h",
        "pack<T>(own[2 * half] + more.element[2 * half] + b[0],",
        "pack<T>(own[2 * half] + b[0],",
        linear("(40, 1104, 72)", "bfloat16", "v9_split"),
    ),
    Fault(
        "a-stage-overwritten",
        "a warpgroup of v9_split leaves its sums where the other one may still multiply",
        f"{KERNELS2}/linear/half_depth.h",
        "  named_barrier_sync(kMultiplied, kConsumerThreads);  // nobody reads a stage any more\n",
        "",
        f"{LINEAR2}::test_each_width_of_tiles[v9_split-(70, 328, 1576)-depth-width]",
    ),
    Fault(
        "half-a-tile-too-far-left",
        "the second warpgroup stores where the first one's columns are",
        f"{KERNELS2}/linear/half_depth.h",
        "row += warp * 16, column += number * kHalf * kGroup;",
        "row += warp * 16;",
        f"{LINEAR2}::test_each_width_of_tiles[v9_split-(70, 456, 1096)-width-depth]",
    ),
    Fault(
        "the-first-halfs-bias",
        "v9_split's second warpgroup adds the bias of the first one's columns",
        f"{KERNELS2}/linear/half_depth.h",
        "bias + (number * kHalf + group + i) * kGroup",
        "bias + (group + i) * kGroup",
        linear("(40, 1104, 72)", "bfloat16", "v9_split"),
    ),
    Fault(
        "sums-of-one-block",
        "v10_rows adds up its own sums only",
        f"{KERNELS2}/linear/v10_rows.cu",
        "const float* const from = shared.sums[block * groups + group] + r * kGroup;",
        "const float* const from = shared.sums[rank * groups + group] + r * kGroup;",
        linear("(64, 200, 136)", "bfloat16", "v10_rows"),
    ),
    Fault(
        "another-blocks-columns",
        "v10_rows puts what a block has added up where its neighbour's columns are",
        f"{KERNELS2}/linear/v10_rows.cu",
        "c = column + (group * blocks + rank) * kGroup;",
        "c = column + (group * blocks + blocks - 1 - rank) * kGroup;",
        linear("(64, 200, 136)", "bfloat16", "v10_rows"),
    ),
    Fault(
        "gelu-written-twice",
        "the preactivation that is kept is gelu of it",
        f"{HEADERS3}/epilogues.h",
        "    product = value;\n    compute_t<T> x[8];\n    widen(value, x);\n#pragma unroll\n"
        "    for (int j = 0; j < 8; ++j) x[j] = gelu_in_epilogue<T, kTanh, kCoarse>(x[j]);\n"
        "    value = packed<T>(x);",
        "    compute_t<T> x[8];\n    widen(value, x);\n#pragma unroll\n"
        "    for (int j = 0; j < 8; ++j) x[j] = gelu_in_epilogue<T, kTanh, kCoarse>(x[j]);\n"
        "    value = packed<T>(x);\n    product = value;",
        end("(64, 200, 136)", "bfloat16", "linear_gelu", "v3_hopper"),
    ),
    Fault(
        "mask-of-another-row",
        "dropout's numbers begin anew in each row",
        f"{HEADERS3}/epilogues.h",
        "dropout.apply(row * this->out.width + column, x);",
        "dropout.apply(column, x);",
        end("(64, 200, 136)", "bfloat16", "linear_bias_dropout_residual", "v3_hopper"),
    ),
    Fault(
        "asked-for-the-wrong-columns",
        "TMA brings the residual of the first columns of a tile for each round",
        f"{HEADERS2}/hopper_epilogue.h",
        "column + of_tile % Staged::kRounds * kSlice,\n               row);",
        "column, row);",
        # Of more than 64 columns, which are one round.
        f"{EPILOGUES3}::test_each_width_of_tiles[(260, 72, 2000)-linear_bias_dropout_residual]",
    ),
    Fault(
        "layers-without-a-barrier",
        "v5_rows's blocks begin the second layer when they have done their part of the first",
        f"{KERNELS3}/mlp/v5_rows.cu",
        "  cooperative_groups::this_grid().sync();  // the activation is there\n",
        "",
        f"{EPILOGUES3}::test_more_tiles_of_few_rows_than_emulated_multiprocessors",
    ),
    Fault(
        "in-place-first-columns",
        "v5_in_place loads the residual of a tile's first columns in each round",
        f"{KERNELS3}/linear_bias_dropout_residual/in_place.h",
        "arrived, column + round * kSlice, row);",
        "arrived, column, row);",
        f"{EPILOGUES3}::test_v5_in_place_with_each_width_of_tiles[depth-width-(1100, 72, 1000)]",
    ),
    Fault(
        "in-place-stored-first",
        "v5_in_place stores each round to a tile's first columns",
        f"{KERNELS3}/linear_bias_dropout_residual/in_place.h",
        "waits.column + round * kSlice, waits.row",
        "waits.column, waits.row",
        f"{EPILOGUES3}::test_v5_in_place_with_each_width_of_tiles[depth-width-(260, 72, 2000)]",
    ),
    Fault(
        "in-place-too-early",
        "v5_in_place loads a third round while two are in their stages",
        f"{KERNELS3}/linear_bias_dropout_residual/in_place.h",
        "issued < min(added + 2, end)",
        "issued < min(added + 3, end)",
        f"{EPILOGUES3}::test_v5_in_place_with_each_width_of_tiles[depth-width-(1100, 200, 760)]",
    ),
    Fault(
        "in-place-of-the-next",
        "v5_in_place takes the next tile's first round for one of this",
        f"{KERNELS3}/linear_bias_dropout_residual/in_place.h",
        "const bool of_next = issued >= first;",
        "const bool of_next = issued > first;",
        f"{EPILOGUES3}::test_v5_in_place_with_each_width_of_tiles[depth-width-(2100, 64, 2600)]",
    ),
    Fault(
        "in-place-same-phase",
        "v5_in_place waits for the first phase of a residual's arrival only",
        f"{KERNELS3}/linear_bias_dropout_residual/in_place.h",
        "added / 2 % 2);",
        "0);",
        f"{EPILOGUES3}::test_v5_in_place_with_each_width_of_tiles[depth-width-(2100, 64, 2600)]",
    ),
    Fault(
        "in-place-own-turns",
        "v5_in_place begins each tile with the first stage, also where a tile has three rounds",
        f"{KERNELS3}/linear_bias_dropout_residual/in_place.h",
        "T* const stage = shared.stage[warp()][added % 2];",
        "T* const stage = shared.stage[warp()][(added - (first - kRounds)) % 2];",
        f"{EPILOGUES3}::test_v5_in_place_with_each_width_of_tiles[depth-width-(2100, 64, 2600)]",
    ),
    Fault(
        "in-place-still-read",
        "v5_in_place loads the residual while the stage is still being stored",
        f"{KERNELS3}/linear_bias_dropout_residual/in_place.h",
        "tma_store_wait_read<0>();  // what was there has left",
        "",
        f"{EPILOGUES3}::test_v5_in_place_with_each_width_of_tiles[depth-width-(1100, 72, 1000)]",
    ),
    Fault(
        "in-place-only-the-sum",
        "where the residual was, the sums alone",
        f"{HEADERS2}/hopper_sums.h",
        "sums = sum_of(sums, more);",
        "",
        f"{EPILOGUES3}::test_v5_in_place_with_each_width_of_tiles[depth-width-(64, 72, 200)]",
    ),
    Fault(
        "in-place-any-y",
        "v5_in_place writes to any address",
        f"{KERNELS3}/linear_bias_dropout_residual/v5_in_place.cu",
        "return aligned_16(a.y) ?",
        "return aligned_16(a.residual) ?",
        f"{EPILOGUES3}::test_v5_in_place_refuses_a_y_that_tma_cannot_write",
    ),
    Fault(
        "in-place-drops-nothing",
        "v5_in_place takes a p above 0 and forgets it",
        f"{KERNELS3}/linear_bias_dropout_residual/v5_in_place.cu",
        "if (a.threshold != 0)",
        "if (a.threshold > 65536)",
        end("(64, 200, 136)", "bfloat16", "linear_bias_dropout_residual", "v5_in_place"),
    ),
    Fault(
        "many-rows-later",
        "the pieces add the residual by a launch of its own at 8192 rows",
        f"{KERNELS3}/attention_block/pieces.cu",
        ">= kManyRows",
        "> kManyRows",
        "step3-fused/test_fused.py::test_the_emulated_product_adds_the_residual_where_rows_are_many[128]",
    ),
    Fault(
        "second-layer-at-once",
        "v6_one_launch multiplies an activation that may not be there",
        f"{KERNELS3}/mlp/many_rows.h",
        "      wait_for_counter(layers.counters.stored + work.row, all_parts);\n",
        "",
        f"{EPILOGUES3}::test_bands_of_rows_with_few_blocks_at_once[(100, 264, 520)-forward-1]",
    ),
    Fault(
        "waits-for-what-waits",
        "v6_one_launch's blocks wait for rows that lie in their own registers",
        f"{KERNELS3}/mlp/v6_one_launch.cu",
        "if (layer == Work::kNone || (layer == 1 && !is_there())) epilogues.finish();",
        "if (layer == Work::kNone) epilogues.finish();",
        f"{EPILOGUES3}::test_bands_of_rows_with_few_blocks_at_once[(100, 264, 520)-forward-1]",
    ),
    Fault(
        "slice-half-there",
        "v7_inner's blocks multiply a slice of the activation of which others have not sent their parts",
        f"{KERNELS3}/mlp/inner_slice.h",
        "  mbarrier_wait_cluster(&shared.activation_full, 0);\n",
        "",
        f"{EPILOGUES3}::test_slices_of_the_inner_width[(33, 1096, 520)-torch.bfloat16-depth-width]",
    ),
    Fault(
        "taken-before-it-is-left",
        "v7_inner's blocks load x for all when they alone have released its stage",
        f"{KERNELS3}/mlp/v7_inner.cu",
        "mbarrier_init(&shared.x_empty[group], kCluster * kWarpgroupSize / kWarpSize);",
        "mbarrier_init(&shared.x_empty[group], kWarpgroupSize / kWarpSize);",
        f"{EPILOGUES3}::test_slices_of_the_inner_width_in_any_order[(16, 2056, 256)-forward]",
    ),
    Fault(
        "the-next-row-again",
        "a stage of v4_bulk's ring gets the row that the other stage has",
        f"{KERNELS3}/layer_norm_backward/v4_bulk.cu",
        "issue_load(stage, row + kStages * step);",
        "issue_load(stage, row + step);",
        f"{ROWS3}::test_more_rows_than_resident_blocks[(13000, 8)-torch.bfloat16-sum-cpu-v4_bulk]",
    ),
    Fault(
        "read-before-it-is-there",
        "v4_bulk does not wait for its row",
        f"{KERNELS3}/layer_norm_backward/v4_bulk.cu",
        "    mbarrier_wait(&arrived[group][stage], phase);\n",
        "",
        f"{ROWS3}::test_any_width[768-torch.bfloat16-cpu-v4_bulk]",
    ),
    Fault(
        "sums-without-their-pitch",
        "a block of layer_norm_backward reads its groups' sums as if they lay close together",
        f"{KERNELS3}/layer_norm_backward/group.h",
        "load_vector<kEach>(memory + g * pitch + c)",
        "load_vector<kEach>(memory + g * 2 * width + c)",
        f"{ROWS3}::test_any_width[768-torch.bfloat16-cpu-v4_bulk]",
    ),
    Fault(
        "four-sums-twice",
        "lanes that write their last four sums first write them where the first four belong",
        f"{KERNELS3}/layer_norm_backward/group.h",
        "store_vector<4>(to + (last_first ? 4 : 0), one);",
        "store_vector<4>(to, one);",
        f"{ROWS3}::test_any_width[768-torch.bfloat16-cpu-v4_bulk]",
    ),
    Fault(
        "the-first-eights-bias",
        "v7_inner adds the bias of a block's first columns to all of them",
        f"{KERNELS3}/mlp/inner_slice.h",
        "widen(shared.bias[eight], bias);",
        "widen(shared.bias[0], bias);",
        f"{EPILOGUES3}::test_slices_of_the_inner_width[(33, 1096, 520)-torch.bfloat16-depth-width]",
    ),
    Fault(
        "groups-that-share-their-sums",
        "v4_bulk's groups leave the sums of their warps in one place",
        f"{KERNELS3}/layer_norm_backward/v4_bulk.cu",
        "row_sums<Row::kThreads>(sums.value, shared[group],",
        "row_sums<Row::kThreads>(sums.value, shared[0],",
        f"{ROWS3}::test_emulated_threads_may_run_in_any_order[random:1]",
    ),
    Fault(
        "weight-in-the-place-of-bias",
        "rows in registers get LayerNorm's weight added, not its bias",
        "step3-fused/include/step3/held_row.h",
        "biases[i] = load_vector<Row::N>(bias + column);",
        "biases[i] = load_vector<Row::N>(weight + column);",
        "step3-fused/test_fused.py::test_residual_layer_norm_of_any_width[1600-torch.bfloat16-cpu-v3_registers]",
    ),
    Fault(
        "one-piece-for-all",
        "a thread of layer_norm v4's cluster takes its first piece for all",
        f"{KERNELS3}/layer_norm/v4_cluster.cu",
        "widen_anew(held[i], value);",
        "widen_anew(held[0], value);",
        "step3-fused/test_fused.py::test_rows_wider_than_one_multiprocessor_holds[16392-torch.bfloat16-layer_norm-cpu-v4_cluster]",
    ),
    Fault(
        "rows-without-their-pitch",
        "grad lies a row's width behind x in v4_bulk's ring, not where a row may begin",
        f"{KERNELS3}/layer_norm_backward/v4_bulk.cu",
        "bulk_load(stage_of(stage) + pitch, grad",
        "bulk_load(stage_of(stage) + width, grad",
        f"{ROWS3}::test_any_width[760-torch.bfloat16-cpu-v4_bulk]",
    ),
    Fault(
        "half-a-word-too-much",
        "the upper of two bfloat16 keeps the lower one's bits",
        "step3-fused/include/step3/held_row.h",
        "words[j / 2] & 0xffff0000u",
        "words[j / 2]",
        "step3-fused/test_fused.py::test_layer_norm_of_any_width[768-torch.bfloat16-cpu-v3_registers]",
    ),
    Fault(
        "two-slices-of-one",
        "tiles of 64 columns leave in rounds of two slices, of which they have one",
        "step2-attention/include/step2/hopper_epilogue.h",
        ": Tile::kSlices % 2 != 0              ? Tile::kSlices",
        ": Tile::kSlices == 3                  ? Tile::kSlices",
        f"{LINEAR2}::test_each_width_of_tiles[v7_persistent-(64, 72, 200)-depth-width]",
    ),
]
