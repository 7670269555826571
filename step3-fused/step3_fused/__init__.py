"""Step 3: LayerNorm, and attention and products fused with what follows them. Each function calls a registered op."""

import torch

from kernel_fusion import sharding
from kernel_fusion.steps import load

_C = load("step3_fused")

from step3_fused.attention_ops import attention_block, attention_residual_layer_norm  # noqa: E402  _C registers the ops
from step3_fused.layer_norm_ops import (  # noqa: E402
    layer_norm,
    layer_norm_backward,
    layer_norm_linear,
    residual_layer_norm,
)
from step3_fused.linear_ops import (  # noqa: E402
    gelu_linear,
    gelu_linear_backward,
    linear_bias_dropout_residual,
    linear_bias_dropout_residual_backward,
    linear_gelu,
    linear_gelu_backward,
    mlp,
    transformer_block,
)

__all__ = [
    "needs_scratch",
    "attention_block",
    "attention_residual_layer_norm",
    "emulated_kernels",
    "gelu_linear",
    "gelu_linear_backward",
    "launch_counts",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_linear",
    "linear_bias_dropout_residual",
    "linear_bias_dropout_residual_backward",
    "linear_gelu",
    "linear_gelu_backward",
    "mlp",
    "residual_layer_norm",
    "rounds",
    "rungs",
    "transformer_block",
    "varies",
]

launch_counts = _C.launch_counts
emulated_kernels = _C.emulated_kernels  # kernels that the emulation has launched: an op of three launches counts three


def rungs(op: str, device: str | torch.device = "cpu") -> list[str]:
    """Names that `op` takes as `rung` for tensors on `device`, in the order of the lesson."""
    return _C.rungs(op, torch.device(device).type == "cuda")


def rounds(op: str, rung: str) -> str:
    """What `rung` of `op` rounds to the tensors' dtype on the way; "" for one that rounds once, at the end."""
    return _C.rounds(op, rung)


def varies(op: str, rung: str) -> bool:
    """Whether two runs of `rung` may differ in their last bits, since blocks add to the same numbers in any order."""
    return _C.varies(op, rung)


def needs_scratch(op: str, rung: str) -> bool:
    """Whether `rung` of `op` needs global memory between its launches. One that is fused into one launch does not."""
    return _C.needs_scratch(op, rung)


# ---- which parts of DTensors an op takes; where something is dropped, none: a mask belongs to the whole tensor ----

_LAYER, _LAYER_BACKWARD = "...d, dw', w -> ...w", "...d, dw' -> ...d+w, dw'+..., w+... | ...dw"

sharding.register(
    "step3_fused",
    {
        "layer_norm": "...w, w, w -> ...w, ...?, ...? | ...",
        "layer_norm_backward": "...w, ...w, w, ..., ..., ...w -> ...w, w+..., w+... | ...",
        "residual_layer_norm": lambda rng_state: (
            "...w, ...w, w, w, w, _ -> ...w, ...w, ...?, ...? | " + ("..." if rng_state is None else "")
        ),
        "layer_norm_linear": "...d, d, d, dw', w -> ...w, ..., ... | ...w",
        "linear_gelu": f"{_LAYER}, ...w? | ...w",
        "linear_gelu_backward": f"...w, ...w, {_LAYER_BACKWARD}",
        "gelu_linear": lambda bias: f"{_LAYER}+d | ...w" + ("d" if bias is None else ""),
        "gelu_linear_backward": f"...w, {_LAYER_BACKWARD}",
        "mlp": "...w, wi', i, iw', w, ...w -> ...w, ...i? | ...",
        "attention_residual_layer_norm": lambda attention_rng_state: (
            "bhqd, bhkd, bhkd, bqw, w, w, b, b, _ -> bqw, bqw?, bhq?, bq?, bq? | "
            + ("b" if attention_rng_state is None else "")
        ),
        "attention_block": lambda rng_state, attention_rng_state: (
            "bhqd, bhkd, bhkd, bqw, _, w, w, w, b, b, _, _, _ -> bqw, bqw, bqw?, bhq?, bq?, bq? | "
            + ("b" if rng_state is None and attention_rng_state is None else "")
        ),
    },
)
