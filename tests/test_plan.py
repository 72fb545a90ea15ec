"""What a user of the planner sees: the report, its page and JSON, the command line, the fourteen questions, the papers' formulas."""

import json
import re
from pathlib import Path

import pytest

import fzero
from fzero import models
from fzero.core import pytree
from fzero.planner import devices, estimate, format, questions, variants
from fzero.planner import plan as report
from fzero.run import build, config_table
from fzero.sharding import fake_mesh
from fzero.sharding.plan import communicated

SMALL = {
    "preset": "llama-tiny",
    "model": {"vocab_size": 256, "max_len": 128, "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 128},
    "data": {"seq_len": 64},
    "train": {"batch": 8, "micro_batch": 2, "compiled": False},
    "optim": {"name": "adamw"},
    "precision": {"policy": "bf16"},
}
SIZES = config_table.from_table(SMALL).model
FLAGS = [f"{a}.{b}={value}" for a in ("model", "train", "optim", "precision") for b, value in SMALL[a].items() if b != "batch"]
FLAGS = [part for flag in FLAGS for part in ("--set", str(flag).replace("=False", "=false"))]
COMMAND = ["plan", "--seq-len", "64", "--batch", "8", "--mesh", "dp=2", "--zero", "3", *FLAGS]


@pytest.fixture(scope="module")
def planned():
    return fzero.plan(SMALL, {"dp": 2}, zero=3, tokens=1e9, price=2.0)


@pytest.fixture
def fz(fz, monkeypatch, tmp_path):
    """A function that runs the command line on a machine that was not measured: (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FZERO_TRACEBACK", raising=False)
    return fz


# -- the report


def test_the_json_says_what_the_issue_asks_for(planned):
    said = json.loads(planned.to_json())
    for name in ("state_bytes_per_rank", "peak_bytes_per_rank", "flop_per_step", "step_s", "tokens_per_s", "mfu", "hfu"):
        assert said[name] > 0, name
    assert said["comm_bytes_per_axis"].keys() == {"dp"}
    assert said["fits"] is True and said["margin_bytes"] == said["capacity_bytes"] - said["peak_bytes_per_rank"]
    assert said["config"] == config_table.to_table(planned.config)
    assert sum(said["state_bytes"].values()) == said["state_bytes_per_rank"]
    assert sum(said["peak"]["components"].values()) == said["peak_bytes_per_rank"] == max(said["phases"].values())
    assert sum(row["bytes"] for row in said["comm"]) == said["comm_bytes_per_axis"]["dp"]
    assert said["tokens_per_step"] == 8 * 64


def test_the_parts_of_a_step_are_the_step(planned):
    t = planned.time
    parts = sum(t["phases"].values()) + sum(t["exposed"].values()) + sum(t["waiting"].values())
    assert parts == pytest.approx(planned.step_s, rel=1e-9)
    assert planned.tokens_per_s == pytest.approx(planned.tokens_per_step / planned.step_s)
    steps = 1e9 / planned.tokens_per_step
    assert planned.days == pytest.approx(steps * planned.step_s / 86400)
    assert planned.cost == pytest.approx(steps * planned.step_s / 3600 * 2 * 2.0)


def test_the_page_is_one_screen(planned):
    page = str(planned)
    assert len(page.splitlines()) <= 40
    for words in ("fits", "to spare", "capacity", "for the allocator", "at rest", "peak", "dp", "FLOP", "tokens/s", "MFU", "binds", "days"):
        assert words in page or (words == "days" and "device hours" in page), words


def test_what_does_not_fit_says_by_how_much():
    tight = devices.device("h100", memory_bytes=(2 << 30) + 1000)
    found = fzero.plan(SMALL, {"dp": 2}, gpu=tight, zero=3)
    assert not found.fits and found.binds == "memory"
    assert found.margin_bytes == found.capacity_bytes - found.peak_bytes_per_rank < 0
    assert f"DOES NOT FIT: {format.size(-found.margin_bytes)} too much" in str(found)


def test_a_nodes_host_memory_is_memory_too():
    found = fzero.plan(SMALL, {"dp": 2}, gpu="h100", zero=3, offload="params=host,opt=host")
    assert found.fits and found.host_capacity_bytes == int(0.9 * 2e12) // 2 and "a node of 1.8 TB" in str(found)
    tight = devices.device("h100", host_memory_bytes=int((2 * found.host_peak_bytes - 2000) / 0.9))
    over = fzero.plan(SMALL, {"dp": 2}, gpu=tight, zero=3, offload="params=host,opt=host")
    assert not over.fits and over.margin_bytes > 0 and over.binds == "host memory"
    assert "DOES NOT FIT" in str(over) and "too much for the host's memory" in str(over)
    unknown = fzero.plan(SMALL, {"dp": 2}, gpu=devices.device("h100", host_memory_bytes=None), zero=3, offload="params=host,opt=host")
    assert unknown.fits and unknown.host_capacity_bytes is None


def test_this_machine_without_a_measurement_has_memory_and_no_times(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = fzero.plan(SMALL, gpu="here")
    assert found.step_s is None and found.mfu is None and found.peak_bytes_per_rank > 0 and found.flop_per_step > 0
    assert "fzero bench" in str(found) and json.loads(found.to_json())["step_s"] is None


def test_a_plan_takes_a_preset_sizes_a_config_or_a_table():
    whole = config_table.from_table(SMALL)
    changes = {"zero": 1, "batch": 4, "micro_batch": 1, "remat": "full"}
    a, b = (report.config_for(base, None, **{"train.batch": 4, "train.micro_batch": 1, "zero": 1}) for base in (SMALL, whole))
    assert a == b and a.zero == 1 and a.train.batch == 4
    sizes = report.config_for(whole.model, {"train.compiled": False}, **{"train.batch": 4})
    assert sizes.model == whole.model and sizes.preset == "" and sizes.train.compiled is False
    assert report.config_for("llama-8b", None, zero=2).model == models.preset("llama-8b")
    with pytest.raises(ValueError, match=r"unknown key 'train.bach'"):
        report.config_for(SMALL, {"train.bach": 4})
    assert changes


def test_the_optimizers_products_are_flops_and_no_utilization():
    muon, adamw = (fzero.plan(SMALL, gpu="h100", optimizer=name) for name in ("muon", "adamw"))
    assert muon.pass_flop_per_step == adamw.pass_flop_per_step == adamw.flop_per_step < muon.flop_per_step
    assert muon.hfu * muon.step_s == pytest.approx(adamw.hfu * adamw.step_s)
    assert "are the optimizer's" in str(muon) and "optimizer's" not in str(adamw)


# -- formulas


@pytest.mark.parametrize(("stage", "expected"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_zero_papers_table(stage, expected):
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 ranks."""
    assert round(estimate.estimate_model_states(7_500_000_000, 64, zero=stage).device_bytes / 1e9, 1) == expected


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("micro_batch", [4, 2])
def test_model_states_are_those_of_a_traced_step(stage, micro_batch):
    found = fzero.plan(SMALL, {"dp": 2}, zero=stage, micro_batch=micro_batch)
    said = estimate.estimate_model_states(config_table.from_table(SMALL).model, 2, zero=stage, accumulate=micro_batch == 2)
    traced = found.state_bytes
    assert (said.params, said.grads, said.master) == (traced["params"], traced["grads"], traced["master"])
    assert said.optimizer == traced["opt"] - 8  # the count of steps
    assert found.state_elsewhere == {"host": 0, "nvme": 0}


@pytest.mark.parametrize("stage", range(4))
def test_elements_communicated_are_the_papers(stage):
    c = config_table.from_table({**SMALL, "zero": stage, "model": {**SMALL["model"], "n_layers": 4}})
    plan = build.build(report.settled(c, fzero.core.device.CPU), fake_mesh({"dp": 2})).plan
    psi = sum(x.numel() for x in pytree.leaves(plan.like))
    sent = [communicated(plan, name)[1:] for name in pytree.named_leaves(plan.like)]
    said = estimate.communicated_elements(psi, stage, 2)
    if stage == 3:  # the embedding and the head are gathered once
        ends = sum(x.numel() for name, x in pytree.named_leaves(plan.like).items() if not name.startswith("blocks/"))
        said -= ends / 2
    assert sum(map(sum, sent)) == said


def test_activations_of_a_layer_are_at_most_the_papers():
    """sbh (34 + 5as/h) has dropout masks and a 4h MLP; a GPT-2 here keeps less, and tp splits it."""
    sizes = models.GPT2Config(vocab_size=256, max_len=64, d_model=64, n_layers=2, n_heads=4, d_ff=256)
    bound = estimate.activation_bytes(sizes, 64, 2)
    assert bound == 34 * 64 * 2 * 64
    assert estimate.activation_bytes(sizes, 64, 2, attention="full") == bound + 5 * 4 * 64 * 64 * 2
    assert estimate.activation_bytes(sizes, 64, 2, tp=2, sequence=True) == bound / 2
    assert estimate.activation_bytes(sizes, 64, 2, tp=2) == 64 * 2 * 64 * (10 + 12)
    with pytest.raises(ValueError, match="attention is 'fast'"):
        estimate.activation_bytes(sizes, 64, 2, attention="fast")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"zero": 4}, "zero is 4; it must be one of 0, 1, 2, 3"),
        ({"precision": "int4"}, "precision is 'int4'"),
        ({"optimizer": "adamm"}, "optimizer is 'adamm'"),
        ({"states": "4bit"}, "states is '4bit'; it must be one of full, bf16, 8bit"),
        ({"tp": 3}, "gpus is 8 and tp is 3"),
        ({"offload": "opt=tape"}, "'tape' is no memory"),
    ],
)
def test_estimates_refuse_what_is_not_there(options, match):
    with pytest.raises(ValueError, match=match):
        estimate.estimate_model_states(10**9, 8, **options)


