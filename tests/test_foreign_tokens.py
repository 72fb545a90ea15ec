"""Token files of other systems, read in place (fzero/data/linked_corpus.py)."""

import itertools

import numpy as np
import pytest
import torch
from data_cases import write_megatron

from fzero import data

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
