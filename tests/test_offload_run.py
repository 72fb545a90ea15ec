"""Runs, samples and predictions with a state on a disk; updates before and behind their time."""

import dataclasses
import json
import math
import shlex
import warnings
from pathlib import Path

import pytest
import ranks
import torch
from launched import TIMED

import fzero
from fzero import local_batch, models, optim, reopen_state
from fzero.checkpoint import stored_state
from fzero.cli import main
from fzero.core import PAGE, precision, pytree, round_to_pages
from fzero.offload import DiskTensor, Nvme, serves_direct
from fzero.run import build, build_optim, config_table, run_folder
from fzero.run.measure import memory_check

# A folder without direct transfers is used through tensorstore, with the same numbers.
pytestmark = pytest.mark.filterwarnings("ignore:.*its file system refuses direct transfers:UserWarning")

SIZES = {"vocab_size": 61, "max_len": 8, "d_model": 16, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "d_ff": 32}
MODEL = models.llama(models.LlamaConfig(**SIZES))
ALL = "params=nvme,opt=nvme"
POLICIES = {"fp32": precision.fp32(), "bf16": precision.bf16()}


def batch_at(i):
    tokens = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(i))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def in_memory(tree):
    return pytree.map(lambda leaf: leaf.tensor() if isinstance(leaf, DiskTensor) else leaf, tree)


def trained(
    folder, offload, policy, *, update="end", clip=None, micro=1, steps=3, bad=None, mesh=None, stage=0, norms=None
):
    """(losses, the state in memory); step `bad` has a gradient that is not finite. norms: is given those of the
    gradients."""
    mesh = mesh or fzero.one_process()
    plan = fzero.zero_plan(stage, MODEL, mesh, offload=offload, policy=policy)
    tx = optim.adamw(1e-2, weight_decay=0.1)
    tx = optim.with_average(optim.chain(optim.clip_by_global_norm(clip), tx) if clip else tx, 0.9)
    space = Nvme(folder) if "nvme" in offload else None
    state = fzero.init_state(MODEL, tx, plan, seed=0, nvme=space)
    options = {"micro_batches": micro, "execution": fzero.Execution(update=update)}
    step, losses = fzero.make_train_step(MODEL, tx, plan, nvme=space, **options), []
    for i in range(steps):
        batch = batch_at(i)
        if i == bad:
            # A loss function cannot be made infinite from outside; a weight can.
            state = state._replace(params=poisoned(state.params, space))
        state, metrics = step(state, local_batch(batch, mesh, micro))
        losses.append(float(metrics.loss))
        if norms is not None:
            norms.append(float(metrics.grad_norm))
    found = in_memory(state)
    if space is not None:
        space.close()
    return losses, found


def poisoned(params, space):
    store = space.store
    store.begin()
    for name, kept in store.leaves.items():
        for layer in range(kept.layers):
            reading = store.read(name, layer)
            value = reading.wait()
            if name == "params/head/norm/scale":
                value.fill_(float("inf"))
            store.write(name, layer, None, reading.buffer)
    store.commit(store.record.step, store.record.values)
    return params


def assert_equal(a, b):
    first, second = pytree.named_leaves(a), pytree.named_leaves(b)
    assert first.keys() == second.keys()
    for name, leaf in first.items():
        assert torch.equal(leaf, second[name]), name


# -- updates before and behind their time


@pytest.mark.each_value
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("micro", (1, 2))
def test_layers_updated_in_the_backward_pass_are_those_updated_behind_it(tmp_path, policy, micro):
    wanted: list[float] = []
    expected = trained(None, "", POLICIES[policy], micro=micro, norms=wanted)
    for i, offload in enumerate((ALL, f"{ALL},grads=nvme")):
        norms: list[float] = []
        found = trained(tmp_path / str(i), offload, POLICIES[policy], update="backward", micro=micro, norms=norms)
        assert found[0] == expected[0] and norms == wanted
        assert_equal(found[1], expected[1])


def test_an_early_update_of_a_bad_gradient_is_undone(tmp_path):
    """The step is skipped: everything but its counters is as before."""
    plan = fzero.zero_plan(0, MODEL, fzero.one_process(), offload=ALL, policy=POLICIES["fp32"])
    _, state = trained(tmp_path, ALL, POLICIES["fp32"], update="backward", steps=3, bad=2)
    space = Nvme(tmp_path)
    again = reopen_state(optim.with_average(optim.adamw(1e-2), 0.9), plan, space)
    assert int(again.step) == 3 and int(again.opt_state.inner.count) == 2
    assert_equal(in_memory(again), state)
    assert (
        torch.isinf(state.params["head"]["norm"]["scale"]).all()
        and torch.isfinite(state.params["embed"]["tokens"]).all()
    )
    assert_equal(state.opt_state, trained(None, "", POLICIES["fp32"], steps=2)[1].opt_state)
    space.close()


