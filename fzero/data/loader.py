"""Batches of a loader of your own, from where a state is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked


@checked()
def from_loader(loader: Iterable[Any], cursor: int | Tensor = 0) -> Iterator[Any]:
    """The batches of `loader`, epoch after epoch without end, from sample `cursor` on.

    loader: a `torch.utils.data.DataLoader`, or anything that can be iterated again and gives trees of tensors whose
    first dimension counts samples. The order of an epoch must depend on its number alone: before each one, the loader's
    sampler (or the loader) has its `set_epoch` called with the number, if there is one. cursor: samples consumed, such
    as `state.data_cursor`; whole epochs before it are counted, and not read again.

    Raises ValueError for a negative cursor, one inside a batch, and a loader that is empty or can be read only once.

    >>> import torch
    >>> batches = from_loader(torch.utils.data.DataLoader(torch.arange(6), batch_size=2), cursor=8)
    >>> [next(batches).tolist() for _ in range(3)]
    [[2, 3], [4, 5], [0, 1]]
    """
    cursor = int(cursor)
    if cursor < 0:
        raise ValueError(f"cursor={cursor}: it counts the samples consumed; give 0 or more")
    if isinstance(loader, Iterator):
        raise ValueError(
            f"loader is a {type(loader).__name__}, which can be read once; give a DataLoader or a list of batches"
        )
    return _epochs(loader, cursor)


def _epochs(loader: Iterable[Any], left: int) -> Iterator[Any]:
    # left: samples to pass over
    epoch = 0
    while True:
        _set_epoch(loader, epoch)
        seen = 0
        for batch in loader:
            rows = _rows(batch)
            seen += rows
            if left >= rows:
                left -= rows
            elif left:
                raise ValueError(
                    f"the cursor lies {left} samples inside a batch of {rows}; a loader resumes between batches: "
                    "give the batch size of the run that made the cursor"
                )
            else:
                yield batch
        if not seen:
            raise ValueError("loader gives no batch; an epoch needs at least one")
        epoch += 1 + left // seen
        left %= seen


def _set_epoch(loader: Iterable[Any], epoch: int) -> None:
    for owner in (getattr(loader, "sampler", None), loader):
        if (set_epoch := getattr(owner, "set_epoch", None)) is not None:
            set_epoch(epoch)
            return


def _rows(batch: Any) -> int:
    sizes = {len(x) for x in pytree.leaves(batch) if isinstance(x, Tensor) and x.dim()}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(
            f"a batch of the loader has leaves of {sorted(sizes)} rows; all tensors must count the same samples first"
        )
    return sizes.pop()
