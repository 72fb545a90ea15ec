"""The text of `print(plan)`: the layout of every leaf, its bytes on a rank, and its communication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fzero.comm.axes import AXES, PP, RP, links_of
from fzero.sharding.codec import padded
from fzero.sharding.error_feedback import error_bytes
from fzero.sharding.leaf_plan import LeafPlan, is_coded
from fzero.sharding.pipeline_traffic import sent_table

Plan = Any  # fzero.sharding.plan.Plan, whose __str__ this is
WORDS = {"scatter": "psum_scatter {}", "psum": "psum {}", "gather": "all_gather {} of the gradient"}


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
    rows: list[tuple[str, ...]] = [head]
    sent, bytes_of = [0.0, 0.0], dict.fromkeys(groups, 0)
    for name, leaf in plan.leaves.items():
        words, *amounts = communication(plan, name)
        sent = [total + size for total, size in zip(sent, amounts)]
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
        rows.append((name, shape, *map(str, specs), *(f"{sizes[group]:,}" for group in groups), words))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
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
            f"{dtype_name(plan.reduce_dtype)}"
        )
    return "\n".join([top, *lines, *notes])


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
    """The lines of what a plan has beside its leaves: what is split over cp and ep, and what travels in codes."""
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


class Traffic(NamedTuple):
    """What a rank sends of one leaf by one collective over one link, in words and in bytes."""

    words: str
    link: str
    per_micro_batch: float
    per_step: float


def communication(plan: Plan, name: str) -> tuple[str, float, float]:
    """(the communication of one leaf, in words; bytes that a rank sends of it for a micro-batch; and once a step)."""
    entries = traffic(plan, name)
    words = ", ".join(entry.words for entry in entries) or "nothing"
    return words, sum(entry.per_micro_batch for entry in entries), sum(entry.per_step for entry in entries)


def traffic(plan: Plan, name: str) -> list[Traffic]:
    """What a rank sends of one leaf, collective by collective, without activations, for Execution(reshard=True)."""
    leaf, entries = plan.leaves[name], list[Traffic]()
    n, link = leaf.numel(leaf.compute), leaf.link
    signed, coding = name in plan.sign_leaves, coding_words(plan, name)
    if RP in leaf.use.axes:
        node_bytes = gathered_bytes(plan, leaf, n // leaf.ranks(link)) * missing_fraction(leaf, RP)
        entries.append(Traffic(f"all_gather rp{coding} for use a step", RP, 0.0, node_bytes))
    if leaf.gathered:
        share = gathered_bytes(plan, leaf, n) * missing_fraction(leaf, link) * (2 if leaf.stacked else 1)
        entries.append(Traffic(f"all_gather {link} for use{coding}", link, share, 0.0))
    if PP in leaf.params.axes and not leaf.stacked:
        entries.append(
            Traffic("gather pp for use a step", PP, 0.0, leaf.numel(leaf.params) * plan.policy.param.itemsize)
        )
    for is_final, path in enumerate(leaf.moves * leaf.trained):
        for op, over in path:
            if signed and is_coded(op, over) and over == leaf.sum_link:
                signs = 2 * plan.sign_bytes(name) * missing_fraction(leaf, over)
                entries.append(Traffic(f"all_to_all and all_gather {over} of signs a step", over, 0.0, signs))
                continue
            words = WORDS[op].format(over)
            bytes_sent = summed_bytes(plan, leaf, op, over, n) * missing_fraction(leaf, over)
            if name in plan.coded_grads and not signed and is_coded(op, over):
                words += f" as {plan.codec.grads}"
            words += (" a step" if is_final else " a micro-batch") * (op != "gather")
            entries.append(Traffic(words, over, bytes_sent * (not is_final), bytes_sent * is_final))
            n = n // leaf.ranks(over) if op == "scatter" else n * leaf.ranks(over) if op == "gather" else n
    if leaf.updated_in_shards:
        full_bytes = leaf.numel(leaf.compute) * plan.policy.param.itemsize * missing_fraction(leaf, link)
        entries.append(Traffic(f"all_gather {link} after the update", link, 0.0, full_bytes))
        if plan.local:
            entries.append(Traffic(f"all_gather {link} of where ranks are", link, 0.0, full_bytes))
    return entries


def missing_fraction(leaf: LeafPlan, link: str) -> float:
    """The part of a whole that a rank of a link has not, if it has its own."""
    return 1 - 1 / leaf.ranks(link)


def coding_words(plan: Plan, name: str) -> str:
    """In what a leaf is gathered, in words; "" as it is."""
    return " as float8" if name in plan.float8 else f" as {plan.codec.params}" if name in plan.coded else ""


def gathered_bytes(plan: Plan, leaf: LeafPlan, elements: int) -> float:
    """The bytes of so many elements of a leaf on their way to where they are used."""
    if leaf.name not in plan.coded:
        return elements * (1 if leaf.name in plan.float8 else leaf.dtype.itemsize)
    last = leaf.shape[-1] // leaf.ranks("+".join(leaf.compute.dims[-1]))
    return plan.codec.bytes_of(plan.codec.params, elements, last)


def summed_bytes(plan: Plan, leaf: LeafPlan, op: str, link: str, elements: int) -> float:
    """The bytes of a sum of so many elements over a link, all ranks' parts together; of a gather, of the result."""
    ranks, width = leaf.ranks(link), plan.reduce_dtype.itemsize
    if leaf.name not in plan.coded_grads or plan.codec.signs or not is_coded(op, link):
        return elements * width * {"scatter": 1, "psum": 2, "gather": ranks}[op]
    row = elements // ranks if op == "scatter" else padded(elements, ranks) // ranks
    return plan.codec.bytes_of(plan.codec.grads, row * ranks, row) * (2 if op == "psum" else 1)


