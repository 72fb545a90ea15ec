"""The rank pool: results by rank, errors as they were, ranks that hang or end, and a pool that comes back."""

import os
import time

import pytest
import ranks


class Unpicklable(Exception):
    """Pickled by its message, and made by two arguments."""

    def __init__(self, a, b):
        super().__init__(a)


def act(mesh, what):
    if mesh.rank == 1:
        if what == "raise":
            raise KeyError("lost")
        if what == "odd":
            raise Unpicklable("told", 2)
        if what == "exit":
            os._exit(5)
        if what == "hang":
            time.sleep(60)
    return os.getpid(), mesh.rank


def test_the_pool_serves_again_and_after_each_failure():
    first = ranks.run(2, act, "")
    assert [rank for _, rank in first] == [0, 1] and ranks.run(2, act, "") == first
    with pytest.raises(KeyError, match="lost") as caught:
        ranks.run(2, act, "raise")
    assert "on rank 1 of 2:" in caught.value.__notes__[0] and "in act" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match=r"(?s)on rank 1 of 2:.*Unpicklable: told"):
        ranks.run(2, act, "odd")
    with pytest.raises(RuntimeError, match="rank 1 of 2 ended with exit code 5"):
        ranks.run(2, act, "exit")
    with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s from rank 1 of 2"):
        ranks.run(2, act, "hang", timeout_s=0.5)
    again = ranks.run(2, act, "")
    assert not {pid for pid, _ in first} & {pid for pid, _ in again}
    for pid, _ in first:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_fresh_pool_says_which_rank_ended():
    results = ranks.run(2, act, "exit", fresh=True)
    assert results[0][1] == 0 and results[1].code == 5
