"""Documents that a preparation leaves out: by filters, and as copies."""

import os
import random
import re

import numpy as np
import pytest
from test_prepare import all_documents, write_jsonl
from test_prepare_pieces import content, interrupted

from fzero import data
from fzero.data import document_scan, sources

WORDS = [f"word{i}" for i in range(500)]


def a_text(seed, count=200):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def changed(text, seed, count):
    words = text.split()
    for at in random.Random(seed).sample(range(len(words)), count):
        words[at] = f"other{at}"
    return " ".join(words)


ONES = [a_text(i) for i in range(12)]
# Ten copies, and eight that differ in a word or more, which are other documents.
MANY = [*ONES, *ONES[:5], *(changed(ONES[i], i, 1 + i % 2) for i in range(7)), changed(ONES[9], 9, 20), *ONES[3:8]]


def prepare(path, out, count=1, **more):
    how = {name: more.pop(name) for name in ("filters", "duplicates") if name in more}
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
    assert document_scan.later_copies(draws).tolist() == expected and any(expected)


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
    for change, said in (({"duplicates": "all"}, "duplicates='all': it must be one of keep, exact"),):
        with pytest.raises(ValueError, match=said):
            prepare(path, tmp_path / "out", **change)
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]
    assert document_scan.apply_filters("text", [], lambda: "") == ("text", "")


def test_an_unfinished_preparation_with_other_filters_is_one_line(tmp_path, many):
    interrupted(many, tmp_path / "out", 1, tokenizer="bytes")
    with pytest.raises(ValueError, match=re.escape("with filters None, and this one has filters ['filter upper']")):
        prepare(many, tmp_path / "out", filters=[upper], tokenizer="bytes")


def test_the_command_leaves_out_copies(tmp_path, many, fz):
    code, out, _ = fz("data", "prepare", many, "--out", tmp_path / "out", "--duplicates", "exact")
    assert code == 0 and "left out: 10 duplicate" in out
    code, _, err = fz("data", "prepare", many, "--out", tmp_path / "no", "--duplicates", "all")
    assert code == 2 and err == "fzero: error: duplicates='all': it must be one of keep, exact\n"
