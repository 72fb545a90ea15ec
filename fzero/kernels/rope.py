"""Rotary position embedding: rotate each pair of elements of a head by its position times the pair's frequency.

    (a, b) -> (a cos w - b sin w, b cos w + a sin w),   w = position * frequency

The pairs are elements i and i + K/2 of a head ("half", as in Llama's published weights in Hugging Face layout) or 2 i
and 2 i + 1 ("interleaved"). The backward pass is the rotation by -w, and keeps no activation.
Ref: Su et al. 2021,
"RoFormer: enhanced transformer with rotary position embedding", arXiv:2104.09864, equation 34.

Shapes: x [B, T, H, K], positions [T] or [B, T] of an integer dtype, frequencies float32 [K / 2]; for x in float64 they
are float64. w has their dtype, whatever narrower one x has, in order that nearby positions stay apart.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.core.autodiff import INFERENCE, needs_grad
from fzero.core.pytree import nearest
from fzero.kernels import rowwise, tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import Fused, cpp_runs, on_cuda, operator, tl, triton, triton_runs
from fzero.kernels.registry import Form, Op, asked_for, by_device
from fzero.kernels.rope_scaling import RopeScaling

LAYOUTS = ("half", "interleaved")
# A warp for few heads at a time: the angles of a token are then found by few threads, not by each of many again.
CONFIGS = tuning.ConfigTable("_rope")


def _pair_shares(
    half: int, theta: float, scaling: RopeScaling, device: torch.device | None, dtype: torch.dtype
) -> Tensor:
    """The share of its own frequency that each of `half` pairs keeps, by YaRN."""

    def pair(turns: float) -> float:  # the pair that turns so often in the original length
        return half * math.log(scaling.original_max_len / (turns * 2.0 * math.pi)) / math.log(theta)

    low, high = pair(scaling.high_freq_factor), pair(scaling.low_freq_factor)
    if scaling.kind == "yarn_whole":
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    number = torch.arange(half, dtype=dtype, device=device)
    return 1.0 - ((number - low) / (high - low or 0.001)).clamp(0.0, 1.0)


def rope_frequencies(
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    device: torch.device | None = None,
    x: torch.dtype = torch.float32,
) -> Tensor:
    """The angles per position [K / 2], float64 for float64, else float32: theta^(-2 i / K), scaled."""
    dtype = torch.promote_types(x, torch.float32)
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).to(dtype) / head_dim
    frequency = 1.0 / (theta**exponent)
    if scaling is None:
        return frequency
    if scaling.kind != "llama3":
        shares = _pair_shares(head_dim // 2, theta, scaling, frequency.device, dtype)
        return frequency / scaling.factor * (1.0 - shares) + frequency * shares
    wavelength = 2.0 * math.pi / frequency
    smooth = (scaling.original_max_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1.0 - smooth) * frequency / scaling.factor + smooth * frequency
    low = wavelength > scaling.original_max_len / scaling.low_freq_factor
    high = wavelength < scaling.original_max_len / scaling.high_freq_factor
    return torch.where(low, frequency / scaling.factor, torch.where(high, frequency, blended))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """x turned by the angles of these cosines and sines, [.., T, 1, K / 2]."""
    if layout not in LAYOUTS:
        raise ValueError(f"rope: layout is {layout!r}{nearest(layout, LAYOUTS)}; it must be {' or '.join(LAYOUTS)}")
    if x.shape[-1] != 2 * cos.shape[-1]:
        raise ValueError(
            f"rope: heads of size {x.shape[-1]} have {x.shape[-1] / 2:g} pairs; there are {cos.shape[-1]} frequencies"
        )
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if layout == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def _turns(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """(cosines, sines) of the angles of positions, [.., T, 1, K / 2]."""
    angle = (positions.to(frequencies.dtype)[..., None] * frequencies)[..., None, :]
    return angle.cos(), angle.sin()


def rope_reference(x: Tensor, positions: Tensor, frequencies: Tensor, *, layout: str = "half") -> Tensor:
    """x [B, T, H, K] turned: the definition; raises ValueError for a layout that there is not."""
    return _rotate(x, *_turns(positions, frequencies), layout)


def rope_qk_reference(
    q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor, *, layout: str = "half"
) -> tuple[Tensor, Tensor]:
    """q [B, T, H, K] and k [B, T, G, K] turned: the definition."""
    turns = _turns(positions, frequencies)
    return _rotate(q, *turns, layout), _rotate(k, *turns, layout)


QUARTER = tl.constexpr(math.pi / 2)
QUARTERS = tl.constexpr(2 / math.pi)


@triton.jit
def _cos_sin(angle):
    """(cos, sin) of float32 angles, to 1e-7: reduced to +-pi/4 in float64, then polynomials (Cephes)."""
    # The device's own are approximate far from 0, at large positions. Ref: Moshier, Cephes mathematical library,
    # sinf.c.
    # In float32 the product of quarters and pi/2 would be rounded by up to 4e-3 at angle 1e5.
    wide = angle.to(tl.float64)
    quarters = tl.floor(wide * QUARTERS + 0.5)
    r = (wide - quarters * QUARTER).to(tl.float32)
    # By way of int64, in which the quarters of every position fit; only the two lowest bits matter.
    quadrant = quarters.to(tl.int64).to(tl.int32)
    # Minimax polynomials for [-pi/4, pi/4].
    z = r * r
    s = r + r * z * ((z * -1.9515295891e-4 + 8.3321608736e-3) * z - 1.6666654611e-1)
    c = 1.0 - 0.5 * z + z * z * ((z * 2.443315711809948e-5 - 1.388731625493765e-3) * z + 4.166664568298827e-2)
    # A turn by a quarter: (cos, sin) -> (-sin, cos). Quadrants 1 and 3 exchange the two, 1 and 2 negate the cosine, 2
    # and 3 the sine.
    odd = (quadrant & 1) != 0
    cos, sin = tl.where(odd, s, c), tl.where(odd, c, s)
    return tl.where(((quadrant + 1) & 2) != 0, -cos, cos), tl.where((quadrant & 2) != 0, -sin, sin)


@triton.jit
def _rotate_heads(
    X, OUT, head_stride, stride, cos, sin, COUNT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn the COUNT heads of a token, the first at X; at OUT they lie one after the other."""
    pair = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    # HEADS heads at a time, because a tile must be a power of two; heads from COUNT on are masked.
    for start in range(0, COUNT, HEADS):
        head = (start + tl.arange(0, HEADS)[:, None]).to(tl.int64)
        if INTERLEAVED:
            # One load of both elements of the pairs, which lie side by side, so that accesses are wide; split and
            # joined in registers.
            column = tl.arange(0, 2 * BLOCK)[None, :].to(tl.int64)
            mask = (head < COUNT) & (column < 2 * HALF)
            x = tl.load(X + head * head_stride + column * stride, mask=mask, other=0.0).to(tl.float32)
            a, b = tl.split(tl.reshape(x, (HEADS, BLOCK, 2)))
            x = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (HEADS, 2 * BLOCK))
            tl.store(OUT + head * (2 * HALF) + column, x.to(OUT.dtype.element_ty), mask=mask)
        else:
            mask = (head < COUNT) & (pair < HALF)
            # Element `pair` and its partner HALF further; OUT is contiguous, a head having 2 HALF elements.
            source, target = X + head * head_stride, OUT + head * (2 * HALF) + pair
            a = tl.load(source + pair * stride, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(source + (pair + HALF) * stride, mask=mask, other=0.0).to(tl.float32)
            tl.store(target, (a * cos - b * sin).to(OUT.dtype.element_ty), mask=mask)
            tl.store(target + HALF, (b * cos + a * sin).to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _rope(
    Q, K, POSITIONS, FREQUENCIES, OUT_Q, OUT_K, length, q0, q1, q2, q3, k0, k1, k2, k3, p0, p1,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program per token of [rows, length]: it computes the angles once and rotates all heads of q and k. Strides:
    # q0..q3 of q's dims (row, column, head, element), k0..k3 of k's, p0 and p1 of the positions. Outputs are
    # contiguous.
    token = tl.program_id(0).to(tl.int64)
    row = token // length
    column = token - row * length
    # BLOCK is HALF rounded up to a power of two.
    frequency = tl.load(FREQUENCIES + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < HALF, other=0.0)
    cos, sin = _cos_sin(tl.load(POSITIONS + row * p0 + column * p1).to(tl.float32) * frequency)
    # The backward pass turns by -w, which negates the sine alone.
    cos, sin = cos[None, :], (-sin if INVERSE else sin)[None, :]
    q, k = Q + row * q0 + column * q1, K + row * k0 + column * k1
    _rotate_heads(q, OUT_Q + token * (Q_HEADS * HALF * 2), q2, q3, cos, sin, Q_HEADS, HALF, INTERLEAVED, HEADS, BLOCK)
    _rotate_heads(k, OUT_K + token * (K_HEADS * HALF * 2), k2, k3, cos, sin, K_HEADS, HALF, INTERLEAVED, HEADS, BLOCK)


def _grid(tokens: int, config: tuning.Config) -> tuple[int]:
    return (tokens,)


@operator(
    "rope(Tensor[] x, Tensor positions, Tensor frequencies, bool interleaved, bool inverse) -> Tensor[]",
    lambda x, positions, frequencies, interleaved, inverse: [t.new_empty(t.shape) for t in x],
)
def rope_launch(
    x: Sequence[Tensor], positions: Tensor, frequencies: Tensor, interleaved: bool, inverse: bool
) -> list[Tensor]:
    """The one or two tensors x, turned by the angles or minus these, in one pass."""
    out = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in x]
    (rows, length, heads, size), (q, k) = x[0].shape, (x[0], x[-1])
    tokens = rows * length
    if any(t.numel() for t in x):
        half = size // 2
        constants = {
            "Q_HEADS": heads,
            "K_HEADS": k.shape[2] if len(x) == 2 else 0,
            "HALF": half,
            "BLOCK": triton.next_power_of_2(half),
        }
        places = *q.stride(), *k.stride(), *positions.expand(rows, length).stride()
        arguments = q, k, positions, frequencies.contiguous(), out[0], out[-1], length, *places
        shape = (tokens, *constants.values(), interleaved, q.dtype)
        constants |= {"INTERLEAVED": interleaved, "INVERSE": inverse}
        tuning.launch(_rope, functools.partial(_grid, tokens), arguments, CONFIGS, shape=shape, **constants)
    return out


def _select_saved(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(inputs[-2:])


def _fused(name: str, launch: Callable[..., Any], layout: str) -> Fused:
    """The rotation of one tensor or two, which positions and frequencies follow."""
    interleaved = layout == "interleaved"
    return Fused(
        name,
        forward=lambda *inputs: launch(inputs[:-2], *inputs[-2:], interleaved, False),
        backward=lambda saved, grads: launch(grads, *saved, interleaved, True),
        results=2 if name == "rope_qk" else 1,
        select_saved=_select_saved,
    )


def _form(name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
    """The form of an operation by a launcher."""
    fused = {layout: _fused(name, launch, layout) for layout in LAYOUTS}
    return lambda *tensors, layout="half": fused[layout](*tensors)


def _supports(*tensors: Tensor, layout: str = "half") -> str:
    """Why Triton's kernel does not serve a call, "" if it does."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    return _refuse(tensors, layout, dtypes) or triton_runs(*tensors)


def _cpp_supports(*tensors: Tensor, layout: str = "half") -> str:
    return _refuse(tensors, layout, (torch.float32, torch.bfloat16)) or cpp_runs(*tensors)


def _refuse(tensors: Sequence[Tensor], layout: str, dtypes: Sequence[torch.dtype]) -> str:
    *x, positions, frequencies = tensors
    if layout not in LAYOUTS:
        return f"layout is {layout!r}"
    if any(t.dtype not in dtypes or t.dtype != x[0].dtype for t in x):
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"the dtypes are {', '.join(str(t.dtype) for t in x)}; it takes one of {names}"
    batch, length, _, size = x[0].shape if x[0].dim() == 4 else (0, 0, 0, 0)
    if (
        any(t.dim() != 4 or (*t.shape[:2], t.shape[3]) != (batch, length, size) for t in x)
        or frequencies.shape != (size // 2,)
        or size % 2
    ):
        return (
            f"the shapes are {', '.join(str(list(t.shape)) for t in tensors)}; it takes [B, T, H, K], positions, "
            "and [K / 2]"
        )
    if positions.shape not in ((length,), (batch, length)) or positions.is_floating_point():
        return (
            f"positions are {positions.dtype} {list(positions.shape)}; it takes "
            f"integers of shape {[length]} or {[batch, length]}"
        )
    if frequencies.dtype != torch.float32 or needs_grad(frequencies):
        return "frequencies must be float32, and are not differentiated"
    return ""


def _in_generation(*tensors: Tensor, layout: str = "half") -> str:
    return "" if INFERENCE.get() else "in training a compiled block, or the reference, has torch's own cosines"


def _op(name: str, reference: Callable[..., Any]) -> Op:
    triton = Form("triton", _form(name, rope_launch), supports=_supports, prefers=on_cuda)
    in_cpp = _form(name, rowwise.rope_in_cpp)
    return Op(
        name,
        reference,
        triton,
        Form("cpp", in_cpp, _cpp_supports, _in_generation),
        by_device(Form("canonical", in_cpp, _cpp_supports, asked_for), triton),
        flops=lambda *tensors, **_: sum(3 * t.numel() for t in tensors[:-2]),
        bytes=lambda *tensors, **_: sum(2 * t.nbytes for t in tensors[:-2]),
    )


rope = _op("rope", rope_reference)
rope_qk = _op("rope_qk", rope_qk_reference)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    outer = [f"{tensor}{dim}" for tensor in "qk" for dim in range(3)]
    cases = [
        ((32, 8, 128), False, False),
        ((32, 8, 128), True, False),
        ((12, 12, 64), False, True),
        ((8, 0, 96), False, False),
    ]
    for ((heads, kv_heads, size), interleaved, inverse), config in itertools.product(cases, CONFIGS.for_gpu(gpu)):
        constants = {
            "Q_HEADS": heads,
            "K_HEADS": kv_heads,
            "HALF": size // 2,
            "BLOCK": triton.next_power_of_2(size // 2),
        }
        constants |= {"INTERLEAVED": interleaved, "INVERSE": inverse, "q3": 1, "k3": 1, "p1": 1}
        types = "POSITIONS:*i64 FREQUENCIES:*fp32 q3:constexpr k3:constexpr p1:constexpr"
        label = f"{LAYOUTS[interleaved]} {heads}+{kv_heads} {size} {config['HEADS']}{' inverse' * inverse}"
        yield build(_rope, label, config, constants, types, aligned=tuple(outer))
