"""Ring and hierarchical attention over cp: outputs and gradients are those of one process, whatever blocks of the
sequence the ranks have, and the ledger has the bytes of the formula."""

import pytest
import ranks
import torch
from close import assert_close

from fzero.kernels import FULL, Pattern, attention, attention_ring, ring_attention
from fzero.sharding import Context, Pieces, largest_inner

contiguous, zigzag = (Context("gather", pieces).pieces_for for pieces in ("contiguous", "zigzag"))

F64 = torch.float64
H, G, K = 8, 4, 6
PATTERNS = {str(p): p for p in (FULL, Pattern("window", 11), Pattern("local", 8), Pattern("strided", 5))}
PATTERNS["fixed"] = Pattern("fixed", 8, 2)
PATTERNS["bigbird"] = Pattern("bigbird", 4, global_count=1, near=1, random=2, seed=3)


def tensors_of(tokens, dtype=F64, rows=2, seed=0):
    """q, k, v and the cotangent of the output, of whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, tokens, heads, K) for heads in (H, G, G, H)]
    return [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in shapes]


def documents_of(tokens, rows=2):
    return torch.stack([(torch.arange(tokens) + 3 * row) // 13 for row in range(rows)])


def by_rank(pieces, tokens):
    return torch.stack([pieces.positions(rank, tokens) for rank in range(len(pieces.blocks))])


def local(mesh, tokens, pieces, options, dtype=F64):
    """(out, the gradients by q, k and v) of this rank's positions, and the ledger's rows."""
    axis, positions = mesh["cp"], by_rank(pieces, tokens)
    *given, g = (x[:, positions[axis.rank]] for x in tensors_of(tokens, dtype))
    mesh.ledger.clear()
    leaves = [x.clone().requires_grad_() for x in given]
    with mesh.ledger.phase("forward"):
        out = ring_attention(*leaves, axis, positions, **options)
    with mesh.ledger.phase("backward"):
        grads = torch.autograd.grad(out, leaves, g)
    return [out.detach(), *grads], mesh.ledger.rows()


def whole(tokens, options, dtype=F64):
    *given, g = tensors_of(tokens, dtype)
    leaves = [x.clone().requires_grad_() for x in given]
    out = attention.reference(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def placed(results, pieces, tokens):
    """The ranks' results at their positions of the sequence."""
    order = torch.argsort(by_rank(pieces, tokens).flatten())
    return [torch.cat(parts, 1)[:, order] for parts in zip(*results)]


SHUFFLED = {2: Pieces(((0, 3, 5, 6), (1, 2, 4, 7))), 4: Pieces(((1, 6), (0, 7), (2, 3), (4, 5)))}
CHOICES = {"contiguous": contiguous, "zigzag": zigzag, "shuffled": SHUFFLED.get}


def expect_one_process(n, inner, pieces, tokens=64, form="auto", **options):
    results = ranks.run(n, local, tokens, pieces, {"inner": inner, "impl": form, **options}, mesh={"cp": n})
    assert_close(placed([out for out, _ in results], pieces, tokens), whole(tokens, options), rtol=1e-10, atol=1e-12)
    return [rows for _, rows in results]


RINGS = [
    pytest.param(*one, marks=[pytest.mark.exhaustive] * (one != (4, 2)))
    for one in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
]


