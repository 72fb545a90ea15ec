"""The validation loss of a state, of its parameters and of their average."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fzero.comm.axes import BY_DATA_RANK
from fzero.comm.rank_tables import device_of, gather_rows
from fzero.core import pytree
from fzero.core.copy_buckets import read_scalars
from fzero.models.batch import KINDS
from fzero.optim import AverageState
from fzero.run.build import Job
from fzero.run.corpus import prefetch_to_device
from fzero.run.measure.metrics_rows import losses_by_source
from fzero.run.resume.newest_state import to_memory
from fzero.train.state import TrainState
from fzero.train.update.in_memory import spread


def evaluate_all(
    job: Job, state: TrainState, batches: Callable[[], Iterator[Any]], bytes_per_token: float
) -> dict[str, Any]:
    """{"val_loss": nats per token on the validation split, ...}: cross entropy; also per byte unless tokens are
    bytes, and of the average. Of an objective that
    reports more also the means of that, such as val_accuracy; with train.loss_by_position val_loss_by_position, the
    means of ranges of positions by their ends; of a mixture val_loss_by_source.

    The data ranks evaluate a share of the batches each; their sums are added in the order of the batches, as on one
    process. Communicates: what the model does, and two float64 per batch over dp and rp.
    """
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
            table = gather_rows(rows.reshape(-1, 2 + len(extras)), mesh, leaf="sums", axes=BY_DATA_RANK)
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
    """{end of a range of positions: mean loss in it} of the sums that `models.by_position` reports; without ranges in
    which no token counts.

    >>> means_by_position({"loss/1": 6.0, "tokens/1": 2.0, "loss/2": 0.0, "tokens/2": 0.0})
    {'1': 3.0}
    """
    ends = [name.removeprefix("tokens/") for name, count in sums.items() if name.startswith("tokens/") and count]
    means = {end: sums[f"loss/{end}"] / sums[f"tokens/{end}"] for end in ends}
    return {end: mean for end, mean in means.items() if math.isfinite(mean)}


def average_params(job: Job, state: TrainState) -> Any:
    """The average of the weights in the layout of the parameters at rest, () if there is none.

    Communicates: if the optimizer's state is sharded and the parameters are not, an all_gather over dp of each leaf.
    """
    ema = state.opt_state.average if isinstance(state.opt_state, AverageState) else ()
    if not pytree.leaves(ema) or not job.plan.split_leaves:
        return ema
    average = pytree.map(lambda leaf: torch.empty(leaf.shape, dtype=job.policy.state, device=leaf.device), state.params)
    spread(job.plan, to_memory(ema), average)
    return average
