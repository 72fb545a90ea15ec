"""Linear layer and cross entropy in one operation that never holds all logits: it works on chunks of tokens.

    loss = cross_entropy(x w^T, targets),   dx = g w,   dw = g^T x

with g the gradient by the logits. For each chunk of tokens it computes logits, loss, g (in the same buffer) and the
chunk's part of dx and dw. Memory besides x, w and their gradients: CHUNK_BYTES of logits (at least one token's), and dw
in float32; for more than FEW_SUMS chunks in float32 or wider another dw, for what its additions round away. Terms and
targets are those of cross_entropy. Ref: Wijmans et al. 2024, "Cut your losses in large-vocabulary
language models", arXiv:2411.09009, section 3; the chunks by tokens.

Shapes: x [N, D], w [V, D], targets int64 [N], mask [N], bool or the tokens' weights; the loss is a float32 (or float64)
scalar.

Under tensor parallelism w is a rank's own rows [V/tp, D] of the vocabulary, as torch.chunk cuts it: the last ranks may
have fewer (`columns` is V then). The rest is the same on all ranks: so is the loss, dw is of the own rows, and dx is
this rank's part of a sum (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3). The ranks exchange each
token's statistics (cross_entropy_rows): one all_gather of float32 [n, 2] for a chunk of n tokens, or [n, 3] with
smoothing; nothing on an axis of size 1.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fzero import core
from fzero.comm.axes import TP
from fzero.comm.collectives import all_gather, psum
from fzero.comm.communicator import Axis
from fzero.core.autodiff import needs_grad
from fzero.core.device import fake_device_of, kind_of
from fzero.core.torch_private import disable_current_modes
from fzero.kernels import rowwise
from fzero.kernels.cross_entropy import (
    DTYPES,
    NONE,
    WRONG,
    LossOptions,
    Terms,
    ValueAndGradients,
    log_sum_exp,
    mark_targets,
    rows_of,
    total_loss,
    weights_of,
    widen,
)
from fzero.kernels.cross_entropy import reference as cross_entropy_reference
from fzero.kernels.custom_operator import cap_logits, on_cuda, rows_run, triton_runs
from fzero.kernels.linear import logits_product
from fzero.kernels.registry import Form, Op, asked_for
from fzero.kernels.rowwise import loss_statistics

# Of logits alive at once. On a CPU 64 MB are 667 tokens in bfloat16 at V = 50257: half as many cost 40% more there with
# AMX, where products are so fast that the sum of dw counts; in float32, a twentieth more.
CHUNK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
# What n tokens a chunk cost beside their 6 n V D operations: the float32 sum of dw is read and written once a chunk, 8
# V D bytes. On an H200 (770 TFLOP/s in bfloat16, 4.3 TB/s) that is 239 / n of the time of the products: 12% at 2048
# tokens, 6% at 4096, 3% at 8192, from where more gains little. Loss and g take 4 n V bytes, 120 / D of that time: 3% at
# D = 4096. At V = 128K, 1 GiB is 4186 tokens.
CHUNK_ROWS = 8192
PRODUCT_BYTES = 32 << 20  # of a product beside the sum that it is added to
FEW_SUMS = 32  # products that are added up with no more error than that of a product's own sums
PART_BYTES = {"cpu": 1 << 18, "cuda": PRODUCT_BYTES}  # of a sum, to which products of many chunks are added: in a cache
WHOLE = Axis(TP)  # of size 1: all of the vocabulary is here


def reference(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    axis: Axis = WHOLE,
    columns: int = 0,
    compiled: bool = True,
    per_token: bool = False,
    **options: Any,
) -> Any:
    """The definition, with all logits; the softmax in float32 or wider.

    axis: the axis that shards the vocabulary; `targets` and `x` are the same on all its ranks, w is this rank's rows,
    and the gradient of x is this rank's part of a sum. columns: the words of the whole vocabulary; 0: each rank has as
    many as w has here. compiled: whether the chunked form runs its softmax compiled.
    per_token: return (the loss, the cross entropy of each token by itself [N], without a gradient: see `token_losses`).
    options: those of LossOptions.
    Communicates: an all_gather of float32 [N], and a psum of float32 [3, N]; nothing on an axis of size 1.
    """
    logits = x @ w.to(x.dtype).T
    if per_token:
        with torch.no_grad():
            losses = token_losses(x, w, targets, mask, axis=axis, columns=columns, **options)
        return reference(x, w, targets, mask, axis=axis, columns=columns, **options), losses
    if axis.size == 1:
        return cross_entropy_reference(logits, targets, mask, **options)
    terms, targets = _terms_of(options, logits.shape[-1], axis, columns, targets, mask)
    y = cap_logits(widen(logits), terms.cap)
    return total_loss(_statistics(y, targets, terms, axis), targets, terms, weights_of(mask))


def _terms_of(
    options: dict[str, Any], number: int, axis: Axis, columns: int, targets: Tensor, mask: Tensor | None
) -> tuple[Terms, Tensor]:
    """(the terms of the `number` columns here, the targets as from `mark_targets`)."""
    loss_options = LossOptions(**options)
    terms = loss_options.terms(*column_range(number, axis, columns))
    return terms, mark_targets(targets, mask, loss_options.ignore_index, terms.columns)


def column_range(number: int, axis: Axis, total: int = 0) -> tuple[int, int]:
    """(the first of the `number` columns of a rank, those of the whole vocabulary), cut as torch.chunk does.

    >>> column_range(128, Axis("tp", 2, 1), 257)
    (129, 257)
    """
    if not total:
        return axis.rank * number, axis.size * number
    max_columns = -(-total // axis.size)
    first = min(total, axis.rank * max_columns)
    if number != min(total - first, max_columns):
        raise ValueError(
            f"rank {axis.rank} of {axis.name}={axis.size} has {number} of {total} columns, and torch.chunk gives it "
            f"{min(total - first, max_columns)}; shard the leaf by the parts of fzero.models.layers.split_words"
        )
    return first, total


def _statistics(y: Tensor, targets: Tensor, terms: Terms, axis: Axis) -> Tensor:
    """The statistics [n, 3] of whole rows from the logits [n, V/tp] of this rank."""
    column = targets - terms.first
    in_range = (targets >= 0) & (column >= 0) & (column < y.shape[-1])
    # The largest logit serves the range of exp only; the loss does not depend on it, and nor does any derivative.
    m = all_gather(y.detach().amax(-1)[None], axis, leaf="head").amax(0)
    at_target = torch.gather(y, -1, torch.where(in_range, column, 0)[:, None])[:, 0]
    at_target = torch.where(in_range, at_target, torch.where(targets == WRONG, math.nan, 0.0))
    exps, at_target, sums = psum(
        torch.stack((torch.exp(y - m[:, None]).sum(-1), at_target, y.sum(-1))), axis, leaf="head"
    )
    return torch.stack((m + torch.log(exps), at_target, sums), -1)


def token_losses(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    axis: Axis = WHOLE,
    columns: int = 0,
    **options: Any,
) -> Tensor:
    """Return the cross entropy of each token by itself, times its weight if the mask has weights, [N] in float32 or
    wider: 0 for one that does not count.

    options: those of LossOptions, but for z_loss and smoothing, which are left out.
    Their sum is `linear_cross_entropy`. The logits of a chunk of tokens are made at a time, and again in the backward
    pass. Communicates as the reference does, for each chunk.

    >>> token_losses(torch.zeros(2, 3), torch.ones(4, 3), torch.tensor([1, -100]))
    tensor([1.3863, 0.0000])
    """
    terms, targets = _terms_of(options, w.shape[0], axis, columns, targets, mask)

    def losses_of(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        return of_tokens(_statistics(cap_logits(widen(x @ w.to(x.dtype).T), terms.cap), targets, terms, axis), targets)

    rows = chunk_rows(x.shape[0], w.shape[0], x.dtype, kind_of(x))
    parts = [
        core.captured_state.remat(losses_of)(x_rows, w, target_rows)
        for x_rows, target_rows in zip(x.split(rows), targets.split(rows))
    ]
    losses, weights = torch.cat(parts) if parts else x.new_zeros(0), weights_of(mask)
    return losses if weights is None else losses * weights.to(losses.dtype)


def of_tokens(statistics: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """The cross entropy [n] of each token, times its weight, from the statistics [n, 3] of whole rows."""
    lse, at_target, _ = statistics.unbind(-1)
    losses = lse - at_target if weights is None else (lse - at_target) * weights.to(lse.dtype)
    return torch.where(targets != NONE, losses, 0.0)


def _gather_statistics(statistics: Tensor, terms: Terms, axis: Axis) -> Tensor:
    """The statistics [n, 3] of whole rows from those of the columns here."""
    if axis.size == 1:
        return statistics
    sent = statistics if terms.smoothing else statistics[:, :2]
    of_ranks = all_gather(sent[None], axis, leaf="head")
    lse, (at_target, *sums) = log_sum_exp(of_ranks[:, :, 0].T)[:, 0], of_ranks[:, :, 1:].sum(0).unbind(-1)
    return torch.stack((lse, at_target, sums[0] if sums else torch.zeros_like(lse)), -1)


@functools.cache
def adds_wide(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether addmm of a GPU adds a product of this dtype to a float32 sum."""
    # By its library it does from PyTorch 2.11 on.
    with disable_current_modes():  # on real tensors, also if all others are fake
        a, sums = (torch.zeros((16, 16), dtype=t, device=device) for t in (dtype, torch.float32))
        try:
            torch.addmm(sums, a, a, out_dtype=torch.float32, out=sums)
        except (RuntimeError, TypeError):
            return False
    return True


