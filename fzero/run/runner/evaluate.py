"""What a state gives without training: its validation loss and that of its average, and the loss of each row of a
corpus.

And the frozen reference of a run that learns from pairs: what it says of them is computed once and kept beside them, so
that no second model is in memory.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fzero import data, models, sharding
from fzero.comm.axes import AXES
from fzero.comm.rank_tables import device_of, gather_rows
from fzero.core import pytree
from fzero.core.copy_buckets import read_scalars
from fzero.data import open_tokens
from fzero.data.packing import Batch
from fzero.data.token_stream import RowStream
from fzero.data.tokens import SPLITS, read_meta
from fzero.models import Model
from fzero.models.batch import KINDS, SOURCES
from fzero.models.configs import LORA
from fzero.optim import AverageState
from fzero.run import setup
from fzero.run.measure.metrics_rows import losses_by_source
from fzero.run.runner.saver import to_memory
from fzero.run.setup import run_folder
from fzero.run.setup.build import Job, specs_of
from fzero.run.setup.coordinator import Coordinator, Say
from fzero.run.setup.corpus import on_device, prefetch_to_device
from fzero.sharding import one_process, zero_plan
from fzero.train.execution import Execution
from fzero.train.gradient import make_eval_step
from fzero.train.state import TrainState
from fzero.train.update.in_memory import spread


def with_reference(
    job: Job, state: TrainState, corpus: Path, coordinator: Coordinator, say: Say, *, fresh: bool
) -> Job:
    """The job whose config names its reference, with its log-probabilities beside the corpus; all ranks call it."""
    digest = digest_of(job, state, fresh=fresh)
    reference = job.config.dpo.reference
    if reference and reference != digest:
        coordinator.share(lambda: len(data.read_reference(corpus, "train", reference)))
        say(f"the reference {reference} is another model than the one that the run starts from ({digest})")
        return job
    if coordinator.share(lambda: data.reference_folder(corpus, digest).is_dir()):
        say(f"the reference {digest} has read these pairs before: {data.reference_folder(corpus, digest)}")
    else:
        say(f"the reference {digest} reads the pairs, once")
        scores = {split: log_probs(job, state, corpus, split) for split in SPLITS}
        coordinator.share(lambda: data.write_reference(corpus, digest, scores))
    return job._replace(config=replace(job.config, dpo=replace(job.config.dpo, reference=digest)))


def digest_of(job: Job, state: TrainState, *, fresh: bool) -> str:
    """16 hexadecimal digits: of the parameters and of the dtype that they compute in."""
    named = sharding.digests(state.params, specs_of(job).params, job.mesh)
    leaves = {name: value for name, value in named.items() if not (fresh and re.search(LORA, name))}
    text = repr((sorted(leaves.items()), str(job.policy.compute)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def log_probs(job: Job, state: TrainState, corpus: Path, split: str) -> np.ndarray:
    """The log-probability of each answer of a split, float64 [documents]; the same on all ranks."""
    config, mesh, tokens = job.config, job.mesh, open_tokens(corpus, split)
    t = config.train
    stream = RowStream(tokens, config.data.seq_len, t.micro_batch)
    execution = Execution("none", bool(t.compiled), t.kernels, config.prefetch)
    step = make_eval_step(models.answer_model(job.model), job.plan, execution=execution, reduce=False)

    def batches() -> Iterator[Any]:
        return stream.eval_batches(None, (mesh.data_rank, mesh.data_size))

    sums = [step(state.params, batch).extra["log_probs"].cpu() for batch in prefetch_to_device(batches(), job.device)]
    with mesh.ledger.phase("evaluate"):
        table = gather_rows(torch.stack(sums).to(device_of(mesh)), mesh, leaf="log_probs", axes=AXES.by_data_rank)
    # Batch k of rank r is batch k n + r of all.
    by_row = table.transpose(0, 1).reshape(-1, table.shape[-1]).cpu().numpy()
    out = np.zeros(len(tokens.docs) - 1)
    for number, row in enumerate(stream.rows):
        out[row] = by_row[number, : len(row)]
    return out


TOKENS_AT_ONCE = 1 << 13  # of a pass without gradients


def analyze_by_model(
    corpus: Path, run: Path, *, seq_len: int, packing: str, name: str, device: torch.device
) -> tuple[np.ndarray, list[str]]:
    """(the mean loss in nats of each row under the newest weights of `run`, lines about damaged checkpoints)."""
    trained = setup.weights.load(run)
    c = trained.config
    if not c.task.of_tokens:
        raise ValueError(f"{run}: its objective is {c.objective}, whose loss is not of tokens; use a run on text")
    if seq_len > c.model.max_len:
        raise ValueError(f"--seq-len is {seq_len} and the model of {run} takes {c.model.max_len} (model.max_len)")
    expect_same_tokenizer(corpus, run)
    params = pytree.map(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, trained.params)
    within = c.data.within_documents
    measure = row_loss_of(trained.model, setup.weights.move_params(device, params), device, within_documents=within)
    values = data.analyze(
        corpus,
        "loss",
        seq_len=seq_len,
        packing=packing,
        name=name,
        measure=measure,
        origin=f"{run.absolute()} after step {trained.step}",
        rows_at_once=max(1, TOKENS_AT_ONCE // seq_len),
    )
    return values, trained.warnings


def expect_same_tokenizer(corpus: Path, run: Path) -> None:
    """Raise ValueError if the tokens of a corpus are not those of a run's model."""
    meta, run_tokenizer = read_meta(corpus), run_folder.read_tokenizer(run)
    corpus_tokenizer = data.load_tokenizer(corpus)
    corpus_traits, run_traits = ((x.vocab_size, x.eos, x.json) for x in (corpus_tokenizer, run_tokenizer))
    if corpus_traits != run_traits:
        raise ValueError(
            f"{corpus}: has tokens of another tokenizer ({meta['tokenizer']}) than {run} ({run_tokenizer.name}); use a "
            "run on these tokens"
        )


