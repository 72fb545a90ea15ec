"""Steps on meshes with pp for tests, and the comparison with one process that each must stand."""

import functools
import math

import ranks
from zero_cases import FP64, expect_one_process, train, trained_whole

import fzero

STEPS = 3  # the second has moments of the first, and programs made for it


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


def equals_one_process(sizes, cases, steps=STEPS):
    """Each case: (name of the model, optimizer, stage, micro-batches of a data rank, options of `train`)."""
    data = sizes.get("dp", 1) * sizes.get("rp", 1)
    given = [((name, tx, stage, data * m), {"steps": steps, **options}) for name, tx, stage, m, options in cases]
    results = ranks.run(math.prod(sizes.values()), trained_whole, given, mesh=sizes, timeout_s=600)
    expected = []
    for (name, tx, _, m), options in given:
        same = {key: options[key] for key in ("dropout", "rows", "policy") if key in options}
        layers = options.get("sizes", {}).get("n_layers", 0)
        expected.append(serial(name, tx, m, **same, layers=layers, steps=steps))
    expect_one_process(results, expected, [(sizes, *case) for case in given])
