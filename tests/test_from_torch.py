"""Optimizers of torch and of one's own: the bits of the class, and on ranks what they are on one process."""

import pytest
import ranks
import torch
import zero_cases
from close import assert_close

import fzero
from fzero import optim
from fzero.core import pytree

T = torch.optim
CLASSES = {
    "SGD": (T.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "plain SGD": (T.SGD, {}),
    "Adam": (T.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (T.AdamW, {"betas": (0.8, 0.9)}),
    "NAdam": (T.NAdam, {}),
    "RAdam": (T.RAdam, {"weight_decay": 0.1}),
    "RMSprop": (T.RMSprop, {"momentum": 0.5, "centered": True}),
    "Adagrad": (T.Adagrad, {"initial_accumulator_value": 0.3, "lr_decay": 0.1}),
    "Adadelta": (T.Adadelta, {}),
    "Adamax": (T.Adamax, {}),
    "ASGD": (T.ASGD, {}),
    "Rprop": (T.Rprop, {}),
}


def draws(seed):
    g = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(5, 3, generator=g).double(), "b": {"c": torch.randn((), generator=g).double()}}


@pytest.mark.parametrize("name", CLASSES)
def test_it_is_the_class(name):
    kind, options = CLASSES[name]
    tx, start = optim.from_torch(kind, 0.05, **options), draws(0)
    theirs = [leaf.clone().requires_grad_() for leaf in pytree.leaves(start)]
    reference = kind(theirs, lr=0.05, **options)
    pure, placed = start, pytree.map(torch.clone, start)
    state, placed_state = tx.init(pure), tx.init(placed)
    for step in range(8):
        grads = draws(step + 1)
        for leaf, g in zip(theirs, pytree.leaves(grads)):
            leaf.grad = g.clone()
        reference.step()
        placed, placed_state = optim.apply_in_place(tx, pytree.map(torch.clone, grads), placed_state, placed)
        kept = pytree.map(torch.clone, (grads, state, pure))
        updates, after = tx.update(grads, state, pure)
        assert all(map(torch.equal, pytree.leaves((grads, state, pure)), pytree.leaves(kept)))  # it is pure
        pure, state = optim.apply_updates(pure, updates), after
    assert all(torch.equal(a, b.detach()) for a, b in zip(pytree.leaves(placed), theirs))
    assert_close(pure, placed, rtol=1e-12, atol=1e-12)


def test_a_schedule_and_a_mask_are_its_groups():
    schedule, start = optim.linear(0.3, 0.0, 6), draws(0)
    tx, params = optim.from_torch(T.AdamW, schedule, weight_decay=0.5, mask="^a$"), start
    theirs = [leaf.clone().requires_grad_() for leaf in pytree.leaves(start)]
    reference = T.AdamW([{"params": [theirs[0]]}, {"params": [theirs[1]], "weight_decay": 0.0}], weight_decay=0.5)
    state = tx.init(params)
    for step in range(5):
        for leaf, g in zip(theirs, pytree.leaves(draws(step))):
            leaf.grad = g.clone()
        for group in reference.param_groups:
            group["lr"] = float(schedule(step))
        reference.step()
        params, state = optim.apply_in_place(tx, draws(step), state, params)
    assert all(torch.equal(a, b.detach()) for a, b in zip(pytree.leaves(params), theirs))


@pytest.mark.parametrize(
    ("kind", "lr", "options", "said"),
    [
        (T.LBFGS, 0.1, {}, "LBFGS cannot step on gradients alone"),
        (T.SparseAdam, 0.1, {}, "SparseAdam cannot step on gradients alone"),
        (T.Muon, 0.1, {}, "Muon with these options is not elementwise"),
        (T.Adafactor, 0.1, {}, "Adafactor is not elementwise: it keeps 'row_var'"),
        (T.SGD, 0.1, {"momentum": 0.9, "dampening": 0.5}, "its first step differs"),
        (T.Rprop, optim.constant(0.1), {}, "the state of Rprop begins with its learning rate"),
        (T.Adam, -1.0, {}, "Invalid learning rate"),
    ],
)
def test_what_is_not_elementwise_is_refused_by_name(kind, lr, options, said):
    with pytest.raises(ValueError, match=said):
        optim.from_torch(kind, lr, **options)


def test_what_is_no_class_is_refused():
    with pytest.raises(TypeError, match="write from_torch"):
        optim.from_torch("Adam", 0.1)


def heavy_ball(lr, momentum):
    """A transformation of one's own: init, update, spec and nothing else."""
    return optim.GradientTransformation(
        init=lambda params: pytree.map(torch.zeros_like, params),
        update=lambda grads, state, params: (
            pytree.map(lambda g, m: -lr * (g + momentum * m).tanh(), grads, state),
            pytree.map(lambda g, m: momentum * m + g, grads, state),
        ),
        spec=lambda specs: specs,
    )


OWN = {
    "own": heavy_ball(0.1, 0.9),
    "clipped RMSprop": optim.chain(optim.clip_by_global_norm(0.5), optim.from_torch(T.RMSprop, 1e-2, momentum=0.9)),
}


def trained(mesh, cases):
    zero_cases.OPTIMIZERS.update(OWN)
    return zero_cases.trained_whole(mesh, cases)


def test_on_two_ranks_at_every_stage_it_is_one_process():
    cases = [(("llama", name, stage, 2), {"steps": 2}) for name in OWN for stage in (0, 1, 2, 3)]
    results = ranks.run(2, trained, cases)[0]
    expected = trained(fzero.one_process(), [(("llama", name, 0, 2), {"steps": 2}) for name in OWN])
    for (case, _), (state, log) in zip(cases, results):
        one, one_log = expected[list(OWN).index(case[1])]
        assert_close(log, one_log, rtol=1e-10, atol=1e-12)
        assert_close(state.params, one.params, rtol=1e-10, atol=1e-10)
        assert_close(state.opt_state, one.opt_state, rtol=1e-8, atol=1e-10)
