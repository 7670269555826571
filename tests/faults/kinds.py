"""Faults that once survived, by kind: each at a place of every op that can have it.

A place is a file, what stands there, what is planted, and the tests that see it. Reads that nobody uses are volatile,
or the compiler would leave them out.
"""

from kernel_fusion.checks.faults import Fault, everywhere

STEP1, STEP2, STEP3, STEP4 = (
    f"{step}/kernels" for step in ("step1-simple", "step2-attention", "step3-fused", "step4-integration")
)
SOFTMAX2 = "step2-attention/tests/test_softmax.py"
SOFTMAX_BACKWARD2 = "step2-attention/tests/test_softmax_backward.py"
ATTENTION2 = "step2-attention/test_attention.py"
ATTENTION_BACKWARD2 = "step2-attention/tests/test_attention_backward.py"
DECODE2 = "step2-attention/tests/test_decode.py"
FUSED3 = "step3-fused/test_fused.py"
LAYER_NORM_BACKWARD3 = "step3-fused/tests/test_layer_norm_backward.py"
LINEAR3 = "step3-fused/tests/test_linear.py"
EPILOGUES3 = "step3-fused/tests/test_epilogues.py"
ONE_LAUNCH3 = "step3-fused/tests/test_one_launch.py"
TEST4 = "step4-integration/test_integration.py"
HOPPER = "step3-fused/include/step3/hopper_product.h"
MMA = "step3-fused/include/step3/mma_product.h"


def contract1(op, rung, shape="(33, 760)"):
    return f"step1-simple/test.py::test_every_rung_keeps_the_contract[{shape}-torch.float32-{op}-cpu-{rung}]"


def read(address):
    return f"static_cast<void>(*reinterpret_cast<const volatile char*>({address}));"


def write_back(address):
    return f"{{ auto* const it = reinterpret_cast<volatile char*>({address}); *it = *it; }}"


def product_of_any_shape(rung, *ops):
    """One test an op of step 3 whose rung is a product with an end."""
    return tuple(
        f"{EPILOGUES3}::test_any_shape[(64, 200, 136)-depth-width-torch.bfloat16-{op}-cpu-{rung}]" for op in ops
    )


def attention_of_any_shape(op, rung):
    return f"{FUSED3}::test_attention_of_any_shape[(3, 1, 1, 129, 64)-full-{op}-cpu-{rung}]"


MMA_PRODUCTS = ("linear_gelu", "gelu_linear", "layer_norm_linear")
PRODUCTS = (*MMA_PRODUCTS, "linear_bias_dropout_residual", "gelu_linear_backward")

# ---- reads beside an input, which change no result ----

