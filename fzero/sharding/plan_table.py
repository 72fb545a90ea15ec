"""The text of `print(plan)`: the layout of every leaf, its bytes on a rank, and its communication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fzero.comm.axes import AXES, PP, links_of
from fzero.core.text_parsing import text_table
from fzero.sharding.leaf_plan import KINDS, over_pp, sent_by_link, sent_of, transfers, updates
from fzero.sharding.slices import local_numel

Plan = Any  # fzero.sharding.plan.Plan, whose __str__ this is


def describe(plan: Plan) -> str:
    """The table that `print(plan)` shows.

    For each leaf its specs, the bytes that a rank holds of it (of the parameter at rest, of the sum of gradients
    between micro-batches, of the master weight), and its communication.
    """
    policy = plan.policy
    groups = ("params", "grads", "master") if policy.has_master else ("params", "grads")
    head = (
        "leaf",
        "shape",
        "compute",
        "params",
        "grads",
        "optimizer",
        *(f"{group} bytes" for group in groups),
        "communicated",
    )
    rows: list[tuple[str, ...]] = []
    bytes_of = dict.fromkeys(groups, 0)
    for name, leaf in plan.leaves.items():
        sizes = rank_bytes(plan, name)
        for group in groups:
            bytes_of[group] += sizes[group]
        shape = "×".join(str(s) for s in leaf.shape) or "scalar"
        specs = (
            leaf.compute,
            leaf.params,
            leaf.grads if leaf.trained else "frozen",
            leaf.opt if leaf.trained else "frozen",
        )
        rows.append((name, shape, *map(str, specs), *(f"{sizes[group]:,}" for group in groups), sent_words(plan, name)))
    lines = text_table(head, rows, text=range(len(head)))
    total = sum(torch.Size(leaf.shape).numel() for leaf in plan.leaves.values())
    at_rest = sum(leaf.numel(leaf.params) for leaf in plan.leaves.values())
    used = ", ".join(f"{a}={n}" for a, n in plan.sizes.items() if n > 1) or "one process"
    extra = "".join(
        f", {text}"
        for text in (
            plan.reduce == "canonical" and "canonical sums",
            plan.sequence and "sequence parallel",
            plan.stages is not None and f"{plan.pipeline.name} of {plan.stages.layout} layers",
        )
        if text
    )
    notes = uncut_text(plan)
    top = f"ZeRO stage {plan.stage} on {used}{extra}: {total:,} parameters, {at_rest:,} at rest on a rank"
    notes += option_lines(plan)
    dtypes = {"params": policy.param, "grads": policy.accumulate, "master": policy.state}
    sizes = ", ".join(
        f"{bytes_of[group]:,} bytes of {GROUP_TEXT[group]} in {dtype_name(dtypes[group])}" for group in groups
    )
    notes.append(f"policy {policy.name}: a rank holds {sizes}")
    if plan.delayed:
        second = sum(rank_bytes(plan, name)["params"] for name in plan.trained_leaves)
        notes.append(
            f"delayed updates, {plan.delayed} a step: gradients are taken at the parameters before the last update; a "
            f"rank holds {second:,} bytes of these beside the others, as they rest"
        )
    if plan.stages is not None:
        notes += sent_table(plan)
    elif sent := sent_by_link(plan):
        micro_batch_bytes, step_bytes = map(sum, zip(*sent.values()))
        per = "an update" if plan.delayed else "a step"
        notes.append(
            f"a rank sends {micro_batch_bytes:,} bytes a micro-batch and {step_bytes:,} {per}; sums of gradients "
            f"travel in {dtype_name(plan.reduce_dtype)}"
        )
    return "\n".join([top, *lines, *notes])


def sent_words(plan: Plan, name: str) -> str:
    """The communication of one leaf, in words."""
    leaf = plan.leaves[name]
    sent = [*transfers(plan, [name]), *(over_pp(plan, name, 0) if name in plan.users else ()), *updates(plan, leaf)]
    return ", ".join(dict.fromkeys(t.words for t in sent)) or "nothing"


def uncut_text(plan: Plan) -> list[str]:
    """The lines that name the leaves which rest whole on every rank, as their dims do not divide."""
    cut = plan.stage and links_of(AXES.shards, plan.sizes)
    uncut = [n for n, leaf in plan.leaves.items() if cut and not leaf.opt.over_data and leaf.dtype.is_floating_point]
    among = " x ".join(f"{axis}={plan.sizes[axis]}" for axis in AXES.shards if plan.sizes[axis] > 1)
    notes = [f"not divisible by {among}, so whole on every rank: {', '.join(uncut)}"] if uncut else []
    pp_uncut = [name for name, leaf in plan.leaves.items() if plan.mesh.pp.size > 1 and PP not in leaf.opt.axes]
    if pp_uncut:
        notes.append(
            f"not divisible by pp={plan.mesh.pp.size} (and dp), so whole on every rank of it: {', '.join(pp_uncut)}"
        )
    return notes


def option_lines(plan: Plan) -> list[str]:
    """The lines of what a plan has beside its leaves: cp, ep, codes."""
    lines = [value.describe(plan) for value in (plan.context, plan.experts) if value is not None]
    return lines + (codec_text(plan) if plan.codec is not None else [])


GROUP_TEXT = {"params": "parameters", "grads": "gradients between micro-batches", "master": "master weights"}


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as text, without the package's name."""
    return str(dtype).removeprefix("torch.")


