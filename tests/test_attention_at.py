"""Attention of queries at any positions on keys at any others: each form against the definition, parts joined again,
and what the whole sequence's attention gives."""

import functools

import kernel_laws as laws
import pytest
import torch
from close import assert_close

from fzero.core.compile import have_compiler
from fzero.kernels import attention, attention_flash, attention_flash_backward
from fzero.kernels.attention_at import PARTS, How, Where, attention_at, blocked_forward_at, reference
from fzero.kernels.attention_pattern import FULL, Pattern
from fzero.kernels.attention_ring import join

# ring's parts and `attention_at` alike; triton in its interpreter, in float32
FORMS = [
    "blocked",
    pytest.param("tiled", marks=pytest.mark.skipif(not have_compiler(), reason="there is no C++ compiler")),
]
PATTERNS = [
    FULL,
    Pattern("window", 70),
    Pattern("local", 40),
    Pattern("strided", 9),
    Pattern("fixed", 16, 3),
    Pattern("bigbird", 8, keep=1, near=1, random=1, seed=5),
]


def draw(b, t, s, h=4, g=2, k=6, dtype=torch.float64, seed=0):
    return laws.draw((b, t, h, k), (b, s, g, k), (b, s, g, k), dtype=dtype, seed=seed, device="cpu")


def places(b, t, s, length, seed=0):
    """Positions of queries and keys, those of the second row other ones, and their documents."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(2 * max(t, s), generator=generator) for _ in range(b)]
    query, key = (torch.stack([row[:n] for row in rows]) for n in (t, s))
    return query, key, query // length, key // length


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "pattern",
    [pytest.param(p, marks=[pytest.mark.exhaustive] * (p.kind != "bigbird")) for p in PATTERNS],
    ids=str,
)
def test_every_form_is_the_definition_at_any_positions(form, pattern):
    """Also a query that sees nothing, single queries and keys, and tiles that all or none see."""
    for b, t, s, cap in ((2, 131, 259, 0.0), (1, 1, 1, 0.0), (1, 70, 3, 0.7), (2, 200, 64, 0.0)):
        tensors = draw(b, t, s)
        query, key, mine, theirs = places(b, t, s, 50)
        theirs[:, :1] = mine[:, :1]
        key[0, 0] = 10**6 if s > 1 else query[0, 0]  # which no query sees
        for documents in ({}, {"query_documents": mine, "key_documents": theirs}):
            options = {"pattern": pattern, "scale": 0.3, "cap": cap} | documents
            at = dict(zip(("query", "key"), (query, key)), **options)
            want = laws.both_passes(functools.partial(reference, **at), tensors)
            got = laws.both_passes(functools.partial(attention_at, impl=form, **at), tensors)
            assert_close(list(got), list(want), rtol=1e-10, atol=1e-12)


@pytest.fixture
def small_tiles(monkeypatch):
    for configs in (
        attention_flash.CONFIGS,
        attention_flash_backward.QUERY_CONFIGS,
        attention_flash_backward.KEY_CONFIGS,
    ):
        for width in configs:
            monkeypatch.setitem(configs, width, [{"M": 32, "N": 16}])


def on_device(*tensors):
    return [x.to(laws.DEVICE) for x in tensors]


def of_triton(b, t, s, length=20, **options):
    """(a function of impl, q, k, v; tensors): positions of which some are in order, as a rank of cp has them."""
    query, key, mine, theirs = places(b, t, s, length)
    whole = torch.arange(max(t, s)) + 40  # some tiles see all keys of some
    query[0], key[0] = whole[:t] + s // 2, torch.roll(whole[:s], s // 2)
    mine[0], theirs[0] = query[0] // length, key[0] // length
    if s > 1:
        key[0, 0] = 10**6  # which no query sees
    query, key, mine, theirs = on_device(query, key, mine, theirs)
    if options.pop("documents", False):
        options |= {"query_documents": mine, "key_documents": theirs}
    tensors = on_device(*draw(b, t, s, k=16))
    return lambda impl, *x: attention_at(*x, query, key, impl=impl, **options), tensors


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(p, marks=[pytest.mark.exhaustive] * (p.kind != "bigbird"))
        for p in (*PATTERNS, Pattern("window", 9))
    ],
    ids=str,
)
def test_tritons_numbers(small_tiles, pattern):
    laws.numbers(*of_triton(2, 40, 70, pattern=pattern, documents=True, scale=0.3), torch.float32)
    for shape in ((1, 33, 5), (1, 1, 40)):
        laws.numbers(*of_triton(*shape, pattern=pattern), torch.bfloat16)


@pytest.mark.exhaustive
def test_laws_of_triton(small_tiles):
    for law in (laws.repeats, laws.strides, laws.adjoint, laws.transforms):
        law(*of_triton(1, 40, 50, documents=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_positions_in_order_give_attention_of_the_sequence(form):
    documents = (torch.arange(150) // 47)[None]
    tensors, line = draw(1, 150, 150), torch.arange(150)
    mine = {"query_documents": documents, "key_documents": documents}
    for pattern in PATTERNS:
        want = laws.both_passes(lambda *x, p=pattern: attention.reference(*x, pattern=p, documents=documents), tensors)
        got = laws.both_passes(
            lambda *x, p=pattern: attention_at(*x, line, line, pattern=p, impl=form, **mine), tensors
        )
        assert_close(list(got), list(want), rtol=1e-10, atol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_error_is_at_most_twice_that_of_plain_torch(form, dtype):
    query, key, mine, theirs = places(2, 193, 260, 90)
    options = {"query_documents": mine, "key_documents": theirs, "cap": 2.0}
    for more in ({}, options):
        f = lambda impl, *x, o=more: attention_at(*x, query, key, impl=impl, **o)  # noqa: E731
        laws.numbers(f, draw(2, 193, 260, k=64), dtype, impl=form)


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_the_keys_join_to_the_whole(form):
    """Also parts of which some queries, or all, see nothing."""
    q, k, v = draw(2, 90, 200)
    query, key, mine, theirs = places(2, 90, 200, 20)
    mine[:, :3] = -1  # queries that see nothing
    how = How(FULL, 0.4)
    whole = blocked_forward_at(q, k, v, Where(query, key, mine, theirs), how)
    joined = None
    for start, end in ((0, 1), (1, 130), (130, 200)):
        where = Where(query, key[:, start:end], mine, theirs[:, start:end])
        part = PARTS[form].forward(q, k[:, start:end], v[:, start:end], where, how)
        joined = part if joined is None else join(joined, part)
    assert_close(list(joined), list(whole), rtol=1e-11, atol=1e-13)
    assert torch.isinf(whole[1]).any()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_parts_add_to_those_of_the_whole(form):
    q, k, v = draw(2, 90, 200)
    query, key, mine, theirs = places(2, 90, 200, 20)
    mine[:, :3] = -1  # queries that see nothing
    how, where = How(FULL, 0.4, 1.5), Where(query, key, mine, theirs)
    out, lse = PARTS[form].forward(q, k, v, where, how)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    want = PARTS["blocked"].backward(q, k, v, where, out, lse, g, how)
    dq, dk, dv = torch.zeros_like(q), [], []
    for start, end in ((0, 1), (1, 130), (130, 200)):
        some = Where(query, key[:, start:end], mine, theirs[:, start:end])
        a, b, c = PARTS[form].backward(q, k[:, start:end], v[:, start:end], some, out, lse, g, how)
        dq, dk, dv = dq + a, [*dk, b], [*dv, c]
    assert_close([dq, torch.cat(dk, 1), torch.cat(dv, 1)], list(want), rtol=1e-10, atol=1e-12)
