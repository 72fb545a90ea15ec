"""Closed forms of a candidate's memory, and its time (closed_time.py): a cheap estimate of each candidate of a search.

A search compares thousands of candidates, so none is traced here; see closed_layer.py for what is. With pp a rank is
given its share of the states. The estimates decide the order in which candidates are traced exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from fzero.core.host_memory import bytes_cached
from fzero.models.presets import body_of
from fzero.models.score import head_rows
from fzero.planner import experts
from fzero.planner.candidates import Candidate
from fzero.planner.closed_layer import Basis, offload_of, remat_of, stacked
from fzero.planner.closed_memory import Activations, Weights, loss_bytes, peak
from fzero.planner.closed_rows import row_facts
from fzero.planner.closed_time import step_time
from fzero.planner.estimate import of_signs
from fzero.run.config_ranks import SEND_SIGNS
from fzero.sharding.codec import Codec, is_matrix
from fzero.sharding.pipeline import FAMILIES
from fzero.sharding.sign_sums import summed_spec
from fzero.sharding.slices import local_numel

OWED = 1.5  # what a layer holds between I and W, of what its forward pass keeps (docs/pipeline.md, Memory)


class Sketch(NamedTuple):
    """The estimated memory and step time of a candidate on one rank."""

    candidate: Candidate
    memory: dict[str, float]  # bytes on the device, by component
    host_bytes: float  # bytes in the host's memory
    time: dict[str, float]  # seconds of a step, by cause

    @property
    def bytes(self) -> float:
        """The estimated bytes on the device."""
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        """The estimated seconds of a step."""
        return sum(self.time.values())


def sketch_candidate(basis: Basis, c: Candidate) -> Sketch:
    """The Sketch of a candidate."""
    return Sketch(c, *memory(basis, c), step_time(basis, c))


def memory(basis: Basis, c: Candidate) -> tuple[dict[str, float], float]:
    """Estimate (a rank's peak device memory in bytes by component, its bytes in the host's memory)."""
    _, held, parts = basis.plan_of(c)
    layer, tiers, remat = basis.layer(c.tp), offload_of(c.offload), remat_of(c.remat)
    # A rank of cp has its share of the tokens of each row, of all but the keys and values of attention.
    rows, layers, policy = c.micro_batch / c.cp, basis.config.model.n_layers, basis.policy
    micro_batches = basis.config.train.batch // c.micro_batch // c.data
    held = {name: numels / c.pp for name, numels in held.items()}
    alive: float = layers
    if c.pp > 1:
        chunks = row_facts(c.schedule, c.pp, c.chunks, bool(remat.every)).in_flight
        alive = math.ceil(layers / c.pp / c.chunks) * min(chunks, micro_batches * c.chunks)
        alive *= OWED if FAMILIES[c.schedule].split else 1.0
    groups = {
        "params": held["params"] * policy.param.itemsize * (1 + (basis.config.train.update == "delayed")),
        "optimizer": held["opt"] * basis.opt_bytes,
        "grads": held["grads"] * (policy.param if micro_batches == 1 else policy.accumulate).itemsize,
    }
    where = {"params": tiers.params, "optimizer": tiers.opt, "grads": tiers.grads}
    away = {name: groups[name] * tier.fraction for name, tier in where.items() if tier.memory != "device"}
    host = sum(size for name, size in away.items() if where[name].memory == "host")
    if tiers.acts.memory == "host":
        host += math.ceil(alive / max(1, remat.every)) * bytes_cached(math.ceil(rows * layer.input_bytes))
    on_device = {name: groups[name] - away.get(name, 0.0) for name in ("params", "optimizer")}
    sums = weights(basis, c, micro_batches, groups["grads"] - away.get("grads", 0.0))
    on_device |= peak(activations(basis, c, alive), sums)
    on_device["errors"] = error_bytes(basis, c)
    if c.pp > 1:  # what the first and the last stage use outside of the layers, and the sums of its gradients
        ends = max((n for name, n in parts.items() if not stacked(name)), default=0)
        on_device["gathered"] += ends * policy.param.itemsize
        on_device["grads"] += ends * policy.accumulate.itemsize
    return on_device, host


def error_bytes(basis: Basis, c: Candidate) -> float:
    """What a codec's error feedback takes on a rank: errors of the state, and those of the step beside them; of an
    optimizer that sends signs its momentum and errors, and with local steps how far it moved and where that is."""
    if basis.config.optim.name in SEND_SIGNS:
        plan, ranks, each = basis.plan_of(c)[0], c.rp if c.rp > 1 else c.dp * c.cp, max(basis.policy.state.itemsize, 4)
        trained = [leaf for leaf in plan.leaves.values() if leaf.trained]
        whole = sum(local_numel(leaf.shape, summed_spec(leaf, plan.sizes), plan.sizes) for leaf in trained)
        apart = each + basis.policy.param.itemsize if basis.config.optim.sum_every > 1 else 0
        return of_signs(whole, ranks) * each + whole * apart
    if not basis.config.codec or c.zero < 2 or Codec.parse(basis.config.codec).loco is None:
        return 0.0
    plan, policy = basis.plan_of(c)[0], basis.policy
    cut = {name: leaf for name, leaf in plan.leaves.items() if leaf.trained and "dp" in leaf.opt.axes}
    coded = [leaf for name, leaf in cut.items() if is_matrix(name, leaf.shape, leaf.dtype)]
    codec = Codec.parse(basis.config.codec)
    each = 1 + 4 / codec.block if codec.errors else max(policy.accumulate.itemsize, 4)
    return 2.0 * each * sum(local_numel(leaf.shape, leaf.compute, plan.sizes) for leaf in coded) / c.pp


def activations(basis: Basis, c: Candidate, alive: float) -> Activations:
    """What activations take on a rank that keeps those of so many layers."""
    layer, remat, compute = basis.layer(c.tp), remat_of(c.remat), basis.policy.compute
    rows = c.micro_batch / c.cp
    plan = basis.plan_of(c)[0]
    spare = experts.spare_bytes(plan, basis.config, compute.itemsize)
    each = (rows * (layer.kept_bytes + spare) + cp_bytes(basis, c, "kept")) * remat.budget
    kept, again, last = alive * each, 0.0, min(2, alive) * each
    if remat.every:
        away = offload_of(c.offload).acts.memory != "device"
        inputs = 2 if away else math.ceil(alive / remat.every)
        kept, again = inputs * rows * layer.input_bytes, remat.every * each
        last = 0.0 if away else min(2 // remat.every, inputs) * rows * layer.input_bytes
    columns, width = head_rows(basis.config.model) // c.tp, 0 if plan.frozen else body_of(basis.config.model).d_model
    return Activations(
        kept,
        again,
        last,
        spare=max(rows * layer.spare_bytes, 2 * cp_bytes(basis, c, "keys_held")),
        stream=rows * layer.input_bytes,
        loss=loss_bytes(math.ceil(rows * basis.config.data.seq_len), columns, width, compute, basis.device.kind),
    )


def weights(basis: Basis, c: Candidate, micro_batches: int, sums: float) -> Weights:
    """What gradients and gathered parameters take on a rank. sums: bytes of the sums of gradients on its device."""
    plan, _, parts = basis.plan_of(c)
    tiers, policy, several = offload_of(c.offload), basis.policy, c.rp * c.sharing > 1
    reduces = several or tiers.grads.memory != "device"
    # Sums of one micro-batch that are made as gradients come have the dtype of their sending until all are there.
    wide = policy.reduce.itemsize / policy.param.itemsize if micro_batches == 1 and c.zero >= 2 and several else 1.0
    away = tiers.params.memory != "device"
    fetched: dict[str, int] = {}  # elements of each part
    for name, leaf in plan.leaves.items():
        if away or leaf.compute.dims != leaf.params.dims:
            numel, part = local_numel(leaf.shape, leaf.compute, plan.sizes), name.split("/")[0]
            fetched[part] = fetched.get(part, 0) + numel
    ends = sorted([(0, ""), (0, ""), *((n, part) for part, n in parts.items() if not stacked(part))])
    (other, _), (largest, where) = ends[-2:]
    return Weights(
        sums=sums * wide,
        first=sums if micro_batches > 1 else 0.0,
        ends=largest,
        other=other,
        layer=largest_layer(parts),
        param=policy.param.itemsize,
        reduce=policy.reduce.itemsize if reduces else 0,
        trained=not plan.frozen,
        ahead=basis.config.prefetch
        + math.ceil(basis.config.model.n_layers / c.pp / c.chunks) * min(basis.config.resident, c.chunks),
        gathers=any(map(stacked, fetched)),
        ends_gathered=fetched.get(where, 0) * policy.param.itemsize,
    )


def cp_bytes(basis: Basis, c: Candidate, what: str) -> float:
    """The bytes that attention over cp needs in a layer, by a name of the methods of Heads: `kept` or
    `keys_held`."""
    plan = basis.plan_of(c)[0]
    if plan.context is None or plan.heads is None:
        return 0.0
    elements = getattr(plan.heads, what)(plan.context.form, c.cp)
    return elements * c.micro_batch * basis.config.data.seq_len * basis.policy.compute.itemsize


def largest_layer(parts: Mapping[str, int]) -> int:
    """The elements of the largest layer, of those of `part_numels`; of the largest part without layers."""
    layers = [size for part, size in parts.items() if stacked(part)]
    return max(layers or parts.values())
