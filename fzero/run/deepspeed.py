"""A DeepSpeed config as a config of a run: its stage, offload, precision, optimizer, schedule, clipping and batch are
taken; every other key is named as ignored, or refused if it would change the run.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fzero.core.arguments import checked
from fzero.core.foreign import NAMES, nearest, parse_json, read_text_file, short
from fzero.core.tables import Table, flat, put
from fzero.run import deepspeed_keys as keys

if TYPE_CHECKING:
    from fzero.run.config import RunConfig


class FromDeepSpeed(NamedTuple):
    """A DeepSpeed config as `read_deepspeed` returns it."""

    table: Table  # of a RunConfig, with no other value than those that the config sets
    ignored: tuple[str, ...]  # keys that change nothing here
    left: tuple[str, ...]  # keys that are "auto": fzero's own value holds


@checked()
def config_from_deepspeed(
    source: str | Path | Mapping[str, Any], table: Table | None = None, *, ranks: int = 1
) -> RunConfig:
    """Return the RunConfig of a DeepSpeed config, which `table` completes with what such a config does not say.

    source: the path of a JSON file, or its table. table: as of a file for --config, such as {"preset": "gpt2-124m",
    "train": {"steps": 1000}}; where both say something, `table` counts. ranks: data-parallel processes (dp times rp),
    which share the batch.

    Schedules are DeepSpeed's, step for step; weight decay is of all leaves, as in DeepSpeed without parameter groups.
    docs/migrate.md says what becomes of every key. Warns (UserWarning), in one line, of keys that are ignored.
    Raises ValueError for a key that DeepSpeed does not have, naming the nearest, one that would change the run, and
    batch sizes that contradict each other.

    >>> source = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    >>> config = config_from_deepspeed(source, {"preset": "mlp-tiny"})
    >>> config.train.batch, config.precision.policy, config.zero, config.optim.clip
    (8, 'bf16', 2, 0.0)
    """
    from fzero.run.config_table import from_table

    found = read_deepspeed(source, ranks)
    if found.ignored:
        warnings.warn(ignored_line(source, found), UserWarning, stacklevel=2)
    return from_table(merged(found.table, table or {}))


def ignored_line(source: str | Path | Mapping[str, Any], found: FromDeepSpeed) -> str:
    """The line that names the keys that change nothing."""
    return f"{_name(source)}: ignored, as they change nothing here: {', '.join(found.ignored)}"


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
    table = dict(source) if isinstance(source, Mapping) else parse_json(read_text_file(Path(source)), name)
    try:
        return _read(table, ranks)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _name(source: str | Path | Mapping[str, Any]) -> str:
    return "the DeepSpeed config" if isinstance(source, Mapping) else str(source)


def _read(table: Table, ranks: int) -> FromDeepSpeed:
    values: dict[str, Any] = {}
    ignored, left = [], []
    for name, value in flat(table):
        key = _key_of(name, value)
        if key.what == keys.IGNORED:
            ignored.append(name)
        elif key.what == keys.REFUSED:
            if value not in key.harmless and value != "auto":
                raise ValueError(f"{name} is {short(value)}: {key.why}; leave it out")
        elif value == "auto":
            left.append(name)
        elif value is not None:
            values[name] = value
    out: Table = {}
    said = Values(values)
    _put_batch(out, said, ranks, left)
    _put_zero(out, said)
    _put_precision(out, said, left)
    put(out, "optim.clip", said.number("gradient_clipping", 0.0))
    if steps := said.whole("steps_per_print"):
        put(out, "train.log_every", steps)
    _put_layer_drop(out, said)
    _put_optimizer(out, said)
    _put_scheduler(out, said, left)
    if "gradient_clipping" in left:
        del out["optim"]["clip"]
    return FromDeepSpeed({name: value for name, value in out.items() if value != {}}, tuple(ignored), tuple(left))


def _key_of(name: str, value: Any) -> keys.Key:
    for key in keys.KEYS:
        if key.name == name or (key.name.endswith(".*") and name.startswith(key.name[:-1])):
            return key
    if any(key.name.startswith(f"{name}.") for key in keys.KEYS):
        raise ValueError(f"{name} is {short(value)}; it must be a table")
    exact = [key.name for key in keys.KEYS if not key.name.endswith(".*")]
    *parents, last = name.split(".")
    tops = sorted({key.name.partition(".")[0] for key in keys.KEYS})
    if parents and parents[0] not in tops:
        raise ValueError(f"there is no key {parents[0]!r}{nearest(parents[0], tops)} in a DeepSpeed config")
    beside = [key for key in exact if key.split(".")[:-1] == parents] or exact
    near = nearest(last, [key.rpartition(".")[2] for key in beside]) or nearest(name, exact)
    raise ValueError(f"there is no key {name!r}{near} in a DeepSpeed config")


class Values(NamedTuple):
    """The values of a config by their dotted names, read with their types."""

    of: Mapping[str, Any]

    def read(self, name: str, kinds: tuple[type, ...], default: Any) -> Any:
        """The value, of one of these types; raises ValueError for another."""
        value = self.of.get(name, default)
        if value is not default and type(value) not in kinds:
            raise ValueError(f"{name} is {short(value)}; it must be {' or '.join(NAMES[kind] for kind in kinds)}")
        return value

    def number(self, name: str, default: Any = None) -> Any:
        """The value, a number."""
        return self.read(name, (float, int), default)

    def whole(self, name: str, default: Any = None) -> Any:
        """The value, a whole number (JSON's 1e3 is one)."""
        value = self.number(name, default)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return self.read(name, (int,), default)

    def flag(self, name: str, default: bool = False) -> bool:
        """The value, true or false."""
        return self.read(name, (bool,), default)

    def choice(self, name: str, among: Sequence[str], default: str, others: Mapping[str, str] | None = None) -> str:
        """The value, one of `among`; raises ValueError, with the reason for one of `others`."""
        value = self.read(name, (str,), default)
        if value in among:
            return value
        if value in (others or {}):
            raise ValueError(f"{name} is {value!r}: {(others or {})[value]}")
        raise ValueError(f"{name} is {value!r}{nearest(value, among)}; it must be one of {', '.join(among)}")

    def below(self, where: str) -> Values:
        """The values within a table."""
        return Values(
            {name[len(where) + 1 :]: value for name, value in self.of.items() if name.startswith(f"{where}.")}
        )

    def expect_only(self, where: str, kind: str, names: Sequence[str]) -> None:
        """Raise ValueError for a name that this type of `where` does not have, with the nearest."""
        for name in self.of:
            if name not in names:
                raise ValueError(
                    f"there is no key '{where}.params.{name}'{nearest(name, names)} of {kind}; it has "
                    f"{', '.join(names)}"
                )


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _put_batch(out: Table, said: Values, ranks: int, left: Sequence[str]) -> None:
    batch, micro, times = (said.whole(name) for name in BATCH)
    for name, value in zip(BATCH, (batch, micro, times)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if (batch, micro) == (None, None):
        return  # accumulation alone says nothing of a batch
    if micro is None:
        if BATCH[1] in left:  # the micro-batch is fzero's own
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


def _put_zero(out: Table, said: Values) -> None:
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
            raise ValueError(
                f"{keys.ZERO}.{group}.device is {device!r} and stage {stage}; DeepSpeed needs stage 3 for it"
            )
        ratio = one.number("ratio", 1.0)
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


def _put_precision(out: Table, said: Values, left: Sequence[str]) -> None:
    half = said.flag("fp16.enabled")
    wide = said.flag("bf16.enabled") or said.flag("bfloat16.enabled")
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
            "init": 2.0 ** said.number("fp16.initial_scale_power", 16),
            "window": said.whole("fp16.loss_scale_window", 1000),
            "hysteresis": said.whole("fp16.hysteresis", 2),
            "floor": float(said.number("fp16.min_loss_scale", 1)),
        }
    put(out, "precision.loss_scale", found)


def _put_layer_drop(out: Table, said: Values) -> None:
    drop = said.below("progressive_layer_drop")
    theta, gamma = drop.number("theta", 1.0), drop.number("gamma", 0.001)
    if drop.flag("enabled") and theta != 1:
        put(out, "train.layer_drop_theta", float(theta))
        put(out, "train.layer_drop_gamma", float(gamma))


def _put_optimizer(out: Table, said: Values) -> None:
    if "optimizer.type" not in said.of:
        return
    kinds = {**dict.fromkeys(keys.OPTIMIZERS), **keys.OTHER_OPTIMIZERS}
    given = said.read("optimizer.type", (str,), "")
    kind = Values({"optimizer.type": given.lower()}).choice(
        "optimizer.type", list(keys.OPTIMIZERS), "", {k: why for k, why in kinds.items() if why}
    )
    params = said.below("optimizer.params")
    params.expect_only("optimizer", given, keys.OPTIMIZERS[kind])
    for name, default in (("amsgrad", False), ("maximize", False), ("bias_correction", True)):
        if params.flag(name, default) is not default:
            raise ValueError(
                f"optimizer.params.{name} is {not default}, which {given} here does not have; leave it out"
            )
    if params.number("dampening", 0.0):
        raise ValueError("optimizer.params.dampening is not 0, which optim.sgd does not have; leave it out")
    decoupled = kind == "adamw" or params.flag("adam_w_mode", True)
    if kind == "adam" and decoupled:
        kind = "adamw"
    torchs = kind == "adamw" and params.flag("torch_adam")
    found: Table = {"name": kind, "decay": "all", "lr": float(params.number("lr", 1e-3))}
    found["weight_decay"] = float(params.number("weight_decay", 0.01 if torchs else 0.0))
    if kind == "sgd":
        found |= {"momentum": float(params.number("momentum", 0.0)), "nesterov": params.flag("nesterov")}
    else:
        betas = params.read("betas", (list,), [0.9, 0.99 if kind == "lion" else 0.999])
        if len(betas) != 2 or not all(type(beta) in (int, float) for beta in betas):
            raise ValueError(f"optimizer.params.betas is {short(betas)}; it must be two numbers")
        found |= {"beta1": float(betas[0]), "beta2": float(betas[1])}
        if kind != "lion":
            found["eps"] = float(params.number("eps", 1e-8))
    out["optim"] |= found


def _put_scheduler(out: Table, said: Values, left: Sequence[str]) -> None:
    optim = out["optim"]
    if "scheduler.type" not in said.of:
        if "optimizer.type" in said.of:
            optim["schedule"] = {"name": "constant", "warmup_steps": 0}
        return
    kind = said.choice("scheduler.type", list(keys.SCHEDULERS), "", keys.OTHER_SCHEDULERS)
    params = said.below("scheduler.params")
    params.expect_only("scheduler", kind, keys.SCHEDULERS[kind])
    if params.whole("last_batch_iteration", -1) != -1:
        raise ValueError("scheduler.params.last_batch_iteration is not -1; resume a run by --resume")
    found: Table = {"name": re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()}
    if "scheduler.params.warmup_num_steps" not in left:
        found["warmup_steps"] = params.whole("warmup_num_steps", 1000)
    found["warmup"] = params.choice("warmup_type", ("log", "linear"), "log")
    if kind == "WarmupCosineLR":
        found["start"] = float(params.number("warmup_min_ratio", 0.0))
        found["end"] = float(params.number("cos_min_ratio", 1e-4))
    else:
        _put_rates(optim, found, params, kind, left)
    if "total_num_steps" in keys.SCHEDULERS[kind] and "scheduler.params.total_num_steps" not in left:
        if (steps := params.whole("total_num_steps")) is None:
            raise ValueError(f"{kind} needs scheduler.params.total_num_steps")
        put(out, "train.steps", steps)
    optim["schedule"] = found


def _put_rates(optim: Table, found: Table, params: Values, kind: str, left: Sequence[str]) -> None:
    peak = params.number("warmup_max_lr", 1e-3 if kind == "WarmupDecayLR" else None)
    if "scheduler.params.warmup_max_lr" in left:
        peak = optim.get("lr")
    elif peak is None:
        raise ValueError(
            "scheduler.params.warmup_max_lr is not given, and versions of DeepSpeed differ in what it then is; give it"
        )
    least = float(params.number("warmup_min_lr", 0.0))
    if peak is None:
        if least:
            raise ValueError(
                "scheduler.params.warmup_min_lr is a fraction of warmup_max_lr here; give that as a number"
            )
        return
    if not 0.0 <= least < peak:
        raise ValueError(f"scheduler.params.warmup_min_lr is {least} and warmup_max_lr {peak}; it must be smaller")
    optim["lr"] = float(peak)
    found["start"] = least / peak
