"""Check a run before it begins: memory and disk of each rank, and the largest model that fits.

    memory = process + state and gradients that are in memory + parameters in use + activations of a micro-batch +
    buffers
    disk   = slots x state on the disk + gradients and activations there

Offloaded, the memory no longer grows with the depth of a model, only with its largest part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from fzero import models
from fzero.core import gpu, pytree
from fzero.core.autodiff import Remat
from fzero.core.device import HOST
from fzero.core.host_memory import bytes_cached, bytes_taken, round_to_pages
from fzero.core.pytree import Tree
from fzero.models import LlamaConfig
from fzero.models.configs import family_of
from fzero.offload.nvme import store_bytes
from fzero.optim.base import AVERAGE
from fzero.run.config.run_config import RunConfig
from fzero.run.measure.peak_memory import layers_alive, pass_sizes, passes_peak
from fzero.run.setup.build import Job, build, like_of, local_micro_batches, num_params, specs_of
from fzero.sharding import Mesh, Plan
from fzero.sharding.error_feedback import ERROR
from fzero.sharding.slices import local_numel
from fzero.sharding.spec import DEVICE, MEMORIES, StateMemory
from fzero.train.state import meta_state
from fzero.train.state_on_disk import DiskLayout

PROCESS = 450 << 20  # bytes of a process that has loaded its libraries
# State and buffers are exact. The rest is a closed form, up to 1.15 times what a traced step has
# (tests/test_first_estimate.py): this fraction of it is what a run needs for sure, so that no run is refused whose plan
# fits.
SURE = 0.8


class Memory(NamedTuple):
    """Bytes that one rank of a run needs."""

    state: int  # parameters, master weights, optimizer state, average, errors, what a step keeps of them beside: exact
    grads: int  # their sums, and gradients of one part of the model on their way there
    gathered: int  # parameters that are whole for use
    activations: int  # of one micro-batch: estimated
    buffers: int  # for transfers to and from a disk


def bytes_of_state(job: Job) -> dict[str, tuple[StateMemory, int]]:
    """{name of a leaf of the state: (its memory, its bytes on a rank)}."""
    specs, like = pytree.named_leaves(specs_of(job)), pytree.named_leaves(like_of(job))
    return {name: (specs[name].memory, tree_bytes(leaf)) for name, leaf in like.items()}


def memory_needed(job: Job, leaves: dict[str, tuple[StateMemory, int]] | None = None) -> Memory:
    """The bytes that each rank of `job` needs. leaves: its `bytes_of_state`, where that is known."""
    leaves = bytes_of_state(job) if leaves is None else leaves
    parts = memory_on_device(job, leaves), memory_on_host(job, leaves)
    return Memory(*map(sum, zip(*parts)))


def memory_on_device(job: Job, leaves: dict[str, tuple[StateMemory, int]] | None = None, kind: str = "") -> Memory:
    """The part of `memory_needed` beside `memory_on_host`. kind: of the device, "cpu" or "cuda"; "" for the job's."""
    plan, policy = job.plan, job.policy
    leaves = bytes_of_state(job) if leaves is None else leaves
    scalars = ("step", "key", "data_cursor", "scaler")
    state = sum(n for name, (memory, n) in leaves.items() if memory.on_device and name.split("/")[0] not in scalars)
    if plan.codec is not None and plan.codec.loco is not None:
        state += sum(
            n for name, (_, n) in leaves.items() if name.startswith(ERROR)
        )  # those of the step, until it is known whether it is skipped
    if plan.local:
        state += numel(plan, plan.params) * policy.param.itemsize  # where the rank is between two sums
    if job.config.train.update == "speculate":
        state += old_values_bytes(job, leaves)
    # A sum by a binary tree holds a term for each of its levels.
    terms = local_micro_batches(job.config, job.mesh).bit_length() if plan.reduce == "canonical" else 1
    versions = min(2, plan.delayed or 1)  # of an update that is not made yet, and of the next one
    sums = terms * versions * sum(sizes_of_sums(plan, lambda memory: memory.on_device)) * sums_dtype(job).itemsize
    peak = passes_peak(pass_sizes(job, kind), sums)
    boundary_numel = numel_between_stages(plan)
    grads = max(peak["grads"], grad_bytes(job)) + boundary_numel * policy.accumulate.itemsize
    gathered = peak["gathered"] + boundary_numel * policy.param.itemsize * versions
    return Memory(state, int(grads), int(gathered), int(peak["activations"]), 0)


