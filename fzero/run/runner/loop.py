"""The loop of a run: announce it, make its steps, roll back after a bad step, summarize it.

Read `train` first: the step itself is `job.train_step` (fzero/train/step.py), and `StageSteps` what is around it.
`train_run` is a whole run from Python.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fzero import data, sharding
from fzero.comm.rank_tables import any_rank
from fzero.core import pytree
from fzero.core.host_memory import to_host
from fzero.data.mixture import Mixture, describe_mixture, sources_of
from fzero.data.packing import figures
from fzero.data.remote_tokens import RemoteTokens
from fzero.data.tokenizers import Tokenizer
from fzero.data.tokens import read_meta
from fzero.kernels.registry import describe
from fzero.offload import DiskTraffic
from fzero.optim import AverageState
from fzero.run import setup
from fzero.run.config import config_table, curriculum
from fzero.run.config.placement import resume_command
from fzero.run.config.run_config import RunConfig
from fzero.run.config.stages import stage_of_step
from fzero.run.measure import flops
from fzero.run.measure.flops import token_flop
from fzero.run.measure.memory_check import snapshot_limit
from fzero.run.measure.metrics_rows import Meter, format_duration, metrics_writer, show_progress
from fzero.run.measure.step_records import StepRecorder, StepSelection, select_steps, steps_of
from fzero.run.runner import rollback
from fzero.run.runner.evaluate import evaluate_all
from fzero.run.runner.out_of_memory import explained
from fzero.run.runner.pretrain import expect_memory, resume, start
from fzero.run.runner.saver import CheckpointSaver, disk_row, offload_summary, to_memory
from fzero.run.runner.step_rows import StepRows, due_after
from fzero.run.setup import corpus, machine, run_folder, run_lock
from fzero.run.setup.build import Attempt, Job, Options, agreed, all_on_disk, num_params, specs_of
from fzero.run.setup.coordinator import join
from fzero.run.setup.process_settings import settings_restored, sleep_while_shared
from fzero.run.setup.signals import handlers_restored, stop_signals
from fzero.run.setup.watchdog import watch, watch_steps
from fzero.sharding.plan_table import option_lines
from fzero.train.capture import pop_news
from fzero.train.state import Metrics, TrainState


def train(attempt: Attempt, state: TrainState) -> int:
    """Train from `state` to the attempt's last step, and show a sample; returns the signal that stopped the training,
    or 0.

    Rolls back to a checkpoint after a bad step if the config's `guard` says so.
    """
    attempt = measure_peak(attempt).in_stage(int(state.step))
    announce(attempt)
    if attempt.coordinator.first and (line := missing_rows(attempt.folder, int(state.step))):
        attempt.options.say(line)
    if attempt.options.sample and attempt.coordinator.first:
        prompt_of(attempt)  # which may be refused
    begin = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(explained(attempt.job, attempt.folder, attempt.coordinator))
        stop = stack.enter_context(stop_signals())
        stack.enter_context(sleep_while_shared())
        stack.enter_context(watch_steps(attempt.coordinator, attempt.job.config.train.hang_s, stop))
        signal = 0
        while not signal and int(state.step) < attempt.last_step:
            attempt = begin_stage(attempt, int(state.step))
            with ExitStack() as resources:
                steps = StageSteps(attempt, state, stop, resources)
                while steps.go_on():
                    batch = steps.fetch()
                    with steps.recorder.step(steps.step + 1, state, batch):
                        state, metrics = attempt.job.train_step(state, batch)
                    state = steps.follow(state, metrics)
                state, signal = steps.finish(state)
            if steps.fault is not None:
                rollback.free_state(state)  # memory holds one state
                state = rollback.roll_back(
                    attempt.job, attempt.folder, steps.fault, attempt.coordinator, attempt.options.say
                )
    summarize(attempt, state, time.perf_counter() - begin)
    return signal


def begin_stage(attempt: Attempt, step: int) -> Attempt:
    """The attempt in the stage that follows `step` steps (stages.py)."""
    next_attempt = attempt.in_stage(step)
    if next_attempt is not attempt:
        expect_memory(next_attempt.job, next_attempt.coordinator)
        c = next_attempt.job.config
        stage_text = "" if stage_of_step(attempt.config, step).reads_on else " in another stage"
        ltd_text = f", of which layers in the middle compute {c.train.random_ltd}" if c.train.random_ltd else ""
        attempt.options.say(f"after step {step}{stage_text}: {c.train.batch} x {c.data.seq_len} a step{ltd_text}")
    return next_attempt


@contextmanager
def recorder(attempt: Attempt, first: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A context of a function that writes and shows the rows of the steps after `first`."""
    config, options = attempt.job.config, attempt.options
    t, display = config.train, {"bar": options.bar, "say": options.say}
    table = config_table.to_table(config)
    with (
        show_progress(first, attempt.last_step, every=t.log_every, **display) as show,
        metrics_writer(attempt.folder, first, show, t.loggers, table) as record,
    ):

        def record_and_log(row: Mapping[str, Any]) -> None:
            record(row)
            if options.log is not None:
                options.log(row["step"], dict(row))

        yield record_and_log


