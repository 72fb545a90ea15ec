"""How documents fill rows (fzero/data/packing.py), and what a stream of other rows leaves to read."""

import numpy as np
import pytest
import torch

from fzero import data
from fzero.data import packing, token_dtype, token_stream
from fzero.data.checksums import ChunkSums, crc32c

PACKINGS = ("stream", "best-fit")


@pytest.fixture(autouse=True)
def quick_order(monkeypatch):
    """Another order of the same kind, drawn by numpy: that of a run is tested in test_data.py, and costs milliseconds
    for each of a thousand small corpora."""

    def drawn(seed, epoch, rows, block):
        whole = np.random.default_rng((seed, epoch, rows)).permutation(rows)
        return torch.from_numpy(whole[block * token_stream.DRAWN : (block + 1) * token_stream.DRAWN])

    monkeypatch.setattr(token_stream, "_drawn", drawn)


def corpus_of(lengths):
    """Documents of these lengths whose tokens are their places, so that a batch says which it has."""
    docs = np.concatenate([[0], np.cumsum(lengths)])
    return data.Tokens("numbered", np.arange(docs[-1], dtype="<u4"), docs, int(docs[-1]), 0)


def corpora(seed, count):
    """So many corpora of random documents, of one token each too, with lengths for rows."""
    draw = np.random.default_rng(seed)
    while count:
        tokens = corpus_of(draw.integers(1, draw.integers(2, 30), draw.integers(1, 20)))
        if len(tokens.tokens) > 2 and len(packing.within_documents(tokens)):
            count -= 1
            yield tokens, int(draw.integers(1, min(12, len(tokens.tokens) - 1) + 1)), draw


def counted(batch):
    """The places of the inputs whose targets count, each with its own target behind it."""
    places = batch["tokens"][batch["mask"]]
    assert torch.equal(batch["targets"][batch["mask"]], places + 1)
    return places.tolist()


def predictable(tokens):
    """The places of all tokens whose next one is of the same document."""
    return [i for begin, end in zip(tokens.docs[:-1], tokens.docs[1:]) for i in range(begin, end - 1)]


@pytest.mark.parametrize("kind", PACKINGS)
def test_an_epoch_has_every_target_once(kind):
    for tokens, seq_len, draw in corpora(1, 40):
        stream = data.TokenStream(tokens, seq_len, 1, int(draw.integers(9)), kind)
        for epoch in range(2):
            seen = counted(stream.samples_at(epoch * stream.samples_per_epoch, stream.samples_per_epoch))
            tail = (len(tokens.tokens) - 1) % seq_len if kind == "stream" else 0
            assert sorted(seen) == [i for i in predictable(tokens) if i < len(tokens.tokens) - 1 - tail]


@pytest.mark.parametrize("kind", PACKINGS)
def test_batches_are_by_the_definition(kind):
    """Documents are numbered from 0 in each row, fill has a number of its own and counts nowhere, and tokens attend to
    a run of one document alone."""
    for tokens, seq_len, _ in corpora(2, 20):
        stream = data.TokenStream(tokens, seq_len, 1, 3, kind)
        numbers = np.arange(stream.samples_per_epoch)
        batch = packing.assemble(tokens, stream.rows.positions(numbers))
        for r, row in enumerate(stream.rows.positions(numbers).tolist()):
            number, last = -1, None
            for t, place in enumerate(row):
                owner = None if place < 0 else int(np.searchsorted(tokens.docs, place, side="right"))
                went_on = last is not None and owner == last[1] and (owner is None or place == last[0] + 1)
                number, last = number + (not went_on), (place, owner)
                assert int(batch["documents"][r, t]) == number
                same = owner is not None and place + 1 < tokens.docs[owner]
                assert bool(batch["mask"][r, t]) == same
                got = int(batch["tokens"][r, t]), int(batch["targets"][r, t])
                assert got == ((place, place + 1) if owner is not None else (tokens.eos, tokens.eos))


@pytest.mark.parametrize("window", [3, packing.WINDOW])
def test_best_fit_cuts_long_documents_alone_and_as_few_times_as_it_must(window):
    for tokens, seq_len, _ in corpora(3, 30):
        rows = packing.BestFit(packing.full_range(tokens), seq_len, tokens, window)
        pieces = sorted(rows.pieces.tolist())
        wanted = []
        for begin, end in packing.within_documents(tokens).tolist():
            wanted += [[at, min(at + seq_len, end)] for at in range(begin, end, seq_len)]
        assert pieces == wanted
        # Best fit: a piece never opens a row while an open row of its window has room, so two rows never fit into one.
        filled = [(np.sum(row >= 0), row) for row in rows.positions(np.arange(len(rows)))]
        if window == packing.WINDOW:
            held = sorted(int(count) for count, _ in filled)
            assert len(held) < 2 or held[0] + held[1] > seq_len


def test_figures_by_hand():
    # rows of 4 positions; documents of 3, 6, 1 and 4 tokens have 2, 5, 0 and 3 positions
    tokens = corpus_of([3, 6, 1, 4])
    assert packing.figures(tokens, "stream", 4) == (3, 2 / 3, 1 / 3, 0.0)  # 0-3, 4-7, 8-11: the last document is cut
    # 4 | 1 3 | 2
    assert packing.figures(tokens, "best-fit", 4) == (3, 1 / 3, 0.0, 2 / 12)


