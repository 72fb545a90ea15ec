"""Layer inputs that remat keeps, cut over tp: the bits of whole ones, a part of the bytes, and what is refused."""

import json
import math

import pytest
import ranks
from close import assert_same
from zero_cases import model_of, trained_whole

import fzero
from fzero import models
from fzero.sharding import PartitionedActivations, prefetch

PART = {"partition_activations": True}
# The sizes of the mesh: (family, optimizer, stage, options).
MESHES = {
    "tp2": [("gpt2", "adam", 0, {"remat": "full"})],
    "tp2 ": [("moe dropless", "adam", 0, {"remat": "every:2"})],
    "tp3": [
        ("gpt2", "sgd", 1, {"remat": "full", "sizes": {"d_model": 24, "n_heads": 12, "d_ff": 24, "vocab_size": 24}})
    ],
    "dp2 tp2": [("llama", "clipped adam", 3, {"remat": "full"}), ("llama", "adam", 2, {"remat": "every:2"})],
    "pp2 tp2": [("gpt2", "adam", 1, {"remat": "full"})],
    "cp2 tp2": [("llama", "adam", 1, {"remat": "full", "plan_options": {"sequence": False}})],
}


def with_parts(mesh, case, options):
    """(whole state and metrics, (bytes that the stacks are given, those that they keep)) of steps with parts."""
    given, kept, append = [], [], PartitionedActivations.append

    def count(stack, tensors):
        append(stack, tensors)
        given.append(sum(x.nbytes for x in tensors))
        kept.append(sum(x.untyped_storage().nbytes() for x in stack.stack[-1]))

    PartitionedActivations.append = count
    try:
        (trained,) = trained_whole(mesh, [((*case, 4), {**options, **PART})])
    finally:
        PartitionedActivations.append = append
    return trained, (sum(given), sum(kept))


def both(mesh, cases):
    """[(whole state, metrics)] with whole layer inputs, and `with_parts` of each case."""
    usual, prefetch.SMALL = prefetch.SMALL, 8
    try:
        whole = trained_whole(mesh, [((*case[:3], 4), case[3]) for case in cases])
        return whole, [with_parts(mesh, case[:3], case[3]) for case in cases]
    finally:
        prefetch.SMALL = usual


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[pytest.mark.slow] * (m != "tp2")) for m in MESHES])
def test_parts_have_the_bits_of_whole_inputs_and_a_share_of_their_bytes(mesh):
    sizes, cases = {axis[:2]: int(axis[2:]) for axis in mesh.split()}, MESHES[mesh]
    for whole, parts in ranks.run(math.prod(sizes.values()), both, cases, mesh=sizes, timeout_s=300):
        for (expected, expected_log), ((state, log), (given, bytes_kept)) in zip(whole, parts):
            assert log == expected_log
            assert_same(state, expected)
            assert given > 0 and given / sizes["tp"] <= bytes_kept < given / sizes["tp"] * 1.1


REFUSED = {
    "no tp": ({"dp": 2}, {}, {"remat": "full"}, "a plan with tp=1; leave it out"),
    "sequence": ({"tp": 2}, {"sequence": True}, {"remat": "full"}, "a plan with sequence parallelism, which cuts them"),
    "nothing kept": ({"tp": 2}, {}, {"remat": "none"}, 'remat is none; use remat="full"'),
}


@pytest.mark.parametrize("sizes, plan, options, message", REFUSED.values(), ids=REFUSED)
def test_where_no_rank_has_the_same_inputs_it_is_refused(sizes, plan, options, message):
    model = model_of("gpt2")
    with pytest.raises(ValueError, match=message):
        execution = fzero.Execution(**options, **PART)
        plan = fzero.zero_plan(0, model, fzero.fake_mesh(sizes), **plan)
        fzero.make_train_step(model, fzero.optim.sgd(0.1), plan, execution=execution)


@pytest.mark.slow
def test_a_plan_counts_a_part(fz):
    args = ["plan", "--model", "llama-tiny", "--set", "model.n_layers=12", "--mesh", "tp=4", "--remat", "full", "--gpu",
            "h100", "--seq-len", 512, "--batch", 8, "--micro-batch", 8, "--precision", "bf16", "--no-cache", "--json",
            "--set", "train.compiled=false"]  # fmt: skip
    whole, parts = (json.loads(fz(*args, *more)[1]) for more in ((), ("--set", "partition_activations=true")))
    layers, size = 12, 8 * 512 * models.preset("llama-tiny").d_model * 2  # bytes of a layer's input
    sent, peak = ([plan[key] for plan in (whole, parts)] for key in ("comm_bytes_per_axis", "peak_bytes_per_rank"))
    assert sent[1]["tp"] - sent[0]["tp"] == layers * size * 3 // 4
    # Of twelve inputs three are kept, and the one in use and the next one are whole; sums of gradients move the peak.
    assert 4 * size < peak[0] - peak[1] <= 9 * size
