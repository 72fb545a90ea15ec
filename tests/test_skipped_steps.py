"""A step makes no update if its batch has values that are none, its loss counts what cannot be, or nothing counts."""

import math
from functools import partial

import pytest
import torch
from ranks import run as on_ranks

import fzero
from fzero import local_batch, models, optim
from fzero.core import pytree
from fzero.run import rollback
from fzero.run.config.run_config import Guard

MODEL = models.build(
    models.LlamaConfig(vocab_size=32, max_len=16, d_model=16, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=32)
)
TX = optim.adamw(1e-2, weight_decay=0.1)
X = torch.linspace(-1, 1, 16).reshape(4, 4)


def batch_with(wrong):
    """Four rows, of which the second and third have what is wrong."""
    rows = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": rows[:, :-1].clone(), "targets": rows[:, 1:].clone(), "mask": torch.ones(4, 8)}
    for name, value in wrong.items():
        batch[name][1:3, 2] = value
    return batch


WRONG = {
    "token": {"tokens": 32},
    "negative token": {"tokens": -1},
    "target": {"targets": 10**6},
    "weight": {"mask": -0.5},
    "no number": {"mask": math.nan},
    "infinite weight": {"mask": math.inf},
}
EMPTY = {"no weight": {"mask": torch.zeros(4, 8)}, "no target": {"targets": torch.full((4, 8), -100)}}


def all_kinds():
    """(name, batch, whether the loss is NaN) of each kind."""
    found = [(name, batch_with(wrong), True) for name, wrong in WRONG.items()]
    return found + [(name, {**batch_with({}), **empty}, False) for name, empty in EMPTY.items()]


def moved_by(state):
    """What an update writes, as whole tensors."""
    held = pytree.leaves((state.params, state.master, state.opt_state))
    return [(x if isinstance(x, torch.Tensor) else x.tensor()).clone() for x in held]


def train(mesh, folder=None, *, stage=0, offload="", policy="fp32", sequence=False, micro=2, tx=TX, **options):
    """[(kind, what is not as it should be)] of a step on each kind of batch, after a sound one and before one."""
    plan = fzero.zero_plan(stage, MODEL, mesh, offload=offload, policy=policy, sequence=sequence)
    nvme = fzero.Nvme(folder) if folder is not None else None
    state = fzero.init_state(MODEL, tx, plan, seed=0, nvme=nvme)
    step = fzero.make_train_step(MODEL, tx, plan, micro_batches=micro, nvme=nvme, **options)
    sound, odd = batch_with({}), []
    for name, batch, is_nan in [("sound", sound, False), *all_kinds(), ("sound", sound, False)]:
        before, steps = moved_by(state), int(state.step)
        state, metrics = step(state, local_batch(batch, mesh, micro))
        same = all(torch.equal(a, b) for a, b in zip(before, moved_by(state)))
        expected = (name != "sound", name != "sound", is_nan, steps + 1)
        found = (bool(metrics.skipped), same, not math.isfinite(metrics.loss), int(state.step))
        odd += [(name, found)] if found != expected else []
    if nvme is not None:
        nvme.close()
    return odd


def test_no_update_is_made():
    assert train(fzero.one_process()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"donate": False, "policy": "bf16"},
        {"policy": "fp16"},
        {"offload": "opt=host", "execution": fzero.Execution(update="speculate")},
        {"offload": "params=nvme,opt=nvme"},
        {"offload": "params=nvme,opt=nvme", "execution": fzero.Execution(update="backward")},
        {"execution": fzero.Execution(remat="full", compiled=True)},
    ],
    ids=str,
)
def test_no_update_is_made_on_any_path(how, tmp_path):
    assert train(fzero.one_process(), tmp_path / "disk" if "nvme" in how.get("offload", "") else None, **how) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ({"dp": 2}, {"stage": 1}),
        ({"dp": 2}, {"stage": 3, "policy": "bf16"}),
        ({"tp": 2}, {"sequence": True}),
        ({"cp": 2}, {}),
        ({"pp": 2}, {}),
    ],
    ids=str,
)
def test_no_update_is_made_on_any_mesh(mesh, how):
    assert on_ranks(2, partial(train, **how), mesh=mesh) == [[], []]


def test_a_loss_outside_of_a_step_and_an_evaluation_are_nan_too():
    params = models.init_params(MODEL, fzero.random.key(0))
    plan = fzero.zero_plan(0, MODEL, fzero.one_process())
    evaluate = fzero.make_eval_step(MODEL, plan)
    assert evaluate(params, batch_with({})).total.isfinite()
    for name, batch, is_nan in all_kinds():
        for out in (models.loss(MODEL, params, batch, models.Ctx()), evaluate(params, batch)):
            assert (not math.isfinite(out.total / out.num_tokens.clamp(min=1))) == is_nan, name


