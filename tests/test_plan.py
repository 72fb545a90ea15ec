"""What a user of the planner sees: the report, its page and JSON, the command line, plans side by side, the papers'
formulas."""

import collections
import dataclasses
import functools
import json
import re
import shlex
import types
from pathlib import Path

import pytest

import fzero
from fzero import models
from fzero.checkpoint.convert import huggingface_config
from fzero.cli import plan as plan_command
from fzero.core import pytree
from fzero.planner import devices, estimate, plan_text
from fzero.planner import plan as report
from fzero.run import build, config_table, machine
from fzero.sharding import fake_mesh

SMALL = {
    "preset": "llama-tiny",
    "model": {
        "vocab_size": 256,
        "max_len": 128,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "d_ff": 128,
    },
    "data": {"seq_len": 64},
    "train": {"batch": 8, "micro_batch": 2, "compiled": False},
    "optim": {"name": "adamw"},
    "precision": {"policy": "bf16"},
}
FLAGS = [
    f"{a}.{b}={value}"
    for a in ("model", "train", "optim", "precision")
    for b, value in SMALL[a].items()
    if b != "batch"
]
FLAGS = [part for flag in FLAGS for part in ("--set", str(flag).replace("=False", "=false"))]
PRICED = devices.device("h100", price_per_hour=2.0)
COMMAND = ["plan", "--seq-len", "64", "--batch", "8", "--mesh", "dp=2", "--zero", "3", *FLAGS]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """fzero.plan that traces a config once for all tests of this file."""
    return functools.partial(fzero.plan, cache=tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="module")
def planned(plan):
    return plan(SMALL, {"dp": 2}, gpu=PRICED, settings={"zero": 3}).for_tokens(1e9)


@pytest.fixture
def fz(fz, monkeypatch, tmp_path):
    """A function that runs the command line on a machine that was not measured: (exit code, stdout, stderr)."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FZERO_TRACEBACK", raising=False)
    return fz


# -- the report


def test_the_json_has_every_figure(planned):
    said = json.loads(planned.to_json())
    for name in (
        "state_bytes_per_rank",
        "peak_bytes_per_rank",
        "flop_per_step",
        "step_s",
        "tokens_per_s",
        "mfu",
        "hfu",
    ):
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
    for words in (
        "fits",
        "to spare",
        "capacity",
        "for the allocator",
        "at rest",
        "peak",
        "dp",
        "FLOP",
        "tokens/s",
        "MFU",
        "binds",
        "days",
    ):
        assert words in page or (words == "days" and "device hours" in page), words


def test_what_does_not_fit_says_by_how_much(plan):
    tight = devices.device("h100", memory_bytes=(2 << 30) + 1000)
    found = plan(SMALL, {"dp": 2}, gpu=tight, settings={"zero": 3})
    assert not found.fits and found.binds == "memory"
    assert found.margin_bytes == found.capacity_bytes - found.peak_bytes_per_rank < 0
    assert f"DOES NOT FIT: {plan_text.size(-found.margin_bytes)} too much" in str(found)


def test_a_nodes_host_memory_is_memory_too(plan):
    hosted = {"zero": 3, "offload": "params=host,opt=host"}
    found = plan(SMALL, {"dp": 2}, gpu="h100", settings=hosted)
    assert found.fits and found.host_capacity_bytes == int(0.9 * 2e12) // 2 and "a node of 1.8 TB" in str(found)
    tight = devices.device("h100", host_memory_bytes=int((2 * found.host_peak_bytes - 2000) / 0.9))
    over = plan(SMALL, {"dp": 2}, gpu=tight, settings=hosted)
    assert not over.fits and over.margin_bytes > 0 and over.binds == "host memory"
    assert "DOES NOT FIT" in str(over) and "too much for the host's memory" in str(over)
    unknown = plan(SMALL, {"dp": 2}, gpu=devices.device("h100", host_memory_bytes=None), settings=hosted)
    assert unknown.fits and unknown.host_capacity_bytes is None


def test_this_machine_without_a_measurement_has_memory_and_no_times(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    found = fzero.plan(SMALL, gpu="here", settings={"train.compiled": False})
    assert found.step_s is None and found.mfu is None and found.peak_bytes_per_rank > 0 and found.flop_per_step > 0
    assert "fzero bench" in str(found) and json.loads(found.to_json())["step_s"] is None


def test_a_plan_takes_a_preset_sizes_a_config_or_a_table():
    whole = config_table.from_table(SMALL)
    a, b = (report.config_for(base, {"train.batch": 4, "train.micro_batch": 1, "zero": 1}) for base in (SMALL, whole))
    assert a == b and a.zero == 1 and a.train.batch == 4
    sizes = report.config_for(whole.model, {"train.compiled": False, "train.batch": 4})
    assert sizes.model == whole.model and sizes.preset == "" and sizes.train.compiled is False
    assert report.config_for("llama-8b", {"zero": 2}).model == models.preset("llama-8b")
    with pytest.raises(ValueError, match=r"unknown key 'train.bach'"):
        report.config_for(SMALL, {"train.bach": 4})


def test_the_optimizers_products_are_flops_and_no_utilization():
    muon, adamw = (fzero.plan(SMALL, gpu="h100", settings={"optim.name": name}) for name in ("muon", "adamw"))
    assert muon.pass_flop_per_step == adamw.pass_flop_per_step == adamw.flop_per_step < muon.flop_per_step
    assert muon.hfu * muon.step_s == pytest.approx(adamw.hfu * adamw.step_s)
    assert "are the optimizer's" in str(muon) and "optimizer's" not in str(adamw)


# -- formulas


@pytest.mark.parametrize(("stage", "expected"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_zero_papers_table(stage, expected):
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 ranks."""
    found = estimate.estimate_model_states(7_500_000_000, {"dp": 64}, zero=stage)
    assert round(found.device_bytes / 1e9, 1) == expected


