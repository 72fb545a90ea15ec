"""The loss of a run's model on each row of a corpus, as an analysis of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fzero import data
from fzero.core import pytree
from fzero.data.packing import Batch
from fzero.data.tokens import read_meta
from fzero.models import Model
from fzero.models.batch import KINDS, SOURCES
from fzero.run import run_folder, weights
from fzero.run.corpus import on_device
from fzero.sharding import one_process, zero_plan
from fzero.train.eval import make_eval_step

TOKENS_AT_ONCE = 1 << 13


def analyze_by_model(
    corpus: Path, run: Path, *, seq_len: int, packing: str, name: str, device: torch.device
) -> tuple[np.ndarray, list[str]]:
    """(the mean loss in nats of each row's tokens that count, float32 [S], under the newest weights of `run`, in
    float32; lines about checkpoints that were passed over as damaged). It is written beside the corpus, as
    `data.analyze` does.

    Raises ValueError as `data.analyze`, for a run of another tokenizer or objective, and rows longer than the model
    takes.
    """
    trained = weights.load(run)
    c = trained.config
    if not c.task.of_tokens:
        raise ValueError(f"{run}: its objective is {c.objective}, whose loss is not of tokens; use a run on text")
    if seq_len > c.model.max_len:
        raise ValueError(f"--seq-len is {seq_len} and the model of {run} takes {c.model.max_len} (model.max_len)")
    expect_same_tokenizer(corpus, run)
    params = pytree.map(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, trained.params)
    within = c.data.within_documents
    measure = row_loss_of(trained.model, weights.move_params(device, params), device, within_documents=within)
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
    """The function from a batch to the mean loss of each row, float64 [n]; 0 for a row without a token that counts."""
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
