"""All that fzero must show on a GPU, in one command:

    python benchmarks/gpu.py --out benchmarks/results/gpu-h200.json

It goes through PARTS in their order, in which the most is learnt: each part in a process of its own, with a limit of at
most 9 minutes and a log beside the file. The file is written after every figure, and the same command goes on where it
was: what has ended its process, or has run past the limit, is reported and left out then. `--only PART` does one part,
in this process. Goals are printed beside the figures at the end. The exit code is 1 if something has failed. `--device
cpu --tiny` runs the same program on sizes that mean nothing, to find its mistakes where there is no GPU."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gpu_first
import gpu_long
import gpu_runs
import gpu_steps
import torch
from gpu_attention import attention_cases
from gpu_kernels import limits, measure, say
from gpu_place import Cases, Where, said_by
from kernel_cases import Case, cases
from turns import machine

ROOT = Path(__file__).parent.parent
TESTS = (
    "glu norm rope dropout_add quantize flash cross_entropy_kernels optim_kernels optim_lowbit newton_schulz "
    "moe_kernels float8"
)
DATASHEET = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16 FLOP/s, NVIDIA's data sheets


def kernel_cases(where: Where) -> Cases:
    """Each operation at a few sizes, forward, and forward with backward: achieved bandwidth or FLOP rate, its fraction
    of what the same device copies or multiplies, and the ratio to the reference in eager PyTorch, the same under
    torch.compile, PyTorch's own form and Liger's, where they are there."""
    for number, make in enumerate(cases(where.device, where.tiny)):
        words = f"{make.func.__name__}{make.args}" if isinstance(make, functools.partial) else make.__name__

        def one(make: Callable[[], Case] = make) -> dict[str, Any]:
            row = measure(make(), where.device, where.best, compiled=where.compiled)
            say(row)
            return row

        yield f"{number} {words}", one


def tested(words: list[str], where: Where) -> dict[str, Any]:
    """The end of what a test command prints; raises RuntimeError if tests fail. Tiny: it only collects them."""
    words = [*words, "--collect-only", "-q"] if where.tiny else [*words, "-q", "-p", "no:cacheprovider"]
    found = said_by([sys.executable, "-m", "pytest", *words], 15)
    print(found["said"], flush=True)
    if found["code"] != 0:
        raise RuntimeError(found["said"][-300:])
    return found


def law_cases(where: Where) -> Cases:
    """The laws of every kernel, on the device."""
    names = TESTS.split()[:1] if where.tiny else TESTS.split()
    for name in names:
        yield name, functools.partial(tested, [f"tests/test_{name}.py"], where)


def marked_cases(where: Where) -> Cases:
    """The tests that only a GPU can run."""
    files = ["tests/test_digest.py"] if where.tiny else []
    yield "gpu", functools.partial(tested, ["-m", "gpu", *files], where)


def memcheck_cases(where: Where) -> Cases:
    """NVIDIA's search for accesses out of bounds, over the norms' tests; it says so where the tool is not here."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "tests/test_norm.py", "-k", "backward"]
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *words]

    def checked() -> dict[str, Any]:
        found = said_by(command)
        if found["code"] == 9:
            raise RuntimeError(found["said"][-300:])
        return found

    yield "norm", checked


class Part(NamedTuple):
    """A part of the measurement."""

    limit: float  # seconds
    cases: Callable[[Where], Cases]
    environ: dict[str, str] = {}  # noqa: RUF012


PARTS = {
    "machine": Part(60, gpu_first.machine_cases),
    "import": Part(120, gpu_first.import_cases),
    "step": Part(420, gpu_first.step_cases),
    "laws": Part(540, law_cases),
    "marked": Part(240, marked_cases),
    "bench": Part(420, gpu_runs.bench_cases),
    "steps": Part(540, gpu_steps.step_cases),
    "attention": Part(240, attention_cases),
    "sanitizer": Part(300, gpu_first.sanitizer_cases, {"TORCH_CUDA_SANITIZER": "1"}),
    "ranks": Part(240, gpu_first.rank_cases),
    "models": Part(540, gpu_runs.model_cases),
    "plans": Part(540, gpu_runs.plan_cases),
    "capture": Part(300, gpu_steps.capture_cases),
    "kernels": Part(540, kernel_cases),
    "largest": Part(540, gpu_runs.largest_cases),
    "long": Part(540, gpu_long.long_cases),
    "runs": Part(540, gpu_runs.run_cases),
    "memcheck": Part(300, memcheck_cases),
}


