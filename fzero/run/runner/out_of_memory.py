"""One line for a GPU whose memory has run out: what is needed and held, and the nearest settings that would fit."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from fzero import checkpoint
from fzero.core import gpu
from fzero.core.autodiff import Remat
from fzero.run.config.placement import resume_command
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.memory_check import gigabytes, host_bytes, needs_on_device, other_usage_text
from fzero.run.setup import machine, run_folder
from fzero.run.setup.build import Job, build
from fzero.run.setup.coordinator import Coordinator
from fzero.sharding.spec import HOST_MEMORY, Offload, Tier

REQUEST = re.compile(r"Tried to allocate ([\d.]+) (B|bytes|KiB|MiB|GiB)")  # in PyTorch's message
UNITS = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
USABLE_SHARE = 0.95  # of what a process can have: the rest is lost between blocks of memory


class Setting(NamedTuple):
    """A config that needs less memory, and what to type for it."""

    flags: str
    config: RunConfig
    resumes: bool  # a run that is there may take it


class MemoryLimits(NamedTuple):
    """The bytes that a rank may have."""

    device: float
    host: int  # besides those that it has


@contextlib.contextmanager
def explained(job: Job, folder: Path, coordinator: Coordinator, location: str = "") -> Iterator[None]:
    """A context in which a GPU that runs out of memory raises MemoryError with the line of `explain`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        match = REQUEST.search(str(error))
        requested_bytes = int(float(match[1]) * UNITS[match[2]]) if match else 0
        location = location or f"step {coordinator.step + 1}"
        raise MemoryError(
            f"{location}: {explain(job, folder, coordinator, gpu.memory_of(job.device), requested_bytes)}"
        ) from error


def explain(job: Job, folder: Path, coordinator: Coordinator, usage: gpu.DeviceMemory, requested_bytes: int) -> str:
    """The line of an error: the memory needed and held, the nearest settings that would fit, how to go on."""
    needs = needs_on_device(job)
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in needs.items())
    request_text = f" when {gigabytes(requested_bytes)} more were asked for" if requested_bytes else ""
    usage_text = (
        f"of {gigabytes(usage.total)}, {gigabytes(usage.free)} are free, tensors of this process hold "
        f"{gigabytes(usage.tensors)}, and its allocator keeps {gigabytes(usage.reserved - usage.tensors)} for later "
        f"ones{other_usage_text(job.device)}"
    )
    limits = MemoryLimits(
        USABLE_SHARE * (usage.free + usage.reserved), machine.host_memory(job.config) // coordinator.local_size
    )
    # What was in use and did not suffice is known now; the activations were the part that was reckoned roughly.
    rough = needs.get("activations", 0)
    longer = max(1.0, (usage.tensors + requested_bytes - (sum(needs.values()) - rough)) / rough) if rough else 1.0
    fitting = nearest_two(settings_within(job, folder, limits, longer))
    return (
        f"{gpu.describe_device(job.device)} is out of memory{request_text}: {usage_text}; the run needs, a rank, about "
        f"{parts}; {advice(fitting)}; {next_start(job, folder, coordinator, fitting)}"
    )


def nearest_two(settings: Iterator[tuple[Setting, int]]) -> list[tuple[Setting, int]]:
    """The first setting, and the next or the first that a resumed run takes."""
    two = list(itertools.islice(settings, 2))
    if any(setting.resumes for setting, _ in two):
        return two
    resumed = next(((setting, size) for setting, size in settings if setting.resumes), None)
    return two if resumed is None else [two[0], resumed]


def advice(fitting: list[tuple[Setting, int]]) -> str:
    """The settings that would fit, with the bytes that they need."""
    if not fitting:
        return (
            "no smaller --micro-batch, --remat full, --zero or --offload to the host's memory would fit: take a "
            "smaller model, a shorter --seq-len or more GPUs"
        )
    choices = [
        f"{setting.flags} (about {gigabytes(size)}{'' if setting.resumes else ', in a new run'})"
        for setting, size in fitting
    ]
    return f"{' or '.join(choices)} would fit"


