"""The exact record of one training step that never ran: its operators, transfers and memory, from the step itself on fake tensors.

`trace_step` builds the program of a config as a run does, on a mesh without processes and a state without memory, and records a step of
it: every operator with its FLOPs and bytes, every collective and every read and write of a disk in their order, every storage's birth and
death. Nothing is computed and nothing is allocated. Where the step looks at a value (is this step to be skipped?) it is told what a step
that goes well finds.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero import models
from fzero.comm.ledger import Row
from fzero.core import pytree
from fzero.core.device import CPU, HOST, FakeDevice, Target
from fzero.core.pytree import Tree
from fzero.core.torch_private import TorchDispatchMode
from fzero.offload import DiskTensor
from fzero.planner import fake_inductor
from fzero.planner.fake_disk import PlannedSpace
from fzero.planner.operations import Op, describe_op
from fzero.run import build as programs
from fzero.run.build import Job
from fzero.run.config import RunConfig
from fzero.run.machine import resolve_auto
from fzero.run.measure.live_bytes import MemoryTrace, Moment, Stay, Visit, alive, device_of, moments, recorded
from fzero.sharding import Mesh, fake_mesh
from fzero.sharding.memory import Offload
from fzero.train.state_on_disk import kept_leaves

HOST_COPIES = 1 << 50  # the number of the first copy between host and device
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
LOOKS = torch.ops.aten._local_scalar_dense.default
STATE = {"params": "params", "master": "master", "opt_state": "opt", "extra/ema": "ema"}


class Transfer(NamedTuple):
    """A collective, or a read or write of a disk or of the host's memory, as it starts or is waited for."""

    event: str  # "start" or "wait"
    number: int  # tells it from the others of a trace; a wait has the number of its start
    what: str  # "all_gather", "psum", ...; "read", "write"
    axis: str  # of the mesh, or "nvme", "host"
    bytes: int  # that one rank sends, or that are read or written
    phase: str
    layer: int | None


class Segment(NamedTuple):
    """events[first:last] run `times` times in a row."""

    first: int
    last: int
    times: int


class Trace(NamedTuple):
    """One step of one rank."""

    events: tuple[Op | Transfer, ...]  # in the order in which the host issues them
    timeline: tuple[Moment, ...]  # the fullest and the last moment of each stay at a part of the model
    peak: Moment
    alive: tuple[tuple[str, str, int], ...]  # (name, component, bytes) of the largest at the peak
    state: dict[str, int]  # bytes at rest on the device: "params", "master", "opt", "ema", "other"
    state_elsewhere: dict[str, int]  # bytes at rest in "host" and on "nvme", whole pages there
    ledger: tuple[Row, ...]
    sizes: dict[str, int]  # of all axes of the mesh
    rank: int
    target: Target
    config: RunConfig
    tokens: int  # of one rank in a step
    num_params: int
    host_peak: int = 0  # bytes of tensors in the host's memory at most, where the device is another
    segments: tuple[Segment, ...] = ()  # events that repeat
    exact: str = ""  # how it came about: "" for a trace of the step as it is, else what was extrapolated from what


def trace_step(config: RunConfig, sizes: Mapping[str, int], *, rank: int = 0, target: Target | None = None) -> Trace:
    """The trace of a step of `config` on `rank` of a mesh of these sizes, as it runs on `target` (None: the CPU); every layer is run.

    It is a step after the first: what a run keeps from one step to the next is there. Values that are "auto" are decided for the
    target: bf16 on a GPU, fp32 and uncompiled blocks on a CPU. The state is that of a run's `first_state`, with other values.
    Raises ValueError for what a run would refuse.
    """
    return make_trace(run_step(config, sizes, rank, target))


class FakeStep(NamedTuple):
    """A step that was run on fake tensors."""

    program: Job
    state: Tree
    stays: list[Stay]
    host_peak: int
    target: Target
    rank: int


class EndOfRecord(Exception):
    """Raised to end a traced step early."""


class ShortRecord(MemoryTrace):
    """A record that ends the step after the backward pass of the last of `parts` micro-batches."""

    parts = 0

    def enter(self, phase: str) -> None:
        """A phase begins."""
        if self.parts and phase == "metrics" and len({s.visit.span for s in self.stays if s.visit.phase == "backward"}) == self.parts:
            raise EndOfRecord
        super().enter(phase)


