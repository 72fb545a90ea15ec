"""What stands in for some modules of a copied nn.Module while it is called as a function: dropout drawn by fzero's
keys, and linear layers split over tp.

They need the Ctx of the call, which a module's own code does not hand on; it is a context variable.

Under tp some tensors of a layer are this rank's part of something: sharded weights, and what is computed with them,
until a linear layer of kind "rows" sums the parts. Where such a tensor meets one that is the same on all ranks, the
gradient of the latter is a sum over the ranks (`pvary`): of x where a region begins, and of a bias or a norm's scale
within it.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fzero.comm.collectives import pvary
from fzero.core import prng, pytree
from fzero.core.pytree import nearest
from fzero.kernels.dropout import dropout
from fzero.models.base import Ctx
from fzero.models.layers import leave


class Parts:
    """A set of tensors that are a rank's part, which does not keep them alive."""

    def __init__(self) -> None:
        self.held: dict[int, weakref.ref[Tensor]] = {}

    def __contains__(self, x: Any) -> bool:
        found = self.held.get(id(x))
        return found is not None and found() is x

    def add(self, tree: Any) -> None:
        """Add the tensors of a tree."""
        self.held |= {id(leaf): weakref.ref(leaf) for leaf in pytree.leaves(tree) if isinstance(leaf, Tensor)}

    def remove(self, x: Tensor) -> None:
        """Take a tensor out, if it is in."""
        self.held.pop(id(x), None)


class Factors(NamedTuple):
    """What LoRA adds to a weight [out, in] of a linear layer: b a."""

    a: Tensor  # [R, in]
    b: Tensor  # [out, R], times LoRA's scale


@dataclass(frozen=True)
class Call:
    """One call of a copied module."""

    ctx: Ctx
    rows: int  # samples in the batch
    times: Counter[str] = field(default_factory=Counter)  # that each dropout was called
    parts: Parts = field(default_factory=Parts)
    factors: dict[str, Factors] = field(default_factory=dict)  # by the name of a linear layer
    used: set[str] = field(default_factory=set)  # the linear layers with factors that were called


CALL: ContextVar[Call] = ContextVar("CALL")


@contextlib.contextmanager
def calling(ctx: Ctx, rows: int, factors: dict[str, Factors] | None = None) -> Iterator[Call]:
    """The Ctx of the calls of copied modules within. factors: LoRA's, by the name of a linear layer."""
    call = Call(ctx, rows, factors=factors or {})
    token = CALL.set(call)
    try:
        yield call
    finally:
        CALL.reset(token)


class Regions(TorchFunctionMode):
    """While it is entered, what is computed with a rank's part is one, and tensors that meet one are varied over tp."""

    def __init__(self, call: Call):
        super().__init__()
        self.axis, self.parts = call.ctx.mesh["tp"], call.parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(leaf in self.parts for leaf in pytree.leaves((args, kwargs))):
            return func(*args, **kwargs)

        def varied(leaf: Any) -> Any:
            whole = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf not in self.parts
            return pvary(leaf, self.axis, leaf="blocks") if whole else leaf

        args, kwargs = pytree.map(varied, (args, kwargs))
        out = func(*args, **kwargs)
        self.parts.add(out)
        return out


def key_dropouts(module: nn.Module) -> float:
    """Have every nn.Dropout of a copied module that drops at all draw its mask from the call's key; returns the largest
    rate, 0 for none.
    """
    largest = 0.0
    for name, one in module.named_modules():
        if type(one) is nn.Dropout and one.training and one.p > 0.0:
            vars(one)["forward"] = partial(drop, name, one.p)
            largest = max(largest, one.p)
    return largest


