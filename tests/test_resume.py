"""Training goes on from checkpoints bit for bit; for kills see test_checkpoint_kill.py, for other meshes
test_checkpoint_ranks.py."""

import json
import shlex
import shutil
from dataclasses import replace

import pytest
import torch
from close import assert_same
from launched import TINY, torchrun, write_text
from launched import rows as launched_rows

import fzero
from fzero import checkpoint, optim
from fzero.checkpoint import restore_state
from fzero.cli import pretrain as command
from fzero.core import flat, precision, pytree, set_nested
from fzero.models import GPT2Config, gpt2
from fzero.run import RunConfig, apply_table, auto_resume, from_table, run_folder, to_table
from fzero.run.config import placement
from fzero.run.runner.saver import to_memory
from fzero.train import meta_state

MESH = fzero.one_process()
MODEL = gpt2(GPT2Config(vocab_size=17, max_len=8, d_model=8, n_layers=2, n_heads=2, d_ff=16, dropout=0.2, init_std=0.3))
OPTIMIZERS = {
    "sgd": lambda: optim.sgd(0.1, 0.9, nesterov=True),
    "adamw": lambda: optim.adamw(optim.cosine(1e-2, 20), weight_decay=0.1),
}
# A loss scale that rises every third step, and that overflows on the way.
POLICIES = {
    "fp32": precision.fp32(),
    "bf16": precision.bf16(),
    "fp16": precision.fp16(precision.LossScale(init=2.0**15, window=3, hysteresis=1)),
}


def start(optimizer, policy, seed=0):
    tx = optim.with_average(OPTIMIZERS[optimizer](), 0.9)
    plan = fzero.zero_plan(0, MODEL, MESH, policy=POLICIES[policy])
    step = fzero.make_train_step(MODEL, tx, plan)
    return step, fzero.init_state(MODEL, tx, plan, seed=seed)


