"""torch.utils.checkpoint within somebody's code: in a step it is passed over, and the function that it wraps is called.

It recomputes by hooks that torch.func does not have, when the call that it belongs to is over. What is recomputed is
said beside the code: Execution(remat=), fzero.remat.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch.utils.checkpoint

PASSED: ContextVar[bool] = ContextVar("PASSED", default=False)


@contextlib.contextmanager
def passed_over() -> Iterator[None]:
    """Within it torch.utils.checkpoint calls what it wraps, and a warning says so."""
    install()
    token = PASSED.set(True)
    try:
        yield
    finally:
        PASSED.reset(token)


@functools.cache
def install() -> None:
    """Have torch.utils.checkpoint ask whether it is passed over."""
    from fzero.core.torch_private import checkpoint_without_reentrant as without_reentrant

    reentrant = torch.utils.checkpoint.CheckpointFunction.apply

    @functools.wraps(without_reentrant)
    def hooks(*args: Any, **kwargs: Any) -> Iterator[None]:
        if not PASSED.get():
            yield from without_reentrant(*args, **kwargs)
            return
        say()
        yield

    @functools.wraps(reentrant)
    def apply(function: Any, preserve: bool, *args: Any) -> Any:
        if not PASSED.get():
            return reentrant(function, preserve, *args)
        say()
        return function(*args)

    setattr(torch.utils.checkpoint, without_reentrant.__name__, hooks)
    torch.utils.checkpoint.CheckpointFunction.apply = staticmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def say() -> None:
    """Warn, once, that something is not recomputed."""
    warnings.warn(
        'torch.utils.checkpoint is passed over in a step: recompute layers by fzero.Execution(remat="full"), and parts '
        "of a loss function by fzero.remat",
        UserWarning,
        stacklevel=4,
    )
