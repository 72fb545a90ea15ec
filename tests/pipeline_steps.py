"""Steps on meshes with pp for tests, and the comparison with one process that each must stand."""

import functools
import math

import ranks
from close import assert_close
from zero_cases import FP64, train, whole

import fzero

STEPS = 5


def options_of(pipeline, **more):
    """The options of `train` for a pipeline, and more of its plan's."""
    return {"plan_options": {"pipeline": pipeline, **more}}


@functools.cache
def serial(name, optimizer, micro_batches, dropout=0.0, layers=0, rows=24, steps=STEPS, policy=FP64, **plan_options):
    """(state, metrics) of one process. layers: 0 for those that the model has in `zero_cases`."""
    sizes = {"n_layers": layers} if layers else {}
    state, _, log = train(
        fzero.one_process(), name, optimizer, 0, micro_batches, plan_options=plan_options, steps=steps, policy=policy,
        rows=rows, dropout=dropout, sizes=sizes,
    )  # fmt: skip
    return state, log


def trained(mesh, cases, steps):
    """[(the whole state, metrics) of each case]"""
    out = []
    for case, options in cases:
        state, specs, log = train(mesh, *case, steps=steps, **options)
        out.append((whole(state, specs, mesh), log))
    return out


def equals_one_process(sizes, cases, steps=STEPS):
    """Each case: (name of the model, optimizer, stage, micro-batches of a data rank, options of `train`)."""
    data = sizes.get("dp", 1) * sizes.get("rp", 1)
    given = [((name, tx, stage, data * m), options) for name, tx, stage, m, options in cases]
    results = ranks.run(math.prod(sizes.values()), trained, given, steps, mesh=sizes, timeout_s=600)
    for (case, options), (state, log) in zip(given, results[0]):
        name, tx, _, m = case
        same = {key: options[key] for key in ("dropout", "rows", "policy") if key in options}
        layers = options.get("sizes", {}).get("n_layers", 0)
        expected, expected_log = serial(name, tx, m, **same, layers=layers, steps=steps)
        try:
            assert_close(log, expected_log, rtol=1e-10, atol=1e-12)
            assert_close(state.params, expected.params, rtol=1e-10, atol=1e-10)
            assert_close(state.opt_state, expected.opt_state, rtol=1e-8, atol=1e-10)
        except AssertionError as error:
            error.add_note(f"{sizes}, {case}, {options}")
            raise
    assert all([log for _, log in result] == [log for _, log in results[0]] for result in results)
