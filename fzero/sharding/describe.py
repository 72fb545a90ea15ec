"""The text of `print(plan)`: the layout of every leaf, its bytes on a rank, and its communication."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fzero.comm.tables import SHARDS, links_of
from fzero.sharding.at_rest import shard_axes
from fzero.sharding.experts import FORMS as EXPERT_FORMS
from fzero.sharding.experts import shares
from fzero.sharding.moves import moves, ranks_of, reduce_dtype
from fzero.sharding.sent import sent_table
from fzero.sharding.slices import is_stacked, local_numel

Plan = Any  # fzero.sharding.plan.Plan, whose __str__ this is
WORDS = {"scatter": "psum_scatter {}", "psum": "psum {}", "gather": "all_gather {} of the gradient"}


def missing_part(link: str, sizes: dict[str, int]) -> float:
    """The part of a whole that a rank of a link has not, if it has its own: 0 for no link."""
    return 1 - 1 / ranks_of(link, sizes) if link else 0.0


def describe(plan: Plan) -> str:
    """The table that `print(plan)` shows.

    For each leaf its specs, the bytes that a rank holds of it (of the parameter at rest, of the sum of gradients
    between micro-batches, of the master weight), and its communication.
    """
    policy = plan.policy
    held = ("params", "grads", "master") if policy.has_master else ("params", "grads")
    head = (
        "leaf",
        "shape",
        "compute",
        "params",
        "grads",
        "optimizer",
        *(f"{group} bytes" for group in held),
        "communicated",
    )
    rows: list[tuple[str, ...]] = [head]
    sent, bytes_of = [0.0, 0.0], dict.fromkeys(held, 0)
    for name, leaf in plan.leaves.items():
        words, *more = communication(plan, name)
        sent = [total + size for total, size in zip(sent, more)]
        sizes = rank_bytes(plan, name)
        for group in held:
            bytes_of[group] += sizes[group]
        shape = "×".join(str(s) for s in leaf.shape) or "scalar"
        specs = (
            leaf.compute,
            leaf.params,
            leaf.grads if leaf.trained else "frozen",
            leaf.opt if leaf.trained else "frozen",
        )
        rows.append((name, shape, *map(str, specs), *(f"{sizes[group]:,}" for group in held), words))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
    total = sum(torch.Size(leaf.shape).numel() for leaf in plan.leaves.values())
    at_rest = sum(local_numel(leaf.shape, leaf.params, plan.sizes) for leaf in plan.leaves.values())
    used = ", ".join(f"{a}={n}" for a, n in plan.sizes.items() if n > 1) or "one process"
    extra = "".join(
        f", {text}"
        for text in (
            plan.reduce == "canonical" and "canonical sums",
            plan.sequence and "sequence parallel",
            plan.stages is not None and f"{plan.pipeline.name} of {stages_text(plan)} layers",
        )
        if text
    )
    notes = whole_text(plan)
    top = f"ZeRO stage {plan.stage} on {used}{extra}: {total:,} parameters, {at_rest:,} at rest on a rank"
    notes += [context_text(plan)] if plan.context is not None else []
    notes += [experts_text(plan)] if plan.experts is not None else []
    dtypes = {"params": policy.param, "grads": policy.accumulate, "master": policy.state}
    sizes = ", ".join(f"{bytes_of[group]:,} bytes of {WHAT[group]} in {dtype_name(dtypes[group])}" for group in held)
    notes.append(f"policy {policy.name}: a rank holds {sizes}")
    if plan.delayed:
        second = sum(rank_bytes(plan, name)["params"] for name, leaf in plan.leaves.items() if leaf.trained)
        notes.append(
            f"delayed updates, {plan.delayed} a step: gradients are taken at the parameters before the last update; a "
            f"rank holds {second:,} bytes of these beside the others, as they rest"
        )
    if plan.stages is not None:
        notes += sent_table(plan)
    elif any(sent):
        per = "an update" if plan.delayed else "a step"
        notes.append(
            f"a rank sends {sent[0]:,.0f} bytes a micro-batch and {sent[1]:,.0f} {per}; sums of gradients travel in "
            f"{dtype_name(reduce_dtype(plan))}"
        )
    return "\n".join([top, *lines, *notes])


def whole_text(plan: Plan) -> list[str]:
    """The lines that name the leaves which rest whole on every rank, as their dims do not divide."""
    cut = plan.stage and links_of(SHARDS, plan.sizes)
    whole = [n for n, leaf in plan.leaves.items() if cut and "dp" not in leaf.opt.axes and leaf.dtype.is_floating_point]
    among = " x ".join(f"{axis}={plan.sizes[axis]}" for axis in SHARDS if plan.sizes[axis] > 1)
    notes = [f"not divisible by {among}, so whole on every rank: {', '.join(whole)}"] if whole else []
    few = [name for name, leaf in plan.leaves.items() if plan.sizes["pp"] > 1 and "pp" not in leaf.opt.axes]
    if few:
        notes.append(f"not divisible by pp={plan.sizes['pp']} (and dp), so whole on every rank of it: {', '.join(few)}")
    return notes


def context_text(plan: Plan) -> str:
    """The form of attention over cp of a plan, and what each form sends and holds."""
    context, cp, heads = plan.context, plan.sizes["cp"], plan.heads
    text = f"context: {replace(context, pieces='auto')} of {context.pieces} pieces over cp={cp}"
    if heads is None:
        return f"{text}: the model has no attention"
    costs = heads.costs(context, cp, plan.policy.compute.itemsize)
    forms = "; ".join(f"{form} {cost}" for form, cost in costs.items())
    return (
        f"{text}; bytes of a rank in attention of a layer, forward and backward, for each token of a sequence: {forms}"
    )


def experts_text(plan: Plan) -> str:
    """How tokens come to experts over ep in a plan, and what forms send."""
    experts, routed, ep = plan.experts, plan.routed, plan.sizes["ep"]
    room = f", room for {experts.slack:g} times an even load" if experts.form == "exchange" else ""
    sent = ", ".join(f"{form} {routed.sent(form, ep):,.0f}" for form in EXPERT_FORMS)
    least, most = (f(shares(routed.experts, ep)) for f in (min, max))
    own = str(most) if least == most else f"{least} or {most}"
    return (
        f"experts: {experts.form} over ep={ep}, {own} of {routed.experts} on a rank{room}; elements "
        f"that a rank sends in a layer's forward pass, for each of its tokens: {sent}"
    )


def stages_text(plan: Plan) -> str:
    """The number of layers of each stage of a plan with pp, such as "8,9,9,6"."""
    return ",".join(str(len(layers)) for layers in plan.stages.layers)


WHAT = {"params": "parameters", "grads": "gradients between micro-batches", "master": "master weights"}


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as text, without the package's name."""
    return str(dtype).removeprefix("torch.")


