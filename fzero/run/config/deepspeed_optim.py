"""The optimizer, scheduler and `sparse_attention` of a DeepSpeed config as those of a run.

Ref: deepspeed/runtime/config.py (get_sparse_attention) and deepspeed/ops/sparse_attention/sparsity_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.core.config_tables import Table, flat, set_nested
from fzero.core.text_parsing import short
from fzero.kernels import block_mask
from fzero.kernels.block_mask import BlockMask
from fzero.run.config import deepspeed_keys as keys
from fzero.run.config.deepspeed_keys import Values

MASK = "give a model of your own fzero.run.config.deepspeed_optim.block_mask_of(table, tokens, heads)"


class Sparse(NamedTuple):
    """A `sparse_attention` table, with the defaults of DeepSpeed's reader of it; counts are of blocks."""

    mode: str
    block: int
    causal: bool
    by_head: bool  # different_layout_per_head
    windows: Sequence[int]  # of "fixed" one, of "variable" those of its list
    sliding: int
    global_blocks: int  # num_global_blocks
    ends: Sequence[tuple[int, int]]  # of the blocks that all see, by their numbers
    horizontal: bool
    patterns: int
    random: int


def read_sparse(reader: Values) -> Sparse:
    """The values of the table, by their names; raises ValueError for unknown ones and contradictions."""
    mode = reader.choice("mode", tuple(keys.SPARSE), "fixed")
    reader.expect_only("sparse_attention", f"mode {mode}", ("mode", *keys.SPARSE[mode]))
    # DenseSparsityConfig has neither order: a causal decoder in it sees all that it may see.
    default = "unidirectional" if mode in ("dense", "local_sliding_window") else "bidirectional"
    causal = reader.choice("attention", ("unidirectional", "bidirectional"), default) == "unidirectional"
    windows = _expect_integers("local_window_blocks", reader.read("local_window_blocks", (list, tuple), [4]), 1)
    if not windows:
        raise ValueError("local_window_blocks is []; give the blocks of the windows")
    if mode == "fixed":
        windows = [reader.integer("num_local_blocks", 4, 1)]
    sparse = Sparse(
        mode=mode,
        block=reader.integer("block", 16, 1),
        causal=causal,
        by_head=reader.flag("different_layout_per_head"),
        windows=windows,
        sliding=reader.integer("num_sliding_window_blocks", 3, 1),
        global_blocks=reader.integer("num_global_blocks", 1, 0 if mode == "bigbird" else 1),
        ends=_ends(reader),
        horizontal=reader.flag("horizontal_global_attention"),
        patterns=reader.integer("num_different_global_patterns", 1, 1),
        random=reader.integer("num_random_blocks", 0, 0),
    )
    if sparse.horizontal and sparse.causal:
        raise ValueError(
            "horizontal_global_attention is true and attention 'unidirectional'; DeepSpeed refuses both too"
        )
    if sparse.patterns > 1 and not sparse.by_head:
        raise ValueError(
            f"num_different_global_patterns is {sparse.patterns} and different_layout_per_head is not set; set it"
        )
    return sparse


def _expect_integers(name: str, values: Sequence[Any], minimum: int) -> Sequence[int]:
    if not all(type(value) is int and value >= minimum for value in values):
        raise ValueError(f"{name} is {short(values)}; it must be a list of whole numbers of at least {minimum}")
    return values


def _ends(reader: Values) -> Sequence[tuple[int, int]]:
    starts = _expect_integers("global_block_indices", reader.read("global_block_indices", (list, tuple), [0]), 0)
    ends = reader.read("global_block_end_indices", (list, tuple), None)
    if ends is None:
        return [(start, start + 1) for start in starts]
    _expect_integers("global_block_end_indices", ends, 1)
    if len(ends) != len(starts) or any(start >= end for start, end in zip(starts, ends)):
        raise ValueError(
            f"global_block_end_indices is {short(ends)} and global_block_indices {short(starts)}; each end must be "
            "above its index"
        )
    return list(zip(starts, ends))


