"""Tables of all ranks (fzero/comm/rank_tables.py): rows in the order of ranks, sums, flags, a barrier, and what they
send."""

import time

import pytest
import ranks
import torch

from fzero.checkpoint import Damaged
from fzero.comm import AXES, any_rank, barrier, failing_together, gather_rows, raise_together, sum_rows
from fzero.sharding import one_process


def tables(mesh):
    row = torch.tensor([mesh.rank, 10 * mesh.data_rank])
    found = {
        "all": gather_rows(row, mesh, leaf="rows").tolist(),
        "data": gather_rows(row, mesh, leaf="rows", axes=AXES.by_data_rank)[:, 1].tolist(),
        "sum": sum_rows(row, mesh, leaf="sum").tolist(),
        "last": any_rank(15 * (mesh.rank == mesh.size - 1), mesh),
        "none": any_rank(0, mesh),
    }
    return found, {axis.name: mesh.ledger.total("stop", axis=axis.name).calls for axis in mesh.axes if axis.size > 1}


@pytest.mark.parametrize("sizes", ({"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "rp": 2}, {"rp": 2, "tp": 2}), ids=str)
def test_every_rank_has_the_rows_of_all_in_their_order(sizes):
    data = sizes.get("dp", 1) * sizes.get("rp", 1)
    for found, calls in ranks.run(4, tables, mesh=sizes):
        assert [row[0] for row in found["all"]] == [0, 1, 2, 3]
        assert found["data"] == [10 * i for i in range(data)]
        assert found["sum"] == [6, sum(row[1] for row in found["all"])]
        assert (found["last"], found["none"]) == (15, 0)
        assert calls == dict.fromkeys(sizes, 2)


def failing(mesh, failures):
    def agree(failure):
        raise_together(failure, mesh)

    try:
        with failing_together(agree):
            if mesh.rank in failures:
                raise failures[mesh.rank]
    except ValueError as error:
        return type(error), str(error)
    return None


def test_what_fails_on_one_rank_fails_on_all():
    sizes = {"dp": 2, "tp": 2}
    assert ranks.run(4, failing, {}, mesh=sizes) == [None] * 4
    found = ranks.run(4, failing, {1: ValueError("the disk is füll"), 3: Damaged("of 3")}, mesh=sizes)
    told = (ValueError, "rank 1: the disk is füll")
    assert found == [told, (ValueError, "the disk is füll"), told, (Damaged, "of 3")]
    assert ranks.run(2, failing, {0: Damaged("here")}, mesh={"dp": 2}) == [(Damaged, "here"), (Damaged, "rank 0: here")]


def test_one_process_is_its_own_table():
    mesh, row = one_process(), torch.tensor([1.5, 2.0])
    assert gather_rows(row, mesh, leaf="rows").tolist() == [[1.5, 2.0]] and sum_rows(
        row, mesh, leaf="sum"
    ).tolist() == [1.5, 2.0]
    assert any_rank(2, mesh) == 2 and barrier(mesh) is None


def late(mesh):
    if mesh.rank == 1:
        time.sleep(0.3)
    arrived = time.monotonic()
    barrier(mesh)
    return arrived, time.monotonic()


def test_nobody_leaves_a_barrier_before_the_last_has_come():
    times = ranks.run(4, late, mesh={"dp": 2, "tp": 2})
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)
