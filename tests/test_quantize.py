"""Block quantisation: the kernels' bits are the reference's; the reference's errors are within their bounds, and
unbiased by chance."""

import kernel_laws as laws
import pytest
import torch
from close import assert_close, assert_same
from torch.fx.experimental.proxy_tensor import make_fx

from fzero.core import have_compiler, prng
from fzero.kernels import KINDS, dequantize, empty_codes, quantize, quantize_codes, registry
from fzero.kernels import quantize as file
from fzero.kernels.quantize_codes import Quantized

KEY = prng.key(2**40 + 11, laws.DEVICE)
HALVES = {
    "int8": 0.5,
    "int4": 0.5,
    "fp8_e4m3": 2.0**-4,
    "fp8_e5m2": 2.0**-3,
}  # half a step: of the scale, or of the number
every_kind = pytest.mark.parametrize("kind", KINDS)
every_numeric_kind = pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.levels])


def roundings(kind, **key):
    """The options of every way in which a kind rounds."""
    return ({},) if KINDS[kind].levels else ({}, key)


def draw(*shape, seed=0, dtype=torch.float32):
    """Values whose blocks have very different sizes."""
    x, sizes = laws.draw(shape, shape[-1:], seed=seed)
    return (x * (3.0 * sizes).exp()).to(dtype)


def bits(q):
    """Both parts, the codes as bytes, as assert_same compares them."""
    return [q.data.contiguous().view(torch.uint8), q.scale]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float32, device=laws.DEVICE)


@every_kind
@pytest.mark.parametrize(
    ("shape", "block", "first", "dtype"),
    [
        ((2, 37), 16, 2**33 + 4, torch.float32),
        ((3, 16), 16, 5, torch.bfloat16),
        ((130,), 64, 4, torch.float16),
        ((2, 1, 64), 32, 8, torch.float32),
        ((3, 1), 16, 0, torch.float32),
        ((4, 0), 32, 0, torch.float32),
    ],
    ids=str,
)
def test_kernels_give_the_bits_of_the_reference(kind, shape, block, first, dtype):
    x = draw(*shape, dtype=dtype)
    for options in roundings(kind, key=KEY, first=first):
        got, expected = (quantize.quantize(x, kind, block, impl=impl, **options) for impl in ("triton", "reference"))
        assert_same(bits(got), bits(expected))
        assert got.data.dtype == expected.data.dtype
    out, expected = (dequantize(got, kind, block, dtype, shape[-1], impl=impl) for impl in ("triton", "reference"))
    assert_same(out, expected)
    parts = [quantize.quantize(draw(*shape, seed=seed), kind, block) for seed in (1, 2, 3)]
    data, scale = (
        torch.stack([p.data.view(torch.uint8) for p in parts]).view(got.data.dtype),
        torch.stack([p.scale for p in parts]),
    )
    total, expected = (
        quantize.dequantize_sum_requantize(data, scale, kind, block, shape[-1], **options, impl=impl)
        for impl in ("triton", "reference")
    )
    assert_same(bits(total), bits(expected))


