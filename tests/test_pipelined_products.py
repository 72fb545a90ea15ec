"""Every schedule on every product of axes with pp on 2, 4 and 8 ranks, at every stage: equal to one process.

What is no axis is drawn for each case by its name: remat, the optimizer, the micro-batches, and options of the plan.
"""

import itertools
import math
import random

import pytest
import ranks
from pipeline_cases import serves
from pipeline_steps import equals_one_process, options_of
from zero_cases import train

from fzero.core import precision
from fzero.sharding import FAMILIES, Pipeline, digests

CHUNKS = {name: 1 if family.chunks == 1 else 2 for name, family in FAMILIES.items()}
UNEVEN = ("1f1b", "interleaved", "zb-h1", "zb-v")
HOWS = [(name, uneven) for name in CHUNKS for uneven in ((False, True) if name in UNEVEN else (False,))]
MOST_ROWS = 32


def meshes(n):
    """The products of axes with pp that have n ranks."""
    powers = [1 << i for i in range(n.bit_length())]
    for pp, dp, rp, tp in itertools.product(powers, repeat=4):
        if pp * dp * rp * tp == n and pp > 1 and tp <= 4:
            yield {axis: size for axis, size in zip(("pp", "dp", "rp", "tp"), (pp, dp, rp, tp)) if size > 1}


MESHES = {" x ".join(f"{axis}{size}" for axis, size in sizes.items()): sizes for n in (2, 4, 8) for sizes in meshes(n)}


def pipeline_of(schedule, uneven, p):
    """(the pipeline, the layers of its model): uneven has three layers in the first stage and one in each other."""
    chunks = CHUNKS[schedule]
    stages = p * chunks
    if not uneven:
        return Pipeline(schedule, chunks=chunks), max(4, stages)
    return Pipeline(schedule, chunks=chunks, layout=",".join(["3", *"1" * (stages - 1)])), stages + 2


