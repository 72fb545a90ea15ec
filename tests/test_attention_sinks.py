"""Attention sinks: the definition is the formula, and every form of attention, at positions and over a ring too, has
its outputs and gradients."""

import functools
import math

import kernel_laws as laws
import pytest
import ranks
import torch
from close import assert_close
from test_attention_at import FORMS, attention_at, on_device, places, small_tiles  # noqa: F401  (a fixture)
from test_attention_at import reference as reference_at
from test_ring import CHOICES, H, by_rank, documents_of, placed, tensors_of

import fzero
from fzero.kernels import FULL, Pattern, ring_attention
from fzero.kernels import attention as attn

F64 = torch.float64
SINKS = torch.tensor([-2.0, 0.5, 1.5, 4.0], dtype=F64)
PATTERNS = (FULL, Pattern("window", 5))


def given(t=7, k=6, b=2, s=None):
    """q, k, v and the sinks of four heads in two groups."""
    return [*laws.draw((b, t, 4, k), (b, s or t, 2, k), (b, s or t, 2, k), device="cpu"), SINKS]


def by(form, **options):
    return lambda q, k, v, sinks: form(q, k, v, sinks=sinks, **options)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_reference_is_the_formula(pattern):
    q, k, v, sinks = given()
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            for h in range(4):
                seen = [s for s in range(t + 1) if pattern.visible(torch.tensor(t), torch.tensor(s))]
                weights = [math.exp(0.3 * float(q[b, t, h] @ k[b, s, h // 2])) for s in seen]
                total = math.exp(float(sinks[h])) + sum(weights)
                out[b, t, h] = sum(w / total * v[b, s, h // 2] for w, s in zip(weights, seen))
    assert_close(attn.reference(q, k, v, pattern=pattern, scale=0.3, sinks=sinks), out, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", ("blocked", *FORMS[1:]))
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_form_is_the_reference(form, pattern):
    tensors = given(150)
    documents = (torch.arange(150) // 47).expand(2, -1)
    for options in ({}, {"documents": documents, "scale": 0.3}):
        want = laws.both_passes(by(attn.reference, pattern=pattern, **options), tensors)
        got = laws.both_passes(by(attn.attention, impl=form, pattern=pattern, **options), tensors)
        assert_close(list(got), list(want), rtol=1e-10, atol=1e-12)


def test_tritons_numbers(small_tiles):  # noqa: F811  (the fixture)
    documents = (torch.arange(40, device=laws.DEVICE) // 17).expand(2, -1)
    f = lambda impl, *x: by(attn.attention, impl=impl, documents=documents)(*x)  # noqa: E731
    laws.numbers(f, on_device(*given(40, 16)), torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_at_positions_also_a_query_that_sees_nothing(form):
    tensors = given(70, s=90)
    query, key, mine, theirs = places(2, 70, 90, 30)
    theirs[0], mine[0, 0] = theirs[0].clamp(min=1), 0
    at = {"query": query, "key": key, "query_documents": mine, "key_documents": theirs}
    want = laws.both_passes(by(functools.partial(reference_at, **at)), tensors)
    got = laws.both_passes(by(functools.partial(attention_at, impl=form, **at)), tensors)
    assert not want[0][0][0, 0].any()
    assert_close(list(got), list(want), rtol=1e-10, atol=1e-12)


OF_HEADS = torch.linspace(-2.0, 3.0, H, dtype=F64)


def local(mesh, pieces, inner, documents):
    axis, positions = mesh["cp"], by_rank(pieces, 64)
    *own, g = (x[:, positions[axis.rank]] for x in tensors_of(64))
    leaves = [x.clone().requires_grad_() for x in (*own, OF_HEADS)]
    out = ring_attention(*leaves[:3], axis, positions, documents=documents, inner=inner, sinks=leaves[3])
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


@pytest.mark.parametrize(
    "n, inner", [pytest.param(n, i, marks=[pytest.mark.exhaustive] * (i != 2)) for n, i in ((4, 1), (4, 2), (4, 4))]
)
def test_over_a_ring_a_rank_has_its_part_of_the_sinks_gradient(n, inner):
    documents, pieces = documents_of(64), CHOICES["zigzag"](n)
    *tensors, g = tensors_of(64)
    leaves = [x.requires_grad_() for x in (*tensors, OF_HEADS.clone())]
    out = attn.reference(*leaves[:3], documents=documents, sinks=leaves[3])
    *want, of_sinks = [out.detach(), *torch.autograd.grad(out, leaves, g)]
    results = ranks.run(n, local, pieces, inner, documents, mesh={"cp": n})
    assert_close(placed([r[:-1] for r in results], pieces, 64), want, rtol=1e-10, atol=1e-12)
    assert_close(sum(r[-1] for r in results), of_sinks, rtol=1e-10, atol=1e-12)


def test_the_ends():
    """A sink of minus infinity is none, one far above every score takes all."""
    q, k, v, _ = given(9)
    none = attn.attention(q, k, v, sinks=torch.full((4,), -math.inf, dtype=F64))
    assert_close(none, attn.attention(q, k, v), rtol=1e-12, atol=1e-14)
    assert not attn.attention(q, k, v, sinks=torch.full((4,), 1e4, dtype=F64)).any()


def test_a_ring_refuses_what_does_not_fit():
    q, k, v, sinks = given(6)
    run = functools.partial(ring_attention, q, k, v, fzero.one_process()["cp"], torch.arange(6)[None])
    assert_close(run(sinks=sinks), attn.reference(q, k, v, sinks=sinks), rtol=1e-12, atol=1e-14)
    for options, said in (
        ({"sinks": sinks[:3]}, r"sinks are torch.float64 \[3\]; give one of each head of q, floating \[4\]"),
        ({"sinks": sinks.repeat(2)}, r"sinks are torch.float64 \[8\]"),
        ({"documents": torch.zeros(2, 5)}, r"documents are torch.float32 \[2, 5\]; give .* whole numbers, \[2, 6\]"),
        ({"cap": -1.0}, "cap is -1.0"),
        ({"pattern": "full"}, "pattern is 'full'"),
    ):
        with pytest.raises(ValueError, match=f"^attention: {said}"):
            run(**options)


def test_every_transform():
    q, k, v, sinks = given(6, 3)

    def uses(form):
        f = lambda q, s: (form(q, k, v, sinks=s) ** 3).sum()  # noqa: E731
        grad = torch.func.grad(f, argnums=(0, 1))
        return {
            "grad": grad(q, sinks),
            "per example": torch.vmap(lambda q, k, v: by(form)(q[None], k[None], v[None], sinks))(q, k, v),
            "hessian-vector": torch.func.jvp(grad, (q, sinks), (torch.cos(q), torch.cos(sinks)))[1],
        }

    assert_close(uses(attn.attention), uses(attn.reference), rtol=1e-11, atol=1e-13)


WITHOUT = ("fused", "fa3", "flash", "cudnn")


@pytest.mark.parametrize("form", WITHOUT)
def test_a_form_without_sinks_says_so(form):
    q, k, v, sinks = (x.bfloat16() for x in given(9, 64))
    with pytest.raises(ValueError, match=f"{form}.*it has no sinks"):
        attn.attention(q, k, v, sinks=sinks, impl=form)
