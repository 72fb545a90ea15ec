"""The values of models' configs: the bounds of their sizes, and the kinds of the layers of a stack."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from fzero.core.arguments import expect_fields
from fzero.core.config_tables import FRACTION, INF, POSITIVE, RATE, Bounds, check_bounds
from fzero.kernels.attention_pattern import Pattern

MOST_LAYERS = 100_000  # of a period


class LayerKind(NamedTuple):
    """How a layer attends; theta: the base of its RoPE, 0 for no positions, None for the model's."""

    pattern: Pattern
    theta: float | None = None

    def __str__(self) -> str:
        """The text that `parse_layers` takes."""
        return str(self.pattern) + ("" if self.theta is None else f"@{self.theta!r}".removesuffix(".0"))


def parse_layers(text: str) -> tuple[LayerKind, ...]:
    """The kinds of the layers of a period, from texts COUNT*PATTERN@THETA with commas; raises ValueError.

    >>> [str(kind) for kind in parse_layers("2*window:512@10000,full")]
    ['window:512@10000', 'window:512@10000', 'full']
    """
    kinds: list[LayerKind] = []
    for entry in text.split(","):
        form = re.fullmatch(r"(?:(\d{1,6})\*)?([^*@]*)(?:@(.+))?", entry.strip())
        if form is None:
            raise ValueError(f"pattern {entry.strip()!r} is not of the form PATTERN, PATTERN@THETA or COUNT*PATTERN")
        pattern, theta = Pattern.parse(form[2]), None if form[3] is None else _theta(form[3])
        kinds += [LayerKind(pattern, theta)] * _count(form[1])
        if len(kinds) > MOST_LAYERS:
            raise ValueError(f"pattern {text[:40]!r}... has a period of more than {MOST_LAYERS:,} layers")
    return tuple(kinds)


def _count(text: str | None) -> int:
    if text is not None and int(text) < 1:
        raise ValueError(f"pattern: COUNT is {text}; it must be at least 1")
    return 1 if text is None else int(text)


def _theta(text: str) -> float:
    try:
        theta = float(text)
    except ValueError:
        theta = math.nan
    if not 0.0 <= theta < 1e30:
        raise ValueError(f"pattern: THETA is {text!r}; it must be a number of at least 0 and below 1e30")
    return theta


def layers_text(kinds: Sequence[LayerKind]) -> str:
    """The shortest text of layers of these kinds: of one period, if they repeat.

    >>> layers_text(parse_layers("window:8,full,window:8,full,window:8"))
    'window:8,full'
    """
    runs = [(str(kind), len(list(run))) for kind, run in groupby(kinds[: _period(kinds)])]
    return ",".join(f"{count}*{kind}" if count > 1 else kind for kind, count in runs)


def _period(kinds: Sequence[LayerKind]) -> int:
    """The smallest n with kinds[i] == kinds[i % n] for all i (Knuth, Morris & Pratt 1977, section 2)."""
    ends = [0] * len(kinds)  # the length of the longest beginning that ends at i, other than all up to there
    for i in range(1, len(kinds)):
        n = ends[i - 1]
        while n and kinds[i] != kinds[n]:
            n = ends[n - 1]
        ends[i] = n + (kinds[i] == kinds[n])
    return len(kinds) - ends[-1]


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
    """The hidden units of the feed-forward part that a token uses in most layers."""
    if hasattr(config, "d_expert"):
        return (config.top_k + config.n_shared) * config.d_expert
    return config.d_ff * getattr(config, "top_k", 1)


def check_sizes(config: Any) -> None:
    """Raise TypeError or ValueError naming a value or size of a model's config that is wrong or too large."""
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
