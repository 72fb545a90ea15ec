"""A DeepSpeed config as a config of a run: what is taken has DeepSpeed's own values, and no key passes in silence."""

import json
import math
from pathlib import Path

import pytest
import torch

import fzero
from fzero.core.precision import LossScale, init_scaler, update_scaler
from fzero.core.tables import flat, put
from fzero.run import build_optim
from fzero.run import deepspeed_keys as keys
from fzero.run.deepspeed import read_deepspeed

ROOT = Path(__file__).parent.parent
MLP = {"preset": "mlp-tiny"}
STAGE3 = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 7,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
        "offload_param": {"device": "none"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.2}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-4, "warmup_num_steps": 10, "total_num_steps": 90},
    },
}


def test_the_whole_of_a_config_is_a_run():
    config = fzero.config_from_deepspeed(STAGE3, MLP, ranks=4)
    found = config.train.batch, config.train.micro_batch, config.train.steps, config.train.log_every
    assert found == (32, 2, 90, 7)
    assert (config.zero, config.offload, config.precision.policy) == (3, "opt=host:0.5", "bf16")
    o, s = config.optim, config.optim.schedule
    assert (o.name, o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.decay, o.clip) == (
        *("adamw", 1e-4, 0.9, 0.95, 1e-6, 0.2, "all"),
        0.5,
    )
    assert (s.name, s.warmup_steps, s.warmup) == ("warmup_decay_lr", 10, "log") and s.start * o.lr == 1e-5


def test_what_deepspeed_leaves_out_is_its_default_and_not_ours():
    config = fzero.config_from_deepspeed({"optimizer": {"type": "Adam"}}, MLP)
    o = config.optim
    assert (o.name, o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.clip) == (
        *("adamw", 1e-3, 0.9, 0.999, 1e-8, 0.0),
        0.0,
    )
    assert (o.schedule.name, o.schedule.warmup_steps, config.zero, config.precision.policy) == (
        "constant",
        0,
        0,
        "fp32",
    )
    of_torch = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    assert fzero.config_from_deepspeed(of_torch, MLP).optim.weight_decay == 0.01
    coupled = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}
    assert fzero.config_from_deepspeed(coupled, MLP).optim.name == "adam"


def test_auto_leaves_a_value_to_fzero():
    source = {
        **{name: "auto" for name in ("train_batch_size", "gradient_clipping")},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    found = read_deepspeed(source)
    assert set(found.left) == {"train_batch_size", "gradient_clipping", "bf16.enabled", "optimizer.params.lr"}
    assert not {"train.batch", "optim.clip", "precision.policy"} & {name for name, _ in flat(found.table)}


# ---- every key ------------------------------------------------------------------------------------------------------

# For each taken key: a config that says it with a value unlike the default, and the values that change.
ON = {"optimizer": {"type": "AdamW"}}
STAGE = {"zero_optimization": {"stage": 3}}
HALF = {"fp16": {"enabled": True}}
NVME = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
PARAM_NVME = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
HOST = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
DROP = {"progressive_layer_drop": {"enabled": True, "theta": 0.5}}
TAKEN = {
    "train_batch_size": ({}, 8, {"train.batch", "train.micro_batch"}),
    "train_micro_batch_size_per_gpu": ({"train_batch_size": 8}, 2, {"train.micro_batch"}),
    "gradient_accumulation_steps": ({"train_micro_batch_size_per_gpu": 2}, 4, {"train.batch"}),
    "gradient_clipping": ({}, 1.0, {"optim.clip"}),
    "progressive_layer_drop.enabled": (
        {"progressive_layer_drop": {"theta": 0.5}},
        True,
        {"train.layer_drop_theta", "train.layer_drop_gamma"},
    ),
    "progressive_layer_drop.theta": (DROP, 0.7, {"train.layer_drop_theta"}),
    "progressive_layer_drop.gamma": (DROP, 0.1, {"train.layer_drop_gamma"}),
    "steps_per_print": ({}, 3, {"train.log_every"}),
    "zero_optimization.stage": ({}, 2, {"zero"}),
    "zero_optimization.offload_optimizer.device": (STAGE, "cpu", {"offload"}),
    "zero_optimization.offload_optimizer.nvme_path": (NVME, "/disk", {"nvme.folder"}),
    "zero_optimization.offload_optimizer.ratio": (HOST, 0.3, {"offload"}),
    "zero_optimization.offload_param.device": (STAGE, "nvme", {"offload"}),
    "zero_optimization.offload_param.nvme_path": (PARAM_NVME, "/disk", {"nvme.folder"}),
    "zero_optimization.cpu_offload": (STAGE, True, {"offload"}),
    "zero_optimization.cpu_offload_param": (STAGE, True, {"offload"}),
    "bf16.enabled": ({}, True, {"precision.policy"}),
    "bfloat16.enabled": ({}, True, {"precision.policy"}),
    "fp16.enabled": (
        {},
        True,
        {"precision.policy", *(f"precision.loss_scale.{n}" for n in ("init", "window", "hysteresis", "floor"))},
    ),
    "fp16.loss_scale": (
        HALF,
        128,
        {f"precision.loss_scale.{n}" for n in ("init", "window", "hysteresis", "floor", "at_floor")},
    ),
    "fp16.initial_scale_power": (HALF, 8, {"precision.loss_scale.init"}),
    "fp16.loss_scale_window": (HALF, 9, {"precision.loss_scale.window"}),
    "fp16.hysteresis": (HALF, 1, {"precision.loss_scale.hysteresis"}),
    "fp16.min_loss_scale": (HALF, 2, {"precision.loss_scale.floor"}),
    "optimizer.type": (
        ON,
        "SGD",
        {f"optim.{n}" for n in ("name", "momentum", "nesterov", "beta1", "beta2", "eps")},
    ),
    "scheduler.type": (
        {"optimizer": {"type": "SGD"}, "scheduler": {"params": {"total_num_steps": 50}}},
        "WarmupCosineLR",
        {"train.steps", *(f"optim.schedule.{n}" for n in ("name", "warmup_steps", "warmup", "start", "end"))},
    ),
    "optimizer.params.*": (ON, {"lr": 0.5}, {"optim.lr"}),
    "scheduler.params.*": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}},
        {"warmup_max_lr": 0.1, "warmup_type": "linear"},
        {"optim.schedule.warmup"},
    ),
}


