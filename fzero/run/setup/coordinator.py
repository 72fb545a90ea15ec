"""Coordinate the processes of one command: exchange values besides tensors, and end all processes when one ends.

torchrun starts every process with the same command. The first (rank 0) decides what must be the same. A rank that fails
leaves its reason in the store; the others, whose collectives then fail, find it and end in silence, so that one line is
printed.

torchrun restarts its workers into the same store and does not say which restart this is. So each process says hello
with a new name; rank 0 publishes the list of names under a number that counts up; a process accepts a list that has its
name at its rank, and says so; rank 0 publishes another one when a name changes, until all have accepted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fzero.comm.messages import RankError
from fzero.core import gpu
from fzero.run.setup.signals import Stopped, exit_code, expect_environment, under_torchrun
from fzero.sharding import Mesh, make_mesh, one_process
from fzero.sharding.mesh import start_processes

Say = Callable[[str], None]  # with a line for people, on the first rank

SAY_S = 10.0  # a wait of so long is told
BEAT_S = 1.0  # between two signs of life
SILENT_S = 8.0  # without a sign of life, a process that has given some is gone


def await_ranks(store: dist.Store, rank: int, size: int, timeout_s: float) -> tuple[int, list[str]]:
    """(the number of this coordinator in `store`, the names of its processes by rank), the same on all of them."""
    # A name that no process had before: the store keeps the keys of earlier attempts, and torchrun does not say which
    # attempt this is.
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
        # A new list whenever a name changes, as a rank that is restarted says hello again. The number keeps the lists
        # apart.
        if rank == 0 and "" not in hellos and hellos != names:
            number, names = store.add("teams", 1), hellos
            store.set("list", json.dumps([number, names]))
        elif rank > 0 and store.check(["list"]):
            latest, listed = json.loads(store.get("list"))
            # A list of an earlier attempt has another name at this rank.
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
        # Short at first, as ranks start together; longer then, to spare the store.
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


class Signs:
    """The signs of life of the processes that meet, one every BEAT_S."""

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
        # A new value each time: the others see that it changes, and compare no clocks.
        self.store.set(f"meets/{self.rank}", uuid.uuid4().hex)
        for rank in {*range(self.size)} - {self.rank}:
            key = f"meets/{rank}"
            sign = self.store.get(key) if self.store.check([key]) else b""
            if rank in self.last and sign != self.last[rank]:
                self.quiet[rank] = 0
            # Counted only for ranks that have given a sign meanwhile: an old key of a process that is gone is none.
            elif rank in self.quiet:
                self.quiet[rank] += 1
            self.last[rank] = sign
        return [rank for rank, looks in self.quiet.items() if looks * BEAT_S > SILENT_S]


def read_hellos(store: dist.Store, size: int) -> list[str]:
    """The names in the latest hellos, by rank; "" for none."""
    keys = [f"hello/{rank}" for rank in range(size)]
    return [store.get(key).decode() if store.check([key]) else "" for key in keys]


TIMEOUT_S = 600.0  # for another rank, in a collective and at a comparison
LOST_S = 2.0  # to wait for the reason of a rank that is gone, before reporting that it is gone
NODE_S = 5.0  # to wait for a signal to this node, if one to another node has stopped the run
# Keys: the reason to end, the end, processes that are done, a spare's signal, the run.
REASON, OVER, BYE, STOP, FOLDER = "reason", "over", "bye", "stop", "folder"
SIGNAL = "signal "  # prefix of a reason that is no failure
RESUME_HINT = "torchrun's report says how it ended; resume from the last checkpoint with --resume"


class Ended(Exception):
    """Another rank has left the reason why all ranks end."""


class Coordinator:
    """The processes of a command as this one sees them; `join` makes it."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_size: int = 1,
        store: dist.Store | None = None,
        lasting: dist.Store | None = None,
        names: list[str] | None = None,
        hang_s: float = TIMEOUT_S,
    ) -> None:
        self.rank, self.size, self.local_size = rank, size, local_size
        self.store, self.lasting, self.names = store, lasting, names or []
        self.agreements = 0  # number of agreements so far: the same on all ranks at the same point of the program
        self.spares = 0  # processes, after the others, that wait for the run to end
        self.signalled = False  # whether this process itself received a signal while training
        # Read by the watchdog from another thread.
        self.step, self.waiting = 0, ""
        self.watched = False  # whether there is a watchdog, which ends what waits too long
        self.trains = False  # whether it makes the steps of a run
        self.has_stepped = False  # whether it has made one
        self.hang_s = hang_s  # seconds without progress of a rank after which all ranks end; 0: never
        self.stops: list[int] = []  # where it puts the number of a signal to a spare
        self.current_mesh: Mesh | None = None
        self.notices = True  # whether a wait for a rank that is gone fails: gloo's does, NCCL's does not

    @property
    def first(self) -> bool:
        """Whether this process decides, writes and speaks."""
        return self.rank == 0

    @property
    def spare(self) -> bool:
        """Whether this process is a spare: it waits for the run to end (see fzero.run.setup.elastic.stand_by)."""
        return self.rank >= self.size

    def set_size(self, size: int) -> None:
        """Make the first `size` processes compute; the others are spares from here on."""
        self.size, self.spares = size, self.size - size

    def share(self, make: Callable[[], Any]) -> Any:
        """Rank 0's `make()` (any JSON value) on all ranks, however long it takes; raises Ended if a rank has failed."""
        self.agreements += 1
        if self.store is None:
            return make()
        if self.first:
            self.store.set(str(self.agreements), json.dumps(make()))
        return json.loads(self._hear(str(self.agreements), "rank 0", None))

    def gather(self, value: Any) -> list[Any]:
        """The values (any JSON) of all ranks, in rank order, on all ranks; raises Ended or TimeoutError."""
        if self.store is None:
            return [value]
        self.agreements += 1
        key = str(self.agreements)
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        # The watchdog ends a wait that is too long, and says which rank hangs.
        limit = None if self.watched else self.hang_s or None
        return self.share(
            lambda: [json.loads(self._hear(f"{key}/{rank}", f"rank {rank}", limit)) for rank in range(self.size)]
        )

    def compare(self, values: dict[str, Any], fix: str) -> None:
        """Raise ValueError, on all ranks, naming the first rank and value that differ."""
        local_values, *peers = self.gather(values)
        for rank, theirs in enumerate(peers, 1):
            for name in [*local_values, *theirs]:
                if local_values.get(name) != theirs.get(name):
                    raise ValueError(
                        f"{name} is {theirs.get(name)!r} on rank {rank} and {local_values.get(name)!r} on rank 0; {fix}"
                    )

    def mesh(self, sizes: Mapping[str, int], timeout_s: float = TIMEOUT_S, device: torch.device = gpu.HOST) -> Mesh:
        """The mesh of these processes; raises ValueError if its sizes do not multiply to their number."""
        if self.size > 1 and self.store is not None:
            if sys.platform == "linux" and self.local_size >= self.size:
                os.environ.setdefault(
                    "GLOO_SOCKET_IFNAME", "lo"
                )  # one host needs no network, whatever its name resolves to
            self.notices = device.type == "cpu"
            if not self.notices:
                # PyTorch would end this process by SIGABRT and many lines; the watchdog says one, and names the rank.
                os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            # Keys of its own: the store is shared with everything else of this run.
            store = dist.PrefixStore("group", self.store)
            self.waiting = "all ranks, to connect"
            start_processes(device, timeout_s, store=store, rank=self.rank, world_size=self.size)
            self.waiting = ""
        if self.size == 1 and self.spares and math.prod(sizes.values()) == 1:
            self.current_mesh = one_process()
        else:
            self.current_mesh = make_mesh(sizes, timeout_s=timeout_s, device=device.type)
        return self.current_mesh

    def close(self, stopped: int = 0) -> None:
        """Wait until rank 0 is here too, let the spares go, and end torch.distributed; stopped: the signal or 0."""
        self.share(lambda: "end")
        if self.store is not None and self.first:
            self.store.set(OVER, str(stopped))
            end = time.monotonic() + NODE_S
            # The store lives in this process: the others must have read the end before it goes.
            while (
                rank_0_keeps_store() and self.store.add(BYE, 0) < self.size + self.spares - 1 and time.monotonic() < end
            ):
                time.sleep(0.01)  # the store ends with this process
        self.bye()
        if self.store is not None and dist.is_initialized():
            dist.destroy_process_group()

    def bye(self) -> None:
        """Tell rank 0 that this process needs the store no more."""
        if self.store is not None and not self.first:
            self.store.add(BYE, 1)

    def code(self, stopped: int) -> int:
        """The exit code of this process where the signal `stopped` (0: none) ended the run."""
        if not stopped or self.signalled or int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
            return exit_code(stopped)
        try:
            time.sleep(NODE_S)  # a signal to all nodes, or torchrun's own before a restart, comes to this one too
        except Stopped:
            return exit_code(stopped)
        return 2

    def stop(self, number: int) -> None:
        """End all ranks by the signal `number`, with nothing to save."""
        with contextlib.suppress(RuntimeError):
            self.claim(f"{SIGNAL}{number}")

    def claim(self, text: str) -> str:
        """Leave the reason why all ranks end; returns the one that was left first, by whichever rank."""
        if self.store is None:
            return text
        # The first text stays: later ones are its consequences.
        return self.store.compare_set(REASON, "", text).decode()

    def reason(self) -> str:
        """The reason why all end that a rank has left; "" for none."""
        return self.store.get(REASON).decode() if self.store is not None and self.store.check([REASON]) else ""

    def recorded(self) -> str:
        """The run folder of an earlier attempt under the same torchrun; "" for none."""
        return self.lasting.get(FOLDER).decode() if self.lasting is not None and self.lasting.check([FOLDER]) else ""

    def record(self, folder: str) -> None:
        """Record, for later attempts, that `folder` is this torchrun's run."""
        if self.lasting is not None:
            self.lasting.set(FOLDER, folder)

    def _hear(self, key: str, whose: str, timeout_s: float | None) -> bytes:
        # Poll: a wait inside the store notices neither signals nor a rank that has failed.
        begin, pause, last_check, self.waiting = time.monotonic(), 0.002, 0.0, whose
        while not self._answered(key):
            timestamp, reason = time.monotonic(), self.reason()
            if reason:
                raise Stopped(int(reason.removeprefix(SIGNAL))) if reason.startswith(SIGNAL) else Ended
            if timeout_s is not None and timestamp - begin > timeout_s:
                raise TimeoutError(
                    f"{whose} did not come within {timeout_s:g} s; look what it is doing, and start all ranks again"
                )
            if self.lasting is not None and self.names and timestamp - last_check > 1.0:
                last_check = timestamp
                # Once a second: a rank that was started again will never answer here.
                for rank, (name, hello) in enumerate(zip(self.names, read_hellos(self.lasting, len(self.names)))):
                    if name != hello:
                        raise TimeoutError(
                            f"rank {rank} was started again, without the others; let torchrun restart all of them"
                        )
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        self.waiting = ""
        assert self.store is not None
        return self.store.get(key)

    def _answered(self, key: str) -> bool:
        try:
            assert self.store is not None  # nobody else is heard
            return self.store.check([key])
        except RuntimeError:
            raise RankError(
                f"rank {self.rank}: {'rank 0' if rank_0_keeps_store() else 'torchrun'} is gone, and the store with it"
            ) from None


