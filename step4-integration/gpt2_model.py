"""GPT-2 on this project's ops: page one of step 4.

A block with `fused=True` runs attention, projection, bias, residual and LayerNorm as one op, step 3's
`attention_block`; with `fused=False` as separate ops of steps 2 and 3. Both give the same numbers, and the tests hold
them against Hugging Face. The matrix products outside the lesson are torch's.

python gpt2_model.py        the four sizes, and fused beside separate on a small random model
"""

import dataclasses
import math
import os

import gpt2_weights
import torch
from torch import nn
from torch.nn import functional as F

from step1_simple import bias_gelu  # not installed? pip install -e ..
from step2_attention import attention
from step3_fused import attention_block, layer_norm, residual_layer_norm
from step4_integration import embedding, kv_append


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a GPT-2 under Hugging Face's names, and how to run it.

    `fused` chooses `attention_block` or separate ops. `rungs` names the rung of an op where it is not to be "auto":
    `{"attention_block": "v2_fused"}`.
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
    fused: bool = True
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
        unknown = set(self.rungs) - OPS
        if unknown:
            raise ValueError(f"Config: `rungs` may name {', '.join(sorted(OPS))}, got {', '.join(sorted(unknown))}")

    def rung(self, op: str) -> str:
        return self.rungs.get(op, "auto")


GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}
OPS = {"embedding", "layer_norm", "attention_block", "attention", "residual_layer_norm", "bias_gelu", "kv_append"}
SIZES = {
    "gpt2": Config(),
    "gpt2-medium": Config(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": Config(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": Config(n_embd=1600, n_layer=48, n_head=25),
}


class Weights(nn.Module):
    """A weight, and perhaps a bias, under the names Hugging Face stores them by. Matrices are [in, out], as stored."""

    def __init__(self, *shape: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[-1])) if bias else None


