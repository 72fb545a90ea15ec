"""Batches of a loader of one's own go on where a state is: fzero/data/batches.py."""

import itertools
import warnings

import pytest
import ranks
import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from fzero import checkpoint, data
from fzero.sharding import Spec

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


def test_a_loader_that_counts_epochs_by_itself_is_refused():
    class Counting:
        def __init__(self, loader):
            self.loader, self.sampler, self.count = loader, loader.sampler, 0

        def __iter__(self):
            self.sampler.set_epoch(self.count)
            self.count += 1
            return iter(self.loader)

    assert taken(data.from_loader(Counting(shuffled())), 9) == taken(data.from_loader(shuffled()), 9)
    with pytest.raises(ValueError, match="a Counting set its sampler to epoch 1 and this is epoch 2: it counts epochs"):
        next(data.from_loader(Counting(shuffled()), 24))


# ---- loaders with a state of their own ----


class Counted:
    """A loader of uneven batches whose state is a number; it is as those of others: a state is taken up by the next
    pass, which may be empty, and no later one."""

    def __init__(self):
        self.given, self.epoch, self.begin = 0, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = self.begin = state["given"]

    def __iter__(self):
        self.given, self.begin = self.begin, 0
        for n in SIZES[self.given :]:
            self.given += 1
            yield {"x": torch.arange(n) + 100 * self.epoch + 10 * self.given}


def stateful_loader(samples=12, **options):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    options = {"batch_size": 4, "sampler": Shuffled()} | options
    with warnings.catch_warnings():  # torchdata 0.11 asks torch 2.13 for what is deprecated there
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return torchdata.StatefulDataLoader(torch.arange(samples), **options)


def streamed_loader():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(13))}).to_iterable_dataset(num_shards=3)
    return rows.shuffle(seed=5, buffer_size=1).with_format("torch").batch(4, drop_last_batch=True)


STATEFUL = {"own": Counted, "torchdata": stateful_loader, "datasets": streamed_loader}


@pytest.mark.parametrize("kind", ["own", "torchdata", pytest.param("datasets", marks=pytest.mark.slow)])
def test_killed_after_any_batch_and_resumed_by_its_state_each_sample_is_given_once(kind, tmp_path):
    """Every number of batches before the kill, in three epochs, through a checkpoint."""
    make, count = STATEFUL[kind], 9
    whole = taken(data.from_loader(make()), count)
    assert len({str(batch) for batch in whole}) > count // 3  # epochs are in other orders, or of other samples
    for killed in range(count):
        batches = data.from_loader(make())
        assert taken(batches, killed) == whole[:killed]
        saved = checkpoint.save(tmp_path, {}, step=killed, extras={"loader": batches.state_dict()})
        cursor = sum(len(batch[0]) for batch in whole[:killed])
        again = data.from_loader(make(), cursor, saved=checkpoint.read_extra(saved, "loader"))
        assert again.state_dict()["samples"] == cursor
        assert taken(again, count - killed) == whole[killed:]


def test_a_state_of_another_place_or_mesh_is_refused():
    batches = data.from_loader(Counted(), ranks=2)
    next(batches)
    saved = batches.state_dict()
    assert saved == {"loader": {"given": 1}, "epoch": 0, "batches": 1, "samples": 2, "ranks": 2}
    for cursor, count, given, said in (
        (4, 1, saved, "the loader's state is of 2 ranks with rows of their own and ranks=1; resume on as many"),
        (8, 2, saved, "the loader's state is after sample 4 and cursor=8; give the two of one checkpoint"),
        (3, 2, saved, "cursor=3: it counts the samples of all 2 ranks"),
        (4, 2, {"given": 1}, r"saved is \['given'\]; give what state_dict\(\)"),
        (4, 0, saved, "ranks is 0"),
    ):
        with pytest.raises(ValueError, match=said):
            data.from_loader(Counted(), cursor, ranks=count, saved=given)
    with pytest.raises(ValueError, match=r"a list has no state_dict, load_state_dict; write from_loader"):
        data.from_loader([torch.ones(2)], 2, saved=saved)
    with pytest.raises(ValueError, match="a DataLoader has no state_dict"):
        data.from_loader(shuffled()).state_dict()


def rows_of_ranks(mesh, killed, folder):
    """(the samples that this rank is given by a loader of its own rows: whole, and resumed after `killed` batches)"""

    def make():
        own = DistributedSampler(range(24), num_replicas=mesh.data_size, rank=mesh.data_rank, seed=3)
        return stateful_loader(24, batch_size=3, sampler=own)

    ranks_ = mesh.data_size
    whole = taken(data.from_loader(make(), ranks=ranks_), 7)
    batches = data.from_loader(make(), ranks=ranks_)
    taken(batches, killed)
    path = checkpoint.save(
        folder, {"w": torch.ones(2)}, step=killed, specs={"w": Spec()}, mesh=mesh, extras={"l": batches.state_dict()}
    )
    by_state = data.from_loader(make(), 6 * killed, ranks=ranks_, saved=checkpoint.read_extra(path, "l", mesh))
    by_count = data.from_loader(make(), 6 * killed, ranks=ranks_)
    return whole, whole[:killed] + taken(by_state, 7 - killed), whole[:killed] + taken(by_count, 7 - killed)


@pytest.mark.slow
def test_each_rank_resumes_with_its_own_rows(tmp_path):
    pytest.importorskip("torchdata")
    for killed in (3, 4, 5):  # an epoch has four batches a rank
        results = ranks.run(2, rows_of_ranks, killed, tmp_path)
        for whole, by_state, by_count in results:
            assert by_state == whole and by_count == whole
        epoch = [number for whole, *_ in results for batch in whole[:4] for number in batch[0]]
        assert sorted(epoch) == list(range(24))
