"""Progressive layer dropping: in a step some layers are passed over, the deeper ones and the later steps more often.

    θ(t) = (1 - θ) exp(-γ t) + θ;   p(l) = 1 - l / L (1 - θ(t)), l from 0;   G(l) ~ Bernoulli(p(l))
    x = x + G / p attention(norm(x));   x = x + G / p mlp(norm(x))

Which layers, is drawn from (the seed, the step) for the whole step: the same ones for all of its micro-batches, on
every rank. Ref: Zhang and He 2020, "Accelerating training of transformer-based language models with progressive layer
dropping", arXiv:2010.13369, algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fzero.core import prng
from fzero.core.arguments import checked
from fzero.models.base import Model
from fzero.models.gpt2 import GPT2Config
from fzero.models.llama import LlamaConfig


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
    >>> model.drop(random.key(0), torch.tensor(0)), (model.drop(random.key(0), torch.tensor(9)) == 0).tolist()
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

    return model._replace(drop=scales)


def keep_probability(theta: float, gamma: float, step: Tensor, layers: int) -> Tensor:
    """The part of the steps in which each layer stays, float64 [L], after `step` steps.

    >>> keep_probability(0.5, 0.0, torch.tensor(7), 2).tolist(), keep_probability(0.5, 9.0, torch.tensor(7), 2).tolist()
    ([1.0, 1.0], [1.0, 0.75])
    """
    theta_t = (1 - theta) * torch.exp(-gamma * step.to(torch.float64)) + theta
    return 1 - torch.arange(layers, dtype=torch.float64, device=step.device) / layers * (1 - theta_t)


def expect_layers_apart(config: Any) -> None:
    """Raise ValueError for the config of a model whose layers cannot be passed over."""
    if type(config) not in (LlamaConfig, GPT2Config):  # in others layers give more than their sum: tables of experts
        raise ValueError(f"layer drop: the model is of {type(config).__name__}; it takes a gpt2 or a llama")