READS = [
    *everywhere(
        "past-the-end",
        "an input is read past its end, and nothing made of what is read",
        (
            f"{STEP1}/scale/v4_vector.cu",
            "const int64_t vectors = n / N;",
            f"const int64_t vectors = n / N; {read('x + n')}",
            contract1("scale", "v4_vector"),
        ),
        (
            f"{STEP1}/gelu/v1_naive.cu",
            "  if (i < n) y[i]",
            f"  {read('x + n')} if (i < n) y[i]",
            contract1("gelu", "v1_naive"),
        ),
        (
            f"{STEP1}/gelu_scale/v3_vector.cu",
            "const int64_t vectors = n / N;",
            f"const int64_t vectors = n / N; {read('x + n')}",
            contract1("gelu_scale", "v3_vector"),
        ),
        (
            f"{STEP1}/gelu_backward/v2_vector.cu",
            "const int64_t vectors = n / N;",
            f"const int64_t vectors = n / N; {read('grad + n')}",
            contract1("gelu_backward", "v2_vector"),
        ),
        (
            f"{STEP1}/bias_gelu_backward/v2_fused.cu",
            "  C b[8];\n",
            f"  C b[8]; {read('bias + width')}\n",
            contract1("bias_gelu_backward", "v2_fused"),
        ),
        (
            f"{STEP1}/bias_dropout_residual/v4_any_width.cu",
            "  compute_t<T> b[8];\n",
            f"  compute_t<T> b[8]; {read('residual + n')}\n",
            contract1("bias_dropout_residual", "v4_any_width"),
        ),
        (
            f"{STEP1}/bias_dropout_residual_backward/v2_fused.cu",
            "  philox_state.read();\n",
            f"  philox_state.read(); {read('grad + rows * width')}\n",
            contract1("bias_dropout_residual_backward", "v2_fused"),
        ),
        (
            f"{STEP1}/column_sum/v3_vector.cu",
            "  const int64_t begin = blockIdx.y * rows_per_part;\n",
            f"  const int64_t begin = blockIdx.y * rows_per_part; {read('x + rows * width')}\n",
            contract1("column_sum", "v3_vector"),
        ),
        (
            f"{STEP2}/softmax/v3_online.cu",
            "  OnlineSoftmax<C> own;",
            f"  {read('x + width')} OnlineSoftmax<C> own;",  # a row's, and of the last row the tensor's end
            f"{SOFTMAX2}::test_softmax_of_any_width[768-torch.float32-cpu-v3_online]",
        ),
        (
            f"{STEP2}/softmax_backward/v2_block.cu",
            "  compute_t<T> sum = 0;\n",
            f"  compute_t<T> sum = 0; {read('grad + width')}\n",
            f"{SOFTMAX_BACKWARD2}::test_rows_of_any_width[768-torch.float32-cpu-v2_block]",
        ),
        (  # by cp.async
            f"{STEP2}/attention/v4_pipeline.cu",
            "const bool there = row < rows && column < columns;",
            "const bool there = row <= rows && column < columns;",
            f"{ATTENTION2}::test_attention_of_any_length[33-full-torch.bfloat16-cpu-v4_pipeline]",
        ),
        (  # by TMA, of keys and values alike
            f"{STEP2}/attention/hopper.h",
            "map_of<T>(a, a.k, a.k_stride, a.kv_heads, a.k_length, keys)",
            "map_of<T>(a, a.k, a.k_stride, a.kv_heads, a.k_length + 1, keys)",
            f"{ATTENTION2}::test_attention_of_any_length[33-full-torch.bfloat16-cpu-v6_wgmma]",
        ),
        (
            f"{STEP2}/attention_backward/v2_tiled.cu",
            "threadIdx.x < kWalked && first + threadIdx.x < role.walked.end",
            "threadIdx.x < kWalked && first + threadIdx.x <= role.walked.end",
            f"{ATTENTION_BACKWARD2}::test_gradients_of_any_length[33-full-torch.float32-cpu-v2_tiled]",
        ),
        (
            f"{STEP2}/attention_decode/v2_split.cu",
            "if (key >= end || !has_columns) continue;",
            "if (key > end || !has_columns) continue;",
            f"{DECODE2}::test_one_query_over_any_number_of_keys[33-torch.float32-cpu-v2_split]",
        ),
        (
            f"{STEP3}/layer_norm/v3_registers.cu",
            "  x += row * width;\n",
            f"  {read('bias + width')} x += row * width;\n",
            f"{FUSED3}::test_layer_norm_of_any_width[768-torch.float32-cpu-v3_registers]",
        ),
        (
            f"{STEP3}/residual_layer_norm/v2_fused.cu",
            "  front.read();\n",
            f"  front.read(); {read('residual + row + width')}\n",
            f"{FUSED3}::test_residual_layer_norm_of_any_width[768-torch.float32-cpu-v2_fused]",
        ),
        (  # of a group of threads that has no row
            f"{STEP3}/layer_norm_backward/v3_persistent.cu",
            "    if (row >= rows) return;\n",
            "    if (row > rows) return;\n",
            f"{LAYER_NORM_BACKWARD3}::test_any_width[768-torch.float32-cpu-v3_persistent]",
        ),
        (
            f"{STEP3}/attention_residual_layer_norm/v2_fused.cu",
            "  C* memory = tile",
            f"  {read('weight + width')} C* memory = tile",
            attention_of_any_shape("attention_residual_layer_norm", "v2_fused"),
        ),
        (
            f"{STEP3}/attention_block/v2_fused.cu",
            "  C* memory = tile + kRows * stride;\n",
            f"  C* memory = tile + kRows * stride; {read('proj_weight + width * width')}\n",
            attention_of_any_shape("attention_block", "v2_fused"),
        ),
        (  # by cp.async
            MMA,
            "const bool inside = Tile::kAlong ? j * kApart < size && depth > 0 :",
            "const bool inside = Tile::kAlong ? j * kApart <= size && depth > 0 :",
            *product_of_any_shape("v2_mma", *MMA_PRODUCTS),
        ),
        (  # by TMA
            HOPPER,
            "map_of<T>(p.a, Tile::kA, p.rows, p.depth, kRows, kDepth)",
            "map_of<T>(p.a, Tile::kA, p.rows + 1, p.depth, kRows, kDepth)",
            *product_of_any_shape("v3_hopper", *PRODUCTS),
        ),
        (
            f"{STEP3}/linear/v10_rows.cu",
            "map_of<T>(a.x, Major::kK, a.rows, a.depth",
            "map_of<T>(a.x, Major::kK, a.rows + 1, a.depth",
            f"{LINEAR3}::test_any_shape[(1, 40, 24)-depth-width-torch.bfloat16-cpu-v10_rows]",
        ),
        (
            f"{STEP3}/linear_gelu_backward/v2_fused.cu",
            "    compute_t<T> h[8];\n",
            f"    compute_t<T> h[8]; {read('preactivation + i + last')}\n",
            *product_of_any_shape("v2_fused", "linear_gelu_backward"),
        ),
        (
            f"{STEP3}/mlp/v5_rows.cu",
            "map_of<T>(a.x, Major::kK, a.rows, a.width",
            "map_of<T>(a.x, Major::kK, a.rows + 1, a.width",
            f"{EPILOGUES3}::test_any_shape[(4, 48, 24)-depth-width-torch.bfloat16-mlp-cpu-v5_rows]",
        ),
        (
            f"{STEP4}/embedding/v2_vector.cu",
            "  const int64_t id = ids[row];\n",
            f"  const int64_t id = ids[row]; {read('token + vocab * width')}\n",
            f"{TEST4}::test_embedding_adds_the_token_and_its_position[2-31-64-torch.float32-cpu-v2_vector]",
        ),
        (
            f"{STEP4}/kv_append/v2_vector.cu",
            "  const int64_t d = i % a.head_dim;\n",
            "  const int64_t d = i % a.head_dim;"
            f" {read('static_cast<const T*>(a.v) + a.batch * a.heads * a.length * a.head_dim')}\n",
            f"{TEST4}::test_kv_append_accesses_nothing_beside_its_tensors[8-torch.float32-cpu-v2_vector]",
        ),
    ),
    *everywhere(
        "before-the-begin",
        "an input is read before its begin, and nothing made of what is read",
        (
            f"{STEP1}/bias_gelu/v5_any_width.cu",
            "  if (i >= n) return;\n",
            f"  if (i >= n) return; {read('bias - 1')}\n",
            contract1("bias_gelu", "v5_any_width"),
        ),
        (
            f"{STEP3}/linear_backward/v2_mma.cu",
            "  linear::v5_mma(product_for_x(layer), stream);",
            f"  {read('static_cast<const char*>(a.x) - 1')} linear::v5_mma(product_for_x(layer), stream);",
            f"{LINEAR3}::test_gradients_of_any_shape[(24, 40, 56)-depth-width-torch.bfloat16-cpu-v2_mma]",
        ),
        (
            f"{STEP3}/linear_bias_dropout_residual/v3_hopper.cu",
            "  with_half_type(",
            f"  {read('static_cast<const char*>(a.residual) - 1')}\n  with_half_type(",
            *product_of_any_shape("v3_hopper", "linear_bias_dropout_residual"),
        ),
        (
            f"{STEP3}/linear_bias_dropout_residual_backward/v2_fused.cu",
            "  const Changed changed",
            f"  {read('static_cast<const char*>(a.weight) - 1')}\n  const Changed changed",
            *product_of_any_shape("v2_fused", "linear_bias_dropout_residual_backward"),
        ),
    ),
    *everywhere(
        "output-kept",
        "what lies past the end of an output is written as it was",
        (
            f"{STEP1}/scale/v2_naive.cu",
            "  if (i < n) y[i]",
            f"  {write_back('y + n')} if (i < n) y[i]",
            contract1("scale", "v2_naive"),
        ),
        (
            f"{STEP2}/softmax/v2_block.cu",
            "  compute_t<T> max = -INFINITY;\n",
            f"  compute_t<T> max = -INFINITY; {write_back('y + width')}\n",
            f"{SOFTMAX2}::test_softmax_of_any_width[768-torch.float32-cpu-v2_block]",
        ),
        (
            f"{STEP3}/layer_norm/v2_block.cu",
            "  C value[kItems][N] = {};\n",
            f"  C value[kItems][N] = {{}}; {write_back('y + width')}\n",
            f"{FUSED3}::test_layer_norm_of_any_width[768-torch.float32-cpu-v2_block]",
        ),
    ),
]

