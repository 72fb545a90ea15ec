"""The mesh over several processes: how ranks are numbered, what a wrong size says, and a real torchrun."""

import os
import socket
import subprocess
import sys
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from close import assert_close
from zero_cases import model_of, train

import fzero
from fzero.cli.process import print_error
from fzero.comm.axes import ParallelAxis
from fzero.sharding import AXES, Spec, fake_mesh, make_mesh, one_process, start_processes, to_dtensor


def described(mesh):
    return {
        "rank": mesh.rank,
        "size": mesh.size,
        "text": str(mesh),
        "at": {a.name: (a.size, a.rank) for a in mesh.axes},
        "ranks": {a.name: a.communicator.ranks for a in mesh.axes if a.communicator},
        "data": (mesh.data_size, mesh.data_rank),
        "dims": mesh.device_mesh and mesh.device_mesh.mesh_dim_names,
        "where": torch.distributed.get_rank(),
        "same": mesh == mesh and hash(mesh) == hash(mesh) and mesh != one_process(),
    }


def test_groups_of_axes_follow_from_what_each_splits():
    """Their orders are those of data ranks, of links and of the sums of gradients: another one changes the bits."""
    assert (AXES.by_data_rank, AXES.by_tokens) == (("rp", "dp", "ep"), ("rp", "dp", "ep", "cp"))
    assert (AXES.shards, AXES.varying) == (("dp", "ep", "cp"), ("dp", "rp", "ep", "cp", "pp"))
    assert sorted(AXES.by_rank) == sorted(AXES)


