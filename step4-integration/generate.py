"""Text by GPT-2, greedy or sampled, for one prompt or a batch of prompts of any lengths.

python generate.py --model ../out/small-gpt2 --prompt "The kernel"          what train.py made
python generate.py --model gpt2 --prompt "The kernel" --temperature 0.8     fetched by name from the hub
torchrun --standalone --nproc-per-node 2 generate.py --model …              each worker has a share of the model
"""

# ruff: noqa: E402  arguments are read first, so that --help needs no build
import argparse
import codecs
import contextlib
import functools
import io
import math
import operator
import os
import pathlib
import secrets
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, ParamSpec, TypeVar

TOKENS = 100  # that the command adds where it is not told how many


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Continues texts with GPT-2.")
    parser.add_argument("--model", required=True, help="a folder, such as ../out/small-gpt2, or a name on the hub")
    parser.add_argument("--prompt", required=True, action="append", help="the text to continue; may be given again")
    parser.add_argument(
        "--tokens", type=int, help=f"how many to add (default: {TOKENS}, or what the model has room for)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="draw among the k likeliest")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest that reach it together")
    parser.add_argument("--min-p", type=float, default=0.0, help="draw among those of this part of the likeliest's")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: tokens seen are less likely")
    parser.add_argument("--seed", type=int, help="of the draws")
    parser.add_argument("--samples", type=int, default=1, help="how many texts for each prompt")
    parser.add_argument("--stop", action="append", default=[], help="end a text with this token; may be given again")
    parser.add_argument("--window", action="store_true", help="take the end of a prompt that leaves no room")
    parser.add_argument("--log-probs", action="store_true", help="print the sum of the new tokens' log-probabilities")
    parser.add_argument("--blocks", help="the form of a block, of model/blocks/ (default: the last)")
    parser.add_argument("--device", help="default: cuda where there is a GPU")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], help="default: the file's")
    return parser


if __name__ == "__main__":
    make_parser().parse_args()

import torch
from gpt2_model import GPT2, Config
from model import weights as weight_files
from model.runner import Changed, Runner, forget, runner_of

from step4_integration import sample  # not installed? pip install -e ..

