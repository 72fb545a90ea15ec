"""Rotary embedding: every law of a kernel, layouts, far positions, views of one projection, and the published
formula."""

import cmath
import math

import kernel_laws as laws
import pytest
import torch
from close import assert_close, assert_same
from einops import rearrange

from fzero.kernels import rope as file
from fzero.kernels import rope_frequencies, rope_qk
from fzero.kernels.rope import rope
from fzero.models import RopeScaling

every_layout = pytest.mark.parametrize("layout", file.LAYOUTS)


def angles(x, rows=False):
    """Positions [T] (or [B, T]) in no order, and frequencies [K / 2], for x [B, T, H, K]."""
    b, t, _, k = x.shape
    positions = torch.arange(b * t if rows else t, device=x.device) * 61 % 97 + 3
    return positions.reshape((b, t) if rows else t), rope_frequencies(k, 1e4, None, x.device)


def form(layout, rows=False):
    return lambda impl, x: rope(x, *angles(x, rows), layout=layout, impl=impl)


def form_qk(layout):
    return lambda impl, q, k: rope_qk(q, k, *angles(q), layout=layout, impl=impl)


@every_layout
def test_every_law(layout):
    laws.every_law(form_qk(layout), laws.draw((1, 2, 9, 6), (1, 2, 1, 6)))


@every_layout
@pytest.mark.parametrize("shape", [(2, 2, 2, 2), (1, 1, 3, 34)], ids=str)
def test_one_alone(shape, layout):
    (x,) = laws.draw(shape)
    for dtype in (torch.float32, torch.bfloat16):
        laws.numbers(form(layout, rows=shape[0] > 1), [x], dtype)
    laws.strides(form(layout), [x])


@every_layout
def test_derivatives(layout):
    laws.derivatives(form_qk(layout), laws.draw((1, 3, 2, 4), (1, 3, 1, 4)))


@every_layout
def test_half_precision(layout):
    laws.numbers(form(layout), laws.draw((1, 3, 2, 10)), torch.float16)


@every_layout
@pytest.mark.parametrize("shape", [(0, 3, 2, 4), (2, 0, 2, 4), (2, 3, 0, 4)], ids=str)
def test_none(shape, layout):
    x = torch.zeros(shape, device=laws.DEVICE)
    assert rope(x, *angles(x), layout=layout, impl="triton").shape == shape


@every_layout
def test_together_is_one_by_one(layout):
    q, k = laws.draw((2, 5, 4, 6), (2, 5, 1, 6), dtype=torch.float32)
    for impl in ("triton", "reference"):
        assert_same(list(form_qk(layout)(impl, q, k)), [form(layout)(impl, q), form(layout)(impl, k)])


@every_layout
def test_views_of_one_projection_are_read_in_place(layout, monkeypatch):
    (qkv,) = laws.draw((2, 3, 8 * 6), dtype=torch.float32)
    q, k = (rearrange(t, "b t (h k) -> b t h k", k=6) for t in (qkv[..., :24], qkv[..., 24:36]))
    expected = form_qk(layout)("triton", q.clone(), k.clone())
    launch, read = file.tuning.launch, []

    def record(kernel, grid, given, *args, **options):
        read.extend(given[:2])
        launch(kernel, grid, given, *args, **options)

    monkeypatch.setattr(file.tuning, "launch", record)
    out = form_qk(layout)("triton", q, k)
    assert [t.data_ptr() for t in read] == [q.data_ptr(), k.data_ptr()]
    assert_same(list(out), list(expected))
    assert all(t.is_contiguous() for t in out)


@every_layout
@pytest.mark.parametrize("dim", range(4))
def test_far_apart(dim, layout):
    # Strides below 2^31 whose multiples are beyond.
    near = laws.draw((4, 4), dtype=torch.bfloat16)[0]
    far = laws.far_apart(4, 4, torch.bfloat16, apart=(1 << 30) + 8)
    far.copy_(near)
    expand = ("r k -> r 1 1 k", "r k -> 1 r 1 k", "r k -> 1 1 r k", "r k -> k 1 1 r")[dim]
    x, expected = (form(layout)("triton", rearrange(t, expand)) for t in (far, near))
    assert_same(x, expected)


@every_layout
def test_written_out(layout):
    # (a + i b) e^(i w) for each pair, one by one.
    (x,) = laws.draw((2, 3, 2, 6))
    positions, frequencies = angles(x, rows=True)
    out = rope(x, positions, frequencies, layout=layout)
    for b, t, h, i in torch.cartesian_prod(*map(torch.arange, (2, 3, 2, 3))).tolist():
        first, second = (i, i + 3) if layout == "half" else (2 * i, 2 * i + 1)
        w = float(positions[b, t].float() * frequencies[i])  # as a float32
        turned = complex(x[b, t, h, first], x[b, t, h, second]) * cmath.exp(1j * w)
        assert_close(out[b, t, h, [first, second]], torch.tensor([turned.real, turned.imag]), atol=1e-6)


