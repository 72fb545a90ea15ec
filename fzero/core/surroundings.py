"""What a program reads beside its arguments, put back where it runs again: a recomputation must see what the first run
saw, or its gradient is that of another function.

That is: random numbers (torch's generators, Python's, numpy's, and the draws by a key), autocast and the default
dtype.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

import torch

from fzero.core import gpu, pytree
from fzero.core.belongings import Belongings, is_generator, unlike
from fzero.core.draws import CURRENT, Draws
from fzero.core.graph_cut import Collectives, Impure, Watch, is_foreign
from fzero.core.pure_calls import same_values, values_of
from fzero.core.torch_private import get_current_dispatch_mode

R = TypeVar("R")
DEVICES = ("cpu", "cuda")
ANEW = "which a compiled or traced program draws anew where it recomputes them; hand them in as an argument"


class RandomState(NamedTuple):
    """The states of generators of random numbers."""

    generators: list[tuple[Any, Any]]

    @classmethod
    def now(cls, generators: Sequence[Any] = ()) -> RandomState:
        """The states of torch's generators, of Python's and of numpy's, and of these."""
        numpy = sys.modules.get("numpy.random")
        known = [torch.default_generator, *gpu.generators(), random, *([numpy] if numpy else ())]
        return cls([(one, copy_state(one)) for one in (*known, *generators)])

    def set(self) -> None:
        """Put the states back."""
        for one, state in self.generators:
            if hasattr(one, "set_state"):
                one.set_state(state)
            elif hasattr(one, "setstate"):
                one.setstate(state)
            else:
                one.bit_generator.state = state

    def equals(self, other: RandomState) -> bool:
        """Whether nothing was drawn between the two."""
        return all(equal(a, b) for (_, a), (_, b) in zip(self.generators, other.generators))


def copy_state(generator: Any) -> Any:
    """The state of a generator: one of torch's, Python's or numpy's, or one of the last two themselves."""
    if hasattr(generator, "get_state"):
        return generator.get_state()
    return generator.getstate() if hasattr(generator, "getstate") else generator.bit_generator.state


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """The generators of random numbers are afterwards as they were before."""
    before = RandomState.now()
    try:
        yield
    finally:
        before.set()


def equal(a: Any, b: Any) -> bool:
    """Whether two states, with arrays in them, are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and any(hasattr(x, "all") for x in a):
        return len(a) == len(b) and all(map(equal, a, b))
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
    def now(cls, generators: Sequence[Any] = ()) -> Surroundings:
        """What a program reads that begins here."""
        draws = CURRENT.get()
        number = None if draws is None else (draws, draws.number)
        return cls(RandomState.now(generators), number, cast_now(), torch.get_default_dtype())

    def without_unmoved(self, generators: Sequence[Any] = ()) -> Surroundings:
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


LOOKS: Counter[Any] = Counter()  # calls of somebody's functions that are recomputed, by their code
MOST_LOOKS = 4
DRAWING: set[Any] = set()  # the codes of those that reach a generator


def generators_in(f: Any, *arguments: Any) -> list[Any]:
    """The generators that a function, what it calls, or its arguments hold. A function that reached none in its first
    calls is not searched again."""
    found, codes = [x for x in pytree.leaves(arguments) if is_generator(x)], codes_of(f)
    if is_foreign(f) and (LOOKS[codes] < MOST_LOOKS or codes in DRAWING):
        reached = Belongings.by(f).generators.values()
        DRAWING.update([codes] if reached else [])
        found += reached
    return list({id(one): one for one in found if not isinstance(one, random.SystemRandom)}.values())


def is_looked_at(f: Any) -> bool:
    """Whether a function is somebody's, and this is one of its first calls."""
    codes = codes_of(f)
    return bool(codes) and is_foreign(f) and LOOKS[codes] < MOST_LOOKS and not is_traced()


def check_repeatable(f: Any, run: Callable[[], Any], generators: Sequence[Any]) -> None:
    """In the first calls of f: call `run`, which calls it, as `call_repeatable` does, and leave no draw behind."""
    if not is_looked_at(f):
        return
    before = Surroundings.now(generators)
    with torch.no_grad():
        call_repeatable(f, run, before)
    assert before.random is not None
    before.random.set()
    if before.draws is not None:
        before.draws[0].number = before.draws[1]


def is_traced() -> bool:
    """Whether a mode around may record operators."""
    mode = get_current_dispatch_mode()
    return mode is not None and not isinstance(mode, Collectives)


def codes_of(f: Any) -> tuple[CodeType, ...]:
    """The code of a function, and of those that it closes over."""
    if isinstance(f, functools.partial):
        return sum(map(codes_of, (f.func, *f.args, *f.keywords.values())), ())
    f = inspect.unwrap(f) if callable(f) else f
    cells = [cell.cell_contents for cell in getattr(f, "__closure__", None) or () if cell_is_full(cell)]
    return tuple(one.__code__ for one in (f, *cells) if isinstance(one, FunctionType))


def cell_is_full(cell: Any) -> bool:
    """Whether a variable that a function closes over has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def call_repeatable(f: Any, run: Callable[[], R], before: Surroundings) -> R:
    """What `run` returns, which calls f; raises Impure if a second call gives other values, as a recomputation would:
    of a count, an iterator, an average, a clock. The first calls of f are made twice. before: the surroundings here.

    A function with collectives is not called twice: other ranks would wait for it."""
    if not is_looked_at(f):
        return run()
    LOOKS[codes_of(f)] += 1
    belongings = Belongings.by(f)
    marks = belongings.marks()
    with Collectives() as collectives:
        out = run()
    if not collectives.called:
        changed = unlike(marks, belongings.marks())
        with before.again(), torch.no_grad():
            again = values_of(run())
        first = values_of(out)
        if len(first) != len(again) or not all(same_values(x, y, False) for x, y in zip(first, again)):
            why = f"changes {changed} and depends on it" if changed else "depends on a clock, or on what it changes"
            raise Impure(
                f"a function that is recomputed {why}, so that it would compute something else the second time; hand "
                "in what changes as an argument"
            )
    return out


class Rerun:
    """A function whose calls after the first one see what the first one saw beside its arguments."""

    def __init__(self, run: Callable[..., Any], f: Any, generators: Sequence[Any] = ()):
        self.run, self.f, self.generators = run, f, generators
        self.first: Surroundings | None = None

    def __call__(self, *args: Any) -> Any:
        if self.first is not None:
            with self.first.again():
                return self.run(*args)
        before = Surroundings.now(self.generators)
        with first_run():
            out = call_repeatable(self.f, lambda: self.run(*args), before)
        self.first = before.without_unmoved(self.generators)
        return out


@contextlib.contextmanager
def first_run() -> Iterator[None]:
    """A mode that refuses draws by torch's generators where operators are recorded, as no state of theirs is; and the
    draws by a key that are on, which torch leaves where it calls an autograd.Function under its transforms.
    """
    draws, traced = CURRENT.get(), is_traced()
    with contextlib.nullcontext() if draws is None else draws.entered_again(), contextlib.ExitStack() as stack:
        if traced and draws is None:
            stack.enter_context(Watch({}, why=ANEW))
        yield