def _add_exactly(sums: Tensor, excess: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add the product a b to `sums` in place by Kahan's sum; excess: what earlier additions added too much."""
    # The error of the sum does not grow with the number of products. Ref: Kahan 1965, "Further remarks on reducing
    # truncation errors", Communications of the ACM 8(1).
    rows = max(1, PART_BYTES["cuda" if kind_of(a) == "cuda" else "cpu"] // (sums.shape[1] * sums.element_size()))
    for total, excess_rows, a_rows in zip(sums.split(rows), excess.split(rows), a.split(rows)):
        increment = (a_rows @ b).sub_(excess_rows)
        new = total + increment
        torch.sub(new, total, out=excess_rows).sub_(increment)
        total.copy_(new)
    return sums


def _add_product(sums: Tensor | None, a: Tensor, b: Tensor, excess: Tensor | None = None) -> Tensor:
    """`sums`, in float32 or wider, and the product a b, in place; by `_add_exactly` with `excess`."""
    wider = torch.promote_types(a.dtype, torch.float32)
    if sums is not None and excess is not None:
        return _add_exactly(sums, excess, a, b)
    if sums is not None and a.dtype == wider:
        return sums.addmm_(a, b)
    cuda = kind_of(a) == "cuda"
    if sums is not None and cuda and (fake_device_of(a) is not None or adds_wide(a.dtype, a.device)):
        return torch.addmm(sums, a, b, out_dtype=wider, out=sums)
    if sums is not None and cuda:  # by rows, so that no product as large as the head is alive, which no plan counts
        rows = max(1, PRODUCT_BYTES // (sums.shape[1] * wider.itemsize))
        for sum_rows, a_rows in zip(sums.split(rows), a.split(rows)):
            sum_rows.add_(torch.mm(a_rows, b, out_dtype=wider))
        return sums
    product = torch.mm(a, b, out_dtype=wider) if cuda and a.dtype != wider else a @ b
    return product.to(wider) if sums is None else sums.add_(product)


def chunk_rows(n: int, columns: int, dtype: torch.dtype, kind: str) -> int:
    """The tokens of a chunk on such a device, within CHUNK_BYTES of logits, or one token."""
    max_rows = max(1, min(CHUNK_ROWS, CHUNK_BYTES["cuda" if kind == "cuda" else "cpu"] // (columns * dtype.itemsize)))
    even = -(-n // max(1, -(-n // max_rows)))
    return min(max_rows, max(1, -(-even // 128)) * 128)


def _canonical_rows(
    x: Tensor, weight: Tensor, targets: Tensor, terms: Terms, with_gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """(statistics [n, 3], each row's by itself; the gradient by the logits, if wanted) of x [n, D]."""
    logits = logits_product(x, weight)
    statistics = loss_statistics(logits, targets, terms.cap)
    if not with_gradients:
        return statistics, None
    return statistics, rows_of(logits.to(x.dtype), targets, statistics, terms, True, "compiled", overwrite=True)[1]


def _rows_over(
    axis: Axis, logits: Tensor, targets: Tensor, terms: Terms, with_gradients: bool, form: str
) -> tuple[Tensor, Tensor | None]:
    """(statistics [n, 3] of whole rows, the gradient by the logits, if wanted, in their place)."""
    if axis.size == 1:
        return rows_of(logits, targets, None, terms, with_gradients, form, overwrite=True)
    parts = rows_of(logits, targets, None, terms, False, form, overwrite=False)[0]
    statistics = _gather_statistics(parts, terms, axis)
    if not with_gradients:
        return statistics, None
    return statistics, rows_of(logits, targets, statistics, terms, True, form, overwrite=True)[1]


def _run(
    row_form: str,
    terms: Terms,
    axis: Axis,
    wants: tuple[bool, bool, bool],
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
) -> tuple[Any, tuple[Tensor | None, Tensor | None]]:
    """(loss, gradients of x and w; None for one that is not needed)."""
    per_token = wants[2]
    with_gradients = any(wants[:2])
    n, columns = x.shape[0], w.shape[0]
    weight = w.to(x.dtype)
    rows = chunk_rows(n, columns, x.dtype, kind_of(x))
    # On a GPU rows of logits begin at multiples of 16 bytes, which every access to them is then.
    buffer = x.new_empty((min(rows, n), columns + (-columns % 8 if row_form == "triton" else 0)))
    dx = torch.empty_like(x) if wants[0] else None
    dw = excess = None
    # Of narrower ones each product has an error far above that of the sum.
    exactly = n > FEW_SUMS * rows and x.dtype in (torch.float32, torch.float64)
    chunks = [x.new_empty((0, 3), dtype=torch.promote_types(x.dtype, torch.float32))]
    for start in range(0, n, rows):
        x_rows, target_rows = x[start : start + rows], targets[start : start + rows]
        if row_form == "canonical":
            statistics, g = _canonical_rows(x_rows, weight, target_rows, terms, with_gradients)
        else:
            logits = torch.mm(x_rows, weight.T, out=buffer[: x_rows.shape[0], :columns])
            statistics, g = _rows_over(axis, logits, target_rows, terms, with_gradients, row_form)
        chunks.append(statistics)
        # A token's weight scales its row of g, which has V numbers; so it scales those of dx and x, which have D.
        row_weights = None if weights is None else weights[start : start + rows, None]
        if g is not None and dx is not None:
            torch.mm(g, weight, out=dx[start : start + rows])
            if row_weights is not None:
                dx[start : start + rows].mul_(row_weights)
        if g is not None and wants[1]:
            x_rows = x_rows if row_weights is None else (x_rows * row_weights).to(x.dtype)
            # Several parts are summed in float32 or wider.
            excess = torch.zeros_like(dw) if exactly and excess is None and dw is not None else excess
            dw = g.T @ x_rows if rows >= n and w.dtype == x.dtype else _add_product(dw, g.T, x_rows, excess)
    if wants[1]:
        dw = torch.zeros_like(w) if dw is None else dw.to(w.dtype)
    statistics = torch.cat(chunks)
    loss = total_loss(statistics, targets, terms, weights)
    return (loss, of_tokens(statistics, targets, weights)) if per_token else loss, (dx, dw)


def _chunked(
    form: str,
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    axis: Axis = WHOLE,
    columns: int = 0,
    compiled: bool = True,
    per_token: bool = False,
    **options: Any,
) -> Any:
    terms, targets = _terms_of(options, w.shape[0], axis, columns, targets, mask)
    wants = needs_grad(x), needs_grad(w)
    row_form = form if form != "chunked" else "compiled" if compiled else "eager"
    make = functools.partial(_run, row_form, terms, axis, (*wants, per_token))
    weights = weights_of(mask)
    tensors = (x, w, targets) if weights is None else (x, w, targets, weights)
    return ValueAndGradients("linear_cross_entropy", make)(*tensors) if any(wants) else make(*tensors)[0]


def _supports(x: Tensor, w: Tensor, targets: Tensor, mask: Tensor | None = None, **options: Any) -> str:
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}; it takes float32, bfloat16 or float16"
    return triton_runs(x, w, targets, *(() if mask is None else (mask,)))


def _canonical_supports(
    x: Tensor, w: Tensor, targets: Tensor, mask: Tensor | None = None, *, axis: Axis = WHOLE, **options: Any
) -> str:
    if axis.size > 1:
        return f"the vocabulary is over {axis.name}={axis.size}"
    if x.dtype not in rowwise.TYPES:
        return f"x is {x.dtype}; it takes float32 or bfloat16"
    return rows_run(x, w, targets)


linear_cross_entropy = Op(
    "linear_cross_entropy",
    reference,
    Form("triton", functools.partial(_chunked, "triton"), supports=_supports, prefers=on_cuda),
    Form("chunked", functools.partial(_chunked, "chunked")),
    Form("canonical", functools.partial(_chunked, "canonical"), _canonical_supports, asked_for),
    flops=lambda x, w, *rest, **options: 2 * x.numel() * w.shape[0],
    bytes=lambda x, w, *rest, **options: (x.numel() + w.numel()) * x.element_size(),
)
