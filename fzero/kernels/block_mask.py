"""Which blocks of keys each block of queries sees, head by head: a mask of attention that may look ahead.

    mask[h, i, j]: whether the queries of block i see the keys of block j in head h

A causal mask has no block after a query's own, and within that a query sees no later key. DeepSpeed's five sparsity
configurations are masks of this kind, and a sliding window; each has a function here, of the same layout for the same
numbers (deepspeed/ops/sparse_attention/sparsity_config.py), but for random blocks, which follow from a hash of the seed
here. Masks of one shape join by `|`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fzero.core.arguments import checked, expect_count, expect_device, expect_kind
from fzero.core.device import HOST, is_fake
from fzero.kernels.attention_pattern import mix

UNIT = 64  # rows of a kernel's tile, at most
LEAST_UNIT = 16  # rows: a tile of a product has no fewer
SEEDS = 1 << 32  # the hash takes 32 bits
DRAWN = 40  # blocks of a mask's side up to which it is drawn
Blocks = Sequence["int | tuple[int, int]"]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A block mask of attention: `blocks` bool [H or 1, N, M] for queries in N blocks and keys in M, of `block` tokens.

    blocks: an array or a CPU tensor, or [N, M] for all heads; of the last blocks the sequence may have a part alone.
    causal: a query sees no later key; blocks after its own are taken out. device: where attention is computed; `to`
    gives the same mask for another.

    Raises ValueError for other shapes and dtypes.

    >>> mask = BlockMask([[1, 0], [1, 1]], block=16)
    >>> mask.pairs(32, 32).tolist()
    [768]
    >>> print(sliding_blocks(64, 16, window=3))
    1 x 4 x 4 blocks of 16, 10 of 16 seen
    x x . .
    x x x .
    . x x x
    . . x x
    """

    blocks: np.ndarray
    block: int
    causal: bool = False
    device: torch.device = HOST
    unit: int = field(init=False, default=0)  # rows of a kernel's unit, which divides a block; 0: kernels have none
    _arrays: tuple[np.ndarray, ...] = field(init=False, default=(), repr=False)
    _tensors: tuple[Tensor, ...] = field(init=False, default=(), repr=False)

    def __post_init__(self) -> None:
        try:
            source = self.blocks.detach().cpu() if isinstance(self.blocks, Tensor) else self.blocks
            blocks = np.asarray(source)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(
                f"block mask: blocks are no array ({error}); give [blocks of queries, blocks of keys]"
            ) from None
        blocks = blocks[None] if blocks.ndim == 2 else blocks
        if (
            blocks.ndim != 3
            or not blocks.size
            or blocks.dtype.kind not in "bui"
            or not set(np.unique(blocks)) <= {0, 1}
        ):
            raise ValueError(
                f"block mask: blocks are {blocks.dtype} {list(blocks.shape)}; they must be bool, or 0 and 1, "
                "[heads or 1, blocks of queries, blocks of keys], at least 1 of each"
            )
        expect_count("block mask: block", self.block)
        expect_kind("block mask: causal", self.causal, bool, "write causal=True")
        if self.causal and blocks.shape[1] != blocks.shape[2]:
            raise ValueError(f"block mask: blocks are {list(blocks.shape)}; a causal mask has as many of both sides")
        blocks = blocks.astype(bool)
        assign = object.__setattr__
        assign(self, "blocks", np.tril(blocks) if self.causal else blocks)
        assign(self, "device", expect_device(self.device))
        unit = math.gcd(self.block, UNIT)
        if unit >= LEAST_UNIT:
            units = self.blocks.repeat(self.block // unit, 1).repeat(self.block // unit, 2)
            assign(self, "unit", unit)
            assign(self, "_arrays", (*_listed(units), *_listed(units.swapaxes(1, 2))))
            assign(self, "_tensors", tuple(torch.from_numpy(x).to(self.device) for x in self._arrays))

    def __str__(self) -> str:
        """Its size, and of each head a drawing, where it is small."""
        lines = [f"{self._sizes}, {self.blocks.sum()} of {self.blocks.size} seen"]
        if max(self.blocks.shape[1:]) <= DRAWN:
            for head in self.blocks:
                lines += ["", *(" ".join(".x"[cell] for cell in row.astype(int)) for row in head)]
        return "\n".join(lines).replace("\n\n", "\n", 1)

    @property
    def _sizes(self) -> str:
        heads, n, m = self.blocks.shape
        return f"{heads} x {n} x {m} blocks of {self.block}{', causal' * self.causal}"

    def __or__(self, rhs: BlockMask) -> BlockMask:
        """The mask in which a query sees what it sees in either; raises ValueError."""
        expect_kind("block mask: what joins", rhs, BlockMask, "give another BlockMask")
        lhs_traits, rhs_traits = ((x.block, x.causal, x.device, x.blocks.shape[1:]) for x in (self, rhs))
        heads = {len(self.blocks), len(rhs.blocks)} - {1}
        if lhs_traits != rhs_traits or len(heads) > 1:
            lhs_traits, rhs_traits = (f"{x._sizes}, on {x.device}" for x in (self, rhs))
            raise ValueError(
                f"block masks do not join: one has {lhs_traits}, the other {rhs_traits}; give masks alike in these, "
                "but for 1 head beside several"
            )
        return BlockMask(self.blocks | rhs.blocks, self.block, self.causal, self.device)

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask for tensors on another device."""
        return BlockMask(self.blocks, self.block, self.causal, expect_device(device))

    def expect_sizes(self, queries: int, keys: int, heads: int) -> None:
        """Raise ValueError unless it is a mask for as many queries, keys and heads."""
        mask_heads, n, m = self.blocks.shape
        expected = [-(-size // self.block) for size in (queries, keys)]
        if [n, m] != expected or mask_heads not in (1, heads):
            raise ValueError(
                f"attention: the mask has {mask_heads} heads of {n} x {m} blocks of {self.block} tokens; {queries} "
                f"queries of {keys} keys take {expected[0]} x {expected[1]} in 1 or {heads} heads "
                "(under tp a rank's); make it for these"
            )
        if self.causal and queries != keys:
            raise ValueError(f"attention: {queries} queries have {keys} keys; a causal mask takes equal numbers")

    def lists(self, q: Tensor) -> tuple[Tensor, ...]:
        """(starts, units) of the units of keys that each unit of queries sees, and of the reverse, int32."""
        if is_fake(q):  # a trace takes no tensor from outside
            return tuple(torch.from_numpy(x).to(q.device) for x in self._arrays)
        return self._tensors

    def visible(self, queries: int, keys: int) -> Tensor:
        """The mask written out, bool [H or 1, queries, keys]."""
        wide = self.blocks.repeat(self.block, 1)[:, :queries].repeat(self.block, 2)[:, :, :keys]
        return torch.from_numpy(np.tril(wide) if self.causal else wide.copy())

    def pairs(self, queries: int, keys: int) -> np.ndarray:
        """The number of pairs of a query and a key that it sees, int64 [H or 1]."""
        sizes = [
            np.clip(length - np.arange(n) * self.block, 0, self.block)
            for length, n in zip((queries, keys), self.blocks.shape[1:])
        ]
        counts = np.einsum("hij,i,j->h", self.blocks.astype(np.int64), *sizes)
        if self.causal:
            diagonal = np.einsum("hii->hi", self.blocks).astype(np.int64)
            counts -= diagonal @ (sizes[0] * (sizes[0] - 1) // 2)
        return counts


def _listed(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = units.reshape(-1, units.shape[-1])
    starts = np.concatenate(([0], rows.sum(-1).cumsum()))
    return starts.astype(np.int32), np.nonzero(rows)[1].astype(np.int32)


# ---- the layouts ----------------------------------------------------------------------------------------------------


def _count(t: int, block: int, **counts: int) -> int:
    """The blocks of t tokens; raises ValueError for a number below its least."""
    for name, value in {"t": t, "block": block, **counts}.items():
        expect_count(f"block mask: {name}", value, 0 if name in ("random", "seed") else 1)
    if counts.get("seed", 0) >= SEEDS:
        raise ValueError(f"block mask: seed is {counts['seed']}; it must be below {SEEDS}")
    return -(-t // block)


def _globals(n: int, global_ids: Blocks) -> np.ndarray:
    """bool [n], whether a block is one of `global_ids`."""
    is_global = np.zeros(n, bool)
    for entry in global_ids:
        numbers = entry if isinstance(entry, tuple) else (entry, entry)
        is_range = len(numbers) == 2 and all(isinstance(i, int) and not isinstance(i, bool) for i in numbers)
        first, end = (numbers[0], numbers[1] + (numbers is not entry)) if is_range else (0, 0)
        if not 0 <= first < end:
            raise ValueError(f"block mask: global_ids has {entry}; give numbers of blocks, or (first, end) of several")
        is_global[first:end] = True
    return is_global


@checked()
def dense_blocks(t: int, block: int = 16, *, causal: bool = False) -> BlockMask:
    """The mask of t tokens in which every block sees every other ("dense")."""
    n = _count(t, block)
    return BlockMask(np.ones((1, n, n), bool), block, causal)


@checked()
def sliding_blocks(t: int, block: int = 16, *, window: int = 3, causal: bool = False) -> BlockMask:
    """The mask of t tokens in which a block sees itself and the window // 2 blocks on each side ("local sliding
    window"; Beltagy et al. 2020, arXiv:2004.05150, section 3.1).
    """
    n = np.arange(_count(t, block, window=window))
    return BlockMask(np.abs(n[:, None] - n)[None] <= window // 2, block, causal)


@checked()
def global_blocks(
    t: int, block: int = 16, *, global_ids: Blocks = (0,), horizontal: bool = True, causal: bool = False
) -> BlockMask:
    """The mask of t tokens in which all see the blocks `global_ids`, and these, if `horizontal`, see all.

    global_ids: numbers of blocks from 0 on, or (first, end) of several; those beyond the sequence count for nothing.
    """
    is_global = _globals(n := _count(t, block), global_ids)
    row_mask = np.broadcast_to(is_global, (n, n))
    return BlockMask((row_mask | is_global[:, None] if horizontal else row_mask)[None], block, causal)


@checked()
def random_blocks(
    t: int, block: int = 16, *, random: int = 1, heads: int = 1, seed: int = 0, causal: bool = False
) -> BlockMask:
    """The mask of t tokens in which each block sees `random` others, or itself: those with the least hash, of 32 bits,
    of (seed, head, block, other). Causal: of those up to itself, where there are as many.

    >>> random_blocks(160, 16, random=2, heads=3).blocks.sum(-1).tolist() == [[2] * 10] * 3
    True
    """
    n = _count(t, block, random=random, heads=heads, seed=seed)
    if random > n:
        raise ValueError(f"block mask: random is {random}; there are {n} blocks of {block} tokens to draw from")
    head, row, column = np.ogrid[:heads, :n, :n]
    ranks = mix(column ^ mix(row ^ mix(head ^ mix(np.asarray(seed)))))
    ranks = np.where(column > row, 2**32, ranks) if causal else np.broadcast_to(ranks, (heads, n, n))
    chosen = np.argsort(ranks, -1, kind="stable")[..., :random]
    blocks = np.zeros((heads, n, n), bool)
    np.put_along_axis(blocks, chosen, True, -1)
    return BlockMask(blocks, block, causal)


@checked()
def fixed_blocks(
    t: int,
    block: int = 16,
    *,
    local: int = 4,
    global_count: int = 1,
    horizontal: bool = False,
    heads: int = 1,
    patterns: int = 1,
    causal: bool = False,
) -> BlockMask:
    """The mask "fixed" of t tokens: a block sees the blocks of its own window of `local`, and `global_count` blocks of
    every window; if `horizontal`, these see all.

    They are a window's last `global_count` in the first head, the `global_count` before these in the second, and so on,
    `patterns` different ones in turn; in a window at the end that is not whole, the last ones if it has no such blocks.
    Raises ValueError if a window is not whole times `global_count`, or has fewer blocks than the patterns take.

    Ref: Child et al. 2019, arXiv:1904.10509, section 4.2-4.3, as DeepSpeed has it by blocks.

    >>> print(fixed_blocks(96, 16, local=3, causal=True))
    1 x 6 x 6 blocks of 16, causal, 15 of 36 seen
    x . . . . .
    x x . . . .
    x x x . . .
    . . x x . .
    . . x x x .
    . . x x x x
    """
    n = _count(t, block, local=local, global_count=global_count, heads=heads, patterns=patterns)
    if local % global_count or patterns > local // global_count:
        raise ValueError(
            f"block mask fixed: global_count is {global_count} and patterns {patterns} in windows of {local} blocks; "
            "global_count must divide local, and global_count * patterns be at most local"
        )
    mask = _windows(n, [local], block, causal)
    of_head = []
    for head in range(min(heads, patterns)):
        first = local - (1 + head) * global_count
        firsts = [start + first for start in range(0, n - n % local, local)]
        if n % local:
            firsts.append(max(0, min(n - n % local + first, n - global_count)))
        ends = [(start, start + global_count) for start in firsts]
        of_head.append(global_blocks(t, block, global_ids=ends, horizontal=horizontal, causal=causal).blocks[0])
    layouts = np.stack([of_head[head % len(of_head)] for head in range(heads if len(of_head) > 1 else 1)])
    return mask | BlockMask(layouts, block, causal)


def _windows(n: int, windows: Sequence[int], block: int, causal: bool) -> BlockMask:
    if not windows or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in windows):
        raise ValueError(f"block mask: windows are {list(windows)}; give the blocks of each, at least 1")
    number = np.repeat(np.arange(len(windows)), windows)[:n]
    extra = np.arange(n - len(number)) // windows[-1] + len(windows)
    number = np.concatenate((number, extra))
    return BlockMask(number[:, None] == number, block, causal)


@checked()
def variable_blocks(
    t: int,
    block: int = 16,
    *,
    windows: Sequence[int] = (4,),
    global_ids: Blocks = (0,),
    horizontal: bool = False,
    random: int = 0,
    seed: int = 0,
    causal: bool = False,
) -> BlockMask:
    """The mask "variable" of t tokens: a block sees its own window, all see the blocks `global_ids`, and each `random`
    more.

    windows: the numbers of blocks of the first windows, of which the last goes on. global_ids, horizontal: as in
    `global_blocks`. random, seed: as in `random_blocks`, alike in all heads; `mask | random_blocks(..., heads=)` has
    others in each.
    """
    mask = _windows(_count(t, block), windows, block, causal)
    mask = mask | global_blocks(t, block, global_ids=global_ids, horizontal=horizontal, causal=causal)
    return mask | random_blocks(t, block, random=random, seed=seed, causal=causal)


@checked()
def bigbird_blocks(
    t: int,
    block: int = 16,
    *,
    window: int = 3,
    global_count: int = 1,
    random: int = 1,
    heads: int = 1,
    seed: int = 0,
    causal: bool = False,
) -> BlockMask:
    """The mask "bigbird" of t tokens: a block sees the window // 2 blocks on each side of it, the first `global_count`,
    and `random` more, others in each of `heads`; the first `global_count` see all (Zaheer et al. 2020,
    arXiv:2007.14062, section 2).
    """
    ends = [(0, global_count)] if global_count else []
    mask = sliding_blocks(t, block, window=window, causal=causal)
    mask = mask | global_blocks(t, block, global_ids=ends, causal=causal)
    return mask | random_blocks(t, block, random=random, heads=heads, seed=seed, causal=causal)


@checked()
def longformer_blocks(
    t: int, block: int = 16, *, window: int = 3, global_ids: Blocks = (0,), causal: bool = False
) -> BlockMask:
    """The mask "bslongformer" of t tokens: a block sees the window // 2 blocks on each side of it and the blocks
    `global_ids`, which see all (Beltagy et al. 2020, "Longformer", arXiv:2004.05150, section 3.1, by blocks).

    >>> print(longformer_blocks(80, 16, window=3, global_ids=[2]))
    1 x 5 x 5 blocks of 16, 17 of 25 seen
    x x x . .
    x x x . .
    x x x x x
    . . x x x
    . . x x x
    """
    sliding = sliding_blocks(t, block, window=window, causal=causal)
    return sliding | global_blocks(t, block, global_ids=global_ids, causal=causal)
