"""Gradients from the backward pass to the optimizer: summed over micro-batches and over ranks, layer by layer.

"fast": micro-batches are added in order, and sums over ranks are made when the plan says so. "canonical": micro-batch j
of data rank r of R has the global number j R + r, and all are added by one balanced binary tree over these numbers: the
same sum for every R that is a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from fzero.comm.collectives import start_all_gather, start_psum, start_psum_scatter
from fzero.comm.messages import bucket_groups, pack, unpack
from fzero.core.gpu_copies import pass_group
from fzero.core.pytree import Tree
from fzero.core.tree_sum import TreeSum
from fzero.sharding.codec import Coder, sum_coded
from fzero.sharding.error_feedback import ErrorFeedback
from fzero.sharding.gradient_sums import Key, SumsAtRest
from fzero.sharding.leaf_plan import Moves, is_coded
from fzero.sharding.plan import Plan
from fzero.sharding.prefetch import LeafGroup

# A value that no job yields, as a job may yield None.
ENDED = object()  # in place of what a job yields


class GradientReducer:
    """Sums the gradients of a step, group by group, in the layout of plan.opt, into the sums at rest."""

    def __init__(
        self,
        plan: Plan,
        stored_sums: SumsAtRest,
        coder: Coder | None = None,
        errors: ErrorFeedback | None = None,
        on_group: Callable[[], None] | None = None,
    ):
        self.mesh, self.accumulate, self.stored_sums = plan.mesh, plan.policy.accumulate, stored_sums
        self.canonical, self.on_group = plan.reduce == "canonical", on_group
        self.reduce, self.coder, self.errors = plan.reduce_dtype, coder, errors
        self.coded = plan.coded_grads
        self.moves = {name: leaf.moves_within_stage for name, leaf in plan.leaves.items()}
        for name in plan.optimizer_sums:  # whose sums over a link the optimizer makes
            (micro_path, end), link = self.moves[name], plan.leaves[name].sum_link
            self.moves[name] = micro_path, tuple(move for move in end if move[1] != link)
        # Sums over micro-batches before the last one: a TreeSum if canonical, else a tensor.
        self.partial_sums: dict[Key, Any] = {}
        self.flying: list[Iterator[Any]] = []
        # With pp the stage before waits for the gradient of its last micro-batch, and would wait for the last sums of
        # every stage behind it. So these go on until the row is over.
        self.long = plan.stages is not None  # whether sums that are made once travel until the end
        self.ending: list[Iterator[Any]] = []  # those

    def reduce_group(
        self,
        group: LeafGroup,
        names: Sequence[str],
        grads: list[Tensor],
        *,
        last: bool,
        shared_leaves: frozenset[str] = frozenset(),
    ) -> None:
        """Take a micro-batch's gradients of the leaves `names` of a group; the list is emptied."""
        if grads:
            pass_group(grads[0].device, group, fetched=False)
        # The group before must be done: the gradients of one group travel while the next are computed, which bounds
        # their memory.
        self.finish()
        self.mesh.ledger.holds("grads", grads)
        self.stored_sums.last = last
        kinds = [(self.moves[name], name in shared_leaves, name in self.coded) for name in names]
        for bucket in bucket_groups(grads, kinds):
            chosen, tensors = [names[i] for i in bucket], [grads[i] for i in bucket]
            # A leaf for which another group still gives a gradient does not end here; canonical sums have a tree per
            # group.
            ends = last and (self.canonical or not kinds[bucket[0]][1])
            job = self.job(group, chosen, tensors, kinds[bucket[0]][0], ends)
            del tensors
            if next(job, None) is not None:
                long = ends and self.ends_long(chosen, kinds[bucket[0]][0])
                (self.ending if long else self.flying).append(job)
        self.stored_sums.fetch_pending()
        if not self.flying and not self.stored_sums.incoming:
            self.stored_sums.offload_small()
        grads.clear()
        if self.on_group is not None:
            self.on_group()

    def ends_long(self, names: Sequence[str], paths: tuple[Moves, Moves]) -> bool:
        """Whether a bucket's last sums are waited for behind the row."""
        micro_path, end = paths
        is_full = bool(end) and all(op != "scatter" for op, _ in micro_path)
        return self.long and is_full and all(self.stored_sums.memory[name].on_device for name in names)

    def finish(self) -> None:
        """Wait for the collectives under way, and add their results."""
        while self.flying:
            self.flying = [job for job in self.flying if next(job, ENDED) is not ENDED]
        self.stored_sums.finish()

    def job(
        self, group: LeafGroup, names: Sequence[str], grads: list[Tensor], paths: tuple[Moves, Moves], ends: bool
    ) -> Iterator[Any]:
        """Reduce one bucket's gradients and add them to their sums; yields when a collective has started."""
        micro_path, end = paths
        values = yield from self.travel(names, grads, micro_path, group.layer)
        grads.clear()
        # Canonical: a tree per group, as each group gives a term of its own for each micro-batch.
        keys = [(group.name if self.canonical else "", name, group.layer) for name in names]
        for i, key in enumerate(keys):
            value, values[i] = values[i], None
            # Only `value` refers to it, so that it is freed once it is added.
            values[i] = self.add(key, value, bool(end), ends)
            del value
        if ends and end:
            if self.long and end[0][0] == "psum":
                yield names  # begun behind the row, one after the other: each has memory beside what it sums
            values = yield from self.travel(names, values, end, group.layer)
            for key, value in zip(keys, values):
                self.stored_sums.add_value(key, value)

    def travel(self, names: Sequence[str], tensors: list[Tensor], path: Moves, layer: int | None) -> Iterator[Any]:
        """The tensors, of a layer of these leaves, after the collectives of `path`; the list `tensors` is emptied."""
        for op, name in path:
            axis, shapes = self.mesh[name], [t.shape for t in tensors]
            if self.coder is not None and names[0] in self.coded and is_coded(op, name):
                coder = self.coder
                if self.errors is not None:
                    coder = self.errors.coder(coder, name, names, layer or 0, axis.size)
                tensors = yield from sum_coded(op, names, tensors, axis, coder, self.accumulate, self.mesh.ledger)
                continue
            bundle = pack(tensors, axis.size if op == "scatter" else 1, self.reduce)
            tensors.clear()
            start = {"scatter": start_psum_scatter, "psum": start_psum, "gather": start_all_gather}[op]
            with self.mesh.ledger.phase("reduce"):
                # Yields after each start: the caller starts the collectives of all buckets before it waits for any.
                pending = start(bundle, axis, leaf=" ".join(names))
            yield pending
            if op == "scatter":
                shapes = [(s[0] // axis.size, *s[1:]) for s in shapes]
            elif op == "gather":
                shapes = [(s[0] * axis.size, *s[1:]) for s in shapes]
            tensors = unpack(pending.wait(), shapes)
            del bundle, pending
        return list(tensors)

    def add(self, key: Key, value: Tensor, unfinished: bool, ends: bool) -> Tensor | None:
        """Add a micro-batch's value to the sum of `key`; returns the last sum if it must still be sent."""
        if not unfinished and not self.canonical:
            self.stored_sums.add_value(key, value)
            return None
        if self.stored_sums.parts == 1 and ends and key not in self.partial_sums:
            return value if unfinished else self.stored_sums.add_value(key, value)
        # A copy, as sums add in place and the value may be a view of a bucket.
        term = value.to(self.accumulate, copy=True) if value.dtype == self.accumulate else value.to(self.accumulate)
        if self.canonical:
            self.partial_sums.setdefault(key, TreeSum()).add(term)
            total = self.partial_sums.pop(key).sum() if ends else None
        else:
            self.partial_sums[key] = self.partial_sums[key].add_(term) if key in self.partial_sums else term
            total = self.partial_sums.pop(key) if ends else None
        return self.stored_sums.add_value(key, total) if total is not None and not unfinished else total

    def sums(
        self, like: Tree, over_pp: Callable[[dict[tuple[str, str], Any]], dict[str, Tensor]] | None = None
    ) -> Tree:
        """`SumsAtRest.pop_tree` of all sums. Call it once, after the last `put`."""
        self.finish()
        for job in self.ending:  # one after the other: each has memory beside what it sums
            self.flying = [job]
            self.finish()
        self.ending = []
        assert not self.partial_sums, f"sums that were never finished: {sorted(key[1] for key in self.partial_sums)}"
        return self.stored_sums.pop_tree(like, over_pp)
