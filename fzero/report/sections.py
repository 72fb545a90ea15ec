"""The sections of a report: tables and pictures made from its values, which report_writer.py writes.

Every cell is made only here, in sections_cost.py and in first_screen.py, so pasted tables agree with the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from fzero.comm.axes import mesh_text
from fzero.core.text_parsing import in_form
from fzero.report import bars, curves, sections_cost
from fzero.report.compare import ranks_of, rates, value_of
from fzero.report.run_reader import WARM_UP, warm_rows
from fzero.report.values import (
    PAIR,
    Code,
    Element,
    Picture,
    Report,
    ReportTable,
    RunReport,
    Section,
    command_of,
    digits,
    format_quantity,
    loss_unit,
    pair,
    table,
)


class Chapter(NamedTuple):
    """The sections of one run, or of the comparison of several."""

    name: str
    run: RunReport | None
    prefix: str  # of its pictures' names
    sections: list[Section]


def chapters(report: Report) -> list[Chapter]:
    """The chapter of each run, preceded by that of the comparison of several."""
    several = report.compared is not None
    parts = [Chapter("All runs", None, "", comparison(report))] if several else []
    for i, run in enumerate(report.runs, 1):
        with in_form(f"the files of run {run.name}", "; its traceback (--traceback) shows which value"):
            parts.append(Chapter(run.name, run, f"{i}-" if several else "", of_run(run)))
    return parts


def of_run(run: RunReport) -> list[Section]:
    """The sections of one run, without empty ones."""
    builders = {
        ("run", "The run"): describe_run,
        ("summary", "Predicted and measured"): summary,
        ("loss", "Loss"): loss,
        ("samples", "Samples of text"): samples,
        ("throughput", "Throughput and MFU"): throughput,
        ("memory", "Memory"): sections_cost.memory,
        ("time", "Time by phase"): sections_cost.time,
        ("communication", "Communication"): sections_cost.communication,
        ("pipeline", "Pipeline"): sections_cost.pipeline,
        ("experts", "Experts"): experts,
        ("norms", "Norms per layer"): norms,
        ("stragglers", "Ranks"): sections_cost.stragglers,
        ("attempts", "Attempts"): attempts,
        ("configuration", "Configuration"): configuration,
    }
    return [Section(*names, elements) for names, build in builders.items() if (elements := build(run))]


# -- what ran


def describe_run(run: RunReport) -> list[Element]:
    """The model, the config, the command and the machine."""
    last, c, env = run.attempts[-1] if run.attempts else {}, run.config, run.environment
    machine, train, data = last.get("machine", {}), c.get("train", {}), c.get("data", {})
    versions = last.get("versions") or {name: env.get(name) for name in ("fzero", "torch", "python") if env.get(name)}
    mesh, offload = last.get("mesh") or c.get("mesh") or {}, c.get("offload")
    compiled = "compiled" if train.get("compiled") else "not compiled"
    cores, memory = machine.get("cores"), format_quantity(machine.get("memory_bytes"), "bytes")
    machine_facts = [machine.get("cpu"), f"{cores} cores" if cores else None, memory if memory != "-" else None]
    commit, changed = last.get("commit"), " with changes that are not committed" if last.get("dirty") else ""
    command = last.get("command") or env.get("command") or []
    rows = {
        "model": f"{c.get('preset') or c.get('model', {}).get('family', 'model')}, "
        f"{env.get('num_params', 0):,} parameters",
        "steps": f"{run.series['step'][-1]:,} of {train.get('steps', 0):,}",
        "batch": f"{train.get('batch')} sequences of {data.get('seq_len')} tokens, "
        f"{train.get('micro_batch')} at a time",
        "mesh": f"{mesh_text(mesh)}; ZeRO stage {c.get('zero', 0)}{f'; offload {offload}' if offload else ''}",
        "precision": f"{c.get('precision', {}).get('policy')}; blocks {compiled}; remat {train.get('remat')}",
        "optimizer": f"{c.get('optim', {}).get('name')}",
        "command": command_of(command, ranks_of(run)),
        "commit": f"{commit}{changed}" if commit else "",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "machine": ", ".join(filter(None, machine_facts)) or str(env.get("platform", "")),
        **({"device": last["device"]} if last.get("device") else {}),  # not of runs before there was a choice
        "processes": f"{ranks_of(run)}, of {last.get('threads', env.get('threads'))} threads",
    }
    cells = [(name, text or "not recorded") for name, text in rows.items()]
    missing = [f"**Not recorded:** {sentence}" for sentence in run.missing]
    return [ReportTable("run", "What was run", ("", ""), cells, frozenset()), *missing]


def summary(run: RunReport) -> list[Element]:
    """All main quantities, predicted and measured."""
    rows = [(q.title, *pair(q)) for q in run.quantities if not q.name.startswith(("time/", "state/"))]
    notes = []
    if measured := next((q.measured_from for q in run.quantities if q.name == "step_s"), ""):
        notes.append(
            f"Times and rates are measured, {measured}; the first {WARM_UP} steps of an attempt warm up and "
            "are not counted."
        )
    if None not in (value_of(run, "flop"), value_of(run, "flop", predicted=True)):
        notes.append(
            "Predicted hardware FLOPs are counted operator by operator, without the pairs that attention "
            "skips; those of the run follow from a closed formula with causal attention. Neither has the optimizer's "
            "products."
        )
    if device := (run.plan or {}).get("device"):
        source = (
            "whose rates `fzero bench` has measured" if device.get("measured") else "whose rates are of data sheets"
        )
        if value_of(run, "step_s", predicted=True) is None:
            source = "of whose rates nothing is known: no times"
        notes.append(f"Predicted for the device '{device.get('name')}', {source}.")
    return [table("summary", "Predicted and measured", ("", *PAIR), rows), " ".join(notes)]


def attempts(run: RunReport) -> list[Element]:
    """The starts of the run; of several, with what each of them made and how fast."""
    several, sizes = len(run.attempts) > 1, [batch_of(a) for a in run.attempts]
    staged = len(set(sizes)) > 1
    speeds = rates(run.series, run.attempts, warm_rows(run.series, run.attempts))
    rows = []
    for i, (a, (steps, seconds, speed)) in enumerate(zip(run.attempts, speeds)):
        command = command_of(a.get("command") or [], a.get("processes") or 1)
        row = {
            "attempt": a.get("attempt", i + 1),
            "started": a.get("time", "-"),
            "after step": f"{a.get('first_step', 0):,}",
        }
        if several:
            row |= {"steps kept": f"{steps:,}", "time of a step": format_quantity(seconds, "s")}
            row |= {"throughput": format_quantity(speed, "tokens/s")}
        row |= {"batch": sizes[i]} if staged else {}
        row |= {"mesh": mesh_text(a.get("mesh") or {}), "ZeRO": a.get("zero", "-"), "threads": a.get("threads", "-")}
        row |= {"commit": (a.get("commit") or "-")[:10] + "+" * bool(a.get("dirty")), "command": command}
        rows.append({name: str(cell) for name, cell in row.items()})
    if not rows:
        return []
    numbers = {"after step", "steps kept", "time of a step", "throughput", "ZeRO", "threads"}
    right = frozenset(i for i, name in enumerate(rows[0]) if name in numbers)
    return [ReportTable("attempts", "Starts of the run", (*rows[0],), [(*row.values(),) for row in rows], right)]


def batch_of(attempt: Mapping[str, Any]) -> str:
    """The sequences of a step and their length."""
    config = attempt.get("config") or {}
    return f"{config.get('train', {}).get('batch', '-')} x {config.get('data', {}).get('seq_len', '-')}"


def configuration(run: RunReport) -> list[Element]:
    """The texts of config.json and environment.json."""
    tables = {"config": run.config, "environment": run.environment}
    return [Code(name, f"{name}.json", json.dumps(value, indent=2)) for name, value in tables.items()]


# -- how it went


def loss(run: RunReport) -> list[Element]:
    """Training and validation losses."""
    s, unit = run.series, loss_unit([run])
    places = zip(s["step"], run.column("val_loss"))
    vals, losses = [(step, v) for step, v in places if v is not None], [v for v in s["loss"] if v is not None]
    alt, rows = "Loss: no step has a finite one.", []
    if losses:
        rows = [
            ("training, first step", digits(losses[0]), f"{s['step'][0]:,}"),
            ("training, last step", digits(losses[-1]), f"{s['step'][-1]:,}"),
        ]
        alt = f"Loss over tokens seen: training falls from {losses[0]:.3f} to {losses[-1]:.3f}."
    if vals:
        (step, last), (best_step, best) = vals[-1], min(vals, key=lambda point: point[1])
        rows.append(("validation, last", digits(last), f"{step:,}"))
        rows.append(("validation, least", digits(best), f"{best_step:,}"))
        alt += f" The last validation loss is {last:.3f} after step {step:,}." if losses else ""
    skipped = sum(map(bool, s.get("skipped", ())))
    return [
        Picture("loss", "Loss over the tokens seen (measured)", alt, partial(curves.loss, run), log=True),
        table("loss", f"Loss (measured, nats per {unit})", ("", "loss", "at step"), rows),
        *by_position(run, unit),
        *([f"{skipped} steps were skipped, their updates not made."] if skipped else []),
    ]


SHOWN = 4  # evaluations in the picture of losses by position


def by_position(run: RunReport, unit: str) -> list[Element]:
    """The picture and the table of the validation loss by position, of a run that has recorded it."""
    name = "val_loss_by_position."
    ends = sorted(int(column.removeprefix(name)) for column in run.series if column.startswith(name))
    evaluations = []
    for i, step in enumerate(run.series["step"]):
        measured = {end: value for end in ends if (value := run.series[f"{name}{end}"][i]) is not None}
        if measured:
            evaluations.append((step, list(measured), list(measured.values())))
    if not evaluations:
        return []
    count = min(SHOWN, len(evaluations))
    some = [evaluations[(len(evaluations) - 1) * i // max(1, count - 1)] for i in range(count)]
    first, last = evaluations[0], evaluations[-1]
    alt = (
        f"Validation loss by position, of {len(evaluations)} evaluations: after step {last[0]:,} from {last[2][0]:.3f} "
        f"up to position {last[1][0]:,} to {last[2][-1]:.3f} up to {last[1][-1]:,}."
    )
    of_first = dict(zip(first[1], first[2]))
    rows = [(f"{end:,}", digits(of_first.get(end)), digits(v)) for end, v in zip(*last[1:])]
    head, title = (
        ("position, up to", f"after step {first[0]:,}", f"after step {last[0]:,}"),
        "Validation loss by position",
    )
    draw = partial(curves.loss_by_position, some, unit)
    return [
        Picture("loss_by_position", f"{title} (measured)", alt, draw),
        table("loss_by_position_table", f"{title} (measured, nats per {unit})", head, rows),
        "A position counts the tokens of its document before it in its sequence; each range begins at the end before "
        "it.",
    ]


def samples(run: RunReport) -> list[Element]:
    """The texts that the run generated, the last of each step and prompt."""
    last = {(sample["step"], sample["prompt"]): sample["text"] for sample in run.samples}
    return [
        Code("sample", f"A sample after step {step:,}, of the prompt {json.dumps(prompt, ensure_ascii=False)}", text,
             "text", True)
        for (step, prompt), text in last.items()
    ]  # fmt: skip


def throughput(run: RunReport) -> list[Element]:
    """Tokens per second and utilization."""
    rate, expected = value_of(run, "tokens_per_s"), value_of(run, "tokens_per_s", predicted=True)
    if rate is None or "tokens" not in run.series:
        return []
    prediction = "nothing was predicted"
    if expected is not None:
        prediction = f"predicted were {format_quantity(expected, 'tokens/s')}"
    axes = "Tokens per second over tokens seen, with model FLOPs utilisation on the right"
    alt = f"{axes}: measured at the median {format_quantity(rate, 'tokens/s')}; {prediction}."
    last, note = run.attempts[-1] if run.attempts else {}, ""
    if peak := last.get("peak_flops"):
        source = "measured" if last.get("peak_measured") else "given"
        note = f"MFU and HFU are fractions of {format_quantity(peak, 'FLOP/s')}, {source}, of all processes."
    names = ("step_s", "tokens_per_s", "mfu", "mfu_causal", "hfu")
    rows = [(q.title, *pair(q)) for q in run.quantities if q.name in names]
    picture = Picture("throughput", "Throughput and model FLOPs utilisation", alt, partial(curves.throughput, run))
    return [picture, table("throughput", "Throughput", ("", *PAIR), rows), note]


def norms(run: RunReport) -> list[Element]:
    """The pictures of the norms of gradients and parameters."""
    pictures: list[Element] = []
    for kind, label in (("grad", "gradient"), ("param", "parameter")):
        steps, rows = norms_of(run, f"{kind}_norms.")
        last = {name: values[-1] for name, values in rows.items() if values[-1] is not None}
        if not last:
            continue
        high, low = max(last, key=lambda n: last[n]), min(last, key=lambda n: last[n])
        title = f"{label.capitalize()} norms"
        alt = (
            f"{title} of {len(rows)} parts of the model over {len(steps)} recorded steps; at the last, the largest is "
            f"{digits(last[high], 3)} ({high}), the least {digits(last[low], 3)} ({low})."
        )
        draw = partial(curves.norms, steps, rows, label)
        pictures.append(Picture(f"{kind}_norms", f"{title} per layer (measured)", alt, draw))
    return pictures


def norms_of(run: RunReport, prefix: str) -> tuple[list[int], dict[str, list[float | None]]]:
    """(steps that recorded norms, {part or layer: norm at each}) of the columns with a prefix."""
    columns = {name.removeprefix(prefix): values for name, values in run.series.items() if name.startswith(prefix)}
    steps = run.series["step"]
    indices = [i for i in range(len(steps)) if any(values[i] is not None for values in columns.values())]
    rows: dict[str, list[float | None]] = {}
    for name in sorted(columns, key=lambda name: {"embed": 0, "blocks": 1, "head": 3}.get(name, 2)):
        values = [columns[name][i] for i in indices]
        layers = max((len(v) for v in values if isinstance(v, list)), default=0)
        for layer in range(layers):
            rows[f"layer {layer}"] = [None if v is None else v[layer] for v in values]
        if not layers and any(v is not None for v in values):
            rows[name] = values
    return [steps[i] for i in indices], rows


LAST = 20  # steps whose imbalance is averaged at the end of a run


def experts(run: RunReport) -> list[Element]:
    """How evenly the tokens are spread over experts, by layer; [] for a run that recorded none."""
    s, elements = run.series, list[Element]()
    for stack in sorted({name.split(".")[1] for name in s if name.startswith("experts.")}):
        elements += stack_of_experts(run, stack)
    imbalances = [v for v in s.get("imbalance", []) if v is not None]
    if elements and imbalances:
        last = imbalances[-LAST:]
        elements.append(
            f"Imbalance, the most tokens of an expert over the mean of its layer, in the worst layer of a step: "
            f"{digits(imbalances[0], 4)} in the first step, and {digits(sum(last) / len(last), 4)} on the average of "
            f"the last {len(last)}."
        )
    return elements


def stack_of_experts(run: RunReport, stack: str) -> list[Element]:
    """The picture of the load of a stack's experts, and its last table."""
    s, prefix = run.series, f"experts.{stack}."
    indices = [i for i, value in enumerate(s[f"{prefix}load"]) if value is not None]
    steps, load = [s["step"][i] for i in indices], [s[f"{prefix}load"][i] for i in indices]
    entropy, dropped, bias = (
        s[f"{prefix}{name}"][indices[-1]] if f"{prefix}{name}" in s else [] for name in ("entropy", "dropped", "bias")
    )
    worst = [max(over_mean(max(shares), shares) for shares in layers) for layers in load]
    alt = (
        f"Share of the tokens' choices that each of {len(load[-1][0])} experts of {len(load[-1])} layers gets, over "
        f"{len(worst)} recorded steps: the most over the mean of a layer is {digits(worst[0], 3)} at the first of them "
        f"and {digits(worst[-1], 3)} at the last."
    )
    rows = []
    for i, shares in enumerate(load[-1]):
        extremes = [digits(over_mean(share, shares)) for share in (max(shares), min(shares))]
        row = {"layer": str(i), "most ÷ mean": extremes[0], "least ÷ mean": extremes[1]}
        row["router's entropy (nats)"] = digits(entropy[i])
        row |= {"dropped": f"{digits(100 * sum(dropped[i]), 3)}%"} if dropped else {}
        row |= {"bias, least to most": f"{digits(min(bias[i]), 3)} to {digits(max(bias[i]), 3)}"} if bias else {}
        rows.append(row)
    name, draw = f"experts_{stack}", partial(curves.load_map, steps, load)
    return [
        Picture(name, f"Load of the experts of {stack} (measured)", alt, draw),
        table(name, f"Experts of {stack} in step {steps[-1]:,} (measured)", [*rows[0]], [[*r.values()] for r in rows]),
    ]


