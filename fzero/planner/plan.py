"""Predict a run before it runs: its memory, communication, FLOPs, time and cost, as one value.

`plan` traces the run's own step on fake tensors and simulates the trace on a device. Nothing is allocated and no GPU is
needed. `vary` makes a plan for each combination of chosen values of a config, mesh and device.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fzero import models
from fzero.comm.axes import mesh_text
from fzero.core import config_tables
from fzero.core import gpu as gpu_module
from fzero.core.arguments import checked
from fzero.core.compile_cache import have_compiler
from fzero.core.text_parsing import text_table
from fzero.models import ModelConfig
from fzero.models.configs import DecoderConfig, body_of
from fzero.planner import devices, extrapolate, pipeline_trace
from fzero.planner.devices import EVEN, Device, Loads, expect_capacity
from fzero.planner.pipeline_report import pipeline_report, with_layout
from fzero.planner.plan_report import PlanReport, report_of
from fzero.planner.plan_text import duration, percent, quantity, size
from fzero.planner.step_trace import Trace, fake_nvme
from fzero.planner.trace_cache import cached_trace
from fzero.run.config.config_table import apply_table, from_table
from fzero.run.config.objectives import objective_of
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.doctor import usable_device
from fzero.run.setup import machine
from fzero.run.setup.build import build
from fzero.sharding import fake_mesh


@checked()
def plan(
    model: str | ModelConfig | RunConfig | Mapping[str, Any],
    mesh: Mapping[str, int] | None = None,
    *,
    gpu: str | Device = "h100",
    settings: Mapping[str, Any] | None = None,
    rank: int = 0,
    say: Callable[[str], None] = lambda stage: None,
    cache: Path | None = None,
) -> PlanReport:
    """Predict the memory, communication and step time of a run on a mesh of devices, without any of them.

    model: a preset's name, a model's sizes, a whole RunConfig, or the table of one (see `from_table` in
    run/config/config_table.py). mesh: sizes of its axes; None: the config's.
    gpu: a device's name (a100, h100, ...; "here": this machine, as measured by `fzero bench`; a path), or a Device,
    which may have a price and a number of ranks on a node: `devices.device("h100", price_per_hour=2, ranks_on_node=4)`.
    settings: values of the config by dotted name, such as {"train.batch": 8, "zero": 3}.
    rank: whose memory is reported; with pp the fullest of its pipeline is. say: called with the text of each stage of
    the work. cache: a folder of the traces of earlier plans.
    Raises ValueError for an unknown device, for loads of its that an exchange has no room for, and for any config that
    a run would refuse.

    >>> settings = {"zero": 3, "train.batch": 16, "precision.policy": "bf16", "train.compiled": False}
    >>> report = plan("llama-tiny", {"dp": 4}, settings=settings)
    >>> report.fits, report.num_params
    (True, 3082496)
    """
    config = config_for(model, settings)
    device = with_host_memory(device_for(gpu), config)
    sizes = sizes_of(config, mesh)
    report = reports_of(resolve_for(config, device), sizes, device, rank=rank, say=say, cache=cache)
    say("simulating the step" if sizes.get("pp", 1) == 1 else "playing the schedule")
    return report(device)


def reports_of(
    resolved: RunConfig,
    sizes: Mapping[str, int],
    device: Device,
    *,
    rank: int = 0,
    say: Callable[[str], None] = lambda stage: None,
    cache: Path | None = None,
) -> Callable[[Device], PlanReport]:
    """Trace a run; the function from a Device to its PlanReport there."""
    if isinstance(body := body_of(resolved.model), DecoderConfig):
        raise ValueError(
            f"model is {body.architecture}, which transformers' code computes, and fzero plan traces fzero's own "
            "models; there is the first estimate alone"
        )
    resolved, target = with_layout(resolved, sizes, device), device.target
    if device.loads != EVEN:
        expect_capacity(build(resolved, fake_mesh(sizes), nvme=fake_nvme(resolved)).plan, device.loads)

    def trace_anew() -> Trace:
        return extrapolate.trace(resolved, sizes, rank=rank, target=target, say=say)

    if sizes.get("pp", 1) > 1:  # traced anew each time
        pipeline = pipeline_trace.trace(resolved, sizes, rank=rank, target=target, say=say)
        return lambda target_device: pipeline_report(pipeline, target_device)
    trace = trace_anew() if cache is None else cached_trace(trace_anew, resolved, sizes, rank, target, cache)
    return lambda target_device: report_of(trace, target_device)


def config_for(
    model: str | ModelConfig | RunConfig | Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> RunConfig:
    """The RunConfig of a preset, sizes, a config or a table, changed by `settings`: {"train.batch": 8}."""
    table: dict[str, Any] = {}
    for name, value in (settings or {}).items():
        config_tables.set_nested(table, name, value)
    if isinstance(model, RunConfig):
        return apply_table(model, table)
    if isinstance(model, Mapping):
        base = {key: dict(value) if isinstance(value, Mapping) else value for key, value in model.items()}
        for name, value in config_tables.flat(table):
            config_tables.set_nested(base, name, value)
        return from_table(base)
    return from_table({"preset": model, **table}) if isinstance(model, str) else from_table(table, model)


def device_for(gpu: str | Device) -> Device:
    """The Device of a name; an unmeasured "here" is this machine with its memory and no rates."""
    if isinstance(gpu, Device):
        return gpu
    if gpu != "here" or machine.device_file().is_file():
        return devices.device(gpu)
    return unmeasured_here()


def device_with(
    gpu: str,
    memory_gb: float | None,
    nvme_gbs: float | None,
    imbalance: str | None,
    node_links: str | None,
    **overrides: Any,
) -> Device:
    """The Device of a name, with the memory, rates, loads, links and fields that are given."""
    changes = {name: value for name, value in overrides.items() if value is not None}
    if memory_gb is not None:
        changes["memory_bytes"] = int(memory_gb * 1e9)
    if imbalance is not None:
        changes["loads"] = Loads.parse(imbalance)
    device = replace(device_for(gpu), **changes)
    if nvme_gbs is not None:
        device = replace(device, nvme=dict.fromkeys(("read", "write", "both"), nvme_gbs * 1e9))
    return device if node_links is None else devices.between_nodes(device, node_links)


def with_host_memory(device: Device, config: RunConfig) -> Device:
    """The device with the memory of its host that a config gives, if any."""
    size = int(config.host_memory_gb * 1e9)
    if not size:
        return device
    if device.kind == "cpu":
        return replace(device, memory_bytes=size)
    return replace(device, host_memory_bytes=int(size / devices.HOST_PART))  # all of it is for tensors


def unmeasured_here() -> Device:
    """This machine, of whose rates nothing is known: its GPU where a run takes one, else its processor."""
    memory, device = machine.available_bytes(), usable_device()[0]
    link = devices.Level("this machine", "gloo" if device == gpu_module.HOST else "nccl", None, 0.0, 0.0)
    if device == gpu_module.HOST:
        name, reserved = "this machine, not measured", min(450 << 20, memory // 2)
        return Device(name, "cpu", False, machine.cores(), memory, reserved, 0.0, {}, 0.0, (link,))
    card = gpu_module.properties(device)
    return Device(
        f"{card.name}, not measured",
        "cuda",
        False,
        card.multi_processor_count,
        card.total_memory,
        devices.RESERVED_BYTES,
        devices.MARGIN,
        {},
        0.0,
        (link,),
        capability=(card.major, card.minor),
        host_memory_bytes=memory,
    )


def resolve_for(config: RunConfig, device: Device) -> RunConfig:
    """Resolve every "auto" of `config` as a run on the device does."""
    if device.kind == "cpu" and device.measured:
        return machine.resolve_auto(config, device.target, flops=device.flops, compiled=have_compiler())
    return machine.resolve_auto(config, device.target)


def sizes_of(config: RunConfig, mesh: Mapping[str, int] | None) -> dict[str, int]:
    """The sizes of the mesh's axes; raises ValueError for an unknown axis or a size below 1."""
    sizes = dict(config.mesh if mesh is None else mesh)
    fake_mesh(sizes)
    return sizes


