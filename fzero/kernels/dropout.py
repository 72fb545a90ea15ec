"""Dropout of a branch and its sum with the residual stream; the backward pass draws the mask again.

    dropout_add(x, residual) = residual + where(keep, x / (1 - rate), 0)

Element e of the step's global batch is kept where word e % 4 of the Philox4x32-10 block with counter e // 4 is below (1
- rate) 2^32: the mask of `random.bernoulli`, the same however the batch is split (`random.bits`). Nothing is stored for
the backward pass but the key and the index of the first element.
Ref: Srivastava et al. 2014, "Dropout", JMLR 15;
Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3.

Shapes: x and residual [B, ...] of one dtype, key int64 [2], first int64 []. Row b of x holds the elements first + b
row_stride + 0, 1, 2 and so on: where a rank has a range of every row (sequence parallelism), row_stride is the size of
a whole one. The product is rounded to x's dtype, and then the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fzero.core import prng
from fzero.kernels import tuning
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import Fused, on_cuda, operator, tl, triton, triton_runs
from fzero.kernels.registry import Form, Op

CONFIGS = tuning.ConfigTable("_dropout")


def dropout(x: Tensor, rate: float, key: Tensor, first: int | Tensor, row_stride: int | None = None) -> Tensor:
    """x [B, ...] with each element zeroed with probability `rate`, and the others divided by 1 - rate."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout: rate is {rate}; it must be in [0, 1)")
    if rate == 0.0:
        return x
    if row_stride in (None, math.prod(x.shape[1:])) or x.shape[0] < 2:
        mask = prng.bernoulli(key, 1.0 - rate, x.shape, first=first)
    else:
        firsts = first + torch.arange(x.shape[0], device=x.device) * row_stride
        mask = torch.vmap(lambda start: prng.bernoulli(key, 1.0 - rate, x.shape[1:], first=start))(firsts)
    return torch.where(mask, x * (1.0 / (1.0 - rate)), torch.zeros((), dtype=x.dtype, device=x.device))


def dropout_add_reference(
    x: Tensor, residual: Tensor, rate: float, key: Tensor, first: int | Tensor, row_stride: int | None = None
) -> Tensor:
    """residual + dropout(x): the definition."""
    return residual + dropout(x, rate, key, first, row_stride)


@triton.jit
def _words(seed, block):
    # The counter is 64 bits of 128: element numbers beyond 2^32 go on in its second word.
    return tl.philox(seed, block.to(tl.uint32), (block >> 32).to(tl.uint32), 0, 0)


