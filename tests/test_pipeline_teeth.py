"""Mistakes planted into pipelines, each with the law that must catch it: steps that equal one process, norms by layer,
what is sent, what is held. The laws are those of test_pipelined.py and test_pipeline_sums.py, on two ranks."""

import functools
import math
import time
from dataclasses import replace
from unittest import mock

import pytest
import ranks
import torch
from close import assert_close
from pipeline_steps import options_of, serial
from test_pipeline_sums import CASES as HELD
from test_pipeline_sums import expect_in_flight, peaks, sent
from test_pipelined import layer_norms
from zero_cases import FP64, OPTIMIZERS, batch_for, model_of, train, whole

import fzero
from fzero import local_batch
from fzero.comm import ledger, rank_tables
from fzero.core import stack
from fzero.optim import sharded_leaves
from fzero.run.measure import norms
from fzero.sharding import GradientReducer, Pipeline, pipeline, zero_plan
from fzero.sharding import plan as plan_file
from fzero.train import gradient, pipeline_executor, streamed_model
from fzero.train.stage_exchange import StageSharing

MICRO, STEPS = 4, 2

# ---- laws: each fails where it does not hold -------------------------------------------------------------------------

# gpt2 is tied, has dropout and 4 layers; clipping looks at the norm.
CASES = [
    ("gpt2", "clipped adam", 3, options_of(Pipeline("gpipe", layout="3,1"))),
    ("gpt2", "sgd", 1, options_of(Pipeline("zb-h1"))),
    ("gpt2", "sgd", 0, options_of(Pipeline("interleaved", chunks=2))),
]
SAME = {"dropout": 0.1, "sizes": {"n_layers": 4}, "rows": MICRO}


def stepped(mesh, plant):
    out = []
    for name, tx, stage, options in CASES:
        with plant():
            state, specs, log = train(mesh, name, tx, stage, MICRO, steps=STEPS, **options, **SAME)
        out.append((whole(state, specs, mesh), log))
    return out


def steps(plant):
    """Parameters, losses and norms of steps are those of one process."""
    found = ranks.run(2, stepped, plant, mesh={"pp": 2}, timeout_s=60)
    for (name, tx, *_), (state, log) in zip(CASES, found[0]):
        expected, losses = serial(name, tx, MICRO, dropout=0.1, layers=4, rows=MICRO, steps=STEPS)
        assert_close(log, losses, rtol=1e-10, atol=1e-12)
        assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)


def norms_of(mesh, plant, cases):
    with plant():
        return layer_norms(mesh, cases)


def norms_by_layer(plant):
    """The norms of layers are those of one process."""
    case = ("gemma", 3, 4, {})
    (expected,) = ranks.run(1, layer_norms, [case])
    piped = (*case[:3], {"pipeline": Pipeline("interleaved", chunks=2)})
    for found in ranks.run(2, norms_of, plant, [piped], mesh={"pp": 2}):
        assert_close(found, expected, rtol=1e-10, atol=1e-12)


def sent_with(mesh, plant, names):
    with plant():
        return sent(mesh, (0,), names)


def messages(plant, sizes=(("pp", 2),), names=("1f1b", "zb-v")):
    """What a rank sends is what the formulas say."""
    for cases in ranks.run(math.prod(dict(sizes).values()), sent_with, plant, names, mesh=dict(sizes)):
        for found, expected, _ in cases.values():
            assert found == expected


def held_with(mesh, plant):
    with plant():
        return peaks(mesh, HELD)


def memory(plant):
    """A rank holds the micro-batches in flight."""
    expect_in_flight(ranks.run(2, held_with, plant, mesh={"pp": 2}))


def timed(mesh, plant):
    """(the row of this rank, when its acts began by a clock that ranks share)"""
    model = model_of("gpt2", n_layers=2)
    if mesh["pp"].rank == 0:
        block = model.block

        def slow(*args):
            time.sleep(0.05)
            return block(*args)

        model = model._replace(block=slow)
    plan, tx = zero_plan(0, model, mesh, policy=FP64), OPTIMIZERS["sgd"]
    step = fzero.make_train_step(model, tx, plan, micro_batches=MICRO)
    batch = local_batch(batch_for(0, MICRO), mesh, MICRO)
    state, _ = step(fzero.init_state(model, tx, plan, seed=0), batch)
    times = ledger.ActTimes(time.monotonic)
    with plant(), mock.patch.object(mesh.ledger, "acts", times):
        step(state, batch)
    return times.begins


