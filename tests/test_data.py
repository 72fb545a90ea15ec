"""Token files and the batch stream (fzero/data/tokens.py, stream.py)."""

import contextlib
import gc
import itertools
import json
import re
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from fzero import data
from fzero.data import checksums
from fzero.data.tokenizers import train_bpe
from fzero.data.tokens import token_dtype
from fzero.run import token_weights
from fzero.run.config_table import from_table
from fzero.run.fill_in_middle import sentinels_of
from fzero.run.span_corruption import span_sentinels
from fzero.run.token_weights import weights_of

TEXTS = [f"def f_{i}(x):\n    return x * {i}  # né 漢字 🙂\n" * (1 + i % 5) for i in range(40)]


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def hand_made(lengths, vocab_size=1000):
    """Documents of the given lengths (eos included): tokens 1, 2, 3, ... over the whole corpus, 0 at each end."""
    docs = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.arange(1, docs[-1] + 1).astype(token_dtype(vocab_size))
    tokens[docs[1:] - 1] = 0
    return data.Tokens("hand-made", tokens, docs, vocab_size, 0)


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
    monkeypatch.setattr(data.stream, "DRAWN", 7)
    data.stream._drawn.cache_clear()
    assert [windows_of(stream.samples_at(first, count), 3) for first, count in ((0, 60), (3, 17), (55, 70))] == whole
    data.stream._drawn.cache_clear()


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


# checksums


@pytest.fixture
def summed(tmp_path, monkeypatch):
    """A corpus of bytes with checksums of chunks of 64 bytes."""
    monkeypatch.setattr(checksums, "CHUNK", 64)
    folder = tmp_path / "summed"
    data.prepare(write_jsonl(tmp_path / "a.jsonl", TEXTS), folder, val_fraction=0.2)
    assert data.verify(folder) == []
    return folder


