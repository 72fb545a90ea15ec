"""The user's file of disk settings that `fzero bench disk` found, by mount point."""

from __future__ import annotations

import json
import os
import re
from datetime import date
from pathlib import Path
from typing import Any

from fzero.core.files import make_folder, replacing
from fzero.core.storage import PAGE, is_url, user_folder
from fzero.core.text_parsing import parse_toml, read_text_file
from fzero.offload.disk_io import DiskSettings, mount_point

# What sets a disk, for errors: in a program, and of a run.
FOLDER = "fzero.Nvme(folder); --nvme of a run"
BUFFERS = "buffer_bytes of fzero.Nvme; nvme.buffer_mb or --buffer-mb of a run"


def config_file() -> Path:
    """The user's file of settings: $XDG_CONFIG_HOME/fzero/config.toml, by default in ~/.config."""
    return user_folder("XDG_CONFIG_HOME") / "config.toml"


def _read_config() -> tuple[str, dict[str, Any]]:
    path = config_file()
    try:
        if not os.path.lexists(path):
            return "", {}
        text = read_text_file(path)
        config = parse_toml(text, str(path))
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; correct it, or delete it and run `fzero bench disk` again") from None
    disks = config.get("disk", {})
    if not isinstance(disks, dict) or not all(isinstance(entry, dict) for entry in disks.values()):
        raise ValueError(
            f'{path}: disk must be tables such as [disk."/mnt/nvme"]; correct it, or delete it and run `fzero '
            "bench disk` again"
        )
    return text, config


def load_settings(folder: str | Path) -> DiskSettings:
    """The DiskSettings that `fzero bench disk` found for the disk of `folder`, or the default.

    Raises ValueError for an invalid file.
    """
    if is_url(folder):
        return DiskSettings()
    mount = mount_point(folder)
    entry = _read_config()[1].get("disk", {}).get(mount, {})
    values = {name: entry[name] for name in DiskSettings._fields if name in entry}
    for name, value in values.items():
        step = PAGE if name == "block_bytes" else 1
        if type(value) is not int or value < 1 or value % step:
            allowed = f"a multiple of {PAGE}" if step > 1 else "a whole number from 1"
            raise ValueError(
                f'{config_file()}: {name} of [disk."{mount}"] is {value!r}; it must be {allowed}; run `fzero '
                "bench disk` again"
            )
    return DiskSettings(**values)


def save_settings(mount: str, settings: DiskSettings, gbs: dict[str, float]) -> Path:
    """Write the settings of a disk into the user's file, replacing older ones of that disk only.

    Returns the file's path.
    gbs: GB/s by kind of transfer (read, write, mixed). Raises ValueError if the file is invalid.
    """
    path = config_file()
    text, config = _read_config()
    values: dict[str, Any] = settings._asdict() | {f"{kind}_gbs": round(rate, 3) for kind, rate in gbs.items()}
    values["measured"] = date.today()
    header = f"[disk.{json.dumps(mount, ensure_ascii=False)}]"
    remainder = re.sub(rf"^{re.escape(header)}[^\n]*\n(?:(?!\[)[^\n]*\n)*", "", f"{text}\n", flags=re.MULTILINE).strip()
    new_text = "\n".join(
        [*([remainder, ""] if remainder else []), header, *(f"{name} = {value}" for name, value in values.items()), ""]
    )
    expected = {**config, "disk": {**config.get("disk", {}), mount: values}}
    try:
        matches = parse_toml(new_text, str(path)) == expected
    except ValueError:
        matches = False
    if not matches:
        raise ValueError(
            f"{path}: has {header} in a form that cannot be replaced; delete it there and run `fzero bench disk` again"
        )
    make_folder(path.parent)
    with replacing(path) as file:
        file.write(new_text.encode())
    return path
