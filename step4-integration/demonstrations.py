"""The tour's last two demonstrations. Each prints what it finds, and raises where that is not as it must be."""

import hf_patch
import torch
import train
from generate import where_different
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

import step2_attention  # not installed? pip install -e ..
from kernel_fusion.console import make_console


@torch.no_grad()
def patched_gpt2(console: Console) -> None:
    """A random GPT-2 of transformers with step 2's attention under it, beside the same model as it was.

    Raises:
        RuntimeError: logits or greedy tokens differ, or our attention did not run where it should, or did elsewhere.
    """
    device = "cuda" if torch.cuda.is_available() and step2_attention.rungs("attention", "cuda") else "cpu"
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=512, n_positions=128, n_embd=192, n_head=6, n_layer=4, initializer_range=0.1, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval().to(device)
    ids = torch.randint(config.vocab_size, (2, 64)).to(device)

    def run() -> tuple[torch.Tensor, torch.Tensor, int]:
        """Logits of the prompt, 32 greedy tokens after it, and how often step 2's attention ran."""
        before = sum(step2_attention.launch_counts().values())
        logits = model(ids).logits
        greedy = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, pad_token_id=0
        )
        return logits, greedy, sum(step2_attention.launch_counts().values()) - before

    logits, greedy, launches = run()
    with hf_patch.patched(model):
        our_logits, our_greedy, our_launches = run()
    logits_after, _, launches_after = run()

    difference = (our_logits - logits).abs().max().item()
    largest = logits.abs().max().item()
    different = where_different(our_greedy, greedy)
    console.print(f"GPT-2 of transformers, {config.n_layer} layers, random weights, on {device}")
    console.print(f"greatest difference of a logit: {difference:.1e} (the greatest logit is {largest:.1f})")
    console.print(f"32 greedy tokens after a prompt of 64: {different or 'the same'}")
    console.print(f"launches of our attention: patched {our_launches}, before {launches}, after {launches_after}")
    # A forward pass for the logits and 32 for the tokens, each with an attention a layer.
    expected = config.n_layer * (1 + 32)
    if not difference <= 1e-4 * largest:
        raise RuntimeError(f"the patched model differs from the unpatched one: a logit is {difference:.1e} off")
    if different:
        raise RuntimeError(f"the patched model differs from the unpatched one: {different}")
    if (launches, our_launches, launches_after) != (0, expected, 0):
        raise RuntimeError(f"launches must be {expected} in the patched model and 0 in the unpatched one")
    if not torch.equal(logits_after, logits):
        raise RuntimeError("the model was not as before when the patch had been taken out")


def train_small_gpt2(console: Console, steps: int = 1000) -> None:
    """Trains the small GPT-2, and prints both losses and a paragraph.

    Raises:
        RuntimeError: it predicts held-out text no better than the bigram model.
    """
    device = "cuda" if torch.cuda.is_available() and step2_attention.rungs("attention", "cuda") else "cpu"
    train.report(console, train.train(console, steps=steps, device=device), device)


if __name__ == "__main__":
    patched_gpt2(make_console())
    train_small_gpt2(make_console())
