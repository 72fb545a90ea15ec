"""Over which mesh axes a tensor may differ, known from where it was made, not from its values.

Within `Varying` every operation gives its results the axes of what it reads; a psum or all_gather takes its own axis
away, a psum_scatter, all_to_all or slice by rank adds it. What a kernel fills has the axes of its inputs. So a sum over
ranks of what is the same on all of them by construction is told from one of values that happen to be equal, as those of
equal rows, zeros and infinities. JAX's shard_map checks types of this kind; here they follow one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fzero.core import pytree
from fzero.core.torch_private import TorchDispatchMode, get_unwrapped, is_functorch_wrapped_tensor

Axes = frozenset[str]
NOWHERE: Axes = frozenset()
FILLED: Axes = frozenset("?")  # of memory that something out of sight writes to: it may differ over every axis
OVERWRITING = ("copy_", "fill_", "zero_")
EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")

# By the name of an operator: (its arguments) -> (the axes that it takes away, the axes that it adds).
RULES: dict[str, Callable[..., tuple[Axes, Axes]]] = {}
_ACTIVE: list[Varying] = []


def active() -> Varying | None:
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

    def mark(self, x: Tensor, axes: Axes) -> None:
        """From here on x may differ over these axes, and over no other."""
        self.axes[plain(x)] = axes

    def _axes_alone(self, x: Tensor, otherwise: Axes = NOWHERE) -> Axes:
        """The axes of x alone."""
        axes = self.axes.get(x)
        return otherwise if axes is None else axes

    def axes_of(self, *tensors: Any) -> Axes:
        """The axes over which one of the tensors may differ."""
        axes = NOWHERE
        for x in map(plain, tensors):
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
        if name in RULES:
            removed, added = RULES[name](*args)
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
        for x in map(plain, tensors_in(out)):
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


def plain(x: Tensor) -> Tensor:
    """A tensor without the wrappers of torch.func."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x
