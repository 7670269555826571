"""Reads beside an input, which change no result, at a place of every op that can have them."""

from faults.kinds import (
    ATTENTION2,
    ATTENTION_BACKWARD2,
    DECODE2,
    EPILOGUES3,
    FUSED3,
    LAYER_NORM_BACKWARD3,
    LINEAR2,
    MMA,
    PRODUCTS,
    SOFTMAX2,
    STEP1,
    STEP2,
    STEP3,
    STEP4,
    TILE,
)
from kernel_fusion.checks.faults import everywhere

SOFTMAX_BACKWARD2 = "step2-attention/tests/test_softmax_backward.py"
EMBEDDING4 = "step4-integration/tests/test_embedding.py"
KV_APPEND4 = "step4-integration/tests/test_kv_append.py"


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
            *product_of_any_shape("v2_mma", "linear_gelu"),
        ),
        (  # by TMA
            TILE,
            "map_of<T>(p.a, Tile::kA, p.rows, p.depth, kRows, kDepth)",
            "map_of<T>(p.a, Tile::kA, p.rows + 1, p.depth, kRows, kDepth)",
            *product_of_any_shape("v3_hopper", *PRODUCTS),
        ),
        (
            f"{STEP2}/linear/v10_rows.cu",
            "map_of<T>(a.x, Major::kK, a.rows, a.depth",
            "map_of<T>(a.x, Major::kK, a.rows + 1, a.depth",
            f"{LINEAR2}::test_any_shape[(1, 40, 24)-depth-width-torch.bfloat16-cpu-v10_rows]",
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
            f"{EMBEDDING4}::test_embedding_adds_the_token_and_its_position[2-31-64-torch.float32-cpu-v2_vector]",
        ),
        (
            f"{STEP4}/kv_append/v2_vector.cu",
            "  const int64_t d = i % a.head_dim;\n",
            "  const int64_t d = i % a.head_dim;"
            f" {read('static_cast<const T*>(a.v) + a.batch * a.heads * a.length * a.head_dim')}\n",
            f"{KV_APPEND4}::test_kv_append_accesses_nothing_beside_its_tensors[8-torch.float32-cpu-v2_vector]",
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
            f"{STEP2}/linear_backward/v2_mma.cu",
            "  linear::v5_mma(product_for_x(layer), stream);",
            f"  {read('static_cast<const char*>(a.x) - 1')} linear::v5_mma(product_for_x(layer), stream);",
            f"{LINEAR2}::test_gradients_of_any_shape[(24, 40, 56)-depth-width-torch.bfloat16-cpu-v2_mma]",
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
