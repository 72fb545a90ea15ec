"""Files of completions, one JSON object a line, that an interrupted command goes on with.

A line is written whole, as soon as its completion has ended, so lines are in no order; `number` and `sample` say which
prompt they are of. Beside FILE is FILE.settings.json, with all that decides what is in it. Ranks of a mesh write
FILE.rank-N, which rank 0 puts together at the end, or at the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fzero.core.files import cut_half_line, naming, open_to_write
from fzero.core.storage import write_text
from fzero.core.text_parsing import expect_entries, json_text, parse_json, read_json, short
from fzero.generate import Completion
from fzero.run.runner.prompt_file import PromptLine, read_raw_lines, request_table

SETTINGS = ".settings.json"
LOG_PROBS = ("log_probs", "drawn_log_probs", "mass", "alternatives", "prompt_log_probs")


def completion_text(line: PromptLine, completion: Completion, source: Mapping[str, Any], *, log_probs: bool) -> str:
    """The JSON of a completion, with its request and the `source` that it was made with. log_probs: with its numbers,
    in the fewest digits that are the same float32.

    >>> from fzero.generate import Prompt
    >>> line = PromptLine(Prompt((1,), number=3), "a")
    >>> completion = Completion(3, 0, (7,), "x", "length", (-0.1,), (-0.1,), (1.0,))
    >>> json.loads(completion_text(line, completion, {"kernels": "auto"}, log_probs=False))["request"]
    {'ids': [1]}
    """
    entries = {"id": line.id, "number": completion.number, "sample": completion.sample}
    entries |= {"text": completion.text, "ids": list(completion.ids), "finish": completion.finish}
    numbers = {name: rounded(getattr(completion, name)) for name in LOG_PROBS} if log_probs else {}
    made_by = {"request": request_table(line.prompt), "source": dict(source)}
    return json.dumps(entries | {name: values for name, values in numbers.items() if values} | made_by)


def rounded(value: Any) -> Any:
    """Numbers, in any nesting, in the fewest digits that are the same float32."""
    if isinstance(value, float):
        return float(str(np.float32(value)))
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def settings_path(out: Path) -> Path:
    """Where the settings of a file of completions are."""
    return out.with_name(out.name + SETTINGS)


def open_completions(out: Path, settings: Mapping[str, Any], lines: Sequence[PromptLine]) -> set[tuple[int, int]]:
    """Begin a file of completions, or go on with it: (number, sample) of those that are in it already.

    Raises ValueError for a file that other settings made, naming the first that differs, and for one that is no file of
    completions.
    """
    if not out.parent.is_dir():
        raise ValueError(f"{out}: there is no folder {out.parent}; make it first")
    path, parts = settings_path(out), sorted(out.parent.glob(f"{out.name}.rank-*"))
    if not os.path.lexists(path) and (os.path.lexists(out) or parts):
        raise ValueError(f"{out}: is there, without {path.name}: no fzero generate wrote it; name another file")
    begun = parts or (os.path.lexists(out) and out.stat().st_size)
    # Settings of a call that was refused before its first completion bind no later one.
    if not begun and (not os.path.lexists(path) or read_json(path).keys() == settings.keys()):
        write_text(path.parent, path.name, json_text(settings, str(path), 2) + "\n")
    expect_settings(read_json(path), settings, out)
    with writer(out):
        pass  # a line that was cut short is removed
    for part in parts:
        append_part(out, part)
    counts = [line.prompt.sampling.n for line in lines]
    done = set[tuple[int, int]]()
    for row, raw in enumerate(read_raw_lines(out), 1):
        table = parse_json(raw, f"{out}:{row}")
        expect_entries(table, {"number": int, "sample": int}, f"{out}:{row}")
        number, sample = int(table["number"]), int(table["sample"])
        if not (0 <= number < len(counts) and 0 <= sample < counts[number]):
            raise ValueError(f"{out}:{row}: is no completion of these prompts; remove the line")
        if (number, sample) in done:
            raise ValueError(f"{out}:{row}: is sample {sample} of prompt {number}, as an earlier line; remove it")
        done.add((number, sample))
    return done


def expect_settings(recorded: Mapping[str, Any], settings: Mapping[str, Any], out: Path) -> None:
    """Raise ValueError naming the first setting that differs from what a file was begun with."""
    for name in [*settings, *recorded]:
        if recorded.get(name) != settings.get(name):
            raise ValueError(
                f"{out}: was begun with {name} {short(recorded.get(name))}, and here it is "
                f"{short(settings.get(name))}; give the former, or another --out"
            )


@contextlib.contextmanager
def writer(out: Path) -> Iterator[Any]:
    """A context of a function that appends a line to a file, which no other process writes meanwhile."""
    fd = open_to_write(out, "append")
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{out}: another process writes it; wait for it, or name another file") from None
        cut_half_line(fd)

        def write(line: str) -> None:
            data = memoryview(f"{line}\n".encode())
            with naming(out):
                while data:
                    data = data[os.write(fd, data) :]

        yield write
    finally:
        os.close(fd)


def part_path(out: Path, rank: int) -> Path:
    """The file of a rank."""
    return out.with_name(f"{out.name}.rank-{rank}")


def append_part(out: Path, part: Path) -> None:
    """Move the lines of a rank's file to the end of the whole one; those that are there, of a move that was cut short,
    are left out."""
    there = {*read_raw_lines(out)}
    with writer(part), writer(out) as write:
        for raw in read_raw_lines(part):
            if raw not in there:
                write(raw.decode().rstrip("\n"))
    part.unlink()