# ---- rings: wrong only where a stage is used again ----


def stages_of_tiles(*rungs):
    return tuple(f"{ATTENTION2}::test_stages_of_tiles_are_used_again_and_again[full-64-cpu-{rung}]" for rung in rungs)


def backward_tiles(*rungs):
    return tuple(f"{ATTENTION_BACKWARD2}::test_more_tiles_than_multiprocessors[full-16-cpu-{rung}]" for rung in rungs)


def stages_of_keys(*rungs):
    return tuple(f"{DECODE2}::test_stages_of_keys_are_used_again_and_again[8-cpu-{rung}]" for rung in rungs)


def stages_of_the_depth(rung, *ops):
    name = "test_stages_of_the_depth_are_used_again_and_again"
    return tuple(f"{EPILOGUES3}::{name}[{rung}-(33, 1504, 40)-{op}]" for op in ops)


def rows_again(rung, shape="(13000, 8)", more="alone"):
    test = f"test_more_rows_than_resident_blocks[{shape}-torch.float32-{more}-cpu-{rung}]"
    return f"{LAYER_NORM_BACKWARD3}::{test}"


RINGS = [
    *everywhere(
        "phase",
        "a stage's second filling is not waited for: its barrier's phase stays the first",
        (
            f"{STEP2}/attention/hopper.h",
            "index = 0, phase ^= 1;",
            "index = 0;",
            *stages_of_tiles("v7_warpgroups", "v8_persistent", "v9_split"),
            *backward_tiles("v4_warpgroups", "v5_persistent", "v6_atomics", "v7_turns", "v8_wide"),
        ),
        (
            f"{STEP2}/attention/v6_wgmma.cu",
            "parity = j / 2 % 2;",
            "parity = 0;",
            *stages_of_tiles("v6_wgmma"),
        ),
        (
            HOPPER,
            "index = 0, phase ^= 1;",
            "index = 0;",
            *stages_of_the_depth("v3_hopper", *PRODUCTS),
            f"{LINEAR3}::test_more_tiles_than_emulated_multiprocessors[(2100, 72, 2600)-v7_persistent]",
            f"{LINEAR3}::test_more_tiles_than_emulated_multiprocessors[(2100, 72, 2600)-v8_cluster]",
            f"{LINEAR3}::test_each_width_of_tiles[v9_split-(64, 840, 200)-depth-width]",
        ),
        (
            f"{STEP3}/linear/v6_wgmma.cu",
            "mbarrier_wait(&shared.full[stage], step / kStages % 2);",
            "mbarrier_wait(&shared.full[stage], 0);",
            f"{LINEAR3}::test_any_shape[(40, 1104, 72)-depth-width-torch.bfloat16-cpu-v6_wgmma]",
        ),
        (
            f"{STEP3}/linear/v10_rows.cu",
            "mbarrier_wait(&shared.full[stage], step / kStages % 2);",
            "mbarrier_wait(&shared.full[stage], 0);",
            f"{LINEAR3}::test_each_width_of_tiles[v10_rows-(4, 840, 1016)-depth-width]",
        ),
        (
            f"{STEP3}/mlp/few_rows.h",
            "mbarrier_wait(&shared.full[stage], (done + step) / kStages % 2);",
            "mbarrier_wait(&shared.full[stage], 0);",
            f"{EPILOGUES3}::test_more_tiles_of_few_rows_than_emulated_multiprocessors",
        ),
        (
            f"{STEP3}/mlp/inner_slice.h",
            "mbarrier_wait(&shared.full[stage], pieces.round(piece) % 2);",
            "mbarrier_wait(&shared.full[stage], 0);",
            f"{EPILOGUES3}::test_slices_of_the_inner_width[(33, 1096, 520)-torch.bfloat16-depth-width]",
        ),
        (
            f"{STEP3}/layer_norm_backward/v4_bulk.cu",
            "stage = 0, phase ^= 1;",
            "stage = 0;",
            rows_again("v4_bulk"),
        ),
        (
            f"{STEP3}/attention_block/attend.h",
            "mbarrier_wait(&shared.q_empty[warpgroup], number % 2 ^ 1);",
            "mbarrier_wait(&shared.q_empty[warpgroup], 1);",
            f"{ONE_LAUNCH3}::test_many_batches[v4_dataflow-cpu]",
        ),
    ),
    *everywhere(
        "stage",
        "from its third round on a ring fills a stage that is still read, or reads one that is not filled",
        (
            f"{STEP2}/attention/v4_pipeline.cu",
            "issue_key_loads(first_key + kKeys, stage ^ 1);",
            "issue_key_loads(first_key + kKeys, first_key < 4 * kKeys ? stage ^ 1 : stage);",
            *stages_of_tiles("v4_pipeline"),
        ),
        (
            f"{STEP2}/attention/v5_registers.cu",
            "issue_key_loads(first_key + kKeys, stage ^ 1);",
            "issue_key_loads(first_key + kKeys, first_key < 4 * kKeys ? stage ^ 1 : stage);",
            *stages_of_tiles("v5_registers"),
        ),
        (
            f"{STEP2}/attention_decode/ring.h",
            "stage = stage + 1 == kStages ? 0 : stage + 1;",
            "stage = stage + 1 == (then < begin + 2 * kStages * kStep ? kStages : kStages - 1) ? 0 : stage + 1;",
            *stages_of_keys("v4_pipeline", "v5_cluster", "v6_paged"),
        ),
        (
            MMA,
            "issue_loads((step + kStages - 1) % kStages);",
            "issue_loads((step + kStages - (step < 2 * kStages ? 1 : 2)) % kStages);",
            *stages_of_the_depth("v2_mma", *MMA_PRODUCTS),
        ),
        (
            f"{STEP3}/linear/v4_vector.cu",
            "first_k += kDepth<C>, buffer ^= 1)",
            "first_k += kDepth<C>, buffer ^= first_k < 4 * kDepth<C>)",
            f"{LINEAR3}::test_any_shape[(40, 1104, 72)-depth-width-torch.float32-cpu-v4_vector]",
        ),
        (
            f"{STEP3}/layer_norm_backward/v3_persistent.cu",
            "row += step, turn ^= 1)",
            "row += step)",
            rows_again("v3_persistent", "(2200, 257)", "sum"),
        ),
        (
            f"{STEP3}/attention_block/cluster_attend.h",
            "stage = stage + 1 == kStages ? 0 : stage + 1;",
            "stage = i < 2 * kStages && stage + 1 == kStages ? 0 : min(stage + 1, kStages - 1);",
            f"{ONE_LAUNCH3}::test_new_tokens_against_a_cache[1000-v5_cluster-cpu]",
            f"{ONE_LAUNCH3}::test_new_tokens_against_a_cache[1000-v4_heads-cpu]",
        ),
        (
            f"{STEP3}/attention_block/cluster_project.h",
            "memory.weight[step % kAhead][i][weight_slot()];",
            "memory.weight[min(step, 3 * kAhead - 1) % kAhead][i][weight_slot()];",
            f"{ONE_LAUNCH3}::test_every_gpt2_width_and_the_widest[25-v5_cluster-cpu]",
        ),
    ),
]

