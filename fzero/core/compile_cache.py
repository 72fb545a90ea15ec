"""What one process compiled, kept in files: a later one finds it without asking the compiler. And the compiler of C++.

An answer is a table of JSON beside the digests of the files that it names, under a digest of its question;
`platform_facts` is the part that all questions share. An entry that cannot be read, answers another question, or whose
files have changed, is none. The folder is within Inductor's cache, and can be removed at any time.

The .cpp file beside a module is compiled when it is first used on a machine. g++ is called alone, with the flags that
Inductor gives its own loops, so that neither Inductor nor torch is imported. Elsewhere than on Linux Inductor compiles
the file.
"""

# With torch's own caches alone the first step of a second run takes 5 to 8 s, not 0.5: they begin behind the trace.

from __future__ import annotations

import contextlib
import ctypes
import functools
import getpass
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
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


def entry_path(question: str, where: Path | None = None) -> Path:
    """The file of the answer to a question, in the folder `where` (None: `folder`)."""
    return (where or folder()) / f"{_digest(question.encode())[:32]}.json"


@contextlib.contextmanager
def single_flight(question: str) -> Iterator[None]:
    """A context in which the first process with a question is alone on this machine; the others wait for it."""
    import fcntl

    lock_path = entry_path(question).with_suffix(".lock")
    make_folder(lock_path.parent)
    with writing(lock_path, "update") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def load_answer(question: str, where: Path | None = None) -> dict[str, Any] | None:
    """The answer kept for a question in a folder, see `entry_path`; None if there is none that can be trusted."""
    path = entry_path(question, where)
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
    with contextlib.suppress(OSError):
        write_answer(question, answer, files)


def write_answer(
    question: str,
    answer: Mapping[str, Any],
    files: Sequence[str] = (),
    where: Path | None = None,
    max_bytes: float = math.inf,
) -> None:
    """`store` of an answer of at most so many bytes in a folder; raises OSError if that cannot be written."""
    path, digests = entry_path(question, where), {file: _digest(Path(file).read_bytes()) for file in files}
    digest = _digest(json.dumps([answer, digests]).encode())
    text = json.dumps({"question": question, "digest": digest, "files": digests, "answer": answer})
    if len(text) <= max_bytes:
        make_folder(path.parent)
        with replacing(path, cache=True) as file:
            file.write(text.encode())


# EXACT rounds every operation separately. CONTRACTED lets the compiler fuse a product and a sum, which are then rounded
# once.
EXACT = ("-ffp-contract=off", "-fno-unsafe-math-optimizations", "-fsigned-zeros")
CONTRACTED = ("-ffp-contract=fast",)
# Inductor's: each flag, in this order, as some undo a part of others.
_MATH = (
    *("-fno-trapping-math", "-funsafe-math-optimizations", "-ffinite-math-only", "-fno-signed-zeros"),
    *("-fno-finite-math-only", "-fno-unsafe-math-optimizations", "-fmath-errno", "-ffp-contract=off"),
    *("-fexcess-precision=fast", "-fno-tree-loop-vectorize", "-march=native"),
)
# It switches off automatic vectorisation, because it vectorises its own loops; ours are plain loops that need it.
_VECTORISED = (
    "-ftree-loop-vectorize",
    "-fno-math-errno",
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
_ALL = ("-O3", "-DNDEBUG", *_MATH, "-shared", "-fPIC", "-std=c++20", "-fopenmp", *_VECTORISED)


def compiler() -> str:
    """The path of the C++ compiler of this machine, "" for none."""
    return next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), "")


@functools.cache
def library(module: str, rounding: tuple[str, ...], macro: str = "") -> ctypes.CDLL:
    """The library of the .cpp file beside a module, compiled or kept; raises RuntimeError if that fails."""
    if platform.system() == "Linux" and shutil.which("g++"):
        return library_by_gcc(module, rounding, macro)
    from fzero.core.torch_private import CppCodeCache

    trust_vector_flags()
    flags = (*_VECTORISED, *rounding, *_macros(macro))
    return CppCodeCache.load(source_of(Path(module).with_suffix(".cpp")), extra_flags=flags)


