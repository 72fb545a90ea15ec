"""Compile kernels for a GPU, without having one, and check the machine code; `python -m fzero.cli.aot` does all.

The machine code shows what the interpreter cannot: registers spilled to memory, too much shared memory, unused tensor
cores, narrow loads. Triton's wheel contains everything needed, including ptxas. Each file of this package lists its
kernels and their block configurations in `builds()`.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fzero.kernels.custom_operator  # noqa: F401  (which settles how Triton fuses)
from fzero.core.files import writing
from fzero.kernels.custom_operator import VERSION, triton

FILES = (
    "attention_flash",
    "attention_flash_backward",
    "attention_masked_triton",
    "attention_spans",
    "cross_entropy_triton",
    "dropout",
    "float8",
    "float8_gather",
    "glu",
    "grad_norm",
    "linear_triton",
    "moe",
    "moe_float8",
    "moe_permute",
    "moe_routing",
    "newton_schulz",
    "norm_triton",
    "optim_multi_tensor",
    "paged_attention_triton",
    "quantize",
    "rope",
)


class Build(NamedTuple):
    """One kernel with one configuration, to be compiled and checked."""

    label: str  # the kernel and what distinguishes this build
    kernel: str  # its name in the file
    signature: dict[str, str]  # its arguments in order: "*bf16", "*fp32", "i32", "i64", "fp32" or "constexpr"
    constants: dict[str, Any]
    config: dict[str, int]  # block sizes, and num_warps, num_stages
    matrix: bool = False  # the matrix units must be used (wgmma on sm_90)
    wide: bool = (
        True  # at least half of the loads and stores must be of 128 bits: pointers and `aligned` are multiples of 16
    )
    aligned: tuple[str, ...] = ()  # integer arguments that are multiples of 16
    spills: int = 0  # bytes that any version may spill; above 0 only with a reason in a comment (see KNOWN_SPILLS)


def build(
    kernel: Any,
    variant: str,
    config: dict[str, int],
    constants: dict[str, Any],
    types: str = "",
    default: str = "*bf16",
    **checks: Any,
) -> Build:
    """The Build of a kernel by its own list of arguments.

    variant: what distinguishes this build. types: "NAME:type" of the arguments that are not as follows: what the kernel
    says to be a constant is one, a name that begins with a capital is a pointer of type `default`, and others are i32.
    checks: fields of Build.
    """
    special = dict(item.split(":") for item in types.split())
    constant_names, name = kernel.fn.__annotations__, kernel.__name__

    def type_of(argument: str) -> str:
        usual = "constexpr" if argument in constant_names else default if argument[0].isupper() else "i32"
        return special.get(argument, usual)

    signature = {argument: type_of(argument) for argument in kernel.arg_names}
    return Build(f"{name} {variant}".rstrip(), name, signature, constants, config, **checks)


# Bytes at most that a version of Triton spills of a build for sm_90, where others spill none: this costs time and no
# digit. Labels are whole; whatever else spills is a fault.
KNOWN_SPILLS: dict[tuple[int, ...], dict[str, int]] = {
    (3, 6): {
        "_flash_forward 128 128x64 bf16 bigbird documents at": 4,
        "_flash_dkv 128 32x128 bf16 bigbird documents at": 24,
    },
    (3, 8): {"_flash_dq 256 128x32 bf16 full": 12, "_update_blocks adamw copy 2048": 8},
    (3, 9): {"_flash_dkv 256 32x64 bf16 window documents at": 160},
}


class Arch(NamedTuple):
    """A GPU as a compilation target: its limits, and the instructions to look for in its code."""

    target: tuple[str, int | str, int]  # Triton's backend, the architecture, threads of a warp
    shared: int  # bytes of shared memory that a block may have
    matrix: str  # instructions of the matrix units
    access: str  # accesses to global memory
    wide: str  # those of 128 bits
    gpu: str  # the name of one, by whose table block sizes are chosen (see kernels.tuning)


PTX_ACCESS = r"(?:ld|st)\.global[^\n]*|cp\.async\.c[ag][^\n]*|cp\.async\.bulk\.tensor[^\n]*"
PTX_WIDE = r"\.v4\.b32|\.v2\.b64|, 0x10\b|, 16\b|bulk"
# Shared memory: CUDA programming guide, table of compute capabilities; CDNA 3 ISA, local data share.
ARCHS = {
    "sm_90": Arch(("cuda", 90, 32), 232448, r"wgmma\.mma_async", PTX_ACCESS, PTX_WIDE, "NVIDIA H100"),
    "sm_80": Arch(("cuda", 80, 32), 166912, r"mma\.sync", PTX_ACCESS, PTX_WIDE, "NVIDIA A100"),
    "gfx942": Arch(
        ("hip", "gfx942", 64), 65536, r"v_mfma", r"(?:global|buffer)_(?:load|store)[^\n]*", r"_dwordx4", "AMD"
    ),
}


class CompiledBuild(NamedTuple):
    """The result of compiling a build, and its faults."""

    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    matrix: int  # instructions of the matrix units
    wide: int  # accesses to global memory of 128 bits
    accesses: int  # all
    wrong: str = ""  # "" for nothing


def compile_build(arch: Arch, file: str, build: Build) -> CompiledBuild:
    """Compile one build and read its code."""
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]  (it need not be installed)
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    kernel = getattr(importlib.import_module(f"fzero.kernels.{file}"), build.kernel)
    options = {
        name: value for name, value in build.config.items() if name not in build.signature
    }  # num_warps and the like
    constants = build.constants | {name: value for name, value in build.config.items() if name not in options}
    names = list(build.signature)
    attrs = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in build.signature.items()
        if kind.startswith("*") or name in build.aligned
    }
    source = ASTSource(fn=kernel, signature=build.signature, constexprs=constants, attrs=attrs)
    try:
        compiled = triton.compile(source, target=GPUTarget(*arch.target), options=options)
    except triton.compiler.errors.CompilationError as error:  # a type that this target lacks
        return failed(str(error).strip().splitlines()[-1])
    read = read_code(arch, compiled)
    faults = [
        f"{read.spilled} bytes spilled" if read.spilled > allowed_spills(build) else "",
        too_much_shared(arch, read.shared),
        "no matrix units" if build.matrix and not read.matrix else "",
        "narrow accesses" if build.wide and 2 * read.wide < read.accesses else "",
    ]
    return read._replace(wrong=", ".join(filter(None, faults)))


def allowed_spills(build: Build) -> int:
    """The bytes that the Triton that is installed may spill of a build.

    >>> allowed_spills(Build("label", "kernel", {}, {}, {}, spills=8))
    8
    """
    return max(build.spills, KNOWN_SPILLS.get(VERSION, {}).get(build.label, 0))


def read_code(arch: Arch, compiled: Any) -> CompiledBuild:
    """The properties of the machine code of a kernel that Triton has compiled for `arch`, without a judgement."""
    backend, architecture, _ = arch.target
    if backend == "cuda":
        code = compiled.asm["ptx"]
        registers, spilled = _assemble(code, int(architecture))
    else:
        code = compiled.asm["amdgcn"]
        registers, spilled = (
            int(re.findall(rf"\.{name}: +(\d+)", code)[-1]) for name in ("vgpr_count", "vgpr_spill_count")
        )
        spilled *= 4
    accesses = re.findall(arch.access, code)
    wide = sum(re.search(arch.wide, access) is not None for access in accesses)
    matrix = len(re.findall(arch.matrix, code))
    return CompiledBuild(registers, spilled, compiled.metadata.shared, matrix, wide, len(accesses))


def too_much_shared(arch: Arch, size: int) -> str:
    """The fault of a block with `size` bytes of shared memory; "" if it may have them."""
    return f"{size} bytes of shared memory, above {arch.shared}" if size > arch.shared else ""


def failed(reason: str) -> CompiledBuild:
    """The result of a kernel that does not compile: what the compiler said."""
    return CompiledBuild(0, 0, 0, 0, 0, 0, f"does not compile: {reason}")


def _assemble(ptx: str, capability: int) -> tuple[int, int]:
    """(registers of a thread, bytes spilled) by ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        with writing(source, "new") as file:
            file.write(ptx.encode())
        gpu = f"--gpu-name=sm_{capability}{'a' * (capability >= 90)}"
        options = [f"--maxrregcount={count}" for count in re.findall(r"\.maxnreg (\d+)", ptx)]
        command = [
            get_ptxas(capability).path,
            "-v",
            gpu,
            *options,
            str(source),
            "-o",
            str(source.with_suffix(".cubin")),
        ]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = max(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    return int(re.findall(r"Used (\d+) registers", log)[-1]), spilled


def builds(arch: Arch, pattern: str = "") -> Iterator[tuple[str, Build]]:
    """(file, build) of every kernel and configuration for a target, whose label contains `pattern`."""
    for file in FILES:
        for build in importlib.import_module(f"fzero.kernels.{file}").builds(arch.gpu):
            if pattern in build.label:
                yield file, build
