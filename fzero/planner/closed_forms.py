"""Closed forms of a candidate's memory and time: a cheap estimate of each candidate of a search, and the first answer
of a plan, before anything is traced.

A search compares thousands of candidates, so none is traced here; see closed_layer.py for what is. The estimates decide
the order in which candidates are traced exactly. A pipeline's waiting is that of its schedule played over few
micro-batches. Communication is exposed where it takes longer than what is computed beside it.

In a plan's first answer states are counted exactly. A layer's activations are the tensors that its kernels keep for the
backward pass; its time is its FLOPs at the device's sustained rates, and the bytes of its tensors at that of its
memory. tests/test_first_estimate.py holds MEMORY_BOUND and TIME_BOUND, how far it was from the traced plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from fzero.core.host_memory import bytes_cached
from fzero.planner.closed_layer import ROW, TRACED_ROWS, UPDATE, Basis, closed_layer, offload_of, remat_of, row_facts
from fzero.planner.devices import Device, Loads
from fzero.planner.estimate import Candidate, of_signs
from fzero.planner.plan_report import has_rates
from fzero.planner.plan_text import duration, size
from fzero.planner.rates import Way, collective_s, wire_s
from fzero.planner.step_trace import fake_nvme
from fzero.run.config.run_config import RunConfig
from fzero.run.config.unused_keys import SEND_SIGNS
from fzero.run.measure.memory_check import grad_bytes, memory_on_device, state_bytes
from fzero.run.measure.peak_memory import PassSizes, passes_peak, stacked
from fzero.run.setup import build
from fzero.sharding import Plan, fake_mesh
from fzero.sharding.codec import Codec
from fzero.sharding.leaf_plan import MICRO_BATCH, PASS, STEP, LeafPlan
from fzero.sharding.pipeline import FAMILIES
from fzero.sharding.spec import DISK, HOST_MEMORY, Tier

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
    plan, elements, parts = basis.plan_of(c)
    layer, tiers, remat = basis.layer(c.tp).memory, offload_of(c.offload), remat_of(c.remat)
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
    offloaded = {name: groups[name] * tier.fraction for name, tier in placement.items() if not tier.memory.on_device}
    host = sum(size for name, size in offloaded.items() if placement[name].memory.on_host)
    if tiers.acts.memory.on_host:
        host += math.ceil(alive / max(1, remat.every)) * bytes_cached(math.ceil(rows * layer.input))
    on_device = {name: groups[name] - offloaded.get(name, 0.0) for name in ("params", "optimizer")}
    passes = PassSizes(
        config=basis.config,
        plan=plan,
        parts=parts,
        layer=layer,
        kind=basis.device.kind,
        remat=remat,
        offload=tiers,
        micro_batch=c.micro_batch,
        micro_batches=micro_batches,
        alive=alive,
        resident=math.ceil(layers / c.pp / c.chunks) * min(basis.config.resident, c.chunks),
    )
    on_device |= passes_peak(passes, groups["grads"] - offloaded.get("grads", 0.0))
    on_device["errors"] = error_bytes(basis, c)
    if c.pp > 1:  # what the first and the last stage use outside of the layers, and the sums of its gradients
        ends = max((n for name, n in parts.items() if not stacked(name)), default=0)
        on_device["gathered"] += ends * policy.param.itemsize
        on_device["grads"] += ends * policy.accumulate.itemsize
    return on_device, host


def error_bytes(basis: Basis, c: Candidate) -> float:
    """What a codec's error feedback, or an optimizer that sends signs, takes on a rank."""
    if basis.config.optim.name in SEND_SIGNS:
        plan, ranks = basis.plan_of(c)[0], c.rp if c.rp > 1 else c.dp * c.cp
        element_bytes = max(basis.policy.state.itemsize, 4)
        total = sum(leaf.numel(leaf.summed) for leaf in plan.trained_leaves.values())
        local_bytes = element_bytes + basis.policy.param.itemsize if basis.config.optim.sum_every > 1 else 0
        return of_signs(total, ranks) * element_bytes + total * local_bytes
    if not basis.config.codec or c.zero < 2 or Codec.parse(basis.config.codec).loco is None:
        return 0.0
    plan, policy = basis.plan_of(c)[0], basis.policy
    coded = [leaf for leaf in plan.trained_leaves.values() if leaf.opt.over_data and leaf.is_matrix]
    codec = Codec.parse(basis.config.codec)
    element_bytes = 1 + 4 / codec.block if codec.errors else max(policy.accumulate.itemsize, 4)
    return 2.0 * element_bytes * sum(leaf.numel(leaf.compute) for leaf in coded) / c.pp


