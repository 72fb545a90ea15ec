"""A layered model as a value: pure functions over a parameter tree, with the blocks stacked on a leading L."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero.core import prng, pytree
from fzero.core.autodiff import Remat
from fzero.core.pytree import Tree
from fzero.core.stack import stack
from fzero.kernels.linear_cross_entropy import linear_cross_entropy
from fzero.kernels.registry import AUTO, Kernels
from fzero.sharding import Mesh, Plan, Rules, Spec, draw, one_process, slices
from fzero.sharding.unshard import unshard_block, unshard_tree

Batch = dict[str, Tensor]  # tokens, targets int64 [B, T]; optional mask bool [B, T], documents int [B, T], first int64 []


class MakeLeaf(Protocol):
    """`make(name, shape, std, mean=0.0)` gives a leaf: normal values, or the constant `mean` where std is 0."""

    def __call__(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Any: ...


class Cache(NamedTuple):
    """Keys and values of the positions seen so far; a block writes the new ones in place behind them."""

    k: Tensor  # [B, S, G, K]
    v: Tensor  # [B, S, G, K]
    length: int  # positions filled before this call


class Ctx(NamedTuple):
    """What the functions of a model need beside parameters and activations. Tensors in it are not differentiated."""

    mesh: Mesh = one_process()
    dtype: torch.dtype = torch.float32  # of the computation
    compiled: bool = False
    remat: Remat = Remat()
    layer: Tensor | tuple = ()  # int64 scalar, inside a block
    key: Tensor | tuple = ()  # dropout's; () turns dropout off
    first: Tensor | int = 0  # number of the batch's first sequence within the step's global batch
    documents: Tensor | tuple = ()  # int [B, T]; () where a sequence is one document
    cache: Cache | tuple = ()
    kernels: Kernels = AUTO  # the form of each hot operation
    matmul: str = ""  # how the linears of the blocks multiply, see precision.Policy
    tiles: int = 1  # parts that an MLP is computed in, see fzero.models.tiled_linear
    sequence: bool = False  # under tp: activations outside the tensor-parallel regions are split along T too


class Loss(NamedTuple):
    """Sums over the tokens that count, not normalised: there is one division in the program, by the global num_tokens."""

    total: Tensor  # the objective, in nats
    num_tokens: Tensor
    extra: dict[str, Tensor] = {}  # noqa: RUF012  (sums to be reported beside it; never mutated)


class Model(NamedTuple):
    """A layered model: ZeRO-3, offload, remat and pipelines all work layer by layer. x is a tensor [B, T, D] or a tree of them."""

    config: Any
    init: Callable[[MakeLeaf], Tree]  # blocks are stacked on a leading L dim
    embed: Callable[[Tree, Batch, Ctx], Any]  # tokens -> x
    block: Callable[[Tree, Any, Ctx], Any]  # x -> x, with one layer's slice of params["blocks"]
    head: Callable[[Tree, Any, Batch, Ctx], Loss]  # x -> sums, local, not normalised
    logits: Callable[[Tree, Any, Ctx], Tensor]  # x -> [B, T, V], for sampling
    rules: Callable[[Mesh], Rules[str]]  # leaf names -> Spec texts; raises ValueError where the mesh does not divide the model
    shared: tuple[str, ...] = ()  # leaves under embed/ that the head uses too


def init_params(
    model: Model,
    key: Tensor,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    plan: Plan | None = None,
    mesh: Mesh = one_process(),  # noqa: B008
    then: Callable[[str, Tensor], Tensor] = lambda name, leaf: leaf,
) -> Tree:
    """The initial parameters: a leaf's element depends on the key, the leaf's name and the element's global index only.

    plan: this rank's shards at rest, each drawn without the rest of its leaf. then: what is made of each leaf as soon as it is drawn.
    """
    specs = pytree.named_leaves(plan.params) if plan is not None else {}

    def make(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Tensor:
        spec = specs.get(name, Spec())
        if std == 0.0:
            leaf = torch.full(slices.local_slice(shape, spec, mesh)[1], mean, dtype=dtype, device=device)
        else:
            leaf = draw.draw_normal(prng.fold_in(key, name), shape, spec, mesh, mean, std, dtype, device)
        return then(name, leaf)

    return model.init(make)


def transform(model: Model, params: Tree, batch: Batch, ctx: Ctx, plan: Plan | None = None) -> Any:
    """The activations behind the last block."""
    ctx = ctx._replace(documents=batch.get("documents", ()), first=batch.get("first", ctx.first))
    x = model.embed(outside(model, "embed", params, plan, ctx), batch, ctx)
    inner = ctx._replace(remat=Remat())  # a block is the same program under every policy
    block = model.block if plan is None or ctx.mesh.size == 1 else unshard_block(model.block, plan, ctx.mesh)
    return stack(block, params["blocks"], x, inner, remat=ctx.remat, compiled=ctx.compiled)


def outside(model: Model, part: str, params: Tree, plan: Plan | None, ctx: Ctx) -> Tree:
    """The parameters of "embed" or "head", as the model's code sees them."""
    if plan is None or ctx.mesh.size == 1:
        return params
    shared = model.shared if part == "head" else ()
    used = {name: leaf for name, leaf in pytree.named_leaves(params).items() if name.startswith(f"{part}/") or name in shared}
    return unshard_tree(pytree.nest(used), plan, ctx.mesh)


