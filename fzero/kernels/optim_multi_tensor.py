"""AdamW and Lion over many leaves in one launch, in place.

The equations and references are in optim_leaf. If `skip` is set, nothing changes. These functions write into their
arguments, so they are not operators of a traced graph. Bytes per parameter, fp32 p and g: 28 with float32 states, 20
with bfloat16, 16 with 8 bits; 2 less for a bfloat16 gradient, 2 more where a bfloat16 copy of p is written in the same
pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero.core import gpu
from fzero.core.device import fake_device_of, record_launch
from fzero.kernels import optim_leaf, optim_lowbit
from fzero.kernels.aot import Build, build
from fzero.kernels.custom_operator import tl, triton
from fzero.kernels.grad_norm import (
    COLUMNS,
    COPY,
    DECAY,
    FIELDS,
    FIRST,
    FLOATS,
    KEY,
    SIZE,
    SM,
    SV,
    G,
    M,
    P,
    V,
    device_mismatch,
    field_pointer,
    leaf_row,
    leaf_table,
    on_cuda,
    work_list,
)
from fzero.kernels.optim_leaf import (
    SIGNED,
    OptimLeaf,
    StepRates,
    adamw_fused,
    adamw_step,
    changing_b1,
    fused_serves,
    lion_step,
    touched_tensors,
)
from fzero.kernels.optim_lowbit import decode_blocks, draw_words, encode_blocks, round_bf16
from fzero.kernels.registry import Form, Op

CONFIG = {"BLOCK": 2048, "num_warps": 4}
ODD = {"BLOCK": 512, "num_warps": 4}  # for stochastic rounding in which each element needs its own Philox block


# ---- the kernels ----


@triton.jit
def _adamw(p, g, m, v, S, decay, b1, c1, b2, c2, eps, COUPLED: tl.constexpr):
    # S lies on the device: the rate and the corrections of the biases, which change with each step, are no constants.
    rate, correct1, root_correct2 = tl.load(S), tl.load(S + 1), tl.load(S + 2)
    if COUPLED:
        g += p * decay
    m = m * b1 + g * c1
    v = v * b2 + g * g * c2
    # Exact division and root, as torch computes them: the bits are those of the other forms.
    u = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root_correct2) + eps) * tl.div_rn(-rate, correct1)
    # COUPLED: Adam with the decay in the gradient, else AdamW's, beside it.
    return p + (u if COUPLED else u - p * (rate * decay)), m, v


@triton.jit
def _lion(p, g, m, S, decay, b1, c1, b2, c2):
    rate = tl.load(S)
    c = m * b1 + g * c1
    direction = tl.where(c > 0, 1.0, tl.where(c < 0, -1.0, c)) + p * decay  # NaN stays NaN
    return p + direction * -rate, m * b2 + g * c2


@triton.jit
def _decay_of(ROW):
    # A float32 in the lower bits of an int64.
    return tl.load(ROW + DECAY).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _update_flat(
    T, WORK, S, COUNT, SKIP, b1, c1, b2, c2, eps,
    LION: tl.constexpr, COUPLED: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr, COPIES: tl.constexpr,
    STOCHASTIC: tl.constexpr, PLACED: tl.constexpr, QUADS: tl.constexpr, WIDE: tl.constexpr,
    PT: tl.constexpr, GT: tl.constexpr, MT: tl.constexpr, CT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK consecutive elements of one leaf; WORK[p] = leaf << 40 | stretch, T: the leaves' table."""
    # Program p takes WORK[p] = leaf << 40 | stretch: the row `leaf` of the table T (FIELDS int64: addresses, sizes,
    # position), and the elements [stretch BLOCK, (stretch + 1) BLOCK) of that leaf. Masked: elements from n on, the
    # leaf's size; `skip` sets n to 0, so nothing is written.
    work = tl.load(WORK + tl.program_id(0))
    ROW = T + (work >> 40) * FIELDS
    begin = (work & 0xFFFFFFFFFF) * BLOCK
    n = tl.load(ROW + SIZE)
    if SKIPS:
        n = tl.where(tl.load(SKIP) != 0, n * 0, n)
    # Every address and size is a multiple of 16, which the compiler cannot know of a table in memory.
    if WIDE:
        n = tl.multiple_of(n, 16)
    offsets = begin + tl.arange(0, BLOCK)
    P_, G_, M_ = field_pointer(ROW, P, PT, WIDE), field_pointer(ROW, G, GT, WIDE), field_pointer(ROW, M, MT, WIDE)
    # All arithmetic in float32, whatever dtype a leaf is stored in.
    p = tl.load(P_ + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    g = tl.load(G_ + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    m = tl.load(M_ + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    if SCALED:
        # A factor of all gradients, as of clipping, which is on the device.
        g *= tl.load(S + 3)
    if LION:
        p, m = _lion(p, g, m, S, _decay_of(ROW), b1, c1, b2, c2)
    else:
        V_ = field_pointer(ROW, V, MT, WIDE)
        v = tl.load(V_ + offsets, mask=offsets < n, other=0.0).to(tl.float32)
        p, m, v = _adamw(p, g, m, v, S, _decay_of(ROW), b1, c1, b2, c2, eps, COUPLED)
    tl.store(P_ + offsets, p.to(PT), mask=offsets < n)
    if COPIES:
        tl.store(field_pointer(ROW, COPY, CT, WIDE) + offsets, p.to(CT), mask=offsets < n)
    if STOCHASTIC:
        k0, k1 = optim_lowbit._step_key(
            tl.load(ROW + KEY).to(tl.uint32), tl.load(ROW + KEY + 1).to(tl.uint32), tl.load(COUNT)
        )
        # 32 bits an element: m takes the lower half, v the upper one.
        bits = draw_words(begin, ROW + FIRST, k0, k1, PLACED, QUADS, BLOCK)
        tl.store(M_ + offsets, round_bf16(m, bits & 0xFFFF), mask=offsets < n)
        if not LION:
            tl.store(V_ + offsets, round_bf16(v, bits >> 16), mask=offsets < n)
    else:
        tl.store(M_ + offsets, m.to(MT), mask=offsets < n)
        if not LION:
            tl.store(V_ + offsets, v.to(MT), mask=offsets < n)


@triton.jit
def _update_blocks(
    T, WORK, S, SKIP, b1, c1, b2, c2, eps,
    LION: tl.constexpr, COUPLED: tl.constexpr, SCALED: tl.constexpr, SKIPS: tl.constexpr, COPIES: tl.constexpr,
    WIDE: tl.constexpr, PT: tl.constexpr, GT: tl.constexpr, CT: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK / CODES blocks of CODES elements of one leaf with a state in 8 bits."""
    # A row of `columns` elements has `across` blocks, the last possibly shorter: block number i covers the columns from
    # (i % across) CODES of row i // across, and its scale is element i of the scales. Masked: columns beyond the row,
    # and blocks from `total` on.
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
    # A tile [blocks, CODES]: each row of it is one block, so that its largest magnitude is a maximum along the tile's
    # rows.
    column = (block % across * CODES)[:, None] + tl.arange(0, CODES)[None, :]
    offsets = (block // across * columns)[:, None] + column
    valid = block < total
    mask = (column < columns) & valid[:, None]
    P_, G_ = field_pointer(ROW, P, PT, WIDE), field_pointer(ROW, G, GT, WIDE)
    M_, SM_ = field_pointer(ROW, M, tl.uint8, WIDE), field_pointer(ROW, SM, tl.float32, False)
    p = tl.load(P_ + offsets, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(G_ + offsets, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        g *= tl.load(S + 3)
    # Columns beyond the row's end are code 0, which is zero: they do not count in the largest magnitude.
    m = decode_blocks(tl.load(M_ + offsets, mask=mask, other=0), tl.load(SM_ + block, mask=valid, other=0.0), True)
    if LION:
        p, m = _lion(p, g, m, S, _decay_of(ROW), b1, c1, b2, c2)
    else:
        V_, SV_ = field_pointer(ROW, V, tl.uint8, WIDE), field_pointer(ROW, SV, tl.float32, False)
        v = decode_blocks(tl.load(V_ + offsets, mask=mask, other=0), tl.load(SV_ + block, mask=valid, other=0.0), False)
        p, m, v = _adamw(p, g, m, v, S, _decay_of(ROW), b1, c1, b2, c2, eps, COUPLED)
        # v is 0 or more, and needs no sign: twice the levels.
        codes, scales = encode_blocks(v, False)
        tl.store(V_ + offsets, codes, mask=mask)
        tl.store(SV_ + block, scales, mask=valid)
    tl.store(P_ + offsets, p.to(PT), mask=mask)
    if COPIES:
        tl.store(field_pointer(ROW, COPY, CT, WIDE) + offsets, p.to(CT), mask=mask)
    codes, scales = encode_blocks(m, True)
    tl.store(M_ + offsets, codes, mask=mask)
    tl.store(SM_ + block, scales, mask=valid)


# ---- their launches ----


class LaunchKind(NamedTuple):
    """The properties that all leaves of one launch share."""

    p: torch.dtype
    g: torch.dtype
    m: torch.dtype
    copy: torch.dtype | None
    stochastic: bool
    placed: bool
    quads: bool
    wide: bool


def _kind(leaf: OptimLeaf) -> LaunchKind:
    position, n = leaf.position, leaf.p.numel()
    coded = leaf.state[0].dtype == torch.uint8
    tensors = [x for x in (leaf.p, leaf.g, *leaf.state, leaf.copy) if x is not None]
    size = leaf.p.shape[-1] if coded else n
    wide = size % 16 == 0 and all(x.data_ptr() % 16 == 0 for x in (tensors if not coded else (leaf.p, leaf.g)))
    placed = position is not None and position.size0 < n
    numbers = (
        (position.first, *((position.size0, position.stride0, position.size1, position.stride1) if placed else ()))
        if position
        else ()
    )
    quads = position is not None and all(number % 4 == 0 for number in numbers)
    copy = None if leaf.copy is None else leaf.copy.dtype
    return LaunchKind(leaf.p.dtype, leaf.g.dtype, leaf.state[0].dtype, copy, position is not None, placed, quads, wide)


@torch.no_grad()
def _launch(step: Any, leaves: Sequence[OptimLeaf], rates: StepRates) -> None:
    if leaves and fake_device_of(leaves[0].p) is not None:
        record_launch(step.__name__, *touched_tensors(leaves))
        return
    groups: dict[LaunchKind, list[OptimLeaf]] = {}
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
        table = leaf_table(tuple(leaf_row(leaf, len(SIGNED[step])) for leaf in group), device)
        common = {
            "LION": lion, "COUPLED": rates.coupled, "SCALED": rates.factor is not None, "SKIPS": rates.skip is not None,
            "COPIES": kind.copy is not None, "WIDE": kind.wide, "PT": FLOATS[kind.p], "GT": FLOATS[kind.g],
            "CT": FLOATS[kind.copy or torch.float32],
        }  # fmt: skip
        with gpu.on_device(device):
            if coded:
                block = rates.block
                leaf_blocks = [
                    leaf.p.numel() // leaf.p.shape[-1] * optim_lowbit.blocks_of(leaf.p.shape[-1], block)
                    for leaf in group
                ]
                config = {**config, "BLOCK": max(config["BLOCK"], block)}
                work = work_list(tuple(-(-n * block // config["BLOCK"]) for n in leaf_blocks), device)
                _update_blocks[(len(work),)](
                    table, work, scalars, skip, *numbers, rates.eps, **common, CODES=block, **config
                )
            else:
                work = work_list(tuple(triton.cdiv(leaf.p.numel(), config["BLOCK"]) for leaf in group), device)
                _update_flat[(len(work),)](
                    table, work, scalars, rates.count, skip, *numbers, rates.eps, **common,
                    STOCHASTIC=kind.stochastic, PLACED=kind.placed, QUADS=kind.quads, MT=FLOATS[kind.m], **config,
                )  # fmt: skip


# ---- the operations ----


def _supports(leaves: Sequence[OptimLeaf], rates: StepRates) -> str:
    if reason := changing_b1(rates):
        return reason
    if any(leaf.state[0].dtype == torch.uint8 for leaf in leaves) and (
        rates.block & (rates.block - 1) or not 16 <= rates.block <= 4096
    ):
        return f"the block is {rates.block}; it takes a power of two from 16 to 4096"
    for leaf in leaves:
        tensors = [x for x in (leaf.p, leaf.g, *leaf.state, leaf.copy) if x is not None]
        if reason := device_mismatch(tensors):
            return reason
        if any(x.dtype not in FLOATS for x in (leaf.p, leaf.g)) or leaf.state[0].dtype not in (*FLOATS, torch.uint8):
            return (
                f"the dtypes are {leaf.p.dtype}, {leaf.g.dtype} and {leaf.state[0].dtype}; it takes those of 32 "
                "and 16 bits"
            )
        if any(not x.is_contiguous() for x in tensors):
            return "a leaf, its gradient or its state is not contiguous"
    return ""


def _cost(leaves: Sequence[OptimLeaf], rates: StepRates) -> int:
    """Each tensor is read and written once, but for the gradient (read) and the copy (written)."""
    total = 0
    for leaf in leaves:
        total += (
            sum(2 * x.numel() * x.element_size() for x in (leaf.p, *leaf.state))
            + leaf.g.numel() * leaf.g.element_size()
        )
        total += 0 if leaf.copy is None else leaf.copy.numel() * leaf.copy.element_size()
    return total


def _op(name: str, step: Any, flops: int, prefers: Callable[..., str], *forms: Form) -> Op:
    """The operation that makes this step on many leaves; flops: an element."""
    return Op(
        name,
        functools.partial(optim_leaf.leaves_reference, step),
        Form("triton", functools.partial(_launch, step), supports=_supports, prefers=on_cuda),
        *forms,
        Form(
            "cpp",
            functools.partial(optim_leaf.cpp_step, step),
            functools.partial(optim_leaf.cpp_serves, step),
            prefers,
        ),
        flops=lambda leaves, rates: flops * sum(leaf.p.numel() for leaf in leaves),
        bytes=_cost,
    )


adamw = _op("adamw", adamw_step, 16, optim_leaf.adamw_cpp_prefers, Form("fused", adamw_fused, supports=fused_serves))
lion = _op("lion", lion_step, 10, optim_leaf.lion_cpp_prefers)


def builds(gpu: str) -> Iterator[Build]:
    """The builds for `aot`, with the block sizes of a GPU by its name."""
    flags = dict.fromkeys(("COUPLED", "SCALED", "SKIPS", "COPIES"), False)
    types = "T:*i64 WORK:*i64 S:*fp32 COUNT:*i64 SKIP:*i32 b1:fp32 c1:fp32 b2:fp32 c2:fp32 eps:fp32"
    all_flags = {"SCALED": True, "SKIPS": True, "COPIES": True}
    for label, lion, state, extra in (
        ("fp32", False, tl.float32, {}),
        ("fp32 all", False, tl.float32, all_flags),
        ("bf16", False, tl.bfloat16, all_flags),
        ("bf16 stochastic", False, tl.bfloat16, all_flags | {"STOCHASTIC": True, "QUADS": True}),
        ("bf16 stochastic placed", False, tl.bfloat16, all_flags | {"STOCHASTIC": True, "PLACED": True, "QUADS": True}),
        (
            "bf16 stochastic placed odd",
            False,
            tl.bfloat16,
            all_flags | {"STOCHASTIC": True, "PLACED": True, "WIDE": False},
        ),
        ("fp32", True, tl.float32, all_flags),
        ("bf16 stochastic", True, tl.bfloat16, all_flags | {"STOCHASTIC": True, "QUADS": True}),
    ):
        constants = flags | {"LION": lion, "STOCHASTIC": False, "PLACED": False, "QUADS": False, "WIDE": True}
        constants |= {"PT": tl.float32, "GT": tl.float32, "MT": state, "CT": tl.bfloat16} | extra
        config = CONFIG if constants["WIDE"] else ODD
        variant = f"{'lion' if lion else 'adamw'} {label} {config['BLOCK']}"
        yield build(_update_flat, variant, config, constants, types, wide=constants["WIDE"])
    for lion in (False, True):
        for copies in (False, True):
            constants = flags | {"LION": lion, "COPIES": copies, "WIDE": True, "CODES": 256}
            constants |= {"PT": tl.float32, "GT": tl.float32, "CT": tl.bfloat16}
            variant = f"{'lion' if lion else 'adamw'}{' copy' * copies} {CONFIG['BLOCK']}"
            # Without a copy AdamW's are 16 of 33: those of the table and the scales are narrow.
            yield build(_update_blocks, variant, CONFIG, constants, types, wide=lion or copies)
