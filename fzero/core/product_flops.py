"""FLOPs of operators, and a partitioner that knows them.

Products and attention count, a multiply-add as two, and nothing else. torch.utils.flop_counter has formulas for most of
torch's own operators, FORMULAS for others and for fzero's.

Ref: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", appendix A.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

Formula = Callable[..., int]  # the operator's own arguments, and its result as out_val

# By the operator, an OpOverloadPacket; kernels.custom_operator adds fzero's, each where it is defined.
FORMULAS: dict[Any, Formula] = {}


def add_formula(packet: Any, formula: Formula) -> None:
    """Say what an operator costs, whose result is dear, so that a partitioner keeps it."""
    formula._get_raw = True  # type: ignore[attr-defined]  # torch's counter hands it the tensors, and not their shapes
    FORMULAS[packet] = formula


def flop_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """The FLOPs of one operator (an OpOverload) with these arguments and result; 0 unless a product or attention."""
    packet = getattr(func, "_overloadpacket", func)
    formula = FORMULAS.get(packet) or flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


@contextlib.contextmanager
def partition_by_cost() -> Iterator[None]:
    """A context in which torch's partitioner takes every operator with a formula as one that costs its FLOPs."""
    from fzero.core.torch_private import partitioners

    plain, saved_formulas = partitioners.get_default_op_list, dict(flop_registry)

    def list_operators() -> Any:
        operators = plain()
        dear = type(operators.compute_intensive_ops)((*operators.compute_intensive_ops, *flop_registry))
        return dataclasses.replace(operators, compute_intensive_ops=dear)

    try:
        flop_registry.update(FORMULAS)
        partitioners.get_default_op_list = list_operators
        yield
    finally:
        partitioners.get_default_op_list = plain
        flop_registry.clear()
        flop_registry.update(saved_formulas)


# ---- torch's operators ----------------------------------------------------------------------------------------------


def _grouped(x: Tensor, w: Tensor, *extra: Any, out_val: Any = None, **kwargs: Any) -> int:
    return 2 * math.prod(x.shape) * w.shape[-1]  # rows or columns in groups: each element of x meets a row of one group


def _added(x: Tensor, a: Tensor, b: Tensor, *extra: Any, out_val: Any = None, **kwargs: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _for_heads(q: Tensor, *tensors: Tensor) -> Iterator[tuple[int, ...]]:
    """The shapes [B, H, S, K] of keys and values with a head for each of q's, which torch 2.11 counts alone."""
    return ((x.shape[0], q.shape[1], *x.shape[2:]) for x in tensors)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *extra: Any, out_val: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(q.shape, *_for_heads(q, k, v))


def _sdpa_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *extra: Any, out_val: Any = None, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(g.shape, q.shape, *_for_heads(q, k, v))


for name, formula in (
    ("_scaled_dot_product_flash_attention_for_cpu", _sdpa),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", _sdpa_backward),
    ("_grouped_mm", _grouped),
    ("addmm", _added),  # torch's formulas refuse the factors that a compiled graph gives by position
    ("addmm_", _added),
    ("baddbmm", _added),
    ("baddbmm_", _added),
):
    add_formula(getattr(torch.ops.aten, name), formula)