@pytest.mark.each_value
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("micro_batch", [4, 2])
@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_model_states_are_those_of_a_traced_step(plan, stage, micro_batch, axis):
    rows = micro_batch * (2 if axis == "cp" else 1)  # of a rank: with cp each has all rows
    found = plan(SMALL, {axis: 2}, settings={"zero": stage, "train.micro_batch": rows})
    said, of_stage_2 = (
        estimate.estimate_model_states(
            config_table.from_table(SMALL).model, {axis: 2}, zero=zero, accumulate=micro_batch == 2
        )
        for zero in (stage, 2)
    )
    traced = found.state_bytes
    # The paper's whole gradients of stage 1 rest where several micro-batches are summed; else they are never all there.
    grads = of_stage_2.grads if stage == 1 and micro_batch == 4 else said.grads
    assert (said.params, grads, said.master) == (traced["params"], traced["grads"], traced["master"])
    assert said.optimizer == traced["opt"] - 8  # the count of steps
    assert found.state_elsewhere == {"host": 0, "nvme": 0}


@pytest.mark.parametrize("stage", range(4))
def test_elements_communicated_are_the_papers(stage):
    c = config_table.from_table(
        {**SMALL, "zero": stage, "precision": {"policy": "fp32"}, "model": {**SMALL["model"], "n_layers": 4}}
    )
    made = build.build(machine.resolve_auto(c, fzero.core.device.CPU), fake_mesh({"dp": 2})).plan
    psi = sum(x.numel() for x in pytree.leaves(made.like))
    said = estimate.communicated_elements(psi, stage, 2)
    if stage == 3:  # the embedding and the head are gathered once
        ends = sum(x.numel() for name, x in pytree.named_leaves(made.like).items() if not name.startswith("blocks/"))
        said -= ends / 2
    assert sum(map(sum, made.sent_by_link().values())) == 4 * said


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"zero": 4}, "zero is 4; it must be one of 0, 1, 2, 3"),
        ({"precision": "int4"}, "precision is 'int4'"),
        ({"optimizer": "adamm"}, "optimizer is 'adamm'"),
        ({"states": "4bit"}, "states is '4bit'; it must be one of full, bf16, 8bit"),
        ({"mesh": 8}, "mesh is 8; it must be a table"),
        ({"mesh": {"dp": 8, "pp": 2}}, "mesh has pp=2"),
        ({"offload": "opt=tape"}, "'tape' is not a memory"),
    ],
)
def test_estimates_refuse_what_is_not_there(options, match):
    with pytest.raises(ValueError, match=match):
        estimate.estimate_model_states(10**9, **{"mesh": {"dp": 8}, **options})


