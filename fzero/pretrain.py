"""The run behind `fzero pretrain`: a corpus, a program, a loop over steps, and a run folder that says what happened."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import platform
import signal
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fzero
from fzero import checkpoint, data, doctor, pytree, random, runs
from fzero.config import Data, RunConfig, check_vocabulary, to_table
from fzero.data.tokens import VERSION, read_meta
from fzero.program import Program, build, check_memory, first_state, flop_per_token, num_params
from fzero.report import plots
from fzero.sample import generate
from fzero.train import Metrics, TrainState

MAX_SKIPPED = 50  # steps in a row whose gradient is not finite, until the run gives up
Say = Callable[[str], None]


class Options(NamedTuple):
    """What does not change the numbers of a run."""

    stop_at: int | None = None  # end early, resumably
    peak_flops: float = 0.0  # of MFU; 0: the measured rate of products
    sample: str = "def "  # prompt of the text shown at the end; "" for none
    say: Say = print
    bar: bool = False  # a progress bar on stderr in place of lines


def start(config: RunConfig, folder: Path, *, grow_vocabulary: bool = True, init: Path | None = None, options: Options) -> int:
    """Run a new run in the free `folder`; returns the signal that stopped it, or 0.

    grow_vocabulary: give the model as many tokens as the corpus has, where those are more. init: take the weights of this run.
    Raises ValueError for whatever is wrong before anything is trained; `folder` is then as it was.
    """
    runs.expect_free(folder)
    there = folder.exists()
    weights = runs.load(init, wide=True) if init else None
    config, lines = doctor.settle(config)
    if config.data.path != "stdlib":
        config = replace(config, data=replace(config.data, path=str(Path(config.data.path).absolute())))
    program = build(config)
    check_memory(program, doctor.available_bytes())
    try:
        corpus = find_corpus(config.data, folder, options.say)
        size = read_meta(corpus)["vocab_size"]
        if grow_vocabulary and size > config.model.vocab_size:
            options.say(f"the corpus has {size:,} tokens: model.vocab_size is {size} in place of {config.model.vocab_size}")
            config = replace(config, model=replace(config.model, vocab_size=size))
            program = build(config)
        check_vocabulary(config, corpus)
        tokenizer = data.load_tokenizer(corpus)
        open_data(config, corpus)
        where = runs.DATA if corpus == folder / runs.DATA else str(corpus.resolve())
        state = first_state(program, weights.params if weights else None)
        runs.create(
            folder,
            config,
            tokenizer,
            corpus=where,
            corpus_sha256=digest(corpus),
            init=str(init.resolve()) if init else "",
            num_params=num_params(program),
            flop_per_token=flop_per_token(program),
        )
    except BaseException:
        runs.clear(folder, keep=there)
        raise
    for line in [*(weights.warnings if weights else []), *lines]:
        options.say(line)
    return finish(program, state, folder, corpus, options)


def resume(folder: Path, *, options: Options) -> int:
    """Go on with the run in `folder` from its newest sound checkpoint, by its own config; returns as `start`.

    Raises ValueError where `folder` is no run, its corpus is another one now, or every checkpoint is damaged.
    """
    config = runs.read_config(folder)
    said = runs.read_environment(folder)
    if not said.get("corpus"):
        raise ValueError(f"{folder}: holds imported weights, not a training run; start one from them with --init {folder}")
    config, _ = doctor.settle(config)
    program = build(config)
    check_memory(program, doctor.available_bytes())
    corpus = folder / said["corpus"]  # an absolute path stays what it is
    if not corpus.exists() and config.data.path == "stdlib":
        corpus = find_corpus(config.data, folder, options.say)
    if digest(corpus) != said["corpus_sha256"]:
        raise ValueError(f"{corpus}: is not the corpus this run began with; put that one back, or start a new run")
    if checkpoint.steps(folder / runs.CHECKPOINTS):
        path, damaged = checkpoint.newest_sound(folder / runs.CHECKPOINTS)
        for bad, why in damaged:
            options.say(f"passed over {bad}: {why}")
        state = checkpoint.restore(path, first_state(program, program.plan.like))
    else:
        state = first_state(program, runs.load(Path(said["init"]), wide=True).params if said["init"] else None)
    step = int(state.step)
    if step >= config.train.steps:
        raise ValueError(f"{folder}: is complete: it has made its {step} steps; a longer run is a new one (--out)")
    if options.stop_at is not None and options.stop_at <= step:
        raise ValueError(f"--stop-at {options.stop_at}: the run has made {step} steps already; give a larger number, or none")
    runs.cut_metrics(folder, step)
    options.say(f"resuming {folder} at step {step} of {config.train.steps}")
    return finish(program, state, folder, corpus, options)


def finish(program: Program, state: TrainState, folder: Path, corpus: Path, options: Options) -> int:
    """Train, then write the pictures and show a sample; returns the signal that stopped the training, or 0."""
    config, say, measured = program.config, options.say, not options.peak_flops
    if measured:
        options = options._replace(peak_flops=doctor.gemm_rate(program.policy.compute))
    until = min(config.train.steps, options.stop_at or config.train.steps)
    size = data.open_tokens(corpus).tokens.shape[0]
    say(f"{config.preset or 'model'}: {num_params(program):,} parameters; run folder {folder}")
    say(f"{corpus}: {size:,} tokens; {config.train.batch} x {config.data.seq_len} a step")
    rate = f"{options.peak_flops / 1e9:,.0f} GFLOP/s of {config.precision.policy} products"
    say(f"MFU: model FLOPs (6N + 12LTD) over {'the' if measured else 'the given'} {rate}{' measured here' if measured else ''}")
    begin = time.perf_counter()
    state, stopped = train(program, state, folder, corpus, until, options)
    step, rows = int(state.step), list(runs.read_metrics(folder))
    if rows:
        title = f"{config.preset or 'model'}, {num_params(program):,} parameters, {config.precision.policy}"
        plots.loss(rows, folder / "loss.png", title)
        plots.throughput(rows, folder / "throughput.png", title)
    if step < config.train.steps:
        say(f"stopped after step {step} of {config.train.steps}; go on with: fzero pretrain --out {folder} --resume")
        return stopped
    last = next((row for row in reversed(rows) if "val_loss" in row), {})
    seconds = time.perf_counter() - begin
    say(f"{step} steps in {clock(seconds)}; validation loss {last.get('val_loss', math.nan):.4f} nats per token" + per_byte(last))
    say(f"written: {folder}/metrics.jsonl, loss.png, throughput.png, checkpoints/step-{step:08d}")
    if options.sample:
        say(f"a sample (fzero sample {folder} --prompt ...):\n")
        say(sample_text(program, state, folder, options.sample))
    return stopped


def train(program: Program, state: TrainState, folder: Path, corpus: Path, until: int, options: Options) -> tuple[TrainState, int]:
    """(the state after step `until`, or after the step in which a signal came; the signal, or 0).

    Writes a row of metrics for every step, checkpoints, and what `options` shows.
    """
    config, t = program.config, program.config.train
    stream, evaluate = open_data(config, corpus)
    bytes_per_token, flop = mean_bytes(corpus), flop_per_token(program)
    first, cursor, skipped, saved = int(state.step), int(state.data_cursor), 0, int(state.step)

    def batch_at(step: int) -> data.stream.Batch:
        return without_documents(config, stream.samples_at(cursor + (step - first) * t.batch, t.batch))

    def save(state: TrainState, step: int) -> int:
        checkpoint.save(folder / runs.CHECKPOINTS, state, step=step, config=to_table(config), keep_last=t.keep_last or None)
        return step

    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        batches = stack.enter_context(closing(data.prefetch(batch_at, first)))
        record = stack.enter_context(recorder(folder, first, until, t.log_every, options))
        step = first
        while step < until and not stop:
            begin = time.perf_counter()
            _, batch = next(batches)
            waited = time.perf_counter() - begin
            state, metrics = program.train_step(state, batch)
            row = numbers(program, metrics, step)
            step += 1
            spent = time.perf_counter() - begin
            rate = t.batch * config.data.seq_len / spent
            mfu = rate * flop / options.peak_flops
            row |= {"tokens": step * t.batch * config.data.seq_len, "step_s": spent, "data_s": waited, "tokens_per_s": rate, "mfu": mfu}
            if step == t.steps or (t.eval_every and step % t.eval_every == 0):
                row |= evaluate_all(program, state, evaluate, bytes_per_token)
            record(row)
            skipped = skipped + 1 if row["skipped"] else 0
            if skipped >= MAX_SKIPPED:
                raise FloatingPointError(f"the gradient has not been finite for {skipped} steps in a row (to step {step}); lower --lr")
            if t.checkpoint_every and step % t.checkpoint_every == 0:
                saved = save(state, step)
        if saved != step:
            save(state, step)
    return state, stop[0] if stop else 0


def numbers(program: Program, metrics: Metrics, step: int) -> dict[str, Any]:
    """The row of a step's metrics: numbers that JSON has (None for what is not finite). `step` steps were made before."""
    values = {
        "loss": float(metrics.loss),
        **{name: float(value) for name, value in metrics.extra.items()},
        "grad_norm": float(metrics.grad_norm),
        "lr": float(program.schedule(step)),
        "loss_scale": float(metrics.loss_scale),
    }
    values = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return {"step": step + 1, **values, "skipped": bool(metrics.skipped), "num_tokens": int(metrics.num_tokens)}