def sent_by_link(plan: Plan) -> dict[str, tuple[float, float]]:
    """{link: bytes of parameters and gradients that a rank sends over it for a micro-batch, and once a step}.

    >>> import fzero
    >>> params, mesh = {"w": torch.zeros(64, 512)}, fzero.fake_mesh({"dp": 2, "rp": 2})
    >>> fzero.zero_plan(3, params, mesh, codec="params=int8,grads=int4,hpz").sent_by_link()
    {'rp': (4352.0, 8448.0), 'dp': (25600.0, 0.0)}
    """
    totals: dict[str, list[float]] = {}
    for name in plan.leaves:
        for entry in traffic(plan, name):
            so_far = totals.setdefault(entry.link, [0.0, 0.0])
            so_far[0], so_far[1] = so_far[0] + entry.per_micro_batch, so_far[1] + entry.per_step
    return {link: (micro_batch_bytes, step_bytes) for link, (micro_batch_bytes, step_bytes) in totals.items()}


def errors_text(plan: Plan) -> list[str]:
    """The lines that say what a codec's error feedback takes, and of what it keeps none."""
    error_size, kind = error_bytes(plan), plan.codec.errors or dtype_name(plan.error_dtype)
    lines = [
        f"  error feedback: a rank holds {error_size:,} bytes of errors in {kind}, and as many "
        "again in a step until it is known whether it is skipped"
    ]
    fit = [n for n, leaf in plan.leaves.items() if leaf.trained and leaf.is_matrix]
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
    return lines + link_lines(plan, uncoded, lambda link: "{:,.0f} and {:,.0f} in full".format(*uncoded[link]))


def link_lines(plan: Plan, plain: dict[str, tuple[float, float]], in_full: Callable[[str], str]) -> list[str]:
    """The lines that say what a rank sends over each link, and what it would send without the codec."""
    return [
        f"  over {link} a rank sends {sent[0]:,.0f} bytes a micro-batch and {sent[1]:,.0f} a step"
        + (f" ({in_full(link)})" if sent != plain[link] else "")
        for link, sent in sent_by_link(plan).items()
    ]


def signs_text(plan: Plan, plain: Plan) -> list[str]:
    """The lines that say what an optimizer's sums by signs send and take; `plain` is the plan without them."""
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
    without = "{:,.0f} without signs, {:,.0f} in a step of a full sum"
    return lines + link_lines(
        plan, plain_bytes, lambda link: without.format(plain_bytes[link][1], full_sum_bytes(plan, link))
    )


def full_sum_bytes(plan: Plan, link: str) -> float:
    """The bytes that a rank sends over a link in a step whose sums are not by signs, as in a warm-up."""
    total = 0.0
    for name, leaf in plan.leaves.items():
        by_link = [entry for entry in traffic(plan, name) if entry.link == link]
        total += sum(entry.per_step for entry in by_link)
        if name in plan.sign_leaves and leaf.sum_link == link:
            full_bytes = leaf.numel(leaf.summed) * plan.reduce_dtype.itemsize
            total += 2 * (full_bytes - plan.sign_bytes(name)) * missing_fraction(leaf, link)
    return total
