"""The exact record of one training step run on fake tensors: its operators, transfers and memory.

`trace_step` builds the job of a config as a run does, on a mesh without processes, and records every operator with its
FLOPs and bytes, every collective and disk transfer, every storage's creation and release. A step that reads a value
gets that of a step that goes well.
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
from fzero.comm.ledger import LedgerRow
from fzero.core import pytree
from fzero.core.device import CPU, HOST, FakeDevice, Target
from fzero.core.gpu_copies import free_sources
from fzero.offload import DiskTensor
from fzero.planner import fake_inductor
from fzero.planner.fake_disk import PlannedNvme, stage_shapes
from fzero.planner.operations import ExecutedOp, describe_op, describe_passes
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.live_bytes import MemoryTrace, device_of, recorded
from fzero.run.measure.memory_check import state_bytes
from fzero.run.measure.memory_timeline import Moment, Stay, Visit, alive, moments
from fzero.run.setup import build as run_build
from fzero.run.setup.build import Job
from fzero.run.setup.machine import resolve_auto
from fzero.sharding import Mesh, Plan, fake_mesh
from fzero.sharding.spec import DISK, HOST_MEMORY, Offload
from fzero.train.state_on_disk import DiskLayout

HOST_COPIES = 1 << 50  # number of the first copy between host and device
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
LOOKS = torch.ops.aten._local_scalar_dense.default


class Transfer(NamedTuple):
    """The start of, or the wait for, a collective or a transfer."""

    event: str  # "start" or "wait"
    number: int  # unique in a trace; a wait has the number of its start
    kind: str  # "all_gather", "psum", ...; "read", "write"
    axis: str  # an axis of the mesh, or a memory beside the device's
    bytes: int  # sent by one rank, or read or written
    phase: str
    layer: int | None


class RepeatedEvents(NamedTuple):
    """Events [first:last] of a trace, which run `times` times in a row."""

    first: int
    last: int
    times: int


class Trace(NamedTuple):
    """One step of one rank."""

    events: tuple[ExecutedOp | Transfer, ...]  # in the order in which the host issues them
    timeline: tuple[Moment, ...]  # the fullest and the last moment of each visit of a part of the model
    peak: Moment
    alive: tuple[tuple[str, str, int], ...]  # (name, component, bytes) of the largest at the peak
    state: dict[str, int]  # bytes at rest on the device: "params", "master", "opt", "ema", "other", "errors"
    state_elsewhere: dict[str, int]  # bytes at rest in "host" and on "nvme", whole pages there
    ledger: tuple[LedgerRow, ...]
    sizes: dict[str, int]  # sizes of all axes of the mesh
    rank: int
    target: Target
    config: RunConfig
    tokens: int  # of one rank in a step
    num_params: int
    host_peak: int = 0  # peak bytes of tensors in the host's memory, if the device is not the host
    segments: tuple[RepeatedEvents, ...] = ()  # repeated events
    exact: str = ""  # "" if the whole step was traced, else how it was extrapolated
    turns: tuple[int, ...] = ()  # of a rank of pp: by event how often it happens; () for once, or by the segments


def trace_step(config: RunConfig, sizes: Mapping[str, int], *, rank: int = 0, target: Target | None = None) -> Trace:
    """Trace a step of `config` on `rank` of a mesh of these sizes, as it runs on `target`, with every layer."""
    return make_trace(run_step(config, sizes, rank, target))


class FakeStep(NamedTuple):
    """The record of a step that ran on fake tensors."""

    job: Job
    at_rest: tuple[dict[str, int], dict[str, int]]  # the bytes of the state, see `state_bytes`
    stays: list[Stay]
    host_peak: int
    target: Target
    rank: int


class EndOfRecord(Exception):
    """Raised to end a traced step early."""


class ShortRecord(MemoryTrace):
    """A record that ends the step after the last backward pass of `parts` micro-batches."""

    parts = 0

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        if (
            self.parts
            and phase == "metrics"
            and len({s.visit.span for s in self.stays if s.visit.phase == "backward"}) == self.parts
        ):
            raise EndOfRecord
        super().enter(phase)


def run_step(
    config: RunConfig,
    sizes: Mapping[str, int],
    rank: int = 0,
    target: Target | None = None,
    layers: int = 0,
    short: bool = False,
) -> FakeStep:
    """Run a step of `config` on fake tensors; layers: only the first ones (0: all); short: no update."""
    target = CPU if target is None else target
    config, mesh = resolve_auto(config, target), shared_mesh(tuple(sizes.items()), rank)
    mesh.ledger.clear()
    with torch.no_grad(), FakeDevice(target, lower=fake_inductor.lowering()) as mode:
        nvme = fake_nvme(config)
        shapes: dict[Any, Any] = {}
        job = run_build.build(
            config, mesh, layers=layers, nvme=nvme, model=shared_model(config.model), trace_cache=shapes
        )
        state, batch = fake_state(job, mode), fake_batch(job, mode)
        step = getattr(job.train_step, "inner_step", job.train_step)  # of one member, on rows of the largest length
        at_rest = state_bytes(job, state)
        if job.plan.stages is not None:
            parts = run_build.local_micro_batches(config, mesh)
            shapes.update(stage_shapes(config, job.plan, shared_model(config.model), batch, parts, mode))
        tracer, device = (
            Tracer(target.kind == "cuda", even_fraction(job.plan)),
            None if target.kind == "cpu" else mode.device,
        )
        record = ShortRecord(
            state,
            batch,
            device=device,
            buffers=nvme.buffers if nvme else None,
            note=tracer.note,
            make_transfer=tracer.make_transfer,
        )
        if nvme is not None:
            nvme.disk.tell = lambda event, number, kind, size: record.transfer(event, number, kind, DISK, size)
        record.parts = run_build.local_micro_batches(config, mesh) if short else 0
        free_sources(mode.device)  # of a step that ended early, or by an error
        with contextlib.suppress(EndOfRecord), recorded(record, mesh.ledger):
            state_after, _ = step(state, batch)
            record.close(state_after)
    return FakeStep(job, at_rest, record.stays, record.off_device_peak, target, rank)


@functools.lru_cache(maxsize=8)
def shared_mesh(sizes: tuple[tuple[str, int], ...], rank: int) -> Mesh:
    """The mesh of planned steps, one for all, so that blocks compile once."""
    return fake_mesh(dict(sizes), rank)


@functools.lru_cache(maxsize=8)
def shared_model(config: models.ModelConfig) -> models.Model:
    """The model of these sizes; one for all planned steps, so that its blocks are not compiled again."""
    return models.build(config)


def even_fraction(plan: Plan) -> float:
    """The part of the rows of grouped products that hold a token, if experts are chosen evenly."""
    if plan.experts is None or plan.routed is None:
        return 1.0
    return plan.routed.top_k / plan.routed.rows(plan.experts, plan.mesh.ep.size)


class Tracer:
    """Records the events of a step: operators with their costs, and transfers."""

    def __init__(self, cuda: bool = False, even: float = 1.0) -> None:
        self.cuda = cuda  # whether the device has memory of its own
        self.even = even  # see `even_fraction`
        self.started: dict[int, tuple[str, str, int]] = {}  # number -> (what, axis, bytes)
        # storage being copied to -> ([(number, first byte, end)] of the copies, a reference whose callback reports its
        # end)
        self.coming: dict[int, tuple[list[tuple[int, int, int]], weakref.ref]] = {}
        self.copies = HOST_COPIES

    def note(self, record: MemoryTrace, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operator, record it and return its result."""
        if func is LOOKS:
            return _value_of(args[0])
        crosses = self.cuda and is_crossing(func, args, kwargs)
        if self.coming and not func.is_view:
            # A copy across follows earlier ones of its memory by the order of streams; it waits for its source alone.
            source = [args[func is COPIES[1]]] if crosses else args
            self.wait_for_arguments(record, [x for x in pytree.leaves(source) if not crosses or device_of(x) != HOST])
        out = func(*args, **kwargs)
        visit = record.current_visit
        if crosses:
            self.copied(record, func, args, out)
            return out
        op = describe_op(func, args, kwargs, out, visit.phase, visit.layer)
        if op is not None and "grouped_mm" in op.name:
            op = op._replace(flop=int(op.flop * self.even))
        if op is not None and self.cuda and on_host(args, kwargs, out):
            record.event(op._replace(host=True))
        elif op is not None:
            for event in describe_passes(op, args):
                record.event(event)
        return out

    def copied(self, record: MemoryTrace, func: Any, args: tuple, out: Tensor) -> None:
        """Record a copy between the host's memory and the device as a transfer, waited for at its first use."""
        # Waited for at the first use of what it wrote, by the device or by the host, or when the storage is freed
        # unused: another storage may then get the same address. A write in a forward pass (activations) is not.
        destination = args[0] if func is COPIES[1] else out
        direction, self.copies = "write" if device_of(destination) == HOST else "read", self.copies + 1
        record.transfer("start", self.copies, direction, HOST_MEMORY, destination.numel() * destination.element_size())
        if direction == "read" or record.current_visit.phase != "forward":
            storage = destination.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.coming:
                self.coming[key] = [], weakref.ref(storage, lambda _: self.wait_for_bytes(record, key, 0, size))
            self.coming[key][0].append((self.copies, *span(destination)))

    def wait_for_arguments(self, record: MemoryTrace, tensors: Iterable[Any]) -> None:
        """Record the waits for arguments that are still being copied."""
        for x in tensors:
            if isinstance(x, Tensor):
                self.wait_for_bytes(record, x.untyped_storage()._cdata, *span(x))

    def wait_for_bytes(self, record: MemoryTrace, key: int, first: int, end: int) -> None:
        """Record the waits for bytes of a storage, as far as they are being copied to."""
        if key not in self.coming:
            return
        moving = self.coming[key][0]
        pending = [copy for copy in moving if copy[1] < end and first < copy[2]]
        for copy in pending:
            moving.remove(copy)
            if not record.is_closed:
                record.transfer("wait", copy[0], self.started[copy[0]][0], HOST_MEMORY, 0)
        if not moving:
            del self.coming[key]

    def make_transfer(self, event: str, number: int, kind: str, axis: str, size: int, visit: Visit) -> Transfer:
        """Make the event of a transfer."""
        if event == "start":
            self.started[number] = (kind, axis, size)
        else:
            kind, axis, size = self.started[number]
        return Transfer(event, number, kind, axis, size, visit.phase, visit.layer)


