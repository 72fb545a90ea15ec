"""Names that a command line gives are checked before torch is imported, which takes seconds."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fzero.core.text_parsing import nearest
from fzero.planner.device_names import device_path
from fzero.run.config.objectives import fine_tuning_presets


@functools.cache
def preset_names() -> tuple[str, ...]:
    """The names in fzero.models.PRESETS."""
    return keys_in("models/presets.py", "PRESETS")


def keys_in(file: str, variable: str) -> tuple[str, ...]:
    """The keys of a table in a file of fzero, taken from its source, as the file imports torch."""
    source = Path(__file__).parent.parent / file
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == variable
            and isinstance(node.value, ast.Dict)
        ):
            return tuple(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    raise AssertionError(f"{source}: no {variable}")


def check_preset(name: Any) -> None:
    """Raise ValueError naming the nearest preset for an unknown name; "" and the path of a file are no presets."""
    names = preset_names()
    if not isinstance(name, str) or not name or name.endswith(".json") or name in fine_tuning_presets():
        return
    if name not in names:
        raise ValueError(f"model {name!r} is not a preset{nearest(name, names)}; the presets are {', '.join(names)}")


def check_names(table: Mapping[str, Any], *gpus: str) -> None:
    """Check the preset of a config's table, and names of devices."""
    check_preset(table.get("preset"))
    for gpu in gpus:
        device_path(gpu)