def said(beside, key, value):
    source = json.loads(json.dumps(beside))
    put(source, key.removesuffix(".*"), value)
    return source


@pytest.mark.parametrize("key", [key for key in keys.KEYS if key.what == keys.TAKEN], ids=lambda key: key.name)
def test_a_taken_key_changes_what_it_names_alone(key):
    beside, value, changes = TAKEN[key.name]
    one, other = (dict(flat(read_deepspeed(source).table)) for source in (beside, said(beside, key.name, value)))
    assert {name for name in {**one, **other} if one.get(name) != other.get(name)} == changes


def test_an_ignored_key_changes_nothing_and_is_named():
    plain = read_deepspeed({})
    ignored = [key.name.replace("*", "x") for key in keys.KEYS if key.what == keys.IGNORED]
    assert len(ignored) > 60
    for name in ignored:
        found = read_deepspeed(said({}, name, 7))
        assert found.table == plain.table and found.ignored == (name,), name
    with pytest.warns(UserWarning, match=r"^the DeepSpeed config: ignored, .*: wall_clock_breakdown$"):
        fzero.config_from_deepspeed({"wall_clock_breakdown": True}, MLP)


def test_a_refused_key_is_named_with_what_to_do():
    refused = [key for key in keys.KEYS if key.what == keys.REFUSED]
    assert len(refused) > 20
    for key in refused:
        name = key.name.replace("*", "x")
        with pytest.raises(ValueError, match=f"{name} is 'on': ") as error:
            read_deepspeed(said({}, name, "on"))
        assert "leave it out" in str(error.value)
        for value in (*key.harmless, "auto"):
            assert read_deepspeed(said({}, name, value)) == read_deepspeed({}), name


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"train_batch_sise": 8}, r"no key 'train_batch_sise' \(did you mean train_batch_size\?\)"),
        ({"zero_optimisation": {"stage": 2}}, r"no key 'zero_optimisation' \(did you mean zero_optimization\?\)"),
        ({"zero_optimization": {"stge": 2}}, r"no key 'zero_optimization.stge' \(did you mean stage\?\)"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, r"\(did you mean device\?\)"),
        ({"zero_optimization": True}, "zero_optimization is True; it must be a table"),
        ({"zero_optimization": {"stage": 4}}, "stage is 4; it must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "3"}}, "stage is '3'; it must be a finite number or a whole number"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs stage 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "must be one of none, cpu, nvme"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
        ({"optimizer": {"type": "AdamX"}}, r"'adamx' \(did you mean adam\w?\?\); it must be one of adam, adamw"),
        ({"optimizer": {"type": "OneBitAdam"}}, "one bit"),
        ({"optimizer": {"type": "Lamb"}}, "min_coeff"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, r"'optimizer.params.learning_rate'"),
        ({"optimizer": {"type": "AdamW", "params": {"wieght_decay": 1}}}, r"did you mean weight_decay"),
        ({"optimizer": {"type": "AdamW", "params": {"bias_correction": False}}}, "bias_correction is False"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "two numbers"),
        ({"scheduler": {"type": "OneCycle"}}, "cycles the momentum"),
        ({"scheduler": {"type": "WarmUpLR"}}, r"did you mean WarmupLR"),
        ({"scheduler": {"type": "WarmupLR"}}, "warmup_max_lr is not given"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, "needs scheduler.params.total_num_steps"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}, "8 and not .* = 3 x 2 x 1"),
    ],
)
def test_a_mistake_is_one_clear_line(source, said):
    with pytest.raises(ValueError, match=said) as error:
        read_deepspeed(source)
    assert "\n" not in str(error.value) and str(error.value).startswith("the DeepSpeed config: ")


