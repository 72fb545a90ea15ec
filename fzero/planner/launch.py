"""What a command line needs of plans before torch is imported.

The names of devices: those listed in devices/, "here", or the path of a device file. And how to start what a search
found: the command that trains by its config, and a script for Slurm.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fzero.core import config_tables
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


# What a search decides: keys of a config, or tables of them.
DECIDED = ("mesh", "zero", "train.remat", "offload", "train.micro_batch", "sequence", "pipeline")
PORT = 29500  # torchrun's own default


def refuse_decided(table: Mapping[str, Any], source: str) -> None:
    """Raise ValueError if `table` sets a value that a search decides.

    >>> refuse_decided({"mesh": {"cp": 2}}, "--set")
    Traceback (most recent call last):
    ValueError: --set gives mesh.cp=2, and a search decides mesh, zero, train.remat, offload, train.micro_batch, ...
    """
    settings = [f"{key}={value}" for key, value in config_tables.flat(dict(table)) if decides(key)]
    if settings:
        raise ValueError(
            f"{source} gives {', '.join(settings)}, and a search decides {', '.join(DECIDED)} itself; leave that "
            "out, or plan it alone (without --search)"
        )


def decides(key: str) -> bool:
    """Whether a search decides the value of a config's key."""
    return any(key == name or key.startswith(f"{name}.") for name in DECIDED)


def machines(ranks: int, on_node: int) -> tuple[int, int]:
    """(number of machines, ranks on each), equal, for `ranks` ranks.

    >>> machines(16, 8), machines(12, 8), machines(4, 8)
    ((2, 8), (2, 6), (1, 4))
    """
    per_machine = max(n for n in range(1, min(ranks, on_node) + 1) if ranks % n == 0)
    return ranks // per_machine, per_machine


def launch_command(config: str | Path, ranks: int, on_node: int, host: str = "HOST") -> str:
    """The command that trains by the file `config` on `ranks` ranks, `on_node` of them on a machine.

    >>> launch_command("best.toml", 8, 8)
    'torchrun --nproc-per-node 8 -m fzero pretrain --config best.toml'
    """
    train = f"fzero pretrain --config {shlex.quote(str(config))}"
    if ranks == 1:
        return train
    nodes, on_node = machines(ranks, on_node)
    if nodes == 1:
        return f"torchrun --nproc-per-node {ranks} -m {train}"
    endpoint = f'"{host}:{PORT}"' if host.startswith("$") else f"{host}:{PORT}"
    meet = f"--rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id {shlex.quote(Path(config).stem)}"
    return f"torchrun --nnodes {nodes} --nproc-per-node {on_node} {meet} -m {train}"


def slurm_script(config: str | Path, ranks: int, on_node: int, *, gpu: bool = True) -> str:
    """The text of a script for sbatch that trains by `config`, with requeues."""
    (nodes, on_node), name = machines(ranks, on_node), Path(config).stem
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={shlex.quote(name)}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --gpus-per-node={on_node}"] if gpu else []),
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        f"#SBATCH --output={name}-%j.log",
        "# Add what your cluster asks for: --partition, --account, --time.",
        "set -eu",
    ]
    host = "$host"
    if nodes > 1:
        lines.append('host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
    command = launch_command(config, ranks, on_node, host)
    command = command.replace(f"--rdzv-id {shlex.quote(name)}", '--rdzv-id "$SLURM_JOB_ID"')
    lines.append(f"srun {command} --out {shlex.quote(f'runs/{name}')} --auto-resume")
    return "\n".join(lines) + "\n"
