"""Prepare a run of `fzero pretrain`: `start` a new one or `resume` an existing one; runner/loop.py trains it.

Both return (the Attempt, the state), or None if this process has nothing to train: it is a spare, or the run has made
its steps.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from fzero import data
from fzero.comm.axes import DP, PP, mesh_text
from fzero.core import gpu, host_memory
from fzero.core.config_tables import Table
from fzero.core.files import NotWritable
from fzero.core.storage import is_url
from fzero.data.chat import read_chat
from fzero.data.tokens import read_meta
from fzero.run import setup
from fzero.run.config import curriculum, transforms
from fzero.run.config.config_checks import expect_fitting_corpus
from fzero.run.config.config_table import apply_table, from_json, to_json
from fzero.run.config.placement import fit_layout, keep_placement, split_values, with_values
from fzero.run.config.run_config import RunConfig
from fzero.run.config.stages import change_stage, split_changes, stages_of
from fzero.run.config.transforms import make_transforms
from fzero.run.config.unused_keys import refuse_without_axis
from fzero.run.measure.flops import fitting_steps, shortened, token_flop
from fzero.run.measure.memory_check import expect_fitting_memory, gigabytes
from fzero.run.measure.step_records import steps_of
from fzero.run.runner import auto_resume, rollback
from fzero.run.runner.evaluate import with_reference
from fzero.run.runner.out_of_memory import explained
from fzero.run.runner.saver import expect_disk, expect_leaves, expect_new, load_newest_state
from fzero.run.setup import corpus, machine, run_folder, run_lock, vocabulary
from fzero.run.setup.build import Attempt, Job, Options, build, first_state, has_factors, num_params
from fzero.run.setup.coordinator import TIMEOUT_S, Coordinator, Say
from fzero.run.setup.vocabulary import expect_added, growth_lines, start_texts
from fzero.sharding import Mesh
from fzero.sharding.spec import Offload
from fzero.train.state import TrainState


def start(
    config: RunConfig,
    folder: Path,
    coordinator: Coordinator,
    options: Options,
    *,
    grow_vocabulary: bool = True,
    may_shorten: bool = False,
    init: Path | None = None,
    auto: bool = False,
) -> tuple[Attempt, TrainState] | None:
    """A new run in the free `folder`, ready to train; raises ValueError for whatever is wrong before that."""
    preexisting, mesh_lines = coordinator.share(lambda: auto_resume.claim_folder(folder, auto=auto)), []
    if auto and (math.prod(config.mesh.values()) != coordinator.size or not config.mesh):
        sizes, line = setup.refit_mesh(config, config.mesh or {DP: coordinator.size}, coordinator.size)
        config, mesh_lines = replace(config, mesh=sizes), [line]
        coordinator.set_size(math.prod(sizes.values()))
    coordinator.record(str(folder.absolute()))
    if coordinator.spare:
        return None
    weights = setup.weights.load_start(init) if init else None
    config, mesh, device, lines = resolve_placement(with_absolute_paths(config), coordinator)
    coordinator.share(lambda: lock_outside_folders(config, options.say))
    job = build(config, mesh, folder, device=device)
    full_steps = config.train.steps
    steps = coordinator.share(lambda: fitting_steps(job)) if may_shorten else full_steps
    if steps != full_steps:
        remedy = f"--steps {full_steps} makes them all"
        lines.append(f"{steps} steps in place of {full_steps}, for about 3 minutes here; {remedy}")
        config = shortened(config, steps)
        job = build(config, mesh, folder, device=device)
    expect_remaining_steps(folder, config, options, 0)
    expect_memory(job, coordinator)
    expect_disk(job, coordinator)
    expect_new(job, folder, coordinator)
    try:
        coordinator.share(lambda: auto_resume.write_marker(folder))
        path = Path(coordinator.share(lambda: str(corpus.find_corpus(config, folder, options.say, init))))
        size, old_size = read_meta(path)["vocab_size"], config.model.vocab_size
        if grow_vocabulary and size > old_size:
            options.say(f"the corpus has {size:,} tokens: model.vocab_size is {size} in place of {old_size}")
            config = replace(config, model=replace(config.model, vocab_size=size))
            job = build(config, mesh, folder, device=device)
        expect_fitting_corpus(config, path)
        expect_added(config.data, path)
        for line in growth_lines(config, weights.model.config, weights.params) if weights else ():
            options.say(line)
        compare_corpus(path, coordinator)
        config = with_digests(config, path, coordinator)
        job = job._replace(config=config)
        for stage in stages_of(config):
            corpus.open_stream(stage.config, path, "train", stage.config.train.batch)
            corpus.open_stream(stage.config, path, "val", stage.config.train.micro_batch)
        if config.data.mixture:  # its sources may end before the run
            corpus.open_micro_batches(config, path)
        make_transforms(config, path)  # the tokens that it names may not be there
        attempt = Attempt(job, folder, path, coordinator, options, config)
        with explained(job, folder, coordinator, "the first state"):
            state = first_state(job, weights.params if weights else None)
        if config.task.reference:
            fresh = weights is not None and not has_factors(weights.params)
            job = with_reference(job, state, path, coordinator, options.say, fresh=fresh)
            attempt = attempt._replace(job=job, config=job.config)
        if coordinator.first:
            create_folder(attempt, init)
    except BaseException:
        if coordinator.first:
            run_folder.clear_folder(folder, preserve=preexisting)
        raise
    for line in [*(weights.warnings if weights else []), *mesh_lines, *lines]:
        options.say(line)
    return attempt, state


def with_digests(config: RunConfig, path: Path, coordinator: Coordinator) -> RunConfig:
    """The config with the digests, as rank 0 finds them, of the files with the order and weights of its rows."""

    def find_digests() -> list[str]:
        data_config = curriculum.with_digest(config, path).data
        return [data_config.curriculum, transforms.with_digest(data_config.token_weights)]

    order, weights = coordinator.share(find_digests)
    return replace(config, data=replace(config.data, curriculum=order, token_weights=weights))


def create_folder(attempt: Attempt, init: Path | None) -> None:
    """Write the files that make the attempt's folder a run, on rank 0."""
    job, folder, path, coordinator, _, config = attempt
    run_folder.create_run(
        folder,
        config,
        data.load_tokenizer(path),
        read_chat(path),
        start_texts(config.data, init) if init else {},
        **(vocabulary.start_ids(init) if init else {}),
        corpus=run_folder.DATA if path == folder / run_folder.DATA else str(path.resolve()),
        corpus_sha256=corpus.corpus_digest(path),
        init=str(init.resolve()) if init else "",
        num_params=num_params(job),
        flop_per_token=token_flop(job).model,
        processes=coordinator.size,
    )
    auto_resume.remove_marker(folder)


