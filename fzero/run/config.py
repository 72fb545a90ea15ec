"""The configuration of a run as a value: frozen dataclasses, tables in, JSON out and back exactly, presets as functions.

A table (of a TOML or JSON file, or of `--set`) names a preset and what differs from it. Everything that can be seen to be wrong from the
numbers alone is refused here, before anything runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fzero import models
from fzero.core.autodiff import Remat
from fzero.core.precision import POLICIES, LossScale
from fzero.core.pytree import nearest
from fzero.core.tables import Table, flat, parse_json, show, typed
from fzero.data.tokens import read_meta
from fzero.kernels.registry import Kernels
from fzero.models import GPT2Config, LlamaConfig, MLPConfig, ModelConfig, MoEConfig
from fzero.sharding import AXES
from fzero.sharding.memory import Offload
from fzero.sharding.plan import ACCUMULATE, REDUCE

DEFAULT_PRESET = "llama-tiny"
FAMILIES: dict[str, type] = {"gpt2": GPT2Config, "llama": LlamaConfig, "mixtral": MoEConfig, "mlp": MLPConfig}


@dataclass(frozen=True)
class Data:
    """What is trained on."""

    path: str = "stdlib"  # a prepared corpus, or text to prepare once: a file, a folder, "stdlib"
    tokenizer: str = "bytes"  # of text to prepare, as in `fzero data prepare`
    seq_len: int = 256
    within_documents: bool = True  # a token attends to its own document only


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run as a fraction of its peak. Which numbers count depends on the name: see SCHEDULES."""

    name: str = "cosine"
    warmup_steps: int = 0  # linear from 0
    end: float = 0.1  # the fraction at the last step
    power: float = 1.0
    decay_steps: int = 0  # the last steps of the run, in which wsd decays
    decay: str = "linear"
    rise: float = 0.3  # fraction of the steps until the peak


SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": ("warmup_steps",),
    "linear": ("warmup_steps", "end"),
    "cosine": ("warmup_steps", "end"),
    "polynomial": ("warmup_steps", "end", "power"),
    "exponential": ("warmup_steps", "end"),
    "inverse_sqrt": ("warmup_steps",),
    "one_cycle": ("rise",),
    "wsd": ("warmup_steps", "end", "decay_steps", "decay"),
}


@dataclass(frozen=True)
class Optim:
    """The optimizer. Which numbers count depends on the name: see OPTIMIZERS. Weight decay is of matrices only."""

    name: str = "adamw"
    lr: float = 3e-3  # the schedule's peak
    lr_rest: float = 0.0  # muon: AdamW's peak, for what is no matrix of a block
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.0
    nesterov: bool = False
    adjust: str = "original"  # how muon scales an update with the matrix's shape
    states: str = "full"  # of adamw, adam and lion: in the precision's dtype, bf16 (stochastic rounding) or 8bit
    clip: float = 1.0  # largest norm of the gradient; 0: as it is
    schedule: Schedule = Schedule()


ADAM = ("lr", "weight_decay", "beta1", "beta2", "eps")
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": (*ADAM, "states"),
    "adam": (*ADAM, "states"),
    "lamb": ADAM,
    "lion": (*ADAM[:-1], "states"),
    "sgd": ("lr", "weight_decay", "momentum", "nesterov"),
    "adafactor": ("lr", "weight_decay"),
    "muon": (*ADAM, "lr_rest", "momentum", "nesterov", "adjust"),
}


@dataclass(frozen=True)
class Precision:
    """How numbers are kept and multiplied. "auto" is decided on the machine at the start of a run and recorded."""

    policy: str = "auto"  # bf16 where bf16 products are faster than fp32 ones, else fp32
    fp32_matmul: str = "auto"  # onednn: its split of a float32 product into bfloat16 ones, where that is as exact and faster
    loss_scale: LossScale = field(default_factory=LossScale)  # of fp16


