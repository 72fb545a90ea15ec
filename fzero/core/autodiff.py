"""Autograd: the policy of recomputation, the axes of a mesh over which tensors may differ, and Functions that run under
torch.func transforms.

Over which axes a tensor may differ is known from where it was made, not from its values. Within `Varying` every
operation gives its results the axes of what it reads; a psum or all_gather takes its own axis away, a psum_scatter,
all_to_all or slice by rank adds it. What a kernel fills has the axes of its inputs. So a sum over ranks of what is the
same on all of them by construction is told from one of values that happen to be equal, as those of equal rows, zeros
and infinities. JAX's shard_map checks types of this kind; here they follow one run.
"""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fzero.core import pytree
from fzero.core.arguments import expect_fields
from fzero.core.torch_private import (
    TorchDispatchMode,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    transforms_active,
    unwrap_dead_wrappers,
)

R = TypeVar("R")
# Whether what runs is a forward pass of no gradient, operator by operator: a C++ loop then pays for any size.
INFERENCE: ContextVar[bool] = ContextVar("INFERENCE", default=False)


@dataclass(frozen=True)
class Remat:
    """The recomputation policy of a stack of layers: the activations that the backward pass recomputes.

    every: 0 keeps the residuals of each layer, within `budget`; k >= 1 keeps only the input of each k-th layer, and the
    backward pass runs k layers again at a time (1 is full recomputation). budget: the fraction, in [0, 1], of a layer's
    residuals that may be kept. Below 1 torch's partitioner chooses what to recompute by a knapsack over the layer's
    graph.

    >>> str(Remat.parse("every:2")), Remat.parse("selective:0.5").budget
    ('every:2', 0.5)
    """

    every: int = 0
    budget: float = 1.0

    def __post_init__(self) -> None:
        expect_fields(self)
        if self.every < 0 or not 0.0 <= self.budget <= 1.0:
            raise ValueError(
                f"remat: every is {self.every} and budget {self.budget}; every must be at least 0, and budget in [0, 1]"
            )

    @classmethod
    def parse(cls, text: str) -> Remat:
        """Return the policy that a text names: "none", "full", "every:K" (K layers) or "selective:F" (keep at most the
        fraction F).

        Raises ValueError for any other text.
        """
        form = re.fullmatch(r"(none|full)|every:(\d+)|selective:(\d*\.?\d+(?:e-\d+)?)", text)
        if form is None:
            raise ValueError(
                f"remat is {text!r}; it must be none, full, every:K or selective:F, e.g. every:2 or selective:0.5"
            )
        if form[1]:
            return cls(every=int(form[1] == "full"))
        every, budget = (int(form[2]), 1.0) if form[2] else (0, float(form[3]))
        if (form[2] and every < 1) or not 0.0 <= budget <= 1.0:
            raise ValueError(f"remat is {text!r}; K must be at least 1 and F in [0, 1]")
        return cls(every, budget)

    def __str__(self) -> str:
        if self.every:
            return "full" if self.every == 1 else f"every:{self.every}"
        return "none" if self.budget == 1.0 else f"selective:{self.budget}"


AxisNames = frozenset[str]
NOWHERE: AxisNames = frozenset()
FILLED: AxisNames = frozenset("?")  # of memory that something out of sight writes to: it may differ over every axis
OVERWRITING = ("copy_", "fill_", "zero_")
EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")

# By the name of an operator: (its arguments) -> (the axes that it takes away, the axes that it adds).
VARYING_RULES: dict[str, Callable[..., tuple[AxisNames, AxisNames]]] = {}
_ACTIVE: list[Varying] = []


def active_varying() -> Varying | None:
    """The innermost mode that follows tensors now."""
    return _ACTIVE[-1] if _ACTIVE else None


def vary(x: Tensor, axis: str) -> Tensor:
    """x, which is from here on another on each rank of an axis."""
    if _ACTIVE:
        _ACTIVE[-1].mark(x, _ACTIVE[-1].axes_of(x) | frozenset(axis.split("+")))
    return x


def unfollowed(run: Callable[[list[Tensor]], Any]) -> Callable[[list[Tensor]], Any]:
    """A compiled program within which no tensor is followed."""

    def program(inputs: list[Tensor]) -> Any:
        return _ACTIVE[-1].follow_program(run, inputs) if _ACTIVE else run(inputs)

    return program