def row_loss_of(
    model: Model, params: pytree.Tree, device: torch.device, *, within_documents: bool = True
) -> Callable[[Batch], np.ndarray]:
    """The function from a batch to the mean loss of each row, float64 [n]."""
    step = make_eval_step(model, zero_plan(0, model, one_process()), reduce=False)

    def measure(batch: Batch) -> np.ndarray:
        rows = batch["tokens"].shape[0]
        if not within_documents:
            batch = {key: leaf for key, leaf in batch.items() if key != "documents"}
        # Each row is a source of its own, of which the model reports the sums.
        extra = step(params, on_device({**batch, SOURCES: torch.eye(rows, dtype=torch.bool)}, device)).extra
        loss, tokens = (torch.stack([extra[f"{kind}/{i}"] for i in range(rows)]).cpu() for kind in KINDS)
        return (loss / tokens.clamp(min=1)).numpy()

    return measure


def evaluate_all(
    job: Job, state: TrainState, batches: Callable[[], Iterator[Any]], bytes_per_token: float
) -> dict[str, Any]:
    """{"val_loss": nats per token on the validation split, ...}, and what else the config asks for."""
    out, mesh, placed = {}, job.mesh, job.config.train.loss_by_position
    for name, params in (("val_loss", state.params), ("val_loss_ema", average_params(job, state))):
        if not pytree.leaves(params):
            continue
        sums, extras = [], {}
        for batch in prefetch_to_device(batches(), job.device):
            loss = job.eval_step(params, batch)
            extras = loss.extra
            if not (placed or job.config.task.reports):
                extras = {key: value for key, value in extras.items() if key.partition("/")[0] in KINDS}
            of_tokens = (loss.extra.get("cross_entropy", loss.total), loss.num_tokens)
            sums += [x.double() for x in (*of_tokens, *extras.values())]
        with mesh.ledger.phase("evaluate"):
            rows = torch.tensor(read_scalars(sums), dtype=torch.float64, device=device_of(mesh))
            table = gather_rows(rows.reshape(-1, 2 + len(extras)), mesh, leaf="sums", axes=AXES.by_data_rank)
        total, count, *extra_sums = (sum(column) for column in table.transpose(0, 1).flatten(0, 1).T.tolist())
        out[name] = total / max(count, 1)
        reported: dict[str, float] = dict(zip(extras, extra_sums))
        out |= losses_by_source(job.config, reported, name)
        if placed:
            out[f"{name}_by_position"] = means_by_position(reported)
        else:
            out |= {name.replace("loss", key): value / max(count, 1) for key, value in reported.items()}
        if bytes_per_token != 1.0:
            out[f"{name}_per_byte"] = out[name] / bytes_per_token
    return {name: value for name, value in out.items() if isinstance(value, dict) or math.isfinite(value)}


def means_by_position(sums: dict[str, float]) -> dict[str, float]:
    """{end of a range of positions: mean loss in it} of the sums that `models.by_position` reports.

    >>> means_by_position({"loss/1": 6.0, "tokens/1": 2.0, "loss/2": 0.0, "tokens/2": 0.0})
    {'1': 3.0}
    """
    ends = [name.removeprefix("tokens/") for name, count in sums.items() if name.startswith("tokens/") and count]
    means = {end: sums[f"loss/{end}"] / sums[f"tokens/{end}"] for end in ends}
    return {end: mean for end, mean in means.items() if math.isfinite(mean)}


def average_params(job: Job, state: TrainState) -> Any:
    """The average of the weights in the layout of the parameters at rest, () if there is none."""
    ema = state.opt_state.average if isinstance(state.opt_state, AverageState) else ()
    if not pytree.leaves(ema) or not job.plan.split_leaves:
        return ema
    average = pytree.map(lambda leaf: torch.empty(leaf.shape, dtype=job.policy.state, device=leaf.device), state.params)
    spread(job.plan, to_memory(ema), average)
    return average
