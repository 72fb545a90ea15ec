"""A layered model as a value: pure functions over a parameter tree whose blocks are stacked on a leading dim of L
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fzero.core import prng, pytree
from fzero.core.arguments import expect_kind
from fzero.core.autodiff import Remat
from fzero.core.pytree import Tree
from fzero.core.stack import stack
from fzero.kernels.cross_entropy import check_targets, counted_tokens
from fzero.kernels.linear_cross_entropy import linear_cross_entropy
from fzero.kernels.registry import AUTO, Kernels
from fzero.sharding import Mesh, Plan, Rules, Spec, draw, one_process, slices
from fzero.sharding.unshard import unshard_block, unshard_tree

# tokens, targets int64 [B, T]; optional mask bool [B, T], documents int [B, T], first int64 []. A token counts if its
# mask is True and its target is not negative.
Batch = dict[str, Tensor]


class MakeLeaf(Protocol):
    """`make(name, shape, std, mean=0.0)` makes a leaf: normal values, or the constant `mean` if std is 0."""

    def __call__(self, name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Any: ...


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
    first: Tensor | int = 0  # index of this batch's first sequence in the step's global batch
    documents: Tensor | tuple[()] = ()  # int [B, T]; () if each sequence is one document
    cache: Cache | tuple[()] = ()
    kernels: Kernels = AUTO  # the form of each hot operation
    matmul: str = ""  # how the linear layers of the blocks multiply, see core.precision.Policy
    sequence: bool = False  # under tp: activations outside the tensor-parallel regions are split along T too


class Loss(NamedTuple):
    """The loss of a batch as sums over the tokens that count. The step divides once, by the global num_tokens.

    >>> loss = Loss(total=torch.tensor(12.0), num_tokens=torch.tensor(4))
    >>> loss.total / loss.num_tokens  # nats a token
    tensor(3.)
    """

    total: Tensor  # float scalar: the objective in nats, summed over tokens
    num_tokens: Tensor
    extra: dict[str, Tensor] = {}  # noqa: RUF012  (further sums to report; never mutated)


class Model(NamedTuple):
    """A layered model: its config, and pure functions for embedding, block and head. The activations x are [B, T, D],
    or a tree of tensors.

    ZeRO-3, offload, recomputation and prefetch all work layer by layer, so the blocks' parameters are stacked: each
    leaf is [L, ...].

    >>> from fzero import models
    >>> model = models.mlp(models.MLPConfig())
    >>> sorted(model.init(lambda name, shape, std, mean=0.0: shape)["blocks"].items())
    [('scale', (2, 32)), ('w_in', (2, 32, 64)), ('w_out', (2, 64, 32))]
    """

    config: Any
    init: Callable[[MakeLeaf], Tree]  # makes the parameter tree
    embed: Callable[[Tree, Batch, Ctx], Any]  # tokens -> x
    block: Callable[[Tree, Any, Ctx], Any]  # (one layer's slice of params["blocks"], x) -> x
    head: Callable[[Tree, Any, Batch, Ctx], Loss]  # x -> this rank's sums
    logits: Callable[[Tree, Any, Ctx], Tensor]  # x -> [B, T, V], for sampling
    rules: Callable[
        [Mesh], Rules[str]
    ]  # rules from leaf names to Spec texts; raises ValueError if the mesh does not divide the model
    shared: tuple[str, ...] = ()  # leaves under embed/ that the head uses too (tied embeddings)


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
    mesh = plan.mesh if plan is not None else one_process()

    def make(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Tensor:
        spec = specs.get(name, Spec())
        if std == 0.0:
            leaf = torch.full(slices.local_slice(shape, spec, mesh)[1], mean, dtype=dtype, device=device)
        else:
            leaf = draw.draw_normal(prng.fold_in(key, name), shape, spec, mesh, mean, std, dtype, device)
        return then(name, leaf)

    return model.init(make)


def transform(model: Model, params: Tree, batch: Batch, ctx: Ctx, plan: Plan | None = None) -> Any:
    """Return the activations after the last block."""
    ctx = ctx._replace(documents=batch.get("documents", ()), first=batch.get("first", ctx.first))
    x = model.embed(unshard_part(model, "embed", params, plan, ctx), batch, ctx)
    inner = ctx._replace(remat=Remat())  # a block is the same program under every policy
    block = model.block if plan is None or ctx.mesh.size == 1 else unshard_block(model.block, plan)
    return stack(block, params["blocks"], x, inner, remat=ctx.remat, compiled=ctx.compiled)


def unshard_part(model: Model, part: str, params: Tree, plan: Plan | None, ctx: Ctx) -> Tree:
    """Return the parameters that "embed" or "head" uses, gathered from the shards at rest."""
    if plan is None or ctx.mesh.size == 1:
        return params
    shared = model.shared if part == "head" else ()
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
    then this rank's too: equal on the ranks of tp, to be summed over dp and rp; the gradients with respect to `params`
    are complete and in their layout. Composes with torch.func.

    Communicates: with a plan, the gathers of the parameters (backward the sums of their gradients), and the model's
    tensor parallelism. Raises ValueError if the batch does not fit the model (see check_batch).

    >>> from fzero import models, random
    >>> model = models.mlp(models.MLPConfig(vocab_size=8))
    >>> tokens = torch.zeros(2, 4, dtype=torch.int64)
    >>> int(loss(model, init_params(model, random.key(0)), {"tokens": tokens, "targets": tokens}, Ctx()).num_tokens)
    8
    """
    check_batch(model, batch, ctx)
    x = transform(model, params, batch, ctx, plan)
    return model.head(unshard_part(model, "head", params, plan, ctx), x, batch, ctx)


