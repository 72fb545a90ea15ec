"""All that `same_bits.py` knows of fzero's names and signatures: those of commit 91b3968, and those of today.

Each difference is decided by itself, by what can be imported and which keywords a signature has, so that every step of
a redesign is served, whichever part of it has landed. A new name is one more place in `found`, a new signature one more
line in `prepare`, another name of a state's leaf one more line in `NAMES`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from same_bits_cases import Case

import fzero
from fzero import models, optim

V, T, ROWS = 32, 16, 8
BUFFERS = 4 << 20  # bytes, for what is on a disk
SIZES = {"vocab_size": V, "max_len": T, "d_model": 16, "d_ff": 32}
HEADS = {"n_heads": 4, "init_std": 0.3}


def found(*places: str) -> Any:
    """The first of some "module:name" that there is."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(places)} is there; name the new place in {Path(__file__).name}")


def takes(function: Callable, keyword: str) -> bool:
    """Whether a function has this parameter."""
    return keyword in inspect.signature(function).parameters


PRECISION = ("fzero.core.precision", "fzero.precision")
LossScale, fp16, fp32, bf16 = (
    found(*(f"{place}:{name}" for place in PRECISION)) for name in ("LossScale", "fp16", "fp32", "bf16")
)
Nvme = found("fzero.offload:Nvme", "fzero.offload:Space")
state_specs = found("fzero.train.state:state_specs", "fzero.state:state_specs")
named_leaves = found("fzero.core.pytree:named_leaves", "fzero.pytree:named_leaves")
MixtralConfig = found("fzero.models:MixtralConfig", "fzero.models:MoEConfig")

POLICIES: dict[str, Callable[[], Any]] = {
    "fp32": fp32,
    "bf16": bf16,
    # The scale rises every 2 steps until a gradient overflows: skipped steps are part of what is compared.
    "fp16": lambda: fp16(LossScale(init=2.0**14, window=2, hysteresis=1)),
}


# -- models and optimizers


