"""One step of generation: a pure function over parameters, pages and a batch of rows.

    logits, pages = step(params, pages, batch)

A row is some consecutive tokens of a request. Prefill, a chunk of it, decoding, and the check of guesses differ in the
rows' lengths alone. The functions of the layers are those of training; attention reads pages (kernels/paged_attention).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.autodiff import inference
from fzero.core.copy_buckets import bring_together
from fzero.core.pytree import Tree
from fzero.generate.pages import Pages, causal_module, recompute_reason
from fzero.generate.programs import programs_of
from fzero.generate.step_records import Memory, StepRecords, memory_of, same_memory
from fzero.kernels.registry import Kernels
from fzero.models import Ctx, Model
from fzero.models.base import Cache, TokenLayout
from fzero.models.batch import Batch
from fzero.models.causal_module import RowGroup, cached_groups
from fzero.models.configs import head_of
from fzero.models.deepseek import MTP_JOIN, MTP_STACK, mtp_model
from fzero.sharding import Mesh, Plan
from fzero.sharding.prefetch import ParamFetcher, Prefetcher
from fzero.sharding.zero_stages import shapes_of
from fzero.train.stage_exchange import Segment, segments_of
from fzero.train.state import expect_shapes

WIDTHS = 8  # pages: the width of a table is a multiple, so that few shapes come often
Step = Callable[[Tree, Pages, "StepBatch"], tuple[Tensor, Pages]]
# (params, pages, batch, the last activations [N, D] of another step) -> (logits, last activations, pages)
HiddenStep = Callable[[Tree, Pages, "StepBatch", Tensor | None], tuple[Tensor, Tensor | None, Pages]]


class StepBatch(NamedTuple):
    """The rows of a step, one after the other.

    >>> StepBatch.of_rows([([7, 8], 3, [0, 2])], [1], page_tokens=4).slots  # positions 3 and 4, in pages 0 and 2
    tensor([3, 8])
    """

    tokens: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    slots: Tensor  # int64 [N]: the line of each position in the pages, counted through all of them
    starts: Tensor  # int32 [R + 1]: row r is the tokens starts[r] to starts[r + 1]
    table: Tensor  # int32 [R, P]: the pages of each row, those of its positions in order, then zeros
    logit_rows: Tensor  # int64 [M]: the tokens whose logits are computed

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[tuple[Sequence[int], int, Sequence[int]]],
        logit_counts: Sequence[int],
        *,
        page_tokens: int,
        device: torch.device | str = "cpu",
    ) -> StepBatch:
        """The batch of rows (token ids, position of the first, pages) whose last `logit_counts` tokens have logits."""
        tokens, positions, slots, starts, logit_rows = [], [], [], [0], []
        for (ids, first, pages), count in zip(rows, logit_counts, strict=True):
            span = range(first, first + len(ids))
            tokens += ids
            positions += span
            slots += [pages[p // page_tokens] * page_tokens + p % page_tokens for p in span]
            starts.append(len(tokens))
            logit_rows += range(len(tokens) - count, len(tokens))
        longest = -(-max((len(pages) for _, _, pages in rows), default=0) // WIDTHS) * WIDTHS
        table = [[*pages, *[0] * (longest - len(pages))] for _, _, pages in rows]
        tensors = (
            *(torch.tensor(numbers, dtype=torch.int64) for numbers in (tokens, positions, slots)),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(table, dtype=torch.int32).reshape(len(rows), longest),
            torch.tensor(logit_rows, dtype=torch.int64),
        )
        return cls(*bring_together(tensors, device))


@checked()
def make_step(model: Model, plan: Plan, *, kernels: str | Kernels = "auto", dtype: torch.dtype | None = None) -> Step:
    """Return `step(params, pages, batch) -> (logits, pages)`: logits float32 [M, V] of the tokens that the batch names,
    and the pages with the entries of its tokens.

    params: at rest as `plan` says, at any stage; a rank of tp has its own heads, and what rests sharded is gathered, or
    read from the host or a disk, layer by layer. pages: from `PageSpec.zeros`; they are written in place, and the value
    that was given is spent. kernels: the form of each operation, as in training; "canonical": the logits are the bits
    of training's, in any batch. dtype: of activations and products; None: the plan's. On a CPU a step of up to 32
    tokens whose shape came three times is recorded, and repeated without Python. Parameters may change between steps
    in any way, and threads may share a step, each with its pages.
    Communicates: as a forward pass of training. All ranks of a mesh call it together, also with an empty batch.

    Raises ValueError for a model with a head of scores, and a mesh with pp, cp or ep. The step raises it for parameters
    of another model, for pages that an earlier step was given, and, with "canonical", for pages in codes.

    >>> from fzero import generate, models, one_process, random, zero_plan
    >>> model = models.build(models.LlamaConfig(32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32))
    >>> plan = zero_plan(0, model, one_process())
    >>> step, pages = generate.make_step(model, plan), generate.page_spec(model, plan, count=4, page_tokens=8).zeros()
    >>> prompt = generate.StepBatch.of_rows([([1, 2, 3], 0, [0])], [1], page_tokens=8)
    >>> logits, pages = step(models.init_params(model, random.key(0)), pages, prompt)
    >>> logits.shape
    torch.Size([1, 32])
    """
    step = hidden_step(model, plan, kernels=kernels, dtype=dtype)

    def without_hidden(params: Tree, pages: Pages, batch: StepBatch) -> tuple[Tensor, Pages]:
        logits, _, pages = step(params, pages, batch, None)
        return logits, pages

    return without_hidden


def hidden_step(
    model: Model, plan: Plan, *, kernels: str | Kernels = "auto", dtype: torch.dtype | None = None, mtp: bool = False
) -> HiddenStep:
    """As `make_step`, with the last activations [N, D] before the head's norm; None of a module. mtp: of the second
    head, whose tokens are those that follow, from such activations."""
    expect_generates(model, plan)
    kernels = Kernels.parse(kernels) if isinstance(kernels, str) else kernels
    if kernels.canonical and model.traits.causal:
        raise ValueError(
            f'kernels="canonical": {causal_module(model).copied.name} is computed by code of its own, whose operations '
            "have no canonical form; leave it out"
        )
    ctx = Ctx(mesh=plan.mesh, dtype=dtype or plan.policy.compute, kernels=kernels)
    segments = segments_of(model, plan)
    ends = [segment for segment in segments if mtp and segment.kind in ("embed", "head")]
    segments = tuple(s for s in segments if s in ends or (s.name in (MTP_STACK, MTP_JOIN)) == mtp)
    model, first = (mtp_model(model), model.config.n_layers) if mtp else (model, 0)
    resident = _Resident(segments, plan)
    run = _OfModule(model, plan.mesh) if model.traits.causal else _Paged(ctx, first)
    records = StepRecords(run.programs) if isinstance(run, _Paged) else None

    @inference()
    def step(
        params: Tree, pages: Pages, batch: StepBatch, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Pages]:
        if pages.spec.coded:
            kernels.refuse(f"a cache in {pages.spec.dtype}")
        pages = pages.donate()

        device = batch.tokens.device
        trees = resident.views(params, device)

        def call(*tensors: Tensor) -> list[Tensor]:
            batch, hidden = StepBatch(*tensors[: len(StepBatch._fields)]), tensors[len(StepBatch._fields) :]
            fetches = iter(trees or resident.fetched(params, device))
            logits, last = run(model, fetches, ctx, pages, batch, *(hidden or (None,)))
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return [logits] if last is None else [logits, last]

        inputs = [*batch] if hidden is None else [*batch, hidden]
        if records is not None and trees:
            results = records.run([(trees, 0), *memory_of(pages.layers)], call, inputs)
        else:
            results = call(*inputs)
        return results[0], results[1] if len(results) > 1 else None, pages

    return step


Fetches = Iterator[tuple[Segment, int, Tree]]  # (segment, number of its layer, leaves), in the order of a pass
CallLayer = Callable[[Callable[..., Any], int, Tree, Any], Any]  # (function, number of the layer, leaves, x) -> x


class _Paged:
    """The logits [M, V], and the last activations [N, D], of a model whose attention reads pages."""

    def __init__(self, ctx: Ctx, first: int) -> None:
        self.programs, self.first = programs_of(ctx.mesh, ctx.dtype, ctx.kernels), first

    def __call__(
        self, model: Model, fetches: Fetches, ctx: Ctx, pages: Pages, batch: StepBatch, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        shape = len(batch.tokens), *batch.table.shape, pages.spec, batch.tokens.device
        numbers = torch.arange(self.first, self.first + len(pages.layers), device=batch.tokens.device).unbind()
        rows = batch.positions, batch.slots, batch.table, batch.starts

        def call_layer(function: Callable[..., Any], layer: int, params: Tree, x: Any) -> Any:
            tensors = *rows, numbers[layer - self.first], *pages.layers[layer - self.first]
            return self.programs.run(function, params, x, tensors, shape)

        def select(x: Any) -> Any:  # a model with counts of its own has the activations beside them
            rows = batch.logit_rows
            return {**x, "x": x["x"][:, rows]} if isinstance(x, Mapping) else x[:, rows]

        ctx = ctx._replace(tokens=TokenLayout(positions=batch.positions))
        inputs = {"tokens": batch.tokens[None]} | ({} if hidden is None else {"hidden": hidden[None]})
        logits, x = _pass(model, fetches, inputs, ctx, call_layer, select)
        return logits[0], (x["x"] if isinstance(x, Mapping) else x)[0]


class _OfModule:
    """The logits [M, V] of a model made from a module, by its own cache, or computed again from ids in the pages."""

    def __init__(self, model: Model, mesh: Mesh) -> None:
        self.causal, self.reason = causal_module(model), recompute_reason(model, mesh)
        self.padded = self.causal.paging(mesh).padded
        if self.reason and mesh.rank == 0:
            warnings.warn(f"each new token computes all before it again: {self.reason}", UserWarning, stacklevel=5)

    def __call__(
        self, model: Model, fetches: Fetches, ctx: Ctx, pages: Pages, batch: StepBatch, hidden: Tensor | None
    ) -> tuple[Tensor, None]:
        if self.reason:
            groups = rows_from_ids(Cache(pages.layers[0], batch.slots, batch.table, batch.starts), batch)
        else:
            rows = batch.tokens, batch.positions, batch.starts, batch.table
            groups = cached_groups(*rows, pages.spec.page_tokens, self.padded)
        layers = None if self.reason or not groups else pages.layers
        like = {"dtype": torch.int64, "device": batch.tokens.device}
        if not groups:  # all ranks gather the weights
            groups = [RowGroup(torch.zeros(1, 1, **like), torch.full((1, 1), -1))]
        logit_tokens = set(batch.logit_rows.tolist())
        columns, order = [], dict[int, int]()
        for group in groups:
            index = group.index.tolist()
            columns.append([i for i, tokens in enumerate(zip(*index)) if logit_tokens.intersection(tokens)])
            for row in index:
                for i in columns[-1]:
                    order[row[i] if row[i] in logit_tokens else -1 - len(order)] = len(order)
        blocks = (
            (segment.functions[number % len(segment.functions)] if segment.kind == "block" else None, leaves)
            for segment, number, leaves in fetches
        )
        logits = self.causal.run(groups, blocks, ctx, layers, [torch.tensor(numbers, **like) for numbers in columns])
        rows = torch.tensor([order[token] for token in batch.logit_rows.tolist()], **like)
        return torch.cat([x.flatten(0, 1) for x in logits])[rows], None


def rows_from_ids(cache: Cache, batch: StepBatch) -> list[RowGroup]:
    """One group, of the rows whose logits are wanted from their first tokens on, by ids in pages; or none."""
    cache.write(batch.tokens[None, :, None, None])
    logit_tokens = set(batch.logit_rows.tolist())
    rows = [(range(span.start, span.stop), ids[0, :, 0, 0]) for span, (ids,) in cache.rows(batch.positions)]
    rows = [(span, ids) for span, ids in rows if logit_tokens.intersection(span)]
    if not rows:
        return []
    longest = max(len(ids) for _, ids in rows)
    tokens = torch.stack([torch.nn.functional.pad(ids, (0, longest - len(ids))) for _, ids in rows])
    index = [[-1] * (len(ids) - len(span)) + [*span] + [-1] * (longest - len(ids)) for span, ids in rows]
    return [RowGroup(tokens, torch.tensor(index))]


def _pass(
    model: Model,
    fetches: Fetches,
    inputs: Batch,
    ctx: Ctx,
    call_layer: CallLayer,
    select: Callable[[Any], Any],
) -> tuple[Tensor, Any]:
    """The logits [B, T, V] of the activations that `select` takes of the last ones, and these."""
    x: Any = None
    for segment, number, p in fetches:
        if segment.kind == "embed":
            x = model.embed(p, inputs, ctx)
        elif segment.kind == "join":
            x = segment.functions[0](p, x, inputs, ctx)
        elif segment.kind == "block":
            x = call_layer(segment.functions[number % len(segment.functions)], segment.first + number, p, x)
        else:
            return model.logits(p, select(x), ctx), x
    raise AssertionError("the last segment of a model is its head")


def expect_generates(model: Model, plan: Plan) -> None:
    """Raise ValueError for a model that says no text, a plan of another, and a mesh over which none is generated."""
    causal_module(model)
    expect_params(shapes_of(model), plan, "the plan is", shards=False)
    if head_of(model.config) is not None:
        raise ValueError(
            "the model has a head of scores, which says no text; models.logits gives them, and fzero export writes a "
            "folder for AutoModelForSequenceClassification"
        )
    for axis, reason in (("pp", "layers"), ("cp", "a sequence"), ("ep", "experts")):
        if (size := plan.mesh[axis].size) > 1:
            raise ValueError(
                f"{axis}={size}: generation splits no {reason} over ranks; use a mesh of dp, rp and tp, on which any "
                "checkpoint can be restored"
            )


def expect_params(params: Tree, plan: Plan, label: str = "the parameters are", *, shards: bool = True) -> None:
    """Raise ValueError for parameters, at rest or whole, that are not those of the plan's model."""
    try:
        expect_shapes(plan, params, shards=shards)
    except ValueError as error:
        raise ValueError(f"{label} of another model: {error}") from None


