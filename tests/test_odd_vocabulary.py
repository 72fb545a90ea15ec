"""Vocabularies that tp does not divide: the last rank has fewer words, and nothing else differs from one process.

Here are whole runs; gradients of every family are in test_tensor_parallel.py, layouts in test_sharding.py and
test_checkpoint_layout.py, optimizers on shards in test_optim_sharded.py.
"""

import functools
import math

import pytest
import ranks
import torch
from close import assert_close, assert_same
from zero_cases import FP64, batch_for, model_of, train, whole

import fzero
from fzero import checkpoint, local_batch, models, optim, reopen_state, state_specs
from fzero.checkpoint import stored_state, verify_store
from fzero.core import pytree
from fzero.offload import DiskTensor, Nvme
from fzero.sharding import (
    Context,
    Spec,
    digests,
    from_dtensor,
    gather_full,
    narrow_box,
    narrow_to,
    one_process,
    parts_as_chunks,
    to_dtensor,
)

pytestmark = pytest.mark.slow

V, ROWS = 23, 8  # of tp=2, 3 and 4 the last rank has 11, 7 and 5 words
SIZES = {"vocab_size": V, "d_model": 24, "n_heads": 12, "n_kv_heads": 12, "d_ff": 24, "n_layers": 2}
MATRICES = {"muon": optim.muon(1e-2, ns_dtype=torch.float64, weight_decay=0.1), "adamw": optim.adamw(1e-2, eps=1e-5)}
# Muon on the vocabulary's matrices too; all of them decay and clip.
TX = {
    "adamw": optim.adamw(1e-2, eps=1e-5, weight_decay=0.1),
    "adafactor": optim.adafactor(1e-2, weight_decay=0.1),
    "lamb": optim.lamb(1e-2, weight_decay=0.1),
    "muon": optim.by_label(MATRICES, ((r"^embed/tokens$|^head/w$|/w_[qkvo]$", "muon"), (".*", "adamw"))),
}
TX = {name: optim.chain(optim.clip_by_global_norm(0.5), tx) for name, tx in TX.items()}


def sizes_of(name, tied=False):
    if name == "gpt2":
        return {key: size for key, size in SIZES.items() if key != "n_kv_heads"} | {"tied": True}
    if name == "deepseek":
        return {key: size for key, size in SIZES.items() if key != "n_kv_heads"}
    return SIZES | ({"n_experts": 4} if name.startswith("moe") else {"tied": tied})


def batches(step, rows, length=8):
    batch = batch_for(step, rows, length)
    g = torch.Generator().manual_seed(100 + step)
    batch |= {name: torch.randint(0, V, (rows, length), generator=g) for name in ("tokens", "targets")}
    batch["tokens"][0, 0] = batch["targets"][0, 0] = V - 1  # the last word, once at least
    batch["mask"][0, 0] = True
    return batch


def run(mesh, name, optimizer, stage, options, tied=False, steps=2):
    """(whole state, metrics) after some steps."""
    state, specs, log = train(
        mesh, name, TX[optimizer], stage, 4, sizes=sizes_of(name, tied), batches=batches, rows=ROWS, steps=steps,
        plan_options=options)  # fmt: skip
    return whole(state, specs, mesh), log


def runs(mesh, cases):
    return [run(mesh, *case) for case in cases]


@functools.cache
def alone(name, optimizer, tied=False, steps=2):
    return run(one_process(), name, optimizer, 0, {}, tied, steps)