@every_kind
@pytest.mark.parametrize("stochastic", [False, True])
def test_kernels_on_hard_numbers(kind, stochastic):
    if stochastic and KINDS[kind].levels:
        pytest.skip(f"{kind} goes to the nearest level")
    # Every kind of number: ties, subnormal, largest, not finite; and each code's own value.
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-149
    blocks = [
        tensor(*range(-7, 9)) / 2,
        tensor(*[0.0, -0.0] * 8),
        tensor(*range(16)) * smallest,
        tensor(*range(16)) * 2.0**-128,
        tensor(*range(-15, 1)) / 15 * largest,
        tensor(1.0, float("inf"), *range(14)),
        tensor(float("nan"), *range(15)),
        tensor(1.0, -float("inf"), float("nan"), *range(13)),
        tensor(*[2.0**-i for i in range(16)]),
        tensor(*[-(1.0 + 2.0**-i) for i in range(16)]),
        tensor(*[448.0, 2.0**-6, 2.0**-7, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 464.0 / 448, 0.0] * 2),
    ]
    x = torch.stack(blocks)
    options = {"key": KEY} if stochastic else {}
    got, expected = (quantize.quantize(x, kind, 16, impl=impl, **options) for impl in ("triton", "reference"))
    assert_same(bits(got), bits(expected))
    out, expected = (dequantize(got, kind, 16, impl=impl) for impl in ("triton", "reference"))
    assert_same(out.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    assert out.isnan().sum(-1).tolist() == [0] * 5 + [16] * 3 + [0] * 3
    zeros = bits(quantize.quantize(torch.zeros_like(x[:3]), kind, 16))[0]
    assert got.scale.squeeze(-1)[5:8].tolist() == [float("inf")] * 3 and torch.equal(bits(got)[0][5:8], zeros)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_every_code_of_float8_is_read_as_torch_reads_it(kind):
    codes = torch.arange(256, dtype=torch.uint8, device=laws.DEVICE).view(KINDS[kind].dtype)
    out = dequantize(Quantized(codes, tensor(1.0)), kind, 256, impl="triton")
    expected = codes.float()
    assert_same(out.isnan(), expected.isnan())
    out, expected = (t.nan_to_num(nan=-1.0) for t in (out, expected))
    assert_same([out, 1.0 / out], [expected, 1.0 / expected])  # with the sign of 0


def test_written_out():
    x = tensor(0.5, 1.5, -2.5, 127.0, 0.2, -0.1, 0.0)
    q = quantize.quantize(x, "int8", 4)
    assert q.data.tolist() == [0, 2, -2, 127, 127, -64, 0]  # ties to even
    assert_same(q.scale, torch.stack((tensor(1.0), tensor(0.2) / tensor(127.0)), -1)[0])
    q = quantize.quantize(tensor(1.0, -7.0, 2.5, 3.5, -1.0), "int4", 4)
    assert q.data.tolist() == [0x91, 0x42, 0x09] and q.scale.tolist() == [1.0, float(tensor(1.0) / 7)]
    assert_close(dequantize(q, "int4", 4, size=5), tensor(1.0, -7.0, 2.0, 4.0, -1.0), rtol=1e-6)
    assert dequantize(q, "int4", 4, size=5).shape == (5,) and quantize.quantize(x, "int4", 4).data.shape == (4,)
    q = quantize.quantize(tensor(448.0, 1.0, 1.0625, 1.1875, -(2.0**-9), 2.0**-10), "fp8_e4m3", 8)
    assert q.data.float().tolist() == [448.0, 1.0, 1.0, 1.25, -(2.0**-9), 0.0] and q.scale.tolist() == [1.0]


def test_no_block_has_elements_of_two_rows():
    x = draw(3, 20)
    for kind in KINDS:
        whole = quantize.quantize(x, kind, 16)
        rows = [quantize.quantize(row, kind, 16) for row in x]
        assert whole.scale.shape == (3, 2)
        assert_same(bits(whole), [torch.stack(parts) for parts in zip(*map(bits, rows))])


@every_numeric_kind
@pytest.mark.parametrize("stochastic", [False, True])
def test_errors_are_within_half_a_step(kind, stochastic):
    # By chance within one. A step of a float8 is a part of the number, or of its smallest normal number.
    x = torch.cat([draw(64, 250), draw(4, 250) * 2.0**-140])
    q = quantize.quantize(x, kind, 32, key=KEY if stochastic else None)
    scale = q.scale.repeat_interleave(32, -1)[..., :250]
    error = (dequantize(q, kind, 32, size=250) - x).abs()
    step = scale if kind.startswith("int") else torch.maximum(x.abs(), scale * 2.0 ** KINDS[kind].lowest)
    assert (error <= HALVES[kind] * step * (2 if stochastic else 1) * 1.0001).all()
    assert error.max() > 0


@every_numeric_kind
def test_chance_has_no_bias(kind):
    # The largest of each block makes its scale 1; values lie between two codes, below the smallest too.
    value = tensor(0.3, -0.3, 1.03, -5.9, 2.0**-11, -3 * 2.0**-19, 1.0, 0.0)
    x = value.repeat(1 << 14, 1)
    x = torch.cat((x, torch.full_like(x, KINDS[kind].largest)), -1)
    mean = dequantize(quantize.quantize(x, kind, 16, key=KEY), kind, 16)[:, :8].double().mean(0)
    nearest = dequantize(quantize.quantize(x, kind, 16), kind, 16)[0, :8].double()
    step = torch.ones(8, dtype=torch.float64, device=laws.DEVICE)
    if KINDS[kind].mantissa:
        step = 2.0 ** (value.double().abs().log2().floor().clamp(min=KINDS[kind].lowest) - KINDS[kind].mantissa)
    chance = (value / step) - (value / step).floor()
    error = (mean - value.double()).abs() / step
    assert (error <= 5.0 * (chance * (1 - chance) / len(x)).sqrt()).all()
    assert ((nearest - value) / step).abs().max() > 0.1  # which rounding to nearest would not pass


@every_numeric_kind
def test_a_part_is_rounded_as_in_the_whole(kind):
    x = draw(96)
    for first in (16, 32):
        part = quantize.quantize(x[first:], kind, 16, key=KEY, first=first)
        whole = bits(quantize.quantize(x, kind, 16, key=KEY))
        assert_same(bits(part), [whole[0][first * whole[0].numel() // 96 :], whole[1][first // 16 :]])


@every_kind
def test_the_sum_is_in_order_of_the_ranks(kind):
    parts = [quantize.quantize(draw(40, seed=seed), kind, 16) for seed in range(5)]
    total = sum((dequantize(p, kind, 16) for p in parts[1:]), start=dequantize(parts[0], kind, 16))
    data, scale = (
        torch.stack([bits(p)[0] for p in parts]).view(parts[0].data.dtype),
        torch.stack([p.scale for p in parts]),
    )
    assert_same(
        bits(quantize.dequantize_sum_requantize(data, scale, kind, 16)), bits(quantize.quantize(total, kind, 16))
    )


def test_parts_far_apart():
    far = laws.far_apart(4, 16, torch.int8, apart=(1 << 30) + 8)  # below 2^31, and multiples of it beyond
    far.copy_(torch.arange(64).reshape(4, 16))
    scale, out = torch.ones(4, 1, device=laws.DEVICE), empty_codes((16,), "int8", 16, laws.DEVICE)
    constants = {"COUNT": 4, "KIND": "int8", "STOCHASTIC": False, "ALIGNED": True, "FLAT": True, "ROWS": 1, "BLOCK": 16}
    file._sum_requantize[(1,)](far, scale, far.stride(0), scale, 0, *out, 16, 1, **constants)
    assert_same(bits(Quantized(*out)), bits(quantize.quantize(far.float().sum(0), "int8", 16)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_kind
def test_more_elements_than_2_to_the_31(kind):
    x = torch.zeros((1 << 31) + 96, dtype=torch.bfloat16, device=laws.DEVICE)
    x[-96:] = draw(96)
    q = quantize.quantize(x, kind, 64, impl="triton")
    end = quantize.quantize(x[-160:], kind, 64)
    assert_same([q.data[-end.data.numel() :].view(torch.uint8), q.scale[-3:]], bits(end))
    assert_same(dequantize(q, kind, 64, impl="triton")[-160:], dequantize(end, kind, 64))


def test_strides():
    x = draw(2, 40)
    apart = torch.stack((x, x), -1)[..., 0]
    q = quantize.quantize(x, "int8", 16)
    assert_same(bits(quantize.quantize(apart, "int8", 16, impl="triton")), bits(q))
    apart = Quantized(*(torch.stack((t, t), -1)[..., 0] for t in q))
    assert_same(dequantize(apart, "int8", 16, impl="triton"), dequantize(q, "int8", 16))


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_no_gradient(impl):
    x = draw(32).requires_grad_()
    q = quantize.quantize(x, "int8", 16, impl=impl)
    scale = q.scale.clone().requires_grad_()
    out = dequantize(Quantized(q.data, scale), "int8", 16, impl=impl)
    total = quantize.dequantize_sum_requantize(q.data[None], scale[None], "int8", 16, impl=impl)
    assert not any(t.requires_grad for t in (*q, out, *total))
    grad = torch.func.grad(
        lambda t: (t * dequantize(quantize.quantize(t, "int8", 16, impl=impl), "int8", 16, impl=impl)).sum()
    )(x.detach())
    assert_same(grad, out)


def test_traced():
    def there_and_back(x, key):
        return dequantize(
            quantize.quantize(x, "fp8_e4m3", 16, key=key, impl="triton"), "fp8_e4m3", 16, torch.bfloat16, impl="triton"
        )

    graph = make_fx(there_and_back, tracing_mode="fake")(draw(3, 32), KEY)
    assert [n.target for n in graph.graph.nodes if "fzero" in str(n.target)] == [
        torch.ops.fzero.quantize.default,
        torch.ops.fzero.dequantize.default,
    ]
    assert_same(graph(draw(3, 32), KEY), there_and_back(draw(3, 32), KEY))


def test_what_it_costs():
    x = torch.empty(8, 64, dtype=torch.bfloat16, device="meta")
    q = Quantized(torch.empty(8, 32, dtype=torch.uint8, device="meta"), torch.empty(8, 2, device="meta"))
    assert registry.explain("quantize", x, "int4", 32).bytes == 8 * (64 * 2 + 32 + 8)
    assert registry.explain("dequantize", q, "int4", 32, torch.bfloat16).bytes == 8 * (64 * 2 + 32 + 8)
    assert (
        registry.explain(
            "dequantize_sum_requantize", q.data[None].expand(3, -1, -1), q.scale[None].expand(3, -1, -1), "int4", 32
        ).bytes
        == 4 * 8 * 40
    )
    if laws.DEVICE == "cpu":
        given = quantize.quantize(draw(32), "int8", 16)
        assert registry.explain("dequantize", given, "int8", 16).chosen == "reference"


def test_what_it_refuses():
    x = draw(3, 20)
    q = quantize.quantize(x, "int8", 16)
    with pytest.raises(ValueError, match=r"kind is 'int7' .did you mean int8"):
        quantize.quantize(x, "int7", 16)
    with pytest.raises(ValueError, match="block is 15; it must be at least 1, and even for int4"):
        quantize.quantize(x, "int4", 15)
    with pytest.raises(
        ValueError, match=r"quantize: impl='triton' does not serve this call: the dtype is torch.float64"
    ):
        quantize.quantize(x.double(), "int8", 16, impl="triton")
    with pytest.raises(ValueError, match="rounding is stochastic; nf4 goes to the nearest level"):
        quantize.quantize(x, "nf4", 16, key=KEY, impl="triton")
    with pytest.raises(ValueError, match="powers of two from 16 to 8192"):
        quantize.quantize(x, "int8", 24, impl="triton")
    for impl in ("triton", "reference"):
        with pytest.raises(ValueError, match=r"data is torch.int8 and scale torch.float32; they must be torch.uint8"):
            dequantize(q, "int4", 16, impl=impl)
        with pytest.raises(ValueError, match=r"size 20 in blocks of 32 makes the last dims 20 and 1"):
            dequantize(q, "int8", 32, impl=impl)
        with pytest.raises(ValueError, match=r"size 19 in blocks of 16 makes the last dims 19 and 2"):
            quantize.dequantize_sum_requantize(q.data[None], q.scale[None], "int8", 16, 19, impl=impl)


# ---- in C++, on a CPU ------------------------------------------------------------------------------------------------

CPP = pytest.mark.skipif(not have_compiler(), reason="no C++ compiler")


@CPP
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", quantize_codes.TYPES)
@pytest.mark.parametrize(("shape", "block"), [((5, 37), 16), ((2, 3, 128), 128), ((1, 70001), 64), ((3, 0), 32)])
def test_the_c_plus_plus_gives_the_bits_of_the_reference(kind, dtype, shape, block):
    def both(op, *args):
        return (op(*args, impl=impl) for impl in ("cpp", "reference"))

    x = draw(*shape, dtype=dtype).cpu()
    x.view(-1)[: 4 * block : block // 2] = 0.0
    if x.numel() > 3 * block:
        x.view(-1)[0], x.view(-1)[block], x.view(-1)[2 * block + 1] = torch.inf, torch.nan, 2.0**-149
    got, expected = both(quantize.quantize, x, kind, block)
    assert_same(bits(got), bits(expected))
    found, wanted = both(dequantize, got, kind, block, dtype, shape[-1])
    assert found.dtype == dtype
    assert_same(found.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))
    assert_same(found.isnan(), wanted.isnan())
    data, scale = (torch.stack(parts) for parts in zip(got, got, quantize.quantize(x.flip(0), kind, block)))
    got, expected = both(quantize.dequantize_sum_requantize, data, scale, kind, block, shape[-1])
    assert_same(bits(got), bits(expected))


@CPP
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", quantize_codes.TYPES)
@pytest.mark.parametrize("spread", [1, 8, 255])
def test_the_c_plus_plus_gives_the_bits_of_the_reference_for_any_numbers(kind, dtype, spread):
    """Exponents of a block differ by less than `spread`, from 2^-149 to infinity; the other bits are any."""
    generator = torch.Generator().manual_seed(spread)
    words = torch.randint(-(2**31), 2**31, (1, 2048, 32), generator=generator)
    largest = torch.randint(0, 256, (1, 2048, 1), generator=generator)
    exponent = (largest - torch.randint(0, spread, words.shape, generator=generator)).clamp(min=0)
    x = ((words & ~(0xFF << 23)) | (exponent << 23)).to(torch.int32).view(torch.float32).view(1, -1).to(dtype)
    assert_same(*(bits(quantize.quantize(x, kind, 32, impl=impl)) for impl in ("cpp", "reference")))


@CPP
def test_the_c_plus_plus_serves_many_numbers_on_a_cpu():
    assert registry.explain("quantize", torch.ones(1 << 14), "int4", 128).chosen == "cpp"
    few = registry.explain("quantize", torch.ones(128), "int4", 128)
    assert few.chosen == "reference" and "of 128 numbers" in few.reasons["cpp"]
    for x, options, words in (
        (torch.ones(4), {"kind": "int4", "block": 16384}, "even blocks of up to 8192"),
        (torch.ones(4), {"kind": "int8", "block": 16, "key": KEY.cpu()}, "rounding is stochastic"),
        (torch.ones(4, dtype=torch.float64), {"kind": "int8", "block": 16}, "the dtype is torch.float64"),
    ):
        with pytest.raises(ValueError, match=words):
            quantize.quantize(x, **options, impl="cpp")


@CPP
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [*quantize_codes.TYPES])
def test_no_member_of_the_family_is_without_a_form(kind, dtype):
    """On a CPU "auto" takes a form in one pass for every kind and dtype; a reference is 10 to 100 times as slow."""
    x = torch.ones(2, 1 << 14, dtype=dtype)
    q = quantize.quantize(x, kind, 64)
    assert registry.explain("quantize", x, kind, 64).chosen == "cpp"
    assert registry.explain("dequantize", q, kind, 64, dtype).chosen == "cpp"
    data, scale = (torch.stack((t, t)) for t in (q.data.view(torch.uint8), q.scale))
    assert registry.explain("dequantize_sum_requantize", data.view(q.data.dtype), scale, kind, 64).chosen == "cpp"


@CPP
def test_every_float16_is_read_and_written_as_torch_does():
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    halves = codes.view(torch.float16)[torch.isfinite(codes.view(torch.float16))]
    for block in (1, 2):  # a block of one number is its own scale
        x = halves if block == 1 else torch.stack((halves, torch.full_like(halves, 1.0)), -1).flatten()
        got, expected = (quantize.quantize(x, "int8", block, impl=impl) for impl in ("cpp", "reference"))
        assert_same(bits(got), bits(expected))
        q = Quantized(got.data, got.scale * 0.37)
        assert_same(*(dequantize(q, "int8", block, torch.float16, impl=impl) for impl in ("cpp", "reference")))
    factors = torch.tensor([2.0**-25, 1.5 * 2.0**-24, 2.0**-14, 65504.0, 65519.0, 65520.0, 1e9, 3e38])
    q = Quantized(torch.tensor([1, -1, 3, 127] * 8, dtype=torch.int8).reshape(8, 4), factors[:, None])
    assert_same(*(dequantize(q, "int8", 4, torch.float16, impl=impl) for impl in ("cpp", "reference")))
