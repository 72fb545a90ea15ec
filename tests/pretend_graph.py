"""CUDA graphs on the pretend GPU (pretend_gpu.py): what is given to a stream while it records runs at each replay, on
the memory that it was recorded with, and with no Python of fzero in between.

So a replay shows what was baked in: a number of the host, a tensor that has moved since, a batch that was not copied.
Recording computes nothing that lasts: memory that was there before has its bytes again, and that of the graph is filled
with ones until the first replay. What a GPU refuses to record is refused: a wait of the host, work that comes behind
another stream's, and a stream that is left with work.
"""

import torch
from torch.utils._python_dispatch import _disable_current_modes


class Graph:
    """A torch.cuda.CUDAGraph."""

    def __init__(self, whole):
        self.whole, self.runs, self.touched, self.replays = whole, [], {False: {}, True: {}}, 0
        self.accesses, self.saved, self.own, self.streams = {}, {}, {}, set()
        self.memory, self.ended = None, False

    def pool(self):
        assert self.ended
        return self.memory

    def reset(self):
        """Of a graph whose recording failed PyTorch gives nothing back."""
        if self.ended:
            self.whole.release_pool(0, self.memory)
        self.ended = False

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
            self.whole.refused = "dependency created on uncaptured work in another stream"
            raise RuntimeError(self.whole.refused)

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


class recording:
    """torch.cuda.graph: a context in which `graph` records what is given to `stream`.

    As in 2.11 and later: where a recording cannot be ended, the stream stays the current one, and the allocator takes
    it to be under way.
    """

    def __init__(self, graph, pool=None, *, stream, capture_error_mode="global"):
        self.graph, self.pool, self.stream, self.whole = graph, pool, stream, graph.whole

    def __enter__(self):
        whole = self.whole
        for clock in [*whole.clocks.values()]:
            whole.wait("synchronize", clock)
        self.clocks = {number: dict(clock) for number, clock in whole.clocks.items()}
        self.host = dict(whole.host)
        self.before = whole.current
        whole.streams[whole.thread] = self.stream.number
        self.graph.memory = self.pool
        whole.pools[self.pool] = whole.pools.get(self.pool, 0) + 1
        whole.allocating.append(self.pool)
        self.graph.streams, whole.recording, whole.refused = {self.stream.number}, self.graph, ""

    def __exit__(self, *raised):
        self.capture_end()
        self.whole.streams[self.whole.thread] = self.before

    def capture_end(self):
        whole, graph = self.whole, self.graph
        own = whole.clocks[self.stream.number]
        left = [s for s in graph.streams if whole.clocks[s].get(s, 0) > own.get(s, 0)]
        whole.recording = None
        graph.end()
        for number, clock in self.clocks.items():
            whole.clocks[number].clear()
            whole.clocks[number].update(clock)
        whole.host.clear()
        whole.host.update(self.host)
        if whole.refused:
            raise RuntimeError(f"CUDA error: operation failed due to a previous error during capture: {whole.refused}")
        if left:
            raise RuntimeError(f"capturing stream has unjoined work: of stream {left}")
        whole.allocating.remove(self.pool)
        graph.ended = True
