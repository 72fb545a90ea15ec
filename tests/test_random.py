"""Random numbers against the generator's published vectors, the distributions' theory, and themselves drawn in
slices."""

import math
from statistics import NormalDist

import pytest
import torch
from close import assert_close, assert_same

from fzero.core import prng

F64 = torch.float64
KEY = prng.key(20260101)
DRAWS = {
    "bits": lambda key, shape, **at: prng.bits(key, shape, **at),
    "uniform": lambda key, shape, **at: prng.uniform(key, shape, -1.0, 3.0, **at),
    "uniform float64": lambda key, shape, **at: prng.uniform(key, shape, dtype=F64, **at),
    "normal": lambda key, shape, **at: prng.normal(key, shape, 0.5, 2.0, **at),
    "normal bfloat16": lambda key, shape, **at: prng.normal(key, shape, dtype=torch.bfloat16, **at),
    "truncated": lambda key, shape, **at: prng.truncated_normal(key, shape, 1.0, 0.5, bounds=(-1.0, 2.5), **at),
    "bernoulli": lambda key, shape, **at: prng.bernoulli(key, 0.3, shape, **at),
}
every_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


# Random123, "kat_vectors", philox4x32 with 10 rounds: counter, key, words.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(w, 16) for w in text.split()]


@pytest.mark.parametrize("counter, key, expected", VECTORS, ids=("zeros", "ones", "pi"))
def test_philox_gives_the_published_words(counter, key, expected):
    got = prng.philox([torch.tensor(w) for w in words(counter)], torch.tensor(words(key)))
    assert [int(w) for w in got] == words(expected)


def test_philox_broadcasts_counters_against_keys():
    counters = torch.tensor([words(c) for c, _, _ in VECTORS]).T
    keys = torch.tensor([words(k) for _, k, _ in VECTORS])
    assert torch.stack(prng.philox(list(counters), keys), -1).tolist() == [words(w) for _, _, w in VECTORS]