# ---- loops whose second round no shape reached ----

SLICES = f"{EPILOGUES3}::test_more_slices_than_are_taken_at_once"

ROUNDS = everywhere(
    "second-round",
    "a loop does its first round alone",
    (
        f"{STEP1}/scale/v3_grid_stride.cu",
        "i < n; i += stride)",
        "i < n; i += n)",
        "step1-simple/test.py::test_more_elements_than_threads_at_once[scale-cpu-v3_grid_stride]",
    ),
    (
        f"{STEP2}/attention_decode/v3_mma.cu",
        "first < group.last; first += kWarps * kKeys)",
        "first < group.last; first = group.last)",
        *stages_of_keys("v3_mma"),
    ),
    (
        f"{STEP3}/attention_residual_layer_norm/v4_heads.cu",
        "row < kRows; row += rows_at_once) {\n    const int64_t global",
        "row < kRows; row += kRows) {\n    const int64_t global",
        f"{ONE_LAUNCH3}::test_rows_so_wide_that_a_block_has_four_warps[v4_heads-cpu]",
    ),
    (
        f"{STEP3}/mlp/inner_slice.h",
        "v < plan.rows * across; v += kMultipliers)",
        "v < min(plan.rows * across, kMultipliers); v += kMultipliers)",
        f"{SLICES}[(64, 24, 2600)]",
    ),
    (
        f"{STEP3}/mlp/v7_inner.cu",
        "plan.clusters, Rows<T>(a.bias_2",
        "std::min(plan.clusters, 16), Rows<T>(a.bias_2",
        f"{SLICES}[(7, 24, 8712)]",
    ),
)
PLAIN_ROUNDS = everywhere(
    "second-round",
    "a loop does its first round alone",
    (
        "step3-fused/cpu/product_cpu.h",
        "first_row < part.last_row; first_row += most_rows)",
        "first_row < part.last_row; first_row = part.last_row)",
        f"{LINEAR3}::test_plain_cpp_takes_many_rows_in_turn",
    ),
)

