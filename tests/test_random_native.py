"""The C++ of random.py against its tensor operations, bit for bit."""

import subprocess
import sys

import numpy
import pytest
import torch
from close import assert_same

from fzero.core import compile_cache, prng

F64 = torch.float64
KEY = prng.key(20260102)
N = (1 << 16) + 1027  # several pieces for threads, and a tile cut short
DRAWS = {
    "bits": lambda n, **at: prng.bits(KEY, (n,), **at),
    "uniform": lambda n, **at: prng.uniform(KEY, (n,), -1.0, 3.1, **at),
    "uniform float64": lambda n, **at: prng.uniform(KEY, (n,), 0.1, 0.7, dtype=F64, **at),
    "normal": lambda n, **at: prng.normal(KEY, (n,), 0.0, 0.02, **at),
    "normal float64": lambda n, **at: prng.normal(KEY, (n,), dtype=F64, **at),
    "normal scaled": lambda n, **at: prng.normal(KEY, (n,), 0.3, 1.7, dtype=F64, **at),
    "normal bfloat16": lambda n, **at: prng.normal(KEY, (n,), 0.5, 2.0, dtype=torch.bfloat16, **at),
    "normal float16": lambda n, **at: prng.normal(KEY, (n,), 0.0, 1e-5, dtype=torch.float16, **at),
    "normal, subnormal": lambda n, **at: prng.normal(KEY, (n,), 0.0, 1e-40, **at),
    "truncated": lambda n, **at: prng.truncated_normal(KEY, (n,), 1.0, 0.5, bounds=(-1.0, 2.5), dtype=F64, **at),
    "truncated in both tails": lambda n, **at: prng.truncated_normal(KEY, (n,), bounds=(4.0, 7.0), dtype=F64, **at),
    "truncated far out": lambda n, **at: prng.truncated_normal(KEY, (n,), bounds=(-38.5, -5.0), dtype=F64, **at),
    "truncated where the distribution is flat": lambda n, **at: prng.truncated_normal(
        KEY, (n,), bounds=(8.0, 8.01), dtype=F64, **at
    ),
    "bernoulli": lambda n, **at: prng.bernoulli(KEY, 0.3, (n,), **at),
    "bernoulli of one": lambda n, **at: prng.bernoulli(KEY, 1.0, (n,), **at),
}
every_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def in_torch(draw, *args, **kwargs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prng, "_in_cpp", lambda *args, **numbers: None)
        return draw(*args, **kwargs)


@pytest.fixture
def calls(monkeypatch):
    """The C++ serves whatever it can from here on; a list of the numbers of elements that it draws."""
    library, seen = prng._library(), []

    class Counted:
        @staticmethod
        def draw(pointer):
            seen.append(pointer._obj.n)
            library.draw(pointer)

    monkeypatch.setattr(prng, "_MANY", 0)
    monkeypatch.setattr(prng, "_library", lambda: Counted)
    return seen


@every_draw
def test_the_bits_are_those_of_tensor_operations(draw, calls):
    for n, first in ((N, 0), (1 << 13, 3), (1029, (1 << 34) - 513), (1025, (1 << 62) - 1)):
        assert_same(draw(n, first=first), in_torch(draw, n, first=first))
    assert calls == [N, 1 << 13, 1029, 1025]


@every_draw
def test_elements_by_their_indices(draw, calls):
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 1 << 62, (4096, 2), generator=generator)[:, 0]  # not contiguous
    assert_same(draw(4096, index=index), in_torch(draw, 4096, index=index))
    assert calls == [4096]


@every_draw
def test_any_number_of_threads_draws_the_same(draw, calls):
    one = draw(N, first=1)
    torch.set_num_threads(3)
    try:
        assert_same(draw(N, first=1), one)
    finally:
        torch.set_num_threads(1)
    assert calls == [N, N]


@pytest.mark.parametrize("where", ("first", "index"))
def test_narrow_types_are_drawn_part_by_part(where, calls, monkeypatch):
    monkeypatch.setattr(prng, "_CHUNK_ELSEWHERE", 1 << 13)
    draw, at = DRAWS["normal bfloat16"], {"first": 5} if where == "first" else {"index": torch.arange(20000).flip(0)}
    assert_same(draw(20000, **at), in_torch(draw, 20000, **at))
    assert calls == [8192, 8192, 3616]


def test_the_word_at_the_threshold_is_not_below_it(calls):
    p = int(prng.bits(KEY, (2048,))[77]) / 2**32
    got = prng.bernoulli(KEY, p, (2048,))
    assert not bool(got[77])
    assert_same(got, in_torch(prng.bernoulli, KEY, p, (2048,)))


