"""A config as a nested table and as JSON text; presets: the optimizer and length of a run; a config as commented
TOML."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fzero import models
from fzero.core.config_tables import Table, check_choice, check_type, flat, set_nested, to_toml
from fzero.core.pytree import nearest
from fzero.core.text_parsing import json_text, parse_json
from fzero.models import ModelConfig
from fzero.models.configs import FAMILIES, WRAPPERS, ConfigOver, family_of
from fzero.run.config.config_checks import (
    expect_leaf,
)
from fzero.run.config.config_versions import current_keys
from fzero.run.config.objectives import fine_tuning_presets
from fzero.run.config.run_config import (
    Data,
    Optim,
    RunConfig,
    ScheduleConfig,
    Train,
)
from fzero.run.config.unused_keys import refuse_unused
from fzero.sharding import Pipeline


def optimizer_defaults(name: str) -> Optim:
    """The optimizer of that name with numbers that serve small models; raises ValueError for an unknown name."""
    expect_leaf(RunConfig, "optim.name", name)
    numbers: dict[str, dict[str, Any]] = {
        "adamw": {},
        "adam": {"weight_decay": 0.0},
        "lamb": {"lr": 1e-2, "eps": 1e-6},
        "lion": {"lr": 3e-4, "weight_decay": 1.0, "beta2": 0.99},
        "sgd": {"lr": 0.3, "weight_decay": 0.0, "momentum": 0.9},
        "adafactor": {"lr": 1e-2, "weight_decay": 0.0},
        "onebit_adam": {},
        "onebit_lamb": {"lr": 1e-2, "eps": 1e-6},
        "zero_one_adam": {},
        "muon": {"lr": 0.02, "lr_rest": 3e-3, "weight_decay": 0.01, "momentum": 0.95, "nesterov": True},
    }
    return Optim(name=name, **numbers[name])


#                           steps, batch, micro-batch, seq_len
SMALL_RUNS: dict[str, tuple[int, int, int, int]] = {
    "mlp-tiny": (200, 16, 4, 64),
    "gpt2-tiny": (400, 16, 4, 256),
    "llama-tiny": (400, 16, 4, 256),
    "mixtral-tiny": (400, 16, 4, 256),
    "llama-small": (2000, 32, 4, 512),
}


LARGE_RUN = (50_000, 256, 1, 4096)  # steps, batch, micro-batch, tokens of a sequence


def fine_tuning(name: str, model: ModelConfig, *, steps: int | None = None, optimizer: str | None = None) -> RunConfig:
    """The whole run of a fine-tuning preset: AdamW without decay, 1,024 positions."""
    steps = 200 if steps is None else steps
    expect_leaf(RunConfig, "train.steps", steps)
    objective, lr = fine_tuning_presets()[name]
    optim = replace(optimizer_defaults(optimizer or "adamw"), lr=lr, weight_decay=0.0, beta2=0.999)
    optim = replace(optim, schedule=ScheduleConfig(warmup_steps=min(steps // 20, 100), end=0.1))
    return RunConfig(
        preset=name,
        model=model,
        objective=objective.name,
        data=Data(path="", seq_len=min(1024, model.max_len)),
        optim=optim,
        train=Train(steps=steps, batch=16, micro_batch=2, eval_every=50, checkpoint_every=100),
    )


def recipe(
    name: str, model: ModelConfig | None = None, *, steps: int | None = None, optimizer: str | None = None
) -> RunConfig:
    """The whole run of a model preset (or of `model`, named ""), for `steps` steps; warmup follows from them."""
    if name in fine_tuning_presets() and model is not None:
        return fine_tuning(name, model, steps=steps, optimizer=optimizer)
    model = models.preset(name) if model is None else model
    usual, batch, micro_batch, seq_len = SMALL_RUNS.get(name, LARGE_RUN)
    steps = usual if steps is None else steps
    small = name in SMALL_RUNS
    expect_leaf(RunConfig, "train.steps", steps)
    optim = optimizer_defaults(optimizer or ("muon" if small else "adamw"))
    if not small:
        optim = replace(optim, lr=optim.lr / 10, lr_rest=optim.lr_rest / 10)
    optim = replace(optim, schedule=ScheduleConfig(warmup_steps=min(steps // 20, 2000), end=0.0 if small else 0.1))
    return RunConfig(
        preset=name,
        model=model,
        data=Data(seq_len=min(seq_len, model.max_len)),
        optim=optim,
        train=Train(steps=steps, batch=batch, micro_batch=micro_batch),
    )


DEFAULT_PRESET = "llama-tiny"


def from_table(table: Table, model: ModelConfig | None = None) -> RunConfig:
    """The RunConfig of a table: its `preset` (default: llama-tiny, or `model`'s own sizes), changed by the
    table.

    `model.family` (a name of FAMILIES) starts from a family's default sizes where `preset` is "".
    Raises ValueError for an unknown key (with the nearest), a wrong type, a value out of range, and values that do not
    go together."""
    train, optim, sizes = (
        section if isinstance(section := table.get(name), dict) else {} for name in ("train", "optim", "model")
    )
    name = check_type("preset", table.get("preset", "" if model is not None else DEFAULT_PRESET), str)
    if (not name or name in fine_tuning_presets()) and model is None:
        model = first_sizes(sizes)
    steps, optimizer = (check_type(f"{a}.{b}", t[b], kind) if b in t else None for a, t, b, kind in (
        ("train", train, "steps", int), ("optim", optim, "name", str)))  # fmt: skip
    base = recipe(name, model, steps=steps, optimizer=optimizer)
    family = sizes.get("family", family_of(base.model))
    if family != family_of(base.model):
        raise ValueError(
            f"model.family is {family!r} and {name or 'the model'} is of family {family_of(base.model)}; leave "
            "one of them out"
        )
    values = {key: value for key, value in table.items() if key != "preset"}
    if sizes:
        values["model"] = without_family(sizes)
    return apply_table(base, values)


field_types = functools.cache(typing.get_type_hints)  # which parses the texts of all hints of a class


def first_sizes(sizes: Table, prefix: str = "model.") -> ModelConfig:
    """The default sizes of the family that a table names; of adapters, those around the sizes of their `base`."""
    family, families = sizes.get("family", ""), (*FAMILIES, *WRAPPERS)
    check_choice(f"{prefix}family", family, families)
    kind = FAMILIES.get(family) or WRAPPERS[family]
    wraps, hints, values = family in WRAPPERS, field_types(kind), {}
    for field in dataclasses.fields(kind):
        needed = field.default is dataclasses.MISSING
        if field.name == "base":
            values["base"] = first_sizes(check_type(f"{prefix}base", sizes.get("base"), dict), f"{prefix}base.")
        elif needed or (wraps and field.name in sizes):
            values[field.name] = check_type(f"{prefix}{field.name}", sizes.get(field.name), hints[field.name])
    return kind(**values)


def without_family(sizes: Table) -> Table:
    """The table of a model's values without the families that `first_sizes` reads."""
    values = {key: value for key, value in sizes.items() if key != "family"}
    return values | {"base": without_family(values["base"])} if isinstance(values.get("base"), dict) else values


def with_family(sizes: Table, model: ModelConfig) -> Table:
    """The table of a model's values with the families that `first_sizes` reads."""
    inner = {"base": with_family(sizes["base"], model.base)} if isinstance(model, ConfigOver) else {}
    return {"family": family_of(model), **sizes, **inner}


def apply_table(value: Any, table: Table, prefix: str = "") -> Any:
    """The dataclass `value` with the fields in `table`, checked one by one and then together."""
    hints = field_types(type(value))
    changes: dict[str, Any] = {}
    for key, new in table.items():
        name = f"{prefix}{key}"
        if key not in hints:
            keys = ", ".join([*hints, *(["family"] if prefix == "model." else [])])
            raise ValueError(
                f"unknown key {name!r}{nearest(key, hints)}; the keys {f'of {prefix[:-1]} ' if prefix else ''}are "
                f"{keys}"
            )
        hint, old = hints[key], getattr(value, key)
        kind: Any = next((k for k in typing.get_args(hint) if dataclasses.is_dataclass(k)), None)
        if new is None and type(None) in typing.get_args(hint):
            changes[key] = None
        elif dataclasses.is_dataclass(old) or (kind and name != "model"):
            if not isinstance(new, dict):
                raise ValueError(
                    f"{name} is {new!r}; it must be a table of "
                    f"{', '.join(f.name for f in dataclasses.fields(old or kind))}"
                )
            changes[key] = apply_table(kind() if old is None else old, new, f"{name}.")
        else:
            changes[key] = check_type(name, new, hint)
            expect_leaf(RunConfig, name, changes[key])
    if isinstance(value, Pipeline):
        changes = value.with_followers(changes)
    try:
        return replace(value, **changes)
    except ValueError as error:
        raise ValueError(
            f"{prefix[:-1]}: {error}" if prefix.startswith(("model.", "precision.loss_scale.")) else str(error)
        ) from None


def to_table(config: RunConfig) -> Table:
    """The table of every value of `config`, the inverse of `from_table`."""

    # Lists, as JSON and TOML have them, in place of tuples.
    def listed(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in pairs}

    table = dataclasses.asdict(config, dict_factory=listed)
    return {**table, "model": with_family(table["model"], config.model)}


def to_json(config: RunConfig) -> str:
    """The JSON text of `config`; `from_json` reads it back equal."""
    return json_text(to_table(config), "config.json", 2) + "\n"


def from_json(text: str, name: str = "config.json") -> RunConfig:
    """The RunConfig of a JSON text; raises ValueError naming the file."""
    return from_table(current_keys(parse_json(text, name)))


def commented(config: RunConfig) -> str:
    """The TOML text of every value of a config; values that do nothing with the chosen options follow a "#".

    >>> from fzero.run.config.config_table import from_table
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
    """The lines of a TOML text, with "# " before values that may not be set."""
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
    """A line for each value that differs: "train.steps = 400, not 1000"."""
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
