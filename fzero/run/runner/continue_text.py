"""One text, given out in whole characters as its tokens are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fzero.core.pytree import Tree
from fzero.data.tokenizers import Tokenizer
from fzero.generate import GenerateOptions, Prompt, Sampling, completions
from fzero.models import Model


def continue_text(
    model: Model,
    params: Tree,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    ends: Sequence[int],
    sampling: Sampling,
    *,
    options: Mapping[str, Any],
    write: Callable[[str], None] = lambda text: None,
) -> str:
    """The text of `ids` and of what is drawn after them, up to one of the ids that end it.

    options: fields of GenerateOptions, its device and those of `guess_options`. write: called with the text of the
    prompt, and then with what each token adds; a character whose bytes are of several tokens comes as a whole. Raises
    ValueError as `completions` does.
    """
    ids, decode = tuple(map(int, ids)), tokenizer.decode
    limits = {"vocab_size": tokenizer.vocab_size, "ends": tuple(ends), **options}
    stream = completions(
        model,
        params,
        [Prompt(ids, sampling)],
        options=GenerateOptions(rows=1, decode=decode, **limits),
        on_token=lambda number, sample, token, text: write(text),
    )
    write(decode(ids))
    (completion,) = stream
    return decode(ids) + completion.text
