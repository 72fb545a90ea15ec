"""Norms, tables, lookups, pads, pools and windows in a user's own code, with gradients that are summed in float32.

On a CPU torch sums the gradients of what they read many times in its own dtype, which in bfloat16 stops at some
hundreds of ones (see kernels.embedding and kernels.norm).
"""

from __future__ import annotations

import contextlib
import math
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


# The arguments of what follows have torch's names: a call may give any of them by name.


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    like = bias if weight is None else weight
    if not _narrow(input) or like is None or like.dim() == 0 or input.shape[-like.dim() :] != like.shape:
        return None
    weight = torch.ones_like(like) if weight is None else weight
    bias = torch.zeros_like(like) if bias is None else bias
    return layer_norm(input.flatten(-like.dim()), weight.flatten(), bias.flatten(), eps).reshape(input.shape)


def _native_layer_norm(*args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
    out = _layer_norm(*args, **kwargs)
    return None if out is None else (out, None, None)  # the statistics are for torch's own backward pass


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if not _narrow(weight) or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    rows = look_up(weight, input)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight))[..., None], rows.detach(), rows)


def _aten_embedding(weight: Tensor, index: Tensor, padding_idx: int = -1, *options: Any) -> Tensor | None:
    return _embedding(index, weight, None if padding_idx < 0 else padding_idx, None, 2.0, *options)


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


def _looks_up(input: Any, index: Any, *_: Any) -> bool:
    """Whether an indexing may give a row several times."""
    parts = index if isinstance(index, (tuple, list)) else (index,)
    int_indices = [i for i in parts if isinstance(i, Tensor) and i.dtype != torch.bool]
    return _narrow(input) and any(i.numel() > FEW for i in int_indices)


def _bags(
    input: Any,
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


def _selects(input: Any, dim: Any, index: Any, **_: Any) -> bool:
    return index.numel() > FEW


def _of_dims(sizes: Any, dims: int) -> list[int]:
    """The sizes of so many dimensions, of a number or a list of them."""
    sizes = list(sizes) if isinstance(sizes, tuple | list) else [sizes]
    return sizes * dims if len(sizes) == 1 else sizes


def _overlap(dims: int, size: Any, step: Any) -> bool:
    """Whether an element is in more than FEW windows of this size, at steps of this or of the size."""
    size = _of_dims(size, dims)
    steps = _of_dims(step, dims) if step not in (None, [], ()) else size
    return math.prod(-(-n // max(1, stride)) for n, stride in zip(size, steps)) > FEW


def _pools(dims: int) -> Callable[..., bool]:
    return lambda input, kernel_size, stride=None, *_, **__: _overlap(dims, kernel_size, stride)


def _norm_pools(dims: int) -> Callable[..., bool]:
    return lambda input, norm_type, kernel_size, stride=None, *_, **__: _overlap(dims, kernel_size, stride)


def _spreads(dims: int) -> Callable[..., bool]:
    """Whether an adaptive pool reads an element more than FEW times."""

    def serves(input: Any, output_size: Any, *_: Any, **__: Any) -> bool:
        input_sizes = input.shape[-dims:]
        output_sizes = [n if m is None else m for n, m in zip(input_sizes, _of_dims(output_size, dims))]
        return (
            bool(input.numel())
            and math.prod(-(-m // n) + 1 if m > n else 1 for n, m in zip(input_sizes, output_sizes)) > FEW
        )

    return serves


def _unfolds(input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> bool:
    return _overlap(2, kernel_size, stride)


def _folds(
    input: Any, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> bool:
    return _overlap(2, kernel_size, stride)


def _slides(input: Any, dimension: int, size: int, step: int) -> bool:
    return _overlap(1, size, step)


def _replicates(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> bool:
    return mode == "replicate"


def _averages(
    input: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *_: Any, **__: Any
) -> bool:
    return mode == "area"


aten = torch.ops.aten


POOLS = {  # of a number of dimensions, by the calls of them that are served
    "max_pool{}d": _pools,
    "max_pool{}d_with_indices": _pools,
    "avg_pool{}d": _pools,
    "lp_pool{}d": _norm_pools,
    "adaptive_avg_pool{}d": _spreads,
    "_adaptive_avg_pool{}d": _spreads,
    "adaptive_max_pool{}d": _spreads,
    "adaptive_max_pool{}d_with_indices": _spreads,
}


def _windows() -> dict[Any, Callable[..., Any]]:
    """The forms of pads, pools and windows, in which an element may be read any number of times."""
    forms = {
        F.pad: _widened(F.pad, _replicates),
        F.interpolate: _widened(F.interpolate, _averages),
        F.unfold: _widened(F.unfold, _unfolds),
        F.fold: _widened(F.fold, _folds),  # which sums in its forward pass
        aten.im2col.default: _widened(aten.im2col.default, _unfolds),
        aten.col2im.default: _widened(aten.col2im.default, _folds),
        **{f: _widened(f, _slides) for f in (Tensor.unfold, aten.unfold.default)},
    }
    for dims in (1, 2, 3):
        pad = getattr(aten, f"replication_pad{dims}d").default
        forms[pad] = _widened(pad)
        for kind, serves in POOLS.items():
            name = kind.format(dims)
            functions = [getattr(namespace, name, None) for namespace in (F, torch, aten)]
            for function in filter(None, functions):
                function = getattr(function, "default", function)
                forms[function] = _widened(function, serves(dims))
    return forms


FORMS: dict[Any, Callable[..., Any]] = {  # of a function, what gives its result, or None for a call that it leaves
    **{f: _widened(f, _looks_up) for f in (Tensor.__getitem__, torch.take, Tensor.take, aten.index.Tensor)},
    aten.take.default: _widened(aten.take.default, _looks_up),
    **{f: _widened(f, _selects) for f in (torch.index_select, Tensor.index_select, aten.index_select.default)},
    F.embedding_bag: _widened(F.embedding_bag, _bags),
    aten._embedding_bag.default: _widened(aten._embedding_bag.default, _aten_bags),
    **{f: _widened(f) for f in (F.grid_sample, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)},
    **_windows(),
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
