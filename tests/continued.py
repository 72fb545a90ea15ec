"""Rows of tokens continued by `fzero.generate.completions`, as tests of models use it."""

import torch

from fzero.generate import GenerateOptions, Prompt, Sampling, completions


def rows(model, params, tokens, n, *, vocab_size=None, eos=(), **sampling):
    """The ids of each row of tokens [B, T] with up to n more behind them, the likeliest ones if nothing is said."""
    sampling = Sampling(**{"temperature": 0.0, "max_tokens": n, **sampling})
    prompts = [Prompt(tuple(row), sampling, number) for number, row in enumerate(tokens.tolist())]
    options = GenerateOptions(vocab_size=vocab_size, ends=tuple(eos))
    found = {c.number: c.ids for c in completions(model, params, prompts, options=options)}
    return [[*prompt.ids, *found[prompt.number]] for prompt in prompts]


def whole(model, params, tokens, n, **options):
    """The same as int64 [B, T + n]."""
    return torch.tensor(rows(model, params, tokens, n, **options))