@pytest.mark.parametrize(
    "sizes", ({"dp": 4}, {"tp": 2, "dp": 2}, {"dp": 2, "rp": 2}, {"pp": 2, "cp": 2}, {"ep": 4}), ids=str
)
def test_ranks_are_numbered_from_the_outermost_axis_in(sizes):
    by_rank = ranks.run(4, described, mesh=sizes)
    used = [name for name in AXES.by_rank if name in sizes]
    for rank, got in enumerate(by_rank):
        assert got["rank"] == got["where"] == rank and got["size"] == 4 and got["same"]
        assert got["dims"] == tuple(used) and list(got["at"]) == list(AXES)
        rest = rank
        for name in reversed(used):
            rest, place = divmod(rest, sizes[name])
            assert got["at"][name] == (sizes[name], place)
            assert got["ranks"][name][place] == rank and len(got["ranks"][name]) == sizes[name]
        assert all(got["at"][name] == (1, 0) for name in AXES if name not in sizes)
        planned = fake_mesh(sizes, rank=rank)
        assert {a.name: (a.size, a.rank) for a in planned.axes} == got["at"] and planned.rank == rank
        assert {a.name: a.communicator.ranks for a in planned.axes if a.communicator} == got["ranks"] and str(
            planned
        ) == got["text"]
    # Replicas of the dp group are outside of it, ranks of ep inside: each has data of its own, numbered through.
    count = sizes.get("dp", 1) * sizes.get("rp", 1) * sizes.get("ep", 1)
    assert [got["data"] for got in by_rank] == [
        (count, r if count == 4 else r // 2 if count == 2 else 0) for r in range(4)
    ]


TOY = ParallelAxis("rows, as replicas do", depth=1, rows=True, tokens=True, summed=1)


def trained_over_a_toy_axis(_):
    with mock.patch.dict(AXES, toy=TOY):
        mesh = make_mesh({"toy": 2}, device="cpu")
        state, _, log = train(mesh, "gpt2", "adam", 2, 2, steps=1)
        text = str(fzero.zero_plan(2, model_of("gpt2"), mesh))
        return (mesh.rank, mesh.data_rank, mesh.data_size, str(mesh)), state.params, log, text


def test_an_axis_more_is_an_entry_more():
    """With it alone there are meshes, plans and steps, which split rows over it and sum gradients."""
    expected, _, log = train(fzero.one_process(), "gpt2", "adam", 2, 2, steps=1)
    for rank, (numbers, params, found, text) in enumerate(ranks.run(2, trained_over_a_toy_axis)):
        assert numbers == (rank, rank, 2, "Mesh(toy=2)") and "psum toy" in text
        assert text.startswith("ZeRO stage 2 on toy=2:")
        assert_close((params, found), (expected.params, log), rtol=1e-11, atol=1e-11)
    assert "toy" not in AXES.by_rank
    with pytest.raises(ValueError, match="unknown axis 'toy'; the axes are dp, rp, tp, pp, cp, ep"):
        make_mesh({"toy": 2})


def wrong_sizes(mesh):
    said = []
    for sizes in ({"dp": 8}, {"dp": 3}, {}, {"dp": 2, "tp": 4}):
        with pytest.raises(ValueError) as caught:
            make_mesh(sizes, device="cpu")
        said.append(str(caught.value))
    with pytest.raises(ValueError, match=r"device is 'gpu'; it must be cpu or cuda"):
        make_mesh({"dp": 2}, device="gpu")
    return said


def test_sizes_that_do_not_multiply_to_the_number_of_processes():
    for said in ranks.run(2, wrong_sizes):
        assert said == [
            "mesh dp=8 asks for 8 processes and this run has 2; start it with `torchrun --nproc-per-node 8 ...`, "
            "or choose sizes whose product is 2",
            "mesh dp=3 asks for 3 processes and this run has 2; start it with `torchrun --nproc-per-node 3 ...`, "
            "or choose sizes whose product is 2",
            "mesh of one process asks for 1 process and this run has 2; start it with `torchrun --nproc-per-node 1 "
            "...`, "
            "or choose sizes whose product is 2",
            "mesh dp=2, tp=4 asks for 8 processes and this run has 2; start it with `torchrun --nproc-per-node 8 ...`, "
            "or choose sizes whose product is 2",
        ]


def test_a_mesh_for_planning():
    mesh = fake_mesh({"dp": 4, "tp": 2}, rank=5)
    assert mesh.size == 8 and (mesh["dp"].rank, mesh["tp"].rank) == (2, 1) and mesh.data_rank == 2
    assert mesh.device_mesh is None and mesh.store is None
    with mesh.checked():
        mesh.fail("nobody hears it")
    mesh.close()
    with pytest.raises(ValueError, match=r"fake_mesh: rank is 8 and mesh dp=4, tp=2 has ranks 0 to 7"):
        fake_mesh({"dp": 4, "tp": 2}, rank=8)
    with pytest.raises(ValueError, match="unknown axis 'data'"):
        fake_mesh({"data": 4})


def test_a_mesh_of_one_process_needs_nothing_of_the_others():
    mesh = one_process()
    with mesh.checked():
        mesh.fail("nobody hears it")
    mesh.close()
    assert mesh.rank == mesh.data_rank == 0 and mesh.data_size == 1
    with pytest.raises(ValueError, match=r"spec \[·\]: a mesh of one process has no DeviceMesh"):
        to_dtensor(torch.zeros(2), Spec(((),)), mesh)


PROGRAM = """
import sys, time
import torch, fzero
from fzero.comm.collectives import psum
mesh = fzero.make_mesh({"dp": 2}, device="cpu")
total = psum(torch.tensor([1.0, mesh.rank]), mesh["dp"], leaf="w")
sys.stdout.write(f"rank {mesh.rank} of {mesh.size}: {total.tolist()}\\n")  # in one piece
assert torch.distributed.is_initialized()
mesh.close()
assert not torch.distributed.is_initialized()
"""


def torchrun(n, code):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), "--no-python"]
    return subprocess.run(
        [*command, sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_under_torchrun():
    done = torchrun(2, PROGRAM)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: [2.0, 1.0]", "rank 1 of 2: [2.0, 1.0]"]


# ---- a transport that cannot start ----------------------------------------------------------------------------------

# As PyTorch words them.
WRONG_INTERFACE = """[rank1]: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with \
NCCL_DEBUG=WARN for details), NCCL version 2.27.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Bootstrap : no socket interface found"""
OLD_DRIVER = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version'"""


def refusal(device, **where):
    with pytest.raises(ValueError) as refused:
        start_processes(torch.device(device), 5.0, store=dist.HashStore(), world_size=1, **where)
    assert "\n" not in str(refused.value) and print_error(str(refused.value), refused.value) == 2
    return str(refused.value)


def test_gloo_that_cannot_start_is_one_line(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    said = refusal("cpu", rank=0)
    assert said.startswith(f"rank 0 on host {socket.gethostname()}: gloo does not start: ") and "nope0" in said
    assert "GLOO_SOCKET_IFNAME names the network interface" in said and not dist.is_initialized()


@pytest.mark.parametrize(
    "error, what",
    [
        (WRONG_INTERFACE, "library. Bootstrap : no socket interface found;"),
        (OLD_DRIVER, "failed. Cuda failure 35 'CUDA driver version is insufficient for CUDA runtime version';"),
        ("[rank1]: something else\nand more", "does not start: something else;"),
    ],
    ids=["interface", "driver", "other"],
)
def test_nccl_that_cannot_start_is_one_line(monkeypatch, error, what):
    def refuse(*_, **__):
        raise dist.DistBackendError(error)

    monkeypatch.setattr(dist, "init_process_group", refuse)
    said = refusal("cuda:0", rank=1)
    assert said.startswith(f"rank 1 on host {socket.gethostname()}: NCCL does not start: ") and what in said
    assert all(name in said for name in ("NCCL_DEBUG=INFO", "NCCL_SOCKET_IFNAME", "--device cpu"))


@pytest.mark.skipif(dist.is_nccl_available(), reason="this PyTorch has NCCL")
def test_a_pytorch_without_nccl_is_one_line():
    assert "NCCL does not start: " in refusal("cuda:0", rank=0) and not dist.is_initialized()


@pytest.mark.parametrize("value", ["two", "0", "-1", "9" * 30])
def test_a_number_of_processes_that_is_none_is_named(value, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ValueError, match=r"environment variable WORLD_SIZE is .*; it must be a whole number from 1"):
        make_mesh({"dp": 1})
