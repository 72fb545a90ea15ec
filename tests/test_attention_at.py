"""Attention of queries at any positions on keys at any others: each form against the definition, parts joined again,
and what the whole sequence's attention gives."""

import functools
import math
import random

import kernel_laws as laws
import pytest
import torch
from close import assert_close

from fzero.core import have_compiler
from fzero.kernels import (
    FULL,
    BlockMask,
    Pattern,
    Positions,
    Scoring,
    attention,
    attention_flash,
    attention_flash_backward,
    join,
    registry,
)
from fzero.kernels.attention_tiled import blocked_forward_at

# ring's parts and attention at positions alike; triton in its interpreter, in float32
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
    Pattern("bigbird", 8, global_count=1, near=1, random=1, seed=5),
]


def attention_at(q, k, v, query, key, query_documents=None, key_documents=None, form=attention.attention, **options):
    """Attention at positions, by the operation or a function such as its reference."""
    return form(q, k, v, positions=Positions(query, key, query_documents, key_documents), **options)


reference = functools.partial(attention_at, form=attention.reference)


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
    how = Scoring(FULL, 0.4)
    whole = blocked_forward_at(q, k, v, Positions(query, key, mine, theirs), how)
    joined = None
    for start, end in ((0, 1), (1, 130), (130, 200)):
        where = Positions(query, key[:, start:end], mine, theirs[:, start:end])
        part = attention.FORM_PASSES[form].forward(q, k[:, start:end], v[:, start:end], where, how)
        joined = part if joined is None else join(joined, part)
    assert_close(list(joined), list(whole), rtol=1e-11, atol=1e-13)
    assert torch.isinf(whole[1]).any()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_parts_add_to_those_of_the_whole(form):
    q, k, v = draw(2, 90, 200)
    query, key, mine, theirs = places(2, 90, 200, 20)
    mine[:, :3] = -1  # queries that see nothing
    how, where = Scoring(FULL, 0.4, 1.5), Positions(query, key, mine, theirs)
    out, lse = attention.FORM_PASSES[form].forward(q, k, v, where, how)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    want = attention.FORM_PASSES["blocked"].backward(q, k, v, where, out, lse, g, how)
    dq, dk, dv = torch.zeros_like(q), [], []
    for start, end in ((0, 1), (1, 130), (130, 200)):
        some = Positions(query, key[:, start:end], mine, theirs[:, start:end])
        a, b, c = attention.FORM_PASSES[form].backward(q, k[:, start:end], v[:, start:end], some, out, lse, g, how)
        dq, dk, dv = dq + a, [*dk, b], [*dv, c]
    assert_close([dq, torch.cat(dk, 1), torch.cat(dv, 1)], list(want), rtol=1e-10, atol=1e-12)


# ---- what a call must have ------------------------------------------------------------------------------------------