def evaluate_all(program: Program, state: TrainState, batches: Callable[[], Iterator[Any]], bytes_per_token: float) -> dict[str, float]:
    """{"val_loss": nats per token on the validation split, ...}: cross entropy; per byte where tokens are not bytes; of the average too."""
    out = {}
    for name, params in (("val_loss", state.params), ("val_loss_ema", state.extra.get("ema", ()))):
        if not pytree.leaves(params):
            continue
        total, count = 0.0, 0
        for batch in batches():
            loss = program.eval_step(params, batch)
            total += float(loss.extra.get("cross_entropy", loss.total))
            count += int(loss.num_tokens)
        out[name] = total / max(count, 1)
        if bytes_per_token != 1.0:
            out[f"{name}_per_byte"] = out[name] / bytes_per_token
    return {name: value for name, value in out.items() if math.isfinite(value)}


# -- the corpus


def find_corpus(config: Data, folder: Path, say: Say) -> Path:
    """The prepared corpus of a run: `config.path` itself, or made from it: the standard library's in the user's cache, a text's in
    `folder`/data.
    """
    path = Path(config.path)
    if config.path != "stdlib" and (path / "meta.json").is_file():
        meta = read_meta(path)
        if config.tokenizer not in ("bytes", meta["tokenizer"]):
            raise ValueError(f"data.tokenizer is {config.tokenizer!r} and {path} was prepared with {meta['tokenizer']!r}; leave it out")
        return path
    if config.path != "stdlib":
        say(f"preparing {path} ({config.tokenizer}) in {folder / runs.DATA}")
        say(data.describe(data.prepare(path, folder / runs.DATA, tokenizer=config.tokenizer)))
        return folder / runs.DATA
    # The library's path too: builds of one version may come with and without its tests.
    said = (VERSION, platform.python_version(), sysconfig.get_path("stdlib"), config.tokenizer, fzero.__version__)
    name = "stdlib-" + hashlib.sha256(repr(said).encode()).hexdigest()[:16]
    target = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fzero" / name
    if not target.is_dir():
        say(f"preparing Python's standard library as text ({config.tokenizer}), once, in {target}")
        try:
            say(data.describe(data.prepare("stdlib", target, tokenizer=config.tokenizer)))
        except (OSError, ValueError):
            if not target.is_dir():  # else another run has made it meanwhile
                raise
    return target


