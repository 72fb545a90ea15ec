"""Which leaves `optim.decay_matrices` decays: those of fzero's models that it always has, and the matrices of any
tree."""

import re

import pytest
import torch

from fzero import models, optim
from fzero.core import pytree
from fzero.sharding import shapes_of

OLD_RULE = r"(^|/)(w[^/]*|router[^/]*|tokens)$"  # by fzero's own names, which runs before this rule were made with


@pytest.mark.parametrize("name", [*models.PRESETS, "lora", "lora mixtral"])
def test_decay_matrices_decays_what_it_did_of_every_model(name):
    sizes = models.preset({"lora": "llama-tiny", "lora mixtral": "mixtral-tiny"}.get(name, name))
    model = models.lora(models.build(sizes), rank=2) if name.startswith("lora") else models.build(sizes)
    leaves = pytree.named_leaves(shapes_of(model))
    assert {n: optim.decay_matrices(n, leaf) for n, leaf in leaves.items()} == {
        n: re.search(OLD_RULE, n) is not None for n in leaves
    }


OTHER_TREES = {  # names and shapes of other libraries -> whether they decay
    "dense_0/kernel": ((4, 8), True),
    "Dense_0/bias": ((8,), False),
    "LayerNorm_0/scale": ((8,), False),
    "norm/weight": ((8,), False),
    "layers/norm/weight": ((3, 8), False),
    "layers/mlp/bias": ((3, 8), False),
    "linear/w": ((4, 8), True),
    "linear/b": ((8,), False),
    "conv1/weight": ((8, 3, 5, 5), True),
    "temperature": ((), False),
    "embedding": ((16, 4), True),
    "pos_embed": ((1, 9, 4), False),
    "cls_token": ((1, 1, 4), False),
    "transformer.wpe.weight": ((16, 4), False),
    "transformer.wte.weight": ((16, 4), True),
    "h.0.ln_1.weight": ((3, 8), False),
    "model.layers.0.input_layernorm.weight": ((8,), False),
    "model.layers.0.self_attn.q_proj.weight": ((8, 8), True),
    "bert.embeddings.position_embeddings.weight": ((16, 8), False),
    "positional_embedding": ((16, 8), False),
    "blocks/attn/in_proj": ((2, 8, 8), True),
    "blocks/gate": ((2, 8), False),  # stacked: a vector of each of two layers
    # a list of layers, each with leaves of its own; a number below `blocks` is of an nn.Sequential if a weight follows
    **dict.fromkeys(
        ("blocks/0/w", "blocks/11/mlp/w_in", "blocks_enc/2/attn/q/weight", "blocks/0/kernel"), ((4, 8), True)
    ),
    **dict.fromkeys(("blocks/0/embedding", "blocks/3/conv/w"), ((4, 8), True)),
    **dict.fromkeys(
        ("blocks/0/norm/weight", "blocks/0/ln_1/scale", "blocks/0/bias", "blocks/0/weight", "blocks/1/0/weight"),
        ((3, 8), False),
    ),
    **dict.fromkeys(("blocks/0/b", "blocks/0/mlp/b_in", "blocks/2/gate", "blocks/0/norm"), ((8,), False)),
    **dict.fromkeys(("blocks/2/weight", "blocks/1/mlp/w_in"), ((2, 4, 8), True)),
    "expose/compose": ((4, 4), True),
    "scaled/w": ((4, 4), True),
    "0": ((4, 4), True),
    # words that begin or end as a norm's, and steps that are of one but no norm
    **dict.fromkeys(("abnormal/w", "denorm_proj", "denorm/w", "normalizer", "normalizer/0/w"), ((4, 4), True)),
    **dict.fromkeys(("bias_net", "bias_net.weight", "position_mlp/kernel", "gamma_net/w"), ((4, 4), True)),
    **dict.fromkeys(("norm1.linear.weight", "pos_embed.proj.weight", "biasing", "lnet/w", "clsifier"), ((4, 4), True)),
    **dict.fromkeys(("class_embed.weight", "rnn.weight_hh_l0", "preposition/w", "pos/mlp/w_q"), ((4, 4), True)),
    **dict.fromkeys(("layers/attnNorm/w", "layers/norm/0/weight", "layers/RMSNorm_1/scale"), ((3, 8), False)),
    **dict.fromkeys(("layers/q_norm.weight", "layers/batchnorm2d/weight", "layers/norm_w"), ((3, 8), False)),
    **dict.fromkeys(
        ("relative_position_bias_table", "attn.pos_bias_u", "relative_attention_bias.weight"), ((9, 2), False)
    ),
    **dict.fromkeys(
        ("attn.bias_k", "rnn.bias_hh_l0", "decoder.embed_positions.weight", "pos/embedding"), ((9, 2), False)
    ),
    **dict.fromkeys(("layernorm_embedding.weight", "positional_encoding/pe", "mixer/b_up"), ((9, 2), False)),
}


def test_decay_matrices_goes_by_the_dims_in_any_tree():
    found = {name: optim.decay_matrices(name, torch.zeros(shape)) for name, (shape, _) in OTHER_TREES.items()}
    assert found == {name: decays for name, (_, decays) in OTHER_TREES.items()}


def test_a_tree_of_other_names_decays_its_kernels():
    params = {"dense": {"kernel": torch.ones(2, 2), "bias": torch.ones(2)}, "norm": {"weight": torch.ones(2)}}
    tx = optim.adamw(0.1, weight_decay=0.5, mask=optim.decay_matrices)
    updates, _ = tx.update(pytree.map(torch.zeros_like, params), tx.init(params), params)
    moved = {name: bool(u.any()) for name, u in pytree.named_leaves(updates).items()}
    assert moved == {"dense/bias": False, "dense/kernel": True, "norm/weight": False}
