"""The watch thread of a rank: publish signs of life, end a process that waits for a dead rank, name hanging ranks.

Each rank publishes once a second the state of its main thread: collectives begun, the one it waits in, its step, the
top of its stack. A rank whose main thread makes no progress reads the others', and after `hang_s` reports which of them
hangs and what the rest wait for. Outside of steps, a rank makes progress too if its stack changes or it computes; one
that waits says after SAY_S for whom.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fzero.comm.messages import CollectiveCall
from fzero.run.setup.coordinator import LOST_S, RESUME_HINT, SAY_S, STOP, Coordinator, end_as_orphan
from fzero.sharding import Mesh

BEAT_S = 1.0  # between two signs of life
SILENT_S = 8.0  # without a sign of life after a SIGTERM, a rank counts as gone
LONG_S = 30.0  # without one where the next rank waits for a message: a long call may keep Python from its threads
CLEAR_S = 20.0  # after a failure before the first step, to remove what a rank has written; torchrun kills after 30
WORK_S = 0.01  # processor time between two looks, of what works
ABORT_S = 5.0  # for NCCL to end what is under way
STALE_S = 3.0  # without one at a hang, a process counts as stopped
DONE = b"done"  # in place of a sign of life: the rank's training is over


class Beat(NamedTuple):
    """One sign of life of a rank: where its main thread is."""

    number: int  # of the sign, from 1
    idle_s: float  # without progress
    step: int  # steps made; -1 outside of the steps of a run
    calls: int  # collectives begun
    last: str  # the last of them
    waits: str  # what it waits in for others; "" if it waits for nobody
    location: str  # the top of its stack


@contextlib.contextmanager
def watch(coordinator: Coordinator) -> Iterator[None]:
    """A context in which a thread ends this process if the main thread waits for a rank that is gone."""
    if coordinator.store is None:
        yield
        return
    # Python writes the number of each signal into this socket at once, also while the main thread is inside a
    # collective and runs no handler.
    reader_socket, writer_socket = socket.socketpair()
    writer_socket.setblocking(False)
    reader_socket.setblocking(False)
    previous_fd = signal.set_wakeup_fd(writer_socket.fileno(), warn_on_full_buffer=False)
    done_event = threading.Event()
    thread = threading.Thread(target=_watch, args=(coordinator, reader_socket, done_event), name="fzero-watch")
    coordinator.watched = True
    thread.start()
    try:
        yield
        # Only at an orderly end: a rank that raises is missed by the others until it has left a reason.
        coordinator.store.set(f"beat/{coordinator.rank}", DONE.decode())
    finally:
        done_event.set()
        coordinator.watched = False
        signal.set_wakeup_fd(previous_fd)
        with contextlib.suppress(OSError):
            writer_socket.send(b"\0")
        thread.join()
        with contextlib.suppress(BlockingIOError):
            _heed(coordinator, reader_socket.recv(64))
        reader_socket.close()
        writer_socket.close()


def _heed(coordinator: Coordinator, received: bytes) -> bool:
    """Note a signal to stop in the wakeup socket's bytes; whether it was SIGTERM."""
    coordinator.signalled |= bool({signal.SIGTERM, signal.SIGINT} & set(received))
    return signal.SIGTERM in received


@contextlib.contextmanager
def watch_steps(coordinator: Coordinator, hang_s: float, stops: list[int]) -> Iterator[None]:
    """A context of the steps of a run, which `watch` counts as progress."""
    coordinator.trains, coordinator.hang_s, coordinator.stops = True, hang_s, stops
    try:
        yield
    finally:
        coordinator.trains = False


