"""From a RunConfig to the functions of a run: mesh, model, plan, optimizer, policy, steps; and its memory.

The state that a run evaluates and saves where its ranks or members are apart; one start of a run, an Attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import checkpoint, models, optim, train
from fzero.comm.axes import AXES
from fzero.core import pytree
from fzero.core.device import HOST
from fzero.core.precision import Policy
from fzero.core.pytree import Tree
from fzero.kernels.registry import Kernels
from fzero.models import Model
from fzero.models.base import Start
from fzero.models.configs import SCORE, frozen_leaves
from fzero.models.presets import grow_tables
from fzero.models.weights import column_norms
from fzero.offload import Nvme
from fzero.offload.nvme import buffer_need
from fzero.optim import GradientTransformation, Schedule
from fzero.run import setup
from fzero.run.config.config_table import to_table
from fzero.run.config.curriculum import BUCKETS, BucketStep
from fzero.run.config.run_config import RunConfig
from fzero.run.config.stages import shared_batch, stage_of_step, token_rates
from fzero.run.config.unused_keys import codec_of
from fzero.run.setup import run_folder
from fzero.run.setup.build_optim import make_optimizer, make_policy, make_schedule
from fzero.run.setup.coordinator import Coordinator, Say
from fzero.sharding import Mesh, Plan, fake_mesh, make_mesh, zero_plan
from fzero.sharding.context import Context
from fzero.sharding.spec import Offload
from fzero.train.execution import Execution, Skip
from fzero.train.gradient import make_eval_step
from fzero.train.make_state import init_state
from fzero.train.state import TrainState, meta_state, state_specs
from fzero.train.state_on_disk import DiskLayout, reopen_state
from fzero.train.step import make_train_step
from fzero.train.update.in_memory import sum_divergence

Check = Callable[[TrainState, Callable[[int], Any]], list[str]]  # see make_check


class Job(NamedTuple):
    """The functions and values built from a config."""

    config: RunConfig
    model: Model
    plan: Plan  # with its mesh and its policy
    tx: GradientTransformation
    schedule: Schedule
    nvme: Nvme | None  # the store of offloaded leaves
    train_step: Callable[[TrainState, Any], Any]
    eval_step: Callable[[Tree, Any], Any]
    check: Check | None  # by guard.check_every
    device: torch.device = HOST  # of this process: where the state is that does not rest elsewhere
    members: setup.Members | None = None  # that train apart, each by the plan

    @property
    def mesh(self) -> Mesh:
        """The mesh of the run: that of the plan, or of all members."""
        return self.plan.mesh if self.members is None else self.members.mesh

    @property
    def policy(self) -> Policy:
        """The dtypes of the plan."""
        return self.plan.policy


def build(
    config: RunConfig,
    mesh: Mesh | None = None,
    folder: Path | None = None,
    *,
    nvme: Nvme | None = None,
    model: Model | None = None,
    layers: int = 0,
    trace_cache: dict[Any, Any] | None = None,
    device: torch.device = HOST,
) -> Job:
    """The Job of a config whose "auto" values are decided (see fzero.run.setup.machine.resolve_auto), on `mesh` (None:
    made by the config).

    No parameter is made. folder: of the run, for offloaded leaves unless the config names another folder. nvme:
    overrides the config's own (a plan has no disk). model: config.model, built earlier, to reuse its compiled code.
    layers: planner only: run the first `layers` layers (0: all). trace_cache: planner only, see Execution. device: of
    this process, see `place` in pretrain.py. Raises ValueError for a mesh that does not fit the processes, the
    model, the sequences or the micro-batches."""
    assert "auto" not in (config.precision.policy, config.train.compiled), "decide every auto of the config first"
    mesh = make_mesh(config.mesh, device="cpu") if mesh is None else mesh
    micro_batches = local_micro_batches(config, mesh)
    expect_even_sequences(config, mesh)
    model = config.task.with_loss(config, models.build(config.model) if model is None else model)
    members = setup.members_of(config.local, mesh) if config.local.method else None
    plan = zero_plan(
        config.zero,
        model,
        mesh if members is None else mesh.member(),
        policy=make_policy(config),
        reduce=config.reduce,
        sequence=Context.parse(config.context, over_tp=config.sequence),
        offload=config.offload,
        pipeline=config.pipeline,
        codec=codec_of(config) or None,
        frozen=frozen_leaves(config.model),
    )
    plan = plan.with_experts(config.experts).for_update(config.train.update)
    if config.train.update == "delayed":
        plan = plan.with_updates(delayed_updates(config, micro_batches), config.train.delay_after)
    if plan.context is not None:
        plan.context.expect_divisible(mesh.cp.size, config.data.seq_len, mesh.tp.size * config.sequence or 1)
    t = config.train
    rates = token_rates(config)
    tx = optimizer_of(config, rates, max(1, plan.delayed))
    nvme = make_nvme(config, folder) if nvme is None else nvme
    if nvme is not None:
        nvme.need(buffer_bytes(plan, config), mesh.size)
    execution = Execution(
        t.remat,
        bool(t.compiled),
        t.kernels,
        config.prefetch,
        config.reshard,
        t.measure_every > 0,
        t.capture,
        config.resident,
        config.partition_activations,
        t.update,
        **{"_layers": layers, "_dealt": True, "_known": trace_cache},
    )
    trained = with_drops(config, model)
    train_step = make_train_step(
        trained,
        tx,
        plan,
        micro_batches=micro_batches,
        execution=execution,
        skip=skip_of(config),
        nvme=nvme,
    )
    evaluated = models.by_position(model) if t.loss_by_position else model
    eval_step = make_eval_step(evaluated, plan, execution=execution, reduce=False)
    check = train.make_check(trained, tx, plan, execution=execution, nvme=nvme) if config.guard.check_every else None
    schedule = make_schedule(config.optim, config.optim.lr, t.steps, rates)
    train_step = members.step(train_step, plan) if members else train_step
    train_step = BucketStep(train_step, t.batch, mesh.data_size) if config.data.packing == BUCKETS else train_step
    return Job(config, model, plan, tx, schedule, nvme, train_step, eval_step, check, device, members)


def optimizer_of(config: RunConfig, rates: Any, updates: int) -> GradientTransformation:
    """The optimizer of a run, with the scale of its rate and its average."""
    options = {"kernels": Kernels.parse(config.train.kernels), "seed": config.train.seed, "updates": updates}
    optimizer = partial(make_optimizer, config.optim, config.train.steps, rates, **options)
    tx = optim.with_lr_scale(lambda scale: optimizer(scale=scale)) if config.optim.lr_scaling != "none" else optimizer()
    return optim.with_average(tx, config.train.ema_decay) if config.train.ema_decay else tx


def with_drops(config: RunConfig, model: Model) -> Model:
    """The model as it is trained: whose layers drop tokens, or that drops layers."""
    t = config.train
    if t.layer_drop_theta < 1:
        return models.layer_drop(model, t.layer_drop_theta, t.layer_drop_gamma)
    return models.random_ltd(model, t.random_ltd) if 0 < t.random_ltd < config.data.seq_len else model


def expect_even_sequences(config: RunConfig, mesh: Mesh) -> None:
    """Raise ValueError if sequence parallelism cannot cut a sequence into equal parts."""
    if config.sequence and mesh.cp.size == 1 and config.data.seq_len % mesh.tp.size:
        raise ValueError(
            f"data.seq_len is {config.data.seq_len}, which sequence parallelism over tp={mesh.tp.size} does not divide"
        )


def skip_of(config: RunConfig) -> Skip:
    """Which steps make no update."""
    g = config.guard
    return Skip(spike=train.Spike(g.sigmas, g.window, g.warmup) if g.spike != "off" else None)


def delayed_updates(config: RunConfig, micro_batches: int) -> int:
    """The delayed updates of a step; raises ValueError if they do not fit."""
    t = config.train
    ranks = t.batch // t.micro_batch // micro_batches
    if shared_batch(t.batch, t.batch_ramp) // t.micro_batch // ranks % t.updates:
        raise ValueError(
            f"train.updates is {config.train.updates} and each data rank has {micro_batches} micro-batches a step, "
            "which so many updates cannot share evenly; change train.batch, or the mesh"
        )
    return config.train.updates


def make_nvme(config: RunConfig, folder: Path | None) -> Nvme | None:
    """The store of the leaves that a config puts on a disk; None if it puts none there."""
    if not Offload.parse(config.offload).on_disk:
        return None
    n = config.nvme
    store_folder = n.folder or (str(folder / run_folder.NVME) if folder is not None else None)
    size = n.buffer_mb << 20 if n.buffer_mb else None
    return Nvme(store_folder, buffer_bytes=size, slots=n.slots, verify=n.verify)


def buffer_bytes(plan: Plan, config: RunConfig) -> int:
    """The bytes of buffers that a rank's step needs."""
    t, width = config.train, config.model.d_model * plan.policy.compute.itemsize
    return buffer_need(plan, prefetch=config.prefetch, activation_bytes=t.micro_batch * config.data.seq_len * width)


