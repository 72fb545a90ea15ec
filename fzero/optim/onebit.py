"""1-bit Adam and 1-bit LAMB: once the second moment has settled, ranks send the signs of their momentum in place of
gradients. The sizes of LAMB's updates follow from the warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fzero.core import pytree
from fzero.core.arguments import OPTIMIZER, checked
from fzero.core.autodiff import transforms
from fzero.core.config_tables import AtLeastOne, one_of
from fzero.core.pytree import Tree
from fzero.optim.base import (
    RATIOS,
    Beta,
    GradientTransformation,
    LearningRate,
    NotNegative,
    Pass,
    RankSums,
    Schedule,
    lr_at,
)
from fzero.optim.combine import Mask, check_mask, decay_predicate
from fzero.optim.lamb import check_ratios
from fzero.optim.leafwise import Slot, layer_dims, wide_dtype, without_partial
from fzero.optim.sharded_leaves import ShardedLeaves, layer_norm2, on_shards
from fzero.optim.wrappers import clip_ratio
from fzero.sharding.error_feedback import SCALES, SignSums
from fzero.sharding.slices import STACKED
from fzero.sharding.spec import Spec

Scale = Annotated[str, one_of(SCALES)]
SignCorrection = Annotated[str, one_of(("moments", "none"), "moments or none")]


class OneBitState(NamedTuple):
    """The state of the optimizers that send signs.

    >>> onebit_adam(freeze=100).init({"w": torch.zeros(2)})
    OneBitState(count=tensor(0), m={'w': tensor([0., 0.])}, v={'w': tensor([0., 0.])}, worker={}, server={}, extra={})
    """

    count: Tensor  # int64 0-dim: steps made
    m: Tree  # mean of gradients; of a leaf that is sent by signs whole over data ranks
    v: Tree  # mean of squared gradients, like the params
    worker: dict[str, Tensor]  # by leaf that is sent by signs: what this rank owes, see fzero.sharding.error_feedback
    server: dict[str, Tensor]  # what is owed of the sums that this rank serves
    extra: dict[str, Any]  # of a method's own


class Moments(NamedTuple):
    """What a method makes an update of: of a leaf the part that this rank updates."""

    name: str
    m: Tensor
    previous_m: Tensor | None  # m before the step, for a method with an `extra`
    v: Tensor
    p: Tensor  # in their dtype
    decay: float
    correct1: Tensor  # 1 - b1^t
    correct2: Tensor  # 1 - b2^k, where v has moved k times
    correct_all: Tensor  # 1 - b2^t, of a mean that moves in each step
    full: bool  # whether this step's sum was made in full


Direction = Callable[[Moments, dict[str, Any], ShardedLeaves], Tensor]


class Method(NamedTuple):
    """What differs between the optimizers that send signs."""

    # count -> whether this step's sum of gradients is made in full, and v moves
    full: Callable[[Tensor], Tensor]  # count -> whether this step's sum of gradients is made in full, and v moves
    # count -> how often v has moved, with this step
    v_steps: Callable[[Tensor], Tensor]  # count -> how often v has moved, with this step
    # (Moments, `extra`, shards) -> the update but for the rate, and its sign
    direction: Direction  # (Moments, `extra`, shards) -> the update but for the rate, and its sign
    # slots of the state beside the moments, to which `direction` may write
    extra: dict[str, Slot] = {}  # noqa: RUF012


class Numbers(NamedTuple):
    """The numbers that all of them take."""

    lr: float | Tensor | Schedule
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip: float
    scale: str
    correction: str = "moments"

    def correct(self, b: float, times: Tensor) -> Tensor:
        """1 - b^times, by which a mean is corrected, or 1."""
        return 1 - b**times if self.correction == "moments" else torch.ones_like(times)


def warm_up(freeze: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The `full` and `moved` of a Method whose first `freeze` steps are made in full."""
    return lambda count: count < freeze, lambda count: (count + 1).clamp(max=freeze)


