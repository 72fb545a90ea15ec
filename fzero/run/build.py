"""From a RunConfig to the functions of a run: mesh, model, plan, optimizer, policy, steps; and what the run needs of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fzero import checkpoint, models
from fzero.checkpoint.offload_snapshot import StoreSnapshot
from fzero.checkpoint.restore_state import restore_state, save_snapshot
from fzero.core import pytree
from fzero.core.precision import Policy
from fzero.core.pytree import Tree
from fzero.core.storage import is_url
from fzero.kernels.registry import Kernels
from fzero.models import Model
from fzero.offload import DiskSettings, Nvme
from fzero.offload.buffer_pool import round_to_pages
from fzero.offload.disk_config import load_settings
from fzero.optim import GradientTransformation, Schedule
from fzero.run import run_folder
from fzero.run.build_optim import make_optimizer, make_policy, make_schedule
from fzero.run.config import RunConfig
from fzero.run.config_table import to_table
from fzero.sharding import Mesh, Plan, Spec, fake_mesh, make_mesh, zero_plan
from fzero.sharding.memory import Offload
from fzero.sharding.slices import STACKED, local_numel
from fzero.train.eval import make_eval_step
from fzero.train.execution import Execution
from fzero.train.init import init_state
from fzero.train.sdc_check import make_check
from fzero.train.spike import Skip, Spike
from fzero.train.state import TrainState, meta_state, state_specs
from fzero.train.state_on_disk import lost_leaves, reopened
from fzero.train.step import make_train_step


class Job(NamedTuple):
    """What a config means, as values."""

    config: RunConfig
    model: Model
    plan: Plan  # with its mesh and its policy
    tx: GradientTransformation
    schedule: Schedule
    space: Nvme | None  # where what is on a disk lives
    train_step: Callable[[TrainState, Any], Any]
    eval_step: Callable[[Tree, Any], Any]
    check: Callable[[TrainState, Callable[[int], Any]], list[str]]  # see make_check

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        return self.plan.mesh

    @property
    def policy(self) -> Policy:
        """The dtypes of the plan."""
        return self.plan.policy


def build(
    config: RunConfig,
    mesh: Mesh | None = None,
    folder: Path | None = None,
    *,
    space: Nvme | None = None,
    model: Model | None = None,
    layers: int = 0,
) -> Job:
    """The program of a config whose "auto" values are decided (see fzero.run.machine.resolve_auto), on `mesh` (None: made by the config).

    folder: of the run, for what is on a disk where the config names no other place. No parameter is made. space: where that is in place of
    the config's own (a plan has no disk). model: the one of config.model, where it was built before: what was compiled for it serves again.
    layers: of a plan, which learns of all layers from a few: only the first ones are run (0: all).
    Raises ValueError for a mesh that does not fit the processes, the model, the sequences or the micro-batches.
    """
    assert "auto" not in (config.precision.policy, config.train.compiled), "decide every auto of the config first"
    mesh = make_mesh(config.mesh, device="cpu") if mesh is None else mesh
    micro_batches = local_micro_batches(config, mesh)
    if config.sequence and config.data.seq_len % mesh["tp"].size:
        raise ValueError(f"data.seq_len is {config.data.seq_len}, which sequence parallelism over tp={mesh['tp'].size} does not divide")
    model = models.build(config.model) if model is None else model
    plan = zero_plan(
        config.zero,
        model,
        mesh,
        policy=make_policy(config),
        reduce=config.reduce,
        accumulate=config.accumulate,
        sequence=config.sequence,
        reshard=config.reshard,
        offload=config.offload,
    )
    t = config.train
    tx = make_optimizer(config.optim, t.steps, kernels=Kernels.parse(t.kernels), seed=t.seed)
    space = make_space(config, folder, mesh) if space is None else space
    if space is not None:
        space.need(buffer_bytes(plan, config))
    g = config.guard
    spike = Spike(g.sigmas, g.window, g.warmup) if g.spike != "off" else None
    execution = Execution(t.remat, bool(t.compiled), t.kernels, config.prefetch, t.measure_every > 0, t.mlp_tiles, layers)
    train_step = make_train_step(
        model,
        tx,
        plan,
        micro_batches=micro_batches,
        execution=execution,
        ema_decay=t.ema_decay,
        skip=Skip(spike=spike),
        update=t.update,
        nvme=space,
    )
    eval_step = make_eval_step(model, plan, execution=execution)
    check = make_check(model, tx, plan, execution=execution, nvme=space, **kept_beside(config))
    schedule = make_schedule(config.optim, config.optim.lr, t.steps)
    return Job(config, model, plan, tx, schedule, space, train_step, eval_step, check)


def make_space(config: RunConfig, folder: Path | None, mesh: Mesh) -> Nvme | None:
    """Where the leaves live that a config puts on a disk; None where it puts none there."""
    if "nvme" not in Offload.parse(config.offload).memories:
        return None
    n = config.nvme
    place = n.folder or (str(folder / run_folder.NVME) if folder is not None else None)
    size = n.buffer_mb << 20 if n.buffer_mb else None
    settings = load_settings(place) if place is not None and not is_url(place) else DiskSettings()
    return Nvme(place, buffer_bytes=size, slots=n.slots, verify=n.verify, settings=settings.share(mesh.size))


def buffer_bytes(plan: Plan, config: RunConfig) -> int:
    """The bytes of buffers that a rank's step needs: for parameters ahead of their use, activations, gradients, and the update's units."""
    policy = plan.policy
    parts: dict[str, int] = {}
    sums: dict[str, int] = {}
    for name, leaf in plan.leaves.items():
        part, layers = name.split("/")[0], leaf.shape[0] if name.startswith(STACKED) else 1
        for held, spec, dtype in ((parts, leaf.params, policy.param), (sums, leaf.grads, policy.accumulate)):
            if spec.memory == "nvme":
                size = local_numel(leaf.shape, Spec(spec.dims), plan.sizes) // layers * dtype.itemsize
                held[part] = held.get(part, 0) + round_to_pages(size)
    tokens = config.train.micro_batch * config.data.seq_len * config.model.d_model * policy.compute.itemsize
    acts = 4 * round_to_pages(tokens) if plan.acts == "nvme" else 0
    forward = (config.prefetch + 3) * max(parts.values(), default=0) + 2 * max(sums.values(), default=0) + acts
    total = sum(leaf.numel() for leaf in pytree.leaves(plan.like)) * 4
    update = min(max(total // 4, 64 << 20), 512 << 20)
    return forward + update if config.train.update == "delayed" else max(forward, update)


def local_micro_batches(config: RunConfig, mesh: Mesh) -> int:
    """The micro-batches of a step that one data rank computes; ValueError where the ranks cannot share them evenly."""
    t, ranks = config.train, mesh.data_size
    total = t.batch // t.micro_batch
    if total % ranks:
        fits = [m for m in range(1, t.batch + 1) if t.batch % m == 0 and (t.batch // m) % ranks == 0]
        fix = f"use --micro-batch {' or '.join(map(str, fits[-3:]))}" if fits else f"use a --batch that {ranks} divides"
        raise ValueError(
            f"train.batch={t.batch} in pieces of train.micro_batch={t.micro_batch} makes {total} micro-batches, which {ranks} data ranks "
            f"(dp={mesh['dp'].size} x rp={mesh['rp'].size}) cannot share evenly; {fix}, or another mesh"
        )
    return total // ranks


def kept_beside(config: RunConfig) -> dict[str, bool]:
    """What a state keeps in `extra`, as arguments of what makes or describes one."""
    return {"ema": config.train.ema_decay > 0}


def specs_of(program: Job) -> TrainState:
    """The Spec of every leaf of the state."""
    return state_specs(program.plan, program.tx, **kept_beside(program.config))


def first_state(program: Job, params: Tree | None = None) -> TrainState:
    """The state before the first step, drawn from the config's seed, or around the given parameters."""
    config = program.config.train
    start = program.model if params is None else params
    options = {"seed": config.seed, "nvme": program.space, **kept_beside(program.config)}
    return init_state(start, program.tx, program.plan, **options)


