"""Offload is bitwise equal to none: losses, parameters, master weights, optimizer state and average, wherever they
rest."""

import contextlib
import functools
import itertools
import math
import os
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import ranks
import torch

import fzero
from fzero import checkpoint, local_batch, models, optim, reopen_state
from fzero.checkpoint import restore_state
from fzero.core import precision, pytree
from fzero.offload import DiskTensor, Nvme, serves_direct
from fzero.optim import WHOLE, leafwise
from fzero.sharding import Context, Pipeline, Spec, shard_dim, spec
from fzero.train import meta_state
from fzero.train.update import in_memory, offloaded

MEMORY = Path("/dev/shm")  # a disk is slower and its time is other people's
# Rows of 16 elements, and 600 of them: whole pages are 256 rows, so that such a leaf is cut, and its last rows are no
# whole page.
FROZEN = models.frozen_leaves(models.LoRAConfig(models.MLPConfig(), 2, 4.0, "/w_"))
SIZES = {"vocab_size": 600, "max_len": 8, "d_model": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 600}
SMALLEST = 1 << 30  # units of as few rows as can be (see update_streamed.SHARE)
POLICIES = {
    "fp32": precision.fp32(),
    "bf16": precision.bf16(),
    "fp16": precision.fp16(precision.LossScale(init=2.0**34, hysteresis=1, at_floor="hold")),
}
BF16 = torch.bfloat16


def labelled():
    parts = {"muon": optim.muon(1e-2), "adamw": optim.adamw(1e-2)}
    return optim.by_label(parts, ((r"^blocks/.*/w_", "muon"), (".*", "adamw")))


def clipped(tx):
    return optim.chain(optim.clip_by_global_norm(0.5), tx)


OPTIMIZERS = {
    "clipped adamw": clipped(optim.adamw(1e-2, weight_decay=0.1, mask=optim.decay_matrices)),
    "adamw": optim.adamw(1e-2),
    "sgd": optim.sgd(0.3),
    "sgd momentum": clipped(optim.sgd(0.3, 0.9, nesterov=True, weight_decay=0.1)),
    "lion": clipped(optim.lion(1e-3, weight_decay=0.1)),
    "lamb": clipped(optim.lamb(1e-2, weight_decay=0.1)),
    "adafactor": clipped(optim.adafactor(1e-2, weight_decay=0.1)),
    "muon by label": clipped(labelled()),
    "adamw 8": clipped(optim.adamw(1e-2, state_bits=8, block=16)),
    "lion 8": clipped(optim.lion(1e-3, state_bits=8, block=16)),
    "adamw stochastic": clipped(optim.adamw(1e-2, state_dtype=BF16, rounding="stochastic")),
    "accumulate": clipped(optim.accumulate(optim.adamw(1e-2), 3)),
    "value": optim.chain(optim.clip_by_value(1e-3), optim.adamw(1e-2, weight_decay=0.1)),
    "scheduled": clipped(optim.chain(optim.adam(optim.warmup_cosine(1e-2, 5, 20)), optim.clip_by_value(1e-2))),
}


def kept_dims(kind, name, dims):
    """The dims of a parameter that a statistic of it has: its state is not of the parameter's shape."""
    lead = shard_dim(name)
    return {
        "number": (),
        "layers": tuple(range(lead)),
        "rows": tuple(range(max(dims - 1, lead + 1)))[:dims],
        "layers' columns": (*range(lead), *range(max(lead, dims - 1), dims)),
        "columns": tuple(range(max(lead, dims - 1), dims)),  # without layers
    }[kind]


def squares(shards, kind, name, x):
    kept = kept_dims(kind, name, x.dim())
    if x.is_meta:
        return x.new_empty([x.shape[dim] for dim in kept])
    over = [dim for dim in range(x.dim()) if dim not in kept]
    return shards.psum(name, x.square().sum(over) if over else x.square(), over) + 1


