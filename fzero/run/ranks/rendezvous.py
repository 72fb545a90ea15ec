"""Rendezvous of the processes that torchrun started, in a store that holds keys of earlier attempts.

torchrun restarts its workers when one fails, and when a node comes or goes. It does not say which restart this is: each
agent counts its own failures (TORCHELASTIC_RESTART_COUNT), a node that comes is not counted, and the store is the same
one. So each process says hello with a name that nobody had before; rank 0 publishes the list of names it finds, under a
number that counts up; a process accepts a list that has its own name at its own rank, and says so; and rank 0 publishes
another one when a name changes, until all have accepted."""

from __future__ import annotations

import json
import sys
import time
import uuid

import torch.distributed as dist

SAY_S = 10.0  # a wait of so long is told
BEAT_S = 1.0  # between two signs of life
SILENT_S = 8.0  # without a sign of life, a process that has given some is gone


def await_ranks(store: dist.Store, rank: int, size: int, timeout_s: float) -> tuple[int, list[str]]:
    """(the number of this coordinator in `store`, from 1; the names of its processes by rank), the same on all of its
    processes.

    timeout_s: how long to wait for the others; 0: without end. The first rank that is there says after SAY_S whom it
    waits for. Raises TimeoutError naming the ranks that do not come, or have come and are gone, ValueError if another
    process has taken this one's rank meanwhile."""
    nonce = uuid.uuid4().hex
    store.set(f"hello/{rank}", nonce)
    number, names, begin, pause = 0, [""] * size, time.monotonic(), 0.002
    signs = Signs(store, rank, size)
    while True:
        hellos = read_hellos(store, size)
        if hellos[rank] != nonce:
            raise ValueError(
                f"rank {rank} was started again while this process ({nonce[:8]}) still waits for the others; "
                "nothing to do"
            )
        if rank == 0 and "" not in hellos and hellos != names:
            number, names = store.add("teams", 1), hellos
            store.set("list", json.dumps([number, names]))
        elif rank > 0 and store.check(["list"]):
            latest, listed = json.loads(store.get("list"))
            if latest != number and len(listed) == size and listed[rank] == nonce:
                number, names = latest, listed
                store.set(f"{number}/here/{rank}", nonce)
        if rank > 0 and number and store.check([f"{number}/complete"]):
            return number, names
        missing = (
            [r for r in range(1, size) if not number or not store.check([f"{number}/here/{r}"])] if rank == 0 else []
        )
        if rank == 0 and number and not missing:
            store.set(f"{number}/complete", "")
            return number, names
        missing_ranks = [r for r in range(size) if not hellos[r]] or missing or [0]
        lost_ranks, waited = signs.silent(), time.monotonic() - begin
        lost_text, missing_text = (", ".join(map(str, ranks)) for ranks in (lost_ranks, missing_ranks))
        if lost_ranks:
            raise TimeoutError(f"rank {lost_text} is gone: no sign of life for {SILENT_S:g} s while the ranks start")
        if 0 < timeout_s < waited:
            raise TimeoutError(
                f"rank {missing_text} did not come within {timeout_s:g} s (train.hang_s); look what it is doing, and "
                "start all ranks again"
            )
        heard = missing_ranks == [0] and signs.quiet.get(0) == 0  # it waits too, and says for whom
        if (
            waited > SAY_S
            and not (signs.reported or heard)
            and rank == min({*range(size)} - {*missing_ranks}, default=rank)
        ):
            signs.reported = True
            limit_text = f", at most {timeout_s:g} s (train.hang_s)" if timeout_s else ""
            print(f"rank {rank} waits for rank {missing_text} to start{limit_text}", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


class Signs:
    """The signs of life of the processes that meet: each gives one every BEAT_S, and looks at the others'."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.next, self.reported = 0.0, False
        self.last: dict[int, bytes] = {}
        self.quiet: dict[int, int] = {}  # looks since the last sign of those that have given one meanwhile

    def silent(self) -> list[int]:
        """The ranks that have given a sign while this one waits, and none for SILENT_S."""
        timestamp = time.monotonic()
        if timestamp < self.next:
            return []
        self.next = timestamp + BEAT_S
        self.store.set(f"meets/{self.rank}", uuid.uuid4().hex)
        for rank in {*range(self.size)} - {self.rank}:
            key = f"meets/{rank}"
            sign = self.store.get(key) if self.store.check([key]) else b""
            if rank in self.last and sign != self.last[rank]:
                self.quiet[rank] = 0
            elif rank in self.quiet:
                self.quiet[rank] += 1
            self.last[rank] = sign
        return [rank for rank, looks in self.quiet.items() if looks * BEAT_S > SILENT_S]


def read_hellos(store: dist.Store, size: int) -> list[str]:
    """The names in the latest hellos, by rank; "" for none."""
    keys = [f"hello/{rank}" for rank in range(size)]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]
