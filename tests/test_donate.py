"""A donated state: its next use raises, whatever it is used for, and says donate=False."""

import copy
import subprocess
import sys
import time

import pytest
import torch
from close import assert_close, assert_same
from law_cases import FP64, batch_of, case_of, clone

import fzero
from fzero import checkpoint, models, optim
from fzero.train.state import hand_over

DONATED = "this state was donated to a train step.*donate=False"
ONE = fzero.one_process()
W, B = torch.tensor([1.0, 2.0]), torch.tensor(0.5)
TREES = {  # the parameters, and how the loss finds w and b in them
    "dict": ({"w": W, "b": B}, lambda p: (p["w"], p["b"])),
    "nested": ({"a": {"w": W}, "c": [{"b": B}]}, lambda p: (p["a"]["w"], p["c"][0]["b"])),
    "list": ([W, B], lambda p: p),
    "tuple": ((W, B), lambda p: p),
    "tuple of dicts": (({"w": W}, {"b": B}), lambda p: (p[0]["w"], p[1]["b"])),
}
BATCH = {"x": torch.eye(2)}


def program(tree, policy=None, **options):
    """(step, evaluation, check, state) of a tree of TREES."""
    params, find = TREES[tree]

    def loss(params, batch):
        w, b = find(params)
        return (batch["x"].to(w.dtype) @ w + b).square().sum(), batch["x"].shape[0]

    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1))
    plan = fzero.zero_plan(0, params, ONE, policy=policy or fzero.fp32())
    state = fzero.init_state(params, tx, plan, seed=0)
    return (
        fzero.make_train_step(loss, tx, plan, **options),
        fzero.make_eval_step(loss, plan),
        fzero.make_check(loss, tx, plan),
        state,
    )


@pytest.mark.parametrize("policy", ("fp32", "bf16"))
@pytest.mark.parametrize("tree", TREES)
def test_training_on_from_a_donated_state_raises(tree, policy, tmp_path):
    step, evaluate, check, state = program(tree, getattr(fzero, policy)())
    pure = program(tree, getattr(fzero, policy)(), donate=False)[0]
    expected, _ = pure(clone(state), BATCH)
    new, _ = step(state, BATCH)
    assert_close((new.params, new.opt_state), (expected.params, expected.opt_state), rtol=1e-6)
    for use in (
        lambda: step(state, BATCH),
        lambda: pure(state, BATCH),
        lambda: program(tree, getattr(fzero, policy)())[0](state._replace(key=state.key + 1), BATCH),
        lambda: check(state, lambda m: BATCH),
        lambda: checkpoint.save(tmp_path, state, step=1),
        lambda: checkpoint.restore(tmp_path, state),
    ):
        with pytest.raises(ValueError, match=DONATED):
            use()
    if tree != "tuple":  # of leaves alone: nothing of it can be replaced
        with pytest.raises(ValueError, match=DONATED):
            evaluate(state.params, BATCH)
    new, _ = step(new, BATCH)
    evaluate(new.params, BATCH)
    checkpoint.save(tmp_path, new, step=2)
    assert_same(checkpoint.restore(checkpoint.latest(tmp_path), new), new)


USES = {
    "an entry": lambda p: p["blocks"]["attn"]["w_q"],
    "a sum": lambda p: 1 + p["head"],
    "a product": lambda p: torch.eye(2) @ p["embed"],
    "a shape": lambda p: p["embed"].shape,
    "a loop": lambda p: list(p["blocks"]),
    "a copy": copy.deepcopy,
    "a tree": lambda p: fzero.pytree.map(torch.clone, p),
    "a function of torch": lambda p: torch.cat([p["embed"]]),
}


def model_program(**options):
    model, tx = case_of("gpt2").loss_fn, optim.sgd(0.3)
    plan = fzero.zero_plan(0, model, ONE, policy=FP64)
    return model, plan, fzero.make_train_step(model, tx, plan, **options), fzero.init_state(model, tx, plan, seed=0)


def test_a_model_s_donated_parameters_raise_in_every_use():
    model, plan, step, state = model_program()
    params, batch = state.params, batch_of(0)
    step(state, batch)
    for use in USES.values():
        with pytest.raises(ValueError, match=DONATED):
            use(params)
    with pytest.raises(ValueError, match=DONATED):
        models.loss(model, params, batch, models.Ctx(dtype=torch.float64))
    with pytest.raises(ValueError, match=DONATED):
        fzero.make_eval_step(model, plan)(params, batch)


FAKE = """
import torch
from torch._subclasses import FakeTensorMode

with FakeTensorMode():
    from fzero.train.state import GONE, Donated
assert isinstance(GONE, Donated) and type(GONE) is Donated
"""


@pytest.mark.slow
def test_the_mark_of_a_donated_leaf_is_made_while_tensors_are_fake():
    subprocess.run([sys.executable, "-c", FAKE], check=True)


def test_a_skipped_step_takes_its_state_too():
    _, _, step, state = model_program()
    state.params["head"]["norm"]["scale"].fill_(float("nan"))
    new, metrics = step(state, batch_of(0))
    assert bool(metrics.skipped) and int(new.step) == 1
    with pytest.raises(ValueError, match=DONATED):
        step(state, batch_of(0))


def test_without_donation_the_old_state_stays():
    _, _, step, state = model_program(donate=False)
    before = clone(state)
    one, _ = step(state, batch_of(0))
    other, _ = step(state, batch_of(0))
    assert_same(state, before)
    assert_same(one, other)


def test_a_step_that_fails_leaves_its_state():
    _, _, step, state = model_program()
    with pytest.raises(ValueError, match="targets"):
        step(state, {"tokens": torch.zeros(2, 4, dtype=torch.int64)})
    step(state, batch_of(0))


def test_the_tensors_are_the_same_objects_and_the_time_does_not_grow_with_the_leaves():
    def state_of(n):
        params = {"blocks": {f"w_{i}": torch.zeros(2, 2) for i in range(n)}}
        tx = optim.adamw()
        return fzero.init_state(params, tx, fzero.zero_plan(0, params, ONE), seed=0)

    def seconds(n):
        state, best = state_of(n), 1.0
        for _ in range(20):
            begin = time.thread_time()
            state = hand_over(state, state._replace(step=state.step + 1))
            best = min(best, time.thread_time() - begin)
        return best

    state = state_of(3)
    leaf = state.params["blocks"]["w_0"]
    assert hand_over(state, state._replace(step=state.step + 1)).params["blocks"]["w_0"] is leaf
    assert seconds(2000) < 3 * seconds(2) + 1e-4
