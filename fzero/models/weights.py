"""Weights that are not one tensor, a product with one of which is computed from its parts; and frozen weights in codes
of eight or four bits, dequantised layer by layer where they are used: with LoRA, QLoRA.

A model says `x @ w`, or `layers.linear(x, w)`; if w is a `WeightInParts`, its `product` is called. Every other function
of torch gets the dense tensor, made for that call.

Ref: Dettmers et al. 2023, "QLoRA: efficient finetuning of quantized LLMs", arXiv:2305.14314, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from fzero import kernels
from fzero.comm.axes import TP
from fzero.comm.collectives import psum
from fzero.comm.communicator import Axis
from fzero.core import pytree
from fzero.core.arguments import checked, expect_regex
from fzero.core.autodiff import Function, reinterpret
from fzero.core.config_tables import power_of_two
from fzero.core.pytree import Tree, nearest
from fzero.core.stack import Block
from fzero.kernels.quantize_codes import KINDS, codes_a_byte
from fzero.models.base import CODES, SCALES, MakeLeaf, Model, leaf_shapes, map_blocks
from fzero.models.configs import LoRAConfig, QuantizedConfig
from fzero.sharding import Mesh, Rules, Spec, match_rules
from fzero.sharding.slices import is_stacked
from fzero.sharding.zero_stages import shapes_of

WHOLE = Axis(TP)  # of size 1
Multiply = Callable[[Tensor, Any], Tensor]  # (x [..., in], w [in, out]) -> [..., out]
PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}


@dataclass(frozen=True, eq=False)
class WeightInParts:
    """A weight [in, out] that takes the place of a tensor in a model's parameters."""

    def dense(self) -> Tensor:
        """The weight as a tensor."""
        raise NotImplementedError

    def product(self, x: Tensor, multiply: Multiply = torch.matmul, impl: str = "auto") -> Tensor:
        """x [..., in] times the weight; `multiply` makes the products with its dense parts, the form `impl` of
        `quantized_linear` those with codes."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in PRODUCTS and len(args) == 2 and isinstance(args[0], Tensor):
            return args[1].product(args[0])
        args, kwargs = pytree.map(lambda a: a.dense() if isinstance(a, WeightInParts) else a, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # shape, mT, narrow, ...
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)


def tensors_of(weight: Any) -> Tree:
    """The tensors of a weight: of a WeightInParts by field, else itself."""
    if not isinstance(weight, WeightInParts):
        return weight
    inner = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return {name: tensors_of(value) for name, value in inner.items() if isinstance(value, Tensor | WeightInParts)}


def with_tensors(weight: Any, tensors: Tree) -> Any:
    """The weight with other tensors, as `tensors_of` gives them."""
    if not isinstance(weight, WeightInParts):
        return tensors
    return replace(weight, **{name: with_tensors(getattr(weight, name), new) for name, new in tensors.items()})


@dataclass(frozen=True, eq=False)
class LowRankSum(WeightInParts):
    """w + scale a b, never made as one: x a b is summed; with magnitudes m [out] (DoRA) columns have those norms."""

    w: Any  # a Tensor or a WeightInParts
    a: Tensor
    b: Tensor
    scale: float
    m: Tensor | None = None
    axis: Axis = WHOLE  # that shards `in`, over which the norms are summed

    def dense(self) -> Tensor:
        """Summed in float32 or wider, and rounded once to the dtype of w."""
        w = self.w.dense() if isinstance(self.w, WeightInParts) else self.w
        wide = torch.promote_types(w.dtype, torch.float32)
        v = w + self.scale * (self.a.to(wide) @ self.b.to(wide))
        return (v if self.m is None else v * self.gain(self.m, v)[..., None, :]).to(w.dtype)

    def product(self, x: Tensor, multiply: Multiply = torch.matmul, impl: str = "auto") -> Tensor:
        """x w + scale (x a) b, in x's dtype; with magnitudes its columns times m / |v|."""
        y = torch.add(multiply(x, self.w), (x @ self.a.to(x.dtype)) @ self.b.to(x.dtype), alpha=self.scale)
        if self.m is None:
            return y
        w = self.w.dense() if isinstance(self.w, WeightInParts) else self.w.detach()
        wide = torch.promote_types(w.dtype, torch.float32)
        v = w.to(wide) + self.scale * (self.a.detach().to(wide) @ self.b.detach().to(wide))
        return y * self.gain(self.m, v).to(y.dtype)

    def gain(self, m: Tensor, v: Tensor) -> Tensor:
        """m over the norms of the columns of v [in, out], in float32 or wider."""
        # The norms count as constants in the backward pass.
        squares = psum(v.detach().square().sum(-2), self.axis, leaf="dora")
        return m.to(v.dtype) / squares.sqrt()

    def to(self, dtype: torch.dtype) -> LowRankSum:
        """The weight in another dtype; magnitudes stay as they are."""
        return replace(self, w=self.w.to(dtype), a=self.a.to(dtype), b=self.b.to(dtype))


