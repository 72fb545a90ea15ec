"""One step of AdamW or Lion on a leaf: the equations, states stored in fewer bits, and the forms in PyTorch
and C++.

    adamw:  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
            u = -(lr / (1 - b1^t)) m / (sqrt(v) / sqrt(1 - b2^t) + eps) - lr d p
    lion:   u = -lr (sign(b1 m + (1 - b1) g) + d p);  m = b2 m + (1 - b2) g

with g the gradient times `factor`, p = p + u, in float32 or wider. A state is in a float dtype, rounded to nearest; in
bfloat16, rounded stochastically by the global index of the element; or in 8 bits: see lowbit.
Refs: Loshchilov & Hutter
2019, arXiv:1711.05101, algorithm 2; Chen et al. 2023, arXiv:2302.06675, algorithm 2.

States on the host are stepped in C++ too (optim_leaf.cpp), compiled when first used, in one pass over memory: each
tensor is read and written once, whatever the dtypes. Every operation is rounded by itself, in the order here. The
states, and Lion's parameters, have the reference's bits; AdamW's parameters almost always, because torch's own float32
sqrt on a CPU is sometimes wrong in the last bit. The GIL is released.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import compile_cache, torch_private
from fzero.core.compile_cache import have_compiler
from fzero.core.device import fake_device_of, kind_of, record_launch
from fzero.kernels import optim_lowbit
from fzero.kernels.custom_operator import address
from fzero.kernels.optim_lowbit import LeafPosition

# Elements of a piece: its temporaries stay in a CPU's cache; large enough that a GPU is not bound by launches.
PIECE = {"cpu": 1 << 16}
PIECE_ELSEWHERE = 1 << 23


class OptimLeaf(NamedTuple):
    """One leaf to update; all tensors have p's shape, except the scales of an 8-bit state."""

    p: Tensor
    g: Tensor
    state: tuple[Tensor, ...]  # adamw: m, v, or codes m, v and scales m, v; lion: m, or codes and scales
    decay: float = 0.0
    position: LeafPosition | None = None  # where a bfloat16 state is rounded stochastically
    copy: Tensor | None = None  # is given the updated p in its own dtype


def touched_tensors(leaves: Sequence[OptimLeaf]) -> tuple[list[Tensor], list[Tensor]]:
    """(the tensors that a step of these leaves reads, those that it writes)."""
    read = [x for leaf in leaves for x in (leaf.p, leaf.g, *leaf.state)]
    return read, [x for leaf in leaves for x in (leaf.p, *leaf.state, leaf.copy) if x is not None]


class StepRates(NamedTuple):
    """The arguments of a step that all leaves share."""

    # 0-dim, float64: adamw (lr, 1 - b1^t, sqrt(1 - b2^t)), and b1 where it changes with the step; lion (lr,)
    scalars: tuple[Tensor, ...]
    count: Tensor  # int64 0-dim: steps made before
    b1: float
    b2: float
    eps: float = 0.0
    coupled: bool = False  # adamw: the decay is added to the gradient (L2), as Adam has it
    correction: str = "moments"  # adamw: what is divided by 1 - b^t, see fzero.optim.adamw; in `scalars` already
    block: int = 256  # of 8-bit states
    factor: Tensor | None = None  # float32 0-dim, of every gradient
    skip: Tensor | None = None  # bool 0-dim


def changing_b1(rates: StepRates) -> str:
    """Why a form with one b1 for all steps cannot serve; "" if it can."""
    return "b1 changes with the step, and it takes a number" if len(rates.scalars) > 3 else ""


# ---- the equations ----