def grad_bytes(job: Job) -> int:
    """The bytes of gradients on a rank's device after its last backward pass: the third of ZeRO's model states."""
    specs, plan = pytree.named_leaves(job.plan.grads), job.plan
    if local_micro_batches(job.config, job.mesh) == 1 and plan.mesh.pp.size == 1:
        specs = {name: replace(leaf.opt, memory=specs[name].memory) for name, leaf in plan.leaves.items()}
    users, pp = plan.users, plan.mesh.pp.rank
    elements = [
        local_numel(leaf.shape, specs[name], plan.sizes)
        for name, leaf in pytree.named_leaves(plan.like).items()
        if name not in plan.frozen and specs[name].memory.on_device
        if name not in users or pp in {rank for _, rank in users[name]}  # else no stage of this rank uses it
    ]
    return sum(elements) * sums_dtype(job).itemsize


def sums_dtype(job: Job) -> torch.dtype:
    """The dtype of sums of gradients that rest off the device."""
    return job.policy.param if local_micro_batches(job.config, job.mesh) == 1 else job.policy.accumulate


def old_values_bytes(job: Job, leaves: dict[str, tuple[StateMemory, int]]) -> int:
    """The bytes of the host's memory for the old values of layers in a speculating step."""
    groups = ("master", "opt_state") if job.policy.has_master else ("params", "opt_state")
    stacked = [name for name, leaf in job.plan.trained_leaves.items() if leaf.stacked]
    owner = pytree.owners([name for name in leaves if name.split("/")[0] in groups], stacked)
    return sum(leaves[name][1] for name, stack in owner.items() if stack is not None and not leaves[name][0].on_disk)


def numel_between_stages(plan: Plan) -> int:
    """The elements of leaves outside the layers that a rank of pp has whole, and their gradients' sums."""
    parts: dict[str, int] = {}
    for name, leaf in plan.leaves.items():
        if leaf.use.dims != leaf.params.dims:
            segment = name.split("/")[0]
            parts[segment] = parts.get(segment, 0) + leaf.numel(leaf.use)
    return max(parts.values(), default=0)


