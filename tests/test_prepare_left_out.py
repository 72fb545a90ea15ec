"""Documents that a preparation leaves out: by filters, as copies, and as near copies."""

import json
import os
import random
import re
import sys

import numpy as np
import pytest
from test_prepare import all_documents, documents, write_jsonl
from test_prepare_pieces import content, flip, interrupted

from fzero import data
from fzero.data import near_duplicates, sources
from fzero.data.first_reading import later_copies
from fzero.data.preparing import filtered

WORDS = [f"word{i}" for i in range(500)]


def a_text(seed, count=200):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def changed(text, seed, count):
    words = text.split()
    for at in random.Random(seed).sample(range(len(words)), count):
        words[at] = f"other{at}"
    return " ".join(words)


ONES = [a_text(i) for i in range(12)]
# Ten copies, seven that differ in a word or two, and one that has a word in ten changed, which is another document.
MANY = [*ONES, *ONES[:5], *(changed(ONES[i], i, 1 + i % 2) for i in range(7)), changed(ONES[9], 9, 20), *ONES[3:8]]


def prepare(path, out, count=1, **more):
    how = {name: more.pop(name) for name in ("filters", "duplicates", "similarity") if name in more}
    return data.prepare(path, out, val_fraction=0.2, preparing=data.Preparing(workers=count, **how), **more)


@pytest.fixture
def many(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SMALLEST", 4000)
    return write_jsonl(tmp_path / "many.jsonl", MANY)


@pytest.mark.parametrize("count", [1, 3])
def test_exact_copies_leave_the_first(tmp_path, many, count):
    meta = prepare(many, tmp_path / "out", count, duplicates="exact")
    kept = list(dict.fromkeys(MANY))
    plain = data.prepare(write_jsonl(tmp_path / "kept.jsonl", kept), tmp_path / "kept", val_fraction=0.2)
    assert content(tmp_path / "out")[0] == content(tmp_path / "kept")[0]
    assert meta["source"]["skipped"] == {"duplicate": 10} and meta["source"]["duplicates"] == "exact"
    assert meta["source"]["sha256"] == plain["source"]["sha256"] and meta["source"]["documents"] == 20
    assert "left out: 10 duplicate" in data.describe(meta)


def test_later_copies_are_those_of_a_set():
    draws = np.random.default_rng(0).integers(0, 12, (400, 2)).astype(np.uint64)
    seen = set()
    expected = [row in seen or seen.add(row) is not None for row in map(tuple, draws.tolist())]
    assert later_copies(draws).tolist() == expected and any(expected)


@pytest.mark.parametrize("count", [1, 3])
def test_near_copies_leave_the_first(tmp_path, many, count):
    meta = prepare(many, tmp_path / "out", count, duplicates="near")
    kept = [*ONES, changed(ONES[9], 9, 20)]
    assert sorted(all_documents(tmp_path / "out")) == sorted(kept)
    val = [text for text in kept if text in documents(tmp_path / "out", "val")]
    assert documents(tmp_path / "out", "val") == val  # in reading order
    assert meta["source"]["skipped"] == {"duplicate": 10, "near duplicate": 7}
    assert meta["source"]["similarity"] == 0.8 and "7 near duplicate" in data.describe(meta)
    # More similar ones alone: two texts of 196 runs share 191 / 201 with one word changed, 186 / 206 with two.
    meta = prepare(many, tmp_path / "more", count, duplicates="near", similarity=0.95)
    assert meta["source"]["skipped"].get("near duplicate", 0) < 7


def test_groups_are_those_of_all_pairs_that_share_a_band():
    bands = np.random.default_rng(1).integers(0, 60, (3, 30)).astype(np.uint64)
    near = [[bool((bands[:, i] == bands[:, j]).any()) for j in range(30)] for i in range(30)]
    group = list(range(30))
    for _ in range(30):  # to the end: a document has the lowest number of those that it shares a band with
        group = [min(group[j] for j in range(30) if near[i][j]) for i in range(30)]
    expected = [group[i] == i for i in range(30)]
    assert near_duplicates.firsts(iter(bands), 30).tolist() == expected and 1 < sum(expected) < 25


def all_runs(blocks):
    return np.unique(np.concatenate(list(near_duplicates.runs_of(blocks))))


@pytest.mark.parametrize(
    "text", [" one  two\tthree\u2003four five six one two three four five. ", "one two three four ", "a" * 9]
)
def test_runs_do_not_depend_on_blocks(text):
    words = [near_duplicates.crc32c(word.encode()) for word in text.split()]
    assert len(all_runs([text])) == max(1, len(words) - 4)
    for size in range(1, len(text)):
        assert np.array_equal(all_runs([text[at : at + size] for at in range(0, len(text), size)]), all_runs([text]))


def test_the_share_of_equal_numbers_is_the_share_of_runs():
    (_, one), (_, other) = ((text, all_runs([text])) for text in (ONES[0], changed(ONES[0], 5, 6)))
    made = []
    for runs in (one, other):
        made.append(near_duplicates.library().MinHash(num_perm=4096, seed=1, scheme="affine32", hashfunc=int))
        made[-1].update_batch(runs.tolist())
    share = len(np.intersect1d(one, other)) / len(np.union1d(one, other))
    assert abs((made[0].hashvalues == made[1].hashvalues).mean() - share) < 0.03 and 0.6 < share < 0.9


def test_near_copies_are_resumed_and_need_datasketch(tmp_path, many, monkeypatch):
    expected = (prepare(many, tmp_path / "whole", duplicates="near"), content(tmp_path / "whole"))[1]
    signed, real = [], near_duplicates.sign
    monkeypatch.setattr(near_duplicates, "sign", lambda *args: (signed.append(args[1]), real(*args))[1])
    seen = []

    def show(stage, done, of):
        seen.append(stage)
        if seen.count("comparing") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        how = data.Preparing(workers=1, show=show, duplicates="near")
        data.prepare(many, tmp_path / "out", val_fraction=0.2, preparing=how)
    assert signed == [0, 1]
    flip(tmp_path / "out.partial" / "signatures" / "1.signatures")
    with pytest.raises(ValueError, match="with duplicates 'near', and this one has duplicates 'exact'"):
        prepare(many, tmp_path / "out", duplicates="exact")
    prepare(many, tmp_path / "out", duplicates="near")
    assert signed[2] == 1 and 0 not in signed[2:] and content(tmp_path / "out") == expected
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ValueError, match='="near": this needs the package datasketch; pip install datasketch'):
        prepare(many, tmp_path / "again", duplicates="near")
    assert not (tmp_path / "again.partial").exists()