def drawn(name, seed, dtype=torch.float64):
    """(the arguments, the options) of a call of an operation, drawn."""
    pick = random.Random(seed)
    b, g, s = pick.randint(1, 2), pick.randint(1, 3), pick.randint(2, 40)
    h, t = g * pick.randint(1, 2), s if name == "masked" else pick.randint(1, s)
    tensors = draw(b, t, s, h, g, 2 * pick.randint(1, 3), dtype, seed)
    documents = torch.randint(3, (b, s), generator=torch.Generator().manual_seed(seed)).sort(-1).values
    options = {"scale": pick.choice((None, 0.5))}
    if name == "masked":
        n = -(-s // 4)
        seen = torch.rand(pick.choice((1, h)), n, n, generator=torch.Generator().manual_seed(seed)) < 0.6
        return tensors, options | {"mask": BlockMask(seen, 4), "documents": documents}
    options["pattern"] = pick.choice(PATTERNS)
    sinks = torch.linspace(-1, 1, h, dtype=dtype)
    options |= {"cap": pick.choice((0.0, 3.0)), "sinks": pick.choice((None, sinks))}
    if name != "positions":
        return tensors, options | {"documents": documents}
    positions = Positions(torch.arange(s - t, s), torch.arange(s), documents[:, s - t :], documents)
    return tensors, options | {"positions": positions}


def put(place, change):
    """The change of a call's argument, by place, or option, by name: to change(it, heads), of what it was."""

    def of(args, options):
        args = list(args)
        field = place if place in Positions._fields else ""
        into = options["positions"]._asdict() if field else args if isinstance(place, int) else options
        into[place] = (
            change(into.get(place) if isinstance(into, dict) else into[place], args[0].shape[2])
            if callable(change)
            else change
        )
        return args, options | ({"positions": Positions(**into)} if field else {})

    return of


OPTIONS = {"attention": "pattern documents cap sinks scale"}
OPTIONS |= {"positions": "pattern query_documents key_documents cap sinks scale"}
OPTIONS |= {"masked": "documents scale"}
WRONG_OPTIONS = {
    "sinks": [
        *(lambda _, h: torch.zeros(h + 1), lambda _, h: torch.zeros(2 * h), lambda _, h: torch.zeros(1, h)),
        *(lambda _, h: torch.zeros(h, dtype=torch.int64), lambda _, h: torch.zeros(h, device="meta"), 0.5),
    ],
    "documents": [
        *(lambda x, _: x.double(), lambda x, _: x[:, 1:], lambda x, _: x.repeat(2, 1), lambda x, _: x[0]),
        *(lambda x, _: x.tolist(), lambda x, _: x.to("meta")),
    ],
    "cap": [math.nan, math.inf, -1.0, True, "3", lambda *_: torch.tensor(3.0)],
    "scale": [math.nan, math.inf, True, "1", lambda *_: torch.tensor(0.5)],
    "pattern": ["full", None],
}
WRONG_OPTIONS["query_documents"] = WRONG_OPTIONS["key_documents"] = [*WRONG_OPTIONS["documents"][1:3], None]
WRONG_TENSORS = [
    *(put(i, lambda x, _: x[0]) for i in range(3)),
    *(put(i, lambda x, _: x.half()) for i in range(3)),
    *(put(i, lambda x, _: x.long()) for i in range(3)),
    *(put(i, lambda x, _: x.to("meta")) for i in range(3)),
    *(put(i, lambda x, _: x.repeat(3, 1, 1, 1)) for i in range(3)),
    *(put(i, lambda x, _: x[..., 1:]) for i in range(2)),
    *(put(i, lambda x, _: x.tolist()) for i in range(3)),
    *(put(i, lambda x, _: x[:, 1:]) for i in range(1, 3)),
    put(1, lambda x, h: x[:, :, :1].expand(-1, -1, h + 1, -1)),
    put(2, lambda x, h: x[:, :, :1].expand(-1, -1, h + 1, -1)),
]
WRONG = {name: [put(o, c) for o in options.split() for c in WRONG_OPTIONS[o]] for name, options in OPTIONS.items()}
WRONG["attention"] += [put(0, lambda x, _: x.repeat(1, 41, 1, 1))]  # more queries than keys
WRONG["positions"] += [
    put(place, change)
    for place in ("query", "key")
    for change in (
        lambda x, _: x.int(),
        lambda x, _: x.double(),
        lambda x, _: torch.cat((x, x)),
        lambda x, _: x.expand(5, -1),
        None,
    )
]
WRONG["positions"] += [put("positions", lambda x, _: tuple(x)), put("documents", lambda *_: torch.zeros(1, 1).int())]
WRONG["masked"] += [
    put("mask", lambda x, _: x.blocks),
    put("mask", lambda x, _: x.to("meta")),
    put("mask", lambda x, h: BlockMask(x.blocks[:1].repeat(h + 1, 0), 4)),
    put("mask", lambda x, _: BlockMask(x.blocks.repeat(2, 1), 4)),
]


@pytest.mark.parametrize("name", WRONG)
def test_a_drawn_call_is_that_of_float64_or_refused_in_one_line_by_every_form(name):
    op = registry.op("attention")
    for number, change in enumerate(WRONG_TENSORS + WRONG[name]):
        said = set()
        for impl in ("auto", "reference", *(form.name for form in op.forms)):
            args, options = change(*drawn(name, number))
            with pytest.raises(ValueError, match=r"^attention: .") as caught:
                op(*args, impl=impl, **options)
            said.add(str(caught.value))
        assert len(said) == 1 and "\n" not in said.pop(), (number, said)
    for seed in range(12):
        args, options = drawn(name, seed)
        exact = laws.tuple_of(op(*args, impl="reference", **options))
        args, options = drawn(name, seed, torch.float32)
        for form in op.forms:
            if form.name != "triton" and not form.reason_against(args, options):
                found = laws.tuple_of(op(*args, impl=form.name, **options))
                assert_close(found, tuple(x.float() for x in exact), rtol=1e-4, atol=1e-5)