# ---- a gradient that is right for each output alone ----

OPS1, OPS2, OPS3, LINEAR_OPS3 = (
    "step1-simple/step1_simple/__init__.py",
    "step2-attention/step2_attention/__init__.py",
    "step3-fused/step3_fused/__init__.py",
    "step3-fused/step3_fused/linear_ops.py",
)


def together(*ops):
    return tuple(f"tests/test_gradients.py::test_outputs_used_together[{op}]" for op in ops)


GRADIENTS = [
    Fault(
        f"lost-together-{test[:-1].split('.')[-1]}",
        "a gradient is lost where another output is used too",
        file,
        old,
        new,
        test,
        tuple(more),
    )
    for file, old, new, test, *more in (
        (
            OPS1,
            "weight = wide(to_grad_x) + wide(to_grad_bias)",
            "weight = wide(to_grad_x) if to_grad_x.any() else wide(to_grad_bias)",
            *together("step1_simple.bias_gelu_backward"),
        ),
        (
            OPS1,
            "weight = to_grad_x + to_grad_bias",
            "weight = to_grad_x if to_grad_x.any() else to_grad_bias",
            *together("step1_simple.bias_dropout_residual_backward"),
        ),
        (
            OPS2,
            "given = (grad, q, k, v, out, lse, key_begin, key_end, grad_lse, rng_state)",
            "given = (grad, q, k, v, out, lse, key_begin, key_end, None if grad.any() else grad_lse, rng_state)",
            *together("step2_attention.attention"),
        ),
        (
            OPS2,
            "by_weight = by_grad_score * grad_weight + grad @ by_dv.mT",
            "by_weight = by_grad_score * grad_weight if by_dq.any() else grad @ by_dv.mT",
            *together("step2_attention.attention_backward"),
        ),
        (
            OPS3,
            "        if grad_mean is not None or grad_rstd is not None:",
            "        if not grad.any() and (grad_mean is not None or grad_rstd is not None):",
            *together("step3_fused.layer_norm"),
        ),
        (
            OPS3,
            "found = torch.autograd.grad(outputs, variables, [wide(t) for t in grads])",
            "found = torch.autograd.grad(\n"
            "        outputs, variables, [wide(t) * (not grads[0].any() or t is grads[0]) for t in grads]\n    )",
            *together("step3_fused.layer_norm_backward"),
        ),
        (
            OPS3,
            "rows, grad_y, grad_sum, grad_mean, grad_rstd)\n    grad_x,",
            "rows, grad_y, grad_sum if grad_mean is None else None, grad_mean, grad_rstd)\n    grad_x,",
            *together("step3_fused.residual_layer_norm"),
        ),
        (
            OPS3,
            "        grad = grad + given\n",
            "        grad = given\n",
            *together("step3_fused.attention_residual_layer_norm", "step3_fused.attention_block"),
        ),
        (
            LINEAR_OPS3,
            "[wide(g) for g in grads], allow_unused=True)",
            "[wide(g) * (not grads[0].any() or g is grads[0]) for g in grads], allow_unused=True)",
            *together(
                "step3_fused.linear_backward",
                "step3_fused.linear_gelu_backward",
                "step3_fused.gelu_linear_backward",
                "step3_fused.linear_bias_dropout_residual_backward",
            ),
        ),
        (
            LINEAR_OPS3,
            "grads = more if grads is None else [a + b for a, b in zip(grads, more, strict=True)]",
            "grads = more if grads is None else grads",
            *together("step3_fused.linear_gelu"),
        ),
        (
            LINEAR_OPS3,
            "grad_inner = through if grad_inner is None else through + grad_inner",
            "grad_inner = through",
            *together("step3_fused.mlp"),
        ),
    )
]