def acts(plant):
    """An act that takes a message is recorded as begun behind the act that sent it."""
    began = ranks.run(2, timed, plant, mesh={"pp": 2})
    s = pipeline.schedule("1f1b", pipeline.layout([1.0] * 2, 2), MICRO)
    when = {act: at for acts, moments in zip(s.rows, began) for act, at in zip(acts, moments, strict=True)}
    for source, target in pipeline.feeds(s).items():
        assert when[target] > when[source], (source, target)


def compared(mesh, plant):
    """Of tables with one name and one number of micro-batches, stages and acts."""
    first = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    how = Pipeline(first.replace("0F1 0B0", "0F1 0I0 0W0") if mesh["pp"].rank else first)
    plan = zero_plan(0, model_of("gpt2"), mesh, pipeline=how)
    with plant():
        try:
            pipeline_executor.expect_equal_schedules(plan, 2)
        except ValueError as error:
            return str(error)
    return ""


def tables(plant):
    """Ranks with unlike tables are told."""
    assert all("have unlike schedules" in said for said in ranks.run(2, compared, plant, mesh={"pp": 2}))


# ---- mistakes ------------------------------------------------------------------------------------------------------

MISTAKES = {}


def caught_by(*laws, default=False):
    def register(plant):
        for law in laws:
            MISTAKES[f"{plant.__name__} [{law.__name__}]"] = plant, law, default
        return plant

    return register


@caught_by(steps, default=True)
def tied_sum_dropped():
    """Of an embedding that the head uses too only the first stage's gradient counts."""
    real = StageSharing.scatter

    def wrong(self, sums):
        users = {name: terms[:1] for name, terms in self.plan.users.items()}
        return real(self._replace(plan=with_users(self.plan, users)), sums)

    return mock.patch.object(StageSharing, "scatter", wrong)


def with_users(plan, users):
    changed = replace(plan)
    changed.__dict__["users"] = users
    return changed


@caught_by(steps)
def norm_of_one_stage():
    real = sharded_leaves.psum
    return mock.patch.object(
        sharded_leaves, "psum", lambda x, axis, **o: x if axis.name == "pp" else real(x, axis, **o)
    )


@caught_by(steps)
def gradient_of_a_mean_over_micro_batches():
    real = gradient.run_row
    return mock.patch.object(
        gradient,
        "run_row",
        lambda model, params, batches, seed, *rest: real(model, params, batches, seed / len(batches.parts), *rest),
    )


@caught_by(steps)
def local_layer_number():
    """Dropout is that of the first layers in every stage."""
    real = pipeline_executor.stages_of

    def wrong(parts, plan, rank=None):
        return {
            stage: tuple(part._replace(first=part.local_first) for part in mine)
            for stage, mine in real(parts, plan, rank).items()
        }

    return mock.patch.object(pipeline_executor, "stages_of", wrong)


@caught_by(steps)
def parameters_of_the_other_chunk():
    real = pipeline_executor.stages_of

    def wrong(parts, plan, rank=None):
        return {
            stage: tuple(part._replace(local_first=0) for part in mine)
            for stage, mine in real(parts, plan, rank).items()
        }

    return mock.patch.object(pipeline_executor, "stages_of", wrong)


@caught_by(steps)
def dropout_of_the_first_micro_batch():
    real = streamed_model.StreamedModel.context
    return mock.patch.object(
        streamed_model.StreamedModel, "context", lambda self, batch, key, first: real(self, batch, key, 0)
    )


@caught_by(steps)
def message_room_used_again():
    """What a message brings is written where the one before it is, whose micro-batch is still in flight."""
    rooms = {}

    def expect(self, shapes, device, after=0):
        key = (self.label, tuple((tuple(shape), dtype) for shape, dtype in shapes))
        if key not in rooms:
            rooms[key] = [torch.empty(tuple(shape), dtype=dtype, device=device) for shape, dtype in shapes]
        self.pending.append([self._start(after + i, room) for i, room in enumerate(rooms[key])])
        self.received += 1

    return mock.patch.object(rank_tables.Receiver, "expect", expect)


