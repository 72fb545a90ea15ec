"""What the tests of checkpoints share: states, damage, and how a state is compared."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from close import assert_same

from fzero.core import pytree


class Pair(NamedTuple):
    first: object
    second: object


def tree(seed=0):
    """A tree with every container and kind of leaf that a state may have."""
    g = torch.Generator().manual_seed(seed)
    floats = {
        str(d)[6:]: torch.randn(3, 5, generator=g).to(d)
        for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    floats |= {str(d)[6:]: torch.randn(6, generator=g).to(d) for d in (torch.float8_e4m3fn, torch.float8_e5m2)}
    ints = [
        torch.randint(0, 100, (7,), generator=g).to(d)
        for d in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    ]
    return {
        "floats": floats,
        "ints": ints,
        "odd": Pair(torch.tensor([True, False, True]), (torch.tensor(-0.0), torch.tensor(2**62), torch.empty(0, 4))),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "nothing": (),
        "view": torch.randn(6, 4, generator=g).T,
        "expanded": torch.randn(1, generator=g).expand(9),
        "stepped": torch.randn(7, 9, generator=g)[::2, 1::3],
        # Of several chunks, in both of their dims, and of three dims, the first of which counts layers.
        "large": torch.randn(1024, 2048, generator=g),
        "layers": torch.randn(6, 300, 700, generator=g).to(torch.bfloat16).transpose(1, 2),
    }


def small(value, n=5):
    """A state of two leaves whose elements are a number."""
    return {"a": torch.full((n,), float(value)), "b": {"c": torch.tensor(value)}}


SMALL = [
    "arrays",
    "arrays/a",
    "arrays/a/c.0",
    "arrays/a/zarr.json",
    "arrays/b",
    "arrays/b/c",
    "arrays/b/c/c",
    "arrays/b/c/zarr.json",
]
SMALL += ["arrays/b/zarr.json", "arrays/zarr.json", "manifest.json"]  # the files of its checkpoint


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(actual, expected):
    assert_same(pytree.map(bits, actual), pytree.map(bits, expected))
    got, want = pytree.named_leaves(actual), pytree.named_leaves(expected)
    assert [(x.dtype, x.shape) for x in got.values()] == [(x.dtype, x.shape) for x in want.values()]


def refused(said, call, *args, **kwargs):
    """`call` raises ValueError with one line that holds each of the texts `said`."""
    with pytest.raises(ValueError, match=re.escape(said[0])) as error:
        call(*args, **kwargs)
    text = str(error.value)
    assert "\n" not in text and all(part in text for part in said), text


def contents(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))


def flip(file, at, mask=0x10):
    """Change bits of a byte of a file where it lies."""
    with open(file, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ mask]))
