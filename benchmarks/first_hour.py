"""The first hour on a GPU: all that tests without one cannot tell, in one command, the most telling parts first.

    python benchmarks/first_hour.py --out runs/first-hour

Each part is a command with a limit and a log of its own in the folder, so that one which hangs costs only itself;
summary.json has the exit code and the seconds of each as soon as it has ended. The same command goes on where it was:
parts that went well are not made again. The exit code is 1 if one failed.

  machine   the GPU, its driver, PyTorch and its libraries, what fzero makes of them
  cases     steps of every policy, offload and update, their losses beside the CPU's, PyTorch's own list of waits
  sanitizer the same offloads under PyTorch's check for races between streams
  tests     all tests that are marked `gpu`
  kernels   benchmarks/gpu.py: the kernels' laws, their speed, steps beside an nn.Module, captured steps
  bench     fzero bench, for plans of this machine
  pretrain  GPT-2 124M for 300 steps, stopped at 200 and resumed; report and sample
  offload   the same model with its state in host memory, and on a disk
  ranks     two and four ranks on one GPU, whose messages go by the host, beside one process; by NCCL on several GPUs

`--device cpu --tiny` makes the same parts where there is no GPU, at sizes that mean nothing, to find their mistakes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Part(NamedTuple):
    """One part: shell commands that follow each other, and their limit in seconds."""

    name: str
    limit: float
    commands: tuple[str, ...]


def parts_of(out: Path, device: str, tiny: bool) -> list[Part]:
    """The parts, in order."""
    python, folder = shlex.quote(sys.executable), shlex.quote(str(out.absolute()))
    fzero, here = f"{python} -m fzero", f"--device {device}{' --tiny' if tiny else ''}"
    cases = f"{python} benchmarks/gpu_step_cases.py {here}"
    small, sanitizer = "", "TORCH_CUDA_SANITIZER=1 " * (device == "cuda")
    if tiny:
        sizes = ["n_layers=1", "d_model=16", "d_ff=32", "n_heads=2", "max_len=32"]
        small = " ".join(f"--set model.{size}" for size in sizes) + " --seq-len 32 --batch 4 --micro-batch 2"
        small += " --set train.compiled=false --precision fp32 --peak-tflops 1"
    steps, stop = (4, 2) if tiny else (300, 200)
    train = f"{fzero} pretrain --model gpt2-124m --device {device} {small}"
    run, disk = f"{folder}/run", f"{folder}/disk"
    few = f"{train} --steps {2 if tiny else 20} --prompt ''"
    torchrun = f"{python} -m torch.distributed.run --standalone --nproc-per-node"
    ranks = [f"{torchrun} {n} benchmarks/gpu_ranks.py {here}" for n in ((2,) if tiny else (2, 4))]
    if not tiny:
        nccl = f"{torchrun} 2 -m fzero pretrain --model gpt2-124m --mesh dp=2 --zero 3 --steps 50 --out {folder}/nccl"
        ranks.append(f'if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then {nccl}; fi')
    quick = "--quick --only memory" if tiny else ""
    benchmark = f"{python} benchmarks/gpu.py {here} --out {folder}/gpu.json" + " --only capture" * tiny
    return [
        Part("machine", 120, ("nvidia-smi || true", "nvidia-smi topo -m || true", "ulimit -l", f"{fzero} doctor")),
        Part("cases", 300, (cases,)),
        Part("sanitizer", 300, (f"{sanitizer}{cases} --only host",)),
        Part("tests", 300, (f"{python} -m pytest -q -n 1 -m gpu tests{'/test_communicator.py' if tiny else ''}",)),
        Part("kernels", 1600, (benchmark,)),
        Part("bench", 400, (f"{fzero} bench --device {device} --out {folder}/device.json {quick}",)),
        Part(
            "pretrain",
            900,
            (
                f"{train} --steps {steps} --stop-at {stop} --out {run}",
                f"{fzero} pretrain --resume --out {run}",
                f"{fzero} report {run}",
                f"{fzero} sample {run} --device {device} --prompt 'def ' --max-new-tokens 20",
            ),
        ),
        Part(
            "offload",
            900,
            (
                f"{few} --offload params=host,grads=host,opt=host --out {folder}/host",
                f"{few} --offload params=nvme,opt=nvme --nvme {disk} --out {folder}/nvme",
            ),
        ),
        Part("ranks", 600, tuple(ranks)),
    ]


def run_part(part: Part, out: Path) -> dict[str, float | int]:
    """{"code", "seconds"} of a part, whose output goes to its log; 124 if it ran past its limit."""
    begin = time.perf_counter()
    with (out / f"{part.name}.txt").open("w") as log:
        script = "set -ex\n" + "\n".join(part.commands)
        process = subprocess.Popen(["bash", "-c", script], cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(part.limit)
        except subprocess.TimeoutExpired:
            code = 124
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {"code": code, "seconds": round(time.perf_counter() - begin, 1)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder to write, or to go on with")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that mean nothing")
    parser.add_argument("--only", action="append", default=[], help="a part; may be given several times")
    args = parser.parse_args(arguments)
    parts = parts_of(args.out, args.device, args.tiny)
    unknown = ", ".join(sorted(set(args.only) - {part.name for part in parts}))
    if unknown:
        parser.error(f"no part {unknown}; there are {', '.join(part.name for part in parts)}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "summary.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    for part in parts:
        if (args.only and part.name not in args.only) or found.get(part.name, {}).get("code") == 0:
            continue
        found[part.name] = run_part(part, args.out)
        path.write_text(json.dumps(found, indent=1) + "\n")
        said = (args.out / f"{part.name}.txt").read_text(errors="replace").splitlines()[-8:]
        print(f"#### {part.name}: exit code {found[part.name]['code']}, {found[part.name]['seconds']} s")
        print(*(f"  {line}" for line in said), sep="\n", flush=True)
    failed = [name for name, row in found.items() if row["code"]]
    print(f"failed: {', '.join(failed) or 'nothing'}; the logs are in {args.out}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
