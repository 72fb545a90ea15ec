"""README's program, word for word, on every mesh: its parameters at the end are those of one process."""

import functools
import math
import re

import pytest
import ranks
from law_cases import FP64
from test_docs import ROOT, blocks_of
from zero_cases import whole_leaf

from fzero.core import pytree

MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "dp2 tp2": {"dp": 2, "tp": 2}, "rp2": {"rp": 2}}
# In place of README's own optimizer, clipped AdamW.
OPTIMIZERS = {
    "muon": """optim.by_label(
        {"muon": optim.muon(0.02, ns_dtype=torch.float64), "adamw": optim.adamw(1e-3)},
        ((r"^blocks/.*/w_", "muon"), (".*", "adamw"))
    )""",
    "lamb": "optim.lamb(1e-2, weight_decay=0.1)",
    "adafactor": "optim.adafactor(1e-2, eps1=1e-8)",
    "clipped in a label": (
        "optim.by_label({'all': optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(1.0))}, ((r'', 'all'),))"
    ),
}


def program(sizes, changes):
    """README's block with these sizes of the mesh, and changes {regex: text} for other optimizers and dtypes."""
    (block,) = [block for block in blocks_of(ROOT / "README.md") if block.kind == "python"]
    code = block.code
    for pattern, text in {r'\{"dp": 1\}': repr(sizes), **changes}.items():
        code, found = re.subn(pattern, lambda _, text=text: text, code, flags=re.MULTILINE)
        assert found == 1, pattern
    return code


def run(mesh, sizes, changes):
    """({leaf: its whole value at the end}, the last loss) of the program; `mesh` is that of the test's ranks."""
    scope = {"__name__": "readme", "FP64": FP64}
    exec(compile(program(sizes, changes), "README.md", "exec"), scope)
    specs = pytree.named_leaves(scope["plan"].params)
    leaves = pytree.named_leaves(scope["state"].params)
    return {name: whole_leaf(leaf, specs[name], scope["mesh"]) for name, leaf in leaves.items()}, scope["metrics"].loss


@functools.cache
def alone(changes):
    return run(None, {"dp": 1}, dict(changes))


def differences(sizes, changes):
    """{leaf: the largest difference to one process, as a part of its largest value}, over all ranks."""
    expected, loss = alone(tuple(changes.items()))
    found = {}
    for leaves, other in ranks.run(math.prod(sizes.values()), run, sizes, changes, mesh=sizes):
        for name, leaf in [*leaves.items(), ("loss", other)]:
            right = expected.get(name, loss)
            found[name] = max(found.get(name, 0.0), float((leaf - right).abs().max() / right.abs().max()))
    return found


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=[pytest.mark.slow] * (m != "dp2 tp2")) for m in MESHES])
def test_word_for_word(mesh):
    # Rounding in float32 grows over 20 steps of AdamW, which divides small gradients by their own size.
    found = differences(MESHES[mesh], {})
    assert max(found.values()) < 1e-4, found


# Each optimizer on one mesh, and one of them on each.
OFTEN = [("muon", mesh) for mesh in MESHES if mesh != "rp2"]
ONCE = [
    ("muon", "rp2"),
    ("readme", "tp2"),
    ("lamb", "dp2 tp2"),
    ("adafactor", "dp2 tp2"),
    ("clipped in a label", "rp2"),
]


@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [
        *(pytest.param(*pair, marks=[pytest.mark.slow] * (pair != ("muon", "dp2 tp2"))) for pair in OFTEN),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ONCE),
        *(
            pytest.param(o, m, marks=pytest.mark.exhaustive)
            for o in ("readme", *OPTIMIZERS)
            for m in MESHES
            if (o, m) not in OFTEN + ONCE
        ),
    ],
)
def test_with_other_optimizers_in_float64(optimizer, mesh):
    changes = {r"model, mesh\)$": "model, mesh, policy=FP64)"}
    if optimizer != "readme":
        changes["^tx = .*$"] = f"tx = optim.chain(optim.clip_by_global_norm(0.5), {OPTIMIZERS[optimizer]})"
    found = differences(MESHES[mesh], changes)
    assert max(found.values()) < 1e-10, found
