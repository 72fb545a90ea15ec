"""From a RunConfig to the functions of a run: mesh, model, plan, optimizer, policy, steps; and what the run needs of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from fzero import models, optim, pytree
from fzero.autodiff import Remat
from fzero.config import Optim, RunConfig, family_of
from fzero.models import Model, MoEConfig
from fzero.optim import GradientTransformation, Schedule, decay_matrices
from fzero.precision import POLICIES, Policy, fp16
from fzero.pytree import Tree
from fzero.sharding import Mesh, Plan, make_mesh, zero_plan
from fzero.train import TrainState, init_state, make_eval_step, make_train_step

BLOCK_MATRICES = r"^blocks/(.*/)?w_"  # muon's; the router and everything outside the blocks are AdamW's


class Program(NamedTuple):
    """What a config means, as values."""

    config: RunConfig
    mesh: Mesh
    model: Model
    plan: Plan
    tx: GradientTransformation
    schedule: Schedule
    policy: Policy
    train_step: Callable[[TrainState, Any], Any]
    eval_step: Callable[[Tree, Any], Any]


def build(config: RunConfig) -> Program:
    """The program of a config whose "auto" values are settled (see fzero.doctor.settle); no parameter is made.

    Raises ValueError for a mesh that does not fit the processes.
    """
    assert "auto" not in (config.precision.policy, config.train.compiled), "settle the config first"
    mesh = make_mesh(config.mesh)
    model = models.build(config.model)
    plan = zero_plan(config.zero, model, mesh)
    policy = make_policy(config)
    t = config.train
    tx = make_optimizer(config.optim, t.steps)
    train_step = make_train_step(
        model,
        tx,
        plan,
        mesh,
        policy=policy,
        micro_batches=t.batch // t.micro_batch,
        remat=t.remat,
        compiled=bool(t.compiled),
        ema_decay=t.ema_decay,
    )
    eval_step = make_eval_step(model, mesh, policy=policy, compiled=bool(t.compiled))
    schedule = make_schedule(config.optim, config.optim.lr, t.steps)
    return Program(config, mesh, model, plan, tx, schedule, policy, train_step, eval_step)


def first_state(program: Program, params: Tree | None = None) -> TrainState:
    """The state before the first step, drawn from the config's seed, or around the given parameters."""
    config = program.config.train
    start = program.model if params is None else params
    ema = config.ema_decay > 0
    return init_state(start, program.tx, program.plan, program.mesh, seed=config.seed, policy=program.policy, ema=ema)


def make_policy(config: RunConfig) -> Policy:
    """The policy of dtypes of a config."""
    name = config.precision.policy
    return fp16(config.precision.loss_scale) if name == "fp16" else POLICIES[name]()


def make_schedule(config: Optim, peak: float, steps: int) -> Schedule:
    """The learning rate of a run of `steps` steps with this peak."""
    s = config.schedule
    after, end = steps - s.warmup_steps, peak * s.end
    if s.name == "one_cycle":
        return optim.one_cycle(peak, steps, s.rise)
    if s.name == "wsd":
        return optim.wsd(peak, steps, s.warmup_steps, s.decay_steps, end=end, decay=s.decay)
    body = {
        "constant": lambda: optim.constant(peak),
        "linear": lambda: optim.linear(peak, end, after),
        "cosine": lambda: optim.cosine(peak, after, end),
        "polynomial": lambda: optim.polynomial(peak, end, after, s.power),
        "exponential": lambda: optim.exponential(peak, s.end, after),
        "inverse_sqrt": lambda: optim.inverse_sqrt(peak, max(1, s.warmup_steps)),
    }[s.name]()
    return optim.warmup(body, s.warmup_steps)


def make_optimizer(config: Optim, steps: int) -> GradientTransformation:
    """The optimizer of a config: clipping, then the named one with its schedule."""
    lr, decay = make_schedule(config, config.lr, steps), {"weight_decay": config.weight_decay, "mask": decay_matrices}
    betas = (config.beta1, config.beta2)

    def block_matrices() -> GradientTransformation:
        # In blocks every weight matrix decays, so muon itself needs no mask.
        muon = optim.muon(lr, config.momentum, nesterov=config.nesterov, weight_decay=config.weight_decay, adjust=config.adjust)
        rest = optim.adamw(make_schedule(config, config.lr_rest, steps), *betas, config.eps, **decay)
        return optim.by_label({"muon": muon, "adamw": rest}, ((BLOCK_MATRICES, "muon"), (".*", "adamw")))

    tx = {
        "adamw": lambda: optim.adamw(lr, *betas, config.eps, **decay),
        "adam": lambda: optim.adam(lr, *betas, config.eps, **decay),
        "lamb": lambda: optim.lamb(lr, *betas, config.eps, **decay),
        "lion": lambda: optim.lion(lr, *betas, **decay),
        "sgd": lambda: optim.sgd(lr, config.momentum, nesterov=config.nesterov, **decay),
        "adafactor": lambda: optim.adafactor(lr, **decay),
        "muon": block_matrices,
    }[config.name]()
    return optim.chain(optim.clip_by_global_norm(config.clip), tx) if config.clip else tx


