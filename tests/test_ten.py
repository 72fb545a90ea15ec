"""benchmarks/ten.py: what hangs, crashes or is killed costs no figure of another row; every part runs here, tiny, so
that on a GPU it has only to be started; and the page with the goals."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_pretend_triton import BENCHMARKS, ROOT

import fzero

# A part of the tests below: rows that a process goes through, without torch.
PROCESS = """
import json, os, signal, sys, time
rows, done = json.loads(sys.argv[1]), json.loads(sys.argv[2])
def say(**row): print("some text, and FIGURE " + json.dumps(row), flush=True)
for row in rows:
    if row in done: continue
    say(starts=row)
    if row == "hangs": signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)
    if row == "aborts": os.abort()
    if row == "spoils": say(row=row, failed="an illegal memory access"); sys.exit(75)
    if row == "raises": say(row=row, failed="a mistake"); continue
    if row == "slow": say(row=row, ms=1, last=False); time.sleep(99)
    say(row=row, ms=len(row))
"""


@pytest.fixture
def ten(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("ten")


@pytest.fixture
def sitting(ten, monkeypatch, tmp_path):
    """A function that runs such parts: (the rows of results.jsonl, the report)."""

    def command_of(part, options, record, rows, failed):
        return [sys.executable, "-c", PROCESS, json.dumps(part.rows.split()), json.dumps(sorted(rows))]

    monkeypatch.setattr(ten, "command_of", command_of)

    def run(*parts, seconds=20, before=()):
        with ten.Record(tmp_path / "out", before) as record:
            ten.run_parts(parts, ten.Options("cpu", True, tmp_path / "out", tmp_path), record, seconds)
        return rows_of(tmp_path / "out"), (tmp_path / "out/report.md").read_text()

    return run


def rows_of(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def test_a_hang_an_abort_and_a_spoilt_device_cost_their_own_rows(ten, sitting):
    rows, report = sitting(
        ten.Part("first", 1, 15, "one hangs two aborts three spoils raises four", beside=True, row_limit=0.3),
        ten.Part("beside", 1, 15, "five", beside=True),
        ten.Part("too long", 60, 90, "seven"),
        ten.Part("last", 1, 15, "six"),
    )
    found = ten.ten_report.latest(rows)
    good = {name: row for (_, name), row in found.items() if "failed" not in row}
    assert {*good} == {"one", "two", "three", "four", "five", "six"}
    why = {name: row["failed"] for (_, name), row in found.items() if "failed" in row}
    assert why.pop("hangs").startswith("not done in ") and why.pop("aborts").endswith(f"code {-signal.SIGABRT}")
    assert why == {"spoils": "an illegal memory access", "raises": "a mistake"}
    ends = {row["part"]: row["end"] for row in rows if "end" in row}
    assert ends["first"] == "failed: aborts, hangs, raises, spoils" and ends["beside"] == ends["last"] == "ok"
    assert ends["too long"].startswith("skipped: ")
    assert "- first: hangs: not done in" in report and "too long" in report
    assert all("t" in row and "part" in row for row in rows)


@pytest.mark.slow
def test_a_limit_and_the_deadline_end_what_runs_and_leave_what_it_has_said(ten, sitting):
    parts = [ten.Part("a", 1, 2.5, "one slow two"), ten.Part("b", 1, 90, "three slow", row_limit=90)]
    begin = time.monotonic()
    rows, report = sitting(*parts, ten.Part("c", 1, 90, "four"), seconds=5)
    assert time.monotonic() - begin < 9
    ends = {row["part"]: row["end"] for row in rows if "end" in row}
    assert ends == {
        "a": "ran past its limit, in slow",
        "b": "ran past its limit, in slow",
        "c": "skipped: 0 s are left, and it takes 1",
    }
    found = ten.ten_report.latest(rows)
    assert {name for _, name in found} == {"one", "three", "slow"}
    assert found["a", "slow"]["ms"] == 1 and found["a", "slow"]["cut"].startswith("not done in ")
    assert "- a: slow: not done in" in report


@pytest.mark.slow
def test_what_is_killed_has_left_every_figure_and_a_report(ten, tmp_path):
    program = f"""
