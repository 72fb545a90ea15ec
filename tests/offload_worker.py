"""A warm process that forks runs whose state is on a disk, ends some of them by SIGKILL, and says what it then finds in
their stores.

`python tests/offload_worker.py FOLDER`: a request in each line of stdin, its answer in one of stdout, both JSON (see
REQUESTS)."""

import contextlib
import hashlib
import json
import math
import os
import select
import shutil
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import fzero
from fzero import models, optim, reopen_state
from fzero.core import precision, pytree
from fzero.offload import DiskIO, DiskTensor, Nvme, VersionedStore
from fzero.offload.chunk_files import Chunks

STEPS = 6
CONFIG = models.LlamaConfig(vocab_size=97, max_len=16, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24)
EVERYTHING = "params=nvme,grads=nvme,opt=nvme,acts=nvme"
KEEP = 2  # checkpoints, where they are asked for
# Where a run ends itself: what is called, and whether it then ends before or after the call.
POINTS = {
    "a write begins": (DiskIO, "write", "before"),
    "all is written": (Chunks, "sync", "before"),
    "all is durable": (Chunks, "sync", "after"),
    "a text is written": (os, "fsync", "before"),
    "a text is durable": (os, "replace", "before"),
    "a text is there": (os, "replace", "after"),
    "a pin begins": (VersionedStore, "pin", "before"),
}


class Run:
    """A run on one rank: the same model and batches whatever is on the disk."""

    def __init__(self, folder, rank=0, ranks=1, offload=EVERYTHING, slots=2):
        if ranks > 1:
            store = dist.FileStore(f"{folder}.ranks-{os.getppid()}-{os.environ['ROUND']}", ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
        self.mesh = fzero.make_mesh({"dp": ranks}, device="cpu") if ranks > 1 else fzero.one_process()
        self.model = models.llama(CONFIG)
        self.plan = fzero.zero_plan(3, self.model, self.mesh, offload=offload, policy=precision.bf16())
        self.tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1))
        self.space = Nvme(folder, slots=slots, buffer_bytes=4 << 20) if offload else None
        self.step = fzero.make_train_step(
            self.model, self.tx, self.plan, execution=fzero.Execution(remat="full"), nvme=self.space
        )

    def begin(self):
        return fzero.init_state(self.model, self.tx, self.plan, seed=0, nvme=self.space)

    def reopen(self):
        return reopen_state(self.tx, self.plan, self.space)

    def go_on(self, state, then=lambda state: None):
        """The state of the last step; `then` is given the state of each."""
        for i in range(int(state.step), STEPS):
            rows = torch.randint(0, CONFIG.vocab_size, (4, 9), generator=torch.Generator().manual_seed(i))
            batch = fzero.train.batch.local_batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]}, self.mesh)
            state, _ = self.step(state, batch)
            then(state)
        return state


def digest(state, slot=None):
    """{leaf: hash of its dtype, shape and bytes}; of a slot: only what is on the disk."""
    out = {}
    for name, leaf in pytree.named_leaves(state).items():
        if slot is not None and not isinstance(leaf, DiskTensor):
            continue
        x = (leaf.tensor(slot) if isinstance(leaf, DiskTensor) else leaf.detach()).contiguous()
        data = x.reshape(-1).view(torch.uint8).numpy().tobytes()
        out[name] = hashlib.sha256(f"{x.dtype}{list(x.shape)}".encode() + data).hexdigest()[:16]
    return out


def forked(work, *args):
    """(pid, a descriptor of what it writes) of a process that calls `work(descriptor, *args)`."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    code = 1
    with contextlib.suppress(BaseException):
        try:
            work(theirs, *args)
            code = 0
        except BaseException:
            os.write(theirs, f"{json.dumps({'error': traceback.format_exc()})}\n".encode())
    os._exit(code)


def lines(fd, since=math.inf, after=0.0):
    """The lines of a descriptor until its end, or some seconds after the first `since` of them."""
    data, until = b"", None
    while True:
        if until is None and data.count(b"\n") >= since:
            until = time.monotonic() + after
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([fd], [], [], left)[0]:
            break
        more = os.read(fd, 1 << 16)
        if not more:
            break
        data += more
    return [line for line in data.decode().split("\n") if line]


def tell(fd, value):
    text = f"{json.dumps(value)}\n".encode()
    while text:
        text = text[os.write(fd, text) :]


def train(fd, folder, rank=0, ranks=1, point=None, pins=False):
    """From the first step to the last, telling each one that is done."""
    if point is not None:
        end_at(*point)
    run = Run(folder, rank, ranks, slots=KEEP + 2 if pins else 2)
    state = run.begin()
    tell(fd, 0)

    def then(state):
        if pins and int(state.step) % 2 == 0:
            tell(fd, f"pinned {run.space.store.pin(KEEP)}")
        tell(fd, int(state.step))

    run.go_on(state, then)


def end_at(name, count):
    """Make the `count`-th call of a point this process's last."""
    owner, method, when = POINTS[name]
    real, calls = getattr(owner, method), []

    def wrapped(*args, **options):
        calls.append(1)
        if when == "before" and len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        out = real(*args, **options)
        if when == "after" and len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    setattr(owner, method, wrapped)


