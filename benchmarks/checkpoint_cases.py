"""The operations that checkpoints.py times: the disk's own, fzero's, and those of torch.distributed.checkpoint and
safetensors.

Each takes the number of the round, prepares, returns what it took, and removes what the next ones have no use for.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvme import counters, evict, fio, huge, since
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fzero
from fzero import checkpoint, models, optim
from fzero.core import precision, pytree
from fzero.core.files import sync_folder
from fzero.sharding.slices import local_slice
from fzero.train.state import meta_state, state_specs

Op = Callable[[int], dict[str, float]]  # round -> what it took
STATES = {"fp32": precision.fp32, "bf16": precision.bf16}  # of the parameters; master weights and moments are float32


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """What a piece of work costs."""
    before = counters()
    work()
    return since(before)


def llama(gigabytes: float, dtype: str) -> tuple[models.Model, Callable[..., tuple[Any, Any]]]:
    """A model whose training state has about so many bytes, and a function (mesh) -> (that state on the meta device,
    its specs)."""
    policy, width = STATES[dtype](), 1024 if gigabytes >= 1 else 512
    tx, sizes = (
        optim.adamw(1e-3),
        {"d_model": width, "n_heads": width // 64, "n_kv_heads": width // 128, "d_ff": width * 11 // 4},
    )

    def made(layers: int) -> models.Model:
        return models.llama(models.LlamaConfig(vocab_size=8 * width, n_layers=layers, max_len=64, tied=False, **sizes))

    def parts(model: models.Model, mesh: fzero.Mesh) -> tuple[Any, Any]:
        plan = fzero.zero_plan(3, model, mesh, policy=policy)
        return meta_state(plan, tx), state_specs(plan, tx)

    one, two = (nbytes(parts(made(n), fzero.one_process())[0]) for n in (1, 2))
    model = made(max(1, round((gigabytes * 1e9 - one) / (two - one)) + 1))
    return model, lambda mesh: parts(model, mesh)


def nbytes(tree: Any) -> int:
    """The bytes of all elements of a tree."""
    return sum(leaf.nbytes for leaf in pytree.leaves(tree))


def there(tree: Any, fill: bool = False) -> Any:
    """Tensors of a tree's shapes in memory that was touched; of some values each where `fill`."""

    def make(leaf: torch.Tensor) -> torch.Tensor:
        new = torch.zeros(leaf.shape, dtype=leaf.dtype)
        return new.normal_() if fill and leaf.dtype.is_floating_point else new

    return pytree.map(make, tree)


def copied(into: Any, state: Any) -> float:
    """Seconds that a copy of the state takes: the bar of the time that a save blocks."""
    begin = time.perf_counter()
    pytree.map(torch.Tensor.copy_, into, state)
    return time.perf_counter() - begin


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], name: str) -> None:
    """Raise ValueError naming the leaf that is not what it should be."""
    for leaf, value in wanted.items():
        if not torch.equal(found[leaf], value):
            raise ValueError(f"{name}: {leaf} is not what was saved")


def settled(folder: Path) -> None:
    """Wait until nothing is being written, and have the folder's files out of memory."""
    os.sync()
    resident = evict(folder)
    if resident > 0.001:
        raise ValueError(
            f"{resident:.1%} of the files are in memory after their eviction; the page cache would flatter"
        )


def move(kind: str, path: Path, size: int, threads: int, piece: int, ring: Any) -> None:
    """Read or write a file of `size` bytes from its beginning, durably, past the page cache."""
    create = os.O_CREAT | os.O_EXCL if kind == "new" else 0
    fd = os.open(path, (os.O_RDONLY if kind == "read" else os.O_RDWR | create) | os.O_DIRECT, 0o644)
    if kind == "new":
        os.posix_fallocate(fd, 0, size)

    def some(k: int) -> None:
        view, call = memoryview(ring[k * piece : (k + 1) * piece]), os.preadv if kind == "read" else os.pwritev
        for at in range(k * piece, size, threads * piece):
            expected = min(piece, size - at)
            if call(fd, [view[:expected]], at) != expected:
                raise OSError(f"a short transfer at {at}")

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(some, range(threads)))
    if kind != "read":
        os.fdatasync(fd)
    os.close(fd)
    if kind == "new":
        sync_folder(path.parent)


