"""`fzero report`: every number traces to a file, runs and attempts are compared fairly, pasting is repeatable."""

import importlib.util
import json
import math
import re
import shutil
import statistics
import sys
from pathlib import Path

import pytest
from reported import STATE, make_run, make_runs

from fzero.cli import main
from fzero.core import flat, set_nested
from fzero.report import (
    ReportTable,
    compare,
    figures,
    report_writer,
    run_reader,
    sections,
    sections_cost,
    values,
)
from fzero.report.values import Quantity
from fzero.sharding import pipeline

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "reports"))

import paste  # noqa: E402


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def fz(capsys, monkeypatch):
    """A function that runs `fzero report`: (exit code, stdout, stderr)."""
    monkeypatch.delenv("FZERO_TRACEBACK", raising=False)

    def run(*args):
        monkeypatch.setattr("sys.argv", ["/somewhere/bin/fzero", "report", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def refused(answer, *said):
    code, out, err = answer
    assert code == 2 and not out and len(err.splitlines()) == 1 and all(text in err for text in said), (code, out, err)


def traced(quantity, folder):
    """(predicted, measured) as `predicted_from` and `measured_from` say, computed here from the files alone."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def at(value, path):
        for part in path.split("."):
            value = value[part]
        return value

    def of(text):
        if not text:
            return None
        file, what = text.split(": ", 1)
        if file == "metrics.jsonl":
            counted = [
                row for row in rows if row["step"] not in (1, 2, 21, 22)
            ]  # two attempts, each with two steps to warm up
            kind, column = re.match(r"(median|mean) of (\S+) over", what).groups()
            return getattr(statistics, {"median": "median", "mean": "fmean"}[kind])(at(row, column) for row in counted)
        if file == "attempts.jsonl":
            last = json.loads((folder / file).read_text().splitlines()[-1])
            one, _, other = what.removesuffix(" (a closed formula)").partition(" x ")
            return last[one] * (last[other] if other else 1)
        held = json.loads((folder / file).read_text())
        what, _, whose = what.partition(", as a fraction of ")
        if whose:
            peak = json.loads((folder / "attempts.jsonl").read_text().splitlines()[-1])["peak_flops"]
            mfu = held["model_flop_per_step"] / held["step_s"] / peak
            return mfu * held[what] / held["mfu"]
        if found := re.fullmatch(r"sum of bytes where axis is (\w+)", what):
            return sum(row["bytes"] for row in held["rows"] if row["axis"] == found[1])
        return sum(at(held, what.removeprefix("sum of ")).values()) if what.startswith("sum of ") else at(held, what)

    return of(quantity.predicted_from), of(quantity.measured_from)


def test_what_is_compared_is_of_the_same_kind(runs, tmp_path):
    """FLOPs of passes with causal attention; the peak of a compiled run as the allocator has it, which sees the inner
    buffers of blocks."""

    def of(folder):
        return {q.name: q for q in run_reader.read_run(folder).quantities}

    folder = shutil.copytree(runs / "one", tmp_path / "run")
    found = of(folder)
    assert (
        "hfu_causal" in found["hfu"].measured_from and "hardware_flop_per_token_causal" in found["flop"].measured_from
    )
    assert "pass_flop_per_step" in found["flop"].predicted_from
    memory = json.loads((folder / "memory.json").read_text())
    assert found["peak_bytes"].measured == memory["peak"]["bytes"] != memory["allocator_peak_bytes"]
    (folder / "memory.json").write_text(json.dumps({**memory, "compiled": True}))
    assert of(folder)["peak_bytes"].measured == memory["allocator_peak_bytes"]
    (folder / "memory.json").write_text(json.dumps({**memory, "compiled": True, "allocator_peak_bytes": None}))
    assert of(folder)["peak_bytes"].measured is None, "without it the inner buffers of compiled blocks would be missing"


@pytest.mark.parametrize("name", ["one", "zero3", "dp2tp2"])
def test_every_number_traces_to_a_file(runs, name):
    run = run_reader.read_run(runs / name)
    assert {q.name for q in run.quantities} >= {
        "num_params",
        "peak_bytes",
        "step_s",
        "tokens_per_s",
        "mfu",
        "hfu",
        "flop",
        "time/forward",
    }
    assert not run.missing
    for q in run.quantities:
        predicted, measured = traced(q, runs / name)
        assert measured == q.measured and (
            predicted == q.predicted or q.predicted == pytest.approx(predicted, rel=1e-15)
        ), q
        assert q.predicted is not None or q.measured is not None
    rows = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        assert {n: column[i] for n, column in run.series.items() if column[i] is not None} == {
            n: v for n, v in flat(row) if v is not None
        }
    assert run.config == json.loads((runs / name / "config.json").read_text())
    assert run.memory == json.loads((runs / name / "memory.json").read_text())


def test_the_ratio_is_predicted_over_measured(runs):
    q = Quantity("a", "a", "bytes", 3, 2, "", "")
    assert (
        q.ratio == 1.5
        and Quantity("a", "a", "s", None, 2, "", "").ratio is None
        and Quantity("a", "a", "s", 1, 0, "", "").ratio is None
    )
    assert Quantity("a", "a", "s", 0, 0, "", "").ratio == 1.0
    run = run_reader.read_run(runs / "zero3")
    (summary,) = [
        part for section in sections.of_run(run) for part in section.parts if getattr(part, "name", "") == "summary"
    ]
    assert isinstance(summary, ReportTable) and summary.head == ("", "predicted", "measured", "predicted ÷ measured")
    cells = {row[0]: row[1:] for row in summary.rows}
    assert cells["parameters"] == ("1,000,448", "1,000,448", "1 exactly")
    by_name = {q.name: q for q in run.quantities}
    assert cells["time of a step"][2] == values.digits(by_name["step_s"].predicted / by_name["step_s"].measured)
    assert float(cells["throughput"][2]) < 1 < float(cells["time of a step"][2])


def test_the_json_holds_the_report(runs):
    report = report_writer.gather([runs / "zero3", runs / "one"], command="fzero report")
    value = json.loads(report_writer.json_text(report))
    assert values.from_json(value, "here") == report
    assert value == values.to_json(report)
    assert value["runs"][0]["quantities"][0]["ratio"] == 1.0
    assert (
        value["runs"][0]["attempts"][1]["commit"].startswith("0123")
        and value["runs"][0]["environment"]["command"][1] == "pretrain"
    )
    for wrong in ({}, [], {**value, "fzero_report": 99}, {**value, "runs": [{}]}):
        with pytest.raises(ValueError, match=r"^here: .*fzero report RUN"):
            values.from_json(wrong, "here")


@pytest.fixture
def undrawn(monkeypatch):
    """Nothing is drawn, which takes most of a report's time."""
    monkeypatch.setattr(figures, "draw_svg", lambda draw, log=False: figures.Drawing("<svg/>", []))


def test_what_an_old_run_lacks_is_said(runs):
    run = run_reader.read_run(runs / "old")
    assert run.plan is None and run.memory is None and run.ledger is None and run.attempts == []
    for file in ("attempts.jsonl", "ledger.json", "memory.json"):
        assert any(sentence.startswith(f"{file} is not there") for sentence in run.missing)
    assert any("no prediction" in sentence for sentence in run.missing) and any(
        "no phases" in sentence for sentence in run.missing
    )
    assert all(q.predicted is None and q.predicted_from == "" for q in run.quantities)
    text = report_writer.to_markdown(report_writer.gather([runs / "old"]))
    assert "**Not recorded:** memory.json is not there" in text and "## Memory" not in text and "loss.svg" in text
    assert "| commit | not recorded |" in text


def test_steps_that_warm_up_or_were_recorded_are_not_counted():
    series = {"step": [1, 2, 3, 4, 5, 6, 7, 8], "recorded": [None, None, None, "memory", None, None, None, None]}
    assert run_reader.steady(series, []) == [2, 4, 5, 6, 7]
    assert run_reader.steady(series, [{"first_step": 0}, {"first_step": 5}]) == [2, 4, 7]
    assert run_reader.steady({"step": [1, 2]}, []) == [0, 1]
    assert run_reader.steady({"step": [101, 102, 103]}, []) == [2]


def test_scaling_is_tokens_per_second_a_rank(runs):
    found = [run_reader.read_run(runs / name) for name in ("dp2tp2", "one", "zero3")]
    (series,) = compare.scaling(found)
    assert (
        series["kind"] == "strong"
        and [p["ranks"] for p in series["points"]] == [1, 2, 4]
        and [p["run"] for p in series["points"]] == [1, 2, 0]
    )
    rate = [p["tokens_per_s"] for p in series["points"]]
    assert [p["efficiency"] for p in series["points"]] == pytest.approx(
        [1.0, rate[1] / 2 / rate[0], rate[2] / 4 / rate[0]]
    )
    assert [p["speedup"] for p in series["points"]] == pytest.approx([1.0, rate[1] / rate[0], rate[2] / rate[0]])
    assert rate[1] / rate[0] == pytest.approx(1.5, rel=0.02)


def test_scaling_tells_weak_from_strong_and_one_work_from_another(tmp_path):
    one, two = make_run(tmp_path / "a", dp=1, batch=4), make_run(tmp_path / "b", dp=2, batch=8)
    other = make_run(tmp_path / "c", dp=4, batch=8, table={"train": {"steps": 40, "batch": 8, "remat": "full"}})
    found = [run_reader.read_run(folder) for folder in (one, two, other)]
    (series,) = compare.scaling(found)
    assert series["kind"] == "weak" and [p["run"] for p in series["points"]] == [0, 1]
    assert compare.scaling(found[1:]) == []


def some(cases, *now):
    """The cases of a table; all but `now` are slow."""
    return [pytest.param(key, marks=[] if key in now else pytest.mark.slow) for key in cases]


OTHER_WORK = {
    "optim.lr": 0.5,
    "optim.schedule.warmup_steps": 3,
    "optim.weight_decay": 0.5,
    "data.seq_len": 64,
    "train.remat": "full",
    "precision.policy": "fp32",
    "model.n_layers": 2,
}


@pytest.mark.parametrize("key", some(OTHER_WORK, "optim.lr", "data.seq_len"))
def test_speeds_of_other_work_are_not_divided(key, tmp_path):
    """Whatever of a config says what is computed, and not where; and the page says what it was."""
    one, two = make_run(tmp_path / "a", dp=1), make_run(tmp_path / "b", dp=2)
    change_config(two, key, OTHER_WORK[key])
    found = [run_reader.read_run(folder) for folder in (one, two)]
    assert compare.scaling(found) == [] and compare.conflicting_keys(found) == [key]
    page = report_writer.to_markdown(report_writer.gather([one, two]))
    assert f"different work ({key}): their speeds are not divided" in page and "efficiency" not in page


@pytest.mark.parametrize("key", ["cpu", "cores"])
def test_speeds_of_other_machines_are_not_divided(key, tmp_path):
    one, two = make_run(tmp_path / "a", dp=1), make_run(tmp_path / "b", dp=2)
    change_attempts(two, lambda i, line: line["machine"].update({key: "another"}))
    found = [run_reader.read_run(folder) for folder in (one, two)]
    assert compare.scaling(found) == [] and compare.conflicting_keys(found) == [f"machine.{key}"]


@pytest.mark.parametrize(
    "key, value", [("zero", 1), ("reduce", "canonical"), ("train.checkpoint_every", 7), ("prefetch", 2)]
)
def test_where_and_how_long_a_run_is_computed_is_what_scaling_compares(key, value, tmp_path):
    one, two = make_run(tmp_path / "a", dp=1), make_run(tmp_path / "b", dp=2)
    change_config(two, key, value)
    assert len(compare.scaling([run_reader.read_run(folder) for folder in (one, two)])) == 1


def test_of_mixed_batches_those_that_agree_are_compared(tmp_path):
    made = [("a", 1, 4), ("b", 2, 8), ("c", 4, 8), ("d", 8, 64)]
    found = [run_reader.read_run(make_run(tmp_path / name, dp=dp, batch=batch)) for name, dp, batch in made]
    series = compare.scaling(found)
    assert [(one["kind"], [p["run"] for p in one["points"]]) for one in series] == [
        ("strong", [1, 2]),
        ("weak", [0, 1]),
    ]
    assert compare.scaling([found[0], found[3]]) == []


# ---- several attempts ----

ELSEWHERE = {
    "mesh": {"dp": 1, "tp": 2},
    "processes": 4,
    "zero": 1,
    "offload": "opt=host",
    "precision": "fp32",
    "threads": 7,
    "micro_batches": 9,
    "compiled": True,
    "fp32_matmul": "bf16x3",
    "update": "backward",
    "machine": {"cpu": "another"},
    "versions": {"torch": "2.14"},
    "config": {"reduce": "canonical"},
}


def change_config(folder, key, value):
    table = json.loads((folder / "config.json").read_text())
    set_nested(table, key, value)
    (folder / "config.json").write_text(json.dumps(table))


def change_attempts(folder, change):
    lines = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        change(i, line)
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def resumed(folder, key, first, last=None):
    """A run of 40 steps, whose first 20 were ten times as fast and made elsewhere: by another value of `key`."""
    make_run(folder, dp=2)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in lines[:20]:
        row["tokens_per_s"], row["step_s"], row["mfu"] = 10 * row["tokens_per_s"], row["step_s"] / 10, 10 * row["mfu"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))

    def change(i, line):
        if i == 0 and key:
            line[key] = first
        elif i == 1 and last:
            line[key] = last

    change_attempts(folder, change)
    return folder


def test_every_fact_that_a_speed_depends_on_is_tried_here():
    assert set(ELSEWHERE) == {"mesh", *compare.FACTS}


@pytest.mark.parametrize("key", some(ELSEWHERE, "mesh", "zero", "config"))
def test_figures_are_of_one_placement_and_each_attempt_has_its_own(key, tmp_path):
    run = run_reader.read_run(resumed(tmp_path / "run", key, ELSEWHERE[key]))
    speed = compare.value_of(run, "tokens_per_s")
    assert 1000 < speed < 2000 and 0.4 < compare.value_of(run, "step_s") < 1.1 and "of the steps 23 to 40" in str(run)
    assert any("another placement are not counted" in sentence for sentence in run.missing)
    assert min(run_reader.steady(run.series, run.attempts)) >= 20
    (_, slow, _), (_, fast, _) = reversed(compare.rates(run.series, run.attempts, range(40)))
    assert slow > 5 * fast
    text = report_writer.to_markdown(report_writer.gather([tmp_path / "run"]))
    assert "| steps kept | time of a step | throughput |" in text
    same = run_reader.read_run(resumed(tmp_path / "same", "", None))
    assert len(run_reader.steady(same.series, same.attempts)) > 30 and not any("not counted" in s for s in same.missing)


@pytest.mark.parametrize("name", ["memory.json", "ledger.json"])
def test_a_record_of_another_placement_is_not_compared(name, tmp_path):
    folder = resumed(tmp_path / "run", "zero", 1)
    for number, kept in ((1, False), (2, True)):
        table = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**table, "attempt": number}))
        run = run_reader.read_run(folder)
        assert (run.memory if name == "memory.json" else run.ledger) is not None or not kept
        assert any(name in s and "another placement" in s for s in run.missing) is not kept


