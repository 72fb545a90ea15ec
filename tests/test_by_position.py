"""The loss by the position of a token in its document: by the definition, and the same on every mesh."""

import math

import pytest
import ranks
import torch
from close import assert_close
from zero_cases import FP64, batch_for, model_of, packed_batch_for

import fzero
from fzero import models
from fzero.models.preference import position_ranges
from fzero.run import from_table
from fzero.sharding import Context

ROWS, LENGTH = 24, 16
BATCHES = {"whole": batch_for, "documents": packed_batch_for}


def sums_on(mesh, cases):
    """Each case (model, stage, batch, options of the plan): the sums of an evaluation over all ranks."""
    out = []
    for name, stage, what, options in cases:
        model = models.by_position(model_of(name, max_len=LENGTH))
        plan = fzero.zero_plan(stage, model, mesh, policy=FP64, **options)
        state = fzero.init_state(model, fzero.optim.sgd(0.1), plan, seed=3)
        batch = fzero.local_batch(BATCHES[what](1, ROWS, LENGTH), mesh)
        found = fzero.make_eval_step(model, plan)(state.params, batch)
        sums = {"total": found.total, "num_tokens": found.num_tokens, **found.extra}
        out.append({key: float(value) for key, value in sums.items()})
    return out


def by_definition(name, what):
    """The same of all logits, one token after the other."""
    model, batch = model_of(name, max_len=LENGTH), BATCHES[what](1, ROWS, LENGTH)
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64)
    params = fzero.init_state(model, fzero.optim.sgd(0.1), plan, seed=3).params
    logits = models.logits(model, params, batch, models.Ctx(dtype=torch.float64)).log_softmax(-1)
    ends = (1, 2, 4, 8, 16)
    sums = {"total": 0.0, "num_tokens": 0.0, **{f"{of}/{end}": 0.0 for end in ends for of in ("loss", "tokens")}}
    for row in range(ROWS):
        place = 0
        for t in range(LENGTH):
            new = "documents" in batch and t and batch["documents"][row, t] != batch["documents"][row, t - 1]
            place = 0 if new or not t else place + 1
            if batch["mask"][row, t] and batch["targets"][row, t] >= 0:
                end = next(end for end in ends if place < end)
                sums[f"loss/{end}"] -= float(logits[row, t, batch["targets"][row, t]])
                sums[f"tokens/{end}"] += 1
    for key, of in (("total", "loss"), ("num_tokens", "tokens")):
        sums[key] = sum(sums[f"{of}/{end}"] for end in ends)
    return sums


@pytest.mark.parametrize("what", BATCHES)
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "gemma", "moe dropless"))]
)
def test_sums_are_by_the_definition(name, what):
    assert_close(
        sums_on(fzero.one_process(), [(name, 0, what, {})])[0], by_definition(name, what), rtol=1e-10, atol=1e-10
    )


CASES = {
    "dp2": ({"dp": 2}, [("llama", 3, "documents", {}), ("gpt2", 0, "whole", {})]),
    "tp2": ({"tp": 2}, [("gpt2", 0, "documents", {"sequence": True}), ("llama", 1, "whole", {})]),
    "pp2": ({"pp": 2}, [("llama", 3, "documents", {})]),
    "cp2": (
        {"cp": 2},
        [("llama", 0, "documents", {"sequence": Context(pieces=p)}) for p in ("zigzag", "contiguous")]
        + [("gpt2", 3, "whole", {})],
    ),
    "cp2 x tp2": ({"cp": 2, "tp": 2}, [("gpt2", 3, "documents", {"sequence": Context(over_tp=True)})]),
    "dp2 x cp2": ({"dp": 2, "cp": 2}, [("llama", 3, "documents", {})]),
    "cp4": (
        {"cp": 4},
        [
            (name, 3, "documents", {"sequence": Context(*form)})
            for name in ("gpt2", "moe dropless")
            for form in (("ring",), ("hierarchical",), ("gather", "balanced"), ("ulysses", "zigzag"))
        ],
    ),
}
LATER = {"cp2": [], "cp4": pytest.mark.exhaustive}


@pytest.mark.parametrize("mesh", [pytest.param(one, marks=LATER.get(one, pytest.mark.slow)) for one in CASES])
def test_sums_are_the_same_on_every_mesh(mesh):
    sizes, cases = CASES[mesh]
    alone = sums_on(fzero.one_process(), [(name, 0, what, {}) for name, _, what, _ in cases])
    for found in ranks.run(math.prod(sizes.values()), sums_on, cases, mesh=sizes):
        assert_close(found, alone, rtol=1e-10, atol=1e-10)


def test_ranges_are_powers_of_two_and_the_length():
    assert position_ranges(1) == (1,) and position_ranges(2) == (1, 2) and position_ranges(100)[-2:] == (64, 100)
    assert position_ranges(32768) == (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def test_refusals():
    with pytest.raises(ValueError, match="by_position: the model has a loss of its own, as a module and a head for"):
        models.by_position(model_of("llama")._replace(features=None))  # as of models.from_module
    with pytest.raises(ValueError, match="by_position: the model has a loss of its own, as a module and a head for"):
        models.by_position(models.reward(model_of("llama")))

    def init(make):
        return model_of("llama").init(
            lambda name, *leaf: make(name.replace("head/", "out/").replace("embed/", "in/"), *leaf)
        )

    with pytest.raises(ValueError, match="by_position: the model has no leaf head/w or embed/tokens, by which a head"):
        models.by_position(model_of("llama")._replace(init=init))
    with pytest.raises(ValueError, match=r"train.loss_by_position is true and the loss of objective=dpo is not of"):
        from_table({"objective": "dpo", "train": {"loss_by_position": True}})
