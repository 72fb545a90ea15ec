"""Count the bytes of live tensors, real or fake, operator by operator and by component.

Every storage of an operator's arguments or results is counted once, from its first use until it is freed. fzero's
operators that are made of PyTorch's are looked into. Memory that never meets the dispatcher is not seen: scratch inside
an operator, buffers of Inductor's code. Components: memory_timeline.py.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.comm.axes import AXES
from fzero.comm.ledger import Ledger
from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.core.torch_private import DispatchKey, FakeTensor, TorchDispatchMode
from fzero.kernels.custom_operator import OPENED
from fzero.optim.base import AVERAGE
from fzero.run.measure.memory_timeline import START, Change, Life, Moment, Stay, Visit, alive, moments
from fzero.sharding.error_feedback import ERROR

GROUPS = {
    "params": "params",
    "master": "master",
    AVERAGE: "ema",
    "opt_state": "optimizer",
    ERROR: "grads",
    "batch": "batch",
}
# Fake tensors ask a dispatcher for their device: often, and no operator runs.
DEVICE = torch.ops.prim.device.default
COMPOSITE = DispatchKey.CompositeImplicitAutograd


def device_of(x: Tensor) -> torch.device:
    """The device of a tensor, or that a fake one stands on."""
    return x.fake_device if isinstance(x, FakeTensor) else x.device


def answer_device(x: Tensor) -> torch.device:
    """The device of a tensor for C++; a subclass that is not fake answers for itself."""
    return x.fake_device if isinstance(x, FakeTensor) else DEVICE(x)


@functools.cache
def name_of(func: Any) -> str:
    """An operator's name, such as aten.mm."""
    return func._schema.name.replace("::", ".")


@functools.cache
def is_composite(func: Any) -> bool:
    """Whether an operator of PyTorch's is made of others."""
    return func.has_kernel_for_dispatch_key(COMPOSITE)