def is_crossing(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an operator copies between the memory of a planned GPU and that of its host."""
    if func not in COPIES:
        return False
    target = device_of(args[0]) if func is COPIES[1] else kwargs.get("device")
    return target is not None and torch.device(target) != device_of(args[func is COPIES[1]])


def span(x: Tensor) -> tuple[int, int]:
    """(the first byte of a tensor in its storage, the one behind its last)."""
    first = int(x.storage_offset())
    end = first + sum((n - 1) * int(step) for n, step in zip(x.shape, x.stride())) + 1 if x.numel() else first
    return first * x.element_size(), end * x.element_size()


def on_host(*trees: Any) -> bool:
    """Whether all tensors of an operator on a planned GPU are in the memory of its host."""
    devices = {device_of(x) for tree in trees for x in pytree.leaves(tree) if isinstance(x, Tensor)}
    return devices == {HOST}


def _value_of(x: Tensor) -> Any:
    """The value that a step reads if it goes well: nothing is skipped, and numbers are 1."""
    return False if x.dtype == torch.bool else 1.0 if x.dtype.is_floating_point else 1


def fake_nvme(config: RunConfig) -> PlannedNvme | None:
    """The PlannedNvme for the leaves that a config offloads to a disk; None if there are none."""
    if not Offload.parse(config.offload).on_disk:
        return None
    size = config.nvme.buffer_mb << 20 if config.nvme.buffer_mb else None
    return PlannedNvme(buffer_bytes=size, slots=config.nvme.slots, verify=config.nvme.verify)


def fake_state(job: Job, mode: FakeDevice) -> Any:
    """Make a rank's state, with fake tensors of `mode` for leaves in memory."""
    nvme, mesh = job.nvme, job.mesh
    like, specs = run_build.like_of(job), pytree.named_leaves(run_build.specs_of(job))

    def leaf(name: str, x: Tensor) -> Any:
        if name in stored:
            return DiskTensor(store, name)
        return torch.empty(x.shape, dtype=x.dtype, device=HOST if specs[name].memory.on_host else mode.device)

    stored = DiskLayout(like, run_build.specs_of(job), job.plan).files if nvme is not None else {}
    store: Any = nvme.open(stored, mesh) if nvme is not None and stored else None  # a PlannedStore
    return pytree.map_named(leaf, like)


def fake_batch(job: Job, mode: FakeDevice) -> dict[str, Tensor]:
    """Make a rank's part of a batch, as data.token_stream does."""
    config = job.config
    shape = (config.train.batch // job.mesh.data_size, config.data.seq_len)
    dtypes = {"tokens": torch.int64, "targets": torch.int64, "documents": torch.int32, "mask": torch.bool}
    if not config.data.within_documents:
        del dtypes["documents"]
    if config.task.reference:
        dtypes["reference"] = torch.float64
    return {name: torch.empty(shape, dtype=dtype, device=mode.device) for name, dtype in dtypes.items()}


def make_trace(
    step: FakeStep, stays: Sequence[Stay] = (), segments: tuple[RepeatedEvents, ...] = (), exact: str = ""
) -> Trace:
    """The Trace of a step; stays: extrapolated ones of a shortened step."""
    stays, config, mesh = stays or step.stays, step.job.config, step.job.mesh
    timeline = moments(stays)
    peak = max(timeline, key=lambda moment: moment.bytes)
    on_device, elsewhere = step.at_rest
    unique_events = {id(stay.events): stay.events for stay in stays}
    return Trace(
        events=tuple(itertools.chain.from_iterable(unique_events.values())),
        timeline=timeline,
        peak=peak,
        alive=alive(stays, peak),
        state=on_device,
        state_elsewhere=elsewhere,
        ledger=rows(stays),
        sizes={axis.name: axis.size for axis in mesh.axes},
        rank=step.rank,
        target=step.target,
        config=config,
        tokens=config.train.batch // mesh.data_size * config.data.seq_len,
        num_params=run_build.num_params(step.job),
        host_peak=step.host_peak,
        segments=segments,
        exact=exact,
    )


def rows(stays: Iterable[Stay]) -> tuple[LedgerRow, ...]:
    """Sum the ledger entries of all stays."""
    sums: dict[tuple, list[int]] = {}
    for stay in stays:
        for key, elements in stay.sent:
            totals = sums.setdefault(key, [0, 0])
            totals[0] += 1
            totals[1] += elements
    return tuple(
        LedgerRow(
            phase, collective, axis, leaf, str(dtype).removeprefix("torch."), calls, elements, elements * dtype.itemsize
        )
        for (phase, collective, axis, leaf, dtype), (calls, elements) in sums.items()
    )