def over_mean(share: float, shares: list[float]) -> float:
    """An expert's share over the mean of its layer."""
    return share * len(shares) / (sum(shares) or 1.0)


# -- several runs


def comparison(report: Report) -> list[Section]:
    """The sections that compare several runs."""
    compared = report.compared or {}
    scaled: list[Element] = scaling(report) if compared.get("scaling") else []
    if not scaled and (keys := compared.get("apart")):
        reason = f"The runs are on different numbers of ranks and of different work ({', '.join(keys[:6])})"
        scaled = [f"{reason}: their speeds are not divided by each other."]
    rows = [
        (row["key"], *(json.dumps(v) if not isinstance(v, str) else v or '""' for v in row["values"]))
        for row in compared.get("config", ())
    ]
    head = ("key", *(run.name for run in report.runs))
    differences = ReportTable("differences", "Config values that are not equal in all runs", head, rows, frozenset())
    return [
        Section("runs", "The runs", compare_outcomes(report.runs)),
        Section("losses", "Losses", compare_losses(report)),
        *([Section("scaling", "Scaling", scaled)] if scaled else []),
        Section("differences", "What differs in the configs",
                [differences if rows else "Nothing: the configs are equal."]),
    ]  # fmt: skip


def compare_outcomes(runs: list[RunReport]) -> list[Element]:
    """The tables of what was run and what came of it, and the picture of the throughput."""
    facts, figures = [], []
    for run in runs:
        val = [v for v in run.series.get("val_loss", ()) if v is not None]
        mesh = (run.attempts[-1].get("mesh") if run.attempts else None) or run.config.get("mesh") or {}
        c = run.config
        precision = c.get("precision", {}).get("policy", "-")
        placement = (mesh_text(mesh), str(c.get("zero", "-")), c.get("offload") or "-", precision)
        last = digits(val[-1] if val else None)
        facts.append((run.name, c.get("preset") or "-", *placement, f"{run.series['step'][-1]:,}", last))
        cells = {q.name: pair(q) for q in run.quantities}
        figures.append((run.name, *(cell for n in ("tokens_per_s", "peak_bytes") for cell in cells.get(n, ("-",) * 3))))
    names = ", ".join(run.name for run in runs)
    columns = ("run", "model", "mesh", "ZeRO", "offload", "precision", "steps", "validation loss")
    head = ("run", "throughput, predicted", "measured", "ratio", "peak memory, predicted", "measured", "ratio")
    title, text = "Throughput, predicted and measured", f"Tokens per second of {names}: predicted beside measured."
    return [
        ReportTable("runs", "What was run", columns, facts, frozenset({3, 6, 7})),
        table("figures", "Predicted and measured; the ratio is predicted ÷ measured", head, figures),
        Picture("speeds", title, text, partial(bars.speeds, runs)),
    ]


