"""Preparation by several processes, killed and resumed: the corpus of one process that was not."""

import fcntl
import gc
import gzip
import io
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import string
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from fzero import data
from fzero.data import document_scan, encoding, path_of, remove_finished, sources

MODULE = sys.modules["fzero.data.prepare"]  # data.prepare is its function
TEXTS = [f"def f_{i}(x):\n    return x * {i}  # né 漢字 🙂\n" * (1 + i % 5) for i in range(60)]


def lines_of(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def make_sources(folder):
    """A folder with every kind of file, of which the pieces are parts of one, one, and several."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines_of(TEXTS) + b"\n\n" + lines_of(["x" * 3000, ""]) + lines_of(TEXTS[:9]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines_of(TEXTS[5:30])))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS[::-1]}), folder / "c.parquet", row_group_size=7)
    for i, text in enumerate(TEXTS[:12]):
        (folder / f"d{i}.txt").write_text(text, encoding="utf-8")
    (folder / "e.txt").write_bytes(b"")
    return folder


def content(folder):
    """The files of a corpus; of meta.json all but where the sources were."""
    found = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    meta = json.loads(found.pop("meta.json"))
    meta["source"].pop("names")
    return found, meta


@pytest.fixture
def small(monkeypatch):
    """Pieces of a few documents."""
    monkeypatch.setattr(sources, "SMALLEST", 700)
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 500)


@pytest.fixture
def whole(tmp_path):
    """The sources, and what they are in one piece, by one process."""
    folder = make_sources(tmp_path / "in")
    data.prepare(folder, tmp_path / "whole", tokenizer="bpe:300", val_fraction=0.2)
    assert len(sources.cut(sources.find_files([folder], tmp_path))) == 1
    return folder, content(tmp_path / "whole")


def prepare(folder, out, count=1, **more):
    options = {"tokenizer": "bpe:300", "val_fraction": 0.2} | more
    return data.prepare(folder, out, preparing=data.Preparing(workers=count), **options)


def test_pieces_have_the_documents_of_the_files(tmp_path, small, monkeypatch):
    files = sources.find_files([make_sources(tmp_path / "in")], tmp_path)
    expected = [(one.origin, one.text, one.problem) for one in sources.read_documents(files, "text")]
    for size in (97, 700, 3001, 10**6):
        monkeypatch.setattr(sources, "SMALLEST", size)
        monkeypatch.setattr(sources, "LARGEST_PIECE", size)
        pieces = sources.cut(files)
        assert [
            (d.origin, d.text, d.problem) for piece in pieces for d in sources.read_documents(piece, "text")
        ] == expected
        assert len(pieces) > 60 if size < 700 else True


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_corpus_does_not_depend_on_processes_and_pieces(tmp_path, whole, small, count):
    folder, expected = whole
    assert len(sources.cut(sources.find_files([folder], tmp_path))) > 15
    prepare(folder, tmp_path / "out", count)
    assert content(tmp_path / "out") == expected
    assert sorted(os.listdir(tmp_path)) == ["in", "out", "whole"]
    # One document alone is cut in two, in whatever pieces its copies are.
    (tmp_path / "one.jsonl").write_bytes(lines_of(["one document " * 20] * 9))
    meta = prepare(tmp_path / "one.jsonl", tmp_path / "one", count, tokenizer="bytes")
    assert [meta["splits"][split]["documents"] for split in ("train", "val")] == [9, 9]
    assert data.verify(tmp_path / "one") == []


@pytest.mark.parametrize("count", [1, 3])
def test_the_first_error_is_raised_with_its_line(tmp_path, small, count):
    good, bad = lines_of(TEXTS[:40]), b'{"body": "b"}\n'
    (tmp_path / "a.jsonl").write_bytes(good + b"\n" + lines_of(TEXTS) + bad + lines_of(TEXTS) + b"[1]\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:102: wanted an object with the key 'text', found .* body"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", count)
    (tmp_path / "a.jsonl").write_bytes(good + lines_of(TEXTS) + lines_of(["a\0b"]) + good)
    with pytest.raises(ValueError, match=r"a\.jsonl:101: 'text' contains a NUL"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", count)
    (tmp_path / "a.jsonl").write_bytes(good + lines_of(TEXTS) + lines_of(["a </s> b"]) + good)
    from test_prepare import library_json

    (tmp_path / "words.json").write_text(library_json())
    with pytest.raises(ValueError, match=r"a\.jsonl:101: text contains '</s>', the end-of-document token"):
        prepare(tmp_path / "a.jsonl", tmp_path / "out", count, tokenizer=tmp_path / "words.json")
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "words.json"]


def interrupted(folder, out, after, error=KeyboardInterrupt, **more):
    """Prepare, and raise the error when so many pieces are encoded."""
    encoded = []

    def show(stage, done, of):
        encoded.extend([done] * (stage == "encoding"))
        if len(encoded) == after + 1:
            raise error

    options = {"tokenizer": "bpe:300", "val_fraction": 0.2} | more
    with pytest.raises(error):
        data.prepare(folder, out, preparing=data.Preparing(workers=1, show=show), **options)
    assert not out.exists() and path_of(out).is_dir()
    return path_of(out)


@pytest.fixture
def encoded(monkeypatch):
    """The numbers of the pieces that are encoded."""
    found, real = [], encoding.encode_piece
    monkeypatch.setattr(encoding, "encode_piece", lambda *args: (found.append(args[2]), real(*args))[1])
    return found


def test_what_is_done_is_not_done_again(tmp_path, whole, small, encoded, monkeypatch):
    folder, expected = whole
    pieces = len(sources.cut(sources.find_files([folder], tmp_path)))
    interrupted(folder, tmp_path / "out", 4)
    interrupted(folder, tmp_path / "out", 3)
    interrupted(folder, tmp_path / "out", 2, OSError)  # such as a full disk
    monkeypatch.setattr(MODULE, "train_bpe", None)
    prepare(folder, tmp_path / "out")
    assert encoded == list(range(pieces))
    assert content(tmp_path / "out") == expected
    assert sorted(os.listdir(tmp_path)) == ["in", "out", "whole"]


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 3] ^= 4
    path.write_bytes(raw)


def test_a_damaged_piece_is_found_and_encoded_again(tmp_path, whole, small, encoded):
    folder, expected = whole
    work = interrupted(folder, tmp_path / "out", 6)
    flip(work / "encoded" / "0.tokens")
    flip(work / "tokenizer.json")
    (work / "encoded" / "1.tokens").write_bytes((work / "encoded" / "1.tokens").read_bytes()[:-1])
    (work / "encoded" / "2.tokens").write_bytes((work / "encoded" / "2.tokens").read_bytes() + b"\0")
    (work / "encoded" / "3.tokens").write_bytes(b"")
    (work / "encoded" / "4.tokens").write_bytes((work / "encoded" / "5.tokens").read_bytes())
    (work / "corpus").mkdir()
    (work / "corpus" / "train.bin").write_bytes(b"of a join that was killed")
    encoded.clear()
    prepare(folder, tmp_path / "out")
    assert encoded[:5] == [0, 1, 2, 3, 4] and 5 not in encoded
    assert content(tmp_path / "out") == expected


def test_a_piece_damaged_before_the_join_is_found(tmp_path, whole, small, monkeypatch):
    folder, expected = whole
    real = encoding.encode
    damage = lambda corpus, made, at, how: (real(corpus, made, at, how), flip(at / "2.tokens"))  # noqa: E731
    monkeypatch.setattr(MODULE, "encode", damage)
    with pytest.raises(OSError, match=r"partial/encoded/2\.tokens: damaged since it was written; the same command"):
        prepare(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(MODULE, "encode", real)
    prepare(folder, tmp_path / "out")
    assert content(tmp_path / "out") == expected


def test_a_folder_of_another_preparation_is_one_line(tmp_path, whole, small):
    folder, expected = whole
    work = interrupted(folder, tmp_path / "out", 4)
    before = {path: path.read_bytes() for path in work.rglob("*.tokens")}
    line = r"out\.partial: an unfinished preparation with {}; give the same sources and options to go on, or remove"
    for change, said in (
        ({"seed": 1}, "seed 0, and this one has seed 1"),
        ({"tokenizer": "bytes", "val_fraction": 0.1}, "tokenizer 'bpe:300', val_fraction 0.2, and this one has .*"),
    ):
        with pytest.raises(ValueError, match=line.format(said)):
            prepare(folder, tmp_path / "out", **change)
    (folder / "d1.txt").write_text("other text")
    with pytest.raises(ValueError, match=line.format("sources '[0-9a-f]{64}', and this one has sources '.*")):
        prepare(folder, tmp_path / "out")
    (folder / "d1.txt").unlink()
    (folder / "a.jsonl").rename(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match=r"in/z\.jsonl:1: not JSON"):
        (folder / "z.jsonl").write_text("{")
        prepare(folder, tmp_path / "out")
    assert {path: path.read_bytes() for path in work.rglob("*.tokens")} == before
    (folder / "z.jsonl").unlink()
    (tmp_path / "a.jsonl").rename(folder / "a.jsonl")
    (folder / "d1.txt").write_text(TEXTS[1], encoding="utf-8")
    prepare(folder, tmp_path / "out")
    assert content(tmp_path / "out") == expected


def test_a_tokenizer_that_has_changed_is_one_line(tmp_path, whole, small):
    folder, _ = whole
    path = tmp_path / "tokenizer.json"
    path.write_bytes((tmp_path / "whole" / "tokenizer.json").read_bytes())
    interrupted(folder, tmp_path / "out", 2, tokenizer=path)
    path.write_text(path.read_text().replace('"vocab"', ' "vocab"'))
    with pytest.raises(ValueError, match=r"with tokenizer\.json '[0-9a-f]{64}', and this one has"):
        prepare(folder, tmp_path / "out", tokenizer=path)


def test_what_a_kill_leaves_beside_a_whole_corpus_is_removed(tmp_path, whole):
    folder, expected = whole
    out, work = tmp_path / "out", path_of(tmp_path / "out")
    with mock.patch("shutil.rmtree", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        prepare(folder, out)
    assert content(out) == expected and (work / "settings.json").exists()
    settings = (work / "settings.json").read_text()
    for name, text in (("settings.json", settings.replace('"sources": "', '"sources": "0')), ("mine.txt", "mine")):
        (work / name).write_text(text)  # of other sources, and of another origin
        with pytest.raises(ValueError, match="out: already exists"):
            prepare(folder, out)
        assert (work / name).read_text() == text
        (work / name).unlink()
    (work / "settings.json").write_text(settings)
    with (work / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not remove_finished(out) and work.exists()
    with pytest.raises(ValueError, match="out: already exists"):
        prepare(folder, out)
    assert content(out) == expected and not work.exists()


def test_the_folder_is_one_process_s(tmp_path, whole, monkeypatch):
    folder, _ = whole
    monkeypatch.setattr(sys.modules[path_of.__module__], "ENDING_S", 0.1)
    work = path_of(tmp_path / "out")
    work.mkdir()
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"out\.partial: another process prepares .*out there; wait for it"):
            prepare(folder, tmp_path / "out")
    (work / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"out\.partial: is no folder of an unfinished preparation \(it holds mine"):
        prepare(folder, tmp_path / "out")
    assert (work / "mine.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="workers=-1: wanted a number of processes"):
        prepare(folder, tmp_path / "other", -1)


def test_standard_input_is_resumed(tmp_path, whole, small, monkeypatch, encoded):
    text = lines_of(TEXTS)
    for again in (False, True):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        if again:
            prepare("-.jsonl", tmp_path / "out")
        else:
            interrupted("-.jsonl", tmp_path / "out", 3)
    assert len(encoded) == len(set(encoded)) and data.verify(tmp_path / "out") == []


def test_workers_answer_every_number_once():
    assert sorted(document_scan.results_of(lambda n: n * n, range(50), 3)) == [(n, n * n) for n in range(50)]
    assert document_scan.run_in_process(lambda: os.getpid()) != os.getpid()

    def work(n):
        if n in (3, 5):
            raise ValueError(f"number {n}")
        if n == 7:
            raise type("Local", (Exception,), {})("cannot be sent")
        time.sleep(0.2 * (n == 2))

    for count in (1, 3):
        with pytest.raises(ValueError, match="number 3"):
            list(document_scan.results_of(work, range(7), count))
    with pytest.raises(RuntimeError, match="Local: cannot be sent"):
        list(document_scan.results_of(work, [7, 1], 2))


class Owned:
    """Says in a file that it was ended by another process than the one that made it."""

    def __init__(self, file):
        self.file, self.owner, self.itself = file, os.getpid(), self

    def __del__(self):
        if os.getpid() != self.owner:
            self.file.touch()


def test_garbage_of_the_parent_is_not_ended_in_its_processes(tmp_path):
    """Which may end threads that a forked process does not have."""
    assert document_scan.run_in_process(gc.isenabled) and gc.isenabled()
    gc.disable()
    try:
        for name in ("a", "b"):
            Owned(tmp_path / name)  # a cycle
        document_scan.run_in_process(gc.collect)
        assert not list(tmp_path.iterdir()) and not gc.isenabled()
    finally:
        gc.enable()


def test_a_process_that_is_killed_is_one_line_and_resumed(tmp_path, whole, small, monkeypatch):
    folder, expected = whole
    real = encoding.encode_piece

    def killed(corpus, tokenizer, number, at):
        real(corpus, tokenizer, number, at)
        if number == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(encoding, "encode_piece", killed)
    with pytest.raises(
        OSError, match=r"ended by signal 9; if memory was short, use fewer \(workers= of Preparing, --workers\)"
    ):
        prepare(folder, tmp_path / "out", 2)
    monkeypatch.setattr(encoding, "encode_piece", real)
    prepare(folder, tmp_path / "out", 2)
    assert content(tmp_path / "out") == expected


@pytest.mark.slow
def test_kills_at_any_instant(tmp_path, whole, small):
    """Attempts are ended by SIGKILL at instants between their beginning and the time that a whole one takes."""
    folder, expected = whole
    out = tmp_path / "out"
    context = multiprocessing.get_context("fork")

    def attempt(seconds):
        process = context.Process(target=prepare, args=(folder, out, 2))
        begin = time.monotonic()
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
        return process.exitcode, time.monotonic() - begin

    code, took = attempt(None)
    assert code == 0 and content(out) == expected
    draw, killed = random.Random(0), 0
    for _ in range(40):
        if out.exists():  # an attempt came to its end, maybe with its folder left
            assert content(out) == expected
            for folder_left in (out, path_of(out)):
                shutil.rmtree(folder_left, ignore_errors=True)
        attempt(took * draw.random())
        killed += not out.exists()
        if killed == 15:
            break
    if not out.exists():
        prepare(folder, out, 2)
        assert not path_of(out).exists()
    assert killed >= 5 and content(out) == expected


@pytest.mark.slow
def test_a_kill_before_any_rename_loses_nothing(tmp_path, whole):
    folder, expected = whole
    out, context = tmp_path / "out", multiprocessing.get_context("fork")

    def attempt(last):
        made = itertools.count()

        def dying(real):
            def rename(*args):
                if next(made) == last:
                    os._exit(9)
                return real(*args)

            return rename

        with mock.patch("os.replace", dying(os.replace)), mock.patch("os.rename", dying(os.rename)):
            prepare(folder, out)

    for last in itertools.count():
        process = context.Process(target=attempt, args=(last,))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == 9
        prepare(folder, out)
        assert content(out) == expected and not path_of(out).exists()
        shutil.rmtree(out)
    assert last >= 5


def test_ctrl_c_says_how_to_go_on(tmp_path, whole, small, fz, monkeypatch):
    folder, expected = whole
    args = ["data", "prepare", folder, "--out", tmp_path / "out", "--tokenizer", "bpe:300", "--val-fraction", 0.2]
    real = encoding.encode_piece

    def stopped(corpus, tokenizer, number, at):
        if number == 5:
            raise KeyboardInterrupt
        real(corpus, tokenizer, number, at)

    monkeypatch.setattr(encoding, "encode_piece", stopped)
    code, _, err = fz(*args, "--workers", 1)
    assert code == 130 and f"fzero: {tmp_path}/out.partial has what is done; the same command goes on from there" in err
    code, _, err = fz(*args, "--seed", 3)
    assert code == 2 and len(err.splitlines()) == 1 and "seed 0, and this one has seed 3" in err
    monkeypatch.setattr(encoding, "encode_piece", real)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    code, out, err = fz(*args, "--workers", 1)
    assert code == 0 and out.startswith("167 documents") and "reading:" in err and "encoding:" in err
    assert content(tmp_path / "out") == expected


COMMAND = """
import re, resource, sys
from fzero.cli.main import main
try:
    main(sys.argv[1:])
finally:
    # ru_maxrss of a process has that of the one that started it, before exec, too.
    own = re.search("VmHWM:.* ([0-9]+) kB", open("/proc/self/status").read())[1]
    print(max(int(own), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
"""


@pytest.mark.slow
def test_a_bpe_of_words_that_are_all_different_takes_no_more_memory(tmp_path):
    """docs/data.md: at most 500 MB. The library's counts of all these words take some 500 MB beside the process."""
    draw, alphabets = random.Random(0), ["0123456789", string.ascii_letters, "éèêëàâîïôùûç"]
    with (tmp_path / "a.txt").open("w", encoding="utf-8") as file:
        while file.tell() < 5e6:
            words = ["".join(draw.choices(alphabet, k=9)) for alphabet in alphabets for _ in range(400)]
            file.write(" ".join(words) + "\n")
    args = ["data", "prepare", tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", "bpe:300", "--workers", 1]
    command = [sys.executable, "-c", COMMAND, *map(str, args)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout.split()[-1]) < 500_000  # KB


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_sources(tmp_path):
    """500 MB of documents in less than 300 MB of a process, of which torch has 225."""
    with (tmp_path / "a.jsonl").open("wb") as file:
        for i in range(2_500):
            file.write(lines_of([f"{i} {j} " + "some text of a document " * 80 for j in range(100)]))
    assert (tmp_path / "a.jsonl").stat().st_size > 480e6
    args = ["data", "prepare", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--workers", "2"]
    done = subprocess.run([sys.executable, "-c", COMMAND, *args], check=True, capture_output=True, text=True)
    assert int(done.stdout.split()[-1]) < 300_000  # KB