BEHIND = 8  # steps that the host may be behind the GPU in looking at tokens


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_gradients(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Outside inference mode, too: what is kept for the next call must be writable there, whatever its mode."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return call(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return call


@without_gradients
def generate(
    model: GPT2,
    prompts: torch.Tensor | Sequence[Any],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: int | Collection[int] | torch.Tensor | None = None,
    samples: int = 1,
    window: bool = False,
    use_cache: bool = True,
    return_log_probs: bool = False,
    on_token: Callable[[torch.Tensor], None] | None = None,
) -> Any:
    """Each prompt and up to `max_new_tokens` more tokens.

    The first step reads the prompts; each later one a single token, whose query meets the keys and values that the
    steps before left in the cache. On a GPU both are CUDA graphs, recorded at the first call for a number of rows, and
    the next token is chosen there: the host does not wait between tokens. The cache holds all of the model's positions
    and stays until the model is deleted. So do the second copy of the weights, 254 MB, by which a GPU adds to a long
    text of one row of the 124M model, and, until the next call, weights on a GPU that were replaced or moved.
    `model.runner.forget` gives the memory back.

    Args:
        prompts: ids [batch, length], int64 or int32; or a list of prompts, each a list of ids or a tensor [length], of
            any lengths. At least one row and one token each.
        temperature: 0 takes the likeliest token; else scores are divided by it and a token is drawn. Finite.
        top_k, top_p, min_p, repetition_penalty: as in `sample`; 0, 1, 0 and 1 change nothing.
        seed: of the draws; None takes one at random. A row's draws depend on its number and the seed alone.
        stop: a row ends with this token, or with one of these; when all rows have ended, generation does. Rows that
            ended earlier are filled with the token that they ended with.
        samples: how many texts for each prompt, beside each other; the prompt is read once.
        window: of a prompt that leaves no room for the new tokens, take the end that does. Else it is an error.
        use_cache: False reads everything again at each step, and gives the same tokens.
        return_log_probs: return the model's log-probability of each new token, too.
        on_token: called with each step's tokens in turn, [rows], on the CPU.

    Returns:
        As `prompts` came: a tensor [batch · samples, length + new] of its dtype on its device, or a list of tensors,
        each a prompt and its new tokens, on the model's device. With `return_log_probs` `(that, log_probs)`, log_probs
        float32 [batch · samples, new], 0 behind a row's end.

    Raises:
        TypeError: an argument of a type that it cannot be.
        ValueError: an argument out of its range, or more tokens than the model has positions; of prompts on the CPU, an
            id outside the vocabulary. On a GPU a check would wait for it: the new tokens of such a row are -1, and
            their log-probabilities NaN.
    """
    rows = check_prompts(model, prompts)
    max_new_tokens, top_k = integer("max_new_tokens", max_new_tokens), integer("top_k", top_k)
    samples, seed = integer("samples", samples), None if seed is None else integer("seed", seed)
    check_numbers(max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, samples)
    ends = check_stop(stop, model.config.vocab_size)
    positions = model.config.n_positions
    most = positions + 1  # tokens of a text: the last one is not read
    lengths = [rows.shape[1]] * rows.shape[0] if isinstance(rows, torch.Tensor) else [len(row) for row in rows]
    longest = max(lengths)
    if window and max_new_tokens > positions:
        raise ValueError(
            f"generate: `max_new_tokens` must be from 0 to {positions}, the model's positions, got {max_new_tokens}"
        )
    if window:
        rows = [row[-min(positions, most - max_new_tokens) :] for row in rows]
        lengths = [len(row) for row in rows]
    elif longest > positions:
        raise ValueError(
            f"generate: `prompts` must have at most {positions} tokens, the model's positions, got {longest}; "
            "window=True takes the end of a long prompt"
        )
    elif max_new_tokens > most - longest:
        raise ValueError(
            f"generate: `max_new_tokens` must be from 0 to {most - longest} after a prompt of {longest} tokens "
            f"(the model has {positions} positions), got {max_new_tokens}"
        )
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
               "repetition_penalty": repetition_penalty, "rung": model.config.rung("sample")}  # fmt: skip

    def add() -> tuple[torch.Tensor, torch.Tensor]:
        rest = rows, max_new_tokens, options, seed, ends, samples, on_token
        if not use_cache:
            return add_tokens(Uncached(model, rows, samples), *rest)
        with runner_of(model, len(lengths) * samples) as runner:
            return add_tokens(Cached(runner, rows, lengths, max_new_tokens), *rest)

    added = None
    while added is None:  # once more if its weights have changed since the last call: nobody sees what was read
        with contextlib.suppress(Changed):  # and behind it the runner of then is gone
            added = add()
    new, log_probs = added
    if isinstance(prompts, torch.Tensor):
        ids = rows if isinstance(rows, torch.Tensor) else torch.stack(rows)
        ids = ids if samples == 1 else ids.repeat_interleave(samples, dim=0)
        texts = torch.cat([ids, new.to(prompts.device, prompts.dtype)], dim=1)
    else:
        lines = [row for row in rows for _ in range(samples)]
        texts = [torch.cat([row.to(new.device), added]) for row, added in zip(lines, new, strict=True)]
    return (texts, log_probs) if return_log_probs else texts