def statistic(*kinds, unit="layer"):
    """Updates divided by averages of squares over dims, and a momentum; each begins at the squares of the weights."""

    def on(shards):
        def made(kind, x):
            return pytree.map_named(functools.partial(squares, shards, kind), x)

        def move(name, m, *averages):
            for kind, average in zip(kinds, averages):
                kept = kept_dims(kind, name, m.dim())
                m = m / average.reshape([n if dim in kept else 1 for dim, n in enumerate(m.shape)]).sqrt()
            return -0.01 * m

        def update(grads, state, params):
            new = {kind: pytree.map(lambda old, now: 0.5 * old + now, state[kind], made(kind, grads)) for kind in kinds}
            new["momentum"] = pytree.map(lambda g, m: 0.9 * m + g, grads, state["momentum"])
            return pytree.map_named(move, new["momentum"], *(new[kind] for kind in kinds)), new

        def cut(kind, name, spec):  # a Spec that says nothing of the memory
            return Spec(tuple(spec.dims[dim] for dim in kept_dims(kind, name, len(spec.dims))))

        return optim.GradientTransformation(
            init=lambda params: {
                **{kind: made(kind, params) for kind in kinds},
                "momentum": pytree.map(torch.zeros_like, params),
            },
            update=update,
            spec=lambda specs: {
                **{kind: pytree.map_named(functools.partial(cut, kind), specs) for kind in kinds},
                "momentum": specs,
            },
            needs="matrix" if shards is WHOLE else "elementwise",
            unit=unit,
            with_shards=on,
        )

    return on(WHOLE)


STATISTICS = {
    "a number": statistic("number"),
    "a number of each layer": clipped(statistic("layers")),
    "rows by rows": statistic("rows", unit="row"),
    "numbers by rows": statistic("number", "rows", unit="row"),
    "columns": statistic("columns", "layers' columns"),
}


class Case(NamedTuple):
    """A run; all but `offload` and `slots` is also that of the run without offload."""

    offload: str
    stage: int = 0
    mesh: tuple = ()  # (axis, size) pairs, () for one process
    policy: str = "fp32"
    optimizer: str = "clipped adamw"
    micro: int = 1
    steps: int = 4  # more than slots, and than the steps that `accumulate` sums
    model: str = "llama"
    remat: str = "none"
    ema: bool = False
    reduce: str = "fast"
    frozen: str | None = None
    sequence: bool | Context = False
    on_host: bool = False  # the one-pass form of the update
    slots: int = 2
    pipeline: Pipeline | None = None
    resident: int = 0  # not of the run without offload


def plain_tree():
    g = torch.Generator().manual_seed(5)
    return {
        "first": torch.randn(600, 16, generator=g) / 4,
        "blocks": {"w": torch.randn(2, 16, 16, generator=g) / 4},
        "gain": torch.ones(()),
    }


def plain_loss(params, batch):
    x = params["first"][batch["tokens"]]
    for w in params["blocks"]["w"]:
        x = x + torch.tanh(x @ w) * params["gain"]
    found = torch.nn.functional.cross_entropy(
        (x @ params["first"].T).flatten(0, 1).float(), batch["targets"].flatten(), reduction="sum"
    )
    return found, batch["targets"].numel()


def model_of(name):
    """(loss, what the plan and the state are made of)."""
    if name == "plain":
        return plain_loss, plain_tree()
    if name == "mixtral":
        model = models.mixtral(models.MoEConfig(**SIZES, n_experts=4))
        return model, model
    sizes = {**SIZES, "n_layers": 4} if name == "tied and deep" else SIZES
    model = models.llama(models.LlamaConfig(**sizes, tied=name.startswith("tied")))
    model = models.lora(model, 2) if name == "lora" else model
    return model, model


@contextlib.contextmanager
def changed(case):
    """Leaves as small as these in 8 bits, units as small as can be, and the one-pass form where it is asked for."""
    with (
        mock.patch.object(leafwise, "SMALL", 100),
        mock.patch.object(offloaded, "SHARE", SMALLEST),
        mock.patch.object(in_memory, "MANY", 0 if case.on_host else 1 << 62),
    ):
        yield


