"""Text from elsewhere is read in one place (fzero/core/text_parsing.py), and one place ends every command
(fzero/cli/process.py)."""

import ast
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import click
import pytest
from foreign_cases import READERS, documents, import_model, model_folder

import fzero
from fzero.cli import main, process
from fzero.core import text_parsing
from fzero.data import Chat, labels_of, read_chat
from fzero.run import run_folder

ROOT = Path(fzero.__file__).parent
# Calls of a parser outside of core/text_parsing.py, and why: the text was made by this program a moment ago.
OWN = {
    "checkpoint/manifest.py": 1,  # what `to_bytes` made, compared with its checksum; numbers have any size
    "checkpoint/save_state.py": 1,  # another rank's message
    "cli/checkpoint.py": 0,
    "comm/messages.py": 1,  # messages of ranks
    "offload/nvme.py": 2,  # round trips
    "planner/calibrate/disk.py": 1,  # the output of fio
    "planner/search_result.py": 3,  # round trips
    "run/runner/checkpoint_list.py": 1,  # a round trip
    "run/measure/step_records.py": 1,  # the profiler's trace
    "run/setup/coordinator.py": 3,  # messages of ranks
    "run/setup/watchdog.py": 1,
}


def parsers_in(path):
    """The number of calls of json.load, json.loads, tomllib.load and tomllib.loads."""
    text = path.read_text()
    if not re.search(r"\bloads?\b", text):
        return 0
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    names = {ast.unparse(call) for call in calls if isinstance(call, ast.Attribute)}
    parsers = names & {f"{module}.{name}" for module in ("json", "tomllib") for name in ("load", "loads")}
    return sum(ast.unparse(call) in parsers for call in calls)


def test_foreign_text_is_parsed_in_one_place():
    found = {path.relative_to(ROOT).as_posix(): parsers_in(path) for path in ROOT.rglob("*.py")}
    found.pop("core/text_parsing.py")
    assert {name: n for name, n in found.items() if n} == {name: n for name, n in OWN.items() if n}


DEEP = 100_000
HOSTILE = {
    "deep lists": "[" * DEEP + "]" * DEEP,
    "deep tables": '{"a":' * DEEP + "1" + "}" * DEEP,
    "open lists": "[" * DEEP,
    "65 deep": '{"a":' * 65 + "1" + "}" * 65,
    "above 64 bits": '{"step": 18446744073709551616}',
    "below 64 bits": '{"step": -9223372036854775809}',
    "5,000 digits": '{"step": ' + "9" * 5000 + "}",
    "half a character": '{"\\ud800": 1}',
    "half a character in a text": '{"a": ["\\udfff"]}',
    "not UTF-8": b'{"a": "\xff"}',
    "a list": "[]",
    "a number": "3",
    "nothing": "",
    "null": "null",
}
JSON_FILES = [
    (name, file)
    for name, reader in READERS.items()
    for file in reader.files
    if file.endswith(".json") and name not in ("hf-gpt2", "hf-mixtral", "tokenizer")
]