def plain_loss(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss function as a user writes it."""
    x = params["embed"]["tokens"][batch["tokens"]]
    for w in params["blocks"]["w"]:
        x = x + torch.tanh(x @ w)
    nats = (
        torch.logsumexp(logits := x @ params["head"]["w"].T, -1)
        - torch.gather(logits, -1, batch["targets"][..., None])[..., 0]
    )
    return (nats * batch["mask"]).sum(), batch["mask"].sum()


def plain_params() -> Any:
    """The parameters of `plain_loss`."""
    g = torch.Generator().manual_seed(7)
    shapes = {"embed": {"tokens": (V, 16)}, "blocks": {"w": (2, 16, 16)}, "head": {"w": (V, 16)}}
    return {
        top: {name: 0.5 * torch.randn(shape, generator=g) for name, shape in group.items()}
        for top, group in shapes.items()
    }


MODELS: dict[str, Callable[[int], Any]] = {
    "gpt2": lambda layers: models.build(models.GPT2Config(**SIZES, n_layers=layers, **HEADS, dropout=0.1, tied=True)),
    "llama": lambda layers: models.build(models.LlamaConfig(**SIZES, n_layers=layers, **HEADS, n_kv_heads=2)),
    "mixtral": lambda layers: models.build(
        MixtralConfig(**SIZES, n_layers=layers, **HEADS, n_kv_heads=2, n_experts=4, top_k=2)
    ),
    "mlp": lambda layers: models.build(models.MLPConfig(**SIZES, n_layers=layers)),
    "lora": lambda layers: models.lora(MODELS["llama"](layers), rank=2, alpha=4.0),
}


def optimizer(name: str, layout: Any) -> Any:
    """The optimizer of a case. layout: that of its leaves; None where the step binds it."""

    def make(function: Callable, *args: Any, **options: Any) -> Any:
        return function(
            *args, **options, **({"layout": layout} if layout is not None and takes(function, "layout") else {})
        )

    def muon() -> Any:
        parts = {"muon": make(optim.muon, 0.02), "adamw": make(optim.adamw, 1e-2)}
        return optim.by_label(parts, ((r"^blocks/(.*/)?w_", "muon"), (".*", "adamw")))

    schedule = optim.warmup_cosine(2e-2, 3, 17) if name == "adamw" else None
    return {
        "adamw": lambda: optim.chain(
            make(optim.clip_by_global_norm, 0.5), make(optim.adamw, schedule, weight_decay=0.1)
        ),
        "adamw unclipped": lambda: make(optim.adamw, 1e-2, mask=optim.decay_matrices),
        "sgd": lambda: make(optim.sgd, 0.1),
        "sgd momentum": lambda: make(optim.sgd, 0.05, 0.9, nesterov=True, weight_decay=0.1),
        "lion": lambda: make(optim.lion, 1e-3, weight_decay=0.1),
        "muon": muon,
        "lamb": lambda: make(optim.lamb, 1e-2, weight_decay=0.1),
        "adafactor": lambda: make(optim.adafactor, 1e-2, weight_decay=0.1),
        "adamw 8bit": lambda: make(optim.adamw, 1e-2, state_bits=8, block=64, seed=1),
        "adamw bf16": lambda: make(optim.adamw, 1e-2, state_dtype=torch.bfloat16, rounding="stochastic", seed=1),
        "accumulate": lambda: optim.accumulate(make(optim.adamw, 1e-2), 2),
    }[name]()


# -- a run


class Run(NamedTuple):
    """A run before its first step."""

    step: Callable
    state: Any
    specs: Any
    close: Callable[[], None]


def prepare(case: Case, mesh: Any, folder: str) -> Run:
    """The run of a case on a mesh; what it puts on a disk lies in `folder`."""
    plain = case.model == "plain"
    source = plain_params() if plain else MODELS[case.model](case.layers)
    loss_fn, policy = plain_loss if plain else source, POLICIES[case.policy]()

    options: dict[str, Any] = {name: getattr(case, name) for name in ("reduce", "sequence", "frozen", "offload")}
    if takes(fzero.zero_plan, "accumulate") and case.reduce == "once":
        options |= {"reduce": "fast", "accumulate": "full"}
    in_plan = takes(fzero.zero_plan, "reshard")
    options |= {"reshard": case.reshard} if in_plan else {}
    whole_plan = takes(fzero.zero_plan, "policy")  # the plan holds its mesh and its policy
    plan = fzero.zero_plan(case.stage, source, mesh, **options, **({"policy": policy} if whole_plan else {}))

    binds = "on" in optim.GradientTransformation._fields  # the step binds the layout
    layout = None if binds else optim.sharded(plan.opt, mesh, like=plan.like, ordered=plan.reduce == "canonical")
    tx = optimizer(case.optimizer, layout)
    averages = hasattr(optim, "with_average")  # the average is a transformation
    if case.average and averages:
        tx = optim.with_average(tx, case.average)

    nvme = Nvme(folder, buffer_bytes=BUFFERS) if "nvme" in case.offload else None
    given = () if whole_plan else (mesh,)

    init: dict[str, Any] = {"seed": 3} if whole_plan else {"seed": 3, "policy": policy}
    init |= {"ema": bool(case.average)} if takes(fzero.init_state, "ema") else {}
    init |= {"spike": case.spike} if takes(fzero.init_state, "spike") else {}
    init |= {"nvme" if takes(fzero.init_state, "nvme") else "space": nvme}
    state = fzero.init_state(source, tx, plan, *given, **init)

    make = fzero.make_train_step
    how = {"remat": case.remat, "compiled": case.compiled, "kernels": case.kernels, "prefetch": case.prefetch}
    how |= {} if in_plan else {"reshard": case.reshard}
    made: dict[str, Any] = {"micro_batches": case.micro_batches, "donate": case.donate}
    (made if takes(make, "update") else how)["update"] = case.update
    made |= {"execution": fzero.Execution(**how)} if takes(make, "execution") else how
    made |= {} if whole_plan else {"policy": policy}
    made |= {"ema_decay": case.average} if takes(make, "ema_decay") else {}
    made |= {"nvme" if takes(make, "nvme") else "space": nvme}
    # Low enough that steps are skipped, in runs whose loss goes up and down.
    judged = fzero.Spike(sigmas=0.5, window=8, warmup=4) if case.spike else None
    made |= {"spike": judged} if takes(make, "spike") else {"skip": fzero.Skip(spike=judged)}
    step = make(loss_fn, tx, plan, *given, **made)

    spec_options = {"ema": bool(case.average)} if takes(state_specs, "ema") else {}
    spec_options |= {"spike": case.spike} if takes(state_specs, "spike") else {}
    specs = state_specs(plan, tx, *(() if whole_plan else (policy,)), **spec_options)
    return Run(step, state, specs, nvme.close if nvme is not None else lambda: None)


def batch_of(i: int, case: Case, mesh: Any) -> Any:
    """This rank's rows of the batch of step i."""
    g = torch.Generator().manual_seed(i)
    tokens, targets = (torch.randint(0, V, (ROWS, T), generator=g) for _ in range(2))
    mask = torch.rand(ROWS, T, generator=g) < 0.8
    batch = {"tokens": tokens, "targets": targets, "mask": mask}
    return fzero.local_batch(batch, mesh, case.micro_batches)


def make_mesh(sizes: dict[str, int]) -> Any:
    """The mesh of these sizes."""
    return fzero.make_mesh(sizes, device="cpu") if sizes else fzero.one_process()


def shards(state: Any, specs: Any) -> Iterator[tuple[str, torch.Tensor, tuple[tuple[str, ...], ...]]]:
    """(normalised name, this rank's tensor, axes that shard each dim) of all leaves of a state that are compared."""
    by_name = named_leaves(specs)
    for name, leaf in named_leaves(state).items():
        if (plain := plain_name(name)) is not None:
            yield plain, leaf if isinstance(leaf, torch.Tensor) else leaf.tensor(), by_name[name].dims


# Pattern -> name that both forms share; "" where a leaf is left out.
NAMES = (
    (r"^extra/loss(/|$).*", ""),  # statistics of the loss: kept always, or where asked for
    (r"^extra/ema/", "average/"),
    # What `optim.with_average` keeps, and the optimizer's own state beside it.
    (r"^opt_state/average/", "average/"),
    (r"^opt_state/(inner|state|tx)/", "opt_state/"),
)


def plain_name(name: str) -> str | None:
    """The name of a state's leaf, the same in both forms; None for one that is not compared."""
    for pattern, to in NAMES:
        if re.search(pattern, name):
            return re.sub(pattern, to, name) or None
    return name
