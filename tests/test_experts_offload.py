"""Experts that ep does not divide, with parameters and optimizer state elsewhere: the steps of one process."""

import pytest
import ranks
from test_expert_parallel import STEPS, serial
from test_offload import folder  # noqa: F401  (a fixture)
from zero_cases import FP64, OPTIMIZERS, batch_for, expect_one_process, model_of, whole

import fzero
from fzero import local_batch, state_specs
from fzero.core import pytree
from fzero.offload import DiskTensor, Nvme

EXPERTS = 3


def in_memory(state):
    """The state with every leaf in memory."""
    return pytree.map(lambda leaf: leaf.tensor() if isinstance(leaf, DiskTensor) else leaf.clone(), state)


def trained_elsewhere(mesh, folder, offload, optimizer, stage, form):  # noqa: F811
    """The whole state and the metrics after STEPS steps."""
    model, tx = model_of("moe dropless", dropout=0.0, n_experts=EXPERTS), OPTIMIZERS[optimizer]
    plan = fzero.zero_plan(stage, model, mesh, policy=FP64, offload=offload).with_experts(form)
    space = Nvme(folder, buffer_bytes=1 << 20)
    state = fzero.init_state(model, tx, plan, seed=3, nvme=space)
    step, log = fzero.make_train_step(model, tx, plan, nvme=space), []
    for i in range(STEPS):
        state, metrics = step(state, local_batch(batch_for(i, 24), mesh))
        log.append([float(x) for x in (metrics.loss, metrics.num_tokens, metrics.grad_norm)])
    on_disk = [name for name, leaf in pytree.named_leaves(state).items() if isinstance(leaf, DiskTensor)]
    found = whole(in_memory(state), state_specs(plan, tx), mesh)
    space.close()
    return found, log, on_disk


CASES = {
    "host": ("params=host,opt=host", "clipped adam", 3, "exchange:1", 2),
    "nvme": ("params=nvme,opt=nvme", "clipped adam", 3, "exchange:1", 2),
    "nvme, dp": ("params=nvme,opt=nvme", "adam", 3, "gather", 4),
    "opt": ("opt=nvme", "adam", 1, "gather", 2),
    "part of opt": ("params=host,opt=nvme:0.5", "adam", 2, "exchange:1", 2),
    "muon": ("params=nvme,opt=nvme", "muon", 3, "exchange:1", 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name != "nvme")) for name in CASES]
)
def test_uneven_experts_elsewhere_have_the_steps_of_one_process(name, folder):  # noqa: F811
    offload, optimizer, stage, form, n = CASES[name]
    mesh = {"ep": 2} if n == 2 else {"dp": 2, "ep": 2}
    found = ranks.run(n, trained_elsewhere, folder, offload, optimizer, stage, form, mesh=mesh, timeout_s=300)
    for rank, (_, _, on_disk) in enumerate(found):
        assert any("moe/w_" in leaf for leaf in on_disk) == ("nvme" in offload), (rank, on_disk)
    expected = serial("moe dropless", optimizer, 1, STEPS, of=EXPERTS)
    expect_one_process([[(state, log)] for state, log, _ in found], [expected], [name])
