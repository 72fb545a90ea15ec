"""Norms, tables and their lookups in a user's own code, with gradients that are summed over tokens in float32.

On a CPU torch sums the gradients of their parameters in the parameters' dtype, which in bfloat16 stops at some hundreds
of ones (see kernels.embedding and kernels.norm).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fzero.core import pytree
from fzero.core.device import HOST, fake_device_of, kind_of
from fzero.kernels.embedding import look_up
from fzero.kernels.norm import layer_norm

NARROW = (torch.bfloat16, torch.float16)
FEW = 16  # rows that are looked up: their sum has no error to speak of


def _narrow(x: Any) -> bool:
    if not isinstance(x, Tensor) or x.dtype not in NARROW:
        return False
    return x.device == HOST or (fake_device_of(x) is not None and kind_of(x) == "cpu")  # of a plan for a CPU


def _layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    if not _narrow(x) or weight is None or weight.dim() != 1:
        return None
    return layer_norm(x, weight, torch.zeros_like(weight) if bias is None else bias, eps)


def _native_layer_norm(*args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
    out = _layer_norm(*args, **kwargs)
    return None if out is None else (out, None, None)  # the statistics are for torch's own backward pass


def _embedding(
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if not _narrow(weight) or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    rows = look_up(weight, index)
    if padding_idx is None:
        return rows
    return torch.where((index == padding_idx % len(weight))[..., None], rows.detach(), rows)


def _aten_embedding(weight: Tensor, index: Tensor, padding_idx: int = -1, *rest: Any) -> Tensor | None:
    return _embedding(index, weight, None if padding_idx < 0 else padding_idx, None, 2.0, *rest)


def _widened(function: Callable[..., Any], serves: Callable[..., bool] = lambda *_, **__: True) -> Callable[..., Any]:
    """The form of a function that computes in float32; of a call that `serves` is true for."""

    def form(*args: Any, **kwargs: Any) -> Any:
        dtypes = [x.dtype for x in pytree.leaves((args, kwargs)) if _narrow(x)]
        if not dtypes or not serves(*args, **kwargs):
            return None
        args, kwargs = pytree.map(lambda x: x.float() if _narrow(x) else x, (args, kwargs))
        wide = lambda x: isinstance(x, Tensor) and x.is_floating_point()  # noqa: E731
        return pytree.map(lambda x: x.to(dtypes[0]) if wide(x) else x, function(*args, **kwargs))

    return form


def _looks_up(x: Any, index: Any, *_: Any) -> bool:
    """Whether an indexing of x may give a row several times."""
    parts = index if isinstance(index, (tuple, list)) else (index,)
    whole = [i for i in parts if isinstance(i, Tensor) and i.dtype != torch.bool]
    return _narrow(x) and any(i.numel() > FEW for i in whole)


def _bags(
    index: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    **_: Any,
) -> bool:
    return max_norm is None and not scale_grad_by_freq and not sparse


def _aten_bags(
    weight: Any, index: Any, offsets: Any, scaled: bool = False, mode: int = 0, sparse: bool = False, *_: Any
) -> bool:
    return not scaled and not sparse


aten = torch.ops.aten
FORMS: dict[Any, Callable[..., Any]] = {  # of a function, what gives its result, or None for a call that it leaves
    **{f: _widened(f, _looks_up) for f in (Tensor.__getitem__, torch.take, Tensor.take, aten.index.Tensor)},
    aten.take.default: _widened(aten.take.default, _looks_up),
    F.embedding_bag: _widened(F.embedding_bag, _bags),
    aten._embedding_bag.default: _widened(aten._embedding_bag.default, _aten_bags),
    **{f: _widened(f) for f in (F.grid_sample, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)},
    F.layer_norm: _layer_norm,
    F.embedding: _embedding,
    aten.native_layer_norm.default: _native_layer_norm,
    aten.embedding.default: _aten_embedding,
}


class WideSums(TorchFunctionMode):
    """A mode in which FORMS stand for torch's functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = FORMS[func](*args, **kwargs) if func in FORMS else None
        return func(*args, **kwargs) if out is None else out


def wide_sums(tensors: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """The mode, for a call with these parameters; nothing where none of them is narrow."""
    return WideSums() if any(_narrow(x) for x in tensors) else contextlib.nullcontext()
