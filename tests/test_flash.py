"""Flash attention: every law of a kernel, for all patterns, documents and shared heads; what is skipped."""

from contextlib import nullcontext

import kernel_laws as laws
import pytest
import torch
import triton
import triton.language as tl
from close import assert_close, assert_same

from fzero.kernels import (
    FULL,
    Pattern,
    attention,
    attention_flash,
    attention_flash_backward,
    attention_spans,
    attention_tiles,
    registry,
)
from fzero.kernels import attention as attn

PATTERNS = {
    "full": FULL,
    "window": Pattern("window", 21),
    "local": Pattern("local", 20),
    "strided": Pattern("strided", 9),
    "wide stride": Pattern("strided", 40),
    "fixed": Pattern("fixed", 40, 5),
    "bigbird": Pattern("bigbird", 8, global_count=1, near=1, random=1, seed=2**31 - 1),
}
BIGBIRDS = (
    Pattern("bigbird", 1, global_count=2, near=3, random=2),
    Pattern("bigbird", 5, global_count=0, near=1, random=2, seed=9),
    Pattern("bigbird", 20, global_count=1, near=1, random=1, seed=1),
    Pattern("bigbird", 6, global_count=0, near=2, random=0),
)
every_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
CONFIGS = (attention_flash.CONFIGS, attention_flash_backward.QUERY_CONFIGS, attention_flash_backward.KEY_CONFIGS)
SHIPPED = [dict(configs) for configs in CONFIGS]


