"""The text that `print(plan)` shows of generation: memory, then time."""

from __future__ import annotations

import math
from typing import Any

from fzero.comm.axes import mesh_text
from fzero.core.text_parsing import text_table
from fzero.planner.plan_text import duration, listing, percent, quantity, size

Plan = Any  # a GenerationPlan or a ServingPlan of fzero.planner.generation, whose module imports this one


def page(plan: Plan) -> str:
    """Format a GenerationPlan."""
    return "\n\n".join("\n".join(lines) for lines in (heading(plan), memory(plan), time(plan)) if lines)


def heading(plan: Plan) -> list[str]:
    """The lines about the model, its device and the requests."""
    work, c = plan.workload, plan.config
    kind = getattr(c.model, "kind", "")
    return [
        f"{c.preset or 'the model'}: {quantity(plan.num_params)} parameters in {kind or c.precision.policy}, on "
        f"{mesh_text(plan.sizes)} of {plan.device.name}",
        f"requests of {work.prompt_tokens:,} tokens and {work.new_tokens:,} new ones; a step has at most "
        f"{work.step_tokens:,} tokens",
    ]


def memory(plan: Plan) -> list[str]:
    """The lines about what is on a rank."""
    work, spec = plan.workload, plan.spec
    verdict = f"{plan.batch:,} requests fit" if plan.batch else "NO REQUEST FITS"
    verdict += "" if plan.fits or not plan.batch else "; THE WEIGHTS DO NOT FIT into the host's memory"
    return [
        f"memory of a rank: {size(plan.capacity_bytes)}: {verdict}",
        f"  weights    {listing(plan.weight_bytes)}",
        f"  pages      {spec.count:,} of {spec.page_tokens} positions: {size(spec.bytes)}; a page "
        f"{spec.page_bytes:,} B, a position {plan.position_bytes:,} B",
        f"  a step     {size(plan.step_bytes)} beside, with {max(1, plan.batch):,} rows and a chunk of a prompt",
        f"  longest    {plan.longest:,} tokens, of a request alone (max_len {plan.config.model.max_len:,}, pages "
        f"{spec.count * work.page_tokens:,})",
        f"  run it by  fzero generate --rows {max(1, plan.best)} --step-tokens {work.step_tokens} --pages {spec.count}"
        f"{'' if work.cache == 'auto' else f' --cache {work.cache}'}",
    ]


def time(plan: Plan) -> list[str]:
    """The lines about time, if the device has rates."""
    if not plan.timed:
        return []
    lines = [f"time: {duration(plan.first_token_s)} to the first token of a prompt alone"]
    if plan.hiding is not None:
        verdict = "fits" if plan.hiding <= plan.batch else "does not fit"
        lines.append(
            f"  weights    come in {duration(plan.costs.link_s)} a step; a batch of {plan.hiding:,} hides that, which "
            f"{verdict}"
        )
    rows = []
    for batch in plan.batches():
        step = plan.decode(batch)
        fit = "" if batch <= plan.batch else "does not fit"
        rows.append(
            [
                f"{batch:,}",
                quantity(plan.tokens_per_s(batch)),
                duration(step.seconds),
                *(duration(x) if x else "-" for x in (step.memory_s, step.compute_s, step.host_s, step.link_s)),
                step.binds,
                "the best" if batch == plan.best else fit,
            ]
        )
    head = ["batch", "tokens/s", "a step", "memory", "compute", "host", "link", "binds", ""]
    return [*lines, *("  " + line for line in text_table(head, rows, text=(7, 8)))]


def serving_page(plan: Plan) -> str:
    """Format a ServingPlan."""
    base, work = plan.generation, plan.generation.workload
    verdict = "stable" if plan.stable else "UNSTABLE: the queue grows"
    lines = [
        f"{plan.rate:g} requests a second: {verdict}, utilisation {percent(plan.utilisation)}; at most "
        f"{plan.largest_rate:.3g} a second"
    ]
    if math.isfinite(plan.step_s):
        used = f"{plan.pages:,.0f} of {base.spec.count:,} ({percent(plan.pages / base.spec.count)})"
        lines += [
            f"  a step     {duration(plan.step_s)}: {plan.rows:,.1f} requests answered, {plan.prompt_tokens:,.0f} "
            "tokens of prompts",
            f"  pages      {used} in use on a rank",
            f"  a request  {duration(plan.answer_s)}, {duration(plan.first_token_s)} of it to the first token, "
            f"{work.new_tokens / (plan.answer_s - plan.first_token_s):.3g} tokens/s then",
        ]
    return "\n\n".join((page(base), "\n".join(lines)))
