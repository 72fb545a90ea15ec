"""Recomputation in the backward pass (remat), which must see what the first run saw beside its arguments.

That is: random numbers (torch's generators, Python's, numpy's, and draws by a key), autocast and the default dtype.
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
from torch import Tensor

from fzero.core import gpu, pytree
from fzero.core.arguments import checked
from fzero.core.autodiff import Function, expect_closed
from fzero.core.closure_state import ClosureState, first_change, is_generator
from fzero.core.graph_tracing import Collectives, Impure, Watch, is_foreign
from fzero.core.purity_checks import equal_values, values_of
from fzero.core.random_interception import CURRENT, Draws
from fzero.core.torch_private import get_current_dispatch_mode, unwrap_dead_wrappers

R = TypeVar("R")
DEVICES = ("cpu", "cuda")
ANEW = "which a compiled or traced program draws anew where it recomputes them; hand them in as an argument"


class RandomState(NamedTuple):
    """The states of generators of random numbers."""

    generators: list[tuple[Any, Any]]

    @classmethod
    def capture(cls, generators: Sequence[Any] = ()) -> RandomState:
        """The states of torch's generators, of Python's and of numpy's, and of these."""
        numpy = sys.modules.get("numpy.random")
        defaults = [torch.default_generator, *gpu.generators(), random, *([numpy] if numpy else ())]
        return cls([(generator, copy_state(generator)) for generator in (*defaults, *generators)])

    def set(self) -> None:
        """Put the states back."""
        for generator, state in self.generators:
            if hasattr(generator, "set_state"):
                generator.set_state(state)
            elif hasattr(generator, "setstate"):
                generator.setstate(state)
            else:
                generator.bit_generator.state = state

    def equals(self, rhs: RandomState) -> bool:
        """Whether nothing was drawn between the two."""
        return all(equal(a, b) for (_, a), (_, b) in zip(self.generators, rhs.generators))


def copy_state(generator: Any) -> Any:
    """The state of a generator: one of torch's, Python's or numpy's, or one of the last two themselves."""
    if hasattr(generator, "get_state"):
        return generator.get_state()
    return generator.getstate() if hasattr(generator, "getstate") else generator.bit_generator.state


@contextlib.contextmanager
def preserve_random_states() -> Iterator[None]:
    """The generators of random numbers are afterwards as they were before."""
    saved_state = RandomState.capture()
    try:
        yield
    finally:
        saved_state.set()


def equal(a: Any, b: Any) -> bool:
    """Whether two states, with arrays in them, are equal."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and any(hasattr(x, "all") for x in a):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) if not hasattr(a, "all") else bool((a == b).all())


def autocast_settings() -> list[tuple[str, bool, torch.dtype, bool]]:
    """The autocast of each kind of device: (device, whether it is on, its dtype, whether it keeps casts)."""
    cache = torch.is_autocast_cache_enabled()
    return [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), cache) for device in DEVICES]


class AmbientState(NamedTuple):
    """What a program reads beside its arguments."""

    random: RandomState | None  # None: it draws nothing
    draws: tuple[Draws, int] | None  # those that are on, and how many were made
    casts: list[tuple[str, bool, torch.dtype, bool]]
    dtype: torch.dtype

    @classmethod
    def capture(cls, generators: Sequence[Any] = ()) -> AmbientState:
        """What a program reads that begins here."""
        draws = CURRENT.get()
        number = None if draws is None else (draws, draws.number)
        return cls(RandomState.capture(generators), number, autocast_settings(), torch.get_default_dtype())

    def drop_unmoved(self, generators: Sequence[Any] = ()) -> AmbientState:
        """The same, without random states if nothing was drawn since."""
        assert self.random is not None
        return self._replace(random=None) if self.random.equals(RandomState.capture(generators)) else self

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """These surroundings, and afterwards the caller's again."""
        dtype = torch.get_default_dtype()
        generators = [generator for generator, _ in self.random.generators] if self.random else []
        caller_state = RandomState.capture(generators) if self.random else None
        with contextlib.ExitStack() as stack:
            if self.draws is not None:
                stack.enter_context(self.draws[0].resume(self.draws[1]))
            for (device, enabled, kind, cache), current in zip(self.casts, autocast_settings()):
                if (device, enabled, kind, cache) != current:
                    stack.enter_context(torch.autocast(device, kind, enabled, cache))
            try:
                torch.set_default_dtype(self.dtype)
                if self.random is not None:
                    self.random.set()
                yield
            finally:
                torch.set_default_dtype(dtype)
                if caller_state is not None:
                    caller_state.set()