def test_layouts_are_a_permutation_of_each_other():
    (x,) = laws.draw((1, 4, 2, 10))
    given = angles(x)
    apart = rope(x, *given, layout="interleaved")
    x, apart = (rearrange(t, "b t h (i two) -> b t h (two i)", two=2) for t in (x, apart))
    assert_same(apart, rope(x, *given))


@every_layout
def test_products_depend_on_the_distance_alone(layout):
    q, k = laws.draw((1, 1, 1, 8), (1, 1, 1, 8))
    frequencies = rope_frequencies(8, 1e4, None, laws.DEVICE)

    def score(i, j):
        at = (torch.tensor([n], device=laws.DEVICE) for n in (i, j))
        turned = (rope(x, position, frequencies, layout=layout) for x, position in zip((q, k), at))
        return (next(turned) * next(turned)).sum()

    assert_close(score(107, 103), score(7, 3), rtol=1e-4)


def test_far_positions():
    # Up to a million: as accurate as torch's own cos and sin of the same float32 angle.
    positions = torch.cat((torch.arange(4), 10 ** torch.arange(1, 7), torch.tensor([-5, 999_999, 123_457]))).to(
        laws.DEVICE
    )
    frequencies = rope_frequencies(32, 5e5, RopeScaling(), laws.DEVICE)
    x = torch.ones((1, len(positions), 1, 32), device=laws.DEVICE)
    x[..., 16:] = 0  # out = (cos, sin)
    angle = (positions.float()[:, None] * frequencies).double()
    out = rope(x, positions, frequencies, impl="triton")[0, :, 0].double()
    assert_close(out, torch.cat((angle.cos(), angle.sin()), -1), atol=1.2e-7)


def test_llama_3_scaling_by_the_published_code():
    def published(k, theta, scaling):
        for i in range(0, k, 2):
            f = 1.0 / theta ** (i / k)
            length = 2 * math.pi / f
            if length < scaling.original_max_len / scaling.high_freq_factor:
                yield f
            elif length > scaling.original_max_len / scaling.low_freq_factor:
                yield f / scaling.factor
            else:
                span = scaling.high_freq_factor - scaling.low_freq_factor
                smooth = (scaling.original_max_len / length - scaling.low_freq_factor) / span
                yield (1 - smooth) * f / scaling.factor + smooth * f

    expected = list(published(128, 5e5, RopeScaling()))
    assert_close(rope_frequencies(128, 5e5, RopeScaling()), torch.tensor(expected), rtol=1e-5)
    assert_close(rope_frequencies(128, 5e5, None)[:8], torch.tensor(expected[:8]), rtol=1e-5)


def test_what_it_refuses():
    (x,) = laws.draw((2, 3, 2, 6))
    positions, frequencies = angles(x)
    for given, options, why in (
        ((x, positions, frequencies), {}, "the dtypes are torch.float64"),
        ((x.float(), positions.float(), frequencies), {}, r"positions are torch.float32 \[3\]"),
        ((x.float(), positions[:2], frequencies), {}, r"integers of shape \[3\] or \[2, 3\]"),
        ((x.float(), positions, frequencies[:2]), {}, "the shapes are"),
        ((x.float(), positions, frequencies.clone().requires_grad_()), {}, "not differentiated"),
        ((x.float(), positions, frequencies), {"layout": "halves"}, "layout is 'halves'"),
    ):
        with pytest.raises(ValueError, match=f"rope: impl='triton' does not serve this call: .*{why}"):
            rope(*given, impl="triton", **options)
    with pytest.raises(ValueError, match=r"layout is 'halve' .did you mean half"):
        rope(x, positions, frequencies, layout="halve")
    with pytest.raises(ValueError, match="heads of size 6 have 3 pairs; there are 2 frequencies"):
        rope(x, positions, frequencies[:2])


@pytest.mark.parametrize("kind", ("yarn", "yarn_whole"))
@pytest.mark.parametrize("low, high, length", ((1.0, 32.0, 4096), (0.7, 5.0, 300), (1.0, 2000.0, 4096)))
def test_yarn_s_frequencies_are_those_of_transformers(kind, low, high, length):
    """Ends of the transition between pairs, which one kind rounds; in the last case the first is below pair 0."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_slow": low, "beta_fast": high}
    rope |= {"original_max_position_embeddings": length, "truncate": kind == "yarn_whole"}
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "max_position_embeddings": 32 * length}
    theirs, factor = utils.ROPE_INIT_FUNCTIONS["yarn"](transformers.LlamaConfig(rope_parameters=rope, **sizes), "cpu")
    scaling = RopeScaling(32.0, low, high, length, kind)
    assert_close(rope_frequencies(64, 150000.0, scaling), theirs, rtol=1e-6)
    assert abs(scaling.score_factor - factor**2) < 1e-12
