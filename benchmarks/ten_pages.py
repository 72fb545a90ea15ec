"""Attention over pages for ten.py: decoding, and a chunk of a prompt, beside PyTorch's attention on contiguous keys;
and what the canonical forms cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from kernel_cases import pages_of
from ten_rows import Rows, Where, median_seconds
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from fzero.kernels.linear import linear
from fzero.kernels.paged_attention import paged_attention


class Heads(NamedTuple):
    """Of a model: query heads, key/value heads, and their sizes."""

    heads: int
    groups: int
    key: int
    value: int


LLAMA, DEEPSEEK = Heads(32, 8, 128, 128), Heads(128, 1, 576, 512)  # of 8B; the latents are keys and values
BATCHES, LENGTHS = (1, 8, 32, 128), (512, 8192)
CHUNK = 512
CASES: dict[str, tuple[Heads, Sequence[tuple[int, int]]]] = {  # rows (position of the first query, queries)
    **{f"decode B={b} S={s}": (LLAMA, [(s - 1, 1)] * b) for s in LENGTHS for b in BATCHES},
    "guesses B=8 S=8192": (LLAMA, [(8188, 4)] * 8),
    "chunk S=512": (LLAMA, [(0, CHUNK)]),
    "chunk S=8192": (LLAMA, [(8192 - CHUNK, CHUNK)]),
    "chunk and decode B=32 S=8192": (LLAMA, [(8192 - CHUNK, CHUNK), *[(8191, 1)] * 32]),
    "latents B=1 S=8192": (DEEPSEEK, [(8191, 1)]),
    "latents B=32 S=8192": (DEEPSEEK, [(8191, 1)] * 32),
    "latents chunk S=8192": (DEEPSEEK, [(8192 - CHUNK, CHUNK)]),
}


CANONICAL = "decode B=32 S=512", "decode B=32 S=8192", "chunk S=8192"
PRODUCTS = (1, 32, 512, 4096)  # rows of x [M, 4096] @ w [4096, 14336]


def rows(where: Where) -> Rows:
    """Each case over pages by the form that "auto" takes, and, of rows alike, by PyTorch on contiguous keys; some by
    the canonical form, and its products beside PyTorch's."""
    for name, (heads, spans) in CASES.items():
        if where.tiny:
            heads = Heads(4, 1, 24, 16) if heads is DEEPSEEK else Heads(4, 2, 16, 16)
            spans = [(first % 32, min(n, 8)) for first, n in spans[:4]]
        yield f"{name}: pages", functools.partial(over_pages, heads, spans, where, "auto")
        if name in CANONICAL:
            yield f"{name}: canonical", functools.partial(over_pages, heads, spans, where, "canonical")
        if len({*spans}) == 1 and heads.key == heads.value:
            yield f"{name}: contiguous", functools.partial(contiguous, heads, spans, where)
    for m in PRODUCTS:
        yield f"product M={m}", functools.partial(product, m, where)


def figures(run: Callable[[], Tensor], heads: Heads, spans: Sequence[tuple[int, int]], where: Where) -> dict[str, Any]:
    """Microseconds of a call, bytes/s of one read of its keys and values, FLOP/s of the pairs that see each other."""
    seconds = median_seconds(run, where.device)
    numbers = heads.groups * (heads.key + (heads.value if heads.key == heads.value else 0))
    read = sum(first + n for first, n in spans) * numbers * 2
    pairs = sum(n * first + n * (n + 1) // 2 for first, n in spans)
    flop = 2 * pairs * heads.heads * (heads.key + heads.value)
    return {"us": 1e6 * seconds, "bytes_per_s": read / seconds, "flop_per_s": flop / seconds}


def product(m: int, where: Where) -> dict[str, Any]:
    """Microseconds of the canonical product and of PyTorch's; whether the first row alone has the bits of the batch."""
    m, k, n = (min(m, 8), 32, 40) if where.tiny else (m, 4096, 14336)
    x, w = (torch.randn(shape, device=where.device, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    canonical = functools.partial(linear, impl="canonical")
    times = {name: 1e6 * median_seconds(functools.partial(run, x, w), where.device) for name, run in
             (("us", canonical), ("torch_us", torch.matmul))}  # fmt: skip
    return times | {"alone": torch.equal(canonical(x[:1], w), canonical(x, w)[:1])}


def over_pages(heads: Heads, spans: Sequence[tuple[int, int]], where: Where, impl: str) -> dict[str, Any]:
    """The operation, its form, and whether a second run, and the last row alone, have its bits."""
    table, starts, positions, count = pages_of(spans, where.device)
    draw = functools.partial(torch.randn, device=where.device, dtype=torch.bfloat16)
    q = draw(len(positions), heads.heads, heads.key)
    k = draw(count, 16, heads.groups, heads.key)
    v = draw(*k.shape[:-1], heads.value) if heads.key == heads.value else k[..., : heads.value]
    given = q, k, v, table, starts, positions
    run = functools.partial(paged_attention, *given, impl=impl)
    last = spans[-1][1]
    alone = paged_attention(q[-last:], k, v, table[-1:], starts[-2:] - starts[-2], positions[-last:], impl=impl)
    out = run()
    bits = {"repeats": torch.equal(run(), out), "alone": torch.equal(alone, out[-last:])}
    form, _ = paged_attention.choose(impl, given, {})
    return figures(run, heads, spans, where) | bits | {"form": form}


def contiguous(heads: Heads, spans: Sequence[tuple[int, int]], where: Where) -> dict[str, Any]:
    """PyTorch's scaled_dot_product_attention on [B, heads, S, K]; for several queries with a key head for each."""
    (first, n), b = spans[0], len(spans)
    draw = functools.partial(torch.randn, device=where.device, dtype=torch.bfloat16)
    groups = heads.groups if n == 1 else heads.heads
    q, k, v = (draw(b, h, t, heads.key) for h, t in ((heads.heads, n), (groups, first + n), (groups, first + n)))
    options: dict[str, Any] = {"enable_gqa": True} if n == 1 else {"attn_mask": causal_lower_right(n, first + n)}
    run = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, **options)
    return figures(run, heads._replace(groups=groups), spans, where)
