"""Calls of somebody's function in a step: it must be a pure function of what it is given.

The first call with arguments of new shapes is watched: what is random must come from a key (core.draws), nothing that
was there before may be written into, and attributes of modules may not carry anything on to the next call. The first
call, the second, the fourth and so on to the 64th are watched too, and made twice with the same draws: so clocks,
generators that the function makes itself and bytes of the system are noticed, of which nothing else shows, and what it
begins to count or average later. Other calls run as they are; only those of a function that draws run within its Draws.

A call with collectives is not made twice: other ranks may see other shapes, and would wait for it or miss it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fzero.core import pytree
from fzero.core.belongings import Belongings, new_tensors, unlike
from fzero.core.draws import Draws, expect_no_seed
from fzero.core.gpu import is_capturing
from fzero.core.graph_cut import BY_AUTOGRAD, Impure, Watch, apart, line, storage_of
from fzero.core.recomputation import passed_over
from fzero.core.snapshot import Snapshot, name_of
from fzero.core.torch_private import (
    FakeTensor,
    get_current_dispatch_mode,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)

R = TypeVar("R")
LOOKS = frozenset(1 << i for i in range(7))  # the calls that are made twice


class PureCalls:
    """Calls of one function. module: one whose forward pass it calls, and of which no state may be carried on.
    originals: finds the tensors, by name, in whose place the function is given others."""

    def __init__(
        self, module: nn.Module | None = None, originals: Callable[[], Mapping[str, Tensor]] = lambda: {}
    ) -> None:
        self.module, self.originals = module, originals
        self.known: dict[Any, bool] = {}  # by the shapes of a call that was watched: whether it may draw
        self.number = 0  # calls so far, but for those that are traced or recorded

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
        recorded = any(is_capturing(x.device) for x in itertools.islice(given.values(), 1))
        self.number += not (traced or recorded)
        looks = self.number in LOOKS and self.module is None and not (traced or recorded)
        if shapes in self.known and not traced and not looks:
            with draws if self.known[shapes] else contextlib.nullcontext():
                return f()
        belongings = find_belongings()
        with expect_no_seed(), draws, Watch(belongings.tensors | dict(given), originals=self.originals()) as watch:
            if self.module is not None and not traced:
                out = self.call_module(f, given, draws, belongings, watch)
            else:
                before = belongings.marks()
                out = named_writes(f)
                changed = unlike(before, belongings.marks())
                if (changed or looks) and not (recorded or watch.communicates):
                    first = values_of(out)
                    del out  # with its graph, before there is another one
                    out = f_again(f, draws)
                    expect_same(first, values_of(out), changed)
        if not traced:
            self.known[shapes] = draws.used or self.known.get(shapes, False)
        return out

    def call_module(
        self, f: Callable[[], R], given: Mapping[str, Tensor], draws: Draws, belongings: Belongings, watch: Watch
    ) -> R:
        """The first call of a function that calls a module."""
        assert self.module is not None
        belongings.note_module("the module", self.module)

        def run() -> Any:
            with torch.set_grad_enabled(watch.autograd.called), expect_data(given):
                out = f_again(f, draws)
                return pytree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, out)

        try:
            named_writes(run)  # in which the module makes what it makes once
        except RuntimeError:
            if not watch.autograd.called:  # a loss may need gradients of its own
                raise
            named_writes(run)
        expect_pure(run, belongings, Snapshot(self.module, *belongings.functions))
        return f_again(f, draws)


def expect_pure(call: Callable[[], R], belongings: Belongings, snapshot: Snapshot) -> tuple[R, list[str]]:
    """(what a call that runs a module returns, the variables in which each call leaves another tensor); raises Impure
    if it depends on what an earlier one left.

    It has made before what it makes once. A state that the result does not depend on may change, as a record of what
    was seen does; a tensor that each call leaves in the module may not.
    """
    before = belongings.marks()
    with expect_no_seed():
        out = call()
    between = belongings.marks()
    snapshot = snapshot.now()
    again = call()
    changed = unlike(between, belongings.marks()) or unlike(before, between)
    if not is_near(again, out):
        raise Impure(LOST.format(changed) if changed else UNLIKE)
    left = new_tensors(between, belongings.marks())
    if own := next((name for name in left if name.startswith("the module")), ""):
        raise Impure(LOST.format(own))
    for variables, key in list(snapshot.numbers_changed()):
        try:
            variables.set_number(key, variables.contents()[key] + FAR)
            same = is_near(call(), out)
        except Exception:  # somebody's code with a number that it does not expect
            same = False
        finally:
            snapshot.restore()
        if not same:
            raise Impure(LOST.format(name_of(variables, key)))
    return again, left


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
def expect_data(given: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise Impure if a tensor that a function is given, by name, has other memory after what runs within."""
    before = {name: storage_of(x) for name, x in given.items()}
    yield
    for name, x in given.items():
        if storage_of(x) != before[name]:
            raise Impure(
                f"the forward pass sets the data of {name}, and a state that is no parameter is lost; return it, or "
                "hand it in by the batch"
            )


def named_writes(f: Callable[[], R]) -> R:
    """What f returns; raises Impure for what a transform of torch.func refuses before any mode sees it: a write, and a
    leaf of autograd's."""
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


def f_again(f: Callable[[], R], draws: Draws) -> R:
    """What f returns a second time, with the same draws."""
    draws.number = 0
    return f()


def values_of(out: Any) -> list[Tensor | float]:
    """The tensors and numbers that a call returned, as values outside of all transforms, without a graph."""
    with apart():
        leaves = [plain(leaf) if isinstance(leaf, Tensor) else leaf for leaf in pytree.leaves(out)]
    return [leaf for leaf in leaves if isinstance(leaf, int | float | Tensor)]


def plain(x: Tensor) -> Tensor:
    """The values of a tensor that transforms of torch.func wrap."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x.detach()


def expect_same(first: list[Tensor | float], again: list[Tensor | float], changed: str) -> None:
    """Raise Impure if two calls gave other values. changed: what the first call changed, "" if nothing shows.

    Another thread may have changed it, or the result may not depend on it: so the values decide.
    """
    pairs = list(zip(first, again))
    if len(first) == len(again) and all(same_values(x, y, changed != "") for x, y in pairs):
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


def same_values(x: Tensor | float, y: Tensor | float, changed: bool) -> bool:
    """Whether two results are the same, but for sums in another order. changed: something shows that they may not be.

    On a CPU one operation has one result, but for float32 rows that are added at one index. On a GPU sums in any order
    are usual, and their errors are as large as the parts of a sum: there a result counts as at least 1.
    """
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
    with apart(), torch.no_grad():
        while is_functorch_wrapped_tensor(x):
            x = get_unwrapped(x)
        while is_functorch_wrapped_tensor(y):
            y = get_unwrapped(y)
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        if not x.is_floating_point() or not x.numel():
            return torch.equal(x, y)
        same = (x == y) | ((x != x) & (y != y))
        size = y.abs().masked_fill(~y.isfinite(), 0.0).max()
        apart_by = (x - y).abs().masked_fill(same, 0.0).max()
        return bool(apart_by <= min(rounds * RATES.get(x.dtype, 1e-2), 0.1) * size)


RATES = {torch.float64: 1e-12, torch.float32: 1e-5}  # of rounding, by dtype
