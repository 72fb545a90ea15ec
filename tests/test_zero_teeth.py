"""Mistakes planted on a mesh, each of which parallel = serial must catch: a sum forgotten, a part taken from the wrong
rank."""

import functools
from dataclasses import replace
from unittest import mock

import pytest
import ranks
from close import assert_close
from zero_cases import train, whole

import fzero
from fzero.core import Future, stack
from fzero.sharding import LeafPlan, Plan, prefetch
from fzero.train import gradient, loss


def without(op, axis):
    """The sums of gradients over `axis` are forgotten."""

    def forgetful(leaf):
        return tuple(tuple(move for move in path if move != (op, axis)) for path in real(leaf))

    real = LeafPlan.moves_within_stage.fget
    return mock.patch.object(LeafPlan, "moves_within_stage", property(forgetful))


def local_losses():
    """Losses and token counts of this rank alone: each divides by its own number of tokens."""
    alone = fzero.one_process()
    real = loss.sum_losses

    def local(losses, mesh):
        total = real(losses, alone)
        # Of 0 the rank would make no update, and the others wait for it.
        return total._replace(num_tokens=total.num_tokens.clamp(min=1))

    return mock.patch.object(gradient, "sum_losses", local)


def another_order():
    """Gathered shards are put together in the reverse order of ranks."""
    real = prefetch.start_all_gather

    def reversed_order(x, axis, **options):
        pending = real(x, axis, **options)
        shape = (axis.size * x.shape[0], *x.shape[1:])
        return Future(lambda: pending.wait().view(axis.size, -1).flip(0).reshape(shape))

    return mock.patch.object(prefetch, "start_all_gather", reversed_order)


def first_part():
    """Every rank updates the first shard of a leaf."""
    return mock.patch.object(
        Plan, "local_shards", lambda plan, params: real(replace(plan, mesh=first_rank(plan.mesh)), params)
    )


def first_rank(mesh):
    axes = tuple(axis._replace(rank=0) if axis.name == "dp" else axis for axis in mesh.axes)
    return fzero.Mesh(axes, ledger=mesh.ledger, store=mesh.store)


real = Plan.local_shards


def same_rows():
    """Dropout's masks are those of the first rank's rows on every rank."""
    return mock.patch.object(fzero.Mesh, "data_rank", property(lambda mesh: 0))


def another_layer():
    """In the backward pass the parameters of the layer below are used."""
    real = stack.LayerLoop.backward

    def backward(self, fetch, put, grads, extra):
        held = {}

        def wrong(i):
            held[i] = fetch(i)
            return held.get(i + 1, held[i])

        return real(self, wrong, put, grads, extra)

    return mock.patch.object(stack.LayerLoop, "backward", backward)


# mistake -> (how it is planted, mesh, stage, options of train)
MISTAKES = {
    "no sum over replicas": (lambda: without("psum", "rp"), {"dp": 2, "rp": 2}, 3, {}),
    "no sum over dp at stage 0": (lambda: without("psum", "dp"), {"dp": 4}, 0, {}),
    "no sum of replicated kv over tp": (lambda: without("psum", "tp"), {"tp": 4}, 0, {}),
    "no sum of norms over tp with sequence": (
        lambda: without("psum", "tp"),
        {"dp": 2, "tp": 2},
        2,
        {"plan_options": {"sequence": True}},
    ),
    "local token counts": (local_losses, {"dp": 4}, 2, {}),
    "shards in another order": (another_order, {"dp": 4}, 3, {}),
    "the first shard everywhere": (first_part, {"dp": 4}, 1, {}),
    "dropout of other rows": (same_rows, {"dp": 4}, 2, {"dropout": 0.5, "local": True}),
    "parameters of another layer": (another_layer, {"dp": 4}, 3, {}),
}


def run(mesh, mistake, planted):
    plant, _, stage, options = MISTAKES[mistake]
    options = {k: v for k, v in options.items() if k != "local"}
    with plant() if planted else mock.MagicMock():
        state, specs, log = train(mesh, "llama", "sgd", stage, 4, rows=8, steps=2, **options)
    return whole(state, specs, mesh).params, [row[0] for row in log]


@functools.cache
def alone(dropout):
    state, _, log = train(fzero.one_process(), "llama", "sgd", 0, 4, rows=8, steps=2, dropout=dropout)
    return state.params, [row[0] for row in log]


# Of a sum, of a gather and of what a rank counts.
OFTEN = ("no sum over dp at stage 0", "shards in another order", "local token counts")


@pytest.mark.parametrize("mistake", [pytest.param(m, marks=[pytest.mark.slow] * (m not in OFTEN)) for m in MISTAKES])
def test_is_caught(mistake):
    _, sizes, _, options = MISTAKES[mistake]
    expected = alone(options.get("dropout", 0.0))
    assert_close(ranks.run(4, run, mistake, False, mesh=sizes)[0], expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(AssertionError):
        assert_close(ranks.run(4, run, mistake, True, mesh=sizes)[0], expected, rtol=1e-10, atol=1e-10)