def rank_bytes(plan: Plan, name: str) -> dict[str, int]:
    """The bytes that a rank holds of a leaf: {"params": at rest, "grads": between micro-batches, "master": of its
    master weight}."""
    leaf, policy = plan.leaves[name], plan.policy
    specs = {
        "params": (leaf.params, leaf.dtype, True),
        "grads": (leaf.grads, policy.accumulate, leaf.trained),
        "master": (leaf.opt, policy.state, leaf.trained and policy.has_master),
    }
    return {
        group: local_numel(leaf.shape, spec, plan.sizes) * dtype.itemsize * there
        for group, (spec, dtype, there) in specs.items()
    }


def communication(plan: Plan, name: str) -> tuple[str, float, float]:
    """(the communication of one leaf, in words; bytes that a rank sends of it for a micro-batch; and once a step).

    Excludes the activations that tensor parallelism and pipelines send (see fzero.sharding.sent for what each rank of a
    pipeline sends). A leaf that the head shares counts once, and one that pp shards as sent to one rank that uses it.
    The parameters of a layer are gathered a second time for its
    backward pass, as Execution(reshard=True) has them.
    """
    leaf, sizes = plan.leaves[name], plan.sizes
    n = local_numel(leaf.shape, leaf.compute, sizes)
    words, sent = [], [0.0, 0.0]
    over = "".join(links_of(shard_axes(leaf.compute), sizes))
    share, width = n * missing_part(over, sizes) * plan.policy.param.itemsize, reduce_dtype(plan).itemsize
    if over and "dp" in leaf.use.axes:
        float8 = name in plan.float8
        words.append(f"all_gather {over} for use" + " as float8" * float8)
        sent[0] += share * (2 if is_stacked(name) else 1) / (plan.policy.param.itemsize if float8 else 1)
    if "pp" in leaf.params.axes and not is_stacked(name):
        words.append("gather pp for use a step")
        sent[1] += local_numel(leaf.shape, leaf.params, sizes) * plan.policy.param.itemsize
    cut = 1
    for when, path in enumerate(moves(leaf.compute, leaf.grads, leaf.opt, sizes) if leaf.trained else ()):
        for op, axis in path:
            words.append(WORDS[op].format(axis) + (" a step" if when else " a micro-batch") * (op != "gather"))
            sent[when] += (
                width * n / (cut if op != "gather" else 1) * missing_part(axis, sizes) * (2 if op == "psum" else 1)
            )
            cut *= ranks_of(axis, sizes) if op == "scatter" else 1
    if over and leaf.trained and "dp" in leaf.opt.axes and "dp" not in leaf.params.axes:
        words.append(f"all_gather {over} after the update")
        sent[1] += share
    return ", ".join(words) or "nothing", sent[0], sent[1]
