"""Batches of a loader of your own, from where a state is."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.config_tables import AtLeastOne

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