def drop(name: str, rate: float, x: Tensor) -> Tensor:
    """The dropout called `name` of x, whose first dim counts the batch's samples, or the rows of each side by side.

    The mask depends on the key, the layer, the name, how often it was called before in this call, and an element's
    index in the step's global batch.
    """
    call = CALL.get()
    ctx, number = call.ctx, call.times[name]
    call.times[name] += 1
    if x in call.parts:
        raise ValueError(
            f"dropout {name!r} is within what tp splits, where its masks would depend on tp; set its rate to 0, or "
            "move it"
        )
    if not x.dim() or x.shape[0] % call.rows:
        raise ValueError(
            f"dropout {name!r} has an input of shape {list(x.shape)} for a batch of {call.rows} samples; its first dim "
            "must count the samples, or the rows of each sample side by side"
        )
    if isinstance(ctx.key, tuple):
        return x
    key = prng.fold_in(ctx.key, f"module {name} {number}")
    key = prng.fold_in(key, ctx.layer) if isinstance(ctx.layer, Tensor) else key
    return dropout(x, rate, key, ctx.first * (x.numel() // call.rows))


TP = {  # the specs of a stacked linear layer's weight and bias
    "columns": {"weight": "[L, F/tp, D]", "bias": "[L, F/tp]"},
    "rows": {"weight": "[L, D, F/tp]", "bias": "[L, D]"},
}


def split_linears(
    templates: Mapping[str, list[nn.Module]], rules: Mapping[str, str], found: bool = False
) -> dict[str, dict[str, str]]:
    """Have linear layers of copied layers compute their part of a tensor-parallel product; returns {stack: {leaf name
    within a layer: text of its Spec}}.

    templates: the layers of each kind of a stack, which have the same linears. rules: {regular expression: "columns"
    (the outputs are split over tp) or "rows" (the inputs)}, by their names. found: nobody gave the rules, so that one
    may find nothing.
    Raises ValueError for a rule that finds no nn.Linear, or another word.
    """
    specs: dict[str, dict[str, str]] = {stack: {} for stack in templates}
    linears = {
        stack: {name: one for name, one in layers[0].named_modules() if type(one) is nn.Linear}
        for stack, layers in templates.items()
    }
    every = dict.fromkeys(name for some in linears.values() for name in some)
    for pattern, way in rules.items():
        if way not in TP:
            raise ValueError(f"tp: {pattern!r} is {way!r}; it must be 'columns' or 'rows'")
        if not found and not any(re.search(pattern, name) for name in every):
            raise ValueError(
                f"tp: {pattern!r} finds no nn.Linear in a layer{nearest(pattern, every)}; there is "
                f"{', '.join(every) or 'none'}"
            )
        for stack, some in linears.items():
            for name in [name for name in some if re.search(pattern, name)]:
                for layer in templates[stack] if way == "rows" else ():
                    one = cast(nn.Linear, layer.get_submodule(name))
                    vars(one)["forward"] = partial(rows, name, one)
                leaves = [leaf for leaf, _ in some[name].named_parameters()]
                specs[stack] |= {f"{name}.{leaf}".lstrip("."): TP[way][leaf] for leaf in leaves}
    return specs


def key_linears(layer: nn.Module) -> set[str]:
    """Have the linear layers of a copied layer add the factors that a call has for them; returns their names."""
    found = {name: one for name, one in layer.named_modules() if type(one) is nn.Linear}
    for name, one in found.items():
        vars(one)["forward"] = partial(linear, name, one)
    return set(found)


def linear(name: str, layer: nn.Linear, x: Tensor) -> Tensor:
    """The outputs of a linear layer, with LoRA's product where the call has factors for it."""
    if name not in CALL.get().factors:
        return F.linear(x, layer.weight, layer.bias)
    y = product(name, layer, x)
    return y if layer.bias is None else y + layer.bias


def product(name: str, layer: nn.Linear, x: Tensor) -> Tensor:
    """x wᵀ, or x (w + b a)ᵀ, of which b a is never made."""
    call = CALL.get()
    y = F.linear(x, layer.weight)
    if name not in call.factors:
        return y
    call.used.add(name)
    a, b = call.factors[name]
    return y + F.linear(F.linear(x, a), b)


def expect_called(call: Call) -> None:
    """Raise ValueError if a linear layer that has factors was not called, so that they would never be trained."""
    for name in call.factors:
        if name not in call.used:
            raise ValueError(
                f"lora: the layer's code uses {name}.weight without a call of {name}, so that nothing is added to it; "
                "leave it out of targets"
            )


def split_factors(specs: Mapping[str, str], name: str, factors: Factors) -> list[Tensor]:
    """The factors of a linear layer that tp splits with its weight: a with its inputs, b with its outputs."""
    text = specs.get(f"{name}.weight", "")
    return [factors.a] if text == TP["rows"]["weight"] else [factors.b] if text else []


def rows(name: str, layer: nn.Linear, x: Tensor) -> Tensor:
    """The outputs of a linear layer, summed over the ranks' inputs."""
    call = CALL.get()
    if call.ctx.mesh["tp"].size == 1:
        return linear(name, layer, x)
    y = leave(product(name, layer, x), call.ctx, f"blocks/{name}")
    call.parts.remove(y)
    return y if layer.bias is None else y + layer.bias