# ---- goals ----


class Goal(NamedTuple):
    """What a figure should be."""

    what: str
    value: float
    least: bool  # else: at most
    found: Callable[[dict[str, Any]], float]  # raises LookupError or ValueError where it is not measured


def of_peak(mfu: dict[str, float]) -> float:
    """An MFU by the data sheet, if there is one of the GPU; else by the rate that was measured."""
    return next((value for of, value in mfu.items() if of.startswith("datasheet")), None) or mfu["measured"]


def furthest(found: dict[str, Any], what: str) -> float:
    """The largest distance of the plans from what was measured, up or down."""
    rows = [row["plan"][what] for part in ("plans", "models") for row in found[part].values() if what in row["plan"]]
    if len(rows) < 10:
        raise LookupError("fewer than ten")
    return max(map(abs, rows))


GOALS = (
    Goal("GPT-2 124M, tokens/s", 515e3, True, lambda f: f["steps"]["gpt2-124m"]["contenders"]["fzero"]["tokens_per_s"]),
    Goal(
        "a plain step over that of nn.Module and torch.compile with the same attention, speed",
        1.0,
        True,
        lambda f: f["steps"]["gpt2-124m"]["contenders"]["fzero, flash"]["faster than nn.Module"],
    ),
    Goal(
        "its memory over that of the nn.Module",
        0.9,
        False,
        lambda f: (
            f["steps"]["gpt2-124m"]["contenders"]["fzero, flash"]["peak_bytes"]
            / f["steps"]["gpt2-124m"]["contenders"]["nn.Module"]["peak_bytes"]
        ),
    ),
    Goal("GPT-2 1.5B, tokens/s", 50e3, True, lambda f: f["models"]["gpt2-1.5b"]["tokens_per_s"]),
    Goal(
        "Llama-3 8B at 8,192, causal MFU", 0.47, True, lambda f: of_peak(f["models"]["llama-8b, remat"]["mfu_causal"])
    ),
    Goal(
        "attention in blocks of queries, speed over one call's",
        0.95,
        True,
        lambda f: min(row["one over blocks"] for row in f["long"].values() if "one over blocks" in row),
    ),
    Goal("parameters trained", 25e9, True, lambda f: max(row["parameters"] for row in f["largest"].values())),
    Goal(
        "races that the sanitizer found",
        0,
        False,
        lambda f: sum(what.startswith("sanitizer") for what in f["failed"]) + 0 * len(f["sanitizer"]["plain"]),
    ),
    Goal("plans of ten configurations, time off by", 0.15, False, lambda f: furthest(f, "time off")),
    Goal("plans of ten configurations, peak off by", 0.02, False, lambda f: furthest(f, "peak off")),
    Goal(
        "ranks that share the GPU, losses off by",
        1e-4,
        False,
        lambda f: max(f["ranks"][case]["largest relative difference"] for case in ("2 ranks", "4 ranks", "2 stages")),
    ),
)