def train(mesh, case, folder=None):
    """(metrics of each step, {leaf: tensor}, what the space and its store say) of this rank."""
    loss, given = model_of(case.model)
    policy = POLICIES[case.policy]
    plan = fzero.zero_plan(
        case.stage, given, mesh, offload=case.offload, reduce=case.reduce, frozen=case.frozen, sequence=case.sequence,
        policy=policy, pipeline=case.pipeline)  # fmt: skip
    tx = {**OPTIMIZERS, **STATISTICS}[case.optimizer]
    tx = optim.with_average(tx, 0.9) if case.ema else tx
    space = Nvme(folder, buffer_bytes=1 << 20, slots=case.slots) if case.offload else None
    state = fzero.init_state(given, tx, plan, seed=0, nvme=space)
    execution = fzero.Execution(remat=case.remat, resident=case.resident)
    step = fzero.make_train_step(loss, tx, plan, execution=execution, micro_batches=case.micro, nvme=space)
    begun, log = values(state), []
    for i in range(case.steps):
        rows = torch.randint(0, 20, (4 * case.micro, 9), generator=torch.Generator().manual_seed(i))
        state, metrics = step(state, local_batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]}, mesh, case.micro))
        log.append(
            [
                float(x)
                for x in (metrics.loss, metrics.num_tokens, metrics.grad_norm, metrics.skipped, metrics.loss_scale)
            ]
        )
    leaves = values(state)
    assert any("params/" in name for name in differing(leaves, begun)), "no parameter changed: nothing to compare"
    if space is None:
        return log, leaves
    assert space._buffers is None or space.buffers.peak <= space.buffers.size
    stored = space.store is not None
    space.close()
    if stored and case.slots > 1:
        again = Nvme(folder, buffer_bytes=1 << 20, slots=case.slots)
        try:
            found = values(reopen_state(tx, plan, again))
            assert not differing(found, leaves), f"opened again: {differing(found, leaves)}"
        except ValueError as error:
            assert "keeps in memory" in str(error), error
        again.close()
    return log, leaves


def values(state):
    return {
        name: leaf.tensor() if isinstance(leaf, DiskTensor) else leaf.clone()
        for name, leaf in pytree.named_leaves(state).items()
    }


def differing(a, b):
    """The names of leaves that have not the same dtype, shape and bits."""
    assert list(a) == list(b)
    return [
        n for n in a if a[n].dtype != b[n].dtype or a[n].shape != b[n].shape or not torch.equal(bits(a[n]), bits(b[n]))
    ]


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8)


REFERENCES = {}


def compare(mesh, case, folder):
    """What of a rank's run with offload differs from the one without, and how many steps were skipped."""
    reference = case._replace(offload="", slots=2, remat="none", resident=0)
    with changed(case), warnings.catch_warnings():
        if reference not in REFERENCES:
            REFERENCES[reference] = train(mesh, reference)
        (log, leaves), (expected_log, expected) = train(mesh, case, folder), REFERENCES[reference]
    steps = [
        i
        for i, (a, b) in enumerate(zip(log, expected_log))
        if bits(torch.tensor(a)).tolist() != bits(torch.tensor(b)).tolist()
    ]
    assert all(math.isfinite(row[0]) for row in log) and len(log) == case.steps
    return differing(leaves, expected), steps, sum(int(row[3]) for row in log)


@pytest.fixture
def folder(tmp_path):
    quick = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and serves_direct(MEMORY)
    if not serves_direct(tmp_path) and not quick:
        pytest.skip(f"{tmp_path}: its file system refuses O_DIRECT; tests/test_offload_store.py has the other way")
    with tempfile.TemporaryDirectory(dir=MEMORY if quick else tmp_path) as folder:
        yield os.path.join(folder, "state")


def check(case, folder):
    sizes = dict(case.mesh)
    if sizes:
        found = ranks.run(math.prod(sizes.values()), compare, case, folder, mesh=sizes)
    else:
        found = [compare(fzero.one_process(), case, folder)]
    for rank, (leaves, steps, skipped) in enumerate(found):
        assert not steps, f"rank {rank}: the metrics of step {steps[0]} and {len(steps) - 1} more differ"
        assert not leaves, f"rank {rank}: {leaves[0]} and {len(leaves) - 1} more differ"
        assert skipped > 2 if case.policy == "fp16" else not skipped


