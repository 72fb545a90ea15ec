"""What a program reads beside its arguments, put back where it runs again: a recomputation must see what the first run
saw, or its gradient is that of another function.

That is: random numbers (torch's generators, Python's, numpy's, and the draws by a key), autocast and the default
dtype.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import gpu, pytree
from fzero.core.draws import CURRENT, Draws
from fzero.core.graph_cut import Watch
from fzero.core.torch_private import get_current_dispatch_mode

DEVICES = ("cpu", "cuda")
ANEW = "which a compiled or traced program draws anew where it recomputes them; hand them in as an argument"


class RandomState(NamedTuple):
    """The states of generators of random numbers."""

    generators: list[tuple[torch.Generator, Tensor]]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, generators: Sequence[torch.Generator] = ()) -> RandomState:
        """The states of torch's generators and of these, of Python's and of numpy's."""
        known = [torch.default_generator, *gpu.generators()]
        numpy = sys.modules.get("numpy.random")
        states = [(one, one.get_state()) for one in (*known, *generators)]
        return cls(states, random.getstate(), numpy and numpy.get_state())

    def set(self) -> None:
        """Put the states back."""
        for one, state in self.generators:
            one.set_state(state)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)

    def equals(self, other: RandomState) -> bool:
        """Whether nothing was drawn between the two."""
        pairs = zip(self.generators, other.generators)
        return (
            all(bool((a == b).all()) for (_, a), (_, b) in pairs)
            and self.python == other.python
            and (self.numpy is None or all(map(equal, self.numpy, other.numpy)))
        )


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """The generators of random numbers are afterwards as they were before."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.set()


def equal(a: Any, b: Any) -> bool:
    """Whether two values, or arrays of them, are equal."""
    return bool(a == b) if not hasattr(a, "all") else bool((a == b).all())


def cast_now() -> list[tuple[str, bool, torch.dtype, bool]]:
    """The autocast of each kind of device: (device, whether it is on, its dtype, whether it keeps casts)."""
    cache = torch.is_autocast_cache_enabled()
    return [(one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one), cache) for one in DEVICES]


class Surroundings(NamedTuple):
    """What a program reads beside its arguments."""

    random: RandomState | None  # None: it draws nothing
    draws: tuple[Draws, int] | None  # those that are on, and how many were made
    casts: list[tuple[str, bool, torch.dtype, bool]]
    dtype: torch.dtype

    @classmethod
    def now(cls, generators: Sequence[torch.Generator] = ()) -> Surroundings:
        """What a program reads that begins here."""
        draws = CURRENT.get()
        number = None if draws is None else (draws, draws.number)
        return cls(RandomState.now(generators), number, cast_now(), torch.get_default_dtype())

    def without_unmoved(self, generators: Sequence[torch.Generator] = ()) -> Surroundings:
        """The same, without random states if nothing was drawn since."""
        assert self.random is not None
        return self._replace(random=None) if self.random.equals(RandomState.now(generators)) else self

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """These surroundings, and afterwards the caller's again."""
        dtype, generators = torch.get_default_dtype(), [one for one, _ in self.random.generators] if self.random else []
        before = RandomState.now(generators) if self.random else None
        with contextlib.ExitStack() as stack:
            if self.draws is not None:
                stack.enter_context(self.draws[0].again(self.draws[1]))
            for (device, on, kind, cache), now in zip(self.casts, cast_now()):
                if (device, on, kind, cache) != now:
                    stack.enter_context(torch.autocast(device, kind, on, cache))
            try:
                torch.set_default_dtype(self.dtype)
                if self.random is not None:
                    self.random.set()
                yield
            finally:
                torch.set_default_dtype(dtype)
                if before is not None:
                    before.set()


def generators_in(*values: Any) -> list[torch.Generator]:
    """The generators that a function's arguments, or what it closes over, hold."""
    found: list[torch.Generator] = []
    for value in values:
        code = getattr(value, "__code__", None)
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or () if cell_is_full(cell)]
        names = [value.__globals__[name] for name in code.co_names if name in value.__globals__] if code else []
        found += [x for x in pytree.leaves([value, *cells, *names]) if isinstance(x, torch.Generator)]
    return list({id(one): one for one in found}.values())


def cell_is_full(cell: Any) -> bool:
    """Whether a variable that a function closes over has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


class Rerun:
    """A function whose calls after the first one see what the first one saw beside its arguments."""

    def __init__(self, run: Callable[..., Any], generators: Sequence[torch.Generator] = ()):
        self.run, self.generators = run, generators
        self.first: Surroundings | None = None

    def __call__(self, *args: Any) -> Any:
        if self.first is not None:
            with self.first.again():
                return self.run(*args)
        before = Surroundings.now(self.generators)
        with first_run():
            out = self.run(*args)
        self.first = before.without_unmoved(self.generators)
        return out


@contextlib.contextmanager
def first_run() -> Iterator[None]:
    """A mode that refuses draws by torch's generators where operators are recorded, as no state of theirs is; and the
    draws by a key that are on, which torch leaves where it calls an autograd.Function under its transforms.
    """
    draws, traced = CURRENT.get(), get_current_dispatch_mode() is not None
    with contextlib.nullcontext() if draws is None else draws.entered_again(), contextlib.ExitStack() as stack:
        if traced and draws is None:
            stack.enter_context(Watch({}, why=ANEW))
        yield
