"""Completions of a file made again from their lines, in another batch, and compared.

A line has its request, as a line of a file of prompts has it, the number and sample that its draws have as keys, and
what it was made with: the digest of the weights, kernels, cache, device and tp. With kernels=canonical all that a line
says must come again, to the last bit; else ids and text, as the last bits of log-probabilities depend on the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fzero.core.text_parsing import expect_entries, parse_json, short
from fzero.generate import Completion, GenerateOptions, Sampling, completions
from fzero.kernels.registry import Kernels
from fzero.run.runner.completion_file import completion_text
from fzero.run.runner.generate_file import source_of
from fzero.run.runner.prompt_file import PromptLine, expect_prompt, prompt_line, read_raw_lines
from fzero.run.setup.coordinator import Coordinator
from fzero.run.setup.text_model import TextModel

IN_ANY_BATCH = ("ids", "text", "finish")


class ReplayedFile(NamedTuple):
    """What came of the lines of a file."""

    total: int
    exact: bool  # whether their log-probabilities were compared too, to the bit
    differences: tuple[str, ...]  # a line for each that is another one now

    def lines(self) -> list[str]:
        """It in words.

        >>> ReplayedFile(3, True, ("texts.jsonl:2: finish is 'length', and was 'stop id'",)).lines()[-1]
        '2 of 3 completions are the same, to the bit'
        """
        extent = "to the bit" if self.exact else "in ids and text; with --kernels canonical all is compared"
        equal = self.total - len(self.differences)
        return [*self.differences, f"{equal:,} of {self.total:,} completions are the same, {extent}"]


def replay_file(
    text_model: TextModel,
    path: Path,
    options: GenerateOptions,
    *,
    coordinator: Coordinator,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> ReplayedFile:
    """Make the completions of a file again, in one batch; all ranks call it.

    show: called with (completions made by this rank, those of the file). Raises ValueError naming file and line of one
    that says not what it was made of, or was made with something else than is here, by name.
    """
    source, exact = source_of(text_model, options), Kernels.parse(options.kernels).canonical
    recorded, lines = read_completions(path, source, text_model, options)
    samples = {number: {s for n, s in recorded if n == number} for number in lines}
    prompts = [
        dataclasses.replace(line.prompt, skip=frozenset(range(line.prompt.sampling.n)) - samples[number])
        for number, line in lines.items()
    ]
    differences: list[tuple[int, str]] = []
    calls = {"plan": text_model.plan, "options": options}
    for done, completion in enumerate(completions(text_model.model, text_model.params, prompts, **calls), 1):
        row, table = recorded[completion.number, completion.sample]
        if text := difference(table, lines[completion.number], completion, source, exact=exact):
            differences.append((row, f"{path}:{row}: {text}"))
        show(done, len(recorded))
    ranks = coordinator.gather(differences if text_model.plan.mesh.tp.rank == 0 else [])
    texts = [text for _, text in sorted((row, text) for rank in ranks for row, text in rank)]
    return ReplayedFile(len(recorded), exact, tuple(texts))


def read_completions(
    path: Path, source: dict[str, Any], text_model: TextModel, options: GenerateOptions
) -> tuple[dict[tuple[int, int], tuple[int, dict[str, Any]]], dict[int, PromptLine]]:
    """({(number, sample): (row, line)}, {number: its prompt}) of a file; raises ValueError."""
    recorded: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
    lines: dict[int, PromptLine] = {}
    requests: dict[int, Any] = {}
    for row, raw in enumerate(read_raw_lines(path), 1):
        label = f"{path}:{row}"
        table = parse_json(raw, label)
        expect_entries(table, {"number": int, "sample": int, "request": dict, "source": dict}, label)
        number, key = int(table["number"]), (int(table["number"]), int(table["sample"]))
        for name in [*source, *table["source"]]:
            if table["source"].get(name) != source.get(name):
                raise ValueError(
                    f"{label}: was made with {name} {short(table['source'].get(name))}, and here it is "
                    f"{short(source.get(name))}; give the former"
                )
        if key in recorded or requests.setdefault(number, table["request"]) != table["request"]:
            raise ValueError(f"{label}: is sample {key[1]} of prompt {number}, as an earlier line; remove one of them")
        recorded[key] = row, table
        if number not in lines:
            try:
                request = {**table["request"], "id": table.get("id", number)}
                lines[number] = prompt_line(request, number, text_model, Sampling(), log_probs="log_probs" in table)
                expect_prompt(lines[number].prompt, text_model, options)
            except ValueError as error:
                raise ValueError(f"{label}: request: {error}") from None
        if not 0 <= key[1] < lines[number].prompt.sampling.n:
            raise ValueError(f"{label}: is sample {key[1]} of {lines[number].prompt.sampling.n}; remove the line")
    if not recorded:
        raise ValueError(f"{path}: has no completions; give a file that fzero generate wrote")
    return recorded, lines


def difference(
    table: dict[str, Any], line: PromptLine, completion: Completion, source: dict[str, Any], *, exact: bool
) -> str:
    """The first entry of a line that is another one now; "" if none is."""
    replayed = parse_json(completion_text(line, completion, source, log_probs="log_probs" in table).encode(), "")
    for name in {**replayed, **table} if exact else IN_ANY_BATCH:
        if name not in replayed or name not in table:
            return f"{name} is {'missing' if name in replayed else 'no entry of a completion'}"
        actual, recorded = replayed[name], table[name]
        if actual == recorded:
            continue
        if isinstance(actual, list) and isinstance(recorded, list) and len(actual) == len(recorded):
            index = next(i for i, pair in enumerate(zip(actual, recorded)) if pair[0] != pair[1])
            name, actual, recorded = f"{name}[{index}]", actual[index], recorded[index]
        return f"{name} is {short(actual)}, and was {short(recorded)}"
    return ""
