"""The command line as a new user meets it: runs, resumes, and one clear line for every mistake."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked
import pytest
import torch
from launched import TIMED

import fzero
from fzero import checkpoint, models
from fzero.checkpoint import huggingface
from fzero.cli import main, process
from fzero.cli import pretrain as pretrain_module
from fzero.core import prng
from fzero.report import curves
from fzero.run import config_table, run_folder, signals
from fzero.run.setup import corpus

TINY = "--model mlp-tiny --steps 8 --batch 4 --micro-batch 1 --seq-len 16 --precision fp32"
SETTINGS = ("train.compiled=false", "precision.fp32_matmul=default", "train.eval_batches=2", "train.eval_every=4")


def sets(*settings):
    return [part for setting in settings for part in ("--set", setting)]


PEAK = ["--peak-tflops", "1"]  # so that nothing is measured
QUIET = [*TINY.split(), *PEAK, *sets(*SETTINGS)]
SMALL = sets("model.n_layers=2", "model.d_model=16", "model.d_ff=24", "model.dropout=0.1")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FZERO_TRACEBACK", raising=False)
    lines = [f"line {i}: " + " ".join(str(i * k) for k in range(i % 9)) for i in range(400)]
    Path("text.txt").write_text("\n".join(lines))


def rows(run, *without):
    timed = TIMED | set(without)
    return [
        {name: value for name, value in row.items() if name not in timed} for row in run_folder.read_metrics(Path(run))
    ]


def leaves(run):
    return {
        n: leaf["digest"]
        for n, leaf in checkpoint.read_manifest(checkpoint.latest(Path(run) / "checkpoints"))["leaves"].items()
    }


def ok(result):
    code, out, err = result
    assert code == 0 and err == "", err
    return out


# -- runs


def test_a_run_from_a_text_file(fz, pictures, monkeypatch):
    monkeypatch.setattr(curves, "write_pictures", pictures)
    out = ok(fz("pretrain", *QUIET, "--data", "text.txt", "--prompt", "line "))
    run = Path("runs/mlp-tiny-1")
    assert {path.name for path in run.iterdir()} == {
        *("config.json", "environment.json", "metrics.jsonl", "checkpoints", "data", "loss.png", "throughput.png"),
        *("attempts.jsonl", "ledger.json", "memory.json", "samples.jsonl"),
    } | ({"tensorboard"} if (run / "tensorboard").exists() else set())
    written = list(run_folder.read_metrics(run))
    assert [row["step"] for row in written] == list(range(1, 9))
    assert [row["step"] for row in written if "val_loss" in row] == [4, 8]
    assert all(
        isinstance(row["loss"], float) and row["tokens"] == row["step"] * 64 and row["mfu"] > 0 for row in written
    )
    assert written[-1]["loss"] < written[0]["loss"]
    assert f"validation loss {written[-1]['val_loss']:.4f}" in out and "\nline " in out
    (sample,) = run_folder.read_lines(run / "samples.jsonl")
    assert (
        (sample["step"], sample["prompt"]) == (8, "line ")
        and sample["text"].startswith("line ")
        and sample["text"] in out
    )
    for name in ("loss.png", "throughput.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG") and (run / name).stat().st_size > 5000
    resolved = run_folder.read_config(run)
    assert config_table.from_json(config_table.to_json(resolved)) == resolved
    assert resolved.precision.policy == "fp32" and resolved.train.compiled is False
    assert checkpoint.steps(run / "checkpoints") == [8]
    # The recorded config makes the same run again, under the next free name.
    ok(fz("pretrain", "--config", run / "config.json", *PEAK, "--prompt", ""))
    assert rows("runs/mlp-tiny-1") == rows(run)
    assert not Path("runs/mlp-tiny-2/samples.jsonl").exists()
    assert leaves("runs/mlp-tiny-2") == leaves(run) and rows("runs/mlp-tiny-2") == rows(run)


def test_a_prepared_corpus_and_its_vocabulary(fz):
    out = ok(fz("data", "prepare", "text.txt", "--out", "corpus", "--tokenizer", "bpe:300", "--val-fraction", "0.1"))
    assert "bpe:300: 300 tokens" in out
    out = ok(fz("pretrain", *QUIET, "--data", "corpus", "--out", "run", "--prompt", "line "))
    assert "model.vocab_size is 300 in place of 256" in out and "per byte" in out
    assert run_folder.read_config(Path("run")).model.vocab_size == 300
    last = list(run_folder.read_metrics(Path("run")))[-1]
    text = Path("text.txt").stat().st_size
    meta = json.loads(Path("corpus/meta.json").read_text())
    tokens = sum(split["tokens"] - split["documents"] for split in meta["splits"].values())
    assert last["val_loss_per_byte"] == pytest.approx(last["val_loss"] * tokens / text)
    assert fz("sample", "run", "--prompt", "line 1", "--max-new-tokens", "20")[1].startswith("line 1")
    code, _, err = fz("pretrain", *QUIET, "--data", "corpus", "--out", "run-2", "--set", "model.vocab_size=256")
    assert code == 2 and "add --set model.vocab_size=300" in err and not Path("run-2").exists()


EXACT = {
    "mlp": QUIET,
    "mlp fp16": [*QUIET, "--precision", "fp16"],
    "llama bf16, average": [
        *QUIET,
        "--model",
        "llama-tiny",
        *SMALL,
        "--precision",
        "bf16",
        *sets("train.ema_decay=0.9"),
    ],
    "gpt2 muon, remat": [*QUIET, "--model", "gpt2-tiny", *SMALL, "--remat", "full", *sets("optim.name=muon")],
}
OFTEN = ("mlp",)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in EXACT]
)
def test_stopped_and_resumed_is_the_uninterrupted_run_bitwise(fz, name):
    args = ["pretrain", *EXACT[name], "--data", "text.txt", "--prompt", ""]
    ok(fz(*args, "--out", "whole"))
    out = ok(fz(*args, "--out", "parts", "--stop-at", 3))
    assert "stopped after step 3 of 8; resume with: fzero pretrain --out parts --resume" in out
    # As if killed after step 5, in the middle of a line: what is behind the checkpoint is made again.
    with open("parts/metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss": 0.0}\n{"step": 5, "lo')
    assert "resuming parts at step 3 of 8" in ok(fz("pretrain", "--out", "parts", "--resume", *PEAK, "--stop-at", 5))
    ok(fz("pretrain", "--out", "parts", "--resume", *PEAK, "--prompt", ""))
    assert rows("parts") == rows("whole") and len(rows("parts")) == 8
    assert leaves("parts") == leaves("whole")
    assert run_folder.read_config(Path("parts")) == run_folder.read_config(Path("whole"))


@pytest.mark.slow
def test_other_seeds_and_rates_are_other_runs(fz):
    for name, args in {"a": [], "b": ["--seed", "1"], "c": ["--lr", "0.01"]}.items():
        ok(fz("pretrain", *QUIET, "--data", "text.txt", "--prompt", "", "--out", name, *args))
    assert len({json.dumps(rows(name)) for name in "abc"}) == 3


def test_micro_batches_change_nothing_but_rounding(fz):
    for name, size in (("a", "1"), ("b", "4")):
        ok(
            fz(
                "pretrain",
                *QUIET,
                "--precision",
                "fp64",
                "--micro-batch",
                size,
                "--data",
                "text.txt",
                "--prompt",
                "",
                "--out",
                name,
            )
        )
    for a, b in zip(rows("a", "val_loss"), rows("b", "val_loss")):
        assert a == pytest.approx(b, rel=1e-12)


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow)]
)
def test_a_signal_ends_a_run_after_its_step(fz, number, expected):
    ended = threading.Event()

    def send():
        while len(list(run_folder.read_metrics(Path("run")))) < 3 and not ended.wait(0.01):
            pass
        if not ended.is_set():
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    before = signal.getsignal(number)
    code, out, err = fz("pretrain", *QUIET, "--steps", 100000, "--data", "text.txt", "--out", "run")
    ended.set()
    step = len(rows("run"))
    assert code == expected and signal.getsignal(number) is before, err
    assert f"stopped after step {step} of 100000; resume with: fzero pretrain --out run --resume" in out
    assert checkpoint.steps(Path("run/checkpoints")) == [step]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_an_import_ends_the_command_after_it(number, monkeypatch):
    """A module that swallows the exception of a handler, as PyTorch does around numpy, would stay half made."""
    kill = f"    os.kill(os.getpid(), {int(number)})\n    whole = sum(range(1000))\n"
    body = f"try:\n{kill}except BaseException:\n    pass\n"
    Path("half_made.py").write_text(f"import os\n{body}")
    monkeypatch.syspath_prepend(os.getcwd())
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.signal(signal.SIGINT, signals.interrupt)
        with pytest.raises((signals.Stopped, KeyboardInterrupt)), signals.raise_on_sigterm():
            import half_made

            assert half_made.whole == 499500
            time.sleep(5)
    finally:
        signal.signal(signal.SIGINT, before)
        sys.modules.pop("half_made", None)
    assert not issubclass(signals.Stopped, Exception)  # `except Exception` is for failures


ENTRIES = {  # the ways to start a command: its words, a module that it imports early, and one that it imports late
    "module": (("-m", "fzero", "models"), "tomllib", "click"),
    "script": (("-c", "from fzero.cli.start import start; start()", "models"), "tomllib", "click"),
    "aot": (("-m", "fzero.cli.aot"), "argparse", "torch"),
}
# As torch does around its import of numpy.
SWALLOWS = """import os, time
try:
    os.kill(os.getpid(), {number})
    time.sleep(9)
