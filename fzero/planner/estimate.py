"""The candidates of a search for the fastest way to train a model.

Closed formulas of the ZeRO paper: model states by stage, elements communicated.

They need no trace and no model. They are rough figures before a plan, and a cross-check of it: tests compare the traced
numbers with them. `estimate_model_states` corresponds to DeepSpeed's estimate_zero2_model_states_mem_needs and
estimate_zero3_model_states_mem_needs. Those count 4 + 16/N bytes a parameter at stage 2 and 18/N at stage 3 (gradients
in fp32 too), and 1.5 times the offloaded bytes in the host's memory, for buffers; here every byte counted is one that a
state of fzero has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from fzero import models
from fzero.comm.axes import mesh_text
from fzero.core.arguments import checked
from fzero.core.autodiff import Remat
from fzero.core.config_tables import Allowed, AtLeastOne, one_of
from fzero.core.precision import POLICIES
from fzero.core.pytree import nearest
from fzero.core.text_parsing import text_table
from fzero.models import ModelConfig
from fzero.models.configs import body_of
from fzero.planner.plan_text import quantity, size
from fzero.run.config.run_config import RunConfig
from fzero.run.config.unused_keys import SEND_SIGNS, drop_absent_axes
from fzero.run.measure.peak_memory import segment_numels
from fzero.sharding import fake_mesh, zero_plan
from fzero.sharding.pipeline import FAMILIES
from fzero.sharding.pipeline.orders import group_size
from fzero.sharding.pipeline_plan import Pipeline
from fzero.sharding.slices import local_numel
from fzero.sharding.spec import Offload
from fzero.sharding.zero_stages import ZERO

# Elements of optimizer state per parameter. muon: for a model almost all of whose parameters are matrices of blocks;
# adafactor: without its rows and columns.
MOMENTS = {"adamw": 2, "adam": 2, "lamb": 2, "lion": 1, "sgd": 0, "muon": 1, "adafactor": 0}
MOMENTS |= {"onebit_adam": 1, "zero_one_adam": 1, "onebit_lamb": 2}  # beside `of_signs`
STATE_BYTES = {"bf16": 2.0, "8bit": 1.0 + 4.0 / 256}  # of an element; 8bit: with a scale for each block of 256


class ModelStates(NamedTuple):
    """Model-state bytes of one rank, on its device and offloaded (to the host's memory or a disk)."""

    zero: int
    offload: str
    params: float
    grads: float
    master: float
    optimizer: float
    device_bytes: float  # of those four, not offloaded
    host_bytes: float  # of those four, offloaded
    # the largest part gathered for use if parameters are sharded or offloaded; on the device, on top
    layer_bytes: float

    @property
    def gpu_bytes(self) -> float:
        """The bytes that a GPU needs besides activations."""
        return self.device_bytes + self.layer_bytes


def count(model: str | ModelConfig | int) -> tuple[int, int]:
    """(parameters, those of the largest part gathered at a time) of a preset's name, sizes, or a number."""
    if isinstance(model, int):
        return model, 0
    built = models.build(models.preset(model) if isinstance(model, str) else model)
    plan = zero_plan(0, built, fake_mesh({}))
    return models.num_params(built), max(segment_numels(plan).values())


def count_experts(model: str | ModelConfig | int, ep: int) -> tuple[int, int, int]:
    """(parameters of a model's experts, those on a rank, the layers that have them); (0, 0, 1) for ep=1."""
    if ep == 1:
        return 0, 0, 1
    if isinstance(model, int):
        raise ValueError(f"ep={ep}: of {model} parameters those of experts are not known; give a model")
    config = models.preset(model) if isinstance(model, str) else model
    plan = zero_plan(0, models.build(config), fake_mesh({"ep": ep}))
    split = [leaf for leaf in plan.leaves.values() if "ep" in leaf.compute.axes]
    rank = sum(local_numel(leaf.shape, leaf.compute, plan.sizes) for leaf in split)
    return sum(math.prod(leaf.shape) for leaf in split), rank, split[0].shape[0]


Stage = Annotated[int, one_of(ZERO)]
NUMBERED = Allowed(lambda model: not isinstance(model, int) or model >= 1, "a preset, sizes, or at least 1 parameter")


@checked("mesh")
def estimate_model_states(
    model: Annotated[str | ModelConfig | int, NUMBERED],
    mesh: Mapping[str, int],
    *,
    zero: Stage = 3,
    offload: str = "",
    precision: Annotated[str, one_of(POLICIES)] = "bf16",
    optimizer: Annotated[str, one_of(MOMENTS)] = "adamw",
    states: Annotated[str, one_of(("full", *STATE_BYTES))] = "full",
    accumulate: bool = False,
) -> ModelStates:
    """The model states of a rank: Psi parameters over N ranks of dp x ep x cp, each state whole or sharded as the stage
    requires. A rank of ep has 1/ep of the experts, whose states are sharded over dp x cp.

    Stage 0: 16 Psi bytes in bf16 with AdamW; 1: 4 Psi + 12 Psi/N; 2: 2 Psi + 14 Psi/N; 3: 16 Psi/N.
    model: a preset's name, sizes, or a number of parameters. mesh: sizes of its axes; tp divides Psi, rp nothing
        but the errors of signs, which pass between its ranks.
    offload: as in `--offload`; offloaded bytes are in host_bytes. accumulate: gradients are summed over micro-batches,
    in fp32. Raises ValueError for an unknown stage, offload, precision, optimizer or axis.

    Ref: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.

    >>> round(estimate_model_states(7_500_000_000, {"dp": 64}, zero=2).device_bytes / 1e9, 1)
    16.6
    """
    ranks, ep, tp = sharding_ranks(mesh)
    psi, largest = (n / tp for n in count(model))
    every, experts, layers = count_experts(model, ep)
    every, experts = every / tp, experts / tp
    psi, largest = psi - every, largest - (every - experts) / layers
    policy, tiers = POLICIES[precision](), Offload.parse(offload)
    # The stage's row says of parameters, gradients and optimizer states (with the master weights) whether they are
    # sharded.
    params, grads, opt = (
        psi / (ranks if sharded else 1) + experts / (ranks // ep if sharded else 1) for sharded in ZERO[zero]
    )
    rp = dict(mesh).get("rp", 1)
    signs = of_signs(psi + experts, ranks) if rp == 1 else of_signs(opt, rp)
    state_bytes = {
        "params": params * policy.param.itemsize,
        "grads": grads * (policy.accumulate if accumulate else policy.param).itemsize,
        "master": opt * (policy.state.itemsize if policy.has_master else 0),
        "optimizer": opt * MOMENTS[optimizer] * STATE_BYTES.get(states, policy.state.itemsize)
        + (signs * policy.state.itemsize if optimizer in SEND_SIGNS else 0),
    }
    placements = {"params": tiers.params, "grads": tiers.grads, "master": tiers.opt, "optimizer": tiers.opt}
    host = sum(state_bytes[name] * tier.fraction for name, tier in placements.items() if not tier.memory.on_device)
    gathered = (ZERO[zero][0] and ranks > 1) or not tiers.params.memory.on_device
    layer = largest * policy.param.itemsize if gathered else 0.0
    return ModelStates(
        zero,
        str(tiers),
        **state_bytes,
        device_bytes=sum(state_bytes.values()) - host,
        host_bytes=host,
        layer_bytes=layer,
    )


def sharding_ranks(mesh: Mapping[str, int]) -> tuple[int, int, int]:
    """The ranks over which ZeRO shards, dp x ep x cp, those of ep, and those of tp; raises for pp."""
    if not isinstance(mesh, Mapping):
        raise ValueError(f'mesh is {mesh!r}; it must be a table of sizes, such as {{"dp": 8, "tp": 2}}')
    sizes = {axis.name: axis.size for axis in fake_mesh(mesh).axes}
    if sizes["pp"] > 1:
        raise ValueError(f"mesh has pp={sizes['pp']}; model states are split over dp, ep, cp and tp only")
    return sizes["dp"] * sizes["ep"] * sizes["cp"], sizes["ep"], sizes["tp"]


def of_signs(elements: float, ranks: int) -> float:
    """The elements of state of an optimizer that sends signs of so many parameters."""
    return elements * (2 + 1 / ranks if ranks > 1 else 1)


OFFLOADS = ("", "opt=host", "params=host,opt=host", "params=host,opt=host,grads=host")


def states_table(model: str | ModelConfig | int, mesh: Mapping[str, int], **options: Any) -> str:
    """The table, as text, of the model states of every stage and offload; options as in `estimate_model_states`."""
    total, largest = count(model)
    rows = []
    for stage in ZERO:
        for offload in OFFLOADS:
            s = estimate_model_states(model, mesh, zero=stage, offload=offload, **options)
            rows.append(
                [
                    str(stage),
                    offload or "none",
                    *map(size, (s.params, s.grads, s.master, s.optimizer, s.gpu_bytes, s.host_bytes)),
                ]
            )
    head = ["stage", "offload", "params", "grads", "master", "optimizer", "a GPU", "host, a rank"]
    top = (
        f"model states of a rank: {quantity(total)} parameters, {quantity(largest)} in the largest part, on "
        f"{mesh_text(mesh)}"
    )
    return "\n".join(
        [
            top,
            *text_table(head, rows, text=(0, 1)),
            "a GPU: its states, and the largest gathered part if parameters are sharded or offloaded",
        ]
    )


@checked()
def communicated_elements(
    psi: Annotated[float, Allowed(lambda psi: 0 <= psi < math.inf, "a number of parameters of at least 0")],
    zero: Stage,
    ranks: AtLeastOne,
    *,
    micro_batches: AtLeastOne = 1,
    reshard: bool = True,
) -> float:
    """The elements that a data rank sends in a step: 2 Psi at stages 0 to 2 and 3 Psi at stage 3, times (N-1)/N.

    With m micro-batches stage 2 reduces m times and stage 3 also gathers twice (once without resharding) for each.
    Ref: Rajbhandari et al. 2020, section 7.
    """
    m = micro_batches
    times = {0: 2, 1: 2, 2: m + 1, 3: m * (2 if reshard else 1) + m}[zero]
    return times * psi * (ranks - 1) / ranks


CHOICES: Mapping[str, Sequence[Any]] = {  # the values to try
    "zero": (0, 1, 2, 3),
    "train.remat": ("none", "full", "every:2", "every:4"),
    "offload": ("", "opt=host", "params=host,opt=host", "params=host,grads=host,opt=host", "acts=host"),
    "train.micro_batch": (1, 2, 4, 8, 16, 32),
    "mesh.pp": (1, 2, 4, 8, 16),
    "mesh.cp": (1, 2, 4, 8, 16),  # where each rank keeps LEAST tokens of a sequence; not with pp
    "mesh.ep": (1, 2, 4, 8, 16, 32, 64),  # where it divides the experts; not with rp
    "pipeline": ("1f1b", "interleaved/2", "interleaved/4", "zb-h1", "zb-v/2"),  # schedule/chunks of a rank
}
LEAST = 8192  # tokens of a sequence on a rank of cp


class Candidate(NamedTuple):
    """One way to train: a mesh, ZeRO stage, recomputation, offload and micro-batch; with pp a schedule and layout."""

    dp: int
    rp: int
    tp: int
    zero: int
    remat: str
    offload: str
    micro_batch: int
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    layout: str = "auto"
    cp: int = 1
    ep: int = 1

    @property
    def mesh(self) -> dict[str, int]:
        """The axes of the mesh that are larger than 1."""
        sizes = {name: getattr(self, name) for name in ("pp", "dp", "rp", "ep", "cp", "tp")}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def data(self) -> int:
        """The ranks that have other sequences."""
        return self.dp * self.rp * self.ep

    @property
    def sharing(self) -> int:
        """The ranks among which ZeRO shards a leaf that all of them use."""
        return self.dp * self.ep * self.cp

    def apply_to(self, config: RunConfig) -> RunConfig:
        """Return `config` changed to train in this way, with sequence parallelism wherever tp divides the sequence."""
        sequence = self.tp > 1 and config.data.seq_len % self.tp == 0
        train = replace(config.train, remat=self.remat, micro_batch=self.micro_batch)
        pipeline = Pipeline(self.schedule, self.chunks, self.layout) if self.pp > 1 else Pipeline()
        fetched = (self.zero == 3 and self.dp * self.ep > 1) or "params" in self.offload
        cut = config.partition_activations and not sequence and bool(Remat.parse(self.remat).every)
        split = {
            "sequence": sequence,
            "partition_activations": cut,
            "pipeline": pipeline,
            "resident": config.resident if fetched else 0,
        }
        return drop_absent_axes(
            replace(config, mesh=self.mesh, zero=self.zero, offload=self.offload, train=train, **split)
        )


def candidates(
    config: RunConfig, ranks: int, on_node: int, choices: Mapping[str, Sequence[Any]] | None = None
) -> Iterator[Candidate]:
    """All candidates for `ranks` ranks that the model and the batch allow; tp stays within a node."""
    # A mesh with rp keeps ZeRO's shards within a group of dp ranks, a power of two times those of a node. With pp there
    # is no rp, nothing is offloaded but activations, a step has at least pp micro-batches on each rank, and split
    # schedules recompute nothing: what they hold between I and W recomputation does not lessen.
    for name in choices or {}:
        if name not in CHOICES:
            raise ValueError(f"choices gives {name!r}{nearest(name, CHOICES)}; a search tries {', '.join(CHOICES)}")
    tried = {**CHOICES, **(choices or {})}
    rows = [pipeline_of(text) for text in tried["pipeline"]]
    count = 0
    for pp in tried["mesh.pp"]:
        if pp > 1 and (ranks % pp or not hasattr(models.build(config.model), "block")):
            continue
        inner = itertools.product(sizes_of_tp(config, ranks // pp, on_node), tried["mesh.cp"], tried["mesh.ep"])
        for tp, cp, ep in inner:
            if cp > 1 and (pp > 1 or not admits_cp(config, ranks // tp, cp)):
                continue
            data = ranks // pp // tp // cp
            if ep > 1 and (data % ep or experts_of(config) % ep):
                continue
            for micro in tried["train.micro_batch"]:
                parts = config.train.batch // micro // data
                if config.train.batch != parts * micro * data or not parts:
                    continue
                groups = groups_of(data, max(1, on_node // tp // cp)) if pp == ep == 1 else [data // ep]
                orders = (
                    [choice for choice in rows if schedule_fits(choice, config, pp, parts)] if pp > 1 else [Pipeline()]
                )
                for choice in enumerate_shardings(data // ep, cp * ep, groups, tried):
                    for order in orders:
                        c = Candidate(
                            *choice[:2], tp, *choice[2:], micro, pp, str(order.schedule), order.chunks, cp=cp, ep=ep
                        )
                        if pp == 1 or admits_pipeline(c):
                            count += 1
                            yield c
    if not count:
        widest = max(sizes_of_tp(config, ranks, on_node))
        data_ranks = ranks // widest
        raise ValueError(
            f"no mesh of {ranks} ranks can share a batch of {config.train.batch} sequences: with tp={widest}, the "
            f"largest within a node, there are {data_ranks} data ranks; use a batch that {data_ranks} divides (--batch)"
        )


def enumerate_shardings(
    data: int, inner_ranks: int, groups: Sequence[int], tried: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[int, int, int, str, str]]:
    """(dp, rp, stage, recomputation, offload) for so many ranks of dp and rp, each of some of cp and ep."""
    for dp in groups:
        for zero in tried["zero"] if data * inner_ranks > 1 else (0,):
            if zero == 0 and dp != data:
                continue  # without shards, dp and rp do the same
            for remat in tried["train.remat"]:
                for offload in tried["offload"]:
                    if "acts=" not in offload or Remat.parse(remat).every:
                        yield dp, data // dp, zero, remat, offload


def layers_to_trace(c: Candidate, layers: int) -> int:
    """About how many layers pipeline_trace runs for a candidate with pp, micro-batches counted."""
    family = FAMILIES[c.schedule]
    parts = 2 * c.pp if family.split or c.chunks > 1 else 5
    return (4 if family.placement == "loop" else c.pp) * parts * math.ceil(layers / c.pp)


def pipeline_of(text: str) -> Pipeline:
    """The Pipeline of "schedule" or "schedule/chunks".

    >>> pipeline_of("zb-v/2")
    Pipeline(schedule='zb-v', chunks=2, layout='auto')
    """
    name, _, chunks = text.partition("/")
    return Pipeline(name, int(chunks or 1))


def schedule_fits(pipeline: Pipeline, config: RunConfig, pp: int, parts: int) -> bool:
    """Whether a schedule takes so many micro-batches on pp ranks, and the model has layers for its stages."""
    family = FAMILIES[str(pipeline.schedule)]
    grouped = not family.groups or pipeline.chunks == 1 or group_size(pp, parts) > 0
    return pp * pipeline.chunks <= config.model.n_layers and parts >= max(pp, family.min_parts(pp)) and grouped


def admits_pipeline(c: Candidate) -> bool:
    """Whether a candidate with pp is one that a search tries: see `candidates`."""
    return c.offload in ("", "acts=host", "acts=nvme") and (c.remat == "none" or not FAMILIES[c.schedule].split)


def experts_of(config: RunConfig) -> int:
    """The experts of a block of the model; 1 without."""
    return getattr(body_of(config.model), "n_experts", 1)


def admits_cp(config: RunConfig, ranks: int, cp: int) -> bool:
    """Whether cp divides ranks and sequences, and a rank keeps LEAST tokens."""
    splits = models.build(config.model).traits.splits
    return splits and ranks % cp == 0 and config.data.seq_len % (cp * LEAST) == 0


def sizes_of_tp(config: RunConfig, ranks: int, on_node: int) -> list[int]:
    """The sizes of tp within a node that divide the ranks and the model."""
    return [
        tp for tp in range(1, min(ranks, on_node) + 1) if ranks % tp == 0 and on_node % tp == 0 and divides(config, tp)
    ]


def divides(config: RunConfig, tp: int) -> bool:
    """Whether tp can cut the model."""
    try:
        zero_plan(0, models.build(config.model), fake_mesh({"tp": tp}))
    except ValueError:
        return False
    return True


def groups_of(data: int, on_node: int) -> list[int]:
    """The sizes of dp to try for `data` ranks: all, and powers of two of nodes."""
    sizes, size = {data}, min(on_node, data)
    while size < data and size > 1:
        if data % size == 0:
            sizes.add(size)
        size *= 2
    return sorted(sizes, reverse=True)


# ---- pipelines ---------------------------------------------------------------------------------------------------
