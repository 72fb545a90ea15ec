"""AdamW and Lion over many leaves in one launch, in place; and the gradients' norm with the count of non-finite
elements, in one pass.

The equations and references are in optim_leaf. If `skip` is set, nothing changes. These functions write into their
arguments, so they are not operators of a traced graph. Bytes per parameter, fp32 p and g: 28 with float32 states, 20
with bfloat16, 16 with 8 bits; 2 less for a bfloat16 gradient, 2 more where a bfloat16 copy of p is written in the same
pass.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import gpu
from fzero.core.device import fake_device_of, kind_of, record_launch
from fzero.kernels import optim_cpu, optim_lowbit
from fzero.kernels.aot import Build
from fzero.kernels.op_function import INTERPRETED
from fzero.kernels.optim_leaf import (
    SIGNED,
    Leaf,
    Rates,
    adamw_fused,
    adamw_reference,
    adamw_step,
    fused_serves,
    lion_reference,
    lion_step,
    touched_tensors,
)
from fzero.kernels.optim_lowbit import Place, decode_blocks, draw_words, encode_blocks, round_bf16
from fzero.kernels.optional_triton import tl, triton
from fzero.kernels.registry import Form, Op

CONFIG = {"BLOCK": 2048, "num_warps": 4}
ODD = {"BLOCK": 512, "num_warps": 4}  # for stochastic rounding in which each element needs its own Philox block
NORM = {"BLOCK": 16384, "num_warps": 8}
FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# ---- the kernels ----

# A row of the table: addresses of p, g, m, v, copy, scales of m and of v; elements, columns; the bits of float32 decay;
# and the Place.
P, G, M, V, COPY, SM, SV, SIZE, COLUMNS, DECAY, KEY, FIRST, FIELDS = (
    tl.constexpr(i) for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 17)
)


@triton.jit
def _pointer(ROW, FIELD: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr):
    pointer = tl.load(ROW + FIELD).to(tl.pointer_type(TYPE))
    if WIDE:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _adamw(p, g, m, v, S, decay, b1, c1, b2, c2, eps, COUPLED: tl.constexpr):
    rate, correct1, root_correct2 = tl.load(S), tl.load(S + 1), tl.load(S + 2)
    if COUPLED:
        g += p * decay
    m = m * b1 + g * c1
    v = v * b2 + g * g * c2
    u = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root_correct2) + eps) * tl.div_rn(-rate, correct1)
    return p + (u if COUPLED else u - p * (rate * decay)), m, v


@triton.jit
def _lion(p, g, m, S, decay, b1, c1, b2, c2):
    rate = tl.load(S)
    c = m * b1 + g * c1
    direction = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, c)) + p * decay  # NaN stays NaN
    return p + direction * -rate, m * b2 + g * c2


@triton.jit
def _decay_of(ROW):
    return tl.load(ROW + DECAY).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _update_flat(
    T, WORK, S, COUNT, SKIP, b1, c1, b2, c2, eps,
    LION: tl.constexpr, COUPLED: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr, COPIES: tl.constexpr,
    STOCHASTIC: tl.constexpr, PLACED: tl.constexpr, QUADS: tl.constexpr, WIDE: tl.constexpr,
    PT: tl.constexpr, GT: tl.constexpr, MT: tl.constexpr, CT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK consecutive elements of one leaf.

    Program p takes WORK[p] = leaf << 40 | stretch: the row `leaf` of the table T (FIELDS int64: addresses, sizes,
    place), and the elements [stretch BLOCK, (stretch + 1) BLOCK) of that leaf. Masked: elements from n on, the leaf's
    size; `skip` sets n to 0, so nothing is written.
    """
    work = tl.load(WORK + tl.program_id(0))
    ROW = T + (work >> 40) * FIELDS
    begin = (work & 0xFFFFFFFFFF) * BLOCK
    n = tl.load(ROW + SIZE)
    if SKIPS:
        n = tl.where(tl.load(SKIP) != 0, n * 0, n)
    if WIDE:
        n = tl.multiple_of(n, 16)
    at = begin + tl.arange(0, BLOCK)
    P_, G_, M_ = _pointer(ROW, P, PT, WIDE), _pointer(ROW, G, GT, WIDE), _pointer(ROW, M, MT, WIDE)
    p = tl.load(P_ + at, mask=at < n, other=0.0).to(tl.float32)
    g = tl.load(G_ + at, mask=at < n, other=0.0).to(tl.float32)
    m = tl.load(M_ + at, mask=at < n, other=0.0).to(tl.float32)
    if SCALED:
        g *= tl.load(S + 3)
    if LION:
        p, m = _lion(p, g, m, S, _decay_of(ROW), b1, c1, b2, c2)
    else:
        V_ = _pointer(ROW, V, MT, WIDE)
        v = tl.load(V_ + at, mask=at < n, other=0.0).to(tl.float32)
        p, m, v = _adamw(p, g, m, v, S, _decay_of(ROW), b1, c1, b2, c2, eps, COUPLED)
    tl.store(P_ + at, p.to(PT), mask=at < n)
    if COPIES:
        tl.store(_pointer(ROW, COPY, CT, WIDE) + at, p.to(CT), mask=at < n)
    if STOCHASTIC:
        k0, k1 = optim_lowbit._step_key(
            tl.load(ROW + KEY).to(tl.uint32), tl.load(ROW + KEY + 1).to(tl.uint32), tl.load(COUNT)
        )
        bits = draw_words(begin, ROW + FIRST, k0, k1, PLACED, QUADS, BLOCK)
        tl.store(M_ + at, round_bf16(m, bits & 0xFFFF), mask=at < n)
        if not LION:
            tl.store(V_ + at, round_bf16(v, bits >> 16), mask=at < n)
    else:
        tl.store(M_ + at, m.to(MT), mask=at < n)
        if not LION:
            tl.store(V_ + at, v.to(MT), mask=at < n)