def with_classes(config: RunConfig, classes: int) -> RunConfig:
    """The config whose model has a head of so many classes, or of a reward, with its objective."""
    model = models.build(config.model)
    head_model = models.reward(model) if classes == 1 else models.classify(model, [str(i) for i in range(classes)])
    return replace(config, model=head_model.config, objective=objective_of(head_model.config).name)


def with_codes(config: RunConfig, kind: str) -> RunConfig:
    """The config whose model has weights in codes of this kind."""
    return replace(config, model=models.quantized(models.build(config.model), kind).config)


def with_lora(config: RunConfig, rank: int, targets: str | None, kind: str | None) -> RunConfig:
    """The config whose model has LoRA, beside weights in codes of this kind."""
    model = models.build(config.model)
    model = model if kind is None else models.quantized(model, kind)
    lora_model = models.lora(model, rank) if targets is None else models.lora(model, rank, targets=targets)
    return replace(config, model=lora_model.config)


COLUMNS = ("memory", "of it", "at rest", "sent a step", "step", "tokens/s", "MFU", "binds")
FACTS = (
    *("fits", "mesh", "num_params", "peak_bytes_per_rank", "capacity_bytes", "margin_bytes", "state_bytes_per_rank"),
    *("comm_bytes_per_axis", "step_s", "tokens_per_s", "mfu", "binds", "memory_binds", "days", "device_hours", "cost"),
)