def join(timeout_s: float = 60.0, hang_s: float = TIMEOUT_S) -> Coordinator:
    """The coordinator of this process, once all processes that torchrun started have joined.

    timeout_s: for the store. hang_s: for the other processes, and what the coordinator has until a config says more; 0:
    without end.
    Raises ValueError if the environment is not torchrun's, or its store does not answer; TimeoutError if a rank
    does not come."""
    if not under_torchrun():
        return Coordinator()
    expect_environment()
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    lasting = torchrun_store(timeout_s)
    number, names = await_ranks(lasting, rank, size, hang_s)
    return Coordinator(rank, size, local, dist.PrefixStore(str(number), lasting), lasting, names, hang_s)


def rank_0_keeps_store() -> bool:
    """Whether rank 0 keeps the store, and not torchrun."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "False"


def torchrun_store(timeout_s: float) -> dist.Store:
    """torchrun's store, under the name of its run; raises ValueError if it is not there."""
    expect_environment()
    env = os.environ
    host, port, prefix = env["MASTER_ADDR"], int(env["MASTER_PORT"]), f"fzero/{env['TORCHELASTIC_RUN_ID']}"
    try:
        # If torchrun keeps no store for its workers (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), rank 0 does: a new one
        # at every restart.
        is_master = rank_0_keeps_store() and env["RANK"] == "0"
        store = dist.TCPStore(
            host, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        raise ValueError(f"torchrun's store at {host}:{port} does not answer ({str(error).splitlines()[0]})") from None
    return dist.PrefixStore(prefix, store)


# -- the end

# Held until the process ends: the main thread and the watchdog may both come to the end.
_ENDING = threading.Lock()


def note_parent() -> None:
    """Take the parent of this process for its torchrun."""
    global _PARENT
    _PARENT = os.getppid()


note_parent()
os.register_at_fork(after_in_child=note_parent)


def end_as_orphan() -> None:
    """End this process if its torchrun was killed: nobody restarts or stops it."""
    if os.getppid() != _PARENT:
        _ENDING.acquire()  # only one of two threads reports it
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                "fzero: error: torchrun is gone; resume from the last checkpoint with --resume",
                file=sys.stderr,
                flush=True,
            )
        os._exit(2)


