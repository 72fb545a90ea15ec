"""A DeepSpeed config as a config of a run.

Its stage, offload, precision, optimizer, schedule, clipping and batch are taken; every other key is named as ignored,
or refused if it would change the run.
"""

from __future__ import annotations

import fnmatch
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fzero.core.arguments import checked
from fzero.core.config_tables import Table, flat, set_nested
from fzero.core.precision import LossScale
from fzero.core.text_parsing import nearest, parse_json, read_text_file, short
from fzero.models.configs import family_of
from fzero.run.config import deepspeed_keys as keys
from fzero.run.config.deepspeed_keys import Values
from fzero.run.config.deepspeed_optim import add_optimizer, add_pattern, add_scheduler

if TYPE_CHECKING:
    from fzero.run.config.run_config import RunConfig


class FromDeepSpeed(NamedTuple):
    """A DeepSpeed config as `read_deepspeed` returns it."""

    name: str  # in messages
    table: Table  # of a RunConfig, with no other value than those that the config sets
    ignored: tuple[str, ...]  # keys that change nothing here
    auto_keys: tuple[str, ...]  # keys that are "auto": fzero's own value holds
    unknown: tuple[str, ...] = ()  # keys that DeepSpeed does not have and does not look at, with the nearest one

    @property
    def ignored_line(self) -> str:
        """The line that names the keys that change nothing, "" if there is none."""
        parts = [
            f"as {reason}: {', '.join(names)}"
            for reason, names in (
                ("they change nothing here", self.ignored),
                ("DeepSpeed has no such key", self.unknown),
            )
            if names
        ]
        return f"{self.name}: ignored, {'; '.join(parts)}" if parts else ""

    def complete(self, table: Table, say: Callable[[str], None]) -> Table:
        """The table of a run, which has that of this config in it, with what DeepSpeed's recipe has beside its keys.

        Says if the schedule goes over other steps than the config's. Raises ValueError for an attention pattern and a
        model without attention.
        """
        self._expect_attention(table)
        total, steps = self.table.get("train", {}).get("steps"), table.get("train", {}).get("steps")
        if total is not None and steps not in (None, total):
            say(
                f"{self.name}: scheduler.params.total_num_steps is {total} and the run has {steps} steps, over which "
                f"the schedule goes now; for {total} steps of it give --steps {total}, and --stop-at to end earlier"
            )
        return self._with_uniform_rate(table)

    def _with_uniform_rate(self, table: Table) -> Table:
        """The table, whose second rate (muon's) has the config's schedule, which DeepSpeed gives to every leaf."""
        from fzero.run.config.config_table import from_table

        optim, peak = table.get("optim", {}), self.table.get("optim", {}).get("lr")
        if peak is None or "name" in self.table["optim"] or optim.get("lr") != peak or "lr_rest" in optim:
            return table
        named = {"optim": {"name": optim["name"]}} if "name" in optim else {}
        kind = from_table({key: table[key] for key in ("preset", "model") if key in table} | named).optim.name
        return merge_tables(table, {"optim": {"lr_rest": peak}}) if kind == "muon" else table

    def _expect_attention(self, table: Table) -> None:
        """Raise ValueError if the config has an attention pattern and the run's model no attention."""
        from fzero.run.config.config_table import from_table

        if "pattern" not in self.table.get("model", {}) or "pattern" not in table["model"]:
            return
        sizes = {key: value for key, value in table["model"].items() if key != "pattern"}
        model = from_table({key: table[key] for key in ("preset",) if key in table} | {"model": sizes}).model
        if not hasattr(model, "pattern"):
            reason = f"a model of the family {family_of(model)} has no attention patterns; leave it out"
            raise ValueError(f"{self.name}: sparse_attention: {reason}")


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
    from fzero.run.config.config_table import from_table

    def warn(line: str) -> None:
        warnings.warn(line, UserWarning, stacklevel=3)

    conversion = read_deepspeed(source, ranks)
    if conversion.ignored_line:
        warn(conversion.ignored_line)
    return from_table(conversion.complete(merge_tables(conversion.table, table or {}), warn))


def merge_tables(table: Table, overrides: Table) -> Table:
    """A copy of the table, with the values of `overrides` where both say something."""
    out = {key: merge_tables(value, {}) if isinstance(value, dict) else value for key, value in table.items()}
    for key, value in overrides.items():
        nested = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge_tables(out[key], value) if nested else value
    return out