def check_prompts(model: GPT2, prompts: torch.Tensor | Sequence[Any]) -> list[torch.Tensor] | torch.Tensor:
    """The prompts as rows of ids, each a tensor [length]."""
    if isinstance(prompts, torch.Tensor):
        if prompts.dim() != 2 or prompts.numel() == 0:
            raise ValueError(
                "generate: `prompts` must be [batch, length], at least one row and one token, got shape "
                f"{tuple(prompts.shape)}"
            )
        rows = prompts
    else:
        try:
            rows = [row if isinstance(row, torch.Tensor) else torch.as_tensor(row, device="cpu") for row in prompts]
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"generate: `prompts` must be rows of ids, got {type(prompts).__name__}: {error}"
            ) from error
        if not rows or any(row.dim() != 1 or len(row) == 0 for row in rows):
            raise ValueError(
                "generate: `prompts` must be at least one list of at least one id, got lengths "
                f"{[len(row) if row.dim() == 1 else tuple(row.shape) for row in rows]}"
            )
    for row in [rows] if isinstance(rows, torch.Tensor) else rows:
        if row.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"generate: `prompts` must be int64 or int32, got {row.dtype}")
        if row.device.type == "cpu":
            low, high = (bound.item() for bound in row.aminmax())
            if low < 0 or high >= model.config.vocab_size:
                raise ValueError(
                    f"generate: `prompts` must be ids from 0 to {model.config.vocab_size - 1}, the model's vocabulary, "
                    f"got {low if low < 0 else high}"
                )
    return rows


def check_stop(stop: Any, vocab_size: int) -> set[int]:
    """The tokens that end a row."""
    if stop is None:
        return set()
    alone = not isinstance(stop, Collection) or getattr(stop, "ndim", 1) == 0
    several = [stop] if alone else stop
    ends = {integer("stop", token) for token in several}
    for token in ends:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"generate: `stop` must be tokens from 0 to {vocab_size - 1}, the model's vocabulary, got {token}"
            )
    return ends


def integer(name: str, value: Any) -> int:
    """`value` as an int: NumPy's integers and a tensor's element are welcome, what has a fraction and truth are not."""
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool:
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"generate: `{name}` must be an integer, got {value!r}") from None


def check_numbers(
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    seed: int | None,
    samples: int,
) -> None:
    numbers = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    for name, number in numbers.items():
        try:
            math.isfinite(number)
        except TypeError:
            raise TypeError(f"generate: `{name}` must be a number, got {number!r}") from None
    for name, number, fits, must in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 0, "not be negative"),
        ("temperature", temperature, math.isfinite(temperature), "be finite"),
        ("temperature", temperature, temperature >= 0, "not be negative"),
        ("top_k", top_k, top_k >= 0, "not be negative"),
        ("top_p", top_p, 0 <= top_p <= 1, "be from 0 to 1"),
        ("min_p", min_p, 0 <= min_p <= 1, "be from 0 to 1"),
        ("repetition_penalty", repetition_penalty, 0 < repetition_penalty < math.inf, "be finite and greater than 0"),
        ("samples", samples, samples >= 1, "be at least 1"),
    ):
        if not fits:
            raise ValueError(f"generate: `{name}` must {must}, got {number}")
    if seed is not None:
        check_seed("generate", seed)


def padded(rows: Any) -> torch.Tensor:
    """Rows of ids as int64 [batch, longest], the shorter ones filled with 0 behind their end."""
    if isinstance(rows, torch.Tensor):
        return rows.long()
    return torch.nn.utils.rnn.pad_sequence([row.to(rows[0].device, torch.int64) for row in rows], batch_first=True)


class Cached:
    """Texts whose keys and values are kept: `logits` are those of the next tokens, `step` adds tokens."""

    def __init__(self, runner: Runner, rows: Any, lengths: list[int], new_tokens: int):
        self.runner = runner
        self.runner.read(padded(rows), lengths, new_tokens)
        self.logits = self.runner.logits

    def step(self, token: torch.Tensor) -> None:
        self.runner.token.copy_(token)
        self.runner.step()


class Uncached:
    """The same without a cache: everything is read again at each step."""

    def __init__(self, model: GPT2, rows: Any, samples: int):
        self.model, device = model, model.wte.weight.device
        self.ids = padded(rows).to(device).repeat_interleave(samples, dim=0)
        self.lengths = torch.tensor([len(row) for row in rows], device=device).repeat_interleave(samples)
        self._read()

    def step(self, token: torch.Tensor) -> None:
        self.ids = torch.nn.functional.pad(self.ids, (0, 1)).scatter(1, self.lengths[:, None], token[:, None])
        self.lengths = self.lengths + 1
        self._read()

    def _read(self) -> None:
        every = torch.arange(len(self.ids), device=self.ids.device)
        with torch.autocast(self.ids.device.type, enabled=False):
            self.logits = self.model.logits(self.model.hidden(self.ids)[every, self.lengths - 1])