# -- losses of one's own


def weighed(params, batch):
    return (batch["x"] @ params["w"]).square().sum(), batch["count"].sum()


def step_of(loss, **options):
    params = {"w": torch.ones(4)}
    plan = fzero.zero_plan(0, params, fzero.one_process())
    return fzero.make_train_step(loss, TX, plan, **options), fzero.init_state(params, TX, plan, seed=0)


COUNTS = {"negative": [1, -2], "no number": [1, math.nan], "infinite": [1, math.inf], "none, of a sum": [0, 0]}


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("kind", COUNTS)
def test_counts_that_cannot_be(kind, donate):
    """The first step says so; in a later one the loss is NaN, and nothing is updated."""
    bad = {"x": X, "count": torch.tensor([COUNTS[kind]] * 2, dtype=torch.float32).reshape(4)}
    step, state = step_of(weighed, micro_batches=4, donate=donate)
    with pytest.raises(ValueError, match=r"counts (-2|nan|inf|no) samples"):
        step(state, bad)
    step, state = step_of(weighed, micro_batches=4, donate=donate)
    state, metrics = step(state, {"x": X, "count": torch.ones(4)})
    before = moved_by(state)
    state, metrics = step(state, bad)
    assert metrics.skipped and metrics.loss.isnan() and not metrics.grad_norm < 0
    assert all(torch.equal(a, b) for a, b in zip(before, moved_by(state)))


def test_an_impossible_count_never_climbs():
    """Where nothing is skipped, the parameters say so."""
    step, state = step_of(weighed, skip=fzero.Skip(nonfinite=False))
    state, _ = step(state, {"x": X, "count": torch.ones(4)})
    state, metrics = step(state, {"x": X, "count": -torch.ones(4)})
    assert state.params["w"].isnan().all() and not metrics.skipped


def test_an_empty_batch_does_not_enter_the_losses_of_spikes():
    skip = fzero.Skip(spike=fzero.Spike(warmup=1))
    step, state = step_of(
        lambda p, batch: ((batch["x"] @ p["w"] * batch["count"]).sum(), batch["count"].sum()), skip=skip
    )
    state, _ = step(state, {"x": X + 1, "count": torch.ones(4)})
    seen = state.extra["loss"]
    state, metrics = step(state, {"x": X + 1, "count": torch.zeros(4)})
    assert metrics.skipped and not metrics.spike and state.extra["loss"] == seen


MODULE = torch.nn.Linear(4, 1)
UNREACHED = {
    "a module's own parameters": lambda params, batch: MODULE(batch["x"]).square().sum(),
    "detached": lambda params, batch: (batch["x"] @ params["w"].detach()).sum(),
    "of the batch": lambda params, batch: batch["x"].sum(),
}


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("kind", UNREACHED)
def test_a_loss_that_no_parameter_reaches_is_refused(kind, donate):
    step, state = step_of(UNREACHED[kind], donate=donate)
    with pytest.raises(ValueError, match="no parameter reaches the loss"):
        step(state, {"x": X})


def test_a_loss_that_parameters_reach_with_a_gradient_of_0_trains():
    step, state = step_of(lambda params, batch: (batch["x"] @ params["w"] * 0.0).sum())
    assert not step(state, {"x": X})[1].skipped


def test_a_module_whose_loss_is_detached_is_refused():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = fzero.from_module(Two(), lambda module, batch: module(batch["x"]).detach().square().sum(), batch={"x": X})
    plan = fzero.zero_plan(0, model, fzero.one_process())
    state = fzero.init_state(model, TX, plan, seed=0)
    with pytest.raises(ValueError, match="no parameter reaches the loss"):
        fzero.make_train_step(model, TX, plan)(state, {"x": X})


@pytest.mark.parametrize(
    ("reason", "loss", "grad_norm", "why"),
    [
        ("empty", 0.0, 0.0, None),
        ("nonfinite", None, 1.0, "the loss is not finite"),
        ("nonfinite", None, None, "the gradient is not finite"),
    ],
)
def test_a_run_goes_back_for_what_is_not_finite_and_not_for_an_empty_batch(reason, loss, grad_norm, why):
    row = {"step": 3, "skipped": True, "reason": reason, "loss": loss, "grad_norm": grad_norm}
    fault = rollback.roll_back_decision(Guard(nonfinite="rollback"), row, sample=8, skipped=1)
    assert fault is None if why is None else why in fault