@contextlib.contextmanager
def flipped(path, at):
    """A bit of a file is another one."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    yield
    content[at] ^= 1
    path.write_bytes(content)


def read_whole(folder, split):
    tokens = data.open_tokens(folder, split)
    stream = data.TokenStream(tokens, 1, 1)  # windows that cover every token
    return stream.samples_at(0, stream.samples_per_epoch)


@pytest.mark.parametrize("file", ["train.bin", "val.bin", "train.docs", "val.docs", "train.sums", "val.sums"])
def test_a_flipped_byte_of_a_corpus_is_found_by_verify_and_by_whoever_reads_it(summed, file):
    path, split = summed / file, file.partition(".")[0]
    size = path.stat().st_size
    for at in sorted({0, 1, 63, 64, 65, size // 2, size - 2, size - 1, *range(0, size, 97)}):
        with flipped(path, at):
            begin = at // 64 * 64
            said = f"{path}: damaged: the bytes {begin:,} to {min(size, begin + 64) - 1:,} do not match their checksum"
            if file.endswith(".sums"):
                with pytest.raises(ValueError, match=re.escape(f"{path}: damaged: ")):
                    data.verify(summed)
            else:
                assert data.verify(summed) == [said]
            with pytest.raises(
                ValueError, match=re.escape(f"{path}: damaged" if "docs" not in file else str(path))
            ) as e:
                read_whole(summed, split)
            assert "\n" not in str(e.value)
    assert data.verify(summed) == []
    read_whole(summed, split)


def test_a_run_compares_the_chunks_that_it_reads_and_each_of_them_once(summed, monkeypatch):
    compared, real = [], checksums.crc32c
    monkeypatch.setattr(checksums, "crc32c", lambda part, *more: (compared.append(len(part)), real(part, *more))[1])
    stream = data.TokenStream(data.open_tokens(summed), 64, 2)
    compared.clear()  # of the documents
    with flipped(summed / "train.bin", 64 * 9 + 5):
        for window in [n for n in range(len(stream.rows)) if n not in (8, 9)]:  # a window is 65 tokens
            before = len(compared)
            for _ in range(2):
                data.assemble.assemble(stream.tokens, stream.rows.positions(np.array([window])))
            assert len(compared) - before <= 2
        for window in (8, 9):
            with pytest.raises(ValueError, match="the bytes 576 to 639 do not match"):
                data.assemble.assemble(stream.tokens, stream.rows.positions(np.array([window])))
    stream.samples_at(0, 3 * stream.samples_per_epoch)
    assert sum(stream.tokens.sums.left) == stream.tokens.sums.count <= 1  # the tail that no window has
    done = len(compared)
    stream.samples_at(0, 3 * stream.samples_per_epoch)
    assert len(compared) == done


def test_a_corpus_without_checksums_is_read_and_said_to_have_none(summed, fz):
    meta = json.loads((summed / "meta.json").read_text())
    del meta["sums"]
    (summed / "meta.json").write_text(json.dumps(meta))
    with flipped(summed / "train.bin", 5):
        assert data.open_tokens(summed).sums is None
        read_whole(summed, "train")
    code, _, err = fz("data", "verify", summed)
    assert code == 2 and "has no checksums" in err and "prepare the corpus again" in err


def test_the_command_that_verifies(summed, fz):
    assert fz("data", "verify", summed) == (0, f"{summed}: sound\n", "")
    with flipped(summed / "val.bin", 3), flipped(summed / "train.bin", 200):
        code, out, err = fz("data", "verify", summed)
        assert (
            code == 1
            and err == ""
            and [line.split(":")[0] for line in out.splitlines()]
            == [
                str(summed / "train.bin"),
                str(summed / "val.bin"),
            ]
        )
    (summed / "train.sums").unlink()
    code, _, err = fz("data", "verify", summed)
    assert code == 2 and "train.sums: no such file" in err


@pytest.mark.parametrize("size", [0, 1, 64, 65, 1000])
@pytest.mark.parametrize("step", [1, 7, 64, 1000])
def test_a_file_written_in_pieces_has_the_checksums_of_its_chunks(size, step, tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "CHUNK", 64)
    content = bytes(range(256)) * 4
    file = checksums.SummedFile(tmp_path / "a")
    for at in range(0, size, step):
        file.write(content[at : min(size, at + step)])
    file.close()
    assert file.sums == [checksums.crc32c(content[at : min(size, at + 64)]) for at in range(0, size, 64)]
    assert (tmp_path / "a").read_bytes() == content[:size]


# token files of other systems


def write_megatron(prefix, documents, **change):
    """A .bin and an .idx of Megatron: documents are lists of sequences of tokens. change: of the parts of the .idx."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    begins = (np.append(0, np.cumsum(lengths)[:-1]) * 2).astype("<i8")
    firsts = np.append(0, np.cumsum([len(document) for document in documents])).astype("<i8")
    parts = {"magic": b"MMIDIDX\0\0", "version": 1, "code": 8, "begins": begins, "firsts": firsts} | change
    head = struct.pack("<9sQBQQ", parts["magic"], parts["version"], parts["code"], len(lengths), len(parts["firsts"]))
    Path(f"{prefix}.bin").write_bytes(np.concatenate(sequences).astype("<u2").tobytes())
    Path(f"{prefix}.idx").write_bytes(head + lengths.tobytes() + parts["begins"].tobytes() + parts["firsts"].tobytes())


ENCODED = [[i + 1] * (3 + i % 5) + [0] for i in range(40)]
PIECES = [[document[:2], document[2:]] for document in ENCODED]


@pytest.fixture(params=["bin", "idx", "prefix", "npy", "npy int64"])
def foreign(request, tmp_path):
    """A token file of ENCODED in each form."""
    if request.param.startswith("npy"):
        np.save(tmp_path / "t.npy", np.concatenate(ENCODED).astype(request.param.partition(" ")[2] or "uint16"))
        return tmp_path / "t.npy"
    write_megatron(tmp_path / "t", PIECES)
    return tmp_path / ("t" if request.param == "prefix" else f"t.{request.param}")


