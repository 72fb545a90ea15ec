"""How far the sampler's log-probs are from those of the trainer's forward pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.generate.draws import log_sum_exp, score
from fzero.generate.pages import dtype_of
from fzero.generate.prompts import Completion, Prompt
from fzero.generate.step import expect_params
from fzero.kernels import rowwise
from fzero.kernels.registry import Kernels
from fzero.models import Ctx, Model, forward
from fzero.sharding import one_process, zero_plan


class Mismatch(NamedTuple):
    """The sampler's log-probs of drawn tokens less the trainer's, in nats.

    >>> print(Mismatch(tokens=8, equal=6, mean=1e-7, largest=4e-7, ratios=(0.999999, 1.000001)))
    8 tokens: 75.0% of the log-probs are the trainer's to the bit, the others differ by 4e-07 at most (mean of all \
1e-07); ratios of sequences 0.999999 to 1
    """

    tokens: int
    equal: int  # of them with the same bits
    mean: float  # of the magnitudes
    largest: float
    ratios: tuple[float, float]  # least and largest exp of a sequence's sum of differences, 1: the same

    def __str__(self) -> str:
        low, high = self.ratios
        return (
            f"{self.tokens} tokens: {self.equal / max(self.tokens, 1):.1%} of the log-probs are the trainer's to the "
            f"bit, the others differ by {self.largest:.3g} at most (mean of all {self.mean:.3g}); ratios of sequences "
            f"{low:.6g} to {high:.6g}"
        )


@checked("params")
def mismatch(
    model: Model,
    params: Tree,
    prompts: Sequence[Prompt],
    completions: Iterable[Completion],
    *,
    kernels: str = "auto",
) -> Mismatch:
    """Return how far the log-probs of completions are from those of a forward pass of training over the whole texts.

    params: whole, those that drew. prompts: of the completions. kernels: those of training. One text is computed at a
    time, with logits [T, V]. Raises ValueError for a completion without its prompt, and parameters of another
    model.

    >>> from fzero import generate, models, random
    >>> model = models.build(models.LlamaConfig(32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32))
    >>> params = models.init_params(model, random.key(0))
    >>> prompts = [generate.Prompt((1, 2, 3), generate.Sampling(max_tokens=4))]
    >>> mismatch(model, params, prompts, generate.completions(model, params, prompts)).largest < 1e-5
    True

    Ref: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".
    """
    expect_params(params, zero_plan(0, model, one_process()))
    by_number = {prompt.number: prompt for prompt in prompts}
    ctx = Ctx(dtype=dtype_of(params), kernels=Kernels.parse(kernels))
    lse = functools.partial(rowwise.log_sum_exp, impl="canonical") if ctx.kernels.canonical else log_sum_exp
    differences: list[Tensor] = []
    for completion in completions:
        if completion.number not in by_number:
            raise ValueError(f"there is a completion of prompt {completion.number}, which is not among the prompts")
        ids = by_number[completion.number].ids
        text = torch.tensor([[*ids, *completion.ids]], device=pytree.leaves(params)[0].device)
        with torch.no_grad():
            logits = forward.logits(model, params, {"tokens": text[:, :-1]}, ctx)[0, len(ids) - 1 :]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        trainer, _ = score(logits, text[0, len(ids) :], log_sum_exp=lse)
        sampler = torch.tensor(completion.log_probs, dtype=torch.float64)
        differences.append(sampler - trainer.double().cpu())
    every = torch.cat(differences) if differences else torch.zeros(0, dtype=torch.float64)
    ratios = [math.exp(float(difference.sum())) for difference in differences] or [1.0]
    largest, mean = (float(f(every.abs())) if len(every) else 0.0 for f in (torch.max, torch.mean))
    return Mismatch(len(every), int((every == 0).sum()), mean, largest, (min(ratios), max(ratios)))