def resume(
    folder: Path, coordinator: Coordinator, options: Options, *, changes: Table | None = None, auto: bool = False
) -> tuple[Attempt, TrainState] | None:
    """The run in `folder`, ready to resume from its newest sound state, by its own config and `changes`."""
    text, environment = coordinator.share(lambda: lock_run(folder, options.say))
    recorded, changes = from_json(text, str(folder)), dict(changes or {})
    if not environment.get("corpus"):
        raise ValueError(
            f"{folder}: holds imported weights, not a training run; start one from them with --init {folder}"
        )
    coordinator.record(str(folder.absolute()))
    coordinator.share(lambda: auto_resume.remove_marker(folder))
    values, changes = split_changes(changes)
    numbers, changes = split_values(changes)
    recorded, changed_lines = with_values(recorded, numbers)
    previous = recorded
    if values:
        new, values = auto_resume.with_changes(recorded, values, options.say)
        recorded = new if values else recorded
    explicit_mesh, mesh_lines = changes.pop("mesh", None), []
    sizes = recorded.mesh if explicit_mesh is None else explicit_mesh
    if math.prod(sizes.values()) != coordinator.size and (auto or explicit_mesh is None):
        sizes, line = setup.refit_mesh(apply_table(recorded, changes), sizes, coordinator.size)
        mesh_lines = [line]
        coordinator.set_size(math.prod(sizes.values()))
        if coordinator.spare:
            return None
    config, layout_lines = fit_layout(recorded, replace(apply_table(recorded, changes), mesh=sizes), changes)
    config, mesh, device, lines = resolve_placement(config, coordinator)
    refuse_without_axis(config, changes, recorded)
    coordinator.share(lambda: lock_outside_folders(config, options.say))
    job = build(config, mesh, folder, device=device)
    expect_memory(job, coordinator)
    path = corpus.corpus_of_run(config, folder, environment, coordinator, options.say)
    coordinator.share(lambda: rollback.finish_rollback(folder))
    init = Path(environment["init"]) if environment["init"] else None
    if changed_lines:
        coordinator.share(lambda: expect_leaves(job, folder, previous))
    with explained(job, folder, coordinator, "the state to resume from"):
        state = load_newest_state(job, folder, coordinator, options.say, init)
    step = int(state.step)
    if values or changed_lines:
        expect_remaining_steps(folder, config, options, step)
    if values:
        recorded = change_stage(previous, values, step)
        coordinator.share(lambda: auto_resume.drop_later_skips(folder, recorded))
        config = replace(config, stages=recorded.stages)
        job = job._replace(config=config)
    placed_config = keep_placement(recorded, config, explicit_mesh)  # the config that the state follows from now on
    coordinator.share(lambda: run_folder.replace_config(folder, placed_config))
    attempt = Attempt(job, folder, path, coordinator, options, config)
    if auto and step >= attempt.last_step:
        options.say(
            f"{folder}: {'is complete: it ' if attempt.last_step == config.train.steps else ''}has made its {step} "
            "steps"
        )
        return None
    expect_remaining_steps(folder, config, options, step)
    coordinator.share(lambda: run_folder.cut_metrics(folder, step))
    options.say(f"resuming {folder} at step {step} of {config.train.steps}")
    for line in [*mesh_lines, *layout_lines, *lines] if coordinator.size > 1 or mesh_lines else ():
        options.say(line)
    for line in changed_lines:
        options.say(f"from step {step} on: {line}")
    if recorded.mesh != config.mesh and not mesh_lines:
        options.say(f"on {mesh_text(config.mesh)}, before that on {mesh_text(recorded.mesh)}")
    return attempt, state


