"""The closed form of the memory that the passes of a step take on a rank.

tests/test_first_estimate.py compares it with traced steps. Recomputation and the length of a micro-batch move the peak
to another moment, so each moment is counted by itself, and the peak is the one with the most bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fzero.comm.axes import AXES
from fzero.core import pytree
from fzero.core.autodiff import Remat
from fzero.core.device import HOST
from fzero.kernels.linear_cross_entropy import chunk_rows
from fzero.models import DeepSeekConfig, LlamaConfig
from fzero.models.base import CODES, leaf_shapes
from fzero.models.config_values import hidden_units
from fzero.models.configs import DecoderConfig, body_of, head_rows
from fzero.run.config.run_config import RunConfig
from fzero.run.setup.build import Job, local_micro_batches
from fzero.sharding import Plan, Spec
from fzero.sharding.slices import is_stacked, local_numel
from fzero.sharding.spec import Offload

GATED = (LlamaConfig, DeepSeekConfig)  # models whose hidden units are products of two


class LayerBytes(NamedTuple):
    """The bytes of one layer on a rank, for each row of a micro-batch."""

    kept: int  # activations for its backward pass
    input: int  # its input alone, which recomputation keeps
    spare: int  # temporary memory while it and the head are computed


class PassSizes(NamedTuple):
    """What the closed form is made from: of a job, or of a candidate of a search."""

    config: RunConfig  # of a candidate that of the search, without its mesh, stage, remat, offload and micro-batch
    plan: Plan
    parts: Mapping[str, int]  # `segment_numels` of the plan
    layer: LayerBytes
    kind: str  # of the device: "cpu" or "cuda"
    remat: Remat
    offload: Offload
    micro_batch: int
    micro_batches: int  # of each rank
    alive: float  # the layers whose activations are kept at a time
    resident: int  # the layers whose parameters stay whole between micro-batches


class ActivationBytes(NamedTuple):
    """The bytes of a rank's activations."""

    residuals: float  # of all layers for their backward passes
    recomputation: float  # of the layers that are recomputed at a time
    last: float  # of what is kept, what the last two layers had, which is gone when sums of gradients are made
    spare: float  # on top while a layer's backward pass computes
    stream: float  # between two layers
    loss: float  # on top while the loss and its gradients are made: see `loss_bytes`


def passes_peak(p: PassSizes, sums: float) -> dict[str, float]:
    """Bytes by component of the moment of a rank's passes that has the most; sums: of gradients there."""
    return max(moments(p, sums).values(), key=lambda components: sum(components.values()))


def moments(p: PassSizes, sums: float) -> dict[str, dict[str, float]]:
    """Bytes by component of each moment that may be the peak of the passes."""
    plan, acts, policy = p.plan, activations(p), p.plan.policy
    several = plan.mesh.rp.size * math.prod(plan.sizes[axis] for axis in AXES.shards) > 1
    # Of the largest part outside of layers, of the next one (the embedding beside a head of its own), of a layer.
    (second, _), (largest, largest_name) = sorted(
        [(0, ""), (0, ""), *((n, segment) for segment, n in p.parts.items() if not stacked(segment))]
    )[-2:]
    layer = largest_layer(p.parts)
    trained = not plan.frozen  # the gradients of adapters alone do not count
    ends_grad, layer_grad = (n * policy.param.itemsize * trained for n in (largest, layer))
    sends = several or not p.offload.grads.memory.on_device
    ends_sent, layer_sent, second_sent = (
        n * policy.reduce.itemsize * sends * trained for n in (largest, layer, second)
    )
    fetched = fetched_numels(p, several)
    gathers = any(map(stacked, fetched))
    layer_gathered = layer * policy.param.itemsize * gathers
    ahead = (p.config.prefetch + p.resident) * layer_gathered
    # Of the micro-batches before the first backward pass that counts.
    first = sums if p.micro_batches > 1 else 0.0
    # Sums of one micro-batch that are made as gradients come have the dtype of their sending until all are there.
    if p.micro_batches == 1 and plan.stage >= 2 and several:
        sums *= policy.reduce.itemsize / policy.param.itemsize
    return {
        "the loss": {
            "activations": acts.residuals + 3 * acts.stream + acts.loss,
            # The gradients of the embedding of the micro-batch before may still be on their way.
            "grads": first + ends_grad + second_sent * (first > 0),
            "gathered": ahead + fetched.get(largest_name, 0) * policy.param.itemsize,
        },
        "the gradients of the head": {
            "activations": acts.residuals + acts.stream + ends_sent,
            "grads": first + ends_grad,
            "gathered": ahead,
        },
        "the last layer": {
            "activations": acts.residuals + acts.recomputation + acts.spare + ends_sent,
            "grads": first + layer_grad,
            "gathered": ahead + layer_gathered,
        },
        "a layer": {
            "activations": acts.residuals - acts.last + acts.recomputation + acts.spare + layer_sent,
            "grads": sums + layer_grad,
            "gathered": ahead + layer_gathered,
        },
        "the gradients of the embedding": {
            "activations": acts.stream,
            "grads": sums + ends_grad + ends_sent,
            "gathered": 0.0,
        },
    }


