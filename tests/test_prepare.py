"""Tokenizers and preparation (fzero/data/tokenizers.py, sources.py, prepare.py)."""

import gzip
import importlib
import io
import itertools
import json
import os
import re
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fzero import data
from fzero.core import text_parsing
from fzero.data import byte_tokenizer, document_scan, json_tokenizer, sources
from fzero.data.sources import cut, find_files
from fzero.data.tokenizers import USUAL_EOS, train_bpe

preparation = importlib.import_module("fzero.data.prepare")  # not the function of this name

TEXTS = [f"def f_{i}(x):\n    return x * {i}  # né 漢字 🙂\n" * (1 + i % 5) for i in range(40)]


def documents(folder, split):
    """The texts of a split, cut at the document offsets; checks that each ends with eos and holds no other."""
    tokens, tokenizer = data.open_tokens(folder, split), data.load_tokenizer(folder)
    out = []
    for start, end in itertools.pairwise(tokens.docs.tolist()):
        ids = tokens.tokens[start:end].tolist()
        assert ids[-1] == tokenizer.eos and tokenizer.eos not in ids[:-1]
        out.append(tokenizer.decode(ids[:-1]))
    return out


def all_documents(folder):
    return documents(folder, "train") + documents(folder, "val")


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


# tokenizers


def test_bytes_are_the_utf8_bytes():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("né\n").tolist() == [110, 195, 169, 10]
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eos) == ("bytes", 256, 0)
    assert tokenizer.decode(torch.tensor([110, 0, 195, 169])) == "né"
    assert tokenizer.decode([110, 255]) == "n\ufffd"
    with pytest.raises(ValueError, match="NUL"):
        tokenizer.encode("a\0b")


