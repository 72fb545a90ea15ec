"""A Model of somebody's own functions, in a step: they draw random numbers by the step's key, and are pure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fzero.core import prng, pytree
from fzero.core.closure_state import ClosureState
from fzero.core.graph_tracing import is_foreign
from fzero.core.purity_checks import PureCalls
from fzero.core.random_interception import Draws, is_drawing
from fzero.models.base import Model, map_blocks
from fzero.models.loss_value import loss_of
from fzero.models.module_functions import ModuleConfig
from fzero.models.wide_sums import wide_sums


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
            cp, tp = ctx.mesh["cp"].size, ctx.mesh["tp"].size if ctx.sequence else 1
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
