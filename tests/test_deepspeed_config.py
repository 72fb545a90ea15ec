"""A DeepSpeed config as a config of a run: what is taken has DeepSpeed's own values, and no key passes in silence."""

import json
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from deepspeed_published import COURSE, CYCLE, PUBLISHED

import fzero
from fzero import LossScale
from fzero.cli import main
from fzero.core import flat, init_scaler, pytree, set_nested, update_scaler
from fzero.kernels import Pattern
from fzero.models import presets
from fzero.run import block_mask_of, build_optim, merge_tables, read_deepspeed
from fzero.run.config import deepspeed_keys as keys
from fzero.run.config.curriculum import make_pieces
from fzero.run.config.deepspeed_keys import Values
from fzero.run.config.deepspeed_optim import read_sparse

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
    of_signs = fzero.config_from_deepspeed({"optimizer": {"type": "Lion"}}, MLP).optim
    assert (of_signs.lr, of_signs.beta1, of_signs.beta2, of_signs.weight_decay) == (1e-3, 0.9, 0.999, 0.0)


# What the readers of runtime/config.py return for a table of a mode alone, by runtime/constants.py.
SPARSE_DEFAULTS = {
    "block": 16,
    "different_layout_per_head": False,
    "num_local_blocks": 4,
    "num_global_blocks": 1,
    "attention": "bidirectional",
    "horizontal_global_attention": False,
    "num_different_global_patterns": 1,
    "num_random_blocks": 0,
    "local_window_blocks": [4],
    "global_block_indices": [0],
    "num_sliding_window_blocks": 3,
}


@pytest.mark.parametrize("mode", [mode for mode in keys.SPARSE if mode != "local_sliding_window"])
def test_a_sparse_attention_that_says_its_mode_alone_has_the_defaults_of_the_reader(mode):
    given = {name: value for name, value in SPARSE_DEFAULTS.items() if name in keys.SPARSE[mode]}
    silent, said = ({"mode": mode, **table} for table in ({}, given))
    assert read_sparse(Values(silent)) == read_sparse(Values(said))
    assert (block_mask_of(silent, 160).blocks == block_mask_of(said, 160).blocks).all()