def figure(value: float) -> str:
    """A number to read."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def judged(found: dict[str, Any]) -> list[str]:
    """A line for each goal: the figure beside it."""
    lines = []
    for goal in GOALS:
        wanted = f"{goal.what}: {'at least' if goal.least else 'at most'} {figure(goal.value)}; "
        try:
            value = goal.found(found)
        except (LookupError, ValueError):
            lines.append(f"{wanted}not measured")
            continue
        reached = value >= goal.value if goal.least else value <= goal.value
        lines.append(f"{wanted}{figure(value)}, {'reached' if reached else 'NOT reached'}")
    return lines


# ---- the file, and the parts ----


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=PARTS, help="one part, in this process")
    parser.add_argument("--op", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile of the references out: it takes half of the time"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that mean nothing")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write, or to go on with")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny runs the program without one")
    return args


class Record:
    """The file of results: what is found is there before the next figure is begun."""

    def __init__(self, path: Path, device: str) -> None:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        self.path = path
        self.found: dict[str, Any] = {
            "command": shlex.join(["python", *(w for w in sys.argv if w not in ("--only", *PARTS))]),
            "taken_on": machine(),
        }
        self.found |= {"device": name, "torch": torch.__version__, "failed": {}, "under_way": ""}
        if path.is_file():
            before = json.loads(path.read_text())
            for what in ("device", "torch"):
                if before[what] != self.found[what]:
                    raise SystemExit(
                        f"{path}: is of {before[what]}, and this is {self.found[what]}; give another --out"
                    )
            self.found = before
        self.found = {part: {} for part in ("best", *PARTS)} | self.found
        if left := self.found["under_way"]:
            self.failed(left, "it ended the process, or ran past the limit of its part")

    def write(self) -> None:
        """Replace the file."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.found, indent=1) + "\n")
        partial.replace(self.path)

    def failed(self, what: str, why: str) -> None:
        """Note a failure; what has failed is not tried again."""
        print(f"{what} FAILED: {why}", flush=True)
        self.found["failed"][what] = why
        self.found["under_way"] = ""
        self.write()

    def add(self, part: str, key: str, run: Callable[[], Any]) -> Any:
        """`run()` of a part, under `key`; what is there already, or None if it has failed."""
        what = f"{part}: {key}"
        if key in self.found[part] or what in self.found["failed"]:
            return self.found[part].get(key)
        self.found["under_way"] = what
        self.write()
        try:
            found = self.found[part][key] = run()
        except Exception as error:
            print(traceback.format_exc(), flush=True)
            self.failed(what, f"{type(error).__name__}: {error}".splitlines()[0][:300])
            return None
        finally:
            gc.collect()
            if self.found["device"] != "cpu":
                torch.cuda.empty_cache()
        self.found["under_way"] = ""
        self.write()
        return found


def run_part(part: str, record: Record, args: argparse.Namespace) -> None:
    """Measure what is missing of a part."""
    best = record.add("best", "of the device", lambda: limits(args.device, args.tiny)) or {"bytes": 1.0, "flops": 1.0}
    name = record.found["device"]
    rates = f"copies {best['bytes'] / 1e12:.3f} TB/s, bf16 products {best['flops'] / 1e12:.2f} TFLOP/s"
    print(f"{name}: {rates}", flush=True)
    peak = {"measured": best["flops"]} | {f"datasheet of {chip}": r for chip, r in DATASHEET.items() if chip in name}
    folder = record.path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    compiled = not args.no_compile and not args.tiny
    for key, run in PARTS[part].cases(Where(args.device, args.tiny, folder.absolute(), best, peak, compiled)):
        if args.op in key:
            record.add(part, key, run)


def main() -> int:
    args = parse()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.only:
        run_part(args.only, Record(args.out, args.device), args)
        return 0
    begin = time.perf_counter()
    for name, part in PARTS.items():
        log = args.out.with_suffix("") / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with log.open("a") as out:
            run = subprocess.Popen(
                [sys.executable, *sys.argv, "--only", name],
                start_new_session=True,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | part.environ,
            )
            try:
                run.wait(part.limit)
            except subprocess.TimeoutExpired:
                print(f"{name}: ran past its {part.limit:g} s; the same command goes on with it", flush=True)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)  # and what it has started
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        print(f"==== {name}, {time.perf_counter() - start:.0f} s; all of it is in {log}\n{tail}", flush=True)
    record = Record(args.out, args.device)
    record.found["goals"] = judged(record.found)
    record.write()
    print("\n".join(["==== goals", *record.found["goals"]]))
    failed = ", ".join(record.found["failed"]) or "nothing"
    print(f"{time.perf_counter() - begin:.0f} s; failed: {failed}; written to {args.out}")
    return int(bool(record.found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
