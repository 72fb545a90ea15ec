"""An optimizer's first state is what its `init` returns, wherever the state rests, and so are the steps after it."""

import pytest
import ranks
import torch
from close import assert_same
from optim_cases import OPTIMIZERS

import fzero
from fzero import optim
from fzero.core import pytree
from fzero.offload import DiskTensor
from fzero.sharding import Spec

pytestmark = pytest.mark.filterwarnings("ignore:.*its file system refuses direct transfers:UserWarning")
T = torch.optim
SIZES = {
    "embed/tokens": (8, 4),
    "blocks/norm/scale": (2, 4),
    "blocks/mlp/w_in": (2, 4, 6),
    "blocks/mlp/w_out": (2, 6, 4),
    "head/w": (8, 4),
    "head/temperature": (),
}


def odd(first):
    """A transformation whose state begins as `first(name, leaf)`."""

    def update(grads, state, params):
        new = pytree.map(lambda s, g: 0.5 * s + g, state["seen"], grads)
        return pytree.map(lambda s: -0.01 * s, new), {"seen": new, "count": state["count"] + 1}

    return optim.GradientTransformation(
        init=lambda params: {"seen": pytree.map_named(first, params), "count": torch.tensor(3)},
        update=update,
        spec=lambda specs: {"seen": specs, "count": Spec()},
    )


def bare(first):
    """A transformation whose state is a tree of the parameters, which begins as `first(leaf)`."""

    def update(grads, state, params):
        new = pytree.map(lambda s, g: 0.5 * s + g, state, grads)
        return pytree.map(lambda s: -0.01 * s, new), new

    return optim.GradientTransformation(
        init=lambda params: pytree.map(first, params), update=update, spec=lambda specs: specs
    )


ODD = {
    "parts by label": optim.by_label(
        {
            "numbers": optim.from_torch(T.NAdam, 1e-2),
            "slots": optim.from_torch(T.Rprop, 1e-2),
            "own": odd(lambda name, leaf: leaf.clone()),
            "bare": bare(torch.ones_like),
        },
        ((r"^blocks/mlp/w_in", "numbers"), (r"^blocks/mlp", "slots"), (r"^head", "own"), (".*", "bare")),
    ),
    "a copy": odd(lambda name, leaf: leaf.clone()),
    "ones": odd(lambda name, leaf: torch.ones_like(leaf)),
    "by the leaf's name": odd(lambda name, leaf: torch.full_like(leaf, len(name) / 8)),
    "Rprop": optim.from_torch(T.Rprop, 1e-2),
    "Adagrad": optim.from_torch(T.Adagrad, 1e-2, initial_accumulator_value=0.5),
    "an average in a chain": optim.chain(
        optim.clip_by_global_norm(1.0), optim.with_average(optim.adamw(1e-2, state_bits=8), 0.9)
    ),
}
ALL = ODD | {
    "ASGD": optim.from_torch(T.ASGD, 1e-2),
    "an average": optim.with_average(optim.adamw(1e-2), 0.9),
    "an average by label": optim.by_label(
        {"averaged": optim.with_average(optim.adamw(1e-2), 0.9), "sgd": optim.sgd(1e-2, 0.9)},
        ((r"blocks/.*", "averaged"), (".*", "sgd")),
    ),
    "an accumulated average": optim.accumulate(optim.with_average(optim.adamw(1e-2), 0.9), 2),
    "a scale of the rate": optim.with_lr_scale(lambda scale: optim.adamw(lambda count: 1e-2 * scale)),
    **{name: make(1e-2) for name, make in OPTIMIZERS.items() if name != "recipe"},  # which needs the whole tree
}
MEMORIES = {"fp32": ("opt=nvme", "params=nvme,opt=nvme"), "bf16": ("opt=host", "opt=nvme:0.5")}


def loss(params, batch):
    leaves = pytree.leaves(params)
    total = sum((torch.sin(3 * leaf.float()) * (i + 1)).sum() for i, leaf in enumerate(leaves))
    return total * batch["x"].sum(), batch["x"].shape[0]


def first_and_last(mesh, tx, policy, stage, offload, folder, steps):
    """(the first state, the state after some steps), in memory."""
    g = torch.Generator().manual_seed(1)
    params = pytree.nest({name: 0.3 * torch.randn(size, generator=g) for name, size in SIZES.items()})
    plan = fzero.zero_plan(stage, params, mesh, policy=policy, offload=offload)
    nvme = fzero.Nvme(folder, buffer_bytes=1 << 20) if "nvme" in offload else None
    state = fzero.init_state(params, tx, plan, seed=0, nvme=nvme)
    found = [read_back(state)]
    step = fzero.make_train_step(loss, tx, plan, nvme=nvme)
    for i in range(steps):
        state, _ = step(state, {"x": torch.tensor([0.1 * (i + 1), 0.2 + mesh.rank])})
    found.append(read_back(state))
    if nvme is not None:
        nvme.close()
    return found


def read_back(state):
    return pytree.map(lambda leaf: leaf.tensor() if isinstance(leaf, DiskTensor) else leaf.clone(), state)


@pytest.mark.parametrize("name", ODD)
def test_a_first_state_on_a_disk_is_what_init_returns(name, tmp_path):
    mesh, policy = fzero.one_process(), fzero.bf16() if name == "a copy" else fzero.fp32()
    wanted = first_and_last(mesh, ODD[name], policy, 0, "", None, 2)
    found = first_and_last(mesh, ODD[name], policy, 0, "params=nvme,opt=nvme", tmp_path, 2)
    for a, b in zip(found, wanted, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("kind", [T.NAdam, T.RAdam, T.ASGD, T.Adamax])
def test_numbers_of_a_class_move_on_a_rank_without_its_leaves(kind):
    tx, params = optim.from_torch(kind, 1e-2), {"w": torch.ones(3)}
    states = [tx.init(params), tx.init({})]
    for _ in range(3):
        states = [tx.update(part, state, part)[1] for part, state in zip((params, {}), states, strict=True)]
    assert_same(states[0].numbers, states[1].numbers)
    assert states[1].slots == {name: {} for name in states[0].slots}


def differing(mesh, name, policy, stage, folder):
    """The memories in which a first state, or one after six steps, is not that of the device."""
    wanted = first_and_last(mesh, ALL[name], policy, stage, "", None, 6)
    out = []
    for i, offload in enumerate(MEMORIES[policy.name]):
        found = first_and_last(mesh, ALL[name], policy, stage, offload, folder / f"{policy.name}-{i}", 6)
        for which, a, b in zip(("first", "last"), found, wanted, strict=True):
            for leaf, value in pytree.named_leaves(a).items():
                if not torch.equal(value, pytree.named_leaves(b)[leaf]):
                    out.append((offload, which, leaf))
    return out


def all_differing(mesh, names, stage, folder):
    policies = (fzero.fp32(), fzero.bf16()) if mesh.size == 1 else (fzero.bf16(),)
    return [(n, p.name, *found) for n in names for p in policies for found in differing(mesh, n, p, stage, folder / n)]


@pytest.mark.slow
def test_a_state_is_the_same_in_every_memory(tmp_path):
    assert all_differing(fzero.one_process(), ALL, 0, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", (1, 3))
def test_a_state_of_ranks_is_the_same_in_every_memory(tmp_path, stage):
    names = {1: ("a copy", "Rprop"), 3: ("by the leaf's name", "adafactor")}[stage]
    assert ranks.run(2, all_differing, names, stage, tmp_path) == [[], []]
