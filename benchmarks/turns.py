"""What the drivers share: a contender's processes, which take turns; whether losses agree; figures; the machine."""

from __future__ import annotations

import json
import math
import os
import platform
import select
import shlex
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Largest relative difference between two contenders' losses, at every warm-up step: the first shows that they are one
# model, the later ones the same gradients and AdamW. bf16 programs round at different places, hence the wider figure.
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}


class Group:
    """A contender's processes: `ask` sends a line to each and waits for all their replies; between turns they wait in a
    read.

    `first` holds the replies to the orders, one a process. ValueError where a process refuses or ends; the others of
    the group, which may be waiting for it, are then killed.
    """

    def __init__(
        self,
        contender: str,
        orders: list[dict[str, Any]],
        *,
        python: str = sys.executable,
        env: dict[str, str] | None = None,
    ):
        self.contender = contender
        self.processes = []
        for order in orders:
            threads = str(order["threads"])
            own = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "KINETO_LOG_LEVEL": "6"}
            own |= {"RANK": str(order["rank"]), "LOCAL_RANK": str(order["rank"])} | (env or {})
            command = [python, str(HERE / "worker.py")]
            self.processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | own
                )
            )
        name, *switches = contender.split("+")
        self.first = self._ask([{"name": name, "switches": switches} | order for order in orders])

    def ask(self, value: Any) -> list[dict[str, Any]]:
        return self._ask([value] * len(self.processes))

    def _ask(self, values: list[Any]) -> list[dict[str, Any]]:
        try:
            for process, value in zip(self.processes, values):
                process.stdin.write(json.dumps(value) + "\n")
                process.stdin.flush()
            return self._replies()
        except (ValueError, BrokenPipeError) as error:
            self.kill()
            raise ValueError(f"{self.contender}: {error}") from error

    def _replies(self) -> list[dict[str, Any]]:
        rank_of = {process.stdout: rank for rank, process in enumerate(self.processes)}
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(rank_of):
            ready, _, _ = select.select([stream for stream, rank in rank_of.items() if rank not in answers], [], [])
            for stream in ready:
                line = stream.readline()  # a process writes one line per line read, so nothing is left in a buffer
                rank = rank_of[stream]
                if not line:
                    raise ValueError(
                        f"process {rank} ended with code {self.processes[rank].wait()}; its error is above"
                    )
                answers[rank] = json.loads(line)
                if "error" in answers[rank]:
                    raise ValueError(answers[rank]["error"])
        return [answers[rank] for rank in range(len(rank_of))]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        for process in self.processes:
            if not process.stdin.closed and process.poll() is None:
                process.stdin.close()
        for process in self.processes:
            process.wait()
            process.stdout.close()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def of_ranks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One step's row from those of its processes: from the first start to the last end, the mean loss, the largest
    memory."""
    rss = [row["rss_peak_bytes"] for row in rows]
    return {
        "step_s": max(row["end_s"] for row in rows) - min(row["begin_s"] for row in rows),
        "cpu_s": sum(row["cpu_s"] for row in rows),
        "loss": statistics.fmean(row["loss"] for row in rows),
        "rss_peak_bytes": None if None in rss else max(rss),
    }


def mean_losses(first: list[dict[str, Any]]) -> list[float]:
    """The losses of the warm-up steps, each the mean over processes (which have equally many tokens)."""
    return [statistics.fmean(at_step) for at_step in zip(*(row["losses"] for row in first))]


def disagreement(losses: dict[str, list[float]], dtype: str) -> str:
    """What is wrong with the warm-up losses, or "" where they agree within LOSS_TOLERANCE."""
    for i, at_step in enumerate(zip(*losses.values())):
        low, high = min(at_step), max(at_step)
        if not all(map(math.isfinite, at_step)) or high - low > LOSS_TOLERANCE[dtype] * low:
            table = "\n".join(f"  {name:20} {loss:.8f}" for name, loss in zip(losses, at_step))
            allowed = f"allowed {LOSS_TOLERANCE[dtype]:.0e} ({dtype})"
            return f"losses of step {i + 1} differ by {(high - low) / low:.1e}, {allowed}:\n{table}"
    return ""


def summary(name: str, ours: list[float], rows: list[dict], tokens: int) -> dict[str, Any]:
    """Figures of one contender; `ours_is_x_faster` are quotients of steps of the same round."""
    times = [row["step_s"] for row in rows]
    ratios = [theirs / our for theirs, our in zip(times, ours)]
    median = statistics.median(times)
    return {
        "contender": name,
        "step_s": times,
        "cpu_s": [row["cpu_s"] for row in rows],
        "min_s": min(times),
        "median_s": median,
        "spread": (max(times) - min(times)) / median,
        "tokens_per_s_best": tokens / min(times),
        "tokens_per_s_median": tokens / median,
        "ours_is_x_faster": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "rss_peak_bytes": rows[-1]["rss_peak_bytes"],
    }


def fullest(peaks: list[dict[str, Any]]) -> dict[str, Any]:
    """The memory of the process with the highest peak, with the peaks of all."""
    return max(peaks, key=lambda peak: peak["peak_bytes"]) | {"of_processes": [p["peak_bytes"] for p in peaks]}


def sitting(
    contenders: Sequence[str],
    start: Callable[[str, str], Group],
    *,
    title: str,
    dtype: str,
    warmup: int,
    repeats: int,
    tokens: int,
    skippable: Sequence[str] = (),
    counted: dict[str, dict[str, Any]] | None = None,
    together: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(results, {absent contender: why}): warm up, check the losses, take turns, count memory; ValueError where losses
    differ.

    `start(contender, mode)` starts its processes, in mode "time" or "live"; the first contender is what the ratios
    refer to. `counted` is {contender: its memory} of earlier sittings of the same problem, and is added to. together:
    memory is counted in a step of the processes that were timed (mode "both"), which are not started again.
    """
    counted = {} if counted is None else counted
    groups: dict[str, Group] = {}
    skipped: dict[str, str] = {}
    steps: dict[str, list[dict]] = {}
    try:
        for name in contenders:
            print(f"{title}: warming up {name}", file=sys.stderr)
            groups[name] = start(name, "both" if together else "time")
            if why := groups[name].first[0].get("absent"):
                if name not in skippable:
                    raise ValueError(f"{name}: {why}; install it, or leave it out of --contenders")
                skipped[name] = why
                groups.pop(name).close()
        losses = {name: mean_losses(group.first) for name, group in groups.items()}
        if problem_found := disagreement(losses, dtype):
            raise ValueError(f"{title}: {problem_found}")
        steps = {name: [] for name in groups}
        for i in range(repeats):
            for name, group in groups.items():
                steps[name].append(of_ranks(group.ask(warmup + i)))
        for name, group in groups.items() if together else ():
            counted[name] = fullest(group.ask("live"))
    finally:
        for group in groups.values():
            group.close()
    ours = [row["step_s"] for row in steps[next(iter(steps))]]
    results = [
        summary(name, ours, rows, tokens) | groups[name].first[0] | {"losses": losses[name]}
        for name, rows in steps.items()
    ]
    for row in results:
        name = row["contender"]
        if name not in counted:
            print(f"{title}: memory of {name}", file=sys.stderr)
            group = start(name, "live")
            peaks = group.first
            group.close()
            counted[name] = fullest(peaks)
        row["live"] = counted[name]
    return results, skipped