def loss(model: Model, params: Tree, batch: Batch, ctx: Ctx, plan: Plan | None = None) -> Loss:
    """The loss of a batch: embed, the stack of blocks, head.

    On a mesh `params` are this rank's shards at rest by `plan`, the batch is this rank's, and so are the sums: the same on the ranks of
    tp, to be summed over dp and rp. The gradient of such a sum by `params` is whole, in their layout. Composes with torch.func.
    """
    check_batch(model, batch, ctx)
    x = transform(model, params, batch, ctx, plan)
    return model.head(outside(model, "head", params, plan, ctx), x, batch, ctx)


def logits(model: Model, params: Tree, batch: Batch, ctx: Ctx = Ctx()) -> Tensor:  # noqa: B008
    """All logits [B, T, V] of a batch: for tests and short sequences."""
    return model.logits(params, transform(model, params, batch, ctx), ctx)


def check_batch(model: Model, batch: Batch, ctx: Ctx) -> None:
    """Raise ValueError where a batch does not fit the model: a missing entry, a shape, a sequence too long, or not divisible by tp."""
    for name in ("tokens", "targets"):
        if name not in batch:
            raise ValueError(f"the batch has no {name!r}; it has {', '.join(sorted(batch)) or 'nothing'}")
    shape = batch["tokens"].shape
    for name in ("tokens", "targets", "mask", "documents"):
        if name in batch and batch[name].shape != shape:
            raise ValueError(f"batch[{name!r}] has shape {list(batch[name].shape)} and tokens {list(shape)}; they must agree")
    if shape[-1] > model.config.max_len:
        raise ValueError(f"the sequences have {shape[-1]} tokens and the model takes {model.config.max_len} (max_len)")
    tp = ctx.mesh["tp"].size
    if ctx.sequence and shape[-1] % tp:
        raise ValueError(
            f"sequence parallelism: the sequences have {shape[-1]} tokens, not divisible by tp={tp}; use {-(-shape[-1] // tp) * tp}"
        )


def token_loss(x: Tensor, w: Tensor, batch: Batch, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """(cross entropy summed over the tokens that count, their number) of normed activations x [B, T, D] and w [V, D].

    Under tp w is this rank's rows [V/tp, D] and x is inside the tensor-parallel region (`layers.enter`); both results are the same on
    all its ranks.
    """
    targets = batch["targets"].reshape(-1)
    mask = batch["mask"].reshape(-1) if "mask" in batch else torch.ones_like(targets, dtype=torch.bool)
    options = {"axis": ctx.mesh["tp"], "compiled": ctx.compiled, "impl": ctx.kernels["linear_cross_entropy"]}
    return linear_cross_entropy(x.reshape(-1, x.shape[-1]), w, targets, mask, **options), mask.sum()


def num_params(model: Model) -> int:
    """The number of parameters."""
    count: list[int] = []
    model.init(lambda name, shape, std, mean=0.0: count.append(torch.Size(shape).numel()))
    return sum(count)