LOOKS: Counter[Any] = Counter()  # calls of somebody's functions that are recomputed, by their code
MAX_LOOKS = 4  # calls of a function that are looked at for generators
DRAWING: set[Any] = set()  # the codes of those that reach a generator


def generators_in(f: Any, *arguments: Any) -> list[Any]:
    """The generators that a function, what it calls, or its arguments hold."""
    # A function that reached none in its first calls is not searched again.
    generators, codes = [x for x in pytree.leaves(arguments) if is_generator(x)], codes_of(f)
    if is_foreign(f) and (LOOKS[codes] < MAX_LOOKS or codes in DRAWING):
        reached = ClosureState.from_function(f).generators.values()
        DRAWING.update([codes] if reached else [])
        generators += reached
    return list(
        {
            id(generator): generator for generator in generators if not isinstance(generator, random.SystemRandom)
        }.values()
    )


def is_inspected(f: Any) -> bool:
    """Whether a function is somebody's, and this is one of its first calls."""
    codes = codes_of(f)
    return bool(codes) and is_foreign(f) and LOOKS[codes] < MAX_LOOKS and not is_traced()


def check_repeatable(f: Any, run: Callable[[], Any], generators: Sequence[Any]) -> None:
    """In the first calls of f: call `run` as `call_repeatable` does; leave no draw behind."""
    if not is_inspected(f):
        return
    initial = AmbientState.capture(generators)
    with torch.no_grad():
        call_repeatable(f, run, initial)
    assert initial.random is not None
    initial.random.set()
    if initial.draws is not None:
        initial.draws[0].number = initial.draws[1]


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
    return tuple(function.__code__ for function in (f, *cells) if isinstance(function, FunctionType))


def cell_is_full(cell: Any) -> bool:
    """Whether a variable that a function closes over has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def call_repeatable(f: Any, run: Callable[[], R], initial: AmbientState) -> R:
    """What `run` returns, which calls f; raises Impure if a second call gives other values."""
    # A recomputation would see them: a count, an iterator, an average, a clock. A function with collectives is not
    # called twice, as other ranks would wait for it.
    if not is_inspected(f):
        return run()
    LOOKS[codes_of(f)] += 1
    closure = ClosureState.from_function(f)
    marks = closure.marks()
    with Collectives() as collectives:
        out = run()
    if not collectives.called:
        changed = first_change(marks, closure.marks())
        with initial.restored(), torch.no_grad():
            second = values_of(run())
        first = values_of(out)
        if len(first) != len(second) or not all(equal_values(x, y, False) for x, y in zip(first, second)):
            cause = f"changes {changed} and depends on it" if changed else "depends on a clock, or on what it changes"
            raise Impure(
                f"a function that is recomputed {cause}, so that it would compute something else the second time; hand "
                "in what changes as an argument"
            )
    return out


class Rerun:
    """A function whose calls after the first one see what the first one saw beside its arguments."""

    def __init__(self, run: Callable[..., Any], f: Any, generators: Sequence[Any] = ()):
        self.run, self.f, self.generators = run, f, generators
        self.first: AmbientState | None = None

    def __call__(self, *args: Any) -> Any:
        if self.first is not None:
            with self.first.restored():
                return self.run(*args)
        initial = AmbientState.capture(self.generators)
        with first_run():
            out = call_repeatable(self.f, lambda: self.run(*args), initial)
        self.first = initial.drop_unmoved(self.generators)
        return out


@contextlib.contextmanager
def first_run() -> Iterator[None]:
    """A mode that refuses draws by torch's generators in recorded operators, and keeps the draws by a key."""
    draws, traced = CURRENT.get(), is_traced()
    with contextlib.nullcontext() if draws is None else draws.reenter(), contextlib.ExitStack() as stack:
        if traced and draws is None:
            stack.enter_context(Watch({}, reason=ANEW))
        yield


