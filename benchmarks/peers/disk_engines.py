"""The engines that `nvme.py` measures in our own environment, and the process that serves one: plain threads,
tensorstore, fzero.

python -m peers.disk_engines        (in the folder `benchmarks`)
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from peers import problem

PLANES = 3  # of a block: master, m, v
RING = 4  # blocks in memory
PIECE = 8 << 20  # bytes of one operation


# What a piece of work costs.


def counters() -> dict[str, float]:
    """The clock, CPU seconds of all threads of this process, and the bytes that it has had the disk read and write."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    cpu_s = used.ru_utime + used.ru_stime
    return {
        "s": time.perf_counter(),
        "cpu_s": cpu_s,
        "read_bytes": int(io["read_bytes"]),
        "write_bytes": int(io["write_bytes"]),
    }


def since(before: dict[str, float], prefix: str = "") -> dict[str, float]:
    """What the counters have risen by."""
    return {prefix + key: now - before[key] for key, now in counters().items()}


# The engines: each returns its operations, functions of the seconds that a block's computation takes (0 but in
# `stream`).


def huge(n: int) -> np.ndarray:
    """n bytes of anonymous memory in huge pages, touched."""
    memory = mmap.mmap(-1, n + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array = array[-array.ctypes.data % (2 << 20) :][:n]
    array[:: mmap.PAGESIZE] = 1
    return array


def operations(blocks: int, read: Callable, write: Callable, sync: Callable) -> dict[str, Callable]:
    """The operations of an engine that can start a block, and make what was written durable.

    `read(i)` returns a function that waits for block i and returns its memory, or None where that is the ring's;
    `write(i, memory)` returns one that waits.
    """

    def run(reading: bool, writing: bool) -> None:
        waits: list[list[Callable]] = []
        for i in range(blocks):
            waits.append(([read(i)] if reading else []) + ([write(i, None)] if writing else []))
            if i >= 2:
                for wait in waits.pop(0):
                    wait()
        for wait in itertools.chain(*waits):
            wait()
        if writing:
            sync()

    def stream(compute_s: float) -> None:
        reading, writing = {i: read(i) for i in range(min(2, blocks))}, {}
        for i in range(blocks):
            memory = reading.pop(i)()
            time.sleep(compute_s)
            writing[i] = write(i, memory)
            del memory
            if i + 2 < blocks:
                writing.pop(i + 2 - RING, lambda: None)()  # it has the memory that is read into
                reading[i + 2] = read(i + 2)
        for wait in writing.values():
            wait()
        sync()

    return {
        "read": lambda _: run(True, False),
        "write": lambda _: run(False, True),
        "mixed": lambda _: run(True, True),
        "stream": stream,
    }


def raw(order: dict[str, Any]) -> dict[str, Callable]:
    """O_DIRECT on two flat files, by four threads."""
    blocks, size = order["blocks"], PLANES * order["plane_bytes"]
    ring = huge(RING * size).reshape(RING, size)
    source, target = (os.open(Path(order["folder"], name), os.O_RDWR | os.O_DIRECT) for name in ("a.bin", "b.bin"))
    readers, writers = ThreadPoolExecutor(2), ThreadPoolExecutor(2)

    def starter(pool: ThreadPoolExecutor, move: Callable, file: int) -> Callable:
        def start(i: int, _: None = None) -> Callable[[], None]:
            views = [memoryview(ring[i % RING][at : at + PIECE]) for at in range(0, size, PIECE)]
            moves = [pool.submit(move, file, [view], i * size + k * PIECE) for k, view in enumerate(views)]

            def wait() -> None:
                assert sum(m.result() for m in moves) == size

            return wait

        return start

    return operations(
        blocks, starter(readers, os.preadv, source), starter(writers, os.pwritev, target), lambda: os.fdatasync(target)
    )


def tensorstore(order: dict[str, Any]) -> dict[str, Callable]:
    """Two zarr3 arrays [blocks, planes, n], a chunk a plane."""
    import tensorstore as ts

    blocks, n = order["blocks"], order["plane_bytes"] // 4
    context = {
        "file_io_concurrency": {"limit": 4},
        "file_io_mode": {"mode": "direct"},
        "file_io_sync": False,
        "file_io_locking": {"mode": "none"},
        "cache_pool": {"total_bytes_limit": 0},
        "data_copy_concurrency": {"limit": 2},
    }
    folders = [Path(order["folder"], name) for name in ("tensorstore-a", "tensorstore-b")]
    source, target = (
        ts.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": f"{folder}/"},
                "store_data_equal_to_fill_value": True,
            },
            context=ts.Context(context),
            create=True,
            dtype=ts.float32,
            shape=[blocks, PLANES, n],
            chunk_layout=ts.ChunkLayout(chunk_shape=[1, 1, n]),
        ).result()
        for folder in folders
    )
    ring = huge(RING * PLANES * n * 4).view(np.float32).reshape(RING, PLANES, n)

    def sync() -> None:
        for path in folders[1].rglob("*"):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def read(i: int) -> Callable[[], None]:
        done = ts.array(ring[i % RING]).write(source[i])

        def wait() -> None:
            done.result()

        return wait

    def write(i: int, _: None) -> Callable[[], Any]:
        return target[i].write(ring[i % RING], can_reference_source_data_indefinitely=True).result

    rng = np.random.default_rng(0)
    for i in range(blocks):
        ring[i % RING] = rng.random((PLANES, n), np.float32)
        source[i].write(ring[i % RING]).result()
    os.sync()
    return operations(blocks, read, write, sync)


