"""Tests on several processes: `run(n, fn, *args, mesh={"dp": n})` calls `fn(mesh, *args)` on each of n ranks over gloo.

The ranks are persistent: a pool of each size starts when first asked for and serves all cases of the session. They are
forked from one server that has torch and fzero loaded, so that a pool costs milliseconds after the first. After an
error on any rank the pool is thrown away and the next case starts another, as messages may be left in flight.
"""

import atexit
import contextlib
import datetime
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import sys
import time
import traceback
import warnings

import pytest
import torch.distributed as dist

GRACE_S = 3.0  # for the other ranks to end after the first error
# With all that a step and a checkpoint import, and what PyTorch imports when first asked for a transform, a trace, a
# compiled graph: seconds for each rank of each pool.
PRELOAD = [
    "ranks",
    "fzero.checkpoint.restore_state",
    "fzero.checkpoint.save_state",
    "fzero.core.compile",
    "fzero.models",
    "fzero.optim",
    "fzero.run.setup.build",
    "fzero.run.measure.live_bytes",
    "fzero.sharding",
    "fzero.train.step",
    "fzero.train.update",
    "torch._dynamo",
    "torch._decomp.decompositions_for_jvp",
    "torch._inductor.compile_fx",
]
_POOLS = {}


def run(n, fn, *args, mesh=None, timeout_s=120.0, fresh=False):
    """The results of `fn(mesh, *args)` by rank, on a mesh of these sizes (None: {"dp": n}) whose ledger is empty.

    fn: a function at the top of a module. An error on a rank is raised here, with that rank's traceback as a note; a
    rank that does not return within `timeout_s` is killed with its pool, and TimeoutError names it. fresh: a pool of
    its own, ended afterwards, for a test that ends a rank or leaves messages behind; there the result of a rank that
    ended is `Ended(exit code)`."""
    sizes = {"dp": n} if mesh is None else mesh
    if fresh:
        with contextlib.closing(_Pool(n)) as pool:
            return pool.run(fn, args, sizes, timeout_s, may_end=True)
    if n not in _POOLS:
        _POOLS[n] = _Pool(n)
    try:
        return _POOLS[n].run(fn, args, sizes, timeout_s)
    except BaseException:
        _POOLS.pop(n).close(grace_s=0.0)
        raise


class Ended:
    """In place of a result: the rank ended with this exit code."""

    def __init__(self, code):
        self.code = code

    def __repr__(self):
        return f"Ended({self.code})"


class _Pool:
    """n processes, each waiting for work at its pipe; their store is here, so that it outlives any of them."""

    def __init__(self, n):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        _start_server()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes, self.processes = [], []
        for rank in range(n):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, n, self.store.port, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, fn, args, sizes, timeout_s, may_end=False):
        job = pickle.dumps((fn, args, sizes))
        for pipe in self.pipes:
            pipe.send_bytes(job)
        results, first = {}, None
        end = time.monotonic() + timeout_s
        while len(results) < len(self.pipes) and time.monotonic() < end:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in results}
            for pipe in multiprocessing.connection.wait(list(waiting), max(0.0, end - time.monotonic())):
                rank = waiting[pipe]
                ok, results[rank] = self._answer(rank, may_end)
                # A rank that complains of another one is not the reason.
                if not ok and (first is None or type(first).__name__ == "RankError"):
                    first = results[rank]
                    end = min(end, time.monotonic() + GRACE_S)
        if first is not None:
            raise first
        missing = [str(rank) for rank in range(len(self.pipes)) if rank not in results]
        if missing:
            raise TimeoutError(f"no answer within {timeout_s:g} s from rank {', '.join(missing)} of {len(self.pipes)}")
        return [results[rank] for rank in range(len(self.pipes))]

    def _answer(self, rank, may_end):
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            return may_end, Ended(code) if may_end else RuntimeError(
                f"rank {rank} of {len(self.pipes)} ended with exit code {code}"
            )

    def close(self, grace_s=5.0):
        for pipe in self.pipes:
            pipe.close()  # which ends a rank that waits for work
        end = time.monotonic() + grace_s
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
            process.join()


def _start_server():
    """Start the fork server where it is not running; by itself it looks for modules in other places than this process
    (Python 3.11)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("PYTHONSAFEPATH", "1")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else Inductor starts a pool of its own on every rank
        multiprocessing.forkserver.ensure_running()


@atexit.register
def _close_all():
    while _POOLS:
        _POOLS.popitem()[1].close()


def _work(rank, n, port, pipe):
    import torch

    from fzero.sharding import make_mesh

    torch.set_num_threads(1)
    gc.freeze()  # else the first full collection writes to, and so copies, every page shared with the server
    warnings.simplefilter("error")
    for message in ("`torch.jit.script`", "`torch.jit.script_method`"):  # raised in the import of PyTorch's own modules
        warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=datetime.timedelta(seconds=60))
    meshes = {}
    with contextlib.suppress(EOFError, BrokenPipeError):  # the session ended
        while True:
            job = pipe.recv_bytes()
            try:
                fn, args, sizes = pickle.loads(job)
                key = tuple(sorted(sizes.items()))
                if key not in meshes:
                    meshes[key] = make_mesh(sizes, device="cpu")
                meshes[key].ledger.clear()
                answer = pickle.dumps((True, fn(meshes[key], *args)))
            except BaseException as error:
                answer = _pickled(error, rank, n)
            pipe.send_bytes(answer)


def _pickled(error, rank, n):
    note = f"on rank {rank} of {n}:\n{''.join(traceback.format_exception(error))}"
    try:
        error.add_note(note)
        answer = pickle.dumps((False, error))
        pickle.loads(answer)
    except Exception:
        answer = pickle.dumps((False, RuntimeError(note)))
    return answer
