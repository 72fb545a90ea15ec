"""Random layerwise token dropping: the layers in the middle compute some tokens of each sequence, and the others pass.

    at = a random subset of the positions, in their order;  x[at] = block(x[at]), with the positions and documents of at

Which tokens they are is drawn from (the step's key, the layer, a row's number in the step's global batch), so that
every mesh keeps the same ones.
Ref: Yao et al. 2022, "Random-LTD: random and layerwise token dropping", arXiv:2211.11586, section 3.

Progressive layer dropping: in a step some layers are passed over, the deeper ones and the later steps more often.

    θ(t) = (1 - θ) exp(-γ t) + θ;   p(l) = 1 - l / L (1 - θ(t)), l from 0;   G(l) ~ Bernoulli(p(l))
    x = x + G / p attention(norm(x));   x = x + G / p mlp(norm(x))

Which layers, is drawn from (the seed, the step) for the whole step: the same ones for all of its micro-batches, on
every rank. Ref: Zhang and He 2020, "Accelerating training of transformer-based language models with progressive layer
dropping", arXiv:2010.13369, algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fzero.core import prng
from fzero.core.arguments import checked, expect_count
from fzero.core.pytree import Tree
from fzero.core.stack import Block, in_turn
from fzero.models.base import Ctx, Model, stacks_of
from fzero.models.configs import expect_droppable, expect_layers_apart


@checked()
def layer_drop(model: Model, theta: float = 0.5, gamma: float = 0.001) -> Model:
    """Return the model of which a train step passes over some layers.

    theta, gamma: θ and γ above: the first layer is in all steps, the last one in the end in about `theta` of them.
    A layer that is dropped computes nothing, forward and backward, and its gradient is 0; where parameters are gathered
    (stage 3), they still are. Under torch.func transforms it computes, times 0. Evaluations, and a ctx without
    `scales`, have all layers.

    On a GPU the host reads which layers they are, and so waits for the step before.

    Raises ValueError for another family than gpt2 and llama, a theta outside of 0 to 1 (0 is none), a gamma below 0.

    >>> from fzero import models, random
    >>> model = layer_drop(models.gpt2(models.GPT2Config(8, 4, 4, 2, 1)), theta=0.5, gamma=1.0)
    >>> drop = model.traits.drop
    >>> drop(random.key(0), torch.tensor(0)), (drop(random.key(0), torch.tensor(9)) == 0).tolist()
    (tensor([1., 1.], dtype=torch.float64), [False, True])

    Ref: Zhang and He 2020, arXiv:2010.13369, algorithm 1.
    """
    expect_layers_apart(model.config)
    if not 0 < theta <= 1 or not gamma >= 0:
        raise ValueError(
            f"layer drop: theta is {theta}, gamma {gamma}; theta is above 0 and at most 1, gamma 0 or more"
        )

    def scales(key: Tensor, step: Tensor) -> Tensor:
        keep_prob = keep_probability(theta, gamma, step, model.config.n_layers)
        samples = prng.uniform(key, (model.config.n_layers,), dtype=torch.float64)
        return torch.where(samples < keep_prob, 1 / keep_prob, torch.zeros_like(keep_prob))

    return model.with_traits(drop=scales)


def keep_probability(theta: float, gamma: float, step: Tensor, layers: int) -> Tensor:
    """The part of the steps in which each layer stays, float64 [L], after `step` steps.

    >>> keep_probability(0.5, 0.0, torch.tensor(7), 2).tolist(), keep_probability(0.5, 9.0, torch.tensor(7), 2).tolist()
    ([1.0, 1.0], [1.0, 0.75])
    """
    theta_t = (1 - theta) * torch.exp(-gamma * step.to(torch.float64)) + theta
    return 1 - torch.arange(layers, dtype=torch.float64, device=step.device) / layers * (1 - theta_t)


@checked()
def random_ltd(model: Model, token_count: int) -> Model:
    """Return the model whose layers, but for the first and the last, compute `token_count` random tokens of each
    sequence.

    A ctx without a key, as of an evaluation, drops none, and neither does a sequence of at most `token_count` tokens.
    One subset serves the whole layer, attention and feed-forward part; RoPE and the attention within documents follow
    it.

    Raises ValueError for another family than gpt2 and llama, dropout, attention other than full, and fewer than three
    layers; a step raises it where cp or sequence parallelism split sequences.

    >>> from fzero import models, random
    >>> sizes = dict(vocab_size=8, d_model=16, n_layers=3, n_heads=2, n_kv_heads=2, d_ff=16)
    >>> model = random_ltd(models.llama(models.LlamaConfig(**sizes)), token_count=2)
    >>> tokens = torch.zeros(1, 4, dtype=torch.int64)
    >>> params = models.init_params(model, random.key(0))
    >>> loss = models.loss(model, params, {"tokens": tokens, "targets": tokens}, models.Ctx(key=random.key(1)))

    Ref: Yao et al. 2022, arXiv:2211.11586, section 3.
    """
    expect_count("token_count", token_count)
    expect_droppable(model.config)
    (stack,), layers = stacks_of(model), model.config.n_layers
    blocks = in_turn(stack.block)
    dropping = [dropped(block, token_count) for block in blocks]
    ends = (0, layers - 1)
    layer_blocks = tuple((blocks if i in ends else dropping)[i % len(blocks)] for i in range(layers))
    return model._replace(block=layer_blocks).with_traits(draws=True)


def dropped(block: Block, token_count: int) -> Block:
    """The block on `token_count` random tokens of each sequence."""

    def dropped_block(params: Tree, x: Tensor, ctx: Ctx) -> Tensor:
        if token_count >= x.shape[1] or isinstance(ctx.key, tuple):
            return block(params, x, ctx)
        if ctx.split.sequence or isinstance(ctx.tokens.positions, Tensor):
            raise ValueError(
                "random-LTD: sequences are split over ranks (cp, or sequence parallelism), which have not the tokens "
                "of one another; use dp, tp, pp"
            )
        positions = sample_positions(x.shape[0], x.shape[1], token_count, ctx)
        layout = ctx.tokens._replace(positions=positions)
        if isinstance(layout.documents, Tensor):
            layout = layout._replace(documents=layout.documents.gather(1, positions))
        places = positions[..., None].expand(-1, -1, x.shape[-1])
        return x.scatter(1, places, block(params, x.gather(1, places), ctx._replace(tokens=layout)))

    return dropped_block


def sample_positions(rows: int, tokens: int, token_count: int, ctx: Ctx) -> Tensor:
    """The positions that a layer computes, int64 [rows, keep], rising: a random subset of each row's."""
    assert isinstance(ctx.key, Tensor) and isinstance(ctx.layer, Tensor)  # inside a block, with a key
    key = prng.fold_in(prng.fold_in(ctx.key, "kept"), ctx.layer)
    first = torch.as_tensor(ctx.tokens.first).to(key.device) * tokens
    words = prng.bits(key, (rows, tokens), first=first)
    return words.sort(dim=1, stable=True).indices[:, :token_count].sort(1).values