def _watch(coordinator: Coordinator, wakeup: socket.socket, done_event: threading.Event) -> None:
    # A separate connection: the main thread blocks the other one while it waits.
    assert coordinator.store is not None  # see `watch`
    store = coordinator.store.clone()  # pyright: ignore[reportAttributeAccessIssue]  (torch's stub lacks it)
    watcher = Coordinator(coordinator.rank, coordinator.size, coordinator.local_size, store)
    main, progress_time = threading.main_thread(), time.monotonic()
    # term: when SIGTERM came, or the neighbour fell silent. reason: when a reason was seen.
    number, last_position, term, reason, last_beats = 0, None, 0.0, 0.0, {}
    quiet, sign = 0, b""  # looks since the neighbour's last sign, and that sign: for transports that do not notice
    heard: dict[int, tuple[bytes, float]] = {}  # at a hang: the last sign of each rank, and when it came
    work, reported = Work(), None
    # Without a store there is little to look at.
    with contextlib.suppress(RuntimeError):
        store.set(f"process/{coordinator.rank}", str(os.getpid()))
        while not done_event.is_set() and main.is_alive():
            number, timestamp = number + 1, time.monotonic()
            position = (*progress_of(coordinator), work.look(coordinator, main))
            watcher.size = coordinator.size
            if position != last_position:
                last_position, progress_time = position, timestamp
            # `number` makes each sign another text, so that a silent rank shows as one that stays equal.
            beat = beat_of(coordinator, number, timestamp - progress_time, main.ident)
            store.set(f"beat/{coordinator.rank}", json.dumps(beat))
            if coordinator.spares and coordinator.first and not coordinator.stops and store.check([STOP]):
                coordinator.stops.append(int(store.get(STOP)))
            if select.select([wakeup], [], [], BEAT_S)[0] and _heed(coordinator, wakeup.recv(64)) and not term:
                term, last_beats = timestamp, read_beats(watcher)
            # A wait for a message in the store notices the end of torchrun or of rank 0's store, and no other.
            if (not coordinator.notices or coordinator.waiting) and not term and coordinator.size > 1:
                # Looks, not seconds: a job that was suspended as a whole finds all signs old.
                neighbor_beat = read_beat(watcher, (coordinator.rank - 1) % coordinator.size)
                quiet = (
                    quiet + 1
                    if neighbor_beat not in (b"", DONE)
                    and neighbor_beat == sign
                    and timestamp - progress_time >= 2 * BEAT_S
                    else 0
                )
                sign = neighbor_beat
                if quiet * BEAT_S >= (LONG_S if coordinator.waiting else SILENT_S):
                    # A rank that has not given its first sign is not gone: it may still begin.
                    term, last_beats = timestamp, dict.fromkeys(range(coordinator.size), b"") | read_beats(watcher)
            if watcher.reason() and not reason:
                reason = timestamp
            if done_event.is_set():
                return
            # The main thread finds the reason itself, unless it is inside a collective; then this thread ends it.
            if reason and timestamp - reason > (LOST_S + 2 * BEAT_S if coordinator.trains else CLEAR_S):
                end_process(coordinator)
            end_as_orphan()
            # All signs are read again after so long: who has not changed is gone. torchrun sends SIGTERM to the ranks
            # that live.
            if term and timestamp - term > SILENT_S:
                term, last_beats = timestamp, report_lost_ranks(coordinator, watcher, last_beats)
            if (
                timestamp - progress_time >= SAY_S
                and not coordinator.has_stepped
                and reported != last_position
                and beat.waits
            ):
                reported = last_position
                report_waits(watcher, coordinator.hang_s)
            heard = detect_hang(coordinator, watcher, timestamp - progress_time, heard)
    while not done_event.wait(BEAT_S) and main.is_alive():  # without a store
        end_as_orphan()


def report_lost_ranks(
    coordinator: Coordinator, watcher: Coordinator, last_beats: Mapping[int, bytes]
) -> dict[int, bytes]:
    """End this process if a rank has given no sign since those that were `last_beats`; returns the signs."""
    beats = read_beats(watcher)
    lost_ranks = [
        str(rank)
        for rank in range(coordinator.size)
        if beats.get(rank) != DONE and beats.get(rank) == last_beats.get(rank)
    ]
    if lost_ranks:
        subject = f"rank {coordinator.rank}: rank {', '.join(lost_ranks)} is gone"
        end_with_reason(coordinator, watcher, f"{subject}: no sign of life for {SILENT_S:g} s; {RESUME_HINT}")
    return beats