@pytest.mark.parametrize(
    ("batch", "micro", "times", "ranks", "expected"),
    [
        (32, 4, 2, 4, (32, 4)),
        (32, 4, None, 4, (32, 4)),
        (32, None, 2, 4, (32, 4)),
        (None, 4, 2, 4, (32, 4)),
        (32, None, None, 4, (32, 8)),
        (None, 4, None, 4, (16, 4)),
        (None, None, 2, 4, (None, None)),
        (30, 4, None, 4, None),
        (2, None, None, 4, None),
        (32, 4, 2, 2, None),
    ],
)
def test_the_batch_is_micro_batch_times_accumulation_times_ranks(batch, micro, times, ranks, expected):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    source = {name: value for name, value in zip(names, (batch, micro, times)) if value is not None}
    if expected is None:
        with pytest.raises(ValueError, match="train_batch_size is"):
            read_deepspeed(source, ranks)
        return
    train = read_deepspeed(source, ranks).table.get("train", {})
    assert (train.get("batch"), train.get("micro_batch")) == expected


# ---- the numbers ----------------------------------------------------------------------------------------------------


def deepspeeds_rate(kind, p, i):
    """The rate that the scheduler sets at iteration i, by DeepSpeed's documented formulas."""
    w = max(2, p["warmup_num_steps"])
    total = p.get("total_num_steps", 0)
    rise = (math.log(max(i, 0) + 1) / math.log(w)) if p["warmup_type"] == "log" else i / w
    if kind == "WarmupCosineLR":
        if i < 0:
            return 0.0
        if i < w:
            return p["lr"] * (p["warmup_min_ratio"] + (1 - p["warmup_min_ratio"]) * rise)
        x = min(1.0, (i - w + 1) / max(1, total - w))
        return p["lr"] * max(0.0, p["cos_min_ratio"] + (1 - p["cos_min_ratio"]) * (1 + math.cos(math.pi * x)) / 2)
    low, high = p["warmup_min_lr"], p["warmup_max_lr"]
    if i < 0:
        return low
    if i >= w:
        rise = 1.0 if kind == "WarmupLR" else max(0.0, (total - i) / max(1.0, total - w))
    return low + (high - low) * rise


@pytest.mark.parametrize("warmup", [1, 2, 7])
@pytest.mark.parametrize("rise", ["log", "linear"])
@pytest.mark.parametrize("kind", keys.SCHEDULERS)
def test_a_schedule_is_deepspeeds_at_every_step(kind, rise, warmup):
    params = {"warmup_num_steps": warmup, "warmup_type": rise}
    if kind == "WarmupCosineLR":
        params |= {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.01}
    else:
        params |= {"warmup_min_lr": 1e-4, "warmup_max_lr": 2e-2}
    if kind != "WarmupLR":
        params["total_num_steps"] = 20
    source = {"optimizer": {"type": "SGD", "params": {"lr": 3e-2}}, "scheduler": {"type": kind, "params": params}}
    config = fzero.config_from_deepspeed(source, MLP)
    schedule = build_optim.make_schedule(config.optim, config.optim.lr, config.train.steps)
    # The scheduler steps after each update, from iteration -1.
    expected = [deepspeeds_rate(kind, {**params, "lr": 3e-2}, update - 1) for update in range(30)]
    torch.testing.assert_close(schedule(torch.arange(30)).tolist(), expected, rtol=1e-12, atol=1e-18)
    assert len(set(expected)) > 1


