"""The watch thread of a rank: publish signs of life, end a process that waits for a dead rank, name hanging ranks.

Each rank publishes once a second the state of its main thread: collectives begun, the one it waits in, its step, the
top of its stack. The main thread pays for that with three attributes a collective (comm/messages.py).
NCCL does not notice that a rank is gone, and its waits do not even return: so a rank whose main thread makes no
progress on GPUs looks for the signs of its neighbour.
A rank whose own main thread makes no progress reads the others', and after `hang_s` reports which of them hangs
and what the rest wait for."""

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fzero.comm.agreement import Call
from fzero.run.ranks.coordinator import AGAIN, LOST_S, STOP, Coordinator, end_as_orphan
from fzero.sharding import Mesh

BEAT_S = 1.0  # between two signs of life
SILENT_S = 8.0  # without a sign of life after a SIGTERM, a rank counts as gone
CLEAR_S = 20.0  # after a failure before the first step, to remove what a rank has written; torchrun kills after 30
ABORT_S = 5.0  # for NCCL to end what is under way
STALE_S = 3.0  # without one at a hang, a process counts as stopped
DONE = b"done"  # in place of a sign of life: the rank's training is over


class Beat(NamedTuple):
    """One sign of life of a rank: where its main thread is."""

    number: int  # of the sign, from 1
    idle_s: float  # without progress
    step: int  # steps made
    calls: int  # collectives begun
    last: str  # the last of them
    waits: str  # what it waits in for others; "" if it waits for nobody
    at: str  # the top of its stack


@contextlib.contextmanager
def watch(coordinator: Coordinator) -> Iterator[None]:
    """A context in which a thread ends this process if the main thread waits for a rank that is gone: of all that a
    command does together with other ranks, from the first state on.

    The thread publishes signs of life and looks for a reason to end. After a SIGTERM, which torchrun sends when a
    process has ended, it checks the signs of the other ranks. It also ends all ranks after `coordinator.hang_s` seconds
    without progress of one, and `coordinator.stops` receives the number of a signal to a spare.
    """
    if coordinator.store is None:
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(coordinator, ours, over), name="fzero-watch")
    thread.start()
    try:
        yield
        coordinator.store.set(f"beat/{coordinator.rank}", DONE.decode())
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        with contextlib.suppress(OSError):
            theirs.send(b"\0")
        thread.join()
        with contextlib.suppress(BlockingIOError):
            _heed(coordinator, ours.recv(64))
        ours.close()
        theirs.close()


def _heed(coordinator: Coordinator, received: bytes) -> bool:
    """Note whether a signal to stop is among the bytes of the wakeup socket; returns whether it was SIGTERM."""
    coordinator.signalled |= bool({signal.SIGTERM, signal.SIGINT} & set(received))
    return signal.SIGTERM in received


@contextlib.contextmanager
def watch_steps(coordinator: Coordinator, hang_s: float, stops: list[int]) -> Iterator[None]:
    """A context of the steps of a run: where `watch` looks for ranks that hang, and hands signals to `stops`."""
    coordinator.trains, coordinator.hang_s, coordinator.stops = True, hang_s, stops
    try:
        yield
    finally:
        coordinator.trains = False