except BaseException:
    pass
"""


@pytest.mark.parametrize(
    "entry", ["module", *(pytest.param(each, marks=pytest.mark.slow) for each in ("script", "aot"))]
)
def test_a_signal_while_a_command_is_imported_is_one_line(entry, tmp_path):
    """Of the first rank alone; a module that is imported early, and one late, send it to themselves."""
    words, early, late = ENTRIES[entry]
    ctrl_c, term = signal.SIGINT, signal.SIGTERM
    for name, number, rank in ((early, ctrl_c, "0"), (late, ctrl_c, "0"), (late, ctrl_c, "1"), (late, term, "0")):
        folder = tmp_path / f"{name}{number}{rank}"
        folder.mkdir()
        (folder / f"{name}.py").write_text(SWALLOWS.format(number=int(number)))
        places = {"PYTHONPATH": f"{folder}:{Path(fzero.__file__).parents[1]}", "RANK": rank}
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, env={**os.environ, **places}, timeout=60
        )
        code, said = (130, "fzero: interrupted\n" * (rank == "0")) if number == signal.SIGINT else (-number, "")
        assert (done.returncode, done.stdout, done.stderr) == (code, "", said), name


def test_ctrl_c_in_a_command_and_behind_its_end(tmp_path, fz, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(main.cli.commands["models"], "callback", interrupted)
    code, out, err = fz("models")
    assert (code, out, err) == (130, "", "fzero: interrupted\n")
    late = "import atexit, os; atexit.register(lambda: os.kill(os.getpid(), 2)); "
    late += "from fzero.cli.start import start; start()"
    done = subprocess.run([sys.executable, "-c", late, "--version"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(Path(fzero.__file__).parents[1])})  # fmt: skip
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "") and "fzero" in done.stdout


def test_the_second_interrupt_is_at_once():
    with signals.stop_signals() as received, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGINT]
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_a_run_goes_on_without_a_reader(capsys, monkeypatch):
    lines = []

    def show(line):
        lines.append(line)
        if len(lines) > 1:
            raise BrokenPipeError

    monkeypatch.setattr(process, "drop", lambda stream: lines.append(f"no {stream is sys.stdout and 'stdout'}"))
    say = process.without_reader(show)
    say("one")
    say("two")
    assert lines == ["one", "two", "no stdout"]
    assert capsys.readouterr().err == "fzero: nobody reads the standard output any more; the run goes on\n"


@pytest.mark.slow
def test_the_reader_of_a_run_may_end(fz):
    args = ["pretrain", *QUIET, "--steps", "60", "--data", "text.txt", "--prompt", "", "--out", "unread"]
    piped = f"{shlex.join([f'{forked.programs()}/fzero', *args])} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True)
    assert done.returncode == 0 and "the run goes on" in done.stderr and done.stdout.count("\n") == 1
    assert len(list(run_folder.read_metrics(Path("unread")))) == 60
    again = piped.replace("unread", "both").replace(" | head", " 2>&1 | head")
    assert subprocess.run(["bash", "-c", again], capture_output=True).returncode == 0
    assert len(list(run_folder.read_metrics(Path("both")))) == 60


def test_a_prompt_that_does_not_fit_is_refused_before_the_first_step(fz):
    long = "x" * 5000
    code, _, err = fz("pretrain", *QUIET, "--steps", "2", "--data", "text.txt", "--prompt", long, "--out", "long")
    assert (code, err.startswith("fzero: error: --prompt has 5000 tokens, and the model ")) == (2, True), err
    assert not list(run_folder.read_metrics(Path("long")))


def test_steps_without_a_row_are_said_when_a_run_goes_on(fz):
    args = ["pretrain", *QUIET, "--prompt", ""]
    assert fz(*args, "--steps", "4", "--data", "text.txt", "--out", "gap")[0] == 0
    rows = Path("gap/metrics.jsonl").read_text().splitlines(keepends=True)
    Path("gap/metrics.jsonl").write_text("".join(rows[:1] + rows[3:]))
    out = fz("pretrain", "--out", "gap", "--resume", "--steps", "5", "--prompt", "")[1]
    assert "2 steps (2 to 3) have no row in gap/metrics.jsonl; the state is whole" in out


def test_a_text_of_a_config_has_no_nul(fz):
    Path("nul.toml").write_text('preset = "mlp-tiny"\n[train]\ncheckpoints = "a\\u0000b"\n')
    code, _, err = fz("config", "--config", "nul.toml")
    assert code == 2 and "train.checkpoints is 'a\\x00b'; a text has no NUL" in err


@pytest.mark.slow
def test_killed_and_resumed_is_the_uninterrupted_run(fz):
    args = [
        "pretrain",
        *QUIET,
        "--steps",
        "60",
        *sets("train.checkpoint_every=20"),
        "--data",
        "text.txt",
        "--prompt",
        "",
    ]
    process = subprocess.Popen([f"{forked.programs()}/fzero", *args, "--out", "killed"], stdout=subprocess.DEVNULL)
    while process.poll() is None and (
        not Path("killed/metrics.jsonl").exists() or len(list(run_folder.read_metrics(Path("killed")))) < 25
    ):
        time.sleep(0.005)
    os.kill(forked.fork_of(process.pid), signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    ok(fz("pretrain", "--out", "killed", "--resume", *PEAK, "--prompt", ""))
    ok(fz(*args, "--out", "whole"))
    assert rows("killed") == rows("whole") and leaves("killed") == leaves("whole")


def test_a_run_killed_before_its_first_checkpoint_starts_again(fz):
    ok(fz("pretrain", *QUIET, "--data", "text.txt", "--prompt", "", "--out", "run"))
    expected = leaves("run")
    (Path("run/checkpoints/step-00000008/manifest.json")).unlink()
    assert "resuming run at step 0" in ok(fz("pretrain", "--out", "run", "--resume", *PEAK, "--prompt", ""))
    assert leaves("run") == expected and len(rows("run")) == 8


def test_a_damaged_checkpoint_is_passed_over_by_name(fz):
    args = ["pretrain", *QUIET, "--data", "text.txt", "--prompt", "", "--set", "train.checkpoint_every=2"]
    ok(fz(*args, "--out", "run", "--stop-at", 4))
    damage("run", 4)
    out = ok(fz("pretrain", "--out", "run", "--resume", *PEAK, "--prompt", ""))
    assert "passed over run/checkpoints/step-00000004" in out and "resuming run at step 2" in out
    ok(fz(*args, "--out", "whole"))
    assert rows("run") == rows("whole") and leaves("run") == leaves("whole")


def damage(run, step):
    path = next(Path(run, "checkpoints", f"step-{step:08d}", "arrays", "params", "blocks").rglob("c.*"))
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_the_standard_library_is_prepared_once(fz, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: "lib")  # and not the real one: that takes seconds
    Path("lib").mkdir()
    for name in "abcdefgh":
        Path("lib", f"{name}.py").write_text(f"def {name}(x):\n    return x\n" * 30)
    monkeypatch.setattr("fzero.data.sources.sysconfig.get_path", lambda name: "lib")
    assert "preparing Python's standard library" in ok(fz("pretrain", *QUIET, "--prompt", "", "--out", "a"))
    assert "preparing" not in ok(fz("pretrain", *QUIET, "--prompt", "", "--out", "b", "--stop-at", 4))
    assert len(list(Path("cache/fzero").iterdir())) == 1
    next(Path("cache/fzero").iterdir()).rename("gone")  # a cache may be emptied at any time
    assert "preparing" in ok(fz("pretrain", "--out", "b", "--resume", *PEAK, "--prompt", ""))
    assert rows("a") == rows("b")


def test_sample_writes_the_same_text_for_the_same_seed(fz):
    ok(fz("pretrain", *QUIET, "--data", "text.txt", "--out", "run", "--prompt", "", "--set", "train.ema_decay=0.9"))
    texts = [
        ok(fz("sample", "run", "--prompt", "line", "--max-new-tokens", "30", "--seed", seed)) for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("line")
    for flags in (["--ema", "--temperature", "0"], ["--top-k", "3", "--top-p", "0.9"]):
        assert ok(fz("sample", "run", "--prompt", "line", "--max-new-tokens", "30", *flags)).startswith("line")
    code, _, err = fz("sample", "run", "--prompt", "line", "--temperature", "0", "--top-k", "3")
    assert code == 2 and err.startswith("fzero: error: top_k is 3 and temperature 0") and err.count("\n") == 1
    code, _, err = fz("sample", "run", "--prompt", "x" * 2000)
    assert code == 2 and "2000 tokens and 200 more do not fit max_len=1024" in err


def test_import_train_on_and_export(fz):
    sizes = models.LlamaConfig(256, 64, 16, 1, 2, 1, 24)
    params = models.init_params(models.build(sizes), prng.key(0))
    huggingface.save_hf("theirs", sizes, params)
    assert "no tokenizer" in ok(fz("import", "theirs", "--out", "imported"))
    flags = [flag for flag in QUIET if flag not in ("--model", "mlp-tiny")]
    ok(fz("pretrain", *flags, "--init", "imported", "--lr", "0", "--data", "text.txt", "--out", "run", "--prompt", ""))
    ok(fz("export", "run", "--out", "ours"))
    back, ours = huggingface.load_hf("ours")
    assert back == sizes and torch.equal(ours["blocks"]["attn"]["w_q"], params["blocks"]["attn"]["w_q"])
    code, _, err = fz("sample", "imported", "--prompt", "x")
    assert code == 2 and "this run has no tokenizer" in err
    code, _, err = fz("pretrain", "--resume", "--out", "imported")
    assert code == 2 and "--init imported" in err
    code, _, err = fz("pretrain", "--init", "imported", "--model", "llama-tiny")
    assert code == 2 and "leave out --model" in err


def test_doctor_and_help(fz):
    out = ok(fz("doctor"))
    for word in ("python", "torch", "cores", "memory", "compiler", "products", "fzero will use", "precision"):
        assert word in out
    for args in ([], ["pretrain"], ["sample"], ["data"], ["data", "prepare"], ["import"], ["export"], ["doctor"]):
        assert "Usage: fzero" in ok(fz(*args, "--help"))


def test_help_is_quick():
    """It waits for none of the libraries whose import takes long."""
    command = [sys.executable, "-X", "importtime", "-m", "fzero", "--help"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in said.splitlines()
        if line.startswith("import time:")
    }
    assert "click" in imported
    assert not imported & {
        "torch",
        "numpy",
        "tokenizers",
        "matplotlib",
        "tensorstore",
        "transformers",
        "jax",
        "safetensors",
    }


# -- mistakes

RUN = ["pretrain", *QUIET, "--data", "text.txt", "--out", "new"]
MISTAKES = {
    "unknown command": (["pretrian"], "No such command 'pretrian'"),
    "unknown flag": ([*RUN, "--stepz", "3"], "No such option"),
    "flag without value": (["pretrain", "--steps"], "--steps"),
    "word for a number": ([*RUN, "--steps", "ten"], "'ten' is not a valid integer"),
    "no steps": ([*RUN, "--steps", "0"], "train.steps is 0; it must be at least 1"),
    "stop at nothing": ([*RUN, "--stop-at", "0"], "--stop-at is 0; it must be at least 1"),
    "unknown model": ([*RUN, "--model", "lama-tiny"], "'lama-tiny' is not a preset (did you mean llama-tiny?)"),
    "unknown key": ([*RUN, "--set", "train.stepps=3"], "unknown key 'train.stepps' (did you mean steps?)"),
    "no setting": ([*RUN, "--set", "train.steps"], "is not of the form a.b=value"),
    "said twice": ([*RUN, "--set", "train.steps=3"], "both set train.steps; give one of them"),
    "wrong type": ([*RUN, "--set", "train.log_every=often"], "train.log_every is 'often'; it must be a whole number"),
    "indivisible": ([*RUN, "--micro-batch", "3"], "train.micro_batch is 3 and does not divide train.batch=4"),
    "long sequences": ([*RUN, "--seq-len", "2000"], "data.seq_len is 2000 and the model takes 1024"),
    "unknown precision": ([*RUN, "--precision", "bf61"], "precision.policy is 'bf61' (did you mean bf16?)"),
    "unknown remat": ([*RUN, "--remat", "half"], "remat is 'half'; it must be none, full"),
    "stage": ([*RUN, "--zero", "5"], "zero is 5; it must be at least 0 and below 4"),
    "mesh text": ([*RUN, "--mesh", "four"], "--mesh 'four' is not of the form dp=4,tp=2"),
    "mesh axis": ([*RUN, "--mesh", "dq=2"], "mesh.dq is 2 (did you mean dp?)"),
    "mesh of too many": ([*RUN, "--mesh", "dp=4"], "asks for 4 processes"),
    "negative rate": ([*RUN, "--lr", "-1"], "optim.lr is -1.0; it must be at least 0"),
    "no peak": ([*RUN, "--peak-tflops", "0"], "--peak-tflops is 0.0"),
    "no config": ([*RUN, "--config", "no.toml"], "no.toml: no such file"),
    "bad config": ([*RUN, "--config", "bad.toml"], "bad.toml: not TOML"),
    "no data": (["pretrain", *QUIET, "--out", "new", "--data", "none.txt"], "none.txt: no such file or folder"),
    "empty data": (["pretrain", *QUIET, "--out", "new", "--data", "empty.txt"], "empty.txt: is empty"),
    "binary data": (["pretrain", *QUIET, "--out", "new", "--data", "binary.txt"], "binary.txt: contains NUL bytes"),
    "empty folder": (["pretrain", *QUIET, "--out", "new", "--data", "folder"], "folder: no .txt"),
    "short data": (["pretrain", *QUIET, "--out", "new", "--data", "short.txt"], "tokens are fewer than one window of "
    "seq_len + 1 = 17"),
    "too large": (["pretrain", "--model", "llama-70b", "--out", "new"], "llama-70b (70.6B parameters) needs"),
    "run exists": (["pretrain", *QUIET, "--out", "full"], "full: exists and is not empty"),
    "run is a file": (["pretrain", *QUIET, "--out", "text.txt"], "text.txt: exists and is a file"),
    "resume of nothing": (["pretrain", "--resume", "--out", "none"], "none: no such folder"),
    "resume of no run": (["pretrain", "--resume", "--out", "full"], "full: is not a run"),
    "resume of what": (["pretrain", "--resume"], "--resume needs the run folder"),
    "resume changed": (
        ["pretrain", "--resume", "--out", "full", "--steps", "9", "--set", "model.n_layers=3"],
        "leave out --set model.n_layers",
    ),
    "resume in another precision": (
        ["pretrain", "--resume", "--out", "full", "--set", "precision.policy=bf16"],
        "leave out --set precision.policy",
    ),
    "sample of nothing": (["sample", "none", "--prompt", "x"], "none: no such folder"),
    "no prompt": (["sample", "full"], "--prompt"),
    "prepare nothing": (["data", "prepare", "--out", "new"], "no source given"),
    "prepare over": (["data", "prepare", "text.txt", "--out", "full"], "full: already exists"),
    "import of nothing": (["import", "none", "--out", "new"], "none: no such folder"),
    "export of nothing": (["export", "none", "--out", "new"], "none: no such folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_changes_nothing(fz, name):
    files = {"bad.toml": b"x = ", "empty.txt": b"", "binary.txt": b"a\0b", "short.txt": b"ab cd", "full/notes": b"mine"}
    for path, content in files.items():
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(content)
    Path("folder").mkdir()
    before = {path: path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}
    args, message = MISTAKES[name]
    code, out, err = fz(*args)
    assert code == 2
    assert err.startswith("fzero: error: ") and err.count("\n") == 1 and message in err
    assert "Traceback" not in out + err
    assert {path: path.read_bytes() if path.is_file() else None for path in Path().rglob("*")} == before


def test_mistakes_with_a_run(fz):
    ok(fz("pretrain", *QUIET, "--data", "text.txt", "--prompt", "", "--out", "run", "--stop-at", "4"))
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}

    def refused(message, *args):
        code, _, err = fz(*args)
        assert code == 2 and err.startswith("fzero: error: ") and err.count("\n") == 1 and message in err
        assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before

    refused("run: exists and is not empty; resume it with --resume", "pretrain", *QUIET, "--out", "run")
    refused("--stop-at 4: the run has made 4 steps already", "pretrain", "--resume", "--out", "run", "--stop-at", "4")
    refused("keeps no average", "sample", "run", "--prompt", "x", "--ema")
    ok(fz("data", "prepare", "text.txt", "--out", "other", "--seed", "1"))
    for path in Path("other").iterdir():
        Path("run/data", path.name).write_bytes(path.read_bytes())
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    refused("is not the corpus this run began with", "pretrain", "--resume", "--out", "run")
    damage("run", 4)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    refused("every checkpoint is damaged: leaf ", "sample", "run", "--prompt", "x")
    Path("run/config.json").write_text(Path("run/config.json").read_text()[:100])
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    refused("run/config.json: not JSON", "pretrain", "--resume", "--out", "run")


def test_a_complete_run_is_not_resumed(fz):
    ok(fz("pretrain", *QUIET, "--data", "text.txt", "--prompt", "", "--out", "run"))
    code, _, err = fz("pretrain", "--resume", "--out", "run")
    assert code == 2 and "run: is complete: it has made its 8 steps" in err


def test_a_gradient_that_stays_not_finite_ends_the_run(fz):
    settings = sets("guard.max_skipped=3", "precision.loss_scale.init=1e38", "precision.loss_scale.window=1000000")
    args = [*QUIET, "--precision", "fp16", *settings]
    code, _, err = fz("pretrain", *args, "--data", "text.txt", "--out", "run")
    assert (
        code == 2
        and err == "fzero: error: the gradient has not been finite for 3 steps in a row (to step 3); lower --lr\n"
    )
    assert [row["skipped"] for row in rows("run")] == [True] * 3


def test_tracebacks_on_request():
    with pytest.raises(ValueError, match="is not a preset"):
        main.main(["--traceback", "pretrain", "--model", "none"])


def test_a_terminal_has_a_progress_bar(fz, monkeypatch):
    monkeypatch.setattr(pretrain_module, "bar_or_lines", lambda: contextlib.nullcontext((True, process.say)))
    code, out, err = fz("pretrain", *QUIET, "--data", "text.txt", "--prompt", "", "--out", "run")
    assert code == 0 and "step 4/8" not in out
    assert "8/8" in err and "loss " in err and "val " in err and "tokens/s" in err and "MFU" in err


def test_tensorboard_has_the_same_numbers(fz):
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ok(fz("pretrain", *QUIET, "--data", "text.txt", "--prompt", "", "--out", "run", "--stop-at", "3"))
    ok(fz("pretrain", "--resume", *PEAK, "--prompt", "", "--out", "run"))
    board = EventAccumulator("run/tensorboard")
    board.Reload()
    written = list(run_folder.read_metrics(Path("run")))
    assert [(e.step, e.value) for e in board.Scalars("loss")] == [
        (row["step"], pytest.approx(row["loss"])) for row in written
    ]
