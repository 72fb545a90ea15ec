"""The first answer of `fzero plan`, by closed forms, beside the plan that traces the step."""

import dataclasses
import json

import pytest
import torch

from fzero import models, plan
from fzero.planner import closed_forms, device_for, resolve_for
from fzero.planner import plan as planning
from fzero.planner.step_trace import fake_nvme
from fzero.run import build, memory_on_device
from fzero.run.measure.memory_check import expect_fitting_memory
from fzero.sharding import fake_mesh

FULL = {"train.remat": "full"}
# what: (model, mesh, device, settings); the published bounds hold for them
CASES = {
    "llama-8b, 64 H200": ("llama-8b", {"dp": 64}, "h200", {"zero": 3, "train.batch": 64}),
    "llama-8b, full": ("llama-8b", {"dp": 8}, "h100", {"zero": 3, "train.batch": 8, **FULL}),
    "llama-8b, tp and sequence": (
        "llama-8b",
        {"dp": 8, "tp": 2},
        "h100",
        {"zero": 3, "train.batch": 32, "train.micro_batch": 2, "sequence": True},
    ),
    "llama-8b, tp": ("llama-8b", {"dp": 8, "tp": 2}, "h100", {"zero": 3, "train.batch": 16}),
    "llama-8b, inputs in parts": (
        "llama-8b",
        {"dp": 2, "tp": 8},
        "h100",
        {"zero": 3, "train.batch": 16, "train.micro_batch": 4, "partition_activations": True, **FULL},
    ),
    "llama-8b, offloaded": (
        "llama-8b",
        {"dp": 8},
        "h100",
        {"zero": 3, "train.batch": 8, "offload": "params=host,opt=host", **FULL},
    ),
    "llama-8b, 8bit": ("llama-8b", {"dp": 8}, "h100", {"zero": 2, "train.batch": 8, "optim.states": "8bit"}),
    "llama-1b, stage 1": ("llama-1b", {"dp": 8}, "h100", {"zero": 1, "train.batch": 32, "train.micro_batch": 2}),
    "llama-70b": ("llama-70b", {"dp": 64}, "h200", {"zero": 3, "train.batch": 64, **FULL}),
    "gpt2-1.5b": ("gpt2-1.5b", {"dp": 8}, "a100", {"zero": 2, "train.batch": 64, "train.micro_batch": 4}),
    "gpt2-124m": (
        "gpt2-124m",
        {},
        "h100",
        {"train.batch": 16, "train.micro_batch": 8, "train.compiled": False},
    ),
    "llama-8b, cp": (
        "llama-8b",
        {"cp": 4, "tp": 2},
        "h100",
        {"zero": 3, "train.batch": 2, "train.micro_batch": 1, "data.seq_len": 65536, "model.max_len": 65536, **FULL},
    ),
    "qwen3-8b": ("qwen3-8b", {"dp": 16}, "h100", {"zero": 3, "train.batch": 16}),
    "qwen2.5-7b, every:4": (
        "qwen2.5-7b",
        {"dp": 16},
        "h100",
        {"zero": 3, "train.batch": 16, "train.remat": "every:4"},
    ),
    "llama-8b, LoRA": ("llama-8b", {"dp": 8}, "h100", {"zero": 3, "train.batch": 8, "lora": 16}),
    "llama-8b, LoRA, full": ("llama-8b", {"dp": 8}, "h100", {"zero": 3, "train.batch": 8, "lora": 16, **FULL}),
    "llama-8b, QLoRA, full": (
        "llama-8b",
        {"dp": 1},
        "4090",
        {"zero": 0, "train.batch": 1, "lora": 16, "codes": "nf4", **FULL},
    ),
    "mixtral-8x7b": ("mixtral-8x7b", {"dp": 64}, "h200", {"zero": 3, "train.batch": 64, "train.compiled": False}),
    "mixtral-8x7b, ep": (
        "mixtral-8x7b",
        {"ep": 8, "dp": 8},
        "h200",
        {"zero": 3, "train.batch": 64, "train.micro_batch": 1, "train.compiled": False},
    ),
}