# ---- statistics of a row's parts, put together wrongly ----


def rows_of_a_cluster(*ops):
    return tuple(
        f"{FUSED3}::test_rows_wider_than_one_multiprocessor_holds[24001-torch.bfloat16-{op}-cpu-v4_cluster]"
        for op in ops
    )


def wide_softmax(rung):
    return f"{SOFTMAX2}::test_softmax_of_rows_as_wide_as_vocabularies[full-65539-torch.bfloat16-cpu-{rung}]"


def new_maximum(rung):
    return f"{ATTENTION2}::test_each_block_of_keys_may_bring_a_new_maximum[60-cpu-{rung}]"


CLUSTER_ROW = "step3-fused/include/step3/cluster_row.h"
FAR = f"{ONE_LAUNCH3}::test_columns_far_from_the_rows_mean"

MERGES = [
    *everywhere(
        "squares-between-parts",
        "the variance lacks how far the means of a row's parts are apart",
        (
            CLUSTER_ROW,
            "squares += squares_and_count[i].first + off * (2 * mean_and_sum[i].second + of_count);",
            "squares += squares_and_count[i].first;",
            *rows_of_a_cluster("layer_norm", "residual_layer_norm"),
        ),
        (
            f"{STEP3}/attention_block/clusters.h",
            "row_sum(s.squares_and_count.first + off * (2 * s.mean_and_rest.second + off * count))",
            "row_sum(s.squares_and_count.first)",
            f"{FAR}[4-64-v5_cluster-cpu]",
        ),
    ),
    *everywhere(
        "ragged-part",
        "the last part of a row counts as if it were as large as the others",
        (
            CLUSTER_ROW,
            "Pair<C>{squares, count}",
            "Pair<C>{squares, C(Row::kItems * Row::N * kWarpSize)}",
            *rows_of_a_cluster("layer_norm", "residual_layer_norm"),
        ),
        (
            f"{STEP3}/attention_block/cluster_project.h",
            "{row_sum(squares), static_cast<float>(columns)}",
            "{row_sum(squares), static_cast<float>(rest.width) / static_cast<float>(cluster_blocks())}",
            f"{FAR}[5-16-v5_cluster-cpu]",
        ),
        (
            f"{STEP3}/attention_residual_layer_norm/v4_heads.cu",
            "{row_sum(squares), static_cast<float>(columns)}",
            "{row_sum(squares), static_cast<float>(width) / static_cast<float>(blocks)}",
            f"{FAR}[5-16-v4_heads-cpu]",
        ),
    ),
    *everywhere(
        "maximum-of-a-part",
        "a row's maximum is that of its first parts alone",
        (
            f"{STEP2}/softmax/v5_cluster.cu",
            "for (int i = lane; i < blocks * kWarps; i += kWarpSize) row_max = ",
            "for (int i = lane; i < kWarps; i += kWarpSize) row_max = ",
            f"{SOFTMAX2}::test_softmax_finds_a_maximum_wherever_it_is[65539-cpu-v5_cluster]",
        ),
        (
            f"{STEP2}/attention/v9_split.cu",
            "const float max = greater_of(softmax.max[r], theirs.element[r]);",
            "const float max = softmax.max[r];",
            new_maximum("v9_split"),
        ),
        (
            f"{STEP2}/attention_decode/parts.h",
            "for (int i = 0; i < count; ++i) all.max",
            "for (int i = 0; i < count / 2; ++i) all.max",
            f"{DECODE2}::test_each_step_may_bring_a_new_maximum[60-cpu-v4_pipeline]",
        ),
        (
            f"{STEP3}/attention_block/cluster_attend.h",
            "const float greater = greater_of(max, part.max);",
            "const float greater = max == -INFINITY ? part.max : max;",
            f"{ONE_LAUNCH3}::test_each_part_of_the_keys_may_bring_a_new_maximum[20-v5_cluster-cpu]",
        ),
    ),
    *everywhere(
        "rest-of-the-variance",
        "the variance is around the rounded mean, not the true one",
        (
            "step3-fused/include/step3/statistics.h",
            "sum_of_squares * share - rest * rest + eps",
            "sum_of_squares * share + eps",
            f"{FUSED3}::test_a_large_mean_does_not_drown_a_small_variance[768-torch.float32-cpu-v1_naive]",
        ),
    ),
    *everywhere(
        "rest-of-the-saved-mean",
        "the mean that is returned is the first pass's, with its rounding",
        (
            "step3-fused/include/step3/statistics.h",
            "mean[row] = s.mean + s.rest;",
            "mean[row] = s.mean;",
            f"{FUSED3}::test_a_large_mean_does_not_drown_a_small_variance[1600-torch.float32-cpu-v1_naive]",
        ),
    ),
    *everywhere(
        "sum-of-a-part",
        "a part's sum of weights is not brought to the row's maximum",
        (
            f"{STEP2}/softmax/v5_cluster.cu",
            "row_sum += sum_of_warp[i] * weight_of(max_of_warp[i], row_max);",
            "row_sum += sum_of_warp[i];",
            wide_softmax("v5_cluster"),
        ),
        (
            f"{STEP2}/softmax/v6_cluster_registers.cu",
            "row_sum += max_and_sum[i].second * weight_of(max_and_sum[i].first, row_max);",
            "row_sum += max_and_sum[i].second;",
            wide_softmax("v6_cluster_registers"),
        ),
        (
            f"{STEP2}/attention/v9_split.cu",
            "softmax.sum[r] * own_factor[r] + theirs.element[2 + r] * factor[r]",
            "softmax.sum[r] * own_factor[r] + theirs.element[2 + r]",
            new_maximum("v9_split").replace("[60", "[7"),
        ),
        (
            f"{STEP2}/attention_decode/parts.h",
            "all.sum += part.sum * weight;",
            "all.sum += part.sum;",
            f"{DECODE2}::test_each_step_may_bring_a_new_maximum[7-cpu-v4_pipeline]",
        ),
    ),
]

