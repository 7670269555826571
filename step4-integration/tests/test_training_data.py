"""What a training reads, and in which order."""

import collections
import resource
import sys
import types

import numpy as np
import pytest
import torch
from training.batches import Batches, Tokens, packed, shuffled
from training.data import read

from kernel_fusion import testing


def counting(count=1000):
    """Tokens of which each is its own place."""
    return Tokens([np.arange(count, dtype=np.uint16)], ["tokens"])


def batches_of(tokens=None, length=10, batch=4, **options):
    return Batches(tokens or counting(), length, batch, **{"vocab_size": 1 << 16, "seed": 0} | options)


# ---- the order ----


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 63, 64, 65, 1000])
def test_an_order_is_a_permutation(count):
    orders = [[shuffled(index, count, key) for index in range(count)] for key in (0, 1)]
    assert [sorted(order) for order in orders] == [list(range(count))] * 2
    assert count < 5 or orders[0] != orders[1]


def test_an_order_prefers_nothing():
    """Of four, all 24 orders come, and the first is as often any as another."""
    orders = collections.Counter(tuple(shuffled(index, 4, key) for index in range(4)) for key in range(4000))
    assert len(orders) == 24
    assert max(orders.values()) < 3 * min(orders.values())
    first = collections.Counter(shuffled(0, 1000, key) // 100 for key in range(4000))
    assert max(first.values()) < 1.3 * min(first.values())


def test_an_epoch_has_each_window_once_and_the_next_begins_elsewhere():
    batches = batches_of(length=10, batch=3)
    assert batches.windows == 99
    starts = torch.cat([batches.at(number)[:, 0] for number in range(33 * 3)]).view(3, 99)
    for epoch in starts:
        assert len(set(epoch.tolist())) == 99
        assert len({start % 10 for start in epoch.tolist()}) == 1
    assert len({epoch[0].item() % 10 for epoch in starts}) > 1
    assert len({tuple(epoch.tolist()) for epoch in starts // 10}) == 3


def test_a_window_is_a_stretch_of_the_tokens_and_all_are_seen():
    batches = batches_of(length=10, batch=4)
    windows = torch.cat([batches.at(number) for number in range(500)])
    assert torch.equal(windows - windows[:, :1], torch.arange(11).expand(2000, 11))
    assert set(windows.flatten().tolist()) == set(range(1000))
    assert windows.dtype == torch.int64


def test_a_batch_is_the_same_whenever_it_is_asked_for():
    batches = batches_of()
    assert torch.equal(batches.at(7), batches_of().at(7))
    assert not torch.equal(batches.at(7), batches.at(8))
    assert not torch.equal(batches.at(7), batches_of(seed=1).at(7))
    assert batches_of(seed=-1).at(0).shape == (4, 11)


def test_parts_and_ranks_share_a_batch_out():
    whole = batches_of(batch=8)
    parts = batches_of(batch=2)
    ranks = [batches_of(batch=4, rank=rank, world=2) for rank in range(2)]
    for number in range(5):
        assert torch.equal(whole.at(number), torch.cat([parts.at(4 * number + part) for part in range(4)]))
        assert torch.equal(whole.at(number), torch.cat([rank.at(number) for rank in ranks]))


def test_no_window_reaches_over_the_end_of_a_file():
    tokens = Tokens([np.arange(0, 45), np.arange(1000, 1008), np.arange(2000, 2100)], ["a", "b", "c"])
    batches = batches_of(tokens, length=10, batch=1)
    assert batches.windows == 3 + 0 + 9
    windows = torch.cat([batches.at(number) for number in range(240)])
    assert set((windows // 1000).sum(1).tolist()) == {0, 22}


def test_too_few_tokens_and_tokens_too_large_are_named():
    with testing.raises(ValueError, "train: the data must hold at least 20 tokens in a row, twice the context, got 19"):
        batches_of(counting(19), length=10)
    assert batches_of(counting(20), length=10).windows == 1
    batches = batches_of(Tokens([np.array([5, 6, 7, 90, 9, 1])], ["part.bin"]), length=3, batch=1, vocab_size=90)
    with testing.raises(ValueError, "tokens must be below the model's `vocab_size`, 90; part.bin has 90 at 3"):
        for number in range(4):
            batches.at(number)


def test_a_digest_tells_tokens_apart():
    same, other = counting(), counting()
    assert same.digest() == other.digest()
    other.arrays[0][500] = 3
    assert len({same.digest(), other.digest(), counting(999).digest()}) == 3
    halves = Tokens([same.arrays[0][:500], same.arrays[0][500:]], ["a", "b"])
    assert halves.digest() != same.digest()


# ---- documents ----


def documents_of(row):
    """The ids of each document of a packed row, and its targets."""
    starts = row.cu_seqlens.unique().tolist()
    return [(row.ids[0, a:b].tolist(), row.targets[0, a:b].tolist()) for a, b in zip(starts, starts[1:], strict=False)]


def test_a_window_is_packed_as_the_documents_in_it():
    windows = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    begins = torch.tensor([[0, 0, 1, 0, 0], [1, 1, 1, 0, 1]]).bool()
    row = packed(windows, begins)
    assert documents_of(row) == [
        ([1, 2], [2, -100]), ([3, 4], [4, 5]), ([6], [-100]), ([7], [-100]), ([8, 9], [9, -100]),
    ]  # fmt: skip
    assert row.cu_seqlens.tolist() == [0, 2, 4, 5, 6, 8, 8, 8, 8]
    assert (row.cu_seqlens.dtype, row.ids.shape) == (torch.int32, (1, 8))


@pytest.mark.parametrize("told", ["starts", "end_of_text"])
def test_packed_batches_are_the_same_windows_and_no_document_goes_on_behind_its_end(told):
    """Each token is its place in its document, which is of 7 tokens, and the last array's of 3 or 7."""
    arrays = [np.arange(70) % 7, np.concatenate([np.arange(30) % 3 + 4, np.arange(70) % 7])]
    starts = [np.arange(0, 70, 7), np.concatenate([np.arange(0, 30, 3), np.arange(30, 100, 7)])]
    tokens = Tokens(arrays, ["a", "b"], **{"starts": starts} if told == "starts" else {"end_of_text": 6})
    rows = batches_of(tokens, packed=True)
    for number in range(12):
        row, windows = rows.at(number), batches_of(tokens).at(number)
        assert torch.equal(row.ids.view(4, 10), windows[:, :-1])
        documents = documents_of(row)
        assert len(documents) >= 8
        for ids, targets in documents:
            assert ids == list(range(ids[0], ids[0] + len(ids)))
            assert targets[:-1] == ids[1:]
            assert targets[-1] == (-100 if ids[-1] == 6 else ids[-1] + 1)
    assert torch.equal(rows.at(3).ids, batches_of(tokens, packed=True).at(3).ids)


def test_a_packed_batch_without_a_target_is_refused():
    """Its mean loss would be NaN, and so would all weights after it."""
    with testing.raises(ValueError, "train: with `packed` batch 2 has no token to predict"):
        batches_of(Tokens([np.full(100, 6)], ["a"], end_of_text=6), packed=True).at(2)


def test_where_documents_begin_of_the_first_tokens():
    arrays = [np.array([5, 6, 5, 6]), np.array([6, 5, 5])]
    tokens = Tokens(arrays, ["a", "b"], end_of_text=6)
    assert tokens.first_begins(99).int().tolist() == [1, 0, 1, 0, 1, 1, 0]
    assert tokens.first_begins(5).int().tolist() == [1, 0, 1, 0, 1]
    assert tokens.first_begins(3).int().tolist() == [1, 0, 1]
    digests = {Tokens(arrays, ["a", "b"], end_of_text=end).digest(True) for end in (5, 6)}
    digests |= {Tokens(arrays, ["a", "b"], starts=[np.array([0]), np.array(n)]).digest(True) for n in ([0], [0, 1])}
    assert len(digests) == 4
    assert tokens.digest() == Tokens(arrays, ["a", "b"], end_of_text=5).digest()


# ---- files of tokens ----


def as_llm_c(tokens, version=1):
    header = np.zeros(256, np.int32)
    header[:3] = [20240520 if version == 1 else 20240801, version, len(tokens)]
    return header.tobytes() + np.asarray(tokens, np.uint16 if version == 1 else np.uint32).tobytes()


def test_files_as_nanogpt_writes_them(tmp_path):
    np.arange(500, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "val.bin")
    data = read(tmp_path)
    assert (len(data.train), len(data.held_out)) == (500, 40)
    assert data.train.first(10**9).tolist() == list(range(500))
    assert isinstance(data.train.arrays[0], np.memmap)
    alone = read(tmp_path / "train.bin")
    assert alone.train.first(10**9).tolist() == list(range(475))
    assert alone.held_out.first(3).tolist() == [475, 476, 477]


def test_files_as_llm_c_writes_them(tmp_path):
    (tmp_path / "fineweb_train_000001.bin").write_bytes(as_llm_c(range(300)))
    (tmp_path / "fineweb_train_000002.bin").write_bytes(as_llm_c(range(300, 400)))
    (tmp_path / "fineweb_val_000000.bin").write_bytes(as_llm_c(range(50)))
    data = read(tmp_path)
    assert data.train.first(350).tolist() == list(range(350))
    assert [len(array) for array in data.train.arrays] == [300, 100]
    assert data.held_out.first(99).tolist() == list(range(50))
    (tmp_path / "llama.bin").write_bytes(as_llm_c([100_000] * 40, version=7))
    assert read(tmp_path / "llama.bin").train.first(1).item() == 100_000


def test_a_large_file_is_not_read(tmp_path):
    """20 GB with nothing in them, on the disk too."""
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(20 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = read(tmp_path / "large.bin", token_bytes=4)
    assert len(data.train) + len(data.held_out) == 5 << 30
    batches = batches_of(data.train, length=1024, batch=2)
    assert [batches.at(number).shape for number in range(3)] == [(2, 1025)] * 3
    assert len(data.train.digest()) == 16
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KB


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"123", "3 bytes are no whole number of tokens of 2 bytes (--token-bytes)"),
        (as_llm_c(range(50))[:-2], "is not whole: its header says 50 tokens of 2 bytes, and 98 bytes follow"),
        (as_llm_c([]), "is empty"),
        (b"12", "no tokens held out"),
    ],
    ids=["empty", "odd", "cut", "a header alone", "one token"],
)
def test_a_file_of_tokens_that_is_none_is_named(content, says, tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    with testing.raises(ValueError, f"--data: {path}", says):
        read(path)


def test_what_is_not_there_is_named(tmp_path):
    with testing.raises(FileNotFoundError, f"--data: {tmp_path / 'none'} is not there"):
        read(tmp_path / "none")
    with testing.raises(ValueError, f"--data: {tmp_path} has no file that ends in .bin, .md, .txt"):
        read(tmp_path, tokenizer="bytes")
    (tmp_path / "val.bin").write_bytes(b"1234")
    (tmp_path / "val2.bin").write_bytes(b"1234")
    with testing.raises(ValueError, "--data: all files are held out, by their names"):
        read(tmp_path)


# ---- texts ----


def test_a_text_byte_by_byte(tmp_path):
    (tmp_path / "text.txt").write_text("grün " * 100)
    data = read(tmp_path / "text.txt", tokenizer="bytes")
    assert bytes(data.train.first(6).tolist()).decode() == "grün "
    assert (len(data.train), len(data.held_out)) == (570, 30)
    assert [part.starts[0].tolist() for part in data[:2]] == [[0], []]
    assert (data.vocab_size, data.tokenizer) == (256, "bytes")


def test_a_folder_of_texts_and_a_tokenizer(tmp_path, bpe):
    (tmp_path / "b.txt").write_text("the kernel " * 20)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.md").write_text("kernel, the")
    (tmp_path / "c.py").write_text("not read")
    data = read(tmp_path, tokenizer=str(bpe.parent))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bpe))
    expected = tokenizer.encode("the kernel " * 20).ids
    got = data.train.first(10**6).tolist() + data.held_out.first(10**6).tolist()
    assert got in (expected + tokenizer.encode("kernel, the").ids, tokenizer.encode("kernel, the").ids + expected)
    assert (data.vocab_size, data.tokenizer) == (tokenizer.get_vocab_size(), bpe)
    starts = [*data.train.starts[0], *(data.held_out.starts[0] + len(data.train))]
    assert starts in ([0, len(expected)], [0, len(got) - len(expected)])


def test_texts_are_parted_where_the_tokenizer_has_a_token_for_it(tmp_path, bpe):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bpe))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("the kernel " * 20)
    data = read(tmp_path, tokenizer=str(tmp_path))
    end = tokenizer.token_to_id("<|endoftext|>")
    got = data.train.first(10**6).tolist() + data.held_out.first(10**6).tolist()
    assert got.count(end) == 2
    assert got[-1] == end
    assert data.vocab_size == end + 1