def detect_hang(
    coordinator: Coordinator, watcher: Coordinator, idle_s: float, heard: dict[int, tuple[bytes, float]]
) -> dict[int, tuple[bytes, float]]:
    """End all ranks if one hangs; returns each rank's last sign and its time."""
    hang_s, timestamp = coordinator.hang_s, time.monotonic()
    # Start at half of the time, to have signs to compare with at its end.
    if not hang_s or coordinator.size == 1 or idle_s < hang_s / 2:
        return {}
    for rank, sign in read_beats(watcher).items():
        if rank not in heard or heard[rank][0] != sign:
            heard[rank] = sign, timestamp
    if idle_s >= hang_s:
        states = states_of({rank: sign for rank, (sign, _) in heard.items()})
        stale = {
            rank: timestamp - sign_time
            for rank, (_, sign_time) in heard.items()
            if rank in states and timestamp - sign_time >= STALE_S
        }
        text = verdict(states, stale, hang_s)
        if text:
            for rank in stale:
                # A stopped process (SIGSTOP) takes no SIGTERM, and torchrun would wait for it.
                kill_sibling(int(watcher.store.get(f"process/{rank}")))  # pyright: ignore[reportOptionalMemberAccess]
            end_with_reason(coordinator, watcher, text)
    return heard


def report_waits(watcher: Coordinator, hang_s: float) -> None:
    """Say for whom ranks wait before the first step, if this is their first."""
    states = states_of(read_beats(watcher))
    waiting = [rank for rank, s in sorted(states.items()) if s.waits and s.idle_s >= SAY_S - 2 * BEAT_S]
    if waiting[:1] != [watcher.rank]:
        return
    peers = [
        f"rank {rank}, {f'at {states[rank].location}' if rank in states else 'of which there is no sign of life'}"
        for rank in range(watcher.size)
        if rank not in waiting
    ]
    limit = f"; train.hang_s ends all after {hang_s:g} s without progress" if hang_s else ""
    subject = f"rank {', '.join(map(str, waiting))} wait{'s' * (len(waiting) == 1)} in {states[watcher.rank].waits}"
    print(f"{subject}, for {'; '.join(peers) or 'one another'}{limit}", file=sys.stderr, flush=True)


def states_of(signs: Mapping[int, bytes]) -> dict[int, Beat]:
    """The states in the last signs of ranks, without those that are done or spare."""
    return {rank: Beat(*json.loads(sign)) for rank, sign in signs.items() if sign.startswith(b"[")}


class Work:
    """Whether a main thread works outside of steps, where no collective says so."""

    def __init__(self) -> None:
        self.number, self.cpu, self.stack = 0, 0.0, ()

    def look(self, coordinator: Coordinator, main: threading.Thread) -> int:
        """A number that has changed since the last look if it works."""
        if (coordinator.trains and coordinator.has_stepped) or waits_of(coordinator):
            return self.number
        cpu, stack = cpu_seconds(), stack_of(main.ident)
        # A compiler or a reader of data works without a change of the stack; an idle wait uses no processor time.
        self.number += stack != self.stack or cpu - self.cpu > WORK_S
        self.cpu, self.stack = cpu, stack
        return self.number


def cpu_seconds() -> float:
    """The processor time of this process but its calling thread, and of the processes below it."""
    times, tick = os.times(), os.sysconf("SC_CLK_TCK")
    total = time.process_time() - time.thread_time() + times.children_user + times.children_system
    pending = list(Path("/proc/self/task").glob("*/children"))
    while pending:
        with contextlib.suppress(OSError, ValueError):  # one that has ended, or a system without these files
            for process in pending.pop().read_text().split():
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / tick
                pending += Path(f"/proc/{process}/task").glob("*/children")
    return total


def stack_of(thread: int | None) -> tuple[tuple[int, int], ...]:
    """The Python stack of a thread, as a value that changes when it goes on."""
    frames, frame = [], None if thread is None else sys._current_frames().get(thread)
    while frame is not None:
        frames.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(frames)


def read_beat(coordinator: Coordinator, rank: int) -> bytes:
    """The last sign of life of a rank; b"" for none."""
    store, key = coordinator.store, f"beat/{rank}"
    assert store is not None
    return store.get(key) if store.check([key]) else b""


