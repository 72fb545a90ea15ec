"""A layer in chunks of the sequence: x, the result and their gradients alone are as long as it on the device.

    forward, chunk i, first one first:  q, k, v = before(x_i)
                                        y_i = after(x_i, join over chunks j <= i of attention(q, k_j, v_j))
    backward, chunk i, last one first:  the gradients of `after`, then for chunks j <= i those of attention, of which
                                        those by q_i, k_i and v_i are complete then, then those of `before`

Keys, values and results of attention of a GPU leave for the host's memory chunk by chunk, and come back when they are
needed: one chunk while the one before it is worked on, so that two stand there beside a chunk's own. The gradients of
keys and values rest with them, in float32 or wider, until their chunk's turn. A chunk that no query of another sees by
the pattern does not come. On a CPU all of it stays where it is.

The backward pass computes `before` and `after` again, chunk by chunk, and not attention. The gradients of parameters
are summed over chunks in float32 or wider, which has the size of a layer's parameters.
Ref: Yao et al. 2024, "Fully pipelined distributed transformer", arXiv:2408.16978, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.autodiff import Function, first_order, needs_grad, run_backward
from fzero.core.device import fake_device_of
from fzero.core.gpu import HOST
from fzero.core.gpu_copies import Copied, copy_in, copy_out, pass_group
from fzero.core.pytree import Tree, TreeDef
from fzero.core.torch_private import FakeTensor, run_autograd
from fzero.kernels import attention_arguments
from fzero.kernels.attention_arguments import Scoring
from fzero.kernels.attention_ring import ChunkAttention, join
from fzero.models.base import Ctx
from fzero.models.cp_attention import Attention, attend_with_cache
from fzero.models.weights import tensors_of, with_tensors


class AttentionLayer(NamedTuple):
    """What a decoder's layer does before and after attention, and how it attends."""

    pre_attention: Callable[[Tree, Tensor, Ctx], tuple[Tensor, Tensor, Tensor]]  # (params, x [B, T, D], ctx) -> q, k, v
    # (params, x, attention's result [B, T, H, K], ctx) -> x
    post_attention: Callable[[Tree, Tensor, Tensor, Ctx], Tensor]
    attention: Attention

    def __call__(self, p: Tree, x: Tensor, ctx: Ctx, tokens: int = 0) -> Tensor:
        """x [B, T, D] after the layer, computed for `tokens` tokens at a time (0: all)."""
        if tokens and not ctx.cache:
            expect_chunks(x, ctx, tokens)
        if 0 < tokens < x.shape[1] and not ctx.cache and first_order():
            return _in_chunks(self, p, x, ctx, tokens)
        q, k, v = self.pre_attention(p, x, ctx)
        return self.post_attention(p, x, attend_with_cache(q, k, v, ctx, self.attention, p["attn"].get("sinks")), ctx)


def expect_chunks(x: Tensor, ctx: Ctx, tokens: int) -> None:
    """Raise ValueError if a layer in chunks of tokens is asked for where that is not done."""
    plan = fake_device_of(x)
    split, some = ctx.split.sequence and ctx.mesh.tp.size > 1, isinstance(ctx.tokens.positions, Tensor)
    traced = isinstance(x, FakeTensor) if plan is None else plan.tracing
    for holds, reason, fix in (
        (ctx.mesh.cp.size > 1, f"cp is {ctx.mesh.cp.size}, which splits sequences itself", "use cp=1"),
        (split, "sequence parallelism splits x along T too", "use sequence=False"),
        (some, "the layer computes some of the positions alone", "leave random-LTD out"),
        (bool(ctx.matmul), f"products are in {ctx.matmul}, whose scales are of all tokens", "use another policy"),
        (traced, "the block is traced into a graph", "use compiled=False, remat none, full or every:K, and a pipeline "
         "schedule that does not split the backward pass"),
    ):  # fmt: skip
        if holds:
            raise ValueError(f"layer_tokens is {tokens}, and {reason}; {fix}, or layer_tokens=0")


