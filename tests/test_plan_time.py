"""The time of a step: hand-made traces on hand-made devices, where each second is known; and what must hold for any."""

import dataclasses
import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fzero.core import CPU, FakeDevice, flop_of
from fzero.core.graph_passes import FORMULAS
from fzero.kernels import FULL, Pattern, pairs
from fzero.planner import devices, rates
from fzero.planner.operations import ExecutedOp, describe_op, describe_passes
from fzero.planner.step_trace import Moment, RepeatedEvents, Trace, Transfer
from fzero.planner.timing import crossing, predict
from fzero.run import from_table, hfu, mfu

CONFIG = from_table(
    {"preset": "llama-tiny", "precision": {"policy": "fp32", "fp32_matmul": "default"}, "train": {"compiled": False}}
)
MOMENT = Moment(0, "forward", None, "", 0, {})
GB = 10**9


def level(name="wire", kind="nccl", ranks=None, bytes_s=1.0 * GB, latency_s=0.0, **more):
    return devices.Level(name, kind, ranks, bytes_s, latency_s, **more)


def gpu(**changes):
    """A listed GPU: 1 GFLOP/s, 1 GB/s, links of 1 GB/s without latency."""
    base = devices.Device(
        name="toy",
        kind="cuda",
        measured=False,
        processors=1,
        memory_bytes=GB,
        reserved_bytes=0,
        margin=0.0,
        flops={"float32": 1e9, "bfloat16": 2e9},
        bandwidth_bytes_s=1e9,
        links=(level(),),
        efficiency={"gemm": 1.0, "memory": 1.0, "links": 1.0, "host": 1.0},
        host={"read": 1e9, "write": 1e9},
        nvme={"read": 2e9, "write": 1e9, "both": 2e9},
    )
    return dataclasses.replace(base, **changes)


def cpu(cores=2, **changes):
    """A measured CPU: adds at 1 GB/s, products at 1 GFLOP/s, an operator takes the host 1 s."""
    curve = ((1.0, 0.0), (1e3, 1e-6), (1e12, 1e3))
    one = devices.MeasuredRates(
        threads=changes.pop("threads", 1),
        processes=changes.pop("processes", 1),
        bandwidth=curve,
        gemm={"float32": ((1, 1000, 1000, 500, 1.0),)},
        kernels={"optimizer": ((2e9, 6.0),)},
        op_s={"eager": 1.0, "compiled": 0.5},
        step_s={"eager": 0.0, "compiled": 0.0},
    )
    gloo = level("memory", "gloo")
    return gpu(kind="cpu", measured=True, processors=cores, rates=(one,), links=(gloo,), efficiency={}, **changes)


def op(seconds=1.0, phase="forward", kind="pointwise", layer=None, flop=0, name="aten.add", shape=()):
    return ExecutedOp(phase, layer, name, kind, "float32", shape, flop, int(seconds * GB))


def start(number, axis="dp", what="all_gather", seconds=1.0, phase="forward", layer=None):
    return Transfer("start", number, what, axis, int(seconds * GB), phase, layer)


def wait(number, axis="dp", what="all_gather", seconds=1.0, phase="forward", layer=None):
    return Transfer("wait", number, what, axis, int(seconds * GB), phase, layer)


def traced(*events, sizes=None, segments=()):
    axes = {"dp": 1, "rp": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, **(sizes or {"dp": 2})}
    return Trace(
        tuple(events), (MOMENT,), MOMENT, (), {}, {}, (), axes, 0, CPU, CONFIG, 1024, 1, segments=tuple(segments)
    )


def seconds(device, *events, **known):
    return predict(traced(*events, **known), device)


# ---- the clocks
# --------------------------------------------------------------------------------------------------------


def test_operators_follow_each_other():
    found = seconds(gpu(), op(2.0), op(3.0, phase="backward", layer=1), op(0.5, phase="update"))
    assert found.step_s == pytest.approx(5.5)
    assert found.phases == pytest.approx({"forward": 2.0, "backward": 3.0, "update": 0.5})
    assert found.layers == pytest.approx({"backward/1": 3.0})
    assert found.kinds == pytest.approx({"pointwise": 5.5}) and found.binds == "memory"


def test_a_transfer_is_hidden_behind_what_runs_before_it_is_waited_for():
    """Two seconds under way, three of computing: nothing is exposed. One of computing: one is."""
    for computed, exposed in ((3.0, 0.0), (1.0, 1.0)):
        found = seconds(gpu(), start(1, seconds=2.0), op(computed), wait(1, seconds=2.0), op(1.0))
        assert found.step_s == pytest.approx(computed + exposed + 1.0)
        assert found.exposed["dp"] == pytest.approx(exposed)
        assert found.hidden["dp"] == pytest.approx(2.0 - exposed)