import sys, json
sys.path.insert(0, {str(BENCHMARKS)!r})
import ten
ten.PARTS = (ten.Part("a", 1, 9, "one"), ten.Part("b", 1, 90, "two slow", row_limit=90))
command = lambda part, o, r, rows, f: [sys.executable, "-c", {PROCESS!r}, json.dumps(part.rows.split()), "[]"]
ten.command_of = command
sys.argv = ["ten.py", "--out", {str(tmp_path / "out")!r}, "--device", "cpu", "--seconds", "60"]
ten.main()
"""
    for kill in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
        for line in process.stdout:
            if b'"slow"' in line:
                break
        process.send_signal(kill)
        process.wait(10)
        process.stdout.close()
        with_slow = [row for row in rows_of(tmp_path / "out") if row.get("row") == "slow"]
        assert with_slow and "# Ten minutes" in (tmp_path / "out/report.md").read_text()
    assert "ran past" not in (tmp_path / "out/results.jsonl").read_text()


def test_a_second_call_does_what_failed_and_then_what_was_skipped(ten, tmp_path):
    parts = [ten.Part(name, 40, 90, "m:f") for name in "abcd"] + [ten.Part("laws", 20, 90, ("-n1", "tests/test_x.py"))]
    before = [
        {"part": "a", "row": "x", "ms": 1},
        {"part": "a", "end": "ok"},
        {"part": "b", "end": "skipped: 3 s are left, and it takes 40"},
        {"part": "c", "row": "x", "ms": 1},
        {"part": "c", "row": "y", "failed": "out of memory"},
        {"part": "c", "end": "failed: y"},
        {"part": "laws", "row": "tests/test_x.py::test_y[1]", "failed": "a | b"},
        {"part": "laws", "row": "tests/test_x.py", "failed": "1 tests"},
        {"part": "laws", "end": "failed: tests/test_x.py"},
    ]
    again = ten.second_call(parts, before, failed=True)
    assert [(part.name, part.blocking) for part in again] == [("c", True), ("laws", True), ("b", False), ("d", False)]
    assert again[0].need == 15 and again[2].need == 40
    options = ten.Options("cuda", False, tmp_path, tmp_path)
    with ten.Record(tmp_path, before) as record:
        words = ten.command_of(again[0], options, record, set(), set())
    assert json.loads(words[words.index("--done") + 1]) == ["x"]
    tests = ten.command_of(again[1], options, record, set(), set())
    assert "tests/test_x.py::test_y[1]" in tests and "tests/test_x.py" not in tests
    assert ten.environment(again[0], options)["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "CUDA_LAUNCH_BLOCKING" not in ten.environment(again[2], options)
    assert {ten.environment(part, options)["TRITON_CACHE_DIR"] for part in again} == {
        str(ten.CACHES / "TRITON_CACHE_DIR")
    }


def test_a_row_that_fails_costs_the_next_one_nothing(ten, capsys):
    module = importlib.import_module("ten_rows")
    where = module.Where("cpu", True, ROOT, ROOT, "x")

    def fail():
        raise ValueError("of one\nkernel")

    assert module.run_rows(iter([("a", dict), ("b", fail), ("c", lambda: {"ms": 1})]), {"a"}, where) == 0
    said = [
        json.loads(line.partition("FIGURE ")[2]) for line in capsys.readouterr().out.splitlines() if "FIGURE" in line
    ]
    assert said[:2] == [{"starts": "b"}, {"row": "b", "failed": "ValueError: of one", "s": said[1]["s"]}]
    assert said[3]["ms"] == 1 and len(said) == 4


def test_a_fault_behind_a_row_is_of_that_row_and_a_mistake_between_rows_has_one(ten, capsys, monkeypatch):
    module = importlib.import_module("ten_rows")
    where = module.Where("cuda", True, ROOT, ROOT, "x")
    faults = iter([None, RuntimeError("CUDA error: an illegal memory access")])

    def synchronize(device):
        if error := next(faults):
            raise error

    monkeypatch.setattr(module, "synchronize", synchronize)
    monkeypatch.setattr(module, "forget", lambda device: None)
    assert module.run_rows(iter([("a", dict), ("b", dict), ("c", dict)]), set(), where) == module.AGAIN
    said = [
        json.loads(line.partition("FIGURE ")[2]) for line in capsys.readouterr().out.splitlines() if "FIGURE" in line
    ]
    assert "failed" not in said[1] and "illegal" in said[3]["failed"] and len(said) == 4

    def broken():
        yield "a", dict
        raise ValueError("of a generator")

    assert module.run_rows(broken(), {"a"}, where) == 1
    assert '"behind a", "failed": "ValueError: of a generator"' in capsys.readouterr().out


def test_a_second_call_leaves_the_figures_of_the_first_alone(ten, sitting, tmp_path):
    before = [{"part": "a", "row": "one", "ms": 410}, {"part": "a", "row": "raises", "failed": "x"},
              {"part": "a", "end": "failed: raises"}]  # fmt: skip
    rows, _ = sitting(ten.Part("a", 1, 9, "one raises", blocking=True), before=before)
    assert [(row["row"], row.get("blocking")) for row in rows if row.get("part") == "a" and "row" in row] == [
        ("raises", True)
    ]


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the plans are of PyTorch 2.13")
@pytest.mark.parametrize("name", ["124m: fzero eager", "offload: all"])
def test_the_plans_that_figures_stand_beside_are_those_of_now(ten, name):
    models = importlib.import_module("ten_models")
    plan = json.loads((BENCHMARKS / "ten_plans.json").read_text())["plans"]["h100"][name]
    now = fzero.plan(models.tables()[name], gpu="h100")
    assert plan["peak_bytes"] == now.peak_bytes_per_rank and plan["step_ms"] == pytest.approx(1e3 * now.step_s)


def test_odd_results_of_an_earlier_call_and_unknown_parts_are_named(ten, tmp_path, capsys, monkeypatch):
    path = tmp_path / "results.jsonl"
    path.write_text('{"part": "a", "row": "x"}\n{"part": "a", "ro\n[1]\n')
    assert ten.rows_of(path) == [{"part": "a", "row": "x"}]
    assert "line 2 is no row" in capsys.readouterr().out
    for words in (["--only", "124M"], ["--before", str(tmp_path / "none"), "--failed"]):
        monkeypatch.setattr(sys, "argv", ["ten.py", "--out", str(tmp_path), *words])
        with pytest.raises(SystemExit):
            ten.parse()
        assert words[1] in capsys.readouterr().err


# ---- what it measures ----


def test_the_parts_are_those_of_ten_minutes(ten):
    assert sum(part.need for part in ten.PARTS if not part.beside) < 400
    assert all(part.need <= part.limit <= 120 for part in ten.PARTS)
    files = [file for part in ten.PARTS if isinstance(part.rows, tuple) for file in part.rows if file.endswith(".py")]
    assert len(files) > 12 and all((ROOT / file).is_file() for file in files)
    marked = {
        f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py") if "mark" + ".gpu" in path.read_text()
    }
    assert marked == {word for word in ten.PARTS[[p.name for p in ten.PARTS].index("marked")].rows if word[0] != "-"}
    plans, models = (
        json.loads((BENCHMARKS / "ten_plans.json").read_text())["plans"],
        importlib.import_module("ten_models"),
    )
    assert plans.keys() == {"h100", "h200"} and plans["h100"].keys() == plans["h200"].keys() == models.tables().keys()


def test_every_operation_of_the_registry_has_a_case(ten):
    cases = importlib.import_module("kernel_cases")
    found = {make().op.name for make in cases.cases("cpu", tiny=True)}
    from fzero.kernels import registry

    for file in registry.FILES:
        importlib.import_module(f"fzero.kernels.{file}")
    assert found == {*registry.OPS}


def test_goals_stand_beside_what_was_measured(ten):
    report = ten.ten_report
    empty = report.found_of([])
    lines = report.judged(report.GOALS + report.CHECKS, empty)
    assert len(lines) >= 20 and all(line.endswith("| not measured |") for line in lines)

    def step(part, row, rate, own, ms, **more):
        flop, spread = {"full": 1e14, "causal": 1e14}, {"median": ms, "min": ms, "max": ms}
        figures = {"tokens_per_s": rate, "own_bytes": own, "ms": spread, "issued_ms": spread, "flop_per_s": flop}
        return {"part": part, "row": row, **figures, **more}

    plan = json.loads((BENCHMARKS / "ten_plans.json").read_text())["plans"]["h100"]
    peak, planned = plan["124m: fzero compiled"]["peak_bytes"], plan["124m: fzero compiled"]["step_ms"]
    rows = [
        {"part": "sitting", "row": "begin", "card": "NVIDIA H100 80GB HBM3"},
        step("124m", "fzero compiled", 410e3, 1.01 * peak, 1.2 * planned),
        step("124m", "nn.Module", 405e3, 1.2 * peak, planned),
        step("offload", "none", 40e3, 1, 700.0, reserved_bytes=10, reserved_less_active=5),
        step("offload", "all", 40e3, 1, 1000.0, reserved_bytes=10, reserved_less_active=0),
        *({"part": "machine", "row": f"copy {way}", "bytes_per_s": 5e9} for way in ("H2D", "D2H", "D2D")),
        {"part": "pages", "row": "decode B=32 S=8192: pages", "bytes_per_s": 4e9, "us": 10.0, "repeats": True,
         "alone": True},
        {"part": "pages", "row": "decode B=32 S=8192: contiguous", "us": 12.0},
        {"part": "sanitizer", "row": "acts=host", "failed": "2 races"},
        *({"part": "ops", "row": f"float8 K={k}", "K": k, "tensorwise": e, "rowwise": 1e-3, "experts": 1e-5}
          for k, e in ((64, 1e-3), (4096, 2e-3), (16384, 9e-3))),
        {"part": "ops", "row": "attention K=64: triton", "times plain": 1.1},
        {"part": "ops", "row": "adds wide", "adds wide": False},
        *({"part": "attention", "row": f"{shape}: auto", "form": "triton"} for shape in ("1b", "124m float32")),
        *({"part": "attention", "row": f"{shape}: {form}", "both_tflops": rate, "repeats": form != "cudnn"}
          for shape in ("1b", "124m float32") for form, rate in (("triton", 300.0), ("cudnn", 500.0))),
        {"part": "machine", "row": "free memory", "first": {"available_bytes": 1e11}, "s between": 5.0,
         "later": {"available_bytes": 1.1e11}},
        {"part": "machine", "row": "event wait", "sleeps_us": 60.0, "spins_us": 5.0, "sleeps_less_spins_us": 55.0},
        {"part": "capture", "row": "failed capture", "same losses": True},
    ]  # fmt: skip
    lines = report.judged(report.GOALS + report.CHECKS, report.found_of(rows))
    said = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in lines}
    verdict = {what: text[-1].strip(" |*") for what, text in said.items()}
    assert said["GPT-2 124M, tokens/s >= 402,000 (an H100)"] == ["410,000", "reached |"]
    assert verdict["124M over nn.Module + torch.compile, tokens/s >= 1"] == "reached"
    assert "fzero compiled +20.0%" in said["plans: time within 15%"][0]
    assert verdict["plans: time within 15%"] == "not reached"
    assert verdict["offload all=host over max(link, compute), <= 1.3"] == "reached"  # 7.09e9 bytes take 1,418 ms
    assert verdict["races"] == "not reached" and "2 races" in said["races"][0]
    assert (
        verdict["float8 rowwise: the same"] == "reached"
        and verdict["float8 of experts (tl.dot): the same"] == "reached"
    )
    missed = {what for what, word in verdict.items() if word == "not reached"}
    wrong = {"float8 tensorwise", "a bf16 product", "float32 attention", "free memory", "Event(", "offload: reserved"}
    assert {word for word in wrong if any(what.startswith(word) for what in missed)} == wrong
    assert verdict["attention: auto takes what is fastest and repeats"] == verdict["a failed capture"] == "reached"
    assert "cudnn 500 (other bits)" in said["attention: auto takes what is fastest and repeats"][0]
    over_pages = next(text for what, text in said.items() if what.startswith("pages: "))
    assert over_pages[0].endswith("0.80 of a copy; speed over contiguous: decode B=32 S=8192 1.20")
    assert over_pages[1] == "reached |"
    assert not [what for what, word in verdict.items() if word == "not measured" and what[:2] not in ("Ll", "it", "of")]
    assert "not measured" in verdict["Llama 1B over nn.Module + torch.compile, tokens/s >= 1"]
    assert "| 124m: fzero compiled | 410,000 |" in report.report(rows)


def test_the_page_has_the_command_that_carries_the_wheels():
    page = (ROOT / "docs/gpu.md").read_text().partition("## Ten minutes on one")[2]
    commands = re.findall(r"^.*ten\.py.*--commit.*$", page, re.MULTILINE)
    assert len(commands) == 2 and all(len(command) < 2000 for command in commands)
    assert "--no-index" in commands[0] and ".whl" in commands[0] and "--before" in commands[1]
    assert "/.whl/" in (ROOT / ".gitignore").read_text().splitlines()


# ---- all of it, tiny ----

STEPS = {"ms", "issued_ms", "tokens_per_s", "flop_per_s", "own_bytes", "losses"}
EXPECTED = {  # of each part: its rows, and what all of them have
    "machine": ({"versions", "card", "host", "copy D2D", "copy H2D", "copy D2H", "copy both", "product bf16",
                 "event wait", "free memory"}, set()),
    "doctor": ({"doctor"}, {"said"}),
    "steps": ({"plain", "fp32", "compiled", "captured", "float8", "acts=host", "all=host", "all=nvme"},
              {"losses", "losses on the CPU", "worst difference", "waits", "news"}),
    "1b": ({"fzero", "nn.Module"}, STEPS),
    "profile": ({"124m", "1b"}, {"kernels (name, calls, ms)", "trace_bytes"}),
    "offload": ({"none", "acts", "params", "opt", "all", "all speculate"}, STEPS | {"waits"}),
    "pretrain": ({"pretrain", "resume", "sample", "report"}, {"said"}),
    "capture": ({"batch 1", "batch 4", "batch 8", "failed capture"}, {"same losses"}),
    "sanitizer": ({"acts=host", "all=host"}, {"losses"}),
    "memcheck": ({"norm backward"}, {"said"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.__version__.startswith("2.11."), reason=".ci/oldest runs it, with the versions of a machine with a GPU"
)
def test_every_part_runs_at_tiny_sizes(ten, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, str(BENCHMARKS / "ten.py"), "--device", "cpu", "--tiny", "--seconds", "540"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    run = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, env=environ, cwd=ROOT)
    rows = rows_of(out)
    assert run.returncode == 0, run.stderr[-2000:]
    ends = {row["part"]: row["end"] for row in rows if "end" in row}
    failed = {(row["part"], row["row"]): row["failed"] for row in rows if "failed" in row}
    assert not failed and ends == {part.name: "ok" for part in ten.PARTS}, run.stdout[-3000:]
    found = {key: row for key, row in ten.ten_report.latest(rows).items()}
    for part, (names, figures) in EXPECTED.items():
        assert {name for its, name in found if its == part} == names, part
        for name in names:
            assert figures <= found[part, name].keys(), (part, name)
    contenders = [*importlib.import_module("ten_models").CONTENDERS, "nn.Module"]
    for name in contenders:
        row = found["124m", name]
        assert "needs a GPU" in row if name == "fzero flash" else row.keys() >= STEPS
    for name in {name for part, name in found if part == "ops" and ": " in name}:
        row = found["ops", name]
        assert row["repeats"] and ("error" in row or "differing" in row), name
    ops = {name.partition(": ")[0] for part, name in found if part == "ops"}
    assert {f"float8 K={k}" for k in (64, 4096, 16384)} | {"adds wide"} < ops and len(ops) > 35
    shapes = {name.partition(": ")[0] for part, name in found if part == "attention"}
    assert shapes == {*importlib.import_module("ten_ops").SHAPES}
    paged = {name.partition(": ")[0] for part, name in found if part == "pages"}
    pages = importlib.import_module("ten_pages")
    assert paged == {*pages.CASES} | {f"product M={m}" for m in pages.PRODUCTS}
    assert all(f"laws {name}" in ends for name in ten.LAWS)
    assert any("no CUDA device" in str(row.get("skipped")) for row in rows if row["part"] == "marked")
    assert [row for row in rows if row["part"] == "compile 1b fzero" and row.get("ended") == "a step was made"]
    files = {path.name: path.stat().st_size for path in out.iterdir()}
    assert len(files) <= 8 and all(size < 16 << 20 for size in files.values()), files
    assert {"results.jsonl", "report.md", "log.txt", "metrics.jsonl", "trace-124m.json.gz"} <= files.keys()
    assert rows[0]["commit"] and rows[0]["torch"] and "card" in rows[0]
    assert (
        "| not measured |" in (out / "report.md").read_text() and "machine" in run.stdout.splitlines()[-len(ends) - 1]
    )
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("ten-")]  # its folder is gone
