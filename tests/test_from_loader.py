"""Batches of a loader of one's own go on where a state is: fzero/data/loader.py."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from fzero import data

SIZES = (2, 4, 2)  # samples of each batch of an epoch


class Shuffled(Sampler):
    """Another order in each epoch, by its number."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self):
        return 12


def uneven():
    return [{"x": torch.arange(n), "y": torch.ones(n, 3)} for n in SIZES]


def shuffled():
    return DataLoader(torch.arange(12), batch_size=4, sampler=Shuffled())


def leaves(batch):
    return batch.values() if isinstance(batch, dict) else [batch]


def taken(batches, count):
    return [
        [leaf.tolist() for leaf in (b.values() if isinstance(b, dict) else [b])]
        for b in itertools.islice(batches, count)
    ]


@pytest.mark.parametrize("make", [uneven, shuffled])
@pytest.mark.parametrize("consumed", range(11))
def test_a_loader_resumes_after_any_batch_as_if_it_had_not_stopped(make, consumed):
    whole = taken(data.from_loader(make()), 14)
    samples = sum(len(batch[0]) for batch in whole[:consumed])
    assert taken(data.from_loader(make(), torch.tensor(samples)), 14 - consumed) == whole[consumed:]


def test_whole_epochs_before_the_cursor_are_read_once():
    reads = []

    class Loader:
        def __iter__(self):
            reads.append("epoch")
            return iter([torch.zeros(4)] * 3)

    next(data.from_loader(Loader(), 12 * 10**6 + 4))
    assert len(reads) == 2  # the epoch that is counted, the epoch of the cursor


@pytest.mark.parametrize(
    ("loader", "cursor", "said"),
    [
        (uneven(), -1, "cursor=-1"),
        (uneven(), 3, "1 samples inside a batch of 4"),
        (iter(uneven()), 0, "read once"),
        ([], 0, "no batch"),
        ([{"x": torch.ones(2), "y": torch.ones(3)}], 0, r"\[2, 3\] rows"),
        ([torch.ones(0)], 0, r"\[0\] rows"),
        (["text"], 0, r"\[\] rows"),
    ],
)
def test_what_cannot_be_resumed_is_refused(loader, cursor, said):
    with pytest.raises(ValueError, match=said):
        next(data.from_loader(loader, cursor))
