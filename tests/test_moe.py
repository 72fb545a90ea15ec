"""Mixture of experts: routing, dropless and capacity, against a loop over tokens."""

import math

import pytest
import torch
from close import assert_close, assert_same

from fzero.kernels import moe

F64 = torch.float64
B, T, D, F, E, K = 2, 9, 4, 8, 3, 2


def inputs(dtype=F64, b=B, t=T, d=D, f=F, e=E, k=K, seed=2):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=F64).to(dtype)

    p = {"w_gate": draw(e, d, f), "w_up": draw(e, d, f), "w_down": draw(e, f, d)}
    ids, weights, _ = moe.route(draw(b, t, e), k)
    return p, draw(b, t, d), ids, weights.to(dtype)


def expert(p, e, x):
    gate = x @ p["w_gate"][e]
    return (gate / (1.0 + torch.exp(-gate)) * (x @ p["w_up"][e])) @ p["w_down"][e]


def by_hand(p, x, ids, weights, kept=None):
    """The sum over a token's choices; `kept(b, t, k)` says which of them found room."""
    rows = []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            choices = [k for k in range(ids.shape[2]) if kept is None or kept(b, t, k)]
            rows.append(
                sum(
                    (weights[b, t, k] * expert(p, int(ids[b, t, k]), x[b, t]) for k in choices),
                    torch.zeros_like(x[b, t]),
                )
            )
    return torch.stack(rows).reshape(x.shape)


def value_and_grads(form, p, x, ids, weights):
    leaves = {
        **{n: w.clone().requires_grad_() for n, w in p.items()},
        "x": x.clone().requires_grad_(),
        "weights": weights.clone().requires_grad_(),
    }
    out = form({n: leaves[n] for n in p}, leaves["x"], ids, leaves["weights"])
    (out * torch.cos(torch.arange(out.numel(), dtype=F64)).reshape(out.shape).to(out.dtype)).sum().backward()
    return {"out": out.detach(), **{n: leaf.grad for n, leaf in leaves.items()}}


def test_route_takes_the_largest_probabilities_and_divides_by_their_sum():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, -1.0, 4.0, 0.0]], dtype=F64)
    ids, weights, probabilities = moe.route(logits, 2)
    assert ids.tolist() == [[1, 3], [0, 2]] and ids.dtype == torch.int64
    e = math.exp(1.0)
    assert_close(weights, torch.tensor([[e / (1 + e), 1 / (1 + e)]] * 2, dtype=F64), rtol=1e-14)
    assert_close(probabilities.sum(-1), torch.ones(2, dtype=F64), rtol=1e-14)
    assert_close(probabilities[0], torch.exp(logits[0]) / torch.exp(logits[0]).sum(), rtol=1e-14)
    assert moe.route(logits.to(torch.bfloat16), 1)[1].dtype == torch.float32


def test_grouped_mm_is_a_product_per_group():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(7, 4, generator=generator, dtype=F64), torch.randn(4, 4, 8, generator=generator, dtype=F64)
    for ends in ([2, 2, 5, 7], [0, 0, 0, 7], [7, 7, 7, 7], [1, 3, 6, 7]):
        starts = [0, *ends[:-1]]
        expected = torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(zip(starts, ends))])
        ends = torch.tensor(ends, dtype=torch.int32)
        assert_close(moe.grouped_mm(x, w, ends), expected, rtol=1e-13, atol=1e-15)
        assert_close(moe.grouped_mm(x.float(), w.float(), ends), expected, rtol=1e-5, atol=1e-6)


def test_dropless_is_the_sum_over_choices():
    args = inputs()
    assert_close(value_and_grads(moe.dropless, *args), value_and_grads(by_hand, *args), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "sizes",
    (
        {},
        {"d": 8, "f": 16},
        {"f": 12},
        {"d": 5, "f": 7},
        {"e": 7, "t": 2, "f": 8},
        {"b": 1, "t": 1, "f": 8},
        {"f": 8, "k": 1},
        {"f": 8, "k": 3},
    ),
    ids=str,
)
def test_the_grouped_product_equals_the_masked_one(sizes):
    args = inputs(**sizes)
    exact = value_and_grads(moe.dropless, *args)
    p, x, ids, weights = args
    single = value_and_grads(moe.dropless, {n: w.float() for n, w in p.items()}, x.float(), ids, weights.float())
    assert all(g.dtype == torch.float32 for g in single.values())
    assert_close(single, exact, rtol=1e-4, atol=1e-5)


def test_an_expert_without_tokens_has_a_gradient_of_zero():
    p, x, _, weights = inputs()
    ids = torch.zeros(B, T, K, dtype=torch.int64)
    ids[..., 1] = 2
    for dtype in (F64, torch.float32):
        grads = value_and_grads(
            moe.dropless, {n: w.to(dtype) for n, w in p.items()}, x.to(dtype), ids, weights.to(dtype)
        )
        for name in p:
            assert float(grads[name][1].abs().max()) == 0.0, name
            assert float(grads[name][0].abs().min()) > 0.0 and float(grads[name][2].abs().min()) > 0.0, name