def add_tokens(
    reader: Cached | Uncached,
    rows: Any,
    most: int,
    options: dict[str, Any],
    seed: int | None,
    ends: set[int],
    samples: int,
    on_token: Callable[[torch.Tensor], None] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new tokens and their log-probabilities, [rows, new].

    The GPU runs ahead: step i + 1 is launched before the host looks at the tokens of step i. So it learns a few steps
    late that all rows have ended, and forgets what was added since.
    """
    count, vocab = reader.logits.shape
    device = reader.logits.device
    added = []  # a column a step
    rng_state = seen = None
    if options["temperature"] > 0:
        key = (
            torch.randint(1 << 62, (), device="cpu").item()
            if seed is None
            else seed
            if seed < 1 << 63
            else seed - (1 << 64)
        )
        offsets = torch.arange(count, device=device) << 32  # each row has its own 2^32 numbers
        rng_state = torch.stack([torch.full_like(offsets, key), offsets], dim=1)
    if options["repetition_penalty"] != 1:
        seen = torch.zeros(count, vocab, dtype=torch.bool, device=device)
        for row, prompt in enumerate(rows):
            # On a GPU an index outside would end the process's use of it; such a row gives no token anyway.
            inside = prompt.to(device, torch.int64).clamp(0, vocab - 1)
            seen[row * samples : (row + 1) * samples, inside] = True
    watcher = Watcher(ends, count, on_token) if ends or on_token else None
    done = most
    for i in range(most):
        token, log_prob = sample(reader.logits, rng_state, seen, **options)
        added.append((token[:, None], log_prob[:, None]))
        if i + 1 < most:
            reader.step(token)
        if watcher and watcher.look(token):
            break
    if watcher:
        watcher.finish()
        done = min(most, max(watcher.ended) + 1) if all(end is not None for end in watcher.ended) else most
    if not added:
        none = torch.empty(count, 0, dtype=torch.int64, device=device)
        return none, none.float()
    if done == 1:
        return added[0]
    tokens, log_probs = (torch.cat(each[:done], dim=1) for each in zip(*added, strict=True))
    for row, end in enumerate(watcher.ended if watcher else []):
        if end is not None:
            tokens[row, end + 1 :] = tokens[row, end].clone()
            log_probs[row, end + 1 :] = 0
    return tokens, log_probs


class Watcher:
    """Looks at tokens on the host, at most BEHIND steps after they were chosen, and calls who wants to see them."""

    def __init__(self, ends: set[int], rows: int, on_token: Callable[[torch.Tensor], None] | None):
        self.ends, self.on_token = ends, on_token
        self.ended: list[int | None] = [None] * rows  # the step in which a row ended
        self._last = [0] * rows
        self._waiting: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._seen = 0

    def look(self, tokens: torch.Tensor) -> bool:
        """Takes a step's tokens, [rows]. Returns whether all rows are known to have ended."""
        arrived = None
        if tokens.is_cuda:
            on_host = torch.empty(tokens.shape, dtype=tokens.dtype, device="cpu", pin_memory=True)
            on_host.copy_(tokens, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(tokens.device))
            tokens = on_host
        self._waiting.append((tokens, arrived))
        while self._waiting and self._has_come(*self._waiting[0]):
            self._next()
        return all(end is not None for end in self.ended)

    def finish(self) -> None:
        while self._waiting:
            self._next()

    def _has_come(self, tokens: torch.Tensor, arrived: torch.cuda.Event | None) -> bool:
        return arrived is None or arrived.query() or len(self._waiting) > BEHIND

    def _next(self) -> None:
        tokens, arrived = self._waiting.pop(0)
        if arrived:
            arrived.synchronize()
        if all(end is not None for end in self.ended):
            return
        for row, token in enumerate(tokens.tolist()):
            if self.ended[row] is None:
                self._last[row] = token
                if token in self.ends:
                    self.ended[row] = self._seen
        self._seen += 1
        if self.on_token:
            self.on_token(torch.tensor(self._last, device="cpu"))


def check_seed(caller: str, seed: int) -> None:
    """A seed is what a generator of PyTorch takes."""
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"{caller}: `seed` must be from -2^63 to 2^64 - 1, got {seed}")


