"""The placement of a run: the values that a resumed run may change. Those of its last attempt are the default of the
next one, and the printed command that resumes it carries them."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from pathlib import Path

from fzero.comm.axes import DP, PP
from fzero.core.config_tables import Table, flat
from fzero.run.config import RunConfig
from fzero.run.config_table import to_table

# key of the config: the flag of `fzero pretrain` that sets it; "" for none
FLAGS = {
    "device": "",  # decided once: config.json has it
    "zero": "--zero",
    "reduce": "--reduce",
    "sequence": "--sequence",
    "context": "--context",
    "experts": "--experts",
    "codec": "--codec",
    "pipeline.schedule": "--schedule",
    "pipeline.chunks": "--chunks",
    "pipeline.layout": "--layout",
    "prefetch": "--prefetch",
    "reshard": "",
    "resident": "--resident",
    "partition_activations": "",
    "offload": "--offload",
    "nvme.folder": "--nvme",
    "nvme.buffer_mb": "--buffer-mb",
    "host_memory_gb": "--host-memory",
    "precision.policy": "",  # decided once: config.json has it
}
KEYS = ("mesh", *FLAGS)


def keep_placement(recorded: RunConfig, config: RunConfig, mesh: dict[str, int] | None) -> RunConfig:
    """The config of a run from now on: `recorded` with the placement of the attempt's `config`.

    mesh: the sizes that were asked for; None keeps the recorded ones, from which a mesh is fitted to the processes of
    each attempt (run/ranks/elastic.py): fewer processes for a while do not make the mesh smaller for good.
    """
    parts = dict.fromkeys(key.partition(".")[0] for key in FLAGS)
    return replace(
        recorded,
        mesh=recorded.mesh if mesh is None else mesh,
        **{name: getattr(config, name) for name in parts},
    )


def fit_layout(recorded: RunConfig, config: RunConfig, changes: Table) -> tuple[RunConfig, list[str]]:
    """The config of an attempt, and lines about it: a recorded layout that is of another number of stages is left out,
    unless `changes` has one.

    Without pp the recorded layout is kept for later attempts.
    """
    layout, pp = recorded.pipeline.layout, config.mesh.get(PP, 1)
    old, new = layout.count(",") + 1, pp * config.pipeline.chunks
    if layout == "auto" or "layout" in changes.get("pipeline", {}) or pp == 1 or old == new:
        return config, []
    line = f"layout {layout} is of {old} stages and there are {new} now: layers as even as they go"
    return replace(config, pipeline=replace(config.pipeline, layout="auto")), [line]


def pretrain_command(processes: int) -> str:
    """The command that starts `fzero pretrain` with this number of processes."""
    return "fzero pretrain" if processes == 1 else f"torchrun --nproc-per-node {processes} -m fzero pretrain"


def resume_command(folder: Path, config: RunConfig, processes: int) -> str:
    """The command that resumes the run in `folder` with the placement of `config`, as far as it is not the default."""
    words, values = [], dict(flat(to_table(config)))
    if math.prod(config.mesh.values()) == processes and {DP: processes} != config.mesh and processes > 1:
        words += ["--mesh", ",".join(f"{axis}={size}" for axis, size in config.mesh.items())]
    usual = dict(flat(to_table(RunConfig())))
    for key, flag in FLAGS.items():
        if flag and values[key] != usual[key] and "\n" not in str(values[key]):  # a table: config.json has it
            words += [flag] if values[key] is True else [flag, str(values[key])]
    return f"{pretrain_command(processes)} --out {shlex.quote(str(folder))} --resume {shlex.join(words)}".rstrip()
