"""Greedy and sampled generation with a KV cache.

python generate.py --model ../out/small-gpt2 --prompt "The kernel"          what train.py made
python generate.py --model gpt2 --prompt "The kernel" --temperature 0.8     fetched by name from the hub
"""

import argparse
import codecs
import math
import pathlib
import sys
from collections.abc import Callable

import gpt2_weights
import torch
from gpt2_model import GPT2, Config, KVCache

from step2_attention import softmax  # not installed? pip install -e ..

TOKENS = 100  # that the command adds where it is not told how many


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
        ids: [batch, length], at least one row and one token, no padding; on the model's device.
        temperature: 0 takes the likeliest token; else logits are divided by it and a token is drawn. Finite.
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
    if ids.dim() != 2 or ids.numel() == 0:
        raise ValueError(
            f"generate: `ids` must be [batch, length], at least one row and one token, got shape {tuple(ids.shape)}"
        )
    room = config.n_positions - ids.shape[1]
    if room < 0:
        raise ValueError(
            f"generate: `ids` must have at most {config.n_positions} tokens, the model's positions, got {ids.shape[1]}"
        )
    if not 0 <= max_new_tokens <= room:
        raise ValueError(
            f"generate: `max_new_tokens` must be from 0 to {room} after a prompt of {ids.shape[1]} tokens (the model "
            f"has {config.n_positions} positions), got {max_new_tokens}"
        )
    if temperature < 0:
        raise ValueError(f"generate: `temperature` must not be negative, got {temperature}")
    if not math.isfinite(temperature):
        raise ValueError(f"generate: `temperature` must be finite, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"generate: `top_k` must be at least 1, got {top_k}")
    if seed is not None:
        check_seed("generate", seed)
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
    logits = logits.float()
    # Less the greatest, so that a tiny temperature makes −∞ alone, a probability of 0.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None:
        likeliest = logits.topk(min(top_k, logits.shape[-1]))  # k of them even where the k-th is as likely as the next
        logits = torch.full_like(logits, float("-inf")).scatter(-1, likeliest.indices, likeliest.values)
    return torch.multinomial(softmax(logits), 1, generator=generator)[:, 0]


def check_seed(caller: str, seed: int) -> None:
    """A seed is what a generator of PyTorch takes."""
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"{caller}: `seed` must be from -2^63 to 2^64 - 1, got {seed}")


def check_device(name: str) -> None:
    """A device that `--device` may name is there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}") from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"--device must be one that is there, got {name!r}; CUDA devices here: {count or 'none'}")


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
    """The tokenizer of the model in `folder`.

    Raises:
        FileNotFoundError: it has none.
        ValueError: nobody knows it, or it is not whole.
    """
    entries = gpt2_weights.read_config(folder)
    kind = entries.get("tokenizer")
    if kind not in (None, "bytes"):
        raise ValueError(f"{folder / 'config.json'}: `tokenizer` must be 'bytes', or not be there, got {kind!r}")
    if kind == "bytes":
        vocab_size = entries.get("vocab_size", Config.vocab_size)
        if isinstance(vocab_size, int) and vocab_size > 256:  # where it is no integer, the model says so
            raise ValueError(
                f"{folder / 'config.json'}: `vocab_size` must be at most 256 where `tokenizer` is 'bytes', "
                f"got {vocab_size}"
            )
        return ByteTokenizer()
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    try:
        return FileTokenizer(path)
    except Exception as error:  # of no class of its own
        raise ValueError(f"{path}: no tokenizer's file: {error}{gpt2_weights.hint(path)}") from error


def encode(tokenizer: ByteTokenizer | FileTokenizer, prompt: str, vocab_size: int) -> list[int]:
    """The tokens of a prompt, for a model of that vocabulary. A ValueError says what is wrong with it."""
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ValueError(f"--prompt must be text in UTF-8, got {prompt!r}")
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError(f"--prompt must hold at least one token, got {prompt!r}")
    if max(ids) >= vocab_size:
        raise ValueError(
            f"--prompt must be of tokens from 0 to {vocab_size - 1}, the model's; its tokenizer made {max(ids)}"
        )
    return ids


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Continues a text with GPT-2.")
    parser.add_argument("--model", required=True, help="a folder, such as ../out/small-gpt2, or a name on the hub")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument(
        "--tokens", type=int, help=f"how many to add (default: {TOKENS}, or what the model has room for)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--top-k", type=int, help="draw among the k likeliest")
    parser.add_argument("--seed", type=int, help="of the draws")
    parser.add_argument("--separate", action="store_true", help="separate ops instead of attention_block")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="default: the file's")
    options = parser.parse_args(arguments)
    try:
        check_device(options.device)
        folder = gpt2_weights.find(options.model)
        tokenizer = read_tokenizer(folder)
        dtype = getattr(torch, options.dtype) if options.dtype else None
        model = GPT2.from_pretrained(folder, fused=not options.separate, dtype=dtype, device=options.device)
        ids = encode(tokenizer, options.prompt, model.config.vocab_size)
        room = max(0, model.config.n_positions - len(ids))
        show = tokenizer.stream()
        print(options.prompt, end="", flush=True)
        generate(
            model,
            torch.tensor([ids], dtype=torch.int64, device=options.device),
            min(TOKENS, room) if options.tokens is None else options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
            on_token=lambda token: print(show(token.item()), end="", flush=True),
        )
        print()
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"generate.py: {error}")


if __name__ == "__main__":
    main()
