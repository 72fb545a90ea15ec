"""Completions of prompts, and pages that outlive a call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

from fzero.core.arguments import checked
from fzero.core.pytree import Tree
from fzero.generate.decoding import Decoding, OnStep, OnToken, device_of, page_specs
from fzero.generate.drafts import expect_draft
from fzero.generate.prefixes import PrefixCache
from fzero.generate.prompts import Completion, GenerateOptions, Prompt
from fzero.generate.sequences import sequences_of
from fzero.generate.step import expect_generates, expect_params
from fzero.models import Model
from fzero.sharding import Plan, one_process, zero_plan


@checked("params")
def completions(
    model: Model,
    params: Tree,
    prompts: Sequence[Prompt],
    *,
    plan: Plan | None = None,
    options: GenerateOptions = GenerateOptions(),  # noqa: B008
    cache: PrefixCache | None = None,
    on_token: OnToken = lambda number, sample, token, text: None,
    on_step: OnStep = lambda tokens, pages: None,
) -> Completions:
    """Return an iterator over the Completion of each sample of each prompt, as soon as it has ended.

    What is drawn depends on a prompt's ids, sampling and number alone, not on what runs beside it; with
    kernels="canonical" to the last bit. No expert drops a token, whatever capacity it was trained with.
    plan: of `params`; None: they are whole here. On a mesh all ranks call it with the same prompts; those of dp and rp
    share them out, and each yields its own. cache: the pages
    to use, of `prefix_cache` or an earlier call, which are spent; the iterator's `cache` has those to go on with.
    on_token: called with (number, sample, token, text that is certain now) as
    tokens are drawn; on_step with (tokens that it computed, pages in use) behind each step.

    Raises ValueError for a prompt that is empty, has an id outside of the vocabulary, does not fit the model's max_len
    or the pages, two prompts of one number, a cache of other pages or that another call was given, a draft that cannot
    guess, parameters of another model, and as `make_step`.

    >>> from fzero import generate, models, random
    >>> model = models.build(models.LlamaConfig(32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32))
    >>> params = models.init_params(model, random.key(0))
    >>> prompt = generate.Prompt((1, 2, 3), generate.Sampling(0.0, max_tokens=4))
    >>> [len(completion.ids) for completion in generate.completions(model, params, [prompt])]
    [4]
    """
    plan = plan or zero_plan(0, model, one_process())
    expect_generates(model, plan)
    expect_params(params, plan)
    device = device_of(params, options)
    mesh = plan.mesh
    sequences = sequences_of(model, prompts, options)
    if options.draft:
        longest = max((len(s.prompt.ids) + s.new_tokens for s in sequences), default=0)
        expect_draft(options.draft, model, plan, options.vocab_size, longest)
    sequences = sequences[mesh.data_rank :: mesh.data_size]
    decoding = Decoding(model, params, plan, options, sequences, device, cache)
    return Completions(decoding.steps(on_token, on_step), decoding.cache, lambda: (decoding.verified, decoding.right))


class Completions(Iterator[Completion]):
    """The completions of a call of `completions`, as they end.

    >>> from fzero import generate, models, random
    >>> model = models.build(models.LlamaConfig(32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32))
    >>> params = models.init_params(model, random.key(0))
    >>> out = generate.completions(model, params, [generate.Prompt((1, 2, 3), generate.Sampling(max_tokens=4))])
    >>> len(next(out).ids), list(out)
    (4, [])
    """

    def __init__(
        self,
        steps: Generator[Completion, None, None],
        cache: Callable[[], PrefixCache],
        guesses: Callable[[], tuple[int, int]],
    ) -> None:
        self._steps, self._cache, self._guesses = steps, cache, guesses

    def __next__(self) -> Completion:
        return next(self._steps)

    def close(self) -> None:
        """End them: those that have not ended are given up."""
        self._steps.close()

    @property
    def guesses(self) -> tuple[int, int]:
        """How many guesses steps have verified, and how many of these were what was drawn."""
        return self._guesses()

    @property
    def cache(self) -> PrefixCache:
        """The cache that the call was given, with what it computed; ends the completions. Raises ValueError if it was
        given none."""
        self.close()
        return self._cache()


@checked("params")
def prefix_cache(
    model: Model,
    params: Tree,
    count: int,
    *,
    plan: Plan | None = None,
    options: GenerateOptions = GenerateOptions(),  # noqa: B008
) -> PrefixCache:
    """Return `count` empty pages for calls of `completions` with these arguments, which leave there what they compute.

    Prompts of a later call that begin alike take keys and values from there; their log-probs are those without, with
    kernels="canonical" to the last bit. After other weights, adapters or kernels nothing is found. Least recently used
    pages go first. Raises ValueError for a count below 1, and parameters of another model.

    >>> from fzero import generate, models, random
    >>> model = models.build(models.LlamaConfig(32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=32))
    >>> params, computed = models.init_params(model, random.key(0)), []
    >>> cache = generate.prefix_cache(model, params, 100)
    >>> calls = {"on_step": lambda tokens, pages: computed.append(tokens)}
    >>> for _ in range(2):
    ...     prompt = generate.Prompt((1, 2) * 20, generate.Sampling(max_tokens=1))
    ...     out = generate.completions(model, params, [prompt], cache=cache, **calls)
    ...     texts, cache = list(out), out.cache
    >>> computed  # of 40 tokens, 32 fill two pages
    [40, 8]

    Ref: Zheng et al. 2023, "SGLang", arXiv:2312.07104, section 3.
    """
    plan = plan or zero_plan(0, model, one_process())
    expect_generates(model, plan)
    expect_params(params, plan)
    specs = page_specs(model, params, plan, options, count)
    return PrefixCache.zeros(*specs, device_of(params, options))
