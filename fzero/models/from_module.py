"""An nn.Module as a Model: its repeated layers become a stack, the rest embed and head; or it is one part."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.closure_state import ClosureState
from fzero.core.purity_checks import PureCalls
from fzero.core.pytree import Tree
from fzero.models.base import Ctx, Loss, Model, ModelTraits, Start
from fzero.models.batch import Batch
from fzero.models.causal_module import CausalModule
from fzero.models.module_functions import (
    Weights,
    dotted,
    expect_batch,
    init,
    layered_model,
    no_logits,
    slashed,
)
from fzero.models.module_layers import CannotSplit
from fzero.models.module_rehearsal import CopiedModule
from fzero.models.module_split import LossOf, ModuleCall
from fzero.models.module_tp import calling, draws_of
from fzero.models.user_functions import ModuleConfig, loss_of, wide_sums
from fzero.sharding import Mesh, Rules


def unsplit_model(module: nn.Module, loss: LossOf, weights: Weights) -> Model:
    """The Model of a module that is not split: all of it is the head."""
    copied = CopiedModule(module, loss, {})
    body, buffers, parameters = copied.skeleton, copied.buffers, copied.parameters
    start = {f"head/{slashed(n)}": Start((weights(n),), tuple(leaf.shape), False) for n, leaf in parameters.items()}
    shapes, calls = {name: item.shape for name, item in start.items()}, PureCalls(body, copied.originals)

    def prepare(batch: Batch, ctx: Ctx) -> int:
        return expect_batch(batch)

    def head(params: Tree, x: Any, batch: Batch, ctx: Ctx) -> Loss:
        buffer_values = buffers.to_device(pytree.leaves(batch)[0].device, ctx.dtype)
        param_values = dotted(params["head"], ctx.dtype)
        groups = {"the buffer": buffer_values, "the parameter": param_values, "the batch's": pytree.named_leaves(batch)}
        named = {f"{label} {name}": leaf for label, tensors in groups.items() for name, leaf in tensors.items()}

        def run() -> Any:
            return loss(ModuleCall(body, {**param_values, **buffer_values}, ctx.dtype), batch)

        with calling(ctx, ctx.prepared) as call, wide_sums(named.values()):
            return loss_of(calls(run, named, draws_of(call), partial(ClosureState.from_function, loss)))

    return Model(
        config=ModuleConfig(type(module).__name__, 0),
        init=partial(init, shapes),
        embed=lambda params, batch, ctx: (),
        block={},
        head=head,
        logits=no_logits,
        rules=partial(unsplit_rules, shapes),
        prepare=prepare,
        traits=ModelTraits(
            start=start,
            draws=any(item.training for item in module.modules()),
            causal=functools.cache(lambda: CausalModule(copied, {n: f"head/{slashed(n)}" for n in parameters})),
            frozen=frozenset(f"head/{slashed(n)}" for n, leaf in parameters.items() if not leaf.requires_grad),
        ),
    )


def unsplit_rules(shapes: Mapping[str, tuple[int, ...]], mesh: Mesh) -> Rules[str]:
    """The sharding rules of a module that is not split: nothing is over tp."""
    if mesh.tp.size > 1:
        raise ValueError(f"tp={mesh.tp.size}: this module is trained whole, and tp splits layers; use dp")
    return [(f"^{re.escape(n)}$", f"[{', '.join('·' * len(shape))}]") for n, shape in shapes.items()]


@checked("loss batch", module="the module is {}; give an nn.Module, and loss(call, batch)")
def from_module(
    module: nn.Module,
    loss: LossOf,
    *,
    layers: str | Sequence[str] | None = None,
    batch: Batch | None = None,
    tp: Mapping[str, str] | str | None = None,
) -> Model:
    """Return a Model that computes what an nn.Module does; `init_state` begins with the module's weights.

    loss: `loss(call, batch)` uses `call` as it would the module, and returns (sum, number of samples), a mean, or a
        Loss; see `fzero.make_train_step`.
    layers: the name of the ModuleList or Sequential whose layers become the stack `blocks/`, or the names of several,
        in the order of a forward pass, whose layers become `blocks_0/`, `blocks_1/` and so on; None: the run of like
        neighbours that has the most parameters, with those that have a tenth of its parameters or more. What comes
        before, between and after them is embed, joins and head.
    batch: an example, whose shapes tell which parameters come before the layers and which after; without one both parts
        gather all of them. A batch is a dict of tensors, each with the samples in its first dim.
    tp: what tensor parallelism splits: {regular expression over the linear layers of a layer: "columns" (their outputs)
        or "rows" (their inputs), where the module's code writes -1 for the number of heads; "whole"; or "auto", for
        those that no other rule finds}. "auto" alone, or None: all of them by "auto", which needs `batch`. Linear
        layers that flow into one another are then split where a layer with random weights, run once for each rank in
        this process, equals a whole one, its gradients too; a warning says what is split, and why the others are not.

    A module whose layers cannot be a stack, or whose code needs values of tensors, is trained whole, as one part, and a
    warning says why; with `layers` that is an error. Random numbers, dropout's too, are drawn by fzero's keys if the
    module is in train mode (evaluations have no dropout), with masks that are the same however a batch is cut;
    parameters that require no gradient are frozen; floating arguments of `call`, and buffers that a state_dict has, are
    of the dtype of the computation, and other buffers keep theirs; a model of transformers is called without its cache
    of keys and values (`config.use_cache`), but while it generates (`fzero.generate`), as a module does that returns
    logits [B, T, V], or `.logits`, for tokens [B, T]. The module itself is not changed. Its weights are held for
    init_state: `model.with_traits(start={})` lets them go. What is changed in it later, attributes, buffers and
    `requires_grad`, changes nothing here. Tables that its code makes while it runs are made by a call of a copy on the
    example, or in the first step with a batch of new shapes, and are constants; what it records in its attributes is in
    the copy.

    Raises TypeError for what is no module, and ValueError for `layers` that are not alike, a rule of tp that finds
    nothing, weights on the meta device, parameters that are not floating-point, batch normalisation in train mode, an
    attribute with tensors in it that cannot be copied, and, with the line or the name, for what a pure function cannot
    do: random numbers that no key makes, torch.autograd.grad, a read of the module's own parameters beside `call`, a
    hook on a parameter, parameters, buffers and inputs that are written (`max_norm`), state that its
    results depend on and that goes from call to call, `scale_grad_by_freq`. Without `batch` these are found in the
    first step.

    >>> layer = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    >>> module = torch.nn.Sequential(torch.nn.Linear(2, 4), layer(), layer(), torch.nn.Linear(4, 1))
    >>> loss = lambda call, batch: ((call(batch["x"]) - batch["y"]).square().sum(), len(batch["x"]))
    >>> model = from_module(module, loss, batch={"x": torch.zeros(3, 2), "y": torch.zeros(3, 1)})
    >>> fzero.pytree.names(fzero.zero_plan(3, model, fzero.one_process()).like)[:3]
    ['embed/0/weight', 'embed/0/bias', 'blocks/0/weight']
    """
    if not callable(loss):
        raise TypeError(f"loss is a {type(loss).__name__}; write a function loss(call, batch)")
    expect_trainable(module)
    return model_of(module, loss, weight_reader(module), layers=layers, batch=batch, tp=tp)


def weight_reader(module: nn.Module) -> Weights:
    """The weights of a module, which are held; raises ValueError for one that has none."""
    params = dict(module.named_parameters())
    for name, leaf in params.items():
        if leaf.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values; give the module weights")
    return lambda name: partial(params.__getitem__, name)


def model_of(
    module: nn.Module,
    loss: LossOf,
    weights: Weights,
    *,
    layers: str | Sequence[str] | None,
    batch: Batch | None,
    tp: Mapping[str, str] | str | None,
    inferred: bool = False,
) -> Model:
    """The Model of a module that may be trained, which begins with these weights."""
    if isinstance(tp, str) and tp != "auto":
        raise ValueError(f'tp={tp!r}: it must be "auto", or rules such as {{"q|k|v|up": "columns", "o|down": "rows"}}')
    tp, inferred = ({"": "auto"}, True) if not tp or isinstance(tp, str) else (tp, inferred)
    try:
        options = {"layers": layers, "batch": batch, "tp": tp, "inferred": inferred}
        layered, model, reasons = layered_model(module, loss, weights, **options)
    except CannotSplit as reason:
        if layers is not None or (tp and not inferred):
            raise ValueError(f"{type(module).__name__} cannot be split into layers: {reason}") from None
        warn_of(module, "it is trained whole, and not layer by layer", str(reason))
        return unsplit_model(module, loss, weights)
    if reasons:
        names = layered.stacks["blocks"].names
        warn_of(module, f"only {names[0]} to {names[-1]} are trained layer by layer, and no other list", reasons[0])
    return model


def warn_of(module: nn.Module, subject: str, reason: str) -> None:
    """Say that a module is trained in larger parts than its layers, and why."""
    warnings.warn(f"{type(module).__name__}: {subject}: {reason}", UserWarning, stacklevel=4)


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

OLD_NORMS = {
    WeightNorm: ("weight_norm", "use torch.nn.utils.parametrizations.weight_norm"),
    SpectralNorm: ("spectral_norm", "use torch.nn.utils.parametrizations.spectral_norm, in .eval()"),
}


def expect_trainable(module: nn.Module) -> None:
    """Raise ValueError, naming the first module or tensor, for what cannot be trained as a pure function."""
    for name, child in module.named_modules():
        location = f"{name or 'the module'} ({type(child).__name__})"
        if isinstance(child, NORMS) and child.running_mean is None:
            raise ValueError(
                f"{location} keeps no running statistics, so that it always uses those of a batch, which depend on how "
                "that is cut over ranks; use LayerNorm or GroupNorm"
            )
        if isinstance(child, NORMS) and child.training:
            raise ValueError(
                f"{location} keeps running statistics, which depend on how a batch is cut over ranks; use LayerNorm or "
                f"GroupNorm, or call .eval() on it to train with the statistics it has"
            )
        for hook in child._forward_pre_hooks.values():
            if fix := OLD_NORMS.get(type(hook)):
                raise ValueError(
                    f"{location}: torch.nn.utils.{fix[0]} makes its weight anew before each call; undo it by "
                    f"torch.nn.utils.remove_{fix[0]}(module) and {fix[1]}"
                )
        for key, value in vars(child).items():
            if isinstance(value, Tensor):
                raise ValueError(
                    f"{location}: its attribute {key!r} is a tensor that is neither a parameter nor a buffer; write "
                    f'self.register_buffer("{key}", ...)'
                )
    for name, leaf in module.named_parameters():
        if isinstance(leaf, nn.UninitializedParameter):
            raise ValueError(f"{name} has no shape yet; call the module once on a batch, which makes its parameters")
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name} has a hook on its gradient, which no pure function calls: remove it (handle.remove()), and "
                "scale or mask gradients by an optimizer, such as optim.chain(your transformation, optim.adamw(...))"
            )
        if not leaf.is_floating_point():
            raise ValueError(f"{name} is {leaf.dtype}; a parameter is floating-point: make it a buffer")
    if not any(leaf.requires_grad for leaf in module.parameters()):
        raise ValueError("no parameter of the module requires a gradient, so there is nothing to train")
