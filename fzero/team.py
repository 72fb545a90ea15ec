"""The processes of one command: what they tell each other besides tensors, and how all of them end when one does.

torchrun starts every process with the same command. They agree through its store: the first (rank 0) decides what must be the same and
speaks for all. A rank that fails leaves its reason there before it ends; the others, whose collectives then fail, find it and end in
silence, so that there is one line. Where a rank could leave nothing (a kill), the first to notice says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fzero.sharding import Mesh, make_mesh

TIMEOUT_S = 600.0  # for another rank, in a collective and at a comparison
LOST_S = 2.0  # for the reason of a rank that is gone, until what was noticed of it is said
BEAT_S = 1.0  # between two signs of life
SILENT_S = 8.0  # without one, after a SIGTERM, until a rank counts as gone
REASON = "reason"  # the key of why all end
AGAIN = "torchrun's report says how it ended; go on from the last checkpoint with --resume"


class Ended(Exception):
    """Another rank has said why all of them end."""


class Team:
    """The processes of a command as this one sees them; one alone agrees with itself at once. See `join`."""

    def __init__(self, rank: int = 0, size: int = 1, local_size: int = 1, store: dist.Store | None = None) -> None:
        self.rank, self.size, self.local_size, self.store = rank, size, local_size, store
        self.asked = 0  # of what is agreed on: the same on all ranks at the same point of the program

    @property
    def first(self) -> bool:
        """Whether this process decides, writes and speaks."""
        return self.rank == 0

    def share(self, make: Callable[[], Any]) -> Any:
        """What `make()` returns on rank 0 (anything JSON can hold), on all ranks; they wait for it however long it takes.

        Raises Ended where a rank has failed meanwhile.
        """
        self.asked += 1
        if self.store is None:
            return make()
        if self.first:
            self.store.set(str(self.asked), json.dumps(make()))
        return json.loads(self._hear(str(self.asked), "rank 0", None))

    def gather(self, value: Any) -> list[Any]:
        """The values (anything JSON can hold) of all ranks, in their order, on all ranks.

        Raises Ended where a rank has failed, TimeoutError naming one that does not come.
        """
        if self.store is None:
            return [value]
        self.asked += 1
        key = str(self.asked)
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        return self.share(lambda: [json.loads(self._hear(f"{key}/{rank}", f"rank {rank}", TIMEOUT_S)) for rank in range(self.size)])

    def compare(self, values: dict[str, Any], fix: str) -> None:
        """Raise ValueError, on all ranks, naming the first rank and value that differ from rank 0's, and the `fix`."""
        mine, *others = self.gather(values)
        for rank, theirs in enumerate(others, 1):
            for name in [*mine, *theirs]:
                if mine.get(name) != theirs.get(name):
                    raise ValueError(f"{name} is {theirs.get(name)!r} on rank {rank} and {mine.get(name)!r} on rank 0; {fix}")

    def mesh(self, sizes: dict[str, int]) -> Mesh:
        """The mesh of these processes over the CPU; raises ValueError where its sizes do not multiply to their number."""
        if self.store is not None:
            if sys.platform == "linux" and self.local_size == self.size:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host needs no network, whatever its name resolves to
            timeout, store = timedelta(seconds=TIMEOUT_S), dist.PrefixStore("group", self.store)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        return make_mesh(sizes, timeout_s=TIMEOUT_S, device="cpu")

    def close(self) -> None:
        """Wait until rank 0 is here too, and end torch.distributed."""
        self.share(lambda: "end")
        if self.store is not None and dist.is_initialized():
            dist.destroy_process_group()

    def claim(self, text: str) -> str:
        """Leave the reason why all ranks end; returns the one that was left first, by whichever rank."""
        if self.store is None:
            return text
        return self.store.compare_set(REASON, "", text).decode()

    def reason(self) -> bool:
        """Whether a rank has left the reason why all end."""
        return self.store is not None and self.store.check([REASON])

    def _hear(self, key: str, whose: str, timeout_s: float | None) -> bytes:
        # By looking again and again: a wait inside the store is deaf to signals and to a rank that has failed.
        begin, pause = time.monotonic(), 0.002
        while not self.store.check([key]):
            if self.reason():
                raise Ended
            if timeout_s is not None and time.monotonic() - begin > timeout_s:
                raise TimeoutError(f"{whose} did not come within {timeout_s:g} s; look what it is doing, and start all ranks again")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return self.store.get(key)