def _watch(coordinator: Coordinator, wakeup: socket.socket, over: threading.Event) -> None:
    # A separate connection: the main thread blocks the other one while it waits.
    assert coordinator.store is not None  # see `watch`
    store = coordinator.store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (torch's stub lacks it)
    mine = Coordinator(coordinator.rank, coordinator.size, coordinator.local_size, store)
    main, moved = threading.main_thread(), time.monotonic()
    number, before, term, reason, seen = 0, None, 0.0, 0.0, {}
    quiet, sign = 0, b""  # looks since the neighbour's last sign, and that sign: for transports that do not notice
    heard: dict[int, tuple[bytes, float]] = {}  # at a hang: the last sign of each rank, and when it came
    # Without a store there is little to look at.
    with contextlib.suppress(RuntimeError):
        store.set(f"process/{coordinator.rank}", str(os.getpid()))
        while not over.is_set() and main.is_alive():
            number, now, place = number + 1, time.monotonic(), progress_of(coordinator)
            mine.size, hang_s = coordinator.size, coordinator.hang_s if coordinator.trains else 0.0
            if place != before:
                before, moved = place, now
            store.set(f"beat/{coordinator.rank}", json.dumps(beat_of(coordinator, number, now - moved, main.ident)))
            if coordinator.spares and coordinator.first and not coordinator.stops and store.check([STOP]):
                coordinator.stops.append(int(store.get(STOP)))
            if select.select([wakeup], [], [], BEAT_S)[0] and _heed(coordinator, wakeup.recv(64)) and not term:
                term, seen = now, read_beats(mine)
            if not coordinator.notices and not term and coordinator.size > 1:
                # Looks, not seconds: a job that was suspended as a whole finds all signs old.
                # A wait for a message in the store notices the end of torchrun or of rank 0 itself, and may be for
                # long work of rank 0, such as a corpus that it prepares.
                found = read_beat(mine, (coordinator.rank - 1) % coordinator.size)
                still = now - moved >= 2 * BEAT_S and not coordinator.waiting
                quiet = quiet + 1 if found and found == sign and still else 0
                sign = found
                if quiet * BEAT_S >= SILENT_S:
                    # A rank that has not given its first sign is not gone: it may still begin.
                    term, seen = now, dict.fromkeys(range(coordinator.size), b"") | read_beats(mine)
            if mine.reason() and not reason:
                reason = now
            if over.is_set():
                return
            if reason and now - reason > (LOST_S + 2 * BEAT_S if coordinator.trains else CLEAR_S):
                end_process(coordinator)
            end_as_orphan()
            if term and now - term > SILENT_S:
                found = read_beats(mine)
                gone = [
                    str(rank)
                    for rank in range(coordinator.size)
                    if found.get(rank) != DONE and found.get(rank) == seen.get(rank)
                ]
                term, seen = now, found
                if gone:
                    say_and_end(
                        coordinator,
                        mine,
                        f"rank {coordinator.rank}: rank {', '.join(gone)} is gone: no sign of life for {SILENT_S:g} "
                        f"s; {AGAIN}",
                    )
            # Start at half of the time, to have signs to compare with at its end.
            if not hang_s or coordinator.size == 1 or now - moved < hang_s / 2:
                heard = {}
                continue
            for rank, sign in read_beats(mine).items():
                if rank not in heard or heard[rank][0] != sign:
                    heard[rank] = sign, now
            if now - moved >= hang_s:
                states = {rank: Beat(*json.loads(sign)) for rank, (sign, _) in heard.items() if sign != DONE}
                stale = {rank: now - at for rank, (sign, at) in heard.items() if sign != DONE and now - at >= STALE_S}
                text = verdict(states, stale, hang_s)
                if text:
                    for rank in stale:
                        kill_sibling(int(store.get(f"process/{rank}")))
                    say_and_end(coordinator, mine, text)
    while not over.wait(BEAT_S) and main.is_alive():  # without a store
        end_as_orphan()


def read_beat(coordinator: Coordinator, rank: int) -> bytes:
    """The last sign of life of a rank; b"" for none."""
    store, key = coordinator.store, f"beat/{rank}"
    assert store is not None
    return store.get(key) if store.check([key]) else b""


def read_beats(coordinator: Coordinator) -> dict[int, bytes]:
    """The last sign of life of each rank that has given one."""
    found = {rank: read_beat(coordinator, rank) for rank in range(coordinator.size)}
    return {rank: sign for rank, sign in found.items() if sign}


def say_and_end(coordinator: Coordinator, mine: Coordinator, text: str) -> None:
    """End this process, with the text on stderr unless another rank has left a reason.

    mine: of this thread, whose store no other thread waits in.
    """
    claimed = f"{text}\n{coordinator.rank}"  # other ranks may find the same text
    if mine.claim(claimed) == claimed:
        print(f"fzero: error: {text}", file=sys.stderr, flush=True)
    end_process(coordinator)


def end_process(coordinator: Coordinator) -> None:
    """End this process at once with exit code 2, and NCCL's collectives before it, so that the other ranks' end too."""
    if coordinator.at is not None:
        thread = threading.Thread(target=_abort, args=(coordinator.at,), daemon=True)
        thread.start()
        thread.join(ABORT_S)
    os._exit(2)


def _abort(mesh: Mesh) -> None:
    with contextlib.suppress(RuntimeError):  # the process ends anyway
        mesh.abort()


def kill_sibling(process: int) -> None:
    """SIGKILL a stopped process of the same torchrun, which would wait 30 s for it."""
    with contextlib.suppress(OSError):
        parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == os.getppid() and process != os.getpid():
            os.kill(process, signal.SIGKILL)


def progress_of(coordinator: Coordinator) -> tuple[object, ...]:
    """A value that changes whenever the main thread makes progress."""
    agreement = coordinator.at.agreement if coordinator.at is not None else None
    return (
        coordinator.step,
        coordinator.trains,
        coordinator.asked,
        coordinator.waiting,
        *((agreement.number, agreement.waiting) if agreement is not None else ()),
    )


def beat_of(coordinator: Coordinator, number: int, idle_s: float, main: int | None) -> Beat:
    """The current Beat of this rank."""
    agreement = coordinator.at.agreement if coordinator.at is not None else None
    last, call = (brief(agreement.last), agreement.waiting) if agreement is not None else ("", None)
    waits = (
        f"{brief(call)} (#{call.number})"
        if call is not None
        else f"a message of {coordinator.waiting}"
        if coordinator.waiting
        else ""
    )
    return Beat(
        number,
        round(idle_s, 1),
        coordinator.step,
        agreement.number if agreement is not None else 0,
        last,
        waits,
        stack_top(main),
    )


def brief(call: Call | None) -> str:
    """The text of a collective, naming the first of several leaves."""
    if call is None:
        return ""
    first, *more = call.leaf.split(" ")
    return str(call._replace(leaf=f"{first} and {len(more)} more" if more else first))


def stack_top(thread: int | None) -> str:
    """The top of a thread's Python stack: file:line and function."""
    frame = None if thread is None else sys._current_frames().get(thread)
    if frame is None:
        return ""
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"


def verdict(states: Mapping[int, Beat], stale: Mapping[int, float], hang_s: float) -> str:
    """Which of the ranks hangs, where, and what the others wait for, in one line; "" if none does.

    stale: seconds without a sign of life, by rank.
    """
    hung = sorted(stale) or [rank for rank, s in sorted(states.items()) if not s.waits and s.idle_s >= hang_s]
    if not hung and states and all(s.waits and s.idle_s >= hang_s for s in states.values()):
        # All wait: the rank that has begun the fewest collectives blocks the others.
        fewest = min(s.calls for s in states.values())
        hung = [rank for rank, s in sorted(states.items()) if s.calls == fewest][:1]
    if not hung:
        return ""
    hangs = []
    for rank in hung:
        s = states[rank]
        if rank in stale:
            how = (
                f"its process gives no sign of life for {stale[rank]:.0f} s (stopped, or its host is gone), and "
                "was last in"
            )
        else:
            how = f"no progress for {s.idle_s:.0f} s, in"
        waits = f" waiting in {s.waits}" if s.waits else ""
        passed = "" if s.waits else f", after {s.last} (#{s.calls})" if s.last else ", before any collective"
        hangs.append(f"rank {rank} hangs: {how} step {s.step + 1}{waits} at {s.at or 'an unknown place'}{passed}")
    waiting: dict[str, list[int]] = {}
    for rank, s in sorted(states.items()):
        if rank not in hung and s.waits:
            waiting.setdefault(f"{s.waits}, step {s.step + 1}", []).append(rank)
    others = [
        f"rank {', '.join(map(str, ranks))} wait{'s' * (len(ranks) == 1)} in {what}" for what, ranks in waiting.items()
    ]
    fix = (
        "resume from the last checkpoint with --resume, or let torchrun --max-restarts do it; train.hang_s is the limit"
    )
    return "; ".join([*hangs, *others, fix])
