"""Layers updated in the backward pass with the expected clip factor, and put right where the norm says otherwise: the
bits of an update at the end, on the CPU, on two ranks and on the pretend GPU."""

import dataclasses
import functools
import gc
import warnings

import pytest
import ranks
import torch
from pretend_gpu import pretend
from test_offload_run import MODEL, batch_at, in_memory
from zero_cases import batch_for, model_of

import fzero
from fzero import local_batch, optim
from fzero.core import precision, pytree
from fzero.run import build, config_table
from fzero.run.measure import memory_check
from fzero.sharding import is_stacked, shapes_of
from fzero.train.update import offloaded
from fzero.train.update.in_backward import EarlyUpdate
from fzero.train.update.offloaded import StreamedUpdate
from fzero.train.update.speculation import OldValues, Speculation

pytestmark = pytest.mark.filterwarnings("ignore:.*its file system refuses direct transfers:UserWarning")

CLIP = 1.1  # the norms of the first steps are 1.03, 1.06, 1.12, 1.22, 1.21, 1.16, 1.09
FP16 = dataclasses.replace(precision.fp16(), loss_scale=precision.LossScale(init=2.0**34, hysteresis=1, factor=2.0**8))
POLICIES = {"fp32": precision.fp32(), "bf16": precision.bf16(), "fp16": FP16}


def trained(
    offload, update, policy, folder=None, *, clip=CLIP, micro=1, steps=8, stage=0, mesh=None, device="cpu",
    given=(MODEL, batch_at),
):  # fmt: skip
    """([(loss, norm, skipped, layers updated early, layers put right)], the leaves of the state)."""
    warnings.filterwarnings("ignore", ".*its file system refuses direct transfers")
    (model, batches), mesh = given, mesh or fzero.one_process()
    plan = fzero.zero_plan(stage, model, mesh, offload=offload, policy=POLICIES[policy])
    tx = optim.adamw(1e-2, impl="reference")
    tx = optim.chain(optim.clip_by_global_norm(clip), tx) if clip else tx
    nvme = fzero.Nvme(folder) if "nvme" in offload else None
    state = fzero.init_state(model, tx, plan, seed=0, nvme=nvme, device=device)
    execution = fzero.Execution(kernels="reference", update=update)
    step = fzero.make_train_step(model, tx, plan, micro_batches=micro, execution=execution, nvme=nvme)
    rows = []
    for i in range(steps):
        batch = {name: x.to(device) for name, x in local_batch(batches(i), mesh, micro).items()}
        state, metrics = step(state, batch)
        rows.append([metrics.loss, metrics.grad_norm, metrics.skipped, metrics.speculated, metrics.put_right])
    rows = [[None if isinstance(x, tuple) else float(x) for x in row] for row in rows]
    leaves = {name: x.to("cpu") for name, x in pytree.named_leaves(in_memory(state)).items()}
    if nvme is not None:
        nvme.close()
    return rows, leaves


def differences(found, expected):
    """The steps and leaves that differ."""
    wrong = [i for i, (a, b) in enumerate(zip(found[0], expected[0])) if repr(a[:3]) != repr(b[:3])]
    return wrong + [name for name, leaf in expected[1].items() if not torch.equal(leaf, found[1][name])]


@functools.cache
def at_the_end(policy, micro=1):
    return trained("opt=host", "end", policy, micro=micro)


slow = pytest.mark.slow
CASES = [
    ("opt=host", "bf16", 2),
    ("opt=host", "fp16", 1),
    ("params=nvme,opt=nvme", "fp16", 1),
    pytest.param("opt=host", "fp32", 1, marks=slow),
    pytest.param("opt=nvme,grads=nvme", "bf16", 2, marks=slow),
    pytest.param("opt=nvme,grads=host", "fp16", 1, marks=slow),
    pytest.param("params=host,grads=host,opt=host", "fp16", 2, marks=slow),
]


@pytest.mark.parametrize("offload, policy, micro", CASES)
def test_a_speculating_step_has_the_bits_of_an_update_at_the_end(offload, policy, micro, tmp_path):
    expected, found = at_the_end(policy, micro), trained(offload, "speculate", policy, tmp_path, micro=micro)
    assert not differences(found, expected)
    guesses = [tuple(row[3:]) for row in found[0]]
    assert (3, 0) in guesses and (3, 3) in guesses and (0, 0) in guesses  # right, put right, none
    skipped = [row for row in found[0] if row[2]]
    assert bool(skipped) == (policy == "fp16") and all(row[3:] == [3, 3] for row in skipped)


@pytest.mark.parametrize(
    "name, offload, update, clip",
    [
        ("deepseek", "params=nvme,opt=nvme", "speculate", 1e9),
        pytest.param("deepseek", "params=nvme,opt=nvme", "backward", 0.0, marks=slow),
        pytest.param("deepseek", "opt=host", "speculate", 1e-3, marks=slow),
        pytest.param("encoder and decoder", "opt=host", "speculate", 1e9, marks=slow),
    ],
)
def test_stacks_of_other_depths_are_all_updated(name, offload, update, clip, tmp_path):
    """A layer is complete when the leaves of the stacks that have it have arrived, not those of all stacks."""
    model = model_of(name)
    depths = {leaf.shape[0] for name, leaf in pytree.named_leaves(shapes_of(model)).items() if is_stacked(name)}
    given = model, functools.partial(batch_for, rows=4)
    expected = trained("", "end", "bf16", clip=clip, steps=3, given=given)
    found = trained(offload, update, "bf16", tmp_path, clip=clip, steps=3, given=given)
    assert not differences(found, expected)
    if update == "speculate":
        assert [row[3] for row in found[0]] == [max(depths) if clip > 1 or i == 0 else 0 for i in range(3)]


