"""The functions of the Model of an nn.Module: of one with layers, and of one that is trained whole."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fzero.core import graph_cut, pytree
from fzero.core.arguments import expect_kind
from fzero.core.graph_cut import Watch
from fzero.core.pytree import Tree
from fzero.models.base import Batch, Ctx, Loss, MakeLeaf, Model, Start
from fzero.models.loss_of import loss_of
from fzero.models.module_calls import CALL, Regions, calling, key_dropouts, split_linears
from fzero.models.module_layers import CannotSplit, Layers, layer_of, template_of, without_memory
from fzero.models.module_split import Inputs, LossOf, Split, function_of, split
from fzero.sharding import Mesh, Rules


@dataclass(frozen=True)
class ModuleConfig:
    """The config of a Model made from a module."""

    name: str  # of the module's class
    n_layers: int  # 0: the module is not split
    dropout: float  # the largest rate; 0.0: no key is made


class Prepared(NamedTuple):
    """What the functions of a Layered get by `ctx.prepared`."""

    split: int  # the number of the Split
    rows: int  # samples in the batch
    beside: tuple[Tensor, ...]  # the layers' arguments that no parameter went into
    buffers: dict[str, Tensor]  # outside of the layers
    stacked: dict[str, Tensor]  # buffers of the layers, [L, ...], or [1, ...] where all layers have the same


class Layered:
    """The functions of the Model of a module with layers.

    Its Splits are made when a batch of new shapes comes, and kept.
    """

    def __init__(self, module: nn.Module, loss: LossOf, layers: Layers, tp: Mapping[str, str]):
        self.layers, self.loss = layers, loss
        self.skeleton, self.template = without_memory(module), template_of(module, layers)
        self.dropout = max(key_dropouts(self.skeleton), key_dropouts(self.template))
        self.specs = split_linears(self.template, tp)
        # Shapes alone: the Model's `start` has the values, and nothing else holds them.
        self.parameters = {n: p for n, p in self.skeleton.named_parameters() if not layer_of(layers, n)}
        self.within = dict(self.template.named_parameters())
        outside = {n: b.detach().clone() for n, b in module.named_buffers() if not layer_of(layers, n)}
        self.buffers = Constants(outside)
        stacked = {
            name: torch.stack([module.get_buffer(f"{layer}.{name}").detach() for layer in layers.names])
            for name, _ in self.template.named_buffers()
        }
        self.stacked = Constants({name: x[:1] if (x == x[:1]).all() else x for name, x in stacked.items()})
        self.one_layer = self.within, {name: some[0] for name, some in self.stacked.leaves.items()}
        self.name = type(module).__name__
        self.splits: list[Split] = []
        self.known: dict[Any, int] = {}  # signature of a batch -> number of its Split
        self.places = {name: f"embed/{slashed(name)}" for name in self.parameters}
        self.shared: tuple[str, ...] = tuple(self.places.values())

    def model(self, module: nn.Module, batch: Batch | None) -> Model:
        """The Model, which begins with the weights of `module`; with an example of a batch the parameters outside of
        the layers are embed's or the head's.
        """
        if batch is not None:
            expect_batch(batch)
            one = self.splits[self.split_of(batch, Ctx())]
            early, late = one.before.uses("parameter"), one.after.uses("parameter")
            head = {name for name in late if name not in early}
            self.places = {n: f"{'head' if n in head else 'embed'}/{slashed(n)}" for n in self.parameters}
            self.shared = tuple(self.places[name] for name in self.parameters if name in early and name in late)
        start = {place: Start((module.get_parameter(name),), stacked=False) for name, place in self.places.items()}
        for name in self.within:
            leaves = tuple(module.get_parameter(f"{layer}.{name}") for layer in self.layers.names)
            start[f"blocks/{slashed(name)}"] = Start(leaves, stacked=True)
        return Model(
            config=ModuleConfig(self.name, len(self.layers.names), self.dropout),
            init=lambda make: init(start, make),
            embed=self.embed,
            block=self.block,
            head=self.head,
            logits=no_logits,
            rules=self.rules,
            shared=self.shared,
            prepare=self.prepare,
            start=start,
            frozen=frozenset(name for name, one in start.items() if not one.layers[0].requires_grad),
        )

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
        buffers, stacked = (some.on(device, ctx.dtype) for some in (self.buffers, self.stacked))
        beside = self.splits[number].beside(inputs_of({}, buffers, batch, ctx._replace(key=())))
        return Prepared(number, rows, beside, buffers, stacked)

    def embed(self, params: Tree, batch: Batch, ctx: Ctx) -> tuple[Tensor, ...]:
        """What the first layer is called with: x, and the other arguments that parameters went into."""
        return self.splits[ctx.prepared.split].before(self.inputs(params, batch, ctx))

    def head(self, params: Tree, x: tuple[Tensor, ...], batch: Batch, ctx: Ctx) -> Loss:
        """The loss after the last layer."""
        one = self.splits[ctx.prepared.split]
        return loss_of(one.result_of(one.after(self.inputs(params, batch, ctx), x)))

    def block(self, params: Tree, x: tuple[Tensor, ...], ctx: Ctx) -> tuple[Tensor, ...]:
        """x after a layer, and what it had beside."""
        prepared: Prepared = ctx.prepared
        args, kwargs = self.splits[prepared.split].arguments_of(x, prepared.beside)
        buffers = {name: layer_buffer(leaf, ctx.layer) for name, leaf in prepared.stacked.items()}
        try:
            out = self.call_layer(dotted(params, ctx.dtype), buffers, args, kwargs, ctx, prepared.rows)
        except RuntimeError as error:
            tp = ctx.mesh["tp"].size
            if tp == 1:
                raise
            raise ValueError(
                f"tp={tp}: {graph_cut.line(error)}: {str(error).splitlines()[0]}; a layer that tp splits must not "
                "name the number of heads or units: write -1 for it"
            ) from error
        return (out[0] if isinstance(out, (tuple, list)) else out, *x[1:])

    def call_layer(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], args: Any, kwargs: Any, ctx: Ctx, rows: int
    ) -> Any:
        """What the layer with these parameters and buffers returns."""
        with calling(ctx, rows) as call:
            if ctx.mesh["tp"].size == 1:
                return torch.func.functional_call(self.template, {**params, **buffers}, args, kwargs)
            call.parts.add([params[name] for name, text in self.specs.items() if "/tp" in text])
            with Regions(call):
                out = torch.func.functional_call(self.template, {**params, **buffers}, args, kwargs)
            if any(leaf in call.parts for leaf in pytree.leaves(out)):
                raise ValueError(
                    "tp: what a layer returns is a rank's part; after linear layers of kind 'columns' one of kind "
                    "'rows' must follow"
                )
            return out

    def rules(self, mesh: Mesh) -> Rules[str]:
        """The sharding rules: the layers' linears over tp, as the caller said."""
        if mesh["tp"].size > 1 and not self.specs:
            raise ValueError(
                f"tp={mesh['tp'].size}: nothing says what of the module it splits; give from_module "
                'tp={"q|k|v|up": "columns", "o|down": "rows"}, by the names of the linear layers in a layer'
            )
        whole = {self.places[name]: leaf.dim() for name, leaf in self.parameters.items()}
        whole |= {f"blocks/{slashed(name)}": leaf.dim() + 1 for name, leaf in self.within.items()}
        split = {f"blocks/{slashed(name)}": text for name, text in self.specs.items()}
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
        if signature not in self.known:
            rows, device = expect_batch(batch), pytree.leaves(batch)[0].device
            with graph_cut.apart():
                parameters = blank(self.parameters, device, ctx.dtype)
                buffers = blank(self.buffers.leaves, device, ctx.dtype)
                key = () if isinstance(ctx.key, tuple) else torch.zeros(2, dtype=torch.int64, device=device)
                shapes = pytree.from_named(blank(named, device), batch)
                like = inputs_of(parameters, buffers, shapes, Ctx(key=key))
            run = split(self.skeleton, self.layers, self.loss, self.check, batch, like, Ctx(dtype=ctx.dtype), rows)
            self.expect_places(run)
            self.splits.append(run)
            self.known[signature] = len(self.splits) - 1
        return self.known[signature]

    def check(self, watch: Watch, args: Any, kwargs: Any) -> Any:
        """What a layer returns, run on tensors without values; raises Impure for what a pure function may not do."""
        call, device = CALL.get(), pytree.leaves((args, kwargs))[0].device
        # Without the key, whose masks would be most of the program.
        ctx = call.ctx._replace(key=(), layer=torch.zeros((), dtype=torch.int64, device=device))
        params, buffers = (blank(some, device, ctx.dtype) for some in self.one_layer)
        for name, leaf in buffers.items():
            watch.keep(f"the buffer {name} of a layer", leaf)
        watch.recorded = False  # a layer is not run as a graph
        try:
            return self.call_layer(params, buffers, args, kwargs, ctx, call.rows)
        finally:
            watch.recorded = True

    def expect_places(self, one: Split) -> None:
        """Raise ValueError if a Split needs a parameter where the Model does not have it."""
        for program, part in ((one.before, "embed"), (one.after, "head")):
            for name in program.uses("parameter"):
                leaf = self.places[name]
                if not leaf.startswith(f"{part}/") and leaf not in self.shared:
                    where = "before" if part == "embed" else "after"
                    raise ValueError(
                        f"for a batch of these shapes {name} is used {where} the layers, and for the example that "
                        "from_module was given it is not; leave `batch` out"
                    )