@pytest.mark.parametrize(
    "change", [{"mesh": {"dp": 8}}, {"config": {"zero": 1}}, {"config": {"offload": "opt=host"}}], ids=str
)
def test_a_plan_of_another_placement_is_not_compared(change, tmp_path):
    folder = make_run(tmp_path / "run", dp=2)
    change_attempts(folder, lambda i, line: line.update(config={"zero": 3, "offload": ""}))
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, **change}))
    run = run_reader.read_run(folder)
    assert run.plan is None and "another placement" in run.plan_from
    assert run_reader.read_run(folder, lambda folder: plan).plan["step_s"] == plan["step_s"]
    (folder / "plan.json").write_text(
        json.dumps({**plan, "mesh": {"dp": 2, "tp": 1}, "config": {"zero": 3, "offload": ""}})
    )
    assert run_reader.read_run(folder).plan is not None


def test_an_attempt_that_made_no_step_is_not_what_the_figures_are_of(tmp_path):
    folder = make_run(tmp_path / "run", dp=2)
    change_attempts(folder, lambda i, line: i == 1 and line.update(first_step=40, processes=64, mesh={"dp": 64}))
    run = run_reader.read_run(folder)
    assert compare.ranks_of(run) == 2 and compare.subject(run.series["step"], run.attempts)["attempt"] == 1
    assert compare.attempt_of_rows([1, 5, 6, 12], [{"first_step": 0}, {"first_step": 10}, {"first_step": 5}]) == [
        0,
        0,
        2,
        2,
    ]