def launched() -> bool:
    """Whether this process is one of several that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(timeout_s: float = 60.0) -> Team:
    """The team of this process: of one, or of those that torchrun started.

    Raises ValueError where the environment is not torchrun's, or its store does not answer.
    """
    if not launched():
        return Team()
    env = os.environ
    try:
        rank, size, local = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        # The store is torchrun's own process, and outlives every rank; with it, an attempt before this one may have left something.
        where = f"fzero/{env['TORCHELASTIC_RUN_ID']}/{env['TORCHELASTIC_RESTART_COUNT']}"
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"WORLD_SIZE is {env['WORLD_SIZE']} and the rest of torchrun's environment is not there ({error}); use torchrun"
        ) from None
    try:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ValueError(f"torchrun's store at {host}:{port} does not answer ({str(error).splitlines()[0]})") from None
    return Team(rank, size, local, dist.PrefixStore(where, store))


# -- the end


def last_words(text: str, *, lost: bool = False) -> str:
    """What this process is to print of its reason to end: the text with its rank, or "" where another rank has said why all end.

    lost: the reason is that another rank is gone, which may be about to say more of it.
    """
    if not launched():
        return text
    # torchrun ends what is left as soon as one process has ended; what is left may be about to say why.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    text += f"; {AGAIN}" if lost and "is gone" in text else ""
    try:
        team = join(timeout_s=5.0)
        # The same mistake on all ranks is for rank 0 to say.
        end = time.monotonic() + (LOST_S if lost else 0.0 if team.first else 0.5)
        while time.monotonic() < end and not team.reason():
            time.sleep(0.02)
        text = text if text.startswith("rank ") else f"rank {team.rank}: {text}"
        return text if not team.reason() and team.claim(text) == text else ""
    except (ValueError, RuntimeError):
        return text  # nobody can be asked


@contextlib.contextmanager
def watched(team: Team) -> Iterator[None]:
    """A context in which a thread ends this process where the main thread cannot, because it waits for a rank that is gone.

    It gives signs of life and looks for a reason to end. After a SIGTERM, which torchrun sends when a process has ended, it looks for
    those of the other ranks.
    """
    if team.store is None:
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(team, ours, over), name="fzero-watch")
    thread.start()
    try:
        yield
        team.store.set(f"beat/{team.rank}", "done")
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        with contextlib.suppress(OSError):
            theirs.send(b"\0")
        thread.join()
        ours.close()
        theirs.close()


def _watch(team: Team, wakeup: socket.socket, over: threading.Event) -> None:
    # A connection of its own: the other one is taken while the main thread waits in it.
    mine = Team(team.rank, team.size, team.local_size, team.store.clone())
    beat, term, reason, seen = 0, 0.0, 0.0, {}

    def beats() -> dict[int, bytes]:
        keys = {rank: f"beat/{rank}" for rank in range(team.size)}
        return {rank: mine.store.get(key) for rank, key in keys.items() if mine.store.check([key])}

    # Where the store is gone there is nothing to look at.
    with contextlib.suppress(RuntimeError):
        while not over.is_set() and threading.main_thread().is_alive():
            beat += 1
            mine.store.set(f"beat/{team.rank}", str(beat))
            now = time.monotonic()
            if select.select([wakeup], [], [], BEAT_S)[0] and signal.SIGTERM in wakeup.recv(64) and not term:
                term, seen = now, beats()
            if mine.reason() and not reason:
                reason = now
            if over.is_set():
                return
            if reason and now - reason > LOST_S + 2 * BEAT_S:
                os._exit(2)
            if term and now - term > SILENT_S:
                found = beats()
                gone = [str(rank) for rank in range(team.size) if found.get(rank) != b"done" and found.get(rank) == seen.get(rank)]
                term, seen = now, found
                text = f"rank {team.rank}: rank {', '.join(gone)} is gone: no sign of life for {SILENT_S:g} s; {AGAIN}"
                if gone and mine.claim(text) == text:
                    print(f"fzero: error: {text}", file=sys.stderr, flush=True)
                if gone:
                    os._exit(2)