def test_a_token_file_of_another_system_is_read_in_place(foreign, tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.glob("t.*")}
    meta = data.link(foreign, tmp_path / "corpus", tokenizer="bytes", val_fraction=0.1)
    assert {n: meta["splits"][n]["documents"] for n in ("train", "val")} == {"train": 36, "val": 4}
    found = []
    for split in ("train", "val"):
        tokens = data.open_tokens(tmp_path / "corpus", split)
        found += [tokens.tokens[a:b].tolist() for a, b in itertools.pairwise(tokens.docs.tolist())]
    assert found == ENCODED, "documents, also those of several sequences"
    assert not [path for path in (tmp_path / "corpus").iterdir() if path.suffix == ".bin"]
    for packing in ("stream", "best-fit"):
        stream = data.TokenStream(data.open_tokens(tmp_path / "corpus"), 8, 4, packing=packing)
        own = data.Tokens("", np.concatenate(ENCODED[:36]).astype(np.uint16), stream.tokens.docs, 256, 0)
        for name, leaf in data.TokenStream(own, 8, 4, packing=packing).batch_at(3).items():
            assert torch.equal(leaf, stream.batch_at(3)[name])
    assert {path: path.read_bytes() for path in tmp_path.glob("t.*")} == before
    with pytest.raises(ValueError, match=r"its tokens are in .*, of which there are no checksums"):
        data.verify(tmp_path / "corpus")


def test_a_linked_file_that_has_changed_is_named(tmp_path):
    np.save(tmp_path / "t.npy", np.concatenate(ENCODED).astype(np.uint8))
    data.link(tmp_path / "t.npy", tmp_path / "corpus", tokenizer="bytes")
    content = (tmp_path / "t.npy").read_bytes()
    for changed, words in (
        (content[:-1], r"t\.npy: has \d+ bytes, and \d+ when it was linked"),
        (content[:-1] + b"x", r"t\.npy: has other content than when it was linked"),
    ):
        (tmp_path / "t.npy").write_bytes(changed)
        with pytest.raises(ValueError, match=words):
            data.open_tokens(tmp_path / "corpus")
    (tmp_path / "t.npy").unlink()
    with pytest.raises(ValueError, match=r"t\.npy: no such file, but a corpus reads its tokens there"):
        data.open_tokens(tmp_path / "corpus")


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


WRONG = {
    "magic": ({"magic": b"MMIDXXX\0\0"}, r"t\.idx: not an \.idx of Megatron"),
    "version": ({"version": 2}, r"t\.idx: version 2, tokens of uint16, 80 sequences; wanted version 1"),
    "floats": ({"code": 7}, r"tokens of float32"),
    "code": ({"code": 99}, r"tokens of 99"),
    "wider": ({"code": 4}, r"t\.idx: its sequences do not lie one after the other"),
    "places": ({"begins": np.zeros(80, "<i8")}, r"its sequences do not lie one after the other"),
    "documents": ({"firsts": np.arange(41, dtype="<i8")}, r"must rise from 0 to 80; they run from 0 to 40"),
    "fall": ({"firsts": np.array([0, 60, 40, 80], "<i8")}, r"must rise from 0 to 80"),
}


@pytest.mark.parametrize(
    "case", [*WRONG, "cut idx", "modes", "cut head", "no idx", "cut bin", "a token", "one document"]
)
def test_a_token_file_that_is_none_is_one_line_and_leaves_nothing(case, tmp_path):
    change, words = WRONG.get(case, ({}, ""))
    write_megatron(tmp_path / "t", PIECES, **change)
    if case == "cut idx":
        cut(tmp_path / "t.idx", -1)
        words = r"t\.idx: truncated: it has \d+ bytes, \d+ for 80 sequences"
    elif case == "modes":
        (tmp_path / "t.idx").write_bytes((tmp_path / "t.idx").read_bytes() + bytes(80))
        words = r"t\.idx: too long \(sequences with modes are not of text\)"
    elif case == "cut head":
        cut(tmp_path / "t.idx", 20)
        words = r"t\.idx: truncated: it has 20 bytes, and its head alone 34"
    elif case == "no idx":
        (tmp_path / "t.idx").unlink()
        words = r"t\.idx: no such file; give a \.npy file, or the \.bin of Megatron beside its \.idx"
    elif case == "cut bin":
        cut(tmp_path / "t.bin", -2)
        words = r"t\.bin: has \d+ bytes, and t\.idx says"
    elif case == "a token":
        write_megatron(tmp_path / "t", [*PIECES, [[300, 0]]])
        words = r"t\.bin: has the token 300, and the tokenizer bytes the tokens 0 to 255"
    elif case == "one document":
        write_megatron(tmp_path / "t", PIECES[:1])
        words = r"t\.bin: has 1 document; training and validation need one each"
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=words) as caught:
        data.link(tmp_path / "t.bin", tmp_path / "corpus", tokenizer="bytes")
    assert "\n" not in str(caught.value) and sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("case", ["cut", "text", "floats", "two dimensions", "objects", "empty"])