# ---- a launch that does not wait for the one before: only a GPU runs both at once ----

LAUNCHES = everywhere(
    "no-wait",
    "a kernel that is launched while the one before runs does not wait for its end",
    (
        f"{STEP3}/layer_norm_backward/columns.h",
        "  if constexpr (kDependent) wait_on_dependent_grids();\n",
        "",
        f"{LAYER_NORM_BACKWARD3}::test_the_second_stage_waits_for_the_first[cuda]",
    ),
    (
        f"{STEP3}/mlp/v7_inner.cu",
        "  wait_on_dependent_grids();\n",
        "",
        f"{EPILOGUES3}::test_the_clusters_parts_are_added_when_all_are_there[cuda]",
    ),
)

PLAIN_READS = everywhere(
    "past-the-end",
    "an input is read past its end, and nothing made of what is read",
    (
        "step2-attention/cpu/attention_cpu.cpp",
        "        if (batch * a.kv_heads + kv_head != loaded) {",
        f"        {read('row_of(static_cast<const T*>(a.k), a.k_stride, batch, kv_head, a.k_length)')}\n"
        "        if (batch * a.kv_heads + kv_head != loaded) {",
        f"{ATTENTION2}::test_attention_of_any_length[33-full-torch.float32-cpu-cpu]",
    ),
)

