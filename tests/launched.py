"""`torchrun -m fzero pretrain` on small models: starting it, what it left, and the processes to do something to
meanwhile."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest

from fzero import checkpoint
from fzero.cli import main
from fzero.run import run_folder

SIZES = {"n_layers": 2, "d_model": 16, "d_ff": 32, "n_heads": 4, "n_kv_heads": 2}
# The default optimizer of small models: Muon, which works on whole matrices, with clipping.
TINY = [
    *shlex.split(
        "--model llama-tiny --batch 8 --micro-batch 1 --seq-len 16 --precision fp32 --data text.txt --peak-tflops 1"
    ),
    *[part for name, size in SIZES.items() for part in ("--set", f"model.{name}={size}")],
    *shlex.split("--set train.compiled=false --set precision.fp32_matmul=default --set train.ema_decay=0.5"),
    *shlex.split("--set train.eval_batches=3 --set train.eval_every=3"),
]
SHORT, LONG = ("--steps", 6), ("--steps", 1000000)
TIMED = {
    "step_s",
    "data_s",
    "saved_step",
    "save_blocked_s",
    "save_s",
    "tokens_per_s",
    "mfu",
    "mfu_causal",
    "hfu",
    "hfu_causal",
}
TIMED |= {"wall_s", "phases", "comm", "ranks", "recorded"}
TIMED |= {"grad_norms", "param_norms"}  # sums over ranks: not the same bits on all meshes
SAVED = re.compile(r"save|checkpoint")  # of a row: what a save cost, which is another row's after a restart
STANDALONE = ("--standalone",)


def write_text(folder):
    """The corpus that TINY names."""
    (folder / "text.txt").write_text("\n".join(f"line {i}: {i * i} is the square of {i}" for i in range(400)))


def folder_with_run(tmp_path_factory, name, run, *args):
    """A folder with a text and the run of one process on it, in this one, that `args` of pretrain make."""
    path = tmp_path_factory.mktemp(name)
    write_text(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        with pytest.raises(SystemExit) as ended:
            main.main(["pretrain", *map(str, args), "--out", run, "--prompt", ""])
        assert ended.value.code == 0
    return path


def start(folder, n, *args, command=("-m", "fzero"), how=STANDALONE, log="", verb="pretrain", fresh=False):
    """torchrun with n processes, started; its output goes to the files out and err with `log` behind their names. It
    and its ranks are forks, or `fresh` interpreters."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    launcher = [sys.executable, "-m", "torch.distributed.run"] if fresh else [f"{forked.programs()}/torchrun"]
    line = [*launcher, *map(str, how), "--nproc-per-node", str(n), *command, verb, *map(str, args)]
    with (folder / f"out{log}").open("w") as out, (folder / f"err{log}").open("w") as err:
        cores = os.sched_getaffinity(0)
        # So that every rank has one thread, as this process has: the same bits need the same threads. A child takes its
        # parent's cores.
        os.sched_setaffinity(0, sorted(cores)[: 2 if n > 1 else 1])
        try:
            return subprocess.Popen(line, cwd=folder, env=environment, stdout=out, stderr=err)
        finally:
            os.sched_setaffinity(0, cores)


def said_in(err):
    """The lines of fzero in what the ranks wrote to stderr."""
    return [line for line in err.splitlines() if line.startswith("fzero: ")]


def ended(folder, process, timeout_s=120, log=""):
    """(exit code of torchrun, what all ranks printed, the lines of fzero on stderr, exit codes of the ranks)."""
    try:
        code = process.wait(timeout_s)
    finally:
        process.kill()
    err = (folder / f"err{log}").read_text()
    assert f"{os.sep}fzero{os.sep}" not in err, err  # no traceback but torchrun's own
    return (
        code,
        (folder / f"out{log}").read_text(),
        said_in(err),
        sorted(int(c) for c in re.findall(r"exitcode  : (-?\d+)", err)),
    )


def torchrun(folder, n, *args, verb="pretrain", timeout_s=120):
    """What all ranks of a run printed that ends well."""
    code, out, said, _ = ended(folder, start(folder, n, *args, verb=verb), timeout_s)
    assert code == 0 and not said, (folder / "err").read_text()
    return out


def rows(run):
    """The rows of a run's metrics without its times."""
    return [
        {n: value for n, value in row.items() if n not in TIMED and not SAVED.search(n)}
        for row in run_folder.read_metrics(run)
    ]


def hashes(run):
    """The digests of the leaves of a run's newest checkpoint."""
    return {
        n: leaf["digest"]
        for n, leaf in checkpoint.read_manifest(checkpoint.latest(run / "checkpoints"))["leaves"].items()
    }


def ranks_of(process):
    """{rank: process id} of the processes that torchrun has started."""
    found = {}
    for task in Path(f"/proc/{forked.fork_of(process.pid)}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{child}/environ").read_bytes())
            if rank:
                found[int(rank[1])] = forked.fork_of(child)
    return found


def until(condition, process=None, timeout_s=120):
    """Wait for `condition()`, for so long, and as long as the process lives; returns what it gave."""
    end = time.monotonic() + timeout_s
    while not (result := condition()) and (process is None or process.poll() is None):
        if time.monotonic() > end:
            if process is not None:
                process.kill()
                process.wait()
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.02)
    return result


def steps_of(run):
    """The number of rows that a run has written."""
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def started(folder, run, n, *args, steps=3, **how):
    """torchrun in the middle of a run that would go on for hours."""
    process = start(folder, n, *TINY, *LONG, *args, "--out", run, "--prompt", "", **how)
    until(lambda: steps_of(folder / run) >= steps, process)
    return process


def expect_resumed_equals_whole(folder, n, args, stop_at):
    """A run of a command that stops and is resumed has the rows and the parameters of one that does not, and learns;
    returns what that one printed."""
    write_text(folder)
    said = torchrun(folder, n, *args, "--out", "whole", "--prompt", "")
    torchrun(folder, n, *args, "--out", "parts", "--prompt", "", "--stop-at", stop_at)
    torchrun(folder, n, "--out", "parts", "--resume", "--prompt", "")
    assert rows(folder / "whole") == rows(folder / "parts")
    assert hashes(folder / "whole") == hashes(folder / "parts")
    losses = [row["loss"] for row in rows(folder / "whole")]
    assert losses[-1] < losses[0]
    return said
