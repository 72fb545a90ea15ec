"""What would help a run whose nodes have slow links between them: `fzero plan --ask fewer-bytes`.

The plans of the run as it is, with codes, with the nodes as replicas, with signs of the momentum and with members that
agree once in many steps, on the device's own links and on slower ones. Each is traced once, and played on all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from fzero.comm.axes import mesh_text
from fzero.core.text_parsing import text_table
from fzero.planner.devices import Device, between_nodes
from fzero.planner.plan import reports_of, resolve_for, sizes_of
from fzero.planner.plan_report import PlanReport, has_rates
from fzero.planner.plan_text import duration, size
from fzero.planner.rates import Way, collective_s, ways_of
from fzero.planner.timing import agreement_bytes
from fzero.run.config.run_config import LocalSteps, RunConfig
from fzero.run.config.unused_keys import count_sums
from fzero.run.setup.build import build
from fzero.sharding import fake_mesh

GIGABIT = (100.0, 10.0, 1.0)  # links between nodes that are looked at beside the device's own
PAGE = "docs/codec.md"
SHORT = "diloco, lr=0.5, momentum=0.3"  # of few rounds; the paper's rates, the defaults, are for many
LATE_SIGNS = "zero_one_adam, sum_every=16, freeze_steps=160, sum_double=64"  # of 400 steps
# By the codec or method: how much higher the validation loss of a small model was than that of the plain run after 400
# steps, the mean over three seeds of benchmarks/results/learning-codecs.json; of those that have run with all of them.
MEASURED: dict[str, float] = {
    "params=int8": -0.0139,
    "grads=int4": -0.0128,
    "grads=int4,loco": -0.0057,
    "grads=int4,loco,errors=int8": -0.0077,
    "params=int8,grads=int4,hpz": -0.0109,
    "onebit_adam": -0.0070,
    "onebit_adam, rp": -0.0060,
    LATE_SIGNS: -0.0098,
    SHORT: 0.0031,
    f"{SHORT}, codec=int4": 0.0089,
    "slowmo, after=200": -0.0090,
    "localsgd, after=200": 0.0,
}


class Option(NamedTuple):
    """One way to send fewer bytes, with its plans, or the reason why a run refuses it."""

    name: str
    mesh: dict[str, int]
    settings: dict[str, Any]  # what its config has otherwise
    measured: str  # the key of MEASURED; "": the numbers of the plain run
    reports: tuple[PlanReport, ...] = ()  # on the device's own links, then with GIGABIT between nodes
    sent: tuple[float, float] = (0.0, 0.0)  # bytes of a rank in a step inside its node and between nodes
    error: str = ""


class FewerBytes(NamedTuple):
    """The answer: `print` shows one row for each option."""

    device: Device
    nodes: int
    options: tuple[Option, ...]

    def to_json(self) -> str:
        """Format as one JSON object."""
        rows = list[dict[str, Any]]()
        for option in self.options:
            settings = {name: x if isinstance(x, str) else asdict(x) for name, x in option.settings.items()}
            row: dict[str, Any] = {
                "name": option.name,
                "mesh": option.mesh,
                "settings": settings,
                "error": option.error,
            }
            if option.reports:
                row |= {"inside_bytes": option.sent[0], "between_bytes": option.sent[1]}
                row |= {"step_s": [report.step_s for report in option.reports], "fits": option.reports[0].fits}
                row |= {"peak_bytes_per_rank": option.reports[0].peak_bytes_per_rank}
            rows.append(row | {"loss": loss_of(option)})
        facts = {"device": self.device.name, "nodes": self.nodes, "links": self.links(), "options": rows}
        return json.dumps(facts, indent=1)

    def links(self) -> list[str]:
        """The links between nodes of the columns."""
        return [device.links[-1].name for device in link_variants(self.device)]

    def __str__(self) -> str:
        plain = self.options[0].reports
        head = ["", "mesh", "memory", "in a node", "between", *self.links(), "gain", "loss"]
        cells = []
        for option in self.options:
            if not option.reports:
                cells.append([option.name, mesh_text(option.mesh), *["-"] * (len(head) - 3), f"no: {option.error}"])
                continue
            first = option.reports[0]
            fits = "" if first.fits else " (does not fit)"
            steps = [duration(report.step_s or 0.0) for report in option.reports]
            gain = (plain[0].step_s or 0.0) / (first.step_s or math.inf)
            sent = [size(bytes_sent) for bytes_sent in option.sent]
            memory = size(first.peak_bytes_per_rank) + fits
            cells.append([option.name, mesh_text(option.mesh), memory, *sent, *steps, f"{gain:.2f}", loss_of(option)])
        lines = text_table(head, cells, text=(0, 1, -1))
        if len(cells) == 1:
            lines.append(
                f"nothing else is offered: the nodes of {mesh_text(self.options[0].mesh)} do not differ in their data "
                f"alone, and activations have no codes; ask about a mesh with dp or rp of {self.nodes} or a multiple"
            )
        return "\n".join(
            [
                f"what would help between {self.nodes} nodes of {self.device.name}: bytes that a rank sends in a step, "
                "and seconds of a step by the links between nodes, the mean over the run where ranks move apart; gain "
                "is of the first of the links",
                "",
                *lines,
                "",
                "loss: how much higher the validation loss of a small model was than the plain run's, measured at "
                f"small scale, see {PAGE}; measure your own before a run",
            ]
        )


def loss_of(option: Option) -> str:
    """What an option costs in accuracy, in words."""
    if not option.measured:
        return "same numbers"
    if option.measured not in MEASURED:
        return "not measured"
    return f"{MEASURED[option.measured]:+.2%} at small scale"


def fewer_bytes(
    config: RunConfig,
    device: Device,
    say: Callable[[str], None] = lambda stage: None,
    cache: Path | None = None,
) -> FewerBytes:
    """The plans of a run and of what would send fewer bytes between its nodes; raises ValueError."""
    if not has_rates(device):
        raise ValueError(
            f"what sends fewer bytes needs the rates of a device, and {device.name} has none; run fzero bench"
        )
    sizes = sizes_of(config, None)
    ranks = math.prod(sizes.values())
    nodes = -(-ranks // device.on_node(ranks))
    if nodes == 1:
        raise ValueError(
            f"what sends fewer bytes is asked of links between nodes, and all {ranks} ranks of "
            f"{mesh_text(sizes)} are on one; "
            "give a mesh of more ranks, or fewer on a node (--nproc-per-node)"
        )
    plain = replace(config, codec="", local=LocalSteps())
    options = []
    for option in options_of(plain, sizes, nodes):
        say(option.name)
        try:
            options.append(plan_option(plain, option, device, cache))
        except ValueError as error:
            options.append(option._replace(error=str(error).split(";")[0]))
    if not options[0].reports:
        raise ValueError(options[0].error)
    return FewerBytes(device, nodes, tuple(options))


def options_of(config: RunConfig, sizes: Mapping[str, int], nodes: int) -> list[Option]:
    """What may help a run on a mesh of several nodes, the run as it is first."""
    flat, replicated = dict(sizes), dict(sizes)
    if sizes.get("rp", 1) == 1 and sizes.get("dp", 1) % nodes == 0:
        replicated |= {"rp": nodes, "dp": sizes["dp"] // nodes}
    params_grads, all_of = "params=int8,grads=int4", "params=int8,grads=int4,hpz"
    sums = ["grads=int4", "grads=int4,loco", "grads=int4,loco,errors=int8"]
    codecs = {2: sums, 3: ["params=int8", *sums, params_grads]}
    options = [Option("as it is", flat, {}, "")]
    options += [Option(text, flat, {"codec": text}, text) for text in codecs.get(config.zero, ())]
    if replicated != flat:
        options.append(Option("nodes as replicas", replicated, {}, ""))
    if config.zero == 3 and replicated.get("rp", 1) > 1:
        options += [Option(text, replicated, {"codec": text}, key) for text, key in (("hpz", ""), (all_of, all_of))]
    if config.optim.name in ("adam", "adamw"):
        signs, local = (replace(config.optim, name=name, states="full") for name in ("onebit_adam", "zero_one_adam"))
        if config.zero < 2 and flat.get("rp", 1) == 1 and flat.get("dp", 1) * flat.get("cp", 1) > 1:
            options.append(Option("onebit_adam", flat, {"optim": signs}, "onebit_adam"))
        if replicated.get("rp", 1) > 1:
            # v moves in 2/5 of the run, and intervals double after each 4/25 of it, a multiple of 16 steps
            steps = config.train.steps
            local = replace(local, sum_every=16, freeze_steps=max(1, 2 * steps // 5), sum_double=near(steps, 0.16, 16))
            options.append(Option("onebit_adam", replicated, {"optim": signs}, "onebit_adam, rp"))
            options.append(Option("zero_one_adam H=16", replicated, {"optim": local}, LATE_SIGNS))
    if replicated.get("rp", 1) > 1:
        options += local_options(config, replicated)
    return options


def local_options(config: RunConfig, replicated: dict[str, int]) -> list[Option]:
    """The options whose nodes are members that agree once in 20 steps, from the start or half of the run on."""
    half, options = near(config.train.steps, 0.5, 20), []
    for name, local, key in (
        ("diloco H=20", LocalSteps("diloco", 20, 0.5, 0.3), SHORT),
        ("diloco H=20 int4", LocalSteps("diloco", 20, 0.5, 0.3, codec="int4"), f"{SHORT}, codec=int4"),
        ("slowmo H=20 after 1/2", LocalSteps("slowmo", 20, after=half), "slowmo, after=200"),
        ("localsgd H=20 after 1/2", LocalSteps("localsgd", 20, after=half), "localsgd, after=200"),
    ):
        often = -(-config.train.checkpoint_every // local.every) * local.every
        train = replace(config.train, checkpoint_every=often)
        options.append(Option(name, replicated, {"local": local, "train": train}, key))
    return options


def near(steps: int, fraction: float, unit: int) -> int:
    """The multiple of a unit, at least one, that is next to a part of a run's steps."""
    return max(1, round(steps * fraction / unit)) * unit