@triton.jit
def _update_blocks(
    T, WORK, S, SKIP, b1, c1, b2, c2, eps,
    LION: tl.constexpr, COUPLED: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr, COPIES: tl.constexpr,
    WIDE: tl.constexpr, PT: tl.constexpr, GT: tl.constexpr, CT: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK / CODES blocks of CODES elements of one leaf with a state in 8 bits; WORK and T as in _update_flat.

    A row of `columns` elements has `across` blocks, the last possibly shorter: block number i covers the columns from
    (i % across) CODES of row i // across, and its scale is element i of the scales. Masked: columns beyond the row, and
    blocks from `total` on.
    """
    work = tl.load(WORK + tl.program_id(0))
    ROW = T + (work >> 40) * FIELDS
    n, columns = tl.load(ROW + SIZE), tl.load(ROW + COLUMNS)
    if WIDE:
        columns = tl.multiple_of(columns, 16)
    across = (columns + (CODES - 1)) // CODES  # blocks of a row
    total = n // columns * across
    if SKIPS:
        total = tl.where(tl.load(SKIP) != 0, total * 0, total)
    block = (work & 0xFFFFFFFFFF) * (BLOCK // CODES) + tl.arange(0, BLOCK // CODES)
    column = (block % across * CODES)[:, None] + tl.arange(0, CODES)[None, :]
    at = (block // across * columns)[:, None] + column
    here = block < total
    mask = (column < columns) & here[:, None]
    P_, G_ = _pointer(ROW, P, PT, WIDE), _pointer(ROW, G, GT, WIDE)
    M_, SM_ = _pointer(ROW, M, tl.uint8, WIDE), _pointer(ROW, SM, tl.float32, False)
    p = tl.load(P_ + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(G_ + at, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        g *= tl.load(S + 3)
    m = decode_blocks(tl.load(M_ + at, mask=mask, other=0), tl.load(SM_ + block, mask=here, other=0.0), True)
    if LION:
        p, m = _lion(p, g, m, S, _decay_of(ROW), b1, c1, b2, c2)
    else:
        V_, SV_ = _pointer(ROW, V, tl.uint8, WIDE), _pointer(ROW, SV, tl.float32, False)
        v = decode_blocks(tl.load(V_ + at, mask=mask, other=0), tl.load(SV_ + block, mask=here, other=0.0), False)
        p, m, v = _adamw(p, g, m, v, S, _decay_of(ROW), b1, c1, b2, c2, eps, COUPLED)
        codes, scales = encode_blocks(v, False)
        tl.store(V_ + at, codes, mask=mask)
        tl.store(SV_ + block, scales, mask=here)
    tl.store(P_ + at, p.to(PT), mask=mask)
    if COPIES:
        tl.store(_pointer(ROW, COPY, CT, WIDE) + at, p.to(CT), mask=mask)
    codes, scales = encode_blocks(m, True)
    tl.store(M_ + at, codes, mask=mask)
    tl.store(SM_ + block, scales, mask=here)


@triton.jit
def _square_sums(T, WORK, OUT, WIDE: tl.constexpr, GT: tl.constexpr, BLOCK: tl.constexpr):
    """Store in OUT [programs, 2] the sum of squares of one stretch of a leaf, and the number of its non-finite
    elements.
    """
    pid = tl.program_id(0).to(tl.int64)
    work = tl.load(WORK + pid)
    ROW = T + (work >> 40) * FIELDS
    n = tl.load(ROW + SIZE)
    if WIDE:
        n = tl.multiple_of(n, 16)
    at = (work & 0xFFFFFFFFFF) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(_pointer(ROW, G, GT, WIDE) + at, mask=at < n, other=0.0).to(tl.float32)
    finite = (g.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    tl.store(OUT + pid * 2, tl.sum(g * g))
    tl.store(OUT + pid * 2 + 1, tl.sum(tl.where(finite, 0.0, 1.0)))


# ---- their tables ----


_TABLES: dict[tuple, Tensor] = {}
_CAPTURED: list[
    tuple[Tensor, Tensor]
] = []  # a replay of the graph copies again, from the host's memory to the device's


def _cache_on_device(key: tuple, make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Return `make()` on the device, from a cache of the 64 newest keys; the host does not wait."""
    capturing = gpu.is_capturing(device)
    if (device, key) in _TABLES and not capturing:
        return _TABLES[device, key]
    host = gpu.pinned(make(), device)
    there = host.to(device, non_blocking=True)
    if capturing:
        _CAPTURED.append((host, there))
        return there
    if len(_TABLES) >= 64:
        del _TABLES[next(iter(_TABLES))]
    _TABLES[device, key] = there
    return there


def _work_list(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return int64 [programs]: leaf << 40 | stretch, for leaves with these numbers of stretches."""

    def make() -> Tensor:
        counts = torch.tensor(sizes)
        leaf = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        return leaf << 40 | torch.arange(len(leaf)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)

    return _cache_on_device(sizes, make, device)


def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    return _cache_on_device(rows, lambda: torch.tensor(rows, dtype=torch.int64), device)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _row(leaf: Leaf, moments: int) -> tuple[int, ...]:
    state = [*map(_address, leaf.state), 0, 0, 0, 0]
    coded = leaf.state and leaf.state[0].dtype == torch.uint8
    m, v = state[0], state[1] if moments == 2 else 0
    sm, sv = (state[moments], state[moments + 1] if moments == 2 else 0) if coded else (0, 0)
    decay = int.from_bytes(struct.pack("<f", leaf.decay), "little", signed=True)
    where = leaf.place or Place()
    columns = leaf.p.shape[-1] if leaf.p.dim() else 1
    return (
        leaf.p.data_ptr(), leaf.g.data_ptr(), m, v, _address(leaf.copy), sm, sv, leaf.p.numel(), columns, decay,
        *where.key, where.first, where.size0, where.stride0, where.size1, where.stride1,
    )  # fmt: skip


class Kind(NamedTuple):
    """The properties that all leaves of one launch share."""

    p: torch.dtype
    g: torch.dtype
    m: torch.dtype
    copy: torch.dtype | None
    stochastic: bool
    placed: bool
    quads: bool
    wide: bool


def _kind(leaf: Leaf) -> Kind:
    where, n = leaf.place, leaf.p.numel()
    coded = leaf.state[0].dtype == torch.uint8
    tensors = [x for x in (leaf.p, leaf.g, *leaf.state, leaf.copy) if x is not None]
    size = leaf.p.shape[-1] if coded else n
    wide = size % 16 == 0 and all(x.data_ptr() % 16 == 0 for x in (tensors if not coded else (leaf.p, leaf.g)))
    placed = where is not None and where.size0 < n
    numbers = (
        (where.first, *((where.size0, where.stride0, where.size1, where.stride1) if placed else ())) if where else ()
    )
    quads = where is not None and all(number % 4 == 0 for number in numbers)
    copy = None if leaf.copy is None else leaf.copy.dtype
    return Kind(leaf.p.dtype, leaf.g.dtype, leaf.state[0].dtype, copy, where is not None, placed, quads, wide)


@torch.no_grad()
def _launch(step: Any, leaves: Sequence[Leaf], rates: Rates) -> None:
    if leaves and fake_device_of(leaves[0].p) is not None:
        record_launch(step.__name__, *touched_tensors(leaves))
        return
    groups: dict[Kind, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.p.numel():
            groups.setdefault(_kind(leaf), []).append(leaf)
    if not groups:
        return
    device, lion = leaves[0].p.device, step is lion_step
    factor = () if rates.factor is None else (*[rates.factor] * (4 - len(rates.scalars)),)
    scalars = torch.stack([x.to(device, torch.float32) for x in (*rates.scalars, *factor)])
    skip = scalars if rates.skip is None else rates.skip.to(device, torch.int32)
    numbers = (rates.b1, 1 - rates.b1, rates.b2, 1 - rates.b2)
    for kind, group in groups.items():
        coded, config = kind.m == torch.uint8, ODD if kind.stochastic and not kind.quads else CONFIG
        table = _table(tuple(_row(leaf, len(SIGNED[step])) for leaf in group), device)
        common = {
            "LION": lion, "COUPLED": rates.coupled, "SCALED": rates.factor is not None, "SKIPS": rates.skip is not None,
            "COPIES": kind.copy is not None, "WIDE": kind.wide, "PT": FLOATS[kind.p], "GT": FLOATS[kind.g],
            "CT": FLOATS[kind.copy or torch.float32],
        }  # fmt: skip
        with gpu.on_device(device):
            if coded:
                block = rates.block
                each = [
                    leaf.p.numel() // leaf.p.shape[-1] * optim_lowbit.blocks_of(leaf.p.shape[-1], block)
                    for leaf in group
                ]
                config = {**config, "BLOCK": max(config["BLOCK"], block)}
                work = _work_list(tuple(-(-n * block // config["BLOCK"]) for n in each), device)
                _update_blocks[(len(work),)](
                    table, work, scalars, skip, *numbers, rates.eps, **common, CODES=block, **config
                )
            else:
                work = _work_list(tuple(triton.cdiv(leaf.p.numel(), config["BLOCK"]) for leaf in group), device)
                _update_flat[(len(work),)](
                    table, work, scalars, rates.count, skip, *numbers, rates.eps, **common,
                    STOCHASTIC=kind.stochastic, PLACED=kind.placed, QUADS=kind.quads, MT=FLOATS[kind.m], **config,
                )  # fmt: skip


# ---- the operations ----


def _supports(leaves: Sequence[Leaf], rates: Rates) -> str:
    if any(leaf.state[0].dtype == torch.uint8 for leaf in leaves) and (
        rates.block & (rates.block - 1) or not 16 <= rates.block <= 4096
    ):
        return f"the block is {rates.block}; it takes a power of two from 16 to 4096"
    for leaf in leaves:
        tensors = [x for x in (leaf.p, leaf.g, *leaf.state, leaf.copy) if x is not None]
        if why := _runs(tensors):
            return why
        if any(x.dtype not in FLOATS for x in (leaf.p, leaf.g)) or leaf.state[0].dtype not in (*FLOATS, torch.uint8):
            return (
                f"the dtypes are {leaf.p.dtype}, {leaf.g.dtype} and {leaf.state[0].dtype}; it takes those of 32 "
                "and 16 bits"
            )
        if any(not x.is_contiguous() for x in tensors):
            return "a leaf, its gradient or its state is not contiguous"
    return ""


def _runs(tensors: Sequence[Tensor]) -> str:
    devices = {x.device for x in tensors}
    if len(devices) == 1 and (kind_of(tensors[0]) == "cuda" or INTERPRETED):
        return ""
    return f"a tensor is on {', '.join(sorted(str(d) for d in devices))}, and Triton's kernels run on one cuda device"


def on_cuda(leaves: Sequence[Any], *rest: Any) -> str:
    """Why "auto" should not take a Triton kernel for these leaves."""
    devices = {kind_of(leaf.p if isinstance(leaf, Leaf) else leaf) for leaf in leaves}
    return "" if devices <= {"cuda"} else "interpreted, for checking numbers alone"


def _cost(leaves: Sequence[Leaf], rates: Rates) -> int:
    """Each tensor is read and written once, but for the gradient (read) and the copy (written)."""
    total = 0
    for leaf in leaves:
        total += (
            sum(2 * x.numel() * x.element_size() for x in (leaf.p, *leaf.state))
            + leaf.g.numel() * leaf.g.element_size()
        )
        total += 0 if leaf.copy is None else leaf.copy.numel() * leaf.copy.element_size()
    return total


adamw = Op(
    "adamw",
    adamw_reference,
    Form("triton", functools.partial(_launch, adamw_step), supports=_supports, prefers=on_cuda),
    Form("fused", adamw_fused, supports=fused_serves),
    Form(
        "cpp",
        functools.partial(optim_cpu.step, adamw_step),
        functools.partial(optim_cpu.supports, adamw_step),
        optim_cpu.adamw_prefers,
    ),
    flops=lambda leaves, rates: 16 * sum(leaf.p.numel() for leaf in leaves),
    bytes=_cost,
)
lion = Op(
    "lion",
    lion_reference,
    Form("triton", functools.partial(_launch, lion_step), supports=_supports, prefers=on_cuda),
    Form(
        "cpp",
        functools.partial(optim_cpu.step, lion_step),
        functools.partial(optim_cpu.supports, lion_step),
        optim_cpu.lion_prefers,
    ),
    flops=lambda leaves, rates: 10 * sum(leaf.p.numel() for leaf in leaves),
    bytes=_cost,
)


def grad_norm_reference(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(2-norm of all elements, float32 0-dim; how many are not finite, int64 0-dim): the definition. One leaf at
    least.
    """
    norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads])
    bad: Any = sum((~g.isfinite()).sum() for g in grads)  # a tensor: there is a leaf
    return torch.linalg.vector_norm(norms), bad


