"""The run behind `fzero pretrain`: a corpus, a program, a loop over steps, and a run folder that says what happened."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import data
from fzero.comm.collectives import all_gather
from fzero.core import prng, pytree
from fzero.core.storage import is_url
from fzero.core.tables import Table
from fzero.data.tokens import read_meta
from fzero.kernels.registry import describe, observe
from fzero.offload import Moved
from fzero.run import corpus, machine, run_folder
from fzero.run.build import Program, all_on_disk, build, first_state, flop_per_token, num_params, specs_of
from fzero.run.config import RunConfig, check_vocabulary, from_json, to_json, updated
from fzero.run.corpus import Say
from fzero.run.evaluate import evaluate_all
from fzero.run.generate import generate
from fzero.run.measure import attempts
from fzero.run.measure.log import Meter, clock, numbers, recorder
from fzero.run.measure.profiler import steps_of
from fzero.run.measure.step_records import Chosen, chosen, recording
from fzero.run.memory_check import check_memory, snapshot_room
from fzero.run.ranks.coordinator import TIMEOUT_S, Team
from fzero.run.ranks.elastic import refitted
from fzero.run.ranks.signals import stop_signals
from fzero.run.ranks.watchdog import watched
from fzero.run.resume import auto_resume, rollback
from fzero.run.resume.newest_state import disk_row, expect_disk, expect_new, in_memory, newest_state, told_of_offload
from fzero.run.resume.saver import Saving
from fzero.sharding import Mesh
from fzero.sharding.digests import digest_text
from fzero.sharding.whole_on_first import whole_on_first
from fzero.train.state import TrainState

ALONE = Team()


class Options(NamedTuple):
    """What does not change the numbers of a run."""

    stop_at: int | None = None  # end early, resumably
    peak_flops: float = 0.0  # of MFU, of all processes together; 0: the measured rate of products
    peak_measured: bool = False  # whether that was measured at the start
    profile: str = ""  # "FROM-TO": the steps of this attempt, from 1 on, of which a trace is written
    sample: str = "def "  # prompt of the text shown at the end; "" for none
    say: Say = print
    bar: bool = False  # a progress bar on stderr in place of lines


def start(
    config: RunConfig,
    folder: Path,
    *,
    team: Team = ALONE,
    grow_vocabulary: bool = True,
    init: Path | None = None,
    auto: bool = False,
    options: Options,
) -> int:
    """Run a new run in the free `folder`; returns the signal that stopped it, or 0.

    grow_vocabulary: give the model as many tokens as the corpus has, where those are more. init: take the weights of this run. auto:
    `folder` may hold what an attempt left that did not come to train; a mesh that does not fit the processes is changed, as in `resume`.
    Raises ValueError for whatever is wrong before anything is trained; `folder` is then as it was.
    """
    there, mesh_lines = team.share(lambda: auto_resume.take(folder, auto=auto)), []
    if auto and (math.prod(config.mesh.values()) != team.size or not config.mesh):
        sizes, line = refitted(config, config.mesh or {"dp": team.size}, team.size)
        config, mesh_lines = replace(config, mesh=sizes), [line]
        team.keep(math.prod(sizes.values()))
    team.record(str(folder.absolute()))
    if team.spare:
        return 0
    weights = run_folder.load(init, wide=True) if init else None
    config, mesh, lines = place(config, team)
    if config.data.path != "stdlib":
        config = replace(config, data=replace(config.data, path=str(Path(config.data.path).absolute())))
    if (home := config.train.checkpoints) and not is_url(home):
        config = replace(config, train=replace(config.train, checkpoints=str(Path(home).absolute())))
    program = build(config, mesh, folder)
    check_memory(program, machine.available_bytes() // team.local_size)
    expect_disk(program, team)
    expect_new(program, folder, team)
    try:
        team.share(lambda: auto_resume.begin(folder))
        path = Path(team.share(lambda: str(corpus.find_corpus(config.data, folder, options.say))))
        size = read_meta(path)["vocab_size"]
        if grow_vocabulary and size > config.model.vocab_size:
            options.say(f"the corpus has {size:,} tokens: model.vocab_size is {size} in place of {config.model.vocab_size}")
            config = replace(config, model=replace(config.model, vocab_size=size))
            program = build(config, mesh, folder)
        check_vocabulary(config, path)
        compare_corpus(path, team)
        corpus.open_data(config, path, mesh)
        state = first_state(program, weights.params if weights else None)
        if team.first:
            run_folder.create(
                folder,
                config,
                data.load_tokenizer(path),
                corpus=run_folder.DATA if path == folder / run_folder.DATA else str(path.resolve()),
                corpus_sha256=corpus.digest(path),
                init=str(init.resolve()) if init else "",
                num_params=num_params(program),
                flop_per_token=flop_per_token(program),
                processes=team.size,
            )
            auto_resume.begun(folder)
    except BaseException:
        if team.first:
            run_folder.clear(folder, keep=there)
        raise
    for line in [*(weights.warnings if weights else []), *mesh_lines, *lines]:
        options.say(line)
    return finish(program, state, folder, path, team, options)


def resume(folder: Path, *, team: Team = ALONE, changes: Table | None = None, auto: bool = False, options: Options) -> int:
    """Go on with the run in `folder` from its newest sound checkpoint, by its own config; returns as `start`.

    changes: values of the config about the mesh, which may be another one now; where the run's own does not fit the processes and none
    is given, it is the nearest that does (see run/ranks/elastic.py), and the processes that it leaves over are spares, for whom this
    returns at once. auto: so where the given one does not fit too; and a run that has made its steps is no mistake.
    Raises ValueError where `folder` is no run, its corpus is another one now, or every checkpoint is damaged.
    """
    text, said = team.share(lambda: [to_json(run_folder.read_config(folder)), run_folder.read_environment(folder)])
    config, changes = from_json(text, str(folder)), dict(changes or {})
    kept = config
    if not said.get("corpus"):
        raise ValueError(f"{folder}: holds imported weights, not a training run; start one from them with --init {folder}")
    team.record(str(folder.absolute()))
    team.share(lambda: auto_resume.begun(folder))
    before, given = config.mesh, changes.pop("mesh", None)
    sizes, mesh_lines = before if given is None else given, []
    if math.prod(sizes.values()) != team.size and (auto or given is None):
        sizes, line = refitted(updated(config, changes), sizes, team.size)
        mesh_lines = [line]
        team.keep(math.prod(sizes.values()))
        if team.spare:
            return 0
    config, mesh, lines = place(replace(updated(config, changes), mesh=sizes), team)
    program = build(config, mesh, folder)
    check_memory(program, machine.available_bytes() // team.local_size)
    path = folder / said["corpus"]  # an absolute path stays what it is
    if config.data.path == "stdlib":
        path = Path(team.share(lambda: str(path if path.exists() else corpus.find_corpus(config.data, folder, options.say))))
    if corpus.digest(path) != said["corpus_sha256"]:
        raise ValueError(f"{path}: is not the corpus this run began with; put that one back, or start a new run")
    team.share(lambda: rollback.settle(folder))
    state = newest_state(program, folder, team, options.say, Path(said["init"]) if said["init"] else None)
    kept = replace(kept, offload=config.offload, nvme=config.nvme, precision=config.precision)
    team.share(lambda: run_folder.replace_config(folder, kept))  # where the state is from now on
    step = int(state.step)
    last = min(config.train.steps, options.stop_at or config.train.steps)
    if auto and step >= last:
        options.say(f"{folder}: {'is complete: it ' if last == config.train.steps else ''}has made its {step} steps")
        return 0
    if step >= config.train.steps:
        raise ValueError(f"{folder}: is complete: it has made its {step} steps; a longer run is a new one (--out)")
    if options.stop_at is not None and options.stop_at <= step:
        raise ValueError(f"--stop-at {options.stop_at}: the run has made {step} steps already; give a larger number, or none")
    team.share(lambda: run_folder.cut_metrics(folder, step))
    options.say(f"resuming {folder} at step {step} of {config.train.steps}")
    for line in [*mesh_lines, *lines] if team.size > 1 or mesh_lines else ():
        options.say(line)
    if before != config.mesh and not mesh_lines:
        old = ", ".join(f"{axis}={size}" for axis, size in before.items())
        options.say(f"on {mesh}, before that on {f'Mesh({old})' if old else 'one process'}")
    return finish(program, state, folder, path, team, options)


def place(config: RunConfig, team: Team) -> tuple[RunConfig, Mesh, list[str]]:
    """(the config with its mesh and every "auto" decided, the mesh, lines that say so); rank 0 decides for all.

    Sets how the process makes float32 products, and on how many threads.
    """
    lines = []
    if team.size > 1 and not config.mesh:
        config = replace(config, mesh={"dp": team.size})
        lines.append(f"mesh: dp={team.size}, all {team.size} processes (--mesh says otherwise)")
    # Behind the watchdog, which knows more of a rank that is late.
    mesh = team.mesh(config.mesh, max(TIMEOUT_S, config.train.hang_s + 60.0))
    if team.size > 1:
        lines.append(machine.share_cores(team.local_size))

    def decide() -> tuple[str, list[str]]:
        settled, said = machine.settle(config)
        return to_json(settled), said

    text, said = team.share(decide)
    config = from_json(text)
    if not team.first:
        machine.settle(config)  # nothing is left to decide: it sets, and refuses what is not here
    return config, mesh, [*lines, *said]


def compare_corpus(path: Path, team: Team) -> None:
    """Raise ValueError naming the rank that finds another corpus at `path` than rank 0."""
    fix = "give all hosts the same files, such as a folder that all of them see"
    team.compare({f"the SHA-256 of {path}/meta.json": corpus.digest(path)}, fix)


def finish(program: Program, state: TrainState, folder: Path, path: Path, team: Team, options: Options) -> int:
    """Train, then show a sample; returns the signal that stopped the training, or 0."""
    config, say, measured = program.config, options.say, not options.peak_flops
    if measured:
        # At the same time on all ranks: they share the cores of a host.
        rate = sum(team.gather(machine.gemm_rate(program.policy.compute)))
        options = options._replace(peak_flops=rate, peak_measured=True)
    until = min(config.train.steps, options.stop_at or config.train.steps)
    size = data.open_tokens(path).tokens.shape[0]
    say(f"{config.preset or 'model'}: {num_params(program):,} parameters; run folder {folder}")
    say(f"{path}: {size:,} tokens; {config.train.batch} x {config.data.seq_len} a step")
    if team.size > 1:
        say(str(program.plan).splitlines()[0])
    for line in told_of_offload(program):
        say(line)
    rate = f"{options.peak_flops / 1e9:,.0f} GFLOP/s of {config.precision.policy} products"
    where = f" by {team.size} processes at once" * (team.size > 1)
    say(f"MFU: model FLOPs (6N + 12LTD) over {'the' if measured else 'the given'} {rate}{f' measured here{where}' if measured else ''}")
    begin = time.perf_counter()
    state, stopped = train(program, state, folder, path, until, team, options)
    step, rows = int(state.step), list(run_folder.read_metrics(folder)) if team.first else []
    if step < config.train.steps:
        say(f"stopped after step {step} of {config.train.steps}; go on with: {run_folder.command(team.size)} --out {folder} --resume")
        return stopped
    last = next((row for row in reversed(rows) if "val_loss" in row), {})
    seconds = time.perf_counter() - begin
    say(f"{step} steps in {clock(seconds)}; validation loss {last.get('val_loss', math.nan):.4f} nats per token" + per_byte(last))
    where = program.space.folder if all_on_disk(program) else f"{config.train.checkpoints or run_folder.CHECKPOINTS}/step-{step:08d}"
    say(f"written: {folder}/metrics.jsonl, {where}")
    params = best_params(program, state) if options.sample else ()
    if options.sample and team.first:
        say(f"a sample (fzero sample {folder} --prompt ...):\n")
        say(sample_text(program, params, folder, options.sample))
    return stopped


def train(
    program: Program, state: TrainState, folder: Path, path: Path, until: int, team: Team, options: Options
) -> tuple[TrainState, int]:
    """(the state after step `until`, or after the step in which a signal came to any rank; the signal, or 0).

    A step that went wrong is made again, from a checkpoint, where the config's `guard` says so.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        stack.enter_context(watched(team, program.config.train.hang_s, stop))
        while True:
            state, number, fault = train_on(program, state, folder, path, until, team, options, stop)
            if fault is None:
                return state, number
            rollback.release(state)  # there is room for one
            state = rollback.go_back(program, folder, fault, team, options.say)


