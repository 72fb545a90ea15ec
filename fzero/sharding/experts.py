"""How the tokens of a block come to the experts of other ranks of ep, and what that sends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fzero.comm.axes import EP
from fzero.core.pytree import nearest
from fzero.sharding.spec import Spec

FORMS = ("gather", "exchange")


@dataclass(frozen=True)
class Experts:
    """How tokens come to the experts of other ranks of ep, and back.

    form: "gather": every rank has the tokens of all ranks, and sums of its experts' results are scattered; "exchange":
        each token is sent to the ranks of its experts alone; "auto": the one that sends less.
    slack: of an exchange, the rows that a rank has room for, over those that it sends: it is sent as many if experts
        are chosen evenly; math.inf is room for all. A step in which a rank is sent more computes its gradient again
        with twice the slack (see train/gradient.py); no token is dropped. Without a step there is room for all.

    parts: of an exchange, in so many parts the tokens of a rank come, each with room of its own: the rows of one are on
        their way while the experts compute those of another.

    >>> Experts.parse("exchange:3:2")
    Experts(form='exchange', slack=3.0, parts=2)
    """

    form: str = "auto"
    slack: float = 2.0
    parts: int = 1

    def __post_init__(self) -> None:
        choices = (*FORMS, "auto")
        if self.form not in choices:
            near = nearest(self.form, choices)
            raise ValueError(f"experts: form is {self.form!r}{near}; use one of {', '.join(choices)}")
        if not self.slack >= 1.0:
            raise ValueError(f"experts: slack is {self.slack:g}; it is at least 1, the room for an even load")
        if self.parts < 1:
            raise ValueError(f"experts: parts is {self.parts}; it is at least 1")

    @classmethod
    def parse(cls, text: str) -> Experts:
        """The Experts of a form, or of a form, a slack ("all" for room for all) and a number of parts: "gather",
        "exchange:3", "exchange:all:2"; raises ValueError for others."""
        form, *values = text.split(":")
        named = zip(("slack", "parts"), (float, int), values)
        if len(values) > 2:
            raise ValueError(f"experts: {text!r} has more than a form, a slack and parts, such as exchange:3:2")
        options: dict[str, Any] = {}
        for name, kind, value in named:
            try:
                options[name] = math.inf if (name, value) == ("slack", "all") else kind(value)
            except ValueError:
                raise ValueError(f"experts: {name} is {value!r}; write a number, such as exchange:3:2") from None
        return cls(form, **options)

    def row_capacity(self, rows: int, max_rows: int) -> int:
        """The rows that a rank has room for in an exchange in which each rank sends `rows`, and can be sent
        `max_rows`."""
        return max_rows if self.slack * rows >= max_rows else math.ceil(self.slack * rows)

    @property
    def capacity_text(self) -> str:
        """The room of an exchange in words."""
        return "all rows" if math.isinf(self.slack) else f"{self.slack:g} times an even load"

    def describe(self, plan: Any) -> str:
        """How tokens come to experts over ep in a plan, and what forms send."""
        routed, ep = plan.routed, plan.mesh.ep.size
        capacity = f", room for {self.capacity_text}" if self.form == "exchange" else ""
        capacity += f", in {self.parts} parts" if self.parts > 1 else ""
        sent = ", ".join(f"{form} {routed.sent(form, ep):,.0f}" for form in FORMS)
        min_experts, max_experts = (f(shares(routed.experts, ep)) for f in (min, max))
        counts_text = str(max_experts) if min_experts == max_experts else f"{min_experts} or {max_experts}"
        return (
            f"experts: {self.form} over ep={ep}, {counts_text} of {routed.experts} on a rank{capacity}; elements "
            f"that a rank sends in a layer's forward pass, for each of its tokens: {sent}"
        )


class Routed(NamedTuple):
    """The experts of a model's blocks: their number, how many a token uses, its size, whether capacity limits them."""

    experts: int
    top_k: int
    width: int
    capacity: bool = False

    def sent(self, form: str, ranks: int) -> float:
        """The elements of tokens that a rank of ep sends in a layer's forward pass, per token, for an even choice.

        >>> routed = Routed(experts=8, top_k=2, width=64)
        >>> [(routed.sent("gather", n), routed.sent("exchange", n)) for n in (2, 4)]
        [(128.0, 128.0), (384.0, 192.0)]
        """
        peer_share = (ranks - 1) / ranks
        return 2 * peer_share * self.width * (self.top_k if form == "exchange" else ranks)

    def rows(self, experts: Experts, ranks: int) -> float:
        """The rows of experts that a rank has room for, per token.

        >>> routed = Routed(experts=8, top_k=2, width=64)
        >>> routed.rows(Experts("gather"), 4), routed.rows(Experts("exchange", 2.5), 4)
        (8, 5.0)
        """
        if experts.form == "gather":
            return ranks * self.top_k
        tokens = 1_000_000  # so many that rounding does not show
        max_rows = ranks * tokens * min(self.top_k, max(shares(self.experts, ranks)))
        return experts.row_capacity(tokens * self.top_k, max_rows) / tokens


def shares(experts: int, ranks: int) -> tuple[int, ...]:
    """By rank of ep the number of its experts, as even as they go.

    >>> shares(6, 4)
    (2, 2, 1, 1)
    """
    return tuple(experts // ranks + (rank < experts % ranks) for rank in range(ranks))


def with_parts(compute: Mapping[str, Spec], named: Mapping[str, Any], ranks: int) -> dict[str, Spec]:
    """The specs with parts for leaves whose experts ep does not divide; raises ValueError for too few experts."""
    out = dict(compute)
    for name, spec in compute.items():
        experts = named[name].shape[spec.dims.index((EP,))] if (EP,) in spec.dims else 0
        if experts % ranks:
            if experts < ranks:
                raise ValueError(f"ep={ranks} is more than the {experts} experts of a block; use ep={experts} at most")
            out[name] = replace(spec, parts=shares(experts, ranks))
    return out


def experts_of(model: Any, named: Mapping[str, Any], compute: Mapping[str, Spec]) -> Routed | None:
    """The experts of a model whose rules split some over ep; None for another one."""
    for name, spec in compute.items():
        for dim, axes in enumerate(spec.dims):
            if EP in axes:
                config = model.config
                capacity = bool(getattr(config, "capacity_factor", 0.0))
                return Routed(named[name].shape[dim], config.top_k, config.d_model, capacity)
    return None


def experts_for(experts: Experts | str, routed: Routed | None, sizes: Mapping[str, int]) -> Experts | None:
    """The Experts of a plan on a mesh of these sizes, with nothing "auto"; None without ep."""
    experts, ranks = Experts.parse(experts) if isinstance(experts, str) else experts, sizes[EP]
    if ranks == 1:
        return None
    if routed is None:
        raise ValueError(
            f"ep={ranks}: ep splits the experts of mixtral and deepseek; this is another model, or a plain function; "
            "use dp"
        )
    if routed.capacity and experts.form == "exchange":
        raise ValueError(
            "experts exchange: the model has a capacity_factor, by which experts take the tokens of a sequence in "
            "order; use gather, or capacity_factor=0"
        )
    if experts.form != "auto":
        return experts
    less = routed.sent("exchange", ranks) < routed.sent("gather", ranks)
    return replace(experts, form="exchange" if less and not routed.capacity else "gather")