def safe_sqrt(x: Tensor) -> Tensor:
    """sqrt(x) for x >= 0, whose derivative at 0 is 0 and not infinite."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), x * 0.0)  # NaN stays NaN


def adamw_step(
    g: Tensor, state: tuple, p: Tensor, scalars: tuple, decay: float, rates: StepRates
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(u, (m, v)) of one leaf, or a part of one."""
    (rate, correct1, root_correct2, *changing), (m, v) = scalars, state
    b1 = changing[0] if changing else rates.b1
    if rates.coupled and decay:
        g = g + decay * p
    m, v = b1 * m + (1 - b1) * g, rates.b2 * v + (1 - rates.b2) * (g * g)
    u = -(rate / correct1) * (m / (safe_sqrt(v) / root_correct2 + rates.eps))
    return u - (rate * decay) * p if decay and not rates.coupled else u, (m, v)


def lion_step(
    g: Tensor, state: tuple, p: Tensor, scalars: tuple, decay: float, rates: StepRates
) -> tuple[Tensor, tuple[Tensor]]:
    """(u, (m,)) of one leaf, or a part of one."""
    (rate,), (m,) = scalars, state
    direction = (rates.b1 * m + (1 - rates.b1) * g).sign()
    direction = direction + decay * p if decay else direction
    return -rate * direction, (rates.b2 * m + (1 - rates.b2) * g,)


SIGNED = {adamw_step: (True, False), lion_step: (True,)}  # of the moments, in 8 bits


def step_leaf(step: Any, leaf: OptimLeaf, rates: StepRates, local: int = 0) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The definition of a step: (u, new state as stored) of a leaf, or of its part from index `local`."""
    dtype = torch.float32
    for x in (leaf.p, leaf.g, *leaf.state):
        dtype = torch.promote_types(dtype, x.dtype) if x.is_floating_point() else dtype
    coded, signs, block = leaf.state[0].dtype == torch.uint8, SIGNED[step], rates.block
    count = len(signs)
    if coded:
        moments = zip(leaf.state[:count], leaf.state[count:], signs)
        state = tuple(optim_lowbit.decode(codes, scales, signed, block).to(dtype) for codes, scales, signed in moments)
    else:
        state = tuple(x.to(dtype) for x in leaf.state[:count])
    g = leaf.g.to(dtype) if rates.factor is None else leaf.g.to(dtype) * rates.factor.to(dtype)
    u, new = step(g, state, leaf.p.to(dtype), tuple(x.to(dtype) for x in rates.scalars), leaf.decay, rates)
    if coded:
        codes = [optim_lowbit.encode(x.to(torch.float32), block, signed) for x, signed in zip(new, signs)]
        return u, (*(c for c, _ in codes), *(s for _, s in codes))
    if leaf.position is not None:
        bits = optim_lowbit.step_words(leaf.position, rates.count, local, leaf.p.shape)
        halves = (bits & 0xFFFF, bits >> 16)
        return u, tuple(optim_lowbit.round_stochastic(x.to(torch.float32), half) for x, half in zip(new, halves))
    return u, (*(x.to(old.dtype) for x, old in zip(new, leaf.state)), *leaf.state[count:])


def _leaf_chunks(leaf: OptimLeaf, rates: StepRates) -> Iterator[tuple[int, OptimLeaf]]:
    """(first flat index, views of a part) of a leaf in pieces that cut no block of an 8-bit state."""
    max_elements, shape = PIECE.get(kind_of(leaf.p), PIECE_ELSEWHERE), leaf.p.shape
    if leaf.p.numel() <= max_elements or (len(shape) == 1 and leaf.state[0].dtype == torch.uint8):
        yield 0, leaf
        return
    inner = shape[1:].numel()
    length = max(1, max_elements // inner)
    for start in range(0, shape[0], length):
        size = min(length, shape[0] - start)
        cut = lambda x, start=start, size=size: (  # noqa: E731
            x.narrow(0, start, size) if x.dim() == len(shape) and x.shape[0] == shape[0] else x
        )
        state = tuple(map(cut, leaf.state))
        chunk = leaf._replace(
            p=cut(leaf.p), g=cut(leaf.g), state=state, copy=None if leaf.copy is None else cut(leaf.copy)
        )
        if size == 1 and inner > max_elements and len(shape) > 1:  # one row of many: by the rows of it
            inside = chunk._replace(
                p=chunk.p[0],
                g=chunk.g[0],
                state=tuple(x[0] for x in chunk.state),
                copy=None if chunk.copy is None else chunk.copy[0],
            )
            yield from ((start * inner + first, deeper) for first, deeper in _leaf_chunks(inside, rates))
        else:
            yield start * inner, chunk


@torch.no_grad()
def leaves_reference(step: Any, leaves: Sequence[OptimLeaf], rates: StepRates) -> None:
    """A step (AdamW's, Lion's) on every leaf, piece by piece: the definition."""
    for leaf in leaves:
        for local, chunk in _leaf_chunks(leaf, rates):
            u, new = step_leaf(step, chunk, rates, local)
            if (skip := rates.skip) is not None:
                select = lambda new, old, skip=skip: torch.where(skip, old, new)  # noqa: E731
                chunk.p.copy_(select((chunk.p + u).to(chunk.p.dtype), chunk.p))
                new = [select(n, old) for n, old in zip(new, chunk.state)]
            else:
                chunk.p.add_(u)
            for old, value in zip(chunk.state, new):
                if value is not old:
                    old.copy_(value)
            if chunk.copy is not None:
                copy = chunk.p.to(chunk.copy.dtype)
                chunk.copy.copy_(copy if rates.skip is None else torch.where(rates.skip, chunk.copy, copy))


# ---- PyTorch's own ----


def fused_serves(leaves: Sequence[OptimLeaf], rates: StepRates) -> str:
    """Why torch's fused kernel of Adam cannot take these leaves, "" if it can."""
    if rates.factor is not None or rates.skip is not None:
        return "it knows no factor and no skip"
    if rates.correction != "moments" or changing_b1(rates):
        return changing_b1(rates) or f"the correction is {rates.correction}; it has that of moments"
    for leaf in leaves:
        if leaf.position is not None or leaf.copy is not None or len(leaf.state) != 2:
            return "it keeps states in float dtypes, rounded to nearest, and writes no copy"
        if any(x.dtype != leaf.p.dtype or x.device != leaf.p.device for x in (leaf.g, *leaf.state[:2])):
            return (
                f"the dtypes are {', '.join(str(x.dtype) for x in (leaf.p, leaf.g, *leaf.state))}; it takes one for all"
            )
    return ""


