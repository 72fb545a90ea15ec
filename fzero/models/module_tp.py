"""A copied nn.Module while it is called as a function: draws by fzero's keys, linear layers split over tp.

They need the Ctx of the call, which is a context variable. Under tp some tensors are this rank's part: sharded weights
and results of them, until a linear layer of kind "rows" sums the parts. A whole tensor that meets one is varied
(`pvary`): its gradient is a sum over the ranks.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fzero.comm.collectives import pvary
from fzero.core import graph_tracing, prng, pytree
from fzero.core.purity_checks import bypass_checkpoint
from fzero.core.pytree import nearest
from fzero.core.random_interception import Draws
from fzero.models.base import Ctx
from fzero.models.layers import exit_region


class ShardedTensors:
    """A set of tensors that are a rank's part, which does not keep them alive."""

    def __init__(self) -> None:
        self.refs: dict[int, weakref.ref[Tensor]] = {}

    def __contains__(self, x: Any) -> bool:
        ref = self.refs.get(id(x))
        return ref is not None and ref() is x

    def add(self, tree: Any) -> None:
        """Add the tensors of a tree."""
        self.refs |= {id(leaf): weakref.ref(leaf) for leaf in pytree.leaves(tree) if isinstance(leaf, Tensor)}

    def remove(self, x: Tensor) -> None:
        """Take a tensor out, if it is in."""
        self.refs.pop(id(x), None)


class Factors(NamedTuple):
    """What LoRA adds to a weight [out, in] of a linear layer: b a."""

    a: Tensor  # [R, in]
    b: Tensor  # [out, R], times LoRA's scale


Ways = dict[str, str]  # a linear layer within a layer: one of WAYS


@dataclass(frozen=True)
class Cuts:
    """What tp splits of the layers of a stack."""

    ways: Ways = field(default_factory=dict)  # of the linear layers that are split
    # (a module within a layer, its attribute): numbers, such as that of heads, of which a rank has its part.
    divided: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class CallContext:
    """One call of a copied module."""

    ctx: Ctx
    rows: int  # samples in the batch
    parts: ShardedTensors = field(default_factory=ShardedTensors)
    factors: dict[str, Factors] = field(default_factory=dict)  # by the name of a linear layer
    used: set[str] = field(default_factory=set)  # the linear layers with factors that were called
    cuts: Cuts = field(default_factory=Cuts)  # what tp splits of the layer


CALL: ContextVar[CallContext] = ContextVar("CALL")


@contextlib.contextmanager
def calling(
    ctx: Ctx,
    rows: int,
    factors: dict[str, Factors] | None = None,
    cuts: Cuts | None = None,
    draws: Callable[[CallContext], contextlib.AbstractContextManager[Any]] = lambda call: contextlib.nullcontext(),
) -> Iterator[CallContext]:
    """A context with the Ctx of the calls of copied modules; factors: LoRA's by linear layer."""
    call = CallContext(ctx, rows, factors=factors or {}, cuts=cuts or Cuts())
    token = CALL.set(call)
    try:
        with bypass_checkpoint(), draws(call):
            yield call
    finally:
        CALL.reset(token)


# Names of functions that change their first argument; others that end so, such as __getitem__, do not.
WRITES = re.compile(r"\w*[^_]_|__setitem__|__i(and|or|xor|lshift|rshift)__")


class Regions(TorchFunctionMode):
    """A mode in which results of a rank's part are parts, and whole tensors that meet one vary over tp."""

    def __init__(self, call: CallContext):
        super().__init__()
        self.axis, self.parts = call.ctx.mesh.tp, call.parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(leaf in self.parts for leaf in pytree.leaves((args, kwargs))):
            return func(*args, **kwargs)

        def varied(leaf: Any) -> Any:
            is_full = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf not in self.parts
            return pvary(leaf, self.axis, leaf="blocks") if is_full else leaf

        args, kwargs = pytree.map(varied, (args, kwargs))
        out = func(*args, **kwargs)
        written = WRITES.fullmatch(getattr(func, "__name__", ""))
        self.parts.add((out, args[:1] if written else ()))
        return out


def draws_of(call: CallContext) -> Draws:
    """The random numbers of a call: by its key and its layer; without a key dropouts are off."""
    ctx = call.ctx

    def key() -> Tensor:
        assert isinstance(ctx.key, Tensor)
        return prng.fold_in(ctx.key, ctx.layer) if isinstance(ctx.layer, Tensor) else ctx.key

    origin = key if isinstance(ctx.key, Tensor) else None
    return Draws(origin, call.rows, ctx.tokens.first, partial(expect_samples, call))


def expect_samples(call: CallContext, x: Tensor) -> None:
    """Raise ValueError for a dropout whose mask would depend on how a batch is cut."""
    if x in call.parts:
        raise ValueError(
            f"{graph_tracing.current_line()}: dropout is within what tp splits, where its masks would depend on tp; "
            "set "
            "its rate to 0, or move it"
        )
    if not x.dim() or x.shape[0] % call.rows:
        raise ValueError(
            f"{graph_tracing.current_line()}: dropout has an input of shape {list(x.shape)} for a batch of {call.rows} "
            "samples; its first dim must count the samples, or the rows of each sample side by side"
        )


WAYS = ("columns", "rows", "whole", "auto")
# The specs of a stacked linear layer's weight and bias, by (way, whether the weight is [in, out]).
TP = {
    ("columns", False): {"weight": "[L, F/tp, D]", "bias": "[L, F/tp]"},
    ("columns", True): {"weight": "[L, D, F/tp]", "bias": "[L, F/tp]"},
    ("rows", False): {"weight": "[L, D, F/tp]", "bias": "[L, D]"},
    ("rows", True): {"weight": "[L, F/tp, D]", "bias": "[L, D]"},
}