@triton.jit
def _dropout(
    X, R, OUT, KEY, FIRST, n, parts, x_row, r_row, row_stride, limit, scale, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    # Programs are numbered row * parts + part: BLOCK elements of one row from `start` on. `first` is the global index
    # of the first of them.
    row, start = (tl.program_id(0) // parts).to(tl.int64), (tl.program_id(0) % parts).to(tl.int64) * BLOCK
    first = tl.load(FIRST) + row * row_stride + start
    seed = tl.load(KEY) | (tl.load(KEY + 1) << 32)
    # A lane draws two Philox blocks, eight words: in bfloat16 eight elements are the 128 bits that it loads. If first %
    # 4 != 0 the lane's elements begin inside a Philox block: it draws a third one and shifts the words by first % 4.
    block = (first >> 2) + 2 * tl.arange(0, BLOCK // 8)
    a, b, c, d = _words(seed, block)
    e, f, g, h = _words(seed, block + 1)
    # A branch on one number for the whole program, so aligned rows never draw the third block.
    if first & 3 != 0:
        i, j, k, _ = _words(seed, block + 2)
        if first & 1 != 0:
            a, b, c, d, e, f, g, h, i, j = b, c, d, e, f, g, h, i, j, k
        if first & 2 != 0:
            a, b, c, d, e, f, g, h = c, d, e, f, g, h, i, j
    # join appends a dim of 2 at the end, so the first pair joined is the slowest bit: a with e (4 apart), then 2 apart,
    # then 1.
    words = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    mask = tl.reshape(words, [BLOCK]) <= limit.to(tl.uint32)  # a b c d e f g h of the first lane, and so on
    offsets = start + tl.arange(0, BLOCK)
    # The product in float32, rounded to the dtype of x once, before the sum: as the reference does.
    x = tl.load(X + row * x_row + offsets, mask=offsets < n, other=0.0).to(tl.float32) * scale
    x = tl.where(mask, x, 0.0).to(OUT.dtype.element_ty)
    if ADD:
        r = tl.load(R + row * r_row + offsets, mask=offsets < n, other=0.0).to(tl.float32)
        x = (r + x.to(tl.float32)).to(OUT.dtype.element_ty)
    tl.store(OUT + row * n + offsets, x, mask=offsets < n)


def _threshold(rate: float) -> int:
    """The words below this are kept, as in `random.bernoulli`."""
    return round((1.0 - rate) * 2.0**32)


def _rows(t: Tensor) -> Tensor:
    """t as [B, elements of a row], copied only if the strides need it."""
    t = t.reshape(t.shape[0], -1)
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


@operator(
    "dropout_add(Tensor x, Tensor? residual, float rate, Tensor key, Tensor first, int row_stride) -> Tensor",
    lambda x, residual, rate, key, first, row_stride: x.new_empty(x.shape),
)
def dropout_add_kernel(
    x: Tensor, residual: Tensor | None, rate: float, key: Tensor, first: Tensor, row_stride: int
) -> Tensor:
    """The dropout of x, added to the residual if there is one, in one pass over memory."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    if row_stride == math.prod(x.shape[1:]):  # one long row
        x = x.contiguous().view(1, -1)
        residual = None if residual is None else residual.contiguous().view(1, -1)
    x = _rows(x)
    r = x if residual is None else _rows(residual)
    rows, n = x.shape
    config = tuning.config("_dropout", (rows, n, x.dtype), tuning.rows(CONFIGS, x.device)[0], x.device)
    parts = triton.cdiv(n, config["BLOCK"])
    sizes = n, parts, x.stride(0), r.stride(0), row_stride, _threshold(rate) - 1, 1.0 / (1.0 - rate)
    _dropout[(rows * parts,)](x, r, out, key.contiguous(), first, *sizes, ADD=residual is not None, **config)
    return out


def _triton(
    x: Tensor, residual: Tensor, rate: float, key: Tensor, first: int | Tensor, row_stride: int | None = None
) -> Tensor:
    row_stride = math.prod(x.shape[1:]) if row_stride is None else row_stride
    if not isinstance(first, Tensor):
        first = torch.full((), first, dtype=torch.int64, device=x.device)
    return Fused(
        "dropout_add",
        forward=lambda x, residual, key, first: (dropout_add_kernel(x, residual, rate, key, first, row_stride),),
        backward=lambda saved, grads: (dropout_add_kernel(grads[0], None, rate, *saved, row_stride), grads[0]),
        select_saved=lambda tensors, outputs: tensors[2:],
    )(x, residual, key, first)


def _supports(
    x: Tensor, residual: Tensor, rate: float, key: Tensor, first: int | Tensor, row_stride: int | None = None
) -> str:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or residual.dtype != x.dtype:
        return f"the dtypes are {x.dtype} and {residual.dtype}; it takes two of float32, bfloat16 or float16"
    if residual.shape != x.shape or x.dim() == 0:
        return f"the shapes are {list(x.shape)} and {list(residual.shape)}; they must agree, and have a batch"
    if not (0.0 <= rate < 1.0 and _threshold(rate) > 2):
        return f"the rate is {rate}; it must be in [0, 1) and keep something"
    return triton_runs(x, residual, key, *([first] if isinstance(first, Tensor) else []))


def _prefers(
    x: Tensor, residual: Tensor, rate: float, key: Tensor, first: int | Tensor, row_stride: int | None = None
) -> str:
    return on_cuda(x) if rate else "the rate is 0, and the result the plain sum"


dropout_add = Op(
    "dropout_add",
    dropout_add_reference,
    Form("triton", _triton, supports=_supports, prefers=_prefers),
    flops=lambda x, *args, **options: 2 * x.numel(),
    bytes=lambda x, *args, **options: 3 * x.numel() * x.element_size(),
)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    aligned = ("n", "x_row", "r_row", "row_stride")
    for dtype in ("bf16", "fp32"):
        for config in CONFIGS.for_gpu(gpu):
            for add in (False, True):
                label = f"{dtype} {config['BLOCK']} {'forward' if add else 'backward'}"
                types = "KEY:*i64 FIRST:*i64 limit:i64 scale:fp32"
                yield build(_dropout, label, config, {"ADD": add}, types, f"*{dtype}", aligned=aligned)
