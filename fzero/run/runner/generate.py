"""Generation with a KV cache: one pass over the prompt, then one position at a time, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fzero.core import prng, pytree
from fzero.core.copy_buckets import read_scalars
from fzero.core.pytree import Tree
from fzero.models import Cache, Ctx, Model
from fzero.models.configs import head_of
from fzero.models.forward import prepare
from fzero.sharding import Plan, one_process, zero_plan
from fzero.sharding.prefetch import LeafGroup, ParamFetcher, Prefetcher
from fzero.train.stage_sharing import Segment, segments_of

FILL = 64  # positions: a module's code is traced anew for each number of them


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from its logits: temperature (0: the likeliest), top_k, top_p; checked."""

    # the logits are divided by it; 0 takes the likeliest token
    temperature: float = 1.0  # the logits are divided by it; 0 takes the likeliest token
    top_k: int = 0  # draw among the k likeliest; 0: all
    # among the fewest whose probabilities add up to p (Holtzman et al. 2020, section 3.1)
    top_p: float = 1.0  # among the fewest whose probabilities add up to p (Holtzman et al. 2020, section 3.1)

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be finite and at least 0 (0: the likeliest)")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 0 (0: all tokens)")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.temperature == 0.0 and (self.top_k or self.top_p < 1.0):
            name = "top_k" if self.top_k else "top_p"
            raise ValueError(
                f"{name} is {getattr(self, name)} and temperature 0, which takes the likeliest token; leave {name} "
                "out, or give a temperature above 0"
            )


@torch.no_grad()
def generate(
    model: Model,
    params: Tree,
    tokens: Tensor,
    n: int,
    key: Tensor,
    *,
    sampling: Sampling = Sampling(),
    vocab_size: int | None = None,
    eos: int | Sequence[int] | None = None,
) -> Tensor:
    """The prompt `tokens` (int64 [B, T]) with `n` drawn tokens after it: int64 [B, T + n], or shorter where all rows
    have met `eos`, or one of its ids.

    sampling: how a token is drawn from the logits. vocab_size: only ids below are drawn. The draw at a position depends
    on the key and the position only, so the same key gives the same text. Computes in the dtype of the
    parameters, on the device of the tokens.
    A model of transformers' own code has no cache: it computes all positions for every token.
    Parameters on a disk (DiskTensor) are read part by part, each while the one before it computes, for every token
    anew. Raises ValueError for an empty prompt, T + n above the model's max_len, and an id outside the
    vocabulary."""
    if head_of(model.config) is not None:
        raise ValueError(
            "the model has a head of scores, which says no text; models.logits gives them, and fzero export writes a "
            "folder for AutoModelForSequenceClassification"
        )
    plan = zero_plan(0, model, one_process())
    batch, length = tokens.shape
    vocab = min(vocab_size or model.config.vocab_size, model.config.vocab_size)
    if length < 1:
        raise ValueError("the prompt has no tokens; give at least one")
    if n < 0:
        raise ValueError(f"{n} new tokens are asked for; it must be at least 0")
    if length + n > model.config.max_len:
        remaining = max(model.config.max_len - length, 0)
        raise ValueError(
            f"{length} tokens of prompt and {n} more do not fit max_len={model.config.max_len}; ask for at "
            f"most {remaining}, or shorten it"
        )
    min_id, max_id = read_scalars([tokens.min(), tokens.max()])
    if max_id >= vocab or min_id < 0:
        raise ValueError(
            f"the prompt has the token {min_id if min_id < 0 else max_id}; the model has the ids 0 to {vocab - 1}"
        )
    caches = make_caches(model, params, batch, length + n, tokens.device) if not model.foreign else []
    cached_len, done = 0, torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    for position in range(length, length + n):
        if model.foreign:  # all positions again, of so many that their number seldom changes
            padded = pad_tokens(tokens, model.config.max_len)
            logits = forward(model, plan, params, padded, [], 0)[:, position - 1, :vocab]
        else:
            logits = forward(model, plan, params, tokens[:, cached_len:], caches, cached_len)[:, -1, :vocab]
        cached_len = position
        new = draw(logits, prng.fold_in(key, position), sampling)
        tokens = torch.cat((tokens, new[:, None]), 1)
        if ends:
            for end in ends:
                done |= new == end
            if bool(done.all()):
                break
    return tokens


def pad_tokens(tokens: Tensor, max_len: int) -> Tensor:
    """Tokens [B, T] with others behind, to a multiple of FILL or max_len."""
    size = min(-(-tokens.shape[1] // FILL) * FILL, max_len)
    return torch.nn.functional.pad(tokens, (0, size - tokens.shape[1]))


def make_caches(model: Model, params: Tree, batch: int, length: int, device: torch.device) -> list[Cache | tuple[()]]:
    """An empty cache of `length` positions per layer on `device`; () for a model without attention."""
    c, dtype = model.config, pytree.leaves(params)[0].dtype
    if not hasattr(c, "n_heads"):
        return [()] * c.n_layers
    shape = (batch, length, getattr(c, "n_kv_heads", c.n_heads), getattr(c, "key_dim", c.d_model // c.n_heads))
    like = {"dtype": dtype, "device": device}
    return [Cache(torch.zeros(shape, **like), torch.zeros(shape, **like), 0) for _ in range(c.n_layers)]


def forward(
    model: Model, plan: Plan, params: Tree, tokens: Tensor, caches: list[Cache | tuple[()]], length: int
) -> Tensor:
    """The logits [B, T, V] of `tokens` that follow `length` positions, which the caches hold and get."""
    parts, batch = segments_of(model, plan), {"tokens": tokens}
    ctx = prepare(model, batch, Ctx(dtype=pytree.leaves(params)[0].dtype))
    caches = [cache._replace(length=length) if cache else () for cache in caches] or [()] * model.config.n_layers
    ahead = Prefetcher(ParamFetcher(params, plan, tokens.device), 1)
    ahead.expect([group for segment in parts for group in segment.groups], "sample")

    def fetch_group(segment: Segment, group: LeafGroup) -> Tree:
        names = [name.removeprefix(f"{segment.name}/") if segment.depth else name for name in group.leaves]
        return pytree.nest(dict(zip(names, ahead.fetch(group))))

    x = None
    for segment in parts[:-1]:
        for i, group in enumerate(segment.groups):
            layer_ctx, f = ctx._replace(cache=caches[segment.first + i]), segment.functions[i % len(segment.functions)]
            if segment.kind == "embed":
                x = f(fetch_group(segment, group), batch, layer_ctx)
            elif segment.kind == "join":
                x = f(fetch_group(segment, group), x, batch, layer_ctx)
            else:
                number = torch.full((), segment.first + i, device=tokens.device)
                x = f(fetch_group(segment, group), x, layer_ctx._replace(layer=number))
    return model.logits(fetch_group(parts[-1], parts[-1].groups[0]), x, ctx)


# Ref: Gumbel 1954; Maddison et al. 2014, "A* sampling", section 2.
def draw(logits: Tensor, key: Tensor, sampling: Sampling) -> Tensor:
    """One token per row of logits [B, V] (int64 [B]), by the largest of logits / temperature + Gumbel noise."""
    logits = logits.double()
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -math.inf)
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(-1, descending=True)
        prefix_mass = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        ordered = ordered.masked_fill(prefix_mass >= sampling.top_p, -math.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    noise = prng.uniform(key, logits.shape, dtype=torch.float64)
    return (logits - (-noise.log()).log()).argmax(-1)
