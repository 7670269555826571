"""GPT-2 on this project's ops: page one of step 4.

A model is weights, and a block that is computed in one of the forms of model/blocks/, from PyTorch's operations to
step 3's fused ops. All forms give the same numbers, and the tests hold them against Hugging Face.

python gpt2_model.py        the four sizes, and the forms of a block beside each other on a small random model
"""

import argparse
import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":  # --help needs no build
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

import torch
from model import weights as weight_files
from model.blocks import FORMS, recomputed
from model.cache import KVCache
from torch import nn
from torch.nn import functional as F

from step2_attention import linear  # not installed? pip install -e ..
from step3_fused import layer_norm
from step4_integration import embedding, linear_cross_entropy


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a GPT-2 under Hugging Face's names, and how to run it.

    `blocks` chooses the form of a block, one of model/blocks/. `rungs` names the rung of an op where it is not to be
    "auto": `{"attention_block": "v2_fused"}`.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None  # 4 * n_embd where None
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    activation_function: str = "gelu_new"
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    blocks: str = "v4_products"
    rungs: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"):
            value = getattr(self, name)
            if name == "n_inner" and value is None:
                continue
            if type(value) is not int:
                raise ValueError(f"Config: `{name}` must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"Config: `{name}` must be at least 1, got {value}")
            if value >= 1 << 24:
                raise ValueError(f"Config: `{name}` must be below 2^24, got {value}")
        for name in ("layer_norm_epsilon", "initializer_range"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ValueError(f"Config: `{name}` must be a number from 0 up, got {value!r}")
        for name in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"Config: `{name}` must be true or false, got {getattr(self, name)!r}")
        if self.n_embd % self.n_head:
            raise ValueError(f"Config: `n_embd` must be a multiple of `n_head`, got {self.n_embd} and {self.n_head}")
        if self.activation_function not in list(GELUS):  # what a file holds may have no hash
            raise ValueError(
                f"Config: `activation_function` must be one of {', '.join(GELUS)}, got {self.activation_function!r}"
            )
        if self.blocks not in FORMS:
            raise ValueError(f"Config: `blocks` must be one of {', '.join(FORMS)}, got {self.blocks!r}")
        unknown = set(self.rungs) - OPS
        if unknown:
            raise ValueError(f"Config: `rungs` may name {', '.join(sorted(OPS))}, got {', '.join(sorted(unknown))}")

    def rung(self, op: str) -> str:
        return self.rungs.get(op, "auto")

    def entries(self) -> dict[str, Any]:
        """What config.json says of it: what the model is, not how to run it."""
        entries = dataclasses.asdict(self)
        del entries["blocks"], entries["rungs"]
        return entries

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def gelu(self) -> str:
        """What the ops call the formula of GELU."""
        return GELUS[self.activation_function]


GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}
OPS = {
    "embedding", "layer_norm", "linear", "attention", "attention_decode", "attention_block", "residual_layer_norm",
    "bias_gelu", "mlp", "kv_append", "decode_step", "sample", "cross_entropy",
}  # fmt: skip
SIZES = {
    "gpt2": Config(),
    "gpt2-medium": Config(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": Config(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": Config(n_embd=1600, n_layer=48, n_head=25),
}


def positions_of(ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Where each token of a packed row stands in its document, int32 [length]; nobody waits for the starts."""
    if ids.shape[0] != 1:
        raise ValueError(f"GPT2: `ids` must have batch 1 where `cu_seqlens` is given, got {ids.shape[0]}")
    places = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
    return places - cu_seqlens[torch.bucketize(places, cu_seqlens, right=True) - 1]


class Weights(nn.Module):
    """A weight, and perhaps a bias, under the names Hugging Face stores them by. Matrices are [in, out], as stored."""

    def __init__(self, *shape: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[-1])) if bias else None


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.c_attn = Weights(config.n_embd, 3 * config.n_embd)
        self.c_proj = Weights(config.n_embd, config.n_embd)


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        inner = 4 * config.n_embd if config.n_inner is None else config.n_inner
        self.c_fc = Weights(config.n_embd, inner)
        self.c_proj = Weights(inner, config.n_embd)


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.ln_1 = Weights(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = Weights(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, form: Callable, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`form` with these weights: a call of the module, which is where FSDP gathers them."""
        return form(self, *inputs)


class GPT2(nn.Module):
    """GPT-2 with its output head tied to the token embedding. Parameters carry Hugging Face's names."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.recompute = False  # whether training computes a block's activations again in its backward pass
        self.wte = Weights(config.vocab_size, config.n_embd, bias=False)
        self.wpe = Weights(config.n_positions, config.n_embd, bias=False)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = Weights(config.n_embd)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Random weights as GPT-2 starts from; projections into the residual stream are smaller, for there are many."""
        for name, parameter in self.named_parameters():
            std = self.config.initializer_range
            if name.endswith("c_proj.weight"):
                std /= math.sqrt(2 * self.config.n_layer)
            if name.endswith("bias"):
                parameter.zero_()
            elif ".ln_" in f".{name}":
                parameter.fill_(1)
            else:
                parameter.normal_(std=std)

    def form(self) -> Callable:
        """How a block is computed."""
        return FORMS[self.config.blocks]

    def embedded(self, ids: torch.Tensor, cache: KVCache | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """What the first block adds to, [batch, length, n_embd]."""
        tables, rung = (self.wte.weight, self.wpe.weight), self.config.rung("embedding")
        if cu_seqlens is None:
            return embedding(ids, *tables, None if cache is None else cache.begin, rung=rung)
        # each token is a sequence of its own, and has its position
        return embedding(ids.mT, *tables, positions_of(ids, cu_seqlens), rung=rung).transpose(0, 1)

    def hidden(
        self,
        ids: torch.Tensor,
        cache: KVCache | None = None,
        cu_seqlens: torch.Tensor | None = None,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The normalised last hidden state [batch, length, n_embd] of `ids`, which follow the tokens in `cache`.

        `last`, int64 [batch], with a cache: of each row the one token whose state is wanted, [batch, 1, n_embd]. The
        row's text ends there: what stands behind is padding, and rows take one token each from then on."""
        config = self.config
        length = ids.shape[1]
        if cache is not None:
            if cu_seqlens is not None:
                raise ValueError("GPT2: `cache` must be None where `cu_seqlens` is given: it has one text in a row")
            cache.open(length, last)
        elif last is not None:
            raise ValueError("GPT2: `last` must be None without a `cache`: it is of prompts that are read into one")
        x = self.embedded(ids, cache, cu_seqlens)
        # Each LayerNorm belongs to the op that makes its input: ln_2 to the attention before it, a block's ln_1 to the
        # residual sum that ends the block before. Only the very first stands alone.
        first = self.h[0].ln_1
        y = layer_norm(x, first.weight, first.bias, eps=config.layer_norm_epsilon, rung=config.rung("layer_norm"))
        following = [*(block.ln_1 for block in self.h[1:]), self.ln_f]
        form = recomputed(self.form()) if self.recompute else self.form()
        for layer, (block, norm) in enumerate(zip(self.h, following, strict=True)):
            y, x = block(form, y, x, norm, config, layer, cache, cu_seqlens)
        if cache is not None:
            cache.close(length)
        return y

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`hidden @ tokenᵀ`, [..., vocab_size], in `out` if that is given: the head is the token table once more."""
        weight, rung = self.wte.weight, self.config.rung("linear")
        if self.config.blocks == "v1_torch":
            logits = F.linear(hidden, weight)
            return logits if out is None else out.copy_(logits)
        if out is not None:
            return torch.ops.step2_attention.linear.out(hidden, weight, None, transposed=True, rung=rung, y=out)
        return linear(hidden, weight, transposed=True, rung=rung)

    def takes_steps(self) -> bool:
        """Whether `decode_step` adds tokens."""
        return self.config.blocks == "v4_products"

    def step_sharing(self) -> dict[str, Any]:
        """What `decode_step` takes besides, where several workers share a model."""
        return {}

    def own_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Where `decode_step` writes its logits: `logits`, or memory for a worker's share of them."""
        return logits

    def step_weights(self) -> list[torch.Tensor]:
        """What `decode_step` takes as `weights`: those of each layer, then those of the last LayerNorm."""
        modules = [
            part
            for block in self.h
            for part in (block.ln_1, block.attn.c_attn, block.attn.c_proj, block.ln_2, block.mlp.c_fc, block.mlp.c_proj)
        ]
        return [tensor for part in [*modules, self.ln_f] for tensor in (part.weight, part.bias)]

    def forward(
        self, ids: torch.Tensor, cache: KVCache | None = None, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [batch, length, vocab_size].

        Args:
            ids: [batch, length], int64 or int32.
            cache: keys and values of the tokens before; `ids` are added to it. Only without gradients.
            cu_seqlens: of a packed row, batch 1, where its documents begin: int32 [documents + 1], 0 first, `length`
                last. Positions count within each, and none sees another. Not together with `cache`.
        """
        return self.logits(self.hidden(ids, cache, cu_seqlens))

    def loss(self, ids: torch.Tensor, targets: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        """Mean cross-entropy in nats of `targets`, given `ids`; the logits are never in memory in float32.

        Args:
            ids, cu_seqlens: as `forward` takes them.
            targets: [batch, length], int64; those of -100 do not count.
        """
        hidden = self.hidden(ids, None, cu_seqlens).flatten(0, 1)
        rung = self.config.rung("cross_entropy")
        return linear_cross_entropy(hidden, self.wte.weight, targets.flatten(), rung=rung)

    # ---- weights: model/weights.py ----

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike,
        *,
        blocks: str = Config.blocks,
        rungs: dict[str, str] | None = None,
        dtype=None,
        device="cpu",
    ) -> "GPT2":
        """A model from a folder with `config.json` and safetensors files, or by name from the Hugging Face hub.

        Args:
            name: a folder; else a name on the hub ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "owner/name").
            blocks, rungs: as in `Config`.
            dtype: of the parameters; None takes the file's.

        Raises:
            FileNotFoundError: no such folder, and the hub does not give the name either.
            ValueError: a config that is no GPT-2 of ours; a tensor missing, unexpected or of another shape.
        """
        folder = weight_files.find(name)
        entries = weight_files.read_config(folder)
        ways = {"blocks": blocks, "rungs": rungs or {}}  # how to run it, not what it is
        sizes = {f.name: entries[f.name] for f in dataclasses.fields(Config) if f.name in entries.keys() - ways.keys()}
        config = Config(**ways)
        try:
            config = dataclasses.replace(config, **sizes)
        except ValueError as error:
            raise ValueError(f"from_pretrained: {folder / weight_files.CONFIG}: {error}") from error
        with torch.device("meta"):
            model = cls(config)
        tensors = weight_files.read_tensors(folder, dict(model.named_parameters()))
        if weight_files.read_config(folder) != entries:
            raise ValueError(f"from_pretrained: {folder}: another model was saved there meanwhile; read it again")
        model = model.to(dtype or tensors["wte.weight"].dtype).to_empty(device=device)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(tensors[key])
        return model

    def save_pretrained(self, folder: str | os.PathLike, **extra) -> None:
        """Writes `config.json` (with `extra` entries) and `model.safetensors`, readable here and by transformers."""
        sizes = self.config.entries()
        weight_files.write(folder, sizes | extra, dict(self.named_parameters()))


def main() -> None:
    for name, config in SIZES.items():
        with torch.device("meta"):
            parameters = sum(p.numel() for p in GPT2(config).parameters())
        sizes = f"{config.n_layer} layers, {config.n_head} heads, width {config.n_embd}"
        print(f"{name:12} {sizes}: {parameters:,} parameters")
    torch.manual_seed(0)
    small = Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4, initializer_range=0.1)
    ids = torch.randint(small.vocab_size, (2, 64))
    weights = GPT2(small).state_dict()
    print("a small random model, logits:")
    before = None
    for form in FORMS:
        model = GPT2(dataclasses.replace(small, blocks=form))
        model.load_state_dict(weights)
        with torch.no_grad():
            logits = model(ids)
        if before is not None:
            print(f"  {form:18} differs from the form before by {(logits - before).abs().max().item():.1e}")
        before = logits


if __name__ == "__main__":
    main()
