"""The layers that the models share. Weights are [in, out]; every function computes in the dtype of its activations x.

Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3): the weights given are this rank's
columns (heads, units of the feed-forward part, rows of the vocabulary). Activations x [B, T, D] are the same on all
ranks of tp; `enter` begins a region that every rank computes with its own weights, and `leave` ends it by summing the
ranks' parts. With sequence parallelism (Korthikanti et al. 2022, "Reducing activation recomputation", arXiv:2205.05198,
section 4.2.2) x outside these regions is a rank's own range of T, [B, T/tp, D]. The gradient of a leaf that is whole on
all ranks but used differently by each (with sequence parallelism: every leaf that tp does not shard) must be summed
over tp; the code that gathers the leaf does that (`Spec.partial`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fzero import kernels
from fzero.comm.axes import TP
from fzero.comm.collectives import all_gather, psum, psum_scatter, pvary
from fzero.comm.communicator import Axis
from fzero.core import prng
from fzero.core.autodiff import INFERENCE
from fzero.core.pytree import Tree
from fzero.kernels.custom_operator import cap_logits
from fzero.kernels.embedding import look_up
from fzero.kernels.linear_cross_entropy import column_range
from fzero.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from fzero.models.base import Ctx, pieces_of
from fzero.models.batch import Batch
from fzero.models.weights import QuantizedWeight, WeightInParts
from fzero.sharding import Mesh, Rules
from fzero.sharding.context import blocks_of
from fzero.sharding.slices import narrow_part, parts_as_chunks


class DimSplit(NamedTuple):
    """A dim of a leaf that tp cuts: `size` units of what the model's config calls `name`."""

    leaf: str
    dim: int
    size: int
    name: str
    # "size" or "heads", which tp must divide; "kv heads", which may be fewer than tp, and then each serves the same
    # number of ranks; "words", of which the last rank may have fewer than the others, but not none.
    kind: str = "size"


def expect_divisible(mesh: Mesh, *splits: DimSplit) -> None:
    """Raise ValueError naming the first dim that tp cannot cut, and what can."""

    def fits(split: DimSplit, tp: int) -> bool:
        if split.kind == "words":
            return parts_as_chunks(split.size, tp)[-1] > 0
        return split.size % tp == 0 or (split.kind == "kv heads" and tp % split.size == 0)

    tp = mesh.tp.size
    for split in splits:
        if not fits(split, tp):
            largest = max(s.size for s in splits if s.kind != "kv heads")
            allowed = [str(n) for n in range(1, largest + 1) if all(fits(s, n) for s in splits)]
            extent = f"{split.size} heads ({split.name})" if "heads" in split.kind else f"size {split.size}"
            fix = f"{'change' if 'heads' in split.kind else 'pad'} {split.name} to {-(-split.size // tp) * tp}"
            relation = "too small to give each rank of" if split.kind == "words" else "not divisible by"
            raise ValueError(
                f"{split.leaf}: dim {split.dim} has {extent}, {relation} "
                f"tp={tp}{' its words' * (split.kind == 'words')}; use tp in {{{', '.join(allowed)}}} or {fix}"
            )


def split_words(rules: Rules[str], mesh: Mesh, words: int) -> Rules[str]:
    """The rules with `%` and the sizes of the ranks' parts for [V/tp, D] of words that tp does not divide.

    >>> from fzero.sharding import fake_mesh
    >>> split_words([("^head/w$", "[V/tp, D]")], fake_mesh({"tp": 2}), 257)
    [('^head/w$', '[V/tp, D] %129,128')]
    """
    if words % mesh.tp.size == 0:
        return rules
    parts = ",".join(map(str, parts_as_chunks(words, mesh.tp.size)))
    return [(name, f"{text} %{parts}" if text == WORDS else text) for name, text in rules]


WORDS = "[V/tp, D]"  # the text of the Spec of a leaf with a row for each word


def sequence_axis(ctx: Ctx) -> Axis:
    """The axis that splits activations outside tensor-parallel regions along T, or one of size 1."""
    return ctx.mesh.tp if ctx.split.sequence else Axis(TP)


def positions_of(x: Tensor, ctx: Ctx) -> Tensor:
    """The positions in their sequences of x's tokens [B, T, ...]: int64 [T]; canonical ones in their documents, [B, T],
    whose angles are then those of the document alone."""
    if isinstance(ctx.tokens.positions, Tensor):
        return ctx.tokens.positions
    if ctx.kernels.canonical and isinstance(ctx.tokens.documents, Tensor):
        return document_positions(ctx.tokens.documents)
    first = ctx.tokens.chunk[0] if ctx.tokens.chunk else 0
    return torch.arange(first, first + x.shape[1], device=x.device)