def name_of(case):
    given = {field: value for field, value in case._asdict().items() if value != Case._field_defaults.get(field)}
    given["mesh"] = "x".join(f"{axis}{size}" for axis, size in case.mesh) or "alone"
    return " ".join(
        f"{field}={value}" if field in ("stage", "micro", "slots") else str(value) for field, value in given.items()
    )


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=name_of)


TIERS, GROUPS = ("host", "nvme"), ("params", "grads", "opt", "acts")
DP2, TP2 = (("dp", 2),), (("tp", 2),)


def single(tier, group, stage, mesh, policy, **more):
    return Case(f"{group}={tier}", stage, mesh, policy, remat="full" if group == "acts" else "none", **more)


PRODUCT = [single(*choice) for choice in itertools.product(TIERS, GROUPS, (0, 3), ((), DP2), ("fp32", "bf16"))]
# Every pair of values of tier, group, stage, ranks and dtype occurs in one of these.
PAIRS = [
    single("nvme", "params", 3, DP2, "fp32"), single("nvme", "params", 0, DP2, "bf16"),
    single("nvme", "grads", 0, (), "fp32"), single("nvme", "grads", 3, DP2, "bf16"),
    single("nvme", "opt", 3, DP2, "fp32"), single("nvme", "opt", 0, (), "bf16"),
    single("nvme", "acts", 0, DP2, "fp32"), single("nvme", "acts", 3, (), "bf16"),
    single("host", "params", 0, (), "fp32"), single("host", "params", 3, DP2, "bf16"),
    single("host", "grads", 3, DP2, "fp32"), single("host", "grads", 0, (), "bf16"),
    single("host", "opt", 0, DP2, "fp32"), single("host", "opt", 3, (), "bf16"),
    single("host", "acts", 3, (), "fp32"), single("host", "acts", 0, DP2, "bf16"),
]  # fmt: skip
# Every group on a disk, and one in the host's memory, where a CPU computes anyway.
QUICK = [case for case in PAIRS if case.policy == "fp32" and (case.offload.endswith("nvme") or case.stage)][:5]


@each(
    [
        *(pytest.param(c, marks=[pytest.mark.slow] * (c not in QUICK), id=name_of(c)) for c in PAIRS),
        *(pytest.param(case, marks=pytest.mark.exhaustive, id=name_of(case)) for case in PRODUCT if case not in PAIRS),
    ]
)
def test_a_group_elsewhere_has_the_same_bits(case, folder):
    check(case, folder)


def test_a_memory_that_is_entered_into_the_table_has_the_same_bits(monkeypatch, folder):
    put = []

    class Pool(spec.StateOnHost):
        def put(self, tensors, device):
            put.extend(tensors)
            return spec.StateOnHost.put(self, tensors, device)

    monkeypatch.setitem(spec.MEMORIES, "pool", Pool("pool"))
    check(single("pool", "opt", 0, (), "bf16"), folder)
    assert put and str(Spec(memory="pool")) == "[] @pool"


ALL = "params=nvme,grads=nvme,opt=nvme,acts=nvme"
HOST = ALL.replace("nvme", "host")
few = Case(ALL, remat="full", ema=True)
TOGETHER = [
    few._replace(policy="bf16"),
    few._replace(mesh=DP2, stage=3, policy="bf16", micro=2),
    few._replace(mesh=DP2, stage=2, micro=2, reduce="once"),
    few._replace(mesh=DP2, stage=1, policy="bf16"),
    few._replace(mesh=DP2, stage=3, micro=2, reduce="canonical"),
    few._replace(mesh=DP2, stage=0, policy="bf16", reduce="canonical", micro=2, offload="grads=nvme,opt=nvme"),
    few._replace(mesh=TP2, policy="bf16"),
    few._replace(mesh=TP2, sequence=True, micro=2),
    few._replace(offload="opt=nvme:0.5", policy="bf16", remat="none"),
    few._replace(offload="params=nvme:0.4,opt=nvme:0.7,grads=nvme:0.2", mesh=DP2, stage=3, policy="bf16"),
    few._replace(offload="params=host,opt=nvme,grads=nvme:0.5", mesh=DP2, stage=2, policy="bf16", remat="none"),
    few._replace(offload="params=nvme,opt=host,acts=host", mesh=DP2, stage=3),
    few._replace(offload="opt=nvme", mesh=DP2, stage=3, policy="bf16", remat="none"),
    few._replace(offload=HOST, mesh=DP2, stage=3, policy="bf16", micro=2),
    few._replace(remat="every:2", slots=3),
    few._replace(slots=1, policy="bf16"),
    few._replace(offload="opt=nvme:0.5,grads=nvme:0.3", frozen=FROZEN, model="lora", policy="bf16", remat="none"),
    few._replace(offload="opt=host:0.5,grads=nvme", frozen=FROZEN, model="lora", optimizer="sgd", ema=False, steps=3),
]
# What others have together is run in the slow tier, or not unless asked for.
SLOW, RARE = (2, 4, 5, 8, 11, 14, 17), (3, 7, 9, 10, 12, 13)