def compare_losses(report: Report) -> list[Element]:
    """The picture of the losses, and the table of them after the tokens that all runs have seen."""
    names, common = [run.name for run in report.runs], (report.compared or {}).get("losses")
    text, draw = f"Training and validation loss over tokens of {', '.join(names)}.", partial(curves.losses, report)
    elements: list[Element] = [Picture("losses", "Loss of the runs (measured)", text, draw, log=True)]
    if common:
        rows = [(name, digits(train), digits(val)) for name, train, val in zip(names, common["train"], common["val"])]
        title = f"Loss after {common['tokens']:,} tokens, which all runs have seen (measured)"
        elements.append(table("losses", title, ("run", "training, mean of the last tenth", "validation, last"), rows))
    return elements


def scaling(report: Report) -> list[Element]:
    """Speed over ranks, of runs of the same work."""
    words = {
        "weak": "the batch of a rank is the same in all (weak scaling)",
        "strong": "the batch of all ranks together is the same (strong scaling)",
        "mixed": "batches differ",
    }
    rows, notes, ends, all_series = [], [], [], (report.compared or {})["scaling"]
    for series in all_series:
        notes.append(f"{series['name']}: {words[series['kind']]}.")
        for p in series["points"]:
            counts = [p["ranks"], *("-" if p[key] is None else p[key] for key in ("threads", "cores"))]
            speed, speedup = format_quantity(p["tokens_per_s"], "tokens/s"), f"{digits(p['speedup'], 3)}x"
            row = (report.runs[p["run"]].name, mesh_text(p["mesh"]), *counts, speed, speedup)
            rows.append((*row, f"{100 * p['efficiency']:.1f}%"))
        last = series["points"][-1]
        ends.append(f"{series['name']} reaches {100 * last['efficiency']:.0f}% on {last['ranks']} ranks")
    head = ("run", "mesh", "ranks", "threads of a rank", "cores of the machine", "throughput", "speedup", "efficiency")
    notes.append(
        "Efficiency is tokens/s of a rank over that of the run with the fewest ranks. "
        "Ranks that share the cores of one machine cannot reach 100%."
    )
    alt = f"Tokens per second and scaling efficiency over the number of ranks: {'; '.join(ends)}."
    return [
        Picture("scaling", "Scaling (measured)", alt, partial(curves.scaling, all_series)),
        table("scaling", "Scaling (measured)", head, rows, text_columns=2),
        " ".join(notes),
    ]
