"""Digests against plain Python numbers: the value itself, that parts add up, and that any change changes it."""

import functools
import itertools
import subprocess
import sys
import threading
import time

import numpy
import pytest
import torch
from ranks import run

from fzero.core import combine, digest, digest_tree
from fzero.core import digest as module
from fzero.sharding import Spec, digest_text, digests, one_process, slices

MASK = (1 << 64) - 1
every_dtype = pytest.mark.parametrize("dtype", digest.DTYPES, ids=lambda dtype: str(dtype).split(".")[1])


def plain(x, shape=None, start=None):
    """The digest as the docstring defines it, an element at a time."""
    shape, start = shape or tuple(x.shape), start or (0,) * x.ndim
    width = x.element_size()
    data = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    total = 0
    for number, place in enumerate(itertools.product(*map(range, x.shape))):
        index = 0
        for size, i, first in zip(shape, place, start):
            index = index * size + first + i
        z = int.from_bytes(data[number * width : (number + 1) * width], "little")
        z = (z + 0x9E3779B97F4A7C15 * (index + 1)) & MASK
        z = (z ^ (z >> 32)) * 0xBF58476D1CE4E5B9 & MASK
        total += z ^ (z >> 29)
    return total & MASK


def some(shape, dtype, seed=0):
    """A tensor of any bits (of a bool, those that it has)."""
    numbers = numpy.random.default_rng(seed)
    x = torch.empty(shape, dtype=dtype)
    if not x.numel():
        return x
    if dtype == torch.bool:
        return torch.from_numpy(numbers.integers(0, 2, shape).astype(bool)).reshape(shape)
    raw = numbers.integers(0, 256, x.numel() * x.element_size(), dtype=numpy.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


@pytest.fixture(params=("C++", "tensors"))
def way(request, monkeypatch):
    """Everything goes one way: by the C++, or by tensor operations in small pieces."""
    monkeypatch.setattr(module, "_MANY", 0 if request.param == "C++" else 1 << 62)
    monkeypatch.setattr(module, "_CHUNK", {"cpu": 100})
    if request.param == "C++":
        assert module._library() is not None, "this machine has no g++"
        monkeypatch.setattr(module, "_digest_by_tensors", lambda *given: pytest.fail("tensor operations are used"))
    else:
        monkeypatch.setattr(module, "_library", lambda: pytest.fail("the C++ is used"))


@every_dtype
def test_the_value_is_the_written_one(dtype, way):
    for shape in ((), (0,), (1,), (3, 0, 2), (37,), (5, 7, 3), (1, 300, 1), (1031,)):
        x = some(shape, dtype)
        assert digest.digest(x) == plain(x), shape


def test_a_value_known_beforehand():
    # By hand: bits 0x3F800000 and index 0.
    assert (
        digest.digest(torch.tensor(1.0)) == digest.digest(torch.ones(1)) == plain(torch.ones(1)) == 0x1DE4BD7FE53E1EB4
    )
    assert digest.digest(torch.zeros(0)) == 0


@every_dtype
def test_any_strides(dtype, way):
    x = some((6, 10, 4), dtype)
    views = (
        x.mT,
        x.permute(2, 0, 1),
        x[::2],
        x[:, 1::3],
        x[..., 3],
        x[2:5, 4:9, 1:3],
        x[0, 0, 0],
        x[1:2, :, :1],
        x[:1, :1, :1].expand(3, 2, 5),
    )
    for view in views:
        assert digest.digest(view) == plain(view), (view.shape, view.stride())


def cuts(generator, size):
    """Random places to cut a dim at, both ends among them; some parts are empty."""
    inner = generator.integers(0, size + 1, generator.integers(0, 4)).tolist()
    return sorted([0, size, *inner])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.uint8, torch.int64))