# One of each kind in the default tier.
OFTEN = {("run", "run/environment.json"), ("checkpoint", "c/step-00000003/manifest.json"), ("corpus", "data/meta.json")}
JSON_CASES = [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.slow) for case in JSON_FILES]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """{name: a folder with a reader's sound files}."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            READERS[name].make(made[name])
        return made[name]

    return folder


@pytest.mark.parametrize(("name", "file"), JSON_CASES)
def test_every_reader_refuses_hostile_text_by_the_name_of_the_file(sound, name, file):
    path = sound(name) / file
    before = path.read_bytes()
    try:
        for text in HOSTILE.values():
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            with pytest.raises(ValueError, match=re.escape(path.name)):
                READERS[name].read(sound(name))
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(("name", "file"), JSON_CASES)
def test_no_reader_waits_for_a_fifo(sound, name, file):
    path = sound(name) / file
    aside = path.rename(path.with_name("aside"))
    os.mkfifo(path)
    opened = threading.Timer(
        20, lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    )  # ends a reader that waits
    opened.start()
    try:
        begin = time.monotonic()
        with contextlib.suppress(ValueError):  # a file that may be missing is passed over
            READERS[name].read(sound(name))
        assert time.monotonic() - begin < 15
    finally:
        opened.cancel()
        path.unlink()
        aside.rename(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = " + "[" * DEEP, "nested more than 64 deep"),
        ("a." * DEEP + "b = 1", "more than 200 dots"),
        ("a." * 70 + "b = 1", "nested more than 64 deep"),
        ("x = 99999999999999999999", "does not fit into 64 bits"),
        ("x = " + "9" * 5000, "not TOML"),
        ("x = 1\n" * 300_000, "at most 1,048,576"),
    ],
)
def test_toml_within_the_same_bounds(text, message):
    with pytest.raises(ValueError, match=f"^some: .*{message}|^some:1: .*{message}"):
        text_parsing.parse_toml(text, "some")


def test_what_is_within_the_bounds_is_read():
    value = {"a": [[18446744073709551615, -9223372036854775808, 1e300, True, None, "é\U0001f600"]], "b": {}}
    assert text_parsing.parse_json(json.dumps(value), "some") == value
    deep = '{"a":' * 63 + "1" + "}" * 63
    assert text_parsing.parse_json(deep, "some") == json.loads(deep)
    assert text_parsing.parse_toml("# " + "." * 500 + "\nx = [1.5, 2]", "some") == {"x": [1.5, 2]}


def test_whole_numbers_that_nobody_reads_may_be_of_any_size(tmp_path):
    """`save_pretrained` of transformers writes a model_max_length of 10^30 into tokenizer_config.json."""
    most = {"model_max_length": int(1e30), "deep": [{"a": -(10**400)}]}
    for name in ("config.json", "tokenizer_config.json"):
        model_folder("llama")(tmp_path / name)
        folder = tmp_path / name / "model"
        there = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        there |= {"chat_template": "{{ messages }}"} if name != "config.json" else {}
        (folder / name).write_text(json.dumps({**there, "model_max_length": 10**30}))
        assert import_model(folder.parent) and read_chat(folder) == (Chat("{{ messages }}") if "tok" in name else None)
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "some", **most}))
    assert documents("t.jsonl")(tmp_path) == ["some"]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"label": "some", **most}) + '\n{"label": "b"}')
    assert labels_of(tmp_path / "chat.jsonl") == ("b", "some")
    assert text_parsing.parse_json(json.dumps(most), "some", wide=True) == most
    for kind in (int, float, int | None):
        with pytest.raises(ValueError, match=r"^some: model_max_length is 1000.* does not fit into 64 bits"):
            text_parsing.expect_entries(most, {"model_max_length": kind}, "some")


def test_texts_of_too_many_bytes_or_values(monkeypatch):
    monkeypatch.setattr(text_parsing, "MAX_VALUES", 100)
    with pytest.raises(ValueError, match="some: more than 100 values"):
        text_parsing.parse_json_value("[" + "[]," * 100 + "1]", "some")
    monkeypatch.setattr(text_parsing, "LARGEST", 100)
    with pytest.raises(ValueError, match="some: 101 bytes of JSON; at most 100"):
        text_parsing.parse_json_value(" " * 100 + "1", "some")


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        ({}, int, "some: k is missing"),
        ({"k": True}, int, "k is True; it must be a whole number"),
        ({"k": 1.0}, int, "k is 1.0; it must be a whole number"),
        ({"k": float("nan")}, float, "k is nan; it must be a finite number"),
        ({"k": "1"}, int | None, "k is '1'; it must be a whole number or null"),
        ({"k": "x" * 999}, dict, r"k is 'x{76}\.\.\.; it must be a table"),
    ],
)
def test_expect_entries(value, hint, message):
    with pytest.raises(ValueError, match=message):
        text_parsing.expect_entries(value, {"k": hint}, "some")
    text_parsing.expect_entries({"k": None, "f": 1}, {"k": int | None, "f": float, "other?": str}, "some")


# ---- environment.json and the environment of a process


def test_an_environment_file_without_its_entries(fz, sound):
    folder = sound("run") / "run"
    path = folder / "environment.json"
    before = path.read_bytes()
    try:
        commands = (("export", folder, "--out", "hf"), ("report", folder), ("replay", folder, "--step", "1"))
        for text in ("{}", '{"tokenizer": 3, "eos": 0}', '{"tokenizer": "bytes", "eos": 0, "corpus": 1}'):
            path.write_text(text)
            for command in commands:
                code, _, err = fz(*command)
                assert code == 2 and err.count("\n") == 1 and "environment.json: " in err, err
        for name in run_folder.TRAINED:  # a run on a corpus
            path.write_text(json.dumps({**json.loads(before), name: None}))
            with pytest.raises(ValueError, match=rf"environment\.json: {name} is None"):
                run_folder.expect_trained(run_folder.read_environment(folder), folder)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; it must be a whole number from 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2'"),
        ({"WORLD_SIZE": "9" * 30}, "WORLD_SIZE is '999"),
        ({"WORLD_SIZE": "²"}, "WORLD_SIZE is '²'"),
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE is not set; torchrun sets both"),
        ({"RANK": "2", "WORLD_SIZE": "1"}, "RANK is 2 and WORLD_SIZE is 1"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE is not set, so torchrun did not start this process"),
        ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK is '1.5'"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999'"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "TORCHELASTIC_RUN_ID is 'none' and WORLD_SIZE is not set"),
    ],
)
def test_the_environment_of_torchrun_is_checked_before_anything(fz, monkeypatch, tmp_path, variables, message):
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, _, err = fz("pretrain", "--steps", "1", "--data", "nowhere")
    assert code == 2 and message in err and err.count("\n") == 1 and "is gone" not in err, err
    assert not Path("runs").exists()


# ---- the end of a command


class Panic(BaseException):
    """As extensions raise it: no Exception."""


@pytest.mark.parametrize(
    "error",
    [KeyError("x"), TypeError("a\nb"), RecursionError("deep"), Panic("range\x1b[2J"), AttributeError("\ud800")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_whatever_escapes_is_one_line_that_names_the_traceback(fz, monkeypatch, tmp_path, error):
    @click.command()
    def fails():
        raise error

    monkeypatch.setitem(main.cli.commands, "doctor", fails)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, err = fz("doctor")
    assert code == process.FAULT and out == "" and err.count("\n") == 1 and "\x1b" not in err
    assert err.startswith(f"fzero: error: {type(error).__name__}")
    path = Path(re.search(r"the traceback is in (\S+)$", err)[1])
    text = path.read_text()
    assert "Traceback" in text and type(error).__name__ in text and fzero.__version__ in text
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    code, _, err = fz("doctor")
    assert code == process.FAULT and err.count("\n") == 1 and "FZERO_TRACEBACK=1" in err


@pytest.mark.parametrize("error", [ValueError("bad"), OSError(28, "No space left on device", "f"), MemoryError()])
def test_known_errors_are_one_line_and_two(fz, monkeypatch, error):
    @click.command()
    def fails():
        raise error

    monkeypatch.setitem(main.cli.commands, "doctor", fails)
    code, _, err = fz("doctor")
    assert (code, err) == (process.MISTAKE, f"fzero: error: {str(error) or 'MemoryError'}\n")


def test_a_message_of_any_length_and_content_is_a_line_of_a_terminal():
    assert process.escape_line("a\n\tb\x1b[31m\u202e\ud800é") == "a b\\x1b[31m\\u202e\\ud800é"
    assert len(process.escape_line("x" * 10**6)) == 4000


LATE = "import sys, time; sys.argv = ['fzero', '--help']; time.sleep(0.3); import fzero.__main__"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (f'"$PYTHON" -c "{LATE}" | true; exit ${{PIPESTATUS[0]}}', 1, ""),
        (f'"$PYTHON" -c "{LATE}" > /dev/full', 2, "No space"),
    ],
    ids=("closed pipe", "full disk"),
)
def test_an_output_that_cannot_be_written(command, code, message):
    places = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=places)
    assert done.returncode == code and message in done.stderr, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.stderr.count("\n") == bool(message)


CLOSED = (
    "import os; from fzero.cli.start import open_streams; open_streams(); print('a line'); "
    "import sys; print('another', file=sys.stderr); assert sys.stdin.read() == ''; assert os.dup(0) > 2; print(6)"
)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_process_without_standard_streams(closed, tmp_path):
    """As schedulers and daemons start them; then the first files to be opened would get what is printed."""
    places = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(CLOSED)} {closed}"
    done = subprocess.run(["bash", "-c", command], input="", capture_output=True, text=True, env=places)
    assert done.returncode == 0, done.stderr
    out, err = "a line\n6\n" * (">&-" not in closed.replace("2>&-", "")), "another\n" * ("2>&-" not in closed)
    assert (done.stdout, done.stderr) == (out, err)


@pytest.mark.slow
def test_a_run_without_standard_streams_has_its_files_alone(tmp_path):
    (tmp_path / "t.txt").write_text("a text to learn\n" * 200)
    line = f"exec {shlex.quote(sys.executable)} -m fzero pretrain --data t.txt --out run --steps 2 --batch 2"
    line += " --micro-batch 2 --seq-len 16 --set train.compiled=false --model llama-tiny <&- >&- 2>&-"
    places = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    assert subprocess.run(["bash", "-c", line], env=places, cwd=tmp_path).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]


# ---- names are checked before torch is imported

WRONG_NAMES = {
    ("pretrain", "--model", "lama-tiny"): "'lama-tiny' is not a preset (did you mean llama-tiny?)",
    ("pretrain", "--set", "preset=nothing"): "'nothing' is not a preset",
    ("plan", "--model", "gpt2-124"): "'gpt2-124' is not a preset (did you mean gpt2-124m?)",
    ("plan", "--gpu", "h10"): "device 'h10' is not known (did you mean h100?)",
    ("plan", "--gpu", "nowhere.json"): "nowhere.json: no such file",
    ("plan", "--vary", "gpu=h100,h900"): "device 'h900' is not known",
    ("plan", "--vary", "model=llama-1b,lama"): "'lama' is not a preset",
    ("plan", "--vary", "zzz=1"): "--vary zzz: nothing of that name",
    ("plan", "--vary", "micro-bach=1"): "(did you mean micro_batch?)",
    ("plan", "--search", "--world-size", "2", "--set", "mesh.cp=2"): "--set gives mesh.cp=2, and a search decides",
    ("plan", "--mesh", "dp"): "is not of the form dp=4,tp=2",
    ("pretrain", "--set", "train.steps"): "is not of the form a.b=value",
    ("pretrain", "--config", "nowhere.toml"): "nowhere.toml: no such file",
}


def test_wrong_names_are_refused_before_torch_is_imported():
    """In one process, whose last line says whether torch is there."""
    code = f"""
import sys
from fzero.cli import main
for given in {list(WRONG_NAMES)!r}:
    try:
        main.main(list(given))
    except SystemExit as ended:
        assert ended.code == 2, given
assert not {{"torch", "numpy"}} & set(sys.modules), "heavy"
"""
    places = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=places)
    assert done.returncode == 0, done.stderr[-2000:]
    for line, message in zip(done.stderr.splitlines(), WRONG_NAMES.values(), strict=True):
        assert message in line, line


def test_the_names_known_without_torch_are_all_names():
    from fzero.cli.flags import SHORTHANDS
    from fzero.cli.name_checks import config_keys, preset_names
    from fzero.cli.plan import check_choice
    from fzero.models import PRESETS
    from fzero.run import RunConfig

    assert preset_names() == tuple(PRESETS)
    assert config_keys() == list(RunConfig.__dataclass_fields__)
    for key in (*config_keys(), *SHORTHANDS, "gpu", "model.n_layers"):
        check_choice(SHORTHANDS.get(key, key))