CALLS = []


def long_enough(text):
    CALLS.append(text)
    return len(text) > 3


def upper(text):
    return None if "none" in text else text.upper() if "up" in text else text


FILTERED = ["a", "keep", "none here", "up it", "ab", "UP IT", "more text"]


def test_filters_keep_leave_out_and_change(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SMALLEST", 40)
    path = write_jsonl(tmp_path / "a.jsonl", FILTERED)
    CALLS.clear()
    meta = prepare(path, tmp_path / "out", filters=[long_enough, upper], duplicates="exact")
    assert sorted(all_documents(tmp_path / "out")) == ["UP IT", "keep", "more text"]
    assert meta["source"]["skipped"] == {"filter long_enough": 2, "filter upper": 1, "duplicate": 1}
    assert meta["source"]["filters"] == ["filter long_enough", "filter upper"]
    assert "left out: 2 filter long_enough" in data.describe(meta)
    assert sorted(CALLS) == sorted([*FILTERED, "up it"])  # again only where the text was changed
    prepare(path, tmp_path / "three", 3, filters=[long_enough, upper], duplicates="exact")
    assert content(tmp_path / "three") == content(tmp_path / "out")


def test_filters_that_are_mistakes_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SMALLEST", 40)
    path = write_jsonl(tmp_path / "a.jsonl", FILTERED)

    def fails(text):
        return {}[text] if text == "ab" else True

    def other(text):
        return 1

    def nul(text):
        return text + "\0"

    def changing(text):
        return text + os.urandom(4).hex()

    for filters, said in (
        ([fails], r"a\.jsonl:5: filter fails raised KeyError: 'ab'"),
        ([other], r"a\.jsonl:1: filter other returned 1; wanted a bool, a text or None"),
        ([nul], r"a\.jsonl:1: 'filter nul' contains a NUL"),
        ([long_enough, long_enough], "filters: two are called 'filter long_enough'; give each its own name"),
        ([lambda text: False], r"no text to prepare \(7 filter <lambda>\)"),
        ([changing], "the sources changed while they were read"),
    ):
        for count in (1, 2):
            with pytest.raises(ValueError, match=said):
                prepare(path, tmp_path / "out", count, filters=filters)
    for change, said in (
        ({"duplicates": "all"}, "duplicates='all': it must be one of keep, exact, near"),
        ({"similarity": 0.99}, "similarity=0.99: wanted a number from 0.1 to 0.95"),
    ):
        with pytest.raises(ValueError, match=said):
            prepare(path, tmp_path / "out", **change)
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]
    assert filtered("text", [], lambda: "") == ("text", "")


def test_an_unfinished_preparation_with_other_filters_is_one_line(tmp_path, many):
    interrupted(many, tmp_path / "out", 1, tokenizer="bytes")
    with pytest.raises(ValueError, match=re.escape("with filters None, and this one has filters ['filter upper']")):
        prepare(many, tmp_path / "out", filters=[upper], tokenizer="bytes")


def test_the_command_leaves_out_near_copies(tmp_path, many, fz):
    code, out, _ = fz("data", "prepare", many, "--out", tmp_path / "out", "--duplicates", "near", "--similarity", "0.7")
    assert code == 0 and "left out: 10 duplicate, 7 near duplicate" in out
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["source"]["similarity"] == 0.7
    code, _, err = fz("data", "prepare", many, "--out", tmp_path / "no", "--duplicates", "all")
    assert code == 2 and err == "fzero: error: duplicates='all': it must be one of keep, exact, near\n"