class _Resident:
    """The leaves of each segment in the order of a pass: views of parameters that are whole here, else fetched."""

    def __init__(self, segments: Sequence[Segment], plan: Plan) -> None:
        self.segments, self.plan = segments, plan
        self.latest: tuple[Memory, list[tuple[Segment, int, Tree]]] = [], []

    def views(self, params: Tree, device: torch.device) -> list[tuple[Segment, int, Tree]]:
        """The leaves of parameters that are whole here, views made once; [] of others."""
        memory, latest = memory_of(params), self.latest
        if not same_memory(memory, latest[0]):
            expect_params(params, self.plan)
            leaves = [leaf for leaf, _ in memory]
            resident = self.plan.mesh.size == 1 and all(isinstance(x, Tensor) and x.device == device for x in leaves)
            # One assignment, as another thread may have other parameters.
            self.latest = latest = memory, list(self.fetched(params, device)) if resident else []
        return latest[1]

    def fetched(self, params: Tree, device: torch.device) -> Fetches:
        """The leaves, the next ones of which are on their way."""
        groups = [(segment, group) for segment in self.segments for group in segment.groups]
        ahead = Prefetcher(ParamFetcher(params, self.plan, device), 1)
        ahead.expect([group for _, group in groups], "generate")
        for segment, group in groups:
            names = [name.removeprefix(f"{segment.name}/") if segment.depth else name for name in group.leaves]
            leaves = pytree.nest(dict(zip(names, ahead.fetch(group))))
            yield segment, (group.layer or 0) - segment.local_first, leaves
