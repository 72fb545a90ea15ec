"""Token files and the batch stream (fzero/data/tokens.py, stream.py)."""

import contextlib
import gc
import itertools
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from data_cases import TEXTS, hand_made, write_jsonl

from fzero import data
from fzero.data import token_dtype, token_stream
from fzero.data.tokenizers import train_bpe


def numbered(windows, seq_len):
    """A corpus of so many windows; window w starts with token w * seq_len."""
    count = windows * seq_len + 1
    return data.Tokens("numbered", np.arange(count, dtype="<u4"), np.array([0, count]), count, 0)


def windows_of(batch, seq_len):
    return [int(first) // seq_len for first in batch["tokens"][:, 0]]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# opening


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    data.prepare(write_jsonl(folder / "a.jsonl", TEXTS), folder / "out", tokenizer="bpe:300", val_fraction=0.2)
    return folder / "out"


def edit_meta(**changes):
    def edit(folder):
        meta = json.loads((folder / "meta.json").read_text())
        for path, value in changes.items():
            *parents, last = path.split("__")
            node = meta
            for parent in parents:
                node = node[parent]
            if value is None:
                del node[last]
            else:
                node[last] = value
        (folder / "meta.json").write_text(json.dumps(meta))

    return edit


def edit_file(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def swap_offsets(content):
    return content[:8] + content[16:24] + content[8:16] + content[24:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "meta.json").unlink(), r"meta\.json: no such file; .* is not a prepared corpus: make one with"),
        (edit_file("meta.json", lambda b: b[:20]), r"meta\.json: not JSON"),
        (edit_file("meta.json", lambda b: b"[]"), r"meta\.json: not a JSON object, but a list"),
        (edit_meta(format="other"), r'meta\.json: its "format" is not'),
        (edit_meta(version=2), r"meta\.json: version 2, this fzero reads version 1"),
        (edit_meta(vocab_size=None), r"meta\.json: the entry 'vocab_size' is missing"),
        (edit_meta(splits__val__tokens=None), r"meta\.json: the entry 'tokens' is missing"),
        (edit_meta(splits__train__tokens=-1), r"meta\.json: damaged"),
        (edit_meta(dtype="uint8"), r"meta\.json: damaged: .*dtype=uint8"),
        (edit_meta(eos=300), r"meta\.json: damaged: .*eos=300"),
        (lambda f: (f / "train.bin").unlink(), r"train\.bin: no such file, but meta\.json promises it"),
        (lambda f: (f / "train.docs").unlink(), r"train\.docs: no such file"),
        (edit_file("train.bin", lambda b: b[:-2]), r"train\.bin: truncated: .* bytes, meta\.json says .* x uint16"),
        (edit_file("train.bin", lambda b: b""), r"train\.bin: empty: 0 bytes"),
        (edit_file("train.bin", lambda b: b + b"\0"), r"train\.bin: too long"),
        (edit_file("train.docs", lambda b: b[:-8]), r"train\.docs: truncated"),
        (edit_file("train.docs", swap_offsets), r"train\.docs: document offsets must rise from 0"),
        (edit_file("train.docs", lambda b: b"\1" + b[1:]), r"train\.docs: document offsets must rise from 0"),
        (edit_file("train.docs", lambda b: b[:-8] + b"\xff" * 8), r"train\.docs: document offsets must rise from 0"),
    ],
)
def test_opening_refuses_damage(corpus, tmp_path, damage, message):
    for path in corpus.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data.open_tokens(tmp_path, "train")
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        data.open_tokens(tmp_path, "train")
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_loading_a_tokenizer_refuses_damage(corpus, tmp_path):
    for path in corpus.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text(train_bpe(TEXTS, 290).json, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: vocab_size=290, eos=0, but meta\.json says vocab_size=300"):
        data.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file, but meta\.json names the tokenizer bpe:300"):
        data.load_tokenizer(tmp_path)


def test_opening_maps_and_names_the_splits(corpus):
    with pytest.raises(ValueError, match=r"split='test': a corpus has the splits train, val"):
        data.open_tokens(corpus, "test")
    tokens = data.open_tokens(corpus, "val")
    assert isinstance(tokens.tokens.base, np.memmap) and not tokens.tokens.flags.writeable
    assert (tokens.vocab_size, tokens.docs.dtype) == (300, np.int64)


@pytest.mark.parametrize(("size", "name"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_token_dtype(size, name):
    assert token_dtype(size).name == name and np.iinfo(token_dtype(size)).max >= size - 1


# the stream


def test_windows_documents_and_mask_by_hand():
    # documents:  1 2 3 0 | 5 0 | 7 8 9 10 0 | 12 0      windows of 4 + 1 at stride 4, the last token is the 13th
    first, second, third = ({k: v[0] for k, v in b.items()} for b in data.eval_batches(hand_made([4, 2, 5, 2]), 4, 1))
    assert first["tokens"].tolist() == [1, 2, 3, 0] and first["targets"].tolist() == [2, 3, 0, 5]
    assert first["documents"].tolist() == [0, 0, 0, 0] and first["mask"].tolist() == [True, True, True, False]
    assert second["tokens"].tolist() == [5, 0, 7, 8] and second["targets"].tolist() == [0, 7, 8, 9]
    assert second["documents"].tolist() == [0, 0, 1, 1] and second["mask"].tolist() == [True, False, True, True]
    assert third["tokens"].tolist() == [9, 10, 0, 12] and third["targets"].tolist() == [10, 0, 12, 0]
    assert third["documents"].tolist() == [0, 0, 0, 1] and third["mask"].tolist() == [True, True, False, True]


def test_documents_of_one_token():
    (batch,) = data.eval_batches(hand_made([1, 1, 2, 1]), 4, 1)
    assert batch["documents"].tolist() == [[0, 1, 2, 2]] and batch["mask"].tolist() == [[False, False, True, False]]


def test_shapes_dtypes_and_memory_layout(corpus):
    stream = data.TokenStream(data.open_tokens(corpus), seq_len=7, batch=3)
    batch = stream.batch_at(0)
    assert {k: (v.dtype, tuple(v.shape), v.is_contiguous()) for k, v in batch.items()} == {
        "tokens": (torch.int64, (3, 7), True),
        "targets": (torch.int64, (3, 7), True),
        "documents": (torch.int32, (3, 7), True),
        "mask": (torch.bool, (3, 7), True),
    }
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_batches_agree_with_the_token_file_read_plainly(corpus):
    tokens, seq_len = data.open_tokens(corpus), 5
    plain, starts = tokens.tokens.tolist(), set(tokens.docs.tolist())
    batches = list(data.eval_batches(tokens, seq_len, 4))
    rows, masks, numbers = (
        list(itertools.chain(*(batch[name].tolist() for batch in batches))) for name in ("tokens", "mask", "documents")
    )
    count = (len(plain) - 1) // seq_len
    assert len(starts) > 20 and 0 <= len(rows) - count < 4
    for at, row, mask, number in zip(range(0, count * seq_len, seq_len), rows, masks, numbers):
        assert row == plain[at : at + seq_len]
        assert mask == [at + i + 1 not in starts for i in range(seq_len)]
        assert number == [sum(at + k in starts for k in range(1, i + 1)) for i in range(seq_len)]
    assert not any(itertools.chain(*masks[count:]))


@pytest.mark.parametrize(("windows", "batch"), [(1, 1), (1, 4), (7, 3), (64, 8), (101, 10)])
def test_each_sample_once_an_epoch(windows, batch):
    stream = data.TokenStream(numbered(windows, 5), seq_len=5, batch=batch, seed=3)
    assert stream.samples_per_epoch == windows
    steps = 3 * windows // batch + 1
    order = list(itertools.chain(*(windows_of(stream.batch_at(i), 5) for i in range(steps))))
    epochs = [order[e * windows : (e + 1) * windows] for e in range(3)]
    assert all(sorted(epoch) == list(range(windows)) for epoch in epochs)
    if windows > 50:
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != sorted(epochs[0])


def test_shuffle_is_global_and_seeded():
    order = [windows_of(data.TokenStream(numbered(1000, 2), 2, 1000, seed).batch_at(0), 2) for seed in (0, 0, 1)]
    assert order[0] == order[1] != order[2]
    # Spearman's correlation of a uniform permutation of 1000 has standard deviation 1 / sqrt(999) = 0.032.
    assert abs(np.corrcoef(order[0], np.arange(1000))[0, 1]) < 0.15
    assert abs(np.corrcoef(order[0], order[2])[0, 1]) < 0.15


def test_batch_at_is_pure_here_and_in_another_process(corpus):
    make = lambda: data.TokenStream(data.open_tokens(corpus), seq_len=6, batch=4, seed=5)  # noqa: E731
    stream = make()
    seven = stream.batch_at(7)
    for step in (0, 1000, 6, 8):
        stream.batch_at(step)
    assert equal(seven, stream.batch_at(7)) and equal(seven, make().batch_at(7))
    assert not equal(seven, stream.batch_at(8))
    code = (
        "import sys; from fzero import data; s = data.TokenStream(data.open_tokens(sys.argv[1]), 6, 4, 5); "
        "print({k: v.tolist() for k, v in s.batch_at(7).items()})"
    )
    out = subprocess.run([sys.executable, "-c", code, corpus], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str({k: v.tolist() for k, v in seven.items()})


def test_changing_the_batch_size_in_the_middle_keeps_each_sample_once():
    stream = data.TokenStream(numbered(60, 3), seq_len=3, batch=8)
    seen, cursor = [], 0
    for count in [8, 8, 5, 1, 16, 22, 60]:
        seen += windows_of(stream.samples_at(cursor, count), 3)
        cursor += count
    assert sorted(seen[:60]) == sorted(seen[60:]) == list(range(60))
    assert seen[:56] == list(itertools.chain(*(windows_of(stream.batch_at(i), 3) for i in range(7))))
    halves = [stream.samples_at(8 + first, 4) for first in (0, 4)]  # two ranks, one step
    assert equal({k: torch.cat([half[k] for half in halves]) for k in halves[0]}, stream.batch_at(1))


def test_windows_are_the_same_however_many_are_drawn_together(monkeypatch):
    stream = data.TokenStream(numbered(60, 3), seq_len=3, batch=8, seed=3)
    whole = [windows_of(stream.samples_at(first, count), 3) for first, count in ((0, 60), (3, 17), (55, 70))]
    monkeypatch.setattr(token_stream, "DRAWN", 7)
    token_stream._drawn.cache_clear()
    assert [windows_of(stream.samples_at(first, count), 3) for first, count in ((0, 60), (3, 17), (55, 70))] == whole
    token_stream._drawn.cache_clear()


@pytest.mark.parametrize("max_windows", [None, 7])
@pytest.mark.parametrize("shares", [1, 2, 3, 20])
def test_shares_of_eval_batches_make_up_all_of_them(shares, max_windows):
    tokens = hand_made([11, 25, 9])
    whole = list(data.eval_batches(tokens, 4, 2, max_windows))
    parts = [list(data.eval_batches(tokens, 4, 2, max_windows, (k, shares))) for k in range(shares)]
    assert {len(part) for part in parts} == {-(-len(whole) // shares)}
    dealt = [batch for row in zip(*parts) for batch in row]
    for batch, expected in zip(dealt, whole):
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
    assert all(batch["tokens"].shape == (2, 4) and not batch["mask"].any() for batch in dealt[len(whole) :])


def test_eval_batches_cover_all_or_evenly_some_with_one_shape():
    tokens = numbered(10, 4)

    def seen(batch, max_windows=None):
        batches = list(data.eval_batches(tokens, 4, batch, max_windows))
        assert all(b["tokens"].shape == (batch, 4) for b in batches)
        rows = [(w, all(m), any(m)) for b in batches for w, m in zip(windows_of(b, 4), b["mask"].tolist())]
        assert all(every == some for _, every, some in rows)
        return [w for w, every, _ in rows if every], len(batches)

    assert seen(4) == (list(range(10)), 3) and seen(10) == (list(range(10)), 1) and seen(16)[0] == list(range(10))
    assert seen(2, 5) == ([0, 2, 4, 6, 8], 3) and seen(3, 1) == ([0], 1)
    assert seen(4, 99) == (list(range(10)), 3)


def test_stream_errors(corpus):
    tokens = numbered(2, 4)
    for call, message in [
        (lambda: data.TokenStream(tokens, 9, 1), r"numbered: 9 tokens are fewer than one window of seq_len \+ 1 = 10"),
        (lambda: data.eval_batches(tokens, 9, 1), r"numbered: 9 tokens .* use seq_len <= 8"),
        (lambda: data.TokenStream(data.open_tokens(corpus, "val"), 10**6, 1), r"val\.bin: \d+ tokens are fewer"),
        (lambda: data.TokenStream(tokens, 0, 1), "seq_len=0: wanted at least 1"),
        (lambda: data.TokenStream(tokens, 4, 0), "batch=0: wanted at least 1"),
        (lambda: data.eval_batches(tokens, 4, 0), "batch=0, max_windows=None: wanted at least 1"),
        (lambda: data.eval_batches(tokens, 4, 1, 0), "batch=1, max_windows=0: wanted at least 1"),
        (lambda: data.TokenStream(tokens, 4, 1).batch_at(-1), r"samples_at\(-1, 1\): wanted first >= 0"),
        (lambda: data.TokenStream(tokens, 4, 1).samples_at(0, 0), r"samples_at\(0, 0\): .* count >= 1"),
        (lambda: data.prefetch(lambda step: step, depth=0), "depth=0: wanted at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert data.TokenStream(tokens, 8, 1).samples_per_epoch == 1


# prefetch


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "fzero-prefetch"]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetch_gives_what_direct_calls_give_and_ends_its_thread(corpus, depth):
    stream = data.TokenStream(data.open_tokens(corpus), seq_len=6, batch=4)
    with contextlib.closing(data.prefetch(stream.batch_at, first_step=3, depth=depth)) as batches:
        for expected, (step, batch) in zip(range(3, 10), batches):
            assert step == expected and equal(batch, stream.batch_at(step))
        assert len(prefetch_threads()) == 1
    assert prefetch_threads() == []


def test_prefetch_works_ahead_but_no_further_than_depth():
    made = []
    with contextlib.closing(data.prefetch(lambda step: made.append(step) or step, depth=3)) as batches:
        next(batches)
        deadline = time.monotonic() + 10
        while len(made) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert made == [0, 1, 2, 3, 4]  # one taken, three ready, one made and waiting for a place


def test_prefetch_raises_at_the_step_that_failed():
    def batch_at(step):
        if step == 2:
            raise ValueError("no batch 2")
        return step * 10

    batches, seen = data.prefetch(batch_at), []
    with pytest.raises(ValueError, match="no batch 2"):
        for item in batches:
            seen.append(item)
    assert seen == [(0, 0), (1, 10)] and prefetch_threads() == [] and list(batches) == []


def test_prefetch_ends_when_it_is_dropped():
    batches = data.prefetch(lambda step: step)
    assert next(batches) == (0, 0) and len(prefetch_threads()) == 1
    del batches
    gc.collect()
    assert prefetch_threads() == []


def test_a_program_that_never_closes_prefetch_ends():
    code = (
        "import builtins, torch; from fzero.data import prefetch; "
        "builtins.kept = prefetch(lambda step: torch.ones(500, 500) @ torch.ones(500, 500)); next(builtins.kept)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