@torch.no_grad()
def _grad_norm(grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    device, groups = grads[0].device, {}
    if fake_device_of(grads[0]) is not None:
        parts = torch.empty(1 + sum(triton.cdiv(g.numel(), NORM["BLOCK"]) for g in grads), 2, device=device)
        record_launch("grad_norm", list(grads), [parts])
        return _combine_norms([parts])
    for g in grads:
        if g.numel():
            groups.setdefault((g.dtype, g.numel() % 16 == 0 and g.data_ptr() % 16 == 0), []).append(g)
    parts = [torch.zeros(1, 2, device=device)]
    for (dtype, wide), group in groups.items():
        table = _table(tuple(_row(Leaf(g, g, ()), 0) for g in group), device)
        work = _work_list(tuple(triton.cdiv(g.numel(), NORM["BLOCK"]) for g in group), device)
        parts.append(torch.empty(len(work), 2, device=device))
        with gpu.on_device(device):
            _square_sums[(len(work),)](table, work, parts[-1], WIDE=wide, GT=FLOATS[dtype], **NORM)
    return _combine_norms(parts)


def _combine_norms(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    total, bad = torch.cat(tuple(parts)).to(torch.float64).sum(0)
    return total.sqrt().to(torch.float32), bad.to(torch.int64)


def _norm_supports(grads: Sequence[Tensor]) -> str:
    if not grads or any(g.dtype not in FLOATS for g in grads):
        return (
            f"the dtypes are {', '.join(sorted({str(g.dtype) for g in grads})) or 'none'}; it takes those of 32 "
            "and 16 bits"
        )
    return _runs(grads) or ("" if all(g.is_contiguous() for g in grads) else "a gradient is not contiguous")


grad_norm = Op(
    "grad_norm",
    grad_norm_reference,
    Form("triton", _grad_norm, supports=_norm_supports, prefers=on_cuda),
    flops=lambda grads: 2 * sum(g.numel() for g in grads),
    bytes=lambda grads: sum(g.numel() * g.element_size() for g in grads),
)


def builds() -> Iterator[Build]:
    """The builds for `aot`."""
    flags = dict.fromkeys(("COUPLED", "SCALED", "SKIPS", "COPIES"), False)
    real = {"S": "*fp32", "b1": "fp32", "c1": "fp32", "b2": "fp32", "c2": "fp32", "eps": "fp32"}
    flat = {"T": "*i64", "WORK": "*i64", "S": "*fp32", "COUNT": "*i64", "SKIP": "*i32", **real}
    names = "LION COUPLED SCALED SKIPS COPIES STOCHASTIC PLACED QUADS WIDE PT GT MT CT BLOCK"
    whole = {"SCALED": True, "SKIPS": True, "COPIES": True}
    for label, lion, state, extra in (
        ("fp32", False, tl.float32, {}),
        ("fp32 all", False, tl.float32, whole),
        ("bf16", False, tl.bfloat16, whole),
        ("bf16 stochastic", False, tl.bfloat16, whole | {"STOCHASTIC": True, "QUADS": True}),
        ("bf16 stochastic placed", False, tl.bfloat16, whole | {"STOCHASTIC": True, "PLACED": True, "QUADS": True}),
        ("bf16 stochastic placed odd", False, tl.bfloat16, whole | {"STOCHASTIC": True, "PLACED": True, "WIDE": False}),
        ("fp32", True, tl.float32, whole),
        ("bf16 stochastic", True, tl.bfloat16, whole | {"STOCHASTIC": True, "QUADS": True}),
    ):
        constants = flags | {"LION": lion, "STOCHASTIC": False, "PLACED": False, "QUADS": False, "WIDE": True}
        constants |= {"PT": tl.float32, "GT": tl.float32, "MT": state, "CT": tl.bfloat16} | extra
        signature = flat | dict.fromkeys(names.split(), "constexpr")
        config = CONFIG if constants["WIDE"] else ODD
        title = f"_update_flat {'lion' if lion else 'adamw'} {label} {config['BLOCK']}"
        yield Build(title, "_update_flat", signature, constants, config, wide=constants["WIDE"])
    names = "LION COUPLED SCALED SKIPS COPIES WIDE PT GT CT CODES BLOCK"
    for lion in (False, True):
        for copies in (False, True):
            constants = flags | {"LION": lion, "COPIES": copies, "WIDE": True, "CODES": 256}
            constants |= {"PT": tl.float32, "GT": tl.float32, "CT": tl.bfloat16}
            signature = {"T": "*i64", "WORK": "*i64", "S": "*fp32", "SKIP": "*i32", **real} | dict.fromkeys(
                names.split(), "constexpr"
            )
            title = f"_update_blocks {'lion' if lion else 'adamw'}{' copy' * copies} {CONFIG['BLOCK']}"
            # Without a copy AdamW's are 16 of 33: those of the table and the scales are narrow.
            yield Build(title, "_update_blocks", signature, constants, CONFIG, wide=lion or copies)
    for dtype in (tl.float32, tl.bfloat16):
        signature = {
            "T": "*i64",
            "WORK": "*i64",
            "OUT": "*fp32",
            "WIDE": "constexpr",
            "GT": "constexpr",
            "BLOCK": "constexpr",
        }
        yield Build(
            f"_square_sums {dtype} {NORM['BLOCK']}", "_square_sums", signature, {"WIDE": True, "GT": dtype}, NORM
        )
