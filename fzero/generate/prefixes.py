"""Pages that a caller has between calls, so that prompts that begin as earlier ones did find their keys and values.

What a key or value depends on beside the tokens is in the root of the prefixes' hash: the model's config, the digest of
all weights (those of an adapter are among them), the form of the kernels, dtypes, tp and device. So another model finds
nothing, and its pages and those of the first share the memory. The digest reads the weights once a call, as a step that
draws one token does; the identity of tensors would not do, as training may change them in place.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch

from fzero.core.pytree import Tree
from fzero.generate.page_pool import PagePool, empty_pool
from fzero.generate.pages import Pages, PageSpec
from fzero.models import Model
from fzero.sharding import Plan, digest_text


class PrefixCache(NamedTuple):
    """Pages, what is in them, and the log-probs of prompts beside them; from `prefix_cache`.

    A call of `completions` that is given one writes into it, and has another in its place; the old one is refused.

    >>> from fzero.generate import PageSpec
    >>> spec = PageSpec(count=3, page_tokens=4, entries=(((2, 8), (2, 8)),), dtype=torch.bfloat16)
    >>> PrefixCache.of_pages(spec.zeros()).pool.available
    3
    """

    pages: Pages
    pool: PagePool
    scores: dict[int, float]  # of a prompt's tokens, by the line of their position, counted through all pages

    @classmethod
    def of_pages(cls, pages: Pages) -> PrefixCache:
        """The cache of pages that hold nothing."""
        return cls(pages, empty_pool(pages.spec.count, pages.spec.page_tokens), {})


def expect_cache(cache: PrefixCache, spec: PageSpec, asked: int | None, device: torch.device) -> None:
    """Raise ValueError for a cache whose pages are not those of a call. asked: the number that its options say."""
    own = cache.pages.spec
    device = torch.empty(0, device=device).device  # with its number
    (on,) = {x.device for layer in cache.pages.layers for x in layer} or {device}
    pairs: dict[str, tuple[Any, Any]] = {"count": (own.count, asked or own.count), "device": (on, device)}
    pairs |= {name: (getattr(own, name), getattr(spec, name)) for name in ("page_tokens", "entries", "dtype")}
    for name, (has, wanted) in pairs.items():
        if has != wanted:
            raise ValueError(
                f"the cache is of pages with {name} {has}, and this call needs {wanted}; give it one of "
                "generate.prefix_cache with its own arguments, or none"
            )


def root_of(model: Model, params: Tree, plan: Plan, spec: PageSpec, kernels: str, device: torch.device) -> bytes:
    """The root of the prefixes of a call; all ranks of the mesh call it together."""
    weights = digest_text(params, plan.params, plan.mesh)
    text = repr((model.config, weights, kernels, spec.dtype, plan.mesh.tp.size, device.type))
    return hashlib.blake2b(text.encode(), digest_size=32).digest()
