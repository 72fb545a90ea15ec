"""Frozen leaves, LoRA, averages, plain functions and pure steps under every stage: equal to one process."""

import functools

import pytest
import ranks
import torch
from close import assert_close, assert_same
from law_cases import FP64, plain_loss, plain_params, step_options
from zero_cases import batch_for, model_of, whole

import fzero
from fzero import local_batch, models, optim, state_specs
from fzero.core import precision, pytree

MESHES = {"dp2": {"dp": 2}, "dp2 x tp2": {"dp": 2, "tp": 2}}


@functools.cache
def lora_of(name):
    return models.lora(model_of(name, dropout=0.0), rank=2)


def run(mesh, stage, kind, donate=True, steps=2):
    """(whole state, metrics) after some steps; 4 micro-batches of the global batch."""
    options, plan_options, rows = {}, {}, 8
    source = loss_fn = model_of("gpt2", dropout=0.1)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adam(1e-2, eps=1e-5))
    if kind == "frozen":
        plan_options = {"frozen": r"^embed/|/attn/"}
    elif kind == "lora":
        source = loss_fn = lora_of("llama")
        plan_options = {"frozen": r"^(?!.*_lora_)"}
    elif kind == "plain function":
        source, loss_fn = plain_params(), plain_loss
    elif kind == "average":
        tx = optim.with_average(tx, 0.9)
    elif kind == "full accumulators":
        plan_options = {"reduce": "once"}
    elif kind == "kept":
        options = {"reshard": False}
    elif kind == "far ahead":
        options = {"prefetch": 5}
    elif kind == "every second input":
        options = {"remat": "every:2"}
    elif kind == "canonical":
        plan_options = {"reduce": "canonical"}
    plan = fzero.zero_plan(stage, source, mesh, **plan_options, policy=FP64)
    state = fzero.init_state(source, tx, plan, seed=3)
    local = 4 // mesh.data_size
    step = fzero.make_train_step(loss_fn, tx, plan, micro_batches=local, donate=donate, **step_options(options))
    log = []
    for i in range(steps):
        batch = batch_for(i, rows)
        if kind == "plain function":
            batch = {**batch, "tokens": batch["tokens"] % 17, "targets": batch["targets"] % 17}
        state, metrics = step(state, local_batch(batch, mesh, local))
        log.append([float(x) for x in (metrics.loss, metrics.num_tokens, metrics.grad_norm)])
    return whole(state, state_specs(plan, tx), mesh), log


def runs(mesh, stages, kind, donate):
    return [run(mesh, stage, kind, donate) for stage in stages]


@functools.cache
def alone(kind):
    return run(fzero.one_process(), 0, kind)


KINDS = (
    "frozen",
    "lora",
    "average",
    "plain function",
    "full accumulators",
    "kept",
    "far ahead",
    "every second input",
    "canonical",
)


# With tensor parallelism beside it, these are not run every time.
SLOW = ("lora", "kept", "canonical", "frozen")
COMMON = ("average", "full accumulators", "far ahead", "every second input")


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param(
            kind,
            mesh,
            marks=[pytest.mark.exhaustive] * ("tp" in mesh and kind in COMMON)
            + [pytest.mark.slow] * (kind in (SLOW if "tp" in mesh else (*COMMON, "frozen"))),
        )
        for kind in KINDS
        for mesh in MESHES
    ],
)
def test_equals_one_process(kind, mesh):
    if kind == "plain function" and mesh != "dp2":
        pytest.skip("a plain function has no tensor parallelism")
    expected, expected_log = alone(kind)
    sizes = MESHES[mesh]
    n = 4 if len(sizes) == 2 else 2
    for stage, (state, log) in enumerate(ranks.run(n, runs, (0, 1, 2, 3), kind, True, mesh=sizes, timeout_s=300)[0]):
        try:
            assert_close(log, expected_log, rtol=1e-10, atol=1e-12)
            assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)
            assert_close(state.opt_state, expected.opt_state, rtol=1e-8, atol=1e-9)
            if kind == "average":
                average, wanted = state.opt_state.average, expected.opt_state.average
                assert_close(average, wanted, rtol=1e-10, atol=1e-10)
        except AssertionError as error:
            error.add_note(f"{kind}, {mesh}, stage {stage}")
            raise


@pytest.mark.parametrize("kind", ("frozen", "average", "plain function"))
def test_a_pure_step_equals_a_donated_one(kind):
    expected, expected_log = alone(kind)
    for state, log in ranks.run(2, runs, (0, 1, 3), kind, False, mesh={"dp": 2}, timeout_s=300)[0]:
        assert_close(log, expected_log, rtol=1e-10, atol=1e-12)
        assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)


def test_what_is_frozen_stays_and_has_no_state():
    for kind in ("frozen", "lora"):
        state, _ = alone(kind)
        start, _ = run(fzero.one_process(), 0, kind, steps=0)
        moved = {
            n
            for n, p in pytree.named_leaves(state.params).items()
            if not torch.equal(p, pytree.named_leaves(start.params)[n])
        }
        trained = {n.split("/", 2)[2] for n in pytree.names(state.opt_state) if "/m/" in n}
        assert moved == trained and 0 < len(moved) < len(pytree.names(state.params))
        assert all(("_lora_" in n) == (kind == "lora") for n in moved)


def drawn(mesh, stage):
    """The first state in bf16 with float32 master weights, put together."""
    model = model_of("llama", dropout=0.0)
    plan = fzero.zero_plan(stage, model, mesh, policy=precision.bf16())
    tx = optim.adam(0.1)
    state = fzero.init_state(model, tx, plan, seed=5)
    return whole(state, state_specs(plan, tx), mesh)


@pytest.mark.parametrize("sizes", ({"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}), ids=str)
def test_the_initial_state_has_the_same_bits_on_every_mesh(sizes):
    expected = drawn(fzero.one_process(), 0)
    for stage in (0, 1, 3):
        assert_same(ranks.run(4, drawn, stage, mesh=sizes)[1], expected)


def test_what_does_not_fit_is_refused():
    model, mesh = model_of("llama", dropout=0.0), fzero.one_process()
    with pytest.raises(ValueError, match="matches no leaf"):
        fzero.zero_plan(0, model, mesh, frozen="nothing")
    with pytest.raises(ValueError, match="matches every leaf"):
        fzero.zero_plan(0, model, mesh, frozen=".")
    with pytest.raises(ValueError, match="reduce is 'exact'"):
        fzero.zero_plan(0, model, mesh, reduce="exact")
    with pytest.raises(ValueError, match="power of two"):
        fzero.zero_plan(0, model, fzero.sharding.fake_mesh({"dp": 3}), reduce="canonical")
    with pytest.raises(ValueError, match=r"ep=2: ep splits the experts of mixtral and deepseek; .* use dp"):
        fzero.zero_plan(0, model, fzero.sharding.fake_mesh({"ep": 2}))
    plan = fzero.zero_plan(1, model, fzero.sharding.fake_mesh({"dp": 2}))
    with pytest.raises(ValueError, match=r"needs='tree'.*give it an `on`"):
        fzero.make_train_step(model, optim.clip_by_global_norm(1.0)._replace(with_shards=None), plan)
    with pytest.raises(ValueError, match="9 rows cannot be cut into 2"):
        fzero.train.batch.rows_of(mesh, 9, 2)
