"""Calls of somebody's function in a step: it must be a pure function of what it is given.

The first call with arguments of new shapes is watched: what is random must come from a key (core.draws), nothing that
was there before may be written into, and attributes of modules may not carry anything on to the next call. Later calls
run as they are; only those of a function that draws run within its Draws.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fzero.core import pytree
from fzero.core.draws import Draws
from fzero.core.graph_cut import Impure, Watch, apart, is_foreign, line
from fzero.core.recomputation import passed_over
from fzero.core.torch_private import get_current_dispatch_mode

R = TypeVar("R")


class PureCalls:
    """Calls of one function."""

    def __init__(self) -> None:
        self.known: dict[Any, bool] = {}  # by the shapes of a call that was watched: whether it may draw
        self.watches = False  # whether a call is watched now

    def __call__(
        self, f: Callable[[], R], given: Mapping[str, Tensor], draws: Draws, find_belongings: Callable[[], Belongings]
    ) -> R:
        """What f returns, of tensors that it is `given`, by name. find_belongings: finds what it has beside them.

        Raises Impure, at the first call with tensors of these shapes, for what no pure function does.
        """
        with passed_over():
            return self.call(f, given, draws, find_belongings)

    def call(
        self, f: Callable[[], R], given: Mapping[str, Tensor], draws: Draws, find_belongings: Callable[[], Belongings]
    ) -> R:
        """The call itself."""
        shapes = tuple((name, x.shape, x.dtype, x.device) for name, x in given.items()), draws.off
        traced = get_current_dispatch_mode() is not None
        if shapes in self.known and not traced:
            with draws if self.known[shapes] else contextlib.nullcontext():
                return f()
        belongings = find_belongings()
        with draws, Watch({**belongings.tensors, **given}):
            before = belongings.marks()
            self.watches = True
            try:
                out = named_writes(f)
            finally:
                self.watches = False
            changed = unlike(before, belongings.marks())
            # Another thread may have drawn: what counts is whether the result depends on it.
            if changed and not same_values(out, f_again(f, draws)):
                raise Impure(
                    f"the loss changes {changed} and depends on it, so that it is no function of (state, batch); draw "
                    "random numbers by torch, and hand in what changes by the batch"
                )
        if not traced:
            self.known[shapes] = draws.used
        return out


def named_writes(f: Callable[[], R]) -> R:
    """What f returns; raises Impure for a write that a transform of torch.func refuses, before any mode sees it."""
    try:
        return f()
    except RuntimeError as error:
        if not any(text in str(error) for text in WRITES):
            raise
        raise Impure(
            f"{line(error)}: writes in place into a parameter, or a tensor that is no argument, such as a buffer; make "
            "a new tensor, as in x = x + y"
        ) from error


# What torch says of writes before it calls an operator.
WRITES = ("mutate a captured Tensor", "a leaf Variable that requires grad is being used in an in-place operation")


def f_again(f: Callable[[], R], draws: Draws) -> R:
    """What f returns a second time, with the same draws."""
    number, draws.number = draws.number, 0
    try:
        return f()
    finally:
        draws.number = number


def same_values(a: Any, b: Any) -> bool:
    """Whether two results are the same, but for sums in another order."""
    pairs = zip(pytree.leaves(a), pytree.leaves(b))
    return all(
        torch.allclose(x.detach(), y.detach(), rtol=1e-5, atol=0.0, equal_nan=True) if isinstance(x, Tensor) else x == y
        for x, y in pairs
    )


class Belongings:
    """What a function has beside its arguments: tensors by name, and modules."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.modules: dict[str, nn.Module] = {}
        self.generators: dict[str, Any] = {}
        self.functions: set[int] = set()  # those that were looked at

    @classmethod
    def by(cls, f: Any) -> Belongings:
        """What a function closes over, reads of its module's names, or is a method of."""
        belongings = cls()
        belongings.note_function(f)
        return belongings

    def note_function(self, f: Any) -> None:
        """Add what a function has."""
        if isinstance(f, functools.partial):
            for i, value in enumerate((*f.args, *f.keywords.values())):
                self.note(f"argument {i} of a partial", value)
            return self.note_function(f.func)
        owner = getattr(f, "__self__", None if inspect.isroutine(f) else f)
        if owner is not None and not inspect.ismodule(owner):
            self.note("self", owner)
            for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
                self.note(f"self.{name}", value)
        f = getattr(f, "__func__", f)
        if inspect.isfunction(f):
            names = inspect.getclosurevars(f)
            for name, value in {**names.globals, **names.nonlocals}.items():
                self.note(name, value)
        return None

    def note(self, name: str, value: Any) -> None:
        """Add a value, and what a tree of them has, or a function of somebody's."""
        if isinstance(value, functools.partial) or (inspect.isroutine(value) and is_foreign(value)):
            if id(value) not in self.functions:
                self.functions.add(id(value))
                self.note_function(value)
            return
        for leaf_name, leaf in {name: value}.items() if callable(value) else pytree_items(name, value):
            if isinstance(leaf, Tensor):
                self.tensors[leaf_name] = leaf
            elif isinstance(leaf, nn.Module):
                self.note_module(leaf_name, leaf)
            elif is_generator(leaf):
                self.generators[leaf_name] = leaf

    def note_module(self, name: str, module: nn.Module) -> None:
        """Add a module."""
        self.modules[name] = module
        for leaf, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self.tensors[f"{name}.{leaf}"] = tensor

    def marks(self) -> dict[str, Any]:
        """What shows that a module's attribute, or a generator's state, is another one than before, by name."""
        with apart():
            return self.marks_apart()

    def marks_apart(self) -> dict[str, Any]:
        """`marks`, outside of transforms."""
        found = {f"the state of {name}": state_of(one) for name, one in self.generators.items()}
        found["the state of Python's random"] = state_of(random)
        if "numpy.random" in sys.modules:
            found["the state of numpy.random"] = state_of(sys.modules["numpy.random"])
        for name, module in self.modules.items():
            for path, one in module.named_modules():
                dotted = ".".join(part for part in (name, path) if part)
                own = {key: value for key, value in vars(one).items() if key not in BLANK} | one._buffers
                found |= {f"{dotted}.{key}": mark_of(value) for key, value in own.items()}
        return found


