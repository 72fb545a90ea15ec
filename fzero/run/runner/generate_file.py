"""Completions of a file of prompts in a file, by one process or the ranks of a mesh."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fzero.generate import GenerateOptions, Sampling, completions
from fzero.run.runner.completion_file import append_part, completion_text, open_completions, part_path, writer
from fzero.run.runner.prompt_file import PromptLine, read_prompts, read_raw_lines, sampling_table
from fzero.run.setup.coordinator import Coordinator
from fzero.run.setup.signals import Stopped
from fzero.run.setup.text_model import TextModel


class FileProgress(NamedTuple):
    """How far a file of completions is."""

    done: int  # completions in the file
    total: int
    tokens: int  # drawn by this rank, in this call
    seconds: float
    pages: int  # in use
    guesses: tuple[int, int] = (0, 0)  # that steps verified, and those that were right, in this call

    def text(self) -> str:
        """It in one line.

        >>> FileProgress(3, 10, 1200, 2.0, 7).text()
        '3 of 10 completions, 600 tokens/s, 7 pages in use'
        """
        speed = self.tokens / max(self.seconds, 1e-9)
        return f"{self.done:,} of {self.total:,} completions, {speed:,.0f} tokens/s, {self.pages:,} pages in use"

    def summary(self) -> str:
        """What a finished call says.

        >>> FileProgress(10, 10, 1200, 2.0, 0, (400, 300)).summary()
        '10 completions; 1,200 tokens drawn now, 600 a second; 300 of 400 guesses were right'
        """
        speed, (verified, right) = self.tokens / max(self.seconds, 1e-9), self.guesses
        text = f"{self.done:,} completions; {self.tokens:,} tokens drawn now, {speed:,.0f} a second"
        return text + (f"; {right:,} of {verified:,} guesses were right" if verified else "")


def generate_file(
    text_model: TextModel,
    prompts: Path,
    out: Path,
    sampling: Sampling,
    options: GenerateOptions,
    *,
    log_probs: bool = False,
    coordinator: Coordinator,
    show: Callable[[FileProgress], None],
) -> FileProgress:
    """Write the completions of a file of prompts that are not in `out` yet; all ranks call it. Returns
    what it did.

    sampling: what lines of the prompts do not say otherwise. log_probs: whether they are
    written. Raises ValueError as
    `read_prompts` and `open_completions` do.
    """
    mesh, lines = text_model.plan.mesh, read_prompts(prompts, text_model, sampling, options, log_probs=log_probs)
    settings = settings_of(text_model, prompts, lines, sampling, options)
    settings["log_probs"], source = log_probs, source_of(text_model, options)
    done = {tuple(pair) for pair in coordinator.share(lambda: sorted(open_completions(out, settings, lines)))}
    total = sum(line.prompt.sampling.n for line in lines)
    skip: dict[int, list[int]] = {}
    for number, sample in done:
        skip.setdefault(number, []).append(sample)
    todo = [dataclasses.replace(line.prompt, skip=frozenset(skip.get(line.prompt.number, ()))) for line in lines]
    progress, begin = FileProgress(len(done), total, 0, 0.0, 0), time.monotonic()

    def on_token(number: int, sample: int, token: int, text: str) -> None:
        nonlocal progress
        progress = progress._replace(tokens=progress.tokens + 1)

    def on_step(tokens: int, pages: int) -> None:
        nonlocal progress
        progress = progress._replace(pages=pages, seconds=time.monotonic() - begin)
        show(progress)

    target = out if coordinator.size == 1 else part_path(out, coordinator.rank)
    calls = {"plan": text_model.plan, "options": options, "on_token": on_token, "on_step": on_step}
    try:
        with writer(target) as write:
            texts = completions(text_model.model, text_model.params, todo, **calls)
            for completion in texts:
                if mesh.tp.rank == 0:
                    write(completion_text(lines[completion.number], completion, source, log_probs=log_probs))
                progress = progress._replace(done=progress.done + 1)
    except (KeyboardInterrupt, Stopped) as error:
        count = sum(1 for _ in read_raw_lines(target))
        text = f"{count:,} of {total:,} completions are in {target}; the same command makes the others"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(text) from None
        error.unfinished = text
        raise
    counts = progress.tokens, *texts.guesses
    tokens, *guesses = map(sum, zip(*coordinator.gather(counts if mesh.tp.rank == 0 else (0, 0, 0))))
    if coordinator.first and coordinator.size > 1:
        for rank in range(coordinator.size):
            append_part(out, part_path(out, rank))
    seconds = time.monotonic() - begin
    return progress._replace(done=total, tokens=tokens, seconds=seconds, guesses=tuple(guesses))


def settings_of(
    text_model: TextModel,
    prompts: Path,
    lines: Sequence[PromptLine],
    sampling: Sampling,
    options: GenerateOptions,
) -> dict[str, Any]:
    """All that decides what completions say, but for what lines of the prompts ask for; JSON. All ranks call it."""
    content, ids = hashlib.sha256(), hashlib.sha256()
    for raw, line in zip(read_raw_lines(prompts), lines):
        content.update(raw)
        ids.update(repr(line.prompt.ids).encode())
    return {
        **source_of(text_model, options),
        "prompts": content.hexdigest(),
        "ids of the prompts": ids.hexdigest(),  # by tokenizer and chat template
        "tokenizer": text_model.tokenizer.meta(),
        "ends": list(text_model.ends),
        **sampling_table(sampling),
    }


def source_of(text_model: TextModel, options: GenerateOptions) -> dict[str, Any]:
    """What completions are made with, beside their requests; JSON. All ranks call it."""
    on = {"device": text_model.device.type, "tp": text_model.plan.mesh.tp.size}
    return {"weights": text_model.digest(), "kernels": options.kernels, "cache": options.cache, **on}
