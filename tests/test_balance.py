"""Which blocks the ranks of cp have: every token once, work counted exactly, and balanced where the others are not."""

import numpy as np
import pytest
import torch

from fzero.kernels import FULL, Pattern, Positions, pairs_by_query
from fzero.sharding import Context, balanced, blocks_of, context, in_blocks

contiguous, zigzag = (Context("gather", pieces).pieces_for for pieces in ("contiguous", "zigzag"))


TOKENS = 65536
PATTERNS = (
    *(FULL, Pattern("window", 9), Pattern("local", 8), Pattern("strided", 7), Pattern("fixed", 8, 3)),
    Pattern("bigbird", 4, global_count=1, near=2, random=3, seed=1),  # some of whose random blocks are the same
    Pattern("bigbird", 7, global_count=0, near=1, random=1),
    Pattern("bigbird", 1, global_count=2, near=1, random=4),
    Pattern("bigbird", 50, global_count=2, near=2, random=1),
)


def documents_of(lengths):
    return np.repeat(np.arange(len(lengths)), lengths)[:TOKENS]


DISTRIBUTIONS = {
    "one document": documents_of([TOKENS]),
    "lognormal": documents_of(np.exp(np.random.default_rng(0).normal(np.log(1000), 1.5, 4000)).astype(int) + 1),
    "one long, then short": documents_of([TOKENS // 2, *[256] * (TOKENS // 512)]),
    "equal short": documents_of([512] * (TOKENS // 512)),
}


def shares(documents, ranks):
    """max / mean of the ranks' work: contiguous, zigzag, balanced."""
    work = pairs_by_query(FULL, documents[None])[0]
    ways = [(contiguous(ranks), ranks), (zigzag(ranks), 2 * ranks)]
    found = [context.imbalance(in_blocks(work, count), pieces) for pieces, count in ways]
    blocks = in_blocks(work, blocks_of(TOKENS, ranks))
    return [*found, context.imbalance(blocks, balanced(blocks, ranks))]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_balanced_work_is_within_one_percent_of_the_mean(name):
    for ranks in (2, 4, 8):
        even, mirrored, chosen = shares(DISTRIBUTIONS[name], ranks)
        assert chosen <= 1.01, (name, ranks)
        assert chosen <= min(even, mirrored) + 1e-9


def test_the_others_are_not():
    """At cp=8, and with one document zigzag is."""
    found = {name: [round(x, 2) for x in shares(documents, 8)[:2]] for name, documents in DISTRIBUTIONS.items()}
    assert found == {
        "one document": [1.87, 1.0],
        "lognormal": [1.93, 1.54],
        "one long, then short": [3.47, 1.87],
        "equal short": [1.0, 1.0],
    }


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_work_is_the_number_of_pairs_that_the_mask_has(pattern):
    """Also of documents that come again later in the row."""
    rng = np.random.default_rng(1)
    rows = [np.repeat(rng.integers(0, 4, 30), rng.integers(1, 6, 30))[:60] for _ in range(5)]
    documents = np.stack([np.zeros(60, int), *rows])
    line = torch.arange(60)
    mask = Positions(line, line, *(torch.from_numpy(documents),) * 2).mask(pattern)
    assert (pairs_by_query(pattern, documents) == mask.sum(-1).numpy()).all()
    for start, queries, end in ((0, 60, 60), (13, 20, 25), (30, 10, 7)):
        assert pattern.pairs(start, queries, end) == int(mask[0, start : start + queries, :end].sum())


def test_no_token_is_lost_or_counted_twice():
    rng = np.random.default_rng(2)
    for _ in range(50):
        ranks, own = int(rng.integers(1, 9)), int(rng.integers(1, 9))
        tokens = ranks * own * int(rng.integers(1, 4))
        work = rng.integers(0, 50, ranks * own).tolist()
        pieces = balanced(work, ranks)
        assert {len(each) for each in pieces.blocks} == {own} and all(list(b) == sorted(b) for b in pieces.blocks)
        held = torch.cat([pieces.positions(rank, tokens) for rank in range(ranks)])
        assert held.sort().values.tolist() == list(range(tokens))
        assert pieces == balanced(work, ranks)  # the same on every rank


def test_blocks_that_cannot_be_dealt_are_refused():
    with pytest.raises(ValueError, match="there are 3 blocks, which cp=2 does not divide"):
        balanced([1, 2, 3], 2)
    assert [blocks_of(tokens, 4) // 4 for tokens in (4, 8, 4 * 17, 4 * 34, 4096)] == [1, 2, 1, 2, 16]
