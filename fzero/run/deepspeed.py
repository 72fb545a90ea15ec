"""A DeepSpeed config as a config of a run: its stage, offload, precision, optimizer, schedule, clipping and batch are
taken; every other key is named as ignored, or refused if it would change the run.
"""

from __future__ import annotations

import fnmatch
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fzero.core.arguments import checked
from fzero.core.foreign import nearest, parse_json, read_text_file, short
from fzero.core.precision import LossScale
from fzero.core.tables import Table, flat, put
from fzero.models.presets import family_of
from fzero.run import deepspeed_keys as keys
from fzero.run.deepspeed_optim import put_optimizer, put_scheduler
from fzero.run.deepspeed_sparse import put_pattern
from fzero.run.deepspeed_values import Values

if TYPE_CHECKING:
    from fzero.run.config import RunConfig


class FromDeepSpeed(NamedTuple):
    """A DeepSpeed config as `read_deepspeed` returns it."""

    table: Table  # of a RunConfig, with no other value than those that the config sets
    ignored: tuple[str, ...]  # keys that change nothing here
    left: tuple[str, ...]  # keys that are "auto": fzero's own value holds
    unknown: tuple[str, ...] = ()  # keys that DeepSpeed does not have and does not look at, with the nearest one


@checked()
def config_from_deepspeed(
    source: str | Path | Mapping[str, Any], table: Table | None = None, *, ranks: int = 1
) -> RunConfig:
    """Return the RunConfig of a DeepSpeed config, which `table` completes with what such a config does not say.

    source: the path of a JSON file, or its table. table: as of a file for --config, such as {"preset": "gpt2-124m",
    "train": {"steps": 1000}}; where both say something, `table` counts. ranks: data-parallel processes (dp times rp),
    which share the batch.

    Schedules are DeepSpeed's, step for step; weight decay is of all leaves, as in DeepSpeed without parameter groups.
    docs/migrate.md says what becomes of every key. Warns (UserWarning), in one line, of keys that are ignored: those
    that change nothing here, and those that DeepSpeed does not have and ignores too, with the nearest that it has.
    Raises ValueError for a key of zero_optimization or of the arguments that DeepSpeed does not have, one that would
    change the run, and batch sizes that contradict each other.

    >>> source = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    >>> config = config_from_deepspeed(source, {"preset": "mlp-tiny"})
    >>> config.train.batch, config.precision.policy, config.zero, config.optim.clip
    (8, 'bf16', 2, 0.0)
    """
    from fzero.run.config_table import from_table

    found = read_deepspeed(source, ranks)
    if line := ignored_line(source, found):
        warnings.warn(line, UserWarning, stacklevel=2)
    whole = with_one_rate(merged(found.table, table or {}), found.table)
    expect_pattern(source, whole, found.table)
    if line := stretched_line(source, whole, found.table):
        warnings.warn(line, UserWarning, stacklevel=2)
    return from_table(whole)


def with_one_rate(table: Table, found: Table) -> Table:
    """The table of a run, where its optimizer has a second rate (muon's, of leaves other than matrices) with that of
    the config's schedule, which DeepSpeed gives to every leaf. found: the table of the DeepSpeed config.

    >>> with_one_rate({"preset": "mlp-tiny", "optim": {"lr": 0.5}}, {"optim": {"lr": 0.5}})["optim"]
    {'lr': 0.5, 'lr_rest': 0.5}
    """
    from fzero.run.config_table import from_table

    optim, peak = table.get("optim", {}), found.get("optim", {}).get("lr")
    if peak is None or "name" in found["optim"] or optim.get("lr") != peak or "lr_rest" in optim:
        return table
    named = {"optim": {"name": optim["name"]}} if "name" in optim else {}
    kind = from_table({key: table[key] for key in ("preset", "model") if key in table} | named).optim.name
    return merged(table, {"optim": {"lr_rest": peak}}) if kind == "muon" else table


def expect_pattern(source: str | Path | Mapping[str, Any], table: Table, found: Table) -> None:
    """Raise ValueError if the config has an attention pattern and the run's model no attention."""
    from fzero.run.config_table import from_table

    if "pattern" not in found.get("model", {}) or "pattern" not in table["model"]:
        return
    sizes = {key: value for key, value in table["model"].items() if key != "pattern"}
    model = from_table({key: table[key] for key in ("preset",) if key in table} | {"model": sizes}).model
    if not hasattr(model, "pattern"):
        why = f"a model of the family {family_of(model)} has no attention patterns; leave it out"
        raise ValueError(f"{_name(source)}: sparse_attention: {why}")


