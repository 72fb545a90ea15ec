"""Records of steps: what a step of few tokens calls, repeated without Python, for shapes that come again."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.call_record import CallRecord, record_calls
from fzero.core.device import is_fake, kind_of
from fzero.core.pytree import Tree
from fzero.generate.programs import LayerPrograms
from fzero.kernels import RECORDED_LOOPS

USES = 2  # steps of a shape by programs, before it is recorded
RECORDED_TOKENS = 32  # of all records, of the shapes used last: they keep what a step makes, which a plan counts

StepCall = Callable[..., Sequence[Tensor]]
Memory = list[tuple[Any, int]]  # values, and where the numbers of tensors lie


def memory_of(tree: Tree) -> Memory:
    """The leaves of a tree. A tensor has other memory after `x.data = y`, which a record does not see."""
    return [(x, x.data_ptr() if isinstance(x, Tensor) and not is_fake(x) else 0) for x in pytree.leaves(tree)]


def same_memory(a: Memory, b: Memory) -> bool:
    """Whether the leaves are the same, where they were."""
    return len(a) == len(b) and all(x is y and p == q for (x, p), (y, q) in zip(a, b))


class StepRecords:
    """The records of steps over the same parameters and pages, whose layers are programs: no step needs values."""

    def __init__(self, programs: LayerPrograms) -> None:
        self.programs, self.lock = programs, threading.Lock()
        self.source: Memory = []
        self.uses = Counter[Any]()
        self.records = OrderedDict[Any, CallRecord | None]()

    def run(self, source: Memory, call: StepCall, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """call(*inputs); source: what it reads and writes beside them."""
        serves = len(inputs[0]) <= RECORDED_TOKENS and kind_of(inputs[0]) == "cpu" and not is_fake(inputs[0])
        if not serves or not self.lock.acquire(blocking=False):  # a record has one memory, which another thread uses
            return call(*inputs)
        try:
            return self.run_alone(source, call, inputs)
        finally:
            self.lock.release()

    def run_alone(self, source: Memory, call: StepCall, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """`run` by the thread that uses the records."""
        if not same_memory(source, self.source):
            self.source = source
            self.uses.clear()
            self.records.clear()
        key = torch.get_num_threads(), *(x.shape for x in inputs)
        if key not in self.records and self.uses[key] >= USES:
            while len(inputs[0]) + sum(shapes[0].numel() for _, *shapes in self.records) > RECORDED_TOKENS:
                self.uses.pop(self.records.popitem(last=False)[0])
            self.records[key] = record_calls(call, inputs, RECORDED_LOOPS)
            if (record := self.records[key]) is not None:
                return [x.clone() for x in record.outputs]
        if (record := self.records.get(key)) is not None:
            self.records.move_to_end(key)
            return record(*inputs)
        before = self.programs.direct_calls
        out = call(*inputs)
        self.uses[key] += self.programs.direct_calls == before
        return out
