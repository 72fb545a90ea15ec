"""Checks of how the ranks of a run share its work: what an axis of the mesh does, sums by signs, local steps."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from fzero.comm.axes import RP, mesh_text
from fzero.core.config_tables import Table, flat, metadata_of
from fzero.optim.zero_one_adam import Intervals
from fzero.sharding.codec import Codec
from fzero.sharding.spec import Offload
from fzero.train.local_steps import Local

RunConfig = Any  # fzero.run.config.RunConfig, whose module imports this one

# By method of local steps the rate and the momentum of its outer optimizer.
OUTER = {"localsgd": (1.0, 0.0), "slowmo": (1.0, 0.6), "diloco": (0.7, 0.9)}
SEND_SIGNS = ("onebit_adam", "onebit_lamb", "zero_one_adam")  # with the codec that leaves them the sums of gradients
SIGNS = "grads=1bit"


def codec_of(config: RunConfig) -> str:
    """The codec of a run: its own, or that of its optimizer."""
    name = config.optim.name
    local = ",local" if name == "zero_one_adam" and config.optim.sum_every > 1 else ""
    return f"{SIGNS}{local}" if name in SEND_SIGNS else config.codec


def first_local(optim: Any, steps: int) -> int:
    """The first step that zero_one_adam may make without a sum, in a run of so many steps."""
    return optim.freeze_steps or max(1, steps // 5)


def count_sums(optim: Any, steps: int) -> int:
    """The steps of a run of zero_one_adam whose ranks sum: all before the first local one, and some behind it."""
    first = first_local(optim, steps)
    return first + Intervals(first, optim.sum_every, optim.sum_double).count_sums(steps)


def validate_signs(c: RunConfig) -> None:
    """Raise ValueError for a codec and an optimizer of which only one sends signs, and a warm-up that is none."""
    name, signs = c.optim.name, c.optim.name in SEND_SIGNS
    if signs and c.codec not in ("", codec_of(c)):
        raise ValueError(
            f"optim.name is {name}, which sends signs of its momentum, and codec is {c.codec}; leave --codec out"
        )
    if not signs and c.codec and Codec.parse(c.codec).signs:
        raise ValueError(
            f"codec is {c.codec} and optim.name is {name}, which makes no sums of gradients; use optim.name="
            f"{' or '.join(SEND_SIGNS)}"
        )
    if name == "zero_one_adam":
        Intervals(first_local(c.optim, c.train.steps), c.optim.sum_every, c.optim.sum_double).check("optim")
    if signs and c.optim.freeze_steps >= c.train.steps:
        raise ValueError(
            f"optim.freeze_steps is {c.optim.freeze_steps} and train.steps {c.train.steps}, so that {name} would never "
            "send signs; use fewer, or 0 for its own number"
        )


def validate_codes(c: RunConfig) -> None:
    """Raise ValueError for checkpoints in codes of moments that are not in float32, or of which a 0 means something."""
    prefix = f"train.compress is {c.train.compress}, which writes moments in 8-bit codes"
    if not c.train.compress.startswith("8bit"):
        return
    if c.optim.name == "adafactor":
        raise ValueError(f"{prefix}, and optim.name adafactor, whose state is small already; use none or zstd")
    if c.optim.states != "full":
        raise ValueError(f"{prefix}, and optim.states {c.optim.states}: they are small already; use none or zstd")
    if c.optim.name in SEND_SIGNS:
        raise ValueError(
            f"{prefix}, and optim.name {c.optim.name}, for which a momentum of 0 is one without a scale; use none or "
            "zstd"
        )
    if Offload.parse(c.offload).opt.memory == "nvme":
        raise ValueError(
            f"{prefix}, and offload {c.offload}: what rests on a disk is written as it is; use none or zstd"
        )


def validate_local(c: RunConfig) -> None:
    """Raise ValueError for local steps that do not go with the mesh, the checkpoints or the rest of a config."""
    local, t = c.local, c.train
    if not local.method:
        if local != type(local)():
            raise ValueError("local says how members agree and local.method is empty; write local.method=diloco")
        return
    Local(local.every, local.codec, local.after)
    prefix = f"local.method is {local.method}"
    if c.mesh.get(RP, 1) < 2:
        raise ValueError(
            f"{prefix}, and its members are the ranks of rp, which is 1; write for example --mesh dp=1,rp=2"
        )
    if t.checkpoint_every % local.every:
        raise ValueError(
            f"{prefix}, local.every {local.every} and train.checkpoint_every {t.checkpoint_every}: checkpoints are of "
            "steps after which members agree; make it a multiple"
        )
    if local.after >= t.steps:
        raise ValueError(
            f"{prefix}, local.after {local.after} and train.steps {t.steps}, so that members would never train apart; "
            "use fewer, a multiple of local.every"
        )
    if local.method == "localsgd" and (local.lr, local.momentum) != (None, None):
        raise ValueError(f"{prefix}, which takes the mean of the members; leave local.lr and local.momentum out")
    for wrong, reason in (
        (t.capture != "off", f"train.capture is {t.capture}: a recorded step has no agreement in it; use off"),
        (t.update == "delayed", "train.update is delayed, and members agree on one version of the parameters; use end"),
        (
            c.guard.check_every > 0,
            f"guard.check_every is {c.guard.check_every}: ranks compute each other's micro-batches, and members have "
            "other parameters; use 0",
        ),
        (c.optim.name in SEND_SIGNS, f"optim.name is {c.optim.name}, whose errors are of one member; use adamw"),
    ):
        if wrong:
            raise ValueError(f"{prefix} and {reason}")


class OverAxis(NamedTuple):
    """Of a key: it says what the ranks of an axis do."""

    axis: str


class Gathering(NamedTuple):
    """Of a key: it says how parameters are gathered."""


def refuse_without_axis(config: RunConfig, table: Table, baseline: RunConfig | None = None) -> None:
    """Raise ValueError if `table`, as the user wrote it, says how work is split over an axis that the mesh of `config`
    does not have, or how parameters are gathered where none is.

    baseline: a config whose values do no harm; None: one with the usual values.
    """
    values, usual = (dict(flat(dataclasses.asdict(source))) for source in (config, baseline or type(config)()))
    fetched = config.zero == 3 or Offload.parse(config.offload).params.memory != "device"
    for key in dict(flat(table)):
        value = values.get(key)
        if value == usual.get(key):
            continue
        marks = metadata_of(type(config)).get(key, ())
        axis = next((mark.axis for mark in marks if isinstance(mark, OverAxis)), "")
        value_text = "a table" if "\n" in str(value) else str(value).lower() if isinstance(value, bool) else value
        if axis and config.mesh.get(axis, 1) == 1:
            mesh_label = mesh_text(config.mesh) if config.mesh else "dp alone"
            raise ValueError(
                f"{key} is {value_text}, which is for ranks of {axis}, and the mesh is {mesh_label}; use "
                f"--mesh {axis}=2, or leave it out"
            )
        if Gathering() in marks and not fetched:
            raise ValueError(
                f"{key} is {value_text}, and stage {config.zero} gathers no parameters; use --zero 3, or leave it out"
            )


def drop_absent_axes(config: RunConfig) -> RunConfig:
    """A config with the usual values of what is said of axes that its mesh does not have."""
    usual = {
        key: getattr(type(config)(), key)
        for key, marks in metadata_of(type(config)).items()
        if "." not in key and any(isinstance(mark, OverAxis) and config.mesh.get(mark.axis, 1) == 1 for mark in marks)
    }
    return dataclasses.replace(config, **usual)
