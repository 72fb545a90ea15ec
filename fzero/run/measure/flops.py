"""FLOPs: of the model by the papers' formulas, and of the hardware by counting the operators that run.

Model FLOPs are what training on a token needs, whatever is recomputed; MFU is their share of the peak. Hardware FLOPs
are those of the operators as they ran, recomputation included; HFU is their share. A multiply-add counts as two.
Products and attention count, nothing else.

Attention has two conventions. "full" counts every pair of positions, "causal" the half that a causal model uses. Of the
operators torch's own attention counts full, as torch.utils.flop_counter has it, and fzero's kernels the pairs that
their pattern leaves, as they skip the others. Documents are never counted off: how they lie is data.

Ref: Chowdhery et al. 2022, "PaLM", appendix B (MFU); Korthikanti et al. 2022, "Reducing activation recomputation in
large transformer models", section 5 and appendix A (hardware FLOPs).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from fzero.core.autodiff import Remat
from fzero.kernels import attention_tiled
from fzero.kernels.attention_pattern import Pattern
from fzero.kernels.registry import FILES
from fzero.models.base import leaf_shapes
from fzero.models.presets import without_adapters
from fzero.models.score import head_of
from fzero.run.build import Job
from fzero.sharding.slices import is_stacked

# Products of [queries, K] by [K, keys], or of the same size, that a kernel makes of each pair of positions.
FORWARD_PRODUCTS = 2  # q k^T, p v
BACKWARD_PRODUCTS = 5  # q k^T again, g v^T, and those that give dq, dk and dv
SPLIT_PRODUCTS = 7  # in two kernels, one for dq and one for dk and dv: q k^T and g v^T are made in both


class TokenFlop(NamedTuple):
    """FLOPs of training on one token, of the model and of the hardware, each in both conventions of attention."""

    model: float  # 6 N + 12 L T D
    model_causal: float  # 6 N + 6 L T D
    hardware: float
    hardware_causal: float


def token_flop(job: Job) -> TokenFlop:
    """Count the FLOPs of training on one token by formulas: 6 N + 12 L T D (causal: 6 L T D), and
    recomputation.

    N: parameters that are multiplied with (the head also if it is tied to the embedding, rows that are looked up
    not; of a token's experts, the top_k). D: the dims of all heads of a layer. T: seq_len.
    Of a frozen leaf 4 N count: its outputs and the gradient of its inputs.
    Hardware: of the model, and what the remat policy and tiled MLPs compute again: 2 N and 4 L T D (causal: 2 L T D) of
    the layers where remat is full or every:K, 2 N of the MLPs where they are tiled. What a partitioner chooses to
    recompute (selective:F), what kernels make again inside, and the optimizer's products are not in it; `fzero plan`
    counts operator by operator.

    Ref: Chowdhery et al. 2022, "PaLM", appendix B, which counts full; causal as in Dao 2023, "FlashAttention-2",
    section 4.1; hardware: Korthikanti et al. 2022, arXiv:2205.05198, appendix A.
    """
    c: Any = without_adapters(job.model.config)
    t, tied = job.config.train, getattr(job.model.config, "tied", False) and head_of(job.model.config) is None
    active = layers = mlps = 0.0
    trained = {name for name, leaf in job.plan.leaves.items() if leaf.trained}
    for name, shape in leaf_shapes(job.model).items():
        numel = math.prod(shape)
        looked_up = name == "embed/positions" or (name == "embed/tokens" and not tied)
        share = c.top_k / c.n_experts if "/moe/w_" in name else 1.0
        needed = 1.0 if name in trained else 2 / 3  # a frozen weight has no gradient of its own: 4 N
        active += 0.0 if looked_up else needed * share * numel
        layers += share * numel if is_stacked(name) else 0.0
        mlps += numel if is_stacked(name) and "/mlp/" in name else 0.0
    heads = getattr(c, "n_heads", 0)
    # Of a head's key and value, if they differ: each is multiplied with once.
    key = getattr(c, "key_dim", c.d_model // heads) if heads else 0
    width = heads * (key + getattr(c, "value_dim", key)) / 2
    attention = float(c.n_layers * job.config.data.seq_len * width)  # L T D
    model, causal = 6.0 * active + 12.0 * attention, 6.0 * active + 6.0 * attention
    again, tiles = Remat.parse(t.remat).every > 0, 2.0 * mlps * in_parts(c)
    full_again, causal_again = ((2.0 * layers + pairs * attention) * again + tiles for pairs in (4.0, 2.0))
    return TokenFlop(model, causal, model + full_again, causal + causal_again)


def in_parts(config: Any) -> bool:
    """Whether a model's MLP is computed in tiles or chunks of tokens: backward its hidden units are made again."""
    return getattr(config, "mlp_tiles", 1) > 1 or getattr(config, "mlp_tokens", 0) > 0


def mfu(model_flop_per_token: float, tokens_per_s: float, peak_flop_per_s: float) -> float:
    """The model FLOPs utilization of all processors together: observed tokens/s over those at peak.

    peak_flop_per_s: of all processors. Ref: Chowdhery et al. 2022, "PaLM", appendix B.

    >>> round(mfu(6 * 7e9, 2_000.0, 312e12), 3)
    0.269
    """
    return model_flop_per_token * tokens_per_s / peak_flop_per_s


def hfu(hardware_flop: float, step_s: float, peak_flop_per_s: float) -> float:
    """The hardware FLOPs utilization of one processor: its FLOP/s in a step, recomputation included, over its peak.

    The optimizer's products (Muon's) count as time, not as FLOPs.

    Ref: Korthikanti et al. 2022, section 5 ("hardware FLOPs utilization").
    """
    return hardware_flop / step_s / peak_flop_per_s


# ---- of operators ----------------------------------------------------------------------------------------------------


def flop_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """The FLOPs of one operator (an OpOverload) with these arguments and result; 0 unless a product or attention."""
    formula = _registry().get(getattr(func, "_overloadpacket", func))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


@functools.cache
def _registry() -> dict[Any, Callable[..., int]]:
    return {**flop_registry, **formulas()}


@functools.cache
def formulas() -> dict[Any, Callable[..., int]]:
    """The FLOPs of operators that torch.utils.flop_counter does not know, for its `custom_mapping`."""
    import importlib

    for file in FILES:
        importlib.import_module(f"fzero.kernels.{file}")
    ops, aten = torch.ops.fzero, torch.ops.aten
    found = {
        ops.tiled_forward: _tiled(FORWARD_PRODUCTS),
        ops.tiled_backward: _tiled(BACKWARD_PRODUCTS),
        ops.ring_forward: _ring(FORWARD_PRODUCTS),
        ops.ring_backward: _ring(BACKWARD_PRODUCTS),
        ops.flash_forward: _flash_forward,
        ops.flash_backward: _flash_backward,
        ops.flash_forward_at: _flash_forward_at,
        ops.flash_backward_at: _flash_backward_at,
        ops.library_forward: _library_forward,
        ops.library_backward: _library_backward,
        ops.grouped_mm: _grouped,
        ops.grouped_mm_triton: _grouped,
        ops.grouped_mm_dw: _grouped_dw,
        ops.grouped_mm_dw_triton: _grouped_dw,
        ops.float8_grouped_mm: _grouped_float8,
        ops.float8_grouped_mm_dw: _grouped_float8_dw,
        ops.float8_grouped_mm_emulated: _grouped,
        ops.float8_grouped_mm_dw_emulated: _grouped_dw,
        ops.symmetric_product: _symmetric,
        ops.float8_product: _turned,
        ops.float8_product_of: _turned,
        ops.float8_emulated: _product,
        aten._scaled_dot_product_flash_attention_for_cpu: _sdpa,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
        aten._grouped_mm: _grouped_by_torch,
        aten.addmm: _added,  # torch's formulas refuse the factors that a compiled graph gives by position
        aten.baddbmm: _added,
    }
    for formula in found.values():
        formula._get_raw = True  # torch's counter hands it the tensors, and not their shapes
    return found


@functools.lru_cache(maxsize=1024)
def pairs(kind: str, size: int, keep: int, queries: int, keys: int, first: int = 0) -> int:
    """How many (query, key) pairs a pattern leaves; query i is at position first + i, key j at j.

    >>> pairs("full", 0, 0, 4, 4)
    10
    """
    if kind == "full":  # sum of min(keys, position + 1)
        whole = min(max(0, keys - first), queries)  # queries that see up to themselves
        return whole * first + whole * (whole + 1) // 2 + (queries - whole) * keys
    return Pattern(kind, size, keep).pairs(first, queries, keys)


def _of_pairs(products: int, q: Tensor, count: int) -> int:
    b, _, h, k = q.shape
    return 2 * products * b * h * k * count


def _tiled(products: int) -> Callable[..., int]:
    """Of queries that are the last of the keys, or, as where they are is data, spread evenly over their positions."""

    def formula(
        q: Tensor, k: Tensor, v: Tensor, query: Tensor | None, *rest: Any, out_val: Any = None, **kwargs: Any
    ) -> int:
        number, size, keep = next(x for x in (*rest, *kwargs.values()) if isinstance(x, list | tuple))
        kind, t, s = attention_tiled.KINDS[number], q.shape[1], k.shape[1]
        if query is None:
            return _of_pairs(products, q, pairs(kind, size, keep, t, s, s - t))
        return _spread(products, q, k, kind, size, keep)

    return formula


def _spread(products: int, q: Tensor, k: Tensor, kind: str, size: int, keep: int) -> int:
    """Of queries that are spread evenly over the positions of the keys."""
    return _of_pairs(products, q, pairs(kind, size, keep, k.shape[1], k.shape[1]) * q.shape[1] // k.shape[1])


def _flash_forward_at(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None) -> int:
    return _spread(FORWARD_PRODUCTS, q, k, *rest[4:7])


def _flash_backward_at(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None) -> int:
    return _spread(SPLIT_PRODUCTS, q, k, *rest[6:9])


def _ring(products: int) -> Callable[..., int]:
    """Of a rank whose work is the mean of the ranks'."""

    def formula(q: Tensor, *rest: Any, out_val: Any = None, **kwargs: Any) -> int:
        given = (*rest, *kwargs.values())
        number, size, keep = next(x for x in given if isinstance(x, list | tuple))
        positions = next(x for x in given if isinstance(x, Tensor) and x.dim() == 2 and x.dtype == torch.int64)
        tokens = positions.numel()
        seen = pairs(attention_tiled.KINDS[number], size, keep, tokens, tokens)
        return _of_pairs(products, q, seen // positions.shape[0])

    return formula


def _seen(q: Tensor, k: Tensor, kind: str, size: int, keep: int, query_start: int, key_start: int) -> int:
    if kind == "full":
        return pairs(kind, size, keep, q.shape[1], k.shape[1], query_start - key_start)
    upto = pairs(kind, size, keep, q.shape[1], key_start + k.shape[1], query_start)
    return upto - pairs(kind, size, keep, q.shape[1], key_start, query_start)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None) -> int:
    kind, size, keep, _, *starts = rest[2:]
    return _of_pairs(FORWARD_PRODUCTS, q, _seen(q, k, kind, size, keep, *starts))


def _flash_backward(g: Tensor, h: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None) -> int:
    kind, size, keep, _, *starts = rest[4:]
    return _of_pairs(SPLIT_PRODUCTS, q, _seen(q, k, kind, size, keep, *starts))


def _library_forward(q: Tensor, k: Tensor, *rest: Any, out_val: Any = None) -> int:
    return _of_pairs(FORWARD_PRODUCTS, q, pairs("full", 0, 0, q.shape[1], k.shape[1]))


def _library_backward(g: Tensor, q: Tensor, k: Tensor, *rest: Any, out_val: Any = None) -> int:
    return _of_pairs(BACKWARD_PRODUCTS, q, pairs("full", 0, 0, q.shape[1], k.shape[1]))


def _grouped(x: Tensor, w: Tensor, ends: Tensor, out_val: Any = None) -> int:
    return 2 * x.shape[0] * w.shape[1] * w.shape[2]


def _grouped_dw(x: Tensor, g: Tensor, ends: Tensor, out_val: Any = None) -> int:
    return 2 * x.shape[0] * x.shape[1] * g.shape[1]


def _grouped_float8(x: Tensor, w: Tensor, *rest: Any, out_val: Any = None) -> int:
    return 2 * x.shape[0] * w.shape[1] * w.shape[2]


def _grouped_float8_dw(x: Tensor, g: Tensor, *rest: Any, out_val: Any = None) -> int:
    return 2 * x.shape[1] * x.shape[0] * g.shape[0]  # both lie turned


def _grouped_by_torch(x: Tensor, w: Tensor, *rest: Any, out_val: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(x.shape) * w.shape[-1]  # rows or columns in groups: each element of x meets a row of one group


def _symmetric(x: Tensor, *rest: Any, out_val: Any = None) -> int:
    batch, m, k = x.shape
    return batch * m * (m + 1) * k  # a triangle, its diagonal included, and mirrored


def _product(a: Tensor, b: Tensor, *rest: Any, out_val: Any = None) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[1]


def _turned(a: Tensor, a_inverse: Tensor, b: Tensor, *rest: Any, out_val: Any = None) -> int:
    return 2 * a.shape[0] * a.shape[1] * b.shape[0]


def _added(x: Tensor, a: Tensor, b: Tensor, *rest: Any, out_val: Any = None, **kwargs: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _sdpa_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(g.shape, q.shape, k.shape, v.shape)
