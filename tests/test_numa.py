"""The threads of a GPU's process on the cores of its NUMA node, on made-up hosts."""

import os
import threading
import types

import pytest
import torch
from pretend_gpu import pretend

from fzero.core import gpu, host_memory
from fzero.run import coordinator, from_table, machine, pretrain
from fzero.run.measure import doctor

TWO = {0: "0-3,8-11", 1: "4-7,12-15"}
BUSES = (0x1B, 0x3B, 0x9A, 0xBA)  # of four GPUs, two a node


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A function that makes a host's /sys, where the process may use `allowed` cores (None: all of them)."""

    def make(nodes, gpus=(0, 0, 1, 1), allowed=None):
        for node, cores in nodes.items():
            (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
            (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(f"{cores}\n")
        for bus, node in zip(BUSES, gpus):
            (tmp_path / f"bus/pci/devices/0000:{bus:02x}:00.0").mkdir(parents=True)
            (tmp_path / f"bus/pci/devices/0000:{bus:02x}:00.0/numa_node").write_text(f"{node}\n")
        every = frozenset().union(*map(host_memory.parse_cores, nodes.values()))
        monkeypatch.setattr(os, "sched_getaffinity", lambda task: set(every if allowed is None else allowed))
        cards = [types.SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in BUSES]
        monkeypatch.setattr(gpu, "properties", lambda device: cards[device.index])
        for name in host_memory.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        return tmp_path

    return make


def test_the_cores_are_those_of_the_gpus_node_and_shared_by_the_processes_there(host):
    root = host({**TWO, 2: ""})  # a node of memory alone
    first, last = (host_memory.find_placement(torch.device("cuda", i), 4, root) for i in (0, 3))
    assert first.cores == {0, 1, 2, 3, 8, 9, 10, 11} and last.cores == {4, 5, 6, 7, 12, 13, 14, 15}
    assert first.processes == last.processes == 2
    assert last.line == "bound to the 8 cores of NUMA node 1 of 2, that of GPU 3 (OMP_PLACES says otherwise)"
    assert host_memory.find_placement(torch.device("cuda", 2), 3, root).processes == 1


@pytest.mark.parametrize(
    "nodes, options, environ, line",
    [
        ({0: "0-15"}, {}, {}, ""),
        ({}, {}, {}, ""),  # the system tells nothing
        (TWO, {}, {"OMP_PLACES": "cores"}, "not bound to a NUMA node of 2: OMP_PLACES says where threads run"),
        (TWO, {"allowed": range(4)}, {}, "not bound to a NUMA node of 2: what started this process has bound it to 4 "),
        (TWO, {"gpus": (-1,)}, {}, "not bound to a NUMA node of 2: the system does not tell which is the GPU's"),
        (TWO, {"gpus": ()}, {}, "not bound to a NUMA node of 2: the system does not tell which is the GPU's"),
        (TWO, {"gpus": (5,)}, {}, "not bound to a NUMA node of 2: the system does not tell which is the GPU's"),
    ],
)
def test_a_process_is_left_where_it_is(nodes, options, environ, line, host, monkeypatch):
    root = host(nodes, **options)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = host_memory.find_placement(torch.device("cuda", 0), 4, root)
    assert not found.cores and found.processes == 4
    assert found.line.startswith(line) and bool(found.line) == bool(line)


def test_a_process_of_the_cpu_is_not_bound(host):
    assert host_memory.find_placement(torch.device("cpu"), 4, host(TWO)) == (frozenset(), 4, "")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind threads")
def test_threads_that_run_and_those_that_follow_are_bound():
    before, seen, turn, end = os.sched_getaffinity(0), {}, threading.Event(), threading.Event()

    def look(name, wait):
        if wait:
            turn.set()
            end.wait()
        seen[name] = os.sched_getaffinity(0)

    old = threading.Thread(target=look, args=("old", True))
    old.start()
    turn.wait()
    try:
        host_memory.bind_threads(frozenset())
        assert os.sched_getaffinity(0) == before
        host_memory.bind_threads(frozenset({min(before)}))
        end.set()
        new = threading.Thread(target=look, args=("new", False))
        new.start()
        for thread in (old, new):
            thread.join()
        assert seen == {"old": {min(before)}, "new": {min(before)}}
    finally:
        end.set()
        host_memory.bind_threads(frozenset(before))


def test_a_run_and_doctor_say_where_threads_are_and_leave_two_cores(host, monkeypatch):
    properties = gpu.properties
    root, bound, threads = host(TWO), [], []
    monkeypatch.setattr(gpu, "properties", properties)
    monkeypatch.setattr(host_memory, "bind_threads", bound.append)
    monkeypatch.setattr(machine, "cores", lambda: len(bound[-1]))
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for name in ("OMP_NUM_THREADS", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    find = host_memory.find_placement
    monkeypatch.setattr(host_memory, "find_placement", lambda device, processes=1: find(device, processes, root))
    with pretend(), monkeypatch.context() as patch:
        place_of_card = {"pci_domain_id": 0, "pci_bus_id": BUSES[2], "pci_device_id": 0}
        card = types.SimpleNamespace(**vars(gpu.properties(torch.device("cuda", 0))), **place_of_card)
        patch.setattr(gpu, "properties", lambda device: card)
        *_, lines = pretrain.resolve_placement(
            from_table({"preset": "mlp-tiny", "device": "cuda"}), coordinator.Coordinator()
        )
        assert lines[1] == "cores: bound to the 8 cores of NUMA node 1 of 2, that of GPU 0 (OMP_PLACES says otherwise)"
        assert bound == [host_memory.parse_cores(TWO[1])] and threads == [6]
        patch.setattr(doctor, "peak_rate", lambda *args: 1e12)
        assert "NUMA" in doctor.diagnose() and len(bound) == 1
