"""The curriculum of a run: which rows it reads at which step, and in pieces of which length.

Batches of documents of like length, by data.packing=buckets, and the learning rate by their sizes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fzero import data, models
from fzero.comm.axes import CP
from fzero.core import gpu_copies, pytree
from fzero.core.storage import is_url
from fzero.data.packing import Batch
from fzero.data.tokens import Tokens
from fzero.optim.schedules import LR_SCALE
from fzero.run.config.stages import Ramp, stages_of
from fzero.run.config.unused_keys import SEND_SIGNS

RunConfig = Any  # fzero.run.config.run_config.RunConfig, whose module imports this one

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


def expect_buckets(c: RunConfig) -> None:
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


def describe_buckets(c: RunConfig, tokens: Tokens) -> Iterator[str]:
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


GAMMA = 0.001  # of progressive layer dropping, DeepSpeed's
MAX_SIZES = 64  # numbers of tokens that random-LTD keeps on its way, each with a program of its own
KEYS = {"curriculum_schedule": "linear", "curriculum_start": 0.1, "curriculum_steps": 0, "curriculum_tokens": 0}


def expect_curriculum(c: RunConfig) -> None:
    """Raise ValueError for a curriculum without its length or with what it excludes, and for its values alone."""
    d = c.data
    if d.seq_len_warmup:
        expect_warmup(c)
    if not d.curriculum:
        for key, value in KEYS.items():
            if getattr(d, key) != value:
                raise ValueError(f"data.{key} is {getattr(d, key)} and data.curriculum is ''; name an analysis")
        return
    if bool(d.curriculum_steps) == bool(d.curriculum_tokens):
        raise ValueError(
            f"data.curriculum_steps is {d.curriculum_steps} and data.curriculum_tokens {d.curriculum_tokens}; give one "
            "of them, after which all rows are allowed"
        )
    if c.task.examples or d.mixture:
        reason = f"data.mixture is {d.mixture}" if d.mixture else f"objective is {c.objective}"
        raise ValueError(f"data.curriculum is {d.curriculum} and {reason}: it orders the rows of one corpus of text")
    if c.stages:
        raise ValueError(
            f"data.curriculum is {d.curriculum} and the run has stages, whose rows are what others left; start a new "
            "run (--init) with the other length, or leave the curriculum out"
        )
    split_name(d.curriculum)
    growth_of(c)


def expect_warmup(c: RunConfig) -> None:
    """Raise ValueError for a warm-up of lengths that is none, or whose pieces would see each other."""
    text = c.data.seq_len_warmup
    ramp = Ramp.parse(text, "data.seq_len_warmup")
    if ramp.start >= c.data.seq_len:
        raise ValueError(f"data.seq_len_warmup is {text}, which begins with data.seq_len={c.data.seq_len} or above")
    if not c.data.within_documents or c.task.examples:
        reason = f"objective is {c.objective}" if c.task.examples else "data.within_documents is false"
        raise ValueError(f"data.seq_len_warmup is {text} and {reason}: its pieces do not see each other")


def expect_random_ltd(c: RunConfig) -> None:
    """Raise ValueError for random-LTD with what it excludes, or another ramp."""
    t, seq_len = c.train, c.data.seq_len
    if not t.random_ltd and not t.random_ltd_ramp:
        return
    text, max_tokens = t.random_ltd_ramp, t.random_ltd or seq_len
    if max_tokens > seq_len:
        raise ValueError(f"train.random_ltd is {max_tokens} and data.seq_len {seq_len}; keep at most all tokens")
    if text:
        ramp = Ramp.parse(text, "train.random_ltd_ramp")
        if (
            ramp.start > max_tokens
            or (max_tokens - ramp.start) % ramp.increment
            or max_tokens - ramp.start > MAX_SIZES * ramp.increment
        ):
            raise ValueError(
                f"train.random_ltd_ramp is {text}, whose steps of {ramp.increment} do not lead from {ramp.start} to "
                f"{max_tokens} tokens (train.random_ltd, or all) in at most {MAX_SIZES}; make them fit"
            )
    try:
        models.dropping.expect_droppable(c.model)
    except ValueError as error:
        raise ValueError(f"train.random_ltd is {max_tokens} of {seq_len} tokens; {error}") from None
    split = "sequence" if c.sequence else f"mesh.cp={c.mesh[CP]}" if c.mesh.get(CP, 1) > 1 else ""
    if split or c.task.examples:
        reason = f"{split}: ranks have not the tokens of one another" if split else f"objective is {c.objective}"
        raise ValueError(f"train.random_ltd is {max_tokens} of {seq_len} tokens and {reason}; leave one of them out")


def expect_layer_drop(c: RunConfig) -> None:
    """Raise ValueError for progressive layer dropping with what it excludes."""
    t = c.train
    if t.layer_drop_theta == 1:
        if t.layer_drop_gamma != GAMMA:
            raise ValueError(
                f"train.layer_drop_gamma is {t.layer_drop_gamma} and train.layer_drop_theta is 1: no layer is dropped; "
                "give a theta, such as 0.5"
            )
        return
    try:
        models.dropping.expect_layers_apart(c.model)
    except ValueError as error:
        raise ValueError(f"train.layer_drop_theta is {t.layer_drop_theta}; {error}") from None
    table = (
        (t.random_ltd or t.random_ltd_ramp, f"train.random_ltd is {t.random_ltd}, which drops in layers too"),
        (t.capture != "off", f"train.capture is {t.capture}: a graph has all layers"),
        (t.update == "delayed", "train.update is delayed: its updates are several a step"),
    )
    for wrong, reason in table:
        if wrong:
            raise ValueError(f"train.layer_drop_theta is {t.layer_drop_theta} and {reason}; leave one of them out")


def split_name(text: str) -> tuple[str, str]:
    """(the name, the digest or "") of data.curriculum; raises ValueError for a text that has no such form.

    >>> split_name("rarity@0123456789abcdef")
    ('rarity', '0123456789abcdef')
    """
    match = re.fullmatch(r"([^@/]+)(?:@([0-9a-f]{16}))?", text)
    if match is None:
        raise ValueError(f"data.curriculum is {text!r}; it is the name of an analysis, such as rarity")
    return match[1], match[2] or ""


def growth_of(c: RunConfig) -> data.Growth:
    """How the part of the rows that is allowed grows."""
    d = c.data
    try:
        return data.Growth(
            d.curriculum_schedule, Fraction(str(d.curriculum_start)), d.curriculum_steps or d.curriculum_tokens
        )
    except ValueError as error:
        raise ValueError(f"data.{error}") from None


def pieces_of(c: RunConfig, by_tokens: bool) -> tuple[data.Piece, ...]:
    """The samples of a run's steps with their progress, in steps or in tokens of the run."""
    pieces, first, tokens = list[data.Piece](), 0, 0
    for stage in stages_of(c):
        of_step = stage.batch * stage.written.data.seq_len
        pieces.append(data.Piece(first, tokens if by_tokens else stage.begin, stage.batch, of_step if by_tokens else 1))
        first, tokens = first + stage.samples, tokens + stage.tokens
    return tuple(pieces)