def rationed(name):
    """(a model most of whose bytes are frozen, the regex of those); "moved": a rule of it moves leaves."""
    if name == "moved":
        c = models.preset("deepseek-tiny")
        return models.build(c), None
    base = models.llama(models.LlamaConfig(**{**SIZES, "d_model": 64}))
    codes = models.quantized(base, "int8", 16) if name == "qlora" else base
    return models.lora(codes, 2), FROZEN


@pytest.mark.parametrize("policy", ("fp32", "bf16"))
@pytest.mark.parametrize("name", ("lora", "qlora", "moved"))
@pytest.mark.parametrize("ratio", (0.2, 0.5, 0.95))
def test_a_ratio_is_of_the_bytes_that_a_group_has(name, policy, ratio):
    """The largest leaves that have it, and not one leaf more; what is frozen has no sum and no state."""
    model, frozen = rationed(name)
    offload = f"params=host:{ratio},grads=nvme:{ratio},opt=host:{ratio}"
    plan = fzero.zero_plan(0, model, fzero.one_process(), policy=POLICIES[policy], frozen=frozen, offload=offload)
    for group in ("params", "grads", "opt"):
        has = {n: leaf for n, leaf in plan.leaves.items() if (leaf.trained or group == "params") and not leaf.moved}
        sizes = {n: math.prod(x.shape) * (x.dtype.itemsize if group == "params" else 1) for n, x in has.items()}
        away = [n for n, leaf in plan.leaves.items() if getattr(leaf, group).memory != "device"]
        assert set(away) <= set(has), f"{group}: {set(away) - set(has)}"
        there, total = sum(sizes[n] for n in away), sum(sizes.values())
        assert there >= ratio * total > there - min(sizes[n] for n in away)
        assert min(sizes[n] for n in away) >= max(sizes[n] for n in has if n not in away)


def later(case, mark=pytest.mark.slow):
    return pytest.param(case, marks=mark, id=name_of(case))


@each(
    [
        later(case, pytest.mark.exhaustive) if i in RARE else later(case) if i in SLOW else case
        for i, case in enumerate(TOGETHER)
    ]
)
def test_groups_together_have_the_same_bits(case, folder):
    check(case, folder)


@each(
    [
        *(
            later(case) if i % 3 else case
            for i, case in enumerate(few._replace(optimizer=name, policy="bf16", ema=False) for name in OPTIMIZERS)
            if case.optimizer != "clipped adamw"
        ),
        few._replace(optimizer="lamb", mesh=DP2, stage=3, ema=False),
        later(few._replace(optimizer="adafactor", mesh=DP2, stage=1, policy="bf16", ema=False)),
        later(few._replace(optimizer="adamw 8", mesh=DP2, stage=3, policy="bf16")),
        later(few._replace(optimizer="adamw stochastic", mesh=DP2, stage=2)),
        few._replace(optimizer="muon by label", mesh=DP2, stage=3, offload="opt=nvme", policy="bf16", remat="none"),
        later(few._replace(optimizer="accumulate", mesh=DP2, stage=3, offload=HOST)),
    ]
)
def test_any_optimizer_has_the_same_bits(case, folder):
    check(case, folder)


STATES = "params=nvme,grads=nvme,opt=nvme"
numbers = few._replace(optimizer="a number", steps=3, ema=False)