class Constants:
    """Tensors that no training changes, kept on the devices where they are used."""

    def __init__(self, leaves: dict[str, Tensor]):
        self.leaves = leaves
        self.there: dict[Any, dict[str, Tensor]] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors on a device, floating ones in this dtype."""
        if (device, dtype) not in self.there:
            with graph_cut.apart(), torch.no_grad():
                self.there[device, dtype] = {
                    name: leaf.to(device, dtype if leaf.is_floating_point() else leaf.dtype)
                    for name, leaf in self.leaves.items()
                }
        return self.there[device, dtype]


def blank(some: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Tensors of these shapes without memory, floating ones in `dtype`."""

    def one(x: Tensor) -> Tensor:
        kind = dtype if dtype is not None and x.is_floating_point() else x.dtype
        return torch.zeros((), dtype=kind, device=device).expand(x.shape)

    return {name: one(x) for name, x in some.items()}


def expect_batch(batch: Any) -> int:
    """The samples in a batch; raises TypeError or ValueError for what is no dict of tensors with as many rows."""
    expect_kind("the batch of a model made from a module", batch, Mapping, 'write {"x": x, "y": y}')
    rows = {name: leaf.shape[0] if leaf.dim() else 0 for name, leaf in pytree.named_leaves(batch).items()}
    if len(set(rows.values())) != 1 or not all(rows.values()):
        raise ValueError(f"the first dim of each tensor of a batch counts the samples; they have {rows}")
    return next(iter(rows.values()))


