"""C++ that is compiled when it is first used, and kept in Inductor's cache."""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
from pathlib import Path

# What Inductor's own flags leave out: it has vectorised its loops itself, and these are plain ones.
VECTORISED = ("-ftree-loop-vectorize", "-fno-math-errno")
# Every operation is rounded by itself, whatever Inductor is told for its own code.
EXACT = ("-ffp-contract=off", "-fno-unsafe-math-optimizations", "-fsigned-zeros")
CONTRACTED = ("-ffp-contract=fast",)


def have_compiler() -> bool:
    """Whether g++, which Inductor asks for, is on PATH."""
    return shutil.which("g++") is not None


@functools.cache
def library(module: str, rounding: tuple[str, ...]) -> ctypes.CDLL:
    """The .cpp file beside a module (its `__file__`), compiled; rounding: EXACT, or CONTRACTED for sums of products rounded once."""
    from torch._inductor.codecache import CppCodeCache

    wide = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
    return CppCodeCache.load(Path(module).with_suffix(".cpp").read_text(), extra_flags=(*VECTORISED, *rounding, *wide))
