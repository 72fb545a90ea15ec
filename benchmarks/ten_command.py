"""The command for ten.py: a run with evaluations, saves and a profile; resumed; a sample; its report."""

from __future__ import annotations

import functools
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from ten_rows import Rows, Where, fzero, must, said_by

RUN = ["--model", "gpt2-124m", "--batch", "64", "--micro-batch", "32", "--seq-len", "1024", "--profile", "40-41"]
TINY = ["--model", "gpt2-tiny", "--batch", "2", "--micro-batch", "2", "--seq-len", "16", "--profile", "4-5"]


def rows(where: Where) -> Rows:
    """Each command behind the one before: 60 steps, and 5 more."""
    folder, steps = where.folder / "run", 6 if where.tiny else 60
    words = [*(TINY if where.tiny else RUN), "--steps", str(steps + 5), "--stop-at", str(steps), "--prompt", "def "]
    options = {"eval_every": steps // 2, "checkpoint_every": steps // 2, "measure_every": steps // 2, "eval_batches": 4}
    options |= {"compiled": "false"} if where.tiny else {}
    words += [word for name, value in options.items() for word in ("--set", f"train.{name}={value}")]
    words += ["--device", where.device]
    if where.tiny:  # preparing the standard library takes its time
        (where.folder / "text.txt").write_text(
            "".join(path.read_text() for path in Path(__file__).parent.glob("ten*.py"))
        )
        words += ["--data", str(where.folder / "text.txt")]
    yield "pretrain", functools.partial(pretrain, words, 0, folder, where)
    yield "resume", functools.partial(pretrain, ["--resume"], steps, folder, where)
    sample = fzero("sample", str(folder), "--prompt", "def ", "--max-new-tokens", "8" if where.tiny else "64")
    yield "sample", lambda: must(said_by([*sample, "--device", where.device]))
    yield "report", lambda: must(said_by(fzero("report", str(folder))))


def pretrain(words: list[str], behind: int, folder: Path, where: Where) -> dict[str, Any]:
    """A run's last lines, and what its rows behind a step say: how fast it was, and what a save has cost."""
    found = must(said_by(fzero("pretrain", *words, "--out", str(folder))))
    shutil.copy(folder / "metrics.jsonl", where.out / "metrics.jsonl")
    table = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    table = [row for row in table if row["step"] > behind]
    keys = ("step", "saved_step", "save_blocked_s", "save_s", "wall_s", "gpu_peak_bytes", "gpu_reserved_ratio")
    said = [{key: row[key] for key in keys if key in row} for row in table]
    return found | {
        "steps": len(table),
        "losses": [round(row["loss"], 4) for row in table],
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in table),
        "wall_s": statistics.median(row["wall_s"] for row in table),
        "rows": [row for row in said if len(row) > 2],
    }