def rank_bytes(plan: Plan, name: str) -> dict[str, int]:
    """The bytes that a rank holds of a leaf: {"params": at rest, "grads": between micro-batches, "master": ...}."""
    leaf, policy = plan.leaves[name], plan.policy
    specs = {
        "params": (leaf.params, leaf.dtype, True),
        "grads": (leaf.grads, policy.accumulate, leaf.trained),
        "master": (leaf.opt, policy.state, leaf.trained and policy.has_master),
    }
    return {group: leaf.numel(spec) * dtype.itemsize * present for group, (spec, dtype, present) in specs.items()}


def error_bytes(plan: Plan) -> int:
    """The bytes of errors that a rank holds: the rank of pp with the most."""
    bytes_by_rank = [0] * plan.mesh.pp.size
    for shape, spec, dtype in (error for errors in plan.stored_errors.values() for error in errors.values()):
        rows = [len(rank_rows) for rank_rows in spec.rows] or [1] * len(bytes_by_rank)
        row_bytes = local_numel(shape, spec, plan.sizes) * dtype.itemsize // max(rows)  # of the rank with the most
        bytes_by_rank = [total + row_bytes * n for total, n in zip(bytes_by_rank, rows)]
    return max(bytes_by_rank)


def errors_text(plan: Plan) -> list[str]:
    """The lines that say what a codec's error feedback takes, and of what it keeps none."""
    error_size, kind = error_bytes(plan), plan.codec.errors or dtype_name(plan.error_dtype)
    lines = [
        f"  error feedback: a rank holds {error_size:,} bytes of errors in {kind}, and as many "
        "again in a step until it is known whether it is skipped"
    ]
    fit = [name for name, leaf in plan.trained_leaves.items() if leaf.is_matrix]
    exact = [name for name in fit if name not in plan.coded_grads]
    if exact:
        lines.append(f"  sums that all ranks get travel as they are: those of {', '.join(exact)}")
    return lines


def codec_text(plan: Plan) -> list[str]:
    """The lines that say what a codec sends over each link, beside the same plan without one."""
    plain, codec = replace(plan, codec=None, coded=frozenset(), coded_grads=frozenset()), plan.codec
    if codec.signs:
        return signs_text(plan, plain)
    uncoded, rounded = sent_by_link(plain), []
    if plan.coded:
        rounded.append(f"steps see {codec.params} roundings of {len(plan.coded)} leaves of parameters")
    if plan.coded_grads:
        rounded.append(f"each rank's gradients of {len(plan.coded_grads)} leaves are rounded to {codec.grads}")
    if rounded:
        rounded.append(f"{codec.block} elements share a scale")
    lines = [f"codec {codec}: " + ("; ".join(rounded) or "parameters rest over rp as well")]
    lines += errors_text(plan) if codec.loco is not None else []
    return lines + link_lines(plan, uncoded, lambda link: "{:,} and {:,} in full".format(*uncoded[link]))


