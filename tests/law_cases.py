"""What the laws are applied to: tiny models, optimizers, batches, and how they are run."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fzero
from fzero import TrainState, models, optim
from fzero.core import precision, prng, pytree
from fzero.models.layers import embed_tokens

F64 = torch.float64
FP64 = precision.fp64()
MESH = fzero.one_process()
V, D, L, T, ROWS = 17, 8, 3, 6, 8


class Case(NamedTuple):
    """Something to train: a Model, or a plain loss function and its parameters."""

    loss_fn: Any
    source: Any  # what init_state is given: the Model, or the parameter tree


def plain_loss(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss function as a user writes it: two of its leaves share one gradient, and that of a third is one element
    expanded."""
    x = params["embed"]["tokens"][batch["tokens"]] * params["blocks"]["scale"].sum(0)
    for w in params["blocks"]["w_a"] + params["blocks"]["w_b"]:
        x = x + torch.tanh(x @ w)
    logits = x @ (params["head"]["w"] + params["head"]["twin"]).T
    nats = torch.logsumexp(logits, -1) - torch.gather(logits, -1, batch["targets"][..., None])[..., 0]
    num_tokens = batch["mask"].sum()
    return (nats * batch["mask"]).sum() + 0.1 * num_tokens.to(nats.dtype) * params["head"]["offset"].sum(), num_tokens


def plain_params() -> Any:
    shapes = {"embed": {"tokens": (V, D)}, "blocks": {"w_a": (2, D, D), "w_b": (2, D, D), "scale": (2, D)}}
    shapes["head"] = {"w": (V, D), "twin": (V, D), "offset": (3,)}
    key = prng.key(7)
    draw = lambda name, shape: 0.5 * prng.normal(prng.fold_in(key, name), shape, dtype=F64)  # noqa: E731
    return {top: {name: draw(f"{top}/{name}", shape) for name, shape in group.items()} for top, group in shapes.items()}


# Every option of a Llama but the norms of OLMo 2; two of three layers have windows and a RoPE of their own.
GEMMA = {
    "norms": "both",
    "norm_offset": True,
    "qk_norm": True,
    "activation": "gelu",
    "embed_scaled": True,
    "score_dim": 6,
    "score_cap": 2.0,
    "logit_cap": 3.0,
    "tied": True,
    "pattern": "2*window:3@100,full",
    "rope_scaling": models.RopeScaling.linear(4.0),
}
GPT_OSS = {
    "pattern": "window:5,full",
    "activation": "clamped",
    "rope_scaling": models.RopeScaling(4.0, 1.0, 8.0, 16, "yarn"),
    **dict.fromkeys(("qkv_bias", "out_bias", "sinks", "expert_bias"), True),
}
OLMO2 = {"norms": "out", "qk_norm": True, "wide_qk_norm": True}


def config_of(kind: str, *, dropout: float = 0.1, **changes: Any) -> Any:
    """Sizes of a tiny model; the initial weights are wide so that a mistake in any part shows."""
    sizes = {"vocab_size": V, "max_len": 16, "d_model": D, "n_layers": L, "d_ff": 12}
    if kind == "mlp":
        return models.MLPConfig(**{**sizes, **changes})
    sizes |= {"n_heads": 2, "dropout": dropout, "init_std": 0.5}
    if kind == "gpt2":
        return models.GPT2Config(**{**sizes, **changes})
    if kind == "deepseek":
        heads = {"q_rank": 6, "kv_rank": 5, "nope_dim": 4, "rope_dim": 2, "value_dim": 3}
        experts = {"n_experts": 6, "top_k": 2, "n_groups": 3, "top_groups": 2, "d_expert": 4, "routed_scale": 1.5}
        return models.DeepSeekConfig(**{**sizes, **heads, **experts, "n_dense": 1, "balance_coef": 0.1, **changes})
    sizes |= {"n_kv_heads": 1}
    if kind == "gemma":
        return models.LlamaConfig(**{**sizes, **GEMMA, **changes})
    if kind == "llama":
        return models.LlamaConfig(
            **{**sizes, "rope_scaling": models.RopeScaling(8.0, 1.0, 4.0, 16), "tied": True, **changes}
        )
    if kind not in ("moe dropless", "moe capacity", "gpt-oss"):
        raise ValueError(f"no sizes of {kind}; add them here")
    sizes |= {"n_experts": 3, "top_k": 2, "capacity_factor": 1.0 if kind == "moe capacity" else 0.0}
    sizes |= GPT_OSS if kind == "gpt-oss" else {}
    return models.MoEConfig(**{**sizes, **changes})


MODELS = ("gpt2", "llama", "moe dropless", "moe capacity", "mlp")
CASES = (*MODELS, "plain function")