@pytest.mark.parametrize("n, inner", RINGS)
def test_it_is_attention_of_one_process(n, inner):
    for choice in CHOICES.values():
        pieces = choice(n)
        expect_one_process(n, inner, pieces)
        expect_one_process(n, inner, pieces, documents=documents_of(64), cap=0.8, scale=0.3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_every_pattern(pattern):
    for form in ("blocked", "tiled"):
        expect_one_process(2, 1, SHUFFLED[2], form=form, pattern=pattern, documents=documents_of(64))
    expect_one_process(4, 2, SHUFFLED[4], pattern=pattern)


@pytest.mark.exhaustive
def test_one_position_a_rank():
    expect_one_process(4, 1, contiguous(4), tokens=4)
    expect_one_process(4, 2, contiguous(4), tokens=4, documents=torch.tensor([[0, 0, 1, 1], [0, 1, 2, 3]]))


@pytest.mark.parametrize("n, inner", RINGS)
def test_the_ledger_has_the_bytes_of_the_formula(n, inner):
    tokens, rows, size = 64, 2, 8
    hops, part = n // inner, rows * tokens // n
    keys = 2 * part * G * K  # a group has inner times the positions, and a part of the heads
    exchanged = (inner - 1) * part * (2 * H + 2 * G) * K // inner
    for ledger in expect_one_process(n, inner, zigzag(n)):
        by_phase = {phase: sum(r.bytes for r in ledger if r.phase == phase) for phase in ("forward", "backward")}
        assert by_phase["forward"] == size * ((hops - 1) * keys + exchanged)
        assert by_phase["backward"] == size * ((hops - 1) * keys + (hops > 1) * hops * keys + exchanged)


def in_bfloat16(mesh, tokens, pieces):
    return local(mesh, tokens, pieces, {}, torch.bfloat16)[0]


def errors(got, want):
    return [float((a.double() - b).square().mean().sqrt()) for a, b in zip(got, want)]


@pytest.mark.slow
def test_bfloat16_parts_are_joined_in_float32():
    """The error against float64 is that of attention of all keys at once in bfloat16, however many parts there are."""
    n, tokens = 4, 512
    *given, g = tensors_of(tokens, torch.bfloat16)
    exact, plain = [], []
    for to, found in ((F64, exact), (torch.bfloat16, plain)):
        leaves, line = [x.to(to).requires_grad_() for x in given], torch.arange(tokens)
        out = attention.attention(*leaves, positions=attention.Positions(line, line))
        found += [out.detach(), *torch.autograd.grad(out, leaves, g.to(to))]
    got = placed(ranks.run(n, in_bfloat16, tokens, zigzag(n), mesh={"cp": n}), zigzag(n), tokens)
    for error, base in zip(errors(got, exact), errors(plain, exact)):
        assert error <= 1.1 * base


def transformed(mesh, tokens):
    positions = by_rank(contiguous(2), tokens)
    q, k, v, _ = (x[:, positions[mesh["cp"].rank]] for x in tensors_of(tokens))
    said = []

    def loss(q):
        return ring_attention(q, k, v, mesh["cp"], positions).square().sum()

    first = torch.func.grad(loss)(q)
    for f in (
        lambda: torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q),
        lambda: torch.vmap(loss)(q[None]),
        lambda: torch.func.jvp(loss, (q,), (q,)),
    ):
        with pytest.raises(ValueError, match="use the form gather") as caught:
            f()
        said.append(str(caught.value))
    return first, said


@pytest.mark.exhaustive
def test_it_serves_grad_and_refuses_what_differentiates_more():
    tokens = 16
    results = ranks.run(2, transformed, tokens, mesh={"cp": 2})
    q, k, v, _ = tensors_of(tokens)
    want = torch.func.grad(lambda q: attention.reference(q, k, v).square().sum())(q)
    assert_close(torch.cat([first for first, _ in results], 1), want, rtol=1e-10, atol=1e-12)
    assert all("\n" not in line for _, said in results for line in said)


def test_shapes_that_do_not_fit_are_refused():
    from fzero.sharding import fake_mesh

    axis = fake_mesh({"cp": 4})["cp"]
    q, k = torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 2, 4)
    positions = torch.arange(8).view(4, 2)
    with pytest.raises(ValueError, match=r"positions must be \[4, 2\]"):
        ring_attention(q, k, k, axis, positions[:2])
    for inner, what in ((3, "cp, 4"), (4, "the query heads, 6")):
        with pytest.raises(ValueError, match=f"inner is {inner} and does not divide {what}; use 2"):
            ring_attention(q, k, k, axis, positions, inner=inner)
    assert [largest_inner(c, g) for c, g in ((4, 2), (4, 8), (6, 4), (8, 1))] == [2, 4, 2, 1]


def skipped(mesh, tokens):
    """How many hops compute something, with blocks in order."""
    seen = []
    may_see = attention_ring.may_see
    attention_ring.may_see = lambda where: seen.append(may_see(where)) or seen[-1]
    try:
        local(mesh, tokens, contiguous(2), {"documents": torch.arange(tokens).expand(2, -1) // (tokens // 2)})
        local(mesh, tokens, contiguous(2), {})
    finally:
        attention_ring.may_see = may_see
    return seen


@pytest.mark.exhaustive
def test_blocks_that_no_query_sees_are_skipped():
    """Forward and backward: with documents that end at the ranks' edge the own block alone, else all earlier ones."""
    assert ranks.run(2, skipped, 32, mesh={"cp": 2}) == [[True, False] * 4, [True, False] * 2 + [True, True] * 2]
