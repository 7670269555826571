"""sample: the next token, chosen where the logits lie."""

import math

import torch

from kernel_fusion.ops import check_device, check_dim, check_floating, check_shape, check_type, without_forward_mode

_ops = torch.ops.step4_integration
MOST_COLUMNS = 1 << 24


@without_forward_mode
def sample(
    logits: torch.Tensor,
    rng_state: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    rung: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row of `logits`, drawn as transformers' `generate` would draw it, without a wait for the host.

    In the order of transformers: `repetition_penalty`, `temperature`, `top_k`, `top_p`, `min_p`, and a draw from what
    is left. Columns with equal scores are kept together or left out together, by top_k and by top_p: more than `top_k`
    may be kept, as in transformers. Numbers are computed in float32, and in float64 for float64 logits; probabilities
    below e⁻²⁶ of the likeliest one are 0. The same arguments give the same tokens to the last bit, with every rung, on
    every device, and whatever else is in the batch.

    Args:
        logits: [batch, vocab], vocab up to 2²⁴; float32, float16, bfloat16 or float64.
        rng_state: int64 [batch, 2], contiguous, on the device of `logits`: seed and offset of each row. The number of
            a row is Philox's for them; the op raises the offset by 1, so that each replay of a CUDA graph draws anew.
            It may be None, and stays as it is, where `temperature` is 0.
        seen: bool or uint8 [batch, vocab], stride 1 along its last dimension: the tokens that `repetition_penalty`
            holds for. The op marks the token that it takes.
        temperature: what scores are divided by; 0 takes the likeliest token, the first among equals.
        top_k: how many of the likeliest tokens stay; 0 for all.
        top_p: the likeliest tokens stay that together reach this probability, at least one; 1 for all.
        min_p: tokens stay that have this part of the likeliest one's probability; 0 for all.
        repetition_penalty: what scores of `seen` tokens are divided by, or multiplied by where they are negative.
        rung: "auto", or a name from `rungs("sample", logits.device)`.

    Returns:
        The token, int64 [batch], and its log-probability, float32 [batch]: the model's, log_softmax of `logits` as they
        came, whatever the other arguments are. A row that has no distribution, as it holds a NaN or +∞, or nothing but
        −∞, gives token −1, a log-probability of NaN, and no mark in `seen`.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: wrong shape, device or layout, a number out of its range, unknown `rung`; `rng_state` is missing
            where `temperature` is not 0, or `seen` where `repetition_penalty` is not 1.
        RuntimeError: gradients are being recorded for `logits`; a drawn token passes none on.
    """
    return _ops.sample(
        logits,
        rng_state,
        seen,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        rung=rung,
    )


@torch.library.register_fake("step4_integration::sample")
def _(
    logits,
    rng_state=None,
    seen=None,
    *,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    rung="auto",
):
    """The checks of sample_host.cpp, without data."""
    check_floating("sample", "logits", logits)
    check_dim("sample", "logits", logits, 2)
    batch, columns = logits.shape
    torch._check_value(
        0 < columns <= MOST_COLUMNS,
        lambda: f"sample: `logits` must have from 1 to {MOST_COLUMNS} columns, got {columns}",
    )
    for name, number, fits, must in (
        ("temperature", temperature, 0 <= temperature < math.inf, "be finite and not negative"),
        ("top_k", top_k, top_k >= 0, "not be negative"),
        ("top_p", top_p, 0 <= top_p <= 1, "be from 0 to 1"),
        ("min_p", min_p, 0 <= min_p <= 1, "be from 0 to 1"),
        ("repetition_penalty", repetition_penalty, 0 < repetition_penalty < math.inf, "be finite and greater than 0"),
    ):
        torch._check_value(
            fits, lambda name=name, number=number, must=must: f"sample: `{name}` must {must}, got {number}"
        )
    torch._check_value(
        rng_state is not None or temperature == 0,
        lambda: "sample: `rng_state` must be given where `temperature` is not 0",
    )
    torch._check_value(
        seen is not None or repetition_penalty == 1,
        lambda: "sample: `seen` must be given where `repetition_penalty` is not 1",
    )
    if rng_state is not None:
        check_type("sample", "rng_state", rng_state, (torch.int64,))
        check_device("sample", "rng_state", rng_state, "logits", logits)
        check_shape("sample", "rng_state", rng_state, (batch, 2))
        torch._check_value(rng_state.is_contiguous(), lambda: "sample: `rng_state` must be contiguous")
    if seen is not None:
        check_type("sample", "seen", seen, (torch.bool, torch.uint8))
        check_device("sample", "seen", seen, "logits", logits)
        check_shape("sample", "seen", seen, (batch, columns))
        torch._check_value(
            (columns == 1 or seen.stride(1) == 1) and (batch <= 1 or seen.stride(0) >= columns),
            lambda: "sample: `seen` must have stride 1 along its last dimension, and rows apart from each other",
        )
    return logits.new_empty(batch, dtype=torch.int64), logits.new_empty(batch, dtype=torch.float32)
