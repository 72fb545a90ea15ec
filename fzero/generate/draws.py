"""Draws of tokens that depend on no batch, and their log-probabilities.

The noise of a token has the key fold_in(fold_in(fold_in(key(seed), request), sample), position) and the number of its
element is the token's id, so that a row draws the same alone, in any batch, on any machine, and whether all tokens are
candidates or few. A token is drawn as the largest of logits / temperature + Gumbel noise over the tokens that are left.

Every number of a row is computed from that row, in an order that its width alone fixes. Ref: Gumbel 1954; Maddison et
al. 2014, "A* sampling", section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import prng
from fzero.core.prng_rows import uniform_rows
from fzero.generate.rows import DrawRow, DrawRows, Limits, draw_rows

F64 = torch.float64
WIDTH = 256  # tokens, the likeliest first, among which top_k, top_p and min_p are looked for before all are sorted
# Logits that are worked on at a time: temporaries of this size fit in a CPU's cache, and leave a GPU's memory free.
ELEMENTS = {"cpu": 1 << 17}
ELEMENTS_ELSEWHERE = 1 << 23
CANDIDATES = 8  # tokens whose noise is computed, those for which a bound of it is largest
SLACK = 1e-6  # of top_p: the sum over all tokens is rounded to float32
COEFFICIENTS = [1.0 / math.factorial(n) for n in range(12, -1, -1)]  # of the exponential, highest power first
LIMITED = ("top_k", "top_p", "min_p")
CLOSE = 1e-9  # of scores by torch.log, whose last bits depend on an element's place


class Alternatives(NamedTuple):
    """The likeliest tokens of each row, the likeliest first."""

    ids: Tensor  # int64 [M, A]
    log_probs: Tensor  # float32 [M, A], of the whole vocabulary at temperature 1


class TokenDraws(NamedTuple):
    """Drawn tokens, a row each."""

    tokens: Tensor  # int64 [M]
    log_probs: Tensor  # float32 [M], of the whole vocabulary at temperature 1: what the trainer's loss is of
    drawn_log_probs: Tensor  # float32 [M], of the distribution that it was drawn from; 0 for the likeliest token
    mass: Tensor  # float32 [M]: what top_k, top_p and min_p left of the distribution, 1: all
    alternatives: Alternatives | None  # None if no row asks for any


def log_sum_exp(x: Tensor) -> Tensor:
    """[M] of x [M, V], by `torch.log_softmax`, which sums a row in the same order whatever is beside it.

    >>> log_sum_exp(torch.zeros(1, 4)).exp()
    tensor([4.])
    """
    if x.device.type != "cpu":  # a GPU's order depends on the alignment of a row
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % 64), value=-math.inf)
    step = _step(x)
    if len(x) <= step:
        return x.amax(-1) - x.log_softmax(-1).amax(-1)
    return torch.cat([rows.amax(-1) - rows.log_softmax(-1).amax(-1) for rows in x.split(step)])


def _step(x: Tensor) -> int:
    """How many rows of x [M, V] are worked on at a time."""
    return max(1, ELEMENTS.get(x.device.type, ELEMENTS_ELSEWHERE) // max(x.shape[-1], 1))


def score(
    logits: Tensor,
    tokens: Tensor,
    *,
    alternatives: int = 0,
    log_sum_exp: Callable[[Tensor], Tensor] = log_sum_exp,
) -> tuple[Tensor, Alternatives | None]:
    """The log-probabilities float32 [M] of tokens int64 [M] under logits float32 [M, V], and of the likeliest ones.

    log_sum_exp: from [M, V] to [M], a row by itself; that of the trainer's loss gives its bits.

    >>> score(torch.zeros(1, 4), torch.tensor([2]))[0].exp()
    tensor([0.2500])
    """
    lse = log_sum_exp(logits)
    likeliest = None
    if alternatives:
        values, ids = _likeliest(logits, min(alternatives, logits.shape[-1]))
        likeliest = Alternatives(ids, values - lse[:, None])
    return logits.gather(-1, tokens[:, None])[:, 0] - lse, likeliest


@torch.no_grad()
def draw(
    logits: Tensor,
    rows: DrawRows,
    *,
    vocab_size: int | None = None,
    log_sum_exp: Callable[[Tensor], Tensor] = log_sum_exp,
) -> TokenDraws:
    """One token for each row of logits [M, V], float32 or wider.

    vocab_size: only ids below are drawn. log_sum_exp: see `score`. Raises ValueError if a row has no logit that is a
    number, and if nothing is left to draw from it.

    >>> from fzero.generate.rows import DrawRow, draw_rows
    >>> from fzero.generate.sampling import Sampling
    >>> logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(2, 3)
    >>> rows = draw_rows([DrawRow(Sampling(0.0), 0), DrawRow(Sampling(0.0, bias={0: -5.0}), 0)])
    >>> draw(logits, rows).tokens
    tensor([0, 1])
    """
    if logits.ndim != 2 or len(logits) != len(rows.keys) or not len(logits):
        raise ValueError(f"logits are {list(logits.shape)}; they must be [{len(rows.keys)}, V], a row for each draw")
    if logits.dtype not in (torch.float32, F64):
        raise ValueError(f"logits are {logits.dtype}; they must be float32, in which a row's sum is computed")
    lse = _finite(log_sum_exp(logits), "the model gives NaN or infinity")
    y = _edited(logits[:, :vocab_size], rows)
    changed = rows.edited or rows.temperature is not None or y.shape != logits.shape
    functions = ((rows.likeliest, _take_likeliest), (rows.unlimited, _draw_unlimited), (rows.limited, _draw_limited))
    chunks: list[tuple[Any, ...]] = []
    step = _step(y)
    for index, function in functions:
        if function is _draw_limited:
            step = max(step, ELEMENTS_ELSEWHERE // max(y.shape[1], 1))
        for start in range(0, len(index), step):
            chunk = index[start : start + step]
            if len(index) == len(logits):  # all rows: views of them
                chunk = slice(start, start + step)
            z = y[chunk] if rows.temperature is None else y[chunk] / rows.temperature[chunk, None].to(y.dtype)
            z_lse = lse[chunk]
            if changed:
                z_lse = _finite(log_sum_exp(z), "its mask, bias and min_tokens leave no token to draw", chunk)
            limits = rows.limits
            if limits is not None:
                limits = limits._replace(**{name: getattr(limits, name)[start : start + step] for name in LIMITED})
            chunks.append((chunk, *function(z, z_lse, rows.keys[chunk], limits)))
    columns: list[Any] = list(zip(*chunks))
    tokens, drawn_log_probs, mass = (torch.cat(x) if len(x) > 1 else x[0] for x in columns[1:])
    if not isinstance(columns[0][0], slice):
        order = torch.cat(columns[0]).argsort()
        tokens, drawn_log_probs, mass = tokens[order], drawn_log_probs[order], mass[order]
    log_probs, alternatives = score(logits, tokens, alternatives=rows.alternatives, log_sum_exp=lambda _: lse)
    return TokenDraws(tokens, log_probs, drawn_log_probs, mass, alternatives)


def draw_by_row(logits: Tensor, rows: Sequence[DrawRow], *, label: str = "", **options: Any) -> TokenDraws:
    """`draw` of rows that are no tensors yet; where nothing can be drawn the error has the label, and names the row."""
    try:
        return draw(logits, draw_rows(rows, logits.device), **options)
    except NoProbabilities as error:
        row = rows[error.row]
        text = f"prompt {row.request}, sample {row.sample}, token {len(row.output)}: {error.reason}"
        raise ValueError(label + text) from None


def _take_likeliest(z: Tensor, lse: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(token, its log-probability among what is left, the mass of that) of each row of z [R, V]."""
    values, tokens = z.max(-1)  # of equals the first
    return tokens, torch.zeros_like(values), _map_numbers(math.exp, values - lse)