# ---- time ------------------------------------------------------------------------------------------------------------


def step_time(basis: Basis, c: Candidate) -> dict[str, float]:
    """Estimate the seconds of a step, by cause."""
    layer, remat, tiers = basis.layer(c.tp), remat_of(c.remat), offload_of(c.offload)
    _, elements, _ = basis.plan_of(c)
    layers, policy = math.ceil(basis.config.model.n_layers / c.pp), basis.policy
    elements = {name: numels / c.pp for name, numels in elements.items()}
    micro = basis.config.train.batch // c.micro_batch // c.data
    rows = TRACED_ROWS * layer.host + (1 - layer.host) * c.micro_batch / c.cp
    forward, backward = rows * layer.forward_s, rows * layer.backward_s
    recompute_s = forward if remat.every else (1 - remat.budget) * forward / 2
    out = {
        "computation": micro * (layers * (forward + backward) + rows * layer.ends_s),
        "recomputation": micro * layers * recompute_s,
        "communication on tp": micro * layers * rows * layer.tp_s * (1.5 if remat.every else 1.0),
        "update": update_s(basis, 28 * elements["opt"], tiers.opt, layers * (backward + recompute_s)) + layer.rest_s,
    }
    if c.pp > 1:
        out["bubble"] = bubble_s(basis, c, micro, layers * forward, rows * layer.memory.input)
    if c.cp > 1:
        out["communication on cp"] = cp_s(basis, c, micro, bool(remat.every))
    if c.ep > 1:
        out["communication on ep"] = ep_s(basis, c, micro, bool(remat.every))
        fullest = (basis.device.loads.imbalance(c.ep) - 1.0) * layer.experts
        out["waiting for the fullest experts"] = fullest * (out["computation"] + out["recomputation"])
    for axis, seconds in exposed_s(basis, c, micro, forward, backward + recompute_s).items():
        out[f"communication on {axis}"] = out.get(f"communication on {axis}", 0.0) + seconds
    # Each micro-batch but the first adds to a sum that comes back to the device.
    sums = policy.param if micro == 1 else policy.accumulate
    # States that the host of a GPU updates in its memory stay there: sums of gradients come, and parameters go.
    on_host = basis.device.kind == "cuda" and tiers.opt.memory.on_host
    transfers = (
        (tiers.opt, elements["opt"] * (sums.itemsize + policy.param.itemsize if on_host else 2 * basis.opt_bytes)),
        (tiers.params, 3 * micro * elements["params"] * policy.param.itemsize),
        (tiers.grads, (2 * micro - 1) * elements["grads"] * sums.itemsize),
        (
            tiers.acts,
            2 * micro * c.micro_batch / c.cp * math.ceil(layers / max(1, remat.every)) * layer.memory.input,
        ),
    )
    for memory, name, sharing in ((HOST_MEMORY, "the host", 1), (DISK, "the disk", basis.on_node)):
        offloaded = sum(amount * tier.fraction for tier, amount in transfers if tier.memory == memory)
        if offloaded:
            rates = basis.device.rates_to(memory)
            rate = min(rates.get(way, 0.0) for way in ("read", "write")) / sharing
            hidden = 0.0 if tiers.opt.memory == memory else 0.8 * (out["computation"] + out["recomputation"])
            out[f"transfers to {name}"] = max(0.0, offloaded / rate - hidden) if rate else math.inf
    return out


def cp_s(basis: Basis, c: Candidate, micro: int, recompute: bool) -> float:
    """The seconds of a step in which a rank of cp waits for attention's messages; a ring computes beside."""
    plan = basis.plan_of(c)[0]
    if plan.context is None or plan.heads is None or plan.context.form == "ring":
        return 0.0
    context, itemsize = plan.context, basis.policy.compute.itemsize
    elements = plan.heads.sent(context.form, c.cp, context.inner) * c.micro_batch * basis.config.data.seq_len
    way = basis.ways_of(c)["cp"]
    message = collective_s(way, "all_gather", int(elements * itemsize)).seconds
    return micro * basis.config.model.n_layers * message * (3.0 if recompute else 2.0)


