"""A train step as one CUDA graph: recorded once, and replayed by one call in place of its thousands of launches.

A donated step writes the state where it is, so the addresses in a graph stay true. What a plain step makes anew is
written back into fixed memory at the graph's end, and a batch is copied into fixed memory. No number of the host that
changes is in a graph: schedules and keys are computed on the device from the counts of the state.

A step is issued where something looks into it, or where a checkpoint still copies the state, for which the graph could
not wait.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.comm.rank_tables import any_rank
from fzero.core import gpu, gpu_copies, pytree
from fzero.core.pytree import Tree
from fzero.optim import GradientTransformation
from fzero.optim.combine import split_chain
from fzero.optim.norm import Squared
from fzero.sharding import Mesh, Plan
from fzero.train.state import TrainState, expect_alive, hand_over

WARM_UP = 3  # steps on the stream that records, as PyTorch asks before a capture; the times of these decide
# A device that is done as soon as the last operator is issued has waited for the host. Its queue takes 1,024 launches,
# so that the device slows the host of a step with more: 0.9 holds apart what is bound by the device up to 10,000.
SHARE = 0.9
GRAPHS = 4  # shapes of batches; each graph costs a capture, and the memory of what it holds

Step = Callable[[TrainState, Any], tuple[TrainState, Any]]


def refusal_of(plan: Plan, tx: GradientTransformation, donate: bool) -> str:
    """Why steps with these options cannot be captured, "" if they can."""
    scale, offloads = plan.policy.loss_scale, plan.offloads
    offloads += f"{', ' * bool(offloads)}acts={plan.acts}" if not plan.acts.on_device else ""
    gloo = [a.name for a in plan.mesh.axes if a.communicator is not None and a.communicator.transport == "gloo"]
    table = (
        (plan.stages is not None, f"pp={plan.mesh.pp.size}: messages between stages are started by the host"),
        (plan.delayed > 0, 'update="delayed": the two versions of the parameters change places'),
        (not donate, "donate=False: each step makes its state in other memory"),
        (bool(offloads), f"offload {offloads}: the host takes part in a step"),
        (
            scale is not None and scale.at_floor == "raise",
            'the host asks whether the loss scale is at its floor (at_floor="hold" does not)',
        ),
        (
            not split_chain(tx).body.one_pass,
            "the optimizer cannot update in one pass, so that the host asks whether a step is skipped",
        ),
        (bool(gloo), f"the ranks along {', '.join(gloo)} exchange by gloo, on the host"),
    )
    return next((reason for holds, reason in table if holds), "")


class RecordedStep(NamedTuple):
    """The graph of a step for batches of one shape."""

    graph: Any
    addresses: dict[str, int]  # of the leaves of the state
    fixed: dict[str, Tensor]  # the leaves that a plain step makes anew
    batch: Tree
    metrics: Any  # as the step made them, in the graph's memory
    packed: dict[torch.dtype, Tensor]  # the same, one tensor for each dtype
    entries: tuple[dict[Any, Any], dict[Any, Any]]  # of the ledger, before and after

    def serves(self, leaves: dict[str, Tensor]) -> bool:
        """Whether a state with these leaves lies where the graph has it."""
        fixed_match = all(self.addresses[name] == leaf.data_ptr() for name, leaf in self.fixed.items())
        return fixed_match and all(
            name in self.fixed or self.addresses[name] == x.data_ptr() for name, x in leaves.items()
        )


class CapturedStep:
    """A train step that replays `step` on a GPU, with its bits, where that is faster; else it issues it."""

    # The first step and the next `WARM_UP` are issued; if issuing takes at least `SHARE` of their time on any rank, the
    # next one is recorded, on all ranks. A batch of another shape is recorded the second time that it comes. A state
    # that is not the last result (after a rollback) is issued once and recorded again.
    def __init__(self, step: Step, mesh: Mesh, refused: str) -> None:
        self.step, self.mesh, self.refused = step, mesh, refused
        self.news: list[str] = []
        self.captures: bool | None = None  # None: not decided
        self.times: list[tuple[float, float]] = []  # of issued steps: seconds of the host, and of the device
        self.fresh_names: set[str] = set()  # the leaves of the state that a plain step makes anew
        self.warm: set[Any] = set()  # the shapes of batches that were stepped on
        self.recorded: dict[Any, RecordedStep] = {}
        self.last: Any = None  # `step` of the state that was returned last
        self.full = False  # whether it was said that there are GRAPHS graphs

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """The step."""
        if not isinstance(state, TrainState) or state.step.device.type != "cuda" or self.captures is False:
            return self.step(state, batch)
        new, metrics = self.on_gpu(state, batch)
        self.last = new.step
        return new, metrics

    def on_gpu(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """The step on a GPU, issued or replayed: the same on all ranks."""
        if self.refused:
            return self.give_up(self.refused, state, batch)
        watched = any(getattr(watch, "phases", True) for watch in self.mesh.ledger.watches)
        if watched or gpu_copies.has_readers(state.step.device):
            return self.step(state, batch)
        if self.captures is None:
            return self.issue_timed(state, batch)
        expect_alive(state.step)
        leaves, key = pytree.named_leaves(state), shapes_of(batch)
        # Where a restored state lies is chance, and so not asked: it might be the old place on some ranks alone.
        is_current = state.step is self.last and all(recorded.serves(leaves) for recorded in self.recorded.values())
        if not is_current:
            self.recorded.clear()
        if not is_current or key not in self.warm:
            return self.issue(state, batch)
        if key not in self.recorded:
            if len(self.recorded) == GRAPHS:
                return self.issue_extra_shape(key, state, batch)
            failure = self.record(key, state, batch)
            if any_rank(bool(failure), self.mesh):
                return self.give_up(failure or "another rank cannot record its step", state, batch)
        return self.replay(self.recorded[key], state, batch)

    def give_up(self, reason: str, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """Issue this step and all that follow, and say why."""
        self.captures = False
        self.recorded.clear()
        self.news.append(f"capture: steps are issued one by one: {reason}; capture=off is the same without this line")
        return self.step(state, batch)

    def issue_extra_shape(self, key: Any, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """Issue a step on a batch of one shape too many, and say so once."""
        if not self.full:
            self.news.append(f"capture: a step on {text_of(key)} is issued: {GRAPHS} other shapes have a graph already")
        self.full = True
        return self.step(state, batch)

    # ---- issued steps ------------------------------------------------------------------------------------------------

    def issue(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """A plain step on the stream that records, after which the leaves are known that it makes anew."""
        old_leaves = pytree.named_leaves(state)
        inputs = [*old_leaves.values(), *pytree.leaves(batch)]
        with gpu.on_capture_stream(state.step.device, inputs) as outputs:
            new, metrics = self.step(state, batch)
            leaves = pytree.named_leaves(new)
            outputs += [*leaves.values(), *tensors_of(metrics)]
        self.fresh_names |= {name for name, leaf in leaves.items() if leaf.data_ptr() != old_leaves[name].data_ptr()}
        self.warm.add(shapes_of(batch))
        return new, metrics

    def issue_timed(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """A plain step, with its times; the last of them decides whether steps are captured."""
        device = state.step.device
        gpu.synchronize(device)
        begin, first = time.perf_counter(), gpu.mark_time()
        result = self.issue(state, batch)
        issued, last = time.perf_counter() - begin, gpu.mark_time()
        gpu.synchronize(device)
        self.times.append((issued, first.elapsed_time(last) / 1e3))
        if len(self.times) > WARM_UP:
            self.decide()
        return result

    def decide(self) -> None:
        """Decide, as one on all ranks, whether steps are captured; the first step has other work too."""
        host, device = (sum(seconds) / WARM_UP for seconds in zip(*self.times[1:]))
        highest = any_rank(round(1000 * host / device), self.mesh)
        self.captures = highest >= 1000 * SHARE
        decision = "steps are captured" if self.captures else "steps are issued one by one"
        self.news.append(
            f"capture: {decision}: the host issues one in {1e3 * host:.1f} ms of the {1e3 * device:.1f} ms that it "
            "takes"
        )

    # ---- recorded steps ----------------------------------------------------------------------------------------------

    def record(self, key: Any, state: TrainState, batch: Any) -> str:
        """Record the graph of a step; returns why it cannot be, or ""."""
        ledger, leaves = self.mesh.ledger, pytree.named_leaves(state)
        fixed = {name: leaf.clone() for name, leaf in leaves.items() if name in self.fresh_names}
        working = pytree.map_named(lambda name, leaf: fixed[name].detach() if name in fixed else leaf, state)
        addresses = {name: leaf.data_ptr() for name, leaf in (leaves | fixed).items()}
        inputs, start_entries = pytree.map(torch.clone, batch), ledger.entries()

        def work() -> tuple[Any, dict[torch.dtype, Tensor]]:
            new, metrics = self.step(working, inputs)
            packed = pack(tensors_of(metrics))  # one of them may be a leaf of the state
            for name, leaf in pytree.named_leaves(new).items():
                if name in fixed:
                    fixed[name].copy_(leaf)
                elif leaf.data_ptr() != addresses[name]:
                    raise RuntimeError(f"{name} has other memory after the step")
            return metrics, packed

        shared_graph = next((recorded.graph for recorded in self.recorded.values()), None)
        try:
            graph, (metrics, packed) = gpu.record_graph(work, state.step.device, shared_graph)
        except RuntimeError as error:
            return f"a step cannot be recorded: {cause_of(error)}"
        finally:
            entries = start_entries, ledger.entries()
            ledger.repeat(*reversed(entries))  # recording sends nothing
        self.recorded[key] = RecordedStep(graph, addresses, fixed, inputs, metrics, packed, entries)
        return ""

    def replay(self, recorded: RecordedStep, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        """The step by its graph."""
        for name, leaf in pytree.named_leaves(state).items():
            if name in recorded.fixed and leaf.data_ptr() != recorded.addresses[name]:
                recorded.fixed[name].copy_(leaf)
        for buffer, value in zip(pytree.leaves(recorded.batch), pytree.leaves(batch)):
            buffer.copy_(value)
        recorded.graph.replay()
        self.mesh.ledger.repeat(*recorded.entries)

        def leaf_of(name: str, leaf: Tensor) -> Tensor:
            return recorded.fixed[name].detach() if name in recorded.fixed else leaf

        return hand_over(state, pytree.map_named(leaf_of, state)), unpack(recorded.packed, recorded.metrics)


def pop_news(step: Step) -> list[str]:
    """The decisions of a step since the last call, a line each."""
    pending = getattr(step, "news", [])
    lines = [*pending]
    pending.clear()
    return lines


def shapes_of(batch: Any) -> Any:
    """What a graph is recorded for: names, shapes, dtypes and devices of a batch."""
    named = pytree.named_leaves(batch).items()
    return tuple((name, tuple(x.shape), x.dtype, x.device) for name, x in named)


def text_of(key: Any) -> str:
    """The shapes of a batch in words."""
    return ", ".join(f"{name} {list(shape)}" for name, shape, *_ in key)


def cause_of(error: BaseException) -> str:
    """The first line of the first error in the chain, and the line of fzero or of a loss that it came from."""
    while error.__context__ is not None:
        error = error.__context__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    frame = frames[-1]
    file = "/".join(frame.filename.split("/")[-3:])
    return f"{str(error).splitlines()[0]}, in `{frame.line}` ({file}:{frame.lineno})"


# ---- metrics: one tensor for each dtype, of which a copy outlives the next replay ------------------------------------


def map_tensors(change: Callable[[Tensor], Tensor], metrics: Any) -> Any:
    """The metrics with another tensor in the place of each."""

    def map_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Squared):
            return replace(leaf, squares=[(layer, change(square)) for layer, square in leaf.squares])
        return change(leaf)

    return pytree.map(map_leaf, metrics)


def tensors_of(metrics: Any) -> list[Tensor]:
    """The tensors of the metrics, in the order of `map_tensors`."""
    tensors: list[Tensor] = []
    map_tensors(lambda x: tensors.append(x) or x, metrics)
    return tensors


def pack(tensors: list[Tensor]) -> dict[torch.dtype, Tensor]:
    """{dtype: the elements of all tensors of it, one after the other}."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        kinds.setdefault(x.dtype, []).append(x.reshape(-1))
    return {dtype: torch.cat(parts) for dtype, parts in kinds.items()}


def unpack(packed: dict[torch.dtype, Tensor], like: Any) -> Any:
    """Metrics of the structure of `like`, from a copy of what `pack` made of theirs."""
    copies, used = {dtype: flat.clone() for dtype, flat in packed.items()}, dict.fromkeys(packed, 0)

    def next_slice(x: Tensor) -> Tensor:
        begin = used[x.dtype]
        used[x.dtype] += x.numel()
        return copies[x.dtype][begin : used[x.dtype]].view(x.shape)

    return map_tensors(next_slice, like)
