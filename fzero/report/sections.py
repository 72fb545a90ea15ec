"""The sections of a report: tables and pictures made from its values, and written by markdown.py and html_page.py.

Every cell is made only here, so tables pasted into other files agree with the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fzero.comm.mesh_text import mesh_text
from fzero.report.attempts import rates
from fzero.report.compare import ranks_of, value_of
from fzero.report.elements import PAIR, Code, ReportTable, Section, command_of, pair, table
from fzero.report.run_reader import WARM_UP, warm_rows
from fzero.report.sections_cost import communication, memory, stragglers, time
from fzero.report.sections_curves import loss, norms, samples, throughput
from fzero.report.sections_experts import experts
from fzero.report.sections_pipeline import pipeline
from fzero.report.values import RunReport, format_quantity


def of_run(run: RunReport) -> list[Section]:
    """The sections of one run, without empty ones."""
    builders = (
        run_section,
        summary,
        loss,
        samples,
        throughput,
        memory,
        time,
        communication,
        pipeline,
        experts,
        norms,
        stragglers,
        attempts,
    )
    return [section for make in (*builders, configuration) if (section := make(run)).parts]


def run_section(run: RunReport) -> Section:
    """The section on the model, the config, the command and the machine."""
    last, c, env = run.attempts[-1] if run.attempts else {}, run.config, run.environment
    machine, train, series = last.get("machine", {}), c.get("train", {}), run.series
    versions = last.get("versions") or {name: env.get(name) for name in ("fzero", "torch", "python") if env.get(name)}
    mesh = last.get("mesh") or c.get("mesh") or {}
    machine_facts = [
        machine.get("cpu"),
        f"{machine['cores']} cores" if machine.get("cores") else None,
        format_quantity(machine.get("memory_bytes"), "bytes"),
    ]
    rows = [
        ("model", (f"{c.get('preset') or c.get('model', {}).get('family', 'model')}, "
        f"{env.get('num_params', 0):,} " "parameters")),
        ("steps", f"{series['step'][-1]:,} of {train.get('steps', 0):,}"),
        ("batch", (f"{train.get('batch')} sequences of {c.get('data', {}).get('seq_len')} tokens, "
        f"{train.get('micro_batch')} " "at a time")),
        ("mesh", f"{mesh_text(mesh)}; ZeRO stage "
        f"{c.get('zero', 0)}{f'; offload {offload}' if (offload := c.get('offload')) else ''}"),
        ("precision", f"{c.get('precision', {}).get('policy')}; blocks "
        f"{'compiled' if train.get('compiled') else 'not compiled'}; "
                      f"remat {train.get('remat')}"),
        ("optimizer", f"{c.get('optim', {}).get('name')}"),
        ("command", command_of(last.get("command") or env.get("command") or [], ranks_of(run))),
        ("commit", (last["commit"] + (" with changes that are "
        "not committed" if last.get("dirty") else "")) if last.get("commit") else ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("machine", ", ".join(fact for fact in machine_facts if fact and fact != "-") or str(env.get("platform", ""))),
        *([("device", last["device"])] if last.get("device") else []),  # not of runs before there was a choice
        ("processes", f"{ranks_of(run)}, of {last.get('threads', env.get('threads'))} threads"),
    ]  # fmt: skip
    missing = [f"**Not recorded:** {sentence}" for sentence in run.missing]
    rows = [(name, text or "not recorded") for name, text in rows]
    return Section("run", "The run", [ReportTable("run", "What was run", ("", ""), rows, frozenset()), *missing])


def summary(run: RunReport) -> Section:
    """The section of all main quantities, predicted and measured."""
    rows = [(q.title, *pair(q)) for q in run.quantities if not q.name.startswith(("time/", "state/"))]
    notes = []
    if measured := next((q.measured_from for q in run.quantities if q.name == "step_s"), ""):
        notes.append(
            f"Times and rates are measured, {measured}; the first {WARM_UP} steps of an attempt warm up and "
            "are not counted."
        )
    if "flop" in {q.name for q in run.quantities if q.measured is not None and q.predicted is not None}:
        notes.append(
            "Predicted hardware FLOPs are counted operator by operator, without the pairs that attention "
            "skips; those of the run follow"
        )
        notes.append("from a closed formula with causal attention. Neither has the optimizer's products.")
    if device := (run.plan or {}).get("device"):
        rate_source = (
            "whose rates `fzero bench` has measured" if device.get("measured") else "whose rates are of data sheets"
        )
        rate_source = (
            rate_source
            if value_of(run, "step_s", predicted=True) is not None
            else "of whose rates nothing is known: no times"
        )
        notes.append(f"Predicted for the device '{device.get('name')}', {rate_source}.")
    return Section(
        "summary",
        "Predicted and measured",
        [table("summary", "Predicted and measured", ("", *PAIR), rows), " ".join(notes)],
    )


def batch_of(attempt: Mapping[str, Any]) -> str:
    """The sequences of a step and their length."""
    config = attempt.get("config") or {}
    return f"{config.get('train', {}).get('batch', '-')} x {config.get('data', {}).get('seq_len', '-')}"


def attempts(run: RunReport) -> Section:
    """The section on the starts of the run; of several, with what each of them made and how fast."""
    rows, several = [], len(run.attempts) > 1
    speeds = rates(run.series, run.attempts, warm_rows(run.series, run.attempts))
    sizes = [batch_of(a) for a in run.attempts]
    staged = len(set(sizes)) > 1
    for i, (a, (steps, seconds, speed)) in enumerate(zip(run.attempts, speeds), 1):
        commit = (a.get("commit") or "-")[:10] + "+" * bool(a.get("dirty"))
        start_cells = (str(a.get("attempt", i)), str(a.get("time", "-")), f"{a.get('first_step', 0):,}")
        progress = (f"{steps:,}", format_quantity(seconds, "s"), format_quantity(speed, "tokens/s")) if several else ()
        placement = (
            *[sizes[i - 1]] * staged,
            mesh_text(a.get("mesh") or {}),
            str(a.get("zero", "-")),
            str(a.get("threads", "-")),
        )
        rows.append(
            (*start_cells, *progress, *placement, commit, command_of(a.get("command") or [], a.get("processes") or 1))
        )
    progress = ("steps kept", "time of a step", "throughput") if several else ()
    placement = (*["batch"] * staged, "mesh", "ZeRO", "threads")
    head = ("attempt", "started", "after step", *progress, *placement, "commit", "command")
    numbers = frozenset(i for i, name in enumerate(head) if name in ("after step", "ZeRO", "threads", *progress))
    return Section(
        "attempts",
        "Attempts",
        [ReportTable("attempts", "Starts of the run", head, rows, numbers)] if rows else [],
    )


def configuration(run: RunReport) -> Section:
    """The section with config.json and environment.json."""
    return Section(
        "configuration",
        "Configuration",
        [
            Code("config", "config.json", json.dumps(run.config, indent=2)),
            Code("environment", "environment.json", json.dumps(run.environment, indent=2)),
        ],
    )
