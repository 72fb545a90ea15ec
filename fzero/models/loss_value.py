"""The Loss of the value that a user's loss function returned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.core.arguments import expect_kind
from fzero.models import base


def loss_of(out: Any) -> base.Loss:
    """The Loss that a plain function returned; raises TypeError or ValueError, with what to write instead, for anything
    else."""
    pair = "return (losses.sum(), losses.numel())"
    out, tables = (out[:3], out.tables) if isinstance(out, base.Loss) else (out, {})
    if isinstance(out, dict):
        raise TypeError(
            f"the loss function returned a dict of {', '.join(map(str, out)) or 'nothing'}; return (sum, number of "
            "samples, {name: sum to report})"
        )
    if isinstance(out, list) or (isinstance(out, tuple) and len(out) not in (2, 3)):
        raise TypeError(f"the loss function returned a {type(out).__name__} of {len(out)}; {pair}")
    total, number, *extra = out if isinstance(out, tuple) else (out, 1.0)
    if isinstance(total, (int, float)):
        raise TypeError(
            f"the loss function returned the number {total!r}, which has no gradient; return a tensor, not its .item()"
        )
    expect_kind("what the loss function returned", total, Tensor, pair)
    if total.dim() or not total.is_floating_point():
        raise ValueError(f"the loss function returned {total.dtype} of shape {list(total.shape)}; {pair}")
    total = total.to(torch.promote_types(total.dtype, torch.float32))  # micro-batches are summed
    if not isinstance(out, tuple):
        return base.Loss(total, torch.ones_like(total.detach()))
    sums = {"the number of samples": number}
    if extra:
        expect_kind("the third result of the loss function", extra[0], dict, "return {name: sum to report}")
        sums |= {f"{name!r} of the loss function's sums": value for name, value in extra[0].items()}
    for label, value in sums.items():
        expect_kind(label, value, (Tensor, int, float), "return a scalar, such as len(batch['x'])")
        if isinstance(value, Tensor) and value.dim():
            raise ValueError(f"{label} has shape {list(value.shape)}; return its sum, a scalar")
        if isinstance(value, Tensor) and value.is_complex():
            raise ValueError(f"{label} is {value.dtype}; return a real number")

    def to_loss_device(x: Any) -> Tensor:
        # A number is written where the loss is: copying it there would wait for a GPU.
        if not isinstance(x, Tensor):
            return torch.full((), x, device=total.device)
        wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
        return x.to(total.device, wide)

    extra = {name: to_loss_device(x) for name, x in extra[0].items()} if extra else {}
    return base.Loss(total, to_loss_device(number), extra, tables)
