"""The options of train.py, readable before torch is imported."""

import argparse
import pathlib

from kernel_fusion import steps  # not installed? pip install -e ..

OUT = steps.ROOT / "out" / "small-gpt2"
STEPS = 1500
END_OF_TEXT = 50256  # of GPT-2
SIZES = {"124M": "gpt2", "355M": "gpt2-medium", "774M": "gpt2-large", "1558M": "gpt2-xl"}
SMALL_RATE, RATE, FINE_RATE = 3e-3, 6e-4, 5e-5


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains a GPT-2: a small one on this repository's own documents, or one of your size on your data.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, help=f"how many (default: {STEPS})")
    add("--device", help="default: cuda where there is a GPU")
    add("--out", type=pathlib.Path, default=OUT, help=f"where to save (default: {OUT})")
    add("--seed", type=int, default=0)

    part = parser.add_argument_group("data")
    add = part.add_argument
    add(
        "--data",
        type=pathlib.Path,
        metavar="PATH",
        help="a .bin file of tokens or a folder of them, as nanoGPT and "
        "llm.c write them; a text or a folder of texts; a folder of Hugging Face's datasets (default: this repository)",
    )
    add("--tokenizer", metavar="FOLDER", help="of texts: a folder with tokenizer.json, or `bytes`")
    add("--token-bytes", type=int, choices=(2, 4), default=2, help="of a token in a .bin without a header (default: 2)")

    add("--packed", action="store_true", help="documents in one window do not see each other, nor predict the next one")
    add(
        "--end-of-text",
        type=int,
        default=END_OF_TEXT,
        metavar="ID",
        help=f"with --packed, of a .bin: the token that ends a document (default: {END_OF_TEXT}, GPT-2's)",
    )

    part = parser.add_argument_group("model")
    add = part.add_argument
    add(
        "--model",
        metavar="SIZE",
        help=f"{', '.join(SIZES)}: begins with random weights; a folder, such as a "
        "checkpoint: goes on with its weights (default: a small one)",
    )
    add("--layers", type=int, metavar="N", help="of a small model (default: 2)")
    add("--width", type=int, metavar="N", help="(default: 128)")
    add("--heads", type=int, metavar="N", help="(default: 4)")
    add("--vocab-size", type=int, metavar="N", help="default: the tokenizer's, or GPT-2's 50257")
    add("--context", type=int, metavar="N", help="tokens of a window (default: the model's positions; small: 64)")
    add("--blocks", metavar="FORM", help="of the model (default: the last of model/blocks)")

    part = parser.add_argument_group("training")
    add = part.add_argument
    add("--batch", type=int, default=8, metavar="N", help="windows in a step (default: 8)")
    add("--accumulate", type=int, default=1, metavar="N", help="in so many parts, one after the other (default: 1)")
    add(
        "--rate",
        type=float,
        help=f"learning rate (default: {SMALL_RATE:g} for a small model, {RATE:g} for a size, "
        f"{FINE_RATE:g} from a folder)",
    )
    add("--warm-up", type=int, metavar="N", help="steps (default: a twentieth); then a cosine, down to a tenth")
    add("--weight-decay", type=float, default=0.1, metavar="X", help="of matrices (default: 0.1)")
    add("--clip", type=float, default=1.0, metavar="X", help="the gradients' greatest norm (default: 1)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="to compute in (default: float32)")
    add("--recompute", action="store_true", help="activations of a block are computed again in its backward pass")
    add("--graph", action="store_true", help="the whole step as one CUDA graph")

    part = parser.add_argument_group("on the way")
    add = part.add_argument
    add("--log-every", type=int, default=0, metavar="N", help="steps between lines (default: a few lines in all)")
    add(
        "--eval-every",
        type=int,
        default=0,
        metavar="N",
        help="steps between losses on held-out data (default: the end)",
    )
    add("--eval-tokens", type=int, default=1 << 16, metavar="N", help="of it, at most so many (default: 65536)")
    add(
        "--save-every",
        type=int,
        default=0,
        metavar="N",
        help="steps between checkpoints (default: none; the model alone at each quarter)",
    )
    add("--keep", type=int, default=2, metavar="N", help="checkpoints, the last ones (default: 2)")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out, where there is one")
    add("--tensorboard", action="store_true", help="losses and speed into OUT/tensorboard")
    return parser