def read_deepspeed(source: str | Path | Mapping[str, Any], ranks: int = 1) -> FromDeepSpeed:
    """The values that a DeepSpeed config sets, as a table of a RunConfig; as `config_from_deepspeed`.

    >>> read_deepspeed({"gradient_clipping": 1.0, "wall_clock_breakdown": True}).ignored
    ('wall_clock_breakdown',)
    """
    is_table = isinstance(source, Mapping)
    name = "the DeepSpeed config" if is_table else str(source)
    table = dict(source) if is_table else parse_json(read_text_file(Path(source)), name, unique_keys=True)
    try:
        return _read(name, table, ranks)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _read(label: str, table: Table, ranks: int) -> FromDeepSpeed:
    values: dict[str, Any] = {}
    ignored, auto_keys, unknown = [], [], []
    if isinstance(table.get(keys.ZERO), bool):  # DeepSpeed's first form
        table = {**table, keys.ZERO: {"stage": int(table[keys.ZERO])}}
    for name, value in flat(table):
        key = _key_of(name, value)
        if key is None:
            unknown.append(f"{name}{_nearest_key(name)}")
        elif key.outcome == keys.IGNORED:
            ignored.append(name)
        elif key.outcome == keys.REFUSED:
            if _is_off(table, name):
                ignored.append(name)
            elif value not in key.harmless and value != "auto":
                raise ValueError(f"{name} is {short(value)}: {key.reason}; leave it out")
        elif value == "auto":
            auto_keys.append(name)
        elif value is not None:
            values[name] = value
    out: Table = {}
    reader = Values(values)
    _add_batch(out, reader, ranks, auto_keys, ignored)
    _add_zero(out, reader, ignored)
    _add_codec(out, reader, ignored)
    _add_precision(out, reader, auto_keys)
    set_nested(out, "optim.clip", reader.number("gradient_clipping", 0.0))
    if (
        (steps := reader.number("steps_per_print"))
        and steps != math.inf
        and (steps := reader.integer("steps_per_print"))
    ):
        set_nested(out, "train.log_every", steps)
    _add_layer_drop(out, reader)
    _add_curriculum(out, reader)
    if isinstance(table.get("sparse_attention"), Mapping) and "sparse_attention.mode" not in auto_keys:
        add_pattern(out, reader.section("sparse_attention"))
    add_optimizer(out, reader)
    add_scheduler(out, reader, auto_keys)
    if "scheduler.type" not in values:
        ignored += [f"{name} (of a scheduler without a type)" for name in values if name.startswith("scheduler.")]
    if "gradient_clipping" in auto_keys:
        del out["optim"]["clip"]
    out = {name: value for name, value in out.items() if value != {}}
    return FromDeepSpeed(label, out, tuple(ignored), tuple(auto_keys), tuple(unknown))


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
    """The key of a name or alias; None for one that DeepSpeed does not read."""
    *parents, last = name.split(".")
    alias = f"{keys.ZERO}.stage3_{last}" if parents == [keys.ZERO] else name  # DeepSpeed's fields have both names
    matches = [key for key in keys.KEYS if fnmatch.fnmatchcase(name, key.name) or key.name == alias]
    if matches:
        return max(matches, key=lambda key: len(key.name))
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
    siblings = [key for key in exact if key.split(".")[:-1] == parents] or exact
    return nearest(last, [key.rpartition(".")[2] for key in siblings]) or nearest(name, exact)


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _add_batch(out: Table, reader: Values, ranks: int, auto_keys: Sequence[str], ignored: list[str]) -> None:
    batch, micro, times = (reader.integer(name, minimum=1) for name in BATCH)
    if (batch, micro) == (None, None):
        if times is not None and times > 1:
            raise ValueError(
                f"{BATCH[2]} is {times} of a micro-batch that is not given; give {BATCH[1]}, or leave it out and give "
                "--batch and --micro-batch"
            )
        ignored += [f"{BATCH[2]} (of a batch that is not given)"] * (times is not None)
        return
    if micro is None:
        if BATCH[1] in auto_keys and times is None:  # the micro-batch is fzero's own
            set_nested(out, "train.batch", batch)
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
    set_nested(out, "train.batch", batch)
    set_nested(out, "train.micro_batch", micro)