def test_capacity_with_room_for_all_is_dropless():
    args = inputs()
    roomy = value_and_grads(lambda *a: moe.capacity(*a, factor=float(E)), *args)
    assert_close(roomy, value_and_grads(moe.dropless, *args), rtol=1e-11, atol=1e-13)


def test_capacity_drops_later_tokens_and_second_choices_first():
    p, x, _, weights = inputs(b=1, t=4)
    # Room for ceil(0.75 4 2 / 3) = 2 a sequence. Expert 0: first choices of tokens 0, 2, 3; expert 1: first of 1, then
    # second of 0, 2.
    ids = torch.tensor([[[0, 1], [1, 2], [0, 1], [0, 2]]])
    kept = {
        (0, 0): True,
        (2, 0): True,
        (3, 0): False,
        (1, 0): True,
        (0, 1): True,
        (2, 1): False,
        (1, 1): True,
        (3, 1): True,
    }
    expected = value_and_grads(lambda *a: by_hand(*a, kept=lambda b, t, k: kept[t, k]), p, x, ids, weights)
    got = value_and_grads(lambda *a: moe.capacity(*a, factor=0.75), p, x, ids, weights)
    assert_close(got, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("factor", (0.4, 0.75, 1.0, 1.25))
def test_capacity_against_a_literal_queue(factor):
    args = inputs(t=13)
    ids = args[2]
    room, kept = math.ceil(factor * 13 * K / E), {}
    for b in range(B):
        held = [0] * E
        for k in range(K):
            for t in range(13):
                e = int(ids[b, t, k])
                kept[b, t, k] = held[e] < room
                held[e] += kept[b, t, k]
    assert factor > 1.0 or not all(kept.values())
    got = value_and_grads(lambda *a: moe.capacity(*a, factor=factor), *args)
    expected = value_and_grads(lambda *a: by_hand(*a, kept=lambda *at: kept[at]), *args)
    assert_close(got, expected, rtol=1e-11, atol=1e-13)


def test_capacity_counts_each_sequence_by_itself():
    args = inputs()
    whole = moe.capacity(*args, factor=0.6)
    p, *rest = args
    alone = torch.cat([moe.capacity(p, *(t[b : b + 1] for t in rest), factor=0.6) for b in range(B)])
    assert_close(whole, alone, rtol=1e-13, atol=1e-15)


def test_dropless_follows_a_permutation_of_the_tokens():
    p, x, ids, weights = inputs()
    order = torch.tensor([3, 0, 8, 1, 7, 2, 5, 4, 6])
    out = moe.dropless(p, x, ids, weights)
    assert_close(moe.dropless(p, x[:, order], ids[:, order], weights[:, order]), out[:, order], rtol=1e-13, atol=1e-15)
    # So does capacity where nothing is dropped, and the number of an expert means nothing.
    full = moe.capacity(p, x[:, order], ids[:, order], weights[:, order], factor=3.0)
    assert_close(full, out[:, order], rtol=1e-12, atol=1e-14)
    swap = torch.tensor([2, 0, 1])
    renamed = {n: w[swap] for n, w in p.items()}
    assert_close(moe.dropless(renamed, x, torch.argsort(swap)[ids], weights), out, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("form", (moe.dropless, lambda *a: moe.capacity(*a, factor=0.75)), ids=("dropless", "capacity"))
def test_every_transform(form):
    for dtype in (F64, torch.float32):
        p, x, ids, weights = inputs(dtype)

        def loss(p, x, ids=ids, weights=weights):
            return (form(p, x, ids, weights) ** 2).sum()

        rtol = 1e-11 if dtype == F64 else 2e-4
        grads = torch.func.grad(loss, argnums=(0, 1))(p, x)
        per_row = torch.vmap(torch.func.grad(lambda p, *row: loss(p, *(r[None] for r in row))), (None, 0, 0, 0))(
            p, x, ids, weights
        )
        assert_close({n: g.sum(0) for n, g in per_row.items()}, grads[0], rtol=rtol, atol=rtol / 10)
        tangents = {n: torch.cos(w) for n, w in p.items()}, torch.sin(x)
        _, slope = torch.func.jvp(loss, (p, x), tangents)
        expected = sum(
            (g * t).sum() for g, t in zip([*grads[0].values(), grads[1]], [*tangents[0].values(), tangents[1]])
        )
        assert_close(slope, expected, rtol=rtol)
        outer = torch.func.grad(lambda x: (torch.func.grad(loss)(p, x)["w_up"] ** 2).sum())(x)  # noqa: B023
        assert outer.dtype == dtype and bool(outer.isfinite().all()) and float(outer.abs().max()) > 0.0


def test_a_second_run_gives_the_same_bits():
    args = inputs(torch.float32)
    assert_same(value_and_grads(moe.dropless, *args), value_and_grads(moe.dropless, *args))