def test_an_npy_file_that_is_none_is_one_line(case, tmp_path):
    path, values = tmp_path / "t.npy", np.concatenate(ENCODED)
    given = {"floats": values * 0.5, "two dimensions": values[None], "objects": np.array([[1], "a"], object)}
    np.save(path, given.get(case, values), allow_pickle=True)
    if case == "cut":
        cut(path, -9)
    elif case == "text":
        path.write_text("a text")
    elif case == "empty":
        path.write_bytes(b"")
    words = r"t\.npy: (cannot be read as a \.npy file of numbers|is \w+ \[.*; wanted whole)"
    with pytest.raises(ValueError, match=words) as caught:
        data.link(path, tmp_path / "corpus", tokenizer="bytes")
    assert "\n" not in str(caught.value)
    for options, words in (
        ({"tokenizer": "bpe:300"}, "wanted the one that made the tokens: bytes, or a tokenizer.json"),
        ({"tokenizer": "bytes", "val_fraction": 1.0}, r"val_fraction=1\.0: wanted a number between 0 and 1"),
        ({"tokenizer": "gone"}, "tokenizer='gone': no such file"),
    ):
        with pytest.raises(ValueError, match=words):
            data.link(path, tmp_path / "corpus", **options)
    assert [one.name for one in tmp_path.iterdir()] == ["t.npy"]


# fill in the middle

SENTINELS = data.Sentinels(901, 902, 903)


def changed_documents(batch, new, seen):
    """(tokens, those before without the end, whether it ends there, targets, mask, mask before) of each part of a
    document that a transform changed; of the others nothing may differ. seen: counts both."""
    assert torch.equal(new["documents"], batch["documents"])
    for row, documents in enumerate(batch["documents"]):
        for document in documents.unique().tolist():
            names, here = ("tokens", "mask", "targets"), documents == document
            old, was, before, its, counts, targets = (one[name][row][here] for one in (batch, new) for name in names)
            if torch.equal(old, its):
                seen["same"] += 1
                assert torch.equal(counts, was) and torch.equal(targets, before)
                continue
            seen["changed"] += 1
            over = not bool(was[-1])
            yield its, old[: len(old) - over].tolist(), over, targets, counts, was


def parts_of(text):
    """(prefix, middle, suffix) of a rearranged text."""
    text = text.tolist()
    pre, mid, suf = (text.index(token) for token in SENTINELS)
    if suf == pre + 1:  # SPM: prefix and middle one after the other
        return None, text[mid + 1 :], text[suf + 1 : mid]
    return text[pre + 1 : suf], text[mid + 1 :], text[suf + 1 : mid]


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
@pytest.mark.parametrize("spm", [0.0, 1.0])
def test_a_rearranged_document_has_its_tokens_but_three(packing, spm):
    stream = data.TokenStream(hand_made([7, 3, 40, 12, 5, 90, 6, 31, 8, 22] * 3), 32, 6, packing=packing)
    seen = Counter()
    for step in range(4):
        batch = stream.batch_at(step)
        new = data.fill_in_middle(batch, step * 6, 5, sentinels=SENTINELS, rate=0.8, spm=spm)
        for its, text, over, targets, counts, was in changed_documents(batch, new, seen):
            prefix, middle, suffix = parts_of(its[: len(its) - over])
            if prefix is None:
                assert middle + suffix == text[:-3]
            else:
                assert prefix + middle + suffix == text[:-3]
            assert torch.equal(targets[:-1], its[1:]) and torch.equal(counts[:-1], was[:-1])
            assert not counts[-1], "what follows the middle is not its end"
            assert not over or its[-1] == 0 == targets[-2]
    assert seen["changed"] > 10 and seen["same"] > 5


