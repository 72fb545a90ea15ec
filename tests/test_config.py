"""A config is a value: it goes to JSON and back exactly, and says early and plainly what is wrong."""

import dataclasses
import json
import tomllib

import pytest
import torch

from fzero import models
from fzero.core import CPU, Within, config_tables, flat, metadata_of, set_nested
from fzero.run import (
    RunConfig,
    build,
    build_optim,
    checkpoint_list,
    config_table,
    drop_absent_axes,
    from_table,
    machine,
    recipe,
    run_folder,
    to_json,
    to_table,
    token_flop,
    unused_keys,
)
from fzero.run.config import run_config as config
from fzero.run.measure import memory_check
from fzero.run.setup.members import members_of
from fzero.sharding import fake_mesh


@pytest.mark.parametrize("name", models.PRESETS)
def test_every_preset_goes_to_json_and_back(name):
    run = recipe(name)
    assert config_table.from_json(to_json(run)) == run
    assert run.preset == name and run.model == models.preset(name)
    assert run.train.batch // run.train.micro_batch >= 4


@pytest.mark.parametrize("name", unused_keys.OPTIMIZERS)
def test_every_optimizer_goes_to_json_and_back(name):
    run = recipe("llama-tiny", optimizer=name)
    assert run.optim.name == name and config_table.from_json(to_json(run)) == run


MARKS = metadata_of(config.RunConfig)
FROM_ZERO = [
    (name, key)
    for name, keys in unused_keys.OPTIMIZERS.items()
    for key in keys
    if type(getattr(config.Optim(), key)) is float
    and [mark.bounds[:2] for mark in MARKS[f"optim.{key}"] if isinstance(mark, Within)] == [(0, True)]
]


def after_steps(tx):
    """Two matrices after three steps."""
    params = {name: torch.tensor([[[1.0, -2.0], [0.5, 3.0]]]).double() for name in ("blocks/w_a", "embed")}
    state = tx.init(params)
    for scale in (1.0, -0.5, 2.0):
        updates, state = tx.update({name: scale * x.cos() for name, x in params.items()}, state, params)
        params = {name: x + updates[name] for name, x in params.items()}
    return torch.stack(list(params.values()))


@pytest.mark.parametrize("name, key", [*FROM_ZERO, ("slowmo", "momentum"), ("diloco", "momentum")])
def test_a_number_of_0_is_the_limit_of_small_ones_and_no_word_for_another(name, key):
    def outcome(value):
        if name in unused_keys.OPTIMIZERS:
            optim = dataclasses.replace(recipe("llama-tiny", optimizer=name).optim, nesterov=False, **{key: value})
            return after_steps(build_optim.make_optimizer(optim, 400))
        settings = config.LocalSteps(name, 5, **{key: value})
        return after_steps(members_of(settings, fake_mesh({"rp": 2})).outer)

    assert torch.allclose(outcome(0.0), outcome(1e-9), rtol=0, atol=1e-6)


def test_floats_keep_every_bit():
    run = from_table({"optim": {"lr": 0.1 + 0.2, "eps": 5e-324}})
    back = config_table.from_json(to_json(run))
    assert back.optim.lr.hex() == (0.1 + 0.2).hex() and back.optim.eps == 5e-324


def test_a_table_changes_what_it_names_and_nothing_else():
    text = """
    preset = "mixtral-tiny"
    zero = 1
    [model]
    n_layers = 2
    rope_scaling = {factor = 4}
    [optim]
    name = "muon"
    lr = 1
    [optim.schedule]
    name = "wsd"
    decay_steps = 5
    [train]
    steps = 30
    compiled = false
    [mesh]
    dp = 1
    """
    run = from_table(tomllib.loads(text))
    base = recipe("mixtral-tiny", steps=30, optimizer="muon")
    assert run.model == dataclasses.replace(base.model, n_layers=2, rope_scaling=models.RopeScaling(factor=4.0))
    assert run.optim == dataclasses.replace(
        base.optim, lr=1.0, schedule=dataclasses.replace(base.optim.schedule, name="wsd", decay_steps=5)
    )
    assert run.train == dataclasses.replace(base.train, compiled=False) and run.data == base.data
    assert run.zero == 1 and run.mesh == {"dp": 1}
    assert type(run.optim.lr) is float
    assert config_table.from_json(to_json(run)) == run
    assert from_table(to_table(run)) == run


