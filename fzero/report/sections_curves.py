"""The sections of a run on its way: loss, samples of text, throughput, norms."""

from __future__ import annotations

import json
from typing import Any

from fzero.report import run_pictures
from fzero.report.compare import value_of
from fzero.report.elements import PAIR, Code, Picture, Section, pair, table
from fzero.report.values import RunReport, digits, format_quantity, loss_unit


def loss(run: RunReport) -> Section:
    """The section on training and validation losses."""
    s = run.series
    val = s.get("val_loss", [None] * len(s["step"]))
    val_points = [
        (step, tokens, v) for step, tokens, v in zip(s["step"], s.get("tokens", s["step"]), val) if v is not None
    ]
    losses = [v for v in s["loss"] if v is not None]
    rows = (
        [
            ("training, first step", digits(losses[0]), f"{s['step'][0]:,}"),
            ("training, last step", digits(losses[-1]), f"{s['step'][-1]:,}"),
        ]
        if losses
        else []
    )
    if val_points:
        best = min(val_points, key=lambda point: point[2])
        rows += [
            ("validation, last", digits(val_points[-1][2]), f"{val_points[-1][0]:,}"),
            ("validation, least", digits(best[2]), f"{best[0]:,}"),
        ]
    skipped = sum(map(bool, s.get("skipped", ())))
    ends = (
        f" The last validation loss is {val_points[-1][2]:.3f} after step {val_points[-1][0]:,}." if val_points else ""
    )
    alt = (
        f"Loss over tokens seen: training falls from {losses[0]:.3f} to {losses[-1]:.3f}.{ends}"
        if losses
        else "Loss: no step has a finite one."
    )
    parts: list[Any] = [Picture("loss", "Loss over the tokens seen (measured)", alt, run_pictures.loss(run), log=True)]
    parts.append(table("loss", f"Loss (measured, nats per {loss_unit([run])})", ("", "loss", "at step"), rows))
    parts += by_position(run)
    if skipped:
        parts.append(f"{skipped} steps were skipped, their updates not made.")
    return Section("loss", "Loss", parts)


def by_position(run: RunReport) -> list[Any]:
    """The picture and the table of the validation loss by position, of a run that has recorded it."""
    evaluations = run_pictures.losses_by_position(run)
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    alt = (
        f"Validation loss by position, of {len(evaluations)} evaluations: after step {last[0]:,} from {last[2][0]:.3f} "
        f"up to position {last[1][0]:,} to {last[2][-1]:.3f} up to {last[1][-1]:,}."
    )
    of_first = dict(zip(first[1], first[2]))
    rows = [(f"{end:,}", digits(of_first[end]) if end in of_first else "-", digits(v)) for end, v in zip(*last[1:])]
    head = ("position, up to", f"after step {first[0]:,}", f"after step {last[0]:,}")
    unit = loss_unit([run])
    return [
        Picture("loss_by_position", "Validation loss by position (measured)", alt, run_pictures.loss_by_position(run)),
        table("loss_by_position_table", f"Validation loss by position (measured, nats per {unit})", head, rows),
        "A position counts the tokens of its document before it in its sequence; each range begins at the end before "
        "it.",
    ]


def samples(run: RunReport) -> Section:
    """The section of the texts that the run generated, the last of each step."""
    last = {(sample["step"], sample["prompt"]): sample["text"] for sample in run.samples}
    named = {
        (step, prompt): f"after step {step:,}, of the prompt {json.dumps(prompt, ensure_ascii=False)}"
        for step, prompt in last
    }
    parts: list[Any] = [Code("sample", f"A sample {named[key]}", text, "text", True) for key, text in last.items()]
    return Section("samples", "Samples of text", parts)


def throughput(run: RunReport) -> Section:
    """The section on tokens per second and utilization."""
    rate, expected = value_of(run, "tokens_per_s"), value_of(run, "tokens_per_s", predicted=True)
    if rate is None or "tokens" not in run.series:
        return Section("throughput", "Throughput", [])
    prediction = (
        f"predicted were {format_quantity(expected, 'tokens/s')}." if expected is not None else "nothing was predicted."
    )
    axes = "Tokens per second over tokens seen, with model FLOPs utilisation on the right"
    alt = f"{axes}: measured at the median {format_quantity(rate, 'tokens/s')}; {prediction}"
    peak = run.attempts[-1].get("peak_flops") if run.attempts else None
    source = "measured" if run.attempts and run.attempts[-1].get("peak_measured") else "given"
    note = (
        f"MFU and HFU are fractions of {format_quantity(peak, 'FLOP/s')}, {source}, of all processes." if peak else ""
    )
    rows = [
        (q.title, *pair(q)) for q in run.quantities if q.name in ("step_s", "tokens_per_s", "mfu", "mfu_causal", "hfu")
    ]
    picture = Picture("throughput", "Throughput and model FLOPs utilisation", alt, run_pictures.throughput(run))
    return Section(
        "throughput", "Throughput and MFU", [picture, table("throughput", "Throughput", ("", *PAIR), rows), note]
    )


def norms(run: RunReport) -> Section:
    """The section on norms of gradients and parameters."""
    parts: list[Any] = []
    for kind, label in (("grad", "gradient"), ("param", "parameter")):
        record = run_pictures.norms_of(run, kind)
        if record is None:
            continue
        steps, rows = record
        last = {name: values[-1] for name, values in rows.items() if values[-1] is not None}
        if not last:
            continue
        high, low = max(last, key=lambda n: last[n]), min(last, key=lambda n: last[n])
        axes = f"{label.capitalize()} norms of {len(rows)} parts of the model over {len(steps)} recorded steps"
        alt = (
            f"{axes}; at the last, the largest is {digits(last[high], 3)} ({high}), the least {digits(last[low], 3)} "
            f"({low})."
        )
        parts.append(
            Picture(
                f"{kind}_norms", f"{label.capitalize()} norms per layer (measured)", alt, run_pictures.norms(run, kind)
            )
        )
    return Section("norms", "Norms per layer", parts)
