"""The optimizer and the scheduler of a DeepSpeed config as those of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from fzero.core.foreign import short
from fzero.core.tables import Table, put
from fzero.run import deepspeed_keys as keys
from fzero.run.deepspeed_values import Values


def put_optimizer(out: Table, said: Values) -> None:
    """Put the optimizer of a config, if it has one."""
    if "optimizer.type" not in said.of:
        return
    given = said.read("optimizer.type", (str,), "")
    others = dict(keys.OTHER_OPTIMIZERS)
    if given.lower() not in keys.OPTIMIZERS and isinstance(getattr(torch.optim, given, None), type):
        why = f"a config of fzero has none; a loop of your own has optim.from_torch(torch.optim.{given})"
        others.setdefault(given.lower(), why)
    kind = Values({"optimizer.type": given.lower()}).choice("optimizer.type", list(keys.OPTIMIZERS), "", others)
    params = said.below("optimizer.params")
    params.expect_only("optimizer", given, keys.OPTIMIZERS[kind])
    for name, value in keys.FIXED.items():
        if params.of.get(name, value) != value:
            fix = "write gradient_clipping" if name == "max_grad_norm" else "leave it out"
            raise ValueError(
                f"optimizer.params.{name} is {short(params.of[name])}, and {given} has {value} here; {fix}"
            )
    decoupled = kind == "adamw" or params.flag("adam_w_mode", True)
    if kind == "adam" and decoupled:
        kind = "adamw"
    torchs = kind == "adamw" and params.flag("torch_adam")
    found: Table = {"name": keys.NAMES.get(kind, kind), "decay": "all", "lr": float(params.number("lr", 1e-3))}
    found["weight_decay"] = float(params.number("weight_decay", 0.01 if torchs else 0.0))
    if kind == "sgd":
        found |= {"momentum": float(params.number("momentum", 0.0)), "nesterov": params.flag("nesterov")}
    else:
        betas = params.read("betas", (list, tuple), [0.9, 0.999])
        if len(betas) != 2 or not all(type(beta) in (int, float) for beta in betas):
            raise ValueError(f"optimizer.params.betas is {short(betas)}; it must be two numbers")
        found |= {"beta1": float(betas[0]), "beta2": float(betas[1])}
        if kind != "lion":
            found["eps"] = float(params.number("eps", 1e-8))
    out["optim"] |= found | _of_kind(kind, params)


def _of_kind(kind: str, params: Values) -> Table:
    """What an optimizer has beside rate, decay, betas and eps."""
    found: Table = {}
    corrected = params.flag("bias_correction", True)
    if "bias_correction" in keys.OPTIMIZERS[kind]:  # DeepSpeed's Lamb corrects its rate, those that send signs nothing
        by_kind = {"adam": "moments", "adamw": "moments", "lamb": "rate"}
        found["correction"] = by_kind.get(kind, "none") if corrected else "none"
    if "max_coeff" in keys.OPTIMIZERS[kind]:
        found |= {
            "min_ratio": float(params.number("min_coeff", 0.01)),
            "max_ratio": float(params.number("max_coeff", 10)),
        }
    if (steps := params.whole("freeze_step")) is not None:
        if steps < 1:
            raise ValueError(f"optimizer.params.freeze_step is {steps}; it must be at least 1")
        found["freeze_steps"] = steps
    if (steps := params.whole("var_freeze_step")) is not None:  # without it no run of DeepSpeed's gets to local steps
        found["freeze_steps"] = steps
        every = found["sum_every"] = params.whole("local_step_clipper", 16)
        found["sum_double"] = max(every, params.whole("local_step_scaler", 32678) // every * every)  # whole intervals
    return found


def put_scheduler(out: Table, said: Values, left: Sequence[str]) -> None:
    """Put the schedule of a config; a constant rate for an optimizer without one. left: the keys that are "auto"."""
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
    if kind == "OneCycle":
        _put_cycle(optim, params)
        return
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
    flat_rate = {"name": "constant", "warmup_steps": 0}  # of a warmup from the peak to the peak
    optim["schedule"] = flat_rate if found.get("start") == 1.0 and kind != "WarmupCosineLR" else found


def _put_cycle(optim: Table, params: Values) -> None:
    """DeepSpeed's OneCycle: its rate, and of Adam its momentum, beside which b2 is 0.99 there."""
    low, peak = params.number("cycle_min_lr"), params.number("cycle_max_lr")
    if low is None or peak is None or not 0 <= low < peak:
        raise ValueError(
            f"scheduler.params.cycle_min_lr is {short(low)} and cycle_max_lr {short(peak)}; OneCycle needs both, the "
            "second larger"
        )
    rise = params.whole("cycle_first_step_size", 2000)
    found: Table = {"name": "cycle_lr", "warmup_steps": rise, "start": low / peak}
    found["decay_steps"] = params.whole("cycle_second_step_size", rise)
    rate, every = float(params.number("decay_lr_rate", 0.0)), params.whole("decay_step_size", 0)
    found |= {"decay_rate": rate, "decay_every": every} if rate and every else {}
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
        found["low_beta1"] = float(params.number("cycle_min_mom", 0.8))
        found["high_beta1"] = float(params.number("cycle_max_mom", 0.9))
        optim["beta2"] = 0.99
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
    if not 0.0 <= least <= peak:
        raise ValueError(f"scheduler.params.warmup_min_lr is {least} and warmup_max_lr {peak}; it must not be larger")
    optim["lr"] = float(peak)
    found["start"] = least / peak if peak else 1.0
