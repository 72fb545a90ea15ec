"""A run in a process of somebody's leaves that process as it was, so that later numbers there have the same bits."""

import gc
import json
import locale
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import forked
import launched
import numpy
import pytest
import torch

from fzero.run import Options, from_table, loop, machine, settings_restored
from fzero.run.setup.process_settings import VARIABLES

# Set where something is first imported, for all that it compiles later.
IMPORTED = {"TRITON_DEFAULT_FP_FUSION", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "PYTEST_CURRENT_TEST"}


def snapshot():
    """What of this process a run might change, by name."""
    loggers = logging.root.manager.loggerDict.items()
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "products": (machine.fp32_matmul(), getattr(machine.onednn_switch(), "fp32_precision", "")),
        "flags": (
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "dtype": torch.get_default_dtype(),
        "gradients": (torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.is_inference_mode_enabled()),
        "random numbers": (
            torch.get_rng_state().tolist(),
            random.getstate(),
            repr(numpy.random.get_state()),
        ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook, sys.gettrace()),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "warnings": (list(warnings.filters), warnings.showwarning),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "loggers": {name: one.disabled for name, one in loggers if isinstance(one, logging.Logger)},
        "folders": (os.getcwd(), tempfile.gettempdir(), list(sys.path)),
        "variables": {name: value for name, value in os.environ.items() if name not in IMPORTED},
        "limits": (resource.getrlimit(resource.RLIMIT_NOFILE), sys.getrecursionlimit(), sys.getswitchinterval()),
        "cores": os.sched_getaffinity(0),
        "locale": locale.setlocale(locale.LC_ALL),
        "garbage": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "distributed": torch.distributed.is_initialized(),
    }


def changes(before):
    """What is not as it was, by name; of loggers, those that were there."""
    after = snapshot()
    after["loggers"] = {name: value for name, value in after["loggers"].items() if name in before["loggers"]}
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


@pytest.fixture
def odd_settings():
    """Settings that no run chooses here."""
    switch, threads = machine.onednn_switch(), torch.get_num_threads()
    products = None if switch is None else switch.fp32_precision
    torch.set_num_threads(3)
    if switch is not None:
        switch.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if switch is not None:
            switch.fp32_precision = products


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_settings_are_restored(odd_settings, monkeypatch, error):
    monkeypatch.setenv(VARIABLES[-1], "1")
    for name in VARIABLES[:-1]:
        monkeypatch.delenv(name, raising=False)
    before, (soft, hard) = snapshot(), resource.getrlimit(resource.RLIMIT_NOFILE)

    @settings_restored()
    def run():
        torch.set_num_threads(2)
        machine.set_fp32_matmul("default")
        os.environ.update(dict.fromkeys(VARIABLES, "0"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        assert len(changes(before)) >= 4
        if error is not None:
            raise error

    for _ in range(2):
        if error is None:
            run()
        else:
            with pytest.raises(error):
                run()
        assert not changes(before)


def table_of(folder, **more):
    """The table of a small run."""
    launched.write_text(folder)
    train = {"steps": 2, "batch": 2, "micro_batch": 1, "compiled": False, "loggers": []}
    data = {"path": str(folder / "text.txt"), "seq_len": 8}
    return {"preset": "llama-tiny", "device": "cpu", "data": data, "train": train | more}


@pytest.mark.parametrize("ends", ["well", "by an error", "refused"])
def test_a_run_from_python_leaves_the_process_as_it_was(odd_settings, tmp_path, monkeypatch, ends):
    """As on a machine where it takes its share of the cores, as several ranks do."""
    resolve = machine.resolve_here

    def resolve_and_share(config):
        machine.torch.set_num_threads(2)
        return resolve(config)

    monkeypatch.setattr(machine, "resolve_here", resolve_and_share)

    def log(step, row):
        assert torch.get_num_threads() == 2 and machine.fp32_matmul() == "default"
        if ends == "by an error":
            raise RuntimeError("enough")

    table = table_of(tmp_path) | {"precision": {"policy": "fp32", "fp32_matmul": "default"}}
    table["host_memory_gb"] = 1e-6 if ends == "refused" else 8.0
    options, before = Options(say=lambda line: None, sample="line", peak_flops=1e12, log=log), snapshot()
    if ends == "well":
        assert loop.train_run(tmp_path / "run", from_table(table), options=options) == 0
    else:
        with pytest.raises(RuntimeError if ends == "by an error" else ValueError):
            loop.train_run(tmp_path / "run", from_table(table), options=options)
    assert not changes(before)


@pytest.mark.slow
def test_commands_in_a_process_leave_it_as_it_was(odd_settings, fz, tmp_path):
    run, table = tmp_path / "run", table_of(tmp_path, eval_every=1, checkpoint_every=1)
    (tmp_path / "config.json").write_text(json.dumps(table))
    said = [[{"role": "user", "content": f"line {i}"}, {"role": "assistant", "content": "yes"}] for i in range(40)]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in said))
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    small = ("--peak-tflops", 1, "--prompt", "")
    tuned = ("--steps", 2, "--batch", 2, "--micro-batch", 1, "--set", "train.compiled=false", "--seq-len", 32, *small)
    tuned = ("--chat-template", tmp_path / "chat.jinja", *tuned)
    lines = [
        ("pretrain", "--config", tmp_path / "config.json", "--out", run, *small),
        ("pretrain", "--config", tmp_path / "config.json", "--out", run, *small),  # refused: it is there
        ("pretrain", "--resume", "--out", run, "--steps", 3, *small),
        ("finetune", "--init", run, "--data", tmp_path / "said.jsonl", "--out", tmp_path / "tuned", *tuned),
        ("finetune", "--init", run, "--data", tmp_path / "none.txt", "--out", tmp_path / "worse", *small),  # refused
        ("sample", run, "--prompt", "line", "--max-new-tokens", 2),
        ("sample", tmp_path / "none", "--prompt", "line"),  # refused
        ("export", run, "--out", tmp_path / "exported"),
        ("replay", run, "--step", 2),
        ("doctor",),
    ]
    fz("doctor")  # what it imports first sets a variable of Inductor's, and sympy a filter of warnings
    ended = []
    for line in lines:
        before = snapshot()
        before.pop("streams")  # which the fixture sets anew
        ended.append(fz(*line)[::2])
        assert not changes(before), line
    assert [code for code, _ in ended] == [0, 2, 0, 0, 2, 0, 2, 0, 0, 0], ended


RANK = """
import sys
sys.path[:0] = [{tests!r}]
from test_process_settings import *
import fzero.run.runner.loop
torch.set_num_threads(3)
folder, table = Path({folder!r}), from_table(json.loads({table!r}))
options, before = Options(say=lambda line: None, sample="", peak_flops=1e12), snapshot()
for number in range(2):  # a second run in the same processes
    assert loop.train_run(folder / f"run-{{number}}", table, options=options) == 0
    assert not changes(before), changes(before)
try:
    loop.train_run(folder / "broken", table, options=options._replace(log=lambda step, row: 1 / 0))
except Exception:  # on the other rank, that this one is gone
    assert set(changes(before)) <= {{"distributed"}}, changes(before)
    print("ended")
"""


@pytest.mark.slow
def test_runs_of_two_ranks_leave_their_processes_as_they_were(tmp_path):
    table = json.dumps(table_of(tmp_path) | {"mesh": {"dp": 2}})
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(tests=str(Path(__file__).parent), folder=str(tmp_path), table=table))
    line = [f"{forked.programs()}/torchrun", *launched.STANDALONE, "--nproc-per-node", "2", str(script)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("ended") == 2, done.stdout + done.stderr
