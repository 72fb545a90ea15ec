"""What a step of generation reads and computes on a rank, and how long that takes: rooflines, from data sheets or
`fzero bench`.

A step reads the weights once, whatever its rows are, the pages of each row, and of experts those that its tokens
choose: of E, of which each of N tokens takes k, E (1 - (1 - k / E)^N) if they are chosen evenly. A token costs 2 FLOPs
a weight that it is multiplied with, and 2 (K + V) a head and visible key. The larger of bytes over bandwidth and FLOPs
over the peak is the step's time, if neither the host, which starts its operators, nor the link of weights that rest
elsewhere, which come beside the computation, takes longer. On a CPU, which is its own host, the three are added. Sums
over tp come in between.

Ref: Williams et al. 2009, "Roofline"; Pope et al. 2022, "Efficiently scaling transformer inference", arXiv:2211.05102,
section 2.1; Aminabadi et al. 2022, "DeepSpeed inference", arXiv:2207.00032, section 6 (weights from host and disk).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fzero.comm.ledger import sent_elements
from fzero.generate import PageSpec
from fzero.kernels.attention_pattern import Pattern
from fzero.kernels.quantize import codes_a_byte
from fzero.models import Model
from fzero.models.base import OF_EXPERTS
from fzero.models.config_values import parse_layers
from fzero.models.configs import DeepSeekConfig, body_of
from fzero.models.deepseek import MTP_JOIN, MTP_STACK
from fzero.planner.devices import Device
from fzero.planner.rates import collective_s, ways_of
from fzero.sharding import Plan
from fzero.sharding.leaf_plan import LeafPlan
from fzero.sharding.spec import DISK, HOST_MEMORY

COPYING = 1.1  # how much longer a CPU computes while weights come from a disk: it copies them
SAMPLES = 9  # queries of a row whose visible keys are counted


class Rows(NamedTuple):
    """Equal rows of a step: tokens of a request, the last of which has `context` positions, itself among them."""

    tokens: int
    context: int
    count: float = 1


class StepTime(NamedTuple):
    """The seconds of a step of a rank, by what takes them."""

    memory_s: float  # to read weights and pages
    compute_s: float
    host_s: float  # to start the operators
    link_s: float  # until weights have come from the host or a disk, and shards of other ranks
    sums_s: float  # over tp
    serial: bool  # whether the host computes itself, a CPU

    @property
    def computing_s(self) -> float:
        """The time of the operators: a GPU reads, multiplies and is given work at once, a CPU does one by one."""
        if self.serial:
            return self.memory_s + self.compute_s + self.host_s
        return max(self.memory_s, self.compute_s, self.host_s)

    @property
    def hides_link(self) -> bool:
        """Whether the kernels take as long as weights that come meanwhile; a CPU copies these too."""
        kernels_s = COPYING * self.computing_s if self.serial else max(self.memory_s, self.compute_s)
        return kernels_s >= self.link_s

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return max(self.computing_s, self.link_s) + self.sums_s

    @property
    def binds(self) -> str:
        """What takes the most of it: "memory", "compute", "host", "link" or "sums"."""
        return max(("memory", "compute", "host", "link", "sums"), key=lambda name: getattr(self, f"{name}_s"))


class WeightCounts(NamedTuple):
    """The weights that a rank of tp multiplies with: bytes as they rest, and elements."""

    layers: tuple[int, int]  # for every token, the norms and biases too
    experts: tuple[int, int]  # of which a token takes its own
    head: tuple[int, int]  # for the tokens whose logits are wanted
    lookup: int  # bytes of the rows of tables that a token looks up


@functools.lru_cache(maxsize=16)
def patterns_of(config: object) -> tuple[Pattern, ...]:
    """The pattern of each layer that has entries in pages."""
    kinds = itertools.cycle(parse_layers(getattr(config, "pattern", "full")))
    return tuple(next(kinds).pattern for _ in range(getattr(config, "n_layers", 0)))


@functools.lru_cache(maxsize=1024)
def mean_visible(pattern: Pattern, tokens: int, context: int) -> float:
    """The keys that a query of a row sees, on the average of some of its queries."""
    queries = torch.linspace(context - tokens, context - 1, min(SAMPLES, tokens), dtype=torch.float64).round().long()
    if pattern.kind == "full":
        return float(queries.double().mean()) + 1
    keys = torch.arange(context)
    return sum(int(pattern.visible(query, keys).sum()) for query in queries) / len(queries)


def read_positions(pattern: Pattern, rows: Rows) -> int:
    """The positions whose entries a row reads in a layer."""
    if pattern.kind in ("window", "local"):
        return min(rows.context, pattern.size + rows.tokens - 1)
    return rows.context


def weight_counts(model: Model, plan: Plan) -> WeightCounts:
    """The WeightCounts of a rank; leaves in codes count their weights, and layers that no step uses do not count."""
    tied, kind = getattr(model.config, "tied", False), getattr(model.config, "kind", "")
    sums = {"layers": [0, 0], "experts": [0, 0], "head": [0, 0]}
    lookup = 0
    for name, leaf in plan.leaves.items():
        base, _, suffix = name.rpartition("/")
        numel, coded = leaf.numel(leaf.compute), suffix == "codes" and kind
        weights = numel * codes_a_byte(kind) if coded else 0 if suffix == "scales" and kind else numel
        if name.split("/")[0] in (MTP_STACK, MTP_JOIN):
            continue
        if name in ("embed/tokens", "embed/positions"):
            lookup += numel // leaf.shape[0] * leaf.dtype.itemsize
            if name == "embed/positions" or not tied:
                continue
        part = "head" if name == "embed/tokens" or name.startswith("head/") else "layers"
        part = "experts" if OF_EXPERTS.search(base if suffix in ("codes", "scales") else name) else part
        sums[part][0] += numel * leaf.dtype.itemsize
        sums[part][1] += weights
    layers, experts, head = ((total, weights) for total, weights in sums.values())
    return WeightCounts(layers, experts, head, lookup)


def count_tokens(step: Sequence[Rows]) -> float:
    """The tokens of all rows of a step."""
    return sum(rows.tokens * rows.count for rows in step)


class StepCosts:
    """The costs of a step of a model by its rows, on a rank of a plan on a device."""

    def __init__(
        self, model: Model, plan: Plan, spec: PageSpec, device: Device, ops: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        c = body_of(model.config)
        self.plan, self.device, self.config = plan, device, c
        self.ops = ops  # the operators that start a step of one row, and for each row more
        self.counts, self.patterns = weight_counts(model, plan), patterns_of(c)
        self.chosen = c.top_k / c.n_experts if hasattr(c, "n_experts") else 1.0
        self.position_bytes = spec.position_bytes
        heads = getattr(c, "n_heads", 0) / plan.mesh.tp.size
        latent = isinstance(c, DeepSeekConfig)
        key = getattr(c, "key_dim", c.d_model // max(1, getattr(c, "n_heads", 1)))
        self.pair_flop = 2 * heads * (2 * c.kv_rank + c.rope_dim if latent else 2 * key)
        self.streams = {memory: self.streamed_bytes(memory) for memory in (HOST_MEMORY, DISK)}

    def read_bytes(self, step: Sequence[Rows], logit_rows: float) -> float:
        """The bytes of weights and pages that a step reads, and of entries that it writes."""
        tokens = count_tokens(step)
        touched = 1 - (1 - self.chosen) ** tokens
        weights = self.counts.layers[0] + touched * self.counts.experts[0]
        weights += self.counts.head[0] if logit_rows else 0
        return weights + self.counts.lookup * tokens + self.page_bytes(step)

    def page_bytes(self, step: Sequence[Rows]) -> float:
        """The bytes of entries that the rows read and write."""
        layers = list(zip(self.position_bytes, self.patterns))
        read = sum(rows.count * size * read_positions(pattern, rows) for rows in step for size, pattern in layers)
        return read + sum(self.position_bytes) * count_tokens(step)

    def flop(self, step: Sequence[Rows], logit_rows: float) -> float:
        """The FLOPs of a step."""
        products = count_tokens(step) * (self.counts.layers[1] + self.chosen * self.counts.experts[1])
        products += logit_rows * self.counts.head[1]
        pairs = sum(
            rows.count * rows.tokens * mean_visible(pattern, rows.tokens, rows.context)
            for rows in step
            for pattern in self.patterns
        )
        return 2.0 * products + self.pair_flop * pairs

    def time(self, step: Sequence[Rows], logit_rows: float | None = None) -> StepTime:
        """The StepTime of a step with these rows; logit_rows: the logits that it gives, None for those of each row."""
        device, count = self.device, sum(rows.count for rows in step)
        logit_rows = count if logit_rows is None else logit_rows
        reached = {} if device.measured else device.efficiency
        dtype = str(self.plan.policy.compute).removeprefix("torch.")
        peak = (device.flops.get(dtype) or max(device.flops.values())) * reached.get("gemm", 1.0)
        bandwidth = device.bandwidth_bytes_s * reached.get("memory", 1.0)
        first, more = self.ops
        return StepTime(
            self.read_bytes(step, logit_rows) / bandwidth,
            self.flop(step, logit_rows) / peak,
            (first + more * max(0.0, count - 1)) * self.eager_s,
            self.link_s,
            self.sums_s(count_tokens(step)),
            device.kind == "cpu",
        )

    @property
    def eager_s(self) -> float:
        """The host's seconds for an operator."""
        rates = self.device.rates_of()
        return (self.device.op_s if rates is None else rates.op_s).get("eager", 0.0)

    def used_leaves(self) -> Iterator[LeafPlan]:
        """The leaves that a step uses."""
        unused = (MTP_STACK, MTP_JOIN)
        return (leaf for name, leaf in self.plan.leaves.items() if name.split("/")[0] not in unused)

    def streamed_bytes(self, memory: object) -> int:
        """The bytes of a rank's weights that rest in a memory beside the device's, all of which a step reads."""
        if memory == HOST_MEMORY and self.device.kind == "cpu":
            return 0  # it is the device's
        streamed = [leaf for leaf in self.used_leaves() if leaf.params.memory == memory]
        return sum(leaf.numel(leaf.params) * leaf.dtype.itemsize for leaf in streamed)

    @functools.cached_property
    def link_s(self) -> float:
        """The seconds until a rank's weights have come from the host and a disk, or from the ranks that have shards."""
        mesh = self.plan.mesh
        seconds = [0.0]
        for memory, size in self.streams.items():
            if size:
                sharing = self.device.on_node(mesh.size) if memory == DISK else 1
                seconds.append(size / (self.device.rates_to(memory).get("read", 0.0) or math.nan) * sharing)
        gathered = [leaf for leaf in self.used_leaves() if leaf.params.dims != leaf.compute.dims]
        if gathered and mesh.data_size > 1:
            size = sum(leaf.numel(leaf.compute) * leaf.dtype.itemsize for leaf in gathered)
            ways = {axis: way for axis, way in self.ways.items() if axis in ("dp", "rp")}
            axis = max(ways, key=lambda axis: ways[axis].size)
            sent = sent_elements("all_gather", size, ways[axis].size)
            seconds.append(collective_s(ways[axis], "all_gather", int(sent)).seconds)
        return max(seconds)

    @functools.cached_property
    def ways(self) -> dict:
        """How the ranks of each axis reach each other."""
        return ways_of(self.device, self.plan.mesh.sizes)

    def sums_s(self, tokens: float) -> float:
        """The seconds of two sums over tp in each layer, of the activations of so many tokens, and one of a table."""
        tp = self.plan.mesh.tp.size
        if tp == 1 or not tokens:
            return 0.0
        size = int(tokens * self.config.d_model * self.plan.policy.compute.itemsize)
        sent = sent_elements("psum", size, tp)
        message = collective_s(self.ways["tp"], "psum", int(sent))
        return (2 * self.config.n_layers + 1) * (message.host_s + message.seconds)
