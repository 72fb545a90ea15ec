"""A Model of somebody's own functions: they draw by the step's key, and are pure.

Norms, tables, lookups, pads, pools and windows in a user's own code get gradients that are summed in float32: on a CPU
torch sums them in their own dtype, which in bfloat16 stops at some hundreds of ones (see kernels.embedding and
kernels.norm).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fzero import core
from fzero.core import prng, pytree
from fzero.core.arguments import expect_kind
from fzero.core.device import HOST, fake_device_of, kind_of
from fzero.core.graph_tracing import is_foreign
from fzero.kernels.embedding import look_up
from fzero.kernels.norm import layer_norm
from fzero.models.base import Loss, Model, map_blocks

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


def _named(names: str, serves: Callable[[dict[str, Any]], bool]) -> Callable[..., bool]:
    """`serves` of a call's arguments by name, those without a name in this order."""
    order = names.split()
    return lambda *args, **kwargs: serves({**dict(zip(order, args)), **kwargs})


def _adds_plainly(call: dict[str, Any]) -> bool:
    """Whether a bag of embeddings changes no weight and scales no gradient."""
    return call.get("max_norm") is None and not call.get("scale_grad_by_freq") and not call.get("sparse")


_BAGS = _named("input weight offsets max_norm norm_type scale_grad_by_freq mode sparse", _adds_plainly)
_ATEN_BAGS = _named("weight indices offsets scale_grad_by_freq mode sparse", _adds_plainly)
_SELECTS = _named("input dim index", lambda call: call["index"].numel() > FEW)


def _of_dims(sizes: Any, dims: int) -> list[int]:
    """The sizes of so many dimensions, of a number or a list of them."""
    sizes = list(sizes) if isinstance(sizes, tuple | list) else [sizes]
    return sizes * dims if len(sizes) == 1 else sizes