def inputs_of(parameters: Inputs, buffers: Inputs, batch: Any, ctx: Ctx) -> Inputs:
    """The inputs of a Split's programs, by name."""
    out = {f"parameter {name}": leaf for name, leaf in parameters.items()}
    out |= {f"buffer {name}": leaf for name, leaf in buffers.items()}
    out |= {f"batch {name}": leaf for name, leaf in pytree.named_leaves(batch).items()}
    if isinstance(ctx.key, Tensor):
        out |= {"key": ctx.key, "first": torch.as_tensor(ctx.first, device=ctx.key.device)}
    return out


def slashed(name: str) -> str:
    """The name of a leaf of a tree, from that of a parameter."""
    return name.replace(".", "/")


def dotted(params: Tree, dtype: torch.dtype) -> dict[str, Tensor]:
    """The leaves of a tree by the names of parameters, in this dtype."""
    named = pytree.named_leaves(params)
    for name, leaf in named.items():
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"{name} is a {type(leaf).__name__} and a module takes tensors; models.lora is for fzero's own models"
            )
    return {name.replace("/", "."): leaf.to(dtype) for name, leaf in named.items()}


def layer_buffer(stacked: Tensor, layer: Any) -> Tensor:
    """The buffer of a layer, by its number, from those of all layers or the one that they share."""
    return stacked[0] if stacked.shape[0] == 1 else stacked.index_select(0, layer.reshape(1))[0]


def init(start: Mapping[str, Start], make: MakeLeaf) -> Tree:
    """The parameter tree: every leaf begins with what is given."""
    shapes = {n: (*((len(x.layers),) if x.stacked else ()), *x.layers[0].shape) for n, x in start.items()}
    made = {name: make(name, shape, 0.0) for name, shape in shapes.items()}
    tree = {"embed": {}, **({"blocks": {}} if any(x.stacked for x in start.values()) else {}), "head": {}}
    return tree | pytree.nest(made)


def no_logits(params: Tree, x: Any, ctx: Ctx) -> NoReturn:
    """Raise ValueError: a loss function alone knows what the module returns."""
    raise ValueError("a model made from a module has no logits; put the weights back (fzero.to_module) and call it")


def whole_model(module: nn.Module, loss: LossOf) -> Model:
    """The Model of a module that is not split: all of it is the head."""
    body = without_memory(module)
    dropout = key_dropouts(body)
    buffers = Constants({name: leaf.detach().clone() for name, leaf in module.named_buffers()})
    start = {f"head/{slashed(name)}": Start((leaf,), stacked=False) for name, leaf in module.named_parameters()}
    seen: set[Any] = set()  # shapes of batches whose program was watched

    def prepare(batch: Batch, ctx: Ctx) -> int:
        return expect_batch(batch)

    def head(params: Tree, x: Any, batch: Batch, ctx: Ctx) -> Loss:
        now = buffers.on(pytree.leaves(batch)[0].device, ctx.dtype)
        shapes = tuple(leaf.shape for leaf in pytree.leaves(batch)), isinstance(ctx.key, tuple)
        watch = contextlib.nullcontext() if shapes in seen else Watch(now)
        with watch, calling(ctx, ctx.prepared):
            out = loss_of(loss(function_of(body, {**dotted(params["head"], ctx.dtype), **now}, ctx.dtype), batch))
        seen.add(shapes)
        return out

    return Model(
        config=ModuleConfig(type(module).__name__, 0, dropout),
        init=lambda make: init(start, make),
        embed=lambda params, batch, ctx: (),
        block={},
        head=head,
        logits=no_logits,
        rules=lambda mesh: whole_rules(start, mesh),
        prepare=prepare,
        start=start,
        frozen=frozenset(name for name, one in start.items() if not one.layers[0].requires_grad),
    )


def whole_rules(start: Mapping[str, Start], mesh: Mesh) -> Rules[str]:
    """The sharding rules of a module that is not split: nothing is over tp."""
    if mesh["tp"].size > 1:
        raise ValueError(f"tp={mesh['tp'].size}: this module is trained whole, and tp splits layers; use dp")
    return [(f"^{re.escape(n)}$", f"[{', '.join('·' * one.layers[0].dim())}]") for n, one in start.items()]
