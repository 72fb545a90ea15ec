"""The first answer of a plan, before anything is traced: states counted exactly, activations and time by closed forms.

A layer's activations are the tensors that its kernels keep for the backward pass, counted by their sizes; its time is
its FLOPs at the device's sustained rates, and the bytes of its tensors at that of its memory. The rest is the estimate
of a search (closed_forms.py). `BOUND` says how far it was from the traced plan; tests/test_first_estimate.py holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fzero.core import pytree
from fzero.kernels.flops import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, SPLIT_PRODUCTS
from fzero.models import DeepSeekConfig, LlamaConfig
from fzero.models.base import CODES, leaf_shapes
from fzero.models.config_values import hidden_units
from fzero.models.presets import body_of
from fzero.models.score import head_rows
from fzero.planner.candidates import Candidate
from fzero.planner.closed_forms import memory
from fzero.planner.closed_layer import Basis, Layer
from fzero.planner.closed_time import step_time
from fzero.planner.devices import Device
from fzero.planner.plan_report import grad_bytes, has_rates
from fzero.planner.plan_text import duration, size
from fzero.planner.rates import collective_s, tiled_fraction, ways_of
from fzero.planner.step_trace import fake_nvme, state_bytes
from fzero.run import build
from fzero.run.build import Job
from fzero.run.config import RunConfig
from fzero.run.measure.flops import token_flop
from fzero.sharding import Spec, fake_mesh
from fzero.sharding.slices import local_numel

MEMORY_BOUND, TIME_BOUND = 0.10, 0.35  # largest relative errors over the cases of tests/test_first_estimate.py
GATED = (LlamaConfig, DeepSeekConfig)  # models whose hidden units are products of two
OPERATORS = 20  # that a block's forward pass issues if it is not compiled; its backward pass twice as many
TOUCHED = (2.0, 4.0)  # bytes that elementwise operators move for each byte kept: forward, backward


class FirstEstimate(NamedTuple):
    """The first estimate of a plan, before its step is traced.

    >>> from fzero.planner.plan import config_for, device_for, resolve_for
    >>> device = device_for("h100")
    >>> config = resolve_for(config_for("llama-tiny", {"precision.policy": "bf16"}), device)
    >>> first_estimate(config, {"dp": 4}, device).state_bytes["params"]  # exact: 2 bytes a parameter
    6164992
    """

    state_bytes: dict[str, int]  # between steps, of a rank on its device: exact
    state_elsewhere: dict[str, int]  # the same in "host" and on "nvme": exact
    passes_bytes: dict[str, float]  # on top at the peak, by component: estimated
    capacity_bytes: int
    step_s: float | None  # None: the device's rates are unknown
    time: dict[str, float]  # seconds of a step, by cause
    tokens_per_step: int

    @property
    def peak_bytes(self) -> float:
        """The estimated bytes on a rank's device at its peak."""
        return sum(self.state_bytes.values()) + sum(self.passes_bytes.values())

    def __str__(self) -> str:
        states, peak = sum(self.state_bytes.values()), self.peak_bytes
        fits = "should fit" if peak <= self.capacity_bytes else "too much"
        parts = {name: amount for name, amount in self.passes_bytes.items() if amount}
        lines = [
            "first estimate (closed forms, refined below): states are exact; of models from 0.1 G parameters on memory "
            f"was within {MEMORY_BOUND:.0%} and time within {TIME_BOUND:.0%} of the refined plan",
            f"  memory of a rank  {size(peak)} of {size(self.capacity_bytes)}: {fits}",
            f"  at rest, exact    {size(states)}: {_format_sizes(self.state_bytes)}",
            f"  at the peak       {_format_sizes(parts)}",
        ]
        if any(self.state_elsewhere.values()):
            lines.append(f"  elsewhere, exact  {_format_sizes(self.state_elsewhere)}")
        if self.step_s is not None:
            rate = self.tokens_per_step / self.step_s
            main_cause = max(self.time, key=self.time.__getitem__)
            lines.append(f"  a step            {duration(self.step_s)}, {rate:,.0f} tokens/s; most of it: {main_cause}")
        return "\n".join(lines)


def _format_sizes(parts: Mapping[str, float]) -> str:
    """The nonzero sizes, the largest first."""
    sizes = sorted(((amount, name) for name, amount in parts.items() if amount), reverse=True)
    return ", ".join(f"{name} {size(amount)}" for amount, name in sizes) or "nothing"


def first_estimate(
    config: RunConfig,
    sizes: dict[str, int],
    device: Device,
    rank: int = 0,
) -> FirstEstimate:
    """Estimate memory and step time of a config whose "auto" values are decided, on a mesh of these sizes.

    Raises ValueError for any config that a run would refuse.
    """
    mesh = fake_mesh(sizes, rank)
    job = build.build(config, mesh, nvme=fake_nvme(config))
    on_device, elsewhere = state_bytes(job, build.like_of(job))
    ranks = mesh.size
    node = device.on_node(ranks)
    axes = {name: mesh[name].size for name in ("dp", "rp", "tp", "cp", "ep")}
    candidate = Candidate(
        dp=axes["dp"],
        rp=axes["rp"],
        tp=axes["tp"],
        zero=config.zero,
        remat=config.train.remat,
        offload=config.offload,
        micro_batch=config.train.micro_batch,
        cp=axes["cp"],
        ep=axes["ep"],
    )
    layer = closed_layer(job, device)
    basis = Basis(config, device, node, {axes["tp"]: layer})
    peak, _ = memory(basis, candidate)
    grads = grad_bytes(job)
    passes = {name: peak[name] for name in ("activations", "gathered")}
    if "errors" in on_device:  # those of the step, until it is known whether it is skipped
        passes["errors"] = on_device["errors"]
    if not job.plan.frozen:  # else only the small ones of adapters, and those of one layer's weights
        passes["gradients on their way"] = max(0.0, peak["grads"] - grads)
    seconds = step_time(basis, candidate) if has_rates(device) and device.flops else {}
    if seconds and device.lost:
        seconds["lost"] = sum(seconds.values()) * device.lost / (1.0 - device.lost)
    share = node if device.kind == "cpu" else 1
    return FirstEstimate(
        state_bytes={**on_device, "grads": grads},
        state_elsewhere=elsewhere,
        passes_bytes=passes,
        capacity_bytes=device.capacity_bytes // share,
        step_s=sum(seconds.values()) if seconds else None,
        time=seconds,
        tokens_per_step=config.train.batch * config.data.seq_len,
    )