def run_step(
    config: RunConfig, sizes: Mapping[str, int], rank: int = 0, target: Target | None = None, layers: int = 0, short: bool = False
) -> FakeStep:
    """Run a step of `config` on fake tensors, with the state of all layers.

    layers: how many of the layers are run, the first ones (0: all). short: end before the update.
    """
    target = CPU if target is None else target
    config, mesh = resolve_auto(config, target), shared_mesh(tuple(sizes.items()), rank)
    mesh.ledger.clear()
    with torch.no_grad(), FakeDevice(target, lower=fake_inductor.lowering()) as mode:
        space = fake_space(config, mode)
        program = programs.build(config, mesh, layers=layers, space=space, model=shared_model(config.model))
        state, batch = fake_state(program, mode), fake_batch(program, mode)
        step = program.train_step
        if config.train.update == "delayed":  # a first step leaves the gradient that the second one applies
            with Looking():
                state, _ = step(state, batch)
        tracer, device = Tracer(target.kind == "cuda"), None if target.kind == "cpu" else mode.device
        record = ShortRecord(state, batch, device=device, buffers=space.buffers if space else None, note=tracer.note, told=tracer.told)
        if space is not None:
            space.disk.tell = lambda event, number, what, size: record.transfer(event, number, what, "nvme", size)
        record.parts = programs.local_micro_batches(config, mesh) if short else 0
        with contextlib.suppress(EndOfRecord), recorded(record, mesh.ledger):
            state_after, _ = step(state, batch)
            record.close(state_after)
    return FakeStep(program, state, record.stays, record.away_peak, target, rank)


@functools.lru_cache(maxsize=8)
def shared_mesh(sizes: tuple[tuple[str, int], ...], rank: int) -> Mesh:
    """The mesh of steps that are planned. One for all of them: a block that was compiled for it is not compiled again."""
    return fake_mesh(dict(sizes), rank)


@functools.lru_cache(maxsize=8)
def shared_model(config: models.ModelConfig) -> models.Model:
    """The model of these sizes; one for all steps that are planned, for the same reason."""
    return models.build(config)