def _in_chunks(layer: AttentionLayer, p: Tree, x: Tensor, ctx: Ctx, tokens: int) -> Tensor:
    weights, weights_def = pytree.flatten(p)
    opened = [tensors_of(weight) for weight in weights]
    # Without tensors: this lives as long as the graph, which may not hold parameters.
    empty = [with_tensors(w, pytree.map(lambda t: None, inner)) for w, inner in zip(weights, opened)]
    leaves, treedef = pytree.flatten((opened, ctx))
    sinks = p["attn"].get("sinks")
    sinks_index = next((i for i, leaf in enumerate(leaves) if leaf is sinks), -1) if sinks is not None else -1
    static = [() if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
    run = _Run(layer, tokens, (empty, weights_def, treedef, static), len(pytree.leaves(opened)), sinks_index)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return _InChunks.apply(run, x, *tensors) if needs_grad(x, *tensors) else run.forward(x, tensors, save=False)


class _InChunks(Function):
    @staticmethod
    def forward(run: _Run, x: Tensor, *tensors: Tensor) -> Tensor:
        return run.forward(x, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad_indices = [i for i in range(ctx.run.trained) if ctx.needs_input_grad[i + 2]]

        def run(dy: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            return ctx.run.backward(dy, x, tensors, grad_indices)

        dx, *grads = run_backward("a layer in chunks", run, dy, *saved)
        grad_by_index = dict(zip(grad_indices, grads))
        return None, dx, *(grad_by_index.get(i) for i in range(len(saved) - 1))


@dataclass
class _Run:
    """One layer on one x, forward and backward."""

    layer: AttentionLayer
    tokens: int
    structure: tuple[list[Any], TreeDef, TreeDef, list[tuple[Any, ...]]]
    trained: int  # how many of the tensors are parameters; the others are the ctx's
    sinks: int  # the number of those of attention's sinks; -1: there are none
    residuals: list[list[Copied]] = field(default_factory=list)  # k, v, out, lse of each chunk

    def trees(self, tensors: Sequence[Tensor]) -> tuple[Tree, Ctx]:
        """(parameters, ctx) of the tensors."""
        empty, weights_def, treedef, static = self.structure
        remaining = iter(tensors)
        opened, ctx = pytree.unflatten([leaf[0] if leaf else next(remaining) for leaf in static], treedef)
        return pytree.unflatten([with_tensors(w, inner) for w, inner in zip(empty, opened)], weights_def), ctx

    def chunks(self, x: Tensor, ctx: Ctx) -> list[tuple[slice, Ctx]]:
        """The tokens of each chunk, and its ctx."""
        t = x.shape[1]
        starts = range(0, t, self.tokens)
        return [
            (slice(start, min(start + self.tokens, t)), ctx._replace(tokens=ctx.tokens._replace(chunk=(start, t))))
            for start in starts
        ]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, ctx: Ctx) -> ChunkAttention:
        """How chunks like these attend."""
        settings, documents = self.layer.attention, ctx.tokens.documents
        documents = None if isinstance(documents, tuple) else documents
        scores = Scoring(settings.pattern, settings.scale or q.shape[-1] ** -0.5, settings.cap)
        return ChunkAttention.choose(ctx.kernels["attention"], q, k, v, documents, scores)

    def visible_chunks(self, i: int, attention: ChunkAttention) -> range:
        """The chunks before chunk i whose keys its queries see."""
        return range(attention.first_key(i * self.tokens) // self.tokens, i)

    @torch.no_grad()
    def forward(self, x: Tensor, tensors: Sequence[Tensor], save: bool = True) -> Tensor:
        """y; with `save` what the backward pass needs is in `kept` then."""
        (p, ctx), y = self.trees(tensors), torch.empty_like(x)
        residuals: list[list[Copied]] = []
        for i, (span, chunk_ctx) in enumerate(self.chunks(x, ctx)):
            pass_group(x.device, ("chunk", i), fetched=True)
            q, k, v = self.layer.pre_attention(p, x[:, span], chunk_ctx)
            attention = self.attention(q, k, v, ctx)
            out, lse = attention.forward(q, k, v, span.start, span.start)
            visible = self.visible_chunks(i, attention)
            fetches = _fetch_in_order([residuals[j][:2] for j in visible], x.device)
            for j in visible:  # not a zip, which would hold each chunk for longer
                k_j, v_j = next(fetches)
                out, lse = join((out, lse), attention.forward(q, k_j, v_j, span.start, j * self.tokens))
                del k_j, v_j  # before the chunk after the next one begins to come
            if self.sinks >= 0:
                out, lse = attention_arguments.with_sinks(out, lse, tensors[self.sinks])
            out = out.to(x.dtype)
            residuals.append([_offload(tensor) for tensor in ((k, v, out, lse) if save else (k, v))])
            del q, k, v
            y[:, span] = self.layer.post_attention(p, x[:, span], out, chunk_ctx)
        self.residuals = residuals if save else []
        return y

    def backward(
        self, dy: Tensor, x: Tensor, tensors: Sequence[Tensor], grad_indices: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """The gradients by x and by the wanted ones of the tensors."""
        _, ctx = self.trees(tensors)
        chunks, dx, sums = self.chunks(x, ctx), torch.empty_like(x), _Sums(tensors, grad_indices)
        pending: list[list[Copied]] = [[] for _ in chunks]  # dk and dv of each chunk, by the queries after it so far
        fetches = _fetch_in_order([saved[2:] for saved in reversed(self.residuals)], x.device)
        for i in reversed(range(len(chunks))):
            (out, lse), (span, chunk_ctx) = next(fetches), chunks[i]

            def post_attention(
                x: Tensor, out: Tensor, *tensors: Tensor, chunk_ctx: Ctx = chunk_ctx
            ) -> tuple[Tensor, ...]:
                return (self.layer.post_attention(self.trees(tensors)[0], x, out, chunk_ctx),)

            def pre_attention(x: Tensor, *tensors: Tensor, chunk_ctx: Ctx = chunk_ctx) -> tuple[Tensor, ...]:
                return self.layer.pre_attention(self.trees(tensors)[0], x, chunk_ctx)

            _, pull = _vjp(post_attention, (x[:, span], out), tensors, grad_indices)
            (dx_i, g), grads = pull((dy[:, span],))
            sums.add(grads)
            (q, k, v), pull = _vjp(pre_attention, (x[:, span],), tensors, grad_indices)
            attention = self.attention(q, k, v, ctx)
            if self.sinks in grad_indices:
                sums.add({self.sinks: attention_arguments.gradient(out, lse, g, tensors[self.sinks])})
            dq, dk, dv = self.attend_backward(i, attention, (q, k, v, out, lse, g), pending)
            (dx_pre,), grads = pull([grad.to(x.dtype) for grad in (dq, dk, dv)])
            sums.add(grads)
            torch.add(dx_i, dx_pre, out=dx[:, span])
            del q, k, v, out, lse, g, dq, dk, dv, dx_i, dx_pre, grads, pull
        return dx, *sums.pop_sums()

    def attend_backward(
        self, i: int, attention: ChunkAttention, tensors: Sequence[Tensor], pending: list[list[Copied]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients by q, k and v of chunk i; those of earlier keys and values are added to `pending`."""
        (q, k, v, out, lse, g), start = tensors, i * self.tokens
        dq, dk, dv = attention.backward(q, k, v, out, lse, g, start, start)
        visible, device = self.visible_chunks(i, attention), q.device
        fetches = _fetch_in_order([[*self.residuals[j][:2], *pending[j]] for j in visible], device)
        for j in visible:
            k_j, v_j, *sums = next(fetches)
            pass_group(device, ("owed", i, j), fetched=True)
            dq_j, *new = attention.backward(q, k_j, v_j, out, lse, g, start, j * self.tokens)
            dq.add_(dq_j)
            del k_j, v_j, dq_j
            totals = [total.add_(grad) for total, grad in zip(sums, new)] or new
            pending[j] = [_offload(x, buffer) for x, buffer in zip(totals, pending[j] or (None, None))]
            del sums, new, totals
        for total, copied in zip((dk, dv), pending[i]):
            total.add_(copy_in(copied.tensor, device, event=copied.event).use())
        pending[i] = []
        return dq, dk, dv


class _Sums:
    """Sums over chunks of the gradients of the wanted tensors, by number, in float32 or wider."""

    def __init__(self, tensors: Sequence[Tensor], grad_indices: Sequence[int]) -> None:
        self.tensors, self.sums = tensors, dict.fromkeys(grad_indices)

    def add(self, grads: dict[int, Tensor]) -> None:
        """Add the gradients of some of them."""
        for i, grad in grads.items():
            total = self.sums[i]
            if total is None:
                wide = torch.promote_types(grad.dtype, torch.float32)
                total = self.sums[i] = torch.zeros_like(self.tensors[i], dtype=wide)
            total.add_(grad)

    def pop_sums(self) -> Iterator[Tensor]:
        """Each sum in its tensor's dtype, which is freed before the next one is made."""
        for i in list(self.sums):
            total = self.sums.pop(i)
            yield torch.zeros_like(self.tensors[i]) if total is None else total.to(self.tensors[i].dtype)
            del total


def _vjp(
    f: Callable[..., tuple[Tensor, ...]], x: Sequence[Tensor], tensors: Sequence[Tensor], grad_indices: Sequence[int]
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], tuple[list[Tensor], dict[int, Tensor]]]]:
    """(the results of f(*x, *tensors), the function from their gradients to those by x and tensors)."""
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in x]
        leaves = [t.detach() for t in tensors]
        for i in grad_indices:
            leaves[i].requires_grad_()
        outs = f(*inputs, *leaves)

    def pull(grads: Sequence[Tensor]) -> tuple[list[Tensor], dict[int, Tensor]]:
        ends = (*inputs, *(leaves[i] for i in grad_indices))
        results = run_autograd(tuple(outs), tuple(grads), False, False, ends, True, accumulate_grad=False)
        param_grads = zip(grad_indices, results[len(inputs) :])
        return list(results[: len(inputs)]), {i: grad for i, grad in param_grads if grad is not None}

    return [out.detach() for out in outs], pull


def _offload(x: Tensor, buffer: Copied | None = None) -> Copied:
    """x in the host's memory, that of `buffer` if given; on a CPU it stays."""
    return Copied(x) if x.device == HOST else copy_out(x, out=None if buffer is None else buffer.tensor)


def _fetch_in_order(entries: Iterable[Sequence[Copied]], device: torch.device) -> Iterator[list[Tensor]]:
    """The tensors of each entry on the device; while one is worked on the next one comes."""
    current: list[Copied] | None = None
    for entry in entries:
        next_copies = [copy_in(copied.tensor, device, event=copied.event) for copied in entry]
        if current is not None:
            yield [copied.use() for copied in current]
        current = next_copies
        del next_copies
    if current is not None:
        yield [copied.use() for copied in current]