def _draw_unlimited(z: Tensor, lse: Tensor, keys: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As `_take_likeliest`, of all tokens."""
    tokens = _race(z, keys)
    log_probs = z.gather(-1, tokens[:, None])[:, 0] - lse
    return tokens, log_probs, torch.ones_like(log_probs, dtype=torch.float32)


class NoProbabilities(ValueError):
    """A row of logits from which no token can be drawn."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row} of the logits has no probabilities: {reason}")
        self.row, self.reason = row, reason


def _finite(lse: Tensor, reason: str, rows: Tensor | slice = slice(None)) -> Tensor:
    """The log-sum-exp of those rows; raises NoProbabilities unless all are numbers."""
    if not math.isfinite(float(lse.sum())):
        wrong = int((~lse.isfinite()).nonzero()[0])
        wrong = wrong + (rows.start or 0) if isinstance(rows, slice) else int(rows[wrong])
        raise NoProbabilities(wrong, reason)
    return lse


def _map_numbers(function: Callable[[float], float], x: Tensor) -> Tensor:
    """The function of each number, float32: vector units round some by their place, a single call does not."""
    return torch.tensor([function(value) for value in x.tolist()], dtype=torch.float32, device=x.device)


def _edited(logits: Tensor, rows: DrawRows) -> Tensor:
    """The logits behind bias, penalties and what is forbidden."""
    if not rows.edited:
        return logits
    y = logits.clone()
    changes = (
        (rows.bias, torch.add),
        (rows.repetition, _repeat),
        (rows.penalty, torch.sub),
        (rows.forbidden, torch.add),
    )
    for entries, change in changes:
        if entries is not None:
            index = (entries.rows, entries.ids)
            y[index] = change(y[index], entries.values.to(y.dtype))
    for row, mask in rows.masks:
        y[row, : len(mask)].masked_fill_(~mask[: y.shape[1]], -math.inf)
        y[row, len(mask) :] = -math.inf
    return y