def disk(folder: Path, total: int, settings: dict[str, Any]) -> dict[str, Op]:
    """The anchors. `settings` gets what was found best."""
    size, ring = -(-total // (48 << 20)) * (48 << 20), huge(64 << 20)
    read, written, new = (folder / name for name in ("a.bin", "b.bin", "c.bin"))
    for path in (read, written):
        move("new", path, size, 2, 8 << 20, ring)
    order = {"blocks": 1, "plane_bytes": size // 3, "folder": str(folder)}

    def raw(kind: str, size: int, setting: tuple[int, int]) -> dict[str, float]:
        new.unlink(missing_ok=True)
        row = timed(
            lambda: move(
                kind, {"read": read, "overwrite": written, "new": new}[kind], size, setting[0], setting[1] << 20, ring
            )
        )
        new.unlink(missing_ok=True)
        return row | {"bytes": size}

    def by_fio(kind: str) -> dict[str, float]:
        if kind == "new":
            written.unlink()
        return fio("read" if kind == "read" else "write", order) | {"bytes": size}

    ops: dict[str, Op] = {}
    for kind, title in (("read", "read"), ("overwrite", "write"), ("new", "write new")):
        tried = {}
        for setting in itertools.product((1, 2, 4), (4, 8, 16)):
            settled(folder)
            tried[setting] = raw(kind, min(size, 480 << 20), setting)["s"]
        best = min(tried, key=tried.get)
        settings[title] = {"threads": best[0], "piece_mib": best[1]}
        ops[f"{title} (raw)"] = lambda _, kind=kind, best=best: raw(kind, size, best)
        if shutil.which("fio"):
            ops[f"{title} (fio)"] = lambda _, kind=kind: by_fio(kind)
    return ops


@contextlib.contextmanager
def ours(folder: Path, state: Any, spare: Any, at: Callable, sections: list[str]) -> Iterator[dict[str, Op]]:
    """fzero's operations."""
    like, whole = at(fzero.one_process())
    homes = {kind: folder / f"fzero-{kind}" for kind in ("recycled", "new")}
    kept = {kind: checkpoint.Writer(home, keep_last=1 if kind == "recycled" else None) for kind, home in homes.items()}
    steps = itertools.count(1)
    named = pytree.named_leaves(state)

    def save(kind: str, beside: Callable | None = None) -> dict[str, float]:
        writer, blocked, step = kept[kind], 0.0, next(steps)
        memcpy = copied(spare, state)

        def work() -> None:
            nonlocal blocked
            begin = time.perf_counter()
            writer.save(state, step=step, specs=whole)
            blocked = time.perf_counter() - begin
            if beside is not None:
                beside(writer.current.finished.is_set)
            writer.wait()

        row = timed(work)
        if kind == "new":
            checkpoint.remove(homes[kind], step)
        return row | {"blocked_s": blocked, "memcpy_s": memcpy, "after_s": row["s"] - blocked}

    def load(i: int, out: Any) -> dict[str, float]:
        path, found = checkpoint.latest(homes["recycled"]), None
        if i == 0 and out is not None:
            pytree.map(torch.Tensor.zero_, out)

        def work() -> None:
            nonlocal found
            found = checkpoint.restore(path, like, out=out)

        row = timed(work)
        if i == 0:
            same(pytree.named_leaves(found), named, "fzero")
        return row

    def piece(i: int, sizes: dict[str, int]) -> dict[str, float]:
        mesh = fzero.sharding.fake_mesh(sizes, i % math.prod(sizes.values()))
        part, specs = at(mesh)
        out, path = there(part), checkpoint.latest(homes["recycled"])
        row = timed(lambda: checkpoint.restore(path, part, specs=specs, mesh=mesh, out=out))
        if i == 0:
            windows = {
                name: local_slice(named[name].shape, spec, mesh) for name, spec in pytree.named_leaves(specs).items()
            }
            wanted = {name: cut(named[name], *window) for name, window in windows.items()}
            same(pytree.named_leaves(out), wanted, "fzero, a slice")
        return row | {"bytes": nbytes(out)}

    for _ in range(2):
        save("recycled")
    kept["new"].buffers = kept["recycled"].buffers  # they take turns
    ops: dict[str, Op] = {}
    if "save" in sections:
        save("new")
        ops |= {"save new": lambda _: save("new"), "save recycled": lambda _: save("recycled")}
    if "load" in sections:
        ops |= {"load new": lambda i: load(i, None), "load out": lambda i: load(i, spare)}
    if "slices" in sections:
        ops |= {"slice dp4": lambda i: piece(i, {"dp": 4}), "slice dp2 x tp2": lambda i: piece(i, {"dp": 2, "tp": 2})}
    if "training" in sections:
        ops |= {"training recycled": lambda _: beside(lambda products: save("recycled", products))}
    yield ops
    for writer in kept.values():
        writer.close()


def cut(x: torch.Tensor, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    """The elements [start, start + size)."""
    return x[tuple(slice(at, at + n) for at, n in zip(start, size))]


def beside(save: Callable[[Callable], dict[str, float]]) -> dict[str, float]:
    """A save beside matrix products on this thread, which are counted with and without it."""
    a, b, c = (torch.randn(768, 768) for _ in range(3))

    def rate(over: Callable[[], bool]) -> tuple[float, float]:
        begin, n = time.perf_counter(), 0
        while not over():
            torch.mm(a, b, out=c)
            n += 1
        seconds = time.perf_counter() - begin
        return n / seconds, seconds

    def idle() -> float:
        until = time.perf_counter() + 0.5
        return rate(lambda: time.perf_counter() > until)[0]

    slowed, seconds, before = 0.0, 0.0, idle()

    def products(over: Callable[[], bool]) -> None:
        nonlocal slowed, seconds
        slowed, seconds = rate(over)

    row = save(products)
    alone = (before + idle()) / 2
    return row | {"of_idle": slowed / alone, "lost_s": row["blocked_s"] + seconds * (1 - slowed / alone)}


@contextlib.contextmanager
def peers(
    folder: Path, state: Any, spare: Any, at: Callable, sections: list[str], settings: dict[str, Any]
) -> Iterator[dict[str, Op]]:
    """The operations of torch.distributed.checkpoint and safetensors."""
    named, into = pytree.named_leaves(state), pytree.named_leaves(spare)
    stager, number = DefaultStager(StagingOptions(False, False, False, False)), itertools.count()
    held, file = folder / "dcp-held", folder / "held.safetensors"

    def save(threads: int, beside: Callable | None = None, path: Path | None = None) -> dict[str, float]:
        blocked, place, memcpy = 0.0, path or folder / f"dcp-{next(number)}", copied(spare, state)

        def work() -> None:
            nonlocal blocked
            writer, begin = dcp.FileSystemWriter(place, thread_count=threads, sync_files=True), time.perf_counter()
            done = dcp.async_save(named, storage_writer=writer, async_stager=stager, no_dist=True)
            blocked = time.perf_counter() - begin
            if beside is not None:
                beside(done.done)
            done.result()

        row = timed(work)
        if path is None:
            shutil.rmtree(place)
        return row | {"blocked_s": blocked, "memcpy_s": memcpy, "after_s": row["s"] - blocked}

    def load(i: int) -> dict[str, float]:
        if i == 0:
            pytree.map(torch.Tensor.zero_, spare)
        row = timed(lambda: dcp.load(into, checkpoint_id=held, no_dist=True))
        if i == 0:
            same(into, named, "dcp")
        return row

    def piece(i: int) -> dict[str, float]:
        part, specs = at(fzero.sharding.fake_mesh({"dp": 4}, i % 4))
        out, spec_of = pytree.named_leaves(there(part)), pytree.named_leaves(specs)
        dist.init_process_group("fake", rank=i % 4, world_size=4, store=FakeStore())
        try:
            mesh, mine = dist.device_mesh.init_device_mesh("cpu", (4,)), {}
            for name, x in out.items():
                dims = [dim for dim, axes in enumerate(spec_of[name].dims) if "dp" in axes]
                whole = {"shape": named[name].shape, "stride": named[name].stride()}
                mine[name] = DTensor.from_local(
                    x, mesh, [Shard(dims[0]) if dims else Replicate()], run_check=False, **whole
                )
            row = timed(lambda: dcp.load(mine, checkpoint_id=held, no_dist=True))
        finally:
            dist.destroy_process_group()
        if i == 0:
            same_at = fzero.sharding.fake_mesh({"dp": 4}, 0)
            same(
                out,
                {name: cut(x, *local_slice(x.shape, spec_of[name], same_at)) for name, x in named.items()},
                "dcp, a slice",
            )
        return row | {"bytes": sum(x.nbytes for x in out.values())}

    def save_tensors(path: Path) -> dict[str, float]:
        def work() -> None:
            save_file(named, path)
            with open(path, "rb") as f:
                os.fsync(f.fileno())
            sync_folder(path.parent)

        row = timed(work)
        if path != file:
            path.unlink()
        return row

    def load_tensors(i: int) -> dict[str, float]:
        found: dict[str, torch.Tensor] = {}

        def work() -> None:
            found.update(load_file(file))
            for x in found.values():
                x.reshape(-1).view(torch.uint8)[::4096].sum()

        row = timed(work)
        if i == 0:
            same(found, named, "safetensors")
        return row

    save(1, path=held)  # and the stager has its memory
    tried = {}
    for threads in (1, 2, 4):
        settled(folder)
        tried[threads] = save(threads)["s"]
    best = settings["dcp threads"] = min(tried, key=tried.get)
    ops: dict[str, Op] = {}
    if "save" in sections:
        ops |= {
            "dcp save": lambda _: save(best),
            "safetensors save": lambda _: save_tensors(folder / "other.safetensors"),
        }
    if "load" in sections:
        save_tensors(file)
        ops |= {"dcp load": load, "safetensors load": load_tensors}
    if "slices" in sections:
        ops |= {"dcp slice dp4": piece}
    if "training" in sections:
        ops |= {"dcp training": lambda _: beside(lambda products: save(best, products))}
    yield ops
    stager.close()
