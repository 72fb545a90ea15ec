"""Corpora in object stores: what is read is what a local corpus has, whatever the store and the cache do."""

import json
import os
import random
import threading
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import test_data_law
import torch
from launched import torchrun
from object_server import serving
from test_checkpoint_url import BUCKET, WITHOUT, ask, s3, server  # noqa: F401  (fixtures)
from test_data_law import home as law  # noqa: F401

from fzero import data
from fzero.core import Objects, storage
from fzero.data import MIN_CACHE_BYTES, Reading, remote_tokens, token_stream
from fzero.data.remote_tokens import PieceCache
from fzero.run import from_table, run_folder
from fzero.run.setup import corpus
from fzero.sharding import fake_mesh

EXHAUSTIVE = pytest.mark.exhaustive
SMALL = 1 << 16


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    for name, count in (("web", 320), ("code", 40)):
        texts = [f"{name} {i}: {i * i} is the square of {i}. " * (1 + 40 * (i % 9)) for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        data.prepare(folder / f"{name}.jsonl", folder / "bucket" / name, val_fraction=0.1)
    assert (folder / "bucket" / "web" / "train.bin").stat().st_size > 1.3 * MIN_CACHE_BYTES
    return folder


@pytest.fixture(scope="module")
def stores(home):
    """A store of both corpora, and the folder of one that is read there."""
    with serving(home) as served:
        data.link_url(f"{served.url}/bucket/web", home / "linked")
        yield served


@pytest.fixture
def store(stores):
    stores.be_sound()
    return stores


@pytest.fixture
def quick(monkeypatch):
    """No wait of some length before a store is asked again."""
    retries = {"max_retries": 1, "initial_delay": "10ms", "max_delay": "10ms"}
    monkeypatch.setattr(storage, "RETRIES", retries)
    monkeypatch.setattr(remote_tokens, "FIRST_WAIT_S", 0.01)
    storage.context.cache_clear()
    yield
    storage.context.cache_clear()


@pytest.fixture
def linked(home, store, tmp_path, quick):
    """A folder whose corpus is read from the store, and how: by small pieces."""
    return home / "linked", Reading(tmp_path / "cache", MIN_CACHE_BYTES, 60.0, SMALL)


def read(cache, name, start, size):
    """The bytes of a piece, None if there is no such piece."""
    out = bytearray(size)
    [count] = cache.read_into([(name, start, memoryview(out))])
    return None if count is None else bytes(out[:count])


def used(folder):
    """The bytes of the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def watched(folder, monkeypatch):
    """The list of the bytes in a cache before and after each piece that this process puts in place."""
    found, replace = [], os.replace

    def watch(*names):
        found.append(used(folder))  # with the piece, under its first name; no other process writes now
        replace(*names)
        found.append(used(folder))

    monkeypatch.setattr(os, "replace", watch)
    return found


def expect_equal(ours, theirs):
    assert sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# -- rows


@pytest.mark.parametrize("packing", ["stream", pytest.param("best-fit", marks=EXHAUSTIVE)])
@pytest.mark.parametrize("split", ["train", pytest.param("val", marks=EXHAUSTIVE)])
def test_rows_are_those_of_the_local_corpus(home, linked, packing, split):
    folder, reading = linked
    ours, theirs = (
        data.TokenStream(data.open_tokens(place, split, reading), 50, 8, seed=3, packing=packing)
        for place in (folder, home / "bucket" / "web")
    )
    for step in range(3):
        expect_equal(ours.batch_at(step), theirs.batch_at(step))
    for our, their in zip(ours.eval_batches(20, (1, 2)), theirs.eval_batches(20, (1, 2)), strict=True):
        expect_equal(our, their)
    assert ours.remainder_after(7).ranges.tolist() == theirs.remainder_after(7).ranges.tolist()


@pytest.mark.parametrize("latency, failing, steps", [(0.0, 0.1, 6), pytest.param(0.05, 0.05, 200, marks=EXHAUSTIVE)])
def test_a_slow_store_with_errors_and_a_small_cache_change_nothing(
    home, store, linked, latency, failing, steps, monkeypatch
):
    folder, reading = linked
    store.latency, store.failing = latency, failing
    ours = data.TokenStream(data.open_tokens(folder, "train", reading), 64, 8)
    theirs = data.TokenStream(data.open_tokens(home / "bucket" / "web"), 64, 8)
    sizes = watched(reading.cache, monkeypatch)
    for step in range(steps):
        ours.begin((step + 1) * 8, 16)
        expect_equal(ours.batch_at(step), theirs.batch_at(step))
    assert MIN_CACHE_BYTES // 2 < max(sizes) <= MIN_CACHE_BYTES, "it was used, and never over its bound"
    pieces = {start // SMALL for start, _ in store.ranges("train.bin")}
    assert len(pieces) > MIN_CACHE_BYTES // SMALL, "more than the cache holds"


@EXHAUSTIVE
def test_what_the_cache_has_is_not_fetched_again(linked, store):
    folder, reading = linked
    rows = lambda: data.TokenStream(data.open_tokens(folder, "train", reading), 64, 4).batch_at(0)  # noqa: E731
    first = rows()
    fetched = len(store.asked)
    assert fetched and len(set(store.asked)) == fetched
    expect_equal(rows(), first)
    assert len(store.asked) == fetched


@EXHAUSTIVE
def test_large_pieces_where_a_corpus_fits(home, store, linked):
    folder, reading = linked
    tokens = data.open_tokens(folder, "train", reading._replace(piece=0, cache_bytes=100 << 20))
    data.TokenStream(tokens, 64, 64).batch_at(0)
    size = (home / "bucket" / "web" / "train.bin").stat().st_size
    assert sorted(set(store.ranges("train.bin"))) == [
        pair for pair in pairwise([*range(0, size, remote_tokens.LARGE), size]) if pair in store.ranges("train.bin")
    ]
    assert len(store.ranges("train.bin")) <= -(-size // remote_tokens.LARGE)


@EXHAUSTIVE
def test_an_index_of_no_token(linked):
    tokens = data.open_tokens(linked[0], "train", linked[1]).tokens
    assert tokens[5:9].shape == (4,) and tokens[np.zeros((0, 3), int)].shape == (0, 3)
    for wrong in (np.array([-1]), np.array([[len(tokens)]])):
        with pytest.raises(IndexError, match=r"of the .* of train\.bin"):
            tokens[wrong]


# -- a run


def config_of(url, tmp_path, **more):
    own = {"path": url, "seq_len": 32, "cache": str(tmp_path / "cache"), "cache_gb": 0.0011, **more}
    return from_table(
        {"preset": "mlp-tiny", "data": own, "train": {"steps": 12, "batch": 8, "micro_batch": 2, "eval_batches": 2}}
    )


@pytest.mark.parametrize("size", [pytest.param(1, marks=EXHAUSTIVE), 2])
def test_each_rank_reads_its_rows_and_no_others(home, store, tmp_path, size, quick):
    config = config_of(f"{store.url}/bucket/web", tmp_path)
    path = corpus.find_corpus(config, tmp_path / "run", print)
    local, plain = config_of("", tmp_path), home / "bucket" / "web"
    stream = corpus.open_last(local, plain)[0]
    for rank in range(size):
        mesh = fake_mesh({"dp": size} if size > 1 else {}, rank)
        store.asked.clear()
        # A cache of its own, so that nothing is there because another rank has read it.
        own = config_of(f"{store.url}/bucket/web", tmp_path, cache=str(tmp_path / f"cache-{size}-{rank}"))
        (ours, _), (theirs, _) = corpus.open_data(own, path, mesh), corpus.open_data(local, plain, mesh)
        for sample in range(0, 96, 8):
            expect_equal(ours(sample), theirs(sample))
        at = [
            stream.positions_at(sample + 2 * m, 2) for sample in range(0, 96, 8) for m in range(rank, 4, size)
        ]  # of the 12 steps that the run has
        wanted = np.unique(np.concatenate([np.stack(at), np.stack(at) + 1]) // SMALL).tolist()
        assert sorted({start // SMALL for start, _ in store.ranges("train.bin")}) == wanted


@EXHAUSTIVE
def test_what_comes_next_is_fetched_before_it_is_asked_for(home, store, tmp_path, quick):
    config = config_of(f"{store.url}/bucket/web", tmp_path, cache_gb=1.0)
    path = corpus.find_corpus(config, tmp_path / "run", print)
    reading = corpus.reading_of(config, path)
    assert reading.piece == remote_tokens.LARGE  # it fits
    tokens = data.open_tokens(path, "train", reading._replace(piece=SMALL, cache_bytes=MIN_CACHE_BYTES)).tokens
    assert tokens.begin(np.array([0, SMALL, 2 * SMALL])) and sorted(tokens.pending) == [0, 1, 2]
    for future in tokens.pending.values():
        future.result(10)
    asked = len(store.asked)
    assert tokens.begin(np.array([0])) and not tokens.pending, "what has come is in the cache"
    assert tokens[0 : 3 * SMALL].tobytes() == (home / "bucket/web/train.bin").read_bytes()[: 3 * SMALL]
    assert len(store.asked) == asked
    assert not tokens.begin(np.arange(3, 20) * SMALL)
    assert len(tokens.pending) == tokens.max_pending == 4  # room for so many


@EXHAUSTIVE
def test_a_mixture_of_a_url_and_a_folder(home, store, tmp_path, quick):
    both = [f"{store.url}/bucket/web:0.7,{home}/bucket/code:0.3", f"{home}/bucket/web:0.7,{home}/bucket/code:0.3"]
    found = []
    for i, mixture in enumerate(both):
        config = config_of("stdlib", tmp_path, mixture=mixture)
        path = corpus.find_corpus(config, tmp_path / f"run-{i}", print)
        batch_at, validation = corpus.open_data(config, path, fake_mesh({"dp": 2}, 1))
        found.append([batch_at(8 * step) for step in range(6)] + list(validation()))
    for ours, theirs in zip(*found, strict=True):
        expect_equal(ours, theirs)
    assert store.ranges("train.bin") and corpus.corpus_digest(tmp_path / "run-0" / "data")


# -- damage, kills and bounds


def read_all(folder, reading):
    tokens = data.open_tokens(folder, "train", reading).tokens
    return tokens[0 : len(tokens)].tobytes()


@EXHAUSTIVE
def test_damage_on_the_way_is_found_and_fetched_again(home, store, linked):
    folder, reading = linked
    left = [3]

    def damage(path, start, found):
        if path.endswith("train.bin") and left[0]:
            left[0] -= 1
            return [found[:-1], found[:9] + bytes([found[9] ^ 4]) + found[10:]][left[0] % 2] if left[0] else found[:1]
        return found

    store.damage = lambda path, start, found: damage(path, start, found).ljust(len(found), b"\0")
    assert read_all(folder, reading) == (home / "bucket/web/train.bin").read_bytes()
    assert left == [0]


@pytest.mark.parametrize("kind", ["a bit", *(pytest.param(k, marks=EXHAUSTIVE) for k in ("cut", "empty"))])
def test_damage_in_the_cache_is_found_and_fetched_again(home, store, linked, kind):
    folder, reading = linked
    reading = reading._replace(cache_bytes=50 << 20)
    whole = read_all(folder, reading)
    piece = sorted(p for p in reading.cache.rglob("*") if p.is_file() and p.name.isdigit())[5]
    raw, asked = piece.read_bytes(), len(store.asked)
    piece.write_bytes({"a bit": raw[:7] + bytes([raw[7] ^ 1]) + raw[8:], "cut": raw[:100], "empty": b""}[kind])
    assert read_all(folder, reading) == whole == (home / "bucket/web/train.bin").read_bytes()
    assert len(store.asked) == asked + 1 and piece.read_bytes() == raw


def test_a_kill_before_the_rename_leaves_no_piece(tmp_path):
    cache = PieceCache(tmp_path, 1000)
    cache.write("a/0", b"x" * 100)
    child = os.fork()
    if not child:
        os.replace = lambda *_: os._exit(9)
        cache.write("a/1", b"y" * 400)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert (tmp_path / "pieces" / "partial").exists() and not cache.contains("a/1") and read(cache, "a/1", 0, 9) is None
    assert read(cache, "a/0", 0, 200) == b"x" * 100
    for i in range(2, 9):  # the lock is free, and the bytes that were left count
        cache.write(f"a/{i}", bytes([i]) * 300)
        assert used(tmp_path) <= 1000 and read(cache, f"a/{i}", 0, 300) == bytes([i]) * 300
    assert not (tmp_path / "pieces" / "partial").exists()


def test_the_piece_read_longest_ago_goes_first(tmp_path):
    cache = PieceCache(tmp_path, 350)
    for i in range(3):
        cache.write(f"a/{i}", b"x" * 100)
        os.utime(tmp_path / "pieces" / f"a/{i}", ns=(i, i))
    assert read(cache, "a/0", 50, 10) == b"x" * 10
    cache.write("a/3", b"x" * 100)
    assert [cache.contains(f"a/{i}") for i in range(4)] == [True, False, True, True] or not cache.contains("a/2")
    assert cache.contains("a/0") and not cache.contains("a/1")
    cache.write("a/4", b"x" * 400)  # never
    assert not cache.contains("a/4") and cache.contains("a/0")


def test_a_piece_that_another_process_removes_takes_no_room_and_is_looked_for_anew(tmp_path):
    ours, theirs = PieceCache(tmp_path, 350), PieceCache(tmp_path, 350)
    theirs.write("a/0", b"x" * 100)
    assert read(ours, "a/0", 0, 100) == b"x" * 100
    held = os.dup(ours.open["a/0"])
    theirs.write("a/0", b"y" * 100, anew=True)
    assert read(ours, "a/0", 0, 100) == b"y" * 100
    for i in range(1, 5):
        theirs.write(f"a/{i}", b"x" * 100)
        os.utime(tmp_path / "pieces" / f"a/{i}", ns=(i, i))
    os.utime(tmp_path / "pieces" / "a/0", ns=(0, 0))
    theirs.write("a/5", b"x" * 100)
    assert read(ours, "a/0", 0, 100) is None and not ours.contains("a/0") and "a/0" not in ours.open
    assert os.fstat(held).st_size == 0
    os.close(held)


def test_so_many_files_are_open_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_tokens, "MOST_OPEN", 3)
    cache = PieceCache(tmp_path, 10_000)
    for i in range(6):
        cache.write(f"a/{i}", bytes([i]) * 10)
    for i in (0, 1, 2, 0, 3, 4, 5, 0, 1):
        assert read(cache, f"a/{i}", 2, 8) == bytes([i]) * 8 and len(cache.open) <= 3
    fds = [*cache.open.values()]
    del cache
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def write_pieces(folder, number, monkeypatch):
    cache, sizes = PieceCache(folder, 5000), watched(folder, monkeypatch)
    for i in range(60):
        cache.write(f"{number}/{i % 40}", bytes([i % 40]) * (100 + 37 * (i % 7)), anew=i % 3 == 0)
        for j in range(40):
            found = read(cache, f"{1 - number}/{j}", 0, 1000)
            assert found is None or set(found) == {j}
    assert 2500 < max(sizes) <= 5000


@EXHAUSTIVE
def test_two_processes_stay_within_one_bound(tmp_path, monkeypatch):
    children = []
    for number in (0, 1):
        child = os.fork()
        if not child:
            try:
                write_pieces(tmp_path, number, monkeypatch)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]


# -- stores that are away, and other mistakes


@EXHAUSTIVE
def test_a_store_that_is_away_for_a_while_changes_nothing(home, store, linked):
    folder, reading = linked
    store.failing = 1.0
    threading.Timer(0.3, lambda: setattr(store, "failing", 0.0)).start()
    assert read_all(folder, reading) == (home / "bucket/web/train.bin").read_bytes()


def test_a_store_that_stays_away_is_one_line(store, linked):
    folder, reading = linked
    store.failing = 1.0
    with pytest.raises(OSError, match=r"bucket/web: .*asked for train\.bin for \d+ s \(data\.retry_minutes\)") as error:
        read_all(folder, reading._replace(retry_s=0.2))
    assert "\n" not in str(error.value) and store.url in str(error.value)


@EXHAUSTIVE
def test_a_wait_for_a_store_ends_with_the_loop(store, linked):
    folder, reading = linked
    rows = data.TokenStream(data.open_tokens(folder, "train", reading), 64, 4)
    store.failing = 1.0
    batches = token_stream.prefetch(rows.batch_at)
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_stream.queue.Queue, "get", interrupted)
        next(batches)
    begun = time.monotonic()
    batches.close()
    assert time.monotonic() - begun < 5 and not any(t.name == "fzero-prefetch" for t in threading.enumerate())


def interrupted(*_):
    time.sleep(0.2)
    raise KeyboardInterrupt


def change(folder, name, make):
    path = folder / name
    path.write_bytes(make(path.read_bytes()))


@pytest.fixture
def copied(home, tmp_path):
    """A store of the smaller corpus, to be changed; its URL."""
    (tmp_path / "store").mkdir()
    for path in (home / "bucket" / "code").iterdir():
        (tmp_path / "store" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "store", f"file://{tmp_path}/store"


MISTAKES = {
    "no corpus": (lambda f: (f / "meta.json").unlink(), r"meta\.json: no such file; file://.* is not a prepared"),
    "no json": (lambda f: change(f, "meta.json", lambda raw: raw[:50]), r"meta\.json"),
    "no tokens": (lambda f: (f / "train.bin").unlink(), r"train\.bin: no such object"),
    "cut tokens": (lambda f: change(f, "val.bin", lambda raw: raw[:-1]), r"val\.bin: truncated"),
    "no sums": (lambda f: (f / "val.sums").unlink(), r"val\.sums: no such"),
    "wrong sums": (lambda f: change(f, "val.sums", lambda raw: b"\1" + raw[1:]), r"val\.sums: damaged|val\.sums"),
    "wrong documents": (lambda f: change(f, "val.docs", lambda raw: raw[:9] + b"\7" + raw[10:]), r"val\.docs: damaged"),
    "cut documents": (lambda f: change(f, "val.docs", lambda raw: raw[:-8]), r"val\.docs: truncated"),
    "a kind": (
        lambda f: change(f, "meta.json", lambda raw: json.dumps(json.loads(raw) | {"kind": "chat"}).encode()),
        "is a corpus of chat",
    ),
    "old": (
        lambda f: change(f, "meta.json", lambda raw: json.dumps(json.loads(raw) | {"sums": 0}).encode()),
        r"meta\.json",
    ),
}


FIRST = ("no corpus", "no tokens", "wrong documents")


@pytest.mark.parametrize("what", [*FIRST, *(pytest.param(n, marks=EXHAUSTIVE) for n in MISTAKES if n not in FIRST)])
def test_what_is_no_sound_corpus_is_one_line(copied, tmp_path, what):
    folder, url = copied
    MISTAKES[what][0](folder)
    with pytest.raises(ValueError, match=MISTAKES[what][1]) as error:
        data.link_url(url, tmp_path / "out")
    assert "\n" not in str(error.value) and str(tmp_path / "store") in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_a_corpus_that_has_changed_since(copied, tmp_path):
    folder, url = copied
    data.link_url(url, tmp_path / "data")
    assert corpus.corpus_digest(tmp_path / "data")
    reading = Reading(tmp_path / "cache", piece=SMALL)
    change(folder, "train.bin", lambda raw: raw[:100] + b"?" + raw[101:])
    with pytest.raises(
        ValueError, match=r"store/train\.bin: damaged, or changed since the run began: its bytes from 0"
    ):
        read_all(tmp_path / "data", reading)
    change(folder, "meta.json", lambda raw: raw + b"\n")
    with pytest.raises(ValueError, match="has changed since the run began; put that corpus back"):
        corpus.corpus_digest(tmp_path / "data")
    (folder / "train.bin").unlink()
    with pytest.raises(OSError, match=r"train\.bin: no such object"):
        read_all(tmp_path / "data", reading)


@pytest.mark.parametrize(
    "table, said",
    [
        ({"data": {"path": "s3://b/c", "cache_gb": 0.0001}}, "data.cache_gb is 0.0001; a cache has 0.00105 GB"),
        ({"data": {"mixture": "s3://b/c:1", "retry_minutes": 10.0}}, "data.retry_minutes is 10 and train.hang_s 600 s"),
        ({"data": {"path": "s3://b/c"}, "objective": "chat"}, "objective is chat"),
    ],
)
def test_values_that_do_not_go_together(table, said):
    with pytest.raises(ValueError, match=said):
        from_table({"preset": "llama-tiny", **table})


# -- S3, as moto serves it, and whole runs


@pytest.fixture
def bucket(home, server, s3, monkeypatch):  # noqa: F811
    """A Store before S3's, with the corpora in a bucket of it."""
    for path in (home / "bucket").rglob("*"):
        if path.is_file():
            Objects(f"s3://{BUCKET}/corpora").write(str(path.relative_to(home / "bucket")), path.read_bytes())
    with serving(server) as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
        yield served


TINY = (
    *("--model", "mlp-tiny", "--batch", 8, "--micro-batch", 2, "--seq-len", 32, "--steps", 8),
    *("--precision", "fp32", "--peak-tflops", 1, "--prompt", "", "--set", "train.compiled=false"),
    *("--set", "precision.fp32_matmul=default", "--set", "train.eval_batches=2", "--set", "train.checkpoint_every=3"),
    *("--set", "train.eval_every=4", "--set", "train.digest_every=1"),
)


def rows(run):
    names = ("step", "loss", "val_loss", "digest")
    return [[row.get(name) for name in names] for row in run_folder.read_metrics(run)]


@WITHOUT
@EXHAUSTIVE
def test_a_run_on_s3_is_the_run_on_a_folder(home, bucket, fz, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bucket.latency, bucket.failing = 0.05, 0.05
    code, _, err = fz("pretrain", *TINY, "--data", home / "bucket" / "web", "--out", "local")
    assert code == 0, err
    where = ("--set", "data.cache=cache", "--set", "data.cache_gb=0.0011")
    url = f"s3://{BUCKET}/corpora/web"
    code, out, err = fz("pretrain", *TINY, *where, "--data", url, "--out", "run", "--stop-at", 4)
    assert code == 0 and url in out and "read by pieces" in out, err
    code, _, err = fz("pretrain", "--out", "run", "--resume", "--peak-tflops", 1, "--prompt", "")
    assert code == 0, err
    assert rows(tmp_path / "run") == rows(tmp_path / "local")
    assert 0 < used(tmp_path / "cache") <= 1_100_000
    assert "web" in fz("data", "show", "run", "--step", 3)[1]


@WITHOUT
@EXHAUSTIVE
def test_a_run_whose_store_goes_away_ends_with_one_line_and_is_resumed(home, bucket, fz, tmp_path, monkeypatch, quick):
    monkeypatch.chdir(tmp_path)
    assert fz("pretrain", *TINY, "--data", home / "bucket" / "web", "--out", "local")[0] == 0

    def leave(path, start, found):
        if len(bucket.ranges("train.bin")) >= 6:
            bucket.failing = 1.0
        return found

    bucket.damage = leave
    url = f"s3://{BUCKET}/corpora/web"
    where = ("--set", "data.cache=cache", "--set", "data.cache_gb=0.0011", "--set", "data.retry_minutes=0.01")
    code, _, err = fz("pretrain", *TINY, *where, "--data", url, "--out", "run")
    assert code == 2 and len(err.splitlines()) == 1, err
    assert url in err and "asked for train.bin" in err and "resume the run when the store is back" in err, err
    again = ("pretrain", "--out", "run", "--resume", "--peak-tflops", 1, "--prompt", "")
    code, _, err = fz(*again)
    assert code == 2 and len(err.splitlines()) == 1 and url in err, err  # still away
    bucket.be_sound()
    code, _, err = fz(*again)
    assert code == 0, err
    assert rows(tmp_path / "run") == rows(tmp_path / "local")


@EXHAUSTIVE
def test_a_run_on_two_ranks_by_torchrun(home, fz, tmp_path, monkeypatch):
    """With one small cache for both; the rows, and the bits of the parameters after each step, are those of one process
    on a folder."""
    monkeypatch.chdir(tmp_path)
    canonical = (*TINY, "--reduce", "canonical")
    assert fz("pretrain", *canonical, "--data", home / "bucket" / "web", "--out", "local")[0] == 0
    where = ("--set", "data.cache=cache", "--set", "data.cache_gb=0.0011")
    url = f"file://{home}/bucket/web"
    torchrun(tmp_path, 2, *canonical, *where, "--data", url, "--out", "run", "--mesh", "dp=2")
    assert rows(tmp_path / "run") == rows(tmp_path / "local")
    assert 0 < used(tmp_path / "cache") <= 1_100_000


@EXHAUSTIVE
@pytest.mark.parametrize("seed", range(9))
def test_the_law_of_data_holds_for_a_mixture_of_urls(law, tmp_path, seed):  # noqa: F811
    """Kills at any steps, a batch that grows, sources that end, on dp 1, 2 and 4: the rows of a process on folders."""
    config = test_data_law.config_of(law)
    path = law / "data"
    if not path.exists():
        corpus.find_corpus(config, law, print)
    own = replace(config.data, mixture=config.data.mixture.replace(f"{law}/", f"file://{law}/"), cache=str(tmp_path))
    config = replace(config, data=own)
    found = corpus.find_corpus(config, tmp_path / "run", print)
    made = test_data_law.one_process(test_data_law.config_of(law), path)
    assert test_data_law.killed_and_resumed(config, found, random.Random(seed)) == made


@WITHOUT
@EXHAUSTIVE
def test_mistakes_with_s3_are_one_line(home, bucket, server, fz, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)

    def refused(url, *said):
        code, _, err = fz("pretrain", *TINY, "--data", url, "--out", "run")
        assert code == 2 and len(err.splitlines()) == 1 and all(one in err for one in said), err
        assert not (tmp_path / "run").exists()

    refused("s3://no-such-bucket/web", "s3://no-such-bucket/web", "bucket")
    refused(f"s3://{BUCKET}/nothing", f"s3://{BUCKET}/nothing/meta.json: no such file")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    ask(f"{server}/moto-api/reset-auth", "POST", b"0")  # from now on each request is looked at
    try:
        refused(f"s3://{BUCKET}/corpora/web", f"s3://{BUCKET}/corpora/web", "check the credentials")
    finally:
        ask(f"{server}/moto-api/reset-auth", "POST", b"inf")