def test_the_parts_of_any_partition_add_up(dtype, way):
    generator = numpy.random.default_rng(7)
    for shape in ((), (41,), (13, 8), (5, 6, 7), (4, 1, 3, 5)):
        x = some(shape, dtype)
        whole = digest.digest(x)
        for _ in range(5):
            total = 0
            for block in itertools.product(*(itertools.pairwise(cuts(generator, size)) for size in shape)):
                part = x[tuple(slice(a, b) for a, b in block)]
                start = [a for a, _ in block]
                assert digest.digest(part, shape, start) == plain(part, shape, start)
                assert digest.digest(part.clone(), shape, start) == digest.digest(part, shape, start)  # contiguous now
                total += digest.digest(part, shape, start)
            assert total & MASK == whole


@every_dtype
def test_every_flipped_bit_changes_it(dtype, way):
    x = some((3, 11), dtype)
    before, seen = digest.digest(x), set()
    raw = x.reshape(-1).view(torch.uint8)
    for byte, bit in itertools.product(range(raw.numel()), range(1 if dtype == torch.bool else 8)):
        raw[byte] ^= 1 << bit
        seen.add(digest.digest(x))
        raw[byte] ^= 1 << bit
    assert before not in seen and len(seen) == raw.numel() * (1 if dtype == torch.bool else 8)
    assert digest.digest(x) == before


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in digest.DTYPES if dtype != torch.bool], ids=lambda dtype: str(dtype).split(".")[1]
)
def test_swaps_and_shifts_change_it(dtype, way):
    x = torch.arange(60).reshape(12, 5).to(dtype)
    if x.element_size() == 1:
        x = torch.arange(60, dtype=torch.uint8).reshape(12, 5).view(dtype)
    flat, seen = x.reshape(-1), [digest.digest(x)]
    for i, j in itertools.combinations(range(60), 2):
        order = list(range(60))
        order[i], order[j] = j, i
        seen.append(digest.digest(flat[order].reshape(12, 5)))
    for i, j in itertools.combinations(range(12), 2):
        order = list(range(12))
        order[i], order[j] = j, i
        seen.append(digest.digest(x[order]))
    seen += [digest.digest(flat.roll(n).reshape(12, 5)) for n in range(1, 60)]
    seen += [digest.digest(x.mT.contiguous()), digest.digest(flat[list(range(60))[::-1]].reshape(12, 5))]
    assert len(set(seen)) == len(seen)


def test_zeros_of_both_signs_differ_and_not_a_number_has_one():
    assert digest.digest(torch.zeros(3)) != digest.digest(-torch.zeros(3))
    assert digest.digest(torch.full((3,), torch.nan)) == digest.digest(torch.full((3,), torch.nan))


def test_indices_beyond_32_bits(way):
    x, shape = some((2, 3), torch.float32), (1 << 33, 1 << 20)
    start = ((1 << 33) - 2, (1 << 20) - 3)
    assert digest.digest(x, shape, start) == plain(x, shape, start) != digest.digest(x)


def test_what_is_asked_wrongly_is_refused():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"torch.complex64 has none; there are float64, float32"):
        digest.digest(x.to(torch.complex64))
    with pytest.raises(ValueError, match="shape and start of a block go together"):
        digest.digest(x, shape=(2, 3))
    for shape, start in (((2, 3), (0, 1)), ((2, 3), (-1, 0)), ((2, 3), (0,)), ((6,), (0,)), ((2, 2), (0, 0))):
        with pytest.raises(ValueError, match=r"a block \[2, 3\] at .* is not inside a leaf of shape"):
            digest.digest(x, shape, start)


def test_names_are_mixed_in():
    tree = {"a": torch.ones(3), "b": {"c": torch.ones(3), "d": torch.zeros(2)}}
    digests = digest_tree(tree)
    assert digests == {
        "a": digest.digest(torch.ones(3)),
        "b/c": digest.digest(torch.ones(3)),
        "b/d": digest.digest(torch.zeros(2)),
    }
    swapped = {**digests, "a": digests["b/d"], "b/d": digests["a"]}
    renamed = {"e" if name == "a" else name: value for name, value in digests.items()}
    assert len({combine(digests), combine(swapped), combine(renamed), combine({})}) == 4
    # Linear: parts of leaves make up the same.
    halves = [{"a": digest.digest(torch.ones(n), (3,), (at,))} for n, at in ((1, 0), (2, 1))]
    rest = {name: value for name, value in digests.items() if name != "a"}
    assert sum(map(combine, (*halves, rest))) & MASK == combine(digests)


