"""Targets that do not count, and tokens that no vocabulary has: the same rule in every form, model and step."""

import kernel_laws as laws
import pytest
import torch
from close import assert_close, assert_same
from law_cases import FP64, case_of

import fzero
from fzero import models, optim
from fzero.kernels import check_targets, linear_cross_entropy
from fzero.kernels.cross_entropy import cross_entropy

N, D, V = 12, 4, 16
FORMS = {
    "reference": {"impl": "reference"},
    "triton": {"impl": "triton"},
    "torch": {"impl": "chunked", "compiled": False},
    "C++": {"impl": "chunked", "compiled": True},
}
OPERATIONS = {"cross_entropy": ((N, V),), "linear_cross_entropy": ((N, D), (V, D))}
every_form = pytest.mark.parametrize("form", FORMS)
every_operation = pytest.mark.parametrize("operation", OPERATIONS)


def loss_and_gradients(operation, form, targets, mask=None):
    op = {"cross_entropy": cross_entropy, "linear_cross_entropy": linear_cross_entropy.linear_cross_entropy}[operation]
    given = laws.draw(*OPERATIONS[operation], dtype=torch.float32)
    f = lambda *given: op(*given, targets, mask, **FORMS[form], smoothing=0.1, z_loss=0.01)  # noqa: E731
    return torch.func.grad_and_value(f, tuple(range(len(given))))(*given)


@every_form
@every_operation
def test_a_negative_target_is_masked(operation, form):
    negative = torch.tensor([-100, -1, -2, -(2**40)] * (N // 4)).to(laws.DEVICE)
    g = torch.Generator().manual_seed(1)
    targets, counts = torch.randint(0, V, (N,), generator=g).to(laws.DEVICE), (torch.arange(N) % 3 > 0).to(laws.DEVICE)
    marked = torch.where(counts, targets, negative)
    expected = loss_and_gradients(operation, form, targets, counts)
    assert_same(loss_and_gradients(operation, form, marked), expected)
    assert_same(loss_and_gradients(operation, form, marked, counts | (torch.arange(N) < 6).to(laws.DEVICE)), expected)
    _, none = loss_and_gradients(operation, form, negative)
    assert float(none) == 0.0 and float(expected[1]) > 1.0


@every_form
@every_operation
def test_a_target_beyond_the_vocabulary_is_nan_and_named_on_request(operation, form):
    targets = (torch.arange(N) % V).to(laws.DEVICE)
    targets[7] = V
    _, loss = loss_and_gradients(operation, form, targets)
    assert bool(loss.isnan())
    with pytest.raises(ValueError, match=r"^targets\[7\] is 16; a target is in 0\.\.15, or negative"):
        check_targets(targets, V)
    counts = torch.arange(N).to(laws.DEVICE) != 7
    check_targets(targets, V, counts)
    assert bool(loss_and_gradients(operation, form, targets, counts)[1].isfinite())


def step_of(name):
    case = case_of(name)
    plan, tx = fzero.zero_plan(0, case.loss_fn, fzero.one_process(), policy=FP64), optim.sgd(0.3)
    return (
        fzero.make_train_step(case.loss_fn, tx, plan, micro_batches=2),
        fzero.make_eval_step(case.loss_fn, plan),
        fzero.init_state(case.loss_fn, tx, plan, seed=0),
        case.loss_fn.config.vocab_size,
    )


MODELS = ("gpt2", "llama", "moe dropless", "mlp")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_s_step_masks_negative_targets(name):
    step, evaluate, state, v = step_of(name)
    g = torch.Generator().manual_seed(2)
    tokens, targets = (torch.randint(0, v, (4, 8), generator=g) for _ in range(2))
    counts = torch.rand(4, 8, generator=g) < 0.5
    by_mask = {"tokens": tokens, "targets": targets, "mask": counts}
    by_targets = {"tokens": tokens, "targets": torch.where(counts, targets, -100)}
    expected = evaluate(state.params, by_mask)
    assert int(expected.num_tokens) == int(counts.sum())
    assert_same(evaluate(state.params, by_targets), expected)
    copy = fzero.pytree.map(torch.clone, state)
    (one, metrics), (other, same) = step(state, by_mask), step(copy, by_targets)
    assert_same((other, same), (one, metrics))
    # No token counts: nothing moves but what moves without one (a balance loss is weighted by tokens too).
    nobody = {"tokens": tokens, "targets": torch.full_like(targets, -100)}
    before = fzero.pytree.map(torch.clone, other.params)
    after, metrics = step(other, nobody)
    assert int(metrics.num_tokens) == 0 and float(metrics.loss) == 0.0
    assert_close(after.params, before, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", ("gpt2", "mlp"))
@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("targets", "V", r"targets\[2, 3\] is {v}; a target is in 0\.\.{last}"),
        ("tokens", "V", r"tokens\[2, 3\] is {v}; a token is in 0\.\.{last}$"),
        ("tokens", -1, r"tokens\[2, 3\] is -1; a token is in 0\.\.{last}$"),
    ],
)
def test_the_first_step_and_the_first_evaluation_name_what_no_vocabulary_has(name, key, value, match):
    step, evaluate, state, v = step_of(name)
    batch = {"tokens": torch.zeros(4, 8, dtype=torch.int64), "targets": torch.zeros(4, 8, dtype=torch.int64)}
    wrong = torch.tensor(v if value == "V" else value)
    batch[key] = batch[key].index_put((torch.tensor([2, 3]), torch.tensor([3, 0])), wrong)
    match = match.format(v=v, last=v - 1)
    for call in (lambda: step(state, batch), lambda: evaluate(state.params, batch)):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(ValueError, match=match):
        models.check_tokens(batch, v)


def test_a_mask_of_integers_is_refused():
    step, _, state, _ = step_of("gpt2")
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"mask'\] is torch.int64; it must be bool, of the targets that count"):
        step(state, {"tokens": tokens, "targets": tokens, "mask": torch.ones_like(tokens)})
