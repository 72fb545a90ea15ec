"""Frozen weights in codes of eight or four bits, dequantised layer by layer where they are used: with LoRA, QLoRA.

Ref: Dettmers et al. 2023, "QLoRA: efficient finetuning of quantized LLMs", arXiv:2305.14314, section 3.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import torch
from torch import Tensor

from fzero.comm.axes import TP
from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.config_tables import power_of_two
from fzero.core.pytree import Tree, nearest
from fzero.core.reinterpret import reinterpret
from fzero.core.stack import Block
from fzero.kernels.quantize import quantize
from fzero.kernels.quantize_codes import KINDS, codes_a_byte
from fzero.models.base import CODES, SCALES, MakeLeaf, Model, leaf_shapes, map_blocks
from fzero.models.configs import LoRAConfig, QuantizedConfig
from fzero.models.weights import block_weights, weights_of
from fzero.sharding import Mesh, Rules, Spec, match_rules
from fzero.sharding.zero_stages import shapes_of

WEIGHT_KINDS = ("nf4", "int4", "int8")


@checked()
def quantized(
    model: Model,
    kind: str = "nf4",
    block: Annotated[int, power_of_two(16, 8192)] = 64,
    targets: str = r"/(attn|mlp)/w_[a-z]+$",
) -> Model:
    """Return the model in which each block weight w [L, in, out] whose name the regex `targets` matches is frozen in
    codes, with a scale for each `block` consecutive elements of a row.

    kind: "nf4" (16 levels by a normal distribution), "int4" or "int8". In place of a weight stand two leaves of
    integers, which have no gradient and no optimizer state: NAME/codes, uint8 [L, in, out / 2] (int8 [L, in, out] for
    int8), and NAME/scales, int32 [L, in, ceil(out / block)], the bits of float32. The codes of given weights come from
    `quantize_weights`; those that `init_params` draws are random. A weight is dequantised to the dtype of the
    activations for each product, and again in the backward pass. With `lora` this is QLoRA: `lora(quantized(model))`
    trains the factors beside weights in codes.

    Raises ValueError if `targets` matches no leaf of the blocks, or one that is not [L, in, out] with an even `out`,
    for an unknown kind, for a block that is no power of two from 16 to 8192, and for a model with LoRA; on a mesh, if
    tp cuts a block.
    Differs from the paper, whose scales are quantised too (0.37 bits a weight less, with its block of 64).

    >>> from fzero import models
    >>> model = quantized(models.build(models.MLPConfig()), "nf4", 16, targets="/w_")
    >>> model.init(lambda name, shape, std, mean=0.0, dtype=None: shape)["blocks"]["w_in"]
    {'codes': (2, 32, 32), 'scales': (2, 32, 4)}
    """
    if isinstance(model.config, LoRAConfig):
        raise ValueError("quantized: the model has LoRA already; write lora(quantized(model))")
    if model.foreign:
        raise ValueError("quantized: weights in codes are for fzero's own models, whose code takes them; leave it out")
    shapes = leaf_shapes(model)
    names = _targets(targets, shapes)
    if kind not in WEIGHT_KINDS:
        raise ValueError(f"quantized: kind is {kind!r}{nearest(kind, WEIGHT_KINDS)}; use {', '.join(WEIGHT_KINDS)}")
    config = QuantizedConfig(model.config, kind, block, targets)

    def init(make: MakeLeaf) -> Tree:
        def coded(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0, dtype: Any = None) -> Any:
            if name not in names:
                return make(name, shape, std, mean, dtype)
            *lead, size = shape
            packed, byte = (*lead, -(-size // codes_a_byte(kind))), KINDS[kind].dtype
            scale = torch.tensor(2.4 * std / KINDS[kind].largest)  # of a block's largest element, about
            bits = float(scale.view(torch.int32))
            middle = 127.5 if byte == torch.uint8 else 0.0
            return {
                CODES: make(f"{name}/{CODES}", packed, 40.0, middle, byte),
                SCALES: make(f"{name}/{SCALES}", (*lead, -(-size // block)), 0.0, bits, torch.int32),
            }

        return model.init(coded)

    def decoded(layer_block: Block) -> Block:
        return lambda params, x, ctx: layer_block(weights_of(params, kind, block), x, ctx)

    def rules(mesh: Mesh) -> Rules[str]:
        base = model.rules(mesh)
        texts = match_rules(base, list(shapes), subject="the model's sharding rules")
        for name in names:
            parts = mesh.tp.size if TP in Spec.parse(texts[name]).dims[-1] else 1
            if parts > 1 and shapes[name][-1] % (parts * block):
                raise ValueError(
                    f"quantized: {name} has rows of {shapes[name][-1]} elements, which tp={parts} cuts within a block "
                    f"of {block}; use a smaller block, or another tp"
                )
        leaves = {
            leaf: text
            for n, text in texts.items()
            for leaf in ([f"{n}/{CODES}", f"{n}/{SCALES}"] if n in names else [n])
        }
        return tuple((f"^{re.escape(leaf)}$", text) for leaf, text in leaves.items())

    return model._replace(config=config, init=init, block=map_blocks(model, decoded), rules=rules, linear="")


@checked()
def quantize_weights(model: Model, params: Tree) -> Tree:
    """Return `params` of the model without codes as parameters of `model`, which `quantized` returned.

    params: whole (not sharded) leaves; the weights to be quantised are rounded to the nearest code, the others are
    returned as they are. Raises ValueError if `model` has no weights in codes, or a weight is missing
    or not finite.

    >>> from fzero import models, random
    >>> base = models.build(models.MLPConfig())
    >>> model = quantized(base, "int8", 16, targets="/w_")
    >>> quantize_weights(model, models.init_params(base, random.key(0)))["blocks"]["w_in"]["codes"].dtype
    torch.int8
    """
    config = model.config
    if not isinstance(config, QuantizedConfig):
        raise ValueError(
            f"quantize_weights: the model has no weights in codes (its config is a {type(config).__name__}); give it "
            "the one that quantized returned"
        )
    named = pytree.named_leaves(params)
    names = {name.removesuffix(f"/{CODES}") for name in pytree.names(shapes_of(model)) if name.endswith(f"/{CODES}")}
    if missing := sorted(names - named.keys()):
        raise ValueError(f"quantize_weights: the parameters have no {missing[0]}; they have {', '.join(named)}")

    def codes_of(name: str, leaf: Tensor) -> Any:
        if name not in names:
            return leaf
        if leaf.device.type != "meta" and not bool(leaf.isfinite().all()):
            raise ValueError(
                f"quantize_weights: {name} has {int((~leaf.isfinite()).sum())} elements that are NaN or infinite, for "
                "which there is no code; take weights of an earlier step"
            )
        quantization = quantize(leaf, config.kind, config.block)
        return {CODES: quantization.data, SCALES: reinterpret(quantization.scale, torch.int32)}

    return pytree.map_named(codes_of, params)


def _targets(targets: str, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """The names of the leaves that are quantised."""
    names = block_weights("quantized", targets, shapes)
    for name in names:
        if shapes[name][-1] % 2:
            raise ValueError(
                f"quantized: {name} of shape {shapes[name]} has rows of an odd size; "
                f"leave it out of targets {targets!r}"
            )
    return names
