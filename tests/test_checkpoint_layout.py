"""Where the elements of a leaf lie in a checkpoint (fzero/checkpoint/layout.py): each once, for every mesh, in chunks
that slices need."""

import itertools
import json
import math
import random

import numpy as np
import pytest
import torch

from fzero.checkpoint import layout as layouts
from fzero.checkpoint.layout import (
    CRC,
    MIN_CHUNK_BYTES,
    TARGET,
    ChunkLayout,
    array_json,
    chunk_shape,
    grid_positions,
    plan_tiles,
    slabs,
    smallest_factor,
)
from fzero.checkpoint.reader import overlapping_tiles
from fzero.core import PAGE
from fzero.sharding import Spec, fake_mesh, parts_as_chunks, slices

MESHES = [
    {},
    {"dp": 2},
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"dp": 2, "rp": 2},
    {"dp": 3, "tp": 2},
    {"dp": 2, "rp": 2, "tp": 2},
    {"tp": 4},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


@pytest.fixture
def fine(monkeypatch):
    """Chunks of some bytes, so that leaves of some hundred elements have many."""
    for name, value in {"TARGET": 64, "MIN_CHUNK_BYTES": 16, "RUN": 8, "SHARE": 32}.items():
        monkeypatch.setattr(layouts, name, value)


def case(seed):
    """(mesh sizes, shape of the whole leaf, dtype, spec) drawn from a seed; shapes have ones, zeros, primes and powers
    of two."""
    draw = random.Random(seed)
    sizes, dims = draw.choice(MESHES), draw.randint(0, 4)
    axes = [axis for axis in sizes if draw.random() < 0.7] if dims else []
    draw.shuffle(axes)
    spec: list[list[str]] = [[] for _ in range(dims)]
    for axis in axes:
        spec[draw.randrange(dims)].append(axis)
    shape = [draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 12]) * math.prod(sizes[axis] for axis in named) for named in spec]
    if dims and draw.random() < 0.05:
        shape[draw.randrange(dims)] = 0
    parts = ()
    if ["tp"] in spec and draw.random() < 0.5:  # tp does not divide the dim
        shape[dim := spec.index(["tp"])] += draw.randint(1, sizes["tp"] - 1)
        while not (parts := parts_as_chunks(shape[dim], sizes["tp"]))[-1]:
            shape[dim] += 1
    parts = parts if len(set(parts)) > 1 else ()
    return sizes, tuple(shape), draw.choice(DTYPES), Spec(tuple(tuple(named) for named in spec), parts=parts)


def laid_out(sizes, shape, dtype, spec, number=0, **options):
    """(the layout, the parts of each rank), after it was seen that all ranks have the same layout and only parts of
    their shards."""
    mine, world = [], math.prod(sizes.values())
    for rank in range(world):
        mesh = fake_mesh(sizes, rank)
        start, size = slices.local_slice(shape, spec, mesh)
        mine.append(plan_tiles(size, dtype, spec, mesh, number, **options))
        assert mine[-1].start == start
        for part in mine[-1].tiles:
            first = [p * n for p, n in zip(part, mine[-1].layout.tile)]
            last = [min(f + n, whole) for f, n, whole in zip(first, mine[-1].layout.tile, shape)]
            assert all(s <= f < end <= s + k for s, k, f, end in zip(start, size, first, last))
    assert len({m.layout for m in mine}) == 1 and mine[0].layout.shape == shape
    return mine[0].layout, [m.tiles for m in mine]


def box_of(layout, part, place):
    """Where in the leaf the chunk at `place` of a part is."""
    return tuple(slice(p * n + k * c, p * n + k * c + c) for p, n, k, c in zip(part, layout.tile, place, layout.chunk))