@torch.no_grad()
def adamw_fused(leaves: Sequence[OptimLeaf], rates: StepRates) -> None:
    """torch._fused_adamw_ (or _fused_adam_), equal to the reference up to a few roundings."""
    groups: dict[tuple, list[OptimLeaf]] = {}
    for leaf in leaves:
        if all(x.is_contiguous() for x in (leaf.p, leaf.g, *leaf.state)):
            groups.setdefault((leaf.decay, leaf.p.dtype, leaf.p.device), []).append(leaf)
            continue
        # The kernel walks all four in memory order: other strides would pair the wrong elements without an error.
        p, g, m, v = (x.contiguous() for x in (leaf.p, leaf.g, *leaf.state[:2]))
        adamw_fused([OptimLeaf(p, g, (m, v), leaf.decay)], rates)
        for old, new in zip((leaf.p, *leaf.state), (p, m, v)):
            old.copy_(new)
    kernel = torch_private.fused_adam_ if rates.coupled else torch_private.fused_adamw_
    for (decay, _, device), group in groups.items():
        # On a GPU both scalars are float32 tensors there, so the step does not wait for the device.
        rate = rates.scalars[0].to(device, torch.float64 if kind_of(group[0].p) == "cpu" else torch.float32)
        t = (rates.count + 1).to(device, torch.float32)
        with _whole_lines(group) as (p, g, m, v):
            kernel(
                p, g, m, v, [], [t] * len(p), lr=rate, beta1=rates.b1, beta2=rates.b2, weight_decay=decay,
                eps=rates.eps,
                amsgrad=False, maximize=False,
            )  # fmt: skip


