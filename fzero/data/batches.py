"""Batches of a loader of your own, from where a state is.

Transforms of the rows of a batch: pure functions of a batch and a key for each row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fzero.core import prng, pytree
from fzero.core.arguments import WrongKind, checked
from fzero.core.config_tables import AtLeastOne
from fzero.data.packing import Batch

SHORTEST = 6  # tokens of a document's part that is rearranged: three that are added, one for each part


class Sentinels(NamedTuple):
    """The ids of the tokens that begin the parts of a rearranged text."""

    prefix: int
    middle: int
    suffix: int


@checked("sentinels")
def fill_in_middle(
    batch: Batch, first: int, seed: int, *, sentinels: Sentinels, rate: float = 0.5, spm: float = 0.5
) -> Batch:
    """Return the batch with documents rearranged so that a model learns to fill in a middle.

    batch: of a TokenStream or MixedStream, tokens, targets, documents, mask [B, T]. first: the number of its first
    sample in the run; the row of sample n is changed by (seed, n) alone, whatever the batches. A part of a document in
    a row (of at least 6 tokens) is changed with probability `rate`: it is cut in two places, and becomes

        prefix-token PREFIX suffix-token SUFFIX middle-token MIDDLE    or, with probability `spm` of these,
        prefix-token suffix-token SUFFIX middle-token PREFIX MIDDLE

    of the same length, as the suffix loses its last three tokens. The end-of-document token of a document that ends in
    the row stays at its end. Of one that goes on, the target after the middle does not count: it follows the suffix.

    Raises ValueError for rates outside of 0 to 1 and a batch without documents.

    >>> tokens = torch.arange(10, 22)[None]
    >>> batch = {"tokens": tokens, "targets": tokens + 1, "documents": tokens * 0, "mask": tokens > 0}
    >>> fill_in_middle(batch, 0, 2, sentinels=Sentinels(1, 2, 3), rate=1.0, spm=0.0)["tokens"].tolist()
    [[1, 10, 3, 17, 18, 2, 11, 12, 13, 14, 15, 16]]

    Ref: Bavarian et al. 2022, "Efficient training of language models to fill in the middle", arXiv:2207.14255, section
    3; SPM in its second form, section 3.1.
    """
    expect_rates("fill_in_middle", batch, rate=rate, spm=spm)
    if len(sentinels) != 3:
        raise WrongKind(f"fill_in_middle: sentinels is {sentinels}; it must be Sentinels(prefix, middle, suffix)")
    tokens, targets, mask = (batch[name].clone() for name in ("tokens", "targets", "mask"))
    root = prng.fold_in(prng.key(seed), "fill in the middle")
    for row, begin, end, is_final, (chosen, form, draw_a, draw_b) in document_spans(batch, first, root, 4):
        text = tokens[row, begin:end]
        if chosen >= rate or len(text) < SHORTEST:
            continue
        low, high = sorted(min(int(u * (len(text) - 2)), len(text) - 3) for u in (draw_a, draw_b))
        replace_span(tokens, targets, mask, row, begin, rearrange(text, low, high, sentinels, form < spm), is_final)
    return {**batch, "tokens": tokens, "targets": targets, "mask": mask}


def rearrange(text: Tensor, low: int, high: int, sentinels: Sentinels, spm: bool) -> Tensor:
    """The text [n] cut before `low` and before `high` <= n - 3, its parts rearranged, [n]."""
    prefix, middle, suffix = text[:low], text[low:high], text[high:-3]
    begin = [text.new_tensor([token]) for token in sentinels]
    if spm:
        return torch.cat([begin[0], begin[2], suffix, begin[1], prefix, middle])
    return torch.cat([begin[0], prefix, begin[2], suffix, begin[1], middle])


@checked("sentinels")
def corrupt_spans(
    batch: Batch,
    first: int,
    seed: int,
    *,
    sentinels: Sequence[int],
    rate: float = 0.5,
    density: float = 0.15,
    span: float = 3.0,
) -> Batch:
    """Return the batch with documents whose spans were taken out, so that a causal model learns to say them.

    batch, first: as of `fill_in_middle`. sentinels: the ids of the tokens that stand for the spans, in their order, at
    least 2; a document has at most one span fewer than there are. A part of a document in a row is changed with
    probability `rate`: spans of `span` tokens in the mean, `density` of its tokens together, are drawn, and it becomes

        TEXT s0 TEXT s1 ... TEXT s(n-1)   s0 SPAN s1 SPAN ... s(n-1) SPAN sn

    of the same length, as it loses its last 2 n + 1 tokens. Of it the targets from the second s0 on count. The
    end-of-document token of a document that ends in the row stays at its end, and counts.

    Raises ValueError for rates outside of 0 to 1, a span below 1, too few sentinels and a batch without documents.

    >>> tokens = torch.arange(10, 30)[None]
    >>> batch = {"tokens": tokens, "targets": tokens + 1, "documents": tokens * 0, "mask": tokens > 0}
    >>> corrupt_spans(batch, 0, 0, sentinels=[1, 2, 3], rate=1.0, density=0.3)["tokens"].tolist()
    [[10, 11, 12, 1, 15, 16, 17, 18, 19, 20, 21, 22, 2, 1, 13, 14, 2, 23, 24, 3]]

    Ref: Raffel et al. 2020, "Exploring the limits of transfer learning with a unified text-to-text transformer",
    arXiv:1910.10683, section 3.1.4; inputs, then targets in one sequence: Tay et al. 2023, "UL2", arXiv:2205.05131,
    section 3.
    """
    expect_rates("corrupt_spans", batch, rate=rate, density=density)
    if span < 1 or len(sentinels) < 2:
        raise ValueError(f"corrupt_spans: span is {span}, with {len(sentinels)} sentinels; wanted 1 or more, and 2")
    tokens, targets, mask = (batch[name].clone() for name in ("tokens", "targets", "mask"))
    root = prng.fold_in(prng.key(seed), "corrupt spans")
    places = prng.fold_in(root, "where the spans are")
    for row, begin, end, is_final, (chosen,) in document_spans(batch, first, root, 1):
        text = tokens[row, begin:end]
        count = min(max(1, round(len(text) * density / span)), len(sentinels) - 1)
        text_size = len(text) - 2 * count - 1
        if chosen >= rate or text_size < 2 * count:
            continue
        span_size = min(max(count, round(text_size * density)), text_size - count)
        draws = prng.uniform(prng.fold_in(prng.fold_in(places, first + row), begin), (text_size,)).numpy()
        text_lengths = lengths_of(text_size - span_size, count, draws[span_size:])
        span_lengths = lengths_of(span_size, count, draws[:span_size])
        new, inputs = separate_spans(text, text_lengths, span_lengths, sentinels)
        replace_span(tokens, targets, mask, row, begin, new, is_final)
        mask[row, begin : begin + inputs - 1] = False
    return {**batch, "tokens": tokens, "targets": targets, "mask": mask}


@checked()
def weigh_targets(batch: Batch, weights: Tensor) -> Batch:
    """Return the batch whose mask, float32 [B, T], has the weight of each target by its token, 0 where the mask of
    `batch` is False: by which a model multiplies the target's loss, and whose sum it divides by.

    weights: [V], 0 or more, one for each id. Raises ValueError for a weight that is below 0 or not finite, and for a
    target that has none.

    >>> tokens = torch.tensor([[0, 1, 2, 1]])
    >>> batch = {"tokens": tokens, "targets": tokens, "mask": tokens < 2}
    >>> weigh_targets(batch, torch.tensor([1.0, 0.25, 3.0]))["mask"]
    tensor([[1.0000, 0.2500, 0.0000, 0.2500]])
    """
    if weights.dim() != 1 or not bool(((weights >= 0) & weights.isfinite()).all()):
        raise ValueError("weigh_targets: weights must be a vector of finite numbers, 0 or more, one for each token")
    targets = batch["targets"]
    if int(targets.max()) >= len(weights):
        raise ValueError(f"weigh_targets: a target is {int(targets.max())}, and there are {len(weights)} weights")
    target_weights = weights.to(torch.float32)[targets.clamp(min=0)]
    return {**batch, "mask": torch.where(batch["mask"], target_weights, 0.0)}


def expect_rates(function: str, batch: Batch, **rates: float) -> None:
    """Raise ValueError for a rate outside of 0 to 1, and a batch without documents."""
    for name, value in rates.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{function}: {name} is {value}; it must be from 0 to 1")
    if "documents" not in batch:
        raise ValueError(f"{function}: the batch has no 'documents'; give that of a TokenStream")


def document_spans(
    batch: Batch, first: int, root: Tensor, draws: int
) -> Iterator[tuple[int, int, int, bool, list[float]]]:
    """Yield (row, begin, end, whether it ends there, numbers drawn for it) of the parts of documents with targets."""
    for row in range(len(batch["tokens"])):
        bounds = torch.where(batch["documents"][row].diff() != 0)[0] + 1
        begins = [0, *bounds.tolist(), batch["tokens"].shape[1]]
        row_draws = prng.uniform(prng.fold_in(root, first + row), (len(begins) - 1, draws)).tolist()
        for begin, end, span_draws in zip(begins, begins[1:], row_draws):
            if not bool(batch["mask"][row, begin:end].any()):
                continue
            # Where the next document begins in the row, or the target after the row does not count, this one ends.
            is_final = not bool(batch["mask"][row, end - 1])
            yield row, begin, end - is_final, is_final, span_draws


def replace_span(
    tokens: Tensor, targets: Tensor, mask: Tensor, row: int, begin: int, new: Tensor, is_final: bool
) -> None:
    """Put `new` in place of a part of a row; without `is_final` the target after it counts no longer."""
    end = begin + len(new)
    tokens[row, begin:end] = new
    targets[row, begin : end - 1] = new[1:]
    if not is_final:
        mask[row, end - 1] = False


def lengths_of(total: int, count: int, draws: np.ndarray) -> list[int]:
    """`count` lengths of at least 1 that are `total` together, each such list equally likely by `draws`."""
    cuts = sorted((np.argsort(draws[: total - 1], kind="stable")[: count - 1] + 1).tolist())
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, total])]


def separate_spans(
    text: Tensor, text_lengths: list[int], span_lengths: list[int], sentinels: Sequence[int]
) -> tuple[Tensor, int]:
    """(the text [n] with its spans taken out, and then these, [n]; the length of the first part)."""
    inputs, spans, offset = [], [], 0
    for stays, goes, sentinel in zip(text_lengths, span_lengths, sentinels):
        mark = text.new_tensor([sentinel])
        inputs += [text[offset : offset + stays], mark]
        spans += [mark, text[offset + stays : offset + stays + goes]]
        offset += stays + goes
    last_mark = text.new_tensor([sentinels[len(span_lengths)]])
    return torch.cat([*inputs, *spans, last_mark]), sum(text_lengths) + len(text_lengths)


STATE = ("loader", "epoch", "batches", "samples", "ranks")  # the entries of a `Batches.state_dict`


@checked(ranks="ranks is {}; it must be a whole number of at least 1")
def from_loader(
    loader: Iterable[Any],
    cursor: int | Tensor = 0,
    *,
    ranks: AtLeastOne = 1,
    saved: Mapping[str, Any] | None = None,
) -> LoaderBatches:
    """The batches of `loader`, epoch after epoch without end, from sample `cursor` on.

    loader: a `torch.utils.data.DataLoader`, or anything that can be iterated again and gives trees of tensors whose
    first dimension counts samples. Before each epoch its sampler, its dataset and itself have `set_epoch` called with
    the number of the epoch, where there is one. cursor: samples consumed, such as `state.data_cursor`. ranks: the data
    ranks whose loaders give rows of their own, `mesh.data_size`; 1 where the loader of every rank gives the global
    batch, of which `local_batch` takes the rank's rows.

    The loader is brought there in one of two ways. Without `saved` batches are passed over: whole epochs before the
    cursor are counted, and not read again, so the order of an epoch must depend on its number alone. With `saved`, what
    `state_dict()` of the batches returned after that sample, by the loader's own state: no sample is read again. The
    loader then has `state_dict` and `load_state_dict`: torchdata's StatefulDataLoader, an IterableDataset of Hugging
    Face's datasets, or yours. Save it as one of the `extras` of a checkpoint.

    Raises ValueError for a negative cursor, one inside a batch, a loader that is empty or can be read only once, and a
    state of another sample or number of ranks.

    >>> import torch
    >>> batches = from_loader(torch.utils.data.DataLoader(torch.arange(6), batch_size=2), cursor=8)
    >>> [next(batches).tolist() for _ in range(3)]
    [[2, 3], [4, 5], [0, 1]]
    """
    cursor = int(cursor)
    if cursor < 0:
        raise ValueError(f"cursor={cursor}: it counts the samples consumed; give 0 or more")
    if cursor % ranks:
        raise ValueError(f"cursor={cursor}: it counts the samples of all {ranks} ranks, and they do not divide it")
    if isinstance(loader, Iterator):
        raise ValueError(
            f"loader is a {type(loader).__name__}, which can be read once; give a DataLoader or a list of batches"
        )
    if saved is not None:
        expect_stateful(loader)
        expect_saved(saved, cursor, ranks)
    return LoaderBatches(loader, cursor // ranks, ranks, saved)


class LoaderBatches:
    """The batches that `from_loader` returns: an iterator without end."""

    def __init__(self, loader: Any, samples: int, ranks: int, saved: Mapping[str, Any] | None) -> None:
        self.loader, self.samples, self.ranks = loader, samples, ranks
        self.epoch, self.batches = (0, 0) if saved is None else (saved["epoch"], saved["batches"])
        set_epoch(loader, self.epoch)
        if saved is not None:
            loader.load_state_dict(copy.deepcopy(saved["loader"]))
        self._batches = self._epochs(samples if saved is None else 0, saved is not None)

    def __iter__(self) -> LoaderBatches:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was given, for `saved` of from_loader.

        Raises ValueError for a loader that has no state of its own.

        >>> batches = from_loader([])
        >>> batches.state_dict()
        Traceback (most recent call last):
        ValueError: a list has no state_dict, ...
        """
        expect_stateful(self.loader)
        loader_state = copy.deepcopy(self.loader.state_dict())
        return {
            "loader": loader_state,
            "epoch": self.epoch,
            "batches": self.batches,  # of this epoch
            "samples": self.samples,
            "ranks": self.ranks,
        }

    def _epochs(self, skip: int, resumed: bool) -> Iterator[Any]:
        # left: samples to pass over. resumed: the first epoch may be over.
        while True:
            epoch_samples = 0
            for batch in self.loader:
                rows = rows_of(batch)
                if not epoch_samples:
                    expect_epoch(self.loader, self.epoch)
                    if resumed and self.batches == length_of(self.loader):
                        raise ValueError(
                            f"a {type(self.loader).__name__} begins its epoch again where its state is the end of it, "
                            "so that samples would come twice; resume by counting: from_loader without saved"
                        )
                epoch_samples += rows
                self.batches += 1
                if skip >= rows:
                    skip -= rows
                elif skip:
                    raise ValueError(
                        f"the cursor lies {skip} samples inside a batch of {rows}; a loader resumes between batches: "
                        "give the batch size of the run that made the cursor"
                    )
                else:
                    self.samples += rows
                    yield batch
            if not epoch_samples and not resumed:
                raise ValueError("loader gives no batch; an epoch needs at least one")
            passed = skip // epoch_samples if epoch_samples else 0
            skip -= passed * epoch_samples
            self.epoch += 1 + passed
            self.batches, resumed = 0, False
            set_epoch(self.loader, self.epoch)