def test_a_static_loss_scale_is_that_number_at_every_step():
    scale = fzero.config_from_deepspeed({"fp16": {"enabled": True, "loss_scale": 96}}, MLP).precision.loss_scale
    state = init_scaler(scale)
    for step in range(50):
        state = update_scaler(scale, state, torch.tensor(step % 3 == 0))
        assert state.scale == 96
    dynamic = fzero.config_from_deepspeed({"fp16": {"enabled": True, "loss_scale": 0}}, MLP).precision.loss_scale
    assert dynamic == LossScale()


@pytest.mark.parametrize(
    ("optimizer", "reference"),
    [
        ({"type": "Adam"}, lambda p: torch.optim.AdamW(p, weight_decay=0.0)),
        (
            {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.3, "betas": [0.8, 0.9], "eps": 1e-5}},
            lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-5),
        ),
        (
            {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.3}},
            lambda p: torch.optim.Adam(p, weight_decay=0.3),
        ),
        (
            {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.3}},
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.3),
        ),
    ],
    ids=["Adam", "AdamW", "coupled", "SGD"],
)
def test_an_optimizer_decays_and_moves_every_leaf_as_there(optimizer, reference):
    config = fzero.config_from_deepspeed({"optimizer": optimizer}, MLP)
    tx = build_optim.make_optimizer(config.optim, 10)
    draw = torch.Generator().manual_seed(0)
    params = {"w_in": torch.randn(3, 4, generator=draw).double(), "bias": torch.randn(4, generator=draw).double()}
    theirs = [leaf.clone().requires_grad_() for leaf in params.values()]
    state, other = tx.init(params), reference(theirs)
    for _ in range(5):
        grads = {name: torch.randn(leaf.shape, generator=draw).double() for name, leaf in params.items()}
        for leaf, g in zip(theirs, grads.values()):
            leaf.grad = g.clone()
        other.step()
        updates, state = tx.update(grads, state, params)
        params = fzero.optim.apply_updates(params, updates)
    for leaf, expected in zip(params.values(), theirs):
        torch.testing.assert_close(leaf, expected.detach(), rtol=1e-12, atol=1e-12)


# ---- the command, and the page --------------------------------------------------------------------------------------


def test_the_command_takes_it_and_flags_change_it(fz, tmp_path):
    path, toml = tmp_path / "ds.json", tmp_path / "run.toml"
    path.write_text(json.dumps({**STAGE3, "wall_clock_breakdown": True}))
    toml.write_text('preset = "mlp-tiny"\n[train]\nseed = 3\n')
    options = ("config", "--deepspeed", str(path), "--config", str(toml), "--mesh", "dp=4", "--lr", "0.5")
    code, out, err = fz(*options)
    assert code == 0 and "ignored, as they change nothing here: wall_clock_breakdown" in err
    for line in ("zero = 3", "lr = 0.5", "seed = 3", "steps = 90", 'name = "warmup_decay_lr"'):
        assert line in out, line
    toml.write_text('preset = "mlp-tiny"\nzero = 1\n')
    code, out, err = fz(*options)
    assert code == 2 and err.endswith("both set zero; leave one of them out\n")
    path.write_text('{"trian_batch_size": 4}')
    code, out, err = fz("config", "--deepspeed", str(path))
    assert code == 2 and "did you mean train_batch_size?" in err and err.count("\n") == 1
    code, out, err = fz("plan", "--search", "--world-size", "2", "--deepspeed", str(path))
    assert code == 2 and "--deepspeed" in err and err.count("\n") == 1


def test_the_page_has_the_table_of_the_code():
    page = (ROOT / "docs" / "migrate.md").read_text()
    assert f"<!-- keys -->\n\n{keys.markdown()}\n<!-- end -->" in page, "paste fzero.run.deepspeed_keys.markdown()"
