"""LoRA: add a trained product of low rank to weights that stay frozen.

Ref: Hu et al. 2021, "LoRA: low-rank adaptation of large language models", arXiv:2106.09685, section 4.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fzero.core import pytree
from fzero.core.pytree import Tree
from fzero.core.stack import Block
from fzero.models.base import CODES, MakeLeaf, Model, leaf_shapes, map_blocks
from fzero.models.weights import LowRankSum, WeightInParts, block_weights, weights_of
from fzero.sharding import Mesh, Rules, Spec, match_rules
from fzero.sharding.plan import shapes_of
from fzero.sharding.slices import is_stacked

LORA = r"_lora_[ab]$"  # the leaves that are trained
FROZEN = r"^(?!.*_lora_[ab]$)"  # and those that are not, for zero_plan


@dataclass(frozen=True)
class LoRAConfig:
    """The config of a model with LoRA; attributes that it lacks are read from `base`, the config of the model without
    LoRA.

    >>> from fzero import models
    >>> LoRAConfig(models.MLPConfig(), rank=4, alpha=16.0, targets="/w_").d_model
    32
    """

    base: Any
    rank: int
    alpha: float
    targets: str

    def __getattr__(self, name: str) -> Any:
        if name == "base" or name.startswith("__"):  # while unpickling, `base` does not exist yet
            raise AttributeError(name)
        return getattr(self.base, name)


def lora(model: Model, rank: int = 8, alpha: float = 16.0, targets: str = r"/(attn|mlp)/w_") -> Model:
    """Return the model in which each block weight w [L, in, out] whose name the regex `targets` matches becomes w +
    (alpha / rank) a b. A product x w becomes x w + (alpha / rank) (x a) b; a block that uses w in another way gets the
    sum, made for it (see `LowRankSum`).

    The new leaves are `<name>_lora_a` [L, in, rank], normal with standard deviation 1/√in, and `<name>_lora_b` [L,
    rank, out], zero. So training begins at `model`, with the same values for the same key. To train only them, freeze
    the leaves that `LORA` does not match. If a mesh axis shards a dim of w, the factor that has this dim is sharded in
    the same way; the other factor is whole on all ranks, and its gradient is summed over that axis.

    Of a model made from a module (see from_module, from_huggingface) the weights are as torch has them, [L, out, in],
    `<name>_lora_a` is [L, rank, in] and `<name>_lora_b` [L, out, rank], as peft has them; `targets` says which, such as
    `targets=r"[qv]_proj/weight$"`. An nn.Linear adds its product to its outputs; to another weight b a is added.

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
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise ValueError(f"lora: alpha is {alpha!r}; it must be a positive number, such as 16")
    config, start = LoRAConfig(model.config, rank, float(alpha), targets), model.start
    model = model._replace(start={})  # the functions below hold no weights

    def init(make: MakeLeaf) -> Tree:
        def beside(node: Tree, path: str) -> Tree:
            out = {}
            for key, value in node.items():
                name = f"{path}/{key}"
                out[key] = beside(value, name) if isinstance(value, dict) else value
                if name in names:
                    (a, b), std = _factor_shapes(model, shapes[name], rank)
                    out[f"{key}_lora_a"] = make(f"{name}_lora_a", a, std)
                    out[f"{key}_lora_b"] = make(f"{name}_lora_b", b, 0.0)
            return out

        tree = model.init(make)
        return {part: beside(node, part) if is_stacked(f"{part}/") else node for part, node in tree.items()}

    def adapted(block: Block) -> Block:
        if model.foreign:
            return lambda params, x, ctx: block(_with_scale(params, config), x, ctx)
        return lambda params, x, ctx: block(_with_factors(params, config), x, ctx)

    def rules(mesh: Mesh) -> Rules[str]:
        base = model.rules(mesh)
        texts = match_rules(base, pytree.names(shapes_of(model)), what="the model's sharding rules")
        of_factors = [
            (f"^{re.escape(name)}_lora_{factor}$", text)
            for name in names
            for factor, text in zip("ab", _factor_specs(texts.get(name) or texts[f"{name}/{CODES}"], model.foreign))
        ]
        return (*of_factors, *base)

    # A gathered weight is more than the operand of one product.
    blocks = map_blocks(model, adapted)
    return model._replace(config=config, init=init, block=blocks, rules=rules, linear="", start=start)


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
    if model.foreign:
        named = pytree.named_leaves(params)
        return pytree.nest({name: product_of(named, name, model) for name in named if re.search(LORA, name) is None})
    in_blocks = {part: _with_factors(node, config) for part, node in params.items() if is_stacked(f"{part}/")}
    if kind := getattr(config, "kind", ""):
        in_blocks = weights_of(in_blocks, kind, config.block)
    return {**params, **pytree.map(lambda w: w.dense() if isinstance(w, WeightInParts) else w, in_blocks)}