def _repeat(logits: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def _race(z: Tensor, keys: Tensor) -> Tensor:
    """The token of each row of z [R, V]. Tokens with the largest bounds get a score, until it is above all bounds."""
    bound = uniform_rows(keys, z.shape[1], 1.0, 0.0).log_().neg_().add_(z)  # of 1 - u: -log u is not below it
    width = min(z.shape[1], CANDIDATES)
    while True:
        bounds, ids = bound.topk(width)
        tokens, scores = _winners(z.gather(-1, ids).double(), ids, keys)
        last = bounds[:, -1].double()
        if width == z.shape[1] or bool((scores > last + 1e-3 + 1e-6 * last.abs()).all()):
            return tokens
        width = min(8 * width, z.shape[1])


def _winners(values: Tensor, ids: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """(id, sum) of the largest value + noise of each row; values float64 [R, C], -inf for none; ids int64 [R, C]."""
    u = uniform_rows(keys, ids.shape[1], dtype=F64, index=ids)
    scores = values - (-u.log()).log()
    best = scores.topk(min(2, ids.shape[1]))
    first, second = best.values[:, :1], best.values[:, 1:]
    if bool((first - second <= CLOSE * (1.0 + first.abs())).any()):
        best = (values - prng.log(-prng.log(u))).max(-1, keepdim=True)
    return ids.gather(-1, best.indices[:, :1])[:, 0], best.values[:, 0]


def _draw_limited(z: Tensor, lse: Tensor, keys: Tensor, limits: Limits | None) -> tuple[Tensor, Tensor, Tensor]:
    """As `_take_likeliest`, of the tokens that are left by limits."""
    assert limits is not None
    width = min(z.shape[1], limits.largest_k + 16 if limits.smallest_k else max(WIDTH, limits.largest_k + 16))
    while True:
        values, ids = _likeliest(z, width)
        counts, sums = _counts(values := values.double(), lse.double(), limits)
        # A likelier token than the last that was looked at has all its equals here, in the order of their ids.
        last = values.gather(-1, counts[:, None] - 1)
        if width == z.shape[1] or bool((last > values[:, -1:]).all()):
            break
        width = min(8 * width, z.shape[1])
    width = int(counts.max())
    values, ids = values[:, :width], ids[:, :width]
    candidates = torch.arange(width, device=z.device) < counts[:, None]
    tokens, _ = _winners(values.masked_fill(~candidates, -math.inf), ids, keys)
    shifted = values.gather(-1, (ids == tokens[:, None]).int().argmax(-1, keepdim=True))[:, 0] - values[:, 0]
    log_sums = _map_numbers(math.log, sums)
    mass = _map_numbers(lambda x: min(math.exp(x), 1.0), log_sums.double() + values[:, 0] - lse.double())
    return tokens, (shifted - log_sums).to(lse.dtype), mass


def _likeliest(z: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(values, ids) [R, width] of the likeliest tokens, the likeliest first, of equals the one with the lower id."""
    ids = torch.topk(z, width, sorted=False).indices.sort(-1).values
    values, order = z.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _counts(values: Tensor, lse: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """(how many of the likeliest tokens are candidates, int64 [R]; the sum of their weights exp(value - largest))."""
    shifted = values - values[:, :1]
    width = values.shape[1]
    kth = shifted.gather(-1, (limits.top_k[:, None] - 1).clamp(0, width - 1))
    candidates = (shifted >= limits.min_p[:, None]) & ((limits.top_k[:, None] == 0) | (shifted >= kth))
    candidates &= shifted > -math.inf
    weights = _exp(torch.cat((shifted, lse[:, None] - values[:, :1]), -1))
    sums = _prefix_sums(torch.where(candidates, weights[:, :-1], 0.0))
    counts = candidates.sum(-1, keepdim=True)
    unlimited = (limits.top_k == 0) & (limits.min_p == -math.inf)
    total = torch.where(unlimited[:, None], weights[:, -1:], sums.gather(-1, counts - 1))
    preceding_sums = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    candidates = candidates & (
        (preceding_sums < limits.top_p[:, None] * (1.0 - SLACK) * total) | (limits.top_p[:, None] == 1.0)
    )
    counts = candidates.sum(-1, keepdim=True)
    return counts[:, 0], sums.gather(-1, counts - 1)[:, 0]


def _prefix_sums(x: Tensor) -> Tensor:
    """The sum of x [R, C] up to each element, in an order that depends on the element's number alone: one after the
    other on a CPU; elsewhere as Hillis and Steele 1986, "Data parallel algorithms".
    """
    if x.device.type == "cpu":
        return x.cumsum(-1)
    distance = 1
    while distance < x.shape[-1]:
        x = torch.cat((x[:, :distance], x[:, distance:] + x[:, :-distance]), -1)
        distance *= 2
    return x


def _exp(x: Tensor) -> Tensor:
    """The exponential of float64 values by exact steps only (see `prng.log`), to 1e-14 of each; 0 below -708."""
    exponent = torch.round(x * (1.0 / math.log(2.0))).clamp(-1022.0, 1022.0)
    # log 2 in two parts, the first with 33 bits, so that its products are exact (Cody and Waite 1980).
    remainder = (x - exponent * 0.693147180369123816490) - exponent * 1.90821492927058770002e-10
    series = remainder * COEFFICIENTS[0] + COEFFICIENTS[1]
    for coefficient in COEFFICIENTS[2:]:
        series.mul_(remainder).add_(coefficient)
    power = ((exponent.to(torch.int64) + 1023) << 52).view(F64)
    return torch.where(x < -708.0, 0.0, series * power)
