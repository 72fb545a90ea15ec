"""Steps on a mesh with cp: equal to one process whatever the form, the pieces, the stage and the mesh."""

import functools
import itertools
import math

import pytest
import ranks
from close import assert_close
from zero_cases import packed_batch_for, train, whole

import fzero
from fzero.sharding.context import FORMS, PIECES, Context

STEPS = 5
MESHES = {
    "cp2": {"cp": 2},
    "dp2 x cp2": {"dp": 2, "cp": 2},
    "cp4": {"cp": 4},
    "cp2 x tp2": {"cp": 2, "tp": 2},
    "pp2 x cp2": {"pp": 2, "cp": 2},
    "cp2 x rp2": {"cp": 2, "rp": 2},
}


def options_of(form="gather", pieces="zigzag", over_tp=False, **more):
    return {"plan_options": {"sequence": Context(form, pieces, over_tp), **more}}


CASES = {
    "causal": {},
    "documents": {"batches": packed_batch_for},
    "window": {"sizes": {"pattern": "window:3"}},
    "local": {"sizes": {"pattern": "local:3"}, "batches": packed_batch_for},
    "strided": {"sizes": {"pattern": "strided:2"}},
    "fixed": {"sizes": {"pattern": "fixed:3:1"}},
}


@functools.cache
def serial(name, optimizer, micro_batches, steps, what, dropout):
    more = {**CASES[what], "dropout": dropout}
    state, _, log = train(fzero.one_process(), name, optimizer, 0, micro_batches, steps=steps, **more)
    return state, log


def trained(mesh, cases, steps):
    out = []
    for case, what, options in cases:
        state, specs, log = train(mesh, *case, steps=steps, **CASES[what], **options)
        out.append((whole(state, specs, mesh), log))
    return out


def equals_one_process(mesh, cases, steps=STEPS):
    """Each case: (name of the model, optimizer, stage, micro-batches of a data rank, name of CASES, options of
    `train`)."""
    sizes = MESHES[mesh]
    data = sizes.get("dp", 1) * sizes.get("rp", 1)
    given = [((name, tx, stage, data * m), what, options) for name, tx, stage, m, what, options in cases]
    results = ranks.run(math.prod(sizes.values()), trained, given, steps, mesh=sizes, timeout_s=600)
    for (case, what, options), (state, log) in zip(given, results[0]):
        name, tx, _, m = case
        expected, expected_log = serial(name, tx, m, steps, what, options.get("dropout", 0.0))
        try:
            assert_close(log, expected_log, rtol=1e-10, atol=1e-12)
            assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)
            assert_close(state.opt_state, expected.opt_state, rtol=1e-8, atol=1e-10)
        except AssertionError as error:
            error.add_note(f"{mesh}, {case}, {what}, {options}")
            raise
    assert all([log for _, log in result] == [log for _, log in results[0]] for result in results)


# T = 8: on cp4 a block of the zigzag is one token. gpt2 is tied, with learned positions and dropout; gemma has windows,
# capped scores and layers that take turns, llama fewer key/value heads.
FEW = {
    "cp2": [("gpt2", "clipped adam", 3, 2, "documents", {**options_of(), "dropout": 0.1})],
    "cp2, more models": [
        ("llama", "sgd", 0, 1, "documents", options_of()),
        ("gemma", "adam", 1, 1, "causal", {**options_of(pieces="contiguous"), "remat": "full"}),
        ("moe dropless", "adam", 2, 1, "causal", options_of()),
        ("deepseek", "adam", 3, 1, "documents", options_of()),
    ],
    "dp2 x cp2": [
        ("gpt2", "adam", 3, 2, "fixed", {**options_of(), "dropout": 0.1}),
        ("llama", "sgd", 2, 1, "local", options_of(reduce="once")),
    ],
    "cp4": [("llama", "sgd", 0, 1, "window", options_of()), ("llama", "adam", 3, 2, "strided", options_of())],
    "cp2 x tp2": [
        ("gpt2", "sgd", 3, 2, "documents", {**options_of(over_tp=True), "dropout": 0.1, "remat": "every:2"}),
        ("llama", "adam", 1, 1, "window", options_of()),
        ("moe dropless", "sgd", 0, 2, "causal", options_of(over_tp=True)),
    ],
    "pp2 x cp2": [("gpt2", "adam", 3, 2, "local", {**options_of(), "dropout": 0.1})],
    "cp2 x rp2": [("llama", "clipped adam", 3, 2, "documents", options_of())],
}


@pytest.mark.parametrize("cases", [pytest.param(one, marks=[pytest.mark.slow] * (one != "cp2")) for one in FEW])
def test_context_parallelism_equals_one_process(cases):
    equals_one_process(cases.partition(",")[0], FEW[cases])


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", FORMS)
def test_every_product_equals_one_process(mesh, form):
    product = itertools.product(("sgd", "clipped adam"), (0, 3), CASES, PIECES)
    cases = [("llama", tx, stage, 2, what, options_of(form, pieces)) for tx, stage, what, pieces in product]
    equals_one_process(mesh, cases)
