"""Batches of documents of like length, by data.packing=buckets, and the learning rate by their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fzero import data
from fzero.comm.ledger import CP
from fzero.core import gpu_copies, pytree
from fzero.data.tokens import Tokens
from fzero.optim.schedules import LR_SCALE
from fzero.run.config.unused_keys import SEND_SIGNS

RunConfig = Any  # fzero.run.config.run_config.RunConfig, whose module imports this one by its checks

BUCKETS = "buckets"  # the value of data.packing
SCALINGS: dict[str, Callable[[float], float]] = {"none": lambda x: 1.0, "linear": lambda x: x, "sqrt": lambda x: x**0.5}
SIZES = ("sequences", "tokens")
DIVISORS = (8, 4, 2, 1)  # of data.seq_len: the lengths of rows where none are given


def lengths_of(c: RunConfig) -> tuple[int, ...]:
    """The lengths of the rows of a run in buckets; raises ValueError for a text that has none.

    >>> from fzero.run.config.config_table import from_table
    >>> lengths_of(from_table({"data": {"packing": "buckets", "seq_len": 256}}))
    (32, 64, 128, 256)
    """
    d = c.data
    if not d.bucket_lengths:
        return tuple(d.seq_len // item for item in DIVISORS if d.seq_len % item == 0)
    parts = d.bucket_lengths.split(",")
    if not all(item.isascii() and item.isdecimal() for item in parts):
        raise ValueError(f"data.bucket_lengths is {d.bucket_lengths!r}; it is lengths of rows, such as 64,128,256")
    try:
        data.expect_lengths([int(item) for item in parts], d.seq_len)
    except ValueError as error:
        raise ValueError(f"data.bucket_lengths, up to data.seq_len: {error}") from None
    return tuple(map(int, parts))


def validate_buckets(c: RunConfig) -> None:
    """Raise ValueError for rows in buckets with what they exclude, or their values alone."""
    d, o = c.data, c.optim
    if d.packing != BUCKETS:
        for key, value, default in (
            ("data.bucket_lengths", d.bucket_lengths, ""),
            ("optim.lr_scaling", o.lr_scaling, "none"),
            ("optim.lr_scaling_by", o.lr_scaling_by, "sequences"),
        ):
            if value != default:
                raise ValueError(
                    f"{key} is {value!r} and data.packing is {d.packing}, whose batches are all of one size; use "
                    "data.packing=buckets, or leave it out"
                )
        return
    split = "sequence" if c.sequence else f"mesh.cp={c.mesh[CP]}" if c.mesh.get(CP, 1) > 1 else ""
    table = (
        (not c.task.of_tokens, f"objective is {c.objective}: buckets are of text and of chat"),
        (bool(d.mixture), "data.mixture is given: a step reads one length of one corpus"),
        (bool(d.curriculum), f"data.curriculum is {d.curriculum}: the order of an epoch is by lengths"),
        (bool(d.seq_len_warmup), f"data.seq_len_warmup is {d.seq_len_warmup}: rows have lengths of their own"),
        (bool(c.train.batch_ramp), f"train.batch_ramp is {c.train.batch_ramp}: all batches have as many positions"),
        (bool(c.stages), "the run has stages: an epoch of buckets has one length and batch; start a new run"),
        (bool(split), f"{split}: sequences are split over ranks"),
        (bool(c.local.method), f"local.method is {c.local.method}: members train apart"),
        (c.train.update == "delayed", "train.update is delayed"),
        (
            o.lr_scaling != "none" and o.name in SEND_SIGNS,
            f"optim.lr_scaling is {o.lr_scaling} and optim.name {o.name}, which keeps its rate through its warm-up",
        ),
        (
            o.lr_scaling == "none" and o.lr_scaling_by != "sequences",
            f"optim.lr_scaling_by is {o.lr_scaling_by} and optim.lr_scaling none",
        ),
    )
    for wrong, reason in table:
        if wrong:
            raise ValueError(f"data.packing is buckets and {reason}; leave one of them out")
    lengths_of(c)


def described(c: RunConfig, tokens: Tokens) -> Iterator[str]:
    """The lines that say how a run reads the documents of a corpus in buckets."""
    stream = data.BucketStream(tokens, lengths_of(c), c.train.batch)
    counts = ", ".join(f"{n:,} of {length}" for n, length in zip(stream.batches, stream.lengths))
    yield f"packing buckets: {counts} tokens a row, batches an epoch; {stream.filled:.2%} of their positions filled up"
    if c.optim.lr_scaling != "none":
        unit = "sequences" if c.optim.lr_scaling_by == "sequences" else "tokens"
        yield f"learning rate: times the {c.optim.lr_scaling} scale of a batch by its {unit}"


def lr_scale(c: RunConfig, size: data.Size) -> float:
    """The factor of the learning rate of a batch: 1 for train.batch sequences.

    >>> from fzero.run.config.config_table import from_table
    >>> corpus, optim = {"packing": "buckets", "seq_len": 256}, {"lr_scaling": "sqrt"}
    >>> config = from_table({"data": corpus, "optim": optim, "train": {"batch": 16}})
    >>> lr_scale(config, data.Size(sequences=64, tokens=4000))
    2.0
    """
    t, unit = c.train, c.optim.lr_scaling_by
    ratio = size.sequences / t.batch if unit == "sequences" else size.tokens / (t.batch * c.data.seq_len)
    return SCALINGS[c.optim.lr_scaling](ratio)


def with_scale(c: RunConfig, stream: Any, sample: int) -> dict[str, Tensor]:
    """{entry of the batch by which `BucketStep` scales its learning rate}; {} if that does not depend on the batch."""
    if c.optim.lr_scaling == "none":
        return {}
    assert isinstance(stream, data.BucketStream)  # by the checks of the config
    return {LR_SCALE: torch.tensor(lr_scale(c, stream.size_at(sample)), dtype=torch.float64)}


class BucketStep:
    """A train step on batches of rows of any length, made at the rate that its `lr_scale` says."""

    # The factor is in the state (see `optim.with_lr_scale`), and set there in place, where graphs of steps have it.
    def __init__(self, step: Callable[[Any, Any], tuple[Any, Any]], samples: int, ranks: int) -> None:
        self.inner_step, self.samples, self.ranks = step, samples, ranks  # of data

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        scale, rows = batch.get(LR_SCALE), {name: leaf for name, leaf in batch.items() if name != LR_SCALE}
        # The step counts the rows of all ranks, and commits what it counts to a disk.
        extra_samples = self.samples - self.ranks * pytree.leaves(rows)[0].shape[0]
        if scale is not None:
            gpu_copies.await_readers(state.step.device)  # a checkpoint may still copy it
            scale_in(state).copy_(scale)
        new, metrics = self.inner_step(state._replace(data_cursor=state.data_cursor + extra_samples), rows)
        if scale is None:
            return new, metrics
        return new, metrics._replace(extra={**metrics.extra, LR_SCALE: scale})

    @property
    def news(self) -> list[str]:
        """As of the step: see `pop_news`."""
        return getattr(self.inner_step, "news", [])


def scale_in(state: Any) -> Tensor:
    """The factor of the learning rate in the state of a run."""
    named = pytree.named_leaves(state.opt_state)
    return next(leaf for name, leaf in named.items() if name.split("/")[-1] == LR_SCALE)
