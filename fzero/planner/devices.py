"""The hardware of a rank as a value: measured by `fzero bench`, or from the data sheets that come with the package; and
how a step's tokens are spread over its experts, assumed or as a run recorded them.

A data sheet gives peaks, and `efficiency` the fraction of each that is reached, by class of operation. A measured file
gives curves of seconds over sizes, and needs no factor.

Shapes in an exchange are the same whatever is chosen, so the spread changes no byte of memory: the rank with the
fullest experts computes longer, and the others wait for it in every layer.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fzero.core.config_tables import KINDS
from fzero.core.device import Target
from fzero.core.pytree import nearest
from fzero.core.text_parsing import parse_json, read_text_file
from fzero.planner.launch import device_path
from fzero.run.setup.machine import device_file
from fzero.run.setup.run_folder import read_metrics
from fzero.sharding import Plan
from fzero.sharding.spec import HOST_MEMORY, StateMemory


class Loads(NamedTuple):
    """How a step's tokens are spread over the experts: a factor over the mean, or recorded shares.

    >>> Loads(1.2).imbalance(8), Loads(shares=((0.5, 0.1, 0.2, 0.2),)).imbalance(2)
    (1.2, 1.2)
    """

    factor: float = 1.0  # of every layer, the rows of the rank with the fullest experts over the mean of the ranks
    # of each layer the share of the choices that each expert gets, as a run records
    shares: tuple[tuple[float, ...], ...] = ()

    def imbalance(self, ep: int) -> float:
        """The rows of the fullest of ep ranks over the mean of them, on the average over the layers."""
        if ep == 1:
            return 1.0
        if not self.shares:
            return self.factor
        count = len(self.shares[0])
        if count % ep:
            raise ValueError(f"imbalance: ep={ep} does not divide the {count} experts of the shares; give a factor")
        per_rank = count // ep
        fullest = [
            max(sum(layer[i : i + per_rank]) for i in range(0, count, per_rank)) / sum(layer) for layer in self.shares
        ]
        return ep * sum(fullest) / len(fullest)

    @classmethod
    def parse(cls, text: str) -> Loads:
        """The Loads of a text: a factor from 1, such as "1.2", or the folder of a run with experts."""
        try:
            factor = float(text)
        except ValueError:
            return cls(shares=recorded(Path(text)))
        if not 1.0 <= factor < math.inf:
            raise ValueError(f"imbalance is {text}; the fullest rank over the mean is finite and at least 1")
        return cls(factor)


EVEN = Loads()


def recorded(folder: Path) -> tuple[tuple[float, ...], ...]:
    """The shares of all layers with experts in the last recorded step of a run."""
    if not folder.is_dir():
        raise ValueError(f"imbalance is {str(folder)!r}: no number and no folder of a run; write 1.2, for example")
    rows = [row["experts"] for row in read_metrics(folder) if row.get("experts")]
    if not rows:
        raise ValueError(f"{folder}: no step of this run has recorded experts; give a factor, such as 1.2")
    return tuple(tuple(layer) for stack in rows[-1].values() for layer in stack["load"])


def has_capacity(plan: Plan, loads: Loads) -> bool:
    """Whether a load has room in the exchange of a plan."""
    if plan.experts is None or plan.experts.form != "exchange":
        return True
    return loads.imbalance(plan.mesh.ep.size) <= plan.experts.slack


def expect_capacity(plan: Plan, loads: Loads) -> None:
    """Raise ValueError for a load that has no room in the exchange of a plan."""
    if plan.experts is not None and not has_capacity(plan, loads):
        factor = loads.imbalance(plan.mesh.ep.size)
        raise ValueError(
            f"imbalance {factor:.3g}: the fullest rank of ep={plan.mesh.ep.size} is sent so many times what each "
            f"sends, and exchange:{plan.experts.slack:g} has no room for it, so that a run would "
            "take more memory than planned; plan a larger slack, or gather"
        )


# Of a machine here: memory of a process besides tensors (Python, PyTorch's libraries), and the fraction lost.
RESERVED_BYTES, MARGIN = 1 << 30, 0.05
HOST_PART = 0.9  # fraction of the host's memory for tensors: the system, processes and page cache take the rest
Curve = tuple[tuple[float, float], ...]  # (size, seconds), sorted by size
Products = tuple[tuple[int, int, int, int, float], ...]  # (batch, m, n, k, seconds) of [batch, m, k] @ [batch, k, n]


class MeasuredRates(NamedTuple):
    """Measured seconds of operations as a training step runs them, in one process beside others."""

    threads: int  # of the process that was measured
    processes: int  # that did the same on this machine, it included
    bandwidth: Curve  # bytes read and written -> seconds of a sum of two tensors
    gemm: dict[str, Products]  # by dtype; "float32/onednn": computed by oneDNN, see fzero.run.setup.machine
    kernels: dict[str, Curve]  # "name/dtype" -> seconds by bytes read and written, or by FLOP for attention
    # Host seconds for an operator ("eager"), a call of a compiled graph ("compiled") and one of its kernels ("kernel").
    op_s: dict[str, float]
    step_s: dict[str, float]  # host seconds for each step besides
    spread: float = 1.0  # median over figures of a figure's median / minimum: how busy the machine was


class Level(NamedTuple):
    """One level of the links between ranks; levels are listed innermost first."""

    name: str
    kind: str  # "gloo", "nccl" or "rccl"
    ranks: int | None  # number of ranks that it connects; None for any number
    bytes_s: float  # of one rank, in each direction, for large messages
    latency_s: float  # of an empty message
    total_bytes_s: float | None = None  # of all ranks of the level together, if they share a link
    call_s: float = 0.0  # host seconds of a call, besides its messages
    hidden: float | None = None  # the fraction of a large message's time that computation hides; None: not measured


@dataclass(frozen=True)
class Device:
    """A processor with its memory and links, in seconds, bytes and FLOP; None: unknown."""

    name: str
    kind: str  # "cpu" or "cuda" (which torch calls AMD's GPUs too)
    measured: bool  # by `fzero bench`; False: listed from data sheets
    processors: int  # multiprocessors or compute units of a GPU; cores of a CPU
    memory_bytes: int
    reserved_bytes: int  # not available to tensors: the driver's context, libraries, the runtime
    margin: float  # the fraction of the rest that the allocator loses to fragmentation
    flops: dict[str, float]  # FLOP/s of dense products by dtype: listed, or the best that was measured
    bandwidth_bytes_s: float  # memory bandwidth, reads and writes together
    links: tuple[Level, ...]
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    cache_bytes: int | None = None  # of the last-level cache
    efficiency: dict[str, float] = field(default_factory=dict)  # fraction of a listed peak that is reached, by class
    lost: float = 0.0  # fraction of a step that published runs spend on what a plan does not simulate
    step_range: tuple[float, float] = (0.8, 1.25)  # real over predicted time of a step: the least and the most seen
    launch_s: float = 0.0  # seconds between two kernels of a GPU
    op_s: dict[str, float] = field(default_factory=dict)  # as in Rates, for a device that was not measured
    rates: tuple[MeasuredRates, ...] = ()
    # "psum/4": bytes of the whole tensor -> seconds among 4 ranks
    collectives: dict[str, Curve] = field(default_factory=dict)
    # "late/4": a single point, the seconds between the first and the last rank to reach a collective
    host_memory_bytes: int | None = None  # of a node, without the devices' own memory
    host_memory_bytes_s: float | None = None  # its bandwidth, of a node: reads and writes together
    # bytes/s between one device and host memory: "read", "write" (to the host), at the same time
    host: dict[str, float] = field(default_factory=dict)
    nvme: dict[str, float] = field(default_factory=dict)  # bytes/s of a node's disk: "read", "write", "both"
    price_per_hour: float | None = None  # of one device; never listed, as prices change
    # the ranks of a run that share a node, its cores, memory and disk; None: as many as the innermost links connect
    ranks_on_node: int | None = None
    loads: Loads = EVEN  # not of the device: of a run's experts over ep, which a plan assumes
    machine: dict[str, str] = field(default_factory=dict)  # of the measurement: processor, versions, command, time
    sources: dict[str, str] = field(default_factory=dict)  # the source of each field

    @property
    def cores(self) -> int:
        """The number of cores of a CPU."""
        return self.processors

    @property
    def capacity_bytes(self) -> int:
        """The bytes available to tensors: memory without reserved bytes and fragmentation."""
        return int((self.memory_bytes - self.reserved_bytes) * (1 - self.margin))

    def on_node(self, ranks: int) -> int:
        """The number of ranks on a node of a run with `ranks` ranks."""
        return min(ranks, self.ranks_on_node or self.links[0].ranks or ranks)

    def rates_to(self, memory: StateMemory) -> dict[str, float]:
        """The bytes/s to and from a memory beside the device's, by direction."""
        if memory.on_disk:
            return self.nvme
        reached = self.efficiency.get(HOST_MEMORY, 1.0)
        return {direction: rate * reached for direction, rate in self.host.items()}

    def host_capacity_bytes(self, processes: int) -> int | None:
        """The bytes of host memory available to each of `processes` processes of a node; None if unknown."""
        return None if self.host_memory_bytes is None else int(self.host_memory_bytes * HOST_PART) // processes

    @property
    def target(self) -> Target:
        """The target by which kernels are chosen."""
        return Target("cpu") if self.kind == "cpu" else Target(self.kind, self.processors, self.capability, self.name)

    def rates_of(self, threads: int = 1, processes: int = 1) -> MeasuredRates | None:
        """The measured rates nearest to these numbers of threads and processes; None for a listed device."""
        return min(self.rates, key=lambda r: (abs(r.threads - threads), abs(r.processes - processes)), default=None)