@dataclass(frozen=True, eq=False)
class QuantizedWeight(WeightInParts):
    """A frozen weight in codes (see kernels.quantize), dequantised for each product, and never kept."""

    codes: Tensor  # [in, out] or [in, out / 2], of the kind's dtype
    scales: Tensor  # int32 [in, ceil(out / block)]: the bits of float32
    kind: str
    block: int
    dtype: torch.dtype = torch.float32

    def dense(self) -> Tensor:
        """The weight as a tensor of `dtype`."""
        return _dense(self.codes, self.scales, self.kind, self.block, self.dtype)

    def product(self, x: Tensor, multiply: Multiply = torch.matmul, impl: str = "auto") -> Tensor:
        """x times the weight, in x's dtype."""
        return _FrozenProduct.apply(x, self.codes, self.scales, self.kind, self.block, False, impl)

    def to(self, dtype: torch.dtype) -> QuantizedWeight:
        """The weight, dequantised to another dtype."""
        return replace(self, dtype=dtype)


def _dense(codes: Tensor, scales: Tensor, kind: str, block: int, dtype: torch.dtype) -> Tensor:
    return kernels.dequantize(kernels.quantize.Quantized(codes, reinterpret(scales, torch.float32)), kind, block, dtype)


class _FrozenProduct(Function):
    """x w of a weight in codes, or x w^T, dequantised anew for derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, codes: Tensor, scales: Tensor, kind: str, block: int, transposed: bool, impl: str) -> Tensor:
        if not transposed:
            return kernels.quantized_linear.quantized_linear(
                x, codes, reinterpret(scales, torch.float32), kind, block, impl=impl
            )
        return x @ _dense(codes, scales, kind, block, x.dtype).mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, codes, scales, *ctx.options = inputs
        ctx.save_for_backward(codes, scales)
        ctx.save_for_forward(codes, scales)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        kind, block, transposed, impl = ctx.options
        return _FrozenProduct.apply(g, *ctx.saved_tensors, kind, block, not transposed, impl), *[None] * 6

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: None) -> Tensor:
        return _FrozenProduct.apply(t, *ctx.saved_tensors, *ctx.options)


def weights_of(node: Any, kind: str, block: int) -> Any:
    """A layer's parameters with a QuantizedWeight in the place of each pair of codes and scales."""
    if isinstance(node, LowRankSum):
        return replace(node, w=weights_of(node.w, kind, block))
    if not isinstance(node, dict):
        return node
    if node.keys() == {CODES, SCALES}:
        return QuantizedWeight(node[CODES], node[SCALES], kind, block)
    return {key: weights_of(value, kind, block) for key, value in node.items()}


def block_weights(subject: str, targets: str, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """The names of the blocks' weights [L, in, out] that the regex `targets` matches; raises ValueError."""
    blocks = [name for name in shapes if is_stacked(name)]
    expect_regex(f"{subject}: targets", targets)
    names = [name for name in blocks if re.search(targets, name)]
    if not names:
        raise ValueError(
            f"{subject}: targets {targets!r} matches no leaf of the blocks{nearest(targets, blocks)}; they are "
            f"{', '.join(blocks)}"
        )
    for name in names:
        if len(shapes[name]) != 3:
            raise ValueError(
                f"{subject}: {name} of shape {shapes[name]} is no weight [L, in, out]; leave it out of targets "
                f"{targets!r}"
            )
    return names


def column_norms(named: Mapping[str, Tensor], name: str, config: LoRAConfig) -> Tensor:
    """[L, out], the norms of the columns of the weight of the magnitudes `name`, with its factors."""
    weight = name.removesuffix("_lora_m")
    w = named.get(weight)
    if w is None:
        codes = {suffix: named[f"{weight}/{suffix}"] for suffix in (CODES, SCALES)}
        w = weights_of(codes, config.kind, config.block).dense()
    w = w.to(torch.promote_types(w.dtype, torch.float32))
    if f"{weight}_lora_a" in named:
        a, b = named[f"{weight}_lora_a"], named[f"{weight}_lora_b"]
        w = LowRankSum(w, a, b, config.alpha / config.rank).dense()
    return torch.linalg.vector_norm(w, dim=-2)


def product_of(named: Mapping[str, Any], name: str, model: Model | None) -> Any:
    """The weight [..., out, in] called `name` of a module's model, with the product of its factors."""
    w = named[name]
    if model is None or f"{name}_lora_a" not in named:
        return w
    wide, scale = torch.promote_types(w.dtype, torch.float32), model.config.alpha / model.config.rank
    a, b = (named[f"{name}_lora_{factor}"].to(wide) for factor in "ab")
    # Layer by layer, as `to_module` takes them: a batched product has other bits on some CPUs.
    product = torch.stack([y @ x for x, y in zip(a, b)]) if w.dim() == 3 else b @ a
    return (w + scale * product).to(w.dtype)


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
    if model.traits.foreign:
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

    model = model.with_traits(linear="")
    return model._replace(config=config, init=init, block=map_blocks(model, decoded), rules=rules)


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
        quantization = kernels.quantize.quantize(leaf, config.kind, config.block)
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