# ---- the emulation: what C++ makes of a source in silence, and a GPU does not ----

REWRITE, REWRITE_TEST = "emulator/rewriter/rewrite.py", "emulator/tests/test_rewrite.py"
EMULATION = [
    Fault(
        "zero-within-an-argument",
        "a zero within an argument of a launch is made a null pointer",
        REWRITE,
        "ZERO.fullmatch(tokens[k].text) and not depth:",
        "ZERO.fullmatch(tokens[k].text):",
        f"{REWRITE_TEST}::test_zeros_among_the_arguments_of_a_launch",
    ),
    Fault(
        "barriers-of-a-macro",
        "the second barrier of a macro is the first",
        REWRITE,
        "enumerate(called[1:], 1)",
        "enumerate(called[2:], 1)",
        f"{REWRITE_TEST}::test_the_barriers_of_a_macro_are_numbered",
    ),
    Fault(
        "casts-of-the-host",
        "the host's casts saturate as a GPU's do",
        REWRITE,
        "                if on_device:\n                    self.integer_cast(tokens, i)",
        "                self.integer_cast(tokens, i)",
        f"{REWRITE_TEST}::test_what_is_no_cast_to_an_integer_of_the_device_is_left_alone",
    ),
    Fault(
        "casts-to-named-types",
        "a cast to a type that the program names does not saturate",
        REWRITE,
        "self.integers.add(name[0].text)",
        "pass",
        f"{REWRITE_TEST}::test_casts_to_integers_become_calls",
    ),
    Fault(
        "header-of-which-nothing-is-used",
        "`using namespace` counts as a use of a header that is not emulated",
        "emulator/rewriter/refusals.py",
        'using = before == "namespace" and i > 1 and tokens[i - 2].text == "using"',
        "using = False",
        "emulator/tests/test_refusals.py::test_a_header_of_which_nothing_is_used_is_no_harm",
    ),
]