def read_beats(coordinator: Coordinator) -> dict[int, bytes]:
    """The last sign of life of each rank that has given one."""
    beats = {rank: read_beat(coordinator, rank) for rank in range(coordinator.size)}
    return {rank: sign for rank, sign in beats.items() if sign}


def end_with_reason(coordinator: Coordinator, watcher: Coordinator, text: str) -> None:
    """End this process, with the text on stderr unless another rank has left a reason."""
    # With the rank, so that exactly one rank sees its own text and prints it.
    claimed = f"{text}\n{coordinator.rank}"  # other ranks may find the same text
    if watcher.claim(claimed) == claimed:
        print(f"fzero: error: {text}", file=sys.stderr, flush=True)
    end_process(coordinator)


def end_process(coordinator: Coordinator) -> None:
    """End this process at once with code 2, after NCCL's collectives."""
    if coordinator.current_mesh is not None:
        thread = threading.Thread(target=_abort, args=(coordinator.current_mesh,), daemon=True)
        thread.start()
        # In a thread, as NCCL's abort may itself hang.
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
    agreement = coordinator.current_mesh.agreement if coordinator.current_mesh is not None else None
    return (
        coordinator.step,
        coordinator.trains,
        coordinator.agreements,
        coordinator.waiting,
        *((agreement.number, agreement.waiting) if agreement is not None else ()),
    )


def waits_of(coordinator: Coordinator) -> str:
    """What the main thread waits in for others; "" if it waits for nobody."""
    agreement = coordinator.current_mesh.agreement if coordinator.current_mesh is not None else None
    call = agreement.waiting if agreement is not None else None
    if call is not None:
        return f"{brief(call)} (#{call.number})"
    return f"a message of {coordinator.waiting}" if coordinator.waiting else ""


def beat_of(coordinator: Coordinator, number: int, idle_s: float, main: int | None) -> Beat:
    """The current Beat of this rank."""
    agreement = coordinator.current_mesh.agreement if coordinator.current_mesh is not None else None
    return Beat(
        number,
        round(idle_s, 1),
        coordinator.step if coordinator.trains else -1,
        agreement.number if agreement is not None else 0,
        brief(agreement.last) if agreement is not None else "",
        waits_of(coordinator),
        stack_top(main),
    )


def step_text(s: Beat) -> str:
    """Where in a run a rank is."""
    return f"step {s.step + 1}" if s.step >= 0 else "work before or after the steps"


def brief(call: CollectiveCall | None) -> str:
    """The text of a collective, naming the first of several leaves."""
    if call is None:
        return ""
    first, *extra_leaves = call.leaf.split(" ")
    return str(call._replace(leaf=f"{first} and {len(extra_leaves)} more" if extra_leaves else first))


def stack_top(thread: int | None) -> str:
    """The top of a thread's Python stack: file:line and function."""
    frame = None if thread is None else sys._current_frames().get(thread)
    if frame is None:
        return ""
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"


def verdict(states: Mapping[int, Beat], stale: Mapping[int, float], hang_s: float) -> str:
    """Which of the ranks hangs, where, and what the others wait for, in one line; "" if none does."""
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
            symptom = (
                f"its process gives no sign of life for {stale[rank]:.0f} s (stopped, or its host is gone), and "
                "was last in"
            )
        else:
            symptom = f"no progress for {s.idle_s:.0f} s, in"
        waits = f" waiting in {s.waits}" if s.waits else ""
        passed = "" if s.waits else f", after {s.last} (#{s.calls})" if s.last else ", before any collective"
        hangs.append(
            f"rank {rank} hangs: {symptom} {step_text(s)}{waits} at {s.location or 'an unknown place'}{passed}"
        )
    waiting: dict[str, list[int]] = {}
    for rank, s in sorted(states.items()):
        if rank not in hung and s.waits:
            waiting.setdefault(f"{s.waits}, {step_text(s)}", []).append(rank)
    waiting_lines = [
        f"rank {', '.join(map(str, ranks))} wait{'s' * (len(ranks) == 1)} in {state_text}"
        for state_text, ranks in waiting.items()
    ]
    fix = (
        "resume from the last checkpoint with --resume, or let torchrun --max-restarts do it; train.hang_s is the limit"
    )
    return "; ".join([*hangs, *waiting_lines, fix])
