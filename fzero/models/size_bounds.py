"""The bounds of a model's sizes, wherever a config comes from: beyond them nothing can be computed, or even listed."""

from __future__ import annotations

import dataclasses
from typing import Any

from fzero.core.arguments import expect_fields
from fzero.core.bounds import FRACTION, INF, POSITIVE, RATE, Bounds, check_bounds

BOUNDS: dict[str, Bounds] = {
    "vocab_size": (1, True, 1e9),
    "max_len": (1, True, 1e9),
    "d_model": (1, True, 1e6),
    "n_layers": (1, True, 1e5),
    "d_ff": (1, True, 1e8),
    "n_heads": (1, True, 1e5),
    "n_kv_heads": (1, True, 1e5),
    "n_experts": (1, True, 1e5),
    "top_k": (1, True, 1e5),
    "mlp_tiles": (1, True, 1e5),
    **dict.fromkeys(("mlp_tokens", "layer_tokens"), (0, True, 1e9)),  # 0: all
    "head_dim": (0, True, 1e5),  # 0: d_model / n_heads
    "score_dim": (0, True, 1e6),  # 0: that of a head
    **dict.fromkeys(("score_cap", "logit_cap"), (0.0, True, 1e6)),
    **dict.fromkeys(("n_dense", "q_rank", "n_shared"), (0, True, 1e5)),
    **dict.fromkeys(("kv_rank", "nope_dim", "rope_dim", "value_dim", "n_groups", "top_groups"), (1, True, 1e5)),
    "key_dim": (1, True, 1e5),
    "rank": (1, True, 1e5),  # of LoRA
    "alpha": POSITIVE,
    "block": (16, True, 8192, True),  # of weights in codes
    "pad": (-1, True, INF),  # an id; -1: none
    "d_expert": (1, True, 1e8),
    "n_mtp": (0, True, 2),
    "mtp_coef": RATE,
    **dict.fromkeys(("init_std", "balance_coef", "z_coef", "bias_rate", "capacity_factor", "routed_scale"), RATE),
    "dropout": FRACTION,
    "norm_eps": (1e-30, True, INF),
    "rope_theta": (1e-30, True, 1e30),  # float32 computes its powers
}


MOST_ELEMENTS = 1 << 60  # of a leaf: its bytes are counted in 64 bits


def hidden_units(config: Any) -> int:
    """The hidden units of the feed-forward part that a token uses in most layers of a model of these sizes."""
    if hasattr(config, "d_expert"):
        return (config.top_k + config.n_shared) * config.d_expert
    return config.d_ff * getattr(config, "top_k", 1)


def check_sizes(config: Any) -> None:
    """Raise TypeError naming a value of a model's config that is of another kind than its hint, and ValueError naming
    the first size that is out of bounds, or the sizes of a leaf that no memory can address.
    """
    expect_fields(config)
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in values.items():
        if name in BOUNDS:
            check_bounds(name, value, BOUNDS[name])
    stacked = values["n_layers"] * values.get("n_experts", 1)
    widest = max(values["d_ff"], values.get("n_heads", 1) * values.get("head_dim", 0), values["d_model"])
    if stacked * values["d_model"] * widest >= MOST_ELEMENTS:
        names = [name for name in ("n_layers", "n_experts", "d_model", "d_ff") if name in values]
        sizes = ", ".join(f"{name}={values[name]}" for name in names)
        raise ValueError(f"a leaf of {sizes} has more elements than memory can address; make the sizes smaller")