MARKS = [990, 991, 992, 993, 994]


def put_back(ids):
    """The text of which spans were taken out, and how many there were; its first part has each mark once."""
    second = next(i for i in range(len(ids)) if ids[i] == MARKS[0] and MARKS[0] in ids[:i])
    inputs, spans, found, current = ids[:second], {}, [], None
    for token in ids[second:]:
        if token in MARKS:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    for token in inputs:
        found += spans[token] if token in MARKS else [token]
    marks = [token for token in inputs if token in MARKS]
    assert marks == MARKS[: len(marks)] and list(spans) == MARKS[: len(marks) + 1] and ids[-1] == MARKS[len(marks)]
    assert all(spans[mark] for mark in marks) and not any(
        a in MARKS and b in MARKS for a, b in itertools.pairwise(inputs)
    )
    return found, second, len(marks)


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_a_document_whose_spans_are_taken_out_has_its_tokens(packing):
    stream = data.TokenStream(hand_made([7, 3, 40, 12, 5, 90, 6, 31, 8, 22] * 3), 32, 6, packing=packing)
    seen, gone = {"changed": 0, "same": 0}, []
    for step in range(6):
        batch = stream.batch_at(step)
        how = {"sentinels": MARKS, "rate": 0.8, "density": 0.3, "span": 2.0}
        new = data.corrupt_spans(batch, step * 6, 5, **how)
        for its, text, over, targets, counts, _ in changed_documents(batch, new, seen):
            found, second, spans = put_back(its[: len(its) - over].tolist())
            assert found == text[: len(text) - 2 * spans - 1]
            gone.append((len(text) - second - spans - 1) / len(found))
            assert torch.equal(targets[:-1], its[1:])
            assert not over or its[-1] == 0 == targets[-2]
            assert not counts[: second - 1].any() and counts[second - 1 : -1].all() and not counts[-1]
    assert seen["changed"] > 10 and seen["same"] > 5 and 0.2 < np.mean(gone) < 0.4


def test_a_sample_s_spans_and_targets_are_alike_in_every_batch():
    stream = data.TokenStream(hand_made([40, 12, 90, 31]), 16, 6)

    def change(n, count, seed):
        return data.corrupt_spans(stream.samples_at(n, count), n, seed, sentinels=MARKS)

    whole, parts = change(4, 6, 1), [change(n, 2, 1) for n in (4, 6, 8)]
    for name, leaf in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), leaf)
    assert not torch.equal(whole["mask"], change(4, 6, 2)["mask"])
    batch, weights = stream.samples_at(0, 6), torch.linspace(0, 3, 256)
    found = data.weigh_targets(batch, weights)["mask"]
    assert torch.equal(found, weights[batch["targets"]] * batch["mask"]) and 0 < found.count_nonzero() < found.numel()
    for call, said in (
        (lambda: data.corrupt_spans(batch, 0, 0, sentinels=[1]), "with 1 sentinels; wanted 1 or more, and 2"),
        (lambda: data.corrupt_spans(batch, 0, 0, sentinels=MARKS, density=2.0), "density is 2.0; it must be from 0"),
        (lambda: data.weigh_targets(batch, torch.tensor([-0.5])), "finite numbers, 0 or more, one for each"),
        (lambda: data.weigh_targets(batch, torch.ones(1)), "and there are 1 weights"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_a_sample_is_rearranged_alike_in_every_batch():
    stream = data.TokenStream(hand_made([40, 12, 90, 31]), 16, 6)
    whole = data.fill_in_middle(stream.samples_at(4, 6), 4, 1, sentinels=SENTINELS)
    parts = [data.fill_in_middle(stream.samples_at(n, 2), n, 1, sentinels=SENTINELS) for n in (4, 6, 8)]
    for name, leaf in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), leaf)
    other = data.fill_in_middle(stream.samples_at(4, 6), 4, 2, sentinels=SENTINELS)
    assert not torch.equal(whole["tokens"], other["tokens"])
    with pytest.raises(ValueError, match=r"rate is 1\.5; it must be from 0 to 1"):
        data.fill_in_middle(stream.samples_at(0, 1), 0, 0, sentinels=SENTINELS, rate=1.5)
    with pytest.raises(ValueError, match="the batch has no 'documents'"):
        data.fill_in_middle({"tokens": torch.zeros(1, 2)}, 0, 0, sentinels=SENTINELS)