def device(name: str | Path, **changes: Any) -> Device:
    """Return a Device by name: a listed one, "here" (measured on this machine by `fzero bench`), or the path of a
    device file.

    changes: fields to replace, such as price_per_hour or ranks_on_node. Raises ValueError for an unknown name or an
    invalid device file.
    """
    path = device_path(name)
    if path is None:
        path = device_file()
        if not path.is_file():
            raise ValueError(f"device 'here': there is no {path}; run `fzero bench` on this machine first")
    return dataclasses.replace(from_json(read_text_file(path), str(path)), **changes)


def between_nodes(device: Device, text: str) -> Device:
    """The device with other links between its nodes, of "GBIT" or "GBIT:MS"; raises ValueError.

    >>> level = between_nodes(device("h100"), "10:5").links[-1]
    >>> level.ranks, level.bytes_s, level.latency_s  # an eighth of a node's
    (None, 156250000.0, 0.005)
    """
    rate, _, latency = text.partition(":")
    try:
        gigabit, milliseconds = float(rate), float(latency or 0)
    except ValueError:
        gigabit = milliseconds = math.nan
    if not (0 < gigabit < math.inf and 0 <= milliseconds < math.inf):
        raise ValueError(f"between nodes: {text!r} is not GBIT or GBIT:MS, such as 10:5 for 10 Gbit/s and 5 ms")
    ranks = device.ranks_on_node
    inner = [level for level in device.links if level.ranks is not None] or [device.links[0]._replace(ranks=ranks or 1)]
    inner = [level if ranks is None else level._replace(ranks=min(level.ranks or ranks, ranks)) for level in inner]
    near, sharing = inner[-1], inner[0].ranks or 1
    share, hidden, call_s = gigabit * 1e9 / 8 / sharing, near.hidden, near.call_s
    if hidden is not None:  # measured
        max_rate = min(near.bytes_s, (near.total_bytes_s or math.inf) / sharing)
        share = min(share, max_rate)
        # What computation cannot hide of a message is the transport's part of its time, and not the wire's.
        hidden, call_s = 1 - (1 - hidden) * share / max_rate, call_s + near.latency_s
    outer = Level(f"{gigabit:g} Gbit/s", near.kind, None, share, milliseconds / 1e3, call_s=call_s, hidden=hidden)
    return dataclasses.replace(device, links=(*inner, outer))