def _with_factors(node: Tree, config: LoRAConfig) -> Tree:
    """The tree with a weight and its factors as one LowRankSum."""
    out = {}
    for key, value in node.items():
        if f"{key}_lora_a" in node:
            out[key] = LowRankSum(value, node[f"{key}_lora_a"], node[f"{key}_lora_b"], config.alpha / config.rank)
        elif isinstance(value, dict):
            out[key] = _with_factors(value, config)
        elif re.search(LORA, key) is None:
            out[key] = value
    return out


def _with_scale(node: Tree, config: LoRAConfig) -> Tree:
    """The tree with each factor b times alpha / rank."""
    scale = config.alpha / config.rank
    return pytree.map_named(lambda name, leaf: leaf * scale if name.endswith("_lora_b") else leaf, node)


def product_of(named: Mapping[str, Any], name: str, model: Model | None) -> Any:
    """The weight [..., out, in] called `name` of a model made from a module, with alpha / rank times the product of its
    factors, if it has any; summed in float32 or wider, and rounded once.
    """
    w = named[name]
    if model is None or f"{name}_lora_a" not in named:
        return w
    wide, scale = torch.promote_types(w.dtype, torch.float32), model.config.alpha / model.config.rank
    a, b = (named[f"{name}_lora_{factor}"].to(wide) for factor in "ab")
    return (w + scale * (b @ a)).to(w.dtype)


def _factor_shapes(model: Model, shape: tuple[int, ...], rank: int) -> tuple[list[tuple[int, ...]], float]:
    """([shape of a, shape of b], the standard deviation of a) beside a weight."""
    layers, first, second = shape
    if model.foreign:
        return [(layers, rank, second), (layers, first, rank)], 1.0 / math.sqrt(second)
    return [(layers, first, rank), (layers, rank, second)], 1.0 / math.sqrt(first)


def _targets(targets: str, shapes: dict[str, tuple[int, ...]], rank: int) -> list[str]:
    """The names of the leaves that get factors."""
    names = block_weights("lora", targets, shapes)
    for name in names:
        most = min(shapes[name][1:])
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most:
            raise ValueError(
                f"lora: rank is {rank!r}; for {name} of shape {shapes[name]} it must be a whole number in [1, {most}]"
            )
    return names


def _factor_specs(text: str, foreign: bool = False) -> tuple[str, str]:
    """The spec texts of the factors of a leaf: from "[L, D, H/tp]" follow "[L, D, R] +tp" and "[L, R, H/tp]"; of a
    module's, "[L, R, H/tp]" and "[L, D, R]", whose gradients owe no sum.
    """
    spec = Spec.parse(text)
    layers, size_in, size_out = (dim.strip() for dim in text[text.index("[") + 1 : text.index("]")].split(","))
    memory = "" if spec.memory == "device" else f" @{spec.memory}"
    if foreign:
        return f"[{layers}, R, {size_out}]{memory}", f"[{layers}, {size_in}, R]{memory}"

    def owed(dim: int) -> str:
        return "".join(f" +{axis}" for axis in sorted({*spec.partial, *spec.dims[dim]})) + memory

    return f"[{layers}, {size_in}, R]{owed(2)}", f"[{layers}, R, {size_out}]{owed(1)}"