def plan_option(config: RunConfig, option: Option, device: Device, cache: Path | None) -> Option:
    """An option with its plans on the device's own links and on slower ones."""
    changed = replace(config, mesh=option.mesh, **option.settings)
    report = reports_of(resolve_for(changed, device), option.mesh, device, cache=cache)
    reports = tuple(report(variant) for variant in link_variants(device))
    return option._replace(reports=reports, sent=sent_by_level(reports[0], option.mesh, device))


def link_variants(device: Device) -> list[Device]:
    """The device, and the same with slower links between its nodes."""
    latency_ms = 1e3 * device.links[-1].latency_s
    slower = [between_nodes(device, f"{rate}:{latency_ms}") for rate in GIGABIT]
    return [device, *(variant for variant in slower if variant.links[-1].name != device.links[-1].name)]


def sent_by_level(report: PlanReport, sizes: Mapping[str, int], device: Device) -> tuple[float, float]:
    """The bytes that a rank sends in a step inside its node, and between nodes."""
    ways, sent = ways_of(device, sizes), {"inside": 0.0, "between": 0.0}
    outer = device.links[-1].name
    messages = [(row["axis"], row["collective"], row["bytes"], row["calls"]) for row in report.comm]
    if report.config.local.method:
        messages.append(("rp", "psum", int(agreement_bytes(report.config, sizes, 0, device.target)), 1))
    optim, steps = report.config.optim, report.config.train.steps
    if optim.sum_every > 1:
        _, round_bytes = build(report.config, fake_mesh(sizes)).plan.sent_by_link()["rp"]
        messages.append(("rp", "all_to_all", int(round_bytes * count_sums(optim, steps) / steps), 1))
    for axis, collective, amount, calls in messages:
        if axis in ways and calls:
            for level, passed in by_level(ways[axis], collective, amount // calls).items():
                sent["between" if level == outer else "inside"] += passed * calls
    return sent["inside"], sent["between"]


def by_level(way: Way, collective: str, sent_bytes: int) -> dict[str, float]:
    """What a rank sends over each level of links in a collective."""
    if len(way.hops) == 1:
        return {way.hops[0][0].name: float(sent_bytes)}
    busy, rates = collective_s(way, collective, sent_bytes).busy, {level.name: level.bytes_s for level, _ in way.hops}
    return {name: seconds * rates[name] for name, seconds in busy.items()}