def test_a_transfer_that_is_waited_for_at_once_is_exposed():
    found = seconds(gpu(), op(1.0), start(1, "tp", "psum"), wait(1, "tp", "psum"), op(1.0), sizes={"tp": 2})
    assert found.step_s == pytest.approx(3.0) and found.exposed == pytest.approx({"tp": 1.0})
    assert found.hidden["tp"] == pytest.approx(0.0)


def test_transfers_of_one_link_follow_each_other():
    events = start(1), start(2), op(1.0), wait(1), wait(2)
    assert seconds(gpu(), *events).step_s == pytest.approx(2.0)
    late = gpu(links=(level(latency_s=0.5),))  # on one axis a message waits for the latency of the one before it, too
    assert seconds(late, *events).step_s == pytest.approx(3.0)


def test_transfers_of_other_links_go_side_by_side():
    links = level("inner", ranks=2), level("outer")
    sizes = {"tp": 2, "dp": 2}  # tp inside a unit of two ranks, dp between units
    ways = rates.ways_of(gpu(links=links), {**dict.fromkeys(("dp", "rp", "tp", "pp", "cp", "ep"), 1), **sizes})
    assert [hop[0].name for hop in ways["tp"].hops] == ["inner"] and [hop[0].name for hop in ways["dp"].hops] == [
        "outer"
    ]
    events = start(1), start(2, "tp"), op(1.0), wait(1), wait(2, "tp")
    assert seconds(gpu(links=links), *events, sizes=sizes).step_s == pytest.approx(1.0)


def test_axes_that_share_a_level_have_half_of_it_each():
    """A long transfer of one axis does not hold a short one of another up for longer than that one takes."""
    sizes = {"dp": 2, "tp": 2}
    short = start(2, "tp", "psum", 1.0), wait(2, "tp", "psum", 1.0)
    found = seconds(gpu(), start(1, seconds=4.0), *short, op(1.0), wait(1, seconds=4.0), sizes=sizes)
    assert found.exposed["tp"] == pytest.approx(2.0)
    behind = seconds(
        gpu(),
        start(1, seconds=4.0),
        *short,
        start(3, "tp", seconds=9.0),
        wait(1, seconds=4.0),
        wait(3, "tp"),
        sizes=sizes,
    )
    assert behind.step_s == pytest.approx(4 + 1 + 9), "a level gives no more than it has"


def test_the_order_is_the_traces():
    """Started before a layer is computed a gather is hidden; started behind it, it is not."""
    ahead = seconds(gpu(), start(1), op(1.0), wait(1), op(1.0))
    late = seconds(gpu(), op(1.0), start(1), wait(1), op(1.0))
    assert (ahead.step_s, late.step_s) == pytest.approx((2.0, 3.0))


def updated_by_host(seconds=1.0, phase="update"):
    return op(seconds, phase=phase, kind="optimizer", name="fzero.adamw_step")._replace(host=True)


ALONE = {"dp": 1}


def test_what_the_host_updates_overlaps_with_what_the_device_has_been_given():
    device, backward = gpu(host_memory_bytes_s=1e9), op(4.0, phase="backward")
    leaves, there = start(1, "host", "write"), wait(1, "host", "write")
    comes, here = start(2, "host", "read"), wait(2, "host", "read")
    early = seconds(device, op(2.0), leaves, backward, there, updated_by_host(2.0), comes, here, op(1.0), sizes=ALONE)
    assert early.step_s == pytest.approx(7.0) and early.host_s == pytest.approx(2.0)
    late = seconds(device, op(2.0), backward, leaves, there, updated_by_host(2.0), comes, sizes=ALONE)
    assert late.step_s == pytest.approx(2 + 4 + 1 + 2 + 1) and late.bound["host"] == pytest.approx(4.0)
    assert sum(late.phases.values()) + sum(late.waiting.values()) == pytest.approx(late.step_s)
    slow = seconds(device, op(2.0), leaves, backward, there, updated_by_host(9.0), comes, here, op(1.0), sizes=ALONE)
    assert slow.step_s == pytest.approx(2 + 1 + 9 + 1 + 1)