def test_offloaded_states_are_the_hosts():
    whole = estimate.estimate_model_states("llama-8b", {"dp": 8})
    away = estimate.estimate_model_states("llama-8b", {"dp": 8}, offload="opt=host")
    assert away.host_bytes == whole.master + whole.optimizer and away.device_bytes == whole.params + whole.grads
    assert away.gpu_bytes == away.device_bytes + away.layer_bytes
    shown = estimate.states_table("llama-8b", {"dp": 8})
    assert len(shown.splitlines()) == 3 + 4 * len(estimate.OFFLOADS) and "params=host,opt=host" in shown


# -- the command line


def test_the_command_prints_the_page_and_the_object(fz, planned):
    code, out, err = fz(*COMMAND, "--tokens", "1e9", "--price-per-gpu-hour", "2")
    assert (code, err[:14]) == (0, "first estimate") and out == str(planned._replace(config=planned.config)) + "\n"
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
        (["--tokens", "-1"], "--tokens is -1.0; it must be above 0"),
        (["--world-size", "4"], "--world-size is for --search"),
        (["--out", "run.toml"], "--out is for --search"),
        (["--search"], "--search needs --world-size"),
        (["--search", "--world-size", "4", "--zero", "1", "--mesh", "dp=4"], "--search chooses --zero, --mesh itself"),
        (["--search", "--world-size", "4", "--out", "run.yaml"], "run.yaml: a config is written as .toml or .json"),
        (
            ["--search", "--world-size", "4", "--out", "run.toml", "--tokens", "1e9", "--steps", "5"],
            "--out writes the steps of --tokens 1e+09, and train.steps is given",
        ),
        (["--device", "cpu"], "--device is cpu, and a plan is for --gpu"),
        (["--search", "--vary", "zero=0,3"], "--search and --vary exclude each other"),
        (["--vary", "zero"], "--vary 'zero' is not of the form NAME=A,B"),
        (["--vary", "zero=0,3", "--vary", "zero=1"], "--vary gives zero twice"),
        (["--vary", "mesh=2,4"], "--vary mesh='2' is not of the form"),
        (["--vary", "train.bach=1,2"], "unknown key 'train.bach' (did you mean batch"),
        (["--rank", "2"], "fzero: error: --rank is 2 and a run on one process has ranks 0 to 0"),
        (["--offload", "opt=tape"], "'tape' is not a memory"),
        (["--memory-gb", "1"], "--memory-gb is 1; it must be above the 2.15 GB"),
        (["--memory-gb", "nan"], "--memory-gb is nan; it must be above 0 and below"),
        (["--between", "fast"], "between nodes: 'fast' is not GBIT or GBIT:MS, such as 10:5"),
        (["--codec", "params=int5"], "codec: params is 'int5'"),
        (["--nvme-gbs", "0"], "--nvme-gbs is 0.0; it must be above 0"),
        (["--model", "nowhere/config.json"], "nowhere/config.json: no such file; a model folder of transformers"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(fz, args, match):
    code, out, err = fz("plan", *args)
    assert code == 2 and out == "" and err.startswith("fzero: error: ") and err.count("\n") == 1
    assert match in err


def test_a_device_whose_memory_is_reserved_is_refused():
    device = types.SimpleNamespace(name="card", memory_bytes=10**9, reserved_bytes=2 * 10**9)
    with pytest.raises(ValueError, match=r"the memory of card is 1 GB; it must be above the 2\.00 GB that the driver"):
        plan_command.refuse_small_memory(device, None)


def test_a_config_file_plans_as_its_flags_do(fz, tmp_path, planned):
    path = tmp_path / "config.json"
    path.write_text(config_table.to_json(planned.config))
    code, out, _ = fz("plan", "--config", path, "--mesh", "dp=2", "--json")
    assert code == 0 and json.loads(out)["peak_bytes_per_rank"] == planned.peak_bytes_per_rank


def test_memory_and_disk_of_another_machine(fz):
    code, out, _ = fz(*COMMAND, "--json", "--memory-gb", "3", "--nvme-gbs", "2", "--offload", "opt=nvme")
    said = json.loads(out)
    assert code == 0 and said["device"]["memory_bytes"] == 3 * 10**9 and said["traffic"]["nvme"]["write"] > 0
    assert said["time"]["moving"]["nvme"] == pytest.approx(sum(said["traffic"]["nvme"].values()) * 2 / 2e9, rel=0.01)


def test_a_config_of_hugging_face_is_a_model(fz, tmp_path):
    """Also beside --set and --vary; the same sizes as the preset written out."""
    hf, _ = huggingface_config.write_config(dataclasses.replace(models.preset("llama-tiny"), n_layers=1))
    (tmp_path / "config.json").write_text(json.dumps(hf))
    flags = ["--seq-len", "64", "--set", "train.compiled=false", "--precision", "bf16"]
    code, out, err = fz("plan", "--json", *flags, "--model", tmp_path / "config.json")
    assert (code, err[:14]) == (0, "first estimate")
    own = fz("plan", "--json", *flags, "--set", "model.n_layers=1")
    theirs, ours = (json.loads(text)["config"]["model"] for text in (out, own[1]))
    assert {**theirs, "head_dim": 0} == ours
    code, out, _ = fz(
        "plan", *flags, "--model", tmp_path / "config.json", "--set", "model.n_layers=2", "--vary", "zero=0,1"
    )
    assert code == 0 and "the fastest that fits: zero" in out


# -- plans side by side


def test_each_combination_has_a_row(plan):
    found = report.vary(SMALL, {"zero": [0, 3], "train.remat": ["none", "full"]}, {"dp": 2}, **plan.keywords)
    assert [tuple(row.values.values()) for row in found.rows] == [(0, "none"), (0, "full"), (3, "none"), (3, "full")]
    for row in found.rows:
        one = plan(SMALL, {"dp": 2}, settings=row.values)
        assert (row.report.peak_bytes_per_rank, row.report.step_s) == (one.peak_bytes_per_rank, one.step_s)
    whole, again = (found.rows[i].report for i in (2, 3))
    assert again.peak_bytes_per_rank < whole.peak_bytes_per_rank and again.step_s > whole.step_s
    assert found.rows[0].report.state_bytes_per_rank > whole.state_bytes_per_rank
    assert found.best() == max(found.rows, key=lambda row: row.report.tokens_per_s)
    lines = str(found).splitlines()
    assert (
        len(lines) == 1 + 4 + 2
        and lines[0].split()[:3] == ["zero", "train.remat", "memory"]
        and "the fastest that fits: zero" in lines[-1]
    )


@pytest.mark.slow
def test_meshes_devices_and_presets_vary_too():
    tight = dataclasses.replace(devices.device("h100", memory_bytes=(2 << 30) + 1000), name="tight")
    found = report.vary(SMALL, {"mesh": [{"dp": 2}, {"dp": 3}], "gpu": ["a100", tight]}, gpu=PRICED).for_tokens(1e9)
    assert [row.report is not None for row in found.rows] == [True, True, False, False]
    assert [row.fits for row in found.rows] == [True, False, False, False] and found.best() is found.rows[0]
    assert "3 data ranks" in found.rows[2].error and found.rows[1].values == {"mesh": {"dp": 2}, "gpu": "tight"}
    shown = str(found)
    assert (
        "no: " in shown
        and "too much" in shown
        and "device hours" in shown
        and f"{found.rows[0].report.cost:,.0f}" in shown
    )
    said = json.loads(found.to_json())
    assert said["best"] == {"mesh": {"dp": 2}, "gpu": "a100"} and [row["fits"] for row in said["rows"]] == [
        True,
        False,
        False,
        False,
    ]
    assert said["rows"][0]["cost"] == found.rows[0].report.cost and said["rows"][3]["error"]
    layers = [
        row.report.config.model.n_layers
        for row in report.vary({**SMALL, "model": {}}, {"preset": ["llama-tiny", "gpt2-tiny"]}).rows
    ]
    assert layers == [models.preset(name).n_layers for name in ("llama-tiny", "gpt2-tiny")]
    with pytest.raises(ValueError, match="preset varies for a preset's name"):
        report.vary(config_table.from_table(SMALL), {"preset": ["llama-tiny"]})
    with pytest.raises(ValueError, match=r"unknown key 'train.bach'"):
        report.vary(SMALL, {"train.bach": [1, 2]})


PAGE = Path(__file__).parent.parent / "docs" / "plan.md"
COMMANDS = re.findall(r"^\| ([^|]*\?) \| `fzero (plan[^`]*)` \|$", PAGE.read_text(), re.MULTILINE)
SHRUNK = {"4096,8192,16384": "32,64,128", "max_len=16384": "max_len=128", "--world-size 8": "--world-size 2"}


def test_the_page_answers_fourteen_questions():
    assert len(COMMANDS) == len({words for words, _ in COMMANDS}) == 14


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=[pytest.mark.slow] * (i % 5 > 0)) for i, (_, command) in enumerate(COMMANDS)],
)
def test_a_command_of_the_page_answers_its_question(fz, command):
    for words, shrunk in SHRUNK.items():
        command = command.replace(words, shrunk)
    given = shlex.split(command)
    flags = ["--seq-len", "64", "--batch", "8", *([] if "--search" in given else ["--mesh", "dp=2", "--zero", "3"])]
    values = [value for value in FLAGS if value != "--set" and value not in given]
    code, out, err = fz(
        *given,
        *flags,
        *(part for value in values for part in ("--set", value)),
        *([] if "--json" in given else ["--json"]),
    )
    several = "--vary" in given or "--search" in given
    assert (code, err.startswith("first estimate")) == (0, not several)
    said = json.loads(out)
    if "--vary" in given:
        assert said["best"] and {row["values"][name] is not None for row in said["rows"] for name in row["values"]} == {
            True
        }
    elif "--search" in given:
        assert said["best"][0]["plan"]["fits"]
    else:
        assert said["peak"]["largest"] and said["phases"]["backward"] > 0
        assert said["step_s_range"][0] < said["step_s"] < said["step_s_range"][1]


@pytest.mark.slow
def test_the_largest_at_the_peak_are_a_part_of_what_is_alive_there():
    """Of a deep model whose layers were not all run: what one layer makes another one frees."""
    model = dataclasses.replace(models.preset("llama-tiny"), d_model=64, n_layers=24)
    settings = {"zero": 3, "train.batch": 8, "train.remat": "full", "train.compiled": False}
    found = fzero.plan(model, {"dp": 4}, gpu="h100", settings=settings)
    assert "24 layers from" in found.exact
    sums = collections.Counter()
    for _, component, size in found.peak["largest"]:
        sums[component] += size
    assert sums and all(size <= found.peak["components"][component] for component, size in sums.items())