def _bind_arguments(run: Callable[..., Any], values: Sequence[Any], positions: Sequence[int]) -> Callable[..., Any]:
    """`run` as a function of the arguments at `positions` alone; the others are fixed to `values`."""

    def call_selected(*selected: Tensor) -> Any:
        full = list(values)
        for i, value in zip(positions, selected):
            full[i] = value
        return run(*full)

    return call_selected


class _Remat(Function):
    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        # Autograd cannot save an input that is also an output, such as what a dropout passes.
        return tuple(x.view_as(x) if any(x is t for t in tensors) else x for x in run(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.run = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = unwrap_dead_wrappers(ctx.saved_tensors)  # of a recomputation around this one, which is over
        grad_indices = [i for i, t in enumerate(saved) if ctx.needs_input_grad[i + 1]]

        vjp = torch.func.vjp(_bind_arguments(ctx.run, saved, grad_indices), *(saved[i] for i in grad_indices))[1]
        results: list[Tensor | None] = [None] * (len(saved) + 1)
        for i, grad in zip(grad_indices, vjp(grads)):
            results[i + 1] = grad
        return tuple(results)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        primals = ctx.saved_tensors
        live = [i for i, t in enumerate(tangents) if t is not None]
        arguments = (tuple(values[i] for i in live) for values in (primals, tangents))
        return torch.func.jvp(_bind_arguments(ctx.run, primals, live), *arguments)[1]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], run: Callable, *tensors: Tensor) -> tuple[Any, ...]:
        batched = torch.vmap(run, in_dims=in_dims[1:], randomness=info.randomness)
        out = _Remat.apply(batched, *tensors)
        return out, (0,) * len(out)


@checked()
def remat(f: Callable[..., R]) -> Callable[..., R]:
    """Return a function equal to `f` that keeps only its inputs for the backward pass, which runs `f` again.

    f: a pure function of trees of tensors, of any shapes and dtypes, that returns a tree. Values and gradients have the
    same bits as those of `f`. Composes with torch.func.grad, vjp, jvp and vmap, and with .backward(). What f reads
    beside its arguments is put back where it runs again: random numbers, those of generators of torch, Python and numpy
    that it reaches too, autocast and the default dtype.

    Raises ValueError if `f` closes over a tensor that is differentiated: pass it as an argument; if it changes a
    variable that its result depends on (a count, an iterator, an average), in one of its first calls; and, where it is
    compiled or traced, if it draws random numbers by torch's generators.

    >>> f = remat(lambda p, x: torch.tanh(x @ p["w"]).sum())
    >>> torch.func.grad(f)({"w": torch.zeros(2, 2)}, torch.ones(1, 2))["w"]
    tensor([[1., 1.],
            [1., 1.]])

    Ref: Chen et al. 2016, "Training deep nets with sublinear memory cost", arXiv:1604.06174, section 3.
    """

    def remat_f(*args: Any) -> Any:
        expect_closed(f, "remat")
        flat, treedef = pytree.flatten(args)
        positions = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        out_def: list[Any] = []

        def run(*leaves: Any) -> tuple[Tensor, ...]:
            out, out_treedef = pytree.flatten(f(*pytree.unflatten(leaves, treedef)))
            out_def[:] = [out_treedef]
            return tuple(out)

        out = _Remat.apply(
            Rerun(_bind_arguments(run, flat, positions), f, generators_in(f, *flat)), *(flat[i] for i in positions)
        )
        return pytree.unflatten(out, out_def[0])

    return remat_f