def latest(program: Job) -> TrainState:
    """This rank's state of the last complete step on the disk. Raises ValueError where it is damaged or of another run."""
    return reopened(program.tx, program.plan, program.space, **kept_beside(program.config))


def all_on_disk(program: Job) -> bool:
    """Whether the store of a run holds, or determines, its whole state: then each step is a checkpoint."""
    if program.space is None:
        return False
    return not lost_leaves(like_of(program), specs_of(program), program.plan)


def restore(program: Job, path: checkpoint.Folder) -> TrainState:
    """This rank's state from the checkpoint at `path`, of whatever mesh, stage, offload and policy; see `restore_state`."""
    return restore_state(path, like_of(program), specs_of(program), program.plan, program.space)


def like_of(program: Job) -> TrainState:
    """This rank's state with its leaves on the meta device."""
    return meta_state(program.plan, program.tx, **kept_beside(program.config))


def save_store(program: Job, before: RunConfig, snapshot: StoreSnapshot, home: checkpoint.Folder, last: int) -> checkpoint.Folder | None:
    """The checkpoint in `home` of the last complete step of the store of another plan, where that is after step `last`; None where not.

    before: the config under which the store was written. Raises Damaged where it is not what was written.
    """
    if snapshot.record.step <= last:
        return None
    program = program._replace(plan=replace(program.plan, policy=make_policy(before)))
    stage = before.zero if snapshot.stage is None else snapshot.stage
    options = {"reduce": before.reduce, "accumulate": before.accumulate, "sequence": before.sequence, "policy": make_policy(before)}
    there = zero_plan(stage, program.model, fake_mesh(snapshot.sizes), **options)
    old = state_specs(there, program.tx, **kept_beside(program.config))
    return save_snapshot(home, snapshot, old, like_of(program), specs_of(program), program.mesh, to_table(before))


# -- what it costs


def num_params(program: Job) -> int:
    """The number of parameters."""
    return sum(leaf.numel() for leaf in pytree.leaves(program.plan.like))
