"""What closed forms of a candidate's memory and time are made from: plans of meshes, and one traced layer.

Two layers are traced once for each size of tp; a layer's activations and time for every micro-batch, recomputation,
stage and mesh follow. State bytes come from the plan's own specs, so they are exact. Each schedule is played once, over
few micro-batches.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from fzero import models
from fzero.comm.ledger import sent_elements
from fzero.core.autodiff import Remat
from fzero.kernels.attention_pattern import BACKWARD_PRODUCTS, FORWARD_PRODUCTS, SPLIT_PRODUCTS
from fzero.models.configs import body_of, frozen_leaves, head_rows
from fzero.planner.devices import Device
from fzero.planner.estimate import MOMENTS, STATE_BYTES, Candidate
from fzero.planner.rates import Way, collective_s, tiled_fraction, ways_of
from fzero.planner.step_trace import trace_step
from fzero.planner.timing import ISSUER, predict
from fzero.run.config.run_config import RunConfig
from fzero.run.config.unused_keys import SIGNS, codec_of
from fzero.run.measure.flops import token_flop
from fzero.run.measure.peak_memory import LayerBytes, codes_to_decode, layer_bytes, residual_elements, segment_numels
from fzero.run.setup import build_optim
from fzero.run.setup.build import Job, build
from fzero.sharding import Context, Plan, fake_mesh, zero_plan
from fzero.sharding.codec import Codec
from fzero.sharding.leaf_plan import transfers, updates
from fzero.sharding.pipeline import FAMILIES, play, schedule, stage_ranks
from fzero.sharding.pipeline.table import Stages
from fzero.sharding.slices import local_numel
from fzero.sharding.spec import DEVICE, DISK, Offload
from fzero.sharding.zero_stages import expect_codec

Seconds = defaultdict[str, float]  # by how often: see LeafTransfer.times
UPDATE = "update"  # in place of STEP in the times of messages behind the update
ROW = 4  # micro-batches for each rank of pp in the rows that `row_facts` plays


class RowFacts(NamedTuple):
    """What waits in a schedule of ROW micro-batches for each rank."""

    idle: float  # of a step, with messages that take no time, in units of a rank's forward pass of a micro-batch
    wires: float  # the messages that the longest rank waits for
    wires_each: float  # more of them for each micro-batch more
    in_flight: int  # the most chunks in flight on a rank


@functools.lru_cache(maxsize=256)
def row_facts(name: str, p: int, v: int, recompute: bool) -> RowFacts:
    """The RowFacts of a schedule, whose backward passes take twice as long as forward ones.

    >>> row_facts("1f1b", 4, 1, False)
    RowFacts(idle=9.0, wires=28.0, wires_each=1.5, in_flight=4)
    """
    ranks = stage_ranks(p, v, FAMILIES[name].placement)
    stages = Stages(tuple((i,) for i in range(p * v)), ranks)
    times = {"F": 1.0 / v, "I": (1.0 + recompute) / v, "W": 1.0 / v}
    wire = 0.1 / v
    facts = []
    for parts in (ROW * p // 2, ROW * p):
        s = schedule(name, stages, parts)
        fast, slow = (play(s, times, delay) for delay in (0.0, wire))
        facts.append(((slow.step - fast.step) / wire, min(fast.idle), max(fast.peak)))
    (less, _, _), (full_wires, idle, max_peak) = facts
    return RowFacts(round(idle, 9), round(full_wires, 6), round((full_wires - less) / (ROW * p / 2), 6), max_peak)


# A search has tens of thousands of candidates with a few dozen texts.
remat_of, offload_of = functools.cache(Remat.parse), functools.cache(Offload.parse)
OPERATORS = 20  # that a block's forward pass issues if it is not compiled; its backward pass twice as many
TOUCHED = (2.0, 4.0)  # bytes that elementwise operators move for each byte kept: forward, backward
TRACED_ROWS = 2  # with one row a compiled block has views instead of the copies it makes with more


class Layer(NamedTuple):
    """The memory and time of one layer on a rank, per row, at one size of tp."""

    memory: LayerBytes
    forward_s: float
    backward_s: float
    tp_s: float  # exposed communication of tensor parallelism, forward and backward
    ends_s: float  # embedding and head of a micro-batch, forward and backward
    host: float  # the fraction of the seconds that the host takes to issue operators, for any number of rows
    rest_s: float  # host time of a step outside the forward and backward passes
    experts: float = 0.0  # the part of its FLOPs that a token's experts have


def layer_of(config: RunConfig, device: Device, tp: int) -> Layer:
    """A Layer of `config` on a device shared by tp ranks, from a trace of TRACED_ROWS rows."""
    depth, rows = min(max(2, models.period(config.model)), config.model.n_layers), TRACED_ROWS
    model = models.shorten(config.model, depth)
    shallow = Candidate(1, 1, tp, 0, "none", "", rows).apply_to(
        replace(
            config,
            preset="",
            codec="",
            model=model,
            train=replace(config.train, batch=rows, micro_batch=rows, measure_every=0),
        )
    )
    traced = trace_step(shallow, {"tp": tp}, target=device.target)
    timing = predict(traced, device)
    live_bytes = [m.parts["activations"] for m in traced.timeline if m.phase == "forward" and m.layer is not None]
    of_layer = {
        i: max((m.parts["activations"] for m in traced.timeline if (m.phase, m.layer) == ("forward", i)), default=0)
        for i in range(depth)
    }
    per_layer = (of_layer[depth - 1] - of_layer[0]) // (depth - 1) if depth > 1 else max(live_bytes)
    job = build(traced.config, fake_mesh(traced.sizes))
    share = tp if shallow.sequence else 1
    inputs = rows * config.data.seq_len * config.model.d_model * job.policy.compute.itemsize // share
    # Only of the passes: the workspace of an update grows with the parameters and not with the rows.
    max_bytes = max(
        m.parts["activations"] + m.parts["workspace"] for m in traced.timeline if m.phase in ("forward", "backward")
    )
    seconds = {
        phase: [timing.layers.get(f"{phase}/{i}", 0.0) for i in range(depth)] for phase in ("forward", "backward")
    }
    ends = sum(timing.phases.get(phase, 0.0) - sum(seconds[phase]) for phase in seconds)
    host = timing.bound.get(ISSUER, 0.0) / max(1e-12, sum(timing.bound.values()))
    return Layer(
        LayerBytes(
            kept=max(per_layer, inputs) // rows,
            input=inputs // rows,
            spare=max(0, max_bytes - depth * per_layer) // rows,
        ),
        forward_s=sum(seconds["forward"]) / depth / rows,
        backward_s=sum(seconds["backward"]) / depth / rows,
        tp_s=timing.exposed.get("tp", 0.0) / depth / rows,
        ends_s=max(0.0, ends) / rows,
        host=host,
        rest_s=host * sum(s for phase, s in timing.phases.items() if phase not in seconds),
        experts=token_flop(job).experts,
    )


def closed_layer(job: Job, device: Device) -> Layer:
    """The Layer of a job by closed forms, as `layer_of` traces it."""
    config, policy, tp = job.config, job.policy, job.mesh.tp.size
    c, seq, itemsize = body_of(config.model), config.data.seq_len, policy.compute.itemsize
    rows = config.train.micro_batch / job.mesh.cp.size  # a rank has its share of each
    residual_bytes = seq * residual_elements(config, tp) * itemsize
    logits = seq * head_rows(config.model) / tp * itemsize
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
    coded, _ = codes_to_decode(job)
    # Codes are read, and the weight is written and read again, in each pass.
    decode_s = coded * (1 + 2 * itemsize) * bytes_s / rows
    return Layer(
        layer_bytes(job),
        forward_s=decode_s
        + max(host_s, 2 * products * gemm_s / float8 + attend[0] + TOUCHED[0] * residual_bytes * bytes_s),
        backward_s=decode_s
        + max(2 * host_s, 4 * products * gemm_s / float8 + attend[1] + TOUCHED[1] * residual_bytes * bytes_s),
        tp_s=tp_seconds(job, device, seq * c.d_model * itemsize),
        ends_s=head * gemm_s + TOUCHED[1] * logits * bytes_s,
        host=0.0,
        rest_s=0.0,
        experts=flop.experts,
    )


def tp_seconds(job: Job, device: Device, full_bytes: int) -> float:
    """The seconds of a layer's four sums over tp of `full_bytes` bytes, for one row."""
    way = ways_of(device, {name: job.mesh[name].size for name in ("dp", "rp", "cp", "tp")}).get("tp")
    return 4 * collective_s(way, "psum", sent_elements("psum", full_bytes, way.size)).seconds if way else 0.0