@checked(**OPTIMIZER)
def onebit_adam(
    lr: LearningRate = 1e-3,
    b1: Beta = 0.9,
    b2: Beta = 0.999,
    eps: NotNegative = 1e-8,
    *,
    freeze: AtLeastOne,
    weight_decay: NotNegative = 0.01,
    mask: Mask = None,
    clip: NotNegative = 0.0,
    scale: Scale = "rms",
    correction: SignCorrection = "moments",
) -> GradientTransformation:
    """Return 1-bit Adam: AdamW for `freeze` steps; then v stays, and ranks exchange the signs of their momentum.

    Until then as `adamw`. From then on each of N ranks r makes its term of the momentum of its own gradients,

    m_r = b1 m / N + (1 - b1) g_r;  m = the sum of the m_r by signs, with the errors of both ways kept (see
    fzero.sharding.error_feedback);  u = -lr (m̂ / (√v̂ + eps) + λ p), with v̂ as it was at step `freeze`.

    It goes with a plan of codec "grads=1bit", which leaves to it the sums of the matrices that its ranks can share;
    sums of other leaves, such as norms and biases, are made in full. Its state is m and errors, whole on every
    rank, and v and the errors of what a rank serves, sharded. Elements that had no gradient at all in the first
    `freeze` steps (m is exactly 0) have no scale, and only decay from then on.
    lr: a number, a 0-dim tensor, or a schedule. freeze: the steps of the warm-up; the paper has 15 to 20% of a run.
    weight_decay: λ. mask: which leaves decay (a regex, a predicate (name, leaf), None for all). clip: the largest norm
    of the gradient in the warm-up, then of the momentum; 0: as it is. In a chain it would be given terms, not sums.
    scale: of a block of signs: "rms", which keeps its norm, or "mean" of the magnitudes, which loses least.
    correction: "moments", or "none": m and v stand for m̂ and v̂, as in DeepSpeed.
    Communicates: a psum of gradients in the warm-up; then an all_to_all and an all_gather of bits, and scales.
    Raises ValueError for numbers out of range.

    >>> tx, params = onebit_adam(0.1, freeze=10, weight_decay=0.0), {"w": torch.tensor([1.0, 4.0])}
    >>> tx.update({"w": torch.tensor([3.0, -3.0])}, tx.init(params), params)[0]["w"]  # the first step is Adam's
    tensor([-0.1000,  0.1000])

    Ref: Tang et al. 2021, "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
    arXiv:2102.02888, algorithm 1.
    """
    numbers = Numbers(lr, b1, b2, eps, weight_decay, clip, scale, correction)
    return one_bit("onebit_adam", numbers, Method(*warm_up(freeze), adam_direction(eps)), mask)


def adam_direction(eps: float) -> Direction:
    """Adam's: m̂ / (√v̂ + eps), and 0 where v is 0; and λ p."""

    def direction(x: Moments, extra: dict[str, Any], shards: ShardedLeaves) -> Tensor:
        r = torch.where(x.v > 0, (x.m / x.correct1) / ((x.v / x.correct2).sqrt() + eps), 0.0)
        return r.add_(x.p, alpha=x.decay)

    return direction


