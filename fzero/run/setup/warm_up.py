"""Compile the C++ forms that every first step here needs, in a process beside a run that reads its data.

`begin` starts it if this machine has no such results yet; they are kept (core/compile_cache). `python -m
fzero.run.setup.warm_up` does it at once, for an image of a machine. What fails here the run compiles again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import fzero
from fzero.core.compile_cache import PACKAGE, cache_folder, processor
from fzero.core.files import open_to_write


def mark() -> Path:
    """The file that says that a warm-up has ended, for these versions of fzero, torch and Python."""
    versions = f"{fzero.__version__}-{metadata.version('torch')}-{sys.version_info[0]}.{sys.version_info[1]}"
    return cache_folder() / f"fzero-warm-{versions}"


def begin() -> subprocess.Popen | None:
    """Start the warm-up if this machine has had none and can compile; return its process."""
    enabled = os.environ.get("FZERO_WARM_UP", "1") != "0" and os.environ.get("LOCAL_RANK", "0") == "0"
    if not enabled or not any(shutil.which(name) for name in ("g++", "clang++", "c++")) or mark().exists():
        return None
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", "fzero.run.setup.warm_up"]
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)


def main() -> None:
    """Compile, then leave the mark."""
    from concurrent.futures import ThreadPoolExecutor

    from fzero.core.compile_cache import compiled_by_gcc

    with ThreadPoolExecutor(2) as pool:  # g++ computes, in processes of its own
        for build in [pool.submit(compiled_by_gcc, *form) for form in forms()]:
            build.result()
    os.close(open_to_write(mark(), "replace"))


def forms() -> list[tuple[str, tuple[str, ...], str]]:
    """(module file, rounding, part) of the C++ that a run compiles, the longest first."""
    from fzero.core.compile_cache import CONTRACTED, EXACT

    dtype = "bfloat16" if {"amx_bf16", "avx512_bf16"} & set(processor().split()) else "float32"
    return [
        (str(PACKAGE / "kernels" / "attention_tiled.py"), CONTRACTED, f"OF_{dtype}"),
        (str(PACKAGE / "kernels" / "optim_leaf.py"), EXACT, ""),
        (str(PACKAGE / "kernels" / "cross_entropy.py"), CONTRACTED, ""),
        (str(PACKAGE / "core" / "prng.py"), EXACT, ""),
    ]


if __name__ == "__main__":
    main()
