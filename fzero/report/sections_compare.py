"""The sections of a report about several runs: the runs beside each other, their losses, their scaling, what differs."""

from __future__ import annotations

import json
from typing import Any

from fzero.report import bind
from fzero.report.sections import Picture, Section, Table, mesh_name, of_run, pair, table
from fzero.report.values import Report, RunReport, digits, shown


def sections(report: Report) -> list[tuple[RunReport | None, list[Section]]]:
    """[(run, its sections)], and first (None, the sections of the comparison) where there are several runs."""
    several = [(None, comparison(report))] if report.compared is not None else []
    return [*several, *((run, of_run(run)) for run in report.runs)]


def comparison(report: Report) -> list[Section]:
    """The sections about several runs."""
    runs, compared = report.runs, report.compared or {}
    facts, figures = [], []
    for run in runs:
        val = [v for v in run.series.get("val_loss", ()) if v is not None]
        mesh = (run.attempts[-1].get("mesh") if run.attempts else None) or run.config.get("mesh") or {}
        c = run.config
        how = (mesh_name(mesh), str(c.get("zero", "-")), c.get("offload") or "-", c.get("precision", {}).get("policy", "-"))
        facts.append((run.name, c.get("preset") or "-", *how, f"{run.series['step'][-1]:,}", digits(val[-1]) if val else "-"))
        pairs = [next((pair(q) for q in run.quantities if q.name == name), ("-",) * 3) for name in ("tokens_per_s", "peak_bytes")]
        figures.append((run.name, *pairs[0], *pairs[1]))
    names = [run.name for run in runs]
    about = ("run", "model", "mesh", "ZeRO", "offload", "precision", "steps", "validation loss")
    head = ("run", "throughput, predicted", "measured", "ratio", "peak memory, predicted", "measured", "ratio")
    first: list[Any] = [
        Table("runs", "What was run", about, facts, frozenset({3, 6, 7})),
        table("figures", "Predicted and measured; the ratio is predicted ÷ measured", head, figures),
    ]
    first.append(
        Picture(
            "speeds",
            "Throughput, predicted and measured",
            f"Tokens per second of {', '.join(names)}: predicted beside measured.",
            bind.speeds(runs),
        )
    )
    found = [Section("runs", "The runs", first)]
    at = compared.get("losses")
    losses_parts: list[Any] = [
        Picture(
            "losses", "Loss of the runs (measured)", f"Training and validation loss over tokens of {', '.join(names)}.", bind.losses(runs)
        )
    ]
    if at:
        cells = [(name, *("-" if v is None else digits(v) for v in (at["train"][i], at["val"][i]))) for i, name in enumerate(names)]
        losses_parts.append(
            table(
                "losses",
                f"Loss after {at['tokens']:,} tokens, which all runs have seen (measured)",
                ("run", "training, mean of the last tenth", "validation, last"),
                cells,
            )
        )
    found.append(Section("losses", "Losses", losses_parts))
    if compared.get("scaling"):
        found.append(scaling(report))
    config = [
        (row["key"], *(json.dumps(v) if not isinstance(v, str) else v or '""' for v in row["values"])) for row in compared.get("config", ())
    ]
    if config:
        found.append(
            Section(
                "differences",
                "What differs in the configs",
                [Table("differences", "Config values that are not equal in all runs", ("key", *names), config, frozenset())],
            )
        )
    else:
        found.append(Section("differences", "What differs in the configs", ["Nothing: the configs are equal."]))
    return found


def scaling(report: Report) -> Section:
    """Speed and efficiency over the number of ranks."""
    words = {
        "weak": "the batch of a rank is the same in all (weak scaling)",
        "strong": "the batch of all ranks together is the same (strong scaling)",
        "mixed": "batches differ",
    }
    rows, said, ends = [], [], []
    for series in (report.compared or {})["scaling"]:
        said.append(f"{series['name']}: {words[series['kind']]}.")
        for p in series["points"]:
            threads, cores = ("-" if p[key] is None else str(p[key]) for key in ("threads", "cores"))
            rows.append((report.runs[p["run"]].name, mesh_name(p["mesh"]), f"{p['ranks']}", threads, cores,
                         shown(p["tokens_per_s"], "tokens/s"), f"{digits(p['speedup'], 3)}x", f"{100 * p['efficiency']:.1f}%"))  # fmt: skip
        last = series["points"][-1]
        ends.append(f"{series['name']} reaches {100 * last['efficiency']:.0f}% on {last['ranks']} ranks")
    head = ("run", "mesh", "ranks", "threads of a rank", "cores of the machine", "throughput", "speedup", "efficiency")
    said.append(
        "Efficiency is tokens/s of a rank over that of the run with the fewest ranks. "
        "Ranks that share the cores of one machine cannot reach 100%."
    )
    alt = f"Tokens per second and scaling efficiency over the number of ranks: {'; '.join(ends)}."
    picture = Picture("scaling", "Scaling (measured)", alt, bind.scaling(report))
    return Section("scaling", "Scaling", [picture, table("scaling", "Scaling (measured)", head, rows, left=2), " ".join(said)])
