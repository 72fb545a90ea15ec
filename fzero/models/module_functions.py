"""The functions of the Model of an nn.Module: of one with layers, and of one that is trained whole."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fzero.core import graph_cut, pytree
from fzero.core.arguments import expect_kind
from fzero.core.belongings import Changed, expect_unchanged, methods
from fzero.core.draws import is_drawing, seeded
from fzero.core.graph_cut import Watch
from fzero.core.pure_calls import is_near
from fzero.core.pytree import Tree
from fzero.core.readings import Readings
from fzero.core.snapshot import Snapshot
from fzero.core.stack import Blocks
from fzero.core.surroundings import random_states_kept
from fzero.models.base import Ctx, Loss, MakeLeaf, Model, Start
from fzero.models.batch import Batch
from fzero.models.loss_of import loss_of
from fzero.models.module_buffers import Constants, any_numbers, blank, layer_buffer, stacked_buffers
from fzero.models.module_calls import (
    CALL,
    Cuts,
    Factors,
    Regions,
    calling,
    divided,
    draws_of,
    expect_called,
    key_linears,
    specs_of,
    split_factors,
    ways_of,
)
from fzero.models.module_cuts import Probe, find_cuts
from fzero.models.module_layers import CannotSplit, Stacks, layer_of, templates_of, without_memory
from fzero.models.module_rehearsal import Rehearsal, values_of
from fzero.models.module_split import Inputs, Kind, LossOf, Program, Split, call_pure, inputs_of, split
from fzero.models.module_sums import wide_sums
from fzero.sharding import Mesh, Rules

Weights = Callable[[str], Callable[[], Tensor]]  # the name of a parameter -> what reads the value that it begins with


@dataclass(frozen=True)
class ModuleConfig:
    """The config of a Model made from a module."""

    name: str  # of the module's class
    n_layers: int  # 0: the module is not split


class Prepared(NamedTuple):
    """What the functions of a Layered get by `ctx.prepared`."""

    split: int  # the number of the Split
    rows: int  # samples in the batch
    beside: tuple[Tensor, ...]  # the layers' arguments that no parameter went into
    buffers: dict[str, Tensor]  # outside of the layers
    stacked: dict[str, dict[str, Tensor]]  # of each stack's layers, [L, ...], or [1, ...] where all have the same


class LayerLeaves(NamedTuple):
    """What a layer is called with beside x."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    factors: dict[str, Factors]  # LoRA's, by the name of a linear layer


