"""Makes the reports of this folder: runs each reference run, reports it, and pastes tables and pictures into README.md
and docs/.

    python reports/make.py                 # all of it, some 8 minutes on two cores that do nothing else
    python reports/make.py --only zero3    # some of the runs again (--only may be repeated)
    python reports/make.py --paste         # no run: texts and pictures from the stored numbers, and what is pasted

A report says the command of its run. Predictions are for the machine at hand: run `fzero bench` once before.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPORTS = Path(__file__).resolve().parent
ROOT = REPORTS.parent
KEPT = (".json", ".md", ".svg")  # the page is not kept: it is made from these, and larger
SHORT = "--steps 40 --set train.eval_every=20 --set train.measure_every=10"


class Run(NamedTuple):
    """A reference run."""

    name: str
    what: str
    args: str  # of fzero pretrain
    processes: int = 1


RUNS = (
    Run("pretrain", "`fzero pretrain` as it is: llama-tiny, 400 steps, one process", "--prompt ''"),
    Run(
        "one", "llama-tiny on one process, 40 steps: the base of the scaling", f"--model llama-tiny {SHORT} --prompt ''"
    ),
    Run(
        "zero3",
        "the same on two processes with ZeRO stage 3",
        f"--model llama-tiny {SHORT} --mesh dp=2 --zero 3 --prompt ''",
        2,
    ),
    Run(
        "dp2tp2",
        "the same on four processes, dp=2 and tp=2, ZeRO stage 3",
        f"--model llama-tiny {SHORT} --mesh dp=2,tp=2 --zero 3 --prompt ''",
        4,
    ),
    Run(
        "nvme",
        "the same with parameters and optimizer state on a disk",
        f"--model llama-tiny {SHORT} --offload params=nvme,opt=nvme --prompt ''",
    ),
    Run("gpt2", "gpt2-tiny on one process, 40 steps", f"--model gpt2-tiny {SHORT} --prompt ''"),
)
SEVERAL = "one+zero3+dp2tp2"  # of which pictures side by side are kept too


def main() -> None:
    """Make what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", choices=[run.name for run in RUNS], help="make this run's report alone"
    )
    parser.add_argument("--paste", action="store_true", help="make no run: write texts and pictures again")
    parser.add_argument(
        "--runs", type=Path, help="where the runs are put and stay; without it a folder that is removed"
    )
    options = parser.parse_args()
    if not options.paste:
        with tempfile.TemporaryDirectory() as scratch:
            make(
                [run for run in RUNS if run.name in (options.only or [run.name])],
                (options.runs or Path(scratch)).absolute(),
            )
    render()
    (REPORTS / "README.md").write_text(readme())
    start("reports/paste.py", cwd=ROOT)


def make(runs: list[Run], folder: Path) -> None:
    """Run each of `runs` in `folder` and write its report."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        begin = time.perf_counter()
        shutil.rmtree(folder / run.name, ignore_errors=True)
        words = ["pretrain", *shlex.split(run.args), "--out", run.name]
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.processes)]
            if run.processes > 1
            else []
        )
        start(*launcher, "-m", "fzero", *words, cwd=folder)
        report(run.name, folder)
        print(f"{run.name}: {time.perf_counter() - begin:.0f} s", flush=True)


def report(name: str, folder: Path) -> None:
    """Write the report of a run in `folder` into the folder `name` beside this file."""
    out = folder / f"report-{name}"
    fzero("report", name, "--public", "--out", out.name, cwd=folder)
    shutil.rmtree(REPORTS / name, ignore_errors=True)
    (REPORTS / name).mkdir()
    for path in out.iterdir():
        if path.suffix in KEPT:
            shutil.copy(path, REPORTS / name / path.name)


def render() -> None:
    """Write text and pictures of all reports from the numbers in their report.json, and the comparison of the runs in
    SEVERAL where all of them are there."""
    from fzero.report import report_writer

    found = {
        run.name: report_writer.read(REPORTS / run.name)
        for run in RUNS
        if (REPORTS / run.name / report_writer.JSON).is_file()
    }
    if all(name in found for name in SEVERAL.split("+")):
        several = [found[name] for name in SEVERAL.split("+")]
        found[SEVERAL] = report_writer.merge(several, "python reports/make.py --paste")
    for name, one in found.items():
        (REPORTS / name).mkdir(exist_ok=True)
        for old in (REPORTS / name).glob("*.svg"):
            old.unlink()
        for picture, drawn in report_writer.draw(one, runs=name != SEVERAL).items():
            (REPORTS / name / f"{picture}.svg").write_text(drawn.svg)
        (REPORTS / name / report_writer.MARKDOWN).write_text(report_writer.to_markdown(one, runs=name != SEVERAL))


def fzero(*words: str, cwd: Path) -> None:
    """Run an fzero command of this repository."""
    start("-m", "fzero", *words, cwd=cwd)


def start(*words: str, cwd: Path) -> None:
    """Run Python, which has fzero installed; ends here where that fails."""
    done = subprocess.run([sys.executable, *words], cwd=cwd)
    if done.returncode:
        sys.exit(f"{shlex.join(words)}: exit code {done.returncode}")


def command_of(run: Run) -> str:
    """A run's command as one types it."""
    program = f"torchrun --standalone --nproc-per-node {run.processes} -m fzero" if run.processes > 1 else "fzero"
    return f"{program} pretrain {run.args} --out {run.name}"


def readme() -> str:
    """The README of this folder: which runs are reported here, by which commands."""
    lines = ["# Reports of reference runs", ""]
    lines += ["Written by `python reports/make.py`, which makes every run and report again; nothing here is typed.", ""]
    lines += ["| report | what | steps | on | commit |", "|---|---|---:|---|---|"]
    there = [run for run in RUNS if (REPORTS / run.name / "report.json").is_file()]
    for run in there:
        found = json.loads((REPORTS / run.name / "report.json").read_text())["runs"][0]
        last = found["attempts"][-1] if found["attempts"] else {}
        machine = last.get("machine", {})
        on = f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores"
        commit = f"{last.get('commit', '')[:10]}{'+' * bool(last.get('dirty'))}"
        lines.append(
            f"| [{run.name}]({run.name}/report.md) | {run.what} | {found['series']['step'][-1]:,} | {on} | {commit} |"
        )
    if (REPORTS / SEVERAL / "report.md").is_file():
        lines.append(f"| [{SEVERAL}]({SEVERAL}/report.md) | {SEVERAL.replace('+', ', ')} beside each other | | | |")
    lines += ["", "The commands of the runs:", "", "```console"]
    lines += [command_of(run) for run in there]
    lines += [
        "```",
        "",
        "and of their reports: `fzero report NAME --public --out FOLDER`, which writes the page `report.html` as well.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