def link_lines(plan: Plan, plain: dict[str, tuple[int, int]], in_full: Callable[[str], str]) -> list[str]:
    """The lines that say what a rank sends over each link, and what it would send without the codec."""
    return [
        f"  over {link} a rank sends {sent[0]:,.0f} bytes a micro-batch and {sent[1]:,.0f} a step"
        + (f" ({in_full(link)})" if sent != plain[link] else "")
        for link, sent in sent_by_link(plan).items()
    ]


def signs_text(plan: Plan, plain: Plan) -> list[str]:
    """The lines that say what an optimizer's sums by signs send and take."""
    numel = {leaf: leaf.numel(leaf.summed) for leaf in plan.leaves.values() if leaf.name in plan.optimizer_sums}
    signed = [leaf for leaf in numel if leaf.name in plan.sign_leaves]
    itemsize, plain_bytes = plan.sum_dtype.itemsize, sent_by_link(plain)
    signed_elements = sum(numel[leaf] for leaf in signed)
    served_elements = sum(numel[leaf] // leaf.ranks(leaf.sum_link) for leaf in signed)
    plain_leaves = [
        leaf.name
        for leaf in plan.leaves.values()
        if leaf.trained and leaf not in signed and leaf.dtype.is_floating_point
    ]
    lines = [
        f"codec {plan.codec}: the optimizer sends signs of {len(signed)} leaves; a rank holds "
        f"{2 * signed_elements * itemsize:,} bytes of their momentum and of its errors, and "
        f"{served_elements * itemsize:,} of the errors of what it serves"
    ]
    lines += [f"  sums that travel as they are: those of {', '.join(plain_leaves)}"] if plain_leaves else []
    if plan.codec.local:
        local_elements = sum(numel.values())
        links = sorted({leaf.sum_link for leaf in numel} - {""})
        lines.append(
            f"  local steps send none of it over {' and '.join(links)}: a rank holds {local_elements * itemsize:,} "
            f"bytes of how far it moved from the others, and in a step {local_elements * plan.policy.param.itemsize:,} "
            "of parameters that moved"
        )
    without = "{:,} without signs, {:,} in a step of a full sum"
    full = sent_by_link(plan, signs=False)  # a step whose sums are in full, as in a warm-up
    return lines + link_lines(plan, plain_bytes, lambda link: without.format(plain_bytes[link][1], full[link][1]))


def sent_table(plan: Plan) -> list[str]:
    """The lines of `print(plan)` that say what each rank of pp sends."""
    times = "a micro-batch", "an update" if plan.delayed else "a step"
    head = ("rank of pp", "activations", "gradients", *(f"{kind}, {period}" for kind in KINDS[2:] for period in times))
    rows: list[tuple[str, ...]] = []
    max_bytes = [0, 0]
    for rank in range(plan.mesh.pp.size):
        entries = sent_of(plan, rank)
        messages = [sum(entry.per_micro_batch for entry in entries if entry.kind == kind) for kind in KINDS[:2]]
        elements = [
            sum(entry.amounts[i] for entry in entries if entry.kind == kind) for kind in KINDS[2:] for i in (0, 1)
        ]
        max_bytes = [max(max_bytes[i], sum(entry.amounts[i] * entry.itemsize for entry in entries)) for i in (0, 1)]
        rows.append((str(rank), *(f"{n:,}" for n in (*messages, *elements))))
    return [
        "sent by a rank: messages over its borders for each micro-batch (of a model's activations [B, T, D]), and "
        "elements of parameters and gradients",
        *text_table(head, rows, text=range(len(head))),
        f"beside messages a rank sends at most {max_bytes[0]:,} bytes a micro-batch and {max_bytes[1]:,} {times[1]}; "
        f"sums of gradients travel in {str(plan.reduce_dtype).removeprefix('torch.')}",
    ]
