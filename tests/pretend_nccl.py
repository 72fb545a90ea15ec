"""NCCL for ranks on pretend GPUs (pretend_gpu.py): its collectives on gloo, with the order that NCCL's have.

    with pretend() as seen, nccl():
        state, metrics = train_step(state, batch)     # on the mesh `on_gpus(mesh)`

A collective runs on a stream of its group, behind what the current stream was given before it; `Work.wait()` makes the
current stream wait for it, and not the host. Gloo computes the values at once.
"""

import contextlib
import dataclasses
import datetime
import itertools

import pretend_gpu
import torch.distributed as dist
from pretend_gpu import Stream, under
from torch.utils._python_dispatch import _disable_current_modes

from fzero.comm import communicator, rank_tables

STARTS = itertools.count()  # of the context below, the same on all ranks


class Work:
    """A collective under way, which keeps its tensors until it is waited for, as PyTorch's does."""

    def __init__(self, event, tensors):
        self.event, self.tensors = event, tensors

    def wait(self):
        Stream(number=pretend_gpu.WHOLE.current).wait_event(self.event)
        self.tensors = None


class Message(Work):
    """A message under way."""

    def __init__(self, event, x, moving):
        super().__init__(event, [x])
        self.moving = moving

    def wait(self):
        self.moving.wait()
        super().wait()


def on_gpus(mesh):
    """The mesh of a rank with NCCL between the GPUs in place of gloo between the hosts."""

    def there(axis):
        link = axis.communicator
        options = {"ledger": link.ledger, "agreement": link.agreement, "group": link.group}
        moved = communicator.Communicator(link.axis, link.ranks, transport="nccl", **options)
        return axis._replace(communicator=moved)

    return dataclasses.replace(mesh, axes=tuple(there(a) if a.communicator else a for a in mesh.axes))


@contextlib.contextmanager
def nccl():
    """A context in which torch.distributed takes tensors of the pretend GPU."""
    streams, before, start_number = {}, [], next(STARTS)

    def start(group, reads, writes, run):
        whole = pretend_gpu.WHOLE
        stream = streams.setdefault(id(group), Stream())
        stream.wait_stream(Stream(number=whole.current))
        with whole.on_stream(stream):
            whole.launch([under(x) for x in reads], [under(x) for x in writes])
            event = stream.record_event()
            whole.record(run, reads, writes)
        with _disable_current_modes():
            run()
        return Work(event, [*reads, *writes])

    def into(plain):
        def collective(out, x, group=None, async_op=False):
            return start(group, [x], [out], lambda: plain(under(out), under(x), group=group))

        return collective

    def all_reduce(x, group=None, async_op=False):
        return start(group, [x], [x], lambda: sum_all(under(x), group=group))

    def messages(ops):
        reads = [op.tensor for op in ops if op.op is dist.isend]
        writes = [op.tensor for op in ops if op.op is dist.irecv]
        group = ops[0].group

        def run():
            bare = [dist.P2POp(op.op, under(op.tensor), group=group, group_peer=op.group_peer) for op in ops]
            for work in send_all(bare):
                work.wait()

        return [start(group, reads, writes, run)]

    class Pair:
        """Two ranks with a stream of their own; what is received has arrived in the memory when it is waited for."""

        def __init__(self, store, number):
            # Of one mesh there are several on GPUs here: each end counts how often it has opened this channel.
            times = store.add(f"opened/{start_number}/{number}", 1)
            own = dist.PrefixStore(f"start/{start_number}/{times}", store)
            self.backend = dist.ProcessGroupGloo(own, number, 2, datetime.timedelta(seconds=60))
            self.stream = Stream()

        def start(self, method, x, other, reads, writes):
            whole = pretend_gpu.WHOLE
            self.stream.wait_stream(Stream(number=whole.current))
            with whole.on_stream(self.stream):
                whole.launch([under(y) for y in reads], [under(y) for y in writes])
                event = self.stream.record_event()
            with _disable_current_modes():
                return Message(event, x, method([under(x)], other, 0))

        def send(self, tensors, other, tag):
            return self.start(self.backend.send, tensors[0], other, tensors, [])

        def recv(self, tensors, other, tag):
            return self.start(self.backend.recv, tensors[0], other, [], tensors)

    sum_all, send_all = dist.all_reduce, dist.batch_isend_irecv
    places = [
        (communicator, "_all_gather", into(communicator._all_gather)),
        (communicator, "_reduce_scatter", into(communicator._reduce_scatter)),
        (dist, "all_reduce", all_reduce),
        (dist, "batch_isend_irecv", messages),
        (rank_tables, "pair_over_nccl", Pair),
    ]
    for owner, name, instead in places:
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, instead)
    try:
        yield
    finally:
        for place in before:
            setattr(*place)