def local_micro_batches(config: RunConfig, mesh: Mesh) -> int:
    """The micro-batches of a step that one data rank computes; ValueError if the ranks cannot share them evenly."""
    t, ranks = config.train, mesh.data_size
    total = t.batch // t.micro_batch
    if shared_batch(t.batch, t.batch_ramp) // t.micro_batch % ranks and not total % ranks:
        raise ValueError(
            f"train.batch_ramp is {t.batch_ramp}, whose batches in pieces of train.micro_batch={t.micro_batch} the "
            f"{ranks} data ranks cannot share evenly; begin with, and grow by, multiples of {ranks * t.micro_batch}"
        )
    if total % ranks:
        among = " x ".join(f"{a}={mesh[a].size}" for a in AXES.by_data_rank if mesh[a].size > 1)
        fits = [m for m in range(1, t.batch + 1) if t.batch % m == 0 and (t.batch // m) % ranks == 0]
        fix = f"use --micro-batch {' or '.join(map(str, fits[-3:]))}" if fits else f"use a --batch that {ranks} divides"
        raise ValueError(
            f"train.batch={t.batch} in pieces of train.micro_batch={t.micro_batch} makes {total} micro-batches, which "
            f"{ranks} data ranks ({among}) cannot share evenly; {fix}, or another mesh"
        )
    return total // ranks


def specs_of(job: Job) -> TrainState:
    """The Spec of every leaf of the state."""
    specs = state_specs(job.plan, job.tx)
    return specs if job.members is None else job.members.specs(specs, job.plan)


def first_state(job: Job, params: Tree | None = None) -> TrainState:
    """The state before the first step, drawn from the config's seed, or around the given parameters."""
    config = job.config.train
    if params is not None:
        params = pytree.from_named(grow_tables(pytree.named_leaves(params), job.config.model.vocab_size), params)
    start = job.model if params is None else params
    if params is not None:
        named_params = pytree.named_leaves(params)
        lora = job.config.model if isinstance(job.config.model, models.LoRAConfig) and not has_factors(params) else None
        if lora is not None and isinstance((inner := models.build(lora.base)).config, models.QuantizedConfig):
            named_params = pytree.named_leaves(models.quantize_weights(inner, params))
        if lora is not None or (SCORE in job.plan.leaves and SCORE not in named_params):  # what is not given is drawn
            begin = {
                name: Start((lambda leaf=leaf: leaf,), tuple(leaf.shape), False) for name, leaf in named_params.items()
            }
            for name, leaf in job.plan.leaves.items():
                if name.endswith("_lora_m") and lora is not None:
                    norms = partial(column_norms, named_params, name, lora)
                    begin[name] = Start((norms,), tuple(leaf.shape), False)
            start = job.model.with_traits(start=begin)
    state = init_state(start, job.tx, job.plan, seed=config.seed, nvme=job.nvme, device=job.device)
    return state if job.members is None else job.members.first_state(state, job.plan)


def has_factors(params: Tree) -> bool:
    """Whether parameters have LoRA's factors."""
    return any(name.endswith("_lora_a") for name in pytree.names(params))


def latest(job: Job) -> TrainState:
    """This rank's state of the last complete step on disk. Raises ValueError if it is damaged or of another run."""
    assert job.nvme is not None  # the state rests there
    return reopen_state(job.tx, job.plan, job.nvme, device=job.device)


def all_on_disk(job: Job) -> bool:
    """Whether the store of a run determines its whole state: then each step is a checkpoint."""
    if job.nvme is None:
        return False
    return not DiskLayout(like_of(job), specs_of(job), job.plan).missing


def restore(job: Job, path: checkpoint.Folder) -> TrainState:
    """This rank's state from the checkpoint at `path`, of whatever mesh, stage, offload and policy; see
    `restore_state`."""
    return checkpoint.restore_state.restore_state(path, like_of(job), specs_of(job), job.plan, job.nvme, job.device)


def like_of(job: Job) -> TrainState:
    """This rank's state with its leaves on the meta device."""
    state = meta_state(job.plan, job.tx)
    return state if job.members is None else job.members.first_state(state, job.plan)


def save_store(
    job: Job, previous: RunConfig, snapshot: checkpoint.StoreSnapshot, checkpoint_dir: checkpoint.Folder, last: int
) -> checkpoint.Folder | None:
    """Convert the last complete step of another plan's store into a checkpoint; None if it is not after `last`."""
    if snapshot.record.step <= last:
        return None
    job = job._replace(plan=replace(job.plan, policy=make_policy(previous)))
    stage = previous.zero if snapshot.stage is None else snapshot.stage
    options = {
        "reduce": previous.reduce,
        "sequence": previous.sequence,
        "policy": make_policy(previous),
        "pipeline": snapshot.pipeline,
    }
    store_plan = zero_plan(stage, job.model, fake_mesh(snapshot.sizes), **options)
    old = state_specs(store_plan, job.tx)
    return checkpoint.save_snapshot(
        checkpoint_dir, snapshot, old, like_of(job), specs_of(job), job.mesh, to_table(previous)
    )


# -- cost


def num_params(job: Job) -> int:
    """The number of parameters."""
    return models.num_params(job.model)


def agreed(job: Job, state: TrainState, steps: int) -> TrainState:
    """The state once all members agree, in the buffers of `state`; after the last step also ranks that move apart."""
    with job.mesh.ledger.phase("checkpoint"):
        if job.members is not None:
            return job.members.agree(state, job.plan)
        return sum_divergence(job.tx, job.plan, state) if int(state.step) == steps else state


class Options(NamedTuple):
    """Options of a run that do not change its numbers."""

    stop_at: int | None = None  # end after this step, resumably
    peak_flops: float = 0.0  # peak for MFU, of all processes together; 0: the measured rate of products
    peak_measured: bool = False  # whether that rate was measured at the start
    profile: str = ""  # "FROM-TO": steps of this attempt to trace, from 1 on
    sample: str = "def "  # prompt of the text shown at the end; "" for none
    say: Say = print
    bar: bool = False  # a progress bar on stderr in place of lines
    log: Callable[[int, dict[str, Any]], None] | None = None  # hears of each step on rank 0: its number and its row


class Attempt(NamedTuple):
    """A run that is ready to train: job, folders, processes and options."""

    job: Job
    folder: Path  # of the run
    corpus: Path
    coordinator: Coordinator
    options: Options
    config: RunConfig  # of the whole run, whose `stages` may lie before or behind the one of `job`

    @property
    def last_step(self) -> int:
        """The step after which this attempt ends."""
        steps = self.config.train.steps
        return min(steps, self.options.stop_at or steps)

    def in_stage(self, step: int) -> Attempt:
        """The attempt with the job of the stage that makes the step after `step` steps."""
        config, job = stage_of_step(self.config, step).config, self.job
        if config == job.config:
            return self
        return self._replace(job=build(config, job.mesh, self.folder, nvme=job.nvme, device=job.device))