def test_texts_without_a_tokenizer_are_refused(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    with testing.raises(ValueError, "--tokenizer must be given with texts: a folder with tokenizer.json, or bytes"):
        read(tmp_path)
    with testing.raises(FileNotFoundError, f"--tokenizer: {tmp_path / 'tokenizer.json'} is missing"):
        read(tmp_path, tokenizer=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with testing.raises(ValueError, f"--tokenizer: {tmp_path / 'tokenizer.json'}: no tokenizer's file"):
        read(tmp_path, tokenizer=str(tmp_path))
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    with testing.raises(ValueError, f"--data: {tmp_path / 'text.txt'} is no text in UTF-8"):
        read(tmp_path, tokenizer="bytes")


# ---- a dataset of Hugging Face's ----


class Part:
    def __init__(self, column, rows):
        self.column_names, self.rows = ["id", column], rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, which):
        return {self.column_names[1]: self.rows[which]}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A folder as `save_to_disk` leaves it, and a package `datasets` that reads what the test puts there."""
    (tmp_path / "state.json").write_text("{}")
    found = {}
    module = types.SimpleNamespace(load_from_disk=lambda path: found[path])
    monkeypatch.setitem(sys.modules, "datasets", module)
    return tmp_path, lambda dataset: found.update({str(tmp_path): dataset})


def test_a_dataset_of_tokens(saved):
    path, put = saved
    put(Part("input_ids", [[1, 2], [3]] * 600))
    data = read(path)
    assert data.train.first(5).tolist() == [1, 2, 3, 1, 2]
    assert (len(data.train), len(data.held_out)) == (1710, 90)
    places = np.arange(1800).reshape(600, 3)[:, [0, 2]].flatten()
    assert data.train.starts[0].tolist() == places[places < 1710].tolist()
    assert data.held_out.starts[0].tolist() == (places[places >= 1710] - 1710).tolist()
    put({"train": Part("input_ids", [[1, 2]] * 3), "test": Part("input_ids", [[7]] * 3)})
    assert read(path).held_out.first(9).tolist() == [7, 7, 7]
    assert read(path).held_out.starts[0].tolist() == [0, 1, 2]


def test_a_dataset_of_texts(saved):
    path, put = saved
    put({"train": Part("text", ["ab", "c"]), "validation": Part("text", ["d"]), "test": Part("text", ["e"])})
    data = read(path, tokenizer="bytes")
    assert bytes(data.train.first(9).tolist()) == b"abc"
    assert bytes(data.held_out.first(9).tolist()) == b"d"
    assert data.vocab_size == 256
    with testing.raises(ValueError, "--tokenizer must be given with texts"):
        read(path)


def test_a_dataset_of_something_else_is_named(saved):
    path, put = saved
    put(Part("image", []))
    with testing.raises(ValueError, f"--data: {path} must have a column `input_ids` or `text`, has id, image"):
        read(path)
    put({"test": Part("text", [])})
    with testing.raises(ValueError, f"--data: {path} must have a part `train`, has test"):
        read(path)


def test_without_the_package_a_dataset_is_refused_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "dataset_dict.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with testing.raises(ValueError, f"--data: {tmp_path} is a dataset of Hugging Face's", "package `datasets`"):
        read(tmp_path)
