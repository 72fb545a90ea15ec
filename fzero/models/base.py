"""A layered model as a value: pure functions over a parameter tree whose blocks are stacked on a leading dim of L
layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero.comm.collectives import psum
from fzero.core import prng, pytree
from fzero.core.arguments import checked
from fzero.core.autodiff import Remat
from fzero.core.pytree import Tree, nearest
from fzero.core.stack import Block, Blocks, depth, in_turn, stack
from fzero.kernels.cross_entropy import counted_tokens
from fzero.kernels.linear_cross_entropy import linear_cross_entropy
from fzero.kernels.quantize_codes import codes_a_byte
from fzero.kernels.registry import AUTO, Kernels
from fzero.models.batch import BY_TOKEN, Batch, check_batch, has_tokens
from fzero.models.place import balanced_positions, patterns_of
from fzero.models.stack_over_pp import stack_over_pp
from fzero.sharding import Mesh, Plan, Rules, Spec, draw, one_process, slices
from fzero.sharding.context import Context, Pieces
from fzero.sharding.experts import Experts
from fzero.sharding.slices import is_stacked
from fzero.sharding.unshard import unshard_block, unshard_tree


class MakeLeaf(Protocol):
    """`make(name, shape, std, mean=0.0)` makes a leaf: normal values, or the constant `mean` if std is 0.

    dtype: of a leaf of integers, whose values are the normal ones rounded and clamped; None for a parameter, whose
    dtype is not the model's choice.
    """

    def __call__(
        self,
        name: str,
        shape: tuple[int, ...],
        std: float,
        mean: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> Any: ...


class Cache(NamedTuple):
    """The key-value cache of one layer while sampling; a block writes the new keys and values into it, in place, after
    the old ones.

    >>> cache = Cache(torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 2, 4), length=0)  # B=1, S=8, G=2, K=4
    >>> cache._replace(length=cache.length + 1).length
    1
    """

    k: Tensor  # [B, S, G, K]
    v: Tensor  # [B, S, G, K]
    length: int  # positions filled before this call


class Ctx(NamedTuple):
    """The context of a model's functions: everything but parameters and activations. Tensors in it are not
    differentiated.

    >>> Ctx(dtype=torch.bfloat16).remat.every  # the defaults: one process, no recomputation, no dropout
    0
    """

    mesh: Mesh = one_process()
    dtype: torch.dtype = torch.float32  # of activations and products
    compiled: bool = False
    remat: Remat = Remat()
    layer: Tensor | tuple[()] = ()  # inside a block: the layer's number, int64 scalar
    key: Tensor | tuple[()] = ()  # the random key of dropout; () turns dropout off
    keys: dict[str, Tensor] = {}  # noqa: RUF012  (of key: {name: [L, 2]} of the blocks' dropout, where made beforehand)
    first: Tensor | int = 0  # index of this batch's first sequence in the step's global batch
    documents: Tensor | tuple[()] = ()  # int [B, T], of whole sequences; () if each sequence is one document
    cache: Cache | tuple[()] = ()
    kernels: Kernels = AUTO  # the form of each hot operation
    matmul: str = ""  # how the linear layers of the blocks multiply, see core.precision.Policy
    sequence: bool = False  # under tp: activations outside the tensor-parallel regions are split along T too
    context: Context | tuple[()] = ()  # how attention works over cp; () without
    experts: Experts | tuple[()] = ()  # how tokens come to experts over ep; () without
    pieces: Pieces | tuple[()] = ()  # the tokens of each rank of cp; () for whole sequences, and chosen by the batch
    positions: Tensor | tuple[()] = ()  # int64 [T / cp], of this rank's tokens; () where it has whole sequences
    placed: Tensor | tuple[()] = ()  # int64 [cp, T / cp], of every rank's
    prepared: Any = ()  # what the model's `prepare` made of the batch: a tree of tensors and of hashable values


class Loss(NamedTuple):
    """The loss of a batch as sums over the tokens that count. The step divides once, by the global num_tokens.

    >>> loss = Loss(total=torch.tensor(12.0), num_tokens=torch.tensor(4))
    >>> loss.total / loss.num_tokens  # nats a token
    tensor(3.)
    """

    total: Tensor  # float scalar: the objective in nats, summed over tokens
    num_tokens: Tensor
    extra: dict[str, Tensor] = {}  # noqa: RUF012  (further sums to report; never mutated)
    # Sums by layer, float64 [layers of a stack, ...], see Model.after; of whole sequences: the same on all ranks of cp.
    tables: dict[str, Tensor] = {}  # noqa: RUF012


class Model(NamedTuple):
    """A layered model: its config, and pure functions for embedding, block and head. The activations x are [B, T, D],
    or a tree of tensors.

    ZeRO-3, offload, recomputation and prefetch all work layer by layer, so the blocks' parameters are stacked: each
    leaf is [L, ...]. A model whose layers are not all alike has several stacks, one after the other: `block` is then
    {stack: its function}, in that order, with names such as "blocks_dense" and "blocks_experts" in the parameter tree.
    Layers are numbered through all of them. `join` may change the activations before a stack, with parameters of its
    own under join_NAME/ for the stack blocks_NAME: the tokens' embedding before a decoder, for instance. Where the
    layers of a stack have equal leaves and differ in what they compute, its function is a tuple of functions, which the
    layers take in turn: windows of attention in all layers but each sixth, for instance.

    What all layers need of a batch beside x, such as masks, `prepare` makes once, without parameters; the functions
    find it in `ctx.prepared`. Leaves in `start` begin with values that are given and not drawn.

    >>> from fzero import models
    >>> model = models.mlp(models.MLPConfig())
    >>> sorted(model.init(lambda name, shape, std, mean=0.0: shape)["blocks"].items())
    [('scale', (2, 32)), ('w_in', (2, 32, 64)), ('w_out', (2, 64, 32))]
    """

    config: Any
    init: Callable[[MakeLeaf], Tree]  # makes the parameter tree
    embed: Callable[[Tree, Batch, Ctx], Any]  # tokens -> x
    block: Blocks | Mapping[str, Blocks]  # (one layer's slice of params["blocks"], x) -> x
    head: Callable[[Tree, Any, Batch, Ctx], Loss]  # x -> this rank's sums
    logits: Callable[[Tree, Any, Ctx], Tensor]  # x -> [B, T, V], for sampling
    rules: Callable[
        [Mesh], Rules[str]
    ]  # rules from leaf names to Spec texts; raises ValueError if the mesh does not divide the model
    shared: tuple[str, ...] = ()  # leaves under embed/ that the head, and each join, uses too (tied embeddings)
    join: Mapping[str, Callable[[Tree, Any, Batch, Ctx], Any]] = {}
    linear: str = ""  # a regex of leaves of the blocks that only `layers.linear` uses: they may be gathered as float8
    prepare: Callable[[Batch, Ctx], Any] | None = None
    start: Mapping[str, Start] = {}  # by leaf name
    frozen: frozenset[str] = frozenset()  # leaves that are never trained
    # Leaves that no gradient moves, by name, each with the rule that moves it once a step, on the sums over the global
    # batch: (leaf, loss.tables) -> leaf, both of the layers that a rank holds; None: it stays. They are in float32 or
    # wider, on the device, and whole on every rank of dp and cp. A step that is skipped moves none.
    after: Mapping[str, Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None] = {}
    foreign: bool = False  # its layers are somebody's code: a first step under tp compares them with whole ones
    # x -> [B, T, D] after the last norm, outside the tensor-parallel regions, and the leaf [V, D] by which the head
    # multiplies it: for another head on the same stack (models.dpo, ...). None for a module
    features: Callable[[Tree, Any, Ctx], Tensor] | None = None
    unembed: str = "head/w"
    splits: bool = False  # whether cp may split its sequences: positions from ctx, and a loss that adds up over ranks


def with_still_leaves(model: Model) -> Model:
    """The model whose leaves that a rule moves stay as they are: for another loss than its own."""
    return model._replace(after=dict.fromkeys(model.after))


class Start(NamedTuple):
    """The values that a leaf begins with: of a stacked leaf, layer by layer."""

    layers: tuple[Callable[[], Tensor], ...]  # each reads a layer's, or the leaf's, whole
    layer_shape: tuple[int, ...]
    stacked: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the leaf."""
        return (len(self.layers), *self.layer_shape) if self.stacked else self.layer_shape

    def box(self, start: Sequence[int], size: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
        """A copy of the elements [start, start + size) of the leaf."""
        if not self.stacked:
            whole = self.layers[0]().detach()
            return slices.narrow_box(whole, start, size).to(device, dtype, copy=True).contiguous()
        layers = self.layers[start[0] : start[0] + size[0]]
        return torch.stack([slices.narrow_box(f().detach(), start[1:], size[1:]).to(device, dtype) for f in layers])


class Stack(NamedTuple):
    """One of a model's stacks of layers."""

    name: str  # of its part of the parameter tree
    block: Blocks
    join: Callable[[Tree, Any, Batch, Ctx], Any] | None  # called before its first layer

    @property
    def join_name(self) -> str:
        """The part of the parameter tree of its `join`."""
        return f"join{self.name.removeprefix('blocks')}"


def stacks_of(model: Model) -> list[Stack]:
    """The stacks of a model, in the order of a forward pass.

    Raises ValueError for a name that is not "blocks" or "blocks_NAME", and a join before no stack.
    """
    blocks = model.block if isinstance(model.block, Mapping) else {"blocks": model.block}
    for name in blocks:
        if not is_stacked(f"{name}/"):
            raise ValueError(f'a stack of the model is called {name!r}; call it "blocks", or "blocks_NAME"')
    for name in model.join:
        if name not in blocks:
            raise ValueError(f"the model has a join before {name!r}, which is no stack of it{nearest(name, blocks)}")
    return [Stack(name, block, model.join.get(name)) for name, block in blocks.items()]


def map_blocks(model: Model, change: Callable[[Block], Block]) -> Blocks | dict[str, Blocks]:
    """`change` of every function of a model's stacks, for a Model's `block`. Layers that have one function have one
    again, so that it is compiled once.
    """
    changed: dict[Block, Block] = {}

    def each(blocks: Blocks) -> Blocks:
        for one in in_turn(blocks):
            changed.setdefault(one, change(one))
        return tuple(changed[one] for one in blocks) if isinstance(blocks, tuple) else changed[blocks]

    return (
        {name: each(one) for name, one in model.block.items()}
        if isinstance(model.block, Mapping)
        else each(model.block)
    )


@checked()
def init_params(
    model: Model,
    key: Tensor,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    plan: Plan | None = None,
    then: Callable[[str, Tensor], Tensor] = lambda name, leaf: leaf,
) -> Tree:
    """Return the initial parameters: each element depends only on the key, its leaf's name and its global index.

    key: int64 [2], from fzero.random.key. dtype, device: of all leaves. plan: draw only this rank's shards, as laid out
    at rest; no whole leaf is made. then: a function (name, leaf) -> leaf, applied to each leaf as soon as it is drawn.

    >>> from fzero import models, random
    >>> params = init_params(models.mlp(models.MLPConfig()), random.key(0))
    >>> params["embed"]["tokens"].shape, params["blocks"]["w_in"].shape
    (torch.Size([256, 32]), torch.Size([2, 32, 64]))
    """
    specs = pytree.named_leaves(plan.params) if plan is not None else {}
    mesh, of_params = plan.mesh if plan is not None else one_process(), dtype

    def make(
        name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        spec, kind, parts = specs.get(name, Spec()), dtype or of_params, []
        for window in slices.local_windows(shape, spec, mesh):
            if name in model.start:
                parts.append(model.start[name].box(window.start, window.size, kind, device))
            else:
                box = tuple(shape), window.start, window.size
                parts.append(draw.draw_leaf(prng.fold_in(key, name), box, mean, std, kind, device))
        none = torch.empty(slices.local_shape(shape, spec, mesh), dtype=kind, device=device) if not parts else None
        return then(name, torch.cat(parts) if len(parts) > 1 else parts[0] if none is None else none)

    return model.init(make)


def sequence_parts(ctx: Ctx) -> int:
    """The number of parts that sequence parallelism cuts a sequence into."""
    return ctx.mesh["tp"].size if ctx.sequence else 1


def check(model: Model, batch: Batch, ctx: Ctx) -> None:
    """Raise ValueError if a batch of whole sequences does not fit the model, or cannot be split as ctx says."""
    parts, cp = sequence_parts(ctx), ctx.mesh["cp"].size
    check_batch(model.config, batch, parts if cp == 1 else 1)
    if cp > 1:
        if not ctx.context:
            raise ValueError(
                f"cp={cp}: the ctx does not say how; write Ctx(context=plan.context), or give loss the plan"
            )
        ctx.context.expect_divisible(cp, batch["tokens"].shape[-1], parts)


def prepare(model: Model, batch: Batch, ctx: Ctx) -> Ctx:
    """Return the ctx of a batch of whole sequences: with its documents, its first row, this rank's positions and what
    the model's `prepare` makes of it."""
    cp = ctx.mesh["cp"]
    if ctx.context:
        tokens, pieces = batch["tokens"], ctx.context.over(cp.size)
        if pieces is None:
            placed = balanced_positions(tokens, batch.get("documents"), cp.size, patterns_of(model.config))
        else:
            ranks = range(cp.size)
            placed = torch.stack([pieces.positions(rank, tokens.shape[-1], tokens.device) for rank in ranks])
        ctx = ctx._replace(pieces=pieces or (), placed=placed, positions=placed[cp.rank])
    if has_tokens(model.config):
        ctx = ctx._replace(documents=batch.get("documents", ()), first=batch.get("first", ctx.first))
    return ctx if model.prepare is None else ctx._replace(prepared=model.prepare(batch, ctx))


def own_part(batch: Batch, ctx: Ctx) -> Batch:
    """The part of a batch of whole sequences that embedding and head see, ctx being from `prepare`: what there is for
    each token, of this rank's. Documents stay whole, in ctx too."""
    if isinstance(ctx.positions, tuple):
        return batch
    own = {name: batch[name].index_select(-1, ctx.positions) for name in BY_TOKEN if name in batch}
    return {**batch, **own}


def transform(model: Model, params: Tree, batch: Batch, ctx: Ctx, plan: Plan | None = None) -> Any:
    """Return the activations after the last block; ctx is from `prepare`, the batch from `own_part`. With pp they are
    those on the last stage's rank."""
    x = model.embed(unshard_part(model, "embed", params, plan, ctx), batch, ctx)
    inner = ctx._replace(remat=Remat())  # a block is the same program under every policy
    first = 0

    def apply(blocks: tuple[Block, ...], layers: Tree, x: Any, first: int) -> Any:
        return stack(blocks, layers, x, inner, remat=ctx.remat, compiled=ctx.compiled, first=first)

    for one in stacks_of(model):
        if one.join is not None:
            x = one.join(unshard_part(model, one.join_name, params, plan, ctx), x, batch, ctx)
        blocks, layers = in_turn(one.block), params[one.name]
        if plan is not None and ctx.mesh.size > 1:
            blocks = tuple(unshard_block(f, plan, one.name) for f in blocks)
        if plan is None or plan.stages is None:
            x = apply(blocks, layers, x, first)
            first += depth(layers)
        else:
            x, first = stack_over_pp(apply, one.name, blocks, layers, x, inner, first, plan)
    return x


def unshard_part(model: Model, part: str, params: Tree, plan: Plan | None, ctx: Ctx) -> Tree:
    """Return the parameters that "embed", "head" or a join uses, gathered from the shards at rest."""
    if plan is None or ctx.mesh.size == 1:
        return params
    shared = model.shared if part != "embed" else ()
    used = {
        name: leaf
        for name, leaf in pytree.named_leaves(params).items()
        if name.startswith(f"{part}/") or name in shared
    }
    return unshard_tree(pytree.nest(used), plan)


def loss(model: Model, params: Tree, batch: Batch, ctx: Ctx, plan: Plan | None = None) -> Loss:
    """Return the loss of a batch, as sums: embed, the stack of blocks, head.

    batch: tokens and targets int64 [B, T]; optional mask bool [B, T], documents int [B, T], first int64 scalar. total
    is in nats. plan: on a mesh, `params` are this rank's shards at rest and the batch is this rank's part. The sums are
    then this rank's too: equal on the ranks of tp and pp, to be summed over dp, rp and cp; the gradients with respect
    to `params` are complete and in their layout. Composes with torch.func.

    Communicates: with a plan, the gathers of the parameters (backward the sums of their gradients), the model's tensor
    parallelism, and under pp the activations of every stage. Raises ValueError if the batch does not fit the model (see
    check_batch).

    >>> from fzero import models, random
    >>> model = models.mlp(models.MLPConfig(vocab_size=8))
    >>> tokens = torch.zeros(2, 4, dtype=torch.int64)
    >>> int(loss(model, init_params(model, random.key(0)), {"tokens": tokens, "targets": tokens}, Ctx()).num_tokens)
    8
    """
    if plan is not None and plan.context is not None:
        ctx = ctx._replace(context=plan.context)
    if plan is not None and plan.experts is not None:
        ctx = ctx._replace(experts=plan.experts)
    check(model, batch, ctx)
    ctx = prepare(model, batch, ctx)
    batch = own_part(batch, ctx)
    x = transform(model, params, batch, ctx, plan)
    out = model.head(unshard_part(model, "head", params, plan, ctx), x, batch, ctx)
    if plan is None or plan.stages is None:
        return out
    axis = plan.mesh["pp"]  # whose ranks have computed a head each, as they must gather its leaves
    mine = torch.full((), axis.rank == plan.stages.ranks[-1], device=out.total.device)
    return pytree.map(lambda leaf: psum(torch.where(mine, leaf, torch.zeros_like(leaf)), axis, leaf="loss"), out)


def logits(model: Model, params: Tree, batch: Batch, ctx: Ctx = Ctx()) -> Tensor:  # noqa: B008
    """Return all logits [B, T, V] of a batch, on one process: for tests and short sequences.

    batch: tokens int64 [B, T], and optionally documents int [B, T]. The logits have ctx.dtype.

    >>> from fzero import models, random
    >>> model = models.mlp(models.MLPConfig(vocab_size=8))
    >>> logits(model, init_params(model, random.key(0)), {"tokens": torch.zeros(2, 4, dtype=torch.int64)}).shape
    torch.Size([2, 4, 8])"""
    ctx = prepare(model, batch, ctx)
    return model.logits(params, transform(model, params, batch, ctx), ctx)


def token_loss(x: Tensor, w: Tensor, batch: Batch, ctx: Ctx, *, cap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return (cross entropy summed over the tokens that count, their number) for normalised activations x [B, T, D] and
    w [V, D]; cap: of the logits, 0 for none.

    Under tp w is this rank's rows [V/tp, D] and x is inside the tensor-parallel region (`layers.enter`); both results
    are the same on all ranks of tp.
    """
    targets, mask = batch["targets"].reshape(-1), batch["mask"].reshape(-1) if "mask" in batch else None
    options = {"axis": ctx.mesh["tp"], "compiled": ctx.compiled, "impl": ctx.kernels["linear_cross_entropy"]}
    options |= {"cap": cap} if cap else {}
    num_tokens = counted_tokens(targets, mask).sum()
    return linear_cross_entropy(x.reshape(-1, x.shape[-1]), w, targets, mask, **options), num_tokens


CODES, SCALES = "codes", "scales"  # the leaves of a weight in codes, see models.quantized


def leaf_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's leaves by name; a weight in codes counts as the weight."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(
        name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        whole, _, part = name.rpartition("/")
        if dtype is None:
            shapes[name] = tuple(shape)
        elif part == CODES:
            shapes[whole] = (*shape[:-1], shape[-1] * codes_a_byte(model.config.kind))

    model.init(note)
    return shapes


@checked()
def num_params(model: Model) -> int:
    """Return the number of parameters, without making them; those in codes count as parameters.

    >>> from fzero import models
    >>> num_params(models.gpt2(models.preset("gpt2-124m")))
    124439808
    """
    return sum(math.prod(shape) for shape in leaf_shapes(model).values())