@dataclass(frozen=True)
class Train:
    """The loop. `batch` sequences a step are made of pieces of `micro_batch`; an interval of 0 is never."""

    steps: int = 1000
    batch: int = 16
    micro_batch: int = 4
    seed: int = 0
    remat: str = "none"
    compiled: str | bool = "auto"  # auto: where there is a compiler
    update: str = "end"  # where states are offloaded also: backward (each layer when its gradient is reduced), delayed (one step behind)
    mlp_tiles: int = 1  # parts that an MLP's hidden units are computed in, one at a time
    kernels: str = "auto"  # the form of each hot operation: auto, reference, or exceptions such as auto,attention=blocked
    ema_decay: float = 0.0  # 0: no average of the weights
    eval_every: int = 100
    eval_batches: int = 16  # micro-batches of an evaluation; 0: the whole validation split
    checkpoint_every: int = 500
    keep_last: int = 2  # checkpoints; 0: all
    keep_every: int = 0  # of these steps all are kept; 0: none
    checkpoints: str = ""  # where they go, a folder or a URL such as s3://bucket/run; "": checkpoints/ in the run folder
    compress: str = "none"  # checkpoints: zstd, or none
    snapshot_mb: int = 0  # memory of a rank for the copy that is written while training goes on; 0: the state's size where there is room
    on_save_error: str = "continue"  # continue: train on where a checkpoint cannot be written, and try again at the next; or stop
    log_every: int = 20
    measure_every: int = 20  # rows of metrics.jsonl with norms by layer and times by rank; 0: none, and no record of memory and ledger
    digest_every: int = 0  # rows of metrics.jsonl with a digest of all parameters, for fzero replay and bisect
    hang_s: float = 600.0  # several processes end, naming the rank, where one makes no progress for so long; 0: never
    memory_check: bool = True


@dataclass(frozen=True)
class Nvme:
    """The disk that offloaded leaves rest on."""

    folder: str = ""  # on a disk that all ranks see, or a URL of tensorstore's; "": nvme/ in the run folder
    buffer_mb: int = 0  # all that is in memory on its way to or from the disk; 0: what the plan needs
    slots: int = 2  # versions on the disk: 2 make every step atomic, each one more keeps a checkpoint; 1 saves the space
    verify: bool = True  # checksums with every write, compared when the run is resumed


@dataclass(frozen=True)
class Guard:
    """What is done about a step that went wrong, and about hardware that computes wrongly: see docs/guard.md."""

    nonfinite: str = "skip"  # a gradient that is not finite: skip the update, rollback to a checkpoint, or stop
    max_skipped: int = 50  # steps skipped in a row, at which the run ends
    spike: str = "off"  # a loss far above those before it: off, skip or rollback
    sigmas: float = 6.0  # how far above their mean is a spike, in their standard deviations
    window: int = 100  # steps that the mean and the deviation remember
    warmup: int = 100  # losses seen before one is judged
    rollback_steps: int = 0  # a rollback goes back at least so many steps
    max_rollbacks: int = 10  # without a new checkpoint behind the step that went wrong, at which the run ends
    check_every: int = 0  # steps between two comparisons of what the ranks compute and hold; 0: none


@dataclass(frozen=True)
class RunConfig:
    """A whole run. Raises ValueError naming the key, its value, what is allowed and the fix."""

    preset: str = ""  # whose numbers were the start of these; "" for none
    model: ModelConfig = field(default_factory=MLPConfig)
    data: Data = Data()
    optim: Optim = Optim()
    precision: Precision = Precision()
    train: Train = Train()
    mesh: dict[str, int] = field(default_factory=dict)  # sizes of its axes; empty: dp over all processes
    zero: int = 0  # ZeRO stage
    reduce: str = "fast"  # canonical: one order of sums on every mesh
    sequence: bool = False  # sequence parallelism over tp
    accumulate: str = "shards"  # over micro-batches at stages 2 and 3: shards of gradients, or full ones
    prefetch: int = 1  # layers gathered ahead of their use at stage 3
    reshard: bool = True  # stage 3: a layer's parameters are dropped behind its forward pass and gathered again
    offload: str = ""  # where groups of leaves rest: "params=nvme,opt=nvme,acts=host", "opt=host:0.5"; "" is all on the device
    nvme: Nvme = Nvme()
    guard: Guard = Guard()

    def __post_init__(self) -> None:
        validate(self)