def test_several_runs_are_compared(runs):
    found = [run_reader.read_run(runs / name) for name in ("one", "zero3")]
    rows = {row["key"]: row["values"] for row in compare.differences(found)}
    assert rows == {"mesh.dp": [compare.ABSENT, 2], "zero": [0, 3]}
    at = compare.losses([found[0]._replace(series={n: column[:30] for n, column in found[0].series.items()}), found[1]])
    assert at["tokens"] == 30 * 1024 and at["val"] == [found[0].series["val_loss"][29]] * 2
    last = found[0].series["loss"][27:30]
    assert at["train"] == pytest.approx([sum(last) / 3] * 2)
    text = report_writer.to_markdown(report_writer.gather([runs / "one", runs / "zero3"]))
    assert (
        "| zero | 0 | 3 |" in text and "![Tokens per second and scaling efficiency" in text and "(2-memory.svg)" in text
    )


def test_the_command_writes_and_prints(runs, tmp_path, fz, undrawn):
    code, out, err = fz(runs / "zero3", "--no-plan", "--out", tmp_path / "r")
    assert (
        code == 0
        and not err
        and "predicted ÷ measured" in out
        and "1 exactly" in out
        and out.startswith("llama-tiny (1,000,448 parameters) made 40 of 40 steps")
        and f"written: {tmp_path / 'r'}" in out
    )
    assert {path.name for path in (tmp_path / "r").iterdir()} >= {
        "report.json",
        "report.md",
        "report.html",
        "memory.svg",
    }
    (tmp_path / "r" / "old-picture.svg").write_text("")
    code, out, err = fz(runs / "zero3", "--no-plan", "--json", "--title", "T", "--public")
    value = json.loads(out)
    assert code == 0 and not err and value["title"] == "T" and not (runs / "zero3" / "report").exists()
    assert value["command"].startswith("fzero report ") and value["runs"][0]["environment"]["corpus"] == "…/corpus"
    assert "/home/" not in out and "/somewhere/" not in out
    assert fz(runs / "zero3", "--out", tmp_path / "r")[0] == 0 and not (tmp_path / "r" / "old-picture.svg").exists()
    # A report is read in place of its run.
    code, again, _ = fz(tmp_path / "r", runs / "one", "--json")
    assert code == 0 and [run["name"] for run in json.loads(again)["runs"]] == ["zero3", "one"]


