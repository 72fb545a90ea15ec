"""C++ files beside modules, compiled when first used.

Through Inductor they may include torch's headers, and are kept in its cache; but that takes seconds to import and to
ask what the machine can do, which a program that compiles blocks takes anyway. What is plain C++ and wanted sooner goes
to g++ alone: half a second, in each process anew.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import subprocess
import tempfile
from pathlib import Path

# Every operation is rounded by itself, whatever Inductor is told for its own code; or a product and a sum are rounded
# once.
EXACT = ("-ffp-contract=off", "-fno-unsafe-math-optimizations", "-fsigned-zeros")
CONTRACTED = ("-ffp-contract=fast",)
# Inductor's own flags leave loops that it has vectorised itself as they are; these are plain ones.
_VECTORISED = (
    "-ftree-loop-vectorize",
    "-fno-math-errno",
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
_PLAIN = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-fopenmp", "-fno-trapping-math")


@functools.cache
def library(module: str, rounding: tuple[str, ...]) -> ctypes.CDLL:
    """The .cpp file beside a module (its `__file__`), from Inductor's cache."""
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(Path(module).with_suffix(".cpp").read_text(), extra_flags=(*_VECTORISED, *rounding))


@functools.cache
def library_by_gcc(module: str, rounding: tuple[str, ...]) -> ctypes.CDLL:
    """As `library`, of plain C++, by g++ alone. Raises RuntimeError with what g++ says where it does not compile."""
    source = Path(module).with_suffix(".cpp")
    with tempfile.TemporaryDirectory(prefix="fzero-") as folder:
        made = str(Path(folder, "library.so"))
        run = subprocess.run(
            ["g++", *_PLAIN, *_VECTORISED, *rounding, str(source), "-o", made], capture_output=True, text=True
        )
        if run.returncode:
            raise RuntimeError(f"g++ does not compile {source}: {run.stderr.strip()[-2000:]}")
        return ctypes.CDLL(made)