def curriculum_of(c: RunConfig, corpus: Path) -> data.Curriculum | None:
    """The curriculum of a run's rows, None for none; raises ValueError if its analysis is not the run's."""
    d = c.data
    if not d.curriculum:
        return None
    name, digest = split_name(d.curriculum)
    analysis = data.curriculum.open_analysis(corpus, name, d.seq_len, d.packing)
    if digest and analysis.digest != digest:
        raise ValueError(
            f"data.curriculum is {d.curriculum} and the analysis {name} beside {corpus} is {analysis.digest} by now; "
            "put the other one back, or start a new run"
        )
    return data.Curriculum.by_values(analysis.values, growth_of(c), pieces_of(c, by_tokens=bool(d.curriculum_tokens)))


def with_digest(c: RunConfig, corpus: Path) -> RunConfig:
    """The config with the digest of its curriculum's analysis, if it has a curriculum and no digest yet."""
    name, digest = split_name(c.data.curriculum) if c.data.curriculum else ("", "-")
    if digest:
        return c
    if c.data.path != "stdlib" and Path(c.data.path) != corpus:
        command = "link" if is_url(c.data.path) else "prepare"
        raise ValueError(
            f"data.curriculum is {name} and data.path {c.data.path} is no corpus in a folder, beside which an analysis "
            f"is; make one first: fzero data {command} {c.data.path} --out corpus"
        )
    analysis = data.curriculum.open_analysis(corpus, name, c.data.seq_len, c.data.packing)
    return replace(c, data=replace(c.data, curriculum=f"{name}@{analysis.digest}"))


def describe_curriculum(c: RunConfig) -> Iterator[str]:
    """The lines that say which rows a run reads at first, and in pieces of which length."""
    d = c.data
    if d.curriculum:
        length = f"{d.curriculum_steps:,} steps" if d.curriculum_steps else f"{d.curriculum_tokens:,} tokens"
        yield f"curriculum {d.curriculum}: {d.curriculum_start:.3g} of the rows at first, all after {length}"
    if c.train.layer_drop_theta < 1:
        t, layers = c.train, c.model.n_layers
        keep_rate = 1 - (layers - 1) / layers * (1 - t.layer_drop_theta)
        last_steps = f"of the last steps the last layer is in {keep_rate:.0%}"
        yield f"layers are dropped: {last_steps} (theta={t.layer_drop_theta:g})"
    if d.seq_len_warmup:
        ramp = Ramp.parse(d.seq_len_warmup, "data.seq_len_warmup")
        yield f"rows in pieces of {ramp.start} tokens at first, {ramp.increment} more each {ramp.tokens:,} tokens"


def make_pieces(c: RunConfig) -> Callable[[Batch, int], Batch]:
    """The function from (a batch, its first sample) to the batch in pieces of its step's length."""
    if not c.data.seq_len_warmup:
        return lambda batch, sample: batch
    ramp, seq_len = Ramp.parse(c.data.seq_len_warmup, "data.seq_len_warmup"), c.data.seq_len
    firsts, begins, batches, step_sizes = np.array(pieces_of(c, by_tokens=True), np.int64).T

    @functools.lru_cache(maxsize=1)
    def length_of(sample: int) -> int:
        index = int(np.searchsorted(firsts, sample, side="right")) - 1
        tokens = begins[index] + (sample - firsts[index]) // batches[index] * step_sizes[index]
        return min(seq_len, ramp.start + int(tokens) // ramp.tokens * ramp.increment)

    return lambda batch, sample: cut_rows(batch, length_of(sample))


def cut_rows(batch: Batch, length: int) -> Batch:
    """The batch whose rows are cut into documents of at most `length` tokens, one every `length` tokens.

    >>> cut_rows({"documents": torch.tensor([[0, 0, 0, 1, 1]])}, 2)["documents"].tolist()
    [[0, 0, 1, 2, 3]]
    """
    documents = batch["documents"]
    if length >= documents.shape[1]:
        return batch
    begins = (torch.arange(documents.shape[1]) % length == 0).expand(documents.shape).clone()
    begins[:, 1:] |= documents[:, 1:] != documents[:, :-1]
    begins[:, 0] = False
    return {**batch, "documents": begins.cumsum(1, dtype=documents.dtype)}