class LiveBytes(TorchDispatchMode):
    """A context that counts: `live` bytes are alive, `peak` were at most; other devices' in `off_device`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else Dynamo is imported, which takes a second, and asked at every operator

    def __init__(self, *trees: Any, device: torch.device | None = None):
        super().__init__()
        self.device = device
        self.live = self.peak = self.off_device = self.off_device_peak = 0
        self.at_peak = ""  # the operator that made the peak
        self.inside = 0  # how many of fzero's operators that are made of others are running
        self._storages: dict[int, weakref.ref] = {}
        for leaf in pytree.leaves(trees):
            self.see(leaf)

    def see(self, x: Any) -> None:
        """Count the storage of a tensor, if it is new."""
        if not isinstance(x, Tensor):
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size, device = storage.nbytes(), device_of(x)
        if (
            size == 0 or device.type == "meta" or self.lent(storage)
        ):  # a shape without memory; memory that is counted already
            return
        on_device = self.device is None or device == self.device

        def freed(_: Any, key: int = key, size: int = size) -> None:
            del self._storages[key]
            if on_device:
                self.live -= size
            else:
                self.off_device -= size
            if end is not None:
                end()

        self._storages[key] = weakref.ref(storage, freed)
        if on_device:
            self.live += size
        else:
            self.off_device += size
            self.off_device_peak = max(self.off_device_peak, self.off_device)
        end = self.born(x, key, size, on_device)

    def born(self, x: Tensor, key: int, size: int, on_device: bool) -> Callable[[], None] | None:
        """Note a new storage; the returned function is called when it is freed."""
        return None

    def lent(self, storage: Any) -> bool:
        """Whether a storage is a piece of memory that is counted as a whole."""
        return False

    def opened(self, func: Any) -> Callable[..., Any] | None:
        """What runs in place of an operator that is made of others, which are then seen; None for other ones."""
        # PyTorch's own are opened inside of fzero's alone, where autograd has been passed already. Elsewhere one may
        # choose among kernels, as attention does, and chooses another one if it is opened: what is measured would then
        # have other bits.
        return OPENED.get(func) or (func.decompose if self.inside and is_composite(func) else None)

    def run_inside(self, launch: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of an operator whose operators are seen."""
        self.inside += 1
        try:
            with self:
                return launch(*args, **kwargs)
        finally:
            self.inside -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is DEVICE:
            return answer_device(args[0])
        if (launch := self.opened(func)) is not None:
            return self.run_inside(launch, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.see(out)
        else:
            for x in pytree.leaves(out):
                self.see(x)
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, name_of(func)
        return out


class MemoryTrace(LiveBytes):
    """The record of one step, real or fake, and a context around it: births, deaths, and events."""

    # note: (operator, args, kwargs, result) -> the event to enter, or None; without it, operators are counted by name.
    # make_transfer: ("start" | "wait", number, what, axis, bytes, visit) -> an event of a transfer. buffers: the pool
    # of offloaded leaves, counted at its full size.
    def __init__(
        self,
        state: Tree,
        batch: Tree,
        *,
        device: torch.device | None = None,
        buffers: Any = None,
        note: Callable[..., Any] | None = None,
        make_transfer: Callable[..., Any] | None = None,
    ):
        super().__init__(device=device)
        self.note, self.make_transfer, self.buffers = note, make_transfer, buffers
        self.ledger: Ledger | None = None
        self.stays = [Stay(START, [], [], [])]
        self.lives: dict[int, Life] = {}  # by the storage's key, while it lives
        self.is_closed = False
        self.spans: list[tuple[int, str]] = [(0, "")]
        self.visits = self.entered = self.reducing = 0
        self.collective = ""  # an all_gather of parameters that has been started and has no memory yet
        if buffers is not None and device is not None:  # it is the host's
            self.off_device = self.off_device_peak = buffers.size
        elif buffers is not None:
            self.live += buffers.size
            self._enter(Life(buffers.size, "buffers", START, "buffers"))
        self.enter_inputs("", state._asdict() if hasattr(state, "_asdict") else {"params": state})
        self.enter_inputs("batch/", batch)
        self.peak = self.live

    def enter_inputs(self, prefix: str, tree: Tree) -> None:
        """Enter the inputs of the step."""
        for name, leaf in pytree.named_leaves(tree).items():
            self.op = prefix + name
            self.group = next(
                (group for start, group in GROUPS.items() if (prefix + name).startswith(start)), "buffers"
            )
            self.see(leaf)
        self.op = self.group = ""

    # ---- storages
    # -------------------------------------------------------------------------------------------------------

    @property
    def current_visit(self) -> Visit:
        """The current visit."""
        return self.stays[-1].visit

    def event(self, event: Any) -> None:
        """Enter an event."""
        self.stays[-1].events.append(event)

    def _enter(self, life: Life, sign: int = 1) -> None:
        stay = self.stays[-1]
        stay.changes.append(Change(life, sign, len(stay.events) - 1))

    def born(self, x: Tensor, key: int, size: int, on_device: bool) -> Callable[[], None] | None:
        """Enter the birth of a storage, if it is on the device."""
        if not on_device:
            return None
        life = self.lives[key] = Life(size, self.op, self.current_visit, self.group, self.reducing > 0)
        if self.collective and not self.group and self.op == "aten.new_empty":
            life.group, self.collective = "gathered", ""
        self._enter(life)

        def ended() -> None:
            self.lives.pop(key, None)
            if not self.is_closed:
                life.died, life.dropped = self.current_visit, True
                self._enter(life, -1)

        return ended

    def lent(self, storage: Any) -> bool:
        """Whether a storage is a piece of the buffer pool."""
        return self.buffers is not None and self.buffers.holds(storage)

    def holds(self, component: str, tensors: Sequence[Tensor]) -> None:
        """Set the component of some tensors, except inputs of the step."""
        for x in tensors:
            if isinstance(x, Tensor):
                life = self.lives.get(x.untyped_storage()._cdata)
                if life is not None and not life.group:
                    life.group = component

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is DEVICE:
            return answer_device(args[0])
        kwargs = kwargs or {}
        if (launch := self.opened(func)) is not None:
            return self.run_inside(launch, args, kwargs)
        self.op = name_of(func)
        if self.note is None:
            self.event(self.op)
            return super().__torch_dispatch__(func, types, args, kwargs)
        out = self.note(self, func, args, kwargs)
        for x in (out,) if isinstance(out, Tensor) else pytree.leaves(out):
            self.see(x)
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, self.op
        return out

    # ---- the program
    # ----------------------------------------------------------------------------------------------------

    def _go(self, segment: str, layer: int | None) -> None:
        self.visits += 1
        span, phase = self.spans[-1]
        self.stays.append(Stay(Visit(self.visits, span, phase, segment, layer), [], [], []))

    def enter(self, phase: str) -> None:
        """A phase begins; one inside a forward or backward pass counts as part of that."""
        self.reducing += phase == "reduce"
        inside = self.spans[-1][1] in ("forward", "backward", phase)
        self.spans.append(self.spans[-1] if inside else (self.entered + 1, phase))
        if not inside:
            self.entered += 1
            self._go("", None)

    def leave(self, phase: str) -> None:
        """The innermost phase ends."""
        ended_span = self.spans.pop()
        self.reducing -= phase == "reduce"
        if ended_span != self.spans[-1]:
            self._go("", None)

    def reach(self, segment: str, layer: int | None) -> None:
        """The program comes to a part of the model."""
        self._go(segment, layer)

    def start(self, number: int, collective: str, axis: str, leaf: str, sent_bytes: int) -> None:
        """A collective is started."""
        gathers = (
            collective == "all_gather"
            and axis.partition("+")[0] in AXES.shards
            and self.current_visit.phase in ("forward", "backward", "update")
            and not self.reducing
        )
        self.collective = leaf if gathers else ""
        if self.ledger is not None and self.ledger.entered is not None:
            self.stays[-1].sent.append(self.ledger.entered)
            self.ledger.entered = None  # a rank that sends nothing in the next one enters nothing
        self.transfer("start", number, collective, axis, sent_bytes)

    def wait(self, number: int) -> None:
        """The program waits for a collective."""
        self.transfer("wait", number, "", "", 0)

    def done(self, number: int) -> None:
        """Its result is there."""

    def transfer(self, event: str, number: int, kind: str, axis: str, sent_bytes: int) -> None:
        """Enter an event of a transfer."""
        if self.make_transfer is not None:
            self.event(self.make_transfer(event, number, kind, axis, sent_bytes, self.current_visit))

    # ---- results
    # ------------------------------------------------------------------------------------------------

    def close(self, state: Tree | None = None) -> None:
        """End the record; new tensors of the resulting `state` belong to its groups."""
        self.is_closed = True
        named = pytree.named_leaves(state._asdict()) if state is not None and hasattr(state, "_asdict") else {}
        for name, leaf in named.items():
            if isinstance(leaf, Tensor):
                life = self.lives.get(leaf.untyped_storage()._cdata)
                if life is not None and (not life.group or life.group == "grads"):
                    life.group = next((group for start, group in GROUPS.items() if name.startswith(start)), "buffers")

    def moments(self) -> tuple[Moment, ...]:
        """The moments of the step: see `moments`."""
        return moments(self.stays)

    def alive(self, moment: Moment, max_count: int = 20) -> tuple[tuple[str, str, int], ...]:
        """The largest storages alive at one of them: see `alive`."""
        return alive(self.stays, moment, max_count)


@contextlib.contextmanager
def recorded(record: MemoryTrace, ledger: Ledger) -> Iterator[MemoryTrace]:
    """A context in which `record` sees every operator, and `ledger`'s phases, parts and transfers."""
    record.ledger = ledger
    with ledger.watched(record), record:
        yield record


def peak_of(f: Callable[..., Any], *args: Any) -> int:
    """The most bytes of tensors alive at one time while `f(*args)` runs, its arguments among them."""
    with LiveBytes(args) as live:
        live.peak = live.live
        out = f(*args)
        del out
    return live.peak


def predict_peak(make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]) -> int:
    """`peak_of(f, *args)` for the (f, args) that `make()` gives, on fake tensors, without memory."""
    from fzero.core.torch_private import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        f, args = make()
        return peak_of(f, *args)
