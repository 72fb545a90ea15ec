"""The sections of a report that compare several runs: overview, losses, scaling, differences of configs."""

from __future__ import annotations

import json
from typing import Any

from fzero.comm.mesh_text import mesh_text
from fzero.core.text_parsing import in_form
from fzero.report import run_pictures
from fzero.report.elements import Picture, ReportTable, Section, pair, table
from fzero.report.sections import of_run
from fzero.report.values import Report, RunReport, digits, format_quantity


def sections(report: Report) -> list[tuple[RunReport | None, list[Section]]]:
    """[(run, its sections)], preceded by (None, the sections of the comparison) for several runs."""
    several = [(None, comparison(report))] if report.compared is not None else []
    run_sections: list[tuple[RunReport | None, list[Section]]] = []
    for run in report.runs:
        with in_form(f"the files of run {run.name}", "; its traceback (--traceback) shows which value"):
            run_sections.append((run, of_run(run)))
    return [*several, *run_sections]


def comparison(report: Report) -> list[Section]:
    """The sections that compare several runs."""
    runs, compared = report.runs, report.compared or {}
    chapters = [Section("runs", "The runs", run_elements(runs)), Section("losses", "Losses", loss_elements(report))]
    if compared.get("scaling"):
        chapters.append(scaling(report))
    elif keys := compared.get("apart"):
        reason = f"The runs are on different numbers of ranks and of different work ({', '.join(keys[:6])})"
        chapters.append(Section("scaling", "Scaling", [f"{reason}: their speeds are not divided by each other."]))
    rows = [
        (row["key"], *(json.dumps(v) if not isinstance(v, str) else v or '""' for v in row["values"]))
        for row in compared.get("config", ())
    ]
    title, head = "Config values that are not equal in all runs", ("key", *(run.name for run in runs))
    parts: list[Any] = (
        [ReportTable("differences", title, head, rows, frozenset())] if rows else ["Nothing: the configs are equal."]
    )
    chapters.append(Section("differences", "What differs in the configs", parts))
    return chapters


def run_elements(runs: list[RunReport]) -> list[Any]:
    """The tables of what was run and what came of it, and the picture of the throughput."""
    facts, figures = [], []
    for run in runs:
        val = [v for v in run.series.get("val_loss", ()) if v is not None]
        mesh = (run.attempts[-1].get("mesh") if run.attempts else None) or run.config.get("mesh") or {}
        c = run.config
        precision = c.get("precision", {}).get("policy", "-")
        placement = (mesh_text(mesh), str(c.get("zero", "-")), c.get("offload") or "-", precision)
        steps, last = f"{run.series['step'][-1]:,}", digits(val[-1]) if val else "-"
        facts.append((run.name, c.get("preset") or "-", *placement, steps, last))
        speed, peak = (
            next((pair(q) for q in run.quantities if q.name == name), ("-",) * 3)
            for name in ("tokens_per_s", "peak_bytes")
        )
        figures.append((run.name, *speed, *peak))
    names = ", ".join(run.name for run in runs)
    columns = ("run", "model", "mesh", "ZeRO", "offload", "precision", "steps", "validation loss")
    head = ("run", "throughput, predicted", "measured", "ratio", "peak memory, predicted", "measured", "ratio")
    title, text = "Throughput, predicted and measured", f"Tokens per second of {names}: predicted beside measured."
    return [
        ReportTable("runs", "What was run", columns, facts, frozenset({3, 6, 7})),
        table("figures", "Predicted and measured; the ratio is predicted ÷ measured", head, figures),
        Picture("speeds", title, text, run_pictures.speeds(runs)),
    ]


def loss_elements(report: Report) -> list[Any]:
    """The picture of the losses, and the table of them after the tokens that all runs have seen."""
    names, compared = [run.name for run in report.runs], report.compared or {}
    text = f"Training and validation loss over tokens of {', '.join(names)}."
    parts: list[Any] = [Picture("losses", "Loss of the runs (measured)", text, run_pictures.losses(report), log=True)]
    if common := compared.get("losses"):
        rows = [
            (name, *("-" if v is None else digits(v) for v in pair))
            for name, *pair in zip(names, common["train"], common["val"])
        ]
        title = f"Loss after {common['tokens']:,} tokens, which all runs have seen (measured)"
        head = ("run", "training, mean of the last tenth", "validation, last")
        parts.append(table("losses", title, head, rows))
    return parts


def scaling(report: Report) -> Section:
    """The section on speed over ranks, of runs of the same work."""
    words = {
        "weak": "the batch of a rank is the same in all (weak scaling)",
        "strong": "the batch of all ranks together is the same (strong scaling)",
        "mixed": "batches differ",
    }
    rows, notes, ends = [], [], []
    for series in (report.compared or {})["scaling"]:
        notes.append(f"{series['name']}: {words[series['kind']]}.")
        for p in series["points"]:
            threads, cores = ("-" if p[key] is None else str(p[key]) for key in ("threads", "cores"))
            rows.append(
                (
                    report.runs[p["run"]].name,
                    mesh_text(p["mesh"]),
                    f"{p['ranks']}",
                    threads,
                    cores,
                    format_quantity(p["tokens_per_s"], "tokens/s"),
                    f"{digits(p['speedup'], 3)}x",
                    f"{100 * p['efficiency']:.1f}%",
                )
            )
        last = series["points"][-1]
        ends.append(f"{series['name']} reaches {100 * last['efficiency']:.0f}% on {last['ranks']} ranks")
    head = ("run", "mesh", "ranks", "threads of a rank", "cores of the machine", "throughput", "speedup", "efficiency")
    notes.append(
        "Efficiency is tokens/s of a rank over that of the run with the fewest ranks. "
        "Ranks that share the cores of one machine cannot reach 100%."
    )
    alt = f"Tokens per second and scaling efficiency over the number of ranks: {'; '.join(ends)}."
    picture = Picture("scaling", "Scaling (measured)", alt, run_pictures.scaling(report))
    return Section(
        "scaling",
        "Scaling",
        [picture, table("scaling", "Scaling (measured)", head, rows, text_columns=2), " ".join(notes)],
    )