@contextlib.contextmanager
def expect_unchanged(name: str, module: nn.Module) -> Iterator[None]:
    """Raise Impure if an attribute of a module is another one after what runs within, where nobody would find it."""
    belongings = Belongings()
    belongings.note_module(name, module)
    before = belongings.marks()
    yield
    changed = unlike(before, belongings.marks())
    if changed:
        raise Impure(
            f"the forward pass changes {changed}, and what is no parameter is lost; return it, draw random numbers by "
            "torch, and hand in by the batch what changes"
        )


def unlike(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The first name whose mark is another one than before, "" for none."""
    return next((name for name in {**before, **after} if before.get(name, after) != after.get(name, before)), "")


def state_of(generator: Any) -> Any:
    """The state of a generator of random numbers, as something that can be compared."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return repr(flat(generator.get_state()) if hasattr(generator, "get_state") else generator.bit_generator.state)


def flat(state: tuple[Any, ...]) -> list[Any]:
    """A state of numpy's with its array as a list."""
    return [part.tolist() if hasattr(part, "tolist") else part for part in state]


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers: torch's, Python's or numpy's."""
    numpy = sys.modules.get("numpy.random")
    kinds = (torch.Generator, random.Random, *((numpy.RandomState, numpy.Generator) if numpy else ()))
    return isinstance(value, kinds)


BLANK = frozenset(vars(nn.Module()))


def pytree_items(name: str, value: Any) -> list[tuple[str, Any]]:
    """The leaves of a value with names."""
    leaves = pytree.leaves(value)
    return [(name if leaf is value else f"{name}[{i}]", leaf) for i, leaf in enumerate(leaves)]


def mark_of(value: Any) -> Any:
    """What shows that an attribute has another value."""
    if isinstance(value, int | float | str | bytes | type(None)):
        return type(value).__name__, repr(value)
    if isinstance(value, Tensor):
        return "a tensor", id(value), value._version if not value.is_inference() else 0
    if isinstance(value, list | tuple | dict | set):
        inner = value.values() if isinstance(value, dict) else value
        return type(value).__name__, len(value), tuple(mark_of(x) for x in inner) if len(value) < 64 else id(value)
    return "an object", id(value)
