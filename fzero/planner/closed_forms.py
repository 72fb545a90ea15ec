"""Closed forms of a candidate's memory and time: a cheap estimate of each candidate of a search.

A search compares thousands of candidates, so none is traced here. Two layers are traced once for each size of tp; the
activation memory and time of a layer for every micro-batch, recomputation, stage and mesh follow from that. State bytes
come from the plan's own specs, so they are exact also if a leaf does not divide evenly; with pp a rank is given its
share of them. A pipeline's waiting is that of its schedule played over few micro-batches. The estimates decide the
order in which candidates are traced exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from fzero import models
from fzero.comm.tables import SHARDS, links_of
from fzero.core.autodiff import Remat
from fzero.models.lora import FROZEN
from fzero.models.presets import body_of
from fzero.models.score import head_rows
from fzero.planner import experts
from fzero.planner.candidates import Candidate
from fzero.planner.closed_memory import Activations, Weights, loss_bytes, peak
from fzero.planner.closed_rows import ROW, row_facts
from fzero.planner.devices import Device
from fzero.planner.estimate import MOMENTS, STATE_BYTES
from fzero.planner.rates import collective_s, ways_of, wire_s
from fzero.planner.step_trace import trace_step
from fzero.planner.timing import predict
from fzero.run import build_optim
from fzero.run.config import RunConfig
from fzero.run.memory_check import part_layers, part_numels
from fzero.sharding import Context, Plan, fake_mesh, zero_plan
from fzero.sharding.memory import Offload, Tier
from fzero.sharding.pipeline import FAMILIES
from fzero.sharding.slices import is_stacked, local_numel

OWED = 1.5  # what a layer holds between I and W, of what its forward pass keeps (docs/pipeline.md, Memory)
TRACED_ROWS = 2  # with one row a compiled block has views instead of the copies it makes with more


class Layer(NamedTuple):
    """The memory and time of one layer on a rank, for each row of a micro-batch, at one size of tp."""

    kept_bytes: int  # activations for its backward pass
    input_bytes: int  # its input alone, which recomputation keeps
    spare_bytes: int  # temporary memory while it and the head are computed
    forward_s: float
    backward_s: float
    tp_s: float  # exposed communication of tensor parallelism, forward and backward
    ends_s: float  # embedding and head of a micro-batch, forward and backward
    host: float  # the fraction of the seconds that the host takes to issue operators, for any number of rows
    rest_s: float  # host time of a step outside the forward and backward passes


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


def layer_of(config: RunConfig, device: Device, tp: int) -> Layer:
    """Estimate a Layer of `config` on a device shared by tp ranks, from a trace of TRACED_ROWS rows and two layers, or
    a period of those that differ.
    """
    few, rows = min(max(2, models.period(config.model)), config.model.n_layers), TRACED_ROWS
    model = models.shorten(config.model, few)
    one = Candidate(1, 1, tp, 0, "none", "", rows).of(
        replace(
            config, preset="", model=model, train=replace(config.train, batch=rows, micro_batch=rows, measure_every=0)
        )
    )
    traced = trace_step(one, {"tp": tp}, target=device.target)
    timing = predict(traced, device)
    kept = [m.parts["activations"] for m in traced.timeline if m.phase == "forward" and m.layer is not None]
    of_layer = {
        i: max((m.parts["activations"] for m in traced.timeline if (m.phase, m.layer) == ("forward", i)), default=0)
        for i in range(few)
    }
    per_layer = (of_layer[few - 1] - of_layer[0]) // (few - 1) if few > 1 else max(kept)
    policy = build_optim.make_policy(traced.config)
    share = tp if one.sequence else 1
    inputs = rows * config.data.seq_len * config.model.d_model * policy.compute.itemsize // share
    # Only of the passes: the workspace of an update grows with the parameters and not with the rows.
    most = max(
        m.parts["activations"] + m.parts["workspace"] for m in traced.timeline if m.phase in ("forward", "backward")
    )
    seconds = {phase: [timing.layers.get(f"{phase}/{i}", 0.0) for i in range(few)] for phase in ("forward", "backward")}
    ends = sum(timing.phases.get(phase, 0.0) - sum(seconds[phase]) for phase in seconds)
    host = timing.bound.get("host", 0.0) / max(1e-12, sum(timing.bound.values()))
    return Layer(
        kept_bytes=max(per_layer, inputs) // rows,
        input_bytes=inputs // rows,
        spare_bytes=max(0, most - few * per_layer) // rows,
        forward_s=sum(seconds["forward"]) / few / rows,
        backward_s=sum(seconds["backward"]) / few / rows,
        tp_s=timing.exposed.get("tp", 0.0) / few / rows,
        ends_s=max(0.0, ends) / rows,
        host=host,
        rest_s=host * sum(s for phase, s in timing.phases.items() if phase not in seconds),
    )


def stacked(part: str) -> bool:
    """Whether a part of a model has layers."""
    return is_stacked(f"{part}/")


class Sketcher:
    """Makes the Sketches of one search and caches what they share."""

    def __init__(self, config: RunConfig, device: Device, on_node: int, layers: Mapping[int, Layer] | None = None):
        """layers: results of `layer_of` by size of tp; None: call it when needed."""
        self.config, self.device, self.on_node = config, device, on_node
        self.model, self.policy = models.build(config.model), build_optim.make_policy(config)
        self.plan = functools.cache(self._plan)
        self.layer = (
            layers.__getitem__ if layers is not None else functools.cache(lambda tp: layer_of(config, device, tp))
        )
        o = config.optim
        state = self.policy.state.itemsize
        # Bytes for each parameter, with its master weight.
        self.opt_bytes = MOMENTS[o.name] * STATE_BYTES.get(o.states, state) + (state if self.policy.has_master else 0)

    def plan_of(self, c: Candidate) -> tuple[Plan, dict[str, int], dict[str, int]]:
        """Return (the plan, a rank's elements by kind of state, the elements of the embedding, a layer and the
        head)."""
        return self.plan(c.dp, c.rp, c.tp, c.zero, c.cp, c.ep)

    def _plan(
        self, dp: int, rp: int, tp: int, zero: int, cp: int, ep: int
    ) -> tuple[Plan, dict[str, int], dict[str, int]]:
        mesh = fake_mesh({"dp": dp, "rp": rp, "cp": cp, "ep": ep, "tp": tp})
        context = Context.parse(self.config.context)
        frozen = FROZEN if isinstance(self.config.model, models.LoRAConfig) else None
        plan = zero_plan(zero, self.model, mesh, policy=self.policy, sequence=context, frozen=frozen)
        plan = plan.with_experts(self.config.experts)
        held = {
            what: sum(
                local_numel(leaf.shape, getattr(leaf, what), plan.sizes)
                for leaf in plan.leaves.values()
                if leaf.trained or what == "params"
            )
            for what in ("params", "grads", "opt")
        }
        return plan, held, part_numels(plan)

    @staticmethod
    def largest_layer(parts: Mapping[str, int]) -> int:
        """The elements of the largest layer, of those of `part_numels`; of the largest part without layers."""
        layers = [size for part, size in parts.items() if stacked(part)]
        return max(layers or parts.values())

    def memory(self, c: Candidate) -> tuple[dict[str, float], float]:
        """Estimate (a rank's peak device memory in bytes by component, its bytes in the host's memory)."""
        _, held, parts = self.plan_of(c)
        layer, tiers, remat = self.layer(c.tp), Offload.parse(c.offload), Remat.parse(c.remat)
        # A rank of cp has its share of the tokens of each row, of all but the keys and values of attention.
        rows, layers, policy = c.micro_batch / c.cp, self.config.model.n_layers, self.policy
        micro_batches = self.config.train.batch // c.micro_batch // c.data
        held = {name: numels / c.pp for name, numels in held.items()}
        alive: float = layers
        if c.pp > 1:
            chunks = row_facts(c.schedule, c.pp, c.chunks, bool(remat.every)).in_flight
            alive = math.ceil(layers / c.pp / c.chunks) * min(chunks, micro_batches * c.chunks)
            alive *= OWED if FAMILIES[c.schedule].split else 1.0
        groups = {
            "params": held["params"] * policy.param.itemsize * (1 + (self.config.train.update == "delayed")),
            "optimizer": held["opt"] * self.opt_bytes,
            "grads": held["grads"] * (policy.param if micro_batches == 1 else policy.accumulate).itemsize,
        }
        where = {"params": tiers.params, "optimizer": tiers.opt, "grads": tiers.grads}
        away = {name: groups[name] * tier.fraction for name, tier in where.items() if tier.memory != "device"}
        host = sum(size for name, size in away.items() if where[name].memory == "host")
        if tiers.acts.memory == "host":
            host += rows * math.ceil(alive / max(1, remat.every)) * layer.input_bytes
        on_device = {name: groups[name] - away.get(name, 0.0) for name in ("params", "optimizer")}
        sums = self.weights(c, micro_batches, groups["grads"] - away.get("grads", 0.0))
        on_device |= peak(self.activations(c, alive), sums)
        if c.pp > 1:  # what the first and the last stage use outside of the layers, and the sums of its gradients
            ends = max((n for name, n in parts.items() if not stacked(name)), default=0)
            on_device["gathered"] += ends * policy.param.itemsize
            on_device["grads"] += ends * policy.accumulate.itemsize
        return on_device, host

    def activations(self, c: Candidate, alive: float) -> Activations:
        """What activations take on a rank that keeps those of so many layers."""
        layer, remat, compute = self.layer(c.tp), Remat.parse(c.remat), self.policy.compute
        rows = c.micro_batch / c.cp
        plan = self.plan_of(c)[0]
        spare = experts.spare_bytes(plan, self.config, compute.itemsize)
        each = (rows * (layer.kept_bytes + spare) + self.cp_bytes(c, "kept")) * remat.budget
        kept, again, last = alive * each, 0.0, min(2, alive) * each
        if remat.every:
            away = Offload.parse(c.offload).acts.memory != "device"
            inputs = 2 if away else math.ceil(alive / remat.every)
            kept, again = inputs * rows * layer.input_bytes, remat.every * each
            last = 0.0 if away else min(2 // remat.every, inputs) * rows * layer.input_bytes
        columns, width = head_rows(self.config.model) // c.tp, 0 if plan.frozen else body_of(self.config.model).d_model
        return Activations(
            kept,
            again,
            last,
            spare=max(rows * layer.spare_bytes, 2 * self.cp_bytes(c, "keys_held")),
            stream=rows * layer.input_bytes,
            loss=loss_bytes(math.ceil(rows * self.config.data.seq_len), columns, width, compute, self.device.kind),
        )

    def weights(self, c: Candidate, micro_batches: int, sums: float) -> Weights:
        """What gradients and gathered parameters take on a rank. sums: bytes of the sums of gradients on its device."""
        plan, _, parts = self.plan_of(c)
        tiers, policy, several = Offload.parse(c.offload), self.policy, c.rp * c.sharing > 1
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
            layer=self.largest_layer(parts),
            param=policy.param.itemsize,
            reduce=policy.reduce.itemsize if reduces else 0,
            trained=not plan.frozen,
            ahead=self.config.prefetch
            + math.ceil(self.config.model.n_layers / c.pp / c.chunks) * min(self.config.resident, c.chunks),
            gathers=any(map(stacked, fetched)),
            ends_gathered=fetched.get(where, 0) * policy.param.itemsize,
        )

    def cp_bytes(self, c: Candidate, what: str) -> float:
        """The bytes that attention over cp needs in a layer, by a name of the methods of Heads: `kept` or
        `keys_held`."""
        plan = self.plan_of(c)[0]
        if plan.context is None or plan.heads is None:
            return 0.0
        elements = getattr(plan.heads, what)(plan.context.form, c.cp)
        return elements * c.micro_batch * self.config.data.seq_len * self.policy.compute.itemsize

    def cp_s(self, c: Candidate, micro: int, again: bool) -> float:
        """Estimate the seconds of a step in which a rank of cp waits for the messages of attention: all of them, but
        those of a ring, beside which it computes."""
        plan = self.plan_of(c)[0]
        if plan.context is None or plan.heads is None or plan.context.form == "ring":
            return 0.0
        context, itemsize = plan.context, self.policy.compute.itemsize
        elements = plan.heads.sent(context.form, c.cp, context.inner) * c.micro_batch * self.config.data.seq_len
        way = ways_of(self.device, {"dp": c.dp, "rp": c.rp, "cp": c.cp, "tp": c.tp})["cp"]
        message = collective_s(way, "all_gather", int(elements * itemsize)).seconds
        return micro * self.config.model.n_layers * message * (3.0 if again else 2.0)

    def ep_s(self, c: Candidate, micro: int, again: bool) -> float:
        """Estimate the seconds of a step in which a rank of ep waits for the tokens of experts, there and back."""
        plan, tokens = self.plan_of(c)[0], self.config.data.seq_len * c.micro_batch / c.cp
        ways = ways_of(self.device, {"pp": c.pp, "dp": c.dp, "rp": c.rp, "ep": c.ep, "cp": c.cp, "tp": c.tp})
        there = experts.messages_s(plan, ways["ep"], tokens * self.policy.compute.itemsize, self.device.loads)
        return micro * math.ceil(experts.depth(plan) / c.pp) * there * (3.0 if again else 2.0)

    def time(self, c: Candidate) -> dict[str, float]:
        """Estimate the seconds of a step, by cause."""
        layer, remat, tiers = self.layer(c.tp), Remat.parse(c.remat), Offload.parse(c.offload)
        plan, held, parts = self.plan_of(c)
        layers, policy = math.ceil(self.config.model.n_layers / c.pp), self.policy
        held = {name: numels / c.pp for name, numels in held.items()}
        micro = self.config.train.batch // c.micro_batch // c.data
        rows = TRACED_ROWS * layer.host + (1 - layer.host) * c.micro_batch / c.cp
        forward, backward = rows * layer.forward_s, rows * layer.backward_s
        again = forward if remat.every else (1 - remat.budget) * forward / 2
        out = {
            "computation": micro * (layers * (forward + backward) + rows * layer.ends_s),
            "recomputation": micro * layers * again,
            "communication on tp": micro * layers * rows * layer.tp_s * (1.5 if remat.every else 1.0),
            "update": self.update_s(28 * held["opt"], tiers.opt, layers * (backward + again)) + layer.rest_s,
        }
        if c.pp > 1:
            out["bubble"] = self.bubble_s(c, micro, layers * forward, rows * layer.input_bytes)
        if c.cp > 1:
            out["communication on cp"] = self.cp_s(c, micro, bool(remat.every))
        if c.ep > 1:
            out["communication on ep"] = self.ep_s(c, micro, bool(remat.every))
            fullest = (self.device.loads.imbalance(c.ep) - 1.0) * experts.flop_part(plan, self.config)
            out["waiting for the fullest experts"] = fullest * (out["computation"] + out["recomputation"])
        for axis, exposed in self.exposed(c, micro, forward, backward + again, parts, held).items():
            out[f"communication on {axis}"] = out.get(f"communication on {axis}", 0.0) + exposed
        # Each micro-batch but the first adds to a sum that comes back to the device.
        sums = policy.param if micro == 1 else policy.accumulate
        # States that the host of a GPU updates in its memory stay there: sums of gradients come, and parameters go.
        on_host = self.device.kind == "cuda" and tiers.opt.memory == "host"
        moved = (
            (tiers.opt, held["opt"] * (sums.itemsize + policy.param.itemsize if on_host else 2 * self.opt_bytes)),
            (tiers.params, 3 * micro * held["params"] * policy.param.itemsize),
            (tiers.grads, (2 * micro - 1) * held["grads"] * sums.itemsize),
            (
                tiers.acts,
                2 * micro * c.micro_batch / c.cp * math.ceil(layers / max(1, remat.every)) * layer.input_bytes,
            ),
        )
        for memory, rates, name, sharing in (
            ("host", self.device.host, "the host", 1),
            ("nvme", self.device.nvme, "the disk", self.on_node),
        ):
            away = sum(amount * tier.fraction for tier, amount in moved if tier.memory == memory)
            if away:
                rate = min((rates.get(way, 0.0) for way in ("read", "write")), default=0.0) / sharing
                rate *= self.device.efficiency.get("host", 1.0) if memory == "host" else 1.0
                hidden = 0.0 if tiers.opt.memory == memory else 0.8 * (out["computation"] + out["recomputation"])
                out[f"transfers to {name}"] = max(0.0, away / rate - hidden) if rate else math.inf
        return out

    def bubble_s(self, c: Candidate, micro: int, forward: float, message: float) -> float:
        """Estimate the seconds of a step in which the longest rank of a pipeline waits for others and for messages.

        forward: the seconds of a rank's layers for one micro-batch. message: its bytes.
        """
        facts = row_facts(c.schedule, c.pp, c.chunks, c.remat not in ("", "none"))
        way = ways_of(self.device, {"pp": c.pp, "dp": c.dp, "rp": c.rp, "ep": c.ep, "tp": c.tp})["pp"]
        wires = facts.wires + facts.wires_each * (micro - ROW * c.pp)
        return facts.idle * forward + max(0.0, wires) * wire_s(way, 0, 1, int(message))

    def update_s(self, size: float, tier: Tier, backward: float = 0.0) -> float:
        """Estimate the seconds of an optimizer's update that moves `size` bytes: on the device, and in its host's
        memory as far as the state is there or on a disk.

        backward: the seconds of the last micro-batch's backward pass, beside which the host updates where
        train.update says so.
        """
        part = tier.fraction if tier.memory != "device" and self.device.kind == "cuda" else 0.0
        memory = self.device.bandwidth_bytes_s * self.device.efficiency.get("memory", 1.0)
        there = (self.device.host_memory_bytes_s or math.inf) * self.device.efficiency.get("host", 1.0) / self.on_node
        beside = backward if self.config.train.update != "end" else 0.0
        return size * (1.0 - part) / memory + max(0.0, size * part / there - beside)

    def exposed(
        self,
        c: Candidate,
        micro: int,
        forward: float,
        backward: float,
        parts: Mapping[str, int],
        held: Mapping[str, float],
    ) -> dict[str, float]:
        """Estimate the exposed data-parallel communication: seconds of a step, by axis."""
        layers, size = math.ceil(self.config.model.n_layers / c.pp), self.policy.param.itemsize
        sums = self.policy.reduce.itemsize
        ways = ways_of(self.device, {"pp": c.pp, "dp": c.dp, "rp": c.rp, "ep": c.ep, "cp": c.cp, "tp": c.tp})
        # The link of the ranks that share the states, and that of those which share a rank's experts: none or one.
        sizes = {"dp": c.dp, "ep": c.ep, "cp": c.cp}
        links, own = links_of(SHARDS, sizes), links_of(SHARDS, {**sizes, "ep": 1})
        plan = self.plan_of(c)[0]
        theirs = experts.numel(plan) / self.config.model.n_layers  # of a layer, of a rank's experts
        out: dict[str, float] = {}

        def seconds(axis: str, what: str, elements: float, itemsize: int, experts: float = 0.0) -> float:
            """experts: those of the elements that the ranks of `own` share."""
            times, found = 2 if what == "psum" else 1, 0.0
            for link, part in ((links[:1] if axis == "dp" else [axis], elements - experts), (own, experts)):
                way = ways.get(link[0]) if link and part else None
                if way is not None:
                    sent = int(times * part * itemsize * (way.size - 1) / way.size)
                    found += collective_s(way, what, sent).seconds
            return found

        depths = part_layers(plan)
        whole = sum(depths[part] * size for part, size in parts.items())
        ends = sum(size for part, size in parts.items() if not stacked(part))
        block = (whole - ends) / self.config.model.n_layers
        whole = ends + layers * block
        if links:
            gather = seconds("dp", "all_gather", block, size, theirs)
            scatter = seconds("dp", "psum_scatter", block, sums, theirs)
            times = micro if c.zero >= 2 else 1  # below stage 2 sums are made once
            outside = times * seconds("dp", "psum_scatter" if c.zero >= 2 else "psum", ends, sums)
            if c.zero == 3:
                # Where all stages of a rank stay whole between micro-batches, the first one gathers them.
                stays = self.config.resident >= c.chunks
                gathers = 1 if stays else micro
                outside += gathers * seconds("dp", "all_gather", ends, size)
                # Of each K recomputed layers, all but the last are gathered once more.
                again = (2.0 - 1.0 / (Remat.parse(c.remat).every or 1)) * gather
                again = 0.0 if stays else again
                out["dp"] = outside + layers * (
                    gathers * max(0.0, gather - forward) + micro * max(0.0, again + scatter - backward)
                )
            elif c.zero == 2:
                out["dp"] = (
                    micro * layers * max(0.0, scatter - backward)
                    + outside
                    + seconds("dp", "all_gather", whole, size, layers * theirs)
                )
            else:
                # With pp the sums go on until the row ends, and most of them have nothing left to hide behind.
                beside = backward if c.pp == 1 else 0.0
                what = "psum" if c.zero == 0 else "psum_scatter"
                out["dp"] = layers * max(0.0, seconds("dp", what, block, sums, theirs) - beside) + outside
                out["dp"] += seconds("dp", "all_gather", whole, size, layers * theirs) if c.zero else 0.0
        out = {links[0]: out["dp"]} if links else {}
        if c.rp > 1:
            out["rp"] = seconds("rp", "psum", held["grads"], sums) * (micro if c.zero == 0 else 1)
        return out

    def sketch(self, c: Candidate) -> Sketch:
        return Sketch(c, *self.memory(c), self.time(c))
