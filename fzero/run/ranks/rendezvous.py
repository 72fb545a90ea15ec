"""Rendezvous of the processes that torchrun started, in a store that holds keys of earlier attempts.

torchrun restarts its workers when one fails, and when a node comes or goes. It does not say which restart this is: each
agent counts its own failures (TORCHELASTIC_RESTART_COUNT), a node that comes is not counted, and the store is the same
one. So each process says hello with a name that nobody had before; rank 0 publishes the list of names it finds, under a
number that counts up; a process accepts a list that has its own name at its own rank, and says so; and rank 0 publishes
another one when a name changes, until all have accepted."""

from __future__ import annotations

import json
import time
import uuid

import torch.distributed as dist


def meet(store: dist.Store, rank: int, size: int, timeout_s: float) -> tuple[int, list[str]]:
    """(the number of this coordinator in `store`, from 1; the names of its processes by rank), the same on all of its
    processes.

    Raises TimeoutError naming the ranks that do not come, ValueError if another process has taken this one's rank
    meanwhile."""
    mine = uuid.uuid4().hex
    store.set(f"hello/{rank}", mine)
    number, names, end, pause = 0, [""] * size, time.monotonic() + timeout_s, 0.002
    while True:
        found = read_hellos(store, size)
        if found[rank] != mine:
            raise ValueError(
                f"rank {rank} was started again while this process ({mine[:8]}) still waits for the others; "
                "nothing to do"
            )
        if rank == 0 and "" not in found and found != names:
            number, names = store.add("teams", 1), found
            store.set("list", json.dumps([number, names]))
        elif rank > 0 and store.check(["list"]):
            latest, listed = json.loads(store.get("list"))
            if latest != number and len(listed) == size and listed[rank] == mine:
                number, names = latest, listed
                store.set(f"{number}/here/{rank}", mine)
        if rank > 0 and number and store.check([f"{number}/complete"]):
            return number, names
        missing = (
            [r for r in range(1, size) if not number or not store.check([f"{number}/here/{r}"])] if rank == 0 else []
        )
        if rank == 0 and number and not missing:
            store.set(f"{number}/complete", "")
            return number, names
        if time.monotonic() > end:
            late = [str(r) for r in range(size) if not found[r]] or [str(r) for r in missing] or ["0"]
            raise TimeoutError(
                f"rank {', '.join(late)} did not come within {timeout_s:g} s; look what it is doing, and "
                "start all ranks again"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def read_hellos(store: dist.Store, size: int) -> list[str]:
    """The names in the latest hellos, by rank; "" for none."""
    keys = [f"hello/{rank}" for rank in range(size)]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]