def weights(wrong):
    real = streamed_model.StreamedModel.backward_weights
    return mock.patch.object(streamed_model.StreamedModel, "backward_weights", functools.partialmethod(wrong, real))


@caught_by(steps)
def weights_of_the_micro_batch_before():
    before = []

    def wrong(self, real, owed, reducer, last):
        before.append(owed)
        real(self, before[0] if len(before) == 1 else before.pop(0), reducer, last)

    return weights(wrong)


@caught_by(steps)
def weights_of_the_last_micro_batch_alone():
    return weights(lambda self, real, owed, reducer, last: real(self, owed, reducer, last) if last else None)


@caught_by(steps)
def what_weights_need_freed_with_the_inputs():
    real = stack.LayerLoop.backward_inputs

    def wrong(self, *args):
        out = real(self, *args)
        for t in (t for owed in self.pending for t in owed):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                t.zero_()
        return out

    return mock.patch.object(stack.LayerLoop, "backward_inputs", wrong)


def over_dp(plant):
    messages(plant, (("pp", 2), ("dp", 2)), ("1f1b", "zb-h1"))


@caught_by(over_dp)
def last_one_early():
    """The sum over micro-batches leaves with the one before the last, and again with the last."""
    real = GradientReducer.reduce_group

    def wrong(self, group, names, grads, *, last, shared_leaves=frozenset()):
        seen = self.__dict__.setdefault("seen", {})
        key = group.name, group.layer, tuple(names)
        seen[key] = seen.get(key, 0) + 1
        return real(
            self, group, names, grads, last=last or seen[key] == self.stored_sums.parts - 1, shared_leaves=shared_leaves
        )

    return mock.patch.object(GradientReducer, "reduce_group", wrong)


@caught_by(norms_by_layer)
def norms_in_the_order_of_the_ranks():
    """Of two chunks a rank the layers are not in the order of the ranks."""
    real = norms.scatter_layers

    def wrong(sums, spec, mesh):
        if not spec.rows:
            return real(sums, spec, mesh)
        ordered, at = [], 0
        for rows in spec.rows:
            ordered.append(tuple(range(at, at + len(rows))))
            at += len(rows)
        return real(sums, spec.__class__(spec.dims, rows=tuple(ordered)), mesh)

    return mock.patch.object(norms, "scatter_layers", wrong)


@caught_by(norms_by_layer)
def norms_of_own_layers_alone():
    real = norms.psum
    return mock.patch.object(norms, "psum", lambda x, axis, **o: x if axis.name == "pp" else real(x, axis, **o))


@caught_by(messages)
def shared_leaves_gathered_to_all():
    """Also to ranks that do not use them."""
    real = StageSharing.gather

    def wrong(self, params):
        users = {name: [("", 0), ("", 1)] for name in self.plan.users}
        return real(self._replace(plan=with_users(self.plan, users)), params)

    return mock.patch.object(StageSharing, "gather", wrong)


@caught_by(memory)
def all_forwards_first():
    """In every schedule, as gpipe has them."""
    real = plan_file.build_schedule
    return mock.patch.object(plan_file, "build_schedule", lambda pipeline, *rest: real(Pipeline("gpipe"), *rest))


@caught_by(acts)
def waiting_counted_in_the_act():
    return mock.patch.object(ledger.ActTimes, "mark_arrival", lambda self: None)


@caught_by(tables)
def tables_compared_by_their_names():
    return mock.patch.object(pipeline, "write_schedule", lambda schedule: schedule.name)


# ---- each is caught ------------------------------------------------------------------------------------------------


def unharmed():
    return mock.patch.dict({})


LAWS = tuple(dict.fromkeys(law for _, law, _ in MISTAKES.values()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_law_holds_without_a_mistake(law):
    law(unharmed)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (not default)) for n, (*_, default) in MISTAKES.items()]
)
def test_a_mistake_is_caught(name):
    plant, law, _ = MISTAKES[name]
    with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError, ValueError)):
        law(plant)
