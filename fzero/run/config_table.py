"""A config as a nested table, and as JSON text: read with checks, written whole."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import replace
from typing import Any

from fzero.core.config_tables import Table, check_type
from fzero.core.pytree import nearest
from fzero.core.text_parsing import json_text, parse_json
from fzero.models import ModelConfig
from fzero.models.presets import FAMILIES, WRAPPERS, family_of
from fzero.models.weights import ConfigOver
from fzero.run.config import RunConfig
from fzero.run.config_checks import (
    check_leaf,
)
from fzero.run.config_versions import current_keys
from fzero.run.objectives import fine_tuning_presets
from fzero.run.recipes import recipe
from fzero.sharding import Pipeline

DEFAULT_PRESET = "llama-tiny"


def from_table(table: Table, model: ModelConfig | None = None) -> RunConfig:
    """The RunConfig of a table: its `preset` (default: llama-tiny, or `model`'s own sizes), changed by the
    table.

    `model.family` (gpt2, llama, mixtral, mlp) starts from a family's default sizes where `preset` is "".
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


def first_sizes(sizes: Table, prefix: str = "model.") -> ModelConfig:
    """The default sizes of the family that a table names, and those that it must name; of adapters, those around the
    sizes of their `base`."""
    family, families = sizes.get("family", ""), (*FAMILIES, *WRAPPERS)
    if family not in families:
        raise ValueError(
            f"{prefix}family is {family!r}{nearest(str(family), families)}; it must be one of {', '.join(families)}"
        )
    kind = FAMILIES.get(family) or WRAPPERS[family]
    wraps, hints, values = family in WRAPPERS, typing.get_type_hints(kind), {}
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
    hints = typing.get_type_hints(type(value))
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
            check_leaf(RunConfig, name, changes[key])
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
    """The RunConfig of a JSON text; raises ValueError naming the file if it is not JSON or not a config."""
    return from_table(current_keys(parse_json(text, name)))