def next_start(job: Job, folder: Path, coordinator: Coordinator, fitting: list[tuple[Setting, int]]) -> str:
    """The newest checkpoint, and the command that goes on from it."""
    if not os.path.lexists(folder / run_folder.CONFIG):
        return "nothing was trained yet"
    checkpoint_dir = run_folder.checkpoints_of(folder, job.config)
    steps = checkpoint.steps(checkpoint_dir)
    checkpoint_text = (
        f"the newest checkpoint is {checkpoint.step_folder(checkpoint_dir, steps[-1])}"
        if steps
        else "it has no checkpoint"
    )
    config = next((setting.config for setting, _ in fitting if setting.resumes), None)
    return (
        checkpoint_text
        if config is None
        else f"{checkpoint_text}; go on with: {resume_command(folder, config, coordinator.size)}"
    )


def settings_within(job: Job, folder: Path, limits: MemoryLimits, longer: float) -> Iterator[tuple[Setting, int]]:
    """(a setting, the bytes that it needs) of those that fit into `limits`, the mildest changes first."""
    kinds, sufficed = changes(job.config, job.mesh.dp.size), list[set[int]]()
    for n in range(1, len(kinds) + 1):
        for chosen in itertools.combinations(range(len(kinds)), n):
            if any(fewer < {*chosen} for fewer in sufficed):
                continue
            for values in itertools.product(*(kinds[i] for i in chosen)):
                with contextlib.suppress(ValueError):  # refused for another reason than memory
                    config = apply_changes(job.config, values)
                    if (size := needed_bytes(job, folder, config, limits, longer)) is not None:
                        sufficed.append({*chosen})
                        flags = " ".join(f"--{name} {value}" for name, value in values)
                        yield Setting(flags, config, all(name in ("zero", "offload") for name, _ in values)), size
                        break


Change = tuple[str, str]  # the name of a value that a flag sets, and the value as a text


def changes(config: RunConfig, ranks: int) -> list[list[Change]]:
    """The changes of a config that need less memory, those of a kind together, the mildest first."""
    t, offload = config.train, Offload.parse(config.offload)
    kinds = [[("micro-batch", str(m)) for m in range(t.micro_batch - 1, 0, -1) if t.batch % m == 0]]
    if ranks > 1:
        kinds.append([("zero", str(stage)) for stage in range(config.zero + 1, 4)])
    if not Remat.parse(t.remat).every:
        kinds.append([("remat", "full")])
    groups = [["acts"], ["opt"], ["grads", "opt"], ["params", "grads", "opt"]]
    texts = [
        str(replace(offload, **dict.fromkeys(targets, Tier(HOST_MEMORY))))
        for targets in groups
        if all(getattr(offload, group).memory.on_device for group in targets)
    ]
    return [kind for kind in (*kinds, [("offload", text) for text in texts]) if kind]


def apply_changes(config: RunConfig, values: tuple[Change, ...]) -> RunConfig:
    """The config with some changes; raises ValueError where they do not fit each other."""
    fields = dict(values)
    t = replace(config.train, remat=fields.get("remat", config.train.remat))
    if "micro-batch" in fields:
        t = replace(t, micro_batch=int(fields["micro-batch"]))
    zero = int(fields.get("zero", config.zero))
    return replace(config, train=t, zero=zero, offload=fields.get("offload", config.offload))


def needed_bytes(job: Job, folder: Path, config: RunConfig, limits: MemoryLimits, longer: float) -> int | None:
    """The bytes of the device that a rank needs by `config`; None if they are not there."""
    candidate = build(config, job.mesh, folder, nvme=job.nvme, device=job.device)
    needs = needs_on_device(candidate)
    size = int(sum(needs.values()) + (longer - 1.0) * needs.get("activations", 0))
    if size > limits.device or (
        config.offload != job.config.offload and host_bytes(candidate) - host_bytes(job) > limits.host
    ):
        return None
    return size