def test_updates_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="clip_by_global_norm, which needs all gradients"):
        trained(tmp_path / "a", ALL, POLICIES["fp32"], update="backward", clip=1.0)
    with pytest.raises(ValueError, match="needs params=nvme,opt=nvme and two"):
        trained(tmp_path / "b", "opt=nvme", POLICIES["fp32"], update="backward")
    with pytest.raises(ValueError, match="is for a layered Model with offloaded states"):
        trained(None, "", POLICIES["fp32"], update="backward")
    with pytest.raises(ValueError, match="update is 'later'; it must be end, speculate, backward or delayed"):
        trained(None, "", POLICIES["fp32"], update="later")


def test_an_optimizer_that_looks_at_the_whole_tree_is_refused():
    mesh = fzero.one_process()
    plan = fzero.zero_plan(0, MODEL, mesh, offload="opt=host")
    for tx in (
        optim.chain(optim.adam(1e-2), optim.scale_by_rules(((".*", 0.5),))),
        optim.chain(optim.clip_by_value(1.0), optim.clip_by_global_norm(1.0), optim.sgd(0.1)),
    ):
        with pytest.raises(
            ValueError, match=r"offload: the optimizer looks at the whole tree .* put the clipping first"
        ):
            fzero.make_train_step(MODEL, tx, plan)


# -- weights of several ranks


def of_ranks(mesh, folder, stage):
    warnings.filterwarnings("ignore", ".*its file system refuses direct transfers")
    return trained(Path(folder), ALL, POLICIES["bf16"], mesh=mesh, stage=stage, clip=0.5)[0]


@pytest.mark.parametrize("stage", (0, 3))
def test_weights_that_ranks_hold_in_parts(tmp_path, stage):
    found = ranks.run(2, of_ranks, str(tmp_path), stage)
    losses, state = trained(None, "", POLICIES["bf16"], clip=0.5)
    assert found[0] == found[1] == pytest.approx(losses, rel=1e-3)
    shelf = stored_state.find_snapshot(tmp_path)
    plan = fzero.zero_plan(stage, MODEL, fzero.sharding.fake_mesh(shelf.sizes))
    for prefix, expected in (("params/", state.params), ("master/", state.master)):
        there = stored_state.read_weights(shelf, plan, prefix)
        for name, leaf in pytree.named_leaves(expected).items():
            other = pytree.named_leaves(there)[name]
            assert other.shape == leaf.shape and other.dtype == leaf.dtype
            assert torch.allclose(other.float(), leaf.float(), rtol=0.05, atol=0.05), name
    chunk = tmp_path / "arrays/params/blocks/attn/w_q/c" / str(shelf.record.slot) / f"2/{int(stage == 3)}/0"
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    with pytest.raises(ValueError, match=r"params/blocks/attn/w_q, layer \d of rank \d, does not match its checksum"):
        stored_state.read_weights(shelf, plan, "params/")


