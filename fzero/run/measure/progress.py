"""The display of a run on a terminal: a line every few steps, or a bar."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from fzero.core.compile import on_first_compile
from fzero.run.corpus import Say

COLUMNS, ROWS = 80, 24  # of a terminal that does not say how large it is
RECENT = 20  # steps whose mean predicts the rest
COMPILING = "compiling (about 25 s on two cores, once a machine)"


@contextlib.contextmanager
def show_progress(
    first: int, last: int, *, every: int, bar: bool, say: Say
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A context of a function that shows a step's row.

    first, last: the step before the first row, and the last one. every: steps from line to line; the bar is drawn
    anew after each. If the first step waits for the compiler, that is said; its time predicts nothing.
    """
    recent: list[float] = []
    val = ""
    with ExitStack() as stack:
        progress_bar = stack.enter_context(open_bar(first, last)) if bar else None
        show_note = (
            partial(say, COMPILING) if progress_bar is None else partial(progress_bar.set_postfix_str, COMPILING)
        )
        waiting = stack.enter_context(elapsing(progress_bar, "first step"))
        stack.enter_context(on_first_compile(show_note))

        def show(row: Mapping[str, Any]) -> None:
            nonlocal val
            is_first = row["step"] == first + 1
            waiting()
            if not is_first:
                recent[:] = [*recent[1 - RECENT :], row["step_s"]]
            loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
            val = f"  val {row['val_loss']:.4f}" if "val_loss" in row else val
            speed = f"{row['tokens_per_s']:,.0f} tokens/s  MFU {100 * row['mfu']:.0f}%"
            if progress_bar is not None:
                progress_bar.set_postfix_str(f"loss {loss}{val}  {speed}", refresh=False)
                progress_bar.update()
                if is_first:  # the bar counts its rate from here on
                    progress_bar.initial, progress_bar.start_t = progress_bar.n, progress_bar.last_print_t
            elif row["step"] % every == 0 or is_first or row["step"] == last or "val_loss" in row:
                eta = f"  ETA {format_duration((last - row['step']) * sum(recent) / len(recent))}" if recent else ""
                say(f"step {row['step']}/{last}  loss {loss}{val}  {speed}{eta}{'  SKIPPED' * bool(row['skipped'])}")

        yield show


def open_bar(first: int, last: int) -> Any:
    """A progress bar on stderr."""
    return sized_bar(total=last, initial=first, unit="step")


def sized_bar(**options: Any) -> Any:
    """A bar of tqdm on stderr that follows the terminal's width; a terminal that says it has none, such as a pty of 0
    columns, is taken for one of 80."""
    from tqdm import tqdm

    columns = rows = 1  # where stderr is no terminal tqdm decides
    with contextlib.suppress(OSError, ValueError):
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    size: dict[str, Any] = (
        {"dynamic_ncols": True} if columns and rows else {"ncols": columns or COLUMNS, "nrows": rows or ROWS}
    )
    return tqdm(**options, **size)


@contextlib.contextmanager
def elapsing(progress_bar: Any, text: str) -> Iterator[Callable[[], None]]:
    """A context in which a bar says `text` and counts seconds, until the function that it gives is called."""
    end = threading.Event()

    def count() -> None:
        while not end.wait(1.0):
            progress_bar.refresh()

    if progress_bar is not None:
        progress_bar.set_postfix_str(text)
        threading.Thread(target=count, name="fzero-progress", daemon=True).start()
    try:
        yield end.set
    finally:
        end.set()


def format_duration(seconds: float) -> str:
    """A duration in words: 0:42, 12:05, 3:00:00."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes}:{s:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"
