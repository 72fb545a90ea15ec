"""kernels=canonical: the log-prob of a token is one number, in every family: in a batch, alone, in a prefix, packed as
a document, by more threads, in training and from pages in chunks."""

import dataclasses
import functools
from unittest import mock

import pytest
import torch
from close import assert_same
from law_cases import config_of
from test_canonical_forms import BF16, DTYPES, one_thread, pytestmark  # noqa: F401

import fzero
from fzero import generate, models, optim, random
from fzero.core import CPU, precision
from fzero.kernels import Kernels, linear, rowwise
from fzero.models import forward
from fzero.run import from_table, resolve_auto

FAMILIES = ("gpt2", "llama", "gemma", "moe dropless", "gpt-oss", "deepseek", "mlp")
FAMILY = pytest.mark.parametrize("kind", FAMILIES)
CANONICAL = Kernels.parse("canonical")
V, ROWS, LENGTH = 97, 5, 39
CUTS = (7, LENGTH, 20, 1, 30)  # tokens of each row in a packed one


@functools.cache
def case(kind):
    """(model, parameters, tokens, targets) of a family; odd sizes, so that every loop has a tail."""
    sizes = {} if kind == "mlp" else {"dropout": 0.0}
    model = models.build(config_of(kind, vocab_size=V, max_len=128, d_model=24, **sizes))
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, V, (2, ROWS, LENGTH), generator=generator)
    return model, models.init_params(model, random.key(0)), tokens, targets


def losses_of(kind, tokens, targets, dtype, kernels=CANONICAL, **entries):
    """The cross entropy of each token, from the trainer's forward pass."""
    found, whole, (model, params, *_) = [], forward.linear_cross_entropy, case(kind)

    def noting(*args, **options):
        total, losses = whole(*args, per_token=True, **options)
        found.append(losses)
        return total

    with torch.no_grad(), mock.patch.object(forward, "linear_cross_entropy", noting):
        batch = {"tokens": tokens, "targets": targets, **entries}
        forward.loss(model, params, batch, models.Ctx(dtype=dtype, kernels=kernels))
    return found[0].reshape(tokens.shape)


@pytest.mark.each_value
@FAMILY
@DTYPES
def test_a_token_s_loss_is_one_number(kind, dtype):
    *_, tokens, targets = case(kind)
    whole = losses_of(kind, tokens, targets, dtype)
    close = losses_of(kind, tokens, targets, dtype, Kernels.parse("auto"))
    assert (whole - close).abs().median() < (1e-5 if dtype == torch.float32 else 0.1)  # a router may choose another
    for row in range(ROWS):
        assert_same(losses_of(kind, tokens[row, None], targets[row, None], dtype)[0], whole[row])
    for length in (1, 2, 33):
        assert_same(losses_of(kind, tokens[:, :length], targets[:, :length], dtype), whole[:, :length])
    spans = [(row, slice(count)) for row, count in enumerate(CUTS)]
    inputs, outputs, expected = (torch.cat([x[span] for span in spans])[None] for x in (tokens, targets, whole))
    documents = torch.cat([torch.full((count,), row) for row, count in enumerate(CUTS)])[None]
    torch.set_num_threads(2)
    assert_same(losses_of(kind, inputs, outputs, dtype, documents=documents), expected)
    assert_same(losses_of(kind, tokens, targets, dtype), whole)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("kind", FAMILIES[:-1])
@DTYPES
def test_a_sampler_has_the_trainer_s_bits(kind, dtype):
    """From pages, in chunks beside another request, the logits give the losses of the trainer."""
    model, params, tokens, targets = case(kind)
    whole = losses_of(kind, tokens[:2], targets[:2], dtype)
    policy = precision.bf16() if dtype == BF16 else precision.fp32()
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=policy)
    step = generate.make_step(model, plan, kernels="canonical")
    pages = generate.page_spec(model, plan, count=24, page_tokens=8).zeros()
    order = ([5, 2, 9, 0, 7], [1, 3, 11, 4, 6])
    bounds = ((0, 17, 18, 19, 30, LENGTH), (0, 3, 20, 21, 30, LENGTH))
    for chunk in range(5):
        spans = [(row, of[chunk], of[chunk + 1]) for row, of in enumerate(bounds)]
        rows = [(tokens[row, first:end].tolist(), first, order[row]) for row, first, end in spans]
        batch = generate.StepBatch.of_rows(rows, [end - first for _, first, end in spans], page_tokens=8)
        logits, pages = step(params, pages, batch)
        at_target = torch.cat([targets[row, first:end] for row, first, end in spans])
        losses = rowwise.log_sum_exp(logits, impl="canonical") - logits.gather(1, at_target[:, None])[:, 0]
        assert_same(losses, torch.cat([whole[row, first:end] for row, first, end in spans]))


def test_one_tile_of_another_order_is_found():
    """Planted: products of more than 32 rows add from the last number on."""
    *_, tokens, targets = case("llama")
    plain = linear.linear_product

    def planted(x, w):
        return plain(x.flip(-1), w.flip(0)) if len(x) > 32 else plain(x, w)

    with mock.patch.object(linear, "linear_product", planted):
        whole, alone = (losses_of("llama", tokens[:n], targets[:n], torch.float32)[0, :20] for n in (ROWS, 1))
        short = losses_of("llama", tokens[:1, :20], targets[:1, :20], torch.float32)[0]
    assert torch.equal(whole, alone) and not torch.equal(short, alone)


@pytest.mark.parametrize("kind", ["llama", pytest.param("deepseek", marks=pytest.mark.slow)])
def test_it_trains(kind):
    """Steps with canonical forms follow those with the reference's."""
    model, _, tokens, targets = case(kind)
    plan, tx = fzero.zero_plan(0, model, fzero.one_process()), optim.adamw(1e-3)
    losses = {}
    for name in ("canonical", "reference"):
        state = fzero.init_state(model, tx, plan, seed=0)
        step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(kernels=name))
        for _ in range(3):
            state, metrics = step(state, {"tokens": tokens, "targets": targets})
        losses[name] = float(metrics.loss)
    assert losses["canonical"] == pytest.approx(losses["reference"], rel=1e-5)


def test_compiled_blocks_are_refused_and_auto_leaves_them_out():
    with pytest.raises(ValueError, match="kernels=canonical: a compiled block, which rounds at other places, has no"):
        fzero.Execution(kernels="canonical", compiled=True)
    config = from_table({"train": {"kernels": "canonical"}})
    assert resolve_auto(config, CPU, compiled=True).train.compiled is False


REFUSED = {
    "an MLP in parts": ("llama", {"mlp_tiles": 2}, {}),
    "a mixture with capacity_factor": ("moe capacity", {}, {}),
    "float8_linear": ("llama", {}, {"matmul": "float8_tensorwise"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_canonical_form_is_refused(name):
    kind, changes, options = REFUSED[name]
    config = dataclasses.replace(config_of(kind, dropout=0.0), **changes)
    model = models.build(config)
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"kernels=canonical: {name}"):
        models.loss(
            model,
            models.init_params(model, random.key(0)),
            {"tokens": tokens, "targets": tokens},
            models.Ctx(kernels=CANONICAL, **options),
        )