def sentinels_beside(folder, *tokens):
    """A corpus whose BPE has some tokens more."""
    from tokenizers import Tokenizer

    text = folder / "text.txt"
    text.write_text("".join(f"one {n} two {n * n} three. " for n in range(300)))
    data.prepare(text, folder / "plain", tokenizer="bpe:270", val_fraction=0.1)
    library = Tokenizer.from_str((folder / "plain" / "tokenizer.json").read_text())
    library.add_special_tokens(list(tokens))
    library.save(str(folder / "tokenizer.json"))
    data.prepare(text, folder / "corpus", tokenizer=folder / "tokenizer.json", val_fraction=0.1)
    return folder / "corpus"


def test_the_tokens_of_a_middle_are_the_tokenizers_or_the_users(tmp_path):
    place = sentinels_beside(tmp_path, "<fim_suffix>", "<fim_middle>", "<fim_prefix>", "<own>")
    assert sentinels_of("", place) == data.Sentinels(prefix=272, middle=271, suffix=270)
    assert sentinels_of("<own>,<fim_middle>,<fim_suffix>", place) == (273, 271, 270)
    assert sentinels_of("3,2,1", place) == (3, 2, 1)
    for text, words in {
        "<own>,<fim>,<fim_suffix>": "has no token '<fim>'",
        "<own>,<|endoftext|>,<fim_suffix>": "ends documents with one of them",
        "<own>,273,<fim_suffix>": "has the token 273 twice",
        "1,2,3-4": "which are 4 tokens; it is PREFIX,MIDDLE,SUFFIX",
        "1,2,274": "ids of .* are below 274",
    }.items():
        with pytest.raises(ValueError, match=words):
            sentinels_of(text, place)
    with pytest.raises(ValueError, match=r"none of the usual tokens for it .*give data.fim_tokens=PREFIX"):
        sentinels_of("", tmp_path / "plain")
    data.prepare(tmp_path / "text.txt", tmp_path / "bytes", val_fraction=0.1)
    assert sentinels_of("", tmp_path / "bytes") == (253, 254, 255)
    with pytest.raises(ValueError, match="of bytes give ids, such as 253,254,255"):
        sentinels_of("a,b,c", tmp_path / "bytes")


def test_the_tokens_of_spans_are_the_tokenizers_or_the_users(tmp_path):
    place = sentinels_beside(tmp_path, "<extra_id_1>", "<extra_id_0>", "<extra_id_3>", "<own>")
    assert span_sentinels("", place) == [271, 270]  # those that follow one another
    assert span_sentinels("<own>,5-7,<extra_id_0>", place) == [273, 5, 6, 7, 271]
    for text, words in {
        "<own>": "which is one token; it is the tokens that stand for the spans",
        "<own>,<other>": "has no token '<other>'",
        "7-5": "has 7-5; ids of .* are below 274, in rising order",
        "270-274": "ids of .* are below 274",
        "5-7,6": "has the token 6 twice",
    }.items():
        with pytest.raises(ValueError, match=words):
            span_sentinels(text, place)
    with pytest.raises(ValueError, match=r"has no <extra_id_0>, <extra_id_1>, ...; give data.sentinel_tokens, the"):
        span_sentinels("", tmp_path / "plain")
    data.prepare(tmp_path / "text.txt", tmp_path / "bytes", val_fraction=0.1)
    never = span_sentinels("", tmp_path / "bytes")
    assert len(never) == 13 and not {*never} & {*"".join(map(chr, range(1, 0x800))).encode(), *"\U0010ffff".encode()}