def ways_of(
    linears: Mapping[str, Collection[str]], rules: Mapping[str, str], inferred: bool = False
) -> dict[str, Ways]:
    """{stack: the ways of its linear layers} by rules {regular expression: way}; the last one counts."""
    every = dict.fromkeys(name for names in linears.values() for name in names)
    ways: dict[str, Ways] = {stack: {} for stack in linears}
    for pattern, way in sorted(rules.items(), key=lambda rule: rule[1] != "auto"):
        if way not in WAYS:
            raise ValueError(f"tp: {pattern!r} is {way!r}; it must be 'columns' or 'rows', or 'whole' or 'auto'")
        if not inferred and not any(re.search(pattern, name) for name in every):
            raise ValueError(
                f"tp: {pattern!r} finds no nn.Linear in a layer{nearest(pattern, every)}; there is "
                f"{', '.join(every) or 'none'}"
            )
        for stack, names in linears.items():
            ways[stack] |= {name: way for name in names if re.search(pattern, name)}
    return ways


def specs_of(layer: nn.Module, cuts: Cuts) -> dict[str, str]:
    """{name of a leaf within a layer: text of its Spec} of the linear layers that tp splits."""
    specs = {}
    for name, way in cuts.ways.items():
        module = layer.get_submodule(name)
        for leaf, _ in module.named_parameters():
            specs[f"{name}.{leaf}".lstrip(".")] = TP[way, bool(is_transposed(module))][leaf]
    return specs


def split_dims(text: str) -> list[int]:
    """The dims of a layer's leaf that tp splits, by the text of the stacked leaf's Spec."""
    return [dim - 1 for dim, size in enumerate(text.split(", ")) if "/tp" in size]


def is_transposed(module: nn.Module) -> bool | None:
    """Whether a module is a linear layer with weight [in, out]; False for [out, in], None for others."""
    if type(module) is nn.Linear:
        return False
    shapes = {name: tuple(leaf.shape) for name, leaf in module.named_parameters()}
    if (
        not {"weight"} <= set(shapes) <= {"weight", "bias"}
        or len(shapes["weight"]) != 2
        or isinstance(module, nn.Embedding)
    ):
        return None
    if type(module) not in TRANSPOSED:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            params = {name: torch.randn(shape, device="cpu") for name, shape in shapes.items()}
            TRANSPOSED[type(module)] = next((t for t in (False, True) if computes_product(module, params, t)), None)
    return TRANSPOSED[type(module)]


TRANSPOSED: dict[type, bool | None] = {}


def computes_product(module: nn.Module, params: dict[str, Tensor], transposed: bool) -> bool:
    """Whether a module's outputs are a product with its weight."""
    w = params["weight"].t() if transposed else params["weight"]
    x = torch.randn(2, w.shape[1])
    try:
        y = torch.func.functional_call(module, params, (x,))
        return isinstance(y, Tensor) and torch.allclose(y, F.linear(x, w, params.get("bias")), rtol=1e-3, atol=1e-3)
    except Exception:  # a module of someone else's, which takes other things
        return False


@contextlib.contextmanager
def replaced(values: Iterable[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Attributes of modules have other values within."""
    previous = []
    try:
        for module, key, value in values:
            previous.append((vars(module), key, vars(module).get(key, previous)))
            vars(module)[key] = value
        yield
    finally:
        for attributes, key, value in reversed(previous):
            if value is previous:
                del attributes[key]
            else:
                attributes[key] = value


def divided(layer: nn.Module, cuts: Cuts, size: int) -> contextlib.AbstractContextManager[None]:
    """The numbers of a layer of which a rank has its part are its part within."""
    owners = [(layer.get_submodule(name), key) for name, key in cuts.divided]
    return replaced((owner, key, vars(owner)[key] // size) for owner, key in owners)


def key_linears(layer: nn.Module) -> dict[str, nn.Module]:
    """Have the linear layers of a copied layer add a call's factors, and sum over tp; {name: layer}."""
    linears = {name: child for name, child in layer.named_modules() if is_transposed(child) is not None}
    for name, child in linears.items():
        vars(child)["forward"] = partial(linear, name, child)
    return linears


def linear(name: str, layer: nn.Module, x: Tensor) -> Tensor:
    """The outputs of a linear layer, with LoRA's product where the call has factors for it, and summed over the ranks'
    inputs where tp splits these."""
    call = CALL.get()
    if name not in call.factors and name not in call.cuts.ways:
        return type(layer).forward(layer, x)
    y = product(name, layer, x)
    if call.cuts.ways.get(name) == "rows":
        y = exit_region(y, call.ctx, f"blocks/{name}")
        call.parts.remove(y)
    return y if layer.bias is None else y + cast(Tensor, layer.bias)


def product(name: str, layer: nn.Module, x: Tensor) -> Tensor:
    """x wᵀ, or x (w + b a)ᵀ, of which b a is never made."""
    call, w = CALL.get(), cast(Tensor, layer.weight)
    y = F.linear(x, w.t() if is_transposed(layer) else w)
    if name not in call.factors:
        return y
    call.used.add(name)
    a, b = call.factors[name]
    return y + F.linear(F.linear(x, a), b)


def expect_called(call: CallContext) -> None:
    """Raise ValueError if a linear layer with factors was not called."""
    for name in call.factors:
        if name not in call.used:
            raise ValueError(
                f"lora: the layer's code uses {name}.weight without a call of {name}, so that nothing is added to it; "
                "leave it out of targets"
            )


def split_factors(cuts: Cuts, name: str, factors: Factors) -> list[Tensor]:
    """The factors of a linear layer that tp splits: a by inputs, b by outputs."""
    return {"rows": [factors.a], "columns": [factors.b]}.get(cuts.ways.get(name, ""), [])
