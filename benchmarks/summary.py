"""What the files of benchmarks/results say, as a page: what each compares, its main figures, machine, date and command.

python benchmarks/summary.py        # writes benchmarks/results/README.md
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER / "results/README.md"
# A line for each figure: the script of the files, the key of the figure in each row (a/b: a quotient), what it is.
FIGURES = """
batching          over_static.median        fzero is so many times as fast as batches of transformers
batching          over_continuous.median    and as its continuous batching
cache_codes       logits                    mean relative error of logits with keys and values in codes
canonical         ratio.median              time of a step, canonical over fast sums
canonical_forms   ratio                     time, kernels=canonical over auto
canonical_forms   share                     logits of rows alone that have the bits of the batch
checkpoints       ratios:median             ratios
context           wall                      time of a step, over that of balanced blocks
context           of_dp                     tokens/s, over the first mesh
curricula         last                      validation loss at the end, mean of the seeds
decoding          ratio.median              fzero is so many times as fast as transformers
disk_generation   of_disk.median            tokens/s, of what the disk allows
draws             faster                    fzero's draw is so many times as fast as transformers'
experts_overlap   by_first                  time, over exchanges beside which nothing is computed
experts_slack     by_one                    time, over one program
fzero             val_loss.300              validation loss at the end
grammars          results:build_ms          median time to build a schema, ms
grammars          results:mask_us_mean      mean time of the mask of a token, microseconds
grammars          results:invalid           invalid texts of 250
generate_plan     measured_by_predicted     time of a step of generation, over the plan's bound
generate_plan     peak_error                error of its peak of memory
learning          val_loss.400              validation loss at the end
beside_llama      ratio.median              fzero is so many times as fast as llama.cpp
beside_llama      share                     bytes of weights a second, of what one pass over memory reads
loaders           rows_per_s                rows/s
long              peak_bytes                peak of live tensors, bytes
measure_overhead  counted_share             part of a step that measuring takes
modules           ours_is_x_faster.median   the first is so many times as fast
moe               fzero_is_x_faster         fzero is so many times as fast
nvme              of_fio.median             rate, over fio's
nvme              slower_than_first.median  time of a step, over the first
offload_large     tokens_per_s              tokens/s
offload_large     states_bytes/limit_bytes  states, over the memory allowed
pipeline          ours_is_x_faster.median   the first is so many times as fast
pipeline          measured_by_played        measured time of a step, over the played one
plan_published    predicted.tokens_per_s/tokens_per_s  predicted over published tokens/s
plan_time         median_absolute_error     error of the predicted time of a step, median
plan_time         kendall_tau               rank correlation of predicted and measured
prepare           tokens_per_s              tokens/s
quantize_kinds    of_best                   time, over the fastest kind of the dtype
remote_data       of_local.cold             rows/s with a cold cache, over those of a folder
remote_data       of_local.warm             with a warm one
roofline          tokens_per_s              planned tokens/s of a GPU
same_speed        ratio                     time, of the later commit over the earlier
scheduler         step_ms                   milliseconds of a step in which every row draws
scheduler         chunk_ms                  of one with chunks of prompts
shared_cores      kept                      part of the speed that is kept beside so many busy processes
single            ours_is_x_faster.median   fzero is so many times as fast
speculation       ratio.median              fzero with guesses is so many times as fast as without
slow_links        measured_by_predicted     measured over predicted time
zero              ours_is_x_faster.median   the first is so many times as fast
"""
# The values that name a row, and those of a run that name the rows in it; a row without has the keys that lead to it.
LABELS = ("name", "contender", "operation", "schedule", "form", "gigabits",
          "mesh", "stage", "documents", "blocks", "kind")  # fmt: skip
OF_A_RUN = ("config", "dtype", "what")
PLAIN = {"runs", "results", "forms", "ways", "systems", "rows", "cases", "beside", "ratios"}  # keys that name nothing
MANY = 18  # more figures than these are their median and range


def figures_of(script: str) -> list[tuple[str, str, str, str]]:
    """(a key above the rows or nothing, key, key of a divisor or nothing, what it is) of the figures of a script."""
    found = re.findall(rf"^{script} +(?:(\w+):)?([\w.]+)(?:/(\w+))? +(.*)", FIGURES, re.MULTILINE)
    if not found:
        raise ValueError(f"{script}: no line in FIGURES of benchmarks/summary.py; add one")
    return found


def script_of(found: dict[str, Any]) -> tuple[str, str]:
    """(the name of the script that made a file, its command)."""
    command = found.get("command") or "; ".join(found["commands"])
    command = shlex.join(command) if isinstance(command, list) else command
    name = re.search(r"(\w+)\.py", command)
    if name is None:
        return "fzero", command
    return name[1], f"python benchmarks/{command.partition('benchmarks/')[2] if '/' in command else command}"


def at(value: Any, path: str) -> Any:
    """What a dotted key leads to, or None; of a list of numbers their mean."""
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return statistics.mean(value) if isinstance(value, list) and path == "last" else value


def rows(value: Any, figure: Sequence[str], path: tuple[str, ...] = (), run: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of each row below a value that has the figure."""
    for one in value if isinstance(value, list) else ():
        yield from rows(one, figure, path, run)
    if not isinstance(value, dict):
        return
    under, key, divisor, _ = figure
    number, by = at(value, key), at(value, divisor) if divisor else 1
    if isinstance(number, int | float) and by and (not under or under in path):
        values = {label: value[label] for label in LABELS if isinstance(value.get(label), str | int | float)}
        named = [each if isinstance(each, str) else f"{label} {each}" for label, each in values.items()]
        yield " ".join(filter(None, (run, *(named or [key for key in path if key not in PLAIN])))), number / by
    own = " ".join(value[name] for name in OF_A_RUN if isinstance(value.get(name), str))
    for name, one in value.items():
        yield from rows(one, figure, (*path, name), own or run)


def shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def said(figure: Sequence[str], found: dict[str, Any]) -> str:
    """A figure of a file in words, or nothing: each row, and where there are many their median and range."""
    every = list(rows(found, figure))
    if len(every) <= MANY:
        each = (f"{name} = {shown(number)}".removeprefix(" = ") for name, number in every)
        return f"{figure[-1]}: {'; '.join(each)}" if every else ""
    numbers = [number for _, number in every]
    middle, least, most = map(shown, (statistics.median(numbers), min(numbers), max(numbers)))
    return f"{figure[-1]}: median of {len(every)} = {middle} ({least} to {most})"


def row_of(file: Path, found: dict[str, Any], script: str, command: str) -> str:
    """The line of a file in the table of its script."""
    machine = found.get("machine") or found.get("device") or "plans, of data sheets"
    commit = found.get("commits", {}).get("today", "")
    if isinstance(machine, dict):
        machine, commit = f"{machine['cpu']}, {machine['cores']} cores", machine.get("commit", "")
    when = ", ".join(filter(None, (found.get("date", "")[:10], commit))) or "not recorded"
    figures = ". ".join(filter(None, (said(figure, found) for figure in figures_of(script))))
    tables = f", [tables]({file.stem}.md)" if file.with_suffix(".md").is_file() else ""
    return f"| [{file.stem}]({file.name}){tables} | {figures} | {machine.partition(':')[0]} | {when} | `{command}` |"


def page() -> str:
    """The text of benchmarks/results/README.md."""
    tables: dict[str, list[str]] = {}
    for file in sorted(PAGE.parent.glob("*.json")):
        found = json.loads(file.read_text())
        script, command = script_of(found)
        tables.setdefault(script, []).append(row_of(file, found, script, command))
    lines = ["# Results of the benchmarks", "", "Made by `python benchmarks/summary.py`. Compare within a file only."]
    for script, table in sorted(tables.items()):
        path = FOLDER / f"{script}.py"
        about = ast.get_docstring(ast.parse(path.read_text())) if path.is_file() else "`fzero pretrain`, by settings."
        head = ["| file | figures | machine | date, commit | command |", "|---|---|---|---|---|"]
        title = " ".join((about or "").split("\n\n")[0].split()).rstrip(":")
        lines += ["", f"## {script}", "", title, "", *head, *table]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