def test_auto_leaves_a_value_to_fzero():
    source = {
        **{name: "auto" for name in ("train_batch_size", "gradient_clipping")},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    found = read_deepspeed(source)
    assert set(found.auto_keys) == {"train_batch_size", "gradient_clipping", "bf16.enabled", "optimizer.params.lr"}
    assert not {"train.batch", "optim.clip", "precision.policy"} & {name for name, _ in flat(found.table)}


# ---- every key ------------------------------------------------------------------------------------------------------

# For each taken key: a config that says it with a value unlike the default, and the values that change.
ON = {"optimizer": {"type": "AdamW"}}
STAGE = {"zero_optimization": {"stage": 3}}
HALF = {"fp16": {"enabled": True}}
NVME = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
PARAM_NVME = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
HOST = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
QUANTIZED = {
    "zero_optimization": {"stage": 3, "zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.8}}
}
LEARNS, LENGTHS = {"train_batch_size": 8, "curriculum_learning": COURSE}, {"data.seq_len", "data.seq_len_warmup"}
LOSS_SCALE = {f"precision.loss_scale.{n}" for n in ("init", "window", "hysteresis", "floor")}
DROP = {"progressive_layer_drop": {"enabled": True, "theta": 0.5}}
UNI, PATTERN = {"attention": "unidirectional"}, {"model.pattern"}
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
        {"precision.policy", *LOSS_SCALE},
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
    **{
        f"zero_optimization.{key}": (beside, value, {"codec"})
        for key, beside, value in (
            ("zero_quantized_weights", STAGE, True),
            ("zero_quantized_gradients", STAGE, True),
            ("zeropp_loco_param.err_beta", QUANTIZED, 0.5),
            ("zeropp_loco_param.reset_T", QUANTIZED, 32),
        )
    },
    "torch_autocast.enabled": ({}, True, {"precision.policy"}),
    "torch_autocast.dtype": ({"torch_autocast": {"enabled": True}}, "float16", {"precision.policy", *LOSS_SCALE}),
    "curriculum_learning.enabled": ({**LEARNS, "curriculum_learning": {**COURSE, "enabled": False}}, True, LENGTHS),
    "curriculum_learning.curriculum_type": (LEARNS, "seqlen", set()),  # the one that there is
    "curriculum_learning.min_difficulty": (LEARNS, 16, {"data.seq_len_warmup"}),
    "curriculum_learning.max_difficulty": (LEARNS, 128, LENGTHS),
    "curriculum_learning.schedule_type": (LEARNS, "fixed_linear", set()),
    "curriculum_learning.schedule_config.total_curriculum_step": (LEARNS, 70, {"data.seq_len_warmup"}),
    "curriculum_learning.schedule_config.difficulty_step": (LEARNS, 4, {"data.seq_len_warmup"}),
    **{
        f"sparse_attention.{key}": ({"sparse_attention": {**UNI, "mode": mode}}, value, changes)
        for key, mode, value, changes in (
            ("mode", "fixed", "bslongformer", PATTERN),
            ("block", "bigbird", 32, PATTERN),
            ("different_layout_per_head", "fixed", True, set()),  # in one pattern of all heads
            ("num_local_blocks", "fixed", 8, PATTERN),
            ("num_global_blocks", "bigbird", 2, PATTERN),
            ("attention", "bigbird", "unidirectional", set()),
            ("horizontal_global_attention", "fixed", False, set()),
            ("num_different_global_patterns", "fixed", 1, set()),
            ("num_random_blocks", "bigbird", 2, PATTERN),
            ("num_sliding_window_blocks", "bslongformer", 5, PATTERN),
            ("global_block_indices", "bslongformer", [0, 1], PATTERN),
            ("global_block_end_indices", "bslongformer", [3], PATTERN),
        )
    },
    "sparse_attention.local_window_blocks": (
        {"sparse_attention": {**UNI, "mode": "variable", "global_block_indices": []}},
        *([2], PATTERN),
    ),
    "optimizer.type": (
        ON,
        "SGD",
        {f"optim.{n}" for n in ("name", "momentum", "nesterov", "beta1", "beta2", "eps", "correction")},
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
    set_nested(source, key.removesuffix(".*"), value)
    return source


@pytest.mark.parametrize("key", [key for key in keys.KEYS if key.outcome == keys.TAKEN], ids=lambda key: key.name)
def test_a_taken_key_changes_what_it_names_alone(key):
    beside, value, changes = TAKEN[key.name]
    one, other = (dict(flat(read_deepspeed(source).table)) for source in (beside, said(beside, key.name, value)))
    assert {name for name in {**one, **other} if one.get(name) != other.get(name)} == changes


def test_an_ignored_key_changes_nothing_and_is_named():
    plain = read_deepspeed({})
    ignored = [key.name.replace("*", "x") for key in keys.KEYS if key.outcome == keys.IGNORED]
    assert len(ignored) > 60
    for name in ignored:
        found = read_deepspeed(said({}, name, 7))
        assert found.table == plain.table and found.ignored == (name,), name
    with pytest.warns(UserWarning, match=r"^the DeepSpeed config: ignored, .*: wall_clock_breakdown$"):
        fzero.config_from_deepspeed({"wall_clock_breakdown": True}, MLP)


def test_a_refused_key_is_named_with_what_to_do():
    refused = [key for key in keys.KEYS if key.outcome == keys.REFUSED]
    assert len(refused) > 15
    for key in refused:
        name = key.name.replace("*", "x.")
        with pytest.raises(ValueError, match=f"{name} is 'on': ") as error:
            read_deepspeed(said(switched_on(name), name, "on"))
        assert "leave it out" in str(error.value)
        for value in (*key.harmless, "auto"):
            assert read_deepspeed(said(switched_on(name), name, value)) == read_deepspeed(switched_on(name)), name


def switches_of(name):
    """The switches of the tables around the one of a key."""
    parents = name.split(".")[:-1]
    within = [".".join((*parents[:depth], "enabled")) for depth in range(1, len(parents) + 1)]
    return [one for one in within if one != name and any(one == key.name for key in keys.KEYS)]


def switched_on(name):
    source = {}
    for switch in switches_of(name):
        source = said(source, switch, True)
    return source


def test_what_stands_in_a_table_that_is_not_enabled_is_ignored():
    nested = {key.name: switches_of(key.name) for key in keys.KEYS if key.outcome == keys.REFUSED}
    nested = {name: switches for name, switches in nested.items() if switches}
    assert len(nested) >= 4
    for name, switches in nested.items():
        for off in switches:
            for value in (False, None):
                source = said(said(switched_on(name), off, value), name, True)
                assert name in read_deepspeed(source).ignored, (name, off)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_codes_of_stage_3_alone_are_ignored_before_it(stage):
    codes = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    found = read_deepspeed({"zero_optimization": {"stage": stage, **codes}})
    assert "codec" not in found.table and sum("of stage 3 alone" in text for text in found.ignored) == 2
    assert read_deepspeed({"zero_optimization": {"stage": 3, **codes}}).table["codec"] == "params=int8,grads=int4"


def test_a_key_that_comes_twice_is_refused(tmp_path):
    (tmp_path / "twice.json").write_text('{"zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(ValueError, match=r"twice.json: .*the key 'stage' comes twice in one table"):
        read_deepspeed(tmp_path / "twice.json")


def test_another_number_of_steps_than_the_schedules_is_said(tmp_path):
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 47, "warmup_max_lr": 1e-3}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"scheduler": scheduler}))
    for steps, is_said in ((20, True), (47, False)):
        result = CliRunner().invoke(
            main.cli, ["plan", "--deepspeed", str(file), "--model", "mlp-tiny", "--steps", str(steps)]
        )
        assert (f"total_num_steps is 47 and the run has {steps} steps" in result.stderr) == is_said, result.stderr


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"zero_optimization": {"stge": 2}}, r"no key 'zero_optimization.stge' \(did you mean stage\?\)"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, r"\(did you mean device\?\)"),
        ({"bf16": True}, "bf16 is True; it must be a table"),
        ({"zero_optimization": {"stage": 4}}, "stage is 4; it must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "3"}}, "stage is '3'; it must be a whole number"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "must be one of none, cpu, nvme"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
        ({"optimizer": {"type": "AdamX"}}, r"'adamx' \(did you mean adam\w?\?\); it must be one of adam, adamw"),
        (
            {"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 1.0}}},
            "max_grad_norm is 1.0, .* gradient_clipping",
        ),
        ({"optimizer": {"type": "OneBitLamb", "params": {"factor_max": 5}}}, "factor_max is 5, and OneBitLamb has 4"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "amsgrad is True"),
        ({"optimizer": {"type": "Adagrad"}}, r"from_torch\(torch.optim.Adagrad\)"),
        ({"optimizer": {"type": "Lamb"}, "scheduler": {"type": "OneCycle", "params": CYCLE}}, "cycle_momentum is true"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1e-3}}}, "cycle_min_lr is None"),
        ({"curriculum_learning": COURSE}, "give train_batch_size"),
        ({"gradient_accumulation_steps": 2}, "give train_micro_batch_size_per_gpu, or leave it out and give --batch"),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 0}}},
            "freeze_step is 0; it must be at least 1",
        ),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "betas is 0.9; it must be a list$"),
        ({**LEARNS, "curriculum_learning": {**COURSE, "schedule_type": "fixed_root"}}, "do not grow evenly"),
        ({**LEARNS, "curriculum_learning": {**COURSE, "min_difficulty": 0}}, "min_difficulty is 0"),
        (
            {**LEARNS, "curriculum_learning": {**COURSE, "schedule_config": {"total_curriculum_step": 9}}},
            "schedule_config.difficulty_step is None; it must be a whole number",
        ),
        ({**LEARNS, "curriculum_learning": {**COURSE, "min_difficulty": 10}}, "min_difficulty is 10; .* multiple of"),
        ({**LEARNS, "curriculum_learning": {**COURSE, "max_difficulty": 60}}, "max_difficulty is 60; .* multiple of"),
        ({"train_batch_size": 8, "sequence_parallel_size": 2}, "sequence_parallel_size is 2: use --mesh cp=N"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, r"'optimizer.params.learning_rate'"),
        ({"optimizer": {"type": "AdamW", "params": {"wieght_decay": 1}}}, r"did you mean weight_decay"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "two numbers"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, "betas is 0.9; it must be a list"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 2.0}}},
            r"ratio is 2\.0; it must be in \[0, 1\]",
        ),
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