class StageSteps:
    """The steps of one stage of an attempt: what they read, measure and write, open as long as `resources`."""

    def __init__(self, attempt: Attempt, state: TrainState, stop: list[int], resources: ExitStack) -> None:
        job, folder, path, coordinator, options, _ = attempt
        config, first, cursor = job.config, int(state.step), int(state.data_cursor)
        self.attempt, self.stop, self.first = attempt, stop, first
        self.step = self.checked = self.agreed = first  # steps made, those compared, and those of a state in agreement
        self.fault: rollback.Fault | None = None  # which ends the stage
        self.end = min(attempt.last_step, stage_of_step(attempt.config, first).end)
        skips, tried = coordinator.share(lambda: rollback.read_log(folder)[:2])
        load_batch, self.validation = corpus.open_data(config, path, job.mesh, skips)
        self.row_counts = corpus.open_counts(config, path, skips)
        self.bytes_per_token = corpus.bytes_per_token(path)
        self.open_parts = functools.cache(lambda: corpus.open_micro_batches(config, path, skips))
        self.sample = lambda step: corpus.sample_of_cursor(cursor + (step - first) * config.train.batch, skips)
        read = resources.enter_context(closing(data.prefetch(lambda step: load_batch(self.sample(step)), first)))
        self.batches = corpus.prefetch_to_device((batch for _, batch in read), job.device)
        record = resources.enter_context(recorder(attempt, first)) if coordinator.first else None
        snapshot_budget = snapshot_limit(job, machine.host_memory(config) // coordinator.local_size)
        self.saver = resources.enter_context(CheckpointSaver(job, folder, first, snapshot_budget, options.say))
        self.saver.reserve(state)
        self.traffic = job.nvme.traffic() if job.nvme else DiskTraffic()
        flop = token_flop(job)
        profile = steps_of(options.profile, first) if options.profile else (0, 0)
        self.recorded = select_steps(first, attempt.last_step, config.train.measure_every > 0, profile)
        number = flops.begin_attempt(attempt, first, flop) if coordinator.first else 0
        self.meter = Meter(job, flop, options.peak_flops, first)
        selection = self.recorded if coordinator.first else StepSelection()
        self.recorder = resources.enter_context(closing(StepRecorder(job, folder, number, selection)))
        resources.enter_context(job.mesh.ledger.watched(self.meter.clock))
        self.rows = resources.enter_context(StepRows(attempt, self.meter, record, tried))

    def signal(self) -> int:
        """The signal that a rank has received, or 0; all ranks call it."""
        return any_rank(self.stop[0] if self.stop else 0, self.attempt.job.mesh)

    def go_on(self) -> bool:
        """Whether the stage has another step; all ranks call it."""
        return self.fault is None and self.step < self.end and not self.signal()

    def fetch(self) -> Any:
        """The batch of the next step."""
        coordinator = self.attempt.coordinator
        coordinator.step, coordinator.has_stepped = self.step, self.step > self.first
        return self.meter.fetch(self.batches)

    def follow(self, state: TrainState, metrics: Metrics) -> TrainState:
        """The state after a step, once all that follows the step is done; sets `fault` for a bad one."""
        job, mesh, options = self.attempt.job, self.attempt.job.mesh, self.attempt.options
        self.recorder.write(state)
        if self.step == self.first and self.recorder.kernels:
            options.say(f"kernels: {describe(self.recorder.kernels)}")
        for line in pop_news(job.train_step):
            options.say(line)
        self.step += 1
        measurement, due = self.meter.end_step(state, metrics, self.step), due_after(job.config, self.step)
        if fault := self.rows.settle():  # of the step before, where that was not read yet
            self.fault = fault
            return state
        sample = self.sample(self.step - 1)
        with mesh.ledger.phase("checkpoint"):
            fields = disk_row(job, self.traffic) | self.saver.poll() | self.row_counts(sample)
        self.traffic = job.nvme.traffic() if job.nvme else self.traffic
        if due.save or self.step == self.attempt.last_step:  # what is evaluated there is what is saved
            state = self.agree(state)
        if due.evaluate:
            with mesh.ledger.phase("evaluate"):
                fields |= evaluate_all(job, state, self.validation, self.bytes_per_token)
        if due.digest:
            fields["digest"] = sharding.digest_text(state.params, specs_of(job).params, mesh)
        self.rows.add(measurement, sample, fields, self.recorded.recorder_of(self.step))
        if (any(due) or not self.rows.defers) and (fault := self.rows.settle()):
            self.fault = fault
            return state
        if due.check:
            self.compare(state)
        if due.save:
            with mesh.ledger.phase("checkpoint"):
                self.saver.save(state, self.step)
        return state

    def finish(self, state: TrainState) -> tuple[TrainState, int]:
        """(the state after the last step, the signal that stopped the steps or 0); sets `fault` for a bad step."""
        job, attempt = self.attempt.job, self.attempt
        self.fault = self.fault or self.rows.settle()
        if self.fault is not None:
            self.saver.close(None, self.step)
            return state, 0
        signal = self.signal()
        if job.config.guard.check_every and self.checked != self.step:
            self.compare(state)
        ended = bool(signal) or self.step >= attempt.last_step
        state = self.agree(state) if ended and self.agreed != self.step else state
        self.saver.close(state if ended else None, self.step)  # the next stage goes on from here
        if job.nvme is not None and job.nvme.store is not None:
            job.nvme.store.trim()
        return state, signal

    def agree(self, state: TrainState) -> TrainState:
        """The state once all members agree."""
        self.agreed = self.step
        return agreed(self.attempt.job, state, self.attempt.config.train.steps)

    def compare(self, state: TrainState) -> None:
        """Compare the state with what other ranks have of it, and the last step's gradients."""
        job, sample = self.attempt.job, self.sample(self.step - 1)
        read_micro_batch = lambda m: corpus.on_device(self.open_parts()(sample, m), job.device)  # noqa: E731
        with job.mesh.ledger.phase("check"):
            rollback.expect_agreement(job, state, read_micro_batch, self.step)
        self.checked = self.step


# ---- messages before and after ----


def measure_peak(attempt: Attempt) -> Attempt:
    """The attempt with its peak FLOP/s, measured if none was given."""
    if attempt.options.peak_flops:
        return attempt
    coordinator = attempt.coordinator
    rate = coordinator.size * coordinator.share(
        lambda: machine.peak_rate(attempt.job.policy.compute, coordinator.local_size, attempt.job.device)
    )
    return attempt._replace(options=attempt.options._replace(peak_flops=rate, peak_measured=True))


def announce(attempt: Attempt) -> None:
    """Print the model, the corpus, the run folder and the peak for MFU."""
    job, folder, path, coordinator, options, _ = attempt
    config, say = job.config, options.say
    say(f"{config.preset or 'model'}: {num_params(job):,} parameters; run folder {folder}")
    for line in corpus_lines(config, path):
        say(line)
    if coordinator.size > 1:
        say(str(job.plan).splitlines()[0])
    for line in option_lines(job.plan):
        say(line)
    for line in offload_summary(job):
        say(line)
    if job.members is not None:
        say(job.members.text(job.plan))
    if config.train.compress.startswith("8bit"):
        say("checkpoints: moments in 8-bit codes (train.compress), which is lossy: a run that resumes begins there")
    rate = f"{options.peak_flops / 1e9:,.0f} GFLOP/s of {config.precision.policy} products"
    ranks_text = f" by {coordinator.size} processes together" * (coordinator.size > 1)
    article, measured = ("the", f" measured here{ranks_text}") if options.peak_measured else ("the given", "")
    say(f"MFU: model FLOPs (6N + 12LTD) over {article} {rate}{measured}")


def missing_rows(folder: Path, step: int) -> str:
    """The line about steps up to this one that have no row of metrics, "" if all have one."""
    without = set(range(1, step + 1)).difference(row["step"] for row in run_folder.read_metrics(folder))
    if not without:
        return ""
    first, last = min(without), max(without)
    steps_text = f"step {first} has" if len(without) == 1 else f"{len(without)} steps ({first} to {last}) have"
    return f"{steps_text} no row in {folder / run_folder.METRICS}; the state is whole"


def corpus_lines(config: RunConfig, path: Path) -> Iterator[str]:
    """The lines about the corpus of a run, or about each of its mixture."""
    sources = sources_of(path)
    for corpus_path in [source.path for source in sources] or [path]:
        tokens = data.open_tokens(corpus_path, "train", corpus.reading_of(config, path))
        remote = tokens.tokens if isinstance(tokens.tokens, RemoteTokens) else None
        label = corpus_path if remote is None else remote.file.url
        yield f"{label}: {tokens.tokens.shape[0]:,} tokens; {config.train.batch} x {config.data.seq_len} a step"
        if config.data.packing == curriculum.BUCKETS:
            yield from curriculum.describe_buckets(config, tokens)
        elif tokens.kind == "text" and config.data.packing != "stream":
            packing_stats = figures(tokens, config.data.packing, config.data.seq_len)
            yield (
                f"packing {config.data.packing}: {packing_stats.rows:,} sequences an epoch, {packing_stats.filled:.2%} "
                f"of their positions filled up; {packing_stats.cut:.1%} of the documents are longer than a sequence "
                "and cut"
            )
        if remote is not None:
            yield f"{label}: read by pieces, of which {remote.cache.folder} keeps {config.data.cache_gb:g} GB"
        elif tokens.sums is None:
            linked = "linked" in read_meta(corpus_path)
            reason = "another system's file" if linked else "an earlier version prepared it"
            yield f"{corpus_path}: has no checksums ({reason}), so damage to it is not noticed"
    yield from curriculum.describe_curriculum(config)
    if sources:
        yield from describe_mixture(Mixture.parse(config.data.mixture))


def summarize(attempt: Attempt, state: TrainState, seconds: float) -> None:
    """Print the progress of the run; after its last step its validation loss, files and a sample; all ranks call it."""
    job, folder, _, coordinator, options, _ = attempt
    config, say, step = attempt.config, options.say, int(state.step)
    if step < config.train.steps:
        command = resume_command(folder, config, coordinator.size)
        say(f"stopped after step {step} of {config.train.steps}; resume with: {command}")
        return
    rows = list(run_folder.read_metrics(folder)) if coordinator.first else []
    last = next((row for row in reversed(rows) if "val_loss" in row), {})
    per_byte = f" ({last['val_loss_per_byte']:.4f} per byte)" if "val_loss_per_byte" in last else ""
    say(
        f"{step} steps in {format_duration(seconds)}; validation loss {last.get('val_loss', math.nan):.4f} "
        f"nats per {config.task.unit}{per_byte}"
    )
    state_path = (
        job.nvme.folder
        if job.nvme is not None and all_on_disk(job)
        else f"{config.train.checkpoints or run_folder.CHECKPOINTS}/step-{step:08d}"
    )
    say(f"written: {folder}/metrics.jsonl, {state_path}")
    params = best_params(job, state) if options.sample else ()
    if options.sample and coordinator.first:
        gather_note = f", by rank 0 with the weights gathered from {job.mesh.size} ranks" if job.mesh.size > 1 else ""
        say(f"a sample{gather_note} (fzero sample {folder} --prompt ...):\n")
        text = sample_text(attempt, params)
        say(text)
        try:
            run_folder.add_sample(folder, step, options.sample, text)
        except OSError as error:  # the run is complete without it
            say(f"the sample is not in {folder}/{run_folder.SAMPLES} ({error})")


def best_params(job: Job, state: TrainState) -> Any:
    """The whole weights (or their average) for sampling on rank 0, in the parameters' dtype; () elsewhere."""
    specs, state = specs_of(job), to_memory(state)
    if not isinstance(state.opt_state, AverageState):
        return sharding.gather_on_first(state.params, specs.params, job.mesh)
    average = sharding.gather_on_first(state.opt_state.average, specs.opt_state.average, job.mesh)
    return pytree.map(lambda leaf: leaf.to(job.policy.param), average)


def prompt_of(attempt: Attempt) -> tuple[Tokenizer, np.ndarray, list[int]]:
    """(the tokenizer, the ids of the prompt, the ids that end a text); raises ValueError for a bad prompt."""
    folder, max_len = attempt.folder, attempt.job.model.config.max_len
    tokenizer = run_folder.read_tokenizer(folder)
    chat = setup.vocabulary.answers_messages(attempt.job.config, folder)
    ids, ends = setup.vocabulary.prompt_ids(folder, tokenizer, attempt.options.sample, chat=chat)
    if not 0 < len(ids) < max_len:
        raise ValueError(
            f"--prompt has {len(ids)} tokens, and the model {max_len} positions, of which a text needs one more; give "
            'another one, or "" for no text'
        )
    return tokenizer, ids, ends


def sample_text(attempt: Attempt, params: Any, n: int = 300) -> str:
    """The text of up to `n` tokens generated after the prompt of the options."""
    from fzero.generate import Sampling
    from fzero.run.runner.continue_text import continue_text

    job, (tokenizer, ids, ends) = attempt.job, prompt_of(attempt)
    # Weights from a disk are in the host's memory, from where each token takes them to the device.
    leaves = pytree.named_leaves(params)
    remote_leaves = {name: leaf for name, leaf in leaves.items() if leaf.device != job.device}
    leaves |= zip(remote_leaves, to_host([*remote_leaves.values()], job.device, "the weights to sample from"))
    params = pytree.from_named(leaves, params)
    n = min(n, job.model.config.max_len - len(ids))
    sampling = Sampling(0.7, max_tokens=n, seed=job.config.train.seed)
    options = {"device": str(job.device)}
    return continue_text(job.model, params, tokenizer, ids.tolist(), ends, sampling, options=options)


@handlers_restored()
@settings_restored()
def train_run(
    folder: str | Path,
    config: RunConfig | None = None,
    *,
    init: str | Path | None = None,
    options: Options | None = None,
) -> int:
    """Train a new run of `config` in `folder`, or (None) resume the run there; the signal that stopped it, or 0.

    init: the model that a new run starts from, as `--init`; see `tuned_config` of fzero/run/setup/vocabulary.py.
    options: `Options(log=f)` has f(step, row) called on rank 0 after each step, with the row that metrics.jsonl gets;
    what f raises ends the run. Every process of torchrun calls this, in its main thread.
    When it ends, also by an error, the process has its own threads, way of float32 products, signal handlers and the
    like again; see `settings_restored` of fzero/run/setup/process_settings.py.
    Raises ValueError as `start` and `resume` of fzero/run/runner/pretrain.py.

    >>> import tempfile
    >>> from fzero.run.config.config_table import from_table
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "text.txt").write_text("a line of text\\n" * 40)
    >>> train = {"steps": 2, "batch": 1, "micro_batch": 1, "compiled": False, "loggers": []}
    >>> table = {"preset": "mlp-tiny", "data": {"path": str(folder / "text.txt"), "seq_len": 4}, "train": train}
    >>> options = Options(say=lambda line: None, sample="", peak_flops=1e12, log=lambda step, row: print(step))
    >>> train_run(folder / "run", from_table(table), options=options)
    1
    2
    0
    """
    options, coordinator = options or Options(), join(**{"hang_s": config.train.hang_s} if config is not None else {})
    if not coordinator.first:
        options = options._replace(say=lambda line: None)
    try:
        with watch(coordinator):
            if config is None:
                ready = resume(Path(folder), coordinator, options)
            else:
                begin = {"init": Path(init), "grow_vocabulary": False} if init is not None else {}
                ready = start(config, Path(folder), coordinator, options, **begin)
            stopped = train(*ready) if ready is not None else 0
            if not coordinator.spare:
                coordinator.close(stopped)  # and with it torch.distributed
            return stopped
    finally:
        run_lock.release_all()
