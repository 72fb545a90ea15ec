"""Calls of somebody's function in a step: it must be a pure function of what it is given.

The first call with new shapes is watched for draws without a key, writes into older tensors, and states that modules
carry on. Calls 1, 2, 4, ... 64 are made twice with the same draws: so clocks, generators and counts are noticed. A call
with collectives is not: other ranks would wait for it or miss it.

torch.utils.checkpoint within somebody's code is passed over: it recomputes by hooks that torch.func does not have. What
is recomputed is said beside the code: Execution(remat=), fzero.remat.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from fzero.core import pytree
from fzero.core.closure_state import ClosureState, first_change, new_tensors
from fzero.core.gpu import is_capturing
from fzero.core.graph_tracing import BY_AUTOGRAD, Impure, Watch, line, outside_transforms, storage_of
from fzero.core.random_interception import Draws, expect_no_seed
from fzero.core.torch_private import (
    FakeTensor,
    get_current_dispatch_mode,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from fzero.core.variable_snapshot import Snapshot, name_of

BYPASSED: ContextVar[bool] = ContextVar("PASSED", default=False)


@contextlib.contextmanager
def bypass_checkpoint() -> Iterator[None]:
    """Within it torch.utils.checkpoint calls what it wraps, and a warning says so."""
    install()
    token = BYPASSED.set(True)
    try:
        yield
    finally:
        BYPASSED.reset(token)


@functools.cache
def install() -> None:
    """Have torch.utils.checkpoint ask whether it is passed over."""
    from fzero.core.torch_private import checkpoint_without_reentrant as without_reentrant

    reentrant = torch.utils.checkpoint.CheckpointFunction.apply

    @functools.wraps(without_reentrant)
    def hooks(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not BYPASSED.get():
            yield from without_reentrant(*args, **kwargs)
            return
        warn_bypassed()
        yield

    @functools.wraps(reentrant)
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        if not BYPASSED.get():
            return reentrant(function, preserve, *args)
        warn_bypassed()
        return function(*args)

    setattr(torch.utils.checkpoint, without_reentrant.__name__, hooks)
    torch.utils.checkpoint.CheckpointFunction.apply = staticmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def warn_bypassed() -> None:
    """Warn, once, that something is not recomputed."""
    warnings.warn(
        'torch.utils.checkpoint is passed over in a step: recompute layers by fzero.Execution(remat="full"), and parts '
        "of a loss function by fzero.remat",
        UserWarning,
        stacklevel=4,
    )


R = TypeVar("R")
LOOKS = frozenset(1 << i for i in range(7))  # the calls that are made twice


class PureCalls:
    """Calls of one function, and the module that it calls, of which no state may be carried on."""

    def __init__(
        self, module: nn.Module | None = None, originals: Callable[[], Mapping[str, Tensor]] = lambda: {}
    ) -> None:
        self.module, self.originals = module, originals
        self.draws_by_shape: dict[Any, bool] = {}  # by the shapes of a call that was watched: whether it may draw
        self.number = 0  # calls so far, but for those that are traced or recorded

    def __call__(
        self, f: Callable[[], R], inputs: Mapping[str, Tensor], draws: Draws, find_state: Callable[[], ClosureState]
    ) -> R:
        """What f returns; raises Impure, at the first call with these shapes, for what no pure function does."""
        with bypass_checkpoint():
            return self.call(f, inputs, draws, find_state)

    def call(
        self, f: Callable[[], R], inputs: Mapping[str, Tensor], draws: Draws, find_state: Callable[[], ClosureState]
    ) -> R:
        """The call itself."""
        shapes = tuple((name, x.shape, x.dtype, x.device) for name, x in inputs.items()), draws.disabled
        traced = get_current_dispatch_mode() is not None
        recorded = any(is_capturing(x.device) for x in itertools.islice(inputs.values(), 1))
        self.number += not (traced or recorded)
        looks = self.number in LOOKS and self.module is None and not (traced or recorded)
        if shapes in self.draws_by_shape and not traced and not looks:
            with draws if self.draws_by_shape[shapes] else contextlib.nullcontext():
                return f()
        state = find_state()
        with expect_no_seed(), draws, Watch(state.tensors | dict(inputs), originals=self.originals()) as watch:
            if self.module is not None and not traced:
                out = self.call_module(f, inputs, draws, state, watch)
            else:
                initial_marks = state.marks()
                out = explain_writes(f)
                changed = first_change(initial_marks, state.marks())
                if (changed or looks) and not (recorded or watch.communicates):
                    first = values_of(out)
                    del out  # with its graph, before there is another one
                    out = rerun(f, draws)
                    expect_same(first, values_of(out), changed)
        if not traced:
            self.draws_by_shape[shapes] = draws.used or self.draws_by_shape.get(shapes, False)
        return out

    def call_module(
        self, f: Callable[[], R], inputs: Mapping[str, Tensor], draws: Draws, state: ClosureState, watch: Watch
    ) -> R:
        """The first call of a function that calls a module."""
        assert self.module is not None
        state.note_module("the module", self.module)

        def run() -> Any:
            with torch.set_grad_enabled(watch.autograd.called), expect_data(inputs):
                out = rerun(f, draws)
                return pytree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)

        try:
            explain_writes(run)  # in which the module makes what it makes once
        except RuntimeError:
            if not watch.autograd.called:  # a loss may need gradients of its own
                raise
            explain_writes(run)
        expect_pure(run, state, Snapshot(self.module, *state.functions))
        return rerun(f, draws)


def expect_pure(call: Callable[[], R], state: ClosureState, snapshot: Snapshot) -> tuple[R, list[str]]:
    """(what a call that runs a module returns, the variables that each call replaces); raises Impure."""
    initial_marks = state.marks()
    with expect_no_seed():
        out = call()
    first_marks = state.marks()
    snapshot = snapshot.retake()
    second = call()
    changed = first_change(first_marks, state.marks()) or first_change(initial_marks, first_marks)
    if not is_near(second, out):
        raise Impure(LOST.format(changed) if changed else UNLIKE)
    new_names = new_tensors(first_marks, state.marks())
    if lost_name := next((name for name in new_names if name.startswith("the module")), ""):
        raise Impure(LOST.format(lost_name))
    for variables, key in list(snapshot.numbers_changed()):
        try:
            variables.set_number(key, variables.contents()[key] + FAR)
            unchanged = is_near(call(), out)
        except Exception:  # somebody's code with a number that it does not expect
            unchanged = False
        finally:
            snapshot.restore()
        if not unchanged:
            raise Impure(LOST.format(name_of(variables, key)))
    return second, new_names


FAR = 1_000_003  # that a count is moved by, to see whether a result depends on it
LOST = (
    "the forward pass changes {}, and what is no parameter is lost; return it, draw random numbers by torch, and hand "
    "in by the batch what changes"
)
UNLIKE = (
    "two calls of the module with the same parameters and batch give different results (a clock, or a state that no "
    "variable shows), so that it is no function of them; hand in by the batch what changes"
)


@contextlib.contextmanager
def expect_data(inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise Impure if a tensor that a function is given has other memory afterwards."""
    storages = {name: storage_of(x) for name, x in inputs.items()}
    yield
    for name, x in inputs.items():
        if storage_of(x) != storages[name]:
            raise Impure(
                f"the forward pass sets the data of {name}, and a state that is no parameter is lost; return it, or "
                "hand it in by the batch"
            )