def both(model, mesh, gpu, settings):
    device = device_for(gpu)
    settings = dict(settings)
    rank, kind = settings.pop("lora", 0), settings.pop("codes", "")
    config = resolve_for(planning.config_for(model, settings), device)
    if rank:
        base = models.build(config.model)
        config = dataclasses.replace(
            config, model=models.lora(models.quantized(base, kind) if kind else base, rank).config
        )
    return closed_forms.first_estimate(config, planning.sizes_of(config, mesh), device), plan(config, mesh, gpu=device)


# What others have as well: recomputation, tensor parallelism without sequences, a dense model, LoRA, another size,
# states of fewer bits.
RARE = {"llama-8b, full", "llama-8b, tp", "gpt2-1.5b", "qwen3-8b", "llama-8b, LoRA"}
RARE |= {"llama-8b, inputs in parts", "llama-8b, cp", "llama-1b, stage 1", "llama-70b", "llama-8b, 8bit"}
RARE |= {what for what in CASES if "cp" in what} - {"llama-8b, dp2 x cp8, full"}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.exhaustive if what in RARE else pytest.mark.slow) for what in CASES]
)
def test_it_is_within_the_published_bounds_of_the_traced_plan(what):
    first, traced = both(*CASES[what])
    assert first.state_bytes == traced.state_bytes
    assert first.state_elsewhere == traced.state_elsewhere
    assert first.capacity_bytes == traced.capacity_bytes
    assert first.tokens_per_step == traced.tokens_per_step
    assert first.peak_bytes == pytest.approx(traced.peak_bytes_per_rank, rel=closed_forms.MEMORY_BOUND)
    assert first.step_s == pytest.approx(traced.step_s, rel=closed_forms.TIME_BOUND)


SMALL = {"train.compiled": False, "train.batch": 8, "train.micro_batch": 2, "model.n_layers": 2, "data.seq_len": 1024}


@pytest.mark.parametrize("more", [{}, {"offload": "opt=host:0.5"}, {"lora": 8}, {"lora": 8, "codes": "nf4"}], ids=str)
def test_states_are_exact_and_memory_is_near(more):
    first, traced = both("gpt2-124m", {"dp": 2}, "h100", {**SMALL, "zero": 3, **more})
    assert (first.state_bytes, first.state_elsewhere) == (traced.state_bytes, traced.state_elsewhere)
    assert first.peak_bytes == pytest.approx(traced.peak_bytes_per_rank, rel=closed_forms.MEMORY_BOUND)


GPU = torch.device("cuda", 0)
EARLIER = {("mlp-tiny", 1): (), ("gpt2-124m", 1): pytest.mark.slow}
GRID = [
    pytest.param(
        preset,
        mesh,
        {"zero": zero, "train.remat": remat},
        0.85,
        marks=EARLIER.get((preset, zero), pytest.mark.exhaustive),
    )
    for preset, mesh in (
        ("gpt2-124m", {"dp": 4}),
        ("llama-tiny", {"dp": 2}),
        ("mlp-tiny", {"dp": 2}),
        ("llama-1b", {"dp": 2, "tp": 2}),
        ("gpt2-tiny", {}),
        ("mixtral-tiny", {"dp": 2}),
    )
    for zero in range(4)
    for remat in ("none", "full")
]
GRID += [
    pytest.param("gpt2-124m", mesh, {"zero": 1, **settings}, least, marks=pytest.mark.exhaustive)
    for mesh, settings, least in (
        ({"pp": 2, "dp": 2}, {}, 0.85),
        ({"pp": 2}, {"pipeline.schedule": "gpipe"}, 0.85),
        ({"dp": 2}, {"offload": "opt=host"}, 0.85),
        # Gradients that are being copied to the host are not in the closed form.
        ({"dp": 2}, {"zero": 3, "offload": "params=host,opt=host,grads=host", "train.remat": "full"}, 0.6),
        ({"dp": 2}, {"offload": "acts=host", "train.remat": "full"}, 0.85),
        ({"dp": 2}, {"zero": 2, "train.remat": "every:4"}, 0.85),
        ({"dp": 2}, {"reduce": "canonical"}, 0.8),
        ({"tp": 2}, {"zero": 0, "sequence": True}, 0.85),
    )
]


