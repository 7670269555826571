"""What tests ask for by name. Imports are in the functions: pytest reads this where the step is not built, too."""

import pytest


@pytest.fixture(scope="module")
def hf():
    """A tiny GPT-2 of transformers, in float32 on the CPU. Tests leave it as it is."""
    from step4_integration.gpt2_testing import make_hf

    return make_hf(96, 3)


@pytest.fixture(scope="module")
def folder(hf, tmp_path_factory):
    """`hf` as transformers saves it."""
    folder = tmp_path_factory.mktemp("hf")
    hf.save_pretrained(folder)
    return folder


@pytest.fixture
def one_thread():
    """For many steps on tensors so small that a second thread is only waited for."""
    from training import progress

    with progress.one_thread():
        yield


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A tokenizer.json as the hub's GPT-2 has it, of few words: pairs of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the kernel, the kernel"], trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
