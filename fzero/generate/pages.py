"""Pages: what a model keeps of the positions that it has computed, in fixed parts that requests share.

A layer's entry of a position is its keys and values, [G, K] each, or DeepSeek's latent: R + rope numbers in place of
2 H K (DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1, table 1). Page `P - 1` is no request's: what a
step pads its batch with is written there. A model made from a module has the keys and values of its own cache; without
one it keeps the ids of its tokens, from which a step computes all positions again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.kernels import PAGE_CODES
from fzero.models import Model
from fzero.models.configs import DeepSeekConfig, GPT2Config, LlamaConfig, body_of
from fzero.sharding import Mesh, Plan

PAGE_TOKENS = 16
CACHES = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn}  # what entries are in, None: what they are


@dataclass(frozen=True)
class PageSpec:
    """What pages are: their number, positions and, by layer, the shapes [heads, size] of an entry.

    >>> spec = PageSpec(count=3, page_tokens=4, entries=(((2, 8), (2, 8)),), dtype=torch.bfloat16)
    >>> spec.page_bytes, spec.bytes  # a page of four positions; with the page of padding there are four
    (256, 1024)
    """

    count: int  # of pages for requests
    page_tokens: int
    entries: tuple[tuple[tuple[int, int], ...], ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("count", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")

    @property
    def position_bytes(self) -> tuple[int, ...]:
        """The bytes of a position in each layer: of codes, with a float32 for each head."""
        scale = torch.float32.itemsize * self.coded
        return tuple(sum(a * (b * self.dtype.itemsize + scale) for a, b in layer) for layer in self.entries)

    @property
    def coded(self) -> bool:
        """Whether entries are in codes, with their scales in tensors behind them."""
        return self.dtype in PAGE_CODES

    @property
    def page_bytes(self) -> int:
        """The bytes of a page in all layers."""
        return self.page_tokens * sum(self.position_bytes)

    @property
    def bytes(self) -> int:
        """The bytes of all pages, the one of padding too."""
        return (self.count + 1) * self.page_bytes

    def zeros(self, device: torch.device | str = "cpu") -> Pages:
        """Pages of these sizes on a device."""
        lines = self.count + 1, self.page_tokens

        def tensors(layer: tuple[tuple[int, int], ...]) -> tuple[Tensor, ...]:
            entries = [torch.zeros((*lines, *shape), dtype=self.dtype, device=device) for shape in layer]
            scales = [torch.zeros((*lines, heads, 1), device=device) for heads, _ in layer if self.coded]
            return (*entries, *scales)

        return Pages(self, tuple(map(tensors, self.entries)))


class Pages:
    """The pages of all layers, `layers[i][j]` [P, page_tokens, heads, size]. A step writes into them in place and
    returns them as a new value; the one that it was given is spent, and refused from then on.

    >>> pages = PageSpec(count=3, page_tokens=4, entries=(((2, 8), (2, 8)),), dtype=torch.bfloat16).zeros()
    >>> [list(keys_or_values.shape) for keys_or_values in pages.layers[0]]
    [[4, 4, 2, 8], [4, 4, 2, 8]]
    """

    def __init__(self, spec: PageSpec, layers: tuple[tuple[Tensor, ...], ...]) -> None:
        self.spec, self._layers = spec, layers

    @property
    def layers(self) -> tuple[tuple[Tensor, ...], ...]:
        """The tensors; raises ValueError if a step was given these pages."""
        if self._layers is None:
            raise ValueError(
                "these pages were given to a step or a call, which writes into them; use those that it returned"
            )
        return self._layers

    def donate(self) -> Pages:
        """The same tensors as a new value; this one is spent."""
        successor = Pages(self.spec, self.layers)
        self._layers = None
        return successor


@checked()
def page_spec(model: Model, plan: Plan, count: int, *, page_tokens: int = PAGE_TOKENS, dtype: Any = None) -> PageSpec:
    """The PageSpec of a model on a rank of the plan's mesh: tp splits heads, and DeepSeek's latents are whole.

    count: pages, of `page_tokens` positions each. dtype: of keys and values; None: that of the parameters; int8 and
    float8_e4m3fn: codes, with a float32 scale for each position and head. Raises ValueError for a count or page_tokens
    below 1, and codes for a model without entries of its own.

    >>> from fzero import models, one_process, zero_plan
    >>> model = models.build(models.LlamaConfig(32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32))
    >>> page_spec(model, zero_plan(0, model, one_process()), 10, dtype=torch.float32).entries
    (((2, 4), (2, 4)), ((2, 4), (2, 4)))
    """
    if dtype in PAGE_CODES and not entry_shapes(model):
        raise ValueError(
            f"a cache in {dtype} is for keys and values of fzero's own attention, and this model has none; leave it out"
        )
    if causal := causal_module(model):
        if entries := causal.paging(plan.mesh).entries:
            return PageSpec(count, page_tokens, entries, dtype or plan.policy.compute)
        return PageSpec(count, page_tokens, (((1, 1),),), torch.int64)
    shapes = entry_shapes(model, plan.mesh.tp.size)
    return PageSpec(count, page_tokens, (shapes,) * body_of(model.config).n_layers, dtype or plan.policy.compute)


def entry_shapes(model: Model, tp: int = 1) -> tuple[tuple[int, int], ...]:
    """The shapes of a layer's entries of one position on a rank of tp."""
    c = body_of(model.config)
    if isinstance(c, DeepSeekConfig):
        return ((1, c.kv_rank + c.rope_dim),)
    if isinstance(c, (LlamaConfig, GPT2Config)):
        shape = max(1, getattr(c, "n_kv_heads", c.n_heads) // tp), getattr(c, "key_dim", c.d_model // c.n_heads)
        return (shape, shape)
    return ()


def causal_module(model: Model) -> Any:
    """What generates by the code of a module; None for another model. Raises ValueError for a module without logits."""
    return model.traits.causal() if model.traits.causal else None


def recompute_reason(model: Model, mesh: Mesh) -> str:
    """Why each step computes all positions of a row again; "" where pages have entries of them."""
    causal = causal_module(model)
    return causal.paging(mesh).reason if causal else ""


def text_sizes(model: Model) -> tuple[int, int]:
    """(vocabulary, the most positions) of a model."""
    sizes = model.config if hasattr(model.config, "vocab_size") else causal_module(model)
    return sizes.vocab_size, sizes.max_len


def dtype_of(params: Tree) -> torch.dtype:
    """The dtype of parameters, of which a step's activations and pages are."""
    return next((x.dtype for x in pytree.leaves(params) if x.dtype.is_floating_point), torch.float32)


def pages_for(tokens: Sequence[int] | int, page_tokens: int) -> int:
    """The pages of so many positions."""
    return -(-(tokens if isinstance(tokens, int) else len(tokens)) // page_tokens)
