"""Weights of targets, a mask of numbers: loss and gradient as they are written out, on every mesh and in every form."""

import math

import pytest
import ranks
import torch
from close import assert_close
from zero_cases import FP64, batch_for, expect_one_process, model_of, packed_batch_for, train, trained_whole

import fzero
from fzero import models, random
from fzero.core import pytree
from fzero.kernels import cross_entropy as ce
from fzero.kernels import linear_cross_entropy as linear
from fzero.models import batch as batches
from fzero.models import by_position
from fzero.sharding import Context, Pipeline

F64, RATE = torch.float64, 2e-3
SUMS = {"rtol": 1e-10, "atol": 1e-10}


def weigh(batch):
    """The batch with weights from 0 to 2.5 in place of its mask."""
    g = torch.Generator().manual_seed(int(batch["tokens"].sum()))
    weights = 2.5 * torch.rand(batch["mask"].shape, generator=g, dtype=F64)
    return {**batch, "mask": torch.where(batch["mask"], weights, 0.0)}


def weighted_batch(step, rows, length=8):
    return weigh(batch_for(step, rows, length))


def weighted_documents(step, rows, length=8):
    return weigh(packed_batch_for(step, rows, length))


def written_out(model, params, batch):
    """(the loss, the sum of the weights, gradients): target by target, divided once."""
    params = pytree.map(lambda x: x.clone().requires_grad_(), params)
    log_p = models.logits(model, params, batch, models.Ctx(dtype=F64)).log_softmax(-1)
    total, weight = torch.zeros((), dtype=F64), 0.0
    for at in batch["mask"].nonzero().tolist():
        own = float(batch["mask"][tuple(at)])
        total, weight = total - own * log_p[(*at, int(batch["targets"][tuple(at)]))], weight + own
    loss, named = total / weight, pytree.named_leaves(params)
    return float(loss.detach()), weight, dict(zip(named, torch.autograd.grad(loss, list(named.values()))))


def one_step(name, batches=weighted_batch):
    """(loss, sum of weights, gradients) of a step on one process, and the same written out."""
    model = model_of(name, dropout=0.0)
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=FP64)
    before = pytree.named_leaves(fzero.init_state(model, fzero.optim.sgd(RATE), plan, seed=3).params)
    expected = written_out(model, pytree.nest(before), batches(0, 24))
    state, _, ((loss, weight, _),) = train(fzero.one_process(), name, "sgd", 0, 2, steps=1, batches=batches)
    after = pytree.named_leaves(state.params)
    return (loss, weight, {key: (leaf - after[key]) / RATE for key, leaf in before.items()}), expected


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.exhaustive)])
def test_a_step_is_what_is_written_out(name):
    found, expected = one_step(name)
    assert_close(found, expected, **SUMS)
    assert expected[1] != round(expected[1])


MISTAKES = {
    "weights that only say which targets count": lambda mask: (mask != 0).to(F64),
    "weights of another target": lambda mask: mask.roll(1),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, monkeypatch):
    for module in (ce, linear):
        monkeypatch.setattr(module, "weights_of", MISTAKES[mistake])
    with pytest.raises(AssertionError):
        assert_close(*one_step("gpt2"), **SUMS)