def ranges_outside(tokens: int, ctx: Ctx) -> tuple[list[tuple[int | Tensor, int]], int]:
    """(first position, number) of each run of this rank's `tokens` tokens, and the whole sequence's number."""
    if ctx.tokens.chunk:
        return [(ctx.tokens.chunk[0], tokens)], ctx.tokens.chunk[1]
    axis, cp, positions = sequence_axis(ctx), ctx.mesh.cp, ctx.tokens.positions
    start, total = axis.rank * tokens, axis.size * tokens * (cp.size if isinstance(positions, Tensor) else 1)
    runs: list[tuple[int | Tensor, int]] = [(0, total)]
    if (pieces := pieces_of(ctx)) is not None:
        runs = [*pieces.ranges(cp.rank, total)]
    elif isinstance(positions, Tensor):
        size = total // blocks_of(total, cp.size)
        runs = [(positions[offset], size) for offset in range(0, total // cp.size, size)]
    out, offset = [], 0
    for first, number in runs:
        low, high = max(start, offset), min(start + tokens, offset + number)
        if low < high:
            out.append((first + low - offset, high - low))
        offset += number
    return out, total


def enter_region(x: Tensor, ctx: Ctx, leaf: str = "") -> Tensor:
    """x [B, T, D] for use inside a tensor-parallel region, from x outside."""
    tp = ctx.mesh.tp
    return all_gather(x, tp, 1, leaf=leaf) if ctx.split.sequence else pvary(x, tp, leaf=leaf)


def exit_region(y: Tensor, ctx: Ctx, leaf: str = "") -> Tensor:
    """The sum of the ranks' y [B, T, D], as x outside a tensor-parallel region."""
    tp = ctx.mesh.tp
    if tp.size > 1:
        ctx.kernels.refuse(f"tp={tp.size}, whose sums over ranks have an order of their own,")
    return psum_scatter(y, tp, 1, leaf=leaf) if ctx.split.sequence else psum(y, tp, leaf=leaf)


def linear(x: Tensor, w: Tensor, b: Tensor | None = None, ctx: Ctx | None = None) -> Tensor:
    """x [..., in] @ w [in, out] (+ b [out]), in x's dtype, or in float8 if ctx.matmul says so."""
    w = w.to(x.dtype)
    if isinstance(w, WeightInParts):
        impl = "auto"
        if ctx is not None and isinstance(w, QuantizedWeight):
            impl = ctx.kernels["quantized_linear"]
        elif ctx is not None:
            ctx.kernels.refuse("a weight in factors (LoRA)")
        y = w.product(x, lambda x, weight: linear(x, weight, ctx=ctx), impl)
    elif ctx is not None and ctx.matmul:
        y = kernels.float8.float8_linear(x, w, ctx.matmul.removeprefix("float8_"), impl=ctx.kernels["float8_linear"])
    else:
        impl = "auto" if ctx is None else ctx.kernels["linear"]
        by_op = impl not in ("auto", "reference") or (ctx is not None and bool(ctx.cache))
        y = kernels.linear.linear(x, w, impl=impl) if by_op else x @ w
    return y if b is None else y + b.to(x.dtype)


def norm(p: Tree, x: Tensor, eps: float, ctx: Ctx) -> Tensor:
    """Normalise x over its last dim: LayerNorm if p has a bias, else RMSNorm; see `kernels.norm`."""
    if "bias" in p:
        return layer_norm(x, p["scale"], p["bias"], eps, impl=ctx.kernels["layer_norm"])
    return rms_norm(x, p["scale"], eps, impl=ctx.kernels["rms_norm"])


def add_and_norm(p: Tree, x: Tensor, h: Tensor, eps: float, rate: float, name: str, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """Return (x + dropout(h), the same normalised by p), h times its layer's scale."""
    if dropout_active(rate, ctx):
        x = add(x, h, rate, name, ctx)
        return x, norm(p, x, eps, ctx)
    h = scaled(h, ctx)
    if "bias" in p:
        normed, x = add_layer_norm(h, x, p["scale"], p["bias"], eps, impl=ctx.kernels["add_layer_norm"])
    else:
        normed, x = add_rms_norm(h, x, p["scale"], eps, impl=ctx.kernels["add_rms_norm"])
    return x, normed


def scaled(h: Tensor, ctx: Ctx) -> Tensor:
    """What a layer adds to x, times the layer's scale."""
    if not (isinstance(ctx.draws.scales, Tensor) and isinstance(ctx.layer, Tensor)):
        return h
    return h * ctx.draws.scales.index_select(0, ctx.layer.reshape(1)).to(h.dtype)


def dropout_active(rate: float, ctx: Ctx) -> bool:
    """Whether dropout is active: the rate is above 0 and ctx has a key."""
    return rate > 0.0 and not isinstance(ctx.key, tuple)


def add(x: Tensor, h: Tensor, rate: float, name: str, ctx: Ctx) -> Tensor:
    """x + dropout(h), h times its layer's scale."""
    h = scaled(h, ctx)
    if not dropout_active(rate, ctx):
        return x + h
    parts = [
        kernels.dropout.dropout_add(h[:, start:end], x[:, start:end], rate, *mask, impl=ctx.kernels["dropout_add"])
        for start, end, mask in masks_of(h, name, ctx)
    ]
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def dropout(x: Tensor, rate: float, name: str, ctx: Ctx) -> Tensor:
    """Zero each element of x [B, T, D] with probability `rate`, and scale the others by 1 / (1 - rate)."""
    if not dropout_active(rate, ctx):
        return x
    parts = [kernels.dropout.dropout(x[:, start:end], rate, *mask) for start, end, mask in masks_of(x, name, ctx)]
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


SITES = ("attn", "mlp")  # names of dropout in the blocks of fzero's models


def block_keys(key: Tensor, layers: int) -> dict[str, Tensor]:
    """`keys` of a Ctx with this key, of all layers together, as a GPU launches as many kernels for one."""
    return dict(zip(SITES, prng.fold_in_all(key, SITES, layers).unbind(1)))


def masks_of(x: Tensor, name: str, ctx: Ctx) -> list[tuple[int, int, tuple[Tensor, Tensor, int]]]:
    """(start, end, (key, first global index, row stride)) of the mask of each run of x's tokens."""
    # The mask depends on the key, the layer, `name` and an element's index in the step's global batch, so it is the
    # same however that batch is split.
    assert isinstance(ctx.key, Tensor)  # a rate that is active has one
    if isinstance(ctx.layer, Tensor) and name in ctx.draws.keys:
        key = ctx.draws.keys[name].index_select(0, ctx.layer.reshape(1))[0]
    else:
        key = prng.fold_in(ctx.key, name)
        key = prng.fold_in(key, ctx.layer) if isinstance(ctx.layer, Tensor) else key
    ranges, tokens = ranges_outside(x.shape[1], ctx)
    size, row, out, offset = x[0, 0].numel(), torch.as_tensor(ctx.tokens.first).to(x.device) * tokens, [], 0
    for first, number in ranges:
        out.append((offset, offset + number, (key, (row + first) * size, tokens * size)))
        offset += number
    return out


def local_tokens(x: Tensor, ctx: Ctx) -> Tensor:
    """The columns of x [B, T], of whole sequences, that are this rank's tokens outside the tensor-parallel regions."""
    axis = sequence_axis(ctx)
    x = x.index_select(1, ctx.tokens.positions) if isinstance(ctx.tokens.positions, Tensor) else x
    return narrow_part(x, axis.rank, axis.size, 1)


def document_positions(documents: Tensor) -> Tensor:
    """The position of each token within its document, int64 [B, T]; documents int [B, T], each document contiguous."""
    position = torch.arange(documents.shape[-1], device=documents.device).expand(documents.shape)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return position - torch.where(starts, position, 0).cummax(-1).values


def row_parallel_linear(y: Tensor, w: Tensor, ctx: Ctx, leaf: str, b: Tensor | None = None) -> Tensor:
    """y @ w (+ b) as the last product of a tensor-parallel region; b [D] is whole."""
    y = exit_region(linear(y, w, ctx=ctx), ctx, leaf)
    return y if b is None else y + b.to(y.dtype)  # added once, after the sum over ranks


def embed_tokens(w: Tensor, batch: Batch, ctx: Ctx, words: int = 0) -> Tensor:
    """The rows of w [V, D], or of this rank's rows, for batch["tokens"] in ctx.dtype: [B, T, D]."""
    tp = ctx.mesh.tp
    if tp.size == 1:
        return look_up(w, batch["tokens"]).to(ctx.dtype)
    row = batch["tokens"] - column_range(w.shape[0], tp, words)[0]
    is_local = (row >= 0) & (row < w.shape[0])
    x = look_up(w, torch.where(is_local, row, 0)).to(ctx.dtype)
    return exit_region(torch.where(is_local[..., None], x, 0.0), ctx, "embed/tokens")


def vocabulary_logits(x: Tensor, w: Tensor, ctx: Ctx, words: int = 0, cap: float = 0.0) -> Tensor:
    """All logits [B, T, V] of x [B, T, D] inside a tensor-parallel region and w [V, D] or this rank's rows, in x's
    dtype; canonical ones, and those of generation, in float32, as the loss and draws take them."""
    if ctx.kernels.canonical or (INFERENCE.get() and ctx.mesh.tp.size == 1):
        return kernels.linear.logits(x, w.to(x.dtype), cap, impl=ctx.kernels["logits"])
    # A psum of zero-padded logits and not an all_gather, whose backward pass would sum the ranks' gradients: the result
    # is used in the same way on all ranks.
    logits, tp = x @ w.to(x.dtype).T, ctx.mesh.tp
    if tp.size > 1:
        start, size = column_range(w.shape[0], tp, words)
        logits = psum(torch.nn.functional.pad(logits, (start, size - start - w.shape[0])), tp, leaf="head")
    return cap_logits(logits, cap)
