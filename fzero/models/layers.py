"""The layers the models share. Weights are [in, out]; every function computes in the dtype of its activations x."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from fzero import random
from fzero.kernels.attention import FULL, Pattern, attention
from fzero.models.base import Batch, Ctx
from fzero.pytree import Tree


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x [..., in] @ w [in, out] (+ b [out])."""
    y = x @ w.to(x.dtype)
    return y if b is None else y + b.to(x.dtype)


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * scale over the last dim, in float32 or wider (Zhang & Sennrich 2019, equation 4)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(x.dtype) * scale.to(x.dtype)


def layer_norm(x: Tensor, scale: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * scale + bias over the last dim, in float32 or wider (Ba et al. 2016, section 3.1)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * scale.to(x.dtype) + bias.to(x.dtype)


def dropout(x: Tensor, rate: float, name: str, ctx: Ctx) -> Tensor:
    """x [B, T, D] with each element zeroed with probability `rate` and the others scaled by 1 / (1 - rate).

    The mask depends on the key, the layer, `name` and the element's index in the step's global batch: the same however that is split.
    """
    if rate == 0.0 or isinstance(ctx.key, tuple):
        return x
    key = random.fold_in(ctx.key, name)
    if isinstance(ctx.layer, Tensor):
        key = random.fold_in(key, ctx.layer)
    first = torch.as_tensor(ctx.first, device=x.device) * x[0].numel()
    keep = random.bernoulli(key, 1.0 - rate, x.shape, first=first)
    return torch.where(keep, x * (1.0 / (1.0 - rate)), torch.zeros((), dtype=x.dtype, device=x.device))


def document_positions(documents: Tensor) -> Tensor:
    """The position of each token within its document (int64 [B, T]), from the documents' numbers (int [B, T], each contiguous)."""
    position = torch.arange(documents.shape[-1], device=documents.device).expand(documents.shape)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return position - torch.where(starts, position, 0).cummax(-1).values


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the long wavelengths (Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.4.2)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device | None = None) -> Tensor:
    """The angles per position (float32 [K / 2]): theta^(-2 i / K), the long wavelengths divided by the scaling's factor."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).to(torch.float32) / head_dim
    frequency = 1.0 / (theta**exponent)
    if scaling is None:
        return frequency
    wavelength = 2.0 * math.pi / frequency
    smooth = (scaling.original_max_len / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1.0 - smooth) * frequency / scaling.factor + smooth * frequency
    low = wavelength > scaling.original_max_len / scaling.low_freq_factor
    high = wavelength < scaling.original_max_len / scaling.high_freq_factor
    return torch.where(low, frequency / scaling.factor, torch.where(high, frequency, between))


def rope(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """x [B, T, H, K] with the halves of each head turned by positions [T] x frequencies [K / 2] (Su et al. 2021, equation 34).

    The two halves of a head are a pair, as in Llama's published weights in Hugging Face layout.
    """
    angle = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = (t.to(x.dtype)[:, None, :] for t in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def self_attention(
    p: Tree,
    x: Tensor,
    ctx: Ctx,
    *,
    heads: int,
    kv_heads: int,
    pattern: Pattern = FULL,
    frequencies: tuple[int, float, RopeScaling | None] | None = None,
) -> Tensor:
    """Attention of x [B, T, D] on itself and on what ctx.cache holds: projections p/w_q, w_k, w_v, w_o (and biases b_*), RoPE where
    `frequencies` (head_dim, theta, scaling) are given. With a cache the new keys and values are written into it, in place.
    """
    q, k, v = (linear(x, p[f"w_{n}"], p.get(f"b_{n}")) for n in "qkv")
    q = rearrange(q, "b t (h k) -> b t h k", h=heads)
    k, v = (rearrange(t, "b t (g k) -> b t g k", g=kv_heads) for t in (k, v))
    length = ctx.cache.length if ctx.cache else 0
    if frequencies is not None:
        positions = torch.arange(length, length + x.shape[1], device=x.device)
        angles = rope_frequencies(*frequencies, device=x.device)
        q, k = rope(q, positions, angles), rope(k, positions, angles)
    if ctx.cache:
        end = length + x.shape[1]
        ctx.cache.k[:, length:end], ctx.cache.v[:, length:end] = k, v
        k, v = ctx.cache.k[:, :end], ctx.cache.v[:, :end]
    documents = None if isinstance(ctx.documents, tuple) else ctx.documents
    out = attention(q, k, v, pattern=pattern, documents=documents)
    return linear(rearrange(out, "b t h k -> b t (h k)"), p["w_o"], p.get("b_o"))


def swiglu(p: Tree, x: Tensor) -> Tensor:
    """silu(x w_gate) * (x w_up), times w_down (Shazeer 2020, "GLU variants improve transformer", equation 6)."""
    return linear(torch.nn.functional.silu(linear(x, p["w_gate"])) * linear(x, p["w_up"]), p["w_down"])


def embed_tokens(w: Tensor, batch: Batch, ctx: Ctx) -> Tensor:
    """Rows of w [V, D] for batch["tokens"], in the dtype of the computation: [B, T, D]."""
    return torch.nn.functional.embedding(batch["tokens"], w).to(ctx.dtype)