DOCUMENTS = {"batches": weighted_documents}
MESHES = {
    "dp2": ({"dp": 2}, [("llama", 3, {}), ("moe dropless", 0, {})]),
    "tp2": ({"tp": 2}, [("gpt2", 1, {"sequence": True}), ("llama", 3, {})]),
    "cp2": ({"cp": 2}, [("llama", 3, {"sequence": Context(pieces="zigzag")}), ("gpt2", 0, {})]),
    "pp2": ({"pp": 2}, [("llama", 3, {}), ("deepseek", 1, {}), ("llama", 1, {"pipeline": Pipeline()})]),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
def test_steps_equal_one_process(mesh):
    sizes, cases = MESHES[mesh]
    ours = [
        ((name, "small clipped adam", stage, 4), {**DOCUMENTS, "plan_options": plan, **more(name)})
        for name, stage, plan in cases
    ]
    expected = [
        (state, log)
        for name, _, _ in cases
        for state, _, log in [train(fzero.one_process(), name, "small clipped adam", 0, 4, **DOCUMENTS, **more(name))]
    ]
    found = ranks.run(math.prod(sizes.values()), trained_whole, ours, mesh=sizes, timeout_s=300)
    expect_one_process(found, expected, cases)


def more(name):
    """What a model has beside its own sizes: DeepSeek its second head."""
    return {"sizes": {"n_mtp": 1, "n_experts": 4, "n_groups": 2}} if name == "deepseek" else {}


FORMS = {"reference": {}, "chunked": {"compiled": False}, "triton": {}}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_multiplies(form, monkeypatch):
    """Of given logits and of a linear layer, in several chunks, with every term."""
    dtype = torch.float32 if form == "triton" else F64
    g = torch.Generator().manual_seed(1)
    x, w = (torch.randn(size, generator=g, dtype=F64).to(dtype) for size in ((9, 4), (8, 4)))
    targets, mask = torch.randint(0, 8, (9,), generator=g), 2.0 * torch.rand(9, generator=g, dtype=F64).to(dtype)
    mask[2], targets[5] = 0.0, -100
    terms = {"z_loss": 0.02, "smoothing": 0.2, "cap": 3.0}
    monkeypatch.setitem(linear.CHUNK_BYTES, "cpu", 4 * 8 * dtype.itemsize)
    options = {"impl": form, **FORMS[form], **terms}

    def of_linear(x, w):
        return linear.linear_cross_entropy(x, w, targets, mask, **options)

    def of_logits(x, w):
        return ce.cross_entropy(x @ w.T, targets, mask, **options)

    def plainly(x, w):
        return sum(float(mask[i]) * ce.reference(x[i : i + 1] @ w.T, targets[i : i + 1], **terms) for i in range(9))

    expected = (plainly(x.double(), w.double()), *torch.func.grad(plainly, argnums=(0, 1))(x.double(), w.double()))
    near = {"rtol": 2e-5, "atol": 2e-5} if form == "triton" else {"rtol": 1e-12, "atol": 1e-13}
    for f in (of_linear, of_logits):
        assert_close((f(x, w), *torch.func.grad(f, argnums=(0, 1))(x, w)), expected, **near)
    total, losses = linear.linear_cross_entropy(x, w, targets, mask, impl=form, **FORMS[form], per_token=True)
    assert_close(losses, linear.token_losses(x, w, targets, mask), rtol=1e-5, atol=1e-6)
    assert_close(losses.sum(), total, rtol=1e-5)


def test_weights_that_are_none_are_refused():
    batch = weighted_batch(0, 2)
    batch["mask"][1, 2] = -0.5
    with pytest.raises(ValueError, match=r"mask\[1, 2\] is -0.5; the weight of a target is 0 or more, and finite"):
        batches.check_tokens(batch, 20)
    with pytest.raises(ValueError, match="it must be bool, of the targets that count, or float32, their weights"):
        batches.check_batch(model_of("gpt2").config, {**batch, "mask": batch["mask"].long()})
    with pytest.raises(ValueError, match=r"dpo: batch\['mask'\] is torch.float64, the weights of targets"):
        models.dpo(model_of("gpt2")).head({}, torch.zeros(()), batch, models.Ctx())


def test_sums_by_position_and_by_source_have_the_weights():
    model, batch = by_position(model_of("gpt2", dropout=0.0)), weighted_batch(0, 2)
    batch["sources"] = torch.tensor([[True, False], [False, True]])
    params = models.init_params(model, random.key(0), F64)
    log_p = models.logits(model, params, batch, models.Ctx(dtype=F64)).log_softmax(-1)
    own = -log_p.gather(-1, batch["targets"].clamp(min=0)[..., None])[..., 0] * batch["mask"]
    found = models.loss(model, params, batch, models.Ctx(dtype=F64)).extra
    expected = {}
    for begin, end in ((0, 1), (1, 2), (2, 4), (4, 8)):
        expected |= {f"loss/{end}": own[:, begin:end].sum(), f"tokens/{end}": batch["mask"][:, begin:end].sum()}
    for row in range(2):
        expected |= {f"source_loss/{row}": own[row].sum(), f"source_tokens/{row}": batch["mask"][row].sum()}
    assert_close({name: found[name] for name in expected}, expected, **SUMS)