def look(fd, folder, rank=0, ranks=1, pins=False):
    """What a later process finds in the store, and what it makes of it up to the last step."""
    run = Run(folder, rank, ranks, slots=KEEP + 2 if pins else 2)
    try:
        state = run.reopen()
    except ValueError as error:
        tell(fd, {"refused": str(error)})
        return
    record = run.space.store.record
    found = {"step": int(state.step), "record": record.step, "digest": digest(state)}
    found["pinned"] = {step: digest(state, slot) for slot, step in record.pinned.items()}
    tell(fd, {**found, "last": digest(run.go_on(state))})


def whole_run(fd, ranks, rank):
    """The digests of all steps of a run that nothing is offloaded of and nothing ends."""
    run = Run(os.path.join(FOLDER, "whole"), rank, ranks, offload="")
    state = run.begin()
    found = [digest(state)]
    run.go_on(state, lambda state: found.append(digest(state)))
    tell(fd, found)


def all_of(work, ranks, *args):
    """What each of some ranks tells, when all have ended."""
    os.environ["ROUND"] = str(time.monotonic_ns())
    started = [forked(work, *(a(rank) if callable(a) else a for a in args)) for rank in range(ranks)]
    out = []
    for pid, fd in started:
        out.append([json.loads(line) for line in lines(fd)])
        os.close(fd)
        os.waitpid(pid, 0)
    return out


def uninterrupted(ranks=1):
    """{steps: for each rank the digests of each step, seconds: how long such a run takes on the disk}."""
    steps = [told[-1] for told in all_of(whole_run, ranks, ranks, lambda rank: rank)]
    folder = os.path.join(FOLDER, "timed")
    begin = time.monotonic()
    told = all_of(train, ranks, folder, lambda rank: rank, ranks)
    seconds = time.monotonic() - begin
    shutil.rmtree(folder)
    return {"steps": steps, "seconds": seconds, "told": told}


def killed(ranks=1, since=0, after=None, point=None, pins=False, victim=0):
    """Start a run; end one rank of it some seconds after it has told so many things, or at a point; and look at what is
    there.

    {told: what rank 0 had told, code: of the victim, found: for each rank what it finds later, left: names in the
    folder but for arrays, anew: what a new run in the folder of one that had begun no step tells}
    """
    folder = os.path.join(FOLDER, "killed")
    os.environ["ROUND"] = str(time.monotonic_ns())
    started = [forked(train, folder, rank, ranks, point if rank == victim else None, pins) for rank in range(ranks)]
    pid, told = started[victim][0], []
    if after is not None:
        told = lines(started[0][1], since, after)
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for rank, (other, _) in enumerate(started):
        if rank != victim:
            time.sleep(0.05)  # in which it may do harm
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
    told += lines(started[0][1])
    for _, fd in started:
        os.close(fd)
    found = [told[-1] for told in all_of(look, ranks, folder, lambda rank: rank, ranks, pins)]
    left = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if "arrays" not in path.parts)
    anew = all_of(train, ranks, folder, lambda rank: rank, ranks)[0] if "refused" in found[0] else None
    shutil.rmtree(folder, ignore_errors=True)
    return {"told": [json.loads(line) for line in told], "code": code, "found": found, "left": left, "anew": anew}


REQUESTS = {"uninterrupted": uninterrupted, "killed": killed}


if __name__ == "__main__":
    FOLDER = sys.argv[1]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    import tensorstore  # noqa: F401  (so that no fork imports it)

    warm = Run(None, offload="")
    warm.go_on(warm.begin())
    for request in sys.stdin:
        name, options = json.loads(request)
        print(json.dumps(REQUESTS[name](**options)), flush=True)
