"""Very long sequences on one GPU, for gpu.py: layers of the 8B's width, and attention by blocks of queries beside one
call."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
from gpu_kernels import seconds
from gpu_place import Cases, Where
from gpu_runs import beside_plan, job_of, measured, table_of
from torch import Tensor

from fzero.kernels.attention import attention

LENGTHS = 131_072, 262_144, 524_288
BLOCK = 16_384  # queries
HEADS, GROUPS, DIM = 32, 8, 128  # of the 8B


def long_cases(where: Where) -> Cases:
    """Each length: attention in blocks, and steps of two layers with their inputs and states on the host."""
    for tokens in (64,) if where.tiny else LENGTHS:
        yield f"attention, {tokens}", functools.partial(in_blocks, tokens, 32 if where.tiny else BLOCK, where)
        yield f"layers, {tokens}", functools.partial(layers, tokens, where)


def in_blocks(tokens: int, block: int, where: Where) -> dict[str, Any]:
    """Seconds of forward and backward pass of causal attention: one call, and a call for each block of queries on the
    keys up to its end, by the same form."""
    form = "triton" if where.device == "cuda" else "auto"
    shapes = ((1, tokens, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    leaves = [torch.randn(s, device=where.device, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
    q, k, v = leaves

    def gradients(out: Tensor, *of: Tensor) -> None:
        torch.autograd.grad(out, of, torch.ones_like(out))

    def blocks() -> None:
        for start in range(0, tokens, block):
            end = start + block
            gradients(attention(q[:, start:end], k[:, :end], v[:, :end], impl=form), q, k, v)

    one = seconds(lambda: gradients(attention(q, k, v, impl=form), q, k, v), where.device)
    parts = seconds(blocks, where.device)
    print(f"  {tokens:,} tokens: one call {one:.4g} s, {-(-tokens // block)} blocks {parts:.4g} s", flush=True)
    return {"one_s": one, "blocks_s": parts, "one over blocks": one / parts}


def layers(tokens: int, where: Where) -> dict[str, Any]:
    """A step of two layers over one sequence, beside its plan."""
    table = table_of("llama-8b", 1, tokens, remat="full", offload="acts=host,opt=host,grads=host,params=host")
    table |= {"model": {"n_layers": 2, "max_len": tokens, "mlp_tokens": BLOCK}}
    job = job_of(table, where)
    row = measured(job, where, times=1)
    gc.collect()
    row |= {"table": table, "plan": beside_plan(job, row, where)}
    print(f"  {tokens:,} tokens: {row['tokens_per_s']:,.0f} tokens/s, {row['peak_bytes'] / 1e9:.1f} GB", flush=True)
    return row