@pytest.mark.parametrize("seed", range(8))
def test_every_element_is_in_one_chunk_of_one_part_of_one_rank(fine, seed):
    several, shared, uneven = 0, 0, 0
    for i in range(60):
        sizes, shape, dtype, spec = case(f"{seed}/{i}")
        layout, by_rank = laid_out(sizes, shape, dtype, spec, number=i)
        parts = [part for mine in by_rank for part in mine]
        assert sorted(parts) == layout.tiles() and len(parts) == len(set(parts)), (sizes, shape, spec)
        assert [layout.number(part) for part in layout.tiles()] == list(range(len(parts)))
        seen = np.zeros(shape, int)
        for part in parts:
            chunk = 0
            for slab in slabs(layout, random.Random(i).choice([1, 3, 7, 100]) * layout.stride):
                assert slab.first == chunk == np.ravel_multi_index(slab.position, layout.counts)
                for at in grid_positions(slab.counts):
                    place = [a + b for a, b in zip(slab.position, at)]
                    assert int(np.ravel_multi_index(place, layout.counts)) == chunk if place else chunk == 0
                    chunk += 1
                    seen[box_of(layout, part, place)] += 1
            assert chunk == layout.chunks
        assert (seen == 1).all()
        several += layout.chunks > 1
        shared += sum(map(bool, by_rank)) > math.prod(sizes[axis] for axis in spec.axes)
        uneven += bool(spec.parts)
    assert several > 8 and shared > 5 and uneven > 2


@pytest.mark.parametrize("most", [1, 4, 9])
def test_slabs_are_not_larger_than_asked_for(fine, most):
    for i in range(100):
        layout = laid_out(*case(i))[0]
        sizes = [math.prod(slab.counts) for slab in slabs(layout, most * layout.stride)]
        assert sum(sizes) == layout.chunks and all(size <= most for size in sizes)
        assert layout.chunks <= most or len(sizes) >= layout.chunks / most


def test_a_box_is_read_from_the_chunks_that_it_touches_and_no_others(fine):
    for i in range(150):
        draw, layout = random.Random(i), laid_out(*case(i))[0]
        start = tuple(draw.randint(0, max(n - 1, 0)) for n in layout.shape)
        size = tuple(
            draw.randint(0, n - at) if draw.random() < 0.1 else draw.randint(min(1, n - at), n - at)
            for n, at in zip(layout.shape, start)
        )
        inside = np.zeros(layout.shape, bool)
        inside[tuple(slice(at, at + n) for at, n in zip(start, size))] = True
        touched = set()
        for part in layout.tiles():
            for number in range(layout.chunks):
                place = np.unravel_index(number, layout.counts) if layout.counts else ()
                if inside[box_of(layout, part, place)].any():
                    touched.add((part, number))
        found = []
        for part, spans in overlapping_tiles(layout, start, size):
            for slab in slabs(layout, draw.choice([0, 2, 5, 100]) * layout.stride, spans):
                found += [(part, slab.first + i) for i in range(slab.size)]
        assert len(found) == len(set(found)) and set(found) == touched


def test_neighbours_are_read_together():
    layout = ChunkLayout((64, 4096), torch.float32, (1, 1), (4, 1024))  # 16 x 4 chunks
    sizes = lambda spans: [(slab.first, slab.size) for slab in slabs(layout, 8 * layout.stride, spans)]  # noqa: E731
    assert sizes([(0, 16), (0, 4)]) == [(8 * i, 8) for i in range(8)]
    assert sizes([(3, 8), (0, 4)]) == [(12, 8), (20, 8), (28, 4)]
    assert sizes([(3, 5), (1, 3)]) == [(13, 2), (17, 2)]
    assert [slab.size for slab in slabs(layout, 0)] == [1] * 64


@pytest.mark.parametrize(
    "shape, spec, expected",
    [
        ((1024, 1024), "[V, D]", (64, 1024)),  # rows, to 16 chunks
        ((1024, 1024), "[V/tp+dp, D]", (64, 1024)),
        ((1024, 1024), "[D, F/tp]", (128, 512)),  # what has an axis is cut as often as the rows
        ((12, 512, 512), "[L, D, F]", (1, 128, 512)),  # layers first
        ((12, 768, 3072), "[L, D/dp, F/tp]", (1, 192, 768)),
        ((3, 7), "[D, F]", (3, 7)),
        ((4, 100, 10), "[L, D, F]", (4, 100, 10)),  # too little to be cut at all
        ((1 << 20,), "[D]", (1 << 16,)),
        ((524_309, 4), "[V, D]", (524_309, 4)),  # a prime, and rows too short
    ],
)
def test_chunks(shape, spec, expected):
    found = chunk_shape(shape, 4, Spec.parse(spec), [1] * len(shape))
    size = math.prod(found) * 4
    assert found == expected
    assert all(n % c == 0 for n, c in zip(shape, found))
    assert size < 2 * TARGET or max(smallest_factor(n) for n in found) > 7
    assert size >= min(MIN_CHUNK_BYTES, math.prod(shape) * 4)