def last_words(text: str, coordinator: Coordinator | None, *, lost: bool = False) -> tuple[str, int]:
    """(the line to print when this process ends, its exit code): "" if another rank has reported the reason."""
    if not under_torchrun():
        return text, 2
    # torchrun ends the others as soon as one process has ended; they may be about to report why.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    text += f"; {RESUME_HINT}" if lost and "is gone" in text else ""
    joined = coordinator is not None and coordinator.store is not None
    try:
        if coordinator is None or not joined:
            # Only torchrun's count distinguishes attempts here.
            early = f"early/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
            coordinator = Coordinator(
                int(os.environ.get("RANK", "0")), store=dist.PrefixStore(early, torchrun_store(5.0))
            )
        # Rank 0 reports a mistake that all ranks share.
        end = time.monotonic() + (LOST_S if lost else 0.0 if coordinator.first else 0.5)
        while time.monotonic() < end and not coordinator.reason():
            time.sleep(0.02)
        text = text if text.startswith("rank ") else f"rank {coordinator.rank}: {text}"
        first = coordinator.reason() or coordinator.claim(text)
        if first.startswith(SIGNAL):
            return "", exit_code(int(first.removeprefix(SIGNAL)))
        return text if first == text else "", 2
    except (ValueError, RuntimeError):
        if joined:  # else there may never have been a torchrun
            end_as_orphan()  # the store went with torchrun, or with rank 0
        return text, 2  # nobody can be asked
