"""Long texts in stretches: the ids of the whole text, for tokenizers of every kind, in a bounded memory."""

import gzip
import io
import json
import random
import subprocess
import sys

import numpy as np
import pytest
from test_prepare_pieces import COMMAND, content

from fzero import data
from fzero.data import arrow_tables, encoding, sources, tokenizers

CODE = ["def", "return", "x", "=", "self._value", "12345", "<tag>", "foo_bar", "----", "\n\n\t", "\r\n", ""]
WORDS = [*CODE, "'tis", "don't", "né", "漢字かな。", "🙂👍🏽", "e\u0301", "..."]


def some_text(seed, words=4000):
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice([" ", " ", "", "  ", "\n", "\n    "]) for _ in range(words))


def libraries():
    """Tokenizers that split in different ways, and what is special at the beginning of a text, by name."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
    from tokenizers import pre_tokenizers as pre

    texts = [some_text(seed, 600) for seed in range(3)]
    gpt4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    gpt4 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    kinds = {
        "gpt2": ("bpe", None, pre.ByteLevel(add_prefix_space=False)),
        "roberta": ("bpe", None, pre.ByteLevel(add_prefix_space=True)),
        "gpt4": ("bpe", None, pre.Sequence([pre.Split(Regex(gpt4), "isolated"), byte_level])),
        "digits": ("bpe", normalizers.NFC(), pre.Sequence([pre.Digits(True), pre.ByteLevel(add_prefix_space=False)])),
        "bert": ("wordpiece", normalizers.BertNormalizer(), pre.BertPreTokenizer()),
        "t5": ("unigram", normalizers.NFKC(), pre.Metaspace(prepend_scheme="always")),
        "first": ("unigram", None, pre.Metaspace(prepend_scheme="first")),
        "llama2": ("bpe", normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
        "words": ("wordlevel", None, pre.Whitespace()),
    }
    for name, (kind, normalizer, pre_tokenizer) in kinds.items():
        model, trainer = {
            "bpe": (models.BPE(unk_token="<unk>"), trainers.BpeTrainer),
            "wordpiece": (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer),
            "unigram": (models.Unigram(), trainers.UnigramTrainer),
            "wordlevel": (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer),
        }[kind]
        library = Tokenizer(model)
        if normalizer is not None:
            library.normalizer = normalizer
        if pre_tokenizer is not None:
            library.pre_tokenizer = pre_tokenizer
        library.decoder = decoders.ByteLevel()
        more = {"unk_token": "<unk>"} if kind == "unigram" else {}
        library.train_from_iterator(
            texts,
            trainer(vocab_size=500, special_tokens=["</s>", "<unk>"], show_progress=False, **more),
        )
        library.add_tokens([AddedToken("<tag>", lstrip=True, rstrip=True), AddedToken("    ")])
        yield name, tokenizers.json_tokenizer(library.to_str(), name, "</s>")


@pytest.fixture
def short(monkeypatch):
    """Stretches of some words."""
    monkeypatch.setattr(encoding, "SPAN", 300)
    monkeypatch.setattr(sys.modules["fzero.data.prepare"], "LEARNED", 300)
    monkeypatch.setattr(encoding, "LONGEST", 3000)
    monkeypatch.setattr(encoding, "AROUND", 100)
    monkeypatch.setattr(encoding, "CUT_TAIL", 200)


def ids_by_stretches(tokenizer, text, blocks):
    pieces = lambda text: tokenizer.encode(text).tolist()  # noqa: E731
    parts = [encoding.PartSpan("train", one, None) for one in encoding.text_spans(blocks, pieces, lambda: "a.txt")]
    assert "".join(part.span.text for part in parts) == text
    assert [part.span.last for part in parts] == [False] * (len(parts) - 1) + [True]
    return np.concatenate(encoding.ids_of(parts, tokenizer)).tolist(), len(parts)


@pytest.mark.parametrize("seeds", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_ids_are_those_of_the_whole_text(short, seeds):
    for name, tokenizer in libraries():
        for seed in range(seeds):
            text = some_text(seed, 2000)
            blocks = [text[at : at + 777] for at in range(0, len(text), 777)]
            found, count = ids_by_stretches(tokenizer, text, blocks)
            assert found == tokenizer.encode(text).tolist(), name
            assert count > len(text) / 3100, name


def test_a_text_without_a_place_to_cut_is_one_line(short):
    trained = tokenizers.train_bpe(["aaaa bb " * 50], 259)
    with pytest.raises(ValueError, match=r"a\.txt: 3,000 characters, from 'aaaa.*' on, without a place .* spaces or"):
        ids_by_stretches(trained, "a" * 9000, ["a" * 9000])
    cuts = [one.text for one in encoding.text_spans(["a" * 1001], None, lambda: "a.txt")]
    assert "".join(cuts) == "a" * 1001 and len(cuts) == 4  # bytes are cut anywhere


def write_all(folder, text):
    """The same long text in a file of each kind."""
    import pyarrow
    import pyarrow.parquet
    import zstandard

    folder.mkdir()
    raw, table = text.encode(), pyarrow.table({"text": [text[:300], None, text, ""]})
    line = json.dumps({"text": text}).encode() + b"\n"
    for name, stored in {
        "a.txt": b"\xef\xbb\xbf" + raw,
        "b.py": raw,
        "c.txt.gz": gzip.compress(raw),
        "d.txt.zst": zstandard.compress(raw),
        "e.jsonl": line,
        "f.jsonl.gz": gzip.compress(line),
    }.items():
        (folder / name).write_bytes(stored)
    pyarrow.parquet.write_table(table, folder / "g.parquet")
    with pyarrow.ipc.new_file(folder / "h.arrow", table.schema) as file:
        file.write_table(table)
    (folder / "i.txt").write_bytes(raw[:5000] + b"\0")  # binary, as its last byte says
    (folder / "j.txt").write_bytes(raw + b"\xc3")  # ends within a character
    return folder


def prepare(source, out, **more):
    how = {"tokenizer": "bpe:300", "val_fraction": 0.2, "preparing": data.Preparing(workers=1)}
    return data.prepare(source, out, **how | more)


def test_a_corpus_does_not_depend_on_stretches_and_blocks(tmp_path, monkeypatch, request):
    for package in ("pyarrow", "zstandard"):
        pytest.importorskip(package)
    text = some_text(0, 500)
    folder = write_all(tmp_path / "in", text)
    single = tmp_path / "in" / "a.txt"
    meta = prepare(folder, tmp_path / "whole")
    assert meta["source"]["skipped"] == {"empty": 4, "binary": 1, "not UTF-8": 1} and meta["source"]["documents"] == 10
    prepare(single, tmp_path / "whole-single")
    request.getfixturevalue("short")
    for module, size in ((sources, 501), (arrow_tables, 97)):
        monkeypatch.setattr(module, "BLOCK", size)
    prepare(folder, tmp_path / "short")
    prepare(single, tmp_path / "short-single")
    for more in ("", "-single"):
        assert content(tmp_path / f"short{more}") == content(tmp_path / f"whole{more}")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(text.encode()))))
    prepare("-", tmp_path / "stdin")
    assert content(tmp_path / "stdin")[0] == content(tmp_path / "whole-single")[0]
    with pytest.raises(ValueError, match=r"i\.txt: contains NUL bytes"):
        prepare(folder / "i.txt", tmp_path / "no")
    with pytest.raises(ValueError, match=r"j\.txt: is not UTF-8 text"):
        prepare(folder / "j.txt", tmp_path / "no")
    monkeypatch.setattr(arrow_tables, "LARGEST", len(text))
    with pytest.raises(ValueError, match=r"g\.parquet, row 2: a text of .* bytes; at most"):
        prepare(folder / "g.parquet", tmp_path / "no")


def test_a_text_that_changes_while_it_is_read_is_an_error(tmp_path, short, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 501)
    path, real = tmp_path / "a.txt", encoding.encode_piece
    for changed in (b"\xff", b"x"):
        path.write_bytes(b"some words " * 900)

        def damage(*args, changed=changed):
            path.write_bytes(b"some words " * 899 + changed * 11)
            real(*args)

        monkeypatch.setattr(encoding, "encode_piece", damage)
        monkeypatch.setattr(sources, "problem_of", lambda *args: "")
        with pytest.raises(ValueError, match=r"a\.txt: the sources changed while they were read"):
            prepare(path, tmp_path / "out", tokenizer="bytes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizer", "megabytes"), [("bytes", 150), pytest.param("bpe:1000", 6, marks=pytest.mark.exhaustive)]
)
def test_the_memory_of_one_text_is_bounded(tmp_path, tokenizer, megabytes):
    """500 MB for any source, of which torch has 225: these took 1.1 GB by bytes and 1.2 GB by a BPE."""
    draw = random.Random(0)
    words = ["".join(draw.choice("etaoinshrdlu") for _ in range(draw.randint(2, 9))) for _ in range(5000)]
    text = " ".join(draw.choices(words, k=160_000))[: 10**6]
    with (tmp_path / "a.txt").open("w") as file:
        for _ in range(megabytes):
            file.write(text)
    args = ["data", "prepare", "a.txt", "--out", "out", "--workers", "2", "--tokenizer", tokenizer]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *args], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert int(done.stdout.split()[-1]) < 500_000  # KB