class Tracer:
    """What makes the events of a record: operators with their costs, and transfers."""

    def __init__(self, cuda: bool = False) -> None:
        self.cuda = cuda  # whether the host's memory is another than the device's
        self.started: dict[int, tuple[str, str, int]] = {}  # number -> (what, axis, bytes)
        self.coming: dict[int, tuple[int, weakref.ref]] = {}  # storage on its way from the host -> (number, what tells of its end)
        self.copies = HOST_COPIES

    def note(self, record: MemoryTrace, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator and enter it; the result."""
        if func is LOOKS:
            return _value_of(args[0])
        if self.coming:
            self.arrived(record, args)
        out = func(*args, **kwargs)
        here = record.here
        if self.cuda and func in COPIES and self.copied(record, func, args, out):
            return out
        op = describe_op(func, args, kwargs, out, here.phase, here.layer)
        if op is not None:
            record.event(op)
        return out

    def copied(self, record: MemoryTrace, func: Any, args: tuple, out: Tensor) -> bool:
        """Enter a copy between the host's memory and the device as a transfer; whether it is one.

        What is read is waited for where it is first used, or dropped unused: another storage may then stand at its address. What is
        written in a forward pass (activations) is not waited for.
        """
        source, there = (args[1], args[0]) if func is COPIES[1] else (args[0], out)
        if device_of(source) == device_of(there):
            return False
        what, self.copies = "write" if device_of(there) == HOST else "read", self.copies + 1
        size = there.numel() * there.element_size()
        record.transfer("start", self.copies, what, "host", size)
        if what == "read":
            storage, number = there.untyped_storage(), self.copies
            key = storage._cdata
            self.coming[key] = number, weakref.ref(storage, lambda _: self.come(record, key))
        elif record.here.phase != "forward":
            record.transfer("wait", self.copies, what, "host", size)
        return True

    def arrived(self, record: MemoryTrace, args: Any) -> None:
        """Enter the waits for what an operator takes of what is on its way."""
        for x in pytree.leaves(args):
            if isinstance(x, Tensor):
                self.come(record, x.untyped_storage()._cdata)

    def come(self, record: MemoryTrace, key: int) -> None:
        """Enter the wait for a storage, if it is on its way."""
        number, _ = self.coming.pop(key, (None, None))
        if number is not None and not record.over:
            record.transfer("wait", number, "read", "host", 0)

    def told(self, event: str, number: int, what: str, axis: str, size: int, here: Visit) -> Transfer:
        """The event of a transfer."""
        if event == "start":
            self.started[number] = (what, axis, size)
        else:
            what, axis, size = self.started[number]
        return Transfer(event, number, what, axis, size, here.phase, here.layer)


def _value_of(x: Tensor) -> Any:
    """What a step that goes well finds in a value that it looks at: nothing is skipped, and numbers are 1."""
    return False if x.dtype == torch.bool else 1.0 if x.dtype.is_floating_point else 1


class Looking(TorchDispatchMode):
    """A context in which a fake tensor that is looked at has a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _value_of(args[0]) if func is LOOKS else func(*args, **(kwargs or {}))


def fake_space(config: RunConfig, mode: FakeDevice) -> PlannedSpace | None:
    """Where the leaves live that a config puts on a disk; None where it puts none there."""
    if "nvme" not in Offload.parse(config.offload).memories:
        return None
    size = config.nvme.buffer_mb << 20 if config.nvme.buffer_mb else None
    return PlannedSpace(mode, buffer_bytes=size, slots=config.nvme.slots, verify=config.nvme.verify)


def fake_state(program: Job, mode: FakeDevice) -> Any:
    """A rank's state, of fake tensors of `mode` where it rests in memory."""
    space, mesh = program.space, program.mesh
    like, specs = programs.like_of(program), pytree.named_leaves(programs.specs_of(program))

    def leaf(name: str, x: Tensor) -> Any:
        if name in stored:
            return DiskTensor(space.store, name)
        return torch.empty(x.shape, dtype=x.dtype, device=HOST if specs[name].memory == "host" else mode.device)

    stored = kept_leaves(like, programs.specs_of(program), program.plan) if space is not None else {}
    if stored:
        space.open(stored, mesh)
    return pytree.map_named(leaf, like)


def fake_batch(program: Job, mode: FakeDevice) -> dict[str, Tensor]:
    """A rank's part of a batch, as data.stream makes it."""
    config = program.config
    shape = (config.train.batch // program.mesh.data_size, config.data.seq_len)
    dtypes = {"tokens": torch.int64, "targets": torch.int64, "documents": torch.int32, "mask": torch.bool}
    if not config.data.within_documents:
        del dtypes["documents"]
    return {name: torch.empty(shape, dtype=dtype, device=mode.device) for name, dtype in dtypes.items()}


def make_trace(step: FakeStep, stays: Sequence[Stay] = (), segments: tuple[Segment, ...] = (), exact: str = "") -> Trace:
    """The Trace of a step. stays: what happened in all of it, where the step was shortened; repeated ones have the same lists."""
    stays, config, mesh = stays or step.stays, step.program.config, step.program.mesh
    timeline = moments(stays)
    peak = max(timeline, key=lambda moment: moment.bytes)
    here, elsewhere = state_bytes(step.program, step.state)
    once = {id(stay.events): stay.events for stay in stays}
    return Trace(
        events=tuple(itertools.chain.from_iterable(once.values())),
        timeline=timeline,
        peak=peak,
        alive=alive(stays, peak),
        state=here,
        state_elsewhere=elsewhere,
        ledger=rows(stays),
        sizes={axis.name: axis.size for axis in mesh.axes},
        rank=step.rank,
        target=step.target,
        config=config,
        tokens=config.train.batch // mesh.data_size * config.data.seq_len,
        num_params=programs.num_params(step.program),
        host_peak=step.host_peak,
        segments=segments,
        exact=exact,
    )


def rows(stays: Iterable[Stay]) -> tuple[Row, ...]:
    """The rows of the ledger of what happened."""
    sums: dict[tuple, list[int]] = {}
    for stay in stays:
        for key, elements in stay.sent:
            held = sums.setdefault(key, [0, 0])
            held[0] += 1
            held[1] += elements
    return tuple(
        Row(*key[:4], str(key[4]).removeprefix("torch."), calls, elements, elements * key[4].itemsize)
        for key, (calls, elements) in sums.items()
    )


def state_bytes(program: Job, state: Tree) -> tuple[dict[str, int], dict[str, int]]:
    """({group: bytes at rest on the device}, {"host": bytes, "nvme": bytes}) of a state, real or fake."""
    here, elsewhere = dict.fromkeys((*STATE.values(), "other"), 0), {"host": 0, "nvme": 0}
    specs = pytree.named_leaves(programs.specs_of(program))
    for name, leaf in pytree.named_leaves(state).items():
        size = leaf.numel() * leaf.element_size()
        memory = specs[name].memory if name in specs else "device"
        if memory == "device":
            here[next((group for start, group in STATE.items() if name.startswith(start)), "other")] += size
        else:
            elsewhere[memory] += size
    return here, elsewhere
