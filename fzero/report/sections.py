"""The sections of a report: tables and pictures made from its values, and written by markdown.py and html_page.py.

Every cell is made only here, so tables pasted into other files agree with the report.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fzero.report import bind
from fzero.report.attempts import rates
from fzero.report.compare import ranks_of, value_of
from fzero.report.read import WARM_UP, steady, warm_rows
from fzero.report.values import Quantity, RunReport, digits, ratio, shown, shown_ratio

PAIR = ("predicted", "measured", "predicted ÷ measured")


class Table(NamedTuple):
    """A table of texts; `right`: the columns of numbers."""

    name: str
    caption: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    right: frozenset[int]


class Picture(NamedTuple):
    """A picture: its caption, alternative text, and a function that draws it."""

    name: str
    caption: str
    alt: str
    draw: Callable[[], Any]  # returns a matplotlib Figure


class Code(NamedTuple):
    """A long text, collapsed until opened."""

    name: str
    caption: str
    text: str


class Section(NamedTuple):
    """A titled list of paragraphs, tables, pictures and long texts."""

    name: str
    title: str
    parts: list[str | Table | Picture | Code]


def table(name: str, caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A Table whose first `left` columns are text."""
    return Table(name, caption, tuple(head), [tuple(map(str, row)) for row in rows], frozenset(range(left, len(head))))


def of_run(run: RunReport) -> list[Section]:
    """The sections of one run, without empty ones."""
    made = (the_run, summary, loss, throughput, memory, time, communication, norms, stragglers, attempts, configuration)
    return [section for make in made if (section := make(run)).parts]