def test_weights_are_of_tokens_or_a_file_of_all(tmp_path):
    place = sentinels_beside(tmp_path, "<own>", "<a=b>")
    weights = weights_of("<own>=0,<a=b>=2.5,3-4=.25", place)
    assert weights[[270, 271, 3, 4]].tolist() == [0, 2.5, 0.25, 0.25] and weights.sum() == 272 - 1 + 1.5 - 1.5
    values = np.random.default_rng(0).random(272, np.float32)
    np.save(tmp_path / "own.npy", values)
    began = token_weights.with_digest(str(tmp_path / "own.npy"))
    assert began == token_weights.with_digest(began) != token_weights.with_digest("1=0.5")
    assert torch.equal(weights_of(began, place), torch.from_numpy(values).double())
    for wrong, words in (
        (values[1:], r"is float32 \[271\]; data.token_weights of this corpus is a vector of 272 numbers of 0 or more"),
        (values - 1, "is a vector of 272 numbers of 0 or more"),
        (values * np.inf, "is a vector of 272 numbers of 0 or more"),
        (np.array(["a"] * 272), "is a vector of 272 numbers of 0 or more"),
    ):
        np.save(tmp_path / "own.npy", wrong)
        with pytest.raises(ValueError, match=words):
            weights_of(str(tmp_path / "own.npy"), place)
    with pytest.raises(ValueError, match=r"and the file is [0-9a-f]{16} by now; put the other one back, or start a"):
        weights_of(began, place)
    for text, words in (("<ow>=0", "has no token '<ow>'"), ("272=0", "ids of .* are below 272")):
        with pytest.raises(ValueError, match=words):
            weights_of(text, place)


@pytest.mark.parametrize(
    "own, words",
    [
        ({"noise_density": 0.2}, "data.noise_density is 0.2 and data.span_corruption is 0; give the part"),
        ({"sentinel_tokens": "1,2"}, "data.sentinel_tokens is '1,2' and data.span_corruption is 0"),
        ({"span_corruption": 1.5}, "data.span_corruption is 1.5; it must be from 0 to 1"),
        ({"span_corruption": 0.5, "fim": 0.5}, "data.fim is 0.5, which rearranges them too"),
        ({"span_corruption": 0.5, "noise_density": 1.0}, "data.noise_density is 1.0; it must be above 0 and below 1"),
        ({"span_corruption": 0.5, "mean_noise_span_length": 0.5}, "data.mean_noise_span_length is 0.5; it must be at"),
        ({"token_weights": "1"}, "has '1'; it is TOKEN=WEIGHT,..., tokens or their ids"),
        ({"token_weights": "1=0.5,2=-1.5"}, "has '2=-1.5'; it is TOKEN=WEIGHT"),
        ({"token_weights": "=0.5"}, "has '=0.5'; it is TOKEN=WEIGHT"),
        ({"token_weights": "1=0.5", "objective": "dpo"}, "the loss of objective=dpo is no mean of tokens; leave it"),
        ({"span_corruption": 0.5, "objective": "chat"}, "data.span_corruption is 0.5 and objective is chat; it takes"),
        ({"fim_tokens": "1,2,3"}, "data.fim_tokens is '1,2,3' and data.fim is 0"),
        ({"fim": 0.5, "fim_tokens": "1,2"}, "it is PREFIX,MIDDLE,SUFFIX"),
        ({"fim": 1.5}, "data.fim is 1.5; it must be at least 0 and below 1"),
    ],
)
def test_settings_of_transforms_are_refused_in_a_line(own, words):
    with pytest.raises(ValueError, match=words):
        objective = own.get("objective", "text")
        rest = {key: value for key, value in own.items() if key != "objective"}
        from_table({"preset": "mlp-tiny", "objective": objective, "data": rest})