def encoder_and_decoder(c: models.MLPConfig) -> models.Model:
    """A model of two stacks: the second begins with the tokens' embedding beside what the first has made of them."""
    mlp = models.mlp(c)

    def init(make: Any) -> Any:
        renamed = lambda to: lambda name, *rest, **more: make(name.replace("blocks/", f"{to}/"), *rest, **more)  # noqa: E731
        first, second = (mlp.init(renamed(f"blocks_{part}")) for part in ("encoder", "decoder"))
        join = {"w": make("join_decoder/w", (c.d_model, c.d_model), 0.5)}
        blocks = {"blocks_encoder": first["blocks"], "blocks_decoder": second["blocks"], "join_decoder": join}
        return {"embed": first["embed"], **blocks, "head": first["head"]}

    def join(params: Any, x: Any, batch: Any, ctx: Any) -> Any:
        embedded = embed_tokens(params["embed"]["tokens"], batch, ctx)
        return {"x": embedded, "memory": torch.tanh(x @ params["join_decoder"]["w"].to(x.dtype))}

    def decode(p: Any, x: Any, ctx: Any) -> Any:
        number = 1.0 + ctx.layer.to(x["x"].dtype) / 10  # so that a wrong number shows
        return {"x": mlp.block(p, x["x"] + number * x["memory"], ctx), "memory": x["memory"]}

    return models.Model(
        config=c,
        init=init,
        embed=mlp.embed,
        block={"blocks_encoder": mlp.block, "blocks_decoder": decode},
        head=lambda params, x, batch, ctx: mlp.head(params, x["x"], batch, ctx),
        logits=lambda params, x, ctx: mlp.logits(params, x["x"], ctx),
        rules=lambda mesh: (*mlp.rules(mesh), (r"^join_decoder/w$", "[D, D]")),
        shared=("embed/tokens",),
        join={"blocks_decoder": join},
    )


def case_of(name: str, **changes: Any) -> Case:
    if name == "plain function":
        return Case(plain_loss, plain_params())
    if name == "encoder and decoder":
        model = encoder_and_decoder(config_of("mlp", **changes))
        return Case(model, model)
    model = models.build(config_of(name, **changes))
    return Case(model, model)


def muon_and_adamw(lr: Any) -> optim.GradientTransformation:
    parts = {"muon": optim.muon(lr, ns_dtype=F64), "adamw": optim.adamw(lr)}
    return optim.by_label(parts, ((r"^blocks/(.*/)?w_", "muon"), (".*", "adamw")))


# name -> (rate -> transformation, trees of the parameters' size in its state)
OPTIMIZERS: dict[str, tuple[Callable[[Any], optim.GradientTransformation], int | None]] = {
    "sgd": (lambda lr: optim.sgd(lr), 0),
    "sgd momentum": (lambda lr: optim.sgd(lr, 0.9, nesterov=True, weight_decay=0.1), 1),
    "adamw": (lambda lr: optim.adamw(lr, weight_decay=0.1, mask=optim.decay_matrices), 2),
    "adam": (
        lambda lr: optim.adam(lr, eps=1e-5),
        2,
    ),  # above the rounding of gradients that are 0, as those of GPT-2's key biases
    "lion": (lambda lr: optim.lion(lr, weight_decay=0.1), 1),
    "lamb": (lambda lr: optim.lamb(lr, weight_decay=0.1), 2),
    "adafactor": (lambda lr: optim.adafactor(lr), None),
    "muon by label": (muon_and_adamw, None),
    "clip and adamw": (lambda lr: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(lr, weight_decay=0.1)), 2),
}


def batch_of(seed: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Packed sequences with an uneven mask; rows 2 and 3 (a micro-batch of two) and row 5 count no token at all."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, T, generator=g) < 0.7
    mask[2:4], mask[5:6] = False, False
    mask[0], mask[1, 1:] = True, False
    starts = torch.rand(rows, T, generator=g) < 0.3
    tokens, targets = (torch.randint(0, V, (rows, T), generator=g) for _ in range(2))
    return {"tokens": tokens, "targets": targets, "mask": mask, "documents": starts.int().cumsum(1)}


def step_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a step by name, those of its Execution in one."""
    how = {field.name: options[field.name] for field in dataclasses.fields(fzero.Execution) if field.name in options}
    return {**{name: value for name, value in options.items() if name not in how}, "execution": fzero.Execution(**how)}


def make(case: Case, tx: optim.GradientTransformation, **options: Any) -> tuple[Callable, TrainState]:
    """A train step and the state before the first step; with `average`, of the optimizer with that decay around it."""
    decay = options.pop("average", 0.0)
    tx = optim.with_average(tx, decay) if decay else tx
    plan = fzero.zero_plan(0, case.source, MESH, policy=options.pop("policy", FP64))
    state = fzero.init_state(case.source, tx, plan, seed=3)
    return fzero.make_train_step(case.loss_fn, tx, plan, **step_options(options)), state


def run(case: Case, tx: optim.GradientTransformation, steps: int = 3, **options: Any) -> tuple[TrainState, list[Any]]:
    """The state and all metrics after some steps, the parameters having moved."""
    step, state = make(case, tx, **options)
    start, log = clone(state.params), []
    for i in range(steps):
        state, metrics = step(state, batch_of(i))
        log.append(metrics)
    assert max(float((a - b).abs().max()) for a, b in zip(pytree.leaves(start), pytree.leaves(state.params))) > 1e-3, (
        "nothing moved"
    )
    return state, log


def clone(tree: Any) -> Any:
    return pytree.map(torch.clone, tree)
