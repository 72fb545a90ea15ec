"""A config as commented TOML: each value with the comment of its field, and its default where the value differs."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from fzero.core.config_tables import Table, flat, set_nested, to_toml
from fzero.run.config import Data, RunConfig
from fzero.run.config_table import first_sizes, to_table
from fzero.run.unused_keys import refuse_unused


def commented(config: RunConfig) -> str:
    """The TOML text of every value of a config, which `fzero pretrain --config` takes; unset values are left out, and
    those that do nothing with the chosen optimizer, schedule or policies follow a "#".

    >>> from fzero.run.config_table import from_table
    >>> [line for line in commented(from_table({"zero": 3})).splitlines() if line.startswith("zero")]
    ['zero = 3  # ZeRO stage (default 0)']
    """
    table, notes = {}, {}
    kinds = kinds_of(config)
    model = first_sizes(to_table(config)["model"])
    usual = dict(flat(to_table(RunConfig(model=model, data=Data(seq_len=min(Data.seq_len, model.max_len))))))
    for name, value in flat(to_table(config)):
        if value is None:
            continue
        set_nested(table, name, value)
        parent, _, field = name.rpartition(".")
        words = [comments_of(kinds[parent]).get(field, "")] if parent in kinds else []
        if name in usual and value != usual[name] and name not in ("preset", "model.family"):
            words.append(f"(default {usual[name]!r})")
        notes[name] = " ".join(filter(None, words))
    return "\n".join(without_unused(config, to_toml(table, notes).splitlines())) + "\n"


def without_unused(config: RunConfig, lines: list[str]) -> Iterator[str]:
    """The lines of a TOML text, with a "# " before values that a config file may not set."""
    prefix = ""
    for line in lines:
        if line.startswith("["):
            prefix = line.strip("[]") + "."
        table: Table = {}
        key = line.partition(" = ")[0]
        if " = " in line:
            set_nested(table, prefix + key, None)
        try:
            refuse_unused(config, table)
        except ValueError:
            line = f"# {line}"
        yield line


def differences(config: RunConfig, baseline: RunConfig) -> list[str]:
    """A line for each value of `config` that differs from the one of `baseline`: "train.steps = 400, not 1000"."""
    theirs = dict(flat(to_table(baseline)))
    return [
        f"{name} = {value!r}, not {theirs.get(name)!r}"
        for name, value in flat(to_table(config))
        if value != theirs.get(name)
    ]


def kinds_of(value: Any, prefix: str = "") -> dict[str, type]:
    """{name of a table of the config: its dataclass}; the outermost is ""."""
    kinds = {prefix: type(value)}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            kinds |= kinds_of(inner, f"{prefix}.{field.name}".lstrip("."))
    return kinds


@functools.cache
def comments_of(kind: type) -> dict[str, str]:
    """{field: its comment} of a dataclass: after its line, or on lines of their own above it."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines, comments = source.splitlines(), {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        inline_comments = [
            line.partition("  # ")[2] for line in lines[node.lineno - 1 : node.end_lineno] if "  # " in line
        ]
        leading_lines, index = [], node.lineno - 2
        while lines[index].strip().startswith("# "):
            leading_lines.insert(0, lines[index].strip()[2:])
            index -= 1
        comments[node.target.id] = " ".join([*leading_lines, *inline_comments])
    return comments
