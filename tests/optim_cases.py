"""Trees and transformations that the tests of `fzero.optim` share."""

from dataclasses import replace

import torch

from fzero import optim
from fzero.core import pytree

F64 = torch.float64
SHAPES = {
    "embed": {"tokens": (7, 4)},
    "blocks": {
        "ln_1": {"scale": (2, 4)},
        "mlp": {"w_in": (2, 4, 6), "b_in": (2, 6)},
        "moe": {"w_up": (2, 3, 5, 4)},
    },
    "head": {"norm": {"scale": (4,)}, "temperature": ()},
}
MATRICES = r"^blocks/.*/w_"


def muon_for_matrices(lr, dtype=None):
    parts = {"muon": optim.muon(lr, ns_dtype=F64, state_dtype=dtype), "adamw": optim.adamw(lr, state_dtype=dtype)}
    return optim.by_label(parts, ((MATRICES, "muon"), (".*", "adamw")))


def recipe(lr, dtype=None):
    rates = ((r"^blocks/", (0.5, 0.9)), (r"^embed/", 0.1), (".*", 1.0))
    adam = optim.adamw(lr, mask=optim.decay_matrices, weight_decay=0.2, state_dtype=dtype)
    return optim.chain(optim.clip_by_global_norm(1.0), adam, optim.scale_by_rules(rates))


# name -> (learning rate, state dtype) -> transformation
OPTIMIZERS = {
    "sgd": lambda lr, dtype=None: optim.sgd(lr, state_dtype=dtype),
    "sgd momentum": lambda lr, dtype=None: optim.sgd(lr, 0.9, weight_decay=0.1, state_dtype=dtype),
    "sgd nesterov": lambda lr, dtype=None: optim.sgd(lr, 0.9, nesterov=True, mask="w_|tokens", state_dtype=dtype),
    "adam": lambda lr, dtype=None: optim.adam(lr, weight_decay=0.1, state_dtype=dtype),
    "adamw": lambda lr, dtype=None: optim.adamw(lr, weight_decay=0.1, mask=optim.decay_matrices, state_dtype=dtype),
    "lion": lambda lr, dtype=None: optim.lion(lr, weight_decay=0.1, state_dtype=dtype),
    "lamb": lambda lr, dtype=None: optim.lamb(lr, weight_decay=0.1, state_dtype=dtype),
    "adafactor": lambda lr, dtype=None: optim.adafactor(lr, eps1=1e-8, weight_decay=0.1, state_dtype=dtype),
    "muon by label": muon_for_matrices,
    "recipe": recipe,
    "accumulate": lambda lr, dtype=None: optim.accumulate(optim.adamw(lr, state_dtype=dtype), 2, dtype=dtype),
    "decayed sgd": lambda lr, dtype=None: optim.chain(
        optim.clip_by_value(0.5), optim.add_decayed_weights(0.1, optim.decay_matrices), optim.sgd(lr, state_dtype=dtype)
    ),
}


def tree(seed, shapes=SHAPES, dtype=F64, lead=()):
    generator = torch.Generator().manual_seed(seed)

    def walk(node):
        if isinstance(node, dict):
            return {k: walk(v) for k, v in node.items()}
        return torch.randn((*lead, *node), generator=generator, dtype=F64).to(dtype)

    return walk(shapes)


def with_rows(specs, rows):
    """The specs with the layers of the stack shared among the ranks of pp: these rows on each."""
    place = lambda spec: replace(spec, dims=(("pp",), *spec.dims[1:]), rows=rows)  # noqa: E731
    return {**specs, "blocks": pytree.map(place, specs["blocks"])}


def clone(tree):
    return pytree.map(torch.clone, tree)


def assert_same(a, b, tolerance=0.0):
    a, b = pytree.named_leaves(a), pytree.named_leaves(b)
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def step(tx, form):
    """The function (grads, state, params) -> (updates, or params for "apply", state): the pure one, or in place."""
    adds = optim.Pass(adds=form == "apply")
    return tx.update if form == "update" else lambda *trees: optim.apply_in_place(tx, *trees, adds)


def run(tx, params, steps=3, form="update", dtype=F64, state=None):
    """Parameters and state after `steps` steps of one of the three forms, from copies."""
    params, state = clone(params), tx.init(params) if state is None else clone(state)
    for i in range(steps):
        grads = tree(100 + i, dtype=dtype)
        if form == "apply":
            params, state = optim.apply_in_place(tx, grads, state, params)
        else:
            updates, state = step(tx, form)(grads, state, params)
            params = optim.apply_updates(params, updates)
    return params, state