def block_mask_of(table: Mapping[str, Any], tokens: int, heads: int = 1, *, seed: int = 0) -> BlockMask:
    """Return the block mask of a `sparse_attention` table for rows of `tokens` tokens, as DeepSpeed lays it out.

    heads: those of the attention, where they differ ("different_layout_per_head"). Random blocks are others than
    DeepSpeed's, which Python's generator draws: they follow from `seed`. DeepSpeed's masks of "unidirectional" leave
    the order within a block to another mask; these have it. Mode "local_sliding_window" is its sixth configuration,
    which its own reader of the table does not know; `attention` may be given of all but dense, which looks ahead.

    Raises ValueError as `config_from_deepspeed`.

    >>> print(block_mask_of({"mode": "bslongformer", "block": 32}, tokens=128))
    1 x 4 x 4 blocks of 32, 14 of 16 seen
    x x x x
    x x x .
    x x x x
    x . x x
    """
    try:
        sparse = read_sparse(Values(dict(flat(table))))
    except ValueError as error:
        raise ValueError(f"sparse_attention: {error}") from None
    common: dict[str, Any] = {"t": tokens, "block": sparse.block, "causal": sparse.causal}
    if sparse.mode == "dense":
        return block_mask.dense_blocks(tokens, sparse.block)
    if sparse.mode == "fixed":
        numbers: dict[str, Any] = {
            "local": sparse.windows[0],
            "global_count": sparse.global_blocks,
            "horizontal": sparse.horizontal,
        }
        return block_mask.fixed_blocks(**common, **numbers, heads=heads, patterns=sparse.patterns)
    if sparse.mode == "local_sliding_window":
        return block_mask.sliding_blocks(**common, window=sparse.sliding)
    if sparse.mode == "bslongformer":
        return block_mask.longformer_blocks(**common, window=sparse.sliding, global_ids=sparse.ends)
    random_options: dict[str, Any] = {"random": sparse.random, "heads": heads if sparse.by_head else 1, "seed": seed}
    if sparse.mode == "bigbird":
        return block_mask.bigbird_blocks(
            **common, window=sparse.sliding, global_count=sparse.global_blocks, **random_options
        )
    numbers = {"windows": sparse.windows, "global_ids": sparse.ends, "horizontal": sparse.horizontal}
    return block_mask.variable_blocks(**common, **numbers) | block_mask.random_blocks(**common, **random_options)


def add_pattern(out: Table, reader: Values) -> None:
    """Put the attention pattern of a config: that of a decoder with the same keys, but for random blocks."""
    try:
        sparse = read_sparse(reader)
    except ValueError as error:
        raise ValueError(f"sparse_attention: {error}") from None
    if sparse.mode == "dense":
        set_nested(out, "model.pattern", "full")
        return
    if not sparse.causal:
        raise ValueError(
            "sparse_attention.attention is 'bidirectional', and a decoder does not look ahead; write 'unidirectional' "
            f"for the same blocks up to a token, or {MASK}"
        )
    set_nested(out, "model.pattern", _pattern(sparse))


def _pattern(sparse: Sparse) -> str:
    """The text of the pattern that sees the same; raises ValueError if there is none."""
    if sparse.mode == "fixed":
        if sparse.patterns > 1:
            raise ValueError(
                f"sparse_attention.num_different_global_patterns is {sparse.patterns}: a pattern is alike in all "
                f"heads; leave it out, or {MASK}"
            )
        local = sparse.windows[0]
        if local % sparse.global_blocks:
            raise ValueError(
                f"sparse_attention.num_global_blocks is {sparse.global_blocks}; it must divide num_local_blocks, "
                f"{local}"
            )
        return f"fixed:{local * sparse.block}:{sparse.global_blocks * sparse.block}"
    if sparse.random and sparse.by_head:
        raise ValueError(
            "sparse_attention.different_layout_per_head is true: a pattern is alike in all heads; leave it out, or "
            f"{MASK}"
        )
    near = sparse.sliding // 2 + 1
    if sparse.mode == "bigbird":
        return f"bigbird:{sparse.block}:{near}:{sparse.global_blocks}:{sparse.random}"
    if sparse.mode == "local_sliding_window":
        return f"bigbird:{sparse.block}:{near}:0:0"
    first = _leading(sparse.ends)
    if sparse.mode == "bslongformer" and first is not None:
        return f"bigbird:{sparse.block}:{near}:{first}:0"
    size = sparse.windows[0]  # a window of w blocks alone is one block of w times the size
    alike = set(sparse.windows) == {size} and (size == 1 or not sparse.random)
    if sparse.mode == "variable" and alike and first is not None and first % size == 0:
        return f"bigbird:{size * sparse.block}:1:{first // size}:{sparse.random}"
    raise ValueError(
        f"sparse_attention.mode is {sparse.mode!r} with {_described(sparse)}: no pattern of a decoder sees the same, "
        f"as its windows have one size and the blocks that all see are whole ones at the beginning; {MASK}"
    )


def _described(sparse: Sparse) -> str:
    numbers = ", ".join(f"{start} to {end - 1}" if end - start > 1 else str(start) for start, end in sparse.ends)
    blocks = f"the blocks {numbers}"
    windows = f"windows of {short(list(sparse.windows))}, {blocks}, {sparse.random} random"
    return blocks if sparse.mode == "bslongformer" else windows


def _leading(ends: Sequence[tuple[int, int]]) -> int | None:
    """n if the blocks are the first n of a sequence, else None."""
    blocks = {block for start, end in ends for block in range(start, end)}
    return len(blocks) if blocks == set(range(len(blocks))) else None


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
    params.expect_only("optimizer.params", type_name, keys.OPTIMIZERS[kind])
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
    """Put the schedule of a config; a constant rate for an optimizer without one."""
    optim = out["optim"]
    if "scheduler.type" not in reader.table:
        if "optimizer.type" in reader.table:
            optim["schedule"] = {"name": "constant", "warmup_steps": 0}
        return
    kind = reader.choice("scheduler.type", list(keys.SCHEDULERS), "", keys.OTHER_SCHEDULERS)
    params = reader.section("scheduler.params")
    params.expect_only("scheduler.params", kind, keys.SCHEDULERS[kind])
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
