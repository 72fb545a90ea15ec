"""The candidates of a search for the fastest way to train a model, and a cheap estimate of each.

A search compares thousands of candidates, so none is traced here. Two layers are traced once for each size of tp; the
activation memory and time of a layer for every micro-batch, recomputation, stage and mesh follow from that. State bytes
come from the plan's own specs, so they are exact also if a leaf does not divide evenly. The estimates decide the order
in which candidates are traced exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fzero import models
from fzero.core import pytree
from fzero.core.autodiff import Remat
from fzero.core.pytree import nearest
from fzero.planner.devices import Device
from fzero.planner.estimate import MOMENTS, STATE_BYTES
from fzero.planner.rates import collective_s, ways_of
from fzero.planner.step_trace import trace_step
from fzero.planner.timing import predict
from fzero.run import build_optim
from fzero.run.config import RunConfig
from fzero.run.memory_check import numel, part_layers, part_numels
from fzero.sharding import Plan, fake_mesh, zero_plan
from fzero.sharding.memory import Offload, Tier
from fzero.sharding.slices import is_stacked

CHOICES: Mapping[str, Sequence[Any]] = {  # the values to try
    "zero": (0, 1, 2, 3),
    "train.remat": ("none", "full", "every:2", "every:4"),
    "offload": ("", "opt=host", "params=host,opt=host", "params=host,grads=host,opt=host", "acts=host"),
    "train.micro_batch": (1, 2, 4, 8, 16, 32),
}
TRACED_ROWS = 2  # with one row a compiled block has views instead of the copies it makes with more


class Candidate(NamedTuple):
    """One way to train: a mesh, ZeRO stage, recomputation, offload and micro-batch."""

    dp: int
    rp: int
    tp: int
    zero: int
    remat: str
    offload: str
    micro_batch: int

    @property
    def mesh(self) -> dict[str, int]:
        """The axes of the mesh that are larger than 1."""
        return {name: size for name, size in (("dp", self.dp), ("rp", self.rp), ("tp", self.tp)) if size > 1}

    def of(self, config: RunConfig) -> RunConfig:
        """Return `config` changed to train in this way, with sequence parallelism wherever tp divides the sequence."""
        sequence = self.tp > 1 and config.data.seq_len % self.tp == 0
        train = replace(config.train, remat=self.remat, micro_batch=self.micro_batch)
        return replace(config, mesh=self.mesh, zero=self.zero, offload=self.offload, sequence=sequence, train=train)


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


def candidates(
    config: RunConfig, ranks: int, on_node: int, choices: Mapping[str, Sequence[Any]] | None = None
) -> Iterator[Candidate]:
    """All candidates for `ranks` ranks that the model and the batch allow; tp stays within a node.

    choices: values in place of those of CHOICES, by name. A mesh with rp keeps ZeRO's shards within a group of dp
    ranks, a power of two times those of a node. Raises ValueError if there is none, and for a name that CHOICES has
    not."""
    for name in choices or {}:
        if name not in CHOICES:
            raise ValueError(f"choices gives {name!r}{nearest(name, CHOICES)}; a search tries {', '.join(CHOICES)}")
    zeros, remats, offloads, micros = ({**CHOICES, **(choices or {})}[name] for name in CHOICES)
    found = 0
    for tp in sizes_of_tp(config, ranks, on_node):
        data = ranks // tp
        for micro in (m for m in micros if config.train.batch % m == 0 and (config.train.batch // m) % data == 0):
            for dp in groups_of(data, max(1, on_node // tp)):
                for zero in zeros if data > 1 else (0,):
                    if zero == 0 and dp != data:
                        continue  # without shards, dp and rp do the same
                    for remat in remats:
                        for offload in offloads:
                            if "acts=" in offload and not Remat.parse(remat).every:
                                continue
                            found += 1
                            yield Candidate(dp, data // dp, tp, zero, remat, offload, micro)
    if not found:
        widest = max(sizes_of_tp(config, ranks, on_node))
        least = ranks // widest
        raise ValueError(
            f"no mesh of {ranks} ranks can share a batch of {config.train.batch} sequences: with tp={widest}, the "
            f"largest within a node, there are {least} data ranks; use a --batch that {least} divides"
        )


def sizes_of_tp(config: RunConfig, ranks: int, on_node: int) -> list[int]:
    """The sizes of tp within a node that divide the ranks and the model."""
    return [
        tp for tp in range(1, min(ranks, on_node) + 1) if ranks % tp == 0 and on_node % tp == 0 and divides(config, tp)
    ]


def divides(config: RunConfig, tp: int) -> bool:
    """Whether tp divides the model's heads, hidden units and vocabulary."""
    try:
        zero_plan(0, models.build(config.model), fake_mesh({"tp": tp}))
    except ValueError:
        return False
    return True