# Numbers: the smallest, and whether the value may be that; the bound above, which it may not be.
INF = math.inf
POSITIVE, COUNT, RATE, FRACTION = (0.0, False, INF), (0, True, INF), (0.0, True, INF), (0.0, True, 1.0)
SIZE = (1, True, INF)
BOUNDS: dict[str, tuple[float, bool, float]] = {
    **{f"model.{n}": SIZE for n in ("vocab_size", "max_len", "d_model", "n_layers", "n_heads", "n_kv_heads", "d_ff", "n_experts")},
    **{f"model.{n}": RATE for n in ("init_std", "balance_coef", "z_coef", "capacity_factor", "head_dim")},
    **{"model.dropout": FRACTION, "model.norm_eps": POSITIVE, "model.rope_theta": POSITIVE, "data.seq_len": SIZE, "optim.lr": RATE},
    **{f"optim.{n}": RATE for n in ("lr_rest", "weight_decay", "eps", "clip")},
    **{f"optim.{n}": FRACTION for n in ("beta1", "beta2", "momentum")},
    **{f"optim.schedule.{n}": COUNT for n in ("warmup_steps", "decay_steps")},
    **{"optim.schedule.end": RATE, "optim.schedule.power": POSITIVE, "optim.schedule.rise": (0.0, False, 1.0)},
    **{f"train.{n}": SIZE for n in ("steps", "batch", "micro_batch", "log_every", "mlp_tiles")},
    **{f"train.{n}": COUNT for n in ("eval_every", "eval_batches", "checkpoint_every", "keep_last", "keep_every")},
    **{"train.snapshot_mb": COUNT, "train.digest_every": COUNT, "train.measure_every": COUNT},
    **{"train.seed": (0, True, 2**64), "train.hang_s": RATE, "train.ema_decay": FRACTION, "zero": (0, True, 4), "prefetch": COUNT},
    **{"nvme.buffer_mb": COUNT, "nvme.slots": SIZE, "guard.sigmas": POSITIVE, "guard.rollback_steps": COUNT, "guard.check_every": COUNT},
    **{f"guard.{n}": SIZE for n in ("max_skipped", "window", "warmup", "max_rollbacks")},
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "optim.name": tuple(OPTIMIZERS),
    "optim.states": ("full", "bf16", "8bit"),
    "optim.adjust": ("original", "match_rms_adamw"),
    "optim.schedule.name": tuple(SCHEDULES),
    "optim.schedule.decay": ("linear", "sqrt", "cosine"),
    "precision.policy": ("auto", *POLICIES),
    "precision.fp32_matmul": ("auto", "default", "onednn"),
    "train.compiled": ("auto", True, False),
    "train.compress": ("none", "zstd"),
    "train.on_save_error": ("continue", "stop"),
    "train.update": ("end", "backward", "delayed"),
    "reduce": REDUCE,
    "accumulate": ACCUMULATE,
    "guard.nonfinite": ("skip", "rollback", "stop"),
    "guard.spike": ("off", "skip", "rollback"),
}


# -- presets


def optimizer_defaults(name: str) -> Optim:
    """The optimizer of that name with numbers that serve small models; raises ValueError for an unknown name."""
    check_leaf("optim.name", name)
    numbers: dict[str, dict[str, Any]] = {
        "adamw": {},
        "adam": {"weight_decay": 0.0},
        "lamb": {"lr": 1e-2, "eps": 1e-6},
        "lion": {"lr": 3e-4, "weight_decay": 1.0, "beta2": 0.99},
        "sgd": {"lr": 0.3, "weight_decay": 0.0, "momentum": 0.9},
        "adafactor": {"lr": 1e-2, "weight_decay": 0.0},
        "muon": {"lr": 0.02, "lr_rest": 3e-3, "weight_decay": 0.01, "momentum": 0.95, "nesterov": True},
    }
    return Optim(name=name, **numbers[name])


