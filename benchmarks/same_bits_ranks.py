"""One side of `same_bits.py`: runs its cases with the fzero that PYTHONPATH names, and writes a line of JSON for each.

    PYTHONPATH=TREE python benchmarks/same_bits_ranks.py TREE CASE CASE ...

Two lanes run side by side: cases of one process, and cases of several. The ranks of each number of processes are forked
once from this process, which has torch and fzero loaded, and kept.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import multiprocessing
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before any fork, so that no rank imports it
import torch._inductor.compile_fx
import torch.distributed as dist
from same_bits_cases import CASES, COMMANDS, STEPS, TEXT, flags_in
from same_bits_names import batch_of, make_mesh, plain_name, prepare, shards

import fzero

TIMEOUT_S = 240


# -- in a rank


def train(name: str, mesh: Any, folder: str) -> dict[str, Any]:
    """What one rank has after the steps of a case: losses and norms of all steps, and its shards of the state."""
    case = CASES[name]
    run = prepare(case, mesh, folder)
    state, losses, norms, skipped = run.state, [], [], 0
    for i in range(STEPS):
        state, metrics = run.step(state, batch_of(i, case, mesh))
        losses.append(bits(metrics.loss))
        norms.append(bits(metrics.grad_norm))
        skipped += int(metrics.skipped)
    leaves = [(name, leaf.detach().clone(), dims) for name, leaf, dims in shards(state, run.specs)]
    run.close()
    axes = {axis.name: (axis.rank, axis.size) for axis in mesh.axes}
    return {"losses": losses, "norms": norms, "skipped": skipped, "axes": axes, "leaves": leaves}


def bits(x: torch.Tensor) -> str:
    """A scalar as its dtype and its bytes in hexadecimal, with its value for a reader."""
    data = x.detach().reshape(1).view(torch.uint8).numpy().tobytes()
    return f"{float(x):.9g} {str(x.dtype).removeprefix('torch.')} {data.hex()}"


def work(rank: int, n: int, pipe: Any) -> None:
    """Serve cases until the pipe closes."""
    torch.set_num_threads(1)
    port = pickle.loads(pipe.recv_bytes())
    if n > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=datetime.timedelta(seconds=60))
    meshes: dict[Any, Any] = {}
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, folder = pickle.loads(pipe.recv_bytes())
            try:
                sizes = CASES[name].mesh
                if sizes not in meshes:
                    meshes[sizes] = make_mesh(dict(sizes))
                answer = train(name, meshes[sizes], folder)
            except Exception:
                answer = traceback.format_exc()
            pipe.send_bytes(pickle.dumps(answer))


# -- in the first process


class Ranks:
    """n processes that run cases together."""

    def __init__(self, n: int) -> None:
        context = multiprocessing.get_context("fork")
        self.n, self.pipes, self.processes = n, [], []
        for rank in range(n):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(rank, n, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def meet(self) -> None:
        """Let the ranks find each other."""
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps(self.store.port))

    def run(self, name: str) -> dict[str, Any]:
        """The result of a case."""
        with tempfile.TemporaryDirectory() as folder:
            for pipe in self.pipes:
                pipe.send_bytes(pickle.dumps((name, folder)))
            answers, end = [], time.monotonic() + TIMEOUT_S
            for rank, pipe in enumerate(self.pipes):
                if not pipe.poll(max(0.0, end - time.monotonic())):
                    raise RuntimeError(
                        f"rank {rank} of {self.n} gave no answer; " + " ".join(a for a in answers if isinstance(a, str))
                    )
                answers.append(pickle.loads(pipe.recv_bytes()))
                if isinstance(answers[-1], str):
                    end = min(end, time.monotonic() + 5)
        failed = [answer for answer in answers if isinstance(answer, str)]
        if failed:
            raise RuntimeError(failed[0])
        return put_together(answers)

    def close(self) -> None:
        """End the ranks."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            process.kill()