def snapshot_limit(job: Job, available: int) -> int:
    """The bytes that a checkpoint's snapshot may take while `available` are left, at least 64 MiB."""
    if job.device != HOST:
        return max(64 << 20, available // 2)  # a step on a GPU takes no more of the host's memory
    needed = memory_needed(job)
    return max(64 << 20, (available - (sum(needed) - needed.state)) // 2)


def numel(plan: Plan, specs: Tree) -> int:
    """The elements of the parameters that one rank holds by `specs`."""
    pairs = zip(pytree.leaves(plan.like), pytree.leaves(specs))
    return sum(local_numel(leaf.shape, spec, plan.sizes) for leaf, spec in pairs)


def sizes_of_sums(plan: Plan, select: Callable[[StateMemory], bool]) -> list[int]:
    """The elements of each sum of gradients that one rank keeps in the memories that `select` takes."""
    return [leaf.numel(leaf.grads) for leaf in plan.trained_leaves.values() if select(leaf.grads.memory)]


def tree_bytes(tree: Tree) -> int:
    """The bytes of the tensors of a tree."""
    return sum(leaf.numel() * leaf.dtype.itemsize for leaf in pytree.leaves(tree))


def disk_needed(job: Job) -> int:
    """The bytes that each rank of `job` takes on its disk: the state, and what a step may put there."""
    if job.nvme is None:
        return 0
    plan, policy, config = job.plan, job.policy, job.config
    layout = DiskLayout(meta_state(plan, job.tx), specs_of(job), plan)
    state = store_bytes(layout.files.values(), job.nvme.slots)
    dtype = sums_dtype(job)
    grads = (
        0
        if config.train.update == "backward"
        else sum(sizes_of_sums(plan, lambda memory: memory.on_disk)) * dtype.itemsize
    )
    acts = 0
    if plan.acts.on_disk:
        saved_layers = -(-layers_alive(job) // Remat.parse(config.train.remat).every)
        acts = saved_layers * round_to_pages(
            config.train.micro_batch * config.data.seq_len * job.model.config.d_model * policy.compute.itemsize
        )
    return state + grads + acts


def expect_disk_space(job: Job, available: int) -> None:
    """Raise ValueError if the ranks of `job` do not fit into `available` bytes of disk."""
    need = disk_needed(job) * job.mesh.size
    if need > available:
        assert job.nvme is not None  # what needs a disk
        fewer = "nvme.slots=1 halves it, at the price of a checkpoint after every kill; " if job.nvme.slots > 1 else ""
        raise ValueError(
            f"{job.nvme.folder}: the run needs {gigabytes(need)} of disk and {gigabytes(available)} are free; "
            f"{fewer}"
            "optim.states=bf16 or 8bit need less, or name another disk (--nvme)"
        )


class Largest(NamedTuple):
    """A model with the room that it needs."""

    config: RunConfig
    parameters: int
    memory_bytes: int  # of a rank
    disk_bytes: int
    binds: str  # "memory" or "disk": the limit of the next larger model; "depth": DEEPEST layers


DEEPEST = 1000  # layers
# Width, layers, heads and hidden units of Llamas from 0.1B to 400B; the largest that has room is made deeper.
SIZES = (
    (768, 12, 12, 2048),
    (1024, 16, 16, 2816),
    (1536, 20, 12, 4096),
    (2048, 16, 16, 5632),
    (2560, 24, 20, 6912),
    (3072, 28, 24, 8192),
    (4096, 32, 32, 11008),
    (5120, 40, 40, 13824),
    (6656, 60, 52, 17920),
    (8192, 80, 64, 28672),
    (12288, 96, 96, 36864),
    (16384, 126, 128, 53248),
)


def largest(config: RunConfig, memory: int, disk: int, mesh: Mesh | None = None) -> Largest:
    """The largest Llama that trains by `config` in `memory` and `disk` bytes of a rank, of SIZES."""
    if not isinstance(config.model, LlamaConfig):
        raise ValueError(f"largest: the config's model is of family {family_of(config.model)}; it scales a llama")

    def needs(width: int, layers: int, heads: int, hidden: int) -> tuple[Job, int, int]:
        model = replace(
            config.model, d_model=width, n_layers=layers, n_heads=heads, n_kv_heads=heads, d_ff=hidden, head_dim=0
        )
        job = build(replace(config, preset="", model=model), mesh)
        return job, PROCESS + sum(memory_needed(job)), disk_needed(job)

    def fits(candidate: tuple[Job, int, int]) -> bool:
        return candidate[1] <= memory and candidate[2] <= disk

    best, excess = None, needs(*SIZES[0])
    for size in SIZES:
        if not fits(needs(*size)):
            break
        best = size
    if best is None:
        raise ValueError(
            f"largest: {gigabytes(memory)} of memory and {gigabytes(disk)} of disk do not hold "
            f"{num_params(excess[0]):,} parameters, which need {gigabytes(excess[1])} and {gigabytes(excess[2])}; "
            "offload more, or take a smaller batch"
        )
    width, layers, *tail_sizes = best
    layers = _last(lambda n: fits(needs(width, n, *tail_sizes)), layers, DEEPEST)
    fit, excess = needs(width, layers, *tail_sizes), needs(width, layers + 1, *tail_sizes)
    binds = "depth" if layers == DEEPEST else "memory" if excess[1] > memory else "disk"
    return Largest(fit[0].config, num_params(fit[0]), fit[1], fit[2], binds)


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number in [low, high] for which the monotone `holds` is true; it is at `low`."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


class OnHost(NamedTuple):
    """The bytes of each tensor kept in the host's memory beside a GPU."""

    state: list[int]  # leaves
    grads: list[int]  # their sums
    activations: list[int]
    buffers: int  # for transfers to and from a disk, together


def sizes_on_host(job: Job, leaves: dict[str, tuple[StateMemory, int]] | None = None) -> OnHost:
    """The bytes of leaves, sums of gradients and activations that `job` keeps in the host's memory."""
    plan, t, d_model = job.plan, job.config.train, job.model.config.d_model
    leaves = bytes_of_state(job) if leaves is None else leaves
    state = [n for memory, n in leaves.values() if memory.on_host]
    grads = [size * sums_dtype(job).itemsize for size in sizes_of_sums(plan, lambda memory: memory.on_host)]
    acts = []
    if plan.acts.on_host:
        inputs = t.micro_batch * job.config.data.seq_len * d_model * job.policy.compute.itemsize
        acts = [inputs] * (layers_alive(job) // Remat.parse(t.remat).every)
    return OnHost(state, grads, acts, job.nvme.pool_bytes if job.nvme is not None else 0)


def memory_on_host(job: Job, leaves: dict[str, tuple[StateMemory, int]] | None = None) -> Memory:
    """The part of `memory_needed` that rests in the host's memory where the device is a GPU."""
    state, grads, acts, buffers = sizes_on_host(job, leaves)
    return Memory(sum(state), sum(grads), 0, sum(acts), buffers)


def host_bytes(job: Job) -> int:
    """The bytes of the host's memory that a rank of `job` takes for what rests there."""
    state, grads, acts, buffers = sizes_on_host(job)
    return bytes_taken(state) + bytes_taken(grads) + sum(map(bytes_cached, acts)) + buffers


def rounded_on_host(job: Job) -> int:
    """How many bytes more `host_bytes` is than those of the tensors."""
    return host_bytes(job) - sum(memory_on_host(job))


STATE = {"params": "params", "master": "master", AVERAGE: "ema", "opt_state": "opt"}
WITH_CODEC = {ERROR: "errors"}  # groups that a state has with a codec that keeps errors alone
WORDS = {"params": "parameters", "master": "master weights", "ema": "average", "opt": "optimizer state"}
WORDS |= {"errors": "errors of the codec"}


def state_bytes(job: Job, state: Tree) -> tuple[dict[str, int], dict[str, int]]:
    """({group: bytes at rest on the device}, {memory: bytes} of others)."""
    on_device = dict.fromkeys((*STATE.values(), "other"), 0)
    elsewhere: dict[str, int] = {memory: 0 for memory in MEMORIES.values() if not memory.on_device}
    specs = pytree.named_leaves(specs_of(job))
    for name, leaf in pytree.named_leaves(state).items():
        size = leaf.numel() * leaf.element_size()
        memory = specs[name].memory if name in specs else DEVICE
        if memory.on_device:
            group = next((group for start, group in (STATE | WITH_CODEC).items() if name.startswith(start)), "other")
            on_device[group] = on_device.get(group, 0) + size
        else:
            elsewhere[memory] += size
    return on_device, elsewhere


def needs_on_device(job: Job) -> dict[str, int]:
    """{component: bytes that a rank needs of it on its GPU}; activations are estimated."""
    groups, need = state_bytes(job, like_of(job))[0], memory_on_device(job)
    out = {words: groups.get(group, 0) for group, words in WORDS.items()}
    out |= {"gradients": need.grads, "gathered parameters": need.gathered, "activations": need.activations}
    return {name: size for name, size in out.items() if size > 0}


def expect_fitting_memory(job: Job, available: int, host: int | None = None) -> None:
    """Raise ValueError naming the needs of a rank, and a model that would fit, if `available` is too little."""
    if not job.config.train.memory_check:
        return
    if job.device != HOST and host is not None:
        host_need = host_bytes(job)
        if host_need > host:
            raise ValueError(
                f"offload={job.config.offload!r} puts {gigabytes(host_need)} of each rank into the host's memory and "
                f"{gigabytes(host)} are available; offload less, or to a disk; --set train.memory_check=false tries "
                "anyway"
            )
    need = memory_needed(job) if job.device == HOST else memory_on_device(job)
    exact = need.state + need.buffers
    if exact + SURE * (sum(need) - exact) <= available:
        return
    c, n = job.config, num_params(job)
    fixed, ranks = need.state + need.grads + need.gathered + need.buffers, job.mesh.size
    if fixed <= available:
        hint = "a smaller --micro-batch, a shorter --seq-len or --remat full needs less of them"
    else:
        fitting = [
            (models.num_params(models.build(p())), name)
            for name, p in models.PRESETS.items()
            if family_of(p()) == family_of(c.model)
        ]
        fitting = [(size, name) for size, name in fitting if size * fixed / n < 0.9 * available]
        hint = (
            f"the largest preset of this kind that fits is {max(fitting)[1]}"
            if fitting
            else "a smaller model (--set model.n_layers=...) fits"
        )
    usage_text = other_usage_text(job.device)
    gathered = f", gathered parameters {gigabytes(need.gathered)}" if need.gathered else ""
    gathered += f", buffers {gigabytes(need.buffers)}" if need.buffers else ""
    parts = (
        f"state {gigabytes(need.state)}, gradients {gigabytes(need.grads)}{gathered}, "
        f"activations about {gigabytes(need.activations)}"
    )
    if ranks > 1 and job.config.zero < 3:
        hint = f"--zero 3 shards all of it over dp; {hint}"
    raise ValueError(
        f"{c.preset or 'the model'} ({n / 1e9:.3g}B parameters) needs {gigabytes(sum(need))} "
        f"{'a rank ' * (ranks > 1)}to train "
        f"({parts}) and {gigabytes(available)} are available{' to each' * (ranks > 1)}{usage_text}; {hint}; --set "
        "train.memory_check=false tries anyway"
    )


MENTIONED = 1 << 30  # bytes of a GPU held by others from which they are named: a driver takes some hundred MB


def other_usage_text(device: torch.device) -> str:
    """A clause on what other processes hold of a GPU; "" if it is little."""
    if device == HOST or not gpu.in_use() or (used_bytes := gpu.memory_of(device).external) < MENTIONED:
        return ""
    holders = ", ".join(gpu.processes_on(device)) or "other processes"
    return f" ({gigabytes(used_bytes)} of {gpu.describe_device(device)} are held by {holders})"


def gigabytes(size: float) -> str:
    """A number of bytes in words.

    >>> gigabytes(1.25e10), gigabytes(2e7), gigabytes(41_000)
    ('12.5 GB', '20.0 MB', '41.0 kB')
    """
    factor, unit = (1e9, "GB") if size == 0 or size >= 1e8 else (1e6, "MB") if size >= 1e5 else (1e3, "kB")
    return f"{size / factor:,.1f} {unit}"
