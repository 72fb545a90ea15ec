"""The loop of a run: steps, metrics, saves, rollbacks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fzero import data
from fzero.comm.tables import any_rank
from fzero.core import prng, pytree
from fzero.kernels.registry import describe, observe
from fzero.offload import DiskTraffic
from fzero.run import corpus, machine, run_folder
from fzero.run.build import Job, all_on_disk, num_params, specs_of
from fzero.run.corpus import Say
from fzero.run.evaluate import evaluate_all
from fzero.run.generate import generate
from fzero.run.measure import attempts
from fzero.run.measure.log import Meter, clock, numbers, recorder
from fzero.run.measure.profiler import steps_of
from fzero.run.measure.step_records import Chosen, chosen, recording
from fzero.run.memory_check import snapshot_room
from fzero.run.ranks.coordinator import Coordinator
from fzero.run.ranks.signals import stop_signals
from fzero.run.ranks.watchdog import watched
from fzero.run.resume import rollback
from fzero.run.resume.newest_state import disk_row, in_memory, told_of_offload
from fzero.run.resume.saver import Saving
from fzero.sharding.digests import digest_text
from fzero.sharding.redistribute import gather_on_first
from fzero.train.state import TrainState

ALONE = Coordinator()


class Options(NamedTuple):
    """What does not change the numbers of a run."""

    stop_at: int | None = None  # end early, resumably
    peak_flops: float = 0.0  # of MFU, of all processes together; 0: the measured rate of products
    peak_measured: bool = False  # whether that was measured at the start
    profile: str = ""  # "FROM-TO": the steps of this attempt, from 1 on, of which a trace is written
    sample: str = "def "  # prompt of the text shown at the end; "" for none
    say: Say = print
    bar: bool = False  # a progress bar on stderr in place of lines


def finish(program: Job, state: TrainState, folder: Path, path: Path, team: Coordinator, options: Options) -> int:
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
    program: Job, state: TrainState, folder: Path, path: Path, until: int, team: Coordinator, options: Options
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
    program: Job, state: TrainState, folder: Path, path: Path, until: int, team: Coordinator, options: Options, stop: list[int]
) -> tuple[TrainState, int, rollback.Fault | None]:
    """As `train`, up to a step that asks for a rollback: then (the state after it, 0, the fault).

    Rank 0 writes a row of metrics for every step, checkpoints, and what `options` shows.
    """
    config, t, mesh = program.config, program.config.train, program.mesh
    batch_at, evaluate = corpus.open_data(config, path, mesh)
    bytes_per_token, specs = corpus.mean_bytes(path), specs_of(program)
    first, cursor, skipped, checked = int(state.step), int(state.data_cursor), 0, int(state.step)
    part, every = corpus.open_parts(config, path), config.guard.check_every
    skips, tried = team.share(lambda: rollback.read_log(folder)[:2])

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
        step, moved = first, program.space.moved() if program.space else DiskTraffic()
        meter, which, run = stack.enter_context(measuring(program, folder, first, until, team, options))
        while step < until and not (number := any_rank(stop[0] if stop else 0, mesh)):
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
        number = any_rank(stop[0] if stop else 0, mesh)
        if every and checked != step:
            compare(state, step)
        saving.close(state, step)
        if program.space is not None and program.space.store is not None:
            program.space.store.trim()
    return state, number, None


@contextmanager
def measuring(
    program: Job, folder: Path, first: int, until: int, team: Coordinator, options: Options
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


def sample_text(program: Job, params: Any, folder: Path, prompt: str, n: int = 300) -> str:
    """A text that the model with these whole parameters writes behind `prompt`."""
    tokenizer = run_folder.read_tokenizer(folder)
    tokens = torch.from_numpy(tokenizer.encode(prompt).astype("int64"))[None]
    n = min(n, program.model.config.max_len - tokens.shape[1])
    key = prng.key(program.config.train.seed)
    out = generate(program.model, params, tokens, n, key, temperature=0.7, vocab_size=tokenizer.vocab_size, eos=tokenizer.eos)
    return tokenizer.decode(out[0].tolist())


def best_params(program: Job, state: TrainState) -> Any:
    """The whole weights to write text with on rank 0 (the average, where there is one), in the dtype of the parameters; () elsewhere."""
    specs, state = specs_of(program), in_memory(state)
    if "ema" not in state.extra:
        return gather_on_first(state.params, specs.params, program.mesh)
    whole = gather_on_first(state.extra["ema"], specs.extra["ema"], program.mesh)
    return pytree.map(lambda leaf: leaf.to(program.policy.param), whole)


def per_byte(row: dict[str, Any]) -> str:
    """The part of the summary that speaks of bytes."""
    return f" ({row['val_loss_per_byte']:.4f} per byte)" if "val_loss_per_byte" in row else ""