def test_a_prediction_is_made_where_there_is_none(tmp_path, fz, monkeypatch):
    folder, asked = make_run(tmp_path / "run", plan=False), []
    monkeypatch.setattr("fzero.cli.report.predict_run", lambda run: asked.append(run) or {"num_params": 7})
    value = json.loads(fz(folder, "--json")[1])["runs"][0]
    assert asked == [folder] and value["quantities"][0]["predicted"] == 7
    value = json.loads(fz(folder, "--json", "--no-plan")[1])["runs"][0]
    assert (
        len(asked) == 1 and value["quantities"][0]["predicted"] is None and "none was requested" in value["plan_from"]
    )

    def fails(run):
        raise RuntimeError("no such\ndevice")

    monkeypatch.setattr("fzero.cli.report.predict_run", fails)
    code, out, _ = fz(folder, "--json")
    assert code == 0 and "could not make one (RuntimeError: no such device)" in json.loads(out)["runs"][0]["missing"][0]


def damage(folder, name, text):
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", "{", "config.json"),
        ("environment.json", "[]", "environment.json"),
        ("metrics.jsonl", "", "metrics.jsonl: has no step yet"),
        ("metrics.jsonl", '{"a": 1}\n', "metrics.jsonl:1: is not a row of metrics"),
        ("metrics.jsonl", 'x\n{"step": 1}\n', "metrics.jsonl:1: not JSON"),
        ("attempts.jsonl", "x\n{}\n", "attempts.jsonl:1: not JSON"),
        ("attempts.jsonl", "3\n", "attempts.jsonl:1: not a JSON object, but a int"),
        ("memory.json", "[1]", "memory.json: not a JSON object"),
        ("memory.json", '{"state": 3}', "memory.json: state is not"),
        ("ledger.json", '{"rows": [{"axis": "dp"}]}', "ledger.json: rows is not"),
        ("pipeline.json", '{"schedule": "0F0 0B0", "start": [[0]], "end": [[1]]}', "pipeline.json: is not what fzero"),
        ("plan.json", '{"peak', "plan.json"),
        ("plan.json", '{"state_bytes": [1]}', "plan.json: state_bytes is not"),
        ("plan.json", '{"timeline": [{}]}', "plan.json: timeline is not"),
    ],
)
def test_a_damaged_file_is_one_clear_line(tmp_path, fz, name, text, said):
    folder = make_run(tmp_path / "run", steps=4)
    damage(folder, name, text)
    refused(fz(folder, "--json"), said)