@contextlib.contextmanager
def _whole_lines(leaves: list[OptimLeaf]) -> Iterator[list[list[Tensor]]]:
    """Lists of p, g, m and v in pieces of whole cache lines, for the kernel to write into."""
    # torch's CPU kernel rounds the elements after a tensor's last whole cache line differently. These of all leaves are
    # joined and padded to whole lines, so that the bits of an element do not depend on its index.
    columns = [list(column) for column in zip(*((leaf.p, leaf.g, *leaf.state[:2]) for leaf in leaves))]
    first = leaves[0].p
    line = 64 // first.element_size() if kind_of(first) == "cpu" else 1
    cut = [leaf.p.numel() // line * line for leaf in leaves]
    if cut == [leaf.p.numel() for leaf in leaves]:
        yield columns
        return
    flat = [[x.view(-1) for x in column] for column in columns]
    ends = [[x[n:] for x, n in zip(column, cut)] for column in flat]
    filled = [torch.nn.functional.pad(torch.cat(column), (0, -sum(map(len, column)) % line)) for column in ends]
    yield [[x[:n] for x, n in zip(column, cut)] + [end] for column, end in zip(flat, filled)]
    for i in (0, 2, 3):
        torch_private.foreach_copy_(ends[i], list(filled[i][: sum(map(len, ends[i]))].split([len(x) for x in ends[i]])))


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
    return compile_cache.library(__file__, compile_cache.EXACT)


def _leaf_struct(leaf: OptimLeaf, moments: int) -> _Leaf:
    coded, position = leaf.state[0].dtype == torch.uint8, leaf.position or LeafPosition()
    moment = [*map(address, leaf.state[:moments]), None][:2]
    scales = [*(map(address, leaf.state[moments:]) if coded else ()), None, None][:2]
    columns = leaf.p.shape[-1] if leaf.p.dim() else 1
    types = (0 if x is None else TYPES[x.dtype] for x in (leaf.g, leaf.state[0], leaf.copy))
    stochastic = leaf.position is not None and not coded
    sizes = (position.first, position.size0, position.stride0, position.size1, position.stride1)
    return _Leaf(
        address(leaf.p), address(leaf.g), *moment, *scales, address(leaf.copy), leaf.p.numel(), columns,
        *types, stochastic, *position.key, *sizes, leaf.decay,
    )  # fmt: skip


def cpp_step(rule: Any, leaves: Sequence[OptimLeaf], rates: StepRates) -> None:
    """A step of `rule` (adamw_step or lion_step) on every leaf, in place, by all of torch's threads."""
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


def cpp_serves(rule: Any, leaves: Sequence[OptimLeaf], rates: StepRates) -> str:
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


def adamw_cpp_prefers(leaves: Sequence[OptimLeaf], rates: StepRates) -> str:
    """The reason why "auto" should not take AdamW's form: few elements, whose step compiles for longer."""
    # Small models should not wait for a compiler; and if the number of elements decided, the sharding of a leaf would
    # change its last bits. Measured on a Xeon, 64M elements: as fast as torch's fused kernel where all is float32, 2.5
    # times with a bfloat16 gradient and copy (against three passes); against the reference at 4M 9 times with bfloat16
    # states, 20 times rounded stochastically and in 8 bits.
    return "it must be compiled, and its last bits are its own: ask for it by name"


def lion_cpp_prefers(leaves: Sequence[OptimLeaf], rates: StepRates) -> str:
    """The reason why "auto" should not take Lion's form, which compiles for seconds."""
    # It has the reference's bits and 7 times its speed.
    count = sum(leaf.p.numel() for leaf in leaves)
    return "" if count >= MANY else f"it must be compiled, for {count} elements; from {MANY} on that pays"