def logits(model: Model, params: Tree, batch: Batch, ctx: Ctx = Ctx()) -> Tensor:  # noqa: B008
    """Return all logits [B, T, V] of a batch, on one process: for tests and short sequences.

    batch: tokens int64 [B, T], and optionally documents int [B, T]. The logits have ctx.dtype.

    >>> from fzero import models, random
    >>> model = models.mlp(models.MLPConfig(vocab_size=8))
    >>> logits(model, init_params(model, random.key(0)), {"tokens": torch.zeros(2, 4, dtype=torch.int64)}).shape
    torch.Size([2, 4, 8])"""
    return model.logits(params, transform(model, params, batch, ctx), ctx)


def check_batch(model: Model, batch: Batch, ctx: Ctx) -> None:
    """Raise ValueError if a batch does not fit the model: an entry is missing, shapes differ, or sequences are too long
    or not divisible by tp.
    """
    write = 'write {"tokens": rows[:, :-1], "targets": rows[:, 1:]}'
    expect_kind("the batch of a Model", batch, Mapping, write)
    for name in ("tokens", "targets"):
        if name not in batch:
            raise ValueError(f"the batch has no {name!r}; it has {', '.join(sorted(batch)) or 'nothing'}")
        if batch[name].is_floating_point() or batch[name].dtype == torch.bool:
            raise ValueError(f"batch[{name!r}] is {batch[name].dtype}; it must be int64: the numbers of tokens")
    shape = batch["tokens"].shape
    if len(shape) != 2:
        raise ValueError(f"batch['tokens'] has shape {list(shape)}; it must be [B, T], such as tokens[None] of one row")
    for name in ("tokens", "targets", "mask", "documents"):
        if name in batch and batch[name].shape != shape:
            raise ValueError(
                f"batch[{name!r}] has shape {list(batch[name].shape)} and tokens {list(shape)}; they must agree"
            )
    if "mask" in batch and batch["mask"].dtype != torch.bool:
        raise ValueError(f"batch['mask'] is {batch['mask'].dtype}; it must be bool: give batch['mask'].bool()")
    if shape[-1] > model.config.max_len:
        raise ValueError(f"the sequences have {shape[-1]} tokens and the model takes {model.config.max_len} (max_len)")
    tp = ctx.mesh["tp"].size
    if ctx.sequence and shape[-1] % tp:
        raise ValueError(
            f"sequence parallelism: the sequences have {shape[-1]} tokens, not divisible by tp={tp}; use "
            f"{-(-shape[-1] // tp) * tp}"
        )


def check_tokens(batch: Batch, vocab_size: int) -> None:
    """Raise ValueError, naming the first position, if a token, or a target that counts, is not in the vocabulary.

    batch: tokens and targets int64 [B, T]; optional mask bool [B, T]. Negative targets, such as the -100 of Hugging
    Face's collators, do not count. The first call of a train or evaluation step checks its batch so; later ones do not,
    because it waits for the device: call it on the batches of a data loader that is in doubt.

    >>> tokens = torch.tensor([[3, 5], [1, 8]])
    >>> check_tokens({"tokens": tokens, "targets": tokens - 100}, vocab_size=8)
    Traceback (most recent call last):
    ValueError: tokens[1, 1] is 8; a token is in 0..7
    """
    tokens = batch["tokens"]
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise ValueError(f"tokens{at} is {int(tokens[tuple(at)])}; a token is in 0..{vocab_size - 1}")
    check_targets(batch["targets"], vocab_size, batch.get("mask"))


def token_loss(x: Tensor, w: Tensor, batch: Batch, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """Return (cross entropy summed over the tokens that count, their number) for normalised activations x [B, T, D] and
    w [V, D].

    Under tp w is this rank's rows [V/tp, D] and x is inside the tensor-parallel region (`layers.enter`); both results
    are the same on all ranks of tp.
    """
    targets, mask = batch["targets"].reshape(-1), batch["mask"].reshape(-1) if "mask" in batch else None
    options = {"axis": ctx.mesh["tp"], "compiled": ctx.compiled, "impl": ctx.kernels["linear_cross_entropy"]}
    num_tokens = counted_tokens(targets, mask).sum()
    return linear_cross_entropy(x.reshape(-1, x.shape[-1]), w, targets, mask, **options), num_tokens


def num_params(model: Model) -> int:
    """Return the number of parameters, without making them.

    >>> from fzero import models
    >>> num_params(models.gpt2(models.preset("gpt2-124m")))
    124439808
    """
    count: list[int] = []
    model.init(lambda name, shape, std, mean=0.0: count.append(torch.Size(shape).numel()))
    return sum(count)
