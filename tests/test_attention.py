"""Attention: the reference against a loop over positions and against PyTorch, the blocked form against the
reference."""

import math

import pytest
import torch
from close import assert_at_most_twice_the_error, assert_close, assert_same

from fzero.kernels import FULL, Pattern, attention_tiled, glu, norm
from fzero.kernels import attention as attn

F64 = torch.float64
PATTERNS = {
    "full": FULL,
    "window": Pattern("window", 7),
    "window of 1": Pattern("window", 1),
    "wide window": Pattern("window", 200),
    "local": Pattern("local", 40),
    "strided": Pattern("strided", 9),
    "fixed": Pattern("fixed", 16, 3),
    "bigbird": Pattern("bigbird", 10, global_count=1, near=2, random=3, seed=7),
    "bigbird of single tokens": Pattern("bigbird", 1, global_count=2, near=3, random=2),
}
every_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)


def inputs(b, t, h, g, k, dtype=F64, s=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((b, t, h, k), (b, s or t, g, k), (b, s or t, g, k))
    return [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in shapes]


def documents_of(b, t):
    """Documents of different lengths in every row, one of a single token."""
    return torch.stack(
        [((torch.arange(t) + 5 * i) // max(2, t // 3)).add((torch.arange(t) == t - 1).int()) for i in range(b)]
    )


def mixed(x):
    for _ in range(2):
        x = ((x >> 16) ^ x) * 0x45D9F3B % 2**32
    return (x >> 16) ^ x


def random_blocks(pattern, block):
    """Of the blocks that are neither among the first `keep` nor among the last `near` up to `block`."""
    others = range(pattern.global_count, block - pattern.near + 1)
    salts = [mixed((pattern.seed + (i + 1) * 0x9E3779B9) % 2**32) for i in range(pattern.random)]
    return {others[mixed(block ^ salt) % len(others)] for salt in salts} if others else set()


def sees(pattern, t, s):
    """The definitions, position by position (distances and blocks as in the papers)."""
    if s > t:
        return False
    own, block = (t // pattern.size, s // pattern.size) if pattern.size else (0, 0)
    same_block = own == block
    return {
        "full": lambda: True,
        "window": lambda: s > t - pattern.size,
        "local": lambda: same_block,
        "strided": lambda: t - s < pattern.size or (t - s) % pattern.size == 0,
        "fixed": lambda: same_block or s % pattern.size in range(pattern.size - pattern.global_count, pattern.size),
        "bigbird": lambda: (
            block < pattern.global_count or own - block < pattern.near or block in random_blocks(pattern, own)
        ),
    }[pattern.kind]()


def by_hand(q, k, v, pattern, documents=None, scale=None, cap=None):
    b, t, h, d = q.shape
    out = torch.zeros_like(q)
    past = k.shape[1] - t
    for i in range(b):
        for j in range(h):
            group = j // (h // k.shape[2])
            for n in range(t):
                at = [s for s in range(past + t) if sees(pattern, past + n, s)]
                if documents is not None:
                    at = [s for s in at if documents[i, s] == documents[i, past + n]]
                plain = [float(q[i, n, j] @ k[i, s, group]) * (d**-0.5 if scale is None else scale) for s in at]
                scores = [math.exp(y if cap is None else cap * math.tanh(y / cap)) for y in plain]
                out[i, n, j] = sum(w * v[i, s, group] for w, s in zip(scores, at)) / sum(scores)
    return out


@pytest.mark.parametrize(
    "pattern",
    [
        FULL,
        *(Pattern(k, 3, 1 if k == "fixed" else 0) for k in ("window", "local", "strided", "fixed")),
        Pattern("bigbird", 2, global_count=1, near=1, random=1, seed=3),
    ],
    ids=str,
)
def test_reference_is_the_definition(pattern):
    q, k, v = inputs(2, 11, 4, 2, 3)
    assert_close(attn.reference(q, k, v, pattern=pattern), by_hand(q, k, v, pattern), rtol=1e-12, atol=1e-14)
    documents = documents_of(2, 11)
    expected = by_hand(q, k, v, pattern, documents, scale=0.3)
    assert_close(
        attn.reference(q, k, v, pattern=pattern, documents=documents, scale=0.3), expected, rtol=1e-12, atol=1e-14
    )
    expected = by_hand(q, k, v, pattern, documents, scale=0.3, cap=0.4)
    capped = attn.reference(q, k, v, pattern=pattern, documents=documents, scale=0.3, cap=0.4)
    assert_close(capped, expected, rtol=1e-12, atol=1e-14)
    # The last queries alone, as when a token is added to a cache.
    last = by_hand(q[:, 9:], k, v, pattern)
    assert_close(attn.reference(q[:, 9:], k, v, pattern=pattern), last, rtol=1e-12, atol=1e-14)


def test_reference_is_torch_s_causal_attention():
    q, k, v = inputs(2, 37, 6, 3, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert_close(attn.reference(q, k, v), expected.transpose(1, 2), rtol=1e-12, atol=1e-14)


def gradients(form, tensors, **options):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = form(*leaves, **options)
    weight = torch.cos(torch.arange(out.numel(), dtype=F64)).reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


@every_pattern
@pytest.mark.parametrize("t", (1, 2, 127, 129, 300))
def test_blocked_is_the_reference(pattern, t):
    tensors = inputs(2, t, 4, 2, 8)
    for options in ({}, {"documents": documents_of(2, t), "scale": 0.2, "cap": 0.3}):
        expected = gradients(attn.reference, tensors, pattern=pattern, **options)
        assert_close(
            gradients(attn.blocked_attention, tensors, pattern=pattern, **options), expected, rtol=1e-11, atol=1e-14
        )


@pytest.mark.parametrize("heads, groups, dim", ((1, 1, 1), (3, 3, 5), (6, 2, 4), (4, 1, 7)))
def test_blocked_with_grouped_heads_and_odd_dims(heads, groups, dim):
    tensors = inputs(1, 131, heads, groups, dim)
    assert_close(gradients(attn.blocked_attention, tensors), gradients(attn.reference, tensors), rtol=1e-11, atol=1e-13)


def test_blocked_in_many_blocks_and_where_the_number_is_capped(monkeypatch):
    tensors = inputs(2, 53, 2, 1, 4)
    expected = gradients(attn.reference, tensors, pattern=Pattern("window", 5))
    for smallest, most in ((4, 100), (1, 8), (1, 53)):
        monkeypatch.setattr(attention_tiled, "MIN_BLOCK", smallest)
        monkeypatch.setattr(attention_tiled, "MAX_BLOCKS", most)
        rows = [block.queries for block in attention_tiled._blocks(53, 53, FULL)]
        assert len(rows) <= most and [r.start for r in rows[1:]] == [r.stop for r in rows[:-1]] and rows[-1].stop == 53
        assert_close(
            gradients(attn.blocked_attention, tensors, pattern=Pattern("window", 5)), expected, rtol=1e-11, atol=1e-14
        )


def test_gradcheck_of_the_blocked_function(monkeypatch):
    monkeypatch.setattr(attention_tiled, "MIN_BLOCK", 2)
    leaves = [x.requires_grad_() for x in inputs(2, 5, 2, 1, 2)]
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
    for options in ({"cap": 0.5}, {"pattern": Pattern("strided", 2), "documents": documents, "scale": 0.7}):
        assert torch.autograd.gradcheck(
            lambda *a, options=options: attn.blocked_attention(*a, **options), leaves, atol=1e-7, rtol=1e-6
        )


@every_pattern
@pytest.mark.parametrize("form", (attn.reference, attn.blocked_attention))
def test_later_tokens_do_not_change_earlier_outputs(form, pattern):
    q, k, v = inputs(1, 150, 2, 1, 4)
    other = inputs(1, 150, 2, 1, 4, seed=1)
    out = form(q, k, v, pattern=pattern)
    for cut in (1, 127, 129, 149):
        changed = [torch.cat((mine[:, :cut], theirs[:, cut:]), 1) for mine, theirs in zip((q, k, v), other)]
        assert_close(form(*changed, pattern=pattern)[:, :cut], out[:, :cut], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("form", (attn.reference, attn.blocked_attention))
def test_another_document_does_not_change_mine(form):
    tensors, other = inputs(2, 150, 2, 1, 4), inputs(2, 150, 2, 1, 4, seed=1)
    documents = torch.tensor([[0] * 60 + [1] * 80 + [2] * 10, [4] * 30 + [5] * 120])
    mine = documents == torch.tensor([[1], [5]])
    changed = [torch.where(mine[..., None, None], x, y) for x, y in zip(tensors, other)]
    for pattern in PATTERNS.values():
        base = gradients(
            lambda *a, p=pattern: form(*a, pattern=p, documents=documents) * mine[..., None, None], tensors
        )
        moved = gradients(
            lambda *a, p=pattern: form(*a, pattern=p, documents=documents) * mine[..., None, None], changed
        )
        assert_close(moved, base, rtol=1e-12, atol=1e-15)
        assert all(float(g[~mine].abs().max()) == 0.0 for g in base)
    # A document inside a packed row is the document alone.
    alone = form(*(x[:1, 60:140] for x in tensors))
    assert_close(form(*tensors, documents=documents)[:1, 60:140], alone, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_the_error_is_at_most_twice_that_of_plain_torch(dtype):
    tensors = inputs(2, 300, 4, 2, 32, dtype)
    documents = documents_of(2, 300)
    for pattern in (FULL, Pattern("window", 64)):
        options = {"pattern": pattern, "documents": documents}
        exact = gradients(attn.reference, [x.to(F64) for x in tensors], **options)
        ours, plain = (gradients(form, tensors, **options) for form in (attn.blocked_attention, attn.reference))
        assert_at_most_twice_the_error(ours, plain, exact)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, F64), ids=str)
def test_a_query_that_sees_one_key_has_no_gradient_in_blocks(dtype):
    tensors = inputs(2, 300, 4, 2, 32, dtype)
    starts = documents_of(2, 300).diff(prepend=torch.full((2, 1), -1)) != 0
    for pattern, alone in ((FULL, starts), (Pattern("window", 1), torch.ones_like(starts))):
        for form in (attn.blocked_attention, attn.reference):
            _, dq, *_ = gradients(form, tensors, pattern=pattern, documents=documents_of(2, 300))
            assert bool((dq[alone] == 0).all()) and bool((dq[~alone] != 0).any()) != bool(alone.all())


@pytest.mark.parametrize("t", (2, 129, 300))
def test_fused_is_the_reference(t):
    tensors = inputs(2, t, 4, 2, 8)
    for options in ({}, {"scale": 0.2}):
        expected = gradients(attn.reference, tensors, **options)
        assert_close(gradients(attn.fused_attention, tensors, **options), expected, rtol=1e-11, atol=1e-13)


def test_long_sequences_are_the_reference():
    """Beyond the blocks' reach the form is another one; with a pattern or documents it is not."""
    t = attention_tiled.MIN_BLOCK * attention_tiled.MAX_BLOCKS + 1
    tensors = inputs(1, t, 2, 1, 4)
    for options in ({}, {"pattern": Pattern("window", 50)}, {"documents": documents_of(1, t)}):
        expected = gradients(attn.reference, tensors, **options)
        assert_close(gradients(attn.attention, tensors, **options), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("b", "t", "s"), ((0, 4, 4), (2, 0, 0), (2, 0, 4)))
def test_a_call_without_elements(b, t, s):
    """Whatever serves it, for attention and beside it; a form that cannot is refused by name."""
    q, k, v = (torch.empty(b, n, 2, 8, requires_grad=True) for n in (t, s, s))
    for impl in ("auto", "reference"):
        y = attn.attention(q, k, v, impl=impl)
        grads = torch.autograd.grad(y.sum(), (q, k, v))
        assert y.shape == q.shape and all(not g.any() and g.shape == x.shape for g, x in zip(grads, (q, k, v)))
    with pytest.raises(ValueError, match=r"impl='blocked' does not serve this call: the queries .* are empty"):
        attn.attention(q, k, v, impl="blocked")
    x = torch.empty(b, t, 16, requires_grad=True)
    assert norm.rms_norm(x, torch.ones(16), 1e-6).shape == glu.swiglu(x, x).shape == x.shape


def test_large_scores_stay_finite():
    q, k, v = inputs(1, 130, 1, 1, 4, torch.float32)
    out = gradients(attn.blocked_attention, [200.0 * q, 200.0 * k, v])
    assert all(bool(x.isfinite().all()) for x in out)
    assert_close(out[0], attn.reference(200.0 * q.double(), 200.0 * k.double(), v.double()), rtol=1e-2, atol=1e-3)


def test_a_second_run_gives_the_same_bits():
    tensors = inputs(2, 300, 4, 2, 8, torch.bfloat16)
    assert_same(gradients(attn.attention, tensors), gradients(attn.attention, tensors))


def test_attention_serves_every_transform():
    q, k, v = inputs(2, 9, 2, 1, 3)

    def loss(form):
        return lambda q, k, v: (form(q, k, v, pattern=Pattern("window", 4)) ** 3).sum()

    def uses(form):
        f = loss(form)
        grad = torch.func.grad(f, argnums=(0, 1, 2))
        ones = (torch.cos(q), torch.cos(k), torch.cos(v))
        return {
            "grad": grad(q, k, v),
            "vmap": torch.vmap(f)(*(x[:, None] for x in (q, k, v))),
            "vmap of grad": torch.vmap(grad)(*(x[:, None] for x in (q, k, v))),
            "hessian-vector": torch.func.jvp(grad, (q, k, v), ones)[1],
            "grad of grad": torch.func.grad(lambda q: (grad(q, k, v)[1] ** 2).sum())(q),
        }

    assert_close(uses(attn.attention), uses(attn.reference), rtol=1e-11, atol=1e-13)
    # Fewer queries than keys: the reference, too.
    assert_same(attn.attention(q[:, 8:], k, v), attn.reference(q[:, 8:], k, v))


def test_a_second_derivative_that_blocked_cannot_give_is_an_error():
    q, k, v = (x.requires_grad_() for x in inputs(1, 4, 1, 1, 2))
    (dq,) = torch.autograd.grad(attn.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"use torch\.func\.grad of grad"):
        dq.sum().backward()


# ---- texts ----------------------------------------------------------------------------------------------------------


def test_pattern_texts():
    texts = ["full", "window:8", "local:4", "strided:2", "fixed:16:4", "bigbird:64:3:1:2:7", "bigbird:64:1:0:0"]
    patterns = [Pattern.parse(text) for text in texts]
    assert patterns == [
        FULL,
        Pattern("window", 8),
        Pattern("local", 4),
        Pattern("strided", 2),
        Pattern("fixed", 16, 4),
        Pattern("bigbird", 64, global_count=1, near=3, random=2, seed=7),
        Pattern("bigbird", 64, global_count=0, near=1, random=0),
    ]
    assert [str(pattern) for pattern in patterns] == texts
    assert [Pattern.of_numbers(pattern.numbers) for pattern in patterns] == patterns


@pytest.mark.parametrize(
    "text, said",
    [
        ("sparse", "attention pattern 'sparse' is unknown; use full, window, local, strided, fixed or bigbird"),
        ("window", "attention pattern window: size is 0"),
        ("local:0", "attention pattern local: size is 0"),
        ("fixed:8", r"attention pattern fixed: global_count is 0; it must be in \[1, size = 8\]"),
        ("fixed:8:9", "attention pattern fixed: global_count is 9"),
        ("window:8:1", "attention pattern 'window:8:1' is not of the form"),
        ("bigbird:8", r"attention pattern bigbird: near is 0; it must be in \[1, 1,000,000,000\]"),
        ("bigbird:0:1", "attention pattern bigbird: size is 0; it must be at least 1"),
        ("bigbird:8:1:1:65", r"attention pattern bigbird: random is 65; it must be in \[0, 64\]"),
        ("bigbird:8:1:1:1:2147483648", r"bigbird: seed is 2147483648; it must be in \[0, 2,147,483,647\]"),
        ("bigbird:8:1:1:1:2:3", "attention pattern 'bigbird:8:1:1:1:2:3' is not of the form"),
        ("window:-3", "attention pattern 'window:-3' is not of the form"),
        ("", "attention pattern '' is not of the form"),
    ],
)
def test_pattern_refuses(text, said):
    with pytest.raises(ValueError, match=said):
        Pattern.parse(text)


def test_a_number_of_another_kind_is_refused():
    with pytest.raises(
        ValueError, match="attention pattern window: global_count is 2; it is a number of fixed and bigbird"
    ):
        Pattern("window", 8, 2)
    with pytest.raises(ValueError, match="attention pattern fixed: seed is 1; it is a number of bigbird alone"):
        Pattern("fixed", 8, 2, seed=1)


def test_random_blocks_are_spread_over_the_earlier_ones():
    """Of 100,000 draws from 10 blocks, each has the tenth part of them within 5 standard deviations."""
    pattern, own = Pattern("bigbird", 8, global_count=1, near=2, random=2), torch.arange(12, 100_012)
    for i in range(2):
        others = own - 2  # neither the first block nor one of the last two
        tenth = (pattern.random_block(own, i) - 1) * 10 // others
        assert (torch.bincount(tenth, minlength=10) - 10_000).abs().max() < 5 * math.sqrt(100_000 * 0.1 * 0.9)
    seeds = [Pattern("bigbird", 8, near=1, random=1, seed=seed) for seed in range(100_000)]
    drawn = torch.tensor([int(one.random_block(10, 0)) for one in seeds])
    assert (torch.bincount(drawn, minlength=10) - 10_000).abs().max() < 5 * math.sqrt(100_000 * 0.1 * 0.9)
