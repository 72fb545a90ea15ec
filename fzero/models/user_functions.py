"""A Model of somebody's own functions, in a step: they draw random numbers by the step's key, and are pure.

The Loss of the value that a user's loss function returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.core import prng, pytree
from fzero.core.arguments import expect_kind
from fzero.core.closure_state import ClosureState
from fzero.core.graph_tracing import is_foreign
from fzero.core.purity_checks import PureCalls
from fzero.core.random_interception import Draws, is_drawing
from fzero.models.base import Loss, Model, map_blocks
from fzero.models.wide_sums import wide_sums


@dataclass(frozen=True)
class ModuleConfig:
    """The config of a Model made from a module."""

    name: str  # of the module's class
    n_layers: int  # 0: the module is not split


def loss_of(out: Any) -> Loss:
    """The Loss that a plain function returned; raises TypeError or ValueError, with what to write instead, for anything
    else."""
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
    return model.draws or getattr(model.config, "dropout", 0.0) > 0.0


def keyed_model(model: Model) -> Model:
    """The model whose functions draw by the key of their ctx, if any are not ours; else the model itself."""
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
    """A function (parameters, ..., ctx) of a model, called as a pure one. keyed: whether a step has a key for it."""
    calls = PureCalls()

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
            cp, tp = ctx.mesh.cp.size, ctx.mesh.tp.size if ctx.sequence else 1
            if isinstance(ctx.key, Tensor) and is_drawing() and cp * tp > 1:
                axis = f"cp={cp}" if cp > 1 else f"tp={tp} with sequence=True"
                raise ValueError(
                    f"the model's {kind} draws random numbers, and {axis} splits sequences, each part of which would "
                    "have the same; use dp, or tp without sequence=True"
                )
            if not keyed and is_drawing():
                raise ValueError(
                    f"the model's {kind} draws random numbers, and a step has no key for it; write "
                    "model._replace(draws=True)"
                )
            return out

        draws = Draws(key if isinstance(ctx.key, Tensor) else None, rows, ctx.first)
        return calls(run, tensors, draws, functools.partial(ClosureState.from_function, f))

    return call
