"""Attention of queries on keys and values in pages: those of many requests in one call, without a gradient.

Keys and values lie in pages of `page_tokens` positions. A row is what one step computes of a request: some consecutive
positions, the last of which is the last of its keys. Its block table names the pages of its positions in order, so that
the key at position s is in page table[r, s // page_tokens], line s % page_tokens. A query at position p sees the keys
at positions up to p of its own row that the pattern allows. Queries behind the last row see none: out is 0.

Shapes: q [N, H, K]; k_pages [P, page_tokens, G, K] and v_pages [P, page_tokens, G, V], which may be a view of k_pages
(DeepSeek's latents are keys and, without their last numbers, values); table int32 [R, pages of the longest row]; starts
int32 [R + 1], row r being the queries starts[r] to starts[r + 1]; positions int64 [N], of the queries; out [N, H, V].

Pages may have codes, int8 or float8_e4m3fn, of `quantize` with one block for each position and head, and their scales,
float32 [P, page_tokens, G, 1], beside them: (of keys, of values).

Ref: Kwon et al. 2023, "Efficient memory management for large language model serving with PagedAttention",
arXiv:2309.06180, section 4.1.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from fzero.kernels import attention, attention_canonical, paged_attention_triton
from fzero.kernels.attention_arguments import Positions, Scoring
from fzero.kernels.attention_pattern import FULL, Pattern
from fzero.kernels.custom_operator import on_cuda
from fzero.kernels.registry import Form, Op

Scales = tuple[Tensor, Tensor]


def reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    starts: Tensor,
    positions: Tensor,
    *,
    pattern: Pattern = FULL,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """The definition, row by row: the keys and values of its pages side by side, and `attention` on them."""
    out = q.new_zeros((*q.shape[:2], v_pages.shape[-1]))
    bounds = starts.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        length = int(positions[end - 1]) + 1
        pages = table[row, : -(-length // k_pages.shape[1])].long()
        k, v = (x[pages].flatten(0, 1)[None, :length] for x in (k_pages, v_pages))
        if scales is not None:
            factors = (x[pages].flatten(0, 1)[None, :length] for x in scales)
            k, v = ((x.to(torch.float32) * factor).to(q.dtype) for x, factor in zip((k, v), factors))
        seen = Positions(positions[start:end], torch.arange(length, device=q.device))
        options: dict[str, Any] = {"pattern": pattern, "positions": seen, "scale": scale, "cap": cap, "sinks": sinks}
        out[start:end] = attention.reference(q[None, start:end], k, v, **options)[0]
    return out


def _by_cpp(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    starts: Tensor,
    positions: Tensor,
    *,
    pattern: Pattern = FULL,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """`reference` with the bits of attention's canonical form, and the fastest on a CPU."""
    scoring = Scoring.of_call(q, pattern, scale, cap)
    pages = q, k_pages, v_pages, table, starts, positions
    return attention_canonical.paged_forward(*pages, sinks, scoring.numbers, *scoring[1:], *(scales or ()))


def _flops(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, *tensors: Tensor, **options: Any) -> int:
    """FLOPs of the two products if every query sees every position of its row's pages."""
    return 2 * q.shape[0] * q.shape[1] * (q.shape[2] + v_pages.shape[-1]) * table.shape[1] * k_pages.shape[1]


def _bytes(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, *tensors: Tensor, **options: Any) -> int:
    """Bytes of the queries, the results and one read of each row's pages."""
    size = k_pages[0].numel() + (0 if v_pages.data_ptr() == k_pages.data_ptr() else v_pages[0].numel())
    lines = 0 if options.get("scales") is None else 4 * table.numel() * sum(x[0].numel() for x in options["scales"])
    return 2 * q.nbytes + table.numel() * size * k_pages.element_size() + lines


paged_attention = Op(
    "paged_attention",
    reference,
    Form("triton", paged_attention_triton.attend_pages, supports=paged_attention_triton.serves, prefers=on_cuda),
    Form("canonical", _by_cpp, supports=attention_canonical.supports_pages),
    flops=_flops,
    bytes=_bytes,
)
