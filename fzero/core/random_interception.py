"""Torch's random numbers as a function of a key: what somebody's code draws by torch.rand, F.dropout and their like.

    with Draws(lambda: key, rows=8, first=16): loss(params, batch)

The n-th draw has a key of its own, and element e of it the word e: of a tensor whose first dim counts samples, e is the
index in the step's global batch, however that is cut. Functions of torch are replaced by what they are called as,
before autograd and torch.func see them. A draw that is not in SAMPLERS reaches torch's generators, which
core.purity_checks refuses.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fzero.core.graph_tracing import Impure, line
from fzero.core.random_samplers import SAMPLERS, KeyedNumbers, may_draw

CURRENT: ContextVar[Draws | None] = ContextVar("CURRENT", default=None)
SEED: ContextVar[int | None] = ContextVar("SEED", default=None)  # of torch's generator, where nobody else may set it
RESERVED_SEED = 0x5EED2E20  # one that no program has


class Draws(KeyedNumbers, TorchFunctionMode):
    """A mode within which torch's random functions draw by a key."""

    used = False  # whether a random function was called that may draw

    def __enter__(self) -> Draws:
        self.token = CURRENT.set(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        CURRENT.reset(self.token)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sampler = SAMPLERS.get(func)
        if sampler is not None:
            self.used |= may_draw(func, args, kwargs)
            return sampler(self, *args, **(kwargs or {}))
        if func in COMPOSED:
            with self.reenter():
                return body_of(func)(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def next_site(self, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, int | Tensor]:
        if SEED.get() not in (None, torch.default_generator.initial_seed()):
            raise Impure(
                f"{line()}: sets torch's seed and draws random numbers, which come from the state's key, others in "
                "each step; leave the seed out, or make numbers that stay the same before, as a buffer"
            )
        return super().next_site(shape, device)

    @contextlib.contextmanager
    def reenter(self) -> Iterator[None]:
        """The mode, which torch leaves while it handles a call."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def resume(self, number: int) -> Draws:
        """Draws that go on after the first `number` ones, as these did."""
        resumed = Draws(self.make_key, self.rows, self.first, self.expect)
        resumed.number = number
        return resumed


@contextlib.contextmanager
def expect_no_seed() -> Iterator[None]:
    """Within, a draw by a key raises Impure if torch's generator was seeded before it."""
    with seeded(RESERVED_SEED):
        token = SEED.set(RESERVED_SEED)
        try:
            yield
        finally:
            SEED.reset(token)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's generator of the CPU begins at a seed, and goes on afterwards where it was."""
    token, state = SEED.set(None), torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        SEED.reset(token)


class NoDraws(Draws):
    """Draws in a program that is compiled within others: it would have their key and number as constants."""

    disabled = False  # type: ignore[assignment]  # the program may be used again where dropouts are on

    def next_site(self, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, int | Tensor]:
        raise Impure(
            f"{line()}: a function that is compiled, and called by a loss, draws random numbers, which would be the "
            "same in every call; draw outside of it and hand them in, or leave compiled=True or jit out"
        )


def is_drawing() -> bool:
    """Whether a random function was called within the draws that are on."""
    around = CURRENT.get()
    return around is not None and around.used


def no_draws() -> contextlib.AbstractContextManager[Any]:
    """A mode for a compilation, in which the draws around it are refused."""
    around = CURRENT.get()
    if around is None:
        return contextlib.nullcontext()
    around.used = True
    return NoDraws(around.make_key, around.rows)


# Functions of torch in Python, which call those above.
COMPOSED = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.multi_head_attention_forward,
    F.gumbel_softmax,
}
MODE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@functools.cache
def body_of(func: types.FunctionType) -> types.FunctionType:
    """A function of torch without the question for modes, so that the ones that it calls are seen by one."""
    blind = dict.fromkeys(MODE_CHECKS, lambda *args: False)
    body = types.FunctionType(func.__code__, {**func.__globals__, **blind}, func.__name__, func.__defaults__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body