def default_device() -> str:
    """What `--device` is where it is not given."""
    return "cuda" if torch.cuda.is_available() else "cpu"


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
    entries = weight_files.read_config(folder)
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
        raise ValueError(f"{path}: no tokenizer's file: {error}{weight_files.hint(path)}") from error


def encode(tokenizer: ByteTokenizer | FileTokenizer, option: str, prompt: str, vocab_size: int) -> list[int]:
    """The tokens of an option's text, for a model of that vocabulary. A ValueError says what is wrong with it."""
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ValueError(f"{option} must be text in UTF-8, got {prompt!r}")
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError(f"{option} must hold at least one token, got {prompt!r}")
    if max(ids) >= vocab_size:
        raise ValueError(
            f"{option} must be of tokens from 0 to {vocab_size - 1}, the model's; its tokenizer made {max(ids)}"
        )
    return ids


def main(arguments: list[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    try:
        if several:
            return generate_together(options)
        options.device = options.device or default_device()
        check_device(options.device)
        run(options, lambda model: model)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"generate.py: {error}")


def generate_together(options: argparse.Namespace) -> None:
    """As one of torchrun's workers, of which each has a share of the model."""
    import torch.distributed as dist
    from model.processes import process_group
    from model.tensor_parallel import TensorParallel

    with process_group("generate.py", options.device) as device, contextlib.ExitStack() as stack:
        options.device = "cpu"  # where the whole model is read
        told = [secrets.randbits(62) if options.seed is None else options.seed]
        dist.broadcast_object_list(told, src=0)
        options.seed = told[0]  # all draw the same tokens
        if dist.get_rank():
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        run(options, lambda model: TensorParallel(model, dist.group.WORLD, device))


def run(options: argparse.Namespace, place: Callable[[GPT2], GPT2]) -> None:
    """The command, by what `place` makes of the model."""
    folder = weight_files.find(options.model)
    tokenizer = read_tokenizer(folder)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    model = GPT2.from_pretrained(folder, blocks=options.blocks or Config.blocks, dtype=dtype, device=options.device)
    model = place(model)
    vocab_size = model.config.vocab_size
    prompts = [encode(tokenizer, "--prompt", prompt, vocab_size) for prompt in options.prompt]
    stop = [encode(tokenizer, "--stop", text, vocab_size) for text in options.stop]
    if any(len(ids) > 1 for ids in stop):
        raise ValueError(f"--stop must be one token, got {options.stop}")
    most = model.config.n_positions + 1 - max(len(ids) for ids in prompts)
    alone = len(prompts) * options.samples == 1  # then the text is shown as it comes
    show = tokenizer.stream()
    untold = iter(options.prompt)  # is printed with the first token, so that a refusal has a line of its own

    def tell(token: torch.Tensor) -> None:
        print(next(untold, ""), show(token.item()), sep="", end="", flush=True)

    texts, log_probs = generate(
        model, prompts, min(TOKENS, max(0, most)) if options.tokens is None else options.tokens,
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p,
        repetition_penalty=options.repetition_penalty, seed=options.seed, samples=options.samples,
        stop=[ids[0] for ids in stop], window=options.window, return_log_probs=True,
        on_token=tell if alone else None,
    )  # fmt: skip
    if alone:
        print(next(untold, ""))
    for row, (text, log_prob) in enumerate(zip(texts, log_probs, strict=True)):
        prompt = row // options.samples
        if not alone:
            show = tokenizer.stream()
            new = text[len(text) - len(log_prob) :].tolist()
            print(f"[{row + 1}] {options.prompt[prompt]}{''.join(show(token) for token in new)}")
        if options.log_probs:
            print(f"log-probability of its {len(log_prob)} new tokens: {log_prob.sum().item():.3f}")
    forget(model)  # graphs that hold communicators go before these


if __name__ == "__main__":
    main()
