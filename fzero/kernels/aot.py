"""Compile every kernel for a GPU that is not here, and check the code: `python -m fzero.kernels.aot [PATTERN]`.

What the interpreter cannot see shows in the machine code: registers spilled to memory, too much shared memory, tensor cores not used,
narrow loads. Triton's wheel holds all that is needed, ptxas included. Each file of this package lists its kernels and their block
configurations in `builds()`.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

SHARED_LIMIT = 232448  # bytes of a block on sm_90 (CUDA programming guide, table of compute capabilities)
FILES = ("attention", "cross_entropy", "dropout", "float8", "glu", "moe", "norm", "optimizers", "quantize", "rope")


class Build(NamedTuple):
    """One kernel with one configuration, to be compiled and checked."""

    label: str  # the kernel, and what is particular of this build
    kernel: str  # its name in the file
    signature: dict[str, str]  # its arguments in order: "*bf16", "*fp32", "i32", "i64", "fp32" or "constexpr"
    constants: dict[str, Any]
    config: dict[str, int]  # block sizes, and num_warps, num_stages
    wgmma: bool = False  # tensor cores must be used
    wide: bool = True  # loads and stores must be of 128 bits: pointers and the arguments in `aligned` are multiples of 16
    aligned: tuple[str, ...] = ()  # integer arguments that are multiples of 16
    spills: int = 0  # bytes spilled that are allowed; 0 unless there is a reason, to be said beside it


class Result(NamedTuple):
    """What the compiler made of a build, and what is wrong with it."""

    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    wgmma: bool
    wide: bool
    wrong: str  # "" for nothing


def compile_build(file: str, build: Build) -> Result:
    """Compile one build for sm_90 and read its code."""
    kernel = getattr(importlib.import_module(f"fzero.kernels.{file}"), build.kernel)
    options = {name: value for name, value in build.config.items() if name in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
    constants = build.constants | {name: value for name, value in build.config.items() if name not in options}
    names = list(build.signature)
    attrs = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in build.signature.items()
        if kind.startswith("*") or name in build.aligned
    }
    source = ASTSource(fn=kernel, signature=build.signature, constexprs=constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, spilled = _assemble(ptx)
    shared = compiled.metadata.shared
    wgmma = "wgmma.mma_async" in ptx
    wide = re.search(r"(ld|st)\.global[^\n]*\.v4\.b32|(ld|st)\.global[^\n]*\.v2\.b64|cp\.async[^\n]*, 16|cp\.async\.bulk", ptx) is not None
    faults = [
        f"{spilled} bytes spilled" if spilled > build.spills else "",
        f"{shared} bytes of shared memory, above {SHARED_LIMIT}" if shared > SHARED_LIMIT else "",
        "no wgmma" if build.wgmma and not wgmma else "",
        "no 128-bit access" if build.wide and not wide else "",
    ]
    return Result(registers, spilled, shared, wgmma, wide, ", ".join(filter(None, faults)))


def _assemble(ptx: str) -> tuple[int, int]:
    """(registers of a thread, bytes spilled) by ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = max(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", said))
    return int(re.findall(r"Used (\d+) registers", said)[-1]), spilled


def builds(pattern: str = "") -> Iterator[tuple[str, Build]]:
    """(file, build) of every kernel and configuration whose label contains `pattern`."""
    for file in FILES:
        for build in importlib.import_module(f"fzero.kernels.{file}").builds():
            if pattern in build.label:
                yield file, build


def main(arguments: Sequence[str]) -> int:
    """Print a line for each build; 1 where one falls short, 2 where none matches."""
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: nothing is compiled then; unset it", file=sys.stderr)
        return 2
    chosen = list(builds(*arguments[:1]))
    if not chosen:
        print(f"no kernel's label contains {arguments[0]!r}", file=sys.stderr)
        return 2
    width = max(len(build.label) for _, build in chosen)
    print(f"{'':{width}}  registers  spills  shared KiB  wgmma  128-bit")
    wrong = 0
    with ProcessPoolExecutor() as pool:
        for (_, build), result in zip(chosen, pool.map(compile_build, *zip(*chosen))):
            yes = ["yes" if flag else "-" for flag in (result.wgmma, result.wide)]
            sizes = f"{result.registers:9}  {result.spilled:6}  {result.shared / 1024:10.1f}"
            line = f"{build.label:{width}}  {sizes}  {yes[0]:>5}  {yes[1]:>7}"
            print(f"{line}  {result.wrong and 'WRONG: ' + result.wrong}".rstrip(), flush=True)
            wrong += bool(result.wrong)
    print(f"{len(chosen)} builds for sm_90, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
