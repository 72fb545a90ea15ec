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
from fzero.generate.drafts import Draft
from fzero.generate.page_pool import PagePool, empty_pool
from fzero.generate.pages import Pages, PageSpec, causal_module
from fzero.models import Model
from fzero.sharding import Plan, digest_text, one_process, zero_plan


class PrefixCache(NamedTuple):
    """Pages, what is in them, and the log-probs of prompts beside them; from `prefix_cache`.

    A call of `completions` that is given one writes into it, and has another in its place; the old one is refused.

    >>> from fzero.generate import PageSpec
    >>> spec = PageSpec(count=3, page_tokens=4, entries=(((2, 8), (2, 8)),), dtype=torch.bfloat16)
    >>> PrefixCache.zeros(spec).pool.available
    3
    """

    pages: Pages
    pool: PagePool
    scores: dict[int, float]  # of a prompt's tokens, by the line of their position, counted through all pages
    draft_pages: Pages | None = None  # those of a draft model, of the same numbers

    @classmethod
    def zeros(
        cls, spec: PageSpec, draft_spec: PageSpec | None = None, device: torch.device | str = "cpu"
    ) -> PrefixCache:
        """The cache of pages that hold nothing."""
        draft_pages = draft_spec and draft_spec.zeros(device)
        return cls(spec.zeros(device), empty_pool(spec.count, spec.page_tokens), {}, draft_pages)


def expect_cache(
    cache: PrefixCache, spec: PageSpec, draft_spec: PageSpec | None, count: int | None, device: torch.device
) -> None:
    """Raise ValueError for a cache whose pages are not those of a call. count: the number that its options say."""
    cache_spec = cache.pages.spec
    device = torch.empty(0, device=device).device  # with its number
    (cache_device,) = {x.device for layer in cache.pages.layers for x in layer} or {device}
    pairs: dict[str, tuple[Any, Any]] = {
        "count": (cache_spec.count, count or cache_spec.count),
        "device": (cache_device, device),
    }
    pairs |= {name: (getattr(cache_spec, name), getattr(spec, name)) for name in ("page_tokens", "entries", "dtype")}
    pairs["a draft's pages"] = cache.draft_pages and cache.draft_pages.spec, draft_spec
    for name, (value, needed) in pairs.items():
        if value != needed:
            raise ValueError(
                f"the cache is of pages with {name} {value}, and this call needs {needed}; give it one of "
                "generate.prefix_cache with its own arguments, or none"
            )


def root_of(
    model: Model,
    params: Tree,
    plan: Plan,
    spec: PageSpec,
    kernels: str,
    device: torch.device,
    draft: Draft | None,
) -> bytes:
    """The root of the prefixes of a call; all ranks of the mesh call it together."""
    weights = digest_text(params, plan.params, plan.mesh)
    numbers = [*_code_of(model), weights, kernels, spec.dtype, plan.mesh.tp.size, device.type]
    if draft:  # whose pages have the same prefixes
        draft_plan = zero_plan(0, draft.model, one_process())
        numbers += [*_code_of(draft.model), digest_text(draft.params, draft_plan.params, draft_plan.mesh)]
    text = repr(tuple(numbers))
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def _code_of(model: Model) -> tuple[Any, ...]:
    """What says how a model computes; a module's code is no value, so that no other model has its pages."""
    causal = causal_module(model)
    return (model.config,) if causal is None else (model.config, causal.number)
