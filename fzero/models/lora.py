"""LoRA: add a trained product of low rank to weights that stay frozen. DoRA: train the norms of their columns too.

Ref: Hu et al. 2021, "LoRA: low-rank adaptation of large language models", arXiv:2106.09685, section 4.1; Liu et al.
2024, "DoRA: weight-decomposed low-rank adaptation", arXiv:2402.09353, section 4.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

from torch import Tensor

from fzero.comm.axes import TP
from fzero.comm.communicator import Axis
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.config_tables import Allowed
from fzero.core.pytree import Tree
from fzero.core.stack import Block
from fzero.models.base import CODES, Ctx, MakeLeaf, Model, leaf_shapes, map_blocks, with_still_leaves
from fzero.models.configs import LORA, LoRAConfig
from fzero.models.weights import LowRankSum, WeightInParts, block_weights, column_norms, product_of, weights_of
from fzero.sharding import Mesh, Rules, Spec, fake_mesh, match_rules
from fzero.sharding.slices import is_stacked
from fzero.sharding.zero_stages import shapes_of


@checked()
def lora(
    model: Model,
    rank: int = 8,
    alpha: Annotated[float, Allowed(lambda x: 0 < x < math.inf, "a positive number, such as 16")] = 16.0,
    targets: str = r"/(attn|mlp)/w_",
    *,
    dora: bool = False,
    vocabulary: bool = False,
) -> Model:
    """Return the model in which each block weight w [L, in, out] whose name the regex `targets` matches becomes w +
    (alpha / rank) a b. A product x w becomes x w + (alpha / rank) (x a) b; a block that uses w in another way gets the
    sum, made for it (see `LowRankSum`).

    The new leaves are `<name>_lora_a` [L, in, rank], normal with standard deviation 1/√in, and `<name>_lora_b` [L,
    rank, out], zero. So training begins at `model`, with the same values for the same key. To train only them, give
    zero_plan frozen=models.frozen_leaves(model.config). If a mesh axis shards a dim of w, the factor that has this dim
    is sharded in the same way; the other factor is whole on all ranks, and its gradient is summed over that axis.

    Of a model made from a module (see from_module, from_huggingface) the weights are as torch has them, [L, out, in],
    `<name>_lora_a` is [L, rank, in] and `<name>_lora_b` [L, out, rank], as peft has them; `targets` says which, such as
    `targets=r"[qv]_proj/weight$"`. An nn.Linear adds its product to its outputs; to another weight b a is added.

    dora: there is also `<name>_lora_m` [L, out], the trained norms of the columns: column j of v = w + (alpha / rank) a
    b becomes m_j / |v_j| times v_j, and |v_j| counts as a constant in the backward pass (Liu et al., section 4.3). So
    that training begins at `model`, m must be the norms of the columns of w: `set_magnitudes` makes it so. Drawn, it
    is what they are expected to be. A model made from a module has no DoRA.
    vocabulary: `frozen_leaves` leaves out embed/tokens and head/w, which are trained whole, as new tokens need it.

    Raises ValueError if `targets` matches no leaf of the blocks or one that is not [L, in, out], for a rank outside [1,
    min(in, out)], and for an alpha that is not a positive number. Differs from the paper, which does not state the
    deviation of a: with 1/√in, x a is as large as x.

    >>> from fzero import models
    >>> model = lora(models.build(models.MLPConfig()), rank=4, targets=r"/w_")
    >>> models.num_params(model) - models.num_params(models.build(models.MLPConfig()))
    1536
    """
    shapes = leaf_shapes(model)
    names = _targets(targets, shapes, rank)
    for option in ("dora",) * dora + ("vocabulary",) * vocabulary if model.traits.foreign else ():
        raise ValueError(f"lora: {option}=True is for fzero's own models; of one made from a module leave it out")
    config, start = LoRAConfig(model.config, rank, float(alpha), targets, dora, vocabulary), model.traits.start
    model = with_still_leaves(model).with_traits(start={})  # the functions below hold no weights

    def texts_of(mesh: Mesh) -> dict[str, str]:
        texts = match_rules(model.rules(mesh), pytree.names(shapes_of(model)), subject="the model's sharding rules")
        return {name: texts.get(name) or texts[f"{name}/{CODES}"] for name in names}

    @functools.cache
    def split_inside(tp: int) -> frozenset[str]:
        """The targets, as the blocks name them, whose dim `in` is sharded over so many ranks of tp."""
        texts = texts_of(fake_mesh({TP: tp}))
        return frozenset(n.partition("/")[2] for n, text in texts.items() if TP in Spec.parse(text).dims[1])

    def adapted(block: Block) -> Block:
        if model.traits.foreign:
            return lambda params, x, ctx: block(_with_scale(params, config), x, ctx)

        def block_with_factors(params: Tree, x: Any, ctx: Ctx) -> Any:
            tp = ctx.mesh.tp
            inside = {name: tp for name in split_inside(tp.size)} if dora and tp.size > 1 else {}
            return block(_with_factors(params, config, inside), x, ctx)

        return block_with_factors

    def rules(mesh: Mesh) -> Rules[str]:
        of_factors = [
            (f"^{re.escape(name)}_lora_{factor}$", text)
            for name, of_weight in texts_of(mesh).items()
            for factor, text in zip("abm" if dora else "ab", _factor_specs(of_weight, model.traits.foreign))
        ]
        return (*of_factors, *model.rules(mesh))

    # A gathered weight is more than the operand of one product.
    init = functools.partial(_init, model, config, {name: shapes[name] for name in names})
    blocks = map_blocks(model, adapted)
    return model._replace(config=config, init=init, block=blocks, rules=rules).with_traits(linear="", start=start)


def _init(model: Model, config: LoRAConfig, weights: Mapping[str, tuple[int, ...]], make: MakeLeaf) -> Tree:
    """Make the parameters of `model` with factors, and magnitudes, beside the weights of these shapes."""
    deviations: dict[str, float] = {}

    def note(name: str, shape: tuple[int, ...], std: float, *leaf: Any, **options: Any) -> Any:
        deviations[name] = std
        return make(name, shape, std, *leaf, **options)

    def add_factors(node: Tree, path: str) -> Tree:
        out = {}
        for key, value in node.items():
            name = f"{path}/{key}"
            out[key] = add_factors(value, name) if isinstance(value, dict) else value
            if name in weights:
                layers, size_in, size_out = weights[name]
                (a, b), std = _factor_shapes(model, weights[name], config.rank)
                out[f"{key}_lora_a"] = make(f"{name}_lora_a", a, std)
                out[f"{key}_lora_b"] = make(f"{name}_lora_b", b, 0.0)
                if config.dora:
                    norm = math.sqrt(size_in) * deviations.get(name, 1.0)  # of codes anything
                    out[f"{key}_lora_m"] = make(f"{name}_lora_m", (layers, size_out), 0.0, norm)
        return out

    tree = model.init(note)
    return {
        segment: add_factors(node, segment) if is_stacked(f"{segment}/") else node for segment, node in tree.items()
    }


@checked()
def merge(model: Model, params: Tree) -> Tree:
    """Return the parameters of the base model with the LoRA products added: they compute what `params` compute in
    `model`.

    model: the one that `lora` returned. params: whole (not sharded) leaves of any dtype; sums are in float32 or wider
    and rounded once, weights in codes become float32. Raises ValueError if `model` has no LoRA.

    >>> from fzero import models, random
    >>> model = lora(models.mlp(models.MLPConfig()), rank=2, targets="/w_")
    >>> sorted(merge(model, models.init_params(model, random.key(0)))["blocks"])
    ['scale', 'w_in', 'w_out']
    """
    if not isinstance(model.config, LoRAConfig):
        raise ValueError(
            f"merge: the model has no LoRA (its config is a {type(model.config).__name__}); give it the one "
            "that lora returned"
        )
    config = model.config
    if model.traits.foreign:
        named = pytree.named_leaves(params)
        return pytree.nest({name: product_of(named, name, model) for name in named if re.search(LORA, name) is None})
    in_blocks = {segment: _with_factors(node, config) for segment, node in params.items() if is_stacked(f"{segment}/")}
    if kind := getattr(config, "kind", ""):
        in_blocks = weights_of(in_blocks, kind, config.block)
    return {**params, **pytree.map(lambda w: w.dense() if isinstance(w, WeightInParts) else w, in_blocks)}


@checked()
def set_magnitudes(model: Model, params: Tree) -> Tree:
    """Return the parameters with DoRA's magnitudes those of the weights that the factors give: it computes what the
    same model without magnitudes does.

    model: the one that `lora` returned. params: whole (not sharded) leaves. Raises ValueError if `model` has no DoRA.

    >>> from fzero import models, random
    >>> model = lora(models.mlp(models.MLPConfig()), rank=2, targets="/w_in", dora=True)
    >>> params = models.init_params(model, random.key(0))
    >>> set_magnitudes(model, params)["blocks"]["w_in_lora_m"].allclose(params["blocks"]["w_in"].norm(dim=1))
    True
    """
    if not getattr(model.config, "dora", False):
        raise ValueError("set_magnitudes: the model has no magnitudes; give it one of lora(..., dora=True)")
    named = pytree.named_leaves(params)

    def magnitude(name: str, leaf: Tensor) -> Tensor:
        return column_norms(named, name, model.config).to(leaf.dtype) if name.endswith("_lora_m") else leaf

    return pytree.map_named(magnitude, params)


def _with_factors(node: Tree, config: LoRAConfig, inside: Mapping[str, Axis] = {}, path: str = "") -> Tree:
    """The tree with a weight and its factors as one LowRankSum; inside: the axis of its dim `in`."""
    out = {}
    for key, value in node.items():
        if f"{key}_lora_a" in node:
            a, b, m = (node.get(f"{key}_lora_{factor}") for factor in "abm")
            axis = inside.get(f"{path}{key}", Axis(TP))
            out[key] = LowRankSum(value, a, b, config.alpha / config.rank, m, axis)
        elif isinstance(value, dict):
            out[key] = _with_factors(value, config, inside, f"{path}{key}/")
        elif re.search(LORA, key) is None:
            out[key] = value
    return out


def _with_scale(node: Tree, config: LoRAConfig) -> Tree:
    """The tree with each factor b times alpha / rank."""
    scale = config.alpha / config.rank
    return pytree.map_named(lambda name, leaf: leaf * scale if name.endswith("_lora_b") else leaf, node)


def _factor_shapes(model: Model, shape: tuple[int, ...], rank: int) -> tuple[list[tuple[int, ...]], float]:
    """([shape of a, shape of b], the standard deviation of a) beside a weight."""
    layers, first, second = shape
    if model.traits.foreign:
        return [(layers, rank, second), (layers, first, rank)], 1.0 / math.sqrt(second)
    return [(layers, first, rank), (layers, rank, second)], 1.0 / math.sqrt(first)


def _targets(targets: str, shapes: dict[str, tuple[int, ...]], rank: int) -> list[str]:
    """The names of the leaves that get factors."""
    names = block_weights("lora", targets, shapes)
    for name in names:
        max_rank = min(shapes[name][1:])
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= max_rank:
            raise ValueError(
                f"lora: rank is {rank!r}; for {name} of shape {shapes[name]} it must be a whole number in "
                f"[1, {max_rank}]"
            )
    return names


def _factor_specs(text: str, foreign: bool = False) -> tuple[str, ...]:
    """The spec texts of the factors and magnitudes of a leaf, from those of its dims."""
    spec = Spec.parse(text)
    layers, size_in, size_out = (dim.strip() for dim in text[text.index("[") + 1 : text.index("]")].split(","))
    memory = "" if spec.memory.on_device else f" @{spec.memory}"
    if foreign:
        return f"[{layers}, R, {size_out}]{memory}", f"[{layers}, {size_in}, R]{memory}"

    def partial_text(dim: int) -> str:
        return "".join(f" +{axis}" for axis in sorted({*spec.partial, *spec.dims[dim]})) + memory

    return (
        f"[{layers}, {size_in}, R]{partial_text(2)}",
        f"[{layers}, R, {size_out}]{partial_text(1)}",
        f"[{layers}, {size_out}]{partial_text(1)}",
    )