def linear(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """`x @ weight + bias`."""
    y = torch.addmm(weights.bias, x.reshape(-1, x.shape[-1]), weights.weight)
    return y.view(*x.shape[:-1], -1)


class KVCache:
    """Keys and values of the tokens so far: for each layer two tensors [batch, heads, capacity, head_dim]."""

    def __init__(self, config: Config, batch: int, capacity: int | None = None, *, dtype=torch.float32, device="cpu"):
        capacity = config.n_positions if capacity is None else capacity
        shape = (config.n_layer, batch, config.n_head, capacity, config.n_embd // config.n_head)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0
        self.rung = config.rung("kv_append")

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds k and v of the new tokens; returns views of all so far. `GPT2.hidden` moves `length` at the end."""
        kv_append(self.k[layer], self.v[layer], k, v, self.length, rung=self.rung)
        end = self.length + k.shape[2]
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.c_attn = Weights(config.n_embd, 3 * config.n_embd)
        self.c_proj = Weights(config.n_embd, config.n_embd)
        self.config, self.layer = config, layer
        self.scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1

    def forward(self, y: torch.Tensor, x: torch.Tensor, norm: Weights, cache: KVCache | None):
        """Adds attention over `y` to the residual stream `x`. Returns its LayerNorm by `norm`, and the sum."""
        config = self.config
        batch, length, width = y.shape
        packed = linear(y, self.c_attn).view(batch, length, 3, config.n_head, width // config.n_head)
        q, k, v = packed.permute(2, 0, 3, 1, 4)  # views [batch, heads, length, head_dim]: nothing is copied
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        options = {"causal": True, "scale": self.scale}
        if config.fused:
            return attention_block(
                q, k, v, x, self.c_proj.weight, self.c_proj.bias, norm.weight, norm.bias,
                eps=config.layer_norm_epsilon, rung=config.rung("attention_block"), **options,
            )  # fmt: skip
        heads = attention(q, k, v, rung=config.rung("attention"), **options)
        projected = linear(heads.transpose(1, 2).reshape(batch, length, width), self.c_proj)
        return add_and_norm(projected, x, norm, config)


def add_and_norm(update: torch.Tensor, x: torch.Tensor, norm: Weights, config: Config):
    """Adds `update` to the residual stream `x`. Returns the sum's LayerNorm by `norm`, and the sum."""
    return residual_layer_norm(
        update, x, norm.weight, norm.bias, eps=config.layer_norm_epsilon, rung=config.rung("residual_layer_norm")
    )


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        inner = 4 * config.n_embd if config.n_inner is None else config.n_inner
        self.c_fc = Weights(config.n_embd, inner)
        self.c_proj = Weights(inner, config.n_embd)
        self.approximate = GELUS[config.activation_function]
        self.rung = config.rung("bias_gelu")

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        hidden = bias_gelu(y @ self.c_fc.weight, self.c_fc.bias, approximate=self.approximate, rung=self.rung)
        return linear(hidden, self.c_proj)


class Block(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.ln_1 = Weights(config.n_embd)
        self.attn = Attention(config, layer)
        self.ln_2 = Weights(config.n_embd)
        self.mlp = MLP(config)


class GPT2(nn.Module):
    """GPT-2 with its output head tied to the token embedding. Parameters carry Hugging Face's names."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.wte = Weights(config.vocab_size, config.n_embd, bias=False)
        self.wpe = Weights(config.n_positions, config.n_embd, bias=False)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
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

    def hidden(self, ids: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """The normalised last hidden state [batch, length, n_embd] of `ids`, which follow the tokens in `cache`."""
        config = self.config
        position = cache.length if cache is not None else 0
        x = embedding(ids, self.wte.weight, self.wpe.weight, position=position, rung=config.rung("embedding"))
        # Each LayerNorm belongs to the op that makes its input: ln_2 to the attention before it, a block's ln_1 to the
        # residual sum that ends the block before. Only the very first stands alone.
        first = self.h[0].ln_1
        y = layer_norm(x, first.weight, first.bias, eps=config.layer_norm_epsilon, rung=config.rung("layer_norm"))
        following = [*(block.ln_1 for block in self.h[1:]), self.ln_f]
        for block, norm in zip(self.h, following, strict=True):
            y, x = block.attn(y, x, block.ln_2, cache)
            y, x = add_and_norm(block.mlp(y), x, norm, config)
        if cache is not None:
            cache.length += ids.shape[1]
        return y

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.wte.weight)

    def forward(self, ids: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Logits [batch, length, vocab_size].

        Args:
            ids: [batch, length], int64 or int32.
            cache: keys and values of the tokens before; `ids` are added to it. Only without gradients.
        """
        return self.logits(self.hidden(ids, cache))

    # ---- weights: gpt2_weights.py ----

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike,
        *,
        fused: bool = True,
        rungs: dict[str, str] | None = None,
        dtype=None,
        device="cpu",
    ) -> "GPT2":
        """A model from a folder with `config.json` and safetensors files, or by name from the Hugging Face hub.

        Args:
            name: a folder; else a name on the hub ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "owner/name").
            fused, rungs: as in `Config`.
            dtype: of the parameters; None takes the file's.

        Raises:
            FileNotFoundError: no such folder, and the hub does not give the name either.
            ValueError: a config that is no GPT-2 of ours; a tensor missing, unexpected or of another shape.
        """
        folder = gpt2_weights.find(name)
        entries = gpt2_weights.read_config(folder)
        ways = {"fused": fused, "rungs": rungs or {}}  # how to run it, not what it is
        sizes = {f.name: entries[f.name] for f in dataclasses.fields(Config) if f.name in entries.keys() - ways.keys()}
        config = Config(**ways)
        try:
            config = dataclasses.replace(config, **sizes)
        except ValueError as error:
            raise ValueError(f"from_pretrained: {folder / gpt2_weights.CONFIG}: {error}") from error
        with torch.device("meta"):
            model = cls(config)
        tensors = gpt2_weights.read_tensors(folder, dict(model.named_parameters()))
        if gpt2_weights.read_config(folder) != entries:
            raise ValueError(f"from_pretrained: {folder}: another model was saved there meanwhile; read it again")
        model = model.to(dtype or tensors["wte.weight"].dtype).to_empty(device=device)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(tensors[key])
        return model

    def save_pretrained(self, folder: str | os.PathLike, **extra) -> None:
        """Writes `config.json` (with `extra` entries) and `model.safetensors`, readable here and by transformers."""
        sizes = dataclasses.asdict(self.config)
        del sizes["fused"], sizes["rungs"]
        gpt2_weights.write(folder, sizes | extra, dict(self.named_parameters()))


def main() -> None:
    for name, config in SIZES.items():
        with torch.device("meta"):
            parameters = sum(p.numel() for p in GPT2(config).parameters())
        sizes = f"{config.n_layer} layers, {config.n_head} heads, width {config.n_embd}"
        print(f"{name:12} {sizes}: {parameters:,} parameters")
    torch.manual_seed(0)
    small = Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4, initializer_range=0.1)
    fused = GPT2(small)
    separate = GPT2(dataclasses.replace(small, fused=False))
    separate.load_state_dict(fused.state_dict())
    ids = torch.randint(small.vocab_size, (2, 64))
    with torch.no_grad():
        difference = (fused(ids) - separate(ids)).abs().max().item()
    print(f"small random model, logits, fused against separate ops: greatest difference {difference:.1e}")


if __name__ == "__main__":
    main()