def test_values_at_the_ends_and_where_the_formulas_meet(calls, monkeypatch, tmp_path):
    """The C++ with the index itself for a word."""
    source = (tmp_path / "values.py").with_suffix(".cpp")
    text = prng.__file__.replace(".py", ".cpp")
    drawn = "room[i] = which & 2 ? (which & 1 ? w[3] : w[2]) : (which & 1 ? w[1] : w[0]);"
    with open(text) as file:
        plain = file.read()
    assert plain.count(drawn) == 1
    source.write_text(plain.replace(drawn, "room[i] = uint32_t(index[i]);"))
    library = compile_cache.library_by_gcc(str(source), compile_cache.EXACT)
    monkeypatch.setattr(prng, "_library", lambda: library)
    seams = [0, round(0.075 * 2**32), 1 << 31, round(0.925 * 2**32), 1 << 32]
    near = torch.arange(-(1 << 12), 1 << 12)
    words = torch.cat([seam + near for seam in seams])
    words = torch.cat(
        [
            words[(words >= 0) & (words < 1 << 32)],
            torch.randint(0, 1 << 32, (1 << 18,), generator=torch.Generator().manual_seed(0)),
        ]
    )
    expected = prng.ndtri(prng._uniform01(words))
    assert_same(prng.normal(KEY, words.shape, dtype=F64, index=words), expected)
    assert float(expected.min()) == prng.ndtri(torch.tensor(2.0**-33, dtype=F64)) == -float(expected.max())


def test_square_roots_are_rounded_to_nearest():
    x = torch.cat(
        (prng.uniform(KEY, (1 << 16,), 0.0, 40.0, dtype=F64), torch.tensor([0.69, 1.0, 22.8, 743.7], dtype=F64))
    )
    assert_same(prng.sqrt(x), torch.from_numpy(numpy.sqrt(x.numpy())))

    assert_same(prng.sqrt(x), torch.from_numpy(numpy.sqrt(x.numpy())))


def test_what_is_not_plain_is_drawn_by_tensor_operations(calls):
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def draw(key, first=0):
        return prng.normal(key, (2048,), first=first)

    whole = in_torch(draw, KEY)
    keys = torch.stack((KEY, prng.fold_in(KEY, 1)))
    assert_same(torch.vmap(draw)(keys)[0], whole)
    assert_same(draw(KEY, torch.tensor(0)), whole)
    assert_same(make_fx(lambda key: draw(key))(KEY)(KEY), whole)
    assert_same(torch.func.grad(lambda x: (draw(KEY) * x).sum())(torch.ones(2048)), whole)
    with FakeTensorMode():
        assert draw(prng.key(1)).shape == (2048,)
    assert prng.normal(KEY.to("meta"), (2048,)).device.type == "meta"
    whole_numbers = prng.uniform(KEY, (2048,), 0.0, 100.0, dtype=torch.int64)
    assert_same(whole_numbers, prng.uniform(KEY, (2048,), 0.0, 100.0, dtype=F64).long())
    assert calls.pop() == 2048  # of the float64
    assert not calls
    assert_same(draw(KEY), whole)
    assert calls == [2048]


@pytest.mark.slow
def test_few_elements_wait_for_no_compiler():
    code = "from fzero.core import prng; k = prng.key(0); prng._MANY = 1 << 14; made = []\n"
    code += "prng.compile_cache.library_by_gcc = lambda *given: made.append(given)\n"
    code += "for n in (1 << 9,) * 64 + (1 << 13, 4096): prng.normal(k, (n,))\nassert not made\n"
    code += "prng.normal(k, (4096,)); assert len(made) == 1; prng.normal(k, (4096,)); assert len(made) == 1"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_a_compiler_that_fails_is_said_and_done_without(monkeypatch, tmp_path):
    broken = tmp_path / "broken.cpp"
    broken.write_text("int draw(")
    with pytest.raises(RuntimeError, match=r"g\+\+ does not compile .*broken.cpp"):
        compile_cache.library_by_gcc(str(broken.with_suffix(".py")), compile_cache.EXACT)
    monkeypatch.setattr(prng, "__file__", str(broken.with_suffix(".py")))
    monkeypatch.setattr(prng, "_MANY", 0)
    monkeypatch.setattr(prng, "_library", prng.functools.cache(prng._library.__wrapped__))
    with pytest.warns(UserWarning, match="drawn without C"):
        got = prng.normal(KEY, (2048,))
    assert_same(got, in_torch(prng.normal, KEY, (2048,)))
    monkeypatch.setattr(prng.shutil, "which", lambda name: None)
    prng._library.cache_clear()
    assert_same(prng.normal(KEY, (2048,)), got)