def test_element_e_is_word_e_mod_4_of_block_e_div_4():
    expected = [int(prng.philox([torch.tensor(e // 4), 0, 0, 0], KEY)[e % 4]) for e in range(11)]
    assert prng.bits(KEY, (11,)).tolist() == expected
    far = (1 << 40) + 3
    block = far // 4
    expected = prng.philox([torch.tensor(block & 0xFFFFFFFF), torch.tensor(block >> 32), 0, 0], KEY)[3]
    assert int(prng.bits(KEY, (1,), first=far)) == int(expected)


def test_key_holds_all_64_bits_of_the_seed():
    assert prng.key(0x0123456789ABCDEF).tolist() == [0x89ABCDEF, 0x01234567]
    assert prng.key((1 << 64) - 1).tolist() == [0xFFFFFFFF, 0xFFFFFFFF]
    for seed in (-1, 1 << 64):
        with pytest.raises(ValueError, match=f"seed is {seed}"):
            prng.key(seed)


@every_draw
def test_a_slice_by_first_is_a_slice_of_the_whole(draw):
    whole = draw(KEY, (61,))
    for start, n in ((0, 61), (0, 1), (1, 7), (2, 3), (3, 58), (4, 4), (8, 1), (60, 1), (5, 0)):
        assert_same(draw(KEY, (n,), first=start), whole[start : start + n])
        assert_same(draw(KEY, (n,), first=torch.tensor(start)), whole[start : start + n])


@every_draw
def test_a_slice_by_index_is_a_slice_of_the_whole(draw):
    whole = draw(KEY, (6, 10))
    index = torch.tensor([[0, 59, 7], [7, 6, 33]])
    assert_same(draw(KEY, index.shape, index=index), whole.reshape(-1)[index])
    columns = torch.arange(60).reshape(6, 10)[:, 2:5]
    assert_same(draw(KEY, columns.shape, index=columns), whole[:, 2:5])


@every_draw
def test_slices_agree_across_the_chunks_of_a_large_draw(draw):
    n = 2 * prng._CHUNK["cpu"] + 5
    whole = draw(KEY, (n,))
    assert whole.shape == (n,)
    for start in (prng._CHUNK["cpu"] - 3, 2 * prng._CHUNK["cpu"] - 2, n - 1):
        stop = min(n, start + 9)
        assert_same(draw(KEY, (stop - start,), first=start), whole[start:stop])
        assert_same(draw(KEY, (stop - start,), index=torch.arange(start, stop)), whole[start:stop])
    # An unaligned start that is itself cut into chunks.
    assert_same(draw(KEY, (n - 3,), first=3), whole[3:])


@every_draw
def test_vmap_over_keys_equals_a_loop(draw):
    keys = prng.split(KEY, 3)
    assert_same(torch.vmap(lambda k: draw(k, (2, 5)))(keys), torch.stack([draw(k, (2, 5)) for k in keys]))
    firsts = torch.tensor([0, 5, 6])
    sliced = torch.vmap(lambda k, f: draw(k, (7,), first=f))(keys, firsts)
    assert_same(sliced, torch.stack([draw(k, (7,), first=int(f)) for k, f in zip(keys, firsts)]))


@every_draw
def test_empty_and_scalar_shapes(draw):
    assert draw(KEY, (0, 3)).shape == (0, 3)
    assert_same(draw(KEY, ()), draw(KEY, (1,))[0])


# ---- distributions --------------------------------------------------------------------------------------------------

NUM = 40_000


def kolmogorov_smirnov(sample, cdf):
    """The largest distance between the sample's distribution function and `cdf`, times sqrt(n): above 1.95 with
    probability 0.001."""
    x = sample.sort().values
    p = torch.tensor([cdf(float(v)) for v in x], dtype=F64)
    steps = torch.arange(len(x) + 1, dtype=F64) / len(x)
    return float(torch.maximum((p - steps[:-1]).max(), (steps[1:] - p).max())) * math.sqrt(len(x))


def truncated_cdf(low, high):
    n = NormalDist()
    return lambda z: (n.cdf(z) - n.cdf(low)) / (n.cdf(high) - n.cdf(low))


@pytest.mark.parametrize(
    "sample, cdf, mean, variance",
    [
        (prng.uniform(KEY, (NUM,), 2.0, 6.0, dtype=F64), lambda x: (x - 2.0) / 4.0, 4.0, 16.0 / 12.0),
        (prng.normal(KEY, (NUM,), 3.0, 2.0, dtype=F64), NormalDist(3.0, 2.0).cdf, 3.0, 4.0),
        (prng.normal(KEY, (NUM,)), NormalDist().cdf, 0.0, 1.0),
        # Truncated at +-2: variance 1 - 4 phi(2) / (Phi(2) - Phi(-2)).
        (prng.truncated_normal(KEY, (NUM,), dtype=F64), truncated_cdf(-2.0, 2.0), 0.0, 0.7737413035760942),
    ],
    ids=("uniform", "normal", "normal float32", "truncated"),
)
def test_distribution(sample, cdf, mean, variance):
    assert kolmogorov_smirnov(sample.to(F64), cdf) < 1.95
    # Four standard errors; the variance of a squared deviation is at most twice the variance squared here.
    assert abs(float(sample.mean()) - mean) < 4.0 * math.sqrt(variance / NUM)
    assert abs(float(sample.var()) - variance) < 4.0 * variance * math.sqrt(2.0 / NUM)


def test_one_sided_truncation_stays_inside_and_follows_its_law():
    z = prng.truncated_normal(KEY, (NUM,), bounds=(0.5, 1.5), dtype=F64)
    assert 0.5 <= float(z.min()) < 0.51 and 1.49 < float(z.max()) <= 1.5
    assert kolmogorov_smirnov(z, truncated_cdf(0.5, 1.5)) < 1.95
    scaled = prng.truncated_normal(KEY, (NUM,), -3.0, 0.1, bounds=(0.5, 1.5), dtype=F64)
    assert_close(scaled, -3.0 + 0.1 * z, rtol=1e-15)


def test_bits_are_balanced_and_words_uncorrelated():
    w = prng.bits(KEY, (NUM,))
    assert int(w.min()) >= 0 and int(w.max()) < 1 << 32
    ones = ((w[:, None] >> torch.arange(32)) & 1).to(F64).mean(0)
    assert float((ones - 0.5).abs().max()) < 4.5 * 0.5 / math.sqrt(NUM)
    u = prng._uniform01(w) - 0.5
    for lag in (1, 2, 3, 4, 8):
        assert abs(float((u[lag:] * u[:-lag]).mean()) * 12.0) < 4.0 / math.sqrt(NUM)


def test_bernoulli_is_a_threshold_on_the_words():
    for p in (0.0, 0.25, 1.0):
        assert_same(prng.bernoulli(KEY, p, (NUM,)), prng.bits(KEY, (NUM,)) < p * 2**32)
    assert abs(float(prng.bernoulli(KEY, 0.25, (NUM,)).to(F64).mean()) - 0.25) < 4.0 * math.sqrt(0.25 * 0.75 / NUM)
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="p is"):
            prng.bernoulli(KEY, p, (2,))


def test_inverse_of_the_normal_distribution():
    half = [2.0**-33, 1e-9, 1e-6, 1e-4, 0.001, 0.01, 0.0749, 0.0751, 0.1, 0.25, 0.4, 0.49, 0.4999999]
    p = torch.tensor([*half, 0.5, *(1.0 - x for x in half)], dtype=F64)
    expected = torch.tensor([NormalDist().inv_cdf(float(x)) for x in p], dtype=F64)
    assert_close(prng.ndtri(p), expected, rtol=1e-13)
    assert float(prng.ndtri(torch.tensor(2.0**-33, dtype=F64))) > -6.34
    dense = torch.linspace(1e-7, 1.0 - 1e-7, 5001, dtype=F64)
    assert bool((prng.ndtri(dense).diff() > 0).all())


def test_logarithm():
    x = torch.tensor([2.0**-33, 1e-5, 0.1, 0.5, 0.70710678, 0.9, 0.999999, 1.0, 3.7, 1e10], dtype=F64)
    assert_close(prng.log(x), torch.tensor([math.log(float(v)) for v in x], dtype=F64), rtol=1e-14, atol=1e-15)


def test_uniform_values_are_exact_and_symmetric_in_the_open_interval():
    words = torch.tensor([0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
    u = prng._uniform01(words)
    assert_same(u, torch.tensor([2.0**-33, 3 * 2.0**-33, 0.5 - 2.0**-33, 0.5 + 2.0**-33, 1.0 - 2.0**-33], dtype=F64))
    assert_same(prng.uniform(KEY, (9,), dtype=F64), prng._uniform01(prng.bits(KEY, (9,))))


def test_truncated_values_are_inside_where_the_distribution_function_is_flat():
    z = prng.truncated_normal(KEY, (2000,), bounds=(8.0, 8.01), dtype=F64)
    assert float(z.min()) >= 8.0 and float(z.max()) <= 8.01


def test_truncation_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"low is 1\.0 and high is 1\.0"):
        prng.truncated_normal(KEY, (2,), bounds=(1.0, 1.0))


# ---- derived keys ---------------------------------------------------------------------------------------------------


def test_fold_in_takes_integers_tensors_and_names():
    assert_same(prng.fold_in(KEY, 12), prng.fold_in(KEY, torch.tensor(12)))
    high = (1 << 40) + 12
    assert_same(prng.fold_in(KEY, high), prng.fold_in(KEY, torch.tensor(high)))
    assert not torch.equal(prng.fold_in(KEY, high), prng.fold_in(KEY, 12))
    batched = torch.vmap(lambda i: prng.fold_in(KEY, i))(torch.arange(4))
    assert_same(batched, torch.stack([prng.fold_in(KEY, i) for i in range(4)]))
    named = prng.fold_in(prng.split(KEY, 2), "a")
    assert_same(named[1], prng.fold_in(prng.split(KEY, 2)[1], "a"))
    for data in (-1, 1 << 63):
        with pytest.raises(ValueError, match=f"fold_in: {data}"):
            prng.fold_in(KEY, data)


def test_keys_of_names_and_numbers_together_are_those_one_by_one():
    names = ("attn", "mlp", "")
    expected = [[prng.fold_in(prng.fold_in(KEY, name), i) for name in names] for i in range(5)]
    assert_same(prng.fold_in_all(KEY, names, 5), torch.stack([torch.stack(row) for row in expected]))


def test_derived_keys_are_all_different():
    names = ["", "a", "b", "blocks/attn/w_q", "blocks/attn/w_k", "0", "1"]
    keys = [
        KEY,
        *(prng.fold_in(KEY, n) for n in names),
        *(prng.fold_in(KEY, i) for i in range(200)),
        *prng.split(KEY, 200),
    ]
    keys += [prng.fold_in(prng.fold_in(KEY, 0), i) for i in range(200)]
    assert all(k.dtype == torch.int64 and k.shape == (2,) for k in keys)
    assert len({tuple(k.tolist()) for k in keys}) == len(keys)
    # Nor does a key repeat the words drawn from its parent.
    drawn = set(prng.bits(KEY, (1000,)).tolist())
    assert sum(w in drawn for k in keys[1:] for w in k.tolist()) == 0


def test_a_name_depends_on_its_text_alone():
    # Words written down once: what a seed means must not change between versions or processes.
    assert prng.fold_in(prng.key(0), "blocks/attn/w_q").tolist() == [3279723520, 3938513157]
    assert prng.fold_in(prng.key(0), 7).tolist() == [2058973160, 3929731044]
    assert prng.split(prng.key(0), 2).tolist() == [[1299916284, 3613319921], [2256952370, 969095434]]


def test_draws_from_derived_keys_are_uncorrelated():
    children = [*prng.split(KEY, 3), prng.fold_in(KEY, 0), prng.fold_in(KEY, 1), prng.fold_in(KEY, "a"), KEY]
    z = torch.stack([prng.normal(k, (10_000,), dtype=F64) for k in children])
    off = (z @ z.T / 10_000 - torch.diag(z.square().mean(-1))).abs().max()
    assert float(off) < 4.5 / math.sqrt(10_000)


# ---- permutation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", (1, 2, 3, 4, 5, 16, 17, 64, 65, 1000, 4096, 4097))
def test_permutation_is_a_bijection_and_its_slices_agree(n):
    whole = prng.permutation(KEY, n, torch.arange(n))
    assert sorted(whole.tolist()) == list(range(n))
    index = torch.tensor([[n - 1, 0], [n // 2, n // 3]])
    assert_same(prng.permutation(KEY, n, index), whole[index])
    if n >= 64:
        other = prng.permutation(prng.fold_in(KEY, 1), n, torch.arange(n))
        assert int((whole == torch.arange(n)).sum()) < 8 and int((whole == other).sum()) < 8


def test_permutation_of_a_huge_range_is_drawn_in_slices():
    n = (1 << 61) + 7
    image = prng.permutation(KEY, n, torch.tensor([0, 1, 2, n - 2, n - 1]))
    assert int(image.min()) >= 0 and int(image.max()) < n and len(set(image.tolist())) == 5


@pytest.mark.slow
def test_every_image_is_equally_likely():
    # 300 permutations of 6: a cell holds 50 on average. The statistic has 25 degrees of freedom: above 52.6 with
    # probability 0.001.
    images = torch.stack([prng.permutation(k, 6, torch.arange(6)) for k in prng.split(KEY, 300)])
    counts = torch.stack([(images == i).sum(0) for i in range(6)]).to(F64)
    assert float(((counts - 50.0) ** 2 / 50.0).sum()) < 52.6


def test_permutation_refuses_what_is_outside():
    for n in (0, (1 << 62) + 1):
        with pytest.raises(ValueError, match=f"n is {n}"):
            prng.permutation(KEY, n, torch.tensor([0]))
    for bad in (-1, 5):
        with pytest.raises(ValueError, match=r"outside range\(5\)"):
            prng.permutation(KEY, 5, torch.tensor([0, bad]))
    assert prng.permutation(KEY, 5, torch.zeros(0, dtype=torch.int64)).shape == (0,)