def _overlaps(names: str, dims: int = 2, step: Any = None) -> Callable[..., bool]:
    """Whether an element is in more than FEW windows of a call with these arguments."""

    def serves(call: dict[str, Any]) -> bool:
        size = _of_dims(call.get("kernel_size", call.get("size")), dims)
        stride = call.get("stride", call.get("step", step))
        steps = _of_dims(stride, dims) if stride not in (None, [], ()) else size
        return math.prod(-(-n // max(1, shift)) for n, shift in zip(size, steps)) > FEW

    return _named(names, serves)


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


aten = torch.ops.aten


POOLS = {  # of a number of dimensions, by the calls of them that are served
    **dict.fromkeys(("max_pool{}d", "max_pool{}d_with_indices", "avg_pool{}d"), "input kernel_size stride"),
    "lp_pool{}d": "input norm_type kernel_size stride",
    **dict.fromkeys(("adaptive_avg_pool{}d", "_adaptive_avg_pool{}d"), ""),
    **dict.fromkeys(("adaptive_max_pool{}d", "adaptive_max_pool{}d_with_indices"), ""),
}


def _windows() -> dict[Any, Callable[..., Any]]:
    """The forms of pads, pools and windows, in which an element may be read any number of times."""
    unfolds = _overlaps("input kernel_size dilation padding stride", step=1)
    folds = _overlaps("input output_size kernel_size dilation padding stride", step=1)
    served = {
        F.pad: _named("input pad mode", lambda call: call.get("mode") == "replicate"),
        F.interpolate: _named("input size scale_factor mode", lambda call: call.get("mode") == "area"),
        **dict.fromkeys((F.unfold, aten.im2col.default), unfolds),
        **dict.fromkeys((F.fold, aten.col2im.default), folds),  # which sum in their forward pass
        **dict.fromkeys((Tensor.unfold, aten.unfold.default), _overlaps("input dimension size step", 1)),
    }
    forms = {function: _widened(function, serves) for function, serves in served.items()}
    for dims in (1, 2, 3):
        pad = getattr(aten, f"replication_pad{dims}d").default
        forms[pad] = _widened(pad)
        for kind, names in POOLS.items():
            functions = [getattr(namespace, kind.format(dims), None) for namespace in (F, torch, aten)]
            for function in filter(None, functions):
                function = getattr(function, "default", function)
                forms[function] = _widened(function, _overlaps(names, dims) if names else _spreads(dims))
    return forms


FORMS: dict[Any, Callable[..., Any]] = {  # of a function, what gives its result, or None for a call that it leaves
    **{f: _widened(f, _looks_up) for f in (Tensor.__getitem__, torch.take, Tensor.take, aten.index.Tensor)},
    aten.take.default: _widened(aten.take.default, _looks_up),
    **{f: _widened(f, _SELECTS) for f in (torch.index_select, Tensor.index_select, aten.index_select.default)},
    F.embedding_bag: _widened(F.embedding_bag, _BAGS),
    aten._embedding_bag.default: _widened(aten._embedding_bag.default, _ATEN_BAGS),
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


@dataclass(frozen=True)
class ModuleConfig:
    """The config of a Model made from a module."""

    name: str  # of the module's class
    n_layers: int  # 0: the module is not split


def loss_of(out: Any) -> Loss:
    """The Loss that a plain function returned; raises TypeError or ValueError for anything else."""
    pair = "return (losses.sum(), losses.numel())"
    out, tables = (out[:3], out.tables) if isinstance(out, Loss) else (out, {})
    if isinstance(out, dict):
        raise TypeError(
            f"the loss function returned a dict of {', '.join(map(str, out)) or 'nothing'}; return (sum, number of "
            "samples, {name: sum to report})"
        )
    if isinstance(out, list) or (isinstance(out, tuple) and len(out) not in (2, 3)):
        raise TypeError(f"the loss function returned a {type(out).__name__} of {len(out)}; {pair}")
    total, number, *extra = out if isinstance(out, tuple) else (out, 1.0)
    if isinstance(total, (int, float)):
        raise TypeError(
            f"the loss function returned the number {total!r}, which has no gradient; return a tensor, not its .item()"
        )
    expect_kind("what the loss function returned", total, Tensor, pair)
    if total.dim() or not total.is_floating_point():
        raise ValueError(f"the loss function returned {total.dtype} of shape {list(total.shape)}; {pair}")
    total = total.to(torch.promote_types(total.dtype, torch.float32))  # micro-batches are summed
    if not isinstance(out, tuple):
        return Loss(total, torch.ones_like(total.detach()))
    sums = {"the number of samples": number}
    if extra:
        expect_kind("the third result of the loss function", extra[0], dict, "return {name: sum to report}")
        sums |= {f"{name!r} of the loss function's sums": value for name, value in extra[0].items()}
    for label, value in sums.items():
        expect_kind(label, value, (Tensor, int, float), "return a scalar, such as len(batch['x'])")
        if isinstance(value, Tensor) and value.dim():
            raise ValueError(f"{label} has shape {list(value.shape)}; return its sum, a scalar")
        if isinstance(value, Tensor) and value.is_complex():
            raise ValueError(f"{label} is {value.dtype}; return a real number")

    def to_loss_device(x: Any) -> Tensor:
        # A number is written where the loss is: copying it there would wait for a GPU.
        if not isinstance(x, Tensor):
            return torch.full((), x, device=total.device)
        wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
        return x.to(total.device, wide)

    extra = {name: to_loss_device(x) for name, x in extra[0].items()} if extra else {}
    return Loss(total, to_loss_device(number), extra, tables)


def has_key(model: Model) -> bool:
    """Whether a step of a model has a key."""
    return model.traits.draws or getattr(model.config, "dropout", 0.0) > 0.0


def keyed_model(model: Model) -> Model:
    """The model whose functions draw by the key of their ctx, if any are not ours."""
    if isinstance(model.config, ModuleConfig):
        return model
    keyed = has_key(model)

    def change(kind: str, f: Callable[..., Any]) -> Callable[..., Any]:
        return keyed_function(kind, f, keyed) if is_foreign(f) else f

    return model._replace(
        embed=change("embed", model.embed),
        block=map_blocks(model, functools.partial(change, "block")),
        join={name: change(f"join {name}", f) for name, f in model.join.items()},
        head=change("head", model.head),
    )


@functools.lru_cache(maxsize=256)
def keyed_function(kind: str, f: Callable[..., Any], keyed: bool) -> Callable[..., Any]:
    """A function (parameters, ..., ctx) of a model, called as a pure one."""
    calls = core.PureCalls()

    @functools.wraps(f)
    def call(params: Any, *args: Any) -> Any:
        *values, ctx = args
        named = pytree.named_leaves((params, *values))
        tensors = {f"the {kind}'s argument {name}": x for name, x in named.items() if isinstance(x, Tensor)}
        rows = next((x.shape[0] for x in pytree.leaves(values) if isinstance(x, Tensor) and x.dim()), 0)

        def key() -> Tensor:
            key = prng.fold_in(ctx.key, f"own {kind}")
            return prng.fold_in(key, ctx.layer) if isinstance(ctx.layer, Tensor) else key

        def run() -> Any:
            with wide_sums(pytree.leaves((params, values))):
                out = loss_of(f(params, *args)) if kind == "head" else f(params, *args)
            cp, tp = ctx.mesh.cp.size, ctx.mesh.tp.size if ctx.split.sequence else 1
            if isinstance(ctx.key, Tensor) and core.is_drawing() and cp * tp > 1:
                axis = f"cp={cp}" if cp > 1 else f"tp={tp} with sequence=True"
                raise ValueError(
                    f"the model's {kind} draws random numbers, and {axis} splits sequences, each part of which would "
                    "have the same; use dp, or tp without sequence=True"
                )
            if not keyed and core.is_drawing():
                raise ValueError(
                    f"the model's {kind} draws random numbers, and a step has no key for it; write "
                    "model.with_traits(draws=True)"
                )
            return out

        draws = core.Draws(key if isinstance(ctx.key, Tensor) else None, rows, ctx.tokens.first)
        return calls(run, tensors, draws, functools.partial(core.ClosureState.from_function, f))

    return call
