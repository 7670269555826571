"""Greedy and sampled generation with a KV cache.

python generate.py --model ../out/small-gpt2 --prompt "The kernel"          what train.py made
python generate.py --model gpt2 --prompt "The kernel" --temperature 0.8     fetched by name from the hub
"""

import argparse
import codecs
import pathlib
import sys
from collections.abc import Callable

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
from kernel_fusion import stages

stages.on_path()
import gpt2_weights
from gpt2_model import GPT2, KVCache

from step2_attention import softmax


@torch.no_grad()
def generate(
    model: GPT2,
    ids: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int | None = None,
    stop: int | None = None,
    use_cache: bool = True,
    on_token: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """`ids` and up to `max_new_tokens` more for each row.

    The first step reads the whole prompt; each later one a single token, whose query meets the keys and values that the
    steps before left in the cache. `use_cache=False` reads everything again at each step, and gives the same tokens.

    Args:
        ids: [batch, length], at least one token, no padding; on the model's device.
        temperature: 0 takes the likeliest token; else logits are divided by it and a token is drawn.
        top_k: draws only among the k likeliest; more than the vocabulary are all.
        seed: of the draws; None takes one at random.
        stop: a row ends with this token; when all rows have ended, generation does. Ended rows are filled with it.
        on_token: called with each new token, [batch].

    Returns:
        [batch, length + new].

    Raises:
        ValueError: an argument out of its range, or more tokens than the model has positions.
    """
    config = model.config
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise ValueError(f"generate: `ids` must be [batch, length] at least one token, got shape {tuple(ids.shape)}")
    if max_new_tokens < 0 or ids.shape[1] + max_new_tokens > config.n_positions:
        raise ValueError(
            f"generate: `max_new_tokens` must be from 0 to {config.n_positions - ids.shape[1]} after a prompt of "
            f"{ids.shape[1]} tokens (the model has {config.n_positions} positions), got {max_new_tokens}"
        )
    if temperature < 0:
        raise ValueError(f"generate: `temperature` must not be negative, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"generate: `top_k` must be at least 1, got {top_k}")
    generator = torch.Generator(ids.device)
    generator.seed() if seed is None else generator.manual_seed(seed)

    weight = model.wte.weight
    capacity = ids.shape[1] + max_new_tokens
    cache = KVCache(config, len(ids), capacity, dtype=weight.dtype, device=weight.device) if use_cache else None
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    step = ids
    for _ in range(max_new_tokens):
        hidden = model.hidden(step, cache)
        token = choose(model.logits(hidden[:, -1]), temperature, top_k, generator)
        if stop is not None:
            token = torch.where(ended, stop, token)
            ended |= token == stop
        ids = torch.cat([ids, token[:, None].to(ids.dtype)], dim=1)
        if on_token is not None:
            on_token(token)
        if stop is not None and ended.all():
            break
        step = ids[:, -1:] if use_cache else ids
    return ids


def choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> torch.Tensor:
    """One token a row, [batch], of logits [batch, vocab]."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None:
        likeliest = logits.topk(min(top_k, logits.shape[-1]))  # k of them even where the k-th is as likely as the next
        logits = torch.full_like(logits, float("-inf")).scatter(-1, likeliest.indices, likeliest.values)
    return torch.multinomial(softmax(logits), 1, generator=generator)[:, 0]


def where_different(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """The earliest token in which two results of `generate` differ, in words; None where they are the same."""
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} against {tuple(theirs.shape)}"
    different = ours != theirs
    if not different.any():
        return None
    column = different.any(0).nonzero()[0].item()
    row = different[:, column].nonzero()[0].item()
    return (
        f"token {column} of row {row} is {ours[row, column].item()}, not {theirs[row, column].item()}; "
        f"{different.sum().item()} of {different.numel()} tokens differ"
    )


class ByteTokenizer:
    """A token is a byte of UTF-8: what train.py's model reads and writes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def stream(self) -> Callable[[int], str]:
        """A function from each token in turn to the text it completes; a character of several bytes comes last."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: decoder.decode(bytes([token]))


class FileTokenizer:
    """`tokenizer.json`, as the hub's GPT-2 brings it."""

    def __init__(self, path: pathlib.Path):
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def stream(self) -> Callable[[int], str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream()
        return lambda token: stream.step(self.tokenizer, token) or ""


def read_tokenizer(folder: pathlib.Path) -> ByteTokenizer | FileTokenizer:
    """The tokenizer of the model in `folder`."""
    if gpt2_weights.read_config(folder).get("tokenizer") == "bytes":
        return ByteTokenizer()
    if (folder / "tokenizer.json").exists():
        return FileTokenizer(folder / "tokenizer.json")
    raise FileNotFoundError(f"{folder / 'tokenizer.json'} is missing")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Continues a text with GPT-2.")
    parser.add_argument("--model", required=True, help="a folder, such as ../out/small-gpt2, or a name on the hub")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, default=100, help="how many to add (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--top-k", type=int, help="draw among the k likeliest")
    parser.add_argument("--seed", type=int, help="of the draws")
    parser.add_argument("--separate", action="store_true", help="separate ops instead of attention_block")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="default: the file's")
    options = parser.parse_args(arguments)
    try:
        folder = gpt2_weights.find(options.model)
        tokenizer = read_tokenizer(folder)
        dtype = getattr(torch, options.dtype) if options.dtype else None
        model = GPT2.from_pretrained(folder, fused=not options.separate, dtype=dtype, device=options.device)
        show = tokenizer.stream()
        print(options.prompt, end="", flush=True)
        generate(
            model,
            torch.tensor([tokenizer.encode(options.prompt)], dtype=torch.int64, device=options.device),
            options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
            on_token=lambda token: print(show(token.item()), end="", flush=True),
        )
        print()
    except (FileNotFoundError, NotImplementedError, ValueError) as error:
        sys.exit(f"generate.py: {error}")


if __name__ == "__main__":
    main()