def stretched_line(source: str | Path | Mapping[str, Any], table: Table, found: Table) -> str:
    """The line that says that a schedule of `found` goes over other steps, those of the run's table, "" if not."""
    total, steps = found.get("train", {}).get("steps"), table.get("train", {}).get("steps")
    if total is None or steps in (None, total):
        return ""
    return (
        f"{_name(source)}: scheduler.params.total_num_steps is {total} and the run has {steps} steps, over which the "
        f"schedule goes now; for {total} steps of it give --steps {total}, and --stop-at to end earlier"
    )


def ignored_line(source: str | Path | Mapping[str, Any], found: FromDeepSpeed) -> str:
    """The line that names the keys that change nothing, "" if there is none."""
    parts = [
        f"as {why}: {', '.join(names)}"
        for why, names in (
            ("they change nothing here", found.ignored),
            ("DeepSpeed has no such key", found.unknown),
        )
        if names
    ]
    return f"{_name(source)}: ignored, {'; '.join(parts)}" if parts else ""


def merged(table: Table, over: Table) -> Table:
    """The table, with the values of `over` where both say something."""
    out = dict(table)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def read_deepspeed(source: str | Path | Mapping[str, Any], ranks: int = 1) -> FromDeepSpeed:
    """Return the values that a DeepSpeed config sets, as a table of a RunConfig; arguments and errors as
    `config_from_deepspeed`.

    >>> read_deepspeed({"gradient_clipping": 1.0, "wall_clock_breakdown": True}).ignored
    ('wall_clock_breakdown',)
    """
    name = _name(source)
    table = dict(source) if isinstance(source, Mapping) else parse_json(read_text_file(Path(source)), name, once=True)
    try:
        return _read(table, ranks)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _name(source: str | Path | Mapping[str, Any]) -> str:
    return "the DeepSpeed config" if isinstance(source, Mapping) else str(source)


def _read(table: Table, ranks: int) -> FromDeepSpeed:
    values: dict[str, Any] = {}
    ignored, left, unknown = [], [], []
    if isinstance(table.get(keys.ZERO), bool):  # DeepSpeed's first form
        table = {**table, keys.ZERO: {"stage": int(table[keys.ZERO])}}
    for name, value in flat(table):
        key = _key_of(name, value)
        if key is None:
            unknown.append(f"{name}{_nearest_key(name)}")
        elif key.what == keys.IGNORED:
            ignored.append(name)
        elif key.what == keys.REFUSED:
            if _is_off(table, name):
                ignored.append(name)
            elif value not in key.harmless and value != "auto":
                raise ValueError(f"{name} is {short(value)}: {key.why}; leave it out")
        elif value == "auto":
            left.append(name)
        elif value is not None:
            values[name] = value
    out: Table = {}
    said = Values(values)
    _put_batch(out, said, ranks, left, ignored)
    _put_zero(out, said, ignored)
    _put_codec(out, said, ignored)
    _put_precision(out, said, left)
    put(out, "optim.clip", said.number("gradient_clipping", 0.0))
    if (steps := said.number("steps_per_print")) and steps != math.inf and (steps := said.whole("steps_per_print")):
        put(out, "train.log_every", steps)
    _put_layer_drop(out, said)
    _put_curriculum(out, said)
    if isinstance(table.get("sparse_attention"), Mapping) and "sparse_attention.mode" not in left:
        put_pattern(out, said.below("sparse_attention"))
    put_optimizer(out, said)
    put_scheduler(out, said, left)
    if "scheduler.type" not in values:
        ignored += [f"{name} (of a scheduler without a type)" for name in values if name.startswith("scheduler.")]
    if "gradient_clipping" in left:
        del out["optim"]["clip"]
    return FromDeepSpeed(
        {name: value for name, value in out.items() if value != {}}, tuple(ignored), tuple(left), tuple(unknown)
    )


def _is_off(table: Table, name: str) -> bool:
    """Whether a table around the one of this key has an `enabled` that is not set."""
    parents = name.split(".")[:-2] if name.endswith(".enabled") else name.split(".")[:-1]
    switches = {key.name for key in keys.KEYS if key.name.endswith(".enabled")}
    for depth, parent in enumerate(parents, 1):
        table = table[parent]
        if ".".join((*parents[:depth], "enabled")) in switches and table.get("enabled") in (None, False):
            return True
    return False