def test_a_family_without_a_preset():
    run = from_table({"preset": "", "model": {"family": "gpt2", "n_layers": 1}})
    assert run.model == models.GPT2Config(n_layers=1) and config_table.from_json(to_json(run)) == run


def test_warmup_follows_from_the_steps():
    assert recipe("llama-tiny", steps=5).optim.schedule.warmup_steps == 0
    assert recipe("llama-tiny", steps=1000).optim.schedule.warmup_steps == 50


WRONG = {
    "unknown key": ({"train": {"stepz": 3}}, "unknown key 'train.stepz' (did you mean steps?)"),
    "unknown table": ({"modle": {}}, "unknown key 'modle' (did you mean model?)"),
    "deep unknown key": ({"model": {"rope_scaling": {"factr": 2}}}, "'model.rope_scaling.factr' (did you mean "
    "factor?)"),
    "text for a number": ({"train": {"steps": "ten"}}, "train.steps is 'ten'; it must be a whole number"),
    "float for an int": ({"train": {"batch": 2.5}}, "train.batch is 2.5; it must be a whole number"),
    "bool for a float": ({"optim": {"lr": True}}, "optim.lr is True; it must be a number"),
    "number for a table": ({"train": 3}, "train is 3; it must be a table of steps"),
    "text for a model": ({"model": "llama-tiny"}, "model is 'llama-tiny'; it must be a table of vocab_size"),
    "no steps": ({"train": {"steps": 0}}, "train.steps is 0; it must be at least 1"),
    "nan": ({"optim": {"lr": float("nan")}}, "optim.lr is nan"),
    "infinite": ({"optim": {"clip": float("inf")}}, "optim.clip is inf"),
    "preset": ({"preset": "llama-tin"}, "'llama-tin' is not a preset (did you mean llama-tiny?)"),
    "family": ({"preset": "", "model": {"family": "lama"}}, "model.family is 'lama' (did you mean llama?)"),
    "family of the preset": ({"model": {"family": "gpt2"}}, "model.family is 'gpt2' and llama-tiny is of family llama"),
    "no heads": ({"model": {"n_heads": 0}}, "model.n_heads is 0; it must be at least 1"),
    "heads": ({"model": {"n_heads": 3}}, "model: d_model is 256, not divisible by n_heads=3"),
    "optimizer": ({"optim": {"name": "adamv"}}, "optim.name is 'adamv' (did you mean adam?)"),
    "schedule": ({"optim": {"schedule": {"name": "cosin"}}}, "optim.schedule.name is 'cosin' (did you mean cosine?)"),
    "unused number": ({"optim": {"name": "adamw", "momentum": 0.9}}, "optim.momentum does nothing with adamw"),
    "unused in the schedule": ({"optim": {"schedule": {"power": 2.0}}}, "optim.schedule.power does nothing with "
    "cosine"),
    "policy": ({"precision": {"policy": "float16"}}, "precision.policy is 'float16'"),
    "loss scale": ({"precision": {"loss_scale": {"floor": -1}}}, "loss_scale.floor is -1.0; it must be above 0"),
    "remat": ({"train": {"remat": "some"}}, "remat is 'some'"),
    "compiled": ({"train": {"compiled": "yes"}}, "train.compiled is 'yes'; it must be one of auto, true, false"),
    "micro-batch": ({"train": {"batch": 10, "micro_batch": 4}}, "train.micro_batch is 4 and does not divide "
    "train.batch=10; use one"),
    "sequence": ({"data": {"seq_len": 5000}}, "data.seq_len is 5000 and the model takes 1024"),
    "warmup": ({"train": {"steps": 5}, "optim": {"schedule": {"warmup_steps": 7}}}, "warmup_steps is 7; it must be "
    "below train.steps=5"),
    "decay": ({"optim": {"schedule": {"name": "wsd"}}}, "optim.schedule.decay_steps is 0; wsd needs 1 to"),
    "nesterov": ({"optim": {"name": "sgd", "momentum": 0.0, "nesterov": True}}, "optim.nesterov is true and "
    "optim.momentum is 0"),
    "stage": ({"zero": 4}, "zero is 4; it must be at least 0 and below 4"),
    "reduce": ({"reduce": "canonnical"}, ("reduce is 'canonnical' (did you mean "
    "canonical?); it " "must be one of fast, once, canonical")),
    "earlier key": ({"accumulate": "full"}, "unknown key 'accumulate'; the keys are "),
    "prefetch": ({"prefetch": -1}, "prefetch is -1; it must be at least 0"),
    "sequence parallel": ({"sequence": 1}, "sequence is 1; it must be true or false"),
    "axis": ({"mesh": {"dq": 2}}, "mesh.dq is 2 (did you mean dp?)"),
    "axis size": ({"mesh": {"dp": 0}}, "mesh.dp is 0; the axes are dp"),
    "mesh": ({"mesh": 2}, "mesh is 2; it must be a table of whole numbers"),
    "seed": ({"train": {"seed": -1}}, "train.seed is -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_anything_runs(name):
    table, message = WRONG[name]
    with pytest.raises(ValueError) as caught:
        unused_keys.refuse_unused(from_table(table), table)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


MET = {  # what has keys that need something do something, by the first of such keys
    "train.batch_ramp": {"train": {"batch": 16}},
    "dpo": {"objective": "dpo"},
    "data.add_tokens": {"objective": "chat"},
    "data.template": {"objective": "chat"},
    "data.too_long": {"objective": "chat"},
    "data.cache": {"data": {"path": "s3://bucket/corpus"}},
    "precision.loss_scale": {"precision": {"policy": "fp16"}},
    "guard.sigmas": {"guard": {"spike": "skip"}},
    "guard.rollback_steps": {"guard": {"nonfinite": "rollback"}},
    "guard.max_skipped": {"guard": {"nonfinite": "skip"}},
}


def keys_with(need):
    leaves = dict(flat(to_table(config.RunConfig())))
    return [key for key, marks in MARKS.items() if need in marks and key in leaves]


NEEDS = dict.fromkeys(mark for marks in MARKS.values() for mark in marks if isinstance(mark, unused_keys.Need))


def test_each_key_that_needs_something_is_tried():
    assert len(NEEDS) == len(MET) == 10


@pytest.mark.parametrize("name", MET)
def test_a_key_is_refused_without_what_it_needs(name):
    (need,) = {mark for mark in MARKS[name] if isinstance(mark, unused_keys.Need)}
    usual = {**dict(flat(to_table(config.RunConfig()))), "train.batch_ramp": "12:4:100"}
    without = from_table({"guard": {"nonfinite": "stop"}, "train": {"batch": 16, "batch_ramp": "16:4:100"}})
    keys = keys_with(need)
    assert keys
    for key in keys:
        table = {}
        set_nested(table, key, usual[key])
        with pytest.raises(ValueError, match=f"^{key} does nothing with {need.missing(without)}; .*, or leave it out$"):
            unused_keys.refuse_unused(without, table)
        unused_keys.refuse_unused(from_table(MET[name]), table)


NO_AXIS = {
    "context": ({"context": "ring"}, "context is ring, which is for ranks of cp, and the mesh is dp alone; use"),
    "one rank": ({"context": "gather", "mesh": {"cp": 1, "tp": 2}}, "and the mesh is tp=2; use --mesh cp=2, or"),
    "experts": ({"experts": "exchange", "mesh": {"dp": 4}}, "experts is exchange, which is for ranks of ep, and"),
    "sequence": ({"sequence": True}, "sequence is true, which is for ranks of tp"),
    "schedule": ({"pipeline": {"schedule": "gpipe"}}, "pipeline.schedule is gpipe, which is for ranks of pp"),
    "chunks": ({"pipeline": {"schedule": "interleaved", "chunks": 2}, "mesh": {"cp": 2}}, "is for ranks of pp"),
    "layout": ({"pipeline": {"layout": "1,1"}}, "pipeline.layout is 1,1, which is for ranks of pp"),
    "prefetch": ({"prefetch": 2, "zero": 2}, "prefetch is 2, and stage 2 gathers no parameters; use --zero 3"),
    "resident": ({"resident": 1}, "resident is 1, and stage 0 gathers no parameters; use --zero 3"),
    "reshard": ({"reshard": False}, "reshard is false, and stage 0 gathers no parameters"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_AXIS)
def test_what_is_said_of_an_axis_that_the_mesh_has_not_is_refused(name):
    table, message = NO_AXIS[name]
    made = from_table(table)
    with pytest.raises(ValueError) as caught:
        unused_keys.refuse_without_axis(made, table)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    unused_keys.refuse_without_axis(made, table, baseline=made)  # what a resumed run has recorded
    unused_keys.refuse_without_axis(made, {})  # and what a preset says
    unused_keys.refuse_without_axis(
        drop_absent_axes(made),
        {name: x for name, x in table.items() if name not in ("prefetch", "resident", "reshard")},
    )


def test_what_is_said_of_an_axis_that_the_mesh_has_is_taken():
    for table in (
        {"context": "ring", "mesh": {"cp": 2}},
        {"context": "auto"},
        {"experts": "gather", "mesh": {"ep": 2}},
        {"pipeline": {"layout": "2,2"}, "mesh": {"pp": 2}},
        {"prefetch": 2, "zero": 3},
        {"prefetch": 0, "offload": "params=host"},
    ):
        unused_keys.refuse_without_axis(from_table(table), table)
    ring = from_table({"context": "ring", "sequence": True, "mesh": {"tp": 2}})
    assert (drop_absent_axes(ring).context, drop_absent_axes(ring).sequence) == ("auto", True)


def test_a_command_refuses_what_is_said_of_an_axis_that_its_mesh_has_not(fz):
    for command in (("pretrain", "--out", "run"), ("plan", "--gpu", "h100")):
        code, out, err = fz(*command, "--model", "llama-tiny", "--context", "ring")
        assert (code, out) == (2, "") and "context is ring, which is for ranks of cp" in err and err.count("\n") == 1


def test_a_config_made_in_python_is_checked_too():
    with pytest.raises(ValueError, match="micro_batch is 3 and does not divide"):
        RunConfig(train=config.Train(batch=4, micro_batch=3))
    with pytest.raises(ValueError, match=r"optim\.lr is -1\.0"):
        RunConfig(optim=config.Optim(lr=-1.0))


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("train.steps=5", ("train.steps", 5)),
        ("optim.lr = 1e-3", ("optim.lr", 1e-3)),
        ("train.compiled=false", ("train.compiled", False)),
        ("optim.name=muon", ("optim.name", "muon")),
        ('optim.name="muon"', ("optim.name", "muon")),
        ("train.remat=every:2", ("train.remat", "every:2")),
        ("mesh={dp = 2}", ("mesh", {"dp": 2})),
        ("data.bucket_lengths=8,32", ("data.bucket_lengths", "8,32")),
        ("codec=params=int8,grads=int4", ("codec", "params=int8,grads=int4")),
    ],
)
def test_settings(text, pair):
    key, value = config_tables.parse_setting(text)
    assert (key, value) == pair and type(value) is type(pair[1])


@pytest.mark.parametrize("text", ["train.steps", "=5", "a b=c", "train.steps=1 2", "x=[1,"])
def test_settings_that_are_none(text):
    with pytest.raises(ValueError, match="--set"):
        config_tables.parse_setting(text)


def test_files(tmp_path):
    (tmp_path / "run.toml").write_text("zero = 1\n")
    (tmp_path / "bad.toml").write_text("zero = \n")
    (tmp_path / "bad.json").write_text("[1]")
    (tmp_path / "run.yaml").write_text("zero: 1")
    assert config_tables.read_table(tmp_path / "run.toml") == {"zero": 1}
    wrong = {
        "bad.toml": "not TOML",
        "bad.json": "not a JSON object, but a list",
        "run.yaml": "is a .toml file",
        "no.toml": "no such file",
    }
    for name, message in wrong.items():
        with pytest.raises(ValueError, match=message) as caught:
            config_tables.read_table(tmp_path / name)
        assert name in str(caught.value)


# -- what a config means


def resolved(table):
    return machine.resolve_auto(from_table(table), CPU)


@pytest.mark.parametrize("name", unused_keys.SCHEDULES)
def test_schedules_start_peak_and_end_as_they_say(name):
    numbers = (
        {"name": name}
        | ({"decay_steps": 50} if "decay_steps" in unused_keys.SCHEDULES[name] else {})
        | ({} if name == "one_cycle" else {"warmup_steps": 10})
    )
    numbers |= {"end": 0.25} if "end" in unused_keys.SCHEDULES[name] else {}
    run = from_table({"train": {"steps": 100}, "optim": {"lr": 2.0, "schedule": numbers}})
    rate = build_optim.make_schedule(run.optim, run.optim.lr, 100)
    values = [float(rate(step)) for step in range(101)]
    assert max(values) == pytest.approx(2.0)
    assert values[0] < 0.2
    if "end" in unused_keys.SCHEDULES[name]:
        assert values[100] == pytest.approx(0.5)


@pytest.mark.parametrize("optimizer", unused_keys.OPTIMIZERS)
@pytest.mark.parametrize("preset", ["mlp-tiny", "mixtral-tiny"])
def test_state_bytes_are_those_of_the_state(preset, optimizer):
    sizes = {"mlp-tiny": {}, "mixtral-tiny": {"d_model": 32, "d_ff": 16, "n_layers": 2, "vocab_size": 64}}[preset]
    made = build.build(
        resolved({"preset": preset, "model": sizes, "optim": {"name": optimizer}, "train": {"ema_decay": 0.9}})
    )
    state = build.first_state(made)
    parts = (state.params, state.master, state.opt_state, state.extra)
    assert memory_check.memory_needed(made).state == memory_check.tree_bytes(parts)


def test_muon_is_for_the_matrices_of_blocks():
    run = from_table(
        {
            "preset": "mixtral-tiny",
            "model": {"n_layers": 1},
            "optim": {"name": "muon", "clip": 0.0},
            "train": {"steps": 20},
        }
    )
    model = models.build(run.model)
    state = build_optim.make_optimizer(run.optim, 20).init(models.init_params(model, torch.tensor([0, 0])))
    moments = {label: sorted(part.momentum if label == "muon" else part.m) for label, part in state.items()}
    assert moments["muon"] == [f"blocks/attn/w_{n}" for n in "koqv"] + [
        f"blocks/moe/w_{n}" for n in ("down", "gate", "up")
    ]
    assert "blocks/moe/router" in moments["adamw"] and "embed/tokens" in moments["adamw"]


def test_flops_of_a_token():
    """Against the sum over the matrices that a token meets, written out."""
    sizes = {"vocab_size": 64, "max_len": 32, "d_model": 16, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "d_ff": 24}
    made = build.build(resolved({"preset": "", "model": {"family": "llama", **sizes}, "data": {"seq_len": 32}}))
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24
    norms = 3 * 2 * 16 + 16
    assert token_flop(made).model == 6 * (3 * layer + 64 * 16 + norms) + 12 * 3 * 32 * 16


def test_a_model_too_large_for_the_memory_is_refused():
    made = build.build(resolved({"preset": "llama-70b"}))
    said = r"llama-70b \(70.6B parameters\) needs .* GB .* 16.0 GB are available; the largest preset .* llama-"
    with pytest.raises(ValueError, match=said) as error:
        memory_check.expect_fitting_memory(made, 16 * 10**9)
    assert "\n" not in str(error.value)
    allowed = dataclasses.replace(made.config, train=dataclasses.replace(made.config.train, memory_check=False))
    memory_check.expect_fitting_memory(made._replace(config=allowed), 16 * 10**9)
    memory_check.expect_fitting_memory(build.build(resolved({})), 16 * 10**9)


PARALLEL = {
    "zero": 3,
    "reduce": "canonical",
    "sequence": True,
    "prefetch": 2,
    "reshard": False,
    "resident": 1,
    "mesh": {"dp": 2},
}


def test_what_is_parallel_is_kept_and_older_configs_lack_it(tmp_path):
    run = from_table({"preset": "mlp-tiny", **PARALLEL})
    assert {name: getattr(run, name) for name in PARALLEL} == PARALLEL
    assert config_table.from_json(to_json(run)) == run
    older = {
        name: value
        for name, value in to_table(recipe("mlp-tiny")).items()
        if name not in {*PARALLEL} - {"zero", "mesh"}
    }
    assert config_table.from_json(json.dumps(older)) == recipe("mlp-tiny")
    # `accumulate` is a key of runs that were begun before `reduce` had three words.
    written = {**older, "zero": 2, "accumulate": "full"}
    assert config_table.from_json(json.dumps(written)) == dataclasses.replace(recipe("mlp-tiny"), zero=2, reduce="once")
    assert config_table.from_json(json.dumps({**written, "accumulate": "shards"})).reduce == "fast"
    # A rate of 0 of the outer optimizer was the method's own, and so was a momentum of 0 beside it.
    local = {"method": "slowmo", "lr": 0.0, "momentum": 0.0, "every": 5}
    members = {**older, "mesh": {"rp": 2}, "local": local}
    assert config_table.from_json(json.dumps(members)).local == config.LocalSteps("slowmo", 5)
    (tmp_path / run_folder.ATTEMPTS).write_text(json.dumps({"config": written}) + "\n")
    assert run_folder.read_attempts(tmp_path)[0]["config"]["reduce"] == "once"
    assert not checkpoint_list.differing_values({**to_table(recipe("mlp-tiny")), "accumulate": "shards"}).keys() - {
        "preset"
    }


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
@pytest.mark.parametrize("stage", range(4))
def test_each_rank_needs_what_its_shards_have(stage, optimizer):
    sizes = {"d_model": 32, "d_ff": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
    table = {
        "preset": "llama-tiny",
        "model": sizes,
        "zero": stage,
        "optim": {"name": optimizer},
        "train": {"ema_decay": 0.9},
    }
    bytes_of = []
    for mesh in (fake_mesh({}), fake_mesh({"dp": 2, "tp": 2}, rank=3)):
        made = build.build(dataclasses.replace(resolved(table), precision=config.Precision("bf16", "default")), mesh)
        state = build.first_state(made)
        need = memory_check.memory_needed(made)
        assert need.state == memory_check.tree_bytes((state.params, state.master, state.opt_state, state.extra))
        bytes_of.append(need)
    alone, shared = bytes_of
    assert shared.grads < alone.grads and shared.activations < alone.activations
    assert (shared.gathered > 0) == (stage == 3) and alone.gathered == 0
    if optimizer == "muon" and stage == 3:  # all but the norms' few elements in a fourth each, or nearly
        assert alone.state / 4 <= shared.state < alone.state / 3.8


def test_micro_batches_are_shared_by_the_data_ranks():
    run = resolved({"train": {"batch": 24, "micro_batch": 4}})
    for sizes, expected in (({"dp": 3}, 2), ({"dp": 3, "rp": 2}, 1), ({"dp": 2, "tp": 4}, 3)):
        assert build.local_micro_batches(run, fake_mesh(sizes)) == expected
    said = (
        r"train\.batch=24 in pieces of train\.micro_batch=4 makes 6 micro-batches, which 4 data ranks \(rp=2 x "
        r"dp=2\) .* --micro-batch"
    )
    with pytest.raises(ValueError, match=said) as error:
        build.build(run, fake_mesh({"dp": 2, "rp": 2}))
    assert "use --micro-batch 2 or 3 or 6" in str(error.value)
    with pytest.raises(ValueError, match="use a --batch that 5 divides"):
        build.local_micro_batches(run, fake_mesh({"dp": 5}))


def test_sequences_are_divided_before_anything_runs():
    with pytest.raises(ValueError, match=r"data\.seq_len is 255, which sequence parallelism over tp=2 does not divide"):
        build.build(resolved({"data": {"seq_len": 255}, "sequence": True}), fake_mesh({"tp": 2}))


def test_json_is_plain():
    assert json.loads(to_json(recipe("mlp-tiny")))["model"]["family"] == "mlp"