def test_offloaded_states_are_the_hosts():
    whole = estimate.estimate_model_states("llama-8b", 8)
    away = estimate.estimate_model_states("llama-8b", 8, offload="opt=host")
    assert away.host_bytes == whole.master + whole.optimizer and away.device_bytes == whole.params + whole.grads
    assert away.gpu_bytes == away.device_bytes + away.layer_bytes
    shown = estimate.states_table("llama-8b", 8)
    assert len(shown.splitlines()) == 3 + 4 * len(estimate.OFFLOADS) and "params=host,opt=host" in shown


# -- the command line


def test_the_command_prints_the_page_and_the_object(fz, planned):
    code, out, err = fz(*COMMAND, "--tokens", "1e9", "--price-per-gpu-hour", "2")
    assert (code, err) == (0, "") and out == str(planned._replace(config=planned.config)) + "\n"
    code, out, err = fz(*COMMAND, "--json")
    said = json.loads(out)
    assert code == 0 and said["peak_bytes_per_rank"] == planned.peak_bytes_per_rank and said["step_s"] == planned.step_s


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--gpu", "h1000"], "device 'h1000' is not known (did you mean h100?)"),
        (["--model", "llama-8x"], "model 'llama-8x' is not a preset"),
        (["--mesh", "dp"], "--mesh 'dp' is not of the form"),
        (["--mesh", "dq=2"], "the axes are dp, rp"),
        (["--batch", "7", "--micro-batch", "2"], "train.micro_batch is 2 and does not divide"),
        (["--mesh", "dp=3"], "3 data ranks"),
        (["--tokens", "-1"], "--tokens is -1; it must be above 0"),
        (["--gpus", "4"], "--gpus is for --search"),
        (["--out", "run.toml"], "--out is for --search"),
        (["--search"], "--search needs --gpus"),
        (["--search", "--gpus", "4", "--zero", "1", "--mesh", "dp=4"], "--search chooses --mesh, --zero itself"),
        (["--search", "--gpus", "4", "--out", "run.yaml"], "run.yaml: a config is written as .toml or .json"),
        (["--search", "--ask", "peak"], "--search and --ask are two things"),
        (["--ask", "peek"], "question 'peek' is not known (did you mean peak?)"),
        (["--ask", "cost"], "--ask cost needs --tokens"),
        (["--rank", "2"], "rank is 2 and mesh"),
        (["--offload", "opt=tape"], "'tape' is no memory"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(fz, args, match):
    code, out, err = fz("plan", *args)
    assert code == 2 and out == "" and err.startswith("fzero: error: ") and err.count("\n") == 1
    assert match in err


def test_a_config_file_plans_as_its_flags_do(fz, tmp_path, planned):
    path = tmp_path / "config.json"
    path.write_text(config_table.to_json(planned.config))
    code, out, _ = fz("plan", "--config", path, "--mesh", "dp=2", "--json")
    assert code == 0 and json.loads(out)["peak_bytes_per_rank"] == planned.peak_bytes_per_rank


# -- questions

PAGE = Path(__file__).parent.parent / "docs" / "plan.md"
COMMANDS = re.findall(r"^\| `fzero (plan --ask [^`]*)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)


def test_the_page_has_every_question():
    assert {command.split()[2]: words for command, words in COMMANDS} == {name: words for name, (words, _) in questions.QUESTIONS.items()}
    assert len(COMMANDS) == 14


@pytest.mark.parametrize("command", [command for command, _ in COMMANDS])
def test_a_question_is_answered(fz, command, monkeypatch, tmp_path):
    name = command.split()[2]
    monkeypatch.setattr(variants, "TRIES", 3)
    monkeypatch.setattr(questions.devices, "listed", lambda: ["a100", "h100"])
    tight = tmp_path / "tight.json"
    tight.write_text(devices.to_json(devices.device("h100", memory_bytes=(2 << 30) + (16 << 20))))
    large = [n for n in models.PRESETS if n.startswith("llama") and n not in ("llama-tiny", "llama-small")]
    few = {name: make for name, make in models.PRESETS.items() if name not in large} | {"llama-tiny": lambda: SIZES}
    for module in (models, models.presets):
        monkeypatch.setattr(module, "PRESETS", few)
    code, out, err = fz(*command.split(), *COMMAND[1:], "--gpu", tight, "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["question"] == questions.QUESTIONS[name][0] and said["answer"] and said["rows"]
    check = CHECKS.get(name)
    if check:
        check(said)


def first(said, key="peak_bytes_per_rank"):
    return [row.get(key) for row in said["rows"]]


def check_remat(said):
    by = {row["remat"]: row for row in said["rows"]}
    assert by["remat full"]["peak_bytes_per_rank"] < by["remat none"]["peak_bytes_per_rank"]
    assert by["remat full"]["step_s"] > by["remat none"]["step_s"]


def check_stage(said):
    states = first(said, "state_bytes_per_rank")
    assert states == sorted(states, reverse=True) and len(states) == 4


def check_largest(said):
    peaks = first(said)
    assert peaks == sorted(peaks) and len(peaks) >= 2


def check_offload(said):
    by = {row["offload"]: row for row in said["rows"]}
    assert by["opt=host"]["peak_bytes_per_rank"] < by["nothing"]["peak_bytes_per_rank"]


CHECKS = {"remat": check_remat, "stage": check_stage, "micro-batch": check_largest, "seq-len": check_largest, "offload": check_offload}


def test_the_largest_number_is_found_by_few_plans():
    """Peaks that are affine are known from two plans; the bound is then tried from both sides."""
    made = []

    class Report:
        capacity_bytes = 1000

        def __init__(self, n, peak):
            made.append(n)
            self.peak_bytes_per_rank, self.fits = peak, peak <= 1000

    assert variants.largest(lambda n: Report(n, 100 + 7 * n), 1, 1 << 20)[0] == 128
    assert len(made) <= 6 and {128, 129} <= set(made)
    made.clear()
    assert variants.largest(lambda n: Report(n, 5000), 1, 100)[0] == 0 and made == [1]
    made.clear()
    assert variants.largest(lambda n: Report(n, n), 1, 64)[0] == 64
    assert variants.largest(lambda n: Report(n, 500), 1, 64)[0] == 64, "a peak that does not grow"
    made.clear()
    found, plans = variants.largest(lambda n: Report(n, n * n), 1, 1 << 20)
    assert plans[-1].report.peak_bytes_per_rank > 1000 and found <= 31 and len(made) <= variants.TRIES