class Variant(NamedTuple):
    """One combination of values: its plan, or the reason why a run refuses it."""

    values: dict[str, Any]  # by name
    report: PlanReport | None
    error: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is a plan and it fits."""
        return self.report is not None and self.report.fits


class Variants(NamedTuple):
    """The result of `vary`, in the order of the product of the values; printed, one row for each plan."""

    rows: tuple[Variant, ...]

    def best(self) -> Variant | None:
        """The fastest plan that fits; without times, the one with the smallest peak. None if none fits."""
        fitting = [row for row in self.rows if row.fits]
        slowness = [
            (report.step_s is None, -(report.tokens_per_s or 0.0), report.peak_bytes_per_rank)
            for report in (row.report for row in fitting)
            if report is not None
        ]
        return fitting[slowness.index(min(slowness))] if fitting else None

    def for_tokens(self, tokens: float) -> Variants:
        """These plans with a budget of tokens in each report."""
        return Variants(tuple(row._replace(report=row.report and row.report.for_tokens(tokens)) for row in self.rows))

    def to_json(self) -> str:
        """Format as one JSON object."""
        rows = []
        for row in self.rows:
            facts = {name: getattr(row.report, name) for name in FACTS} if row.report else {"fits": False}
            rows.append({"values": row.values, **facts, "error": row.error})
        best = self.best()
        return json.dumps({"rows": rows, "best": best.values if best else None}, indent=1)

    def __str__(self) -> str:
        names, budget = list(self.rows[0].values), any(row.report and row.report.days is not None for row in self.rows)
        header = [*names, *COLUMNS, *(("time", "device hours", "cost") if budget else ()), "fits"]
        cells = [[*map(words, row.values.values()), *row_cells(row, budget)] for row in self.rows]
        best = self.best()
        last = (
            f"the fastest that fits: {describe_values(best)}"
            if best and best.report and best.report.step_s is not None
            else ""
        )
        if not last:
            last = f"the least memory: {describe_values(best)}" if best else "none of them fits"
        return "\n".join(
            [*text_table(header, cells, text=(*range(len(names)), len(names) + len(COLUMNS) - 1, -1)), "", last]
        )


def vary(
    model: str | ModelConfig | RunConfig | Mapping[str, Any],
    choices: Mapping[str, Sequence[Any]],
    mesh: Mapping[str, int] | None = None,
    *,
    gpu: str | Device = "h100",
    **options: Any,
) -> Variants:
    """Plan a run for every combination of `choices`; the last name varies fastest.

    >>> small = {"preset": "llama-tiny", "train": {"compiled": False}, "precision": {"policy": "bf16"}}
    >>> [row.fits for row in vary(small, {"train.remat": ["none", "full"], "zero": [0, 3]}, {"dp": 2}).rows]
    [True, True, True, True]
    """
    if "preset" in choices and not isinstance(model, str | Mapping):
        raise ValueError("preset varies for a preset's name or a table of a config; this model has its sizes already")
    settings, usual = dict(options.pop("settings", None) or {}), device_for(gpu)
    common = {
        name: x for name in ("price_per_hour", "ranks_on_node", "loads") if (x := getattr(usual, name)) is not None
    }
    rows: list[Variant] = []
    for combination in itertools.product(*choices.values()):
        values = dict(zip(choices, combination))
        labels = {name: value.name if isinstance(value, Device) else value for name, value in values.items()}
        changes = {name: value for name, value in values.items() if name not in ("mesh", "gpu", "preset")}
        base: Any = (
            model
            if "preset" not in values
            else values["preset"]
            if not isinstance(model, Mapping)
            else {**model, "preset": values["preset"]}
        )
        try:
            device = values.get("gpu", usual)
            device = device if isinstance(device, Device) else replace(device_for(device), **common)
            report = plan(base, values.get("mesh", mesh), gpu=device, settings=settings | changes, **options)
            rows.append(Variant(labels, report))
        except ValueError as error:
            rows.append(Variant(labels, None, str(error)))
    if rows and not any(row.report for row in rows):
        raise ValueError(rows[0].error)
    return Variants(tuple(rows))


def words(value: Any) -> str:
    """Format a value of a choice for a table."""
    return mesh_text(value) if isinstance(value, Mapping) else "none" if value == "" else str(value)


def describe_values(row: Variant) -> str:
    """Format the values of a plan by name."""
    return ", ".join(f"{name} {words(value)}" for name, value in row.values.items())


def row_cells(row: Variant, budget: bool) -> list[str]:
    """The cells of a plan after its values; budget: with days, device hours and cost."""
    r = row.report
    if r is None:
        return ["-"] * (len(COLUMNS) + 3 * budget) + [f"no: {row.error.split(';')[0]}"]
    cells = [
        size(r.peak_bytes_per_rank),
        percent(r.peak_bytes_per_rank / r.capacity_bytes),
        size(r.state_bytes_per_rank),
    ]
    cells.append(size(sum(r.comm_bytes_per_axis.values())))
    cells += [duration(r.step_s), quantity(r.tokens_per_s or 0.0)] if r.step_s is not None else ["-", "-"]
    cells += [percent(r.mfu) if r.mfu is not None else "-", r.binds or "-"]
    if budget:
        cells += [duration(r.days * 86400), f"{r.device_hours:,.0f}"] if r.days is not None else ["-", "-"]
        cells.append(f"{r.cost:,.0f}" if r.cost is not None else "-")
    return [*cells, "yes" if r.fits else f"no: {r.too_much()}"]