CANONICAL = {"reduce": "canonical"}
# The sizes of the mesh, and what runs there: (family, optimizer, stage, options of the plan, tied).
RUNS = {
    "tp2": [("gpt2", "muon", 1, {"sequence": True}), ("deepseek", "adamw", 2, {})],
    "tp3": [("llama", "lamb", 2, {}), ("gpt2", "muon", 3, {}), ("llama", "adafactor", 1, {}, True)],
    "tp4": [("llama", "adamw", 1, {"sequence": True}), ("gpt2", "lamb", 0, {}), ("llama", "muon", 2, {})],
    "dp2 tp2": [
        ("llama", "adamw", 2, CANONICAL),
        ("llama", "adafactor", 3, {"sequence": True}),
        ("gpt2", "lamb", 0, {}),
        ("gpt2", "adamw", 1, {"reduce": "once"}),
    ],
    "pp2 tp2": [("gpt2", "adamw", 1, CANONICAL), ("llama", "adafactor", 3, {})],
    "cp2 tp2": [("llama", "adamw", 3, {"sequence": Context("gather", over_tp=True)})],
    "ep2 tp2": [("moe dropless", "adafactor", 2, {})],
}


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in ("tp4", "ep2 tp2", "cp2 tp2"))) for name in RUNS],
)
def test_runs_are_those_of_one_process(mesh):
    sizes, cases = {part[:2]: int(part[2:]) for part in mesh.split()}, RUNS[mesh]
    results = ranks.run(math.prod(sizes.values()), runs, cases, mesh=sizes, timeout_s=300)
    for found in results:
        for (state, log), (name, optimizer, _, _, *tied) in zip(found, cases):
            expected, expected_log = alone(name, optimizer, *tied)
            assert_close(log, expected_log, rtol=1e-10, atol=1e-12)
            assert_close(state, expected, rtol=1e-8, atol=1e-9)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def made(mesh, stage):
    """(step, state, specs) before the first step."""
    model, tx = model_of("llama", **sizes_of("llama")), TX["adafactor"]
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64)
    state = fzero.init_state(model, tx, plan, seed=3)
    return fzero.make_train_step(model, tx, plan), state, state_specs(plan, tx)


def saved(mesh, folder):
    """(whole state, its digests before the first step, path of the checkpoint after two)."""
    step, state, specs = made(mesh, 1)
    first = digests(state.params, specs.params, mesh)
    for i in range(2):
        state, _ = step(state, local_batch(batches(i, ROWS), mesh))
    path = checkpoint.save(folder, state, step=2, specs=specs, mesh=mesh)
    return whole(state, specs, mesh), first, path


def restored(mesh, path, stage):
    """(the whole state of a checkpoint, the one after another step)."""
    step, state, specs = made(mesh, stage)
    state = checkpoint.restore(path, state, specs=specs, mesh=mesh)
    before = whole(state, specs, mesh)
    before = pytree.map(torch.clone, before)
    state, _ = step(state, local_batch(batches(2, ROWS), mesh))
    return before, whole(state, specs, mesh)


def test_a_checkpoint_of_three_ranks_is_one_of_two_and_of_one(tmp_path):
    (state, first, path), *_ = ranks.run(3, saved, str(tmp_path / "three"), mesh={"tp": 3})
    expected, expected_first, one = saved(one_process(), str(tmp_path / "one"))
    assert first == expected_first  # equal bits have equal digests
    assert_close(state, expected, rtol=1e-8, atol=1e-9)
    assert checkpoint.verify(path) == []
    held, of_one = checkpoint.open_checkpoint(path), checkpoint.open_checkpoint(one)
    assert {name: leaf.shape for name, leaf in held.leaves.items()} == {n: x.shape for n, x in of_one.leaves.items()}
    copy = checkpoint.save(str(tmp_path / "copy"), state, step=2)
    again = checkpoint.open_checkpoint(copy)
    assert {name: leaf.digest for name, leaf in held.leaves.items()} == {n: x.digest for n, x in again.leaves.items()}
    for reader in (held, of_one, again):
        reader.close()
    results = [restored(one_process(), path, 0)]
    for sizes, stage in (({"tp": 2}, 3), ({"dp": 2}, 2)):
        results += ranks.run(2, restored, path, stage, mesh=sizes)
    for before, after in results:
        assert_same(before, state)
        assert_close(after, results[0][1], rtol=1e-8, atol=1e-9)


PAGES = 43  # words, of which the first of two ranks has 22, which are two pages, and the last 21, in one