def micro_batches(schedule, p, data):
    """Those of a data rank: one, fewer than p, p, more that p does not divide, and 2p, as far as the schedule takes
    them."""
    some = sorted({1, p - 1, p, p + 1, p + p // 2, 2 * p})
    return [m for m in some if m and serves(schedule, p, m, CHUNKS[schedule]) and data * m <= MOST_ROWS]


def cases_of(mesh, schedule, uneven):
    sizes = MESHES[mesh]
    data, tp = sizes.get("dp", 1) * sizes.get("rp", 1), sizes.get("tp", 1)
    how, layers = pipeline_of(schedule, uneven, sizes["pp"])
    few = math.prod(sizes.values()) == 8
    for stage in range(4):
        draw = random.Random(f"{mesh} {schedule} {uneven} {stage}")
        optimizers = draw.sample(["sgd", "clipped adam"], 1 if few else 2)
        for tx in optimizers:
            m = draw.choice(micro_batches(schedule, sizes["pp"], data))
            plan = {"sequence": True} if tp > 1 and draw.random() < 0.5 else {}
            plan |= {"reduce": "once"} if stage < 2 and data > 1 and draw.random() < 0.3 else {}
            options = {"rows": data * m, "sizes": {"n_layers": layers}, "dropout": draw.choice([0.0, 0.1])}
            options |= {"remat": draw.choice(["none", "full", "every:2"]), "reshard": draw.random() < 0.7}
            yield "gpt2", tx, stage, m, {**options_of(how, **plan), **options}


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("how", HOWS, ids=lambda how: how[0] + " uneven" * how[1])
def test_equals_one_process(mesh, how):
    equals_one_process(MESHES[mesh], list(cases_of(mesh, *how)))


# ---- models ----------------------------------------------------------------------------------------------------------

# Of each family of schedules one. The layouts are of six layers: two stacks of three, so that a stage holds the end of
# one and the start of the other.
FAMILY = {
    "1f1b": Pipeline(layout="4,2"),
    "interleaved": Pipeline("interleaved", chunks=2, layout="1,3,1,1"),
    "zb-h1": Pipeline("zb-h1", layout="2,4"),
    "zb-v": Pipeline("zb-v", chunks=2, layout="2,2,1,1"),
}
MODELS = ("moe dropless", "deepseek", "lora", "qlora", "encoder and decoder", "llama")


def of_models(mesh, schedule, names=MODELS):
    """A case of each model: with tp the activations between blocks are cut in the sequence, and where the model has
    dropout it is on."""
    for i, name in enumerate(names):
        plan = {"sequence": True} if "tp" in mesh else {}
        options = {"dropout": 0.1, "remat": ("none", "full")[i % 2]}
        if name != "encoder and decoder":
            options["sizes"] = {"n_layers": 6}
        # Smaller steps than elsewhere: six layers of qlora amplify rounding a million times in five of SGD at 2e-3, and
        # 400 times less at a quarter of that.
        for tx, stage in (("small sgd", (3, 0)[i % 2]), ("small clipped adam", (1, 3)[i % 2])):
            yield name, tx, stage, 4, {**options_of(FAMILY[schedule], **plan), **options}


@pytest.mark.exhaustive
def test_stages_across_stacks_and_cut_sequences_equal_one_process():
    equals_one_process(MESHES["pp2"], list(of_models("pp2", "zb-v", ["encoder and decoder"])))
    equals_one_process(MESHES["pp2 x tp2"], list(of_models("pp2 x tp2", "zb-v", ["llama"]))[:1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ("pp2", "pp2 x dp2", "pp2 x tp2"))
@pytest.mark.parametrize("schedule", FAMILY)
def test_models_equal_one_process(mesh, schedule):
    equals_one_process(MESHES[mesh], list(of_models(mesh, schedule)))


# ---- canonical sums --------------------------------------------------------------------------------------------------


POLICIES = {"fp32": precision.fp32, "bf16_float8": precision.bf16_float8}
PARTS = 8  # micro-batches of the global batch, on every mesh


def hashes(mesh, policy, cases):
    """[(metrics, digests of the whole state)] of three steps at each stage and schedule."""
    out = []
    for stage, how in cases:
        plan = {"reduce": "canonical"} | ({"pipeline": how} if how else {})
        sizes = {"n_layers": 8, "d_model": 32, "d_ff": 32}
        state, specs, log = train(
            mesh, "gpt2", "clipped adam", stage, PARTS, plan_options=plan, steps=3, rows=PARTS,
            policy=POLICIES[policy](), dropout=0.1, sizes=sizes,
        )  # fmt: skip
        found = digests(state.params, specs.params, mesh) | digests(state.opt_state, specs.opt_state, mesh)
        out.append((log, found))
    return out


def has_the_bits_of_one_process(mesh, policy, cases):
    (expected,) = ranks.run(1, hashes, policy, [(0, None)])  # with the threads of a rank
    sizes = MESHES[mesh]
    for found in ranks.run(math.prod(sizes.values()), hashes, policy, cases, mesh=sizes, timeout_s=900):
        for one, (stage, how) in zip(found, cases):
            assert one == expected[0], (stage, how)


@pytest.mark.slow
def test_float8_has_the_bits_of_one_process():
    """Also where it is rounded in a backward pass in two halves, and gathered."""
    has_the_bits_of_one_process("pp2", "bf16_float8", [(3, Pipeline("zb-v", chunks=2)), (0, Pipeline())])


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mesh", ("pp2", "pp4", "pp2 x dp2", "pp2 x rp2"))
def test_one_hash_over_schedules_and_stages(mesh, policy):
    p = MESHES[mesh]["pp"]
    hows = [Pipeline(name, chunks=chunks) for name, chunks in CHUNKS.items()]
    hows.append(Pipeline(layout=",".join(["2", "6"] if p == 2 else ["1", "3", "3", "1"])))
    has_the_bits_of_one_process(mesh, policy, list(itertools.product(range(4), hows)))
