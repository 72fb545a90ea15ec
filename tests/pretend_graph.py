"""CUDA graphs on the pretend GPU (pretend_gpu.py): what is given to a stream while it records runs at each replay, on
the memory that it was recorded with, and with no Python of fzero in between.

So a replay shows what was baked in: a number of the host, a tensor that has moved since, a batch that was not copied.
Recording computes nothing that lasts: memory that was there before has its bytes again, and that of the graph is filled
with ones until the first replay. What a GPU refuses to record is refused: a wait of the host, work that comes behind
another stream's, and a stream that is left with work.
"""

import contextlib

import torch
from torch.utils._python_dispatch import _disable_current_modes


class Graph:
    """A torch.cuda.CUDAGraph."""

    def __init__(self, whole):
        self.whole, self.runs, self.touched, self.replays = whole, [], {False: {}, True: {}}, 0
        self.accesses, self.saved, self.own, self.streams = {}, {}, {}, set()

    def pool(self):
        return self

    def replay(self):
        """Run what was recorded; for the clocks it is one kernel of the current stream."""
        assert self.whole.recording is None
        self.whole.launch([*self.touched[False].values()], [*self.touched[True].values()])
        self.replays += 1
        with _disable_current_modes(), torch.no_grad():
            for run in self.runs:
                run()

    # ---- while it is recorded

    def follow(self, stream, before):
        """A stream waits for what another one, `before`, was given."""
        if before in self.streams:
            self.streams.add(stream)
        elif stream in self.streams and before is not None:
            raise RuntimeError("dependency created on uncaptured work in another stream")

    def keep(self, tensors):
        """Remember the bytes of memory that was there before, which is about to be written."""
        for x in tensors:
            storage, memory = x.untyped_storage(), self.whole.memory_of(x)
            kept = self.own if memory is not None and memory.graph is self else self.saved
            if storage._cdata not in kept:
                with _disable_current_modes():
                    kept[storage._cdata] = storage, storage.clone()

    def add(self, run, reads, writes):
        assert self.whole.current in self.streams, "given to a stream that does not record"
        self.keep(writes)
        self.runs.append(run)
        for wrote, tensors in ((False, reads), (True, writes)):
            self.touched[wrote].update((id(x), x) for x in tensors)

    def end(self):
        with _disable_current_modes():
            for storage, before in self.saved.values():
                storage.copy_(before)
            for storage, _ in self.own.values():
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)
        self.saved, self.own, self.accesses = {}, {}, {}


@contextlib.contextmanager
def recording(graph, pool=None, *, stream, capture_error_mode="global"):
    """torch.cuda.graph: a context in which `graph` records what is given to `stream`."""
    whole = graph.whole
    for clock in [*whole.clocks.values()]:
        whole.wait("synchronize", clock)
    clocks, host = {number: dict(clock) for number, clock in whole.clocks.items()}, dict(whole.host)
    graph.streams, whole.recording = {stream.number}, graph
    try:
        with whole.on_stream(stream):
            yield
        own = whole.clocks[stream.number]
        left = [s for s in graph.streams if whole.clocks[s].get(s, 0) > own.get(s, 0)]
        if left:
            raise RuntimeError(f"capturing stream has unjoined work: of stream {left}")
    finally:
        whole.recording = None
        graph.end()
        for number, clock in clocks.items():
            whole.clocks[number].clear()
            whole.clocks[number].update(clock)
        whole.host.clear()
        whole.host.update(host)
