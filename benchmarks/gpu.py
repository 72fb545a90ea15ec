"""All that fzero's kernels must show on a GPU, in one command and about fifteen minutes:

    python benchmarks/gpu.py --out benchmarks/results/gpu-h200.json

Four parts, each in a process of its own with a limit. `kernels`: each operation at a few sizes, forward, and forward
with backward: achieved bandwidth or FLOP rate, its fraction of what the same device copies or multiplies, and
the ratio to the reference in eager PyTorch, the same under torch.compile, PyTorch's own form and Liger's, where they
are there. `steps`: training steps of GPT-2 124M and Llama 1B in bf16 beside an nn.Module under torch.compile, in turns:
tokens/s and MFU. `capture`: steps of GPT-2 124M issued and as one CUDA graph, in turns, at three batches. `tests`: the
laws of every kernel, on the device.

The file is written after every figure, and the same command goes on where it was: what has ended its process, or has
run past the limit, is reported and left out then. The exit code is 1 if something has failed. `--device cpu --tiny`
runs the same program on sizes that mean nothing, to find its mistakes where there is no GPU."""

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
from typing import Any

import torch
from gpu_kernels import limits, measure, say
from gpu_steps import capture_steps, train_steps
from kernel_cases import Case, cases
from turns import machine

ROOT = Path(__file__).parent.parent
TESTS = (
    "glu norm rope dropout_add quantize flash cross_entropy_kernels optim_kernels optim_lowbit newton_schulz "
    "moe_kernels float8"
)
LIMITS = {"kernels": 480.0, "steps": 300.0, "capture": 240.0, "tests": 480.0}  # seconds of each part, in this order
DATASHEET = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bf16 FLOP/s, NVIDIA's data sheets


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=LIMITS, help="one part, in this process")
    parser.add_argument("--op", default="", help="only cases whose label contains this")
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


def run_tests(device: str) -> dict[str, Any]:
    """The kernels' tests on the device: {"passed": bool, "said": the end of what they print}."""
    files = [f"tests/test_{name}.py" for name in TESTS.split()]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *files], cwd=ROOT, capture_output=True, text=True)
    said = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
    print(said, flush=True)
    return {"passed": done.returncode == 0, "said": said}


class Record:
    """The file of results: what is found is there before the next figure is begun."""

    def __init__(self, path: Path, device: str) -> None:
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        self.path = path
        self.found: dict[str, Any] = {
            "command": shlex.join(["python", *(w for w in sys.argv if w not in ("--only", *LIMITS))]),
            "machine": machine(),
        }
        self.found |= {"device": name, "torch": torch.__version__, "failed": {}, "under_way": ""}
        self.found |= {part: {} for part in ("best", *LIMITS)}
        if path.is_file():
            before = json.loads(path.read_text())
            for what in ("device", "torch"):
                if before[what] != self.found[what]:
                    raise SystemExit(
                        f"{path}: is of {before[what]}, and this is {self.found[what]}; give another --out"
                    )
            self.found = before
            if left := before["under_way"]:
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
    if part == "kernels":
        for number, make in enumerate(cases(args.device, args.tiny)):
            words = f"{make.func.__name__}{make.args}" if isinstance(make, functools.partial) else make.__name__

            def one(make: Callable[[], Case] = make) -> dict[str, Any]:
                row = measure(make(), args.device, best, compiled=not args.no_compile and not args.tiny)
                say(row)
                return row

            if args.op in words:
                record.add("kernels", f"{number} {words}", one)
    if part == "steps":
        peak = {"measured": best["flops"]}
        peak |= {f"datasheet of {chip}": rate for chip, rate in DATASHEET.items() if chip in name}
        for model in ("gpt2-124m", "llama-1b"):
            record.add("steps", model, lambda model=model: train_steps(model, args.device, args.tiny, 20.0, peak))
    if part == "capture":
        for batch in (1, 4, 32):
            run = functools.partial(capture_steps, batch, args.device, args.tiny, 10.0)
            record.add("capture", f"batch {batch}", run)
    if part == "tests" and not args.tiny:
        found = record.add("tests", "laws", lambda: run_tests(args.device))
        if found and not found["passed"]:
            record.failed("tests: laws", found["said"])


def main() -> int:
    args = parse()
    if args.only:
        run_part(args.only, Record(args.out, args.device), args)
        return 0
    begin = time.perf_counter()
    for part, limit in LIMITS.items():
        run = subprocess.Popen([sys.executable, *sys.argv, "--only", part], start_new_session=True)
        try:
            run.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"{part}: ran past its {limit:g} s; the same command goes on with it", flush=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)  # and what it has started
    record = Record(args.out, args.device)
    record.write()
    failed = ", ".join(record.found["failed"]) or "nothing"
    print(f"{time.perf_counter() - begin:.0f} s; failed: {failed}; written to {args.out}")
    return int(bool(record.found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