def expect_stateful(loader: Any) -> None:
    """Raise ValueError for a loader without a state of its own."""
    if not hasattr(loader, "state_dict") or not hasattr(loader, "load_state_dict"):
        raise ValueError(
            f"a {type(loader).__name__} has no state_dict, load_state_dict; write from_loader(loader, "
            "state.data_cursor), or give a loader that has them, such as torchdata's StatefulDataLoader"
        )


def expect_saved(saved: Any, cursor: int, ranks: int) -> None:
    """Raise ValueError unless `saved` is the state of batches after sample `cursor`."""
    if not isinstance(saved, Mapping) or sorted(saved) != sorted(STATE):
        raise ValueError(
            f"saved is {sorted(saved) if isinstance(saved, Mapping) else f'a {type(saved).__name__}'}; give what "
            "state_dict() of from_loader's batches returned"
        )
    if saved["ranks"] != ranks:
        raise ValueError(
            f"the loader's state is of {saved['ranks']} ranks with rows of their own and ranks={ranks}; resume on as "
            "many, or give every rank a loader of the global batches and take its rows with local_batch"
        )
    if saved["samples"] * ranks != cursor:
        raise ValueError(
            f"the loader's state is after sample {saved['samples'] * ranks} and cursor={cursor}; give the two of one "
            "checkpoint"
        )


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader, its sampler and its dataset the number of an epoch, where they take it."""
    for owner in (getattr(loader, "sampler", None), getattr(loader, "dataset", None), loader):
        if (setter := getattr(owner, "set_epoch", None)) is not None:
            setter(epoch)


def length_of(loader: Any) -> int | None:
    """The batches of an epoch, where a loader knows them."""
    try:
        return len(loader)
    except TypeError:
        return None


def expect_epoch(loader: Any, epoch: int) -> None:
    """Raise ValueError if a loader that has begun an epoch has set its sampler to another one."""
    sampler: Any = getattr(loader, "sampler", None)
    if hasattr(sampler, "set_epoch") and getattr(sampler, "epoch", epoch) != epoch:
        raise ValueError(
            f"a {type(loader).__name__} set its sampler to epoch {sampler.epoch} and this is epoch {epoch}: it counts "
            "epochs itself, from where this process began; give from_loader the DataLoader without it"
        )


def rows_of(batch: Any) -> int:
    """The samples of a batch; raises ValueError for tensors that do not agree in them."""
    sizes = {len(x) for x in pytree.leaves(batch) if isinstance(x, Tensor) and x.dim()}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(
            f"a batch of the loader has leaves of {sorted(sizes)} rows; all tensors must count the same samples first"
        )
    return sizes.pop()
