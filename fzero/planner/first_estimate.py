"""The first answer of a plan, before anything is traced: states counted exactly, the rest by closed forms.

A layer's activations are the tensors that its kernels keep for the backward pass; its time is its FLOPs at the device's
sustained rates, and the bytes of its tensors at that of its memory. The rest is the estimate of a search
(closed_forms.py). tests/test_first_estimate.py holds `BOUND`, how far it was from the traced plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fzero.planner.candidates import Candidate
from fzero.planner.closed_forms import step_time
from fzero.planner.closed_layer import Basis, closed_layer
from fzero.planner.devices import Device
from fzero.planner.plan_report import has_rates
from fzero.planner.plan_text import duration, size
from fzero.planner.step_trace import fake_nvme
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.memory_check import grad_bytes, memory_on_device, state_bytes
from fzero.run.setup import build
from fzero.sharding import fake_mesh

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