# -- what it costs


def num_params(program: Program) -> int:
    """The number of parameters."""
    return sum(leaf.numel() for leaf in pytree.leaves(program.plan.like))


def flop_per_token(program: Program) -> float:
    """The model FLOPs of training on one token: 6 N + 12 L T D.

    N: parameters that are multiplied with (the head also where it is tied to the embedding; looked-up rows are not; of a token's experts,
    the top_k). The second term is attention's, without a discount for causality, with D the dims of all heads and T = seq_len.
    Ref: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    c, active = program.model.config, 0.0
    for name, leaf in pytree.named_leaves(program.plan.like).items():
        looked_up = name == "embed/positions" or (name == "embed/tokens" and not getattr(c, "tied", False))
        share = c.top_k / c.n_experts if isinstance(c, MoEConfig) and "/moe/w_" in name else 1.0
        active += 0.0 if looked_up else share * leaf.numel()
    width = c.n_heads * getattr(c, "key_dim", c.d_model // c.n_heads) if hasattr(c, "n_heads") else 0
    return 6.0 * active + 12.0 * c.n_layers * program.config.data.seq_len * width


class Memory(NamedTuple):
    """Bytes a run needs."""

    state: int  # parameters, master weights, optimizer state, average: exact
    grads: int  # of one micro-batch, and their sum: exact
    activations: int  # of one micro-batch: a rough bound


def memory_needed(program: Program) -> Memory:
    """The bytes of a run of `program`, without making a tensor of it."""
    policy, t, c = program.policy, program.config.train, program.model.config
    whole = pytree.map(lambda leaf: leaf.to(policy.state), program.plan.like)
    copies = 1 + bool(t.ema_decay)
    state = tree_bytes(program.tx.init(whole)) + copies * tree_bytes(whole)
    n = num_params(program)
    state += n * policy.param.itemsize if policy.has_master else 0
    sums = t.batch > t.micro_batch or policy.accumulate != policy.param
    grads = n * (policy.param.itemsize + (policy.accumulate.itemsize if sums else 0))
    remat = Remat.parse(t.remat)
    wide = c.d_ff * (c.top_k if isinstance(c, MoEConfig) else 1)
    layer = int((10 * c.d_model + 4 * wide) * remat.budget) + c.d_model
    kept = c.n_layers * layer if not remat.every else c.d_model * c.n_layers // remat.every + remat.every * layer
    tokens = t.micro_batch * program.config.data.seq_len
    logits = 2 * 4 * min(tokens, 1024) * c.vocab_size
    return Memory(state, grads, tokens * kept * policy.compute.itemsize + logits)


def tree_bytes(tree: Tree) -> int:
    """The bytes of the tensors of a tree."""
    return sum(leaf.numel() * leaf.dtype.itemsize for leaf in pytree.leaves(tree))


def check_memory(program: Program, available: int) -> None:
    """Raise ValueError saying what is needed, what there is and what would fit, where a run does not fit into `available` bytes."""
    need = memory_needed(program)
    if not program.config.train.memory_check or sum(need) <= available:
        return
    c, n = program.config, num_params(program)
    fixed = need.state + need.grads
    if fixed <= available:
        hint = "a smaller --micro-batch, a shorter --seq-len or --remat full needs less of them"
    else:
        fitting = [
            (models.num_params(models.build(p())), name) for name, p in models.PRESETS.items() if family_of(p()) == family_of(c.model)
        ]
        fitting = [(size, name) for size, name in fitting if size * fixed / n < 0.9 * available]
        hint = (
            f"the largest preset of this kind that fits is {max(fitting)[1]}"
            if fitting
            else "a smaller model (--set model.n_layers=...) fits"
        )
    parts = f"state {gigabytes(need.state)}, gradients {gigabytes(need.grads)}, activations about {gigabytes(need.activations)}"
    raise ValueError(
        f"{c.preset or 'the model'} ({n / 1e9:.3g}B parameters) needs {gigabytes(sum(need))} to train ({parts}) and "
        f"{gigabytes(available)} are available; {hint}; --set train.memory_check=false tries anyway"
    )


def gigabytes(size: float) -> str:
    """A number of bytes in words."""
    return f"{size / 1e9:,.1f} GB"


def settled(config: RunConfig, **changes: Any) -> RunConfig:
    """`config` with some values of `precision` and `train` decided."""
    compiled = changes.pop("compiled", config.train.compiled)
    return replace(config, precision=replace(config.precision, **changes), train=replace(config.train, compiled=compiled))