def _key_of(name: str, value: Any) -> keys.Key | None:
    """The key of a name, which may be its alias; None for one that DeepSpeed does not look at."""
    *parents, last = name.split(".")
    alias = f"{keys.ZERO}.stage3_{last}" if parents == [keys.ZERO] else name  # DeepSpeed's fields have both names
    for key in keys.KEYS:
        if fnmatch.fnmatchcase(name, key.name) or key.name == alias:
            return key
    if any(key.name.startswith(f"{name}.") for key in keys.KEYS):
        if value is None:
            return keys.Key(name, keys.TAKEN, "the table is left out")
        raise ValueError(f"{name} is {short(value)}; it must be a table")
    if name.startswith(keys.STRICT):
        raise ValueError(f"there is no key {name!r}{_nearest_key(name)} in a DeepSpeed config")
    return None


def _nearest_key(name: str) -> str:
    exact = [key.name for key in keys.KEYS if "*" not in key.name]
    *parents, last = name.split(".")
    tops = sorted({key.name.partition(".")[0] for key in keys.KEYS})
    if not parents or parents[0] not in tops:
        return nearest(name.partition(".")[0], tops)
    beside = [key for key in exact if key.split(".")[:-1] == parents] or exact
    return nearest(last, [key.rpartition(".")[2] for key in beside]) or nearest(name, exact)


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _put_batch(out: Table, said: Values, ranks: int, left: Sequence[str], ignored: list[str]) -> None:
    batch, micro, times = (said.whole(name) for name in BATCH)
    for name, value in zip(BATCH, (batch, micro, times)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if (batch, micro) == (None, None):
        if times is not None and times > 1:
            raise ValueError(
                f"{BATCH[2]} is {times} of a micro-batch that is not given; give {BATCH[1]}, or leave it out and give "
                "--batch and --micro-batch"
            )
        ignored += [f"{BATCH[2]} (of a batch that is not given)"] * (times is not None)
        return
    if micro is None:
        if BATCH[1] in left and times is None:  # the micro-batch is fzero's own
            put(out, "train.batch", batch)
            return
        micro = batch // (ranks * (times or 1))
    if batch is None:
        batch = micro * (times or 1) * ranks
    times = batch // (micro * ranks) if times is None and micro else times or 1
    if not micro or batch != micro * times * ranks:
        raise ValueError(
            f"train_batch_size is {batch} and not train_micro_batch_size_per_gpu x gradient_accumulation_steps x data "
            f"ranks = {micro} x {times} x {ranks}; change one of them, or the number of processes"
        )
    put(out, "train.batch", batch)
    put(out, "train.micro_batch", micro)


def _put_zero(out: Table, said: Values, ignored: list[str]) -> None:
    zero = said.below(keys.ZERO)
    stage = zero.whole("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"{keys.ZERO}.stage is {stage}; it must be 0, 1, 2 or 3")
    out["zero"] = stage
    parts, folders = [], set()
    for group, old, ours in (
        ("offload_param", "cpu_offload_param", "params"),
        ("offload_optimizer", "cpu_offload", "opt"),
    ):
        one = zero.below(group)
        device = one.choice("device", ("none", "cpu", "nvme"), "cpu" if zero.flag(old) else "none")
        if device == "none":
            continue
        if ours == "params" and stage != 3:
            ignored.append(f"{keys.ZERO}.{group}.device (it is of stage 3 alone, and the stage is {stage})")
            continue
        ratio = one.number("ratio", 1.0)
        if not 0.0 <= ratio <= 1.0:
            raise ValueError(f"{keys.ZERO}.{group}.ratio is {ratio}; it must be in [0, 1]")
        if ratio == 0.0:  # of none of it
            continue
        parts.append(f"{ours}={'host' if device == 'cpu' else device}" + (f":{ratio:g}" if ratio < 1.0 else ""))
        if device == "nvme":
            folders |= {one.read("nvme_path", (str,), "")}
    if len(folders) > 1:
        raise ValueError(
            f"{keys.ZERO}: nvme_path is {' and '.join(sorted(map(repr, folders)))}; there is one store: give one path"
        )
    if parts:
        out["offload"] = ",".join(parts)
    if folders - {""}:
        put(out, "nvme.folder", folders.pop())


def _put_codec(out: Table, said: Values, ignored: list[str]) -> None:
    zero = said.below(keys.ZERO)
    flags = [name for name in ("zero_quantized_weights", "zero_quantized_gradients") if zero.flag(name)]
    if out["zero"] != 3:
        ignored += [f"{keys.ZERO}.{name} (it is of stage 3 alone, and the stage is {out['zero']})" for name in flags]
        return
    parts = ["params=int8"] if zero.flag("zero_quantized_weights") else []
    if zero.flag("zero_quantized_gradients"):
        parts.append("grads=int4")
        loco = zero.below("zeropp_loco_param")
        if loco.of:
            beta, reset = loco.number("err_beta", 0.8), loco.whole("reset_T", 1024)
            parts += [f"loco={beta:g}", f"reset={reset}"]
    if parts:
        out["codec"] = ",".join(parts)


HALVES = {"bf16": ("bfloat16", "bf16", "torch.bfloat16"), "fp16": ("float16", "fp16", "half", "torch.float16")}

SCALE = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def _put_precision(out: Table, said: Values, left: Sequence[str]) -> None:
    half = said.flag("fp16.enabled")
    wide = said.flag("bf16.enabled") or said.flag("bfloat16.enabled")
    if said.flag("torch_autocast.enabled"):
        dtype = said.choice("torch_autocast.dtype", sum(HALVES.values(), ()), "bfloat16")
        half, wide = half or dtype in HALVES["fp16"], wide or dtype in HALVES["bf16"]
    if half and wide:
        raise ValueError("fp16.enabled and bf16.enabled are both true; set one of them")
    if not (half or wide) and any(name.endswith(".enabled") for name in left):
        return
    put(out, "precision.policy", "fp16" if half else "bf16" if wide else "fp32")
    if not half:
        return
    scale = said.number("fp16.loss_scale", 0)
    if scale:  # never falls below it, and never rises
        found = {"init": float(scale), "floor": float(scale), "window": 2**62, "at_floor": "hold"}
    else:
        found = {
            "init": 2.0**power if (power := said.number("fp16.initial_scale_power", 16)) < 128 else math.inf,
            "window": said.whole("fp16.loss_scale_window", 1000),
            "hysteresis": said.whole("fp16.hysteresis", 2),
            "floor": float(said.number("fp16.min_loss_scale", 1)),
        }
    try:
        LossScale(**found)
    except ValueError:
        given = ", ".join(f"{name} is {short(value)}" for name, value in said.below("fp16").of.items() if name in SCALE)
        raise ValueError(
            f"fp16: {given}; a dynamic scale needs an initial_scale_power below 128, 2 to it at least at "
            "min_loss_scale, which is above 0, and loss_scale_window and hysteresis of at least 1; a fixed loss_scale "
            "is a finite number above 0"
        ) from None
    put(out, "precision.loss_scale", found)


def _put_layer_drop(out: Table, said: Values) -> None:
    drop = said.below("progressive_layer_drop")
    theta, gamma = drop.number("theta", 1.0), drop.number("gamma", 0.001)
    if drop.flag("enabled") and theta != 1:
        put(out, "train.layer_drop_theta", float(theta))
        put(out, "train.layer_drop_gamma", float(gamma))


def _put_curriculum(out: Table, said: Values) -> None:
    course = said.below("curriculum_learning")
    if not course.flag("enabled"):
        return
    course.choice("curriculum_type", ("seqlen",), "seqlen")
    even = "its lengths do not grow evenly; use fixed_linear"
    course.choice("schedule_type", ("fixed_linear",), "", {"fixed_root": even, "fixed_discrete": even})
    names = ("min_difficulty", "max_difficulty", "schedule_config.total_curriculum_step")
    found = [course.whole(name) for name in names]
    step, batch = course.whole("schedule_config.difficulty_step"), out.get("train", {}).get("batch")
    for name, value in (*zip(names, found), ("schedule_config.difficulty_step", step)):
        if value is None or value < 1:
            raise ValueError(f"curriculum_learning.{name} is {short(value)}; it must be a whole number of at least 1")
    for name, value in zip(names[:2], found):
        if value % step:
            raise ValueError(
                f"curriculum_learning.{name} is {value}; it must be a multiple of schedule_config.difficulty_step, "
                f"{step}, to which DeepSpeed rounds all lengths down"
            )
    if batch is None:
        raise ValueError("curriculum_learning is by steps, and the batch is not given; give train_batch_size")
    low, high, steps = found
    if low >= high:
        return
    put(out, "data.seq_len", high)
    put(out, "data.seq_len_warmup", f"{low}:{step}:{max(1, round(steps * step / (high - low) * batch * high))}")