def _add_zero(out: Table, reader: Values, ignored: list[str]) -> None:
    zero = reader.section(keys.ZERO)
    stage = zero.integer("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"{keys.ZERO}.stage is {stage}; it must be 0, 1, 2 or 3")
    out["zero"] = stage
    parts, folders = [], set()
    for group, old, target in (
        ("offload_param", "cpu_offload_param", "params"),
        ("offload_optimizer", "cpu_offload", "opt"),
    ):
        section = zero.section(group)
        device = section.choice("device", ("none", "cpu", "nvme"), "cpu" if zero.flag(old) else "none")
        if device == "none":
            continue
        if target == "params" and stage != 3:
            ignored.append(f"{keys.ZERO}.{group}.device (it is of stage 3 alone, and the stage is {stage})")
            continue
        ratio = section.number("ratio", 1.0)
        if not 0.0 <= ratio <= 1.0:
            raise ValueError(f"{keys.ZERO}.{group}.ratio is {ratio}; it must be in [0, 1]")
        if ratio == 0.0:  # of none of it
            continue
        parts.append(f"{target}={'host' if device == 'cpu' else device}" + (f":{ratio:g}" if ratio < 1.0 else ""))
        if device == "nvme":
            folders |= {section.read("nvme_path", (str,), "")}
    if len(folders) > 1:
        raise ValueError(
            f"{keys.ZERO}: nvme_path is {' and '.join(sorted(map(repr, folders)))}; there is one store: give one path"
        )
    if parts:
        out["offload"] = ",".join(parts)
    if folders - {""}:
        set_nested(out, "nvme.folder", folders.pop())


def _add_codec(out: Table, reader: Values, ignored: list[str]) -> None:
    zero = reader.section(keys.ZERO)
    flags = [name for name in ("zero_quantized_weights", "zero_quantized_gradients") if zero.flag(name)]
    if out["zero"] != 3:
        ignored += [f"{keys.ZERO}.{name} (it is of stage 3 alone, and the stage is {out['zero']})" for name in flags]
        return
    parts = ["params=int8"] if zero.flag("zero_quantized_weights") else []
    if zero.flag("zero_quantized_gradients"):
        parts.append("grads=int4")
        loco = zero.section("zeropp_loco_param")
        if loco.table:
            beta, reset = loco.number("err_beta", 0.8), loco.integer("reset_T", 1024)
            parts += [f"loco={beta:g}", f"reset={reset}"]
    if parts:
        out["codec"] = ",".join(parts)


HALVES = {"bf16": ("bfloat16", "bf16", "torch.bfloat16"), "fp16": ("float16", "fp16", "half", "torch.float16")}

SCALE = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def _add_precision(out: Table, reader: Values, auto_keys: Sequence[str]) -> None:
    half = reader.flag("fp16.enabled")
    wide = reader.flag("bf16.enabled") or reader.flag("bfloat16.enabled")
    if reader.flag("torch_autocast.enabled"):
        dtype = reader.choice("torch_autocast.dtype", sum(HALVES.values(), ()), "bfloat16")
        half, wide = half or dtype in HALVES["fp16"], wide or dtype in HALVES["bf16"]
    if half and wide:
        raise ValueError("fp16.enabled and bf16.enabled are both true; set one of them")
    if not (half or wide) and any(name.endswith(".enabled") for name in auto_keys):
        return
    set_nested(out, "precision.policy", "fp16" if half else "bf16" if wide else "fp32")
    if not half:
        return
    scale = reader.number("fp16.loss_scale", 0)
    if scale:  # never falls below it, and never rises
        scale_fields = {"init": float(scale), "floor": float(scale), "window": 2**62, "at_floor": "hold"}
    else:
        scale_fields = {
            "init": 2.0**power if (power := reader.number("fp16.initial_scale_power", 16)) < 128 else math.inf,
            "window": reader.integer("fp16.loss_scale_window", 1000),
            "hysteresis": reader.integer("fp16.hysteresis", 2),
            "floor": float(reader.number("fp16.min_loss_scale", 1)),
        }
    try:
        LossScale(**scale_fields)
    except ValueError:
        values_text = ", ".join(
            f"{name} is {short(value)}" for name, value in reader.section("fp16").table.items() if name in SCALE
        )
        raise ValueError(
            f"fp16: {values_text}; a dynamic scale needs an initial_scale_power below 128, 2 to it at least at "
            "min_loss_scale, which is above 0, and loss_scale_window and hysteresis of at least 1; a fixed loss_scale "
            "is a finite number above 0"
        ) from None
    set_nested(out, "precision.loss_scale", scale_fields)


def _add_layer_drop(out: Table, reader: Values) -> None:
    drop = reader.section("progressive_layer_drop")
    theta, gamma = drop.number("theta", 1.0), drop.number("gamma", 0.001)
    if drop.flag("enabled") and theta != 1:
        set_nested(out, "train.layer_drop_theta", float(theta))
        set_nested(out, "train.layer_drop_gamma", float(gamma))


def _add_curriculum(out: Table, reader: Values) -> None:
    course = reader.section("curriculum_learning")
    if not course.flag("enabled"):
        return
    course.choice("curriculum_type", ("seqlen",), "seqlen")
    even = "its lengths do not grow evenly; use fixed_linear"
    course.choice("schedule_type", ("fixed_linear",), "", {"fixed_root": even, "fixed_discrete": even})
    names = ("min_difficulty", "max_difficulty", "schedule_config.total_curriculum_step")
    numbers = [course.integer(name) for name in names]
    step, batch = course.integer("schedule_config.difficulty_step"), out.get("train", {}).get("batch")
    for name, value in (*zip(names, numbers), ("schedule_config.difficulty_step", step)):
        if value is None or value < 1:
            raise ValueError(f"curriculum_learning.{name} is {short(value)}; it must be a whole number of at least 1")
    for name, value in zip(names[:2], numbers):
        if value % step:
            raise ValueError(
                f"curriculum_learning.{name} is {value}; it must be a multiple of schedule_config.difficulty_step, "
                f"{step}, to which DeepSpeed rounds all lengths down"
            )
    if batch is None:
        raise ValueError("curriculum_learning is by steps, and the batch is not given; give train_batch_size")
    low, high, steps = numbers
    if low >= high:
        return
    set_nested(out, "data.seq_len", high)
    set_nested(out, "data.seq_len_warmup", f"{low}:{step}:{max(1, round(steps * step / (high - low) * batch * high))}")
