"""Compile the .cpp file beside a module when it is first used.

`library` uses Inductor: the file may include torch's headers and the result stays in Inductor's cache, but importing
Inductor and probing the CPU takes seconds. `library_by_gcc` calls g++ alone, for plain C++: half a second, in every
process again.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

# EXACT rounds every operation separately, whatever flags Inductor sets for its own code. CONTRACTED lets the compiler
# fuse a product and a sum, which are then rounded once.
EXACT = ("-ffp-contract=off", "-fno-unsafe-math-optimizations", "-fsigned-zeros")
CONTRACTED = ("-ffp-contract=fast",)
# Inductor's flags switch off automatic vectorisation, because it vectorises its own loops; ours are plain loops that
# need it.
_VECTORISED = (
    "-ftree-loop-vectorize",
    "-fno-math-errno",
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
_PLAIN = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-fopenmp", "-fno-trapping-math")


@functools.cache
def library(module: str, rounding: tuple[str, ...]) -> ctypes.CDLL:
    """Compile the .cpp file beside a module (given by its `__file__`) through Inductor, or load it from Inductor's
    cache.
    """
    from fzero.core.torch_private import CppCodeCache

    trust_vector_flags()
    return CppCodeCache.load(Path(module).with_suffix(".cpp").read_text(), extra_flags=(*_VECTORISED, *rounding))


@functools.cache
def trust_vector_flags() -> None:
    """Let Inductor take the vector instructions from the CPU's own list if the compiler knows all their flags.

    Otherwise it compiles and loads a program with torch's headers for each of them, seconds in every process. It finds
    the same instructions either way.
    """
    from fzero.core.torch_private import inductor_config, supported_vec_isa_list

    compiler = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    if inductor_config.cpp.vec_isa_ok is not None or platform.machine() != "x86_64" or compiler is None:
        return
    here = [isa for isa in supported_vec_isa_list if "avx" in str(isa)]  # the others are ARM's
    flags = sorted({flag for isa in here for flag in isa.build_arch_flags().split()})
    known = subprocess.run([compiler, *flags, "-fsyntax-only", "-x", "c++", "-"], input=b"", capture_output=True)
    if known.returncode == 0:
        inductor_config.cpp.vec_isa_ok = True


@functools.cache
def library_by_gcc(module: str, rounding: tuple[str, ...]) -> ctypes.CDLL:
    """Compile the plain C++ file beside a module by g++ alone. Raises RuntimeError with g++'s message if that fails."""
    source = Path(module).with_suffix(".cpp")
    with tempfile.TemporaryDirectory(prefix="fzero-") as folder:
        made = str(Path(folder, "library.so"))
        run = subprocess.run(
            ["g++", *_PLAIN, *_VECTORISED, *rounding, str(source), "-o", made], capture_output=True, text=True
        )
        if run.returncode:
            raise RuntimeError(f"g++ does not compile {source}: {run.stderr.strip()[-2000:]}")
        return ctypes.CDLL(made)
