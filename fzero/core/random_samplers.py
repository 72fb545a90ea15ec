"""Torch's random functions as functions of a key, by what they are called as.

Each takes the draws that are on before its arguments, which are torch's. The n-th draw has a key of its own, and
element e of it the word e.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fzero.core import prng
from fzero.core.graph_tracing import Impure, line


class KeyedNumbers:
    """The draws of one part of a batch, in turn."""

    def __init__(
        self,
        key: Callable[[], Tensor] | None,
        rows: int,
        first: int | Tensor = 0,
        expect: Callable[[Tensor], None] = lambda x: None,
    ):
        # key: makes the key, at the first draw; None: dropouts pass their input, and all else is drawn by a fixed key,
        # as an evaluation wants it. rows: the samples of this part of a batch. first: the number of its first one in
        # the global batch. expect: is called with the input of each dropout, and raises for what may not be dropped
        # there.
        super().__init__()
        self.make_key, self.rows, self.first, self.expect = key, rows, first, expect
        self.number = 0  # draws so far
        self.base_key: Tensor | None = None

    @property
    def disabled(self) -> bool:
        """Whether dropouts pass their input."""
        return self.make_key is None

    def next_site(self, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, int | Tensor]:
        """(the key of the next draw, the index of a tensor's first element in it)."""
        if self.base_key is None:
            self.base_key = prng.key(0, device) if self.make_key is None else self.make_key()
        key, first = self.base_key.to(device), self.first
        first = first.to(device) if isinstance(first, Tensor) else first
        key = prng.fold_in(key, f"draw {self.number}")
        self.number += 1
        if self.rows and shape and shape[0] and shape[0] % self.rows == 0:
            return key, first * (math.prod(shape) // self.rows)
        return prng.fold_in(key, first), 0

    def uniform(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Numbers in (0, 1)."""
        key, first = self.next_site(shape, device)
        return prng.uniform(key, shape, dtype=dtype, first=first)

    def normal(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Normal numbers."""
        key, first = self.next_site(shape, device)
        return prng.normal(key, shape, dtype=dtype, first=first)

    def keep_mask(self, shape: tuple[int, ...], rate: float, device: torch.device) -> Tensor:
        """Which elements a dropout keeps."""
        key, first = self.next_site(shape, device)
        return prng.bernoulli(key, 1.0 - rate, shape, first=first)


Sampler = Callable[..., Tensor]


def may_draw(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether a call of one of SAMPLERS is none of dropout that is off."""
    if function is F.scaled_dot_product_attention:
        return bool(args[4] if len(args) > 4 else (kwargs or {}).get("dropout_p"))
    is_dropout = function.__name__.rstrip("_").endswith("dropout")
    return not is_dropout or bool(args[2] if len(args) > 2 else (kwargs or {}).get("train", True))


def drop(draws: KeyedNumbers, x: Tensor, rate: float) -> Tensor:
    """x with elements zeroed at this rate, and the others divided by the mean kept."""
    draws.expect(x)
    if draws.disabled or rate == 0.0:
        return x
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    if rate == 1.0:
        return x * zero
    return torch.where(draws.keep_mask(tuple(x.shape), rate, x.device), x * (1.0 / (1.0 - rate)), zero)


def dropout(shape: Callable[[Tensor], tuple[int, ...]], to_alpha: bool, inplace: bool) -> Sampler:
    """The sampler of a dropout; to_alpha: what is dropped has SELU's least value."""

    def sampler(draws: KeyedNumbers, input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"{line()}: dropout's rate is {p}; it must be in [0, 1]")
        if not train or p == 0.0:
            return input
        ones = torch.ones(shape(input), dtype=input.dtype, device=input.device)
        if not to_alpha:
            out = drop(draws, input, p) if ones.shape == input.shape else input * drop(draws, ones, p)
        elif draws.disabled:
            out = input
        else:
            draws.expect(input)
            floor_value = -1.7580993408473766
            scale = ((floor_value * floor_value * p + 1.0) * (1.0 - p)) ** -0.5 if p < 1.0 else 0.0
            keep_mask = draws.keep_mask(tuple(ones.shape), p, input.device).to(input.dtype)
            out = (input * keep_mask + (1.0 - keep_mask) * floor_value - floor_value * p) * scale
        return input.copy_(out) if inplace else out

    return sampler


def attention(
    draws: KeyedNumbers,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **scaling: Any,
) -> Tensor:
    """F.scaled_dot_product_attention; with dropout by whole scores, as kernels draw masks by torch's generators."""
    if dropout_p:
        draws.expect(query)
    if draws.disabled or not dropout_p:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **scaling)
    scale = scaling.get("scale")
    if scaling.get("enable_gqa"):
        key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return drop(draws, scores.softmax(-1), dropout_p) @ value


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of a dtype are drawn."""
    return dtype if dtype.is_floating_point else torch.float32


def uniforms(draws: KeyedNumbers, like: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform numbers; rounding may give `low`, and never `high`, as torch's."""
    x = draws.uniform(tuple(like.shape), like.device, wide(like.dtype))
    x = torch.where(x >= 1.0, torch.zeros((), dtype=x.dtype, device=x.device), x)
    return low + (high - low) * x


def normals(draws: KeyedNumbers, like: Tensor, mean: float | Tensor = 0.0, std: float | Tensor = 1.0) -> Tensor:
    """Normal numbers."""
    return mean + std * draws.normal(tuple(like.shape), like.device, wide(like.dtype))


def integers(draws: KeyedNumbers, like: Tensor, low: int, high: int) -> Tensor:
    """Integers in [low, high)."""
    if not 0 < high - low <= 1 << 31:
        raise ValueError(f"{line()}: random integers of [{low}, {high}); there must be 1 to 2^31 of them")
    key, first = draws.next_site(tuple(like.shape), like.device)
    return low + (prng.bits(key, tuple(like.shape), first=first) * (high - low) >> 32)


def exponentials(draws: KeyedNumbers, like: Tensor, lambd: float = 1.0) -> Tensor:
    """Exponential numbers, none of which is 0."""
    return -torch.log(draws.uniform(tuple(like.shape), like.device, torch.float64)) / lambd


def coins(draws: KeyedNumbers, like: Tensor, p: float | Tensor = 0.5) -> Tensor:
    """1 with probability p."""
    return draws.uniform(tuple(like.shape), like.device, torch.float64) < p


def filled(values: Callable[..., Tensor]) -> Sampler:
    """A method that writes random numbers into its tensor."""

    def sampler(draws: KeyedNumbers, x: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        expect_no_generator(generator)
        with torch.no_grad():
            return x.copy_(values(draws, x, *args, **kwargs))

    return sampler


def new_numbers(values: Callable[..., Tensor]) -> Sampler:
    """A function of a size, such as torch.rand."""

    def sampler(draws: KeyedNumbers, *size: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        expect_no_generator(generator)
        like = torch.empty(*size, **kwargs)
        return like.copy_(values(draws, like.detach())) if "out" in kwargs else cast_like(values(draws, like), like)

    return sampler


def numbers_like(values: Callable[..., Tensor]) -> Sampler:
    """A function of a tensor, such as torch.rand_like."""

    def sampler(draws: KeyedNumbers, input: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
        expect_no_generator(generator)
        like = torch.empty_like(input, **kwargs)
        return cast_like(values(draws, like, *args), like)

    return sampler


def cast_like(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of `like`, and with a gradient if it asks for one."""
    x = x.to(like.dtype)
    return x.requires_grad_() if like.requires_grad and not x.requires_grad else x


def bounds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int, tuple[Any, ...]]:
    """(low, high, the other arguments) of torch.randint and its like, whose low may be left out."""
    named = {name: kwargs.pop(name) for name in ("low", "high") if name in kwargs}
    numbers = [x for x in args[:2] if isinstance(x, int)]
    remainder = args[len(numbers) :]
    if "high" not in named:
        named["high"] = numbers.pop()
    return named.get("low", numbers[0] if numbers else 0), named["high"], remainder


def randint(draws: KeyedNumbers, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
    """torch.randint."""
    expect_no_generator(generator)
    low, high, remainder = bounds(args, kwargs)
    size = kwargs.pop("size") if "size" in kwargs else remainder[0]
    kwargs.setdefault("dtype", torch.int64)
    like = torch.empty(size, **kwargs)
    return integers(draws, like, low, high).to(like.dtype)


def randint_like(draws: KeyedNumbers, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch.randint_like."""
    low, high, _ = bounds(args, kwargs)
    like = torch.empty_like(input, **kwargs)
    return integers(draws, like, low, high).to(like.dtype)


def random_(draws: KeyedNumbers, x: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Tensor:
    """Tensor.random_."""
    expect_no_generator(generator)
    max_value = 2 ** min(31, round(1 - math.log2(torch.finfo(x.dtype).eps))) if x.is_floating_point() else 1 << 31
    max_value = (
        min(max_value, torch.iinfo(x.dtype).max) if not x.is_floating_point() and x.dtype != torch.bool else max_value
    )
    low, high, _ = (kwargs.get("from", 0), kwargs.get("to", max_value), ()) if not args else bounds(args, {})
    return x.copy_(integers(draws, x, low, 2 if x.dtype == torch.bool else high))


def normal(draws: KeyedNumbers, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **kwargs: Any) -> Tensor:
    """torch.normal."""
    expect_no_generator(kwargs.pop("generator", None))
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    if not tensors:
        like = torch.empty(size, **kwargs)
        return cast_like(normals(draws, like, mean, std), like)
    with torch.no_grad():
        like = torch.broadcast_tensors(*tensors)[0]
        return normals(draws, like, mean, std)


def bernoulli(draws: KeyedNumbers, input: Tensor, p: float | None = None, *, generator: Any = None) -> Tensor:
    """torch.bernoulli, of probabilities, or of one."""
    expect_no_generator(generator)
    return coins(draws, input, input.detach().double() if p is None else p).to(input.dtype)


def randperm(draws: KeyedNumbers, n: int, *, generator: Any = None, **kwargs: Any) -> Tensor:
    """torch.randperm."""
    expect_no_generator(generator)
    kwargs.setdefault("dtype", torch.int64)
    like = torch.empty(n, **kwargs)
    key, first = draws.next_site((n,), like.device)
    return prng.bits(key, (n,), first=first).argsort(stable=True).to(like.dtype)


def multinomial(
    draws: KeyedNumbers, input: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    """torch.multinomial: the first of exponential clocks to ring, by Efraimidis and Spirakis 2006."""
    expect_no_generator(generator)
    rates = input.detach().double()
    if replacement:
        sums = rates.cumsum(-1)
        thresholds = draws.uniform((*rates.shape[:-1], num_samples), input.device, torch.float64) * sums[..., -1:]
        return torch.searchsorted(sums.contiguous(), thresholds, right=True).clamp(max=rates.shape[-1] - 1)
    return (exponentials(draws, rates) / rates).topk(num_samples, -1, largest=False).indices


def expect_no_generator(generator: Any) -> None:
    """Raise Impure for a generator of the caller's own, whose state is no part of the training's."""
    if generator is not None:
        raise Impure(
            f"{line()}: draws from a torch.Generator, whose state is no part of the training's; leave generator= out, "
            "and the numbers come from the state's key"
        )


element_shape = lambda x: tuple(x.shape)  # noqa: E731
feature_shape = lambda x: (*x.shape[:2], *(1 for _ in x.shape[2:]))  # noqa: E731
SAMPLERS: dict[Any, Sampler] = {
    torch.dropout: dropout(element_shape, False, False),
    torch.dropout_: dropout(element_shape, False, True),
    torch.alpha_dropout: dropout(element_shape, True, False),
    torch.alpha_dropout_: dropout(element_shape, True, True),
    torch.feature_dropout: dropout(feature_shape, False, False),
    torch.feature_dropout_: dropout(feature_shape, False, True),
    torch.feature_alpha_dropout: dropout(feature_shape, True, False),
    torch.feature_alpha_dropout_: dropout(feature_shape, True, True),
    F.scaled_dot_product_attention: attention,
    torch.rand: new_numbers(uniforms),
    torch.randn: new_numbers(normals),
    torch.rand_like: numbers_like(uniforms),
    torch.randn_like: numbers_like(normals),
    torch.randint: randint,
    torch.randint_like: randint_like,
    torch.randperm: randperm,
    torch.normal: normal,
    torch.bernoulli: bernoulli,
    torch.multinomial: multinomial,
    Tensor.bernoulli: bernoulli,
    Tensor.multinomial: multinomial,
    Tensor.uniform_: filled(uniforms),
    Tensor.normal_: filled(normals),
    Tensor.exponential_: filled(exponentials),
    Tensor.bernoulli_: filled(coins),
    Tensor.random_: random_,
}