def activations(p: PassSizes) -> ActivationBytes:
    """What activations take on a rank."""
    plan = p.plan
    rows, every = p.micro_batch / plan.mesh.cp.size, p.remat.every
    kept = rows * (p.layer.kept + expert_spare_bytes(plan, p.config)) + context_bytes(p, "residuals")
    layer_bytes = kept * p.remat.budget
    residuals, recomputation, last = p.alive * layer_bytes, 0.0, min(2, p.alive) * layer_bytes
    if every:
        offloaded = not p.offload.acts.memory.on_device
        inputs = 2 if offloaded else math.ceil(p.alive / every)
        residuals, recomputation = inputs * rows * p.layer.input, every * layer_bytes
        last = 0.0 if offloaded else min(2 // every, inputs) * rows * p.layer.input
    columns = head_rows(p.config.model) // plan.mesh.tp.size
    width = 0 if plan.frozen else body_of(p.config.model).d_model
    tokens = math.ceil(rows * p.config.data.seq_len)
    if isinstance(body_of(p.config.model), DecoderConfig):  # somebody's code, which makes all logits in float32
        loss = 8.0 * tokens * columns
    else:
        loss = loss_bytes(tokens, columns, width, plan.policy.compute, p.kind)
    return ActivationBytes(
        residuals,
        recomputation,
        last,
        spare=max(rows * p.layer.spare, 2 * context_bytes(p, "resident_keys")),
        stream=rows * p.layer.input,
        loss=loss,
    )


def loss_bytes(tokens: int, columns: int, width: int, dtype: torch.dtype, kind: str) -> float:
    """The bytes of the loss and its gradients: a chunk of logits, and the head's gradient sum in float32.

    >>> sizes = [loss_bytes(tokens, 128_256, 4096, torch.bfloat16, "cuda") for tokens in (4096, 8192, 16384)]
    >>> [round(size / 1e9, 2) for size in sizes]
    [1.05, 3.15, 3.15]
    """
    chunk = min(tokens, chunk_rows(tokens, columns, dtype, kind))
    return chunk * columns * dtype.itemsize + (4.0 * columns * width if tokens > chunk else 0.0)


def fetched_numels(p: PassSizes, several: bool) -> dict[str, int]:
    """The elements of each part of the model that is gathered for use."""
    offloaded = p.kind == "cuda" and not p.offload.params.memory.on_device
    fetched: dict[str, int] = {}
    for name, leaf in p.plan.leaves.items():
        if offloaded or (several and leaf.compute.dims != leaf.params.dims):
            segment = name.split("/")[0]
            fetched[segment] = fetched.get(segment, 0) + leaf.numel(leaf.compute)
    return fetched


def expert_spare_bytes(plan: Plan, config: RunConfig) -> int:
    """The bytes that a layer keeps of each sequence for rows of experts without a token, at an even load."""
    if plan.experts is None or plan.routed is None:
        return 0
    extra_rows = plan.routed.rows(plan.experts, plan.mesh.ep.size) - plan.routed.top_k
    elements = 2 * plan.routed.width + 3 * expert_units(config) / plan.mesh.tp.size
    return int(extra_rows * elements * config.data.seq_len * plan.policy.compute.itemsize)


def expert_units(config: RunConfig) -> int:
    """The hidden units of an expert."""
    body = body_of(config.model)
    return getattr(body, "d_expert", body.d_ff)


def context_bytes(p: PassSizes, method: str) -> float:
    """The bytes that attention over cp needs in a layer, by a method of Heads: `residuals` or `resident_keys`."""
    plan = p.plan
    if plan.context is None or plan.heads is None:
        return 0.0
    elements = getattr(plan.heads, method)(plan.context.form, plan.mesh.cp.size)
    return elements * p.micro_batch * p.config.data.seq_len * plan.policy.compute.itemsize


# ---- of a plan ------------------------------------------------------------------------------------------------------


@functools.cache
def stacked(segment: str) -> bool:
    """Whether a part of a model has layers."""
    return is_stacked(f"{segment}/")


def segment_numels(plan: Plan) -> dict[str, int]:
    """The elements of the embedding, of one layer of each stack and of the head, gathered over dp."""
    compute, parts = pytree.named_leaves(plan.compute), {}
    for name, leaf in pytree.named_leaves(plan.like).items():
        segment = name.split("/")[0]
        layers = leaf.shape[0] if is_stacked(name) else 1
        parts[segment] = parts.get(segment, 0) + local_numel(leaf.shape, compute[name], plan.sizes) // layers
    return parts


def largest_layer(parts: Mapping[str, int]) -> int:
    """The elements of the largest layer, of those of `segment_numels`; of the largest part without layers."""
    layers = [size for segment, size in parts.items() if stacked(segment)]
    return max(layers or parts.values())


# ---- of a job -------------------------------------------------------------------------------------------------------


def pass_sizes(job: Job, kind: str = "") -> PassSizes:
    """The PassSizes of a job. kind: of the device; "" for that of the job."""
    t = job.config.train
    return PassSizes(
        config=job.config,
        plan=job.plan,
        parts=segment_numels(job.plan),
        layer=layer_bytes(job),
        kind=kind or ("cpu" if job.device == HOST else "cuda"),
        remat=Remat.parse(t.remat),
        offload=Offload.parse(job.config.offload),
        micro_batch=t.micro_batch,
        micro_batches=local_micro_batches(job.config, job.mesh),
        alive=layers_alive(job),
        resident=layers_resident(job),
    )


def layers_alive(job: Job) -> int:
    """The most layers whose activations a rank keeps at a time: of the model, or of its stages in flight."""
    plan, max_layers = job.plan, 0
    if plan.stages is None:
        return job.model.config.n_layers
    for row in plan.schedule(local_micro_batches(job.config, job.mesh))[0].rows:
        alive = 0
        for act in row:
            alive += len(plan.stages.layers[act.stage]) * ((act.kind == "F") - (act.kind in "BW"))
            max_layers = max(max_layers, alive)
    return max_layers


def layers_resident(job: Job) -> int:
    """The most layers of a rank whose parameters may stay whole between micro-batches."""
    plan, limit = job.plan, job.config.resident
    if plan.stages is None:
        return job.model.config.n_layers * min(1, limit)
    chunks = [
        [len(plan.stages.layers[stage]) for stage in plan.stages.chunks(rank)] for rank in range(plan.mesh.pp.size)
    ]
    return max(sum(sorted(layers)[-limit:]) if limit else 0 for layers in chunks)


def layer_bytes(job: Job) -> LayerBytes:
    """The LayerBytes of a job, by the tensors that its kernels keep."""
    config, tp = job.config, job.plan.mesh.tp.size
    c, seq, itemsize = body_of(config.model), config.data.seq_len, job.policy.compute.itemsize
    split = tp if config.sequence or config.partition_activations else 1  # of inputs, which recomputation keeps
    # The gradients of the hidden units: of what the products give and read, beside the result.
    hidden = seq * hidden_units(c) / tp * (3 if isinstance(c, GATED) else 2) * itemsize
    _, dense_bytes = codes_to_decode(job)
    return LayerBytes(
        kept=int(seq * residual_elements(config, tp) * itemsize),
        input=seq * c.d_model * itemsize // split,
        spare=int(hidden) + int(dense_bytes * job.plan.mesh.cp.size / config.train.micro_batch),
    )


def residual_elements(config: RunConfig, tp: int) -> float:
    """The elements that a layer keeps of each token for its backward pass."""
    c, split = body_of(config.model), tp if config.sequence else 1
    experts = getattr(c, "top_k", 0)
    # A compiled GELU is computed again from its input; SwiGLU's kernel keeps its output too.
    hidden = hidden_units(c) / tp * (3 if isinstance(c, GATED) else 1 if config.train.compiled else 2)
    # Two halves keep their input and its norm; with sequence parallelism also what is gathered, and its copy.
    stream = c.d_model * (4.0 if split == 1 else 2 / split + 5)
    stream += 2.0 * c.d_model * (getattr(c, "norms", "in") == "both")  # and the reads of the norms after them
    heads = getattr(c, "n_heads", 0)
    if not heads:
        return stream / 2 + hidden
    size_of_head = getattr(c, "key_dim", c.d_model // heads)
    queries = heads * size_of_head / tp
    keys = max(1.0, getattr(c, "n_kv_heads", heads) / tp) * size_of_head
    normed = queries + keys if getattr(c, "qk_norm", False) else 0.0
    routed = 2 * experts * c.d_model  # what experts read and give
    latent = 2 * (getattr(c, "q_rank", 0) + getattr(c, "kv_rank", 0))
    return stream + 2 * queries + 2 * keys + normed + latent + hidden + routed


def codes_to_decode(job: Job) -> tuple[int, int]:
    """(elements of a layer's weights in codes, bytes of the largest one)."""
    like, compute = pytree.named_leaves(job.plan.like), pytree.named_leaves(job.plan.compute)
    coded = [name.removesuffix(f"/{CODES}") for name in like if name.endswith(f"/{CODES}")]
    shapes = leaf_shapes(job.model) if coded else {}
    numels = [local_numel(shapes[n], Spec(compute[f"{n}/{CODES}"].dims), job.plan.sizes) for n in coded]
    layers = body_of(job.config.model).n_layers
    return sum(numels) // layers, max(numels, default=0) // layers * job.policy.compute.itemsize
