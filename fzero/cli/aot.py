"""`python -m fzero.cli.aot [PATTERN] [--arch sm_90] [--part kernels]`: compile every kernel that a run on a GPU
launches.

It needs no GPU, and checks the machine code: fzero's own, and what Inductor generates for compiled blocks.
"""

from __future__ import annotations

if __name__ == "__main__":  # before what takes seconds to import
    from fzero.cli.start import begin_imports

    begin_imports()

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import Future

from fzero.core.process_pool import Pool
from fzero.kernels import aot
from fzero.kernels.custom_operator import INSTALLED, MISSING, triton

PARTS = ("all", "kernels", "inductor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each build; return 1 for a fault, exit with 2 if none matches."""
    parser = argparse.ArgumentParser(
        prog="python -m fzero.cli.aot", description="Compile every kernel for a GPU and check the code."
    )
    parser.add_argument("pattern", nargs="?", default="", help="only builds whose label contains this")
    parser.add_argument(
        "--arch", choices=aot.ARCHS, help="default: sm_90, and sm_80 too for what Inductor generates of a Llama"
    )
    parser.add_argument(
        "--part", choices=PARTS, default="all", help="fzero's own kernels, or those that Inductor generates"
    )
    args = parser.parse_args(arguments)
    if not INSTALLED:
        parser.error(MISSING)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, and nothing is compiled then; unset it")
    # Not above: the processes that compile import this file too, and most of them need no planner.
    from fzero.planner import fake_inductor

    kernel_arch = args.arch or "sm_90"
    planned = [args.arch] if args.arch else list(fake_inductor.DEVICES)
    if args.part == "inductor" and planned[0] not in fake_inductor.DEVICES:
        device_names = ", ".join(fake_inductor.DEVICES)
        parser.error(f"--part inductor: what it generates for {args.arch} is not known here; choose {device_names}")
    used = dict.fromkeys(
        ([] if args.part == "inductor" else [kernel_arch]) + ([] if args.part == "kernels" else planned)
    )
    lines: list[tuple[str, Future[aot.CompiledBuild]]] = []
    with Pool() as pool:
        if args.part != "inductor":
            for file, build in aot.builds(aot.ARCHS[kernel_arch], args.pattern):
                lines.append((build.label, pool.submit(aot.compile_build, aot.ARCHS[kernel_arch], file, build)))
        if args.part != "kernels":  # planned here while the pool compiles
            for arch in planned:
                for model in _models(arch, chosen=bool(args.arch)):
                    for kernel in fake_inductor.generate_kernels(model, arch):
                        if args.pattern in kernel.label:
                            lines.append((kernel.label, pool.submit(fake_inductor.compile_generated, kernel)))
        if not lines:
            parser.error(f"no kernel's label contains {args.pattern!r}")
        wrong = sum(_say(label, max(len(label) for label, _ in lines), done.result()) for label, done in lines)
    print(f"{len(lines)} builds for {' and '.join(used)}, {wrong} wrong")
    return int(wrong > 0)


def _models(arch: str, *, chosen: bool) -> Sequence[str]:
    """The models whose compiled blocks are looked at; the others' differ from the first one's in block sizes."""
    from fzero.planner import fake_inductor

    names = list(fake_inductor.MODELS) if arch in fake_inductor.DEVICES else []
    return names if chosen or arch == next(iter(fake_inductor.DEVICES)) else names[:1]


def _say(label: str, width: int, r: aot.CompiledBuild) -> bool:
    """Print the line of a build; returns whether it has a fault."""
    sizes = f"{r.registers:3} registers  {r.spilled:5} spilled  {r.shared / 1024:5.1f} KiB shared"
    sizes += f"  {r.matrix or '-':>4} matrix  {r.wide:3} of {r.accesses:3} wide"
    print(f"{label:{width}}  {sizes}  {'WRONG: ' + r.wrong if r.wrong else ''}".rstrip(), flush=True)
    return bool(r.wrong)


if __name__ == "__main__":
    from fzero.cli.process import run
    from fzero.cli.start import end_imports

    end_imports()
    sys.exit(run(main, traceback=False))