# -- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text and a run of 6 steps in memory."""
    path = tmp_path_factory.mktemp("offload")
    path.joinpath("text.txt").write_text("\n".join(f"line {i}: {i * i} is the square of {i}" for i in range(300)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        assert fz(*TINY, "--out", "plain") == 0
    return path


TINY = shlex.split(
    "pretrain --model llama-tiny --steps 6 --batch 4 --micro-batch 2 --seq-len 16 --precision bf16 --data text.txt "
    "--peak-tflops 1 "
    "--set model.n_layers=2 --set model.d_model=16 --set model.d_ff=32 --set model.n_heads=4 --set model.n_kv_heads=2 "
    "--set train.compiled=false --set train.eval_batches=2 --set train.eval_every=3 --set train.ema_decay=0.5 "
    "--set train.checkpoint_every=2"
)
ON_DISK = {"disk_read_bytes", "disk_written_bytes", "disk_wait_s"}


def fz(*args):
    with pytest.raises(SystemExit) as ended:
        main.main([str(arg) for arg in args])
    return ended.value.code


def numbers(run):
    return [
        {key: value for key, value in row.items() if key not in TIMED | ON_DISK}
        for row in run_folder.read_metrics(Path(run))
    ]


def test_a_run_on_a_disk_is_the_run_in_memory(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert fz(*TINY, "--out", "disk", "--offload", f"{ALL},grads=nvme", "--set", "nvme.slots=4", "--stop-at", 3) == 0
    assert not Path("disk/checkpoints").exists()
    assert fz("pretrain", "--out", "disk", "--resume", "--prompt", "line 7") == 0
    assert numbers("disk") == numbers("plain")
    said = capsys.readouterr().out
    assert "the last 2 checkpoints are kept" in said and "resuming disk at step 3" in said
    record = json.loads(Path("disk/nvme/step.json").read_text())
    assert record["step"] == 6 and sorted(record["pinned"].values()) == [4, 6]
    written = {line for line in said.splitlines() if line.startswith("line 7")}
    held = {slot for slot in Path("disk/nvme/arrays/params/embed/tokens/c").iterdir() if any(slot.rglob("0"))}
    full = len([slot for slot in held if any(path.is_file() for path in slot.rglob("*"))])
    assert full == 2 or not serves_direct(folder), "spare slots are given back"
    texts = set()
    for more in ((), ("--offload", "params=nvme")):
        for run in ("plain", "disk"):
            assert fz("sample", run, "--prompt", "line 7", "--max-new-tokens", 12, "--seed", 3, *more) == 0
            texts.add(capsys.readouterr().out)
    assert len(texts) == 1 and written


def test_a_state_part_of_which_is_on_a_disk_is_saved_as_any(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert fz(*TINY, "--out", "part", "--offload", "opt=nvme:0.5,params=host", "--stop-at", 3) == 0
    assert fz("pretrain", "--out", "part", "--resume") == 0
    assert numbers("part") == numbers("plain")


READERS = {  # command -> the exit code for a damaged store
    ("ckpt", "verify", "hurt"): 1,
    ("ckpt", "verify", "hurt/nvme"): 1,
    ("export", "hurt", "--out", "away"): 2,
    ("sample", "hurt", "--prompt", "line", "--max-new-tokens", 1): 2,
    ("sample", "hurt", "--prompt", "line", "--max-new-tokens", 1, "--offload", "params=nvme"): 2,
    ("pretrain", "--out", "hurt", "--resume"): 2,
    ("pretrain", "--init", "hurt", "--data", "text.txt", "--steps", 1, "--seq-len", 16, "--out", "next"): 2,
}


def hurt_texts(run, slot, capsys):
    """Damage the small files of a run's store one at a time: every reader names the file, and writes nothing."""
    store, sums = run / "nvme/store.json", run / f"nvme/sums/slot-{slot}.rank-0.json"
    texts = {store: store.read_text(), sums: sums.read_text()}
    damages = {
        store: ('"master/blocks/attn/w_k"', '"master/blocks/attn/w_q2"'),  # else the parameters, which are whole
        sums: ('"master/blocks/attn/w_k"', '"master/blocks/attn/w_q2"'),
    }
    for path, (old, new) in damages.items():
        for text in (texts[path].replace(old, new), None):
            path.unlink() if text is None else path.write_text(text)
            for command, code in READERS.items():
                capsys.readouterr()
                assert fz(*command) == code, (path, command)
                said = "".join(capsys.readouterr())
                assert path.name in said and "resume from a checkpoint" in said, (command, said)
                assert not Path("away").exists() and not Path("next").exists(), command
        path.write_text(texts[path])


def test_a_damaged_store_is_passed_over_only_for_a_checkpoint(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert fz(*TINY, "--out", "hurt", "--offload", ALL, "--stop-at", 3) == 0
    slot = json.loads(Path("hurt/nvme/step.json").read_text())["slot"]
    assert fz("ckpt", "verify", "hurt") == fz("ckpt", "verify", "hurt/nvme") == 0
    assert "hurt/nvme: sound" in capsys.readouterr().out
    hurt_texts(Path("hurt"), slot, capsys)
    chunk = Path(f"hurt/nvme/arrays/master/blocks/attn/w_k/c/{slot}/1/0/0")
    data = bytearray(chunk.read_bytes())
    data[100] ^= 4
    chunk.write_bytes(data)
    capsys.readouterr()
    assert fz("ckpt", "verify", "hurt") == 1
    assert "master/blocks/attn/w_k, layer 1 of rank 0, does not match its checksum" in capsys.readouterr().out
    assert fz("pretrain", "--out", "hurt", "--resume") == 2
    said = capsys.readouterr().err
    assert "master/blocks/attn/w_k" in said and "is damaged" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "args, words",
    [
        ("--offload params=disk", "'disk' is not a memory"),
        ("--offload acts=host", "use --remat full"),
        ("--nvme somewhere", "puts nothing on one"),
        ("--offload opt=nvme --set nvme.slots=0", "nvme.slots is 0"),
        ("--offload opt=nvme --set train.update=backward", "use optim.clip=0"),
        ("--set train.update=later", "train.update is 'later'"),
        ("--model mixtral-tiny --set model.mlp_tiles=2", "experts are not computed in tiles"),
    ],
)
def test_what_the_command_refuses(folder, monkeypatch, capsys, args, words):
    monkeypatch.chdir(folder)
    given = shlex.split(args)
    base = ["pretrain", "--data", "text.txt"] if "--model" in given else TINY
    assert fz(*base, "--out", "refused", *given) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("fzero: error:") and said.count("\n") == 1
    assert not Path("refused").exists()


# -- what a run needs


def run_config(**changes):
    sizes = {"vocab_size": 61, "max_len": 16, "d_model": 16, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "d_ff": 32}
    table = {
        "preset": "llama-tiny",
        "model": sizes,
        "data": {"seq_len": 16},
        "train": {"batch": 4, "micro_batch": 2, "remat": "full", "compiled": False, "ema_decay": 0.5},
        "precision": {"policy": "bf16", "fp32_matmul": "default"},
        "optim": {"name": "adamw"},
        **changes,
    }
    return config_table.from_table(table)


@pytest.mark.each_value
@pytest.mark.parametrize("offload", (ALL, f"{ALL},grads=nvme,acts=nvme", "opt=nvme:0.4"))
@pytest.mark.parametrize("states", ("full", "8bit"))
def test_the_disk_that_a_run_needs(tmp_path, offload, states):
    made = build.build(run_config(offload=offload, optim={"name": "adamw", "states": states}), None, tmp_path)
    state = build.first_state(made)
    tokens = torch.randint(0, 61, (4, 17))
    made.train_step(state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    held = sum(
        path.stat().st_size
        for path in (tmp_path / "nvme/arrays").rglob("*")
        if path.is_file() and path.name != "zarr.json"
    )
    scratch = made.nvme.scratch.end if "grads" in offload else 0
    # Each value of the scratch file fills whole pages.
    needed = memory_check.disk_needed(made)
    assert held <= needed
    # tensorstore makes no file of a leaf without elements.
    assert needed <= held + scratch or not serves_direct(tmp_path)
    assert ("grads" in offload) == (needed > held) or not serves_direct(tmp_path)
    memory = memory_check.memory_needed(made)
    assert memory.buffers == made.nvme.buffers.size and made.nvme.buffers.peak <= memory.buffers
    made.nvme.close()


def moment_bytes(name, leaf, states, on_disk):
    """The bytes of one moment of a leaf: on_disk(bytes) of each layer's values, or of its codes and scales."""
    layers, rows = (leaf.shape[0], leaf.shape[1:]) if name.startswith("blocks/") else (1, leaf.shape)
    if states == "full":
        return layers * on_disk(4 * rows.numel())
    coded = leaf.numel() >= 4096 and len(rows) > 1
    blocks = math.prod(rows[:-1]) * -(-rows[-1] // 256) if coded else 0
    return layers * (on_disk(rows.numel() * (1 if coded else 4)) + on_disk(4 * blocks))


def test_a_step_moves_codes_of_moments_and_no_more(tmp_path):
    """With opt=nvme and optim.states=8bit what is read and written in a step is the codes, not values made of them."""
    model = models.llama(models.LlamaConfig(**SIZES | {"d_model": 256, "d_ff": 512}))
    plan, found = fzero.zero_plan(0, model, fzero.one_process(), offload="opt=nvme"), {}
    for states in ("full", "8bit"):
        space, tx = Nvme(tmp_path / states), optim.adamw(1e-2, **build_optim.STATES[states])
        state = fzero.init_state(model, tx, plan, seed=0, nvme=space)
        step = fzero.make_train_step(model, tx, plan, nvme=space)
        state, _ = step(state, batch_at(0))
        before = space.traffic()
        step(state, batch_at(1))
        after = space.traffic()
        found[states] = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
        space.close()
        on_disk = (lambda size: max(PAGE, round_to_pages(size))) if serves_direct(tmp_path) else int
        leaves = pytree.named_leaves(plan.like).items()
        each = sum(2 * moment_bytes(name, leaf, states, on_disk) for name, leaf in leaves)
        assert found[states] == (each, each)
    assert found["8bit"][0] < 0.28 * found["full"][0]


def test_the_largest_model_that_has_room():
    run = run_config(offload=f"{ALL},grads=nvme,acts=nvme")
    for memory, disk in ((2 * 10**9, 30 * 10**9), (8 * 10**9, 200 * 10**9), (3 * 10**9, 10**12)):
        found = memory_check.largest(run, memory, disk)
        assert found.memory_bytes <= memory and found.disk_bytes <= disk
        more = dataclasses.replace(found.config.model, n_layers=found.config.model.n_layers + 1)
        next_one = build.build(dataclasses.replace(found.config, model=more))
        needs = memory_check.PROCESS + sum(memory_check.memory_needed(next_one)), memory_check.disk_needed(next_one)
        assert needs[found.binds == "disk"] > (memory, disk)[found.binds == "disk"]
    with pytest.raises(ValueError, match=r"do not hold .* parameters, which need"):
        memory_check.largest(run, 10**8, 10**9)