def digest(corpus: Path) -> str:
    """A SHA-256 that says whether a corpus is the same one: of meta.json, which holds that of the text."""
    read_meta(corpus)
    return hashlib.sha256((corpus / "meta.json").read_bytes()).hexdigest()


def open_data(config: RunConfig, corpus: Path) -> tuple[data.TokenStream, Callable[[], Iterator[Any]]]:
    """(the stream of training batches, a function that gives the validation batches); ValueError where a split is too short."""
    t, length = config.train, config.data.seq_len
    stream = data.TokenStream(data.open_tokens(corpus, "train"), length, t.batch, t.seed)
    split = data.open_tokens(corpus, "val")
    windows = t.eval_batches * t.micro_batch or None
    data.eval_batches(split, length, t.micro_batch, windows)
    # In batches of a micro-batch: the shapes that the training has, so that nothing is compiled again.
    return stream, lambda: (without_documents(config, batch) for batch in data.eval_batches(split, length, t.micro_batch, windows))


def without_documents(config: RunConfig, batch: data.stream.Batch) -> data.stream.Batch:
    """The batch, without document numbers where tokens attend across documents."""
    return batch if config.data.within_documents else {name: leaf for name, leaf in batch.items() if name != "documents"}


def mean_bytes(corpus: Path) -> float:
    """The mean number of UTF-8 bytes of a token of the corpus; 1 for the byte tokenizer."""
    meta = read_meta(corpus)
    if meta["tokenizer"] == "bytes":
        return 1.0
    counts = [split["tokens"] - split["documents"] for split in meta["splits"].values()]
    return meta["source"]["text_bytes"] / max(1, sum(counts))


