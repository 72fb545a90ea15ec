"""The codes in which parameters and gradients travel, made by the kernels of an execution."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fzero import kernels
from fzero.core import pytree
from fzero.core.autodiff import Function, reinterpret
from fzero.core.pytree import Tree
from fzero.kernels.registry import Kernels
from fzero.sharding.codec import Codec, Coder
from fzero.sharding.prefetch import Coding


def coder_of(kind: str, block: int, impl: Kernels) -> Coder:
    """The operations of a kind of code. impl: the form of each kernel, by its name.

    >>> coder = coder_of("int8", 64, Kernels())
    >>> codes, scales = coder.encode(torch.full((2, 96), 3.0))
    >>> codes.shape, codes.dtype, scales.shape, coder.decode((codes, scales), torch.float32, 96)[0, 0]
    (torch.Size([2, 96]), torch.uint8, torch.Size([2, 2]), tensor(3.))
    """
    quantize, dequantize, add = (
        partial(op, impl=impl[op.name])
        for op in (kernels.quantize.quantize, kernels.quantize.dequantize, kernels.quantize.dequantize_sum_requantize)
    )
    code_dtype = kernels.KINDS[kind].dtype

    def to_message(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return reinterpret(pair[0], torch.uint8), pair[1]

    def encode(x: Tensor) -> tuple[Tensor, ...]:
        return to_message(quantize(x if x.dtype in NARROW else x.to(torch.float32), kind, block))

    def decode(parts: tuple[Tensor, ...], dtype: torch.dtype, size: int) -> Tensor:
        return dequantize((reinterpret(parts[0], code_dtype), parts[1]), kind, block, dtype, size)

    return Coder(
        encode,
        decode,
        lambda parts, size: to_message(add(reinterpret(parts[0], code_dtype), parts[1], kind, block, size)),
    )


NARROW = (torch.bfloat16, torch.float16, torch.float32)  # what the kernels read


def params_coding(codec: Codec | None, impl: Kernels) -> Coding:
    """How parameters travel under a plan's codec; None: not in codes, which round them."""

    def narrow(w: Tensor, amax: Tensor) -> Tensor:
        return kernels.narrow_weight(w, amax, impl=impl["narrow_weight"])

    def widen(numbers: Tensor, amax: Tensor) -> Tensor:
        return kernels.widen_weight(numbers, amax, impl=impl["widen_weight"])

    return Coding(narrow, widen, coder_for(codec, "params", impl))


class _Rounded(Function):
    """A tensor as it is when it has travelled, whose gradient is that of the tensor."""

    @staticmethod
    def forward(x: Tensor, coder: Coder) -> Tensor:
        return coder.decode(coder.encode(x), x.dtype, x.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, coder: Coder) -> tuple[Tensor, int]:
        return _Rounded.apply(x.movedim(in_dims[0], 0), coder), 0


def rounded_params(params: Tree, codec: Codec | None, coded: frozenset[str], impl: Kernels) -> Tree:
    """The parameters at rest as a step with the plan's codec sees them: its differentiable definition."""
    if codec is None:
        return params
    if codec.grads:
        raise ValueError(
            f"codec {codec}: grads are rounded behind the backward pass of a step, which is transformed here; use "
            "donate=True outside of torch.func, or a codec of params"
        )
    coder = coder_for(codec, "params", impl)
    return pytree.map_named(lambda name, x: _Rounded.apply(x, coder) if name in coded else x, params)


def coder_for(codec: Codec | None, group: str, impl: Kernels) -> Coder | None:
    """How a group ("params", "grads", "errors") goes in codes; None: as it is."""
    kind = getattr(codec, group) if codec is not None and not codec.signs else ""
    return coder_of(kind, codec.block, impl) if codec is not None and kind else None