def kept_on_disk(mesh, folder, layers, leaf):
    """(the whole state after two steps, the same opened again, the spec of a leaf), where all rests on a disk; without
    a folder in memory."""
    sizes = {**sizes_of("llama"), "vocab_size": PAGES, "n_layers": layers}
    model, tx = model_of("llama", **sizes), TX["adamw"]
    plan = fzero.zero_plan(0, model, mesh, policy=FP64, offload="params=nvme,grads=nvme,opt=nvme" if folder else "")
    nvme = Nvme(folder, buffer_bytes=1 << 20) if folder else None
    step = fzero.make_train_step(model, tx, plan, nvme=nvme)
    state = fzero.init_state(model, tx, plan, seed=3, nvme=nvme)
    for i in range(2):
        state, _ = step(state, local_batch(batches(i, ROWS), mesh))
    found = [in_memory(state)]
    if nvme is not None:
        nvme.close()
        again = Nvme(folder, buffer_bytes=1 << 20)
        found.append(in_memory(reopen_state(tx, plan, again)))
        again.close()
    return [whole(one, state_specs(plan, tx), mesh) for one in found], plan.leaves[leaf].params


def in_memory(state):
    return pytree.map(lambda leaf: leaf.tensor() if isinstance(leaf, DiskTensor) else leaf, state)


@pytest.mark.parametrize("axis, layers, leaf", [("tp", 1, "embed/tokens"), ("pp", 3, "blocks/attn/w_q")])
def test_a_state_on_a_disk_is_read_again_by_its_ranks_and_by_another_process(axis, layers, leaf, tmp_path):
    ((expected,), _) = kept_on_disk(one_process(), None, layers, leaf)
    ((state, again), spec), *_ = ranks.run(2, kept_on_disk, str(tmp_path / "nvme"), layers, leaf, mesh={axis: 2})
    assert_close(state, expected, rtol=1e-8, atol=1e-9)
    assert_same(again, state)
    assert verify_store(tmp_path / "nvme") == []
    snapshot, value = stored_state.find_snapshot(tmp_path / "nvme"), pytree.named_leaves(state.params)[leaf]
    assert snapshot is not None
    assert torch.equal(snapshot.leaf(f"params/{leaf}", tuple(value.shape), spec), value)
    start, size = tuple(n // 3 for n in value.shape), tuple(n // 2 for n in value.shape)
    part = snapshot.leaf(f"params/{leaf}", tuple(value.shape), spec, start, size)
    assert torch.equal(part, narrow_box(value, start, size))


# ---- other losses, and DTensors --------------------------------------------------------------------------------------


def losses(mesh):
    """The losses of pairs and by position, of random weights."""
    found = []
    for wrap in (models.dpo, models.by_position):
        model = wrap(model_of("llama", **sizes_of("llama")))
        plan = fzero.zero_plan(0, model, mesh, policy=FP64)
        params = fzero.init_state(model, optim.sgd(0.1), plan, seed=3).params
        batch = batches(0, 4) | {"documents": (torch.arange(8) // 2).expand(4, 8), "reference": torch.zeros(4, 8)}
        batch["mask"] = torch.ones(4, 8, dtype=torch.bool)
        out = models.loss(model, params, batch, models.Ctx(mesh=mesh, dtype=torch.float64), plan)
        found.append((out.total, out.num_tokens, out.extra))
    return found


def test_losses_of_pairs_and_by_position():
    for found in ranks.run(3, losses, mesh={"tp": 3}):
        assert_close(found, losses(one_process()), rtol=1e-10, atol=1e-12)


def exchanged(mesh, x):
    spec = Spec((("tp",), ()), parts=parts_as_chunks(x.shape[0], 3))
    t = to_dtensor(narrow_to(x, spec, mesh).clone(), spec, mesh)
    local, found = from_dtensor(t, mesh)
    return t.full_tensor(), found == spec, gather_full(local, found, mesh)


def test_a_dtensor_has_the_same_parts():
    x = torch.arange(float(V * 2)).reshape(V, 2)
    for full, same, gathered in ranks.run(3, exchanged, x, mesh={"tp": 3}):
        assert same and torch.equal(full, x) and torch.equal(gathered, x)