# -- signals, rows, text


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list in which Ctrl-C and SIGTERM put their numbers; the second Ctrl-C is a KeyboardInterrupt again."""
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def recorder(folder: Path, first: int, until: int, every: int, options: Options) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that takes a step's row to metrics.jsonl, to the terminal, and to TensorBoard where that package is there."""
    with ExitStack() as stack:
        file = stack.enter_context((folder / runs.METRICS).open("a", encoding="utf-8"))
        bar = board = None
        if options.bar:
            from tqdm import tqdm

            bar = stack.enter_context(tqdm(total=until, initial=first, unit="step", dynamic_ncols=True))
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            board = stack.enter_context(SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1))
        recent: list[float] = []
        val = ""

        def record(row: dict[str, Any]) -> None:
            nonlocal val
            file.write(json.dumps(row) + "\n")
            file.flush()
            for name, value in row.items() if board else ():
                if name != "step" and value is not None:
                    board.add_scalar(name, value, row["step"])
            recent[:] = [*recent[-19:], row["step_s"]]
            loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
            val = f"  val {row['val_loss']:.4f}" if "val_loss" in row else val
            speed = f"{row['tokens_per_s']:,.0f} tokens/s  MFU {100 * row['mfu']:.0f}%"
            if bar is not None:
                bar.set_postfix_str(f"loss {loss}{val}  {speed}", refresh=False)
                bar.update()
            elif row["step"] % every == 0 or row["step"] in (first + 1, until) or "val_loss" in row:
                left = clock((until - row["step"]) * sum(recent) / len(recent))
                options.say(f"step {row['step']}/{until}  loss {loss}{val}  {speed}  ETA {left}{'  SKIPPED' if row['skipped'] else ''}")

        yield record


def sample_text(program: Program, state: TrainState, folder: Path, prompt: str, n: int = 300) -> str:
    """A text that the trained model (its average, where there is one) writes behind `prompt`."""
    tokenizer = runs.read_tokenizer(folder)
    tokens = torch.from_numpy(tokenizer.encode(prompt).astype("int64"))[None]
    n = min(n, program.model.config.max_len - tokens.shape[1])
    params = best_params(program, state)
    key = random.key(program.config.train.seed)
    out = generate(program.model, params, tokens, n, key, temperature=0.7, vocab_size=tokenizer.vocab_size, eos=tokenizer.eos)
    return tokenizer.decode(out[0].tolist())


def best_params(program: Program, state: TrainState) -> Any:
    """The weights to write text with, in the dtype of the parameters."""
    ema = state.extra.get("ema")
    return state.params if ema is None else pytree.map(lambda leaf: leaf.to(program.policy.param), ema)


def per_byte(row: dict[str, Any]) -> str:
    """The part of the summary that speaks of bytes."""
    return f" ({row['val_loss_per_byte']:.4f} per byte)" if "val_loss_per_byte" in row else ""


def clock(seconds: float) -> str:
    """A duration in words: 0:42, 12:05, 3:00:00."""
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes}:{s:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"
