"""Closed forms of a candidate's memory, and its time (closed_time.py): a cheap estimate of each candidate of a search.

A search compares thousands of candidates, so none is traced here; see closed_layer.py for what is. With pp a rank is
given its share of the states. The estimates decide the order in which candidates are traced exactly.

Closed forms of what the passes of a step hold on a rank: at each moment that may be its peak.

A step that recomputes and one that does not, a long micro-batch and a short one, have their peaks at different moments,
and what one holds another does not: logits are of the loss, gradients of hidden units of a layer's backward pass. So
each moment is counted by itself, and the peak is the one with the most bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fzero.core.host_memory import bytes_cached
from fzero.kernels.linear_cross_entropy import chunk_rows
from fzero.models.presets import body_of
from fzero.models.score import head_rows
from fzero.planner import experts
from fzero.planner.candidates import Candidate
from fzero.planner.closed_layer import Basis, offload_of, remat_of, row_facts, stacked
from fzero.planner.closed_time import step_time
from fzero.planner.estimate import of_signs
from fzero.run.config_ranks import SEND_SIGNS
from fzero.sharding.codec import Codec
from fzero.sharding.pipeline import FAMILIES
from fzero.sharding.slices import local_numel


class ActivationBytes(NamedTuple):
    """The bytes of a rank's activations."""

    residuals: float  # of all layers for their backward passes
    recomputation: float  # of the layers that are recomputed at a time
    last: float  # of what is kept, what the last two layers had, which is gone when sums of gradients are made
    spare: float  # on top while a layer's backward pass computes
    stream: float  # between two layers
    loss: float  # on top while the loss and its gradients are made: see `loss_bytes`


class Weights(NamedTuple):
    """Gradients of a rank, and parameters that are gathered."""

    sums: float  # bytes of the sums of gradients during the backward pass
    first: float  # of those, of the micro-batches before the first backward pass that counts
    ends: float  # elements of the largest part outside of layers
    second_ends: float  # and of the next one: the embedding beside a head of its own
    layer: float  # elements of the largest layer
    param: int  # bytes of an element of parameters and their gradients
    reduce: int  # bytes of an element of gradients on their way; 0: none is sent
    trained: bool  # whether these parts have gradients; those of adapters alone do not count
    ahead: int  # layers that are gathered besides the one that computes
    gathers: bool  # whether the parameters of layers are gathered
    ends_gathered: float  # bytes of what is gathered of the largest part outside of them


def moments(acts: ActivationBytes, weights: Weights) -> dict[str, dict[str, float]]:
    """Bytes by component of each moment that may be the peak of a rank's passes."""
    w = weights
    ends, layer = w.ends * w.param, w.layer * w.param
    ends_grad, layer_grad = ends * w.trained, layer * w.trained
    ends_sent, layer_sent, other_sent = (
        elements * w.reduce * w.trained for elements in (w.ends, w.layer, w.second_ends)
    )
    ahead = w.ahead * layer * w.gathers
    return {
        "the loss": {
            "activations": acts.residuals + 3 * acts.stream + acts.loss,
            # The gradients of the embedding of the micro-batch before may still be on their way.
            "grads": w.first + ends_grad + other_sent * (w.first > 0),
            "gathered": ahead + w.ends_gathered,
        },
        "the gradients of the head": {
            "activations": acts.residuals + acts.stream + ends_sent,
            "grads": w.first + ends_grad,
            "gathered": ahead,
        },
        "the last layer": {
            "activations": acts.residuals + acts.recomputation + acts.spare + ends_sent,
            "grads": w.first + layer_grad,
            "gathered": ahead + layer * w.gathers,
        },
        "a layer": {
            "activations": acts.residuals - acts.last + acts.recomputation + acts.spare + layer_sent,
            "grads": w.sums + layer_grad,
            "gathered": ahead + layer * w.gathers,
        },
        "the gradients of the embedding": {
            "activations": acts.stream,
            "grads": w.sums + ends_grad + ends_sent,
            "gathered": 0.0,
        },
    }


def peak(acts: ActivationBytes, weights: Weights) -> dict[str, float]:
    """Bytes by component of the moment of a rank's passes that has the most."""
    return max(moments(acts, weights).values(), key=lambda components: sum(components.values()))