def test_each_gpu_has_its_own_link_to_the_host_and_they_share_its_memory():
    for rate, expected in ((8e9, 1.0), (1e9, 4.0)):  # of the memory; four links of 1 GB/s each
        device = gpu(host_memory_bytes_s=rate, links=(level(ranks=4),))
        found = seconds(device, start(1, "host", "read"), wait(1, "host", "read"), sizes={"dp": 4})
        assert found.step_s == pytest.approx(expected)
    both = start(1, "host", "read"), start(2, "host", "write"), op(1.0), wait(1, "host", "read")
    assert seconds(gpu(host_memory_bytes_s=8e9), *both).step_s == pytest.approx(1.0), "each way at its own rate"


def test_an_update_by_the_host_needs_the_rate_of_its_memory():
    with pytest.raises(ValueError, match=r"device toy: .*host_memory_bytes_s, is not known; run `fzero bench`"):
        seconds(gpu(), updated_by_host())


@pytest.mark.parametrize("update_s", [0.5, 3.0], ids=["hidden", "late"])
def test_repeated_layers_that_the_host_updates_take_what_they_take_one_by_one(update_s):
    """A layer's gradients leave in its turn, and are waited for in the next one's; its parameters come back unasked."""
    device = gpu(host_memory_bytes_s=1e9)

    def layer(left, before, number):
        late = [wait(before, "host", "write"), updated_by_host(update_s, "backward")] if before else []
        return [op(2.0, phase="backward"), start(left, "host", "write"), *late, start(number, "host", "read")]

    every = [event for i in range(12) for event in layer(10 + i, 9 + i if i else 0, 100 + i)]
    whole = seconds(device, *every, wait(21, "host", "write"), updated_by_host(update_s), sizes=ALONE)
    edge, middle, last = every[: 3 + 5 * 5], layer(16, 15, 106), layer(17, 16, 107)
    events = [*edge, *middle, *last, wait(17, "host", "write"), updated_by_host(update_s)]
    short = seconds(device, *events, sizes=ALONE, segments=(RepeatedEvents(len(edge), len(edge) + len(middle), 5),))
    assert short.step_s == pytest.approx(whole.step_s) and short.host_s == pytest.approx(whole.host_s)


def test_a_host_that_is_late_holds_a_gpu_up_and_one_that_is_early_does_not():
    device = gpu(op_s={"eager": 1.0})
    late = seconds(device, *[op(0.25)] * 4)
    assert late.step_s == pytest.approx(4.25) and late.bound["host"] == pytest.approx(3.25) and late.binds == "host"
    early = seconds(device, *[op(2.0)] * 4)
    assert early.step_s == pytest.approx(9.0) and early.bound["memory"] == pytest.approx(8.0)


def test_on_a_cpu_the_host_is_the_device():
    found = seconds(cpu(ranks_on_node=1), *[op(2.0)] * 3)
    assert found.step_s == pytest.approx(9.0) and found.bound == pytest.approx({"host": 3.0, "memory": 6.0})
    assert found.phases == pytest.approx({"forward": 9.0})


def test_products_take_the_rate_of_their_shape_and_kinds_their_curves():
    product = op(0.001, kind="gemm", name="aten.mm", flop=10**9, shape=(1, 1000, 1000, 500))
    assert seconds(cpu(ranks_on_node=1), product).kinds == pytest.approx({"gemm": 2.0})
    assert seconds(cpu(ranks_on_node=1), op(2.0, kind="optimizer")).kinds == pytest.approx({"optimizer": 7.0})


# ---- processes on one machine
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("computed", "hidden", "exposed"), [(4.0, 0.0, 2.0), (4.0, 1.0, 0.0), (4.0, 0.75, 0.5), (1.0, 0.75, 1.0)]
)
def test_a_cpu_hides_the_measured_part_of_a_transfer(computed, hidden, exposed):
    """Two seconds under way: what is not hidden is work when it is waited for, the rest goes on behind what is
    computed."""
    device = gpu(links=(level("memory", "gloo", hidden=hidden),))
    found = seconds(device, start(1, seconds=2.0), op(computed), wait(1, seconds=2.0))
    assert found.exposed["dp"] == pytest.approx(exposed) and found.step_s == pytest.approx(computed + exposed)
    assert found.hidden["dp"] == pytest.approx(2.0 - exposed)


def test_more_threads_than_cores_share_them():
    one, four = (seconds(cpu(cores=2, processes=2), op(2.0), sizes={"dp": n}) for n in (2, 4))
    assert four.step_s == pytest.approx(2 * one.step_s)


