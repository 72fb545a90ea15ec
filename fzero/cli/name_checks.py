"""Names that a command line gives are checked before torch is imported, which takes seconds."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fzero import planner
from fzero.core.text_parsing import nearest
from fzero.run.config.objectives import fine_tuning_presets


@functools.cache
def preset_names() -> tuple[str, ...]:
    """The names in fzero.models.PRESETS."""
    table = definition("models/presets.py", "PRESETS").value
    return tuple(str(key.value) for key in table.keys if isinstance(key, ast.Constant))


def config_keys() -> list[str]:
    """The keys of a RunConfig, without those in its tables."""
    fields = definition("run/config/run_config.py", "RunConfig").body
    return [ast.unparse(field.target) for field in fields if isinstance(field, ast.AnnAssign)]


def definition(file: str, name: str) -> Any:
    """The tree of a class, or of an annotated variable, in a file of fzero that imports torch."""
    source = Path(__file__).parent.parent / file
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if name in (getattr(node, "name", ""), getattr(getattr(node, "target", None), "id", "")):
            return node
    raise AssertionError(f"{source}: no {name}")


def expect_preset(name: Any) -> None:
    """Raise ValueError naming the nearest preset for an unknown name."""
    names = preset_names()
    if not isinstance(name, str) or not name or name.endswith(".json") or name in fine_tuning_presets():
        return
    if name not in names:
        raise ValueError(f"model {name!r} is not a preset{nearest(name, names)}; the presets are {', '.join(names)}")


def expect_names(table: Mapping[str, Any], *gpus: str) -> None:
    """Check the preset of a config's table, and names of devices."""
    expect_preset(table.get("preset"))
    for gpu in gpus:
        planner.launch.device_path(gpu)