def test_bpe_is_exact_in_size_round_trips_and_is_deterministic():
    tokenizer = train_bpe(TEXTS, 300)
    assert (tokenizer.vocab_size, tokenizer.name, tokenizer.encode("x").dtype) == (300, "bpe:300", np.dtype("<u2"))
    for text in [*TEXTS, "", "\r\n\t unseen: ß𝔘 \ufeff", " leading", "<|endoftext|>"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.eos not in ids
    assert len(tokenizer.encode(TEXTS[0])) < 0.6 * len(TEXTS[0].encode())
    assert train_bpe(TEXTS, 300).json == tokenizer.json
    assert tokenizer.decode([tokenizer.eos, *tokenizer.encode("hi"), tokenizer.eos]) == "hi"


def test_bpe_refuses_sizes_it_cannot_reach():
    with pytest.raises(ValueError, match=r"bpe:256: .*at least 257"):
        train_bpe(TEXTS, 256)
    with pytest.raises(ValueError, match=r"bpe:5000: this corpus yields only (\d+) tokens; use bpe:\1"):
        train_bpe(["abcabc"], 5000)


def library_json(*, special="</s>", extra_id=None, more=(), post=False):
    """A word-level tokenizer.json made with the library itself, with padding and truncation switched on in the file."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {"a": 0, "b": 1, special: 2, "[UNK]": 3, **{token: 4 + i for i, token in enumerate(more)}}
    if extra_id is not None:
        vocab["far"] = extra_id
    library = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if post:
        library.post_processor = processors.TemplateProcessing(single="b $A", special_tokens=[("b", 1)])
        library.enable_padding(length=8)
        library.enable_truncation(max_length=2)
    return library.to_str()


@pytest.mark.parametrize("eos", USUAL_EOS)
def test_usual_end_tokens_are_found(eos):
    assert json_tokenizer(library_json(special=eos), "t").eos == 2


def test_json_tokenizer_adds_nothing_and_counts_holes_in_the_vocabulary():
    tokenizer = json_tokenizer(library_json(extra_id=70000, post=True), "t")
    assert tokenizer.encode("a b a far").tolist() == [0, 1, 0, 70000]
    assert tokenizer.vocab_size == 70001 and tokenizer.encode("a").dtype == np.dtype("<u4")
    assert json_tokenizer(library_json(), "t", "b").eos == 1


def test_json_tokenizer_errors():
    with pytest.raises(ValueError, match=r"it has none; name the one to use by eos= .--eos"):
        json_tokenizer(library_json(special="END"), "t.json")
    with pytest.raises(ValueError, match=r"t\.json: .*<\|endoftext\|>, </s>; name the one"):
        json_tokenizer(library_json(more=["<|endoftext|>"]), "t.json")
    with pytest.raises(ValueError, match=r"t\.json: .*'nope' is not in its vocabulary"):
        json_tokenizer(library_json(), "t.json", "nope")
    with pytest.raises(ValueError, match=r"t\.json: not a Hugging Face tokenizer\.json"):
        json_tokenizer("{}", "t.json")
    with pytest.raises(ValueError, match=r"text contains '</s>', the end-of-document token of t\.json"):
        json_tokenizer(library_json(), "t.json").encode("a </s> b")


# preparation: round trips


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300", "file", "folder"])
def test_round_trip_of_each_tokenizer(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    spec = tokenizer
    if tokenizer in ("file", "folder"):
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "tokenizer.json").write_text(train_bpe(TEXTS, 280).json, encoding="utf-8")
        spec = tmp_path / "hf" / "tokenizer.json" if tokenizer == "file" else tmp_path / "hf"
    meta = data.prepare(source, tmp_path / "out", tokenizer=spec, val_fraction=0.2)
    assert sorted(all_documents(tmp_path / "out")) == sorted(TEXTS)
    assert meta == data.read_meta(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists() == (tokenizer != "bytes")
    assert data.load_tokenizer(tmp_path / "out").name == str(spec)
    assert data.open_tokens(tmp_path / "out").tokens.dtype.itemsize == (1 if tokenizer == "bytes" else 2)
    assert sum(meta["splits"][s]["documents"] for s in ("train", "val")) == len(TEXTS) == meta["source"]["documents"]
    assert meta["source"]["text_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert f"{len(TEXTS)} documents" in data.describe(meta)


def test_a_bpe_of_much_text_is_learned_from_a_part_spread_evenly(tmp_path, monkeypatch):
    texts = [f"{i} " + ("ab" if i < 50 else "xy") * 40 for i in range(100)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    whole = data.prepare(path, tmp_path / "whole", tokenizer="bpe:262")
    monkeypatch.setattr(preparation, "MOST_LEARNED", whole["source"]["text_bytes"] // 4)
    part = data.prepare(path, tmp_path / "part", tokenizer="bpe:262")
    training = [text for text in texts if text in documents(tmp_path / "whole", "train")]
    content = (tmp_path / "part/tokenizer.json").read_text()
    assert content == train_bpe(list(preparation.sample_evenly(0.25, training)), 262).json
    assert {"abab", "xyxy"} <= json.loads(content)["model"]["vocab"].keys()  # of both halves
    assert "learned from 25% of the text" in preparation.describe(part)
    monkeypatch.undo()
    assert "learned from" not in preparation.describe(whole)


def test_a_bpe_of_many_different_words_is_learned_from_what_can_be_counted(tmp_path, monkeypatch):
    """Whatever the words are: the library takes memory for each byte of each different one."""
    source = write_jsonl(
        tmp_path / "a.jsonl", [f"{'é' * (i % 3)}w{i} {i}_{i} the same words again" for i in range(400)]
    )
    whole = data.prepare(source, tmp_path / "whole", tokenizer="bpe:270", val_fraction=0.01)
    assert "learned" not in whole["source"]
    training = documents(tmp_path / "whole", "train")
    words = {word for text in training for word in preparation.WORDS.findall(text)}
    cost = sum(100 * len(word.encode()) + 150 for word in words)
    monkeypatch.setattr(preparation, "COUNT_BYTES", cost)
    assert preparation.learn_bpe(lambda: training, 270, None) == (train_bpe(training, 270).json, 1.0)
    monkeypatch.setattr(preparation, "COUNT_BYTES", 0.3 * cost)
    part = data.prepare(source, tmp_path / "part", tokenizer="bpe:270", val_fraction=0.01)
    assert part["source"]["learned"] == 0.25 and "learned from 25% of the text" in preparation.describe(part)
    content = (tmp_path / "part/tokenizer.json").read_text(encoding="utf-8")
    assert content == train_bpe(list(preparation.sample_evenly(0.25, training)), 270).json


def test_bpe_is_trained_on_the_training_split_only(tmp_path):
    texts = [f"{chr(97 + i % 26) * 2}{chr(97 + i // 2)}q " * (30 + i) for i in range(26)]
    data.prepare(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out", tokenizer="bpe:280", val_fraction=0.5)
    training = [text for text in texts if text in documents(tmp_path / "out", "train")]
    assert len(training) < len(texts)
    content = (tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8")
    assert content == train_bpe(training, 280).json != train_bpe(texts, 280).json


@pytest.mark.parametrize("packed", [False, True])
def test_files_of_each_kind(tmp_path, packed):
    def put(name, content):
        path = tmp_path / (name + ".gz" * packed)
        path.write_bytes(gzip.compress(content) if packed else content)
        return path

    lines = "".join(json.dumps({"body": text}) + "\r\n\n" for text in TEXTS[:3]).encode()
    sources = [put("a.txt", b"one\r\ntwo \n"), put("b.py", b"x = 1"), put("c.jsonl", lines)]
    data.prepare(sources, tmp_path / "out", text_key="body", val_fraction=0.3)
    assert sorted(all_documents(tmp_path / "out")) == sorted(["one\r\ntwo \n", "x = 1", *TEXTS[:3]])


def test_folder_is_recursive_sorted_and_leaves_out_what_is_no_text(tmp_path):
    root = tmp_path / "in"
    good = {
        "b/z.txt": b"bz",
        "a.py": b"a",
        "b.txt": b"b",
        "b/a.txt.gz": gzip.compress(b"ba"),
        "c.jsonl": b'{"text": "c"}',
    }
    other = {"x.bin": b"x", "y.md": b"y", ".hidden.py": b"h", ".git/k.py": b"k"}
    bad = {
        "nul.txt": b"a\0b",
        "latin.py": "é".encode("latin-1"),
        "e.txt": b"",
        "e.jsonl": b"\n",
        "n.txt.gz": gzip.compress(b"\0"),
    }
    for name, content in (good | other | bad).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    assert [file.name for file in find_files([root], tmp_path)] == [
        str(root / name) for name in sorted(good | bad, key=lambda name: name.split("/"))
    ]
    meta = data.prepare(root, tmp_path / "out", val_fraction=0.3)
    assert sorted(all_documents(tmp_path / "out")) == ["a", "b", "ba", "bz", "c"]
    assert meta["source"]["skipped"] == {"empty": 2, "binary": 2, "not UTF-8": 1}
    assert "left out: 2 empty" in data.describe(meta)


# preparation: other forms of files


def table_of(texts):
    import pyarrow

    return pyarrow.table({"id": list(range(len(texts))), "text": texts, "number": [0.5] * len(texts)})


def write_form(path, texts):
    """Write the texts as the name of a file says."""
    import pyarrow
    import pyarrow.parquet

    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.name.endswith(".jsonl.zst"):  # frames end anywhere, in the middle of a line too
        zstandard, cuts = pytest.importorskip("zstandard"), [0, 7, 7, len(lines) // 2, len(lines)]
        path.write_bytes(b"".join(zstandard.compress(lines[a:b]) for a, b in itertools.pairwise(cuts)))
    elif path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(lines))
    elif path.name.endswith(".parquet"):
        pyarrow.parquet.write_table(table_of(texts), path, row_group_size=3)
    else:
        new = pyarrow.ipc.new_file if path.name == "whole.arrow" else pyarrow.ipc.new_stream
        with new(path, table_of(texts).schema) as writer:
            writer.write_table(table_of(texts), max_chunksize=4)


FORMS = ("a.jsonl.zst", "a.jsonl.gz", "a.parquet", "a.arrow", "whole.arrow")


@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_the_documents_of_the_lines(tmp_path, name):
    plain = data.prepare(write_jsonl(tmp_path / "plain.jsonl", TEXTS), tmp_path / "plain")["source"]
    write_form(tmp_path / name, TEXTS)
    assert data.prepare(tmp_path / name, tmp_path / "out")["source"]["sha256"] == plain["sha256"]
    (tmp_path / "folder").mkdir()
    (tmp_path / name).rename(tmp_path / "folder" / name)
    assert data.prepare(tmp_path / "folder", tmp_path / "again")["source"]["sha256"] == plain["sha256"]


@pytest.mark.parametrize("name", FORMS)
def test_a_file_that_is_cut_off_anywhere_is_one_line(tmp_path, name):
    write_form(tmp_path / name, TEXTS * 20)
    whole = (tmp_path / name).read_bytes()
    for size in (len(whole) // 3, len(whole) * 9 // 10, len(whole) - 8, len(whole) - 1):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"{re.escape(name)}.* not a sound") as caught:
            data.prepare(tmp_path / name, tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_column_that_is_none_is_one_line(tmp_path, name):
    write_form(tmp_path / name, TEXTS)
    for key, words in (
        ("body", "wanted a column 'body', found id, text, number"),
        ("number", "is of double, wanted t"),
    ):
        with pytest.raises(ValueError, match=words):
            data.prepare(tmp_path / name, tmp_path / "out", text_key=key)
    write_form(tmp_path / name, [*TEXTS, "a\0b"])
    with pytest.raises(ValueError, match=rf"row {len(TEXTS)}: 'text' contains a NUL"):
        data.prepare(tmp_path / name, tmp_path / "out")


@pytest.mark.exhaustive
def test_a_folder_that_datasets_saved(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": TEXTS})
    rows.save_to_disk(tmp_path / "saved", num_shards=2)
    write_form(tmp_path / "saved" / "cache-1234.arrow", TEXTS[:2])
    plain = data.prepare(write_jsonl(tmp_path / "plain.jsonl", TEXTS), tmp_path / "plain")["source"]
    assert data.prepare(tmp_path / "saved", tmp_path / "out")["source"]["sha256"] == plain["sha256"]
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=r"both: is a dataset of the splits train, test; name one: .*both/train"):
        data.prepare(tmp_path / "both", tmp_path / "out2")
    next((tmp_path / "saved").glob("data-00001*")).unlink()
    with pytest.raises(ValueError, match=r"data-00001-of-00002\.arrow: no such file, but state\.json lists it"):
        data.prepare(tmp_path / "saved", tmp_path / "out2")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("source", ["-", "-.jsonl"])
def test_standard_input(tmp_path, monkeypatch, fz, source, packed):
    text = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    content = gzip.compress(text.encode()) if packed else text.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    if packed:
        data.prepare(source, tmp_path / "out", val_fraction=0.25)
    else:
        code, _, err = fz("data", "prepare", source, "--val-fraction", 0.25, "--out", tmp_path / "out")
        assert code == 0, err
    if source == "-":
        assert documents(tmp_path / "out", "train") == [text[: round(0.75 * len(text))]]
        assert documents(tmp_path / "out", "val") == [text[round(0.75 * len(text)) :]]
    else:
        assert sorted(all_documents(tmp_path / "out")) == sorted(TEXTS)
    assert os.listdir(tmp_path) == ["out"]


def test_stdlib_is_the_default_corpus_without_copies(tmp_path, monkeypatch):
    root = tmp_path / "lib"
    files = {
        "b.py": b"b = 1\n",
        "a.py": b"a = 1\n",
        "p/copy.py": b"a = 1\n",
        "site-packages/s.py": b"s",
        "doc.txt": b"d",
    }
    for name, content in (files | {"latin.py": b"\xe9", "p/__init__.py": b""}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    monkeypatch.setattr("sysconfig.get_path", lambda name: {"stdlib": str(root)}[name])
    meta = data.prepare("stdlib", tmp_path / "out")
    assert sorted(all_documents(tmp_path / "out")) == ["a = 1\n", "b = 1\n"]
    assert meta["source"]["skipped"] == {"not UTF-8": 1, "empty": 1, "duplicate": 1}
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"stdlib: no \.py file in .*none"):
        data.prepare("stdlib", tmp_path / "out2")


def test_stdlib_of_this_python_is_there(tmp_path):
    files = find_files(["stdlib"], tmp_path)
    assert {"stdlib/argparse.py", f"stdlib{os.sep}json{os.sep}decoder.py"} <= {file.name for file in files}
    assert not any("-packages" in str(file.path) for file in files)


# preparation: the split


def test_split_depends_on_content_and_seed_only(tmp_path):
    first, second = write_jsonl(tmp_path / "a.jsonl", TEXTS), write_jsonl(tmp_path / "b.jsonl", TEXTS[::-1] + TEXTS[:7])
    data.prepare(first, tmp_path / "1", val_fraction=0.3)
    data.prepare(second, tmp_path / "2", val_fraction=0.3)
    data.prepare(first, tmp_path / "3", val_fraction=0.3, seed=1)
    train, val = documents(tmp_path / "1", "train"), documents(tmp_path / "1", "val")
    assert not set(train) & set(val) and 4 <= len(val) <= 20
    assert set(documents(tmp_path / "2", "val")) == set(val) and set(documents(tmp_path / "2", "train")) == set(train)
    assert len(all_documents(tmp_path / "2")) == len(TEXTS) + 7  # copies of a user's documents are kept
    assert set(documents(tmp_path / "3", "val")) != set(val)
    assert [text for text in TEXTS if text in val] == val  # reading order is kept within a split


@pytest.mark.parametrize("val_fraction", [1e-9, 1 - 1e-9])
@pytest.mark.parametrize("count", [2, 3, 40])
def test_each_split_has_a_document_when_there_are_two(tmp_path, val_fraction, count):
    meta = data.prepare(write_jsonl(tmp_path / "a.jsonl", TEXTS[:count]), tmp_path / "out", val_fraction=val_fraction)
    smaller = "val" if val_fraction < 0.5 else "train"
    assert meta["splits"][smaller]["documents"] == 1
    assert sorted(all_documents(tmp_path / "out")) == sorted(TEXTS[:count])


def test_one_document_is_split_by_position(tmp_path):
    text = "0123456789é" * 10
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    data.prepare(tmp_path / "a.txt", tmp_path / "out", val_fraction=0.1)
    assert documents(tmp_path / "out", "train") == [text[:99]] and documents(tmp_path / "out", "val") == [text[99:]]
    (tmp_path / "b.txt").write_text("ab", encoding="utf-8")
    data.prepare(tmp_path / "b.txt", tmp_path / "out2", val_fraction=0.01)
    assert (documents(tmp_path / "out2", "train"), documents(tmp_path / "out2", "val")) == (["a"], ["b"])


def test_digest_is_of_the_content(tmp_path):
    a = data.prepare(write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "1")["source"]
    b = data.prepare(write_jsonl(tmp_path / "b.jsonl", TEXTS), tmp_path / "2", tokenizer="bpe:260")["source"]
    c = data.prepare(write_jsonl(tmp_path / "c.jsonl", [*TEXTS[:-1], "other"]), tmp_path / "3")["source"]
    assert a["sha256"] == b["sha256"] != c["sha256"]


def test_sources_that_change_between_the_readings_are_noticed(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "said").mkdir()
    corpus = document_scan.scan_sources(
        document_scan.Sources(cut(find_files([path], tmp_path)), "text", 0, tmp_path / "said"),
        0.1,
        document_scan.PREPARING,
    )
    for texts in (TEXTS[:-1], [*TEXTS, "more"], [*TEXTS[:-1], "other"]):
        write_jsonl(path, texts)
        with pytest.raises(ValueError, match=r"a\.jsonl: the sources changed"):
            list(document_scan.split_texts(corpus, 0))
        with pytest.raises(ValueError, match=r"a\.jsonl: the sources changed"):
            train_bpe((text for _, text, _ in document_scan.split_texts(corpus, 0)), 260)


# preparation: errors


BAD_FILES = {
    "nul.txt": (b"a\0b", r"nul\.txt: contains NUL bytes"),
    "latin.txt": ("né".encode("latin-1"), r"latin\.txt: is not UTF-8"),
    "empty.txt": (b"", r"empty\.txt: is empty"),
    "empty.jsonl": (b"\n\n", r"empty\.jsonl: is empty"),
    "a.csv": (b"a,b", r"a\.csv: cannot read a file of this kind; sources are"),
    "a.csv.gz": (b"a,b", r"a\.csv\.gz: cannot read a file of this kind; sources are"),
    "not.txt.gz": (b"plain", r"not\.txt\.gz: not a sound gzip file"),
    "short.txt.gz": (gzip.compress(b"text" * 1000)[:-12], r"short\.txt\.gz: not a sound gzip file"),
    "flip.jsonl.gz": (gzip.compress(b'{"text": "a"}')[:12] + b"\xff" * 20, r"flip\.jsonl\.gz: not a sound gzip file"),
    "key.jsonl": (
        b'{"text": "a"}\n\n{"body": "b"}\n',
        r"key\.jsonl:3: wanted .* 'text', found .* keys body; .*--text-key",
    ),
    "list.jsonl": (b"[1]\n", r"list\.jsonl:1: wanted .*, found a list"),
    "json.jsonl": (b'{"text": "a"}\n{"text"\n', r"json\.jsonl:2: not JSON"),
    "number.jsonl": (b'{"text": 1}\n', r"number\.jsonl:1: the value of 'text' is a int"),
    "utf8.jsonl": (b'{"text": "\xe9"}\n', r"utf8\.jsonl:1: is not UTF-8"),
    "nul.jsonl": (b'{"text": "a\\u0000"}\n', r"nul\.jsonl:1: 'text' contains a NUL"),
    "half.jsonl": (b'{"text": "\\ud83d"}\n', r"half\.jsonl:1: .*with half a surrogate pair"),
    "none.jsonl": (b'{"text": ""}\n', r"none\.jsonl: no text to prepare \(1 empty\)"),
    "one.txt": (b"a", r"one\.txt: one character cannot be split"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_by_name_and_leave_nothing(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        data.prepare(tmp_path / name, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == [name]


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


ENDLESS = {
    "fifo.txt": (os.mkfifo, "a FIFO"),
    "fifo.jsonl.gz": (os.mkfifo, "a FIFO"),
    "socket.py": (make_socket, "a socket"),
    "device.txt": (lambda path: path.symlink_to("/dev/zero"), "a device"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_may_never_end_is_refused_at_once(tmp_path, monkeypatch, name):
    make, kind = ENDLESS[name]
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    Path("in/deep").mkdir(parents=True)
    Path("in/a.txt").write_text("text " * 100)
    make(Path("in/deep", name))
    for source in ("in", f"in/deep/{name}"):
        with pytest.raises(ValueError, match=rf"in/deep/{name}: is {kind}; it must be a regular file"):
            data.prepare([source], "out")
        with pytest.raises(ValueError, match=rf"{name}: is {kind}; it must be a regular file"):
            data.prepare(["in/a.txt"], "out", tokenizer=f"in/deep/{name}")
    assert not Path("out").exists()
    with pytest.raises(ValueError, match="/dev/zero: is a device"):
        data.prepare(["/dev/zero"], "out")


def test_a_document_too_large_for_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LARGEST_DOCUMENT", 1000)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 1001))
    with pytest.raises(ValueError, match=r"a\.txt\.gz: a document of more than 1,000 bytes"):
        data.prepare(tmp_path / "a.txt.gz", tmp_path / "out")
    monkeypatch.setattr(sources, "LARGEST", 1000)
    monkeypatch.setattr(text_parsing, "LARGEST", 1000)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "x" * 1001}))
    with pytest.raises(ValueError, match=r"b\.jsonl:1: .* at most 1,000 are read"):
        data.prepare(tmp_path / "b.jsonl", tmp_path / "out")


@pytest.mark.parametrize("name", [n for n in BAD_FILES if "gz" in n and "csv" not in n] + ["key.jsonl", "utf8.jsonl"])
def test_damaged_data_in_a_folder_is_an_error_too(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(BAD_FILES[name][0])
    with pytest.raises(ValueError, match=BAD_FILES[name][1]):
        data.prepare(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": []}, "no source given; sources are files"),
        ({"sources": "missing"}, "missing: no such file or folder; sources are files"),
        ({"sources": "nothing"}, r"nothing: no \.txt, \.jsonl, \.py, \.parquet, \.arrow file"),
        ({"sources": ["-", "-.jsonl"]}, "standard input is named twice"),
        ({"val_fraction": 0.0}, "val_fraction=0.0: wanted a number between 0 and 1"),
        ({"val_fraction": 1.0}, "val_fraction=1.0: wanted a number between 0 and 1"),
        ({"out": "nothing"}, "nothing: already exists; name another folder"),
        ({"out": "a.txt/deep/out"}, "out: its parent folder cannot be made"),
        ({"tokenizer": "bpe"}, "tokenizer='bpe': wanted bpe:N"),
        ({"tokenizer": "bpe:x"}, "tokenizer='bpe:x': wanted bpe:N"),
        ({"tokenizer": "bpe:256"}, "tokenizer='bpe:256': wanted bpe:N .* at least 257"),
        ({"tokenizer": "bpe:9000"}, "bpe:9000: this corpus yields only"),
        ({"tokenizer": "gpt2"}, "tokenizer='gpt2': no such file; wanted bytes, bpe:N or the path"),
        ({"tokenizer": "nothing"}, "tokenizer='nothing': no such file"),
        ({"tokenizer": "a.txt"}, r"a\.txt: not a Hugging Face tokenizer\.json"),
        ({"eos": "</s>"}, "eos='</s>': the byte tokenizer always ends a document with id 0"),
        ({"tokenizer": "words.json"}, r"a\.txt: text contains '</s>', the end-of-document token of words\.json"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"text")))
    (tmp_path / "nothing").mkdir()
    (tmp_path / "a.txt").write_text("a b </s> c a b </s> c")
    (tmp_path / "words.json").write_text(library_json())
    before = sorted(os.listdir())
    with pytest.raises(ValueError, match=message) as caught:
        data.prepare(**({"sources": "a.txt", "out": "out"} | change))
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir()) == before and os.listdir("nothing") == []


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".jsonl", ".jsonl.gz"])
def test_a_byte_order_mark_at_the_start_of_a_file_is_no_text(tmp_path, suffix):
    texts, mark = ["one \ufeff two", "\ufeffthree"], b"\xef\xbb\xbf"  # elsewhere it is one
    for i, text in enumerate(texts):
        line = json.dumps({"text": text}) + "\n" + json.dumps({"text": "last"})
        content = mark + (line if "jsonl" in suffix else text).encode()
        path = tmp_path / f"{i}{suffix}"
        path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    data.prepare([tmp_path / f"{i}{suffix}" for i in range(2)], tmp_path / "corpus", val_fraction=0.5)
    found = all_documents(tmp_path / "corpus")
    assert sorted(found) == sorted([*texts, *(["last"] * 2 if "jsonl" in suffix else [])])


@pytest.mark.parametrize("name", FORMS)
def test_a_byte_order_mark_at_the_start_of_a_row_is_text(tmp_path, name):
    texts = ["\ufeffone", "two", "\ufeff"]
    write_form(tmp_path / name, texts)
    data.prepare(tmp_path / name, tmp_path / "corpus", val_fraction=0.5)
    assert sorted(all_documents(tmp_path / "corpus")) == sorted(texts)


def test_a_file_of_a_byte_order_mark_alone_is_empty(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(ValueError, match=r"a\.txt: is empty"):
        data.prepare([tmp_path / "a.txt"], tmp_path / "corpus")
