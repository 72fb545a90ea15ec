"""A disk that is full, wherever fzero writes: the error names the file."""

import ast
import errno
import json
import os
import re
import resource
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

import fzero
from fzero import checkpoint, data
from fzero.checkpoint.convert.tensor_files import TensorEntry, write_safetensors
from fzero.core import naming, write_text
from fzero.data.remote_tokens import PieceCache
from fzero.offload.buffer_pool import FileWriter
from fzero.planner import search
from fzero.run import config_table, run_folder, run_lock
from fzero.run.measure import metrics_rows

ROOT = Path(fzero.__file__).parent
W = torch.arange(3e5)


@contextmanager
def room(size):
    """A context in which no file of this process may grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def a_corpus(folder):
    (folder / "text.txt").write_text("some text " * 50)
    return lambda: data.prepare(folder / "text.txt", folder / "corpus")


def metrics(folder):
    def write():
        row = {"loss": 1.0, "step_s": 1.0, "tokens_per_s": 1.0, "mfu": 0.1, "step": 1, "skipped": False}
        with metrics_rows.metrics_writer(folder, 0, lambda row: None, (), {}) as record:
            record({**row, "more": "x" * 1000})

    return write


def a_part(folder):
    with closing(FileWriter(folder, "part", 0)) as file:
        file.write_at(torch.zeros(1 << 16, dtype=torch.uint8), 1 << 16, 0)


CONFIG = config_table.from_table({"preset": "llama-tiny"})
WRITERS = {
    "a text": lambda folder: lambda: write_text(folder, "x.json", "x" * 1000),
    "a corpus": a_corpus,
    "a part of a checkpoint": lambda folder: lambda: a_part(folder),
    "safetensors": lambda folder: (
        lambda: write_safetensors(folder / "x.safetensors", {"w": TensorEntry(W.dtype, W.shape, lambda: W)})
    ),
    "a run": lambda folder: lambda: run_folder.create_run(folder, CONFIG, None, corpus="c" * 100),
    "a config": lambda folder: lambda: search.write_config(CONFIG, folder / "config.json"),
    "a piece of a cache": lambda folder: lambda: PieceCache(folder, 10**6).write("a/0", bytes(1000)),
    "a lock": lambda folder: lambda: run_lock.acquire(folder),
    "rows of metrics": metrics,
}


@pytest.mark.parametrize("what", WRITERS)
def test_the_error_of_a_full_disk_names_the_file(what, tmp_path):
    write = WRITERS[what](tmp_path)
    with room(10), pytest.raises(OSError) as error:
        write()
    assert error.value.errno == errno.EFBIG
    assert str(error.value.filename).startswith(str(tmp_path)) and str(error.value.filename) in str(error.value)


@pytest.mark.parametrize("size", [10, 1000, 40_000, 200_000])
@pytest.mark.parametrize("compress", ["", "zstd"])
def test_a_checkpoint_that_finds_the_disk_full_names_the_file(size, compress, tmp_path):
    g = torch.Generator().manual_seed(0)
    state = {"large": torch.rand(300_000, generator=g), "small": torch.rand(30, generator=g)}
    checkpoint.save(tmp_path, {"a": torch.ones(1)}, step=1)
    with room(size), pytest.raises(checkpoint.SaveFailed) as error:
        checkpoint.save(tmp_path, state, step=2, compress=compress)
    text = str(error.value)
    assert f"(File too large ({tmp_path}" in text.replace(": File", ": (File") and "\n" not in text, text
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_an_error_that_names_a_file_keeps_it(tmp_path):
    with pytest.raises(FileNotFoundError) as error, naming("outer"), naming(tmp_path / "inner"):
        os.stat(tmp_path / "nowhere")
    assert error.value.filename == str(tmp_path / "nowhere")
    with pytest.raises(OSError, match="'inner'"), naming("outer"), naming("inner"), open("/dev/full", "wb", 0) as full:
        full.write(b"x")
    with pytest.raises(OSError) as error, naming("outer"):
        raise OSError("a message of its own")
    assert str(error.value) == "a message of its own"


# Functions that write and name the file, or its folder, in another way.
OTHERS = {
    "disk_io.py": "by the `failed` of who asks for the transfer, and in the benchmark by naming",
    "chunk_files.py": "by `failed`",
    "update_units.py": "by `failed`",
    "figures.py": "into memory",
    "start.py": "on the terminal",
}
CALLS = {"write_text", "write_bytes", "savefig", "pwrite", "pwritev", "posix_fallocate", "copyfileobj", "copyfile"}
RANGES = {"write_range", "allocate_space"}  # of disk_io.py
WORDS = re.compile(r"\bopen\(|fdopen|os\.write|" + "|".join(CALLS | RANGES))


def writes(node):
    """Whether a call writes a file, as far as its name tells."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    if name in ("open", "fdopen"):
        if node.args and "open_to_write(" in ast.unparse(node.args[0]):  # which names it
            return False
        return any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax") for mode in modes)
    if name == "write" and isinstance(node.func, ast.Attribute):
        return getattr(node.func.value, "id", "") == "os"
    return name in RANGES or (name in CALLS and isinstance(node.func, ast.Attribute))


def unnamed(tree):
    """The lines of calls that write outside of a `with naming(...)`, or of one that opens a file to write."""
    covered = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        and any(word in ast.unparse(item) for item in node.items for word in ("naming(", "writing(", "replacing("))
        for inner in ast.walk(node)
    }
    return [node.lineno for node in ast.walk(tree) if writes(node) and id(node) not in covered]


def test_every_place_that_writes_names_its_file():
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in ROOT.rglob("*.py")
        if path.name not in OTHERS and path.name != "files.py" and WORDS.search(text := path.read_text())
        for line in unnamed(ast.parse(text))
    }
    assert not found, (
        f"{sorted(found)}: write inside of `with naming(path)` of core/files.py, or by its `writing` and `replacing`"
    )
    assert unnamed(ast.parse("def f(path):\n    path.write_text('x')\n    open(path, 'wb')\n")) == [2, 3]


def test_rows_go_on_in_a_new_file_where_theirs_is_moved(tmp_path, capsys):
    with metrics_rows.metrics_writer(tmp_path, 0, lambda row: None, [], {}) as record:
        record({"step": 1})
        (tmp_path / "metrics.jsonl").rename(tmp_path / "moved")
        record({"step": 2})
        record({"step": 3})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [2, 3]
    assert [json.loads(line)["step"] for line in (tmp_path / "moved").read_text().splitlines()] == [1]
    assert capsys.readouterr().err == (
        f"fzero: {tmp_path}/metrics.jsonl: was moved or removed while the run goes on; the rows from step 2 on are in "
        "a new file\n"
    )