@pytest.mark.parametrize("mistake", ["exchange gives nothing back", "exchange keeps what was updated"])
def test_an_update_that_is_not_put_right_is_found(mistake, monkeypatch):
    exchange = OldValues.exchange

    def planted(self, unit, found, values):
        if mistake == "exchange gives nothing back" and self.restores:
            return
        if mistake == "exchange keeps what was updated" and not self.restores:
            for columns in values.values():
                columns["target"].add_(1e-3)
        exchange(self, unit, found, values)

    monkeypatch.setattr(OldValues, "exchange", planted)
    assert differences(trained("opt=host", "speculate", "bf16", micro=2), at_the_end("bf16", 2))


def of_ranks(mesh, stage):
    both = [trained("opt=host", update, "bf16", stage=stage, mesh=mesh) for update in ("end", "speculate")]
    return differences(both[1], both[0]), [row[3:] for row in both[1][0]]


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=slow) for stage in (0, 1)), 3])
def test_two_ranks_put_right_the_same_steps(stage):
    for wrong, guesses in ranks.run(2, of_ranks, stage):
        assert not wrong and [3, 0] in guesses and [3, 3] in guesses


@pytest.mark.parametrize(
    "offload",
    [
        pytest.param("opt=host", marks=slow),
        "params=host,grads=host,opt=host",
        pytest.param("opt=host:0.5,grads=host", marks=slow),
    ],
)
def test_on_the_pretend_gpu_nothing_races(offload):
    with pretend():  # whose sums over tokens are not the CPU's
        expected = trained("opt=host", "end", "bf16", device="cuda", steps=4)
    with pretend() as seen:
        found = trained(offload, "speculate", "bf16", device="cuda", steps=4)
        gc.collect()
    assert not seen.races and not seen.freed
    ours = ("train/update", "train/step", "train/gradient", "sharding", "offload")
    assert not [line for _, line in seen.unpinned if line.startswith(ours)]
    assert [row[:3] for row in found[0]] == [row[:3] for row in expected[0]][:4]
    assert [row[3:] for row in found[0]] == [[3, 0], [3, 0], [3, 3], [0, 0]]


def launched_before_waits(monkeypatch):
    """The operators that the GPU is given between a layer's gradients and the host's wait for them, by layer."""
    at, found, take = {}, [], EarlyUpdate.receive
    monkeypatch.setattr(offloaded, "MOST_ELEMENTS", 64)  # a layer is many units, as one of a large model is

    with pretend() as seen:

        def taken(self, name, layer, value, copied=None):
            take(self, name, layer, value, copied)
            if self.ready is not None and self.ready[0] == layer:
                arrives = {arrive for _, arrive in self.ready[1].values() if arrive is not None}
                at[layer] = seen.kernels[0]

                def arrived(arrive, layer):
                    found.append(seen.kernels[0] - at[layer])
                    return arrive()

                once = {arrive: functools.cache(functools.partial(arrived, arrive, layer)) for arrive in arrives}
                self.ready = layer, {n: (x, once.get(arrive)) for n, (x, arrive) in self.ready[1].items()}

        monkeypatch.setattr(EarlyUpdate, "receive", taken)
        trained("opt=host", "speculate", "bf16", device="cuda", steps=1)
    return found


@slow
def test_the_gpu_has_the_next_layer_to_compute_before_the_host_waits_for_one(monkeypatch):
    found = launched_before_waits(monkeypatch)
    assert len(found) == 3 and min(found) > 10, found


def test_what_cannot_speculate_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r'the optimizer.s state is on the device; give the plan offload="opt=host"'):
        trained("params=host", "speculate", "fp32")
    with pytest.raises(ValueError, match="is for a layered Model with offloaded states"):
        trained("", "speculate", "fp32")
    plan = fzero.zero_plan(0, MODEL, fzero.one_process(), offload="opt=nvme")
    with pytest.raises(ValueError, match="the store has 1 slot; give it two"):
        fzero.make_train_step(
            MODEL,
            optim.adamw(),
            plan,
            execution=fzero.Execution(update="speculate"),
            nvme=fzero.Nvme(tmp_path, slots=1),
        )


def test_the_memory_of_old_values_is_foreseen():
    config = {"preset": "llama-tiny", "precision": {"policy": "bf16"}, "offload": "opt=host"}
    job = build.build(config_table.from_table({**config, "train": {"update": "speculate", "compiled": False}}))
    state = fzero.init_state(job.model, job.tx, job.plan, seed=0)
    old = Speculation(StreamedUpdate(job.tx, job.plan, None))
    old.start(state)
    held = sum(room.nbytes for room in old.old.buffers.values())
    assert held == memory_check.old_values_bytes(job, memory_check.bytes_of_state(job)) > 0