def test_dims_are_cut_alike_with_the_cuts_of_the_mesh():
    """So that what one mesh has written in pieces another one can read in its own."""
    spec = Spec.parse("[L, D/dp, F/tp]")
    for sizes, chunk in (
        ({"dp": 4}, (1, 256, 512)),
        ({"tp": 2}, (1, 256, 512)),
        ({}, (1, 256, 512)),
        ({"dp": 2, "tp": 2}, (1, 256, 512)),
    ):
        assert laid_out(sizes, (4, 1024, 2048), torch.float32, spec)[0].chunk == chunk, sizes


def test_chunks_of_sizes_that_have_factors_are_worth_a_transfer_of_their_own():
    for i in range(300):
        draw = random.Random(i)
        shape = [2 ** draw.randint(0, 4) * draw.choice([1, 3]) for _ in range(draw.randint(0, 1))]
        shape += [2 ** draw.randint(4, 12) * draw.choice([1, 3]) for _ in range(2)]
        chunk = chunk_shape(shape, 4, Spec(), [1] * len(shape))
        size, whole = math.prod(chunk) * 4, math.prod(shape) * 4
        assert size < 2 * TARGET and size >= min(MIN_CHUNK_BYTES, whole), (shape, chunk)
        assert all(n % c == 0 for n, c in zip(shape, chunk))


def test_what_all_ranks_hold_is_divided_among_them():
    sizes, spec = {"dp": 2, "rp": 2, "tp": 2}, Spec()
    _, by_rank = laid_out(sizes, (8192, 1024), torch.float32, spec)
    assert [len(mine) for mine in by_rank] == [1] * 8
    layout, by_rank = laid_out(sizes, (8192, 1024), torch.float32, Spec((("tp",),)))
    assert [len(mine) for mine in by_rank] == [1] * 8 and layout.grid == (8, 1)
    # What is small, or cannot be cut, is written whole, by another rank for each leaf.
    for shape in ((16,), (8191, 1021), ()):
        writers = [
            [rank for rank, mine in enumerate(laid_out(sizes, shape, torch.float32, spec, number=n)[1]) if mine]
            for n in range(8)
        ]
        assert sorted(writers) == [[rank] for rank in range(8)]


def test_objects_are_not_larger_than_asked_for():
    for shape in ((8192, 4096), (3, 4096, 4096), (1 << 27,)):
        for sizes in ({}, {"dp": 2}):
            layout, by_rank = laid_out(sizes, shape, torch.float32, Spec(), max_bytes=64 << 20)
            assert layout.file_bytes <= 65 << 20 and sorted(itertools.chain(*by_rank)) == layout.tiles()
            assert len(layout.tiles()) >= layout.nbytes / (64 << 20)


def test_sizes_and_names():
    layout = ChunkLayout((6, 40), torch.float64, (3, 2), (1, 10))
    assert (layout.tile, layout.counts, layout.chunks, layout.chunk_bytes, layout.nbytes) == (
        (2, 20),
        (2, 2),
        4,
        80,
        1920,
    )
    assert (layout.stride, layout.header, layout.file_bytes) == (PAGE, PAGE, 5 * PAGE)
    assert layout.key((2, 1)) == "c.2.1" and layout.number((2, 1)) == 5 and len(layout.tiles()) == 6
    one = ChunkLayout((), torch.float32, (), ())
    assert (one.chunks, one.file_bytes, one.header, one.tiles(), one.key(()), one.number(())) == (
        1,
        4 + CRC,
        0,
        [()],
        "c",
        0,
    )
    none = ChunkLayout((0, 4), torch.float32, (1, 1), (0, 4))
    assert none.tiles() == [] and json.loads(array_json(none, {}))["shape"] == [0, 4]
    assert [smallest_factor(n) for n in (1, 2, 9, 35, 97, 2 * 97)] == [1, 2, 3, 5, 97, 2]