def admits_codec(basis: Basis, c: Candidate) -> bool:
    """Whether the codec of a search's config goes with a candidate: with its stage, mesh and offload."""
    codec, tiers = codec_of(basis.config), Offload.parse(c.offload)
    try:
        if codec.startswith(SIGNS) and not {tiers.params.memory, tiers.grads.memory, tiers.opt.memory} <= {DEVICE}:
            return False
        if codec:
            expect_codec(Codec.parse(codec), basis.plan_of(c)[0], DISK in (tiers.params.memory, tiers.opt.memory))
    except ValueError:
        return False
    return True


class Basis:
    """What the sketches of one search share: config, device and cached plans."""

    def __init__(self, config: RunConfig, device: Device, on_node: int, layers: Mapping[int, Layer] | None = None):
        """layers: results of `layer_of` by size of tp; None: call it when needed."""
        self.config, self.device, self.on_node = config, device, on_node
        self.model, self.policy = models.build(config.model), build_optim.make_policy(config)
        self.plan, self.ways = functools.cache(self._plan), functools.cache(self._ways)
        self.messages = functools.cache(self._messages)
        self.layer = (
            layers.__getitem__ if layers is not None else functools.cache(lambda tp: layer_of(config, device, tp))
        )
        o = config.optim
        state = self.policy.state.itemsize
        # Bytes for each parameter, with its master weight.
        self.opt_bytes = MOMENTS[o.name] * STATE_BYTES.get(o.states, state) + (state if self.policy.has_master else 0)

    def plan_of(self, c: Candidate) -> tuple[Plan, dict[str, int], dict[str, int]]:
        """(the plan, a rank's elements by kind of state, the elements of the embedding, a layer, the head)."""
        return self.plan(c.dp, c.rp, c.tp, c.zero, c.cp, c.ep)

    def ways_of(self, c: Candidate) -> dict[str, Way]:
        """The Way of each axis, and of several as one link, of a candidate's mesh."""
        return self.ways(c.pp, c.dp, c.rp, c.ep, c.cp, c.tp)

    def _ways(self, pp: int, dp: int, rp: int, ep: int, cp: int, tp: int) -> dict[str, Way]:
        return ways_of(self.device, {"pp": pp, "dp": dp, "rp": rp, "ep": ep, "cp": cp, "tp": tp})

    def messages_of(self, c: Candidate) -> dict[str, tuple[Seconds, Seconds]]:
        """By link the seconds of the messages of a layer, and of what is outside the layers, without pp: of a pass, a
        micro-batch, the sums of a step, and behind the update."""
        return self.messages(c.zero, c.pp, c.dp, c.rp, c.ep, c.cp, c.tp)

    def _messages(
        self, zero: int, pp: int, dp: int, rp: int, ep: int, cp: int, tp: int
    ) -> dict[str, tuple[Seconds, Seconds]]:
        plan, ways = self.plan(dp, rp, tp, zero, cp, ep)[0], self.ways(pp, dp, rp, ep, cp, tp)
        groups: dict[str, list[str]] = {}
        for name in plan.leaves:
            groups.setdefault(name.split("/")[0], []).append(name)
        out: dict[str, tuple[Seconds, Seconds]] = {}
        for names in groups.values():
            first = plan.leaves[names[0]]
            share = first.shape[0] / self.config.model.n_layers if first.stacked else 1.0  # of the layers
            behind = [t._replace(times=UPDATE) for name in names for t in updates(plan, plan.leaves[name])]
            for t in (*transfers(plan, names), *behind):
                seconds = share * collective_s(ways[t.link], t.collective, t.elements * t.itemsize).seconds
                out.setdefault(t.link, (defaultdict(float), defaultdict(float)))[not first.stacked][t.times] += seconds
        return out

    def _plan(
        self, dp: int, rp: int, tp: int, zero: int, cp: int, ep: int
    ) -> tuple[Plan, dict[str, int], dict[str, int]]:
        mesh = fake_mesh({"dp": dp, "rp": rp, "cp": cp, "ep": ep, "tp": tp})
        context = Context.parse(self.config.context)
        frozen = frozen_leaves(self.config.model)
        plan = zero_plan(zero, self.model, mesh, policy=self.policy, sequence=context, frozen=frozen)
        plan = plan.with_experts(self.config.experts).for_update(self.config.train.update)
        elements = {
            kind: sum(
                local_numel(leaf.shape, getattr(leaf, kind), plan.sizes)
                for leaf in plan.leaves.values()
                if leaf.trained or kind == "params"
            )
            for kind in ("params", "grads", "opt")
        }
        return plan, elements, segment_numels(plan)