def loss_bytes(tokens: int, columns: int, width: int, dtype: torch.dtype, kind: str) -> float:
    """The bytes in which a device of this kind makes the loss and its gradients: a chunk of the logits of `tokens`,
    and the float32 sum of the head's gradient over the chunks if there are several; width: 0 if it has none.

    >>> sizes = [loss_bytes(tokens, 128_256, 4096, torch.bfloat16, "cuda") for tokens in (4096, 8192, 16384)]
    >>> [round(size / 1e9, 2) for size in sizes]
    [1.05, 3.15, 3.15]
    """
    chunk = min(tokens, chunk_rows(tokens, columns, dtype, kind))
    return chunk * columns * dtype.itemsize + (4.0 * columns * width if tokens > chunk else 0.0)


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
    _, elements, parts = basis.plan_of(c)
    layer, tiers, remat = basis.layer(c.tp), offload_of(c.offload), remat_of(c.remat)
    # A rank of cp has its share of the tokens of each row, of all but the keys and values of attention.
    rows, layers, policy = c.micro_batch / c.cp, basis.config.model.n_layers, basis.policy
    micro_batches = basis.config.train.batch // c.micro_batch // c.data
    elements = {name: numels / c.pp for name, numels in elements.items()}
    alive: float = layers
    if c.pp > 1:
        chunks = row_facts(c.schedule, c.pp, c.chunks, bool(remat.every)).in_flight
        alive = math.ceil(layers / c.pp / c.chunks) * min(chunks, micro_batches * c.chunks)
        alive *= OWED if FAMILIES[c.schedule].split else 1.0
    groups = {
        "params": elements["params"] * policy.param.itemsize * (1 + (basis.config.train.update == "delayed")),
        "optimizer": elements["opt"] * basis.opt_bytes,
        "grads": elements["grads"] * (policy.param if micro_batches == 1 else policy.accumulate).itemsize,
    }
    placement = {"params": tiers.params, "optimizer": tiers.opt, "grads": tiers.grads}
    offloaded = {name: groups[name] * tier.fraction for name, tier in placement.items() if tier.memory != "device"}
    host = sum(size for name, size in offloaded.items() if placement[name].memory == "host")
    if tiers.acts.memory == "host":
        host += math.ceil(alive / max(1, remat.every)) * bytes_cached(math.ceil(rows * layer.input_bytes))
    on_device = {name: groups[name] - offloaded.get(name, 0.0) for name in ("params", "optimizer")}
    sums = weights(basis, c, micro_batches, groups["grads"] - offloaded.get("grads", 0.0))
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
        plan, ranks = basis.plan_of(c)[0], c.rp if c.rp > 1 else c.dp * c.cp
        element_bytes = max(basis.policy.state.itemsize, 4)
        trained = [leaf for leaf in plan.leaves.values() if leaf.trained]
        total = sum(leaf.numel(leaf.summed) for leaf in trained)
        local_bytes = element_bytes + basis.policy.param.itemsize if basis.config.optim.sum_every > 1 else 0
        return of_signs(total, ranks) * element_bytes + total * local_bytes
    if not basis.config.codec or c.zero < 2 or Codec.parse(basis.config.codec).loco is None:
        return 0.0
    plan, policy = basis.plan_of(c)[0], basis.policy
    coded = [leaf for leaf in plan.leaves.values() if leaf.trained and leaf.opt.over_data and leaf.is_matrix]
    codec = Codec.parse(basis.config.codec)
    element_bytes = 1 + 4 / codec.block if codec.errors else max(policy.accumulate.itemsize, 4)
    return 2.0 * element_bytes * sum(leaf.numel(leaf.compute) for leaf in coded) / c.pp


def activations(basis: Basis, c: Candidate, alive: float) -> ActivationBytes:
    """What activations take on a rank that keeps those of so many layers."""
    layer, remat, compute = basis.layer(c.tp), remat_of(c.remat), basis.policy.compute
    rows = c.micro_batch / c.cp
    plan = basis.plan_of(c)[0]
    spare = experts.spare_bytes(plan, basis.config, compute.itemsize)
    layer_bytes = (rows * (layer.kept_bytes + spare) + cp_bytes(basis, c, "residuals")) * remat.budget
    residuals, recompute, last = alive * layer_bytes, 0.0, min(2, alive) * layer_bytes
    if remat.every:
        offloaded = offload_of(c.offload).acts.memory != "device"
        inputs = 2 if offloaded else math.ceil(alive / remat.every)
        residuals, recompute = inputs * rows * layer.input_bytes, remat.every * layer_bytes
        last = 0.0 if offloaded else min(2 // remat.every, inputs) * rows * layer.input_bytes
    columns, width = head_rows(basis.config.model) // c.tp, 0 if plan.frozen else body_of(basis.config.model).d_model
    return ActivationBytes(
        residuals,
        recompute,
        last,
        spare=max(rows * layer.spare_bytes, 2 * cp_bytes(basis, c, "resident_keys")),
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
    offloaded = tiers.params.memory != "device"
    fetched: dict[str, int] = {}  # elements of each part
    for name, leaf in plan.leaves.items():
        if offloaded or leaf.compute.dims != leaf.params.dims:
            numel, segment = local_numel(leaf.shape, leaf.compute, plan.sizes), name.split("/")[0]
            fetched[segment] = fetched.get(segment, 0) + numel
    ends = sorted([(0, ""), (0, ""), *((n, segment) for segment, n in parts.items() if not stacked(segment))])
    (second, _), (largest, largest_name) = ends[-2:]
    return Weights(
        sums=sums * wide,
        first=sums if micro_batches > 1 else 0.0,
        ends=largest,
        second_ends=second,
        layer=largest_layer(parts),
        param=policy.param.itemsize,
        reduce=policy.reduce.itemsize if reduces else 0,
        trained=not plan.frozen,
        ahead=basis.config.prefetch
        + math.ceil(basis.config.model.n_layers / c.pp / c.chunks) * min(basis.config.resident, c.chunks),
        gathers=any(map(stacked, fetched)),
        ends_gathered=fetched.get(largest_name, 0) * policy.param.itemsize,
    )


def cp_bytes(basis: Basis, c: Candidate, method: str) -> float:
    """The bytes that attention over cp needs in a layer, by a name of the methods of Heads: `kept` or
    `keys_held`."""
    plan = basis.plan_of(c)[0]
    if plan.context is None or plan.heads is None:
        return 0.0
    elements = getattr(plan.heads, method)(plan.context.form, c.cp)
    return elements * c.micro_batch * basis.config.data.seq_len * basis.policy.compute.itemsize


def largest_layer(parts: Mapping[str, int]) -> int:
    """The elements of the largest layer, of those of `segment_numels`; of the largest part without layers."""
    layers = [size for segment, size in parts.items() if stacked(segment)]
    return max(layers or parts.values())
