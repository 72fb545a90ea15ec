"""Traces of earlier plans: equal answers, every change a miss, damaged entries replaced, a bounded folder."""

import json
import os

import pytest
import torch

from fzero import plan
from fzero.core import Target, compile_cache
from fzero.kernels import tuning
from fzero.offload import config_file
from fzero.planner import device_for, extrapolate, is_cached, resolve_for, trace_cache
from fzero.planner import plan as planning
from fzero.planner.plan_report import report_of

DEVICE = device_for("h100")
SIZES = {"dp": 2}
SETTINGS = {"train.compiled": False, "train.batch": 8, "train.micro_batch": 2, "model.n_layers": 1, "zero": 3}
CONFIG = resolve_for(planning.config_for("llama-tiny", SETTINGS), DEVICE)
ASKED = (CONFIG, SIZES, 0, DEVICE.target)


@pytest.fixture(scope="module")
def trace():
    return extrapolate.trace(CONFIG, SIZES, target=DEVICE.target)


def never():
    raise AssertionError("traced anew")


def test_the_second_plan_of_a_question_is_equal_and_not_traced(trace, tmp_path):
    assert not is_cached(*ASKED, tmp_path)
    assert trace_cache.cached_trace(lambda: trace, *ASKED, tmp_path) is trace
    assert is_cached(*ASKED, tmp_path)
    again = trace_cache.cached_trace(never, *ASKED, tmp_path)
    assert again == trace
    assert report_of(again, DEVICE).to_json() == report_of(trace, DEVICE).to_json()
    assert str(report_of(again, DEVICE)) == str(report_of(trace, DEVICE))
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]  # and no part of one


CHANGES = {
    "config": lambda patch: (planning.config_for(CONFIG, {"train.micro_batch": 4}), SIZES, 0, DEVICE.target),
    "seed": lambda patch: (planning.config_for(CONFIG, {"train.seed": 7}), SIZES, 0, DEVICE.target),
    "mesh": lambda patch: (CONFIG, {"dp": 4}, 0, DEVICE.target),
    "axis": lambda patch: (CONFIG, {"tp": 2}, 0, DEVICE.target),
    "rank": lambda patch: (CONFIG, SIZES, 1, DEVICE.target),
    "target": lambda patch: (CONFIG, SIZES, 0, device_for("a100").target),
    "kind": lambda patch: (CONFIG, SIZES, 0, Target("cpu")),
    "package": lambda patch: patch.setattr(trace_cache, "package_digest", lambda: "of another version"),
    "torch": lambda patch: patch.setattr(torch, "__version__", "2.13.1"),
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 64),
    "compiler": lambda patch: patch.setattr(trace_cache, "have_compiler", lambda: "none"),
    "environment": lambda patch: patch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_any_input_misses(what, monkeypatch):
    before = trace_cache.question(*ASKED)
    changed = CHANGES[what](monkeypatch) or ASKED
    assert trace_cache.question(*changed) != before


def test_what_a_trace_does_not_depend_on_hits(monkeypatch):
    before = trace_cache.question(*ASKED)
    monkeypatch.setenv("FZERO_PLAN_CACHE", "/elsewhere")
    assert trace_cache.question(CONFIG, {"tp": 1, "dp": 2}, 0, DEVICE.target) == before


def test_an_edit_of_the_package_changes_its_digest(tmp_path, monkeypatch):
    (tmp_path / "core").mkdir()
    file = tmp_path / "core" / "x.py"
    monkeypatch.setattr(compile_cache, "PACKAGE", tmp_path)
    digests = []
    for text in ("a = 1", "a = 2", "a = 1"):
        file.write_text(text)
        digests.append(compile_cache.package_digest.__wrapped__())
    file.rename(tmp_path / "x.py")
    digests.append(compile_cache.package_digest.__wrapped__())
    assert digests[0] == digests[2] and len(set(digests)) == 3


def changed(text, *keys, to):
    table = json.loads(text)
    at = table
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = to
    return json.dumps(table)


