"""Attention over pages by Triton: the numbers of the definition, and the same bits for a row alone and in any batch."""

import functools

import kernel_laws as laws
import pytest
import torch
from close import assert_same

from fzero.kernels import FULL, Pattern, registry
from fzero.kernels import paged_attention as pages
from fzero.kernels import paged_attention_triton as kernels
from fzero.kernels.quantize import quantize

PATTERNS = {
    "full": FULL,
    "window": Pattern("window", 21),
    "local": Pattern("local", 20),
    "strided": Pattern("strided", 9),
    "fixed": Pattern("fixed", 16, 3),
    "bigbird": Pattern("bigbird", 8, global_count=1, near=1, random=1, seed=5),
}
ROWS = (0, 1), (70, 1), (61, 3), (0, 0), (0, 19), (90, 7), (33, 1)  # (position of the first query, queries)
SMALL = {"SHORT": {"M": 16, "N": 16, "SPLIT": 32}, "LONG": {"M": 16, "N": 16}}
later = pytest.mark.slow


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles and splits in short rows."""
    make_tiles_small(monkeypatch)


def make_tiles_small(monkeypatch):
    for name, blocks in SMALL.items():
        for key in (tables := getattr(kernels, name)):
            monkeypatch.setitem(tables, key, [blocks])


def call(rows=ROWS, h=4, g=2, k=8, v=8, tokens=4, behind=2, dtype=torch.float32, seed=0):
    """q, pages and the rows of a call. Pages are in random order; what belongs to no position is NaN."""
    ends, generator = [first + n for first, n in rows], torch.Generator().manual_seed(seed)
    counts = [-(-end // tokens) for end in ends]
    free = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    q, keys, values = laws.draw(
        (sum(n for _, n in rows) + behind, h, k), (len(free), tokens, g, k), (len(free), tokens, g, v), seed=seed
    )
    used = torch.zeros(len(free), tokens, dtype=torch.bool)
    for row, (count, end) in enumerate(zip(counts, ends)):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        used[table[row, torch.arange(end) // tokens].long(), torch.arange(end) % tokens] = True
    keys[~used], values[~used] = torch.nan, torch.nan
    starts = torch.tensor([0, *(n for _, n in rows)]).cumsum(0).to(torch.int32)
    positions = torch.cat([*(torch.arange(first, first + n) for first, n in rows), torch.zeros(behind).long()])
    tensors = q.to(dtype), keys.to(dtype), values.to(dtype)
    return [*tensors, *(x.to(laws.DEVICE) for x in (table, starts, positions))]


def numbers(given, changed=None, **options):
    """The kernels' numbers are at most twice as far from float64 as the definition's; `changed`: what they get."""
    sinks = {name: x for name, x in options.items() if name == "sinks"}
    wide = [x.double() if x.is_floating_point() else x for x in given]
    want = pages.reference(*wide, **options | {name: x.double() for name, x in sinks.items()})
    got = pages.paged_attention(*(changed or given), impl="triton", **options)
    assert got.dtype == given[0].dtype and not got[int(given[4][-1]) :].any()
    laws.at_most_twice("result", got, pages.reference(*given, **options), want)
    return got


@pytest.mark.parametrize("name", ["full", *(pytest.param(p, marks=later) for p in [*PATTERNS][1:])])
def test_numbers(name, small_tiles):
    numbers(call(), pattern=PATTERNS[name])


def options_of(h):
    return {"scale": -0.3, "cap": 2.0, "sinks": torch.linspace(-3.0, 4.0, h, device=laws.DEVICE)}


SIZES = {
    "values of another size": ({"k": 8, "v": 20, "tokens": 5}, {}),
    "a size that is no power of two": ({"k": 24, "v": 24, "dtype": torch.bfloat16}, options_of(4)),
    "one key head": ({"h": 5, "g": 1, "tokens": 16, "dtype": torch.float16}, {"pattern": PATTERNS["window"]}),
    "many queries of a head": ({"h": 40, "g": 2, "k": 16, "v": 16, "rows": ROWS[:3]}, options_of(40)),
    "a head of its own": ({"h": 2, "g": 2, "k": 3, "v": 1, "tokens": 1}, options_of(2)),
}
LATER = "many queries of a head", "a head of its own"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[later] * (name in LATER or name.startswith(("a size", "values")))) for name in SIZES],
)
def test_sizes(name, small_tiles):
    sizes, options = SIZES[name]
    numbers(call(**sizes), **options)


@pytest.mark.parametrize("rank", [16, pytest.param(20, marks=later)])
def test_latents_are_keys_and_values(rank, small_tiles):
    """Of a rank that is a power of two they are read once."""
    q, latents, _, *rows = call(h=6, g=1, k=rank + 8)
    numbers([q, latents, latents[..., :rank], *rows], scale=0.2)


HEADS = [
    (64, 64, 2, 1, torch.bfloat16),
    (128, 128, 8, 1, torch.float32),
    (256, 96, 1, 1, torch.bfloat16),
    (576, 512, 16, 1, torch.bfloat16),
]


@pytest.mark.parametrize("k, v, h, g, dtype", [HEADS[0], *(pytest.param(*sizes, marks=later) for sizes in HEADS[1:])])
def test_tiles_of_gpus(k, v, h, g, dtype):
    given = call(((300, 1), (20, 80 if v < 512 else 6)), h=h, g=g, k=k, v=v, tokens=16, dtype=dtype)
    if v == 512:
        given[2] = given[1][..., :v]
    numbers(given)


def row_of(given, row):
    """The call of one row alone, with a table of its pages alone."""
    q, keys, values, table, starts, positions = given
    start, stop = starts[row : row + 2].tolist()
    width = -(-(int(positions[stop - 1]) + 1) // keys.shape[1])
    alone = torch.tensor([0, stop - start], dtype=torch.int32, device=q.device)
    return [q[start:stop], keys, values, table[row : row + 1, :width], alone, positions[start:stop]], (start, stop)


@pytest.mark.parametrize("name", ["full", *(pytest.param(p, marks=later) for p in ("window", "bigbird"))])
def test_a_row_alone_has_the_bits_of_the_batch(name, small_tiles):
    given, options = call(dtype=torch.bfloat16), {"pattern": PATTERNS[name], "sinks": options_of(4)["sinks"]}
    run = functools.partial(pages.paged_attention, impl="triton", **options)
    batch = run(*given)
    for row, (_, count) in enumerate(ROWS):
        if count:
            alone, (start, stop) = row_of(given, row)
            assert_same(run(*alone), batch[start:stop])


def test_a_wrong_page_is_found(small_tiles):
    given = call(ROWS[:3])
    wrong = [x.clone() for x in given]
    wrong[3][1, 3] = given[3][1, 4]
    numbers(given)
    with pytest.raises(AssertionError, match=r"error .* above"):
        numbers(given, wrong)


@later
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3"])
def test_codes_are_read_with_their_scales(kind, small_tiles):
    """As near to float64 as twice what plain torch is, for latents of two parts and for keys and values."""
    for g, options in ((2, options_of(4)), (1, {"scale": 0.2})):
        q, k, v, *rows = call(ROWS[1:], g=g, k=24)
        (k, k_scale), (v, v_scale) = (quantize(x.nan_to_num(), kind, x.shape[-1]) for x in (k, v))
        if g == 1:
            v, v_scale = k[..., :16], k_scale
        wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        given = [x.double() * scale for x, scale in ((k, k_scale), (v, v_scale))]
        want = pages.reference(q.double(), *given, *rows, **wide)
        got = pages.paged_attention(q, k, v, *rows, scales=(k_scale, v_scale), impl="triton", **options)
        laws.at_most_twice("codes", got, pages.reference(q, k, v, *rows, scales=(k_scale, v_scale), **options), want)


def test_far_positions(small_tiles):
    """At the last position that there may be, a window is what it is at a small one; a page serves all."""
    tokens, far = 1 << 12, kernels.MAX_POSITION
    q, k, v, *_ = call(((0, 1),), tokens=tokens, behind=0)
    k, v = (torch.randn(1, *x.shape[1:], device=laws.DEVICE) for x in (k, v))
    starts = torch.tensor([0, 1], dtype=torch.int32, device=laws.DEVICE)

    def last(positions):
        table = torch.zeros(1, positions // tokens, dtype=torch.int32, device=laws.DEVICE)
        at = torch.tensor([positions - 1], device=laws.DEVICE)
        return pages.paged_attention(q, k, v, table, starts, at, pattern=Pattern("window", 40), impl="triton")

    assert_same(last(far), last(tokens))


def test_rows_without_queries():
    given = call(((0, 0), (0, 0)), behind=3)
    assert not pages.paged_attention(*given, impl="triton").any()
    q, k, v, table, starts, positions = call()
    for empty in (
        (q[:0], k, v, table, starts * 0, positions[:0]),
        (q, k, v, table[:0], starts[:1], positions),
        (q, k, v, table[:, :0], starts * 0, positions),
    ):
        assert_same(pages.paged_attention(*empty, impl="triton"), torch.zeros_like(empty[0]))


def test_what_it_does_not_take():
    given = call(ROWS[:2])
    if laws.INTERPRETED:
        said = registry.explain("paged_attention", *given).reasons["triton"]
        assert said == "interpreted, for checking numbers alone"
    q, k, v, table, *rows = given
    far = table[:1, :1].expand(1, 2**28 + 1)
    for changed, of_rows, reason in (
        ((q, k.to(torch.int8), v.to(torch.int8)), table, "it takes three of .*, or codes with scales"),
        ((q.double(), k, v), table, "the dtypes are torch.float64, torch.float32 and torch.float32"),
        ((q, k.mT.contiguous().mT, v), table, "do not lie side by side"),
        ((q, k, v.repeat(1, 1, 1, 65)), table, "keys up to 576 and values up to 512"),
        ((q, k, v), far, "the pages of a row have more than"),
        ((q.clone().requires_grad_(), k, v), table, "it has no gradient"),
    ):
        with pytest.raises(ValueError, match=f"impl='triton' does not serve this call: .*{reason}"):
            pages.paged_attention(*changed, of_rows, *rows, impl="triton")