class Layered:
    """The functions of the Model of a module with layers.

    Its Splits are made when a batch of new shapes comes, and kept.
    """

    def __init__(self, module: nn.Module, loss: LossOf, stacks: Stacks, tp: Mapping[str, str], found: bool):
        self.stacks, self.loss, self.originals, self.found = stacks, loss, trained_of(module), found
        self.skeleton = without_memory(module)
        self.templates = {stack: templates_of(module, layers) for stack, layers in stacks.items()}
        self.draws = any(one.training for one in module.modules())  # unless an example says that nothing does
        self.drawing: set[Kind] = set()  # the layers that may draw random numbers
        self.linears = {stack: key_linears(layer) for stack, some in self.templates.items() for layer in some}
        self.ways = ways_of(self.linears, tp, found)
        self.known_cuts: dict[int, dict[str, Cuts]] = {}  # by the size of tp
        self.example: Batch | None = None
        # Shapes alone: the Model's `start` has the values, and nothing else holds them.
        self.parameters = {n: p for n, p in self.skeleton.named_parameters() if not layer_of(stacks, n)}
        self.within = {stack: dict(some[0].named_parameters()) for stack, some in self.templates.items()}
        saved = set(module.state_dict(keep_vars=True))
        outside = {n: b.detach().clone() for n, b in module.named_buffers() if not layer_of(stacks, n)}
        self.buffers = Constants(outside, saved)
        self.stacked = {stack: stacked_buffers(module, layers.names, saved) for stack, layers in stacks.items()}
        self.name = type(module).__name__
        self.splits: list[Split] = []
        self.known: dict[Any, int] = {}  # signature of a batch -> number of its Split
        self.calls: Counter[Any] = Counter()  # by the signature of a batch
        self.readings: dict[Any, Readings] = {}  # what a Split has as constants, by the same
        self.rehearsed: set[Any] = set()  # the signatures for which the module was called with real tensors
        self.strict = False  # whether a trace is of a module that was not
        self.places = {name: f"embed/{slashed(name)}" for name in self.parameters}
        self.shared: tuple[str, ...] = tuple(self.places.values())

    def model(self, weights: Weights, batch: Batch | None) -> Model:
        """The Model, which begins with these weights; with an example of a batch the parameters outside of the layers
        are those of the part that uses them.
        """
        self.example = batch
        if batch is not None:
            expect_batch(batch)
            with self.kept():
                one = self.splits[self.split_of(batch, Ctx(dtype=self.widest()))]
            self.rehearsed.clear()  # what was made for the example is not there any more
            self.readings = dict.fromkeys(self.readings, self.read())
            used = {part: program.uses("parameter") for part, program in self.programs(one).items()}
            parts = {name: [part for part in used if name in used[part]] for name in self.parameters}
            self.draws = one.draws or bool(self.drawing)
            own = {name: some[0] if len(some) == 1 else "embed" for name, some in parts.items()}
            self.places = {name: f"{part}/{slashed(name)}" for name, part in own.items()}
            self.shared = tuple(self.places[name] for name, some in parts.items() if len(some) > 1)
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
            init=partial(init, {name: one.shape for name, one in start.items()}),
            embed=self.embed,
            block=one_stack or {stack: self.functions(stack) for stack in self.stacks},
            join={stack: partial(self.join, stack) for stack in list(self.stacks)[1:]},
            head=self.head,
            logits=no_logits,
            rules=self.rules,
            shared=self.shared,
            prepare=self.prepare,
            start=start,
            frozen=frozenset(name for name, leaf in leaves.items() if not leaf.requires_grad),
            foreign=True,
            draws=self.draws,
        )

    def widest(self) -> torch.dtype:
        """The dtype of the module's parameters, at least float32."""
        leaves = [*self.parameters.values(), *(leaf for some in self.within.values() for leaf in some.values())]
        return functools.reduce(torch.promote_types, (leaf.dtype for leaf in leaves), torch.float32)

    def functions(self, stack: str) -> Blocks:
        """The functions that the layers of a stack take in turn."""
        first = sum(len(self.stacks[name].names) for name in list(self.stacks)[: list(self.stacks).index(stack)])
        made = [partial(self.block, Kind(stack, kind), first) for kind in range(len(self.templates[stack]))]
        turns = self.stacks[stack].turns
        return tuple(made[kind] for kind in turns) if len(turns) > 1 else made[0]

    def programs(self, one: Split) -> dict[str, Program]:
        """The programs of a Split by the part of the Model that runs them: embed, a join, or the head."""
        parts = ["embed", *(f"join{stack.removeprefix('blocks')}" for stack in list(self.stacks)[1:]), "head"]
        return dict(zip(parts, [*one.before.values(), one.after]))

    def prepare(self, batch: Batch, ctx: Ctx) -> Prepared:
        """What the layers need of a batch."""
        if ctx.sequence:
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
        buffers = self.buffers.on(device, ctx.dtype)
        stacked = {stack: some.on(device, ctx.dtype) for stack, some in self.stacked.items()}
        beside = self.splits[number].beside(inputs_of({}, buffers, batch, ctx._replace(key=())))
        return Prepared(number, rows, beside, buffers, stacked)

    def embed(self, params: Tree, batch: Batch, ctx: Ctx) -> tuple[Tensor, ...]:
        """What the first layer is called with: x, and the other arguments that parameters went into."""
        first, *_ = self.splits[ctx.prepared.split].before.values()
        return first(self.inputs(params, batch, ctx))

    def join(self, stack: str, params: Tree, x: tuple[Tensor, ...], batch: Batch, ctx: Ctx) -> tuple[Tensor, ...]:
        """The same for the first layer of another stack, from what the one before left."""
        return self.splits[ctx.prepared.split].before[stack](self.inputs(params, batch, ctx), x)

    def head(self, params: Tree, x: tuple[Tensor, ...], batch: Batch, ctx: Ctx) -> Loss:
        """The loss after the last layer."""
        return loss_of(self.result(params, x, batch, ctx))

    def result(self, params: Tree, x: tuple[Tensor, ...], batch: Batch, ctx: Ctx) -> Any:
        """What the loss function returned after the last layer."""
        one = self.splits[ctx.prepared.split]
        return one.result_of(one.after(self.inputs(params, batch, ctx), x))

    def block(self, kind: Kind, first: int, params: Tree, x: tuple[Tensor, ...], ctx: Ctx) -> tuple[Tensor, ...]:
        """x after a layer of a kind, and what it had beside. first: the number of its stack's first layer."""
        prepared: Prepared = ctx.prepared
        args, kwargs = self.splits[prepared.split].arguments_of(kind, x, prepared.beside)
        stacked = prepared.stacked[kind.stack]
        buffers = {name: layer_buffer(leaf, ctx.layer, first) for name, leaf in stacked.items()}
        leaves = self.leaves_of(kind, dotted(params, ctx.dtype), buffers)
        try:
            out = self.call_layer(kind, leaves, args, kwargs, ctx, prepared.rows)
        except RuntimeError as error:
            tp = ctx.mesh["tp"].size
            if tp == 1:
                raise
            fix = "a layer that tp splits must not name the number of heads or units: write -1 for it"
            if self.found:  # in somebody else's code
                fix = "what is split does not go with this layer; use dp, pp or cp in place of tp"
            raise ValueError(f"tp={tp}: {graph_cut.line(error)}: {str(error).splitlines()[0]}; {fix}") from error
        return (out[0] if isinstance(out, (tuple, list)) else out, *x[1:])

    def leaves_of(self, kind: Kind, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> LayerLeaves:
        """A layer's parameters and buffers, with LoRA's factors apart; those of other weights than its linear layers'
        are added here.
        """
        factors = {}
        for name in [name.removesuffix("_lora_a") for name in params if name.endswith("_lora_a")]:
            pair = Factors(params.pop(f"{name}_lora_a"), params.pop(f"{name}_lora_b"))
            owner, _, leaf = name.rpartition(".")
            if leaf == "weight" and type(self.linears[kind.stack].get(owner)) is nn.Linear:
                factors[owner] = pair
            else:
                params[name] = params[name] + pair.b @ pair.a
        return LayerLeaves(params, buffers, factors)

    def call_layer(
        self, kind: Kind, leaves: LayerLeaves, args: Any, kwargs: Any, ctx: Ctx, rows: int, ask: bool = False
    ) -> Any:
        """What the layer of a kind with these leaves returns. ask: find out whether it may draw random numbers."""
        template, given = self.templates[kind.stack][kind.number], {**leaves.params, **leaves.buffers}
        size = ctx.mesh["tp"].size
        cuts = self.cuts(ctx.mesh)[kind.stack] if size > 1 else Cuts()
        draws = {"draws": draws_of} if ask or kind in self.drawing else {}
        graph_cut.allow_constants(given.values())  # the tables that it has made
        with calling(ctx, rows, leaves.factors, cuts, **draws) as call:
            if size == 1:
                with wide_sums(given.values()):
                    out = call_pure(template, given, args, kwargs)
                self.drawing |= {kind} if is_drawing() else set()
                expect_called(call)
                return out
            specs = specs_of(template, cuts)
            call.parts.add([leaves.params[name] for name, text in specs.items() if "/tp" in text])
            call.parts.add([part for n, pair in leaves.factors.items() for part in split_factors(cuts, n, pair)])
            with divided(template, cuts, size), Regions(call):
                out = call_pure(template, given, args, kwargs)
            expect_called(call)
            if any(leaf in call.parts for leaf in pytree.leaves(out)):
                raise ValueError(
                    "tp: what a layer returns is a rank's part; after linear layers of kind 'columns' one of kind "
                    "'rows' must follow"
                )
            return out

    def cuts(self, mesh: Mesh) -> dict[str, Cuts]:
        """What tp splits of each stack: what the caller said, and what is found ("auto"), with a line of the first rank
        that says so.
        """
        size = mesh["tp"].size
        if size not in self.known_cuts:
            self.known_cuts[size], said = find_cuts(self.ways, self.probes, size)
            if said and mesh.rank == 0:
                warnings.warn(f"{self.name}: tp={size} {said}", UserWarning, stacklevel=2)
        return self.known_cuts[size]

    def probes(self) -> dict[str, list[Probe]]:
        """The layers of each kind of each stack, with random numbers in them, as the example of a batch calls them."""
        if self.example is None:
            return {}
        with torch.no_grad(), seeded(0):
            batch = pytree.map(lambda leaf: leaf.cpu(), self.example)
            ctx = Ctx(dtype=torch.float32)
            prepared = self.prepare(batch, ctx)
            one = self.splits[prepared.split]
            outside = {name: any_numbers(leaf.shape, 1) for name, leaf in self.parameters.items()}
            inputs = inputs_of(outside, prepared.buffers, batch, ctx)
            found, x = {}, ()
            for stack, layers in self.stacks.items():
                x = one.before[stack](inputs, x)
                x = (torch.randn(x[0].shape), *x[1:])
                found[stack] = []
                for number, layer in enumerate(self.templates[stack]):
                    args, kwargs = one.arguments_of(Kind(stack, number), x, prepared.beside)
                    at = torch.tensor(layers.kinds.index(number))
                    buffers = {name: layer_buffer(leaf, at, 0) for name, leaf in prepared.stacked[stack].items()}
                    params = {name: any_numbers(leaf.shape) for name, leaf in layer.named_parameters()}
                    found[stack].append(Probe(layer, self.linears[stack], params, buffers, args, kwargs, prepared.rows))
        return found

    def rules(self, mesh: Mesh) -> Rules[str]:
        """The sharding rules: the layers' linears over tp, as the caller said, or as they are found."""
        size = mesh["tp"].size
        cuts = self.cuts(mesh) if size > 1 else {}
        if size > 1 and not any(one.ways for one in cuts.values()):
            why = (
                "give from_module batch=, an example, by which it finds this, or"
                if self.example is None
                else "nothing was found; give from_module"
            )
            raise ValueError(
                f"tp={size}: nothing says what of the module it splits; {why} "
                'tp={"q|k|v|up": "columns", "o|down": "rows"}, by the names of the linear layers in a layer'
            )
        whole = {self.places[name]: leaf.dim() for name, leaf in self.parameters.items()}
        for stack, leaves in self.within.items():
            whole |= {f"{stack}/{slashed(name)}": leaf.dim() + 1 for name, leaf in leaves.items()}
        split = {
            f"{stack}/{slashed(name)}": text
            for stack, one in cuts.items()
            for name, text in specs_of(self.templates[stack][0], one).items()
        }
        return [(f"^{re.escape(n)}$", split.get(n, f"[{', '.join('·' * dims)}]")) for n, dims in whole.items()]

    def inputs(self, params: Tree, batch: Batch, ctx: Ctx) -> Inputs:
        """The inputs of a Split's programs."""
        named = pytree.named_leaves(params)
        held = {name: named[leaf].to(ctx.dtype) for name, leaf in self.places.items() if leaf in named}
        return inputs_of(held, ctx.prepared.buffers, batch, ctx)

    def split_of(self, batch: Batch, ctx: Ctx) -> int:
        """The number of the Split for batches of these shapes, made if there is none."""
        named = pytree.named_leaves(batch)
        facts = tuple((name, tuple(leaf.shape), leaf.dtype, leaf.device) for name, leaf in named.items())
        signature = (pytree.flatten(batch)[1], facts, ctx.dtype, isinstance(ctx.key, tuple))
        readings = self.readings.get(signature)
        while signature in self.known and readings is not None and (name := readings.changed()):
            if signature in self.rehearsed:
                self.expect_same(batch, ctx, self.known[signature], name)
                readings.forget(name)
            else:  # what was traced for the example
                del self.known[signature]
        if signature in self.known and signature in self.rehearsed:
            self.calls[signature] += 1
            if self.calls[signature].bit_count() == 1:  # calls 1, 2, 4, 8, ... are traced again
                self.expect_same(batch, ctx, self.known[signature])
            return self.known[signature]
        values, rows = values_of(batch), expect_batch(batch)
        if signature in self.known and values is None:
            return self.known[signature]
        with graph_cut.apart(), random_states_kept():
            rehearsal = None if values is None else self.rehearse(values, ctx, rows)
            if signature not in self.known:
                self.strict = rehearsal is None
                run = self.trace(batch, ctx)
                self.expect_places(run)
                self.splits.append(run)
            number = self.known.get(signature, len(self.splits) - 1)
            if rehearsal is not None:
                rehearsal.expect_parts(rehearsal.expect_pure(), self.splits[number])
            self.rehearsed |= set() if values is None else {signature}
            self.readings[signature] = self.read()
        self.known[signature] = number
        return number

    def expect_same(self, batch: Batch, ctx: Ctx, number: int, name: str = "") -> None:
        """Raise Impure if another trace gives a Split that computes something else. name: a variable that the program
        reads and that has changed; "" for one that is read in a way which `Readings` does not see."""
        if (values := values_of(batch)) is None:
            return
        with graph_cut.apart(), random_states_kept():
            again = self.trace(batch, ctx)
            if again.equals(self.splits[number]):
                return
            rehearsal = Rehearsal(self, values, ctx, expect_batch(batch), 0)
            if not is_near(rehearsal.parts(again), rehearsal.parts(self.splits[number]), rounds=1e3):
                raise graph_cut.Impure(
                    f"{name or 'a number that the loss function reads'} has another value than when the loss function "
                    "was traced, which has it as a constant; hand it in by the batch, a row for each sample"
                )

    def read(self) -> Readings:
        """What the loss function, and the module outside of its layers, read of variables."""
        within = {
            method
            for some in self.templates.values()
            for layer in some
            for one in layer.modules()
            for method in methods(one)
        }
        layers = {name for some in self.stacks.values() for name in some.names}
        outside = [
            one for name, one in self.skeleton.named_modules() if not (layer_of(self.stacks, name) or name in layers)
        ]
        return Readings([self.loss, *(MethodType(type(one).forward, one) for one in outside)], within)

    def rehearse(self, batch: Batch, ctx: Ctx, rows: int) -> Rehearsal | None:
        """Calls of the module, after the first one, in which it makes what it makes once; None where its code does not
        go with such numbers as they are made up of."""
        rehearsal, other = (Rehearsal(self, batch, ctx, rows, seed) for seed in (0, 1))
        try:
            with self.kept():
                other.first()
                made = self.snapshot().values()
            rehearsal.first(made)
        except (graph_cut.Impure, CannotSplit):
            raise
        except Exception:  # somebody's code, on what may be no more than an example of the shapes
            return None
        return rehearsal

    def trace(self, batch: Batch, ctx: Ctx) -> Split:
        """The Split for batches of these shapes; what the trace leaves in variables is taken out of them."""
        named, device = pytree.named_leaves(batch), pytree.leaves(batch)[0].device
        parameters = blank(self.parameters, device, ctx.dtype)
        buffers = self.buffers.blank(device, ctx.dtype)
        key = () if isinstance(ctx.key, tuple) else torch.zeros(2, dtype=torch.int64, device=device)
        shapes = pytree.from_named(blank(named, device), batch)
        like = inputs_of(parameters, buffers, shapes, Ctx(key=key))
        inputs = self.skeleton, self.stacks, self.loss, self.check, batch, like, Ctx(dtype=ctx.dtype), self.originals()
        with self.kept():
            if not self.strict:
                return split(*inputs)
            try:
                with expect_unchanged("the module", self.skeleton):
                    return split(*inputs)
            except Changed:  # by what a module makes once, in its first call, if not by the second one too
                with expect_unchanged("the module", self.skeleton):
                    return split(*inputs)

    def snapshot(self) -> Snapshot:
        """What variables have that the module and the loss function reach."""
        return Snapshot(self.skeleton, *(layer for some in self.templates.values() for layer in some), self.loss)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What variables have that the module and the loss function reach, they have again after what runs within."""
        snapshot = self.snapshot()
        try:
            yield
        finally:
            snapshot.restore()

    def check(self, kind: Kind, watch: Watch, args: Any, kwargs: Any) -> Any:
        """What a layer returns, run on tensors without values; raises Impure for what a pure function may not do."""
        call, device = CALL.get(), pytree.leaves((args, kwargs))[0].device
        # Without the key, whose masks would be most of the program.
        ctx = call.ctx._replace(key=(), layer=torch.zeros((), dtype=torch.int64, device=device))
        params = blank(self.within[kind.stack], device, ctx.dtype)
        buffers = {n: some[0] for n, some in self.stacked[kind.stack].blank(device, ctx.dtype).items()}
        for what, leaves in (("buffer", buffers), ("parameter", params)):
            for name, leaf in leaves.items():
                watch.keep(f"the {what} {name} of a layer", leaf)
        watch.recorded = False  # a layer is not run as a graph
        own = LayerLeaves(params, buffers, {})
        template = self.templates[kind.stack][kind.number]

        def run() -> Any:
            with expect_unchanged("a layer", template) if self.strict else contextlib.nullcontext():
                return self.call_layer(kind, own, args, kwargs, ctx, call.rows, ask=True)

        try:
            return run()
        except Changed:  # by what a module makes once
            return run()
        finally:
            watch.recorded = True

    def expect_places(self, one: Split) -> None:
        """Raise ValueError if a Split needs a parameter where the Model does not have it."""
        for part, program in self.programs(one).items():
            for name in program.uses("parameter"):
                leaf = self.places[name]
                if not leaf.startswith(f"{part}/") and leaf not in self.shared:
                    raise ValueError(
                        f"for a batch of these shapes the {part} uses {name}, and for the example that from_module was "
                        "given it does not; leave `batch` out"
                    )


def trained_of(module: nn.Module) -> Callable[[], dict[str, Tensor]]:
    """What finds the trained parameters of a module by name, as long as it lives."""
    found = {name: weakref.ref(leaf) for name, leaf in module.named_parameters() if leaf.requires_grad}
    return lambda: {name: leaf for name, one in found.items() if (leaf := one()) is not None}


def expect_batch(batch: Any) -> int:
    """The samples in a batch; raises TypeError or ValueError for what is no dict of tensors with as many rows."""
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
    made = {name: make(name, shape, 0.0) for name, shape in shapes.items()}
    parts = pytree.nest(made)
    return (
        {"embed": {}} | {name: part for name, part in parts.items() if name != "head"} | {"head": parts.get("head", {})}
    )


def no_logits(params: Tree, x: Any, ctx: Ctx) -> NoReturn:
    """Raise ValueError: a loss function alone knows what the module returns."""
    raise ValueError("a model made from a module has no logits; put the weights back (fzero.to_module) and call it")