#                           steps, batch, micro-batch, seq_len
SMALL_RUNS: dict[str, tuple[int, int, int, int]] = {
    "mlp-tiny": (200, 16, 4, 64),
    "gpt2-tiny": (400, 16, 4, 256),
    "llama-tiny": (400, 16, 4, 256),
    "mixtral-tiny": (400, 16, 4, 256),
    "llama-small": (2000, 32, 4, 512),
}
LARGE_RUN = (50_000, 256, 1, 4096)


def recipe(name: str, model: ModelConfig | None = None, *, steps: int | None = None, optimizer: str | None = None) -> RunConfig:
    """The whole run of a model preset (or of `model`, under the name ""), for `steps` steps; warmup follows from them.

    Small models are trained with Muon, to a rate of 0; large ones by the usual recipe, AdamW to a tenth of its rate.
    Raises ValueError naming the nearest preset.
    """
    model = models.preset(name) if model is None else model
    usual, batch, micro_batch, seq_len = SMALL_RUNS.get(name, LARGE_RUN)
    steps = usual if steps is None else steps
    small = name in SMALL_RUNS
    check_leaf("train.steps", steps)
    optim = optimizer_defaults(optimizer or ("muon" if small else "adamw"))
    if not small:
        optim = replace(optim, lr=optim.lr / 10, lr_rest=optim.lr_rest / 10)
    optim = replace(optim, schedule=Schedule(warmup_steps=min(steps // 20, 2000), end=0.0 if small else 0.1))
    return RunConfig(
        preset=name,
        model=model,
        data=Data(seq_len=min(seq_len, model.max_len)),
        optim=optim,
        train=Train(steps=steps, batch=batch, micro_batch=micro_batch),
    )


# -- tables in and out


def from_table(table: Table, model: ModelConfig | None = None) -> RunConfig:
    """The RunConfig of a table: its `preset` (default: llama-tiny, or `model`'s own sizes), changed where the table says.

    `model.family` (gpt2, llama, mixtral, mlp) starts from a family's default sizes where `preset` is "".
    Raises ValueError for an unknown key (with the nearest), a wrong type, a value out of range, and values that do not go together.
    """
    train, optim, sizes = (table.get(name) if isinstance(table.get(name), dict) else {} for name in ("train", "optim", "model"))
    name = typed("preset", table.get("preset", "" if model is not None else DEFAULT_PRESET), str)
    if not name and model is None:
        family = sizes.get("family", "")
        if family not in FAMILIES:
            raise ValueError(f"model.family is {family!r}{nearest(str(family), FAMILIES)}; it must be one of {', '.join(FAMILIES)}")
        model = FAMILIES[family]()
    steps, optimizer = (typed(f"{a}.{b}", t[b], kind) if b in t else None for a, t, b, kind in (
        ("train", train, "steps", int), ("optim", optim, "name", str)))  # fmt: skip
    base = recipe(name, model, steps=steps, optimizer=optimizer)
    given = sizes.get("family", family_of(base.model))
    if given != family_of(base.model):
        raise ValueError(f"model.family is {given!r} and {name or 'the model'} is of family {family_of(base.model)}; leave one of them out")
    rest = {key: value for key, value in table.items() if key != "preset"}
    if sizes:
        rest["model"] = {key: value for key, value in sizes.items() if key != "family"}
    return updated(base, rest)


def family_of(model: ModelConfig) -> str:
    """The family's name of a model config."""
    return next(name for name, kind in FAMILIES.items() if type(model) is kind)


def updated(value: Any, table: Table, where: str = "") -> Any:
    """The dataclass `value` with the fields in `table`, checked one by one and then together."""
    hints = typing.get_type_hints(type(value))
    changes: dict[str, Any] = {}
    for key, new in table.items():
        name = f"{where}{key}"
        if key not in hints:
            keys = ", ".join([*hints, *(["family"] if where == "model." else [])])
            raise ValueError(f"unknown key {name!r}{nearest(key, hints)}; the keys {f'of {where[:-1]} ' if where else ''}are {keys}")
        hint, old = hints[key], getattr(value, key)
        kind = next((k for k in typing.get_args(hint) if dataclasses.is_dataclass(k)), None)
        if new is None and type(None) in typing.get_args(hint):
            changes[key] = None
        elif dataclasses.is_dataclass(old) or (kind and name != "model"):
            if not isinstance(new, dict):
                raise ValueError(f"{name} is {new!r}; it must be a table of {', '.join(f.name for f in dataclasses.fields(old or kind))}")
            changes[key] = updated(kind() if old is None else old, new, f"{name}.")
        else:
            changes[key] = typed(name, new, hint)
            check_leaf(name, changes[key])
    try:
        return replace(value, **changes)
    except ValueError as error:
        raise ValueError(f"{where[:-1]}: {error}" if where in ("model.", "precision.loss_scale.") else str(error)) from None


def check_leaf(name: str, value: Any) -> None:
    """Raise ValueError where one value is out of its range or not among its choices."""
    if name in CHOICES and value not in CHOICES[name]:
        said = [str(choice).lower() if isinstance(choice, bool) else choice for choice in CHOICES[name]]
        raise ValueError(f"{name} is {value!r}{nearest(str(value), said)}; it must be one of {', '.join(said)}")
    if name in BOUNDS:
        low, included, high = BOUNDS[name]
        if not (low <= value if included else low < value) or not value < high:
            above = "" if high == INF else f" and below {high:g}"
            raise ValueError(f"{name} is {value!r}; it must be {'at least' if included else 'above'} {low:g}{above}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a finite number")


def to_table(config: RunConfig) -> Table:
    """The table of every value of `config`, the inverse of `from_table`."""
    table = dataclasses.asdict(config)
    return {**table, "model": {"family": family_of(config.model), **table["model"]}}


def to_json(config: RunConfig) -> str:
    """The JSON text of `config`; `from_json` reads it back equal."""
    return json.dumps(to_table(config), indent=2) + "\n"


def from_json(text: str, name: str = "config.json") -> RunConfig:
    """The RunConfig of a JSON text; raises ValueError naming the file where it is not JSON or not a config."""
    return from_table(parse_json(text, name))


# -- what goes together


def validate(config: RunConfig) -> None:
    """Raise ValueError for the first thing in `config` that is wrong whatever the data and the machine."""
    for name, value in flat(to_table(config)):
        check_leaf(name, value)
    c, t = config, config.train
    if t.batch % t.micro_batch:
        sizes = [m for m in range(1, t.batch + 1) if t.batch % m == 0]
        raise ValueError(f"train.micro_batch is {t.micro_batch} and does not divide train.batch={t.batch}; use one of {show(sizes)}")
    if c.data.seq_len > c.model.max_len:
        raise ValueError(f"data.seq_len is {c.data.seq_len} and the model takes {c.model.max_len} (model.max_len); make one fit the other")
    remat, offload = Remat.parse(t.remat), Offload.parse(c.offload)
    if offload.acts.memory != "device" and not remat.every:
        raise ValueError(f"offload is {c.offload!r} and train.remat is {t.remat}: acts are what a remat policy keeps; use --remat full")
    if t.update == "backward" and (c.optim.clip or not {"params=nvme", "opt=nvme"} <= set(c.offload.split(","))):
        raise ValueError(
            f"train.update is backward, offload {c.offload!r} and optim.clip {c.optim.clip:g}: a layer is updated before all gradients are "
            "known, so nothing is clipped by their norm, and a bad step must be undone; use optim.clip=0 and --offload params=nvme,opt=nvme"
        )
    if t.update == "delayed" and not c.offload:
        raise ValueError(
            "train.update is delayed and nothing is offloaded, so there is nothing to wait for; use end, or --offload opt=host"
        )
    if t.mlp_tiles > 1 and family_of(c.model) not in ("gpt2", "llama"):
        raise ValueError(
            f"train.mlp_tiles is {t.mlp_tiles} and a model of family {family_of(c.model)} has no MLP that is computed in tiles; use 1"
        )
    if c.nvme != Nvme() and "nvme" not in offload.memories:
        raise ValueError(f"nvme says how a disk is used and offload={c.offload!r} puts nothing on one; use --offload params=nvme,opt=nvme")
    validate_guard(c)
    Kernels.parse(t.kernels)
    s = c.optim.schedule
    if s.warmup_steps >= t.steps:
        raise ValueError(f"optim.schedule.warmup_steps is {s.warmup_steps}; it must be below train.steps={t.steps}")
    if s.name == "wsd" and not 1 <= s.decay_steps <= t.steps - s.warmup_steps:
        left = t.steps - s.warmup_steps
        raise ValueError(f"optim.schedule.decay_steps is {s.decay_steps}; wsd needs 1 to {left} (train.steps - warmup_steps)")
    if s.name == "exponential" and s.end == 0:
        raise ValueError("optim.schedule.end is 0.0; an exponential never ends there: use a fraction above 0, or linear")
    if c.optim.nesterov and c.optim.momentum == 0:
        raise ValueError("optim.nesterov is true and optim.momentum is 0; give a momentum, such as 0.9")
    for axis, size in c.mesh.items():
        if axis not in AXES or size < 1:
            near = "" if axis in AXES else nearest(axis, AXES)
            raise ValueError(f"mesh.{axis} is {size}{near}; the axes are {', '.join(AXES)}, each of size 1 or more")


def validate_guard(config: RunConfig) -> None:
    """Raise ValueError where the policies of `config.guard` cannot work with the rest of the config."""
    g, t, offload = config.guard, config.train, Offload.parse(config.offload)
    if g.nonfinite != "skip" and config.precision.policy == "fp16":
        raise ValueError(
            f"guard.nonfinite is {g.nonfinite} and precision.policy is fp16, which finds its loss scale by steps that overflow; use skip"
        )
    if "rollback" not in (g.nonfinite, g.spike):
        return
    policy = "guard.nonfinite is rollback" if g.nonfinite == "rollback" else "guard.spike is rollback"
    if "nvme" in (offload.params.memory, offload.opt.memory):
        raise ValueError(f"{policy} and offload is {config.offload!r}: a state on a disk cannot be put back while a run goes on; use skip")
    if not t.checkpoint_every:
        raise ValueError(f"{policy} and train.checkpoint_every is 0, so there is nothing to go back to; give an interval")
    reach = (t.keep_last - 1) * t.checkpoint_every
    if t.keep_last and g.rollback_steps > reach:
        fix = f"use train.keep_last={-(-g.rollback_steps // t.checkpoint_every) + 1} or more"
        raise ValueError(
            f"guard.rollback_steps is {g.rollback_steps} and the last {t.keep_last} checkpoints, {t.checkpoint_every} steps apart, "
            f"reach back {reach}; {fix}"
        )


def refuse_unused(config: RunConfig, table: Table) -> None:
    """Raise ValueError where `table`, as somebody wrote it, sets a number that the chosen optimizer or schedule does not have."""
    optim = table.get("optim", {})
    for where, given, kind, uses in (
        ("optim", optim, config.optim.name, {*OPTIMIZERS[config.optim.name], "name", "clip", "schedule"}),
        ("optim.schedule", optim.get("schedule", {}), config.optim.schedule.name, {*SCHEDULES[config.optim.schedule.name], "name"}),
    ):
        for key in given:
            if key not in uses:
                raise ValueError(f"{where}.{key} does nothing with {kind}, which has {', '.join(sorted(uses - {'name'}))}; leave it out")
    g = config.guard
    for key in table.get("guard", {}):
        if key in ("sigmas", "window", "warmup") and g.spike == "off":
            raise ValueError(f"guard.{key} does nothing with guard.spike=off; use guard.spike=skip or rollback, or leave it out")
        if key in ("rollback_steps", "max_rollbacks") and "rollback" not in (g.nonfinite, g.spike):
            raise ValueError(
                f"guard.{key} does nothing without a rollback; use guard.nonfinite=rollback or guard.spike=rollback, or leave it out"
            )


def check_vocabulary(config: RunConfig, corpus: str | Path) -> None:
    """Raise ValueError where the prepared corpus has tokens that the model does not."""
    size = read_meta(corpus)["vocab_size"]
    if size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size is {config.model.vocab_size} and the corpus has {size} tokens; add --set model.vocab_size={size}"
        )
