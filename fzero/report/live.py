"""Bytes of live tensors, counted operator by operator: for real tensors and for fake ones alike.

Every storage that an operator's arguments or results have is counted once, from when it is first seen until it is freed. What never
meets the dispatcher is not seen: scratch inside an operator, and buffers of Inductor's compiled code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fzero import pytree


class LiveBytes(TorchDispatchMode):
    """A context that counts: `now` bytes are alive, `peak` were at most."""

    def __init__(self, *trees: Any):
        super().__init__()
        self.now = self.peak = 0
        self.at_peak = ""  # the operator that made the peak
        self._known: dict[int, weakref.ref] = {}
        for leaf in pytree.leaves(trees):
            self.see(leaf)

    def see(self, x: Any) -> None:
        """Count the storage of a tensor, if it is new."""
        if not isinstance(x, Tensor) or x.device.type == "meta":  # a shape without memory
            return
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size == 0:
            return

        def freed(_: Any, key: int = key, size: int = size) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, freed)
        self.now += size

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in pytree.leaves(out):
            self.see(x)
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, str(func)
        return out


def peak_of(f: Callable[..., Any], *args: Any) -> int:
    """The most bytes of tensors alive at one time while `f(*args)` runs, its arguments among them."""
    with LiveBytes(args) as live:
        live.peak = live.now
        out = f(*args)
        del out
    return live.peak


def predict_peak(make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]) -> int:
    """`peak_of(f, *args)` for the (f, args) that `make()` gives, all on fake tensors: no memory is used and nothing is computed.

    A train step is made with `fake_mesh` and skip_nonfinite=False, as a fake tensor has no value to branch on.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        f, args = make()
        return peak_of(f, *args)
