"""Compile the .cpp file beside a module when it is first used on a machine.

g++ is called alone, with the flags that Inductor gives its own loops, so that neither Inductor nor torch is imported;
the result is kept (compile_cache). Elsewhere than on Linux Inductor compiles the file.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

from fzero.core import compile_cache
from fzero.core.files import replacing

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
    question = json.dumps(compile_cache.platform_facts() | {"source": text, "flags": flags}, sort_keys=True)
    with compile_cache.single_flight(question):
        if (answer := compile_cache.load_answer(question)) is not None:
            return answer["library"]
        with tempfile.TemporaryDirectory(prefix="fzero-") as folder:
            output = Path(folder, "library.so")
            run = subprocess.run(["g++", str(source), "-o", str(output), *flags], capture_output=True, text=True)
            if run.returncode:
                raise RuntimeError(f"g++ does not compile {source}: {run.stderr.strip()[-2000:]}")
            return _store_library(question, output.read_bytes())


def source_of(path: Path) -> str:
    """The text of a .cpp file, with that of each header beside it in the place of its #include."""
    return re.sub(r'(?m)^#include "(.+)"$', lambda match: (path.parent / match[1]).read_text(), path.read_text())


def _macros(macro: str) -> tuple[str, ...]:
    return (f"-D{macro}",) if macro else ()


def _store_library(question: str, content: bytes) -> str:
    """Write a library to the folder of kept ones, as the answer of a question, and return its file."""
    path = compile_cache.folder() / f"{hashlib.sha256(content).hexdigest()[:32]}.so"
    with replacing(path, cache=True) as file:
        file.write(content)
    compile_cache.store(question, {"library": str(path)}, [str(path)])
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
    """Whether Inductor can compile here: a C++ compiler for the CPU, or Triton for CUDA. Warns once if it cannot."""
    if not compiler():
        warnings.warn(
            "no C++ compiler (g++ or clang++) is on PATH: blocks run uncompiled, slower and with the same numbers",
            stacklevel=2,
        )
    return compiler() != ""
