"""Answers kept in files: what one process compiled, a later one finds again without asking the compiler.

An answer is a table of JSON beside the digests of the files that it names, under a digest of its question;
`platform_facts` is the part that all questions share. An entry that cannot be read, answers another question, or whose
files have changed, is none. The folder is within Inductor's cache, and can be removed at any time.
"""

# With torch's own caches alone the first step of a second run takes 5 to 8 s, not 0.5: they begin behind the trace.

from __future__ import annotations

import contextlib
import functools
import getpass
import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from fzero.core.files import make_folder, replacing, writing
from fzero.core.text_parsing import in_form, read_json

PACKAGE = Path(__file__).parents[1]
# Environment variables that choose what is traced and compiled.
READ_BY_LIBRARIES = (
    *("FZERO_", "TORCH", "PYTORCH", "TRITON", "CXX"),
    *("ATEN_", "DNNL_", "MKL_", "ONEDNN_"),  # which instructions there are, and so which forms serve
)
# Of them, those that say where results are kept, and which attempt of a launcher this is.
IGNORED_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "FZERO_PLAN_CACHE", "FZERO_WARM_UP", "FZERO_TRACEBACK", "TORCHELASTIC_")


def cache_folder() -> Path:
    """The folder of Inductor's cache, as torch has it, found without importing torch."""
    if override := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(override)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        user = str(os.getuid())
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


@functools.cache
def package_digest() -> str:
    """The digest of all files of this package, which an edit changes."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h", ".json") and path.is_file():
            digest.update(f"{path.relative_to(PACKAGE)}\n{path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def processor() -> str:
    """The processor's name and instructions, on which the compiler's -march=native depends."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    fields = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
    selected = {line for line in lines if line.partition(":")[0].strip() in fields}
    return "\n".join(sorted(selected)) or f"{platform.machine()} {platform.processor()} {platform.node()}"


def platform_facts() -> dict[str, Any]:
    """The machine and versions, on which every answer of a compiler depends besides its source."""
    return {
        "processor": processor(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "torch at": str(Path(str(metadata.distribution("torch").locate_file("torch")))),
    }


def environment_variables() -> dict[str, str]:
    """The variables that choose what is traced, and what Inductor makes of it."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(READ_BY_LIBRARIES) and not name.startswith(IGNORED_VARIABLES)
    }


_ALLOWED: list[bool] = []


def allow_programs() -> None:
    """From now on this process keeps compiled programs, and takes kept ones (see program_cache, which is heavy)."""
    _ALLOWED.append(True)


def programs_allowed() -> bool:
    """Whether `allow_programs` was called."""
    return bool(_ALLOWED)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def folder() -> Path:
    """Where answers are kept."""
    return cache_folder() / "fzero"


def _path(question: str) -> Path:
    return folder() / f"{_digest(question.encode())[:32]}.json"


@contextlib.contextmanager
def single_flight(question: str) -> Iterator[None]:
    """A context in which the first process with a question is alone on this machine; the others wait for it."""
    import fcntl

    lock_path = _path(question).with_suffix(".lock")
    make_folder(lock_path.parent)
    with writing(lock_path, "update") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def load_answer(question: str) -> dict[str, Any] | None:
    """The answer kept for a question; None if there is none that can be trusted."""
    path = _path(question)
    try:
        table = read_json(path)
        with in_form(str(path)):
            answer, files = table["answer"], table["files"]
            sound = table["question"] == question and table["digest"] == _digest(json.dumps([answer, files]).encode())
            if sound and all(_digest(Path(file).read_bytes()) == digest for file, digest in files.items()):
                return answer
    except (OSError, ValueError):
        pass
    return None


def store(question: str, answer: Mapping[str, Any], files: Sequence[str] = ()) -> None:
    """Keep an answer, a table of JSON, that is right while `files` have their bytes; nothing if unwritable."""
    path = _path(question)
    with contextlib.suppress(OSError):
        digests = {file: _digest(Path(file).read_bytes()) for file in files}
        digest = _digest(json.dumps([answer, digests]).encode())
        text = json.dumps({"question": question, "digest": digest, "files": digests, "answer": answer})
        make_folder(path.parent)
        with replacing(path, cache=True) as file:
            file.write(text.encode())
