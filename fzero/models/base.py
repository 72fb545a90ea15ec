"""A layered model as a value: pure functions over a parameter tree whose blocks are stacked on a dim of L layers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero import kernels
from fzero.core import prng, pytree
from fzero.core.arguments import checked, expect_hint, hints_of
from fzero.core.pytree import Tree, nearest
from fzero.core.stack import Block, Blocks, in_turn
from fzero.kernels.registry import AUTO, Kernels
from fzero.models.batch import Batch
from fzero.sharding import Mesh, Plan, Rules, Spec, one_process, slices
from fzero.sharding.context import ActivationSplit, Pieces
from fzero.sharding.slices import is_stacked


class MakeLeaf(Protocol):
    """`make(name, shape, std, mean=0.0)` makes a leaf: normal values, or `mean` if std is 0."""

    def __call__(
        self,
        name: str,
        shape: tuple[int, ...],
        std: float,
        mean: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> Any: ...


# (shape, standard deviation) of a leaf, or (shape, 0.0, mean) of a constant one, by name.
Leaves = dict[str, tuple[Any, ...]]


def make_tree(leaves: Leaves, make: MakeLeaf) -> Tree:
    """The parameter tree of these leaves."""
    return pytree.nest({name: make(name, *leaf) for name, leaf in leaves.items()})


def ones(name: str, *shape: int) -> Leaves:
    """The factors of a norm, which begin as ones."""
    return {f"{name}/scale": (shape, 0.0, 1.0)}


class Cache(NamedTuple):
    """The pages of one layer while generating, and the rows of a step that read and write them; see
    kernels/paged_attention.py. A batch is then [1, N] tokens, of all rows in turn, at `ctx.tokens.positions`.

    >>> pages = torch.zeros(2, 4, 1, 3)  # two pages of four positions, one head of three numbers
    >>> cache = Cache((pages,), torch.tensor([5]), torch.tensor([[1]]), torch.tensor([0, 1]))
    >>> cache.write(torch.ones(1, 1, 1, 3))
    >>> pages[1, :, 0, 0]
    tensor([0., 1., 0., 0.])
    """

    pages: tuple[Tensor, ...]  # [P, page_tokens, heads, size]: keys and values, or DeepSeek's latents; scales of codes
    slots: Tensor  # int64 [N]: where a token's entries go, positions counted through all pages
    table: Tensor  # int32 [R, pages of the longest row]
    starts: Tensor  # int32 [R + 1]: row r is the tokens starts[r] to starts[r + 1]

    def write(self, *entries: Tensor) -> None:
        """Write the tokens' entries [1, N, heads, size] into the pages, in place: as codes, if those have scales."""
        if len(self.pages) > len(entries):
            coded = [_coded(entry, kernels.PAGE_CODES[self.pages[0].dtype]) for entry in entries]
            entries = (*(data for data, _ in coded), *(scale for _, scale in coded))
        for pages, entry in zip(self.pages, entries):
            lines = pages.flatten(0, 1)
            lines = lines.view(torch.int8) if entry.dtype == torch.int8 else lines  # of float8 too
            lines.index_copy_(0, self.slots, entry[0].to(lines.dtype))

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """The scales of pages in codes, else ()."""
        return self.pages[len(self.pages) // 2 :] if self.pages[0].dtype in kernels.PAGE_CODES else ()

    def rows(self, positions: Tensor) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
        """(the tokens of a row, the entries of all its positions [1, S, heads, size]), row by row."""
        bounds = self.starts.tolist()
        for row, (start, end) in enumerate(itertools.pairwise(bounds)):
            if start < end:
                length = int(positions[end - 1]) + 1
                used = self.table[row, : -(-length // self.pages[0].shape[1])].long()
                yield slice(start, end), tuple(pages[used].flatten(0, 1)[None, :length] for pages in self.pages)


def _coded(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(the bytes of x [..., size] in codes, a scale for each row)."""
    # "auto" takes the reference for few numbers, which is ten operators in place of one.
    serves = not kernels.quantize_codes.cpp_serves(x.dtype, kind, x.shape[-1], None, x)
    data, scale = kernels.quantize.quantize(x, kind, x.shape[-1], impl="cpp" if serves else "auto")
    return data.view(torch.int8), scale


class TokenLayout(NamedTuple):
    """Which tokens a batch has on this rank.

    >>> TokenLayout(documents=torch.tensor([[0, 0, 1]])).documents.shape  # two documents in a row of three tokens
    torch.Size([1, 3])
    """

    first: Tensor | int = 0  # index of this batch's first sequence in the step's global batch
    documents: Tensor | tuple[()] = ()  # int [B, T], of whole sequences; () if each sequence is one document
    positions: Tensor | tuple[()] = ()  # int64 [T / cp], of this rank's tokens; () where it has whole sequences
    placed: Tensor | tuple[()] = ()  # int64 [cp, T / cp], of every rank's
    chunk: tuple[int, int] | tuple[()] = ()  # inside a layer in chunks: (position of its first token, tokens of a row)


class LayerDraws(NamedTuple):
    """What a step has drawn for its layers.

    >>> LayerDraws(scales=torch.tensor([1.0, 0.0]), dropped=frozenset([1])).dropped  # the second of two layers
    frozenset({1})
    """

    keys: dict[str, Tensor] = {}  # noqa: RUF012  (of dropout in blocks: {name: [L, 2]}, where made beforehand)
    scales: Tensor | tuple[()] = ()  # float64 [L] of what each layer adds to x, see models.dropping; () for 1
    dropped: frozenset[int] | tuple[()] = ()  # the layers whose scale is 0, if a step knows them: it passes over them


class Ctx(NamedTuple):
    """The context of a model's functions: everything but parameters and activations. Tensors in it are not
    differentiated. A model computes in `dtype`, float32 unless it is given, whatever dtype its parameters have: for
    those in float64 write Ctx(dtype=torch.float64).

    >>> Ctx(dtype=torch.bfloat16).mesh.size  # the defaults: one process, no dropout
    1
    """

    mesh: Mesh = one_process()
    dtype: torch.dtype = torch.float32  # of activations and products
    compiled: bool = False
    kernels: Kernels = AUTO  # the form of each hot operation
    matmul: str = ""  # how the linear layers of the blocks multiply, see core.precision.Policy
    split: ActivationSplit = ActivationSplit()  # how activations, attention and experts are split over ranks
    layer: Tensor | tuple[()] = ()  # inside a block: the layer's number, int64 scalar
    key: Tensor | tuple[()] = ()  # the random key of dropout; () turns dropout off
    draws: LayerDraws = LayerDraws()
    tokens: TokenLayout = TokenLayout()
    cache: Cache | tuple[()] = ()
    prepared: Any = ()  # what the model's `prepare` made of the batch: a tree of tensors and of hashable values


def with_draws(ctx: Ctx, draws: Mapping[str, Any], first: Tensor | int) -> Ctx:
    """The ctx of rows that begin with row `first` of a step's, with what the step draws: a key, and LayerDraws."""
    layers = LayerDraws(**{name: value for name, value in draws.items() if name != "key"})
    return ctx._replace(key=draws.get("key", ()), draws=layers, tokens=ctx.tokens._replace(first=first))


def pieces_of(ctx: Ctx) -> Pieces | None:
    """The tokens of each rank of cp; None for whole sequences or chosen blocks."""
    return ctx.split.context.pieces_for(ctx.mesh.cp.size) if ctx.split.context else None


class Loss(NamedTuple):
    """The loss of a batch as sums over the tokens that count. The step divides once, by the global num_tokens; where
    tokens have weights, that is the sum of these.

    >>> loss = Loss(total=torch.tensor(12.0), num_tokens=torch.tensor(4))
    >>> loss.total / loss.num_tokens  # nats a token
    tensor(3.)
    """

    total: Tensor  # float scalar: the objective in nats, summed over tokens
    num_tokens: Tensor
    extra: dict[str, Tensor] = {}  # noqa: RUF012  (further sums to report; never mutated)
    # Sums by layer, float64 [layers of a stack, ...], see Model.after; of whole sequences: the same on all ranks of cp.
    tables: dict[str, Tensor] = {}  # noqa: RUF012


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
            full = self.layers[0]().detach()
            return slices.narrow_box(full, start, size).to(device, dtype, copy=True).contiguous()
        layers = self.layers[start[0] : start[0] + size[0]]
        return torch.stack([slices.narrow_box(f().detach(), start[1:], size[1:]).to(device, dtype) for f in layers])


class ModelTraits(NamedTuple):
    """What is so of some models alone.

    >>> ModelTraits(frozen=frozenset(["embed/tokens"])).draws  # the defaults: no draws of its own
    False
    """

    linear: str = ""  # a regex of leaves of the blocks that only `layers.linear` uses: they may be gathered as float8
    start: Mapping[str, Start] = {}  # by leaf name: those that begin with values that are given and not drawn
    frozen: frozenset[str] = frozenset()  # leaves that are never trained
    # Leaves that no gradient moves, by name, each with the rule that moves it once a step, on the sums over the global
    # batch: (leaf, loss.tables) -> leaf, both of the layers that a rank holds; None: it stays. They are in float32 or
    # wider, on the device, and whole on every rank of dp and cp. A step that is skipped moves none.
    leaf_rules: Mapping[str, Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None] = {}
    foreign: bool = False  # its layers are somebody's code: a first step under tp compares them with whole ones
    # (params, x, batch, ctx) -> the cross-entropy of each target [B, T], of a model without `features`
    token_losses: Callable[[Tree, Any, Batch, Ctx], Tensor] | None = None
    # Whether cp may split its sequences: positions from ctx, and a loss that adds up over ranks. A first step compares
    # functions of one's own, split, with those of whole sequences (train/split_check.py).
    splits: bool = False
    # -> what generates by the code of a module, see models/causal_module.py; raises ValueError for one without logits.
    causal: Callable[[], Any] | None = None
    draws: bool = False  # whether its blocks draw random numbers of their own, and need a key as dropout does
    # Entries of a batch of shape [B, T, ...] that are not by token: where cp splits sequences, embedding and head see
    # them whole, and of all others this rank's tokens.
    whole_entries: tuple[str, ...] = ()
    # (a step's key, the steps made before) -> `scales` of its ctx, see models.dropping
    drop: Callable[[Tensor, Tensor], Tensor] | None = None


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
    find it in `ctx.prepared`.

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
    prepare: Callable[[Batch, Ctx], Any] | None = None
    # x -> [B, T, D] after the last norm, outside the tensor-parallel regions, which the head multiplies by head/w, or,
    # without that leaf, by the embedding: for another head on the same stack (models.dpo, ...). None for a module
    features: Callable[[Tree, Any, Ctx], Tensor] | None = None
    traits: ModelTraits = ModelTraits()

    def with_traits(self, **traits: Any) -> Model:
        """This model with other traits, such as draws=True; raises TypeError for an unknown one, WrongKind for a value
        of another kind (see ModelTraits)."""
        hints = hints_of(ModelTraits)
        for name, value in traits.items():
            if name not in hints:
                raise TypeError(f"a model has no trait {name!r}{nearest(name, hints)}; use one of {', '.join(hints)}")
            expect_hint(f"with_traits: {name}", value, hints[name])
        return self._replace(traits=self.traits._replace(**traits))


def with_still_leaves(model: Model) -> Model:
    """The model whose leaves that a rule moves stay as they are: for another loss than its own."""
    return model.with_traits(leaf_rules=dict.fromkeys(model.traits.leaf_rules))


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
    """The stacks of a model, in the order of a forward pass; raises ValueError for another name."""
    blocks = model.block if isinstance(model.block, Mapping) else {"blocks": model.block}
    for name in blocks:
        if not is_stacked(f"{name}/"):
            raise ValueError(f'a stack of the model is called {name!r}; call it "blocks", or "blocks_NAME"')
    for name in model.join:
        if name not in blocks:
            raise ValueError(f"the model has a join before {name!r}, which is no stack of it{nearest(name, blocks)}")
    return [Stack(name, block, model.join.get(name)) for name, block in blocks.items()]


def map_blocks(model: Model, change: Callable[[Block], Block]) -> Blocks | dict[str, Blocks]:
    """`change` of every function of a model's stacks; layers that have one function share the result."""
    changed: dict[Block, Block] = {}

    def change_all(blocks: Blocks) -> Blocks:
        for block in in_turn(blocks):
            changed.setdefault(block, change(block))
        return tuple(changed[block] for block in blocks) if isinstance(blocks, tuple) else changed[blocks]

    return (
        {name: change_all(blocks) for name, blocks in model.block.items()}
        if isinstance(model.block, Mapping)
        else change_all(model.block)
    )


@checked()
def init_params(
    model: Model,
    key: Tensor,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    plan: Plan | None = None,
    on_leaf: Callable[[str, Tensor], Tensor] = lambda name, leaf: leaf,
) -> Tree:
    """Return the initial parameters: each element depends only on the key, its leaf's name and its global index.

    key: int64 [2], from fzero.random.key. dtype, device: of all leaves. plan: draw only this rank's shards, as laid out
    at rest; no whole leaf is made. on_leaf: a function (name, leaf) -> leaf, applied to each leaf as soon as it is
    drawn.

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
            if name in model.traits.start:
                parts.append(model.traits.start[name].box(window.start, window.size, kind, device))
            else:
                box = tuple(shape), window.start, window.size
                parts.append(slices.draw_leaf(prng.fold_in(key, name), box, mean, std, kind, device))
        none = torch.empty(slices.local_shape(shape, spec, mesh), dtype=kind, device=device) if not parts else None
        return on_leaf(name, torch.cat(parts) if len(parts) > 1 else parts[0] if none is None else none)

    return model.init(make)


CODES, SCALES = "codes", "scales"  # the leaves of a weight in codes, see models.quantized


def leaf_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's leaves by name; a weight in codes counts as the weight."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(
        name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        base, _, suffix = name.rpartition("/")
        if dtype is None:
            shapes[name] = tuple(shape)
        elif suffix == CODES:
            shapes[base] = (*shape[:-1], shape[-1] * kernels.quantize_codes.codes_a_byte(model.config.kind))

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


OF_EXPERTS = re.compile(r"/moe/[wb]_(gate|up|down)$")  # the leaves of which a token uses those of its experts
LOAD, ENTROPY, DROPPED, BIAS = "load", "entropy", "dropped", "bias"  # what a layer with experts reports