def groups_of(data: int, on_node: int) -> list[int]:
    """The sizes of dp to try for `data` data ranks: all of them, and powers of two times those of a node."""
    sizes, size = {data}, min(on_node, data)
    while size < data and size > 1:
        if data % size == 0:
            sizes.add(size)
        size *= 2
    return sorted(sizes, reverse=True)


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

    def _plan(self, dp: int, rp: int, tp: int, zero: int) -> tuple[Plan, dict[str, int], dict[str, int]]:
        """Return (the plan, a rank's elements by kind of state, the elements of the embedding, a layer and the
        head)."""
        plan = zero_plan(zero, self.model, fake_mesh({"dp": dp, "rp": rp, "tp": tp}), policy=self.policy)
        trees = {"params": plan.params, "grads": plan.grads, "opt": plan.opt}
        return plan, {name: numel(plan, specs) for name, specs in trees.items()}, part_numels(plan)

    @staticmethod
    def largest_layer(parts: Mapping[str, int]) -> int:
        """The elements of the largest layer, of those of `part_numels`; of the largest part without layers."""
        layers = [size for part, size in parts.items() if is_stacked(f"{part}/")]
        return max(layers or parts.values())

    def memory(self, c: Candidate) -> tuple[dict[str, float], float]:
        """Estimate (a rank's peak device memory in bytes by component, its bytes in the host's memory)."""
        plan, held, parts = self.plan(c.dp, c.rp, c.tp, c.zero)
        layer, tiers, remat = self.layer(c.tp), Offload.parse(c.offload), Remat.parse(c.remat)
        rows, layers, policy = c.micro_batch, self.config.model.n_layers, self.policy
        micro_batches = self.config.train.batch // c.micro_batch // (c.dp * c.rp)
        part = max(parts.values())
        kept = layers * layer.kept_bytes * remat.budget
        if remat.every:
            boundaries = 2 if tiers.acts.memory != "device" else math.ceil(layers / remat.every)
            kept = boundaries * layer.input_bytes + remat.every * layer.kept_bytes
        sums = held["grads"] * (policy.param if micro_batches == 1 else policy.accumulate).itemsize
        sharded = any("dp" in spec.axes for spec in pytree.leaves(plan.params))
        gathered = (self.config.prefetch + 1) * self.largest_layer(parts) * policy.param.itemsize
        groups = {
            "params": held["params"] * policy.param.itemsize,
            "optimizer": held["opt"] * self.opt_bytes,
            "grads": sums,
        }
        where = {"params": tiers.params, "optimizer": tiers.opt, "grads": tiers.grads}
        away = {name for name, tier in where.items() if tier.memory != "device"}
        host = sum(groups[name] * tier.fraction for name, tier in where.items() if tier.memory == "host")
        if tiers.acts.memory == "host":
            host += rows * math.ceil(layers / max(1, remat.every)) * layer.input_bytes
        on_device = {
            name: size * (1.0 - where[name].fraction if name in away else 1.0) for name, size in groups.items()
        }
        on_device["grads"] += 2 * part * policy.param.itemsize if c.dp * c.rp > 1 or "grads" in away else 0
        on_device["gathered"] = gathered if (sharded and c.dp > 1) or "params" in away else 0.0
        return on_device | {"activations": rows * (kept + layer.spare_bytes)}, host

    def time(self, c: Candidate) -> dict[str, float]:
        """Estimate the seconds of a step, by cause."""
        layer, remat, tiers = self.layer(c.tp), Remat.parse(c.remat), Offload.parse(c.offload)
        _, held, parts = self.plan(c.dp, c.rp, c.tp, c.zero)
        layers, data, policy = self.config.model.n_layers, c.dp * c.rp, self.policy
        micro = self.config.train.batch // c.micro_batch // data
        rows = TRACED_ROWS * layer.host + (1 - layer.host) * c.micro_batch
        forward, backward = rows * layer.forward_s, rows * layer.backward_s
        again = forward if remat.every else (1 - remat.budget) * forward / 2
        out = {
            "computation": micro * (layers * (forward + backward) + rows * layer.ends_s),
            "recomputation": micro * layers * again,
            "communication on tp": micro * layers * rows * layer.tp_s * (1.5 if remat.every else 1.0),
            "update": self.update_s(28 * held["opt"], tiers.opt) + layer.rest_s,
        }
        for axis, exposed in self.exposed(c, micro, forward, backward + again, parts, held).items():
            out[f"communication on {axis}"] = exposed
        # Each micro-batch but the first adds to a sum that comes back to the device.
        sums = policy.param if micro == 1 else policy.accumulate
        # States that the host of a GPU updates in its memory stay there: sums of gradients come, and parameters go.
        on_host = self.device.kind == "cuda" and tiers.opt.memory == "host"
        moved = (
            (tiers.opt, held["opt"] * (sums.itemsize + policy.param.itemsize if on_host else 2 * self.opt_bytes)),
            (tiers.params, 3 * micro * held["params"] * policy.param.itemsize),
            (tiers.grads, (2 * micro - 1) * held["grads"] * sums.itemsize),
            (tiers.acts, 2 * micro * c.micro_batch * math.ceil(layers / max(1, remat.every)) * layer.input_bytes),
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

    def update_s(self, size: float, tier: Tier) -> float:
        """Estimate the seconds of an optimizer's update that moves `size` bytes: on the device, and in its host's
        memory as far as the state is there or on a disk."""
        part = tier.fraction if tier.memory != "device" and self.device.kind == "cuda" else 0.0
        memory = self.device.bandwidth_bytes_s * self.device.efficiency.get("memory", 1.0)
        there = (self.device.host_memory_bytes_s or math.inf) * self.device.efficiency.get("host", 1.0) / self.on_node
        return size * ((1.0 - part) / memory + part / there)

    def exposed(
        self,
        c: Candidate,
        micro: int,
        forward: float,
        backward: float,
        parts: Mapping[str, int],
        held: Mapping[str, int],
    ) -> dict[str, float]:
        """Estimate the exposed data-parallel communication: seconds of a step, by axis."""
        layers, size = self.config.model.n_layers, self.policy.param.itemsize
        sums = self.policy.reduce.itemsize
        ways = ways_of(self.device, {"dp": c.dp, "rp": c.rp, "tp": c.tp})
        out: dict[str, float] = {}

        def seconds(axis: str, what: str, elements: float, itemsize: int) -> float:
            way = ways.get(axis)
            times = 2 if what == "psum" else 1
            return (
                collective_s(way, what, int(times * elements * itemsize * (way.size - 1) / way.size)).seconds
                if way
                else 0.0
            )

        depths = part_layers(self.plan(c.dp, c.rp, c.tp, c.zero)[0])
        whole = sum(depths[part] * size for part, size in parts.items())
        ends = sum(size for part, size in parts.items() if not is_stacked(f"{part}/"))
        block = (whole - ends) / layers
        if c.dp > 1:
            gather, scatter = seconds("dp", "all_gather", block, size), seconds("dp", "psum_scatter", block, sums)
            times = micro if c.zero >= 2 else 1  # below stage 2 sums are made once
            outside = times * seconds("dp", "psum_scatter" if c.zero >= 2 else "psum", ends, sums)
            if c.zero == 3:
                outside += micro * seconds("dp", "all_gather", ends, size)
                # Of each K recomputed layers, all but the last are gathered once more.
                again = (2.0 - 1.0 / (Remat.parse(c.remat).every or 1)) * gather
                out["dp"] = (
                    micro * layers * (max(0.0, gather - forward) + max(0.0, again + scatter - backward)) + outside
                )
            elif c.zero == 2:
                out["dp"] = (
                    micro * layers * max(0.0, scatter - backward) + outside + seconds("dp", "all_gather", whole, size)
                )
            else:
                out["dp"] = (
                    layers * max(0.0, seconds("dp", "psum" if c.zero == 0 else "psum_scatter", block, sums) - backward)
                    + outside
                )
                out["dp"] += seconds("dp", "all_gather", whole, size) if c.zero else 0.0
        if c.rp > 1:
            out["rp"] = seconds("rp", "psum", held["grads"], sums) * (micro if c.zero == 0 else 1)
        return out

    def sketch(self, c: Candidate) -> Sketch:
        return Sketch(c, *self.memory(c), self.time(c))
