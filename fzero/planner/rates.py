"""The seconds of one operator, and of one collective, on a device: from measured curves or data sheets.

An operator takes the longer of two times, that of its FLOPs and that of its bytes, plus the host's time to issue it. A
measured curve includes both: it was measured on operators of that kind as a step runs them.

Ref: Williams et al. 2009, "Roofline"; Hockney 1994, "The communication challenge for MPP" (a message takes alpha +
bytes / beta).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fzero.comm.axes import AXES, joined_links
from fzero.comm.communicator import ONE_SIDED, SMALL_BYTES
from fzero.planner.devices import Curve, Device, Level, MeasuredRates, Products
from fzero.planner.operations import ExecutedOp

NEIGHBOURS = 6  # measured products used to interpolate a rate
# Tile sizes of a product on one multiprocessor of a GPU, and the fraction of the peak that each can reach: small tiles
# read more bytes for each FLOP.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.85), (64, 128, 0.65), (128, 64, 0.65), (64, 64, 0.45))


class OpCost(NamedTuple):
    """The seconds of one operator: the host's, the device's, and its bottleneck."""

    host_s: float
    device_s: float
    bound: str  # "compute" or "memory"


def least_seconds(device: Device, op: ExecutedOp) -> tuple[float, float]:
    """(the seconds of an operator's FLOPs at the device's peak, those of its bytes at the bandwidth)."""
    peak = device.flops.get(op.dtype) or max(device.flops.values(), default=math.inf)
    return op.flop / peak, op.bytes / device.bandwidth_bytes_s


def threads_of(cores: int, processes: int) -> int:
    """The threads of each of `processes` processes that share a machine's cores (see doctor.share_cores)."""
    return max(1, cores // max(1, processes))


def op_costs(
    device: Device, *, threads: int = 1, processes: int = 1, fp32_matmul: str = "default"
) -> Callable[[ExecutedOp], OpCost]:
    """A function from an Op to its Cost, for one of `processes` processes with `threads` threads each."""
    cache: dict[tuple, OpCost] = {}
    rates = device.rates_of(threads, processes)
    slower = 1.0 if rates is None else max(1.0, threads * processes / device.cores)

    def cost(op: ExecutedOp) -> OpCost:
        key = op[2:]  # all facts of an op except its place in the step
        if key not in cache:
            host_s, device_s, bound = _listed(device, op) if rates is None else _measured(rates, op, fp32_matmul)
            cache[key] = OpCost(host_s * slower, device_s * slower, bound)
        return cache[key]

    return cost


# ---- measured --------------------------------------------------------------------------------------------------------


def _measured(rates: MeasuredRates, op: ExecutedOp, fp32_matmul: str) -> OpCost:
    """Costs from the most specific curve of each operator, without its dispatch time."""
    host_s = rates.op_s.get("eager", 0.0)
    dispatch = rates.bandwidth[0][1]
    if op.kind == "gemm" and op.flop:
        table = products_of(rates, op, fp32_matmul)
        if table:
            return OpCost(host_s, max(0.0, gemm_s(table, op.shape) - dispatch), "compute")
    keys = (f"{op.name}/{op.dtype}", op.name, f"{op.kind}/{op.dtype}", op.kind)
    curve = next((rates.kernels[key] for key in keys if key in rates.kernels), None)
    if op.kind == "attention" and curve is not None:
        return OpCost(host_s, max(0.0, along(curve, op.flop) - dispatch), "compute")
    if not op.bytes:
        return OpCost(host_s, 0.0, "memory")
    seconds = like(rates.bandwidth, rates.bandwidth if curve is None else curve, op.bytes)
    return OpCost(host_s, max(0.0, seconds - dispatch), "memory")


def like(bandwidth: Curve, curve: Curve, size: float) -> float:
    """The seconds of a curve over bytes at `size`; beyond its ends in proportion to the memory's curve."""
    end = min(max(size, curve[0][0]), curve[-1][0])
    return along(curve, end) * (along(bandwidth, size) / along(bandwidth, end) if size != end else 1.0)


def products_of(rates: MeasuredRates, op: ExecutedOp, fp32_matmul: str) -> Products:
    """The measured products of an operator's dtype, way and layout; float8 no slower than bfloat16."""
    layout = op.name.partition("/")[2]
    ways = (f"{op.dtype}/{fp32_matmul}", op.dtype) if op.dtype == "float32" else (op.dtype,)
    ways += ("bfloat16",) * op.dtype.startswith("float8")
    for key in (name for way in ways for name in (f"{way}/{layout}", way)):
        if rates.gemm.get(key):
            return rates.gemm[key]
    return ()


def along(curve: Curve, size: float) -> float:
    """The seconds of a curve at `size`: a power law between points, the last rate beyond, constant below.

    >>> round(along(((10.0, 1.0), (1000.0, 100.0)), 100.0), 6)
    10.0
    """
    if size <= curve[0][0]:
        return curve[0][1]
    if size >= curve[-1][0]:
        return curve[-1][1] * size / curve[-1][0]
    i = bisect.bisect_right(curve, size, key=lambda point: point[0])
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    fraction = math.log(size / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0) ** fraction if y0 and y1 else y0 + fraction * (y1 - y0)


def gemm_s(table: Products, shape: Sequence[int]) -> float:
    """The seconds of a product (batch, m, n, k): log(FLOP/s) by inverse cubes of distance (Shepard 1968)."""
    # The average over the nearest measured shapes, weighted by 1/distance^3, with the Euclidean distance of the
    # logarithms of the four sizes. A measured shape gets exactly its measured seconds.
    if not min(shape):
        return 0.0
    distances = [(sum(math.log(size / measured) ** 2 for size, measured in zip(shape, row)), row) for row in table]
    near = sorted(distances)[:NEIGHBOURS]
    if near[0][0] == 0.0:
        return near[0][1][4]
    weights = [squared**-1.5 for squared, _ in near]
    logs = [math.log(2.0 * math.prod(row[:4]) / row[4]) for _, row in near]
    return 2.0 * math.prod(shape) / math.exp(sum(w * x for w, x in zip(weights, logs)) / sum(weights))


# ---- listed ----------------------------------------------------------------------------------------------------------


def _listed(device: Device, op: ExecutedOp) -> OpCost:
    """Costs from the roofline of a data sheet: peaks times `efficiency`, one factor for each class of operation."""
    efficiency = device.efficiency
    memory_s, compute_s = op.bytes / (device.bandwidth_bytes_s * efficiency["memory"]), 0.0
    if op.flop:
        peak = device.flops.get(op.dtype) or max(device.flops.values())
        if op.kind == "attention":
            way = "attention_backward" if "backward" in op.name else "attention_forward"
            library = op.name.partition("/")[2]  # of the forms by libraries; see kernels.attention_library
            reached = efficiency.get(f"{way}/{library}", efficiency.get(way, efficiency["gemm"]))
        else:
            reached = efficiency["gemm"] * tiled_fraction(device.processors, op.shape)
        compute_s = op.flop / (peak * reached)
    took = max(memory_s, compute_s)
    return OpCost(
        device.op_s.get("eager", 0.0),
        took + device.launch_s if took else 0.0,
        "compute" if compute_s > memory_s else "memory",
    )


def tiled_fraction(processors: int, shape: Sequence[int]) -> float:
    """The fraction of the peak, in (0, 1], that tiles and waves leave to a product on a GPU."""
    # A multiprocessor computes whole tiles, and a partial last wave of tiles takes as long as a full one. The best of
    # TILES is used. Filling the pipeline takes as long as 128 more steps of k. Ref: NVIDIA, "Matrix multiplication
    # background user's guide", sections on tile and wave quantization.
    if len(shape) != 4 or not min(shape):
        return 1.0
    batch, m, n, k = shape
    best = 0.0
    for rows, columns, efficiency in TILES:
        waves = math.ceil(batch * math.ceil(m / rows) * math.ceil(n / columns) / processors)
        best = max(best, efficiency * batch * m * n / (waves * processors * rows * columns))
    return best * k / (k + 128)


# ---- links -----------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """How the ranks of one mesh axis reach each other."""

    size: int
    kind: str  # "gloo", "nccl" or "rccl"
    # innermost first: (level of links, number of units of the next inner level that it joins)
    hops: tuple[tuple[Level, int], ...]
    sharing: int  # ranks of an innermost unit that send at the same time
    # measured among this number of ranks: by collective, seconds over bytes of the whole tensor
    curves: dict[str, Curve]


def ways_of(device: Device, sizes: Mapping[str, int]) -> dict[str, Way]:
    """The Way of each axis of a mesh with more than one rank, and of several of dp, ep and cp as one."""
    world, ways, strides, stride = math.prod(sizes.values()), {}, {}, 1
    for name in reversed(AXES.by_rank):
        strides[name] = stride
        stride *= sizes.get(name, 1)
    joined = joined_links({name: sizes.get(name, 1) for name in AXES.by_rank})
    crowd = {size: crowded(device, world, size) for size in range(2, world + 1)}
    for names in (*((name,) for name in strides), *joined):
        name, size = "+".join(names), math.prod(sizes.get(axis, 1) for axis in names)
        if size > 1:
            hops, inside = [], 1
            for level in device.links:
                reach = size if level.ranks is None else reached(level.ranks, [(sizes[a], strides[a]) for a in names])
                if reach > inside:
                    hops.append((_reached(device, level, crowd[2]), -(-reach // inside)))
                    inside = reach
            if inside < size:  # beyond the outermost listed level, its links are assumed
                hops.append((_reached(device, device.links[-1], crowd[2]), -(-size // inside)))
            measured = [hop.name for hop, _ in hops] == [device.links[0].name]  # curves are of the innermost links
            curves = {
                key.partition("/")[0]: delay_curve(curve, crowd[size])
                for key, curve in device.collectives.items()
                if key.endswith(f"/{size}") and (measured or key.startswith("late/"))
            }
            ways[name] = Way(size, hops[0][0].kind, tuple(hops), min(world, device.links[0].ranks or world), curves)
    return ways


def crowded(device: Device, world: int, measured: int) -> float:
    """How many times as many ranks share a core as when it was measured; 1 for GPUs."""
    if device.kind != "cpu":
        return 1.0
    return max(1.0, device.on_node(world) / device.cores) / max(1.0, measured / device.cores)


def delay_curve(curve: Curve, crowd: float) -> Curve:
    """A curve of seconds over bytes, of which what the smallest message takes is taken `crowd` times.

    >>> delay_curve(((1.0, 2.0), (10.0, 2.5)), 3.0)
    ((1.0, 6.0), (10.0, 6.5))
    """
    min_s = min(seconds for _, seconds in curve)
    return tuple((size, seconds + (crowd - 1.0) * min_s) for size, seconds in curve)


def reached(ranks: int, axes: Sequence[tuple[int, int]]) -> int:
    """How many of a link's ranks are in a unit of `ranks` ranks.

    >>> reached(8, [(4, 2)]), reached(8, [(4, 8), (2, 1)]), reached(8, [(4, 2), (2, 1)])
    (4, 2, 8)
    """
    count = 1
    for size, stride in reversed(axes):
        inside = min(size, max(1, ranks // stride))
        count *= inside
        if inside < size:
            break
    return count


def _reached(device: Device, level: Level, crowd: float) -> Level:
    """A level with the reachable fraction of its bandwidth, and the cores' time for `crowd` ranks."""
    hidden = 1.0 if level.hidden is None else level.hidden
    reached = level.bytes_s * device.efficiency.get("links", 1.0)
    latency, call = level.latency_s * crowd, level.call_s * crowd
    return level._replace(bytes_s=reached, latency_s=latency, call_s=call, hidden=hidden)


class Message(NamedTuple):
    """The seconds of a collective: of the host, of its links from start to end, and by level."""

    host_s: float
    seconds: float
    busy: dict[str, float]
    hidden: float = 1.0  # the fraction of `seconds` that computation can hide
    late_s: float = 0.0  # until the last rank has reached the collective
    behind_s: float = 0.0  # of `seconds`, those at the end in which the links are free for the next message


def collective_s(way: Way, collective: str, sent_bytes: int) -> Message:
    """The Message of a collective in which one rank sends `sent_bytes`, counted as in the ledger."""
    # Curves measured among the same number of ranks, else alpha + bytes / beta. NCCL uses rings: of nested units each
    # rank sends all parts inside its unit, and a unit with r ranks has r links to the next one; a psum may use trees,
    # which have fewer steps. gloo (see comm/communicator.py) sends messages from each rank to each other: a small psum
    # its whole input, one round; a large one pieces, and then their sums. Ref: Thakur et al. 2005, "Optimization of
    # collective communication operations in MPICH", section 4.
    n, collective = way.size, "all_to_all" if collective == "exchange_rows" else collective
    if collective in ONE_SIDED:
        return one_sided_s(way, collective, sent_bytes)
    full_bytes = sent_bytes * n / (n - 1) / (2 if collective == "psum" else 1)
    late_s = way.curves["late"][0][1] if "late" in way.curves else 0.0
    if collective in way.curves and len(way.hops) == 1:
        level = way.hops[0][0]
        assert level.hidden is not None  # `_reached` fills it
        seconds = along(way.curves[collective], full_bytes)
        if level.total_bytes_s:  # other ranks may send beside those of the axis
            seconds = max(seconds, sent_bytes * way.sharing / level.total_bytes_s)
        seconds = max(0.0, seconds - level.call_s)
        return Message(level.call_s, seconds, {level.name: seconds}, level.hidden, late_s)
    message = (
        _by_messages(way, collective, sent_bytes, full_bytes)
        if way.kind == "gloo"
        else _by_rings(way, collective, sent_bytes)
    )
    return message._replace(late_s=late_s)


def one_sided_s(way: Way, collective: str, sent_bytes: int) -> Message:
    """The Message of a gather to some ranks, or of a scatter from one, whose links are in use one by one."""
    level = way.hops[-1][0]
    seconds = level.latency_s + sent_bytes * (way.size - 1 if collective == "gather_to" else 1) / level.bytes_s
    assert level.hidden is not None  # `_reached` fills it
    return Message(level.call_s, seconds, {level.name: seconds}, level.hidden)


def wire_s(way: Way, a: int, b: int, size: int) -> float:
    """The seconds of a message of `size` bytes between ranks a and b of an axis."""
    inside = 1
    for level, units in way.hops:
        inside *= units
        if a // inside == b // inside:
            return level.latency_s + size / level.bytes_s
    level = way.hops[-1][0]
    return level.latency_s + size / level.bytes_s


def _by_rings(way: Way, collective: str, sent_bytes: int) -> Message:
    n, rounds = way.size, 2 if collective == "psum" else 1
    busy, ring, tree, inside = {}, 0.0, 0.0, 1
    for level, units in way.hops:
        groups = n // inside  # units joined at this level or an outer one
        level_bytes = float(sent_bytes)
        if collective == "all_to_all":
            level_bytes *= (n - inside) / (n - 1)
        elif collective != "ppermute" and inside > 1:
            level_bytes *= (groups - 1) / groups * n / (n - 1) / inside
        busy[level.name] = busy.get(level.name, 0.0) + level_bytes / level.bytes_s
        ring += (units - 1) * level.latency_s
        tree += math.ceil(math.log2(units)) * level.latency_s
        inside *= units
    steps = {"ppermute": way.hops[-1][0].latency_s, "psum": min(ring, tree), "all_to_all": tree}.get(collective, ring)
    return Message(way.hops[0][0].call_s, max(busy.values()) + rounds * steps, busy)


def _by_messages(way: Way, collective: str, sent_bytes: int, full_bytes: float) -> Message:
    n, total, rounds = way.size, float(sent_bytes), 1
    if collective == "psum":
        total, rounds = ((n - 1) * full_bytes, 1) if n * full_bytes <= SMALL_BYTES else (total, 2)
    busy, inside = {}, 1
    for level, units in way.hops:
        joined = min(n, inside * units)
        # A rank sends the others as much each, those of its own unit over inner links.
        level_bytes = total if collective == "ppermute" else total * (joined - inside) / (n - 1)
        seconds, inside = level_bytes / level.bytes_s, joined
        if level.total_bytes_s:
            seconds = max(seconds, level_bytes * way.sharing / level.total_bytes_s)
        busy[level.name] = busy.get(level.name, 0.0) + seconds
    count, call_s = 1 if collective == "ppermute" else n - 1, way.hops[0][0].call_s
    slowest = max((level for level, _ in way.hops), key=lambda level: level.latency_s)
    late_s = rounds * slowest.latency_s
    seconds = late_s + max(busy.values())
    # The cores send over all levels, and what they do for one adds to what they do for another.
    spent = [(busy[level.name], level) for level, _ in way.hops] + [(late_s, slowest)]
    exposed_s = sum(duration * (1.0 - (1.0 if level.hidden is None else level.hidden)) for duration, level in spent)
    hidden = 1.0 - min(1.0, exposed_s / seconds) if seconds else 1.0
    return Message(call_s * count * rounds, seconds, busy, hidden, behind_s=late_s)