def ours(order: dict[str, Any]) -> dict[str, Callable]:
    """fzero's store of three leaves, a chunk a plane."""
    import torch

    from fzero import offload

    blocks, n = order["blocks"], order["plane_bytes"] // 4
    buffers, disk = offload.BufferPool(2 * RING * PLANES * order["plane_bytes"]), offload.DiskIO()
    leaves = {name: offload.LeafFiles((blocks, n), torch.float32, stacked=True) for name in ("master", "m", "v")}
    place, verify = Path(order["folder"], order["contender"]), "unchecked" not in order["contender"]
    store, steps = offload.open_store(place, leaves, streams=(buffers, disk), verify=verify), itertools.count()

    def read(i: int) -> Callable[[], list]:
        readings = [store.read(name, i) for name in leaves]

        def wait() -> list:
            for reading in readings:
                reading.wait()
            return [reading.buffer for reading in readings]

        return wait

    def write(i: int, memory: list | None) -> Callable[[], None]:
        store.begin()
        memory = memory or [buffers.allocate((n,), torch.float32, disk.busy) for _ in leaves]
        pending = [store.write(name, i, None, buffer) for name, buffer in zip(leaves, memory)]
        return lambda: [p.wait() for p in pending]

    def commit() -> None:
        store.commit(next(steps), {})

    for i in range(blocks):
        memory = [buffers.allocate((n,), torch.float32, disk.busy) for _ in leaves]
        for buffer in memory:
            buffer.view.normal_()
        write(i, memory)
        del memory, buffer
    commit()
    return operations(blocks, read, write, commit)


def ours_training(order: dict[str, Any]) -> dict[str, Callable]:
    """{"step": batch number -> loss, and the cost of the update with its commit}: compiled, the optimizer's states on
    the disk."""
    import torch

    import fzero
    from fzero import models, offload, optim
    from fzero.core import precision, pytree
    from fzero.train.update.offloaded import StreamedUpdate

    torch.set_num_threads(order["threads"])
    config, dtype = problem.Config(**order["config"]), order["dtype"]
    low = torch.bfloat16
    policies = {
        "fp32": precision.fp32(),
        "bf16": precision.bf16(),
        "bf16-states": precision.Policy(dtype, param=low, compute=low, state=low),
    }
    policy, mesh = policies[dtype], fzero.one_process()
    model = models.llama(models.LlamaConfig(**{**order["config"], "tied": False}))
    tx = optim.adamw(
        problem.LR, b1=problem.BETA_1, b2=problem.BETA_2, eps=problem.EPS, weight_decay=problem.WEIGHT_DECAY
    )
    plan = fzero.zero_plan(3, model, mesh, offload=order["offload"], policy=policy)
    place, verify = Path(order["folder"], order["contender"]), "unchecked" not in order["contender"]
    space = offload.Nvme(place, buffer_bytes=order["buffer_bytes"], verify=verify)
    update, begun = StreamedUpdate.run, {}

    def stamped(*given: Any) -> Any:
        begun.update(counters())
        return update(*given)

    StreamedUpdate.run = stamped  # a step ends with its update and commit; it takes the method when it is made
    train_step = fzero.make_train_step(model, tx, plan, execution=fzero.Execution(compiled=True), nvme=space)
    params = pytree.from_named(
        {name: torch.from_numpy(w) for name, w in problem.weights(config, order["seed"]).items()}, plan.like
    )
    state = fzero.init_state(params, tx, plan, seed=0, nvme=space)
    del params

    def step(number: int) -> dict[str, float]:
        nonlocal state
        batch = problem.batch_at(config, order["batch"], order["seed"], number)
        state, metrics = train_step(state, {name: torch.from_numpy(x) for name, x in batch.items()})
        return since(begun, "optimizer_") | {"loss": float(metrics.loss)}

    return {"step": step}


# The processes that serve the contenders.


def serve(engines: dict[str, Callable], versions: Callable[[], dict[str, str]]) -> None:
    """Answer the driver's lines until they end: the first is the order, each further one {"op", "argument"}; replies
    are JSON."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to stderr
    order = json.loads(sys.stdin.readline())
    try:
        ops = engines[order["section"]](order)
        replies.write(json.dumps({"versions": versions()}) + "\n")
        for line in sys.stdin:
            asked = json.loads(line)
            before = counters()
            said = ops[asked["op"]](asked["argument"]) or {}
            replies.write(json.dumps(since(before) | said) + "\n")
    except (ImportError, ValueError) as error:
        replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


def serve_here() -> None:
    """Serve what runs in our own environment."""

    def disk(order: dict[str, Any]) -> dict[str, Callable]:
        return {"raw": raw, "tensorstore": tensorstore}.get(order["contender"], ours)(order)

    def versions() -> dict[str, str]:
        import tensorstore
        import torch

        return {
            "torch": torch.__version__,
            "tensorstore": getattr(tensorstore, "__version__", "unknown"),
            "numpy": np.__version__,
        }

    serve({"disk": disk, "steps": ours_training}, versions)


if __name__ == "__main__":
    serve_here()
