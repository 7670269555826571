"""Attention, projection, residual and LayerNorm in step 3: the best separate launches, and one launch."""

from kernel_fusion.checks.faults import Fault

HOST3 = "step3-fused/fused_host.cpp"
BLOCK3 = "step3-fused/kernels/attention_block"
DATAFLOW3 = "step3-fused/tests/test_one_launch.py"
FUSED3 = "step3-fused/test_fused.py"


def dataflow(shape: str, mask: str = "causal") -> str:
    return f"{DATAFLOW3}::test_any_shape[{shape}-{mask}-v4_dataflow-cpu]"


def length(rows: int, mask: str = "causal") -> str:
    return f"{DATAFLOW3}::test_any_length[{rows}-{mask}-torch.bfloat16-v4_dataflow-cpu]"


def best(op: str) -> str:
    return f"{FUSED3}::test_attention_of_any_shape[(2, 3, 5, 7, 5)-causal-{op}-cpu-pieces]"


HOST_FAULTS = [
    Fault(
        "an-unaligned-sum-is-lost",
        "a sum that begins at no multiple of 16 bytes is not copied back",
        HOST3,
        "{&to_y, &to_sum, &to_attended}",
        "{&to_y, &to_attended}",
        f"{DATAFLOW3}::test_it_finds_each_tensor_wherever_it_lies[v4_dataflow-cpu]",
    ),
]

FAULTS = [
    Fault(
        "attention-lies-by-heads",
        "the best separate launches: attention's output lies head by head",
        "step3-fused/include/step3/step2_attention.h",
        "args.out_stride = {a.q_length * width, a.head_dim, width};",
        "args.out_stride = {a.q_length * width, a.q_length * a.head_dim, a.head_dim};",
        best("attention_block"),
    ),
    Fault(
        "best-skips-the-projection",
        "the best separate launches: what is added and normalised is not projected",
        f"{BLOCK3}/pieces.cu",
        "normalisation(a, scratch.projected)",
        "normalisation(a, scratch.attended)",
        best("attention_block"),
    ),
    Fault(
        "best-sums-over-attention",
        "the best separate launches: the sum and the output of attention share memory",
        "step3-fused/kernels/attention_residual_layer_norm/pieces.cu",
        "auto* const sum = static_cast<unsigned char*>(a.scratch);",
        "auto* const sum = static_cast<unsigned char*>(a.attended == nullptr ? a.scratch : a.attended);",
        best("attention_residual_layer_norm"),
    ),
    Fault(
        "a-short-band-is-a-whole-one",
        "dataflow: the groups of a short band are counted as if it were a whole one",
        f"{BLOCK3}/order.h",
        "size = min(end, kBandGroups);",
        "size = kBandGroups;",
        length(193),
    ),
    Fault(
        "the-last-chunk-is-a-whole-one",
        "dataflow: the last batches are taken for four",
        f"{BLOCK3}/order.h",
        "    const int here = min(kTogether, batches - chunk * kTogether);\n    const int band_number",
        "    const int here = kTogether;\n    const int band_number",
        dataflow("(5, 1, 200, 200, 24)"),
    ),
    Fault(
        "the-last-rows-are-never-told",
        "dataflow: who attended last does not say so",
        f"{BLOCK3}/attend.h",
        "  tell_stored();\n}\n",
        "}\n",
        length(64),
    ),
    Fault(
        "a-head-writes-into-the-next",
        "dataflow: a head of few columns stores all 64",
        f"{BLOCK3}/attend.h",
        "if (row < rows && column < columns) {",
        "if (row < rows) {",
        dataflow("(5, 1, 200, 200, 24)"),
    ),
    Fault(
        "lanes-exchange-half",
        "dataflow: of four lanes only neighbours exchange what they store",
        f"{BLOCK3}/attend.h",
        "for (int apart = 1; apart <= 2; apart *= 2) {",
        "for (int apart = 1; apart < 2; apart *= 2) {",
        length(33),
    ),
    Fault(
        "unmasked-first-keys",
        "dataflow: the first keys of a tile are not masked",
        f"{BLOCK3}/attend.h",
        "        mask_scores(score, block, first_row, j * kKeys);\n        softmax",
        "        softmax",
        length(33),
    ),
    Fault(
        "one-bias-for-sixteen-columns",
        "dataflow: the bias of eight columns is added to the next eight",
        f"{BLOCK3}/project.h",
        "widen(load_vector<2>(stage.a + (group + i) * 8 +",
        "widen(load_vector<2>(stage.a + group * 8 +",
        length(1),
    ),
    Fault(
        "a-sum-is-not-told",
        "dataflow: a tile of the projection is stored, and nobody is told",
        f"{BLOCK3}/project.h",
        "    add_release(counters.projected + order.number_of(tile.group), 1u);\n",
        "",
        length(1),
    ),
    Fault(
        "weights-of-the-first-columns",
        "dataflow: each tile of the projection has the weights of the first",
        f"{BLOCK3}/project.h",
        "&maps.weight, &shared.pipe.full[ring.index], column + c,",
        "&maps.weight, &shared.pipe.full[ring.index], c,",
        dataflow("(1, 17, 70, 70, 8)"),
    ),
    Fault(
        "variance-around-zero",
        "dataflow: the variance is that around 0",
        f"{BLOCK3}/normalize.h",
        "rstd[r] += (number - mean[r]) * (number - mean[r]);",
        "rstd[r] += number * number;",
        f"{DATAFLOW3}::test_rows_far_from_0[v4_dataflow-cpu]",
    ),
    Fault(
        "a-row-too-many",
        "dataflow: the row after the last is normalised too",
        f"{BLOCK3}/normalize.h",
        "if (r >= count) continue;",
        "if (r > count) continue;",
        length(65),
    ),
    Fault(
        "counters-of-the-run-before",
        "dataflow: counters begin with what they were",
        f"{BLOCK3}/v4_dataflow.cu",
        "static_cast<size_t>(Counters::bytes(order)), as_stream(stream))",
        "0, as_stream(stream))",
        length(1),
    ),
]