# -- on a mesh

SPECS = {
    "whole": Spec(),
    "rows": Spec(("dp",)),
    "columns": Spec(((), "tp")),
    "both": Spec(("tp", "dp")),
    "nested": Spec(((), ("tp", "dp"))),
    "count": Spec(),
}


def tree():
    leaves = {name: some((4, 8, 3), (torch.float32, torch.bfloat16)[i % 2], seed=i) for i, name in enumerate(SPECS)}
    return {**leaves, "count": torch.tensor(7)}


class Away:
    """A leaf that is somewhere else."""

    def __init__(self, leaf):
        self.leaf = leaf

    def tensor(self):
        return self.leaf


def digests_of_shards(mesh):
    shards = {}
    for name, leaf in tree().items():
        for dim, (start, size) in enumerate(zip(*slices.local_slice(tuple(leaf.shape), SPECS[name], mesh))):
            leaf = leaf.narrow(dim, start, size)
        shards[name] = Away(leaf) if name == "rows" else leaf
    found = digests(shards, SPECS, mesh)
    return found, mesh.ledger.total("digest").bytes, digest_text(shards, SPECS, mesh)


@pytest.mark.parametrize("sizes", ({"dp": 2}, {"tp": 2}, {"rp": 2}, {"dp": 2, "tp": 2}, {"rp": 2, "tp": 2}), ids=str)
def test_shards_have_the_digests_of_the_whole_on_every_mesh(sizes):
    expected = digest_tree(tree())
    assert digests(tree(), SPECS, one_process()) == expected
    n = 2 ** len(sizes)
    for found, sent, text in run(n, digests_of_shards, mesh=sizes):
        assert found == expected and text == f"{combine(expected):016x}"
        assert sent == 8 * len(SPECS) * len(sizes)  # a rank's own numbers to the one other of each axis


@pytest.mark.slow
def test_few_elements_wait_for_no_compiler():
    code = "import torch, fzero.core.digest as d; d._MANY = 1000; made = []\n"
    code += "d.compile_cache.library_by_gcc = lambda *given: made.append(given) or exit(7)\n"
    code += "for n in (400, 599): d.digest(torch.ones(n))\nassert not made; d.digest(torch.ones(1))"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], timeout=60).returncode == 7


def test_a_compiler_that_fails_is_said_and_done_without(monkeypatch, tmp_path):
    broken = tmp_path / "broken.cpp"
    broken.write_text("int digest(")
    monkeypatch.setattr(module, "__file__", str(broken.with_suffix(".py")))
    monkeypatch.setattr(module, "_MANY", 0)
    monkeypatch.setattr(module, "_library", functools.cache(module._library.__wrapped__))
    x = some((31, 3), torch.bfloat16)
    with pytest.warns(UserWarning, match="digests are made without C"):
        assert digest.digest(x) == plain(x)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    module._library.cache_clear()
    assert digest.digest(x) == plain(x)


def test_threads_compile_once_and_agree(monkeypatch):
    made, x = [], some((5000,), torch.float32)
    by_gcc, expected = module.compile_cache.library_by_gcc, plain(x)
    monkeypatch.setattr(module, "_MANY", 0)
    monkeypatch.setattr(module, "_library", functools.cache(module._library.__wrapped__))
    monkeypatch.setattr(
        module.compile_cache, "library_by_gcc", lambda *given: made.append(given) or time.sleep(0.05) or by_gcc(*given)
    )
    got = []
    threads = [threading.Thread(target=lambda: got.append(digest.digest(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected] * 4 and len(made) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_dtype
def test_the_device_has_the_same(dtype):
    x = some((17, 9, 5), dtype)
    assert digest.digest(x.cuda()) == digest.digest(x.cuda().mT.contiguous().mT) == plain(x)
