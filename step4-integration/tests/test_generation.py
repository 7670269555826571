"""generate: what it returns, and that its caches and graphs are nobody's business.

Greedy text against Hugging Face's is in test_integration.py, the choice of a token in test_sample.py.
"""

import copy
import gc
import pickle
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from generate import generate
from gpt2_model import GPT2, Config
from model import cache, runner
from model.blocks import FORMS

from kernel_fusion import testing
from step4_integration import PACKED_RUNGS, decode_pack_refusal
from step4_integration.gpt2_testing import check_tokens, copy_of, each_form, tokens
from step4_integration.testing import on_each_device

pytestmark = pytest.mark.usefixtures("one_thread")


@on_each_device
@each_form
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_each_form_and_number_of_rows_gives_the_text_without_a_cache(rows, blocks, device, folder):
    model = GPT2.from_pretrained(folder, blocks=blocks, device=device)
    ids = tokens(rows, 5, device)
    text = generate(model, ids, 20)
    check_tokens(text, generate(model, ids, 20, use_cache=False))
    longer = torch.cat([ids, tokens(rows, 12, device, seed=1)], dim=1)  # the same graphs at other lengths
    check_tokens(generate(model, longer, 25), generate(model, longer, 25, use_cache=False))


@on_each_device
def test_samples_are_texts_of_their_own_of_one_prompt(device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    rows = [tokens(1, length, device, seed=length)[0] for length in (4, 9)]
    options = {"temperature": 1.5, "seed": 3}
    texts = generate(model, rows, 12, samples=3, **options)
    assert [len(text) for text in texts] == [16] * 3 + [21] * 3
    for row, text in enumerate(texts):
        assert torch.equal(text[: len(rows[row // 3])], rows[row // 3])
    assert len({tuple(text.tolist()) for text in texts}) == 6
    repeated = generate(model, [row for row in rows for _ in range(3)], 12, **options)
    assert all(torch.equal(a, b) for a, b in zip(texts, repeated, strict=True))
    greedy = generate(model, rows, 12, samples=2)
    assert torch.equal(greedy[0], greedy[1])
    assert torch.equal(greedy[2], generate(model, rows[1:], 12)[0])


@on_each_device
def test_log_probabilities_are_the_models(device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    ids = tokens(2, 7, device)
    text, log_probs = generate(model, ids, 9, temperature=0.7, top_k=5, seed=1, return_log_probs=True)
    with torch.no_grad():
        expected = model(text).log_softmax(-1)[:, 6:-1].gather(-1, text[:, 7:, None])[..., 0]
    torch.testing.assert_close(log_probs, expected, rtol=1e-4, atol=1e-4)


@on_each_device
def test_the_callers_autocast_changes_nothing(device, folder):
    model, ids = GPT2.from_pretrained(folder, device=device), tokens(2, 7, device)
    expected = generate(model, ids, 9, return_log_probs=True)
    with torch.autocast(device, torch.bfloat16):
        text = generate(model, ids, 9, return_log_probs=True)
    assert all(torch.equal(a, b) for a, b in zip(text, expected, strict=True))


@on_each_device
def test_a_window_is_the_end_of_the_prompt(device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    ids = tokens(2, 60, device)  # of 48 positions
    with testing.raises(ValueError, "`prompts` must have at most 48 tokens, the model's positions, got 60", "window"):
        generate(model, ids, 5)
    text = generate(model, ids, 8, window=True)
    check_tokens(text, generate(model, ids[:, -41:], 8))
    with testing.raises(ValueError, "`max_new_tokens` must be from 0 to 42 after a prompt of 7 tokens"):
        generate(model, ids[:, :7], 43)
    check_tokens(generate(model, ids[:, :7], 43, window=True), generate(model, ids[:, 1:7], 43))


@on_each_device
def test_a_repetition_penalty_is_transformers(device, hf, folder):
    ids = tokens(2, 7, device)
    options = {"do_sample": False, "pad_token_id": 0, "repetition_penalty": 1.4}
    theirs = copy_of(hf, device=device).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, **options)
    check_tokens(generate(GPT2.from_pretrained(folder, device=device), ids, 30, repetition_penalty=1.4), theirs)


@on_each_device
def test_tokens_are_shown_in_order_and_stop_with_the_text(device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    ids = tokens(3, 4, device)
    free = generate(model, ids, 30)[:, 4:]
    stop = free[:, 9].tolist()  # each row ends with one of these by its tenth token
    seen = []
    text = generate(model, ids, 30, stop=stop, on_token=lambda token: seen.append(token))
    check_tokens(torch.stack(seen, dim=1), text[:, 4:].cpu())
    assert text.shape[1] <= 14
    for row, alone in zip(text[:, 4:].tolist(), free.tolist(), strict=True):
        end = next(i for i, token in enumerate(alone) if token in stop)
        assert row == [*alone[: end + 1], *[alone[end]] * (len(row) - end - 1)]


@on_each_device
@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (2, 2), (3, 1), (3, 2)])
def test_keys_of_all_layers_are_appended_at_once_or_one_by_one(rows, batch, device, folder, monkeypatch):
    """Those of a short prompt take one launch, where the layers' rows lie at one distance; the same is written."""
    model, launches, written = GPT2.from_pretrained(folder, device=device), [], []
    layers, append = model.config.n_layer, cache.kv_append
    monkeypatch.setattr(cache, "kv_append", lambda *args, **kwargs: launches.append(append(*args, **kwargs)))
    ids = tokens(batch, 9, device)
    for at_once in (batch * 9, batch * 9 - 1):
        monkeypatch.setattr(cache, "AT_ONCE", at_once)
        keys = cache.KVCache(model.config, rows, device=device)
        part = keys if rows == batch else keys.first(batch)
        launches.clear()
        with torch.no_grad():
            model(ids, part)
            prompt = len(launches)
            logits = [model(ids[:, :1], part), model(ids[:, :3], part)]
        one = at_once == batch * 9 and batch in (1, rows)
        assert (prompt, len(launches) - prompt) == (1 if one else layers, 2 * layers)
        written.append((keys.k, keys.v, *logits))
    assert all(torch.equal(a, b) for a, b in zip(*written, strict=True))
    assert keys.k[:, :batch, :, :13].ne(0).all()


@on_each_device
@each_form
@pytest.mark.parametrize("before", [0, 4])
def test_of_a_prompt_the_last_layer_computes_one_token(before, blocks, device, folder, monkeypatch):
    """Its keys and values are those of all tokens; of the rest the other tokens have no part."""
    model, shapes = GPT2.from_pretrained(folder, blocks=blocks, device=device), []
    form, ids, last = FORMS[blocks], tokens(3, 11, device), torch.tensor([10, 0, 6], device=device)

    def seen(*args):
        y, x = form(*args)
        shapes.append((y.shape[1], x.shape[1]))
        return y, x

    monkeypatch.setitem(FORMS, blocks, seen)
    expected, keys = (cache.KVCache(model.config, 3, device=device) for _ in range(2))
    with torch.no_grad():
        for of in (expected, keys):
            if before:
                model.hidden(tokens(3, before, device, seed=1), of)
        whole = model.hidden(ids, expected)
        shapes.clear()
        of_last = model.hidden(ids, keys, last=last)
    assert shapes == [(11, 11)] * (model.config.n_layer - 1) + [(1, 1)]
    torch.testing.assert_close(of_last[:, 0], whole[[0, 1, 2], last], rtol=1e-4, atol=1e-4)
    for name in ("k", "v"):
        assert torch.equal(getattr(keys, name), getattr(expected, name))
    assert keys.end.tolist() == (last + before + 1).tolist()
    with torch.no_grad(), testing.raises(ValueError, "rows of different lengths take one token at a time, got 3"):
        model.hidden(ids[:, :3], keys)
    assert keys.length == expected.length == before + 11
    for of in (expected, keys):  # texts of unequal length, of a token each
        of.end.copy_(last + before + 1)
        of.ragged = True
    with torch.no_grad():
        whole = model.hidden(ids[:, :1], expected)
        of_last = model.hidden(ids[:, :1], keys, last=torch.zeros_like(last))
    torch.testing.assert_close(of_last, whole, rtol=1e-4, atol=1e-4)
    with testing.raises(ValueError, "`last` must be None without a `cache`"):
        model.hidden(ids, last=last)


@on_each_device
@pytest.mark.parametrize("most", [1, 8, 30])
def test_long_prompts_are_read_in_parts(most, device, folder, monkeypatch):
    model = GPT2.from_pretrained(folder, device=device)
    rows = [tokens(1, length, device, seed=length)[0] for length in (3, 17, 30, 16)]
    expected = generate(model, rows, 9)
    runner.forget(model)
    monkeypatch.setattr(runner, "PROMPT_TOKENS", most)
    assert all(torch.equal(a, b) for a, b in zip(generate(model, rows, 9), expected, strict=True))


@on_each_device
@each_form
def test_a_first_call_may_end_at_the_last_position(blocks, device, folder):
    """On a GPU the token's step is recorded there."""
    model = GPT2.from_pretrained(folder, blocks=blocks, device=device)
    ids = tokens(2, model.config.n_positions - 1, device)
    check_tokens(generate(model, ids, 2), generate(model, ids, 2, use_cache=False))


@pytest.mark.parametrize(
    ("length", "most", "padded"),
    [(1, 1024, 16), (16, 1024, 16), (17, 1024, 32), (64, 1024, 64), (65, 1024, 128), (129, 1024, 256),
     (1000, 1024, 1024), (40, 48, 48), (900, 1000, 1000)],
)  # fmt: skip
def test_prompts_are_padded_to_few_lengths(length, most, padded):
    assert runner.read_as(length, most) == padded


class Padding(runner.Runner):
    """A runner on the CPU that does what one on a GPU does: pads, and replays. A replay is a call again."""

    def __init__(self, model, rows):
        super().__init__(model, rows)
        self._pool = (0, 0)

    def recorded(self, run):
        run()
        run()
        return types.SimpleNamespace(replay=run)


@each_form
def test_what_a_gpu_does_with_prompts_gives_the_same_text(blocks, folder, monkeypatch):
    monkeypatch.setattr(runner, "Runner", Padding)
    model = GPT2.from_pretrained(folder, blocks=blocks)
    for lengths, samples in (((3, 17, 9), 1), ((5, 1), 2), ((30, 4, 2, 8), 1)):
        rows = [tokens(1, length, seed=length)[0] for length in lengths]
        expected = generate(model, rows, 9, samples=samples, use_cache=False)
        for text, right in zip(generate(model, rows, 9, samples=samples), expected, strict=True):
            check_tokens(text, right)


def test_what_stands_behind_a_prompt_is_a_token(folder, monkeypatch):
    monkeypatch.setattr(runner, "Runner", Padding)
    model = GPT2.from_pretrained(folder)
    for length in (16, 5):
        generate(model, tokens(2, length), 2)
    (prompt,) = runner._runners[model][2]._prompts.values()
    assert prompt.ids.shape == (2, 16)
    assert not prompt.ids[:, 5:].any()  # an id that is none, as a GPU takes it, would be NaN for all


# ---- arguments ----


@pytest.mark.parametrize("as_given", [int, np.int64, torch.tensor, lambda t: [t], lambda t: {96, t},
                                      lambda t: torch.tensor([t]), lambda t: torch.tensor([96, t]),
                                      lambda t: np.array([t])])  # fmt: skip
def test_a_token_to_stop_at_is_an_integer_of_any_kind(as_given, folder):
    model = GPT2.from_pretrained(folder)
    ids = tokens(1, 5)
    free = generate(model, ids, 20)
    assert 96 not in free
    stop = free[0, 9].item()
    end = (free[0, 5:] == stop).nonzero()[0].item() + 6
    assert torch.equal(generate(model, ids, 20, stop=as_given(stop)), free[:, :end])


def test_token_zero_stops_too(folder):
    model = GPT2.from_pretrained(folder)
    with torch.no_grad():
        model.wte.weight.zero_()  # all are equally likely, and 0 is the first
    for stop in (0, torch.tensor([0]), np.array([0])):
        assert generate(model, tokens(1, 5), 9, stop=stop).shape == (1, 6)


WRONG = {
    "max_new_tokens": [3.5, True, "3", None, -1],
    "top_k": [1.5, True, -1],
    "samples": [1.5, True, "2", 0],
    "seed": [1.5, True, "3", 1 << 64],
    "stop": [True, 3.5, "a", [1.5], torch.tensor([True]), 97, [3, -1]],
    "temperature": ["a", None, -1.0, float("nan")],
    "top_p": ["a", None, 1.5],
    "min_p": ["a", -0.5],
    "repetition_penalty": [None, 0],
    "prompts": ["abc", ["ab"], None, 5, [], [[]], [[1], []], [1, 2], [[1.5]], [[None]], [[1, [2]]], [[1 << 63]],
                [[True]], [[97]], [[1], [2, -1]], torch.full((2, 3), 97), torch.zeros(0, 3, dtype=torch.int64)],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_argument_is_an_error_that_names_it(name, value, folder):
    arguments = {"prompts": tokens(1, 5), "max_new_tokens": 2, name: value}
    with pytest.raises((TypeError, ValueError), match=f"^generate: `{name}` must"):
        generate(GPT2.from_pretrained(folder), **arguments)


def test_a_window_leaves_a_token_of_the_prompt(folder):
    model = GPT2.from_pretrained(folder)
    assert generate(model, tokens(1, 60), 48, window=True).shape == (1, 49)
    with testing.raises(ValueError, "`max_new_tokens` must be from 0 to 48", "got 49"):
        generate(model, tokens(1, 60), 49, window=True)


@each_form
def test_the_smallest_models(blocks, folder):
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 1, "blocks": blocks}
    one_position = GPT2(Config(vocab_size=9, n_positions=1, **sizes))
    assert torch.equal(generate(one_position, [[3]], 0)[0], torch.tensor([3]))
    assert generate(one_position, [[3]], 1)[0].shape == (2,)  # the last token is not read, and needs no position
    with testing.raises(ValueError, "`max_new_tokens` must be from 0 to 1"):
        generate(one_position, [[3]], 2)
    one_token = GPT2(Config(vocab_size=1, n_positions=8, **sizes))
    options = {"temperature": 1.0, "repetition_penalty": 2.0, "return_log_probs": True}
    (text,), log_probs = generate(one_token, [[0]], 7, **options)
    assert not text.any()
    assert len(text) == 8
    assert not log_probs.any()


def test_pytorchs_defaults_change_nothing(folder):
    model = GPT2.from_pretrained(folder)
    expected = generate(model, [[1, 2, 3]], 9, temperature=1.0, seed=1, stop=0)[0]
    before, shown = torch.get_default_dtype(), []
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            options = {"seed": 1, "stop": 0, "return_log_probs": True, "on_token": shown.append}
            (text,), log_probs = generate(model, [[1, 2, 3]], 9, temperature=1.0, **options)
            generate(model, [[1, 2, 3]], 9, temperature=1.0)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(text, expected)
    assert log_probs.dtype == torch.float32
    assert torch.equal(torch.cat(shown), text[3:])


# ---- calls beside and after each other ----


def test_a_first_call_in_inference_mode_leaves_nothing_that_others_cannot_write(folder):
    model = GPT2.from_pretrained(folder)
    with torch.inference_mode():
        first = generate(model, tokens(), 9)
    assert torch.equal(generate(model, tokens(), 9), first)
    assert not first.is_inference()


@on_each_device
@pytest.mark.parametrize("in_a_thread", [False, True])
def test_a_call_in_the_middle_of_another_has_a_cache_of_its_own(in_a_thread, device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    ids, others = tokens(1, 5, device), tokens(1, 9, device, seed=1)
    expected, expected_others = generate(model, ids, 20), generate(model, others, 6)
    found = []

    def speak(token):
        found.append(generate(model, others, 6))

    def speak_in_a_thread(token):
        thread = threading.Thread(target=speak, args=(token,))
        thread.start()
        thread.join()

    text = generate(model, ids, 20, on_token=speak_in_a_thread if in_a_thread else speak)
    assert torch.equal(text, expected)
    assert len(found) == 20
    assert all(torch.equal(text, expected_others) for text in found)
    assert len(runner._runners[model]) == 1


@on_each_device
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_that_fails_leaves_nothing_to_the_next(error, device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    ids = tokens(2, 7, device)
    expected = generate(model, ids, 20)

    def fail(token):
        raise error

    with pytest.raises(error):
        generate(model, ids, 20, on_token=fail)
    assert not runner._runners[model]
    assert torch.equal(generate(model, ids, 20), expected)


def test_what_is_forgotten_in_the_middle_of_a_call_stays_so(folder):
    model = GPT2.from_pretrained(folder)
    generate(model, tokens(1, 5, "cpu"), 3, on_token=lambda _: runner.forget(model))
    assert not runner._runners.get(model)


@on_each_device
@each_form
def test_an_earlier_texts_nan_is_nobodys(blocks, device, folder):
    model = GPT2.from_pretrained(folder, blocks=blocks, device=device)
    right = model.wpe.weight.clone()
    with torch.no_grad():
        model.wpe.weight.fill_(torch.nan)
    assert (generate(model, tokens(2, 30, device), 1)[:, -1] == -1).all()
    with torch.no_grad():
        model.wpe.weight.copy_(right)
    ids = tokens(2, 5, device)
    check_tokens(generate(model, ids, 9), generate(model, ids, 9, use_cache=False))


def test_prompts_of_a_cpu_are_not_kept(folder):
    model = GPT2.from_pretrained(folder)
    for length in range(1, 9):
        generate(model, tokens(2, length), 2)
    assert not runner._runners[model][2]._prompts


# ---- a model that changes ----


def zero(model):
    with torch.no_grad():
        model.wte.weight.zero_()


def replaced(model):
    model.ln_f.weight = torch.nn.Parameter(model.ln_f.weight.flip(0))


def another_block(model):
    model.h[0], model.h[1] = model.h[1], model.h[0]


CHANGES = {
    "in place": zero,
    "a parameter": replaced,
    "a module": another_block,
    "dtype": lambda model: model.double(),
    "loaded": lambda model: model.load_state_dict({k: v.flip(0) for k, v in model.state_dict().items()}, assign=True),
}


@on_each_device
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_is_what_speaks(change, device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    ids = tokens(2, 7, device)
    before = generate(model, ids, 20)
    CHANGES[change](model)
    now = generate(model, ids, 20)
    check_tokens(now, generate(model, ids, 20, use_cache=False))
    assert change == "dtype" or not torch.equal(now, before)


def test_what_a_graph_of_other_weights_has_read_is_read_again(folder, monkeypatch):
    """A prompt's graph is replayed before the host has looked whether it is the model's still."""
    model, ids, replayed, alone = GPT2.from_pretrained(folder), tokens(1, 7), [], []
    before = generate(model, ids, 9)
    with runner.runner_of(model, 1) as kept:
        prompt, old = runner.Prompt(kept, 1, 7), weakref.ref(kept)
        kept._prompts[1, 7] = prompt

    def replay():
        prompt.run()
        if replayed:  # by then it is a stale graph
            prompt.logits.fill_(torch.nan)
            prompt.cache.k.fill_(torch.nan)
        replayed.append(prompt)

    class Another(runner.Runner):
        def __init__(self, *args):
            alone.append(old() is None)  # its memory goes before there is another
            super().__init__(*args)

    prompt.graph = types.SimpleNamespace(replay=replay)
    check_tokens(generate(model, ids, 9), before)
    assert len(replayed) == 1
    del kept
    replaced(model)
    monkeypatch.setattr(runner, "Runner", Another)
    now = generate(model, ids, 9)
    assert alone == [True]
    assert len(replayed) == 2
    check_tokens(now, generate(model, ids, 9, use_cache=False))
    assert not torch.equal(now, before)
    with runner.runner_of(model, 1) as kept:
        assert not kept._prompts


@on_each_device
def test_a_model_that_has_spoken_is_copied_pickled_and_deleted(device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    ids = tokens(1, 7, device)
    text = generate(model, ids, 9)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check_tokens(generate(twin, ids, 9), text)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def turned(model):
    weight = model.h[0].attn.c_proj.weight
    weight.data = weight.data.T


@pytest.mark.parametrize("change", [turned, lambda model: model.config.rungs.update(kv_append="v1_naive")])
def test_a_change_that_leaves_every_address_is_one(change, folder):
    """A graph has strides, too, and launches of a rung."""
    model = GPT2.from_pretrained(folder)
    kept = runner.Runner(model, 1)
    assert kept.is_of(model)
    change(model)
    assert not kept.is_of(model)


def test_weights_that_were_replaced_are_not_held(folder):
    model = GPT2.from_pretrained(folder)
    for rows in (1, 2):
        generate(model, tokens(rows, 3), 2)
    old = weakref.ref(model.ln_f.weight)
    replaced(model)
    generate(model, tokens(1, 3), 2)  # the runner for 2 rows goes too
    gc.collect()
    assert old() is None


def test_few_caches_are_kept(folder):
    model = GPT2.from_pretrained(folder)
    kept = []
    for rows in (1, 2, 3, 2):
        generate(model, tokens(rows, 3), 2)
        kept.append(list(runner._runners[model]))
    assert kept == [[1], [1, 2], [2, 3], [3, 2]]
    runner.forget(model)
    assert model not in runner._runners


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("blocks", FORMS)
def test_a_graph_is_recorded_once_for_all_lengths(blocks, folder, monkeypatch):
    recorded = []
    right = runner.Runner.recorded
    monkeypatch.setattr(runner.Runner, "recorded", lambda self, run: recorded.append(run) or right(self, run))
    model = GPT2.from_pretrained(folder, blocks=blocks, dtype=torch.bfloat16, device="cuda")
    for length, new in ((3, 40), (16, 5), (9, 2), (1, 47)):
        generate(model, tokens(2, length, "cuda"), new)
    assert len(recorded) == 2  # prompts of up to 16 tokens, and the step


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_does_not_wait_between_tokens(folder):
    model = GPT2.from_pretrained(folder, device="cuda")
    ids = tokens(2, 7, "cuda")
    generate(model, ids, 9, temperature=0.8, seed=1)  # records
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        generate(model, ids, 9, temperature=0.8, seed=1)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def half_model(positions: int = 24) -> GPT2:
    """One that a launch a token takes, and no two of whose logits are nearly the same."""
    config = Config(vocab_size=67, n_positions=positions, n_embd=64, n_layer=2, n_head=1, blocks="v4_products")
    torch.manual_seed(1)
    model = GPT2(config).to(torch.bfloat16).eval()
    model.wte.weight.data.mul_(20)
    return model


@pytest.mark.parametrize("rung", PACKED_RUNGS)
def test_a_token_in_one_launch_follows_the_weights(rung):
    """Which it reads from a copy: training and load_state_dict write them where they are."""
    model, ids = half_model(), tokens(1, 5, "cpu") % 67
    other = copy.deepcopy(model)  # a runner is of one choice of rungs: with another there is a new copy
    model.config.rungs["decode_step"] = rung
    for _ in range(2):
        assert torch.equal(generate(model, ids, 6), generate(other, ids, 6))
        with torch.no_grad():
            for weight in (*model.parameters(), *other.parameters()):
                weight.copy_(weight.roll(1, 0))
    if rung == "v3_persistent":
        with testing.raises(ValueError, f"rung '{rung}' takes one row, got 2"):
            generate(model, ids.repeat(2, 1), 2)
    else:
        assert torch.equal(generate(model, ids.repeat(2, 1), 6), generate(model, ids, 6).repeat(2, 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_long_text_takes_one_launch_a_token_where_that_can_be():
    model, ids = half_model(positions=96).cuda(), tokens(1, 5, "cuda") % 67
    able = not decode_pack_refusal(model.wte.weight, model.step_weights())
    model.config.rungs["decode_step"] = "v2_dependent"
    expected = generate(model, ids, 40)[0]
    del model.config.rungs["decode_step"]

    def packs(count: int, rows: int = 1) -> bool:
        for text in generate(model, ids.repeat(rows, 1), count):
            assert torch.equal(text, expected[: len(text)])
        with runner.runner_of(model, rows) as kept:
            return kept._packed is not None

    assert packs(runner.PACKED_FOR) == able
    assert not packs(runner.PACKED_FOR - 1)
    assert packs(40) == able  # by graphs that were recorded for the texts before
    assert packs(40, rows=2) == able
    assert packs(40, rows=8) == able
    assert not packs(40, rows=9)
    model.float()  # which it cannot take
    assert decode_pack_refusal(model.wte.weight, model.step_weights()) == "takes float16 or bfloat16, got float32"
    assert generate(model, ids, runner.PACKED_FOR).shape == (1, 5 + runner.PACKED_FOR)
