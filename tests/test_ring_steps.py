"""Steps over cp whose attention goes around a ring, or whose blocks the batch chooses: equal to one process."""

import itertools

import pytest
from test_context import CASES, MESHES, equals_one_process, options_of

# T = 8: over cp4 a balanced block is one token. gpt2 has learned positions and dropout, gemma windows, capped scores,
# layers that take turns, llama fewer key/value heads.
FEW = {
    "cp2": [("gpt2", "sgd", 3, 2, "documents", {**options_of("ring"), "dropout": 0.1})],
    "cp2, more models": [
        ("llama", "clipped adam", 0, 1, "documents", options_of("ring", "zigzag")),
        ("gemma", "adam", 1, 1, "documents", {**options_of("ring"), "remat": "full"}),
        ("deepseek", "adam", 3, 1, "documents", options_of("hierarchical")),
        ("gpt2", "adam", 2, 1, "documents", {**options_of("gather", "balanced"), "dropout": 0.1}),
    ],
    "cp2, sinks": [("gpt-oss", "adam", 1, 1, "documents", options_of("ring"))],
    "cp4": [
        ("gpt-oss", "adam", 1, 1, "documents", options_of("hierarchical")),
        ("llama", "adam", 3, 2, "documents", options_of("hierarchical")),
        ("llama", "sgd", 0, 1, "window", options_of("ring", "contiguous")),
    ],
    "dp2 x cp2": [("llama", "clipped adam", 3, 2, "documents", options_of("ring"))],
    "cp2 x tp2": [("gpt2", "sgd", 3, 2, "documents", {**options_of("ring", over_tp=True), "dropout": 0.1})],
    "pp2 x cp2": [("gpt2", "adam", 3, 2, "documents", {**options_of("ring"), "dropout": 0.1})],
}


@pytest.mark.parametrize(
    "cases", [pytest.param(one, marks=pytest.mark.slow if one == "cp2" else pytest.mark.exhaustive) for one in FEW]
)
def test_steps_with_a_ring_equal_one_process(cases):
    equals_one_process(cases.partition(",")[0], FEW[cases])


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", ("ring", "hierarchical", "gather"))
def test_every_product_equals_one_process(mesh, form, what):
    pieces = ("balanced",) if form == "gather" else ("contiguous", "zigzag", "balanced")
    product = itertools.product((("sgd", 0), ("clipped adam", 3)), pieces)
    over_tp = mesh == "cp2 x tp2"
    cases = [("llama", tx, stage, 2, what, options_of(form, one, over_tp)) for (tx, stage), one in product]
    equals_one_process(mesh, cases)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ("ring", "hierarchical", "gather"))
def test_one_compiled_program_serves_every_choice_of_blocks(form):
    """Batches whose documents, and so whose blocks, differ from step to step."""
    more = {"compiled": True, "dropout": 0.1}
    equals_one_process("cp2", [("gpt2", "adam", 3, 1, "documents", {**options_of(form, "balanced"), **more})], steps=3)
