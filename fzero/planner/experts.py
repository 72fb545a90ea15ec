"""Experts in a plan: how full they are, what their messages take, and their part of a layer's memory and FLOPs.

Shapes in an exchange are the same whatever is chosen, so how tokens are spread changes no byte of memory: the rank with
the fullest experts computes longer and sends more, and the others wait for it in every layer.
"""

from __future__ import annotations

import math

from fzero.core import pytree
from fzero.models.experts import OF_EXPERTS
from fzero.models.presets import body_of
from fzero.planner.expert_loads import Loads
from fzero.planner.rates import Way, collective_s
from fzero.run.config import RunConfig
from fzero.run.peak_memory import expert_units
from fzero.sharding import Plan
from fzero.sharding.slices import is_stacked, local_numel


def has_capacity(plan: Plan, loads: Loads) -> bool:
    """Whether a load has room in the exchange of a plan; else a run would take more memory than the plan."""
    if plan.experts is None or plan.experts.form != "exchange":
        return True
    return loads.imbalance(plan.mesh.ep.size) <= plan.experts.slack


def check_capacity(plan: Plan, loads: Loads) -> None:
    """Raise ValueError for a load that has no room in the exchange of a plan."""
    if plan.experts is not None and not has_capacity(plan, loads):
        factor = loads.imbalance(plan.mesh.ep.size)
        raise ValueError(
            f"imbalance {factor:.3g}: the fullest rank of ep={plan.mesh.ep.size} is sent so many times what each "
            f"sends, and exchange:{plan.experts.slack:g} has no room for it, so that a run would "
            "take more memory than planned; plan a larger slack, or gather"
        )


# ---- closed forms ----------------------------------------------------------------------------------------------------


def leaves(plan: Plan) -> dict[str, int]:
    """By name of the leaves that ep splits, the elements of a rank of ep, gathered over dp and cp: of all layers."""
    shapes, compute = pytree.named_leaves(plan.like), pytree.named_leaves(plan.compute)
    split = {name: spec for name, spec in compute.items() if "ep" in spec.axes}
    return {name: local_numel(shapes[name].shape, spec, plan.sizes) for name, spec in split.items()}


def numel(plan: Plan) -> int:
    """The elements of the leaves that ep splits, on a rank of ep; 0 without ep."""
    return sum(leaves(plan).values()) if plan.mesh.ep.size > 1 else 0


def depth(plan: Plan) -> int:
    """The layers of a model that have experts."""
    return max((plan.leaves[name].shape[0] for name in leaves(plan)), default=0)


def messages_s(plan: Plan, way: Way, token_bytes: float, loads: Loads) -> float:
    """The seconds of a layer's forward pass in which a rank of ep waits for its tokens on their way to experts and
    back. token_bytes: the rank's tokens times the bytes of an element."""
    assert plan.routed is not None and plan.experts is not None  # a plan with ep
    sent = plan.routed.sent(plan.experts.form, way.size) / 2 * token_bytes
    if plan.experts.form == "exchange":
        return 2 * collective_s(way, "exchange_rows", int(sent * loads.imbalance(way.size))).seconds
    return sum(collective_s(way, collective, int(sent)).seconds for collective in ("all_gather", "psum_scatter"))


def flop_fraction(plan: Plan, config: RunConfig) -> float:
    """The part of a layer's FLOPs that are of a token's experts."""
    body, routed = body_of(config.model), plan.routed
    assert routed is not None  # a plan with ep
    expert_flop = 6 * routed.top_k * routed.width * expert_units(config)
    shapes = [leaf.shape for name, leaf in plan.leaves.items() if is_stacked(name) and not OF_EXPERTS.search(name)]
    dense = 2 * sum(map(math.prod, shapes)) / body.n_layers
    heads = body.n_heads * getattr(body, "key_dim", body.d_model // body.n_heads)
    return expert_flop / (expert_flop + dense + 2 * config.data.seq_len * heads)