@each(
    [
        *(numbers._replace(optimizer=name, offload=STATES, remat="none", model="plain") for name in STATISTICS),
        numbers._replace(offload=STATES, mesh=DP2, stage=3, policy="bf16"),
        later(numbers._replace(offload="opt=host:0.5", mesh=DP2, stage=1)),
        later(numbers._replace(offload="params=nvme,opt=host,grads=nvme", mesh=DP2, stage=2)),
        later(numbers._replace(offload="opt=nvme", policy="fp16", steps=20, remat="none", slots=1)),
        numbers._replace(offload="grads=host", model="plain", remat="none"),
        later(numbers._replace(offload=STATES, model="plain", remat="none", policy="bf16")),
        later(numbers._replace(optimizer="numbers by rows", offload="grads=nvme,opt=nvme", mesh=DP2, stage=3)),
        later(numbers._replace(optimizer="columns", offload="grads=nvme,opt=nvme", mesh=DP2, stage=1)),
        later(numbers._replace(offload=STATES, remat="none")),
        later(numbers._replace(offload="grads=nvme", mesh=DP2, stage=3)),
        later(numbers._replace(offload="params=nvme,opt=nvme", mesh=(("pp", 2),), micro=2)),
    ]
)
def test_a_state_of_other_shapes_than_the_parameters_has_the_same_bits(case, folder):
    check(case, folder)


@each(
    [
        few._replace(frozen="^embed|w_q|norm_1", policy="bf16"),
        later(few._replace(frozen="^blocks", mesh=DP2, stage=3, micro=2)),
        later(few._replace(model="tied", policy="bf16", micro=2)),
        few._replace(model="tied", mesh=DP2, stage=3, policy="bf16"),
        later(few._replace(model="plain", offload="params=nvme,grads=nvme,opt=nvme", remat="none")),
        few._replace(
            model="plain",
            offload="params=nvme,grads=nvme,opt=nvme",
            remat="none",
            policy="bf16",
            mesh=DP2,
            stage=3,
            micro=2,
        ),
        few._replace(policy="fp16", steps=20),
        later(
            few._replace(
                policy="fp16",
                steps=20,
                mesh=DP2,
                stage=3,
                offload="params=nvme,opt=host,grads=host",
                remat="none",
                micro=2,
            )
        ),
    ]
)
def test_any_model_has_the_same_bits(case, folder):
    check(case, folder)


CP2, FORMS = (("cp", 2),), ("gather", "ulysses", "ring", "hierarchical")


@pytest.mark.exhaustive
@each(
    [
        *(
            single(tier, group, 3 if group != "grads" else 1, CP2, "fp32", sequence=Context("ring"))
            for tier, group in itertools.product(TIERS, GROUPS)
        ),
        *(
            few._replace(offload=where, mesh=CP2, stage=3, policy="bf16", micro=2, sequence=Context(form))
            for form, where in itertools.product(FORMS, (ALL, HOST))
        ),
        few._replace(mesh=(*DP2, *CP2), stage=2, micro=2, sequence=Context("gather", "balanced")),
        few._replace(mesh=CP2, stage=3, reduce="canonical", sequence=Context("gather")),
    ]
)
def test_split_sequences_have_the_same_bits(case, folder):
    """Bitwise the run over cp without offload."""
    check(case, folder)


EP2 = (("ep", 2),)


@each(
    [
        later(few._replace(offload="params=nvme,opt=nvme", mesh=EP2, stage=3, model="mixtral")),
        *(
            pytest.param(case, marks=pytest.mark.exhaustive, id=name_of(case))
            for case in (
                *(
                    single(tier, group, 3 if group != "grads" else 1, EP2, "fp32", model="mixtral")
                    for tier, group in itertools.product(TIERS, GROUPS)
                ),
                *(
                    few._replace(offload=where, mesh=mesh, stage=3, policy="bf16", micro=2, model="mixtral")
                    for mesh, where in itertools.product((EP2, (*DP2, *EP2)), (ALL, HOST))
                ),
            )
        ),
    ]
)
def test_experts_of_other_ranks_have_the_same_bits(case, folder):
    """Bitwise the run over ep without offload."""
    check(case, folder)


