"""The candidates of a search for the fastest way to train a model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fzero import models
from fzero.core.autodiff import Remat
from fzero.core.pytree import nearest
from fzero.models.configs import body_of
from fzero.run.config.run_config import RunConfig
from fzero.run.config.unused_keys import drop_absent_axes
from fzero.sharding import fake_mesh, zero_plan
from fzero.sharding.pipeline import FAMILIES
from fzero.sharding.pipeline.orders import group_size
from fzero.sharding.pipeline_plan import Pipeline

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