def one_bit(owner: str, numbers: Numbers, method: Method, mask: Mask) -> GradientTransformation:
    """The transformation of a method, see `onebit_adam`."""
    check, decays = check_mask(owner, mask), decay_predicate(mask)

    def make(shards: ShardedLeaves) -> GradientTransformation:
        signs = shards.signs

        def init(params: Tree) -> OneBitState:
            check(params)
            named = pytree.named_leaves(params)
            device = next((p.device for p in named.values()), torch.device("cpu"))
            zeros = {name: p.new_zeros(p.shape, dtype=wide_dtype(p)) for name, p in named.items()}
            m, worker, server = dict(zeros), {}, {}
            for name in signed(signs, named):
                assert signs is not None
                m[name], worker[name], server[name] = signs.zeros(name, device)
            v = {name: x.clone() for name, x in zeros.items()}
            count = torch.zeros((), dtype=torch.int64, device=device)
            extra = {key: {name: slot.init(name, zeros[name]) for name in named} for key, slot in method.extra.items()}
            moments = pytree.from_named(m, params), pytree.from_named(v, params)
            return OneBitState(count, *moments, worker, server, extra)

        def spec(specs: Tree) -> OneBitState:
            named = {name: without_partial(leaf_spec) for name, leaf_spec in pytree.named_leaves(specs).items()}
            m, worker, server = dict(named), {}, {}
            for name in signed(signs, named):
                assert signs is not None
                sign_specs = signs.specs[name]
                m[name], worker[name], server[name] = sign_specs.full, sign_specs.worker.spec, sign_specs.served
            slots, leaf_specs = method.extra.items(), named.items()
            extra = {key: {name: slot.spec(name, leaf_spec) for name, leaf_spec in leaf_specs} for key, slot in slots}
            moments = pytree.from_named(m, specs), pytree.from_named(named, specs)
            count: Any = Spec()  # in a tensor's place
            return OneBitState(count, *moments, worker, server, extra)

        def update(grads: Tree, state: OneBitState, params: Tree) -> tuple[Tree, OneBitState]:
            return in_place(grads, pytree.map(lambda x: x.clone(), state), params, Pass(adds=False))

        @torch.no_grad()
        def in_place(grads: Tree, state: OneBitState, params: Tree, options: Pass) -> tuple[Tree, OneBitState]:
            out, named = {}, pytree.named_leaves(params)
            for name, u in steps(grads, state, params):
                out[name] = named[name].add_(u) if options.adds else u
            return pytree.from_named(out, params), state._replace(count=state.count + 1)

        def steps(grads: Tree, state: OneBitState, params: Tree) -> Iterator[tuple[str, Tensor]]:
            """(leaf, its update), once its part of `state` is overwritten with the new one."""
            named, g = pytree.named_leaves(params), pytree.named_leaves(grads)
            m, v = pytree.named_leaves(state.m), pytree.named_leaves(state.v)
            shard_of = partial(local_shard, signs, state)
            full = is_full(owner, method, state.count)
            previous = {name: shard_of(name, x).clone() for name, x in m.items()} if method.extra else {}
            move_momentum(shards, numbers, full, g, state, (m, v))
            t = (state.count + 1).to(torch.float64)
            v_steps = method.v_steps(state.count).to(torch.float64)
            b1, b2 = numbers.b1, numbers.b2
            correct = numbers.correct(b1, t), numbers.correct(b2, v_steps), numbers.correct(b2, t)
            lr = lr_at(numbers.lr, state.count)
            for name, p in named.items():
                wide_p = p.to(v[name].dtype)
                decay = numbers.weight_decay if decays(name, p) else 0.0
                parts = shard_of(name, m[name]), previous.pop(name, None), v[name], wide_p, decay
                r = method.direction(Moments(name, *parts, *casts(correct, wide_p), full), state.extra, shards)
                yield name, r.mul_(-lr.to(r.dtype))

        return GradientTransformation(init, update, spec, unit="tree", in_place=in_place, sums=RankSums(makes=True))

    return on_shards(make, needs="tree")


def is_full(owner: str, method: Method, count: Tensor) -> bool:
    """Whether the sums of this step are made in full: the host waits for the answer."""
    expect_no_transform(owner)
    return bool(method.full(count))


def expect_no_transform(owner: str) -> None:
    """Raise ValueError under a torch.func transform."""
    if transforms():
        raise ValueError(
            f"{owner}: the host asks in each step which sums it makes, so that no torch.func transform can see it; "
            "call the step outside of one"
        )