class Varying(TorchDispatchMode):
    """A mode that follows the axes of every tensor; of those that nobody has marked it takes none.

    >>> with Varying() as varying:
    ...     x = torch.ones(2)
    ...     varying.mark(x, frozenset({"dp"}))
    ...     y = (x + 1.0).view(1, 2)
    >>> sorted(varying.axes_of(y)), varying.may_differ(y, "tp")
    (['dp'], False)
    """

    def __init__(self) -> None:
        super().__init__()
        self.axes = WeakTensorKeyDictionary()
        self.paused = False  # within a compiled program, whose operations are fused and whose memory is its own

    def __enter__(self) -> Varying:
        _ACTIVE.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _ACTIVE.remove(self)
        super().__exit__(*error)

    def mark(self, x: Tensor, axes: AxisNames) -> None:
        """From here on x may differ over these axes, and over no other."""
        self.axes[unwrapped(x)] = axes

    def _axes_alone(self, x: Tensor, otherwise: AxisNames = NOWHERE) -> AxisNames:
        """The axes of x alone."""
        axes = self.axes.get(x)
        return otherwise if axes is None else axes

    def axes_of(self, *tensors: Any) -> AxisNames:
        """The axes over which one of the tensors may differ."""
        axes = NOWHERE
        for x in map(unwrapped, tensors):
            base = x._base
            axes = axes | self._axes_alone(x) | (NOWHERE if base is None else self._axes_alone(base))
        return axes

    def may_differ(self, x: Tensor, axis: str) -> bool:
        """Whether x may differ between the ranks of an axis ("dp", or several such as "dp+cp")."""
        axes = self.axes_of(x)
        return self.paused or bool(axes & FILLED) or any(name in axes for name in axis.split("+"))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.paused:
            return out
        name, arguments = func._schema.name.partition("::")[2], func._schema.arguments
        named = {arg.name: value for arg, value in zip(arguments, args)} | kwargs
        written = [arg.name for arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]
        overwritten = written if name in OVERWRITING or "out" in named else ()
        values_read = [v for k, v in named.items() if k not in overwritten]
        axes = FILLED if name in EMPTY else self.axes_of(*tensors_in(values_read))
        if name in VARYING_RULES:
            removed, added = VARYING_RULES[name](*args)
            axes = axes - removed | added
        for x in tensors_in(out):
            self.axes[x] = axes
        for x in tensors_in([named.get(arg) for arg in written]):
            self.axes[x] = axes
            if x._base is not None:
                self.axes[x._base] = self._axes_alone(x._base) | axes
        return out

    def follow_call(self, run: Callable[..., Any], inputs: Iterable[Any], *args: Any) -> Any:
        """run(*args), whose results have the axes of `inputs` where operations out of sight made them."""
        axes = self.axes_of(*tensors_in(inputs))
        out = run(*args)
        for x in map(unwrapped, tensors_in(out)):
            if self._axes_alone(x, FILLED) & FILLED:
                self.axes[x] = axes
        return out

    def follow_program(self, run: Callable[[list[Tensor]], Sequence[Tensor]], inputs: list[Tensor]) -> Sequence[Tensor]:
        """The results of a compiled program, which may differ over every axis: it has collectives of its own."""
        was_paused, self.paused = self.paused, True
        try:
            out = run(inputs)
        finally:
            self.paused = was_paused
        for x in tensors_in(out):
            self.axes[x] = FILLED
        return out


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.leaves(tree) if isinstance(leaf, Tensor)]


def unwrapped(x: Tensor) -> Tensor:
    """A tensor without the wrappers of torch.func."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


@contextlib.contextmanager
def inference() -> Iterator[None]:
    """A block of a forward pass without gradients, see INFERENCE."""
    token = INFERENCE.set(True)
    try:
        with torch.no_grad():
            yield
    finally:
        INFERENCE.reset(token)


def transforms() -> list[str]:
    """The names of the torch.func transforms active around the caller, outermost first, such as "Grad", "Vmap"."""
    stack = get_interpreter_stack()
    return [level.key().name for level in stack or []]


def first_order() -> bool:
    """Whether at most one torch.func.grad or vjp is active, so that a once-differentiable Function serves."""
    return transforms() in ([], ["Grad"])


def dense(grad: Tensor) -> Tensor:
    """A gradient with its zeros: that of a sparse=True embedding has its rows alone."""
    return grad.to_dense() if grad.is_sparse else grad


def needs_grad(*tensors: Tensor) -> bool:
    """Whether the result of a computation on `tensors` will be differentiated in reverse mode."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def expect_closed(f: Callable[..., Any], label: str) -> None:
    """Raise ValueError if `f` closes over a tensor that is differentiated or batched: its gradient would be lost."""
    for name, cell in zip(
        getattr(getattr(f, "__code__", None), "co_freevars", ()), getattr(f, "__closure__", None) or ()
    ):
        if cell == types.CellType():
            continue  # not assigned yet
        for leaf in pytree.leaves(cell.cell_contents):
            if isinstance(leaf, Tensor) and (needs_grad(leaf) or is_functorch_wrapped_tensor(leaf)):
                raise ValueError(
                    f"{label}: the function closes over {name!r}, a tensor that is differentiated; pass it as "
                    "an argument"
                )


class Function(torch.autograd.Function):
    """A torch.autograd.Function whose `apply` binds no arguments where no transform is active, to save time."""

    # torch reads the signature of `forward` out of the code at each call, which takes longer than most kernels of a
    # small step.
    @classmethod
    def apply(cls, *args: Any) -> Any:
        if followed := active_varying():
            return followed.follow_call(super().apply, args, *args)
        if transforms_active():
            return super().apply(*args)
        native: Any = super(torch.autograd.Function, cls)  # torch's own `apply` in C++
        return native.apply(*unwrap_dead_wrappers(args))


def run_backward(operation: str, run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """`Backward.apply(what, run, *tensors)`; called as it is where nothing can ask for its derivative."""
    if transforms_active() or torch.is_grad_enabled() or active_varying():
        return Backward.apply(operation, run, *tensors)
    return run(*tensors)


class Backward(Function):
    """`Backward.apply(what, run, *tensors)` returns the tuple `run(*tensors)`, computed below all transforms."""

    # For use inside the backward pass of another Function. It cannot be differentiated: that raises
    # NotImplementedError, so operations with such a backward pass fall back to their reference for a second derivative.
    @staticmethod
    def forward(operation: str, run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.what = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.what}: .backward() differentiates it once; for second derivatives use torch.func.grad of grad"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], operation: str, run: Callable, *tensors: Tensor) -> tuple[Any, ...]:
        outs = []
        for i in range(info.batch_size):
            row = (t if dim is None else t.select(dim, i) for t, dim in zip(tensors, in_dims[2:]))
            outs.append(Backward.apply(operation, run, *row))
        return tuple(torch.stack(parts) for parts in zip(*outs)), (0,) * len(outs[0])


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