def residual_elements(config: RunConfig, tp: int) -> float:
    """The elements that a layer keeps of each token for its backward pass: inputs of its products, of attention, of
    its norms and of its activation function."""
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


def closed_layer(job: Job, device: Device) -> Layer:
    """The Layer of a job by closed forms, as closed_layer.layer_of traces it."""
    config, policy, tp = job.config, job.policy, job.mesh.tp.size
    c, seq, itemsize = body_of(config.model), config.data.seq_len, policy.compute.itemsize
    rows = config.train.micro_batch / job.mesh.cp.size  # a rank has its share of each
    split = tp if config.sequence or config.partition_activations else 1  # of inputs, which recomputation keeps
    residual_bytes = seq * residual_elements(config, tp) * itemsize
    logits = seq * head_rows(config.model) / tp * itemsize
    # The gradients of the hidden units: of what the products give and read, beside the result.
    hidden = seq * hidden_units(c) / tp * (3 if isinstance(c, GATED) else 2) * itemsize
    flop = token_flop(job)
    pairs = (flop.model - flop.model_causal) / 6 / c.n_layers  # T D of a layer
    head = 6.0 * head_rows(config.model) * c.d_model
    products = (flop.model_causal - 6 * c.n_layers * pairs - head) / 6 / c.n_layers  # parameters of a layer in use
    efficiency, dtype = device.efficiency, str(policy.compute).removeprefix("torch.")
    peak = device.flops.get(dtype) or max(device.flops.values(), default=float("inf"))
    # The blocks' products in float8; the passes that round their operands are not in these forms.
    float8 = device.flops.get("float8_e4m3fn", peak) / peak if policy.matmul and device.kind == "cuda" else 1.0
    rate = peak * efficiency.get("gemm", 1.0)
    if not device.measured:
        rate *= tiled_fraction(
            device.processors, (1, max(1, int(rows * seq)), getattr(c, "d_expert", c.d_ff) // tp, c.d_model)
        )
    gemm_s = seq / (rate * tp)  # of a FLOP a token
    bytes_s = 1.0 / (device.bandwidth_bytes_s * efficiency.get("memory", 1.0)) if device.bandwidth_bytes_s else 0.0
    # A product of queries and keys takes 2 T D FLOPs a token, and half of that where it is causal.
    backward_products = SPLIT_PRODUCTS if device.kind == "cuda" else BACKWARD_PRODUCTS
    attend = [
        products_made * pairs * seq / (peak * efficiency.get(f"attention_{way}", efficiency.get("gemm", 1.0)) * tp)
        for way, products_made in (("forward", FORWARD_PRODUCTS), ("backward", backward_products))
    ]
    # The host issues a call of a compiled block, or its operators one by one; it rules small models.
    host_s = device.op_s.get("compiled", 0.0) if config.train.compiled else OPERATORS * device.op_s.get("eager", 0.0)
    host_s /= rows
    coded, dense_bytes = codes_to_decode(job, itemsize)
    # Codes are read, and the weight is written and read again, in each pass.
    decode_s = coded * (1 + 2 * itemsize) * bytes_s / rows
    return Layer(
        kept_bytes=int(residual_bytes),
        input_bytes=seq * c.d_model * itemsize // split,
        spare_bytes=int(hidden) + int(dense_bytes / rows),
        forward_s=decode_s
        + max(host_s, 2 * products * gemm_s / float8 + attend[0] + TOUCHED[0] * residual_bytes * bytes_s),
        backward_s=decode_s
        + max(2 * host_s, 4 * products * gemm_s / float8 + attend[1] + TOUCHED[1] * residual_bytes * bytes_s),
        tp_s=tp_seconds(job, device, seq * c.d_model * itemsize),
        ends_s=head * gemm_s + TOUCHED[1] * logits * bytes_s,
        host=0.0,
        rest_s=0.0,
    )


def codes_to_decode(job: Job, itemsize: int) -> tuple[int, int]:
    """(elements of a layer's weights in codes, bytes of the largest weight once it is dequantised), of a rank."""
    like, compute = pytree.named_leaves(job.plan.like), pytree.named_leaves(job.plan.compute)
    shapes = leaf_shapes(job.model)
    coded = [name.removesuffix(f"/{CODES}") for name in like if name.endswith(f"/{CODES}")]
    numels = [local_numel(shapes[n], Spec(compute[f"{n}/{CODES}"].dims), job.plan.sizes) for n in coded]
    layers = body_of(job.config.model).n_layers
    return sum(numels) // layers, max(numels, default=0) // layers * itemsize


def tp_seconds(job: Job, device: Device, full_bytes: int) -> float:
    """The seconds of a layer's four sums over tp of `full_bytes` bytes each, for one row: none of it is hidden."""
    way = ways_of(device, {name: job.mesh[name].size for name in ("dp", "rp", "cp", "tp")}).get("tp")
    return 4 * collective_s(way, "psum", 2 * full_bytes * (way.size - 1) // way.size).seconds if way else 0.0
