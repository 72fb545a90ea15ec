"""One step of AdamW or Lion for states on the host, in C++ (optim_cpu.cpp), compiled when first used.

One pass over memory: each tensor is read and written once, whatever the dtypes. Every operation is rounded by itself,
in the order of optim_leaf. The states, and Lion's parameters, have the reference's bits; AdamW's parameters almost
always, because torch's own float32 sqrt on a CPU is sometimes wrong in the last bit. The GIL is released.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fzero.core import cpp
from fzero.core.compile import have_compiler
from fzero.core.device import fake_device_of, kind_of, record_launch
from fzero.kernels.optim_leaf import SIGNED, OptimLeaf, StepRates, changing_b1, touched_tensors
from fzero.kernels.optim_lowbit import LeafPosition

TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 4}  # as the C++ has them; 0: none
LARGEST = 4096  # block of codes
MANY = 1 << 22  # elements from which compiling pays


class _Leaf(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("p", "g", "m", "v", "m_scales", "v_scales", "copy")),
        *(
            (name, ctypes.c_int64)
            for name in ("n", "columns", "gradient", "state", "copied", "stochastic", "key0", "key1")
        ),
        *((name, ctypes.c_int64) for name in ("first", "size0", "stride0", "size1", "stride1")),
        ("decay", ctypes.c_double),
    ]


class _Rates(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_float)
            for name in ("rate", "correct1", "root_correct2", "b1", "c1", "b2", "c2", "eps", "factor")
        ),
        ("coupled", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("count", "block", "threads")),
    ]


def _library() -> ctypes.CDLL:
    return cpp.library(__file__, cpp.EXACT)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _leaf_struct(leaf: OptimLeaf, moments: int) -> _Leaf:
    coded, position = leaf.state[0].dtype == torch.uint8, leaf.position or LeafPosition()
    moment = [*map(_address, leaf.state[:moments]), None][:2]
    scales = [*(map(_address, leaf.state[moments:]) if coded else ()), None, None][:2]
    columns = leaf.p.shape[-1] if leaf.p.dim() else 1
    types = (0 if x is None else TYPES[x.dtype] for x in (leaf.g, leaf.state[0], leaf.copy))
    stochastic = leaf.position is not None and not coded
    sizes = (position.first, position.size0, position.stride0, position.size1, position.stride1)
    return _Leaf(
        _address(leaf.p), _address(leaf.g), *moment, *scales, _address(leaf.copy), leaf.p.numel(), columns, *types,
        stochastic, *position.key, *sizes, leaf.decay,
    )  # fmt: skip


def step(rule: Any, leaves: Sequence[OptimLeaf], rates: StepRates) -> None:
    """A step of `rule` (adamw_step or lion_step) on every leaf, in place, by all of torch's threads.

    Waits for tensors of `rates` that are on a device.
    """
    if leaves and fake_device_of(leaves[0].p) is not None:
        record_launch(rule.__name__, *touched_tensors(leaves))
        return
    if rates.skip is not None and bool(rates.skip):
        return
    moments = len(SIGNED[rule])
    described = [_leaf_struct(leaf, moments) for leaf in leaves if leaf.p.numel()]
    if not described:
        return
    scalars = [float(x) for x in rates.scalars] + [1.0] * (3 - len(rates.scalars))
    numbers = (
        rates.b1,
        1 - rates.b1,
        rates.b2,
        1 - rates.b2,
        rates.eps,
        1.0 if rates.factor is None else float(rates.factor),
    )
    rates_struct = _Rates(*scalars, *numbers, rates.coupled, int(rates.count), rates.block, torch.get_num_threads())
    _library().step((_Leaf * len(described))(*described), ctypes.c_int64(len(described)), ctypes.byref(rates_struct))
    written = [x for leaf in leaves for x in (leaf.p, *leaf.state, leaf.copy) if x is not None and not x.is_inference()]
    torch.autograd.graph.increment_version(written)  # so that autograd complains if something else has saved them


def supports(rule: Any, leaves: Sequence[OptimLeaf], rates: StepRates) -> str:
    """The reason why it does not serve a call; "" if it does."""
    moments = len(SIGNED[rule])
    if reason := changing_b1(rates):
        return reason
    for leaf in leaves:
        tensors = [x for x in (leaf.p, leaf.g, *leaf.state, leaf.copy) if x is not None]
        if any(kind_of(x) != "cpu" for x in tensors):
            return "a tensor is not on the CPU"
        if leaf.p.dtype != torch.float32 or leaf.g.dtype not in (torch.float32, torch.bfloat16):
            return (
                f"the dtypes are {leaf.p.dtype} and {leaf.g.dtype}; it takes float32 with a gradient in float32 "
                "or bfloat16"
            )
        dtypes = {x.dtype for x in leaf.state[:moments]}
        if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.uint8}:
            return f"the state is in {' and '.join(sorted(map(str, dtypes)))}; it takes float32, bfloat16 or 8 bits"
        if leaf.position is not None and dtypes == {torch.float32}:
            return "a state in float32 is to be rounded stochastically"
        if dtypes == {torch.uint8} and not 1 <= rates.block <= LARGEST:
            return f"the block is {rates.block}; it takes 1 to {LARGEST}"
        if leaf.copy is not None and leaf.copy.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the copy is in {leaf.copy.dtype}; it takes float32, bfloat16 or float16"
        if any(not x.is_contiguous() for x in tensors):
            return "a leaf, its gradient, state or copy is not contiguous"
    return "" if have_compiler() else "there is no C++ compiler"


def adamw_prefers(leaves: Sequence[OptimLeaf], rates: StepRates) -> str:
    """The reason why "auto" should not take AdamW's form.

    Small models should not wait for a compiler; and if the number of elements decided, the sharding of a leaf would
    change its last bits. Measured on a Xeon, 64M elements: as fast as torch's fused kernel where all is float32, 2.5
    times with a bfloat16 gradient and copy (against three passes); against the reference at 4M 9 times with bfloat16
    states, 20 times rounded stochastically and in 8 bits.
    """
    return "it must be compiled, and its last bits are its own: ask for it by name"


def lion_prefers(leaves: Sequence[OptimLeaf], rates: StepRates) -> str:
    """The reason why "auto" should not take Lion's form; it has the reference's bits and 7 times its speed, but
    compiles for seconds.
    """
    count = sum(leaf.p.numel() for leaf in leaves)
    return "" if count >= MANY else f"it must be compiled, for {count} elements; from {MANY} on that pays"
