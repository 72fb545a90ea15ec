"""The names of devices: those listed in devices/, "here", or the path of a device file; nothing heavy imported."""

from __future__ import annotations

import functools
from pathlib import Path

from fzero.core.text_parsing import nearest

LISTED = Path(__file__).parent / "devices"


@functools.cache
def list_devices() -> list[str]:
    """The names of the devices that come with the package."""
    return sorted(path.stem for path in LISTED.glob("*.json"))


def device_path(name: str | Path) -> Path | None:
    """The file of a device, None for "here"; raises ValueError naming the nearest."""
    path = Path(name)
    if str(name) == "here":
        return None
    names = ", ".join(list_devices())
    if path.suffix != ".json":
        listed = str(name).lower()
        if listed not in list_devices():
            raise ValueError(
                f"device {str(name)!r} is not known{nearest(str(name), list_devices())}; the devices are {names}, "
                "here (after `fzero bench`), or the path of a .json file"
            )
        return LISTED / f"{listed}.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give a device file that `fzero bench --out` wrote, or one of {names}")
    return path