def train(step, state, steps):
    """The state after so many steps more; the batch is a function of the state's own position."""
    losses = []
    for _ in range(steps):
        g = torch.Generator().manual_seed(int(state.data_cursor))
        tokens = torch.randint(0, 17, (4, 9), generator=g)
        state, metrics = step(state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
        losses.append((float(metrics.loss), bool(metrics.skipped), float(metrics.loss_scale)))
    return state, losses


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ten_and_ten_steps_are_twenty_bit_for_bit(optimizer, policy, tmp_path):
    step, state = start(optimizer, policy)
    whole, losses = train(step, state, 20)
    _, state = start(optimizer, policy)
    half, first = train(step, state, 10)
    path = checkpoint.save(tmp_path, half, step=10)
    again, like = start(optimizer, policy, seed=99)
    resumed, second = train(again, checkpoint.restore(path, like), 10)
    assert first + second == losses
    assert_same(resumed, whole)
    assert int(whole.step) == 20 and losses[0] != losses[10]
    if policy == "fp16":
        assert any(skipped for _, skipped, _ in second) and len({scale for *_, scale in second}) > 1


def test_a_checkpoint_that_kept_the_average_in_extra_is_resumed(tmp_path):
    tx, plan = optim.with_average(optim.adamw(1e-2), 0.9), fzero.zero_plan(0, MODEL, MESH)
    state = fzero.init_state(MODEL, tx, plan, seed=3)
    earlier = state._replace(
        opt_state=state.opt_state.inner, extra={**state.extra, "ema": pytree.map(torch.neg, state.opt_state.average)}
    )
    path = checkpoint.save(tmp_path, earlier, step=0)
    like, specs = meta_state(plan, tx), fzero.state_specs(plan, tx)
    found = restore_state.restore_state(path, like, specs, plan, None)
    assert_same(found.opt_state, state.opt_state._replace(average=earlier.extra["ema"]))
    with pytest.raises(ValueError, match=r"extra: .*extra/ema/"):
        plain = optim.adamw(1e-2)
        restore_state.restore_state(path, meta_state(plan, plain), fzero.state_specs(plan, plain), plan, None)


# ---- where a run is computed: its last attempt's placement is the next one's ----

# Another value than the default of every key that a resumed run may change.
PLACED = {
    "device": "cuda",
    "mesh": {"dp": 2, "tp": 2},
    "zero": 3,
    "reduce": "canonical",
    "sequence": True,
    "context": "ulysses",
    "experts": "exchange",
    "codec": "params=int8,block=64",
    "pipeline.schedule": "interleaved",
    "pipeline.chunks": 2,
    "pipeline.layout": "1,2,3,2",
    "prefetch": 2,
    "reshard": False,
    "resident": 1,
    "partition_activations": True,
    "offload": "params=nvme,opt=nvme,acts=host",
    "nvme.folder": "a folder/on it's disk",
    "nvme.buffer_mb": 64,
    "host_memory_gb": 100.0,
    "precision.policy": "bf16",
}
BASE = {"preset": "llama-tiny", "precision": {"policy": "fp32", "fp32_matmul": "default"}, "train": {"remat": "full"}}
NEEDS = {"nvme.folder": "offload", "nvme.buffer_mb": "offload", "pipeline.chunks": "pipeline.schedule"}


def placed(*keys):
    """The tiny config with other values of these keys."""
    table = {}
    for key in keys:
        set_nested(table, key, PLACED[key])
    mesh = table.pop("mesh", {})
    return replace(apply_table(from_table(BASE), table), mesh=mesh)


def values(config):
    found = dict(flat({key: value for key, value in to_table(config).items() if key != "mesh"}))
    return {**found, "mesh": config.mesh}


def changes_of(text):
    """The values that a printed command gives, as the command line reads it: (changes, --out)."""
    words = shlex.split(text)
    words = words[words.index("pretrain") + 1 :]
    given = command.pretrain.make_context("pretrain", words).params
    out, mesh = given.pop("out"), given.pop("mesh")
    others = ("resume", "auto_resume", "settings")
    command.refuse_config({k: v for k, v in given.items() if v is not None and k not in others}, ())
    return command.table_of(None, (), mesh, given), out


def test_every_key_of_a_placement_is_tried_here():
    assert set(PLACED) == set(placement.KEYS)
    usual = values(from_table(BASE))
    assert all(usual[key] != value for key, value in PLACED.items())


@pytest.mark.parametrize("key", PLACED)
def test_the_last_placement_is_kept_and_nothing_else_is(key):
    needs = [NEEDS[key]] if key in NEEDS else []
    before, last = placed(*needs), placed(*needs, key)
    last = replace(last, train=replace(last.train, steps=700, memory_check=False))
    kept = values(placement.keep_placement(before, last, last.mesh))
    assert kept[key] == PLACED[key] and {k for k, v in values(before).items() if kept[k] != v} == {key}


def test_fewer_processes_for_a_while_do_not_make_the_mesh_smaller_for_good():
    fitted = replace(placed("zero"), mesh={"dp": 1})
    kept = placement.keep_placement(placed("mesh"), fitted, None)
    assert kept.mesh == PLACED["mesh"] and kept.zero == 3


@pytest.mark.parametrize(
    "keys",
    [
        (),
        *((*NEEDS.get(key, "").split(), key) for key in PLACED),
        tuple(k for k in PLACED if k != "partition_activations"),
    ],
    ids=lambda keys: "+".join(keys) or "none",
)
def test_the_printed_command_leads_to_the_same_placement(keys, tmp_path):
    last = placed(*keys)
    text = placement.resume_command(tmp_path / "a run", last, 4 if "mesh" in keys else 1)
    changes, out = changes_of(text)
    assert out == tmp_path / "a run" and "\n" not in text and "--resume" in text
    mesh = changes.pop("mesh", {})
    again = replace(apply_table(from_table(BASE), changes), mesh=mesh)
    without = (
        "device",
        "reshard",
        "partition_activations",
        "precision.policy",
    )  # which have no flag: config.json carries them
    assert {k: v for k, v in values(again).items() if k not in without} == {
        k: v for k, v in values(last).items() if k not in without
    }
    if not keys:
        assert text == f"fzero pretrain --out '{tmp_path}/a run' --resume"


def test_all_processes_side_by_side_need_no_flag(tmp_path):
    assert "--mesh" not in placement.resume_command(tmp_path, replace(placed(), mesh={"dp": 4}), 4)


def test_a_command_that_resumes_by_itself_may_name_the_placement(tmp_path):
    """`--auto-resume` with values of the placement that are not the run's."""
    run_folder.create_run(tmp_path / "run", placed(), None, corpus="data")
    assert auto_resume.allowed_changes({"zero": 3, "prefetch": 2}, tmp_path / "run", None) == {"zero": 3, "prefetch": 2}


def test_a_command_that_resumes_by_itself_may_name_other_numbers(tmp_path):
    """Those that `--resume` may change, as far as they differ; nothing else."""
    run_folder.create_run(tmp_path / "run", placed(), None, corpus="data")
    same = to_table(placed())["optim"]["beta2"]
    given = {"optim": {"lr": 0.5, "beta2": same, "schedule": {"name": "linear"}}, "train": {"steps": 900}}
    wanted = {"optim": {"lr": 0.5, "schedule": {"name": "linear"}}, "train": {"steps": 900}}
    assert auto_resume.allowed_changes(given, tmp_path / "run", None) == wanted
    for key, value in (("train.batch", 128), ("data.seq_len", 8), ("model.n_layers", 7), ("train.seed", 5)):
        table = {}
        set_nested(table, key, value)
        with pytest.raises(ValueError, match=rf"^{key} is {value} here and .*, which is to be resumed"):
            auto_resume.allowed_changes(table, tmp_path / "run", None)


@pytest.mark.slow
def test_a_job_whose_numbers_change_goes_on_with_them_on_one_process_and_on_two(tmp_path, monkeypatch, fz):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    command = [*TINY, "--reduce", "canonical", "--prompt", ""]
    code, _, err = fz("pretrain", *command, "--steps", 3, "--out", "one")
    assert code == 0, err
    shutil.copytree("one", "two")
    changed = [*command, "--steps", 5, "--lr", 1e-3, "--set", "optim.clip=0", "--auto-resume"]
    code, out, err = fz("pretrain", *changed, "--out", "one")
    lines = ("optim.lr = 0.001", "optim.clip = 0.0", "train.steps = 5, not 3")
    assert code == 0 and all(f"from step 3 on: {line}" in out for line in lines), err
    code, out, err = fz("pretrain", *changed, "--out", "one")  # as a scheduler that starts it again
    assert code == 0 and "one: is complete: it has made its 5 steps" in out and "from step" not in out, err
    out = torchrun(tmp_path, 2, *changed, "--out", "two")
    assert all(f"from step 3 on: {line}" in out for line in lines)
    assert launched_rows(tmp_path / "two") == launched_rows(tmp_path / "one")


@pytest.mark.slow
def test_a_run_goes_on_where_its_last_attempt_was(tmp_path, fz, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    code, out, err = fz("pretrain", *TINY, "--steps", 9, "--stop-at", 1, "--out", "run", "--prompt", "")
    assert code == 0 and out.endswith("--out run --resume\n"), (out, err)
    flags = ["--zero", 3, "--reduce", "canonical", "--prefetch", 2, "--offload", "opt=host"]
    resumed = ["pretrain", "--out", "run", "--resume", "--prompt", ""]
    for stop, more, zero in ((2, flags, 3), (3, [], 3), (4, ["--zero", 1], 1), (5, [], 1)):
        code, out, err = fz(*resumed, "--stop-at", stop, *more)
        (line,) = [line for line in out.splitlines() if "resume with: " in line]
        assert code == 0 and line.endswith(
            f"--resume --zero {zero} --reduce canonical --prefetch 2 --offload opt=host"
        ), err
    lines = [json.loads(line) for line in (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()]
    assert [(line["zero"], line["offload"]) for line in lines] == [(0, "")] + [(3, "opt=host")] * 2 + [
        (1, "opt=host")
    ] * 2


@pytest.mark.parametrize(
    "mesh, chunks, asked, layout",
    [
        ({"pp": 4}, 1, "", "3,2,2,1"),
        ({"pp": 2}, 2, "", "3,2,2,1"),  # of as many stages
        ({"pp": 2, "tp": 2}, 1, "", "auto"),
        ({"dp": 4}, 1, "", "3,2,2,1"),  # for when there are stages again
        ({"pp": 2}, 1, "4,4", "4,4"),
    ],
)
@pytest.mark.parametrize("before", [{"pp": 4}, {"dp": 4}], ids=["pp", "without pp for a while"])
def test_a_layout_of_other_stages_is_left_out_and_said(before, mesh, chunks, asked, layout):
    recorded = RunConfig(mesh=before, pipeline=fzero.Pipeline(layout="3,2,2,1"))
    schedule = "1f1b" if chunks == 1 else "interleaved"
    given = fzero.Pipeline(schedule, chunks, asked or "3,2,2,1")
    changes = {"pipeline": {"layout": asked}} if asked else {}
    config, lines = placement.fit_layout(recorded, replace(recorded, mesh=mesh, pipeline=given), changes)
    assert config.pipeline == replace(given, layout=layout) and config.mesh == mesh
    said = "layout 3,2,2,1 is of 4 stages and there are 2 now: layers as even as they go"
    assert lines == [said] * (layout == "auto")


# ---- a run that changes ----

CHAINED = optim.chain(optim.clip_by_global_norm(1e9), optim.adamw(1e-2))
AROUND = {  # another optimizer: the leaves of its state beside those of adamw
    "clipping": (CHAINED, ()),
    "an average": (optim.with_average(optim.adamw(1e-2), 0.9), ("average",)),
    "an average of a chain": (optim.with_average(CHAINED, 0.9), ("average",)),
    "an average in a chain": (
        optim.chain(optim.clip_by_global_norm(1e9), optim.with_average(optim.adamw(1e-2), 0.9)),
        ("1/average",),
    ),
    "accumulation": (optim.accumulate(optim.adamw(1e-2), 1), ("count", "sum")),
    "rules": (optim.chain(optim.adamw(1e-2), optim.scale_by_rules(((".*", 1.0),))), ()),
    "a scale of the rate": (optim.with_lr_scale(lambda scale: optim.adamw(lambda count: 1e-2 * scale)), ("lr_scale",)),
}


@pytest.mark.parametrize("name", AROUND)
def test_an_optimizer_around_another_goes_on_with_its_state(name):
    plain, (tx, more) = optim.adamw(1e-2), AROUND[name]
    plan = fzero.zero_plan(0, MODEL, MESH, policy=precision.bf16())
    state, _ = train(fzero.make_train_step(MODEL, plain, plan), fzero.init_state(MODEL, plain, plan, seed=0), 3)
    wanted, losses = train(fzero.make_train_step(MODEL, plain, plan, donate=False), pytree.map(torch.clone, state), 3)
    changed = fzero.with_optimizer(pytree.map(torch.clone, state), tx, plan)
    fresh = pytree.named_leaves(fzero.init_state(MODEL, tx, plan, seed=0).opt_state)
    for leaf, value in pytree.named_leaves(changed.opt_state).items():
        if leaf.startswith("average/") or "/average/" in leaf:
            assert_same(value, pytree.named_leaves(state.master)[leaf.split("average/")[1]])
        elif leaf.startswith(more) if more else False:
            assert_same(value, fresh[leaf])
    new, found = train(fzero.make_train_step(MODEL, tx, plan), changed, 3)
    assert found == losses
    assert_same(new.params, wanted.params)
    lost = {"drop": "(.*/)?(average|sum)/.*|(.*/)?lr_scale|count"} if more else {}
    if more:
        with pytest.raises(ValueError, match=r"no leaf for opt_state/.*; give drop="):
            fzero.with_optimizer(new, plain, plan)
        fzero.with_optimizer(pytree.map(torch.clone, new), plain, plan, drop="opt_state/.*")  # a name as it is said
    narrow = optim.adamw(0.01, state_dtype=torch.bfloat16)
    if name == "clipping":
        with pytest.raises(ValueError, match=r"is torch\.float32 .* torch\.bfloat16 .*; give drop="):
            fzero.with_optimizer(new, narrow, plan, drop="nothing")
        begun = pytree.leaves(fzero.with_optimizer(pytree.map(torch.clone, new), narrow, plan, drop=".*").opt_state)
        assert any(leaf.dtype == torch.bfloat16 for leaf in begun)
        assert all(not leaf.any() for leaf in begun if leaf.dtype == torch.bfloat16)
    back, _ = train(fzero.make_train_step(MODEL, plain, plan), fzero.with_optimizer(new, plain, plan, **lost), 1)
    assert int(back.opt_state.count) == 7


@pytest.mark.parametrize(
    "name, offload, policy",
    [
        ("an average of a chain", "params=nvme,opt=nvme", "bf16"),
        pytest.param("clipping", "params=nvme,opt=nvme", "fp32", marks=pytest.mark.slow),
        pytest.param("an average", "opt=nvme", "bf16", marks=pytest.mark.slow),
        pytest.param("a scale of the rate", "opt=nvme,params=host", "fp16", marks=pytest.mark.slow),
        pytest.param("accumulation", "params=nvme,opt=nvme", "bf16", marks=pytest.mark.slow),
    ],
)
def test_an_optimizer_around_another_goes_on_with_a_state_on_a_disk(name, offload, policy, tmp_path):
    """In another folder, with the bits of a state in memory, and the old store as it was."""
    plain, (tx, _) = optim.adamw(1e-2), AROUND[name]
    found = []
    for where in ("", offload):
        old, new = (fzero.Nvme(tmp_path / part, buffer_bytes=1 << 20) if where else None for part in ("a", "b"))
        plan = fzero.zero_plan(0, MODEL, MESH, policy=POLICIES[policy], offload=where)
        state = fzero.init_state(MODEL, plain, plan, seed=0, nvme=old)
        state, _ = train(fzero.make_train_step(MODEL, plain, plan, nvme=old), state, 2)
        if where:
            with pytest.raises(ValueError, match=r"rests on a disk, in .*a; give with_optimizer a folder for the new"):
                fzero.with_optimizer(state, tx, plan)
        changed = fzero.with_optimizer(state, tx, plan, nvme=new)
        if old is not None:
            old.close()
            again = fzero.reopen_state(plain, plan, old)
            assert int(again.step) == 2
            old.close()
        begun = pytree.map(torch.clone, to_memory(changed))
        changed, losses = train(fzero.make_train_step(MODEL, tx, plan, nvme=new), changed, 2)
        found.append((pytree.named_leaves(begun), pytree.named_leaves(to_memory(changed)), losses))
        if new is not None:
            new.close()
    for a, b in zip(found[0][:2], found[1][:2]):
        assert a.keys() == b.keys()
        for leaf in a:
            assert_same(b[leaf], a[leaf])
    assert found[0][2] == found[1][2]


def test_what_a_resumed_run_may_change():
    config = apply_table(
        RunConfig(), {"train": {"steps": 100}, "optim": {"name": "onebit_adam"}, "codec": "grads=1bit"}
    )
    values = {"train": {"steps": 200}, "optim": {"schedule": {"name": "linear"}}}
    own, rest = placement.split_values({**values, "zero": 2, "mesh": {"dp": 2}})
    assert own == values and rest == {"zero": 2, "mesh": {"dp": 2}}
    new, lines = placement.with_values(config, own)
    assert new.optim.freeze_steps == 20  # a fifth of the steps that it began with
    assert "train.steps = 200, not 100" in lines and "optim.schedule.name = 'linear', not 'cosine'" in lines
    assert placement.with_values(config, {}) == (config, [])


@pytest.mark.slow
def test_a_run_that_changes_while_it_goes_on(tmp_path, monkeypatch, fz):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    flat_rate = ["--set", "optim.schedule.name=constant", "--set", "optim.schedule.warmup_steps=0"]
    command = [*TINY, *flat_rate]

    def rows(run):
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        return [{k: row[k] for k in ("step", "loss", "lr", "tokens")} for row in map(json.loads, lines)]

    def ran(*args):
        code, out, err = fz("pretrain", *map(str, args))
        assert code == 0, err
        return out

    ran(*command, "--steps", 6, "--out", "long")
    ran(*command, "--steps", 3, "--out", "run")
    assert rows("run") == rows("long")[:3]
    code, _, err = fz("pretrain", "--out", "run", "--resume")
    assert code == 2 and "has made its 3 steps; --steps N, above 3, makes it longer" in err
    said = ran("--out", "run", "--resume", "--steps", 6)
    assert "from step 3 on: train.steps = 6, not 3" in said
    assert rows("run") == rows("long")  # each sample once, and the same bits

    changes = ["--steps", 8, "--lr", 1e-4, "--set", "optim.clip=0", "--set", "optim.beta2=0.9"]
    said = ran("--out", "run", "--resume", *changes)
    for line in ("optim.lr = 0.0001", "optim.clip = 0.0", "optim.beta2 = 0.9", "train.steps = 8, not 6"):
        assert f"from step 6 on: {line}" in said
    assert [row["lr"] for row in rows("run")[6:]] == [1e-4, 1e-4] and rows("run")[:6] == rows("long")
    attempts = [json.loads(line) for line in (tmp_path / "run/attempts.jsonl").read_text().splitlines()]
    assert [a["config"]["train"]["steps"] for a in attempts] == [3, 6, 8]
    assert [a["first_step"] for a in attempts] == [0, 3, 6] and attempts[-1]["config"]["optim"]["clip"] == 0
    kept = json.loads((tmp_path / "run/config.json").read_text())
    assert kept["train"]["steps"] == 8 and kept["optim"]["lr"] == 1e-4

    # A state on a disk goes on too, where its leaves have other names without the clipping.
    ran(*command, "--steps", 3, "--out", "disk", "--offload", "params=nvme,opt=nvme")
    ran(*command, "--steps", 3, "--out", "memory")
    for run in ("disk", "memory"):
        assert "from step 3 on: optim.clip = 0.0" in ran("--out", run, "--resume", "--steps", 5, *changes[4:])
    assert rows("disk") == rows("memory") and len(rows("disk")) == 5

    for wrong, words in (
        (("--seed", 3), "leave out --seed"),
        (("--set", "optim.name=sgd"), "leave out --set optim.name"),
        (("--steps", 5), "is complete"),
        (("--set", "optim.lr=-1"), "optim.lr"),
    ):
        code, _, err = fz("pretrain", "--out", "run", "--resume", *map(str, wrong))
        assert code == 2 and words in err, err
        assert json.loads((tmp_path / "run/config.json").read_text()) == kept