def test_a_key_that_deepspeed_does_not_look_at_is_named_and_ignored():
    source = {"train_batch_sise": 8, "launcher": "x", "zero_optimisation": {"stage": 2}, "fp16": {"opt_level": "O1"}}
    found = read_deepspeed(source)
    assert found.table == read_deepspeed({}).table and not found.ignored
    assert found.unknown == (
        *("train_batch_sise (did you mean train_batch_size?)", "launcher"),
        *(
            "zero_optimisation.stage (did you mean zero_optimization?)",
            "fp16.opt_level (did you mean fp16.loss_scale?)",
        ),
    )
    with pytest.warns(UserWarning, match=r"ignored, as DeepSpeed has no such key: train_batch_sise \(did you mean tr"):
        fzero.config_from_deepspeed(source, MLP)


def test_a_field_of_zero_has_both_of_its_names():
    aliases = [key.name for key in keys.KEYS if key.name.startswith("zero_optimization.stage3_")]
    assert len(aliases) > 8
    for name in aliases:
        for said_as in (name, name.replace("stage3_", "")):
            assert read_deepspeed(said({}, said_as, 7)).ignored == (said_as,)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_runs_or_is_refused_for_one_thing(name):
    source, ranks, refused = PUBLISHED[name]
    source = json.loads(json.dumps(source))
    if refused:
        with pytest.raises(ValueError, match=refused) as error:
            read_deepspeed(source, ranks)
        assert "\n" not in str(error.value)
        return
    table = {"preset": "gpt2-tiny", "train": {"steps": 100}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        config = fzero.config_from_deepspeed(source, merge_tables(table, {"train": STEPS.get(name, {})}), ranks=ranks)
    tx = build_optim.make_optimizer(config.optim, config.train.steps)
    params = {"blocks": {"w_up": torch.ones(1, 2, 4)}, "b": torch.ones(4)}
    grads = pytree.map(lambda p: torch.full_like(p, 0.5), params)
    state = tx.init(params)
    for _ in range(3):  # the first rates may be 0
        updates, state = tx.update(grads, state, params)
    assert all(bool(u.isfinite().all()) and bool((u != 0).all()) for u in pytree.leaves(updates)), updates


STEPS = {"warmup with a decay": {"steps": 1000}}


@pytest.mark.parametrize(
    ("batch", "micro", "times", "ranks", "expected"),
    [
        (32, 4, 2, 4, (32, 4)),
        (32, 4, None, 4, (32, 4)),
        (32, None, 2, 4, (32, 4)),
        (None, 4, 2, 4, (32, 4)),
        (32, None, None, 4, (32, 8)),
        (None, 4, None, 4, (16, 4)),
        (None, None, 1, 4, (None, None)),
        (None, "auto", 1, 4, (None, None)),
        (32, "auto", 2, 4, (32, 4)),
        (32, "auto", None, 4, (32, None)),
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
@pytest.mark.parametrize("kind", [kind for kind in keys.SCHEDULERS if kind != "OneCycle"])
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


def test_a_cycle_is_deepspeeds_at_every_step():
    low, peak, up, down, rate, every = 1e-3, 5e-3, 4, 3, 0.5, 2
    params = {"cycle_min_lr": low, "cycle_max_lr": peak, "cycle_first_step_size": up, "cycle_second_step_size": down}
    params |= {"decay_lr_rate": rate, "decay_step_size": every, "cycle_min_mom": 0.8, "cycle_max_mom": 0.95}
    source = {"optimizer": {"type": "Adam"}, "scheduler": {"type": "OneCycle", "params": params}}
    config = fzero.config_from_deepspeed(source, MLP)
    rates, momenta = [], []
    for i in range(-1, 14):  # DeepSpeed's iteration before the update; the first has the values that it begins with
        x = (i + 1) / (up + down)
        part = up / (up + down)
        height = x / part if x <= part else (x - 1) / (part - 1)
        over = max(0, i - (up + down) + 1)
        height = 0.0 if over else height
        rates.append((low + (peak - low) * height) / (1 + rate * over / every))
        momenta.append(0.8 if i < 0 else 0.95 - 0.15 * height)
    schedule = build_optim.make_schedule(config.optim, config.optim.lr, config.train.steps)
    torch.testing.assert_close(schedule(torch.arange(15)).tolist(), rates, rtol=1e-12, atol=0.0)
    m, v, p = torch.zeros(1).double(), torch.zeros(1).double(), torch.ones(1).double()
    tx, grads = build_optim.make_optimizer(config.optim, 1000), torch.linspace(-1, 2, 15).double()
    params = {"w": p.clone()}
    state = tx.init(params)
    for step, (lr, b1) in enumerate(zip(rates, momenta)):
        g, t = grads[step : step + 1], step + 1
        m, v = b1 * m + (1 - b1) * g, 0.99 * v + 0.01 * g * g
        p = p - lr * (m / (1 - b1**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        updates, state = tx.update({"w": g}, state, params)
        params = fzero.optim.apply_updates(params, updates)
        torch.testing.assert_close(params["w"], p, rtol=1e-12, atol=1e-12)


def deepspeeds_lamb(p, m, v, g, t, numbers):
    """A step of DeepSpeed's kernel for LAMB on one tensor."""
    lr, b1, b2, eps, decay, low, high, corrected = numbers
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    r = m / (v.sqrt() + eps) + decay * p
    rate = lr * math.sqrt(1 - b2**t) / (1 - b1**t) if corrected else lr
    return p - rate * (p.norm() / r.norm()).clamp(low, high) * r, m, v


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("kind", ["Lamb", "OneBitLamb", "Adam", "AdamW", "OneBitAdam", "ZeroOneAdam"])
def test_an_optimizer_corrects_its_bias_as_there(kind, corrected):
    low_high = {"min_coeff": 0.02, "max_coeff": 0.4} if "Lamb" in kind else {}
    params = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.05, "bias_correction": corrected, **low_high}
    config = fzero.config_from_deepspeed({"optimizer": {"type": kind, "params": params}}, MLP)
    tx = build_optim.make_optimizer(config.optim, 100)
    draw = torch.Generator().manual_seed(0)
    p = torch.randn(5, generator=draw).double() * 10
    tree, m, v = {"w": p.clone()}, torch.zeros(5).double(), torch.zeros(5).double()
    state = tx.init(tree)
    for t in range(1, 6):
        g = torch.randn(5, generator=draw).double()
        if "Lamb" in kind:
            numbers = (0.1, 0.8, 0.9, 1e-8, 0.05, 0.02, 0.4, corrected and kind == "Lamb")
            p, m, v = deepspeeds_lamb(p, m, v, g, t, numbers)
        else:
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
            first, second = (1 - 0.8**t, 1 - 0.9**t) if corrected and kind.startswith("Adam") else (1.0, 1.0)
            p = p - 0.1 * ((m / first) / ((v / second).sqrt() + 1e-8) + 0.05 * p)
        updates, state = tx.update({"w": g}, state, tree)
        tree = fzero.optim.apply_updates(tree, updates)
        torch.testing.assert_close(tree["w"], p, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", ["auto", "reference", "fused", "cpp"])
@pytest.mark.parametrize(
    "changing", [{"correction": "none"}, {"correction": "rate"}, {"b1": lambda t: 0.9 - 0.1 * (t % 2)}]
)
def test_a_form_of_adam_has_the_correction_and_the_momentum_or_says_why_not(changing, impl):
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(64, 8, generator=draw)}
    grads = {"w": torch.randn(64, 8, generator=draw)}
    tx, plain = (fzero.optim.adamw(0.1, impl=form, **changing) for form in (impl, "reference"))
    state, expected = tx.init(params), {"w": params["w"].clone()}
    known = plain.init(expected)
    refuses = impl == "fused" or (impl == "cpp" and "b1" in changing)
    for _ in range(3):
        if refuses:
            with pytest.raises(ValueError, match=r"b1 changes|correction is"):
                fzero.optim.apply_in_place(tx, grads, state, params)
            return
        params, state = fzero.optim.apply_in_place(tx, grads, state, params)
        updates, known = plain.update(grads, known, expected)
        expected = fzero.optim.apply_updates(expected, updates)
        torch.testing.assert_close(params["w"], expected["w"], rtol=1e-5, atol=1e-6)


def test_a_course_reads_pieces_that_grow_as_there():
    config = fzero.config_from_deepspeed(LEARNS, {"preset": "gpt2-tiny"})
    # From 8 to 64 in 1500 steps of 8 rows by 8: each increment after 1500 / 7 steps of 8 x 64 tokens.
    assert (config.data.seq_len, config.data.seq_len_warmup) == (64, f"8:8:{round(1500 * 8 / 56 * 8 * 64)}")


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


# ---- sparse attention -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sparse, pattern",
    [
        ({"mode": "dense", "block": 32}, "full"),
        (UNI, "fixed:64:16"),
        ({**UNI, "mode": "fixed", "block": 8, "num_local_blocks": 6, "num_global_blocks": 2}, "fixed:48:16"),
        ({**UNI, "mode": "bslongformer"}, "bigbird:16:2:1:0"),
        (
            {
                **{**UNI, "mode": "bslongformer", "block": 4, "num_sliding_window_blocks": 5},
                **{"global_block_indices": [0, 2], "global_block_end_indices": [2, 3]},
            },
            "bigbird:4:3:3:0",
        ),
        ({**UNI, "mode": "bigbird", "num_random_blocks": 2, "num_global_blocks": 3}, "bigbird:16:2:3:2"),
        ({"mode": "local_sliding_window", "block": 4, "num_sliding_window_blocks": 4}, "bigbird:4:3:0:0"),
        ({**UNI, "mode": "variable", "local_window_blocks": [2], "global_block_indices": [0, 1]}, "bigbird:32:1:1:0"),
        ({**UNI, "mode": "variable", "local_window_blocks": [1, 1], "num_random_blocks": 3}, "bigbird:16:1:1:3"),
    ],
    ids=str,
)
def test_a_sparse_attention_is_the_pattern_that_sees_the_same(sparse, pattern):
    config = fzero.config_from_deepspeed({"sparse_attention": sparse}, {"preset": "llama-tiny"})
    assert config.model.pattern == pattern
    if sparse.get("num_random_blocks"):  # drawn otherwise: the same without them
        sparse, pattern = {**sparse, "num_random_blocks": 0}, f"{pattern.rpartition(':')[0]}:0"
    at, mask = torch.arange(150), block_mask_of(sparse, 150)
    causal = at[:, None] >= at
    assert torch.equal(Pattern.parse(pattern).visible(at[:, None], at), mask.visible(150, 150)[0] & causal)


@pytest.mark.parametrize(
    "sparse, said",
    [
        (
            {},
            "attention is 'bidirectional', and a decoder does not look ahead; write 'unidirectional'",
        ),
        (
            {**UNI, "mode": "variable"},
            r"mode is 'variable' with windows of \[4\], the blocks 0, 0 random: no pattern",
        ),
        ({**UNI, "mode": "bslongformer", "global_block_indices": [3]}, "mode is 'bslongformer' with the blocks 3: no"),
        (
            {**UNI, "different_layout_per_head": True, "num_different_global_patterns": 2},
            "num_different_global_patterns is 2: a pattern is alike in all heads",
        ),
        (
            {**UNI, "mode": "bigbird", "num_random_blocks": 1, "different_layout_per_head": True},
            "different_layout_per_head is true: a pattern",
        ),
        ({**UNI, "num_different_global_patterns": 2}, "different_layout_per_head is not set; set it"),
        ({**UNI, "num_global_blocks": 3}, "num_global_blocks is 3; it must divide num_local_blocks, 4"),
        ({**UNI, "horizontal_global_attention": True}, "horizontal_global_attention is true and attention 'unidirecti"),
        ({**UNI, "num_random_blocks": 2}, "no key 'sparse_attention.num_random_blocks' .*of mode fixed; it has mode,"),
        (
            {**UNI, "num_locl_blocks": 2},
            r"no key 'sparse_attention.num_locl_blocks' \(did you mean num_local_",
        ),
        ({**UNI, "mode": "longformer"}, r"mode is 'longformer' \(did you mean bslongformer\?\)"),
        ({**UNI, "block": 0}, "sparse_attention: block is 0; it must be at least 1"),
        (
            {**UNI, "mode": "variable", "local_window_blocks": [2, 0.5]},
            r"local_window_blocks is \[2, 0.5\]; it must",
        ),
        (
            {**UNI, "mode": "variable", "global_block_indices": [2], "global_block_end_indices": [2]},
            "each end must be above",
        ),
    ],
    ids=str,
)
def test_a_sparse_attention_that_no_decoder_has_is_refused_by_name(sparse, said):
    with pytest.raises(ValueError, match=said):
        fzero.config_from_deepspeed({"sparse_attention": sparse}, {"preset": "llama-tiny"})


def test_a_sparse_attention_of_a_model_without_attention_is_refused_by_name():
    """Of every family: the pattern is set, or the line names the family and not a key that the file lacks."""
    for preset, make in presets.PRESETS.items():
        model = make()
        family = presets.family_of(model)
        if hasattr(model, "pattern"):
            assert (
                fzero.config_from_deepspeed({"sparse_attention": UNI}, {"preset": preset}).model.pattern
                == "fixed:64:16"
            )
        else:
            with pytest.raises(
                ValueError, match=f"sparse_attention: a model of the family {family} has no attention pat"
            ):
                fzero.config_from_deepspeed({"sparse_attention": UNI}, {"preset": preset})


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
    code, out, err = fz("config", "--model", "mlp-tiny", "--deepspeed", str(path))
    assert code == 0 and "no such key: trian_batch_size (did you mean train_batch_size?)" in err
    path.write_text('{"zero_optimization": {"stge": 4}}')
    code, out, err = fz("config", "--deepspeed", str(path))
    assert code == 2 and "did you mean stage?" in err and err.count("\n") == 1
    code, out, err = fz("plan", "--search", "--world-size", "2", "--deepspeed", str(path))
    assert code == 2 and "--deepspeed" in err and err.count("\n") == 1


@pytest.mark.parametrize("low, high, steps, step", [(8, 32, 6, 8), (64, 1024, 150, 8), (80, 512, 100, 16)])
def test_lengths_of_a_course_are_deepspeeds_one_step_later(low, high, steps, step):
    course = {**COURSE, "min_difficulty": low, "max_difficulty": high}
    course["schedule_config"] = {"total_curriculum_step": steps, "difficulty_step": step}
    start = {"preset": "llama-tiny", "train": {"steps": steps + 20}, "model": {"max_len": 2048}}
    config = fzero.config_from_deepspeed({"train_batch_size": 8, "curriculum_learning": course}, start)
    cut, documents = make_pieces(config), torch.zeros(1, high, dtype=torch.int64)
    for k in range(steps + 2):
        found = int((cut({"documents": documents}, 8 * k)["documents"] == 0).sum())
        theirs = math.floor(k / steps * (high - low) + low + 1e-9)  # of global_steps = k, which it asks for k + 1
        assert found == min(theirs - theirs % step, high), k


def test_the_page_has_the_table_of_the_code():
    page = (ROOT / "docs" / "migrate.md").read_text()
    assert f"<!-- keys -->\n\n{keys.markdown()}\n<!-- end -->" in page, (
        "paste fzero.run.config.deepspeed_keys.markdown()"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert, 0/1 adam", "gpt, cycle and course"])
def test_a_published_config_trains_by_command(name, fz, tmp_path):
    source = json.loads(json.dumps(PUBLISHED[name][0]))
    for batch in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        source.pop(batch, None)  # of other numbers of ranks
    source["train_batch_size"] = 4
    (tmp_path / "ds.json").write_text(json.dumps(source))
    (tmp_path / "text.txt").write_text("one two three four five\n" * 4000)
    options = ("--model", "gpt2-tiny", "--data", str(tmp_path / "text.txt"), "--steps", "20", "--seq-len", "64")
    settings = (
        "--set",
        "train.compiled=false",
        "--set",
        "train.micro_batch=4",
        "--set",
        "precision.policy=fp32",
        "--prompt",
        "",
    )
    code, _, err = fz(
        "pretrain", *options, *settings, "--deepspeed", str(tmp_path / "ds.json"), "--out", str(tmp_path / "run")
    )
    assert code == 0, err
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses and all(math.isfinite(loss) for loss in losses)


def test_a_schedule_without_an_optimizer_is_that_of_every_leaf(fz, tmp_path):
    """As there, where each group of parameters has the scheduler's rate; muon has two."""
    warm = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 10}}
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-4, "cycle_momentum": False}}
    for source in ({"scheduler": warm}, {"scheduler": cycle}):
        muon = fzero.config_from_deepspeed(source, {"preset": "mlp-tiny"}).optim
        assert (muon.name, muon.lr, muon.lr_rest) == ("muon", 1e-4, 1e-4)
        adamw = fzero.config_from_deepspeed(source, {"preset": "mlp-tiny", "optim": {"name": "adamw"}}).optim
        assert (adamw.lr, adamw.lr_rest) == (1e-4, 0.0)
        for own in ({"lr": 0.5}, {"lr_rest": 0.25}):
            found = fzero.config_from_deepspeed(source, {"preset": "mlp-tiny", "optim": own}).optim
            assert (found.lr, found.lr_rest) == (own.get("lr", 1e-4), own.get("lr_rest", 3e-3))
    (tmp_path / "ds.json").write_text(json.dumps({"scheduler": warm}))
    code, out, err = fz("config", "--deepspeed", tmp_path / "ds.json", "--model", "mlp-tiny")
    assert code == 0 and re.search(r"^lr_rest = 0.0001\b", out, re.M), err
    code, out, err = fz(
        "config", "--deepspeed", tmp_path / "ds.json", "--model", "mlp-tiny", "--set", "optim.name=lion"
    )
    assert code == 0, err


@pytest.mark.parametrize(
    "key", ["loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"]
)
def test_a_wrong_loss_scale_is_named_by_its_key(key):
    for value in (-200, 1e5) if key == "initial_scale_power" else (-1,):
        with pytest.raises(ValueError, match=rf"fp16: {key} is {value}.*initial_scale_power.*hysteresis"):
            fzero.config_from_deepspeed({"fp16": {"enabled": True, key: value}}, {"preset": "mlp-tiny"})
