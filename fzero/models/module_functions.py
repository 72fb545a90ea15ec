"""The functions of the Model of an nn.Module: of one with layers, and of one that is trained whole."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fzero.core import graph_tracing, pytree
from fzero.core.arguments import expect_kind
from fzero.core.captured_state import preserve_random_states
from fzero.core.closure_state import Changed, expect_unchanged, methods
from fzero.core.graph_tracing import Watch
from fzero.core.purity_checks import is_near
from fzero.core.pytree import Tree
from fzero.core.random_interception import seeded
from fzero.core.stack import Blocks
from fzero.core.variable_snapshot import Readings
from fzero.models.base import Ctx, Loss, MakeLeaf, Model, ModelTraits, Start
from fzero.models.batch import Batch
from fzero.models.causal_module import CausalModule, LayerCall
from fzero.models.module_layers import (
    CannotSplit,
    Stacks,
    any_numbers,
    blank,
    choices,
    layer_of,
)
from fzero.models.module_rehearsal import CopiedModule, Rehearsal, first_of, values_of
from fzero.models.module_split import ForwardSplit, GraphProgram, Inputs, LossOf, StackKind, inputs_of, split
from fzero.models.module_tp import (
    CALL,
    Cuts,
    specs_of,
    ways_of,
)
from fzero.models.module_tp_search import Probe, find_cuts
from fzero.models.user_functions import ModuleConfig, loss_of
from fzero.sharding import Mesh, Rules

Weights = Callable[[str], Callable[[], Tensor]]  # the name of a parameter -> what reads the value that it begins with


class Prepared(NamedTuple):
    """What the functions of a Layered get by `ctx.prepared`."""

    split: int  # the number of the Split
    rows: int  # samples in the batch
    side_args: tuple[Tensor, ...]  # the layers' arguments that no parameter went into
    buffers: dict[str, Tensor]  # outside of the layers
    stacked: dict[str, dict[str, Tensor]]  # of each stack's layers, [L, ...], or [1, ...] where all have the same


class Layered(CopiedModule):
    """The functions of the Model of a module with layers; its Splits are made for new shapes, and kept."""

    def __init__(self, module: nn.Module, loss: LossOf, stacks: Stacks, tp: Mapping[str, str], inferred: bool):
        super().__init__(module, loss, stacks)
        self.inferred, self.ways = inferred, ways_of(self.linears, tp, inferred)
        self.draws = any(child.training for child in module.modules())  # unless an example says that nothing does
        self.known_cuts: dict[int, dict[str, Cuts]] = {}  # by the size of tp
        self.example: Batch | None = None
        self.splits: list[ForwardSplit] = []
        self.split_numbers: dict[Any, int] = {}  # signature of a batch -> number of its Split
        self.calls: Counter[Any] = Counter()  # by the signature of a batch
        self.readings: dict[Any, Readings] = {}  # what a Split has as constants, by the same
        self.rehearsed: set[Any] = set()  # the signatures for which the module was called with real tensors
        self.strict = False  # whether a trace is of a module that was not
        self.places = {name: f"embed/{slashed(name)}" for name in self.parameters}
        self.shared: tuple[str, ...] = tuple(self.places.values())

    def model(self, weights: Weights, batch: Batch | None) -> Model:
        """The Model, which begins with these weights."""
        self.example = batch
        if batch is not None:
            expect_batch(batch)
            with self.preserve_variables():
                item = self.splits[self.split_of(batch, Ctx(dtype=self.widest()))]
            self.rehearsed.clear()  # what was made for the example is not there any more
            self.readings = dict.fromkeys(self.readings, self.read())
            used = {segment: program.uses("parameter") for segment, program in self.programs(item).items()}
            parts = {name: [segment for segment in used if name in used[segment]] for name in self.parameters}
            self.draws = item.draws or bool(self.drawing)
            owners = {name: users[0] if len(users) == 1 else "embed" for name, users in parts.items()}
            self.places = {name: f"{segment}/{slashed(name)}" for name, segment in owners.items()}
            self.shared = tuple(self.places[name] for name, users in parts.items() if len(users) > 1)
        leaves = {self.places[name]: leaf for name, leaf in self.parameters.items()}
        start = {self.places[n]: Start((weights(n),), tuple(p.shape), False) for n, p in self.parameters.items()}
        for stack, layers in self.stacks.items():
            for name, leaf in self.within[stack].items():
                read = tuple(weights(f"{layer}.{name}") for layer in layers.names)
                start[f"{stack}/{slashed(name)}"] = Start(read, tuple(leaf.shape), True)
                leaves[f"{stack}/{slashed(name)}"] = leaf
        one_stack = self.functions("blocks") if "blocks" in self.stacks else None
        return Model(
            config=ModuleConfig(self.name, sum(len(layers.names) for layers in self.stacks.values())),
            init=partial(init, {name: item.shape for name, item in start.items()}),
            embed=self.embed,
            block=one_stack or {stack: self.functions(stack) for stack in self.stacks},
            join={stack: partial(self.join, stack) for stack in list(self.stacks)[1:]},
            head=self.head,
            logits=no_logits,
            rules=self.rules,
            shared=self.shared,
            prepare=self.prepare,
            traits=ModelTraits(
                start=start,
                frozen=frozenset(name for name, leaf in leaves.items() if not leaf.requires_grad),
                foreign=True,
                draws=self.draws,
                causal=functools.cache(lambda: CausalModule(self, self.places, self.cuts)),
            ),
        )

    def functions(self, stack: str) -> Blocks:
        """The functions that the layers of a stack take in turn."""
        blocks = [partial(self.block, StackKind(stack, kind)) for kind in range(len(self.templates[stack]))]
        turns = self.stacks[stack].turns
        return tuple(blocks[kind] for kind in turns) if len(turns) > 1 else blocks[0]

    def programs(self, forward_split: ForwardSplit) -> dict[str, GraphProgram]:
        """The programs of a Split by part of the Model: embed, join, head."""
        parts = ["embed", *(f"join{stack.removeprefix('blocks')}" for stack in list(self.stacks)[1:]), "head"]
        return dict(zip(parts, [*forward_split.prologues.values(), forward_split.epilogue]))

    def prepare(self, batch: Batch, ctx: Ctx) -> Prepared:
        """What the layers need of a batch."""
        if ctx.split.sequence:
            raise ValueError("sequence parallelism: a model made from a module has none; leave sequence=True out")
        rows = expect_batch(batch)
        try:
            number = self.split_of(batch, ctx)
        except CannotSplit as reason:
            raise ValueError(
                f"{self.name} cannot be split into layers: {reason}; give from_module batch=, an example of a batch, "
                "and such a module is trained whole"
            ) from None
        device = pytree.leaves(batch)[0].device
        buffers = self.buffers.to_device(device, ctx.dtype)
        stacked = {stack: constants.to_device(device, ctx.dtype) for stack, constants in self.stacked.items()}
        side_args = self.splits[number].side_program(inputs_of({}, buffers, batch, ctx._replace(key=())))
        return Prepared(number, rows, side_args, buffers, stacked)

    def embed(self, params: Tree, batch: Batch, ctx: Ctx) -> tuple[Tensor, ...]:
        """What the first layer is called with: x, and the other arguments that parameters went into."""
        first, *_ = self.splits[ctx.prepared.split].prologues.values()
        return first(self.inputs(params, batch, ctx))

    def join(self, stack: str, params: Tree, x: tuple[Tensor, ...], batch: Batch, ctx: Ctx) -> tuple[Tensor, ...]:
        """The same for the first layer of another stack, from what the one before left."""
        return self.splits[ctx.prepared.split].prologues[stack](self.inputs(params, batch, ctx), x)

    def head(self, params: Tree, x: tuple[Tensor, ...], batch: Batch, ctx: Ctx) -> Loss:
        """The loss after the last layer."""
        return loss_of(self.result(params, x, batch, ctx))

    def result(self, params: Tree, x: tuple[Tensor, ...], batch: Batch, ctx: Ctx) -> Any:
        """What the loss function returned after the last layer."""
        forward_split = self.splits[ctx.prepared.split]
        return forward_split.result_of(forward_split.epilogue(self.inputs(params, batch, ctx), x))

    def block(self, kind: StackKind, params: Tree, x: tuple[Tensor, ...], ctx: Ctx) -> tuple[Tensor, ...]:
        """x after a layer of a kind, and what it had beside."""
        prepared: Prepared | LayerCall = ctx.prepared
        if isinstance(prepared, LayerCall):
            inputs = prepared.inputs
        else:
            inputs = self.splits[prepared.split].arguments_of(kind, x, prepared.side_args)
        buffers, tp = self.layer_buffers(kind, prepared.stacked, ctx.layer), ctx.mesh.tp.size
        cuts = self.cuts(ctx.mesh)[kind.stack] if tp > 1 else Cuts()
        try:
            out = self.call_layer(kind, {**dotted(params, ctx.dtype), **buffers}, inputs, ctx, prepared.rows, cuts)
        except RuntimeError as error:
            if tp == 1:
                raise
            fix = "a layer that tp splits must not name the number of heads or units: write -1 for it"
            if self.inferred:  # in somebody else's code
                fix = "what is split does not go with this layer; use dp, pp or cp in place of tp"
            raise ValueError(f"tp={tp}: {graph_tracing.line(error)}: {str(error).splitlines()[0]}; {fix}") from error
        return (first_of(out), *x[1:])

    def cuts(self, mesh: Mesh) -> dict[str, Cuts]:
        """What tp splits of each stack: what the caller said or what is found ("auto"), with a line."""
        size = mesh.tp.size
        if size not in self.known_cuts:
            self.known_cuts[size], summary = find_cuts(self.ways, self.probes, size)
            if summary and mesh.rank == 0:
                warnings.warn(f"{self.name}: tp={size} {summary}", UserWarning, stacklevel=2)
        return self.known_cuts[size]

    def probes(self) -> dict[str, list[Probe]]:
        """The layers of each kind of each stack, with random numbers, as a batch calls them."""
        if self.example is None:
            return {}
        with torch.no_grad(), seeded(0):
            batch = pytree.map(lambda leaf: leaf.cpu(), self.example)
            ctx = Ctx(dtype=torch.float32)
            prepared = self.prepare(batch, ctx)
            forward_split = self.splits[prepared.split]
            outside = {name: any_numbers(leaf.shape, 1) for name, leaf in self.parameters.items()}
            tensors = inputs_of(outside, prepared.buffers, batch, ctx)
            probes, x = {}, ()
            for stack in self.stacks:
                x = forward_split.prologues[stack](tensors, x)
                x = (torch.randn(x[0].shape), *x[1:])
                probes[stack] = []
                for number, layer in enumerate(self.templates[stack]):
                    kind, first = StackKind(stack, number), torch.tensor(self.firsts[StackKind(stack, number)])
                    inputs = forward_split.arguments_of(kind, x, prepared.side_args)
                    buffers = self.layer_buffers(kind, prepared.stacked, first)
                    params = {name: any_numbers(leaf.shape) for name, leaf in layer.named_parameters()}
                    probes[stack].append(Probe(layer, self.linears[stack], params, buffers, *inputs, prepared.rows))
        return probes

    def rules(self, mesh: Mesh) -> Rules[str]:
        """The sharding rules: the layers' linears over tp, as the caller said, or as they are found."""
        size = mesh.tp.size
        cuts = self.cuts(mesh) if size > 1 else {}
        if size > 1 and not any(stack_cuts.ways for stack_cuts in cuts.values()):
            reason = (
                "give from_module batch=, an example, by which it finds this, or"
                if self.example is None
                else "nothing was found; give from_module"
            )
            raise ValueError(
                f"tp={size}: nothing says what of the module it splits; {reason} "
                'tp={"q|k|v|up": "columns", "o|down": "rows"}, by the names of the linear layers in a layer'
            )
        dim_counts = {self.places[name]: leaf.dim() for name, leaf in self.parameters.items()}
        for stack, leaves in self.within.items():
            dim_counts |= {f"{stack}/{slashed(name)}": leaf.dim() + 1 for name, leaf in leaves.items()}
        split = {
            f"{stack}/{slashed(name)}": text
            for stack, stack_cuts in cuts.items()
            for name, text in specs_of(self.templates[stack][0], stack_cuts).items()
        }
        return [(f"^{re.escape(n)}$", split.get(n, f"[{', '.join('·' * dims)}]")) for n, dims in dim_counts.items()]

    def inputs(self, params: Tree, batch: Batch, ctx: Ctx) -> Inputs:
        """The inputs of a Split's programs."""
        named = pytree.named_leaves(params)
        parameters = {name: named[leaf].to(ctx.dtype) for name, leaf in self.places.items() if leaf in named}
        return inputs_of(parameters, ctx.prepared.buffers, batch, ctx)

    def split_of(self, batch: Batch, ctx: Ctx) -> int:
        """The number of the Split for batches of these shapes, made if there is none."""
        named = pytree.named_leaves(batch)
        facts = tuple((name, tuple(leaf.shape), leaf.dtype, leaf.device) for name, leaf in named.items())
        signature = (pytree.flatten(batch)[1], facts, ctx.dtype, isinstance(ctx.key, tuple))
        readings = self.readings.get(signature)
        while signature in self.split_numbers and readings is not None and (name := readings.changed()):
            if signature in self.rehearsed:
                self.expect_same(batch, ctx, self.split_numbers[signature], name)
                readings.discard(name)
            else:  # what was traced for the example
                del self.split_numbers[signature]
        if signature in self.split_numbers and signature in self.rehearsed:
            self.calls[signature] += 1
            if self.calls[signature].bit_count() == 1:  # calls 1, 2, 4, 8, ... are traced again
                self.expect_same(batch, ctx, self.split_numbers[signature])
            return self.split_numbers[signature]
        values, rows = values_of(batch), expect_batch(batch)
        if signature in self.split_numbers and values is None:
            return self.split_numbers[signature]
        with graph_tracing.outside_transforms(), preserve_random_states():
            rehearsal = None if values is None else self.rehearse(values, ctx, rows)
            if signature not in self.split_numbers:
                self.strict = rehearsal is None
                run = self.trace(batch, ctx)
                self.expect_places(run)
                self.splits.append(run)
            number = self.split_numbers.get(signature, len(self.splits) - 1)
            if rehearsal is not None:
                rehearsal.expect_parts(rehearsal.expect_pure(), self.splits[number])
            self.rehearsed |= set() if values is None else {signature}
            self.readings[signature] = self.read()
        self.split_numbers[signature] = number
        return number

    def expect_same(self, batch: Batch, ctx: Ctx, number: int, name: str = "") -> None:
        """Raise Impure if another trace gives a Split that computes something else; name: what changed."""
        if (values := values_of(batch)) is None:
            return
        with graph_tracing.outside_transforms(), preserve_random_states():
            retraced = self.trace(batch, ctx)
            if retraced.equals(self.splits[number]):
                return
            rehearsal = Rehearsal(self, values, ctx, expect_batch(batch), 0)
            if not is_near(rehearsal.run_split(retraced), rehearsal.run_split(self.splits[number]), rounds=1e3):
                raise graph_tracing.Impure(
                    f"{name or 'a number that the loss function reads'} has another value than when the loss function "
                    "was traced, which has it as a constant; hand it in by the batch, a row for each sample"
                )

    def read(self) -> Readings:
        """What the loss function, and the module outside of its layers, read of variables."""
        within = {
            method
            for entries in self.templates.values()
            for layer in entries
            for child in layer.modules()
            for method in methods(child)
        }
        layers = {name for entries in self.stacks.values() for name in entries.names}
        outside = [
            child
            for name, child in self.skeleton.named_modules()
            if not (layer_of(self.stacks, name) or name in layers)
        ]
        return Readings([self.loss, *(MethodType(type(child).forward, child) for child in outside)], within)

    def rehearse(self, batch: Batch, ctx: Ctx, rows: int) -> Rehearsal | None:
        """Calls of the module after the first, or None where its code does not take made-up numbers."""
        rehearsal, second = (Rehearsal(self, batch, ctx, rows, seed) for seed in (0, 1))
        try:
            with self.preserve_variables():
                second.first()
                variables = self.snapshot().values()
            rehearsal.first(variables)
        except (graph_tracing.Impure, CannotSplit):
            raise
        except Exception:  # somebody's code, on what may be no more than an example of the shapes
            return None
        return rehearsal

    def trace(self, batch: Batch, ctx: Ctx) -> ForwardSplit:
        """The Split for batches of these shapes; what the trace leaves in variables is taken out of them."""
        named, device = pytree.named_leaves(batch), pytree.leaves(batch)[0].device
        parameters = blank(self.parameters, device, ctx.dtype)
        buffers = self.buffers.blank(device, ctx.dtype)
        key = () if isinstance(ctx.key, tuple) else torch.zeros(2, dtype=torch.int64, device=device)
        shapes = pytree.from_named(blank(named, device), batch)
        like = inputs_of(parameters, buffers, shapes, Ctx(key=key))
        inputs = self.skeleton, self.stacks, self.loss, self.check, batch, like, Ctx(dtype=ctx.dtype), self.originals()
        with self.preserve_variables():
            return self.run_unchanged("the module", self.skeleton, partial(split, *inputs))

    def run_unchanged(self, subject: str, module: nn.Module, run: Callable[[], Any]) -> Any:
        """What `run` returns; raises Changed if both a first and a second run change the module."""
        if self.strict:
            with contextlib.suppress(Changed), expect_unchanged(subject, module):
                return run()
        with expect_unchanged(subject, module) if self.strict else contextlib.nullcontext():
            return run()

    def check(self, kind: StackKind, watch: Watch, args: Any, kwargs: Any) -> Any:
        """What a layer returns, run on tensors without values; raises Impure for what a pure function may not do."""
        call, device = CALL.get(), pytree.leaves((args, kwargs))[0].device
        # Without the key, whose masks would be most of the program.
        ctx = call.ctx._replace(key=(), layer=torch.zeros((), dtype=torch.int64, device=device))
        params = blank(self.within[kind.stack], device, ctx.dtype)
        buffers = {n: stacked[0] for n, stacked in self.stacked[kind.stack].blank(device, ctx.dtype).items()}
        for label, leaves in (("buffer", buffers), ("parameter", params)):
            for name, leaf in leaves.items():
                watch.protect(f"the {label} {name} of a layer", leaf)
        watch.recorded = False  # a layer is not run as a graph
        template, leaves = self.templates[kind.stack][kind.number], {**params, **buffers}

        def run() -> Any:
            return self.call_layer(kind, leaves, (args, kwargs), ctx, call.rows, detect_draws=True)

        try:
            return self.run_unchanged("a layer", template, run)
        finally:
            watch.recorded = True

    def expect_places(self, forward_split: ForwardSplit) -> None:
        """Raise ValueError if a Split needs a parameter where the Model does not have it."""
        for segment, program in self.programs(forward_split).items():
            for name in program.uses("parameter"):
                leaf = self.places[name]
                if not leaf.startswith(f"{segment}/") and leaf not in self.shared:
                    raise ValueError(
                        f"for a batch of these shapes the {segment} uses {name}, and for the example that from_module "
                        "was given it does not; leave `batch` out"
                    )