def move_momentum(
    shards: ShardedLeaves,
    numbers: Numbers,
    full: bool,
    g: dict[str, Tensor],
    state: OneBitState,
    moments: tuple[dict[str, Tensor], dict[str, Tensor]],
) -> None:
    """Overwrite m, and v in a step with a full sum, else the errors; `g` is emptied of leaves that are sent."""
    (m, v), signs, b1, b2 = moments, shards.signs, numbers.b1, numbers.b2
    sent = [name for name in state.worker if m[name].numel()]  # a stage may have no layer of a stack
    shard_of = partial(local_shard, signs, state)
    if full and signs is not None:
        g.update(signs.full_sums({name: g.pop(name) for name in sent}))
    if full:
        clip_ratio = clip_factor(shards, {name: shard_of(name, x) for name, x in g.items()}, numbers.clip)
        for name in m:
            grad = g.pop(name).to(m[name].dtype)
            grad = grad if clip_ratio is None else grad * clip_ratio.to(grad.dtype)
            m[name].mul_(b1).add_(grad, alpha=1 - b1)
            shard = shard_of(name, grad)
            v[name].mul_(b2).addcmul_(shard, shard, value=1 - b2)
        return
    for name in m:
        if name not in state.worker:
            m[name].mul_(b1).add_(g.pop(name).to(m[name].dtype), alpha=1 - b1)
    if signs is not None:
        shares = {name: b1 / signs.ranks(name) for name in sent}
        term = lambda name: (m[name] * shares[name]).add_(g.pop(name).to(m[name].dtype), alpha=1 - b1)  # noqa: E731
        signs.by_signs({name: m[name] for name in sent}, term, state.worker, state.server, numbers.scale)
    clip_ratio = clip_factor(shards, {name: shard_of(name, x) for name, x in m.items()}, numbers.clip)
    if clip_ratio is not None:
        for x in m.values():
            x.mul_(clip_ratio.to(x.dtype))


def local_shard(signs: SignSums | None, state: OneBitState, name: str, x: Tensor) -> Tensor:
    """What this rank updates of a leaf that is whole on every rank because it is sent by signs."""
    return signs.updated_slice(name, x) if signs is not None and name in state.worker else x


def clip_factor(shards: ShardedLeaves, parts: dict[str, Tensor], clip: float) -> Tensor | None:
    """What makes the norm of a tree at most `clip`; None without clipping."""
    return clip_ratio(shards.norm(parts), clip) if clip else None