def to_json(device: Device) -> str:
    """The text of a device file; `from_json` gives the same Device back."""
    table = _plain(device)
    lines = [f"{json.dumps(key)}: {_format_json(value)}" for key, value in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, name: str) -> Device:
    """Parse the text of a device file. Raises ValueError naming the file `name`, the key and the problem."""
    table = parse_json(text, name)
    try:
        parsed = _typed("", table, Device)
        _check(parsed)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; correct it, or run `fzero bench` again") from None
    return parsed


def _check(device: Device) -> None:
    if device.kind not in ("cpu", "cuda"):
        raise ValueError(f"kind is {device.kind!r}; it must be cpu or cuda")
    for name in ("processors", "memory_bytes", "bandwidth_bytes_s"):
        if not 0 < getattr(device, name) < math.inf:
            raise ValueError(f"{name} is {getattr(device, name)!r}; it must be above 0 and finite")
    if device.ranks_on_node is not None and device.ranks_on_node < 1:
        raise ValueError(f"ranks_on_node is {device.ranks_on_node}; it must be at least 1, or null")
    if not 0 <= device.margin < 1:
        raise ValueError(f"margin is {device.margin!r}; it must be at least 0 and below 1")
    if not 0 <= device.lost < 1:
        raise ValueError(f"lost is {device.lost!r}; it must be at least 0 and below 1")
    if not 0 < device.step_range[0] <= 1 <= device.step_range[1] < math.inf:
        raise ValueError(f"step_range is {list(device.step_range)}; it must be [at most 1, at least 1], both above 0")
    if not 0 <= device.reserved_bytes < device.memory_bytes:
        raise ValueError(f"reserved_bytes is {device.reserved_bytes!r}; it must be at least 0 and below memory_bytes")
    if not device.links:
        raise ValueError("links is []; there must be one level at least")
    if device.measured and not device.rates:
        raise ValueError("rates is [] in a measured file")
    if not device.measured and not {"gemm", "memory"} <= set(device.efficiency):
        raise ValueError(
            f"efficiency has {', '.join(device.efficiency) or 'nothing'}; a listed device needs gemm and memory"
        )