@functools.cache
def library_by_gcc(module: str, rounding: tuple[str, ...], macro: str = "") -> ctypes.CDLL:
    """`library` by g++ alone."""
    return ctypes.CDLL(compiled_by_gcc(module, rounding, macro))


def compiled_by_gcc(module: str, rounding: tuple[str, ...], macro: str = "") -> str:
    """The file of the library that g++ makes of the .cpp file beside a module, needing no torch."""
    source = Path(module).with_suffix(".cpp")
    text, flags = source_of(source), (*_ALL, *rounding, *_macros(macro))
    torch = Path(str(metadata.distribution("torch").locate_file("torch")))
    if "#include <ATen" in text:
        flags = (*flags, f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include")
        flags = (*flags, f"-L{torch}/lib", "-ltorch_cpu", "-lc10")
    question = json.dumps(platform_facts() | {"source": text, "flags": flags}, sort_keys=True)
    with single_flight(question):
        if (answer := load_answer(question)) is not None:
            return answer["library"]
        with tempfile.TemporaryDirectory(prefix="fzero-") as folder:
            output = Path(folder, "library.so")
            run = subprocess.run(["g++", str(source), "-o", str(output), *flags], capture_output=True, text=True)
            if run.returncode:
                raise RuntimeError(f"g++ does not compile {source}: {run.stderr.strip()[-2000:]}")
            return _store_library(question, output.read_bytes())


def source_of(path: Path) -> str:
    """The text of a .cpp file, with each header beside it in place of its #include."""
    return re.sub(r'(?m)^#include "(.+)"$', lambda match: (path.parent / match[1]).read_text(), path.read_text())


def _macros(macro: str) -> tuple[str, ...]:
    return (f"-D{macro}",) if macro else ()


def _store_library(question: str, content: bytes) -> str:
    """Write a library as the answer of a question to its folder, and return its file."""
    path = folder() / f"{hashlib.sha256(content).hexdigest()[:32]}.so"
    with replacing(path, cache=True) as file:
        file.write(content)
    store(question, {"library": str(path)}, [str(path)])
    return str(path)


@functools.cache
def trust_vector_flags() -> None:
    """Let Inductor take the vector instructions from the CPU's own list if the compiler knows all their flags."""
    # Otherwise it compiles and loads a program with torch's headers for each of them, seconds in every process. It
    # finds the same instructions either way.
    from fzero.core.torch_private import inductor_config, supported_vec_isa_list

    program = compiler()
    if inductor_config.cpp.vec_isa_ok is not None or platform.machine() != "x86_64" or not program:
        return
    instruction_sets = [isa for isa in supported_vec_isa_list if "avx" in str(isa)]  # the others are ARM's
    flags = sorted({flag for isa in instruction_sets for flag in isa.build_arch_flags().split()})
    probe = subprocess.run([program, *flags, "-fsyntax-only", "-x", "c++", "-"], input=b"", capture_output=True)
    if probe.returncode == 0:
        inductor_config.cpp.vec_isa_ok = True


@functools.cache
def vector_instructions() -> str:
    """The flags of the vector instructions that Inductor compiles for; once they are known, threads may compile."""
    from fzero.core.torch_private import pick_vec_isa

    trust_vector_flags()
    return pick_vec_isa().build_arch_flags()


@functools.cache
def have_compiler() -> bool:
    """Whether Inductor can compile here: a C++ compiler, or Triton; warns once if not."""
    if not compiler():
        warnings.warn(
            "no C++ compiler (g++ or clang++) is on PATH: blocks run uncompiled, slower and with the same numbers",
            stacklevel=2,
        )
    return compiler() != ""
