"""The bits of a tensor as numbers of another dtype, also under vmap: PyTorch has no rule for that before 2.12."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.core.autodiff import Function, transforms


def reinterpret(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.view(dtype)`: the same memory as numbers of `dtype`, without a gradient, under every transform.

    >>> torch.vmap(lambda x: reinterpret(x, torch.int32))(torch.tensor([[1.0, -0.0]]))
    tensor([[ 1065353216, -2147483648]], dtype=torch.int32)
    """
    return _Reinterpreted.apply(x, dtype) if "Vmap" in transforms() else x.view(dtype)


class _Reinterpreted(Function):
    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[None, None]:
        return None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, _: None) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int | None]:
        first = in_dims[0]
        return reinterpret(x if first is None else x.movedim(first, 0), dtype), None if first is None else 0