def ep_s(basis: Basis, c: Candidate, micro: int, recompute: bool) -> float:
    """The seconds of a step in which a rank of ep waits for tokens of experts."""
    plan, tokens = basis.plan_of(c)[0], basis.config.data.seq_len * c.micro_batch / c.cp
    ways = basis.ways_of(c)
    exchange_s = expert_messages_s(plan, ways["ep"], tokens * basis.policy.compute.itemsize, basis.device.loads)
    depth = max((leaf.shape[0] for leaf in expert_leaves(plan)), default=0)
    return micro * math.ceil(depth / c.pp) * exchange_s * (3.0 if recompute else 2.0)


def bubble_s(basis: Basis, c: Candidate, micro: int, forward: float, message: float) -> float:
    """The seconds of a step in which the longest rank of a pipeline waits for others and for messages."""
    facts = row_facts(c.schedule, c.pp, c.chunks, c.remat not in ("", "none"))
    way = basis.ways_of(c)["pp"]
    wires = facts.wires + facts.wires_each * (micro - ROW * c.pp)
    return facts.idle * forward + max(0.0, wires) * wire_s(way, 0, 1, int(message))


def update_s(basis: Basis, size: float, tier: Tier, backward: float = 0.0) -> float:
    """The seconds of an optimizer's update that moves `size` bytes, on the device and in its host's memory."""
    fraction = tier.fraction if not tier.memory.on_device and basis.device.kind == "cuda" else 0.0
    memory = basis.device.bandwidth_bytes_s * basis.device.efficiency.get("memory", 1.0)
    host_rate = (
        (basis.device.host_memory_bytes_s or math.inf) * basis.device.efficiency.get(HOST_MEMORY, 1.0) / basis.on_node
    )
    hidden_s = backward if basis.config.train.update != "end" else 0.0
    return size * (1.0 - fraction) / memory + max(0.0, size * fraction / host_rate - hidden_s)


def exposed_s(basis: Basis, c: Candidate, micro: int, forward: float, backward: float) -> dict[str, float]:
    """The exposed communication of parameters and gradients: seconds by axis."""
    layers, every = math.ceil(basis.config.model.n_layers / c.pp), remat_of(c.remat).every
    # Where all stages of a rank stay whole between micro-batches, the first one gathers them.
    stays = c.zero == 3 and basis.config.resident >= c.chunks
    gathers = 1 if stays else micro
    out: dict[str, float] = {}
    for link, (layer, outside) in basis.messages_of(c).items():
        # Of each K recomputed layers, all but the last are gathered once more.
        regather_s = 0.0 if stays else (2.0 - 1.0 / (every or 1)) * layer[PASS]
        # With pp the sums go on until the row ends, and most of them have nothing left to hide behind.
        hidden_s = backward if c.pp == 1 else 0.0
        hidden = (
            gathers * max(0.0, layer[PASS] - forward)
            + micro * max(0.0, regather_s + layer[MICRO_BATCH] - backward)
            + max(0.0, layer[STEP] - hidden_s)
        )
        out[link] = layers * (hidden + layer[UPDATE])
        out[link] += gathers * outside[PASS] + micro * outside[MICRO_BATCH] + outside[STEP] + outside[UPDATE]
    return out


# ---- experts over ep ------------------------------------------------------------------------------------------------


def expert_leaves(plan: Plan) -> list[LeafPlan]:
    """The leaves that ep splits; none without ep."""
    return [leaf for leaf in plan.leaves.values() if "ep" in leaf.compute.axes and plan.mesh.ep.size > 1]


def expert_messages_s(plan: Plan, way: Way, token_bytes: float, loads: Loads) -> float:
    """The seconds of a layer's forward pass in which a rank of ep waits for tokens on their way."""
    assert plan.routed is not None and plan.experts is not None  # a plan with ep
    sent = plan.routed.sent(plan.experts.form, way.size) / 2 * token_bytes
    if plan.experts.form == "exchange":
        return 2 * collective_s(way, "exchange_rows", int(sent * loads.imbalance(way.size))).seconds
    return sum(collective_s(way, collective, int(sent)).seconds for collective in ("all_gather", "psum_scatter"))


MEMORY_BOUND, TIME_BOUND = 0.10, 0.35  # largest relative errors over the cases of tests/test_first_estimate.py


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
    """Memory and step time of a config whose "auto" values are decided, on a mesh of these sizes."""
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
    basis = Basis(config, device, node, {axes["tp"]: closed_layer(job, device)})
    peak, grads = memory_on_device(job, kind=device.kind), grad_bytes(job)
    passes: dict[str, float] = {"activations": peak.activations, "gathered": peak.gathered}
    if "errors" in on_device:  # those of the step, until it is known whether it is skipped
        passes["errors"] = on_device["errors"]
    passes["gradients on their way"] = peak.grads - grads
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