@pytest.mark.parametrize(("preset", "mesh", "settings", "least"), GRID)
def test_a_run_whose_plan_fits_is_not_refused_and_its_memory_is_near(preset, mesh, settings, least):
    """What a run's own check counts is from `least` to 1.15 of the traced step, and never so much more that it refuses
    a GPU which has room for that step."""
    device = device_for("h100")
    config = resolve_for(
        planning.config_for(preset, {"train.compiled": False, "optim.name": "adamw", **settings}), device
    )
    report = plan(config, mesh, gpu=device)
    job = build.build(config, fake_mesh(mesh), nvme=fake_nvme(config), device=GPU)
    assert least < sum(memory_on_device(job)) / report.peak_bytes_per_rank < 1.15
    expect_fitting_memory(job, report.peak_bytes_per_rank, report.host_peak_bytes)


def test_a_device_without_rates_has_no_times():
    device = dataclasses.replace(device_for("h100"), flops={}, measured=False)
    first = closed_forms.first_estimate(resolve_for(planning.config_for("llama-tiny"), device), {}, device)
    assert first.step_s is None and "tokens/s" not in str(first)


def test_the_command_prints_it_before_the_plan_and_apart_from_it(fz):
    args = ["--model", "llama-tiny", "--gpu", "h100", "--set", "train.compiled=false", "--set", "model.n_layers=1"]
    code, out, err = fz("plan", *args, "--json")
    report = json.loads(out)
    assert code == 0 and err.startswith("first estimate (closed forms, refined below): states are exact; ")
    assert report["fits"] and "should fit" in err
    assert fz("plan", *args, "--memory-gb", "2.16")[2].count("too much") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-targets", "/attn/"], "--lora-targets needs --lora-rank"),
        (["--lora-rank", "4", "--vary", "zero=0,1"], "--lora-rank is for one plan; leave out --vary"),
        (["--lora-rank", "4"], "optim.name is muon"),
        (["--quantize", "nf4"], "--quantize needs --lora-rank"),
        (["--set", "optim.name=adamw", "--lora-rank", "4", "--quantize", "nf8"], "kind is 'nf8'"),
        (["--set", "optim.name=adamw", "--lora-rank", "0"], "--lora-rank is 0; it must be at least 1"),
        (
            ["--set", "optim.name=adamw", "--lora-rank", "4", "--lora-targets", "/nothing/"],
            "lora: targets '/nothing/' matches no leaf",
        ),
    ],
)
def test_lora_flags_that_make_no_sense_are_refused_by_name(fz, flags, message):
    code, out, err = fz("plan", "--model", "llama-tiny", "--gpu", "h100", *flags)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_a_plan_of_lora_has_states_of_its_factors_alone(fz):
    args = ["--model", "llama-tiny", "--gpu", "h100", "--set", "train.compiled=false", "--set", "model.n_layers=1"]
    args += ["--set", "optim.name=adamw", "--precision", "bf16", "--lora-rank", "8", "--lora-targets", "/attn/w_[qv]$"]
    code, out, _ = fz("plan", *args, "--json")
    report = json.loads(out)
    trained = 8 * (256 + 256) + 8 * (256 + 128)  # of w_q and w_v: rank x (in + out)
    state = report["state_bytes"]
    assert code == 0 and report["config"]["model"]["family"] == "lora"
    assert (state["master"], state["grads"]) == (4 * trained, 4 * trained)
    assert state["opt"] == 2 * 4 * trained + 8 and state["params"] == 2 * report["num_params"]
    assert any("LoRA of rank 8" in note for note in report["notes"])
