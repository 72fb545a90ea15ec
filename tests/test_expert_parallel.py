"""Steps on a mesh with ep: equal to one process whatever the form, the stage, the mesh and the loads of experts."""

import functools
import itertools
import math

import pytest
import ranks
import torch
from close import assert_close, assert_same
from zero_cases import FP64, OPTIMIZERS, batch_for, model_of, packed_batch_for, train, whole

import fzero

STEPS = 5
FORMS = ("gather", "exchange:4")
MESHES = {
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "dp2 x ep2": {"dp": 2, "ep": 2},
    "ep2 x tp2": {"ep": 2, "tp": 2},
    "pp2 x ep2": {"pp": 2, "ep": 2},
    "cp2 x ep2": {"cp": 2, "ep": 2},
    "rp2 x ep2": {"rp": 2, "ep": 2},
    "dp2 x ep2 x cp2": {"dp": 2, "ep": 2, "cp": 2},
}
SIZES = {
    "moe dropless": {"n_experts": 4},
    "moe capacity": {"n_experts": 4},
    "deepseek": {"n_experts": 4, "n_groups": 2},
}


def options_of(form, **more):
    return {"plan_options": {"experts": form, **more}}


@functools.cache
def serial(name, optimizer, micro_batches, steps, dropout):
    state, _, log = train(
        fzero.one_process(), name, optimizer, 0, micro_batches, steps=steps, sizes=SIZES[name], dropout=dropout
    )
    return state, log


def trained(mesh, cases, steps):
    out = []
    for case, options in cases:
        state, specs, log = train(mesh, *case, steps=steps, sizes=SIZES[case[0]], **options)
        out.append((whole(state, specs, mesh), log))
    return out


def equals_one_process(mesh, cases, steps=STEPS):
    """Each case: (name of the model, optimizer, stage, micro-batches of a data rank, options of `train`)."""
    sizes = MESHES[mesh]
    data = math.prod(sizes.get(axis, 1) for axis in ("dp", "rp", "ep"))
    given = [((name, tx, stage, data * m), options) for name, tx, stage, m, options in cases]
    results = ranks.run(math.prod(sizes.values()), trained, given, steps, mesh=sizes, timeout_s=600)
    for (case, options), (state, log) in zip(given, results[0]):
        name, tx, _, m = case
        expected, expected_log = serial(name, tx, m, steps, options.get("dropout", 0.0))
        try:
            assert_close(log, expected_log, rtol=1e-10, atol=1e-12)
            assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)
            assert_close(state.opt_state, expected.opt_state, rtol=1e-8, atol=1e-10)
        except AssertionError as error:
            error.add_note(f"{mesh}, {case}, {options}")
            raise
    assert all([log for _, log in result] == [log for _, log in results[0]] for result in results)


# The first case of a mesh is in the default tier for ep2.
FEW = {
    "ep2": [
        ("moe dropless", "clipped adam", 3, 2, options_of("exchange:4")),
        ("deepseek", "sgd", 0, 1, {**options_of("gather"), "dropout": 0.1}),
    ],
    "ep4": [("moe dropless", "adam", 2, 1, options_of("exchange:4")), ("deepseek", "sgd", 3, 1, options_of("gather"))],
    "dp2 x ep2": [
        ("moe dropless", "clipped adam", 3, 2, {**options_of("exchange:4"), "remat": "full"}),
        ("moe dropless", "sgd", 2, 1, options_of("gather", reduce="once")),
        ("deepseek", "adam", 1, 2, options_of("exchange:4")),
        ("moe capacity", "adam", 3, 1, options_of("auto")),
    ],
    "ep2 x tp2": [
        ("moe dropless", "adam", 3, 1, options_of("exchange:4", sequence=True)),
        ("deepseek", "sgd", 1, 2, options_of("gather", sequence=True)),
    ],
    "pp2 x ep2": [("moe dropless", "adam", 3, 2, options_of("exchange:4"))],
    "cp2 x ep2": [("moe dropless", "adam", 3, 2, options_of("exchange:4"))],
    "rp2 x ep2": [("deepseek", "adam", 3, 2, options_of("gather"))],
}


@pytest.mark.parametrize("cases", [pytest.param(one, marks=[pytest.mark.slow] * (one != "ep2")) for one in FEW])
def test_expert_parallelism_equals_one_process(cases):
    equals_one_process(cases.partition(",")[0], FEW[cases])