def layered_model(
    module: nn.Module,
    loss: LossOf,
    weights: Weights,
    *,
    layers: str | Sequence[str] | None = None,
    batch: Batch | None = None,
    tp: Mapping[str, str],
    inferred: bool,
) -> tuple[Layered, Model, list[str]]:
    """(the functions of a module with layers, its Model, why no better choice could be split)."""
    reasons: list[str] = []
    for stacks in choices(module, layers):
        try:
            layered = Layered(module, loss, stacks, tp, inferred)
            return layered, layered.model(weights, batch), reasons
        except CannotSplit as reason:
            reasons.append(str(reason))
    raise CannotSplit(reasons[-1])


def expect_batch(batch: Any) -> int:
    """The samples in a batch; raises TypeError or ValueError for other trees."""
    expect_kind("the batch of a model made from a module", batch, Mapping, 'write {"x": x, "y": y}')
    for name, leaf in pytree.named_leaves(batch).items():
        expect_kind(f"the batch's {name}", leaf, Tensor, "a batch is a dict of tensors, a row for each sample")
    rows = {name: leaf.shape[0] if leaf.dim() else 0 for name, leaf in pytree.named_leaves(batch).items()}
    if len(set(rows.values())) != 1 or not all(rows.values()):
        raise ValueError(f"the first dim of each tensor of a batch counts the samples; they have {rows}")
    return next(iter(rows.values()))


def slashed(name: str) -> str:
    """The name of a leaf of a tree, from that of a parameter."""
    return name.replace(".", "/")


def dotted(params: Tree, dtype: torch.dtype) -> dict[str, Tensor]:
    """The leaves of a tree by the names of parameters, in this dtype."""
    named = pytree.named_leaves(params)
    for name, leaf in named.items():
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"{name} is a {type(leaf).__name__} and a module takes tensors; models.quantized is for fzero's own "
                "models"
            )
    return {name.replace("/", "."): leaf.to(dtype) for name, leaf in named.items()}


def init(shapes: Mapping[str, tuple[int, ...]], make: MakeLeaf) -> Tree:
    """The parameter tree: every leaf begins with what the model's `start` has of it."""
    leaves = {name: make(name, shape, 0.0) for name, shape in shapes.items()}
    parts = pytree.nest(leaves)
    return (
        {"embed": {}}
        | {name: subtree for name, subtree in parts.items() if name != "head"}
        | {"head": parts.get("head", {})}
    )


def no_logits(params: Tree, x: Any, ctx: Ctx) -> NoReturn:
    """Raise ValueError: a loss function alone knows what the module returns."""
    raise ValueError("a model made from a module has no logits; put the weights back (fzero.to_module) and call it")