def test_processes_of_a_machine_share_its_disk():
    events = start(1, "nvme", "write", 1.0), wait(1, "nvme", "write", 1.0)
    one, two = (seconds(gpu(ranks_on_node=n), *events) for n in (1, 2))
    assert one.waiting["nvme"] == pytest.approx(1.0) and two.waiting["nvme"] == pytest.approx(2.0)
    assert one.binds == "nvme"


def test_a_disk_reads_and_writes_at_once_as_fast_as_both_go():
    """Read 2 GB/s, write 1 GB/s, together 2 GB/s: 4 GB and 1 GB would take 2 s and 1 s, and take 2.5 s."""
    events = (
        start(1, "nvme", "read", 4.0),
        start(2, "nvme", "write", 1.0),
        wait(1, "nvme", "read", 4.0),
        wait(2, "nvme", "write", 1.0),
    )
    assert seconds(gpu(ranks_on_node=1), *events).step_s == pytest.approx(2.5)
    events = (
        start(1, "nvme", "read", 1.0),
        start(2, "nvme", "write", 2.0),
        wait(1, "nvme", "read", 1.0),
        wait(2, "nvme", "write", 2.0),
    )
    assert seconds(gpu(ranks_on_node=1), *events).step_s == pytest.approx(2.0)


def test_a_device_without_a_disk_says_so():
    with pytest.raises(ValueError, match="needs its rate of read, and it has none; run `fzero bench`"):
        seconds(gpu(nvme={}), start(1, "nvme", "read"))


# ---- links
# -------------------------------------------------------------------------------------------------------------


def way(size, links, axis="dp", **others):
    sizes = {**dict.fromkeys(("dp", "rp", "tp", "pp", "cp", "ep"), 1), axis: size, **others}
    return rates.ways_of(gpu(links=links), sizes)[axis]


def test_a_ring_takes_its_bytes_and_its_steps():
    """Eight ranks of one node: 7/8 of 8 GB at 1 GB/s and 7 steps of 0.1 s; a psum twice of both (its bytes are the
    ledger's)."""
    one = way(8, (level(latency_s=0.1),))
    assert rates.collective_s(one, "all_gather", 7 * GB).seconds == pytest.approx(7.0 + 0.7)
    assert rates.collective_s(one, "psum_scatter", 7 * GB).seconds == pytest.approx(7.0 + 0.7)
    assert rates.collective_s(one, "psum", 14 * GB).seconds == pytest.approx(14.0 + 2 * 0.3)  # by a tree: log2 8 steps
    assert rates.collective_s(one, "ppermute", GB).seconds == pytest.approx(1.0 + 0.1)


def test_the_ranks_of_a_node_share_the_way_out():
    """16 ranks on two nodes of 8 gather 16 GB: 15 GB pass each rank's inner link, 8 GB go to the other node over 8
    links."""
    links = level("inner", ranks=8, bytes_s=10.0 * GB), level("outer", bytes_s=0.5 * GB)
    found = rates.collective_s(way(16, links), "all_gather", 15 * GB)
    assert found.busy == pytest.approx({"inner": 1.5, "outer": 2.0}) and found.seconds == pytest.approx(2.0)
    spread = way(2, links, "dp", tp=8)  # one rank of a group on each node
    assert [hop[1] for hop in spread.hops] == [2]
    assert rates.collective_s(spread, "all_gather", GB).seconds == pytest.approx(2.0)
    whole = rates.collective_s(way(16, links), "all_to_all", 15 * GB)
    assert whole.busy == pytest.approx({"inner": 1.5, "outer": 16.0})  # 8 of a rank's 15 pieces, over its own link


