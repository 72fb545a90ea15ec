"""Commands on the pretend GPU (pretend_gpu.py): each computes there, or has no need of it; and what a GPU cannot do is
one line and exit code 2, before anything is written."""

import contextlib
import re
import types
from pathlib import Path

import chats
import pytest
import torch
from pretend_gpu import pretend

import fzero
from fzero.cli import finetune as finetune_command
from fzero.cli import main
from fzero.cli import pretrain as pretrain_command
from fzero.planner import plan, plan_report
from fzero.run import replay as replay_module
from fzero.run import run_folder
from fzero.run.setup import watchdog

SIZES = [part for size in ("d_model=16", "n_layers=1", "d_ff=24") for part in ("--set", f"model.{size}")]
TINY = ["pretrain", "--model", "mlp-tiny", *SIZES, "--batch", "4", "--micro-batch", "4", "--seq-len", "16"]
TUNE = ["--batch", 2, "--micro-batch", 2, "--seq-len", 96, "--steps", 2, "--precision", "fp32", "--peak-tflops", 1,
        "--set", "train.compiled=false", "--set", "train.kernels=reference", "--set", "train.loggers=[]",
        "--set", "optim.name=adamw", "--set", "precision.fp32_matmul=default", "--prompt", ""]  # fmt: skip


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text.txt in the current folder, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("\n".join(f"line {i}: {i * i}" for i in range(300)))
    return tmp_path / "text.txt"


# ---- what is refused ----


def of_capability(patch, major, minor):
    card = types.SimpleNamespace(
        name="A100", multi_processor_count=108, major=major, minor=minor, total_memory=40 << 30
    )
    patch.setattr(torch.cuda, "get_device_properties", lambda device: card)


REFUSED = {
    "float8": (
        lambda patch: of_capability(patch, 8, 0),
        ["--precision", "bf16_float8"],
        "precision.policy is 'bf16_float8', whose products need compute capability 8.9, and A100 has 8.0; use bf16",
    ),
    "memory": (
        lambda patch: patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 10, 149 << 30)),
        ["--precision", "bf16"],
        "(160.0 GB of GPU 0, Pretend H200 are held by other processes)",
    ),
    "more ranks than GPUs": (
        lambda patch: patch.setenv("LOCAL_RANK", "1"),
        [],
        "2 processes of this host share 1 GPU; a process takes a GPU of its own: start 1 a host",
    ),
    "capture": (lambda patch: None, ["--set", "train.capture=yes"], "train.capture"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_gpu_cannot_do_is_one_line_before_anything_is_written(fz, text, case, monkeypatch):
    plant, flags, line = REFUSED[case]
    with pretend(), monkeypatch.context() as patch:
        plant(patch)
        code, out, err = fz(*TINY, "--data", text, "--device", "cuda", "--out", "run", *flags)
    assert code == 2 and len(err.splitlines()) == 1 and line in err, err
    assert not (text.parent / "run").exists() and "step" not in out


@pytest.mark.parametrize("command", ["pretrain", "finetune", "replay"])
def test_a_rank_that_is_lost_is_noticed_from_the_first_state_on(fz, text, command, monkeypatch):
    watched = []

    @contextlib.contextmanager
    def watch(coordinator):
        watched.append(True)
        yield
        watched.append(False)

    def first(*_, **__):
        raise ValueError(f"watched: {watched}")

    monkeypatch.setattr(watchdog, "watch", watch)
    monkeypatch.setattr(pretrain_command, "prepare", first)
    monkeypatch.setattr(finetune_command, "prepare", first)
    monkeypatch.setattr(replay_module, "replay", first)
    words = {"pretrain": TINY, "finetune": ["finetune", "--data", text], "replay": ["replay", "run", "--step", "1"]}
    code, _, err = fz(*words[command])
    assert code == 2 and "watched: [True]" in err, err


# ---- what computes there ----


def test_the_page_says_of_every_command_what_it_does_with_a_gpu():
    page = (Path(fzero.__file__).parents[1] / "docs/gpu.md").read_text()
    _, _, table = page.partition("| command | with a GPU |")
    named = [re.findall(r"`([a-z]+)`", row.split("|")[1]) for row in table.partition("\n\n")[0].splitlines()[2:]]
    assert sorted(name for row in named for name in row) == sorted(main.cli.commands)
    computing = {"pretrain", "finetune", "sample", "generate", "evaluate", "replay", "bisect", "bench"}
    flagged = {name for name, of in main.cli.commands.items() if any("--device" in p.opts for p in of.params)}
    assert flagged - {"plan", "config"} == computing == {*named[0]}  # there it is a value of a config


@pytest.fixture
def tuned(fz, text):
    """(the numbers of a fine-tuned run on the pretend GPU and on the CPU, the run of the former, what was seen)."""
    base = chats.qwen3_folder(text.with_name("qwen3"))
    words = ["finetune", "--init", base, "--data", chats.chat_file(text.with_name("chat.jsonl")), *TUNE]
    words += ["--lora", "rank=4,on=attn", "--quantize", "nf4"]
    with pretend() as seen:
        code, out, err = fz(*words, "--out", "gpu")
        assert code == 0 and "\ndevice: GPU 0, Pretend H200\n" in out, err
    assert fz(*words, "--out", "cpu", "--device", "cpu")[0] == 0
    return text.with_name("gpu"), seen


@pytest.mark.slow
def test_a_run_that_was_tuned_on_a_gpu_is_reported_sampled_listed_and_exported_without_one(fz, tuned):
    run, seen = tuned
    assert not seen.races and not seen.freed
    ours, theirs = ([*run_folder.read_metrics(run.with_name(name))] for name in ("gpu", "cpu"))
    names = ("loss", "grad_norm", "lr", "num_tokens")
    assert [[row[n] for n in names] for row in ours] == [[row[n] for n in names] for row in theirs] and len(ours) == 2
    assert run_folder.read_config(run).device == "cuda"
    code, out, err = fz("report", run)
    assert code == 0 and "GPU 0, Pretend H200" in (run / "report/report.md").read_text(), (out, err)
    for words in (["ckpt", "ls", run], ["ckpt", "verify", run], ["export", run, "--out", run.with_name("merged")]):
        code, _, err = fz(*words)
        assert code == 0, (words, err)
    assert fz("import", run.with_name("merged"), "--out", run.with_name("import"))[0] == 0
    prompt = ["--prompt", "1+1", "--max-new-tokens", "3"]
    with pretend() as seen:
        code, there, err = fz("sample", run.with_name("import"), *prompt)
        assert code == 0 and sum(seen.kernels.values()) > 100 and not seen.races, err
    assert fz("sample", run.with_name("import"), *prompt)[1] == there  # auto: the CPU


def test_a_plan_of_a_machine_that_was_not_measured_is_of_its_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pretend():
        found = plan.device_for("here")
    assert (found.kind, found.name) == ("cuda", "Pretend H200, not measured")
    assert (found.processors, found.capability, found.memory_bytes) == (132, (9, 0), 149 << 30)
    assert not plan_report.has_rates(found) and found.host_capacity_bytes(1) > 1 << 30
    assert plan.device_for("here").kind == "cpu"


@pytest.mark.slow
def test_a_plan_of_the_gpu_here_is_of_a_run_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pretend():
        here = plan.device_for("here")
    found = plan.plan("llama-tiny", gpu=here, settings={"train.compiled": False, "offload": "opt=host"})
    assert found.peak_bytes_per_rank > 0 and found.host_peak_bytes > 0 and found.step_s is None