def the_run(run: RunReport) -> Section:
    """The section on the model, the config, the command and the machine."""
    last, c, env = run.attempts[-1] if run.attempts else {}, run.config, run.environment
    machine, train, series = last.get("machine", {}), c.get("train", {}), run.series
    versions = last.get("versions") or {name: env.get(name) for name in ("fzero", "torch", "python") if env.get(name)}
    mesh = last.get("mesh") or c.get("mesh") or {}
    where = [
        machine.get("cpu"),
        f"{machine['cores']} cores" if machine.get("cores") else None,
        shown(machine.get("memory_bytes"), "bytes"),
    ]
    rows = [
        ("model", (f"{c.get('preset') or c.get('model', {}).get('family', 'model')}, "
        f"{env.get('num_params', 0):,} " "parameters")),
        ("steps", f"{series['step'][-1]:,} of {train.get('steps', 0):,}"),
        ("batch", (f"{train.get('batch')} sequences of {c.get('data', {}).get('seq_len')} tokens, "
        f"{train.get('micro_batch')} " "at a time")),
        ("mesh", f"{mesh_name(mesh)}; ZeRO stage "
        f"{c.get('zero', 0)}{f'; offload {offload}' if (offload := c.get('offload')) else ''}"),
        ("precision", f"{c.get('precision', {}).get('policy')}; blocks "
        f"{'compiled' if train.get('compiled') else 'not compiled'}; "
                      f"remat {train.get('remat')}"),
        ("optimizer", f"{c.get('optim', {}).get('name')}"),
        ("command", command_of(last.get("command") or env.get("command") or [], ranks_of(run))),
        ("commit", (last["commit"] + (" with changes that are "
        "not committed" if last.get("dirty") else "")) if last.get("commit") else ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("machine", ", ".join(part for part in where if part and part != "-") or str(env.get("platform", ""))),
        ("processes", f"{ranks_of(run)}, of {last.get('threads', env.get('threads'))} threads"),
    ]  # fmt: skip
    missing = [f"**Not recorded:** {sentence}" for sentence in run.missing]
    rows = [(name, text or "not recorded") for name, text in rows]
    return Section("run", "The run", [Table("run", "What was run", ("", ""), rows, frozenset()), *missing])


def mesh_name(mesh: dict[str, int]) -> str:
    """Format a mesh, such as "dp=8 tp=2"; axes of one rank are left out."""
    return " ".join(f"{axis}={n}" for axis, n in mesh.items() if n > 1) or "one process"


def command_of(argv: Sequence[str], processes: int = 1) -> str:
    """Format a command line as typed: without the folder of the program, and with torchrun for several processes."""
    program = f"torchrun --nproc-per-node {processes} -m fzero" if processes > 1 else "fzero"
    return f"{program} {shlex.join(argv[1:])}" if argv else ""


def pair(q: Quantity) -> tuple[str, str, str]:
    """The cells of a quantity: predicted and measured in the same unit, and their ratio."""
    if q.unit == "fraction":
        cells = ("-" if v is None else f"{digits(100 * v)}%" for v in (q.predicted, q.measured))
    else:
        largest = max((abs(v) for v in (q.predicted, q.measured) if v is not None), default=0)
        cells = (shown(v, q.unit, largest) for v in (q.predicted, q.measured))
    predicted, measured = cells
    return predicted, measured, shown_ratio(q.ratio)


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
        known = "whose rates `fzero bench` has measured" if device.get("measured") else "whose rates are of data sheets"
        known = (
            known
            if value_of(run, "step_s", predicted=True) is not None
            else "of whose rates nothing is known: no times"
        )
        notes.append(f"Predicted for the device '{device.get('name')}', {known}.")
    return Section(
        "summary",
        "Predicted and measured",
        [table("summary", "Predicted and measured", ("", *PAIR), rows), " ".join(notes)],
    )


def loss(run: RunReport) -> Section:
    """The section on training and validation losses."""
    s = run.series
    val = s.get("val_loss", [None] * len(s["step"]))
    seen = [(step, tokens, v) for step, tokens, v in zip(s["step"], s.get("tokens", s["step"]), val) if v is not None]
    known = [v for v in s["loss"] if v is not None]
    rows = (
        [
            ("training, first step", digits(known[0]), f"{s['step'][0]:,}"),
            ("training, last step", digits(known[-1]), f"{s['step'][-1]:,}"),
        ]
        if known
        else []
    )
    if seen:
        best = min(seen, key=lambda point: point[2])
        rows += [
            ("validation, last", digits(seen[-1][2]), f"{seen[-1][0]:,}"),
            ("validation, least", digits(best[2]), f"{best[0]:,}"),
        ]
    skipped = sum(map(bool, s.get("skipped", ())))
    ends = f" The last validation loss is {seen[-1][2]:.3f} after step {seen[-1][0]:,}." if seen else ""
    alt = (
        f"Loss over tokens seen: training falls from {known[0]:.3f} to {known[-1]:.3f}.{ends}"
        if known
        else "Loss: no step has a finite one."
    )
    parts: list[Any] = [Picture("loss", "Loss over the tokens seen (measured)", alt, bind.loss(run))]
    parts.append(table("loss", "Loss (measured, nats per token)", ("", "loss", "at step"), rows))
    if skipped:
        parts.append(f"{skipped} steps were skipped, their updates not made.")
    return Section("loss", "Loss", parts)


def throughput(run: RunReport) -> Section:
    """The section on tokens per second and utilization."""
    rate, expected = value_of(run, "tokens_per_s"), value_of(run, "tokens_per_s", predicted=True)
    if rate is None or "tokens" not in run.series:
        return Section("throughput", "Throughput", [])
    prediction = f"predicted were {shown(expected, 'tokens/s')}." if expected is not None else "nothing was predicted."
    axes = "Tokens per second over tokens seen, with model FLOPs utilisation on the right"
    alt = f"{axes}: measured at the median {shown(rate, 'tokens/s')}; {prediction}"
    peak = run.attempts[-1].get("peak_flops") if run.attempts else None
    how = "measured" if run.attempts and run.attempts[-1].get("peak_measured") else "given"
    of = f"MFU and HFU are fractions of {shown(peak, 'FLOP/s')}, {how}, of all processes." if peak else ""
    rows = [
        (q.title, *pair(q)) for q in run.quantities if q.name in ("step_s", "tokens_per_s", "mfu", "mfu_causal", "hfu")
    ]
    picture = Picture("throughput", "Throughput and model FLOPs utilisation", alt, bind.throughput(run))
    return Section(
        "throughput", "Throughput and MFU", [picture, table("throughput", "Throughput", ("", *PAIR), rows), of]
    )


def memory(run: RunReport) -> Section:
    """The section on the bytes of a rank over one step."""
    measured, plan = run.memory or {}, run.plan or {}
    if not measured and not plan.get("peak"):
        return Section("memory", "Memory", [])
    here, there = (value.get("peak") or {} for value in (measured, plan))
    parts_of = [peak.get("parts") or peak.get("components") or {} for peak in (there, here)]
    names = [
        n
        for n in [*(measured.get("components") or ()), *parts_of[0], *parts_of[1]]
        if parts_of[0].get(n) or parts_of[1].get(n)
    ]
    known = [bool(parts) for parts in parts_of]
    rows = []
    for name in dict.fromkeys(names):
        predicted, seen = (parts.get(name, 0) if there_is else None for parts, there_is in zip(parts_of, known))
        rows.append((name, *pair(Quantity(name, name, "bytes", predicted, seen, "", ""))))
    rows += [("**all, at the peak**", *pair(q)) for q in run.quantities if q.name == "peak_bytes"]
    rest = [(q.title.removeprefix("at rest: "), *pair(q)) for q in run.quantities if q.name.startswith("state/")]
    parts: list[Any] = []
    if measured.get("timeline") or plan.get("timeline"):
        alt = (
            "Bytes of live tensors of a rank over one step, stacked by component"
            if measured
            else "Predicted bytes of live tensors over one step"
        )
        peak = (
            f"; the measured peak is {shown(here['bytes'], 'bytes')} in {place_of(here)}" if here.get("bytes") else ""
        )
        line = (
            f"; predicted is {shown(plan['peak_bytes_per_rank'], 'bytes')}" if plan.get("peak_bytes_per_rank") else ""
        )
        overlay = " and the predicted sum as a line" if measured and plan.get("timeline") else ""
        parts.append(
            Picture("memory", f"Memory over a step, by component{overlay}", f"{alt}{peak}{line}.", bind.memory(run))
        )
    parts.append(table("memory", "Live tensors of a rank at the peak of a step", ("component", *PAIR), rows))
    places = [
        f"{kind} in {place_of(peak)}" for kind, peak in (("predicted", there), ("measured", here)) if peak.get("phase")
    ]
    if places:
        parts.append(f"The peak: {'; '.join(places)}.")
    if rest:
        parts.append(table("state", "State at rest, a rank", ("group", *PAIR), rest))
    allocator = measured.get("allocator_peak_bytes")
    beside = []
    if allocator:
        beside.append(f"torch's allocator {shown(allocator, 'bytes')}")
    if measured.get("rss_peak_bytes"):
        beside.append(f"the whole process {shown(measured['rss_peak_bytes'], 'bytes')}")
    if beside:
        parts.append(
            f"At most in use in the same step: {', '.join(beside)}."
            + (f" Not seen in the stack: {measured['not_seen']}." if measured.get("not_seen") else "")
        )
    return Section("memory", "Memory", parts)


def place_of(moment: dict[str, Any]) -> str:
    """Format a moment of a step."""
    layer = moment.get("layer")
    op = moment.get("op")
    return f"{moment.get('phase') or 'the step'}{'' if layer is None else f', layer {layer}'}{f' ({op})' if op else ''}"


def time(run: RunReport) -> Section:
    """The section on the seconds of a step by phase."""
    found = [q for q in run.quantities if q.name.startswith("time/")]
    if not found:
        return Section("time", "Time by phase", [])
    measured = {q.name.removeprefix("time/"): q.measured for q in found if q.measured is not None}
    total = sum(measured.values())
    rows = [
        (
            name := q.name.removeprefix("time/"),
            *pair(q),
            f"{100 * measured[name] / total:.1f}%" if name in measured and total else "-",
        )
        for q in found
    ]
    longest = max(measured, key=lambda name: measured[name]) if measured else ""
    alt = "Time of a step by phase, stacked, predicted and measured"
    if longest:
        alt += f"; the longest measured phase is {longest} with {shown(measured[longest], 's')} of {shown(total, 's')}"
    parts: list[Any] = [Picture("time", "Time of a step by phase", f"{alt}.", bind.time_bars(run))]
    if "phases.forward" in run.series:
        steps_alt = (
            "Measured time of every step by phase, stacked, with evaluation and checkpoints; steps far above the "
            "others are cut off."
        )
        recorded = [f"{n:,}" for n, how in zip(run.series["step"], run.series.get("recorded", ())) if how is not None]
        slowed = f"; a recorder slowed step {', '.join(recorded)}" if recorded else ""
        parts.append(
            Picture("time_steps", f"Time of every step by phase (measured{slowed})", steps_alt, bind.time_steps(run))
        )
    parts.append(
        table("time", "Time of a step by phase; phases exclude each other", ("phase", *PAIR, "of the measured"), rows)
    )
    hidden = hidden_rows(run)
    if hidden:
        parts.append(
            table(
                "overlap",
                "Communication that was waited for (exposed), and from starts to waits (hidden; several at a "
                "time add up)",
                ("", *PAIR),
                hidden,
            )
        )
    return Section("time", "Time by phase", parts)


def hidden_rows(run: RunReport) -> list[tuple[str, ...]]:
    """Rows of exposed and hidden seconds of communication by axis, predicted and measured."""
    rows, planned, kept = [], (run.plan or {}).get("time") or {}, steady(run.series, run.attempts)
    for axis in sorted({name.split(".")[1] for name in run.series if name.startswith("comm.")}):
        for kind in ("exposed", "hidden"):
            column = run.series.get(f"comm.{axis}.{kind}", [])
            known = [column[i] for i in kept if column and column[i] is not None]
            mean = sum(known) / len(known) if known else None
            rows.append(
                (f"{axis}, {kind}", *pair(Quantity("", "", "s", (planned.get(kind) or {}).get(axis), mean, "", "")))
            )
    return rows


def communication(run: RunReport) -> Section:
    """The section on the bytes that a rank sends in a step."""
    rows = bind.sent_bytes(run)
    if not rows:
        if run.ledger is None:
            return Section("communication", "Communication", [])
        return Section(
            "communication",
            "Communication",
            ["Nothing is communicated: one process, and its ledger of a step is empty."],
        )
    cells = [
        (
            f"{collective} over {axis}",
            phase,
            *(f"{n:,}" if n is not None else "-" for n in (p_calls, m_calls, p, m)),
            shown_ratio(ratio(p, m)),
        )
        for (axis, collective, phase), (p, m, p_calls, m_calls) in rows.items()
    ]
    total = [sum(known) if (known := [n for v in rows.values() if (n := v[i]) is not None]) else None for i in range(4)]
    cells.append(
        (
            "**all**",
            "",
            *(f"{total[i]:,}" if total[i] is not None else "-" for i in (2, 3, 0, 1)),
            shown_ratio(ratio(total[0], total[1])),
        )
    )
    head = (
        "collective",
        "phase",
        "calls, predicted",
        "calls, measured",
        "bytes, predicted",
        "bytes, measured",
        PAIR[2],
    )
    seen = total[1] if total[1] is not None else total[0]
    alt = (
        "Bytes that one rank sends in a step by collective, axis and phase, predicted beside measured; "
        f"{shown(seen, 'bytes')} in all."
    )
    picture = Picture(
        "communication",
        "Communication of a step, by axis and collective; what is under 0.5% of the largest is in the table alone",
        alt,
        bind.communication(run),
    )
    return Section(
        "communication",
        "Communication",
        [picture, table("communication", "Sent by one rank in a step (the ledger)", head, cells, left=2)],
    )


def norms(run: RunReport) -> Section:
    """The section on norms of gradients and parameters."""
    parts: list[Any] = []
    for kind, what in (("grad", "gradient"), ("param", "parameter")):
        found = bind.norms_of(run, kind)
        if found is None:
            continue
        steps, rows = found
        last = {name: values[-1] for name, values in rows.items() if values[-1] is not None}
        if not last:
            continue
        high, low = max(last, key=lambda n: last[n]), min(last, key=lambda n: last[n])
        axes = f"{what.capitalize()} norms of {len(rows)} parts of the model over {len(steps)} recorded steps"
        alt = (
            f"{axes}; at the last, the largest is {digits(last[high], 3)} ({high}), the least {digits(last[low], 3)} "
            f"({low})."
        )
        parts.append(
            Picture(f"{kind}_norms", f"{what.capitalize()} norms per layer (measured)", alt, bind.norms(run, kind))
        )
    return Section("norms", "Norms per layer", parts)


def stragglers(run: RunReport) -> Section:
    """The section on the times of the ranks."""
    found = bind.times_of_ranks(run)
    if found is None or len(found) < 2:
        return Section("stragglers", "Ranks", [])
    named = [
        (step, rank)
        for step, rank in zip(run.series["step"], run.series.get("ranks.straggler", ()))
        if rank is not None
    ]
    head = ("rank", "busy", "waiting for others", "data", "disk")
    rows = [(str(rank), *(shown(part, "s") for part in parts)) for rank, (parts, _) in enumerate(found)]
    slow = max(range(len(found)), key=lambda r: found[r][0][0])
    longest = f"rank {slow} is busy longest, {shown(found[slow][0][0], 's')}"
    alt = f"Seconds that each of {len(found)} ranks is busy in a step, with the range over the record; {longest}."
    counts = {rank: sum(r == rank for _, r in named) for rank in sorted({r for _, r in named})}
    verdict = "No rank was more than 5% behind the median of the others in any recorded stretch of steps."
    if counts:
        each = ", ".join(f"rank {rank} in {n}" for rank, n in counts.items())
        verdict = f"More than 5% behind the median of the others: {each} recorded stretches of steps."
    picture = Picture("stragglers", "Time that each rank is busy in a step (measured)", alt, bind.stragglers(run))
    return Section(
        "stragglers",
        "Ranks",
        [picture, table("stragglers", "Time of a step on each rank (measured, mean)", head, rows), verdict],
    )


def attempts(run: RunReport) -> Section:
    """The section on the starts of the run; of several, with what each of them made and how fast."""
    rows, several = [], len(run.attempts) > 1
    each = rates(run.series, run.attempts, warm_rows(run.series, run.attempts))
    for i, (a, (steps, seconds, speed)) in enumerate(zip(run.attempts, each), 1):
        commit = (a.get("commit") or "-")[:10] + "+" * bool(a.get("dirty"))
        when = (str(a.get("attempt", i)), str(a.get("time", "-")), f"{a.get('first_step', 0):,}")
        made = (f"{steps:,}", shown(seconds, "s"), shown(speed, "tokens/s")) if several else ()
        where = (mesh_name(a.get("mesh") or {}), str(a.get("zero", "-")), str(a.get("threads", "-")))
        rows.append((*when, *made, *where, commit, command_of(a.get("command") or [], a.get("processes") or 1)))
    made = ("steps kept", "time of a step", "throughput") if several else ()
    head = ("attempt", "started", "after step", *made, "mesh", "ZeRO", "threads", "commit", "command")
    numbers = frozenset(i for i, name in enumerate(head) if name in ("after step", "ZeRO", "threads", *made))
    return Section(
        "attempts",
        "Attempts",
        [Table("attempts", "Starts of the run", head, rows, numbers)] if rows else [],
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
