"""Every loop of the C++ files that is marked for vectors is one on CPUs without AVX-512.

A choice between computed values is a branch to GCC where vectors have no masks: it leaves the loop scalar without a
word, and all results stay right.
"""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import fzero
from fzero.core import compile_cache

ROOT = Path(fzero.__file__).parent
PARTS = {"kernels/attention_tiled.cpp": ("OF_float32", "OF_bfloat16")}  # of a file, each a library of its own


def vectorised(path: Path, part: str) -> set[int]:
    """The lines at which g++ vectorises a loop, for CPUs with AVX2."""
    folder = Path(torch.__path__[0], "include")
    flags = [
        x
        for x in (*compile_cache._ALL, *compile_cache.CONTRACTED, *compile_cache._macros(part))
        if not x.startswith("-march")
    ]
    command = ["g++", *flags, "-march=x86-64-v3", f"-I{folder}", f"-I{folder}/torch/csrc/api/include"]
    command += ["-fopt-info-vec-optimized", "-S", "-o", "/dev/null", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {int(x) for x in re.findall(rf"{path.name}:(\d+):\d+: optimized: loop vectorized", told)}


def scalar_loops(path: Path, parts: tuple[str, ...]) -> list[str]:
    """The loops under `#pragma omp simd` that are not vectorised in any part of a file."""
    found = set().union(*(vectorised(path, part) for part in parts))
    lines = path.read_text().splitlines()
    marked = [n for n, line in enumerate(lines, 1) if line.strip().startswith("#pragma omp simd")]
    assert marked
    return [lines[n].strip() for n in marked if not found & {n + 1, n + 2, n + 3}]  # told at its head or in its body


need_gcc = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("g++"), reason="needs g++ on x86-64: it asks for AVX2's code"
)


@need_gcc
@pytest.mark.slow
@pytest.mark.parametrize("file", sorted(str(x.relative_to(ROOT)) for x in ROOT.rglob("*.cpp")))
def test_every_loop_that_is_marked_for_vectors_is_one_without_avx512(file):
    if "omp simd" not in (ROOT / file).read_text():
        pytest.skip("no loop is marked")
    assert scalar_loops(ROOT / file, PARTS.get(file, ("",))) == []


@need_gcc
@pytest.mark.slow
def test_a_choice_between_computed_values_is_found(tmp_path):
    branches = tmp_path / "branches.cpp"
    branches.write_text(
        "#include <cmath>\n"
        'extern "C" void root(float* x) {\n'
        "#pragma omp simd\n"
        "  for (int i = 0; i < 64; i++) x[i] = x[i] > 0.0f ? std::sqrt(x[i]) : x[i] * 0.0f;\n"
        "\n\n#pragma omp simd\n"
        "  for (int i = 0; i < 64; i++) x[i] = x[i] * 2.0f;\n"
        "}\n"
    )
    (loop,) = scalar_loops(branches, ("",))
    assert "sqrt" in loop
