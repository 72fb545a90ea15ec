"""The row that a step leaves in metrics.jsonl: its numbers, and who is shown them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fzero import runs
from fzero.corpus import Say
from fzero.program import Program
from fzero.train import Metrics


def numbers(program: Program, metrics: Metrics, step: int) -> dict[str, Any]:
    """The row of a step's metrics: numbers that JSON has (None for what is not finite). `step` steps were made before."""
    values = {
        "loss": float(metrics.loss),
        **{name: float(value) for name, value in metrics.extra.items()},
        "grad_norm": float(metrics.grad_norm),
        "lr": float(program.schedule(step)),
        "loss_scale": float(metrics.loss_scale),
    }
    values = {name: value if math.isfinite(value) else None for name, value in values.items()}
    row = {"step": step + 1, **values, "skipped": bool(metrics.skipped), "num_tokens": int(metrics.num_tokens)}
    if row["skipped"]:
        row["reason"] = "spike" if values["grad_norm"] is not None else "nonfinite"
    return row


@contextlib.contextmanager
def recorder(folder: Path, first: int, until: int, every: int, bar: bool, say: Say) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that takes a step's row to metrics.jsonl, to the terminal, and to TensorBoard where that package is there."""
    with ExitStack() as stack:
        file = stack.enter_context((folder / runs.METRICS).open("a", encoding="utf-8"))
        shown = board = None
        if bar:
            from tqdm import tqdm

            shown = stack.enter_context(tqdm(total=until, initial=first, unit="step", dynamic_ncols=True))
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            board = stack.enter_context(SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1))
        recent: list[float] = []
        val = ""

        def record(row: dict[str, Any]) -> None:
            nonlocal val
            file.write(json.dumps(row) + "\n")
            file.flush()
            for name, value in row.items() if board else ():
                if name != "step" and isinstance(value, (int, float)):
                    board.add_scalar(name, value, row["step"])
            recent[:] = [*recent[-19:], row["step_s"]]
            loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
            val = f"  val {row['val_loss']:.4f}" if "val_loss" in row else val
            speed = f"{row['tokens_per_s']:,.0f} tokens/s  MFU {100 * row['mfu']:.0f}%"
            if shown is not None:
                shown.set_postfix_str(f"loss {loss}{val}  {speed}", refresh=False)
                shown.update()
            elif row["step"] % every == 0 or row["step"] in (first + 1, until) or "val_loss" in row:
                left = clock((until - row["step"]) * sum(recent) / len(recent))
                say(f"step {row['step']}/{until}  loss {loss}{val}  {speed}  ETA {left}{'  SKIPPED' if row['skipped'] else ''}")

        yield record


def clock(seconds: float) -> str:
    """A duration in words: 0:42, 12:05, 3:00:00."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes}:{s:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"