# ---- between values and JSON
# -------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Convert to tables, lists, numbers and texts: dataclasses and named tuples become tables."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and (fields := getattr(value, "_asdict", None)) is not None:
        return {key: _plain(inner) for key, inner in fields().items()}
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _format_json(value: Any, indent: str = "") -> str:
    """Format as JSON with short values on one line."""
    short = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(short) <= 130 or not isinstance(value, dict | list) or not value:
        return short
    deeper = indent + " "
    if isinstance(value, dict):
        inner = [f"{deeper}{json.dumps(key)}: {_format_json(item, deeper)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inner) + f"\n{indent}}}"
    inner = [deeper + _format_json(item, deeper) for item in value]
    return "[\n" + ",\n".join(inner) + f"\n{indent}]"


def _typed(name: str, value: Any, hint: Any) -> Any:
    """`value`, read from JSON, as the type `hint`; raises ValueError naming the key `name`."""
    if isinstance(hint, types.UnionType):
        return (
            None
            if value is None
            else _typed(name, value, next(kind for kind in typing.get_args(hint) if kind is not type(None)))
        )
    if hasattr(hint, "_fields") or dataclasses.is_dataclass(hint):
        return _fields(name, value, hint)
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is dict and isinstance(value, dict):
        return {key: _typed(f"{name}.{key}", item, inner[1]) for key, item in value.items()}
    if kind is tuple and isinstance(value, list):
        if inner[-1] is Ellipsis:
            return tuple(_typed(f"{name}[{i}]", item, inner[0]) for i, item in enumerate(value))
        if len(value) == len(inner):
            return tuple(
                _typed(f"{name}[{i}]", item, item_hint) for i, (item, item_hint) in enumerate(zip(value, inner))
            )
    if hint is float and isinstance(value, int | float) and type(value) is not bool and math.isfinite(value):
        return float(value)
    if kind is None and type(value) is hint and hint is not float:
        return value
    expected = {
        dict: "a table",
        tuple: f"a list of {len(inner)} values" if kind is tuple and inner[-1] is not Ellipsis else "a list",
    }
    rendered = json.dumps(value)
    raise ValueError(
        f"{name} is {rendered if len(rendered) < 60 else rendered[:57] + '...'}; it must be "
        f"{expected.get(kind) or KINDS[hint]}"
    )


def _fields(name: str, value: Any, hint: Any) -> Any:
    """Convert a table to the dataclass or named tuple `hint`; unknown keys and missing required ones are errors."""
    make: Callable[..., Any] = hint
    hints = typing.get_type_hints(hint)
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {json.dumps(value)[:60]}; it must be a table of {', '.join(hints)}")
    prefix = f"{name}." if name else ""
    for key in value:
        if key not in hints:
            raise ValueError(f"unknown key {prefix + key!r}{nearest(key, hints)}; the keys are {', '.join(hints)}")
    if dataclasses.is_dataclass(hint):
        unset = (dataclasses.MISSING, dataclasses.MISSING)
        needed = [f.name for f in dataclasses.fields(hint) if (f.default, f.default_factory) == unset]
    else:
        needed = [key for key in hint._fields if key not in hint._field_defaults]
    for key in needed:
        if key not in value:
            raise ValueError(f"{prefix}{key} is missing")
    return make(**{key: _typed(prefix + key, item, hints[key]) for key, item in value.items()})