def test_the_passes_of_a_pipeline_are_drawn_beside_the_played_ones(tmp_path, fz):
    """Of a step that went as `play` has it both say the same; where an act of rank 0 was late the measured one idles
    longer."""
    s = pipeline.schedule("1f1b", pipeline.layout([1.0] * 5, 2), parts=4)
    played = pipeline.play(s, {"F": [1.0, 1.5], "B": [2.0, 3.0]}, wire=0.25)
    busy = [sum(b - a for a, b in zip(*row)) for row in zip(played.start, played.end)]
    folder = make_run(tmp_path / "run", steps=4)
    for late in (0.0, 10.0):
        start, end = ([list(row) for row in rows] for rows in (played.start, played.end))
        start[0][-1] += late
        end[0][-1] += late
        record = {"attempt": 2, "step": 4, "schedule": pipeline.write_schedule(s), "start": start, "end": end}
        damage(folder, "pipeline.json", json.dumps(record))
        out = tmp_path / f"report{late:g}"
        assert fz(folder, "--out", out)[0] == 0
        (section,) = [one for one in sections.of_run(report_writer.read(out).runs[0]) if one.name == "pipeline"]
        rows = next(part for part in section.parts if isinstance(part, ReportTable)).rows
        shown = lambda step: [sections_cost.percent(1 - one / step) for one in busy]  # noqa: E731
        assert [row[2] for row in rows[:2]] == shown(played.step)
        assert [row[3] for row in rows[:2]] == shown(played.step + late)
        assert [row[1] for row in rows] == ["2", "3", "5"]
        assert all((out / f"pipeline_{name}.svg").is_file() for name in ("measured", "played"))