def columns(results: list[dict[str, Any]]) -> list[str]:
    """The results as text, a heading and one line a contender, the first one being the measure of the ratios."""
    width = 2 + max(16, *(len(r["contender"]) for r in results))
    lines = [
        f"{'contender':{width}}{'min s':>9}{'median s':>10}{'spread':>8}{'tok/s':>9}  {'speed ratio [min, max]':24}"
        f"{'live MB':>9}{'ratio':>9}{'RSS MB':>9}",
    ]
    base = results[0]["live"]["peak_bytes"]
    for r in results:
        x = r["ours_is_x_faster"]
        ratio = f"{x['median']:.3f} [{x['min']:.3f}, {x['max']:.3f}]"
        live = r["live"]["peak_bytes"]
        rss = f"{r['rss_peak_bytes'] / 1e6:9.1f}" if r["rss_peak_bytes"] else f"{'-':>9}"
        lines.append(
            f"{r['contender']:{width}}{r['min_s']:9.4f}{r['median_s']:10.4f}{r['spread']:8.1%}{r['tokens_per_s_median']:9.0f}"
            f"  {ratio:24}{live / 1e6:9.1f}{live / base:9.2f}{rss}"
        )
    return lines


def write_run(out: Path, before: tuple[float, ...], **found: Any) -> None:
    """Write what a program of this folder has found, with its command and the machine. before: the load average at its
    start."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    load = {"before": before, "after": os.getloadavg()}
    out.write_text(
        json.dumps({"command": command, "machine": machine(), "load_average": load} | found, indent=1) + "\n"
    )


def machine() -> dict[str, Any]:
    """What the figures depend on besides the programs: CPU, cores, Python, operating system, commit."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = dict(line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line)
        found = {k.strip(): v.strip() for k, v in found.items()}
        model = f"{found.get('model name', model)} (family {found.get('cpu family')}, model {found.get('model')})"
    described = subprocess.run(
        ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "commit": described.stdout.strip() or "unknown",
    }
