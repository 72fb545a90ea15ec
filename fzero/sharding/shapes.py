"""The shapes of a parameter tree, and what a tree must be to be one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from fzero.core import pytree
from fzero.core.pytree import Tree


def shapes_of(model: Any) -> Tree:
    """The parameter tree of a Model, or of a tree of tensors, as meta tensors: shapes and dtypes without memory.

    Raises ValueError for a tree with other leaves than tensors, or with complex ones, and TypeError for what is no
    tree.
    """
    if hasattr(model, "init") and hasattr(model, "rules"):
        return model.init(
            lambda name, shape, std=0.0, mean=0.0, dtype=None: torch.empty(shape, dtype=dtype, device="meta")
        )
    check_tree(model)
    return pytree.map(lambda x: torch.empty_like(x, device="meta"), model)


def check_tree(params: Tree) -> None:
    """Raise TypeError or ValueError, with what to write instead, if a tree is none of parameters."""
    if isinstance(params, Iterator):
        raise TypeError(
            f"the parameters are a {type(params).__name__}, which can be read once; give a tree of tensors, such as "
            "dict(module.named_parameters())"
        )
    if isinstance(params, str) or callable(params) or dataclasses.is_dataclass(params):
        if not isinstance(params, torch.nn.Module):
            description = repr(params) if isinstance(params, str) else f"a {type(params).__name__}"
            raise TypeError(
                f"the model is {description}; give a Model, such as models.build(models.preset('llama-tiny')), or a "
                "tree of parameters"
            )
        raise TypeError(
            f"the parameters are an nn.Module ({type(params).__name__}); give fzero.from_module(module, loss), or a "
            "tree of tensors, such as dict(module.named_parameters()), and a loss that calls "
            "torch.func.functional_call(module, params, ...)"
        )
    named = pytree.named_leaves(params)
    if not named:
        raise ValueError("the parameter tree has no leaves; give a tree of tensors")
    for name, leaf in named.items():
        location = f"leaf {name!r} of the parameters"
        if not isinstance(leaf, torch.Tensor):
            instead = "leave it out, or use ()" if leaf is None else "use torch.as_tensor"
            raise TypeError(f"{location} is a {type(leaf).__name__}, not a tensor; {instead}")
        if leaf.is_nested or leaf.is_quantized:
            kind = "nested" if leaf.is_nested else str(leaf.dtype)
            raise ValueError(
                f"{location} is {kind}; give a plain tensor, such as .to_padded_tensor(0.0) or .dequantize() of it"
            )
        if leaf.is_complex():
            raise ValueError(
                f"{location} is {leaf.dtype}; give torch.view_as_real of it, and use torch.view_as_complex in the loss"
            )
        if leaf.layout != torch.strided:
            raise ValueError(f"{location} is {leaf.layout}; give leaf.to_dense()")
