"""Parallel equals serial: k steps of any stage, mesh, micro-batches and recomputation are those of one process."""

import functools
import itertools
import math

import pytest
import ranks
from close import assert_close
from zero_cases import MODELS, OPTIMIZERS, expect_one_process, train, trained_whole

import fzero

STEPS = 2  # the second has moments of the first
MESHES = {
    "dp2": ({"dp": 2}, {}),
    "dp4": ({"dp": 4}, {}),
    "dp2 x rp2": ({"dp": 2, "rp": 2}, {}),
    "dp2 x tp2": ({"dp": 2, "tp": 2}, {}),
    "tp4": ({"tp": 4}, {}),
    "tp2 sequence": ({"tp": 2}, {"sequence": True}),
    "dp2 x tp2 sequence": ({"dp": 2, "tp": 2}, {"sequence": True}),
}


@functools.cache
def serial(name, optimizer, micro_batches):
    state, _, log = train(fzero.one_process(), name, optimizer, 0, micro_batches, steps=STEPS)
    return state, log


EVERYTHING = [
    (*case, stage) for case in itertools.product(("sgd", "adam"), (1, 3), ("none", "full")) for stage in (0, 1, 2, 3)
]
# Every pair of values of optimizer, micro-batches, recomputation and stage occurs in one of these.
PAIRS = [
    ("sgd", 1, "none", 0), ("adam", 3, "full", 0),
    ("sgd", 3, "none", 1), ("adam", 1, "full", 1),
    ("sgd", 1, "full", 2), ("adam", 3, "none", 2),
    ("sgd", 3, "full", 3), ("adam", 1, "none", 3),
]  # fmt: skip


RARE = {
    "dp2 x tp2 sequence",
    "tp4",
    *(("moe dropless", mesh) for mesh in ("tp2 sequence", "dp4", "dp2 x rp2")),
    *(("gpt2", mesh) for mesh in ("dp2", "dp4", "dp2 x rp2")),
}
SLOW = {
    *((name, mesh) for name in ("gpt2", "moe dropless") for mesh in ("tp2", "dp2 x tp2")),
    *(("llama", mesh) for mesh in ("dp2", "dp4", "tp2 sequence")),
    ("gpt2", "tp2 sequence"),
}
REST = ((pytest.mark.exhaustive, RARE), (pytest.mark.slow, SLOW))


@pytest.mark.parametrize(
    "chosen", (pytest.param(EVERYTHING, id="everything", marks=pytest.mark.exhaustive), pytest.param(PAIRS, id="pairs"))
)
@pytest.mark.parametrize(
    "name, mesh",
    [
        # The slowest of those whose parts other cases have are not run every time: every model occurs.
        pytest.param(name, mesh, marks=[marks for marks, rare in REST if mesh in rare or (name, mesh) in rare])
        for name in ("gpt2", "llama", "moe dropless")
        for mesh in MESHES
    ],
)
def test_parallel_is_serial(name, mesh, chosen):
    sizes, plan_options = MESHES[mesh]
    data = sizes.get("dp", 1) * sizes.get("rp", 1)
    cases = [
        ((name, tx, stage, data * m), {"plan_options": plan_options, "remat": remat, "steps": STEPS})
        for tx, m, remat, stage in chosen
    ]
    results = ranks.run(math.prod(sizes.values()), trained_whole, cases, mesh=sizes, timeout_s=300)
    expected = [serial(name, tx, m) for (name, tx, _, m), _ in cases]
    expect_one_process(results, expected, [(mesh, *case) for case in cases])


# Where experts have a capacity, what a row gives depends on the others of its micro-batch. Muon makes small singular
# values of an update as large as the others, with what rounding is in them.
SMALLER = {"small sgd", "small clipped adam"}  # rates, which multiply rounding less than those of the others


@pytest.mark.parametrize(
    "optimizers",
    [
        pytest.param(sorted(OPTIMIZERS.keys() - {"muon"} - SMALLER), id="largest rates", marks=pytest.mark.slow),
        pytest.param(sorted(SMALLER), id="smaller rates", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("name", [*sorted(MODELS.keys() - {"moe capacity"}), "qlora", "lora"])
def test_cases_do_not_amplify_rounding(name, optimizers):
    """Sums in another order differ by a tenth of the tolerance that parallel steps have, after the most steps that a
    case takes: on another processor as on this one, a case that fails has a mistake."""
    for optimizer in optimizers:
        one, four = (train(fzero.one_process(), name, optimizer, 0, m, steps=5)[0].params for m in (1, 4))
        assert_close(four, one, rtol=1e-11, atol=1e-11)
