"""The optimizer and the scheduler of a DeepSpeed config as those of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from fzero.core.config_tables import Table, set_nested
from fzero.core.text_parsing import short
from fzero.run import deepspeed_keys as keys
from fzero.run.deepspeed_keys import Values


def add_optimizer(out: Table, reader: Values) -> None:
    """Put the optimizer of a config, if it has one."""
    if "optimizer.type" not in reader.table:
        return
    type_name = reader.read("optimizer.type", (str,), "")
    refusals = dict(keys.OTHER_OPTIMIZERS)
    if type_name.lower() not in keys.OPTIMIZERS and isinstance(getattr(torch.optim, type_name, None), type):
        reason = f"a config of fzero has none; a loop of your own has optim.from_torch(torch.optim.{type_name})"
        refusals.setdefault(type_name.lower(), reason)
    kind = Values({"optimizer.type": type_name.lower()}).choice("optimizer.type", list(keys.OPTIMIZERS), "", refusals)
    params = reader.section("optimizer.params")
    params.expect_only("optimizer", type_name, keys.OPTIMIZERS[kind])
    for name, value in keys.FIXED.items():
        if params.table.get(name, value) != value:
            fix = "write gradient_clipping" if name == "max_grad_norm" else "leave it out"
            raise ValueError(
                f"optimizer.params.{name} is {short(params.table[name])}, and {type_name} has {value} here; {fix}"
            )
    decoupled = kind == "adamw" or params.flag("adam_w_mode", True)
    if kind == "adam" and decoupled:
        kind = "adamw"
    torchs = kind == "adamw" and params.flag("torch_adam")
    settings: Table = {
        "name": keys.OPTIMIZER_NAMES.get(kind, kind),
        "decay": "all",
        "lr": float(params.number("lr", 1e-3)),
    }
    settings["weight_decay"] = float(params.number("weight_decay", 0.01 if torchs else 0.0))
    if kind == "sgd":
        settings |= {"momentum": float(params.number("momentum", 0.0)), "nesterov": params.flag("nesterov")}
    else:
        betas = params.read("betas", (list, tuple), [0.9, 0.999])
        if len(betas) != 2 or not all(type(beta) in (int, float) for beta in betas):
            raise ValueError(f"optimizer.params.betas is {short(betas)}; it must be two numbers")
        settings |= {"beta1": float(betas[0]), "beta2": float(betas[1])}
        if kind != "lion":
            settings["eps"] = float(params.number("eps", 1e-8))
    out["optim"] |= settings | _of_kind(kind, params)


def _of_kind(kind: str, params: Values) -> Table:
    """What an optimizer has beside rate, decay, betas and eps."""
    settings: Table = {}
    corrected = params.flag("bias_correction", True)
    if "bias_correction" in keys.OPTIMIZERS[kind]:  # DeepSpeed's Lamb corrects its rate, those that send signs nothing
        by_kind = {"adam": "moments", "adamw": "moments", "lamb": "rate"}
        settings["correction"] = by_kind.get(kind, "none") if corrected else "none"
    if "max_coeff" in keys.OPTIMIZERS[kind]:
        settings |= {
            "min_ratio": float(params.number("min_coeff", 0.01)),
            "max_ratio": float(params.number("max_coeff", 10)),
        }
    if (steps := params.integer("freeze_step")) is not None:
        if steps < 1:
            raise ValueError(f"optimizer.params.freeze_step is {steps}; it must be at least 1")
        settings["freeze_steps"] = steps
    if (steps := params.integer("var_freeze_step")) is not None:  # without it no run of DeepSpeed's gets to local steps
        settings["freeze_steps"] = steps
        every = settings["sum_every"] = params.integer("local_step_clipper", 16)
        doubling_steps = params.integer("local_step_scaler", 32678)
        settings["sum_double"] = max(every, doubling_steps // every * every)  # whole intervals
    return settings


def add_scheduler(out: Table, reader: Values, auto_keys: Sequence[str]) -> None:
    """Put the schedule of a config; a constant rate for an optimizer without one. auto_keys: the keys that are
    "auto"."""
    optim = out["optim"]
    if "scheduler.type" not in reader.table:
        if "optimizer.type" in reader.table:
            optim["schedule"] = {"name": "constant", "warmup_steps": 0}
        return
    kind = reader.choice("scheduler.type", list(keys.SCHEDULERS), "", keys.OTHER_SCHEDULERS)
    params = reader.section("scheduler.params")
    params.expect_only("scheduler", kind, keys.SCHEDULERS[kind])
    if params.integer("last_batch_iteration", -1) != -1:
        raise ValueError("scheduler.params.last_batch_iteration is not -1; resume a run by --resume")
    if kind == "OneCycle":
        _add_cycle(optim, params)
        return
    schedule: Table = {"name": re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()}
    if "scheduler.params.warmup_num_steps" not in auto_keys:
        schedule["warmup_steps"] = params.integer("warmup_num_steps", 1000)
    schedule["warmup"] = params.choice("warmup_type", ("log", "linear"), "log")
    if kind == "WarmupCosineLR":
        schedule["start"] = float(params.number("warmup_min_ratio", 0.0))
        schedule["end"] = float(params.number("cos_min_ratio", 1e-4))
    else:
        _add_rates(optim, schedule, params, kind, auto_keys)
    if "total_num_steps" in keys.SCHEDULERS[kind] and "scheduler.params.total_num_steps" not in auto_keys:
        if (steps := params.integer("total_num_steps")) is None:
            raise ValueError(f"{kind} needs scheduler.params.total_num_steps")
        set_nested(out, "train.steps", steps)
    flat_rate = {"name": "constant", "warmup_steps": 0}  # of a warmup from the peak to the peak
    optim["schedule"] = flat_rate if schedule.get("start") == 1.0 and kind != "WarmupCosineLR" else schedule


def _add_cycle(optim: Table, params: Values) -> None:
    """DeepSpeed's OneCycle: its rate, and of Adam its momentum, beside which b2 is 0.99 there."""
    low, peak = params.number("cycle_min_lr"), params.number("cycle_max_lr")
    if low is None or peak is None or not 0 <= low < peak:
        raise ValueError(
            f"scheduler.params.cycle_min_lr is {short(low)} and cycle_max_lr {short(peak)}; OneCycle needs both, the "
            "second larger"
        )
    rise = params.integer("cycle_first_step_size", 2000)
    schedule: Table = {"name": "cycle_lr", "warmup_steps": rise, "start": low / peak}
    schedule["decay_steps"] = params.integer("cycle_second_step_size", rise)
    rate, every = float(params.number("decay_lr_rate", 0.0)), params.integer("decay_step_size", 0)
    schedule |= {"decay_rate": rate, "decay_every": every} if rate and every else {}
    if params.number("decay_mom_rate", 0.0):
        raise ValueError(
            "scheduler.params.decay_mom_rate is not 0, which raises the momentum without end; leave it out"
        )
    optim["lr"] = float(peak)
    if params.flag("cycle_momentum", True) and optim.get("name") != "sgd":  # which has no betas
        if optim.get("name", "adamw") not in ("adam", "adamw"):
            raise ValueError(
                f"scheduler.params.cycle_momentum is true, and optim.name is {optim['name']}, whose momentum cannot "
                "cycle here; set it to false"
            )
        schedule["low_beta1"] = float(params.number("cycle_min_mom", 0.8))
        schedule["high_beta1"] = float(params.number("cycle_max_mom", 0.9))
        optim["beta2"] = 0.99
    optim["schedule"] = schedule


def _add_rates(optim: Table, schedule: Table, params: Values, kind: str, auto_keys: Sequence[str]) -> None:
    peak = params.number("warmup_max_lr", 1e-3 if kind == "WarmupDecayLR" else None)
    if "scheduler.params.warmup_max_lr" in auto_keys:
        peak = optim.get("lr")
    elif peak is None:
        raise ValueError(
            "scheduler.params.warmup_max_lr is not given, and versions of DeepSpeed differ in what it then is; give it"
        )
    min_lr = float(params.number("warmup_min_lr", 0.0))
    if peak is None:
        if min_lr:
            raise ValueError(
                "scheduler.params.warmup_min_lr is a fraction of warmup_max_lr here; give that as a number"
            )
        return
    if not 0.0 <= min_lr <= peak:
        raise ValueError(f"scheduler.params.warmup_min_lr is {min_lr} and warmup_max_lr {peak}; it must not be larger")
    optim["lr"] = float(peak)
    schedule["start"] = min_lr / peak if peak else 1.0