def test_gloo_sends_what_links_send():
    """Four ranks: three messages each; a small psum its whole input, a large one pieces and their sums."""
    four = way(4, (level("memory", "gloo", latency_s=0.1, call_s=0.01),))
    small, large = 2**20, 2**22
    found = rates.collective_s(four, "psum", small * 6 // 4)
    assert found.seconds == pytest.approx(0.1 + 3 * small / GB) and found.host_s == pytest.approx(0.03)
    found = rates.collective_s(four, "psum", large * 6 // 4)
    assert found.seconds == pytest.approx(0.2 + 1.5 * large / GB) and found.host_s == pytest.approx(0.06)
    shared = way(4, (level("memory", "gloo", total_bytes_s=1.0 * GB),))
    assert rates.collective_s(shared, "all_gather", GB).seconds == pytest.approx(4.0)


def test_gloo_sends_other_nodes_what_is_theirs():
    """Four ranks on two nodes: one of a rank's three pieces stays on its node, two go out."""
    links = level("memory", "gloo", ranks=2, bytes_s=10.0 * GB), level("cable", "gloo", bytes_s=0.5 * GB, latency_s=0.1)
    found = rates.collective_s(way(4, links), "all_gather", 3 * GB)
    assert found.busy == pytest.approx({"memory": 0.1, "cable": 4.0}) and found.seconds == pytest.approx(4.1)
    found = rates.collective_s(way(4, links), "psum", 3 * GB)  # pieces and their sums
    assert found.busy == pytest.approx({"memory": 0.1, "cable": 4.0}) and found.seconds == pytest.approx(4.2)
    assert rates.collective_s(way(4, links), "ppermute", GB).busy == pytest.approx({"memory": 0.1, "cable": 2.0})


def test_links_between_nodes_have_the_transport_that_was_measured_on_one():
    """What computation cannot hide is the transport's part of a message, which no wire makes shorter."""
    near = level("memory", "gloo", bytes_s=1e9, latency_s=0.002, total_bytes_s=8e8, call_s=0.001)

    def outer(text, hidden):
        return devices.between_nodes(gpu(links=(near._replace(hidden=hidden),), ranks_on_node=2), text).links[-1]

    slow = outer("1:5", 0.25)  # 1e9 / 8 / 2 bytes a second of a rank, where the transport has 4e8
    assert (slow.ranks, slow.bytes_s, slow.latency_s, slow.call_s) == (None, 6.25e7, 0.005, 0.003)
    seconds, size = 1.0 / slow.bytes_s, 1.0 / 4e8
    assert (1 - slow.hidden) * seconds == pytest.approx(0.75 * size)
    fast = outer("1000", 0.25)
    assert (fast.bytes_s, fast.latency_s, fast.hidden) == (4e8, 0.0, 0.25)
    listed = outer("1000", None)  # of a data sheet
    assert (listed.bytes_s, listed.latency_s, listed.hidden) == (1e12 / 8 / 2, 0.0, None)


def test_four_ranks_on_a_core_each_take_four_times_as_long():
    """Whatever number of ranks was measured: they had a core each."""
    device = cpu()
    two = device.rates[0]._replace(processes=2)
    for cores, slower in ((2, 2.0), (1, 4.0), (8, 1.0)):
        cost = rates.op_costs(dataclasses.replace(device, rates=(two,), processors=cores), processes=4)
        alone = rates.op_costs(dataclasses.replace(device, rates=(two,), processors=8))
        assert cost(op(0.5, name="aten.mul")).host_s == pytest.approx(slower * alone(op(0.5, name="aten.mul")).host_s)


def test_a_measured_collective_has_its_measured_time():
    device = gpu(collectives={"psum/4": ((1e6, 0.5), (1e9, 5.0))})
    found = rates.ways_of(device, {"dp": 4})["dp"]
    assert rates.collective_s(found, "psum", int(1e9 * 6 / 4)).seconds == pytest.approx(5.0)
    assert rates.collective_s(found, "all_gather", GB).seconds == pytest.approx(1.0)
    links = level("memory", "gloo", ranks=1), level("cable", "gloo", bytes_s=0.5 * GB)  # it was measured without
    found = rates.ways_of(gpu(collectives={"psum/4": ((1e6, 0.5), (1e9, 5.0))}, links=links), {"dp": 4})["dp"]
    assert rates.collective_s(found, "psum", int(1e9 * 6 / 4)).seconds == pytest.approx(3.0)


# ---- repeated segments
# ---------------------------------------------------------------------------------------------------


def layers(n):
    """A step of n layers: each is gathered while the one before it is computed."""
    events = [start(0, seconds=1.5)]
    for i in range(n):
        events += [start(i + 1, seconds=1.5, layer=i), wait(i, seconds=1.5, layer=i), op(1.0, layer=i)]
    return [*events, wait(n, seconds=1.5), op(0.5)]


@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("device", [gpu(), gpu(op_s={"eager": 1.2}), cpu(cores=8)], ids=["gpu", "late host", "cpu"])
def test_a_repeated_segment_is_what_it_stands_for(device, layer):
    """Prefetch over the boundary: what a turn starts the next one waits for."""
    long, short = layers(12), layers(4)
    segment = RepeatedEvents(1 + 3 * layer, 4 + 3 * layer, 9)  # one layer of four, nine times
    assert crossing(short, segment.first, segment.last) == ([layer + 1], [layer])
    a, b = seconds(device, *long), seconds(device, *short, segments=[segment])
    assert b.step_s == pytest.approx(a.step_s)
    for name in ("phases", "kinds", "exposed", "hidden", "bound"):
        assert getattr(b, name) == pytest.approx(getattr(a, name)), name


def test_segments_may_nest():
    inner = [op(1.0), op(2.0)]
    flat = ([op(0.5), *inner * 5]) * 6
    nested = seconds(gpu(), op(0.5), *inner, segments=[RepeatedEvents(0, 3, 6), RepeatedEvents(1, 3, 5)])
    assert nested.step_s == pytest.approx(seconds(gpu(), *flat).step_s) and nested.step_s == pytest.approx(93.0)


# ---- what holds for any
# --------------------------------------------------------------------------------------------------


def random_step(seed):
    """A step with transfers over two axes and a disk, in an order drawn by `seed`."""
    draw = torch.Generator().manual_seed(seed)
    events, open_, number = [], [], itertools.count()
    for _ in range(40):
        x, size = torch.rand(2, generator=draw).tolist()
        if x < 0.3:
            axis, what = (("dp", "all_gather"), ("tp", "psum"), ("nvme", "read"))[int(size * 3) % 3]
            open_.append((next(number), axis, what, 3 * size))
            events.append(start(*open_[-1]))
        elif x < 0.5 and open_:
            events.append(wait(*open_.pop(0)))
        else:
            events.append(op(size, kind="gemm", flop=int(x * GB), shape=(1, 100, 100, 100)))
    return [*events, *(wait(*t) for t in open_)]


@pytest.mark.parametrize("seed", range(8))
def test_a_faster_device_is_never_slower_and_the_parts_add_up(seed):
    events, sizes = random_step(seed), {"dp": 2, "tp": 2}
    for base in (gpu(op_s={"eager": 0.1}), cpu(cores=8)):
        first = seconds(base, *events, sizes=sizes)
        parts = (*first.phases.values(), *first.exposed.values(), *first.waiting.values())
        assert sum(parts) == pytest.approx(first.step_s)
        assert sum(first.bound.values()) == pytest.approx(sum(first.phases.values()))
        faster = [
            {"links": (level(base.links[0].name, base.links[0].kind, bytes_s=3e9),)},
            {"nvme": {name: 2 * rate for name, rate in base.nvme.items()}},
            {"flops": {"float32": 3e9}},
            {"bandwidth_bytes_s": 3e9},
        ]
        for change in faster:
            assert seconds(dataclasses.replace(base, **change), *events, sizes=sizes).step_s <= first.step_s + 1e-9, (
                change
            )


def test_nothing_takes_less_than_its_operators_or_its_longest_link():
    for seed in range(4):
        events = random_step(seed)
        found = seconds(gpu(), *events, sizes={"dp": 2, "tp": 2})
        assert found.step_s >= sum(found.kinds.values()) - 1e-9
        assert found.step_s >= sum(found.moving.values()) / 2 - 1e-9


# ---- rates
# ---------------------------------------------------------------------------------------------------------------


def test_curves_are_straight_in_logarithms_and_go_on_at_the_rate_of_their_ends():
    curve = ((10.0, 1.0), (1000.0, 100.0))
    assert rates.along(curve, 100.0) == pytest.approx(10.0)
    assert rates.along(curve, 1.0) == 1.0 and rates.along(curve, 10_000.0) == pytest.approx(1000.0)


def test_a_measured_product_has_its_time_and_others_lie_between_their_neighbours():
    table = ((1, 100, 100, 100, 1.0), (1, 200, 100, 100, 1.0), (1, 400, 100, 100, 8.0))  # 2, 4 and 1 MFLOP/s
    assert rates.gemm_s(table, (1, 200, 100, 100)) == 1.0 and rates.gemm_s(table, (1, 0, 4, 4)) == 0.0
    rate = 2 * 150 * 100 * 100 / rates.gemm_s(table, (1, 150, 100, 100))
    assert 2e6 < rate < 4e6
    device = cpu()
    both = {
        "float32": ((1, 9, 9, 9, 5.0),),
        "float32/onednn": ((1, 9, 9, 9, 3.0),),
        "float32/onednn/tn": ((1, 9, 9, 9, 4.0),),
    }
    device = dataclasses.replace(device, rates=(device.rates[0]._replace(gemm=both),))
    for way, name, expected in (
        ("default", "aten.mm", 5.0),
        ("onednn", "aten.mm", 3.0),
        ("onednn", "aten.mm/tn", 4.0),
        ("onednn", "aten.mm/nt", 3.0),
    ):
        cost = rates.op_costs(device, fp32_matmul=way)(op(kind="gemm", name=name, flop=2 * 9**3, shape=(1, 9, 9, 9)))
        assert cost.device_s == pytest.approx(expected), (way, name)


def test_tiles_go_in_waves():
    """By hand: 132 tiles of 128 x 256 fill 132 processors once; one tile more needs smaller ones, or a second wave."""
    deep = 2**24  # where filling the pipeline costs nothing
    assert rates.tiled_fraction(132, (1, 128, 256 * 132, deep)) == pytest.approx(1.0, rel=1e-4)
    assert rates.tiled_fraction(132, (1, 128, 256 * 133, deep)) == pytest.approx(
        0.85 * 266 / 396, rel=1e-4
    )  # three waves of 128 x 128
    assert rates.tiled_fraction(132, (1, 64, 64, deep)) == pytest.approx(0.45 / 132, rel=1e-4)
    assert rates.tiled_fraction(132, (1, 128, 256 * 132, 128)) == pytest.approx(0.5)
    assert rates.tiled_fraction(132, (1, 0, 5, 5)) == 1.0


def test_the_most_special_curve_counts_and_dispatch_is_taken_out_once():
    special = {"aten.exp/float32": ((1e3, 2.0), (1e9, 2.0)), "pointwise": ((1e3, 5.0), (1e9, 5.0))}
    device = cpu()
    one = device.rates[0]._replace(kernels=special, bandwidth=((1.0, 0.25), (1e9, 1.0)))
    cost = rates.op_costs(dataclasses.replace(device, rates=(one,)))
    assert cost(op(0.5, name="aten.exp")).device_s == pytest.approx(1.75)
    assert cost(op(0.5, name="aten.mul")).device_s == pytest.approx(4.75)
    assert cost(op(0.5, name="aten.mul")).host_s == 1.0


def test_a_curve_goes_on_as_the_memory_does():
    """An operator measured at 10 bytes alone took 2 s, of which the memory explains nothing: at a size that takes the
    memory 3 times as long it takes 6 s, not 1000 times as long."""
    bandwidth = ((10.0, 1.0), (1e4, 3.0), (1e6, 300.0))
    few, large = ((10.0, 2.0),), ((1e4, 6.0), (1e6, 450.0))
    assert rates.like(bandwidth, few, 1e4) == pytest.approx(6.0) and rates.like(bandwidth, few, 10.0) == 2.0
    assert rates.like(bandwidth, large, 10.0) == pytest.approx(2.0) and rates.like(
        bandwidth, large, 1e7
    ) == pytest.approx(4500.0)


def test_a_compiled_block_is_one_call():
    """Host: a call (0.5 s) for a layer's forward pass and one for its backward pass, 1 s for each operator outside of
    blocks."""
    inside = [
        op(0.0, kind="fused", layer=0),
        op(0.0, kind="gemm", layer=0),
        op(0.0, name="fzero.rope", kind="rope", layer=0),
    ]
    outside = [op(0.0, name="aten.copy_", kind="copy", layer=0, phase="backward"), op(0.0, kind="gemm")]
    backward = [e._replace(phase="backward") for e in inside]
    step = traced(*inside, outside[1], *backward, outside[0], sizes={"dp": 1})

    def host(compiled, remat="none"):
        changed = {
            "preset": "llama-tiny",
            "precision": {"policy": "fp32"},
            "train": {"compiled": compiled, "remat": remat},
        }
        return predict(step._replace(config=from_table(changed)), cpu()).bound["host"]

    assert host(False) == pytest.approx(8.0)
    assert host(True) == pytest.approx(2 * 0.5 + 2.0)
    assert host(True, "full") == pytest.approx(3 * 0.5 + 2.0)


# ---- FLOPs
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["full", "window:3", "local:4", "strided:3", "fixed:4:2", "bigbird:2:1:1:2:5", "bigbird:1:2:0:1"]
)
@pytest.mark.parametrize(("queries", "keys", "first"), [(5, 5, 0), (3, 9, 6), (9, 5, 0), (4, 2, 3), (1, 7, 6)])
def test_pairs_are_those_of_the_mask(text, queries, keys, first):
    pattern = Pattern.parse(text)
    mask = pattern.visible((torch.arange(queries) + first)[:, None], torch.arange(keys)[None])
    assert pairs(pattern, queries, keys, first) == int(mask.sum())


def count_flop(f, *args):
    """The FLOPs of the operators of f(*args), by torch's counter with the formulas of our own operators."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        f(*args)
    return counter.get_total_flops()


@pytest.mark.parametrize("impl", ["tiled", "fused", "blocked", "reference"])
def test_the_counter_knows_every_form_of_attention(impl):
    """fzero's kernel the pairs that it visits, two products forward and five backward; torch's own all of them."""
    from fzero.kernels import attention

    q, k, v = (torch.randn(2, 96, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    flop = count_flop(lambda: attention.attention(q, k, v, impl=impl).sum().backward())
    unit = 2 * 2 * 4 * 16  # of one product, for one pair of positions
    whole, half = unit * 96 * 96, unit * pairs(FULL, 96, 96)
    if impl == "blocked":  # blocks on the diagonal are whole, and scores are recomputed
        assert 5 * half <= flop <= 7 * whole
    else:
        assert flop == {"tiled": 7 * half, "fused": 7 * whole, "reference": 6 * whole}[impl]


def test_what_the_counter_counts_of_grouped_products():
    x, w, ends = (
        torch.randn(10, 4),
        torch.randn(3, 4, 6, requires_grad=True),
        torch.tensor([2, 7, 10], dtype=torch.int32),
    )
    from fzero.kernels import grouped_mm

    flop = count_flop(lambda: grouped_mm(x.requires_grad_(), w, ends).sum().backward())
    assert flop == 3 * 2 * 10 * 4 * 6


def test_utilizations():
    """PaLM 540B: 46.2% MFU from 238.3K tokens/s on 6144 TPU v4 of 275 TFLOP/s (Chowdhery et al. 2022, table 3 and
    appendix B)."""
    per_token = 6 * 540.35e9 + 12 * 118 * 2048 * 48 * 256
    assert mfu(per_token, 238.3e3, 6144 * 275e12) == pytest.approx(0.462, abs=0.005)
    assert hfu(100e12, 0.5, 400e12) == 0.5


def test_flop_of_is_what_the_counter_says():
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    assert flop_of(torch.ops.aten.mm.default, (a, b), {}, a @ b) == count_flop(torch.mm, a, b) == 240
    assert flop_of(torch.ops.aten.add.Tensor, (a, a), {}, a + a) == 0


def described(op, *args):
    return describe_op(op, args, {}, op(*args), "forward", 0)


@pytest.mark.slow
@pytest.mark.parametrize("emulated", (False, True))
def test_a_float8_product_is_its_roundings_and_a_product_of_the_numbers(emulated):
    """Twice bfloat16's rate is for the product alone: its operands are read for their scales and rounded before."""
    h200, n, width = devices.device("h200"), 4096**2, 4 if emulated else 1
    ops, dtype = torch.ops.fzero, "float32" if emulated else "float8_e4m3fn"
    with torch.no_grad(), FakeDevice(h200.target) as mode:
        a, b = (torch.empty(4096, 4096, dtype=torch.bfloat16, device=mode.device) for _ in range(2))
        plain = described(torch.ops.aten.mm.default, a, b)
        if emulated:
            given = (a, b, "tensorwise", False, False)
            passes = describe_passes(described(ops.float8_emulated.default, *given), given)
        else:
            norm, largest = torch.ops.aten.linalg_vector_norm.default, torch.empty((), device=mode.device)
            passes = [described(norm, x, torch.inf) for x in (a, b)]
            passes += [described(ops.float8_numbers.default, a, largest, "tensorwise", False)]
            numbers = [ops.float8_numbers(x, largest, "tensorwise", False) for x in (a, b)]
            given = (*numbers[0], b, largest, "tensorwise", True)
            passes += describe_passes(described(ops.float8_product_of.default, *given), given)
            alone = described(ops.float8_product.default, *numbers[0], *numbers[1], True)
            assert passes[-1] == alone._replace(name="fzero.float8_product_of", bytes=passes[-1].bytes)
            assert passes[-1].bytes == alone.bytes
    assert [(each.dtype, each.flop, each.kind) for each in passes if each.flop] == [(dtype, 2 * 4096**3, "gemm")]
    assert passes[-1].shape == plain.shape == (1, 4096, 4096, 4096)
    assert passes[-1].bytes == pytest.approx(2 * n + 2 * n * width, abs=16)
    assert sum(each.bytes for each in passes[:-1]) == pytest.approx(2 * (2 * n + 2 * n + n * width), abs=32)
    assert describe_passes(plain, (a, b)) == (plain,)
    cost = rates.op_costs(h200)
    product_s, plain_s = (cost(each).device_s - h200.launch_s for each in (passes[-1], plain))
    rate = h200.flops["bfloat16"] / h200.flops[dtype]
    assert product_s == pytest.approx(plain_s * rate)
