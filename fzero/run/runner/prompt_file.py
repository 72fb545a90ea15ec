"""Files of prompts, one JSON object a line, with how each is to be continued.

    {"prompt": "Once"} | {"messages": [{"role": "user", "content": "Hi"}]} | {"ids": [3, 5]}

and beside it `id`, a text or a number of the caller's, and any field of `Sampling` by its name, such as n, seed or
stop, which stands above the one of the command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fzero.core.text_parsing import LARGEST, expect_entries, nearest, open_regular, parse_json, short
from fzero.generate import GenerateOptions, Prompt, Sampling
from fzero.generate.pages import pages_for
from fzero.generate.sequences import sequences_of
from fzero.run.setup.text_model import TextModel

CONTENTS = {"prompt": str, "messages": list, "ids": list}
FIELDS = tuple(field.name for field in dataclasses.fields(Sampling))


class PromptLine(NamedTuple):
    """A line of a file of prompts."""

    prompt: Prompt  # its number counts the lines, from 0
    id: Any  # of the line; its number where it has none


def read_prompts(
    path: Path, text_model: TextModel, sampling: Sampling, options: GenerateOptions, *, log_probs: bool = False
) -> list[PromptLine]:
    """The prompts of a file. sampling: what a line does not say otherwise; log_probs: whether those of the prompts are
    wanted. Raises ValueError naming file and line of one that cannot be continued as it asks."""
    lines, numbers = list[PromptLine](), dict[Any, int]()
    for number, raw in enumerate(read_raw_lines(path)):
        name = f"{path}:{number + 1}"
        table = parse_json(raw, name, unique_keys=True)
        try:
            line = prompt_line(table, number, text_model, sampling, log_probs=log_probs)
            expect_prompt(line.prompt, text_model, options)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if line.id in numbers:
            raise ValueError(f"{name}: has the id {short(line.id)} of line {numbers[line.id] + 1}; give each its own")
        numbers[line.id] = number
        lines.append(line)
    if not lines:
        raise ValueError(f'{path}: has no prompts; give one a line, such as {{"prompt": "Once"}}')
    return lines


def read_raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, without a byte order mark."""
    with open_regular(path) as file:
        for number, raw in enumerate(iter(lambda: file.readline(LARGEST + 1), b"")):
            yield raw.removeprefix(b"\xef\xbb\xbf") if number == 0 else raw


def prompt_line(
    table: dict[str, Any], number: int, text_model: TextModel, sampling: Sampling, *, log_probs: bool = False
) -> PromptLine:
    """The value of a line; raises ValueError for one that is no prompt."""
    for key in table:
        if key not in (*CONTENTS, "id", *FIELDS):
            known = (*CONTENTS, "id", *FIELDS)
            raise ValueError(f"has the key {short(key)}{nearest(key, known)}; the keys are {', '.join(known)}")
    contents = [key for key in CONTENTS if key in table]
    if len(contents) != 1:
        text = f"has {' and '.join(contents)}" if contents else "has no prompt"
        raise ValueError(f"{text}; give one of {', '.join(CONTENTS)}")
    (key,) = contents
    expect_entries(table, {key: CONTENTS[key], "id?": str | int}, "it")
    content: Any = table[key]
    if key == "messages":
        content = [as_message(message, i) for i, message in enumerate(content)]
    ids: tuple[int, ...] = tuple(content) if key == "ids" else text_model.ids_of(content)
    changes = {name: value for name, value in table.items() if name in FIELDS}
    if isinstance(changes.get("bias"), dict):  # the keys of JSON are texts
        changes["bias"] = {int(key) if key.isdecimal() else key: value for key, value in changes["bias"].items()}
    prompt = Prompt(ids, dataclasses.replace(sampling, **changes) if changes else sampling, number, log_probs)
    return PromptLine(prompt, table.get("id", number))


def sampling_table(sampling: Sampling) -> dict[str, Any]:
    """The fields of a Sampling as in JSON."""
    fields = dataclasses.asdict(sampling)
    fields["bias"] = {str(token): value for token, value in sampling.bias.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def request_table(prompt: Prompt) -> dict[str, Any]:
    """The line of a prompt with its ids, and the fields of its sampling that are not the default.

    >>> request_table(Prompt((5, 7), Sampling(0.5, stop=("x",))))
    {'ids': [5, 7], 'temperature': 0.5, 'stop': ['x']}
    """
    default = sampling_table(Sampling())
    fields = sampling_table(prompt.sampling).items()
    return {"ids": list(prompt.ids)} | {name: value for name, value in fields if value != default[name]}


def as_message(message: Any, number: int) -> Mapping[str, Any]:
    """A message of a conversation; raises ValueError for what is none."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{number}] is {short(message)}; it must be a table of role and content")
    return message


def expect_prompt(prompt: Prompt, text_model: TextModel, options: GenerateOptions) -> None:
    """Raise ValueError for a prompt that cannot be continued, or has no pages enough."""
    sequences = sequences_of(text_model.model, [prompt], options)
    if options.pages is None:
        return
    for sequence in sequences[:1]:
        tokens = len(prompt.ids) + sequence.new_tokens - 1
        needed = pages_for(tokens, options.page_tokens)
        if needed > options.pages:
            raise ValueError(
                f"its {len(prompt.ids)} tokens and up to {sequence.new_tokens} new ones need {needed} pages of "
                f"{options.page_tokens}, and there are {options.pages}; give more pages, or a smaller max_tokens"
            )