def later(values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    for configs in CONFIGS:
        for width in configs:
            monkeypatch.setitem(configs, width, [{"M": 32, "N": 32}])
    monkeypatch.setattr(attention_spans, "CHUNK", 32)


def documents_of(b, t):
    """Other lengths in every row; the last token is a document of its own."""
    at = torch.arange(t, device=laws.DEVICE)
    return torch.stack([(at + 5 * i) // max(2, t // 3) + (at == t - 1) for i in range(b)])


def inputs(b=1, t=45, h=2, g=1, k=16, s=None, dtype=torch.float64):
    return laws.draw((b, t, h, k), (b, s or t, g, k), (b, s or t, g, k), dtype=dtype)


def form(documents=False, **options):
    def call(impl, q, k, v):
        return attention.attention(
            q, k, v, impl=impl, documents=documents_of(k.shape[0], k.shape[1]) if documents else None, **options
        )

    return call


def test_every_law():
    laws.every_law(form(), inputs(t=33, h=1))


def test_derivatives():
    for documents in (False, True):
        laws.derivatives(form(documents=documents), inputs(1, 4, 2, 1, 2))
        laws.derivatives(form(documents=documents), inputs(1, 2, 2, 1, 2, s=4))


@every_pattern
def test_numbers(pattern):
    laws.numbers(form(pattern=pattern), inputs(t=70, h=1), torch.float32)
    laws.numbers(form(pattern=pattern, documents=True), inputs(t=49), torch.bfloat16)


@pytest.mark.parametrize(
    "heads, groups, dim", (*map(later, ((1, 1, 64), (2, 1, 96), (1, 1, 128))), (2, 2, 256), (3, 1, 24), (4, 2, 2))
)
def test_heads(heads, groups, dim):
    laws.numbers(form(), inputs(1, 33, heads, groups, dim), torch.bfloat16)


@pytest.mark.parametrize("t, s", ((2, 2), *map(later, ((32, 32), (33, 33), (5, 37))), (1, 40), (33, 70)))
def test_lengths_and_fewer_queries_than_keys(t, s):
    laws.numbers(form(documents=t > 2), inputs(2, t, 1, 1, s=s), torch.float32)
    laws.numbers(form(pattern=PATTERNS["strided"]), inputs(1, t, 1, 1, s=s), torch.float32)
    # Four rows, as the largest error is that of a query whose two keys nearly cancel; plain torch may be lucky in one.
    laws.numbers(form(pattern=Pattern("window", 2)), inputs(4, t, 1, 1, s=s), torch.float32)


def test_half_precision():
    laws.numbers(form(), inputs(), torch.float16)


@pytest.mark.parametrize("pattern", (Pattern("window", 1), Pattern("local", 1)), ids=str)
def test_a_query_that_sees_itself_alone(pattern):
    """Its probability does not depend on the scores: where the reference's gradient is 0, the kernels' is 0 but for
    rounding."""
    (out,), (dq, dk, dv) = laws.both_passes(lambda *a: form(pattern=pattern)("triton", *a), inputs(dtype=torch.float32))
    assert_close(out, inputs(dtype=torch.float32)[2].repeat_interleave(2, 2), rtol=1e-6)
    assert max(float(x.abs().max()) for x in (dq, dk)) < 1e-5 < float(dv.abs().max())


def test_shipped_tiles(monkeypatch):
    for configs, shipped in zip(CONFIGS, SHIPPED):
        monkeypatch.setitem(configs, 64, shipped[64])
    laws.numbers(form(pattern=Pattern("window", 100)), inputs(1, 200, 1, 1, 64), torch.bfloat16)


def test_large_scores_stay_finite():
    q, k, v = inputs(dtype=torch.float32)
    (out,), grads = laws.both_passes(lambda *a: form()("triton", *a), [200 * q, 200 * k, v])
    assert all(x.isfinite().all() for x in (out, *grads))
    assert_close(out, attn.reference(200 * q.double(), 200 * k.double(), v.double()), rtol=1e-2, atol=1e-3)


def strided(x, dim, apart):
    """x with `apart` elements from one index of `dim` to the next."""
    flat = laws.far_apart(x.shape[dim], x.numel() // x.shape[dim], x.dtype, apart)
    return flat.view(x.shape[dim], *(n for d, n in enumerate(x.shape) if d != dim)).movedim(0, dim).copy_(x)


@pytest.mark.parametrize("dim", (0, 1, 2))
def test_far_apart(dim):
    """Rows of the batch, positions and heads whose offsets pass 2^31 elements, where their strides do and where they do
    not."""
    tensors = inputs(*((3, 3, 1, 1) if dim == 0 else (1, 3, 3, 3)), 4, dtype=torch.float32)
    expected = attention.attention(*tensors, impl="triton")
    for apart in ((1 << 31) + 8, (1 << 30) + 8):
        assert_same(attention.attention(*(strided(x, dim, apart) for x in tensors), impl="triton"), expected)


def test_far_from_the_first_key():
    """The offset of a tile passes 2^31 where none inside it does."""
    q, k, v = inputs(1, 8, 1, 1, 4, s=530, dtype=torch.float32)
    f = form(pattern=Pattern("window", 12))
    assert_same(f("triton", q, *(strided(x, 1, (1 << 22) - 8) for x in (k, v))), f("triton", q, k, v))


def test_a_row_does_not_depend_on_its_batch():
    tensors = inputs(2, 33, 1, dtype=torch.float32)
    outs, grads = laws.both_passes(lambda *a: form(documents=True)("triton", *a), tensors)
    leaves = [x[:1].clone().requires_grad_() for x in tensors]
    out = form(documents=True)("triton", *leaves)
    weight = laws.draw(outs[0].shape, seed=1, dtype=torch.float32)[0][:1]
    assert_same([out.detach(), *torch.autograd.grad(out, leaves, weight)], [x[:1] for x in (*outs, *grads)])


@pytest.mark.parametrize("shape", ((0, 5, 2, 16), (2, 0, 2, 16)), ids=str)
def test_none(shape):
    leaves = [torch.zeros(shape, device=laws.DEVICE).requires_grad_() for _ in range(3)]
    out = attention.attention(*leaves, impl="triton")
    assert out.shape == shape
    assert [x.shape for x in torch.autograd.grad(out.sum(), leaves)] == [shape] * 3


def test_patterns_wider_than_tiles():
    """So that between the edges there are tiles without a mask."""
    laws.numbers(form(pattern=Pattern("window", 95)), inputs(1, 112, 1, 1), torch.float32)
    laws.numbers(form(pattern=Pattern("local", 70)), inputs(1, 112, 1, 1), torch.float32)


# ---- documents -------------------------------------------------------------------------------------------------------


def test_documents_that_come_back():
    """Numbers are compared, in whatever order they stand."""
    documents = torch.tensor([[3] * 17 + [-1] * 18 + [3] * 15, [0, 1] * 25], device=laws.DEVICE)
    laws.numbers(
        lambda impl, *a: attention.attention(*a, documents=documents, impl=impl), inputs(2, 50, 1, 1), torch.float32
    )


def test_documents_longer_than_tiles():
    """The first begins one token behind a tile's edge, and so the second."""
    documents = torch.tensor([[0] * 33 + [1] * 64 + [2] * 15], device=laws.DEVICE)
    laws.numbers(
        lambda impl, *a: attention.attention(*a, documents=documents, impl=impl), inputs(1, 112, 1, 1), torch.float32
    )


def test_a_document_in_a_packed_row_is_the_document_alone():
    q, k, v = inputs(1, 70, dtype=torch.float32)
    documents = torch.tensor([[0] * 32 + [1] * 30 + [2] * 8], device=laws.DEVICE)
    out = attention.attention(q, k, v, documents=documents, impl="triton")[:, 32:62]
    assert_close(out, attention.attention(q[:, 32:62], k[:, 32:62], v[:, 32:62], impl="triton"), rtol=1e-5, atol=1e-6)


# ---- what is skipped -------------------------------------------------------------------------------------------------


def tiles_seen(pattern, documents, t, m, n):
    """How many tiles of m queries and n keys there are in which a query sees a key."""
    at = torch.arange(t, device=laws.DEVICE)
    mask = attn.Positions(at, at, documents, documents).mask(pattern)[0]
    return sum(int(part.any()) for rows in mask.split(m) for part in rows.split(n, 1))


SPARSE = {"documents": FULL} | PATTERNS | {"window and documents": PATTERNS["window"]}


@pytest.mark.skipif(not laws.INTERPRETED, reason="counts in the interpreter")
@pytest.mark.parametrize(
    "name",
    [name if name in ("strided", "fixed", "bigbird", "window and documents") else later((name,)) for name in SPARSE],
)
def test_tiles_that_see_nothing_are_not_visited(monkeypatch, name):
    """Each visit makes its products. The masked tiles for dk and dv are of half as many queries."""
    t, pattern = 128, SPARSE[name]
    for configs in CONFIGS:
        monkeypatch.setitem(configs, torch.float32, [{"M": 32, "N": 16}])
    documents = torch.arange(t)[None] // 50 if "documents" in name else None
    products = [0]
    for module in (attention_flash, attention_flash_backward):

        def counted(*args, dot=module.dot):
            products[0] += 1
            return dot(*args)

        monkeypatch.setattr(module, "dot", counted)
    leaves = [x.requires_grad_() for x in inputs(1, t, 1, 1, dtype=torch.float32)]
    out = attention.attention(*leaves, pattern=pattern, documents=documents, impl="triton")
    seen, halves = (tiles_seen(pattern, documents, t, m, 16) for m in (32, 16))
    assert products[0] == 2 * seen < 2 * 4 * 8
    out.sum().backward()
    assert 5 * seen + 2 * halves <= products[0] <= 5 * seen + 4 * halves


@triton.jit
def _sees_some(
    FIRST,
    KEY,
    OUT,
    size,
    keep,
    near,
    seed,
    RANDOM: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    COUNT: tl.constexpr,
):
    at = tl.program_id(0) * COUNT + (0 if COUNT == 1 else tl.arange(0, COUNT))
    first, key, pattern = tl.load(FIRST + at), tl.load(KEY + at), (size, keep, near, seed)
    seen = attention_tiles.may_see(first, first + ROWS - 1, key, key + ROWS - 1, pattern, KIND, RANDOM)
    tl.store(OUT + at, seen.to(tl.int32))


@pytest.mark.parametrize(
    "pattern",
    (*(Pattern("strided", n) for n in (5, 11, 20)), Pattern("fixed", 20, 1), Pattern("fixed", 18, 9), *BIGBIRDS),
    ids=str,
)
def test_a_tile_is_asked_exactly(pattern):
    """Each tile of 8 queries and 8 keys, wherever they begin, that is not wholly in the future; of bigbird, which is
    asked of one tile at a time, some of them.
    """
    step, at_once = (5, 1) if pattern.kind == "bigbird" else (1, 4096)
    first, key = (x.flatten().int() for x in torch.meshgrid(*[torch.arange(0, 64, step)] * 2, indexing="ij"))
    rows = torch.arange(8)
    expected = pattern.visible((first[:, None] + rows)[:, :, None], (key[:, None] + rows)[:, None, :]).any(-1).any(-1)
    first, key, out = (x.to(laws.DEVICE) for x in (first, key, torch.empty_like(first)))
    grid = (len(out) // at_once,)
    _sees_some[grid](first, key, out, *pattern.sizes, ROWS=8, KIND=pattern.kind, COUNT=at_once)
    assert_same((out.cpu() == 1)[key.cpu() <= first.cpu() + 7], expected[key.cpu() <= first.cpu() + 7])


def test_values_that_are_not_seen_do_not_show():
    """NaN in the keys, queries and gradients of other documents, where whole tiles are of them."""
    documents = torch.tensor([[0] * 32 + [1] * 32 + [2] * 32], device=laws.DEVICE)
    mine = (documents == 1)[..., None, None]
    q, k, v = (torch.where(mine, x, torch.nan).requires_grad_() for x in inputs(1, 96, dtype=torch.float32))
    with pytest.warns(RuntimeWarning, match="NaN") if laws.INTERPRETED else nullcontext():
        out = attention.attention(q, k, v, documents=documents, impl="triton")
        grads = torch.autograd.grad(out, (q, k, v), torch.where(mine, torch.ones_like(out), torch.nan))
    assert all(x[:, 32:64].isfinite().all() for x in (out, *grads))


# ---- what it costs, what it refuses
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", (*PATTERNS.values(), Pattern("fixed", 6, 6), Pattern("strided", 1), *BIGBIRDS), ids=str
)
def test_flops_count_the_pairs(pattern):
    q, k, v = inputs(2, 30, 4, 2, 8, s=50)
    at = torch.arange(50)
    pairs = int(pattern.visible(at[20:, None], at[None]).sum())
    assert attention.attention.flops(q, k, v, pattern=pattern) == 4 * 2 * 4 * 8 * pairs


def test_which_form_serves():
    q, k, v = inputs(1, 40, dtype=torch.float32)
    if laws.DEVICE == "cuda":
        assert registry.explain("attention", q, k, v, pattern=PATTERNS["fixed"]).chosen == "triton"
        return
    said = registry.explain("attention", q, k, v)
    assert said.chosen == "blocked" and "interpreted" in said.reasons["triton"]
    assert registry.explain("attention", q, k, v, impl="fused").chosen == "fused"
    assert registry.explain("attention", q[:, 39:], k, v).chosen == "reference"
    assert registry.explain("attention", q[:, :1], k[:, :1], v[:, :1]).chosen == "reference"
    with pytest.raises(ValueError, match="there are 20 queries of 40 positions"):
        attention.attention(q[:, 20:], k, v, impl="fused")
    with pytest.raises(ValueError, match=r"there are 40 queries of 20 keys; .* at most as many"):
        attention.attention(q, k[:, 20:], v[:, 20:], impl="blocked")
    assert registry.explain("attention", q[:, 20:], k, v).chosen == "blocked"
    with pytest.raises(ValueError, match="neither patterns nor documents"):
        attention.attention(q, k, v, pattern=PATTERNS["fixed"], impl="fused")
    for impl in ("triton", "fused"):
        with pytest.raises(ValueError, match="it does not cap scores"):
            attention.attention(q, k, v, cap=5.0, impl=impl)
    assert registry.explain("attention", q, k, v, cap=5.0).chosen == "blocked"


def test_what_it_refuses():
    q, k, v = inputs(1, 8, 4, 2, 8, dtype=torch.float32)
    documents = documents_of(1, 8)
    for given, said in (
        ((q.double(), k, v), r"k is torch.float32 \[1, 8, 2, 8\]; give tensors .* of one floating dtype"),
        ((q, k, v[:, :7]), "as many tokens and heads as each other"),
        ((q[..., :3, :], k, v), "q has 3 heads of 8 and k 2; give a multiple"),
        ((q, k[:, :7], v[:, :7]), "there are 8 queries of 7 keys"),
    ):
        with pytest.raises(ValueError, match=f"attention: .*{said}"):
            attention.attention(*given, impl="triton")
    with pytest.raises(ValueError, match=r"documents are torch.int64 \[1, 7\]; give .*, \[1, 8\]"):
        attention.attention(q, k, v, documents=documents[:, :7], impl="triton")
    for given, options, said in (
        ((*inputs(1, 2, 1, 1, 257, dtype=torch.float32),), {}, "head dims up to 256"),
        ((q, k, v), {"scale": 0.0}, "scale is 0.0; it must be above 0"),
    ):
        with pytest.raises(ValueError, match=f"attention: impl='triton' does not serve this call: .*{said}"):
            attention.attention(*given, impl="triton", **options)