def test_a_stream_of_other_rows_reads_what_was_left_of_the_epoch():
    """Stages of other lengths and packings: each target is read once, but for less than a row at the end."""
    for tokens, _, draw in corpora(4, 60):
        rest, seen, lengths = None, [], []
        stages = int(draw.integers(2, 4))
        for stage in range(stages):
            kind = PACKINGS[draw.integers(2)]
            lengths.append(int(draw.integers(1, min(12, len(tokens.tokens) - 1) + 1)))
            stream = data.TokenStream(tokens, lengths[-1], 1, 5, kind, rest)
            rows = len(stream.first_rows) if rest is not None else stream.samples_per_epoch
            made = rows if stage == stages - 1 else int(draw.integers(0, rows + 1))
            if made:
                seen += counted(stream.samples_at(0, made))
            rest = stream.remainder_after(made)
            assert rest.epoch == 0
        left = {i for begin, end in rest.ranges.tolist() for i in range(begin, end)} & {*predictable(tokens)}
        assert sorted([*seen, *left]) == predictable(tokens)
        assert len(left) < lengths[-1] and (kind == "stream" or not left)


def test_whole_epochs_follow_what_was_left():
    tokens = corpus_of([7, 3, 12, 5, 9])
    before = data.TokenStream(tokens, 3, 1, 2, "best-fit")
    for consumed in (0, 4, before.samples_per_epoch, before.samples_per_epoch + 2):
        rest = before.remainder_after(consumed)
        assert rest.epoch == max(consumed - 1, 0) // before.samples_per_epoch
        after = data.TokenStream(tokens, 6, 1, 2, "best-fit", rest)
        few, size = len(after.first_rows), after.samples_per_epoch
        for epoch in range(2):
            assert sorted(counted(after.samples_at(few + epoch * size, size))) == predictable(tokens)
        fresh = data.TokenStream(tokens, 6, 1, 2, "best-fit")
        theirs = fresh.samples_at((rest.epoch + 1) * size, size)  # the order of that epoch as without a stage before
        assert counted(after.samples_at(few, size)) == counted(theirs)


@pytest.mark.parametrize("kind", PACKINGS)
def test_samples_are_the_same_however_they_are_asked_for(kind):
    """A step is any way of cutting the order: a resume at any sample, and the shares of any mesh."""
    tokens = corpus_of([7, 3, 12, 5, 9, 2, 31])
    rest = data.TokenStream(tokens, 2, 1, 2, kind).remainder_after(5)
    for stream in (data.TokenStream(tokens, 5, 4, 2, kind), data.TokenStream(tokens, 5, 4, 2, kind, rest)):
        whole = stream.samples_at(0, 40)
        for ranks in (1, 2, 4):
            parts = [stream.samples_at(4 * step + m, 4 // ranks) for step in range(10) for m in range(0, 4, 4 // ranks)]
            assert all(torch.equal(torch.cat([p[name] for p in parts]), whole[name]) for name in whole)


def test_evaluation_takes_the_packing():
    tokens = corpus_of([7, 3, 12, 5, 9])
    batches = list(data.eval_batches(tokens, 6, 4, packing="best-fit"))
    assert sorted(place for batch in batches for place in counted(batch)) == predictable(tokens)
    stream = data.TokenStream(tokens, 6, 4, packing="best-fit")
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(batches, stream.eval_batches(), strict=True))


def test_what_rows_read_is_compared_with_its_checksums(tmp_path, monkeypatch):
    monkeypatch.setattr("fzero.data.checksums.CHUNK", 8)
    plain, content = corpus_of([7, 3, 12, 5, 9]), np.arange(36, dtype=token_dtype(36))
    sums = np.array([crc32c(memoryview(content[i : i + 8])) for i in range(0, 36, 8)], "<u4")
    content[17] ^= 1
    tokens = plain._replace(tokens=content, vocab_size=36, sums=ChunkSums(tmp_path / "x.bin", content, sums))
    stream = data.TokenStream(tokens, 5, 1, packing="best-fit")
    for row in range(len(stream.rows)):
        positions = stream.rows.positions(np.array([row]))
        held = {i for place in positions[positions >= 0].tolist() for i in (place, place + 1)}
        if any(16 <= i < 24 for i in held):
            with pytest.raises(ValueError, match="the bytes 16 to 23 do not match"):
                packing.assemble(tokens, positions)
        else:
            packing.assemble(tokens, positions)


def test_refusals():
    tokens = corpus_of([4, 4])
    with pytest.raises(ValueError, match=r"packing='bestfit' \(did you mean best-fit\?\): it must be one of"):
        data.TokenStream(tokens, 2, 1, packing="bestfit")
    with pytest.raises(ValueError, match="no document has two tokens, so that there is nothing to predict"):
        data.TokenStream(corpus_of([1, 1, 1]), 2, 1, packing="best-fit")
    with pytest.raises(ValueError, match="seq_len=0: wanted at least 1 token"):
        data.eval_batches(tokens, 0, 1, packing="best-fit")
    with pytest.raises(ValueError, match=r"samples_at\(-1, 1\): wanted first >= 0"):
        data.TokenStream(tokens, 2, 1).samples_at(-1, 1)