DAMAGED = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no object": lambda text: "[1, 2]",
    "a number": lambda text: changed(text, "answer", "num_params", to=1),
    "an event less": lambda text: changed(text, "answer", "events", to=json.loads(text)["answer"]["events"][1:]),
    "no trace": lambda text: "{}",
    "another form": lambda text: changed(text, "answer", to=None),
    "another question": lambda text: changed(
        text, "question", to=trace_cache.question(CONFIG, SIZES, 1, DEVICE.target)
    ),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_entry_is_a_miss_and_is_replaced(how, trace, tmp_path):
    trace_cache.cached_trace(lambda: trace, *ASKED, tmp_path)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    path.write_text(DAMAGED[how](text))
    assert not is_cached(*ASKED, tmp_path)
    made = []
    assert trace_cache.cached_trace(lambda: made.append(1) or trace, *ASKED, tmp_path) == trace and made == [1]
    assert path.read_text() == text


def test_the_oldest_entries_go_when_there_are_too_many_bytes(trace, tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.json").write_text("x" * 100)
        os.utime(tmp_path / f"{i}.json", (1000 + i, 1000 + i))
    (tmp_path / "0.1.part").write_text("x" * 100)
    os.utime(tmp_path / "0.1.part", (900, 900))
    trace_cache.remove_oldest(tmp_path, 350)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.json", "2.json", "3.json"]
    trace_cache.cached_trace(lambda: trace, *ASKED, tmp_path)
    kept = compile_cache.entry_path(trace_cache.question(*ASKED), tmp_path)
    os.utime(kept, (10, 10))
    trace_cache.cached_trace(never, *ASKED, tmp_path)  # whose use makes it the youngest
    trace_cache.remove_oldest(tmp_path, kept.stat().st_size)
    assert list(tmp_path.iterdir()) == [kept]


def test_a_folder_that_cannot_be_written_is_a_warning_that_names_it(trace, tmp_path):
    folder = tmp_path / "plans"
    folder.write_text("a file")
    with pytest.warns(UserWarning, match=r"is not kept \(.*plans"):
        assert trace_cache.cached_trace(lambda: trace, *ASKED, folder) is trace


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FZERO_PLAN_CACHE", "0")
    assert trace_cache.cache_folder() is None
    monkeypatch.setenv("FZERO_PLAN_CACHE", "/some/where")
    assert str(trace_cache.cache_folder()) == "/some/where"
    monkeypatch.setenv("FZERO_PLAN_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert trace_cache.cache_folder() == tmp_path / "fzero" / "plans"


def test_the_command_says_when_an_earlier_plan_answers(fz, trace, tmp_path, monkeypatch):
    monkeypatch.setenv("FZERO_PLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(extrapolate, "trace", lambda *args, **options: trace)
    flags = [f"--set={name}={str(value).lower()}" for name, value in SETTINGS.items()]
    args = ["plan", "--model", "llama-tiny", "--mesh", "dp=2", "--gpu", "h100", *flags]
    code, out, err = fz(*args, "--no-cache")
    assert (code, list(tmp_path.iterdir())) == (0, []) and err.startswith("first estimate")
    code, first, err = fz(*args)
    assert (code, first) == (0, out) and err.startswith("first estimate") and len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(extrapolate, "trace", lambda *args, **options: never())
    code, second, err = fz(*args)
    assert (code, second) == (0, out)
    assert err == f"fzero: the trace of an earlier plan in {tmp_path} answers this; --no-cache traces anew\n"


def test_a_plan_of_a_script_keeps_no_trace_unless_it_is_told_where(trace, tmp_path, monkeypatch):
    monkeypatch.setenv("FZERO_PLAN_CACHE", str(tmp_path))
    monkeypatch.setattr(extrapolate, "trace", lambda *args, **options: trace)
    report = plan(CONFIG, SIZES, gpu=DEVICE)
    assert list(tmp_path.iterdir()) == []
    assert plan(CONFIG, SIZES, gpu=DEVICE, cache=tmp_path) == report
    assert len(list(tmp_path.iterdir())) == 1


def test_a_user_without_a_home_has_caches_and_settings_in_the_temporary_folder(monkeypatch, tmp_path):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "FZERO_PLAN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.home", nowhere)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for folder in (trace_cache.cache_folder(), tuning.kernel_folder(), config_file().parent):
        assert folder is not None and folder.is_relative_to(tmp_path)