def test_the_bubble_of_a_plan_is_beside_the_measured_one(tmp_path, fz):
    """Where the plan is of the schedule that ran; of another number of micro-batches it is left out."""
    s = pipeline.schedule("1f1b", pipeline.layout([1.0] * 4, 2), parts=4)
    played = pipeline.play(s, {"F": 1.0, "B": 2.0}, wire=0.25)
    folder = make_run(tmp_path / "run", steps=4)
    record = {"attempt": 2, "step": 4, "schedule": pipeline.write_schedule(s)}
    damage(folder, "pipeline.json", json.dumps({**record, "start": played.start, "end": played.end}))
    plan = json.loads((folder / "plan.json").read_text())
    for parts, columns in ((4, ["predicted", "played", "measured"]), (5, ["played", "measured"])):
        ranks = [{"idle_s": 0.5}, {"idle_s": 0.25}]
        facts = {"schedule": "1f1b", "micro_batches": parts, "row_s": 2.0, "ranks": ranks}
        damage(folder, "plan.json", json.dumps({**plan, "pipeline": facts}))
        out = tmp_path / f"report{parts}"
        assert fz(folder, "--out", out)[0] == 0
        (section,) = [one for one in sections.of_run(report_writer.read(out).runs[0]) if one.name == "pipeline"]
        found = next(part for part in section.parts if isinstance(part, ReportTable))
        assert list(found.head[2:]) == columns
        if parts == 4:
            assert [row[2] for row in found.rows[:2]] == [sections_cost.percent(x) for x in (0.25, 0.125)]


def test_mistakes_are_one_clear_line(runs, tmp_path, fz):
    refused(fz(), "no run is given")
    refused(fz(tmp_path / "none"), "no such folder")
    refused(fz(tmp_path), "is not a run")
    refused(fz(runs / "one", runs / "one"), "named twice")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    refused(fz(runs / "one", "--no-plan", "--out", tmp_path / "full"), "not empty", "--out")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


# ---- pasting ----


@pytest.fixture(scope="module")
def reports(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("book") / "reports"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "draw_svg", lambda draw, log=False: figures.Drawing("<svg/>", []))
        for name in ("zero3", "one"):
            report_writer.write(report_writer.gather([runs / name]), folder / name)
    return folder