def lock_run(folder: Path, say: Say) -> tuple[str, Table]:
    """Own the folder of a run; returns (config.json as a text, environment.json), read after that."""
    run_folder.read_config(folder)
    run_lock.acquire(folder, say)
    run_folder.expect_writable(folder)
    return to_json(run_folder.read_config(folder)), run_folder.read_environment(folder)


def lock_outside_folders(config: RunConfig, say: Say) -> None:
    """Own the folders outside of the run's own that it writes: of checkpoints, and of offloaded state."""
    places = [config.train.checkpoints, config.nvme.folder if Offload.parse(config.offload).on_disk else ""]
    for folder in places:
        if folder and not is_url(folder):
            try:
                run_lock.acquire(Path(folder), say)
            except NotWritable:
                raise
            except OSError:  # a place that is no folder is refused by its own reader
                pass


def expect_remaining_steps(folder: Path, config: RunConfig, options: Options, step: int) -> None:
    """Raise ValueError if a run has no step to make for `options`."""
    stop_at, steps = options.stop_at, config.train.steps
    if step >= steps:
        raise ValueError(
            f"{folder}: is complete: it has made its {step} steps; --steps N, above {step}, makes it longer"
        )
    if stop_at is not None and stop_at <= step:
        raise ValueError(f"--stop-at {stop_at}: the run has made {step} steps already; give a larger number, or none")
    if stop_at is not None and stop_at > steps:
        raise ValueError(f"--stop-at {stop_at}: the run ends at its step {steps} (train.steps); leave it out")
    remaining = min(steps, stop_at or steps) - step
    if options.profile and steps_of(options.profile, 0)[0] > remaining:
        raise ValueError(
            f"--profile {options.profile}: this command makes {remaining} steps; give some of them, such as "
            f"--profile {remaining}"
        )


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The config with absolute paths of its corpora and checkpoints; raises ValueError for one not in UTF-8."""
    config = auto_resume.with_absolute_data(config)
    folder = config.train.checkpoints
    if folder and not is_url(folder):
        config = replace(config, train=replace(config.train, checkpoints=str(Path(folder).absolute())))
    to_json(config)
    return config


def resolve_placement(config: RunConfig, coordinator: Coordinator) -> tuple[RunConfig, Mesh, torch.device, list[str]]:
    """(the config with every "auto" decided, the mesh, the device, lines about them); rank 0 decides for all."""
    device_setting = config.device
    config = replace(config, device=coordinator.share(lambda: gpu.resolve_device(config.device)))
    if config.mesh.get(PP, 1) > 1:
        gpu.widen_queues()
    device = gpu.use_device(config.device, coordinator.local_size)
    reason = (
        f"; no GPU can be used: {gpu.complaint()}"
        if (device_setting, device) == ("auto", gpu.HOST) and gpu.complaint()
        else ""
    )
    lines = [f"device: {gpu.describe_device(device)}{reason}"]
    processes = coordinator.local_size
    if device != gpu.HOST:  # before there are threads of NCCL, OpenMP and disks
        numa_node = host_memory.find_placement(device, processes)
        host_memory.bind_threads(numa_node.cores)
        processes = numa_node.processes
        lines += [f"cores: {numa_node.line}"] * bool(numa_node.line)
    if coordinator.size > 1 and not config.mesh:
        config = replace(config, mesh={DP: coordinator.size})
        lines.append(f"mesh: dp={coordinator.size}, all {coordinator.size} processes (--mesh says otherwise)")
    if config.host_memory_gb:
        lines.append(f"host memory: {gigabytes(machine.host_memory(config))}, as host_memory_gb says")
    coordinator.hang_s = config.train.hang_s
    # Longer than the watchdog, whose report of a late rank is better.
    mesh = coordinator.mesh(config.mesh, max(TIMEOUT_S, config.train.hang_s + 60.0), device)
    if coordinator.size > 1 or device != gpu.HOST:
        lines.append(machine.share_cores(processes, device))

    def decide() -> tuple[str, list[str]]:
        decided, reasons = machine.resolve_here(config)
        return to_json(decided), reasons

    text, reasons = coordinator.share(decide)
    config = from_json(text)
    if not coordinator.first:
        machine.resolve_here(config)  # with nothing left to decide, it applies the settings, or refuses missing ones
    return config, mesh, device, [*lines, *reasons]


def expect_memory(job: Job, coordinator: Coordinator) -> None:
    """Raise ValueError if the run does not fit into this rank's memory."""
    host = machine.host_memory(job.config) // coordinator.local_size
    expect_fitting_memory(job, host if job.device == gpu.HOST else gpu.free_bytes(job.device), host)


def compare_corpus(path: Path, coordinator: Coordinator) -> None:
    """Raise ValueError naming a rank whose corpus at `path` differs from rank 0's."""
    fix = "give all hosts the same files, such as a folder that all of them see"
    coordinator.compare({f"the SHA-256 of {path}/meta.json": corpus.corpus_digest(path)}, fix)