def explain_writes(f: Callable[[], R]) -> R:
    """What f returns; raises Impure for a write that torch.func refuses before any mode sees it."""
    try:
        return f()
    except RuntimeError as error:
        if "Tensor.requires_grad_()" in str(error):
            raise Impure(f"{line(error)}: {BY_AUTOGRAD}") from error
        if not any(text in str(error) for text in WRITES):
            raise
        raise Impure(
            f"{line(error)}: writes in place into a parameter, or a tensor that is no argument, such as a buffer; make "
            "a new tensor, as in x = x + y"
        ) from error


# What torch says of writes before it calls an operator.
WRITES = ("mutate a captured Tensor", "a leaf Variable that requires grad is being used in an in-place operation")


def rerun(f: Callable[[], R], draws: Draws) -> R:
    """What f returns a second time, with the same draws."""
    draws.number = 0
    return f()


def values_of(out: Any) -> list[Tensor | float]:
    """The tensors and numbers that a call returned, as values outside of all transforms, without a graph."""
    with outside_transforms():
        leaves = [plain(leaf) if isinstance(leaf, Tensor) else leaf for leaf in pytree.leaves(out)]
    return [leaf for leaf in leaves if isinstance(leaf, int | float | Tensor)]


def plain(x: Tensor) -> Tensor:
    """The values of a tensor that transforms of torch.func wrap."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x.detach()


def expect_same(first: list[Tensor | float], second: list[Tensor | float], changed: str) -> None:
    """Raise Impure if two calls gave other values; changed: what the first call changed, or ""."""
    pairs = list(zip(first, second))
    if len(first) == len(second) and all(equal_values(x, y, changed != "") for x, y in pairs):
        return
    if changed:
        raise Impure(
            f"the loss changes {changed} and depends on it, so that it is no function of (state, batch); draw "
            "random numbers by torch, and hand in what changes by the batch"
        )
    raise Impure(
        "two calls of the loss with the same parameters, batch and random numbers of torch gave other values, so that "
        "it is no function of (state, batch); it may read a clock, bytes of the system (os.urandom, uuid, secrets), a "
        "file, or a generator that it makes itself, such as numpy.random.default_rng(); draw random numbers by torch, "
        "and hand in what changes by the batch"
    )


def equal_values(x: Tensor | float, y: Tensor | float, changed: bool) -> bool:
    """Whether two results are the same, but for sums in another order; changed: something shows otherwise."""
    # On a CPU one operation has one result, but for float32 rows that are added at one index. On a GPU sums in any
    # order are usual, and their errors are as large as the parts of a sum: there a result counts as at least 1.
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        if isinstance(x, Tensor) or isinstance(y, Tensor) or type(x) is not type(y):
            return False
        return x == y or (math.isnan(x) and math.isnan(y)) or math.isclose(x, y, rel_tol=1e-5)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if isinstance(x, FakeTensor) or x.is_meta:
        return True  # which have no values
    if not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    if changed:
        return torch.allclose(x, y, rtol=1e-5, atol=0.0, equal_nan=True)
    sizes, gpu = x[x.isfinite()].abs(), x.device.type != "cpu"
    size = float(sizes.amax()) if sizes.numel() else 0.0
    bound = 1e-2 * max(1.0, size) if gpu else torch.finfo(x.dtype).eps ** 0.85 * size
    return torch.allclose(x, y, rtol=0.0, atol=bound, equal_nan=True)


def is_near(a: Any, b: Any, rounds: float = 1.0) -> bool:
    """Whether two results are the same, but for sums in another order. rounds: how often these are made."""
    leaves = pytree.leaves(a), pytree.leaves(b)
    return len(leaves[0]) == len(leaves[1]) and all(near_values(x, y, rounds) for x, y in zip(*leaves))


def near_values(x: Any, y: Any, rounds: float) -> bool:
    """Whether two tensors, or other values, are the same but for rounding."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return type(x) is type(y) and bool(x == y or x != x)
    with outside_transforms(), torch.no_grad():
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
        while is_functorch_wrapped_tensor(y):
            y = get_unwrapped(y)
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        if not x.is_floating_point() or not x.numel():
            return torch.equal(x, y)
        matching = (x == y) | ((x != x) & (y != y))
        size = y.abs().masked_fill(~y.isfinite(), 0.0).max()
        max_error = (x - y).abs().masked_fill(matching, 0.0).max()
        return bool(max_error <= min(rounds * RATES.get(x.dtype, 1e-2), 0.1) * size)


RATES = {torch.float64: 1e-12, torch.float32: 1e-5}  # of rounding, by dtype