@each(
    [
        later(few._replace(on_host=True, policy="bf16")),
        later(few._replace(on_host=True, policy="bf16", mesh=DP2, stage=3, optimizer="adamw 8")),
        few._replace(on_host=True, offload="opt=nvme,grads=host", policy="fp32", optimizer="lion", remat="none"),
    ]
)
def test_the_one_pass_form_has_the_same_bits(case, folder):
    check(case, folder)


def batch_of(step, mesh):
    rows = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(step))
    return local_batch({"tokens": rows[:, :-1], "targets": rows[:, 1:]}, mesh)


def continued(mesh, offload, kinds, folder, path=None):
    """The leaves of a state after a step, made anew or restored from `path`; of one made anew, its checkpoint."""
    (loss, given), tx = model_of("plain"), statistic(*kinds)
    plan = fzero.zero_plan(3, given, mesh, offload=offload)
    space = Nvme(os.path.join(folder, "state"), buffer_bytes=1 << 20)
    restored = path is not None
    if path is not None:
        state = restore_state.restore_state(path, meta_state(plan, tx), fzero.state_specs(plan, tx), plan, space)
        leaves = checkpoint.restore_leaves(path, lambda name: True)
        assert mesh.size > 1 or not differing(values(state), {name: leaves[name] for name in values(state)})
    else:
        state = fzero.init_state(given, tx, plan, seed=0, nvme=space)
    step = fzero.make_train_step(loss, tx, plan, nvme=space)
    state, _ = step(state, batch_of(int(state.step), mesh))
    found = values(state)
    if not restored:
        path = checkpoint.save(folder, state, step=1, specs=fzero.state_specs(plan, tx), mesh=mesh)
    space.close()
    return found, str(path)


def test_a_state_of_other_shapes_is_saved_and_restored_at_another_world_size(folder):
    kinds = ("number", "columns", "rows")
    (_, plain), _ = ranks.run(2, continued, "", kinds, f"{folder}a", mesh={"dp": 2})
    (_, saved), _ = ranks.run(2, continued, STATES, kinds, f"{folder}b", mesh={"dp": 2})
    assert not differing(*(checkpoint.restore_leaves(path, lambda name: True) for path in (saved, plain)))
    one = fzero.one_process()
    after = [continued(one, to, kinds, f"{folder}{i}", saved)[0] for i, to in enumerate(("", "opt=host", STATES))]
    assert not differing(after[1], after[0]) and not differing(after[2], after[0])
    again = [continued(one, to, kinds, f"{folder}c{i}")[1] for i, to in enumerate(("", STATES))]  # and at a larger one
    shards = [ranks.run(2, continued, to, kinds, f"{folder}d{i}", again[1]) for i, to in enumerate(("", STATES))]
    for (found, _), (expected, _) in zip(*shards):
        assert not differing(found, expected)


def test_another_optimizer_of_a_state_on_a_disk_begins_as_in_memory(folder):
    loss, given = model_of("plain")
    old, tx, found = optim.adamw(1e-2), statistic("number", "columns", "layers"), []
    for offload in ("", STATES):
        plan = fzero.zero_plan(0, given, fzero.one_process(), offload=offload)
        spaces = [Nvme(f"{folder}{i}", buffer_bytes=1 << 20) if offload else None for i in range(2)]
        state = fzero.init_state(given, old, plan, seed=0, nvme=spaces[0])
        state = fzero.with_optimizer(state, tx, plan, drop="opt_state/.*", nvme=spaces[1])
        state, _ = fzero.make_train_step(loss, tx, plan, nvme=spaces[1])(state, batch_of(0, plan.mesh))
        found.append(values(state))
        for space in filter(None, spaces):
            space.close()
    assert not differing(*found)


@pytest.mark.parametrize("update", ["speculate", "backward"])
def test_layers_of_a_state_without_layers_are_not_updated_in_the_backward_pass(update):
    model, _ = model_of("llama")
    plan = fzero.zero_plan(0, model, fzero.one_process(), offload="opt=host")
    words = rf'update="{update}" updates layers .* state of blocks/\S+ has leaves without layers, .* use update="end"'
    with pytest.raises(ValueError, match=words):
        fzero.make_train_step(model, statistic("number"), plan, execution=fzero.Execution(update=update))
