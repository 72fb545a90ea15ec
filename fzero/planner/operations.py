"""One executed operator: its kind, size, FLOPs and bytes read and written, from its arguments and results."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core.graph_passes import flop_of


class ExecutedOp(NamedTuple):
    """One executed operator."""

    phase: str
    layer: int | None
    name: str  # "aten.mm", "aten.mm/nt" (of a transposed second operand, see `layout`), "fzero.flash_forward"
    kind: str  # of NAMES, "pointwise" or "fused"
    dtype: str  # of its result, else of a tensor it wrote, else of an argument
    shape: tuple[int, ...]  # of a gemm (batch, m, n, k), else of its largest tensor
    flop: int
    bytes: int  # bytes read and written, each tensor counted once
    host: bool = False  # whether the host of a GPU computes it, on tensors in its own memory


# The names of operators, without their namespace, by kind; every other operator is pointwise.
NAMES: dict[str, str] = {
    "gemm": (
        "mm addmm bmm baddbmm _scaled_mm _grouped_mm symmetric_product float8_product float8_product_of "
        "float8_emulated grouped_mm grouped_mm_dw grouped_mm_triton grouped_mm_dw_triton float8_grouped_mm "
        "float8_grouped_mm_dw float8_grouped_mm_emulated float8_grouped_mm_dw_emulated"
    ),
    "attention": (
        "tiled_forward tiled_backward flash_forward flash_backward flash_forward_at flash_backward_at "
        "ring_forward ring_backward library_forward library_backward paged_attention_tiles"
    ),
    "cross_entropy": "cross_entropy_rows cross_entropy_rows_ nll_loss_forward nll_loss_backward",
    "norm": (
        "norm_forward add_norm_forward norm_backward native_layer_norm native_layer_norm_backward "
        "norm_forward_largest add_norm_forward_largest norm_backward_largest _fused_rms_norm "
        "_fused_rms_norm_backward rms_norm_cpu add_rms_norm_cpu rms_norm_cpu_backward "
        "layer_norm_rows_backward"
    ),
    "rope": "rope",
    "glu": "glu_forward glu_backward glu_forward_largest glu_backward_largest swiglu_cpu swiglu_cpu_backward",
    "moe": (
        "route_forward route_backward group_rows permute_rows unpermute_rows unpermute_rows_backward sort topk bincount"
    ),
    "optimizer": "_fused_adamw_ _fused_adam_ host_step",
    "random": "dropout_add native_dropout bernoulli uniform_ normal_ rand randn randint",
    "reduce": (
        "sum mean amax amin max min argmax argmin prod any all std var norm linalg_vector_norm _foreach_norm "
        "logsumexp _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data cumsum aminmax "
        "var_mean"
    ),
    "copy": (
        "copy_ _to_copy clone cat stack contiguous _foreach_copy_ constant_pad_nd repeat fill_ zero_ zeros "
        "ones full zeros_like ones_like full_like new_zeros new_ones new_full arange lift_fresh_copy eye tril "
        "triu flip roll"
    ),
    "gather": (
        "embedding embedding_dense_backward index index_select gather index_put index_put_ scatter scatter_ "
        "scatter_add scatter_add_ index_add index_add_ select_backward slice_backward searchsorted "
        "take_along_dim masked_select nonzero embedding_backward"
    ),
    "other": (
        "empty empty_like new_empty empty_strided new_empty_strided empty_permuted _local_scalar_dense "
        "is_same_size scalar_tensor"
    ),
}
KIND_OF = {name: kind for kind, names in NAMES.items() for name in names.split()}
LOOKED_UP = (
    "embedding",
    "index",
    "index_select",
    "gather",
    "slice_backward",
    "select_backward",
)  # reads only as many rows as it writes
COLLECTIVES = ("psum", "all_gather", "psum_scatter", "all_to_all", "start_rows", "wait_rows", "ppermute")


@functools.cache
def names_of(func: Any) -> tuple[str, str, str]:
    """Return (namespace.name, name, kind) of an operator."""
    space, _, name = func._schema.name.partition("::")
    name = name.removesuffix("_") if name in ("addmm_", "baddbmm_") else name  # the same product
    kind = KIND_OF.get(name)
    if kind is None:
        kind = "attention" if "attention" in name else "optimizer" if "_fused_" in name else "pointwise"
    return f"{space}.{name}", name, kind


@functools.cache
def _launched(kernel: str) -> tuple[str, str, str]:
    return f"fzero.{kernel}", kernel, "fused" if kernel == "fused" else "optimizer"


def describe_op(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, phase: str, layer: int | None
) -> ExecutedOp | None:
    """Describe an operator called with `args` and `kwargs` that returned `out`; None for views and Transfers."""
    full, name, kind = names_of(func)
    if func.is_view or (full.startswith("fzero.") and name in COLLECTIVES):
        return None
    if name == "record_launch":  # a kernel launch instead of an operator: (reads, writes)
        full, name, kind = _launched(args[0])
        args, out = args[1:2], args[2]  # what is written is counted as read only where it is
    inputs = list(_tensors((args, tuple(x for key, x in kwargs.items() if key != "out"))))
    outputs = list(_tensors(out))
    if not inputs and not outputs:
        return None  # no tensor involved, as in promote_types
    if (
        not func._schema.is_mutable
        and outputs
        and len(inputs) == 1
        and len(outputs) == 1
        and _same(inputs[0], outputs[0])
    ):
        return None  # a view such as _unsafe_view, or a conversion to the same dtype
    flop = flop_of(func, args, kwargs, out) if kind in ("gemm", "attention") else 0
    size, largest = 0, None
    for x in outputs:
        size += _bytes(x)
    for x in inputs:
        size += 0 if kind == "other" else min(_bytes(x), size) if name in LOOKED_UP else _bytes(x)
    for x in (*outputs, *inputs):
        if largest is None or x.numel() > largest.numel():
            largest = x
    # What attention gives for parts of a softmax is wider than what it multiplies.
    dtype = (
        inputs[0].dtype if kind == "attention" or (inputs and not outputs) else outputs[0].dtype if outputs else None
    )
    if kind == "gemm":
        dtype = inputs[name in ("addmm", "baddbmm")].dtype  # the factors' dtype: the addend may be wider
        full += layout(inputs) if name in ("mm", "bmm", "addmm", "baddbmm") else ""
    if name in ("library_forward", "library_backward"):
        full += f"/{args[-2]}"
    shape = (
        gemm_shape(name, inputs, outputs, args)
        if kind == "gemm"
        else tuple(largest.shape)
        if largest is not None
        else ()
    )
    return ExecutedOp(
        phase, layer, full, kind, str(dtype).removeprefix("torch."), shape, flop, 0 if kind == "other" else size
    )


def describe_passes(op: ExecutedOp, args: Sequence[Any]) -> tuple[ExecutedOp, ...]:
    """The passes over memory of one operator, which follow each other."""
    if op.name == "fzero.float8_product_of":
        numbers, b = args[0], args[2]
        size = b.numel() * numbers.element_size()
        rounded = op._replace(name="fzero.float8_round", kind="pointwise", dtype="bfloat16", shape=tuple(b.shape))
        return rounded._replace(flop=0, bytes=_bytes(b) + size), op._replace(bytes=op.bytes - _bytes(b) + size)
    if op.name != "fzero.float8_emulated":
        return (op,)
    a, b = args[:2]
    passes, out_bytes, dtype = [], op.bytes - _bytes(a) - _bytes(b), torch.float32
    for x in (a, b):
        scaled = op._replace(name="fzero.float8_scale", kind="reduce", shape=tuple(x.shape), flop=0, bytes=_bytes(x))
        rounded = x.numel() * dtype.itemsize
        passes += [scaled, scaled._replace(name="fzero.float8_round", kind="pointwise", bytes=_bytes(x) + rounded)]
    product = op._replace(dtype="float32", bytes=out_bytes + (a.numel() + b.numel()) * dtype.itemsize)
    return (*passes, product)


def layout(operands: Sequence[Tensor]) -> str:
    """Which of the last two operands is a transpose, by strides: "/tn" the first, "/nt" the second, "" neither."""
    first, second = (x.dim() > 1 and x.stride(-2) == 1 < x.stride(-1) for x in operands[-2:])
    return "/tn" if first else "/nt" if second else ""


def gemm_shape(
    name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], args: Sequence[Any]
) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a product of [m, k] and [k, n]; a grouped one counts as with one group's weights."""
    if name in ("addmm", "baddbmm"):
        a, b = args[1], args[2]
    elif name in ("float8_product", "float8_product_of"):  # b is turned
        return 1, inputs[0].shape[0], inputs[2].shape[0], inputs[0].shape[1]
    elif name == "symmetric_product":
        return inputs[0].shape[0], inputs[0].shape[1], inputs[0].shape[1], inputs[0].shape[2]
    else:
        a, b = inputs[0], inputs[1]
    if name == "float8_grouped_mm_dw":  # x [D, M], g [F, M], turned
        return 1, a.shape[0], b.shape[0], a.shape[1]
    if "grouped_mm_dw" in name:  # x [M, D], g [M, F] -> [E, D, F]
        return 1, a.shape[1], b.shape[1], a.shape[0]
    if "grouped_mm" in name:  # x [M, D], w [E, D, F]
        return 1, a.shape[0], b.shape[-1], a.shape[1]
    batch = a.shape[0] if a.dim() == 3 else 1
    return batch, a.shape[-2], b.shape[-1], a.shape[-1]


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for x in tree:
            yield from _tensors(x)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _bytes(x: Tensor) -> int:
    """The bytes of a tensor's elements; for an expanded tensor, those in memory."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