def put_together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The losses and norms of all ranks, and the hash of each whole leaf; RuntimeError where two ranks differ."""
    first = answers[0]
    for what in ("losses", "norms", "skipped"):
        if any(answer[what] != first[what] for answer in answers):
            raise RuntimeError(f"the ranks have different {what}")
    leaves = {}
    for i, (name, leaf, dims) in enumerate(first["leaves"]):
        dims = (*dims, *((),) * (leaf.dim() - len(dims)))
        counts = [product(first["axes"][axis][1] for axis in axes) for axes in dims]
        whole = leaf.new_empty([size * count for size, count in zip(leaf.shape, counts)])
        written: dict[tuple[int, ...], torch.Tensor] = {}
        for answer in answers:
            part, at = answer["leaves"][i][1], []
            for axes in dims:
                index = 0
                for axis in axes:  # outermost first
                    rank, size = answer["axes"][axis]
                    index = index * size + rank
                at.append(index)
            if tuple(at) in written and digest(written[tuple(at)]) != digest(part):
                raise RuntimeError(f"two ranks that hold the same part of {name} have different values")
            written[tuple(at)] = part
            whole[tuple(slice(k * size, (k + 1) * size) for k, size in zip(at, part.shape))] = part
        leaves[name] = digest(whole)
    groups = {"params": ("params/", "master/"), "opt": ("",)}
    out: dict[str, Any] = {"losses": first["losses"], "norms": first["norms"], "skipped": first["skipped"]}
    for group, starts in groups.items():
        out[group] = {name: leaves.pop(name) for name in sorted(leaves) if name.startswith(starts)}
    return out


def product(numbers: Any) -> int:
    """The product of whole numbers."""
    out = 1
    for number in numbers:
        out *= number
    return out


def digest(x: torch.Tensor) -> str:
    """The SHA-256 of a tensor's dtype, shape and bytes."""
    data = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{x.dtype}{list(x.shape)}".encode() + data).hexdigest()


def pretrain(name: str, tree: str) -> dict[str, Any]:
    """What `fzero pretrain` and its resume leave: losses in metrics.jsonl, digests in the newest checkpoint."""
    n, lines = COMMANDS[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text(TEXT)
        for args in lines:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n > 1 else []
            line = [sys.executable, *launcher, "-m", "fzero", "pretrain", *flags_in(tree, args)]
            done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
            if done.returncode:
                raise RuntimeError(f"{' '.join(line)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        said = {
            name: [f"{row['step']}: {row[name]!r}" for row in rows if name in row]
            for name in ("loss", "val_loss", "val_loss_ema")
        }
        norms = [repr(row["grad_norm"]) for row in rows]
        manifests = sorted(Path(folder, "run", "checkpoints").glob("step-*/manifest.json"))
        leaves = {}
        if manifests:
            leaves = json.loads(manifests[-1].read_text())["leaves"]
        else:  # all of the state is in the run's store: its bytes, but for the times and texts
            leaves = {
                str(path).partition("/arrays/")[2]: {"digest": hashlib.sha256(path.read_bytes()).hexdigest()}
                for path in sorted(Path(folder).rglob("arrays/**/*"))
                if path.is_file()
            }
        named = {plain: leaf["digest"] for key, leaf in leaves.items() if (plain := plain_name(key)) is not None}
    params = {key: named.pop(key) for key in sorted(named) if key.startswith(("params/", "master/"))}
    return {
        "losses": [line for lines in said.values() for line in lines],
        "norms": norms,
        "params": params,
        "opt": dict(sorted(named.items())),
    }


def main() -> None:
    tree, *names = sys.argv[1:]
    place = Path(fzero.__file__).resolve()
    assert place.is_relative_to(Path(tree).resolve()), f"{place} is not in {tree}"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = {
        name: COMMANDS[name][0] if name in COMMANDS else product(size for _, size in CASES[name].mesh) for name in names
    }
    teams = {
        n: Ranks(n) for n in sorted({count for name, count in counts.items() if name in CASES})
    }  # before there is any thread
    for team in teams.values():
        team.meet()
    lock = threading.Lock()

    def lane(mine: list[str]) -> None:
        for name in mine:
            began = time.monotonic()
            try:
                result = pretrain(name, tree) if name in COMMANDS else teams[counts[name]].run(name)
            except Exception as error:
                result = {"error": str(error) or repr(error)}
                if name in CASES:  # messages may be left in flight
                    teams[counts[name]].close()
                    teams[counts[name]] = Ranks(counts[name])
                    teams[counts[name]].meet()
            with lock:
                print(json.dumps({"case": name, "seconds": round(time.monotonic() - began, 2), **result}), flush=True)

    alone = [name for name in names if counts[name] == 1 or name in COMMANDS]
    others = [name for name in names if name not in alone]
    lanes = [threading.Thread(target=lane, args=(part,)) for part in (alone, others)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    for team in teams.values():
        team.close()


if __name__ == "__main__":
    main()