def test_pasting_is_repeatable(reports):
    book = reports.parent / "README.md"
    head = "# Book\n\n<!-- report: zero3 summary -->\nold\n<!-- end -->\nmiddle\n"
    head += "```text\n<!-- report: no such -->\n```\n"
    book.write_text(
        head + "<!-- report: one memory.svg -->\n<!-- end -->\n\n<!-- report: one+zero3 scaling -->\n<!-- end -->\ntail"
    )
    assert paste.paste([book], reports, check=True) == [book] and "\nold\n" in book.read_text()
    assert paste.paste([book], reports) == [book]
    text = book.read_text()
    assert "old" not in text and text.endswith("<!-- end -->\ntail") and "\nmiddle\n" in text
    assert "| parameters | 1,000,448 | 1,000,448 | 1 exactly |" in text
    assert "](reports/one/memory.svg)" in text and "| zero3 | dp=2 | 2 |" in text
    assert paste.paste([book], reports) == [] and book.read_text() == text
    book.write_text(text.replace("1,000,448", "1,000,449", 1))
    assert paste.paste([book], reports, check=True) == [book]
    with pytest.raises(ValueError, match=r"no.md: no such file"):
        paste.paste([reports.parent / "no.md"], reports)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- report: zero4 summary -->\n<!-- end -->", r"page.md:1: .*no report 'zero4' \(did you mean 'zero3'\?\)"),
        (
            "\n<!-- report: zero3 sumary -->\n<!-- end -->",
            r"page.md:2: report zero3 has no 'sumary' \(did you mean 'summary'\?\)",
        ),
        ("<!-- report: zero3 summary -->\n", r"page.md:1: the mark has no end"),
        (
            "<!-- report: zero3 summary -->\n<!-- report: zero3 loss -->\n<!-- end -->",
            r"page.md:1: the mark has no end",
        ),
        ("<!-- report: zero3 -->\n<!-- end -->", r"page.md:1: .* is no mark"),
        ("text\n<!-- end -->", r"page.md:2: .* without a mark"),
    ],
)
def test_a_wrong_mark_is_refused(reports, text, said):
    with pytest.raises(ValueError, match=said):
        paste.paste_text(text, Path("page.md"), reports)


def test_what_is_pasted_in_this_repository_is_what_its_reports_say():
    pages = [
        path
        for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        if "<!-- report:" in path.read_text()
    ]
    assert paste.paste(pages, ROOT / "reports", check=True) == [], "run: python reports/paste.py"


def test_the_reports_of_this_repository_are_whole_and_small():
    found = sorted((ROOT / "reports").glob("*/report.json"))
    for path in found:
        report = report_writer.read(path.parent)
        text = report_writer.to_markdown(report)
        assert path.with_name("report.md").read_text() == text, "run: python reports/make.py --paste"
        for link in re.findall(r"\]\((\S+\.svg)\)", text):
            assert (path.parent / link).is_file()
        assert not re.search(r"(?<![\w/])/\w[\w.-]*/", path.read_text())  # no folder of an absolute path
        assert not re.search(r"/(home|root)/", path.read_text())  # nor of a URL, nor below another
    assert sum(path.stat().st_size for path in (ROOT / "reports").rglob("*") if path.is_file()) < 1_500_000
    spec = importlib.util.spec_from_file_location("make_reports", ROOT / "reports" / "make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert (ROOT / "reports" / "README.md").is_file() == bool(found)
    assert not found or (ROOT / "reports" / "README.md").read_text() == make.readme()


# ---- numbers in words ----


def test_numbers_in_words():
    assert [values.format_quantity(x, "bytes") for x in (0, 44, 1500, 2_000_896, 3.2e12)] == [
        "0 B",
        "44 B",
        "1.500 kB",
        "2.001 MB",
        "3.200 TB",
    ]
    assert [values.format_quantity(x, "s") for x in (0, 2e-5, 0.0123, 1.5, 300)] == [
        "0 s",
        "20.00 µs",
        "12.30 ms",
        "1.500 s",
        "5.000 min",
    ]
    assert (
        values.format_quantity(None, "s") == "-"
        and values.format_quantity(12345, "1") == "12,345"
        and values.format_quantity(1234.5, "tokens/s") == "1,234 tokens/s"
    )
    assert values.format_quantity(500, "bytes", largest=2e6) == "0.0005000 MB"
    assert (
        values.format_ratio(1.0) == "1 exactly"
        and values.format_ratio(1.0000001) == "1.000"
        and values.format_ratio(None) == "-"
    )
    assert math.isclose(values.ratio(1, 3), 1 / 3)
    assert run_reader.without_folders({"a": ["/x/y/z", "--out=/q/r"]}) == {"a": ["…/z", "--out=…/r"]}
    assert sum(STATE.values()) == values.ratio(sum(STATE.values()), 1)
    assert report_writer.format_words("a < `b` **c**") == "a &lt; <code>b</code> <strong>c</strong>"