def casts(numbers: tuple[Tensor, Tensor, Tensor], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers in a tensor's dtype."""
    first, second, third = (number.to(like.dtype) for number in numbers)
    return first, second, third


def signed(signs: SignSums | None, named: dict[str, Any]) -> list[str]:
    """The leaves among `named` that are sent by signs."""
    return sorted(signs.names & named.keys()) if signs is not None else []


AVERAGE = 0.9  # of the ratios of the warm-up: the weight of those before
FACTORS = (0.5, 4.0)  # of a ratio, once v stays
CHANGE = 0.1  # the most that a factor changes in a step, as a part of itself


@checked(**OPTIMIZER)
def onebit_lamb(
    lr: LearningRate = 1e-3,
    b1: Beta = 0.9,
    b2: Beta = 0.999,
    eps: NotNegative = 1e-6,
    *,
    freeze: AtLeastOne,
    weight_decay: NotNegative = 0.0,
    mask: Mask = None,
    stacked: str | None = STACKED,
    clip: NotNegative = 0.0,
    scale: Scale = "rms",
    ratios: tuple[float, float] = RATIOS,
    correction: SignCorrection = "moments",
) -> GradientTransformation:
    """Return 1-bit LAMB: LAMB for `freeze` steps; then v stays, and ranks exchange the signs of their momentum.

    Until then as `lamb`, with ratios c = ||p|| / ||r|| within `ratios`, of which c̄ = 0.9 c̄ + 0.1 c is kept for each
    layer. From then on m is summed as in `onebit_adam`, whose state, plan ("grads=1bit") and arguments it has, and

    w = b2 w + (1 - b2) ((m - b1 m') / (1 - b1))², with m' the m before, begins at v, and ŵ is corrected
    for all steps, as v̂ is for those of the warm-up;  r₀ = m̂ / (√v̂ + eps);
    r = r₀ + λ p;  q = min(1, ||r₀|| / ||r||);  f = q max((√v̂ + eps) / (√ŵ + eps)) + 1 - q, in [0.5, 4], and within 10%
    of the f before;  u = -lr c̄ f r.

    Norms and the largest quotient are of a leaf, or of each layer of one that `stacked` matches.
    Communicates: as `onebit_adam`, and three numbers per layer and axis that shards it.
    Raises ValueError for numbers out of range.

    >>> tx, params = onebit_lamb(0.1, freeze=10), {"w": torch.tensor([3.0, 4.0])}
    >>> updates, state = tx.update({"w": torch.tensor([0.2, -7.0])}, tx.init(params), params)
    >>> updates["w"].norm() / params["w"].norm()  # the first step is LAMB's
    tensor(0.1000)

    Ref: Li et al. 2021, "1-bit LAMB: communication efficient large-scale large-batch training with LAMB's convergence
    speed", arXiv:2104.06069, algorithm 1, with the numbers of DeepSpeed's. Each block of signs has a scale of its own
    here, where DeepSpeed's has one for all layers, and makes their momenta alike first.
    """

    def of_layers(value: float) -> Slot:
        def init(name: str, p: Tensor) -> Tensor:
            lead = layer_dims("onebit_lamb", stacked, name, p.dim())
            return p.new_full((*p.shape[:lead], *[1] * (p.dim() - lead)), value)

        def spec(name: str, param_spec: Spec) -> Spec:
            lead = layer_dims("onebit_lamb", stacked, name, len(param_spec.dims))
            return Spec(
                (*param_spec.dims[:lead], *[()] * (len(param_spec.dims) - lead)), rows=param_spec.rows if lead else ()
            )

        return Slot(init, spec)

    extra = {
        "fresh": Slot(lambda name, p: torch.zeros_like(p), lambda name, param_spec: param_spec),
        "ratio": of_layers(0.0),
        "factor": of_layers(1.0),
    }
    check_ratios("onebit_lamb", ratios)
    numbers = Numbers(lr, b1, b2, eps, weight_decay, clip, scale, correction)
    method = Method(*warm_up(freeze), lamb_direction(numbers, stacked, ratios), extra)
    return one_bit("onebit_lamb", numbers, method, mask)


def lamb_direction(numbers: Numbers, stacked: str | None, ratios: tuple[float, float]) -> Direction:
    """The direction of 1-bit LAMB, scaled to the size of its layer."""
    b1, b2, eps = numbers.b1, numbers.b2, numbers.eps

    def direction(x: Moments, extra: dict[str, Any], shards: ShardedLeaves) -> Tensor:
        lead = layer_dims("onebit_lamb", stacked, x.name, x.p.dim())
        fresh, average, last = (extra[key][x.name] for key in ("fresh", "ratio", "factor"))
        root = (x.v / x.correct2).sqrt() + eps
        first = torch.where(x.v > 0, (x.m / x.correct1) / root, 0.0)
        r = first + x.decay * x.p if x.decay else first
        size = layer_norm2(shards, x.name, r, lead)
        if x.full:
            fresh.copy_(x.v)
            weights = layer_norm2(shards, x.name, x.p, lead)
            nonzero = (weights > 0) & (size > 0)
            ratio = torch.where(nonzero, (weights / torch.where(nonzero, size, 1.0)).clamp(*ratios), 1.0)
            average.copy_(torch.where(nonzero, AVERAGE * average + (1 - AVERAGE) * ratio, average))
            return ratio * r
        assert x.previous_m is not None  # as the method has an `extra`
        fresh.mul_(b2).add_(((x.m - b1 * x.previous_m) / (1 - b1)).square_(), alpha=1 - b2)
        quotient = root / ((fresh / x.correct_all).sqrt() + eps)
        dims = tuple(range(lead, x.p.dim()))
        factor = shards.amax(x.name, quotient.amax(dims, keepdim=True) if dims else quotient, dims)
        if x.decay:
            share = (layer_norm2(shards, x.name, first, lead) / torch.where(size > 0, size, 1.0)).clamp(max=1.0)
            factor = factor * share + (1 - share)
        factor = torch.minimum(torch.maximum(factor.clamp(*FACTORS), last * (1 - CHANGE)), last * (1 + CHANGE))
        last.copy_(factor)
        return average * factor * r

    return direction
