"""The frozen reference of a run that learns from pairs: the model that the run starts from. What it says of the pairs
is computed once and kept beside them, so that no second model is in memory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fzero.comm.axes import BY_DATA_RANK
from fzero.comm.rank_tables import device_of, gather_rows
from fzero.data import open_tokens
from fzero.data.preferences import read_reference, reference_folder, write_reference
from fzero.data.token_stream import RowStream
from fzero.data.tokens import SPLITS
from fzero.models.lora import LORA
from fzero.models.preference import answer_model
from fzero.run.build import Job, specs_of
from fzero.run.corpus import Say, prefetch_to_device
from fzero.run.ranks.coordinator import Coordinator
from fzero.sharding.redistribute import digests
from fzero.train.eval import make_eval_step
from fzero.train.execution import Execution
from fzero.train.state import TrainState


def with_reference(
    job: Job, state: TrainState, corpus: Path, coordinator: Coordinator, say: Say, *, fresh: bool
) -> Job:
    """The job whose config names its reference, `state` before the first step, or the one that the config has already;
    what it says of the corpus is then beside it.

    fresh: whether the model's adapters were drawn for this run: they add nothing yet, so that the reference is the same
    whatever the seed. All ranks call it. Communicates: the passes of an evaluation, and 8 bytes an answer. Raises
    ValueError if the config's reference is not beside the corpus.
    """
    digest = digest_of(job, state, fresh=fresh)
    reference = job.config.dpo.reference
    if reference and reference != digest:
        coordinator.share(lambda: len(read_reference(corpus, "train", reference)))
        say(f"the reference {reference} is another model than the one that the run starts from ({digest})")
        return job
    if coordinator.share(lambda: reference_folder(corpus, digest).is_dir()):
        say(f"the reference {digest} has read these pairs before: {reference_folder(corpus, digest)}")
    else:
        say(f"the reference {digest} reads the pairs, once")
        scores = {split: log_probs(job, state, corpus, split) for split in SPLITS}
        coordinator.share(lambda: write_reference(corpus, digest, scores))
    return job._replace(config=replace(job.config, dpo=replace(job.config.dpo, reference=digest)))


def digest_of(job: Job, state: TrainState, *, fresh: bool) -> str:
    """16 hexadecimal digits: of the parameters and of the dtype that they compute in."""
    named = digests(state.params, specs_of(job).params, job.mesh)
    leaves = {name: value for name, value in named.items() if not (fresh and re.search(LORA, name))}
    text = repr((sorted(leaves.items()), str(job.policy.compute)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def log_probs(job: Job, state: TrainState, corpus: Path, split: str) -> np.ndarray:
    """The log-probability of each answer of a split, float64 [documents]; the same on all ranks.

    The data ranks compute a share of the rows each. Communicates: what the model does, and a row of sums a batch over
    dp and rp.
    """
    config, mesh, tokens = job.config, job.mesh, open_tokens(corpus, split)
    t = config.train
    stream = RowStream(tokens, config.data.seq_len, t.micro_batch)
    execution = Execution("none", bool(t.compiled), t.kernels, config.prefetch)
    step = make_eval_step(answer_model(job.model), job.plan, execution=execution, reduce=False)

    def batches() -> Iterator[Any]:
        return stream.eval_batches(None, (mesh.data_rank, mesh.data_size))

    sums = [step(state.params, batch).extra["log_probs"].cpu() for batch in prefetch_to_device(batches(), job.device)]
    with mesh.ledger.phase("evaluate"):
        table = gather_rows(torch.stack(sums).to(device_of(mesh)), mesh, leaf="log_probs", axes=BY_DATA_RANK)
    # Batch k of rank r is batch k n + r of all.
    by_row = table.transpose(0, 1).reshape(-1, table.shape[-1]).cpu().numpy()
    out = np.zeros(len(tokens.docs) - 1)
    for number, row in enumerate(stream.rows):
        out[row] = by_row[number, : len(row)]
    return out