def train_on(
    program: Program, state: TrainState, folder: Path, path: Path, until: int, team: Team, options: Options, stop: list[int]
) -> tuple[TrainState, int, rollback.Fault | None]:
    """As `train`, up to a step that asks for a rollback: then (the state after it, 0, the fault).

    Rank 0 writes a row of metrics for every step, checkpoints, and what `options` shows.
    """
    config, t, mesh = program.config, program.config.train, program.mesh
    batch_at, evaluate = corpus.open_data(config, path, mesh)
    bytes_per_token, specs = corpus.mean_bytes(path), specs_of(program)
    first, cursor, skipped, checked = int(state.step), int(state.data_cursor), 0, int(state.step)
    part, every = corpus.open_parts(config, path), config.guard.check_every
    skips, tried = team.share(lambda: rollback.read_record(folder)[:2])

    def sample(step: int) -> int:
        return corpus.sample_at(cursor + (step - first) * t.batch, skips)

    def compare(state: TrainState, step: int) -> int:
        with mesh.ledger.phase("check"):
            rollback.expect_agreement(program, state, lambda m: part(sample(step - 1), m), step)
        return step

    with ExitStack() as stack:
        batches = stack.enter_context(closing(data.prefetch(lambda step: batch_at(sample(step)), first)))
        told = (folder, first, until, t.log_every, options.bar, options.say)
        record = stack.enter_context(recorder(*told)) if team.first else lambda row: None
        room = snapshot_room(program, machine.available_bytes() // team.local_size)
        saving = stack.enter_context(Saving(program, folder, first, room, options.say))
        saving.reserve(state)
        step, moved = first, program.space.moved() if program.space else Moved()
        meter, which, run = stack.enter_context(measuring(program, folder, first, until, team, options))
        while step < until and not (number := agreed(stop, mesh)):
            team.step = step
            batch = meter.fetch(batches)
            with observe() as used:
                state, metrics = run(state, batch, step + 1)
            if step == first and used:
                options.say(f"kernels: {describe(used)}")
            row = numbers(program, metrics, step)
            step += 1
            row |= meter.rates(step) | meter.norms(state, metrics, step)
            with mesh.ledger.phase("checkpoint"):
                row |= disk_row(program, moved) | saving.poll()
            moved = program.space.moved() if program.space else moved
            if step == t.steps or (t.eval_every and step % t.eval_every == 0):
                with mesh.ledger.phase("evaluate"):
                    row |= evaluate_all(program, state, evaluate, bytes_per_token)
            if t.digest_every and step % t.digest_every == 0:
                row["digest"] = digest_text(state.params, specs.params, mesh)
            record(row | meter.times(step, which.how(step)))
            skipped = skipped + 1 if row["skipped"] else 0
            fault = rollback.judged(config.guard, row, sample(step - 1), skipped)
            if fault is not None:
                saving.close(None, step)
                return state, 0, fault
            if sample(step - 1) in tried and not row["skipped"]:
                rollback.passed(folder, step, sample(step - 1), tried, team, options.say)
            due = bool(t.checkpoint_every) and step % t.checkpoint_every == 0
            if every and (due or step % every == 0):
                checked = compare(state, step)
            if due:
                with mesh.ledger.phase("checkpoint"):
                    saving.save(state, step)
        number = agreed(stop, mesh)
        if every and checked != step:
            compare(state, step)
        saving.close(state, step)
        if program.space is not None and program.space.store is not None:
            program.space.store.trim()
    return state, number, None


@contextmanager
def measuring(
    program: Program, folder: Path, first: int, until: int, team: Team, options: Options
) -> Iterator[tuple[Meter, Chosen, Callable[[TrainState, Any, int], tuple]]]:
    """(the meter of an attempt, the steps that are recorded, the function that makes a step), where rank 0 writes the records.

    The function takes the state, the batch and the step's number.
    """
    flop, t = attempts.flop_of(program), program.config.train
    which = chosen(first, until, t.measure_every > 0, steps_of(options.profile, first) if options.profile else (0, 0))
    number = attempts.begin(folder, program, first, team.size, flop, options.peak_flops, options.peak_measured) if team.first else 0
    meter = Meter(program, flop, options.peak_flops)
    with recording(program, folder, number, which if team.first else Chosen()) as run, program.mesh.ledger.watched(meter.clock):
        yield meter, which, run


def agreed(stop: list[int], mesh: Mesh) -> int:
    """The signal that has come to any rank, the same on all of them; 0 for none.

    Communicates: one integer over each axis.
    """
    number = torch.tensor([stop[0] if stop else 0])
    with mesh.ledger.phase("stop"):
        for axis in mesh.axes:
            number = all_gather(number, axis, leaf="stop").amax(0, keepdim=True)
    return int(number)


def sample_text(program: Program, params: Any, folder: Path, prompt: str, n: int = 300) -> str:
    """A text that the model with these whole parameters writes behind `prompt`."""
    tokenizer = run_folder.read_tokenizer(folder)
    tokens = torch.from_numpy(tokenizer.encode(prompt).astype("int64"))[None]
    n = min(n, program.model.config.max_len - tokens.shape[1])
    key = prng.key(program.config.train.seed)
    out = generate(program.model, params, tokens, n, key, temperature=0.7, vocab_size=tokenizer.vocab_size, eos=tokenizer.eos)
    return tokenizer.decode(out[0].tolist())


def best_params(program: Program, state: TrainState) -> Any:
    """The whole weights to write text with on rank 0 (the average, where there is one), in the dtype of the parameters; () elsewhere."""
    specs, state = specs_of(program), in_memory(state)
    if "ema" not in state.extra:
        return whole_on_first(state.params, specs.params, program.mesh)
    whole = whole_on_first(state.extra["ema"], specs.extra["ema"], program.mesh)
    return pytree.map(lambda leaf: leaf.to(program.policy.param), whole)


def per_byte(row: dict[str, Any]) -> str:
    """The part of the summary that speaks of bytes."""
    return f" ({row['val_loss_per_byte']:.4f} per byte)" if "val_loss_per_byte" in row else ""
