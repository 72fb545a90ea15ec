"""Bad data, whatever it is: exit code 2, one line that names it, and no file more or less than before."""

import json
import os
import re

import numpy as np
import pytest
from data_cases import write_megatron

from fzero import data

URL = "s3://a-bucket-that-is-nobodys/corpus"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Texts, two corpora of them with unlike tokenizers, a reference to them in other forms."""
    folder = tmp_path_factory.mktemp("bad")
    lines = [json.dumps({"text": f"Document {i} has {i * i} in it, and then {i * i * i}. " * 4}) for i in range(200)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    data.prepare(folder / "texts.jsonl", folder / "bytes", val_fraction=0.1)
    data.prepare(folder / "texts.jsonl", folder / "more", val_fraction=0.2)
    data.prepare(folder / "texts.jsonl", folder / "bpe", tokenizer="bpe:300", val_fraction=0.1)
    data.analyze(folder / "bytes", "length", seq_len=16)
    return folder


@pytest.fixture
def place(home, tmp_path, monkeypatch):
    """A copy of `home` that may be damaged; the current folder."""
    for path in sorted(home.rglob("*")):
        copy = tmp_path / path.relative_to(home)
        copy.mkdir() if path.is_dir() else copy.write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


def change(path, **values):
    """Change entries of a file of JSON."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def table(place, keep=1.0, column="text"):
    """A .parquet of which a part is there."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({column: [f"text {i}" for i in range(100)]}), place / "t.parquet")
    cut(place / "t.parquet", keep)


def cut(path, keep):
    """Leave a part of a file."""
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])


def megatron(place, **values):
    write_megatron(place / "m", [[[1, 2, 3]] * 4] * 20, **values)


PREPARE, RUN = ("data", "prepare", "--out", "new"), ("pretrain", "--model", "mlp-tiny", "--steps", "2", "--out", "run")
CURRICULUM = ("--set", "data.curriculum=length", "--set", "data.curriculum_steps=2", "--set", "data.seq_len=16")
MIXED = ("--set", "data.seq_len=16", "--mixture")
# name: (what is done to the files, the command, what its line says)
CASES = {
    "no source": (None, PREPARE, "no source given"),
    "no such file": (None, (*PREPARE, "nowhere.txt"), r"nowhere\.txt"),
    "another kind of file": (lambda p: (p / "a.pdf").write_bytes(b"%PDF"), (*PREPARE, "a.pdf"), r"a\.pdf"),
    "an empty file": (lambda p: (p / "a.txt").touch(), (*PREPARE, "a.txt"), r"a\.txt.*empty"),
    "binary": (lambda p: (p / "a.txt").write_bytes(b"a\0b"), (*PREPARE, "a.txt"), r"a\.txt.*NUL"),
    "not UTF-8": (lambda p: (p / "a.txt").write_bytes(b"\xff\xfe ab"), (*PREPARE, "a.txt"), r"a\.txt.*UTF-8"),
    "no JSON": (lambda p: (p / "a.jsonl").write_text('{"text": "a"}\n{"te'), (*PREPARE, "a.jsonl"), r"a\.jsonl:2"),
    "no text": (lambda p: (p / "a.jsonl").write_text('{"body": "a"}\n'), (*PREPARE, "a.jsonl"), r"a\.jsonl:1.*text"),
    "text is a number": (lambda p: (p / "a.jsonl").write_text('{"text": 3}\n'), (*PREPARE, "a.jsonl"), r"a\.jsonl:1"),
    "truncated gzip": (lambda p: (p / "a.txt.gz").write_bytes(b"\x1f\x8b\x08"), (*PREPARE, "a.txt.gz"), r"a\.txt\.gz"),
    "no zstd": (lambda p: (p / "a.txt.zst").write_bytes(b"no zstd"), (*PREPARE, "a.txt.zst"), r"a\.txt\.zst"),
    "truncated parquet": (lambda p: table(p, 0.6), (*PREPARE, "t.parquet"), r"t\.parquet"),
    "half a footer": (lambda p: table(p, 0.99), (*PREPARE, "t.parquet"), r"t\.parquet"),
    "another column": (lambda p: table(p, column="body"), (*PREPARE, "t.parquet"), r"t\.parquet.*text"),
    "one character": (lambda p: (p / "a.txt").write_text("a"), (*PREPARE, "a.txt"), "one character"),
    "an out that is there": (lambda p: (p / "new").mkdir(), (*PREPARE, "texts.jsonl"), "new: already exists"),
    "no fraction": (
        None,
        (*PREPARE, "texts.jsonl", "--val-fraction", "1.5"),
        "--val-fraction is 1.5; it must be above 0 and below 1",
    ),
    "no tokenizer": (None, (*PREPARE, "texts.jsonl", "--tokenizer", "words"), "words"),
    "too few tokens": (None, (*PREPARE, "texts.jsonl", "--tokenizer", "bpe:100"), "bpe:100"),
    "too many tokens": (None, (*PREPARE, "texts.jsonl", "--tokenizer", "bpe:60000"), "bpe:60000"),
    "a tokenizer that is none": (
        lambda p: (p / "tokenizer.json").write_text("{}"),
        (*PREPARE, "texts.jsonl", "--tokenizer", "tokenizer.json"),
        r"tokenizer\.json",
    ),
    "another end": (None, (*PREPARE, "texts.jsonl", "--tokenizer", "bpe/tokenizer.json", "--eos", "<end>"), "<end>"),
    "workers below 0": (None, (*PREPARE, "texts.jsonl", "--workers", "-1"), "workers"),
    "a URL without credentials": (None, ("data", "link", URL, "--out", "new"), "a-bucket-that-is-nobodys"),
    "an index cut short": (
        lambda p: (megatron(p), cut(p / "m.idx", 0.9)),
        ("data", "link", "m.bin", "--out", "new", "--tokenizer", "bytes"),
        r"m\.idx: truncated",
    ),
    "an index of another": (
        lambda p: megatron(p, magic=b"MMIDXXX\0\0"),
        ("data", "link", "m.bin", "--out", "new", "--tokenizer", "bytes"),
        r"m\.idx",
    ),
    "numbers that are no tokens": (
        lambda p: np.save(p / "n.npy", np.linspace(0, 1, 50)),
        ("data", "link", "n.npy", "--out", "new", "--tokenizer", "bytes"),
        r"n\.npy",
    ),
    "no corpus": (None, ("data", "verify", "texts.jsonl"), r"texts\.jsonl"),
    "a corpus without its meta.json": (lambda p: (p / "bytes/meta.json").unlink(), (*RUN, "--data", "bytes"), "bytes"),
    "a later version": (lambda p: change(p / "bytes/meta.json", version=99), (*RUN, "--data", "bytes"), "99"),
    "half-written tokens": (lambda p: cut(p / "bytes/train.bin", 0.5), (*RUN, "--data", "bytes"), r"train\.bin"),
    "half-written places": (lambda p: cut(p / "bytes/train.docs", 0.5), (*RUN, "--data", "bytes"), r"train\.docs"),
    "another tokenizer's tokens": (
        lambda p: (p / "bpe/tokenizer.json").write_text((p / "bpe/tokenizer.json").read_text().replace('"Ġ', '"x')),
        (*RUN, "--data", "bpe"),
        "tokenizer",
    ),
    "too large a vocabulary": (None, (*RUN, "--data", "bpe", "--set", "model.vocab_size=290"), "vocab_size"),
    "too long sequences": (None, (*RUN, "--data", "bytes", "--set", "data.seq_len=64000"), "64000"),
    "weights that sum to 0": (None, (*RUN, *MIXED, "a=bytes:0,b=more:0"), "weights"),
    "a weight below 0": (None, (*RUN, *MIXED, "a=bytes:-1,b=more:1"), "-1"),
    "two names alike": (None, (*RUN, *MIXED, "a=bytes:1,a=more:1"), "both named 'a'"),
    "no such corpus in a mixture": (None, (*RUN, *MIXED, "a=bytes:1,b=nowhere:1"), "nowhere"),
    "corpora of unlike tokenizers": (None, (*RUN, *MIXED, "a=bytes:1,b=bpe:1"), "tokenizer"),
    "too few epochs": (None, (*RUN, *MIXED, "a=bytes:1:epochs=0.001"), "rows"),
    "an analysis that is not there": (None, (*RUN, "--data", "bpe", *CURRICULUM), "no such analysis"),
    "an analysis of another corpus": (
        lambda p: change(p / "bytes/analysis-length-16-stream/meta.json", corpus="0" * 64),
        (*RUN, "--data", "bytes", *CURRICULUM),
        "another corpus",
    ),
    "a damaged analysis": (
        lambda p: cut(p / "bytes/analysis-length-16-stream/values.npy", 0.5),
        (*RUN, "--data", "bytes", *CURRICULUM),
        "missing or damaged",
    ),
    "an analysis twice": (None, ("data", "analyze", "bytes", "--metric", "length", "--seq-len", "16"), "there already"),
    "an unknown end of a middle": (
        None,
        (*RUN, "--data", "bytes", "--set", "data.fim=0.5", "--set", 'data.fim_tokens="1,2,900"'),
        "below 256",
    ),
    "no tokens for spans": (
        None,
        (*RUN, "--data", "bpe", "--set", "data.span_corruption=0.5", "--set", "model.vocab_size=300"),
        "give data.sentinel_tokens",
    ),
    "weights of no file": (None, (*RUN, "--data", "bytes", "--set", "data.token_weights=w.npy"), r"w\.npy cannot be"),
    "weights of a file that is none": (
        lambda p: (p / "w.npy").write_bytes(b"\x93NUMPY"),
        (*RUN, "--data", "bytes", "--set", "data.token_weights=w.npy"),
        r"w\.npy: cannot be read as a \.npy file",
    ),
    "weights of other tokens": (
        lambda p: np.save(p / "w.npy", np.ones(300)),
        (*RUN, "--data", "bytes", "--set", "data.token_weights=w.npy"),
        r"w\.npy: is float64 \[300\]",
    ),
    "a batch that shrinks": (None, (*RUN, "--data", "bytes", "--batch-ramp", "99:1:100"), "99"),
}


def listing(place):
    """Every file with its content, and every folder."""
    return {str(path.relative_to(place)): path.is_file() and path.read_bytes() for path in place.rglob("*")}


def test_there_are_forty():
    assert len(CASES) >= 40


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (i % 8 > 0)) for i, name in enumerate(CASES)]
)
def test_bad_data_is_one_line_and_leaves_nothing(name, place, fz):
    damage, command, words = CASES[name]
    if damage is not None:
        damage(place)
    before = listing(place)
    code, _, err = fz(*command)
    errors = [line for line in err.splitlines() if line.startswith("fzero: error: ")]
    assert code == 2 and len(errors) == 1 and "Traceback" not in err, err
    assert re.search(words, errors[0]), errors[0]
    assert listing(place) == before
